"""Float8 on the host: conversions from and to wider floats, and the choice of a scale.

Two formats, named after their bits for sign, exponent and mantissa: `float8_143` (largest 240) and `float8_152`
(largest 57344). Neither has infinities or a negative zero; byte 0x80 is the only NaN. Host arrays hold the bytes in
a structured dtype, device arrays are what `ml_dtypes` calls `float8_e4m3fnuz` and `float8_e5m2fnuz`; the bytes are
the same, so `to_device` and `to_host` are views. On a device, the ops
`pow2scale_cast_to_fp8` and `pow2scale_cast_from_fp8` do the same arithmetic.
"""

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from popxl import dtypes
from popxl.dtypes import torch_imported as torch_imported

# Conversion --------------------------------------------------------------------------------------------------------


def host_pow2scale_cast_to_fp8(
    src: Any, dtype: dtypes.dtype | None = None, log2_scale: int = 0, nan_on_overflow: bool = True
) -> NDArray[Any]:
    """Return `src * 2**log2_scale`, rounded to the nearest float8 (ties to even), as a structured array.

    A finite value that rounds beyond the largest float8 becomes NaN, or with `nan_on_overflow=False` the largest.
    Infinities and NaN become NaN in either case; underflow becomes zero. The product is computed in float32, as on a
    device, so the bytes are the same.

    Args:
        src: float16, bfloat16, float32 or float64; an array, a torch tensor or anything that `np.asarray` accepts.
        dtype: `popxl.float8_143` or `popxl.float8_152`.
        log2_scale: an integer from -32 to 31.
        nan_on_overflow: see above.

    Returns:
        A new array of the shape of `src` and of the structured dtype `dtype.as_numpy()`.

    Raises:
        RuntimeError: if `dtype` is not a float8 or `src` not of the dtypes above.

    Example:
        >>> bytes_ = host_pow2scale_cast_to_fp8([5.3], popxl.float8_143)
        >>> host_pow2scale_cast_from_fp8(bytes_, popxl.float32)
        array([5.5], dtype=float32)
    """
    name = "host_pow2scale_cast_to_fp8"
    float8 = _float8(name, dtype)
    values = as_array(src)
    _check_source(name, values, "float16", "bfloat16", "float32", "float64")

    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        scaled = np.ldexp(values.astype(np.float32, copy=False), log2_scale)
        if not nan_on_overflow:
            largest = np.uint8(0x7F).view(float8.as_jax()).astype(np.float32)
            scaled = np.where(np.isfinite(values), np.clip(scaled, -largest, largest), scaled)
        return to_host(np.asarray(scaled).astype(float8.as_jax()), float8)


def host_pow2scale_cast_from_fp8(src: Any, dtype: dtypes.dtype | None = None, log2_scale: int = 0) -> NDArray[Any]:
    """Return the values of a float8 array, times `2**log2_scale`, as a wider float.

    Undoes `host_pow2scale_cast_to_fp8` when `log2_scale` has the opposite sign.

    Args:
        src: an array of one of the two structured dtypes.
        dtype: `popxl.float16`, `popxl.bfloat16`, `popxl.float32` or `popxl.float64`.
        log2_scale: an integer from -32 to 31.

    Returns:
        A new array of the shape of `src`.

    Raises:
        RuntimeError: if `src` or `dtype` is something else.
    """
    name = "host_pow2scale_cast_from_fp8"
    if dtype not in (dtypes.float16, dtypes.bfloat16, dtypes.float32, dtypes.float64):
        raise RuntimeError(
            f"{name}: `dtype` is {dtype!r}. Expected the type to convert to: "
            "popxl.float16, popxl.bfloat16, popxl.float32 or popxl.float64."
        )
    source = getattr(src, "dtype", None) if isinstance(src, np.ndarray) else None
    for float8 in (dtypes.float8_143, dtypes.float8_152):
        if source == float8.as_numpy():
            break
    else:
        raise RuntimeError(
            f"{name}: `src` is {_describe(src)}. Expected a NumPy array of the structured dtype "
            "popxl.dtypes.np_dtype_float8_143 or np_dtype_float8_152; raw bytes become one with "
            "`array.view(popxl.dtypes.np_dtype_float8_143)`."
        )
    scaled = np.ldexp(to_device(src, float8).astype(np.float32), log2_scale)
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray(scaled).astype(dtype.as_numpy())


def to_device(array: NDArray[Any], dtype: dtypes.dtype) -> NDArray[Any]:
    """View a host array as the array a device is given. Only float8 looks different: structured or raw bytes in,
    `ml_dtypes` numbers out. Nothing is copied."""
    return array.view(dtype.as_jax()) if dtype.is_float8 else array


