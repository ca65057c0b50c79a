"""Raw memory maps that several processes may open at once. Their layout is defined in `variable_factory`."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from popxl.extend.files import temporary_sibling


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
