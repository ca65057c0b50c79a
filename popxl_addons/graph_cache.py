"""Graph cache: calls that would build equal graphs share one.

A graph depends on the callable, on the specs of its tensor arguments, on the values of its other arguments, on
where its ops are placed, and on the precision that a model is built in. These make the key of a call; equal keys share
a graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import popxl
from popxl import ops
from popxl.context import get_current_context
from popxl.extend.arguments import exact_key
from popxl_addons.graph import BoundGraph, GraphWithNamedArgs
from popxl_addons.precision import cache_key


class GraphCache:
    """Cache of created graphs, for the lifetime of each `Ir`.

    Example:
        >>> ir, cache = popxl.Ir(), GraphCache()
        >>> double = lambda x: x * 2.0
        >>> with ir.main_graph:
        ...     a, b = popxl.variable([1.0, 2.0]), popxl.variable([3.0, 4.0])
        ...     cache.create_graph(double, a) == cache.create_graph(double, b)
        True
    """

    def __init__(self) -> None:
        # Weak graphs, too: a graph keeps its Ir alive, and the Ir keeps its graphs.
        self._graphs: WeakKeyDictionary[popxl.Ir, WeakValueDictionary[Hashable, popxl.Graph]] = WeakKeyDictionary()

    def create_graph(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> popxl.Graph:
        """``ir.create_graph(fn, *args, **kwargs)`` in the current Ir, or the graph made earlier for an equal call.

        Functions are equal to themselves only; modules, if their hashes are. Tensors and specs count by shape, dtype
        and meta-shape, other arguments by value. Arguments are compared as they are passed: by position or by
        keyword, with or without a default spelled out, makes a difference. `TypeError` for an unhashable argument.

        The callable and the other arguments are kept with the graph: if they refer to the Ir, it lives as long as this
        cache.
        """
        ir = popxl.gir()
        graphs = self._graphs.setdefault(ir, WeakValueDictionary())
        key = _call_key(fn, args, kwargs)
        graph = graphs.get(key)
        if graph is None or graph not in ir.graphs:  # it may have been removed since
            graph = graphs[key] = ir.create_graph(fn, *args, **kwargs)
        return graph


def function(fn: Callable[..., Any]) -> Callable[..., tuple[popxl.Tensor, ...]]:
    """Decorator for outlining: calls become graph calls, with one graph per combination of argument specs.

    The arguments must be positional tensors. The result is always a tuple.

    Example:
        >>> @function
        ... def mm(a, b):
        ...     return a @ b
        >>> with popxl.Ir().main_graph:
        ...     a, b = popxl.constant([[1.0, 2.0]]), popxl.constant([[3.0], [4.0]])
        ...     (y,), (z,) = mm(a, b), mm(a, b)  # two calls of one graph
    """
    cache = GraphCache()

    @functools.wraps(fn)
    def outlined(*args: Any, **kwargs: Any) -> tuple[popxl.Tensor, ...]:
        return ops.call(cache.create_graph(fn, *args, **kwargs), *args, **kwargs)

    return outlined


def bound_arguments(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Mapping[str, Any]:
    """Bound call arguments as cache keys: as passed, plus the module itself."""
    of_module = {"self": fn} if isinstance(fn, popxl.Module) else {}
    return {**of_module, "args": args, "kwargs": kwargs}


def tensor_hash(t: popxl.Tensor | popxl.TensorSpec) -> int:
    """Equal for tensors and specs of equal shape, dtype and meta-shape."""
    return hash(_argument_key(t))


def argument_hash(arg: Any) -> int:
    """Hash of graph-relevant argument properties. Raises `TypeError` for unhashable `arg`.

    Example:
        >>> spec = popxl.TensorSpec((2,), popxl.float32)
        >>> argument_hash([spec, 1]) == argument_hash([popxl.TensorSpec((2,), popxl.float32), 1])
        True
    """
    return hash(_argument_key(arg))


def get_function_hash(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> int:
    """Equal for calls, at the present placement, that may share a graph."""
    return hash(_call_key(fn, args, kwargs))


def _call_key(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    context = get_current_context()
    return (
        context.ipu_id,
        context.io_tile_set,
        cache_key(getattr(fn, "layer_name", None)),
        _ByHash(fn),
        tuple((name, _argument_key(argument)) for name, argument in bound_arguments(fn, *args, **kwargs).items()),
    )


def _argument_key(arg: Any) -> Hashable:
    # Graphs and tensors are named, not held: a key must not keep an Ir alive. The cache has separate keys for each Ir.
    match arg:
        case popxl.Tensor() | popxl.TensorSpec():
            return "tensor", tuple(arg.shape), arg.dtype, tuple(arg.meta_shape)
        case popxl.Graph():
            return "graph", arg.id
        case GraphWithNamedArgs():
            return "graph", arg.graph.id
        case BoundGraph():
            return "bound", arg.graph.id, frozenset((inner.id, outer.id) for inner, outer in arg.args.items())
        case popxl.ReplicaGrouping():
            return "group", tuple(arg.assignment)
        case popxl.Module():
            return _ByHash(arg)
        case list() | tuple():
            return "sequence", tuple(map(_argument_key, arg))
        case dict():
            return "dictionary", tuple((_argument_key(key), _argument_key(value)) for key, value in arg.items())
        case Hashable():
            return type(arg), exact_key(arg)  # with its type, as values of several may be equal
    raise TypeError(
        f"GraphCache: an argument of type {type(arg).__name__} is unhashable, so calls with it cannot be compared. "
        "Pass a number, a string, a tuple or a tensor instead, or create the graph without a cache."
    )


class _ByHash:
    """Callable or module compared by hash alone; classes may define module equality."""

    def __init__(self, value: Any):
        self._value = value  # kept alive, because a hash by identity is meaningless once its owner is gone
        self._hash = hash(value)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByHash) and self._hash == other._hash
