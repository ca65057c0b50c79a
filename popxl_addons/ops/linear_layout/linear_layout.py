"""A copy with another layout on the device."""

from __future__ import annotations

import popxl
from popxl.extend.arguments import integer
from popxl.extend.ops import like_first

_LinearLayout = popxl.OpKind("LinearLayout", lambda t, *, bs: t, shape=like_first, gradient={"t": lambda g: g})


def linear_layout(t: popxl.Tensor, bs: int = 1) -> popxl.Tensor:
    """Copy `t`, for programs requesting layout in pieces of `bs` elements; XLA chooses layouts itself.

    Args:
        t: any tensor.
        bs: a positive integer, without effect.

    Returns:
        A new tensor with the values, shape and dtype of `t`. Gradients pass unchanged.

    Raises:
        TypeError: if `bs` is not an integer.
        ValueError: if it is not positive.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     y = linear_layout(popxl.constant([1.0, 2.0]), bs=2)
        >>> y.shape
        (2,)
    """
    grain = integer(bs, "linear_layout: `bs`")
    if grain < 1:
        raise ValueError(f"linear_layout: `bs` is {grain}; expected the number of elements in a piece, 1 or more.")
    return _LinearLayout(t, bs=grain)
