"""Optimiser updates as popxl ops, for training programs.

Python code of an optimiser is never run in a program. An `Update` reads the settings of an optimiser (poptorch's or
torch's), and provides

* `names`: the parameters that it trains;
* `hyperparameters.values(optimizer)`: all its variable hyperparameters in one float32 vector, an input of the program;
  constant ones are part of the program, and changing one is an `Error`;
* `state`: the tensors of its state, by name, with their initial values; `create_state()` makes variables of them;
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
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

import popxl
from poptorch.base.dtypes import device_dtype, from_numpy
from poptorch.base.logging_ import logger
from poptorch.errors import createPoptorchError
from poptorch.program.formulas import Array, Number
from poptorch.program.hyperparameters import RECOMPILE, Hyperparameters, display_name
from poptorch.program.rules import (
    RULES,
    SGD,
    VELOCITY,
    WHOLE,
    Kept,
    Key,
    classes_of,
    in_parts,
    op_kind,
    rule_of,
)
from poptorch.program.storage import Stored
from popxl import ops
from popxl.extend.graphs import Readers, reading_ipus
from popxl.op import Colocated, Overwrites
from popxl.tensor import Variable

Tensors = Mapping[str, popxl.Tensor]
Keep = Callable[[str, np.ndarray, popxl.ReplicaGrouping | None], Stored]

STEP = "Step"
"""Name of the step count in the state; `Step___<parameter>` for a parameter with its own count."""

LOSS_SCALE_FACTOR = "lossScaleUpdateFactor"
"""Name of the state that automatic loss scaling multiplies the loss scale by."""


def _summary(name: str, each: Callable[[Array], Array], combine: Callable[[list[Array]], Array]) -> popxl.OpKind:
    """Declare an op that reduces any number of tensors to one number."""
    return op_kind(name, lambda *ts: combine([each(in_parts(t)) for t in ts]))


_sum_of_squares = _summary("SumOfSquares", lambda t: jnp.sum(t * t), sum)
_largest = _summary(
    "LargestMagnitude",
    lambda t: jnp.max(jnp.where(jnp.isnan(t), jnp.inf, jnp.abs(t)), initial=0),  # infinities become NaN
    lambda ms: jnp.max(jnp.stack(ms)),
)


def _for_true_units(loss_scale: Number = 1.0, squares: Array | None = None, limit: Number = math.inf) -> Array:
    """Gradient scale factor: undo loss scaling, and clip global norms greater than `limit`."""
    if squares is None:
        return 1 / loss_scale
    return jnp.minimum(1, limit / (jnp.sqrt(squares) / loss_scale + 1e-6)) / loss_scale  # as in torch's clip_grad_norm_


_gradient_scale = op_kind("GradientScale", _for_true_units)

_TOO_LARGE = 65504 / 8  # an eighth of float16's range
_LOSS_SCALES = 2.0**-15, 2.0**15


def _adjusted(factor: Array, largest: Array, loss_scaling: Number = 1.0) -> tuple[Array]:
    """Double the loss scale while gradients stay well within float16's range; halve it on overflow or NaN."""
    scale = factor * loss_scaling
    scale = jnp.clip(jnp.where(largest <= _TOO_LARGE, scale * 2, scale / 2), *_LOSS_SCALES)
    return (scale / loss_scaling,)


