"""`Report`: what a user wants to know of a compiled program, as a page, as JSON, and as a picture of its memory.

Nearly all of it is known before the program runs. What runs when is in a `runtime.timeline.Timeline`, which is on the
page if there is one.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, computed_field

from popxl.base.pages import Facts, Listing, OnPage, Page, Table, bytes_text, count_text, seconds_text
from popxl.core.aliasing import callees_first, reachable
from popxl.core.printing import definition, summary
from popxl.core.recording import Op
from popxl.core.traits import is_call
from popxl.graph import Graph
from popxl.ir import Ir
from popxl.looking.estimate import Estimate, estimate_of
from popxl.looking.flops import moved, own_flops
from popxl.looking.memory import (
    DeviceMemory,
    LiveTensor,
    Memory,
    Moment,
    constants_of,
    moments_of,
    runs_of,
    size,
    variables_on_host,
)
from popxl.remote_buffer import RemoteBuffer
from popxl.values.spec import brief
from runtime.costs.cost import Cost, cost_of
from runtime.plan.plan import Plan
from runtime.plan.structure import Structure
from runtime.program.program import CompiledProgram
from runtime.timeline import Timeline


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
        loaded, stored: bytes that one replica loads and stores in a run, at most.
        ipu: as for variables.
    """

    number: int
    entries: int
    spec: str
    bytes: int
    memory: Literal["device", "host"]
    loaded: int
    stored: int
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


class CollectiveReport(_Part):
    """What the replicas do together.

    Attributes:
        op: the type of the ops.
        group_size: how many replicas talk to each other.
        runs: how many such ops a run of the program carries out, at most.
        bytes: what all of them move, of one replica.
    """

    op: str
    group_size: int
    runs: int
    bytes: int


class GraphReport(_Part):
    """A graph.

    Attributes:
        name: its name; that of the main graph is empty.
        ops: how many ops it has; calls count as one.
        runs: how often one run of the program runs it, at most.
        flops: floating point operations of its own ops in one run of it.
        text: its schedule, as it is printed.
    """

    name: str
    ops: int
    runs: int
    flops: int
    text: str


class LoopReport(_Part):
    """Calls that are turns of a loop, with what comes with them.

    Attributes:
        graph: the graph that they are in; the name of the main graph is empty.
        turns: how many there are.
        ops: how many ops are in a turn; calls count as one.
        calls: the graphs that a turn calls, in order.
        text: a turn, in a few words.
    """

    graph: str
    turns: int
    ops: int
    calls: tuple[str, ...]
    text: str


class WorkReport(_Part):
    """The ops of one type, those of all graphs together.

    Attributes:
        op: the type.
        runs: how many of them a run of the program carries out, at most; of a conditional, both branches.
        flops: their floating point operations, on one replica.
    """

    op: str
    runs: int
    flops: int


class SizeReport(_Part):
    """How large the program is, and how large it would be if nothing were outlined: every call written out.

    Attributes:
        ops: ops of all graphs, each graph counted once.
        ops_written_out: the same with every call written out; loops have their graphs once.
        text: characters that XLA is given to compile.
        text_written_out: the same with every call written out; `None` for programs from files, whose text is not kept.
    """

    ops: int
    ops_written_out: int
    text: int
    text_written_out: int | None


class PieceReport(_Part):
    """Something that was compiled. Its sizes are what XLA says of the executable, in bytes on one device.

    Attributes:
        name: what it does.
        runs: how often it is run, in one run of the program.
        ops: how many ops it stands for, those of called graphs included at each call.
        text: length of the text that XLA was given, in characters.
        arguments: all that goes in, variables among it.
        outputs: what comes out, without what overwrites arguments.
        temporaries: what it needs on the way, besides arguments and outputs.
        code: machine code; `None` where XLA does not say.
        host: what it needs in the host's memory.
        seconds: how long it took to trace and compile it; 0 if it had been compiled before.
    """

    name: str
    runs: int
    ops: int
    text: int
    arguments: int
    outputs: int
    temporaries: int
    code: int | None
    host: int
    seconds: float


