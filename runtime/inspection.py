"""Construction of a `Report` from a compiled program's graphs, layout and executables."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

from popxl.analysis.estimate import estimate_of
from popxl.analysis.flops import moved, own_flops
from popxl.analysis.memory import Memory, runs_of
from popxl.core.aliasing import callees_first, reachable
from popxl.core.printing import definition, summary
from popxl.core.recording import Op
from popxl.core.traits import is_call
from popxl.graph import Graph
from popxl.ir import Ir
from popxl.ops.memory import offloads
from popxl.remote_buffer import RemoteBuffer
from popxl.values.spec import brief
from runtime.costs.memory import memory_of_program
from runtime.costs.program_cost import cost_of, host_copies_of
from runtime.program.compiled import CompiledProgram
from runtime.program.run import Runner
from runtime.report import (
    BufferReport,
    CollectiveReport,
    GraphReport,
    LoopReport,
    PieceReport,
    Report,
    SizeReport,
    StreamReport,
    TargetReport,
    VariableReport,
    WorkReport,
)


def report_of(ir: Ir, program: CompiledProgram, runner: Runner | None = None) -> Report:
    """Report of a compiled program and its runner's runs. See `Session.report`."""
    main, runs = ir.main_graph, runs_of(ir.main_graph)
    sizes = _inlined_sizes(main)
    memory = memory_of_program(ir, program)
    return Report(
        program=repr(ir),
        device=program.device.name,
        devices=tuple(map(str, program.layout.devices)),
        replicas=program.layout.replicas.count,
        calls=program.layout.mode,
        reason=program.reason,
        loops=_loops(program),
        written_out={graph.name: why for graph, why in program.layout.decision.unrolled_graphs.items()},
        variables=_variables(ir, program),
        buffers=_buffers(program, runs),
        streams=_streams(program),
        graphs=tuple(_graph(graph, runs[graph]) for graph in reachable(main)),
        collectives=_collectives(runs),
        size=_size(main, program),
        work=_work(runs),
        pieces=_segment_reports(main, program, sizes),
        precision=_precision(ir.options.precision, program.layout.compile_target.platform),
        seconds=program.seconds,
        memory=memory,
        offloaded=_offloaded(main, program, memory),
        runs=0 if runner is None else runner.runs,
        run_seconds=0.0 if runner is None else runner.run_seconds,
        timeline=None if runner is None else runner.timeline,
        estimate=estimate_of(ir) if program.device.name == "ipu_model" else None,
        target=_target(program, memory),
    )


def _loops(program: CompiledProgram) -> tuple[LoopReport, ...]:
    rerolling = program.layout.rerolling
    return tuple(
        LoopReport(
            graph=loop.ops[0].graph.name,
            iterations=len(loop.iterations),
            ops=len(loop.ops),
            calls=tuple(callee.name for op in loop.ops for callee in op.called_graphs),
            text=summary(loop.ops),
        )
        for loop in (() if rerolling is None else rerolling.loops)
    )


def _offloaded(main: Graph, program: CompiledProgram, memory: Memory) -> str | None:
    """Fate of offloaded tensors, in a sentence or two; `None` without any, and for a single memory."""
    is_cpu = program.layout.compile_target.platform == "cpu"
    if is_cpu or not any(offloads(graph.ops) for graph in reachable(main)):
        return None
    if not memory.temporaries_on_host:
        return "Warning: what the program offloads is in the memory of the device, and nothing is in that of the host."
    overlapped, exposed = host_copies_of(program)
    return (
        f"Of the copies of offloaded tensors between the memories of device and host, {overlapped} in a run have other "
        f"kernels beside them, and {exposed} have none."
    )


