"""Values taken apart into tensors, and put together again: what goes into a model, what comes out, what is loaded.

A structure is learnt once: which tensors a value holds, where, of which shape and type, and what else. A later value
must fit; then all that is left of it is a list of tensors. The same structures put results together.

Nothing here imports JAX: a data loader's worker process finds the tensors in batches without it.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch._subclasses import FakeTensor
from torch.utils import _pytree as pytree

from poptorch.errors import createPoptorchError

__all__ = [
    "MAY_BE_THE_LAST",
    "Answer",
    "Changes",
    "ICustomArgParser",
    "Leaf",
    "Parts",
    "Structure",
    "given_objects",
    "hidden_problem",
    "holds_tensor",
    "parser_of",
    "parsers",
    "registerCustomArgParser",
    "structure_of",
]


# Types of the user ----------------------------------------------------------------------------------------------------


class ICustomArgParser(ABC):
    """How to find the tensors in an object of a type of your own, and how to make such an object of other tensors.

    Once registered with `registerCustomArgParser`, the type may be used for arguments and results of wrapped models and
    for the items of asynchronous loaders.

    Example:
        >>> @dataclass
        ... class Pair:
        ...     left: torch.Tensor
        ...     right: torch.Tensor
        >>> class PairParser(ICustomArgParser):
        ...     def yieldTensors(self, struct):
        ...         yield struct.left
        ...         yield struct.right
        ...
        ...     def reconstruct(self, original_structure, tensor_iterator):
        ...         return Pair(next(tensor_iterator), next(tensor_iterator))
        >>> registerCustomArgParser(Pair, PairParser())
    """

    @abstractmethod
    def yieldTensors(self, struct: Any) -> Iterable[torch.Tensor]:
        """The tensors of an object, in an order that is always the same.

        Args:
            struct: an object of the registered type.
        """

    @abstractmethod
    def reconstruct(self, original_structure: Any, tensor_iterator: Iterator[torch.Tensor]) -> Any:
        """A new object that is like another one, but has other tensors.

        Args:
            original_structure: an object of the registered type. It must not be changed.
            tensor_iterator: as many tensors as `yieldTensors` gives for it, in the same order.
        """


_parsers: dict[type, ICustomArgParser] = {}


def registerCustomArgParser(arg_data_type: type, arg_parser: ICustomArgParser | None) -> None:
    """Say how tensors are found in objects of a type, from now on and in the whole process.

    An object is handled by the parser of exactly its type, else by the first one registered for a base of it.

    Args:
        arg_data_type: the type.
        arg_parser: its parser, in place of an earlier one; `None` removes it.

    Raises:
        Error: if `arg_data_type` is not a type, or `arg_parser` not an `ICustomArgParser`.

    See `ICustomArgParser` for an example.
    """
    if not isinstance(arg_data_type, type):
        raise createPoptorchError(f"registerCustomArgParser: `arg_data_type` should be a type; got {arg_data_type!r}.")
    if arg_parser is None:
        _parsers.pop(arg_data_type, None)
    elif isinstance(arg_parser, ICustomArgParser):
        _parsers[arg_data_type] = arg_parser
    else:
        raise createPoptorchError(
            f"registerCustomArgParser: `arg_parser` should be an instance of a subclass of ICustomArgParser, or None; "
            f"got {arg_parser!r}."
        )


def parser_of(value: object) -> ICustomArgParser | None:
    """The registered parser for an object, if there is one."""
    if not _parsers:
        return None
    exact = _parsers.get(type(value))
    return exact or next((parser for base, parser in _parsers.items() if isinstance(value, base)), None)


def parsers() -> dict[type, ICustomArgParser]:
    """All registered parsers, in the order of their registration; for processes that are to know the same types."""
    return dict(_parsers)


# Structures -----------------------------------------------------------------------------------------------------------


class Structure(ABC):
    """An arrangement of tensors and other values, without the tensors. Made by `structure_of`.

    Attributes:
        name: how messages call it, such as `x[0]['mask']`.

    Example:
        >>> batch = {"x": torch.zeros(2, 3), "scale": 0.5}
        >>> structure = structure_of(batch, "batch")
        >>> structure.rebuild([torch.ones(3)])
        {'x': tensor([1., 1., 1.]), 'scale': 0.5}
    """

    name: str

    @abstractmethod
    def collect(self, value: Any, into: list[torch.Tensor]) -> None:
        """Append the tensors of a value that is arranged like this one.

        Raises:
            Error: if it is not: another type, length, key, dtype, shape or constant.
        """

    @abstractmethod
    def build(self, parts: Parts) -> Any:
        """A new value with the next tensors of `parts`."""

    @abstractmethod
    def leaves(self) -> Iterator[Leaf]:
        """The places of the tensors, in the order of `collect` and `build`."""

    @abstractmethod
    def constants(self) -> Iterator[tuple[str, Any]]:
        """What is not taken apart, and stays the same in all values that are built, with what messages call it."""

    def tensors(self, value: Any) -> list[torch.Tensor]:
        """The tensors of a value that is arranged like this one; see `collect`."""
        found: list[torch.Tensor] = []
        self.collect(value, found)
        return found

    def rebuild(self, tensors: Iterable[torch.Tensor], given: Sequence[Any] = ()) -> Any:
        """A new value with other tensors, one for each of `leaves()`; they may have any shape and type.

        Args:
            tensors: the tensors.
            given: the objects that stand where `structure_of` was told of objects that are known.
        """
        return self.build(Parts(iter(tensors), given))

    def objects(self, value: Any) -> Iterator[Any]:
        """The objects of plain classes in a value that is arranged like this one, in an order that is always the same.

        They are those that a function may change for its caller, by setting their attributes.
        """
        return iter(())


class Parts:
    """What a value is built of: tensors that are taken one by one, and objects that are known by number."""

    def __init__(self, tensors: Iterator[torch.Tensor], given: Sequence[Any] = ()) -> None:
        self._tensors, self.given = tensors, given

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self

    def __next__(self) -> torch.Tensor:
        return next(self._tensors)


Known = Mapping[int, "Structure"]
"""Structures of objects that are known, by their identity."""


def structure_of(value: Any, name: str, known: Known | None = None) -> Structure:
    """The structure of a value: tensors in tuples, lists, dictionaries, dataclasses and registered types, nested.

    Types may be registered with `registerCustomArgParser`, or with `torch.utils._pytree`. Other objects are taken apart
    by their attributes, if their class is a plain one, written in Python, that neither compares nor copies them in a
    way of its own. Whatever else is in there is a constant, and stands for itself; so does a dataclass without tensors.

    Args:
        value: any value.
        name: how messages call it.
        known: structures of objects that are known, by their identity; see `given_objects`.
    """
    known = known or {}
    if (parser := parser_of(value)) is not None:
        return _Custom(name, value, parser)
    if isinstance(value, torch.Tensor):
        return Leaf(name, tuple(value.shape), value.dtype)
    if isinstance(value, (tuple, list)):
        return _Sequence(name, value, known)
    if isinstance(value, dict):
        return _Mapping(name, value, known)
    if dataclasses.is_dataclass(value) and not isinstance(value, type | torch.nn.Module):
        fields = _Fields(name, value, known)
        if any(True for _ in fields.leaves()):
            return fields
    elif type(value) in pytree.SUPPORTED_NODES:
        return _Node(name, value, known)
    elif _is_plain(value):
        return known.get(id(value)) or _Object(name, value, known)
    return _Constant(name, value)


def given_objects(objects: Sequence[Any]) -> Known:
    """What `structure_of` is told so that these objects stand for themselves: as `given[i]` of `Structure.rebuild`."""
    return {id(each): _Given(f"object {i}", i) for i, each in enumerate(objects)}


def _is_plain(value: Any) -> bool:
    """Whether an object is what its attributes are: its class is written in Python, and has no other ideas."""
    kind = type(value)
    return (
        hasattr(value, "__dict__")
        and not callable(value)
        and all(getattr(kind, name) is getattr(object, name) for name in ("__reduce_ex__", "__reduce__", "__eq__"))
        and kind.__getstate__ is object.__getstate__
        and not hasattr(kind, "__copy__")
        and all(each is object or each.__flags__ & _OF_PYTHON for each in kind.__mro__)
        and not isinstance(value, ModuleType)
    )


_OF_PYTHON = 1 << 9  # Py_TPFLAGS_HEAPTYPE


def hidden_problem(what: str, constant: Any) -> Exception:
    kind = type(constant).__name__
    return createPoptorchError(
        f"{what} is a {kind} that holds tensors, which are not found there. Put tensors into tuples, lists, "
        f"dictionaries or dataclasses; or say where they are, with `poptorch.registerCustomArgParser({kind}, ...)`."
    )


def holds_tensor(value: Any, kind: type[torch.Tensor]) -> bool:
    """Whether a tensor of some kind can be reached from an object, however that keeps it: a set, an attribute."""
    seen: set[int] = set()
    left = [value]
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, type | ModuleType):
            continue
        seen.add(id(each))
        if isinstance(each, kind):
            return True
        if isinstance(each, FunctionType):  # what it has taken along, not all that its module knows
            left += [each.__closure__, each.__defaults__, each.__kwdefaults__]
        else:
            left += gc.get_referents(each)
    return False


@dataclass(frozen=True, slots=True)
class Leaf(Structure):
    """The place of a tensor.

    Attributes:
        name: how messages call it.
        shape: of the whole tensor, the rows of all micro-batches.
        dtype: on the host.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def collect(self, value: Any, into: list[torch.Tensor]) -> None:
        if not isinstance(value, torch.Tensor):
            raise _mismatch(f"Type mismatch for {self.name}: expected {torch.Tensor} but got {type(value)}")
        if value.dtype is not self.dtype:
            raise _mismatch(f"Type mismatch for {self.name}: expected {self.dtype} but got {value.dtype}")
        if value.shape != self.shape:
            last = (
                MAY_BE_THE_LAST if self.shape[1:] == value.shape[1:] and _rows(value.shape) < _rows(self.shape) else ""
            )
            raise _mismatch(
                f"Shape mismatch for {self.name}: expected {torch.Size(self.shape)} but got {value.shape}", last
            )
        into.append(value)

    def build(self, parts: Parts) -> torch.Tensor:
        return next(parts)

    def leaves(self) -> Iterator[Leaf]:
        yield self

    def constants(self) -> Iterator[tuple[str, Any]]:
        return iter(())


