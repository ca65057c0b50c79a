"""`Cost`: numeric per-chip cost of a compiled program, returned by `session.cost()`."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from popxl.analysis.communication import COPY
from popxl.analysis.flops import moved
from popxl.analysis.memory import runs_of
from popxl.base.atomic_files import replace_file
from popxl.base.pages import OnPage, Page, Table, bytes_text, count_text, flops_text, seconds_text
from popxl.base.records import Record
from runtime.costs.hlo import Module, parse_hlo
from runtime.costs.host_copies import HostCopies, host_copies
from runtime.costs.lines import LineCost, arguments_of, lines_of
from runtime.costs.network import LinkSpan, collective_time, spans_of
from runtime.costs.seconds import LEVELS, GraphCost, PrecisionCost, capped, dtype_of, graphs_of, precisions_of
from runtime.costs.step import Pricer, StepTimeline, added, places_of, pricer, timeline_of
from runtime.costs.timing import Timing, timing_of
from runtime.costs.wires import AxisTraffic, axes_of, page_of_axes
from runtime.costs.work import Account, Collective, Work, account_of
from runtime.lowering.channels import Channel
from runtime.plan.plan import Plan
from runtime.plan.structure import Structure
from runtime.program.compiled import CompiledProgram
from runtime.targets import chip
from runtime.targets.chip import Chip, Tpu


class CollectiveCost(Record):
    """All collectives of one kind.

    Attributes:
        count: number of executions in a run.
        bytes: bytes on one chip: of operands or results, whichever is more.
    """

    count: int
    bytes: int


class CollectiveUse(Record):
    """Collectives at one source line of the program.

    Attributes:
        kind: kind of XLA collective: "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute".
        source: the line, `train.py:12`; "" where XLA does not say.
        graph: name of the graph; "" for the main graph.
        replicas: number of replicas in a group.
        count, bytes: as in `CollectiveCost`.
    """

    kind: str
    source: str
    graph: str
    replicas: int
    count: int
    bytes: int


class IpuCost(Record):
    """Cost of one IPU that is a separate device.

    Attributes:
        ipu: number of the IPU.
        seconds: time of its computation in a run; it waits during the rest. `None` without figures.
    """

    ipu: int
    seconds: float | None


class Cost(OnPage, Record):
    """Cost of a compiled program on one chip: sizes reported by XLA, and one run.

    A run is derived from the compiled program: loops count with their iterations, conditionals with all branches.
    Nothing was measured. `seconds` is an estimate: kernels in XLA's order, each by the figures and the efficiency of
    the chip, collectives by their wires; see `docs/time.md`.

    Attributes:
        code_bytes: machine code; `None` where XLA does not say.
        argument_bytes: bytes of variables, remote buffers on the device, and feeds.
        temporary_bytes: further bytes that a run needs.
        alias_bytes: bytes of arguments that are overwritten with results, rather than copied.
        host_bytes: bytes of host memory for the device: remote buffers, and temporaries of executables.
        flops: floating point operations.
        bytes_accessed: bytes that kernels read and write, in whichever memory.
        kernels: number of kernels that the chip runs one after the other: fusions, products, copies, collectives.
        copies: number of kernels that only copy; including a TPU's transfers between its memories during computation.
        collectives: collectives by kind. Copies between IPUs that are separate devices have the kind "copy between
            IPUs"; `argument_bytes`, operations and kernels are then totals of all IPUs.
        uses: collectives by lines of the program.
        cycles: XLA's own estimate, for TPUs; `None` elsewhere. For several IPUs, from the first start to the last end,
            including the copies between them.
        compile_seconds: compile time, including all overheads.
        graphs: the graphs, the longest first.
        seconds: time of a run; `None` for a device without figures. IPUs that are separate devices work at the same
            time unless they wait for each other: a pipeline takes the time of its schedule.
        step: timeline of the run: its bounds, and exposed communication.
        axes: traffic along each dimension of the replicas, and its links.
        utilisation: share of the published rate of products that a run attains: its model FLOPs utilisation, if it
            recomputes nothing.
        lines: work and memory by source lines, most bytes first.
        arguments: bytes of the executables' arguments, by name.
        overwritten: bytes of arguments that results overwrite.
        chip_hours: seconds of all chips in a run, in hours.
        ipus: these IPUs; nothing where one device stands for all.
        precisions: the same for the precision that float32 products have, and for faster ones: "highest", "high" and
            "default". Nothing for a device without figures, and for programs without such products.

    Example:
        >>> cost = popxl.Session(ir, "tpu v5e:2x2").cost()
        >>> cost.cycles, {kind: each.bytes for kind, each in cost.collectives.items()}
        >>> print(cost)
    """

    name: str
    chip: str
    code_bytes: int | None
    argument_bytes: int
    temporary_bytes: int
    alias_bytes: int
    host_bytes: int
    flops: int
    bytes_accessed: int
    kernels: int
    copies: int
    collectives: Mapping[str, CollectiveCost]
    uses: tuple[CollectiveUse, ...]
    cycles: int | None
    compile_seconds: float
    graphs: tuple[GraphCost, ...]
    seconds: float | None
    ipus: tuple[IpuCost, ...] = ()
    precisions: Mapping[str, PrecisionCost] = {}
    step: StepTimeline | None = None
    axes: tuple[AxisTraffic, ...] = ()
    utilisation: float | None = None
    chip_hours: float | None = None
    lines: tuple[LineCost, ...] = ()
    arguments: Mapping[str, int] = {}
    overwritten: Mapping[str, int] = {}

    def page(self) -> Page:
        """Page for `print` and notebooks."""
        return Page(f"Cost of {self.name}, on one {self.chip}", [self.totals(), *self.details()])

    def totals(self) -> Table:
        """Table of sizes, operations, kernels and times of one run."""
        sizes = ("code", "argument", "temporary", "alias", "host")
        found = ((name, getattr(self, f"{name}_bytes")) for name in sizes)
        rows = [[name, bytes_text(count)] for name, count in found if count is not None]
        rows += [["read and written", bytes_text(self.bytes_accessed)], ["operations", flops_text(self.flops)]]
        rows += [["kernels", str(self.kernels)], ["copies", str(self.copies)]]
        rows += [["cycles, estimated by XLA", count_text(self.cycles)]] if self.cycles is not None else []
        rows += [["a run, estimated", seconds_text(self.seconds)]] if self.seconds is not None else []
        rows += [["compiled in", seconds_text(self.compile_seconds)]]
        return Table(["", "of a run"], rows)

    def save_budget(self, path: str | os.PathLike[str]) -> None:
        """Write the cost to a JSON file that `popxl.testing.assert_costs` and `popxl diff` read.

        Example:
            >>> popxl.Session(ir, "gpu h100").cost().save_budget("costs.json")
        """
        stable = self.model_copy(update={"compile_seconds": 0.0})  # the same at each compilation
        replace_file(Path(path), (stable.model_dump_json(indent=2) + "\n").encode())

    def details(self) -> list[Page]:
        """Pages about collectives between chips, and about the bound of each graph."""
        shown = [
            [use.kind, use.source, str(use.replicas), str(use.count), bytes_text(use.bytes), use.graph or "main graph"]
            for use in self.uses
        ]
        columns = ["collective", "line", "replicas", "in a run", "bytes of a chip", "graph"]
        parts = [Page("Between chips", Table.first_rows(columns, shown))] if shown else []
        parts += self._between_ipus()
        parts += page_of_axes(self.axes)
        if self.seconds is None:
            return parts
        rows = [
            [
                *(g.name or "main graph", g.bound or "", seconds_text(sum(g.limits.values()))),
                *(seconds_text(g.seconds or 0), flops_text(g.flops)),
                *map(bytes_text, (g.bytes_accessed, g.network_bytes, g.host_bytes)),
            ]
            for g in self.graphs
        ]
        columns = ["graph", "bound by", "estimate", "at least", "operations", "memory", "network", "host"]
        told = [f"{seconds_text(self.seconds)} for a run of a {self.chip}. It is an estimate; nothing was measured."]
        if self.utilisation is not None and self.chip_hours is not None:
            told[0] += (
                f" Products attain {100 * self.utilisation:.1f} % of the published rate. A million runs take "
                f"{1e6 * self.chip_hours:.3g} chip-hours."
            )
        step = [] if self.step is None else [self.step.page()]
        return [
            *parts,
            Page("Time, estimated", [*told, *Table.first_rows(columns, rows)]),
            *step,
            *self._by_precision(),
        ]

    def _between_ipus(self) -> list[Page]:
        """Page about copies between IPUs, and the waiting time of each IPU."""
        if not self.ipus:
            return []
        copied = self.collectives.get(COPY, CollectiveCost(count=0, bytes=0))
        told = f"A run copies {copied.count} tensors of {bytes_text(copied.bytes)} in all from one IPU to another."
        if not self.seconds:
            return [Page("Between IPUs", [told])]
        rows = [
            [str(each.ipu), seconds_text(each.seconds or 0), f"{100 * (1 - (each.seconds or 0) / self.seconds):.0f} %"]
            for each in self.ipus
        ]
        return [Page("Between IPUs", [told, Table(["IPU", "computes, estimated", "waits"], rows)])]

    def _by_precision(self) -> list[Page]:
        """Page about the cost of float32 product precision."""
        if not self.precisions:
            return []
        own, *faster = self.precisions.values()
        told = f"Products of float32 are computed at the precision {next(iter(self.precisions))!r}."
        if faster:
            less = seconds_text(own.seconds - faster[-1].seconds)
            told += (
                f" By their passes, a run would take {less} less at 'default', which computes with fewer digits: "
                "`ir.options.precision`. It is an estimate."
            )
        rows = [
            [
                level,
                seconds_text(each.products),
                *([] if each.cycles is None else [count_text(each.cycles)]),
                seconds_text(each.seconds),
            ]
            for level, each in self.precisions.items()
        ]
        columns = ["at most", "products", *([] if own.cycles is None else ["in cycles"]), "a run"]
        return [Page("Precision of float32, estimated", [told, Table(columns, rows)])]


def cost_of(program: CompiledProgram) -> Cost:
    """Compute a compiled program's cost. See `Session.cost`."""
    check_whole(program, "cost")
    account, parts, modules = _accounts(program)
    figures = chip_of(program)
    host = _host_traffic(program)
    count = program.layout.replicas.count
    total = account.total
    price = None if figures is None else pricer(figures, places_of(figures, program.layout.replicas.devices))
    steps = None if figures is None or price is None else _Steps(program, modules, figures, price)

    def timed(level: str = LEVELS[0]) -> Timing:
        """Timing of the IPUs, with product precision capped at `level`."""
        return _timing(program, figures, lambda each: 0.0 if steps is None else steps.seconds(each, level))

    def seconds(level: str) -> float:
        """Run time in seconds, with product precision capped at `level`."""
        if figures is None or steps is None:
            return 0.0
        own = steps.total(level) if len(program.layout.ipus) == 1 else timed(level).seconds
        return max(own, sum(host.values()) / figures.host_bandwidth)

    estimate = seconds(LEVELS[0]) if figures is not None else None
    step = None if steps is None or estimate is None else steps.timeline(estimate)
    graphs = tuple(
        graphs_of(
            account,
            host,
            figures,
            count,
            None if price is None else lambda each: price(each).seconds,
            None if step is None else step.graphs,
        )
    )

    cycles = total.cycles
    collectives = _by_kind(account.collectives)
    ipus: tuple[IpuCost, ...] = ()
    if len(program.layout.ipus) > 1:
        timing = timed()
        collectives[COPY] = CollectiveCost(count=timing.copies, bytes=timing.copied_bytes)
        busy = {ipu: timing.busy[ipu] if figures is not None else None for ipu in program.layout.ipus}
        ipus = tuple(IpuCost(ipu=ipu, seconds=each) for ipu, each in busy.items())
        if isinstance(figures, Tpu):
            clock = figures.clock
            cycles = round(clock * _timing(program, figures, lambda each: parts[each].total.cycles / clock).seconds)
    return Cost(
        name=f"Ir[id={program.layout.main.ir.id}]",
        chip=figures.name if figures is not None else program.layout.devices[0].device_kind,
        **_sizes(program),
        flops=total.flops,
        bytes_accessed=total.bytes,
        kernels=total.kernels,
        copies=total.copies,
        collectives=collectives,
        uses=_by_line(account.collectives, count),
        cycles=cycles if program.layout.destination.platform == "tpu" else None,
        compile_seconds=program.seconds,
        graphs=graphs,
        seconds=estimate,
        ipus=ipus,
        precisions={} if figures is None else precisions_of(account, figures, seconds),
        step=step,
        axes=axes_of(program, figures, account.collectives, price),
        **_by_name(modules, _variables(program)),
        **_utilisation(total, figures, estimate, len(program.layout.devices), len(program.layout.ipus)),
    )


