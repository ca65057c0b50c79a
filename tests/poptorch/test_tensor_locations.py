"""Where tensors are stored: off chip, in pieces, by phases; a warning for what has no effect."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import poptorch

OFF_CHIP = poptorch.TensorLocationSettings().useOnChipStorage(False).minElementsForOffChip(40)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, 40), torch.nn.Tanh(), torch.nn.Linear(40, 8))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(self.layers(x), y)


def options_of(replicas: int = 1, accumulation: int = 1, iterations: int = 1) -> poptorch.Options:
    options = poptorch.Options().replicationFactor(replicas).deviceIterations(iterations)
    options.Training.gradientAccumulation(accumulation)
    options._Popart.set("remoteBuffers", "host")
    options.TensorLocations.setOptimizerLocation(OFF_CHIP)
    return options


def wrapped(model: Model, options: poptorch.Options, kind: Any = torch.optim.Adam) -> tuple[Any, Any]:
    optimizer = kind(model.parameters(), lr=0.02)
    return poptorch.trainingModel(model, options, optimizer), optimizer


def batch(rows: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return [torch.randn(rows, 16, generator=generator), torch.randn(rows, 8, generator=generator)]


def assert_same_state(found: Any, expected: Any) -> None:
    for p, q in zip(found.param_groups[0]["params"], expected.param_groups[0]["params"], strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=1e-5, atol=1e-6)
        for key, value in expected.state[q].items():
            torch.testing.assert_close(found.state[p][key], value, rtol=1e-5, atol=1e-6)


def test_state_off_chip() -> None:
    """Steps, checkpoints of the optimiser and memory; small tensors stay on the device."""
    model, reference = Model(), Model()
    run, optimizer = wrapped(model, options_of())
    expected = torch.optim.Adam(reference.parameters(), lr=0.02)
    x, y = batch(6)
    for step in range(4):
        expected.zero_grad()
        loss = reference(x, y)
        loss.backward()
        expected.step()
        torch.testing.assert_close(run(x, y), loss.detach(), rtol=1e-5, atol=1e-6)
        if step == 1:
            assert_same_state(optimizer, expected)
            optimizer.load_state_dict(optimizer.state_dict())
    run.copyWeightsToHost()
    assert_same_state(optimizer, expected)
    ir = poptorch.sessionOf(run).ir
    slots = sorted((buffer.tensor_shape, buffer.entries) for buffer in ir.remote_buffers)
    assert slots == [((8, 40), 2), ((40,), 2), ((40, 16), 2)]
    plain, _ = wrapped(Model(), poptorch.Options())
    plain(x, y)
    on_device = [poptorch.sessionOf(each).memory().variables for each in (plain, run)]
    assert on_device[0] - on_device[1] == 4 * 2 * (8 * 40 + 40 + 40 * 16)


@pytest.mark.parametrize("kind", [torch.optim.Adam, pytest.param(poptorch.optim.LAMB, marks=pytest.mark.thorough)])
def test_state_off_chip_in_loops_and_replicas(kind: Any) -> None:
    found, expected = [], []
    for losses, location in ((found, OFF_CHIP), (expected, poptorch.TensorLocationSettings())):
        options = options_of(replicas=2, accumulation=3, iterations=2)
        options.TensorLocations.setOptimizerLocation(location)
        run, _ = wrapped(Model(), options, kind)
        losses += [run(*batch(36)) for _ in range(2)]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_saved_with_state_off_chip(tmp_path: Path) -> None:
    run, _ = wrapped(Model(), options_of())
    x, y = batch(6)
    run.compileAndExport(str(tmp_path / "model.poptorch"), x, y)
    expected = [run(x, y) for _ in range(3)]
    loaded = poptorch.load(str(tmp_path / "model.poptorch"))
    torch.testing.assert_close([loaded(x, y) for _ in range(3)], expected)


SETTINGS = poptorch.TensorLocationSettings
SHARDED = SETTINGS().useReplicatedTensorSharding()
BOTH = SETTINGS().useReplicatedTensorSharding().useOnChipStorage(False)
STORED = ("Weight", "Optimizer", "Accumulator")


class Blocks(torch.nn.Module):
    """A chain of blocks, whose first weight is read again at the end."""

    def __init__(self, width: int = 8, count: int = 4) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.embed = torch.nn.Linear(6, width)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.LayerNorm(width), torch.nn.Linear(width, 12), torch.nn.Linear(12, width))
            for _ in range(count)
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with poptorch.Block("embed"):
            h = self.embed(x)
        for i, block in enumerate(self.blocks):
            with poptorch.Block(str(i)):
                h = h + torch.tanh(block(h))
        with poptorch.Block("tied"):
            h = h @ self.embed.weight
            return h, torch.nn.functional.mse_loss(h, y)


class Loss(torch.nn.Module):
    """The mean of squares of what a model returns."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return poptorch.identity_loss((self.model(x) ** 2).mean(), "mean")


