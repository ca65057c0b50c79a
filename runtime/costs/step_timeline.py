"""`StepTimeline`: estimated timeline of a run, with its bounds and collectives. `runtime.costs.step` computes it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from popxl.base.pages import OnPage, Page, Picture, Table, seconds_text
from popxl.base.pictures import bars
from popxl.base.records import Record

LONGEST_TIMELINE = 400
"""Most spans of a timeline."""


class StepSpan(Record):
    """Activity of a chip during part of a run.

    Attributes:
        lane: "kernels", or asynchronous operations: "network", "host", "copies".
        name: name of the graph; in the lane "network", the collective and its line.
        start, end: seconds since the start of the run. For a loop, those of the first iteration.
    """

    lane: str
    name: str
    start: float
    end: float


class LineTraffic(Record):
    """Collectives of one source line.

    Attributes:
        line: the line, `train.py:12`; "" where XLA does not say.
        kind: kind of XLA collective: "all-reduce".
        over: the wires, the fastest first: "NVLink, InfiniBand NDR".
        algorithm: algorithm: "ring".
        count: number of executions in a run.
        seconds: total time.
        exposed: time that kernels wait for them.
    """

    line: str
    kind: str
    over: str
    algorithm: str
    count: int
    seconds: float
    exposed: float

    def added(self, times: int, earlier: LineTraffic | None) -> LineTraffic:
        """Traffic of `times` such runs, with that of earlier ones of this line."""
        numbers = (self.count, self.seconds, self.exposed)
        before = (0, 0.0, 0.0) if earlier is None else (earlier.count, earlier.seconds, earlier.exposed)
        count, seconds, exposed = (each + times * number for each, number in zip(before, numbers, strict=True))
        return self.model_copy(update={"count": count, "seconds": seconds, "exposed": exposed})


class StepTimeline(OnPage, Record):
    """Estimated timeline of a program's run on one chip.

    Attributes:
        seconds: time from start to end.
        limits: share of each bound in this time: "compute", "memory", "launch" of kernels; exposed time of "network"
            and "host"; and "dispatch", the calls of the host. Of several IPUs, those of all of them together.
        graphs: `limits` of each graph, by name; "" for the main graph.
        inclusive: seconds of each graph but the main graph, with those of the graphs that it calls.
        traffic: collectives by lines, those that kernels wait longest for first.
        spans: activities in order; for each loop, those of the first iteration.
    """

    seconds: float
    limits: Mapping[str, float]
    graphs: Mapping[str, Mapping[str, float]]
    inclusive: Mapping[str, float]
    traffic: tuple[LineTraffic, ...]
    spans: tuple[StepSpan, ...]

    @property
    def exposed(self) -> float:
        """Seconds that kernels wait for the network."""
        return self.limits.get("network", 0.0)

    def page(self) -> Page:
        """Page for `print`, notebooks and browsers."""
        together = sum(self.limits.values())
        total = max(self.seconds, together) or 1.0
        rows = [[name, seconds_text(each), f"{100 * each / total:.0f} %"] for name, each in self.limits.items() if each]
        parts: list[Any] = [Table(["bound by", "of a run", "share"], rows)]
        if together > 1.01 * self.seconds:
            parts.append("Several devices work at the same time. Times and shares are those of all of them together.")
        traffic = [
            [each.kind, each.line or "unknown", each.over, each.algorithm, str(each.count), seconds_text(each.seconds)]
            + [seconds_text(each.exposed)]
            for each in self.traffic
        ]
        columns = ["collective", "line", "over", "by", "in a run", "takes", "not hidden"]
        parts += [Page("Over the wires", [*Table.first_rows(columns, traffic)])] if traffic else []
        parts += [self.picture()] if self.spans else []
        return Page(f"A run of {seconds_text(self.seconds)}, estimated", parts)

    def picture(self) -> Picture:
        """Timeline picture with one lane for kernels, and one per kind of asynchronous operation."""
        return bars("A run, estimated", ((s.lane, s.name, s.start, s.end) for s in self.spans))


def combined(parts: Sequence[tuple[StepTimeline, int]], seconds: float, dispatch: float) -> StepTimeline:
    """Timeline of executables with their numbers of executions, `seconds` long in total.

    The host takes `dispatch` seconds to call each. The spans are those of each executable once, one after the other.
    """
    limits, graphs = defaultdict[str, float](float), defaultdict[str, dict[str, float]](dict)
    inclusive = defaultdict[str, float](float)
    traffic: dict[tuple[str, str, str, str], LineTraffic] = {}
    spans, begin = list[StepSpan](), 0.0
    for part, times in parts:
        for name, own in part.graphs.items():
            for limit, each in own.items():
                limits[limit] += times * each
                graphs[name][limit] = graphs[name].get(limit, 0.0) + times * each
        for name, each in part.inclusive.items():
            inclusive[name] += times * each
        for each_line in part.traffic:
            key = each_line.line, each_line.kind, each_line.over, each_line.algorithm
            traffic[key] = each_line.added(times, traffic.get(key))
        spans += (s.model_copy(update={"start": s.start + begin, "end": s.end + begin}) for s in part.spans)
        begin += part.seconds
    if dispatch:
        limits["dispatch"] += dispatch * sum(times for _, times in parts)
    return StepTimeline(
        seconds=seconds,
        limits=dict(limits),
        graphs=dict(graphs),
        inclusive=dict(inclusive),
        traffic=tuple(sorted(traffic.values(), key=lambda each: -each.exposed)),
        spans=tuple(spans[:LONGEST_TIMELINE]),
    )
