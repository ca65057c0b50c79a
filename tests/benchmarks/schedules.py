"""Pipelines under each schedule: the time that the simulator predicts beside the time that a run takes.

    python -m tests.benchmarks.schedules                       # as many CPU devices as cores, up to four
    python -m tests.benchmarks.schedules --pictures folder     # and a picture of each: predicted, and measured

Layers are trained by hand-written gradients: forward stages, backward stages and, for zero bubble, stages with the
gradients of weights. How long a stage takes is measured in a program of its own. The simulator makes a time of that,
which knows no copies and no dispatch. Then the schedules take turns.

This tells something only where each device has a core of its own. So a stage that is measured alone gets no more cores
than it will have beside the others, and how many it does use is measured, too. With fewer cores than devices the
command says so, and measures all the same.
"""

import argparse
import os
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, List  # noqa: UP035  # as `TensorByRef` is known in that

if __name__ == "__main__":  # before JAX starts: so that one stage does not take the cores of another
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np

import popxl
import popxl_addons as addons
from popxl import ops
from popxl.base.pages import Picture
from popxl.base.pictures import Bar, bars
from popxl_addons.transforms.schedule import PipelineTimeline
from tests.benchmarks.harness import check_agreement, progress, seconds

SCHEDULES = {"gpipe": 1, "1f1b": 1, "1f1b, interleaved": 2, "zero_bubble": 1}
"""How many forward stages each device has."""


@dataclass(frozen=True)
class Work:
    """What is trained: so many layers for each device, and what goes through them in one run."""

    devices: int
    steps: int
    layers: int = 8
    width: int = 256
    rows: int = 256

    def data(self) -> np.ndarray:
        """The micro-batches of one run; always the same."""
        return np.random.default_rng(1).normal(size=(self.steps, self.rows, self.width)).astype(np.float32)


def forward(x: popxl.Tensor, weights: list[popxl.Tensor]) -> list[popxl.Tensor]:
    """What each layer of a stage gives."""
    return [x := ops.tanh(x @ w) for w in weights]


def backward(gradient: popxl.Tensor, outputs: list[popxl.Tensor], weights: list[popxl.Tensor]) -> list[popxl.Tensor]:
    """The gradient of what a stage is given, and those of its products."""
    slopes = []
    for y, w in zip(reversed(outputs), reversed(weights), strict=True):
        slopes.insert(0, gradient * (1.0 - y * y))
        gradient = slopes[0] @ w.T
    return [gradient, *slopes]


def gradients(inputs: list[popxl.Tensor], slopes: list[popxl.Tensor], sums: List[popxl.TensorByRef]) -> None:  # noqa: UP006
    """Add the gradients of the weights of a stage to their sums."""
    for x, slope, total in zip(inputs, slopes, sums, strict=True):
        total += x.T @ slope