def with_phases(options: poptorch.Options) -> poptorch.Options:
    return options.setExecutionStrategy(poptorch.SerialPhasedExecution(["embed", "0"], ["1", "2"], ["3", "tied"]))


def plain_options(replicas: int = 1, accumulation: int = 1, iterations: int = 1) -> poptorch.Options:
    options = poptorch.Options().replicationFactor(replicas).deviceIterations(iterations)
    options.Training.gradientAccumulation(accumulation)
    return with_phases(options)


def trained(
    options: poptorch.Options, kind: Any = torch.optim.Adam, count: int = 4, **numbers: Any
) -> tuple[Any, Any, Any]:
    """A model after two steps, its state and that of its optimiser, and the wrapper."""
    model = Blocks(count=count)
    optimizer = kind(model.parameters(), lr=0.02, **numbers)
    run = poptorch.trainingModel(model, options, optimizer)
    rows = 4 * options.replication_factor * options.Training.gradient_accumulation * options.device_iterations
    generator = torch.Generator().manual_seed(rows)
    losses = []
    for _ in range(2):
        losses.append(run(torch.randn(rows, 6, generator=generator), torch.randn(rows, 6, generator=generator)))
    state = [losses, model.state_dict(), optimizer.state_dict()["state"]]
    return state, optimizer, run


@cache
def trained_on_device() -> tuple[Any, Any, Any]:
    """`trained` with all tensors on the device, which several tests compare with."""
    return trained(plain_options())


def everywhere(options: poptorch.Options, location: Any) -> poptorch.Options:
    for kind in STORED:
        getattr(options.TensorLocations, f"set{kind}Location")(location)
    options.TensorLocations.setActivationLocation(SETTINGS().useOnChipStorage(False))
    return options


def sizes(run: Any) -> Any:
    return poptorch.sessionOf(run).memory()


def test_weights_off_chip() -> None:
    """Weights are slots of remote buffers, of which a step has none before it needs it; small ones stay."""
    options = plain_options()
    options.TensorLocations.setWeightLocation(SETTINGS().useOnChipStorage(False).minElementsForOffChip(48))
    options._Popart.set("remoteBuffers", "host")
    found, _, run = trained(options)
    expected, _, plain = trained_on_device()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    buffers = poptorch.sessionOf(run).ir.remote_buffers
    assert sorted((b.tensor_shape, b.entries) for b in buffers) == [((8, 6), 1), ((8, 12), 4), ((12, 8), 4)]
    assert sizes(plain).variables - sizes(run).variables == 4 * (8 * 6 + 4 * 8 * 12 + 4 * 12 * 8)