def _utilisation(
    total: Work, figures: Chip | None, seconds: float | None, chips: int, parts: int = 1
) -> dict[str, Any]:
    """Share of the rate of products that a run attains, and its chip-hours; `parts` chips share a replica's work."""
    if figures is None or not seconds:
        return {}
    least = sum(count / figures.rate(dtype_of(key.dtype), key.precision) for key, count in total.products.items())
    return {"utilisation": least / (parts * seconds), "chip_hours": chips * seconds / 3600}


class _Steps:
    """Timelines of a program's executables, by maximal precision of products."""

    def __init__(
        self, program: CompiledProgram, modules: Sequence[tuple[Module, int]], figures: Chip, price: Pricer
    ) -> None:
        self._figures, self._price = figures, price
        structures = (structure for structure, *_ in _runs(program))
        self._runs = [(structure, *run) for structure, run in zip(structures, modules, strict=True)]
        self._known: dict[tuple[int, str], StepTimeline] = {}

    def _timeline(self, number: int, level: str) -> StepTimeline:
        if (number, level) not in self._known:
            module = self._runs[number][1]
            self._known[number, level] = timeline_of(
                module, self._figures, self._price, lambda work: capped(level, work)
            )
        return self._known[number, level]

    def seconds(self, structure: Structure, level: str) -> float:
        """Time of a segment, with its dispatch."""
        number = next(i for i, (each, *_) in enumerate(self._runs) if each is structure)
        return self._timeline(number, level).seconds + self._figures.efficiency.dispatch

    def total(self, level: str) -> float:
        """Total time of all executables, including their dispatch."""
        dispatch = self._figures.efficiency.dispatch
        return sum(times * (self._timeline(i, level).seconds + dispatch) for i, (*_, times) in enumerate(self._runs))

    def timeline(self, seconds: float) -> StepTimeline:
        """The run."""
        parts = [(self._timeline(i, LEVELS[0]), times) for i, (*_, times) in enumerate(self._runs)]
        return added(parts, seconds, self._figures.efficiency.dispatch)


