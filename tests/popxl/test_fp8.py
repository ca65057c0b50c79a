"""Float8 on the host: every byte, every rounding, and the choice of a scale."""

from fractions import Fraction

import numpy as np
import pytest

from popxl import dtypes, fp8_utils
from popxl.fp8_utils import (
    CandidateConfig,
    calculate_candidate_metric,
    calculate_metric_mse,
    find_exponential_range,
    host_fp8_mse_scale,
    host_fp8_mse_scale_pb,
    host_pow2scale_cast_from_fp8,
    host_pow2scale_cast_to_fp8,
    log_histogram,
    to_device,
    to_host,
)

F143, F152 = dtypes.float8_143, dtypes.float8_152
FORMATS = {F143: (4, 3, 8), F152: (5, 2, 16)}  # exponent bits, mantissa bits, bias
NAN = float("nan")


def structured(bytes_, dtype):
    return np.array(bytes_, np.uint8).view(dtype.as_numpy())


def bytes_of(array):
    return array.view(np.uint8).tolist()


def value_of(byte, dtype):
    """The value of a byte as the format defines it, exactly; None for NaN."""
    _, mantissa_bits, bias = FORMATS[dtype]
    if byte == 0x80:
        return None
    exponent, mantissa = (byte & 0x7F) >> mantissa_bits, byte & (2**mantissa_bits - 1)
    unit = Fraction(1, 2**mantissa_bits)
    power = Fraction(2) ** (max(exponent, 1) - bias)
    return (-1) ** (byte >> 7) * ((exponent > 0) + mantissa * unit) * power


@pytest.mark.parametrize("target", [dtypes.float16, dtypes.float32, dtypes.float64], ids=repr)
@pytest.mark.parametrize("dtype", FORMATS, ids=repr)
def test_every_byte(dtype, target):
    every = structured(range(256), dtype)
    decoded = host_pow2scale_cast_from_fp8(every, target)
    assert decoded.dtype == target.as_numpy()
    exact = [value_of(byte, dtype) for byte in range(256)]
    assert [None if np.isnan(value) else value for value in decoded] == exact
    assert bytes_of(host_pow2scale_cast_to_fp8(decoded, dtype)) == list(range(256))


@pytest.mark.parametrize(
    ("byte", "as_143", "as_152"),
    [
        (0x00, 0, 0),
        (0x01, 2**-10, 2**-17),
        (0x03, 0.0029296875, 2.288818359375e-05),
        (0x08, 0.0078125, 6.103515625e-05),
        (0x38, 0.5, 0.25),
        (0x40, 1.0, 1.0),
        (0x44, 1.5, 2.0),
        (0xC0, -1.0, -1.0),
        (0x7E, 224, 49152),
        (0x7F, 240, 57344),
        (0x81, -0.0009765625, -7.62939453125e-06),
        (0x80, NAN, NAN),
    ],
)
def test_decoding(byte, as_143, as_152):
    for dtype, value in ((F143, as_143), (F152, as_152)):
        decoded = host_pow2scale_cast_from_fp8(structured(byte, dtype), dtypes.float32)
        assert decoded.shape == ()
        np.testing.assert_array_equal(decoded, np.float32(value))


