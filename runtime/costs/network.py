"""Time of a collective over the levels of a machine's links, by the fastest algorithm.

A ring of n chips takes n - 1 steps to gather or to scatter, each of a part of the bytes, and twice that for an
all-reduce. A tree takes log₂ n steps, each of all bytes, pipelined. Over several levels a collective is hierarchical:
first within each unit of a level, and then between units, of which each chip has its part of the bytes. On a torus all
dimensions are rings, or lines, and work at the same time.

Sources: Thakur et al. 2005, https://doi.org/10.1177/1094342005051521 (rings and trees); Sanders et al. 2009,
https://doi.org/10.1016/j.parco.2009.09.001 (trees in pipelines); https://jax-ml.github.io/scaling-book/sharding/
(tori).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

from runtime.costs.work import Collective
from runtime.targets.chip import Chip, Link, Tpu

Place = tuple[int, ...]
"""Position of a chip: its number in a machine of switches, or its torus coordinates and slice number."""


class LinkSpan(NamedTuple):
    """Reach of a group of chips at one level.

    Attributes:
        size: number of members of the group, or units of the level below, that these links join.
        extents: for a torus, the sizes of its dimensions.
        closed: for a torus, the dimensions that are rings.
    """

    link: Link
    size: int
    extents: tuple[int, ...] = ()
    closed: tuple[bool, ...] = ()


class CollectiveTime(NamedTuple):
    """Time of one collective.

    Attributes:
        seconds: time from start to end.
        algorithm: "ring", "tree", "torus", "direct", or several of these from the innermost level outwards.
        over: the names of the links that it uses, the fastest first.
    """

    seconds: float
    algorithm: str
    over: tuple[str, ...]


def spans_of(chip: Chip, members: Sequence[Place], chips: Sequence[Place]) -> tuple[LinkSpan, ...]:
    """Levels of links that join more than one chip of a group, fastest first.

    Args:
        members: places of the members of the group.
        chips: places of all chips of the machine.
    """
    first, *outer = chip.levels
    if first.ring is not None:
        return _on_torus(first, outer, members, chips)
    units = [position[0] for position in members]
    link_spans = []
    for link in chip.levels:
        if link.chips is None:  # it joins all units
            above = [0] * len(members)
        else:
            above = [position[0] // link.chips for position in members]
        joined = Counter(unit for unit, _ in {*zip(above, units, strict=True)})
        count = max(joined.values(), default=0)
        if count > 1:
            link_spans.append(LinkSpan(link, count))
        if link.chips is None:
            break
        units = above
    return tuple(link_spans)


def _on_torus(
    link: Link, outer: Sequence[Link], members: Sequence[Place], chips: Sequence[Place]
) -> tuple[LinkSpan, ...]:
    assert link.ring is not None
    slices = len({position[-1] for position in members})
    along = [{position[d] for position in members} for d in range(len(members[0]) - 1)]
    all_extents = [{position[d] for position in chips} for d in range(len(members[0]) - 1)]
    # In a cube, optical switches close either all dimensions or none; in a plane, each dimension separately.
    cube = len(all_extents) == 2 or all(len(each) % link.ring == 0 for each in all_extents)
    extents = tuple(len(each) for each in along)
    closed = tuple(
        cube and len(own) == len(available) and len(own) % link.ring == 0
        for own, available in zip(along, all_extents, strict=True)
    )
    per_slice = math.ceil(len(members) / slices)
    link_spans = [LinkSpan(link, per_slice, extents, closed)] if per_slice > 1 else []
    return tuple(link_spans) + ((LinkSpan(outer[0], slices),) if slices > 1 and outer else ())


def collective_time(chip: Chip, kind: str, nbytes: float, spans: Sequence[LinkSpan]) -> CollectiveTime:
    """Time of a collective of one group.

    Args:
        kind: kind of collective in XLA's terms: "all-reduce".
        nbytes: bytes on one chip: of operands or results, whichever is more.
        spans: links of the group; see `spans_of`.

    Example:
        >>> from runtime.targets.chip import Gpu, shipped
        >>> h100 = shipped(Gpu, "h100")
        >>> collective_time(h100, "all-reduce", 1e9, [LinkSpan(h100.links[0], 8)]).algorithm
        'ring'
    """
    spans = [span for span in spans if span.size > 1]
    if not spans:
        return CollectiveTime(0.0, "none", ())
    over = tuple(span.link.name for span in spans)
    if kind == "all-reduce":
        return CollectiveTime(*_all_reduce(chip, nbytes, spans), over)
    if kind in ("all-gather", "reduce-scatter"):
        return CollectiveTime(*_gather(chip, nbytes, spans), over)
    if kind in ("all-to-all", "ragged-all-to-all"):
        return CollectiveTime(_all_to_all(chip, nbytes, spans), "direct", over)
    if kind == "collective-broadcast":
        return CollectiveTime(sum(_tree(chip, nbytes, span) for span in spans), "tree", over)
    span = spans[-1]  # a permutation: the pair with the largest distance
    return CollectiveTime(span.link.latency + nbytes / _wire(chip, span), "direct", over[-1:])


def bandwidth_of(chip: Chip, link: Link) -> float:
    """Bytes a second that a chip attains over a link."""
    efficiency = chip.efficiency
    return link.bandwidth * (efficiency.network if link == chip.levels[0] else efficiency.outside)


def _all_reduce(chip: Chip, nbytes: float, spans: Sequence[LinkSpan]) -> tuple[float, str]:
    inner, *outer = spans
    if not outer:
        ring, name = _gather(chip, nbytes, spans)
        candidates: list[tuple[float, str]] = [(2 * ring, name)]
        if not inner.extents:
            candidates.append((2 * _tree(chip, nbytes, inner), "tree"))
        return min(candidates)
    within, name = _gather(chip, nbytes, [inner])
    between, above = _all_reduce(chip, nbytes / inner.size, outer)
    return 2 * within + between, f"{name}, {above}"


def _gather(chip: Chip, nbytes: float, spans: Sequence[LinkSpan]) -> tuple[float, str]:
    """Time of an all-gather or a reduce-scatter, its reverse."""
    total, names = 0.0, []
    for span in spans:
        received = (span.size - 1) / span.size * nbytes
        total += _steps(span) * span.link.latency + received / _inward(chip, span)
        names.append("torus" if span.extents else "ring")
        nbytes /= span.size
    return total, ", ".join(names)


def _tree(chip: Chip, nbytes: float, span: LinkSpan) -> float:
    """Time of a broadcast from, or a sum at, one chip."""
    steps = _steps(span) if span.extents else math.ceil(math.log2(span.size))
    return steps * span.link.latency + nbytes / _inward(chip, span)


def _all_to_all(chip: Chip, nbytes: float, spans: Sequence[LinkSpan]) -> float:
    """Time of an all-to-all: transfers over all levels are simultaneous."""
    count, beyond, times = math.prod(span.size for span in spans), 1, []
    for span in spans:
        within = beyond
        beyond *= span.size
        crossing, rate = nbytes * (beyond - within) / count, _wire(chip, span)
        if span.extents:  # half of everything crosses the middle of the longest dimension
            longest = max(span.extents)
            crossing *= longest
            rate *= 8 if span.closed[span.extents.index(longest)] else 4
        times.append(_steps(span) * span.link.latency + crossing / rate)
    return max(times)


def _inward(chip: Chip, span: LinkSpan) -> float:
    """Bytes a second into each chip; in a torus, over one wire for each dimension, and two where it is a ring."""
    used = (1 + is_ring for extent, is_ring in zip(span.extents, span.closed, strict=True) if extent > 1)
    return _wire(chip, span) * (sum(used) if span.extents else 1)


def _steps(span: LinkSpan) -> int:
    """Hops to the farthest chip, around a ring or through a torus."""
    pairs = zip(span.extents, span.closed, strict=True)
    return sum(e // 2 if is_ring else e - 1 for e, is_ring in pairs) if span.extents else span.size - 1


def _wire(chip: Chip, span: LinkSpan) -> float:
    """Bytes a second between two chips."""
    rate = bandwidth_of(chip, span.link)
    return rate / (2 * len(span.extents)) if span.extents else rate


# Of a program -------------------------------------------------------------------------------------------------------


class Wires:
    """Links between chips.

    Args:
        chip: figures of each chip.
        places: places of the chips, in the order of XLA's numbers; the attribute `positions`.
    """

    def __init__(self, chip: Chip, places: Sequence[Place]) -> None:
        self.chip, self.positions = chip, places
        self._times: dict[Hashable, CollectiveTime] = {}

    @classmethod
    def between(cls, chip: Chip, devices: Sequence[Any]) -> Wires:
        """Links between JAX devices."""
        return cls(chip, _positions_of(chip, devices))

    def spans(self, members: Iterable[int]) -> tuple[LinkSpan, ...]:
        """Links that a group of chips uses, by their numbers."""
        return spans_of(self.chip, [self.positions[i % len(self.positions)] for i in members], self.positions)

    def time(self, collective: Collective) -> CollectiveTime:
        """Time of a collective in its slowest group."""
        key = collective.kind, collective.bytes, collective.groups
        if key not in self._times:
            spans = {self.spans(group) for group in collective.groups or (range(len(self.positions)),)}
            times = [collective_time(self.chip, collective.kind, collective.bytes, each) for each in spans]
            self._times[key] = max(times, key=lambda each: each.seconds)
        return self._times[key]


def _positions_of(chip: Chip, devices: Sequence[Any]) -> list[Place]:
    """Places of devices: torus coordinates and slice number of a TPU, else a number within its process."""
    if isinstance(chip, Tpu):
        return [(*device.coords[: len(chip.host)], getattr(device, "slice_index", None) or 0) for device in devices]
    joined = chip.levels[0].chips or len(devices)
    counts = Counter[int]()
    places: dict[Any, Place] = {}
    for device in sorted(devices, key=lambda device: (device.process_index, device.id)):
        places[device] = (device.process_index * joined + counts[device.process_index],)
        counts[device.process_index] += 1
    return [places[device] for device in devices]