def cost_of_executable(
    name: str,
    module: Module,
    sizes: Any,
    figures: Chip | None,
    devices: Sequence[Any],
    seconds: float,
    kind: str,
) -> Cost:
    """Compute the cost of one executable that is not an Ir's.

    Args:
        name: name of the executable.
        module: HLO of the executable.
        sizes: XLA's memory analysis of it.
        figures: figures of the chip, if they are known.
        devices: devices in the order of XLA's numbers.
        seconds: compile time.
        kind: JAX's name of the kind of device.
    """
    account = account_of(module)
    total = account.total
    price = None if figures is None else pricer(figures, places_of(figures, devices))
    count = len(devices)

    def run(level: str) -> StepTimeline:
        assert figures is not None and price is not None
        dispatch = figures.efficiency.dispatch
        found = timeline_of(module, figures, price, lambda work: capped(level, work))
        return added([(found, 1)], found.seconds + dispatch, dispatch)

    def run_seconds(level: str) -> float:
        return run(level).seconds

    step = None if figures is None else run(LEVELS[0])
    graphs = tuple(
        graphs_of(
            account,
            {},
            figures,
            count,
            None if price is None else lambda each: price(each).seconds,
            None if step is None else step.graphs,
        )
    )

    return Cost(
        name=name,
        chip=figures.name if figures is not None else kind,
        code_bytes=sizes.generated_code_size_in_bytes or None,
        argument_bytes=sizes.argument_size_in_bytes,
        temporary_bytes=sizes.temp_size_in_bytes,
        alias_bytes=sizes.alias_size_in_bytes,
        host_bytes=sizes.host_argument_size_in_bytes + sizes.host_temp_size_in_bytes,
        flops=total.flops,
        bytes_accessed=total.bytes,
        kernels=total.kernels,
        copies=total.copies,
        collectives=_by_kind(account.collectives),
        uses=_by_line(account.collectives, count),
        cycles=total.cycles if isinstance(figures, Tpu) else None,
        compile_seconds=seconds,
        graphs=graphs,
        seconds=None if step is None else step.seconds,
        precisions={} if figures is None else precisions_of(account, figures, run_seconds),
        step=step,
        **_by_name([(module, 1)], {}),
        **_utilisation(total, figures, None if step is None else step.seconds, count),
    )


