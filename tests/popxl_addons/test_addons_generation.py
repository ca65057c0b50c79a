"""Text from language models: greedy as in NumPy, drawn as NumPy says, and with the weights of another session."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons import optimizers
from popxl_addons.layers import LanguageConfig, LanguageModel
from popxl_addons.ops import sample_token
from tests.popxl_addons import hugging_face as hf

Array = np.ndarray
PROMPTS = [[1, 2, 3, 4], [9], [5, 6, 7, 8, 20]]
LLAMA = {**hf.LLAMA, "max_position_embeddings": 512}


def weights_of(config: Mapping[str, Any], size: float = 5.0) -> dict[str, Array]:
    """Large ones, or a text would say one token for ever."""
    return {name: value * np.float32(size) for name, value in hf.weights_of(config).items()}


def greedy(config: Mapping[str, Any], weights: Mapping[str, Array], prompt: list[int], count: int) -> list[int]:
    text = list(prompt)
    for _ in range(count):
        text.append(int(hf.logits_of(config, weights, np.array(text))[-1].argmax()))
    return text[len(prompt) :]


def until(tokens: list[int], *ends: int) -> list[int]:
    return tokens[: min([tokens.index(end) + 1 for end in ends if end in tokens], default=len(tokens))]


def test_texts_are_those_of_numpy_with_the_weights_of_another_session(tmp_path: Path) -> None:
    """Prompts of different lengths, several runs, an end; the weights change between two texts."""
    config, weights = LanguageConfig.from_hugging_face(LLAMA), weights_of(LLAMA)
    hf.write(tmp_path, LLAMA, weights)
    model = LanguageModel(config)
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        facts, _ = model.create_graph(popxl.TensorSpec((1, 1), popxl.int32))
        variables = facts.init()
        for v in variables.values_flat():
            ops.scaled_add_(v, v, a=1.0, b=-0.5)
    addons.load_safetensors(variables, tmp_path, config.names)
    before = [greedy(LLAMA, weights, prompt, 10) for prompt in PROMPTS]
    halved = {name: value / 2 for name, value in weights.items()}
    after = [greedy(LLAMA, halved, prompt, 10) for prompt in PROMPTS]
    end, other_end = before[1][5], before[2][7]
    assert len({len(until(text, end, other_end)) for text in before}) > 1
    assert before != after and all(len(set(text)) > 2 for text in before)
    with popxl.Session(ir, "cpu") as other:
        given = (other, variables)
        random = np.random.get_state()[2]
        generator = addons.Generator(
            model, 3, 5, tokens=4, temperature=0.7, top_k=1, end=[end, other_end], weights=given
        )
        assert np.random.get_state()[2] == random  # no numbers are drawn that nobody needs
        with generator as generate:
            assert generate(PROMPTS, 10) == [until(text, end, other_end) for text in before]
            assert generate(PROMPTS[1:], 3) == [until(text[:3], end, other_end) for text in before[1:]]
            assert generate([[9, end]], 1) == [greedy(LLAMA, weights, [9, end], 1)]  # a prompt has no end
            asked = [*PROMPTS, PROMPTS[1]]  # one more than there are places
            requests = [generate.submit(prompt, count) for prompt, count in zip(asked, [3, 10, 10, 10], strict=True)]
            while generate.step():
                pass
            wishes = [until(text, end, other_end) for text in (before[0][:3], *before[1:], before[1])]
            assert [request.tokens for request in requests] == wishes
            with generator:
                other.run()
            assert generate(PROMPTS, 10) == [until(text, end, other_end) for text in after]
            for prompts, count, message in [
                ([[1]] * 4, 1, "there are 4 prompts; expected 1 to 3"),
                ([[1] * 6, []], 1, r"the prompts have \[6, 0\] tokens; expected 1 to 5"),
                ([[1]], -1, "`count` is -1"),
                ([[1, 2]], 511, "would have 513 places, and there is `room` for 512"),
                ([[1, 37]], 1, r"tokens that the model does not know: \[37\]"),
            ]:
                with pytest.raises(ValueError, match=message):
                    generate.pieces(prompts, count)
            for prompts, count, seed, message in [
                ([[1.5]], 1, 0, r"a prompt must hold integers; got 1.5 \(float\)"),
                (["ab"], 1, 0, "a prompt must hold integers; got 'a'"),
                ([1, 2], 1, 0, "a prompt must be a sequence of integers; got 1"),
                (3, 1, 0, "`prompts` must be sequences of tokens; got 3"),
                ([[1]], 1.5, 0, "`count` must be an integer; got 1.5"),
                ([[1]], 1, "a", "`seed` must be an integer; got 'a'"),
            ]:
                with pytest.raises(TypeError, match=message):
                    generate.pieces(prompts, count, seed)
            assert generate.step() == {}  # none of these has come to wait
        cache = 2 * 2 * 3 * 3 * 512 * 4 * 4
        assert generator.writing.memory().temporaries < cache / 2  # which is changed in place
        with pytest.raises(ValueError, match=r"`weights` lacks variables of the model: \['norm.weight'\]"):
            variables.pop("norm")
            addons.Generator(model, 3, 5, weights=given)
    with pytest.raises(ValueError, match=r"it holds no device now. Use it inside `with generator:`"):
        generator([[1]], 1)
    for wrong, message in [
        ({"room": 4}, "prompts that fit into the room of 4 places"),
        ({"room": 513}, "`room` is 513; expected at most 512, the model's `context`"),
        ({"end": [3, 37]}, r"`end` has \[37\]; expected tokens of the model, from 0 to 36"),
    ]:
        with pytest.raises(ValueError, match=message):
            addons.Generator(model, 3, 5, **wrong)
    for wrong, message in [
        ({"tokens": 2.5}, "`tokens` must be an integer; got 2.5"),
        ({"end": "a"}, "`end` must hold integers; got 'a'"),
        ({"weights": model}, "`weights` must be a session and the variables of the model"),
    ]:
        with pytest.raises(TypeError, match=message):
            addons.Generator(model, 3, 5, **wrong)
    for wrong in (config, None, LanguageModel):
        with pytest.raises(TypeError, match="`model` must be a LanguageModel; got "):
            addons.Generator(wrong, 3, 5)


def test_requests_come_and_go_and_get_what_they_get_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn, each with its seed: in places that others have left or never used, beside others, in any order; submitted
    and cancelled by other threads."""
    model = LanguageModel(LanguageConfig(vocabulary=23, width=8, layers=2, heads=2, context=12))
    asked = [([3, 1, 4, 1], 8, 5), ([5], 3, 6), ([9, 2], 9, 7), ([6, 5], 1, 5), ([3, 5], 10, 2), ([8, 9], 0, 1)]
    np.random.seed(1)
    with addons.Generator(model, 2, 4, tokens=4, temperature=3) as generator:
        session, variables = generator.writing, generator.variables.values_flat()
        session.write_variables_data({v: np.random.normal(size=v.shape).astype(np.float32) for v in variables})
        alone = [generator([prompt], count, seed)[0] for prompt, count, seed in asked]
        assert [len(text) for text in alone] == [8, 3, 9, 1, 10, 0] and all(len(set(alone[i])) > 3 for i in (0, 2, 4))
        submitted = [generator.submit(*each) for each in asked[:2]]
        given: dict[addons.Request, list[int]] = {}
        order = []
        for turn in range(20):
            if turn == 1:
                gone = generator.submit([1, 2, 3], 9)
                submitted += [generator.submit(*each) for each in asked[2:]]
            if turn == 3:
                gone.cancel()
                assert generator([[9, 2]], 9, 7) == [alone[2]]  # after those who wait
            pieces = generator.step()
            order.append([submitted.index(r) if r in submitted else None for r in pieces])
            for request, tokens in pieces.items():
                given.setdefault(request, []).extend(tokens)
        assert order[:2] == [[0, 1], [0, None]] and not order[-1]
        assert [request.tokens for request in submitted] == alone
        assert all(request.is_done for request in submitted) and len(gone.tokens) < 9
        assert given[submitted[0]] == alone[0]
        pieces_of_two = generator.pieces([[3, 1, 4, 1], [5]], 8, 5)
        assert next(pieces_of_two)[0] == alone[0][:4]
        pieces_of_two.close()
        with ThreadPoolExecutor(3) as threads:  # while this one steps
            submitting = [threads.submit(generator.submit, *each) for each in asked * 3]
            are_there = False  # before the last step
            while generator.step() or not are_there:
                are_there = all(future.done() for future in submitting)
        assert [future.result().tokens for future in submitting] == alone * 3
        run = generator.writing.run
        with monkeypatch.context() as patch:
            leaving, waiting = generator.submit([7], 9), [generator.submit(*asked[0]) for _ in range(2)]
            patch.setattr(generator.writing, "run", lambda feeds: (leaving.cancel(), run(feeds))[1])
            assert [len(tokens) for tokens in generator.step().values()] == [0, 4] and leaving.is_done
        while generator.step():
            pass
        assert not leaving.tokens and [request.tokens for request in waiting] == [alone[0]] * 2
        left = generator.submit([7], 5)
        assert len(generator.step()[left]) == 4
        with pytest.raises(ValueError, match="would have 13 places"):
            generator.submit([1, 2], 11)
        with pytest.raises(ValueError, match="`seed`"):
            generator.submit([1, 2], 1, -1)
    assert left.is_done and len(left.tokens) == 4
    with generator:
        assert generator.step() == {}
        assert generator([[3, 5]], 10, 2) == [alone[4]]


