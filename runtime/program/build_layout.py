"""Building the layout of an Ir: checks for its device, the mode of called graphs, and planning."""

from __future__ import annotations

import math

from popxl.analysis.memory import held_variables
from popxl.core.aliasing import reachable, used_storages, written_tensors
from popxl.errors import PopxlError
from popxl.graph import Graph
from popxl.ir import Ir
from popxl.values.spec import size_in_bytes
from runtime import processes
from runtime.lowering import remote_buffers as remote
from runtime.plan.decision import decide
from runtime.plan.planning import plan_of
from runtime.program.layout import Layout
from runtime.targets.compile_target import CompileTarget
from runtime.targets.devices import Device
from runtime.targets.mesh import dimensions_of


def layout_for(ir: Ir, device: Device, mode: str | None = None) -> Layout:
    """Build the layout of a program on a device.

    Args:
        mode: mode of called graphs, if it is already decided.

    Raises:
        PopxlError: if the program cannot run there.
        NotImplementedError: if XLA does not compile programs for such parts of a slice.
    """
    dimensions = dimensions_of(ir, are_weighed=device.jax_devices[0].platform == "tpu")
    is_divided = len({each.process_index for each in device.jax_devices}) > 1 and device.target is None
    count = ir.replication_factor if is_divided else ir.instance_replication_factor
    if count != ir.replication_factor:  # a layout of this process's replicas only, as `popxl show` makes
        dimensions = ()
    compile_target = CompileTarget(
        device.jax_devices,
        count,
        device.target is None,
        dimensions,
        ir.adjacent_replicas,
        memory_limit=_memory_limit(ir, device),
    )
    layout = layout_for_target(ir, compile_target, mode)
    if is_divided:
        processes.check_stages(len(layout.compile_options))
    device.check_parts([options.replicas.devices for options in layout.compile_options.values()])
    return layout


def _memory_limit(ir: Ir, device: Device) -> int | None:
    """Percentage that XLA's scheduler takes for a budget: on TPUs of a device's memory, on GPUs of four fifths of it
    without the arguments. `None` without a budget, for unknown chips, and where the arguments leave a GPU nothing."""
    budget, figures = ir.options.memoryBudget, device.chip
    if not budget or figures is None:
        return None
    if device.jax_devices[0].platform != "gpu":
        return min(math.ceil(100 * budget / figures.memory_bytes), 100)
    variables = sum(map(size_in_bytes, held_variables(ir.main_graph)))
    free = 0.8 * figures.memory_bytes - variables
    return max(1, min(math.floor(100 * (budget - variables) / free), 95)) if free > 0 else None  # 95 by default


def layout_for_target(ir: Ir, compile_target: CompileTarget, mode: str | None = None) -> Layout:
    """Build the layout of a program for a compile target; see `layout_for`."""
    main = ir.main_graph
    resident, written = held_variables(main), written_tensors(main)
    changed = tuple(t for t in resident if t in written)
    _check(main)
    decision = decide(main, ir.options, compile_target, resident, changed, mode)
    steps = plan_of(main, decision.segmentation, changed, changed) if decision.mode == "dispatched" else None
    layout = Layout(ir, compile_target, resident, changed, decision, steps)
    if ir.options.remoteBuffers != "device" and compile_target.platform == "tpu":
        remote.check_width(layout.buffers, main)
    return layout


def _check(main: Graph) -> None:
    """Raise `PopxlError` for remote or sharded variables used directly by ops, and for complex128 tensors."""
    used = used_storages(main)
    for v in main.variables:
        if v in used and v.location_info.isRemote():
            instead = "what `ops.remote_load` loads" if v.piece is None else "the shard, `v.piece`, or what gathers it"
            raise PopxlError(
                f"Session: {v!r} is used by an op, and its numbers are in {v.location_info.buffer!r} or in pieces. "
                f"Use {instead}."
            )
    for graph in reachable(main):
        for op in graph.ops:
            for t in (*op.inputs, *op.outputs):
                if t.dtype.is_complex and t.dtype.is_wide:
                    raise PopxlError(f"Session: {t!r} is of complex128, which cannot be run; use popxl.complex64.")
