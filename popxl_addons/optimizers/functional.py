"""Optimisers as a whole: one call updates all variables of a model, and makes the state that this takes.

    state = optimizers.adamw(variables, gradients, lr=3e-4, clip_norm=1.0)

Formulas are computed in float32, whatever the variables are of, and rounded once. The state of a variable is in pieces
where the variable is. For one variable at a time, as a graph of its own: `AdamOptimizerStep`. Optax's transformations
are in `popxl_addons.optimizers.of_optax`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import popxl
from popxl import initial, ops
from popxl.context import get_current_context
from popxl.extend.arguments import flag, number
from popxl.extend.collectives import Group, members, shard_count
from popxl.extend.kernels import Array
from popxl.extend.ops import adam_direction, factor
from popxl.op import BetweenReplicas, Colocated, OpKind, Overwrites, Trait
from popxl.tensor import Variable
from popxl_addons.dot_tree import DotTree, sanitise
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.ops.grad_reduce_square_add import grad_reduce_square_add
from popxl_addons.optimizers.arguments import check_floating, numbers, weight_decays
from popxl_addons.optimizers.loss_scaling import LossScale, all_finite
from popxl_addons.optimizers.means import Means, MeansOverGroups, MeansOverPieces, Within
from popxl_addons.optimizers.placement import Placement
from popxl_addons.optimizers.schedules import Schedule
from popxl_addons.variable_factory import VariableFactory

__all__ = ["adafactor", "adamw", "global_norm", "lion", "sgd"]

Tensors = NamedTensors | Mapping[str, popxl.Tensor] | Sequence[popxl.Tensor]
Rate = float | popxl.Tensor | Schedule
Scale = float | popxl.Tensor | LossScale
# What is updated ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """A trained variable, or one replica's shard.

    Attributes:
        name: its dotted name.
        tensor: the variable, or the piece.
        gradient: of the shape of the tensor.
        grouping: that of the variable.
        pieces: how many there are of each value.
        group_axis: along which the values of the groups are parts of one, if they are.
    """

    name: str
    tensor: popxl.Tensor
    gradient: popxl.Tensor
    grouping: popxl.ReplicaGrouping
    pieces: int
    group_axis: int | None

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of a value."""
        return self.tensor.meta_shape or self.tensor.shape

    @property
    def axis(self) -> int | None:
        """Axis along which group values form one whole value, if any."""
        return self.group_axis if self.grouping.num_groups > 1 else None

    @property
    def copies(self) -> int:
        """How many replicas hold the same numbers."""
        return self.grouping.const_rg.group_size // self.pieces

    def state(self, name: str, dtype: popxl.dtype, shape: tuple[int, ...] | None = None, start: float = 0) -> Variable:
        """Create an associated state variable; equal shapes inherit grouping and sharding."""
        pieces, shape = (self.pieces, self.whole_shape) if shape is None else (1, shape)
        axis = self._group_axis_of(shape)
        is_reduced = self.axis is not None and axis is None  # then all groups have the same
        grouping = popxl.gir().replica_grouping() if is_reduced else self.grouping
        factory = VariableFactory(partial(initial.full, shape, start), dtype, name, False, grouping, pieces, axis)
        return factory.create_tensor(f"optimizer.{self.name}.{name}")

    def _group_axis_of(self, shape: tuple[int, ...]) -> int | None:
        """The axis along which groups divide state of this shape: none, if the values' axis is reduced there."""
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
        given = _by_name(optimizer, "gradients", gradients)
    else:
        listed = _sequence(optimizer, "gradients", gradients)
        if len(listed) != len(named):
            raise ValueError(f"{optimizer}: there are {len(named)} `variables` and {len(listed)} `gradients`.")
        given = dict(zip(named, listed, strict=True))
    problems = [f"`{name}` has no gradient" for name in named if name not in given]
    problems += [f"there is a gradient of `{name}`, and no such variable" for name in given if name not in named]
    tensors = {name: t.piece if isinstance(t, Variable) and t.piece is not None else t for name, t in named.items()}
    problems += [
        f"`{name}` has the shape {t.shape}, and its gradient {given[name].shape}"
        for name, t in tensors.items()
        if name in given and given[name].shape != t.shape
    ]
    if problems:
        raise ValueError(
            f"{optimizer}: {'; '.join(problems)}. Of a variable in pieces the gradient is a piece, too: "
            "`rts.reduce_replica_sharded_tensor`."
        )
    for name, t in tensors.items():
        check_floating(t.dtype, f"{optimizer}: the dtype of the variable `{name}`")
    owners = {v.piece: v for v in graph.variables if v.piece is not None}
    return [_like_variable(name, t, given[name], owners.get(t, t)) for name, t in tensors.items()]


