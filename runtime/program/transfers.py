"""Transfers of variable values between host and device: replica shards, and array placement."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain

import numpy as np

from popxl.base.arrays import Array
from popxl.core.tensor import Tensor, Variable
from popxl.fp8_utils import to_device, to_host
from popxl.remote_buffer import RemoteBuffer
from popxl.utils import to_numpy
from popxl.values.sharding import shard_layout
from runtime.lowering import remote_buffers as remote
from runtime.program.blocks import VariableBlock
from runtime.program.layout import Layout
from runtime.targets.replicas import DividedReplicas

Part = tuple[int, np.ndarray]
"""A part of the values of a variable on the host: the index of its first element in the flat values, and elements."""

Given = Mapping[Variable, Callable[[int, int], np.ndarray]]
"""Gives new values of variables on the host: the flat elements from one index to another, in the variable's dtype."""

HostValue = tuple[Variable, np.ndarray, np.ndarray | None]
"""A variable, a row for each value of its host copy, and a row for each replica if all replicas are read."""


# To the device --------------------------------------------------------------------------------------------------------


def put_variables(layout: Layout, block: VariableBlock, given: Given) -> Array:
    """Create the device array of a block's variables, from host copies or given values."""
    replicas = layout.compile_options_for(block.tensors[0]).replicas
    if layout.is_elsewhere(block.tensors[0]):
        return replicas.spec(block.shape, block.dtype)
    variables = [layout.resident[t] for t in block.tensors]
    alike = all(_is_alike(layout, t) for t in block.tensors)
    if not alike and not layout.is_replicated(block) and replicas.mesh is not None:
        if any(v in given or v.initial for v in variables):  # each process makes only the rows of its own replicas
            rows = [_rows(v, given) for v in variables]
            return replicas.build_array(
                replicas.shape(block.shape), lambda replica: np.stack([row(replica) for row in rows])
            )
    whole = [_initial_value(v, given) for v in variables]
    if layout.is_replicated(block):
        return replicas.transfer(np.stack(whole) if block.is_packed else whole[0], replicas.sharding(None))
    if alike:
        return replicas.broadcast(np.stack(whole) if block.is_packed else whole[0])
    parts = [_replica_values(layout, t, array, replicas.count) for t, array in zip(block.tensors, whole, strict=True)]
    array = np.stack(parts, 1) if block.is_packed else parts[0]
    return replicas.transfer(array.reshape(replicas.shape(block.shape)), replicas.sharding())


def fill_buffer(layout: Layout, buffer: RemoteBuffer, before: Array | None, given: Given) -> Array:
    """Write variables into remote buffer slots; other slots keep their contents from `before`."""
    options = layout.compile_options_for(buffer)
    if layout.is_elsewhere(buffer):
        return remote.spec(buffer, options.replicas, options.slots)
    rows = {v: _rows(v, given) for v in layout.in_buffers[buffer]}
    return remote.fill_buffer(buffer, rows, options.replicas, options.slots, before)


def _initial_value(v: Variable, given: Given) -> np.ndarray:
    # JAX may keep its argument as the device's memory, even if aliasing is forbidden; so it gets a separate array. Host
    # copies change, and donated memory is overwritten.
    size = math.prod(v.shape_on_host)
    return to_device(given[v](0, size).reshape(v.shape_on_host) if v in given else v.numbers(), v.dtype)


def _rows(v: Variable, given: Given) -> Callable[[int], np.ndarray]:
    """Function from a replica number to its initial elements of a variable."""
    elements = given.get(v, partial(_host_elements, v))
    return partial(shard_layout(v).row, lambda start, stop: to_device(elements(start, stop), v.dtype))


def _is_alike(layout: Layout, t: Tensor) -> bool:
    """Whether a variable's initial value is identical on all replicas."""
    v = layout.resident[t]
    return v.replica_grouping.num_groups == 1 and t is v


def _replica_values(layout: Layout, t: Tensor, array: np.ndarray, count: int) -> np.ndarray:
    """Initial value of a variable on each replica."""
    if _is_alike(layout, t):
        return np.broadcast_to(array, (count, *t.shape))
    return shard_layout(layout.resident[t]).shards_of(array).reshape(count, *t.shape)


# To the host ----------------------------------------------------------------------------------------------------------


