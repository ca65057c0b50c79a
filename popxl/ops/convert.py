"""Ops that change the dtype, name, location or role in differentiation of a tensor, and none of its elements."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from popxl import dtypes
from popxl.context import get_current_context
from popxl.core.declaration import OpKind
from popxl.core.tensor import Location, Tensor
from popxl.core.traits import Placed, ShardingRule, View
from popxl.dtypes import check_dtype
from popxl.dtypes import dtype as dtype_
from popxl.ops.precision import wide_dtype
from popxl.values.shapes import integer, like_first
from popxl.values.spec import TensorSpec


def _convert(t: Any, *, data_type: dtype_) -> Any:
    if data_type is dtypes.bool:
        return t != 0
    target = data_type.as_jax()
    if data_type.is_int and jnp.issubdtype(t.dtype, jnp.floating):
        limits = jnp.iinfo(target)
        wide = t.astype(wide_dtype(t))  # the limits are beyond float16, and finer than bfloat16
        # As a float the largest integer may be rounded up, out of range: elements from there on are selected, not
        # converted.
        lowest, largest = (np.asarray(limit, wide.dtype) for limit in (limits.min, limits.max))
        whole = jnp.clip(jnp.trunc(wide), lowest, largest).astype(target)
        return jnp.where(wide >= largest, np.asarray(limits.max, target), whole)
    if jnp.iscomplexobj(t) and not data_type.is_complex:
        t = jnp.real(t)  # for the gradient of a real operand
    return t.astype(target)


def _converted(t: Any, *, data_type: dtype_) -> TensorSpec:
    check_dtype(data_type, "`data_type`")
    for what, asked in (("`data_type`", data_type), ("`t`", t.dtype)):
        if asked.is_float8:
            raise TypeError(
                f"{what} is {asked.name}; float8 is converted with a scale, by `ops.pow2scale_cast_to_fp8` and "
                "`ops.pow2scale_cast_from_fp8`."
            )
    return TensorSpec(t.shape, data_type, t.meta_shape)


_SAME_ELEMENTS = ShardingRule(linear=("t",))
_cast: OpKind = OpKind(
    "Cast",
    _convert,
    shape=_converted,
    result="{t}_{data_type.name}",
    gradient={"t": lambda g, t_spec: _cast(g, data_type=t_spec.dtype) if t_spec.dtype.is_inexact else None},
    traits=[_SAME_ELEMENTS],
)
_identity = OpKind(
    "Identity",
    lambda t: t,
    shape=like_first,
    result="identity_{t}",
    gradient={"t": lambda g: g},
    traits=[_SAME_ELEMENTS],
)
_detach = OpKind("Detach", lambda t: t, shape=like_first, result="detach_out", gradient=None, traits=[_SAME_ELEMENTS])
_detach_ = OpKind(
    "DetachInplace",
    lambda t: jax.lax.stop_gradient(t),  # for callers that differentiate the lowered function
    shape=like_first,
    result="detach_out",
    gradient=None,
    traits=[View(lambda t, view: (view,)), _SAME_ELEMENTS],
)


def _other_tiles(inputs: tuple[Tensor, ...], attributes: Any, here: Location) -> Location:
    ipu, io_tiles = inputs[0].location
    return (here[0] if ipu is None else ipu, here[1] if io_tiles is None else not io_tiles)


_ipu_copy: OpKind = OpKind(
    "IpuCopy",
    lambda t, *, destination, source: t,
    shape=like_first,
    result="{t}_c{destination}",
    gradient={"t": lambda g, destination, source: _copied(g, destination=source, source=destination)},
    traits=[Placed(lambda inputs, attributes, here: (attributes["destination"], here[1]))],
)
_io_tile_copy = OpKind(
    "IoTileCopy", lambda t: t, shape=like_first, result="{t}_iotilecopy", gradient=None, traits=[Placed(_other_tiles)]
)


def cast(t: Tensor, data_type: dtype_) -> Tensor:
    """Convert `t` elementwise to another dtype.

    Floats become integers by dropping the fraction; those out of range become the nearest integer in it, and NaN
    becomes 0. Integers wrap when narrowed. Floats round to the nearest, and to infinity beyond the largest. Anything
    but 0 becomes true, NaN too. Real numbers become complex ones without an imaginary part. The gradient is cast back;
    it flows from floats and complex numbers only.

    Args:
        t: tensor of any shape.
        data_type: the new dtype. For float8 use `pow2scale_cast_to_fp8`.

    Returns:
        A new tensor of the same shape, named `<name of t>_<dtype>`.

    Raises:
        TypeError: if `data_type` is not a popxl dtype, either dtype is a float8, or complex numbers are to become real.

    See also: `numpy.ndarray.astype`.

    Example:
        >>> h = ops.cast(x, popxl.float16)
    """
    loses = isinstance(t, Tensor) and t.dtype.is_complex and isinstance(data_type, dtype_) and not data_type.is_complex
    if loses and data_type is not dtypes.bool:
        raise TypeError(
            f"cast: {t!r} is complex, and {data_type.name} has no imaginary part. Say what is meant of it: `ops.real`, "
            "`ops.abs`."
        )
    return _cast(t, data_type=data_type)


def cast_if_needed(t: Tensor, data_type: dtype_) -> Tensor:
    """`t` itself if it has the dtype already, else `cast(t, data_type)`."""
    return t if isinstance(t, Tensor) and t.dtype is data_type else cast(t, data_type)


def identity(t: Tensor, output_name: str | None = None) -> Tensor:
    """A new tensor equal to `t`, under another name. The gradient passes unchanged.

    Args:
        t: tensor of any shape.
        output_name: name of the result, `identity_<name of t>` by default.

    Example:
        >>> loss = ops.rename(loss, "loss")
    """
    return _identity(t, results=(output_name,) if output_name else None)


rename = identity


def detach(t: Tensor) -> Tensor:
    """A copy of `t` through which no gradient flows.

    See also: `torch.Tensor.detach`, `jax.lax.stop_gradient`.

    Example:
        >>> target = ops.detach(y)
    """
    return _detach(t)


def detach_(t: Tensor) -> Tensor:
    """An alias of `t` through which no gradient flows: a view, nothing is copied.

    Example:
        >>> target = ops.detach_(y)
    """
    return _detach_(t)


def ipu_copy(t: Tensor, destination: int, source: int | None = None) -> Tensor:
    """Copy `t` to another IPU, preserving its value.

    Args:
        t: tensor of any shape.
        destination: number of the IPU to copy to.
        source: number of the IPU to copy from; by default the known IPU of `t`.

    Raises:
        TypeError: if an IPU is not an integer.
        ValueError: if `source` is neither given nor known, as for a variable without users.

    Example:
        >>> with popxl.ipu(0):
        ...     h = x + 1
        >>> h1 = ops.ipu_copy(h, 1)
    """
    if source is None and isinstance(t, Tensor):
        source = t.location[0]
        if source is None:
            raise ValueError(f"ipu_copy: Could not infer the ipu of {t!r}. Please specify `source`.")
    source = source if source is None else integer(source, "ipu_copy: `source`")
    return _copied(t, integer(destination, "ipu_copy: `destination`"), source)


def copied_to_ipu(t: Tensor, ipu: int | None) -> Tensor:
    """A tensor on an IPU: itself, or a copy if it is on another.

    Inputs of a graph are where they are first used. Results of calls may be anywhere: the runtime copies these.
    """
    if ipu is None or t.location[0] in (ipu, None) or not t.has_certain_location:
        return t
    return ipu_copy(t, ipu)


def _copied(t: Tensor, destination: int, source: int | None) -> Tensor:
    """Place the copy op, and an unplaced operand, on the source IPU."""
    with get_current_context().set(ipu_id=source):
        return _ipu_copy(t, destination=destination, source=source)


def io_tile_copy(t: Tensor) -> Tensor:
    """A copy of `t` on the other tile set: from compute tiles to I/O tiles or back. The value is unchanged.

    Example:
        >>> y = ops.io_tile_copy(x)
    """
    return _io_tile_copy(t)
