"""The next token of a text, drawn from a model's logits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import popxl
from popxl import OpKind
from popxl.errors import PopxlError
from popxl.extend.arguments import integer, number
from popxl.extend.kernels import draw_sharded, wide_dtype


def _sample(logits: Any, draws: Any, *, temperature: float, top_k: int | None, top_p: float) -> Any:
    scores = logits.astype(wide_dtype(logits))
    if temperature == 0:
        return jnp.argmax(scores, -1).astype(jnp.int32)
    scores, places = scores / temperature, None
    if top_k is not None or top_p < 1:
        scores, places = lax.top_k(scores, min(top_k or scores.shape[-1], scores.shape[-1]))
    shares = jax.nn.softmax(scores)
    if top_p < 1:
        before = jnp.cumsum(shares, -1) - shares
        shares = jnp.where((before < top_p).at[..., 0].set(True), shares, 0)
    sums = jnp.cumsum(shares, -1)
    total = sums[..., -1:]
    # A product with a number just below 1 may be rounded up to the total, which no sum exceeds.
    level = jnp.minimum(draws[..., None].astype(sums.dtype) * total, jnp.nextafter(total, jnp.zeros_like(total)))
    chosen = jnp.argmax(sums > level, -1)
    if places is not None:
        chosen = jnp.take_along_axis(places, chosen[..., None], -1)[..., 0]
    return chosen.astype(jnp.int32)


def _tokens(logits: Any, draws: Any, **how: Any) -> popxl.TensorSpec:
    if not logits.shape or not logits.shape[-1] or not logits.dtype.is_floating_point:
        raise PopxlError("expected `logits` to be floats of shape (..., vocabulary).")
    if draws.shape != logits.shape[:-1] or not draws.dtype.is_floating_point:
        raise PopxlError(f"expected a number in `draws` for each token to be drawn, of shape {logits.shape[:-1]}.")
    return popxl.TensorSpec(logits.shape[:-1], popxl.int32)


_sample = OpKind("SampleToken", _sample, shape=_tokens, result="token", gradient=None, key="popxl_addons.SampleToken")


def sample_token(
    logits: popxl.Tensor,
    draws: popxl.Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
) -> popxl.Tensor:
    """Sample tokens from logit distributions.

    The logits are divided by `temperature`; then the `top_k` largest are kept; then the smallest number of the most
    likely of these with a total probability of at least `top_p`. From the remaining tokens, a number of `draws` selects
    the one at which the cumulative probability exceeds it: uniform numbers select each token with its probability.

    Args:
        logits: tensor of shape (..., vocabulary).
        draws: numbers from 0 to below 1, of shape (...), such as `ops.random_uniform` draws.
        temperature: below 1, likely tokens become more likely; 0 takes the most likely, regardless of the draw.
        top_k: number of the most likely tokens to draw from; all by default.
        top_p: share of the probability to draw from.

    Returns:
        int32 of shape (...). No gradient flows.

    Raises:
        TypeError: if one of these is not a number, or `top_k` not an integer.
        ValueError: for a negative `temperature`, a `top_k` below 1, or a `top_p` that is not above 0 and at most 1.
        PopxlError: for shapes or dtypes that do not fit.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     seed = popxl.constant(popxl.create_seeds(1))
        ...     token = sample_token(popxl.constant(np.ones((2, 7), np.float32)), popxl.ops.random_uniform(seed, (2,)))
        >>> token.shape, token.dtype
        ((2,), popxl.dtypes.int32)
    """
    temperature, top_p = number(temperature, "sample_token: `temperature`"), number(top_p, "sample_token: `top_p`")
    kept = None if top_k is None else integer(top_k, "sample_token: `top_k`")
    if not temperature >= 0:
        raise ValueError(f"sample_token: `temperature` is {temperature}; expected 0 or more.")
    if kept is not None and kept < 1:
        raise ValueError(f"sample_token: `top_k` is {top_k}; expected 1 or more, or None for all.")
    if not 0 < top_p <= 1:
        raise ValueError(f"sample_token: `top_p` is {top_p}; expected more than 0, and at most 1.")
    return _sample(logits, draws, temperature=float(temperature), top_k=kept, top_p=float(top_p))


def _uniform(seeds: Any, places: Any) -> Any:
    def draw(seed: Any, place: Any) -> Any:
        return draw_sharded(lambda key: jax.random.uniform(jax.random.fold_in(key, place), ()), seed)

    return jax.vmap(draw)(seeds, places)


def _uniform_draws(seeds: Any, places: Any) -> popxl.TensorSpec:
    if len(seeds.shape) != 2 or seeds.shape[1] != 2 or seeds.dtype is not popxl.uint32:
        raise PopxlError("expected `seeds` to be uint32 of shape (batch, 2), as `popxl.create_seeds` makes them.")
    if places.shape != seeds.shape[:1] or not places.dtype.is_int:
        raise PopxlError(f"expected an integer in `places` for each seed, of shape {seeds.shape[:1]}.")
    return popxl.TensorSpec(places.shape, popxl.float32)


uniform_at = OpKind(
    "UniformAtPlaces",
    _uniform,
    shape=_uniform_draws,
    operands=("seeds", "places"),
    result="draws",
    gradient=None,
    key="popxl_addons.UniformAtPlaces",
)
"""Uniform draws, one per text, from 0 to below 1. A draw depends on the text's seed and the position alone, whichever
other texts are in the batch."""
