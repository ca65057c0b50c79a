"""Calls that XLA keeps.

Other calls it inlines: it compiles the function anew for each, and makes what is in it part of whatever reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import jax
from jax.experimental.xla_metadata import set_xla_metadata


def kept(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose calls are kept. Those that it makes itself, of functions of JAX among them, are inlined."""

    @wraps(function)
    def body(*arguments: Any) -> Any:
        with set_xla_metadata(inlineable=None):  # or all calls that are traced inside would be kept
            return function(*arguments)

    compiled = jax.jit(body)

    @wraps(function)
    def call(*arguments: Any) -> Any:
        with set_xla_metadata(inlineable="false"):
            return compiled(*arguments)

    return call
