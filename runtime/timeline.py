"""Recorded timeline of a run: execution times per executable and device.

Executables are dispatched asynchronously, so end times are measured in background threads: one thread per device waits
for the results of each executable in turn. An execution starts once it is dispatched, its arguments are available, and
the previous execution on the device has ended.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from typing import Any

import jax
from pydantic import BaseModel, ConfigDict

from popxl.base.arrays import Array
from popxl.base.pages import OnPage, Page, Picture, Table, seconds_text
from popxl.base.pictures import bars
from popxl.base.records import Record
from runtime.jax_private import copied

COPY = "copied here"
"""Span name of copies from another device."""


class Span(Record):
    """Execution span of one executable.

    Attributes:
        device: name of the device.
        name: name of the executable, or `COPY`.
        start, end: seconds since the start of the recording.
    """

    device: str
    name: str
    start: float
    end: float


class Timeline(OnPage, BaseModel):
    """Execution times of executables per device. Complete when the recording ends; see `Session.recording`.

    Attributes:
        spans: executions, ordered by end time on each device.

    Example:
        >>> with popxl.Session(ir) as session, session.recording() as timeline:
        ...     outputs = session.run(inputs)
        >>> print(timeline)
        >>> timeline.picture().save("timeline.svg")
    """

    model_config = ConfigDict(defer_build=True)

    spans: list[Span] = []

    def __repr__(self) -> str:
        return f"Timeline[{len(self.spans)} spans]"

    def devices(self) -> list[str]:
        """Devices with recorded executions."""
        return list(dict.fromkeys(span.device for span in self.spans))

    @property
    def seconds(self) -> float:
        """Seconds from first start to last end."""
        return max((s.end for s in self.spans), default=0.0) - min((s.start for s in self.spans), default=0.0)

    def page(self) -> Page:
        """Page for `print` and notebooks: executables of each device, with counts and durations."""
        times: dict[tuple[str, str], list[float]] = defaultdict(list)
        for span in self.spans:
            times[span.device, span.name].append(span.end - span.start)
        if not times:
            return Page("Timeline", ["Nothing has run."])
        rows = [
            [device, name, str(len(each)), seconds_text(sum(each)), f"{100 * sum(each) / self.seconds:.0f} %"]
            for (device, name), each in times.items()
        ]
        columns = ["device", "what", "runs", "time", "share"]
        title = f"Timeline of {seconds_text(self.seconds)}"
        return Page(title, [Table(columns, rows), *([self.picture()] if self.spans else [])])

    def picture(self) -> Picture:
        """Timeline picture: one lane per device, one bar per execution."""
        begin = min((span.start for span in self.spans), default=0.0)
        spans = sorted(self.spans, key=lambda span: span.device)
        return bars("Timeline", ((s.device, s.name, s.start - begin, s.end - begin) for s in spans))


class Recorder:
    """Recorder that calls executables and measures their times.

    Args:
        timeline: receives the spans; complete after `finish`.
    """

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._began = perf_counter()
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)  # else a woken thread may wait milliseconds for the interpreter
        self._lanes: dict[Any, ThreadPoolExecutor] = {}
        self._ends: dict[Any, float] = {}
        self._pending: dict[int, tuple[Array, Mapping[Any, Future[float]]]] = {}

    def __call__(self, name: str, executable: Any, *arguments: Any) -> Any:
        """Call an executable. Waits only for donated arguments, as these are unavailable afterwards."""
        infos, arrays = jax.tree.leaves(executable.args_info), jax.tree.leaves(arguments)
        reads = []
        for info, array in zip(infos, arrays, strict=True):
            known, ends = self._pending.get(id(array), (None, {}))
            if known is array and known is not None:
                reads.append(ends)
                if info.donated:
                    for end in ends.values():
                        end.result()
        start = perf_counter()
        results = executable(*arguments)
        self._watch(name, start, reads, [r for r in jax.tree.leaves(results) if isinstance(r, jax.Array)])
        return results

    def copy(self, array: Array, sharding: Any) -> Array:
        """Copy an array to other devices, recording the copy."""
        known, ends = self._pending.get(id(array), (None, {}))
        start = perf_counter()
        copy = copied(array, sharding)
        self._watch(COPY, start, [ends] if known is array else [], [copy])
        return copy

    def _watch(self, name: str, start: float, reads: list[Mapping[Any, Future[float]]], results: list[Array]) -> None:
        """Watch results in background threads, separately for each device."""
        parts: dict[Any, list[Array]] = defaultdict(list)
        for array in results:
            for shard in array.addressable_shards:
                parts[shard.device].append(shard.data)
        ends = {}
        for device, waited in parts.items():
            needs = [end for known in reads for end in ([known[device]] if device in known else known.values())]
            key = (device, name == COPY)  # a device computes while a copy to it waits for another device
            lane = self._lanes.setdefault(key, ThreadPoolExecutor(1, f"watching {device}"))
            ends[device] = lane.submit(self._end, key, name, start, needs, waited)
        self._pending.update((id(array), (array, ends)) for array in results)
        for end in ends.values():
            end.add_done_callback(lambda _: self._forget(ends, results))

    def _forget(self, ends: Mapping[Any, Future[float]], results: list[Array]) -> None:
        """Forget completed arrays: their readers need not wait."""
        if all(end.done() for end in ends.values()):
            for array in results:
                self._pending.pop(id(array), None)

    def _end(self, lane: Any, name: str, start: float, needs: list[Future[float]], waited: list[Array]) -> float:
        """Wait for arrays on a device, and record their completion. Returns the completion time."""
        jax.block_until_ready(waited)
        end = perf_counter()
        start = min(max([start, self._ends.get(lane, start), *(need.result() for need in needs)]), end)
        self._ends[lane] = end
        device, _ = lane
        span = Span(device=str(device), name=name, start=start - self._began, end=end - self._began)
        self._timeline.spans.append(span)
        return end

    def finish(self) -> None:
        """Wait for completion of all calls."""
        for lane in self._lanes.values():
            lane.shutdown()
        sys.setswitchinterval(self._interval)
