"""Connectionist temporal classification: the loss, and the search for the most likely labels.

A path gives each time a class; its labels are what is left when repetitions, and then blanks, are removed. (A. Graves
et al., "Connectionist Temporal Classification", 2006.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import popxl
from poptorch.lowering.losses import reduced
from poptorch.lowering.registry import jax_op, lowers
from popxl import ops
from popxl.ops.precision import rounded_once

_IMPOSSIBLE = -1e30
"""The logarithm of 0: finite, so that gradients are."""

Lengths = popxl.Tensor | Sequence[int]


@lowers("torch.ctc_loss")
def ctc_loss(
    log_probs: popxl.Tensor,
    targets: popxl.Tensor,
    input_lengths: Lengths,
    target_lengths: Lengths,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> popxl.Tensor:
    single = len(log_probs.shape) == 2
    if single:
        log_probs = ops.reshape(log_probs, (log_probs.shape[0], 1, log_probs.shape[1]))
        targets = ops.reshape(targets, (1, targets.shape[0]))
    counts = [ops.flatten(_tensor(lengths)) for lengths in (input_lengths, target_lengths)]
    losses = _ctc_losses(log_probs, targets, *counts, blank=blank, zero_infinity=zero_infinity)
    if reduction == "mean":
        losses = _per_label(losses, counts[1])
    return reduced(ops.reshape(losses, ()) if single else losses, reduction)


def _tensor(lengths: Lengths) -> popxl.Tensor:
    return lengths if isinstance(lengths, popxl.Tensor) else popxl.constant(lengths, popxl.int32)


@jax_op(title="PerLabel")
def _per_label(losses: Any, lengths: Any) -> Any:
    return losses / jnp.maximum(lengths, 1).astype(losses.dtype)


@jax_op(title="CTCLoss")
@rounded_once
def _ctc_losses(
    log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, *, blank: int, zero_infinity: bool
) -> Any:
    """The negative logarithm of the probability of all paths with the right labels, for each sequence."""
    if targets.ndim == 1:  # the labels of all sequences, one after the other
        starts = jnp.cumsum(target_lengths) - target_lengths
        places = starts[:, None] + jnp.arange(targets.shape[0])
        targets = jnp.take(targets, places, mode="clip")
    losses = jax.vmap(_ctc_loss, (1, 0, 0, 0, None))(log_probs, targets, input_lengths, target_lengths, blank)
    impossible = losses > -_IMPOSSIBLE / 2
    return jnp.where(impossible, 0.0 if zero_infinity else jnp.inf, losses)


def _ctc_loss(log_probs: Any, labels: Any, time: Any, count: Any, blank: int) -> Any:
    """Of one sequence: `[time, classes]` and `[labels]`."""
    states = jnp.full(2 * labels.shape[0] + 1, blank).at[1::2].set(labels)  # blanks around and between
    before = jnp.roll(states, 2)
    may_skip = (states != blank) & (states != before) & (jnp.arange(states.shape[0]) >= 2)

    def turn(forward: Any, now: Any) -> tuple[Any, None]:
        t, probabilities = now
        stay, step, skip = forward, _shifted(forward, 1), jnp.where(may_skip, _shifted(forward, 2), _IMPOSSIBLE)
        following = jnp.logaddexp(jnp.logaddexp(stay, step), skip) + probabilities[states]
        following = jnp.maximum(following, _IMPOSSIBLE)
        return jnp.where(t < time, following, forward), None

    first = jnp.where(jnp.arange(states.shape[0]) < 2, log_probs[0][states], _IMPOSSIBLE)
    last, _ = lax.scan(turn, first, (jnp.arange(1, log_probs.shape[0]), log_probs[1:]))
    ends_with_label = jnp.where(count > 0, last[jnp.maximum(2 * count - 1, 0)], _IMPOSSIBLE)
    return -jnp.logaddexp(last[2 * count], ends_with_label)


def _shifted(t: Any, by: int) -> Any:
    return jnp.concatenate([jnp.full(by, _IMPOSSIBLE, t.dtype), t[: t.shape[0] - by]])


# The search -----------------------------------------------------------------------------------------------------------


def beam_search(log_probs: Any, lengths: Any, *, blank: int, beam_width: int, top_paths: int) -> tuple[Any, Any, Any]:
    """The most likely labels, as far as a search of `beam_width` beginnings at a time finds them.

    Args:
        log_probs: `[time, batch, classes]`.
        lengths: `[batch]`.

    Returns:
        Logarithms of the probabilities `[batch, paths]`, numbers of labels `[batch, paths]`, and the labels
        `[batch, paths, time]`, followed by blanks.
    """
    search = jax.vmap(lambda p, n: _search(p, n, blank, beam_width, top_paths), (1, 0))
    found: tuple[Any, Any, Any] = search(log_probs.astype(jnp.float32), lengths)
    return found


def _search(log_probs: Any, time: Any, blank: int, width: int, paths: int) -> tuple[Any, Any, Any]:
    steps, classes = log_probs.shape
    width = max(width, paths)
    labels = jnp.full((width, steps), blank)
    sizes = jnp.where(jnp.arange(width) == 0, 0, -1)  # -1: there is no such beginning
    with_blank = jnp.where(jnp.arange(width) == 0, 0.0, _IMPOSSIBLE)  # of paths that end with a blank
    with_label = jnp.full(width, _IMPOSSIBLE)

    def turn(beams: Any, now: Any) -> tuple[Any, None]:
        t, step = now
        following = _extended(beams, step, blank)
        return jax.tree.map(lambda new, old: jnp.where(t < time, new, old), following, beams), None

    beams = (labels, sizes, with_blank, with_label)
    (labels, sizes, with_blank, with_label), _ = lax.scan(turn, beams, (jnp.arange(steps), log_probs))
    scores, best = lax.top_k(jnp.logaddexp(with_blank, with_label), paths)
    return scores, jnp.maximum(sizes[best], 0), labels[best]


def _extended(beams: Any, step: Any, blank: int) -> Any:
    """The best beginnings after one more time: those there are, and those with one more label."""
    labels, sizes, with_blank, with_label = beams
    width, steps = labels.shape
    classes = step.shape[0]
    numbers = jnp.arange(width)
    last = jnp.where(sizes > 0, labels[numbers, jnp.maximum(sizes - 1, 0)], -1)
    either = jnp.logaddexp(with_blank, with_label)
    repeated = jnp.where(last >= 0, with_label + step[last], _IMPOSSIBLE)
    # a label more, for each beginning: a repetition needs a blank between
    grown = jnp.where(jnp.arange(classes) == last[:, None], with_blank[:, None], either[:, None]) + step
    grown = jnp.where((jnp.arange(classes) == blank) | (sizes[:, None] < 0), _IMPOSSIBLE, grown)
    # what grows into a beginning that is there already counts there
    shorter = labels.at[numbers, jnp.maximum(sizes - 1, 0)].set(blank)
    same = (shorter[:, None] == labels[None]).all(-1) & (sizes[:, None] - 1 == sizes[None]) & (sizes[None] >= 0)
    parent = jnp.argmax(same, 1)
    joins = same.any(1) & (sizes > 0)
    repeated = jnp.where(joins, jnp.logaddexp(repeated, grown[parent, last]), repeated)
    grown = grown.at[jnp.where(joins, parent, width), last].set(_IMPOSSIBLE, mode="drop")
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
        jnp.maximum(jnp.where(old, kept[0][parent], _IMPOSSIBLE), _IMPOSSIBLE),
        jnp.maximum(jnp.where(old, kept[1][parent], grown[parent, label]), _IMPOSSIBLE),
    )


_beam_search = jax_op("poptorch.ctc_beam_search_decoder", title="CTCBeamSearch", gradient=None)(
    lambda probs, lengths, *, blank, beam_width, top_paths: beam_search(
        probs, lengths, blank=blank, beam_width=beam_width, top_paths=top_paths
    )
)
