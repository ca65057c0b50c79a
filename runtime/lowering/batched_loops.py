"""Batched loops: rerolled loops of independent iterations without products, lowered on whole packed arrays.

The parameter updates of all layers are such a loop. A `lax.scan` would slice each row out of its array and copy the
result back; on whole arrays an update is one kernel that works in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from popxl.analysis.flops import own_flops
from popxl.base.arrays import Array
from popxl.base.group_by import group_by
from popxl.core.aliasing import called_by
from popxl.core.recording import Op
from popxl.core.rounding import rounds
from popxl.core.tensor import Tensor
from popxl.core.tracing import traces_in
from popxl.core.traits import is_call
from popxl.values.spec import size_in_bytes
from runtime.lowering.packed_arrays import PackedArray, PackedSlot
from runtime.lowering.rerolled_loops import LoopInput, RerolledLoop, is_constant, merge_overlapping, pack_together

if TYPE_CHECKING:
    from runtime.lowering.context import Context
    from runtime.lowering.environment import Environment
    from runtime.lowering.lower import Lowering


def is_batchable(op: Op) -> bool:
    """Whether an op, including its called graphs, computes results from operands alone, without products."""
    return _is_local(op) and all(_is_local(each) for graph in called_by([op]) for each in graph.ops)


_UNBATCHED = frozenset("pure_callback io_callback debug_callback ffi_call pallas_call shard_map".split())
"""Primitives that `jax.vmap` refuses or transforms."""


def _is_local(op: Op) -> bool:
    kind = op.kind
    if kind.exchange or kind.effect or kind.between_replicas or kind.requirements or op.parts != (op,) or rounds(op):
        return False
    if op.called_graphs or kind.is_carried_out_by_others:
        return is_call(op)
    return not own_flops(op).products and op.remembered("batches", lambda: _UNBATCHED.isdisjoint(_names(op.traced())))


def _names(jaxpr: Any) -> Iterator[str]:
    """Names of all primitives in a trace."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for inner in traces_in(equation):
            yield from _names(inner)


def is_batch(loop: RerolledLoop) -> bool:
    """Whether the iterations of a loop are independent, without products, and keep what they modify in slots."""
    storages = {loop_input: set(loop_input.by_iteration) for loop_input in loop.inputs}
    written = [loop_input for loop_input in loop.inputs if loop_input.is_modified]
    return (
        all(loop_input.carried_from is None for loop_input in loop.inputs)
        and not all(loop_input.is_invariant for loop_input in loop.inputs)
        and all(len(storages[loop_input]) == len(loop.iterations) for loop_input in written)
        and all(storages[a].isdisjoint(storages[b]) for a in written for b in loop.inputs if a is not b)
        and all(map(is_batchable, loop.ops))
    )


def lower_batched(lowering: Lowering, loop: RerolledLoop, environment: Environment, context: Context) -> None:
    """Lower a rerolled loop on whole packed arrays, by `jax.vmap` of an iteration."""
    own = [loop_input for loop_input in loop.inputs if not loop_input.is_invariant]
    for storages in merge_overlapping(loop_input.by_iteration for loop_input in own):
        pack_together(environment, storages)
    slots = {loop_input: [_slot(environment, t) for t in loop_input.by_iteration] for loop_input in own}
    order = _order(loop, slots)
    numbers = {loop_input: [slots[loop_input][i].number for i in order] for loop_input in own}
    fixed = {
        loop_input.storage: environment.value_of(loop_input.storage)
        for loop_input in loop.inputs
        if loop_input.is_invariant and not is_constant(loop_input, environment)
    }
    channels = context.channels.loop_channels(())
    body = context.in_loop_body(channels.in_iteration(channels.start), iterations=len(order))
    written = [loop_input for loop_input in own if loop_input.is_modified]

    def iteration(values: Sequence[Array]) -> Any:
        known = fixed | {loop_input.storage: value for loop_input, value in zip(own, values, strict=True)}
        after = lowering.lower_ops(loop.ops, known, body)
        return [after.value_of(loop_input.storage) for loop_input in written], [
            after.value_of(loop_output.storage) for loop_output in loop.outputs
        ]

    changed, results = jax.vmap(iteration)(
        [_rows(slots[loop_input][0].packed.array, numbers[loop_input]) for loop_input in own]
    )
    context.channels.resume(channels, channels.start, changed)
    values_of = dict(zip(written, changed, strict=True))
    for packed, inside in group_by(written, lambda loop_input: slots[loop_input][0].packed).items():
        rows = [number for loop_input in inside for number in numbers[loop_input]]
        packed.array = _with_rows(packed.array, rows, [values_of[loop_input] for loop_input in inside])
    for loop_output, values in zip(loop.outputs, results, strict=True):
        packed = PackedArray(values)
        environment.values.update((loop_output.by_iteration[i], PackedSlot(packed, n)) for n, i in enumerate(order))


def _slot(environment: Environment, t: Tensor) -> PackedSlot:
    slot = environment.slot_or_value(t)
    assert isinstance(slot, PackedSlot)  # `pack_together` has packed all
    return slot


def _order(loop: RerolledLoop, slots: dict[LoopInput, list[PackedSlot]]) -> list[int]:
    """Iteration order of the largest modified rows, which avoids moving these."""
    iterations = range(len(loop.iterations))
    written = [loop_input for loop_input in slots if loop_input.is_modified] or [*slots]
    largest = max(written, key=lambda loop_input: size_in_bytes(loop_input.storage), default=None)
    return [*iterations] if largest is None else sorted(iterations, key=lambda n: slots[largest][n].number)


def _rows(array: Array, numbers: Sequence[int]) -> Array:
    """Rows of an array, in an order; whole arrays and reversed ones need no copy."""
    first, last = numbers[0], numbers[-1]
    if [*numbers] == [*range(first, last + 1)]:
        return lax.slice_in_dim(array, first, last + 1)
    if [*numbers] == [*range(first, last - 1, -1)]:
        return lax.rev(lax.slice_in_dim(array, last, first + 1), (0,))
    return jnp.take(array, np.asarray(numbers), axis=0)


def _with_rows(array: Array, numbers: Sequence[int], values: Sequence[Array]) -> Array:
    """Replace rows of an array."""
    rows_of_all = jnp.concatenate(values) if len(values) > 1 else values[0]
    if sorted(numbers) == [*range(len(array))]:
        return _rows(rows_of_all, np.argsort(numbers).tolist())
    return array.at[np.asarray(numbers)].set(rows_of_all, unique_indices=True)