class Training:
    """Layers `tanh(x @ w)` under a schedule, and the sums of the gradients of half the sum of the squared outputs.

    Args:
        work: what is trained.
        name: the schedule, one of `SCHEDULES`.
    """

    def __init__(self, work: Work, name: str) -> None:
        self.work = work
        parts = SCHEDULES[name]
        count, self.per_stage = work.devices * parts, work.layers // parts
        ir = popxl.Ir()
        ir.num_host_transfers = work.steps
        ir.options.placement = "several"
        shape = (work.width, work.width)
        rng = np.random.default_rng(0)
        with ir.main_graph:
            self.stream = popxl.h2d_stream((work.rows, work.width), popxl.float32, "data")
            weights = [
                popxl.variable(rng.normal(0, work.width**-0.5, shape), popxl.float32, f"w{i}")
                for i in range(work.devices * work.layers)
            ]
            self.sums = [popxl.variable(np.zeros(shape), popxl.float32, f"sum{i}") for i in range(len(weights))]
            x = popxl.TensorSpec((work.rows, work.width), popxl.float32)
            xs, ws = [x] * self.per_stage, [weights[0].spec] * self.per_stage
            self.forward = ir.create_graph(forward, x, ws)
            self.backward = ir.create_graph(backward, x, xs, ws)
            self.gradients = ir.create_graph(gradients, xs, xs, ws)
            with addons.pipelined_execution(work.steps, name.split(",")[0]) as self.pipeline:
                self._stages(count, weights, is_apart=name == "zero_bubble")
        self.session = popxl.Session(ir, "ipu_hw")

    def _stages(self, count: int, weights: Sequence[popxl.Tensor], is_apart: bool) -> None:
        """Forward stages, backward stages in reverse, and the gradients of weights: with these, or apart."""
        stage, devices, kept = self.pipeline.stage, self.work.devices, self.pipeline.stash_and_restore_tensor
        own = [slice(s * self.per_stage, (s + 1) * self.per_stage) for s in range(count)]
        values: list[list[popxl.Tensor]] = []
        x = popxl.constant(0.0)
        for s in range(count):
            with stage(s), popxl.ipu(s % devices):
                x = ops.host_load(self.stream) if s == 0 else x
                values.append([x, *ops.call(self.forward, x, weights[own[s]])])
                x = values[s][-1]
                x = x.copy_to_ipu((s + 1) % devices) if s + 1 < count else x
        slopes: dict[int, list[popxl.Tensor]] = {}
        gradient = x
        for k, s in enumerate(reversed(range(count))):
            with stage(count + k), popxl.ipu(s % devices):
                gradient = kept(gradient) if s + 1 == count else gradient
                outputs = [kept(y) for y in values[s][1:]]
                gradient, *slopes[s] = ops.call(self.backward, gradient, outputs, weights[own[s]])
                if not is_apart:
                    ops.call(self.gradients, [kept(x) for x in values[s][:-1]], slopes[s], self.sums[own[s]])
                if s > 0:
                    gradient = gradient.copy_to_ipu((s - 1) % devices)
        for k, s in enumerate(reversed(range(count)) if is_apart else ()):
            with stage(2 * count + k), popxl.ipu(s % devices):
                inputs = [kept(x) for x in values[s][:-1]]
                ops.call(self.gradients, inputs, [kept(t) for t in slopes[s]], self.sums[own[s]])

    def run(self) -> None:
        """Send all micro-batches through."""
        data = self.work.data()
        self.session.run({self.stream: data.reshape(self.session.host_shape(self.stream))})


@dataclass(frozen=True)
class Durations:
    """What a stage of some layers takes, in seconds, if nothing else runs.

    Attributes:
        forward, backward, gradients: each kind of work.
        cores: how many cores it keeps busy meanwhile.
    """

    forward: float
    backward: float
    gradients: float
    cores: float

    def of_stages(self, count: int, is_apart: bool) -> list[float]:
        """Those of all stages of a schedule with so many forward stages."""
        back = [self.backward] * count + [self.gradients] * count
        return [self.forward] * count + (back if is_apart else [self.backward + self.gradients] * count)


KINDS = ("forward", "backward", "gradients")


