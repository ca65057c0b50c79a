"""Layer norm over an axis that is divided among replicas: global statistics, results for each part."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

import popxl
from popxl import OpKind, TensorSpec
from popxl.extend.collectives import Group, members
from popxl.extend.kernels import widen
from popxl.op import REFUSED, BetweenReplicas, RecomputedFrom
from popxl.replica_grouping import Groups
from popxl_addons.errors import OperandShapeError

__all__ = ["layer_norm_distributed"]


def _specs(t: Any, w: Any, b: Any, **attributes: Any) -> tuple[TensorSpec, ...]:
    if len(t.shape) != 2:
        raise OperandShapeError(
            f"expected `t` of rank 2: rows, and the channels of this replica; it has rank {len(t.shape)}."
        )
    for name, vector in {"w": w, "b": b}.items():
        if vector.shape != t.shape[1:]:
            raise OperandShapeError(f"expected `{name}` of shape ({t.shape[1]},), one number for each channel of `t`.")
    statistics = TensorSpec(t.shape[:1], popxl.float32)
    return TensorSpec(t.shape, t.dtype), statistics, statistics


def _layer_norm(t: Any, w: Any, b: Any, *, epsilon: float, group: Group) -> tuple[Any, Any, Any]:
    """Layer norm over shards. Total variance: mean of shard variances plus variance of shard means."""
    t, w, b = map(widen, (t, w, b))
    of_parts = group.members(jnp.stack([t.mean(axis=1), t.var(axis=1)]))
    means, variances = of_parts[:, 0], of_parts[:, 1]
    mean = means.mean(axis=0)
    inverse = lax.rsqrt((variances + jnp.square(means - mean)).mean(axis=0) + epsilon)
    return w * _normal(t, mean, inverse) + b, mean, inverse


def _normal(t: Any, mean: Any, inverse: Any) -> Any:
    return (widen(t) - mean[:, None]) * inverse[:, None]


def _layer_norm_grad(g: Any, t: Any, w: Any, mean: Any, inverse: Any, *, group: Group) -> tuple[Any, Any, Any]:
    g, x = widen(g), _normal(t, mean, inverse)
    u = g * widen(w)
    level, slope = group.combined(jnp.stack([u.mean(axis=1), (u * x).mean(axis=1)]), "mean")
    dt = (u - level[:, None] - x * slope[:, None]) * inverse[:, None]
    return dt, (g * x).sum(axis=0), g.sum(axis=0)


def _gradients(forward: Any, gs: tuple[popxl.Tensor | None, ...]) -> dict[int, popxl.Tensor]:
    """Gradients of all three operands, by one op."""
    op = forward.op
    if gs[0] is None:
        return {}
    read = (forward.read(x) for x in (*op.inputs[:2], *op.outputs[1:]))
    groups = {name: op.attributes[name] for name in ("stride", "group_size")}
    found = _layer_norm_distributed_grad(gs[0], *read, **groups)
    return {i: gradient for i, gradient in enumerate(found) if forward.wants(i)}


_layer_norm_distributed_grad = OpKind(
    "LayerNormDistributedGrad",
    _layer_norm_grad,
    shape=lambda g, t, w, mean, inverse, **groups: tuple(TensorSpec(x.shape, x.dtype) for x in (t, w, w)),
    gradient=REFUSED,
    result=("layer_norm_t_grad", "layer_norm_w_grad", "layer_norm_b_grad"),
    traits=[BetweenReplicas("own")],
)
_layer_norm_again = OpKind(
    "LayerNormByStatistics",
    lambda t, w, b, mean, inverse: widen(w) * _normal(t, mean, inverse) + widen(b),
    shape=lambda t, *others: TensorSpec(t.shape, t.dtype),
    result="layer_norm_out",
)
_layer_norm_distributed = OpKind(
    "LayerNormDistributed",
    _layer_norm,
    shape=_specs,
    gradient=_gradients,
    result=("layer_norm_out", "layer_norm_mean", "layer_norm_inv_std_dev"),
    traits=[
        BetweenReplicas("own"),
        RecomputedFrom((1, 2), lambda mean, inverse, t, w, b, **how: _layer_norm_again(t, w, b, mean, inverse)),
    ],
)


def layer_norm_distributed(
    t: popxl.Tensor,
    w: popxl.Tensor,
    b: popxl.Tensor,
    epsilon: float = 1e-5,
    group: Groups | None = None,
) -> popxl.Tensor:
    """Layer norm of rows that are divided among the replicas of a group: ``w * (t - mean) / sqrt(var + epsilon) + b``.

    Mean and variance are those of all channels of a row; the variance is divided by their count. They are computed in
    float32 and kept so. The gradient of `t` is that of the whole layer norm, with its weights.

    Args:
        t: float tensor of shape ``(rows, channels)``, the channels of this replica.
        w, b: tensors of shape ``(channels,)``.
        epsilon: constant added to the variance.
        group: the replicas among which the channels are divided, equally; all of them by default. Their stride may be
            any.

    Returns:
        A new tensor of the shape and dtype of `t`. Mean and inverse standard deviation are in the graph as well.

    Raises:
        ValueError: if the replicas of the Ir cannot be grouped like this.
        OperandShapeError: if `t` has another rank, or `w` or `b` another shape.

    Example:
        >>> with popxl.Ir(replication=2).main_graph:
        ...     t = popxl.variable(np.ones((3, 4)), popxl.float32, "t")
        ...     w, b = (popxl.variable(np.ones(4), popxl.float32) for _ in "wb")
        ...     y = layer_norm_distributed(t, w, b)
        >>> y.shape
        (3, 4)
    """
    groups = members("layer_norm_distributed", group)
    y, _, _ = _layer_norm_distributed(t, w, b, epsilon=float(epsilon), **groups)
    return y
