"""Memory requirements of a compiled program, from its layout and XLA's memory analysis: `Session.memory`."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from popxl.analysis.memory import (
    DeviceMemory,
    LiveTensor,
    Memory,
    Moment,
    constants_of,
    steps_of,
    variables_on_host,
)
from popxl.base.memory_requests import current_request
from popxl.base.pages import bytes_text
from popxl.base.source import SourceLocation, warn_at
from popxl.context import user_frame
from popxl.ir import Ir
from popxl.values.spec import brief, size_in_bytes
from runtime.program.compiled import CompiledProgram
from runtime.program.layout import Layout


def memory_of_program(ir: Ir, program: CompiledProgram) -> Memory:
    """Memory required by a compiled program. See `Session.memory`."""
    layout = program.layout
    memories = memory_of_ipus(ir, program)
    ipus = {device: ipu for ipu in memories for device in layout.compile_options[ipu].replicas.devices}
    devices = tuple(
        memories[ipus[device]].model_copy(update={"name": str(device)}) for device in layout.devices if device in ipus
    )
    fullest = max(memories, key=lambda ipu: memories[ipu].device)
    moments, tensors = _steps(ir, program, fullest)
    buffers = sum(bytes for bytes, is_on_host in layout.bytes_of_buffers().values() if is_on_host)
    analyses = [executable.memory_analysis() for executable in program.executables()]
    return Memory(
        **memories[fullest].model_dump(exclude={"name", "device"}),
        name=f"{ir!r}, on each device" if len(layout.devices) > 1 else repr(ir),
        source="program" if program.plan is None else "pieces",
        devices=devices,
        buffers_on_host=buffers,
        variables_on_host=variables_on_host(ir.main_graph),
        temporaries_on_host=max(analysis.host_temp_size_in_bytes for analysis in analyses),
        budget=ir.options.memoryBudget,
        moments=moments,
        tensors=tensors,
    )


def memory_of_ipus(ir: Ir, program: CompiledProgram) -> dict[int, DeviceMemory]:
    """Memory of the IPUs that are separate devices of this process; of 0, which represents all, if they are not."""
    return {ipu: _of_ipu(ir, program, ipu) for ipu in program.layout.own_ipus}


def warn_of_exceeded_budget(ir: Ir, program: CompiledProgram) -> None:
    """Warn about a program that needs more than `ir.options.memoryBudget`, except while a tool searches for a plan."""
    budget = ir.options.memoryBudget
    if not budget or current_request() is not None:
        return
    needed = max((each.device for each in memory_of_ipus(ir, program).values()), default=0)
    if needed > budget:
        warn_at(
            SourceLocation.of(user_frame()),
            f"Session: the program needs {bytes_text(needed)} of a device, {bytes_text(needed - budget)} more than its "
            "budget, `ir.options.memoryBudget`. `session.memory()` lists what needs it. A budget of `train_step` plans "
            "that step alone; `plan_memory`, or the command `popxl plan`, plans it with the rest of the program.",
            UserWarning,
        )


def least_memory_of(layout: Layout) -> int:
    """Lower bound on the bytes of the fullest device before any computation: variables, remote buffers on the device,
    and feeds. Compiles nothing; temporaries and results come on top."""
    return max(sum(_arguments(layout, ipu)) for ipu in layout.ipus)


def _arguments(layout: Layout, ipu: int) -> tuple[int, int, int]:
    """Bytes of variables, remote buffers and feeds on an IPU's device."""

    def is_on_ipu(channel: Any) -> bool:
        return layout.ipu_of(channel) in (None, ipu)

    variables, buffers, streams = layout.bytes_of_variables(), layout.bytes_of_buffers(), layout.bytes_of_streams()
    return (
        sum(bytes for v, (bytes, _) in variables.items() if is_on_ipu(v)),
        sum(bytes for b, (bytes, is_on_host) in buffers.items() if is_on_ipu(b) and not is_on_host),
        sum(streams[s] for s in layout.inputs if is_on_ipu(s)),
    )


def _of_ipu(ir: Ir, program: CompiledProgram, ipu: int) -> DeviceMemory:
    """Memory of an IPU's device; of the common device, if IPUs are not separate devices."""
    layout = program.layout
    variables, buffers, arguments = _arguments(layout, ipu)
    streams = layout.bytes_of_streams()
    if program.plan is not None:
        moments, _ = _steps(ir, program, ipu)
        temporaries = max((moment.bytes for moment in moments), default=0)
        segments = (segment for segment in program.plan.segments if segment.ipu == ipu)
        executables = tuple(structure.executable for structure in dict.fromkeys(s.structure for s in segments))
    else:
        temporaries, executables = program.temporaries(), program.executables()
    return DeviceMemory(
        name=f"IPU {ipu}",
        variables=variables,
        buffers=buffers,
        arguments=arguments,
        outputs=sum(streams[s] for s in layout.outputs if layout.ipu_of(s) in (None, ipu)),
        constants=sum(map(size_in_bytes, constants_of(ir.main_graph))),
        temporaries=temporaries,
        code=sum(executable.memory_analysis().generated_code_size_in_bytes for executable in executables) or None,
    )


def _steps(ir: Ir, program: CompiledProgram, ipu: int) -> tuple[tuple[Moment, ...], tuple[LiveTensor, ...]]:
    """Steps on an IPU's device, and values live between these steps."""
    if program.plan is None:
        copies = program.layout.replicas.per_device
        steps = steps_of(ir.main_graph, lambda t: copies * size_in_bytes(t))
        return tuple(steps.moments), tuple(steps.tensors)
    curve = program.executable.curve()
    own_steps = [i for i, (segment, *_) in enumerate(curve.segments) if segment.ipu == ipu]
    moments = (
        Moment(name=segment.name, held=resident, inside=temporary)
        for segment, resident, temporary in curve.segments
        if segment.ipu == ipu
    )
    tensors = (
        LiveTensor(
            name=f"{t.path}: {brief(t)}",
            bytes=bytes,
            first=bisect_right(own_steps, first) - 1,
            last=bisect_right(own_steps, last) - 1,
        )
        for t, home, bytes, first, last in curve.lives
        if home == ipu
    )
    return tuple(moments), tuple(tensors)
