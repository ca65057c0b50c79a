"""`Report`: description of a compiled program as a page, JSON, and a memory picture.

Nearly all of it is known before the program runs. Times of a run are in a `runtime.timeline.Timeline`, which is on the
page if there is one. `runtime.inspection` makes the report of a program.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Literal

from pydantic import computed_field

from popxl.analysis.estimate import Estimate
from popxl.analysis.memory import Memory
from popxl.base.pages import Facts, Listing, OnPage, Page, Table, bytes_text, count_text, flops_text, seconds_text
from popxl.base.records import Record
from runtime.costs.cost import Cost
from runtime.timeline import Timeline
from runtime.variable_report import VariableReport, variables_page


class BufferReport(Record):
    """A remote buffer.

    Attributes:
        number: number in the Ir.
        entries: number of slots.
        spec: dtype and shape of a slot.
        bytes: all slots, of the replicas that one device runs.
        memory: memory of the slots.
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


class StreamReport(Record):
    """A stream.

    Attributes:
        name: name of the stream.
        direction: "in", from the host, or "out".
        spec: dtype and shape of one transfer.
        transfers: number of transfers in a run, at most.
        bytes: size of the array that one device receives or sends in a run.
        ipu: as for variables.
    """

    name: str
    direction: Literal["in", "out"]
    spec: str
    transfers: int
    bytes: int
    ipu: int | None = None


class CollectiveReport(Record):
    """Collectives between replicas, of one kind.

    Attributes:
        op: type of the ops.
        group_size: number of replicas in a group.
        runs: number of executions of such ops in a run of the program, at most.
        bytes: bytes that all of them move, on one replica.
    """

    op: str
    group_size: int
    runs: int
    bytes: int


class GraphReport(Record):
    """A graph.

    Attributes:
        name: name of the graph; empty for the main graph.
        ops: number of ops; calls count as one.
        runs: number of executions in one run of the program, at most.
        flops: floating point operations of its own ops in one run of it.
        text: schedule of the graph, as it is printed.
    """

    name: str
    ops: int
    runs: int
    flops: int
    text: str


class LoopReport(Record):
    """Calls rerolled into loop iterations, with accompanying ops.

    Attributes:
        graph: name of the graph; empty for the main graph.
        iterations: number of iterations.
        ops: number of ops in an iteration; calls count as one.
        calls: graphs that an iteration calls, in order.
        text: description of an iteration, in a few words.
    """

    graph: str
    iterations: int
    ops: int
    calls: tuple[str, ...]
    text: str

    @property
    def turns(self) -> int:
        """`iterations`, by its name in earlier versions."""
        return self.iterations


class WorkReport(Record):
    """Ops of one type, summed over all graphs.

    Attributes:
        op: the type.
        runs: number of executions in a run of the program, at most; for a conditional, both branches count.
        flops: floating point operations of all of them, on one replica.
    """

    op: str
    runs: int
    flops: int


class SizeReport(Record):
    """Program size, with outlining and with every call inlined.

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


class PieceReport(Record):
    """Report of a compiled executable. Sizes are XLA's, in bytes on one device.

    Attributes:
        name: description of the segment.
        runs: number of executions in one run of the program.
        ops: number of ops that it represents, including those of called graphs at each call.
        text: length of the text that XLA was given, in characters.
        arguments: bytes of all arguments, including variables.
        outputs: bytes of results, without those that overwrite arguments.
        temporaries: bytes besides arguments and outputs.
        code: machine code; `None` where XLA does not say.
        host: bytes of host memory.
        seconds: time to trace and compile it; 0 if it had been compiled before.
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


