"""What programs in use rely on without saying so: names, copies of wrappers, masks, `out=`, slices between tensors."""

# ruff: noqa: E402 - poptorch needs torch

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import popart
import popdist.poptorch
import poptorch
from poptorch._impl import rewrapModelIfNecessary, unwrapModelIfNecessary
from poptorch._poplar_executor import PoplarExecutor
from poptorch._utils import combine_batch_tensors_gen
from poptorch.placement.blocks import BeginBlock, BlockFunction
from poptorch.run.compiled import Compiled
from runtime.program.host_arrays import Outputs

X = torch.arange(12.0).reshape(3, 4)
PLACE = torch.tensor(1)


def both(model: Callable[..., Any], *inputs: torch.Tensor) -> None:
    """Check that a wrapped model returns what it returns on the host, and overwrites its inputs alike."""
    theirs, mine = [t.clone() for t in inputs], [t.clone() for t in inputs]
    expected, found = model(*theirs), poptorch.inferenceModel(model)(*mine)
    for a, b in zip([*found, *mine], [*expected, *theirs], strict=True):
        torch.testing.assert_close(a, b.to(a.dtype), rtol=1e-6, atol=1e-6, equal_nan=True)


class Model(torch.nn.Module):
    """A layer, whose mean is the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return poptorch.identity_loss(self.fc(x), "mean")


# Wrappers -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_wrappers_and_of_their_modules_are_wrapped_again(how: Callable[[Any], Any]) -> None:
    module = Model()
    first = poptorch.trainingModel(module, optimizer=poptorch.optim.SGD(module.parameters(), lr=0.5, momentum=0.5))
    first(X)
    weight = module.fc.weight.detach().clone()
    for again in (how(first), poptorch.trainingModel(how(first.model)), poptorch.trainingModel(how(first).model)):
        assert isinstance(again, PoplarExecutor) and type(again.model) is not Model and not again.isCompiled()
        torch.testing.assert_close(again.fc.weight.detach(), weight, rtol=0, atol=0)
        again.destroy()
    assert how(first)._trainer.optimizer.param_groups[0]["momentum"] == 0.5


def test_a_copy_of_a_wrapper_trains_its_own_weights() -> None:
    module = Model()
    first = poptorch.trainingModel(module)
    other = copy.deepcopy(first)
    before = module.fc.weight.detach().clone()
    other(X)
    assert torch.equal(module.fc.weight, before) and not torch.equal(other.fc.weight, before)


def test_weights_are_copied_once_and_only_if_they_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[str] = []

    def noted(name: str) -> None:
        plain = getattr(Compiled, name)
        monkeypatch.setattr(Compiled, name, lambda *args: (copies.append(name), plain(*args))[1])

    module = Model()
    training, inference, other = poptorch.trainingModel(module), *(poptorch.inferenceModel(module) for _ in range(2))
    for model in (training, inference, other):
        model(X)
    noted("weights")
    noted("write_weights")
    for model in (training, inference, other):
        model(X)
    assert copies == ["weights", "write_weights", "write_weights"], "home once, and to both others"
    for model in (inference, other, training):
        model(X)
    assert len(copies) == 3, "nothing has changed but on the device that has it"
    assert module.fc.weight.sum() == module.fc.weight.sum() and module.fc.bias.isfinite().all()
    assert copies[3:] == ["weights"]
    inference(X)
    assert copies[4:] == ["write_weights"]


def test_a_class_is_taken_off_and_put_back() -> None:
    module = Model()
    training = poptorch.trainingModel(module)
    assert training._executable is None
    training(X)
    assert training._executable is not None
    before = module.fc.weight.detach().clone()
    training(X)
    assert unwrapModelIfNecessary(module) is module and type(module) is Model
    assert not torch.equal(vars(module)["_modules"]["fc"]._parameters["weight"], before), "weights come home"
    assert rewrapModelIfNecessary(training) is training and type(module) is not Model
    training.destroy()
    assert type(module) is Model and training._executable is None
    assert type(rewrapModelIfNecessary(unwrapModelIfNecessary(module))) is Model, "nobody trains it"


def test_what_torch_compile_has_made_is_what_that_was_made_of() -> None:
    class Outer(torch.nn.Module):
        def __init__(self, inner: Any) -> None:
            super().__init__()
            self.inner, self.double = inner, torch.compile(lambda x: x * 2, backend="eager")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.double(self.inner(x))

    layer = torch.nn.Linear(4, 3)
    wrapped = poptorch.inferenceModel(torch.compile(layer, backend="eager"))
    assert wrapped.model is layer
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # PyTorch's, of hooks
        twice = poptorch.inferenceModel(Outer(torch.compile(layer, backend="eager")))(X)
    torch.testing.assert_close(twice, 2 * layer(X).detach())
    torch.testing.assert_close(wrapped(X), layer(X).detach())
    assert poptorch.inferenceModel(torch.compile(lambda x: x + 1, backend="eager"))(X)[0, 0] == 1


@pytest.mark.filterwarnings("ignore")
def test_torch_compile_around_a_wrapper_runs_the_program() -> None:
    layer = torch.nn.Linear(4, 2)
    wrapped = poptorch.inferenceModel(layer)
    for _ in range(2):  # compiled by the first call, and before it
        torch.testing.assert_close(torch.compile(wrapped, backend="eager")(X), layer(X).detach())
        twice = torch.compile(lambda x: wrapped(x) * 2, backend="eager")  # noqa: B023 - called here
        torch.testing.assert_close(twice(X), layer(X).detach() * 2)
        wrapped = poptorch.inferenceModel(layer)
        wrapped(X)


def test_a_smaller_last_batch_is_told_of_drop_last() -> None:
    model = poptorch.inferenceModel(lambda x: x + 1, poptorch.Options().connectionType(poptorch.ConnectionType.Never))
    model.compile(X)
    with pytest.raises(
        poptorch.Error, match=r"expected torch.Size\(\[3, 4\]\) but got torch.Size\(\[2, 4\]\).*drop_last"
    ):
        model(X[:2])
    for other in (X[:, :2], torch.cat([X, X])):
        with pytest.raises(poptorch.Error, match="Shape mismatch") as raised:
            model(other)
        assert "drop_last" not in str(raised.value)
    with pytest.raises(AssertionError, match="Invalid batch dimension: .*drop_last"):
        poptorch.inferenceModel(lambda x: x + 1, poptorch.Options().deviceIterations(2))(X)


@pytest.mark.parametrize("asked", [{}, {"modelName": "mine"}])
def test_reports_that_the_environment_asks_for(
    asked: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = {"autoReport.all": "true", "autoReport.directory": str(tmp_path)}
    monkeypatch.setenv("POPLAR_ENGINE_OPTIONS", json.dumps(wanted))
    options = poptorch.Options()
    for method, name in asked.items():
        getattr(options, method)(name)
    poptorch.inferenceModel(lambda x: x + 1, options).compile(X)
    assert "<html" in (tmp_path / asked.get("modelName", "inference") / "report.html").read_text()


def test_synthetic_data_is_neither_loaded_nor_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    options = poptorch.Options().enableSyntheticData(True).deviceIterations(3)
    model = poptorch.inferenceModel(lambda x: (x + 1, x.sum(), x.int()), options)
    model.compile(X)
    assert not poptorch.sessionOf(model).expected_inputs()

    def fetch(outputs: Outputs, stream: Any) -> None:
        raise AssertionError(stream)

    monkeypatch.setattr(Outputs, "__getitem__", fetch)
    results = model(X)
    assert [(tuple(t.shape), t.dtype) for t in results] == [
        ((3, 4), torch.float32),
        ((3,), torch.float32),
        ((3, 4), torch.int32),
    ]


# Names ----------------------------------------------------------------------------------------------------------------


def test_settings_have_the_names_that_they_are_stored_by() -> None:
    options = poptorch.Options()
    options.Training.setMeanAccumulationAndReplicationReductionStrategy(poptorch.MeanReductionStrategy.Running)
    options.Distributed.configureProcessId(2, 5)
    assert options.Training.meanAccumulationAndReplicationReductionStrategy is poptorch.MeanReductionStrategy.Running
    assert (options.Distributed.distributed_process_id, options.Distributed.num_distributed_processes) == (2, 5)


def test_a_group_of_options_gets_a_class_of_its_own() -> None:
    options = poptorch.Options()

    class Fixed(type(options.Distributed)):  # type: ignore[misc]
        def disable(self) -> Any:
            raise RuntimeError("no")

    options.Distributed.__class__ = Fixed
    for made in (options, options.clone(), copy.deepcopy(options)):
        assert type(made.Distributed) is Fixed and made.Distributed.num_processes == 1
        with pytest.raises(RuntimeError, match="no"):
            made.Distributed.disable()
    assert poptorch.Options().Distributed.disable().process_id == 0


def test_deep_copies_of_options_are_independent() -> None:
    options = poptorch.Options()
    options._Popart.set("enableOutlining", False)
    options.setAvailableMemoryProportion({"IPU0": 0.5}).anchorTensor("a", "b")
    strategy = poptorch.SerialPhasedExecution("A", "B")
    options.setExecutionStrategy(strategy)
    before = repr(options)
    other = copy.deepcopy(options)
    assert repr(other) == before
    other._Popart.options["enableOutlining"] = True
    other.available_memory_proportion["IPU1"] = 0.1
    other.anchored_tensors.clear()
    other.source_location_excludes.append("mine")
    other.Training.gradientAccumulation(7)
    other.TensorLocations.weight_location.useOnChipStorage(True)
    other.execution_strategy.useSeparateBackwardPhase()
    other.execution_strategy.phase(0).stage(0).ipu(5)
    assert repr(options) == before


def test_devices_for_each_replica_are_as_the_program_says(caplog: pytest.LogCaptureFixture) -> None:
    assert popdist.poptorch.Options(ipus_per_replica=2).replication_factor == 1
    (warning,) = caplog.messages
    assert "`ipus_per_replica` is 2, and poprun, which could say it, has not started" in warning


ENUMERATIONS = {
    "AccumulateOuterFragmentSchedule": ("accumulateOuterFragmentSettings.schedule", "Serial"),
    "BatchSerializationBatchSchedule": ("batchSerializationSettings.batchSchedule", "OverlapOnCompute"),
    "BatchSerializationTransformContext": ("batchSerializationSettings.transformContext", "Bwd"),
    "RecomputationType": ("autoRecomputation", "RecomputeAll"),
    "SubgraphCopyingStrategy": ("subgraphCopyingStrategy", "JustInTime"),
    "SyntheticDataMode": ("syntheticDataMode", "RandomNormal"),
    "VirtualGraphMode": ("virtualGraphMode", "Manual"),
}


def test_enumerations_of_popart_are_values_of_session_options() -> None:
    options = poptorch.Options()
    for name, (option, member) in ENUMERATIONS.items():
        kind = getattr(popart, name)
        assert issubclass(kind, IntEnum) and name in popart.__all__
        options._Popart.set(option, kind[member])
    torch.testing.assert_close(poptorch.inferenceModel(lambda x: x + 1, options)(X), X + 1)


def test_batches_are_joined() -> None:
    batches = ([torch.full((2, 3), float(i)), torch.tensor([i])] for i in range(3))
    x, i = combine_batch_tensors_gen(batches)
    assert x[:, 0].tolist() == [0, 0, 1, 1, 2, 2] and i.tolist() == [0, 1, 2]
    (rows,) = combine_batch_tensors_gen(iter([X, X[:1]]))
    assert rows.shape == (4, 4)


# Blocks ---------------------------------------------------------------------------------------------------------------


class Block(torch.nn.Module):
    """A layer in a block, and a function in another."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = BlockFunction(7, ipu_id=1)(torch.nn.Linear(4, 3))
        self.function = BlockFunction("B", ipu_id=0)(torch.relu)
        self.begin = BeginBlock(torch.neg, 2, 1)

    @BlockFunction("method", ipu_id=0)
    def last(self, x: torch.Tensor, by: int = 1) -> torch.Tensor:
        return x + by

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.begin(self.function(self.layer(x))), by=2)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)), None])
def test_blocks_are_copied_pickled_and_saved(how: Callable[[Any], Any] | None, tmp_path: Path) -> None:
    module = Block()
    if how is None:
        torch.save(module, tmp_path / "module.pt")
        other = torch.load(tmp_path / "module.pt", weights_only=False)
    else:
        other = how(module)
    assert list(other.state_dict()) == ["layer.weight", "layer.bias"]
    torch.testing.assert_close(other(X), module(X), rtol=0, atol=0)
    assert "Linear(in_features=4, out_features=3, bias=True)" in repr(other)
    assert "BlockFunction(user_id=7, ipu_id=1) Linear(in" in poptorch.module_repr(other)
    assert "relu" in repr(other.function)
    options = poptorch.Options().deviceIterations(4).setExecutionStrategy(
        poptorch.PipelinedExecution("7", "B", "2", "method")
    )  # fmt: skip
    model = poptorch.inferenceModel(other, options)
    torch.testing.assert_close(model(X.repeat(4, 1)), module(X).repeat(4, 1).detach())