@dataclass(frozen=True, slots=True)
class _Constant(Structure):
    name: str
    value: Any

    def collect(self, value: Any, into: list[torch.Tensor]) -> None:
        if value is self.value:
            return
        if type(value) is not type(self.value):
            raise _mismatch(f"Type mismatch for {self.name}: expected {type(self.value)} but got {type(value)}")
        try:
            is_equal = _equal(value, self.value)
        except (TypeError, ValueError, RuntimeError) as problem:  # so say arrays of several numbers
            raise _mismatch(
                f"Value mismatch for {self.name}: whether it is the {type(value).__name__} that was expected cannot be "
                f"told ({problem})"
            ) from problem
        if not is_equal:
            raise _mismatch(f"Value mismatch for {self.name}: expected {self.value!r} but got {value!r}")

    def build(self, parts: Parts) -> Any:
        return self.value

    def leaves(self) -> Iterator[Leaf]:
        return iter(())

    def constants(self) -> Iterator[tuple[str, Any]]:
        yield self.name, self.value


class _Sequence(Structure):
    """A tuple or list, named tuples and other subclasses included."""

    def __init__(self, name: str, value: Sequence[Any], known: Known) -> None:
        self.name = name
        self._type = type(value)
        # A named tuple takes its fields one by one.
        self._make: Callable[[list[Any]], Any] = getattr(value, "_make", None) or type(value)
        self._items = [structure_of(item, f"{name}[{i}]", known) for i, item in enumerate(value)]

    def collect(self, value: Any, into: list[torch.Tensor]) -> None:
        if type(value) is not self._type:
            raise _mismatch(f"Type mismatch for {self.name}: expected {self._type} but got {type(value)}")
        if len(value) != len(self._items):
            raise _mismatch(f"Length mismatch for {self.name}: expected {len(self._items)} but got {len(value)}")
        for structure, item in zip(self._items, value, strict=True):
            structure.collect(item, into)

    def build(self, parts: Parts) -> Any:
        return self._make([structure.build(parts) for structure in self._items])

    def objects(self, value: Any) -> Iterator[Any]:
        for structure, item in zip(self._items, value, strict=True):
            yield from structure.objects(item)

    def leaves(self) -> Iterator[Leaf]:
        for structure in self._items:
            yield from structure.leaves()

    def constants(self) -> Iterator[tuple[str, Any]]:
        for structure in self._items:
            yield from structure.constants()


