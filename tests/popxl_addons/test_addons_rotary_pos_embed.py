"""Rotary position embeddings against their formula in NumPy, to the bit."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.errors import PopxlError
from popxl_addons.ops.rotary_pos_embed import rotary_pos_embed, trig_table_constants, trig_tables
from tests.popxl_addons.replicated import Array, with_gradients


def turned(t: Array, sin: Array, cos: Array) -> Array:
    """Each product rounded, and then each sum; as many channels as the tables have angles for."""
    y, count = t.copy(), 2 * sin.shape[-1]
    sin, cos = sin[..., None, :], cos[..., None, :]
    first, second = t[..., 0:count:2], t[..., 1:count:2]
    y[..., 0:count:2] = first * cos - second * sin
    y[..., 1:count:2] = second * cos + first * sin
    return y


def test_tables() -> None:
    sin, cos = trig_tables(3, 4)
    np.testing.assert_allclose(sin, [[0, 0], [0.8415, 0.01], [0.9093, 0.02]], atol=1e-4)
    np.testing.assert_allclose(cos, [[1, 1], [0.5403, 1], [-0.4161, 0.9998]], atol=1e-4)
    sin, cos = trig_tables(100, 6, base=500, np_dtype="float64")
    for m, i in ((0, 0), (7, 1), (99, 2)):
        angle = m * 500 ** (-2 * i / 6)
        np.testing.assert_allclose([sin[m, i], cos[m, i]], [np.sin(angle), np.cos(angle)], rtol=1e-12, atol=1e-12)
    assert trig_tables(3, 4, np_dtype=np.float16)[0].dtype == np.float16
    with pytest.raises(ValueError, match="trig_tables: `rotary_dim` is 5"):
        trig_tables(3, 5)


@pytest.mark.parametrize("dtype", [popxl.float32, popxl.float16])
def test_constants(ir: popxl.Ir, evaluate: Any, dtype: popxl.dtype) -> None:
    tables = trig_table_constants(7, 6, 100, dtype)
    assert all(t.dtype is dtype for t in tables)
    for found, expected in zip(evaluate(*tables), trig_tables(7, 6, 100, dtype.as_numpy()), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_the_example_of_the_specification(ir: popxl.Ir, evaluate: Any) -> None:
    t = popxl.constant(np.tile(np.float32([1, 0, 0, 1]), (1, 3, 1, 1)))
    (y,) = evaluate(rotary_pos_embed(t, *trig_table_constants(3, 4)))
    expected = [[1, 0, 0, 1], [0.5403, 0.8415, -0.01, 1], [-0.4161, 0.9093, -0.02, 0.9998]]
    np.testing.assert_allclose(y[0, :, 0], expected, atol=1e-4)


@pytest.mark.thorough(but_each=4)
@pytest.mark.parametrize("rotary_dim", [4, 16, 32, None, 0])
@pytest.mark.parametrize("leading", [(), (1,), (2,)], ids=str)
def test_values_and_gradient_to_the_bit(ir: popxl.Ir, evaluate: Any, rotary_dim: Any, leading: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    t, g = (100 * rng.normal(size=(2, 2, 64, 8, 32))).astype(np.float32)
    angles = rng.normal(size=(*leading, 64, (rotary_dim or 32) // 2))
    sin, cos = np.sin(angles).astype(np.float32), np.cos(angles).astype(np.float32)
    inputs = [popxl.variable(x) for x in (t, sin, cos)]
    tensors = with_gradients(lambda *x: rotary_pos_embed(*x, rotary_dim=rotary_dim), inputs, popxl.variable(g), [0])
    y, dt = evaluate(*tensors)
    np.testing.assert_array_equal(y, turned(t, sin, cos))
    np.testing.assert_array_equal(dt, turned(g, -sin, cos))
    np.testing.assert_array_equal(y[..., rotary_dim or 32 :], t[..., rotary_dim or 32 :])


def test_to_the_bit_where_other_ops_are_around(ir: popxl.Ir, evaluate: Any) -> None:
    """The compiler may fuse them with what comes before and after."""
    rng = np.random.default_rng(0)
    t = rng.normal(size=(3, 128, 4, 64)).astype(np.float32)
    sin, cos = trig_tables(128, 64)
    x = ops.transpose(popxl.variable(np.ascontiguousarray(t.transpose(0, 2, 1, 3))), (0, 2, 1, 3)) * 2.0
    y = rotary_pos_embed(x, *trig_table_constants(128, 64)) + 0.5
    np.testing.assert_array_equal(evaluate(y)[0], turned(t * np.float32(2), sin, cos) + np.float32(0.5))


def test_special_values(ir: popxl.Ir, evaluate: Any) -> None:
    t = np.float32([0.0, -0.0, np.inf, 1.0, np.nan, 1.0, 3e38, 3e38, 1e-38, -1e-45]).reshape(1, 1, 1, 10)
    sin, cos = (np.float32([x] * 5).reshape(1, 5) for x in (0.75, -0.5))
    (y,) = evaluate(rotary_pos_embed(*map(popxl.variable, (t, sin, cos))))
    with np.errstate(all="ignore"):
        expected = turned(t, sin, cos)
    np.testing.assert_array_equal(np.abs(y[..., :8]), np.abs(expected[..., :8]))
    np.testing.assert_allclose(y[..., 8:], expected[..., 8:], atol=1e-37)  # devices flush what is smaller


def test_float16_is_rounded_once(ir: popxl.Ir, evaluate: Any) -> None:
    rng = np.random.default_rng(0)
    t, angles = rng.normal(size=(2, 5, 3, 8)).astype(np.float16), rng.normal(size=(5, 4))
    sin, cos = np.sin(angles).astype(np.float16), np.cos(angles).astype(np.float16)
    inputs = [popxl.variable(x) for x in (t, sin, cos)]
    y, dt = evaluate(*with_gradients(rotary_pos_embed, inputs, popxl.variable(t), [0]))
    wide = [x.astype(np.float32) for x in (t, sin, cos)]
    np.testing.assert_array_equal(y, turned(*wide).astype(np.float16))
    np.testing.assert_array_equal(dt, turned(wide[0], -wide[1], wide[2]).astype(np.float16))


def test_finite_differences(ir: popxl.Ir, evaluate: Any) -> None:
    rng = np.random.default_rng(0)
    t, step, g = rng.normal(size=(3, 1, 5, 2, 8)).astype(np.float32)
    tables = trig_table_constants(5, 6)
    near = [rotary_pos_embed(popxl.variable(t + sign * 0.5 * step), *tables, rotary_dim=6) for sign in (1, -1)]
    inputs = [popxl.variable(t), *tables]
    tensors = with_gradients(lambda *x: rotary_pos_embed(*x, rotary_dim=6), inputs, popxl.variable(g), [0])
    above, below, _, dt = evaluate(*near, *tensors)
    np.testing.assert_allclose(((above - below) * g).sum(), (dt * step).sum(), rtol=1e-4)


def test_what_is_printed_and_refused(ir: popxl.Ir) -> None:
    t, (sin, cos) = popxl.variable(np.ones((2, 3, 5, 8)), popxl.float32), trig_table_constants(3, 8)
    assert rotary_pos_embed(t, sin, cos).producer.op_type == "RotaryPosEmbed"
    with_gradients(rotary_pos_embed, [t, sin, cos], t, [0])
    assert "RotaryPosEmbedGrad" in [op.op_type for graph in ir.graphs for op in graph.ops]
    for operands, rotary_dim, message in (
        ((t.reshape((6, 5, 8)), sin, cos), None, "expected `t` of rank 4"),
        ((t, sin, cos), 3, "`rotary_dim` is 3; expected an even number of the 8 channels"),
        ((t, sin, cos), 10, "`rotary_dim` is 10"),
        ((t, sin, cos), 4, r"expected `sin` of shape \(3, 2\)"),
        ((t, sin, cos[:2]), None, r"expected `cos` of shape \(3, 4\)"),
    ):
        with pytest.raises(PopxlError, match=f"RotaryPosEmbed: .*{message}"):
            rotary_pos_embed(*operands, rotary_dim)
    with pytest.raises(AssertionError, match="expected `t` of rank 4"):
        rotary_pos_embed(t.reshape((6, 5, 8)), sin, cos)


def test_the_package_and_its_module() -> None:
    module = importlib.import_module("popxl_addons.ops.rotary_pos_embed.rotary_pos_embed")
    assert (module.rotary_pos_embed, module.trig_tables) == (rotary_pos_embed, trig_tables)
