"""Adam and its relatives: the direction of a step from the moments of the gradient, and the step that LAMB takes.

The moments are accumulators (`popxl.ops.var_updates.accumulate`); for Adam and Adamax the step itself is
`ops.scaled_add_(weight, direction, b=-learning_rate)`.
"""

from __future__ import annotations

from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from popxl.core.declaration import OpKind
from popxl.core.tensor import Tensor
from popxl.core.traits import Colocated, Overwrites
from popxl.errors import PopxlError
from popxl.ops.families import REAL, public
from popxl.ops.precision import wide_dtype
from popxl.ops.var_updates.factors import factor, number, one_number, optional_tensor
from popxl.values.shapes import like_first, meta_shape_of
from popxl.values.spec import TensorSpec

# The direction ------------------------------------------------------------------------------------------------------


def minus_correction(beta: Any, steps: Any) -> Any:
    """beta ** steps - 1, in a form that is accurate for beta close to 1. The quotient takes its sign: on TPUs, negating
    a single number would be a separate operation."""
    with np.errstate(divide="ignore", invalid="ignore"):  # of 0, which is fine, and of less, which gives NaN
        logarithm = float(np.log(beta)) if isinstance(beta, float) else jnp.log(beta)
    return jnp.expm1(steps * logarithm)


def adam_direction(m: Any, v: Any, steps: Any, beta1: Any, beta2: Any, epsilon: Any) -> Any:
    """The direction of a step of Adam, of arrays: m̂ / (√v̂ + epsilon).

    Args:
        m, v: the moments, after this step.
        steps: the number of the step, from 1 on; for `None` the moments are not corrected.
        beta1, beta2: decay rates of the moments: plain numbers, or arrays of one element.
        epsilon: a number.
    """
    if steps is not None:
        m, v = -m / minus_correction(beta1, steps), -v / minus_correction(beta2, steps)
    return m / (jnp.sqrt(v) + epsilon)


def _direction(
    acc_first_order: Any,
    acc_second_order: Any,
    weight: Any = None,
    time_step: Any = None,
    weight_decay: Any = None,
    beta1: Any = None,
    beta2: Any = None,
    epsilon: Any = 1e-7,
    *,
    mode: str,
) -> Any:
    dtype = wide_dtype(acc_first_order)
    m, v = acc_first_order.astype(dtype), acc_second_order.astype(dtype)
    time_step = None if time_step is None else time_step + 1
    steps = None if time_step is None else number(time_step, dtype)
    if mode == "adamax":
        x = -m / minus_correction(number(beta1, dtype), steps) / (v + number(epsilon, dtype))
    else:
        x = adam_direction(m, v, steps, number(beta1, dtype), number(beta2, dtype), number(epsilon, dtype))
    if weight is not None:
        x = x + number(weight_decay, dtype) * weight.astype(dtype)
    return x if time_step is None else (x, time_step)


def _directed(
    acc_first_order: Any,
    acc_second_order: Any,
    weight: Any = None,
    *factors: Any,
    mode: str,
) -> TensorSpec:
    operands = [t for t in (acc_first_order, acc_second_order, weight) if t is not None]
    if any(t.shape != acc_first_order.shape for t in operands):
        raise PopxlError("the moments, and the weight that decays, have to have the same shape.")
    one_number(*factors)
    dtype = acc_first_order.dtype if weight is None else weight.dtype
    return TensorSpec(acc_first_order.shape, dtype, meta_shape_of(*operands))


_adam_updater = OpKind(
    "AdamUpdater",
    _direction,
    shape=_directed,
    result="Updater",
    gradient=None,
    traits=[
        Overwrites("time_step", aliased=False),
        Colocated("acc_first_order", "acc_second_order", "weight", "time_step", "weight_decay"),
        *REAL,
    ],
)


def _decaying(name: str, weight: Any, weight_decay: Any) -> tuple[Any, Any]:
    """Weight and decay as the op takes them: both, or neither if nothing decays."""
    weight_decay = factor(weight_decay, f"{name}: `weight_decay`", optional=True)
    if weight_decay is None or (isinstance(weight_decay, float) and weight_decay == 0):
        return None, None
    if weight is None:
        raise ValueError(f"{name}: Weight decay requires weight to not be None. Pass the tensor that decays.")
    return weight, weight_decay


class Updater(Protocol):
    """The direction of a step from two moments."""

    def __call__(
        self,
        acc_first_order: Tensor,
        acc_second_order: Tensor,
        weight: Tensor | None = None,
        time_step: Tensor | None = None,
        weight_decay: float | Tensor | None = None,
        beta1: float | Tensor | None = None,
        beta2: float | Tensor | None = None,
        epsilon: float | Tensor = 1e-07,
    ) -> Tensor: ...


