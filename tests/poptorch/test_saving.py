"""Compiled models in files: what comes back, what does not, and that nothing in a file is run."""

from __future__ import annotations

import collections
import copy
import io
import json
import math
import os
import pickle
import re
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch")

# ruff: noqa: E402 - poptorch needs torch
import poptorch
from poptorch import optim
from poptorch.run.saving import KIND
from popxl.base.container import pack, unpack

THREE = torch.tensor([3.0])


class Model(torch.nn.Module):
    """Tied weights, buffers of both kinds, a default argument, a result in a dictionary, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 4)
        self.second = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
        self.second[0].weight = self.first.weight
        self.frozen = torch.nn.Parameter(torch.tensor(2.0), requires_grad=False)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("transient", torch.ones(4), persistent=False)
        self.rate = 0.5

    def forward(self, x: torch.Tensor, target: torch.Tensor | None = None, scale: torch.Tensor = THREE):
        self.count += 1
        x = torch.nn.functional.dropout(x, self.rate, self.training)
        y = self.second(self.first(x)) * self.frozen * self.transient * scale
        out = {"y": y, "constant": torch.tensor([7.0]), "label": "result"}
        return out if target is None else (out, torch.nn.functional.mse_loss(y, target))


DRAWN = torch.Generator().manual_seed(1)
X, T = torch.randn(6, 4, generator=DRAWN), torch.randn(6, 4, generator=DRAWN)


@pytest.fixture
def module() -> Model:
    torch.manual_seed(3)
    return Model()


def training_of(module: Model, make: Callable = lambda p: optim.Adam(p, lr=0.1), seed: int = 5):
    parameters = [p for p in module.parameters() if p.requires_grad]
    return poptorch.trainingModel(module, poptorch.Options().randomSeed(seed), make(parameters))


def test_inference_comes_back_without_the_class(module: Model, tmp_path: Path) -> None:
    options = poptorch.Options().outputMode(poptorch.OutputMode.Final).modelName("mine")
    model = poptorch.inferenceModel(module.eval(), options)
    model.compileAndExport(tmp_path / "new" / "model.poptorch", X)
    expected = model(X)
    loaded = poptorch.load(tmp_path / "new" / "model.poptorch")
    assert loaded.isCompiled() and loaded.isAttachedToDevice()
    found = loaded(X)
    assert found.keys() == expected.keys()
    assert found["label"] == "result"
    torch.testing.assert_close(found["y"], expected["y"])
    torch.testing.assert_close(found["constant"], expected["constant"])
    assert loaded.options.output_mode is poptorch.OutputMode.Final
    assert loaded.options.model_name == "mine"
    assert type(copy.copy(loaded.model)) is torch.nn.Module
    assert loaded.model.state_dict().keys() == module.state_dict().keys()
    assert loaded.model.count.item() == module.count.item() == 1
    assert not loaded.model.training
    assert loaded.model.get_parameter("second.0.weight") is loaded.model.get_parameter("first.weight")
    assert not loaded.model.frozen.requires_grad
    with pytest.raises(poptorch.Error, match="runs on the device only: its code is not in the file"):
        loaded.model(X)
    with pytest.raises(poptorch.Error, match=r"Shape mismatch for x: expected torch.Size\(\[6, 4\]\)"):
        loaded(X[:4])
    with pytest.raises(poptorch.Error, match="Mandatory parameter x missing"):
        loaded()


@pytest.mark.thorough(but_each=4)
@pytest.mark.parametrize(
    "make",
    [
        lambda p: optim.Adam(p, lr=0.01, loss_scaling=4.0),
        lambda p: optim.SGD([{"params": p[:1], "lr": 0.002}, {"params": p[1:]}], lr=0.001, momentum=0.9),
        lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.3),
        lambda p: torch.optim.AdamW([{"params": p, "decoupled_weight_decay": False}], lr=0.01, weight_decay=0.3),
        lambda p: torch.optim.SGD(p, lr=0.001, momentum=0.9, nesterov=True),
        lambda p: optim.LAMB(p, lr=torch.tensor(0.01).item(), bias_correction=False),
        lambda p: torch.optim.Adagrad(p, lr=0.01, lr_decay=0.1, initial_accumulator_value=0.2),
        lambda p: torch.optim.NAdam([{"params": p[:1], "lr": 0.002}, {"params": p[1:]}], lr=0.001),
        lambda p: optim.RMSprop(p, lr=0.001, momentum=0.5, centered=True, use_tf_variant=True),
    ],
)
def test_training_continues_where_it_was(module: Model, make: Callable, tmp_path: Path) -> None:
    model = training_of(module, make)
    for _ in range(2):
        model(X, T)
    model.save(tmp_path / "model.poptorch")
    loaded = poptorch.load(tmp_path / "model.poptorch")
    assert loaded.rng_state == model.rng_state
    groups, expected = (m._trainer.optimizer.param_groups for m in (loaded, model))
    assert [{**group, "params": ()} for group in groups] == [{**group, "params": ()} for group in expected]
    for _ in range(2):  # with the same dropout
        torch.testing.assert_close(loaded(X, T)[1], model(X, T)[1], rtol=0, atol=0)
    for name, expected in module.state_dict().items():
        torch.testing.assert_close(loaded.model.state_dict()[name], expected)
    assert loaded.model.count.item() == 4


def test_a_scheduler_that_cycles_betas_goes_on(module: Model, tmp_path: Path) -> None:
    model = training_of(module, lambda p: torch.optim.AdamW(p, lr=0.01))
    ours = model._trainer.optimizer
    schedule = torch.optim.lr_scheduler.OneCycleLR(ours, 0.1, total_steps=9)
    model(X, T), schedule.step()
    model.save(tmp_path / "model.poptorch")
    loaded = poptorch.load(tmp_path / "model.poptorch")
    theirs = loaded._trainer.optimizer
    again = torch.optim.lr_scheduler.OneCycleLR(theirs, 0.1, total_steps=9)
    again.load_state_dict(schedule.state_dict())
    theirs.load_state_dict(ours.state_dict())
    for _ in range(2):
        torch.testing.assert_close(loaded(X, T)[1], model(X, T)[1], rtol=0, atol=0)
        schedule.step(), again.step()
    assert theirs.param_groups[0]["betas"] == ours.param_groups[0]["betas"] != (0.95, 0.999)


def test_numbers_of_the_optimizer_are_those_of_now(module: Model, tmp_path: Path) -> None:
    model = training_of(module, lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.5))
    model(X, T)
    optimizer = model._trainer.optimizer
    optimizer.param_groups[0]["lr"] = 0.25
    model.setOptimizer(optimizer)
    model.save(tmp_path / "model.poptorch")
    loaded = poptorch.load(tmp_path / "model.poptorch")
    torch.testing.assert_close(loaded(X, T)[1], model(X, T)[1])
    restored = loaded._trainer.optimizer
    assert (restored.param_groups[0]["lr"], restored.param_groups[0]["momentum"]) == (0.25, 0.5)
    restored.param_groups[0]["momentum"] = 0.0  # it is variable in the program, as it was when that was made
    loaded.setOptimizer(restored)


def test_random_numbers_may_begin_anew(module: Model, tmp_path: Path) -> None:
    model = training_of(module)
    model(X, T)
    model.save(tmp_path / "model.poptorch", save_rng_state=False)
    loaded = poptorch.load(tmp_path / "model.poptorch")
    assert loaded.rng_state != model.rng_state


def test_an_executable_for_an_equal_model(module: Model, tmp_path: Path) -> None:
    model = training_of(module)
    model.compileAndExport(tmp_path / "model.poptorch", X, T, export_model=False)
    start = {name: t.clone() for name, t in module.state_dict().items()}
    with pytest.raises(AssertionError, match="holds an executable without its model"):
        poptorch.load(tmp_path / "model.poptorch")
    expected = [model(X, T)[1] for _ in range(2)]
    other = Model()
    other.load_state_dict(start)
    again = training_of(other)
    again.loadExecutable(tmp_path / "model.poptorch")
    assert again.isCompiled()
    torch.testing.assert_close([again(X, T)[1] for _ in range(2)], expected)
    torch.testing.assert_close(other.state_dict(), module.state_dict())
    with pytest.raises(poptorch.Error, match="is compiled already"):
        again.loadExecutable(tmp_path / "model.poptorch")
    with pytest.raises(poptorch.Error, match="was saved by a model for training, and this one is for inference"):
        poptorch.inferenceModel(Model()).loadExecutable(tmp_path / "model.poptorch")
    with pytest.raises(poptorch.Error, match=r"was saved by another model: this one has no frozen, first.weight"):
        poptorch.trainingModel(torch.nn.Linear(4, 4)).loadExecutable(tmp_path / "model.poptorch")


def test_the_state_of_an_executable_is_the_wrappers(module: Model, tmp_path: Path) -> None:
    model = training_of(module, lambda p: optim.SGD(p, lr=0.1, momentum=0.5))
    model(X, T)
    model.save(tmp_path / "model.poptorch")
    other = training_of(Model(), lambda p: optim.SGD(p, lr=0.1, momentum=0.5))
    other.loadExecutable(tmp_path / "model.poptorch")
    assert not other._trainer.optimizer.state_dict()["ipu_state"]["Accl1___first.weight"].any()


@pytest.mark.thorough
def test_loaded_models_can_be_wrapped_again(module: Model, tmp_path: Path) -> None:
    model = training_of(module)
    model.compileAndExport(tmp_path / "t.poptorch", X, T)
    inference = poptorch.inferenceModel(module.eval())
    inference.compileAndExport(tmp_path / "i.poptorch", X)
    training, validation = poptorch.load(tmp_path / "t.poptorch"), poptorch.load(tmp_path / "i.poptorch")
    before = validation(X)["y"]
    training(X, T)
    assert torch.equal(validation(X)["y"], before)  # there is no link
    linked = poptorch.inferenceModel(training, validation.options)
    linked.loadExecutable(tmp_path / "i.poptorch")
    training.copyWeightsToHost()
    assert not torch.equal(linked(X)["y"], before)
    training.save(tmp_path / "again.poptorch")
    torch.testing.assert_close(poptorch.load(tmp_path / "again.poptorch")(X, T)[1], training(X, T)[1])


def test_a_model_is_loaded_for_another_device(module: Model, tmp_path: Path) -> None:
    model = poptorch.inferenceModel(module.eval())
    model.compileAndExport(tmp_path / "model.poptorch", X)
    last = jax.local_device_count() - 1
    loaded = poptorch.load(tmp_path / "model.poptorch", edit_opts_fn=lambda options: options.useIpuId(last))
    torch.testing.assert_close(loaded(X)["y"], model(X)["y"])


def test_offline_targets_compile_only(module: Model, tmp_path: Path) -> None:
    model = poptorch.inferenceModel(module.eval(), poptorch.Options().useOfflineIpuTarget())
    model.compileAndExport(tmp_path / "model.poptorch", X)
    assert model.isCompiled() and not model.isAttachedToDevice()
    with pytest.raises(AssertionError, match="Trying to run a model on an offline device"):
        model(X)
    seen = []
    loaded = poptorch.load(tmp_path / "model.poptorch", lambda options: seen.append(options.modelName("edited")))
    assert seen[0].connection_type is poptorch.ConnectionType.Always
    assert loaded.options.ipu_version is None
    assert loaded.options.model_name == "edited"
    torch.testing.assert_close(loaded(X)["y"], module(X)["y"])


@pytest.mark.targets
@pytest.mark.parametrize("description", ["tpu v5e", "gpu h100"])
def test_offline_targets_may_be_machines(description: str, module: Model) -> None:
    model = poptorch.inferenceModel(module.eval(), poptorch.Options().useOfflineIpuTarget(description))
    model.compile(X)
    assert model.isCompiled() and model._executable.session.report.device == description
    with pytest.raises(AssertionError, match="Trying to run a model on an offline device"):
        model(X)


@pytest.mark.targets
@pytest.mark.parametrize(("description", "call"), [("tpu v5e", " recv("), ("gpu h100", "xla_ffi_python_gpu_callback")])
def test_functions_of_the_host_compile_for_machines(description: str, call: str) -> None:
    """JAX itself wants the GPU, for a call of Python."""
    on_host = poptorch.CPU(lambda x: (x.sin(), x[0] + 1), "mine")
    options = poptorch.Options().useOfflineIpuTarget(description)
    model = poptorch.inferenceModel(lambda x: sum(on_host(2 * x)), options)
    model.compile(X)
    (text,) = poptorch.sessionOf(model).hlo().values()
    assert call in text


def test_offline_optimizers_have_no_state(module: Model) -> None:
    optimizer = optim.SGD(module.first.parameters(), lr=0.1)
    options = poptorch.Options().connectionType(poptorch.ConnectionType.Never)
    poptorch.trainingModel(module, options, optimizer).compile(X, T)
    assert optimizer.state_dict()["ipu_state"] is None


def test_a_folder_gets_a_file(module: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = poptorch.inferenceModel(module.eval())
    with pytest.raises(poptorch.Error, match="Model has not been compiled or has been destroyed."):
        model.save(tmp_path)
    model.compileAndExport(str(tmp_path), X)
    assert "is a folder; the model is saved as" in caplog.text
    poptorch.load(tmp_path / "model.poptorch")(X)
    assert os.listdir(tmp_path) == ["model.poptorch"]


def test_groups_of_replicas_come_back(tmp_path: Path) -> None:
    class Scale(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor([[1.0], [2.0]]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    model = poptorch.inferenceModel(Scale(), poptorch.Options().replicationFactor(4))
    grouping = poptorch.CommGroupType.Orthogonal, 2, poptorch.VariableRetrievalMode.OnePerGroup
    model.weight.replicaGrouping(*grouping)
    model.compileAndExport(tmp_path / "model.poptorch", torch.ones(4))
    assert poptorch.load(tmp_path / "model.poptorch")(torch.ones(4)).tolist() == [1, 2, 1, 2]


# What cannot be, and what must not be ---------------------------------------------------------------------------------

Pair = collections.namedtuple("Pair", ["left", "right"])


class Own(OrderedDict):
    """A dictionary of a class of one's own."""


