"""Rerolled loops: repeated ops of a graph, lowered as iterations of one `lax.scan`.

One iteration, the *template*, is lowered; its inputs and outputs represent those of all iterations. Values that differ
by iteration, such as weights, are slots of packed arrays, and so are outputs that ops after the loop read. Modified
inputs are updated in their slots. `runtime.plan.loop_rerolling` finds such loops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from popxl.base.arrays import Array
from popxl.base.group_by import group_by
from popxl.core.aliasing import called_by
from popxl.core.recording import Op
from popxl.core.tensor import Constant, Tensor
from popxl.graph import Graph
from popxl.ops.kernels.kernel import overriding_kernels
from popxl.ops.kernels.memory import in_host_memory
from popxl.ops.memory import is_offloaded
from runtime.lowering.packed_arrays import PackedArray, PackedSlot, load

if TYPE_CHECKING:
    from runtime.lowering.context import Context
    from runtime.lowering.environment import Environment
    from runtime.lowering.lower import Lowering

NARROW = 2**16
"""Adjacent slots of at most so many bytes are sliced together, because a kernel launch takes longer than their copy.
Larger slots are read in place."""


@dataclass(frozen=True, eq=False)
class LoopInput:
    """An input of a rerolled loop's iterations.

    Attributes:
        carried_from: the template's storage whose value the next iteration takes as this input; `None` if not carried.
    """

    storage: Tensor
    by_iteration: tuple[Tensor, ...]
    is_modified: bool = False
    carried_from: Tensor | None = None

    @property
    def is_invariant(self) -> bool:
        """Whether the input is loop-invariant: one storage for all iterations."""
        return self.carried_from is None and len(set(self.by_iteration)) == 1


@dataclass(frozen=True, eq=False)
class LoopOutput:
    """An output of iterations with users after the loop.

    Attributes:
        is_last_only: whether only the last iteration's value is read.
        first: the initial value of the carried input, if it is packed before the outputs.
    """

    storage: Tensor
    by_iteration: tuple[Tensor, ...]
    is_last_only: bool = False
    first: Tensor | None = None

    @property
    def rows(self) -> tuple[Tensor, ...]:
        """Storages of the packed array, in order."""
        return self.by_iteration if self.first is None else (self.first, *self.by_iteration)


@dataclass(frozen=True, eq=False)
class RerolledLoop:
    """Ops lowered as one loop.

    Attributes:
        template: the index of the iteration that is lowered.
    """

    iterations: tuple[tuple[Op, ...], ...]
    template: int
    inputs: tuple[LoopInput, ...]
    outputs: tuple[LoopOutput, ...]

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """Ops of the template iteration."""
        return self.iterations[self.template]

    @cached_property
    def only_graph(self) -> Graph | None:
        """Graph called by an iteration, if there is exactly one call."""
        called = [graph for op in self.ops for graph in op.called_graphs]
        return called[0] if len(called) == 1 else None

    @cached_property
    def all_ops(self) -> tuple[Op, ...]:
        """Ops of all iterations, in order."""
        return tuple(op for iteration in self.iterations for op in iteration)


class ProgramOrder:
    """The default schedule of graphs: ops in program order. Subclasses may reroll loops.

    Attributes:
        aliases: aliases: tensors, and the tensors that hold their values.
        gathered: storages to pack together, by the op after which they are packed.
    """

    aliases: Mapping[Tensor, Tensor] = MappingProxyType({})
    gathered: Mapping[Op, Sequence[Sequence[Tensor]]] = MappingProxyType({})

    def schedule(self, graph: Graph) -> Sequence[Op | RerolledLoop]:
        """The schedule of a graph: ops, or rerolled loops."""
        return graph.ops


def lower_rerolled(lowering: Lowering, loop: RerolledLoop, environment: Environment, context: Context) -> None:
    """Lower a rerolled loop to `lax.scan`."""
    schedule = lowering.scheduling.schedule
    has_loops = any(isinstance(item, RerolledLoop) for graph in called_by(loop.ops) for item in schedule(graph))
    with overriding_kernels(lowering.replicas.platform, lowering.hooks.overrides):
        builder = _ScanBuilder(loop, environment, lowering.hooks.invariant_row, has_loops)
    used = lowering.channels_of(loop.ops)
    loop_channels = context.channels.loop_channels(used)

    def iterate(state: Any, rows: Sequence[Array]) -> Any:
        carried, channel_state = state
        channels = loop_channels.in_iteration(channel_state)
        body = context.in_loop_body(channels, iterations=len(loop.iterations), only_graph=loop.only_graph)
        values, packed_arrays = builder.begin_iteration(carried, rows)
        after = lowering.lower_ops(loop.ops, values, body)
        return (builder.end_iteration(rows, after, packed_arrays), channels.carried(used)), None

    start = (builder.start, loop_channels.start)
    (carried, channel_state), _ = lax.scan(iterate, start, builder.rows, length=len(loop.iterations))
    context.channels.resume(loop_channels, channel_state, carried)
    builder.finish(carried, environment)


class _CarriedValue(NamedTuple):
    """A value that iterations pass on outside of packed arrays: a modified input, a value that an iteration passes to
    the next one, or an output of the last iteration.

    Attributes:
        start: the value before the loop.
        before: storage of the template that has it at the start of an iteration; `None` if none reads it.
        after: storage of the template that has it at the end of an iteration.
        final: storage that has it after the loop; `None` if nothing reads it there.
    """

    start: Array
    before: Tensor | None
    after: Tensor
    final: Tensor | None


def _carried_values(
    loop: RerolledLoop, modified: Iterable[LoopInput], environment: Environment
) -> Iterator[_CarriedValue]:
    """Carried values of a loop, with its modified inputs outside of packed arrays."""
    for t in modified:
        yield _CarriedValue(environment.value_of(t.by_iteration[0]), t.storage, t.storage, t.by_iteration[0])
    for t in loop.inputs:
        if t.carried_from is not None:
            yield _CarriedValue(environment.value_of(t.by_iteration[0]), t.storage, t.carried_from, None)
    for m in loop.outputs:
        if m.is_last_only:
            undefined = lax.empty(m.storage.shape, m.storage.dtype.as_jax())
            yield _CarriedValue(undefined, None, m.storage, m.by_iteration[-1])


class _ScanBuilder:
    """Builder of a scan: loop-carried state, per-iteration inputs and outputs.

    The loop-carried state is the carried values, and the modified packed arrays.

    Args:
        has_loops: whether called graphs have rerolled loops. Loop-invariant slots then stay packed for these.

    Attributes:
        start: the initial state.
        rows: the first row of each slice, by iteration.
    """

    def __init__(
        self,
        loop: RerolledLoop,
        environment: Environment,
        invariant_row: Callable[[Array, Array], Array],
        has_loops: bool,
    ) -> None:
        self._invariant_row = invariant_row
        own_inputs = [t for t in loop.inputs if t.carried_from is None and not is_constant(t, environment)]
        for storages in merge_overlapping(t.by_iteration for t in own_inputs):
            pack_together(environment, storages)
        values_of = {t: tuple(map(environment.slot_or_value, t.by_iteration)) for t in own_inputs}
        slots = {t: rows for t, rows in values_of.items() if all(isinstance(row, PackedSlot) for row in rows)}
        modified_arrays = [rows[0].packed for t, rows in slots.items() if t.is_modified]
        # Each input is either a slot that stays packed, or sliced, or a value outside of packed arrays.
        stay_packed = [t for t in slots if t.is_invariant and has_loops]
        others = [t for t in slots if t not in stay_packed]
        sliced = [t for t in others if not t.is_invariant or slots[t][0].packed in modified_arrays]
        unpacked = [t for t in own_inputs if t not in stay_packed and t not in sliced]
        self._invariant_slots = {t.storage: slots[t][0] for t in stay_packed}
        self._invariant_values = {
            t.storage: environment.value_of(t.by_iteration[0]) for t in unpacked if not t.is_modified
        }
        self._outputs = [(m, _allocate_output(m, environment)) for m in loop.outputs if not m.is_last_only]
        output_slots = {
            m.storage: tuple(PackedSlot(array, n) for n in range(len(m.rows) - len(m.by_iteration), len(m.rows)))
            for m, array in self._outputs
        }
        self._packed = tuple(dict.fromkeys((*modified_arrays, *(array for _, array in self._outputs))))
        self._reads = tuple(_slices({t.storage: slots[t] for t in sliced}))
        self._writes = tuple(_slices({t.storage: slots[t] for t in sliced if t.is_modified} | output_slots))
        self.rows = tuple(np.asarray(slice_.first, np.int32) for slice_ in (*self._reads, *self._writes))
        modified = [t for t in unpacked if t.is_modified]
        self._carried = tuple(_carried_values(loop, modified, environment))
        self.start = [each.start for each in self._carried], [array.array for array in self._packed]

    def begin_iteration(
        self, state: Any, rows: Sequence[Array]
    ) -> tuple[dict[Tensor, Array | PackedSlot], dict[PackedArray, PackedArray]]:
        """Initial storage values of an iteration; and its packed arrays, by those outside of the loop."""
        carried, arrays = state
        now = dict(zip(self._packed, arrays, strict=True))
        outer_arrays = dict.fromkeys((*self._packed, *(slot.packed for slot in self._invariant_slots.values())))
        packed_arrays = {packed: packed.with_array(now.get(packed, packed.array)) for packed in outer_arrays}
        values: dict[Tensor, Array | PackedSlot] = dict(self._invariant_values)
        values.update(
            (name, PackedSlot(packed_arrays[slot.packed], slot.number)) for name, slot in self._invariant_slots.items()
        )
        pairs = zip(self._carried, carried, strict=True)
        values.update((each.before, value) for each, value in pairs if each.before is not None)
        for slice_, number in zip(self._reads, rows, strict=False):
            sliced = slice_.slice_values(now.get(slice_.packed, slice_.packed.array), number)
            is_invariant = slice_.packed.is_input and slice_.packed not in now
            values.update((name, self._invariant_row(row, number) if is_invariant else row) for name, row in sliced)
        return values, packed_arrays

    def end_iteration(
        self, rows: Sequence[Array], after: Environment, packed_arrays: Mapping[PackedArray, PackedArray]
    ) -> Any:
        """The loop-carried state after an iteration."""
        now = {packed: packed_arrays[packed].array for packed in self._packed}
        for slice_, row in zip(self._writes, rows[len(self._reads) :], strict=True):
            now[slice_.packed] = slice_.updated(now[slice_.packed], row, after)
        return [after.value_of(each.after) for each in self._carried], [now[packed] for packed in self._packed]

    def finish(self, state: Any, environment: Environment) -> None:
        """Write the final state to the environment."""
        carried, arrays = state
        for packed, array in zip(self._packed, arrays, strict=True):
            packed.array = array
        pairs = zip(self._carried, carried, strict=True)
        environment.values.update((each.final, value) for each, value in pairs if each.final is not None)
        for loop_output, packed in self._outputs:
            environment.values.update((t, PackedSlot(packed, n)) for n, t in enumerate(loop_output.rows))


class _Slice(NamedTuple):
    """Adjacent slots, read or written with one slice per iteration.

    Attributes:
        names: storages of the template for these slots, in order.
        first: number of the first slot, for each iteration.
    """

    packed: PackedArray
    names: tuple[Tensor, ...]
    first: tuple[int, ...]

    def slice_values(self, array: Array, row: Array) -> Iterator[tuple[Tensor, Array]]:
        """Slice the values of all storages."""
        count = len(self.names)
        rows = lax.dynamic_slice_in_dim(array, row, count, allow_negative_indices=False)
        values = (lax.index_in_dim(rows, n, keepdims=False) for n in range(count))
        return zip(self.names, (value.reshape(self.packed.shape) for value in values), strict=True)

    def updated(self, array: Array, row: Array, after: Environment) -> Array:
        """Update the packed array with an iteration's values."""
        rows = jnp.stack([self.packed.as_row(after.value_of(name)) for name in self.names])
        return lax.dynamic_update_slice_in_dim(array, rows, row, 0, allow_negative_indices=False)