class TargetReport(_Part):
    """The machine that a program was compiled for, which is not here.

    Attributes:
        description: how it was described.
        chip: what one of its chips is called.
        chips: how many it has.
        used: how many of them the program uses.
        capacity: the memory of a chip, in bytes.
        with_buffers: what the program needs of it at most, if the remote buffers are there, too.
        without_buffers: what it needs if they are in the host's memory.
        fits: whether the program, as it was compiled, fits into the memory of a chip.
        sources: where the figures of the chip are from.
        cost: what a run of the program costs.
    """

    description: str
    chip: str
    chips: int
    used: int
    capacity: int
    with_buffers: int
    without_buffers: int
    fits: bool
    sources: tuple[str, ...]
    cost: Cost

    def page(self) -> Page:
        """What reports show of it."""
        fits = "The program fits." if self.fits else "The program does not fit."
        rows = [
            ["a chip has", bytes_text(self.capacity)],
            ["needed, with remote buffers on the chip", bytes_text(self.with_buffers)],
            ["needed, without them", bytes_text(self.without_buffers)],
            ["code", bytes_text(self.cost.code_bytes) if self.cost.code_bytes is not None else "not said by XLA"],
            ["kernels", str(self.cost.kernels)],
            ["operations", f"{count_text(self.cost.flops)}FLOP"],
            ["read and written", bytes_text(self.cost.bytes_accessed)],
        ]
        used = f"{self.used} of {self.chips} chips are used ({self.chip})."
        told = f"{used} Nothing has run: the machine is not here. {fits}"
        sources = f"Figures: {'; '.join(self.sources)}."
        table = Table(["of each chip", ""], rows)
        return Page(f"Target {self.description}", [told, table, *self.cost.details(), sources])