def account_of_program(program: CompiledProgram) -> Account:
    """Account of one run of a program, summed over its executables."""
    return _accounts(program)[0]


def _accounts(program: CompiledProgram) -> tuple[Account, dict[Structure, Account], list[tuple[Module, int]]]:
    """Account of one run of a program, one per segment structure for a plan, and the executables with their runs."""
    account, parts, modules = Account(), dict[Structure, Account](), list[tuple[Module, int]]()
    for structure, executable, times in _runs(program):
        modules.append((parse_hlo(executable.as_text()), times))
        found = account_of(modules[-1][0])
        account.add(found, times)
        if structure is not None:
            parts[structure] = found
    return account, parts, modules


def _variables(program: CompiledProgram) -> dict[str, str]:
    """Names of the variables in arguments of a program, by those that JAX gives to arguments."""
    layout = program.layout
    return {
        f"{what}[{i}]": _listed([t.name for t in block.tensors])
        for what, blocks in (("changing", layout.changing), ("constant", layout.constant))
        for i, block in enumerate(blocks)
    }


def _listed(names: Sequence[str]) -> str:
    """Text of names; of many, only the first."""
    return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:2])} and {len(names) - 2} more"


def _by_name(modules: Sequence[tuple[Module, int]], names: Mapping[str, str]) -> dict[str, Any]:
    """Costs of lines and sizes of arguments."""
    arguments, overwritten = arguments_of(modules, names)
    return {"lines": lines_of(modules), "arguments": arguments, "overwritten": overwritten}


