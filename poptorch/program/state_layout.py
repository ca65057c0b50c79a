"""`StateLayout`: the state of an optimiser in a program, and its conversion from and to PyTorch's form.

A program names state by parameter, `"Accl1___fc.weight"`, and may count the steps of several parameters once. PyTorch's
`optimizer.state` has a dictionary for each parameter, with its own count.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import popxl
from poptorch.base.dtypes import device_dtype, from_numpy
from poptorch.base.logging_ import logger
from poptorch.errors import createPoptorchError
from poptorch.program.hyperparameters import RECOMPILE, Hyperparameters
from poptorch.program.rules import VELOCITY, WHOLE, Key, Rule, StateSpec

STEP = "Step"
"""State name of the step count; `Step___<parameter>` for a parameter with its own count."""

LOSS_SCALE_FACTOR = "lossScaleUpdateFactor"
"""Name of the state that automatic loss scaling multiplies the loss scale by."""


@dataclass(frozen=True)
class State:
    """Optimiser state tensor.

    Attributes:
        name: key in `ipu_state`, and name of its variable: `"Accl1___fc.weight"`.
        value: initial value; of the parameter's shape on the host, so with a row for each replica group of a grouped
            parameter.
        parameter: parameter that it belongs to; `None` for state of the whole optimiser.
    """

    name: str
    value: np.ndarray
    parameter: str | None = None


class StateLayout:
    """Names, shapes and initial values of an optimiser's state, for the parameters that it trains.

    Args:
        counted_apart: parameters with step counts of their own.

    Attributes:
        group_of: number of the parameter group of each.
        counts: name of the step count of each parameter.
        states: the state.
    """

    def __init__(
        self,
        rule: Rule,
        hyperparameters: Hyperparameters,
        parameters: Mapping[str, torch.Tensor],
        group_of: Mapping[str, int],
        groupings: Mapping[str, popxl.ReplicaGrouping],
        counted_apart: Container[str],
        automatic_loss_scaling: bool,
    ) -> None:
        self._rule, self._hyperparameters, self._groupings = rule, hyperparameters, groupings
        self.group_of = group_of
        self.counts = {name: f"{STEP}___{name}" if name in counted_apart else STEP for name in parameters}
        own = (state for name, p in parameters.items() for state in self._parameter_states(name, p))
        self.states = (*own, *self._common_states(automatic_loss_scaling))

    def key(self, parameter: str, number: str) -> Key:
        """Key of a parameter's hyperparameter: with its group, unless all groups share the number."""
        return (None if number in WHOLE else self.group_of[parameter], number)

    # In PyTorch's form ----------------------------------------------------------------------------------------------

    def as_torch(
        self, state: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor], values: np.ndarray
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Program state converted to `optimizer.state` entries by parameter name; parameters without state are omitted.

        Args:
            values: result of `hyperparameters.values`.
        """
        states: dict[str, dict[str, torch.Tensor]] = {}
        for name in self.group_of:
            own = {}
            for spec in self._rule.state_specs:
                if (t := state.get(f"{spec.name}___{name}")) is not None:
                    value = t if spec.single else t.to(torch.promote_types(t.dtype, parameters[name].dtype))
                    scale = self._state_scale(spec, name, values)
                    own[spec.torch_name] = value if scale == 1 else value / scale
            if own:
                count = {"step": state[self.counts[name]].clone()} if self._rule.counts else {}
                states[name] = count | own
        return states

    def from_torch(
        self,
        state: Mapping[Any, Mapping[str, Any]],
        parameters: Mapping[str, torch.Tensor],
        values: np.ndarray,
        wanted: Container[str],
    ) -> dict[str, torch.Tensor]:
        """Program state converted from `optimizer.state`; missing entries keep initial values.

        Raises:
            Error: if parameters whose steps the program counts together have made different numbers of them, and the
                formula depends on these.
        """
        state_values = {s.name: from_numpy(s.value) for s in self.states if s.name in wanted}
        steps: dict[str, dict[str, float]] = {}
        unknown: set[str] = set()
        for name in self.group_of:
            own = state.get(parameters[name], {})
            specs = [spec for spec in self._rule.state_specs if f"{spec.name}___{name}" in state_values]
            for spec in specs:
                if isinstance(t := own.get(spec.torch_name), torch.Tensor):
                    scale = self._state_scale(spec, name, values)
                    state_values[f"{spec.name}___{name}"] = t if scale == 1 else t * scale
            if specs:
                steps.setdefault(self.counts[name], {})[name] = float(own.get("step", 0))
            unknown |= own.keys() - {"step", *(spec.torch_name for spec in self._rule.state_specs)}
        if unknown:
            logger.warning("Ignoring optimizer state that the program does not have: %s", ", ".join(sorted(unknown)))
        return state_values | self._shared_counters(steps)

    def convert_counters(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Convert step counts of a program state to this program's counters, which may be shared differently.

        Raises:
            Error: as for `from_torch`.
        """
        steps: dict[str, dict[str, float]] = {}
        for name, count in self.counts.items():
            own = state.get(f"{STEP}___{name}", state.get(STEP))
            if own is not None and any(f"{spec.name}___{name}" in state for spec in self._rule.state_specs):
                steps.setdefault(count, {})[name] = float(own)
        others = {name: t for name, t in state.items() if not name.startswith(f"{STEP}___")}
        return others | self._shared_counters(steps)

    def _shared_counters(self, steps: Mapping[str, Mapping[str, float]]) -> dict[str, torch.Tensor]:
        """Shared step counters, from the steps of each parameter."""
        for counts in steps.values():
            if not self.counts_alike(counts):
                text = ", ".join(f"{counts[name]:g} for {name}" for name in sorted(counts, key=counts.__getitem__))
                raise createPoptorchError(
                    f"The optimizer's state counts different numbers of steps: {text}. The program counts one for all "
                    f"of these. {RECOMPILE}"
                )
        return {count: torch.tensor(max(counts.values())) for count, counts in steps.items() if self._rule.counts}

    def counts_alike(self, steps: Mapping[str, float]) -> bool:
        """Whether a program can continue from these step counts: parameters sharing a counter must agree, unless counts
        have no effect.
        """
        counts = {(self.counts[name], step) for name, step in steps.items()}
        return len(counts) == len({count for count, _ in counts}) or not self._step_matters

    @property
    def _step_matters(self) -> bool:
        """Whether an update depends on the number of previous steps."""
        numbers, needs = self._hyperparameters, self._rule.count_needs
        keys = [(group, needs) for group in range(numbers.groups)] if needs else []
        makes_none = needs and not any(numbers.is_variable(key) or numbers.constants[key] for key in keys)
        return self._rule.takes_count and not makes_none

    def _state_scale(self, spec: StateSpec, parameter: str, values: np.ndarray) -> float:
        """Scale factor of program state: velocities may have their own scale."""
        if spec is not VELOCITY:
            return 1.0
        key = self.key(parameter, "velocity_scaling")
        return self._hyperparameters.value(key, values)

    # Contents -------------------------------------------------------------------------------------------------------

    def _parameter_states(self, name: str, parameter: torch.Tensor) -> Iterator[State]:
        """Optimiser state of one parameter."""
        constants = self._hyperparameters.constants
        combined = constants[None, "use_combined_accum"]
        for spec in self._rule.state_specs:
            needs = self.key(name, spec.needs)
            if spec.needs and not self._hyperparameters.is_variable(needs) and not constants[needs]:
                continue
            dtype = device_dtype(parameter.dtype) if combined else constants[None, spec.type_from]
            start = spec.start if isinstance(spec.start, float) else constants[self.key(name, spec.start)]
            if parameter.is_complex() and not spec.single:  # a number for each part
                numbers = np.full((*parameter.shape, 2), start, np.float32).view(np.complex64)[..., 0]
            else:
                shape = self._rows(name) if spec.single else tuple(parameter.shape)
                numbers = np.full(shape, start, popxl.dtype.as_dtype(dtype).as_numpy())
            yield State(f"{spec.name}___{name}", numbers, name)

    def _rows(self, name: str) -> tuple[int, ...]:
        """Leading host dimension of a grouped parameter: one row per replica group, if several."""
        grouping = self._groupings.get(name)
        return () if grouping is None or grouping.num_groups == 1 else (grouping.num_groups,)

    def _common_states(self, automatic_loss_scaling: bool) -> Iterator[State]:
        """Optimiser state shared by all parameters."""
        if self._rule.counts:
            yield from (
                State(count, np.zeros((), np.float32)) for count in dict.fromkeys([STEP, *self.counts.values()])
            )
        if automatic_loss_scaling:
            yield State(LOSS_SCALE_FACTOR, np.ones((), np.float32))
