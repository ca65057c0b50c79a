"""`OverlappedLoop`: iterations of a loop over several IPUs, executed as a pipeline.

The host queues the steps of a program, and each device executes its own in this order. An iteration may come back to a
device after work on others, as the backward pass of a pipeline does. In the order of the program, the device would wait
for these others, with its work for the next iterations queued behind. So steps have lags (`runtime.plan.lags`), and
those of several iterations are queued in turn.

Calls within the loop are part of this: each is a *frame* of values, which takes values from its caller when they are
read, and returns each result as soon as it is made.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from popxl.core.tensor import Tensor
from popxl.core.traits import is_call
from runtime.lowering.channels import FAILURE
from runtime.plan.host_steps import HostControlFlow, HostSteps, MemoryCurve, SubPlan
from runtime.plan.lags import Use, lags_of
from runtime.plan.segments import Key, PlanRun, Segment, Values

Place = tuple[int, Key]
"""A value within an iteration: its frame, and its key there. Frame 0 is that of the loop's graph."""


class Frame(dict[Any, Any]):
    """Values of one execution of a graph. Values from outside are taken over when they are first read.

    Args:
        own: initial values.
        outer: values of the caller, or of the previous iteration.
        keys: keys in `outer`, by keys of this frame.
        copies: IPUs to which values are copied, by key of this frame.
    """

    def __init__(
        self, own: Values, outer: Values, keys: Mapping[Any, Any], run: PlanRun, copies: Mapping[Any, int] | None = None
    ) -> None:
        super().__init__(own)
        self._outer, self._keys, self._run, self._copies = outer, dict(keys), run, copies or {}

    def __missing__(self, key: Key) -> Any:
        if key not in self._keys:
            raise KeyError(key)
        value = self._outer[self._keys.pop(key)]
        self[key] = self._run.copy_to_ipu(value, self._copies[key]) if key in self._copies else value
        return self[key]

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or (key in self._keys and self._keys[key] in self._outer)

    def detach(self) -> None:
        """Take over all values that have not been read, and release the outer ones."""
        for key in [*self._keys]:
            if self._keys[key] in self._outer:
                self[key]
        self._outer = {}


Frames = dict[int, Frame]


class _Enter(NamedTuple):
    """Begin of a call. It takes over values at once that the caller has overwritten when the graph reads them."""

    subplan: SubPlan
    outer: int
    frame: int
    at_once: tuple[Tensor, ...]

    def perform(self, frames: Frames, run: PlanRun) -> None:
        constants, keys = run.constants_of(self.subplan), self.subplan.keys_by_input
        frame = frames[self.frame] = Frame(constants, frames[self.outer], keys, run)
        for t in self.at_once:
            frame[t]


class _Copy(NamedTuple):
    """Copy of an operand of a call to another IPU."""

    frame: int
    t: Tensor
    ipu: int

    def perform(self, frames: Frames, run: PlanRun) -> None:
        values = frames[self.frame]
        values[self.t, self.ipu] = run.copy_to_ipu(values[self.t], self.ipu)


class _Execute(NamedTuple):
    """A step, and the values of callers that its results are: pairs of places."""

    step: Segment | HostControlFlow
    frame: int
    returned: tuple[tuple[Place, Place], ...]

    def perform(self, frames: Frames, run: PlanRun) -> None:
        run.execute(self.step, frames[self.frame])
        for (frame, t), (outer, result) in self.returned:
            frames[outer][result] = frames[frame][t]


class _Return(NamedTuple):
    """An input that a call returns unchanged: a copy, as the caller may overwrite it before the call has read it."""

    source: Place
    result: Place

    def perform(self, frames: Frames, run: PlanRun) -> None:
        frames[self.result[0]][self.result[1]] = run.duplicate(frames[self.source[0]][self.source[1]])


class _Drop(NamedTuple):
    """End of a value's life."""

    place: Place

    def perform(self, frames: Frames, run: PlanRun) -> None:
        frames[self.place[0]].pop(self.place[1], None)


class _Leave(NamedTuple):
    """End of a call."""

    frame: int

    def perform(self, frames: Frames, run: PlanRun) -> None:
        del frames[self.frame]


Action = _Enter | _Copy | _Execute | _Return | _Drop | _Leave


@dataclass
class OverlappedLoop:
    """Loop whose iterations overlap.

    Attributes:
        actions: actions of an iteration, by lag.
    """

    loop: HostControlFlow
    actions: tuple[tuple[Action, ...], ...]

    @classmethod
    def of(cls, loop: HostControlFlow) -> OverlappedLoop | None:
        """Overlapped execution of a loop; `None` if no step can be delayed."""
        subplan, body = loop.subplans[0], _Body()
        body.add(subplan.plan, 0)
        lags = lags_of(body.uses, {(0, t): (0, source) for t, source in subplan.carried.items()})
        if loop.iterations < 2 or not any(lags):
            return None
        by_lag: list[list[Action]] = [[] for _ in range(max(lags) + 1)]
        for action, lag in zip(body.actions, lags, strict=True):
            by_lag[lag].append(action)
        return cls(loop, tuple(map(tuple, by_lag)))

    def order(self, iterations: int) -> Iterator[tuple[int, int]]:
        """Order of execution: pairs of iteration and lag."""
        lags = range(len(self.actions))
        for number in range(iterations + len(lags) - 1):
            yield from ((number - lag, lag) for lag in lags if 0 <= number - lag < iterations)

    def iterate(self, values: Values, run: PlanRun, iterations: int) -> Iterator[Values]:
        """Run the first iterations, and yield the values of the loop's graph at the end of each."""
        subplan, last = self.loop.subplans[0], len(self.actions) - 1
        copies = dict(subplan.carried_copies)
        active: dict[int, Frames] = {}
        constants = run.constants_of(subplan)
        top = Frame(constants, values, subplan.keys_by_input, run)
        constants = {t: value for t, value in constants.items() if t not in subplan.carried}
        for iteration, lag in self.order(iterations):
            if lag == 0:
                if iteration:
                    top = Frame(constants, top, subplan.carried, run, copies)
                self.loop.set_number(top, self.loop.numbers[iteration], run)
                active[iteration] = {0: top}
            for action in self.actions[lag]:
                action.perform(active[iteration], run)
            if lag == last:
                ended = active.pop(iteration)[0]
                if iteration + 1 in active:
                    active[iteration + 1][0].detach()
                yield ended

    def add_to(self, curve: MemoryCurve, caller: Hashable) -> None:
        """Add as many iterations to a memory curve as overlap. `caller` tells executions of the loop apart."""
        last = len(self.actions) - 1
        for iteration, lag in self.order(min(self.loop.iterations, last + 1)):
            scope = (caller, self.loop.op, iteration)
            for action in self.actions[lag]:
                if isinstance(action, _Execute):
                    curve.add(action.step, (*scope, action.frame))
                    for (frame, t), (outer, result) in dict(action.returned).items():  # to the last caller
                        curve.move((*scope, frame), t, (*scope, outer), result)
                elif isinstance(action, _Drop):
                    frame, key = action.place
                    curve.drop((*scope, frame), key)
                elif isinstance(action, _Leave):
                    curve.release((*scope, action.frame))
            if lag == last:
                curve.release((*scope, 0))


