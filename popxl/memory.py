"""`Memory`: what a program needs, read off its graphs before anything is compiled; in a report, what XLA says.

Counting goes op by op in the order of the schedule: a value is there from the op that makes it to the last one that
uses it, and an op has its operands and its results at once. XLA fuses ops and lays values over each other, so a
compiled program needs less, as a rule; `session.report.memory` says how much.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, computed_field

from popxl.aliasing import callees_first, reachable, storages
from popxl.pages import OnPage, Page, Picture, Table, bytes_text
from popxl.pictures import steps
from popxl.printing import summary
from popxl.tensor import Constant, Tensor, Variable

if TYPE_CHECKING:
    from popxl.graph import Graph
    from popxl.ir import Ir

__all__ = ["Memory", "Moment", "held_variables", "memory_of"]


class Moment(BaseModel):
    """One step of a program, and the bytes that are in use while it runs.

    Attributes:
        name: what the step does.
        held: of values that steps before it have made, and that it or later ones use.
        inside: of what the step makes, and what it needs on the way.
    """

    model_config = ConfigDict(frozen=True, defer_build=True)

    name: str
    held: int
    inside: int


class Memory(OnPage, BaseModel):
    """The memory that a program needs, in bytes, and when.

    Attributes:
        of: whose it is: "Ir[id=0], one replica".
        source: where `temporaries` comes from: "graph", counted op by op; "pieces" and "program", what XLA says of each
            piece of a plan, or of the one program.
        variables: those that the program uses.
        buffers: remote buffers that are in the memory of the device.
        buffers_on_host: remote buffers that are in the host's.
        streams: all transfers of one run, in and out.
        constants: those of the graphs.
        temporaries: all else, at its highest.
        moments: the steps. In one program they are those of its graphs, whatever XLA says.
        device: what is needed of the memory of the device, at most: all but the buffers on the host.

    Example:
        >>> print(ir.memory())
        Memory of Ir[id=...
        >>> ir.memory().picture().save("memory.svg")
    """

    model_config = ConfigDict(frozen=True, defer_build=True)

    of: str
    source: Literal["graph", "pieces", "program"]
    variables: int
    buffers: int
    buffers_on_host: int
    streams: int
    constants: int
    temporaries: int
    moments: tuple[Moment, ...]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def device(self) -> int:
        """What is needed of the memory of the device, at most."""
        return self._always + self.temporaries

    @property
    def _always(self) -> int:
        return self.variables + self.buffers + self.streams + self.constants

    @property
    def highest(self) -> Moment | None:
        """The step at which most is in use; `None` if there are no steps."""
        return max(self.moments, key=lambda moment: moment.held + moment.inside, default=None)

    def __repr__(self) -> str:
        return f"Memory[{bytes_text(self.device)} at most, of {self.of}]"

    def page(self) -> Page:
        """What `print` and notebooks show."""
        rows = [
            ("variables", self.variables),
            ("remote buffers", self.buffers),
            ("streams", self.streams),
            ("constants", self.constants),
            ("temporaries", self.temporaries),
            ("in all, at most", self.device),
            ("in the host's memory: remote buffers", self.buffers_on_host),
        ]
        shown = [[name, bytes_text(count)] for name, count in rows if count or name == "in all, at most"]
        parts: list[str | Table] = [Table(["", "bytes"], shown)]
        if self.highest is not None:
            number = self.moments.index(self.highest) + 1
            where = f"Most is in use at step {number} of {len(self.moments)}: {self.highest.name}."
            parts.append(f"{where} {_SOURCES[self.source]}")
        return Page(f"Memory of {self.of}", [*parts, *([self.picture()] if self.moments else [])])

    def picture(self) -> Picture:
        """The memory over the steps of the program."""
        lower, upper = [m.held for m in self.moments], [m.inside for m in self.moments]
        title = f"Memory of {self.of}: {bytes_text(self.device)} at most"
        if self.source == "program":
            title += "; steps are counted op by op, without what XLA saves"
        return steps(title, self._always, lower, upper, [m.name for m in self.moments])


_SOURCES = {
    "graph": "Counted op by op: XLA, which fuses ops, needs less as a rule.",
    "pieces": "Temporaries are what XLA says of each piece, and the values between pieces.",
    "program": "Temporaries are what XLA says of the whole; steps are counted op by op.",
}

# Of an Ir ------------------------------------------------------------------------------------------------------------


def memory_of(ir: Ir) -> Memory:
    """What a replica needs; see `Ir.memory`."""
    main = ir.main_graph
    streams = (*ir.get_all_h2d_streams(), *ir.get_all_d2h_streams())
    buffers = sum(b.entries * b.slot_nelms * b.tensor_dtype.itemsize for b in ir.remote_buffers)
    on_host = ir.options.remoteBuffers == "host"
    moments = moments_of(main)
    return Memory(
        of=f"{ir!r}, each replica" if ir.replication_factor > 1 else repr(ir),
        source="graph",
        variables=sum(map(size, held_variables(main))),
        buffers=0 if on_host else buffers,
        buffers_on_host=buffers if on_host else 0,
        streams=ir.num_host_transfers * sum(size(stream.tensor) for stream in streams),
        constants=sum(map(size, constants_of(main))),
        temporaries=max((moment.held + moment.inside for moment in moments), default=0),
        moments=moments,
    )


def held_variables(main: Graph) -> dict[Tensor, Variable]:
    """What the program keeps on the device: the variables that it uses, or the pieces that it uses in their place."""
    used = {s for made_of in storages(main).values() for s in made_of}
    holders = {v if v.piece is None else v.piece: v for v in main.variables}
    return {t: v for t, v in holders.items() if t in used}


def constants_of(main: Graph) -> set[Constant]:
    """The constants that ops use, calls included. Constants that share an array are one."""
    found = {id(c.data): c for g in reachable(main) for op in g.ops for c in op.inputs if isinstance(c, Constant)}
    return {*found.values()}


def size(t: Tensor) -> int:
    """The bytes of a tensor's value."""
    return t.nelms * t.dtype.itemsize


def moments_of(main: Graph) -> tuple[Moment, ...]:
    """The steps of a graph: its ops, and in place of the only call or loop of a graph those of that graph."""
    calls: dict[Graph, int] = {}
    graphs = callees_first(main)
    for graph in graphs:
        for op in graph.ops:
            for callee in op.called_graphs:
                calls[callee] = calls.get(callee, 0) + 1
    once = {graph for graph, count in calls.items() if count == 1}
    of: dict[Graph, list[Moment]] = {}
    highest: dict[Graph, int] = {}
    for graph in graphs:
        of[graph] = list(_moments(graph, of, highest, once))
        highest[graph] = max((m.held + m.inside for m in of[graph]), default=0)
    return tuple(of[main])


def _moments(
    graph: Graph, of: dict[Graph, list[Moment]], highest: dict[Graph, int], once: set[Graph]
) -> Iterator[Moment]:
    """The steps of a graph, after those of the graphs that it calls are known."""
    made_of = storages(graph)
    ops = [op for op in graph.ops if op.kind.put is None]  # a view is made when somebody looks through it
    last: dict[Tensor, int] = {}
    for i, op in enumerate(ops):
        last.update((s, i) for t in op.inputs for s in made_of.get(t, (t,)))
    last.update((s, len(ops)) for t in graph.outputs for s in made_of.get(t, (t,)))
    frees: dict[int, list[Tensor]] = {}
    alive: dict[Tensor, int] = {}
    held = 0
    for i, op in enumerate(ops):
        undefined = op.attributes.get("init_type") == "undef"  # room for what the next op loads: nothing is made of it
        made = [t for t in op.outputs if made_of.get(t, (t,)) == (t,) and not undefined]
        called = op.called_graphs
        if len(called) == 1 and called[0] in once:
            yield from (Moment(name=m.name, held=held + m.held, inside=m.inside) for m in of[called[0]])
        else:
            own = max([sum(map(size, made)), *(highest[callee] for callee in called)])
            yield Moment(name=summary([op]), held=held, inside=own)
        for t in made:
            if last.get(t, i) > i:
                alive[t] = size(t)
                held += alive[t]
                frees.setdefault(last[t], []).append(t)
        held -= sum(alive.pop(t) for t in frees.pop(i, ()))