def fetch_values(layout: Layout, changing: Sequence[Array | None]) -> list[HostValue]:
    """Fetch values of all changed variables, without writing host copies.

    Args:
        changing: arrays that it changes, including those of its remote buffers; `None` for those of other sessions.
    """
    fetched: list[HostValue] = []
    count = len(layout.changing)
    for block, value in zip(layout.changing, changing[:count], strict=True):
        if value is None:
            continue
        replicas = layout.compile_options_for(block.tensors[0]).replicas
        changed = [t for t in block.tensors if t in layout.changed]
        one_will_do = layout.divided is None and all(
            (v := layout.resident[t]) is t and _is_replicated(v) for t in changed
        )
        array = replicas.fetched_once(value) if one_will_do else _fetched(layout, block.tensors[0], value)
        rows = array.reshape(replicas.count, len(block.tensors), -1)
        for t in changed:
            fetched.append(_host_value(layout, layout.resident[t], rows[:, block.tensors.index(t)]))
    for (buffer, vs), slots in zip(layout.in_buffers.items(), changing[count:], strict=True):
        if vs and buffer in layout.stored_to:
            rows_of = remote.rows_of_slots(buffer, vs, _fetched(layout, buffer, slots), layout.replicas.count)
            fetched += [_host_value(layout, v, array) for v, array in rows_of.items()]
    return fetched


def _fetched(layout: Layout, thing: Tensor | RemoteBuffer, array: Array) -> np.ndarray:
    """Copy an array of all replicas to the host. If several processes run the program, each gets it, also of a stage of
    others."""
    if layout.stages is None:
        return layout.compile_options_for(thing).replicas.fetched(array)
    replicas = layout.replicas if layout.is_elsewhere(thing) else layout.compile_options_for(thing).replicas
    return replicas.fetched(layout.stages.own_copy(array))


def _is_replicated(v: Variable) -> bool:
    """Whether a variable is declared equal on all replicas, with retrieval from a single one."""
    return v.replica_grouping.num_groups == 1 and v.retrieval_mode != "all_replicas"


def _host_value(layout: Layout, v: Variable, array: np.ndarray) -> HostValue:
    """Host value of a variable from its replica values, without padding."""
    if layout.replicas.count == 1 and not v.location_info.isRemote():
        return v, to_host(array, v.dtype).reshape(1, -1), None
    parts, rows = shard_layout(v), array.reshape(layout.replicas.count, -1)
    values = to_host(parts.values(rows), v.dtype)
    if v.retrieval_mode == "all_replicas" and v.replica_grouping.group_size > 1:
        return v, values, to_host(parts.values(rows, all_replicas=True), v.dtype)
    return v, values, None


def write_host_copies(fetched: Iterable[HostValue]) -> dict[Variable, np.ndarray]:
    """Write fetched values to host copies. Returns all-replica values of variables with retrieval mode
    "all_replicas"."""
    of_all_replicas: dict[Variable, np.ndarray] = {}
    for v, values, of_all in fetched:
        if v.initial is not None and values.size == math.prod(v.shape_on_host):
            v.data = np.array(values).reshape(v.shape_on_host)  # the initial value need not be made
        v.data.reshape(len(values), -1)[:, : values.shape[1]] = values
        if of_all is not None:
            whole = v.data.reshape(len(values), -1)[v.replica_grouping.assignment]
            whole[:, : of_all.shape[1]] = of_all
            of_all_replicas[v] = whole.reshape(-1, *v.shape)
    return of_all_replicas


# Each process its part ------------------------------------------------------------------------------------------------


