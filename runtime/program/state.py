"""What a session holds on its device: the values of variables, and the slots of remote buffers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from popxl.core.tensor import Tensor, Variable
from popxl.errors import PopxlRuntimeError
from popxl.fp8_utils import to_device, to_host
from popxl.remote_buffer import RemoteBuffer
from popxl.utils import to_numpy
from popxl.values.sharding import parts_of
from runtime.interrupts import uninterrupted
from runtime.lowering import remote_buffers as remote
from runtime.program.blocks import Block
from runtime.program.layout import Layout

Array = Any

_Taken = tuple[Variable, np.ndarray, np.ndarray | None]


class State:
    """The arrays that a program keeps on its device from run to run.

    Args:
        layout: where they lie.

    Attributes:
        changing: the variables that the program changes, and its remote buffers. A run gives them up, and puts new ones
            here. `None`, if there are none: they have not been uploaded, or a run that failed has lost them.
        constant: the variables that it only reads.
        is_loaded: whether the variables are on the device.
        values_of_all: the values on all replicas of the variables that are read from all, as they were when they were
            last copied to the host.
        begun: of a program over several processes: how many runs this one has begun.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.changing: tuple[Array, ...] | None = None
        self.constant: tuple[Array, ...] = ()
        self.is_loaded = False
        self.values_of_all: dict[Variable, np.ndarray] = {}
        self.begun = 0

    def present(self) -> tuple[Array, ...]:
        """What changes. `PopxlRuntimeError` if it is lost."""
        if self.changing is None:
            raise PopxlRuntimeError(
                "Session: the values of the variables on the device were lost when a run failed. Upload the host "
                "copies again with `session.weights_from_host()`."
            )
        return self.changing

    def release(self) -> None:
        """Free the device memory of the variables."""
        self.changing, self.constant = None, ()
        self.is_loaded = False

    # To the device --------------------------------------------------------------------------------------------------

    def upload(self) -> None:
        """Copy the host values of all variables to the device. Slots of buffers that no variable fills stay."""
        layout = self._layout
        slots = [None] * len(layout.buffers) if self.changing is None else self.changing[len(layout.changing) :]
        buffers = zip(layout.in_buffers.items(), slots, strict=True)
        layout.replicas.meet("Session.weights_from_host", self.begun)
        with layout.precision():
            changing = (
                *map(self._put, layout.changing),
                *(self._filled(buffer, vs, before) for (buffer, vs), before in buffers),
            )
            constant = tuple(map(self._put, layout.constant))
        self.changing, self.constant, self.is_loaded = changing, constant, True  # no signal comes between

    def _filled(self, buffer: RemoteBuffer, variables: Sequence[Variable], before: Array | None) -> Array:
        terms = self._layout.terms_for(buffer)
        return remote.filled(buffer, variables, terms.replicas, terms.slots, before)

    def _put(self, block: Block) -> Array:
        layout = self._layout
        replicas = layout.terms_for(block.tensors[0]).replicas
        alike = layout.is_shared(block) or all(map(self._is_alike, block.tensors))
        if not alike and replicas.mesh is not None and any(layout.held[t].initial for t in block.tensors):
            rows = [self._rows(t) for t in block.tensors]  # nobody makes what other processes have
            return replicas.made(
                replicas.shape(block.shape),
                lambda replica: np.stack([row(replica) for row in rows]).reshape(block.shape),
            )
        whole = [self._whole(t) for t in block.tensors]
        if layout.is_shared(block):
            return replicas.place(np.stack(whole) if block.is_stack else whole[0], replicas.sharding(None))
        if all(map(self._is_alike, block.tensors)):
            return replicas.put(np.stack(whole) if block.is_stack else whole[0])
        parts = [self._parts(t, array, replicas.count) for t, array in zip(block.tensors, whole, strict=True)]
        array = np.stack(parts, 1) if block.is_stack else parts[0]
        return replicas.place(array.reshape(replicas.shape(block.shape)), replicas.sharding())

    def _whole(self, t: Tensor) -> np.ndarray:
        # JAX may keep the array that it is given as the device's memory, whatever it is told about aliasing; so it gets
        # one of its own. Host copies change, and donated memory is overwritten.
        v = self._layout.held[t]
        return to_device(v.numbers(), v.dtype)

    def _rows(self, t: Tensor) -> Callable[[int], np.ndarray]:
        """What gives the numbers that a replica has of a variable at first."""
        v, initial = self._layout.held[t], self._layout.held[t].initial

        def elements(start: int, stop: int) -> np.ndarray:
            if initial is None:
                return to_device(v.data.reshape(-1)[start:stop], v.dtype)
            return to_device(to_numpy(initial.elements(start, stop), v.dtype), v.dtype)

        return partial(parts_of(v).row, elements)

    def _is_alike(self, t: Tensor) -> bool:
        """Whether all replicas have the same of a variable at first."""
        v = self._layout.held[t]
        return v.replica_grouping.num_groups == 1 and t is v

    def _parts(self, t: Tensor, array: np.ndarray, count: int) -> np.ndarray:
        """What each replica has of a variable at first."""
        if self._is_alike(t):
            return np.broadcast_to(array, (count, *t.shape))
        return parts_of(self._layout.held[t]).of(array).reshape(count, *t.shape)

    # To the host ----------------------------------------------------------------------------------------------------

    def download(self) -> None:
        """Copy the values of all variables that the program changes from the device to the host."""
        layout, count = self._layout, len(self._layout.changing)
        if layout.changed or layout.stored_to:
            layout.replicas.meet("Session.weights_to_host", self.begun)
        taken: list[_Taken] = []
        with layout.precision():
            for block, value in zip(layout.changing, self.present()[:count], strict=True):
                replicas = layout.terms_for(block.tensors[0]).replicas
                changed = [t for t in block.tensors if t in layout.changed]
                one_will_do = all(map(self._is_one, changed)) and layout.divided is None
                fetched = replicas.fetched_once(value) if one_will_do else replicas.fetched(value)
                rows = fetched.reshape(replicas.count, len(block.tensors), -1)
                for t in changed:
                    taken.append(self._taken_from(layout.held[t], rows[:, block.tensors.index(t)]))
            for (buffer, vs), slots in zip(layout.in_buffers.items(), self.present()[count:], strict=True):
                if vs and buffer in layout.stored_to:
                    for v, array in remote.parts_in(buffer, vs, layout.terms_for(buffer).replicas, slots).items():
                        taken.append(self._taken_from(v, array))
        uninterrupted(lambda: self._take(taken))  # the host copies of all variables are of one moment

    def _is_one(self, t: Tensor) -> bool:
        """Whether what holds a variable is declared to be the same on all replicas, and its value is asked for once."""
        v = self._layout.held[t]
        return v is t and v.replica_grouping.num_groups == 1 and v.retrieval_mode != "all_replicas"

    def read_here(self, variables: Sequence[Variable]) -> dict[Variable, np.ndarray] | None:
        """Values of variables as the first replica of this process has them. Host copies stay as they are.

        `None`, unless several processes run the program and none but this one is needed for it.
        """
        layout = self._layout
        if layout.divided is None:
            return None
        blocks = zip(layout.changing, self.present(), strict=False)
        changed = {layout.held[t]: (t, block, array) for block, array in blocks for t in block.tensors}
        elsewhere = {v for v, (t, *_) in changed.items() if not self._is_one(t)}
        elsewhere.update(v for b in layout.stored_to for v in layout.in_buffers[b])
        if not elsewhere.isdisjoint(variables):
            return None

        def value(v: Variable) -> np.ndarray:
            if v not in changed:
                return v.data
            t, block, array = changed[v]
            rows = layout.terms_for(t).replicas.fetched_once(array)[0].reshape(len(block.tensors), *v.shape)
            return to_host(rows[block.tensors.index(t)], v.dtype)

        with layout.precision():
            return {v: value(v) for v in variables}

    def _taken_from(self, v: Variable, array: np.ndarray) -> _Taken:
        """What the replicas hold of a variable: its host copy to be, and the values on all replicas if these are
        wanted. Elements that they have no room for are left out."""
        if self._layout.replicas.count == 1 and not v.location_info.isRemote():
            return v, to_host(array, v.dtype).reshape(1, -1), None
        parts, rows = parts_of(v), array.reshape(self._layout.replicas.count, -1)
        values = to_host(parts.values(rows), v.dtype)
        if v.retrieval_mode == "all_replicas" and v.replica_grouping.group_size > 1:
            return v, values, to_host(parts.values(rows, all_replicas=True), v.dtype)
        return v, values, None

    def _take(self, taken: Iterable[_Taken]) -> None:
        """Make what the replicas hold of variables their host copies."""
        for v, values, of_all in taken:
            if v.initial is not None and values.size == math.prod(v.shape_on_host):
                v.data = np.array(values).reshape(v.shape_on_host)  # nobody needs what it began with
            v.data.reshape(len(values), -1)[:, : values.shape[1]] = values
            if of_all is not None:
                whole = v.data.reshape(len(values), -1)[v.replica_grouping.assignment]
                whole[:, : of_all.shape[1]] = of_all
                self.values_of_all[v] = whole.reshape(-1, *v.shape)
