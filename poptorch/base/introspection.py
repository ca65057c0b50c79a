"""Introspection of user objects without executing their code.

`isinstance` and `vars` read the `__class__` and `__dict__` of an object. A weak proxy returns those of another object
or raises `ReferenceError`, and so may a class with its own `__getattribute__`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from types import MemberDescriptorType
from typing import Any

CONTAINERS = (dict, list, tuple, deque, set, frozenset)
"""The types of Python that hold other objects."""


def is_instance(value: object, kinds: type | tuple[type, ...]) -> bool:
    """Whether an object is an instance of a class, ignoring `__class__` overrides.

    Example:
        >>> import weakref
        >>> class Layer: ...
        >>> layer = Layer()
        >>> proxy = weakref.proxy(layer)
        >>> isinstance(proxy, Layer), is_instance(proxy, Layer)
        (True, False)
    """
    return issubclass(type(value), kinds)


def attributes(value: object) -> dict[str, Any]:
    """Attribute dictionary of an object, uncopied; empty without a `__dict__`."""
    try:
        dictionary = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return dictionary if is_instance(dictionary, dict) else {}


def slots(value: object) -> dict[str, MemberDescriptorType]:
    """Member descriptors of an object's set `__slots__` attributes, by name."""
    descriptors = {
        name: slot
        for kind in reversed(type(value).__mro__)
        for name, slot in vars(kind).items()
        if is_instance(slot, MemberDescriptorType) and not name.startswith("__")
    }
    return {name: slot for name, slot in descriptors.items() if _is_set(slot, value)}


def _is_set(slot: MemberDescriptorType, value: object) -> bool:
    try:
        slot.__get__(value)
    except AttributeError:
        return False
    return True


def items(container: Any) -> Iterator[tuple[Any, Any]]:
    """Key-value pairs of a container; except for dictionaries, keys are indices."""
    if is_instance(container, dict):
        return iter(tuple(dict.items(container)))
    base = next(kind for kind in CONTAINERS if is_instance(container, kind))
    return enumerate(tuple(base.__iter__(container)))
