"""`HostModel`: a model as the host has it: what is called, and whose parameters and buffers are read and written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import numpy as np
import torch

from poptorch.base.host_numbers import Number
from poptorch.base.replica_groups import GroupedParameter
from poptorch.capture.attributes import Attributes, noting
from poptorch.capture.counters import COUNTED
from poptorch.errors import createPoptorchError
from poptorch.run import weights


class HostModel:
    """A model on the host.

    Args:
        call: the model: a module, or a function, which has no weights.

    Raises:
        poptorch.Error: if it is, or has, a module of `torch.jit`.

    Attributes:
        call: what is called.
        module: the same, if it is a module.
        attributes: those that the module has now, and what is set in `setting`.
        grouped: its parameters with a value for each group of replicas, by name.
        told: what was told of tensors of the host in it.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call
        self.module = call if isinstance(call, torch.nn.Module) else None
        self.attributes = Attributes(self.module)
        self._reached: list[torch.nn.Module] = []
        self.grouped: dict[str, GroupedParameter] = {}
        self.told: set[str] = set()

    @property
    def forward(self) -> Callable[..., Any]:
        """The function whose parameters the arguments are for."""
        return self.call if self.module is None else self.module.forward

    @contextmanager
    def setting(self) -> Iterator[None]:
        """Have `attributes` be those that are set in a block, too. A program that is compiled keeps those it has."""
        with noting() as noted:
            yield
        self.attributes = self.attributes.with_those(noted)

    def reach(self, module: torch.nn.Module) -> None:
        """Have `attributes` be those that a module within has when the model is compiled: the wrapper hands it out."""
        self._reached.append(module)

    def take_reached(self) -> None:
        """Take the attributes of the modules that were handed out, as they are now."""
        inside = {each for reached in self._reached for each in torch.nn.Module.modules(reached)}
        self._reached.clear()
        if inside:
            self.attributes = self.attributes.with_those((each, name) for each in inside for name in vars(each))

    def take_counted(self, numbers: Mapping[str, Number], compiled: Attributes) -> None:
        """Have the module hold the numbers that a program has carried; those stay that the user has set meanwhile.

        Args:
            numbers: these, by path and name.
            compiled: the attributes with which it was compiled.
        """
        places = [(module, key, number) for name, number in numbers.items() for module, key in self._holding(name)]
        for module, key, number in places:
            if compiled.has(module, key):
                setattr(module, key, number)
        self.attributes = self.attributes.with_those((module, key) for module, key, _ in places)

    def counted(self, names: Iterable[str]) -> dict[str, Number]:
        """The numbers with these paths and names, as `attributes` have them, for a program that carries them."""
        with self.attributes.restored():
            return {name: vars(module)[key] for name in names for module, key in self._holding(name)}

    def _holding(self, name: str) -> Iterator[tuple[torch.nn.Module, str]]:
        """What holds a number of this path and name, and the name there."""
        path, _, key = name.rpartition(".")
        for at, module in () if self.module is None else torch.nn.Module.named_modules(self.module):
            if at == path and type(vars(module).get(key)) in COUNTED:
                yield module, key

    def tensors(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by name; see `weights.tensors_of`."""
        return weights.tensors_of(self.module)

    def form(self) -> tuple[tuple[str, Any], ...]:
        """What a program is made for, besides numbers: modules, and the names of parameters and buffers. Tied ones are
        there with the first of their names."""
        if self.module is None:
            return ()
        modules, first = dict(torch.nn.Module.named_modules(self.module)), dict[int, str]()
        tensors = {f"{path}.{name}": t for path, each in modules.items() for name, t in _own_tensors(each)}
        return (
            *((path, _kind(each)) for path, each in modules.items() if each is not self.module),
            *((name, first.setdefault(id(t), name)) for name, t in tensors.items()),
        )

    def read(self, names: Iterable[str] | None = None) -> dict[str, np.ndarray]:
        """The values of parameters and buffers, of all or of these; see `weights.read`."""
        return weights.read(self.module, self.grouped, names)

    def write(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Overwrite parameters and buffers with what comes from a device; see `weights.write`."""
        weights.write(self.module, arrays, self.grouped)

    def check_buffers(self, names: Iterable[str]) -> None:
        """Raise an `Error` unless these buffers, which the options name, are there."""
        buffers = {} if self.module is None else dict(torch.nn.Module.named_buffers(self.module))
        if unknown := [name for name in names if name not in buffers]:
            raise createPoptorchError(
                f"updatableNamedBuffers: the model has no buffers named {', '.join(unknown)}; it has "
                f"{', '.join(buffers) or 'none'}."
            )


def _own_tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters and buffers of a module, without those of modules in it."""
    tensors = chain(module._parameters.items(), module._buffers.items())
    return ((name, t) for name, t in tensors if t is not None)


def _kind(module: torch.nn.Module) -> Any:
    """What tells a module from others in its place. One that has tensors may be replaced by its like."""
    if any(True for each in torch.nn.Module.named_modules(module) for _ in _own_tensors(each[1])):
        return getattr(type(module), "_original", type(module)), module.extra_repr()
    return module
