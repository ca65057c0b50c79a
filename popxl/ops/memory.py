"""Ops that determine when a value becomes available, and in which memory it is kept; its elements stay the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from popxl.core.aliasing import through_calls
from popxl.core.declaration import OpKind
from popxl.core.recording import Op
from popxl.core.tensor import Tensor
from popxl.core.traits import Colocated, Schedules
from popxl.ops.kernels import memory
from popxl.values.shapes import like_first


def _available_after(t: Any, other: Any) -> Any:
    (after,), _ = memory.available_together([t], [other])
    return after


available_after_kind, recomputed_after_kind = (
    OpKind(
        "AvailableAfter",
        _available_after,
        shape=like_first,
        result="{t}_after",
        gradient={"t": lambda g: g},
        traits=[Colocated()],
        key=key,
    )
    for key in ("AvailableAfter", "RecomputedAfter")
)
scheduled_after_kind = OpKind(
    "ScheduledAfter",
    lambda t, other: memory.scheduled_together([t], [other])[0][0],
    shape=like_first,
    result="{t}_after",
    gradient={"t": lambda g: g},
    traits=[Colocated(), Schedules()],
)
_after_all = OpKind(
    "AvailableAfterAll",
    lambda t, *others: memory.computed_after(t, others),
    shape=lambda t, *others: t.spec,
    result="{t}_after",
    gradient={"t": lambda g: g},
)
_offload = OpKind(
    "Offload", lambda t: memory.in_host_memory(t), shape=like_first, result="{t}_offloaded", gradient={"t": lambda g: g}
)
_reload = OpKind(
    "Reload", lambda t: memory.in_device_memory(t), shape=like_first, result="{t}_reloaded", gradient={"t": lambda g: g}
)


def is_offloaded(t: Tensor) -> bool:
    """Whether `offload` produces a tensor, directly or in a called graph."""
    *_, inner = through_calls(t)
    return inner.producer is not None and inner.producer.kind is _offload


def offloads(ops: Iterable[Op]) -> bool:
    """Whether any of `ops` is an `offload`."""
    return any(op.kind is _offload for op in ops)


def available_after(t: Tensor, other: Tensor) -> Tensor:
    """Make `t` available to the compiler only after computation of `other`.

    A computation on the result is not merged with the same computation on `t` elsewhere in the program: it runs again,
    once `other` is available. Recomputation is built on this op (`popxl_addons.recompute_graph`).

    See also: `jax.lax.optimization_barrier`. XLA removes that one on CPUs; this op holds there, too.

    Args:
        t: tensor of any shape and dtype.
        other: tensor of any shape. One without elements is always there.

    Returns:
        A tensor like `t`. Its gradient is that of `t`; none flows to `other`.

    Example:
        >>> again = ops.gelu(ops.available_after(x, gradient))
    """
    return available_after_kind(t, other)


def recomputed_after(t: Tensor, other: Tensor) -> Tensor:
    """`available_after` for recomputation in a gradient graph, where nothing else in the graph computes the same.

    A loop that calls nothing but the graph needs no wait: the forward calls are in another loop.
    """
    return recomputed_after_kind(t, other)


def without_wait(t: Tensor) -> Tensor:
    """Operand of the `available_after` op that produces `t`; `t` itself for other producers."""
    op = t.origin.producer
    return t if op is None or op.kind not in (available_after_kind, recomputed_after_kind) else op.inputs[0]


def available_after_all(t: Tensor, others: Sequence[Tensor]) -> Tensor:
    """`t`, ordered after the computation of all `others`, also at run time: none of them is postponed beyond it.

    `available_after` orders what compilers merge, and not what they schedule.
    """
    return _after_all(t, *others) if others else t


def scheduled_after(t: Tensor, other: Tensor) -> Tensor:
    """`t`, with a hint to compute it after `other`, for compilers that schedule by it; others get `t` itself."""
    return scheduled_after_kind(t, other)


def offload(t: Tensor) -> Tensor:
    """Copy `t` to host memory. Only `ops.reload` may read the result.

    On CPUs, where both memories are the same, nothing is copied.

    Args:
        t: tensor of any shape. TPUs move no dtypes of 64 bits.

    Returns:
        A tensor like `t`, whose gradient is that of `t`.

    Example:
        >>> kept = ops.offload(h)
        >>> h = ops.reload(kept)  # later
    """
    return _offload(t)


def reload(t: Tensor) -> Tensor:
    """Copy an `ops.offload` result back to device memory.

    Args:
        t: tensor that `ops.offload` made, or the input of a graph that is bound to one.

    Returns:
        A tensor like `t`, whose gradient is that of `t`.

    Example:
        >>> h = ops.reload(ops.offload(h))
    """
    return _reload(t)
