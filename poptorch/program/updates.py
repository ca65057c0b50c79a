"""Optimiser updates as popxl ops, for training programs.

Python code of an optimiser is never run in a program. An `Update` reads the settings of an optimiser (poptorch's or
torch's), and provides

* `names`: the parameters that it trains;
* `hyperparameters.values(optimizer)`: all its variable hyperparameters in one float32 vector, an input of the program;
  constant ones are part of the program, and changing one is an `Error`;
* `state`: the tensors of its state, by name, with their initial values; `create_state()` makes variables of them, and
  `layout` converts them from and to PyTorch's form;
* `accumulation_dtype`: the type in which gradients are summed over micro-batches;
* `loss_scale(values, state)`: the initial gradient of the loss;
* and, called on parameters, reduced gradients, vector and state, the ops of one step.

The program reduces the gradients (sum or mean, over micro-batches and replicas) and does not unscale them. All tensors
are given by name, so a step may be in any graph that has its parameters and its state by reference:

    >>> weight = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    >>> optimizer = poptorch.optim.SGD([weight], lr=0.1, momentum=0.9, loss_scaling=8.0)
    >>> update = Update(optimizer, {"weight": weight})
    >>> [(kept.name, kept.value.shape) for kept in update.state], update.hyperparameters.values(optimizer)
    ([('Accl1___weight', (2,))], array([8. , 0.1, 0.9], dtype=float32))

    >>> ir = popxl.Ir()
    >>> with ir.main_graph, popxl.in_sequence():
    ...     w, state = popxl.variable(weight.detach(), name="weight"), update.create_state()
    ...     numbers = popxl.h2d_stream(update.hyperparameters.values(optimizer).shape, popxl.float32, "numbers")
    ...     values = ops.host_load(numbers)
    ...     forward = ir.create_graph(lambda w: ops.sum(w * w), w)
    ...     backward = popxl.transforms.autodiff(forward)
    ...     given = backward.inputs_dict(ops.call_with_info(forward, w))
    ...     (gradient,) = ops.call(backward.graph, update.loss_scale(values, state), inputs_dict=given)
    ...     update({"weight": w}, {"weight": gradient}, values, state)
    >>> with popxl.Session(ir) as session:
    ...     _ = session.run({numbers: update.hyperparameters.values(optimizer)})
    ...     optimizer.param_groups[0]["lr"] = 0.05
    ...     _ = session.run({numbers: update.hyperparameters.values(optimizer)})
    >>> w.data.round(4), state["Accl1___weight"].data.round(4)
    (array([0.63, 1.26], dtype=float32), array([3.4, 6.8], dtype=float32))

(A stream, because writing one variable of a session uploads the host's values of all.)
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Container, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

import popxl
from poptorch.base.logging_ import logger
from poptorch.program.gradient_scale import adjust_loss_scale, gradient_scale, largest_magnitude, sum_of_squares
from poptorch.program.hyperparameters import Hyperparameters, display_name
from poptorch.program.rules import RULES, SGD, Key, classes_of, groups_of, rule_of
from poptorch.program.state_layout import LOSS_SCALE_FACTOR, STEP, StateLayout
from poptorch.program.storage import Stored
from popxl import ops
from popxl.context import get_current_context
from popxl.extend.ops import copied_to_ipu
from popxl.tensor import Variable

Tensors = Mapping[str, popxl.Tensor]
Keep = Callable[[str, np.ndarray, popxl.ReplicaGrouping | None], Stored]


class Update:
    """Optimiser state and updates of one compiled program.

    Args:
        optimizer: an optimiser of `poptorch.optim`, or one of torch's with a rule in `poptorch.program.rules`.
        parameters: parameters of the model on the host, by name. Those that need no gradient, and those that the
            optimiser does not have, are not trained.
        replica_groupings: groupings of parameters that differ between replicas, by name. Their rows are parts of one
            parameter for clipping, and parameters of their own for LAMB.
        automatic_loss_scaling: the loss scale is state. It is doubled after each step, up to 2¹⁵, but halved if a
            gradient that is computed in float16 was greater than an eighth of float16's range, in any micro-batch of
            any replica, or no number (the step is made all the same). Gradients in float32 do not count.
        relaxed_checks: tell of unknown attributes in debug messages, not warnings.
        counted_apart: parameters with fewer steps than the others, because they were frozen or added later.

    Attributes:
        names: the parameters that are trained.
        hyperparameters: the optimiser's hyperparameters.
        group_of: parameter group of each, by number.
        state: state of the optimiser.
        layout: its names, and its conversion from and to PyTorch's form.
        accumulation_dtype: the type in which gradients are to be summed over micro-batches.
        stored: location of the state in the main graph, by name, once `create_state` has been called.

    Raises:
        AssertionError: for an unsupported optimiser, and if groups differ in `centered`.
        ValueError: if `use_tf_variant` is set on an optimiser that has no such variant.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2, 3))
        >>> update = Update(poptorch.optim.Adam([weight], lr=0.1), {"weight": weight})
        >>> [variable.name for variable in update.state]
        ['Accl1___weight', 'Accl2___weight', 'Step']
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Mapping[str, torch.Tensor],
        *,
        replica_groupings: Mapping[str, popxl.ReplicaGrouping] | None = None,
        automatic_loss_scaling: bool = False,
        relaxed_checks: bool = False,
        counted_apart: Container[str] = (),
    ) -> None:
        self._rule = rule_of(optimizer)
        if type(optimizer) not in (*RULES, *classes_of(self._rule)):
            logger.warning(
                "%s is a subclass of an optimiser: a wrapped model reads the numbers of %s from it, and what its own "
                "code does has no effect.",
                type(optimizer).__name__,
                self._rule.name,
            )
        self.adjusts = automatic_loss_scaling  # whether float16 gradients adjust the loss scale
        self.hyperparameters = Hyperparameters(optimizer, self._rule, automatic_loss_scaling, relaxed_checks)
        self._groupings = dict(replica_groupings or {})
        self.group_of = groups_of(optimizer, parameters)
        self.names = tuple(self.group_of)
        self.stored: dict[str, Stored] = {}
        self.layout = StateLayout(
            self._rule,
            self.hyperparameters,
            {name: parameters[name] for name in self.names},
            self.group_of,
            self._groupings,
            counted_apart,
            automatic_loss_scaling,
        )
        self.state = self.layout.states

    @property
    def accumulation_dtype(self) -> popxl.dtype:
        """Accumulation dtype for gradients over micro-batches: `accum_type`."""
        constants = self.hyperparameters.constants
        half = constants[None, "accum_type"] == torch.float16 and not constants[None, "use_combined_accum"]
        return popxl.float16 if half else popxl.float32

    # On the host ----------------------------------------------------------------------------------------------------

    def matches(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimiser matches the compiled optimiser's rule."""
        return rule_of(optimizer) is self._rule

    def named_values(self, values: np.ndarray) -> dict[str, float]:
        """Hyperparameters per parameter, under the names used in state dictionaries (`ipu_param`).

        Returns:
            Variable and constant ones by name, for example `"learningRate___specific___fc.weight"`.
        """
        numbers = self.hyperparameters.named(values)
        scale = numbers[None, "loss_scaling"]
        named = {"lossScaling_FLOAT": scale}
        for name in self.names:
            own = {number: numbers[self.layout.key(name, number)] for number in self._rule.numbers}
            displayed = {display_name(number): value for number, value in own.items()}
            if self._rule is SGD:
                rate = own["lr"] * (1 - own["dampening"])
                displayed |= {
                    "scaledLearningRate0": rate / scale,
                    "weightDecayScaleFactor0": 1 - rate * own["weight_decay"],
                }
            named |= {f"{number}___specific___{name}": float(value) for number, value in displayed.items()}
        return named

    # In a program ---------------------------------------------------------------------------------------------------

    def create_state(self, trained: Container[str] | None = None, keep: Keep | None = None) -> dict[str, Variable]:
        """Variables of the main graph (the current graph) for all optimiser state, by name.

        Args:
            trained: names of the parameters that have a gradient; others need no state. By default all have one.
            keep: function that allocates the state of a parameter; by default as a variable in device memory.
        """
        wanted = [s for s in self.state if s.parameter is None or trained is None or s.parameter in trained]
        self.stored = {
            s.name: (keep if keep and s.parameter else _on_device)(
                s.name, s.value, self._groupings.get(s.parameter or "")
            )
            for s in wanted
        }
        return {name: stored.variable for name, stored in self.stored.items() if stored.variable is not None}

    def shard_group(self, name: str, parameter: Stored) -> popxl.ReplicaGrouping | None:
        """Replica group whose members each update a shard of a parameter; `None` for whole updates."""
        stored = [
            parameter,
            *(s for k in self._rule.state_specs if (s := self.stored.get(f"{k.name}___{name}")) is not None),
        ]
        return next((s.group for s in stored if s.group is not None), None) if self._rule.elementwise else None

    def loss_scale(self, values: popxl.Tensor | None, state: Tensors) -> float | popxl.Tensor:
        """Initial gradient of the loss: a number, or a float32 tensor of one element if variable."""
        scale = self.hyperparameters.operand((None, "loss_scaling"), values)
        return state[LOSS_SCALE_FACTOR] * scale if self.adjusts else scale

    def largest(self, gradients: Tensors, sharded: Container[str] = ()) -> popxl.Tensor:
        """Largest gradient magnitude, a float32 tensor of one element; infinite if any NaN.

        Args:
            gradients: gradients by name of the parameter.
            sharded: names of those that are sharded over replicas.
        """
        return self._combined(largest_magnitude, gradients, "max", sharded)

    def __call__(
        self,
        parameters: Tensors,
        gradients: Tensors,
        values: popxl.Tensor | None,
        state: Tensors,
        largest: popxl.Tensor | None = None,
        stored: Mapping[str, Stored] = MappingProxyType({}),
        ipus: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Add the ops of one step to the current graph; they overwrite parameters and state.

        Args:
            parameters: parameters by name, at least those in `names` that are on chip; in a subgraph, inputs by
                reference.
            gradients: gradients by name, of the parameters' shapes and of any float type: reduced over micro-batches
                and replicas, and scaled by `loss_scale`. A parameter without one is unchanged, and so is its state. For
                parameters in `sharded`, the shard of this replica.
            values: the vector of numbers, in the current graph.
            state: on-chip state of the optimiser, by name; in a subgraph, inputs by reference.
            largest: for automatic loss scaling, the largest magnitude of the float16 gradients before their reduction;
                by default that of the given gradients of float16 parameters.
            stored: location of the parameters, by name; by default whole, in device memory.
            ipus: IPU of each parameter, by name; by default that of its gradient.
        """
        names = [name for name in self.names if name in gradients]
        if not names:
            return
        stored_weights = {name: stored[name] if name in stored else Stored(parameters[name].spec) for name in names}
        sharded = {name for name in names if self.shard_group(name, stored_weights[name]) is not None}
        with popxl.in_sequence():
            operand = functools.cache(lambda key: self.hyperparameters.operand(key, values))
            limit = operand((None, "max_grad_norm"))
            clipped = {n: gradients[n] for n in names} if isinstance(limit, popxl.Tensor) or limit < math.inf else {}
            scale = self._gradient_scale(clipped, limit, self.loss_scale(values, state), sharded)
            counts = dict.fromkeys([STEP, *(self.layout.counts[name] for name in names)]) if self._rule.counts else ()
            for count in counts:
                ops.var_updates.accumulate_(state[count], popxl.constant(1.0, popxl.float32))
            for name in names:
                gradient = gradients[name]
                with get_current_context().on_ipu(ipus.get(name, gradient.location[0])):
                    self._step(name, parameters.get(name), gradient, scale, operand, state, stored_weights[name])
            half = [name for name in names if stored_weights[name].spec.dtype == popxl.float16]
            if self.adjusts and (half or largest is not None):
                largest = self.largest({n: gradients[n] for n in half}, sharded) if largest is None else largest
                adjust_loss_scale(state[LOSS_SCALE_FACTOR], largest, operand((None, "loss_scaling")))

    def _step(
        self,
        name: str,
        parameter: popxl.Tensor | None,
        gradient: popxl.Tensor,
        scale: float | popxl.Tensor,
        operand_of: Callable[[Key], Any],
        state: Tensors,
        stored: Stored,
    ) -> None:
        """Add the update op of one parameter."""
        state_names = {k.operand: f"{k.name}___{name}" for k in self._rule.state_specs}
        owners = {operand: self.stored[full] for operand, full in state_names.items() if full in self.stored}
        owners["w"] = stored
        current = {operand: parameter if operand == "w" else state.get(state_names[operand]) for operand in owners}
        group = self.shard_group(name, stored)
        loaded: dict[str, Any] = {
            operand: owner.load_for_update(current[operand], group) for operand, owner in owners.items()
        }
        others: dict[str, Any] = {operand: loaded.get(operand) for operand in state_names}
        others |= {number: operand_of(self.layout.key(name, number)) for number in self._rule.numbers}
        if self._rule.takes_count:
            others["t"] = state[self.layout.counts[name]]
        self._rule.step(loaded["w"], gradient, **others, scale=scale)
        for operand, owner in owners.items():
            owner.store_updated(loaded[operand], current[operand], group)

    def _gradient_scale(
        self, gradients: Tensors, limit: Any, loss_scale: float | popxl.Tensor, sharded: Container[str]
    ) -> float | popxl.Tensor:
        """Gradient scale factor: loss unscaling, and clipping if enabled."""
        if not gradients and isinstance(loss_scale, float):
            return 1 / loss_scale
        squares = self._combined(sum_of_squares, gradients, "add", sharded) if gradients else None
        return gradient_scale(loss_scale, squares, limit)

    def _combined(
        self, kind: popxl.OpKind, tensors: Tensors, over_groups: Any, sharded: Container[str]
    ) -> popxl.Tensor:
        """Reduce many tensors to one number, equal on all replicas, even for tensors that differ between replica
        groups, and for sharded ones.
        """
        combine = ops.add if over_groups == "add" else ops.maximum
        sizes = {name: self._groupings[name].group_size if name in self._groupings else None for name in tensors}
        sizes |= dict.fromkeys((name for name in tensors if name in sharded), 1)
        partial_results = []
        for size in dict.fromkeys(sizes.values()):
            by_ipu = defaultdict[int | None, list[popxl.Tensor]](list)
            for name, t in tensors.items():
                if sizes[name] == size:
                    by_ipu[t.location[0]].append(t)
            of_ipus = []
            for ipu, there in by_ipu.items():
                with get_current_context().on_ipu(ipu):
                    of_ipus.append(kind(*there))
            here = get_current_context().ipu_id
            partial_result = functools.reduce(combine, [copied_to_ipu(t, here) for t in of_ipus])
            if size is not None:
                partial_result = ops.collectives.replicated_all_reduce(partial_result, over_groups)
                partial_result = partial_result / float(size) if over_groups == "add" else partial_result
            partial_results.append(partial_result)
        return functools.reduce(combine, partial_results)


def _on_device(name: str, value: np.ndarray, grouping: popxl.ReplicaGrouping | None) -> Stored:
    v = popxl.variable(value, name=name, replica_grouping=grouping)
    return Stored(v.spec, v, v)
