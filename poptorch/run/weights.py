"""Lazy copies of trained parameters and buffers from device to host: `LazyWeights`.

A run changes only values on the device: the weights that it trains, and the buffers that `forward` overwrites. The
host's copies are *stale* from then on, and their first read anywhere copies the device's values back, once. Reads are
intercepted by subclasses, which temporarily replace the classes of the module and of these parameters and buffers.
Values are written in place, so that views and optimisers keep their tensors.
"""

from __future__ import annotations

import copy
import itertools
import sys
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from poptorch.base.logging_ import Warned
from poptorch.base.patching import patched
from poptorch.errors import Error, createPoptorchError
from poptorch.run.weight_values import Groupings, overwrite_tensors, read_host_values, tensors_of


class LazyWeights:
    """A module with device-modified parameters and buffers, which are copied back on first read.

    Instrumentation lasts until `destroy`, or until the last reference to this object is gone; the module has none.

    Args:
        module: module to instrument. It and the tensors that the device changes get other classes, of the same types
            for `isinstance`; copies and pickles of them have their original classes.
        fetch: function that returns the device's changed values by name, in the shapes that `write` takes. A bound
            method does not keep its object alive.
        groupings: the parameters with a value for each group of replicas; looked at when values are transferred.
        changed: names of the tensors that the device changes, where the module is run and not trained; `None` stands
            for training, which may change all of them. Without any, nothing is instrumented.

    Raises:
        RuntimeError: if the module is to be trained, and is being trained already.
        Error: if a buffer is not a tensor.

    Attributes:
        trains: whether the device trains the module.
        host, device: the versions of the values in the module and on the device. If the device's is larger, the module
            is stale. Values that come home, and values that other wrappers are to follow, are new versions.
        is_thawed: whether `requires_grad` of a tensor has been set since `take_thawed`.
        has_given_data: whether the `data` of a tensor has been accessed since values were copied back: it may have been
            written.

    Example:
        >>> module = torch.nn.Linear(2, 3, bias=False)
        >>> training = LazyWeights(module, lambda: {"weight": np.ones((3, 2), np.float32)})
        >>> training.mark_stale()
        >>> module.weight.sum().item(), training.is_stale
        (6.0, False)
        >>> training.destroy()
    """

    def __init__(
        self,
        module: torch.nn.Module,
        fetch: Callable[[], Mapping[str, np.ndarray]],
        groupings: Groupings | None = None,
        changed: Container[str] | None = None,
    ) -> None:
        self.trains = changed is None
        if self.trains and isinstance(module, _Watched) and _trainers(type(module)):
            raise RuntimeError(
                f"{module._original.__name__} is already wrapped for training: its weights can come from one training "
                "model only. Call `destroy()` on that one first."
            )
        self._homes, self._changed = tensors_of(module), changed
        tensors = self._of_device()
        self._module = module
        self._fetch: Callable[[], Any] = weakref.WeakMethod(fetch) if hasattr(fetch, "__self__") else lambda: fetch
        self._groupings = {} if groupings is None else groupings
        self._versions = itertools.count(1)
        self.host = self.device = 0
        self.is_thawed = self.has_given_data = False
        self._has_run, self._warned = False, Warned()
        modules = list(torch.nn.Module.modules(module))
        self._hooks = [hooks for each in modules for hooks in (each._backward_hooks, each._backward_pre_hooks)]
        self._tensor_ids = frozenset(map(id, tensors))
        self._watched: list[Any] = []
        self._undo = weakref.finalize(self, _unwatch, self._watched, weakref.ref(self))
        self._undo.atexit = False
        for tensor in tensors:
            self._watch(tensor, _WatchedTensor)
        if self.trains or tensors:
            self._watch(module, _WatchedModule)
            _trainings.add(self)

    def _of_device(self) -> list[torch.Tensor]:
        """Tensors modified by the device."""
        return [t for name, t in self._homes.items() if self._changed is None or name in self._changed]

    def _watch(self, each: Any, kind: Any) -> None:
        self._watched.append(each)
        _watch(each, weakref.ref(self), kind)

    def covers_module(self) -> bool:
        """Whether the module's current parameters and buffers are exactly those instrumented."""
        now = tensors_of(self._module)
        return now.keys() == self._homes.keys() and all(t is self._homes[name] for name, t in now.items())

    @property
    def is_stale(self) -> bool:
        """Whether device values are newer than the module's."""
        return self.device > self.host

    def mark_stale(self) -> None:
        """Record that weights, if there are any, changed on the device."""
        if self._tensor_ids and not self.is_stale:
            self.device = next(self._versions)

    def mark_uploaded(self) -> None:
        """Record that the module's values were uploaded."""
        self.device, self.has_given_data = self.host, False

    def mark_news(self) -> None:
        """Publish the module's values to other wrappers following this one."""
        is_stale, self.host = self.is_stale, next(self._versions)
        self.device = next(self._versions) if is_stale else self.host

    def has_run(self) -> None:
        """Record a device step: weights are stale, and gradients existed on the device only."""
        self.mark_stale()
        self._has_run = True

    def take_thawed(self) -> bool:
        """Whether `requires_grad` of a tensor has been set since the previous call."""
        is_thawed, self.is_thawed = self.is_thawed, False
        return is_thawed

    def check_hooks(self) -> None:
        """Raise an `Error` if a module has gradient hooks."""
        if any(self._hooks):
            raise hook_problem("A module of the model")

    def warn_of_gradients(self, asker: str) -> None:
        """Warn code that reads `p.grad`, which is `None`, about accessing gradients.

        Raises:
            Error: if it is a function of PyTorch that changes gradients.
        """
        if self._has_run and asker == torch.nn.utils.clip_grad.__name__:
            raise createPoptorchError(
                "The gradients of a wrapped model cannot be clipped after its call: they stay in its program, which "
                f"has made the step of the optimizer, too. Have the optimizer clip, with `max_grad_norm`: {_CLIPPING}."
            )
        if self._has_run and asker.partition(".")[0] not in ("torch", "poptorch"):
            self._warned.once(
                "gradients",
                "`grad` of a parameter is None: gradients of a wrapped model stay in its program, which makes the step "
                "of the optimizer, too. To look at one, name it before the model is wrapped, "
                '`options.anchorTensor("g", "Gradient___<parameter>")`, and read `model.getAnchoredTensor("g")`. To '
                "clip them, `%s`.",
                _CLIPPING,
            )

    def to_host(self, fetch: Callable[[], Mapping[str, np.ndarray]] | None = None) -> None:
        """Copy device values back, stale or not, into the tensors last uploaded, even if replaced in the module since.

        Args:
            fetch: function that returns them; by default, the device's changed values.
        """
        version = self.device if self.is_stale else next(self._versions)
        with self._as_current():
            arrays = (fetch or self._fetch())()
            overwrite_tensors(self._homes, arrays, self._groupings)
        self.has_given_data = False
        self.host, self.device = version, max(version, self.device)  # it may have run since in another thread

    def to_host_if_stale(self) -> bool:
        """Copy device values back if the host is stale. Return whether it was."""
        was_stale = self.is_stale
        if was_stale:
            self.to_host()
        return was_stale

    def read_values(self, names: Iterable[str] | None = None) -> dict[str, np.ndarray]:
        """Current host values, stale or not; see the function `read_host_values`."""
        with self._as_current():
            arrays = read_host_values(self._module, self._groupings, names)
            now = tensors_of(self._module)
            for name, old in self._homes.items():
                if name in arrays and now[name] is not old and now[name].shape == old.shape:
                    self._homes[name] = now[name]
            tensors = {id(t): t for t in self._of_device()}
            for each in tensors.keys() - self._tensor_ids:
                self._watch(tensors[each], _WatchedTensor)
            self._tensor_ids = frozenset(tensors)
            return arrays

    def _as_current(self) -> AbstractContextManager[None]:
        """Context manager suppressing copying back on tensor reads."""
        return patched(self, host=max(self.host, self.device))

    def destroy(self) -> None:
        """Restore original classes of module, parameters and buffers. Values not yet copied back are lost."""
        self._undo()
        if self in _trainings:
            _trainings.remove(self)
            for follower in list(_followers):
                follower.has_ended(self)


