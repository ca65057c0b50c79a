"""Data of variables: elements of an iterable, or results of a callable; and their files, raw memory maps that several
processes may open at once."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator
from numbers import Number
from pathlib import Path
from typing import Any

import numpy as np

import popxl
from popxl.errors import RowsAsValuesWarning
from popxl.extend.files import temporary_sibling
from popxl.extend.source import SourceLocation, user_frame, warn_at
from popxl.initial import Initial

# An element of the data: an array of some library, or a NumPy scalar.
host_scalar_tensor_types: tuple[type, ...] = (*popxl.tensor.host_tensor_types, Number, np.generic)

DataIter = Callable[[], Any] | Iterable[Any]


class PeekableIterator(Iterator[Any]):
    """Iterator with lookahead by one element."""

    def __init__(self, elements: Iterable[Any]):
        self._elements = iter(elements)

    def peek(self) -> Any:
        element = next(self._elements)
        self._elements = itertools.chain((element,), self._elements)
        return element

    def __next__(self) -> Any:
        return next(self._elements)


def data_elements(data_iter: DataIter, name: str | None) -> Iterable[Any]:
    if callable(data_iter):
        try:
            data_iter()
        except Exception as error:
            raise ValueError(
                f"VariableFactory `{name}`: calling `data_iter` without arguments failed: "
                f"{type(error).__name__}: {error}"
            ) from error
        return itertools.starmap(data_iter, itertools.repeat(()))
    if isinstance(data_iter, Iterable):
        return data_iter
    raise ValueError(
        f"VariableFactory `{name}`: `data_iter` is a {type(data_iter).__name__}, expected a callable that returns an "
        "array, or an iterable of arrays. Wrap a constant in a `lambda`."
    )


def warn_of_rows(data_iter: DataIter, name: str | None, groups: int) -> None:
    """Warn about array data without one row per replica group, perhaps intended as one value."""
    shape = getattr(data_iter, "shape", ())
    if shape and shape[0] != groups:
        owner = "each group of replicas" if groups > 1 else "each variable"
        warn_at(
            SourceLocation.of(user_frame()),
            f"VariableFactory `{name}`: `data_iter` is an array of the shape {tuple(shape)}, which is taken for "
            f"{shape[0]} values, one for {owner}. If it is one value, wrap it in a `lambda`; if not, in `iter`.",
            RowsAsValuesWarning,
        )


def first_element(elements: PeekableIterator, name: str | None) -> Any:
    try:
        first = elements.peek()
    except StopIteration:
        raise ValueError(f"VariableFactory `{name}`: `data_iter` is empty.") from None
    if not isinstance(first, (*host_scalar_tensor_types, Initial)):
        raise ValueError(
            f"VariableFactory `{name}`: `data_iter` gives a {type(first).__name__}, expected NumPy or torch arrays."
        )
    if not hasattr(first, "shape"):
        raise AttributeError(
            f"VariableFactory `{name}`: `data_iter` gives a plain {type(first).__name__}, which has no shape. "
            "Wrap it in `np.array(...)`."
        )
    return first


def memory_map(
    path: Path,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    fill: Callable[[], np.ndarray] | None,
    read_only_if_exists: bool,
) -> np.memmap[Any, Any]:
    """Memory-map the headerless array file `path`, creating it via `fill` if missing."""
    existed = path.exists()
    if not existed:
        _create(path, shape, dtype, fill)
    expected = math.prod(shape) * dtype.itemsize
    if path.stat().st_size != expected:
        raise ValueError(
            f"Memory map `{path}` holds {path.stat().st_size} bytes, but an array {dtype.name}{list(shape)} takes "
            f"{expected}. It was written for another variable: remove the file or choose another directory."
        )
    return np.memmap(path, dtype, "r" if existed and read_only_if_exists else "r+", shape=shape)


def _create(path: Path, shape: tuple[int, ...], dtype: np.dtype[Any], fill: Callable[[], np.ndarray] | None) -> None:
    # Written to a temporary file and linked when complete: the first of several processes determines the contents, and
    # none ever sees half a file. Each of them fills a temporary file, so seeded generators stay in step.
    path.parent.mkdir(parents=True, exist_ok=True)
    with temporary_sibling(path) as draft:
        array = np.memmap(draft, dtype, "w+", shape=shape)
        if fill is not None:
            array[...] = fill()
        array.flush()
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
