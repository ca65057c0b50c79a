"""Named time spans for profiles."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import wraps
from typing import Any, TypeVar

from jax.profiler import TraceAnnotation

__all__ = ["Channel"]

Instrumented = TypeVar("Instrumented")
Call = TypeVar("Call", bound=Callable[..., Any])


class Channel:
    """A namespace of time spans. Spans appear in JAX profiles, and otherwise have no effect.

    Args:
        name: prefix of the names of its spans.

    Example:
        >>> channel = Channel("MyApp")
        >>> with channel.tracepoint("load"):
        ...     data = list(range(3))
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def tracepoint(self, name: str) -> AbstractContextManager[Any]:
        """Context manager recording its block's duration as a span."""
        return TraceAnnotation(f"{self._name}: {name}")

    def instrument(self, obj: Instrumented, *methods: str) -> Instrumented:
        """Record each call of an object's named methods as a span.

        Args:
            obj: object to change.
            methods: names of the methods.

        Returns:
            The object.

        Raises:
            AttributeError: if it has no such method; then none is changed.

        Example:
            >>> class Reader:
            ...     def read(self):
            ...         return "data"
            >>> Channel("MyApp").instrument(Reader(), "read").read()
            'data'
        """
        methods_by_name = {method: getattr(obj, method) for method in methods}
        for method, call in methods_by_name.items():
            setattr(obj, method, spanned(self, method, call))
        return obj


def spanned(channel: Channel, name: str, call: Call) -> Call:
    """Wrap a function, recording each call as a named span."""

    @wraps(call)
    def in_span(*args: Any, **kwargs: Any) -> Any:
        with channel.tracepoint(name):
            return call(*args, **kwargs)

    return in_span  # type: ignore[return-value]
