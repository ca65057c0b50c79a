"""Wrapped models: compiling, calling, hooks, names and anchors, random numbers, devices, reports."""

from __future__ import annotations

import copy
import datetime
import gc
import os
import weakref
from pathlib import Path

import jax
import pytest

torch = pytest.importorskip("torch")

# ruff: noqa: E402 - poptorch needs torch
import poptorch
from poptorch import ConnectionType, OutputMode, optim
from poptorch.run.executor import PoplarExecutor


class Model(torch.nn.Module):
    """A layer with a loss in training, and a counter that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(2, 3)
        self.scale = torch.nn.Parameter(torch.tensor(2.0))
        self.captures = 0

    def forward(self, x: torch.Tensor, target: torch.Tensor | None = None):
        self.captures += 1
        y = self.fc(x) * self.scale
        return y if target is None else (y, torch.nn.functional.mse_loss(y, target))


X, T = torch.randn(4, 2), torch.randn(4, 3)


@pytest.fixture
def module() -> Model:
    torch.manual_seed(0)
    return Model()


# Wrapping and compiling -----------------------------------------------------------------------------------------------


def test_what_can_be_wrapped(module: Model) -> None:
    expected = module(X).detach()
    torch.testing.assert_close(poptorch.inferenceModel(module)(X), expected)
    torch.testing.assert_close(poptorch.inferenceModel(poptorch.inferenceModel(module))(X), expected)
    assert poptorch.inferenceModel(lambda x: x + 1)(torch.ones(2)).tolist() == [2, 2]
    assert poptorch.inferenceModel(torch.add)(torch.ones(2), torch.ones(2)).tolist() == [2, 2]
    with pytest.raises(poptorch.Error, match="`options` must be a poptorch.Options; got 3"):
        poptorch.inferenceModel(module, 3)
    for wrap in (poptorch.inferenceModel, poptorch.trainingModel):
        with pytest.raises(
            poptorch.Error, match="`model`, the first argument, is None .NoneType.; expected a torch.nn.M"
        ):
            wrap(None)
        with pytest.raises(poptorch.Error, match=r"is a class; expected a model: `Linear\(...\)`"):
            wrap(torch.nn.Linear)
    options = poptorch.Options()
    options.Training.gradientAccumulation(2)
    with pytest.raises(
        poptorch.Error, match=r"Training.gradientAccumulation to 1 .*Use poptorch.Options\(\).deviceIterations\(\)"
    ):
        poptorch.inferenceModel(module, options)


def test_optimizers_that_cannot_train(module: Model) -> None:
    with pytest.raises(AssertionError, match="Unsupported optimizer type Rprop"):
        poptorch.trainingModel(module, optimizer=torch.optim.Rprop(module.parameters()))
    model = poptorch.trainingModel(module)  # nothing has been done to it
    with pytest.raises(AssertionError, match="Unsupported optimizer type Rprop"):
        model.setOptimizer(torch.optim.Rprop(module.parameters()))
    model(X, T)


class Shared(torch.nn.Module):
    """One layer under two names, and twice in a sequence; its weight is tied to that of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(2, 2)
        self.norm = torch.nn.BatchNorm1d(2)
        self.same = self.first
        self.tied = torch.nn.Linear(2, 2)
        self.tied.weight = self.first.weight
        self.all = torch.nn.Sequential(self.first, self.norm, self.same, self.tied, self.norm)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.all(x)
        return y, poptorch.identity_loss(y.square().mean() + self.same(x).sum(), "none")


def test_layers_that_are_used_twice(tmp_path: Path) -> None:
    torch.manual_seed(0)
    ours = Shared()
    theirs = copy.deepcopy(ours)
    model = poptorch.trainingModel(ours, optimizer=torch.optim.SGD(ours.parameters(), lr=0.01))
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        _, loss = theirs(X)
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(model(X)[1], loss.detach())
    for name, expected in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], expected)
    model.save(tmp_path / "shared.poptorch")
    loaded = poptorch.load(tmp_path / "shared.poptorch")
    assert loaded.model.state_dict().keys() == theirs.state_dict().keys()
    torch.testing.assert_close(loaded(X), model(X))


def test_options_are_frozen_and_filled_in(module: Model) -> None:
    options = poptorch.Options()
    model = poptorch.inferenceModel(module, options)
    assert model.options is not options
    assert model.options.output_mode is OutputMode.All
    assert options.defaultOutputMode()
    for each in (options, model.options):
        with pytest.raises(AttributeError, match="Can't modify frozen Options"):
            each.deviceIterations(2)
    assert poptorch.trainingModel(module).options.output_mode is OutputMode.Final


