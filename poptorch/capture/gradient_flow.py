"""Gradient flow of a trace: the values that PyTorch tracks, and the points where gradients stop."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from traceback import walk_stack
from typing import Any

import torch

from poptorch.base.logging_ import logger
from poptorch.capture.trace import Node, Trace, Value

APPLICATION = "_poptorch_application"
"""Name of the attribute, on the object that PyTorch passes to a custom `backward`, for the recorded application."""


def record_gradient(value: Value, t: torch.Tensor, blocks_grad: bool) -> None:
    """Record whether gradients flow through a value: PyTorch knows this once its op ends, until the next op.

    Args:
        blocks_grad: whether gradients stop if `t` needs none; otherwise that is left open.
    """
    value.requires_grad = t.requires_grad or (False if blocks_grad else None)
    if value.requires_grad and value.producer is not None and value.producer.op == "aten.detach":
        _as_alias(value.producer, t)
    grad_fn = None if t._is_view() else t.grad_fn  # on access, PyTorch would regenerate the derivative of a view
    if type(grad_fn).__name__ == "CppFunction":  # a function of `torch.jit.script` that has run before, say
        value.of_function = type(grad_fn)
    if (application := getattr(grad_fn, APPLICATION, None)) is not None:
        application.differentiated.add(id(value))
    elif isinstance(grad_fn, torch.autograd.function.BackwardCFunction):
        value.of_function = type(grad_fn)._forward_cls


def _as_alias(node: Node, t: torch.Tensor) -> None:
    """Turn a `detach`, inserted by PyTorch to save a result for its backward pass, into an alias of this result."""
    if t.grad_fn is None:  # the user's, with `requires_grad_`
        return
    (value,) = node.inputs
    while value.producer is not None and value.producer.op == "aten.detach":
        (value,) = value.producer.inputs
    node.op, node.arguments = "aten.alias", {"input": value}


@cache
def warn_about_derivative(function: type) -> None:
    """Warn once about an ignored custom derivative. PyTorch's own functions are exempt: their derivatives agree."""
    if issubclass(function, torch.autograd.Function) and not function.__module__.startswith("torch."):
        logger.warning(
            "%s.backward has no effect in a wrapped model: what `forward` computes is differentiated. Where it should "
            "count, write the function with `detach`, as in `x + (round(x) - x).detach()`.",
            function.__qualname__,
        )


def is_in_own_derivative() -> bool:
    """Whether a `torch.autograd.Function` is running `forward`, where PyTorch tracks no gradients.

    `Function.apply` leaves no frame of its own from PyTorch 2.15 on; its callees have one in each version.
    """
    forwards = {getattr(function.forward, "__code__", None) for function in subclasses_of(torch.autograd.Function)}
    return any(frame.f_code in forwards for frame, _ in walk_stack(sys._getframe(1)))


def subclasses_of(base: type[Any]) -> Iterator[type[Any]]:
    """All subclasses of a class, direct and indirect."""
    for derived in base.__subclasses__():
        yield derived
        yield from subclasses_of(derived)


def stop_gradients(trace: Trace) -> None:
    """Mark op results that stop gradients: differentiable results without gradients, from inputs that have gradients.

    Within a function that brings its own derivative (`torch.autograd.Function`) PyTorch tracks nothing, though its
    results have gradients; the operands of such results are differentiated as if the function had been inlined.
    """
    for node in trace.nodes:
        tracked = any(value.requires_grad for value in node.inputs)
        for result in node.results:
            if result.requires_grad is None:  # no tensor ever was this value
                result.requires_grad = tracked and result.is_differentiable
    inside: set[int] = set()
    for node in reversed(trace.nodes):
        if node.op == "aten.detach" and not any(v.requires_grad for v in (*node.inputs, *node.results)):
            inside.difference_update(map(id, node.results))
        elif any(r.of_function or id(r) in inside for r in node.results):
            inside.update(id(v) for v in node.inputs if not v.requires_grad)
    for node in trace.nodes:
        if any(v.requires_grad or id(v) in inside for v in node.inputs):
            results = enumerate(node.results)
            stops = [i for i, r in results if r.is_differentiable and not r.requires_grad and id(r) not in inside]
            node.stops = frozenset(stops)
