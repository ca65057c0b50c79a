"""`cost_of`: cost of a compiled program, from the HLO of its executables and figures of the chip.

Further sums over the same executables: work, copies between IPUs, copies between host and device.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from popxl.analysis.communication import COPY
from popxl.analysis.flops import moved
from popxl.analysis.memory import runs_of
from popxl.base.group_by import group_by
from runtime.costs.axes import axes_of
from runtime.costs.cost import CollectiveCost, CollectiveUse, Cost, IpuCost
from runtime.costs.executables import check_whole, executables_of
from runtime.costs.graph_costs import graphs_of
from runtime.costs.hlo import HOST, Instruction, Module, parse_hlo
from runtime.costs.ipu_timing import Timing, timing_of
from runtime.costs.lines import arguments_of, lines_of
from runtime.costs.network import LinkSpan, Wires, collective_time
from runtime.costs.precision import LEVELS, precisions_of
from runtime.costs.step import timeline_of
from runtime.costs.step_timeline import StepTimeline, combined
from runtime.costs.work import Account, Collective, account_of, is_kernel, work_of
from runtime.lowering.channels import Channel
from runtime.plan.structure import Structure
from runtime.program.compiled import CompiledProgram
from runtime.targets.chip import Chip, Tpu


class ExecutableRuns(NamedTuple):
    """Executable of a program, with its number of runs.

    Attributes:
        structure: structure of the plan's segments that it runs; `None` for other executables.
        module: its instructions.
        account: work of one run.
        times: number of executions in a run of the program.
    """

    structure: Structure | None
    module: Module
    account: Account
    times: int


def cost_of(program: CompiledProgram) -> Cost:
    """Compute a compiled program's cost. See `Session.cost`."""
    check_whole(program, "cost")
    layout, chip = program.layout, program.device.chip
    executables, has_ipus = _executables(program), len(program.layout.ipus) > 1
    account, host = _total(executables), _host_traffic(program)
    figures = _sizes(program) | _code_figures(executables, _variable_names(program), layout.replicas.count)
    timing = copies_of(program) if has_ipus else Timing()
    if chip is None:
        figures |= {"seconds": None, "graphs": graphs_of(account, host, layout.replicas.count)}
    else:
        wires = Wires.between(chip, layout.replicas.devices)
        timelines = _Timelines(executables, wires)

        def simulated(level: str) -> Timing:
            return _timing(program, chip, lambda structure: timelines.segment_seconds(structure, level))

        def seconds(level: str) -> float:
            own = simulated(level).seconds if has_ipus else timelines.total_seconds(level)
            return max(own, sum(host.values()) / chip.host_bandwidth)

        figures |= _times(timelines, account, host, seconds, layout.replicas.count)
        figures |= _utilisation(account, chip, figures["seconds"], len(layout.devices), len(layout.ipus))
        figures["axes"] = axes_of(program, account.collectives, wires)
        timing = simulated(LEVELS[0]) if has_ipus else timing
    if has_ipus:
        figures["collectives"][COPY] = CollectiveCost(count=timing.copies, bytes=timing.copied_bytes)
        busy = {ipu: None if chip is None else timing.busy[ipu] for ipu in layout.ipus}
        figures["ipus"] = tuple(IpuCost(ipu=ipu, seconds=each) for ipu, each in busy.items())
    return Cost(
        name=f"Ir[id={layout.main.ir.id}]",
        chip=layout.devices[0].device_kind if chip is None else chip.name,
        cycles=_cycles(program, chip, executables),
        compile_seconds=program.seconds,
        **figures,
    )


def cost_of_executable(
    name: str, module: Module, sizes: Any, chip: Chip | None, devices: Sequence[Any], seconds: float, kind: str
) -> Cost:
    """Compute the cost of an executable that belongs to no Ir.

    Args:
        sizes: XLA's memory analysis of it.
        chip: figures of the devices; `None` where they are not known.
        devices: devices in the order of XLA's numbers.
        seconds: time that its compilation took.
        kind: JAX's name of the devices.
    """
    executables, count = [ExecutableRuns(None, module, account_of(module), 1)], len(devices)
    account = _total(executables)
    figures: dict[str, Any] = {"seconds": None, "graphs": graphs_of(account, {}, count)}
    if chip is not None:
        timelines = _Timelines(executables, Wires.between(chip, devices))
        figures = _times(timelines, account, {}, timelines.total_seconds, count)
        figures |= _utilisation(account, chip, figures["seconds"], count)
    return Cost(
        name=name,
        chip=kind if chip is None else chip.name,
        code_bytes=sizes.generated_code_size_in_bytes or None,
        argument_bytes=sizes.argument_size_in_bytes,
        temporary_bytes=sizes.temp_size_in_bytes,
        alias_bytes=sizes.alias_size_in_bytes,
        host_bytes=sizes.host_argument_size_in_bytes + sizes.host_temp_size_in_bytes,
        cycles=account.total.cycles if isinstance(chip, Tpu) else None,
        compile_seconds=seconds,
        **_code_figures(executables, {}, count),
        **figures,
    )


