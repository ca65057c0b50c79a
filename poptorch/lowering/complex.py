"""Complex numbers: components, views, Fourier transforms. Ops shared with real numbers are elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

import popxl
from poptorch.lowering.operands import promoted
from poptorch.lowering.registry import jax_op, lowers
from popxl import ops
from popxl.extend.kernels import conjugate
from popxl.extend.ops import NORM

# Parts and views ------------------------------------------------------------------------------------------------------


lowers("aten.view_as_real")(lambda input: ops.view_as_real(input))
lowers("aten.view_as_complex")(lambda input: ops.view_as_complex(input))
lowers("aten._neg_view")(lambda input: ops.negate(input))
# `conjugate` also takes real numbers, which PyTorch's derivatives apply it to.
lowers("aten._conj", "aten._conj_physical", "aten.conj_physical")(lambda input: conjugate(input))

VIEW_INVERSES: Mapping[str, Callable[[popxl.Tensor], popxl.Tensor]] = {
    "aten.view_as_real": ops.view_as_complex,
    "aten.view_as_complex": ops.view_as_real,
    "aten._conj": ops.conj,
    "aten._neg_view": ops.negate,
}
"""Inverses of views, which convert a value written to the view to the value of its base."""


lowers("aten.complex")(lambda real, imag: ops.complex(*promoted(real, imag)))
lowers("aten.polar")(lambda abs, angle: ops.polar(*promoted(abs, angle)))


@jax_op(title="Sgn")
def sgn(input: Any) -> Any:
    """The complex sign: the unit number in the same direction; 0 at 0."""
    length = jnp.abs(jnp.where(input == 0, 1, input))
    return jnp.where(input == 0, 0, input / length)


# Fourier transforms ---------------------------------------------------------------------------------------------------

_FORWARD_NORMS: Sequence[NORM] = ("backward", "ortho", "forward")
_INVERSE_NORMS: Sequence[NORM] = ("forward", "ortho", "backward")
"""popxl's names of PyTorch's normalisations: divisors 1, √n and n, for n elements."""


@lowers("aten._fft_c2c")
def fft_c2c(input: popxl.Tensor, dim: Sequence[int], normalization: int, forward: bool) -> popxl.Tensor:
    if not dim:
        return ops.identity(input)
    if forward:
        return ops.fft(input, dim, norm=_FORWARD_NORMS[normalization])
    return ops.ifft(input, dim, norm=_INVERSE_NORMS[normalization])


@lowers("aten._fft_r2c")
def fft_r2c(input: popxl.Tensor, dim: Sequence[int], normalization: int, onesided: bool) -> popxl.Tensor:
    return (ops.rfft if onesided else ops.fft)(input, dim, norm=_FORWARD_NORMS[normalization])


@lowers("aten._fft_c2r")
def fft_c2r(input: popxl.Tensor, dim: Sequence[int], normalization: int, last_dim_size: int) -> popxl.Tensor:
    sizes = [*(input.shape[d] for d in dim[:-1]), last_dim_size]
    return ops.irfft(input, dim, sizes, norm=_INVERSE_NORMS[normalization])
