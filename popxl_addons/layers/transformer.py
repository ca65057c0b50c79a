"""The layers of a language model: attention, the network after it, and a block of both.

A text is a tensor of shape (batch, length, width). Where positions are turned angles (rotary), channels `i` and
`i + half` form a pair, as in the weights of Llama and Qwen.
"""

from __future__ import annotations

from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

import popxl
from popxl import OpKind, ops
from popxl.errors import PopxlError
from popxl.ops.precision import rounded_once
from popxl_addons.layers.layer_norm import LayerNorm
from popxl_addons.layers.linear import Linear
from popxl_addons.layers.rms_norm import RMSNorm
from popxl_addons.module import Module

__all__ = ["MLP", "Attention", "Cache", "TransformerBlock"]

Cache = tuple[popxl.Tensor, popxl.Tensor, popxl.Tensor]
"""Keys and values of what has been read, each of shape (batch, key heads, room, channels), and how much has been read:
an int32 scalar. All three are changed in place, so in a graph they are inputs by reference."""


# Rotary positions ----------------------------------------------------------------------------------------------------


def _turned(t: Any, first: Any, *, base: float) -> Any:
    half = t.shape[-1] // 2
    frequencies = jnp.asarray(float(base) ** (-np.arange(half) / half), jnp.float32)
    angles = (first.reshape(-1, 1) + jnp.arange(t.shape[-2])).astype(jnp.float32)[..., None] * frequencies
    sin, cos = (f(angles).reshape(-1, *(1,) * (t.ndim - 3), *angles.shape[-2:]) for f in (jnp.sin, jnp.cos))
    a, b = t[..., :half], t[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def _pairs(t: Any, first: Any, *, base: float) -> popxl.TensorSpec:
    if len(t.shape) < 3 or t.shape[-1] % 2:
        raise PopxlError("expected `t` of shape (batch, ..., length, channels), with an even number of channels.")
    if not first.dtype.is_int or first.nelms not in (1, t.shape[0]):
        raise PopxlError("expected `first` to be an integer, the position of the first row, or one for each text.")
    return popxl.TensorSpec(t.shape, t.dtype)


_rotary = OpKind(
    "RotaryPositions",
    rounded_once(lambda t, first, *, base: _turned(t, first, base=base)),
    shape=_pairs,
    operands=("t", "first"),
    key="popxl_addons.RotaryPositions",
)


# Attention ----------------------------------------------------------------------------------------------------------


class Attention(Module):
    """What each place of a text takes from the places before it, by several heads.

    Variables, of the dtype of `x`: those of the `Linear` layers `query`, `key`, `value` and `output`. The projections
    have ``heads * channels`` or ``key_heads * channels`` columns.

    Args:
        heads: how many heads the queries have.
        key_heads: how many heads keys and values have, a divisor of `heads`; by default as many.
        channels: of each head; by default the width of the text divided by `heads`.
        causal: each place sees itself and those before it; otherwise all.
        rotary: base of the wavelengths of rotary positions, such as 10000; none by default.
        bias: whether the projections have biases: of all four, of none, or of ``"qkv"``, all but `output`.
        dropout: the probability that a place overlooks another in training: then `build` needs a seed.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     text = popxl.TensorSpec((2, 5, 8), popxl.float32)
        ...     facts, graph = Attention(heads=4, key_heads=2, rotary=10000).create_graph(text)
        >>> facts.query.weight.shape, facts.key.weight.shape
        ((8, 8), (8, 4))
    """

    def __init__(
        self,
        heads: int,
        key_heads: int | None = None,
        channels: int | None = None,
        *,
        causal: bool = True,
        rotary: float | None = None,
        bias: bool | Literal["qkv"] = True,
        dropout: float = 0.0,
    ):
        super().__init__()
        self.heads, self.key_heads = heads, heads if key_heads is None else key_heads
        if self.key_heads < 1 or heads % self.key_heads:
            raise ValueError(f"Attention: `key_heads` is {key_heads}; expected a divisor of the {heads} heads.")
        self.channels, self.causal, self.rotary, self.bias, self.dropout = channels, causal, rotary, bias, dropout

    def build(
        self,
        x: popxl.Tensor,
        mask: popxl.Tensor | None = None,
        cache: Cache | None = None,
        seed: popxl.Tensor | None = None,
    ) -> popxl.Tensor:
        """`x` of shape (batch, length, width) to the same.

        Args:
            x: the text, or with a `cache` what follows the text that has been read.
            mask: what each place sees, as of `ops.attention`.
            cache: what has been read. The keys and values of `x` are added to it, in place; its count is left to the
                caller, as the layers of a model share it.
            seed: for dropout.
        """
        if x.rank != 3:
            raise ValueError(f"Attention: `x` has the shape {x.shape}; expected (batch, length, width).")
        if self.channels is None and x.shape[-1] % self.heads:
            raise ValueError(f"Attention: the width {x.shape[-1]} cannot be divided by {self.heads} heads.")
        channels = x.shape[-1] // self.heads if self.channels is None else self.channels
        batch, length, width = x.shape
        self.query = Linear(self.heads * channels, bias=bool(self.bias))
        self.key, self.value = (Linear(self.key_heads * channels, bias=bool(self.bias)) for _ in range(2))
        self.output = Linear(width, bias=self.bias is True)

        def by_head(t: popxl.Tensor, heads: int) -> popxl.Tensor:
            return t.reshape((batch, length, heads, channels)).transpose((0, 2, 1, 3))

        q, k, v = by_head(self.query(x), self.heads), by_head(self.key(x), self.key_heads), self.value(x)
        v = by_head(v, self.key_heads)
        first = popxl.constant(0, popxl.int32) if cache is None else cache[2]
        if self.rotary is not None:
            q, k = (_rotary(t, first, base=float(self.rotary)) for t in (q, k))
        causal = self.causal
        if cache is not None:
            k, v = (_appended(known, new, first) for known, new in zip(cache[:2], (k, v), strict=True))
            seen = _seen(length, k.shape[-2], first) if causal else None
            mask, causal = seen if mask is None else mask, False
        mixed = ops.attention(
            q, k, v, mask, causal, dropout=self.dropout if seed is not None else 0.0, seed_tensor=seed
        )
        return self.output(mixed.transpose((0, 2, 1, 3)).reshape((batch, length, self.heads * channels)))


def _appended(known: popxl.Tensor, new: popxl.Tensor, first: popxl.Tensor) -> popxl.Tensor:
    """A cache with new rows from `first` on, in place."""
    index = ops.cast(first, popxl.uint32) if first.dtype is not popxl.uint32 else first
    return ops.dynamic_update_(known, index.reshape((1,)), new, axes=[2], sizes=[new.shape[2]], no_overlap=True)


def _seen(length: int, room: int, first: popxl.Tensor) -> popxl.Tensor:
    """Which places of a cache the rows from `first` on see: those before them, and themselves."""
    rows = ops.arange(length).reshape((length, 1)) + first.astype(popxl.int32)
    return rows >= ops.arange(room).reshape((1, room))


# Blocks -------------------------------------------------------------------------------------------------------------


class MLP(Module):
    """The network after attention: wider, an activation, and back.

    Variables: those of the `Linear` layers `up` and `down`; with `activation="swiglu"` also of `gate`.

    Args:
        hidden: how wide it is; by default four times the width of `x`.
        activation: ``"gelu"`` (its tanh form), ``"geluerf"`` (the exact one), ``"relu"``, or ``"swiglu"``:
            ``swish(gate(x)) * up(x)``.
        bias: whether the layers have biases.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     facts, graph = MLP(16, "swiglu", bias=False).create_graph(popxl.TensorSpec((2, 5, 8), popxl.float32))
        >>> facts.keys_flat()
        ['gate.weight', 'up.weight', 'down.weight']
    """

    def __init__(
        self,
        hidden: int | None = None,
        activation: Literal["gelu", "geluerf", "relu", "swiglu"] = "gelu",
        bias: bool = True,
    ):
        super().__init__()
        if activation not in ("gelu", "geluerf", "relu", "swiglu"):
            raise ValueError(f"MLP: `activation` is {activation!r}; expected 'gelu', 'geluerf', 'relu' or 'swiglu'.")
        self.hidden, self.activation, self.bias = hidden, activation, bias

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        """`x` of shape (..., width) to the same."""
        hidden = 4 * x.shape[-1] if self.hidden is None else self.hidden
        if self.activation == "swiglu":
            self.gate = Linear(hidden, bias=self.bias)
            gate = ops.swish(self.gate(x))
            self.up = Linear(hidden, bias=self.bias)
            inner = gate * self.up(x)
        else:
            self.up = Linear(hidden, bias=self.bias)
            inner = getattr(ops, self.activation)(self.up(x))
        self.down = Linear(x.shape[-1], bias=self.bias)
        return self.down(inner)


class TransformerBlock(Module):
    """``x + attention(norm(x))``, and then ``x + mlp(norm(x))``.

    Variables: those of `attention_norm`, `attention`, `mlp_norm` and `mlp`.

    Args:
        attention: makes an `Attention`; so a block may be used for several graphs.
        mlp: makes an `MLP`.
        norm: ``"layer"`` for `LayerNorm`, ``"rms"`` for `RMSNorm`.
        eps: of the norms.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     block = TransformerBlock(Attention(4), MLP())
        ...     facts, graph = block.create_graph(popxl.TensorSpec((2, 5, 8), popxl.float32))
        >>> facts.keys()
        ['attention_norm', 'attention', 'mlp_norm', 'mlp']
    """

    def __init__(self, attention: Attention, mlp: MLP, norm: Literal["layer", "rms"] = "layer", eps: float = 1e-5):
        super().__init__()
        if norm not in ("layer", "rms"):
            raise ValueError(f"TransformerBlock: `norm` is {norm!r}; expected 'layer' or 'rms'.")
        kind = LayerNorm if norm == "layer" else RMSNorm
        self.attention_norm: Module = kind()
        self.attention = attention
        self.mlp_norm: Module = kind()
        self.mlp = mlp
        self.eps = eps

    def build(
        self,
        x: popxl.Tensor,
        mask: popxl.Tensor | None = None,
        cache: Cache | None = None,
        seed: popxl.Tensor | None = None,
    ) -> popxl.Tensor:
        """`x` of shape (batch, length, width) to the same; arguments as of `Attention.build`."""
        x = x + self.attention(self.attention_norm(x, self.eps), mask, cache, seed)
        return x + self.mlp(self.mlp_norm(x, self.eps))
