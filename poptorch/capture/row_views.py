"""`RowViews`: rows of tensors at run-time positions, with the behaviour of views.

PyTorch reads the position, and returns a view of the tensor. In a capture the rows are a copy. After a write to the
copy, the tensor is updated; if the tensor was overwritten, the copy is updated before its next use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from poptorch.capture.recorder import Recorder
from poptorch.capture.storages import TensorStorage
from poptorch.capture.torch_private import FakeTensor, in_transform, storage_key

_State = tuple[TensorStorage, int]
"""State of a tensor: storage, and version of its contents."""


@dataclass(eq=False)
class _RowView:
    """Rows of a tensor: a copy, its origin, and the states of both when they were last equal."""

    copy: torch.Tensor
    base: torch.Tensor
    dim: int
    rows: torch.Tensor
    copy_state: _State
    base_state: _State


class RowViews:
    """Copies of rows at run-time positions, kept equal to the rows."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._views: dict[int, _RowView] = {}
        self._last: tuple[torch.Tensor, Any, torch.Tensor] | None = None

    def take(self, base: torch.Tensor, dim: int, rows: torch.Tensor) -> torch.Tensor:
        """Rows of a tensor."""
        copy = base.index_select(dim, rows)
        if not in_transform():
            states = self._recorder.state_of(copy), self._recorder.state_of(base)
            self._views[storage_key(copy)] = _RowView(copy, base, dim, rows, *states)
        return copy

    def remember(self, base: torch.Tensor, index: Any, result: torch.Tensor) -> torch.Tensor:
        """Result of `base[index]`, remembered for `ends_update`."""
        self._last = (base, index, result)
        return result

    def ends_update(self, base: torch.Tensor, index: Any, value: Any) -> bool:
        """Whether `base[index] = value` ends `base[index] += ...`, whose result is in `base` already."""
        given = (base, index, value)
        if self._last is None or any(a is not b for a, b in zip(self._last, given, strict=True)):
            return False
        view = self._views.get(storage_key(value))
        return view is not None and view.base_state == self._recorder.state_of(view.base)

    def refresh(self, given: Any) -> None:
        """Update copies in a nested structure, and views of copies, whose origins were overwritten."""
        if not self._views or in_transform():
            return
        for t in pytree.tree_leaves(given):
            view = self._views.get(storage_key(t)) if isinstance(t, FakeTensor) else None
            # A view may be of a body that has ended.
            if view is not None and self._recorder.frames.owns(view.copy_state[0].value):
                self.refresh(view.base)
                if view.base_state != (state := self._recorder.state_of(view.base)):
                    view.base_state = state
                    view.copy.copy_(view.base.index_select(view.dim, view.rows))
                    view.copy_state = self._recorder.state_of(view.copy)

    def write_back(self) -> None:
        """Write rows to their origins, if the copies were overwritten; rows of rows first."""
        for view in reversed(self._views.values() if not in_transform() else ()):
            if view.copy_state != (state := self._recorder.state_of(view.copy)):
                view.copy_state = state
                view.base.index_copy_(view.dim, view.rows, view.copy)
                view.base_state = self._recorder.state_of(view.base)
