"""`Wires`: the links between a program's chips, and the times of its collectives over them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from runtime.costs.network import CollectiveTime, LinkSpan, Place, collective_time, spans_of
from runtime.costs.work import Collective
from runtime.targets.chip import Chip, Tpu


class Wires:
    """Links between chips.

    Args:
        chip: figures of each chip.
        positions: their places, in the order of XLA's numbers.
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
