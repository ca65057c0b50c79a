"""`TensorHooks`: the gradient hooks on tensors of a capture, `t.register_hook(hook)`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.utils.hooks import RemovableHandle

from poptorch.capture.recorder import Recorder
from poptorch.capture.torch_private import in_transform
from poptorch.capture.trace import Value

Hook = Callable[[torch.Tensor], torch.Tensor | None]


@dataclass(frozen=True)
class TensorHook:
    """Gradient hook of a value; `None` for a tensor outside the trace.

    Attributes:
        number: key among `hooks`, all those of the tensor. A removed hook is no longer there.
        description: description of the tensor.
    """

    value: Value | None
    number: int
    hooks: Mapping[int, Hook]
    description: str

    @property
    def is_removed(self) -> bool:
        """Whether the hook has been removed since."""
        return self.number not in self.hooks

    def __call__(self, gradient: torch.Tensor) -> torch.Tensor | None:
        return self.hooks[self.number](gradient)


class TensorHooks:
    """Gradient hooks on tensors, in the order of their registration."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.hooks: list[TensorHook] = []

    def add_parameters(self, state: Mapping[str, torch.Tensor], values: Mapping[str, Value]) -> None:
        """Add hooks on parameters of a module, once for tied ones."""
        for value, name in {value: name for name, value in values.items()}.items():
            hooks = state[name]._backward_hooks or {}
            self.hooks += [TensorHook(value, number, hooks, f"The parameter {name}") for number in hooks]

    def register(self, t: torch.Tensor, hook: Hook) -> RemovableHandle:
        """`t.register_hook(hook)` in `forward`."""
        handle = t.register_hook(hook)
        is_elsewhere = self._recorder.frames.is_nested or in_transform()
        value = None if is_elsewhere else self._recorder.value_of(t)
        what = f"A tensor of `forward` ({self._recorder.source()})"
        self.hooks.append(TensorHook(value, handle.id, t._backward_hooks or {}, what))
        return handle
