"""A language model of the kit's layers, and its conversion from and to Hugging Face's `config.json`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, PositiveInt

import popxl
from popxl import initial, ops
from popxl.extend.arguments import integer
from popxl.extend.ops import is_fused
from popxl.replica_grouping import Groups
from popxl_addons import weights
from popxl_addons.layers.embedding import TiedEmbedding
from popxl_addons.layers.layer_norm import LayerNorm
from popxl_addons.layers.linear import Linear
from popxl_addons.layers.rms_norm import RMSNorm
from popxl_addons.layers.tensor_parallel import TensorParallel
from popxl_addons.layers.transformer import MLP, Attention, Cache, TransformerBlock
from popxl_addons.module import Module
from popxl_addons.ops.cross_entropy import cross_entropy
from popxl_addons.ops.rotary_positions import Stretch


class LanguageConfig(BaseModel):
    """Architecture settings of a language model.

    Attributes:
        vocabulary: number of tokens.
        width: numbers for each place of a text.
        layers: number of blocks.
        heads, key_heads, channels: as for `Attention`; by default as many heads of keys, and the width divided by
            heads.
        hidden: width of the network after attention; by default four times `width`.
        context: the longest text.
        rotary: base of the wavelengths of rotary positions; without, the model learns a vector for each place.
        stretch: as for `Attention`.
        norm, eps: as for `TransformerBlock`.
        activation: as for `MLP`.
        bias: as for `Attention`; `mlp_bias` is for the network after it.
        head_norm: as for `Attention`.
        tied: whether the logits are products with the embeddings, instead of a separate table.

    Example:
        >>> LanguageConfig(vocabulary=100, width=32, layers=2, heads=4).hidden is None
        True
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    vocabulary: PositiveInt
    width: PositiveInt
    layers: PositiveInt
    heads: PositiveInt
    key_heads: PositiveInt | None = None
    channels: PositiveInt | None = None
    hidden: PositiveInt | None = None
    context: PositiveInt = 1024
    rotary: float | None = None
    stretch: Stretch | None = None
    norm: Literal["layer", "rms"] = "layer"
    eps: float = 1e-5
    activation: Literal["gelu", "geluerf", "relu", "swiglu"] = "gelu"
    bias: bool | Literal["qkv"] = True
    mlp_bias: bool = True
    head_norm: bool = False
    tied: bool = True

    @property
    def names(self) -> weights.Names:
        """Names of the model's variables in Hugging Face files."""
        return weights.GPT2 if self.rotary is None else weights.LLAMA

    @classmethod
    def from_hugging_face(cls, place: str | os.PathLike[str] | Mapping[str, Any]) -> Self:
        """Read a `config.json`, its folder, or its content: GPT-2, Llama, Mistral, Qwen 2 or Qwen 3.

        `ValueError` for other kinds of models, or unsupported parts.

        Example:
            >>> said = dict(model_type="gpt2", vocab_size=100, n_embd=32, n_layer=2, n_head=4, n_positions=64)
            >>> LanguageConfig.from_hugging_face(said).context
            64
        """
        if isinstance(place, Mapping):
            settings = dict(place)
        else:
            path = Path(place).expanduser()
            settings = json.loads((path / "config.json" if path.is_dir() else path).read_text("utf-8"))
        kind = settings.get("model_type")
        if kind == "gpt2":
            return cls(**_gpt2(settings))
        if kind in ("llama", "mistral", "qwen2", "qwen3"):
            return cls(**_llama(kind, settings))
        raise ValueError(
            f"LanguageConfig: the model is of the type {kind!r}; expected gpt2, llama, mistral, qwen2 or qwen3."
        )

    def to_hugging_face(self) -> dict[str, Any]:
        """Content of a Hugging Face `config.json` for such a model.

        `ValueError` if no supported model of Hugging Face's has this configuration.

        Example:
            >>> config = LanguageConfig(vocabulary=100, width=32, layers=2, heads=4)
            >>> config.to_hugging_face()["model_type"]
            'gpt2'
        """
        settings = _as_gpt2(self) if self.rotary is None else _as_llama(self)
        restored, original = type(self).from_hugging_face(settings)._spelled(), self._spelled()
        if lost := [name for name in original if original[name] != restored[name]]:
            raise ValueError(
                f"LanguageConfig.to_hugging_face: a {settings['model_type']} is never made with "
                f"{', '.join(f'{name}={original[name]!r}' for name in lost)}."
            )
        return settings

    def _spelled(self) -> dict[str, Any]:
        """Complete settings with explicit defaults."""
        defaults = {"key_heads": self.heads, "channels": self.width // self.heads, "hidden": 4 * self.width}
        settings = self.model_dump()
        return settings | {name: value for name, value in defaults.items() if settings[name] is None}


def _as_gpt2(config: LanguageConfig) -> dict[str, Any]:
    activations = {"gelu": "gelu_new", "geluerf": "gelu", "relu": "relu"}
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": config.vocabulary,
        "n_embd": config.width,
        "n_layer": config.layers,
        "n_head": config.heads,
        "n_inner": config.hidden,
        "n_positions": config.context,
        "layer_norm_epsilon": config.eps,
        "activation_function": activations.get(config.activation, "gelu_new"),
        "tie_word_embeddings": config.tied,
    }


