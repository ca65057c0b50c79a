"""`constant_contents`: constant folding for values independent of inputs, parameters and random numbers.

Masks, tables of positions, and everything else made from shapes and numbers in the program. A capture records the ops
that make them, like any other; if their numbers are needed meanwhile, PyTorch computes them once from the record. The
same goes for functions of buffers, which must not change afterwards.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from poptorch.capture.preserved_functions import PRESERVED_FUNCTIONS
from poptorch.capture.tensor_layout import overwrite
from poptorch.capture.torch_private import without_modes, written_arguments
from poptorch.capture.trace import BASE, Data, Node, Value, View, tensors_in, values_in
from poptorch.errors import createPoptorchError

_BY_SHAPE = frozenset(
    f"aten.{form}" for name in ("empty", "full", "ones", "zeros") for form in (f"new_{name}", f"{name}_like")
) | {"aten.new_empty_strided"}
"""Ops that use only the shape of a tensor, not its numbers."""

_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "torch.pad": F.pad,
    "torch.linear": F.linear,
    "torch.matmul": torch.matmul,
    "torch.einsum": lambda equation, operands: torch.einsum(equation, *operands),
    "torch.softmax": F.softmax,
    "torch.log_softmax": F.log_softmax,
    "torch.embedding": F.embedding,
}
"""Preserved functions with constant folding. None is random, or overwrites anything."""


HOST_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {}
"""Host computations of ops of `poptorch`, added by their declarations."""


def buffer_dependencies(op: str, overload: str, arguments: Mapping[str, Any]) -> frozenset[str] | None:
    """Names of the buffers on which op results depend; arguments hold values in place of tensors.

    None are named if it makes the same in every run; `None` is returned if it makes something else in each.
    """
    if op in ("poptorch.constant", "poptorch.put"):
        computable = True
    elif op.startswith("torch."):
        computable = op in _FUNCTIONS
    else:
        torch_op = _op(op, overload)
        computable = torch_op is not None and torch.Tag.nondeterministic_seeded not in torch_op.tags
    if not computable:
        return None
    names: frozenset[str] = frozenset()
    for value in values_in(arguments) if op not in _BY_SHAPE else ():
        if (of_value := value.buffer_dependencies) is None:
            return None
        names |= of_value
    return names


def constant_contents(value: Value, contents: dict[Value, torch.Tensor]) -> torch.Tensor | None:
    """Contents of a value, by constant folding; `None` if they depend on a run.

    Args:
        contents: contents of buffers, and results computed before; results are added.
    """
    if value.buffer_dependencies is None:
        return None
    return computed(value, contents)


def computed(value: Value, contents: dict[Value, torch.Tensor]) -> torch.Tensor:
    """Contents of a value, computed by PyTorch from known ones. Callers must not overwrite them.

    Args:
        contents: contents of values without a maker, and results computed before; results are added.

    Raises:
        poptorch.Error: if an op that it comes of is none of PyTorch's.
    """
    if value not in contents:
        with without_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
            for node in _order(value, contents):
                contents.update(zip(node.results, _results(node, contents), strict=True))
    return contents[value]


def _order(value: Value, contents: Mapping[Value, torch.Tensor]) -> list[Node]:
    """Nodes to compute, in topological order, without recursion: chains of partial overwrites may be very long."""
    order: dict[Node, None] = {}
    waiting = [value]
    while waiting:
        node = waiting[-1].producer
        assert node is not None
        inputs = [] if node.op in _BY_SHAPE else node.inputs
        missing = [v for v in inputs if v not in contents and v.producer not in order]
        if waiting[-1] not in contents and not missing:
            order[node] = None
        if not missing:
            waiting.pop()
        waiting += missing
    return list(order)


def _results(node: Node, contents: Mapping[Value, torch.Tensor]) -> list[torch.Tensor]:
    """Results of a node, computed by PyTorch from known contents."""
    if node.op == "poptorch.constant":
        data: Data = node.arguments["data"]
        return [data.tensor]
    if node.op in _BY_SHAPE:
        arguments = pytree.tree_map_only(Value, lambda v: torch.empty(v.shape, dtype=v.dtype), node.arguments)
    else:
        arguments = pytree.tree_map_only(Value, contents.__getitem__, node.arguments)
    if node.op in HOST_FUNCTIONS:
        return [HOST_FUNCTIONS[node.op](**arguments)]
    if node.op == "poptorch.put":
        base, content, view = arguments["base"].clone(), arguments["content"], arguments["view"]
        overwrite(_view(view, base), content)
        return [base]
    if node.op in _FUNCTIONS:
        results = [_FUNCTIONS[node.op](**arguments)]
    elif node.op.startswith("torch."):
        results = tensors_in(_preserved_results(node, arguments))
    else:
        op = _op(node.op, node.overload)
        if op is None:
            raise createPoptorchError(
                f"{node.op} ({node.source}) runs on the device alone, and what it makes decides, further on, on a "
                "shape or on what Python does. Decide with `torch.where` or `poptorch.cond`, and keep shapes."
            )
        names = [name for name in written_arguments(op) if name not in arguments]  # they stand last among the results
        output_values = node.results[len(node.results) - len(names) :] if names else []
        outputs = {n: torch.empty(v.shape, dtype=v.dtype) for n, v in zip(names, output_values, strict=True)}
        leaves = pytree.tree_leaves(_call(op, arguments | outputs))
        results = [t for t in leaves if not any(t is each for each in outputs.values())] + list(outputs.values())
    return [t.contiguous() for t in results]


def _preserved_results(node: Node, arguments: Mapping[str, Any]) -> list[Any]:
    """Results of a preserved function, followed by tensors that it overwrites."""
    variants = ((f, each, f.signature(each)) for f in PRESERVED_FUNCTIONS if f.op == node.op for each in f.functions)
    preserved, function, signature = next(
        k for k in variants if k[2].parameters.keys() - {"inplace"} == arguments.keys()
    )
    copies = {id(t): t.clone() for t in preserved.writes(arguments)}
    replaced = pytree.tree_map(lambda leaf: copies.get(id(leaf), leaf), dict(arguments))
    return [_call_by_name(function, signature, replaced), *copies.values()]


def _call_by_name(function: Callable[..., Any], signature: inspect.Signature, arguments: dict[str, Any]) -> Any:
    """Call a function by argument names, as in its original call; some variants have fewer parameters."""
    own: Mapping[str, inspect.Parameter] = {}
    try:
        own = inspect.signature(function).parameters
    except ValueError:  # not a number of Python's, and has dimensions; losses of these count reductions
        if "reduction" in arguments:
            arguments |= {"reduction": ("none", "mean", "sum").index(arguments["reduction"])}
    if own and all(p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in own.values()):
        return function(**{name: value for name, value in arguments.items() if name in own})
    bound = inspect.BoundArguments(signature, OrderedDict(arguments))
    return function(*bound.args, **bound.kwargs)


def _view(view: View, base: torch.Tensor) -> torch.Tensor:
    op = _op(view.op, view.overload)
    assert op is not None
    arguments = pytree.tree_map(lambda leaf: base if leaf is BASE else leaf, view.arguments)
    result: torch.Tensor = pytree.tree_leaves(_call(op, arguments))[view.result]
    return result


def _call(op: torch._ops.OpOverload, arguments: Mapping[str, Any]) -> Any:
    """Call an op with named arguments, where `input` stands for PyTorch's `self`."""
    renamed = any(a.name == "self" for a in op._schema.arguments)
    return op(**{"self" if renamed and name == "input" else name: value for name, value in arguments.items()})