def _updater(name: str, mode: str, meaning: str, then: str) -> Updater:
    """Declare an optimizer updater; variants differ in how they apply the result."""

    def updater(
        acc_first_order: Tensor,
        acc_second_order: Tensor,
        weight: Tensor | None = None,
        time_step: Tensor | None = None,
        weight_decay: float | Tensor | None = None,
        beta1: float | Tensor | None = None,
        beta2: float | Tensor | None = None,
        epsilon: float | Tensor = 1e-07,
    ) -> Tensor:
        weight, weight_decay = _decaying(name, weight, weight_decay)
        if time_step is None:
            beta1 = beta2 = None
        elif beta1 is None or beta2 is None:
            raise ValueError(f"{name}: Bias correction requires both beta1 and beta2 to not be None. Pass both.")
        else:
            beta1, beta2 = factor(beta1, f"{name}: `beta1`"), factor(beta2, f"{name}: `beta2`")
        optional_tensor(name, weight=weight, time_step=time_step)
        factors = weight_decay, beta1, beta2, factor(epsilon, f"{name}: `epsilon`")
        return _adam_updater(acc_first_order, acc_second_order, weight, time_step, *factors, mode=mode)

    doc = f"""{meaning}

    With m and v the moments, w the weight and T the number of the step: m̂ / (√v̂ + epsilon) + weight_decay w, where
    m̂ = m / (1 - beta1ᵀ) and v̂ = v / (1 - beta2ᵀ) if `time_step` is given, otherwise m̂ = m and v̂ = v. Computed in
    float32 and rounded once. The direction is that of m: subtract it. Neither the moments nor the weight change.

    Args:
        acc_first_order: m, the moving average of the gradient.
        acc_second_order: v, the moving average of its square; of the shape of m, maybe of another dtype.
        weight: the weight, of the same shape. It is only used if it decays.
        time_step: the number of steps so far, 0 at first: a float32 or integer tensor of one element. It is counted
            up in place, before it is used.
        weight_decay: a number or a tensor of one element; nothing decays for 0 and `None`.
        beta1, beta2: what stays of the moments in each step: numbers, or tensors of one element. Only used with
            `time_step`, which needs both.
        epsilon: a number or a tensor of one element, added outside of the root.

    Returns:
        A new tensor of the shape of m; its dtype is that of m, or that of the weight if it decays. No gradient flows.

    Raises:
        ValueError: if a weight should decay that is not given, or a `beta` is missing.
        PopxlError: if the shapes differ, or a factor has several elements.
        TypeError: if a factor is neither a number nor a tensor, or `weight` or `time_step` is no tensor.

    See also: `torch.optim.{"Adam" if mode == "adam" else "AdamW"}`.

    Example:
        >>> step = ops.var_updates.{name}(m, v, w, t, weight_decay=0.01, beta1=0.9, beta2=0.999)
        >>> {then}"""
    return public(updater, _adam_updater, name, doc)


adam_updater = _updater(
    "adam_updater",
    "adam",
    "The direction of a step of Adam.",
    "ops.scaled_add_(w, step, b=-learning_rate)",
)
lamb_updater = _updater(
    "lamb_updater",
    "lamb",
    "The direction of a step of LAMB: that of Adam, whose length `adam_var_update` then makes to fit the weight.",
    "ops.var_updates.adam_var_update(w, step, ops.lamb_square(w), ops.lamb_square(step), learning_rate)",
)