def _slices(slots: Mapping[Tensor, Sequence[PackedSlot]]) -> Iterator[_Slice]:
    """Group slots into slices, given each storage's slots by iteration."""
    for packed, names in group_by(slots, lambda name: slots[name][0].packed).items():
        numbers = {name: tuple(row.number for row in slots[name]) for name in names}
        is_narrow = names[0].nelms * names[0].dtype.itemsize <= NARROW
        members: list[Tensor] = []
        for name in sorted(names, key=numbers.__getitem__):
            if members and not (is_narrow and numbers[name] == tuple(n + 1 for n in numbers[members[-1]])):
                yield _Slice(packed, tuple(members), numbers[members[0]])
                members = []
            members.append(name)
        yield _Slice(packed, tuple(members), numbers[members[0]])


def is_constant(loop_input: LoopInput, environment: Environment) -> bool:
    """Whether an input is an unmodified constant, which is best embedded at its users."""
    is_invariant = isinstance(loop_input.storage, Constant) and len(set(loop_input.by_iteration)) == 1
    return is_invariant and not loop_input.is_modified and loop_input.storage not in environment.values


def merge_overlapping(by_iteration: Iterable[Sequence[Tensor]]) -> list[tuple[Tensor, ...]]:
    """Merge storage tuples with common elements into groups."""
    group_of: dict[Tensor, list[Tensor]] = {}
    for storages in by_iteration:
        groups = {id(group): group for t in storages if (group := group_of.get(t)) is not None}
        merged = list(dict.fromkeys([*(t for group in groups.values() for t in group), *storages]))
        group_of.update(dict.fromkeys(merged, merged))
    return [tuple(group) for group in {id(group): group for group in group_of.values()}.values()]


