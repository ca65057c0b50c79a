"""A finished program that trains the GPT, whichever way: what is fed, how its state is named, and what it needs."""

from collections.abc import Mapping

import numpy as np

import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons import InputStreams, NamedTensors, OutputStreams
from popxl_addons.optimizers import AdamOptimizerStep
from tests.popxl_addons.gpt.model import Config

BETA1 = 0.9


def streams(config: Config, batch: int) -> tuple[InputStreams, OutputStreams]:
    """Tokens and labels of `batch` sequences, and their loss."""
    spec = ((batch, config.sequence), popxl.int32)
    return InputStreams(tokens=spec, labels=spec), OutputStreams(loss=((), popxl.float32))


class AdamW:
    """Optimiser steps, in one graph for each shape of variable."""

    def __init__(self, config: Config):
        self.module = AdamOptimizerStep(cache=True)
        self.options = {
            "lr": config.learning_rate,
            "beta1": BETA1,
            "weight_decay": config.weight_decay,
            "first_order_dtype": popxl.float32,
        }

    def create_graph(
        self, spec: popxl.TensorSpec, group: popxl.ReplicaGrouping | None = None
    ) -> tuple[addons.NamedVariableFactories, addons.GraphWithNamedArgs]:
        """The step for a variable, and its state."""
        return self.module.create_graph(spec, spec, group, **self.options)

    def update(self, variables: NamedTensors, gradients: NamedTensors) -> NamedTensors:
        """Update variables with the gradients of the same names; the state is made on the way, and returned."""
        states = NamedTensors()
        for name, v in variables.to_dict().items():
            facts, step = self.create_graph(v.spec, v.replica_grouping)
            state = facts.init(f"optim.{v.name}")
            step.bind(state).call(v, gradients[name])
            states.insert(name, state, overwrite=True)
        return states


def start_again(accumulators: NamedTensors) -> None:
    """New means of gradients from here on."""
    ops.var_updates.accumulator_scale_(accumulators.mean_accum_counter, 0.0)


class Training(addons.TaskSession):
    """A session that does one step a run.

    Its state has `fwd`, the variables; `optim`, what AdamW has for each; and `seed`, where dropout goes on.
    """

    def __init__(
        self,
        config: Config,
        ir: popxl.Ir,
        inputs: InputStreams,
        outputs: OutputStreams,
        variables: NamedTensors,
        optim: NamedTensors,
        seed: popxl.Tensor,
    ):
        state = NamedTensors(fwd=variables, optim=optim, seed=seed)
        super().__init__(inputs, outputs, state, ir=ir, device_desc="ipu_hw")
        self.config = config

    def step(self, tokens: np.ndarray, labels: np.ndarray) -> float:
        """The loss of the batch, before the step."""
        feeds = {self.inputs.tokens: self.arranged(tokens), self.inputs.labels: self.arranged(labels)}
        return float(self.run(feeds)[self.outputs.loss].mean())

    def start(self, weights: Mapping[str, np.ndarray], seed: int | None = None) -> None:
        """Begin with these weights, whole ones, by name. Without a `seed`, that of the program goes on."""
        variables = self.state.fwd.to_dict()
        data = {variables[name]: self.divided(name, array) for name, array in weights.items()}
        data |= {v: np.zeros(v.shape_on_host, np.float32) for v in self.state.optim.values_flat()}
        if seed is not None:
            data[self.state.seed] = popxl.create_seeds(seed)
        self.write_variables_data(data)

    def weights(self) -> dict[str, np.ndarray]:
        """The weights now, whole ones, by name."""
        return {name: self.whole(name, array) for name, array in self.get_named_tensors_data().fwd.to_dict().items()}

    def gradients(self) -> dict[str, np.ndarray]:
        """After the first step: what AdamW has made of zeros is a share of the gradients."""
        optim = self.get_named_tensors_data().optim
        return {name: self.whole(name, optim[name].first_order / (1 - BETA1)) for name in self.state.fwd.to_dict()}

    # What ways to train differ in

    def arranged(self, batch: np.ndarray) -> np.ndarray:
        """A batch as the streams take it."""
        transfers = self.ir.num_host_transfers
        return batch.reshape(transfers, -1, *batch.shape[1:]) if transfers > 1 else batch

    def divided(self, name: str, array: np.ndarray) -> np.ndarray:
        """A weight as the variable of this name holds it."""
        return array

    def whole(self, name: str, array: np.ndarray) -> np.ndarray:
        """A weight, of what the variable of this name holds."""
        return array.copy()