def _like_variable(name: str, t: popxl.Tensor, gradient: popxl.Tensor, owner: popxl.Tensor) -> Trained:
    variable = owner if isinstance(owner, Variable) else None
    grouping = popxl.gir().replica_grouping() if variable is None else variable.replica_grouping
    group = grouping.const_rg.group_size
    pieces = shard_count(math.prod(t.meta_shape), t.nelms, group) if t.meta_shape else 1
    return Trained(name, t, gradient, grouping, pieces, None if variable is None else variable.group_axis)


def _by_name(optimizer: str, what: str, tensors: Tensors) -> dict[str, popxl.Tensor]:
    if isinstance(tensors, DotTree):
        found = dict(tensors.to_dict())
    elif isinstance(tensors, Mapping):
        found = dict(tensors)
    else:
        listed = _sequence(optimizer, what, tensors)
        found = {sanitise(t.name): t for t in listed if isinstance(t, popxl.Tensor)}
        if len(found) != len(listed):
            raise ValueError(f"{optimizer}: `{what}` are {listed}; expected tensors, each with a name of its own.")
    if odd := [f"{name}: {t!r}" for name, t in found.items() if not isinstance(t, popxl.Tensor)]:
        raise TypeError(f"{optimizer}: `{what}` must be tensors by name, or a sequence of tensors; got {odd}.")
    return found


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
    here, parts = get_current_context().ipu_id, dict[tuple[int, int | None], list[popxl.Tensor]]()
    for each in trained:
        ipu = placement.ipu_of(each.gradient)
        scale = placement.copy_to(loss_scaling, ipu) if isinstance(loss_scaling, popxl.Tensor) else loss_scaling
        with get_current_context().set(ipu_id=ipu):
            parts.setdefault((each.copies, ipu), []).append(grad_reduce_square_add(each.gradient, scale))
    replicas = popxl.gir().replication_factor
    total = []
    for (holders, ipu), squares in parts.items():
        with get_current_context().set(ipu_id=ipu):
            part = ops.add_n(*squares)
            if holders < replicas:
                part = ops.collectives.replicated_all_reduce(part) / holders
        total.append(placement.copy_to(part, here))
    return ops.sqrt(reduce(ops.add, total))


def global_norm(variables: Tensors, gradients: Tensors, loss_scaling: float | popxl.Tensor = 1.0) -> popxl.Tensor:
    """Global norm of all gradients: a float32 scalar, equal on all replicas.

    Of variables in pieces, or with a value for each group of replicas, the gradients of all pieces and groups count,
    and each once.

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
    here, parts = get_current_context().ipu_id, dict[int | None, list[Trained]]()
    for each in trained:
        parts.setdefault(placement.ipu_of(each.gradient), []).append(each)
    replicas = popxl.gir().replication_factor
    answers = []
    for ipu, there in parts.items():
        with get_current_context().set(ipu_id=ipu):
            answer = all_finite((each.gradient for each in there), any(each.copies < replicas for each in there))
        answers.append(placement.copy_to(answer, here))
    return reduce(ops.logical_and, answers)


class Step:
    """One optimizer step: formula inputs for each variable.

    Args:
        optimizer: its name.
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

    def state_variables(self, each: Trained, **slots: Any) -> list[popxl.Tensor]:
        """State of one variable: named dtypes, optionally with shapes."""
        made = []
        for name, how in slots.items():
            v = each.state(name, *(how if isinstance(how, tuple) else (how,)))
            self.state[f"{each.name}.{name}"] = v
            made.append(v if v.piece is None else v.piece)
        return made

    @cached_property
    def factors(self) -> tuple[popxl.Tensor, ...]:
        """Learning rate, gradient factor, and optional step condition."""
        known = tuple(
            each if isinstance(each, popxl.Tensor) else popxl.constant(each, popxl.float32)
            for each in (self.lr, self.scale)
        )
        return known if self.finite is None else (*known, self.finite)

    def update(self, kind: OpKind, each: Trained, slots: Mapping[str, Any], **how: Any) -> None:
        """Update one variable and its state by an op on its IPU; `slots` as for `state_variables`."""
        ipu = self._placement.ipu_of(each.tensor)
        gradient, number, *factors = (
            self._placement.copy_to(t, ipu) for t in (each.gradient, self.number, *self.factors)
        )
        with get_current_context().set(ipu_id=ipu):
            kind(each.tensor, gradient, number, *self.state_variables(each, **slots), *factors, **how)

    @property
    def named_state(self) -> NamedTensors:
        """All state by name."""
        return NamedTensors.from_dict(self.state)


