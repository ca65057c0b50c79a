"""`Trainer`: a wrapper's optimiser, its hyperparameters in the program, and its state."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import popxl
from poptorch import optim
from poptorch.base.logging_ import logger
from poptorch.errors import createPoptorchError
from poptorch.options import Options
from poptorch.program.rules import groups_of, rule_of
from poptorch.program.state_layout import LOSS_SCALE_FACTOR
from poptorch.program.updates import Update
from poptorch.run.compiled import Compiled
from poptorch.run.optimizer_data import OptimizerData
from poptorch.run.optimizer_state import OptimizerState, device_state_of
from poptorch.run.program_state import ProgramState
from poptorch.run.trained_graph_breaks import TrainedBrokenGraph

Settings = tuple[list[Any], list[dict[str, Any]], list[int]]


class Trainer:
    """A wrapper's optimiser.

    Args:
        optimizer: the optimiser, of poptorch or of torch.

    Raises:
        AssertionError, ValueError: if no model can be trained with that; see `poptorch.program.rules.rule_of`.

    Attributes:
        optimizer: the optimiser that was set last.
        state: its state.
        update: the optimiser in the program; `None` before the first compilation.
        compiled_optimizer: serialized optimiser at compilation.
        numbers: variable hyperparameters in the program.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        rule_of(optimizer)
        self.optimizer, self.state = optimizer, OptimizerState(optimizer)
        self.update: Update | None = None
        self.compiled_optimizer: OptimizerData | None = None
        self.numbers = np.zeros(0, np.float32)
        self._program: ProgramState | None = None
        self._is_offline = False
        self._parameters: dict[str, torch.Tensor] = {}
        self._settings: Settings = [], [], []  # of the optimiser, when the numbers were read

    # The program ----------------------------------------------------------------------------------------------------

    def prepare(
        self,
        parameters: Mapping[str, torch.Tensor],
        options: Options,
        groupings: Mapping[str, popxl.ReplicaGrouping] | None = None,
        made_with: OptimizerData | None = None,
        counted_apart: Collection[str] | None = None,
    ) -> Update:
        """Read the optimiser, for a new or existing program.

        Args:
            counted_apart: parameters whose steps the program counts separately; by default, those with fewer steps than
                others.

        Raises:
            poptorch.Error: if the optimiser does not fit that.
        """
        self._parameters = dict(parameters)
        self._warn_of_losses(self.optimizer)
        self.compiled_optimizer = made_with or OptimizerData.from_optimizer(self.optimizer, parameters)
        if counted_apart is None:
            steps = self.state.steps(self._trained(self.optimizer))
            most = max(steps.values(), default=0.0)
            counted_apart = [name for name, made in steps.items() if made < most]
        self.update = Update(
            self.optimizer if made_with is None else made_with.make(parameters),
            parameters,
            replica_groupings=groupings,
            automatic_loss_scaling=options.Training.automatic_loss_scaling,
            relaxed_checks=options.relax_optimizer_attributes_checks,
            counted_apart=counted_apart,
        )
        self._read_numbers(self.optimizer)
        return self.update

    def _warn_of_losses(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn about ineffective optimiser settings: parameters foreign to the model, step hooks."""
        own: tuple[Any, ...] = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
        if any((*own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks)):
            logger.warning(
                "Hooks of %s's step (`register_step_post_hook`, ...) have no effect in a wrapped model, whose program "
                "makes the step. Do after the call of the model what they do.",
                type(optimizer).__name__,
            )
        known = frozenset(map(id, self._parameters.values()))
        others = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
        if not self._parameters:
            logger.warning(
                "The model has no parameters, so nothing is trained. Only what a `torch.nn.Module` has as its own can "
                "be: wrap that module, rather than a function that uses it."
            )
        elif others and not self._is_copy(optimizer):
            logger.warning(
                "The optimizer has %d parameters that the model does not have, of the shapes %s. They are not trained: "
                "have the wrapped module own them, as attributes of it or of its submodules.",
                len(others),
                ", ".join(str(list(p.shape)) for p in others[:3]) + (", ..." if len(others) > 3 else ""),
            )

    def outgrown(self, optimizer: torch.optim.Optimizer) -> str:
        """Why the program does not fit an optimiser: different trained parameters, groups or shared step counts; empty
        if it fits.

        Raises:
            poptorch.Error: if the optimiser trains nothing of the model.
        """
        if self.update is None or not self.update.matches(optimizer) or self._is_copy(optimizer):
            return ""
        expected, groups = self.update.group_of, groups_of(optimizer, self._parameters)
        if groups == expected and len(optimizer.param_groups) == self.update.hyperparameters.groups:
            if optimizer is not self.optimizer or self._program is None or not self.state.has_changed:
                return ""
            owners = set(map(id, self._program.owners.values()))
            steps = self.state.steps({n: p for n, p in self._trained(optimizer).items() if id(p) in owners})
            return "" if self.update.layout.counts_alike(steps) else "some parameters have made fewer steps than others"
        if not groups and expected:
            raise createPoptorchError(
                "The optimizer has none of the model's parameters that require a gradient, so nothing would be trained."
            )
        changed = [name for name in self._parameters if groups.get(name) != expected.get(name)]
        return f"the optimizer trains other parameters, or in other groups, than before: {', '.join(changed) or 'none'}"

    def _trained(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """Parameters that an optimiser trains, by name."""
        return {name: self._parameters[name] for name in groups_of(optimizer, self._parameters)}

    def _is_copy(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimiser contains copies of model parameters instead of these parameters themselves."""
        own, groups = set(map(id, self._parameters.values())), enumerate(optimizer.param_groups)
        shapes = [(i, p.shape) for i, group in groups for p in group["params"] if id(p) not in own]
        if self.update is None or not self.update.names or len(shapes) < sum(map(_size, optimizer.param_groups)):
            return False
        wanted = Counter((i, self._parameters[name].shape) for name, i in self.update.group_of.items())
        return wanted <= Counter(shapes)

    def connect(self, compiled: Compiled | TrainedBrokenGraph, offline: bool = False) -> None:
        """Connect a new program, which owns the state from now on. Preloaded state is uploaded before its next run.

        Args:
            offline: whether it will not run.
        """
        assert self.update is not None
        self._program, self._is_offline = ProgramState(compiled, self.update, self._parameters, self.numbers), offline
        self.state.connect(self._program, offline)

    def disconnect(self) -> None:
        """Copy state back from the program, which is about to be destroyed."""
        if self._program is not None:
            self.state.disconnect()
            self._program = None

    # Changes by users -----------------------------------------------------------------------------------------------

    def set(self, optimizer: torch.optim.Optimizer) -> None:
        """Switch to an optimiser, using its current settings.

        Raises:
            poptorch.Error: if it does not fit the program. Then nothing has changed.
            AssertionError, ValueError: if no model can be trained with that. Nor has it then.
        """
        rule_of(optimizer)
        if self._program is not None:
            self._read_numbers(optimizer)
        if optimizer is self.optimizer:
            return
        if self.update is not None:
            self._warn_of_losses(optimizer)
        self.state.disconnect()
        if self._program is None and not optimizer.state and not device_state_of(optimizer).has_content:
            self._hand_on(optimizer)
        self.optimizer, self.state = optimizer, OptimizerState(optimizer)
        if self._program is not None:
            self.state.connect(self._program, self._is_offline)

    def _hand_on(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy the previous optimiser's state to a new stateless optimiser."""
        for group in optimizer.param_groups:
            optimizer.state.update({p: copy.copy(own) for p in group["params"] if (own := self.optimizer.state.get(p))})

    @property
    def has_changed(self) -> bool:
        """Whether hyperparameters, parameter groups or state differ from the program's."""
        return _settings(self.optimizer) != self._settings or self.state.has_changed

    def take_changes(self) -> None:
        """Pass changed hyperparameters to the program, and schedule changed state for upload.

        Raises:
            poptorch.Error: for an optimiser that has outgrown the program.
        """
        if _settings(self.optimizer) != self._settings:
            self._read_numbers(self.optimizer)
        self.state.take_changes()

    def has_run(self) -> None:
        """Record a run of the program."""
        self.state.has_run()
        vars(self.optimizer)["_opt_called"] = True  # for schedulers, which want to have seen a step

    def _read_numbers(self, optimizer: torch.optim.Optimizer) -> None:
        """Pass an optimiser's hyperparameters to the program, effective next run."""
        assert self.update is not None
        settings, numbers = _snapshot(_settings(optimizer)), self.update.hyperparameters.values(optimizer)
        if self._program is not None and not np.array_equal(numbers, self.numbers):
            self._program.write_numbers(numbers)
        self._settings, self.numbers = settings, numbers

    # Anchors --------------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Names accepted by `value`: optimiser hyperparameters and state."""
        if self.update is None:
            return []
        state = [s.name for s in self.update.state] if self._program is None else self._program.names
        final = ["finalLossScale"] if LOSS_SCALE_FACTOR in state else []
        return [*self.update.named_values(self.numbers), *state, *final]

    def value(self, name: str) -> torch.Tensor:
        """Current program value of an optimiser hyperparameter or state tensor."""
        assert self._program is not None
        return self._program.value(name)


def default_optimizer(module: torch.nn.Module) -> torch.optim.Optimizer:
    """Default optimiser for training a model."""
    parameters = list(module.parameters())
    return optim.SGD(parameters or [torch.nn.Parameter(torch.zeros(()))], lr=0.01)  # torch wants one at least


def _size(group: Mapping[str, Any]) -> int:
    return len(group["params"])


def _settings(optimizer: torch.optim.Optimizer) -> Settings:
    """Hyperparameters and sizes of groups. A comparison takes a microsecond: parameter lists are identical objects."""
    own = [vars(optimizer).get(name) for name in getattr(optimizer, "_extras", ())]
    return own, optimizer.param_groups, list(map(_size, optimizer.param_groups))


def _snapshot(settings: Settings) -> Settings:
    """Settings that stay as they are: tensors, which may change, as numbers."""
    own, groups, sizes = settings
    numbers = [{n: v.item() if isinstance(v, torch.Tensor) else v for n, v in group.items()} for group in groups]
    return own, numbers, sizes
