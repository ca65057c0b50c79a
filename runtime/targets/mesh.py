"""Dimensions of a replica mesh, derived from communicating groups, and physical placement of replicas.

A program with groups of 8 replicas in a row, and others of every eighth, has a mesh of two dimensions. If groups cross
each other in any other way, it has one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils

from popxl.analysis.communication import communication_of
from popxl.analysis.mesh import dimensions_of_groups
from popxl.core.aliasing import lowered_ops
from popxl.ir import Ir
from runtime.targets.replicas import AXIS, Dimension


def dimensions_of(ir: Ir, are_weighed: bool = False) -> tuple[Dimension, ...]:
    """Mesh dimensions of a program's replicas, outermost first.

    Args:
        are_weighed: whether to determine the bytes that are sent along each dimension. They are 0 otherwise.

    Raises:
        ValueError: if the program has axes of another number of replicas.
    """
    axes, count = ir.checked_axes("Session"), ir.replication_factor
    ops = (op for op in lowered_ops(ir.main_graph.ops) if op.kind.between_replicas)
    groups = {(op.attributes["stride"], op.attributes["group_size"]) for op in ops}
    named = {} if axes is None else axes.by_stride
    places = dimensions_of_groups(count, {*groups, *named})
    if places is None or len(places) < 2 or math.prod(size for _, size in places) > count:
        return (Dimension(AXIS, count),)
    weights = dict.fromkeys((stride for stride, _ in places), 0)
    if are_weighed:
        for each in communication_of(ir).collectives:
            for stride in weights:
                if each.stride <= stride < each.stride * each.group_size:
                    weights[stride] += each.bytes * each.turns
    return tuple(
        # No axis of a user is called so: their names are words.
        Dimension(named.get((stride, size), f"{AXIS} {stride}"), size, weights[stride])
        for stride, size in places
    )


def placed_devices(devices: Sequence[jax.Device], dimensions: Sequence[Dimension]) -> list[jax.Device]:
    """Order devices by replica, making replicas physical neighbours along the dimension with most traffic.

    The replicas of a process stay together, in the order of the processes, as these feed them.
    """
    ordered = list(devices)
    if len(dimensions) < 2 or ordered[0].platform != "tpu":  # no other says how its devices are wired
        return ordered
    hosts = [list(own) for _, own in groupby(ordered, lambda device: device.process_index)]
    sizes = _block_extents(len(hosts[0]), [dimension.size for dimension in dimensions])
    if sizes is None or len({len(own) for own in hosts}) > 1 or not all(map(_is_box, hosts)):
        return ordered
    quietest_first = sorted(range(len(sizes)), key=lambda i: dimensions[i].bytes)
    mesh = mesh_utils.create_device_mesh([sizes[i] for i in quietest_first], hosts[0], allow_split_physical_axes=True)
    # The same in each host: TPUs refuse groups that do not look alike.
    places = [_host_coordinates(device, hosts[0]) for device in mesh.transpose(np.argsort(quietest_first)).flat]
    chips_of_hosts = [{_host_coordinates(device, own): device for device in own} for own in hosts]
    if any(chips.keys() != {*places} for chips in chips_of_hosts):
        return ordered
    return [chips[place] for chips in chips_of_hosts for place in places]


def _host_coordinates(device: Any, host: Sequence[Any]) -> tuple[int, ...]:
    """Coordinates of a chip within its host."""
    corner = map(min, zip(*(each.coords for each in host), strict=True))
    return (*(own - first for own, first in zip(device.coords, corner, strict=True)), device.core_on_chip)


def _block_extents(count: int, sizes: Sequence[int]) -> list[int] | None:
    """Extent of `count` consecutive replicas along each dimension; `None` unless they form a block."""
    extents = [1] * len(sizes)
    for i in reversed(range(len(sizes))):
        extents[i] = math.gcd(sizes[i], count)
        count //= extents[i]
        if extents[i] < sizes[i]:
            break
    return extents if count == 1 else None


def _is_box(devices: Sequence[Any]) -> bool:
    """Whether chips fill a box of their network."""
    extents = [len({*places}) for places in zip(*(device.coords for device in devices), strict=True)]
    return math.prod(extents) == len(devices)
