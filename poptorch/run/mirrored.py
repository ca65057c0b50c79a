"""`MirroredState`: `optimizer.state` in PyTorch's format, backed by optimiser state on a device.

    optimizer.state[module.weight]["exp_avg"]

gives the device's values, which are read on access, once for each run. Changes, and replacements (`load_state_dict`),
are written to the device before the next run. Copies and pickles are plain dictionaries.
"""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from poptorch.run.optimizer_state import OptimizerState

_Fingerprint = list[tuple[str, Any, int]]


class MirroredState(defaultdict[Any, Any]):
    """Optimiser state by parameter, fetched lazily from sources on access.

    Args:
        state: existing state, which remains for parameters without a source.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> mirror = MirroredState({})
        >>> class Source:
        ...     def show(self) -> None:
        ...         mirror.show(weight, {"step": torch.tensor(3.0)})
        >>> mirror.add(source := Source())
        >>> mirror[weight]["step"].item()
        3.0
    """

    def __init__(self, state: Mapping[Any, Any]) -> None:
        super().__init__(dict, state)
        self._sources: list[weakref.ref[OptimizerState]] = []
        self._holders: dict[Any, weakref.ref[OptimizerState]] = {}
        # The last owner, which owns all of its parameters.
        self._last: Callable[[], OptimizerState | None] = lambda: None
        self._fingerprints: dict[Any, _Fingerprint] = {}

    def add(self, source: OptimizerState) -> None:
        """Register a source, without keeping it alive."""
        self._sources.append(weakref.ref(source))

    def remove(self, source: OptimizerState) -> None:
        """Unregister a source. State already shown remains."""
        self._sources = [ref for ref in self._sources if ref() not in (None, source)]

    def fetch(self) -> None:
        """Fetch from all sources."""
        for ref in self._sources:
            if (source := ref()) is not None:
                source.show()

    def hold(self, parameters: Iterable[torch.Tensor], source: OptimizerState) -> None:
        """Mark a source as owning the newest state of parameters, superseding previous owners."""
        self._last = weakref.ref(source)
        self._holders.update(dict.fromkeys(parameters, self._last))

    def has_newest(self, parameters: Iterable[torch.Tensor], source: OptimizerState) -> bool:
        """Whether a source owns the newest state of parameters."""
        return self._last() is source or all(self._holders[p]() is source for p in parameters)

    def show(self, parameter: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
        """Store a parameter's state, as provided by a source."""
        dict.__setitem__(self, parameter, state)
        self._fingerprints[parameter] = _versions(state)

    def has_changed(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether parameter state was modified since last shown."""
        return any(
            not _equal_snapshots(self._fingerprints.get(p, []), _versions(dict.get(self, p))) for p in parameters
        )

    def copy(self) -> defaultdict[Any, Any]:  # type: ignore[override]
        return self.__copy__()

    def __copy__(self) -> defaultdict[Any, Any]:  # type: ignore[override]
        return defaultdict(dict, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> defaultdict[Any, Any]:
        return copy.deepcopy(self.__copy__(), memo)

    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.__reduce__()


def _synced_method(name: str) -> Callable[..., Any]:
    plain = getattr(defaultdict, name)

    def method(self: MirroredState, *args: Any, **kwargs: Any) -> Any:
        self.fetch()
        return plain(self, *args, **kwargs)

    return method


for _name in (
    *("__contains__", "__delitem__", "__eq__", "__getitem__", "__ior__", "__iter__", "__len__", "__ne__", "__or__"),
    *("__repr__", "__reversed__", "__ror__", "__setitem__", "clear", "get", "items", "keys", "pop", "popitem"),
    *("setdefault", "update", "values"),
):
    setattr(MirroredState, _name, _synced_method(_name))


def _versions(state: Mapping[str, Any] | None) -> _Fingerprint:
    """Fingerprint for detecting state changes: tensor identities and version counters."""
    if state is None:
        return []
    counted = {key: isinstance(t, torch.Tensor) and not t.is_inference() for key, t in state.items()}
    return [(key, t, t._version if counted[key] else 0) for key, t in state.items()]


def _equal_snapshots(one: _Fingerprint, other: _Fingerprint) -> bool:
    return len(one) == len(other) and all(
        a[0] == b[0] and a[1] is b[1] and a[2] == b[2] for a, b in zip(one, other, strict=True)
    )


# Loading --------------------------------------------------------------------------------------------------------------


def loads_exactly(optimizer: torch.optim.Optimizer) -> None:
    """Preserve precision in an optimiser's `load_state_dict` for state wider than its parameter.

    PyTorch rounds the moments of a float16 parameter to float16. A device has them in float32.
    """
    if _pre_load_hook not in optimizer._optimizer_load_state_dict_pre_hooks.values():
        optimizer.register_load_state_dict_pre_hook(_pre_load_hook)
        optimizer.register_load_state_dict_post_hook(_post_load_hook)


def _pre_load_hook(optimizer: torch.optim.Optimizer, loaded: dict[str, Any]) -> None:
    vars(optimizer)["_loaded"] = loaded


def _post_load_hook(optimizer: torch.optim.Optimizer) -> None:
    loaded = vars(optimizer).pop("_loaded")
    numbers = chain.from_iterable(group["params"] for group in loaded["param_groups"])
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for number, parameter in zip(numbers, parameters, strict=True):
        for key, t in loaded["state"].get(number, {}).items():
            rounded = optimizer.state[parameter][key]
            if isinstance(t, torch.Tensor) and t.is_floating_point() and t.dtype.itemsize > rounded.dtype.itemsize:
                optimizer.state[parameter][key] = t.clone()
