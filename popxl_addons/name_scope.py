"""The name scope of a module: pushed around every ``build`` that a class body defines."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import popxl


class NameScopeMeta(type):
    """Metaclass that wraps the ``build`` of each class, so that its ops are named below the module's name scope.

    A class that uses it has an attribute ``_name_scope``: a name, or None for no scope.
    """

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **kwargs: Any) -> NameScopeMeta:
        if "build" in namespace:
            namespace["build"] = _in_name_scope(namespace["build"])
        return super().__new__(mcs, name, bases, namespace, **kwargs)


def _in_name_scope(build: Callable[..., Any]) -> Callable[..., Any]:
    # Wrapped, so that the signature stays visible, with inputs and by-reference arguments.
    @functools.wraps(build)
    def scoped_build(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._name_scope is None:
            return build(self, *args, **kwargs)
        with popxl.name_scope(self._name_scope):
            return build(self, *args, **kwargs)

    return scoped_build
