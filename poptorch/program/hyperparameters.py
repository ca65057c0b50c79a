"""Hyperparameters of optimisers: variable ones in an input vector of the program, others as constants."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import popxl
from poptorch import optim
from poptorch.base.logging_ import logger
from poptorch.base.optimizer_arguments import FIXED
from poptorch.errors import Error, createPoptorchError
from poptorch.program.rules import (
    BETAS,
    CYCLED,
    WHOLE,
    Key,
    Rule,
    attribute_of,
    attributes_of,
    hyperparameters_of,
    op_kind,
    rule_of,
    usual_attributes,
)

RECOMPILE = "To compile it anew, make a new wrapper or call `destroy()`."

_number = op_kind("Number", lambda values, *, index: values[index])


class Hyperparameters:
    """Hyperparameters of one compiled program.

    Args:
        relaxed_checks: log unknown attributes as debug messages, not as warnings.

    Attributes:
        constants: values at compilation, by group and name; those of variable ones may have changed since.
        groups: number of parameter groups.
        count: number of variable hyperparameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, rule: Rule, scales_loss: bool, relaxed_checks: bool) -> None:
        self._rule, self._scales_loss, self._relaxed = rule, scales_loss, relaxed_checks
        self.groups = len(optimizer.param_groups)
        self.constants = hyperparameters_of(optimizer, rule)
        self._variable = [key for key in self.constants if self._varies(optimizer, key)]
        self.count = len(self._variable)
        self._expected_attributes = {
            kind: names | usual_attributes(kind, rule) for kind, names in attributes_of(optimizer).items()
        }

    def is_variable(self, key: Key) -> bool:
        """Whether a hyperparameter is a program input."""
        return key in self._variable

    def value(self, key: Key, values: np.ndarray) -> float:
        """Value of a hyperparameter, given the variable ones."""
        return float(values[self._variable.index(key)] if key in self._variable else self.constants[key])

    def named(self, values: np.ndarray) -> dict[Key, Any]:
        """Hyperparameters by name, given the variable ones."""
        return {**self.constants, **dict(zip(self._variable, values.tolist(), strict=True))}

    def values(self, optimizer: torch.optim.Optimizer) -> np.ndarray:
        """Current values of all variable hyperparameters: a float32 array in the program's order.

        Args:
            optimizer: the program's optimiser, or another of the same class with the same number of groups.

        Raises:
            Error: for an optimiser of another class, or with other constant hyperparameters.
        """
        if rule_of(optimizer) is not self._rule:
            raise createPoptorchError(
                f"The model was compiled with {self._rule.name}, and this optimizer is {rule_of(optimizer).name}. "
                f"{RECOMPILE}"
            )
        self._warn_of_unknown(optimizer)
        numbers = hyperparameters_of(optimizer, self._rule)
        if len(optimizer.param_groups) != self.groups:
            raise createPoptorchError(
                f"The model was compiled with an optimizer of {self.groups} parameter groups, and this one has "
                f"{len(optimizer.param_groups)}. {RECOMPILE}"
            )
        for key, value in numbers.items():
            if key not in self._variable and value != self.constants[key]:
                raise _constant_error(key, self.constants[key], value, optimizer)
        return np.array([numbers[key] for key in self._variable], np.float32)

    def operand(self, key: Key, values: popxl.Tensor | None) -> Any:
        """Hyperparameter: an element of the value vector, or a constant."""
        if key not in self._variable:
            return self.constants[key]
        group, name = key
        shown = display_name(name) if group is None else f"{display_name(name)}___group{group}"
        return _number(values, index=self._variable.index(key), results=[shown])

    def _varies(self, optimizer: torch.optim.Optimizer, key: Key) -> bool:
        """Whether a hyperparameter is variable: as declared by poptorch optimisers, otherwise if different from torch's
        default. Schedulers that cycle `beta1` make it variable, too.
        """
        group, name = key
        if self._scales_loss and name == "loss_scaling":
            return True
        if isinstance(self.constants[key], torch.dtype) or name in FIXED:
            return False
        if name == "velocity_scaling" and not self.constants[None, "use_combined_accum"]:
            return False
        if name == "beta1" and group is not None and CYCLED in optimizer.param_groups[group]:
            return True
        if isinstance(optimizer, optim.Optimizer):
            attribute = attribute_of(name)
            return attribute in optimizer.variable_attrs and not optimizer.variable_attrs.isConstant(attribute)
        default = WHOLE[name] if group is None else self._rule.numbers[name]
        return name == "lr" or (name not in ("alpha", "nesterov", *BETAS) and self.constants[key] != default)

    def _warn_of_unknown(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn once about unexpected attributes, which have no effect."""
        log = logger.debug if self._relaxed else logger.warning
        for kind, names in attributes_of(optimizer).items():
            expected = self._expected_attributes.setdefault(kind, usual_attributes(kind, self._rule))
            if unknown := sorted(names - expected):
                log("Ignoring unexpected %s in %s optimizer: %s", kind, self._rule.name, unknown)
                expected |= names


def display_name(name: str) -> str:
    """Name of a hyperparameter in programs: `"weightDecay"` for `"weight_decay"`."""
    first, *others = ("learning_rate" if name == "lr" else name).split("_")
    return first + "".join(other.capitalize() for other in others)


def _constant_error(key: Key, before: Any, now: Any, optimizer: torch.optim.Optimizer) -> Error:
    """Error for a changed constant, with the way to make it variable."""
    group, name = key
    attribute = attribute_of(name)
    where = f"{attribute!r}" if group is None else f"{attribute!r} of group {group}"
    can_vary = not isinstance(now, torch.dtype) and name not in FIXED
    remedy = ""
    if can_vary and isinstance(optimizer, optim.Optimizer):
        remedy = f" Mark it with `optimizer.variable_attrs.markAsVariable({attribute!r})` before you compile."
    elif can_vary and hasattr(optim, type(optimizer).__name__):
        remedy = f" An optimizer of `poptorch.optim` that is made with `{attribute}=...` can change it."
    if name == "beta1":
        remedy += " So can a scheduler (`OneCycleLR`, `CyclicLR`) that is made before the model is compiled."
    return createPoptorchError(
        f"The optimizer's {where} is {now!r}, and the model was compiled with {before!r} as a constant.{remedy} "
        f"{RECOMPILE}"
    )
