"""Four bits for each number: packing by hand, there and back, and the op against NumPy."""

import numpy as np
import pytest

import popxl
from popxl.errors import PopxlError
from popxl_addons.ops.group_quantize_decompress import (
    group_quantize_compress_numpy,
    group_quantize_decompress,
    group_quantize_decompress_numpy,
)


@pytest.mark.parametrize("values, scale, bias", [([0, 5, 10, 15], 1, 0), ([-1, 0, 1, 2], 0.2, -1)])
def test_packing(values, scale, bias):
    packed, scales, biases = group_quantize_compress_numpy(np.array([values], np.float32), 4)
    assert packed.dtype == np.uint16 and scales.dtype == biases.dtype == np.float16
    assert packed.shape == scales.shape == biases.shape == (1, 1, 1)
    assert packed == 1455 and scales == np.float16(scale) and biases == bias
    np.testing.assert_allclose(group_quantize_decompress_numpy(packed, scales, biases)[0], values, atol=2e-3)


@pytest.mark.parametrize("dim", [-1, 0, 1, 2])
@pytest.mark.parametrize("shape", [(8, 24, 16), (8, 16, 24)])
def test_there_and_back(shape, dim):
    t = np.random.normal(size=shape).astype(np.float32)
    packed, scale, bias = group_quantize_compress_numpy(t, 8, dim)
    others = tuple(np.delete(shape, dim))
    assert packed.shape == (*others, shape[dim] // 8, 2)
    assert scale.shape == bias.shape == (*others, shape[dim] // 8, 1)
    back = group_quantize_decompress_numpy(packed, scale, bias, dim)
    assert back.shape == shape and back.dtype == np.float16
    assert (np.abs(back - t) <= float(scale.max()) * 0.51 + 2e-3).all()


def test_rounded_scales_do_not_push_numbers_out_of_their_bits():
    t = np.random.uniform(1000, 1001, (50, 64)).astype(np.float32)  # float16 has steps of 0.5 there
    back = group_quantize_decompress_numpy(*group_quantize_compress_numpy(t, 16))
    np.testing.assert_allclose(back, t, atol=1)


def test_a_constant_group_comes_back():
    t = np.full((2, 8), 0.75, np.float32)
    np.testing.assert_array_equal(group_quantize_decompress_numpy(*group_quantize_compress_numpy(t, 4)), t)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e6])
def test_numbers_that_cannot_be_compressed(bad):
    t = np.ones((2, 8), np.float32)
    t[1, 3] = bad
    with pytest.raises(ValueError, match="not finite, or that float16 cannot hold"):
        group_quantize_compress_numpy(t, 4)


@pytest.mark.parametrize("group_size", [0, -4, 3, 6, 16])
def test_group_sizes_that_do_not_fit(group_size):
    with pytest.raises(ValueError, match=r"positive multiple of 4 that divides the 24 numbers along axis 0"):
        group_quantize_compress_numpy(np.ones((24, 5)), group_size, 0)


@pytest.mark.parametrize("dim", [-1, -2, 0, 1])
@pytest.mark.parametrize("columns", [True, False], ids=["rank 3", "rank 2"])
@pytest.mark.parametrize("dtype", [popxl.float16, popxl.float32])
def test_the_op_gives_what_numpy_gives(ir, evaluate, dim, columns, dtype):
    t = np.random.normal(size=(12, 24)).astype(np.float32)
    packed, scale, bias = group_quantize_compress_numpy(t, 4, dim)
    expected = group_quantize_decompress_numpy(packed, scale, bias, dim)
    scale, bias = ((f if columns else f[..., 0]).astype(dtype.as_numpy()) for f in (scale, bias))
    y = group_quantize_decompress(*map(popxl.constant, (packed, scale, bias)), dim)
    assert (y.shape, y.dtype) == (t.shape, dtype)
    np.testing.assert_array_equal(evaluate(y)[0].astype(np.float16), expected)


def test_schedule(ir):
    specs = popxl.TensorSpec((3, 2, 1), popxl.uint16), *[popxl.TensorSpec((3, 2), popxl.float16)] * 2
    assert [op.op_type for op in ir.create_graph(group_quantize_decompress, *specs).ops] == ["GroupQuantizeDecompress"]


def test_errors(ir):
    packed = popxl.constant(np.zeros((3, 2, 1), np.uint16))
    scale = popxl.constant(np.ones((3, 2, 1), np.float16))
    with pytest.raises(NotImplementedError, match=r"`t` has the shape \(3, 2\); only \(rows, groups, ids\)"):
        group_quantize_decompress(packed.reshape((3, 2)), scale, scale)
    with pytest.raises(
        ValueError, match=r"`group_scale` has the shape \(3, 2, 1, 1\); expected \(3, 2, 1\) or \(3, 2\)"
    ):
        group_quantize_decompress(packed, scale.reshape((3, 2, 1, 1)), scale)
    with pytest.raises(ValueError, match=r"`group_bias` has the shape \(2, 3\)"):
        group_quantize_decompress(packed, scale, scale.reshape((2, 3)))
    with pytest.raises(ValueError, match=r"`dim` is 2; expected an axis"):
        group_quantize_decompress(packed, scale, scale, 2)
    with pytest.raises(TypeError, match=r"`t` is of float16; expected uint16"):
        group_quantize_decompress(scale, scale, scale)


def test_it_has_no_gradient(ir):
    packed = popxl.TensorSpec((3, 2, 1), popxl.uint16)
    graph = ir.create_graph(group_quantize_decompress, packed, *[popxl.TensorSpec((3, 2), popxl.float16)] * 2)
    with pytest.raises(PopxlError, match="GroupQuantizeDecompress"):
        popxl.transforms.autodiff(graph, grads_required=graph.inputs[1:])
