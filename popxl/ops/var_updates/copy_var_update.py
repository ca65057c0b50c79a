"""`copy_var_update_`: overwrite a tensor."""

from __future__ import annotations

from typing import Any

from popxl.core.declaration import OpKind
from popxl.core.tensor import Tensor
from popxl.core.traits import Overwrites, always
from popxl.errors import PopxlError
from popxl.values.shapes import like_first, meta_shape_of, same_dtype
from popxl.values.spec import TensorSpec


def _same_spec(t: Any, X: Any) -> TensorSpec:
    """Shape rule of equal operands, without broadcasting."""
    same_dtype(t, X)
    if t.shape != X.shape:
        raise PopxlError("`t` and `X` have to have the same shape; nothing is broadcast.")
    meta_shape_of(t, X)
    return like_first(t)


_copy = OpKind(
    "CopyVarUpdate",
    lambda t, X: X,
    shape=_same_spec,
    result="updated__{t}",
    traits=[Overwrites("t", forgets=always)],
    gradient=None,
)


def copy_var_update_(t: Tensor, X: Tensor) -> Tensor:
    """Overwrite `t` with `X`.

    Args:
        t: tensor to overwrite.
        X: new content, of the same shape and dtype. It is neither changed nor shared.

    Returns:
        An alias of `t`.

    Raises:
        PopxlError: if the shapes or the dtypes differ.

    Example:
        >>> ops.var_updates.copy_var_update_(first_moment, gradient)
    """
    return _copy(t, X)
