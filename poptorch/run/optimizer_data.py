"""`OptimizerData`: an optimiser as data, for files of compiled models."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict

from poptorch import optim
from poptorch.program.rules import CYCLED, RULES, classes_of
from poptorch.run.serialization import from_data, to_data

_CLASSES: dict[str, type[torch.optim.Optimizer]] = {
    f"{'poptorch' if issubclass(kind, optim.Optimizer) else 'torch'}.{kind.__name__}": kind
    for rule in RULES.values()
    for kind in classes_of(rule)
}


class OptimizerData(BaseModel):
    """A serialized optimiser: hyperparameters, and names of trained parameters.

    Attributes:
        kind: class of the optimiser; for a user's class, its base class.
        numbers: arguments of its constructor.
        groups: the numbers of each parameter group, with the names of its `"params"`.
        variable: names of variable hyperparameters, for optimisers of poptorch.
    """

    model_config = ConfigDict(extra="forbid")

    kind: str
    numbers: dict[str, Any]
    groups: list[dict[str, Any]]
    variable: list[str] = []

    @classmethod
    def from_optimizer(cls, optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]) -> OptimizerData:
        """Serialize an optimiser's current hyperparameters.

        Args:
            optimizer: optimiser of a class that models can be trained with.
            parameters: parameters of the model, by name. Others are left out.
        """
        kind = next(name for c in type(optimizer).__mro__ for name, known in _CLASSES.items() if c is known)
        names = {id(p): name for name, p in parameters.items()}
        accepted = inspect.signature(_CLASSES[kind]).parameters
        own = {name: value for name, value in vars(optimizer).items() if name in getattr(optimizer, "_extras", ())}
        numbers = optimizer.defaults | own
        attributes = getattr(optimizer, "variable_attrs", None)
        return cls(
            kind=kind,
            numbers={n: to_data(_plain(v), f"the optimizer's {n}") for n, v in numbers.items() if n in accepted},
            groups=[
                {
                    name: [names[id(p)] for p in value if id(p) in names]
                    if name == "params"
                    else to_data(_plain(value), f"the optimizer's {name}")
                    for name, value in group.items()
                    if name in accepted or name in ("params", "decoupled_weight_decay", CYCLED)
                }
                for group in optimizer.param_groups
            ],
            variable=[n for n in accepted if attributes and n in attributes and not attributes.isConstant(n)],
        )

    def make(self, parameters: Mapping[str, torch.Tensor]) -> torch.optim.Optimizer:
        """Create an optimiser with these hyperparameters, for the given parameters.

        Raises:
            KeyError: for a missing parameter, or an unknown class.
        """
        groups = [
            {n: [parameters[p] for p in value] if n == "params" else from_data(value) for n, value in group.items()}
            for group in self.groups
        ]
        numbers = {name: from_data(value) for name, value in self.numbers.items()}
        optimizer = _CLASSES[self.kind](groups, **numbers)
        if isinstance(optimizer, optim.Optimizer):
            attributes = optimizer.variable_attrs
            for name in inspect.signature(_CLASSES[self.kind]).parameters:
                if name in attributes:
                    (attributes.markAsVariable if name in self.variable else attributes.markAsConstant)(name)
        return optimizer


def _plain(value: Any) -> Any:
    """Convert a scalar tensor to a Python number."""
    return value.item() if isinstance(value, torch.Tensor) else value
