"""Watched modules and tensors, whose reads are announced to observers. Nothing is compared: each read is an event.

A watched object temporarily has a subclass of its class. It remains an instance of the original one, and copies and
pickles of it have the original one.
"""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from poptorch.run.weights import LazyWeights

    _Refs = tuple[weakref.ref[LazyWeights], ...]


def watch(each: Any, observer: LazyWeights) -> None:
    """Add an observer to a module or tensor: weights may be tied between models."""
    _observe(each, (*_refs_of(each), weakref.ref(observer)))


def unwatch(watched: Iterable[Any], observer: weakref.ref[LazyWeights]) -> None:
    """Remove an observer from modules and tensors, watched or not."""
    for each in watched:
        _observe(each, tuple(ref for ref in _refs_of(each) if ref is not observer))


def suspend(module: Any) -> None:
    """Restore a watched module's original class. Its parameters and buffers remain watched."""
    if isinstance(module, _Watched):
        _announce_read(type(module))
        _observe(module, ())


def observers_of(each: Any) -> list[LazyWeights]:
    """Observers of a module or tensor."""
    return _observers(_refs_of(each))


def original_class(each: Any) -> Any:
    """Unwatched class of an object."""
    return type(each)._original if isinstance(each, _Watched) else type(each)


def _refs_of(each: Any) -> _Refs:
    return type(each)._refs if isinstance(each, _Watched) else ()


def _observers(refs: _Refs) -> list[LazyWeights]:
    return [observer for ref in refs if (observer := ref()) is not None]


def _observe(each: Any, refs: _Refs) -> None:
    original = original_class(each)
    kind = _WatchedTensor if isinstance(each, torch.Tensor) else _WatchedModule
    object.__setattr__(each, "__class__", _watched_class(original, refs, kind) if refs else original)


@lru_cache(maxsize=32)  # all parameters of a model share a class
def _watched_class(original: Any, refs: _Refs, kind: Any) -> type:
    same = {"__module__": original.__module__, "__doc__": original.__doc__}
    return type(original)(
        f"Poptorch{original.__name__}", (kind, original), {"_original": original, "_refs": refs, **same}
    )


@contextmanager
def _unwatched(each: _Watched) -> Iterator[None]:
    """Context manager temporarily restoring an object's original class."""
    watched = type(each)
    object.__setattr__(each, "__class__", watched._original)
    try:
        yield
    finally:
        object.__setattr__(each, "__class__", watched)


def _announce_read(watched: type[_Watched]) -> None:
    for observer in _observers(watched._refs):
        observer.to_host_if_stale()


# Subclasses -----------------------------------------------------------------------------------------------------------


class _Watched:
    """Mixin class that announces reads."""

    _original: type
    _refs: tuple[weakref.ref[Any], ...]  # without `_Refs`: base classes of users may evaluate annotations

    def __reduce_ex__(self, protocol: Any) -> Any:
        _announce_read(type(self))
        with _unwatched(self):
            make, arguments, *state = self.__reduce_ex__(protocol)
        if getattr(make, "__name__", "") == "__newobj__":  # pickle would insist that the class has not changed
            make = arguments[0].__new__
        return make, arguments, *state

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _announce_read(type(self))
        with _unwatched(self):
            return copy.deepcopy(self, memo)

    def __repr__(self) -> str:
        _announce_read(type(self))
        return super().__repr__()


class _WatchedTensor(_Watched):
    def __repr__(self, **kwargs: Any) -> str:
        _announce_read(type(self))
        with _unwatched(self):
            return repr(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not all(issubclass(each, torch.Tensor) for each in types):
            return NotImplemented  # wrappers of tensors define the operation themselves
        for each in types:
            if issubclass(each, _Watched):
                _announce_read(each)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        event = _event_of(func)
        if event is not None and args and isinstance(args[0], _Watched):
            for observer in _observers(type(args[0])._refs):
                event(observer, result)
        return result


def _announcing(name: str) -> Callable[..., Any]:
    def method(self: _Watched, /, *args: Any, **kwargs: Any) -> Any:
        _announce_read(type(self))
        return getattr(super(_Watched, self), name)(*args, **kwargs)

    return method


_READERS = ("__call__", "__getattr__", "state_dict", "named_parameters", "named_buffers", "named_modules")
_WatchedModule = type("_WatchedModule", (_Watched,), {name: _announcing(name) for name in _READERS})


# Events of tensors ----------------------------------------------------------------------------------------------------


def _gradient_read(observer: LazyWeights, gradient: torch.Tensor | None) -> None:
    if gradient is None:
        observer.on_missing_gradient(sys._getframe(2).f_globals.get("__name__", ""))  # called by __torch_function__


_tensor: Any = torch.Tensor
_EVENTS: dict[Any, Callable[[LazyWeights, Any], None]] = {
    _tensor.register_hook: lambda observer, handle: observer.on_hook(handle),
    _tensor.register_post_accumulate_grad_hook: lambda observer, handle: observer.on_hook(handle),
    _tensor.requires_grad_: lambda observer, _: observer.on_requires_grad(),
    _tensor.requires_grad.__set__: lambda observer, _: observer.on_requires_grad(),
    _tensor.data.__get__: lambda observer, _: observer.on_data_access(),
    _tensor.data.__set__: lambda observer, _: observer.on_data_access(),
    _tensor.grad.__get__: _gradient_read,
}
"""Functions of tensors with events, which receive their results."""


def _event_of(function: Any) -> Callable[[LazyWeights, Any], None] | None:
    try:
        return _EVENTS.get(function)
    except TypeError:  # it cannot be hashed
        return None
