"""The layers of a language model: attention, the feed-forward network, and a block of both.

A text is a tensor of shape (batch, length, width).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import jax
from jax import lax

import popxl
from popxl import OpKind, ops
from popxl.extend.arguments import word
from popxl.op import REFUSED, Overwrites
from popxl.replica_grouping import Groups
from popxl_addons.layers.layer_norm import LayerNorm
from popxl_addons.layers.rms_norm import RMSNorm
from popxl_addons.layers.tensor_parallel import TensorParallel
from popxl_addons.module import Module
from popxl_addons.named_replica_grouping import resolved
from popxl_addons.ops.ring_attention import ring_attention
from popxl_addons.ops.rotary_positions import Stretch, rotary_positions


class Cache(NamedTuple):
    """Key-value cache of texts, as a plain tuple.

    Attributes:
        keys, values: tensors of shape (batch, key heads, room, channels). They are changed in place, so in a graph they
            are inputs by reference.
        known: number of tokens that have been read: an int32 scalar, or of shape (batch,), for each text; or `None` for
            none.
        slot: for a new text in a cache of several: its row of `keys` and `values`, an int32 tensor of one element. The
            other rows are unchanged.
    """

    keys: popxl.Tensor
    values: popxl.Tensor
    known: popxl.Tensor | None
    slot: popxl.Tensor | None = None


# Attention ----------------------------------------------------------------------------------------------------------


class Attention(Module):
    """Multi-head causal attention over text positions.

    Variables, of the dtype of `x`: those of the `Linear` layers `query`, `key`, `value` and `output`, and maybe of the
    `RMSNorm` layers `query_norm` and `key_norm`. The projections have ``heads * channels`` or ``key_heads * channels``
    columns.

    Args:
        heads: number of heads of the queries.
        key_heads: number of heads of keys and values, a divisor of `heads`; by default the same.
        channels: channels of each head; by default the width of the text divided by `heads`.
        causal: whether each position attends only to itself and earlier ones; otherwise to all.
        rotary: base of the wavelengths of rotary positions, such as 10000; none by default.
        stretch: extension of the wavelengths.
        head_norm: `eps` of a norm over the channels of each query and each key; none by default.
        bias: whether the projections have biases: all four, none, or ``"qkv"``, all but `output`.
        dropout: the probability that a place overlooks another in training: then `build` needs a seed.
        group: replicas that each have consecutive positions of each text, in order: a grouping, or names of axes. By
            default each has whole texts. See `addons.ops.ring_attention`.
        tensor: the replicas that divide the heads between them: a grouping, or names of axes. Each has the same texts
            and its part of the projections: two all-reduces, one of them in the backward pass. By default each replica
            has all heads.

    Raises:
        ValueError: if `key_heads` is no divisor of `heads`, or the replicas along `tensor` cannot divide both equally.

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
        stretch: Stretch | None = None,
        head_norm: float | None = None,
        bias: bool | Literal["qkv"] = True,
        dropout: float = 0.0,
        group: Groups | None = None,
        tensor: Groups | None = None,
    ):
        super().__init__()
        self.heads, self.key_heads = heads, heads if key_heads is None else key_heads
        if self.key_heads < 1 or heads % self.key_heads:
            raise ValueError(f"Attention: `key_heads` is {key_heads}; expected a divisor of the {heads} heads.")
        self.channels, self.causal, self.rotary, self.bias, self.dropout = channels, causal, rotary, bias, dropout
        self.stretch, self.head_norm, self.group, self.tensor = stretch, head_norm, group, tensor

    def build(
        self,
        x: popxl.Tensor,
        mask: popxl.Tensor | None = None,
        cache: Cache | tuple[popxl.Tensor, popxl.Tensor, popxl.Tensor | None] | None = None,
        seed: popxl.Tensor | None = None,
    ) -> popxl.Tensor:
        """`x` of shape (batch, length, width) to the same.

        Args:
            x: text, or with a `cache` its continuation.
            mask: positions that each position attends to, as for `ops.attention`, the same for all heads where replicas
                divide these. With a `cache` that is not empty, keys are all its positions.
            cache: keys and values read so far. Those of `x` are added in place; its count is updated by the caller,
                because the layers of a model share it.
            seed: seed for dropout; the same on all replicas along `tensor`, each of which derives its own.
        """
        cached = None if cache is None else Cache(*cache)
        lengths = None if cached is None else cached.known
        self._check(x, cached)
        if self.group is not None and not (mask is None and cache is None and seed is None):
            raise ValueError("Attention: replicas that have places of texts take no `mask`, `cache` or `seed`.")
        channels = x.shape[-1] // self.heads if self.channels is None else self.channels
        batch, length, width = x.shape
        parallel = TensorParallel.along(self.tensor, "Attention")
        self._check_groups(parallel)
        heads, key_heads = parallel.share(self.heads, "`heads`"), parallel.share(self.key_heads, "`key_heads`")
        if parallel.size > 1 and mask is not None and mask.rank > 2 and mask.shape[-3] > 1:
            raise ValueError(f"Attention: `mask` has the shape {mask.shape}; along `tensor`, all heads have the same.")
        self.query = parallel.columns(heads * channels, bool(self.bias))
        self.key, self.value = (parallel.columns(key_heads * channels, bool(self.bias)) for _ in range(2))
        self.output = parallel.rows(width, self.bias is True)

        def by_head(t: popxl.Tensor, heads: int) -> popxl.Tensor:
            return t.reshape((batch, length, heads, channels)).transpose((0, 2, 1, 3))

        x = parallel.entered(x)
        q, k, v = (by_head(self.query(x), heads), by_head(self.key(x), key_heads), by_head(self.value(x), key_heads))
        if self.head_norm is not None:
            self.query_norm, self.key_norm = (RMSNorm(self.tensor) for _ in range(2))
            q, k = self.query_norm(q, self.head_norm), self.key_norm(k, self.head_norm)
        first = self._first(length) if lengths is None else lengths
        if self.rotary is not None:
            q, k = (rotary_positions(t, first, base=self.rotary, stretch=self.stretch) for t in (q, k))
        causal = self.causal
        if cached is not None:
            all_keys, all_values = (
                _appended(stored, new, first, cached.slot) for stored, new in ((cached.keys, k), (cached.values, v))
            )
            if lengths is not None:
                k, v = all_keys, all_values
                mask, causal = _among(_visible_positions(length, k.shape[-2], first, causal), mask), False
        if self.group is not None:
            mixed = ring_attention(q, k, v, causal, group=self.group)
        else:
            dropout = self.dropout if seed is not None else 0.0
            seed = seed if seed is None or not dropout else parallel.own_seed(seed)
            mixed = ops.attention(q, k, v, mask, causal, dropout=dropout, seed_tensor=seed)
        return self.output(mixed.transpose((0, 2, 1, 3)).reshape((batch, length, heads * channels)))

    def _first(self, length: int) -> popxl.Tensor:
        """Text position of the replica's first element."""
        if self.group is None:
            return popxl.constant(0, popxl.int32)
        size = resolved(self.group, "Attention: `group`").group_size
        return ops.collectives.replicated_slice(ops.arange(0, size * length, length), group=self.group)

    def _check_groups(self, parallel: TensorParallel) -> None:
        """Raise `ValueError` if two replicas are in one group along both `tensor` and `group`."""
        if parallel.group is None or self.group is None:
            return
        pairs = [*zip(parallel.group.assignment, resolved(self.group, "Attention: `group`").assignment, strict=True)]
        if len({*pairs}) < len(pairs):
            raise ValueError(
                f"Attention: `tensor` is {self.tensor!r} and `group` is {self.group!r}, which have replicas in common. "
                "Replicas along `tensor` hold heads of the same places of a text, and those along `group` hold other "
                "places: choose an axis for each."
            )

    def _check(self, x: popxl.Tensor, cached: Cache | None) -> None:
        """Raise `ValueError` for text shapes incompatible with heads or cache."""
        if x.rank != 3:
            raise ValueError(f"Attention: `x` has the shape {x.shape}; expected (batch, length, width).")
        if self.channels is None and x.shape[-1] % self.heads:
            raise ValueError(f"Attention: the width {x.shape[-1]} cannot be divided by {self.heads} heads.")
        if cached is not None and cached.slot is not None and (x.shape[0] != 1 or cached.known is not None):
            raise ValueError(
                f"Attention: with a `slot`, one text begins; `x` has {x.shape[0]} texts, and "
                f"{'nothing' if cached.known is None else 'something'} of them has been read (`known`)."
            )


