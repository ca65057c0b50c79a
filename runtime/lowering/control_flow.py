"""Ops that run graphs: calls, conditionals and loops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from popxl.base.arrays import Array
from popxl.core.aliasing import changed_inputs
from popxl.core.recording import Op
from popxl.errors import PopxlError
from popxl.graph import Graph
from popxl.ops.call import call_kind
from popxl.ops.conditional import conditional_kind
from popxl.ops.kernels import memory
from popxl.ops.kernels.kernel import overriding_kernels
from popxl.ops.repeat import EXTRA_INPUTS, EXTRA_OUTPUTS, loop_kind, returned_by_ref, rows_of
from runtime.lowering.context import Context
from runtime.lowering.environment import Environment, Results
from runtime.lowering.packed_arrays import PackedArray, PackedSlot, load, write_back
from runtime.lowering.platform_hooks import Unordered
from runtime.lowering.registry import register_lowering
from runtime.lowering.scopes import of_op
from runtime.lowering.sharing import Sharing
from runtime.targets.replicas import is_on_host

if TYPE_CHECKING:
    from runtime.lowering.lower import Lowering


@register_lowering(call_kind)
def _call(lowering: Lowering, op: Op, environment: Environment, context: Context) -> None:
    """Lower a call: copy inputs in, run the graph, copy outputs and modified by-reference inputs out."""
    (graph,) = op.called_graphs
    check_bound(op)
    operands, sharing = call_inputs(op, environment), environment.sharing(op)
    inputs: Sequence[Array | PackedSlot] = operands
    if lowering.inlines(graph, context, sharing) and context.calls.record(graph, operands):
        with of_op(op), overriding_kernels(lowering.replicas.platform, lowering.hooks.overrides):
            inputs = _delayed_inputs(op, operands, environment, context)
    finish_call(op, environment, operands, lowering.lower_call(graph, inputs, context, packed=True, sharing=sharing))


def _delayed_inputs(op: Op, inputs: Sequence[Any], environment: Environment, context: Context) -> Sequence[Any]:
    """Inputs of a repeated call, available when all inputs of the enclosing graph are, such as gradients.

    XLA would merge both calls otherwise and keep the results, which is what recomputation is meant to avoid. Later ops
    read what comes out of the barrier, for the order is lost with results that nothing reads.
    """
    outer = [t for t in op.graph.inputs if context.inputs and not isinstance(environment.slot_or_value(t), PackedSlot)]
    values = [environment.value_of(t) for t in outer]
    delayed, equals = memory.available_together(inputs, values)
    for t, before, after in zip(outer, values, equals, strict=True):
        if after is not before:
            environment.replace_equal(t, after)
    return delayed


def finish_call(op: Op, environment: Environment, inputs: Sequence[Array | PackedSlot], results: Results) -> None:
    """Write a called graph's results to the caller's environment, and to the packed slots among its inputs."""
    for t, result in zip(op.outputs, results.outputs, strict=False):  # the graph may have gained outputs since
        environment.define(t, result)
    for i in sorted(op.modified & results.modified.keys()):
        if isinstance(slot := inputs[i], PackedSlot):
            write_back(results.modified[i], slot)
        else:
            environment.write(op.inputs[i], load(results.modified[i]))
    for storage, value in results.modified_storages.items():
        environment.write(storage, value)
    environment.record_call_reads(op, results)


def call_inputs(
    op: Op, environment: Environment, own: int = 0, by_value: Container[int] = frozenset()
) -> list[Array | PackedSlot]:
    """Inputs of a called graph: packed slots, or copies if the graph modifies a slot that has other users.

    Args:
        own: number of graph inputs that precede them.
        by_value: positions of inputs that are never packed slots.
    """
    operands = [environment.slot_or_value(t) for t in op.inputs]
    slots = {i: operand for i, operand in enumerate(operands) if isinstance(operand, PackedSlot)}
    if slots:
        changed_numbers, count = {i - own for i in changed_inputs(op.called_graphs[0])}, Counter(slots.values())
        changed = {slot for i, slot in slots.items() if i in changed_numbers}
        for i, slot in slots.items():
            is_copied = i in by_value or (i in changed_numbers and i not in op.modified)
            if is_copied or (slot in changed and count[slot] > 1):
                operands[i] = slot.slice_value()
    return operands


def check_bound(op: Op) -> None:
    """Raise `PopxlError` if a graph gained inputs after an op that runs it."""
    if not all(run.is_bound for run in op.runs):
        titles = " or ".join(graph.title for graph in dict.fromkeys(op.called_graphs))
        raise PopxlError(
            f"Session: {titles} gained inputs after {op!r} ({op.source}) was made, and nothing is bound to them there. "
            "Call a graph after it has all its inputs."
        )


@register_lowering(conditional_kind)
def _conditional(lowering: Lowering, op: Op, environment: Environment, context: Context) -> None:
    """Lower a conditional to `lax.cond`, with channels as branch results."""
    check_bound(op)
    cond, *inputs = (environment.value_of(t) for t in op.inputs)
    then_branch, else_branch = op.called_graphs
    count = len(then_branch.inputs)
    used = lowering.channels_of((op,))
    loop_channels = context.channels.loop_channels(used)

    def branch(graph: Graph, values: Sequence[Array], when: bool) -> Callable[[Any], Any]:
        def run(channel_state: Any) -> Any:
            channels = loop_channels.in_iteration(channel_state)
            if lowering.is_vmapped:
                is_taken = cond.reshape(()) == when
                is_running = context.channels.running
                channels.running = is_taken if is_running is None else is_running & is_taken
            results = lowering.lower_call(graph, values, replace(context, channels=channels))
            return results.outputs[: len(op.outputs)], channels.carried(used)

        return run

    branches = (branch(then_branch, inputs[:count], True), branch(else_branch, inputs[count:], False))
    # Several replicas on one device can select between results, but not between whole buffers in host memory.
    select = (
        _run_both if lowering.is_vmapped and any(map(is_on_host, jax.tree.leaves(loop_channels.start))) else lax.cond
    )
    outputs, channel_state = select(cond.reshape(()), *branches, loop_channels.start)
    context.channels.resume(loop_channels, channel_state, outputs)
    for t, value in zip(op.outputs, outputs, strict=True):
        environment.write(t, value)


def _run_both(cond: Array, then_branch: Callable[[Any], Any], else_branch: Callable[[Any], Any], start: Any) -> Any:
    """`lax.cond` for vmapped replicas: arrays in host memory pass through both branches, which update them under a
    mask."""
    then_results = then_branch(start)
    handed = jax.tree.map(lambda new, old: new if is_on_host(old) else old, then_results[1], start)
    return jax.tree.map(lambda a, b: b if is_on_host(b) else jnp.where(cond, a, b), then_results, else_branch(handed))


class Iteration(NamedTuple):
    """Inputs of one loop iteration.

    Attributes:
        packed_arrays: packed array of the iteration for each packed array outside of the loop.
    """

    inputs: list[Array | PackedSlot]
    sharing: Sharing
    packed_arrays: dict[PackedArray, PackedArray]


class Loop:
    """Loop-carried state and loop-invariant inputs of a repeat op.

    The first inputs, one for each carried result, are carried from iteration to iteration; and so are by-reference
    inputs, except for those that each iteration returns. For inputs that share storage, the storage is carried: an
    iteration starts by writing the carried results to it, in order. Everything else is loop-invariant. Further results
    are stacked over all iterations.
    """

    def __init__(self, op: Op, environment: Environment) -> None:
        self.graph: Graph = op.attributes["graph"]
        self._op = op
        self._carried = op.attributes["carried"]
        self._sharing = environment.sharing(op)
        self._carried_by_ref = returned_by_ref(op) - self._sharing.positions if op.modified else frozenset()
        by_value = frozenset(range(self._carried)) | self._carried_by_ref
        self._inputs = call_inputs(op, environment, EXTRA_INPUTS, by_value | self._sharing.positions)
        self._slots = {k: operand for k, operand in enumerate(self._inputs) if isinstance(operand, PackedSlot)}
        self._packed = tuple(dict.fromkeys(slot.packed for k, slot in self._slots.items() if k in op.modified))
        self._modified_alone = op.modified - self._slots.keys() - self._sharing.positions
        contents = {k: self._inputs[k] for k in sorted(self._modified_alone - self._carried_by_ref)}
        arrays = [packed.array for packed in self._packed]
        shared = [self._sharing.values[storage] for storage in self._sharing.modified]
        self.start = (tuple(self._inputs[: self._carried]), contents, arrays, shared)

    def rows(self) -> dict[Op, Array]:
        """Body ops that slice the iteration's row out of an input, with the bound tensor."""
        own = self.graph.inputs[EXTRA_INPUTS:]
        bound = {row.producer: self._inputs[own.index(stacked)] for row, stacked in rows_of(self.graph).items()}
        return {op: value for op, value in bound.items() if op is not None and not isinstance(value, PackedSlot)}

    def begin_iteration(self, state: Any, i: Array) -> Iteration:
        """Build the inputs of an iteration from the loop-carried state."""
        results_before, contents, arrays, shared = state
        now = dict(zip(self._packed, arrays, strict=True))
        packed_inputs = dict.fromkeys(slot.packed for slot in self._slots.values())
        packed_arrays = {packed: packed.with_array(now.get(packed, packed.array)) for packed in packed_inputs}
        values = list(self._inputs)
        for k, content in contents.items():
            values[k] = content
        for k, slot in self._slots.items():
            values[k] = PackedSlot(packed_arrays[slot.packed], slot.number)
        values[: self._carried] = results_before
        sharing = self._sharing.with_values(dict(zip(self._sharing.modified, shared, strict=True)))
        if sharing:
            storages = Environment(sharing.values, Unordered(), sharing.caller_tensors, 1)
            for k in sorted(sharing.positions.intersection(range(self._carried))):
                storages.write(self._op.inputs[k], results_before[k])
            sharing = sharing.with_values(storages.values)
        return Iteration([i, jnp.asarray(True), *values], sharing, packed_arrays)

    def end_iteration(self, iteration: Iteration, results: Results) -> tuple[Any, Sequence[Array]]:
        """Split the results of an iteration into loop-carried state and stacked results."""
        values, packed_arrays, modified = iteration.inputs[EXTRA_INPUTS:], iteration.packed_arrays, results.modified
        for k in self._slots.keys() & self._op.modified:
            write_back(modified.get(k + EXTRA_INPUTS, values[k]), values[k])
        others = sorted(self._modified_alone - self._carried_by_ref)
        after = {k: load(modified.get(k + EXTRA_INPUTS, values[k])) for k in others}
        outputs = tuple(map(load, results.outputs[EXTRA_OUTPUTS:]))
        arrays = [packed_arrays[packed].array for packed in self._packed]
        shared = [results.modified_storages[storage] for storage in self._sharing.modified]
        return (outputs[: self._carried], after, arrays, shared), outputs[self._carried :]

    def finish(self, state: Any, stacked: Sequence[Array], environment: Environment) -> None:
        """Write the results of a finished loop to the environment."""
        outputs, contents, arrays, shared = state
        for packed, array in zip(self._packed, arrays, strict=True):
            packed.array = array
        for t, value in zip(self._op.outputs, (*outputs, *stacked), strict=True):
            environment.write(t, value)
        for k in sorted(self._modified_alone):
            environment.write(self._op.inputs[k], outputs[k] if k in self._carried_by_ref else contents[k])
        for storage, value in zip(self._sharing.modified, shared, strict=True):
            environment.write(storage, value)


