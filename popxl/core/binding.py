"""Tracing of a Python function into a graph, for `Ir.create_graph`: arguments become inputs, results outputs."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any

import jax

from popxl.base.arguments import check_type
from popxl.base.log import Logger
from popxl.base.names import identifier
from popxl.core.tensor import Tensor
from popxl.graph import Graph
from popxl.module import Module
from popxl.values.spec import TensorByRef, TensorSpec

_log = Logger("ir")


def graph_name(fn: Callable[..., Any] | Module) -> str:
    """Derive a graph name from its function. Raises `TypeError` for an unsuitable `fn`."""
    if isinstance(fn, Module):
        return type(fn).__qualname__.replace(".<locals>", "")
    if callable(fn) and hasattr(fn, "__qualname__"):
        return str(fn.__qualname__).replace(".<locals>", "")
    raise TypeError(
        f"create_graph: `fn` must be a function, a method or a popxl.Module; got {fn!r} ({type(fn).__name__}). "
        "Wrap other callables (functools.partial, callable objects) in a function."
    )


def _without_types(signature: inspect.Signature) -> inspect.Signature:
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return inspect.Signature(parameters)


def build_graph(graph: Graph, fn: Callable[..., Any] | Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run `fn` inside an empty graph, with inputs in place of tensors, and take what it returns as the outputs."""
    signature = inspect.signature(fn.build if isinstance(fn, Module) else fn)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as problem:
        raise ValueError(
            f"create_graph: the arguments do not match the signature of `{graph_name(fn)}`: {problem}. It takes "
            f"{_without_types(signature)}."
        ) from None
    bound.apply_defaults()
    with graph:
        convert = _convert_tree if takes_trees(fn) else _convert
        for name, parameter in signature.parameters.items():
            bound.arguments[name] = convert(graph, parameter, bound.arguments[name])
        results = fn(*bound.args, **bound.kwargs)
        for t in _tensors_returned(fn, results):
            graph.add_output(t)


def _convert(graph: Graph, parameter: inspect.Parameter, value: Any) -> Any:
    """Convert an argument for `fn`, replacing tensors by graph inputs."""
    name = parameter.name
    by_ref = _is_by_ref(parameter.annotation)
    if _is_spec(value):
        return _input(graph, value, name, by_ref)
    if parameter.kind is parameter.VAR_KEYWORD:
        if _holds_specs(name, list(value.values())):
            return {key: _input(graph, spec, key, by_ref) for key, spec in value.items()}
    elif isinstance(value, list | tuple) and _holds_specs(name, value):
        inputs = [_input(graph, spec, f"{name}_{i}", by_ref) for i, spec in enumerate(value)]
        return tuple(inputs) if parameter.kind is parameter.VAR_POSITIONAL else inputs
    return value


def takes_trees(fn: Any) -> bool:
    """Test whether arguments and results of `fn` are trees, as those of functions of JAX are."""
    return getattr(fn, "_takes_trees", False)


def _convert_tree(graph: Graph, parameter: inspect.Parameter, value: Any) -> Any:
    """Convert an argument for a function of JAX, replacing each tensor of a tree by an input named after its path."""

    def convert(path: tuple[Any, ...], leaf: Any) -> Any:
        keys = [jax.tree_util.keystr((key,), simple=True) for key in path]
        names = keys if parameter.kind is parameter.VAR_KEYWORD else [parameter.name, *keys]
        by_ref = _is_by_ref(parameter.annotation)
        return _input(graph, leaf, "_".join(map(identifier, names)), by_ref) if _is_spec(leaf) else leaf

    return jax.tree.map_with_path(convert, value)


def is_input(argument: Any) -> bool:
    """Test whether an argument becomes graph inputs: tensors, specs, lists of tensors."""
    return _is_spec(argument) or (isinstance(argument, list | tuple) and any(map(_is_spec, argument)))


def _is_spec(value: Any) -> bool:
    return isinstance(value, Tensor | TensorSpec)


def _holds_specs(name: str, values: Iterable[Any]) -> bool:
    """Test whether a container consists of tensors. Raises `TypeError` for mixed containers."""
    kinds = {_is_spec(value) for value in values}
    if len(kinds) > 1:
        raise TypeError(
            f"create_graph: `{name}` mixes tensors with other values: {list(values)!r}. Pass the tensors (or specs) "
            "and the other values as separate arguments."
        )
    return kinds == {True}


def _is_by_ref(annotation: Any) -> bool:
    """Test whether an annotation object is `TensorByRef`, or `List` or `Tuple` thereof."""
    if annotation is TensorByRef:
        return True
    parts = typing.get_args(annotation)
    # `list[TensorByRef]` is not meant: PopXL knows the typing generics only.
    is_plain = isinstance(annotation, types.GenericAlias)
    if not is_plain and typing.get_origin(annotation) in (list, tuple) and parts == (TensorByRef,):
        return True
    if TensorByRef in parts or (isinstance(annotation, str) and "TensorByRef" in annotation):
        _log.warn(
            f"create_graph: inputs that are annotated as {annotation!r} are passed by value. Annotate with "
            "TensorByRef, typing.List[TensorByRef] or typing.Tuple[TensorByRef] to pass by reference. Text is not "
            "read as an annotation: `from __future__ import annotations` makes them text."
        )
    return False


def _input(graph: Graph, spec: Any, name: str, by_ref: bool) -> Tensor:
    check_type(spec.shape, Iterable, f"The shape of {name!r}", "a sequence of integers")
    return graph.add_input(TensorSpec(tuple(spec.shape), spec.dtype, tuple(spec.meta_shape)), name, by_ref)


def _tensors_returned(fn: Any, results: Any) -> list[Tensor]:
    if results is None:
        return []
    if takes_trees(fn):
        results = jax.tree.leaves(results)
    if isinstance(results, Tensor):
        return [results]
    outputs = list(results) if isinstance(results, Iterable) else [results]
    if not all(isinstance(t, Tensor) for t in outputs):
        raise ValueError(
            f"create_graph: `{graph_name(fn)}` returned {results!r}; expected None, a Tensor, or an iterable of "
            "Tensors."
        )
    return outputs
