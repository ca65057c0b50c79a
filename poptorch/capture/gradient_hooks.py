"""Gradient hooks: hooks on tensors become part of the program; hooks on modules, and others, have no effect."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from poptorch.base.patching import patched
from poptorch.capture.derivatives import own_derivative, substitute, trace_backward
from poptorch.capture.losses import MARKED
from poptorch.capture.tensor_hooks import TensorHook
from poptorch.capture.torch_private import without_modes
from poptorch.capture.trace import Node, Trace, Value
from poptorch.capture.tracer import Tracer


def hooks_of(module: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Descriptions of hooks on a module, global ones included, and of those that run after a parameter's gradient."""
    private = torch.nn.modules.module
    if private._global_backward_hooks or private._global_backward_pre_hooks:
        yield "Every module"
    for name, t in state.items():
        if t.is_leaf and t._post_accumulate_grad_hooks:
            yield f"The parameter {name}"
    for path, each in torch.nn.Module.named_modules(module):
        if each._backward_hooks or each._backward_pre_hooks:
            yield f"The module {path or type(each).__name__}"


@contextmanager
def recording_hooks(tracer: Tracer) -> Iterator[None]:
    """Record hooks set within a block on autograd graph nodes, and hooks that change saved tensors."""
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
    copy = unpack(pack(numbers.clone()))
    return copy.dtype is numbers.dtype and copy.shape == numbers.shape and torch.equal(_bytes(copy), _bytes(numbers))


def _bytes(t: torch.Tensor) -> torch.Tensor:
    return t.reshape(-1).view(torch.uint8)


# Hooks on tensors -----------------------------------------------------------------------------------------------------


def apply_hooks(tracer: Tracer, hooks: Iterable[TensorHook], has_breaks: bool) -> None:
    """Route gradients through hooks on tensors; the tracer notes those which a program cannot have.

    Like the `backward` of a `torch.autograd.Function`, a hook runs once, for a gradient without numbers, and becomes
    the gradient of an op, between the tensor and its readers. A hook that returns nothing looks at numbers, of which
    there are none.
    """
    by_value: dict[Value | None, list[TensorHook]] = {}
    for hook in hooks:
        if not hook.is_removed:
            by_value.setdefault(hook.value, []).append(hook)
    for value, group in by_value.items():
        if value is None or has_breaks or not _apply(tracer, value, group):
            tracer.hooks.append(group[0].description)


def _apply(tracer: Tracer, value: Value, hooks: Sequence[TensorHook]) -> bool:
    """Whether the gradient of a value could be routed through hooks."""
    nodes, maker = tracer.recorder.trace.nodes, value.producer
    readers = [node for node in _nodes_with_gradients(nodes) if value in node.inputs]
    if maker is not None and maker.op in MARKED:  # where gradients begin
        return False
    if not readers:
        return True
    looks = False

    def backward(gradient: torch.Tensor) -> list[torch.Tensor]:
        nonlocal looks
        with torch.no_grad():
            for hook in hooks:
                changed = hook(gradient)
                looks |= changed is None
                gradient = gradient if changed is None else changed.expand_as(gradient)
        return [gradient]

    with tracer.suspended():
        gradient = torch.zeros(value.shape, dtype=value.dtype)
    beside = maker or readers[0]
    trace = trace_backward(tracer, beside, f"{hooks[0].description}: a hook on its gradient", backward, [gradient])
    makers = [maker, *(outer.producer for outer in trace.outer)]
    end = max((i + 1 for i, node in enumerate(nodes) if any(node is each for each in makers)), default=0)
    early = any(node in readers for node in nodes[:end])  # reads it before there is what the hook reads
    if looks or early:
        return False
    _insert(nodes, end, value, readers, trace, beside)
    return True


def _nodes_with_gradients(nodes: Sequence[Node]) -> list[Node]:
    """Nodes through which the gradient of a loss may flow, last first: no `detach`, or what only such ones read."""
    read = set[int]()
    found = []
    for node in reversed(nodes):
        if node.op != "aten.detach" and (node.op in MARKED or any(id(result) in read for result in node.results)):
            found.append(node)
            read.update(map(id, node.inputs))
    return found


def _insert(nodes: list[Node], end: int, value: Value, readers: Iterable[Node], backward: Trace, beside: Node) -> None:
    """Insert an op that returns a value for its readers, with a trace as its gradient."""
    hooked = Value(value.shape, value.dtype, requires_grad=True)

    substitute(readers, lambda each: hooked if each is value else each)
    arguments = {"results": [value], "inputs": [value], "numbers": [0], "name": "hook"}
    nodes.insert(end, own_derivative([hooked], backward, beside, **arguments))
