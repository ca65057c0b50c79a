"""Normalisation by the root mean square."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

import popxl
from popxl import OpKind, initial
from popxl.errors import PopxlError
from popxl.extend.arguments import check_type
from popxl.extend.kernels import wide_dtype
from popxl.op import ShardingRule
from popxl.replica_grouping import Groups
from popxl_addons.layers._torch_layer import TorchLayer
from popxl_addons.layers.tensor_parallel import TensorParallel


def _normed(t: Any, weight: Any, *, eps: float) -> Any:
    wide = t.astype(wide_dtype(t))
    return wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps) * weight.astype(wide.dtype)


def _pulled_back(g: Any, t: Any, weight: Any, *, eps: float) -> tuple[Any, Any]:
    """Gradients of `t` and `weight`: the root mean square is computed anew."""
    x, w, g = (a.astype(wide_dtype(t)) for a in (t, weight, g))
    inverse = lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps)
    x, scaled = x * inverse, g * w
    dt = inverse * (scaled - x * jnp.mean(scaled * x, -1, keepdims=True))
    return dt, (g * x).reshape(-1, t.shape[-1]).sum(0)


def _spec(t: Any, weight: Any, *, eps: float) -> popxl.TensorSpec:
    if not t.shape or weight.shape != t.shape[-1:]:
        raise PopxlError(f"expected `weight` with a number for each channel of `t`, the last axis of {t.shape}.")
    return popxl.TensorSpec(t.shape, t.dtype)


def _gradient(forward: Any, gs: Any) -> dict[int, popxl.Tensor]:
    found = _rms_norm_grad(gs[0], *map(forward.read, forward.op.inputs), **forward.op.attributes)
    return {i: gradient for i, gradient in enumerate(found) if forward.wants(i)}


_rms_norm = OpKind(
    "RMSNorm",
    _normed,
    shape=_spec,
    gradient=_gradient,
    result="rms_norm_out",
    traits=[ShardingRule("..._,_->..._")],
    key="popxl_addons.RMSNorm",
)
_rms_norm_grad = OpKind(
    "RMSNormGrad",
    _pulled_back,
    shape=lambda g, t, weight, *, eps: tuple(popxl.TensorSpec(s.shape, s.dtype) for s in (t, weight)),
    result=("rms_norm_t_grad", "rms_norm_weight_grad"),
    traits=[ShardingRule("..._,..._,_->..._,_", ("g",))],
    key="popxl_addons.RMSNormGrad",
)


class RMSNorm(TorchLayer):
    """``x / sqrt(mean(x²) + eps) * weight``, over the last axis. See also ``torch.nn.RMSNorm``.

    Computed in float32 and rounded once.

    Variable, of the dtype of `x`: `weight`, of the length of the last axis; ones.

    Args:
        tensor: replicas that normalise different parts of the same text, such as its heads: a grouping, or names of
            axes. The gradient of the weight is summed over them. By default each replica has whole texts of its own.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     facts, graph = RMSNorm().create_graph(popxl.TensorSpec((2, 5, 4), popxl.bfloat16))
        >>> facts.weight.shape, facts.weight.dtype
        ((4,), popxl.dtypes.bfloat16)
    """

    _of_torch = {"weight": np.ravel}

    def __init__(self, tensor: Groups | None = None):
        super().__init__()
        self.tensor = tensor

    def build(self, x: popxl.Tensor, eps: float = 1e-5) -> popxl.Tensor:
        """`x` of shape (..., C), normalised. `ValueError` for a scalar."""
        check_type(x, popxl.Tensor, "RMSNorm: `x`", "a Tensor, such as of `popxl.constant`")
        if not x.rank:
            raise ValueError("RMSNorm: `x` is a scalar; expected a tensor with an axis to normalise over.")
        weight = self.add_variable_input("weight", partial(initial.ones, x.shape[-1]), x.dtype)
        return _rms_norm(x, TensorParallel.along(self.tensor, "RMSNorm").entered(weight), eps=float(eps))
