"""The ops of poptorch that models use.

On the host each is computed by PyTorch. In a model that is being captured it is one op of the program, whose results
have the shapes and dtypes of what PyTorch would compute. What the ops are in a program is in `poptorch.lowering`.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, SupportsIndex, TypeVar, cast

import numpy
import torch

from poptorch.base.leaves import Leaf
from poptorch.base.structures import structure_of
from poptorch.capture.host_function import HostFunction
from poptorch.capture.torch_private import without_modes
from poptorch.capture.tracer import current
from poptorch.enums import MatMulSerializationMode, OverlapMode
from poptorch.errors import createPoptorchError
from poptorch.placement.ambient import current as ambient

__all__ = [
    "CPU",
    "cond",
    "ctc_beam_search_decoder",
    "custom_op",
    "dynamic_slice",
    "dynamic_update",
    "for_loop",
    "fps",
    "identity_loss",
    "ipu_print_tensor",
    "nearest",
    "nop",
    "recomputationCheckpoint",
    "serializedMatMul",
    "set_available_memory",
    "set_overlap_for_input",
    "set_overlap_for_output",
]

F = TypeVar("F", bound=Callable[..., Any])
Tensors = list[torch.Tensor]


def _op(has_effect: bool = False) -> Callable[[F], F]:
    """Make a function of tensors an op: its body is what it computes on the host."""

    def declare(function: F) -> F:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def op(*args: Any, **kwargs: Any) -> Any:
            tracer = current()
            if tracer is None:
                return function(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return tracer.record(f"poptorch.{function.__name__}", function, bound.arguments, has_effect)

        return cast(F, op)

    return declare


# Losses and looks -----------------------------------------------------------------------------------------------------


@_op()
def identity_loss(x: torch.Tensor, reduction: str) -> torch.Tensor:
    """Mark a tensor as the loss of the model, from which gradients flow.

    Args:
        x: what is computed for each sample, or the loss itself.
        reduction: `"sum"`, `"mean"`, or `"none"`: how its elements become one.

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


@_op()
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
    """Print a tensor, on standard error, whenever the program comes there; and its gradient, when that is computed.

    Use the result in place of the tensor: if nothing uses it, nothing may be printed.

    Args:
        tensor: what to print.
        title: printed before it; before its gradient, followed by `_gradient`.
        print_gradient: whether the gradient is printed.
        summarise_threshold: how many elements are printed at most, before only those at the edges are; 0: all.
        edge_items: how many elements are printed at each edge.
        max_line_width: the length of lines; 0: lines are not split.
        digits: how many digits numbers have; 0: as many as they need.
        float_format: `"auto"`, `"fixed"`, `"scientific"` or `"none"`.
        separator: between elements.
        open_bracket, close_bracket: around a dimension.

    Raises:
        poptorch.Error: for a format, a number or a text that is something else.

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


@_op()
def nop(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor. The op is never optimised away.

    Example:
        >>> poptorch.nop(torch.ones(2))
        tensor([1., 1.])
    """
    return tensor.clone()


