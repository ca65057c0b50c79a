"""`Report`: what a user wants to know of a compiled program, as a page, as JSON, and as a picture of its memory.

All of it is known before the program runs. What runs when is in a `runtime.timeline.Timeline`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, computed_field

from popxl.aliasing import callees_first, reachable
from popxl.graph import Graph
from popxl.ir import Ir
from popxl.memory import Memory, Moment, constants_of, moments_of, size
from popxl.op import Op
from popxl.pages import OnPage, Page, Table, bytes_text, seconds_text
from popxl.spec import brief
from runtime.plan import Plan
from runtime.program import Program
from runtime.structure import Structure

LONGEST = 12
"""A table on a page has so many rows at most, the largest ones; `model_dump` has all."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, defer_build=True)


class VariableReport(_Part):
    """A variable.

    Attributes:
        name: its name.
        spec: dtype and shape, on one replica.
        bytes: on one device.
        place: where it is: "device", or the slot of a remote buffer; "unused" if the program does not use it.
        changes: whether the program changes it.
        ipu: the IPU that it is on, if IPUs are devices of their own.
    """

    name: str
    spec: str
    bytes: int
    place: str
    changes: bool
    ipu: int | None = None


class BufferReport(_Part):
    """A remote buffer.

    Attributes:
        number: its number in the Ir.
        entries: how many slots it has.
        spec: dtype and shape of a slot.
        bytes: all slots, of the replicas that one device runs.
        memory: whose memory they are in.
        ipu: as for variables.
    """

    number: int
    entries: int
    spec: str
    bytes: int
    memory: Literal["device", "host"]
    ipu: int | None = None


class StreamReport(_Part):
    """A stream.

    Attributes:
        name: its name.
        direction: "in", from the host, or "out".
        spec: dtype and shape of one transfer.
        transfers: how many of them a run makes, at most.
        bytes: of the array that one device gets or gives in a run.
        ipu: as for variables.
    """

    name: str
    direction: Literal["in", "out"]
    spec: str
    transfers: int
    bytes: int
    ipu: int | None = None


class GraphReport(_Part):
    """A graph.

    Attributes:
        name: its name; that of the main graph is empty.
        ops: how many ops it has; calls count as one.
        runs: how often one run of the program runs it, at most.
    """

    name: str
    ops: int
    runs: int


class PieceReport(_Part):
    """Something that was compiled.

    Attributes:
        name: what it does.
        runs: how often it is run, in one run of the program.
        ops: how many ops it stands for, those of called graphs included at each call.
        text: length of the text that XLA was given, in characters.
        temporaries: bytes that it needs on the way, besides arguments and results.
        seconds: how long it took to trace and compile it; 0 if it had been compiled before.
    """

    name: str
    runs: int
    ops: int
    text: int
    temporaries: int
    seconds: float