class _Mapping(Structure):
    """A dictionary, subclasses included. The order of its keys is that of the first one."""

    def __init__(self, name: str, value: dict[Any, Any], known: Known) -> None:
        self.name = name
        self._type = type(value)
        self._items = {key: structure_of(item, f"{name}[{key!r}]", known) for key, item in value.items()}
        self._empty = copy.copy(value)  # a subclass may have attributes of its own, or want arguments to be made
        for key in value:  # without keeping tensors alive; one by one, as some subclasses have no `update`
            self._empty[key] = None

    def collect(self, value: Any, into: list[torch.Tensor]) -> None:
        if type(value) is not self._type:
            raise _mismatch(f"Type mismatch for {self.name}: expected {self._type} but got {type(value)}")
        if value.keys() != self._items.keys():
            missing = [key for key in self._items if key not in value]
            unexpected = [key for key in value if key not in self._items]
            raise _mismatch(
                f"Keys mismatch for {self.name}: "
                + ". ".join(
                    f"{what} arguments: {', '.join(map(str, keys))}"
                    for what, keys in (("Missing", missing), ("Unexpected", unexpected))
                    if keys
                )
            )
        for key, structure in self._items.items():
            structure.collect(value[key], into)

    def build(self, parts: Parts) -> Any:
        built = copy.copy(self._empty)
        for key, structure in self._items.items():
            built[key] = structure.build(parts)
        return built

    def objects(self, value: Any) -> Iterator[Any]:
        for key, structure in self._items.items():
            yield from structure.objects(value[key])

    def leaves(self) -> Iterator[Leaf]:
        for structure in self._items.values():
            yield from structure.leaves()

    def constants(self) -> Iterator[tuple[str, Any]]:
        yield self.name, self._empty  # for its attributes
        for structure in self._items.values():
            yield from structure.constants()