def pack_together(environment: Environment, storages: Sequence[Tensor]) -> None:
    """Pack storages into one array, by copies unless they already share one."""
    slots = [environment.slot_or_value(t) for t in storages] if len(storages) > 1 else []
    packed_arrays = {slot.packed for slot in slots if isinstance(slot, PackedSlot)}
    if len(packed_arrays) > 1 or not all(isinstance(slot, PackedSlot) for slot in slots):
        packed = PackedArray(jnp.stack([load(slot) for slot in slots]))
        environment.values.update((t, PackedSlot(packed, n)) for n, t in enumerate(storages))


def _allocate_output(output: LoopOutput, environment: Environment) -> PackedArray:
    """Allocate a packed array for loop outputs.

    In host memory, scalars and vectors have rows of two dimensions: XLA for TPUs cannot copy single rows of a matrix to
    or from it, and aborts.
    """
    t = output.storage
    is_on_host = is_offloaded(t)
    row = (1,) * (2 - len(t.shape)) + t.shape if is_on_host else t.shape
    array = lax.empty((len(output.rows), *row), t.dtype.as_jax())  # iterations fill all of it
    packed = PackedArray(in_host_memory(array) if is_on_host else array, shape=t.shape)
    if output.first is not None:
        PackedSlot(packed, 0).write(environment.value_of(output.first))
    return packed
