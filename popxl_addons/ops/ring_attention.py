"""Attention over sequences that exceed the memory of one device: each replica has some positions.

Keys and values go round the ring of the replicas, and each replica combines the results for its queries, as
`popxl.ops.attention` combines blocks: for each query there is the result so far, and the logarithm of the sum of the
exponentials of its scores. The gradient sends them round again, together with their gradients, which arrive at their
owners last. That goes in the opposite direction: in the same one, XLA would identify these blocks with those of the
forward pass, and keep all of them.

A block is sent while the previous one is processed. A barrier makes it wait for the result of the one before that;
otherwise all would be sent at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

import popxl
from popxl import OpKind
from popxl.errors import PopxlError
from popxl.extend.arguments import flag, number
from popxl.extend.collectives import Group, members
from popxl.extend.kernels import attention_backward, attention_forward, attention_specs
from popxl.extend.ops import like_first
from popxl.op import REFUSED, BetweenReplicas
from popxl.replica_grouping import Groups


def _ring(q: Any, k: Any, v: Any, *, causal: bool, scale: float, group: Group) -> tuple[Any, Any]:
    def attention(k: Any, v: Any, causal: bool) -> tuple[Any, Any]:
        out, logs = attention_forward(q, k, v, None, None, causal=causal, scale=scale, dropout=0.0)
        return out.astype(logs.dtype), logs

    coming = _shift_arrays(group, 1, k, v)
    out, logs = attention(k, v, causal)
    for distance in range(1, group.size):
        k, v = coming
        if distance + 1 < group.size:
            (k, v), (out, logs) = lax.optimization_barrier(((k, v), (out, logs)))
            coming = _shift_arrays(group, 1, k, v)
        block_out, block_logs = attention(k, v, False)
        if causal:  # blocks received from behind are of later positions
            block_logs = jnp.where(group.rank >= distance, block_logs, -jnp.inf)
        total = jnp.logaddexp(logs, block_logs)
        out = sum(t * jnp.exp(weight - total)[..., None] for t, weight in ((out, logs), (block_out, block_logs)))
        logs = total
    return out, logs


def _ring_backward(
    g: Any, q: Any, k: Any, v: Any, out: Any, logs: Any, *, causal: bool, scale: float, group: Group
) -> tuple[Any, Any, Any]:
    def gradients(k: Any, v: Any, logs: Any, causal: bool) -> tuple[Any, Any, Any]:
        block_gradients = attention_backward(
            g, q, k, v, out, logs, None, None, is_part=True, causal=causal, scale=scale, dropout=0.0
        )
        return tuple(t.astype(logs.dtype) for t in block_gradients)

    if group.size == 2:  # both directions are one: XLA would keep the forward pass's blocks, and not send them again
        g, k, v = lax.optimization_barrier((g, k, v))
    coming = _shift_arrays(group, -1, k, v)
    dq, dk, dv = gradients(k, v, logs, causal)
    for distance in range(1, group.size):
        k, v = coming
        if distance + 1 < group.size:
            (k, v), (dq, dk, dv) = lax.optimization_barrier(((k, v), (dq, dk, dv)))
            coming = _shift_arrays(group, -1, k, v)
        is_later = causal & (group.rank + distance < group.size)
        dk, dv = lax.optimization_barrier((dk, dv))  # or XLA sends the dtype that a kernel rounded them to, not float32
        dk, dv = _shift_arrays(group, -1, dk, dv)
        # For later positions all weights are 0.
        block_gradients = gradients(k, v, jnp.where(is_later, jnp.inf, logs), False)
        dq, dk, dv = (t + dt for t, dt in zip((dq, dk, dv), block_gradients, strict=True))
    return dq, *_shift_arrays(group, -1, dk.astype(k.dtype), dv.astype(v.dtype))


def _shift_arrays(group: Group, distance: int, *ts: Any) -> tuple[Any, ...]:
    return tuple(group.shifted(t, distance) for t in ts) if group.size > 1 else ts


def _specs(q: Any, k: Any, v: Any, *, causal: bool, **how: Any) -> Sequence[popxl.TensorSpec]:
    specs = attention_specs(q, k, v, dropout=0.0)
    if not k.shape[-2] or (causal and q.shape[-2] != k.shape[-2]):
        raise PopxlError(
            f"a replica has {q.shape[-2]} queries and {k.shape[-2]} keys; expected at least one key, and with `causal` "
            "as many as queries."
        )
    return specs


def _gradient(forward: Any, gs: Sequence[popxl.Tensor | None]) -> dict[int, popxl.Tensor]:
    """Gradients of all three operands, by one op."""
    op, (g, _) = forward.op, gs
    if g is None:
        return {}
    out, logs = forward.read_in_last_layout(op.outputs[0]), forward.read(op.outputs[1])
    gradients = _ring_attention_grad(g, *map(forward.read, op.inputs), out, logs, **op.attributes)
    return {i: dt for i, dt in enumerate(gradients) if forward.wants(i)}


_ring_attention = OpKind(
    "RingAttention",
    _ring,
    shape=_specs,
    operands=("queries", "keys", "values"),
    result=("attention_out", "attention_logs"),
    gradient=_gradient,
    traits=[BetweenReplicas("own")],
    key="popxl_addons.RingAttention",
)
_ring_attention_grad = OpKind(
    "RingAttentionGrad",
    _ring_backward,
    shape=lambda g, q, k, v, out, logs, **how: tuple(map(like_first, (q, k, v))),
    result=("attention_queries_grad", "attention_keys_grad", "attention_values_grad"),
    gradient=REFUSED,
    traits=[BetweenReplicas("own")],
    key="popxl_addons.RingAttentionGrad",
)


def ring_attention(
    queries: popxl.Tensor,
    keys: popxl.Tensor,
    values: popxl.Tensor,
    causal: bool = False,
    scale: float | None = None,
    group: Groups | None = None,
) -> popxl.Tensor:
    """`ops.attention` over texts sharded by position, with consecutive positions on consecutive group members.

    Keys and values go from member to member, in one step less than there are members. No member ever holds more than
    two blocks of them, so sequences may be that many times longer. In a step each member processes the block that it
    has received. With `causal` it skips blocks of later positions, but the last member processes all: a step takes as
    long as without.

    The gradient sends keys and values round again, together with their gradients, in float32. It is the gradient of the
    sum of the members' losses.

    Args:
        queries: tensor of shape `(..., heads, length, channels)`, of the replica's positions.
        keys: tensor of shape `(..., key heads, key length, channels)`, likewise. The number of heads divides that of
            the queries.
        values: tensor of shape `(..., key heads, key length, value channels)`.
        causal: each query sees the keys up to its own place.
        scale: scale of the scores, 1 / √channels by default.
        group: replicas that share a sequence, in order: a grouping, or names of axes; all by default.

    Returns:
        A new tensor of shape `(..., heads, length, value channels)`, and of the dtype of the queries.

    Raises:
        PopxlError: if the shapes do not fit, or the dtypes differ.
        TypeError: if `scale` is not a number.
        ValueError: if the replicas of the Ir cannot be grouped like this.

    See also: Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context" (2023).

    Example:
        Texts of 4 × 16 places, on four replicas.

        >>> with popxl.Ir(axes={"data": 2, "text": 4}).main_graph:
        ...     x = popxl.variable(np.ones((2, 8, 16, 32)), popxl.bfloat16)
        ...     y = addons.ops.ring_attention(x, x, x, causal=True, group="text")
        >>> y.shape
        (2, 8, 16, 32)
    """
    name = "ring_attention"
    if scale is None:
        scale = 1 / math.sqrt(max(queries.shape[-1], 1)) if isinstance(queries, popxl.Tensor) and queries.shape else 1.0
    how: dict[str, Any] = {
        "causal": flag(causal, f"{name}: `causal`"),
        "scale": float(number(scale, f"{name}: `scale`")),
    }
    out, _ = _ring_attention(queries, keys, values, **how, **members(name, group))
    return out
