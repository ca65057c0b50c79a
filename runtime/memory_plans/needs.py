"""Needs of graphs for a memory plan: bytes of activations, time of their use by gradients, costs of recomputation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from runtime.costs.network import LinkSpan, collective_time
from runtime.targets.chip import Chip

FLOPS, BANDWIDTH = 1e11, 2e10
"""Rates of a device without published figures. Their ratio matters: operations per byte."""

_WINDOWS = 40
"""Maximum number of windows of a backward call, for activations that are recomputed as they are read."""


def memory_bandwidth(chip: Chip | None) -> float:
    """Bytes per second between a device's memory and its cores."""
    return BANDWIDTH if chip is None else chip.memory_bandwidth


def host_bandwidth(chip: Chip | None) -> float:
    """Bytes per second between a device and its host's memory."""
    return BANDWIDTH / 10 if chip is None else chip.host_bandwidth


class ReplicaExchange(NamedTuple):
    """A collective.

    Attributes:
        kind: its kind in XLA's terms: "all-gather".
        bytes: bytes of a replica: of operands or results, whichever is more.
        members: number of replicas in a group.
        reach: number of replicas from the first to the last of a group.
        times: number of executions.
    """

    kind: str
    bytes: int
    members: int
    reach: int
    times: int = 1

    def seconds(self, chip: Chip) -> float:
        """Seconds over the fastest links that join so many chips, one for each replica."""
        link = next((link for link in chip.levels if link.chips is None or self.reach <= link.chips), chip.levels[-1])
        return self.times * collective_time(chip, self.kind, self.bytes, [LinkSpan(link, self.members)]).seconds


