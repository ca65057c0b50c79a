"""Weights on the host and on devices: what each event transfers, and what it does not."""

from __future__ import annotations

import copy
import gc
import io
from collections import Counter
from collections.abc import Iterator

import pytest

torch = pytest.importorskip("torch")

# ruff: noqa: E402 - poptorch needs torch
import poptorch
from poptorch.run.compiled import Compiled
from poptorch.run.executor import PoplarExecutor


class Model(torch.nn.Module):
    """One weight, a buffer that counts, and one that is only read."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor(1.0))
        self.register_buffer("count", torch.tensor(0.0))
        self.register_buffer("scale", torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        y = self.w * x * self.scale
        return poptorch.identity_loss(y.sum(), "sum") if self.training else y


class Transfers:
    """Counts transfers of weights of each compiled model since it was last asked."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[int, str]] = Counter()

    def of(self, model: PoplarExecutor) -> tuple[int, int]:
        """How often weights came to the host, and how often they went to the device."""
        key = id(model._compiled)
        return self.counts.pop((key, "weights"), 0), self.counts.pop((key, "write_weights"), 0)


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Transfers]:
    found = Transfers()
    for name in ("weights", "write_weights"):
        original = getattr(Compiled, name)

        def counted(self, *args, original=original, name=name):
            found.counts[id(self), name] += 1
            return original(self, *args)

        monkeypatch.setattr(Compiled, name, counted)
    return found


X = torch.ones(2)


def trained(module: Model) -> PoplarExecutor:
    """A training model that has been compiled, and whose rate is 0.5: the gradient is 2, so each run subtracts 1."""
    model = poptorch.trainingModel(module, None, torch.optim.SGD(module.parameters(), lr=0.5))
    model.compile(X)
    return model


def test_compiling_brings_weights_to_the_device(transfers: Transfers) -> None:
    assert transfers.of(trained(Model())) == (0, 1)


def test_many_runs_and_one_read(transfers: Transfers) -> None:
    module = Model()
    model = trained(module)
    transfers.of(model)
    for _ in range(5):
        model(X)
    assert transfers.of(model) == (0, 0)
    assert module.w.item() == -4
    assert module.count.item() == 5
    assert transfers.of(model) == (1, 0)


@pytest.mark.parametrize(
    "read",
    [
        lambda m: m.state_dict(),
        lambda m: list(m.parameters()),
        lambda m: dict(m.named_buffers()),
        lambda m: m.w,
        lambda m: torch.equal(torch.tensor(1.0), m.w),
        lambda m: m(X),
        lambda m: copy.deepcopy(m),
        lambda m: torch.save(m, io.BytesIO()),
        lambda m: repr(m.w),
    ],
)
def test_every_way_of_reading_transfers_once(read, transfers: Transfers) -> None:
    module = Model()
    model = trained(module)
    model(X)
    transfers.of(model)
    read(module)
    assert transfers.of(model) == (1, 0)
    read(module)
    assert transfers.of(model) == (0, 0)


def test_copies_that_are_asked_for(transfers: Transfers) -> None:
    module = Model()
    model = trained(module)
    transfers.of(model)
    assert not model.copyWeightsToHostIfNeeded()
    assert transfers.of(model) == (0, 0)
    model.copyWeightsToHost()
    assert transfers.of(model) == (1, 0)
    model(X)
    assert model.copyWeightsToHostIfNeeded()
    assert transfers.of(model) == (1, 0)
    assert module.w.item() == 0


def test_copying_to_the_device_loses_what_was_not_read(transfers: Transfers) -> None:
    module = Model()
    model = trained(module)
    model(X)
    transfers.of(model)
    model.copyWeightsToDevice()
    assert transfers.of(model) == (0, 1)
    assert module.w.item() == 1
    assert transfers.of(model) == (0, 0)
    assert model(X).item() == 2


