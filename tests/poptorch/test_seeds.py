"""The programs that the user guide shows: the loop of its introduction, and what its chapter on features lists."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import poptorch  # noqa: E402  (it needs torch)

torch.set_num_threads(1)  # models are tiny: threads of PyTorch would only wait for each other


class ExampleDataset(torch.utils.data.Dataset):
    """As many random pairs of an input and a target."""

    def __init__(self, shape: list[int], length: int) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)
        self.inputs = torch.randn((length, *shape), generator=random)
        self.targets = 0.3 * self.inputs + 0.1

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.targets[index]


class ExampleModelWithLoss(torch.nn.Module):
    """A linear layer, which tells its loss while it is trained."""

    def __init__(self, features: int = 10) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = torch.nn.Linear(features, features)
        self.loss = torch.nn.MSELoss()

    def forward(self, x: torch.Tensor, target: torch.Tensor | None = None) -> Any:
        fc = self.fc(x)
        if self.training:
            return fc, self.loss(fc, target)
        return fc


# Introduction ---------------------------------------------------------------------------------------------------------


def native_loop(dataset: torch.utils.data.Dataset) -> tuple[torch.nn.Module, float]:
    training_data = torch.utils.data.DataLoader(dataset, batch_size=10, shuffle=True, drop_last=True)
    model = ExampleModelWithLoss(1)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    momentum_loss = None
    for batch, target in training_data:
        optimizer.zero_grad()
        _, loss = model(batch, target)
        loss.backward()
        optimizer.step()
        if momentum_loss is None:
            momentum_loss = loss
        else:
            momentum_loss = momentum_loss * 0.95 + loss * 0.05
        if momentum_loss < 0.1:
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.0001)
    return model, momentum_loss.item()


def poptorch_loop(dataset: torch.utils.data.Dataset) -> tuple[torch.nn.Module, float]:
    opts = poptorch.Options()
    opts.deviceIterations(10)
    training_data = poptorch.DataLoader(options=opts, dataset=dataset, batch_size=10, shuffle=True, drop_last=True)
    model = ExampleModelWithLoss(1)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    poptorch_model = poptorch.trainingModel(model, options=opts, optimizer=optimizer)
    momentum_loss = None
    for batch, target in training_data:
        _, loss = poptorch_model(batch, target)
        if momentum_loss is None:
            momentum_loss = loss
        else:
            momentum_loss = momentum_loss * 0.95 + loss * 0.05
        if momentum_loss < 0.1:
            poptorch_model.setOptimizer(torch.optim.AdamW(model.parameters(), lr=0.0001))
    return model, momentum_loss.item()


def test_introduction() -> None:
    dataset = ExampleDataset(shape=[1], length=8000)
    before = ExampleModelWithLoss(1)
    start = torch.nn.functional.mse_loss(before.fc(dataset.inputs), dataset.targets).item()
    for loop in (native_loop, poptorch_loop):
        model, momentum_loss = loop(dataset)
        end = torch.nn.functional.mse_loss(model.fc(dataset.inputs), dataset.targets).item()
        assert end < start / 2 and momentum_loss < start


# Features -------------------------------------------------------------------------------------------------------------


def test_options_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "poptorch.conf").write_text(
        "deviceIterations(1)\nsetExecutionStrategy(poptorch.ShardedExecution())\nreplicationFactor(1)\n"
    )
    opts = poptorch.Options()
    opts.loadFromFile(tmp_path / "poptorch.conf")
    assert isinstance(opts.execution_strategy, poptorch.ShardedExecution)


def test_training_model() -> None:
    model = ExampleModelWithLoss()
    poptorch_model = poptorch.trainingModel(model)
    input, target = torch.randn(10), torch.randn(10)
    losses = []
    for _ in range(800):
        poptorch_out, loss = poptorch_model(input, target)
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 5
    poptorch_model.copyWeightsToHost()
    model.eval()
    torch.testing.assert_close(model(input), poptorch_out, rtol=1e-2, atol=1e-2)  # a step lies between the two


def test_inference_in_half() -> None:
    model = torch.nn.Linear(1, 10)
    model.half()
    t1 = torch.tensor([1.0]).half()
    out = poptorch.inferenceModel(model, poptorch.Options())(t1)
    assert out.dtype == torch.half
    torch.testing.assert_close(out, model(t1), rtol=5e-3, atol=5e-4)


def test_when_weights_need_copies() -> None:
    model, x = ExampleModelWithLoss(2), torch.ones(2)
    model.eval()
    poptorch_inf = poptorch.inferenceModel(model)
    model.train()
    poptorch_train = poptorch.trainingModel(model)
    before = poptorch_inf(x)
    poptorch_train(x, torch.zeros(2))
    after = poptorch_inf(x)  # still in eval mode, with the weights of the training
    assert not torch.equal(before, after)
    model.eval()
    torch.testing.assert_close(after, model(x))
    with torch.no_grad():
        model.fc.weight.zero_()  # on the CPU
    torch.testing.assert_close(poptorch_inf(x), after)
    poptorch_inf.copyWeightsToDevice()
    torch.testing.assert_close(poptorch_inf(x), model.fc.bias.detach())


def test_is_running_on_ipu() -> None:
    class Network(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x * y if poptorch.isRunningOnIpu() else x + y

    model, t = Network(), torch.tensor([3.0])
    assert poptorch.inferenceModel(model)(t, t) == 9 and model(t, t) == 6


def test_errors_of_each_kind() -> None:
    def handled(problem: Callable[[], Any]) -> str:
        try:
            problem()
        except poptorch.RecoverableError as e:
            return e.recovery_action
        except poptorch.UnrecoverableError as e:
            return str(e)
        except poptorch.Error as e:
            return f"{e.message} {e.type} {e.location}"
        return ""

    assert "poptorch_py_error" in handled(lambda: poptorch.inferenceModel(lambda: None)())


class Blocks(torch.nn.Module):
    """Four layers, which blocks hold in one of two ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer1, self.layer2 = torch.nn.Linear(5, 10), torch.nn.Linear(10, 5)
        self.layer3, self.layer4 = torch.nn.Linear(5, 5), torch.nn.Linear(5, 5)
        self.act, self.softmax = torch.nn.ReLU(), torch.nn.Softmax(dim=1)
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.with_blocks(x) if self.way == "blocks" else self.with_functions(x)

    def with_blocks(self, x: torch.Tensor) -> torch.Tensor:
        poptorch.Block.useAutoId()
        with poptorch.Block(ipu_id=0):
            x = self.act(self.layer1(x))
        with poptorch.Block(ipu_id=1):
            x = self.act(self.layer2(x))
        with poptorch.Block(ipu_id=2):
            x = self.act(self.layer3(x))
            x = self.act(self.layer4(x))
        with poptorch.Block(ipu_id=3):
            x = self.softmax(x)
        return x

    def with_functions(self, x: torch.Tensor) -> torch.Tensor:
        poptorch.Block.useAutoId()
        return self.last(self.second(self.first(x)))

    @poptorch.BlockFunction(ipu_id=0)
    def first(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.layer2(self.act(self.layer1(x))))

    @poptorch.BlockFunction(ipu_id=1)
    def second(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.layer4(self.act(self.layer3(x))))

    @poptorch.BlockFunction(ipu_id=1)
    def last(self, x: torch.Tensor) -> torch.Tensor:
        return self.softmax(x)