@dataclass(frozen=True)
class OpNeeds:
    """Cost of recomputing an op of a forward graph.

    Attributes:
        operands, results: paths of activations.
        products: operations of matrix products and convolutions.
        bytes: bytes that it reads and writes, beyond those that the readers of its results would.
        dtype: dtype of the factors.
        is_fused: whether the first result is fused into the kernels that read it, and so not in memory, if these are in
            the same graph.
        exchanges: collectives, which cost nothing beyond their bytes in memory without published figures.
        fused_bytes: the same as `bytes` on devices whose products compute their factors from operands in memory, if the
            first result is fused there.
        statistics: further results, with which the first one is elementwise: a mean.
        is_kernel: whether it is attention: where a kernel of its own computes it, XLA fuses nothing into it.
    """

    operands: tuple[str, ...]
    results: tuple[str, ...]
    products: int
    bytes: int
    dtype: str
    is_fused: bool = False
    exchanges: tuple[ReplicaExchange, ...] = ()
    fused_bytes: int | None = None
    statistics: tuple[str, ...] = ()
    is_kernel: bool = False

    def seconds(self, chip: Chip | None) -> float:
        """Seconds by published figures."""
        flops = FLOPS if chip is None else chip.rate(self.dtype)
        network = 0.0 if chip is None else sum(each.seconds(chip) for each in self.exchanges)
        return self.products / flops + self.bytes / memory_bandwidth(chip) + network

    def divided(self, devices: int) -> OpNeeds:
        """The part of the op that each of several devices computes."""
        fused_bytes = None if self.fused_bytes is None else self.fused_bytes // devices
        return replace(self, products=self.products // devices, bytes=self.bytes // devices, fused_bytes=fused_bytes)

    def with_fused_factors(self) -> OpNeeds:
        """The same op on devices whose products compute their factors from operands in memory."""
        return self if self.fused_bytes is None else replace(self, is_fused=True, bytes=self.fused_bytes)


@dataclass(frozen=True)
class GraphNeeds:
    """The activations of a graph.

    Attributes:
        name: name of the graph.
        calls: number of calls in a step.
        bytes: size of each activation, by path.
        read: paths of activations that the gradient itself reads, each with the first and the last step of the backward
            call that reads it.
        ops: the ops that compute them, in order.
        steps: bytes of the gradient's own values in each step of the backward call.
        gradients: bytes that a backward call leaves until the end of the step: gradients of variables.
        ends: possible sizes of a first group of calls.
        span: first and last of its calls, among those of all graphs in the order of the step.
        live_steps: number of steps with activations in memory at a time: micro-batches of a pipeline's stage.
        as_read: whether activations are recomputed right before they are read; else when the backward call begins.
        waiting_gradients: `gradients` where variables are updated as soon as possible: gradients of updates that wait
            for others, as for a norm of all.
        model: name of the model that calls the graph, if several are planned together.
        live_models: other models with activations on the same device while this model is differentiated, each with the
            number of its calls that wait for their gradients.
        ended_models: other models with gradients on the same device meanwhile.
        ipus: IPUs that call the model; `None` for calls without one.
        device_bytes: bytes that its device has in use besides, more than the fullest device.
    """

    name: str
    calls: int
    bytes: Mapping[str, int]
    read: Mapping[str, tuple[int, int]]
    ops: tuple[OpNeeds, ...]
    steps: tuple[int, ...] = (0,)
    gradients: int = 0
    ends: tuple[int, ...] = ()
    span: tuple[int, int] = (0, 0)
    live_steps: int = 1
    as_read: bool = False
    waiting_gradients: int = 0
    model: str = ""
    live_models: Mapping[str, int] = field(default_factory=dict)
    ended_models: frozenset[str] = frozenset()
    ipus: frozenset[int | None] = frozenset()
    device_bytes: float = 0.0

    def divided(self, devices: int) -> GraphNeeds:
        """The part of each of several devices that divide all values."""
        return replace(
            self,
            bytes={path: size // devices for path, size in self.bytes.items()},
            ops=tuple(op.divided(devices) for op in self.ops),
            steps=tuple(size // devices for size in self.steps),
            gradients=self.gradients // devices,
            waiting_gradients=self.waiting_gradients // devices,
        )

    def with_fused_factors(self) -> GraphNeeds:
        """The same graph on devices whose products compute their factors from operands in memory."""
        return replace(self, ops=tuple(op.with_fused_factors() for op in self.ops))

    def with_early_updates(self) -> GraphNeeds:
        """The same graph where variables are updated as soon as possible."""
        return replace(self, gradients=self.waiting_gradients)

    @cached_property
    def windows(self) -> tuple[tuple[int, int, int], ...]:
        """Parts of the backward call: the first step, the step after the last, and the most bytes of gradient values.

        Each begins where the gradient reads an activation for the first time.
        """
        starts = evenly_spaced(sorted({0, *(first for first, _ in self.read.values())}), _WINDOWS)
        ends = [*starts[1:], len(self.steps)]
        return tuple((i, j, max(self.steps[i:j])) for i, j in zip(starts, ends, strict=True))

    @cached_property
    def needed_until(self) -> Mapping[str, int]:
        """Last step that may need each activation, to read it or to recompute others from it."""
        last = {path: step for path, (_, step) in self.read.items()}
        for op in reversed(self.ops):
            computed = max((self.computed_by[path] for path in op.results), default=0)
            for path in op.operands:
                last[path] = max(last.get(path, 0), computed)
        return last

    @cached_property
    def computed_by(self) -> Mapping[str, int]:
        """Latest step for recomputing each activation: that of its first reader, or of a value computed from it."""
        known = dict.fromkeys(self.bytes, 0)
        for op in reversed(self.ops):
            for path in op.results:
                known[path] = self.read[path][0] if path in self.read else known[path]
            latest = max((known[path] for path in op.results), default=0)
            for path in op.operands:
                known[path] = max(known[path], latest)
        return known

    @cached_property
    def moments(self) -> tuple[tuple[frozenset[str], int], ...]:
        """Live activations, if all are needed, and bytes of gradient values, in the backward call's most demanding
        steps.

        A recomputed value is live from the first step that needs it, or needs a value computed from it.
        """
        first = {path: step for path, (step, _) in self.read.items()}
        last = {path: step for path, (_, step) in self.read.items()}
        for op in reversed(self.ops):
            reading_steps = [first[path] for path in op.results if path in first]
            if not reading_steps:
                continue
            for path in op.operands:
                first[path] = min(first.get(path, reading_steps[0]), *reading_steps)
                last[path] = max(last.get(path, 0), *reading_steps)
        candidates = [
            (frozenset(path for path in first if first[path] <= step <= last[path]), own)
            for step, own in enumerate(self.steps)
        ]
        most: list[tuple[frozenset[str], int]] = []
        for paths, own in sorted(candidates, key=lambda each: (len(each[0]), each[1]), reverse=True):
            if not any(paths <= others and own <= more for others, more in most):
                most.append((paths, own))
        return tuple(most)


def evenly_spaced(numbers: Sequence[int], most: int) -> Sequence[int]:
    """At most `most` of these numbers, evenly spaced, including the first and the last."""
    if len(numbers) <= most:
        return numbers
    return sorted({numbers[round(i * (len(numbers) - 1) / (most - 1))] for i in range(most)})
