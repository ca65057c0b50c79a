"""Placement of a transfer: on compute tiles, or on I/O tiles. Numbers do not depend on it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import popxl
from popxl import ops


def loaded(use_io_tiles: bool, load: Callable[..., popxl.Tensor], *args: Any) -> popxl.Tensor:
    """``load(*args)``; on the I/O tiles if asked for, and then copied to the tiles that compute."""
    if not use_io_tiles:
        return load(*args)
    with popxl.io_tiles():
        t = load(*args)
    return ops.io_tile_copy(t)


def stored(use_io_tiles: bool, store: Callable[..., None], *args: Any) -> None:
    """``store(*args)``; on the I/O tiles if asked for, where the last argument, the tensor, is copied to first."""
    if not use_io_tiles:
        return store(*args)
    *others, t = args
    copy = ops.io_tile_copy(t)
    with popxl.io_tiles():
        store(*others, copy)
