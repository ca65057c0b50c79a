"""Random keys of JAX (`jax.random.key`) as tensors: the tensor of a key holds its data, numbers of 32 bits.

An array of keys is a tensor with one dimension more, the last: two numbers for the generator that JAX takes by default.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun


def generator_of(aval: Any) -> str | None:
    """The generator of an array of keys, `"threefry2x32"` by default; `None` for other values.

    Generators that JAX knows by no name are not among them.
    """
    known = _key_type(aval.dtype) if _holds_keys(aval) else None
    return None if known is None else known[0]


def data_type(aval: Any) -> Any:
    """Type of the key data, for key types; other types unchanged."""
    if generator_of(aval) is None:
        return aval
    data = _key_type(aval.dtype)[1]  # type: ignore[index]
    return jax.ShapeDtypeStruct((*aval.shape, *data.shape), data.dtype)


@cache
def _key_type(dtype: Any) -> tuple[str, Any] | None:
    """Name of a generator, and data type of a single key."""
    names: list[Any] = []

    def data(key: Any) -> Any:
        names.append(jax.random.key_impl(key))
        return jax.random.key_data(key)

    described = jax.eval_shape(data, jax.ShapeDtypeStruct((), dtype))
    return (names[0], described) if isinstance(names[0], str) else None


def _holds_keys(value: Any) -> bool:
    return hasattr(value, "dtype") and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)


def with_keys(arrays: Iterable[Any], generators: Iterable[str | None]) -> list[Any]:
    """Arrays, with keys in place of their data."""
    pairs = zip(arrays, generators, strict=True)
    return [array if impl is None else jax.random.wrap_key_data(array, impl=impl) for array, impl in pairs]


def key_data(arrays: Iterable[Any]) -> list[Any]:
    """Arrays, with data in place of keys."""
    return [jax.random.key_data(array) if _holds_keys(array) else array for array in arrays]


def on_key_data(code: ClosedJaxpr) -> Callable[..., Sequence[Any]]:
    """A function that takes and returns the data of keys, in place of keys."""
    generators = [generator_of(value.aval) for value in code.jaxpr.invars]
    return lambda *arrays: key_data(jaxpr_as_fun(code)(*with_keys(arrays, generators)))


# Parameters of equations ---------------------------------------------------------------------------------------------


def generator_name(value: Any) -> str | None:
    """The name of a generator that is the parameter of an equation, and no plain value; `None` for anything else."""
    name = getattr(value, "name", None)
    return name if type(value).__name__ == "PRNGImpl" and isinstance(name, str) and name in _NAMED else None


def generator_from(name: str) -> Any:
    """Generator by name, as a parameter of an equation."""
    traced = jax.make_jaxpr(lambda: jax.random.key(0, impl=name))()
    return next(equation.params["impl"] for equation in traced.eqns if "impl" in equation.params)


_NAMED = ("threefry2x32", "rbg", "unsafe_rbg")
