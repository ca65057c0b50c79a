"""What an error says if no memory plan is within a budget: the least memory, what holds it, and what would fit."""

from __future__ import annotations

import math
from collections.abc import Sequence

from popxl.analysis.memory import Memory, steps_of
from popxl.base.pages import bytes_text
from popxl.core.tensor import Tensor, Variable
from popxl.graph import Graph
from popxl.ir import Ir
from runtime.memory_needs import GraphNeeds

_FRACTIONS = (2, 4, 8, 16, 32, 64)
"""Into how many micro-batches a step may be divided, in place of one."""

_SHARE = 0.9
"""Share of the budget that an estimate may use."""

_ACCUMULATOR = 4
"""Bytes of an element of an accumulator: float32."""


def refusal(ir: Ir, memory: Memory, model: Graph, graphs: Sequence[GraphNeeds], budget: int) -> str:
    """Message of the error for a budget that no plan fits into.

    Args:
        ir, memory: the program with the smallest plan, as compiled.
    """
    parts = ("variables", "buffers", "arguments", "outputs", "constants", "code", "temporaries")
    held = sorted(((getattr(memory, part) or 0, part) for part in parts), reverse=True)
    told = ", ".join(f"{part} {bytes_text(size)}" for size, part in held if size)
    return (
        f"memory: no plan was found within {bytes_text(budget)} of a device; the least that was compiled needs "
        f"{bytes_text(memory.device)}: {told}. {_at_most(ir)} State a budget of that or more. "
        f"{_by_micro_batches(memory, model, graphs, budget)} {_by_state(ir, memory, model, budget)}"
    )


def _by_micro_batches(memory: Memory, model: Graph, graphs: Sequence[GraphNeeds], budget: int) -> str:
    """What micro-batches need: each has a part of the activations, and all of the gradients, which it accumulates."""
    trained = [t for t in _variables_of(model) if t.dtype.is_floating_point]
    accumulators = sum(_ACCUMULATOR * t.nelms for t in trained) if len(model.call_sites) == 1 else 0
    gradients = min(sum(g.gradients * g.calls for g in graphs), memory.temporaries)
    fixed = memory.device - memory.temporaries + gradients + accumulators

    def needed(parts: int) -> int:
        return fixed + (memory.temporaries - gradients) // parts

    fitting = next((parts for parts in _FRACTIONS if needed(parts) <= _SHARE * budget), None)
    if fitting is None:
        return f"Smaller micro-batches do not help: without any activations, about {bytes_text(fixed)} remain."
    return (
        f"By estimate, 1/{fitting} of the samples in a micro-batch need {bytes_text(needed(fitting))}: make "
        f"`accumulate` (in PyTorch `options.Training.gradientAccumulation`) {fitting} times as large, and the batch as "
        "much smaller."
    )


def _by_state(ir: Ir, memory: Memory, model: Graph, budget: int) -> str:
    """What is left without the variables that the model does not read."""
    read = set(_variables_of(model))
    state = sum(math.prod(t.shape) * t.dtype.itemsize for t in ir.main_graph.variables if t not in read)
    if 10 * state < memory.device:  # little to gain
        return "`sharded=True` divides variables and optimiser state over replicas."
    fits = "which fits" if memory.device - state <= budget else "which does not fit either"
    return (
        f"Without optimiser state and accumulators ({bytes_text(state)}) about {bytes_text(memory.device - state)} "
        f"remain, {fits}: `sharded=True` divides variables and state over replicas, and PyTorch models keep state on "
        "the host by `options.TensorLocations.setOptimizerLocation(TensorLocationSettings().useOnChipStorage(False))`."
    )


def _variables_of(model: Graph) -> list[Variable]:
    """Variables that calls of a graph read, possibly cast or gathered before."""
    found: dict[Tensor, None] = {}
    waiting: list[Tensor] = [t for call in model.call_sites for t in call.inputs]
    while waiting:
        t = waiting.pop()
        if t not in found:
            found[t] = None
            waiting += t.producer.inputs if t.producer is not None and len(t.producer.inputs) == 1 else ()
    return [t for t in found if isinstance(t, Variable)]


def _at_most(ir: Ir) -> str:
    """The largest values of the step that holds most, counted op by op."""
    steps = steps_of(ir.main_graph, each_call=True)
    if not steps.moments:
        return ""
    highest = max(range(len(steps.moments)), key=lambda i: steps.moments[i].held + steps.moments[i].inside)
    there = [each for each in steps.tensors if each.first <= highest <= each.last]
    there.sort(key=lambda each: each.bytes, reverse=True)
    largest = ", ".join(f"{each.name} ({bytes_text(each.bytes)})" for each in there[:4])
    return f"Op by op, {steps.moments[highest].name} has most in memory; the largest of it: {largest}."
