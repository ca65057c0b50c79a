"""Tensors of the host whose numbers have become a part of a program: where the user has them, and whether they are
other ones by now."""

from __future__ import annotations

import types
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from poptorch.base.introspection import attributes, is_a, items

__all__ = ["Frozen", "found"]


@dataclass
class Frozen:
    """A tensor whose numbers are a part of a program.

    Attributes:
        text: how the user calls it: `model.scale`, `model.config.scales[0]`.
        of_module: whether a module has it, or a list or dictionary of one; otherwise an object that is no module.
        holder, key: what has it, and under which name or number there.
        tensor: refers to the tensor.
        numbers: what it held.
        version: how often PyTorch had changed it; -1, if PyTorch does not count.
    """

    text: str
    of_module: bool
    holder: Any
    key: Any
    tensor: weakref.ref[torch.Tensor]
    numbers: torch.Tensor
    version: int

    @property
    def there(self) -> Any:
        """What is in its place now."""
        try:
            return self.holder[self.key]
        except LookupError:
            return None

    def change(self) -> str:
        """What has become of it since, in words: "" if nothing has."""
        tensor = self.tensor()
        if tensor is None or self.there is not tensor:
            return "is another object"
        version = _version(tensor)
        if version == self.version:
            return ""
        if not _is_equal(tensor.detach(), self.numbers):
            return "holds other numbers"
        self.version = version
        return ""


def found(
    t: torch.Tensor, numbers: torch.Tensor, module: torch.nn.Module | None, names: Mapping[str, Any]
) -> Frozen | None:
    """Where the user has a tensor; `None` if it is nowhere near, as one is that an op has just made.

    Args:
        t: the tensor.
        numbers: what it holds.
        module: the module that is captured. It is looked into first.
        names: what the functions that are running name.
    """
    roots = [*([] if module is None else [("model", module)]), *names.items()]
    waiting = deque((text, each, each is module) for text, each in roots)
    known: set[int] = set()
    while waiting and len(known) < _MOST:
        text, each, of_module = waiting.popleft()
        if is_a(each, _CLOSED) or id(each) in known:
            continue
        known.add(id(each))
        for holder, key, value, name in islice(_parts(each), _MOST):
            if value is t:
                return Frozen(text + name, of_module, holder, key, weakref.ref(t), numbers, _version(t))
            is_child = is_a(each, torch.nn.Module) and holder is attributes(each).get("_modules")
            waiting.append((text + name, value, of_module and (is_child or is_a(value, _CONTAINERS))))
    return None


_MOST = 1000
"""The most objects that are looked into, and the most parts of each."""

_CONTAINERS = (dict, list, tuple, deque)
_CLOSED = (
    str, bytes, int, float, complex, type(None), type, torch.Tensor, torch.dtype, torch.device, types.ModuleType,
    types.FunctionType, types.MethodType, types.BuiltinFunctionType,
)  # fmt: skip
_OF_MODULES = frozenset(vars(torch.nn.Module()))


def _parts(each: Any) -> Iterator[tuple[Any, Any, Any, str]]:
    """What an object has: what has it, under which key, what it is, and how that is called. Runs none of its code."""
    if is_a(each, _CONTAINERS):
        for key, value in items(each):
            yield each, key, value, f"[{key!r}]" if type(key) in (int, str) else f"[{type(key).__name__}]"
    else:
        own, is_module = attributes(each), is_a(each, torch.nn.Module)
        ours = [kind for kind in type(each).__mro__[:-1] if kind.__module__.partition(".")[0] != "torch"]
        namespaces = [
            own,
            *([own.get(name, {}) for name in ("_parameters", "_buffers", "_modules")] if is_module else []),
        ]
        for namespace in (*namespaces, *map(vars, ours)):
            for name, value in namespace.items():
                if not (is_module and namespace is own and name in _OF_MODULES):
                    yield namespace, name, value, f".{name}"


def _version(t: torch.Tensor) -> int:
    return -1 if t.is_inference() else t._version


def _is_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(torch.allclose(a, b, 0, 0, equal_nan=True) if a.dtype.is_floating_point else torch.equal(a, b))
