"""The program of gpt.py in Flax NNX and Optax, in the same order. It needs `flax`,
which this project does not."""

from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
from flax import nnx

TEXT = np.frombuffer(
    "\n\n".join(topics.values()).encode("ascii", "replace"), np.uint8
).astype(np.int32)
VOCABULARY = 128


@dataclass(frozen=True)
class Config:
    width: int = 128
    heads: int = 4
    layers: int = 4
    length: int = 64
    batch: int = 16
    steps: int = 600


def batch(config: Config, step: int) -> np.ndarray:
    starts = np.random.default_rng(step).integers(
        0, len(TEXT) - config.length, config.batch
    )
    return TEXT[starts[:, None] + np.arange(config.length + 1)]


class Block(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.attention_norm = nnx.LayerNorm(config.width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(
            config.heads, config.width, decode=False, rngs=rngs
        )
        self.mlp_norm = nnx.LayerNorm(config.width, rngs=rngs)
        self.up = nnx.Linear(config.width, 4 * config.width, rngs=rngs)
        self.down = nnx.Linear(4 * config.width, config.width, rngs=rngs)

    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        x = x + self.attention(self.attention_norm(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.mlp_norm(x))))


class GPT(nnx.Module):
    def __init__(self, config: Config, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(VOCABULARY, config.width, rngs=rngs)
        self.positions = nnx.Embed(config.length, config.width, rngs=rngs)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.layers)])
        self.norm = nnx.LayerNorm(config.width, rngs=rngs)
        self.head = nnx.Linear(config.width, VOCABULARY, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        mask = nnx.make_causal_mask(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def loss_of(model: GPT, tokens: jax.Array) -> jax.Array:
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@nnx.jit
def step(model: GPT, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    loss, gradients = nnx.value_and_grad(loss_of)(model, tokens)
    optimizer.update(model, gradients)
    return loss


def training(config: Config) -> tuple[GPT, nnx.Optimizer]:
    model = GPT(config, nnx.Rngs(0))
    rate = optax.warmup_cosine_decay_schedule(
        0.0, 3e-3, config.steps // 10, config.steps
    )
    transformation = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.99, weight_decay=0.1)
    )
    return model, nnx.Optimizer(model, transformation, wrt=nnx.Param)


def train(
    model: GPT, optimizer: nnx.Optimizer, config: Config, steps: int
) -> list[float]:
    return [
        float(step(model, optimizer, batch(config, i)))
        for i in range(int(optimizer.step[...]), steps)
    ]


def save(model: GPT, optimizer: nnx.Optimizer, folder: Path) -> None:
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, nnx.state((model, optimizer)))


def load(model: GPT, optimizer: nnx.Optimizer, folder: Path) -> None:
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        nnx.update(
            (model, optimizer),
            checkpointer.restore(folder, nnx.state((model, optimizer))),
        )


@nnx.jit
def scores_of(model: GPT, window: jax.Array) -> jax.Array:
    return model(window)


def sample(model: GPT, config: Config, prompt: str, count: int) -> str:
    random, text = np.random.default_rng(0), list(prompt.encode())
    for _ in range(count):
        seen = text[-config.length :]
        scores = scores_of(model, np.array([seen + [0] * (config.length - len(seen))]))[
            0, len(seen) - 1
        ]
        text.append(int((scores / 0.8 + random.gumbel(size=VOCABULARY)).argmax()))
    return bytes(text).decode("ascii", "replace")
