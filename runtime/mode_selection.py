"""Selection of the fastest mode of called graphs: compiles candidate modes and compares their costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import jax

from popxl.base.pages import bytes_text, count_text, seconds_text
from popxl.ir import Ir
from runtime.costs.memory import memory_of_program
from runtime.costs.program_cost import cost_of
from runtime.files.cache import cache_mode, cached_mode
from runtime.program.build_layout import layout_for
from runtime.program.compiled import CompiledProgram, Precompiled, compile_program
from runtime.targets.compile_target import DoesNotFit
from runtime.targets.devices import Device


def compile_fastest(ir: Ir, device: Device) -> CompiledProgram:
    """Compile a program with the fastest mode of called graphs that fits into memory, by estimate.

    The candidates are in the layout of a program; see `runtime.plan.decision`. If a cache is on, it keeps the choice.
    On CPUs, and where several processes run a program, nothing is compared: processes would read other costs where
    kernels were tuned otherwise.

    Raises:
        DoesNotFit: if it does not fit with any mode, according to the compiler.
    """
    is_divided = device.target is None and len({each.process_index for each in device.jax_devices}) > 1
    if is_divided or device.jax_devices[0].platform == "cpu":
        return compile_program(ir, device)
    if (mode := cached_mode(ir, device)) is not None:
        program = compile_program(ir, device, Precompiled(mode))
        return replace(program, reason="It was the fastest when the program was first compiled; the cache knows.")
    first = _compiled(ir, device)
    layout = first.layout if isinstance(first, CompiledProgram) else layout_for(ir, device)
    decision = layout.decision
    outcomes = {decision.mode: first} | {mode: _compiled(ir, device, mode) for mode in decision.compared}
    fitting = _fitting(ir, outcomes)
    for mode in decision.fallbacks:
        if not fitting:
            outcomes[mode] = _compiled(ir, device, mode)
            fitting = _fitting(ir, {mode: outcomes[mode]})
    if not fitting or len(outcomes) == 1:
        if isinstance(first, Exception):
            raise first
        return first
    costs = {mode: run_cost(program) for mode, program in fitting.items()}
    fastest = min(costs, key=lambda mode: costs[mode][0])
    compared = [
        f"{mode}, {costs[mode][1]}" if mode in costs else f"{mode}, too large for the memory" for mode in outcomes
    ]
    cache_mode(ir, device, fastest)
    return replace(fitting[fastest], reason=f"It is the fastest by an estimate: {'; '.join(compared)}.")


def _compiled(ir: Ir, device: Device, mode: str | None = None) -> CompiledProgram | Exception:
    """Compiled program; or the compiler's error if it does not fit."""
    try:
        return compile_program(ir, device, None if mode is None else Precompiled(mode))
    except DoesNotFit as problem:
        return problem
    except jax.errors.JaxRuntimeError as problem:
        if "RESOURCE_EXHAUSTED" not in str(problem):
            raise
        return problem


def _fitting(ir: Ir, outcomes: Mapping[str, CompiledProgram | Exception]) -> dict[str, CompiledProgram]:
    """Compiled programs that fit into memory, by mode."""
    return {mode: each for mode, each in outcomes.items() if isinstance(each, CompiledProgram) and _fits(ir, each)}


def _fits(ir: Ir, program: CompiledProgram) -> bool:
    """Whether a program fits its chip's memory; true for unknown chips."""
    chip = program.device.chip
    return chip is None or memory_of_program(ir, program).device <= chip.memory_bytes


def run_cost(program: CompiledProgram) -> tuple[float, str]:
    """Cost of a run, comparable between programs on the same chip, and its description."""
    cost = cost_of(program)
    if cost.cycles is not None:
        return cost.cycles, f"{count_text(cost.cycles)} cycles a run"
    if cost.seconds is None:
        return cost.bytes_accessed, f"{bytes_text(cost.bytes_accessed)} read and written in a run"
    return cost.seconds, f"{seconds_text(cost.seconds)} a run"
