"""Error message for a budget that no memory plan meets: least memory, its largest parts, and remedies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from popxl.analysis.memory import Memory, steps_of
from popxl.base.pages import bytes_text
from popxl.core.recording import Op
from popxl.ir import Ir
from popxl.values.spec import size_in_bytes
from runtime.memory_plans.compiled import Compiled
from runtime.memory_plans.division import ESTIMATE_SHARE, StepMemory
from runtime.memory_plans.needs import GraphNeeds

_LOSSES_OF_LOGITS = ("CrossEntropy", "LogSoftmax")
"""Names of ops that read the logits of a loss."""

_FRACTIONS = (2, 4, 8, 16, 32, 64)
"""Numbers of micro-batches considered in place of one."""


def refusal(tried: Sequence[Compiled], graphs: Sequence[GraphNeeds], budget: int) -> str:
    """Message of the error for a budget that no plan fits into.

    Args:
        tried: programs that were compiled, the first with everything kept.
    """
    least = min(tried, key=lambda each: each.memory.device)
    memory, besides = least.memory, least.applied.plan.besides
    step = StepMemory(least.ir, memory, least.applied.models, graphs)
    parts = ("variables", "buffers", "arguments", "outputs", "constants", "code", "temporaries")
    ipus = least.bytes_of_ipus
    where = f", on IPU {max(ipus, key=lambda ipu: ipus[ipu])}" if len(ipus) > 1 else ""
    held = sorted(((getattr(memory, part) or 0, part) for part in parts), reverse=True)
    by_part = ", ".join(f"{part} {bytes_text(size)}" for size, part in held if size)
    values = f"{_by_model(least.applied.plan)}{_largest_values(least.ir)}"
    if least.is_jax_function:
        advice = "Add up gradients in a `lax.scan` over slices of the batch, or shard the arrays over more devices."
    else:
        is_open = any(each.micro_batches > 1 for each in tried[0].divisions)
        micro_batches = "" if is_open else f"{_by_micro_batches(step, budget)} "
        advice = f"{micro_batches}{_by_state(step, memory, budget)}"
    return (
        f"memory: no plan was found within {bytes_text(budget)} of a device; the least that was compiled"
        f"{f', with {besides},' if besides else ''} needs {bytes_text(memory.device)}: {by_part}{where}. "
        f"{values} State a budget of that or more. {advice}{_by_chunks(least)}"
    )


def _by_model(plan: Any) -> str:
    """Activations that each of several models keeps."""
    sizes = {model: sum(graph.bytes("keep") for graph in plan.graphs if graph.model == model) for model in plan.models}
    kept = " and ".join(f"{model} keeps {bytes_text(size)}" for model, size in sizes.items())
    return f"Of its activations, {kept}. " if kept else ""


def _by_micro_batches(step: StepMemory, budget: int) -> str:
    """Advice on micro-batches: each has a part of the activations, and all of the gradients, which it accumulates."""
    fitting = next((parts for parts in _FRACTIONS if step.divided_bytes(parts) <= ESTIMATE_SHARE * budget), None)
    if fitting is None:
        return f"Smaller micro-batches do not help: without any activations, about {bytes_text(step.fixed)} remain."
    needed = bytes_text(step.divided_bytes(fitting))
    return (
        f"By estimate, 1/{fitting} of the samples in a micro-batch need {needed}: give "
        f"`train_step` {fitting} times as many `micro_batches`, or 'auto' (in PyTorch, make "
        f"`options.Training.gradientAccumulation` {fitting} times as large, and the batch as much smaller)."
    )


def _by_state(step: StepMemory, memory: Memory, budget: int) -> str:
    """Advice on variables unread by the model: the memory that remains without them."""
    state = step.other_bytes
    if 10 * state < memory.device:  # little to gain
        return "`sharded=True` divides variables and optimiser state over replicas."
    fits = "which fits" if memory.device - state <= budget else "which does not fit either"
    return (
        f"Without optimiser state and accumulators ({bytes_text(state)}) about {bytes_text(memory.device - state)} "
        f"remain, {fits}: `sharded=True` divides variables and state over replicas, `optimizer_state='host'` keeps the "
        "state on the host; for PyTorch models `options.TensorLocations.setOptimizerLocation(TensorLocationSettings()"
        ".useOnChipStorage(False))` does."
    )


def _by_chunks(least: Compiled) -> str:
    """Advice on the logits of a loss, if they need much, and plans do not choose their number of chunks."""
    if least.logits:
        return ""
    size = max((_bytes_of_logits(op) for graph in least.applied.models for op in graph.ops), default=0)
    if 10 * size < least.memory.temporaries:
        return ""
    return (
        f" A loss reads {bytes_text(size)} of logits: `NextTokenLoss(model, chunks=…)`, or `ops.linear_cross_entropy` "
        "for other models, computes them in chunks, as many as plans choose if none are stated (in PyTorch, "
        "`F.linear_cross_entropy(…, options=torch.nn.LinearCrossEntropyOptions())`)."
    )


def _bytes_of_logits(op: Op) -> int:
    """Bytes of the logits that a loss reads at a time; 0 for other ops."""
    if op.op_type in _LOSSES_OF_LOGITS:
        return size_in_bytes(op.inputs[0])
    if op.op_type != "LinearCrossEntropy" or op.attributes["chunks"] is None:
        return 0
    x, weight, labels, *_ = op.inputs
    return labels.nelms * weight.shape[1] * x.dtype.itemsize // op.attributes["chunks"]


def _largest_values(ir: Ir) -> str:
    """The largest values of the step that holds most, counted op by op."""
    steps = steps_of(ir.main_graph, each_call=True)
    if not steps.moments:
        return ""
    highest = max(range(len(steps.moments)), key=lambda i: steps.moments[i].held + steps.moments[i].inside)
    there = [each for each in steps.tensors if each.first <= highest <= each.last]
    there.sort(key=lambda each: each.bytes, reverse=True)
    largest = ", ".join(f"{each.name} ({bytes_text(each.bytes)})" for each in there[:4])
    return f"Op by op, {steps.moments[highest].name} has most in memory; the largest of it: {largest}."
