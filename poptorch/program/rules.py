"""Optimiser rules: formula as an op, state tensors, hyperparameters, and their values in an optimiser."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import torch
from jax import lax

import popxl
from poptorch import optim
from poptorch.base.optimizer_arguments import ACCUM_TYPES, TORCH_ONLY
from poptorch.program.formulas import Array, adadelta, adagrad, adam, adamax, lamb, nadam, radam, rmsprop, sgd
from popxl.errors import PopxlError
from popxl.op import Colocated, Overwrites

Key = tuple[int | None, str]  # group (or `None` for the whole optimiser) and name of a hyperparameter


# Declarations -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StateSpec:
    """Optimiser state tensor, one per parameter.

    Attributes:
        operand: name in the formula.
        name: name in state dictionaries.
        torch_name: PyTorch's name.
        type_from: the attribute of the optimiser that gives its type.
        needs: hyperparameter that the state depends on: if it is constant, and 0 or false, there is no such state.
        start: initial value of its elements, or the name of the hyperparameter that defines it; true is 1.
        single: whether the state is a single number per parameter.
    """

    operand: str
    name: str
    torch_name: str
    type_from: str
    needs: str = ""
    start: str | float = 0.0
    single: bool = False


class Rule:
    """An optimiser rule: name, formula as an in-place op, state tensors, hyperparameters.

    Args:
        defaults: defaults of numbers that differ from those of the formula.

    Attributes:
        numbers: numbers of a parameter group that the formula takes, with their defaults.
        state_defaults: hyperparameters that it does not take, as they only define its initial state, for all groups.
        counts: steps are counted, as PyTorch counts them.
        takes_count: the formula takes the number of the step.
        count_needs: hyperparameter without which the step count has no effect: where it is constant and 0.
        elementwise: each element of the results depends on the same element of the operands only.
    """

    def __init__(
        self,
        name: str,
        formula: Callable[..., tuple[Array | None, ...]],
        *state_specs: StateSpec,
        counts: bool = True,
        count_needs: str = "",
        elementwise: bool = True,
        **defaults: Any,
    ) -> None:
        self.name = name
        self.elementwise = elementwise
        self.state_specs = state_specs
        self.counts = counts
        self.count_needs = count_needs
        tensors = ("w", *(k.operand for k in state_specs))
        parameters = inspect.signature(formula).parameters
        self.takes_count = "t" in parameters
        self.numbers = {p.name: p.default for p in parameters.values() if p.name not in {*tensors, "g", "t"}}
        self.numbers |= {"maximize": False, **defaults}
        starts = (k.start for k in state_specs if isinstance(k.start, str))
        self.state_defaults = {name: 0.0 for name in starts if name not in self.numbers}
        changed = tuple(p for p in parameters if p in tensors)
        self.step = op_kind(
            name,
            _in_float32(formula, changed),
            shape=_no_result,
            traits=[Overwrites(*changed, aliased=False), Colocated(*changed, "g")],
        )


def op_kind(name: str, lowering: Callable[..., Any], **settings: Any) -> popxl.OpKind:
    """Declare an op without a gradient; by default its result is a float32 scalar, its operands have any location."""
    common: dict[str, Any] = {
        "shape": lambda *operands, **attributes: popxl.TensorSpec((), popxl.float32),
        "traits": [Colocated()],
    }
    return popxl.OpKind(name, lowering, gradient=None, key=f"poptorch.{name}", **common | settings)


def _in_float32(formula: Callable[..., tuple[Array | None, ...]], changed: tuple[str, ...]) -> Callable[..., Any]:
    """Wrap a formula to compute in float32. The gradient is multiplied by `scale`, and negated with `maximize`; results
    without a state operand are dropped.
    """
    own = list(inspect.signature(formula).parameters.values())
    scale = inspect.Parameter("scale", inspect.Parameter.POSITIONAL_OR_KEYWORD, default=1.0)
    maximize = inspect.Parameter("maximize", inspect.Parameter.KEYWORD_ONLY, default=False)
    last = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in own)
    signature = inspect.Signature([*own[:last], scale, *own[last:], maximize])

    def lowering(*operands: Any, **named: Any) -> tuple[Array, ...]:
        given = signature.bind(*operands, **named).arguments
        wide = {name: real_parts(x) if hasattr(x, "astype") else x for name, x in given.items()}
        gradient = wide["g"] * wide.pop("scale", 1.0)
        wide["g"] = -gradient if wide.pop("maximize", False) else gradient
        found = formula(**wide)
        kept = ((given.get(name), x) for name, x in zip(changed, found, strict=False))
        return tuple(_complex_of_parts(x) if jnp.iscomplexobj(old) else x for old, x in kept if old is not None)

    lowering.__signature__ = signature  # type: ignore[attr-defined]
    return lowering


def real_parts(x: Array) -> Array:
    """An array in float32. Complex numbers become pairs, since optimisers treat real and imaginary parts separately."""
    return jnp.stack([x.real, x.imag], -1) if jnp.iscomplexobj(x) else x.astype(jnp.float32)


def _complex_of_parts(x: Array) -> Array:
    return lax.complex(x[..., 0], x[..., 1])


def _no_result(w: Any, g: Any, *others: Any, **fixed: Any) -> tuple[popxl.TensorSpec, ...]:
    if g.shape != w.shape or any(isinstance(t, popxl.Tensor) and t.shape not in (w.shape, ()) for t in others):
        raise PopxlError(f"the gradient and the state have to have the shape of the parameter, {w.shape}.")
    return ()


_FIRST, _SECOND = ACCUM_TYPES[2:]
_MOMENTS = (StateSpec("m", "Accl1", "exp_avg", _FIRST), StateSpec("v", "Accl2", "exp_avg_sq", _SECOND))
_LARGEST = StateSpec("largest", "Accl3", "max_exp_avg_sq", _SECOND, needs="amsgrad")

VELOCITY = StateSpec("v", "Accl1", "momentum_buffer", "velocity_accum_type", needs="momentum")

SGD = Rule("SGD", sgd, VELOCITY, counts=False)
_LAMB = Rule("LAMB", lamb, *_MOMENTS, elementwise=False)
_RMSPROP = Rule(
    "RMSprop",
    rmsprop,
    StateSpec("s", "Accl1", "square_avg", _SECOND, start="use_tf_variant"),
    StateSpec("a", "Accl2", "grad_avg", _FIRST, needs="centered"),
    StateSpec("b", "Accl3", "momentum_buffer", _FIRST, needs="momentum"),
)
RULES: dict[type, Rule] = {
    torch.optim.SGD: SGD,
    torch.optim.Adam: Rule("Adam", adam, *_MOMENTS, _LARGEST),
    torch.optim.AdamW: Rule("AdamW", adam, *_MOMENTS, _LARGEST, weight_decay=1e-2, decoupled_weight_decay=True),
    torch.optim.RMSprop: _RMSPROP,
    optim.LAMB: _LAMB,
    torch.optim.Adagrad: Rule(
        "Adagrad",
        adagrad,
        StateSpec("s", "Accl1", "sum", _SECOND, start="initial_accumulator_value"),
        count_needs="lr_decay",
    ),
    torch.optim.Adadelta: Rule(
        "Adadelta",
        adadelta,
        StateSpec("s", "Accl1", "square_avg", _SECOND),
        StateSpec("a", "Accl2", "acc_delta", _SECOND),
    ),
    torch.optim.Adamax: Rule("Adamax", adamax, _MOMENTS[0], StateSpec("u", "Accl2", "exp_inf", _SECOND)),
    torch.optim.NAdam: Rule(
        "NAdam", nadam, *_MOMENTS, StateSpec("p", "Accl3", "mu_product", _FIRST, start=1.0, single=True)
    ),
    torch.optim.RAdam: Rule("RAdam", radam, *_MOMENTS),
}
WHOLE: dict[str, Any] = {  # the same for all groups
    "loss_scaling": 1.0,
    "max_grad_norm": math.inf,
    "bias_correction": True,
    "use_tf_variant": False,
    "use_combined_accum": False,
    **dict.fromkeys(ACCUM_TYPES, torch.float32),
}
BETAS = ("beta1", "beta2")
CYCLED = "base_momentum"
"""Keys that schedulers of momentum, or of the first beta, add to parameter groups at construction."""


# Settings of an optimiser ---------------------------------------------------------------------------------------------


def rule_of(optimizer: torch.optim.Optimizer) -> Rule:
    """Optimiser rule by class, after checks for options without any support.

    Raises:
        AssertionError: for another class, or parameter groups that differ in `centered`.
        ValueError: for `use_tf_variant` with an optimiser that has none.
    """
    rule = next((RULES[kind] for kind in type(optimizer).__mro__ if kind in RULES), None)
    if rule is None:
        raise AssertionError(
            f"Unsupported optimizer type {type(optimizer).__name__}. Expected one of `poptorch.optim` (SGD, Adam, "
            f"AdamW, RMSprop, LAMB), or torch's {', '.join(r.name for r in RULES.values() if r is not _LAMB)}."
        )
    if getattr(optimizer, "use_tf_variant", False) and rule is not _RMSPROP:
        raise ValueError(f"{rule.name}: there is no `use_tf_variant` of it; only RMSprop has one.")
    if len({bool(group.get("centered")) for group in optimizer.param_groups}) > 1:
        raise AssertionError("RMSprop: all parameter groups must have the same `centered`.")
    return rule


def groups_of(optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Parameter group, by number, of each of these parameters that the optimiser trains, by name."""
    groups = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    return {name: groups[id(p)] for name, p in parameters.items() if p.requires_grad and id(p) in groups}


