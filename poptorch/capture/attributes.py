"""`Attributes`: module attributes as a wrapper was given them, with which its captures run.

What `forward` itself changes is found by `poptorch.capture.host_state`.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from poptorch.base.patching import patched, restoring
from poptorch.errors import createPoptorchError


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
        paths = paths_of_modules(module)
        self._paths = list(paths.values())
        self._take([(vars(each), dict(vars(each))) for each in paths])

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


def paths_of_modules(module: torch.nn.Module) -> dict[torch.nn.Module, str]:
    """Module paths: of a module and its submodules.

    Raises:
        Error: for modules of `torch.jit`.
    """
    paths = {each: path for path, each in torch.nn.Module.named_modules(module)}
    for each in paths:
        if isinstance(each, torch.jit.ScriptModule):
            name = getattr(each, "original_name", type(each).__name__)
            raise createPoptorchError(
                f"{name} is a module that `torch.jit` has made. Wrap "
                "the module it was made of; functions of `torch.jit.script` may be used within."
            )
    return paths


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