def test_one_text_begins_in_a_slot() -> None:
    config = LanguageConfig(vocabulary=23, width=8, layers=2, heads=2, context=12)
    texts, one, first, slot = (popxl.TensorSpec(shape, popxl.int32) for shape in ((2, 5), (1, 5), (1,), ()))
    with popxl.Ir().main_graph:
        facts, _ = LanguageModel(config).create_graph(one, room=9, slot=slot, slots=3)
        assert facts.layers[1]["keys"].shape == (3, 2, 9, 4)
        for tokens, known, said in [(texts, None, "2 texts, and nothing"), (one, first, "1 texts, and something")]:
            with pytest.raises(
                ValueError, match=f"with a `slot`, one text begins; `x` has {said} of them has been read"
            ):
                LanguageModel(config).create_graph(tokens, known, room=9, slot=slot, slots=3)


@pytest.mark.thorough
@pytest.mark.parametrize("config", [hf.GPT2, hf.LLAMA3, hf.QWEN2, hf.QWEN3])
def test_texts_are_those_of_transformers(tmp_path: Path, config: Mapping[str, Any]) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    hf.write(tmp_path, config, weights_of(config))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    made_of = LanguageConfig.from_hugging_face(tmp_path)
    generator = addons.Generator(LanguageModel(made_of), 3, 5, tokens=3, temperature=0)
    addons.load_safetensors(generator.variables, tmp_path, made_of.names)
    with generator as generate:
        texts = generate(PROMPTS, 8)
    for prompt, text in zip(PROMPTS, texts, strict=True):
        wish = theirs.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=8, eos_token_id=None)
        assert text == wish[0, len(prompt) :].tolist()


