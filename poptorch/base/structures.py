"""Flattening of values into tensors, and reconstruction: for model inputs, outputs and data loading.

A structure is determined once: the tensors in a value, with their positions, shapes and types, and the other contents.
A later value must match; it is then reduced to a list of tensors. The same structures rebuild results.

Nothing here imports JAX: the worker process of a data loader finds the tensors in batches without it.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from poptorch.base.carried import Hidden
from poptorch.base.custom_types import ICustomArgParser, parser_of
from poptorch.base.hidden_tensors import holds_tensor
from poptorch.base.introspection import attributes, slots
from poptorch.base.leaves import (
    CarriedValue,
    Components,
    Constant,
    KnownObjects,
    KnownReference,
    Leaf,
    SelfReference,
    Structure,
    WeakSelfReference,
    check_length,
    check_type,
    mismatch_error,
)
from poptorch.base.logging_ import logger
from poptorch.errors import createPoptorchError


def structure_of(value: Any, name: str, known_objects: KnownObjects | None = None) -> Structure:
    """The structure of a value: tensors in tuples, lists, dictionaries, dataclasses and registered types, nested.

    Types may be registered with `registerCustomArgParser`, or with `torch.utils._pytree`. Other objects are flattened
    by their attributes, if their class is written in Python, callable or not; partial functions and methods by their
    bound arguments. Everything else is a constant: functions, modules, and objects without tensors, if they are
    dataclasses or callable, or their class defines comparison or copying.

    Args:
        known_objects: structures of objects that are known, by their identity; see `given_objects`.
    """
    known_objects = KnownObjects() if known_objects is None else known_objects
    kind = type(value)
    if known_objects.carries(name, value):
        return CarriedValue(name, value)
    if (parser := parser_of(value)) is not None:
        return _Custom(name, value, parser, known_objects)
    if issubclass(kind, torch.Tensor):
        return Leaf(name, tuple(value.shape), value.dtype)
    if issubclass(kind, tuple | list):
        return _Sequence(name, value, known_objects)
    if issubclass(kind, dict):
        return _Mapping(name, value, known_objects)
    if issubclass(kind, type | ModuleType | torch.nn.Module):
        return Constant(name, value)
    if kind in pytree.SUPPORTED_NODES and not dataclasses.is_dataclass(kind):
        return _PytreeNode(name, value, known_objects)
    if id(value) in known_objects:
        return known_objects[id(value)]
    if _is_plain(value):
        return _Object(name, value, known_objects)
    make = _Fields if dataclasses.is_dataclass(kind) else _Bound if kind in _BOUND else _Object
    if (make is not _Object or _is_of_python(kind)) and holds_tensor(value, (torch.Tensor, Hidden)):
        structure = make(name, value, known_objects)
        if any(True for _ in structure.leaves()) or holds_tensor(value, Hidden):
            return structure
    return Constant(name, value)


def given_objects(objects: Sequence[Any]) -> KnownObjects:
    """Argument for `structure_of` that makes objects represent themselves, as `given[i]` of `Structure.rebuild`."""
    return KnownObjects({id(each): KnownReference(f"object {i}", i) for i, each in enumerate(objects)})


def _is_plain(value: Any) -> bool:
    """Whether attributes fully define an object: its class customises neither copying, pickling nor equality."""
    kind = type(value)
    return (
        _is_of_python(kind)
        and kind.__dictoffset__ != 0
        and not (callable(value) or dataclasses.is_dataclass(kind))
        and all(getattr(kind, name) is getattr(object, name) for name in ("__reduce_ex__", "__reduce__", "__eq__"))
        and kind.__getstate__ is object.__getstate__
        and not hasattr(kind, "__copy__")
    )


def _is_of_python(kind: type) -> bool:
    """Whether objects of a class can be reconstructed by setting attributes."""
    return kind is SimpleNamespace or (
        (kind.__new__ is object.__new__ or isinstance(kind.__new__, FunctionType))
        and all(each is object or each.__flags__ & _OF_PYTHON for each in kind.__mro__)
    )


_OF_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE


class Composite(Structure):
    """Container of values with `_children` as their structures."""

    _children: Sequence[Structure]

    def __init__(self, name: str, value: Any) -> None:
        self.name = name
        self._type = type(value)

    @abstractmethod
    def _child_values(self, value: Any) -> Iterable[Any]:
        """Child values of another instance of this type, one per child.

        Raises:
            Error: if the children differ in number or keys.
        """

    def collect(self, value: Any, into: list[torch.Tensor]) -> None:
        check_type(self.name, self._type, value)
        for child, inner in zip(self._children, self._child_values(value), strict=True):
            child.collect(inner, into)

    def objects(self, value: Any) -> Iterator[Any]:
        for child, inner in zip(self._children, self._child_values(value), strict=True):
            yield from child.objects(inner)

    def leaves(self) -> Iterator[Leaf]:
        return chain.from_iterable(child.leaves() for child in self._children)

    def constants(self) -> Iterator[tuple[str, Any]]:
        return chain.from_iterable(child.constants() for child in self._children)


class _Sequence(Composite):
    """A tuple or list, including named tuples and other subclasses."""

    def __init__(self, name: str, value: Sequence[Any], known_objects: KnownObjects) -> None:
        super().__init__(name, value)
        # A named tuple takes its fields one by one.
        self._make: Callable[[list[Any]], Any] = getattr(value, "_make", None) or type(value)
        self._children = _item_structures(name, value, known_objects)

    def _child_values(self, value: Any) -> Iterable[Any]:
        return check_length(self.name, len(self._children), value)

    def build(self, components: Components) -> Any:
        return self._make([child.build(components) for child in self._children])


class _Mapping(Composite):
    """A dictionary or subclass, including those with items as attributes. Keys keep the order of the original."""

    def __init__(self, name: str, value: dict[Any, Any], known_objects: KnownObjects) -> None:
        super().__init__(name, value)
        self._items = {key: structure_of(item, f"{name}[{key!r}]", known_objects) for key, item in value.items()}
        attributes = getattr(value, "__dict__", {})
        self._is_own_dict = attributes is value  # as in recipes that say `self.__dict__ = self`
        self._attributes = [key for key, item in value.items() if attributes.get(key, attributes) is item]
        names: list[str] = [f.name for f in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
        own = {each: attributes[each] for each in names if each in attributes and each not in self._attributes}
        self._fields = {each: structure_of(item, f"{name}.{each}", known_objects) for each, item in own.items()}
        self._children = [*self._items.values(), *self._fields.values()]
        self._empty = copy.copy(value)  # a subclass may have attributes of its own, or want arguments to be made
        self._fill(self._empty, dict.fromkeys(value), dict.fromkeys(own))  # without keeping tensors alive

    def _child_values(self, value: Any) -> Iterable[Any]:
        if value.keys() != self._items.keys():
            missing = [key for key in self._items if key not in value]
            unexpected = [key for key in value if key not in self._items]
            raise mismatch_error(
                f"Keys mismatch for {self.name}: "
                + ". ".join(
                    f"{problem} arguments: {', '.join(map(str, keys))}"
                    for problem, keys in (("Missing", missing), ("Unexpected", unexpected))
                    if keys
                )
            )
        return [value[key] for key in self._items] + [getattr(value, name, None) for name in self._fields]

    def build(self, components: Components) -> Any:
        built = copy.copy(self._empty)
        items = {key: child.build(components) for key, child in self._items.items()}
        self._fill(built, items, {name: child.build(components) for name, child in self._fields.items()})
        return built

    def _fill(self, mapping: Any, items: Mapping[Any, Any], fields: Mapping[str, Any]) -> None:
        if self._is_own_dict:  # a copy has another one
            object.__setattr__(mapping, "__dict__", mapping)
        for key, item in items.items():  # one by one: some subclasses have no `update`
            mapping[key] = item
        for name, value in (*fields.items(), *((key, items[key]) for key in self._attributes)):
            object.__setattr__(mapping, name, value)

    def constants(self) -> Iterator[tuple[str, Any]]:
        yield self.name, self._empty  # for its attributes
        yield from super().constants()


class _Fields(Composite):
    """A dataclass. Fields are set individually, even if frozen; rebuilding skips `__init__`."""

    def __init__(self, name: str, value: Any, known_objects: KnownObjects) -> None:
        super().__init__(name, value)
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        self._items = {field: structure_of(getattr(value, field), f"{name}.{field}", known_objects) for field in names}
        self._children = list(self._items.values())
        self._empty = copy.copy(value)
        for field in names:  # without keeping tensors alive
            object.__setattr__(self._empty, field, None)

    def _child_values(self, value: Any) -> Iterable[Any]:
        return [getattr(value, field, None) for field in self._items]

    def build(self, components: Components) -> Any:
        built = copy.copy(self._empty)
        for field, child in self._items.items():
            object.__setattr__(built, field, child.build(components))
        return built

    def constants(self) -> Iterator[tuple[str, Any]]:
        yield self.name, self._empty  # for contents other than its fields
        yield from super().constants()


class _PytreeNode(Composite):
    """A `torch.utils._pytree` node."""

    def __init__(self, name: str, value: Any, known_objects: KnownObjects) -> None:
        super().__init__(name, value)
        self._definition = pytree.SUPPORTED_NODES[self._type]
        items, context = self._definition.flatten_fn(value)
        self._children = _item_structures(name, items, known_objects)
        self._context = Constant(f"{name} (its context)", context)

    def _child_values(self, value: Any) -> Iterable[Any]:
        items, context = self._definition.flatten_fn(value)
        self._context.collect(context, [])
        return check_length(self.name, len(self._children), list(items))

    def build(self, components: Components) -> Any:
        return self._definition.unflatten_fn([child.build(components) for child in self._children], self._context.value)

    def constants(self) -> Iterator[tuple[str, Any]]:
        yield from self._context.constants()
        yield from super().constants()


class _Object(Composite):
    """An object of a Python class, defined by its attributes.

    Rebuilding skips `__init__`; self-references become references to the rebuilt object.
    """

    def __init__(self, name: str, value: Any, known_objects: KnownObjects) -> None:
        super().__init__(name, value)
        enclosing = SelfReference(name, self)
        inner_objects = KnownObjects(
            {**known_objects, id(value): enclosing}, known_objects.carries, known_objects.inspected
        )
        inner_objects |= {id(ref): WeakSelfReference(name, enclosing) for ref in weakref.getweakrefs(value)}
        self._items = {key: structure_of(item, f"{name}.{key}", inner_objects) for key, item in _state(value).items()}
        self._children = list(self._items.values())

    def _child_values(self, value: Any) -> Iterable[Any]:
        own = _state(value)
        if own.keys() != self._items.keys():
            differing = ", ".join(sorted(map(str, own.keys() ^ self._items.keys())))
            raise mismatch_error(f"Attributes mismatch for {self.name}: not both have {differing}")
        return [own[key] for key in self._items]

    def build(self, components: Components) -> Any:
        built: Any = SimpleNamespace() if self._type is SimpleNamespace else object.__new__(self._type)
        components.enclosing[id(self)] = built
        for key, child in self._items.items():
            item = child.build(components)
            if isinstance(slot := getattr(self._type, key, None), MemberDescriptorType):
                slot.__set__(built, item)
            else:
                attributes(built)[key] = item
        return built

    def objects(self, value: Any) -> Iterator[Any]:
        yield value
        yield from super().objects(value)


def _state(value: Any) -> dict[str, Any]:
    """Attributes of an object, from both `__dict__` and `__slots__`."""
    return attributes(value) | {name: slot.__get__(value) for name, slot in slots(value).items()}


class _Bound(Composite):
    """A partial function or method: its function and bound values."""

    def __init__(self, name: str, value: Any, known_objects: KnownObjects) -> None:
        super().__init__(name, value)
        self._attributes, self._make = _BOUND[self._type]
        bound = zip(self._attributes, self._child_values(value), strict=True)
        self._children = [structure_of(bound_value, f"{name}.{key}", known_objects) for key, bound_value in bound]

    def _child_values(self, value: Any) -> Iterable[Any]:
        return [getattr(value, key) for key in self._attributes]

    def build(self, components: Components) -> Any:
        return self._make(*(child.build(components) for child in self._children))


_BOUND: Mapping[type, tuple[Sequence[str], Callable[..., Any]]] = {
    functools.partial: (("func", "args", "keywords"), lambda func, args, kw: functools.partial(func, *args, **kw)),
    MethodType: (("__func__", "__self__"), MethodType),
}


class _Custom(Composite):
    """An object of a registered type. Stored with its tensors: its parser rebuilds objects from this original."""

    def __init__(self, name: str, value: Any, parser: ICustomArgParser, known_objects: KnownObjects) -> None:
        super().__init__(name, value)
        self._value = value
        self._parser = parser
        own = {key: each for key, each in attributes(value).items() if not issubclass(type(each), torch.Tensor)}
        self._carried: dict[str, Structure] = {
            key: CarriedValue(f"{name}.{key}", each)
            for key, each in own.items()
            if known_objects.carries(f"{name}.{key}", each)
        }
        self._carried |= {key: known_objects[id(each)] for key, each in own.items() if id(each) in known_objects}
        self._inspected = {key: each for key, each in own.items() if f"{name}.{key}" in known_objects.inspected}
        self._children = [structure_of(tensor, f"{name}.tensor{i}") for i, tensor in enumerate(self._parsed(value))]

    def _parsed(self, value: Any) -> list[torch.Tensor]:
        tensors = list(self._parser.yieldTensors(value))
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                raise createPoptorchError(
                    f"{type(self._parser).__name__}.yieldTensors gave {tensor!r} for {self.name}, which is not a "
                    "tensor. It should yield tensors only."
                )
        return tensors

    def _child_values(self, value: Any) -> Iterable[Any]:
        return check_length(self.name, len(self._children), self._parsed(value), " tensors")

    def collect(self, value: Any, into: list[torch.Tensor]) -> None:
        super().collect(value, into)
        own = attributes(value)
        for key, first in list(self._inspected.items()):
            if own.get(key) != first:
                del self._inspected[key]
                logger.warning(
                    "`%s.%s` is %r, and was %r when the model was compiled. `forward` looks at it, so it is a part of "
                    "the program, and this has no effect. What is to change from call to call is a tensor.",
                    self.name,
                    key,
                    own.get(key),
                    first,
                )

    def build(self, components: Components) -> Any:
        own = iter([child.build(components) for child in self._children])
        parser = f"{type(self._parser).__name__}.reconstruct"
        try:
            built = self._parser.reconstruct(self._likeness(components), own)
        except StopIteration:
            raise createPoptorchError(
                f"{parser} took more than the {len(self._children)} tensors that yieldTensors gave for {self.name}."
            ) from None
        if rest := len(list(own)):
            raise createPoptorchError(
                f"{parser} left {rest} of the {len(self._children)} tensors that yieldTensors gave for {self.name}. It "
                "should take each with next(tensor_iterator)."
            )
        return built

    def _likeness(self, components: Components) -> Any:
        """The original object, or a copy with new pass-through values."""
        if not self._carried:
            return self._value
        likeness = copy.copy(self._value)
        attributes(likeness).update({key: each.build(components) for key, each in self._carried.items()})
        return likeness

    def objects(self, value: Any) -> Iterator[Any]:
        own = attributes(value)
        for key, each in self._carried.items():
            yield from each.objects(own.get(key))

    def constants(self) -> Iterator[tuple[str, Any]]:
        return iter(())  # its parser knows


def _item_structures(name: str, values: Iterable[Any], known_objects: KnownObjects) -> list[Structure]:
    return [structure_of(value, f"{name}[{i}]", known_objects) for i, value in enumerate(values)]