def host_copies_of(program: CompiledProgram) -> HostCopies:
    """Copies of one run of a program between the memories of device and host, summed over its executables."""
    found = [(host_copies(parse_hlo(executable.as_text())), times) for _, executable, times in _runs(program)]
    return HostCopies(sum(each.beside * n for each, n in found), sum(each.alone * n for each, n in found))


def copies_of(program: CompiledProgram) -> Timing:
    """Copies between IPUs of a program, if IPUs are separate devices; without times."""
    return _timing(program, None, lambda each: 0.0)


def check_whole(program: CompiledProgram, what: str) -> None:
    """Raise `NotImplementedError` for a program some of whose stages other processes have compiled."""
    if program.layout.stages is not None:
        raise NotImplementedError(
            f"Session.{what}: this process has compiled the IPUs {program.layout.own_ipus} of the program only, and "
            "other processes the others. Ask a session for a target that is not here, or one of a single process."
        )


def _timing(program: CompiledProgram, figures: Chip | None, seconds: Callable[[Structure], float]) -> Timing:
    """Timing of the IPUs of a program, if each IPU is a separate device."""
    layout = program.layout
    buffers = ((buffer, bytes) for buffer, (bytes, _) in layout.bytes_of_buffers().items())
    sizes: list[tuple[Channel, int]] = [*layout.bytes_of_streams().items(), *buffers]
    return timing_of(
        program.executable, cache(seconds), _copying(program, figures), dict(sizes), program.layout.replicas.per_device
    )


def _copying(program: CompiledProgram, figures: Chip | None) -> Callable[[int], float]:
    """Seconds of a copy between the IPUs of a replica: over the slowest wires that any of these use."""
    if figures is None:
        return lambda nbytes: 0.0
    devices = program.layout.destination.devices
    places = dict(zip(devices, places_of(figures, devices), strict=True))
    of_one = [places[terms.replicas.devices[0]] for terms in program.layout.terms.values()]
    spans = spans_of(figures, of_one, [*places.values()]) or (LinkSpan(figures.levels[0], 2),)
    return lambda nbytes: collective_time(figures, "collective-permute", nbytes, spans).seconds


def chip_of(program: CompiledProgram) -> Chip | None:
    """Published figures of the chip that a program targets; `None` for an unknown chip."""
    target = program.device.target
    return chip.of_device(program.layout.devices[0].device_kind) if target is None else target.chip


