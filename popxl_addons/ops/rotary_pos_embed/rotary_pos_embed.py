"""Rotary position embeddings: pairs of channels are rotated by angles that grow with the position.

Su et al., RoFormer, https://arxiv.org/abs/2104.09864, in the form in which the two channels of a pair are neighbours.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

import popxl
from popxl import OpKind, TensorSpec
from popxl.errors import PopxlError
from popxl.extend.kernels import widen
from popxl_addons.errors import OperandShapeError

__all__ = ["rotary_pos_embed", "trig_table_constants", "trig_tables"]


def trig_tables(
    seq_len: int, rotary_dim: int, base: float = 10000, np_dtype: Any = "float32"
) -> tuple[np.ndarray, np.ndarray]:
    """Sine and cosine of ``m * base**(-2 * i / rotary_dim)``, for positions `m` and pairs of channels `i`.

    Args:
        seq_len: number of positions.
        rotary_dim: number of channels that are rotated: two for each angle.
        base: base of the wavelengths; the longest is nearly ``2 * pi * base`` positions.
        np_dtype: dtype of the arrays. They are computed in double precision and rounded once.

    Returns:
        Two arrays of shape ``(seq_len, rotary_dim / 2)``.

    Raises:
        ValueError: if `rotary_dim` is not an even number.

    Example:
        >>> sin, cos = trig_tables(3, 4)
        >>> sin.round(4).tolist()[1]
        [0.8414999842643738, 0.009999999776482582]
    """
    if rotary_dim % 2:
        raise ValueError(f"trig_tables: `rotary_dim` is {rotary_dim}; expected an even number, as channels form pairs.")
    frequencies = float(base) ** (-np.arange(0, rotary_dim, 2) / rotary_dim)
    angles = np.arange(seq_len)[:, None] * frequencies
    return np.sin(angles).astype(np_dtype), np.cos(angles).astype(np_dtype)


def trig_table_constants(
    seq_len: int, rotary_dim: int, base: float = 10000, dtype: popxl.dtype = popxl.float32
) -> tuple[popxl.Tensor, popxl.Tensor]:
    """Constants ``sin`` and ``cos`` in the current graph, from `trig_tables`.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     sin, cos = trig_table_constants(3, 4)
        >>> sin.shape, cos.name
        ((3, 2), 'cos')
    """
    sin, cos = trig_tables(seq_len, rotary_dim, base, dtype.as_numpy())
    return popxl.constant(sin, dtype, name="sin"), popxl.constant(cos, dtype, name="cos")


def _embedded(t: Any, sin: Any, cos: Any, *, rotary_dim: int) -> TensorSpec:
    """Result spec for compatible operands."""
    if len(t.shape) != 4:
        raise OperandShapeError(
            f"expected `t` of rank 4: batch, sequence, heads, channels; it has rank {len(t.shape)}."
        )
    batch, sequence, _, channels = t.shape
    if rotary_dim < 1 or rotary_dim % 2 or rotary_dim > channels:
        raise PopxlError(f"`rotary_dim` is {rotary_dim}; expected an even number of the {channels} channels of `t`.")
    angles = (sequence, rotary_dim // 2)
    for name, table in {"sin": sin, "cos": cos}.items():
        if table.shape not in (angles, (1, *angles), (batch, *angles)):
            raise PopxlError(
                f"expected `{name}` of shape {angles}, an angle for each position and pair of channels, or of shape "
                f"{(batch, *angles)}, where they differ within the batch."
            )
    return TensorSpec(t.shape, t.dtype, t.meta_shape)


def _apply_rope(t: Any, sin: Any, cos: Any, *, rotary_dim: int) -> Any:
    t, sin, cos = map(widen, (t, sin, cos))
    sin, cos = sin[..., None, :, None], cos[..., None, :, None]  # the same for all heads
    pairs = t[..., :rotary_dim].reshape(*t.shape[:-1], rotary_dim // 2, 2)
    rotated = _product(pairs, cos) + _product(pairs[..., ::-1], jnp.concatenate([-sin, sin], axis=-1))
    return jnp.concatenate([rotated.reshape(*t.shape[:-1], rotary_dim), t[..., rotary_dim:]], axis=-1)


def _product(x: Any, y: Any) -> Any:
    """Rounded `x * y`. Computes the sign separately, to prevent contraction with later sums."""
    size = jnp.abs(x * y)
    return jnp.where(jnp.signbit(x) == jnp.signbit(y), size, -size)


_rotary_pos_embed_grad = OpKind(
    "RotaryPosEmbedGrad",
    lambda g, sin, cos, *, rotary_dim: _apply_rope(g, -sin, cos, rotary_dim=rotary_dim),
    shape=lambda g, sin, cos, *, rotary_dim: TensorSpec(g.shape, g.dtype, g.meta_shape),
    gradient={"g": lambda g, sin, cos, rotary_dim: _rotary_pos_embed(g, sin, cos, rotary_dim=rotary_dim)},
)
_rotary_pos_embed: OpKind = OpKind(
    "RotaryPosEmbed",
    _apply_rope,
    shape=_embedded,
    gradient={"t": lambda g, sin, cos, rotary_dim: _rotary_pos_embed_grad(g, sin, cos, rotary_dim=rotary_dim)},
)


def rotary_pos_embed(
    t: popxl.Tensor, sin: popxl.Tensor, cos: popxl.Tensor, rotary_dim: int | None = None
) -> popxl.Tensor:
    """Rotate neighbouring channel pairs by position-dependent angles.

    With the angle `a` of position and pair, ``y[2i] = t[2i] cos a - t[2i+1] sin a`` and
    ``y[2i+1] = t[2i+1] cos a + t[2i] sin a``; channels from `rotary_dim` on pass unchanged. In float32 each product is
    rounded before it is added, so that the result is NumPy's to the bit; halves are computed in float32 and rounded
    once. The gradient of `t` is turned back; the tables have none.

    Args:
        t: float tensor of shape ``(batch, sequence, heads, channels)``.
        sin, cos: sines and cosines of the angles, as returned by `trig_tables`: of shape ``(sequence, rotary_dim /
            2)``, or with a first dimension of 1 or `batch`.
        rotary_dim: number of channels that are rotated, an even number; by default, or if it is 0, all of them.

    Returns:
        A new tensor of the shape and dtype of `t`.

    Raises:
        OperandShapeError: if `t` has another rank.
        PopxlError: if `rotary_dim` is odd or too large, or a table does not fit.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     t = popxl.variable(np.ones((2, 3, 5, 8)), popxl.float32, "t")
        ...     sin, cos = trig_table_constants(seq_len=3, rotary_dim=4)
        ...     rotary_pos_embed(t, sin, cos, rotary_dim=4).shape
        (2, 3, 5, 8)
    """
    channels = t.shape[-1] if isinstance(t, popxl.Tensor) and t.shape else 0
    return _rotary_pos_embed(t, sin, cos, rotary_dim=rotary_dim or channels)
