"""Functions of the user that are called around every compilation of a model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from torch.utils.hooks import RemovableHandle

__all__ = ["post_compile", "pre_compile", "registerPostCompileHook", "registerPreCompileHook"]

Hook = Callable[[], object]

_pre: OrderedDict[int, Hook] = OrderedDict()
_post: OrderedDict[int, Hook] = OrderedDict()


def registerPreCompileHook(hook: Hook) -> RemovableHandle:
    """Have a function called before each model is captured and compiled, whichever wrapper asks for it.

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
    return _registered(_pre, hook, "registerPreCompileHook")


def registerPostCompileHook(hook: Hook) -> RemovableHandle:
    """Have a function called after each model has been compiled; otherwise as `registerPreCompileHook`."""
    return _registered(_post, hook, "registerPostCompileHook")


def pre_compile() -> None:
    """Call the hooks that come before."""
    _call(_pre)


def post_compile() -> None:
    """Call the hooks that come after."""
    _call(_post)


def _registered(hooks: OrderedDict[int, Hook], hook: Hook, name: str) -> RemovableHandle:
    if not callable(hook):
        raise RuntimeError(f"{name}: `hook` is {hook!r}; it must be callable, without arguments.")
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _call(hooks: OrderedDict[int, Hook]) -> None:
    for hook in tuple(hooks.values()):  # a hook may remove itself
        hook()
