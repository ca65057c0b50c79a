"""A pipeline whose stages are on devices of their own, beside the same program with all stages on one.

On CPUs the devices share the cores, so they gain what one device leaves idle: its ops are small, as those of a pipeline
are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

import popxl
import popxl_addons as addons
from popxl import ops
from tests.benchmarks.harness import OURS, Measure, Row, Size, check_agreement, time_of, times

ONE, BOUND = "one device", "bound"


@dataclass(frozen=True)
class Pipeline:
    """So many stages of some layers each, and what goes through them in one run."""

    stages: int
    layers: int
    width: int
    rows: int
    steps: int

    @property
    def bound(self) -> float:
        """How many times faster than one device the stages are at best, as some wait at the start and at the end."""
        return self.steps * self.stages / (self.steps + self.stages - 1)

    def weights(self) -> np.ndarray:
        """Those of all layers; always the same."""
        shape = (self.stages, self.layers, self.width, self.width)
        return np.random.default_rng(0).normal(0, self.width**-0.5, shape).astype(np.float32)

    def data(self) -> np.ndarray:
        """The micro-batches of one run; always the same."""
        return np.random.default_rng(1).normal(size=(self.steps, self.rows, self.width)).astype(np.float32)


class Pipelined:
    """A session that sends micro-batches through the stages."""

    def __init__(self, net: Pipeline, placement: Literal["several", "one"]) -> None:
        ir = popxl.Ir()
        ir.num_host_transfers = net.steps
        ir.options.placement = placement
        with ir.main_graph:
            self.data = popxl.h2d_stream((net.rows, net.width), popxl.float32, "data")
            self.out = popxl.d2h_stream((net.rows, net.width), popxl.float32, "out")
            with addons.pipelined_execution(net.steps) as pipeline:
                with pipeline.stage(0), popxl.ipu(0):
                    x = ops.host_load(self.data)
                for s, layers in enumerate(net.weights()):
                    with pipeline.stage(s), popxl.ipu(s):
                        for w in layers:
                            x = ops.tanh(x @ popxl.variable(w))
                        if s + 1 < net.stages:
                            x = x.copy_to_ipu(s + 1)
                        else:
                            ops.host_store(self.out, x)
        self.session = popxl.Session(ir, "ipu_hw")

    def run(self, data: np.ndarray) -> np.ndarray:
        """What comes out at the end."""
        return self.session.run({self.data: data})[self.out]


@contextmanager
def pipelines(net: Pipeline, count: int) -> Iterator[Mapping[str, Measure]]:
    """With as many devices as stages, and with one; and what the first would take if nothing were lost but the waiting
    at the start and at the end."""
    data, weights = net.data(), jnp.asarray(net.weights()).reshape(-1, net.width, net.width)

    @jax.jit
    def straight(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    several, one = Pipelined(net, "several"), Pipelined(net, "one")
    with several.session, one.session:
        for _ in range(2):
            check_agreement(straight(data), popxl=several.run(data), one=one.run(data))
        measured = {OURS: time_of(lambda: several.run(data), count), ONE: time_of(lambda: one.run(data), count)}
        yield measured | {BOUND: lambda: measured[ONE]() / net.bound}


def pipeline(size: Size) -> Pipeline:
    return Pipeline(2, 2, 6, 3, 4) if size is Size.TINY else Pipeline(4, 12, 256, 64, 16)


ROWS = (
    Row(
        "pipeline_4",
        lambda size: pipelines(pipeline(size), 1 if size is Size.TINY else 3),
        (times(2.0, ONE), times(None, BOUND)),
        devices=4,
        about="a pipeline of four stages of 12 layers, 16 micro-batches of 64 rows of width 256",
    ),
)
