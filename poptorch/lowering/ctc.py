"""Connectionist temporal classification: the loss and the beam search.

A path assigns a class to each time; its labels remain after removing repetitions, and then blanks. (A. Graves et al.,
"Connectionist Temporal Classification", 2006.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import popxl
from poptorch.base.beam_search import IMPOSSIBLE, beam_search
from poptorch.lowering.losses import reduced
from poptorch.lowering.registry import jax_op, lowers
from popxl import ops
from popxl.extend.kernels import round_once

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
@round_once
def _ctc_losses(
    log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, *, blank: int, zero_infinity: bool
) -> Any:
    """Negative log-likelihood of the target labels per sequence, summed over all alignment paths.

    Slopes are PyTorch's: those of `log_probs` as the `log_softmax` of the differentiated values, to which the sum of
    the probabilities adds nothing; and NaN where no path is valid.
    """
    if targets.ndim == 1:  # the labels of all sequences, concatenated
        starts = jnp.cumsum(target_lengths) - target_lengths
        places = starts[:, None] + jnp.arange(targets.shape[0])
        targets = jnp.take(targets, places, mode="clip")
    losses = jax.vmap(_ctc_loss, (1, 0, 0, 0, None))(log_probs, targets, input_lengths, target_lengths, blank)
    impossible = losses > -IMPOSSIBLE / 2
    is_read = (jnp.arange(log_probs.shape[0])[:, None] < input_lengths)[..., None]
    total = jnp.where(is_read, jnp.exp(log_probs), 0).sum((0, 2))
    losses = losses + (total - lax.stop_gradient(total))
    if zero_infinity:
        return jnp.where(impossible, 0, losses)
    without_slope = jnp.sqrt(jnp.where(impossible, 0 * total, 1))
    return jnp.where(impossible, jnp.inf + without_slope, losses)


def _ctc_loss(log_probs: Any, labels: Any, time: Any, count: Any, blank: int) -> Any:
    """CTC loss of one sequence: log probabilities `[time, classes]`, labels `[labels]`."""
    states = jnp.full(2 * labels.shape[0] + 1, blank).at[1::2].set(labels)  # blanks around and between
    before = jnp.roll(states, 2)
    may_skip = (states != blank) & (states != before) & (jnp.arange(states.shape[0]) >= 2)

    def step_forward(forward: Any, now: Any) -> tuple[Any, None]:
        t, probabilities = now
        stay, step, skip = forward, _shifted(forward, 1), jnp.where(may_skip, _shifted(forward, 2), IMPOSSIBLE)
        following = jnp.logaddexp(jnp.logaddexp(stay, step), skip) + probabilities[states]
        following = jnp.maximum(following, IMPOSSIBLE)
        return jnp.where(t < time, following, forward), None

    first = jnp.where(jnp.arange(states.shape[0]) < 2, log_probs[0][states], IMPOSSIBLE)
    last, _ = lax.scan(step_forward, first, (jnp.arange(1, log_probs.shape[0]), log_probs[1:]))
    ends_with_label = jnp.where(count > 0, last[jnp.maximum(2 * count - 1, 0)], IMPOSSIBLE)
    of_nothing = jnp.where(count > 0, -IMPOSSIBLE, 0)  # without time steps, there is one path: the one without labels
    return jnp.where(time > 0, -jnp.logaddexp(last[2 * count], ends_with_label), of_nothing)


def _shifted(t: Any, by: int) -> Any:
    return jnp.concatenate([jnp.full(by, IMPOSSIBLE, t.dtype), t[: t.shape[0] - by]])


_beam_search = jax_op("poptorch.ctc_beam_search_decoder", title="CTCBeamSearch", gradient=None)(
    lambda probs, lengths, *, blank, beam_width, top_paths: beam_search(
        probs, lengths, blank=blank, beam_width=beam_width, top_paths=top_paths
    )
)
