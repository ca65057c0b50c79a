"""The interface of structures, and their leaves: tensors, constants and references to objects.

Containers of these, and the flattening of values, are in `poptorch.base.structures`.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from poptorch.base.carried import Hidden
from poptorch.errors import createPoptorchError


class Structure(ABC):
    """Nested arrangement of tensors and other values, without the tensors. Created by `structure_of`.

    Attributes:
        name: name in messages, such as `x[0]['mask']`.

    Example:
        >>> batch = {"x": torch.zeros(2, 3), "scale": 0.5}
        >>> structure = poptorch.base.structures.structure_of(batch, "batch")
        >>> structure.rebuild([torch.ones(3)])
        {'x': tensor([1., 1., 1.]), 'scale': 0.5}
    """

    name: str

    @abstractmethod
    def collect(self, value: Any, into: list[torch.Tensor]) -> None:
        """Append tensors of a value with this structure.

        Raises:
            Error: if it is not: another type, length, key, dtype, shape or constant.
        """

    @abstractmethod
    def build(self, parts: Components) -> Any:
        """Build a new value from the next tensors of `parts`."""

    def leaves(self) -> Iterator[Leaf]:
        """Tensor leaves, in `collect` and `build` order."""
        return iter(())

    def constants(self) -> Iterator[tuple[str, Any]]:
        """Opaque values, identical in all rebuilt values, with their names for messages."""
        return iter(())

    def tensors(self, value: Any) -> list[torch.Tensor]:
        """Tensors of a value with this structure; see `collect`."""
        tensors: list[torch.Tensor] = []
        self.collect(value, tensors)
        return tensors

    def rebuild(self, tensors: Iterable[torch.Tensor], given: Sequence[Any] = ()) -> Any:
        """Rebuild a value with new tensors, one per item of `leaves()`, of any shape and dtype.

        Args:
            given: objects in the places of known objects of `structure_of`.
        """
        return self.build(Components(iter(tensors), given))

    def objects(self, value: Any) -> Iterator[Any]:
        """Plain-class objects in a value with this structure, in deterministic order.

        They are those that a function may change for its caller, by setting their attributes.
        """
        return iter(())


class Components:
    """Components for building a value: an iterator of tensors, and known objects by number.

    Attributes:
        known_objects: the objects.
        hides: whether carried values are replaced; see `poptorch.base.carried`.
        enclosing: objects that are being built, by the identity of their structures.
    """

    def __init__(self, tensors: Iterator[torch.Tensor], given: Sequence[Any] = (), hides: bool = False) -> None:
        self._tensors, self.known_objects, self.hides = tensors, given, hides
        self.enclosing: dict[int, Any] = {}

    def __iter__(self) -> Iterator[torch.Tensor]:
        return self

    def __next__(self) -> torch.Tensor:
        return next(self._tensors)


class KnownObjects(dict[int, "Structure"]):
    """Structures of known objects by identity, and a rule for pass-through values.

    Args:
        carries: whether a value of this name is passed through, rather than a part of the program.
        inspected: names of the values that could be passed through, but are inspected.
    """

    def __init__(
        self,
        structures: Mapping[int, Structure] | None = None,
        carries: Callable[[str, Any], bool] = lambda name, value: False,
        inspected: Collection[str] = (),
    ) -> None:
        super().__init__(structures or {})
        self.carries, self.inspected = carries, inspected


@dataclass(frozen=True, slots=True)
class Leaf(Structure):
    """Position of a tensor.

    Attributes:
        name: name in messages.
        shape: shape of the whole tensor, the rows of all micro-batches.
        dtype: on the host.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def collect(self, value: Any, into: list[torch.Tensor]) -> None:
        if not isinstance(value, torch.Tensor):
            raise mismatch_error(f"Type mismatch for {self.name}: expected {torch.Tensor} but got {type(value)}")
        if value.dtype is not self.dtype:
            raise mismatch_error(f"Type mismatch for {self.name}: expected {self.dtype} but got {value.dtype}")
        if value.shape != self.shape:
            last = (
                MAY_BE_THE_LAST if self.shape[1:] == value.shape[1:] and _rows(value.shape) < _rows(self.shape) else ""
            )
            raise mismatch_error(
                f"Shape mismatch for {self.name}: expected {torch.Size(self.shape)} but got {value.shape}", last
            )
        into.append(value)

    def build(self, parts: Components) -> torch.Tensor:
        return next(parts)

    def leaves(self) -> Iterator[Leaf]:
        yield self


@dataclass(frozen=True, slots=True)
class Constant(Structure):
    name: str
    value: Any

    def collect(self, value: Any, into: list[torch.Tensor]) -> None:
        if value is self.value:
            return
        check_type(self.name, type(self.value), value)
        try:
            is_equal = _equal(value, self.value)
        except (TypeError, ValueError, RuntimeError) as problem:  # so say arrays of several numbers
            raise mismatch_error(
                f"Value mismatch for {self.name}: whether it is the {type(value).__name__} that was expected cannot be "
                f"told ({problem})"
            ) from problem
        if not is_equal:
            expected, got = repr(self.value), repr(value)
            same = " (another one, which is not equal)" * (expected == got)
            raise mismatch_error(f"Value mismatch for {self.name}: expected {expected} but got {got}{same}")

    def build(self, parts: Components) -> Any:
        return self.value

    def constants(self) -> Iterator[tuple[str, Any]]:
        yield self.name, self.value


@dataclass(frozen=True, slots=True)
class KnownReference(Structure):
    """A known object, which represents itself during reconstruction."""

    name: str
    number: int

    def collect(self, value: Any, into: list[torch.Tensor]) -> None:
        return

    def build(self, parts: Components) -> Any:
        return parts.known_objects[self.number]


@dataclass(frozen=True, slots=True)
class CarriedValue(Structure):
    """A pass-through value outside the program: any value of its class fits. Counts as an object."""

    name: str
    value: Any

    def collect(self, value: Any, into: list[torch.Tensor]) -> None:
        check_type(self.name, type(self.value), value)

    def build(self, parts: Components) -> Any:
        return Hidden(self.name, type(self.value)) if parts.hides else self.value

    def objects(self, value: Any) -> Iterator[Any]:
        yield value


@dataclass(frozen=True, slots=True)
class SelfReference(Structure):
    """Self-reference of an object, replaced by the rebuilt object."""

    name: str
    structure: Structure

    def collect(self, value: Any, into: list[torch.Tensor]) -> None:
        return

    def build(self, parts: Components) -> Any:
        return parts.enclosing[id(self.structure)]


@dataclass(frozen=True, slots=True)
class WeakSelfReference(SelfReference):
    """Weak self-reference of an object."""

    def build(self, parts: Components) -> Any:
        return weakref.ref(self.structure.build(parts))


def check_type(name: str, expected: type, value: Any) -> None:
    if type(value) is not expected:
        raise mismatch_error(f"Type mismatch for {name}: expected {expected} but got {type(value)}")


def check_length(name: str, expected: int, values: Sequence[Any], what: str = "") -> Sequence[Any]:
    """Return values, after checking their count."""
    if len(values) != expected:
        raise mismatch_error(f"Length mismatch for {name}: expected {expected}{what} but got {len(values)}")
    return values


def mismatch_error(what: str, more: str = "") -> Exception:
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
    """Whether two constants are equal; NaN equals itself."""
    if isinstance(a, np.ndarray):
        return a.shape == b.shape and bool(np.all((a == b) | ((a != a) & (b != b))))
    return bool(a == b) or bool(a != a and b != b)