_adjust = op_kind(
    "LossScaleUpdate", _adjusted, shape=lambda *operands: (), traits=[Overwrites("factor", aliased=False), Colocated()]
)


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
        group_of: number of the group of each of these parameters.
        state: state of the optimiser.
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
        self._automatic = automatic_loss_scaling
        self.hyperparameters = Hyperparameters(optimizer, self._rule, automatic_loss_scaling, relaxed_checks)
        self._groupings = dict(replica_groupings or {})
        groups = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        trained = {name: p for name, p in parameters.items() if p.requires_grad and id(p) in groups}
        self.group_of = {name: groups[id(p)] for name, p in trained.items()}
        self.names = tuple(trained)
        self.stored: dict[str, Stored] = {}
        self._counts = {name: f"{STEP}___{name}" if name in counted_apart else STEP for name in trained}
        self.state = (*(s for name, p in trained.items() for s in self._kept(name, p)), *self._common())

    @property
    def accumulation_dtype(self) -> popxl.dtype:
        """Accumulation dtype for gradients over micro-batches: `accum_type`."""
        constants = self.hyperparameters.constants
        half = constants[None, "accum_type"] == torch.float16 and not constants[None, "use_combined_accum"]
        return popxl.float16 if half else popxl.float32

    # On the host ----------------------------------------------------------------------------------------------------

    def is_of(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimiser matches the compiled optimiser's rule."""
        return rule_of(optimizer) is self._rule

    def named_values(self, values: np.ndarray) -> dict[str, float]:
        """Hyperparameters per parameter, under the names used in state dictionaries (`ipu_param`).

        Args:
            values: result of `hyperparameters.values`.

        Returns:
            Variable and constant ones by name, for example `"learningRate___specific___fc.weight"`.
        """
        numbers = self.hyperparameters.named(values)
        scale = numbers[None, "loss_scaling"]
        named = {"lossScaling_FLOAT": scale}
        for name in self.names:
            own = {number: numbers[self._key(name, number)] for number in self._rule.numbers}
            shown = {display_name(number): value for number, value in own.items()}
            if self._rule is SGD:
                rate = own["lr"] * (1 - own["dampening"])
                shown |= {
                    "scaledLearningRate0": rate / scale,
                    "weightDecayScaleFactor0": 1 - rate * own["weight_decay"],
                }
            named |= {f"{number}___specific___{name}": float(value) for number, value in shown.items()}
        return named

    # In PyTorch's form ----------------------------------------------------------------------------------------------

    def as_torch(
        self, state: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor], values: np.ndarray
    ) -> dict[str, dict[str, torch.Tensor]]:
        """Program state converted to `optimizer.state` entries by parameter name; parameters without state are omitted.

        Args:
            state: the state of the program, by name.
            parameters: parameters of the model, by name.
            values: result of `hyperparameters.values`.
        """
        found: dict[str, dict[str, torch.Tensor]] = {}
        for name in self.names:
            own = {}
            for kept in self._rule.kept:
                if (t := state.get(f"{kept.name}___{name}")) is not None:
                    wide = t if kept.single else t.to(torch.promote_types(t.dtype, parameters[name].dtype))
                    scale = self._state_scale(kept, name, values)
                    own[kept.torch_name] = wide if scale == 1 else wide / scale
            if own:
                count = {"step": state[self._counts[name]].clone()} if self._rule.counts else {}
                found[name] = count | own
        return found

    def from_torch(
        self,
        state: Mapping[Any, Mapping[str, Any]],
        parameters: Mapping[str, torch.Tensor],
        values: np.ndarray,
        wanted: Container[str],
    ) -> dict[str, torch.Tensor]:
        """Program state converted from `optimizer.state`; missing entries keep initial values.

        Args:
            state: `optimizer.state`.
            parameters: parameters of the model, by name.
            values: result of `hyperparameters.values`.
            wanted: names of the state that the program has.

        Raises:
            Error: if parameters whose steps the program counts together have made different numbers of them, and the
                formula depends on these.
        """
        found = {s.name: from_numpy(s.value) for s in self.state if s.name in wanted}
        steps: dict[str, dict[str, float]] = {}
        unknown: set[str] = set()
        for name in self.names:
            own = state.get(parameters[name], {})
            kept_here = [kept for kept in self._rule.kept if f"{kept.name}___{name}" in found]
            for kept in kept_here:
                if isinstance(t := own.get(kept.torch_name), torch.Tensor):
                    scale = self._state_scale(kept, name, values)
                    found[f"{kept.name}___{name}"] = t if scale == 1 else t * scale
            if kept_here:
                steps.setdefault(self._counts[name], {})[name] = float(own.get("step", 0))
            unknown |= own.keys() - {"step", *(kept.torch_name for kept in self._rule.kept)}
        if unknown:
            logger.warning("Ignoring optimizer state that the program does not have: %s", ", ".join(sorted(unknown)))
        return found | self._counted(steps)

    def counted(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Convert step counts of a program state to this program's counters, which may be shared differently.

        Raises:
            Error: as for `from_torch`.
        """
        steps: dict[str, dict[str, float]] = {}
        for name, count in self._counts.items():
            own = state.get(f"{STEP}___{name}", state.get(STEP))
            if own is not None and any(f"{kept.name}___{name}" in state for kept in self._rule.kept):
                steps.setdefault(count, {})[name] = float(own)
        others = {name: t for name, t in state.items() if not name.startswith(f"{STEP}___")}
        return others | self._counted(steps)

    def _counted(self, steps: Mapping[str, Mapping[str, float]]) -> dict[str, torch.Tensor]:
        """Shared step counters, from the steps of each parameter."""
        for made in steps.values():
            if not self.counts_alike(made):
                shown = ", ".join(f"{made[name]:g} for {name}" for name in sorted(made, key=made.__getitem__))
                raise createPoptorchError(
                    f"The optimizer's state counts different numbers of steps: {shown}. The program counts one for all "
                    f"of these. {RECOMPILE}"
                )
        return {count: torch.tensor(max(made.values())) for count, made in steps.items() if self._rule.counts}

    def counts_alike(self, steps: Mapping[str, float]) -> bool:
        """Whether a program can continue from these step counts: parameters sharing a counter must agree, unless counts
        have no effect.
        """
        counts = {(self._counts[name], made) for name, made in steps.items()}
        return len(counts) == len({count for count, _ in counts}) or not self._step_matters

    @property
    def _step_matters(self) -> bool:
        """Whether an update depends on the number of previous steps."""
        numbers, needs = self.hyperparameters, self._rule.count_needs
        keys = [(group, needs) for group in range(numbers.groups)] if needs else []
        makes_none = needs and not any(numbers.is_variable(key) or numbers.constants[key] for key in keys)
        return self._rule.takes_count and not makes_none

    def _state_scale(self, kept: Kept, parameter: str, values: np.ndarray) -> float:
        """Scale factor of program state: velocities may have their own scale."""
        if kept is not VELOCITY:
            return 1.0
        key = self._key(parameter, "velocity_scaling")
        return self.hyperparameters.at(key, values)

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

    def pieces(self, name: str, parameter: Stored) -> popxl.ReplicaGrouping | None:
        """Replica group whose members each update a shard of a parameter; `None` for whole updates."""
        kept = [parameter, *(s for k in self._rule.kept if (s := self.stored.get(f"{k.name}___{name}")) is not None)]
        return next((s.group for s in kept if s.group is not None), None) if self._rule.elementwise else None

    def loss_scale(self, values: popxl.Tensor | None, state: Tensors) -> float | popxl.Tensor:
        """Initial gradient of the loss: a number, or a float32 tensor of one element if variable.

        Args:
            values: the vector of numbers, in the current graph.
            state: state of the optimiser by name, in the current graph.
        """
        scale = self.hyperparameters.read((None, "loss_scaling"), values)
        return state[LOSS_SCALE_FACTOR] * scale if self._automatic else scale

    def largest(self, gradients: Tensors, pieces: Container[str] = ()) -> popxl.Tensor:
        """Largest gradient magnitude, a float32 tensor of one element; infinite if any NaN.

        Args:
            gradients: gradients by name of the parameter.
            pieces: names of those that are sharded over replicas.
        """
        return self._combined(_largest, gradients, "max", pieces)

    @property
    def adjusts(self) -> bool:
        """Whether float16 gradients adjust the loss scale."""
        return self._automatic

    def __call__(
        self,
        parameters: Tensors,
        gradients: Tensors,
        values: popxl.Tensor | None,
        state: Tensors,
        largest: popxl.Tensor | None = None,
        stored: Mapping[str, Stored] = MappingProxyType({}),
    ) -> None:
        """Add the ops of one step to the current graph; they overwrite parameters and state.

        Args:
            parameters: parameters by name, at least those in `names` that are on chip; in a subgraph, inputs by
                reference.
            gradients: gradients by name, of the parameters' shapes and of any float type: reduced over micro-batches
                and replicas, and scaled by `loss_scale`. A parameter without one is unchanged, and so is its state. For
                parameters in `pieces`, the shard of this replica.
            values: the vector of numbers, in the current graph.
            state: on-chip state of the optimiser, by name; in a subgraph, inputs by reference.
            largest: for automatic loss scaling, the largest magnitude of the float16 gradients before their reduction;
                by default that of the given gradients of float16 parameters.
            stored: location of the parameters, by name; by default whole, in device memory.
        """
        names = [name for name in self.names if name in gradients]
        if not names:
            return
        places = {name: stored[name] if name in stored else Stored(parameters[name].spec) for name in names}
        pieces = {name for name in names if self.pieces(name, places[name]) is not None}
        with popxl.in_sequence():
            read = functools.cache(lambda key: self.hyperparameters.read(key, values))
            limit = read((None, "max_grad_norm"))
            clipped = {n: gradients[n] for n in names} if isinstance(limit, popxl.Tensor) or limit < math.inf else {}
            scale = self._gradient_scale(clipped, limit, self.loss_scale(values, state), pieces)
            for count in dict.fromkeys([STEP, *map(self._counts.__getitem__, names)]) if self._rule.counts else ():
                ops.var_updates.accumulate_(state[count], popxl.constant(1.0, popxl.float32))
            readers = reading_ipus(popxl.gcg())
            for name in names:
                gradient = gradients[name]
                with _beside(parameters.get(name, gradient), readers):
                    self._step(name, parameters.get(name), gradient, scale, read, state, places[name])
            half = [name for name in names if places[name].spec.dtype == popxl.float16]
            if self._automatic and (half or largest is not None):
                largest = self.largest({n: gradients[n] for n in half}, pieces) if largest is None else largest
                _adjust(state[LOSS_SCALE_FACTOR], largest, read((None, "loss_scaling")))

    def _step(
        self,
        name: str,
        parameter: popxl.Tensor | None,
        gradient: popxl.Tensor,
        scale: float | popxl.Tensor,
        read: Callable[[Key], Any],
        state: Tensors,
        stored: Stored,
    ) -> None:
        """Add the update op of one parameter."""
        kept = {k.operand: f"{k.name}___{name}" for k in self._rule.kept}
        places = {operand: self.stored[full] for operand, full in kept.items() if full in self.stored}
        places["w"] = stored
        held = {operand: parameter if operand == "w" else state.get(kept[operand]) for operand in places}
        group = self.pieces(name, stored)
        taken: dict[str, Any] = {operand: place.take(held[operand], group) for operand, place in places.items()}
        others: dict[str, Any] = {operand: taken.get(operand) for operand in kept}
        others |= {number: read(self._key(name, number)) for number in self._rule.numbers}
        if self._rule.takes_count:
            others["t"] = state[self._counts[name]]
        self._rule.step(taken["w"], gradient, **others, scale=scale)
        for operand, place in places.items():
            place.put(taken[operand], held[operand], group)

    def _gradient_scale(
        self,
        gradients: Tensors,
        limit: Any,
        loss_scale: float | popxl.Tensor,
        pieces: Container[str],
    ) -> float | popxl.Tensor:
        """Gradient scale factor: loss unscaling, and clipping if enabled."""
        if not gradients and isinstance(loss_scale, float):
            return 1 / loss_scale
        squares = self._combined(_sum_of_squares, gradients, "add", pieces) if gradients else None
        return _gradient_scale(loss_scale, squares, limit)

    def _combined(self, kind: popxl.OpKind, tensors: Tensors, over_groups: Any, pieces: Container[str]) -> popxl.Tensor:
        """Reduce many tensors to one number, equal on all replicas, even for tensors that differ between replica
        groups, and for sharded ones.
        """
        sizes = {name: self._groupings[name].group_size if name in self._groupings else None for name in tensors}
        sizes |= dict.fromkeys((name for name in tensors if name in pieces), 1)
        parts = []
        for size in dict.fromkeys(sizes.values()):
            part = kind(*(t for name, t in tensors.items() if sizes[name] == size))
            if size is not None:
                part = ops.collectives.replicated_all_reduce(part, over_groups)
                part = part / float(size) if over_groups == "add" else part
            parts.append(part)
        return functools.reduce(ops.add if over_groups == "add" else ops.maximum, parts)

    def _key(self, parameter: str, number: str) -> Key:
        return (None if number in WHOLE else self.group_of[parameter], number)

    # State ------------------------------------------------------------------------------------

    def _kept(self, name: str, parameter: torch.Tensor) -> Iterator[State]:
        """Optimiser state of one parameter."""
        constants = self.hyperparameters.constants
        combined = constants[None, "use_combined_accum"]
        for kept in self._rule.kept:
            needs = self._key(name, kept.needs)
            if kept.needs and not self.hyperparameters.is_variable(needs) and not constants[needs]:
                continue
            dtype = device_dtype(parameter.dtype) if combined else constants[None, kept.type_from]
            start = kept.start if isinstance(kept.start, float) else constants[self._key(name, kept.start)]
            if parameter.is_complex() and not kept.single:  # a number for each part
                numbers = np.full((*parameter.shape, 2), start, np.float32).view(np.complex64)[..., 0]
            else:
                shape = self._rows(name) if kept.single else tuple(parameter.shape)
                numbers = np.full(shape, start, popxl.dtype.as_dtype(dtype).as_numpy())
            yield State(f"{kept.name}___{name}", numbers, name)

    def _rows(self, name: str) -> tuple[int, ...]:
        """Leading host dimension of a grouped parameter: one row per replica group, if several."""
        grouping = self._groupings.get(name)
        return () if grouping is None or grouping.num_groups == 1 else (grouping.num_groups,)

    def _common(self) -> Iterator[State]:
        """Optimiser state shared by all parameters."""
        if self._rule.counts:
            yield from (
                State(count, np.zeros((), np.float32)) for count in dict.fromkeys([STEP, *self._counts.values()])
            )
        if self._automatic:
            yield State(LOSS_SCALE_FACTOR, np.ones((), np.float32))


def _on_device(name: str, value: np.ndarray, grouping: popxl.ReplicaGrouping | None) -> Stored:
    v = popxl.variable(value, name=name, replica_grouping=grouping)
    return Stored(v.spec, v, v)


def _beside(t: popxl.Tensor, readers: Readers) -> AbstractContextManager[Any]:
    """Place ops on the first IPU that reads a tensor; otherwise on its own IPU, if known."""
    ipu = next(iter(readers.get(t, ())), t.location[0])
    return nullcontext() if ipu is None else popxl.ipu(ipu)
