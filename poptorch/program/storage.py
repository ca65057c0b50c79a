"""Location of a program's tensors between uses: in the memory of the device or the host, whole or sharded.

`options.TensorLocations` decides for weights, the state of the optimiser and accumulators. Tensors off chip are slots
of remote buffers, one buffer for all tensors of one kind; sharded ones have a shard on each replica. A program works
with the tensors that `Stored` loads and gathers.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from math import prod

import numpy as np

import popxl
from poptorch.settings.locations import TensorLocationSettings, is_off_chip, is_sharded
from popxl import ops
from popxl.tensor import Variable
from popxl_addons.rts import gather_replica_sharded_tensor


@dataclass(frozen=True)
class Stored:
    """Storage location of one tensor.

    Attributes:
        spec: shape and dtype of the whole tensor, on a replica.
        variable: variable for the host; `None` for tensors that last for a run only.
        tensor: the tensor of the main graph; `None` off chip.
        buffer, slot: off chip, the slot.
        group: replicas that have a shard each; `None` for a whole tensor.
    """

    spec: popxl.TensorSpec
    variable: Variable | None = None
    tensor: popxl.Tensor | None = None
    buffer: popxl.RemoteBuffer | None = None
    slot: int = 0
    group: popxl.ReplicaGrouping | None = None

    @property
    def local_spec(self) -> popxl.TensorSpec:
        """Shape and dtype stored by each replica: the whole tensor, or a shard."""
        if self.group is None:
            return self.spec
        size = prod(self.spec.shape) // self.group.group_size
        return popxl.TensorSpec((size,), self.spec.dtype, self.spec.shape)

    @property
    def is_plain(self) -> bool:
        """Whether the whole tensor is in device memory."""
        return self.buffer is None and self.group is None

    def load(self, held: popxl.Tensor | None, after: popxl.Tensor | None = None) -> popxl.Tensor:
        """Load the stored tensor or shard into the current graph.

        Args:
            held: on chip, the stored tensor in the current graph.
            after: tensor that has to be computed before.
        """
        if self.buffer is None:
            assert held is not None
            return held if after is None else ops.available_after(held, after)
        slot = popxl.constant(self.slot, popxl.uint32, "slot")
        return ops.remote_load(self.buffer, slot if after is None else ops.available_after(slot, after))

    def gather(self, t: popxl.Tensor) -> popxl.Tensor:
        """Whole tensor from a loaded one."""
        return t if self.group is None else gather_replica_sharded_tensor(t, replica_group=self.group)

    def store(self, t: popxl.Tensor, held: popxl.Tensor | None) -> None:
        """Overwrite the stored tensor by one of equal layout, possibly `held` itself."""
        if self.buffer is not None:
            ops.remote_store(self.buffer, self.slot, t)
        elif held is not None and t is not held:
            ops.var_updates.copy_var_update_(held, t)

    def load_for_update(self, held: popxl.Tensor | None, group: popxl.ReplicaGrouping | None) -> popxl.Tensor:
        """Load the tensor for an update: whole, or this replica's shard within `group`. Scalars stay whole."""
        t = self.load(held)
        if group is None:
            return self.gather(t)
        return ops.collectives.replica_sharded_slice(t, group) if self.group is None and self.spec.shape else t

    def store_updated(self, t: popxl.Tensor, held: popxl.Tensor | None, group: popxl.ReplicaGrouping | None) -> None:
        """Store an updated tensor from `load_for_update`."""
        if group is None and self.group is not None:
            t = ops.collectives.replica_sharded_slice(t, self.group)
        elif group is not None and self.group is None:
            t = gather_replica_sharded_tensor(t, replica_group=group)
        self.store(t, held)


class Storage:
    """Creator of stored tensors in a program's main graph."""

    def __init__(self, ir: popxl.Ir) -> None:
        self._ir = ir
        self._buffers: dict[Hashable, popxl.RemoteBuffer] = {}

    def variable(
        self,
        name: str,
        value: np.ndarray,
        grouping: popxl.ReplicaGrouping | None,
        location: TensorLocationSettings,
        leaves: bool = False,
    ) -> Stored:
        """Create a variable.

        Args:
            name, value, grouping: as for the variable.
            location: location of the variable.
            leaves: whether it is off chip if `location` does not decide.
        """
        shape = value.shape[1:] if grouping is not None and grouping.num_groups > 1 else value.shape
        spec = popxl.TensorSpec(shape, popxl.dtype.as_dtype(value))
        group = self._shard_group(spec, grouping, location)
        off_chip = is_off_chip(location, prod(shape), leaves)
        if not off_chip and group is None:
            v = popxl.variable(value, name=name, replica_grouping=grouping)
            return Stored(spec, v, v)
        if not off_chip:
            v, piece = popxl.replica_sharded_variable(value, name=name, replica_grouping=grouping)
            return Stored(spec, v, piece, group=group)
        buffer, slot = self._slot(spec, group)
        make = popxl.remote_variable if group is None else popxl.remote_replica_sharded_variable
        v = make(value, buffer, slot, name=name, replica_grouping=grouping)
        return Stored(spec, v, None, buffer, slot, group)

    def accumulator(
        self, spec: popxl.TensorSpec, grouping: popxl.ReplicaGrouping | None, location: TensorLocationSettings
    ) -> Stored:
        """Create a gradient accumulator, off chip or in the current graph."""
        group = self._shard_group(spec, grouping, location)
        if not is_off_chip(location, prod(spec.shape)):
            return Stored(spec, group=group)
        return Stored(spec, None, None, *self._slot(spec, group), group)

    def _shard_group(
        self, spec: popxl.TensorSpec, grouping: popxl.ReplicaGrouping | None, location: TensorLocationSettings
    ) -> popxl.ReplicaGrouping | None:
        """Replica group that shards a tensor; `None` for whole tensors."""
        group = grouping or self._ir.replica_grouping()
        return group if is_sharded(location, prod(spec.shape), group.group_size) else None

    def _slot(self, spec: popxl.TensorSpec, group: popxl.ReplicaGrouping | None) -> tuple[popxl.RemoteBuffer, int]:
        """Next free slot of the buffer for a shape, dtype and shard count."""
        pieces = 1 if group is None else group.group_size
        key = (spec.shape, spec.dtype, pieces)
        if key in self._buffers:
            self._buffers[key].entries += 1
        elif group is None:
            self._buffers[key] = popxl.remote_buffer(spec.shape, spec.dtype)
        else:
            self._buffers[key] = buffer = popxl.remote_buffer((prod(spec.shape) // pieces,), spec.dtype)
            buffer.meta_shape, buffer.shard_over = spec.shape, pieces
        return self._buffers[key], self._buffers[key].entries - 1