class Report(OnPage, _Part):
    """What a compiled program consists of and needs. Sizes are bytes on one device.

    Attributes:
        program: which Ir it is.
        device: what was asked for.
        devices: the devices.
        replicas: how many there are, over all processes.
        calls: how called graphs were compiled: "dispatched", a plan of executables; "kept" or "inlined", one program.
        reason: why so.
        variables, buffers, streams, graphs: what the program has.
        pieces: what was compiled, in the order in which it is first run.
        seconds: how long compiling took, with all around it.
        memory: what the program needs.

    Example:
        >>> session = popxl.Session(ir)
        >>> print(session.report)
        >>> session.report.memory.device  # bytes, at most
        >>> session.report.model_dump_json()
    """

    program: str
    device: str
    devices: tuple[str, ...]
    replicas: int
    calls: str
    reason: str
    variables: tuple[VariableReport, ...]
    buffers: tuple[BufferReport, ...]
    streams: tuple[StreamReport, ...]
    graphs: tuple[GraphReport, ...]
    pieces: tuple[PieceReport, ...]
    seconds: float
    memory: Memory

    @computed_field  # type: ignore[prop-decorator]
    @property
    def dispatches(self) -> int:
        """How many executables one run queues."""
        return sum(piece.runs for piece in self.pieces)

    def __repr__(self) -> str:
        return f"Report[{self.program} on {self.device}]"

    def page(self) -> Page:
        """What `print` and notebooks show."""
        replicas = "1 replica" if self.replicas == 1 else f"{self.replicas} replicas"
        count = f"{len(self.devices)} device{'s' * (len(self.devices) > 1)}"
        where = f"{replicas} on {count} ({self.device}): {', '.join(self.devices)}."
        return Page(
            f"Report of {self.program}",
            [
                where,
                *self._compiled(),
                *self._table("Graphs", ["graph", "ops", "runs"], map(_graph_row, self.graphs)),
                *self._of_variables(),
                *self._table(
                    "Remote buffers", ["buffer", "slots", "slot", "bytes", "memory"], map(_buffer_row, self.buffers)
                ),
                *self._table(
                    "Streams", ["stream", "direction", "a transfer", "a run", "bytes"], map(_stream_row, self.streams)
                ),
                self.memory.page(),
            ],
        )

    def _compiled(self) -> list[Any]:
        way = _WAYS[self.calls].format(pieces=len(self.pieces), dispatches=self.dispatches)
        columns = ["piece", "runs", "ops", "text", "temporaries", "compiled in"]
        rows = [
            [p.name, str(p.runs), str(p.ops), bytes_text(p.text), bytes_text(p.temporaries), _seconds(p.seconds)]
            for p in self.pieces
        ]
        page = self._table("Compiled", columns, rows)
        return [f"{way} {self.reason} Compiling took {seconds_text(self.seconds)}.", *page]

    def _of_variables(self) -> list[Page]:
        rows = sorted(self.variables, key=lambda v: -v.bytes)
        held = [v for v in self.variables if v.place == "device"]
        changing = sum(v.bytes for v in held if v.changes)
        total = ["in all, on the device", "", bytes_text(sum(v.bytes for v in held)), f"{bytes_text(changing)} change"]
        shown = [[v.name, v.spec, bytes_text(v.bytes), _place(v) + ", changes" * v.changes] for v in rows]
        if rows:
            shown.insert(0, total)
        return self._table("Variables", ["variable", "shape", "bytes", "place"], shown)

    def _table(self, title: str, columns: list[str], rows: Iterable[list[str]]) -> list[Page]:
        """A part of the page; none, if there is nothing to say."""
        found = list(rows)
        more = [f"and {len(found) - LONGEST} more"] if len(found) > LONGEST else []
        return [Page(title, [Table(columns, found[:LONGEST]), *more])] if found else []


_WAYS = {
    "dispatched": "A plan: the host runs {dispatches} pieces one after the other, {pieces} different ones.",
    "kept": "One program, in which graphs that are called from several places are compiled once.",
    "inlined": "One program, in which every call is written out.",
}


def _place(variable: VariableReport) -> str:
    return variable.place if variable.ipu is None else f"IPU {variable.ipu}"


def _graph_row(graph: GraphReport) -> list[str]:
    return [graph.name or "main graph", str(graph.ops), str(graph.runs)]


def _buffer_row(buffer: BufferReport) -> list[str]:
    return [str(buffer.number), str(buffer.entries), buffer.spec, bytes_text(buffer.bytes), buffer.memory]


def _stream_row(stream: StreamReport) -> list[str]:
    return [stream.name, stream.direction, stream.spec, str(stream.transfers), bytes_text(stream.bytes)]


def _seconds(seconds: float) -> str:
    return seconds_text(seconds) if seconds else "known before"


# Of a program --------------------------------------------------------------------------------------------------------


def report_of(ir: Ir, program: Program) -> Report:
    """The report of a compiled program. See `Session.report`."""
    main = ir.main_graph
    ops, runs = _counts(main)
    variables, buffers, streams = _variables(ir, program), _buffers(program), _streams(program)
    return Report(
        program=repr(ir),
        device=program.device.name,
        devices=tuple(map(str, program.devices)),
        replicas=program.replicas.count,
        calls=program.calls,
        reason=program.reason,
        variables=variables,
        buffers=buffers,
        streams=streams,
        graphs=tuple(GraphReport(name=g.name, ops=len(g.ops), runs=runs[g]) for g in reachable(main)),
        pieces=_pieces(main, program, ops),
        seconds=program.seconds,
        memory=_memory(ir, program, variables, buffers, streams),
    )


def _counts(main: Graph) -> tuple[dict[Graph, int], Counter[Graph]]:
    """For each graph, how many ops it stands for, and how often it runs."""
    graphs = callees_first(main)
    ops: dict[Graph, int] = {}
    for graph in graphs:
        ops[graph] = sum(_stands_for(op, ops) for op in graph.ops)
    runs = Counter({main: 1})
    for graph in reversed(graphs):
        for op in graph.ops:
            for callee in op.called_graphs:
                runs[callee] += runs[graph] * op.attributes.get("repeat_count", 1)
    return ops, runs


