"""Elementwise special functions: error, gamma, Bessel, entropy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.special as special

import popxl
from poptorch.lowering.elementwise import Function, binary, binary_op, floating, unary, unary_op
from poptorch.lowering.logic import limited
from poptorch.lowering.registry import lowers
from popxl import OpKind, ops
from popxl.extend.ops import broadcast

_OF_FLOATS: dict[str, Function] = {
    "erf": special.erf,
    "erfc": special.erfc,
    "erfinv": special.erfinv,
    "special_i0e": special.i0e,
    "special_i1e": special.i1e,
    "special_log_ndtr": special.log_ndtr,
}
for _name, _function in _OF_FLOATS.items():
    unary(_name, unary_op(_name, _function))


def erfcx(input: Any) -> Any:
    """`exp(x²) erfc(x)`; large arguments use an asymptotic series against overflow and underflow."""
    large = input > 5
    near, far = jnp.where(large, 5, input), jnp.where(large, input, 5)
    x = 1 / (2 * far * far)
    series = 1 - x * (1 - 3 * x * (1 - 5 * x * (1 - 7 * x * (1 - 9 * x))))
    by_parts = 2 * jnp.exp(near * near + special.log_ndtr(-math.sqrt(2) * near))
    return jnp.where(large, series / (far * math.sqrt(math.pi)), by_parts)


unary(
    "special_erfcx",
    unary_op("erfcx", erfcx, gradient={"input": lambda g, input, out: g * (2 * input * out - 2 / math.sqrt(math.pi))}),
)

# Their slopes are infinite at the ends, as in PyTorch.
_density = unary_op("density", lambda t: jnp.exp(-t * t / 2) / math.sqrt(2 * math.pi))
unary("special_ndtri", unary_op("ndtri", special.ndtri, gradient={"input": lambda g, out: g / _density(out)}))
unary("special_modified_bessel_i0", unary_op("modified_bessel_i0", special.i0))
unary("special_modified_bessel_i1", unary_op("modified_bessel_i1", special.i1))
unary("special_spherical_bessel_j0", unary_op("spherical_bessel_j0", lambda t: jnp.sinc(t / math.pi)))

_i1_slope = unary_op("i1_slope", lambda t: jnp.where(t == 0, 0.5, special.i0(t) - special.i1(t) / t))
_i1 = unary_op("i1", special.i1, gradient={"input": lambda g, input: g * _i1_slope(input)})
unary("special_i1", _i1)
unary("i0", unary_op("i0", special.i0, gradient={"input": lambda g, input: g * _i1(input)}))  # JAX's is wrong at 0

binary("igamma", binary_op("igamma", special.gammainc), of_floats=True)
binary("igammac", binary_op("igammac", special.gammaincc), of_floats=True)

# Gamma functions ------------------------------------------------------------------------------------------------------


def hurwitz(s: Any, q: Any) -> Any:
    """Hurwitz zeta function, Σ (q + k)^-s for k = 0, 1, ...; JAX's series is correct for q > 0 only."""
    s, q = jnp.broadcast_arrays(s, q)
    pole = (q <= 0) & (q == jnp.floor(q))

    def with_term(sum_and_q: tuple[Any, Any]) -> tuple[Any, Any]:
        total, q = sum_and_q
        return jnp.where(q < 0, total + q**-s, total), jnp.where(q < 0, q + 1, q)

    start = jnp.zeros_like(q), jnp.where(pole, 1, q)
    total, rest = jax.lax.while_loop(lambda sum_and_q: jnp.any(sum_and_q[1] < 0), with_term, start)
    steep = (s > 100) | (rest == jnp.inf)  # only the first terms remain, where JAX may have NaN
    series = jnp.where(steep, rest**-s + (rest + 1) ** -s, special.zeta(jnp.where(steep, 2, s), rest))
    return jnp.where(pole & (s > 1), jnp.inf, total + series)


def _derivative_of_digamma(input: Any, *, n: int) -> Any:
    """See Abramowitz and Stegun, 6.4.10."""
    if n == 0:
        return jnp.where(input == 0, -jnp.copysign(jnp.inf, input), special.digamma(input))
    return (-1) ** (n + 1) * math.factorial(n) * hurwitz(jnp.full_like(input, n + 1), input)


_polygamma: OpKind = unary_op(
    "polygamma", _derivative_of_digamma, gradient={"input": lambda g, input, n: g * _polygamma(input, n=n + 1)}
)
_zeta: OpKind = unary_op(
    "zeta",
    hurwitz,
    shape=broadcast,
    operands=("s", "q"),
    gradient={"q": lambda g, s, q: -g * s * _zeta(s + 1, q)},
)
_lgamma = unary_op("lgamma", special.gammaln, gradient={"input": lambda g, input: g * _polygamma(input, n=0)})

unary("lgamma", _lgamma)
unary("digamma", lambda t: _polygamma(t, n=0))
unary("polygamma", _polygamma)
binary("special_zeta", _zeta, of_floats=True)


# With logarithms ------------------------------------------------------------------------------------------------------


@lowers("aten.logit")
def logit(input: popxl.Tensor, eps: float | None = None) -> popxl.Tensor:
    return _logit(floating(input), eps=eps)


def _log_odds(input: Any, *, eps: float | None) -> Any:
    t = input if eps is None else limited(input, eps, 1 - eps)
    return jnp.log(t / (1 - t))


def _logit_slope(g: Any, input: Any, *, eps: float | None) -> Any:
    slope = g / abs(input * (1 - input))
    low, high, beyond = (0, 1, math.nan) if eps is None else (eps, 1 - eps, 0)
    return jnp.where((input < low) | (input > high), beyond, slope)


_logit_grad = unary_op("logit_grad", _logit_slope, operands=("g", "input"))
_logit = unary_op("logit", _log_odds, gradient={"input": lambda g, input, eps: _logit_grad(g, input, eps=eps)})

_entr = unary_op(
    "entr",
    lambda input: jnp.where(input < 0, -jnp.inf, -special.xlogy(input, input)),
    gradient={"input": lambda g, input: -g * (ops.log(input) + 1)},
)
unary("special_entr", _entr)


def _weighted_log(name: str, log: Callable[[Any], Any], end: float) -> None:
    """input · log(other), with 0 for zero `input` even outside the logarithm's domain, which ends at `end`."""

    def product(input: Any, other: Any) -> Any:
        return jnp.where((input == 0) & ~jnp.isnan(other), 0, input * log(other))

    def slope(g: Any, input: Any, other: Any) -> Any:
        return jnp.where((input == 0) & (other <= end), 0, g * log(other))

    to_input = unary_op(f"{name}_grad", slope, shape=broadcast, operands=("g", "input", "other"))
    rules = {
        "input": lambda g, input, other: to_input(g, input, other),
        "other": lambda g, input, other: g * input / (other - end),
    }
    binary(name, binary_op(name, product, gradient=rules), of_floats=True)


_weighted_log("xlogy", jnp.log, 0)
_weighted_log("special_xlog1py", jnp.log1p, -1)