class Report(OnPage, _Part):
    """What a compiled program consists of and needs. Sizes are bytes on one device.

    Called with a path, it is written there, as one HTML page.

    Attributes:
        program: which Ir it is.
        device: what was asked for.
        devices: the devices.
        replicas: how many there are, over all processes.
        calls: how called graphs were compiled: "dispatched", a plan of executables; "kept", "rolled" or "inlined", one
            program.
        reason: why so.
        loops: of calls that are rolled.
        written_out: of the calls that are not, if calls are rolled: the graphs, each with why.
        variables, buffers, streams, graphs: what the program has. The main graph comes first.
        collectives: what its replicas do together.
        size: how large it is, with and without outlining.
        work: floating point operations, by the types of ops, the most first.
        pieces: what was compiled, in the order in which it is first run.
        precision: how float32 numbers are multiplied, and what fewer digits would be computed with; `None` on CPUs,
            which compute with all of them.
        seconds: how long compiling took, with all around it.
        memory: what the program needs.
        runs: how often it has been run so far.
        run_seconds: how long the host was busy with these runs; devices go on working meanwhile, and afterwards.
        timeline: the last recording, if there is one.
        estimate: what the program would cost on IPUs; only for the device "ipu_model".
        target: the machine that it was compiled for, and what it costs there; only where that is not here.

    Example:
        >>> session = popxl.Session(ir)
        >>> print(session.report)
        >>> session.report("report.html")
        >>> session.report.memory.device  # bytes, at most
        >>> session.report.model_dump_json()
    """

    program: str
    device: str
    devices: tuple[str, ...]
    replicas: int
    calls: str
    reason: str
    loops: tuple[LoopReport, ...] = ()
    written_out: dict[str, str] = {}
    variables: tuple[VariableReport, ...]
    buffers: tuple[BufferReport, ...]
    streams: tuple[StreamReport, ...]
    graphs: tuple[GraphReport, ...]
    collectives: tuple[CollectiveReport, ...]
    size: SizeReport
    work: tuple[WorkReport, ...]
    pieces: tuple[PieceReport, ...]
    precision: str | None = None
    seconds: float
    memory: Memory
    runs: int
    run_seconds: float
    timeline: Timeline | None = None
    estimate: Estimate | None = None
    target: TargetReport | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def dispatches(self) -> int:
        """How many executables one run queues."""
        return sum(piece.runs for piece in self.pieces)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def flops(self) -> int:
        """Floating point operations of one run, on one replica."""
        return sum(each.flops for each in self.work)

    def __repr__(self) -> str:
        return f"Report[{self.program} on {self.device}]"

    def __call__(self, path: str | os.PathLike[str]) -> None:
        """Write the report to a file, as one HTML page that loads nothing from elsewhere. `save` is the same.

        Example:
            >>> session = popxl.Session(ir)
            >>> session.report("report.html")
        """
        self.save(path)

    def page(self) -> Page:
        """What `print`, notebooks and browsers show."""
        replicas = "1 replica" if self.replicas == 1 else f"{self.replicas} replicas"
        count = f"{len(self.devices)} device{'s' * (len(self.devices) > 1)}"
        where = f"{replicas} on {count} ({self.device}): {', '.join(self.devices)}."
        return Page(
            f"Report of {self.program}",
            [
                where,
                self._facts(),
                *([self.target.page()] if self.target is not None else []),
                *self._schedule(),
                self.memory.page(),
                *self._compiled(),
                self._sizes(),
                *self._flops(),
                *self._of_variables(),
                *_section(
                    "Streams", ["stream", "direction", "a transfer", "a run", "bytes"], map(_stream, self.streams)
                ),
                *self._of_buffers(),
                *self._between_replicas(),
                *self._times(),
                *([self.estimate.page()] if self.estimate is not None else []),
            ],
        )

    def _facts(self) -> Facts:
        crossing = sum(stream.bytes for stream in self.streams)
        known = [
            ("memory of a device", bytes_text(self.memory.device)),
            ("work of a run", f"{count_text(self.flops)}FLOP"),
            ("ops of all graphs", count_text(self.size.ops)),
            ("in and out in a run", bytes_text(crossing)),
            ("compiled in", seconds_text(self.seconds)),
        ]
        if self.estimate is not None:
            known.append(("an IPU, estimated", f"{count_text(self.estimate.cycles)} cycles"))
        return Facts(known)

    def _schedule(self) -> list[Page]:
        rows = [[g.name or "main graph", str(g.ops), str(g.runs), count_text(g.flops)] for g in self.graphs]
        table = Table.cut(["graph", "ops", "runs", "FLOP of its own ops"], rows)
        texts = [Listing(f"{g.name or 'main graph'}: {g.ops} ops, run {_times(g.runs)}", g.text) for g in self.graphs]
        return [Page("Schedule", [*table, *texts])]

    def _compiled(self) -> list[str | Page]:
        way = _WAYS[self.calls].format(pieces=len(self.pieces), dispatches=self.dispatches)
        columns = ["piece", "runs", "ops", "text", "arguments", "outputs", "temporaries", "compiled in"]
        rows = [
            [
                *(p.name, str(p.runs), str(p.ops)),
                *map(bytes_text, (p.text, p.arguments, p.outputs, p.temporaries)),
                seconds_text(p.seconds) if p.seconds else "known before",
            ]
            for p in self.pieces
        ]
        told = f"{way} {self.reason} Compiling took {seconds_text(self.seconds)}."
        return [Page("Compiled", [told, *Table.cut(columns, rows), *self._rolled()])]

    def _rolled(self) -> list[Page]:
        loops = [[loop.text, loop.graph or "main graph", str(loop.turns), str(loop.ops)] for loop in self.loops]
        left = [[graph, why] for graph, why in self.written_out.items()]
        return [
            *_section("Loops of calls", ["a turn", "in", "turns", "ops of a turn"], loops),
            *_section("Calls that are written out", ["graph", "why"], left),
        ]

    def _sizes(self) -> Page:
        size = self.size
        rows = [["ops", str(size.ops), str(size.ops_written_out)]]
        if size.text_written_out is not None:
            rows.append(["text that is compiled", bytes_text(size.text), bytes_text(size.text_written_out)])
        return Page("Size of the program", [Table(["", "outlined", "every call written out"], rows)])

    def _flops(self) -> list[Page]:
        total = self.flops
        rows = [
            [w.op, str(w.runs), count_text(w.flops), f"{100 * w.flops / total:.1f} %"] for w in self.work if w.flops
        ]
        if rows:
            rows.insert(0, ["in all", str(sum(w.runs for w in self.work if w.flops)), count_text(total), ""])
        table = Table.cut(["op", "in a run", "FLOP", "share"], rows)
        told = [self.precision] if self.precision is not None else []
        return [Page("Floating point operations", [*told, *table])] if table else []

    def _of_variables(self) -> list[Page]:
        rows = sorted(self.variables, key=lambda v: -v.bytes)
        held = [v for v in self.variables if v.place == "device"]
        changing = sum(v.bytes for v in held if v.changes)
        total = ["in all, on the device", "", bytes_text(sum(v.bytes for v in held)), f"{bytes_text(changing)} change"]
        shown = [[v.name, v.spec, bytes_text(v.bytes), _place(v) + ", changes" * v.changes] for v in rows]
        if rows:
            shown.insert(0, total)
        return _section("Variables", ["variable", "shape", "bytes", "place"], shown)

    def _of_buffers(self) -> list[Page]:
        rows = [
            [
                str(b.number),
                str(b.entries),
                b.spec,
                bytes_text(b.bytes),
                b.memory,
                *map(bytes_text, (b.loaded, b.stored)),
            ]
            for b in self.buffers
        ]
        columns = ["buffer", "slots", "slot", "bytes", "memory", "loaded in a run", "stored in a run"]
        return _section("Remote buffers", columns, rows)

    def _between_replicas(self) -> list[Page]:
        rows = [[c.op, str(c.group_size), str(c.runs), bytes_text(c.bytes)] for c in self.collectives]
        return _section("Between replicas", ["op", "replicas of a group", "in a run", "bytes of a replica"], rows)

    def _times(self) -> list[Page]:
        if not self.runs:
            return []
        busy = seconds_text(self.run_seconds / self.runs)
        told = (
            f"Run {_times(self.runs)}. The host was busy with a run for {busy}, on average; devices work on their own "
            "meanwhile, and afterwards."
        )
        if self.timeline is None:
            return [Page("Runs", [told, "`session.recording()` notes when what runs on which device."])]
        return [Page("Runs", [told, self.timeline.page()])]


