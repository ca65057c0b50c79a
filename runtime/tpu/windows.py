"""Windows of images on TPUs: XLA has kernels that go through them, and cuts images into strided pieces slowly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from popxl.ops.pooling import largest_of
from popxl.ops.precision import widened
from popxl.ops.windows import Windows


def first_largest(function: Callable[[Any], Any], windows: Sequence[Windows], t: Any) -> tuple[Any, Any]:
    """The largest numbers by XLA's kernel. Where they are takes long; XLA leaves it out, if nobody reads it."""
    largest, places = function(t)
    return (_largest(t, windows) if _takes(windows) else largest), places


def first_largest_gradient(function: Callable[[Any, Any], Any], windows: Sequence[Windows], g: Any, t: Any) -> Any:
    """By XLA's kernel. In a window with NaN, which number the gradient goes to is open."""
    if not _takes(windows):
        return function(g, t)
    _, gradient = jax.vjp(lambda t: _largest(t, windows), widened(t))
    return gradient(widened(g))[0].astype(g.dtype)


def _takes(windows: Sequence[Windows]) -> bool:
    """Whether XLA's kernels take these windows, forward and backward."""
    return all(along.dilation == 1 for along in windows)


def _largest(t: Any, windows: Sequence[Windows]) -> Any:
    return largest_of(t.dtype).by_xla(t, dict(enumerate(windows, t.ndim - len(windows))))
