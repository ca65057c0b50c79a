"""Pipeline schedules as tables, with their costs before anything runs.

A schedule has a row for each device, with its tasks in order. A task is one stage for one micro-batch. A device waits
until the inputs of its next task are available, and does nothing else meanwhile; so the table defines the order, and
together with durations also the time.

Rows of named schedules are made in `named_schedules`, which has their sources; the search is in `list_scheduling`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Protocol

from popxl.extend.arguments import check_type, integers
from popxl_addons.transforms import named_schedules
from popxl_addons.transforms.list_scheduling import Pipeline, PipelineValue, Rule, Task, list_schedule
from popxl_addons.transforms.pipeline_timeline import PipelineTimeline, TimedTask

__all__ = ["SCHEDULES", "PipelineSchedule", "PipelineTimeline", "PipelineValue", "Task"]

SCHEDULES = ("cycles", "gpipe", "1f1b", "zero_bubble", "zero_bubble_v", "dualpipe_v", "search")
"""The schedules that have names: see the methods of `PipelineSchedule`."""


@dataclass(frozen=True)
class PipelineSchedule:
    """Task order for each pipeline device.

    Each stage is done by one device, for one micro-batch after the other. That makes sums over micro-batches the same
    bit for bit, whichever schedule there is.

    Args:
        rows: tasks of each device, pairs of a stage and a micro-batch, in order.
        needs: for each stage, the stages whose results it reads; by default, each stage reads from the one before it.
            In a pipeline the program defines them.

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
        vars(self).update(rows=table, needs=tuple(tuple(n) for n in given), device_of=device_of)
        self.simulate()  # raises if the order is impossible

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
        """Create a schedule of a given name (see `SCHEDULES`) for stages on the devices of `placement`."""
        if name not in SCHEDULES:
            raise ValueError(
                f"PipelineSchedule: there is no schedule {name!r}; expected one of {', '.join(map(repr, SCHEDULES))}, "
                "or a table, `PipelineSchedule(rows)`."
            )
        make = cls.one_forward_one_backward if name == "1f1b" else getattr(cls, name)
        return make(placement, steps)

    @classmethod
    def cycles(cls, placement: Sequence[int], steps: int) -> PipelineSchedule:
        """Cyclic schedule: each cycle runs every stage once, on consecutive micro-batches.

        Args:
            placement: the device of each stage.
            steps: the number of micro-batches.
        """
        return cls(named_schedules.cycles(placement, steps))

    @classmethod
    def gpipe(cls, placement: Sequence[int], steps: int) -> PipelineSchedule:
        """All forward stages of all micro-batches, then all backward ones. All activations wait at once.

        Args: as for `one_forward_one_backward`.
        """
        return cls(named_schedules.forward_and_backward("gpipe", placement, steps, lambda *_: None))

    @classmethod
    def one_forward_one_backward(cls, placement: Sequence[int], steps: int) -> PipelineSchedule:
        """1F1B schedule: micro-batches in flight equal remaining devices, then forward and backward alternate.

        With several forward stages on each device, the schedule is interleaved: stages alternate between the devices,
        which divides their waiting time by the number of stages on each.

        Args:
            placement: the device of each stage: those of the forward stages, taking turns, and for training those of
                the backward stages, in reverse. If the last forward stage and the first backward one are one stage, it
                is named once: (0, 1, 2, 1, 0).
            steps: the number of micro-batches; for interleaved stages a multiple of the number of devices.

        Raises:
            ValueError: if the schedule does not support the placement.

        Example:
            >>> print(PipelineSchedule.one_forward_one_backward([0, 1, 2, 2, 1, 0], 4))
            0 | 0:0 0:1 0:2  .   .  5:0 0:3 5:1  .  5:2  .  5:3
            1 |  .  1:0 1:1  .  4:0 1:2 4:1 1:3 4:2  .  4:3  .
            2 |  .   .  2:0 3:0 2:1 3:1 2:2 3:2 2:3 3:3  .   .
        """

        def warm_up(device: int, devices: int, parts: int) -> int:
            return devices - 1 - device if parts == 1 else 2 * (devices - 1 - device) + (parts - 1) * devices

        return cls(named_schedules.forward_and_backward("1f1b", placement, steps, warm_up))

    @classmethod
    def zero_bubble(cls, placement: Sequence[int], steps: int) -> PipelineSchedule:
        """Zero-bubble schedule: weight gradients as separate stages fill idle time.

        If all stages take the same time, it holds as many activations as 1F1B (on each device as many as on its first),
        and the last device never waits.

        Args:
            placement: the device of each stage: forward stages on one device each, those that pass gradients back in
                reverse, and those with gradients of weights in the same order as these: (0, 1, 1, 0, 1, 0).
            steps: the number of micro-batches.

        Raises:
            ValueError: if the schedule does not support the placement.

        Example:
            >>> print(PipelineSchedule.zero_bubble([0, 1, 1, 0, 1, 0], 3))
            0 | 0:0 0:1  .  3:0 5:0 0:2 3:1 5:1 3:2 5:2
            1 |  .  1:0 2:0 1:1 2:1 4:0 1:2 2:2 4:1 4:2
        """
        rows, pipeline = named_schedules.zero_bubble(placement, steps)
        return cls(rows, pipeline.needs)

    @classmethod
    def zero_bubble_v(cls, placement: Sequence[int], steps: int) -> PipelineSchedule:
        """Zero-bubble schedule of V-shaped stages (ZB-V): the first device has the first and the last forward stage.

        So gradients come back to a device soon after its forward work, and activations wait for a shorter time: with
        the memory of 1F1B, devices wait half as long as with `zero_bubble`.

        Args:
            placement: the device of each stage: forward stages in a V, those that pass gradients back in reverse, and
                those with gradients of weights in the same order as these: (0, 1, 1, 0) three times.
            steps: the number of micro-batches.

        Raises:
            ValueError: if the schedule does not support the placement.

        Example:
            >>> timeline = PipelineSchedule.zero_bubble_v([0, 1, 2, 2, 1, 0] * 3, 6).simulate()
            >>> timeline.seconds  # three devices with six stages each, and six micro-batches
            38.0
        """
        return cls._search(named_schedules.v_shaped("zero_bubble_v", placement, steps), None)

    @classmethod
    def dualpipe_v(cls, placement: Sequence[int], steps: int) -> PipelineSchedule:
        """DualPipeV schedule: V-shaped stages, where a device alternates one's forward and the other's backward work.

        Where a device sends and receives while it computes, the two are independent, so that the one's communication
        is hidden behind the other's products.

        Args:
            placement: as for `zero_bubble_v`.
            steps: the number of micro-batches, at least two for each device.

        Raises:
            ValueError: if the schedule does not support the placement, or there are too few steps.

        Example:
            >>> timeline = PipelineSchedule.dualpipe_v([0, 1, 2, 2, 1, 0] * 3, 6).simulate()
            >>> timeline.seconds
            38.0
        """
        rows, pipeline = named_schedules.dualpipe_v(placement, steps)
        return cls(rows, pipeline.needs)

    @classmethod
    def search(
        cls,
        placement: Sequence[int],
        steps: int,
        *,
        durations: Sequence[float] | None = None,
        needs: Sequence[Sequence[int]] | None = None,
        values: Iterable[PipelineValue] | None = None,
        memory: int | None = None,
    ) -> PipelineSchedule:
        """The shortest schedule that list scheduling finds within a limit of memory, for stages on any devices.

        It tries some dozens of rules, and stops at a schedule that no other can beat. `simulate` of the result gives
        its time.

        Args:
            placement: the device of each stage.
            steps: the number of micro-batches.
            durations: the time that each stage takes; by default 1 each.
            needs: for each stage, those before it whose results it reads. By default each reads from the one before it,
                and if stages are on the devices as those of a training, backward stages read activations of their
                forward stage, and so do stages with gradients of weights.
            values: values that wait between stages; by default activations of size 1 from each forward stage.
            memory: maximal bytes of `values` that a device may hold. By default 1.1 times those with as many
                micro-batches in flight as there are devices, which is the memory of 1F1B.

        Raises:
            ValueError: if nothing was found within `memory`, or there are too many or too few durations or needs.

        Example:
            >>> schedule = PipelineSchedule.search([0, 1, 1, 0, 1, 0], 4, durations=[1, 1, 1.5, 1.5, 0.5, 0.5])
            >>> schedule.simulate([1, 1, 1.5, 1.5, 0.5, 0.5]).seconds
            14.0
        """
        pipeline = named_schedules.training(placement, steps)
        if needs is not None:
            needs = [integers(need, "PipelineSchedule: each of `needs`") for need in needs]
            if len(needs) != len(placement):
                raise ValueError(
                    f"PipelineSchedule: `needs` is of {len(needs)} stages, and `placement` of {len(placement)}."
                )
            if later := [s for s, need in enumerate(needs) if not all(0 <= n < s for n in need)]:
                raise ValueError(f"PipelineSchedule: `needs` of the stages {later} are not stages before them.")
            pipeline = replace(pipeline, needs=needs)
        pipeline = replace(pipeline, durations=_durations(durations, len(placement), "PipelineSchedule"))
        if values is not None:
            pipeline = replace(pipeline, values=[*values])
        return cls._search(pipeline, memory)

    @classmethod
    def _search(cls, pipeline: Pipeline, memory: float | None) -> PipelineSchedule:
        """The shortest schedule within `memory`; of several, the one that holds the least.

        By default `memory` is 1.1 times the bytes held with as many micro-batches in flight as there are devices.
        """

        def judged(rule: Rule, limit: float) -> tuple[float, int, PipelineSchedule] | None:
            rows = list_schedule(pipeline, rule, limit)
            if rows is None:
                return None
            schedule = cls(rows, pipeline.needs)
            timeline = schedule.simulate(pipeline.durations, pipeline.values)
            return timeline.seconds, max(timeline.stashed_bytes), schedule

        if memory is None:
            frugal = judged(Rule(forward_first=False, limits_lead=True, under_way=pipeline.devices), math.inf)
            memory = 1.1 * frugal[1] if frugal is not None else math.inf
        best: tuple[float, int, PipelineSchedule] | None = None
        for rule in pipeline.rules():
            found = judged(rule, memory)
            if found is not None and found[1] <= memory and (best is None or found[:2] < best[:2]):
                best = found
                if best[0] <= pipeline.least_seconds * (1 + 1e-12):
                    break
        if best is None:
            least = judged(Rule(forward_first=False, limits_lead=False, under_way=1), math.inf)
            assert least is not None, "one micro-batch after the other can always be done"
            raise ValueError(
                f"PipelineSchedule: `memory` is {memory:g} bytes, and no schedule was found that holds so little on "
                f"each device; one micro-batch after the other holds {least[1]}."
            )
        return best[2]

    # Costs

    def simulate(
        self, durations: Sequence[float] | None = None, values: Iterable[PipelineValue] = ()
    ) -> PipelineTimeline:
        """Simulate device timelines: tasks start once device and inputs are available.

        Args:
            durations: time of each stage, the same for all micro-batches; by default 1 each.
            values: values that wait between stages; from the end of the task that makes one to the end of the last one
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
        seconds = _durations(durations, self.stages, "simulate")
        ends: dict[Task, float] = {}
        timed: list[TimedTask] = []
        free, position = [0.0] * len(self.rows), [0] * len(self.rows)
        stuck = False
        while not stuck:  # times follow from the order alone, so each device continues as far as it can
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
        """Most bytes of waiting values on each device at a time."""
        changes: list[list[tuple[float, int, int]]] = [[] for _ in self.rows]
        for value in values:
            for m in range(self.steps):
                last = max(ends[Task(s, m)] for s in value.read_in)
                changes[value.device] += [
                    (ends[Task(value.made_in, m)], 0, value.nbytes),  # values are added before others are removed
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


def _durations(durations: Sequence[float] | None, stages: int, where: str) -> list[float]:
    """Durations of all stages. `ValueError` for another number of stages, and for durations below 0 or not finite."""
    seconds = [1.0] * stages if durations is None else [float(d) for d in durations]
    if len(seconds) != stages:
        raise ValueError(f"{where}: `durations` has {len(seconds)} values, expected one for each of {stages}.")
    if min(seconds) < 0 or not all(map(math.isfinite, seconds)):
        raise ValueError(f"{where}: `durations` are {seconds}; expected none below 0, and finite numbers.")
    return seconds


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


class Search(Protocol):
    """Function that makes a schedule for a program, called with the arguments of `PipelineSchedule.search`.

    For example ``functools.partial(PipelineSchedule.search, memory=2**30)``.
    """

    def __call__(
        self,
        placement: Sequence[int],
        steps: int,
        /,
        *,
        needs: Sequence[Sequence[int]],
        values: Sequence[PipelineValue],
    ) -> PipelineSchedule: ...


def scheduled(
    schedule: PipelineSchedule | str | Search,
    placement: Sequence[int | None],
    needs: Sequence[Iterable[int]],
    steps: int,
    values: Callable[[Sequence[int]], Sequence[PipelineValue]],
) -> PipelineSchedule:
    """Schedule for a program's real dependencies. Raises `ValueError` for an incompatible schedule.

    Args:
        schedule: a schedule, its name, or a function that makes it.
        placement: the IPU of each stage of the program.
        needs: for each stage, those whose results it reads.
        steps: the number of micro-batches.
        values: function that returns the values that wait between stages, from the row of each stage.
    """
    ipus = [ipu or 0 for ipu in placement]
    ordered = [sorted(n) for n in needs]
    if schedule == "search":
        schedule = PipelineSchedule.search
    if isinstance(schedule, str):
        table = PipelineSchedule.named(schedule, ipus, steps)
    elif isinstance(schedule, PipelineSchedule):
        table = schedule
    else:
        table = schedule(ipus, steps, needs=ordered, values=values(named_schedules.numbered_devices(ipus)))
        check_type(table, PipelineSchedule, "pipelined_execution: what `schedule` returns", "a PipelineSchedule")
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
    return PipelineSchedule(table.rows, ordered)