def _formula(name: str, function: Callable[..., Any], *slots: str, traits: Iterable[Trait] = ()) -> OpKind:
    """Declare an op that applies a float32 formula, overwriting variable and state."""

    def lowering(variable: Array, gradient: Array, step: Array, *others: Array, **numbers: Any) -> tuple[Array, ...]:
        kept, (lr, scale, *made) = others[: len(slots)], others[len(slots) :]
        w, g, t, *wide = (x.astype(jnp.float32) for x in (variable, gradient, step, *kept))
        return select_if_finite(made, function(w, g * scale, t, lr, *wide, **numbers), (w, *wide))

    changed = frozenset({0, *range(3, 3 + len(slots))})
    return OpKind(
        name,
        lowering,
        shape=lambda *operands, **numbers: (),
        gradient=None,
        traits=[Overwrites(positions=lambda attributes: changed, aliased=False), Colocated(), *traits],
        key=f"popxl_addons.{name}",
    )


def select_if_finite(made: Sequence[Array], new: Iterable[Array], old: Iterable[Array]) -> tuple[Array, ...]:
    """Select new arrays, or old ones if the one-element condition `made` is false."""
    return tuple(new) if not made else tuple(jnp.where(made[0], *each) for each in zip(new, old, strict=True))


def _updated(
    step: Step, kind: OpKind, slots: Mapping[str, popxl.dtype], decay: Callable[[str], float], **numbers: Any
) -> NamedTensors:
    """Update all variables and their state. Returns optimizer state."""
    for each in step.trained:
        step.update(kind, each, slots, **numbers, decay=decay(each.name))
    return step.named_state


# Optimisers ---------------------------------------------------------------------------------------------------------


def _adamw_formula(
    w: Array, g: Array, t: Array, lr: Array, m: Array, v: Array, *, beta1: float, beta2: float, eps: float, decay: float
) -> tuple[Array, ...]:
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    return w - lr * (adam_direction(m, v, t, beta1, beta2, eps) + decay * w), m, v


_adamw = _formula("AdamWStep", _adamw_formula, "first_moment", "second_moment")