@pytest.mark.thorough
def test_what_is_trained_is_what_speaks() -> None:
    """A model that is trained on one text, by `train_step`, says it: the two take turns."""
    said = np.arange(3, 19, dtype=np.int32) * 5 % 37
    config = LanguageConfig(
        vocabulary=37, width=16, layers=2, heads=4, key_heads=2, context=24, rotary=100.0, norm="rms"
    )
    model = LanguageModel(config)

    class Loss(addons.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def build(self, tokens: popxl.Tensor, labels: popxl.Tensor) -> popxl.Tensor:
            logits = self.model(tokens)
            return addons.cross_entropy(logits.reshape((-1, 37)), labels.reshape((-1,)))

    np.random.seed(0)
    ir = popxl.Ir()
    with ir.main_graph:
        tokens, labels = (popxl.h2d_stream((1, 15), popxl.int32, name) for name in ("tokens", "labels"))
        training = addons.train_step(Loss(), tokens, labels, optimizer=partial(optimizers.adamw, lr=0.02))
    with popxl.Session(ir, "cpu") as trained:
        weights = (trained, training.variables.model)
        with addons.Generator(model, 1, 4, tokens=6, temperature=0, weights=weights) as generate:
            first = generate([said[:4]], 12)[0]
            for _ in range(60):
                trained.run({tokens: said[None, :-1], labels: said[None, 1:]})
            assert generate([said[:4]], 12)[0] == said[4:].tolist() != first


@pytest.mark.targets
@pytest.mark.parametrize("device", ["tpu v5e:1x1", "gpu h100"])
def test_a_generator_is_compiled_for_a_machine_elsewhere(device: str) -> None:
    """Where the cache is changed in place, too; and nothing is shared with a session that is here."""
    config = LanguageConfig(vocabulary=37, width=16, layers=4, heads=2, context=16384)
    generator = addons.Generator(LanguageModel(config, popxl.bfloat16), 3, 5, tokens=4, device_desc=device)
    cache = 2 * 4 * 3 * 16384 * 16 * 2  # well above the 3 to 4 MB that either compiler may take in any case
    assert generator.writing.memory().temporaries < cache / 2  # a GPU multiplies the keys of a layer in float32
    assert generator.joining.memory().temporaries < cache / 2
    with pytest.raises(popxl.errors.PopxlError, match="is not here"), generator as generate:
        generate([[1, 2]], 3)
    ir = popxl.Ir()
    with ir.main_graph:
        here = popxl.variable(np.zeros((37, 16)), popxl.bfloat16)
        ops.add_(here, 1.0)
    with pytest.raises(ValueError, match="one of them is not here"):
        generator.writing.use_variables_of(popxl.Session(ir, "cpu"), {generator.variables.embedding.weight: here})


# Drawing --------------------------------------------------------------------------------------------------------------


def drawn(logits: Array, draws: Array, temperature: float = 1.0, top_k: int | None = None, top_p: float = 1.0) -> Array:
    """In NumPy, token by token."""
    found = []
    for row, draw in zip(logits.astype(np.float64), draws.astype(np.float64), strict=True):
        order = np.argsort(-row, kind="stable")
        if temperature == 0:
            found.append(order[0])
            continue
        shares = np.exp((row - row.max()) / temperature)
        kept = order[: top_k or len(row)]
        of_kept = shares[kept] / shares[kept].sum()
        count = 1 + int((np.cumsum(of_kept)[:-1] < top_p).sum()) if top_p < 1 else len(kept)
        kept = kept[:count]
        if top_k is None and top_p == 1:
            kept = np.arange(len(row))
        found.append(kept[np.searchsorted(np.cumsum(shares[kept]) / shares[kept].sum(), draw, "right")])
    return np.array(found)


CASES = [(0.0, 3, 0.5), (0.6, None, 1.0), (1.7, 5, 0.8), (1.0, 99, 1e-6)]


def test_draws_are_those_of_numpy_and_as_frequent_as_they_should_be() -> None:
    """With given numbers: those of a grid, which give each token its share; and the ends of the interval."""
    random = np.random.default_rng(0)
    count = 400
    logits = np.repeat(random.normal(size=(1, 11)).astype(np.float32) * 2, count + 2, 0)
    draws = np.append((np.arange(count) + 0.5) / count, [0, np.nextafter(np.float32(1), np.float32(0))]).astype(
        np.float32
    )
    ir = popxl.Ir()
    with ir.main_graph:
        outs = [popxl.d2h_stream((count + 2,), popxl.int32) for _ in CASES]
        for out, (temperature, top_k, top_p) in zip(outs, CASES, strict=True):
            given = popxl.constant(logits), popxl.constant(draws)
            ops.host_store(out, sample_token(*given, temperature, top_k, top_p))
    with popxl.Session(ir, "cpu") as session:
        found = session.run()
    for out, case in zip(outs, CASES, strict=True):
        np.testing.assert_array_equal(found[out], drawn(logits, draws, *case), err_msg=str(case))
    shares = np.exp(logits[0].astype(np.float64) / 0.6)
    frequent = np.bincount(found[outs[1]][:count], minlength=11) / count
    np.testing.assert_allclose(frequent, shares / shares.sum(), atol=1 / count)


def test_what_cannot_be_drawn() -> None:
    with popxl.Ir().main_graph:
        logits, draws = popxl.constant(np.ones((2, 5), np.float32)), popxl.constant(np.ones(2, np.float32))
        for how, message in [
            ({"temperature": -1.0}, "`temperature` is -1.0"),
            ({"top_k": 0}, "`top_k` is 0"),
            ({"top_p": 0.0}, "`top_p` is 0.0"),
        ]:
            with pytest.raises(ValueError, match=message):
                sample_token(logits, draws, **how)
        with pytest.raises(TypeError, match="`top_k` must be an integer; got 2.5"):
            sample_token(logits, draws, top_k=2.5)  # type: ignore[arg-type]
        with pytest.raises(popxl.errors.PopxlError, match=r"of shape \(2,\)"):
            sample_token(logits, popxl.constant(np.ones(3, np.float32)))
        with pytest.raises(popxl.errors.PopxlError, match="expected `logits` to be floats"):
            sample_token(popxl.constant(np.ones((2, 5), np.int32)), draws)
