"""Lazy copies of trained parameters and buffers from device to host: `LazyWeights`.

A run changes only values on the device: the weights that it trains, and the buffers that `forward` overwrites. The
host's copies are *stale* from then on, and their first read anywhere copies the device's values back, once. Reads are
intercepted; see `poptorch.run.watched`. Values are written in place, so that views and optimisers keep their tensors.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Container, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch

from poptorch.base.patching import patched
from poptorch.run.gradient_access import GradientAccess, hook_problem
from poptorch.run.watched import observers_of, original_class, unwatch, watch
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
        requires_grad_set: whether `requires_grad` of a tensor has been set since `take_requires_grad_set`.
        data_accessed: whether the `data` of a tensor has been accessed since values were copied back: it may have been
            written.
        gradients: checks of gradient accesses.

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
        if self.trains and any(each.trains for each in observers_of(module)):
            raise RuntimeError(
                f"{original_class(module).__name__} is already wrapped for training: its weights can come from one "
                "training model only. Call `destroy()` on that one first."
            )
        self._homes, self._changed = tensors_of(module), changed
        tensors = self._of_device()
        self._module = module
        self._fetch: Callable[[], Any] = weakref.WeakMethod(fetch) if hasattr(fetch, "__self__") else lambda: fetch
        self._groupings = {} if groupings is None else groupings
        self._versions = itertools.count(1)
        self.host = self.device = 0
        self.requires_grad_set = self.data_accessed = False
        self.gradients = GradientAccess(module)
        self._tensor_ids = frozenset(map(id, tensors))
        self._watched: list[Any] = []
        self._undo = weakref.finalize(self, unwatch, self._watched, weakref.ref(self))
        self._undo.atexit = False
        for each in tensors:
            self._watch(each)
        if self.trains or tensors:
            self._watch(module)
            _trainings.add(self)

    def _of_device(self) -> list[torch.Tensor]:
        """Tensors modified by the device."""
        return [t for name, t in self._homes.items() if self._changed is None or name in self._changed]

    def _watch(self, each: Any) -> None:
        self._watched.append(each)
        watch(each, self)

    def covers_module(self) -> bool:
        """Whether the module's current parameters and buffers are exactly those instrumented."""
        now = tensors_of(self._module)
        return now.keys() == self._homes.keys() and all(t is self._homes[name] for name, t in now.items())

    @property
    def is_stale(self) -> bool:
        """Whether device values are newer than the module's."""
        return self.device > self.host

    @property
    def newest(self) -> int:
        """Version of the newest values, in the module or on the device."""
        return max(self.host, self.device)

    def mark_stale(self) -> None:
        """Record a change of weights on the device; without any, no-op."""
        if self._tensor_ids and not self.is_stale:
            self.device = next(self._versions)

    def mark_uploaded(self) -> None:
        """Record that the module's values were uploaded."""
        self.device, self.data_accessed = self.host, False

    def mark_news(self) -> None:
        """Publish the module's values to other wrappers following this one."""
        is_stale, self.host = self.is_stale, next(self._versions)
        self.device = next(self._versions) if is_stale else self.host

    def has_run(self) -> None:
        """Record a device step: weights are stale, and gradients existed on the device only."""
        self.mark_stale()
        self.gradients.has_run = True

    def take_requires_grad_set(self) -> bool:
        """Whether `requires_grad` of a tensor has been set since the previous call."""
        was_set, self.requires_grad_set = self.requires_grad_set, False
        return was_set

    def to_host(self, fetch: Callable[[], Mapping[str, np.ndarray]] | None = None) -> None:
        """Copy device values back, stale or not, into the tensors last uploaded, even if replaced in the module since.

        Args:
            fetch: function that returns them; by default, the device's changed values.
        """
        version = self.device if self.is_stale else next(self._versions)
        with self._as_current():
            arrays = (fetch or self._fetch())()
            overwrite_tensors(self._homes, arrays, self._groupings)
        self.data_accessed = False
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
                self._watch(tensors[each])
            self._tensor_ids = frozenset(tensors)
            return arrays

    def _as_current(self) -> AbstractContextManager[None]:
        """Context manager suppressing copying back on tensor reads."""
        return patched(self, host=self.newest)

    def destroy(self) -> None:
        """Restore original classes of module, parameters and buffers. Values not yet copied back are lost."""
        self._undo()
        if self in _trainings:
            _trainings.remove(self)
            for follower in list(_followers):
                follower.has_ended(self)

    # Events of watched tensors --------------------------------------------------------------------------------------

    def on_hook(self, handle: Any) -> None:
        """Refuse a gradient hook on a trained tensor."""
        if self.trains:
            handle.remove()
            raise hook_problem("A parameter of the model")

    def on_requires_grad(self) -> None:
        """Record that `requires_grad` was set."""
        self.requires_grad_set = True

    def on_data_access(self) -> None:
        """Record an access to `data`."""
        self.data_accessed = True

    def on_missing_gradient(self, reader: str) -> None:
        """Warn a module whose missing gradient (`None`) is read."""
        if self.trains:
            self.gradients.warn(reader)


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
            and training.newest > self._known_versions.get(training, 0)
        ]
        has_missed, self._has_missed = self._has_missed, False
        if (news or has_missed) and own is not None:
            own.to_host_if_stale()
        for training in news:
            training.to_host_if_stale()
            self._known_versions[training] = training.host
        return bool(news) or has_missed


def rewatch(module: torch.nn.Module) -> None:
    """Undo `poptorch.run.watched.suspend` for a module; modules unmodified by devices remain unchanged."""
    if not observers_of(module):
        for training in _trainings:
            if training._module is module:
                watch(module, training)