class _Fields(Structure):
    """A dataclass. Its fields are set one by one, so it may be frozen; `__init__` is not called for others like it."""

    def __init__(self, name: str, value: Any, known: Known) -> None:
        self.name = name
        self._type = type(value)
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        self._items = {field: structure_of(getattr(value, field), f"{name}.{field}", known) for field in names}
        self._empty = copy.copy(value)
        for field in names:  # without keeping tensors alive
            object.__setattr__(self._empty, field, None)

    def collect(self, value: Any, into: list[torch.Tensor]) -> None:
        if type(value) is not self._type:
            raise _mismatch(f"Type mismatch for {self.name}: expected {self._type} but got {type(value)}")
        for field, structure in self._items.items():
            structure.collect(getattr(value, field, None), into)

    def build(self, parts: Parts) -> Any:
        built = copy.copy(self._empty)
        for field, structure in self._items.items():
            object.__setattr__(built, field, structure.build(parts))
        return built

    def objects(self, value: Any) -> Iterator[Any]:
        for field, structure in self._items.items():
            yield from structure.objects(getattr(value, field))

    def leaves(self) -> Iterator[Leaf]:
        for structure in self._items.values():
            yield from structure.leaves()

    def constants(self) -> Iterator[tuple[str, Any]]:
        yield self.name, self._empty  # for what it has beside its fields
        for structure in self._items.values():
            yield from structure.constants()


class _Node(Structure):
    """An object of a type that `torch.utils._pytree` takes apart, and puts together."""

    def __init__(self, name: str, value: Any, known: Known) -> None:
        self.name = name
        self._type = type(value)
        self._definition = pytree.SUPPORTED_NODES[self._type]
        children, context = self._definition.flatten_fn(value)
        self._children = _Sequence(name, list(children), known)
        self._context = _Constant(f"{name} (its context)", context)

    def _flat(self, value: Any) -> list[Any]:
        return list(self._definition.flatten_fn(value)[0])

    def collect(self, value: Any, into: list[torch.Tensor]) -> None:
        if type(value) is not self._type:
            raise _mismatch(f"Type mismatch for {self.name}: expected {self._type} but got {type(value)}")
        children, context = self._definition.flatten_fn(value)
        self._context.collect(context, into)
        self._children.collect(list(children), into)

    def build(self, parts: Parts) -> Any:
        return self._definition.unflatten_fn(self._children.build(parts), self._context.value)

    def objects(self, value: Any) -> Iterator[Any]:
        return self._children.objects(self._flat(value))

    def leaves(self) -> Iterator[Leaf]:
        return self._children.leaves()

    def constants(self) -> Iterator[tuple[str, Any]]:
        yield from self._context.constants()
        yield from self._children.constants()


