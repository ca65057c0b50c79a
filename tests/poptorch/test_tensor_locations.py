"""Where tensors are stored: the state of optimisers in the memory of the host; a warning for what has no effect."""

from __future__ import annotations

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
    shapes = sorted(buffer.tensor_shape for buffer in ir.remote_buffers)
    assert shapes == [(8, 40), (8, 40), (40,), (40,), (40, 16), (40, 16)]
    plain, _ = wrapped(Model(), poptorch.Options())
    plain(x, y)
    on_device = [poptorch.sessionOf(each).memory().variables for each in (plain, run)]
    assert on_device[0] - on_device[1] == 4 * 2 * (8 * 40 + 40 + 40 * 16)


@pytest.mark.parametrize("kind", [torch.optim.Adam, poptorch.optim.LAMB])
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


@pytest.mark.parametrize(
    ("method", "location", "said"),
    [
        ("Activation", SETTINGS().useOnChipStorage(False), "setActivationLocation: useOnChipStorage has"),
        ("Weight", SETTINGS().useReplicatedTensorSharding(), "setWeightLocation: useReplicatedTensorSharding has"),
        ("Accumulator", SETTINGS().minElementsForOffChip(3), "setAccumulatorLocation: minElementsForOffChip has"),
        (
            "Optimizer",
            SETTINGS().useIOTilesToLoad().useOnChipStorage(False),
            "setOptimizerLocation: useIOTilesToLoad has",
        ),
        ("Optimizer", OFF_CHIP, ""),
        ("Weight", SETTINGS().useOnChipStorage(True).useReplicatedTensorSharding(False), ""),
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


@pytest.mark.parametrize(
    ("strategy", "method", "value"),
    [
        (poptorch.SerialPhasedExecution, "setTensorsLiveness", poptorch.Liveness.OffChipAfterFwd),
        (poptorch.ParallelPhasedExecution, "sendTensorsOffChipAfterFwd", True),
        (poptorch.SerialPhasedExecution, "useSeparateBackwardPhase", True),
    ],
)
def test_phases_keep_tensors_where_they_are(
    strategy: Any, method: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    getattr(strategy(["A"], ["B"]), method)(value)
    said = f"{strategy.__name__}.{method} counts phases, and has no effect on memory here."
    assert [r.message for r in caplog.records] == [said]
