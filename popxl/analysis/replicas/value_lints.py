"""Values that are easily confused: seeds, batches, shards of different values or from before an update, transposed
weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from operator import attrgetter

from popxl.analysis.replicas.axis_types import PARTIAL, REPLICATED, VARYING, AxisType
from popxl.analysis.replicas.report import Finding, Report
from popxl.analysis.replicas.variable_types import begins_different
from popxl.base.group_by import group_by
from popxl.core.recording import Op
from popxl.core.tensor import Constant, Tensor, Variable
from popxl.core.traits import is_call
from popxl.graph import Graph


def seed_lints(report: Report, of_data: Set[int], fed_alike: Set[int]) -> Iterator[Finding]:
    """Dropouts with equal seeds for different data per replica, or different seeds for equal data.

    Args:
        of_data: positions of the axes along which gradients are reduced.
        fed_alike: axes along which the program states that replicas have the same feeds.
    """
    mesh = report.known_mesh
    for op in report.index.dropouts:
        drops = op.kind.drops
        if drops is None or not op.attributes[drops.ratio] or op.graph.gradient_of is not None:
            continue
        t, seed = op.inputs[0], op.inputs[_seed_position(op)]
        if _is_of_rows_alike(op, t):
            continue
        held = [*enumerate(zip(report.types.get(t, ()), report.types.get(seed, ()), strict=False))]
        begun = _seed_variable(seed)
        alike = {i for i in range(len(mesh.sizes)) if begun is not None and not begins_different(mesh, begun, i)}
        tied = [i for i, (x, s) in held if i in of_data and x.kind is VARYING and (s.kind is REPLICATED or i in alike)]
        apart = [i for i, (x, s) in held if i in fed_alike and x.kind is REPLICATED and s.kind is VARYING]
        if tied:
            yield report.finding(
                "same seed", op, seed, tied,
                f"each replica along {report.along(tied)} has its own `{t.path}`, and all drop the same elements, as "
                f"`{seed.path}` is the same. Make seeds with `popxl.create_seeds(..., replicas=...)`, one for each.",
            )  # fmt: skip
        if apart:
            yield report.finding(
                "different seeds", op, seed, apart,
                f"`{t.path}` is the same on all replicas along {report.along(apart)}, and each drops other elements, "
                f"as it has its own `{seed.path}`. Let them share the seed.",
            )  # fmt: skip


def _is_of_rows_alike(op: Op, t: Tensor) -> bool:
    """Whether an op drops the same elements of all rows, so that those of other replicas may be meant, too."""
    mask = op.attributes.get("shape")
    return mask is not None and t.rank > 0 and t.shape[0] > 1 and (len(mask) < t.rank or mask[0] == 1)


def noise_lints(report: Report, of_data: Set[int]) -> Iterator[Finding]:
    """Random numbers that are equal on all replicas, combined with data of each replica.

    Args:
        of_data: positions of the axes along which gradients are reduced.
    """
    masks = [op for op in report.index.dropouts if isinstance(op.inputs[0], Constant)]
    for graph, draws in group_by([*report.index.draws, *masks], attrgetter("graph")).items() if of_data else ():
        if graph.gradient_of is None:
            drawn = {t: op.inputs[_seed_position(op)] for op in draws for t in op.outputs}
            yield from _shared_noise(report, graph, drawn, of_data, set(), set())


def _seed_position(op: Op) -> int:
    return 0 if op.kind.drops is None else op.operand_names().index(op.kind.drops.seed)


def _shared_noise(
    report: Report,
    graph: Graph,
    drawn: dict[Tensor, Tensor],
    of_data: Set[int],
    reported: set[Tensor],
    visited: set[tuple[Graph, frozenset[tuple[Tensor, Tensor]]]],
) -> Iterator[Finding]:
    """Uses of noise with data of each replica, in a graph and those that it calls.

    Args:
        drawn: noise, with its seed.
        reported: seeds of which something was found.
        visited: called graphs with the noise that they were given: graphs may be called in many ways.
    """
    for op in graph.ops:
        for run in op.runs if op.kind.graphs else ():
            inner = {t: drawn[given] for t, given in zip(run.inputs, run.given, strict=False) if given in drawn}
            call = run.graph, frozenset(inner.items())
            if inner and run.graph.gradient_of is None and call not in visited:
                visited.add(call)
                yield from _shared_noise(report, run.graph, inner, of_data, reported, visited)
        noise = [t for t in op.inputs if t in drawn]
        if not noise or op.kind.contracts is not None or op.kind.graphs or op.kind.between_replicas:
            continue
        seed, size = drawn[noise[0]], max(t.nelms for t in noise)
        others = {t: report.types[t] for t in op.inputs if t not in drawn and t in report.types}
        own = [t for t in others if t.nelms == size > 1]
        alike = [i for i in of_data if report.types[seed][i].kind <= REPLICATED]
        tied = sorted(i for i in alike if any(_is_own_data(others[t][i]) for t in own))
        if tied and seed not in reported:
            reported.add(seed)
            t = next(t for t in own if _is_own_data(others[t][tied[0]]))
            yield report.finding(
                "same seed", op, seed, tied,
                f"each replica along {report.along(tied)} has its own `{t.path}`, and all combine it with the same "
                f"random numbers, as `{seed.path}` is the same. Give each replica a seed of its own.",
            )  # fmt: skip
        elif all(along.kind <= REPLICATED for held in others.values() for along in held):
            drawn |= dict.fromkeys(op.outputs, seed)


def _is_own_data(along: AxisType) -> bool:
    """Whether replicas have different values, for reasons other than their variables."""
    return along.kind is VARYING and along.own is None


def _seed_variable(seed: Tensor) -> Variable | None:
    """The variable that a seed is made of, unless that has only zeros yet, which the host may replace."""
    t = seed
    while not isinstance(t, Variable):
        op, sites = t.producer, t.graph.call_sites
        before = [each for each in op.inputs if each.dtype is seed.dtype] if op is not None else []
        if op is None and sites and is_call(sites[0]) and t in t.graph.inputs:
            before = [sites[0].inputs[t.graph.inputs.index(t)]]
        if not before:
            return None
        t = before[0]
    return t if t.piece is None and t.numbers().any() else None


def stale_shards(report: Report) -> Iterator[Finding]:
    """Gathered values of sharded variables that products or calls use after the shards were changed."""
    for graph, gathers in group_by(filter(_gathers_shards, report.index.moves), attrgetter("graph")).items():
        yield from _stale(report, graph, {*gathers})


def _gathers_shards(op: Op) -> bool:
    """Whether an op gathers a variable or graph input from its shards."""
    return op.inputs[0].origin.producer is None and op.kind.exchanged(op.attributes) == "same"


def _stale(report: Report, graph: Graph, gathers: Set[Op]) -> Iterator[Finding]:
    gathered: dict[Tensor, Op] = {}  # keyed by gathered value, and its copies
    of_pieces: dict[Tensor, list[Tensor]] = {}
    old: set[Tensor] = set()
    for op in graph.ops:
        made = next((gathered[t] for t in op.inputs if t in gathered), None)
        if op in gathers:
            gathered[op.outputs[0]] = op
            of_pieces.setdefault(op.inputs[0].origin, []).append(op.outputs[0])
        elif made is not None and _is_copy(op):
            gathered |= dict.fromkeys(op.outputs, made)
            of_pieces[made.inputs[0].origin] += op.outputs
            old.update(() if old.isdisjoint(op.inputs) else op.outputs)
        elif (op.kind.contracts or op.kind.graphs) and (stale := [t for t in op.inputs if t in old]):
            (t, *_), gather = stale, gathered[stale[0]]
            pieces, axes = gather.inputs[0].origin, report.known_mesh.axes_of(gather)
            yield report.finding(
                "stale shards", op, t, axes,
                f"`{t.path}` was gathered of `{pieces.path}` before that was changed, and is read afterwards. Gather "
                "it again.",
            )  # fmt: skip
            old.clear()
        for i in op.modified:
            old.update(of_pieces.get(op.inputs[i].origin, ()))


def unread_batches(report: Report) -> Iterator[Finding]:
    """What the host feeds to each replica, or a gradient of it, gathered where nothing but one replica's part is read.

    Excludes direct copies to a variable: all replicas may start with the value of one.
    """
    for op, load in _gathers(report):
        (t, *_), is_fed = op.inputs, _is_fed(load)
        held = report.fed if is_fed else report.types.get(t, ())
        own = [i for i in report.known_mesh.axes_of(op) if held and _is_own_data(held[i])]
        parts = _parts_read(op) if own else []
        if not parts or load is None:
            continue
        if is_fed and not all(map(_is_overwriting, (each for part in parts for each in _readers(part)))):
            yield report.finding(
                "same batch", load, t, own,
                f"each replica along {report.along(own)} is fed its own `{t.path}`, and all read that of one. "
                "Let each compute with its own.",
            )  # fmt: skip
        elif not is_fed and any(map(_is_change, parts)):
            yield report.finding(
                "same batch", op, t, own,
                f"each replica along {report.along(own)} has its own `{t.path}`, and all change a variable by that of "
                "one. Reduce it, with `ops.collectives.replicated_all_reduce`.",
            )  # fmt: skip


def fed_by_all(report: Report) -> set[int]:
    """Positions of axes along which replicas gather what the host feeds to each, and read all of it."""
    return {
        i
        for op, load in _gathers(report)
        if _is_fed(load) and any(each.op_type != "Slice" for each in _readers(op.outputs[0]))
        for i in report.known_mesh.axes_of(op)
    }


def _gathers(report: Report) -> Iterator[tuple[Op, Op | None]]:
    """Ops after which replicas have the same, such as of all parts, each with the op that produces its operand."""
    for op in report.index.moves:
        if op.kind.exchanged(op.attributes) == "same":
            yield op, _source_tensor(op.inputs[0]).producer


def _is_fed(load: Op | None) -> bool:
    return load is not None and bool(load.kind.exchange)


def _parts_read(op: Op) -> list[Tensor]:
    """The slices of a gathered value, if nothing but the part of one replica is read."""
    readers = [*_readers(op.outputs[0])]
    parts = {(each.op_type, repr(each.attributes), each.outputs[0].nelms) for each in readers if each.outputs}
    size = op.outputs[0].nelms // op.attributes["group_size"]
    if len(parts) != 1 or not all(kind == "Slice" and nelms <= size for kind, _, nelms in parts):
        return []
    return [each.outputs[0] for each in readers if each.outputs]


def _is_overwriting(op: Op) -> bool:
    """Whether an op overwrites a variable with an operand, without reading the old content."""
    return op.kind.overwrites is not None and op.kind.overwrites.forgets(op.attributes)


def _is_change(t: Tensor) -> bool:
    """Whether a value, maybe scaled, changes another in place."""
    return any(
        _is_change(op.outputs[0]) if op.op_type in _SCALING and op.outputs else op.modified and not _is_overwriting(op)
        for op in _readers(t)
    )


def shards_of_own_values(report: Report) -> Iterator[Finding]:
    """Shards that each replica takes of a different value, such as an unreduced gradient, or of a term of a sum."""
    for op in report.index.moves:
        if op.kind.exchanged(op.attributes) != "pieces":
            continue
        (t, *_), load = op.inputs, _source_tensor(op.inputs[0]).producer
        held = report.types[t]
        own = [i for i in report.known_mesh.axes_of(op) if op.outputs[0].meta_shape and _is_own_data(held[i])]
        terms = [i for i in report.known_mesh.axes_of(op) if held[i].kind is PARTIAL]
        if (own or terms) and load is not None and not load.kind.exchange:
            what = "a term of a sum," if terms else "its own"
            yield report.finding(
                "shards of different values", op, t, own or terms,
                f"each replica along {report.along(own or terms)} has {what} `{t.path}`, and takes its shard of that. "
                "Reduce the value first; `ops.collectives.replicated_reduce_scatter` does both.",
            )  # fmt: skip


def _source_tensor(t: Tensor) -> Tensor:
    """Source of a tensor before moves and casts."""
    while (op := t.producer) is not None and _is_copy(op):
        t = op.inputs[0]
    return t


def _is_copy(op: Op) -> bool:
    return op.kind.view is not None or op.op_type in ("Cast", "Identity", "Reshape")


def _readers(t: Tensor) -> Iterator[Op]:
    """Readers of a tensor, including those after a reshape or a cast."""
    for op in t.graph.ops:
        if t in op.inputs:
            if op.op_type in ("Cast", "Identity", "Reshape"):
                yield from _readers(op.outputs[0])
            else:
                yield op


def transposed_weights(report: Report) -> Iterator[Finding]:
    """Square weights whose gradient belongs to the product with their transpose, or the reverse."""
    uses: dict[Tensor, dict[tuple[Tensor, bool], Op]] = {}
    for op in report.index.products:
        weight, is_transposed = _transposed(op.inputs[1])
        if isinstance(weight, Variable) and weight.rank == 2 and weight.shape[0] == weight.shape[1]:
            uses.setdefault(weight, {})[op.inputs[0], is_transposed] = op
    for graph in {weight.graph for weight in uses}:  # the main graph, which has the variables
        for op in graph.ops:
            for i in op.modified:
                for given in op.inputs[:i] + op.inputs[i + 1 :]:
                    yield from _of_gradient(report, uses.get(op.inputs[i].origin, {}), op.inputs[i].origin, given)


def _of_gradient(
    report: Report, uses: Mapping[tuple[Tensor, bool], Op], w: Tensor, gradient: Tensor
) -> Iterator[Finding]:
    """Findings of a transposed weight gradient: `xᵀ @ dy` for the product `x @ wᵀ`, or `dyᵀ @ x` for `x @ w`."""
    while (op := gradient.producer) is not None and op.op_type in _SCALING and op.inputs[0].shape == gradient.shape:
        gradient = op.inputs[0]
    if op is None or op.kind.contracts is None:
        return
    (left, left_is_transposed), (right, right_is_transposed) = map(_transposed, op.inputs)
    for x, of_transposed in ((left, False), (right, True)):
        is_gradient = left_is_transposed and not right_is_transposed
        if is_gradient and (x, not of_transposed) in uses and (x, of_transposed) not in uses:
            now = (
                "is multiplied with transposed"
                if not of_transposed
                else "is not transposed where it is multiplied with"
            )
            yield report.finding(
                "transposed weight", uses[x, not of_transposed], w, (),
                f"`{w.path}` {now}, and the gradient that changes it, `{gradient.path}`, is that of the other product.",
            )  # fmt: skip


_SCALING = frozenset({"Cast", "Div", "Identity", "Mul", "Neg", "ReplicatedAllReduce", "ReplicatedAllReduceInplace"})


def _transposed(t: Tensor) -> tuple[Tensor, bool]:
    """Source of a matrix, with a flag for an odd number of transposes."""
    op = t.producer
    if op is not None and t.rank == 2 and tuple(op.attributes.get("permutation") or ()) == (1, 0):
        return op.inputs[0], True
    return t, False
