"""Statements of a program about values that replicas share: they compute nothing, and `popxl check` reads them."""

from __future__ import annotations

from popxl.core.declaration import OpKind
from popxl.core.tensor import Tensor
from popxl.core.traits import Asserts
from popxl.ops.collectives.collectives import members
from popxl.replica_grouping import Groups
from popxl.values.shapes import like_first

_assert_kind = OpKind(
    "AssertReplicated",
    lambda t, *, stride, group_size: t,
    shape=like_first,
    gradient={"t": lambda g: g},
    result="{t}_replicated",
    traits=[Asserts()],
)


def assert_replicated(t: Tensor, group: Groups | None = None) -> Tensor:
    """Declare `t` equal on all replicas of a group, such as host data fed to each of them.

    Nothing is computed, sent or compared. `popxl check` assumes it from here on, and reports contradictions with the
    program. Gradients pass unchanged.

    Args:
        t: tensor of any shape and dtype.
        group: replicas with equal values: a grouping, or names of axes; all of them by default.

    Returns:
        A new tensor: `t`.

    Raises:
        ValueError: if the replicas of the Ir cannot be grouped like this.
        NotImplementedError: if the distance between members of the grouping is not constant.

    Example:
        >>> x = ops.collectives.assert_replicated(x)
    """
    return _assert_kind(t, **members("assert_replicated", group))
