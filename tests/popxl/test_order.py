"""What is overwritten in place is overwritten after what was computed from it, so that XLA need not copy it."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.transforms import autodiff
from runtime.cpu.update_order import LARGE, LARGE_IN_LOOP, CpuUpdateOrder, order_on_cpu

pytestmark = pytest.mark.compiled_whole  # what XLA makes of programs is what is tested

ROWS, WIDTHS = 3, (150, 140, 130)
"""So many numbers in weights that copying them takes long; no two tensors have the same shape."""


def training(steps: int, by_graphs: bool) -> tuple[popxl.Session, list[popxl.tensor.Variable], Any]:
    """A session that trains two layers without biases, on the sum of their squares; its weights, and its stream."""
    random = np.random.default_rng(0)
    ir = popxl.Ir()
    ir.num_host_transfers = steps

    def step(v: popxl.TensorByRef, w: popxl.TensorByRef) -> None:
        x = ops.host_load(stream)
        if by_graphs:
            graph = ir.create_graph(lambda x, v, w: ops.tanh(x @ v) @ w, x, v, w)
            backward = autodiff(graph)
            site = ops.call_with_info(graph, x, v, w)
            _, *gradients = ops.call(backward.graph, site.outputs[0], inputs_dict=backward.inputs_dict(site))
        else:
            h = ops.tanh(x @ v)
            g = h @ w
            dh = (g @ w.T) * (1 - h * h)
            gradients = [x.T @ dh, h.T @ g]
        for weight, gradient in zip((v, w), gradients, strict=True):
            ops.scaled_add_(weight, gradient, b=-0.01)

    with ir.main_graph, popxl.in_sequence():
        stream = popxl.h2d_stream((ROWS, WIDTHS[0]), popxl.float32, "x")
        weights = [
            popxl.variable(random.normal(0, 0.05, shape).astype(np.float32), name=f"w{i}")
            for i, shape in enumerate(zip(WIDTHS, WIDTHS[1:], strict=False))
        ]
        ops.repeat(ir.create_graph(step, *weights), steps, *weights)
    return popxl.Session(ir, "cpu"), weights, stream


@pytest.mark.thorough(but_each=3)
@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("by_graphs", [False, True])
def test_weights_are_not_copied(steps: int, by_graphs: bool) -> None:
    session, weights, stream = training(steps, by_graphs)
    v, w = (session.get_tensor_data(weight).astype(np.float64) for weight in weights)
    data = np.random.default_rng(1).normal(size=(steps, ROWS, WIDTHS[0])).astype(np.float32)
    with session:
        session.run({stream: data if steps > 1 else data[0]})
        text = session.program.executable.as_text()
    for x in data.astype(np.float64):
        h = np.tanh(x @ v)
        g = h @ w
        v, w = v - 0.01 * x.T @ ((g @ w.T) * (1 - h * h)), w - 0.01 * h.T @ g
    for weight, expected in zip(weights, (v, w), strict=True):
        np.testing.assert_allclose(session.get_tensor_data(weight), expected, rtol=1e-4, atol=1e-6)
        rows, columns = weight.shape
        assert not re.search(rf"f32\[{rows},{columns}\]\S* copy\(", text)


SPECIAL = np.resize(np.array([0.0, -0.0, 1.5, -2.0, np.inf, -np.inf, np.nan, 1e-40], np.float32), LARGE_IN_LOOP)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("earlier", [np.nan, 0, -1, np.inf])
def test_every_bit_stays(dtype: str, earlier: float) -> None:
    value = jnp.asarray(SPECIAL, dtype)
    found = jax.jit(order_on_cpu)(value, jnp.full((2, 3), earlier))
    assert found.dtype == value.dtype
    assert np.asarray(found).tobytes() == np.asarray(value).tobytes()


def test_derivatives_pass() -> None:
    value = jnp.arange(LARGE_IN_LOOP, dtype=jnp.float32)
    found = jax.grad(lambda t: (order_on_cpu(t, t[:3]) * t).sum())(value)
    np.testing.assert_array_equal(found, 2 * value)


def test_nothing_is_waited_for_without_need() -> None:
    """Integers, and what has no numbers."""
    some = jnp.zeros(8)
    for value, earlier in ((some.astype(int), some), (some, some[:0])):
        assert "or " not in str(jax.make_jaxpr(order_on_cpu)(value, earlier))
    assert "or " in str(jax.make_jaxpr(order_on_cpu)(some, some))


@pytest.mark.parametrize(
    ("size", "rows", "in_loop", "waits"),
    [
        (LARGE_IN_LOOP, 1, True, True),
        (LARGE_IN_LOOP - 1, 1, True, False),
        (LARGE_IN_LOOP // 4, 4, True, True),
        (LARGE_IN_LOOP, 1, False, False),
        (LARGE - 1, 1, False, False),
        (LARGE, 1, False, True),
    ],
)
def test_only_large_arrays_wait(size: int, rows: int, in_loop: bool, waits: bool) -> None:
    """Those that would be copied in each turn are soon large; others that are copied once in a run are not."""
    with popxl.Ir().main_graph:
        weight, result = popxl.variable(np.zeros(5, np.float32)), popxl.variable(np.zeros((2, 3), np.float32))

    def overwrite(value: jax.Array, earlier: jax.Array) -> jax.Array:
        order = CpuUpdateOrder(in_loop)
        order.record_read(weight, result, earlier)
        return order.order_write(weight, value, rows)

    traced = jax.make_jaxpr(overwrite)(
        jax.ShapeDtypeStruct((size,), jnp.float32), jax.ShapeDtypeStruct((3,), jnp.float32)
    )
    assert ("or " in str(traced)) == waits
