"""Named time spans of wrapped models in profiles."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from poptorch import profiling

channel = profiling.Channel("poptorch")


def traced(name: str) -> Callable[[profiling.Call], profiling.Call]:
    """Decorator that records a method as a named span in profiles."""
    return partial(profiling.spanned, channel, name)
