"""List scheduling of pipelines under a memory limit, by several rules.

A list scheduler goes through time. Whenever a device is free, it starts one of the tasks that are ready there, by
priority (Graham 1969, https://doi.org/10.1137/0117039). A rule determines the ready tasks and their priorities:

- whether stages that are far from the end go first, or those that are near;
- how far a stage may be ahead of the stage on its device that reads its activations: as far as with 1F1B, half of the
  stages in between, or any number of micro-batches;
- the number of micro-batches in flight at a time.

In addition each device may hold a number of bytes for later stages. `PipelineSchedule.search` tries rules until one
reaches the lower bound of the time of any schedule.

Stages without readers, such as gradients of weights that are stages of their own, come last. They fill the time that
devices would wait, which is the idea of zero-bubble schedules (Qi et al. 2023, https://arxiv.org/abs/2401.10241, and
with V-shaped stages Qi et al. 2024, https://arxiv.org/abs/2405.15362).
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

Rows = list[list["Task"]]


class Task(NamedTuple):
    """Execution of a stage for a micro-batch."""

    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}:{self.micro_batch}"


class PipelineValue(NamedTuple):
    """A value passed from one stage to others, per micro-batch.

    Attributes:
        name: name in the program.
        made_in: stage that makes it.
        read_in: stages that read it.
        nbytes: size in bytes.
        device: device where it waits, by its row in the schedule.
    """

    name: str
    made_in: int
    read_in: tuple[int, ...]
    nbytes: int
    device: int


class Rule(NamedTuple):
    """Rule by which a free device chooses its next task.

    Attributes:
        forward_first: whether stages far from the end go first, else those near it.
        limits_lead: whether a stage's lead over the one that reads its activations is limited as in 1F1B.
        under_way: largest number of micro-batches in flight, or `None` for any number.
    """

    forward_first: bool
    limits_lead: bool
    under_way: int | None


@dataclass(frozen=True)
class Pipeline:
    """Pipeline stages, with the data of a scheduler.

    Attributes:
        device_of: the device of each stage, numbered from 0.
        needs: for each stage, the stages whose results it reads, all of them before it.
        steps: the number of micro-batches.
        durations: time of each stage.
        values: values for later stages.
    """

    device_of: Sequence[int]
    needs: Sequence[Sequence[int]]
    steps: int
    durations: Sequence[float]
    values: Sequence[PipelineValue]

    @property
    def devices(self) -> int:
        """The number of devices."""
        return max(self.device_of) + 1

    @cached_property
    def device_stages(self) -> list[list[int]]:
        """The stages of each device."""
        return [[s for s, d in enumerate(self.device_of) if d == device] for device in range(self.devices)]

    @cached_property
    def last(self) -> list[int]:
        """Stages whose results no other stage reads."""
        reads = set(itertools.chain(*self.needs))
        return [s for s in range(len(self.needs)) if s not in reads]

    @cached_property
    def fillers(self) -> set[int]:
        """Stages without readers, which fill idle time of their device, if several exist."""
        return {*self.last} if len(self.last) > 1 else set()

    @cached_property
    def head(self) -> list[float]:
        """Length of the critical path from the start to each stage."""
        lengths: list[float] = []
        for need in self.needs:
            lengths.append(max((lengths[n] + self.durations[n] for n in need), default=0.0))
        return lengths

    @cached_property
    def tail(self) -> list[float]:
        """Length of the critical path from each stage to the end, without this stage."""
        lengths = [0.0] * len(self.needs)
        for stage in reversed(range(len(self.needs))):
            for n in self.needs[stage]:
                lengths[n] = max(lengths[n], lengths[stage] + self.durations[stage])
        return lengths

    @cached_property
    def least_seconds(self) -> float:
        """Lower bound on the time of any schedule: a device's work, between critical paths to and from it."""
        return max(
            min(self.head[s] for s in stages)
            + self.steps * sum(self.durations[s] for s in stages)
            + min(self.tail[s] for s in stages)
            for stages in self.device_stages
        )

    @cached_property
    def leads(self) -> dict[int, tuple[int, int]]:
        """Reader on the same device, with 1F1B's lead over it, for stages that have one."""
        reader_leads = {}
        for reader, need in enumerate(self.needs):
            for s in need:
                if self.device_of[s] == self.device_of[reader] and reader not in self.fillers and s not in reader_leads:
                    reader_leads[s] = reader, (reader - s - 1) // 2 + 1
        return reader_leads

    def rules(self) -> Iterator[Rule]:
        """Rules worth trying, frugal ones first."""
        d = self.devices
        counts = dict.fromkeys(n for n in (d, d + 1, 2 * d, 3 * d // 4, d // 2, d // 4, 1) if 0 < n < self.steps)
        for under_way, limits_lead, forward_first in itertools.product([*counts, None], (True, False), (True, False)):
            yield Rule(forward_first, limits_lead, under_way)


def list_schedule(pipeline: Pipeline, rule: Rule, memory: float = math.inf) -> Rows | None:
    """Schedule rows from one priority rule; `None` if no step fits into `memory` bytes on each device.

    A table has no pauses, so a device that would only wait for the memory of another one continues when the table is
    run. `PipelineSchedule.simulate` determines the real memory of its rows.
    """
    scheduler = _ListScheduler(pipeline, rule, memory)
    rows: Rows = [[] for _ in range(pipeline.devices)]
    running: list[tuple[float, int, Task]] = []
    now, free = 0.0, {*range(pipeline.devices)}
    while True:
        for device in sorted(free):
            if (task := scheduler.next_task(device)) is not None:
                scheduler.start(task)
                free.remove(device)
                rows[device].append(task)
                heapq.heappush(running, (now + pipeline.durations[task.stage], device, task))
        if not running:
            return rows if scheduler.is_complete else None
        now = running[0][0]
        while running and running[0][0] == now:
            _, device, task = heapq.heappop(running)
            free.add(device)
            scheduler.finish(task)


class _ListScheduler:
    """State of a list schedule: started and finished tasks of each stage, and memory in use.

    A value takes memory from the start of the task that makes it to the end of the last one that reads it.
    """

    def __init__(self, pipeline: Pipeline, rule: Rule, memory: float) -> None:
        self._pipeline, self._rule, self._memory = pipeline, rule, memory
        stages = range(len(pipeline.needs))
        sign = -1 if rule.forward_first else 1
        order = [(s in pipeline.fillers, sign * pipeline.tail[s]) for s in stages]
        self._by_priority = [sorted(own, key=order.__getitem__) for own in pipeline.device_stages]
        self._leads = pipeline.leads if rule.limits_lead else {}
        self._started, self._finished = [0] * len(stages), [0] * len(stages)
        self._allocated = [0] * pipeline.devices
        self._allocations: list[Counter[int]] = [Counter() for _ in stages]  # bytes on each device
        self._reads: list[list[int]] = [[] for _ in stages]
        for i, value in enumerate(pipeline.values):
            self._allocations[value.made_in][value.device] += value.nbytes
            for s in {*value.read_in}:
                self._reads[s].append(i)
        self._reader_counts = [len({*value.read_in}) for value in pipeline.values]
        self._finished_readers = Counter[tuple[int, int]]()  # of a value of a micro-batch

    @property
    def is_complete(self) -> bool:
        """Whether all tasks are finished."""
        return min(self._finished) == self._pipeline.steps

    def next_task(self, device: int) -> Task | None:
        """The ready task with the highest priority on a device, if any."""
        stage = next(filter(self._is_ready, self._by_priority[device]), None)
        return None if stage is None else Task(stage, self._started[stage])

    def _is_ready(self, stage: int) -> bool:
        number, finished, pipeline = self._started[stage], self._finished, self._pipeline
        needs, under_way = pipeline.needs[stage], self._rule.under_way
        if number == pipeline.steps or any(finished[n] <= number for n in needs):
            return False
        if stage in self._leads:
            reader, lead = self._leads[stage]
            if number - finished[reader] >= lead:
                return False
        if not needs and under_way is not None and number - min(finished[n] for n in pipeline.last) >= under_way:
            return False
        return all(self._allocated[d] + nbytes <= self._memory for d, nbytes in self._allocations[stage].items())

    def start(self, task: Task) -> None:
        """Start a task: allocates what it makes."""
        self._started[task.stage] += 1
        for device, nbytes in self._allocations[task.stage].items():
            self._allocated[device] += nbytes

    def finish(self, task: Task) -> None:
        """Finish a task: frees the values that it was the last to read."""
        self._finished[task.stage] += 1
        for i in self._reads[task.stage]:
            self._finished_readers[i, task.micro_batch] += 1
            if self._finished_readers[i, task.micro_batch] == self._reader_counts[i]:
                value = self._pipeline.values[i]
                self._allocated[value.device] -= value.nbytes