def test_weights_off_chip_in_inference() -> None:
    model, (x, y) = Blocks(), (torch.randn(5, 6), torch.randn(5, 6))
    options = poptorch.Options()
    options.TensorLocations.setWeightLocation(SETTINGS().useOnChipStorage(False))
    options.setExecutionStrategy(poptorch.SerialPhasedExecution(["embed", "0", "1", "2", "3", "tied"]))
    run = poptorch.inferenceModel(model, options)
    torch.testing.assert_close(run(x, y), model(x, y), rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        model.embed.weight.mul_(2)
    run.copyWeightsToDevice()
    torch.testing.assert_close(run(x, y), model(x, y), rtol=1e-5, atol=1e-6)


def ops_of(graph: Any, kind: str) -> list[int]:
    return [i for i, op in enumerate(graph.ops) if op.op_type == kind]


def passes(run: Any) -> tuple[Any, Any]:
    graphs = poptorch.sessionOf(run).ir.graphs
    (backward,) = (g for g in graphs if g.gradient_of is not None and not g.gradient_of.name.startswith("blocks"))
    return backward.gradient_of, backward


def test_activations_off_chip() -> None:
    """They leave when they are made, and come right before the backward pass reads them; small ones stay."""
    options = poptorch.Options()
    location = SETTINGS().useOnChipStorage(False).minElementsForOffChip(30)
    options.TensorLocations.setActivationLocation(location)
    found, _, run = trained(with_phases(options))
    expected, *_ = trained_on_device()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    forward, backward = passes(run)
    away, back = ops_of(forward, "Offload"), ops_of(backward, "Reload")
    assert len(away) == len(back) > 8 and back[0] < len(backward.ops) / 3 < back[-1]
    assert all(forward.ops[i].outputs[0].nelms >= 30 for i in away)


@pytest.mark.parametrize(
    ("location", "kind", "numbers"),
    [
        pytest.param(
            SETTINGS().useOnChipStorage(False),
            poptorch.optim.AdamW,
            {"max_grad_norm": 0.05},
            marks=pytest.mark.thorough,  # the last one is off chip, too
        ),
        pytest.param(SHARDED, poptorch.optim.LAMB, {}, marks=pytest.mark.thorough),  # with a norm of all pieces
        (BOTH, poptorch.optim.AdamW, {"max_grad_norm": 0.05}),
    ],
)
def test_all_locations_with_replicas(location: Any, kind: Any, numbers: Any) -> None:
    """Loops, clipping, and a formula with a norm, whose pieces are put together for a step."""
    options = plain_options(replicas=2, accumulation=3, iterations=2)
    found, *_ = trained(everywhere(options, location), kind, 2, **numbers)
    expected, *_ = trained(plain_options(replicas=2, accumulation=3, iterations=2), kind, 2, **numbers)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["Weight", "Optimizer", pytest.param("Accumulator", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("strategy", [poptorch.PipelinedExecution, poptorch.ShardedExecution])
def test_pieces_are_on_the_ipu_of_their_weight(strategy: Any, kind: str) -> None:
    """Layers on two IPUs, of which the second also reads the first weight."""
    found = []
    for location in (SHARDED, SETTINGS()):
        options = plain_options(replicas=2, accumulation=3)
        options.setExecutionStrategy(strategy(poptorch.Stage("embed", "0").ipu(0), poptorch.Stage("1", "tied").ipu(1)))
        getattr(options.TensorLocations, f"set{kind}Location")(location)
        found.append(trained(options, torch.optim.AdamW, 2)[0])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("iterations", [1, 2])
def test_recomputation_gathers_weights_on_their_ipu(iterations: int) -> None:
    inputs, found = torch.arange(80.0).reshape(16, 5)[: 8 * iterations] / 80, []
    for location in (SHARDED, SETTINGS()):
        torch.manual_seed(5)
        layers = [torch.nn.Linear(5, 8), torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)]
        for i, layer in enumerate(layers[:2]):
            poptorch.BeginBlock(layer, ipu_id=i)
        model, options = Loss(torch.nn.Sequential(*layers)), plain_options(replicas=2, iterations=iterations)
        options.setExecutionStrategy(poptorch.ShardedExecution(poptorch.AutoStage.SameAsIpu))
        options._Popart.set("autoRecomputation", "Standard")
        options.TensorLocations.setWeightLocation(location)
        optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        losses = poptorch.trainingModel(model, options, optimizer)(inputs)
        found.append([losses, model.state_dict()])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


@pytest.mark.thorough(but_each=3)
@pytest.mark.parametrize("strategy", poptorch.MeanReductionStrategy)
def test_accumulators_in_pieces_off_chip(strategy: Any) -> None:
    found = []
    for location in (BOTH, SETTINGS()):
        options = plain_options(replicas=2, accumulation=3)
        options.Training.setMeanAccumulationAndReplicationReductionStrategy(strategy)
        options.TensorLocations.setAccumulatorLocation(location)
        found.append(trained(options, torch.optim.SGD, 1)[0])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


def test_sharded_state_takes_half_the_memory_on_two_replicas() -> None:
    location = SETTINGS().useReplicatedTensorSharding().minElementsForReplicatedTensorSharding(96)
    options = plain_options(replicas=2)
    options.TensorLocations.setOptimizerLocation(location)
    _, _, run = trained(options, count=1)
    _, _, plain = trained(plain_options(replicas=2), count=1)
    assert sizes(plain).variables - sizes(run).variables == 4 * 2 * (2 * 8 * 12) / 2


def test_setters_and_checkpoints_with_everything_elsewhere() -> None:
    options = everywhere(plain_options(replicas=2, accumulation=2), BOTH)
    _, optimizer, run = trained(options, count=1)
    _, expected, plain = trained(plain_options(replicas=2, accumulation=2), count=1)
    rows = torch.randn(16, 6), torch.randn(16, 6)
    for each, own in ((run, optimizer), (plain, expected)):
        own.load_state_dict(own.state_dict())
        own.param_groups[0]["lr"] = 0.005
        each.setOptimizer(own)
        with torch.no_grad():
            next(iter(each.parameters())).mul_(0.5)
        each.copyWeightsToDevice()
    torch.testing.assert_close(run(*rows), plain(*rows), rtol=1e-5, atol=1e-6)
    assert_same_state(optimizer, expected)


@pytest.mark.parametrize(
    ("liveness", "separate"),
    [
        pytest.param(liveness, separate, marks=[pytest.mark.thorough] * (separate is not bool(i % 2) or i == 2))
        for i, liveness in enumerate(list(poptorch.Liveness)[1:])
        for separate in (False, True)
    ],
)
def test_phases_bring_their_weights(liveness: Any, separate: bool) -> None:
    strategy = poptorch.SerialPhasedExecution(["embed", "0"], ["1", "2"], ["3", "tied"])
    strategy.setTensorsLiveness(liveness).useSeparateBackwardPhase(separate)
    options = poptorch.Options().setExecutionStrategy(strategy)
    found, _, run = trained(options)
    expected, *_ = trained_on_device()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    forward, backward = passes(run)
    loads = ops_of(forward, "RemoteLoad")
    is_each = liveness is poptorch.Liveness.OffChipAfterEachPhase
    assert len(loads) == 6 * 4 + 2 + is_each  # the tied weight is brought again
    products = ops_of(forward, "Linear")
    assert sum(products[2] < i < products[3] for i in loads) == 12  # those of both blocks of the second phase
    assert bool(ops_of(backward, "RemoteLoad")) and len(ops_of(backward, "RemoteLoad")) < len(loads) + separate
    waits = [op for op in forward.ops if op.op_type == "AvailableAfter"]
    assert bool(waits) is (liveness is poptorch.Liveness.OffChipAfterFwdNoOverlap)
    stays = ops_of(forward, "Offload")[-1] > products[-2]
    assert stays is separate  # what the shared phase makes does not leave


def test_liveness_of_parallel_phases() -> None:
    strategy = poptorch.ParallelPhasedExecution(["embed", "0", "1", "2", "3", "tied"])
    strategy.liveness = poptorch.Liveness.OffChipAfterEachPhase
    run = poptorch.trainingModel(Blocks(), poptorch.Options().setExecutionStrategy(strategy))
    with pytest.raises(poptorch.Error, match="ParallelPhasedExecution: the liveness is OffChipAfterEachPhase"):
        run(torch.randn(4, 6), torch.randn(4, 6))


def test_layers_off_chip_are_turns_of_loops() -> None:
    """Equal layers, whose weights, state and activations come turn by turn, in both passes and in the updates."""
    torch.manual_seed(2)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    found = []
    for location in (SETTINGS(), SETTINGS().useOnChipStorage(False)):
        model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        options = poptorch.Options()
        options._Popart.set("calledGraphs", "rolled").set("remoteBuffers", "host")
        options.TensorLocations.setWeightLocation(location).setActivationLocation(location)
        options.TensorLocations.setOptimizerLocation(location)
        loss = Loss(model)
        run = poptorch.trainingModel(loss, options, torch.optim.SGD(loss.parameters(), lr=0.1, momentum=0.9))
        x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
        found.append([run(x) for _ in range(2)])
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
    report = str(poptorch.sessionOf(run).report)
    turns = [line.split()[-2] for line in report.splitlines() if line.startswith("  model.layers") and "ops" in line]
    assert len(turns) == 2 and min(map(int, turns)) >= 3, report
    weights = len([*layer.parameters()])
    assert poptorch.sessionOf(run).report.loops[1].ops > 7 * weights  # room, load and store of two, and the update


def test_a_location_wins_over_liveness() -> None:
    strategy = poptorch.SerialPhasedExecution(["embed", "0"], ["1", "2"], ["3", "tied"])
    strategy.setTensorsLiveness(poptorch.Liveness.OffChipAfterFwd)
    options = poptorch.Options().setExecutionStrategy(strategy)
    options.TensorLocations.setWeightLocation(SETTINGS().useOnChipStorage(True))
    options.TensorLocations.setActivationLocation(SETTINGS().useOnChipStorage(True))
    found, _, run = trained(options)
    torch.testing.assert_close(found, trained_on_device()[0], rtol=1e-5, atol=1e-6)
    assert not poptorch.sessionOf(run).ir.remote_buffers


@pytest.mark.parametrize(
    ("method", "location", "said"),
    [
        ("Activation", SHARDED, "setActivationLocation: useReplicatedTensorSharding has"),
        ("Weight", SETTINGS().useIOTilesToStore(), "setWeightLocation: useIOTilesToStore has"),
        ("Accumulator", SETTINGS().useIOTilesToLoad(), "setAccumulatorLocation: useIOTilesToLoad has"),
        ("Optimizer", BOTH, ""),
        ("Weight", BOTH, ""),
        ("Activation", OFF_CHIP, ""),
    ],
)
def test_what_has_no_effect_is_told(method: str, location: Any, said: str, caplog: pytest.LogCaptureFixture) -> None:
    getattr(poptorch.Options().TensorLocations, f"set{method}Location")(location)
    assert [r.message for r in caplog.records] == ([f"TensorLocations.{said} no effect here."] if said else [])


def test_tiles_have_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    poptorch.Options().TensorLocations.numIOTiles(32)
    assert [r.message for r in caplog.records] == [
        "TensorLocations.numIOTiles has no effect here, where there are no tiles."
    ]
