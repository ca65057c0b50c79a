"""Descriptions of a variable's initial value: zeros, a number, a distribution and its seed, a part of a file.

A description takes no memory. `popxl.variable` takes one in place of numbers, which are made when they are first
needed: building, printing, costing and saving a program, and compiling it for a target, do without. A session makes
only the part of the numbers that the devices of its process hold.

Element number i of a description is always the same, independent of the device and of the other elements made.

Example:
    >>> ir = popxl.Ir()
    >>> with ir.main_graph:
    ...     w = popxl.variable(popxl.initial.normal((12288, 49152), std=0.02, seed=7), popxl.float32, "w")
    >>> w.shape, w.initial.seed
    ((12288, 49152), 7)
"""

from __future__ import annotations

import math
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, model_validator

from popxl import dtypes
from popxl.dtypes import dtype as dtype_
from popxl.utils import to_numpy
from popxl.values.shapes import integer, integer_or_integers, number, sizes

__all__ = ["Full", "Initial", "PartOfFile", "Random", "Saved", "Stacked", "file", "full", "normal", "ones", "stacked"]
__all__ += ["truncated_normal", "uniform", "zeros"]

Array = np.ndarray

PIECE = 1 << 20
"""Number of elements per chunk when all are generated, which bounds temporaries in a wider dtype."""


