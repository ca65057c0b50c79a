"""A small GPT: its text, its model, its training, and what it writes. README.md beside
this file tells the story.

gpt_in_flax.py is the same program in Flax NNX and Optax, in the same order.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pydoc_data.topics import topics

import numpy as np

import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons import optimizers
from popxl_addons.layers import (
    MLP,
    Attention,
    Embedding,
    LayerNorm,
    Linear,
    TransformerBlock,
)

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


class GPT(addons.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.tokens = Embedding(popxl.float32, VOCABULARY, config.width)
        self.positions = Embedding(popxl.float32, config.length, config.width)
        blocks = [
            TransformerBlock(Attention(config.heads), MLP())
            for _ in range(config.layers)
        ]
        self.blocks = addons.Module.from_list(blocks)
        self.norm = LayerNorm()
        self.head = Linear(VOCABULARY)

    def build(self, tokens: popxl.Tensor) -> popxl.Tensor:
        x = self.tokens(tokens) + self.positions(ops.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).astype(popxl.float32)


class Loss(addons.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.gpt = GPT(config)

    def build(self, tokens: popxl.Tensor) -> popxl.Tensor:
        logits = self.gpt(tokens[:, :-1])
        return addons.cross_entropy(
            logits.reshape((-1, VOCABULARY)), tokens[:, 1:].flatten()
        )


def optimizer_of(config: Config) -> Callable[..., addons.NamedTensors]:
    rate = optimizers.schedules.cosine(3e-3, config.steps, warmup=config.steps // 10)
    return partial(
        optimizers.adamw, lr=rate, beta2=0.99, weight_decay=0.1, clip_norm=1.0
    )


def training(
    config: Config, replicas: int = 1, device: str = "ipu_hw", **how
) -> addons.TaskSession:
    np.random.seed(0)
    ir = popxl.Ir(replication=replicas)
    with ir.main_graph:
        tokens = popxl.h2d_stream(
            (config.batch // replicas, config.length + 1), popxl.int32, "tokens"
        )
        step = addons.train_step(
            Loss(config), tokens, optimizer=optimizer_of(config), **how
        )
        loss = addons.host_store(step.loss)
    state = addons.NamedTensors(model=step.variables.gpt, optimizer=step.state)
    return addons.TaskSession([tokens], [loss], state, ir=ir, device_desc=device)


def train(session: addons.TaskSession, config: Config, steps: int) -> list[float]:
    losses, (tokens,), (loss,) = [], session.inputs, session.outputs
    for step in range(session.session_state.get("steps", 0), steps):
        fed = batch(config, step).reshape(session.host_shape(tokens.shape))
        losses.append(float(np.ravel(session.run({tokens: fed})[loss])[0]))
    return losses


def sample(session: addons.TaskSession, config: Config, prompt: str, count: int) -> str:
    ir = popxl.Ir()
    with ir.main_graph:
        window = popxl.h2d_stream((1, config.length), popxl.int32, "window")
        facts, model = GPT(config).create_graph(window.spec)
        variables = facts.init()
        logits = addons.host_store(*model.bind(variables).call(ops.host_load(window)))
    random, text = np.random.default_rng(0), list(prompt.encode())
    with popxl.Session(ir, "ipu_hw") as writing:
        writing.use_variables_of(session, variables.to_mapping(session.state.model))
        for _ in range(count):
            seen = text[-config.length :]
            scores = writing.run({window: [seen + [0] * (config.length - len(seen))]})[
                logits
            ][0, len(seen) - 1]
            text.append(int((scores / 0.8 + random.gumbel(size=VOCABULARY)).argmax()))
    return bytes(text).decode("ascii", "replace")
