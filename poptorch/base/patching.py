"""State for the time of a block: `patched` attributes, items `pushed` on stacks, and `restoring` contents after it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

Item = TypeVar("Item")


@contextmanager
def patched(holder: Any, **attributes: Any) -> Iterator[None]:
    """Replace attributes of a module, class or object, or items of a dictionary, within a block; those that it has not
    itself are gone afterwards.

    Example:
        >>> from types import SimpleNamespace
        >>> settings = SimpleNamespace(level=1)
        >>> with patched(settings, level=2, name="test"):
        ...     settings
        namespace(level=2, name='test')
        >>> settings
        namespace(level=1)
    """
    own, put, remove = (
        (holder, dict.__setitem__, dict.__delitem__) if type(holder) is dict else (vars(holder), setattr, delattr)
    )
    before = {name: own[name] for name in attributes if name in own}
    try:
        for name, value in attributes.items():
            put(holder, name, value)
        yield
    finally:
        for name in attributes:
            if name in before:
                put(holder, name, before[name])
            else:
                remove(holder, name)


@contextmanager
def pushed(stack: list[Item], item: Item) -> Iterator[Item]:
    """Push an item onto a stack for the duration of a block."""
    stack.append(item)
    try:
        yield item
    finally:
        stack.pop()


@contextmanager
def restoring(*namespaces: dict[str, Any]) -> Iterator[None]:
    """Put the contents of dictionaries back after a block."""
    before = [dict(namespace) for namespace in namespaces]
    try:
        yield
    finally:
        for namespace, contents in zip(namespaces, before, strict=True):
            namespace.clear()
            namespace.update(contents)
