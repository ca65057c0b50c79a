"""Four bits for each number: group quantisation on the host, and its inverse in a graph.

An axis is divided into groups. A group has a scale and a bias, and each of its numbers is ``q * scale + bias`` for a
`q` from 0 to 15. Four adjacent `q` are packed into a uint16, the first into its highest bits.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

import popxl
from popxl import ops
from popxl.op import REFUSED

__all__ = ["group_quantize_compress_numpy", "group_quantize_decompress", "group_quantize_decompress_numpy"]

_SHIFTS = np.array([12, 8, 4, 0], np.uint16)
_LARGEST = 15


def group_quantize_compress_numpy(
    t: np.ndarray, group_size: int, dim: int = -1
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Quantise an array to four bits for each number, in groups along an axis.

    A group's bias is its minimum, its scale a fifteenth of its range. Where all of a group is one number, that comes
    back as it is (rounded to float16).

    Args:
        t: float array of shape (..., n, ...).
        group_size: numbers in a group: a multiple of 4 that divides the axis.
        dim: the axis.

    Returns:
        ``(packed, scale, bias)``: uint16 of shape (*other, n / group_size, group_size / 4), and two float16 arrays of
        shape (*other, n / group_size, 1), where `other` are the other axes, in order.

    Raises:
        ValueError: if `group_size` does not fit, or a number is not finite or, as a bias or scale, beyond float16.

    Example:
        >>> packed, scale, bias = group_quantize_compress_numpy(np.array([[-1.0, 0.0, 1.0, 2.0]]), group_size=4)
        >>> packed, scale, bias  # q is 0, 5, 10, 15
        (array([[[1455]]], dtype=uint16), array([[[0.2]]], dtype=float16), array([[[-1.]]], dtype=float16))
    """
    values = np.moveaxis(np.asarray(t, np.float32), dim, -1)
    length = values.shape[-1]
    if group_size < 4 or group_size % 4 or length % group_size:
        raise ValueError(
            f"group_quantize_compress_numpy: `group_size` is {group_size}; expected a positive multiple of 4 that "
            f"divides the {length} numbers along axis {dim}."
        )
    groups = values.reshape(*values.shape[:-1], length // group_size, group_size)
    lowest, highest = groups.min(-1, keepdims=True), groups.max(-1, keepdims=True)
    with np.errstate(over="ignore", invalid="ignore"):
        scale, bias = ((highest - lowest) / _LARGEST).astype(np.float16), lowest.astype(np.float16)
    if not (np.isfinite(scale).all() and np.isfinite(bias).all()):
        raise ValueError(
            "group_quantize_compress_numpy: `t` has numbers that are not finite, or that float16 cannot hold; clean or "
            "scale it first."
        )
    steps = np.where(scale == 0, 1, scale).astype(np.float32)
    # Rounding the scale and the bias can move a quotient out of the range.
    q = np.clip(np.round((groups - bias.astype(np.float32)) / steps), 0, _LARGEST).astype(np.uint16)
    quads = q.reshape(*q.shape[:-1], group_size // 4, 4)
    return np.bitwise_or.reduce(quads << _SHIFTS, axis=-1), scale, bias


def group_quantize_decompress_numpy(
    t: np.ndarray, group_scale: np.ndarray, group_bias: np.ndarray, dim: int = -1
) -> np.ndarray:
    """Inverse of `group_quantize_compress_numpy`, up to rounding.

    Args:
        t: uint16 of shape (*other, groups, ids).
        group_scale, group_bias: float16 of shape (*other, groups, 1).
        dim: the axis of the result that was divided into groups.

    Returns:
        A float16 array; without `dim`, of shape (*other, groups * ids * 4).

    Example:
        >>> one = np.ones((1, 1, 1), np.float16)
        >>> group_quantize_decompress_numpy(np.array([[[1455]]], np.uint16), one, 0 * one)
        array([[ 0.,  5., 10., 15.]], dtype=float16)
    """
    values = _decompressed(np, t, group_scale.astype(np.float32), group_bias.astype(np.float32))
    return np.moveaxis(values.astype(np.float16), -1, dim)


def _decompressed(numpy: Any, t: Any, scale: Any, bias: Any) -> Any:
    """Dequantised values, by NumPy or JAX: in float32 ``q * scale`` is exact, so that all machines agree."""
    q = (t[..., None] >> _SHIFTS) & np.uint16(_LARGEST)
    values = q.reshape(*t.shape[:-1], t.shape[-1] * 4).astype(numpy.float32) * scale + bias
    return values.reshape(*t.shape[:-2], t.shape[-2] * t.shape[-1] * 4)


def _lowering(t: Any, group_scale: Any, group_bias: Any) -> Any:
    columns = (f.astype(jnp.float32).reshape(*t.shape[:2], 1) for f in (group_scale, group_bias))
    return _decompressed(jnp, t, *columns).astype(group_scale.dtype)


_GroupQuantizeDecompress = popxl.OpKind("GroupQuantizeDecompress", _lowering, gradient=REFUSED)


def group_quantize_decompress(
    t: popxl.Tensor, group_scale: popxl.Tensor, group_bias: popxl.Tensor, dim: int = -1
) -> popxl.Tensor:
    """A matrix from four bits for each number: ``q * scale + bias``, computed in float32 and rounded once.

    Args:
        t: uint16 tensor of shape (rows, groups, ids), each element four packed numbers.
        group_scale, group_bias: tensors of shape (rows, groups, 1) or (rows, groups).
        dim: the axis of the result that was divided into groups: -1 and 1 for the last, 0 and -2 for the first.

    Returns:
        A new tensor of shape (rows, groups * ids * 4), transposed if `dim` is the first axis, with the dtype of the
        scale. No gradient: autodiff refuses it.

    Raises:
        NotImplementedError: if `t` has not three axes.
        ValueError: if the shape of a scale or bias does not fit, or `dim` is not an axis of a matrix.
        TypeError: if `t` is not of uint16.

    Example:
        >>> packed, scale, bias = group_quantize_compress_numpy(np.random.normal(size=(2, 8)), group_size=4)
        >>> with popxl.Ir().main_graph:
        ...     w = group_quantize_decompress(popxl.constant(packed), popxl.constant(scale), popxl.constant(bias))
        >>> w.shape, w.dtype
        ((2, 8), popxl.dtypes.float16)
    """
    name = "group_quantize_decompress"
    if t.rank != 3:
        raise NotImplementedError(f"{name}: `t` has the shape {t.shape}; only (rows, groups, ids) is supported.")
    if t.dtype is not popxl.uint16:
        raise TypeError(f"{name}: `t` is of {t.dtype.name}; expected uint16, with four numbers in each element.")
    rows, groups, _ = t.shape
    for operand, column in {"group_scale": group_scale, "group_bias": group_bias}.items():
        if column.shape not in ((rows, groups), (rows, groups, 1)):
            raise ValueError(
                f"{name}: `{operand}` has the shape {column.shape}; expected {(rows, groups, 1)} or {(rows, groups)}, "
                "one number for each group of `t`."
            )
    if dim not in (-2, -1, 0, 1):
        raise ValueError(f"{name}: `dim` is {dim}; expected an axis of the resulting matrix: 0, 1, -1 or -2.")
    matrix = _GroupQuantizeDecompress(t, group_scale, group_bias)
    return matrix if dim in (-1, 1) else ops.transpose(matrix)
