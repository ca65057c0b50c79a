"""`StandIn`: replacement of a fake tensor that user objects still reference after a capture."""

from __future__ import annotations

from typing import Any

import torch

from poptorch.errors import createPoptorchError

_TENSOR: Any = torch.Tensor
_METADATA = frozenset(
    [_TENSOR.size, _TENSOR.dim, _TENSOR.ndimension, _TENSOR.numel, _TENSOR.stride, _TENSOR.__len__, _TENSOR.__hash__]
    + [getattr(_TENSOR, name).__get__ for name in ("shape", "dtype", "device", "layout", "ndim", "requires_grad")]
)  # fmt: skip


class StandIn(torch.Tensor):
    """Tensor with metadata only, such as shape and dtype; any other use raises an error that names its origin."""

    _source: str

    @staticmethod
    def for_tensor(t: torch.Tensor, where: str) -> StandIn:
        """New stand-in for a tensor created at source line `where`."""
        made: StandIn = torch.empty(t.shape, dtype=t.dtype, device="meta").as_subclass(StandIn)
        made._source = where
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _METADATA:
            return super().__torch_function__(func, types, args, kwargs or {})
        stand_in = next(each for each in torch.utils._pytree.tree_leaves([args, kwargs]) if isinstance(each, cls))
        raise createPoptorchError(
            f"{stand_in!r} has no numbers: `forward` has made it when the model was compiled before, and kept since. A "
            "program gives what `forward` returns, so return it."
        )

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"A tensor of {tuple(self.shape)} and {self.dtype}{f' ({self._source})' * bool(self._source)}"

    def __deepcopy__(self, memo: dict[int, Any]) -> StandIn:
        return self
