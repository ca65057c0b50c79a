"""Timeline of a pipeline: start and end of each task, and memory of waiting values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from popxl_addons.transforms.list_scheduling import Task


class TimedTask(NamedTuple):
    """A task with device, start and end."""

    device: int
    task: Task
    start: float
    end: float


@dataclass(frozen=True)
class PipelineTimeline:
    """Timeline of a schedule for known stage durations.

    Attributes:
        tasks: all tasks, in the order in which they begin.
        devices: the number of devices.
        stashed_bytes: for each device, the maximal bytes that wait there at a time for later stages.
    """

    tasks: tuple[TimedTask, ...]
    devices: int
    stashed_bytes: tuple[int, ...]

    @property
    def seconds(self) -> float:
        """End of the last task, in duration units."""
        return max(t.end for t in self.tasks)

    @property
    def bubble(self) -> float:
        """The part of the time that devices wait, from 0 to 1, from the first task's begin to the last one's end; 0 if
        nothing takes time."""
        whole = self.devices * self.seconds
        return 1 - sum(t.end - t.start for t in self.tasks) / whole if whole else 0.0

    def draw(self, path: str | Path) -> None:
        """Draw the timeline: one row per device, one colour per stage. Needs matplotlib (`plots`).

        Args:
            path: the file of the picture; its ending says the format.
        """
        from matplotlib import colormaps
        from matplotlib.figure import Figure

        width = max(6.0, min(24.0, 0.22 * len(self.tasks) / self.devices))
        figure = Figure(figsize=(width, 0.8 + 0.45 * self.devices), layout="constrained")
        axis = figure.add_subplot()
        colours = colormaps["tab20"]
        for device, task, start, end in self.tasks:
            axis.broken_barh(
                [(start, end - start)], (device - 0.45, 0.9), color=colours(task.stage % 20), edgecolor="white"
            )
            axis.text((start + end) / 2, device, str(task.micro_batch), ha="center", va="center", fontsize=6)
        axis.set(
            xlabel="time", ylabel="device", yticks=range(self.devices), title=f"waits {self.bubble:.1%} of the time"
        )
        axis.invert_yaxis()
        figure.savefig(path)