class _Object(Structure):
    """An object of a plain class, which is what its attributes are. `__init__` is not called for others like it.

    One that can be reached from itself is not taken apart any further there.
    """

    def __init__(self, name: str, value: Any, known: Known) -> None:
        self.name = name
        self._type = type(value)
        inside = {**known, id(value): _Constant(name, value)}
        self._items = {key: structure_of(item, f"{name}.{key}", inside) for key, item in vars(value).items()}

    def collect(self, value: Any, into: list[torch.Tensor]) -> None:
        if type(value) is not self._type:
            raise _mismatch(f"Type mismatch for {self.name}: expected {self._type} but got {type(value)}")
        attributes = vars(value)
        if attributes.keys() != self._items.keys():
            differing = ", ".join(sorted(map(str, attributes.keys() ^ self._items.keys())))
            raise _mismatch(f"Attributes mismatch for {self.name}: not both have {differing}")
        for key, structure in self._items.items():
            structure.collect(attributes[key], into)

    def build(self, parts: Parts) -> Any:
        built = object.__new__(self._type)
        for key, structure in self._items.items():
            vars(built)[key] = structure.build(parts)
        return built

    def objects(self, value: Any) -> Iterator[Any]:
        yield value
        for key, structure in self._items.items():
            yield from structure.objects(vars(value)[key])

    def leaves(self) -> Iterator[Leaf]:
        for structure in self._items.values():
            yield from structure.leaves()

    def constants(self) -> Iterator[tuple[str, Any]]:
        for structure in self._items.values():
            yield from structure.constants()


@dataclass(frozen=True, slots=True)
class _Given(Structure):
    """An object that is known when others are put together. It stands for itself."""

    name: str
    number: int

    def collect(self, value: Any, into: list[torch.Tensor]) -> None:
        return

    def build(self, parts: Parts) -> Any:
        return parts.given[self.number]

    def leaves(self) -> Iterator[Leaf]:
        return iter(())

    def constants(self) -> Iterator[tuple[str, Any]]:
        return iter(())


class _Custom(Structure):
    """An object of a registered type. It is kept, with its tensors: its parser makes others in its likeness."""

    def __init__(self, name: str, value: Any, parser: ICustomArgParser) -> None:
        self.name = name
        self._value = value
        self._parser = parser
        self._tensors = [structure_of(tensor, f"{name}.tensor{i}") for i, tensor in enumerate(self._parsed(value))]

    def _parsed(self, value: Any) -> list[torch.Tensor]:
        tensors = list(self._parser.yieldTensors(value))
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                raise createPoptorchError(
                    f"{type(self._parser).__name__}.yieldTensors gave {tensor!r} for {self.name}, which is not a "
                    "tensor. It should yield tensors only."
                )
        return tensors

    def collect(self, value: Any, into: list[torch.Tensor]) -> None:
        if type(value) is not type(self._value):
            raise _mismatch(f"Type mismatch for {self.name}: expected {type(self._value)} but got {type(value)}")
        tensors = self._parsed(value)
        if len(tensors) != len(self._tensors):
            raise _mismatch(
                f"Length mismatch for {self.name}: expected {len(self._tensors)} tensors but got {len(tensors)}"
            )
        for structure, tensor in zip(self._tensors, tensors, strict=True):
            structure.collect(tensor, into)

    def build(self, parts: Parts) -> Any:
        own = iter([structure.build(parts) for structure in self._tensors])
        parser = f"{type(self._parser).__name__}.reconstruct"
        try:
            built = self._parser.reconstruct(self._value, own)
        except StopIteration:
            raise createPoptorchError(
                f"{parser} took more than the {len(self._tensors)} tensors that yieldTensors gave for {self.name}."
            ) from None
        if left := len(list(own)):
            raise createPoptorchError(
                f"{parser} left {left} of the {len(self._tensors)} tensors that yieldTensors gave for {self.name}. It "
                "should take each with next(tensor_iterator)."
            )
        return built

    def leaves(self) -> Iterator[Leaf]:
        for structure in self._tensors:
            yield from structure.leaves()

    def constants(self) -> Iterator[tuple[str, Any]]:
        return iter(())  # its parser knows