def _as_llama(config: LanguageConfig) -> dict[str, Any]:
    """Settings of a model of the Llama family in the words of Hugging Face."""
    kind = "qwen3" if config.head_norm else "qwen2" if config.bias == "qkv" else "llama"
    spelled, stretch = config._spelled(), config.stretch
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rotary}
    if stretch is not None:
        rope |= {"rope_type": "llama3" if stretch.length else "linear", "factor": stretch.factor}
    if stretch is not None and stretch.length:
        rope |= {
            "low_freq_factor": stretch.low,
            "high_freq_factor": stretch.high,
            "original_max_position_embeddings": stretch.length,
        }
    return {
        "model_type": kind,
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "vocab_size": config.vocabulary,
        "hidden_size": config.width,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": spelled["key_heads"],
        "head_dim": spelled["channels"],
        "intermediate_size": spelled["hidden"],
        "max_position_embeddings": config.context,
        "rope_parameters": rope,
        "rms_norm_eps": config.eps,
        "hidden_act": "silu",
        "attention_bias": config.bias is True,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": config.tied,
    }


def _check_settings(settings: Mapping[str, Any], hint: str = "", **expected: tuple[Any, ...]) -> None:
    """Raise `ValueError` for settings without matching layers."""
    if unknown := [
        f"{k}={settings[k]!r}" for k, values in expected.items() if k in settings and settings[k] not in values
    ]:
        raise ValueError(
            f"LanguageConfig: there are no layers for {', '.join(unknown)}, of a {settings['model_type']}.{hint}"
        )