@dataclass
class _Body:
    """Actions of an iteration, and the values that they use."""

    actions: list[Action] = field(default_factory=list)
    uses: list[Use] = field(default_factory=list)
    _frames: int = 0
    _written: set[Hashable] = field(default_factory=set)
    _bound: dict[Place, Place] = field(default_factory=dict)  # values of callers, by inputs of graphs
    _results: defaultdict[Place, list[Place]] = field(default_factory=lambda: defaultdict(list))  # likewise of results

    def add(self, plan: HostSteps, frame: int) -> None:
        """Add the steps of a graph."""
        for step in plan.steps:
            copied = [(frame, (t, ipu)) for t, ipu in step.copies]
            if isinstance(step, HostControlFlow) and is_call(step.op):
                for t, ipu in step.copies:
                    self._add(_Copy(frame, t, ipu), Use(self._sources((frame, t)), [(frame, (t, ipu))]), frame)
                self._add_call(step, frame)
                continue
            reads = [(frame, key) for key in (*step.operand_keys, *(t for t, _ in step.copies))]
            made = [(frame, t) for t in step.makes]
            returned = tuple((place, result) for place in made for result in self._returned(place))
            use = Use(
                [source for place in reads for source in self._sources(place) if place not in copied],
                [*copied, *made, *(result for _, result in returned)],
                [*((frame, key) for key in step.drops), *self._overwritten(step, frame)],
                step.ipu,
                [c for c in step.channels if c is not FAILURE],
            )
            self._add(_Execute(step, frame, returned), use, frame)

    def _add_call(self, step: HostControlFlow, outer: int) -> None:
        self._frames += 1
        frame, (subplan,) = self._frames, step.subplans
        inputs = subplan.keys_by_input
        self._bound.update({(frame, inner): (outer, key) for inner, key in inputs.items()})
        for t, inner in subplan.results:
            self._results[frame, inner].append((outer, t))
        made = {t for each in subplan.plan.steps for t in each.makes}
        overwritten = {t for t, inner in subplan.results if inner in inputs and inner in made}
        at_once = tuple(inner for inner, key in inputs.items() if key in overwritten and inner not in made)
        taken = [source for inner in at_once for source in self._sources((frame, inner))]
        self._add(_Enter(subplan, outer, frame, at_once), Use(taken, [(frame, ())]), outer)
        self.add(subplan.plan, frame)
        for t, inner in subplan.results:
            sources = self._sources((frame, inner))
            if (frame, inner) in self._written:
                self._drop((frame, inner))
            elif (outer, t) not in sources:
                for result in ((outer, t), *self._returned((outer, t))):
                    self._add(_Return((frame, inner), result), Use(sources, [result]), frame)
        for key in step.drops:
            self._drop((outer, key))
        self._add(_Leave(frame), Use(drops=[(frame, ())]))

    def _drop(self, place: Place) -> None:
        self._add(_Drop(place), Use(drops=[place]), place[0])

    def _add(self, action: Action, use: Use, frame: int = 0) -> None:
        """Add an action; `frame` is a frame that it needs."""
        self.actions.append(action)
        self._written.update(use.writes)
        self.uses.append(replace(use, reads=[*use.reads, (frame, ())]) if frame else use)

    def _sources(self, place: Place) -> list[Place]:
        """Values that are read for a value: itself, and those of callers that it may be or has been returned to."""
        sources = [place]
        while sources[-1] in self._bound:
            sources.append(self._bound[sources[-1]])
        returned = [result for each in sources if each in self._written for result in self._returned(each)]
        return [*dict.fromkeys((*sources, *returned))]

    def _overwritten(self, step: Segment | HostControlFlow, frame: int) -> list[Place]:
        """Values whose memory a step may take for results: those of callers are gone, too."""
        if isinstance(step, Segment):
            keys: Iterable[Key] = (step.keys.get(t, t) for t in step.donated)
        else:
            given_up = {*step.drops, *step.makes}
            keys = (key for key in step.operand_keys if key in given_up)
        return [source for key in keys for source in self._sources((frame, key))[1:]]

    def _returned(self, place: Place) -> Iterator[Place]:
        """Values of callers that a result is, or that an overwritten input is."""
        for result in self._results.get(place, ()):
            yield result
            yield from self._returned(result)