def fetch_local(
    layout: Layout, changing: Sequence[Array], variables: Sequence[Variable]
) -> dict[Variable, np.ndarray] | None:
    """Fetch variable values from this process's first replica, without writing host copies.

    `None`, unless several processes run the program and this one alone has all of the values.
    """
    if layout.divided is None or layout.stages is not None:
        return None
    first = layout.divided.own_replicas[0]
    blocks = zip(layout.changing, changing, strict=False)
    changed = {layout.resident[t]: (t, block, array) for block, array in blocks for t in block.tensors}
    buffers = zip(layout.in_buffers.items(), changing[len(layout.changing) :], strict=True)
    stored = {v: (buffer, array) for (buffer, vs), array in buffers if buffer in layout.stored_to for v in vs}
    elsewhere = {v for v, (t, *_) in changed.items() if v is not t or not _is_replicated(v)}
    elsewhere.update(v for v in stored if v.location_info.isSharded() or not _is_replicated(v))
    if not elsewhere.isdisjoint(variables):
        return None

    def value(v: Variable) -> np.ndarray:
        if v in stored:
            buffer, array = stored[v]
            replicas = layout.compile_options_for(buffer).replicas
            assert isinstance(replicas, DividedReplicas)
            slots = replicas.fetched_here(array, {first})[first]
            return to_host(remote.rows_of_slots(buffer, [v], slots)[v][0], v.dtype).reshape(v.shape)
        if v not in changed:
            return v.data
        t, block, array = changed[v]
        rows = layout.compile_options_for(t).replicas.fetched_once(array)[0].reshape(len(block.tensors), *v.shape)
        return to_host(rows[block.tensors.index(t)], v.dtype)

    return {v: value(v) for v in variables}


def saved_parts(
    layout: Layout, changing: Sequence[Array], variables: Collection[Variable], is_ahead: bool
) -> dict[Variable, list[Part]]:
    """Variable parts first held by replicas of this process, in a multi-process program. Parts of all processes
    together cover each value exactly once. Returns copies.

    Args:
        changing: arrays that it changes, including those of its remote buffers.
        is_ahead: whether the devices have newer values than the host.
    """
    assert layout.divided is not None
    own = layout.divided.own_replicas
    parts = _parts_on_devices(layout, changing, set(variables), set(own)) if is_ahead else {}
    for v in variables:
        buffer = v.location_info.buffer
        if layout.is_elsewhere(v.on_replica if v.piece is not None or buffer is None else buffer):
            parts[v] = []
            continue
        shards = shard_layout(v)
        wanted = [*(shards.without_room if own[0] == 0 else ())]
        if v not in parts:
            wanted += [each for replica, each in shards.first_holders.items() if replica in own]
        parts.setdefault(v, []).extend((start, _host_elements(v, start, stop)) for start, stop in wanted)
    return parts


def _parts_on_devices(
    layout: Layout, changing: Sequence[Array], variables: set[Variable], own: set[int]
) -> dict[Variable, list[Part]]:
    """Variable parts on devices, for variables changed by the program."""
    count = len(layout.changing)
    firsts = {v: shard_layout(v).first_holders for v in variables}
    parts: dict[Variable, list[Part]] = {}

    def fetched(array: Array, thing: Tensor | RemoteBuffer, vs: Iterable[Variable]) -> dict[int, np.ndarray]:
        replicas = layout.compile_options_for(thing).replicas
        assert isinstance(replicas, DividedReplicas)
        return replicas.fetched_here(array, own & set(chain(*(firsts[v] for v in vs))))

    def add_replica(replica: int, rows: Mapping[Variable, np.ndarray]) -> None:
        for v, row in rows.items():
            if replica in firsts[v]:
                start, stop = firsts[v][replica]
                parts[v].append((start, to_host(row[: stop - start], v.dtype)))

    for block, array in zip(layout.changing, changing, strict=False):
        index = {layout.resident[t]: k for k, t in enumerate(block.tensors) if t in layout.changed}
        if layout.is_elsewhere(block.tensors[0]):
            continue
        if vs := variables & index.keys():
            parts |= {v: [] for v in vs}
            for replica, values in fetched(array, block.tensors[0], vs).items():
                rows = values.reshape(len(block.tensors), -1)
                add_replica(replica, {v: rows[index[v]] for v in vs})
    for (buffer, inside), array in zip(layout.in_buffers.items(), changing[count:], strict=True):
        if layout.is_elsewhere(buffer):
            continue
        if buffer in layout.stored_to and (vs := variables & set(inside)):
            parts |= {v: [] for v in vs}
            for replica, slots in fetched(array, buffer, vs).items():
                add_replica(replica, {v: row[0] for v, row in remote.rows_of_slots(buffer, vs, slots).items()})
    return parts


def _host_elements(v: Variable, start: int, stop: int) -> np.ndarray:
    """Copy of a flat element range of a variable's host value."""
    if v.initial is None:
        return np.array(v.data.reshape(-1)[start:stop])
    return to_numpy(v.initial.elements(start, stop), v.dtype)