_WAYS = {
    "dispatched": "A plan: the host runs {dispatches} pieces one after the other, {pieces} different ones.",
    "kept": "One program, in which graphs that are called from several places are compiled once.",
    "rolled": "One program, in which calls that differ only in what they are given are turns of loops.",
    "inlined": "One program, in which every call is written out.",
}


def _section(title: str, columns: list[str], rows: Iterable[list[str]]) -> list[Page]:
    """A part of the page; none, if there is nothing to say."""
    table = Table.cut(columns, rows)
    return [Page(title, table)] if table else []


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _place(variable: VariableReport) -> str:
    return variable.place if variable.ipu is None else f"IPU {variable.ipu}"


def _stream(stream: StreamReport) -> list[str]:
    return [stream.name, stream.direction, stream.spec, str(stream.transfers), bytes_text(stream.bytes)]


# Of a program --------------------------------------------------------------------------------------------------------


def report_of(ir: Ir, program: CompiledProgram) -> Report:
    """The report of a compiled program. See `Session.report`."""
    main, runs = ir.main_graph, runs_of(ir.main_graph)
    ops = _stood_for(main)
    memory = memory_of_program(ir, program)
    return Report(
        program=repr(ir),
        device=program.device.name,
        devices=tuple(map(str, program.devices)),
        replicas=program.replicas.count,
        calls=program.calls,
        reason=program.reason,
        loops=_loops(program),
        written_out=_written_out(program),
        variables=_variables(ir, program),
        buffers=_buffers(program, runs),
        streams=_streams(program),
        graphs=tuple(_graph(graph, runs[graph]) for graph in reachable(main)),
        collectives=_collectives(runs),
        size=_size(main, program),
        work=_work(runs),
        pieces=_pieces(main, program, ops),
        precision=_precision(ir.options.precision, program.layout.destination.platform),
        seconds=program.compiled.seconds,
        memory=memory,
        runs=program.runs,
        run_seconds=program.run_seconds,
        timeline=program.timeline,
        estimate=estimate_of(ir) if program.device.name == "ipu_model" else None,
        target=_target(program, memory),
    )


