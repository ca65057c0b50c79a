"""Functions with separate implementations for CPUs and for all other platforms of a traced program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax

LANES = 8
"""Numbers per vector instruction of most CPUs."""


def if_platform_cpu(on_cpu: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """Build a function with separate implementations for CPUs and other platforms.

    JAX differentiates `plain`: the derivatives of the many operations of `on_cpu` would be as many again.
    """

    @jax.custom_jvp
    def call(*arguments: Any) -> Any:
        return lax.platform_dependent(*arguments, cpu=on_cpu, default=plain)

    @call.defjvp
    def derivative(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        return jax.jvp(plain, primals, tangents)

    return call