_append_ = OpKind(
    "AppendRows",
    lambda known, new, first: jax.vmap(lambda t, rows, at: lax.dynamic_update_slice_in_dim(t, rows, at, -2))(
        known, new, first
    ),
    shape=lambda known, new, first: popxl.TensorSpec(known.shape, known.dtype),
    traits=[Overwrites("known")],
    gradient=REFUSED,
    key="popxl_addons.AppendRows",
)


def _appended(stored: popxl.Tensor, new: popxl.Tensor, first: popxl.Tensor, slot: popxl.Tensor | None) -> popxl.Tensor:
    """Write new rows into a cache in place from position `first`: for all texts, or one slot."""
    if slot is not None:
        start = ops.concat([slot.reshape((1,)), first.reshape((1,))])
        return ops.dynamic_update_(stored, start, new, axes=[0, 2], sizes=[1, new.shape[2]], no_overlap=True)
    if first.rank:
        return _append_(stored, new, first)
    index = ops.cast(first, popxl.uint32) if first.dtype is not popxl.uint32 else first
    return ops.dynamic_update_(stored, index.reshape((1,)), new, axes=[2], sizes=[new.shape[2]], no_overlap=True)


def _visible_positions(length: int, max_length: int, first: popxl.Tensor, causal: bool) -> popxl.Tensor:
    """Mask of cache positions visible to rows from `first`: earlier ones, or all read ones without `causal`."""
    last = ops.arange(length).reshape((length, 1)) if causal else popxl.constant(length - 1, popxl.int32)
    last = last + first.astype(popxl.int32).reshape((*first.shape, *[1] * 3 * first.rank))
    return last >= ops.arange(max_length).reshape((1, max_length))