def _loops(program: CompiledProgram) -> tuple[LoopReport, ...]:
    rolling = program.layout.rolling
    return tuple(
        LoopReport(
            graph=loop.ops[0].graph.name,
            turns=len(loop.turns),
            ops=len(loop.ops),
            calls=tuple(callee.name for op in loop.ops for callee in op.called_graphs),
            text=summary(loop.ops),
        )
        for loop in (() if rolling is None else rolling.loops)
    )


def _written_out(program: CompiledProgram) -> dict[str, str]:
    rolling = program.layout.rolling
    return {} if rolling is None else {graph.name: why for graph, why in rolling.left_alone.items()}


def _target(program: CompiledProgram, memory: Memory) -> TargetReport | None:
    """The machine that the program was compiled for, if that is not here."""
    target = program.device.target
    if target is None:
        return None
    return TargetReport(
        description=str(target),
        chip=target.chip.name,
        chips=target.count,
        used=len(program.devices),
        capacity=target.chip.memory_bytes,
        with_buffers=memory.device + memory.buffers_on_host,
        without_buffers=memory.device - memory.buffers,
        fits=memory.device <= target.chip.memory_bytes,
        sources=target.chip.sources,
        cost=cost_of(program),
    )


_MULTIPLYING = {
    "tpu": {"highest": "six passes of bfloat16", "high": "three passes of bfloat16", "default": "one pass of bfloat16"},
    "gpu": {"highest": "float32", "high": "TensorFloat-32", "default": "TensorFloat-32"},
}
"""What machines multiply float32 numbers with, at each precision."""


def _precision(level: str, platform: str) -> str | None:
    """How float32 numbers are multiplied, in a sentence or two."""
    if platform not in _MULTIPLYING:
        return None
    ways = _MULTIPLYING[platform]
    told = f"Products of float32 are computed at the precision {level!r}: in {ways[level]}."
    if level == "default":
        return told
    return f"{told} `ir.options.precision = 'default'` would take {ways['default']}."


def _stood_for(main: Graph) -> dict[Graph, int]:
    """For each graph, how many ops it stands for."""
    ops: dict[Graph, int] = {}
    for graph in callees_first(main):
        ops[graph] = sum(_stands_for(op, ops) for op in graph.ops)
    return ops


def _stands_for(op: Op, ops: dict[Graph, int]) -> int:
    return 1 + sum(ops[callee] for callee in op.called_graphs)


def _graph(graph: Graph, runs: int) -> GraphReport:
    flops = sum(own_flops(op).total for op in graph.ops)
    return GraphReport(name=graph.name, ops=len(graph.ops), runs=runs, flops=flops, text=definition(graph))


def _parts(runs: Counter[Graph]) -> Iterator[tuple[Op, int]]:
    """The ops that a program carries out, each with how often a run does."""
    return ((part, count) for graph, count in runs.items() for op in graph.ops for part in op.parts)


def _work(runs: Counter[Graph]) -> tuple[WorkReport, ...]:
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for op, count in _parts(runs):
        found[op.op_type].update(runs=count, flops=count * own_flops(op).total)
    work = (WorkReport(op=op, **counts) for op, counts in found.items())
    return tuple(sorted(work, key=lambda each: -each.flops))


def _collectives(runs: Counter[Graph]) -> tuple[CollectiveReport, ...]:
    found: defaultdict[tuple[str, int], Counter[str]] = defaultdict(Counter)
    for op, count in _parts(runs):
        if op.kind.between_replicas:
            found[op.op_type, op.attributes["group_size"]].update(runs=count, bytes=count * moved(op))
    return tuple(CollectiveReport(op=op, group_size=size, **counts) for (op, size), counts in found.items())


def _size(main: Graph, program: CompiledProgram) -> SizeReport:
    written_out: dict[Graph, int] = {}
    for graph in callees_first(main):
        inner = (written_out[callee] for op in graph.ops for callee in op.called_graphs)
        written_out[graph] = sum(not is_call(op) for op in graph.ops) + sum(inner)
    plan = program.executable if isinstance(program.executable, Plan) else None
    texts = {s: s.text() for s in plan.structures} if plan is not None else {None: program.text()}
    pieces = [piece.structure for piece in plan.pieces] if plan is not None else [None]
    whole = {structure: _text_written_out(text) for structure, text in texts.items()}
    return SizeReport(
        ops=sum(len(graph.ops) for graph in written_out),
        ops_written_out=written_out[main],
        text=sum(map(len, texts.values())),
        text_written_out=None if None in whole.values() else sum(whole[piece] or 0 for piece in pieces),
    )


