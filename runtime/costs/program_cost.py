"""`cost_of`: the cost of a compiled program, from the HLO of its executables and the figures of the chip.

Further sums over the same executables: work, copies between IPUs, copies between host and device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from popxl.analysis.communication import COPY
from popxl.analysis.flops import moved
from popxl.analysis.memory import runs_of
from runtime.costs.cost import CollectiveCost, CollectiveUse, Cost, IpuCost
from runtime.costs.executables import check_whole, chip_of, executables_of
from runtime.costs.hlo import Module, parse_hlo
from runtime.costs.host_copies import HostCopies, host_copies
from runtime.costs.lines import arguments_of, lines_of
from runtime.costs.network import LinkSpan, collective_time, spans_of
from runtime.costs.seconds import LEVELS, capped, dtype_of, graphs_of, precisions_of
from runtime.costs.step import Pricer, StepTimeline, added, places_of, pricer, timeline_of
from runtime.costs.timing import Timing, timing_of
from runtime.costs.wires import axes_of
from runtime.costs.work import Account, Collective, Work, account_of
from runtime.lowering.channels import Channel
from runtime.plan.plan import Plan
from runtime.plan.structure import Structure
from runtime.program.compiled import CompiledProgram
from runtime.targets.chip import Chip, Tpu


def cost_of(program: CompiledProgram) -> Cost:
    """Compute a compiled program's cost. See `Session.cost`."""
    check_whole(program, "cost")
    account, parts, modules = _accounts(program)
    figures = chip_of(program)
    host = _host_traffic(program)
    count = program.layout.replicas.count
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
    graphs = tuple(graphs_of(account, host, figures, count, price, step))

    counted = _counted(account, modules, _variables(program), count)
    ipus: tuple[IpuCost, ...] = ()
    if len(program.layout.ipus) > 1:
        timing = timed()
        counted["collectives"][COPY] = CollectiveCost(count=timing.copies, bytes=timing.copied_bytes)
        busy = {ipu: timing.busy[ipu] if figures is not None else None for ipu in program.layout.ipus}
        ipus = tuple(IpuCost(ipu=ipu, seconds=each) for ipu, each in busy.items())
    return Cost(
        name=f"Ir[id={program.layout.main.ir.id}]",
        chip=figures.name if figures is not None else program.layout.devices[0].device_kind,
        **_sizes(program),
        **counted,
        cycles=_cycles(program, figures, account, parts),
        compile_seconds=program.seconds,
        graphs=graphs,
        seconds=estimate,
        ipus=ipus,
        precisions={} if figures is None else precisions_of(account, figures, seconds),
        step=step,
        axes=axes_of(program, figures, account.collectives, price),
        **_utilisation(account.total, figures, estimate, len(program.layout.devices), len(program.layout.ipus)),
    )


def _cycles(
    program: CompiledProgram, figures: Chip | None, account: Account, parts: Mapping[Structure, Account]
) -> int | None:
    """Clock cycles of a run on TPUs, by XLA; several IPUs work side by side. `None` for other platforms."""
    if program.layout.compile_target.platform != "tpu":
        return None
    if len(program.layout.ipus) == 1 or not isinstance(figures, Tpu):
        return account.total.cycles
    clock = figures.clock
    return round(clock * _timing(program, figures, lambda each: parts[each].total.cycles / clock).seconds)


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
        structures = (structure for structure, *_ in executables_of(program))
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
        sizes: XLA's memory analysis of it.
        devices: devices in the order of XLA's numbers.
    """
    account = account_of(module)
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
    graphs = tuple(graphs_of(account, {}, figures, count, price, step))

    return Cost(
        name=name,
        chip=figures.name if figures is not None else kind,
        code_bytes=sizes.generated_code_size_in_bytes or None,
        argument_bytes=sizes.argument_size_in_bytes,
        temporary_bytes=sizes.temp_size_in_bytes,
        alias_bytes=sizes.alias_size_in_bytes,
        host_bytes=sizes.host_argument_size_in_bytes + sizes.host_temp_size_in_bytes,
        **_counted(account, [(module, 1)], {}, count),
        cycles=account.total.cycles if isinstance(figures, Tpu) else None,
        compile_seconds=seconds,
        graphs=graphs,
        seconds=None if step is None else step.seconds,
        precisions={} if figures is None else precisions_of(account, figures, run_seconds),
        step=step,
        **_utilisation(account.total, figures, None if step is None else step.seconds, count),
    )


def account_of_program(program: CompiledProgram) -> Account:
    """Account of one run of a program, summed over its executables."""
    return _accounts(program)[0]


def _accounts(program: CompiledProgram) -> tuple[Account, dict[Structure, Account], list[tuple[Module, int]]]:
    """Account of one run of a program, one per segment structure for a plan, and the executables with their runs."""
    account, parts, modules = Account(), dict[Structure, Account](), list[tuple[Module, int]]()
    for structure, executable, times in executables_of(program):
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


def _counted(
    account: Account, modules: Sequence[tuple[Module, int]], names: Mapping[str, str], replicas: int
) -> dict[str, Any]:
    """Figures that compiled code has on any chip: work, communication, costs of lines, sizes of arguments."""
    total = account.total
    arguments, overwritten = arguments_of(modules, names)
    return {
        "flops": total.flops,
        "bytes_accessed": total.bytes,
        "kernels": total.kernels,
        "copies": total.copies,
        "collectives": _by_kind(account.collectives),
        "uses": _by_line(account.collectives, replicas),
        "lines": lines_of(modules),
        "arguments": arguments,
        "overwritten": overwritten,
    }


def host_copies_of(program: CompiledProgram) -> HostCopies:
    """Copies of one run of a program between the memories of device and host, summed over its executables."""
    found = [(host_copies(parse_hlo(executable.as_text())), times) for _, executable, times in executables_of(program)]
    return HostCopies(sum(each.beside * n for each, n in found), sum(each.alone * n for each, n in found))


def copies_of(program: CompiledProgram) -> Timing:
    """Copies between IPUs of a program, if IPUs are separate devices; without times."""
    return _timing(program, None, lambda each: 0.0)


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
    devices = program.layout.compile_target.devices
    places = dict(zip(devices, places_of(figures, devices), strict=True))
    of_one = [places[options.replicas.devices[0]] for options in program.layout.compile_options.values()]
    spans = spans_of(figures, of_one, [*places.values()]) or (LinkSpan(figures.levels[0], 2),)
    return lambda nbytes: collective_time(figures, "collective-permute", nbytes, spans).seconds


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
