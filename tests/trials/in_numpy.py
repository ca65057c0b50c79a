"""A traced function of JAX, computed by NumPy: for small arrays, without a compiler.

All floats are computed in float64, whatever their dtype, so that rounding neither makes a difference nor hides one.
Primitives that have no row here are computed by JAX.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np
from scipy import special

Array = np.ndarray
Rule = Callable[..., Any]


def in_numpy(function: Callable[..., Any], specs: Sequence[jax.ShapeDtypeStruct]) -> Callable[..., list[Array]]:
    """A function of arrays of these shapes and dtypes, traced once; its results are in a list."""
    return _Steps(jax.make_jaxpr(function)(*specs))


class _Steps:
    """A jaxpr as a list of steps on numbered values: what to call, the numbers of its operands and of its results."""

    def __init__(self, traced: Any) -> None:
        self._start: list[Any] = [None] * len(traced.jaxpr.invars)
        self._steps: list[tuple[Rule, list[int], list[int]]] = []
        self._results = self._add(traced.jaxpr, traced.consts, range(len(self._start)))

    def __call__(self, *arrays: Array) -> list[Array]:
        values = self._start.copy()
        values[: len(arrays)] = map(wide, arrays)
        for function, operands, results in self._steps:
            for number, value in zip(results, function(*[values[each] for each in operands]), strict=True):
                values[number] = value
        return [values[each] for each in self._results]

    def _add(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[int]) -> list[int]:
        """Add the steps of a jaxpr. Returns the numbers of its results."""
        numbers = dict(zip(jaxpr.invars, inputs, strict=True))
        numbers.update((v, self._new(_host(const))) for v, const in zip(jaxpr.constvars, consts, strict=True))

        def number(atom: Any) -> int:
            is_literal = isinstance(atom, jex.Literal)
            return self._new(wide(np.asarray(atom.val, atom.aval.dtype))) if is_literal else numbers[atom]

        for equation in jaxpr.eqns:
            operands, name = [*map(number, equation.invars)], equation.primitive.name
            if name in INLINED:
                inner = next(equation.params[each] for each in INNER if each in equation.params)
                closed = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())
                results = self._add(*closed, operands)
            elif name in SAME:
                results = operands
            else:
                results = [self._new() for _ in equation.outvars]
                self._steps.append((_rule(equation), operands, results))
            numbers.update(zip(equation.outvars, results, strict=True))
        return [*map(number, jaxpr.outvars)]

    def _new(self, value: Any = None) -> int:
        self._start.append(value)
        return len(self._start) - 1


INNER = ("jaxpr", "call_jaxpr", "fun_jaxpr")
INLINED = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat", "checkpoint")
SAME = ("stop_gradient", "copy", "copy_p", "optimization_barrier")


def _rule(equation: Any) -> Rule:
    """What computes an equation: from arrays to a list of arrays."""
    primitive, params = equation.primitive, equation.params
    are_plain = all(isinstance(each.aval.dtype, np.dtype) for each in equation.invars)  # no keys of random numbers
    rule = RULES.get(primitive.name) if are_plain else None
    if rule is None:
        is_wide = "update_jaxpr" not in params  # a scatter has its sum as a function of float32
        if "preferred_element_type" in params:
            params = {**params, "preferred_element_type": None}

        def by_jax(*operands: Any) -> Sequence[Any]:
            if not is_wide:
                operands = tuple(np.asarray(t, v.aval.dtype) for t, v in zip(operands, equation.invars, strict=True))
            with jax.enable_x64(is_wide):
                results = primitive.bind(*operands, **primitive.get_bind_params(params))
            return [*map(_host, results if primitive.multiple_results else [results])]

        return by_jax
    (out,) = (each.aval for each in equation.outvars)
    dtype = _widened(out.dtype)
    return lambda *operands: (np.asarray(rule(*operands, out=out, **params), dtype),)


def wide(array: Any) -> Any:
    """An array, in float64 if it has floats."""
    return np.asarray(array, _widened(array.dtype)) if isinstance(array, np.ndarray) else array


def _widened(dtype: Any) -> Any:
    if jax.dtypes.issubdtype(dtype, np.inexact):
        return np.complex128 if dtype.kind == "c" else np.float64
    return dtype


def _host(array: Any) -> Any:
    return array if jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended) else wide(np.asarray(array))


def _dot(a: Array, b: Array, dimension_numbers: Any, out: Any, **_: Any) -> Array:
    (of_a, of_b), (batch_a, batch_b) = dimension_numbers
    free_a = [i for i in range(a.ndim) if i not in (*of_a, *batch_a)]
    free_b = [i for i in range(b.ndim) if i not in (*of_b, *batch_b)]
    lead = tuple(a.shape[i] for i in batch_a)
    depth = math.prod(a.shape[i] for i in of_a)
    left = a.transpose(*batch_a, *free_a, *of_a).reshape(*lead, -1, depth)
    right = b.transpose(*batch_b, *of_b, *free_b).reshape(*lead, depth, -1)
    return np.matmul(left, right).reshape(out.shape)


def _broadcast(t: Array, *_: Array, shape: Any, broadcast_dimensions: Any, out: Any, **__: Any) -> Array:
    spread = [1] * len(shape)
    for i, dimension in enumerate(broadcast_dimensions):
        spread[dimension] = t.shape[i]
    return np.broadcast_to(t.reshape(spread), shape)


def _slice(t: Array, start_indices: Any, limit_indices: Any, strides: Any, **_: Any) -> Array:
    steps = strides or (1,) * t.ndim
    return t[tuple(slice(*each) for each in zip(start_indices, limit_indices, steps, strict=True))]


def _pad(t: Array, value: Array, padding_config: Any, out: Any, **_: Any) -> Array:
    """Padding, which cuts off where it is negative."""
    sizes = [n + abs(low) + abs(high) for n, (low, high, _) in zip(out.shape, padding_config, strict=True)]
    whole = np.full(sizes, value)
    places = (
        slice(max(low, 0), max(low, 0) + (n - 1) * (inside + 1) + 1 if n else 0, inside + 1)
        for n, (low, _, inside) in zip(t.shape, padding_config, strict=True)
    )
    whole[tuple(places)] = t
    firsts = (max(-low, 0) for low, _, _ in padding_config)
    return whole[tuple(slice(first, first + n) for first, n in zip(firsts, out.shape, strict=True))]


def _over(function: Rule) -> Rule:
    return lambda t, axes, **_: function(t, axis=tuple(axes))


def _along(function: Rule) -> Rule:
    def rule(t: Array, axis: int, reverse: bool = False, **_: Any) -> Array:
        return np.flip(function(np.flip(t, axis), axis), axis) if reverse else function(t, axis)

    return rule


def _quotient(a: Array, b: Array, **_: Any) -> Array:
    return a / b if a.dtype.kind in "fc" else np.trunc(a / b)


def _chosen(which: Array, *cases: Array, **_: Any) -> Array:
    return np.where(which, cases[1], cases[0]) if len(cases) == 2 else np.choose(which, cases)


def _of_elements(function: Rule) -> Rule:
    return lambda *operands, out, **_: function(*operands)


ELEMENTWISE: Mapping[str, Rule] = {
    "add": np.add, "add_any": np.add, "sub": np.subtract, "mul": np.multiply, "neg": np.negative, "abs": np.abs,
    "sign": np.sign, "exp": np.exp, "log": np.log, "log1p": np.log1p, "expm1": np.expm1, "tanh": np.tanh,
    "logistic": special.expit, "sin": np.sin, "cos": np.cos, "sqrt": np.sqrt, "rsqrt": lambda t: 1 / np.sqrt(t),
    "erf": special.erf, "pow": np.power, "max": np.maximum, "min": np.minimum, "ge": np.greater_equal,
    "gt": np.greater, "le": np.less_equal, "lt": np.less, "eq": np.equal, "ne": np.not_equal, "square": np.square,
    "is_finite": np.isfinite, "floor": np.floor, "ceil": np.ceil, "clamp": lambda low, t, high: np.clip(t, low, high),
    "convert_element_type": lambda t: t, "rem": np.fmod,
}  # fmt: skip

RULES: Mapping[str, Rule] = {
    **{name: _of_elements(function) for name, function in ELEMENTWISE.items()},
    "and": lambda a, b, **_: a & b,
    "or": lambda a, b, **_: a | b,
    "xor": lambda a, b, **_: a ^ b,
    "not": lambda a, **_: ~a,
    "div": _quotient,
    "integer_pow": lambda t, y, **_: t**y if y >= 0 else 1 / t**-y,
    "select_n": _chosen,
    "broadcast_in_dim": _broadcast,
    "reshape": lambda t, *_, new_sizes, dimensions, **__: t.transpose(dimensions or range(t.ndim)).reshape(new_sizes),
    "transpose": lambda t, permutation, **_: t.transpose(permutation),
    "squeeze": lambda t, dimensions, **_: t.squeeze(tuple(dimensions)),
    "expand_dims": lambda t, dimensions, **_: np.expand_dims(t, tuple(dimensions)),
    "reduce_sum": _over(np.sum),
    "reduce_max": _over(np.max),
    "reduce_min": _over(np.min),
    "reduce_prod": _over(np.prod),
    "reduce_and": _over(np.all),
    "reduce_or": _over(np.any),
    "cumsum": _along(np.cumsum),
    "dot_general": _dot,
    "concatenate": lambda *parts, dimension, **_: np.concatenate(parts, dimension),
    "slice": _slice,
    "rev": lambda t, dimensions, **_: np.flip(t, dimensions),
    "pad": _pad,
    "iota": lambda *_, dimension, shape, **__: np.broadcast_to(
        np.arange(shape[dimension]).reshape([-1 if i == dimension else 1 for i in range(len(shape))]), shape
    ),
}
