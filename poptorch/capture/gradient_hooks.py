"""Gradient hooks, which have no effect in a program: those on modules, and those set by `forward`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from poptorch.base.patching import patched
from poptorch.capture.torch_private import without_modes
from poptorch.capture.tracer import Tracer


def hooks_of(module: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Descriptions of gradient hooks on a module and its parameters; global module hooks are included."""
    private = torch.nn.modules.module
    if private._global_backward_hooks or private._global_backward_pre_hooks:
        yield "Every module"
    for name, t in state.items():
        if t._backward_hooks or t.is_leaf and t._post_accumulate_grad_hooks:
            yield f"The parameter {name}"
    for path, each in torch.nn.Module.named_modules(module):
        if each._backward_hooks or each._backward_pre_hooks:
            yield f"The module {path or type(each).__name__}"


@contextmanager
def recording_hooks(tracer: Tracer) -> Iterator[None]:
    """Record hooks set within a block on autograd graph nodes, and hooks that change saved tensors.

    The tracer itself records hooks on tensors.
    """
    function: Any = torch.autograd.Function
    private: Any = torch._C._autograd
    saved = private.SavedTensor
    register, push = function._register_hook, private._push_saved_tensors_default_hooks
    register_saved = saved.register_hooks

    own = threading.get_ident()

    def record_hook(what: str) -> None:
        if threading.get_ident() == own:  # hooks of other threads are not of this model
            tracer.hooks.append(f"{what} of `forward` ({tracer.recorder.source()})")

    def record_and_register(hooks: Any, hook: Any) -> Any:
        record_hook("A `grad_fn`")
        return register(hooks, hook)

    def record_and_push(pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
        known: set[tuple[torch.Size, torch.dtype]] = set()

        def record_and_pack(t: torch.Tensor) -> Any:
            if (t.shape, t.dtype) not in known:
                known.add((t.shape, t.dtype))
                with tracer.suspended(), without_modes(), torch.no_grad():
                    if not _keeps_numbers(t, pack, unpack):
                        record_hook("A tensor that PyTorch saves for gradients")
            return pack(t)

        is_torchs = getattr(pack, "__module__", "") in ("torch.autograd.graph", "torch.utils.checkpoint")
        push(pack if is_torchs or threading.get_ident() != own else record_and_pack, unpack)

    def record_and_register_saved(saved_tensor: Any, pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
        record_hook("A tensor that PyTorch saves for gradients")
        register_saved(saved_tensor, pack, unpack)

    with (
        patched(function, _register_hook=staticmethod(record_and_register)),
        patched(private, _push_saved_tensors_default_hooks=record_and_push),
        patched(saved, register_hooks=record_and_register_saved),
    ):
        yield


def _keeps_numbers(t: torch.Tensor, pack: Callable[..., Any], unpack: Callable[..., Any]) -> bool:
    """Whether pack and unpack hooks preserve the contents of a similar tensor."""
    numbers = (torch.arange(t.numel(), dtype=torch.float64) * 0.618 % 1 * 2 - 1).reshape(t.shape)
    numbers = numbers.to(t.dtype) if t.is_floating_point() or t.is_complex() else (numbers * 9).to(t.dtype)
    found = unpack(pack(numbers.clone()))
    return found.dtype is numbers.dtype and found.shape == numbers.shape and torch.equal(_bytes(found), _bytes(numbers))


def _bytes(t: torch.Tensor) -> torch.Tensor:
    return t.reshape(-1).view(torch.uint8)
