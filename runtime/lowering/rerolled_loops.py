"""Loops that the machine makes: ops of a graph that are the same again and again, as turns of one loop.

The ops of one turn, the *model*, are lowered, with what another turn takes and makes in the place of what they do. What
turns take lies in one array, a stack, of which each has a row: its weights, say. So does what turns make and others
read later. What is overwritten is overwritten in its row. See `runtime.plan.rolling` for where such loops are found.
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
from popxl.core.aliasing import reachable
from popxl.core.recording import Op
from popxl.core.tensor import Constant, Tensor
from popxl.graph import Graph
from runtime.lowering.packed_arrays import PackedArray, PackedSlot, load

if TYPE_CHECKING:
    from runtime.lowering.context import Context
    from runtime.lowering.environment import Environment
    from runtime.lowering.lower import Lowering

NARROW = 2**16
"""Rows of so many bytes are cut out together, where they lie side by side. A kernel takes longer to start than to copy
them. Those of more bytes are read where they lie."""


@dataclass(frozen=True, eq=False)
class LoopInput:
    """An input of a rerolled loop's iterations.

    Attributes:
        name: the storage that the model finds.
        of_turns: the storage that each turn finds.
        is_written: whether turns overwrite it.
        before: what the model makes, or finds, that the next turn finds here; `None`, if nothing is handed on.
    """

    name: Tensor
    of_turns: tuple[Tensor, ...]
    is_written: bool = False
    before: Tensor | None = None

    @property
    def is_invariant(self) -> bool:
        """Whether the input is loop-invariant: one storage for all iterations."""
        return self.before is None and len(set(self.of_turns)) == 1


@dataclass(frozen=True, eq=False)
class LoopOutput:
    """An output of iterations with users after the loop.

    Attributes:
        name: the storage that the model makes.
        of_turns: the storage that each turn makes.
        is_last_only: whether only what the last turn makes is read.
        first: a storage that lies before those of all turns: what the first turn finds, where others find this.
    """

    name: Tensor
    of_turns: tuple[Tensor, ...]
    is_last_only: bool = False
    first: Tensor | None = None

    @property
    def rows(self) -> tuple[Tensor, ...]:
        """Storages of the packed array, in order."""
        return self.of_turns if self.first is None else (self.first, *self.of_turns)


@dataclass(frozen=True, eq=False)
class RerolledLoop:
    """Ops lowered as one loop.

    Attributes:
        turns: the ops of each turn.
        model: the number of the turn that is lowered.
        taken: what a turn finds.
        made: what is left of it.
    """

    turns: tuple[tuple[Op, ...], ...]
    model: int
    taken: tuple[LoopInput, ...]
    made: tuple[LoopOutput, ...]

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """Ops of the template iteration."""
        return self.turns[self.model]

    @cached_property
    def all_ops(self) -> tuple[Op, ...]:
        """Ops of all iterations, in order."""
        return tuple(op for turn in self.turns for op in turn)


class ProgramOrder:
    """The default schedule of graphs: ops in program order. Subclasses may reroll loops.

    Attributes:
        same: tensors that stand for others, which have their values.
        gathered: after which ops, which storages are put into one stack, each time.
    """

    same: Mapping[Tensor, Tensor] = MappingProxyType({})
    gathered: Mapping[Op, Sequence[Sequence[Tensor]]] = MappingProxyType({})

    def schedule(self, graph: Graph) -> Sequence[Op | RerolledLoop]:
        """The schedule of a graph: ops, or rerolled loops."""
        return graph.ops


def lower_rerolled(lowering: Lowering, loop: RerolledLoop, environment: Environment, context: Context) -> None:
    """Lower a rerolled loop to `lax.scan`."""
    schedule = lowering.scheduling.schedule
    called = dict.fromkeys(graph for op in loop.ops for callee in op.called_graphs for graph in reachable(callee))
    has_loops = any(isinstance(item, RerolledLoop) for graph in called for item in schedule(graph))
    builder, streams = (
        _ScanBuilder(loop, environment, lowering.hooks.invariant_row, has_loops),
        lowering.channels_of(loop.ops),
    )
    loop_channels = context.channels.loop_channels(streams)

    def iterate(state: Any, rows: Sequence[Array]) -> Any:
        held, positions = state
        inside = loop_channels.in_iteration(positions)
        body = context.in_loop_body(inside, rows=len(loop.turns))
        after = lowering.lower_ops(loop.ops, builder.iteration_values(held, rows), body)
        return (builder.next_state(held, rows, after), inside.carried(streams)), None

    start = (builder.start, loop_channels.start)
    (held, positions), _ = lax.scan(iterate, start, builder.rows, length=len(loop.turns))
    context.channels.resume(loop_channels, positions, held)
    builder.finish(held, environment)


class _ScanBuilder:
    """Builder of a scan: loop-carried state, per-iteration inputs and outputs.

    Carried from turn to turn are: what is overwritten and in no stack; what a turn hands to the next one; what was made
    last; and the stacks that are written to.

    Args:
        loop: the loop.
        environment: that of its ops.
        invariant_row: see `PlatformHooks`.
        has_loops: whether graphs that turns call have loops. What all turns find in a stack is not cut out then: those
            loops find it there.

    Attributes:
        start: what the first turn gets.
        rows: for each turn where each of its cuts begins, as arrays.
    """

    def __init__(
        self,
        loop: RerolledLoop,
        environment: Environment,
        invariant_row: Callable[[Array, Array], Array],
        has_loops: bool,
    ) -> None:
        self._invariant_row = invariant_row
        self._handed = tuple((t, t.before) for t in loop.taken if t.before is not None)
        self._last = tuple(m for m in loop.made if m.is_last_only)
        self._made = tuple(m for m in loop.made if not m.is_last_only)
        known = [t for t in loop.taken if t.before is None and not _is_constant(t, environment)]
        for storages in merge_overlapping(t.of_turns for t in known):
            pack_together(environment, storages)
        places = {t: tuple(map(environment.slot_or_value, t.of_turns)) for t in known}
        in_rows = {t: rows for t, rows in places.items() if all(isinstance(row, PackedSlot) for row in rows)}
        written = [rows[0].stack for t, rows in in_rows.items() if t.is_written]
        self._passed = {t.name: in_rows[t][0] for t in in_rows if t.is_invariant and has_loops}
        of_turns = [t for t in in_rows if t.name not in self._passed]
        read = [t for t in of_turns if not t.is_invariant or in_rows[t][0].stack in written]
        alone = [t for t in known if t not in read and t.name not in self._passed]
        self._alone = tuple(t for t in alone if t.is_written)
        self._fixed = {t.name: environment.read(t.of_turns[0]) for t in alone if not t.is_written}
        self._outputs = tuple(_allocate_output(made, environment) for made in self._made)
        self._stacks = tuple(dict.fromkeys((*written, *self._outputs)))
        self._reads = tuple(_slices({t.name: in_rows[t] for t in read}))
        made = {
            m.name: tuple(PackedSlot(stack, n) for n in range(len(m.rows) - len(m.of_turns), len(m.rows)))
            for m, stack in zip(self._made, self._outputs, strict=True)
        }
        self._writes = tuple(_slices({t.name: in_rows[t] for t in read if t.is_written} | made))
        self.rows = tuple(np.asarray(cut.first, np.int32) for cut in (*self._reads, *self._writes))
        self.start = (
            [environment.read(t.of_turns[0]) for t in self._alone],
            [environment.read(t.of_turns[0]) for t, _ in self._handed],
            [lax.empty(m.name.shape, m.name.dtype.as_jax()) for m in self._last],
            [stack.array for stack in self._stacks],
        )

    def iteration_values(self, held: Any, rows: Sequence[Array]) -> dict[Tensor, Array | PackedSlot]:
        """Initial storage values of an iteration."""
        alone, handed, _, arrays = held
        now = dict(zip(self._stacks, arrays, strict=True))
        passing = dict.fromkeys((*self._stacks, *(row.stack for row in self._passed.values())))
        self._passing = {stack: stack.with_array(now.get(stack, stack.array)) for stack in passing}
        values: dict[Tensor, Array | PackedSlot] = dict(self._fixed)
        values.update((name, PackedSlot(self._passing[row.stack], row.number)) for name, row in self._passed.items())
        values.update((t.name, value) for t, value in zip(self._alone, alone, strict=True))
        values.update((t.name, value) for (t, _), value in zip(self._handed, handed, strict=True))
        for cut, number in zip(self._reads, rows, strict=False):
            found = cut.read(now.get(cut.stack, cut.stack.array), number)
            is_same = cut.stack.is_given and cut.stack not in now
            values.update((name, self._invariant_row(row, number) if is_same else row) for name, row in found)
        return values

    def next_state(self, held: Any, rows: Sequence[Array], after: Environment) -> Any:
        """The loop-carried state after an iteration."""
        now = {stack: self._passing[stack].array for stack in self._stacks}
        for cut, row in zip(self._writes, rows[len(self._reads) :], strict=True):
            now[cut.stack] = cut.updated(now[cut.stack], row, after)
        return (
            [after.read(t.name) for t in self._alone],
            [after.read(before) for _, before in self._handed],
            [after.read(m.name) for m in self._last],
            [now[stack] for stack in self._stacks],
        )

    def finish(self, held: Any, environment: Environment) -> None:
        """Write the final state to the environment."""
        alone, _, last, arrays = held
        for stack, array in zip(self._stacks, arrays, strict=True):
            stack.array = array
        for taken, value in zip(self._alone, alone, strict=True):
            environment.values[taken.of_turns[0]] = value
        for made, value in zip(self._last, last, strict=True):
            environment.values[made.of_turns[-1]] = value
        for made, stack in zip(self._made, self._outputs, strict=True):
            environment.values.update((t, PackedSlot(stack, n)) for n, t in enumerate(made.rows))


class _Slice(NamedTuple):
    """Adjacent slots, read or written with one slice per iteration.

    Attributes:
        stack: what they are rows of.
        names: the storages that the model has for them, in order.
        first: for each turn the number of the first.
    """

    stack: PackedArray
    names: tuple[Tensor, ...]
    first: tuple[int, ...]

    def read(self, array: Array, row: Array) -> Iterator[tuple[Tensor, Array]]:
        """Slice the values of all storages."""
        count = len(self.names)
        rows = lax.dynamic_slice_in_dim(array, row, count, allow_negative_indices=False)
        return ((name, lax.index_in_dim(rows, n, keepdims=False)) for n, name in enumerate(self.names))

    def updated(self, array: Array, row: Array, after: Environment) -> Array:
        """Update the packed array with an iteration's values."""
        rows = jnp.stack([after.read(name) for name in self.names])
        return lax.dynamic_update_slice_in_dim(array, rows, row, 0, allow_negative_indices=False)


