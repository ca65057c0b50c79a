"""JAX equations as ops: the declaration of a primitive, and the conversion of its parameters to attributes.

Plain values are attributes directly; code is a `Function`, and the op then holds the reason why it is one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, primitives

from popxl.base.names import camel
from popxl.core.declaration import OpKind
from popxl.core.tracing import abstract_evaluation
from popxl.core.traits import VJP, Draws, Trait
from popxl.dtypes import dtype
from popxl.transforms.jax_keys import generator_from, generator_name, generator_of, key_data, on_key_data, with_keys


@dataclass(frozen=True)
class Function:
    """JAX code as an op attribute: loop body, or function with custom derivative.

    It prints as its name. It has no hash, so that no declaration remembers it: a declaration lives longer than code.

    Attributes:
        code: code that JAX runs: a jaxpr, or a function.
    """

    name: str
    code: Any

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return self.name


def as_op(equation: JaxprEqn, why: str) -> tuple[OpKind, Sequence[Any], dict[str, Any]]:
    """The op that an equation becomes: its kind, its operands, its attributes.

    Args:
        why: for an equation that holds code, the reason why it is one op.
    """
    primitive, parameters = equation.primitive, equation.params
    reason = {"because": why} if why else {}
    if primitive.name not in DERIVATIVES:
        attributes = {n: _attribute(n, value) for n, value in parameters.items()}
        generators = tuple(generator_of(value.aval) for value in equation.invars)
        keys = {"keys": generators} if any(generators) else {}
        return _kind(primitive), equation.invars, attributes | keys | reason
    operands, function = of_equation(equation)
    return function_kind(last_name(function.name)), operands, {"function": function, **reason}


DERIVATIVES = ("custom_jvp_call", "custom_vjp_call")
"""Primitives that call a function with a custom derivative."""


def of_equation(equation: JaxprEqn) -> tuple[list[Any], Function]:
    """Equation as a function of its distinct non-literal operands."""
    called = equation.params["call_jaxpr"].jaxpr
    operands = list(dict.fromkeys(value for value in equation.invars if not isinstance(value, Literal)))
    alone = called.replace(constvars=[], invars=operands, outvars=equation.outvars, eqns=[equation])
    return operands, Function(called.debug_info.func_name, ClosedJaxpr(alone, ()))


@cache
def _kind(primitive: Primitive) -> OpKind:
    """The declaration of a primitive. Made once. `keys` are the generators of operands that are random keys."""

    def lowering(*operands: Any, because: str = "", keys: tuple[str | None, ...] = (), **attributes: Any) -> Any:
        parameters = {n: _multiplying(n, _parameter(v)) for n, v in attributes.items()}
        given = with_keys(operands, keys) if keys else operands
        results = primitive.bind(*given, **primitive.get_bind_params(parameters))
        # The graphs of a `shard_map` are not a list.
        return key_data(results) if primitive.multiple_results else key_data([results])[0]

    gradient = None if primitive.name == "stop_gradient" else VJP
    traits = [Draws()] if primitive.name in ("random_bits", "random_gamma") else []
    return _declared(primitive.name, lowering, f"jax.{primitive.name}", gradient, traits)


@cache
def function_kind(name: str) -> OpKind:
    """Cached declaration for functions with custom derivatives, by name."""

    def lowering(*operands: Any, function: Function, because: str = "") -> Any:
        results = on_key_data(_multiplying("", function.code))(*operands)
        return results[0] if len(results) == 1 else results

    return _declared(name or "function", lowering, f"jax.function.{name}", VJP)


def _declared(name: str, lowering: Callable[..., Any], key: str, gradient: Any, traits: Sequence[Trait] = ()) -> OpKind:
    def shape(*operands: Any, **attributes: Any) -> Any:
        specs = tuple(t.spec for t in operands)

        def derived() -> Any:
            with jax.enable_x64(True):  # JAX has said each dtype, and where it said 64 bits they are meant
                return abstract_evaluation(kind.on_arrays(None, attributes), specs)

        return kind.remembered(("shape", tuple(attributes.items()), specs), derived)

    kind = OpKind(camel(name), lowering, shape=shape, gradient=gradient, key=key, traits=traits)
    return kind


def kind_with_key(key: str) -> OpKind | None:
    """Look up a primitive's declaration by key, such as `"jax.sin"`, for saved programs."""
    primitive = _primitives().get(key.removeprefix("jax.")) if key.startswith("jax.") else None
    return None if primitive is None else _kind(primitive)


@cache
def _primitives() -> dict[str, Primitive]:
    """The primitives that JAX publishes, by name."""
    return {value.name: value for value in vars(primitives).values() if isinstance(value, Primitive)}