def test_inference_follows_training(transfers: Transfers) -> None:
    module = Model()
    training = trained(module)
    inference = poptorch.inferenceModel(module.eval())
    inference.compile(X)
    transfers.of(training), transfers.of(inference)
    training(X)
    assert inference(X).tolist() == [0, 0]
    assert transfers.of(training) == (1, 0)
    assert transfers.of(inference) == (0, 1)
    inference(X)
    assert transfers.of(training) == transfers.of(inference) == (0, 0)
    training(X)
    assert transfers.of(inference) == (1, 0)  # what it has counted
    training.copyWeightsToHost()
    assert inference(X).tolist() == [-1, -1]
    assert transfers.of(inference) == (0, 1)
    assert module.count.item() == 5


def test_inference_does_not_see_what_users_write(transfers: Transfers) -> None:
    module = Model().eval()
    inference = poptorch.inferenceModel(module)
    inference(X)
    with torch.no_grad():
        module.w.fill_(5)
    transfers.of(inference)
    assert inference(X).tolist() == [1, 1]
    assert transfers.of(inference) == (0, 0)
    inference.copyWeightsToDevice()
    assert inference(X).tolist() == [5, 5]


@pytest.mark.parametrize("wrap", [trained, lambda module: poptorch.inferenceModel(module.eval())])
def test_what_users_write_is_told_once(wrap, caplog: pytest.LogCaptureFixture) -> None:
    module = Model()
    model = wrap(module)
    model(X)
    assert module.w.item() < 2  # what comes home is no write
    model(X)
    module.load_state_dict(Model().state_dict())
    assert not caplog.text
    model(X), model(X)
    (record,) = caplog.records
    assert "w and 2 other tensors have been changed on the host" in record.message
    assert "`copyWeightsToDevice()`" in record.message


def test_what_users_write_and_send_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    module = Model()
    model = trained(module)
    model(X)
    module.load_state_dict(Model().state_dict())
    model.copyWeightsToDevice()
    model.load_state_dict(Model().state_dict())
    assert model(X).item() == 2
    assert not caplog.text


@pytest.mark.parametrize(
    ("wrap", "mode", "told"),
    [
        (poptorch.inferenceModel, True, "`module.eval()` before `poptorch.inferenceModel(module)`"),
        (poptorch.trainingModel, False, "`module.train()` before `poptorch.trainingModel(module)`"),
    ],
)
def test_a_mode_that_comes_after_the_wrapper_is_told_once(wrap, mode, told, caplog: pytest.LogCaptureFixture) -> None:
    class Mode(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, bool]:
            return poptorch.identity_loss(super().forward(x).sum(), "sum"), self.training

    module = Mode(2, 1).train(mode)
    model = wrap(module)
    assert model(X)[1] is mode and not caplog.text  # a module that nobody has asked to change does as in PyTorch
    module.train(not mode)
    assert [model(X)[1] for _ in range(2)] == [mode, mode]
    (record,) = caplog.records
    assert told in record.message


def test_a_number_that_changes_after_the_wrapper_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = torch.nn.Dropout(0.0)
            self.temperature, self.calls = 2.0, 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return self.dropout(x) * self.temperature

    module = Scaled()
    model = poptorch.inferenceModel(module)
    for _ in range(2):
        assert model(X).tolist() == [2, 2]
    assert not caplog.records  # what `forward` itself sets is not the user's
    module.temperature = 0.5
    for _ in range(2):
        assert model(X).tolist() == [2, 2]
    (record,) = caplog.records
    assert "`temperature` is 0.5, and was 2.0" in record.message
    module.temperature, module.dropout.p = 2.0, 0.9
    again = poptorch.inferenceModel(module)
    module.dropout.p = 0.8
    again(X)
    assert "`dropout.p` is 0.8, and was 0.9" in caplog.text