def adamw(
    variables: Tensors,
    gradients: Tensors,
    lr: Rate,
    *,
    beta1: float = 0.9,
    beta2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    decays: Callable[[str], bool] = lambda name: True,
    clip_norm: float | None = None,
    loss_scaling: Scale = 1.0,
    moment_dtype: popxl.dtype = popxl.float32,
) -> NamedTensors:
    """In-place AdamW step on all variables: call once, in the main graph.

    Args:
        variables: what to train, by name or in a sequence: variables, or each replica's pieces of them.
        gradients: theirs, under the same names or in the same order; the same on all replicas that share a variable.
        lr: the learning rate: a number, a tensor, or a schedule such as `schedules.cosine(...)`, which is computed in
            the program.
        beta1, beta2: what stays of the moments in each step.
        eps: added to the root of the second moment.
        weight_decay: what each step takes of a variable, times the learning rate.
        decays: which variables that is done to, by name. Norms and biases are often left out.
        clip_norm: the norm that all gradients together have at most; larger ones are scaled down to it.
        loss_scaling: what the loss was multiplied by: gradients are divided by it. With what `DynamicLossScaling`'s
            `init()` returns, a step whose gradients are not all finite changes nothing but the scaling.
        moment_dtype: dtype of the moments. (`AdamOptimizerStep` keeps its first one in float16 by default.)

    Returns:
        The state, by name: `step`, a float32 scalar that counts, and `<variable>.first_moment` and `.second_moment`;
        and with a `LossScale` its `loss_scaling.value` and `.good_steps`.

    Raises:
        ValueError: outside of the main graph, for gradients that are missing, left over, or of other shapes, and for
            variables or moments that are not of floating point numbers.
        TypeError: for anything but tensors, numbers and the like.

    See also: `torch.optim.AdamW`, `optax.adamw`.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     w, dw = popxl.variable([1.0, 2.0], name="w"), popxl.constant([0.5, 0.25])
        ...     state = adamw([w], [dw], lr=0.1, clip_norm=1.0)
        >>> state.keys_flat()
        ['step', 'w.first_moment', 'w.second_moment']
    """
    how, decay = numbers("adamw", beta1=beta1, beta2=beta2, eps=eps), weight_decays("adamw", weight_decay, decays)
    kept = check_floating(moment_dtype, "adamw: `moment_dtype`")
    slots = dict.fromkeys(("first_moment", "second_moment"), kept)
    with popxl.in_sequence():
        step = Step("adamw", variables, gradients, lr, clip_norm, loss_scaling)
        return _updated(step, _adamw, slots, decay, **how)


def _sgd_formula(
    w: Array, g: Array, t: Array, lr: Array, *velocity: Array, momentum: float, nesterov: bool, decay: float
) -> tuple[Array, ...]:
    g = g + decay * w
    if not velocity:
        return (w - lr * g,)
    v = momentum * velocity[0] + g
    return w - lr * (g + momentum * v if nesterov else v), v


_sgd, _momentum = _formula("SGDStep", _sgd_formula), _formula("MomentumStep", _sgd_formula, "velocity")


def sgd(
    variables: Tensors,
    gradients: Tensors,
    lr: Rate,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    decays: Callable[[str], bool] = lambda name: True,
    clip_norm: float | None = None,
    loss_scaling: Scale = 1.0,
    velocity_dtype: popxl.dtype = popxl.float32,
) -> NamedTensors:
    """One step of stochastic gradient descent, with momentum or without, on all variables, in place.

    Args:
        momentum: what stays of the velocity in each step. For 0 there is none.
        nesterov: look ahead, by the velocity.
        weight_decay: times the variable, it is added to the gradient.
        variables, gradients, lr, decays, clip_norm, loss_scaling: as for `adamw`.
        velocity_dtype: dtype of the velocity.

    Returns:
        The state, by name: `step`, and with momentum `<variable>.velocity`.

    Raises:
        ValueError, TypeError: as `adamw`.

    See also: `torch.optim.SGD`.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     w, dw = popxl.variable([1.0, 2.0], name="w"), popxl.constant([0.5, 0.25])
        ...     state = sgd([w], [dw], lr=0.1, momentum=0.9)
        >>> state.keys_flat()
        ['step', 'w.velocity']
    """
    how, decay = numbers("sgd", momentum=momentum), weight_decays("sgd", weight_decay, decays)
    ahead, kept = flag(nesterov, "sgd: `nesterov`"), check_floating(velocity_dtype, "sgd: `velocity_dtype`")
    kind, slots = (_momentum, {"velocity": kept}) if how["momentum"] else (_sgd, {})
    with popxl.in_sequence():
        step = Step("sgd", variables, gradients, lr, clip_norm, loss_scaling)
        return _updated(step, kind, slots, decay, **how, nesterov=ahead)


def _lion_formula(
    w: Array, g: Array, t: Array, lr: Array, m: Array, *, beta1: float, beta2: float, decay: float
) -> tuple[Array, ...]:
    return w - lr * (jnp.sign(beta1 * m + (1 - beta1) * g) + decay * w), beta2 * m + (1 - beta2) * g


_lion = _formula("LionStep", _lion_formula, "momentum")