@pytest.mark.parametrize(
    ("value", "sources", "dtype", "scale", "saturated", "otherwise"),
    [
        (1.0, "efd", F143, 0, 0x40, 0x40),
        (1.0, "efd", F152, 0, 0x40, 0x40),
        (5.3, "f", F143, 0, 0x53, 0x53),
        (5.3, "f", F152, 0, 0x49, 0x49),
        (5.3, "f", F143, -2, 0x43, 0x43),
        (0.5, "d", F143, 3, 0x50, 0x50),
        (0.1, "f", F143, 0, 0x25, 0x25),
        (0.1, "f", F152, 0, 0x32, 0x32),
        (300, "efd", F143, 0, 0x7F, 0x80),
        (-300, "efd", F143, 0, 0xFF, 0x80),
        (1e5, "fd", F152, 0, 0x7F, 0x80),
        (np.inf, "efd", F152, 0, 0x80, 0x80),
        (-np.inf, "efd", F143, 0, 0x80, 0x80),
        (NAN, "efd", F143, 0, 0x80, 0x80),
        (-0.0, "efd", F143, 0, 0x00, 0x00),
        (1e-6, "efd", F143, 0, 0x00, 0x00),
        (-1e-6, "efd", F143, 0, 0x00, 0x00),
        (240, "efd", F143, 0, 0x7F, 0x7F),
        (250, "efd", F143, 0, 0x7F, 0x80),
        (-250, "efd", F143, 0, 0xFF, 0x80),
        (70000, "fd", F152, 0, 0x7F, 0x80),
        (8.5, "efd", F143, 0, 0x58, 0x58),  # a tie: to even
        (8.50390625, "fd", F143, 0, 0x59, 0x59),
        (0.75, "efd", F143, -2, 0x2C, 0x2C),
        (0.75, "efd", F143, 1, 0x44, 0x44),
        (0.25, "efd", F152, 0, 0x38, 0x38),
        (0.5, "efd", F143, -10, 0x00, 0x00),  # ties of denormals, and no negative zero
        (1.5, "efd", F143, -10, 0x02, 0x02),
        (-0.25, "efd", F143, -10, 0x00, 0x00),
        (30000, "efd", F152, 2, 0x7F, 0x80),  # the product is more than a float16 holds
        (2.0**-24, "efd", F143, 24, 0x40, 0x40),
        (60000, "efd", F143, -9, 0x77, 0x77),
        (3e38, "fd", F143, 31, 0x7F, 0x80),  # or a float32
        (-1e308, "d", F152, 31, 0xFF, 0x80),
        (-1e308, "d", F152, -32, 0xFF, 0x80),
        (1 + 2**-4 + 2**-40, "d", F143, 0, 0x40, 0x40),  # in float32, as on a device: a tie
    ],
)
def test_encoding(value, sources, dtype, scale, saturated, otherwise):
    for source in sources:
        data = np.array([[value]], source)
        for nan_on_overflow, byte in ((False, saturated), (True, otherwise)):
            encoded = host_pow2scale_cast_to_fp8(data, dtype, scale, nan_on_overflow)
            assert (encoded.dtype, bytes_of(encoded)) == (dtype.as_numpy(), [[byte]]), (source, nan_on_overflow)


def test_float16_that_overflowed_before():
    data = np.array([np.inf], np.float16)  # 1e5 as float16
    for nan_on_overflow in (True, False):
        assert bytes_of(host_pow2scale_cast_to_fp8(data, F152, -8, nan_on_overflow)) == [0x80]


@pytest.mark.thorough(but_each=4)
@pytest.mark.parametrize("dtype", FORMATS, ids=repr)
@pytest.mark.parametrize("source", ["float16", "float32", "float64"])
def test_rounding_is_to_the_nearest(dtype, source):
    representable = [value_of(byte, dtype) for byte in range(128)]
    data = np.random.default_rng(5).uniform(0, 200, 500).astype(source)
    for value, byte in zip(data, bytes_of(host_pow2scale_cast_to_fp8(data, dtype)), strict=True):
        distances = [abs(Fraction(float(value)) - candidate) for candidate in representable]
        assert distances[byte] == min(distances)
    middles = [(low + high) / 2 for low, high in zip(representable[:-1], representable[1:], strict=True)]
    middles = np.array([float(middle) for middle in middles])
    if (middles.astype(source) == middles).all():  # ties go to the even byte
        encoded = bytes_of(host_pow2scale_cast_to_fp8(middles.astype(source), dtype))
        assert encoded == [byte + byte % 2 for byte in range(127)]


@pytest.mark.parametrize("scale", [-32, -7, 2, 31])
@pytest.mark.parametrize("dtype", FORMATS, ids=repr)
def test_there_and_back(dtype, scale):
    every = structured(range(256), dtype).reshape(8, 32)
    for target in (dtypes.float32, dtypes.float64):
        wide = host_pow2scale_cast_from_fp8(every, target, scale)
        again = host_pow2scale_cast_to_fp8(wide, dtype, -scale)
        assert again.shape == (8, 32)
        assert again.tolist() == every.tolist()


