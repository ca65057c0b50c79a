"""One step of an optimizer: trained variables with gradients, state, learning rate, clipping and loss scale.

The update formulas are in `popxl_addons.optimizers.functional` and `popxl_addons.optimizers.of_optax`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from typing import Any

import jax.numpy as jnp

import popxl
from popxl import initial, ops
from popxl.context import get_current_context
from popxl.dtypes import check_dtype
from popxl.extend.arguments import number
from popxl.extend.collectives import shard_count
from popxl.extend.graphs import final_ipu, reading_ipus, through_calls
from popxl.extend.kernels import Array
from popxl.extend.ops import factor
from popxl.op import Colocated, OpKind, Overwrites, Trait
from popxl.tensor import Constant, Variable
from popxl_addons.dot_tree import DotTree, sanitise
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.ops.grad_reduce_square_add import grad_reduce_square_add
from popxl_addons.optimizers.loss_scaling import LossScale, all_finite
from popxl_addons.optimizers.schedules import Schedule
from popxl_addons.optimizers.state_location import StateStorage
from popxl_addons.variable_factory import VariableFactory

Tensors = NamedTensors | Mapping[str, popxl.Tensor] | Sequence[popxl.Tensor]
Rate = float | popxl.Tensor | Schedule
Scale = float | popxl.Tensor | LossScale


@dataclass(frozen=True)
class Trained:
    """A trained variable, or one replica's shard.

    Attributes:
        name: dotted name of the variable.
        tensor: the variable, or the shard.
        gradient: gradient, of the same shape.
        grouping: replica grouping of the variable.
        num_shards: number of shards of each value.
        group_axis: axis along which the groups' values form one value, if any.
    """

    name: str
    tensor: popxl.Tensor
    gradient: popxl.Tensor
    grouping: popxl.ReplicaGrouping
    num_shards: int
    group_axis: int | None

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """Shape of a value before sharding."""
        return self.tensor.meta_shape or self.tensor.shape

    @property
    def axis(self) -> int | None:
        """Axis along which group values form one whole value, if any."""
        return self.group_axis if self.grouping.num_groups > 1 else None

    @property
    def copies(self) -> int:
        """Number of replicas with identical data."""
        return self.grouping.const_rg.group_size // self.num_shards

    def state(self, name: str, dtype: popxl.dtype, shape: tuple[int, ...] | None = None) -> VariableFactory:
        """Factory of an associated state variable of zeros; equal shapes inherit grouping and sharding."""
        num_shards, shape = (self.num_shards, self.whole_shape) if shape is None else (1, shape)
        axis = self._group_axis_of(shape)
        is_reduced = self.axis is not None and axis is None  # all groups share the state then
        grouping = popxl.gir().replica_grouping() if is_reduced else self.grouping
        return VariableFactory(
            partial(initial.zeros, shape), dtype, f"optimizer.{self.name}.{name}", False, grouping, num_shards, axis
        )

    def _group_axis_of(self, shape: tuple[int, ...]) -> int | None:
        """Axis along which groups divide state of this shape; `None` if the state is reduced over that axis."""
        axis = self.group_axis
        return axis if axis is not None and axis < len(shape) and shape[axis] == self.whole_shape[axis] else None


def _trained(optimizer: str, variables: Tensors, gradients: Tensors) -> list[Trained]:
    """Pair variables with gradients, reporting all mismatches together."""
    graph = popxl.gcg()
    if graph is not popxl.gmg():
        raise ValueError(
            f"{optimizer}: the state is made of variables, which live in the main graph, and {graph.title} is current. "
            "Call the optimiser in the main graph; in a graph of your own use `AdamOptimizerStep`."
        )
    named = _by_name(optimizer, "variables", variables)
    if isinstance(gradients, Mapping | DotTree):
        gradient_of = _by_name(optimizer, "gradients", gradients)
    else:
        values = _sequence(optimizer, "gradients", gradients)
        if len(values) != len(named):
            raise ValueError(f"{optimizer}: there are {len(named)} `variables` and {len(values)} `gradients`.")
        gradient_of = dict(zip(named, values, strict=True))
    problems = [f"`{name}` has no gradient" for name in named if name not in gradient_of]
    problems += [f"there is a gradient of `{name}`, and no such variable" for name in gradient_of if name not in named]
    tensors = {name: t.on_replica for name, t in named.items()}
    problems += [
        f"`{name}` has the shape {t.shape}, and its gradient {gradient_of[name].shape}"
        for name, t in tensors.items()
        if name in gradient_of and gradient_of[name].shape != t.shape
    ]
    if problems:
        raise ValueError(
            f"{optimizer}: {'; '.join(problems)}. Of a variable in pieces the gradient is a piece, too: "
            "`rts.reduce_replica_sharded_tensor`."
        )
    for name, t in tensors.items():
        check_floating(t.dtype, f"{optimizer}: the dtype of the variable `{name}`")
    owners = {v.on_replica: v for v in graph.variables}
    stored = defaultdict[popxl.RemoteBuffer, list[Variable]](list)
    for v in popxl.gmg().variables:
        if (buffer := v.location_info.buffer) is not None:
            stored[buffer].append(v)
    return [
        _like_variable(name, t, gradient_of[name], owners[t] if t in owners else _loaded_variable(t, stored))
        for name, t in tensors.items()
    ]


def _loaded_variable(t: popxl.Tensor, stored: Mapping[popxl.RemoteBuffer, Sequence[Variable]]) -> Variable | None:
    """Variable that a tensor was loaded from, also by a called graph; of several in a buffer, the one in the slot, or
    the first one if the number of the slot is computed."""
    *_, source = through_calls(t.origin)
    load = source.producer
    if load is None or load.kind.exchange != "buffer":
        return None
    number = load.inputs[1].origin
    entry = int(number.data.item()) if isinstance(number, Constant) else None
    candidates = stored.get(load.attributes["buffer"], ())
    return next((v for v in candidates if v.location_info.entry == entry), next(iter(candidates), None))


def _like_variable(name: str, t: popxl.Tensor, gradient: popxl.Tensor, variable: Variable | None) -> Trained:
    grouping = popxl.gir().replica_grouping() if variable is None else variable.replica_grouping
    group = grouping.const_rg.group_size
    num_shards = shard_count(math.prod(t.meta_shape), t.nelms, group) if t.meta_shape else 1
    return Trained(name, t, gradient, grouping, num_shards, None if variable is None else variable.group_axis)


def _by_name(optimizer: str, what: str, tensors: Tensors) -> dict[str, popxl.Tensor]:
    if isinstance(tensors, DotTree):
        by_name = dict(tensors.to_dict())
    elif isinstance(tensors, Mapping):
        by_name = dict(tensors)
    else:
        tensor_list = _sequence(optimizer, what, tensors)
        by_name = {sanitise(t.name): t for t in tensor_list if isinstance(t, popxl.Tensor)}
        if len(by_name) != len(tensor_list):
            raise ValueError(f"{optimizer}: `{what}` are {tensor_list}; expected tensors, each with a name of its own.")
    if invalid := [f"{name}: {t!r}" for name, t in by_name.items() if not isinstance(t, popxl.Tensor)]:
        raise TypeError(f"{optimizer}: `{what}` must be tensors by name, or a sequence of tensors; got {invalid}.")
    return by_name


def _sequence(optimizer: str, what: str, tensors: Any) -> list[Any]:
    """Check a sequence argument without names."""
    if isinstance(tensors, str) or not isinstance(tensors, Iterable):
        raise TypeError(
            f"{optimizer}: `{what}` must be tensors by name, or a sequence of tensors; got {tensors!r:.200} "
            f"({type(tensors).__name__})."
        )
    return list(tensors)


def _norm(trained: Iterable[Trained], loss_scaling: float | popxl.Tensor, placement: Placement) -> popxl.Tensor:
    """The norm of all gradients together, on the current IPU. Numbers that several replicas hold count once."""
    target_ipu, squares_by = get_current_context().ipu_id, dict[tuple[int, int | None], list[popxl.Tensor]]()
    for variable in trained:
        ipu = placement.ipu_of(variable.gradient)
        scale = placement.copy_to(loss_scaling, ipu) if isinstance(loss_scaling, popxl.Tensor) else loss_scaling
        with get_current_context().on_ipu(ipu):
            squares_by.setdefault((variable.copies, ipu), []).append(grad_reduce_square_add(variable.gradient, scale))
    replicas = popxl.gir().replication_factor
    total = []
    for (holders, ipu), squares in squares_by.items():
        with get_current_context().on_ipu(ipu):
            square_sum = ops.add_n(*squares)
            if holders < replicas:
                square_sum = ops.collectives.replicated_all_reduce(square_sum) / holders
        total.append(placement.copy_to(square_sum, target_ipu))
    return ops.sqrt(reduce(ops.add, total))


def global_norm(variables: Tensors, gradients: Tensors, loss_scaling: float | popxl.Tensor = 1.0) -> popxl.Tensor:
    """Global norm of all gradients: a float32 scalar, equal on all replicas.

    For sharded variables, or those with a value for each group of replicas, the gradients of all shards and groups
    count, each once.

    Args:
        variables, gradients, loss_scaling: as for `adamw`.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     w, dw = popxl.variable([1.0, 2.0], name="w"), popxl.constant([3.0, 4.0])
        ...     norm = global_norm([w], [dw])  # 5
    """
    return _norm(_trained("global_norm", variables, gradients), loss_scaling, Placement())


def _finite(trained: Sequence[Trained], placement: Placement) -> popxl.Tensor:
    """Test all gradients for finite values across replicas, on the current IPU."""
    target_ipu, by_ipu = get_current_context().ipu_id, dict[int | None, list[Trained]]()
    for v in trained:
        by_ipu.setdefault(placement.ipu_of(v.gradient), []).append(v)
    replicas = popxl.gir().replication_factor
    flags = []
    for ipu, variables in by_ipu.items():
        with get_current_context().on_ipu(ipu):
            flag = all_finite((v.gradient for v in variables), any(v.copies < replicas for v in variables))
        flags.append(placement.copy_to(flag, target_ipu))
    return reduce(ops.logical_and, flags)


class Step:
    """One optimizer step: formula inputs for each variable.

    Args:
        variables, gradients, lr, clip_norm, loss_scaling: as for `adamw`.
    """

    def __init__(
        self,
        optimizer: str,
        variables: Tensors,
        gradients: Tensors,
        lr: Rate,
        clip_norm: float | None,
        loss_scaling: Scale,
    ) -> None:
        self.trained, self._placement = _trained(optimizer, variables, gradients), Placement()
        self._storage = StateStorage()
        scale = loss_scaling.value if isinstance(loss_scaling, LossScale) else loss_scaling
        scale = factor(scale, f"{optimizer}: `loss_scaling`")
        if not callable(lr):
            lr = factor(lr, f"{optimizer}: `lr`")
        if not isinstance(scale, popxl.Tensor) and not 0 < scale < math.inf:
            raise ValueError(f"{optimizer}: `loss_scaling` is {scale!r}; expected a positive number.")
        if clip_norm is not None and not number(clip_norm, f"{optimizer}: `clip_norm`") > 0:
            raise ValueError(f"{optimizer}: `clip_norm` is {clip_norm!r}; expected a positive number, or None.")
        self.number = popxl.variable(0, popxl.float32, "optimizer.step")
        self.state: dict[str, popxl.Tensor] = {"step": self.number}
        self.finite: popxl.Tensor | None = None
        if isinstance(loss_scaling, LossScale):
            self.finite = _finite(self.trained, self._placement)
        one = popxl.constant(1, popxl.float32) if self.finite is None else self.finite.astype(popxl.float32)
        ops.var_updates.accumulate_(self.number, one)
        self.lr: float | popxl.Tensor = lr(self.number) if callable(lr) else lr
        self.scale: float | popxl.Tensor = 1 / scale
        if clip_norm is not None:
            norm = _norm(self.trained, scale, self._placement)
            self.scale = ops.minimum(clip_norm / (norm + 1e-6), 1.0) * self.scale
        if isinstance(loss_scaling, LossScale) and self.finite is not None:
            loss_scaling.update_(self.finite)
            self.state |= {"loss_scaling.value": scale, "loss_scaling.good_steps": loss_scaling.good_steps}

    def new_state(self, name: str, factory: VariableFactory, after: popxl.Tensor | None = None) -> popxl.Tensor:
        """Tensor of new state for one update, followed by `store_state`. Loads from the host wait for `after`."""
        self.state[name], t = self._storage.create(factory, after)
        return t

    def store_state(self) -> None:
        """Store what `new_state` has loaded from the host."""
        self._storage.store()

    @cached_property
    def factors(self) -> tuple[popxl.Tensor, ...]:
        """Learning rate, gradient factor, and optional step condition."""
        values = tuple(
            value if isinstance(value, popxl.Tensor) else popxl.constant(value, popxl.float32)
            for value in (self.lr, self.scale)
        )
        return values if self.finite is None else (*values, self.finite)

    def update(self, kind: OpKind, variable: Trained, slots: Mapping[str, Any], **how: Any) -> None:
        """Add the update op of one variable and its state, on its IPU; `slots` are dtypes by name, or dtypes and shapes
        where these are not the variable's."""
        ipu = self._placement.ipu_of(variable.tensor)
        gradient, number, *factors = (
            self._placement.copy_to(t, ipu) for t in (variable.gradient, self.number, *self.factors)
        )
        with get_current_context().on_ipu(ipu):
            state = [
                self.new_state(
                    f"{variable.name}.{name}", variable.state(name, *(s if isinstance(s, tuple) else (s,))), gradient
                )
                for name, s in slots.items()
            ]
            kind(variable.tensor, gradient, number, *state, *factors, **how)
            self.store_state()

    @property
    def named_state(self) -> NamedTensors:
        """All state by name."""
        return NamedTensors.from_dict(self.state)