def test_compiling(module: Model, caplog: pytest.LogCaptureFixture) -> None:
    model = poptorch.inferenceModel(module)
    assert not model.isCompiled()
    assert not model.isAttachedToDevice()
    with pytest.raises(poptorch.Error, match="Model has not been compiled or has been destroyed."):
        model.copyWeightsToDevice()
    model.compile(X)
    assert model.isCompiled()
    assert model.isAttachedToDevice()
    assert isinstance(model.compilationTime(), datetime.timedelta)
    model.compile(X)
    assert "compiled already" in caplog.text
    with pytest.raises(poptorch.Error, match="Shape mismatch for x"):
        model(X[:, :1])
    model.destroy()
    assert not model.isCompiled()
    for member in (model.compilationTime, model.copyWeightsToHost, model.detachFromDevice, model.attachToDevice):
        with pytest.raises(poptorch.Error, match="Model has not been compiled or has been destroyed."):
            member()
    assert model(X[:2]).shape == (2, 3)


def test_the_time_of_compilation_may_not_be_wanted(module: Model) -> None:
    model = poptorch.inferenceModel(module, poptorch.Options().showCompilationProgressBar(False))
    model.compile(X)
    with pytest.raises(poptorch.Error, match="time of compilation is not known"):
        model.compilationTime()


def test_the_module_is_as_it_was(module: Model) -> None:
    model = poptorch.inferenceModel(module)
    module.eval()
    module.captures = 7
    model(X)
    assert module.captures == 7
    assert not module.training


def test_after_an_error_a_model_compiles(module: Model) -> None:
    class Fails(torch.nn.Module):
        fails = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if Fails.fails:
                raise KeyError("mine")
            return x + 1

    model = poptorch.inferenceModel(Fails())
    with pytest.raises(KeyError, match="mine"):
        model(X)
    assert not poptorch.isRunningOnIpu()
    assert not model.isCompiled()
    Fails.fails = False
    torch.testing.assert_close(model(X), X + 1)


def test_hooks(module: Model) -> None:
    heard: list[str] = []
    handles = [
        poptorch.registerPreCompileHook(lambda: heard.append("before")),
        poptorch.registerPostCompileHook(lambda: heard.append("after")),
        poptorch.registerPreCompileHook(lambda: heard.append("before, too")),
    ]
    model = poptorch.inferenceModel(module)
    model(X)
    model(X)
    assert heard == ["before", "before, too", "after"]
    for handle in handles:
        handle.remove()
    model.destroy()
    model(X)
    assert len(heard) == 3
    with pytest.raises(RuntimeError, match="must be callable"):
        poptorch.registerPostCompileHook(3)
    with pytest.raises(RuntimeError, match="must be callable"):
        poptorch.registerPreCompileHook("hook")


class Replaced:
    """Has `torch.relu` double what is positive, while a model is captured."""

    heard: list[str] = []

    def __init__(self) -> None:
        self.before = torch.relu

    def replace(self) -> None:
        self.heard.append("replace")
        torch.relu = lambda x: self.before(x) * 2

    def restore(self) -> None:
        self.heard.append("restore")
        torch.relu = self.before


def test_packages_replace_functions_during_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poptorch.run.hooks._substitutions", [])
    before, register = torch.relu, poptorch._poplar_executor._OverwriteContextManager.registerSubsitutionManager
    register(Replaced)
    model = poptorch.inferenceModel(lambda x: torch.relu(x))
    for _ in range(2):
        torch.testing.assert_close(model(X), 2 * before(X))
    assert Replaced.heard == ["replace", "restore"]

    def fails(x: torch.Tensor) -> torch.Tensor:
        raise ValueError(torch.relu is before)

    with pytest.raises(ValueError, match="False"):
        poptorch.inferenceModel(fails)(X)
    assert torch.relu is before and Replaced.heard == ["replace", "restore"] * 2
    with pytest.raises(poptorch.Error, match="expected a class with the methods `replace` and `restore`"):
        register(Replaced())