@dataclass
class Out:
    logits: torch.Tensor
    others: Any = None


@dataclass(frozen=True, slots=True)
class Frozen:
    x: torch.Tensor
    factor: float = math.inf


def results(x: torch.Tensor, index: slice = slice(0, 1)) -> Any:
    y = x + 1
    return Pair(y, Own(a=y[index], b=[slice(1, None), {3}, math.nan, 2j])), Out(x * 2, Frozen(x * 3)), torch.max(y, 1)


@pytest.mark.parametrize("export_model", [True, False])
def test_objects_of_known_classes_come_back(tmp_path: Path, export_model: bool) -> None:
    path = tmp_path / "model.poptorch"
    poptorch.inferenceModel(results).compileAndExport(path, X, export_model=export_model)
    if export_model:
        model = poptorch.load(path)
    else:
        model = poptorch.inferenceModel(results)
        model.loadExecutable(path)
    for x in (X, -X):
        (y, own), out, largest = model(x)
        (e_y, e_own), e_out, e_largest = results(x)
        assert type(model(x)[0]) is Pair and type(own) is Own and type(out) is Out and type(out.others) is Frozen
        assert torch.equal(y, e_y) and torch.equal(own["a"], e_own["a"]) and own["b"][:2] == [slice(1, None), {3}]
        assert math.isnan(own["b"][2]) and own["b"][3] == 2j and out.others.factor == math.inf
        assert torch.equal(out.logits, e_out.logits) and torch.equal(out.others.x, e_out.others.x)
        assert type(largest) is torch.return_types.max
        assert torch.equal(largest.values, e_largest.values) and torch.equal(largest.indices, e_largest.indices.int())
    with pytest.raises(poptorch.Error, match="Value mismatch for index"):
        model(X, slice(1, 2))


