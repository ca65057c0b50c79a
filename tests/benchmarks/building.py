"""How fast graphs are built, in ops a second, and lowered. Plain JAX traces the same functions instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import popxl
from popxl import ops
from runtime.lowering.channels import Channels
from runtime.lowering.lower import Lowering
from tests.benchmarks.harness import (
    OURS,
    Measure,
    Row,
    Size,
    at_most,
    check_agreement,
    per_second,
    seconds,
    time_of,
)

X = np.random.default_rng(0).normal(0, 0.1, (4, 4)).astype(np.float32)


def chain(x: Any, count: int, lib: Any) -> Any:
    """`count` additions."""
    y = x
    for _ in range(count):
        y = lib.add(y, x)
    return y


def mix(x: Any, count: int, lib: Any) -> Any:
    """`count` ops of ten kinds."""
    y = x
    for _ in range(count // 10):
        y = lib.tanh(lib.add(lib.matmul(y, x), x))
        y = lib.mul(lib.reshape(lib.transpose(lib.reshape(y, (2, 8)), (1, 0)), (4, 4)), x)
        y = lib.sub(lib.maximum(y, x), lib.exp(x))
    return y


class Jax:
    """The functions of JAX, under the names of our ops."""

    add, sub, mul, matmul = jnp.add, jnp.subtract, jnp.multiply, jnp.matmul
    tanh, exp, maximum, reshape, transpose = jnp.tanh, jnp.exp, jnp.maximum, jnp.reshape, jnp.transpose


def built(function: Callable[..., Any], count: int) -> tuple[popxl.Ir, popxl.DeviceToHostStream]:
    """An Ir with `function` of a variable in its main graph."""
    ir = popxl.Ir()
    with ir.main_graph:
        y = function(popxl.variable(X, name="x"), count, ops)
        out = popxl.d2h_stream(y.shape, y.dtype, "y")
        ops.host_store(out, y)
    return ir, out


@contextmanager
def parties(function: Callable[..., Any], size: Size) -> Iterator[Mapping[str, Measure]]:
    ir, out = built(function, 20)
    with popxl.Session(ir) as session:
        check_agreement(function(jnp.asarray(X), 20, Jax), popxl=session.run()[out])
    count = 100 if size is Size.TINY else 5000
    measures = {
        OURS: time_of(lambda: bool(built(function, count))),
        "JAX": time_of(lambda: bool(jax.make_jaxpr(lambda x: function(x, count, Jax))(X))),
    }
    yield {name: lambda measured=measured: measured() / count for name, measured in measures.items()}


@contextmanager
def lowering_parties(size: Size) -> Iterator[Mapping[str, Measure]]:
    """Until XLA takes over: ours lowers a graph that is there, JAX traces the function and lowers that."""
    count = 100 if size is Size.TINY else 2000
    ir, _ = built(mix, count)
    *ops, store = ir.main_graph.ops
    (x,), (y,) = ir.main_graph.variables, store.inputs

    def lower() -> bool:
        lowering = Lowering(ops, ir.options)
        return bool(jax.jit(lambda value: lowering.run(ops, {x: value}, Channels({})).value_of(y)).lower(X))

    yield {OURS: time_of(lower), "JAX": time_of(lambda: bool(jax.jit(lambda x: mix(x, count, Jax)).lower(X)))}


ROWS = (
    Row(
        "build_chain",
        lambda size: parties(chain, size),
        (per_second(20_000),),
        rounds=9,
        about="building, for each op: additions",
    ),
    Row(
        "build_mix",
        lambda size: parties(mix, size),
        (per_second(20_000),),
        rounds=9,
        about="building, for each op: ten kinds",
    ),
    Row("lower_mix", lowering_parties, (at_most(3, seconds),), rounds=9, about="lowering 2000 ops"),
)