class Settable(torch.nn.Module):
    """Its result says in which state it was captured."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.inner = 1.0, torch.nn.Identity()
        self.inner.added = 0.0

    def set(self, scale: float) -> None:
        self.scale, self.inner.added = scale, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.inner.added + (100 if self.training else 0) + (10 if self.inner.training else 0)


def test_what_is_set_through_a_wrapper_before_the_first_call_counts(caplog: pytest.LogCaptureFixture) -> None:
    """Whether the module is so already, or not; what is set on the module does not count."""
    module = Settable()
    model = poptorch.inferenceModel(module)
    module.eval()
    module.set(7.0)
    model.eval()
    torch.testing.assert_close(model(X), X)
    assert "`scale` is 7.0, and was 1.0" in caplog.text
    model = poptorch.inferenceModel(module.train())
    model.set(2.0)
    model.scale = 3.0
    assert module.scale == 3.0
    torch.testing.assert_close(model(X), X * 3 + 112)
    caplog.clear()
    model.eval()
    torch.testing.assert_close(model(X), X * 3 + 112)
    assert "runs it in `train()` mode, in which it was compiled" in caplog.text
    model.destroy()
    torch.testing.assert_close(model(X), X * 3 + 2)
    model.destroy()
    model.inner.train()
    model.inner.added = 5.0
    torch.testing.assert_close(model(X), X * 3 + 15)
    model.other = 4  # of which the module has none
    assert model.other == 4 and not hasattr(module, "other")


def test_looks(module: Model) -> None:
    block = torch.nn.Sequential(poptorch.BeginBlock(torch.nn.Linear(2, 2), "first", 0), torch.nn.ReLU())
    model = poptorch.inferenceModel(block)
    assert "BeginBlock(user_id=first, ipu_id=0)" in repr(model)
    assert repr(model) == poptorch.module_repr(block)
    wrapped = poptorch.inferenceModel(module)
    assert wrapped.fc is module.fc
    assert wrapped.model is module
    assert isinstance(wrapped.scale, torch.nn.Parameter)
    with pytest.raises(AttributeError, match="nothing"):
        wrapped.nothing  # noqa: B018


def test_executors_go_when_nobody_has_them(module: Model) -> None:
    optimizer = optim.SGD(module.parameters(), lr=0.1)
    model = poptorch.trainingModel(module, None, optimizer)
    model(X, T)
    ref = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert ref() is None
    finally:
        gc.enable()
    assert optimizer.state_dict()["param_groups"]


def test_destroying_gives_the_memory_of_the_device_free(module: Model) -> None:
    """At once, not when the garbage collector comes by."""
    model = poptorch.inferenceModel(module)
    gc.disable()
    try:
        before = len(jax.live_arrays())
        model(X)
        assert len(jax.live_arrays()) > before
        model.destroy()
        assert len(jax.live_arrays()) <= before
    finally:
        gc.enable()


def test_results(module: Model) -> None:
    constant = torch.tensor([1.0, 2.0])

    def forward(x: torch.Tensor):
        y = x * 2
        return {"y": y, "same": [y, None], "constant": constant, "number": 3, "x": x}

    result = poptorch.inferenceModel(forward)(X)
    torch.testing.assert_close(result["y"], X * 2)
    torch.testing.assert_close(result["same"][0], X * 2)
    assert result["same"][1] is None
    assert result["number"] == 3
    assert result["constant"].tolist() == [1, 2]
    torch.testing.assert_close(result["x"], X)
    with pytest.raises(poptorch.Error, match=r"backward\(\) cannot be called explicitly"):
        result["y"].backward()


def test_results_are_saved_as_plain_tensors(module: Model, tmp_path: Path) -> None:
    """A checkpoint with a loss in it is one that `torch.load` takes, as it is called by default."""
    output, loss = poptorch.trainingModel(module)(X, T)
    torch.save({"loss": loss, "output": output}, tmp_path / "checkpoint.pt")
    loaded = torch.load(tmp_path / "checkpoint.pt")
    torch.testing.assert_close(loaded, {"loss": loss.detach(), "output": output.detach()})


def test_results_are_fresh(module: Model) -> None:
    model = poptorch.inferenceModel(lambda x: x + 1)
    first = model(torch.zeros(3))
    first += 5
    assert model(torch.ones(3)).tolist() == [2, 2, 2]
    assert first.tolist() == [6, 6, 6]


def test_inputs_that_are_overwritten() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        x += 1
        return x * 2

    model = poptorch.inferenceModel(forward, poptorch.Options().deviceIterations(2).replicationFactor(2))
    x = torch.arange(4.0)
    assert model(x).tolist() == [2, 4, 6, 8]
    assert x.tolist() == [1, 2, 3, 4]


def test_inputs_that_need_a_change(caplog: pytest.LogCaptureFixture) -> None:
    model = poptorch.inferenceModel(lambda x, i, b: (x + 1, i + 1, b + 1))
    x = torch.arange(6.0).reshape(2, 3).T.requires_grad_()
    for _ in range(2):
        y, i, b = model(x, torch.tensor([2**31 - 2]), torch.ones(2, dtype=torch.bfloat16))
    torch.testing.assert_close(y, x.detach() + 1)
    assert i.dtype is torch.int32 and i.item() == 2**31 - 1
    assert b.dtype is torch.bfloat16
    assert caplog.text.count("is not contiguous") == 1
    assert caplog.text.count("requires a gradient") == 1


# Tensors within -------------------------------------------------------------------------------------------------------


def test_names_of_tensors(module: Model) -> None:
    model = poptorch.trainingModel(module, None, optim.SGD(module.parameters(), lr=0.1, momentum=0.5))
    with pytest.raises(AssertionError, match="has not been compiled"):
        model.getTensorNames()
    model.compile(X, T)
    names = model.getTensorNames()
    assert {"fc.weight", "fc.bias", "scale", "input/x", "input/target", "loss"} <= set(names)
    assert {"Gradient___fc.weight", "UpdatedVar___scale", "Accl1___fc.weight"} <= set(names)
    assert any(name.startswith("scaledLearningRate0") for name in names)
    assert any(name.startswith("weightDecayScaleFactor0") for name in names)
    inference = poptorch.inferenceModel(Model())
    inference.compile(X)
    assert not any("Gradient" in name or name == "loss" for name in inference.getTensorNames())


def anchored(module: Model, options: poptorch.Options, **anchors) -> PoplarExecutor:
    for short, given in anchors.items():
        options.anchorTensor(short, *given)
    return poptorch.trainingModel(module, options, optim.SGD(module.parameters(), lr=0.1))


def test_anchors(module: Model) -> None:
    model = anchored(
        module,
        poptorch.Options(),
        gradient=("Gradient___fc.bias",),
        updated=("UpdatedVar___fc.bias",),
        bias=("fc.bias",),
        x=("input/x",),
        loss=("loss",),
        rate=("learningRate___specific___fc.bias",),
    )
    with pytest.raises(poptorch.Error, match="Model has not been compiled"):
        model.getAnchoredTensor("x")
    model.compile(X, T)
    with pytest.raises(poptorch.Error, match="has not been run yet"):
        model.getAnchoredTensor("x")
    before = module.fc.bias.detach().clone()
    torch.nn.functional.mse_loss(module.fc(X) * module.scale, T).backward()
    expected = module.fc.bias.grad
    _, loss = model(X, T)
    torch.testing.assert_close(model.getAnchoredTensor("gradient"), expected)
    torch.testing.assert_close(model.getAnchoredTensor("bias"), before)
    torch.testing.assert_close(model.getAnchoredTensor("updated"), before - 0.1 * expected)
    torch.testing.assert_close(model.getAnchoredTensor("x"), X)
    torch.testing.assert_close(model.getAnchoredTensor("loss"), loss)
    torch.testing.assert_close(model.getAnchoredTensor("rate"), torch.tensor(0.1))
    torch.testing.assert_close(module.fc.bias.detach(), model.getAnchoredTensor("updated"))
    with pytest.raises(AssertionError, match="'other' is not anchored; anchored are gradient"):
        model.getAnchoredTensor("other")


@pytest.mark.parametrize(
    ("mode", "x", "updated"),
    [
        ((OutputMode.All,), list(range(8)), [-1, -6, -15, -28]),
        ((OutputMode.Final,), [7], [-28]),
        ((OutputMode.EveryN, 2), [2, 3, 6, 7], [-6, -28]),
        ((OutputMode.Sum,), [28], [-50]),
        ((), [7], [-28]),
    ],
)
def test_modes_of_anchors(mode: tuple, x: list[float], updated: list[float]) -> None:
    class Sums(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return poptorch.identity_loss((self.w * x).sum(), "sum")

    module = Sums()
    options = poptorch.Options().deviceIterations(4)
    options.Training.gradientAccumulation(2).accumulationAndReplicationReductionType(poptorch.ReductionType.Sum)
    options.anchorTensor("x", "input/x", *mode)
    options.anchorTensor("gradient", "Gradient___w", *mode)
    options.anchorTensor("updated", "UpdatedVar___w", *mode)
    model = poptorch.trainingModel(module, options, optim.SGD(module.parameters(), lr=1.0))
    model(torch.arange(8.0))
    assert model.getAnchoredTensor("x").tolist() == x
    assert model.getAnchoredTensor("gradient").tolist() == x
    assert model.getAnchoredTensor("updated").tolist() == updated


def test_anchors_within_the_graph(module: Model) -> None:
    model = poptorch.inferenceModel(module)
    model(X)
    inner = [name for name in model.getTensorNames() if name.startswith("fc/")]
    assert inner
    options = poptorch.Options().deviceIterations(2).replicationFactor(2)
    options.anchorTensor("layer", inner[-1])
    model = poptorch.inferenceModel(module, options)
    y = model(X)
    torch.testing.assert_close(model.getAnchoredTensor("layer") * module.scale, y)
    options = poptorch.Options()
    options.anchorTensor("layer", "fc.weigh")
    with pytest.raises(poptorch.Error, match="there is no tensor 'fc.weigh' in the program; there is fc.weight"):
        poptorch.inferenceModel(module, options)(X)


# Random numbers -------------------------------------------------------------------------------------------------------


def noise(seed: int | None = None, **kwargs: int) -> PoplarExecutor:
    options = poptorch.Options()
    if seed is not None:
        options.randomSeed(seed)
    return poptorch.inferenceModel(lambda x: x + torch.randn(x.shape), options.replicationFactor(kwargs.get("r", 1)))


def test_random_numbers_are_repeatable() -> None:
    x = torch.zeros(5)
    first, second, other = noise(1), noise(1), noise(2)
    a, b = first(x), first(x)
    assert not torch.equal(a, b)
    torch.testing.assert_close([second(x), second(x)], [a, b])
    assert not torch.equal(other(x), a)
    assert not torch.equal(noise()(x), noise()(x))


@pytest.mark.thorough(but_each=2)
@pytest.mark.parametrize("replicas", [1, 2])
def test_the_state_of_random_numbers(replicas: int) -> None:
    x = torch.zeros(4)
    model = noise(3, r=replicas)
    with pytest.raises(poptorch.Error, match="Model has not been compiled"):
        model.rng_state  # noqa: B018
    model(x)
    state = model.rng_state
    assert state[0] == 3
    assert all(type(word) is int for word in state)
    a = model(x)
    assert model.rng_state != state
    model.rng_state = state
    torch.testing.assert_close(model(x), a)
    model.detachFromDevice()
    again = noise(4, r=replicas)
    again.compile(x)
    again.rng_state = model.rng_state
    assert again.rng_state == model.rng_state
    torch.testing.assert_close(again(x), model(x))
    with pytest.raises(poptorch.Error, match="the state has 1 words after the seed"):
        model.rng_state = [1, 2]
    with pytest.raises(poptorch.Error, match=rf"{len(state) - 1} words after the seed, \[-1.*from 0 to"):
        model.rng_state = [-1] * len(state)
    with pytest.raises(poptorch.Error, match="rng_state: 'x' is no state; expected a list of integers"):
        model.rng_state = "x"
    assert model.rng_state == again.rng_state


def test_a_model_without_random_numbers_has_a_seed() -> None:
    model = poptorch.inferenceModel(lambda x: x + 1, poptorch.Options().randomSeed(9))
    model(X)
    assert model.rng_state == [9]


# Devices, times, reports ----------------------------------------------------------------------------------------------


def test_devices(module: Model) -> None:
    assert poptorch.ipuHardwareIsAvailable()
    assert poptorch.ipuHardwareIsAvailable(64)
    assert not poptorch.ipuHardwareIsAvailable(65)
    assert poptorch.ipuHardwareVersion() == 2
    expected = module(X).detach()
    for options in (poptorch.Options().useIpuModel(True), poptorch.Options().useIpuId(1)):
        torch.testing.assert_close(poptorch.inferenceModel(module, options)(X), expected)
    with pytest.raises(poptorch.Error, match="there is no device 99"):
        poptorch.inferenceModel(module, poptorch.Options().useIpuId(99))(X)
    late = poptorch.inferenceModel(module, poptorch.Options().connectionType(ConnectionType.OnDemand))
    late.compile(X)
    assert late.isAttachedToDevice()


def test_times(module: Model) -> None:
    options = poptorch.Options().deviceIterations(2).replicationFactor(2)
    model = poptorch.inferenceModel(module, options.outputMode(OutputMode.Final))
    empty = {name: [[]] for name in ("input", "input_complete", "output", "output_complete")}
    assert model.getPerfCounters() == empty
    assert model.getLatency() == (0.0, 0.0, 0.0)
    model.compile(X)
    assert model.getPerfCounters() == empty
    model(X)
    counters = model.getPerfCounters()
    assert [len(steps) for steps in counters["input"]] == [4]
    assert [len(steps) for steps in counters["output_complete"]] == [2]
    latencies = [model.getHostIpuLatency(), model.getComputeLatency(), model.getIpuHostLatency()]
    for least, most, average in [*latencies, model.getLatency()]:
        assert 0 < least <= average <= most
    assert sum(each[2] for each in latencies) == pytest.approx(model.getLatency()[2])


def test_cycles(module: Model) -> None:
    model = poptorch.inferenceModel(module, poptorch.Options().logCycleCount(True))
    with pytest.raises(poptorch.Error, match="Model has not been compiled"):
        model.cycleCount()
    model(X)
    assert type(model.cycleCount()) is int and model.cycleCount() > 0
    with pytest.raises(poptorch.Error, match="Cycle count logging is disabled"):
        poptorch.inferenceModel(module).cycleCount()


def test_programs_are_cached(module: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "new"
    options = poptorch.Options().enableExecutableCaching(str(folder))
    for _ in range(2):
        torch.testing.assert_close(poptorch.inferenceModel(module, options)(X), module(X).detach())
    assert len(os.listdir(folder)) == 1
    monkeypatch.setenv("POPTORCH_CACHE_DIR", str(folder))
    poptorch.inferenceModel(module)(X)
    assert len(os.listdir(folder)) == 1
    poptorch.inferenceModel(module)(X[:3])
    assert len(os.listdir(folder)) == 2


def test_reports(module: Model, tmp_path: Path) -> None:
    options = poptorch.Options().enableProfiling(str(tmp_path)).modelName("mine")
    poptorch.inferenceModel(module, options)(X)
    assert "<html" in (tmp_path / "mine" / "report.html").read_text()


def test_synthetic_data(module: Model) -> None:
    options = poptorch.Options().enableSyntheticData(True).deviceIterations(2)
    model = poptorch.trainingModel(module, options)
    y, loss = model(torch.full((4, 2), torch.nan), torch.full((4, 3), torch.nan))
    assert y.shape == (2, 3)
    assert loss.isfinite()
    index = poptorch.inferenceModel(lambda i: i + 0, poptorch.Options().enableSyntheticData(True))
    assert index(torch.tensor([5, 6])).tolist() == [0, 0]


def test_floating_point_exceptions() -> None:
    options = poptorch.Options()
    options.Precision.enableFloatingPointExceptions(True)
    model = poptorch.inferenceModel(lambda x, y: (x / y, x + 1)[1] + (x / y).clamp(-1, 1), options)
    assert model(torch.ones(2), torch.ones(2)).tolist() == [3, 3]
    for x, y in ((1.0, 0.0), (0.0, 0.0)):
        with pytest.raises(poptorch.Error, match="popxl_runtime_error"):
            model(torch.full((2,), x), torch.full((2,), y))
    assert model(torch.ones(2), torch.ones(2)).tolist() == [3, 3]


def test_a_wrapper_that_another_model_calls() -> None:
    x = torch.arange(6.0).reshape(2, 3)
    inner = poptorch.inferenceModel(torch.nn.Softmax(1))
    with pytest.raises(poptorch.Error, match=r"another, before its own first run \(test_executor.py:\d+\)"):
        poptorch.inferenceModel(lambda x: inner(x) * 2)(x)
    inner(x)
    torch.testing.assert_close(poptorch.inferenceModel(lambda x: inner(x) * 2)(x), x.softmax(1) * 2)


def test_numbers_of_tensors() -> None:
    numbers: list[bool] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        before = poptorch.getIpuTensorId(y)
        same = before == poptorch.getIpuTensorId(y)
        y += 1
        numbers.extend([same, before != poptorch.getIpuTensorId(y), poptorch.getIpuTensorId(x) != before])
        return y

    poptorch.inferenceModel(forward)(X)
    assert numbers == [True, True, True]
    with pytest.raises(poptorch.Error, match="only while a wrapped model is captured"):
        poptorch.getIpuTensorId(X)
