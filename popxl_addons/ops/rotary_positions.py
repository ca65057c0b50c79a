"""Rotary positions: pairs of channels are rotated by angles that grow with the position.

Source: Su et al., "RoFormer" (2021), https://arxiv.org/abs/2104.09864, in the form in which channels `i` and `i + half`
are a pair, as in the weights of Llama and Qwen. `rotary_pos_embed` has the form whose pairs are neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

import popxl
from popxl import OpKind
from popxl.errors import PopxlError
from popxl.op import ShardingRule


@dataclass(frozen=True)
class Stretch:
    """Frequency scaling of rotary positions, for texts longer than those of the first training.

    Attributes:
        factor: factor by which rotations are slowed down.
        low, high: waves that fit less than `low` times into `length` are slowed by the whole factor, and those that fit
            more than `high` times not at all. In between there is a ramp.
        length: length of the texts of the model's original training; 0 to slow all waves alike.
    """

    factor: float
    low: float = 1.0
    high: float = 4.0
    length: int = 0

    def scale_frequencies(self, frequencies: np.ndarray) -> np.ndarray:
        """Scaled frequencies."""
        if not self.length:
            return frequencies / self.factor
        fits = self.length * frequencies / (2 * math.pi)
        share = np.clip((fits - self.low) / (self.high - self.low), 0, 1)
        return frequencies * (share + (1 - share) / self.factor)


def rotary_positions(
    t: popxl.Tensor, first: popxl.Tensor | int = 0, *, base: float = 10000.0, stretch: Stretch | None = None
) -> popxl.Tensor:
    """Turn each pair of channels `i` and `i + half` of the row at position `p` by the angle ``p * base**(-i / half)``.

    Args:
        t: queries or keys of shape (batch, ..., length, channels), with an even number of channels.
        first: the position of the first row: an integer, an integer tensor of one element, or one of shape (batch,)
            with a position for each text.
        base: base of the wavelengths; the longest is nearly ``2 * pi * base`` positions.
        stretch: extension of the wavelengths; none by default.

    Returns:
        A new tensor of the same shape and dtype, computed in float32 and rounded once.

    Raises:
        PopxlError: for other shapes, or a `first` of other dtypes than integers.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     query = popxl.variable(np.ones((2, 4, 6, 8)), popxl.float32, "query")
        ...     turned = rotary_positions(query, base=500000.0)
        >>> turned.shape
        (2, 4, 6, 8)
    """
    start = first if isinstance(first, popxl.Tensor) else popxl.constant(first, popxl.int32)
    return _ROTATIONS[False](t, start, base=float(base), **({} if stretch is None else {"stretch": astuple(stretch)}))


def _apply_rope(t: Any, first: Any, *, base: float, stretch: tuple[Any, ...] = (), back: bool = False) -> Any:
    """Rotate forwards; or back, as gradients are."""
    half = t.shape[-1] // 2
    waves = float(base) ** (-np.arange(half) / half)
    frequencies = jnp.asarray(Stretch(*stretch).scale_frequencies(waves) if stretch else waves, jnp.float32)
    angles = (first.reshape(-1, 1) + jnp.arange(t.shape[-2])).astype(jnp.float32)[..., None] * frequencies
    sin, cos = (f(angles).reshape(-1, *(1,) * (t.ndim - 3), *angles.shape[-2:]) for f in (jnp.sin, jnp.cos))
    sin = -sin if back else sin
    # Halves are widened, not the whole: XLA for TPUs would write it in float32 first.
    a, b = (part.astype(jnp.promote_types(t.dtype, jnp.float32)) for part in (t[..., :half], t[..., half:]))
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(t.dtype)


def _rotary_spec(t: Any, first: Any, **how: Any) -> popxl.TensorSpec:
    if len(t.shape) < 3 or t.shape[-1] % 2:
        raise PopxlError("expected `t` of shape (batch, ..., length, channels), with an even number of channels.")
    if not first.dtype.is_int or first.nelms not in (1, t.shape[0]):
        raise PopxlError("expected `first` to be an integer, the position of the first row, or one for each text.")
    return popxl.TensorSpec(t.shape, t.dtype)


def _declared(name: str, back: bool) -> OpKind:
    """Declare a rotation, whose gradient is the one the other way: XLA makes several kernels of its transpose."""

    def gradient(forward: Any, gs: Sequence[popxl.Tensor]) -> dict[int, popxl.Tensor]:
        (g,), (_, first) = gs, forward.op.inputs
        return {0: _ROTATIONS[not back](g, forward.read(first), **forward.op.attributes)}

    return OpKind(
        name,
        lambda t, first, **how: _apply_rope(t, first, **how, back=back),
        shape=_rotary_spec,
        operands=("t", "first"),
        gradient=gradient,
        traits=[ShardingRule("..._,_->..._", ("t",))],
        key=f"popxl_addons.{name}",
    )


_ROTATIONS = {False: _declared("RotaryPositions", back=False), True: _declared("RotaryPositionsGrad", back=True)}
"""Rotation ops, by direction: forward, and back."""
