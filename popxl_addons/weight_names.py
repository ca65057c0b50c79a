"""Names of weights in files, by name of a model's variable: GPT-2, Llama and Qwen as published by Hugging Face."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

__all__ = ["GPT2", "LLAMA", "QWEN", "Names", "Stored"]


@dataclass(frozen=True)
class Stored:
    """File representation of a variable.

    Attributes:
        name: name of the weight, with `*` for each number in the name of the variable.
        transposed: whether the file has the transpose, as `torch.nn.Linear` keeps it.
        part: ``(k, n)``: the variable is part `k` of `n` equal ones that lie beside each other, along the last axis of
            the weight once it is transposed, as GPT-2 has queries, keys and values.
        axis: axis of the variable that groups of replicas split between them, if its `group_axis` does not define it.
            Without either, loading derives it from the shapes, and saving refuses.
        rows: number of rows of the weight, where the variable may have more, such as a table of `layers.Embedding`,
            whose parts have multiples of 16. Loading appends zeros, and saving leaves them out.
    """

    name: str
    transposed: bool = False
    part: tuple[int, int] = (0, 1)
    axis: int | None = None
    rows: int | None = None


@dataclass(frozen=True)
class Names:
    """Names of the weights of a kind of model.

    Attributes:
        stored: name in the file, or a `Stored`, for names of variables, with `*` for each number.
        prefix: prefix of the names, which all may lack, as in files of models without a head.
        ignored: names in a file that are not weights, such as masks, with `*` for numbers.
        tied: weights that a file may have although the model has no variable for them, by name, each with the weight
            that it must be equal to: an output layer that shares the weight of the embedding.

    Example:
        >>> names = Names({"dense.*.weight": Stored("model.h.*.fc.weight", transposed=True)}, prefix="model.")
        >>> names.stored_form("dense.3.weight").name
        'model.h.3.fc.weight'
    """

    stored: Mapping[str, str | Stored]
    prefix: str = ""
    ignored: frozenset[str] = frozenset()
    tied: Mapping[str, str] = field(default_factory=dict)

    def stored_form(self, variable: str) -> Stored | None:
        """File representation of a variable; `None` if unknown."""
        wildcard, numbers = pattern(variable)
        found = self.stored.get(wildcard, self.stored.get(variable))
        if found is None:
            return None
        kept = Stored(found) if isinstance(found, str) else found
        if "*" not in kept.name:
            return kept
        pieces = kept.name.split("*")
        if len(pieces) != len(numbers) + 1:
            raise ValueError(
                f"Names: `{kept.name}` has {len(pieces) - 1} numbers, and `{variable}` has {len(numbers)}: {numbers}."
            )
        name = "".join(piece + number for piece, number in zip(pieces, [*numbers, ""], strict=True))
        return replace(kept, name=name)


def pattern(name: str) -> tuple[str, list[str]]:
    """Dotted name with `*` for numbers, and those numbers."""
    parts = name.split(".")
    return ".".join("*" if part.isdecimal() else part for part in parts), [part for part in parts if part.isdecimal()]


_KINDS = ("weight", "bias")


GPT2 = Names(
    {
        "embedding.weight": "transformer.wte.weight",
        "positions.weight": "transformer.wpe.weight",
        **{
            f"layers.*.{ours}.{kind}": f"transformer.h.*.{theirs}.{kind}"
            for ours, theirs in {
                "attention_norm": "ln_1",
                "attention.output": "attn.c_proj",
                "mlp_norm": "ln_2",
                "mlp.up": "mlp.c_fc",
                "mlp.down": "mlp.c_proj",
            }.items()
            for kind in _KINDS
        },
        **{
            f"layers.*.attention.{ours}.{kind}": Stored(f"transformer.h.*.attn.c_attn.{kind}", part=(k, 3))
            for k, ours in enumerate(("query", "key", "value"))
            for kind in _KINDS
        },
        "norm.weight": "transformer.ln_f.weight",
        "norm.bias": "transformer.ln_f.bias",
        "head.weight": Stored("lm_head.weight", transposed=True),
    },
    prefix="transformer.",
    ignored=frozenset({"transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias"}),
    tied={"lm_head.weight": "transformer.wte.weight"},
)
"""Names of GPT-2. Its weights are of `Conv1D`, thus not transposed, except for an untied head."""


LLAMA = Names(
    {
        "embedding.weight": "model.embed_tokens.weight",
        **{
            f"layers.*.{ours}.weight": f"model.layers.*.{theirs}.weight"
            for ours, theirs in {
                "attention_norm": "input_layernorm",
                "attention.query_norm": "self_attn.q_norm",
                "attention.key_norm": "self_attn.k_norm",
                "mlp_norm": "post_attention_layernorm",
            }.items()
        },
        **{
            f"layers.*.{ours}.{kind}": Stored(f"model.layers.*.{theirs}.{kind}", transposed=kind == "weight")
            for ours, theirs in {
                "attention.query": "self_attn.q_proj",
                "attention.key": "self_attn.k_proj",
                "attention.value": "self_attn.v_proj",
                "attention.output": "self_attn.o_proj",
                "mlp.gate": "mlp.gate_proj",
                "mlp.up": "mlp.up_proj",
                "mlp.down": "mlp.down_proj",
            }.items()
            for kind in _KINDS
        },
        "norm.weight": "model.norm.weight",
        "head.weight": Stored("lm_head.weight", transposed=True),
    },
    prefix="model.",
    ignored=frozenset({"model.layers.*.self_attn.rotary_emb.inv_freq"}),
    tied={"lm_head.weight": "model.embed_tokens.weight"},
)
"""Names of Llama, with biases and norms of related models."""


QWEN = LLAMA
"""Names of Qwen 2 and 3, equal to Llama's; 2 has biases of queries, keys and values, 3 has norms of heads."""
