"""`Trainer`: the optimiser of a wrapper, and what a program has of it: its numbers, and its state on the device."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import numpy as np
import torch

import popxl
from poptorch import optim
from poptorch.as_data import OptimizerData
from poptorch.compiled import Compiled
from poptorch.enums import MeanReductionStrategy
from poptorch.errors import createPoptorchError
from poptorch.logging_ import logger
from poptorch.options import Options
from poptorch.updates import LOSS_SCALE_FACTOR, Update, rule_of

__all__ = ["Trainer", "needs_running_mean", "with_running_mean"]

State = Mapping[str, torch.Tensor]


class Trainer:
    """The optimiser of one wrapper.

    Args:
        optimizer: the optimiser, of poptorch or of torch.

    Raises:
        AssertionError, ValueError: if no model can be trained with that; see `poptorch.updates.rule_of`.

    Attributes:
        optimizer: the optimiser that was set last.
        update: what the program has of it; `None` before there is one.
        made_with: the optimiser as it was when the program was made.
        numbers: its variable numbers, as the program has them.
        device: its state on the device. It is the optimiser's own, if that is one of poptorch.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        rule_of(optimizer)
        self.optimizer = optimizer
        self.device = _device_state(optimizer)
        self.update: Update | None = None
        self.made_with: OptimizerData | None = None
        self.numbers = np.zeros(0, np.float32)
        self._compiled: Compiled | None = None
        self._is_offline = False
        self._parameters: frozenset[int] = frozenset()

    def prepare(
        self,
        parameters: Mapping[str, torch.Tensor],
        options: Options,
        groupings: Mapping[str, popxl.ReplicaGrouping] | None = None,
        made_with: OptimizerData | None = None,
    ) -> Update:
        """Read the optimiser, for a program that is to be made, or has been made.

        Args:
            parameters: of the model, by name.
            options: of the model.
            groupings: those of parameters that differ between replicas.
            made_with: the optimiser that the program was made with.

        Raises:
            poptorch.Error: if the optimiser does not fit that.
        """
        self._parameters = frozenset(map(id, parameters.values()))
        self._warn_of_others(self.optimizer)
        self.made_with = made_with or OptimizerData.of(self.optimizer, parameters)
        self.update = Update(
            self.optimizer if made_with is None else made_with.make(parameters),
            parameters,
            replica_groupings=groupings,
            automatic_loss_scaling=options.Training.automatic_loss_scaling,
            relaxed_checks=options.relax_optimizer_attributes_checks,
        )
        self.numbers = self.update.values(self.optimizer)
        return self.update

    def _warn_of_others(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn of what an optimiser has and the model does not: it would not be trained, and nobody would know."""
        others = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in self._parameters]
        if not self._parameters:
            logger.warning(
                "The model has no parameters, so nothing is trained. Only what a `torch.nn.Module` has as its own can "
                "be: wrap that module, rather than a function that uses it."
            )
        elif others:
            logger.warning(
                "The optimizer has %d parameters that the model does not have, of the shapes %s. They are not trained: "
                "have the wrapped module own them, as attributes of it or of its submodules.",
                len(others),
                ", ".join(str(list(p.shape)) for p in others[:3]) + (", ..." if len(others) > 3 else ""),
            )

    def connect(self, compiled: Compiled, offline: bool = False) -> None:
        """A program has been made: from now on it has the state. What the optimiser has brought along is for it.

        Args:
            compiled: the program.
            offline: it will not run.
        """
        self._compiled, self._is_offline = compiled, offline
        compiled.write_numbers(self.numbers)
        self._connect()

    def _connect(self) -> None:
        if self._compiled is None or self._is_offline:
            return
        fetch, device = weakref.WeakMethod(self._fetch), self.device
        device.refresh()  # it may be connected to another program
        device.pending = device.filled
        device.connect(lambda: device.content if (own := fetch()) is None else own())

    def disconnect(self) -> None:
        """The program will be gone: bring its state home."""
        if self._compiled is not None:
            self.device.disconnect()
            self._compiled = None

    def set(self, optimizer: torch.optim.Optimizer) -> None:
        """Use this optimiser from now on, as it is now.

        Raises:
            poptorch.Error: if it does not fit the program. Then nothing has changed.
            AssertionError, ValueError: if no model can be trained with that. Nor has it then.
        """
        rule_of(optimizer)
        if self.update is not None and self._compiled is not None:
            numbers = self.update.values(optimizer)
            if not np.array_equal(numbers, self.numbers):
                self.numbers = numbers
                self._compiled.write_numbers(numbers)
        if optimizer is not self.optimizer:
            if self.update is not None:
                self._warn_of_others(optimizer)
            self.device.disconnect()
            self.optimizer, self.device = optimizer, _device_state(optimizer)
            self._connect()

    def write_pending(self) -> None:
        """Bring to the device what was loaded into the optimiser.

        Raises:
            poptorch.Error: if state does not have the shape that the program has, or numbers do not fit it.
        """
        assert self._compiled is not None and self.update is not None
        numbers = self.update.values(self.optimizer)
        state = self.device.content["ipu_state"] or {}
        variables = self._compiled.ends.state
        if unknown := sorted(state.keys() - variables.keys()):
            logger.warning("Ignoring optimizer state that the program does not have: %s", ", ".join(unknown))
        arrays = {name: state[name].numpy(force=True) for name in variables if name in state}
        wrong = [
            f"{name} has the shape {list(array.shape)}, expected {list(variables[name].shape_on_host)}"
            for name, array in arrays.items()
            if array.shape != variables[name].shape_on_host
        ]
        if wrong:
            raise createPoptorchError(f"The optimizer's state is not for this model: {'; '.join(wrong)}.")
        if arrays:
            dtypes = {name: variables[name].dtype.as_numpy() for name in arrays}
            self._compiled.write_state({name: array.astype(dtypes[name]) for name, array in arrays.items()})
        self.numbers = numbers
        self._compiled.write_numbers(numbers)
        self.device.written()

    def _fetch(self) -> dict[str, State]:
        assert self._compiled is not None
        state = {name: torch.from_numpy(array) for name, array in self._compiled.state().items()}
        return {"ipu_state": state, "ipu_param": {k: torch.tensor(v) for k, v in self._named_numbers().items()}}

    def _named_numbers(self) -> dict[str, float]:
        assert self.update is not None
        return self.update.named_values(self.numbers)

    # Anchors --------------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Names of what `value` gives: numbers of the optimiser, and its state."""
        if self.update is None:
            return []
        final = ["finalLossScale"] if any(kept.name == LOSS_SCALE_FACTOR for kept in self.update.state) else []
        return [*self._named_numbers(), *(kept.name for kept in self.update.state), *final]

    def value(self, name: str) -> torch.Tensor:
        """A number of the optimiser, or state of it, as the program has it now."""
        assert self._compiled is not None
        numbers = self._named_numbers()
        if name in numbers:
            return torch.tensor(numbers[name])
        state = self._compiled.state()
        if name in state:
            return torch.from_numpy(state[name])
        return torch.tensor(numbers["lossScaling_FLOAT"] * state[LOSS_SCALE_FACTOR].item())


def _device_state(optimizer: torch.optim.Optimizer) -> optim.DeviceState:
    """The state of an optimiser on a device. One of torch has no place for it."""
    return optimizer.device if isinstance(optimizer, optim.Optimizer) else optim.DeviceState()


def needs_running_mean(optimizer: torch.optim.Optimizer, options: Options) -> bool:
    """Whether gradients are summed up in float16, where a sum may overflow and a running mean does not."""
    strategy = options.Training.mean_accumulation_and_replication_reduction_strategy
    in_half = getattr(optimizer, "accum_type", None) == torch.float16
    return in_half and strategy is MeanReductionStrategy.Post and not getattr(optimizer, "use_combined_accum", False)


def with_running_mean(options: Options) -> Options:
    """The same options with `MeanReductionStrategy.Running`."""
    own = options.clone()
    own.Training.setMeanAccumulationAndReplicationReductionStrategy(MeanReductionStrategy.Running)
    own.freeze()
    return own
