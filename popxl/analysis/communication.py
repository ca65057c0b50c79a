"""`Communication`: transfers between replicas and IPUs in a run, derived from the graphs before compilation.

An op between replicas records its exchanges without performing them. `session.communication()` compares these with the
compiled program.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import jax.numpy as jnp

from popxl.analysis.memory import runs_of
from popxl.base.arrays import Array
from popxl.base.pages import OnPage, Page, Table, bytes_text, starred
from popxl.base.records import Record
from popxl.core.aliasing import callees_first, readers
from popxl.core.tracing import trace
from popxl.core.traits import is_call
from popxl.ops.collectives.exchanging import CollectiveBackend
from popxl.values.spec import size_in_bytes

if TYPE_CHECKING:
    from popxl.core.recording import Op
    from popxl.core.tensor import Tensor
    from popxl.graph import Graph
    from popxl.ir import Ir

COPY = "copy between IPUs"
"""Kind of a copy between IPUs."""

CollectiveKind = Literal["all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute"]


class Collective(Record):
    """Exchange of an op between replicas.

    Attributes:
        kind: `"all-reduce"`, `"reduce-scatter"`, `"all-gather"`, `"all-to-all"` or `"collective-permute"`.
        op: type of the op.
        tensor: the tensor that the op is given: its name, or its path within the graph that makes it.
        bytes: size on one replica: of the operand or of the result, whichever is larger.
        stride: distance between neighbours in a group.
        group_size: number of replicas in a group.
        groups: groups in words: the axes, where they have names.
        turns: number of executions in a run, at most.
        needed: number of executions whose result is used and not already available from an equal exchange. A compiler
            may leave out the others.
        is_added: whether its sum is only added to the sum of an earlier all-reduce over the same groups. A compiler may
            add the operands, and reduce once.
        line: line of the program: `train.py:12`.
        graph: name of the graph; "" for the main graph.
    """

    kind: CollectiveKind
    op: str
    tensor: str
    bytes: int
    stride: int
    group_size: int
    groups: str
    turns: int
    needed: int
    is_added: bool = False
    line: str
    graph: str


class IpuCopy(Record):
    """A tensor copy between two IPUs: `ops.ipu_copy`, `copy_to_ipu`.

    Attributes:
        tensor: tensor, as for a `Collective`.
        bytes: size of the tensor on one replica.
        source, destination: IPUs; the source is `None` if the program does not state it.
        turns, line, graph: as for a `Collective`.
    """

    tensor: str
    bytes: int
    source: int | None
    destination: int
    turns: int
    line: str
    graph: str


class Communication(OnPage, Record):
    """Collectives between replicas and copies between IPUs in one run.

    Attributes:
        name: name of the program: "Ir[id=0]".
        replicas: number of replicas.
        collectives: collectives in the order of the program, graph by graph.
        copies: copies between the IPUs of a replica, in the same order.

    Example:
        >>> ir = popxl.Ir(axes={"data": 2, "tensor": 3})
        >>> with ir.main_graph:
        ...     x = popxl.variable(np.ones((4, 5)), popxl.float32, "x")
        ...     y = ops.collectives.replicated_all_reduce(x, group="tensor")
        >>> [(each.kind, each.tensor, each.bytes, each.groups, each.turns) for each in ir.communication().collectives]
        [('all-reduce', 'x', 80, 'of 3 along tensor', 1)]
    """

    name: str
    replicas: int
    collectives: tuple[Collective, ...]
    copies: tuple[IpuCopy, ...] = ()

    @property
    def bytes(self) -> int:
        """Total bytes per run and replica."""
        return sum(size for _, size in self.totals.values())

    @property
    def totals(self) -> dict[str, tuple[int, int]]:
        """Count and bytes per run for each kind of collective, and for copies between IPUs."""
        counts, sizes = Counter[str](), Counter[str]()
        transfers: tuple[Collective | IpuCopy, ...] = (*self.collectives, *self.copies)
        for transfer in transfers:
            kind = transfer.kind if isinstance(transfer, Collective) else COPY
            counts[kind] += transfer.turns
            sizes[kind] += transfer.bytes * transfer.turns
        return {kind: (count, sizes[kind]) for kind, count in counts.items()}

    def __repr__(self) -> str:
        return f"Communication[{bytes_text(self.bytes)} in {sum(n for n, _ in self.totals.values())}, of {self.name}]"

    def page(self) -> Page:
        """Page for `print` and notebooks."""
        summary = f"{self.replicas} replicas. Bytes are those of one: what goes in, or comes out, whichever is more."
        alike: dict[tuple[Any, ...], list[Collective | IpuCopy]] = defaultdict(list)
        for each in self.collectives:
            alike[each.kind, starred(each.tensor), each.bytes, each.groups, each.line, each.graph].append(each)
        for copy in self.copies:
            ipus = f"IPU {'?' if copy.source is None else copy.source} to {copy.destination}"
            alike[COPY, starred(copy.tensor), copy.bytes, ipus, copy.line, copy.graph].append(copy)
        rows = [
            [kind, group[0].tensor if len(group) == 1 else name, bytes_text(size), groups,
             str(sum(e.turns for e in group)), line, graph or "main graph"]
            for (kind, name, size, groups, line, graph), group in alike.items()
        ]  # fmt: skip
        columns = ["what", "tensor", "bytes", "groups", "turns", "line", "graph"]
        sums = [[kind, str(count), bytes_text(size)] for kind, (count, size) in self.totals.items()]
        content = [Table(columns, rows), Table(["in a run", "count", "bytes"], sums)] if rows else ["Nothing is sent."]
        return Page(f"Communication of {self.name}", [summary, *content])


def communication_of(ir: Ir, recorder: type[ExchangeRecorder] | None = None) -> Communication:
    """Collect the communication between replicas; see `Ir.communication`.

    Args:
        recorder: recording group for ops to exchange with, where a platform implements exchanges by other collectives.
    """
    collectives: list[Collective] = []
    copies: list[IpuCopy] = []
    needed = _needed_runs(ir.main_graph)
    for graph, executions in runs_of(ir.main_graph).items():
        added, repeated = _added(graph), _repeated_exchanges(graph, recorder)
        composite_of = {part: composite for composite in graph.ops for part in composite.parts}
        for op in composite_of:
            copies += _copied(op, executions, "" if graph is ir.main_graph else graph.name)
            if not op.kind.between_replicas or op.attributes["group_size"] == 1:
                continue
            for i, (kind, bytes) in enumerate(exchanges_of(op, recorder)):
                collectives.append(
                    Collective(
                        kind=kind,
                        op=op.op_type,
                        tensor=_label(op.inputs[0]),
                        bytes=bytes,
                        stride=op.attributes["stride"],
                        group_size=op.attributes["group_size"],
                        groups=_groups(op, ir),
                        turns=executions,
                        needed=0 if (op, i) in repeated else needed[composite_of[op]],
                        is_added=kind == "all-reduce" and composite_of[op] in added,
                        line=str(op.source),
                        graph="" if graph is ir.main_graph else graph.name,
                    )
                )
    return Communication(
        name=repr(ir), replicas=ir.replication_factor, collectives=tuple(collectives), copies=tuple(copies)
    )


def _copied(op: Op, executions: int, graph: str) -> Iterator[IpuCopy]:
    """Tensors that an op copies to another IPU."""
    if op.op_type == "IpuCopy" and op.attributes["destination"] != op.attributes["source"]:
        (t,) = op.inputs
        yield IpuCopy(
            tensor=_label(t),
            bytes=size_in_bytes(t),
            source=op.attributes["source"],
            destination=op.attributes["destination"],
            turns=executions,
            line=str(op.source),
            graph=graph,
        )


def _label(t: Tensor) -> str:
    """A tensor's path for readers; for call results, the path of the returned tensor or the naming operand."""
    op = t.producer
    if op is None or t.path != t.name:
        return t.path
    if is_call(op):
        (run,) = op.runs
        return _label(run.outputs[op.outputs.index(t)])
    if len(op.inputs) == 1 and t.name.startswith(op.inputs[0].name):
        return _label(op.inputs[0]) + t.name.removeprefix(op.inputs[0].name)
    return t.name