def test_trainings_follow_each_other() -> None:
    """Two tasks with a part in common, in turns, as those of a GAN: each finds what the other has trained."""

    class Task(torch.nn.Module):
        def __init__(self, common: torch.nn.Module, own: torch.nn.Module) -> None:
            super().__init__()
            self.common, self.own = common, own

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return poptorch.identity_loss(self.own(torch.tanh(self.common(x))).square().mean(), "none")

    def losses(wrap) -> tuple[list[float], list[torch.Tensor]]:
        torch.manual_seed(0)
        common = torch.nn.Linear(3, 4)
        tasks = [Task(common, torch.nn.Linear(4, n)) for n in (2, 5)]
        only_own = [common.parameters(), tasks[1].own.parameters()]  # the second reads the common part, as a GAN does
        steps = [
            wrap(task, torch.optim.SGD(parameters, lr=0.5)) for task, parameters in zip(tasks, only_own, strict=True)
        ]
        x = torch.randn(6, 3)
        found = [steps[i](x).item() for i in (0, 1, 0, 0, 1, 1, 0)]
        return found, [p.detach().clone() for task in tasks for p in task.parameters()]

    def in_pytorch(module: torch.nn.Module, optimizer: torch.optim.Optimizer):
        def step(x: torch.Tensor) -> torch.Tensor:
            module.zero_grad()
            loss = module(x)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    torch.testing.assert_close(
        losses(lambda module, optimizer: poptorch.trainingModel(module, None, optimizer)), losses(in_pytorch)
    )


@pytest.mark.usefixtures("only_new_objects")
@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("ends", ["destroyed", "forgotten"])
def test_inference_follows_a_training_that_has_ended(ends: str, is_read: bool, transfers: Transfers) -> None:
    module = Model()
    model = trained(module)
    readers = [poptorch.inferenceModel(module.eval()) for _ in range(2)]
    assert [reader(X).tolist() for reader in readers] == [[1, 1], [1, 1]]
    model(X)
    if is_read:
        assert module.w.item() == 0
    if ends == "destroyed":
        model.destroy()
    del model
    gc.collect()
    for reader in readers:
        transfers.of(reader)
        for _ in range(2):
            assert reader(X).tolist() == [0, 0]
        assert transfers.of(reader) == (0, 1)


@pytest.mark.parametrize("loads", [False, True])
def test_inference_follows_what_a_training_is_given(
    loads: bool, transfers: Transfers, caplog: pytest.LogCaptureFixture
) -> None:
    module = Model()
    model = trained(module)
    reader = poptorch.inferenceModel(module.eval())
    model(X)
    assert reader(X).tolist() == [0, 0]
    if loads:
        model.load_state_dict({"w": torch.tensor(5.0), "count": torch.tensor(0.0), "scale": torch.tensor(1.0)})
    else:
        module.w.detach().fill_(5)
        model.copyWeightsToDevice()
    transfers.of(reader)
    for _ in range(2):
        assert reader(X).tolist() == [5, 5]
    assert transfers.of(reader) == (0, 1)
    model(X)
    assert reader(X).tolist() == [4, 4]
    assert not caplog.text


