"""Location of optimizer state between steps: variables on the device, or slots of remote buffers."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import popxl
from popxl import ops
from popxl.context import get_current_context
from popxl.extend.memory import StateLocation, is_on_host
from popxl.tensor import Variable
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.remote import create_remote_buffer
from popxl_addons.variable_factory import VariableFactory

_location: ContextVar[StateLocation] = ContextVar("optimizer_state_location", default="device")


@contextmanager
def state_on(location: StateLocation) -> Iterator[None]:
    """Context manager for the location of the state of optimizers that are called in it.

    On the `"host"`, variables of the state are slots of remote buffers. The update of a variable loads what belongs to
    it, and stores it back. Numbers that all variables share, such as the count of steps, stay on the device.

    Example:
        >>> from popxl_addons import optimizers
        >>> with popxl.Ir().main_graph as main, optimizers.state_on("host"):
        ...     w, dw = popxl.variable([1.0, 2.0], name="w"), popxl.constant([0.5, 0.25])
        ...     state = optimizers.sgd([w], [dw], lr=0.1, momentum=0.9)
        >>> state.w.velocity.location_info.buffer is not None
        True
    """
    token = _location.set(location)
    try:
        yield
    finally:
        _location.reset(token)


def check_on_host(state: NamedTensors) -> None:
    """`ValueError` for state of an optimizer that stays on the device, except for scalars."""
    if left := [
        name for name, v in state.to_dict().items() if isinstance(v, Variable) and v.shape and not is_on_host(v)
    ]:
        raise ValueError(
            f"train_step: `optimizer_state` is 'host', and the optimiser leaves {left} on the device. Use one of "
            "`popxl_addons.optimizers`, or optimizer_state='device'."
        )


class StateStorage:
    """State of one optimizer: its variables, and what an update reads and overwrites in their place."""

    def __init__(self) -> None:
        self._is_on_host = _location.get() == "host"
        self._buffers: dict[Hashable, popxl.RemoteBuffer] = {}
        self._loaded: list[tuple[popxl.RemoteBuffer, int, popxl.Tensor]] = []

    def create(self, factory: VariableFactory, after: popxl.Tensor | None = None) -> tuple[Variable, popxl.Tensor]:
        """Create a variable, and load it if it is on the host.

        Args:
            factory: of the variable.
            after: tensor that a load waits for.

        Returns:
            The variable, and the tensor for an update.
        """
        if not self._is_on_host:
            v = factory.create_tensor()
            return v, v.on_replica
        buffer = self._buffer_for(factory)
        entry = buffer.entries - 1
        v = factory.create_remote_tensor(buffer, entry)
        slot = popxl.constant(entry, popxl.uint32, "slot")
        t = ops.remote_load(buffer, slot if after is None else ops.available_after(slot, after))
        self._loaded.append((buffer, entry, t))
        return v, t

    def store(self) -> None:
        """Store what was loaded, and updated since."""
        for buffer, entry, t in self._loaded:
            ops.remote_store(buffer, entry, t)
        self._loaded.clear()

    def _buffer_for(self, factory: VariableFactory) -> popxl.RemoteBuffer:
        """Buffer whose last slot is free: one for all variables of equal shards on one IPU, and of equal groups of
        replicas: checks treat the slots of a buffer as equally distributed."""
        spec = factory.spec
        groups = tuple(factory.replica_grouping.assignment)
        key = (spec.shape, spec.meta_shape, spec.dtype, groups, get_current_context().ipu_id)
        if key in self._buffers:
            self._buffers[key].entries += 1
        else:
            self._buffers[key] = create_remote_buffer(spec, shard_over=1)
        return self._buffers[key]
