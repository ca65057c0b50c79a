"""Transfers of variable values between host and device: replica shards, and array placement."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import NamedTuple

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
"""Part of a variable's host values: index of its first element in the flat values, and elements."""

NewValues = Mapping[Variable, Callable[[int, int], np.ndarray]]
"""New values of variables, as functions: the flat elements from one index to another, in the variable's dtype."""

HostValue = tuple[Variable, np.ndarray, np.ndarray | None]
"""Fetched variable: the variable, a row for each value of its host copy, and a row for each replica if all replicas are
read."""


# To the device --------------------------------------------------------------------------------------------------------


def put_variables(layout: Layout, block: VariableBlock, new_values: NewValues) -> Array:
    """Create the device array of a block's variables, from host copies or given values."""
    replicas = layout.compile_options_for(block.tensors[0]).replicas
    if layout.is_elsewhere(block.tensors[0]):
        return replicas.spec(block.shape, block.dtype)
    variables = [layout.resident[t] for t in block.tensors]
    alike = all(_is_alike(layout, t) for t in block.tensors)
    if not alike and not layout.is_replicated(block) and replicas.mesh is not None:
        if any(v in new_values or v.initial for v in variables):  # each process makes only the rows of its own replicas
            rows = [_rows(v, new_values) for v in variables]
            return replicas.build_array(
                replicas.shape(block.shape), lambda replica: np.stack([row(replica) for row in rows])
            )
    arrays = [_initial_value(v, new_values) for v in variables]
    if layout.is_replicated(block):
        return replicas.transfer(np.stack(arrays) if block.is_packed else arrays[0], replicas.sharding(None))
    if alike:
        return replicas.broadcast(np.stack(arrays) if block.is_packed else arrays[0])
    stacks = [_replica_values(layout, t, array, replicas.count) for t, array in zip(block.tensors, arrays, strict=True)]
    array = np.stack(stacks, 1) if block.is_packed else stacks[0]
    return replicas.transfer(array.reshape(replicas.shape(block.shape)), replicas.sharding())


def fill_buffer(layout: Layout, buffer: RemoteBuffer, before: Array | None, new_values: NewValues) -> Array:
    """Write variables into remote buffer slots; other slots keep their contents from `before`."""
    options = layout.compile_options_for(buffer)
    if layout.is_elsewhere(buffer):
        return remote.spec(buffer, options.replicas, options.slots)
    rows = {v: _rows(v, new_values) for v in layout.in_buffers[buffer]}
    return remote.fill_buffer(buffer, rows, options.replicas, options.slots, before)


def _initial_value(v: Variable, new_values: NewValues) -> np.ndarray:
    # JAX may keep its argument as the device's memory, even if aliasing is forbidden; so it gets a separate array. Host
    # copies change, and donated memory is overwritten.
    size = math.prod(v.shape_on_host)
    return to_device(new_values[v](0, size).reshape(v.shape_on_host) if v in new_values else v.numbers(), v.dtype)


def _rows(v: Variable, new_values: NewValues) -> Callable[[int], np.ndarray]:
    """Function from a replica number to its initial elements of a variable."""
    elements = new_values.get(v, partial(_host_elements, v))
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


class _ChangedArray(NamedTuple):
    """Array that runs change, with variables in it.

    Attributes:
        owner: what it is an array of: a remote buffer, or the first variable of a block.
        variables: those that runs change.
        rows: function that returns rows of some of these variables, one for each replica, from the array on the host,
            and a number of replicas.
    """

    owner: Tensor | RemoteBuffer
    array: Array | None
    variables: tuple[Variable, ...]
    rows: Callable[[Collection[Variable], np.ndarray, int], Mapping[Variable, np.ndarray]]


def _changed_arrays(layout: Layout, changing: Sequence[Array | None]) -> Iterator[_ChangedArray]:
    """Arrays of blocks and remote buffers that a program changes."""
    count = len(layout.changing)
    for block, array in zip(layout.changing, changing[:count], strict=True):
        changed = tuple(layout.resident[t] for t in block.tensors if t in layout.changed)
        yield _ChangedArray(block.tensors[0], array, changed, partial(_rows_of_block, block))
    for (buffer, vs), array in zip(layout.in_buffers.items(), changing[count:], strict=True):
        if buffer in layout.stored_to:
            yield _ChangedArray(buffer, array, vs, partial(remote.rows_of_slots, buffer))


def _rows_of_block(
    block: VariableBlock, variables: Collection[Variable], array: np.ndarray, count: int
) -> dict[Variable, np.ndarray]:
    rows = array.reshape(count, len(block.tensors), -1)
    return {v: rows[:, block.tensors.index(v.on_replica)] for v in variables}


