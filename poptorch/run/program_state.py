"""`ProgramState`: optimiser state and hyperparameters of a compiled training program."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from poptorch.base.device_state import State
from poptorch.base.dtypes import from_numpy, to_numpy
from poptorch.base.logging_ import logger
from poptorch.errors import createPoptorchError
from poptorch.program.state_layout import LOSS_SCALE_FACTOR, STEP
from poptorch.program.updates import Update
from poptorch.run.compiled import Compiled
from poptorch.run.trained_graph_breaks import TrainedBrokenGraph


class ProgramState:
    """Optimiser state and hyperparameters of a program: reads, writes, and conversions from and to PyTorch's format.

    Args:
        update: the optimiser in the program.
        parameters: parameters of the model by name.
        numbers: variable hyperparameters, as given by `Hyperparameters.values`.

    Attributes:
        owners: parameter of each state tensor, by the tensor's name.
    """

    def __init__(
        self,
        compiled: Compiled | TrainedBrokenGraph,
        update: Update,
        parameters: Mapping[str, torch.Tensor],
        numbers: np.ndarray,
    ) -> None:
        self._compiled, self._update, self._parameters = compiled, update, parameters
        own = ((s.name, s.parameter) for s in update.state if s.name in compiled.io.state)
        self.owners = {name: parameters[of] for name, of in own if of is not None}
        self.write_numbers(numbers)

    @property
    def names(self) -> list[str]:
        """Names of the state tensors."""
        return list(self._compiled.io.state)

    def write_numbers(self, numbers: np.ndarray) -> None:
        """Set the variable hyperparameters, effective next run."""
        self._numbers = numbers
        self._compiled.write_numbers(numbers)

    def current_state(self) -> dict[str, State]:
        """State and hyperparameters by name, in the format of `DeviceState`."""
        with torch.inference_mode(False):
            state = {name: from_numpy(array) for name, array in self._compiled.state().items()}
            numbers = {name: torch.tensor(v) for name, v in self._update.named_values(self._numbers).items()}
        return {"ipu_state": state, "ipu_param": numbers}

    def write(self, state: State) -> None:
        """Overwrite state, in the program's format. Tensors that the program lacks are ignored, with a warning.

        Raises:
            poptorch.Error: for a tensor of another shape than the program's.
        """
        state, variables = self._update.layout.convert_counters(state), self._compiled.io.state
        if unknown := sorted(state.keys() - variables.keys()):
            logger.warning("Ignoring optimizer state that the program does not have: %s", ", ".join(unknown))
        arrays = {name: to_numpy(state[name]) for name in variables if name in state}
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

    def completed(self, state: State) -> State:
        """State with the program's values for tensors that it lacks; step counts only if it has none."""
        is_counted = any(name.startswith(STEP) for name in state)
        lacking = [n for n in self.names if n not in state and not (is_counted and n.startswith(STEP))]
        own = self.current_state()["ipu_state"] if lacking else {}
        return {**state, **{name: own[name] for name in lacking}}

    def matching(self, state: State) -> State:
        """Subset of another program's state that fits this one by name and shape; step counts always fit."""
        shapes = {name: variable.shape_on_host for name, variable in self._compiled.io.state.items()}
        return {name: t for name, t in state.items() if name.startswith(STEP) or t.shape == shapes.get(name)}

    def as_torch(self, state: State) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """State by parameter, in PyTorch's format."""
        with torch.inference_mode(False):  # otherwise their version counters would change
            states = self._update.layout.as_torch(state, self._parameters, self._numbers)
        return {self._parameters[name]: own for name, own in states.items()}

    def from_torch(self, state: Mapping[Any, Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """State in the program's format, from PyTorch's."""
        variables = self._compiled.io.state
        states = self._update.layout.from_torch(state, self._parameters, self._numbers, variables)
        rounded = sorted(n for n, t in states.items() if t.dtype.itemsize < variables[n].dtype.as_numpy().itemsize)
        if rounded:
            logger.warning(
                "The optimizer's state is rounded to the type of its parameters (%s): `load_state_dict` of PyTorch "
                "does so. To keep all digits, wrap the model first, and load the state then.",
                ", ".join(rounded[:3]) + (", ..." if len(rounded) > 3 else ""),
            )
        return states

    def value(self, name: str) -> torch.Tensor:
        """Value of a hyperparameter or state tensor, or `finalLossScale`."""
        numbers = self._update.named_values(self._numbers)
        if name in numbers:
            return torch.tensor(numbers[name])
        state = self._compiled.state()
        if name in state:
            return from_numpy(state[name])
        return torch.tensor(numbers["lossScaling_FLOAT"] * state[LOSS_SCALE_FACTOR].item())