def account_of_program(program: CompiledProgram) -> Account:
    """Account of one run of a program, summed over its executables."""
    return _total(_executables(program))


def _executables(program: CompiledProgram) -> list[ExecutableRuns]:
    executables = []
    for structure, executable, times in executables_of(program):
        module = parse_hlo(executable.as_text())
        executables.append(ExecutableRuns(structure, module, account_of(module), times))
    return executables


def _total(executables: Iterable[ExecutableRuns]) -> Account:
    total = Account()
    for each in executables:
        total.add(each.account, each.times)
    return total


class _Timelines:
    """Timelines of a program's executables, by maximal precision of products."""

    def __init__(self, executables: Sequence[ExecutableRuns], wires: Wires) -> None:
        self.executables, self.wires = executables, wires
        self.dispatch = wires.chip.efficiency.dispatch
        self._timeline = cache(lambda number, level: timeline_of(executables[number].module, wires, level))

    def segment_seconds(self, structure: Structure, level: str) -> float:
        """Time of a segment, with its dispatch."""
        number = next(i for i, each in enumerate(self.executables) if each.structure is structure)
        return self._timeline(number, level).seconds + self.dispatch

    def total_seconds(self, level: str) -> float:
        """Total time of all executables, including their dispatch."""
        timelines = (self._timeline(i, level) for i in range(len(self.executables)))
        return sum(e.times * (t.seconds + self.dispatch) for e, t in zip(self.executables, timelines, strict=True))

    def timeline(self, seconds: float) -> StepTimeline:
        """Timeline of the run, `seconds` long."""
        parts = [(self._timeline(i, LEVELS[0]), each.times) for i, each in enumerate(self.executables)]
        return combined(parts, seconds, self.dispatch)


def _times(
    timelines: _Timelines,
    account: Account,
    host: Mapping[str, int],
    seconds: Callable[[str], float],
    replicas: int,
) -> dict[str, Any]:
    """Times of a run and of its graphs, also with products of other precisions.

    Args:
        host: bytes between a chip and its host, by graphs.
        seconds: function that returns the time of a run at a maximal precision of products.
    """
    estimate, wires = seconds(LEVELS[0]), timelines.wires
    step = timelines.timeline(estimate)
    return {
        "seconds": estimate,
        "step": step,
        "graphs": graphs_of(account, host, replicas, wires, step),
        "precisions": precisions_of(account.total, wires.chip, seconds),
    }


def _utilisation(account: Account, chip: Chip, seconds: float, chips: int, ipus: int = 1) -> dict[str, float]:
    """Share of the rate of products that a run attains, and its chip-hours; `ipus` chips share a replica's work."""
    if not seconds:
        return {}
    least = sum(count / chip.rate(*product) for product, count in account.total.products.items())
    return {"utilisation": least / (ipus * seconds), "chip_hours": chips * seconds / 3600}


def _cycles(program: CompiledProgram, chip: Chip | None, executables: Sequence[ExecutableRuns]) -> int | None:
    """Clock cycles of a run on TPUs, by XLA; several IPUs work side by side. `None` for other platforms."""
    if program.layout.compile_target.platform != "tpu":
        return None
    if len(program.layout.ipus) == 1 or not isinstance(chip, Tpu):
        return _total(executables).total.cycles
    clock = chip.clock
    seconds = {each.structure: each.account.total.cycles / clock for each in executables}
    return round(clock * _timing(program, chip, seconds.__getitem__).seconds)


def _variable_names(program: CompiledProgram) -> dict[str, str]:
    """Variable names, by the names that JAX gives to a program's arguments."""
    layout = program.layout
    return {
        f"{role}[{i}]": _names_text([t.name for t in block.tensors])
        for role, blocks in (("changing", layout.changing), ("constant", layout.constant))
        for i, block in enumerate(blocks)
    }


def _names_text(names: Sequence[str]) -> str:
    """Text of names; of many, only the first."""
    return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:2])} and {len(names) - 2} more"


def _code_figures(executables: Sequence[ExecutableRuns], names: Mapping[str, str], replicas: int) -> dict[str, Any]:
    """Figures that compiled code has on any chip: work, communication, costs of lines, sizes of arguments.

    Args:
        names: names for arguments that have other ones in the compiled program.
    """
    account, modules = _total(executables), [(each.module, each.times) for each in executables]
    total, (arguments, overwritten) = account.total, arguments_of(modules, names)
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


class HostCopies(NamedTuple):
    """Number of copies between device and host memory in a run.

    Attributes:
        overlapped: while other kernels run.
        exposed: while other kernels wait.
    """

    overlapped: int = 0
    exposed: int = 0


def host_copies(module: Module) -> HostCopies:
    """Count the copies in a compiled program. A copy without a kernel between its start and its end is exposed."""
    beside = alone = 0
    for instruction, times in module.entry.runs():
        shapes = [*instruction.results, *(shape for each in instruction.operand_shapes for shape in each)]
        if is_kernel(instruction) and any(shape.memory == HOST for shape in shapes):
            is_beside = instruction.opcode.endswith("-start") and _has_kernels_before_end(instruction)
            beside, alone = beside + times * is_beside, alone + times * (not is_beside)
    return HostCopies(beside, alone)