def test_scale_on_the_way_back():
    assert host_pow2scale_cast_from_fp8(structured([0x43], F143), dtypes.float32, 2).tolist() == [5.5]
    assert host_pow2scale_cast_from_fp8(structured([0x44], F143), dtypes.float16, 3).tolist() == [12.0]


@pytest.mark.parametrize("dtype", [None, dtypes.float16, dtypes.uint8, "float8_143"], ids=repr)
def test_to_fp8_dtype(dtype):
    with pytest.raises(RuntimeError, match=r"^host_pow2scale_cast_to_fp8: `dtype` is .* Expected popxl.float8_143 or"):
        host_pow2scale_cast_to_fp8([1.0], dtype)
    with pytest.raises(RuntimeError, match=r"^host_fp8_mse_scale_pb: `dtype` is "):
        host_fp8_mse_scale_pb(np.ones(1, np.float32), dtype)


@pytest.mark.parametrize("src", [[1, 2], True, np.ones(2, np.uint8), structured([1], F143), np.ones(1, "c8")], ids=repr)
def test_to_fp8_source(src):
    with pytest.raises(RuntimeError, match=r"^host_pow2scale_cast_to_fp8: `src` is a ndarray of dtype .* float16"):
        host_pow2scale_cast_to_fp8(src, F143)


@pytest.mark.parametrize("dtype", [None, F143, dtypes.int32], ids=repr)
def test_from_fp8_dtype(dtype):
    with pytest.raises(RuntimeError, match=r"^host_pow2scale_cast_from_fp8: `dtype` is "):
        host_pow2scale_cast_from_fp8(structured([1], F143), dtype)


@pytest.mark.parametrize("src", [np.ones(2, np.uint8), np.ones(2), [1.0], None], ids=repr)
def test_from_fp8_source(src):
    with pytest.raises(RuntimeError, match=r"^host_pow2scale_cast_from_fp8: `src` is "):
        host_pow2scale_cast_from_fp8(src, dtypes.float32)


def test_torch_sources():
    torch = pytest.importorskip("torch")
    data = torch.tensor([5.3, 300.0], requires_grad=True)
    assert bytes_of(host_pow2scale_cast_to_fp8(data, F143)) == [0x53, 0x80]
    assert host_fp8_mse_scale_pb(data, F143) == host_fp8_mse_scale_pb(data.detach().numpy(), F143)
    with pytest.raises(RuntimeError, match="`src` is a Tensor of dtype torch.float32"):
        host_fp8_mse_scale(data, F143)


@pytest.mark.parametrize("dtype", FORMATS, ids=repr)
def test_views(dtype):
    raw = np.arange(6, dtype=np.uint8).reshape(2, 3)
    for host in (raw, raw.view(dtype.as_numpy()), raw.T, raw[:, ::2]):
        device = to_device(host, dtype)
        assert device.dtype == dtype.as_jax()
        assert np.shares_memory(device, raw)
        back = to_host(device, dtype)
        assert back.dtype == dtype.as_numpy()
        assert np.shares_memory(back, raw)
        assert bytes_of(back) == host.view(np.uint8).tolist()


def test_views_of_other_types():
    data = np.ones(3, np.float32)
    assert to_device(data, dtypes.float32) is data
    assert to_host(data, dtypes.float32) is data


# Choice of a scale --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "dtype", "scale"),
    [
        ([0.01, 0.012, 0.02], F143, 5),
        ([1, 2, 4], F143, -3),
        ([1, 2, 4], F152, -2),
        ([-1, 2, -4], F143, -3),
        ([70, 90, 100, 120], F143, -8),
        ([0.00098, 240], F143, 0),
        ([2**-17, 57344], F152, 0),
        ([32, 40, 50, 63], F143, -7),
        ([32, 40, 50, 63], F152, -6),
    ],
)
def test_mse_scale(data, dtype, scale):
    cost, found = host_fp8_mse_scale(np.array(data, np.float32), dtype)
    assert found == scale
    assert 0 <= cost < 1
    assert type(host_fp8_mse_scale_pb(np.array([data], np.float32), dtype)) is int
    assert host_fp8_mse_scale(np.array([data, data], np.float16), dtype)[1] in range(-31, 32)