def _target(program: CompiledProgram, memory: Memory) -> TargetReport | None:
    """Offline target of the program; `None` if compiled for a local device."""
    target = program.device.target
    if target is None:
        return None
    return TargetReport(
        description=str(target),
        chip=target.chip.name,
        chips=target.count,
        used=len(program.layout.devices),
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
"""Arithmetic of float32 products, by platform and precision."""


def _precision(level: str, platform: str) -> str | None:
    """Description of float32 product precision in a sentence or two; `None` on platforms without reduced precision."""
    if platform not in _MULTIPLYING:
        return None
    methods = _MULTIPLYING[platform]
    text = f"Products of float32 are computed at the precision {level!r}: in {methods[level]}."
    if level == "default":
        return text
    return f"{text} `ir.options.precision = 'default'` would take {methods['default']}."


def _inlined_sizes(main: Graph) -> dict[Graph, int]:
    """Number of ops of each graph, with those of the graphs that it runs."""
    sizes: dict[Graph, int] = {}
    for graph in callees_first(main):
        sizes[graph] = sum(_inlined_size(op, sizes) for op in graph.ops)
    return sizes


def _inlined_size(op: Op, sizes: dict[Graph, int]) -> int:
    return 1 + sum(sizes[callee] for callee in op.called_graphs)


def _graph(graph: Graph, runs: int) -> GraphReport:
    flops = sum(own_flops(op).total for op in graph.ops)
    return GraphReport(name=graph.name, ops=len(graph.ops), runs=runs, flops=flops, text=definition(graph))


def _op_counts(runs: Counter[Graph]) -> Iterator[tuple[Op, int]]:
    """Executed ops of a program, with executions per run."""
    return ((part, count) for graph, count in runs.items() for op in graph.ops for part in op.parts)


def _work(runs: Counter[Graph]) -> tuple[WorkReport, ...]:
    counts_by_type: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for op, count in _op_counts(runs):
        counts_by_type[op.op_type].update(runs=count, flops=count * own_flops(op).total)
    work = (WorkReport(op=op, **counts) for op, counts in counts_by_type.items())
    return tuple(sorted(work, key=lambda each: -each.flops))


def _collectives(runs: Counter[Graph]) -> tuple[CollectiveReport, ...]:
    counts_by_type: defaultdict[tuple[str, int], Counter[str]] = defaultdict(Counter)
    for op, count in _op_counts(runs):
        if op.kind.between_replicas:
            counts_by_type[op.op_type, op.attributes["group_size"]].update(runs=count, bytes=count * moved(op))
    return tuple(CollectiveReport(op=op, group_size=size, **counts) for (op, size), counts in counts_by_type.items())


def _size(main: Graph, program: CompiledProgram) -> SizeReport:
    written_out: dict[Graph, int] = {}
    for graph in callees_first(main):
        inner = (written_out[callee] for op in graph.ops for callee in op.called_graphs)
        written_out[graph] = sum(not is_call(op) for op in graph.ops) + sum(inner)
    plan = program.plan
    texts = {s: s.text() for s in plan.structures} if plan is not None else {None: program.text()}
    segments = [segment.structure for segment in plan.segments] if plan is not None else [None]
    sizes = {structure: _text_written_out(text) for structure, text in texts.items()}
    return SizeReport(
        ops=sum(len(graph.ops) for graph in written_out),
        ops_written_out=written_out[main],
        text=sum(map(len, texts.values())),
        text_written_out=None if None in sizes.values() else sum(sizes[segment] or 0 for segment in segments),
    )


_FUNCTION = re.compile(r"^  func\.func \w+ @([\w.$-]+|\"[^\"]*\")\(.*?^  }$", re.MULTILINE | re.DOTALL)
_CALL = re.compile(r"\bcall @([\w.$-]+|\"[^\"]*\")\(")


def _text_written_out(text: str) -> int | None:
    """Text length of a lowered program after inlining all calls; `None` for unrecognized text."""
    bodies = {match[1]: match[0] for match in _FUNCTION.finditer(text)}
    if "main" not in bodies:
        return None
    lengths: dict[str, int] = {}
    waiting = ["main"]
    while waiting:  # calls may be nested as deep as graphs are
        callees = _CALL.findall(bodies[waiting[-1]])
        new = [name for name in dict.fromkeys(callees) if name not in lengths]
        if new:
            waiting += new
        else:
            name = waiting.pop()
            lengths[name] = len(bodies[name]) + sum(lengths[callee] for callee in callees)
    return len(text) - sum(map(len, bodies.values())) + lengths["main"]


def _variables(ir: Ir, program: CompiledProgram) -> tuple[VariableReport, ...]:
    resident, buffers = program.layout.bytes_of_variables(), program.layout.bytes_of_buffers()
    reports = []
    for v in ir.main_graph.variables:
        bytes, changes = resident.get(v, (0, False))
        location = v.location_info
        memory = "device" if v in resident else "unused"
        if location.buffer is not None and v not in resident:
            memory = f"buffer {location.buffer.remote_buffer_id}, slot {location.entry}"
            slots, _ = buffers.get(location.buffer, (0, False))
            bytes, changes = slots // location.buffer.entries, location.buffer in program.layout.stored_to
        ipu = program.layout.ipu_of(v) if v in resident else None
        reports.append(VariableReport(name=v.name, spec=brief(v), bytes=bytes, place=memory, changes=changes, ipu=ipu))
    return tuple(reports)


def _buffers(program: CompiledProgram, runs: Counter[Graph]) -> tuple[BufferReport, ...]:
    traffic: defaultdict[RemoteBuffer, Counter[str]] = defaultdict(Counter)
    for op, count in _op_counts(runs):
        if op.kind.exchange == "buffer":
            direction = "stored" if not op.outputs else "loaded"
            traffic[op.attributes["buffer"]][direction] += count * moved(op)
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
            direction="in" if s in program.layout.inputs else "out",
            spec=brief(s.tensor),
            transfers=program.layout.counts.get(s, 0),
            bytes=bytes,
            ipu=program.layout.ipu_of(s),
        )
        for s, bytes in program.layout.bytes_of_streams().items()
    )


def _segment_reports(main: Graph, program: CompiledProgram, sizes: dict[Graph, int]) -> tuple[PieceReport, ...]:
    plan = program.plan
    if plan is None:
        (executable,) = program.executables()
        text = len(program.text())
        memory = _memory_sizes(executable)
        return (PieceReport(name="the program", runs=1, ops=sizes[main], text=text, seconds=program.seconds, **memory),)
    first = {segment.structure: segment for segment in reversed(plan.segments)}
    return tuple(
        PieceReport(
            name=first[structure].name,
            runs=count,
            ops=sum(_inlined_size(op, sizes) for op in first[structure].ops),
            text=len(structure.text()),
            seconds=plan.compile_seconds.get(structure, 0.0),
            **_memory_sizes(structure.executable),
        )
        for structure, count in plan.runs.items()
    )


def _memory_sizes(executable: Any) -> dict[str, Any]:
    """Memory sizes of an executable, from XLA's memory analysis."""
    analysis = executable.memory_analysis()
    host = (analysis.host_argument_size_in_bytes, analysis.host_output_size_in_bytes, analysis.host_temp_size_in_bytes)
    return {
        "arguments": analysis.argument_size_in_bytes,
        "outputs": analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
        "temporaries": analysis.temp_size_in_bytes,
        "code": analysis.generated_code_size_in_bytes or None,
        "host": sum(host) - analysis.host_alias_size_in_bytes,
    }