@cache
def _op(name: str, overload: str) -> torch._ops.OpOverload | None:
    namespace, _, packet = name.partition(".")
    if namespace != "aten":
        return None
    return getattr(getattr(torch.ops.aten, packet, None), overload, None)


_COPIES = frozenset(f"aten.{name}" for name in ("_to_copy", "alias", "clone", "detach", "lift_fresh"))
"""Ops whose result equals their input."""


def distance(start: Value, stop: Value, buffers: dict[Value, torch.Tensor], sees_selects: bool) -> int | None:
    """Difference `stop - start` of two integers, if both are known offsets from one value; otherwise `None`.

    Args:
        sees_selects: whether two selections of one element, such as `i[0]` and `i[0]`, are one value.
    """
    (begin, before), (end, after) = _base_and_offset(start, buffers), _base_and_offset(stop, buffers)
    has_one_base = begin is end or sees_selects and _selected(begin) == _selected(end)
    return after - before if has_one_base else None


def _selected(value: Value) -> tuple[Any, ...]:
    """Tensor, dimension and index of a selected element; the value itself if it is none."""
    node = value.producer
    if node is None or node.op != "aten.select":
        return (value,)
    return tuple(node.arguments[name] for name in ("input", "dim", "index"))


def _base_and_offset(value: Value, buffers: dict[Value, torch.Tensor]) -> tuple[Value, int]:
    """The value of which an integer is a sum with a known number, and that number."""
    added = 0
    while (node := value.producer) is not None and not value.dtype.is_floating_point:
        arguments = node.arguments
        if node.op in _COPIES:
            value = arguments["input"]
        elif (
            node.op in ("aten.add", "aten.sub") and (number := _known_integer(arguments["other"], buffers)) is not None
        ):
            sign = -1 if node.op == "aten.sub" else 1
            value, added = arguments["input"], added + sign * number * arguments.get("alpha", 1)
        elif node.op == "aten.add" and (number := _known_integer(arguments["input"], buffers)) is not None:
            if arguments.get("alpha", 1) != 1:
                break
            value, added = arguments["other"], added + number
        else:
            break
    return value, added


def _known_integer(operand: Any, buffers: dict[Value, torch.Tensor]) -> int | None:
    numbers = constant_contents(operand, buffers) if isinstance(operand, Value) else operand
    return None if numbers is None else int(numbers)


def constant_data(value: Value) -> torch.Tensor | None:
    """Constant data of a value from the host or without computation; `None` for device results."""
    producer = value.producer
    while producer is not None and producer.op in ("aten.lift_fresh", "aten.detach", "aten.alias"):
        producer = producer.inputs[0].producer
    data = producer.arguments.get("data") if producer is not None else None
    if isinstance(data, Data):
        return data.tensor
    return constant_contents(value, {}) if value.is_on_host else None