@pytest.mark.parametrize("is_compiled", [False, True])
def test_inference_follows_what_a_training_without_a_device_is_given(
    is_compiled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    module = Model()
    model = trained(module)
    reader = poptorch.inferenceModel(module.eval())
    if is_compiled:
        model(X)
        model.detachFromDevice()
    assert reader(X).tolist() == [1 - is_compiled] * 2
    model.load_state_dict({"w": torch.tensor(5.0), "count": torch.tensor(0.0), "scale": torch.tensor(1.0)})
    assert reader(X).tolist() == [5, 5]
    model(X)
    assert reader(X).tolist() == [4, 4]
    assert not caplog.text


def test_a_training_follows_one_that_has_ended() -> None:
    class Both(torch.nn.Module):
        def __init__(self, part: torch.nn.Module) -> None:
            super().__init__()
            self.part, self.v = part, torch.nn.Parameter(torch.tensor(2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return poptorch.identity_loss((self.part.w + self.v) * x, "sum")

    part = Model()
    both = Both(part)
    first = trained(part)
    second = poptorch.trainingModel(both, None, torch.optim.SGD(both.parameters(), lr=0.25))
    assert second(X).item() == 6  # (1 + 2) twice; then each is 0.5 less
    first(X)  # and this one is 1 less
    first.destroy()
    assert second(X).item() == 2
    assert (part.w.item(), both.v.item()) == (-1, 1)


# Tensors and modules that are replaced --------------------------------------------------------------------------------


class Scores(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return poptorch.identity_loss(self.head(torch.tanh(self.body(x))).square().sum(), "none")


def step_in_pytorch(module: torch.nn.Module, x: torch.Tensor) -> None:
    module(x).backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    module.zero_grad()


def test_what_replaces_a_tensor_or_a_module_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    module, x = Scores(), torch.randn(5, 3)
    model = poptorch.trainingModel(module, None, torch.optim.SGD(module.parameters(), lr=0.1))
    model(x)
    module.body.bias = torch.nn.Parameter(torch.ones(4))
    module.head = torch.nn.Linear(4, 2)
    expected = copy.deepcopy(module)
    for _ in range(2):
        model(x)
    (record,) = caplog.records
    assert "another head and another body.bias than when the device took its numbers" in record.message
    assert torch.equal(module.head.weight, expected.head.weight)  # what is trained is not that one
    module.body.load_state_dict(expected.body.state_dict())
    model.copyWeightsToDevice()
    model(x)
    step_in_pytorch(expected, x)
    torch.testing.assert_close(dict(module.named_parameters()), dict(expected.named_parameters()))
    caplog.clear()
    model(x)
    assert not caplog.text


def test_a_head_of_another_shape_comes_after_a_training() -> None:
    module, x = Scores(), torch.randn(5, 3)
    expected = copy.deepcopy(module)
    optimizer, reference = (torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (module, expected))

    def step_both() -> None:
        reference.zero_grad()
        expected(x).backward()
        reference.step()
        model(x)

    model = poptorch.trainingModel(module, None, optimizer)
    step_both()
    before = module.__dict__["_modules"]["head"]
    module.head = torch.nn.Linear(4, 7)
    torch.testing.assert_close(before.state_dict(), expected.head.state_dict())
    expected.head = copy.deepcopy(module.head)
    model.copyWeightsToDevice()
    step_both()
    for each, stepper in ((module, optimizer), (expected, reference)):
        stepper.add_param_group({"params": each.head.parameters()})
    step_both(), step_both()
    torch.testing.assert_close(module.state_dict(), expected.state_dict())


def test_inference_of_a_wrapper_is_of_its_model() -> None:
    module = Model()
    training = trained(module)
    inference = poptorch.inferenceModel(training)
    assert inference.model is module
    training(X)
    assert module.w.item() == 0


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_buffers_of_bytes_come_home(dtype: torch.dtype, tmp_path) -> None:
    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.tensor(1.0))
            self.register_buffer("mask", torch.tensor([1, 0], dtype=dtype))
            self.register_buffer("count", torch.tensor([3, 4], dtype=dtype))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            return poptorch.identity_loss(self.w * x * self.mask, "sum")

    module = Counting()
    model = poptorch.trainingModel(module, None, torch.optim.SGD(module.parameters(), lr=0.5))
    model(X)
    assert (module.w.item(), module.count.tolist(), module.mask.dtype) == (0.5, [4, 5], dtype)
    module.mask.fill_(1)
    model.copyWeightsToDevice()
    model(X)
    assert (module.w.item(), module.count.tolist()) == (-0.5, [5, 6])
    model.detachFromDevice()
    model(X)
    model.save(tmp_path / "model")
    assert module.count.tolist() == [6, 7]
    again = poptorch.load(tmp_path / "model")
    again(X)
    assert again.count.tolist() == [7, 8]
    reader = poptorch.inferenceModel(Counting())
    reader(X)
    reader.copyWeightsToHost()
    assert reader.model.count.tolist() == [4, 5]


def test_load_state_dict_uploads(transfers: Transfers) -> None:
    module = Model()
    model = trained(module)
    model(X)
    transfers.of(model)
    result = model.load_state_dict({"w": torch.tensor(3.0), "other": torch.tensor(1.0)}, strict=False)
    assert result.missing_keys == ["count", "scale"]
    assert result.unexpected_keys == ["other"]
    assert transfers.of(model)[1] == 1
    assert model(X).item() == 6
    before = poptorch.inferenceModel(Model())
    before.load_state_dict({"w": torch.tensor(3.0), "count": torch.tensor(0.0), "scale": torch.tensor(2.0)})
    assert not before.isCompiled()


def test_setting_the_optimizer_transfers_nothing(transfers: Transfers) -> None:
    module = Model()
    model = trained(module)
    model(X)
    transfers.of(model)
    model.setOptimizer(torch.optim.SGD(module.parameters(), lr=0.25))
    transfers_of_reading = transfers.of(model)
    model(X)
    assert transfers.of(model) == (0, 0)
    assert transfers_of_reading[1] == 0
    assert module.w.item() == -0.5


def test_destroying_brings_weights_home(transfers: Transfers) -> None:
    module = Model()
    model = trained(module)
    model(X)
    key = model._compiled
    model.destroy()
    assert transfers.counts[id(key), "weights"] == 1
    assert type(module) is Model
    assert type(module.w) is torch.nn.Parameter
    assert module.w.item() == 0
    assert not model.isCompiled()
    assert not model.isAttachedToDevice()
    model.destroy()
    other = poptorch.trainingModel(module)
    assert other(torch.ones(3)).item() == 0


def test_destroyed_models_compile_again() -> None:
    module = Model()
    model = trained(module)
    model(X)
    model.destroy()
    assert model(torch.ones(3)).item() == 0  # a new shape
    assert module.w.item() == -1.5
    assert module.count.item() == 2


def test_a_model_is_trained_by_one_wrapper_at_a_time() -> None:
    module = Model()
    model = poptorch.trainingModel(module)
    with pytest.raises(RuntimeError, match=r"Call `destroy\(\)`"):
        poptorch.trainingModel(module)
    model.destroy()
    poptorch.trainingModel(module)


def test_detaching_and_attaching(transfers: Transfers) -> None:
    module = Model()
    model = trained(module)
    model(X)
    transfers.of(model)
    model.detachFromDevice()
    assert transfers.of(model) == (1, 0)
    assert not model.isAttachedToDevice()
    assert model.isCompiled()
    with pytest.raises(poptorch.Error, match="Device is not attached"):
        model.detachFromDevice()
    assert module.w.item() == 0
    model.attachToDevice()
    assert transfers.of(model) == (0, 1)
    with pytest.raises(poptorch.Error, match="already attached"):
        model.attachToDevice()
    assert model(X).item() == 0
    model.detachFromDevice()
    with torch.no_grad():
        module.w.fill_(4)
    assert model(X).item() == 8  # attaches by itself
    assert module.w.item() == 3


def test_a_wrapper_that_is_forgotten_leaves_a_trained_module() -> None:
    module = Model()
    model = trained(module)
    model(X)
    del model
    assert module.w.item() == 0
    poptorch.trainingModel(module)


@pytest.mark.usefixtures("only_new_objects")
def test_a_wrapper_in_a_cycle_is_forgotten_too() -> None:
    module = Model()
    model = trained(module)
    model(X)
    model.__dict__["itself"] = model
    del model
    gc.collect()
    assert module.w.item() == 0
    poptorch.trainingModel(module)


@pytest.mark.parametrize(
    "read",
    [
        lambda m: m.state_dict(),
        lambda m: m.count.item(),
        lambda m: dict(m.named_buffers()),
        lambda m: copy.deepcopy(m),
        lambda m: torch.save(m, io.BytesIO()),
    ],
)
def test_buffers_that_inference_overwrites_come_home_when_read(read, transfers: Transfers) -> None:
    module = Model().eval()
    model = poptorch.inferenceModel(module)
    for _ in range(3):
        model(X)
    assert transfers.of(model) == (0, 1)
    read(module)
    assert transfers.of(model) == (1, 0)
    read(module)
    assert module.count.item() == 3 and transfers.of(model) == (0, 0)
    with torch.no_grad():
        module.w.fill_(9)  # what the program does not overwrite is left as the host has it
    model(X)
    assert (module.count.item(), module.w.item()) == (4, 9)
    model.copyWeightsToHost()
    assert (module.count.item(), module.w.item()) == (4, 1)


@pytest.mark.parametrize("leave", [PoplarExecutor.destroy, PoplarExecutor.detachFromDevice, lambda model: None])
def test_buffers_of_a_reader_that_leaves(leave) -> None:
    module = Model().eval()
    models = [poptorch.inferenceModel(module)]
    models[0](X)
    leave(models[0])
    models[0](X)
    models.clear()
    assert module.count.item() == 2
    assert type(module) is Model and type(module.count) is torch.Tensor


class Normed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4)
        self.register_buffer("seen", torch.zeros(5, 3))

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None):
        self.seen[: len(x)] = x
        out = self.norm(self.layer(x))
        return out if y is None else (out, torch.nn.functional.mse_loss(out, y))


def test_all_wrappers_of_a_module_write_the_same_buffers() -> None:
    """Two readers and a training in turn, all in `train()` mode, with the numbers of PyTorch."""
    torch.manual_seed(0)
    module = Normed()
    reference = copy.deepcopy(module)
    rows, target = torch.randn(7, 5, 3), torch.randn(5, 4)
    step = torch.optim.SGD(reference.parameters(), lr=0.1)
    training = poptorch.trainingModel(module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))
    readers = [poptorch.inferenceModel(module) for _ in range(2)]
    for x, which in zip(rows, (0, 1, 2, 2, 0, 2, 1), strict=True):
        if which:
            found, expected = readers[which - 1](x), reference(x)
        else:
            found, (expected, loss) = training(x, target)[0], reference(x, target)
            step.zero_grad()
            loss.backward()
            step.step()
        torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-5)
    training.copyWeightsToHost()  # nothing of what others have changed is lost
    torch.testing.assert_close(module.state_dict(), reference.state_dict(), rtol=1e-5, atol=1e-5)