def texts(program: CompiledProgram) -> dict[str, str]:
    """HLO text of each executable, keyed by its purpose. See `Session.hlo`."""
    if not isinstance(program.executable, Plan):
        return {"the program": program.executable.as_text()}
    found: dict[str, str] = {}
    for place, pair in program.ends.items():
        for name, executable in zip(("feeds", "fetches"), pair, strict=True):
            found[_unused(f"{name} of IPU {place}" if len(program.layout.ipus) > 1 else name, found)] = (
                executable.as_text()
            )
    first = {piece.structure: piece.name for piece in reversed(program.executable.segments)}
    for structure in program.executable.structures:
        found[_unused(first[structure], found)] = structure.executable.as_text()
    return found


def _unused(name: str, names: Mapping[str, object]) -> str:
    """An unused name: `name`, or `name` with a number."""
    number = 1
    while (numbered := f"{name} ({number})" if number > 1 else name) in names:
        number += 1
    return numbered


def _runs(program: CompiledProgram) -> Iterator[tuple[Structure | None, Any, int]]:
    """Executables, each with its segment structure (`None` outside of segments) and its executions per run."""
    if not isinstance(program.executable, Plan):
        yield None, program.executable, 1
        return
    yield from ((None, executable, 1) for pair in program.ends.values() for executable in pair)
    yield from ((structure, structure.executable, times) for structure, times in program.executable.runs.items())


def _sizes(program: CompiledProgram) -> dict[str, Any]:
    """Memory sizes of executables from XLA; for a plan, including values live between its segments."""
    found = [executable.memory_analysis() for executable in program.executables()]
    on_host = sum(bytes for bytes, is_there in program.layout.bytes_of_buffers().values() if is_there)
    sizes: dict[str, Any] = {
        "code_bytes": sum(each.generated_code_size_in_bytes for each in found) or None,
        "temporary_bytes": program.temporaries(),
        "host_bytes": on_host + max(each.host_temp_size_in_bytes for each in found),
    }
    if not isinstance(program.executable, Plan):
        (whole,) = found
        return sizes | {
            "argument_bytes": whole.argument_size_in_bytes,
            "alias_bytes": whole.alias_size_in_bytes,
        }
    layout = program.layout
    held = [*layout.bytes_of_variables().values()]
    buffers = [
        (bytes, buffer in layout.stored_to)
        for buffer, (bytes, is_there) in layout.bytes_of_buffers().items()
        if not is_there
    ]
    streams = layout.bytes_of_streams()
    fed = sum(streams[stream] for stream in program.layout.inputs)
    return sizes | {
        "argument_bytes": sum(bytes for bytes, _ in (*held, *buffers)) + fed,
        "alias_bytes": sum(bytes for bytes, changes in (*held, *buffers) if changes),
    }


def _host_traffic(program: CompiledProgram) -> dict[str, int]:
    """Host traffic in bytes per run, keyed by graph: remote buffer slots, feeds and fetches."""
    layout, found = program.layout, defaultdict[str, int](int)
    on_host = {buffer for buffer, (_, is_there) in layout.bytes_of_buffers().items() if is_there}
    for graph, times in runs_of(layout.main).items():
        name = "" if graph is layout.main else graph.name
        for op in (part for each in graph.ops for part in each.parts):
            if op.kind.exchange == "buffer" and op.attributes["buffer"] in on_host:
                found[name] += times * moved(op) * program.layout.replicas.per_device
    found[""] += sum(layout.bytes_of_streams().values())
    return found


def _by_kind(collectives: Iterable[Collective]) -> dict[str, CollectiveCost]:
    found: defaultdict[str, list[Collective]] = defaultdict(list)
    for each in collectives:
        found[each.kind].append(each)
    return {
        kind: CollectiveCost(count=sum(e.runs for e in alike), bytes=sum(e.runs * e.bytes for e in alike))
        for kind, alike in found.items()
    }


def _by_line(collectives: Iterable[Collective], all_replicas: int) -> tuple[CollectiveUse, ...]:
    found: defaultdict[tuple[str, str, str, int], list[Collective]] = defaultdict(list)
    for each in collectives:
        found[each.kind, each.source, each.graph, each.group_size or all_replicas].append(each)
    return tuple(
        CollectiveUse(
            kind=kind,
            source=source,
            graph=graph,
            replicas=replicas,
            count=sum(e.runs for e in alike),
            bytes=sum(e.runs * e.bytes for e in alike),
        )
        for (kind, source, graph, replicas), alike in found.items()
    )