def test_objects_of_known_classes_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "model.poptorch"

    def forward(pair: Pair, out: Out, scale: np.float32, limit: float = math.inf) -> torch.Tensor:
        return pair.left * float(scale) + out.logits.clamp(max=limit)

    given = Pair(X, (3, range(4))), Out(X + 1, np.ones((2, 2))), np.float32(2)
    model = poptorch.inferenceModel(forward)
    model.compileAndExport(path, *given)
    model = poptorch.load(path)
    torch.testing.assert_close(model(*given), X * 2 + X + 1)
    with pytest.raises(poptorch.Error, match="Value mismatch for limit: expected inf but got 1.0"):
        model(*given, 1.0)
    with pytest.raises(poptorch.Error, match="Value mismatch for scale"):
        model(*given[:2], np.float32(3))


def test_objects_of_classes_that_are_not_there_come_back_as_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.poptorch"
    poptorch.inferenceModel(results).compileAndExport(path, X)
    for name in ("Pair", "Own", "Out", "Frozen"):
        monkeypatch.delattr(sys.modules[__name__], name)
    (pair, out, _), expected = poptorch.load(path)(X), X + 1
    assert type(pair).__name__ == "Pair" and pair._fields == ("left", "right") and isinstance(pair, tuple)
    assert type(pair.right) is OrderedDict and type(out).__name__ == "Out" and out.others.factor == math.inf
    assert torch.equal(pair.left, expected) and torch.equal(out.logits, X * 2)