def test_statistics_of_averaged_weights() -> None:
    """As `update_bn` collects them: reset, and averaged over all that is seen. It asks the wrapper for its modules."""
    torch.manual_seed(0)
    module, rows = torch.optim.swa_utils.AveragedModel(Normed()), torch.randn(3, 5, 3)
    reference = copy.deepcopy(module)
    torch.optim.swa_utils.update_bn(rows, reference)
    torch.optim.swa_utils.update_bn(rows, poptorch.inferenceModel(module.eval()))
    torch.testing.assert_close(module.state_dict(), reference.state_dict())
    assert module.module.norm.momentum == 0.1


def test_named_buffers(caplog: pytest.LogCaptureFixture) -> None:
    module = Model().eval()
    model = poptorch.inferenceModel(module, poptorch.Options().updatableNamedBuffers(["scale"]))
    assert model(X).tolist() == [1, 1]
    module.scale.fill_(3)
    with torch.no_grad():
        module.w.fill_(7)
    model.copyNamedBuffersToDevice()
    assert model(X).tolist() == [3, 3]
    assert "w has been changed on the host" in caplog.text and "scale" not in caplog.text
    caplog.clear()
    module.scale = torch.full_like(module.scale, 4)
    model.copyNamedBuffersToDevice()
    assert model(X).tolist() == [4, 4] and not caplog.text
    with pytest.raises(poptorch.Error, match="no buffers are named"):
        poptorch.inferenceModel(module).copyNamedBuffersToDevice()
    with pytest.raises(poptorch.Error, match="the model has no buffers named other; it has count, scale"):
        poptorch.inferenceModel(module, poptorch.Options().updatableNamedBuffers(["other"])).compile(X)


def test_buffers_of_several_replicas() -> None:
    module = Model().eval()
    with pytest.raises(poptorch.Error, match="PopTorch does not support broadcasting buffers.*'count'"):
        poptorch.inferenceModel(module, poptorch.Options().replicationFactor(2))(torch.ones(2))
    model = poptorch.inferenceModel(module, poptorch.Options().replicationFactor(2).broadcastBuffers(False))
    model(torch.ones(2))
    model(torch.ones(2))
    assert module.count.item() == 2


def test_models_that_need_no_training() -> None:
    with pytest.raises(poptorch.Error, match="an inference model has no optimizer"):
        poptorch.inferenceModel(Model()).setOptimizer(torch.optim.SGD([torch.zeros(1)], lr=1.0))
    with pytest.raises(AssertionError, match="`optimizer` is for training"):
        PoplarExecutor(Model(), None, False, "", torch.optim.SGD([torch.zeros(1)], lr=1.0))