@pytest.mark.parametrize("way", ["blocks", "functions"])
def test_blocks(way: str) -> None:
    model = Blocks(way)
    x = torch.rand((4, 5))
    expected = model(x)
    opts = poptorch.Options().deviceIterations(4)
    torch.testing.assert_close(poptorch.inferenceModel(model, options=opts)(x), expected)


@pytest.mark.parametrize(
    "stages",
    [
        [poptorch.Phase(poptorch.Stage("A").ipu(0)), poptorch.Phase(poptorch.Stage("B", "C").ipu(0))],
        [poptorch.Phase(poptorch.Stage("A"), poptorch.Stage("B")), poptorch.Phase(poptorch.Stage("C"))],
    ],
)
def test_serial_phases(stages: list[poptorch.Phase]) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            with poptorch.Block("A"):
                c = x + x
            with poptorch.Block("B"):
                d = y + y
            with poptorch.Block("C"):
                e = x * 3
            return c, d, e

    opts = poptorch.Options().setExecutionStrategy(poptorch.SerialPhasedExecution(*stages))
    x = torch.tensor([1.0, 2.0])
    c, d, e = poptorch.inferenceModel(Model(), opts)(x, x)
    torch.testing.assert_close((c, d, e), (2 * x, 2 * x, 3 * x))