class Changes:
    """What becomes of the attributes of objects while a function runs.

    Args:
        objects: the objects, as they are before it.

    Example:
        >>> class Box:
        ...     pass
        >>> box = Box()
        >>> changes = Changes([box])
        >>> box.content = 3
        >>> changes.found()
        {0: {'content': 3}}
    """

    def __init__(self, objects: Sequence[Any]) -> None:
        self._objects = list(objects)
        self._before = [{key: _kept(value) for key, value in vars(each).items()} for each in self._objects]

    def found(self) -> dict[int, dict[str, Any]]:
        """By number of an object, the attributes that have been set, or whose lists hold something else now.

        What has been written to a tensor does not count: it is the same one. What was deleted is `Changes.GONE`.
        """
        found: dict[int, dict[str, Any]] = {}
        for i, (each, before) in enumerate(zip(self._objects, self._before, strict=True)):
            now = vars(each)
            changed = {k: v for k, v in now.items() if k not in before or not _is_same(before[k], v)}
            changed |= {key: Changes.GONE for key in before if key not in now}
            if changed:
                found[i] = changed
        return found

    GONE = "an attribute that was deleted"

    @staticmethod
    def make(found: Mapping[int, Mapping[str, Any]], objects: Sequence[Any]) -> None:
        """Have the same become of other objects."""
        for i, changed in found.items():
            for key, value in changed.items():
                if value is Changes.GONE:
                    vars(objects[i]).pop(key, None)
                else:
                    vars(objects[i])[key] = value


class Answer(Structure):
    """The structure of what a captured model has returned, and of what has become of the objects that it was given.

    A value of it is a pair of these; what is built is the result alone, and the objects given have changed by then.

    Args:
        result: what the model returned.
        changed: what `Changes` has found.
        objects: the objects that it was given.

    Raises:
        Error: if there are tensors in it that cannot be found: they would come back without numbers.
    """

    name = "result"

    def __init__(self, result: Any, changed: Mapping[int, Mapping[str, Any]], objects: Sequence[Any]) -> None:
        known = given_objects(objects)
        self._result = structure_of(result, self.name, known)
        self._changed = structure_of(dict(changed), "argument", known)
        for name, constant in self.constants():
            if holds_tensor(constant, FakeTensor):
                raise hidden_problem(f"The {name} of the model", constant)

    def collect(self, value: Any, into: list[torch.Tensor]) -> None:
        result, changed = value
        self._result.collect(result, into)
        self._changed.collect(changed, into)

    def build(self, parts: Parts) -> Any:
        result = self._result.build(parts)
        Changes.make(self._changed.build(parts), parts.given)
        return result

    def leaves(self) -> Iterator[Leaf]:
        yield from self._result.leaves()
        yield from self._changed.leaves()

    def constants(self) -> Iterator[tuple[str, Any]]:
        yield from self._result.constants()
        yield from self._changed.constants()


def _kept(value: Any) -> Any:
    """A list or dictionary as it is now; others are the same later, or others."""
    if type(value) in (list, tuple):
        return type(value)(_kept(each) for each in value)
    return {key: _kept(each) for key, each in value.items()} if type(value) is dict else value


def _is_same(before: Any, now: Any) -> bool:
    if type(before) is not type(now):
        return False
    if type(now) in (list, tuple):
        return len(before) == len(now) and all(map(_is_same, before, now))
    if type(now) is dict:
        return list(before) == list(now) and all(map(_is_same, before.values(), now.values()))
    return before is now or (type(now) in (bool, int, float, str) and before == now)


def _mismatch(what: str, more: str = "") -> Exception:
    return createPoptorchError(
        f"{what}. Arguments must match those that the model was compiled with. Make a new wrapper for other arguments, "
        f"or call `destroy()` on this one, which then compiles again.{more}"
    )


def _rows(shape: Sequence[int]) -> int:
    return shape[0] if len(shape) else 1


MAY_BE_THE_LAST = (
    " If this is the last batch of a data set that does not divide evenly, leave it out: "
    "`poptorch.DataLoader(..., drop_last=True)`, as it is by default, or `drop_last=True` of PyTorch's."
)


def _equal(a: Any, b: Any) -> bool:
    """Whether two constants are equal, NaN being equal to itself."""
    if isinstance(a, np.ndarray):
        return a.shape == b.shape and bool(np.all((a == b) | ((a != a) & (b != b))))
    return bool(a == b) or bool(a != a and b != b)
