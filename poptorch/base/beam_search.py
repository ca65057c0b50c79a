"""Beam search for connectionist temporal classification, as a JAX function.

Programs compute it, and so does the host in `poptorch.ctc_beam_search_decoder`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

IMPOSSIBLE = -1e30
"""Finite logarithm of 0, so that gradients are finite."""


def beam_search(log_probs: Any, lengths: Any, *, blank: int, beam_width: int, top_paths: int) -> tuple[Any, Any, Any]:
    """Most likely label sequences, approximated by beam search with `beam_width` prefixes.

    Args:
        log_probs: `[time, batch, classes]`.
        lengths: `[batch]`.

    Returns:
        Logarithms of the probabilities `[batch, paths]`, numbers of labels `[batch, paths]`, and the labels
        `[batch, paths, time]`, followed by blanks.
    """
    search = jax.vmap(lambda p, n: _search(p, n, blank, beam_width, top_paths), (1, 0))
    result: tuple[Any, Any, Any] = search(log_probs.astype(jnp.float32), lengths)
    return result


compiled_beam_search = jax.jit(beam_search, static_argnames=("blank", "beam_width", "top_paths"))
"""Beam search for the host: calls with equal shapes share one compilation."""


def _search(log_probs: Any, time: Any, blank: int, width: int, paths: int) -> tuple[Any, Any, Any]:
    steps, _ = log_probs.shape
    width = max(width, paths)
    labels = jnp.full((width, steps), blank)
    sizes = jnp.where(jnp.arange(width) == 0, 0, -1)  # -1: no such prefix
    with_blank = jnp.where(jnp.arange(width) == 0, 0.0, IMPOSSIBLE)  # of paths that end with a blank
    with_label = jnp.full(width, IMPOSSIBLE)

    def step_beams(beams: Any, now: Any) -> tuple[Any, None]:
        t, step = now
        following = _extended(beams, step, blank)
        return jax.tree.map(lambda new, old: jnp.where(t < time, new, old), following, beams), None

    beams = (labels, sizes, with_blank, with_label)
    (labels, sizes, with_blank, with_label), _ = lax.scan(step_beams, beams, (jnp.arange(steps), log_probs))
    scores, best = lax.top_k(jnp.logaddexp(with_blank, with_label), paths)
    return scores, jnp.maximum(sizes[best], 0), labels[best]


def _extended(beams: Any, step: Any, blank: int) -> Any:
    """Extend beams by one time step: best prefixes among current ones and one-label extensions."""
    labels, sizes, with_blank, with_label = beams
    width, steps = labels.shape
    classes = step.shape[0]
    numbers = jnp.arange(width)
    last = jnp.where(sizes > 0, labels[numbers, jnp.maximum(sizes - 1, 0)], -1)
    either = jnp.logaddexp(with_blank, with_label)
    repeated = jnp.where(last >= 0, with_label + step[last], IMPOSSIBLE)
    # a label more, for each beginning: a repetition needs a blank between
    grown = jnp.where(jnp.arange(classes) == last[:, None], with_blank[:, None], either[:, None]) + step
    grown = jnp.where((jnp.arange(classes) == blank) | (sizes[:, None] < 0), IMPOSSIBLE, grown)
    # a path that grows into an existing prefix adds to it
    shorter = labels.at[numbers, jnp.maximum(sizes - 1, 0)].set(blank)
    same = (shorter[:, None] == labels[None]).all(-1) & (sizes[:, None] - 1 == sizes[None]) & (sizes[None] >= 0)
    parent = jnp.argmax(same, 1)
    joins = same.any(1) & (sizes > 0)
    repeated = jnp.where(joins, jnp.logaddexp(repeated, grown[parent, last]), repeated)
    grown = grown.at[jnp.where(joins, parent, width), last].set(IMPOSSIBLE, mode="drop")
    kept = (either + step[blank], repeated)
    scores = jnp.concatenate([jnp.logaddexp(*kept), grown.reshape(-1)])
    _, best = lax.top_k(scores, width)
    old = best < width
    parent = jnp.where(old, best, (best - width) // classes)
    label = (best - width) % classes
    size = sizes[parent]
    longer = labels[parent].at[numbers, jnp.where(old, steps, size)].set(label, mode="drop")
    return (
        jnp.where(old[:, None], labels[parent], longer),
        jnp.where(old, size, size + 1),
        jnp.maximum(jnp.where(old, kept[0][parent], IMPOSSIBLE), IMPOSSIBLE),
        jnp.maximum(jnp.where(old, kept[1][parent], grown[parent, label]), IMPOSSIBLE),
    )
