"""A small GPT: embedding, blocks of causal attention with rotary positions and of two linear layers, and a head.

The head is tied: it multiplies with the table that the embedding looks tokens up in. Between the parts, rows of a
matrix stand for the tokens of all sequences. How the model is trained: `variants`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

import popxl
from popxl import ops
from popxl_addons import Module
from popxl_addons.layers import LayerNorm, Linear
from popxl_addons.ops.rotary_pos_embed import rotary_pos_embed, trig_table_constants


@dataclass(frozen=True)
class Config:
    """Sizes of the model and of a training step, and what the optimiser is told.

    Attributes:
        dropout: the share of elements that are dropped.
        batch: sequences in a step.
        micro_batches: how many parts the batch comes in, where gradients are accumulated.
        shards: among how many replicas weights are divided, where they are.
        learning_rate, weight_decay: of AdamW.
        seed: what dropout starts from.
    """

    vocabulary: int = 64
    width: int = 16
    heads: int = 4
    layers: int = 4
    sequence: int = 8
    dropout: float = 0.0
    batch: int = 16
    micro_batches: int = 8
    shards: int = 4
    learning_rate: float = 0.01
    weight_decay: float = 0.1
    seed: int = 42


@dataclass(frozen=True)
class Layout:
    """How the weights of a block are kept: whole, or divided by columns and by rows among `shards` replicas."""

    shards: int = 1
    column: Callable[[int], Module] = Linear
    row: Callable[[int], Module] = Linear


WHOLE = Layout()


def dropout(x: popxl.Tensor, seed: popxl.Tensor, ratio: float) -> popxl.Tensor:
    """`x` with some elements dropped, and the others scaled up."""
    return ops.dropout(x, seed, ratio) if ratio else x


class Embedding(Module):
    """For each token its row of the table."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config

    def build(self, tokens: popxl.Tensor, table: popxl.Tensor, seed: popxl.Tensor) -> popxl.Tensor:
        """Tokens of shape (batch, sequence) to rows of shape (batch * sequence, width)."""
        return dropout(self.rows(tokens.flatten(), table), seed, self.config.dropout)

    def rows(self, tokens: popxl.Tensor, table: popxl.Tensor) -> popxl.Tensor:
        return ops.gather(table, tokens)


