"""Ops that mark tensors: as a loss, for the log, for results of all micro-batches, as hints."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy
import torch

from poptorch.capture.tracer import current
from poptorch.enums import MatMulSerializationMode, OverlapMode
from poptorch.errors import createPoptorchError
from poptorch.ops.declaration import op
from poptorch.placement.capture_context import current as ambient


@op()
def identity_loss(x: torch.Tensor, reduction: str) -> torch.Tensor:
    """Mark a tensor as the loss of the model, from which gradients flow.

    Args:
        x: losses of the samples, or the loss itself.
        reduction: `"sum"`, `"mean"`, or `"none"`: reduction of its elements to one.

    Example:
        >>> loss = poptorch.identity_loss((output - target) ** 2, reduction="mean")
    """
    reductions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "sum": torch.sum,
        "mean": torch.mean,
        "none": torch.clone,
    }
    assert reduction in reductions, f"identity_loss: `reduction` is {reduction!r}; expected one of {list(reductions)}."
    return reductions[reduction](x)


@op()
def ipu_print_tensor(
    tensor: torch.Tensor,
    title: str = "",
    print_gradient: bool = True,
    summarise_threshold: int = 1000,
    edge_items: int = 3,
    max_line_width: int = 80,
    digits: int = 4,
    float_format: str = "auto",
    separator: str = ", ",
    open_bracket: str = "(",
    close_bracket: str = ")",
) -> torch.Tensor:
    """Print a tensor on standard error whenever the program reaches this op, and its gradient when that is computed.

    Use the result in place of the tensor: if nothing uses it, nothing may be printed.

    Args:
        tensor: the tensor.
        title: text before its values; before its gradient, followed by `_gradient`.
        print_gradient: whether to print the gradient.
        summarise_threshold: number of elements above which only those at the edges are printed; 0: all are printed.
        edge_items: number of elements at each edge.
        max_line_width: the length of lines; 0: lines are not split.
        digits: number of digits; 0: as many as needed.
        float_format: `"auto"`, `"fixed"`, `"scientific"` or `"none"`.
        separator: between elements.
        open_bracket, close_bracket: around a dimension.

    Raises:
        poptorch.Error: for an argument of another type or value.

    Example:
        >>> x = poptorch.ipu_print_tensor(x, "activations")
    """
    formats = ("auto", "fixed", "scientific", "none")
    if float_format not in formats:
        raise createPoptorchError(f"ipu_print_tensor: `float_format` is {float_format!r}; expected one of {formats}.")
    for argument, number in (
        ("summarise_threshold", summarise_threshold),
        ("edge_items", edge_items),
        ("max_line_width", max_line_width),
        ("digits", digits),
    ):
        if not isinstance(number, int | numpy.integer) or number < 0:
            raise createPoptorchError(f"ipu_print_tensor: `{argument}` is {number!r}; expected an integer, 0 or more.")
    texts = {"separator": separator, "open_bracket": open_bracket, "close_bracket": close_bracket}
    for argument, text in {"title": title, **texts}.items():
        if not isinstance(text, str):
            raise createPoptorchError(f"ipu_print_tensor: `{argument}` is {text!r}; expected a string.")
    if not isinstance(tensor, torch.Tensor):
        raise createPoptorchError(f"ipu_print_tensor: `tensor` is {tensor!r}; expected a tensor.")
    return tensor.clone()


@op()
def nop(tensor: torch.Tensor) -> torch.Tensor:
    """Identity that is never optimised away.

    Example:
        >>> poptorch.nop(torch.ones(2))
        tensor([1., 1.])
    """
    return tensor.clone()


@op()
def return_all(tensor: torch.Tensor) -> torch.Tensor:
    """Identity. Returned by the model, the tensor comes back for all micro-batches, regardless of the output mode."""
    return tensor.clone()


@op()
def set_available_memory(tensor: torch.Tensor, available_memory_proportion: float) -> torch.Tensor:
    """Identity; the proportion of memory for the op that computes the tensor has no effect here.

    Args:
        tensor: the result of that op.
        available_memory_proportion: the proportion, from 0 to 1.

    Raises:
        ValueError: for any other proportion.

    Example:
        >>> y = poptorch.set_available_memory(torch.relu(x), 0.4)
    """
    if not isinstance(available_memory_proportion, int | float) or not 0 <= available_memory_proportion <= 1:
        raise ValueError(
            f"set_available_memory: `available_memory_proportion` is {available_memory_proportion!r}; expected a "
            "number from 0 to 1."
        )
    return tensor.clone()


def recomputationCheckpoint(*tensors: Any) -> Any:
    """Identity of tensors that are saved for the backward pass.

    In training, ops between two checkpoints are recomputed in the backward pass, and their results are not saved;
    results after the last checkpoint are saved. `options._Popart.set("autoRecomputation", 0)` switches it off.

    Returns:
        For one tensor, a tensor; for several, a tuple; for a list or a tuple, the same.

    Example:
        >>> x = poptorch.recomputationCheckpoint(x)
    """
    if len(tensors) > 1:
        return tuple(_checkpoint(t) for t in tensors)
    (given,) = tensors
    return _like(given, map(_checkpoint, given)) if isinstance(given, list | tuple) else _checkpoint(given)


def _checkpoint(t: torch.Tensor) -> torch.Tensor:
    if not isinstance(t, torch.Tensor):
        raise createPoptorchError(f"recomputationCheckpoint: expected tensors; got {t!r} ({type(t).__name__}).")
    kept, tracer = t.clone(), current()
    if tracer is not None and tracer.is_recording(kept):
        tracer.recorder.keep(kept)
    return kept


def set_overlap_for_input(input_tensors: Any, mode: OverlapMode) -> Any:
    """Identity of model inputs; the overlap of their transfer with computation has no effect here.

    Args:
        input_tensors: tensors, in tuples, lists and dicts of any depth.
        mode: the part of the program to overlap with. `NoOverlap` needs no permission of the options.

    Raises:
        poptorch.Error: for anything but a tensor; at compilation, for a tensor that is not an input, or has another
            use.

    Example:
        >>> x = poptorch.set_overlap_for_input(x, poptorch.OverlapMode.OverlapAccumulationLoop)
    """
    return _overlapping("set_overlap_for_input", input_tensors, mode)


def set_overlap_for_output(output_tensors: Any, mode: OverlapMode) -> Any:
    """As `set_overlap_for_input`, for a tensor that the model returns once."""
    return _overlapping("set_overlap_for_output", output_tensors, mode)


def _overlapping(name: str, given: Any, mode: OverlapMode) -> Any:
    if isinstance(given, torch.Tensor):
        state, tracer = ambient(), current()
        if state is None or tracer is None or mode is OverlapMode.NoOverlap:
            return given
        state.overlaps = True
        return tracer.record(f"poptorch.{name}", lambda tensor: tensor.clone(), {"tensor": given})
    if isinstance(given, dict):
        return type(given)((key, _overlapping(name, value, mode)) for key, value in given.items())
    if isinstance(given, list | tuple):
        return _like(given, (_overlapping(name, value, mode) for value in given))
    raise createPoptorchError(f"{name}: expected tensors; got {given!r} ({type(given).__name__}).")


def _like(given: Any, items: Iterable[Any]) -> Any:
    """List or tuple of the given type, including named tuples."""
    return given._make(items) if hasattr(given, "_make") else type(given)(items)


@op()
def serializedMatMul(
    lhs: torch.Tensor, rhs: torch.Tensor, mode: MatMulSerializationMode, factor: int = 0, keep_precision: bool = False
) -> torch.Tensor:
    """Matrix product; the split into `factor` parts along the axis of `mode` has no effect here.

    Example:
        >>> mode = poptorch.MatMulSerializationMode.OutputChannels
        >>> poptorch.serializedMatMul(torch.ones(2, 3), torch.ones(3, 4), mode, factor=2).shape
        torch.Size([2, 4])
    """
    assert isinstance(mode, MatMulSerializationMode), (
        f"serializedMatMul: `mode` is {mode!r}; expected a poptorch.MatMulSerializationMode."
    )
    assert isinstance(factor, int) and factor >= 0, (
        f"serializedMatMul: `factor` is {factor!r}; expected a number of parts, 0 or more."
    )
    return torch.matmul(lhs, rhs)
