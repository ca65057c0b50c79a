"""`Kernel`: a function of arrays used by ops, which a platform may implement differently.

Here each is plain JAX, and the reference implementation. While a program is traced, its platform may override some
kernels (`overriding_kernels`): the same numbers, faster there. This package names no platform.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import update_wrapper
from typing import Any, TypeVar

KernelImpl = Callable[..., Any]
"""An implementation of a kernel: a function of the same parameters."""

F = TypeVar("F", bound=KernelImpl)


class Kernel:
    """A function of arrays with optional platform-specific implementations; used as a decorator.

    Attributes:
        plain: the reference implementation.

    Example:
        >>> from popxl.extend.kernels import Kernel
        >>> @Kernel
        ... def cube(t):
        ...     return t**3
        >>> @cube.override("tpu")
        ... def cube_on_tpus(t):
        ...     return t * t * t
        >>> cube(2)
        8
    """

    def __init__(self, plain: KernelImpl) -> None:
        self.plain = plain
        self._overrides: dict[str, KernelImpl] = {}
        update_wrapper(self, plain)

    def override(self, platform: str) -> Callable[[F], F]:
        """A decorator that makes a function the implementation on one platform, as JAX names it: "cpu", "gpu" or "tpu".

        The function takes the kernel's parameters and returns the same numbers. Programs that are compiled later, for
        local devices and for targets, use it in place of an implementation of this package.

        Raises:
            ValueError: if the kernel has another override for this platform.
        """

        def decorate(function: F) -> F:
            found = self._overrides.setdefault(platform, function)
            if found is not function:
                raise ValueError(
                    f"Kernel.override: {self.__name__} has the implementation {found!r} for {platform!r}; got "  # type: ignore[attr-defined]
                    f"{function!r} besides. A kernel has one for each platform."
                )
            return function

        return decorate

    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        platform, overrides = _current.get()
        chosen = self._overrides.get(platform) or overrides.get(self, self.plain)
        return chosen(*arguments, **settings)


_current: ContextVar[tuple[str, Mapping[Kernel, KernelImpl]]] = ContextVar("kernels", default=("", {}))  # noqa: B039


@contextmanager
def overriding_kernels(platform: str, overrides: Mapping[Kernel, KernelImpl]) -> Iterator[None]:
    """Compute kernels for a platform inside a `with` block: registered overrides first, then `overrides`."""
    token = _current.set((platform, overrides))
    try:
        yield
    finally:
        _current.reset(token)
