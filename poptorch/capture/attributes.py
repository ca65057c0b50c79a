"""Snapshots of module attributes: captures run with values from wrapping time, and restore current ones afterwards."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from poptorch.base.host_numbers import Number
from poptorch.base.patching import patched, restoring
from poptorch.capture.counters import COUNTER_TYPES, Counter
from poptorch.errors import createPoptorchError

_BATCH_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)


class Attributes:
    """Snapshot of the attributes of a module and its submodules; later assignments are not included.

    Wrapping a model takes a snapshot, so that `model.eval()` afterwards affects the host only. `with_current` adds
    settings made through the wrapper. Lists, dictionaries and sets among the attributes stay the same objects;
    `poptorch.capture.host_state` undoes changes of their contents during a capture.

    Attributes:
        training: whether the module was in `train()` mode.

    Raises:
        Error: for modules of `torch.jit`, which have no such attributes, also as submodules.

    Example:
        >>> module = torch.nn.Dropout()
        >>> attributes = Attributes(module)
        >>> module.eval().training
        False
        >>> with attributes.restored():
        ...     module.training
        True
    """

    def __init__(self, module: torch.nn.Module) -> None:
        paths = {each: path for path, each in torch.nn.Module.named_modules(module)}
        modules = list(paths)
        for each in modules:
            if isinstance(each, torch.jit.ScriptModule):
                name = getattr(each, "original_name", type(each).__name__)
                raise createPoptorchError(
                    f"{name} is a module that `torch.jit` has made. Wrap "
                    "the module it was made of; functions of `torch.jit.script` may be used within."
                )
        self._paths = list(paths.values())
        self._take([(vars(each), dict(vars(each))) for each in modules])

    def _take(self, values: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
        self._values = values
        self.training: bool = values[0][1]["training"]
        self._numbers = [
            (path, now, numbers)
            for path, (now, then) in zip(self._paths, values, strict=True)
            if (numbers := {name: value for name, value in then.items() if _is_setting(name, value)})
        ]

    def with_current(self, assigned: Iterable[tuple[torch.nn.Module, str]]) -> Attributes:
        """Copy of this snapshot with current values of attributes that were assigned; see `recording_assignments`."""
        names: dict[int, set[str]] = defaultdict(set)
        for module, name in assigned:
            names[id(vars(module))].add(name)
        made = copy.copy(self)
        made._take(
            [
                (now, then | {name: now[name] for name in names.get(id(now), ()) if name in now})
                for now, then in self._values
            ]
        )
        return made

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Install this snapshot on the modules during a block, then reinstall the previous attributes."""
        with restoring(*(now for now, _ in self._values)):
            for now, then in self._values:
                now.clear()
                now.update(then)
            yield

    def is_unchanged(self, module: torch.nn.Module, name: str) -> bool:
        """Whether a module attribute is still the recorded object."""
        return any(now is vars(module) and name in now and now[name] is then.get(name) for now, then in self._values)

    def changed_counters(self) -> dict[str, Number]:
        """Numbers changed since the snapshot: their recorded values, by module path and attribute name."""
        pairs = zip(self._paths, self._values, strict=True)
        return {
            f"{path}.{name}" if path else name: before
            for path, (now, then) in pairs
            for name, before in then.items()
            if type(before) in COUNTER_TYPES
            and name != "training"
            and (after := now.get(name)) is not before
            and (type(after) is Counter or type(after) in COUNTER_TYPES and after != before)
        }

    def changed_number(self, known: Collection[str] = ()) -> str | None:
        """Description of a changed numeric setting: its name, new value and old value; `None` if all are unchanged.

        Args:
            known: names of numbers that may change, such as ``model.layer.calls``.
        """
        for path, now, then in self._numbers:
            if then.items() <= now.items():
                continue
            for name, value in then.items():
                text = f"{path}.{name}".removeprefix(".")
                if (name not in now or now[name] != value) and f"model.{text}" not in known:
                    return f"`{text}` is {now.get(name, 'nothing')!r}, and was {value!r}"
        return None


def _is_setting(name: str, value: Any) -> bool:
    """Whether an attribute looks like a number that users set, such as a temperature. (NaN never equals itself.)"""
    return type(value) in (bool, int, float) and not name.startswith("_") and name != "training" and value == value


@contextmanager
def recording_assignments() -> Iterator[list[tuple[torch.nn.Module, str]]]:
    """Record attribute assignments on modules within a block, whatever the previous values.

    Example:
        >>> module = torch.nn.Dropout().eval()
        >>> with recording_assignments() as assigned:
        ...     module = module.eval()
        >>> assigned
        [(Dropout(p=0.5, inplace=False), 'training')]
    """
    kind: Any = torch.nn.Module
    before, assigned = kind.__setattr__, []

    def record(module: torch.nn.Module, name: str, value: Any) -> None:
        before(module, name, value)
        assigned.append((module, name))

    with patched(kind, __setattr__=record):
        yield assigned