def in_transit(dtype: dtypes.dtype) -> Any:
    """The dtype of the device arrays that streams and remote buffers are: those of float8 hold its bytes.

    XLA's CPU compiler rounds small numbers of one of the formats when it slices them in a loop.
    """
    return np.dtype(np.uint8) if dtype.is_float8 else dtype.as_jax()


def to_host(array: NDArray[Any], dtype: dtypes.dtype) -> NDArray[Any]:
    """View what came from a device as the array that users see; the opposite of `to_device`. Nothing is copied."""
    return array.view(dtype.as_numpy()) if dtype.is_float8 else array


def as_array(data: Any) -> NDArray[Any]:
    """Return `data` as a NumPy array without copying where that is possible; torch tensors are detached."""
    torch = sys.modules.get("torch")  # a tensor exists only where torch is imported
    if torch is not None and isinstance(data, torch.Tensor):
        if data.dtype is torch.bfloat16:  # of which NumPy knows nothing: the same bytes
            return as_array(data.detach().view(torch.int16)).view(dtypes.bfloat16.as_numpy())
        return np.asarray(data.numpy(force=True))
    return np.asarray(data)


def _float8(function: str, dtype: dtypes.dtype | None) -> dtypes.dtype:
    if not (isinstance(dtype, dtypes.dtype) and dtype.is_float8):
        raise RuntimeError(f"{function}: `dtype` is {dtype!r}. Expected popxl.float8_143 or popxl.float8_152.")
    return dtype


def _check_source(function: str, src: Any, *names: str) -> None:
    if not isinstance(src, np.ndarray) or src.dtype.name not in names:
        raise RuntimeError(
            f"{function}: `src` is {_describe(src)}. Expected {' or '.join(names)} data: convert it first, "
            "for example with np.asarray(src, np.float32)."
        )


def _describe(value: Any) -> str:
    own = getattr(value, "dtype", None)
    return f"a {type(value).__name__}" if own is None else f"a {type(value).__name__} of dtype {own}"


# Choice of a scale -------------------------------------------------------------------------------------------------


class FpDef(NamedTuple):
    """A binary floating point format: what decides which powers of two it reaches."""

    num_exp_bits: int
    num_mantissa_bits: int
    fix_exponent_bias: int
    include_denorm: bool
    has_nans: bool
    """Whether the largest exponent code is taken by infinities and NaN."""


ieee_fp32_no_denorms = FpDef(8, 23, 127, False, True)
ieee_fp16_denorms = FpDef(5, 10, 15, True, True)
float8_152_def = FpDef(5, 2, 16, True, False)
float8_143_def = FpDef(4, 3, 8, True, False)

max_scaling_bias = 31
min_scaling_bias = -31


def find_exponential_range(fp_def: FpDef) -> tuple[int, int]:
    """Exponents of a format's smallest and largest powers of two.

    Example:
        >>> find_exponential_range(float8_143_def)
        (-10, 7)
    """
    smallest = 1 - fp_def.fix_exponent_bias - (fp_def.num_mantissa_bits if fp_def.include_denorm else 0)
    largest = 2**fp_def.num_exp_bits - 1 - fp_def.has_nans - fp_def.fix_exponent_bias
    return smallest, largest


