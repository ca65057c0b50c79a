"""What users and packages on top have done around every compilation of a model, and every capture."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Protocol

from torch.utils.hooks import RemovableHandle

from poptorch.errors import createPoptorchError

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


class Substitution(Protocol):
    """Replaces something during a capture: a function of a library that models use, say, by one of another package."""

    def replace(self) -> object: ...

    def restore(self) -> object: ...


_substitutions: list[type[Substitution]] = []


def register_substitution(manager: type[Substitution]) -> None:
    """Have an instance of a class replace something during each capture; see `poptorch._impl`."""
    methods = [getattr(manager, name, None) for name in ("replace", "restore")]
    if not isinstance(manager, type) or not all(map(callable, methods)):
        raise createPoptorchError(
            f"registerSubsitutionManager: expected a class with the methods `replace` and `restore`; got {manager!r}."
        )
    _substitutions.append(manager)


@contextmanager
def substituting() -> Iterator[None]:
    """Have what is registered replaced during a block."""
    with ExitStack() as stack:
        for manager in tuple(_substitutions):
            substitution = manager()
            stack.callback(substitution.restore)
            substitution.replace()
        yield


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
