"""Selection of the best compilation mode for called graphs: compiles candidate modes and compares their costs."""

from __future__ import annotations

from dataclasses import replace

import jax

from popxl.base.pages import bytes_text, count_text, seconds_text
from popxl.ir import Ir
from runtime.costs.executables import chip_of
from runtime.costs.memory import memory_of_program
from runtime.costs.program_cost import cost_of
from runtime.files.cache import cached_mode, keep_way
from runtime.program.compiled import CompiledProgram, Precompiled, compile_program
from runtime.program.laying_out import layout_for
from runtime.targets.compile_target import DoesNotFit
from runtime.targets.devices import Device


def best(ir: Ir, device: Device) -> CompiledProgram:
    """Compile a program with the fastest mode that fits into memory, by estimate.

    The candidates are in the layout of a program; see `runtime.plan.decision`. If a cache is on, it keeps the choice.
    On CPUs, and where several processes run a program, nothing is compared.

    Raises:
        DoesNotFit: if it does not fit in any form, according to the compiler.
    """
    is_divided = device.target is None and len({each.process_index for each in device.jax_devices}) > 1
    if is_divided or device.jax_devices[0].platform == "cpu":
        return compile_program(
            ir, device
        )  # as the layout says: processes would read other costs where kernels were tuned otherwise
    way = cached_mode(ir, device)
    if way is not None:
        program = compile_program(ir, device, Precompiled(way))
        return replace(program, reason="It was the fastest when the program was first compiled; the cache knows.")
    first = _tried(ir, device)
    layout = first.layout if isinstance(first, CompiledProgram) else layout_for(ir, device)
    decision = layout.decision
    if not decision.others and not decision.rest:
        return _raise_if_failed(first)
    tried = {layout.calls: first} | {way: _tried(ir, device, Precompiled(way)) for way in decision.others}
    fitting = {way: program for way, program in tried.items() if _fits(ir, program)}
    for way in decision.rest:
        if not fitting:
            tried[way] = _tried(ir, device, Precompiled(way))
            fitting = {way: tried[way]} if _fits(ir, tried[way]) else {}
    if not fitting or len(tried) == 1:
        return _raise_if_failed(first)
    costs = {way: estimated(_raise_if_failed(program)) for way, program in fitting.items()}
    way = min(costs, key=lambda way: costs[way][0])
    told = [f"{each}, {costs[each][1]}" if each in costs else f"{each}, too large for the memory" for each in tried]
    keep_way(ir, device, way)
    return replace(_raise_if_failed(fitting[way]), reason=f"It is the fastest by an estimate: {'; '.join(told)}.")


def _tried(ir: Ir, device: Device, known: Precompiled | None = None) -> CompiledProgram | Exception:
    """Compiled program; or the compiler's error if it does not fit."""
    try:
        return compile_program(ir, device, known)
    except DoesNotFit as problem:
        return problem
    except jax.errors.JaxRuntimeError as problem:
        if "RESOURCE_EXHAUSTED" not in str(problem):
            raise
        return problem


def _raise_if_failed(found: CompiledProgram | Exception) -> CompiledProgram:
    if isinstance(found, Exception):
        raise found
    return found


def _fits(ir: Ir, program: CompiledProgram | Exception) -> bool:
    """Whether a program fits its chip's memory; true for unknown chips."""
    if isinstance(program, Exception):
        return False
    figures = chip_of(program)
    return figures is None or memory_of_program(ir, program).device <= figures.memory_bytes


def estimated(program: CompiledProgram) -> tuple[float, str]:
    """Run cost, comparable between programs on the same chip, and its description."""
    cost = cost_of(program)
    if cost.cycles is not None:
        return cost.cycles, f"{count_text(cost.cycles)} cycles a run"
    if cost.seconds is None:
        return cost.bytes_accessed, f"{bytes_text(cost.bytes_accessed)} read and written in a run"
    return cost.seconds, f"{seconds_text(cost.seconds)} a run"
