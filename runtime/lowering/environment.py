"""The environment of a running graph: one value per storage. Views are read from their base and written through to it,
so in-place ops and views need no special handling. No other file depends on arrays being immutable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from popxl.base.arrays import Array
from popxl.core.aliasing import bases_first, by_reference, view_of, written_inputs
from popxl.core.recording import Op
from popxl.core.tensor import Constant, Tensor
from popxl.errors import PopxlError
from popxl.fp8_utils import to_device
from popxl.graph import Graph
from runtime.lowering.packed_arrays import PackedSlot, load
from runtime.lowering.platform_hooks import UpdateOrder
from runtime.lowering.sharing import Sharing


@dataclass(frozen=True)
class Results:
    """Results of a graph.

    Attributes:
        modified: final values of modified inputs, by position.
        modified_storages: final values of modified storages that several inputs share.
        computed: the last results computed from inputs, by position; empty for noinline calls.
    """

    outputs: tuple[Any, ...]
    modified: dict[int, Any]
    modified_storages: dict[Tensor, Array] = field(default_factory=dict)
    computed: dict[int, Array] = field(default_factory=dict)

    def unpacked(self) -> Results:
        """The results with all packed slots loaded."""
        modified = {i: load(value) for i, value in self.modified.items()}
        return Results(tuple(map(load, self.outputs)), modified, self.modified_storages, self.computed)


class Environment:
    """The environment of a running graph: for each storage, its current value or packed slot.

    Args:
        aliases: tensors, and the tensors that hold their values.
        iterations: number of iterations of rerolled loops around the graph; a value may be one of as many slots.
    """

    def __init__(
        self,
        values: Mapping[Tensor, Array | PackedSlot],
        order: UpdateOrder,
        aliases: Mapping[Tensor, Tensor],
        iterations: int,
    ) -> None:
        self.values = dict(values)
        self._order = order
        self._aliases = aliases
        self._iterations = iterations

    def record_reads(self, op: Op) -> None:
        """Record the operands that an op has read: in-place updates of them come after its result."""
        result = next((t for t in op.outputs if t in self.values), None)
        if result is not None:  # for example, not a view
            for t in op.inputs:
                self._order.record_read(self._resolve_views(t)[0], result, self.value_of(result))

    def record_call_reads(self, op: Op, results: Results) -> None:
        """Record the inputs that a called graph has read."""
        for i, computed in results.computed.items():
            self._order.record_nested_read(self._resolve_views(op.inputs[i])[0], computed)

    def slot_or_value(self, t: Tensor) -> Array | PackedSlot:
        """The packed slot of a tensor, if a slot holds exactly this tensor; otherwise its current value."""
        storage, views = self._resolve_views(t)
        held_value = None if views else self.values.get(storage)
        return held_value if isinstance(held_value, PackedSlot) else self.value_of(t)

    def sharing(self, op: Op) -> Sharing:
        """Find by-reference inputs of a called graph that share storage."""
        (run,) = op.runs
        by_ref = by_reference(op)
        storages = {i: self._storages(op.inputs[i]) for i in by_ref} if len(by_ref) > 1 else {}
        users: dict[Tensor, set[int]] = {}
        for i, of_input in storages.items():
            for storage in of_input:
                users.setdefault(storage, set()).add(i)
        groups = [group for group in users.values() if len(group) > 1 and not group.isdisjoint(op.modified)]
        positions = frozenset[int]().union(*groups)
        if not positions:
            return Sharing()
        caller_tensors = {run.inputs[i]: op.inputs[i] for i in sorted(positions)}
        shared_storages = dict.fromkeys(storage for i in sorted(positions) for storage in storages[i])
        modified = dict.fromkeys(storage for i in sorted(positions & op.modified) for storage in storages[i])
        values = {storage: self.value_of(storage) for storage in shared_storages}
        return Sharing(positions, {**self._aliases, **caller_tensors}, values, tuple(modified))

    def results(self, graph: Graph, values: Container[Tensor], sharing: Sharing) -> Results:
        """Collect the results of a graph after its last op.

        Args:
            sharing: inputs of the graph that share storage.
        """
        count = Counter(t.origin for t in graph.outputs)
        own = [t.origin not in values and count[t.origin] == 1 for t in graph.outputs]
        return Results(
            tuple((self.slot_or_value if o else self.value_of)(t) for t, o in zip(graph.outputs, own, strict=True)),
            {i: self.slot_or_value(t) for i in written_inputs(graph) if (t := graph.inputs[i]) in values},
            {storage: self.value_of(storage) for storage in sharing.modified},
            self._order.last_computed(graph.inputs),
        )

    def _storages(self, t: Tensor) -> tuple[Tensor, ...]:
        """All storages under a tensor, through views."""
        storages: dict[Tensor, None] = {}
        waiting = [t]
        while waiting:
            storage, _ = self._resolve_views(waiting.pop())
            concatenation = view_of(storage)
            if concatenation is None:
                storages[storage] = None
            else:
                waiting += reversed(concatenation.inputs)
        return tuple(storages)

    def value_of(self, t: Tensor) -> Array:
        """Read the current value of a tensor, through views of its storage."""
        storage, views = self._resolve_views(t)
        value = self._storage(storage)
        for view in views:
            value = view.apply([value])
        return value

    def define(self, t: Tensor, value: Array | PackedSlot) -> None:
        """Define a new tensor: a value, or a packed slot without another user."""
        if isinstance(value, PackedSlot):
            self.values[t] = value
        else:
            self.write(t, value)

    def replace_equal(self, t: Tensor, value: Array) -> None:
        """Replace a tensor's value by an equal one for later ops, unless it is a view or in a packed slot."""
        storage, views = self._resolve_views(t)
        if not views and view_of(storage) is None and not isinstance(self.values.get(storage), PackedSlot):
            self.values[storage] = value

    def replace_value(self, before: Array, after: Array) -> None:
        """Replace `before` by an equal value for later ops."""
        for storage in [storage for storage, value in self.values.items() if value is before]:
            self.values[storage] = after

    def write(self, t: Tensor, value: Array) -> None:
        """Write a tensor: its storage, or the viewed part of a storage."""
        changes: list[tuple[Tensor, Array, Array | None]] = [(t, value, None)]
        while changes:
            t, value, mask = changes.pop()
            if mask is not None:
                value = jnp.where(mask, value, self.value_of(t))
            storage, views = self._resolve_views(t)
            bases = [self._storage(storage)] if views else []
            for view in views[:-1]:
                bases.append(view.apply([bases[-1]]))
            for view, base in zip(reversed(views), reversed(bases), strict=True):
                (value,) = view.put([base], value)
            concatenation = view_of(storage)
            if concatenation is None:
                slot = self.values.get(storage)
                rows = len(slot.packed.array) if isinstance(slot, PackedSlot) else self._iterations
                value = self._order.order_write(storage, value, rows)
                if isinstance(slot, PackedSlot):
                    slot.write(value)
                else:
                    self.values[storage] = value
            else:
                current = [self.value_of(base) for base in concatenation.inputs]
                pieces_written = concatenation.put(current, value)
                masks: Sequence[Array | None] = [None] * len(pieces_written)
                if (views or mask is not None) and self._may_overlap(concatenation.inputs):
                    masks = self._write_masks(concatenation, views, bases, t, mask)
                changes += reversed(list(zip(concatenation.inputs, pieces_written, masks, strict=True)))

    def _may_overlap(self, ts: Iterable[Tensor]) -> bool:
        """Whether some of these tensors share storage."""
        storages = [storage for t in ts for storage in self._storages(t)]
        return len(set(storages)) < len(storages)

    def _write_masks(
        self, concatenation: Op, views: Sequence[Op], bases: Sequence[Array], t: Tensor, outer_mask: Array | None
    ) -> Sequence[Array]:
        """Masks of elements changed by a write to a view, for each concatenated tensor: another of them may hold the
        new value of an unchanged element."""
        mask = jnp.ones(t.shape, bool) if outer_mask is None else outer_mask
        for view, base in zip(reversed(views), reversed(bases), strict=True):
            (mask,) = view.put([jnp.zeros(base.shape, bool)], mask)
        return concatenation.put([jnp.zeros(base.shape, bool) for base in concatenation.inputs], mask)

    def _storage(self, t: Tensor) -> Array:
        """Value of a storage, or of a view across several tensors."""
        if view_of(t) is not None:
            joined_values: dict[Tensor, Array] = {}
            for each in bases_first(t, joined_values, self._concatenations_below):
                joined_values[each] = self._concatenated(each, joined_values)
            return joined_values[t]
        if t not in self.values:
            if not isinstance(t, Constant):
                raise no_value(t)
            self.values[t] = jnp.asarray(to_device(t.data, t.dtype))
        return load(self.values[t])

    def _resolve_views(self, t: Tensor) -> tuple[Tensor, list[Op]]:
        """Resolve single-base views: the storage under a tensor, and the views between them, innermost first."""
        views = []
        t = t.origin
        while True:
            view = view_of(t)
            if t in self._aliases:
                t = self._aliases[t].origin
            elif view is not None and len(view.inputs) == 1:
                views.append(view)
                t = view.inputs[0].origin
            else:
                return t, views[::-1]

    def _concatenations_below(self, t: Tensor) -> list[Tensor]:
        """Views of several tensors among the bases of such a view."""
        view = view_of(t)
        bases = () if view is None else view.inputs
        return [storage for base in bases if view_of(storage := self._resolve_views(base)[0]) is not None]

    def _concatenated(self, t: Tensor, values: Mapping[Tensor, Array]) -> Array:
        """Value of a view of several tensors; `values` has values of nested such views."""
        op, operands = view_of(t), []
        assert op is not None
        for base in op.inputs:
            storage, views = self._resolve_views(base)
            operand = values[storage] if storage in values else self._storage(storage)
            for view in views:
                operand = view.apply([operand])
            operands.append(operand)
        return op.apply(operands)


def no_value(t: Tensor) -> PopxlError:
    """The error for a storage without a value."""
    return PopxlError(
        f"Session: {t!r} has no value. It is an input of {t.graph.title}, which nothing is bound to. Make it by "
        "`popxl.variable`; or, if a layer reads it, call a graph of the layer, which `create_graph` makes, with "
        "variables bound to its inputs."
    )
