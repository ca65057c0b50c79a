"""Operators that functions of PyTorch reach in some of its versions or modes only, called by their own names."""

from __future__ import annotations

import torch

from tests.poptorch.operators import Row, normal

_aten = torch.ops.aten
_INDEX = [2, 0]


def _out(function: str) -> Row:
    """A reduction along a dimension, into tensors that are there."""

    def into(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values, indices = torch.empty(3), torch.empty(3, dtype=torch.long)
        getattr(torch, function)(x, 0, out=(values, indices))
        return values, indices

    return Row(f"{function}, into others", into, (normal(5, 3),), half=False, gradient=False)


def _out_of_all(function: str) -> Row:
    return Row(
        f"{function} of all, into another",
        lambda x: getattr(torch, function)(x, out=torch.empty(())),
        (normal(5, 3),),
        half=False,
        gradient=False,
    )


ROWS = [
    Row("softmax", lambda x: _aten.softmax(x, 1), (normal(2, 3),)),
    Row("_softmax", lambda x: _aten._softmax(x, 1, False), (normal(2, 3),)),
    Row("log_softmax", lambda x: _aten.log_softmax(x, 1), (normal(2, 3),)),
    Row("_log_softmax", lambda x: _aten._log_softmax(x, 1, False), (normal(2, 3),)),
    Row("alias", lambda x: _aten.alias(x * 2) + 1, (normal(2, 3),)),
    Row("copy", lambda x, y: _aten.copy(x, y), (normal(2, 3), normal(2, 3, seed=1)), gradient=False),
    Row("_unsafe_index", lambda x: _aten._unsafe_index(x, [torch.tensor(_INDEX)]), (normal(4, 3),)),
    Row(
        "_unsafe_index_put",
        lambda x, y: _aten._unsafe_index_put(x, [torch.tensor(_INDEX)], y),
        (normal(4, 3), normal(2, 3)),
    ),
    Row(
        "_index_put_impl_",
        lambda x, y: _aten._index_put_impl_(x * 1, [torch.tensor(_INDEX)], y),
        (normal(4, 3), normal(2, 3)),
    ),
    Row("expand_copy", lambda x: torch.expand_copy(x, (4, 2, 3)), (normal(2, 3),)),
    Row("slice_copy", lambda x: torch.slice_copy(x, 1, 0, 3, 2), (normal(2, 4),)),
    Row("split_copy", lambda x: torch.split_copy(x, 2, 1), (normal(2, 5),)),
    Row("split_with_sizes_copy", lambda x: torch.split_with_sizes_copy(x, [1, 4], 1), (normal(2, 5),)),
    Row("unsafe_split_with_sizes", lambda x: torch.unsafe_split_with_sizes(x, [1, 4], 1), (normal(2, 5),)),
    Row("t_copy", torch.t_copy, (normal(2, 3),)),
    Row("transpose_copy", lambda x: torch.transpose_copy(x, 0, 2), (normal(2, 3, 4),)),
    Row("unbind_copy", lambda x: torch.unbind_copy(x, 1), (normal(2, 3),)),
    Row("unfold_copy", lambda x: torch.unfold_copy(x, 1, 2, 1), (normal(2, 5),)),
    Row("unsqueeze_copy", lambda x: torch.unsqueeze_copy(x, 1), (normal(2, 3),)),
    Row("view_copy", lambda x: torch.view_copy(x, (3, 2)), (normal(2, 3),)),
    Row("as_strided_copy", lambda x: torch.as_strided_copy(x, (2, 2), (3, 1), 1), (normal(2, 3),)),
    *map(_out, ("min", "max", "median", "nanmedian")),
    *map(_out_of_all, ("min", "max")),
    Row("cholesky", lambda x: torch.linalg.cholesky(x @ x.mT + torch.eye(3)), (normal(3, 3),), half=False),
]
