"""Reductions of long axes beyond their rows, and what is made of them: on CPUs some have a form of their own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl.ops.kernels import sums
from popxl.transforms import autodiff
from runtime.gpu import sums as of_gpus
from tests.popxl.evaluate import evaluate
from tests.tolerances import assert_sums_near

REDUCTIONS = {
    "sum": lambda t, axis: t.sum(axis),
    "mean": lambda t, axis: t.mean(axis),
    "max": lambda t, axis: t.max(axis),
    "sumsquare": lambda t, axis: (t * t).sum(axis),
    "l1": lambda t, axis: abs(t).sum(axis),
    "l2": lambda t, axis: (t * t).sum(axis) ** 0.5,
    "logsum": lambda t, axis: np.log(t.sum(axis)),
}


@pytest.mark.thorough(but_each=3)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((3, 96), 1),  # halves, down to twelve
        ((3, 35), 1),  # no halves
        ((2, 5, 8), (1, 2)),
        ((512,), 0),
        ((20, 6), 0),  # a product, on CPUs
        ((4, 10, 6), (0, 1)),
        ((7, 64, 3), 1),
        ((9, 3, 4, 5), (0, 2, 3)),  # of images, for each channel
        ((8, 20, 6), (0, 2)),
    ],
    ids=str,
)
def test_numbers(shape: tuple[int, ...], axis: Any, dtype: str) -> None:
    t = np.random.default_rng(1).uniform(0.5, 2, shape).astype(dtype)
    found = evaluate(lambda t: [getattr(ops, name)(t, axis) for name in REDUCTIONS], t)
    for (name, meaning), array in zip(REDUCTIONS.items(), found, strict=True):
        expected = meaning(t.astype(np.float64), axis)
        np.testing.assert_allclose(array, expected, 2e-6 if dtype == "float32" else 1e-3, err_msg=name)
        assert array.dtype == dtype


@pytest.mark.parametrize("columns", [96, 35])
def test_numbers_that_are_none(columns: int) -> None:
    """Infinities and NaN, wherever in the row they are."""
    t = np.tile(np.linspace(-1, 1, columns, dtype=np.float32), (5, 1))
    t[0, 7], t[1, -1], t[2, columns // 2], t[3] = np.nan, np.inf, -np.inf, -np.inf
    largest, total, shares = evaluate(lambda t: [ops.max(t, 1), ops.sum(t, 1), ops.softmax(t, 1)], t)
    np.testing.assert_array_equal(largest, [np.nan, np.inf, 1, -np.inf, 1])
    finite = np.isfinite(t).all(1)
    assert_sums_near(total[finite], t[finite].astype(np.float64).sum(1), abs(t[finite]).sum(1))
    np.testing.assert_array_equal(total[~finite], t[~finite].sum(1))
    assert np.isnan(shares).all(1).tolist() == [True, True, False, True, False]
    assert shares[2, columns // 2] == 0


def functions(t: Any, w: Any, of: Any) -> Any:
    """Something of reductions of rows, by popxl's ops or by JAX."""
    return of.sum(t * t * w, 1) * of.max(t, 1) + of.sum(of.softmax(t * w, 1) * t, 1) / of.mean(w, 1)


class OfJax:
    sum, max, mean, softmax = jnp.sum, jnp.max, jnp.mean, jax.nn.softmax


@pytest.mark.thorough
def test_derivatives() -> None:
    """Backwards, forwards, and of gradients: those of JAX."""
    random = np.random.default_rng(2)
    operands = [random.uniform(0.5, 2, (3, 48)).astype(np.float32) for _ in range(2)]
    ir = popxl.Ir()
    with ir.main_graph:
        ours = popxl.to_jax(ir.create_graph(lambda t, w: functions(t, w, ops), *map(popxl.variable, operands)))

    def derivatives(function: Any) -> Any:
        def loss(*operands: Any) -> Any:
            (y,) = jax.tree.leaves(function(*operands))
            return (y**2).sum()

        def size_of_gradient(*operands: Any) -> Any:
            return sum((g**2).sum() for g in jax.grad(loss, (0, 1))(*operands))

        forwards = jax.jvp(loss, operands, operands[::-1])[1]
        return [*jax.grad(loss, (0, 1))(*operands), forwards, *jax.grad(size_of_gradient, (0, 1))(*operands)]

    for found, expected in zip(derivatives(ours), derivatives(lambda t, w: functions(t, w, OfJax)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


# Softmax on GPUs -----------------------------------------------------------------------------------------------------


def test_the_form_of_gpus_computes_the_same() -> None:
    """To the bit, also where several elements of a row are the largest; and so do its derivatives."""
    random = np.random.default_rng(3)
    g, out = random.normal(size=(2, 5, 7)).astype(np.float32)
    out = np.array(jax.nn.softmax(out.round(), axis=1))
    assert (out == out.max(1, keepdims=True)).sum() > 5

    def with_derivatives(form: Any) -> Any:
        return jax.jit(lambda: jax.jvp(lambda g, out: form(g, out, 1), (g, out), (out, g)))()

    found, expected = with_derivatives(of_gpus.softmax_gradient), with_derivatives(sums.softmax_gradient.plain)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.here
@pytest.mark.targets
@pytest.mark.parametrize("length", [197, 1024])
def test_gpus_read_rows_once(length: int) -> None:
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        x = popxl.variable(np.zeros((64, length)), popxl.float32, name="x")
        graph = ir.create_graph(lambda t: ops.softmax(t, 1), x)
        info = autodiff(graph)
        out, g = (popxl.variable(np.ones((64, length)), popxl.float32, name=name) for name in ("out", "g"))
        (dx,) = ops.call(info.graph, g, out)
        ops.var_updates.copy_var_update_(x, dx)
    cost = popxl.Session(ir, "gpu h100").cost()
    assert (cost.kernels, cost.bytes_accessed) == (1, 3 * 4 * 64 * length)


@pytest.mark.parametrize("may_see_none", [False, True])
def test_gpus_find_both_numbers_of_a_row_at_once(may_see_none: bool) -> None:
    """The largest number and the sum of exponentials: also of rows that have infinities and NaN; and derivatives."""
    t = np.random.default_rng(4).normal(size=(6, 3, of_gpus.SHORT + 33)).astype(np.float32) * 20
    t[0, 1, :5], t[1, 0, 4], t[2, 2], t[3, 0, 7] = -np.inf, np.nan, -np.inf, np.inf
    found, expected = (form(t, 2, may_see_none) for form in (of_gpus.exponentials, sums.exponentials.plain))
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-6)
    assert (found[1][2, 2] == 0) == may_see_none

    def logs(form: Any) -> Any:
        def loss(t: Any) -> Any:
            top, total = form(t, -1)
            return ((top + jnp.log(total)) ** 2).sum()

        return jax.grad(loss)(t[4:])

    np.testing.assert_allclose(logs(of_gpus.exponentials), logs(sums.exponentials.plain), rtol=1e-6)


@pytest.mark.here
@pytest.mark.targets
def test_gpus_read_logits_once_for_their_loss() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.variable(np.zeros((64, 1000)), popxl.float32, name="x")
        loss = addons.cross_entropy(x, popxl.constant(np.zeros(64), popxl.int32), reduction="none")
        addons.host_store(loss)
    assert popxl.Session(ir, "gpu h100").cost().bytes_accessed < 1.1 * 4 * 64 * 1000
