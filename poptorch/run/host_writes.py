"""Detection of writes to parameters and buffers on the host, after a device has read them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from operator import is_
from typing import Any, TypeVar

import torch

from poptorch.run.weight_values import tensors_of

_Known = TypeVar("_Known")


class HostWrites:
    """Detects host writes to parameters and buffers already read by a device.

    Args:
        module: module of the tensors. Writes to the `data` of one are not noticed.

    Example:
        >>> module = torch.nn.Linear(2, 3)
        >>> writes = HostWrites(module)
        >>> writes.mark_transferred()
        >>> with torch.no_grad():
        ...     _ = module.bias.zero_()
        >>> writes.changed_tensors()
        ['bias']
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._tensors: dict[str, torch.Tensor] = {}
        self._versions: dict[str, int] = {}
        self._entries: dict[str, tuple[dict[str, Any], str, Any]] = {}
        self._homes: list[tuple[str, dict[str, Any], int]] = []  # their holders, with the number of their tensors
        self._holders: tuple[dict[str, Any], ...] = ()
        self._keys: tuple[str, ...] = ()
        self._values: tuple[Any, ...] = ()

    def mark_transferred(self, names: Collection[str] | None = None) -> None:
        """Record that device and host values agree: all of them, or only the named parameters and buffers."""
        tensors, versions, places = self._tensors, self._versions, self._entries
        with torch._C.DisableTorchFunctionSubclass():
            self._tensors = {name: t for name, t in tensors_of(self._module).items() if not t.is_inference()}
        self._versions = self._now()
        homes = list(_holders(self._module))
        self._entries = {path + key: (h, key, value) for path, h in homes for key, value in h.items()}
        if names is None:
            self._homes = [(path, holder, len(holder)) for path, holder in homes]
        else:
            self._tensors |= _without(tensors, names)
            self._versions |= _without(versions, names)
            self._entries |= _without(places, names)
        self._holders, self._keys, self._values = (
            zip(*self._entries.values(), strict=True) if self._entries else ((),) * 3
        )

    def changed_tensors(self) -> list[str]:
        """Names of tensors modified since `mark_transferred`. Every model call checks, so this must be fast."""
        now = self._now()
        if now == self._versions:
            return []
        return [name for name, version in now.items() if version != self._versions[name]]

    def replaced(self) -> list[str]:
        """Names of replaced or added parameters, buffers and modules since `mark_transferred`. Equally fast."""
        grown = [home for home in self._homes if len(home[1]) > home[2]]
        if not grown and all(map(is_, map(dict.get, self._holders, self._keys), self._values)):
            return []
        others = [name for name, (holder, key, value) in self._entries.items() if holder.get(key) is not value]
        return others + [path + key for path, holder, _ in grown for key in holder if path + key not in self._entries]

    def _now(self) -> dict[str, int]:
        with torch._C.DisableTorchFunctionSubclass():  # reading a version is no read of the values
            return {name: t._version for name, t in self._tensors.items()}


def _without(known: Mapping[str, _Known], names: Collection[str]) -> dict[str, _Known]:
    return {name: each for name, each in known.items() if name not in names}


def _holders(module: torch.nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """Dictionaries containing parameters, buffers and modules, each with its name prefix."""
    for path, each in torch.nn.Module.named_modules(module):
        for holder in (each._parameters, each._buffers, each._modules):
            yield f"{path}." if path else "", holder