def hyperparameters_of(optimizer: torch.optim.Optimizer, rule: Rule) -> dict[Key, Any]:
    """Hyperparameters of an optimiser, by group (`None` for global values) and name."""
    numbers: dict[Key, Any] = {(None, name): _plain(getattr(optimizer, name, None), d) for name, d in WHOLE.items()}
    combined = numbers[None, "use_combined_accum"]
    for i, group in enumerate(optimizer.param_groups):
        for name, default in (rule.numbers | rule.state_defaults).items():
            if name in BETAS:
                numbers[i, name] = _plain(group["betas"][BETAS.index(name)], default)
            elif name == "velocity_scaling" and not combined:
                numbers[i, name] = default
            elif name not in WHOLE:
                said_by = optimizer.defaults if name in rule.state_defaults else group
                numbers[i, name] = _plain(said_by.get(name), default)
    return numbers


def _plain(value: Any, default: Any) -> Any:
    """Hyperparameter as float (also from tensors), flag or dtype; the default for `None`."""
    if value is None:
        return default
    return value if isinstance(value, bool | torch.dtype) else float(value)


def attribute_of(number: str) -> str:
    """Optimiser attribute containing a hyperparameter."""
    return "betas" if number in BETAS else number


def classes_of(rule: Rule) -> tuple[type[torch.optim.Optimizer], ...]:
    """Classes of an optimiser in torch and poptorch, if existing."""
    return tuple(kind for module in (torch.optim, optim) if (kind := getattr(module, rule.name, None)) is not None)


def attributes_of(optimizer: torch.optim.Optimizer) -> dict[str, set[str]]:
    """Attribute names of an optimiser, by category for messages."""
    return {
        "optimizer attribute": {name for name in vars(optimizer) if not name.startswith("_")},
        "default group variable": set(optimizer.defaults),
        **{f"group {i} attribute": set(group) for i, group in enumerate(optimizer.param_groups)},
    }


def usual_attributes(kind: str, rule: Rule) -> set[str]:
    """Known attribute names of a rule's optimisers, in poptorch or torch."""
    if kind == "optimizer attribute":
        usual = {"param_groups", "defaults", "state", "variable_attrs", "device"}
        return usual.union(*(inspect.signature(own).parameters for own in classes_of(rule)))
    numbers = {attribute_of(name) for name in rule.numbers | rule.state_defaults if name not in WHOLE}
    return numbers | {"params", "amsgrad", "decoupled_weight_decay", *TORCH_ONLY}