class Thing:
    """Anything."""


def test_objects_of_own_classes_cannot_be_saved(tmp_path: Path) -> None:
    model = poptorch.inferenceModel(lambda x: Pair(x + 1, Thing()))
    with pytest.raises(poptorch.Error, match=r"the result\[1\] is .*Thing.*cannot be saved: a file holds numbers"):
        model.compileAndExport(tmp_path / "model.poptorch", X)
    assert not os.listdir(tmp_path)
    model = poptorch.inferenceModel(lambda x, thing: x * 2)
    with pytest.raises(poptorch.Error, match=r"the arguments\[1\] is .*, a Thing, which cannot be saved"):
        model.compileAndExport(tmp_path / "model.poptorch", X, Thing())


class Hostile:
    """Runs code when it is unpickled."""

    ran = False

    def __reduce__(self):
        return _harm, ()


def _harm() -> None:
    Hostile.ran = True


def test_hostile_files_run_nothing(module: Model, tmp_path: Path) -> None:
    good = tmp_path / "good.poptorch"
    poptorch.inferenceModel(module.eval()).compileAndExport(good, X)
    about, blobs = unpack(KIND, good.read_bytes())
    hostile = pickle.dumps(Hostile())
    pickle.loads(hostile)
    assert Hostile.ran
    Hostile.ran = False
    saved_by_torch = io.BytesIO()
    torch.save(Hostile(), saved_by_torch)
    assert not re.search(r"poptorch\.[a-z]|poptorch[\w.]*:\w", json.dumps(about))  # modules may move

    def archived(**changed: bytes) -> bytes:
        return pack(KIND, about, blobs | changed)

    def zipped(member: bytes) -> bytes:
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w") as archive:
            for name in ("about.json", "tensors.safetensors", "session", "digest"):
                archive.writestr(name, member)
        return content.getvalue()

    def about_with(path: str, value: object) -> bytes:
        changed = json.loads(json.dumps(about))
        *outer, last = path.split("/")
        place = changed
        for key in outer:
            place = place[key]
        place[last] = value
        return pack(KIND, changed, blobs)

    files = [
        hostile,
        saved_by_torch.getvalue(),
        b"",
        zipped(hostile),
        archived(tensors=hostile),
        archived(session=hostile),
        about_with("call/args", [{"object": "os.system"}]),
        about_with("call/result", {"enum": "os.system"}),
        about_with("call/result", {"numbers": [1], "numpy": "O", "shape": [1]}),
        about_with("call/result", {"tuple": [], "class": "a:b", "fields": ["__import__('os')"]}),
        about_with("call/result", {"dataclass": [1], "class": "a:b; c", "fields": ["x"]}),
        about_with("call/result", {"dataclass": [1], "class": "a:b", "fields": ["x=1"]}),
        about_with("call/result", {"tensor": [1], "dtype": "hub"}),
        about_with("options", {"Training.x.y": 1}),
        about_with("options", {"executable_cache": str(tmp_path / "folder")}),
        about_with("options", {"profile_dir": str(tmp_path / "folder")}),
        about_with("options", {"_Popart.options": {"dict": [["logDir", str(tmp_path / "folder")]]}}),
        about_with("extra", 1),
    ]
    for number, content in enumerate(files):
        path = tmp_path / f"{number}.poptorch"
        path.write_bytes(content)
        with pytest.raises(poptorch.Error, match="holds no (model|program) that can be"):
            poptorch.load(path)
    path.write_bytes(archived(data=hostile))
    poptorch.load(path)(X)  # what is not a part of the format is not looked at
    assert not Hostile.ran


def test_other_versions_and_missing_files(module: Model, tmp_path: Path) -> None:
    path = tmp_path / "model.poptorch"
    poptorch.inferenceModel(module.eval()).compileAndExport(path, X)
    about, blobs = unpack(KIND, path.read_bytes())
    path.write_bytes(pack(KIND, about | {"poptorch": "0.0.1"}, blobs))
    with pytest.raises(AssertionError, match=r"was written by version 0.0.1 of poptorch.*Compile and save"):
        poptorch.load(path)
    with pytest.raises(poptorch.Error, match="holds no model that can be read"):
        poptorch.load(tmp_path / "other.poptorch")