class TargetReport(Record):
    """Offline target of a compiled program.

    Attributes:
        description: description of the target.
        chip: name of a chip.
        chips: number of chips.
        used: number of chips that the program uses.
        capacity: the memory of a chip, in bytes.
        with_buffers: memory that the program needs at most, including remote buffers.
        without_buffers: memory that it needs if the buffers are in host memory.
        fits: whether the program, as it was compiled, fits into the memory of a chip.
        sources: sources of the chip's figures.
        cost: cost of a run of the program.
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
        """Section shown in reports."""
        fits = "The program fits." if self.fits else "The program does not fit."
        rows = [
            ["a chip has", bytes_text(self.capacity)],
            ["needed, with remote buffers on the chip", bytes_text(self.with_buffers)],
            ["needed, without them", bytes_text(self.without_buffers)],
            ["code", bytes_text(self.cost.code_bytes) if self.cost.code_bytes is not None else "not said by XLA"],
            ["kernels", str(self.cost.kernels)],
            ["operations", flops_text(self.cost.flops)],
            ["read and written", bytes_text(self.cost.bytes_accessed)],
        ]
        used = f"{self.used} of {self.chips} chips are used ({self.chip})."
        summary = f"{used} Nothing has run: the machine is not here. {fits}"
        sources = f"Figures: {'; '.join(self.sources)}."
        table = Table(["of each chip", ""], rows)
        return Page(f"Target {self.description}", [summary, table, *self.cost.details(), sources])


class Report(OnPage, Record):
    """Contents and requirements of a compiled program. Sizes are bytes on one device.

    Called with a path, it is written there, as one HTML page.

    Attributes:
        program: name of the Ir.
        device: description of the requested device.
        devices: the devices.
        replicas: number of replicas, over all processes.
        calls: form of called graphs: "dispatched", a plan of executables; "kept", "rolled", "batched" or "inlined", one
            program.
        reason: reason for this form.
        loops: loops of rerolled calls.
        written_out: graphs whose calls are not rerolled, each with the reason; for programs with rerolled calls.
        variables, buffers, streams, graphs: parts of the program. The main graph comes first.
        collectives: collectives of its replicas.
        size: size of the program, with and without outlining.
        work: floating point operations, by the types of ops, the most first.
        pieces: compiled segments, in the order in which they are first run.
        precision: precision of float32 products, and the effect of a lower one; `None` on CPUs, which compute with full
            precision.
        seconds: compile time, including all overheads.
        memory: memory of the program.
        offloaded: treatment of tensors that are offloaded to host memory, if there are some.
        runs: number of runs so far.
        run_seconds: time that the host was busy with these runs; devices continue to work meanwhile, and afterwards.
        timeline: the last recording, if there is one.
        estimate: estimated cost of the program on IPUs; only for the device "ipu_model".
        target: machine that it was compiled for, and its cost there; only for offline targets.

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
    offloaded: str | None = None
    runs: int
    run_seconds: float
    timeline: Timeline | None = None
    estimate: Estimate | None = None
    target: TargetReport | None = None

    @computed_field  # type: ignore[prop-decorator]
    @property
    def dispatches(self) -> int:
        """Number of executables queued per run."""
        return sum(piece.runs for piece in self.pieces)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def flops(self) -> int:
        """Floating point operations per run and replica."""
        return sum(each.flops for each in self.work)

    def __repr__(self) -> str:
        return f"Report[{self.program} on {self.device}]"

    def __call__(self, path: str | os.PathLike[str]) -> None:
        """Write the report to a file, as one self-contained HTML page. Same as `save`.

        Example:
            >>> session = popxl.Session(ir)
            >>> session.report("report.html")
        """
        self.save(path)

    def page(self) -> Page:
        """Page for `print`, notebooks and browsers."""
        replicas = "1 replica" if self.replicas == 1 else f"{self.replicas} replicas"
        count = f"{len(self.devices)} device{'s' * (len(self.devices) > 1)}"
        where = f"{replicas} on {count} ({self.device}): {_device_names(self.devices)}."
        return Page(
            f"Report of {self.program}",
            [
                where,
                self._facts(),
                *([self.target.page()] if self.target is not None else []),
                *self._schedule(),
                self.memory.page(),
                *([Page("Offloaded", [self.offloaded])] if self.offloaded is not None else []),
                *self._compiled(),
                self._sizes(),
                *self._flops(),
                *variables_page(self.variables),
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
            ("work of a run", flops_text(self.flops)),
            ("ops of all graphs", count_text(self.size.ops)),
            ("in and out in a run", bytes_text(crossing)),
            ("compiled in", seconds_text(self.seconds)),
        ]
        if self.estimate is not None:
            known.append(("an IPU, estimated", f"{count_text(self.estimate.cycles)} cycles"))
        return Facts(known)

    def _schedule(self) -> list[Page]:
        rows = [[g.name or "main graph", str(g.ops), str(g.runs), count_text(g.flops)] for g in self.graphs]
        table = Table.first_rows(["graph", "ops", "runs", "FLOP of its own ops"], rows)
        texts = [Listing(f"{g.name or 'main graph'}: {g.ops} ops, run {_times(g.runs)}", g.text) for g in self.graphs]
        return [Page("Schedule", [*table, *texts])]

    def _compiled(self) -> list[str | Page]:
        way = _WAYS[self.calls].format(pieces=len(self.pieces), dispatches=self.dispatches)
        columns = ["segment", "runs", "ops", "text", "arguments", "outputs", "temporaries", "compiled in"]
        rows = [
            [
                *(p.name, str(p.runs), str(p.ops)),
                *map(bytes_text, (p.text, p.arguments, p.outputs, p.temporaries)),
                seconds_text(p.seconds) if p.seconds else "known before",
            ]
            for p in self.pieces
        ]
        summary = f"{way} {self.reason} Compiling took {seconds_text(self.seconds)}."
        return [Page("Compiled", [summary, *Table.first_rows(columns, rows), *self._rolled()])]

    def _rolled(self) -> list[Page]:
        loops = [[loop.text, loop.graph or "main graph", str(loop.iterations), str(loop.ops)] for loop in self.loops]
        left = [[graph, why] for graph, why in self.written_out.items()]
        return [
            *_section("Loops of calls", ["an iteration", "in", "iterations", "ops of an iteration"], loops),
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
        table = Table.first_rows(["op", "in a run", "FLOP", "share"], rows)
        summary = [self.precision] if self.precision is not None else []
        return [Page("Floating point operations", [*summary, *table])] if table else []

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
        summary = (
            f"Run {_times(self.runs)}. The host was busy with a run for {busy}, on average; devices work on their own "
            "meanwhile, and afterwards."
        )
        if self.timeline is None:
            return [Page("Runs", [summary, "`session.recording()` notes when what runs on which device."])]
        return [Page("Runs", [summary, self.timeline.page()])]


_WAYS = {
    "dispatched": "A plan: the host runs {dispatches} segments in sequence, {pieces} different ones.",
    "kept": "One program, in which graphs that are called from several places are compiled once.",
    "rolled": "One program, in which calls that differ only in what they are given are iterations of loops.",
    "batched": "One program, in which calls that differ only in what they are given are iterations of loops, or "
    "updates of whole arrays.",
    "inlined": "One program, in which every call is written out.",
}


def _section(title: str, columns: list[str], rows: Iterable[list[str]]) -> list[Page]:
    """Page section with a table; empty list without rows."""
    table = Table.first_rows(columns, rows)
    return [Page(title, table)] if table else []


def _device_names(devices: Sequence[str]) -> str:
    """Device names; for many devices, only first and last."""
    return ", ".join(devices) if len(devices) <= 4 else f"{devices[0]} to {devices[-1]}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _stream(stream: StreamReport) -> list[str]:
    return [stream.name, stream.direction, stream.spec, str(stream.transfers), bytes_text(stream.bytes)]
