"""Optimisers as rules: formulas, what each keeps, the numbers that it takes, and what an optimiser says of them.

An optimiser is a formula: a function of the parameter, its gradient and the state, which returns their new contents.
What it takes besides are the numbers of a parameter group, under torch's names and with torch's defaults; those after
the star shape the formula and cannot be variable. In a program everything is computed in float32 and rounded once.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

import popxl
from poptorch import optim
from popxl.errors import PopxlError
from popxl.op import Colocated, Overwrites

__all__ = [
    "BETAS",
    "FIXED",
    "RULES",
    "SGD",
    "VELOCITY",
    "WHOLE",
    "Array",
    "Kept",
    "Key",
    "Number",
    "Rule",
    "attribute_of",
    "attributes_of",
    "in_parts",
    "numbers_of",
    "op_kind",
    "rule_of",
    "usual_attributes",
]

Array = Any
Number = Any  # of a formula: a plain number, or an array of one element
Key = tuple[int | None, str]  # a number of a parameter group, or (`None`) of the whole optimiser, and its name


# Formulas -----------------------------------------------------------------------------------------------------------


def _plus(x: Array, factor: Number, y: Array) -> Array:
    """x + factor y, where nothing is added for the plain number 0."""
    return x if isinstance(factor, float) and factor == 0 else x + factor * y


def _moving(average: Array, value: Array, beta: Number) -> Array:
    return beta * average + (1 - beta) * value


def _direction(m: Array, v: Array, t: Array | None, beta1: Number, beta2: Number, eps: Number) -> Array:
    """What Adam steps along, per learning rate: the moments are corrected if the number `t` of the step is given."""
    if t is not None:
        m, v = m / _correction(beta1, t), v / _correction(beta2, t)
    return m / (jnp.sqrt(v) + eps)


def _correction(beta: Number, t: Array) -> Array:
    """1 - beta ** t, in a form that keeps its digits where beta is close to 1."""
    exact = isinstance(beta, float)
    return -jnp.expm1(t * (jnp.log(beta) if not exact else math.log(beta) if beta else -math.inf))


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
    if v is None:  # the momentum always is 0
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
    lr: Number = 1e-3,
    beta1: Number = 0.9,
    beta2: Number = 0.999,
    eps: Number = 1e-8,
    weight_decay: Number = 0.0,
) -> tuple[Array, ...]:
    d = _plus(g, weight_decay, w)
    m, v = _moving(m, d, beta1), _moving(v, d * d, beta2)
    return w - lr * _direction(m, v, t, beta1, beta2, eps), m, v


def adamw(
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
) -> tuple[Array, ...]:
    m, v = _moving(m, g, beta1), _moving(v, g * g, beta2)
    return w - lr * _plus(_direction(m, v, t, beta1, beta2, eps), weight_decay, w), m, v


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
    x = _plus(_direction(m, v, t if bias_correction else None, beta1, beta2, eps), weight_decay, w)
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
    if a is not None:  # centred
        a = _moving(a, d, alpha)
        variance = jnp.maximum(s - a * a, 0)  # rounding may leave less than nothing
    q = d / (jnp.sqrt(variance + eps) if use_tf_variant else jnp.sqrt(variance) + eps)
    q = lr * q if use_tf_variant else q
    b = None if b is None else momentum * b + q
    step = q if b is None else b
    return w - (step if use_tf_variant else lr * step), s, a, b


# Declarations -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kept:
    """A tensor that an optimiser keeps for each parameter.

    Attributes:
        operand: what the formula calls it.
        name: what dictionaries of state call it.
        torch_name: what PyTorch calls it.
        type_from: the attribute of the optimiser that gives its type.
        needs: a number without which it is not kept: one that is constant and 0, or false.
        ones: a flag with which it starts at 1, not 0.
    """

    operand: str
    name: str
    torch_name: str
    type_from: str
    needs: str = ""
    ones: str = ""


class Rule:
    """An optimiser: its name, its formula as an op that works in place, what it keeps, and the numbers it takes.

    Attributes:
        numbers: numbers of a parameter group, with their defaults.
        counts: steps are counted, as PyTorch counts them.
        takes_count: the formula takes the number of the step.
    """

    def __init__(
        self, name: str, formula: Callable[..., tuple[Array | None, ...]], *kept: Kept, counts: bool = True
    ) -> None:
        self.name = name
        self.kept = kept
        self.counts = counts
        tensors = ("w", *(k.operand for k in kept))
        parameters = inspect.signature(formula).parameters
        self.takes_count = "t" in parameters
        self.numbers = {p.name: p.default for p in parameters.values() if p.name not in {*tensors, "g", "t"}}
        changed = tuple(p for p in parameters if p in tensors)
        self.step = op_kind(
            name,
            _in_float32(formula, changed),
            shape=_no_result,
            traits=[Overwrites(*changed, aliased=False), Colocated(*changed, "g")],
        )


def op_kind(name: str, lowering: Callable[..., Any], **settings: Any) -> popxl.OpKind:
    """Declare an op without a gradient, by default one that makes a float32 number of tensors anywhere."""
    common: dict[str, Any] = {
        "shape": lambda *operands, **attributes: popxl.TensorSpec((), popxl.float32),
        "traits": [Colocated()],
    }
    return popxl.OpKind(name, lowering, gradient=None, key=f"poptorch.{name}", **common | settings)


def _in_float32(formula: Callable[..., tuple[Array | None, ...]], changed: tuple[str, ...]) -> Callable[..., Any]:
    """The formula with all arrays as float32, and `scale`, for the gradient; of what it returns, what is kept."""
    own = list(inspect.signature(formula).parameters.values())
    scale = inspect.Parameter("scale", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=1.0)
    last = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in own)
    signature = inspect.Signature([*own[:last], scale, *own[last:]])

    def lowering(*operands: Any, **named: Any) -> tuple[Array, ...]:
        given = signature.bind(*operands, **named).arguments
        wide = {name: in_parts(x) if hasattr(x, "astype") else x for name, x in given.items()}
        wide["g"] = wide["g"] * wide.pop("scale", 1.0)
        found = formula(**wide)
        whole = _of_parts if jnp.iscomplexobj(given["w"]) else _as_it_is
        return tuple(whole(x) for name, x in zip(changed, found, strict=False) if given.get(name) is not None)

    lowering.__signature__ = signature  # type: ignore[attr-defined]
    return lowering


def in_parts(x: Array) -> Array:
    """An array in float32. What is complex has two numbers each, of which optimisers know nothing more."""
    return jnp.stack([x.real, x.imag], -1) if jnp.iscomplexobj(x) else x.astype(jnp.float32)


def _of_parts(x: Array) -> Array:
    return lax.complex(x[..., 0], x[..., 1])


def _as_it_is(x: Array) -> Array:
    return x


def _no_result(w: Any, g: Any, *others: Any, **fixed: Any) -> tuple[popxl.TensorSpec, ...]:
    if g.shape != w.shape or any(isinstance(t, popxl.Tensor) and t.shape not in (w.shape, ()) for t in others):
        raise PopxlError(f"the gradient and the state have to have the shape of the parameter, {w.shape}.")
    return ()


_FIRST, _SECOND = "first_order_momentum_accum_type", "second_order_momentum_accum_type"
_MOMENTS = (Kept("m", "Accl1", "exp_avg", _FIRST), Kept("v", "Accl2", "exp_avg_sq", _SECOND))

VELOCITY = Kept("v", "Accl1", "momentum_buffer", "velocity_accum_type", needs="momentum")

SGD = Rule("SGD", sgd, VELOCITY, counts=False)
_ADAM = Rule("Adam", adam, *_MOMENTS)
_ADAMW = Rule("AdamW", adamw, *_MOMENTS)
_LAMB = Rule("LAMB", lamb, *_MOMENTS)
_RMSPROP = Rule(
    "RMSprop",
    rmsprop,
    Kept("s", "Accl1", "square_avg", _SECOND, ones="use_tf_variant"),
    Kept("a", "Accl2", "grad_avg", _FIRST, needs="centered"),
    Kept("b", "Accl3", "momentum_buffer", _FIRST, needs="momentum"),
)
RULES: dict[type, Rule] = {  # torch's AdamW is an Adam, so it comes first
    torch.optim.SGD: SGD,
    torch.optim.AdamW: _ADAMW,
    torch.optim.Adam: _ADAM,
    torch.optim.RMSprop: _RMSPROP,
    optim.LAMB: _LAMB,
}
WHOLE: dict[str, Any] = {  # what is the same for all groups
    "loss_scaling": 1.0,
    "max_grad_norm": math.inf,
    "bias_correction": True,
    "use_tf_variant": False,
    "use_combined_accum": False,
    **dict.fromkeys(("accum_type", "velocity_accum_type", _FIRST, _SECOND), torch.float32),
}
FIXED = {"bias_correction", "use_tf_variant", "use_combined_accum", "centered"}  # flags that shape a program
BETAS = ("beta1", "beta2")


# What an optimiser says -----------------------------------------------------------------------------------------------


def rule_of(optimizer: torch.optim.Optimizer) -> Rule:
    """The rule of an optimiser's class, after a look at what none supports.

    Raises:
        AssertionError: for another class, or parameter groups that differ in `centered`.
        ValueError: for `amsgrad`, and for `use_tf_variant` where there is none.
    """
    rule = next((rule for kind, rule in RULES.items() if isinstance(optimizer, kind)), None)
    if rule is None:
        raise AssertionError(
            f"Unsupported optimizer type {type(optimizer).__name__}. Expected one of `poptorch.optim` (SGD, Adam, "
            "AdamW, RMSprop, LAMB), or torch's SGD, Adam, AdamW or RMSprop."
        )
    if rule is _ADAM and optimizer.defaults.get("decoupled_weight_decay"):
        rule = _ADAMW
    if any(group.get("amsgrad") for group in optimizer.param_groups):
        raise ValueError(f"{rule.name}: `amsgrad` is not supported; leave it out.")
    if getattr(optimizer, "use_tf_variant", False) and rule is not _RMSPROP:
        raise ValueError(f"{rule.name}: there is no `use_tf_variant` of it; only RMSprop has one.")
    if len({bool(group.get("centered")) for group in optimizer.param_groups}) > 1:
        raise AssertionError("RMSprop: all parameter groups must have the same `centered`.")
    return rule


def numbers_of(optimizer: torch.optim.Optimizer, rule: Rule) -> dict[Key, Any]:
    """All that an optimiser says, by group (`None` for the whole) and name."""
    found: dict[Key, Any] = {(None, name): _plain(getattr(optimizer, name, None), d) for name, d in WHOLE.items()}
    combined = found[None, "use_combined_accum"]
    for i, group in enumerate(optimizer.param_groups):
        for name, default in rule.numbers.items():
            if name in BETAS:
                found[i, name] = _plain(group["betas"][BETAS.index(name)], default)
            elif name == "velocity_scaling" and not combined:
                found[i, name] = default
            elif name not in WHOLE:
                found[i, name] = _plain(group.get(name), default)
    return found


def _plain(value: Any, default: Any) -> Any:
    """A number (tensors, too, may say it), flag or type; the default for `None`."""
    if value is None:
        return default
    return value if isinstance(value, bool | torch.dtype) else float(value)


def attribute_of(number: str) -> str:
    """The attribute of an optimiser that a number of a formula is from."""
    return "betas" if number in BETAS else number


def attributes_of(optimizer: torch.optim.Optimizer) -> dict[str, set[str]]:
    """Names of the attributes of an optimiser, by what a message calls them."""
    return {
        "optimizer attribute": {name for name in vars(optimizer) if not name.startswith("_")},
        "default group variable": set(optimizer.defaults),
        **{f"group {i} attribute": set(group) for i, group in enumerate(optimizer.param_groups)},
    }


def usual_attributes(kind: str, rule: Rule) -> set[str]:
    """Names of attributes that optimisers of a rule have, in poptorch or torch."""
    own = getattr(optim, rule.name)
    if kind == "optimizer attribute":
        return {*inspect.signature(own).parameters, "param_groups", "defaults", "state", "variable_attrs", "device"}
    numbers = {attribute_of(name) for name in rule.numbers if name not in WHOLE}
    return numbers | {"params", "amsgrad", "decoupled_weight_decay", *optim.TORCH_ONLY}
