"""`generate` of decoders: the loop on the host, each call of the model on the device."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import poptorch  # noqa: E402  (it needs torch)

PROMPT = torch.tensor([[3, 1, 4, 1], [2, 7, 1, 8]])


class Cache:
    """Sums of the tokens so far, in a place that keeps its shape."""

    def __init__(self, rows: int, length: int) -> None:
        self.sums, self.position, self.calls = torch.zeros(rows, length), torch.tensor(0), 0

    def update(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1]) + self.position
        self.sums.index_copy_(1, places, x)
        self.position.add_(x.shape[1])
        return self.sums.sum(1)


class Decoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.scores = torch.nn.Embedding(11, 1), torch.nn.Linear(1, 11)
        self.eager_calls = 0

    def forward(self, tokens: torch.Tensor, cache: Cache) -> tuple[torch.Tensor, Cache]:
        return self.scores(cache.update(self.embedding(tokens)[..., 0])[:, None]), cache

    @torch.no_grad()
    def generate(self, tokens: torch.Tensor, count: int, cache: type | None = None) -> torch.Tensor:
        memory, new = Cache(len(tokens), 9), tokens
        for _ in range(count):
            self.eager_calls += "_compiled_call_impl" not in vars(self)
            scores, memory = self(new, memory)
            new = scores.argmax(-1, keepdim=True)
            tokens = torch.cat([tokens, new], 1)
        return tokens


def test_a_loop_of_a_model_runs_on_the_device(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    decoder = Decoder()
    expected = decoder.generate(PROMPT, 5)
    decoder.eager_calls = 0
    wrapped = poptorch.inferenceModel(decoder, poptorch.Options().keptPrograms(2))
    assert wrapped.generate(PROMPT, 5).tolist() == expected.tolist()
    assert decoder.eager_calls == 0 and "_compiled_call_impl" not in vars(decoder)
    with torch.no_grad():
        decoder.scores.weight.neg_()
    wrapped.copyWeightsToDevice()
    assert wrapped.generate(PROMPT, 3).tolist() == decoder.generate(PROMPT, 3).tolist()
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        wrapped.generate(PROMPT[:1], 1)
    assert "more than 2 kinds of arguments" in caplog.text
    wrapped.destroy()


def test_dictionaries_may_have_other_keys_in_a_loop(caplog: pytest.LogCaptureFixture) -> None:
    """Masks by kind of attention, for example: other keys have another program, so there is nothing to warn of."""

    class Loop(torch.nn.Module):
        def forward(self, x: torch.Tensor, masks: dict[str, torch.Tensor]) -> torch.Tensor:
            return x * sum(masks.values())

        def generate(self, x: torch.Tensor) -> torch.Tensor:
            return self(self(x, {"full": x}), {"full": x, "window": x})

    x = torch.arange(3.0)
    with caplog.at_level(logging.WARNING):
        torch.testing.assert_close(poptorch.inferenceModel(Loop()).generate(x), 2 * x**3)
        assert not caplog.records
        poptorch.inferenceModel(Loop())(x, {"full": x})
    assert "Dictionaries among the arguments (masks)" in caplog.text


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_a_cache_of_the_user_stays(name: str) -> None:
    """Packages refuse a kind of cache beside a cache."""

    class Loop(torch.nn.Module):
        generation_config = SimpleNamespace(use_cache=True)

        def generate(self, **kwargs: Any) -> dict[str, Any]:
            return kwargs

    wrapped = poptorch.inferenceModel(Loop())
    assert wrapped.generate(**{name: 1}) == {name: 1}
    assert wrapped.generate() == {"cache_implementation": "static"}


def test_what_cannot_generate_says_so() -> None:
    with pytest.raises(poptorch.Error, match="Linear has no `generate`"):
        poptorch.inferenceModel(torch.nn.Linear(2, 3)).generate()
    training = poptorch.trainingModel(Decoder())
    with pytest.raises(poptorch.Error, match="wrapped for training.*inferenceModel"):
        training.generate(PROMPT, 1)


def llama(transformers: Any) -> Any:
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads, initializer_range=0.5))


def mistral(transformers: Any) -> Any:
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32, "sliding_window": 3}
    return transformers.MistralForCausalLM(transformers.MistralConfig(**sizes, **heads, initializer_range=0.5))


def gpt2(transformers: Any) -> Any:
    sizes = {"vocab_size": 50, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2, initializer_range=0.5)
    )


@pytest.mark.thorough
@pytest.mark.parametrize("make", [llama, mistral, gpt2])
def test_decoders_of_transformers(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Three programs are enough: one for each length of a prompt, and one for the tokens after it."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    decoder = make(transformers).eval()
    wrapped = poptorch.inferenceModel(decoder, poptorch.Options().keptPrograms(3))
    for prompt in (PROMPT, PROMPT + 5, PROMPT[:, :3]):
        settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        assert wrapped.generate(prompt, **settings).tolist() == decoder.generate(prompt, **settings).tolist()
    assert "kinds of arguments" not in caplog.text
    result, expected = poptorch.inferenceModel(decoder)(PROMPT), decoder(PROMPT)
    assert type(result.past_key_values) is type(expected.past_key_values)
    keys = [each.past_key_values.layers[1].keys.detach() for each in (result, expected)]
    torch.testing.assert_close(*keys, rtol=1e-4, atol=1e-5)