def adamax_updater(
    acc_first_order: Tensor,
    acc_second_order: Tensor,
    weight: Tensor | None = None,
    time_step: Tensor | None = None,
    weight_decay: float | Tensor | None = None,
    beta1: float | Tensor = 0.9,
    epsilon: float | Tensor = 1e-07,
) -> Tensor:
    """Update direction of an Adamax step.

    As `adam_updater`, but v is an infinity norm, of which no root is taken and which needs no correction:
    m / (1 - beta1ᵀ) / (v + epsilon) + weight_decay w. The norm v ← max(beta2 v, |gradient|) is made of other ops.

    Args:
        acc_first_order: m, the moving average of the gradient.
        acc_second_order: v, the infinity norm; of the shape of m, maybe of another dtype.
        weight: weight, of the same shape. It is only used for weight decay.
        time_step: the number of steps so far, 0 at first: a float32 or integer tensor of one element. It is counted
            up in place, before it is used. It has to be given.
        weight_decay: a number or a tensor of one element; nothing decays for 0 and `None`.
        beta1: decay rate of m: a number, or a tensor of one element.
        epsilon: a number or a tensor of one element.

    Returns:
        A new tensor of the shape of m; its dtype is that of m, or that of the weight if it decays. No gradient flows.

    Raises:
        ValueError: if `time_step` is missing, or `weight` is missing for weight decay.
        PopxlError: if the shapes differ, or a factor has several elements.
        TypeError: if a factor is neither a number nor a tensor, or `weight` or `time_step` is not a tensor.

    See also: `torch.optim.Adamax`.

    Example:
        >>> norm = ops.maximum(second_moment * 0.999, ops.abs(gradient))
        >>> ops.var_updates.copy_var_update_(second_moment, norm)
        >>> direction = ops.var_updates.adamax_updater(first_moment, second_moment, time_step=step, beta1=0.9)
        >>> ops.scaled_add_(w, direction, b=-learning_rate)
    """
    name = "adamax_updater"
    weight, weight_decay = _decaying(name, weight, weight_decay)
    if time_step is None:
        raise ValueError(f"{name}: AdaMax requires time_step to not be None. Pass the tensor that counts the steps.")
    optional_tensor(name, weight=weight, time_step=time_step)
    beta1, epsilon = factor(beta1, f"{name}: `beta1`"), factor(epsilon, f"{name}: `epsilon`")
    operands = acc_first_order, acc_second_order, weight, time_step, weight_decay, beta1, None, epsilon
    return _adam_updater(*operands, mode="adamax")


# The step -----------------------------------------------------------------------------------------------------------


def _stepped(t: Any, x: Any, r1: Any, r2: Any, learning_rate: Any = None, max_weight_norm: Any = None) -> Any:
    dtype = wide_dtype(t)
    weight_norm, step_norm = jnp.sqrt(number(r1, dtype)), jnp.sqrt(number(r2, dtype))
    if max_weight_norm is not None:
        weight_norm = jnp.minimum(weight_norm, number(max_weight_norm, dtype))
    ratio = jnp.where((weight_norm == 0) | (step_norm == 0), 1, weight_norm / step_norm)
    if learning_rate is not None:
        ratio = ratio * number(learning_rate, dtype)
    return t.astype(dtype) - ratio * x.astype(dtype)


def _step_spec(t: Any, x: Any, *factors: Any) -> TensorSpec:
    if t.shape != x.shape:
        raise PopxlError("`t` and `x` have to have the same shape; nothing is broadcast.")
    one_number(*factors)
    meta_shape_of(t, x)
    return like_first(t)


_adam_var_update = OpKind(
    "AdamVarUpdate", _stepped, shape=_step_spec, traits=[Overwrites("t"), Colocated(), *REAL], gradient=None
)


def adam_var_update(
    t: Tensor,
    x: Tensor,
    r1: Tensor,
    r2: Tensor,
    learning_rate: float | Tensor | None = None,
    max_weight_norm: float | Tensor | None = None,
) -> Tensor:
    """The step of LAMB, in place: t ← t - ratio learning_rate x, with ratio = min(√r1, max_weight_norm) / √r2.

    The ratio is 1 where `r1`, `r2` or `max_weight_norm` is 0. Despite its name the function changes `t`.

    Args:
        t: the weight.
        x: the direction of the step, from `lamb_updater`: of the shape of `t`; its dtype may differ.
        r1, r2: squares of the norms of the weight and of the direction, from `lamb_square`.
        learning_rate: a number or a tensor of one element; 1 by default.
        max_weight_norm: upper limit of the weight's norm in the formula: a number or a tensor of one element. By
            default there is no limit.

    Returns:
        An alias of `t`. No gradient flows; autodiff refuses graphs with this op.

    Raises:
        PopxlError: if the shapes differ, or one of the other operands has several elements.
        TypeError: if `learning_rate` or `max_weight_norm` is neither a number nor a tensor.

    Example:
        >>> x = ops.var_updates.lamb_updater(first_moment, second_moment)
        >>> ops.var_updates.adam_var_update(w, x, ops.lamb_square(w), ops.lamb_square(x), 0.001, 10.0)
    """
    factors = (
        factor(learning_rate, "adam_var_update: `learning_rate`", optional=True),
        factor(max_weight_norm, "adam_var_update: `max_weight_norm`", optional=True),
    )
    return _adam_var_update(t, x, r1, r2, *factors)