def _attribute(name: str, value: Any) -> Any:
    """Encode an equation parameter as an op attribute: plain value, or named code."""
    if isinstance(value, np.dtype):
        return dtype.as_dtype(value)
    if isinstance(value, Enum) and hasattr(jax.lax, type(value).__name__):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, np.generic):  # `vmap` counts axes in NumPy's numbers
        return value.item()
    if (generator := generator_name(value)) is not None:
        return f"{_GENERATOR}.{generator}"
    if isinstance(value, tuple) and type(value) is not tuple:
        if not hasattr(jax.lax, type(value).__name__):  # it could not be found again: the code of a solver, say
            return Function(type(value).__name__, value)
        return type(value).__name__, *(_attribute(name, part) for part in value)  # dimension numbers
    if isinstance(value, tuple):
        return tuple(_attribute(name, part) for part in value)
    if isinstance(value, Jaxpr) and (combiner := combiner_name(value)) is not None:
        return f"{_COMBINER}.{combiner}"
    if isinstance(value, ClosedJaxpr | Jaxpr):
        about = (value.jaxpr if isinstance(value, ClosedJaxpr) else value).debug_info
        return Function(about.func_name, value)
    if callable(value) and not isinstance(value, type):
        return Function(getattr(value, "__name__", type(value).__name__), value)
    return value


def _parameter(value: Any) -> Any:
    """Decode an op attribute to an equation parameter."""
    if isinstance(value, dtype):
        return value.as_jax()
    if isinstance(value, Function):
        return value.code
    if isinstance(value, str):
        kind, _, member = value.partition(".")
        if kind == _GENERATOR:
            return generator_from(member)
        if kind == _COMBINER:
            return _combiner(member)
        found = getattr(jax.lax, kind, None) if member else None
        return found[member] if isinstance(found, type) and issubclass(found, Enum) else value
    if isinstance(value, tuple):
        parts = tuple(map(_parameter, value))
        found = getattr(jax.lax, parts[0], None) if parts and isinstance(parts[0], str) else None
        return found(*parts[1:]) if isinstance(found, type) and issubclass(found, tuple) else parts
    return value


def combiner_name(jaxpr: Any) -> str | None:
    """A function that does nothing but combine two numbers, such as that of a scatter: its name and dtype; else None.

    Example:
        >>> combiner_name(jax.make_jaxpr(jax.lax.add)(1.0, 2.0).jaxpr)
        'add float32'
    """
    numbers = [v.aval for v in jaxpr.invars]
    if len(numbers) != 2 or len(jaxpr.eqns) != 1 or numbers[0].shape or jaxpr.eqns[0].primitive.name not in _COMBINERS:
        return None
    name = f"{jaxpr.eqns[0].primitive.name} {numbers[0].dtype}"
    return name if str(_combiner(name)) == str(jaxpr) else None


@cache
def _combiner(name: str) -> Jaxpr:
    primitive, dtype = name.split()
    number = jax.ShapeDtypeStruct((), jax.numpy.dtype(dtype))
    with jax.enable_x64(True):  # a dtype of 64 bits is meant
        return jax.make_jaxpr(_COMBINERS[primitive])(number, number).jaxpr


_COMBINERS = {
    "add": jax.lax.add,
    "mul": jax.lax.mul,
    "max": jax.lax.max,
    "min": jax.lax.min,
    "sub": jax.lax.sub,
    "and": jax.lax.bitwise_and,
    "or": jax.lax.bitwise_or,
    "xor": jax.lax.bitwise_xor,
}

_COMBINER = "Jaxpr"
"""Type name of functions in equation parameters."""

_GENERATOR = "PRNGImpl"
"""Type name of random number generators in equation parameters."""


def _multiplying(name: str, value: Any) -> Any:
    """A parameter, with products as exact as JAX is set to make them, where the function said nothing. It was traced
    when the graph was built; the session says it when it lowers the graph."""
    if name == "precision" and value is None:
        settings: Any = jax.config
        level = settings.jax_default_matmul_precision
        return None if level is None else (jax.lax.Precision(level),) * 2
    if isinstance(value, Jaxpr):
        equations = [e.replace(params={n: _multiplying(n, v) for n, v in e.params.items()}) for e in value.eqns]
        return value.replace(eqns=equations)
    if isinstance(value, ClosedJaxpr):  # from JAX 0.12 on a Jaxpr, too
        return value.replace(jaxpr=_multiplying(name, value.jaxpr))
    if type(value) is tuple:  # of branches, say
        return tuple(_multiplying("", part) for part in value)
    return value


def last_name(name: str) -> str:
    """The last part of a dotted name, without what is no letter or digit."""
    return re.sub(r"\W+", "", name.rpartition(".")[2])