def formula_op(name: str, function: Callable[..., Any], *slots: str, traits: Iterable[Trait] = ()) -> OpKind:
    """Declare an op that applies a float32 formula, overwriting variable and state."""

    def lowering(variable: Array, gradient: Array, step: Array, *others: Array, **numbers: Any) -> tuple[Array, ...]:
        state, (lr, scale, *is_finite) = others[: len(slots)], others[len(slots) :]
        w, g, t, *state_f32 = (x.astype(jnp.float32) for x in (variable, gradient, step, *state))
        return select_if_finite(is_finite, function(w, g * scale, t, lr, *state_f32, **numbers), (w, *state_f32))

    changed = frozenset({0, *range(3, 3 + len(slots))})
    return OpKind(
        name,
        lowering,
        shape=lambda *operands, **numbers: (),
        gradient=None,
        traits=[Overwrites(positions=lambda attributes: changed, aliased=False), Colocated(), *traits],
        key=f"popxl_addons.{name}",
    )


def select_if_finite(is_finite: Sequence[Array], new: Iterable[Array], old: Iterable[Array]) -> tuple[Array, ...]:
    """Select new arrays, or old ones if the one-element condition `is_finite` is false."""
    return tuple(new) if not is_finite else tuple(jnp.where(is_finite[0], *pair) for pair in zip(new, old, strict=True))


