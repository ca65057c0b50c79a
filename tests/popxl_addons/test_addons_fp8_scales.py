"""Scales for float8 against their formulas on the host."""

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl.fp8_utils import host_fp8_mse_scale
from popxl_addons.ops import fp8_utils
from popxl_addons.ops.fp8_amax_scale import fp8_amax_scale
from popxl_addons.ops.fp8_mse_scale import fp8_mse_scale
from popxl_addons.ops.fp8_mse_scale.fp8_mse_scale import CandidateConfig, max_scaling_bias, min_scaling_bias

FORMATS = [popxl.float8_143, popxl.float8_152]
SCALES = [fp8_amax_scale, fp8_mse_scale]


@pytest.mark.parametrize(
    "largest, format_, expected",
    [
        (3, popxl.float8_143, 6),
        (3, popxl.float8_152, 14),
        (1000, popxl.float8_143, -3),
        (240, popxl.float8_143, 0),
        (240 * 2.0**20, popxl.float8_143, -20),
        (7, popxl.float8_152, 13),
        (1e-30, popxl.float8_143, 31),
        (0, popxl.float8_152, 31),
        (1e30, popxl.float8_152, -31),
    ],
)
def test_amax(ir, evaluate, largest, format_, expected):
    scale = fp8_amax_scale(popxl.constant(np.float32([0, -largest, largest / 2])), format_)
    assert (scale.dtype, scale.shape) == (popxl.int32, ())
    assert evaluate(scale)[0] == expected


def test_amax_is_exact_for_powers_of_two(ir, evaluate):
    powers = range(-31, 32)
    scales = [fp8_amax_scale(popxl.constant(np.float32(240 * 2.0**-k))) for k in powers]
    assert [int(scale) for scale in evaluate(*scales)] == list(powers)


@pytest.mark.parametrize("format_, expected", [(popxl.float8_143, -7), (popxl.float8_152, -6)])
def test_mse_of_one_binade(ir, evaluate, format_, expected):
    scale = fp8_mse_scale(popxl.constant(np.linspace(32, 63, 10, dtype=np.float32)), format_)
    assert (scale.dtype, scale.shape) == (popxl.int32, ())
    assert evaluate(scale)[0] == expected


def samples():
    """Data near to and far from what a float8 can hold; for float16 what it can hold of them."""
    generator = np.random.default_rng(7)
    for magnitude in (1e-14, 1e-9, 1e-6, 1e-3, 1.0, 300.0, 1e6, 1e10):
        yield generator.normal(0, magnitude, (20, 31))
    for spread in (2, 6, 12, 18):
        yield np.exp2(generator.uniform(-spread, spread, 400)) * generator.choice([-1, 1], 400)
    yield np.zeros(5)
    yield np.array([0.00098, 240])
    yield np.array([2.0**-17, 57344])
    yield np.array([2.0**-41, 2.0**-40])
    yield np.array([2.0**-60])
    yield np.array([1.0, 2.0**18])
    yield np.array(-0.5)


@pytest.mark.thorough(but_each=4)
@pytest.mark.parametrize("format_", FORMATS)
@pytest.mark.parametrize("source", [np.float16, np.float32])
def test_mse_against_the_search_on_the_host(ir, evaluate, format_, source):
    with np.errstate(over="ignore"):
        arrays = [array for array in (np.asarray(s).astype(source) for s in samples()) if np.isfinite(array).all()]
    scales = evaluate(*[fp8_mse_scale(popxl.constant(array), format_) for array in arrays])
    assert [int(scale) for scale in scales] == [host_fp8_mse_scale(array, format_)[1] for array in arrays]


@pytest.mark.parametrize("scale", SCALES)
def test_what_cannot_be_scaled(ir, scale):
    with pytest.raises(RuntimeError, match=r"`src` is .*; expected a tensor of float16, bfloat16 or float32"):
        scale(popxl.constant([1, 2], popxl.int32))
    with pytest.raises(RuntimeError, match=r"`dtype` is popxl.dtypes.float16; expected popxl.float8_143 or"):
        scale(popxl.constant([1.0]), popxl.float16)


@pytest.mark.parametrize("scale, name", [(fp8_amax_scale, "Fp8AmaxScale"), (fp8_mse_scale, "Fp8Scale")])
def test_one_op(ir, scale, name):
    graph = ir.create_graph(scale, popxl.TensorSpec((2, 3), popxl.float16))
    assert [op.op_type for op in graph.ops] == [name]
    assert f"{name}." in addons.GraphWithNamedArgs(graph).print_schedule()


def test_a_tensor_scaled_by_it_survives(ir, evaluate):
    data = np.random.normal(0, 1e-4, (3, 5)).astype(np.float32)
    x = popxl.constant(data)
    back = []
    for scale in (fp8_amax_scale(x), fp8_mse_scale(x)):
        small = popxl.ops.pow2scale_cast_to_fp8(x, scale, popxl.float8_143)
        back.append(popxl.ops.pow2scale_cast_from_fp8(small, -scale, popxl.float32))
    for values in evaluate(*back):
        np.testing.assert_allclose(values, data, rtol=2.0**-4, atol=1e-7)


def test_definitions():
    assert fp8_utils.ieee_fp32_no_denorms == (8, 23, 127, False, True, 3.4028235e38, 127, -126)
    assert fp8_utils.ieee_fp16_denorms == (5, 10, 15, True, True, 65504, 15, -14)
    assert fp8_utils.float8_152_def == (5, 2, 16, True, False, 57344, 15, -17)
    assert fp8_utils.float8_143_def == (4, 3, 8, True, False, 240, 7, -10)
    assert fp8_utils.FpDef._fields[-3:] == ("max_value", "max_exp", "min_exp")
    assert (min_scaling_bias, max_scaling_bias) == (-31, 31)
    assert CandidateConfig is popxl.fp8_utils.CandidateConfig
