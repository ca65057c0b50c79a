"""Models in Hugging Face's layout, with random weights; and what they compute, in NumPy, by the names in files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

Array = np.ndarray

GPT2 = {
    "model_type": "gpt2", "vocab_size": 37, "n_positions": 24, "n_embd": 12, "n_layer": 2, "n_head": 3,
    "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "n_inner": None, "tie_word_embeddings": True,
}  # fmt: skip
GPT2_UNTIED = {**GPT2, "tie_word_embeddings": False}
LLAMA = {
    "model_type": "llama", "vocab_size": 37, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 4, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}  # fmt: skip
LLAMA3 = {
    **LLAMA,
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 1000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}  # fmt: skip
QWEN2 = {**LLAMA, "model_type": "qwen2", "head_dim": 2, "tie_word_embeddings": True}
QWEN3 = {**LLAMA, "model_type": "qwen3"}


def weights_of(config: Mapping[str, Any], seed: int = 0) -> dict[str, Array]:
    """Random weights, by their names in files, in the shapes that they have there."""
    if config["model_type"] == "gpt2":
        width, vocabulary = config["n_embd"], config["vocab_size"]
        shapes = {
            "transformer.wte.weight": (vocabulary, width),
            "transformer.wpe.weight": (config["n_positions"], width),
        }
        for i in range(config["n_layer"]):
            for name, (into, out) in {
                "attn.c_attn": (width, 3 * width), "attn.c_proj": (width, width),
                "mlp.c_fc": (width, 4 * width), "mlp.c_proj": (4 * width, width),
            }.items():  # fmt: skip
                shapes |= {f"transformer.h.{i}.{name}.weight": (into, out), f"transformer.h.{i}.{name}.bias": (out,)}
            for name in ("ln_1", "ln_2"):
                shapes |= {f"transformer.h.{i}.{name}.{kind}": (width,) for kind in ("weight", "bias")}
        shapes |= {f"transformer.ln_f.{kind}": (width,) for kind in ("weight", "bias")}
        if not config["tie_word_embeddings"]:
            shapes["lm_head.weight"] = (vocabulary, width)
    else:
        width, hidden, channels = config["hidden_size"], config["intermediate_size"], config["head_dim"]
        heads, key_heads = config["num_attention_heads"] * channels, config["num_key_value_heads"] * channels
        shapes = {"model.embed_tokens.weight": (config["vocab_size"], width), "model.norm.weight": (width,)}
        for i in range(config["num_hidden_layers"]):
            of_layer: dict[str, tuple[int, ...]] = {
                "input_layernorm.weight": (width,), "post_attention_layernorm.weight": (width,),
                "self_attn.q_proj.weight": (heads, width), "self_attn.k_proj.weight": (key_heads, width),
                "self_attn.v_proj.weight": (key_heads, width), "self_attn.o_proj.weight": (width, heads),
                "mlp.gate_proj.weight": (hidden, width), "mlp.up_proj.weight": (hidden, width),
                "mlp.down_proj.weight": (width, hidden),
            }  # fmt: skip
            if config["model_type"] == "qwen2":
                of_layer |= {
                    f"self_attn.{n}_proj.bias": (s,) for n, s in zip("qkv", (heads, key_heads, key_heads), strict=True)
                }
            if config["model_type"] == "qwen3":
                of_layer |= {f"self_attn.{n}_norm.weight": (channels,) for n in "qk"}
            shapes |= {f"model.layers.{i}.{name}": shape for name, shape in of_layer.items()}
        if not config["tie_word_embeddings"]:
            shapes["lm_head.weight"] = (config["vocab_size"], width)
    draw = np.random.default_rng(seed)
    return {name: (draw.normal(size=shape) * 0.3).astype(np.float32) for name, shape in shapes.items()}


def write(folder: Path, config: Mapping[str, Any], weights: Mapping[str, Array], files: int = 1) -> None:
    """A folder as Hugging Face has it; with several files, of which an index tells."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if files == 1:
        safetensors.numpy.save_file(dict(weights), folder / "model.safetensors", {"format": "pt"})
        return
    where = {name: f"model-{i % files + 1:05}-of-{files:05}.safetensors" for i, name in enumerate(weights)}
    for file in set(where.values()):
        these = {name: weights[name] for name in weights if where[name] == file}
        safetensors.numpy.save_file(these, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))