def test_a_module_is_in_one_block() -> None:
    layer = BlockFunction("A")(torch.nn.ReLU())
    for again in (BlockFunction("B"), lambda layer: BeginBlock(layer, "B")):
        with pytest.raises(poptorch.Error, match="the ReLU module has already been assigned to a block"):
            again(layer)
    poptorch.removeBlocks(layer)
    assert not layer._forward_pre_hooks and not layer._forward_hooks


# Ops ------------------------------------------------------------------------------------------------------------------


def test_arguments_may_have_any_name() -> None:
    """Those of the state of a program, too, which has tensors of its own."""

    class Noisy(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(4))

        def forward(
            self, random: Any, turn: Any, values: Any, output0: Any, Step: Any, largest: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            kept = torch.nn.functional.dropout(self.w, p=0.0)
            total = random + turn + values + output0 + Step + largest
            return total, poptorch.identity_loss((kept * total).sum(), "none")

    module, options = Noisy(), poptorch.Options().deviceIterations(3).outputMode(poptorch.OutputMode.All)
    model = poptorch.trainingModel(module, options, poptorch.optim.Adam(module.parameters(), lr=0.1))
    total, _ = model(X, X + 1, X + 2, X + 3, X + 4, X + 5)
    torch.testing.assert_close(total, 6 * X + 15)


def test_slices_between_tensors() -> None:
    def model(x: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.clone()
        y[0, i - 1 : i + 1] = -1
        y[1:, 1 + i : 1 + (i + 1)] = x[:2, i : i + 1]
        return x[:, i : i + 2], x[..., i : i + 2 : 2], x[i : i + 1, 1:], x[i - 3 : i - 2], y

    both(model, X, PLACE)


def test_slices_of_micro_batches() -> None:
    """Where each micro-batch has one number of an input, of the shape [1]."""

    def model(x: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.clone()
        y[:, i : i + 1] = -1
        return x[:, i : i + 2], x[:, i - 1 : i + 1], y

    places = torch.tensor([1, 2, -3])
    results = poptorch.inferenceModel(model, poptorch.Options().deviceIterations(3))(X, places)
    expected = zip(*(model(x, i) for x, i in zip(X.split(1), places.split(1), strict=True)), strict=True)
    for found, parts in zip(results, expected, strict=True):
        torch.testing.assert_close(found, torch.cat(parts))


def test_a_slice_of_each_row() -> None:
    """`i[k]` is one number, however often it is asked for; after a change it is another."""

    def model(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        return torch.stack([x[k, i[k] : i[k] + 2] for k in range(len(x))])

    def changed(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        first = i[0] + 0
        i = i + 0
        i[0] += 1
        return x[0, first : i[0] + 1]

    x, places, options = torch.arange(16.0).reshape(4, 4), torch.tensor([1, 0, 2, 1]), poptorch.Options()
    found = poptorch.inferenceModel(model, options.deviceIterations(2))(x, places)
    torch.testing.assert_close(found, model(x, places))
    with pytest.raises(poptorch.Error, match="the host has to look at numbers here"):
        poptorch.inferenceModel(changed, options)(x, places)


def test_slices_of_unknown_length_are_refused() -> None:
    for forward in (lambda x, i: x[i:], lambda x, i: x[i : 2 * i], lambda x, i: x[:i]):
        with pytest.raises(poptorch.Error, match="numbers in a tensor cannot be read.*dynamic_slice"):
            poptorch.inferenceModel(forward, poptorch.Options().keptPrograms(1))(X, PLACE)


def test_masks_of_bytes() -> None:
    mask = torch.eye(3, 4, dtype=torch.uint8)

    def wrapped(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.clone()
        y.masked_fill_(mask=mask, value=5.0)
        return (
            x.masked_fill(mask, 5.0),
            y,
            x.index_put((mask,), torch.tensor(5.0)),
            torch.where(mask, 5.0, x),
            x.masked_scatter(mask, torch.full((12,), 5.0)),
        )

    expected = torch.where(mask.bool(), 5.0, X)
    for found in poptorch.inferenceModel(wrapped)(X, mask):
        assert torch.equal(found, expected)


def test_out_is_an_input() -> None:
    def model(x: torch.Tensor, same: torch.Tensor, empty: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, ...]:
        torch.add(x, 1, out=same)
        return torch.sum(x, 0, out=empty), torch.mean(x[:1], 0, out=row)

    both(model, X, torch.zeros(3, 4), torch.zeros(0), torch.zeros(4))


def test_products_with_factors_of_zero() -> None:
    nan, a, b = torch.full((2, 3), torch.nan), torch.ones(2, 4), torch.ones(4, 3)

    def model(nan: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        bad, c = nan[:, :1] * a, torch.ones(2, 3)
        return (
            torch.addmm(nan, a, b, beta=0),
            torch.addmm(c, bad, b, alpha=0, beta=2),
            torch.addmm(nan, bad, b, alpha=0, beta=0),
            torch.addmv(nan[:, 0], a, b[:, 0], beta=0),
            torch.addmv(c[:, 0], bad, b[:, 0], alpha=0),
            torch.baddbmm(nan[None], a[None], b[None], beta=0),
        )

    both(model, nan, a, b)
    bad, c = nan[None, :, :1] * a, torch.ones(1, 2, 3)
    found = poptorch.inferenceModel(lambda c, bad, b: torch.baddbmm(c, bad, b, alpha=0))(c, bad, b[None])
    torch.testing.assert_close(found, c, msg="PyTorch on the host gives NaN here, and 1 with `addbmm`")


def test_tensors_of_the_host_that_change_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """Of plain attributes and of objects that are no modules: once, and with what to do."""

    class Config:
        def __init__(self) -> None:
            self.bias = torch.full((4,), 2.0)

    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.steps, self.config = torch.ones(4), [torch.ones(4)], Config()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.scale + self.config.bias) * self.steps[0] + torch.tensor(1.0)

    def told() -> list[str]:
        messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        caplog.clear()
        return messages

    module = Scaled()
    model = poptorch.inferenceModel(module)
    torch.testing.assert_close(model(X), X + 3)
    (message,) = told()
    assert message.startswith("`model.config.bias` is a tensor of the host, and used on the device")
    module.scale.mul_(1)
    module.other = torch.ones(4)
    model(X)
    assert not told()
    module.scale.mul_(3)
    module.steps[0] = torch.zeros(4)
    module.config.bias = torch.zeros(4)
    torch.testing.assert_close(model(X), X + 3)
    assert sorted(message.partition(" than")[0] for message in told()) == [
        "`model.config.bias` is another object",
        "`model.scale` holds other numbers",
        "`model.steps[0]` is another object",
    ]
    model(X)
    assert not told()


def test_the_generator_of_the_host_is_not_seeded_in_vain() -> None:
    def seeds(x: torch.Tensor) -> torch.Tensor:
        torch.default_generator.manual_seed(11)
        return x + torch.rand(4)

    for seed in (5, 11):
        torch.manual_seed(seed)
        torch.rand(1)
        before = torch.get_rng_state()
        with pytest.raises(poptorch.Error, match=r"seeds `torch\.default_generator`.*`torch\.manual_seed\(0\)`"):
            poptorch.inferenceModel(seeds)(X)
        assert torch.equal(torch.get_rng_state(), before)


def kept() -> torch.Tensor:
    global TABLE
    if TABLE is None:
        TABLE = torch.arange(4.0)
    return TABLE


TABLE: torch.Tensor | None = None


def test_a_table_that_the_first_capture_makes_serves_the_next() -> None:
    for _ in range(2):
        torch.testing.assert_close(poptorch.inferenceModel(lambda x: x + kept())(X), X + torch.arange(4.0))


def test_fast_gather() -> None:
    class Gather(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.data = torch.nn.Parameter(X.clone())

        def forward(self, indices: torch.Tensor) -> Any:
            examples = [torch.zeros(indices.shape)]
            given = ([self.data, indices], "FastGatherLastDim", "poptorch.custom_ops", 1)
            found = poptorch.custom_op(*given, example_outputs=examples, attributes={})
            return found[0], poptorch.identity_loss(found[0] ** 2, "sum")

    module, indices = Gather(), torch.tensor([[1, 1], [2, 0], [3, 3]])
    found, _ = poptorch.trainingModel(module, optimizer=poptorch.optim.SGD(module.parameters(), lr=0.5))(indices)
    theirs = torch.nn.Parameter(X.clone())
    gathered = theirs.gather(-1, indices)
    (gathered**2).sum().backward()
    torch.testing.assert_close(found, gathered.detach())
    torch.testing.assert_close(module.data.detach(), X - 0.5 * theirs.grad)
    with pytest.raises(
        poptorch.Error, match=r"FastGatherLastDim: the data has the shape \[3, 4\] and the indices \[2, 2\]"
    ):
        poptorch.inferenceModel(Gather())(indices[:2])


def test_overlapped_inputs_and_results() -> None:
    options = poptorch.Options().outputMode(poptorch.OutputMode.All)
    options.setExecutionStrategy(poptorch.ShardedExecution()).TensorLocations.numIOTiles(32)
    mode = poptorch.OverlapMode.OverlapDeviceIterationLoop

    def model(pair: tuple[torch.Tensor, torch.Tensor]) -> Any:
        x, y = poptorch.set_overlap_for_input(pair, mode)
        return poptorch.set_overlap_for_output([x + y, x * y], mode), x - y

    (total, product), difference = poptorch.inferenceModel(model, options)((X, X + 1))
    assert torch.equal(total, 2 * X + 1) and torch.equal(product, X * (X + 1)) and torch.equal(difference, X * 0 - 1)


def test_a_printed_matrix_has_a_line_for_each_row(capfd: pytest.CaptureFixture[str]) -> None:
    style: dict[str, Any] = {"separator": " ", "open_bracket": "{", "close_bracket": "}", "digits": 2}
    x = torch.tensor([[1.49, 1.76], [1.08, 1.13]])
    poptorch.inferenceModel(lambda x: poptorch.ipu_print_tensor(x, "title", **style))(x)
    assert capfd.readouterr().err == "title: {\n {1.49 1.76}\n {1.08 1.13}\n}\n"


def test_printed_separators_and_brackets_are_as_given(capfd: pytest.CaptureFixture[str]) -> None:
    def printed(x: torch.Tensor, **style: Any) -> str:
        poptorch.inferenceModel(lambda x: poptorch.ipu_print_tensor(x, "t", **style))(x)
        return capfd.readouterr().err

    x = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
    assert printed(x) == "t: (\n (1, 2),\n (3, 4)\n)\n"
    assert printed(x[0], separator=" | ", open_bracket="<<", close_bracket=">>") == "t: <<1 | 2>>\n"
    lines = printed(torch.arange(40), separator=" - ", max_line_width=20).splitlines()
    assert lines[1] == "  3 -  4 -  5 -" and max(map(len, lines[1:])) <= 20


def test_errors_of_pytorch_are_those_of_eager() -> None:
    index = torch.zeros(1, 4, dtype=torch.long)
    for wrong in (lambda x, i: torch.scatter(x, i, 0, x), lambda x, i: x.scatter(0, i, "a"), lambda x, i: x @ i @ x):
        with pytest.raises((TypeError, RuntimeError)) as raised:
            poptorch.inferenceModel(wrong)(X, index)
        assert "FakeTensor" not in str(raised.value)
    with pytest.raises(TypeError) as expected:
        torch.scatter(X, index, 0, X)
    with pytest.raises(TypeError) as raised:
        poptorch.inferenceModel(lambda x, i: torch.scatter(x, i, 0, x))(X, index)
    assert str(raised.value) == str(expected.value)


@pytest.mark.thorough
def test_loaded_models_run_where_nobody_defines_the_module(tmp_path: Path) -> None:
    module = Model()
    poptorch.inferenceModel(module).compileAndExport(tmp_path / "model.poptorch", X)
    program = (
        "import sys, torch, poptorch; model = poptorch.load(sys.argv[1]);"
        "print(model(torch.arange(12.0).reshape(3, 4)).item(), model.model.state_dict()['fc.weight'].sum().item())"
    )
    run = [sys.executable, "-c", program, str(tmp_path / "model.poptorch")]
    loss, total = subprocess.run(run, capture_output=True, text=True, check=True).stdout.split()
    assert float(loss) == pytest.approx(module(X).item(), rel=1e-5)
    assert float(total) == pytest.approx(module.fc.weight.sum().item(), rel=1e-5)