_FUNCTION = re.compile(r"^  func\.func \w+ @([\w.$-]+|\"[^\"]*\")\(.*?^  }$", re.MULTILINE | re.DOTALL)
_CALL = re.compile(r"\bcall @([\w.$-]+|\"[^\"]*\")\(")


def _text_written_out(text: str) -> int | None:
    """The length of a lowered text with each call replaced by what it calls; `None` for text of another kind."""
    bodies = {match[1]: match[0] for match in _FUNCTION.finditer(text)}
    if "main" not in bodies:
        return None
    lengths: dict[str, int] = {}
    waiting = ["main"]
    while waiting:  # functions call each other as deep as graphs do
        callees = _CALL.findall(bodies[waiting[-1]])
        new = [name for name in dict.fromkeys(callees) if name not in lengths]
        if new:
            waiting += new
        else:
            name = waiting.pop()
            lengths[name] = len(bodies[name]) + sum(lengths[callee] for callee in callees)
    return len(text) - sum(map(len, bodies.values())) + lengths["main"]


def _variables(ir: Ir, program: CompiledProgram) -> tuple[VariableReport, ...]:
    held, buffers = program.layout.bytes_of_variables(), program.layout.bytes_of_buffers()
    found = []
    for v in ir.main_graph.variables:
        bytes, changes = held.get(v, (0, False))
        place = v.location_info
        where = "device" if v in held else "unused"
        if place.buffer is not None and v not in held:
            where = f"buffer {place.buffer.remote_buffer_id}, slot {place.entry}"
            slots, _ = buffers.get(place.buffer, (0, False))
            bytes, changes = slots // place.buffer.entries, place.buffer in program.layout.stored_to
        ipu = program.layout.ipu_of(v) if v in held else None
        found.append(VariableReport(name=v.name, spec=brief(v), bytes=bytes, place=where, changes=changes, ipu=ipu))
    return tuple(found)


def _buffers(program: CompiledProgram, runs: Counter[Graph]) -> tuple[BufferReport, ...]:
    traffic: defaultdict[RemoteBuffer, Counter[str]] = defaultdict(Counter)
    for op, count in _parts(runs):
        if op.kind.exchange == "buffer":
            way = "stored" if not op.outputs else "loaded"
            traffic[op.attributes["buffer"]][way] += count * moved(op)
    return tuple(
        BufferReport(
            number=buffer.remote_buffer_id,
            entries=buffer.entries,
            spec=f"{buffer.tensor_dtype.short}[{', '.join(map(str, buffer.tensor_shape))}]",
            bytes=bytes,
            memory="host" if is_on_host else "device",
            loaded=traffic[buffer]["loaded"],
            stored=traffic[buffer]["stored"],
            ipu=program.layout.ipu_of(buffer),
        )
        for buffer, (bytes, is_on_host) in program.layout.bytes_of_buffers().items()
    )


def _streams(program: CompiledProgram) -> tuple[StreamReport, ...]:
    return tuple(
        StreamReport(
            name=s.tensor.name,
            direction="in" if s in program.inputs else "out",
            spec=brief(s.tensor),
            transfers=program.layout.counts.get(s, 0),
            bytes=bytes,
            ipu=program.layout.ipu_of(s),
        )
        for s, bytes in program.layout.bytes_of_streams().items()
    )


def _pieces(main: Graph, program: CompiledProgram, ops: dict[Graph, int]) -> tuple[PieceReport, ...]:
    if not isinstance(program.executable, Plan):
        (executable,) = program.executables()
        text = len(program.text())
        sizes = _sizes(executable)
        return (
            PieceReport(
                name="the program", runs=1, ops=ops[main], text=text, seconds=program.compiled.seconds, **sizes
            ),
        )
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
            seconds=compiling[structure],
            **_sizes(structure.executable),
        )
        for structure, count in runs.items()
    )


