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
    storages = {t: set(t.by_iteration) for t in loop.inputs}
    written = [t for t in loop.inputs if t.is_modified]
    return (
        all(t.carried_from is None for t in loop.inputs)
        and not all(t.is_invariant for t in loop.inputs)
        and all(len(storages[t]) == len(loop.iterations) for t in written)
        and all(storages[a].isdisjoint(storages[b]) for a in written for b in loop.inputs if a is not b)
        and all(map(is_batchable, loop.ops))
    )


def lower_batched(lowering: Lowering, loop: RerolledLoop, environment: Environment, context: Context) -> None:
    """Lower a rerolled loop on whole packed arrays, by `jax.vmap` of an iteration."""
    own = [t for t in loop.inputs if not t.is_invariant]
    for storages in merge_overlapping(t.by_iteration for t in own):
        pack_together(environment, storages)
    slots = {t: [_slot(environment, storage) for storage in t.by_iteration] for t in own}
    order = _order(loop, slots)
    packed_in = {t: slots[t][0].packed for t in own}
    numbers = {t: [slots[t][i].number for i in order] for t in own}
    shared = [t.storage for t in loop.inputs if t.is_invariant and not is_constant(t, environment)]
    shared_values = {storage: environment.value_of(storage) for storage in shared}
    channels = context.channels.loop_channels(())
    body = context.in_loop_body(channels.in_iteration(channels.start), iterations=len(order))
    written = [t for t in own if t.is_modified]

    def iteration(values: Sequence[Array]) -> Any:
        own_values = {t.storage: value for t, value in zip(own, values, strict=True)}
        after = lowering.lower_ops(loop.ops, shared_values | own_values, body)
        return [after.value_of(t.storage) for t in written], [after.value_of(m.storage) for m in loop.outputs]

    changed, results = jax.vmap(iteration)([_rows(packed_in[t].array, numbers[t]) for t in own])
    context.channels.resume(channels, channels.start, changed)
    values_of = dict(zip(written, changed, strict=True))
    for packed, inside in group_by(written, packed_in.__getitem__).items():
        rows = [number for t in inside for number in numbers[t]]
        packed.array = _with_rows(packed.array, rows, [values_of[t] for t in inside])
    for m, values in zip(loop.outputs, results, strict=True):
        packed = PackedArray(values)
        environment.values.update((m.by_iteration[i], PackedSlot(packed, n)) for n, i in enumerate(order))


def _slot(environment: Environment, t: Tensor) -> PackedSlot:
    slot = environment.slot_or_value(t)
    assert isinstance(slot, PackedSlot)  # `pack_together` has packed all
    return slot


def _order(loop: RerolledLoop, slots: dict[LoopInput, list[PackedSlot]]) -> list[int]:
    """Iteration order of the largest modified rows, which avoids moving these."""
    iterations = range(len(loop.iterations))
    written = [t for t in slots if t.is_modified] or [*slots]
    largest = max(written, key=lambda t: size_in_bytes(t.storage), default=None)
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