def fetch_values(layout: Layout, changing: Sequence[Array | None]) -> list[HostValue]:
    """Fetch values of all changed variables, without writing host copies.

    Args:
        changing: arrays that it changes, including those of its remote buffers; `None` for those of other sessions.
    """
    fetched: list[HostValue] = []
    for owner, array, variables, rows_of in _changed_arrays(layout, changing):
        if array is None or not variables:
            continue
        replicas = layout.compile_options_for(owner).replicas
        is_uniform = layout.divided is None and not isinstance(owner, RemoteBuffer) and all(map(_is_equal, variables))
        on_host = replicas.fetched_once(array) if is_uniform else _fetched(layout, owner, array)
        fetched += [_host_value(layout, v, row) for v, row in rows_of(variables, on_host, replicas.count).items()]
    return fetched


def _fetched(layout: Layout, owner: Tensor | RemoteBuffer, array: Array) -> np.ndarray:
    """Copy an array of all replicas to the host. In a multi-process program every process gets it, including arrays of
    other processes' stages."""
    if layout.stages is None:
        return layout.compile_options_for(owner).replicas.fetched(array)
    replicas = layout.replicas if layout.is_elsewhere(owner) else layout.compile_options_for(owner).replicas
    return replicas.fetched(layout.stages.own_copy(array))


def _is_equal(v: Variable) -> bool:
    """Whether a variable is declared equal and whole on all replicas, with retrieval from a single one."""
    is_sharded = v.piece is not None or v.location_info.isSharded()
    return v.replica_grouping.num_groups == 1 and v.retrieval_mode != "all_replicas" and not is_sharded


def _host_value(layout: Layout, v: Variable, array: np.ndarray) -> HostValue:
    """Host value of a variable from its replica values, without padding."""
    if layout.replicas.count == 1 and not v.location_info.isRemote():
        return v, to_host(array, v.dtype).reshape(1, -1), None
    layout_of_shards, rows = shard_layout(v), array.reshape(layout.replicas.count, -1)
    values = to_host(layout_of_shards.values(rows), v.dtype)
    if v.retrieval_mode == "all_replicas" and v.replica_grouping.group_size > 1:
        return v, values, to_host(layout_of_shards.values(rows, all_replicas=True), v.dtype)
    return v, values, None


def write_host_copies(fetched: Iterable[HostValue]) -> dict[Variable, np.ndarray]:
    """Write fetched values to host copies. Returns all-replica values of variables with retrieval mode
    "all_replicas"."""
    of_all_replicas: dict[Variable, np.ndarray] = {}
    for v, values, replica_values in fetched:
        if v.initial is not None and values.size == math.prod(v.shape_on_host):
            v.data = np.array(values).reshape(v.shape_on_host)  # the initial value need not be made
        v.data.reshape(len(values), -1)[:, : values.shape[1]] = values
        if replica_values is not None:
            target = v.data.reshape(len(values), -1)[v.replica_grouping.assignment]
            target[:, : replica_values.shape[1]] = replica_values
            of_all_replicas[v] = target.reshape(-1, *v.shape)
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
    changed = {v: each for each in _changed_arrays(layout, changing) for v in each.variables}
    if not all(map(_is_equal, changed.keys() & {*variables})):
        return None

    def value(v: Variable) -> np.ndarray:
        if v not in changed:
            return v.data
        owner, array, _, rows_of = changed[v]
        replicas = layout.compile_options_for(owner).replicas
        assert isinstance(replicas, DividedReplicas)
        rows = rows_of([v], replicas.fetched_here(array, {first})[first], 1)
        return to_host(rows[v][0], v.dtype).reshape(v.shape)

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
        wanted = [*(shards.unstored_ranges if own[0] == 0 else ())]
        if v not in parts:
            wanted += [each for replica, each in shards.first_holders.items() if replica in own]
        parts.setdefault(v, []).extend((start, _host_elements(v, start, stop)) for start, stop in wanted)
    return parts


def _parts_on_devices(
    layout: Layout, changing: Sequence[Array], variables: set[Variable], own: set[int]
) -> dict[Variable, list[Part]]:
    """Variable parts on devices, for variables changed by the program."""
    parts: dict[Variable, list[Part]] = {}
    for owner, array, changed, rows_of in _changed_arrays(layout, changing):
        if not (vs := variables.intersection(changed)) or layout.is_elsewhere(owner):
            continue
        firsts = {v: shard_layout(v).first_holders for v in vs}
        replicas = layout.compile_options_for(owner).replicas
        assert isinstance(replicas, DividedReplicas)
        parts |= {v: [] for v in vs}
        for replica, values in replicas.fetched_here(array, own.intersection(chain(*firsts.values()))).items():
            for v, (row,) in rows_of(vs, values, 1).items():
                if replica in firsts[v]:
                    start, stop = firsts[v][replica]
                    parts[v].append((start, to_host(row[: stop - start], v.dtype)))
    return parts


def _host_elements(v: Variable, start: int, stop: int) -> np.ndarray:
    """Copy of a flat element range of a variable's host value."""
    if v.initial is None:
        return np.array(v.data.reshape(-1)[start:stop])
    return to_numpy(v.initial.elements(start, stop), v.dtype)