def lion(
    variables: Tensors,
    gradients: Tensors,
    lr: Rate,
    *,
    beta1: float = 0.9,
    beta2: float = 0.99,
    weight_decay: float = 0.01,
    decays: Callable[[str], bool] = lambda name: True,
    clip_norm: float | None = None,
    loss_scaling: Scale = 1.0,
    moment_dtype: popxl.dtype = popxl.float32,
) -> NamedTensors:
    """In-place Lion step on all variables, using only momentum signs.

    Args:
        beta1: how much of the momentum is in the direction of a step.
        beta2: what stays of the momentum.
        weight_decay: what each step takes of a variable, times the learning rate.
        variables, gradients, lr, decays, clip_norm, loss_scaling, moment_dtype: as for `adamw`.

    Returns:
        The state, by name: `step`, and `<variable>.momentum`.

    Raises:
        ValueError, TypeError: as `adamw`.

    See also: `optax.lion`; Chen et al., https://arxiv.org/abs/2302.06675.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     w, dw = popxl.variable([1.0, 2.0], name="w"), popxl.constant([0.5, 0.25])
        ...     state = lion([w], [dw], lr=0.01)
        >>> state.keys_flat()
        ['step', 'w.momentum']
    """
    how, decay = numbers("lion", beta1=beta1, beta2=beta2), weight_decays("lion", weight_decay, decays)
    slots = {"momentum": check_floating(moment_dtype, "lion: `moment_dtype`")}
    with popxl.in_sequence():
        step = Step("lion", variables, gradients, lr, clip_norm, loss_scaling)
        return _updated(step, _lion, slots, decay, **how)


def _adafactor_formula(
    w: Array, g: Array, t: Array, lr: Array, *variances: Array, means: Means | None = None, **numbers: float
) -> tuple[Array, ...]:
    means = means or Means()
    new = t ** numbers["beta2_decay"]
    smallest, squares = numbers["eps1"], g * g
    if len(variances) == 2:
        rows, columns = variances
        rows = rows + new * (means.of_rows(squares) - rows)
        columns = columns + new * (means.of_columns(squares) - columns)
        variances = (rows, columns)
        variance = means.own_shard(rows * columns / jnp.maximum(means.over_rows(rows), smallest))
    else:
        variance = variances[0] + new * (squares - variances[0])
        variances = (variance,)
    update = g * jax.lax.rsqrt(jnp.maximum(variance, smallest * smallest))
    update = update / jnp.maximum(1.0, jnp.sqrt(means.global_mean(update * update)) / numbers["clip"])
    size = jnp.maximum(numbers["eps2"], jnp.sqrt(means.global_mean(w * w)))
    rate = size * jnp.minimum(lr, jax.lax.rsqrt(t))
    return w * (1 - lr * numbers["decay"]) - rate * update, *variances


def _adafactor_in_pieces(
    *arrays: Array, group: Group, whole: tuple[int, ...], pieces: int, **numbers: float
) -> tuple[Array, ...]:
    return _adafactor_formula(*arrays, means=MeansOverPieces(group, whole, pieces), **numbers)


def _adafactor_in_groups(
    *arrays: Array,
    group: Group,
    axis: int,
    whole: tuple[int, ...],
    pieces: int = 1,
    holders: tuple[int, int] | None = None,
    **numbers: float,
) -> tuple[Array, ...]:
    """Adafactor over replica groups: `group` spans all replicas, `holders` the shards of one group value."""
    own = Means() if holders is None else MeansOverPieces(Within(group, *holders), whole, pieces)
    return _adafactor_formula(*arrays, means=MeansOverGroups(own, group, axis), **numbers)


_MATRIX, _VECTOR = ("row_variance", "column_variance"), ("variance",)
_adafactor_of_matrices = _formula("AdafactorStep", _adafactor_formula, *_MATRIX)
_adafactor_of_vectors = _formula("AdafactorVectorStep", _adafactor_formula, *_VECTOR)
_adafactor_of_cut_matrices, _adafactor_of_cut_vectors = (
    _formula(name, _adafactor_in_pieces, *slots, traits=[BetweenReplicas()])
    for name, slots in (("AdafactorPieceStep", _MATRIX), ("AdafactorVectorPieceStep", _VECTOR))
)
_adafactor_of_divided_matrices, _adafactor_of_divided_vectors = (
    _formula(name, _adafactor_in_groups, *slots, traits=[BetweenReplicas()])
    for name, slots in (("AdafactorGroupStep", _MATRIX), ("AdafactorVectorGroupStep", _VECTOR))
)