def _needed_runs(main: Graph) -> Counter[Op]:
    """Number of executions in a run of each op with needed results."""
    graphs = callees_first(main)
    effects: set[Graph] = set()
    for graph in graphs:
        if any(op.kind.effect or not effects.isdisjoint(op.called_graphs) for op in graph.ops):
            effects.add(graph)
    wanted: dict[Graph, Counter[frozenset[int]]] = {graph: Counter() for graph in graphs}
    wanted[main][frozenset()] = 1
    runs: Counter[Op] = Counter()
    for graph in reversed(graphs):
        for outputs, times in wanted[graph].items():
            needed = {graph.outputs[i] for i in outputs}
            for op in reversed(graph.ops):
                changes = op.modified or op.kind.effect or not effects.isdisjoint(op.called_graphs)
                if not changes and needed.isdisjoint(op.outputs):
                    continue
                runs[op] += times
                needed.update(op.inputs)
                for run in op.runs:
                    first = run.trait.own_outputs
                    results = enumerate(op.outputs, first)
                    every = range(len(run.graph.outputs))  # all outputs of a loop, as the next iteration needs them
                    needed_outputs = every if run.trait.is_loop else (i for i, t in results if t in needed)
                    wanted[run.graph][frozenset(needed_outputs)] += times * run.iterations
    return runs


