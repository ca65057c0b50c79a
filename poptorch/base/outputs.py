"""Outputs of a captured model: its result, and attributes set on its arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch._subclasses import FakeTensor

from poptorch.base.carried import Hidden, HiddenValueAccess
from poptorch.base.hidden_tensors import hidden_problem, holds_tensor
from poptorch.base.introspection import attributes
from poptorch.base.leaves import Components
from poptorch.base.structures import Composite, given_objects, structure_of


class SideEffects:
    """Attribute changes of objects during a function call.

    Args:
        objects: objects in their state before the call.

    Example:
        >>> class Box:
        ...     pass
        >>> box = Box()
        >>> changes = SideEffects([box])
        >>> box.content = 3
        >>> changes.changed_attributes()
        {0: {'content': 3}}
    """

    def __init__(self, objects: Sequence[Any]) -> None:
        self._objects = list(objects)
        self._snapshots = [
            {key: copy_containers(value) for key, value in attributes(each).items()} for each in self._objects
        ]

    def changed_attributes(self) -> dict[int, dict[str, Any]]:
        """Changed attributes by object number, including lists with new contents.

        Writes into a tensor do not count. A deleted attribute is `SideEffects.GONE`.
        """
        changes: dict[int, dict[str, Any]] = {}
        for i, (each, before) in enumerate(zip(self._objects, self._snapshots, strict=True)):
            now = attributes(each)
            changed = {k: v for k, v in now.items() if k not in before or not is_unchanged(before[k], v)}
            changed |= {key: SideEffects.GONE for key in before if key not in now}
            if changed:
                changes[i] = changed
        return changes

    GONE = "an attribute that was deleted"

    @staticmethod
    def make(found: Mapping[int, Mapping[str, Any]], objects: Sequence[Any]) -> None:
        """Apply recorded changes to other objects."""
        for i, changed in found.items():
            for key, value in changed.items():
                if value is SideEffects.GONE:
                    attributes(objects[i]).pop(key, None)
                else:
                    attributes(objects[i])[key] = value


def copy_containers(value: Any) -> Any:
    """Copy lists and dictionaries recursively, to detect later changes; return other values unchanged."""
    if type(value) in (list, tuple):
        return type(value)(copy_containers(each) for each in value)
    return {key: copy_containers(each) for key, each in value.items()} if type(value) is dict else value


def is_unchanged(before: Any, now: Any) -> bool:
    """Whether a value holds the same objects as before, in lists, tuples and dictionaries; see `copy_containers`."""
    if type(before) is not type(now):
        return False
    if type(now) in (list, tuple):
        return len(before) == len(now) and all(map(is_unchanged, before, now))
    if type(now) is dict:
        return list(before) == list(now) and all(map(is_unchanged, before.values(), now.values()))
    return before is now or (type(now) in (bool, int, float, str) and before == now)


class OutputStructure(Composite):
    """Structure of a captured model's result, with attribute changes of its arguments.

    A value of it is a pair of these; rebuilding returns the result alone, after changing the given objects.

    Raises:
        Error: if there are tensors in it that cannot be found: they would come back without numbers.
    """

    def __init__(self, result: Any, changed: Mapping[int, Mapping[str, Any]], objects: Sequence[Any]) -> None:
        super().__init__("result", ())
        known = given_objects(objects)
        self._children = structure_of(result, self.name, known), structure_of(dict(changed), "argument", known)
        for name, constant in self.constants():
            if holds_tensor(constant, FakeTensor):
                raise hidden_problem(f"The {name} of the model", constant)
            if holds_tensor(constant, Hidden):
                raise HiddenValueAccess(name, type(constant))

    def _child_values(self, value: Any) -> Iterable[Any]:
        return value

    def build(self, parts: Components) -> Any:
        result, changed = (child.build(parts) for child in self._children)
        SideEffects.make(changed, parts.known_objects)
        return result