def _slices(places: Mapping[Tensor, Sequence[PackedSlot]]) -> Iterator[_Slice]:
    """Group slots into slices, given each storage's slots by iteration."""
    of_stack: dict[PackedArray, list[Tensor]] = {}
    for name, rows in places.items():
        of_stack.setdefault(rows[0].stack, []).append(name)
    for stack, names in of_stack.items():
        numbers = {name: tuple(row.number for row in places[name]) for name in names}
        is_narrow = names[0].nelms * names[0].dtype.itemsize <= NARROW
        begun: list[Tensor] = []
        for name in sorted(names, key=numbers.__getitem__):
            if begun and not (is_narrow and numbers[name] == tuple(n + 1 for n in numbers[begun[-1]])):
                yield _Slice(stack, tuple(begun), numbers[begun[0]])
                begun = []
            begun.append(name)
        yield _Slice(stack, tuple(begun), numbers[begun[0]])


def _is_constant(taken: LoopInput, environment: Environment) -> bool:
    """Whether an input is an unmodified constant, which is best embedded at its users."""
    is_same = isinstance(taken.name, Constant) and len(set(taken.of_turns)) == 1
    return is_same and not taken.is_written and taken.name not in environment.values


def merge_overlapping(of_turns: Iterable[Sequence[Tensor]]) -> list[tuple[Tensor, ...]]:
    """Merge storage tuples with common elements into groups."""
    found: dict[Tensor, list[Tensor]] = {}
    for storages in of_turns:
        groups = {id(group): group for t in storages if (group := found.get(t)) is not None}
        whole = list(dict.fromkeys([*(t for group in groups.values() for t in group), *storages]))
        found.update(dict.fromkeys(whole, whole))
    return [tuple(group) for group in {id(group): group for group in found.values()}.values()]


def pack_together(environment: Environment, storages: Sequence[Tensor]) -> None:
    """Pack storages into one array, by copies unless they already share one."""
    places = [environment.slot_or_value(t) for t in storages] if len(storages) > 1 else []
    stacks = {place.stack for place in places if isinstance(place, PackedSlot)}
    if len(stacks) > 1 or not all(isinstance(place, PackedSlot) for place in places):
        stack = PackedArray(jnp.stack([load(place) for place in places]))
        environment.values.update((t, PackedSlot(stack, n)) for n, t in enumerate(storages))


def _allocate_output(made: LoopOutput, environment: Environment) -> PackedArray:
    """Allocate a packed array for loop outputs."""
    room = lax.empty((len(made.rows), *made.name.shape), made.name.dtype.as_jax())  # turns fill all of it
    if made.first is not None:
        room = lax.dynamic_update_index_in_dim(room, environment.read(made.first), 0, 0)
    return PackedArray(room)
