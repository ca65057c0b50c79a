"""Resizing to the seventh digit, and its gradient; agreement with torch; regions at the borders of images."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.errors import PopxlError
from popxl.transforms import autodiff
from tests.popxl.evaluate import evaluate
from tests.popxl.ops.rows.resample import COORDINATES, MODES, interpolate, roi_align
from tests.popxl.ops.rows.schema import values

Array = np.ndarray


def with_gradient(op: Callable[..., Any], t: Array, g: Array, *rest: Array) -> tuple[Array, Array]:
    """The result of an op of `t`, and the gradient of `t` for the gradient `g` of the result."""

    def build(t: Any, g: Any, *rest: Any) -> list[Any]:
        graph = popxl.gcg().ir.create_graph(lambda *ts: op(*ts), t, *rest)
        info = autodiff(graph, grads_required=graph.inputs[:1])
        forward = ops.call_with_info(graph, t, *rest)
        return [forward.outputs[0], *ops.call(info.graph, g, inputs_dict=info.inputs_dict(forward))]

    out, gradient = evaluate(build, t, g, *rest)
    return out, gradient


# Interpolation ------------------------------------------------------------------------------------------------------

SCALES = [2.0, 3.0, 1.5, 0.3, 0.7, 2.3, 1 / 3, 0.5, 1.1]


@pytest.mark.thorough(but_each=5)
@pytest.mark.parametrize("coordinates", COORDINATES)
@pytest.mark.parametrize(("mode", "nearest"), MODES)
def test_to_the_seventh_digit(mode, nearest, coordinates) -> None:
    """Numbers from 0 to 1, as accurate as float32 allows; cubic, with larger weights, a little less."""
    t = np.random.default_rng(0).uniform(0, 1, (3, 17)).astype(np.float32)
    results = evaluate(lambda t: [ops.interpolate(t, (1, s), mode, nearest, coordinates) for s in SCALES], t)
    near = 3e-7 if mode == "cubic" else 1e-7
    for s, result in zip(SCALES, results, strict=True):
        expected = interpolate(t.astype(np.float64), (1, s), mode, nearest, coordinates)
        assert result.shape == (3, math.floor(np.float32(17) * np.float32(s)))
        np.testing.assert_allclose(result, expected, rtol=near, atol=near, err_msg=str(s))


@pytest.mark.thorough(but_each=9)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("coordinates", COORDINATES)
@pytest.mark.parametrize(("mode", "nearest"), MODES)
def test_the_gradient_is_the_transpose(mode, nearest, coordinates, dtype) -> None:
    """As a matrix: the columns are what the op makes of unit vectors. Sums are made in float32, and rounded once."""
    g, t = values(dtype, (13, 3)), values(dtype, (6, 2))
    _, gradient = with_gradient(lambda t: ops.interpolate(t, (2.2, 1.5), mode, nearest, coordinates), t, g)
    expected = np.zeros(t.shape)
    for at in np.ndindex(t.shape):
        unit = np.zeros(t.shape)
        unit[at] = 1
        expected[at] = (interpolate(unit, (2.2, 1.5), mode, nearest, coordinates) * g).sum()
    assert gradient.dtype == dtype
    near = 1e-6 if dtype == "float32" else 2**-11
    np.testing.assert_allclose(gradient, expected, rtol=near, atol=near * 2)


@pytest.mark.thorough(but_each=2)
@pytest.mark.parametrize(("mode", "nearest"), MODES)
def test_lengths_of_zero(mode, nearest) -> None:
    """Of an axis, and of a result; what nothing was read of has no gradient."""
    for shape, scales, length in (((0, 3), (2, 1), (0, 3)), ((0, 3), (1, 2), (0, 6)), ((2, 3), (0.3, 2), (0, 6))):
        out, gradient = with_gradient(
            lambda t, scales=scales: ops.interpolate(t, scales, mode, nearest),
            values("float32", shape),
            values("float32", length),
        )
        assert out.shape == length
        np.testing.assert_array_equal(gradient, np.zeros(shape))


def test_what_is_not_read_is_not_in_the_result() -> None:
    """Infinities reach the elements that are made of them, and no others."""
    t, g = np.array([np.inf, 1, 2], np.float32), np.array([1, 1, 1, np.inf, 1, 1], np.float32)
    out, gradient = with_gradient(lambda t: ops.interpolate(t, (2,), "linear"), t, g)
    np.testing.assert_array_equal(out, [np.inf, np.inf, np.inf, 1.25, 1.75, 2])
    np.testing.assert_array_equal(gradient, [2, np.inf, np.inf])


@pytest.mark.thorough(but_each=4)
@pytest.mark.parametrize(
    ("torch_mode", "mode", "rank"),
    [
        ("linear", "linear", 1),
        ("bilinear", "linear", 2),
        ("trilinear", "linear", 3),
        ("bicubic", "cubic", 2),
        ("nearest", "nearest", 2),
    ],
)
@pytest.mark.parametrize("scales", [(2.0, 3.0, 2.0), (1.5, 0.6, 2.5), (0.4, 1.0, 1.7)], ids=str)
def test_torch(torch_mode, mode, rank, scales) -> None:
    """With its gradient. Torch's nearest is the default of ours where factors are whole, and in general another."""
    torch = pytest.importorskip("torch")
    scales = scales[:rank]
    modes = [mode]
    settings = {} if mode == "nearest" else {"align_corners": False}
    if mode == "nearest" and any(s != int(s) for s in scales):
        modes += ["floor", "asymmetric"]
    t = values("float32", (2, 3, 5, 7, 6)[: rank + 2])
    exact = torch.from_numpy(t).requires_grad_()
    expected = torch.nn.functional.interpolate(
        exact, scale_factor=scales, mode=torch_mode, recompute_scale_factor=False, **settings
    )
    g = np.random.default_rng(0).uniform(-1, 1, expected.shape).astype(np.float32)
    expected.backward(torch.from_numpy(g))
    result, gradient = with_gradient(lambda t: ops.interpolate(t, (1, 1, *scales), *modes), t, g)
    np.testing.assert_allclose(result, expected.detach().numpy(), rtol=1e-5, atol=2e-6)
    np.testing.assert_allclose(gradient, exact.grad.numpy(), rtol=1e-5, atol=5e-6)


