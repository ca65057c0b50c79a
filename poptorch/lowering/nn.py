"""Layers: what modules of `torch.nn` are made of, and is not a loss."""

from __future__ import annotations

import jax

import popxl
from popxl import ops
from popxl.ops.precision import rounded_once
from poptorch.lowering.operands import axis_of, together
from poptorch.lowering.registry import jax_op, lowers


@lowers("torch.linear")
def linear(input: popxl.Tensor, weight: popxl.Tensor, bias: popxl.Tensor | None = None) -> popxl.Tensor:
    out = input @ ops.transpose(together(weight, input.dtype))
    return out if bias is None else out + together(bias, input.dtype)


@lowers("torch.softmax")
def softmax(
    input: popxl.Tensor, dim: int, dtype: popxl.dtype | None = None, _stacklevel: int = 3
) -> popxl.Tensor:
    return _softmax(input if dtype is None else together(input, dtype), axis=axis_of(input, dim))


def _softmax_gradient(g: popxl.Tensor, out: popxl.Tensor, axis: int) -> popxl.Tensor:
    weighted = g * out
    return weighted - out * ops.sum(weighted, axis, keepdims=True)


_softmax = jax_op(title="Softmax", gradient={"input": _softmax_gradient})(
    rounded_once(lambda input, *, axis: jax.nn.softmax(input, axis))
)