# What they compute ----------------------------------------------------------------------------------------------------


def softmax(x: Array) -> Array:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def attended(q: Array, k: Array, v: Array, channels: int) -> Array:
    """Of one text: (length, heads * channels), with fewer heads of keys and values maybe."""
    q, k, v = (t.reshape(len(t), -1, channels).transpose(1, 0, 2) for t in (q, k, v))
    k, v = (np.repeat(t, len(q) // len(k), 0) for t in (k, v))
    scores = q @ k.transpose(0, 2, 1) / np.sqrt(channels)
    scores[:, np.triu(np.ones(scores.shape[1:], bool), 1)] = -np.inf
    return (softmax(scores) @ v).transpose(1, 0, 2).reshape(q.shape[1], -1)


def logits_of(config: Mapping[str, Any], weights: Mapping[str, Array], tokens: Array) -> Array:
    """Of one text, in float64: (length, vocabulary)."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    return (_gpt2 if config["model_type"] == "gpt2" else _llama)(config, w, np.asarray(tokens))


def _gpt2(config: Mapping[str, Any], w: Mapping[str, Array], tokens: Array) -> Array:
    def norm(x: Array, name: str) -> Array:
        centred = x - x.mean(-1, keepdims=True)
        root = np.sqrt((centred**2).mean(-1, keepdims=True) + config["layer_norm_epsilon"])
        return centred / root * w[f"transformer.{name}.weight"] + w[f"transformer.{name}.bias"]

    def linear(x: Array, name: str) -> Array:
        return x @ w[f"transformer.{name}.weight"] + w[f"transformer.{name}.bias"]

    x = w["transformer.wte.weight"][tokens] + w["transformer.wpe.weight"][: len(tokens)]
    for i in range(config["n_layer"]):
        q, k, v = np.split(linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn"), 3, -1)
        x = x + linear(attended(q, k, v, config["n_embd"] // config["n_head"]), f"h.{i}.attn.c_proj")
        h = linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")
        x = x + linear(0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3))), f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ w["transformer.wte.weight" if config["tie_word_embeddings"] else "lm_head.weight"].T


def _llama(config: Mapping[str, Any], w: Mapping[str, Array], tokens: Array) -> Array:
    channels, rope = config["head_dim"], config["rope_parameters"]

    def norm(x: Array, name: str) -> Array:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config["rms_norm_eps"]) * w[f"{name}.weight"]

    def linear(x: Array, name: str) -> Array:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0.0)

    waves = rope["rope_theta"] ** -(np.arange(0, channels, 2) / channels)
    if rope["rope_type"] == "llama3":  # wave by wave, by its length
        for i, wave in enumerate(waves):
            length, old = 2 * np.pi / wave, rope["original_max_position_embeddings"]
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            if length > old / low:
                waves[i] = wave / rope["factor"]
            elif length > old / high:
                ramp = (old / length - low) / (high - low)
                waves[i] = (1 - ramp) * wave / rope["factor"] + ramp * wave
    angles = np.outer(np.arange(len(tokens)), waves)[:, None]

    def heads(x: Array, name: str) -> Array:
        t = x.reshape(len(x), -1, channels)
        if f"{name}_norm.weight" in w:
            t = norm(t, f"{name}_norm")
        a, b = np.split(t, 2, -1)
        sin, cos = np.sin(angles), np.cos(angles)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1).reshape(len(x), -1)

    x = w["model.embed_tokens.weight"][tokens]
    for i in range(config["num_hidden_layers"]):
        here = f"model.layers.{i}"
        h = norm(x, f"{here}.input_layernorm")
        q, k, v = (linear(h, f"{here}.self_attn.{name}_proj") for name in "qkv")
        q, k = heads(q, f"{here}.self_attn.q"), heads(k, f"{here}.self_attn.k")
        x = x + linear(attended(q, k, v, channels), f"{here}.self_attn.o_proj")
        h = norm(x, f"{here}.post_attention_layernorm")
        gate = linear(h, f"{here}.mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(h, f"{here}.mlp.up_proj"), f"{here}.mlp.down_proj")
    table = w["model.embed_tokens.weight" if config["tie_word_embeddings"] else "lm_head.weight"]
    return norm(x, "model.norm") @ table.T