def _repeated_exchanges(graph: Graph, recorder: type[ExchangeRecorder] | None) -> set[tuple[Op, int]]:
    """Positions of exchanges, by op, that may repeat an earlier exchange: equal tensors, kind and groups, nothing
    overwritten in between. One example: the sum inside a mean."""
    repeated: set[tuple[Op, int]] = set()
    seen: set[tuple[object, ...]] = set()
    for op in graph.ops:
        for collective in op.parts:
            if not collective.kind.between_replicas:
                continue
            prefix = (collective.inputs, collective.attributes["stride"], collective.attributes["group_size"])
            keys = [(*prefix, *exchange) for exchange in exchanges_of(collective, recorder)]
            repeated.update((collective, i) for i, key in enumerate(keys) if key in seen)
            seen.update(keys)
        if op.modified:
            seen.clear()
    return repeated


def _added(graph: Graph) -> set[Op]:
    """All-reduces whose single use adds the result to another all-reduce over equal groups."""
    users = readers(graph)
    added: set[Op] = set()
    for op in graph.ops:
        if len(op.inputs) < 2:
            continue
        first: dict[tuple[object, ...], Op] = {}
        for t in op.inputs:
            reduction = t.producer
            if reduction is None or not reduction.kind.between_replicas or users[t] != [op] or t in graph.outputs:
                continue
            if [kind for kind, _ in exchanges_of(reduction)] == ["all-reduce"] and _is_sum(op):
                key = (reduction.attributes["stride"], reduction.attributes["group_size"], t.spec)
                if first.setdefault(key, reduction) is not reduction:
                    added.add(reduction)
    return added


def _is_sum(op: Op) -> bool:
    def traces_to_sum() -> bool:
        eqns = [] if op.kind.is_carried_out_by_others else op.traced().eqns
        return bool(eqns) and all(equation.primitive.name in ("add", "add_any") for equation in eqns)

    return op.remembered("is a sum", traces_to_sum)


def exchanges_of(op: Op, recorder: type[ExchangeRecorder] | None = None) -> tuple[tuple[CollectiveKind, int], ...]:
    """List collective kinds and bytes per replica for one op; `recorder` as for `communication_of`."""
    used = ExchangeRecorder if recorder is None else recorder
    return op.remembered("exchanges", lambda: tuple(_exchanges(op, used)), op.graph.ir.replication_factor, used)


def _exchanges(op: Op, recorder: type[ExchangeRecorder]) -> Iterator[tuple[CollectiveKind, int]]:
    attributes = dict(op.attributes)
    group = recorder(op.graph.ir.replication_factor, attributes.pop("stride"), attributes.pop("group_size"))
    trace(lambda *arrays: op.apply(arrays, attributes | {"group": group}), *op.signature[2:])
    yield from group.recorded


class ExchangeRecorder(CollectiveBackend):
    """A group that records exchanges instead of carrying them out.

    Attributes:
        recorded: kind and bytes of each.
    """

    def __init__(self, count: int, stride: int, size: int) -> None:
        super().__init__(count, stride, size)
        self.recorded: list[tuple[CollectiveKind, int]] = []

    @property
    def rank(self) -> Array:
        return jnp.int32(0)

    def members(self, t: Array) -> Array:
        self._record("all-gather", self.size, t)
        return jnp.broadcast_to(t, (self.size, *t.shape))

    def summed(self, t: Array) -> Array:
        self._record("all-reduce", 1, t)
        return t

    def extreme(self, t: Array, op: Literal["min", "max"]) -> Array:
        return self.summed(t)

    def scattered(self, rows: Array) -> Array:
        self._record("reduce-scatter", 1, rows)
        return rows[: len(rows) // self.size]

    def exchanged(self, t: Array) -> Array:
        self._record("all-to-all", 1, t)
        return t

    def shifted(self, t: Array, distance: int) -> Array:
        self._record("collective-permute", 1, t)
        return t

    def _record(self, kind: CollectiveKind, times: int, t: Array) -> None:
        self.recorded.append((kind, times * t.size * t.dtype.itemsize))


def _groups(op: Op, ir: Ir) -> str:
    stride, size = op.attributes["stride"], op.attributes["group_size"]
    axes = ir.named_axes
    if axes is not None and (names := axes.strided_names(stride, size)):
        return f"of {size} along {', '.join(names)}"
    return f"of {size}" if stride == 1 else f"of {size}, {stride} apart"
