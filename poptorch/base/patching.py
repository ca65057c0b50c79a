"""`patched`: attributes that are replaced for the time of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def patched(holder: Any, **attributes: Any) -> Iterator[None]:
    """Replace attributes of a module, class or object within a block; those that it has not itself are gone afterwards.

    Example:
        >>> from types import SimpleNamespace
        >>> settings = SimpleNamespace(level=1)
        >>> with patched(settings, level=2, name="test"):
        ...     settings
        namespace(level=2, name='test')
        >>> settings
        namespace(level=1)
    """
    before = {name: vars(holder)[name] for name in attributes if name in vars(holder)}
    try:
        for name, value in attributes.items():
            setattr(holder, name, value)
        yield
    finally:
        for name in attributes:
            if name in before:
                setattr(holder, name, before[name])
            else:
                delattr(holder, name)