class Initial(BaseModel, ABC):
    """The numbers of an array, described.

    Attributes:
        shape: shape of the array.

    Example:
        >>> zeros = popxl.initial.zeros((2, 3))
        >>> zeros.elements(4, 6), np.asarray(zeros).shape
        (array([0., 0.]), (2, 3))
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    shape: tuple[NonNegativeInt, ...]

    @property
    def dtype(self) -> dtype_:
        """Element type by default."""
        return dtypes.float32

    @property
    def is_complete(self) -> bool:
        """Whether the description is self-contained, without a file, so that programs can save it."""
        return True

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def check_held_by(self, dtype: dtype_, what: str) -> None:
        """`ValueError` if the dtype cannot hold such numbers: integers cannot hold draws, nor 0.5."""

    @abstractmethod
    def elements(self, start: int, stop: int) -> Array:
        """A range of elements, in row-major order."""

    def numbers(self, dtype: dtype_ | None = None) -> Array:
        """All elements as an array, optionally of another dtype."""
        wanted = self.dtype if dtype is None else dtype
        values = np.empty(self.size, wanted.as_numpy())
        for start in range(0, self.size, PIECE):
            stop = min(start + PIECE, self.size)
            values[start:stop] = to_numpy(self.elements(start, stop), wanted)
        return values.reshape(self.shape)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        numbers = self.numbers()
        return numbers if dtype is None else numbers.astype(dtype)

    def __call__(self) -> Self:
        """The description itself, where a function is wanted that gives initial values."""
        return self


class Full(Initial):
    """One number everywhere.

    Attributes:
        value: the number.
    """

    kind: Literal["full"] = "full"
    value: int | float

    def check_held_by(self, dtype: dtype_, what: str) -> None:
        if dtype.is_int and self.value != self.value // 1:
            raise ValueError(f"{what} is {self.value} everywhere, which {dtype.name} does not hold.")

    def elements(self, start: int, stop: int) -> Array:
        return np.broadcast_to(self.value, stop - start)  # one number in memory


class Random(Initial):
    """Random draws from counter-based generators with independent access to any element.

    Attributes:
        kind: `"uniform"` between `low` and `high`; `"normal"` around `low` with the deviation `high`;
            `"truncated_normal"` likewise, and cut off at two deviations.
        low, high: see above.
        seed: seed of the draws. Descriptions with the same seed draw the same numbers.
    """

    kind: Literal["uniform", "normal", "truncated_normal"]
    low: float
    high: float
    seed: Annotated[int, Field(ge=0, lt=2**64)]

    def check_held_by(self, dtype: dtype_, what: str) -> None:
        if not dtype.is_inexact:
            raise ValueError(
                f"{what} are draws of a {self.kind} distribution, which {dtype.name} does not hold: their fractions "
                "would be cut off. Draw integers with NumPy, such as `np.random.default_rng(1).integers(10, size=3)`."
            )

    def elements(self, start: int, stop: int) -> Array:
        first = start // 4  # a count gives four
        draws = np.random.Philox(key=self.seed, counter=first).random_raw(stop - 4 * first)[start - 4 * first :]
        shares = ((draws >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53  # above 0, below 1
        if self.kind == "uniform":
            return self.low + shares * (self.high - self.low)
        from scipy.special import ndtr, ndtri  # JAX needs SciPy, too; importing it takes a while

        if self.kind == "truncated_normal":
            shares = ndtr(-2) + shares * (ndtr(2) - ndtr(-2))
        return self.low + ndtri(shares) * self.high


class PartOfFile(Initial):
    """Consecutive numbers in a file, which must stay unchanged.

    Attributes:
        path: the file.
        element: name of their dtype.
        offset: position of their first byte.
    """

    kind: Literal["file"] = "file"
    path: Path
    element: str
    offset: NonNegativeInt = 0

    @property
    def dtype(self) -> dtype_:
        return dtype_.from_name(self.element)

    @property
    def is_complete(self) -> bool:
        return False

    def elements(self, start: int, stop: int) -> Array:
        element = self.dtype.as_numpy()
        values = np.fromfile(self.path, element, stop - start, offset=self.offset + start * element.itemsize)
        if len(values) < stop - start:
            raise ValueError(
                f"initial.file: {os.fspath(self.path)!r} ends before element {stop} of the {self.size} from byte "
                f"{self.offset} on that were there when the variable was made."
            )
        return values


class Stacked(Initial):
    """Several of one shape, along a new first dimension.

    Attributes:
        parts: they.
    """

    kind: Literal["stacked"] = "stacked"
    parts: tuple[Known, ...] = Field(min_length=1)

    @property
    def dtype(self) -> dtype_:
        return self.parts[0].dtype

    @property
    def is_complete(self) -> bool:
        return all(initial.is_complete for initial in self.parts)

    def check_held_by(self, dtype: dtype_, what: str) -> None:
        for initial in self.parts:
            initial.check_held_by(dtype, what)

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        if self.shape != (len(self.parts), *self.parts[0].shape) or len({initial.shape for initial in self.parts}) > 1:
            raise ValueError(f"parts of {[initial.shape for initial in self.parts]} are not {self.shape}")
        return self

    def elements(self, start: int, stop: int) -> Array:
        size = self.parts[0].size
        numbers = range(start // size, -(-stop // size)) if size else ()
        chunks = [self.parts[n].elements(max(start - n * size, 0), min(stop - n * size, size)) for n in numbers]
        return np.concatenate(chunks) if chunks else np.zeros(0, np.float32)


Known = Annotated[Full | Random | PartOfFile | Stacked, Field(discriminator="kind")]
"""Union of all descriptions."""

Stacked.model_rebuild()


class Saved(BaseModel):
    """A description in a file."""

    model_config = ConfigDict(extra="forbid")

    initial: Known


# Making them ---------------------------------------------------------------------------------------------------------


def _shape(shape: int | Iterable[int], what: str) -> tuple[int, ...]:
    entries = integer_or_integers(shape, f"{what}: `shape`")
    return sizes(entries if isinstance(entries, tuple) else (entries,), f"{what}: `shape`")


def zeros(shape: int | Iterable[int]) -> Full:
    """Zeros.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     popxl.variable(popxl.initial.zeros((2, 3)), popxl.float16, "w")
        Variable[w popxl.dtypes.float16 (2, 3)]
    """
    return full(shape, 0.0)


def ones(shape: int | Iterable[int]) -> Full:
    """Ones."""
    return full(shape, 1.0)


def full(shape: int | Iterable[int], value: int | float) -> Full:
    """One number everywhere."""
    return Full(shape=_shape(shape, "initial.full"), value=number(value, "initial.full: `value`"))


def uniform(shape: int | Iterable[int], low: float = 0.0, high: float = 1.0, *, seed: int) -> Random:
    """Numbers between two others, all equally likely.

    Example:
        >>> part = popxl.initial.uniform((4, 5), -1, 1, seed=3).elements(10, 12)
        >>> part.shape, bool((abs(part) < 1).all())
        ((2,), True)
    """
    return _random("uniform", shape, low, high, seed)


def normal(shape: int | Iterable[int], mean: float = 0.0, std: float = 1.0, *, seed: int) -> Random:
    """Draws of a normal distribution."""
    return _random("normal", shape, mean, std, seed)


def truncated_normal(shape: int | Iterable[int], mean: float = 0.0, std: float = 1.0, *, seed: int) -> Random:
    """Draws of a normal distribution that is cut off at two deviations."""
    return _random("truncated_normal", shape, mean, std, seed)


def _random(kind: Any, shape: int | Iterable[int], low: float, high: float, seed: int) -> Random:
    what = f"initial.{kind}"
    if not 0 <= integer(seed, f"{what}: `seed`") < 2**64:
        raise ValueError(f"{what}: `seed` is {seed}; expected 0 to 2**64 - 1.")
    bounds = (number(each, f"{what}: the distribution's numbers") for each in (low, high))
    low, high = map(float, bounds)
    return Random(kind=kind, shape=_shape(shape, what), low=low, high=high, seed=int(seed))


def file(path: str | os.PathLike[str], shape: int | Iterable[int], dtype: dtype_, offset: int = 0) -> PartOfFile:
    """Consecutive numbers in a file, filling the shape in row-major order.

    Args:
        path: path of the file, which must not change while the description is in use.
        shape: shape of the array.
        dtype: element type of the file's content.
        offset: position of their first byte.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is too short.
    """
    described = PartOfFile(
        shape=_shape(shape, "initial.file"), path=Path(path).absolute(), element=dtype.name, offset=offset
    )
    size, needed = described.path.stat().st_size, offset + described.size * dtype.itemsize
    if size < needed:
        raise ValueError(
            f"initial.file: {os.fspath(path)!r} has {size} bytes; {described.size} elements of {dtype.name} from byte "
            f"{offset} on end at byte {needed}."
        )
    return described


def stacked(parts: Sequence[Initial]) -> Stacked:
    """Several of one shape, along a new first dimension: the values of a variable on several groups of replicas.

    Raises:
        ValueError: if there are none, or their shapes differ.
    """
    shapes = {part.shape for part in parts}
    if len(shapes) != 1:
        raise ValueError(f"initial.stacked: expected parts of one shape; got {sorted(shapes)}.")
    return Stacked(shape=(len(parts), *shapes.pop()), parts=tuple(parts))  # type: ignore[arg-type]
