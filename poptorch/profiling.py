"""Spans of time with names, for profiles."""

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
    """Names spans of time under the name of a part of a program. They show in a profile that JAX takes; else they do
    nothing.

    Args:
        name: the part, which comes before the names of its spans.

    Example:
        >>> channel = Channel("MyApp")
        >>> with channel.tracepoint("load"):
        ...     data = list(range(3))
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def tracepoint(self, name: str) -> AbstractContextManager[Any]:
        """A span: the time that the `with` block takes."""
        return TraceAnnotation(f"{self._name}: {name}")

    def instrument(self, obj: Instrumented, *methods: str) -> Instrumented:
        """Make every call of some methods of an object a span.

        Args:
            obj: the object; it is changed.
            methods: the names of the methods.

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
        found = {method: getattr(obj, method) for method in methods}
        for method, call in found.items():
            setattr(obj, method, spanned(self, method, call))
        return obj


def spanned(channel: Channel, name: str, call: Call) -> Call:
    """A function whose every call is a span of that name."""

    @wraps(call)
    def in_span(*args: Any, **kwargs: Any) -> Any:
        with channel.tracepoint(name):
            return call(*args, **kwargs)

    return in_span  # type: ignore[return-value]
