"""Optimisers as functions: one call updates all variables of a model, and makes the optimiser's state.

    state = optimizers.adamw(variables, gradients, lr=3e-4, clip_norm=1.0)

Formulas are computed in float32, whatever the dtype of the variables, and rounded once. The state of a sharded variable
is sharded too. For one variable at a time, as a graph of its own: `AdamOptimizerStep`. Optax's transformations are in
`popxl_addons.optimizers.of_optax`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import popxl
from popxl.extend.arguments import flag
from popxl.extend.collectives import Group, members
from popxl.extend.kernels import Array
from popxl.extend.ops import ELEMENTWISE, adam_direction
from popxl.op import BetweenReplicas, OpKind, ShardingRule, Trait
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.optimizers.means import Means, MeansOverGroups, ShardedMeans, SubGroup
from popxl_addons.optimizers.steps import (
    Rate,
    Scale,
    Step,
    Tensors,
    check_floating,
    formula_op,
    numbers,
    update_all,
    weight_decays,
)


def _adamw_formula(
    w: Array, g: Array, t: Array, lr: Array, m: Array, v: Array, *, beta1: float, beta2: float, eps: float, decay: float
) -> tuple[Array, ...]:
    m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
    return w - lr * (adam_direction(m, v, t, beta1, beta2, eps) + decay * w), m, v


_adamw = formula_op("AdamWStep", _adamw_formula, "first_moment", "second_moment", traits=[ELEMENTWISE])


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
        variables: variables to train, by name or in a sequence, or each replica's shards of them.
        gradients: gradients of the variables, under the same names or in the same order; the same on all replicas that
            share a variable.
        lr: the learning rate: a number, a tensor, or a schedule such as `schedules.cosine(...)`, which is computed in
            the program.
        beta1, beta2: decay rates of the moments.
        eps: constant added to the root of the second moment.
        weight_decay: decay of a variable in each step, relative to the learning rate.
        decays: filter of the variables to decay, by name. Norms and biases are often left out.
        clip_norm: largest norm of all gradients together; larger ones are scaled down to it.
        loss_scaling: factor of the loss: gradients are divided by it. With the result of `DynamicLossScaling`'s
            `init()`, a step whose gradients are not all finite changes nothing but the scaling.
        moment_dtype: dtype of the moments. (`AdamOptimizerStep` keeps its first one in float16 by default.)

    Returns:
        The state by name: `step`, a float32 step count; `<variable>.first_moment` and `.second_moment`; with a
        `LossScale`, its `loss_scaling.value` and `.good_steps`.

    Raises:
        ValueError: outside of the main graph, for gradients that are missing, left over, or of other shapes, and for
            variables or moments that are not of floating point numbers.
        TypeError: for a value of an unsupported type.

    See also: `torch.optim.AdamW`, `optax.adamw`.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     w, dw = popxl.variable([1.0, 2.0], name="w"), popxl.constant([0.5, 0.25])
        ...     state = adamw([w], [dw], lr=0.1, clip_norm=1.0)
        >>> state.keys_flat()
        ['step', 'w.first_moment', 'w.second_moment']
    """
    constants, decay = numbers("adamw", beta1=beta1, beta2=beta2, eps=eps), weight_decays("adamw", weight_decay, decays)
    dtype = check_floating(moment_dtype, "adamw: `moment_dtype`")
    slots = dict.fromkeys(("first_moment", "second_moment"), dtype)
    with popxl.in_sequence():
        step = Step("adamw", variables, gradients, lr, clip_norm, loss_scaling)
        return update_all(step, _adamw, slots, decay, **constants)


def _sgd_formula(
    w: Array, g: Array, t: Array, lr: Array, *velocity: Array, momentum: float, nesterov: bool, decay: float
) -> tuple[Array, ...]:
    g = g + decay * w
    if not velocity:
        return (w - lr * g,)
    v = momentum * velocity[0] + g
    return w - lr * (g + momentum * v if nesterov else v), v


_sgd = formula_op("SGDStep", _sgd_formula, traits=[ShardingRule(linear=("variable gradient",))])
_momentum = formula_op(
    "MomentumStep", _sgd_formula, "velocity", traits=[ShardingRule(linear=("variable gradient others[0]",))]
)


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
        momentum: decay rate of the velocity. For 0 there is none.
        nesterov: look ahead, by the velocity.
        weight_decay: times the variable, it is added to the gradient.
        variables, gradients, lr, decays, clip_norm, loss_scaling: as for `adamw`.
        velocity_dtype: dtype of the velocity.

    Returns:
        The state, by name: `step`, and with momentum `<variable>.velocity`.

    Raises:
        ValueError, TypeError: as for `adamw`.

    See also: `torch.optim.SGD`.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     w, dw = popxl.variable([1.0, 2.0], name="w"), popxl.constant([0.5, 0.25])
        ...     state = sgd([w], [dw], lr=0.1, momentum=0.9)
        >>> state.keys_flat()
        ['step', 'w.velocity']
    """
    options, decay = numbers("sgd", momentum=momentum), weight_decays("sgd", weight_decay, decays)
    ahead, dtype = flag(nesterov, "sgd: `nesterov`"), check_floating(velocity_dtype, "sgd: `velocity_dtype`")
    kind, slots = (_momentum, {"velocity": dtype}) if options["momentum"] else (_sgd, {})
    with popxl.in_sequence():
        step = Step("sgd", variables, gradients, lr, clip_norm, loss_scaling)
        return update_all(step, kind, slots, decay, **options, nesterov=ahead)


def _lion_formula(
    w: Array, g: Array, t: Array, lr: Array, m: Array, *, beta1: float, beta2: float, decay: float
) -> tuple[Array, ...]:
    return w - lr * (jnp.sign(beta1 * m + (1 - beta1) * g) + decay * w), beta2 * m + (1 - beta2) * g


_lion = formula_op("LionStep", _lion_formula, "momentum", traits=[ELEMENTWISE])


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
        beta1: share of the momentum in the direction of a step.
        beta2: decay rate of the momentum.
        weight_decay: decay of a variable in each step, relative to the learning rate.
        variables, gradients, lr, decays, clip_norm, loss_scaling, moment_dtype: as for `adamw`.

    Returns:
        The state, by name: `step`, and `<variable>.momentum`.

    Raises:
        ValueError, TypeError: as for `adamw`.

    See also: `optax.lion`; Chen et al., https://arxiv.org/abs/2302.06675.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     w, dw = popxl.variable([1.0, 2.0], name="w"), popxl.constant([0.5, 0.25])
        ...     state = lion([w], [dw], lr=0.01)
        >>> state.keys_flat()
        ['step', 'w.momentum']
    """
    constants, decay = numbers("lion", beta1=beta1, beta2=beta2), weight_decays("lion", weight_decay, decays)
    slots = {"momentum": check_floating(moment_dtype, "lion: `moment_dtype`")}
    with popxl.in_sequence():
        step = Step("lion", variables, gradients, lr, clip_norm, loss_scaling)
        return update_all(step, _lion, slots, decay, **constants)


