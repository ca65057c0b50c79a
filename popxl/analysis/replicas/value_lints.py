"""Lints of values that are easily confused: seeds, batches, stale shards, shards of different values, transposed
weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from operator import attrgetter

from popxl.analysis.replicas.axis_types import PARTIAL, REPLICATED, VARYING, AxisType
from popxl.analysis.replicas.report import Finding, Report
from popxl.analysis.replicas.variable_types import starts_different
from popxl.base.group_by import group_by
from popxl.core.recording import Op
from popxl.core.tensor import Constant, Tensor, Variable
from popxl.core.traits import is_call
from popxl.graph import Graph


def seed_lints(report: Report, data_axes: Set[int], same_feed_axes: Set[int]) -> Iterator[Finding]:
    """Dropouts with equal seeds for different data per replica, or different seeds for equal data.

    Args:
        data_axes: positions of the axes along which gradients are reduced.
        same_feed_axes: positions of the axes with equal feeds, as the program states.
    """
    mesh = report.known_mesh
    for op in report.index.dropouts:
        drops = op.kind.drops
        if drops is None or not op.attributes[drops.ratio] or op.graph.gradient_of is not None:
            continue
        t, seed = op.inputs[0], op.inputs[_seed_position(op)]
        if _drops_same_in_rows(op, t):
            continue
        pairs = [*enumerate(zip(report.types.get(t, ()), report.types.get(seed, ()), strict=False))]
        variable = _seed_variable(seed)
        equal = {i for i in range(len(mesh.sizes)) if variable is not None and not starts_different(mesh, variable, i)}
        tied = [
            i for i, (x, s) in pairs if i in data_axes and x.kind is VARYING and (s.kind is REPLICATED or i in equal)
        ]
        untied = [i for i, (x, s) in pairs if i in same_feed_axes and x.kind is REPLICATED and s.kind is VARYING]
        if tied:
            yield report.finding(
                "same seed", op, seed, tied,
                f"each replica along {report.along(tied)} has its own `{t.path}`, and all drop the same elements, as "
                f"`{seed.path}` is the same. Make seeds with `popxl.create_seeds(..., replicas=...)`, one for each.",
            )  # fmt: skip
        if untied:
            yield report.finding(
                "different seeds", op, seed, untied,
                f"`{t.path}` is the same on all replicas along {report.along(untied)}, and each drops "
                f"other elements, as it has its own `{seed.path}`. Let them share the seed.",
            )  # fmt: skip


def _drops_same_in_rows(op: Op, t: Tensor) -> bool:
    """Whether a dropout shares its mask between rows, so that sharing it between replicas may be intended."""
    mask = op.attributes.get("shape")
    return mask is not None and t.rank > 0 and t.shape[0] > 1 and (len(mask) < t.rank or mask[0] == 1)


def noise_lints(report: Report, data_axes: Set[int]) -> Iterator[Finding]:
    """Random numbers that are equal on all replicas, combined with per-replica data.

    Args:
        data_axes: positions of the axes along which gradients are reduced.
    """
    if not data_axes:
        return
    masks = [op for op in report.index.dropouts if isinstance(op.inputs[0], Constant)]
    for graph, draws in group_by([*report.index.draws, *masks], attrgetter("graph")).items():
        if graph.gradient_of is None:
            seed_of = {t: op.inputs[_seed_position(op)] for op in draws for t in op.outputs}
            yield from _shared_noise(report, graph, seed_of, data_axes, set(), set())


def _seed_position(op: Op) -> int:
    return 0 if op.kind.drops is None else op.operand_names().index(op.kind.drops.seed)


def _shared_noise(
    report: Report,
    graph: Graph,
    seed_of: dict[Tensor, Tensor],
    data_axes: Set[int],
    reported: set[Tensor],
    visited: set[tuple[Graph, frozenset[tuple[Tensor, Tensor]]]],
) -> Iterator[Finding]:
    """Uses of equal noise with per-replica data, in a graph and its callees.

    Args:
        seed_of: the seed of each noise tensor.
        reported: seeds with findings.
        visited: called graphs, with their noise inputs.
    """
    for op in graph.ops:
        for run in op.runs:
            inner = {t: seed_of[outer] for t, outer in run.bindings if outer in seed_of}
            call = run.graph, frozenset(inner.items())
            if inner and run.graph.gradient_of is None and call not in visited:
                visited.add(call)
                yield from _shared_noise(report, run.graph, inner, data_axes, reported, visited)
        noise = [t for t in op.inputs if t in seed_of]
        if not noise or op.kind.contracts is not None or op.kind.graphs or op.kind.between_replicas:
            continue
        seed, size = seed_of[noise[0]], max(t.nelms for t in noise)
        other_types = {t: report.types[t] for t in op.inputs if t not in seed_of and t in report.types}
        candidates = [t for t in other_types if t.nelms == size > 1]
        same_seed_axes = [i for i in data_axes if report.types[seed][i].kind <= REPLICATED]
        axes = sorted(i for i in same_seed_axes if any(_is_own_data(other_types[t][i]) for t in candidates))
        if axes and seed not in reported:
            reported.add(seed)
            t = next(t for t in candidates if _is_own_data(other_types[t][axes[0]]))
            yield report.finding(
                "same seed", op, seed, axes,
                f"each replica along {report.along(axes)} has its own `{t.path}`, and all combine it with the same "
                f"random numbers, as `{seed.path}` is the same. Give each replica a seed of its own.",
            )  # fmt: skip
        elif all(along.kind <= REPLICATED for type_ in other_types.values() for along in type_):
            seed_of |= dict.fromkeys(op.outputs, seed)


def _is_own_data(along: AxisType) -> bool:
    """Whether values differ between replicas by more than per-replica variables."""
    return along.kind is VARYING and along.per_replica is None


def _seed_variable(seed: Tensor) -> Variable | None:
    """The variable that a seed derives from; `None` for zeros, which the host may replace."""
    t = seed
    while not isinstance(t, Variable):
        op, call_sites = t.producer, t.graph.call_sites
        sources = [operand for operand in op.inputs if operand.dtype is seed.dtype] if op is not None else []
        if op is None and call_sites and is_call(call_sites[0]) and t in t.graph.inputs:
            sources = [call_sites[0].inputs[t.graph.inputs.index(t)]]
        if not sources:
            return None
        t = sources[0]
    return t if t.piece is None and t.numbers().any() else None


def stale_shards(report: Report) -> Iterator[Finding]:
    """Gathered copies of sharded variables that are read after an update of the shards."""
    for graph, gathers in group_by(filter(_gathers_shards, report.index.moves), attrgetter("graph")).items():
        yield from _stale_in_graph(report, graph, {*gathers})


def _gathers_shards(op: Op) -> bool:
    """Whether an op gathers the shards of a variable or graph input."""
    return op.inputs[0].origin.producer is None and op.kind.exchanged(op.attributes) == "same"


def _stale_in_graph(report: Report, graph: Graph, gathers: Set[Op]) -> Iterator[Finding]:
    gathered: dict[Tensor, Op] = {}  # keyed by gathered value, and its copies
    copies_of: dict[Tensor, list[Tensor]] = {}
    outdated: set[Tensor] = set()
    for op in graph.ops:
        source_gather = next((gathered[t] for t in op.inputs if t in gathered), None)
        if op in gathers:
            gathered[op.outputs[0]] = op
            copies_of.setdefault(op.inputs[0].origin, []).append(op.outputs[0])
        elif source_gather is not None and _is_copy(op):
            gathered |= dict.fromkeys(op.outputs, source_gather)
            copies_of[source_gather.inputs[0].origin] += op.outputs
            outdated.update(() if outdated.isdisjoint(op.inputs) else op.outputs)
        elif (op.kind.contracts or op.kind.graphs) and (stale := [t for t in op.inputs if t in outdated]):
            (t, *_), gather = stale, gathered[stale[0]]
            variable, axes = gather.inputs[0].origin, report.known_mesh.axes_of(gather)
            yield report.finding(
                "stale shards", op, t, axes,
                f"`{t.path}` was gathered of `{variable.path}` before that was changed, and is read afterwards. Gather "
                "it again.",
            )  # fmt: skip
            outdated.clear()
        for i in op.modified:
            outdated.update(copies_of.get(op.inputs[i].origin, ()))


def unread_batches(report: Report) -> Iterator[Finding]:
    """Gathers of per-replica feeds or gradients from which all replicas read the slice of one.

    Excludes direct copies to a variable: all replicas may start with the value of one.
    """
    for op, load in _gathers(report):
        (t, *_), is_fed = op.inputs, _is_fed(load)
        type_ = report.fed if is_fed else report.types.get(t, ())
        data_axes = [i for i in report.known_mesh.axes_of(op) if type_ and _is_own_data(type_[i])]
        slices = _read_slices(op) if data_axes else []
        if not slices or load is None:
            continue
        if is_fed and not all(map(_is_overwriting, (reader for slice_ in slices for reader in _readers(slice_)))):
            yield report.finding(
                "same batch", load, t, data_axes,
                f"each replica along {report.along(data_axes)} is fed its own `{t.path}`, and all read that of one. "
                "Let each compute with its own.",
            )  # fmt: skip
        elif not is_fed and any(map(_is_change, slices)):
            yield report.finding(
                "same batch", op, t, data_axes,
                f"each replica along {report.along(data_axes)} has its own `{t.path}`, and all change a variable by "
                "that of one. Reduce it, with `ops.collectives.replicated_all_reduce`.",
            )  # fmt: skip


def gathered_feed_axes(report: Report) -> set[int]:
    """Positions of axes along which replicas gather their feeds, and read all of them."""
    return {
        i
        for op, load in _gathers(report)
        if _is_fed(load) and any(reader.op_type != "Slice" for reader in _readers(op.outputs[0]))
        for i in report.known_mesh.axes_of(op)
    }


def _gathers(report: Report) -> Iterator[tuple[Op, Op | None]]:
    """Gathers and broadcasts, with the op that produces the operand."""
    for op in report.index.moves:
        if op.kind.exchanged(op.attributes) == "same":
            yield op, _source_tensor(op.inputs[0]).producer


def _is_fed(load: Op | None) -> bool:
    return load is not None and bool(load.kind.exchange)


def _read_slices(op: Op) -> list[Tensor]:
    """Slices of a gathered value, if all readers take the slice of one replica."""
    readers = [*_readers(op.outputs[0])]
    kinds = {(reader.op_type, repr(reader.attributes), reader.outputs[0].nelms) for reader in readers if reader.outputs}
    size = op.outputs[0].nelms // op.attributes["group_size"]
    if len(kinds) != 1 or not all(kind == "Slice" and nelms <= size for kind, _, nelms in kinds):
        return []
    return [reader.outputs[0] for reader in readers if reader.outputs]


def _is_overwriting(op: Op) -> bool:
    """Whether an op overwrites a variable with an operand, without reading the old content."""
    return op.kind.overwrites is not None and op.kind.overwrites.forgets(op.attributes)


def _is_change(t: Tensor) -> bool:
    """Whether a value, possibly scaled, updates another in place."""
    return any(
        _is_change(op.outputs[0]) if op.op_type in _SCALING and op.outputs else op.modified and not _is_overwriting(op)
        for op in _readers(t)
    )


def shards_of_own_values(report: Report) -> Iterator[Finding]:
    """Shards of per-replica values, such as unreduced gradients, or of terms of a sum."""
    for op in report.index.moves:
        if op.kind.exchanged(op.attributes) != "pieces" or op.inputs[0] not in report.types:  # constants have no types
            continue
        (t, *_), load = op.inputs, _source_tensor(op.inputs[0]).producer
        type_ = report.types[t]
        data_axes = [i for i in report.known_mesh.axes_of(op) if op.outputs[0].meta_shape and _is_own_data(type_[i])]
        terms = [i for i in report.known_mesh.axes_of(op) if type_[i].kind is PARTIAL]
        if (data_axes or terms) and load is not None and not load.kind.exchange:
            description = "a term of a sum," if terms else "its own"
            yield report.finding(
                "shards of different values", op, t, data_axes or terms,
                f"each replica along {report.along(data_axes or terms)} has {description} `{t.path}`, and takes its "
                "shard of that. Reduce the value first; `ops.collectives.replicated_reduce_scatter` does both.",
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
    """Square weights that are updated by the gradient for their transpose, or the reverse."""
    uses: dict[Tensor, dict[tuple[Tensor, bool], Op]] = {}
    for op in report.index.products:
        weight, is_transposed = _transposed(op.inputs[1])
        if isinstance(weight, Variable) and weight.rank == 2 and weight.shape[0] == weight.shape[1]:
            uses.setdefault(weight, {})[op.inputs[0], is_transposed] = op
    main_graphs = {weight.graph for weight in uses}  # one at most, which has the variables
    updates = ((op, i) for graph in main_graphs for op in graph.ops for i in op.modified)
    for op, i in updates:
        w = op.inputs[i].origin
        for gradient in op.inputs[:i] + op.inputs[i + 1 :]:
            yield from _transposed_gradient(report, uses.get(w, {}), w, gradient)


def _transposed_gradient(
    report: Report, uses: Mapping[tuple[Tensor, bool], Op], w: Tensor, gradient: Tensor
) -> Iterator[Finding]:
    """Findings of a transposed weight gradient: `xᵀ @ dy` for the product `x @ wᵀ`, or `dyᵀ @ x` for `x @ w`."""
    while (op := gradient.producer) is not None and op.op_type in _SCALING and op.inputs[0].shape == gradient.shape:
        gradient = op.inputs[0]
    if op is None or op.kind.contracts is None:
        return
    (a, a_is_transposed), (b, b_is_transposed) = map(_transposed, op.inputs)
    for x, of_transposed in ((a, False), (b, True)):
        is_gradient = a_is_transposed and not b_is_transposed
        if is_gradient and (x, not of_transposed) in uses and (x, of_transposed) not in uses:
            not_transposed = "is not transposed where it is multiplied with"
            contradiction = not_transposed if of_transposed else "is multiplied with transposed"
            yield report.finding(
                "transposed weight", uses[x, not of_transposed], w, (),
                f"`{w.path}` {contradiction}, and the gradient that changes it, `{gradient.path}`, is that of the "
                "other product.",
            )  # fmt: skip


_SCALING = frozenset({"Cast", "Div", "Identity", "Mul", "Neg", "ReplicatedAllReduce", "ReplicatedAllReduceInplace"})


def _transposed(t: Tensor) -> tuple[Tensor, bool]:
    """Source of a matrix, with a flag for an odd number of transposes."""
    op = t.producer
    if op is not None and t.rank == 2 and tuple(op.attributes.get("permutation") or ()) == (1, 0):
        return op.inputs[0], True
    return t, False