def _has_kernels_before_end(start: Instruction) -> bool:
    """Whether kernels run between the start of an asynchronous instruction and its end."""
    instructions = [*start.computation.instructions.values()]
    end = next((each for each in start.users if each.opcode.endswith("-done")), start)
    between = instructions[instructions.index(start) + 1 : instructions.index(end)]
    return any(is_kernel(each) and work_of(each).kernels for each in between)


def host_copies_of(program: CompiledProgram) -> HostCopies:
    """Copies of one run of a program between the memories of device and host, summed over its executables."""
    copies = [(host_copies(parse_hlo(executable.as_text())), times) for _, executable, times in executables_of(program)]
    return HostCopies(sum(each.overlapped * n for each, n in copies), sum(each.exposed * n for each, n in copies))


def copies_of(program: CompiledProgram) -> Timing:
    """Copies between IPUs of a program, if IPUs are separate devices; without times."""
    return _timing(program, None, lambda each: 0.0)


def _timing(program: CompiledProgram, chip: Chip | None, seconds: Callable[[Structure], float]) -> Timing:
    """Timing of IPUs that are separate devices."""
    layout = program.layout
    buffers = ((buffer, bytes) for buffer, (bytes, _) in layout.bytes_of_buffers().items())
    sizes: list[tuple[Channel, int]] = [*layout.bytes_of_streams().items(), *buffers]
    copying = (lambda nbytes: 0.0) if chip is None else _copying(program, chip)
    return timing_of(program.executable, cache(seconds), copying, dict(sizes), layout.replicas.per_device)


def _copying(program: CompiledProgram, chip: Chip) -> Callable[[int], float]:
    """Seconds of a copy between the IPUs of a replica: over the slowest wires that any of these use."""
    devices = program.layout.compile_target.devices
    first = [devices.index(options.replicas.devices[0]) for options in program.layout.compile_options.values()]
    spans = Wires.between(chip, devices).spans(first) or (LinkSpan(chip.levels[0], 2),)
    return lambda nbytes: collective_time(chip, "collective-permute", nbytes, spans).seconds


def _sizes(program: CompiledProgram) -> dict[str, Any]:
    """Memory sizes of executables from XLA; for a plan, including values live between its segments."""
    analyses = [executable.memory_analysis() for executable in program.executables()]
    on_host = sum(bytes for bytes, is_on_host in program.layout.bytes_of_buffers().values() if is_on_host)
    sizes: dict[str, Any] = {
        "code_bytes": sum(each.generated_code_size_in_bytes for each in analyses) or None,
        "temporary_bytes": program.temporaries(),
        "host_bytes": on_host + max(each.host_temp_size_in_bytes for each in analyses),
    }
    if program.plan is None:
        (analysis,) = analyses
        return sizes | {
            "argument_bytes": analysis.argument_size_in_bytes,
            "alias_bytes": analysis.alias_size_in_bytes,
        }
    layout = program.layout
    state = [*layout.bytes_of_variables().values()]
    state += [
        (bytes, buffer in layout.stored_to)
        for buffer, (bytes, is_on_host) in layout.bytes_of_buffers().items()
        if not is_on_host
    ]
    streams = layout.bytes_of_streams()
    return sizes | {
        "argument_bytes": sum(bytes for bytes, _ in state) + sum(streams[stream] for stream in layout.inputs),
        "alias_bytes": sum(bytes for bytes, is_changed in state if is_changed),
    }


def _host_traffic(program: CompiledProgram) -> dict[str, int]:
    """Host traffic in bytes per run, keyed by graph: remote buffer slots, feeds and fetches."""
    layout, traffic = program.layout, defaultdict[str, int](int)
    on_host = {buffer for buffer, (_, is_on_host) in layout.bytes_of_buffers().items() if is_on_host}
    for graph, times in runs_of(layout.main).items():
        name = "" if graph is layout.main else graph.name
        for op in (op_part for each in graph.ops for op_part in each.parts):
            if op.kind.exchange == "buffer" and op.attributes["buffer"] in on_host:
                traffic[name] += times * moved(op) * program.layout.replicas.per_device
    traffic[""] += sum(layout.bytes_of_streams().values())
    return traffic


def _by_kind(collectives: Iterable[Collective]) -> dict[str, CollectiveCost]:
    return {
        kind: CollectiveCost(count=sum(e.runs for e in alike), bytes=sum(e.runs * e.bytes for e in alike))
        for kind, alike in group_by(collectives, lambda each: each.kind).items()
    }


def _by_line(collectives: Iterable[Collective], all_replicas: int) -> tuple[CollectiveUse, ...]:
    groups = group_by(collectives, lambda each: (each.kind, each.source, each.graph, each.group_size or all_replicas))
    return tuple(
        CollectiveUse(
            kind=kind,
            source=source,
            graph=graph,
            replicas=replicas,
            count=sum(e.runs for e in alike),
            bytes=sum(e.runs * e.bytes for e in alike),
        )
        for (kind, source, graph, replicas), alike in groups.items()
    )