@_op()
def return_all(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor. Where the model returns it, a call gives that of all micro-batches, whatever the output mode."""
    return tensor.clone()


# What changes no number -----------------------------------------------------------------------------------------------


@_op()
def set_available_memory(tensor: torch.Tensor, available_memory_proportion: float) -> torch.Tensor:
    """The same tensor. How much memory the op that makes it may take has no effect here.

    Args:
        tensor: the result of that op.
        available_memory_proportion: a part of the memory, from 0 to 1.

    Raises:
        ValueError: if it is something else.

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
    """The same tensors, which are kept for the backward pass.

    In a model that is trained, what is computed from one checkpoint to the next is computed again in the backward pass,
    rather than kept; what follows the last one is kept. `options._Popart.set("autoRecomputation", 0)` switches it off.

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
    if tracer is not None and tracer.hears(kept):
        tracer.recorder.keep(kept)
    return kept


def set_overlap_for_input(input_tensors: Any, mode: OverlapMode) -> Any:
    """The same inputs. That their transfer may overlap with computation has no effect here.

    Args:
        input_tensors: tensors, in tuples, lists and dicts of any depth.
        mode: with what. With `NoOverlap` it is plain, and the options need not allow it.

    Raises:
        poptorch.Error: for something that is no tensor; when the model is compiled, for one that is no input, or that
            anything else uses.

    Example:
        >>> x = poptorch.set_overlap_for_input(x, poptorch.OverlapMode.OverlapAccumulationLoop)
    """
    return _overlapping("set_overlap_for_input", input_tensors, mode)


def set_overlap_for_output(output_tensors: Any, mode: OverlapMode) -> Any:
    """As `set_overlap_for_input`, for what the model returns, once."""
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
    """A list or tuple of the same type, which may be a named tuple."""
    return given._make(items) if hasattr(given, "_make") else type(given)(items)


@_op()
def serializedMatMul(
    lhs: torch.Tensor,
    rhs: torch.Tensor,
    mode: MatMulSerializationMode,
    factor: int = 0,
    keep_precision: bool = False,
) -> torch.Tensor:
    """A matrix product. That it is split into `factor` parts, along what `mode` says, has no effect here.

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


# Slices at places that tensors say ------------------------------------------------------------------------------------


@_op()
def dynamic_slice(tensor: torch.Tensor, dim: int, start: torch.Tensor, size: int, step: int) -> torch.Tensor:
    """Cut a part out of a tensor that begins where another tensor says.

    Args:
        tensor: what to cut from.
        dim: along which dimension.
        start: where to begin: a whole number, in a tensor.
        size: how long the part is.
        step: how far apart elements are.

    Returns:
        `ceil(size / step)` elements along `dim`: those at start, start + step, ...

    Raises:
        poptorch.Error: for arguments of other types, a `dim` that the tensor does not have, and a part that is longer
            than the dimension.

    Example:
        >>> poptorch.dynamic_slice(torch.arange(6), 0, torch.tensor(2), 3, 1)
        tensor([2, 3, 4])
    """
    _check_slice("dynamic_slice", {"tensor": tensor}, start, {"dim": dim, "size": size, "step": step})
    if not 0 < size <= tensor.shape[dim] or step < 1:
        raise createPoptorchError(
            f"dynamic_slice: {size} elements with step {step}, of {tensor.shape[dim]} in dimension {dim}. `size` has "
            "to be from 1 to that number, and `step` 1 or more."
        )
    if current() is not None:
        return tensor.narrow(dim, 0, size)[(slice(None),) * (dim % tensor.dim()) + (slice(None, None, step),)].clone()
    places = torch.arange(math.ceil(size / step)) * step + start.reshape(())
    return tensor.index_select(dim, places)


@_op()
def dynamic_update(input: torch.Tensor, src: torch.Tensor, dim: int, start: torch.Tensor, size: int) -> torch.Tensor:
    """A copy of a tensor in which a part, which begins where another tensor says, is replaced.

    Args:
        input: the tensor.
        src: the new part.
        dim: along which dimension it lies.
        start: where it begins: a whole number, in a tensor.
        size: how long it is.

    Raises:
        poptorch.Error: for arguments of other types, a `dim` that the tensor does not have, and if `src` has another
            dtype or another shape than the part.

    Example:
        >>> poptorch.dynamic_update(torch.zeros(4), torch.ones(2), 0, torch.tensor(1), 2)
        tensor([0., 1., 1., 0.])
    """
    _check_slice("dynamic_update", {"input": input, "src": src}, start, {"dim": dim, "size": size})
    part = list(input.shape)
    if not 0 < size <= part[dim]:
        raise createPoptorchError(
            f"dynamic_update: {size} elements, of {part[dim]} in dimension {dim}. `size` has to be from 1 to that "
            "number."
        )
    part[dim] = size
    if input.dim() != src.dim():
        raise createPoptorchError(
            f"dynamic_update: input and src tensors must have same dimensionality. ({input.dim()}) vs ({src.dim()})"
        )
    if input.dtype is not src.dtype:
        raise createPoptorchError(
            f"dynamic_update: input and src tensor must have same dtype. ({input.dtype} vs {src.dtype})"
        )
    if list(src.shape) != part:
        raise createPoptorchError(
            f"dynamic_update: `src` has the shape {list(src.shape)}; expected that of the part, {part}."
        )
    result = input.clone()
    if current() is not None:
        return _following(result, src)
    result.narrow(dim, int(start), size).copy_(src)
    return result


def _check_slice(name: str, tensors: Mapping[str, Any], start: Any, numbers: Mapping[str, Any]) -> None:
    """Check the types of what a slice is given: its tensors, the first of which is cut; numbers, of which one is `dim`.

    Raises:
        poptorch.Error: if one of them is something else.
    """
    for argument, t in tensors.items():
        if not isinstance(t, torch.Tensor):
            raise createPoptorchError(f"{name}: `{argument}` is of type {type(t).__name__}; expected a tensor.")
    if not isinstance(start, torch.Tensor) or start.dtype not in _INTEGERS or start.numel() != 1:
        what = f"{list(start.shape)} of {start.dtype}" if isinstance(start, torch.Tensor) else f"{start!r}"
        raise createPoptorchError(f"{name}: `start` is {what}; expected a tensor with an integer.")
    for argument, number in numbers.items():
        if not isinstance(number, int | numpy.integer) or isinstance(number, bool):
            raise createPoptorchError(
                f"{name}: `{argument}` is {number!r}, a {type(number).__name__}; expected an int. Only `start` may be "
                "a tensor, as shapes are fixed."
            )
    dims = next(iter(tensors.values())).dim()
    if not -dims <= numbers["dim"] < dims:
        raise createPoptorchError(f"{name}: `dim` is {numbers['dim']}, of a tensor with {dims} dimensions.")


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


# Searches -------------------------------------------------------------------------------------------------------------


@_op()
def ctc_beam_search_decoder(
    probs: torch.Tensor, lengths: torch.Tensor, blank: int = 0, beam_width: int = 100, top_paths: int = 1
) -> Tensors:
    """The most likely labels of sequences whose classes are known with some probability at each time.

    Args:
        probs: logarithms of the probabilities, `[time, batch, classes]`.
        lengths: of the sequences, `[batch]`.
        blank: the class that is no label.
        beam_width: how many beginnings the search keeps at a time.
        top_paths: how many results there are for each sequence.

    Returns:
        Logarithms of their probabilities `[batch, top_paths]`; how many labels they have `[batch, top_paths]`; the
        labels `[batch, top_paths, time]`, followed by blanks. The best come first.

    Example:
        >>> probs = torch.tensor([[[0.1, 0.8, 0.1]], [[0.7, 0.2, 0.1]], [[0.1, 0.2, 0.7]]]).log()
        >>> poptorch.ctc_beam_search_decoder(probs, torch.tensor([3]))[2]
        tensor([[[1, 2, 0]]], dtype=torch.int32)
    """
    time, batch, _ = probs.shape
    if current() is not None:
        paths = torch.empty(batch, top_paths, dtype=torch.int32)
        return [torch.empty(batch, top_paths), paths, paths[..., None].expand(-1, -1, time).clone()]
    from poptorch.base.beam_search import beam_search  # which needs JAX, as little else on the host does

    given = probs.detach().numpy(), lengths.numpy().astype("int32")
    found = beam_search(*given, blank=blank, beam_width=beam_width, top_paths=top_paths)
    return [torch.from_numpy(numpy.array(each)) for each in found]


# Points ---------------------------------------------------------------------------------------------------------------


@_op()
def fps(src: torch.Tensor, ptr: Sequence[int], ratio: float = 0.5, random_start: bool = False) -> torch.Tensor:
    """A sample of points of which each is as far as possible from those before it.

    Args:
        src: points, `[points, coordinates]`, of several sets one after the other.
        ptr: where each set begins, and where the last one ends.
        ratio: how much of each set is sampled, rounded up.
        random_start: whether the first point of each set is a random one, not the first.

    Returns:
        Their numbers.

    Example:
        >>> poptorch.fps(torch.tensor([[0.0], [1.0], [5.0], [2.0]]), [0, 4])
        tensor([0, 2])
    """
    found = []
    for start, stop in itertools.pairwise(int(p) for p in ptr):
        points = src[start:stop]
        count = math.ceil(ratio * (stop - start))
        if current() is not None:
            found.append(torch.empty(count, dtype=torch.int64))
            continue
        chosen = [int(torch.randint(len(points), ())) if random_start else 0]
        nearest_one = torch.full((len(points),), math.inf)
        while len(chosen) < count:
            nearest_one = torch.minimum(nearest_one, ((points - points[chosen[-1]]) ** 2).sum(-1))
            chosen.append(int(nearest_one.argmax()))
        found.append(torch.tensor(chosen[:count]) + start)
    return torch.cat(found)


@_op()
def nearest(
    x: torch.Tensor,
    y: torch.Tensor,
    batch_x: torch.Tensor | Sequence[int] | None = None,
    batch_y: torch.Tensor | Sequence[int] | None = None,
) -> torch.Tensor:
    """For each point the number of the one among others that is nearest.

    Args:
        x: points, `[points, coordinates]`.
        y: the others.
        batch_x, batch_y: the number of the set that each of them belongs to, in a tensor or a list; only points of
            one set are compared.

    Example:
        >>> poptorch.nearest(torch.tensor([[1.0], [7.0]]), torch.tensor([[0.0], [8.0], [9.0]]))
        tensor([0, 1])
    """
    distances = ((x[:, None] - y[None]) ** 2).sum(-1)
    if batch_x is not None and batch_y is not None:
        apart = torch.as_tensor(batch_x)[:, None] != torch.as_tensor(batch_y)[None]
        distances = distances.masked_fill(apart, math.inf)
    return distances.argmin(1)


# Control flow ---------------------------------------------------------------------------------------------------------


def for_loop(count: int, body: Callable[..., Any], inputs: Tensors) -> Tensors:
    """Run a function several times; each time it gets what it returned the time before.

    In a wrapped model the function is one graph however often it runs. It gets copies: what it overwrites it returns.
    Other tensors can be used inside.

    Args:
        count: how often.
        body: takes and returns as many tensors as there are inputs.
        inputs: a list of what it is given first.

    Returns:
        A list of what it returned last.

    Raises:
        ValueError: if `inputs` is no list of tensors.
        poptorch.Error: if `count` is no number of times, or `body` no function; if it does not return tensors like its
            inputs; in training.

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
    trace, results = tracer.function_of(body, inputs)
    if [(t.shape, t.dtype) for t in results] != [(t.shape, t.dtype) for t in inputs]:
        raise createPoptorchError(
            f"for_loop: the body takes {_shapes(inputs)} and returns {_shapes(results)}. It has to return as many "
            "tensors as it takes, of the same shapes and dtypes."
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
    """Run one of two functions, as a tensor says when the program comes there.

    Args:
        condition: a tensor with a bool.
        then_body, else_body: functions that return as many tensors, of the same shapes and dtypes.
        then_inps, else_inps: lists of what they are given, as copies.

    Returns:
        A list of what the function returned.

    Raises:
        ValueError: if the inputs are no lists of tensors.
        poptorch.Error: if the functions return something different; in training.

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
    then_trace, results = tracer.function_of(then_body, then_inps)
    else_trace, others = tracer.function_of(else_body, else_inps)
    if [(t.shape, t.dtype) for t in results] != [(t.shape, t.dtype) for t in others]:
        raise createPoptorchError(
            f"cond: the bodies return {_shapes(results)} and {_shapes(others)}; expected the same of both."
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


def _shapes(tensors: Iterable[torch.Tensor | Leaf]) -> str:
    return ", ".join(f"{list(t.shape)} of {t.dtype}" for t in tensors) or "nothing"


# Ops that users bring -------------------------------------------------------------------------------------------------


def custom_op(
    inputs: Sequence[torch.Tensor],
    name: str,
    domain: str,
    domain_version: int,
    example_outputs: Iterable[torch.Tensor],
    attributes: Mapping[str, Any] | None = None,
) -> Tensors:
    """An op that `poptorch.registerCustomOp` has declared: a JAX function.

    One is there from the beginning: `"FastGatherLastDim"` of `"poptorch.custom_ops"` is `torch.gather` along the last
    axis, of data and indices that are equal in all others.

    Args:
        inputs: what it is given.
        name, domain: as it was registered.
        domain_version: without effect.
        example_outputs: tensors like those that it makes.
        attributes: plain values that it is given by name: numbers, strings, or lists of only one kind of these.

    Returns:
        What it makes, of the shapes and dtypes of the examples.

    Raises:
        ValueError: for attributes that are something else.
        poptorch.Error: if there is no such op; for a float beyond float32.

    Example:
        >>> poptorch.registerCustomOp("Cube", "examples", lambda x: x**3)
        >>> class Model(torch.nn.Module):
        ...     def forward(self, x):
        ...         return poptorch.custom_op((x,), "Cube", "examples", 1, example_outputs=(x,))[0]
        >>> poptorch.inferenceModel(Model())(torch.tensor([2.0]))
        tensor([8.])
    """
    examples = list(example_outputs)
    given = {key: _attribute(key, value) for key, value in (attributes or {}).items()}
    if (tracer := current()) is None:
        return [torch.zeros_like(t) for t in examples]
    arguments = {"inputs": list(inputs), "name": f"{domain}.{name}", "attributes": tuple(given.items())}
    return cast(
        Tensors,
        tracer.record(
            "poptorch.custom_op", lambda **_: [_following(torch.empty_like(t), *inputs) for t in examples], arguments
        ),
    )


def _following(result: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
    """A result that PyTorch does not know to depend on some inputs, with a gradient if one of them has."""
    tracked = any(t.requires_grad for t in inputs) and result.dtype.is_floating_point
    return result.requires_grad_() if tracked and not result.requires_grad else result


def _attribute(key: Any, value: Any) -> Any:
    """An attribute of a custom op, as part of a program."""
    if not isinstance(key, str):
        raise ValueError(f"custom_op: the attribute {key!r} is named by a {type(key).__name__}; expected a str.")
    if isinstance(value, list | tuple):
        if len({type(each) for each in value}) > 1:
            raise ValueError(f"custom_op: the attribute {key!r} mixes types: {value!r}; expected values of one type.")
        return tuple(_attribute(key, each) for each in value)
    if not isinstance(value, float | int | str):
        raise ValueError(
            f"custom_op: the attribute {key!r} is {value!r} ({type(value).__name__}); expected a float, an int, a str, "
            "or a list of these."
        )
    if isinstance(value, str) and not (value.isascii() and key.isascii()):
        raise ValueError(f"custom_op: the attribute {key!r} is {value!r}, which is not ASCII.")
    if isinstance(value, float) and math.isfinite(value) and abs(value) > torch.finfo(torch.float32).max:
        raise createPoptorchError(f"custom_op: the attribute {key!r} is {value!r}, which float32 cannot hold.")
    return value


class CPU:
    """A Python function that runs on the host, in the middle of a model that runs on the device.

    It is called with tensors of the host whenever the program comes there, and may do what it likes. For inference
    only. What it raises, the call of the model raises; until the run has ended, the program goes on with zeros then.

    Args:
        layer_to_call: the function, or a module, whose parameters are frozen. When the model is compiled it is called
            with zeros: its results always have to have the shapes and dtypes that they have for these.
        ID: name of the op.

    Raises:
        poptorch.Error: if it returns no tensors, or ones without elements; at a call, if they are of other shapes.

    Example:
        >>> class Model(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.cpu = poptorch.CPU(lambda x: x * 2, "Double")
        ...
        ...     def forward(self, x):
        ...         return self.cpu(x) + 1
        >>> poptorch.inferenceModel(Model())(torch.tensor([2.0]))
        tensor([5.])
    """

    def __init__(self, layer_to_call: Callable[..., Any], ID: str) -> None:
        if isinstance(layer_to_call, torch.nn.Module):
            layer_to_call.requires_grad_(False)
        self._function = layer_to_call
        self._name = ID

    def __call__(self, *input: Any, **kwargs: Any) -> Any:
        """Run the function: now on the host, in a captured model whenever it comes there."""
        tracer = current()
        if tracer is None:
            return self._function(*input, **kwargs)
        given = structure_of((input, kwargs), self._name)
        tensors = given.tensors((input, kwargs))
        function = HostFunction(self._name, self._function, given)
        with without_modes(), torch._C.DisableTorchFunction(), torch.no_grad():  # it is no part of the program
            example = function.result([torch.zeros(t.shape, dtype=t.dtype) for t in tensors])
        structure = structure_of(example, self._name)
        found = list(structure.leaves())
        if not found or any(0 in leaf.shape for leaf in found) and not any(0 in t.shape for t in tensors):
            shown = _shapes(found) if found else repr(example)
            raise createPoptorchError(
                f"CPU: for zeros, {self._name} returns {shown}. From what it makes of zeros the program learns the "
                "shapes of its results, which cannot depend on numbers; expected tensors that are not empty."
            )
        made = tracer.record(
            "poptorch.cpu",
            lambda **_: [torch.empty(leaf.shape, dtype=leaf.dtype) for leaf in found],
            {"inputs": tensors, "function": function, "name": self._name},
            True,
        )
        return structure.rebuild(made)

    def execute(self) -> None:
        """Nothing: the function runs when the program comes there."""

    def registerPersistentData(self) -> None:
        """Nothing: the function keeps what it needs."""