def update_all(
    step: Step, kind: OpKind, slots: Mapping[str, popxl.dtype], decay: Callable[[str], float], **numbers: Any
) -> NamedTensors:
    """Update all variables and their state. Returns optimizer state."""
    for variable in step.trained:
        step.update(kind, variable, slots, **numbers, decay=decay(variable.name))
    return step.named_state


# IPUs ---------------------------------------------------------------------------------------------------------------


class Placement:
    """IPU placement of the tensors of a graph, with copies on demand: each part of a step runs on the IPU of its
    variable, so that its state is there too.

    Args:
        graph: by default the main graph.
    """

    def __init__(self, graph: popxl.Graph | None = None) -> None:
        self._copies: dict[tuple[popxl.Tensor, int], popxl.Tensor] = {}
        self._current = get_current_context().ipu_id
        self._reading_ipus = reading_ipus(graph or popxl.gmg())

    def ipu_of(self, t: popxl.Tensor) -> int | None:
        """IPU of the producing op; for variables, of the first reader; by default the current IPU."""
        ipu = next(iter(self._reading_ipus.get(t, ())), None) if t.origin.producer is None else final_ipu(t)
        return self._current if ipu is None else ipu

    def beside(self, t: popxl.Tensor) -> AbstractContextManager[None]:
        """Context in which ops are on the IPU of a tensor."""
        return get_current_context().on_ipu(self.ipu_of(t))

    def copy_to(self, t: popxl.Tensor, ipu: int | None) -> popxl.Tensor:
        """`t` on an IPU: itself if already there or unused, otherwise a copy."""
        is_free = t.origin.producer is None and t not in self._reading_ipus and t.location[0] is None
        source = self.ipu_of(t)
        if source == ipu and t.has_certain_location and t.location[0] is not None:
            source = t.location[0]  # ops of the step itself may read a variable on another IPU than its first reader
        if ipu is None or is_free or source == ipu:
            return t
        if (t, ipu) not in self._copies:
            self._copies[t, ipu] = popxl.ops.ipu_copy(t, ipu, source)
        return self._copies[t, ipu]


# Arguments ----------------------------------------------------------------------------------------------------------


def check_floating(dtype: Any, what: str) -> popxl.dtype:
    """Check an update dtype. Raises `ValueError` for integer and complex types."""
    check_dtype(dtype, what)
    if not dtype.is_floating_point:
        raise ValueError(
            f"{what} is {dtype.name}; expected a floating point type, as a step changes numbers by parts of them."
        )
    return dtype


def numbers(optimizer: str, **values: Any) -> dict[str, float]:
    """Check named hyperparameters. Raises `TypeError` for non-numbers."""
    return {name: float(number(value, f"{optimizer}: `{name}`")) for name, value in values.items()}


def weight_decays(optimizer: str, weight_decay: Any, decays: Any) -> Callable[[str], float]:
    """Weight decay by variable name."""
    decay = numbers(optimizer, weight_decay=weight_decay)["weight_decay"]
    if not callable(decays):
        raise TypeError(
            f'{optimizer}: `decays` must be a function of a variable\'s name, such as `lambda name: "norm" not in '
            f"name`; got {decays!r} ({type(decays).__name__})."
        )
    return lambda name: decay if decays(name) else 0.0