N, SIZE = 3, 10


class Phased(torch.nn.Module):
    """Products on alternating units, in blocks whose names are made up on the way."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.rand(SIZE, SIZE) / SIZE) for _ in range(N * 6))

    def forward(self, in0: torch.Tensor, target: torch.Tensor | None = None) -> Any:
        phase, weight = 0, iter(self.weights)
        with poptorch.Block("phase0_ipu0"):
            ins = torch.split(in0, SIZE)
        for n in range(N * 3):
            out = []
            for ipu in range(2):
                with poptorch.Block(f"phase{phase}_ipu{ipu}"):
                    out.append(torch.nn.functional.relu(torch.matmul(next(weight), ins[ipu])))
            ins = out[1], out[0]
            if n % 3 != 1:  # two products in some phases
                phase += 1
        with poptorch.Block(f"phase{N * 2 - 1}_ipu1"):
            res = ins[0] + ins[1]
            if target is None:
                return res
            return res, torch.nn.L1Loss(reduction="mean")(res, target)


def test_parallel_phases() -> None:
    phases = []
    for n in range(N):
        phases.append([poptorch.Stage(f"phase{2 * n}_ipu{i}").ipu(2 * i) for i in range(2)])
        phases.append([poptorch.Stage(f"phase{2 * n + 1}_ipu{i}").ipu(2 * i + 1) for i in range(2)])
    opts = poptorch.Options().setExecutionStrategy(poptorch.ParallelPhasedExecution(*phases))
    model, input, target = Phased(), torch.rand(SIZE * 2, 1), torch.rand(SIZE, 1)
    expected, expected_loss = model(input, target)
    poptorch_model = poptorch.trainingModel(model, opts)
    poptorch_model.compile(input, target)
    out, loss = poptorch_model(input, target)
    torch.testing.assert_close((out, loss), (expected.detach(), expected_loss.detach()))


def test_grouped_weights() -> None:
    """A weight in four pieces, inputs in two, on eight replicas: the numbers of the problem in one piece."""

    class ModelWithLoss(torch.nn.Module):
        def __init__(self, w: torch.Tensor) -> None:
            super().__init__()
            self.W = torch.nn.Parameter(w)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            z = x @ self.W
            return z, poptorch.identity_loss(z**2, reduction="mean")

    tensor_shards, data_shards, steps = 4, 2, 4
    random = np.random.RandomState(seed=100)
    x = random.normal(size=(24, 40)).astype(np.float32)
    w = random.normal(size=(40, 56)).astype(np.float32) * (5 * 8) ** -0.5

    whole = torch.nn.Parameter(torch.tensor(w))
    optimizer, losses = torch.optim.SGD([whole], lr=0.01), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (torch.tensor(x) @ whole).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    pieces = torch.tensor(w.reshape(40, tensor_shards, 14).transpose(1, 0, 2)).contiguous()
    model = ModelWithLoss(pieces)
    opts = poptorch.Options()
    opts.replicationFactor(data_shards * tensor_shards)
    opts.inputReplicaGrouping(tensor_shards, poptorch.enums.CommGroupType.Consecutive)
    opts.outputMode(poptorch.OutputMode.All)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    grouped = poptorch.trainingModel(model, optimizer=sgd, options=opts)
    grouped.W.replicaGrouping(
        poptorch.enums.CommGroupType.Orthogonal, data_shards, poptorch.enums.VariableRetrievalMode.OnePerGroup
    )
    fed = torch.tensor(x).reshape(data_shards, 24 // data_shards, 40)
    ours = [grouped(fed)[1].sum().item() / (data_shards * tensor_shards) for _ in range(steps)]
    np.testing.assert_allclose(ours, losses, rtol=1e-5)
    final = model.W.detach().numpy().transpose(1, 0, 2).reshape(w.shape)
    np.testing.assert_allclose(final, whole.detach().numpy(), atol=1e-6)


def test_new_values_in_an_optimiser() -> None:
    model = ExampleModelWithLoss()
    opt = poptorch.optim.SGD(model.parameters(), lr=0.01, loss_scaling=2.0, use_combined_accum=False)
    poptorch_model = poptorch.trainingModel(model, poptorch.Options(), opt)
    input, target = torch.randn(10), torch.randn(10)
    _, first = poptorch_model(input, target)
    opt.loss_scaling = 1.0
    opt.param_groups[0]["loss_scaling"] = 1.0
    poptorch_model.setOptimizer(opt)
    _, second = poptorch_model(input, target)
    assert second < first
    opt.param_groups[0]["lr"] = 0.0
    poptorch_model.setOptimizer(opt)
    _, third = poptorch_model(input, target)
    _, fourth = poptorch_model(input, target)
    assert fourth == third < second


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda p: poptorch.optim.SGD(p, lr=0.01, momentum=0.0, use_combined_accum=False), {"lr", "momentum"}),
        (lambda p: poptorch.optim.SGD(p, lr=0.01, use_combined_accum=False), {"lr"}),
        (lambda p: poptorch.optim.SGD(p, lr=0.01, loss_scaling=2.0, use_combined_accum=False), {"lr", "loss_scaling"}),
    ],
)
def test_which_values_are_variable(make: Callable[[Any], Any], expected: set[str]) -> None:
    variable = make(ExampleModelWithLoss().parameters()).variable_attrs
    assert {name for name in ("lr", "momentum", "loss_scaling") if variable.isConstant(name) is False} == expected


def test_state_of_an_optimiser(tmp_path: Path) -> None:
    model, input, target = ExampleModelWithLoss(), torch.randn(10), torch.randn(10)
    optimizer = poptorch.optim.Adam(model.parameters())
    poptorch_model = poptorch.trainingModel(model, optimizer=optimizer)
    for _ in range(3):
        poptorch_model(input, target)
    torch.save({"optimizer_state_dict": optimizer.state_dict()}, tmp_path / "state")
    weights = {name: t.clone() for name, t in model.state_dict().items()}
    _, expected = [poptorch_model(input, target) for _ in range(2)][-1]
    poptorch_model.destroy()

    model.load_state_dict(weights)
    new_optimizer = poptorch.optim.Adam(model.parameters())
    new_optimizer.load_state_dict(torch.load(tmp_path / "state")["optimizer_state_dict"])
    new_poptorch_model = poptorch.trainingModel(model, optimizer=new_optimizer)
    _, again = [new_poptorch_model(input, target) for _ in range(2)][-1]
    torch.testing.assert_close(again, expected)


def test_printed_tensor(capfd: pytest.CaptureFixture[str]) -> None:
    class ExampleModel(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = torch.nn.Parameter(torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = poptorch.ipu_print_tensor(x + 1)
            return x + self.bias

    assert poptorch.inferenceModel(ExampleModel())(torch.tensor([41.0])) == 42
    assert "42" in capfd.readouterr().err


def test_loss_of_ones_own() -> None:
    def custom_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = output - target
        return poptorch.identity_loss(loss * loss * 5, reduction="mean")

    class ExampleModelWithCustomLoss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.nn.Linear(3, 3)

        def forward(self, input: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            out = self.model(input)
            return out, custom_loss(out, target)

    model, x = ExampleModelWithCustomLoss(), torch.randn(2, 3)
    _, expected = model(x, x)
    expected.backward()
    stepped = model.model.weight.detach() - 0.01 * model.model.weight.grad
    _, loss = poptorch.trainingModel(model)(x, x)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(model.model.weight.detach(), stepped)


class Counter(torch.nn.Module):
    """Counts how often it has run, if its count is a buffer."""

    def __init__(self, registered: bool) -> None:
        super().__init__()
        start = torch.tensor([0.0])
        if registered:
            self.register_buffer("i", start)
        else:
            self.i = start

    def forward(self) -> torch.Tensor:
        self.i += 1
        return self.i


@pytest.mark.parametrize(("registered", "expected"), [(False, [1, 1]), (True, [1, 2])])
def test_buffers(registered: bool, expected: list[int]) -> None:
    model = Counter(registered)
    poptorch_model = poptorch.inferenceModel(model)
    assert [poptorch_model().item() for _ in range(2)] == expected
    if registered:
        poptorch_model.copyWeightsToHost()
        assert model.i == 2


def test_custom_op_with_attributes() -> None:
    seen: dict[str, Any] = {}

    def many_attributes(x: Any, **attributes: Any) -> Any:
        seen.update(attributes)
        return x * attributes["float_minus_two"]

    attributes = {
        "float_minus_two": -2.0,
        "int_minus_five": -5,
        "floats": [1.0, 2.0, 3.0],
        "ints": [-1, -2, -3],
        "a_string": "string with quotes and slash \" ' \\ end",
        "strs": ["abc", "def"],
    }

    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return poptorch.custom_op(
                [x], "ManyAttributes", "test.seeds", 1, example_outputs=[x], attributes=attributes
            )[0]

    def op(x: Any, *, float_minus_two: float, int_minus_five: int, floats: Any, ints: Any, a_string: str, strs: Any):  # noqa: ANN202
        return many_attributes(
            x, float_minus_two=float_minus_two, int_minus_five=int_minus_five, floats=floats, ints=ints,
            a_string=a_string, strs=strs,
        )  # fmt: skip

    poptorch.registerCustomOp("ManyAttributes", "test.seeds", op)
    assert poptorch.inferenceModel(Model())(torch.tensor([3.0])) == -6
    assert {name: list(v) if isinstance(v, tuple) else v for name, v in seen.items()} == attributes


def test_precompiled(tmp_path: Path) -> None:
    opts = poptorch.Options().useOfflineIpuTarget()
    input, target, file = torch.randn(10), torch.randn(10), str(tmp_path / "model.poptorch")
    poptorch.trainingModel(ExampleModelWithLoss(), opts).compileAndExport(file, input, target)
    asked = []
    loaded = poptorch.load(file, edit_opts_fn=lambda opts: asked.append(opts))
    _, first = loaded(input, target)
    _, second = loaded(input, target)
    assert second < first and len(asked) == 1


def test_executable_alone(tmp_path: Path) -> None:
    input, target, file = torch.randn(10), torch.randn(10), str(tmp_path / "model.poptorch")
    poptorch.trainingModel(ExampleModelWithLoss()).compileAndExport(file, input, target, export_model=False)
    model = ExampleModelWithLoss()
    poptorch_model = poptorch.trainingModel(model)
    poptorch_model.loadExecutable(file)
    expected = model(input, target)[1].detach()
    torch.testing.assert_close(poptorch_model(input, target)[1], expected)


def test_precompiled_training_and_validation(tmp_path: Path) -> None:
    """What is loaded has no link to others, unless one is made of the other."""
    training, validation = str(tmp_path / "training.poptorch"), str(tmp_path / "validation.poptorch")
    model, input, target = ExampleModelWithLoss(), torch.randn(10), torch.randn(10)
    poptorch.trainingModel(model).compileAndExport(training, input, target)
    model.eval()
    poptorch.inferenceModel(model).compileAndExport(validation, input)

    training_model = poptorch.load(training)
    validation_model = poptorch.inferenceModel(training_model)
    validation_model.loadExecutable(validation)
    first = validation_model(input)
    for _ in range(3):
        out, _ = training_model(input, target)
    assert not torch.equal(validation_model(input), first)
    assert (out - target).norm() < (first - target).norm()


def test_profiling_channel() -> None:
    channel = poptorch.profiling.Channel("MyApp")
    model = poptorch.inferenceModel(ExampleModelWithLoss().eval())
    channel.instrument(model, "copyWeightsToDevice")
    with channel.tracepoint("inference"):
        assert model(torch.ones(10)).shape == (10,)
    model.copyWeightsToDevice()


def test_log_level(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("poptorch::python")
    monkeypatch.setattr(logger, "level", logger.level)
    poptorch.setLogLevel("DEBUG")
    assert logger.isEnabledFor(logging.DEBUG)
    poptorch.setLogLevel("WARN")
    assert not logger.isEnabledFor(logging.INFO)