def _adafactor_formula(
    w: Array, g: Array, t: Array, lr: Array, *variances: Array, means: Means | None = None, **numbers: float
) -> tuple[Array, ...]:
    """New variable and variances: of rows and of columns, or of each element."""
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


def _sharded_adafactor(
    *arrays: Array, group: Group, whole: tuple[int, ...], pieces: int, **numbers: float
) -> tuple[Array, ...]:
    return _adafactor_formula(*arrays, means=ShardedMeans(group, whole, pieces), **numbers)


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
    group_means = Means() if holders is None else ShardedMeans(SubGroup(group, *holders), whole, pieces)
    return _adafactor_formula(*arrays, means=MeansOverGroups(group_means, group, axis), **numbers)


def _matrices_and_vectors(division: str, formula: Callable[..., Any], *traits: Trait) -> tuple[OpKind, OpKind]:
    """Declare the steps of variables that are divided like this between replicas."""
    matrices = formula_op(f"Adafactor{division}Step", formula, "row_variance", "column_variance", traits=traits)
    return matrices, formula_op(f"AdafactorVector{division}Step", formula, "variance", traits=traits)


_of_wholes = _matrices_and_vectors("", _adafactor_formula)
_of_shards = _matrices_and_vectors("Piece", _sharded_adafactor, BetweenReplicas())
_of_groups = _matrices_and_vectors("Group", _adafactor_in_groups, BetweenReplicas())


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

    The formula is PyTorch's, with its defaults for float32. Optax's differs: it factors only arrays with two dimensions
    of at least 128, and for more than two dimensions the two largest, where this takes the last two; it does not bound
    the learning rate by `1 / sqrt(t)`; and its smallest variance is 1e-30. `optax.adafactor(min_dim_size_to_factor=1)`
    gives the same numbers as this function for vectors and matrices, unless one of the bounds applies;
    `from_optax(optax.adafactor(lr))` gives Optax's own.

    For a variable that groups of replicas divide between them, as with tensor parallelism, statistics are those of the
    whole, if it has a `group_axis`: `Linear(…, replica_grouping="data", group_axis=1)`. Without one, each group has a
    variable of its own.

    Args:
        lr: an upper bound of the learning rate, which is relative to the size of a variable.
        beta2_decay: the second moment forgets `1 - t ** beta2_decay` less in each step t.
        eps: the smallest variance, and the smallest size of a variable.
        update_clip: largest root mean square of the change of a variable.
        weight_decay: decay of a variable in each step, relative to the learning rate.
        variables, gradients, decays, clip_norm, loss_scaling: as for `adamw`.

    Returns:
        The state by name: `step`; `<variable>.row_variance` and `.column_variance`, unsharded, or `.variance` of
        vectors.

    Raises:
        ValueError, TypeError: as for `adamw`.

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
    factors = numbers("adafactor", beta2_decay=beta2_decay, update_clip=update_clip)
    smallest = numbers("adafactor", **{"eps[0]": eps[0], "eps[1]": eps[1]})
    named: dict[str, Any] = dict(
        zip(("beta2_decay", "clip", "eps1", "eps2"), (*factors.values(), *smallest.values()), strict=True)
    )
    decay = weight_decays("adafactor", weight_decay, decays)
    with popxl.in_sequence():
        step = Step("adafactor", variables, gradients, lr, clip_norm, loss_scaling)
        for t in step.trained:
            shape, f32, attributes = t.whole_shape, popxl.float32, named | {"decay": decay(t.name)}
            matrices, vectors = _of_wholes
            holders = members("adafactor", t.grouping.const_rg)
            if t.tensor.meta_shape:
                matrices, vectors = _of_shards
                attributes |= {"whole": shape, "pieces": t.num_shards, **holders}
            if t.axis is not None:
                matrices, vectors = _of_groups
                attributes |= {"whole": shape, "axis": t.axis - len(shape), **members("adafactor", None)}
                if t.tensor.meta_shape:
                    attributes |= {"holders": (holders["stride"], holders["group_size"])}
            if len(shape) > 1:
                rows, columns = (*shape[:-1], 1), (*shape[:-2], 1, shape[-1])
                step.update(matrices, t, {"row_variance": (f32, rows), "column_variance": (f32, columns)}, **attributes)
            else:
                step.update(vectors, t, {"variance": f32}, **attributes)
        return step.named_state