@register_lowering(loop_kind)
def _loop(lowering: Lowering, op: Op, environment: Environment, context: Context) -> None:
    """Lower a repeat to `lax.scan`, with channels as loop-carried state."""
    loop, used = Loop(op, environment), lowering.channels_of((op,))
    loop_channels = context.channels.loop_channels(used)

    rows = loop.rows()

    def iterate(state: Any, inputs: tuple[Array, Sequence[Array]]) -> Any:
        (before, channel_state), (i, sliced) = state, inputs
        channels = loop_channels.in_iteration(channel_state)
        iteration = loop.begin_iteration(before, i)
        body = context.in_loop_body(channels, sliced_rows=dict(zip(rows, sliced, strict=True)))
        results = lowering.lower_call(loop.graph, iteration.inputs, body, packed=True, sharing=iteration.sharing)
        after, further = loop.end_iteration(iteration, results)
        return (after, channels.carried(used)), further

    (run,) = op.runs
    start, numbers = (loop.start, loop_channels.start), jnp.arange(run.iterations, dtype=jnp.int32)
    is_backwards = run.numbers.step < 0
    (state, channel_state), stacked = lax.scan(iterate, start, (numbers, [*rows.values()]), reverse=is_backwards)
    context.channels.resume(loop_channels, channel_state, (state, stacked))
    loop.finish(state, stacked, environment)
