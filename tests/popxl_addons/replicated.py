"""Programs of several replicas: who talks to whom, what each of them has, and what each of them gets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons.patterns import apply_pre_alias_patterns
from runtime.targets.devices import Device
from tests.devices import a_device_each, one_device

Array = np.ndarray
Devices = Callable[[int], Device]


both_ways = pytest.mark.parametrize("device", [one_device, a_device_each], ids=["one device", "a device each"])

GROUPINGS = {
    "4 of 4": (4, 1, 4),
    "2 next to each other of 4": (4, 1, 2),
    "2 apart of 4": (4, 2, 2),
    "8 of 8": (8, 1, 8),
    "2 apart of 8": (8, 2, 4),
}
"""Replicas, stride, and size of the groups."""

each_grouping = pytest.mark.parametrize(("count", "stride", "size"), GROUPINGS.values(), ids=GROUPINGS)


def groups_of(count: int, stride: int, size: int) -> list[list[int]]:
    """The replicas of each group."""
    block = stride * size
    return [[start + i + k * stride for k in range(size)] for start in range(0, count, block) for i in range(stride)]


def own(ir: popxl.Ir, data: Any, dtype: popxl.dtype | None = None, name: str = "x") -> popxl.Variable:
    """A variable with a row of `data` for each replica."""
    return popxl.variable(data, dtype, name, replica_grouping=ir.replica_grouping(group_size=1))


def of_ranks(parts: Sequence[Array], groups: list[list[int]]) -> Array:
    """For each replica, the part of its rank."""
    of_replica = {replica: parts[rank] for group in groups for rank, replica in enumerate(group)}
    return np.stack([of_replica[replica] for replica in range(len(of_replica))])


def of_groups(values: Sequence[Array], groups: list[list[int]]) -> Array:
    """For each replica, the value of its group."""
    of_replica = {replica: value for group, value in zip(groups, values, strict=True) for replica in group}
    return np.stack([of_replica[replica] for replica in range(len(of_replica))])


def results(ir: popxl.Ir, device: Devices, tensors: Iterable[popxl.Tensor]) -> list[Array]:
    """What the tensors of the main graph are, on each replica."""
    apply_pre_alias_patterns(ir)
    with ir.main_graph:
        streams = [addons.host_store(ops.reshape(t, t.shape) if t.meta_shape else t) for t in tensors]
    with popxl.Session(ir, device(ir.replication_factor)) as session:
        outputs = session.run()
    return [np.asarray(outputs[stream]) for stream in streams]


def with_gradients(
    function: Callable[..., popxl.Tensor],
    inputs: Sequence[popxl.Tensor],
    g: popxl.Tensor,
    required: Sequence[int] | None = None,
    **options: Any,
) -> tuple[popxl.Tensor, ...]:
    """The result of a function as a graph, and its gradients where `g` is that of the result."""
    graph = addons.GraphWithNamedArgs(inputs[0].ir.create_graph(function, *inputs, **options))
    wanted = None if required is None else [graph.graph.inputs[i] for i in required]
    gradient = addons.autodiff(graph, grads_required=wanted)
    info = graph.call_with_info(*inputs)
    found = gradient.call(g, args=gradient.grad_graph_info.inputs_dict(info))
    return info.outputs[0], *found


def alike(values: Array, groups: list[list[int]]) -> None:
    """Assert that the members of each group have the same bits."""
    for first, *others in groups:
        for other in others:
            np.testing.assert_array_equal(values[other], values[first])
