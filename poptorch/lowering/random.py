"""Random numbers. Each op draws from its own seed, so a fixed program seed reproduces all numbers."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import popxl
from poptorch.lowering.emission import emission, next_seed, wanted
from poptorch.lowering.operands import Number, cast_like
from poptorch.lowering.registry import jax_op, lowers
from popxl import ops
from popxl.extend.kernels import round_once
from popxl.op import VJP, OpKind


def _draw(name: str, function: Callable[..., Any], gradient: Any = None) -> Callable[..., popxl.Tensor]:
    """Wrap a function of a JAX key as an op; each call draws a new seed. A `shape` argument is that of the lowered op's
    result."""
    is_shaped = "shape" in inspect.signature(function).parameters

    @functools.wraps(function)
    def from_seed(seed: Any, *arrays: Any, **numbers: Any) -> Any:
        return function(jax.random.wrap_key_data(seed, impl="threefry2x32"), *arrays, **numbers)

    kind: OpKind = jax_op(title=f"Random{name}", gradient=gradient)(round_once(from_seed))

    def draw(*parameters: popxl.Tensor, **numbers: Any) -> popxl.Tensor:
        return kind(next_seed(), *parameters, **numbers | ({"shape": wanted().shape} if is_shaped else {}))

    return draw


# Uniform and normal ---------------------------------------------------------------------------------------------------


def uniform(low: float = 0, high: float = 1) -> popxl.Tensor:
    """Uniform random numbers from `low` to `high`."""
    return ops.random_uniform(next_seed(), wanted().shape, low, high, wanted().dtype)


lowers("aten.rand", "aten.rand_like")(lambda **like: uniform())


@lowers("aten.uniform_")
def uniform_(to: float = 1, **given: Any) -> popxl.Tensor:
    return uniform(given.get("from", 0), to)


@lowers("aten.normal", "aten.normal_")
def normal(mean: Number | popxl.Tensor = 0, std: Number | popxl.Tensor = 1, **like: Any) -> popxl.Tensor:
    spec = wanted()
    if isinstance(mean, popxl.Tensor) or isinstance(std, popxl.Tensor):
        return _normal(*(cast_like(each, spec.dtype) for each in (mean, std)))
    if spec.dtype.is_complex:  # both parts have half of the variance
        parts = ops.random_normal(next_seed(), (*spec.shape, 2), 0, std / math.sqrt(2))
        return ops.view_as_complex(parts) + mean
    return ops.random_normal(next_seed(), spec.shape, mean, std, spec.dtype)


lowers("aten.randn", "aten.randn_like")(lambda **like: normal())
_normal = _draw("Normal", lambda key, mean, std, *, shape: mean + std * jax.random.normal(key, shape, mean.dtype))


@lowers("aten.log_normal_")
def log_normal(mean: float = 1, std: float = 2, **like: Any) -> popxl.Tensor:
    return ops.exp(ops.random_normal(next_seed(), wanted().shape, mean, std))


# Other univariate distributions ---------------------------------------------------------------------------------------


@lowers("aten.bernoulli")
def bernoulli(input: popxl.Tensor, p: Number | popxl.Tensor | None = None) -> popxl.Tensor:
    return bernoulli_(input if p is None else p)


@lowers("aten.bernoulli_")
def bernoulli_(p: Number | popxl.Tensor = 0.5) -> popxl.Tensor:
    probability = p if isinstance(p, popxl.Tensor) else popxl.constant(p, popxl.float32)
    return _bernoulli(probability)


_bernoulli = _draw("Bernoulli", lambda key, p, *, shape: jax.random.bernoulli(key, p, shape))
_cauchy = _draw("Cauchy", lambda key, *, shape: jax.random.cauchy(key, shape, jnp.float32))
_exponential = _draw("Exponential", lambda key, *, shape: jax.random.exponential(key, shape, jnp.float32))
_geometric = _draw("Geometric", lambda key, *, p, shape: jax.random.geometric(key, p, shape, jnp.int32))


@lowers("aten.cauchy_")
def cauchy(median: float = 0, sigma: float = 1, **like: Any) -> popxl.Tensor:
    return _cauchy() * sigma + median


@lowers("aten.exponential_")
def exponential(lambd: float = 1, **like: Any) -> popxl.Tensor:
    return _exponential() / lambd


@lowers("aten.geometric_")
def geometric(p: float, **like: Any) -> popxl.Tensor:
    return _geometric(p=p)


lowers("aten.poisson")(_draw("Poisson", lambda key, input: jax.random.poisson(key, input)))
lowers("aten.binomial")(_draw("Binomial", lambda key, count, prob: jax.random.binomial(key, count, prob)))
lowers("aten._standard_gamma")(_draw("Gamma", lambda key, input: jax.random.gamma(key, input), VJP))
lowers("aten._sample_dirichlet")(_draw("Dirichlet", lambda key, input: jax.random.dirichlet(key, input), VJP))


# Integers -------------------------------------------------------------------------------------------------------------


def _integers(low: int, high: int) -> popxl.Tensor:
    """Random integers, `low` inclusive, `high` exclusive."""
    if not -(2**31) <= low < high <= 2**31:
        raise ValueError(f"integers from {low} to {high} are asked for; those of the device have 32 bits.")
    return _randint(low=low, high=min(high, 2**31 - 1))


_randint = _draw("Randint", lambda key, *, low, high, shape: jax.random.randint(key, shape, low, high, jnp.int32))


@lowers("aten.randint", "aten.randint_like")
def randint(high: int, low: int = 0, **like: Any) -> popxl.Tensor:
    return _integers(low, high)


@lowers("aten.random_")
def random_(to: int | None = None, **given: Any) -> popxl.Tensor:
    return _integers(given.get("from", 0), _beyond(wanted().dtype) if to is None else to)


def _beyond(dtype: popxl.dtype) -> int:
    """Exclusive upper bound of random integers: a dtype's whole range; for floats, the contiguous exactly representable
    integers.
    """
    if dtype.is_floating_point:
        return 2 ** (jnp.finfo(dtype.as_jax()).nmant + 1) + 1
    return 2 if dtype is popxl.bool else int(jnp.iinfo(dtype.as_jax()).max) + 1


_permutation = _draw("Permutation", lambda key, *, n: jax.random.permutation(key, n))


lowers("aten.randperm")(lambda n, **like: _permutation(n=n))


@lowers("aten.multinomial")
def multinomial(input: popxl.Tensor, num_samples: int, replacement: bool = False) -> popxl.Tensor:
    return _multinomial(input, count=num_samples, replacement=replacement)


def _categories(key: Any, input: Any, *, count: int, replacement: bool) -> Any:
    weights = jnp.log(input)
    if replacement:
        return jax.random.categorical(key, weights[..., None, :], shape=(*input.shape[:-1], count))
    return jax.lax.top_k(weights + jax.random.gumbel(key, input.shape, weights.dtype), count)[1]


_multinomial = _draw("Multinomial", _categories)


# The generator --------------------------------------------------------------------------------------------------------


lowers("poptorch.manual_seed")(lambda seed: emission().seeds.restart(seed))
lowers("poptorch.get_rng_state")(lambda number: emission().seeds.save(number))
lowers("poptorch.set_rng_state")(lambda number: emission().seeds.restore(number))


# Dropout --------------------------------------------------------------------------------------------------------------


@lowers("torch.dropout")
def dropout(input: popxl.Tensor, p: float | popxl.Tensor, training: bool) -> popxl.Tensor:
    if not training:
        return ops.identity(input)
    if isinstance(p, popxl.Tensor):
        kept = ops.random_uniform(next_seed(), input.shape) >= p
        return input * (ops.cast(kept, popxl.float32) / ops.maximum(1 - p, popxl.constant(1e-30, popxl.float32)))
    if p == 0:
        return ops.identity(input)
    return input * 0 if p == 1 else ops.dropout(input, next_seed(), p)
