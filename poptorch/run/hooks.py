"""Compilation hooks and capture-time substitutions, registered by users and dependent packages."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol

from torch.utils.hooks import RemovableHandle

from poptorch.errors import createPoptorchError

Hook = Callable[[], object]

pre_compile: OrderedDict[int, Hook] = OrderedDict()
post_compile: OrderedDict[int, Hook] = OrderedDict()


def registerPreCompileHook(hook: Hook) -> RemovableHandle:
    """Register a function called before each model capture and compilation, regardless of the calling wrapper.

    Args:
        hook: a function without arguments. Hooks are called in the order of their registration.

    Returns:
        A handle, whose `remove()` ends that.

    Raises:
        RuntimeError: if it cannot be called.

    Example:
        >>> handle = registerPreCompileHook(lambda: print("compiling"))
        >>> handle.remove()
    """
    return _registered(pre_compile, hook, "registerPreCompileHook")


def registerPostCompileHook(hook: Hook) -> RemovableHandle:
    """Register a function called after each compilation; otherwise like `registerPreCompileHook`."""
    return _registered(post_compile, hook, "registerPostCompileHook")


class Substitution(Protocol):
    """Capture-time substitution, replacing for example a library function used by models with another package's."""

    def replace(self) -> object: ...

    def restore(self) -> object: ...


_substitutions: list[type[Substitution]] = []


def register_substitution(manager: type[Substitution]) -> None:
    """Register a class whose instances replace something during each capture; see `poptorch._impl`."""
    methods = [getattr(manager, name, None) for name in ("replace", "restore")]
    if not isinstance(manager, type) or not all(map(callable, methods)):
        raise createPoptorchError(
            f"registerSubsitutionManager: expected a class with the methods `replace` and `restore`; got {manager!r}."
        )
    _substitutions.append(manager)


@contextmanager
def substituting() -> Iterator[None]:
    """Context manager applying registered substitutions."""
    with ExitStack() as stack:
        for manager in tuple(_substitutions):
            substitution = manager()
            stack.callback(substitution.restore)
            substitution.replace()
        yield


def _registered(hooks: OrderedDict[int, Hook], hook: Hook, name: str) -> RemovableHandle:
    if not callable(hook):
        raise RuntimeError(f"{name}: `hook` is {hook!r}; it must be callable, without arguments.")
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def call(hooks: OrderedDict[int, Hook]) -> None:
    """Call registered hooks."""
    for hook in tuple(hooks.values()):  # a hook may remove itself
        hook()