def log_histogram(src: NDArray[Any], ftype: FpDef) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Histogram of magnitudes of `src` per binade, normalized to 1.

    Returns:
        `(histogram, limits)`: `limits` are the powers of two of `ftype` but the last, and `histogram[i]` is the
        fraction of magnitudes from `limits[i - 1]` to below `limits[i]`; the first and last bins are open.
    """
    smallest, largest = find_exponential_range(ftype)
    limits = np.ldexp(1.0, np.arange(smallest, largest))
    bins = np.searchsorted(limits, np.abs(src.ravel()), side="right")
    return np.bincount(bins, minlength=limits.size + 1) / max(bins.size, 1), limits


@dataclass(frozen=True)
class CandidateConfig:
    """Scale-search parameters for a float8 target format and source type."""

    format: dtypes.dtype
    src_ftype: FpDef
    """The range that the histogram of the source covers."""
    dest_ftype: FpDef
    src_type: Any
    """The NumPy type of the source."""

    @property
    def exponent_size(self) -> int:
        """Exponent bits of the target."""
        return self.dest_ftype.num_exp_bits

    @property
    def mantissa_size(self) -> int:
        """Mantissa bits of the target."""
        return self.dest_ftype.num_mantissa_bits

    @property
    def fix_exponent_bias(self) -> int:
        """Exponent bias of the target."""
        return self.dest_ftype.fix_exponent_bias

    @property
    def quantisation_error(self) -> float:
        """The mean square error of a value that is covered, relative to its square."""
        return 2.0 ** (-2 * (int(np.finfo(self.src_type).nmant) - self.mantissa_size))

    @property
    def format_span(self) -> int:
        """Number of binades of the target format."""
        smallest, largest = find_exponential_range(self.dest_ftype)
        return largest - smallest + 1

    @property
    def num_exp_src(self) -> int:
        """Number of binades of the histogram."""
        smallest, largest = find_exponential_range(self.src_ftype)
        return largest - smallest

    @property
    def min_src_exp_index(self) -> int:
        """The first binade that the target covers with the smallest bias."""
        return max(0, self._first_covered(min_scaling_bias))

    @property
    def max_src_exp_index(self) -> int:
        """The first binade that the target covers with the largest bias."""
        return min(self.num_exp_src - 1, self._first_covered(max_scaling_bias))

    def _first_covered(self, bias: int) -> int:
        return find_exponential_range(self.dest_ftype)[0] + bias - find_exponential_range(self.src_ftype)[0]


def calculate_metric_mse(
    histogram: NDArray[np.float64],
    limits: NDArray[np.float64],
    src_bias_starting_indices: Iterable[int],
    candidate: CandidateConfig,
) -> tuple[float, int]:
    """Find the exponent bias that loses least, in the mean square.

    Values below the covered binades are lost, values in them are rounded, values above are clipped.

    Args:
        histogram: see `log_histogram`.
        limits: see `log_histogram`.
        src_bias_starting_indices: the first covered binade for each bias, beginning with the bias -31.
        candidate: the target format.

    Returns:
        `(cost, bias)`; of equally good biases the one in the middle.
    """
    fractions, span = histogram[1:], candidate.format_span
    energy = limits**2 * fractions
    costs = []
    # fsum makes equal costs compare equal: its result does not depend on where a sum is split.
    for index, start in enumerate(src_bias_starting_indices):
        end = start + span
        lost = math.fsum(energy[:start]) + ((limits[0] / 2) ** 2 if start > 0 else 0.0)
        rounded = math.fsum(energy[start:end]) * candidate.quantisation_error
        # Clipping is measured from `index`, where `start` would be exact: users compare scales, so we keep to it.
        clipped = math.fsum((limits[index + span - 1] - limits[end:]) ** 2 * fractions[end:])
        costs.append(float(lost + rounded + clipped))
    best = min(costs)
    biases = [index + min_scaling_bias for index, cost in enumerate(costs) if cost == best]
    return best, biases[len(biases) // 2]


def calculate_candidate_metric(
    hist_norm: NDArray[np.float64],
    limits: NDArray[np.float64],
    candidate: CandidateConfig,
    metric_type: str | None = None,
) -> tuple[float, int]:
    """Find the best exponent bias under a named metric; only `"MSE"` exists (see `calculate_metric_mse`).

    Raises:
        RuntimeError: for any other name, the default included.
    """
    if metric_type != "MSE":
        raise RuntimeError(f"calculate_candidate_metric: `metric_type` is {metric_type!r}. Expected 'MSE'.")
    starts = range(candidate.min_src_exp_index, candidate.max_src_exp_index + 1)
    return calculate_metric_mse(hist_norm, limits, starts, candidate)


def host_fp8_mse_scale(src: NDArray[Any], dtype: dtypes.dtype | None = None) -> tuple[float, int]:
    """Choose a power-of-two scale with minimal conversion error of `src` to `dtype`.

    Args:
        src: a float16 or float32 NumPy array.
        dtype: `popxl.float8_152`; anything else means `popxl.float8_143`.

    Returns:
        `(cost, scale)`: a measure of the quantisation error, and a `log2_scale` from -31 to 31, positive for small
        data.

    Raises:
        RuntimeError: if `src` is something else.

    Example:
        >>> cost, scale = host_fp8_mse_scale(np.float32([1, 2, 4]), popxl.float8_143)
        >>> scale
        -3
    """
    _check_source("host_fp8_mse_scale", src, "float16", "float32")
    format_, definition = dtypes.float8_143, float8_143_def
    if dtype is dtypes.float8_152:
        format_, definition = dtypes.float8_152, float8_152_def
    candidate = CandidateConfig(format_, ieee_fp32_no_denorms, definition, src.dtype)
    histogram, limits = log_histogram(src.ravel(), candidate.src_ftype)
    cost, bias = calculate_candidate_metric(histogram, limits, candidate, "MSE")
    return cost, -bias


def host_fp8_mse_scale_pb(src: Any, dtype: dtypes.dtype | None = None) -> int:
    """Choose a scale like `host_fp8_mse_scale`, for anything array-like, and return only the scale.

    Raises:
        RuntimeError: if `src` is not of float16 or float32, or `dtype` is not a float8.
    """
    float8 = _float8("host_fp8_mse_scale_pb", dtype)
    values = as_array(src)
    _check_source("host_fp8_mse_scale_pb", values, "float16", "float32")
    return host_fp8_mse_scale(values, float8)[1]