_CLIPPING = "poptorch.optim.AdamW(parameters, lr=0.001, max_grad_norm=1.0)"


def hook_problem(what: str) -> Error:
    """Create the error for gradient hooks on trained models."""
    return createPoptorchError(
        f"{what} has hooks on gradients (`register_hook`, `register_full_backward_hook`, ...). They would have no "
        "effect in a wrapped model, which is one program, backward pass included. Write what they do into `forward`: "
        "`x.register_hook(lambda g: 0.5 * g)` returns another gradient, made of `g` and of what there was before `x` "
        "is read; `x.detach()` stops it. To look at one, "
        'use `options.anchorTensor("g", "Gradient___<parameter>")`; to clip them, '
        f"`{_CLIPPING}`. For runs of the module without its wrapper, register hooks after `destroy()`."
    )


_trainings: weakref.WeakSet[LazyWeights] = weakref.WeakSet()
_followers: weakref.WeakSet[TrainingRegistry] = weakref.WeakSet()


class TrainingRegistry:
    """Registry of wrappers modifying a module's tensors, from another wrapper's perspective.

    Args:
        module: module that the wrapper runs. Other wrappers matter if they change a parameter or buffer of it.

    Example:
        >>> module = torch.nn.Linear(2, 3, bias=False)
        >>> training = LazyWeights(module, lambda: {"weight": np.ones((3, 2), np.float32)})
        >>> trainings = TrainingRegistry(module)
        >>> training.mark_stale()
        >>> trainings.have_news(), trainings.have_news()
        (True, False)
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._known_versions: weakref.WeakKeyDictionary[LazyWeights, int] = weakref.WeakKeyDictionary()
        self._has_missed = False
        _followers.add(self)
        self.track()

    def track(self) -> None:
        """Track the module's current parameters and buffers."""
        self._tensor_ids = frozenset(map(id, tensors_of(self._module).values()))

    def has_ended(self, training: LazyWeights) -> None:
        """Record that another wrapper ended, after copying back its values."""
        if self._concern(training) and training.host > self._known_versions.get(training, 0):
            self._has_missed = True

    def _concern(self, training: LazyWeights) -> bool:
        return not self._tensor_ids.isdisjoint(training._tensor_ids)

    def have_news(self, own: LazyWeights | None = None) -> bool:
        """Copy back stale values. Return whether new values arrived since the previous call.

        Args:
            own: the wrapper's own changes. They do not count, and are copied back before newer values overwrite them.
        """
        news = [
            training
            for training in list(_trainings)
            if training is not own
            and self._concern(training)
            and max(training.host, training.device) > self._known_versions.get(training, 0)
        ]
        has_missed, self._has_missed = self._has_missed, False
        if (news or has_missed) and own is not None:
            own.to_host_if_stale()
        for training in news:
            training.to_host_if_stale()
            self._known_versions[training] = training.host
        return bool(news) or has_missed