def _sizes(executable: Any) -> dict[str, Any]:
    """What XLA says of an executable."""
    found = executable.memory_analysis()
    host = (found.host_argument_size_in_bytes, found.host_output_size_in_bytes, found.host_temp_size_in_bytes)
    return {
        "arguments": found.argument_size_in_bytes,
        "outputs": found.output_size_in_bytes - found.alias_size_in_bytes,
        "temporaries": found.temp_size_in_bytes,
        "code": found.generated_code_size_in_bytes or None,
        "host": sum(host) - found.host_alias_size_in_bytes,
    }


# Its memory ----------------------------------------------------------------------------------------------------------


def memory_of_program(ir: Ir, program: CompiledProgram) -> Memory:
    """What a compiled program needs. See `Session.memory`."""
    parts = {ipu: _of_ipu(ir, program, ipu) for ipu in program.ipus}
    per_replica = [*parts.values()]
    devices = tuple(
        per_replica[i % len(per_replica)].model_copy(update={"name": str(device)})
        for i, device in enumerate(program.devices)
    )
    fullest = max(parts, key=lambda ipu: parts[ipu].device)
    moments, tensors = _steps(ir, program, fullest)
    buffers = sum(bytes for bytes, is_on_host in program.layout.bytes_of_buffers().values() if is_on_host)
    analyses = [executable.memory_analysis() for executable in program.executables()]
    return Memory(
        **parts[fullest].model_dump(exclude={"name", "device"}),
        name=f"{ir!r}, on each device" if len(program.devices) > 1 else repr(ir),
        source="pieces" if isinstance(program.executable, Plan) else "program",
        devices=devices,
        buffers_on_host=buffers,
        variables_on_host=variables_on_host(ir.main_graph),
        temporaries_on_host=max(found.host_temp_size_in_bytes for found in analyses),
        moments=moments,
        tensors=tensors,
    )


def _of_ipu(ir: Ir, program: CompiledProgram, ipu: int) -> DeviceMemory:
    """What is on the device of an IPU; or on any, if IPUs are no devices of their own."""

    def here(thing: Any) -> bool:
        return program.layout.ipu_of(thing) in (None, ipu)

    held, buffers = program.layout.bytes_of_variables(), program.layout.bytes_of_buffers()
    streams = program.layout.bytes_of_streams()
    moments, _ = _steps(ir, program, ipu)
    temporaries = max((m.held + m.inside for m in moments), default=0)
    executables = program.executables()
    if isinstance(program.executable, Plan):
        pieces = {piece.structure: piece for piece in program.executable.pieces if piece.place == ipu}
        executables = tuple(structure.executable for structure in pieces)
    else:
        temporaries = program.temporaries()
    return DeviceMemory(
        name=f"IPU {ipu}",
        variables=sum(bytes for v, (bytes, _) in held.items() if here(v)),
        buffers=sum(bytes for b, (bytes, is_on_host) in buffers.items() if here(b) and not is_on_host),
        arguments=sum(streams[s] for s in program.inputs if here(s)),
        outputs=sum(streams[s] for s in program.outputs if here(s)),
        constants=sum(map(size, constants_of(ir.main_graph))),
        temporaries=temporaries,
        code=sum(found.memory_analysis().generated_code_size_in_bytes for found in executables) or None,
    )


def _steps(ir: Ir, program: CompiledProgram, ipu: int) -> tuple[tuple[Moment, ...], tuple[LiveTensor, ...]]:
    """The steps on the device of an IPU, and the values that are held there between them."""
    if not isinstance(program.executable, Plan):
        copies = program.replicas.per_device
        return moments_of(ir.main_graph, lambda t: copies * size(t))
    curve, lives = program.executable.curve()
    there = [i for i, (piece, *_) in enumerate(curve) if piece.place == ipu]
    moments = (Moment(name=piece.name, held=held, inside=inside) for piece, held, inside in curve if piece.place == ipu)
    tensors = (
        LiveTensor(
            name=f"{t.path}: {brief(t)}",
            bytes=bytes,
            first=bisect_right(there, first) - 1,
            last=bisect_right(there, last) - 1,
        )
        for t, place, bytes, first, last in lives
        if place == ipu
    )
    return tuple(moments), tuple(tensors)