def _among(visible: popxl.Tensor, mask: popxl.Tensor | None) -> popxl.Tensor:
    """Combine visibility with a mask."""
    if mask is None:
        return visible
    return ops.logical_and(visible, mask) if mask.dtype is popxl.bool else ops.where(visible, mask, -math.inf)


# Blocks -------------------------------------------------------------------------------------------------------------


Activation = Literal["gelu", "geluerf", "relu", "swiglu"]


def activated(activation: Activation, layer: Callable[[str], popxl.Tensor]) -> popxl.Tensor:
    """Activation of layer `up`, gated by optional layer `gate`."""
    if activation == "swiglu":
        gate = ops.swish(layer("gate"))
        return gate * layer("up")
    return getattr(ops, activation)(layer("up"))


class MLP(Module):
    """The network after attention: wider, an activation, and back.

    Variables: parameters of the `Linear` layers `up` and `down`; with `activation="swiglu"` also of `gate`.

    Args:
        hidden: width of the hidden layer; by default four times the width of `x`.
        activation: ``"gelu"`` (its tanh form), ``"geluerf"`` (the exact one), ``"relu"``, or ``"swiglu"``:
            ``swish(gate(x)) * up(x)``.
        bias: whether the layers have biases.
        tensor: the replicas that divide the hidden channels between them, as of `Attention`.

    Raises:
        ValueError: if they cannot divide them equally.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     facts, graph = MLP(16, "swiglu", bias=False).create_graph(popxl.TensorSpec((2, 5, 8), popxl.float32))
        >>> facts.keys_flat()
        ['gate.weight', 'up.weight', 'down.weight']
    """

    def __init__(
        self,
        hidden: int | None = None,
        activation: Activation = "gelu",
        bias: bool = True,
        tensor: Groups | None = None,
    ):
        super().__init__()
        self.activation = word(activation, "MLP: `activation`", get_args(Activation))
        self.hidden, self.bias = hidden, bias
        self.tensor = tensor

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        """Apply the layer: `x` of shape (..., width) to the same shape."""
        parallel = TensorParallel.along(self.tensor, "MLP")
        hidden = parallel.share(4 * x.shape[-1] if self.hidden is None else self.hidden, "`hidden`")
        entered = parallel.entered(x)

        def layer(name: str) -> popxl.Tensor:
            setattr(self, name, linear := parallel.columns(hidden, self.bias))
            return linear(entered)

        inner = activated(self.activation, layer)
        self.down = parallel.rows(x.shape[-1], self.bias)
        return self.down(inner)


class TransformerBlock(Module):
    """``x + attention(norm(x))``, and then ``x + mlp(norm(x))``.

    Variables: those of `attention_norm`, `attention`, `mlp_norm` and `mlp`.

    If the parts are divided along the same axis (`tensor`), so is the block: its norms are not sharded.

    Args:
        attention: the `Attention`.
        mlp: the `MLP`.
        norm: ``"layer"`` for `LayerNorm`, ``"rms"`` for `RMSNorm`.
        eps: constant for the norms.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     block = TransformerBlock(Attention(4), MLP())
        ...     facts, graph = block.create_graph(popxl.TensorSpec((2, 5, 8), popxl.float32))
        >>> facts.keys()
        ['attention_norm', 'attention', 'mlp_norm', 'mlp']
    """

    def __init__(self, attention: Attention, mlp: MLP, norm: Literal["layer", "rms"] = "layer", eps: float = 1e-5):
        super().__init__()
        kind = LayerNorm if word(norm, "TransformerBlock: `norm`", ("layer", "rms")) == "layer" else RMSNorm
        self.attention_norm: Module = kind()
        self.attention = attention
        self.mlp_norm: Module = kind()
        self.mlp = mlp
        self.eps = eps

    def build(
        self,
        x: popxl.Tensor,
        mask: popxl.Tensor | None = None,
        cache: Cache | tuple[popxl.Tensor, popxl.Tensor, popxl.Tensor | None] | None = None,
        seed: popxl.Tensor | None = None,
    ) -> popxl.Tensor:
        """`x` of shape (batch, length, width) to the same; arguments as of `Attention.build`."""
        x = x + self.attention(self.attention_norm(x, self.eps), mask, cache, seed)
        return x + self.mlp(self.mlp_norm(x, self.eps))
