"""In which order the devices of a pipeline work: schedules as tables, with what they cost before anything runs.

A schedule has a row for each device, with the tasks in the order in which the device does them. A task is one stage for
one micro-batch. A device waits until what its next task needs is there, and does nothing else meanwhile; so the table
says all about the order, and with durations also about the time.

Sources: GPipe is from Huang et al. 2019, https://arxiv.org/abs/1811.06965; 1F1B from Narayanan et al. 2019,
https://arxiv.org/abs/1806.03377; interleaved stages from Narayanan et al. 2021, https://arxiv.org/abs/2104.04473; zero
bubble (the form H1) from Qi et al. 2023, https://arxiv.org/abs/2401.10241.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from popxl.extend.arguments import check_type, integer, integers

__all__ = ["SCHEDULES", "PipelineSchedule", "PipelineTimeline", "PipelineValue", "Task"]

SCHEDULES = ("cycles", "gpipe", "1f1b", "zero_bubble")
"""The schedules that have names: see the methods of `PipelineSchedule`."""


class Task(NamedTuple):
    """One stage for one micro-batch."""

    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}:{self.micro_batch}"


class PipelineValue(NamedTuple):
    """A value passed from one stage to others, per micro-batch.

    Attributes:
        name: its name in the program.
        made_in: the stage that makes it.
        read_in: the stages that read it.
        nbytes: its size, in bytes.
        device: where it waits, by its row in the schedule.
    """

    name: str
    made_in: int
    read_in: tuple[int, ...]
    nbytes: int
    device: int


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
        stashed_bytes: for each device, the most that waits there at a time for later stages, in bytes.
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
        """The part of the time that devices wait, from 0 to 1, from the first task's begin to the last one's end."""
        return 1 - sum(t.end - t.start for t in self.tasks) / (self.devices * self.seconds)

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


@dataclass(frozen=True)
class PipelineSchedule:
    """Task order for each pipeline device.

    Each stage is done by one device, for one micro-batch after the other. That makes sums over micro-batches the same
    bit for bit, whichever schedule there is.

    Args:
        rows: for each device its tasks, pairs of a stage and a micro-batch, in order.
        needs: for each stage the stages whose results it reads; by default, each stage reads from the one before it.
            In a pipeline the program says it.

    Raises:
        ValueError: if a task is missing, comes twice or out of order, a stage is in two rows, or no device can go on.

    Example:
        >>> print(PipelineSchedule([[(0, 0), (0, 1), (2, 0), (2, 1)], [(1, 0), (1, 1)]]))
        0 | 0:0 0:1 2:0 2:1
        1 |  .  1:0 1:1  .
        >>> timeline = PipelineSchedule.one_forward_one_backward([0, 1, 2, 3, 3, 2, 1, 0], steps=8).simulate()
        >>> timeline.seconds, round(timeline.bubble, 3)
        (22.0, 0.273)
    """

    rows: tuple[tuple[Task, ...], ...]
    needs: tuple[tuple[int, ...], ...]
    device_of: tuple[int, ...] = field(init=False, repr=False)

    def __init__(self, rows: Iterable[Iterable[tuple[int, int]]], needs: Sequence[Sequence[int]] | None = None) -> None:
        try:
            table = tuple(tuple(Task(*map(operator.index, task)) for task in row) for row in rows)
        except TypeError:
            raise TypeError(
                "PipelineSchedule: `rows` must have a row for each device, of pairs of a stage and a micro-batch, "
                f"such as [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]; got {rows!r:.200}."
            ) from None
        device_of = _devices_of(table)
        stages = len(device_of)
        given: Sequence[Sequence[int]] = [[s - 1] * (s > 0) for s in range(stages)]
        if needs is not None:
            check_type(needs, Sequence, "PipelineSchedule: `needs`", "a list with a list of stages for each stage")
            given = [integers(need, "PipelineSchedule: each of `needs`") for need in needs]
        if len(given) != stages:
            raise ValueError(f"PipelineSchedule: `needs` is of {len(given)} stages, and the rows are of {stages}.")
        if unknown := sorted({n for need in given for n in need if not 0 <= n < stages}):
            raise ValueError(
                f"PipelineSchedule: `needs` has the stages {unknown}; there are those from 0 to {stages - 1}."
            )
        object.__setattr__(self, "rows", table)
        object.__setattr__(self, "needs", tuple(tuple(n) for n in given))
        object.__setattr__(self, "device_of", device_of)
        self.simulate()  # it can be done

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.device_of)

    @property
    def steps(self) -> int:
        """The number of micro-batches."""
        return sum(map(len, self.rows)) // self.stages

    # Schedules with names

    @classmethod
    def named(cls, name: str, placement: Sequence[int], steps: int) -> PipelineSchedule:
        """Schedule by name, one of `SCHEDULES`, for stages on devices of `placement`."""
        makers = dict(
            zip(SCHEDULES, (cls.cycles, cls.gpipe, cls.one_forward_one_backward, cls.zero_bubble), strict=True)
        )
        if name not in makers:
            raise ValueError(
                f"PipelineSchedule: there is no schedule {name!r}; expected one of {', '.join(map(repr, SCHEDULES))}, "
                "or a table, `PipelineSchedule(rows)`."
            )
        return makers[name](placement, steps)

    @classmethod
    def cycles(cls, placement: Sequence[int], steps: int) -> PipelineSchedule:
        """Cyclic schedule: each cycle runs every stage once, on consecutive micro-batches.

        Args:
            placement: the device of each stage.
            steps: the number of micro-batches.
        """
        _check(placement, steps)
        every = [[Task(s, m) for s in row for m in range(steps)] for row in _rows(placement)]
        for row in every:
            row.sort(key=lambda task: (task.stage + task.micro_batch, task.stage))
        return cls(every)

    @classmethod
    def gpipe(cls, placement: Sequence[int], steps: int) -> PipelineSchedule:
        """All forward stages of all micro-batches, then all backward ones. All activations wait at once.

        Args: as for `one_forward_one_backward`.
        """
        return cls(_forward_and_backward("gpipe", placement, steps, warm_up=lambda device, devices, parts: None))

    @classmethod
    def one_forward_one_backward(cls, placement: Sequence[int], steps: int) -> PipelineSchedule:
        """1F1B schedule: micro-batches in flight equal remaining devices, then forward and backward alternate.

        With several forward stages on each device, the schedule is interleaved: the devices take turns, and wait for
        that many times less.

        Args:
            placement: the device of each stage: those of the forward stages, taking turns, and for training those of
                the backward stages, in reverse. If the last forward stage and the first backward one are one stage, it
                is named once: (0, 1, 2, 1, 0).
            steps: the number of micro-batches; for interleaved stages a multiple of the number of devices.

        Raises:
            ValueError: if the placement is another one.

        Example:
            >>> print(PipelineSchedule.one_forward_one_backward([0, 1, 2, 2, 1, 0], 4))
            0 | 0:0 0:1 0:2  .   .  5:0 0:3 5:1  .  5:2  .  5:3
            1 |  .  1:0 1:1  .  4:0 1:2 4:1 1:3 4:2  .  4:3  .
            2 |  .   .  2:0 3:0 2:1 3:1 2:2 3:2 2:3 3:3  .   .
        """

        def warm_up(device: int, devices: int, parts: int) -> int:
            return devices - 1 - device if parts == 1 else 2 * (devices - 1 - device) + (parts - 1) * devices

        return cls(_forward_and_backward("1f1b", placement, steps, warm_up))

    @classmethod
    def zero_bubble(cls, placement: Sequence[int], steps: int) -> PipelineSchedule:
        """Zero-bubble schedule: weight gradients as separate stages fill idle time.

        Args:
            placement: the device of each stage: forward stages on one device each, those that pass gradients back in
                reverse, and those with gradients of weights in the same order as these: (0, 1, 1, 0, 1, 0).
            steps: the number of micro-batches.

        Raises:
            ValueError: if the placement is another one.

        Example:
            >>> print(PipelineSchedule.zero_bubble([0, 1, 1, 0, 1, 0], 3))
            0 | 0:0 0:1  .  3:0 0:2 3:1 5:0 3:2 5:1 5:2
            1 |  .  1:0 2:0 1:1 2:1 1:2 2:2 4:0 4:1 4:2
        """
        _check(placement, steps)
        rows = _rows(placement)
        devices = len(rows)
        backward = [devices - 1 - d for d in range(devices)]
        if [_device_numbers(placement)[s] for s in range(len(placement))] != [*range(devices), *backward, *backward]:
            raise ValueError(
                f"PipelineSchedule: for 'zero_bubble' the stages are on the devices {tuple(placement)}, expected "
                "forward stages on one device each, backward stages in reverse, and stages with the gradients of "
                "weights in the same order as the backward ones, such as (0, 1, 1, 0, 1, 0)."
            )
        wanted = 3 * steps + devices - 1
        tried = (_zero_bubble_rows(devices, steps, waiting) for waiting in range(devices, 2 * devices))
        return cls(
            next((rows for rows, time in tried if time == wanted), _zero_bubble_rows(devices, steps, 2 * devices)[0]),
            [[s - 1] * (s > 0) if s < 2 * devices else [s - devices] for s in range(3 * devices)],
        )

    # What it costs

    def simulate(
        self, durations: Sequence[float] | None = None, values: Iterable[PipelineValue] = ()
    ) -> PipelineTimeline:
        """Simulate device timelines: tasks start once device and inputs are available.

        Args:
            durations: the time that each stage takes, for all micro-batches the same; by default 1 each.
            values: what waits from stage to stage; from the end of the task that makes it to the end of the last one
                that reads it.

        Raises:
            ValueError: if there are too many or too few durations, or one is below 0.

        Example:
            >>> schedule = PipelineSchedule.gpipe([0, 1, 1, 0], steps=2)
            >>> kept = PipelineValue("activations", made_in=0, read_in=(3,), nbytes=100, device=0)
            >>> timeline = schedule.simulate([1, 1, 2, 2], [kept])
            >>> timeline.seconds, timeline.stashed_bytes
            (9.0, (200, 0))
        """
        seconds = [1.0] * self.stages if durations is None else [float(d) for d in durations]
        if len(seconds) != self.stages:
            raise ValueError(
                f"simulate: `durations` has {len(seconds)} values, expected one for each of {self.stages}."
            )
        if min(seconds) < 0:
            raise ValueError(f"simulate: `durations` are {seconds}; expected none below 0.")
        ends: dict[Task, float] = {}
        timed: list[TimedTask] = []
        free, position = [0.0] * len(self.rows), [0] * len(self.rows)
        stuck = False
        while not stuck:  # times follow from the order alone, so each device goes on as far as it can
            stuck = True
            for device, row in enumerate(self.rows):
                for task in row[position[device] :]:
                    before = [Task(n, task.micro_batch) for n in self.needs[task.stage]]
                    if not all(b in ends for b in before):
                        break
                    start = max([free[device], *(ends[b] for b in before)])
                    ends[task] = free[device] = start + seconds[task.stage]
                    timed.append(TimedTask(device, task, start, ends[task]))
                    position[device] += 1
                    stuck = False
        if waiting := [
            f"{row[p]} on device {d}"
            for d, (row, p) in enumerate(zip(self.rows, position, strict=True))
            if p < len(row)
        ]:
            raise ValueError(
                f"PipelineSchedule: no device can go on. They wait with {', '.join(waiting)}; what a task needs has to "
                "come before it, also in the rows of the other devices."
            )
        timed.sort(key=lambda t: (t.start, t.device))
        return PipelineTimeline(tuple(timed), len(self.rows), self._stashed(ends, values))

    def _stashed(self, ends: dict[Task, float], values: Iterable[PipelineValue]) -> tuple[int, ...]:
        changes: list[list[tuple[float, int, int]]] = [[] for _ in self.rows]
        for value in values:
            for m in range(self.steps):
                last = max(ends[Task(s, m)] for s in value.read_in)
                changes[value.device] += [
                    (ends[Task(value.made_in, m)], 0, value.nbytes),  # what comes, comes before what goes
                    (last, 1, -value.nbytes),
                ]
        peaks = []
        for on_device in changes:
            held = peak = 0
            for _, _, change in sorted(on_device):
                held += change
                peak = max(peak, held)
            peaks.append(peak)
        return tuple(peaks)

    def __str__(self) -> str:
        """Timeline for equal durations: one row per device, ``stage:micro-batch``."""
        timeline = self.simulate()
        table = [["."] * int(timeline.seconds) for _ in self.rows]
        for device, task, start, _ in timeline.tasks:
            table[device][int(start)] = str(task)
        width = max(len(cell) for row in table for cell in row)
        return "\n".join(
            f"{device} | " + " ".join(cell.center(width) for cell in row).rstrip() for device, row in enumerate(table)
        )


def _check(placement: Sequence[int], steps: int) -> None:
    """Check applicability of a named schedule."""
    if not integers(placement, "PipelineSchedule: `placement`"):
        raise ValueError("PipelineSchedule: `placement` has no stage; expected the device of each, as in (0, 1, 1, 0).")
    integer(steps, "PipelineSchedule: `steps`")


def _device_numbers(placement: Sequence[int]) -> list[int]:
    """Device per stage, numbered by first appearance."""
    numbers = {device: i for i, device in enumerate(dict.fromkeys(placement))}
    return [numbers[device] for device in placement]


def _rows(placement: Sequence[int]) -> list[list[int]]:
    """The stages of each device."""
    numbered = _device_numbers(placement)
    return [[s for s, device in enumerate(numbered) if device == d] for d in range(max(numbered) + 1)]


def _forward_and_backward(name: str, placement: Sequence[int], steps: int, warm_up: Any) -> list[list[Task]]:
    """Per device: warm-up forward tasks, alternating forward and backward, remaining backward tasks."""
    _check(placement, steps)
    numbered = _device_numbers(placement)
    trains = len(numbered) > 1 and numbered == numbered[::-1]
    forward = numbered[: (len(numbered) + 1) // 2] if trains else numbered
    devices = max(forward) + 1
    parts, rest = divmod(len(forward), devices)
    if rest or forward != [*range(devices)] * parts:
        raise ValueError(
            f"PipelineSchedule: for {name!r} the stages are on the devices {tuple(placement)}, expected devices that "
            "take turns in the forward stages, and for training the same in reverse in the backward stages, such as "
            "(0, 1, 1, 0), (0, 1, 2, 1, 0) or, interleaved, (0, 1, 0, 1, 1, 0, 1, 0)."
        )
    if parts > 1 and steps % devices:
        raise ValueError(
            f"PipelineSchedule: `steps` is {steps}, expected a multiple of {devices}, the number of devices, as each "
            f"has {parts} forward stages."
        )
    groups = [range(first, min(first + devices, steps)) for first in range(0, steps, devices)]
    ends = 2 * len(forward) - 1  # forward stage s has the backward stage `ends - s`
    rows = []
    for device in range(devices):
        own = range(device, len(forward), devices)
        is_ready = [Task(s, m) for group in groups for s in own for m in group]
        back = [Task(ends - s, m) for group in groups for s in reversed(own) for m in group] if trains else []
        first = warm_up(device, devices, parts)
        first = len(is_ready) if first is None else min(first, len(is_ready))
        pairs = chain.from_iterable(zip_longest(is_ready[first:], back))
        rows.append([*is_ready[:first], *(task for task in pairs if task is not None)])
    if trains and len(numbered) % 2:  # the last forward stage does the first backward one's work, too
        middle = len(forward)
        rows = [[Task(s - (s > middle), m) for s, m in row if s != middle] for row in rows]
    return rows


def _zero_bubble_rows(devices: int, steps: int, waiting: int) -> tuple[list[list[Task]], int]:
    """Rows of zero bubble, and their time: back if it can, else forward, else the gradients of weights.

    A device goes forward only as far ahead of going back as with 1F1B, and while less than `waiting` micro-batches wait
    there for the gradients of their weights.
    """
    ends: dict[Task, int] = {}
    count: Counter[int] = Counter()  # of micro-batches that a stage has done
    rows: list[list[Task]] = [[] for _ in range(devices)]
    time = 0

    def is_ready(stage: int, micro_batch: int) -> bool:
        return ends.get(Task(stage, micro_batch), time + 1) <= time

    while len(ends) < 3 * devices * steps:
        for device, row in enumerate(rows):
            forward, back, weights = device, 2 * devices - 1 - device, 3 * devices - 1 - device
            ahead, kept = count[forward] - count[back], count[forward] - count[weights]
            can = {
                back: is_ready(back - 1, count[back]),
                forward: ahead < devices - device
                and kept < waiting
                and (device == 0 or is_ready(forward - 1, count[forward])),
                weights: count[weights] < count[back],
            }
            stage = next((s for s, possible in can.items() if possible and count[s] < steps), None)
            if stage is not None:
                row.append(Task(stage, count[stage]))
        for task in (row[-1] for row in rows if row):
            if task not in ends:
                ends[task] = time + 1
                count[task.stage] += 1
        time += 1
    return rows, time


def _devices_of(table: Sequence[Sequence[Task]]) -> tuple[int, ...]:
    """Device per stage. Raises `ValueError` unless tasks are unique, in order, with each stage in one row."""
    where = {task: device for device, row in enumerate(table) for task in row}
    stages = 1 + max((task.stage for task in where), default=-1)
    steps = 1 + max((task.micro_batch for task in where), default=-1)
    wanted = {Task(s, m) for s in range(stages) for m in range(steps)}
    if wrong := sorted(wanted ^ where.keys()):
        raise ValueError(
            f"PipelineSchedule: the rows have {len(where)} different tasks, expected each of {stages} stages for "
            f"each of {steps} micro-batches; {_sample(wrong)} should {'' if wrong[0] in wanted else 'not '}be there."
        )
    if not wanted:
        raise ValueError("PipelineSchedule: there are no tasks; expected one stage and one micro-batch, or more.")
    if len(where) != sum(map(len, table)):
        twice = sorted({task for task in where if list(chain(*table)).count(task) > 1})
        raise ValueError(f"PipelineSchedule: expected each task once; these are there twice: {_sample(twice)}.")
    devices = [sorted({where[Task(s, m)] for m in range(steps)}) for s in range(stages)]
    for s, rows in enumerate(devices):
        if len(rows) > 1:
            raise ValueError(f"PipelineSchedule: stage {s} is in the rows {rows}, expected one row.")
    for row in table:
        last = dict.fromkeys(range(stages), -1)
        for task in row:
            if task.micro_batch != last[task.stage] + 1:
                raise ValueError(
                    f"PipelineSchedule: the task {task} comes after {task.stage}:{last[task.stage]}; a stage "
                    "takes one micro-batch after the other."
                )
            last[task.stage] += 1
    return tuple(device for (device,) in devices)


def _sample(tasks: Sequence[Task]) -> str:
    return ", ".join(map(str, tasks[:5])) + (" and others" if len(tasks) > 5 else "")


def scheduled(
    schedule: PipelineSchedule | str, placement: Sequence[int | None], needs: Sequence[Iterable[int]], steps: int
) -> PipelineSchedule:
    """Schedule for a program's real dependencies. Raises `ValueError` for an incompatible schedule.

    Args:
        schedule: a schedule, or the name of one.
        placement: the IPU of each stage of the program.
        needs: for each stage, those whose results it reads.
        steps: the number of micro-batches.
    """
    ipus = [ipu or 0 for ipu in placement]
    table = PipelineSchedule.named(schedule, ipus, steps) if isinstance(schedule, str) else schedule
    if (table.stages, table.steps) != (len(ipus), steps):
        raise ValueError(
            f"pipelined_execution: `schedule` is for {table.stages} stages and {table.steps} micro-batches; the "
            f"program has {len(ipus)} stages and {steps} micro-batches."
        )
    for device in range(len(table.rows)):
        used = sorted({ipu for ipu, d in zip(ipus, table.device_of, strict=True) if d == device})
        if len(used) > 1:
            raise ValueError(
                f"pipelined_execution: row {device} of `schedule` has stages that the program puts on the IPUs {used}; "
                "expected one IPU for each row."
            )
    return PipelineSchedule(table.rows, [sorted(n) for n in needs])
