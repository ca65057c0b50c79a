"""What a row of the table of ops says, and how rows and their samples are written."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import popxl
from popxl import ops
from popxl.dtypes import kind_of

Array = np.ndarray

FLOATS = "float32 float16 bfloat16"
INTEGERS = "int32 uint32 int8 int16 uint8 uint16"  # those of 64 bits: test_64_bits.py
NUMBERS = f"{FLOATS} {INTEGERS}"
ANY = f"{NUMBERS} bool"


@dataclass(frozen=True)
class Sample:
    """Arguments of an op. Arrays stand for tensors, also in lists; everything else is passed as it is."""

    operands: tuple[Any, ...]
    attributes: dict[str, Any]
    expect: Any = None  # the result, where the row's meaning does not say
    dtype: str | None = None  # of the results that are floats, where it is not that of the first operand
    torch: bool = True  # whether torch takes it
    thorough: bool = False  # whether others say as much

    def __repr__(self) -> str:
        shown = [f"{a.dtype}{list(a.shape)}" if isinstance(a, Array) else repr(a) for a in self.operands]
        return f"({', '.join(shown + [f'{name}={value}' for name, value in self.attributes.items()])})"


@dataclass(frozen=True)
class Fed:
    """Stands for a stream from the host that is fed with an array."""

    data: Array


@dataclass(frozen=True)
class Bad:
    """Arguments that an op refuses."""

    operands: tuple[Any, ...]
    attributes: dict[str, Any]
    error: type[Exception]
    message: str


@dataclass(frozen=True)
class Rule:
    """A gradient that is a choice: at a kink, for ties, below an epsilon. `gives` is by operand; `None`: not asked."""

    operands: tuple[Any, ...]
    attributes: dict[str, Any]
    g: Any
    gives: tuple[Any, ...]


@dataclass(frozen=True)
class Inplace:
    """The form of an op that overwrites its first operand, or that is a view of its operands."""

    name: str
    kind: str
    result: str
    view: bool = False


@dataclass(frozen=True)
class Row:
    """One op.

    `result` names the result tensors and `kinds` the ops that are added; `{0}` stands for the name of the first
    operand. `adds` counts the new tensors, where they are not the results alone. `differentiable` lists the operands
    that get a gradient; `refused` means that autodiff raises; `steps`, that differences say nothing of it. `keeps` is
    the number of forward tensors that the gradient reads, where that is promised. `numbers` are operands that may be
    plain numbers. `build` stands in for the op where its arguments cannot be written as a sample.
    """

    name: str
    meaning: Callable[..., Any]
    samples: list[Sample]
    kinds: str
    result: str
    adds: int | None = None
    differentiable: tuple[int, ...] = ()
    refused: bool = False
    keeps: int | None = None
    rules: list[Rule] = field(default_factory=list)
    bad: list[Bad] = field(default_factory=list)
    inplace: Inplace | None = None
    overwrites: bool = False
    numbers: tuple[int, ...] = ()
    steps: bool = False
    aliases: tuple[str, ...] = ()
    tolerance: float = 2e-6
    torch: Callable[..., Any] | None = None
    build: Callable[..., Any] | None = None
    colocated: bool = True

    def __repr__(self) -> str:
        return self.name

    @property
    def op(self) -> Callable[..., Any]:
        return function_of(self.name)


def function_of(name: str) -> Callable[..., Any]:
    """The public function of this name."""
    return next(getattr(module, name) for module in (ops, ops.var_updates, ops.collectives) if hasattr(module, name))


# Writing samples ----------------------------------------------------------------------------------------------------


def values(dtype: str, shape: tuple[int, ...], low: float = -2, high: float = 2, seed: int = 0) -> Array:
    """Numbers that are always the same, and all different where they are floats. Integers reach four times as far."""
    random = np.random.default_rng(zlib.crc32(repr((dtype, shape, seed)).encode()))
    if dtype == "bool":
        return random.integers(0, 2, shape).astype(bool)
    if "int" in dtype:
        return random.integers(0 if dtype[0] == "u" and low < 0 else int(4 * low), int(4 * high) + 1, shape).astype(
            dtype
        )
    if dtype == "complex64":
        return np.asarray(random.uniform(low, high, shape) + 1j * random.uniform(low, high, shape), dtype)
    return np.asarray(random.uniform(low, high, shape), dtype)


def telling(samples: list[Sample]) -> list[Sample]:
    """The samples that are distinct; of more than a dozen, one of three."""
    found = distinct(samples)
    return found[:12] + found[12::3]


def distinct(samples: list[Sample]) -> list[Sample]:
    """The samples without those that say again for one more dtype what is said for another.

    Such a sample has the shapes and attributes of one before it, and a dtype of a kind (floats, integers, integers
    without a sign, bool) that has been there, too. One of them stays, for each op another. Samples with numbers that
    few dtypes have, the largest ones or NaN, stay: they are about this dtype.
    """
    kept, again = [], []
    known: set[str] = set()
    for sample in samples:
        arrays = _arrays(sample.operands)
        rest = [o for o in sample.operands if not isinstance(o, list | tuple | Array | Fed)]
        structure = repr(([a.shape for a in arrays], rest, sample.attributes))
        kinds = {f"kind {kind_of(a.dtype)}" for a in arrays}
        is_again = structure in known and kinds <= known and all(map(_is_ordinary, arrays))
        if sample.thorough:
            continue
        if is_again and not any(a.dtype == np.float32 for a in arrays):
            again.append(sample)
        else:
            kept.append(sample)
        known |= {structure, *kinds}
    if again:
        kept.append(again[zlib.crc32(repr(samples[0]).encode()) % len(again)])
    return kept


def _is_ordinary(array: Array) -> bool:
    """Whether all dtypes of this kind have such numbers. Of the narrow integers, those of 8 bits stand for all."""
    if kind_of(array.dtype) == "f":
        return bool(np.all(np.abs(array) < 1000))
    if array.dtype.kind not in "iu" or array.dtype.itemsize == 2 or array.size == 0:
        return True
    return bool(array.max() < np.iinfo(array.dtype).max)


def _arrays(operands: Any) -> list[Array]:
    """The arrays among operands, those in lists and what is fed, too."""
    found = []
    for operand in operands:
        if isinstance(operand, list | tuple):
            found += _arrays(operand)
        elif isinstance(operand, Array | Fed):
            found.append(operand.data if isinstance(operand, Fed) else operand)
    return found


def over(dtypes: str, *shapes: tuple[int, ...], low: float = -2, high: float = 2, **attributes: Any) -> list[Sample]:
    """A sample for each dtype, with an operand for each shape."""
    return [
        Sample(tuple(values(dtype, shape, low, high, seed=i) for i, shape in enumerate(shapes)), attributes)
        for dtype in dtypes.split()
    ]


def sample(
    *operands: Any, expect: Any = None, dtype: str | None = None, torch: bool = True, **attributes: Any
) -> Sample:
    return Sample(operands, attributes, expect, dtype, torch)


def bad(error: type[Exception], message: str, *operands: Any, **attributes: Any) -> Bad:
    return Bad(operands, attributes, error, message)


def rule(*operands: Any, g: Any, gives: tuple[Any, ...], **attributes: Any) -> Rule:
    return Rule(operands, attributes, g, gives)


def f32(*numbers: Any) -> Array:
    return np.array(numbers, np.float32)


def f16(*numbers: Any) -> Array:
    return np.array(numbers, np.float16)


def scalar(number: float, dtype: str = "float32") -> Array:
    return np.array(number, dtype)


def i32(*numbers: Any) -> Array:
    return np.array(numbers, np.int32)


def u32(*numbers: Any) -> Array:
    return np.array(numbers, np.uint32)


X = values("float32", (2, 3))
Y = values("float32", (3,))
INTS = values("int32", (2, 3))
LIMITS = {dtype: np.array([np.iinfo(dtype).min, np.iinfo(dtype).max, 0, 1, 3], dtype) for dtype in INTEGERS.split()}
PopxlError = popxl.errors.PopxlError
MIXED = bad(PopxlError, "different dtypes, float32 and int32", X, INTS)
UNFIT = bad(PopxlError, r"shapes \(2, 3\) and \(2,\) do not broadcast", X, values("float32", (2,)))
SPECIALS = f32(0.0, -0.0, 1.5, -2.0, np.inf, -np.inf, np.nan)


def torch_function(path: str, **fixed: Any) -> Callable[..., Any]:
    """A function of torch, which is imported when it is called."""

    def call(*operands: Any, **attributes: Any) -> Any:
        import torch

        return functools.reduce(getattr, path.split("."), torch)(*operands, **fixed, **attributes)

    return call
