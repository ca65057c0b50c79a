"""Optimiser formulas, one function each: new contents of a parameter and its state.

The other parameters of a formula are hyperparameters of a parameter group, under torch's names and with torch's
defaults; those after the star determine its form and cannot be variable. `poptorch.program.rules` makes ops from them.
In a program everything is computed in float32 and rounded once.

`w` is the parameter, `g` its gradient, `t` the number of the step, starting at 1; `d` is the gradient with weight
decay.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from popxl.extend.kernels import Array
from popxl.extend.ops import adam_direction, minus_correction

Number = Any  # a plain number, or an array of one element


def _plus(x: Array, factor: Number, y: Array) -> Array:
    """x + factor y; omits the addition for the plain number 0."""
    return x if isinstance(factor, float) and factor == 0 else x + factor * y


def _moving(average: Array, value: Array, beta: Number) -> Array:
    return beta * average + (1 - beta) * value


def _correction(beta: Number, t: Array) -> Array:
    """1 - beta ** t, accurate for beta near 1."""
    return -minus_correction(beta, t)


def sgd(
    w: Array,
    g: Array,
    v: Array | None = None,
    lr: Number = 1e-3,
    momentum: Number = 0.0,
    dampening: Number = 0.0,
    weight_decay: Number = 0.0,
    nesterov: Number = False,
    velocity_scaling: Number = 1.0,
) -> tuple[Array, ...]:
    d = _plus(g, weight_decay, w)
    if v is None:  # the momentum is constantly 0
        return (w - lr * (1 - dampening) * d,)
    v = momentum * v + (1 - dampening) * velocity_scaling * d
    step = jnp.where(nesterov, velocity_scaling * d + momentum * v, v)
    return w - lr / velocity_scaling * step, v


def adam(
    w: Array,
    g: Array,
    m: Array,
    v: Array,
    t: Array,
    largest: Array | None = None,
    lr: Number = 1e-3,
    beta1: Number = 0.9,
    beta2: Number = 0.999,
    eps: Number = 1e-8,
    weight_decay: Number = 0.0,
    *,
    decoupled_weight_decay: bool = False,
    amsgrad: bool = False,
) -> tuple[Array | None, ...]:
    w, d = _decayed(w, g, lr, weight_decay, decoupled_weight_decay)
    m, v = _moving(m, d, beta1), _moving(v, d * d, beta2)
    largest = None if largest is None else jnp.maximum(largest, v)
    return w - lr * adam_direction(m, v if largest is None else largest, t, beta1, beta2, eps), m, v, largest


def lamb(
    w: Array,
    g: Array,
    m: Array,
    v: Array,
    t: Array,
    lr: Number = 1e-3,
    beta1: Number = 0.9,
    beta2: Number = 0.999,
    eps: Number = 1e-8,
    weight_decay: Number = 1e-2,
    max_weight_norm: Number = 65500.0,
    *,
    bias_correction: bool = True,
) -> tuple[Array, ...]:
    m, v = _moving(m, g, beta1), _moving(v, g * g, beta2)
    x = _plus(adam_direction(m, v, t if bias_correction else None, beta1, beta2, eps), weight_decay, w)
    length, step = jnp.minimum(jnp.linalg.norm(w.ravel()), max_weight_norm), jnp.linalg.norm(x.ravel())
    ratio = jnp.where((length == 0) | (step == 0), 1, length / step)
    return w - lr * ratio * x, m, v


def rmsprop(
    w: Array,
    g: Array,
    s: Array,
    a: Array | None = None,
    b: Array | None = None,
    lr: Number = 1e-2,
    alpha: Number = 0.99,
    eps: Number = 1e-8,
    weight_decay: Number = 0.0,
    momentum: Number = 0.0,
    *,
    centered: bool = False,
    use_tf_variant: bool = False,
) -> tuple[Array | None, ...]:
    d = _plus(g, weight_decay, w)
    s, variance = (_moving(s, d * d, alpha),) * 2
    if a is not None:  # the centred variant
        a = _moving(a, d, alpha)
        variance = jnp.maximum(s - a * a, 0)  # rounding may leave a negative number
    q = d / (jnp.sqrt(variance + eps) if use_tf_variant else jnp.sqrt(variance) + eps)
    q = lr * q if use_tf_variant else q
    b = None if b is None else momentum * b + q
    step = q if b is None else b
    return w - (step if use_tf_variant else lr * step), s, a, b


def adagrad(
    w: Array,
    g: Array,
    s: Array,
    t: Array,
    lr: Number = 1e-2,
    lr_decay: Number = 0.0,
    eps: Number = 1e-10,
    weight_decay: Number = 0.0,
) -> tuple[Array, ...]:
    d = _plus(g, weight_decay, w)
    s = s + d * d
    return w - lr / (1 + (t - 1) * lr_decay) * d / (jnp.sqrt(s) + eps), s


def adadelta(
    w: Array,
    g: Array,
    s: Array,
    a: Array,
    lr: Number = 1.0,
    rho: Number = 0.9,
    eps: Number = 1e-6,
    weight_decay: Number = 0.0,
) -> tuple[Array, ...]:
    d = _plus(g, weight_decay, w)
    s = _moving(s, d * d, rho)
    step = jnp.sqrt(a + eps) / jnp.sqrt(s + eps) * d
    return w - lr * step, s, _moving(a, step * step, rho)


def adamax(
    w: Array,
    g: Array,
    m: Array,
    u: Array,
    t: Array,
    lr: Number = 2e-3,
    beta1: Number = 0.9,
    beta2: Number = 0.999,
    eps: Number = 1e-8,
    weight_decay: Number = 0.0,
) -> tuple[Array, ...]:
    d = _plus(g, weight_decay, w)
    m, u = _moving(m, d, beta1), jnp.maximum(beta2 * u, jnp.abs(d) + eps)
    return w - lr / _correction(beta1, t) * m / u, m, u


def nadam(
    w: Array,
    g: Array,
    m: Array,
    v: Array,
    p: Array,
    t: Array,
    lr: Number = 2e-3,
    beta1: Number = 0.9,
    beta2: Number = 0.999,
    eps: Number = 1e-8,
    weight_decay: Number = 0.0,
    momentum_decay: Number = 4e-3,
    *,
    decoupled_weight_decay: bool = False,
) -> tuple[Array, ...]:
    w, d = _decayed(w, g, lr, weight_decay, decoupled_weight_decay)
    m, v = _moving(m, d, beta1), _moving(v, d * d, beta2)
    now, next_ = (beta1 * (1 - 0.5 * 0.96 ** (step * momentum_decay)) for step in (t, t + 1))
    p = p * now  # over all steps
    ahead = (1 - now) / (1 - p) * d + next_ / (1 - p * next_) * m
    return w - lr * ahead / (jnp.sqrt(v / _correction(beta2, t)) + eps), m, v, p


def radam(
    w: Array,
    g: Array,
    m: Array,
    v: Array,
    t: Array,
    lr: Number = 1e-3,
    beta1: Number = 0.9,
    beta2: float = 0.999,
    eps: Number = 1e-8,
    weight_decay: Number = 0.0,
    *,
    decoupled_weight_decay: bool = False,
) -> tuple[Array, ...]:
    w, d = _decayed(w, g, lr, weight_decay, decoupled_weight_decay)
    m, v = _moving(m, d, beta1), _moving(v, d * d, beta2)
    longest, length = jnp.float32(2 / (1 - beta2) - 1), averaged(beta2, t)
    rectified = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
    adaptive = jnp.sqrt(rectified * _correction(beta2, t)) / (jnp.sqrt(v) + eps)
    return w - lr * m / _correction(beta1, t) * jnp.where(length > 5, adaptive, 1), m, v


def _decayed(w: Array, g: Array, lr: Number, weight_decay: Number, decoupled: bool) -> tuple[Array, Array]:
    """Parameter and gradient after weight decay, which modifies one of them."""
    return (_plus(w, -lr * weight_decay, w), g) if decoupled else (w, _plus(g, weight_decay, w))


def averaged(beta: float, t: Array) -> Array:
    """Effective sample size of a bias-corrected moving average: 2 / (1 - β) - 1 - 2t βᵗ / (1 - βᵗ), evaluated
    accurately for β near 1.

    With y = -t ln β / 2 that is a constant, which is close to 0, and t (1 - coth y + 1 / y).
    """
    rate = -math.log(beta) if beta else math.inf
    y = t * rate / 2
    near_zero = 1 - y / 3 + y**3 / 45 - 2 * y**5 / 945 + y**7 / 4725
    return 2 / (1 - beta) - 1 - 2 / rate + t * jnp.where(y < 0.25, near_zero, 1 / y - 2 / jnp.expm1(2 * y))
