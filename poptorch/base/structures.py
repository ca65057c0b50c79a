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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch._subclasses import FakeTensor

from poptorch.errors import createPoptorchError

__all__ = [
    "MAY_BE_THE_LAST",
    "ICustomArgParser",
    "Leaf",
    "Structure",
    "hidden_problem",
    "holds_tensor",
    "parser_of",
    "parsers",
    "registerCustomArgParser",
    "result_structure",
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
    def build(self, tensors: Iterator[torch.Tensor]) -> Any:
        """A new value with the next tensors of `tensors`."""

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

    def rebuild(self, tensors: Iterable[torch.Tensor]) -> Any:
        """A new value with other tensors, one for each of `leaves()`; they may have any shape and type."""
        return self.build(iter(tensors))


def structure_of(value: Any, name: str) -> Structure:
    """The structure of a value: tensors in tuples, lists, dictionaries, dataclasses and registered types, nested.

    Whatever else is in there is a constant, and stands for itself; so does a dataclass without tensors.

    Args:
        value: any value.
        name: how messages call it.
    """
    if (parser := parser_of(value)) is not None:
        return _Custom(name, value, parser)
    if isinstance(value, torch.Tensor):
        return Leaf(name, tuple(value.shape), value.dtype)
    if isinstance(value, (tuple, list)):
        return _Sequence(name, value)
    if isinstance(value, dict):
        return _Mapping(name, value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type | torch.nn.Module):
        fields = _Fields(name, value)
        if any(True for _ in fields.leaves()):
            return fields
    return _Constant(name, value)


def result_structure(result: Any) -> Structure:
    """The structure of what a captured model has returned.

    Raises:
        Error: if there are tensors in it that cannot be found: they would come back without numbers.
    """
    structure = structure_of(result, "result")
    for name, constant in structure.constants():
        if holds_tensor(constant, FakeTensor):
            raise hidden_problem(f"The {name} of the model", constant)
    return structure


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

    def build(self, tensors: Iterator[torch.Tensor]) -> torch.Tensor:
        return next(tensors)

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

    def build(self, tensors: Iterator[torch.Tensor]) -> Any:
        return self.value

    def leaves(self) -> Iterator[Leaf]:
        return iter(())

    def constants(self) -> Iterator[tuple[str, Any]]:
        yield self.name, self.value


class _Sequence(Structure):
    """A tuple or list, named tuples and other subclasses included."""

    def __init__(self, name: str, value: Sequence[Any]) -> None:
        self.name = name
        self._type = type(value)
        # A named tuple takes its fields one by one.
        self._make: Callable[[list[Any]], Any] = getattr(value, "_make", None) or type(value)
        self._items = [structure_of(item, f"{name}[{i}]") for i, item in enumerate(value)]

    def collect(self, value: Any, into: list[torch.Tensor]) -> None:
        if type(value) is not self._type:
            raise _mismatch(f"Type mismatch for {self.name}: expected {self._type} but got {type(value)}")
        if len(value) != len(self._items):
            raise _mismatch(f"Length mismatch for {self.name}: expected {len(self._items)} but got {len(value)}")
        for structure, item in zip(self._items, value, strict=True):
            structure.collect(item, into)

    def build(self, tensors: Iterator[torch.Tensor]) -> Any:
        return self._make([structure.build(tensors) for structure in self._items])

    def leaves(self) -> Iterator[Leaf]:
        for structure in self._items:
            yield from structure.leaves()

    def constants(self) -> Iterator[tuple[str, Any]]:
        for structure in self._items:
            yield from structure.constants()


class _Mapping(Structure):
    """A dictionary, subclasses included. The order of its keys is that of the first one."""

    def __init__(self, name: str, value: dict[Any, Any]) -> None:
        self.name = name
        self._type = type(value)
        self._items = {key: structure_of(item, f"{name}[{key!r}]") for key, item in value.items()}
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

    def build(self, tensors: Iterator[torch.Tensor]) -> Any:
        built = copy.copy(self._empty)
        for key, structure in self._items.items():
            built[key] = structure.build(tensors)
        return built

    def leaves(self) -> Iterator[Leaf]:
        for structure in self._items.values():
            yield from structure.leaves()

    def constants(self) -> Iterator[tuple[str, Any]]:
        yield self.name, self._empty  # for its attributes
        for structure in self._items.values():
            yield from structure.constants()


class _Fields(Structure):
    """A dataclass. Its fields are set one by one, so it may be frozen; `__init__` is not called for others like it."""

    def __init__(self, name: str, value: Any) -> None:
        self.name = name
        self._type = type(value)
        names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        self._items = {field: structure_of(getattr(value, field), f"{name}.{field}") for field in names}
        self._empty = copy.copy(value)
        for field in names:  # without keeping tensors alive
            object.__setattr__(self._empty, field, None)

    def collect(self, value: Any, into: list[torch.Tensor]) -> None:
        if type(value) is not self._type:
            raise _mismatch(f"Type mismatch for {self.name}: expected {self._type} but got {type(value)}")
        for field, structure in self._items.items():
            structure.collect(getattr(value, field, None), into)

    def build(self, tensors: Iterator[torch.Tensor]) -> Any:
        built = copy.copy(self._empty)
        for field, structure in self._items.items():
            object.__setattr__(built, field, structure.build(tensors))
        return built

    def leaves(self) -> Iterator[Leaf]:
        for structure in self._items.values():
            yield from structure.leaves()

    def constants(self) -> Iterator[tuple[str, Any]]:
        yield self.name, self._empty  # for what it has beside its fields
        for structure in self._items.values():
            yield from structure.constants()


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

    def build(self, tensors: Iterator[torch.Tensor]) -> Any:
        own = iter([structure.build(tensors) for structure in self._tensors])
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