def kind_of(name: str, count: int) -> str | None:
    """What a piece of a recorded run is, of a program with so many forward stages: a kind of work, or a copy, say."""
    if found := re.search(r"pipeline_stage_(\d+)", name):
        return KINDS[int(found[1]) // count]
    return next((kind for kind in KINDS if f"{kind}_subgraph" in name), None)


def durations(work: Work, layers: int, rounds: int) -> Durations:
    """Those of stages of some layers, each in a program of its own, with the cores that it will have beside others."""
    x, w = (popxl.TensorSpec((n, work.width), popxl.float32) for n in (work.rows, work.width))
    xs, ws = [x] * layers, [w] * layers
    given: Mapping[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "forward": (forward, (x, ws)),
        "backward": (backward, (x, xs, ws)),
        "gradients": (gradients, (xs, xs, ws)),
    }
    wall, busy = {}, {}
    with on_cores(max(1, cores_here() // work.devices)):
        for kind, (stage, specs) in given.items():
            with alone(stage, specs) as run:
                begin = time.perf_counter(), time.process_time()
                took = [timed(run) for _ in range(rounds)]
                wall[kind] = statistics.median(took)
                busy[kind] = (time.process_time() - begin[1]) / (time.perf_counter() - begin[0])
    return Durations(**wall, cores=max(busy.values()))


@contextmanager
def alone(stage: Callable[..., Any], specs: Sequence[Any]) -> Iterator[Callable[[], None]]:
    """A program that runs one stage, of variables: the function runs it, and waits for its end."""
    ir = popxl.Ir()
    rng = np.random.default_rng(0)

    def variable(spec: popxl.TensorSpec) -> popxl.Tensor:
        return popxl.variable(rng.normal(0, spec.shape[-1] ** -0.5, spec.shape), spec.dtype)

    with ir.main_graph, popxl.in_sequence():
        inputs = jax.tree.map(variable, specs, is_leaf=lambda spec: isinstance(spec, popxl.TensorSpec))
        for y in ops.call(ir.create_graph(stage, *specs), *inputs) or ():
            ops.var_updates.copy_var_update_(popxl.variable(np.zeros(y.shape), y.dtype), y)

    with popxl.Session(ir, "ipu_hw") as session:

        def run() -> None:
            session.run()
            jax.block_until_ready(session.store.present())

        run()
        yield run


def timed(run: Callable[[], None]) -> float:
    """The seconds of one run."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


@dataclass(frozen=True)
class Result:
    """One schedule.

    Attributes:
        name: its name.
        predicted: what the simulator says of it.
        measured: the seconds of runs.
        recorded: a run: for each piece of work the device, the kind, start and end.
    """

    name: str
    predicted: PipelineTimeline
    measured: Sequence[float]
    recorded: Sequence[Bar]

    @property
    def waited(self) -> float:
        """The part of the recorded time in which devices waited."""
        begin, end = min(start for *_, start, _ in self.recorded), max(end for *_, end in self.recorded)
        return 1 - sum(end - start for *_, start, end in self.recorded) / (self.predicted.devices * (end - begin))

    def cells(self) -> list[str]:
        """A line of the table."""
        time = statistics.median(self.measured)
        times = [seconds(self.predicted.seconds), seconds(time), f"{time / self.predicted.seconds:.2f}"]
        return [self.name, *times, f"{self.predicted.bubble:.0%}", f"{self.waited:.0%}"]

    def picture(self, kinds: Sequence[str]) -> Picture:
        """Both timelines, one below the other. `kinds` are those of the stages."""
        begin = min(start for *_, start, _ in self.recorded)
        said = [(f"predicted {t.device}", kinds[t.task.stage], t.start, t.end) for t in self.predicted.tasks]
        took = [(f"measured {device}", kind, a - begin, b - begin) for device, kind, a, b in sorted(self.recorded)]
        return bars(f"{self.name}: as the simulator says, and as it was", [*sorted(said), *took])


HEADER = ["schedule", "predicted", "measured", "measured / predicted", "devices wait: predicted", "recorded"]


def compare(work: Work, names: Sequence[str], rounds: int, pictures: Path | None = None) -> tuple[str, list[Result]]:
    """Let the schedules take turns. Returns what there is to say, as Markdown, and the results."""
    took: dict[int, Durations] = {}
    for parts in sorted({SCHEDULES[name] for name in names}):
        progress(f"stages of {work.layers // parts} layers")
        took[parts] = durations(work, work.layers // parts, rounds)
    trainings, results = {name: Training(work, name) for name in names}, []
    measured: dict[str, list[float]] = {name: [] for name in names}
    with ExitStack() as stack:
        for training in trainings.values():
            stack.enter_context(training.session)
            training.run()
        first, *others = (training.session.get_tensors_data(training.sums).values() for training in trainings.values())
        for name, sums in zip([*names][1:], others, strict=True):
            check_agreement([*first], **{name: [*sums]})
        for k in range(rounds):
            progress(f"round {k + 1} of {rounds}")
            for name in [*names][k % len(names) :] + [*names][: k % len(names)]:
                begin = time.perf_counter()
                trainings[name].run()
                jax.block_until_ready(trainings[name].session.store.present())
                measured[name].append(time.perf_counter() - begin)
        for name, training in trainings.items():
            parts, is_apart = SCHEDULES[name], name == "zero_bubble"
            count = parts * work.devices
            with training.session.recording() as timeline:
                training.run()
            spans = [(span, kind_of(span.name, count)) for span in timeline.spans]
            recorded = [(span.device, kind, span.start, span.end) for span, kind in spans if kind is not None]
            predicted = training.pipeline.schedule.simulate(took[parts].of_stages(count, is_apart))
            results.append(Result(name, predicted, measured[name], recorded))
            if pictures is not None:
                kinds = [KINDS[s // count] for s in range(training.pipeline.schedule.stages)]
                results[-1].picture(kinds).save(pictures / f"{name.replace(', ', '_')}.svg")
    progress()
    return "\n".join(report(work, took, results)), results


def report(work: Work, took: Mapping[int, Durations], results: Iterable[Result]) -> Iterator[str]:
    """What was measured, and where; and what it is worth."""
    cores = cores_here()
    yield (
        f"{work.devices} CPU devices on {cores} core(s), load {os.getloadavg()[0]:.1f} at the end; {work.steps} "
        f"micro-batches of {work.rows} rows, {work.layers} layers of width {work.width} on each device."
    )
    yield ""
    for parts, each in took.items():
        yield (
            f"- A stage of {work.layers // parts} layers, alone: forward {seconds(each.forward)}, backward "
            f"{seconds(each.backward)}, gradients of weights {seconds(each.gradients)}; {each.cores:.2f} cores are "
            "busy."
        )
    yield ""
    yield from (f"| {' | '.join(cells)} |" for cells in (HEADER, ["---"] * len(HEADER)))
    yield from (f"| {' | '.join(result.cells())} |" for result in results)
    if cores < work.devices:
        yield ""
        yield (
            f"**There are {work.devices} devices and {cores} core(s).** Devices wait for cores, of which the "
            "prediction knows nothing: it can be compared only where each device has a core."
        )
    busy = [each.cores for each in took.values()]
    if max(busy) > 1.2:
        yield ""
        yield f"**A stage keeps {max(busy):.2f} cores busy.** Stages on other devices leave it less than it has alone."
    if min(busy) < 0.8:
        yield ""
        yield (
            f"**A stage keeps {min(busy):.2f} cores busy.** The rest is the host's work between stages, or other "
            "programs have the cores: choose larger stages, or a machine that does nothing else."
        )


@contextmanager
def on_cores(count: int) -> Iterator[None]:
    """Within the block, all threads of the process share so many cores; or all, where only Linux could do that."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = sorted(os.sched_getaffinity(0))
    _share(cores[:count])
    try:
        yield
    finally:
        _share(cores)


def _share(cores: Iterable[int]) -> None:
    """Have all threads of the process run on some cores."""
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread), cores)


def cores_here() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--devices", type=int, default=min(4, max(2, cores_here())), help="by default as many as cores, from 2 to 4")
    add("--micro-batches", type=int, default=8, help="in a run (default: 8)")
    add("--layers", type=int, default=8, help="on each device (default: 8)")
    add("--width", type=int, default=512, help="of a layer (default: 512)")
    add("--rows", type=int, default=256, help="of a micro-batch (default: 256)")
    add("--rounds", type=int, default=25, help="how often each schedule runs (default: 25)")
    add("--pictures", type=Path, help="the folder for timelines, as SVG")
    options = parser.parse_args()
    if options.pictures is not None:
        options.pictures.mkdir(parents=True, exist_ok=True)
    work = Work(options.devices, options.micro_batches, options.layers, options.width, options.rows)
    text, _ = compare(work, [*SCHEDULES], options.rounds, options.pictures)
    print(text)


if __name__ == "__main__":
    main()
