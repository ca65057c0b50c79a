"""Abstract evaluation of JAX functions: the specs of their results, and the values that their gradients read.

The one file of `popxl.core` that calls JAX. Tracing is abstract: no device is started.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal, jaxprs_in_params
from jax.interpreters import partial_eval

from popxl.dtypes import dtype
from popxl.errors import PopxlError
from popxl.values.spec import TensorSpec


def abstract_evaluation(
    function: Callable[..., Any], specs: Sequence[TensorSpec]
) -> TensorSpec | tuple[TensorSpec, ...]:
    """Result specs of a JAX function, from array specs.

    JAX caches traces by function object.

    Raises:
        PopxlError: if JAX refuses the operands; the message includes JAX's.
    """
    arrays = [jax.ShapeDtypeStruct(spec.shape, spec.dtype.as_jax()) for spec in specs]
    try:
        with _precision(specs):
            result = jax.eval_shape(function, *arrays)
    except (TypeError, ValueError) as problem:
        raise PopxlError(f"JAX refuses these operands: {problem}.") from problem
    if isinstance(result, tuple | list):
        return tuple(TensorSpec(r.shape, dtype.as_dtype(r.dtype)) for r in result)
    return TensorSpec(result.shape, dtype.as_dtype(result.dtype))


def trace(
    function: Callable[..., Any], specs: Sequence[TensorSpec], results: Sequence[TensorSpec] = ()
) -> tuple[Any, Any]:
    """Trace a JAX function on array specs: jaxpr and result tree.

    `results` are the specs of the results, for those that may be 64 bits wide although no operand is.
    """
    arrays = [jax.ShapeDtypeStruct(spec.shape, spec.dtype.as_jax()) for spec in specs]
    with _precision((*specs, *results)):
        return jax.make_jaxpr(function, return_shape=True)(*arrays)


def needed(
    function: Callable[..., Any], specs: Sequence[TensorSpec], results: Sequence[TensorSpec] = ()
) -> tuple[Any, tuple[bool, ...]]:
    """The jaxpr of a JAX function without dead code, and which arguments it then still reads; see `trace`."""
    jaxpr = trace(function, specs, results)[0].jaxpr
    jaxpr, used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return jaxpr, tuple(used)


def with_results(traced: Any, which: Sequence[bool] | None = None, all_arguments: bool = True) -> Any:
    """A closed jaxpr with selected results, by default all, and without dead equations.

    Args:
        which: flag for each result: whether to return it.
        all_arguments: whether to keep arguments that are not needed.
    """
    which = [True] * len(traced.jaxpr.outvars) if which is None else which
    jaxpr, _ = partial_eval.dce_jaxpr(traced.jaxpr, which, instantiate=all_arguments)
    return ClosedJaxpr(jaxpr, traced.consts)


def computed_from_results(traced: Any, count: int) -> Any | None:
    """A closed jaxpr that takes its last `count` results as further arguments, and computes the other results.

    `None` if it cannot: if one of these results is an argument, a literal or another result, or if an equation that
    computes one computes another value that is needed.
    """
    jaxpr = traced.jaxpr
    others, given = jaxpr.outvars[:-count], jaxpr.outvars[-count:]
    if len({*map(id, given), *map(id, jaxpr.invars)}) < count + len(jaxpr.invars):
        return None
    if any(isinstance(value, Literal) for value in given):
        return None
    known, sought, equations = {*given}, _variables(others), []
    for equation in reversed(jaxpr.eqns):
        if not (sought - known).isdisjoint(equation.outvars):
            if not known.isdisjoint(equation.outvars):
                return None
            equations.append(equation)
            sought |= _variables(equation.invars)
    invars = [*jaxpr.invars, *given]
    return ClosedJaxpr(jaxpr.replace(invars=invars, outvars=others, eqns=equations[::-1]), traced.consts)


def _variables(values: Sequence[Any]) -> set[Any]:
    return {value for value in values if not isinstance(value, Literal)}


def depend_on_arguments(jaxpr: Any) -> list[bool]:
    """Dependence of each result of a jaxpr on the arguments, as flags."""
    found = {*map(id, jaxpr.invars)}
    for equation in jaxpr.eqns:
        if not found.isdisjoint(map(id, equation.invars)):
            found.update(map(id, equation.outvars))
    return [id(value) in found for value in jaxpr.outvars]


def traces_in(equation: Any) -> list[Any]:
    """Nested jaxprs of an equation: branches, loop bodies, called functions."""
    return [*jaxprs_in_params(equation.params)]


def leaf_equations(jaxpr: Any) -> Iterator[Any]:
    """Equations of a jaxpr that hold no jaxprs, including those of nested ones."""
    for equation in jaxpr.eqns:
        inner = traces_in(equation)
        if not inner:
            yield equation
        for each in inner:
            yield from leaf_equations(each)


def arguments_used(jaxpr: Any) -> tuple[bool, ...]:
    """Flag for each argument of a jaxpr: whether the results depend on it after dead code elimination."""
    return tuple(partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[1])


def _precision(specs: Sequence[TensorSpec]) -> AbstractContextManager[Any]:
    """Context in which JAX keeps 64-bit types, if a spec has one."""
    return jax.enable_x64(True) if any(spec.dtype.is_wide for spec in specs) else nullcontext()
