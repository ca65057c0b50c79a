"""`Memory`: the memory of a program, derived from its graphs before compilation; in a report, as XLA counts it.

Ops are counted in the order of the schedule: a value is live from the op that makes it to the last one that uses it,
and an op's operands and results are live at the same time. XLA fuses ops and reuses buffers, so a compiled program
usually needs less; `session.memory()` returns that figure.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from pydantic import computed_field

from popxl.base.liveness import last_uses
from popxl.base.pages import OnPage, Page, Picture, Table, bytes_text
from popxl.base.pictures import steps
from popxl.base.records import Record
from popxl.core.aliasing import call_counts, callees_first, reachable, storages, used_storages
from popxl.core.printing import summary
from popxl.core.recording import Op
from popxl.core.tensor import Constant, Tensor, Variable
from popxl.values.spec import brief, size_in_bytes

if TYPE_CHECKING:
    from popxl.graph import Graph
    from popxl.ir import Ir


class Moment(Record):
    """Step of a program, with the bytes in use during it.

    Attributes:
        name: name of the step.
        held: bytes of values from earlier steps that this step or later ones use.
        inside: bytes of the step's results and temporaries.
    """

    name: str
    held: int
    inside: int

    @property
    def bytes(self) -> int:
        """All bytes in use."""
        return self.held + self.inside


class LiveTensor(Record):
    """A value that is held between steps.

    Attributes:
        name: name of the tensor, with its dtype and shape.
        bytes: size in bytes.
        first, last: numbers of the step that makes it, and of the last step that holds it; see `Memory.moments`.
    """

    name: str
    bytes: int
    first: int
    last: int


class DeviceMemory(Record):
    """Memory content of one device, in bytes.

    Attributes:
        name: name of the device.
        variables: bytes of the variables that the program uses.
        buffers: bytes of remote buffers in device memory.
        arguments: bytes of all transfers of the input streams in one run.
        outputs: bytes of all transfers of the output streams in one run.
        constants: bytes of the constants of graphs.
        temporaries: largest number of other bytes.
        code: bytes of machine code; `None` if unknown: before compilation, and on CPUs, for which XLA does not report
            it.
        device: total bytes, at most.
    """

    name: str
    variables: int
    buffers: int
    arguments: int
    outputs: int
    constants: int
    temporaries: int
    code: int | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def device(self) -> int:
        """Peak device memory."""
        return self.always + self.temporaries

    @property
    def always(self) -> int:
        """Permanently used memory: everything except temporaries."""
        fixed = self.variables + self.buffers + self.arguments + self.outputs + self.constants
        return fixed + (self.code or 0)


class Memory(OnPage, DeviceMemory):
    """Memory requirement of a program over time, in bytes, for the device with the highest need.

    Attributes:
        name: name of the program, and of the device: "Ir[id=0], each replica".
        source: origin of `temporaries`: "graph", counted op by op; "pieces" and "program", reported by XLA for each
            segment of a plan, or for the whole program; "schedule", counted over the kernels of a JAX function.
        devices: the devices, if they are known.
        buffers_on_host: remote buffers that are in the host's memory.
        variables_on_host: bytes of the host copies of the variables, and of the initial values of remote variables.
        temporaries_on_host: bytes of temporaries in host memory, as XLA reports them.
        host: all that is needed of the host's memory.
        budget: bytes of a device that the program shall need at most (`ir.options.memoryBudget`); 0 without a budget.
        moments: the steps. In one program they are those of its graphs, whatever XLA says.
        tensors: the values that are held between steps.

    Example:
        >>> print(ir.memory())
        Memory of Ir[id=...
        >>> ir.memory().picture().save("memory.svg")
    """

    source: Literal["graph", "pieces", "program", "schedule"]
    devices: tuple[DeviceMemory, ...] = ()
    buffers_on_host: int
    variables_on_host: int
    temporaries_on_host: int = 0
    budget: int = 0
    moments: tuple[Moment, ...]
    tensors: tuple[LiveTensor, ...] = ()

    @computed_field  # type: ignore[prop-decorator]
    @property
    def host(self) -> int:
        """Host memory requirement."""
        return self.buffers_on_host + self.variables_on_host + self.temporaries_on_host

    @property
    def highest(self) -> Moment | None:
        """The step with peak memory use; `None` without steps."""
        return max(self.moments, key=lambda moment: moment.bytes, default=None)

    def __repr__(self) -> str:
        return f"Memory[{bytes_text(self.device)} at most, of {self.name}]"

    def page(self) -> Page:
        """Page for `print` and notebooks."""
        counts = [*((name, getattr(self, name)) for name in _PARTS), ("in all, at most", self.device)]
        rows = [[name, bytes_text(count)] for name, count in counts if count or name == "in all, at most"]
        if self.budget:
            rows.append(["budget", bytes_text(self.budget)])
        content: list[str | Table] = [Table(["", "bytes"], rows)]
        if self.source != "graph" and 0 < self.budget < self.device:
            content.append(f"The program needs {bytes_text(self.device - self.budget)} more than its budget.")
        if self.highest is not None:
            number = self.moments.index(self.highest) + 1
            summary = f"Most is in use at step {number} of {len(self.moments)}: {self.highest.name}."
            content.append(f"{summary} {_SOURCES[self.source]}")
        if len({device.device for device in self.devices}) > 1:
            content.append(self._by_device())
        content += self._on_host()
        return Page(f"Memory of {self.name}", [*content, *([self.picture()] if self.moments else [])])

    def _on_host(self) -> list[str]:
        """One sentence about host memory; empty if unused."""
        counts = {
            "variables": self.variables_on_host,
            "remote buffers": self.buffers_on_host,
            "temporaries": self.temporaries_on_host,
        }
        amounts = [f"{bytes_text(count)} for {name}" for name, count in counts.items() if count]
        return [f"In the host's memory: {', '.join(amounts)}."] if amounts else []

    def _by_device(self) -> Table:
        """One table row per group of devices with equal requirements."""
        kinds = [kind for kind in _PARTS if any(getattr(device, kind) for device in self.devices)]
        alike: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for device in self.devices:
            alike[*(getattr(device, kind) or 0 for kind in kinds), device.device].append(device.name)
        rows = [
            [
                ", ".join(names) if len(names) <= 4 else f"{names[0]} and {len(names) - 1} others",
                *map(bytes_text, sizes),
            ]
            for sizes, names in alike.items()
        ]
        return Table(["device", *kinds, "in all"], rows)

    def picture(self) -> Picture:
        """Plot memory over program steps: permanent use, and each value while live."""
        title = f"Memory of {self.name}: {bytes_text(self.device)} at most"
        if self.source == "program":
            title += "; steps are counted op by op, without what XLA saves"
        upper = [m.inside for m in self.moments]
        lives = [(t.name, t.bytes, t.first + 1, t.last + 1) for t in self.tensors]
        return steps(title, self.always, [m.held for m in self.moments], upper, [m.name for m in self.moments], lives)


_PARTS = ("variables", "buffers", "arguments", "outputs", "constants", "temporaries", "code")

_SOURCES = {
    "graph": "Counted op by op: XLA, which fuses ops, needs less as a rule.",
    "pieces": "Temporaries are what XLA says of each segment, and the values between segments.",
    "program": "Temporaries are what XLA says of the whole; steps are counted op by op.",
    "schedule": "Temporaries are what XLA allocates; steps are its kernels, loops once.",
}

# Of an Ir ------------------------------------------------------------------------------------------------------------


def memory_of(ir: Ir) -> Memory:
    """Memory of a replica; see `Ir.memory`."""
    main = ir.main_graph
    buffers = sum(buffer.nbytes for buffer in ir.remote_buffers)
    on_host = ir.options.remoteBuffers == "host"
    found = steps_of(main)
    return Memory(
        name=f"{ir!r}, each replica" if ir.replication_factor > 1 else repr(ir),
        source="graph",
        variables=sum(map(size_in_bytes, held_variables(main))),
        buffers=0 if on_host else buffers,
        arguments=sum(s.num_host_transfers * size_in_bytes(s.tensor) for s in ir.get_all_h2d_streams()),
        outputs=sum(s.num_host_transfers * size_in_bytes(s.tensor) for s in ir.get_all_d2h_streams()),
        constants=sum(map(size_in_bytes, constants_of(main))),
        temporaries=found.peak,
        buffers_on_host=buffers if on_host else 0,
        variables_on_host=variables_on_host(main),
        budget=ir.options.memoryBudget,
        moments=tuple(found.moments),
        tensors=tuple(found.tensors),
    )


def variables_on_host(main: Graph) -> int:
    """Bytes of host copies of variables, for all replica groups; zero for variables with described values."""
    there = (v for v in main.variables if v.initial is None)
    return sum(math.prod(v.shape_on_host) * v.dtype.itemsize for v in there)


def held_variables(main: Graph) -> dict[Tensor, Variable]:
    """Variables resident on the device, or their shards."""
    used = used_storages(main)
    holders = {v.on_replica: v for v in main.variables}
    return {t: v for t, v in holders.items() if t in used}


def constants_of(main: Graph) -> set[Constant]:
    """The constants that ops use, calls included. Constants that share an array are one."""
    constants = {id(c.data): c for g in reachable(main) for op in g.ops for c in op.inputs if isinstance(c, Constant)}
    return {*constants.values()}


def runs_of(main: Graph) -> Counter[Graph]:
    """Maximum run count of each graph per program run."""
    runs = Counter({main: 1})
    for graph in reversed(callees_first(main)):
        for op in graph.ops:
            for run in op.runs:
                runs[run.graph] += runs[graph] * run.iterations
    return runs


def steps_of(main: Graph, size: Callable[[Tensor], int] = size_in_bytes, each_call: bool = False) -> Steps:
    """Steps of a graph: its ops; single calls and loops are replaced by the steps of their graph.

    Args:
        size: function that returns the bytes of a tensor that count.
        each_call: whether to expand every call of a graph into the steps of that graph, or only single calls.
    """
    entered = {graph for graph, count in call_counts(main.ops).items() if each_call or count == 1}
    by_graph: dict[Graph, Steps] = {}
    for graph in callees_first(main):
        by_graph[graph] = _steps(graph, by_graph, entered, size)
    return by_graph[main]


@dataclass(frozen=True)
class EnteredCall:
    """Call op replaced by its graph's steps.

    Attributes:
        op: the op.
        first, last: numbers of the first and the last of these steps.
        inputs_until: the last one that uses each input of the graph, counted from the first.
    """

    op: Op
    first: int
    last: int
    inputs_until: Mapping[Tensor, int]


@dataclass
class Steps:
    """Steps of a graph, with values live between them.

    Attributes:
        moments: the steps.
        ops: op of each step.
        tensors: the values that are live between steps.
        values: tensor of each of `tensors`.
        calls: ops that are replaced by the steps of the graph that they call, callers before callees.
        inputs_until: the last step that uses each input of the graph.
    """

    moments: list[Moment] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    tensors: list[LiveTensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    calls: list[EnteredCall] = field(default_factory=list)
    inputs_until: dict[Tensor, int] = field(default_factory=dict)

    @property
    def peak(self) -> int:
        """Most bytes in use at a step."""
        return max((moment.bytes for moment in self.moments), default=0)

    def add(self, op: Op, held: int, inside: int) -> None:
        """Add a step that is one op."""
        self.moments.append(Moment(name=summary([op]), held=held, inside=inside))
        self.ops.append(op)

    def add_live(self, t: Tensor, first: int, bytes: int, last: int) -> None:
        """Add a value that is live between steps."""
        self.tensors.append(LiveTensor(name=f"{t.path}: {brief(t)}", bytes=bytes, first=first, last=last))
        self.values.append(t)

    def enter(self, op: Op, inner: Steps, held: int) -> None:
        """Go through the steps of a called graph, while so much is held."""
        start = len(self.moments)
        self.calls.append(EnteredCall(op, start, start + len(inner.moments) - 1, inner.inputs_until))
        self.calls += (replace(call, first=start + call.first, last=start + call.last) for call in inner.calls)
        self.moments += (Moment(name=m.name, held=held + m.held, inside=m.inside) for m in inner.moments)
        self.ops += inner.ops
        self.tensors += (t.model_copy(update={"first": start + t.first, "last": start + t.last}) for t in inner.tensors)
        self.values += inner.values


def _steps(graph: Graph, of: dict[Graph, Steps], entered: set[Graph], size: Callable[[Tensor], int]) -> Steps:
    """Compute the steps of a graph from the steps of its callees."""
    storages_of = storages(graph.ops)
    ops = [op for op in graph.ops if op.kind.view is None]  # a view is made when a reader looks through it
    for op in ops:
        if op.kind.schedules:
            storages_of[op.outputs[0]] = storages_of[op.inputs[0]]

    def bases(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
        return (s for t in tensors for s in storages_of.get(t, (t,)))

    last = last_uses((bases(op.inputs) for op in ops), bases(graph.outputs))
    frees: dict[int, list[Tensor]] = {}
    alive: dict[Tensor, tuple[int, int]] = {}
    held = 0
    ends: list[int] = []
    steps = Steps()
    for i, op in enumerate(ops):
        undefined = op.attributes.get("init_type") == "undef"  # allocation for the next load, not computed
        results = [t for t in op.outputs if storages_of.get(t, (t,)) == (t,) and not undefined]
        called = op.called_graphs
        if len(called) == 1 and called[0] in entered:
            steps.enter(op, of[called[0]], held)
        else:
            own_bytes = max([sum(map(size, results)), *(of[callee].peak for callee in called)])
            steps.add(op, held, own_bytes)
        now = len(steps.moments) - 1
        ends.append(now)
        for t in results:
            if last.get(t, i) > i:
                alive[t] = (now, size(t))
                held += size(t)
                frees.setdefault(last[t], []).append(t)
        freed = frees.pop(i, ())
        held -= sum(alive[t][1] for t in freed)
        for t in freed:
            steps.add_live(t, *alive.pop(t), now)
    for t, (first, bytes) in alive.items():
        steps.add_live(t, first, bytes, len(steps.moments) - 1)
    ends.append(len(steps.moments) - 1)
    steps.inputs_until = {t: ends[last[t]] for t in graph.inputs if t in last}
    return steps
