"""`HostModel`: the host-side model: its callable, parameters and buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch

from poptorch.base.host_numbers import Number
from poptorch.base.logging_ import Warned
from poptorch.base.replica_groups import GroupedParameter
from poptorch.capture.attributes import Attributes, recording_assignments
from poptorch.capture.counters import COUNTER_TYPES
from poptorch.errors import createPoptorchError
from poptorch.run import weight_values
from poptorch.run.watched import original_class

Model = torch.nn.Module | Callable[..., Any]


class HostModel:
    """A model on the host.

    Args:
        call: the model: a module or a function.

    Raises:
        poptorch.Error: for modules of `torch.jit`, also as submodules.

    Attributes:
        call: function to call.
        module: the model; for a function, an empty module.
        attributes: current attributes of the module, and those set in `setting`.
        grouped: parameters with a value for each group of replicas, by name.
        warned: warnings given about host tensors in it.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call
        self.module = call if isinstance(call, torch.nn.Module) else torch.nn.Module()
        self.attributes = Attributes(self.module)
        self._visited: list[torch.nn.Module] = []
        self.grouped: dict[str, GroupedParameter] = {}
        self.warned = Warned()

    @property
    def forward(self) -> Callable[..., Any]:
        """The function that call arguments bind to."""
        return self.module.forward if self.call is self.module else self.call

    @contextmanager
    def setting(self) -> Iterator[None]:
        """Context manager adding attributes set within its block to `attributes`. Compiled programs keep their own."""
        with recording_assignments() as assigned:
            yield
        self.attributes = self.attributes.with_current(assigned)

    def reach(self, module: torch.nn.Module) -> None:
        """Register a submodule exposed by the wrapper: `attributes` will include its attributes at compilation."""
        self._visited.append(module)

    def take_reached(self) -> None:
        """Record current attributes of exposed submodules."""
        inside = {each for reached in self._visited for each in torch.nn.Module.modules(reached)}
        self._visited.clear()
        if inside:
            self.attributes = self.attributes.with_current((each, name) for each in inside for name in vars(each))

    def take_counters(self, numbers: Mapping[str, Number], compiled: Attributes) -> None:
        """Store values of a program's counters in the module, preserving values set by the user meanwhile."""
        places = [(module, key, number) for name, number in numbers.items() for module, key in self._holding(name)]
        for module, key, number in places:
            if compiled.is_unchanged(module, key):
                setattr(module, key, number)
        self.attributes = self.attributes.with_current((module, key) for module, key, _ in places)

    def counter_values(self, names: Iterable[str]) -> dict[str, Number]:
        """Values of counters by module path and name, as recorded in `attributes`."""
        with self.attributes.restored():
            return {name: vars(module)[key] for name in names for module, key in self._holding(name)}

    def _holding(self, name: str) -> Iterator[tuple[torch.nn.Module, str]]:
        """Find the module and attribute name for a number's path."""
        path, _, key = name.rpartition(".")
        for at, module in torch.nn.Module.named_modules(self.module):
            if at == path and type(vars(module).get(key)) in COUNTER_TYPES:
                yield module, key

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by name; see `weight_values.tensors_of`."""
        return weight_values.tensors_of(self.module)

    def structure(self) -> tuple[tuple[str, Any], ...]:
        """Model structure that a program depends on: modules, parameter and buffer names (first names of tied ones)."""
        modules, first = dict(torch.nn.Module.named_modules(self.module)), dict[int, str]()
        tensors = {f"{path}.{name}": t for path, each in modules.items() for name, t in _own_tensors(each)}
        return (
            *((path, _kind(each)) for path, each in modules.items() if each is not self.module),
            *((name, first.setdefault(id(t), name)) for name, t in tensors.items()),
        )

    def check_buffers(self, names: Iterable[str]) -> None:
        """Raise an `Error` if a buffer named in the options is missing."""
        buffers = dict(torch.nn.Module.named_buffers(self.module))
        if unknown := [name for name in names if name not in buffers]:
            raise createPoptorchError(
                f"updatableNamedBuffers: the model has no buffers named {', '.join(unknown)}; it has "
                f"{', '.join(buffers) or 'none'}."
            )


def _own_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """A module's direct parameters and buffers, excluding submodules."""
    tensors = chain(module._parameters.items(), module._buffers.items())
    return ((name, t) for name, t in tensors if t is not None)


def _kind(module: torch.nn.Module) -> Any:
    """Identity of a module for structural comparison. Modules with tensors may be replaced by equivalent ones."""
    if any(True for each in torch.nn.Module.named_modules(module) for _ in _own_tensors(each[1])):
        return original_class(module), module.extra_repr()
    return module