def test_torch_with_aligned_corners() -> None:
    torch = pytest.importorskip("torch")
    t = values("float32", (2, 3, 5, 7))
    for torch_mode, mode in (("bilinear", "linear"), ("bicubic", "cubic")):
        expected = torch.nn.functional.interpolate(
            torch.from_numpy(t), scale_factor=(2, 3), mode=torch_mode, align_corners=True
        )
        how = {"mode": mode, "coordinate_transformation_mode": "align_corners"}
        (result,) = evaluate(lambda t, how=how: ops.interpolate(t, (1, 1, 2, 3), **how), t)
        np.testing.assert_allclose(result, expected.numpy(), rtol=1e-5, atol=3e-6)


def test_all_modes_are_one_program() -> None:
    """An op for each, also where nothing is resized; unused modes may be said."""
    with popxl.Ir().main_graph as main:
        t = popxl.variable(values("float32", (1, 1, 2, 3)))
        for (mode, nearest), coordinates in itertools.product(MODES, [*COORDINATES, "tf_crop_and_resize"]):
            assert ops.interpolate(t, [1] * 4, mode, nearest, coordinates).spec == t.spec
        assert len(main.ops) == len(MODES) * 5 and len(main.tensors) == 1 + len(main.ops)


def test_what_cannot_be_run() -> None:
    with pytest.raises(PopxlError, match=r"^interpolate: .*'tf_crop_and_resize' wants a region"):
        evaluate(
            lambda t: ops.interpolate(t, (1, 2), coordinate_transformation_mode="tf_crop_and_resize"),
            values("float32", (2, 3)),
        )


# Regions of interest ------------------------------------------------------------------------------------------------

HEIGHT, WIDTH = 6, 9
BORDERS = [
    [-1, -1, -1, -1],  # a pixel outside: still counts
    [-1.001, 0, -1.001, 0],
    [WIDTH - 0.5, HEIGHT - 0.5, WIDTH, HEIGHT],
    [WIDTH, HEIGHT, WIDTH, HEIGHT],
    [-20, -20, 40, 40],  # most samples are outside
    [0, 0, WIDTH - 1, HEIGHT - 1],
    [5, 4, 2, 1],  # upside down: a pixel
    [2, 2, 2.25, 2.5],  # small: a pixel
    [-1.5, 1, 4, 3],
    [3, 1, WIDTH + 1.5, 3],
]


@pytest.mark.thorough(but_each=10)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("size", "scale", "ratio"), [((2, 3), 1.0, 2), ((1, 1), 0.25, 1), ((5, 2), 2.0, 3)], ids=str)
def test_regions_and_their_gradients(dtype, size, scale, ratio) -> None:
    """The gradient as a matrix: the columns are what the op makes of unit images."""
    t = values(dtype, (2, 2, HEIGHT, WIDTH))
    rois = (np.array(BORDERS) / scale).astype(dtype)
    index = np.arange(len(rois), dtype=np.int32) % 2
    g = values(dtype, (len(rois), 2, *size), seed=1)
    result, gradient = with_gradient(
        lambda t, rois, i: ops.roi_align(t, rois, i, size, scale, ratio), t, g, rois, index
    )
    exact = rois.astype(np.float64)
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == "float32" else {"rtol": 1e-3, "atol": 1e-3}
    expected = roi_align(t.astype(np.float64), exact, index, size, scale, ratio)
    np.testing.assert_allclose(result, expected, **near)

    transposed = np.zeros(t.shape)
    for image, y, x in np.ndindex(2, HEIGHT, WIDTH):
        unit = np.zeros((2, 1, HEIGHT, WIDTH))
        unit[image, 0, y, x] = 1
        transposed[image, :, y, x] = (roi_align(unit, exact, index, size, scale, ratio) * g).sum((0, 2, 3))
    assert result.dtype == gradient.dtype == dtype
    np.testing.assert_allclose(gradient, transposed, **near)


def test_samples_beyond_a_pixel_are_zero() -> None:
    """On all sides. Up to there the edge counts in full."""
    ones = np.ones((1, 1, 3, 4), np.float32)
    rois = np.float32([[x, y, x, y] for x, y in [(-1.5, 1), (3.5, 1), (1, -1.5), (1, 2.5)]])  # sampled half a pixel on

    def build(t: Any, rois: Any) -> list[Any]:
        return [ops.roi_align(t, rois + by, popxl.constant([0] * 4), (1, 1), 1.0, 1) for by in (0, -0.01, 0.01)]

    results = [r.ravel().tolist() for r in evaluate(build, ones, rois)]
    assert results == [[1, 1, 1, 1], [0, 1, 0, 1], [1, 0, 1, 0]]


def test_no_regions_have_no_gradient() -> None:
    """Only the images get one."""
    with popxl.Ir().main_graph:
        t, rois = popxl.variable(values("float32", (1, 1, 3, 3))), popxl.variable(values("float32", (2, 4)))
        index = popxl.variable([0, 0])
        graph = popxl.gcg().ir.create_graph(lambda *ts: ops.roi_align(*ts, (1, 1), 1.0, 1), t, rois, index)
        with pytest.raises(PopxlError, match="Unable to provide"):
            autodiff(graph, grads_required=graph.inputs[:2])
