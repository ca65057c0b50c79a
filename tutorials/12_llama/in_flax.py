"""The same in Flax NNX: a Llama, its weights from Hugging Face's layout, and a loop
with a cache. Greedy.

`python tutorials/12_llama/llama.py --flax` compares; README.md puts both side by side.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import nnx


# --- the model
class Attention(nnx.Module):
    def __init__(self, c: dict[str, Any], rngs: nnx.Rngs) -> None:
        linear = partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.channels, self.base = c["head_dim"], c["rope_parameters"]["rope_theta"]
        self.q_proj = linear(c["hidden_size"], c["num_attention_heads"] * self.channels)
        self.k_proj = linear(c["hidden_size"], c["num_key_value_heads"] * self.channels)
        self.v_proj = linear(c["hidden_size"], c["num_key_value_heads"] * self.channels)
        self.o_proj = linear(c["num_attention_heads"] * self.channels, c["hidden_size"])

    def __call__(
        self, x: jax.Array, cache: Any, first: jax.Array
    ) -> tuple[jax.Array, Any]:
        places = first[:, None] + jnp.arange(x.shape[1])
        q, k, v = (
            p(x).reshape(*x.shape[:2], -1, self.channels)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self.turned(q, places), self.turned(k, places)
        put = jax.vmap(
            lambda kept, new, at: jax.lax.dynamic_update_slice_in_dim(kept, new, at, 0)
        )
        k, v = put(cache[0], k, first), put(cache[1], v, first)
        sees = (places[..., None] >= jnp.arange(k.shape[1]))[:, None]
        mixed = jax.nn.dot_product_attention(q, k, v, mask=sees)
        return self.o_proj(mixed.reshape(*x.shape[:2], -1)), (k, v)

    def turned(self, t: jax.Array, places: jax.Array) -> jax.Array:
        waves = self.base ** -(jnp.arange(0, self.channels, 2) / self.channels)
        angles = (places[..., None] * waves)[:, :, None]
        a, b = jnp.split(t, 2, -1)
        sin, cos = jnp.sin(angles), jnp.cos(angles)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


class MLP(nnx.Module):
    def __init__(self, c: dict[str, Any], rngs: nnx.Rngs) -> None:
        linear = partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.gate_proj = linear(c["hidden_size"], c["intermediate_size"])
        self.up_proj = linear(c["hidden_size"], c["intermediate_size"])
        self.down_proj = linear(c["intermediate_size"], c["hidden_size"])

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nnx.Module):
    def __init__(self, c: dict[str, Any], rngs: nnx.Rngs) -> None:
        norm = partial(
            nnx.RMSNorm, c["hidden_size"], epsilon=c["rms_norm_eps"], rngs=rngs
        )
        self.input_layernorm, self.post_attention_layernorm = norm(), norm()
        self.self_attn, self.mlp = Attention(c, rngs), MLP(c, rngs)

    def __call__(
        self, x: jax.Array, cache: Any, first: jax.Array
    ) -> tuple[jax.Array, Any]:
        mixed, cache = self.self_attn(self.input_layernorm(x), cache, first)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class Llama(nnx.Module):
    def __init__(self, c: dict[str, Any], rngs: nnx.Rngs) -> None:
        self.embed_tokens = nnx.Embed(c["vocab_size"], c["hidden_size"], rngs=rngs)
        self.layers = nnx.List([Block(c, rngs) for _ in range(c["num_hidden_layers"])])
        self.norm = nnx.RMSNorm(c["hidden_size"], epsilon=c["rms_norm_eps"], rngs=rngs)
        self.lm_head = nnx.Linear(
            c["hidden_size"], c["vocab_size"], use_bias=False, rngs=rngs
        )

    def __call__(
        self, tokens: jax.Array, caches: list[Any], first: jax.Array
    ) -> tuple[jax.Array, list[Any]]:
        x, after = self.embed_tokens(tokens), []
        for layer, cache in zip(self.layers, caches, strict=True):
            x, kept = layer(x, cache, first)
            after.append(kept)
        return self.lm_head(self.norm(x)), after


# --- its weights
def loaded(folder: Path, c: dict[str, Any]) -> Llama:
    model = nnx.eval_shape(lambda: Llama(c, nnx.Rngs(0)))
    graph, state = nnx.split(model)
    weights = {}
    for file in folder.glob("*.safetensors"):
        weights |= safetensors.numpy.load_file(file)
    flat = nnx.to_flat_state(state)
    for path, leaf in flat:
        *module, kind = map(str, path)
        name = ".".join(module) + ".weight"
        value = weights.pop(name if module[0] == "lm_head" else f"model.{name}")
        leaf.set_value(jnp.asarray(value.T if kind == "kernel" else value))
    if weights:
        raise ValueError(f"left over: {sorted(weights)}")
    return nnx.merge(graph, nnx.from_flat_state(flat))


# --- text
def generate(folder: Path, prompts: list[list[int]], count: int) -> list[list[int]]:
    c = json.loads((folder / "config.json").read_text())
    model = loaded(folder, c)
    batch, longest = len(prompts), max(map(len, prompts))
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    rows = np.zeros((batch, longest), np.int32)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = prompt
    shape = (batch, longest + count, c["num_key_value_heads"], c["head_dim"])
    caches = [(jnp.zeros(shape), jnp.zeros(shape)) for _ in model.layers]

    @partial(nnx.jit, donate_argnums=2)
    def read(model: Llama, tokens: jax.Array, caches: Any) -> Any:
        return model(tokens, caches, jnp.zeros(batch, jnp.int32))[1]

    @partial(nnx.jit, donate_argnums=2)
    def write(model: Llama, last: jax.Array, caches: Any, first: jax.Array) -> Any:
        def step(state: Any, _: None) -> Any:
            last, caches, first = state
            logits, caches = model(last[:, None], caches, first)
            token = logits[:, 0].argmax(-1).astype(jnp.int32)
            return (token, caches, first + 1), token

        (_, caches, _), tokens = jax.lax.scan(step, (last, caches, first), length=count)
        return tokens, caches  # what is donated has to be returned

    caches = read(model, jnp.asarray(rows), caches)
    last = rows[np.arange(batch), lengths - 1]
    tokens, _ = write(model, jnp.asarray(last), caches, jnp.asarray(lengths - 1))
    return np.asarray(tokens).T.tolist()
