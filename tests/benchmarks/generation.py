"""Text from a small Llama with random weights: beside a loop written by hand in JAX, and beside `transformers`.

Four prompts of different lengths, greedy, with a cache; the same weights for all, in Hugging Face's layout.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import popxl_addons as addons
from popxl_addons.layers import LanguageConfig, LanguageModel
from tests.benchmarks.harness import OURS, Measure, Row, Size, check_agreement, time_of, times
from tests.popxl_addons import hugging_face as hf

try:
    import torch
    import transformers
except ImportError:
    transformers = None  # type: ignore[assignment]

SMALL = {
    **hf.LLAMA, "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}  # fmt: skip
Texts = list[list[int]]


class Work:
    """What is to be done: a model, prompts, and how many tokens are to follow each."""

    def __init__(self, size: Size) -> None:
        tiny = size is Size.TINY
        self.config: Mapping[str, Any] = hf.LLAMA if tiny else SMALL
        self.weights = {name: w * np.float32(5 if tiny else 0.3) for name, w in hf.weights_of(self.config).items()}
        self.room, self.count = (16, 6) if tiny else (256, 128)
        lengths = (5, 1, 3, 4) if tiny else (64, 7, 31, 50)
        draw = np.random.default_rng(1)
        self.prompts = [draw.integers(self.config["vocab_size"], size=length).tolist() for length in lengths]
        self.length = max(lengths)


def ours(work: Work, folder: Path, stack: ExitStack) -> Callable[[], Texts]:
    config = LanguageConfig.from_hugging_face(folder)
    generator = addons.Generator(
        LanguageModel(config),
        len(work.prompts),
        work.length,
        work.room,
        work.count,
        temperature=0,
        device_desc="ipu_hw",
    )
    addons.load_safetensors(generator.variables, folder, config.names)
    stack.enter_context(generator)
    return lambda: generator(work.prompts, work.count)


# In JAX ---------------------------------------------------------------------------------------------------------------


def rms(x: Any, weight: Any, eps: float) -> Any:
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * weight


def layer(
    x: Any, w: Mapping[str, Any], keys: Any, values: Any, first: Any, sees: Any, config: Mapping[str, Any]
) -> Any:
    """A block over rows that follow `first` read ones of each text; and its cache."""
    channels, eps = config["head_dim"], config["rms_norm_eps"]
    h = rms(x, w["input_layernorm.weight"], eps)
    q, k, v = (
        (h @ w[f"self_attn.{n}_proj.weight"].T).reshape(*x.shape[:2], -1, channels).transpose(0, 2, 1, 3) for n in "qkv"
    )
    waves = config["rope_parameters"]["rope_theta"] ** -(jnp.arange(0, channels, 2) / channels)
    angles = ((first[:, None] + jnp.arange(x.shape[1]))[..., None] * waves)[:, None]
    sin, cos = jnp.sin(angles), jnp.cos(angles)

    def turned(t: Any) -> Any:
        a, b = jnp.split(t, 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    q, k = turned(q), turned(k)
    put = jax.vmap(lambda cache, new, at: lax.dynamic_update_slice_in_dim(cache, new, at, 1))
    keys, values = put(keys, k, first), put(values, v, first)
    groups = q.reshape(len(x), keys.shape[1], -1, *q.shape[2:])
    scores = jnp.einsum("bhgqd,bhkd->bhgqk", groups, keys) / channels**0.5
    shares = jax.nn.softmax(jnp.where(sees[:, None, None], scores, -jnp.inf), -1)
    mixed = jnp.einsum("bhgqk,bhkd->bhgqd", shares, values).reshape(q.shape).transpose(0, 2, 1, 3)
    x = x + mixed.reshape(*x.shape[:2], -1) @ w["self_attn.o_proj.weight"].T
    h = rms(x, w["post_attention_layernorm.weight"], eps)
    inner = jax.nn.silu(h @ w["mlp.gate_proj.weight"].T) * (h @ w["mlp.up_proj.weight"].T)
    return x + inner @ w["mlp.down_proj.weight"].T, keys, values


def read(w: Mapping[str, Any], tokens: Any, caches: Sequence[Any], first: Any, config: Mapping[str, Any]) -> Any:
    """Texts read further: what the logits are made of, and the caches."""
    x = w["model.embed_tokens.weight"][tokens]
    rows = first[:, None] + jnp.arange(tokens.shape[1])
    sees = rows[..., None] >= jnp.arange(caches[0][0].shape[2])
    after = []
    for i, cache in enumerate(caches):
        prefix = f"model.layers.{i}."
        own = {name.removeprefix(prefix): value for name, value in w.items() if name.startswith(prefix)}
        x, *kept = layer(x, own, *cache, first, sees, config)
        after.append(kept)
    return x, after


def by_hand(work: Work) -> Callable[[], Texts]:
    config, batch = work.config, len(work.prompts)
    weights = jax.device_put(work.weights)
    shape = (batch, config["num_key_value_heads"], work.room, config["head_dim"])
    caches = [[jnp.zeros(shape), jnp.zeros(shape)] for _ in range(config["num_hidden_layers"])]
    lengths = np.array([len(prompt) for prompt in work.prompts], np.int32)
    rows = np.zeros((batch, work.length), np.int32)
    for row, prompt in zip(rows, work.prompts, strict=True):
        row[: len(prompt)] = prompt

    @partial(jax.jit, donate_argnums=2)
    def begin(w: Any, tokens: Any, caches: Any) -> Any:
        return read(w, tokens, caches, jnp.zeros(batch, jnp.int32), config)[1]

    @partial(jax.jit, donate_argnums=2)
    def go_on(w: Any, last: Any, caches: Any, first: Any) -> Any:
        def step(state: Any, _: Any) -> Any:
            last, caches, first = state
            x, caches = read(w, last[:, None], caches, first, config)
            x = rms(x[:, 0], w["model.norm.weight"], config["rms_norm_eps"])
            token = (x @ w["lm_head.weight"].T).argmax(-1).astype(jnp.int32)
            return (token, caches, first + 1), token

        (_, caches, _), tokens = lax.scan(step, (last, caches, first), length=work.count)
        return tokens, caches

    def run() -> Texts:
        nonlocal caches
        caches = begin(weights, rows, caches)
        tokens, caches = go_on(weights, rows[np.arange(batch), lengths - 1], caches, lengths - 1)
        return np.asarray(tokens).T.tolist()

    return run


# transformers ---------------------------------------------------------------------------------------------------------


def in_transformers(work: Work, folder: Path) -> Callable[[], Texts]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = torch.zeros(len(work.prompts), work.length, dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for i, prompt in enumerate(work.prompts):  # on the left, as `generate` wants it
        tokens[i, -len(prompt) :], mask[i, -len(prompt) :] = torch.tensor(prompt), 1
    how = {"do_sample": False, "max_new_tokens": work.count, "eos_token_id": None, "pad_token_id": 0}
    return lambda: model.generate(tokens, attention_mask=mask, **how)[:, work.length :].tolist()


# The row --------------------------------------------------------------------------------------------------------------


@contextmanager
def generating(size: Size) -> Iterator[Mapping[str, Measure]]:
    """Seconds for a token. Its prompt is read, too."""
    work = Work(size)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        hf.write(Path(folder), work.config, work.weights)
        parties = {OURS: ours(work, Path(folder), stack), "JAX": by_hand(work)}
        if transformers is not None:
            parties["transformers"] = in_transformers(work, Path(folder))
        texts = {name: run() for name, run in parties.items()}
        check_agreement(texts.pop("JAX"), **texts)
        count = work.count * len(work.prompts)
        measured = {name: time_of(run) for name, run in parties.items()}
        yield {name: lambda of=of: of() / count for name, of in measured.items()}


ROWS = (
    Row(
        "generate",
        generating,
        (times(0.95), times(None, "transformers")),
        rounds=9,
        show=lambda value: f"{1 / value:,.0f} tokens / s",
        about="text, with a cache: a Llama of 4 layers, width 256; 4 prompts of up to 64 tokens, 128 more tokens each",
    ),
)
