"""What a run costs that computes next to nothing: over the program's own executable, and over a jitted function."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import popxl
from popxl import ops
from tests.benchmarks.harness import OURS, Measure, Row, Size, check_agreement, over, seconds, time_of


@contextmanager
def parties(variables: int, streams: int, size: Size) -> Iterator[Mapping[str, Measure]]:
    """Some variables, each of which grows by what is fed, or by one."""
    ir = popxl.Ir()
    with ir.main_graph:
        feeds = [popxl.h2d_stream((), popxl.float32, "step") for _ in range(streams)]
        steps = [ops.host_load(feed) for feed in feeds] or [popxl.constant(1.0)]
        grown = [popxl.variable(0.0, name=f"x{i}") for i in range(variables)]
        for x in grown:
            for step in steps:
                ops.add_(x, step)

    values = [np.array(1.0, np.float32) for _ in feeds]
    inputs = dict(zip(feeds, values, strict=True))
    state: Any = tuple(jnp.float32(0) for _ in grown)
    jitted = jax.jit(lambda state, fed: tuple(x + sum(fed or [1.0]) for x in state), donate_argnums=0)

    def plain_jax() -> Any:
        nonlocal state
        state = jitted(state, values)
        return state

    with popxl.Session(ir, "ipu_hw") as session:
        executable = session.program.executable
        raw: Any = tuple(jnp.float32(0) for _ in grown)

        def dispatch() -> Any:
            nonlocal raw
            raw, _ = executable(raw, (), tuple(values))
            return raw

        for _ in range(3):
            session.run(inputs), plain_jax(), dispatch()
        ours = list(session.get_tensors_data(grown).values())
        check_agreement(state, popxl=ours, executable=raw)
        count = 1 if size is Size.TINY else 2000 // max(1, variables // 25)
        works = {OURS: lambda: session.run(inputs).data, "executable": dispatch, "JAX": plain_jax}
        yield {name: time_of(work, count) for name, work in works.items()}


TARGETS = (over(50e-6, seconds, "executable"), over(50e-6, seconds))
ROWS = (
    Row("empty_run", lambda size: parties(1, 0, size), TARGETS, about="a run that adds one to a variable"),
    Row("empty_run_8", lambda size: parties(8, 1, size), TARGETS, about="a run that adds a number to 8 variables"),
    Row(
        "empty_run_500",
        lambda size: parties(5 if size is Size.TINY else 500, 1, size),
        TARGETS,
        about="a run that adds a number to 500 variables",
    ),
)