class Attention(Module):
    """Each token looks at those before it, with several heads at once."""

    def __init__(self, config: Config, layout: Layout = WHOLE):
        super().__init__()
        self.sequence, self.heads, self.size = config.sequence, config.heads, config.width // config.heads
        self.query = layout.column(config.width // layout.shards)
        self.key = layout.column(config.width // layout.shards)
        self.value = layout.column(config.width // layout.shards)
        self.out = layout.row(config.width)

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        q, k, v = (self.split(linear(x)) for linear in (self.query, self.key, self.value))
        sin, cos = trig_table_constants(self.sequence, self.size)
        q, k = rotary_pos_embed(q, sin, cos), rotary_pos_embed(k, sin, cos)
        q, k, v = (t.transpose((0, 2, 1, 3)) for t in (q, k, v))
        future = popxl.constant(np.triu(np.full((self.sequence, self.sequence), -1e9), 1), x.dtype, "future")
        shares = ops.softmax(q @ k.transpose((0, 1, 3, 2)) * self.size**-0.5 + future, axis=-1)
        y = (shares @ v).transpose((0, 2, 1, 3))
        return self.out(y.reshape((x.shape[0], -1)))

    def split(self, t: popxl.Tensor) -> popxl.Tensor:
        """Rows to (batch, sequence, heads, channels)."""
        return t.reshape((-1, self.sequence, t.shape[1] // self.size, self.size))


class FeedForward(Module):
    """Two linear layers with gelu between them."""

    def __init__(self, config: Config, layout: Layout = WHOLE):
        super().__init__()
        self.up = layout.column(4 * config.width // layout.shards)
        self.down = layout.row(config.width)

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        return self.down(ops.gelu(self.up(x)))


class Block(Module):
    """One layer of the model: what attention and feed-forward make of the normalised rows is added to the rows."""

    def __init__(self, config: Config, layout: Layout = WHOLE):
        super().__init__()
        self.dropout = config.dropout
        self.norm1, self.attention = LayerNorm(), Attention(config, layout)
        self.norm2, self.feed_forward = LayerNorm(), FeedForward(config, layout)

    def build(self, x: popxl.Tensor, seed: popxl.Tensor) -> popxl.Tensor:
        seed1, seed2 = ops.split_random_seed(seed)
        x = x + dropout(self.attention(self.norm1(x)), seed1, self.dropout)
        return x + dropout(self.feed_forward(self.norm2(x)), seed2, self.dropout)


class Head(Module):
    """How well each token of the vocabulary would continue: the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = LayerNorm()

    def build(self, x: popxl.Tensor, table: popxl.Tensor) -> popxl.Tensor:
        return self.norm(x) @ table.T


class GPT(Module):
    """The whole model in one graph: tokens of shape (batch, sequence) to logits (batch * sequence, vocabulary)."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embedding, self.head = self.ends()
        self.layers = self.blocks()

    def build(self, tokens: popxl.Tensor, seed: popxl.Tensor) -> popxl.Tensor:
        table = self.table()
        seed, *seeds = ops.split_random_seed(seed, 1 + self.config.layers)
        x = self.through(self.embedding(tokens, table, seed), seeds)
        return self.head(x, table)

    # What subclasses do in another way

    def table(self) -> popxl.Tensor:
        return self.add_variable_input("table", partial(first_table, self.config), popxl.float32)

    def ends(self) -> tuple[Embedding, Head]:
        return Embedding(self.config), Head()

    def blocks(self) -> Module:
        return Module.from_list([Block(self.config) for _ in range(self.config.layers)])

    def through(self, x: popxl.Tensor, seeds: list[popxl.Tensor]) -> popxl.Tensor:
        for block, seed in zip(self.layers, seeds, strict=True):
            x = block(x, seed)
        return x


class OutlinedGPT(GPT):
    """The same model, whose blocks are calls of one graph, each with its own variables."""

    def blocks(self) -> Module:
        return Module()

    def through(self, x: popxl.Tensor, seeds: list[popxl.Tensor]) -> popxl.Tensor:
        facts, block = Block(self.config).create_graph(x, seeds[0])
        for i, seed in enumerate(seeds):
            (x,) = block.bind(self.layers.add_variable_inputs(i, facts)).call(x, seed)
        return x


def first_table(config: Config) -> np.ndarray:
    return np.random.normal(0, 0.02, (config.vocabulary, config.width))


def first_weights(config: Config) -> dict[str, np.ndarray]:
    """Values to start from, by the names of the variables of `GPT`; always the same. No two are alike, nor zero."""
    random = np.random.default_rng(0)
    n = config.width

    def of(*shape: int, around: float = 0.0) -> np.ndarray:
        return random.normal(around, 0.1 if len(shape) == 1 else shape[0] ** -0.5, shape).astype(np.float32)

    weights = {"table": of(config.vocabulary, n), "head.norm.weight": of(n, around=1), "head.norm.bias": of(n)}
    for i in range(config.layers):
        for norm in ("norm1", "norm2"):
            weights |= {f"layers.{i}.{norm}.weight": of(n, around=1), f"layers.{i}.{norm}.bias": of(n)}
        linears = {f"attention.{name}": (n, n) for name in ("query", "key", "value", "out")}
        linears |= {"feed_forward.up": (n, 4 * n), "feed_forward.down": (4 * n, n)}
        for name, shape in linears.items():
            weights |= {f"layers.{i}.{name}.weight": of(*shape), f"layers.{i}.{name}.bias": of(shape[1])}
    return weights


def batches(config: Config, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Tokens and labels of some steps, each of shape (batch, sequence); always the same.

    A token is followed by one of four others.
    """
    random = np.random.default_rng(1)
    shape = (count, config.batch, config.sequence + 1)
    text, choices = random.integers(0, config.vocabulary, shape), random.integers(1, 5, shape)
    for i in range(config.sequence):
        text[..., i + 1] = (5 * text[..., i] + choices[..., i]) % config.vocabulary
    return [(tokens[:, :-1], tokens[:, 1:]) for tokens in text.astype(np.int32)]
