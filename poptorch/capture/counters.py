"""Numbers of Python that `forward` changes, such as `self.step += 1`: a program carries them, as it carries buffers.

While a model is captured once more, a `Counter` stands for each of them: a tensor that behaves as a number does. One
that the model looks at is none that can be carried, as the number is another in each run.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from poptorch.capture.trace import Node, Trace, Value

__all__ = ["COUNTED", "Counter", "Counters", "are_alike", "starting"]

COUNTED = (int, float)
"""The classes of numbers that are carried."""

_LARGEST = 2**31
_STEP = 2**16
"""Whole numbers are smaller than this on the device; what is added to one in a step is not larger than that."""


def starting(before: Any, after: Any) -> int | float | None:
    """What a number begins with that `forward` changes; `None` if it is not one that can be carried."""
    is_counted = type(before) in COUNTED and (type(after) in COUNTED or type(after) is Counter)
    if not is_counted or before != before or not abs(before) < _LARGEST:
        return None
    is_float = after.tensor.is_floating_point() if type(after) is Counter else type(after) is float
    return float(before) if is_float else before


class Counter:
    """Stands for a number. What is made of it and of numbers is another one, what is made of it and a tensor a tensor.

    It cannot be looked at: there is no `bool`, `int` or text of it, and it is no key.

    Args:
        tensor: has the number in the program.
        made: where to note that there is another one.

    Attributes:
        tensor: as given.
    """

    __slots__ = ("__weakref__", "_made", "tensor")

    def __init__(self, tensor: torch.Tensor, made: list[weakref.ref[Counter]]) -> None:
        self.tensor, self._made = tensor, made
        made.append(weakref.ref(self))

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        args, kwargs = pytree.tree_map(_tensor_of, (args, dict(kwargs or {})))
        return function(*args, **kwargs)


def _tensor_of(each: Any) -> Any:
    return each.tensor if type(each) is Counter else each


def _no_look(*args: Any) -> Any:
    raise TypeError("`forward` looks at a number that it changes.")


def _operator(name: str) -> Callable[[Counter, Any], Any]:
    compute, is_reflected = getattr(operator, name.removeprefix("r")), name.startswith("r")

    def method(self: Counter, other: Any) -> Any:
        if type(other) is not Counter and type(other) not in (bool, *COUNTED):
            return NotImplemented  # a tensor computes with it as with a number
        a, b = self.tensor, _tensor_of(other)
        return Counter(compute(b, a) if is_reflected else compute(a, b), self._made)

    return method


def _alone(compute: Callable[[Any], Any]) -> Callable[[Counter], Any]:
    return lambda self: Counter(compute(self.tensor), self._made)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(Counter, f"__{_name}__", _operator(_name))
    setattr(Counter, f"__r{_name}__", _operator(f"r{_name}"))
for _name in ("neg", "abs"):
    setattr(Counter, f"__{_name}__", _alone(getattr(operator, _name)))
for _name in "bool int float index complex hash str repr format eq ne lt le gt ge reduce_ex".split():
    setattr(Counter, f"__{_name}__", _no_look)


class Counters:
    """The numbers of a module that are counters while it is captured.

    Args:
        module: the module.
        tensors: those that have the numbers in the program, by path and name.
    """

    def __init__(self, module: torch.nn.Module | None, tensors: Mapping[str, torch.Tensor]) -> None:
        self._modules = {} if module is None else dict(torch.nn.Module.named_modules(module))
        self._tensors = dict(tensors)
        self._made: list[weakref.ref[Counter]] = []

    def begin(self) -> None:
        """Have the module hold counters, from now on."""
        for name, t in self._tensors.items():
            path, _, key = name.rpartition(".")
            vars(self._modules[path])[key] = Counter(t, self._made)

    def end(self, others: Iterable[str]) -> dict[str, torch.Tensor]:
        """The tensors that have the numbers now, of those that are made of what they were before.

        The module holds no counter afterwards: what holds numbers then holds those that are the same in each run.

        Args:
            others: numbers of the module that may be made of them, too, by path and name.

        Raises:
            TypeError: if anything else holds one, such as the result.
        """
        ends = {}
        for name in {*self._tensors, *others}:
            path, _, key = name.rpartition(".")
            namespace = vars(self._modules[path])
            if type(namespace.get(key)) is Counter:
                ends[name] = namespace.pop(key).tensor
        if any(ref() is not None for ref in self._made):
            raise TypeError("Something else holds a number that `forward` changes.")
        return {name: ends[name] for name in self._tensors if name in ends}


def are_alike(plain: Trace, counting: Trace, begins: Iterable[Value], ends: Iterable[Value]) -> bool:
    """Whether a function does the same with counters as with the numbers that they begin with, in each run.

    Args:
        plain: the function, captured with numbers.
        counting: the function, captured with counters.
        begins, ends: the values of these at the beginning, and at the end.
    """
    if len({(node.site.block, node.site.unit, node.site.stage, node.site.phase) for node in counting.nodes}) > 1:
        return False  # what blocks hand to each other is checked for the numbers that there were
    known = set(map(id, begins))
    nodes: list[Node] = []
    for node in counting.nodes:
        inputs = node.inputs
        if inputs and all(id(value) in known for value in inputs):
            if not _is_as_pythons(node):
                return False
            known.update(map(id, node.results))
        else:
            nodes.append(node)
    if any(id(value) not in known for value in ends):
        return False
    inputs = [value for value in counting.inputs if id(value) not in known]
    same: dict[int, Value] = {}

    def is_same(one: Any, other: Any, may_count: bool) -> bool:
        if isinstance(other, Value):
            if id(other) in known:
                return may_count and type(one) in COUNTED
            return isinstance(one, Value) and same.get(id(other)) is one
        if isinstance(one, Trace) and isinstance(other, Trace):
            return one.is_like(other) and all_same(one.outer, other.outer)
        if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
            return one is other
        return type(one) is type(other) and Trace.form_of(one) == Trace.form_of(other)

    def all_same(ones: Any, others: Any, may_count: bool = False) -> bool:
        return len(ones) == len(others) and all(is_same(a, b, may_count) for a, b in zip(ones, others, strict=True))

    def bound(ones: list[Value], others: list[Value]) -> bool:
        same.update((id(b), a) for a, b in zip(ones, others, strict=False))
        return [(a.shape, a.dtype) for a in ones] == [(b.shape, b.dtype) for b in others]

    if not bound(plain.inputs, inputs) or len(plain.nodes) != len(nodes):
        return False
    for one, other in zip(plain.nodes, nodes, strict=True):
        leaves, structure = pytree.tree_flatten(one.arguments)
        others, as_well = pytree.tree_flatten(other.arguments)
        if one.op != other.op or structure != as_well or not all_same(leaves, others, one.op in _POINTWISE):
            return False
        if not bound(one.results, other.results):
            return False
    return all_same(plain.outputs, counting.outputs)


_POINTWISE = frozenset(f"aten.{name}" for name in ("add", "sub", "rsub", "mul", "div"))
"""Ops that do the same with a number and with a tensor that has it."""

_EXACT = frozenset(f"aten.{name}" for name in ("remainder", "floor_divide", "abs", "neg"))
_SMOOTH = frozenset(f"aten.{name}" for name in ("add", "sub", "rsub", "mul", "div", "pow", "reciprocal", "abs", "neg"))


def _is_as_pythons(node: Node) -> bool:
    """Whether an op makes the number that Python makes: a float, up to rounding, that no rounding makes another one
    altogether; or a whole number, which has no end in Python, that stays small as long as steps are counted."""
    literals = [leaf for leaf in pytree.tree_leaves(node.arguments) if type(leaf) is int]
    if not all(-_LARGEST < leaf < _LARGEST for leaf in literals):
        return False
    if all(result.dtype.is_floating_point for result in node.results):
        return node.op in _SMOOTH and node.arguments.get("rounding_mode") is None
    is_step = node.op in ("aten.add", "aten.sub") and bool(literals)
    return node.op in _EXACT or is_step and all(-_STEP <= leaf <= _STEP for leaf in literals)
