"""Annotations with one meaning for a type checker and another at run time."""

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")


def NewAliasAnnotation(name: str, tp: type[T] | None) -> Callable[..., T]:
    """Create an annotation marker for type `tp`, distinguishable by identity.

    The marker is a function, which is what the generics of `typing` accept: `List[marker]` works. It is not a
    constructor: calling it raises `NotImplementedError`. `tp` only informs the reader, and may be `None`.

    Example:
        TensorByRef = NewAliasAnnotation("TensorByRef", Tensor)

        def scale(x: TensorByRef, factor: Tensor): ...
    """

    def marker(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            f"{name} only marks annotations and cannot be called. Write it after the colon, as in `x: {name}`."
        )

    marker.__name__ = marker.__qualname__ = name
    return marker
