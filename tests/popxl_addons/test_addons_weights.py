"""Weights in Hugging Face's layout: what is computed with them, what is refused, and how they are written."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons.layers import LanguageConfig, LanguageModel
from popxl_addons.weights import GPT2, LLAMA, Names, Stored
from tests.popxl_addons import hugging_face as hf

Array = np.ndarray
TEXTS = np.array([[3, 36, 0, 7, 7, 20, 1], [5, 1, 2, 30, 11, 4, 9]], np.int32)


class Program:
    """A model that gives the logits of `TEXTS`."""

    def __init__(self, config: LanguageConfig, dtype: popxl.dtype = popxl.float32) -> None:
        self.ir = popxl.Ir()
        with self.ir.main_graph:
            facts, graph = LanguageModel(config, dtype).create_graph(popxl.TensorSpec(TEXTS.shape, popxl.int32))
            self.variables = facts.init()
            (logits,) = graph.bind(self.variables).call(popxl.constant(TEXTS))
            self.out = popxl.d2h_stream(logits.shape, popxl.float32)
            ops.host_store(self.out, ops.cast(logits, popxl.float32))

    def logits(self) -> Array:
        with popxl.Session(self.ir, "cpu") as session:
            return np.asarray(session.run()[self.out])


def of_numpy(config: Mapping[str, Any], weights: Mapping[str, Array]) -> Array:
    return np.stack([hf.logits_of(config, weights, text) for text in TEXTS])


@pytest.mark.parametrize(
    ("config", "files"),
    [
        (hf.GPT2, 1),
        (hf.LLAMA3, 3),
        pytest.param(hf.LLAMA, 1, marks=pytest.mark.thorough),
        pytest.param(hf.QWEN2, 2, marks=pytest.mark.thorough),
        (hf.QWEN3, 1),
        pytest.param(hf.GPT2_UNTIED, 1, marks=pytest.mark.thorough),
    ],
    ids=["gpt2", "llama3", "llama", "qwen2", "qwen3", "gpt2, untied"],
)
def test_logits_are_those_of_numpy(tmp_path: Path, config: Mapping[str, Any], files: int) -> None:
    """And what is written again is what was read."""
    weights = hf.weights_of(config)
    hf.write(tmp_path, config, weights, files)
    made_of = LanguageConfig.from_hugging_face(tmp_path)
    program = Program(made_of)
    addons.load_safetensors(program.variables, tmp_path, made_of.names)
    np.testing.assert_allclose(program.logits(), of_numpy(config, weights), rtol=1e-5, atol=1e-5)
    addons.save_safetensors(program.variables, tmp_path / "again.safetensors", made_of.names)
    again = safetensors.numpy.load_file(tmp_path / "again.safetensors")
    assert again.keys() == weights.keys()
    for name, value in weights.items():
        np.testing.assert_array_equal(again[name], value)


@pytest.mark.thorough
@pytest.mark.parametrize("config", [hf.GPT2, hf.GPT2_UNTIED, hf.LLAMA, hf.LLAMA3, hf.QWEN2, hf.QWEN3])
def test_logits_are_those_of_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    """With its own random weights in its own files; and with ours, in the files that we write."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**config, **special)
    ).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.3)
    theirs.save_pretrained(tmp_path, max_shard_size="4KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    made_of = LanguageConfig.from_hugging_face(tmp_path)
    program = Program(made_of)
    addons.load_safetensors(program.variables, tmp_path, made_of.names)

    def logits(model: Any) -> Array:
        with torch.no_grad():
            return model(torch.tensor(TEXTS.astype(np.int64))).logits.numpy()

    np.testing.assert_allclose(program.logits(), logits(theirs), rtol=1e-5, atol=1e-5)
    for v in program.variables.values_flat():
        v.data[...] *= 0.5
    addons.save_safetensors(program.variables, tmp_path, made_of.names, file_bytes=4000)
    (tmp_path / "config.json").write_text(json.dumps(made_of.to_hugging_face()))
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    np.testing.assert_allclose(program.logits(), logits(again), rtol=1e-5, atol=1e-5)


def test_a_description_can_be_given_back() -> None:
    """If there is a model that is made so."""
    linear = {**hf.LLAMA, "rope_parameters": {"rope_type": "linear", "rope_theta": 10.0, "factor": 2.0}}
    for said in (hf.GPT2, hf.LLAMA, hf.LLAMA3, hf.QWEN2, hf.QWEN3, linear):
        config = LanguageConfig.from_hugging_face(said)
        back = config.to_hugging_face()
        assert {name: back[name] for name in said if said[name] is not None} == {
            n: v for n, v in said.items() if v is not None
        }
        assert LanguageConfig.from_hugging_face(back) == config
    for change, message in [
        ({"norm": "layer", "bias": "qkv"}, "a qwen2 is never made with norm='layer'"),
        ({"rotary": None, "stretch": None, "bias": False}, "a gpt2 is never made with .*bias=False"),
    ]:
        odd = LanguageConfig.from_hugging_face(hf.LLAMA).model_copy(update=change)
        with pytest.raises(ValueError, match=message):
            odd.to_hugging_face()


# What goes where ------------------------------------------------------------------------------------------------------


def variables(**shapes: tuple[int, ...]) -> addons.NamedTensors:
    with popxl.Ir().main_graph:
        made = {name: popxl.variable(np.zeros(shape), popxl.float32) for name, shape in shapes.items()}
        return addons.NamedTensors.from_dict(made)


def test_all_that_does_not_fit_is_told_at_once_and_nothing_changes(tmp_path: Path) -> None:
    own = variables(fits=(2, 3), gone=(2,), long=(4,), wide=(2,), third=(2,), unnamed=(1,))
    file = tmp_path / "w.safetensors"
    there = {"fits": np.ones((2, 3)), "long": np.ones(5), "wide": np.ones(2), "more": np.ones(1), "third": np.ones(7)}
    safetensors.numpy.save_file({n: a if n == "wide" else a.astype(np.float32) for n, a in there.items()}, file)
    names = {name: name for name in ("fits", "gone", "long", "wide")} | {"third": Stored("third", part=(0, 3))}
    with pytest.raises(ValueError) as told:
        addons.load_safetensors(own, file, names)
    text = str(told.value)
    assert "nothing has been loaded" in text
    for part in (
        "missing in the file: `gone` (`gone`), `unnamed` (not among `names`)",
        "left over in the file: `more`",
        "`long` is float32[4], and `long` is float32[5]: as the variable has it, that is the shape (5,); expected (4,)",
        "`wide` is float32[2], and `wide` is float64[2]: numbers would be rounded; say `narrow=True`",
        "`third` is float32[2], and `third` is float32[7]: its last axis cannot be divided into 3 parts",
    ):
        assert part in text, text
    assert not own.fits.data.any()
    some = own.filter_keys(["fits", "wide"])
    addons.load_safetensors(some, file, narrow=True, partial=True)
    assert some.fits.data.all() and some.wide.data.all() and not own.long.data.any()


def test_a_bare_model_of_narrow_numbers_has_no_prefix_and_is_widened(tmp_path: Path) -> None:
    """As GPT-2 is published: without `transformer.`, and with masks among the weights."""
    weights = {n: a.astype(popxl.bfloat16.as_numpy()) for n, a in hf.weights_of(hf.GPT2).items()}
    file = tmp_path / "only.safetensors"
    bare = {name.removeprefix("transformer."): a for name, a in weights.items()}
    safetensors.numpy.save_file(bare | {"h.0.attn.bias": np.ones((1, 1, 2, 2), np.float32)}, file)
    with popxl.Ir().main_graph:
        facts, _ = LanguageModel(LanguageConfig.from_hugging_face(hf.GPT2)).create_graph(
            popxl.TensorSpec((1, 2), popxl.int32)
        )
        loaded = facts.init()
    addons.load_safetensors(loaded, tmp_path, GPT2)
    keys = weights["transformer.h.1.attn.c_attn.weight"][:, 12:24]
    np.testing.assert_array_equal(loaded.layers[1].attention.key.weight.data, keys.astype(np.float32))
    assert loaded.layers[1].attention.key.weight.data.any()


@pytest.mark.parametrize(("config", "embedding"), [(hf.GPT2, "transformer.wte"), (hf.QWEN2, "model.embed_tokens")])
def test_a_tied_output_layer_may_be_in_the_file_if_it_is_equal(tmp_path: Path, config: Any, embedding: str) -> None:
    """As some tools write it; another output layer would be lost."""
    weights = hf.weights_of(config)
    assert "lm_head.weight" not in weights
    program, file = Program(LanguageConfig.from_hugging_face(config)), tmp_path / "model.safetensors"
    names = GPT2 if config["model_type"] == "gpt2" else LLAMA
    table = weights[f"{embedding}.weight"]
    safetensors.numpy.save_file(weights | {"lm_head.weight": table.copy()}, file)
    addons.load_safetensors(program.variables, file, names)
    np.testing.assert_allclose(program.logits(), of_numpy(config, weights), rtol=1e-4, atol=1e-4)
    safetensors.numpy.save_file(weights | {"lm_head.weight": table + 1}, file)
    with pytest.raises(ValueError, match=r"left over in the file: `lm_head.weight`"):
        addons.load_safetensors(program.variables, file, names)


def test_each_group_of_replicas_reads_its_part(tmp_path: Path) -> None:
    """Of a weight that is transposed in the file; one that all have is read for all. And both are written again."""
    there = {"w": np.arange(24, dtype=np.float32).reshape(8, 3), "b": np.arange(3, dtype=np.float32)}
    there["s"] = np.array(7, np.float32)
    safetensors.numpy.save_file(there, tmp_path / "w.safetensors")
    ir = popxl.Ir(replication=4)
    with ir.main_graph:
        pairs = ir.replica_grouping(group_size=2)
        w = popxl.variable(np.zeros((2, 3, 4)), popxl.float32, "w", replica_grouping=pairs)
        b = popxl.variable(np.zeros((2, 3)), popxl.float32, "b", replica_grouping=pairs)
        s = popxl.variable(np.zeros(2), popxl.float32, "s", replica_grouping=pairs)
        whole, _ = popxl.replica_sharded_variable(np.zeros((8, 3)), popxl.float32, "whole")
    own = {"w": w, "b": b, "s": s, "whole": whole}
    names: dict[str, str | Stored] = {"w": Stored("w", transposed=True), "b": "b", "s": "s", "whole": "w"}
    addons.load_safetensors(own, tmp_path, names)
    np.testing.assert_array_equal(w.data, [there["w"][:4].T, there["w"][4:].T])
    np.testing.assert_array_equal(b.data, [there["b"]] * 2)
    np.testing.assert_array_equal(s.data, [7, 7])
    np.testing.assert_array_equal(whole.data, there["w"])
    own.pop("whole")
    with pytest.raises(ValueError, match=r"the 2 groups of replicas of .* to be written as `w`. Say which axis"):
        addons.save_safetensors(own, tmp_path / "again", names)
    names["w"] = Stored("w", transposed=True, axis=1)
    addons.save_safetensors(own, tmp_path / "again", names)
    again = safetensors.numpy.load_file(tmp_path / "again" / "model.safetensors")
    np.testing.assert_array_equal(again["w"], there["w"])
    np.testing.assert_array_equal(again["b"], there["b"])


def test_a_session_gets_what_is_loaded_and_gives_what_is_saved(tmp_path: Path) -> None:
    """What else the program has changed on the device stays."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        w, count = popxl.variable(np.zeros(3), popxl.float32, "w"), popxl.variable(0.0, popxl.float32, "count")
        ops.add_(count, 1.0)
        ops.add_(w, count)
    safetensors.numpy.save_file({"w": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    with popxl.Session(ir, "cpu") as session:
        session.run()
        addons.load_safetensors({"w": w}, tmp_path, session=session)
        session.run()
        with popxl.Ir().main_graph:
            other = popxl.variable(np.ones(w.shape), w.dtype, "w")
        for function in (addons.load_safetensors, addons.save_safetensors):
            with pytest.raises(ValueError, match=f"{function.__name__}: .* are of another program than `session` runs"):
                function({"w": other}, tmp_path, session=session)
        addons.save_safetensors({"w": w, "count": count}, tmp_path / "after.safetensors", session=session)
    after = safetensors.numpy.load_file(tmp_path / "after.safetensors")
    np.testing.assert_array_equal(after["w"], [3.0] * 3)
    assert after["count"] == 2


@pytest.mark.parametrize("shards", [1, 4])
def test_a_table_with_more_rows_than_there_are(tmp_path: Path, shards: int) -> None:
    """Those of `Embedding` come in multiples of 16, of each block: 18 rows are 32 or 4 x 16."""
    ir = popxl.Ir(replication=shards)
    with ir.main_graph:
        grouping = ir.replica_grouping(stride=1, group_size=1) if shards > 1 else None
        embedding = addons.layers.Embedding(popxl.float32, 18, 3, replica_grouping=grouping)
        facts, _ = embedding.create_graph(popxl.TensorSpec((2,), popxl.int32))
        table = facts.init()
    there = np.arange(1.0, 55.0, dtype=np.float32).reshape(18, 3)
    safetensors.numpy.save_file({"wte": there}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"more rows on purpose, say so: `Stored\(..., rows=18\)`"):
        addons.load_safetensors(table, tmp_path, {"weight": "wte"})
    with pytest.raises(ValueError, match=r"expected 17 `rows`, which have to fit into"):
        addons.load_safetensors(table, tmp_path, {"weight": Stored("wte", rows=17)})
    names = {"weight": Stored("wte", rows=18)}
    addons.load_safetensors(table, tmp_path, names)
    rows = table.weight.data.reshape(-1, 3)
    np.testing.assert_array_equal(rows[:18], there)
    assert len(rows) == (32 if shards == 1 else 64) and not rows[18:].any()
    addons.save_safetensors(table, tmp_path / "after.safetensors", names)
    np.testing.assert_array_equal(safetensors.numpy.load_file(tmp_path / "after.safetensors")["wte"], there)
    with pytest.raises(ValueError, match="has .* rows, to be written as `wte`, and `rows` says 99"):
        addons.save_safetensors(table, tmp_path / "no.safetensors", {"weight": Stored("wte", rows=99)})


def test_what_a_session_has_from_another_is_loaded_there(tmp_path: Path) -> None:
    """On the device and on the host; what else either has changed stays."""

    def program() -> tuple[popxl.Ir, popxl.tensor.Variable, popxl.tensor.Variable]:
        ir = popxl.Ir()
        with ir.main_graph, popxl.in_sequence():
            w, count = popxl.variable(np.zeros(3), popxl.float32, "w"), popxl.variable(0.0, popxl.float32, "count")
            ops.add_(count, 1.0)
            ops.add_(w, count)
        return ir, w, count

    (lending, theirs, their_count), (borrowing, mine, my_count) = program(), program()
    safetensors.numpy.save_file({"w": np.ones(3, np.float32)}, tmp_path / "model.safetensors")
    with popxl.Session(lending, "cpu") as owner, popxl.Session(borrowing, "cpu") as session:
        session.use_variables_of(owner, {mine: theirs})
        assert session.owner_of(mine) == (owner, theirs) and session.owner_of(my_count) == (session, my_count)
        with pytest.raises(ValueError, match="another program than this session's"):
            session.owner_of(theirs)
        with pytest.raises(TypeError, match="expected a variable"):
            session.owner_of("w")  # type: ignore[arg-type]
        owner.run(), session.run(), session.run()
        addons.load_safetensors({"w": mine}, tmp_path, session=session)
        np.testing.assert_array_equal(theirs.data, [1.0] * 3)
        assert (owner.get_tensor_data(their_count), session.get_tensor_data(my_count)) == (1, 2)
        session.run()
        np.testing.assert_array_equal(owner.get_tensor_data(theirs), [4.0] * 3)


def test_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    """From a file that is larger than any memory: most of it is a hole."""
    file, large = tmp_path / "model.safetensors", 1 << 38
    about = {"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}
    about["z"] = {"dtype": "F32", "shape": [large // 4], "data_offsets": [16, 16 + large]}
    header = json.dumps(about).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + np.ones(4, np.float32).tobytes())
    os.truncate(file, 8 + len(header) + 16 + large)
    own = variables(a=(4,))
    addons.load_safetensors(own, file, partial=True)
    assert own.a.data.all()


def test_an_index_is_followed_within_its_folder(tmp_path: Path) -> None:
    own = variables(a=(2,))
    index = tmp_path / "model.safetensors.index.json"
    for text, error, message in [
        ('{"weight_map": {"a": "../x.safetensors"}}', popxl.errors.UnreadableFileError, "not in its folder"),
        ('{"weight_map": {"a": "x.safetensors"}}', FileNotFoundError, r"its index names \['x.safetensors'\]"),
        ('{"weight_map": [3]}', popxl.errors.UnreadableFileError, "is damaged"),
    ]:
        index.write_text(text)
        with pytest.raises(error, match=message):
            addons.load_safetensors(own, tmp_path)
    index.unlink()
    with pytest.raises(FileNotFoundError, match="holds no weights that can be found"):
        addons.load_safetensors(own, tmp_path)
    (tmp_path / "x.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(popxl.errors.UnreadableFileError, match="is damaged"):
        addons.load_safetensors(own, tmp_path)


def test_several_files_have_an_index_and_leave_none_of_before(tmp_path: Path) -> None:
    """By their own names, if there is no table."""
    shapes = {"a": (4,), "layers.0.b": (3,), "layers.1.b": (2,)}
    own, again = variables(**shapes), variables(**shapes)
    for i, v in enumerate(own.values_flat()):
        v.data[...] = i + 1
    addons.save_safetensors(own, tmp_path)
    addons.save_safetensors(own, tmp_path, file_bytes=20)
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    assert safetensors.numpy.load_file(tmp_path / files[0]).keys() == {"a"}
    addons.load_safetensors(again, tmp_path)
    assert [v.data[0] for v in again.values_flat()] == [1, 2, 3]
    addons.save_safetensors(own, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_numbers_are_rounded_and_never_become_infinite(tmp_path: Path) -> None:
    file = tmp_path / "w.safetensors"
    with popxl.Ir().main_graph:
        own = {name: popxl.variable(np.zeros(2), popxl.float16, name) for name in ("a", "b")}
    there = {"a": np.array([1 / 3, -np.inf], np.float32), "b": np.array([1, 7e4], np.float32)}
    safetensors.numpy.save_file(there, file)
    with pytest.raises(ValueError, match=r"`b` is float32\[2\]: some numbers are above 65504, the largest of float16"):
        addons.load_safetensors(own, file, narrow=True)
    assert not own["a"].data.any()
    addons.load_safetensors({"a": own["a"]}, file, narrow=True, partial=True)
    np.testing.assert_array_equal(own["a"].data, there["a"].astype(np.float16))


def test_what_is_refused(tmp_path: Path) -> None:
    own = variables(a=(2,))
    for names, message in [
        (Names({"b": "b"}), "`a` is not among `names`"),
        (Names({"a": Stored("x", part=(0, 3))}), r"parts \[1, 2\] of the 3 of `x` are missing"),
    ]:
        with pytest.raises(ValueError, match=message):
            addons.save_safetensors(own, tmp_path / "w", names)
    assert not (tmp_path / "w").exists()
    with pytest.raises(TypeError, match=r"variables of the main graph; these are not: \['x'\]"):
        addons.load_safetensors({"x": np.ones(2)}, tmp_path)  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="has 2 numbers, and `layers.0.w` has 1"):
        Names({"layers.*.w": "h.*.*.w"}).stored_form("layers.0.w")
    assert LLAMA.stored_form("layers.11.mlp.up.weight") == Stored("model.layers.11.mlp.up_proj.weight", transposed=True)
    for change, message in [
        ({"model_type": "bert"}, "of the type 'bert'; expected gpt2"),
        ({"hidden_act": "relu", "use_sliding_window": True}, "hidden_act='relu', use_sliding_window=True"),
        ({"model_type": "mistral", "sliding_window": 8}, "sliding_window=8, .* `max_position_embeddings` 8"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rotary positions of the type 'yarn'"),
    ]:
        with pytest.raises(ValueError, match=message):
            LanguageConfig.from_hugging_face({**hf.LLAMA, **change})
    with popxl.Ir().main_graph, pytest.raises(ValueError, match="texts have 65 places, and the model has 64"):
        model = LanguageModel(LanguageConfig.from_hugging_face(hf.LLAMA))
        model.create_graph(popxl.TensorSpec((1, 65), popxl.int32))