def test_mse_scale_is_for_143_unless_told():
    data = np.array([1, 2, 4], np.float32)
    assert host_fp8_mse_scale(data) == host_fp8_mse_scale(data, dtypes.int8) == host_fp8_mse_scale(data, F143)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dtype", FORMATS, ids=repr)
def test_mse_scale_loses_little(seed, dtype):
    data = np.random.default_rng(seed).normal(scale=10.0 ** (seed - 2), size=1000).astype(np.float32)
    for scale in (host_fp8_mse_scale(data, dtype)[1], host_fp8_mse_scale_pb(data, dtype)):
        encoded = host_pow2scale_cast_to_fp8(data, dtype, scale)
        decoded = host_pow2scale_cast_from_fp8(encoded, dtypes.float32, -scale)
        np.testing.assert_allclose(decoded, data, rtol=2 ** -(FORMATS[dtype][1] + 1), atol=np.abs(data).max() * 2**-13)


@pytest.mark.parametrize("src", [np.ones(2), [1.0], np.ones(2, np.int32)], ids=repr)
def test_mse_scale_source(src):
    with pytest.raises(RuntimeError, match=r"^host_fp8_mse_scale: `src` is .* Expected float16 or float32"):
        host_fp8_mse_scale(src, F143)
    with pytest.raises(RuntimeError, match=r"^host_fp8_mse_scale_pb: `src` is "):
        host_fp8_mse_scale_pb(src, F143)


@pytest.mark.parametrize(
    ("name", "definition", "exponents"),
    [
        ("ieee_fp32_no_denorms", (8, 23, 127, False, True), (-126, 127)),
        ("ieee_fp16_denorms", (5, 10, 15, True, True), (-24, 15)),
        ("float8_152_def", (5, 2, 16, True, False), (-17, 15)),
        ("float8_143_def", (4, 3, 8, True, False), (-10, 7)),
    ],
)
def test_formats(name, definition, exponents):
    format_ = getattr(fp8_utils, name)
    assert format_ == definition
    assert find_exponential_range(format_) == exponents
    assert (fp8_utils.min_scaling_bias, fp8_utils.max_scaling_bias) == (-31, 31)


def test_log_histogram():
    data = np.array([0, 1e-39, 2.0**-126, -1, 1.5, 2, 2.0**126, -3e38, 1.9], np.float32)
    histogram, limits = log_histogram(data, fp8_utils.ieee_fp32_no_denorms)
    assert limits.tolist() == [2.0**i for i in range(-126, 127)]
    assert {i: count * 9 for i, count in enumerate(histogram) if count} == {0: 2, 1: 1, 127: 3, 128: 1, 253: 2}
    assert len(histogram) == 254


@pytest.mark.parametrize(
    ("dtype", "destination", "span", "first", "error32", "error16"),
    [
        (F143, fp8_utils.float8_143_def, 18, 85, 2**-40, 2**-14),
        (F152, fp8_utils.float8_152_def, 33, 78, 2**-42, 2**-16),
    ],
)
def test_candidate(dtype, destination, span, first, error32, error16):
    source = fp8_utils.ieee_fp32_no_denorms
    for src_type, error in ((np.float32, error32), (np.float16, error16)):
        candidate = CandidateConfig(dtype, source, destination, src_type)
        assert candidate.format is dtype
        assert (candidate.exponent_size, candidate.mantissa_size, candidate.fix_exponent_bias) == FORMATS[dtype]
        assert (candidate.format_span, candidate.quantisation_error) == (span, error)
        assert (candidate.min_src_exp_index, candidate.max_src_exp_index) == (first, first + 62)
        assert candidate.num_exp_src == 253


def test_metric():
    candidate = CandidateConfig(F143, fp8_utils.ieee_fp32_no_denorms, fp8_utils.float8_143_def, np.float32)
    histogram, limits = log_histogram(np.array([1, 2, 4], np.float32), candidate.src_ftype)
    found = calculate_candidate_metric(histogram, limits, candidate, "MSE")
    assert found == calculate_metric_mse(histogram, limits, range(85, 148), candidate)
    assert found == (pytest.approx(7 * 2**-40), 3)
    for metric in (None, "mse"):
        with pytest.raises(RuntimeError, match=r"`metric_type` is .* Expected 'MSE'"):
            calculate_candidate_metric(histogram, limits, candidate, metric)
