"""Pass-through values among tensors, such as texts and ids: a model only forwards them, so each call may supply new
ones.

During capture each is replaced by a `Hidden`, which knows only its class. A model that inspects it is captured again,
with the value, which is then part of the program.
"""

from __future__ import annotations

import re
from typing import Any, Self

from poptorch.base.introspection import CONTAINERS, is_instance, items


class HiddenValueAccess(BaseException):
    """Signal of access to a hidden value; a `BaseException`, to escape `except Exception` clauses in the model.

    Attributes:
        numbers: common name of all numbers of its argument, if it is one of them.
    """

    def __init__(self, name: str, kind: type) -> None:
        super().__init__(name)
        self.name = name
        self.numbers = all_numbers_name(re.split(r"[.\[]", name, maxsplit=1)[0]) if kind in (int, float) else ""


def all_numbers_name(argument: str) -> str:
    """Collective name for all numbers of an argument."""
    return f"{argument}.*"


class Hidden:
    """Placeholder for a value: reveals its class, and raises `HiddenValueAccess` on all other access."""

    __slots__ = ("_kind", "_name")

    def __init__(self, name: str, kind: type) -> None:
        object.__setattr__(self, "_name", name)
        object.__setattr__(self, "_kind", kind)

    def __getattribute__(self, name: str) -> Any:
        kind = object.__getattribute__(self, "_kind")
        if name == "__class__":
            return kind
        if not hasattr(kind, name):
            raise AttributeError(f"{kind.__name__!r} object has no attribute {name!r}")
        raise HiddenValueAccess(object.__getattribute__(self, "_name"), kind)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


def _raise_access(self: Hidden, *args: Any, **kwargs: Any) -> Any:
    raise HiddenValueAccess(object.__getattribute__(self, "_name"), object.__getattribute__(self, "_kind"))


_SIMPLE = (str, bytes, int, float)

_KEPT = {"__getattribute__", "__new__", "__init__", "__init_subclass__", "__subclasshook__", "__class_getitem__"}
_OF_NUMBERS = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "divmod", "pow", "and", "or", "xor")
_LOOKS = {name for kind in (*_SIMPLE, list, dict, set) for name, method in vars(kind).items() if callable(method)}
_LOOKS |= {f"__{reflected}{name}__" for name in _OF_NUMBERS for reflected in ("", "r", "i")} | {"__bool__", "__call__"}
for _name in _LOOKS - _KEPT:
    if _name.startswith("__"):
        setattr(Hidden, _name, _raise_access)


def may_be_carried(value: object, is_beside_tensors: bool) -> bool:
    """Whether a value may pass through a model: a text, a number, or a container of both.

    Args:
        is_beside_tensors: whether it is in an argument that holds tensors. In other arguments only texts are passed
            through: models inspect numbers there, such as sizes.
    """
    leaves = _simple(value)
    return leaves is not None and (
        any(is_instance(each, (str, bytes)) for each in leaves) or is_beside_tensors and leaves != []
    )


def _simple(value: object) -> list[object] | None:
    """Texts and numbers inside a value; `None` if it contains anything else."""
    if type(value) in CONTAINERS:
        inside = [_simple(each) for _, each in items(value)]
        keys = list(value) if type(value) is dict else []
        if None in inside or any(type(key) not in _SIMPLE for key in keys):
            return None
        return [each for leaves in inside for each in leaves or ()]
    if type(value) in (bool, type(None)):  # they say how, most often, and are looked at
        return []
    return [value] if type(value) in _SIMPLE else None