def _gpt2(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a `LanguageConfig` for settings of GPT-2."""
    activations = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "geluerf", "relu": "relu"}
    off, on = (False,), (True,)
    _check_settings(
        settings,
        activation_function=tuple(activations),
        scale_attn_weights=on,
        scale_attn_by_inverse_layer_idx=off,
        add_cross_attention=off,
    )
    return {
        "vocabulary": settings["vocab_size"],
        "width": settings["n_embd"],
        "layers": settings["n_layer"],
        "heads": settings["n_head"],
        "hidden": settings.get("n_inner"),
        "context": settings["n_positions"],
        "eps": settings.get("layer_norm_epsilon", 1e-5),
        "activation": activations[settings.get("activation_function", "gelu_new")],
        "tied": settings.get("tie_word_embeddings", True),
    }


def _llama(kind: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of a `LanguageConfig` for settings of the Llama family."""
    _check_settings(settings, hidden_act=("silu",), use_sliding_window=(False,))
    context = settings["max_position_embeddings"]
    window = settings.get("sliding_window")
    if kind == "mistral" and (window or context) < context:
        hint = (
            f" Texts of up to {window} tokens do not need it: pass what `config.json` says, as a dict with "
            f"`sliding_window` None and `max_position_embeddings` {window}."
        )
        _check_settings(settings, hint, sliding_window=(None,))
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    has_bias = settings.get("attention_bias", False)
    return {
        "vocabulary": settings["vocab_size"],
        "width": settings["hidden_size"],
        "layers": settings["num_hidden_layers"],
        "heads": settings["num_attention_heads"],
        "key_heads": settings.get("num_key_value_heads"),
        "channels": settings.get("head_dim"),
        "hidden": settings["intermediate_size"],
        "context": context,
        "rotary": rope.get("rope_theta", settings.get("rope_theta", 10000.0)),
        "stretch": _stretch(rope),
        "norm": "rms",
        "eps": settings["rms_norm_eps"],
        "activation": "swiglu",
        "bias": "qkv" if kind == "qwen2" else has_bias,
        "mlp_bias": settings.get("mlp_bias", False),
        "head_norm": kind == "qwen3",
        "tied": settings.get("tie_word_embeddings", False),
    }


def _stretch(rope: Mapping[str, Any]) -> Stretch | None:
    """Rotary position scaling from file settings."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return Stretch(factor=rope["factor"])
    if kind == "llama3":
        return Stretch(
            factor=rope["factor"],
            low=rope["low_freq_factor"],
            high=rope["high_freq_factor"],
            length=rope["original_max_position_embeddings"],
        )
    raise ValueError(f"LanguageConfig: there are no layers for rotary positions of the type {kind!r}.")


class _CachedBlock(TransformerBlock):
    """A block with key-value cache in the variables `keys` and `values`."""

    def __init__(self, texts: int, max_length: int, *args: Any) -> None:
        super().__init__(*args)
        self.texts, self.max_length = texts, max_length

    # Inputs of its graph are identified by name: `first` and `slot` are tensors, or `None`.
    def build(  # type: ignore[override]
        self, x: popxl.Tensor, first: popxl.Tensor | None = None, slot: popxl.Tensor | None = None
    ) -> popxl.Tensor:
        attention = self.attention
        channels = attention.channels or x.shape[-1] // attention.heads
        parallel = TensorParallel.along(attention.tensor, "Attention")
        shape = (self.texts, parallel.share(attention.key_heads, "`key_heads`"), self.max_length, channels)
        keys, values = (
            self.add_variable_input(
                name,
                partial(initial.zeros, shape),
                x.dtype,
                by_ref=True,
                replica_grouping=None if parallel.group is None else parallel.group.transpose(),
                group_axis=None if parallel.group is None else 1,
            )
            for name in ("keys", "values")
        )
        return super().build(x, cache=Cache(keys, values, first, slot))


class _LanguageHead(Linear):
    """Logits; or, given labels, their mean cross entropy."""

    def build(self, x: popxl.Tensor, labels: popxl.Tensor | None = None, chunks: int | None = None) -> popxl.Tensor:
        if labels is None:
            return super().build(x)
        return ops.linear_cross_entropy(x, self._weight(x), labels, chunks=chunks)


class LanguageModel(Module):
    """A language model: next-token logits for each text position.

    All layers call one graph, which is compiled once.

    Variables: those of `embedding`, maybe `positions`, `layers` (by number), `norm` and maybe `head`. Their names in
    files of Hugging Face are `LanguageConfig.names`.

    Args:
        config: configuration of the model.
        dtype: dtype of the variables and of the computation.
        tensor: the replicas that divide the heads and hidden channels of each block between them, as of `Attention`.
            Embeddings, norms and `head` are not sharded.

    Example:
        >>> config = LanguageConfig(vocabulary=100, width=8, layers=2, heads=2, context=16)
        >>> with popxl.Ir().main_graph:
        ...     facts, graph = LanguageModel(config).create_graph(popxl.TensorSpec((3, 5), popxl.int32))
        >>> graph.graph.outputs[0].shape, facts.layers[1].mlp.up.weight.shape
        ((3, 5, 100), (8, 32))
    """

    def __init__(self, config: LanguageConfig, dtype: popxl.dtype = popxl.float32, tensor: Groups | None = None):
        super().__init__()
        self.config, self.tensor = config, tensor
        self.embedding = TiedEmbedding(dtype, config.vocabulary, config.width)
        if config.rotary is None:
            self.positions = TiedEmbedding(dtype, config.context, config.width)
        self.layers = Module()
        self.norm: Module = LayerNorm() if config.norm == "layer" else RMSNorm()
        if not config.tied:
            self.head = _LanguageHead(config.vocabulary, bias=False)

    def build(
        self,
        tokens: popxl.Tensor,
        first: popxl.Tensor | None = None,
        room: int = 0,
        logits: bool = True,
        slot: popxl.Tensor | None = None,
        slots: int = 1,
        labels: popxl.Tensor | None = None,
        chunks: int | None = None,
    ) -> popxl.Tensor:
        """Integer `tokens` of shape (batch, length) to logits of shape (batch, length, vocabulary).

        Args:
            tokens: texts; or with `first`, the continuation of each.
            first: number of tokens of each text that have been read: an int32 tensor of shape (batch,).
            room: number of positions of the cache: keys and values are kept in the variables `keys` and `values` of
                each layer, which are changed in place. Without `first`, the texts are new.
            logits: whether to return logits; otherwise their input: of shape (batch, length, width).
            slot, slots: position of a new text while others continue: its index among the `slots` texts in `keys` and
                `values`, an int32 tensor of one element. The other texts are unchanged.
            labels: expected tokens, of the shape of `tokens`: the result is then the mean cross entropy of the logits,
                in float32, by `ops.linear_cross_entropy` with `chunks`.
        """
        if tokens.rank != 2:
            raise ValueError(f"LanguageModel: `tokens` has the shape {tokens.shape}; expected (batch, length).")
        longest = max(tokens.shape[1], room)
        if longest > self.config.context:
            raise ValueError(
                f"LanguageModel: texts have {longest} places, and the model has {self.config.context} (its `context`)."
            )
        x, table = self.embedding(tokens)
        if self.config.rotary is None:
            positions = ops.arange(tokens.shape[1]).reshape((1, -1))
            if first is not None:
                positions = positions + first.reshape((-1, 1))
            x = x + self.positions(positions)[0]
        about = {name: t for name, t in (("first", first), ("slot", slot)) if t is not None}
        facts, layer = self._block(tokens.shape[0] if slot is None else slots, room).create_graph(x, **about)
        for number in range(self.config.layers):
            (x,) = layer.bind(self.layers.add_variable_inputs(number, facts)).call(x, *about.values())
        x = self.norm(x, self.config.eps)
        if not logits:
            return x
        if not self.config.tied:
            return self.head(x, labels, chunks)
        return x @ table.T if labels is None else ops.linear_cross_entropy(x, table.T, labels, chunks=chunks)

    def _block(self, texts: int, max_length: int) -> TransformerBlock:
        config = self.config
        attention = Attention(
            config.heads,
            config.key_heads,
            config.channels,
            rotary=config.rotary,
            stretch=config.stretch,
            head_norm=config.eps if config.head_norm else None,
            bias=config.bias,
            tensor=self.tensor,
        )
        mlp = MLP(config.hidden, config.activation, config.mlp_bias, self.tensor)
        arguments = (attention, mlp, config.norm, config.eps)
        return _CachedBlock(texts, max_length, *arguments) if max_length else TransformerBlock(*arguments)


class NextTokenLoss(Module):
    """Mean cross entropy of the next token: the loss that trains a language model.

    Variables: those of `model`.

    Args:
        model: module from integer tokens of shape (batch, length) to logits of shape (batch, length, vocabulary).
        chunks: number of chunks of the tokens whose logits exist at a time; more than one is for a `LanguageModel`. By
            default, its logits are computed in chunks if there are more than 2³⁰, see `ops.linear_cross_entropy`, or if
            a memory plan says so.

    Raises:
        TypeError: for `chunks` that is not an integer.
        ValueError: for `chunks` below 1, or above 1 with another model.

    Example:
        >>> config = LanguageConfig(vocabulary=100, width=8, layers=2, heads=2, context=16)
        >>> with popxl.Ir().main_graph:
        ...     facts, graph = NextTokenLoss(LanguageModel(config)).create_graph(popxl.TensorSpec((3, 6), popxl.int32))
        >>> graph.graph.outputs[0].shape, facts.model.layers[1].mlp.up.weight.shape
        ((), (8, 32))
    """

    def __init__(self, model: Module, chunks: int | None = None) -> None:
        super().__init__()
        if chunks is not None:
            chunks = integer(chunks, "NextTokenLoss: `chunks`")
            if chunks < 1:
                raise ValueError(f"NextTokenLoss: `chunks` is {chunks}; expected 1 or more, or None.")
            if chunks > 1 and not isinstance(model, LanguageModel):
                raise ValueError(
                    f"NextTokenLoss: `chunks` is {chunks}, and `model` is a {type(model).__name__}, whose logits are "
                    "made as a whole. Expected a `LanguageModel`; for another model, use `ops.linear_cross_entropy`."
                )
        self.model, self.chunks = model, chunks

    def build(self, tokens: popxl.Tensor) -> popxl.Tensor:
        """Integer `tokens` of shape (batch, length): each but the last predicts the one after it, in float32."""
        if isinstance(self.model, LanguageModel):
            predictions = tokens.shape[0] * (tokens.shape[1] - 1)
            if self.chunks is not None or is_fused(predictions, self.model.config.vocabulary):
                return self.model(tokens[:, :-1], labels=tokens[:, 1:], chunks=self.chunks)
        logits = self.model(tokens[:, :-1]).astype(popxl.float32)
        return cross_entropy(logits.reshape((-1, logits.shape[-1])), tokens[:, 1:].flatten())