def _stands_for(op: Op, ops: dict[Graph, int]) -> int:
    return 1 + sum(ops[callee] for callee in op.called_graphs)


def _variables(ir: Ir, program: Program) -> tuple[VariableReport, ...]:
    held, buffers = program.held(), program.buffers()
    found = []
    for v in ir.main_graph.variables:
        bytes, changes = held.get(v, (0, False))
        place = v.location_info
        where = "device" if v in held else "unused"
        if place.buffer is not None and v not in held:
            where = f"buffer {place.buffer.remote_buffer_id}, slot {place.entry}"
            slots, _ = buffers.get(place.buffer, (0, False))
            bytes, changes = slots // place.buffer.entries, place.buffer in program.stored_to
        ipu = program.ipu_of(v) if v in held else None
        found.append(VariableReport(name=v.name, spec=brief(v), bytes=bytes, place=where, changes=changes, ipu=ipu))
    return tuple(found)


def _buffers(program: Program) -> tuple[BufferReport, ...]:
    return tuple(
        BufferReport(
            number=buffer.remote_buffer_id,
            entries=buffer.entries,
            spec=f"{buffer.tensor_dtype.short}[{', '.join(map(str, buffer.tensor_shape))}]",
            bytes=bytes,
            memory="host" if on_host else "device",
            ipu=program.ipu_of(buffer),
        )
        for buffer, (bytes, on_host) in program.buffers().items()
    )


def _streams(program: Program) -> tuple[StreamReport, ...]:
    copies = program.transfers * program.replicas.per_device
    return tuple(
        StreamReport(
            name=s.tensor.name,
            direction="in" if s in program.inputs else "out",
            spec=brief(s.tensor),
            transfers=program.counts.get(s, 0),
            bytes=copies * size(s.tensor),
            ipu=program.ipu_of(s),
        )
        for s in (*program.inputs, *program.outputs)
    )


def _pieces(main: Graph, program: Program, ops: dict[Graph, int]) -> tuple[PieceReport, ...]:
    if not isinstance(program.executable, Plan):
        (executable,) = program.executables()
        needed, text = executable.memory_analysis().temp_size_in_bytes, len(program.text())
        whole = PieceReport(
            name="the program", runs=1, ops=ops[main], text=text, temporaries=needed, seconds=program.seconds
        )
        return (whole,)
    pieces = program.executable.pieces
    runs = program.executable.runs
    compiling: dict[Structure, float] = defaultdict(float)
    for piece in pieces:
        compiling[piece.structure] += piece.seconds
    first = {piece.structure: piece for piece in reversed(pieces)}
    return tuple(
        PieceReport(
            name=first[structure].name,
            runs=count,
            ops=sum(_stands_for(op, ops) for op in first[structure].ops),
            text=len(structure.text()),
            temporaries=structure.executable.memory_analysis().temp_size_in_bytes,
            seconds=compiling[structure],
        )
        for structure, count in runs.items()
    )


def _memory(
    ir: Ir,
    program: Program,
    variables: tuple[VariableReport, ...],
    buffers: tuple[BufferReport, ...],
    streams: tuple[StreamReport, ...],
) -> Memory:
    main, copies = ir.main_graph, program.replicas.per_device
    held: list[VariableReport | BufferReport | StreamReport] = [*variables, *buffers, *streams]
    ipus: set[int | None] = {each.ipu for each in held if each.ipu is not None} or {None}
    fullest = max(ipus, key=lambda ipu: sum(each.bytes for each in held if each.ipu == ipu))
    if isinstance(program.executable, Plan):
        curve = program.executable.curve()
        moments = [Moment(name=piece.name, held=held, inside=inside) for piece, held, inside in curve]
    else:
        of_one = moments_of(main)
        moments = [Moment(name=m.name, held=copies * m.held, inside=copies * m.inside) for m in of_one]
    return Memory(
        of=f"{ir!r}, on each device" if len(program.devices) > 1 else repr(ir),
        source="pieces" if isinstance(program.executable, Plan) else "program",
        variables=sum(v.bytes for v in variables if v.place == "device" and v.ipu == fullest),
        buffers=sum(b.bytes for b in buffers if b.memory == "device" and b.ipu == fullest),
        buffers_on_host=sum(b.bytes for b in buffers if b.memory == "host"),
        streams=sum(s.bytes for s in streams if s.ipu == fullest),
        constants=sum(map(size, constants_of(main))),
        temporaries=program.temporaries(),
        moments=tuple(moments),
    )