@dataclass(frozen=True)
class _Holder:
    """A module's dictionary of parameters or buffers.

    Attributes:
        kind: `"Parameter"` or `"Buffer"`.
        prefix: module path, before the name of a tensor.
        is_exempt: whether its tensors may be replaced.
        tensors: the dictionary.
        before: its contents before `forward`.
    """

    kind: str
    prefix: str
    is_exempt: bool
    tensors: dict[str, Any]
    before: dict[str, Any]

    def check(
        self, moved: Mapping[tuple[int, str], torch.Tensor], is_made: Callable[[str, torch.Tensor], bool]
    ) -> None:
        """Check that all tensors are in place, or converted; arguments: see `_moving` and `not_rebound`."""
        for name, tensor in self.before.items():
            now = self.tensors.get(name)
            if self.is_exempt or now is moved.get((id(self.tensors), name), tensor):
                continue
            if self.kind == "Parameter" or now is None or not is_made(self.prefix + name, now):
                raise _rebound(self.kind, self.prefix + name, name in self.tensors, tensor is None)


@contextmanager
def not_rebound(
    module: torch.nn.Module, is_made: Callable[[str, torch.Tensor], bool] = lambda name, t: False
) -> Iterator[None]:
    """Check that a block leaves every parameter and buffer in place, and restore them in any case.

    New ones are removed. Batch norms are exempt. A conversion of a module (`self.layer.half()`) lasts for the rest of
    the block.

    Args:
        module: the module whose `forward` runs in the block.
        is_made: whether a buffer of this name may become this tensor: a table that is recomputed for another shape.

    Raises:
        Error: if a parameter or buffer is reassigned or removed, after the block; or if there is a new parameter,
            directly or in a new module, that is another object in each run.

    Example:
        >>> module = torch.nn.Linear(2, 3)
        >>> with not_rebound(module):
        ...     y = module(torch.ones(2))
    """
    modules = {each: path for path, each in torch.nn.Module.named_modules(module)}
    holders = [
        _Holder(kind, f"{path}." if path else "", isinstance(each, _BATCH_NORMS), tensors, dict(tensors))
        for each, path in modules.items()
        for kind, tensors in (("Parameter", each._parameters), ("Buffer", each._buffers))
    ]
    with restoring(*(holder.tensors for holder in holders), *(each._modules for each in modules)):
        with _moving() as moved:
            yield
        for holder in holders:
            holder.check(moved, is_made)
        known = {holder.prefix + name for holder in holders for name in holder.before}
        for name, t in torch.nn.Module.named_parameters(module):
            if name not in known and not is_made(name, t):
                raise _made_late("Parameter", name, "not there")


@contextmanager
def _moving() -> Iterator[dict[tuple[int, str], torch.Tensor]]:
    """Make `Module.to` and similar methods replace parameters and buffers by converted tensors within a block.

    PyTorch changes them where they are, which tensors without numbers cannot do. Gives those that were replaced, by
    the dictionary that holds them and their name.
    """
    moved: dict[tuple[int, str], torch.Tensor] = {}

    def replace(module: torch.nn.Module, function: Any, recurse: bool = True) -> torch.nn.Module:
        for child in module.children() if recurse else ():
            child._apply(function)
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and (other := function(tensor)) is not tensor:
                    tensors[name] = moved[id(tensors), name] = other
        return module

    with patched(torch.nn.Module, _apply=replace):
        yield moved


def _made_late(kind: str, name: str, before: str) -> Exception:
    return createPoptorchError(
        f"{kind} {name} is {before}, and is made within the model when running forward, of what another run brings "
        "anew. What a device keeps from run to run has to be there before: make it in `__init__`."
    )


def _rebound(kind: str, name: str, is_there: bool, was_none: bool) -> Exception:
    if was_none:
        return _made_late(kind, name, "None")
    if is_there:
        return createPoptorchError(
            f"{kind} {name} is reassigned within the model when calling the forward method. This is not supported. "
            f"Consider using self.{name}.copy_(src) to copy data from a source tensor, where src is the name of the "
            "source tensor."
        )
    return createPoptorchError(
        f"{kind} {name} is removed from the model when calling the forward method. This is not supported. A model "
        f"keeps its parameters and buffers; to change the numbers, use self.{name}.copy_(src)."
    )