# Replacement classes --------------------------------------------------------------------------------------------------


class _Watched:
    """Mixin class that refreshes stale values before reads."""

    _original: type
    _refs: tuple[weakref.ref[LazyWeights], ...]

    def __reduce_ex__(self, protocol: Any) -> Any:
        _refresh(type(self))
        with _original_class(self):
            make, arguments, *state = self.__reduce_ex__(protocol)
        if getattr(make, "__name__", "") == "__newobj__":  # pickle would insist that the class has not changed
            make = arguments[0].__new__
        return make, arguments, *state

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _refresh(type(self))
        with _original_class(self):
            return copy.deepcopy(self, memo)

    def __repr__(self) -> str:
        _refresh(type(self))
        return super().__repr__()


class _WatchedTensor(_Watched):
    def __repr__(self, **kwargs: Any) -> str:
        _refresh(type(self))
        with _original_class(self):
            return repr(self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not all(issubclass(each, torch.Tensor) for each in types):
            return NotImplemented  # wrappers of tensors define the operation themselves
        for each in types:
            if issubclass(each, _Watched):
                _refresh(each)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        observe = _observer_of(func)
        if observe is not None and args and isinstance(args[0], _Watched):
            observe(type(args[0]), result)
        return result


def _no_hook(watched: type[_Watched], handle: Any) -> None:
    if _trainers(watched):
        handle.remove()
        raise hook_problem("A parameter of the model")


def _thaw(watched: type[_Watched], result: Any) -> None:
    for owner in _owners(watched):
        owner.is_thawed = True


def _give_data(watched: type[_Watched], result: Any) -> None:
    for owner in _owners(watched):
        owner.has_given_data = True


def _note_gradient_read(watched: type[_Watched], gradient: torch.Tensor | None) -> None:
    for owner in _trainers(watched) if gradient is None else ():
        owner.warn_of_gradients(sys._getframe(2).f_globals.get("__name__", ""))


_of_tensors: Any = torch.Tensor
_OBSERVERS: dict[Any, Callable[[type[_Watched], Any], None]] = {
    _of_tensors.register_hook: _no_hook,
    _of_tensors.register_post_accumulate_grad_hook: _no_hook,
    _of_tensors.requires_grad_: _thaw,
    _of_tensors.requires_grad.__set__: _thaw,
    _of_tensors.data.__get__: _give_data,
    _of_tensors.data.__set__: _give_data,
    _of_tensors.grad.__get__: _note_gradient_read,
}
"""Functions of tensors that `LazyWeights` observe, with their handlers."""


def _observer_of(function: Any) -> Callable[[type[_Watched], Any], None] | None:
    try:
        return _OBSERVERS.get(function)
    except TypeError:  # it cannot be hashed
        return None


def _refreshing(name: str) -> Callable[..., Any]:
    def method(self: _Watched, /, *args: Any, **kwargs: Any) -> Any:
        _refresh(type(self))
        return getattr(super(_Watched, self), name)(*args, **kwargs)

    return method


_READERS = ("__call__", "__getattr__", "state_dict", "named_parameters", "named_buffers", "named_modules")
_WatchedModule = type("_WatchedModule", (_Watched,), {name: _refreshing(name) for name in _READERS})


def _owners(watched: type[_Watched]) -> list[LazyWeights]:
    return [owner for ref in watched._refs if (owner := ref()) is not None]


def _trainers(watched: type[_Watched]) -> list[LazyWeights]:
    return [owner for owner in _owners(watched) if owner.trains]


def _refresh(watched: type[_Watched]) -> None:
    for ref in watched._refs:
        owner = ref()
        if owner is not None and owner.is_stale:
            owner.to_host()


@contextmanager
def _original_class(each: _Watched) -> Iterator[None]:
    """Context manager temporarily restoring an object's original class."""
    watched = type(each)
    object.__setattr__(each, "__class__", watched._original)
    try:
        yield
    finally:
        object.__setattr__(each, "__class__", watched)


def _watch(each: Any, owner: weakref.ref[LazyWeights], kind: Any) -> None:
    """Add an owner to an object's owners, all checked on reads: weights may be tied between models."""
    original, refs = (each._original, each._refs) if isinstance(each, _Watched) else (type(each), ())
    _become(each, original, (*refs, owner), kind)


def take_off(module: Any) -> None:
    """Restore a watched module's original class. Its parameters and buffers remain watched."""
    if isinstance(module, _Watched):
        _refresh(type(module))
        _become(module, type(module)._original, (), _WatchedModule)


def wrap(module: Any) -> None:
    """Undo `take_off`; modules unmodified by devices remain unchanged."""
    refs = tuple(weakref.ref(training) for training in _trainings if training._module is module)
    if refs and not isinstance(module, _Watched):
        _become(module, type(module), refs, _WatchedModule)


def _unwatch(everything: list[Any], owner: weakref.ref[LazyWeights]) -> None:
    for each in everything:
        if isinstance(each, _Watched):
            kind = _WatchedTensor if isinstance(each, torch.Tensor) else _WatchedModule
            _become(each, type(each)._original, tuple(ref for ref in type(each)._refs if ref is not owner), kind)


def _become(each: Any, original: Any, refs: tuple[weakref.ref[LazyWeights], ...], kind: Any) -> None:
    object.__setattr__(each, "__class__", _watched_class(original, refs, kind) if refs else original)


@lru_cache(maxsize=32)  # all parameters of a model share a class
def _watched_class(original: Any, refs: tuple[weakref.ref[LazyWeights], ...], kind: Any) -> type:
    same = {"__module__": original.__module__, "__doc__": original.__doc__}
    return type(original)(
        f"Poptorch{original.__name__}", (kind, original), {"_original": original, "_refs": refs, **same}
    )
