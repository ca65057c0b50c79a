"""Loops and conditionals in models."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, SupportsIndex, cast

import torch

from poptorch.capture.tracer import current
from poptorch.errors import createPoptorchError
from poptorch.ops.declaration import Tensors, shapes_text


def for_loop(count: int, body: Callable[..., Any], inputs: Tensors) -> Tensors:
    """Call a function repeatedly, each time on its previous results.

    In a wrapped model the function is one graph, regardless of `count`. It receives copies: tensors that it overwrites
    have an effect only if it returns them. It can use other tensors.

    Args:
        count: number of calls.
        body: a function with as many arguments and results as there are inputs.
        inputs: the first arguments.

    Returns:
        A list of the last results.

    Raises:
        ValueError: if `inputs` is not a list of tensors.
        poptorch.Error: if `count` is not an integer of 0 or more, or `body` no function; if its results differ from its
            inputs in number, shape or dtype; in training.

    Example:
        >>> poptorch.for_loop(3, lambda x: x * 2, [torch.tensor(1)])
        [tensor(8)]
    """
    if not isinstance(count, SupportsIndex) or operator.index(count) < 0:
        raise createPoptorchError(f"for_loop: `count` is {count!r}; expected an integer, 0 or more.")
    if not callable(body):
        raise createPoptorchError(f"for_loop: `body` is {body!r}; expected a function of tensors.")
    _check_list(inputs)
    if (tracer := current()) is None:
        values = [t.clone() for t in inputs]
        for _ in range(count):
            values = _as_list(body(*values))
        return values
    trace, results = tracer.trace_body(body, inputs)
    if [(t.shape, t.dtype) for t in results] != [(t.shape, t.dtype) for t in inputs]:
        raise createPoptorchError(
            f"for_loop: the body takes {shapes_text(inputs)} and returns {shapes_text(results)}. It has to "
            "return as many tensors as it takes, of the same shapes and dtypes."
        )
    arguments = {"count": count, "body": trace, "inputs": list(inputs)}
    return cast(Tensors, tracer.record("poptorch.for_loop", lambda **given: [t.clone() for t in inputs], arguments))


def cond(
    condition: torch.Tensor,
    then_body: Callable[..., Any],
    then_inps: Tensors,
    else_body: Callable[..., Any],
    else_inps: Tensors,
) -> Tensors:
    """Call one of two functions, by the value of a tensor at run time.

    Args:
        condition: a tensor with one bool.
        then_body, else_body: functions whose results agree in number, shapes and dtypes.
        then_inps, else_inps: lists of their arguments, which are copied.

    Returns:
        A list of the function's results.

    Raises:
        ValueError: if the inputs are not lists of tensors.
        poptorch.Error: if the results of the functions disagree; in training.

    Example:
        >>> x = torch.tensor(3)
        >>> poptorch.cond(x > 2, lambda x: x + 1, [x], lambda x: x - 1, [x])
        [tensor(4)]
    """
    _check_list(then_inps)
    _check_list(else_inps)
    if (tracer := current()) is None:
        body, inputs = (then_body, then_inps) if bool(condition) else (else_body, else_inps)
        return _as_list(body(*(t.clone() for t in inputs)))
    then_trace, results = tracer.trace_body(then_body, then_inps)
    else_trace, others = tracer.trace_body(else_body, else_inps)
    if [(t.shape, t.dtype) for t in results] != [(t.shape, t.dtype) for t in others]:
        raise createPoptorchError(
            f"cond: the bodies return {shapes_text(results)} and {shapes_text(others)}; expected the same of both."
        )
    arguments = {
        "condition": condition,
        "then_body": then_trace,
        "then_inputs": list(then_inps),
        "else_body": else_trace,
        "else_inputs": list(else_inps),
    }
    return cast(
        Tensors, tracer.record("poptorch.cond", lambda **given: [torch.empty_like(t) for t in results], arguments)
    )


def _check_list(inputs: Any) -> None:
    if not isinstance(inputs, list):
        raise ValueError(f"Object is not list: {inputs!r} ({type(inputs).__name__}); pass a list of tensors.")
    for i, each in enumerate(inputs):
        if not isinstance(each, torch.Tensor):
            raise ValueError(f"Object contained in list at index {i} is not torch.tensor: {each!r}.")


def _as_list(results: Any) -> Tensors:
    return list(results) if isinstance(results, list | tuple) else [results]
