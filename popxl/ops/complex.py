"""Complex numbers: their parts, their construction, and Fourier transforms.

Arithmetic and functions of complex numbers are the same ops as for real ones; ops that need an order refuse them. The
gradient of a complex tensor z = x + iy, as autodiff takes and returns it, is PyTorch's: ∂L/∂x + i ∂L/∂y for a real L,
so that `z - rate * gradient` descends. Gradient graphs compute with its conjugate, so that the rules of functions such
as exp are the same as for real numbers, and as JAX's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, Protocol

import jax.numpy as jnp
from jax import lax

from popxl import dtypes
from popxl.core.declaration import OpKind
from popxl.core.tensor import Tensor
from popxl.dtypes import dtype as dtype_
from popxl.errors import PopxlError
from popxl.ops.families import Unary, public, unary
from popxl.values.shapes import broadcast_shapes, integer_or_integers, like_first, meta_shape_of, one_axis, same_dtype
from popxl.values.spec import TensorSpec

_MADE_OF = {dtypes.float32: dtypes.complex64, dtypes.float64: dtypes.complex128}


def _complex(dtype: dtype_) -> dtype_:
    """Complex dtype for a component dtype."""
    if dtype not in _MADE_OF:
        raise PopxlError(f"the parts of complex numbers are float32, and these are {dtype.name}; use `ops.cast`.")
    return _MADE_OF[dtype]


def _only_complex(t: Any) -> TensorSpec:
    if not t.dtype.is_complex:
        raise PopxlError("`t` is real. Expected complex numbers, as `ops.complex` and `ops.cast` make them.")
    return like_first(t)


def _part_dtype(t: Any) -> TensorSpec:
    return TensorSpec(t.shape, _only_complex(t).dtype.component_dtype, t.meta_shape)


# Parts --------------------------------------------------------------------------------------------------------------

angle_grad = OpKind(
    "AngleGrad",
    lambda g, t: jnp.where(t == 0, 0, -1j * g / jnp.where(t == 0, 1, t)),
    shape=lambda g, t: like_first(t),
)

real = unary(
    "real", jnp.real, "The real part of complex numbers.", shape=_part_dtype, linear=True, see="numpy.real", of="z"
)
imag = unary(
    "imag", jnp.imag, "The imaginary part of complex numbers.", shape=_part_dtype, linear=True, see="numpy.imag", of="z"
)
angle = unary(
    "angle",
    jnp.angle,
    "The angle of complex numbers, from -π to π. The gradient at 0 is 0.",
    lambda g, t: angle_grad(g, t),
    shape=_part_dtype,
    see="numpy.angle",
    of="z",
)
conj: Unary = unary(
    "conj",
    jnp.conj,
    "Complex numbers with the other sign of the imaginary part.",
    lambda g: conj(g),
    shape=_only_complex,
    linear=True,
    see="numpy.conj",
    of="z",
)


def conjugate(t: Tensor, name: str | None = None) -> Tensor:
    """Conjugate a tensor, with an own name; returns real tensors unchanged."""
    return conj.kind(t, results=(name,) if name else None) if t.dtype.is_complex else t


def _of_two(lhs: Any, rhs: Any) -> TensorSpec:
    same_dtype(lhs, rhs)
    return TensorSpec(broadcast_shapes(lhs.shape, rhs.shape), _complex(lhs.dtype), meta_shape_of(lhs, rhs))


_complex_kind = OpKind("Complex", lambda re, im: lax.complex(*jnp.broadcast_arrays(re, im)), shape=_of_two)
_polar = OpKind(
    "Polar",
    lambda length, angle: lax.complex(length * jnp.cos(angle), length * jnp.sin(angle)),
    shape=_of_two,
)
_view_as_real = OpKind(
    "ViewAsReal",
    lambda t: jnp.stack([jnp.real(t), jnp.imag(t)], -1),
    shape=lambda t: TensorSpec((*t.shape, 2), _part_dtype(t).dtype),
)


def _paired(t: Any) -> TensorSpec:
    if t.shape[-1:] != (2,):
        raise PopxlError("the last dimension of `t` holds real and imaginary parts: expected a size of 2.")
    return TensorSpec(t.shape[:-1], _complex(t.dtype))


_view_as_complex = OpKind("ViewAsComplex", lambda t: lax.complex(t[..., 0], t[..., 1]), shape=_paired)


def complex(re: Tensor, im: Tensor) -> Tensor:
    """The complex numbers with these real and imaginary parts.

    Args:
        re, im: float32 tensors whose shapes broadcast.

    Returns:
        A new complex64 tensor of the broadcast shape.

    Raises:
        PopxlError: if the shapes do not broadcast, or the dtypes differ or are not supported.

    See also: `torch.complex`.

    Example:
        >>> z = ops.complex(x, y)                            # x + iy
    """
    return _complex_kind(re, im)


def polar(length: Tensor, angle: Tensor) -> Tensor:
    """The complex numbers with these absolute values and angles: length · exp(i angle).

    Args:
        length, angle: float32 tensors whose shapes broadcast; angles are in radians.

    Returns:
        A new complex64 tensor of the broadcast shape.

    Raises:
        PopxlError: if the shapes do not broadcast, or the dtypes differ or are not supported.

    See also: `torch.polar`.

    Example:
        >>> z = ops.polar(h, c)                              # of length h, at the angle c
    """
    return _polar(length, angle)


def view_as_real(t: Tensor) -> Tensor:
    """Real and imaginary parts side by side, in a new last dimension of size 2. A copy, whatever the name says.

    Args:
        t: complex tensor of any shape.

    Returns:
        A new float32 tensor of the shape of `t` and 2.

    Raises:
        PopxlError: if `t` is real.

    See also: `torch.view_as_real`.

    Example:
        >>> pairs = ops.view_as_real(z)
    """
    return _view_as_real(t)


def view_as_complex(t: Tensor) -> Tensor:
    """The complex numbers whose parts are side by side: the opposite of `view_as_real`.

    Args:
        t: float32 tensor whose last dimension has the size 2.

    Returns:
        A new complex64 tensor without that dimension.

    Raises:
        PopxlError: if the last dimension has another size, or the dtype is another.

    See also: `torch.view_as_complex`.

    Example:
        >>> z = ops.view_as_complex(pairs)
    """
    return _view_as_complex(t)


# Fourier transforms -------------------------------------------------------------------------------------------------

NORM = Literal["backward", "ortho", "forward"]
_TOGETHER = 3
"""Maximum number of axes of one XLA Fourier transform."""


class Fourier(Protocol):
    """A Fourier transform over some axes."""

    kind: OpKind

    def __call__(
        self,
        t: Tensor,
        axes: int | Iterable[int] = -1,
        sizes: int | Iterable[int] | None = None,
        norm: NORM = "backward",
    ) -> Tensor: ...


def _over_all(function: Callable[..., Any], t: Any, axes: tuple[int, ...], sizes: Any, norm: str | None) -> Any:
    """A transform of complex numbers over any number of axes."""
    for start in range(0, len(axes), _TOGETHER):
        batch = slice(start, start + _TOGETHER)
        t = function(t, None if sizes is None else sizes[batch], axes[batch], norm)
    return t


def _rfft(t: Any, axes: tuple[int, ...], sizes: Any, norm: str | None) -> Any:
    """Real transform along the last axis, then complex transforms along the others."""
    t = jnp.fft.rfft(t, None if sizes is None else sizes[-1], axes[-1], norm)
    return _over_all(jnp.fft.fftn, t, axes[:-1], None if sizes is None else sizes[:-1], norm)


def _irfft(t: Any, axes: tuple[int, ...], sizes: Any, norm: str | None) -> Any:
    t = _over_all(jnp.fft.ifftn, t, axes[:-1], None if sizes is None else sizes[:-1], norm)
    return jnp.fft.irfft(t, None if sizes is None else sizes[-1], axes[-1], norm)


def _sizes_of(t: Any, axes: tuple[int, ...], sizes: tuple[int, ...] | None, norm: str) -> list[int]:
    """All dimension sizes after cropping and padding, before halving."""
    if norm not in ("backward", "ortho", "forward"):
        raise ValueError(f"`norm` is {norm!r}; expected 'backward', 'ortho' or 'forward'.")
    dimensions = [one_axis(axis, len(t.shape)) for axis in axes]
    if not axes or len(set(dimensions)) < len(dimensions):
        raise ValueError(f"`axes` is {axes}; expected one or more dimensions, each once.")
    if sizes is not None and (len(sizes) != len(axes) or min(sizes) < 1):
        raise ValueError(f"`sizes` is {sizes} and `axes` is {axes}; expected a size of 1 or more for each axis.")
    full = list(t.shape)
    for dimension, size in zip(dimensions, sizes or [t.shape[dimension] for dimension in dimensions], strict=True):
        full[dimension] = size
    return full


def _fourier(name: str, lowering: Callable[..., Any], meaning: str, takes: str, gives: str) -> Fourier:
    """Declare a Fourier transform by name: `i` means inverse, `r` real.

    Args:
        lowering: `(array, axes, sizes, norm)`.
        meaning: first line of the docstring.
        takes, gives: operand and result, for the docstring.
    """
    from_real, to_real = name == "rfft", name == "irfft"

    def shape(t: Any, *, axes: tuple[int, ...], sizes: tuple[int, ...] | None, norm: str) -> TensorSpec:
        lengths, last = _sizes_of(t, axes, sizes, norm), axes[-1]
        if from_real:
            lengths[last] = lengths[last] // 2 + 1
        elif to_real and sizes is None:
            lengths[last] = 2 * (lengths[last] - 1)
        if from_real and t.dtype.is_complex:
            raise PopxlError("`t` is complex; use `ops.fft`.")
        dtype = t.dtype if t.dtype.is_complex else _complex(t.dtype)
        if lengths[last] < 1:
            raise PopxlError(f"nothing is left of the axis {last}; say how many numbers it has in `sizes`.")
        return TensorSpec(tuple(lengths), dtype.component_dtype if to_real else dtype)

    def function(t: Any, *, axes: tuple[int, ...], sizes: tuple[int, ...] | None, norm: str) -> Any:
        return lowering(t, axes, sizes, None if norm == "backward" else norm)  # by `None`, JAX multiplies by nothing

    kind = OpKind(name.upper(), function, shape=shape, result=f"{name}_out")

    def op(
        t: Tensor,
        axes: int | Iterable[int] = -1,
        sizes: int | Iterable[int] | None = None,
        norm: NORM = "backward",
    ) -> Tensor:
        over = _several(axes, f"{name}: `axes`")
        return kind(t, axes=over, sizes=None if sizes is None else _several(sizes, f"{name}: `sizes`"), norm=norm)

    of_the_result = ";\n            the last one is that of the result, 2 (size - 1) by default" if to_real else ""
    doc = f"""{meaning}

    Args:
        t: {takes}
        axes: the dimension to transform, or several; negative ones count from the back.
        sizes: a size for each axis, to which `t` is cut or filled up with zeros first{of_the_result}.
        norm: which direction divides: `"backward"`, the inverse one, by the number of elements; `"forward"`, the other
            one; `"ortho"`, both, by its root.

    Returns:
        {gives}

    Raises:
        PopxlError: if there is no such axis, or for another dtype.
        ValueError: for axes that are named twice, sizes of another number, or another `norm`.

    See also: `numpy.fft.{name}n`, `torch.fft.{name}n`.

    Example:
        >>> y = ops.{name}({"x" if from_real else "z"}, axes=(-2, -1))"""
    return public(op, kind, name, doc)


def _several(value: int | Iterable[int], what: str) -> tuple[int, ...]:
    values = integer_or_integers(value, what)
    return values if isinstance(values, tuple) else (values,)


_ANY, _COMPLEX, _REAL = "complex64 tensor, or a float32 one.", "A new complex64 tensor.", "A new float32 tensor"
fft = _fourier(
    "fft", lambda t, *how: _over_all(jnp.fft.fftn, t, *how), "The discrete Fourier transform.", _ANY, _COMPLEX
)
ifft = _fourier("ifft", lambda t, *how: _over_all(jnp.fft.ifftn, t, *how), "The inverse of `fft`.", _ANY, _COMPLEX)
rfft = _fourier(
    "rfft",
    _rfft,
    "The discrete Fourier transform of real numbers: the half that says all.",
    "float32 tensor.",
    "A new complex64 tensor, of which the last of the axes has the size n // 2 + 1.",
)
irfft = _fourier(
    "irfft",
    _irfft,
    "The inverse of `rfft`. Imaginary parts that a transform of real numbers does not have are not looked at.",
    _ANY,
    "A new float32 tensor.",
)