def adafactor(
    variables: Tensors,
    gradients: Tensors,
    lr: Rate = 0.01,
    *,
    beta2_decay: float = -0.8,
    eps: tuple[float, float] = (float(np.finfo(np.float32).eps), 1e-3),
    update_clip: float = 1.0,
    weight_decay: float = 0.0,
    decays: Callable[[str], bool] = lambda name: True,
    clip_norm: float | None = None,
    loss_scaling: Scale = 1.0,
) -> NamedTensors:
    """In-place Adafactor step on all variables, with factored row and column state for matrices.

    The formula is PyTorch's, with its defaults for float32. Optax's has other ones: it takes as matrices only what has
    two dimensions of at least 128, and of more than two dimensions the two largest, where this takes the last two; it
    does not bound the learning rate by `1 / sqrt(t)`; and its smallest variance is 1e-30. The same numbers as here come
    of `optax.adafactor(min_dim_size_to_factor=1)` for vectors and matrices, where neither bound is met; Optax's own of
    `from_optax(optax.adafactor(lr))`.

    Of a variable that groups of replicas divide between them, as with tensor parallelism, the numbers are those of the
    whole, if it has a `group_axis`: `Linear(…, replica_grouping="data", group_axis=1)`. Without one, each group has a
    variable of its own.

    Args:
        lr: an upper bound of the learning rate, which is relative to the size of a variable.
        beta2_decay: the second moment forgets `1 - t ** beta2_decay` less in each step t.
        eps: the smallest variance, and the smallest size of a variable.
        update_clip: the largest root mean square of what a variable is changed by.
        weight_decay: what each step takes of a variable, times the learning rate.
        variables, gradients, decays, clip_norm, loss_scaling: as for `adamw`.

    Returns:
        The state, by name: `step`; `<variable>.row_variance` and `.column_variance`, which are not in pieces, or
        `.variance` of vectors.

    Raises:
        ValueError, TypeError: as `adamw`.

    See also: `torch.optim.Adafactor`; Shazeer and Stern, https://arxiv.org/abs/1804.04235.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     w, dw = popxl.variable(np.ones((2, 3)), name="w"), popxl.constant(np.ones((2, 3)))
        ...     state = adafactor([w], [dw])
        >>> state.w.row_variance.shape, state.w.column_variance.shape
        ((2, 1), (1, 3))
    """
    if not isinstance(eps, tuple | list) or len(eps) != 2:
        raise TypeError(f"adafactor: `eps` must be a pair of numbers; got {eps!r} ({type(eps).__name__}).")
    said = numbers("adafactor", beta2_decay=beta2_decay, update_clip=update_clip)
    smallest = numbers("adafactor", **{"eps[0]": eps[0], "eps[1]": eps[1]})
    named: dict[str, Any] = dict(
        zip(("beta2_decay", "clip", "eps1", "eps2"), (*said.values(), *smallest.values()), strict=True)
    )
    decay = weight_decays("adafactor", weight_decay, decays)
    with popxl.in_sequence():
        step = Step("adafactor", variables, gradients, lr, clip_norm, loss_scaling)
        for each in step.trained:
            shape, f32, how = each.whole_shape, popxl.float32, named | {"decay": decay(each.name)}
            matrices, vectors = _adafactor_of_matrices, _adafactor_of_vectors
            holders = members("adafactor", each.grouping.const_rg)
            if each.tensor.meta_shape:
                matrices, vectors = _adafactor_of_cut_matrices, _adafactor_of_cut_vectors
                how |= {"whole": shape, "pieces": each.pieces, **holders}
            if each.axis is not None:
                matrices, vectors = _adafactor_of_divided_matrices, _adafactor_of_divided_vectors
                how |= {"whole": shape, "axis": each.axis - len(shape), **members("adafactor", None)}
                if each.tensor.meta_shape:
                    how |= {"holders": (holders["stride"], holders["group_size"])}
            if len(shape) > 1:
                rows, columns = (*shape[:-1], 1), (*shape[:-2], 1, shape[-1])
                step.update(matrices, each, {"row_variance": (f32, rows), "column_variance": (f32, columns)}, **how)
            else:
                step.update(vectors, each, {"variance": f32}, **how)
        return step.named_state
