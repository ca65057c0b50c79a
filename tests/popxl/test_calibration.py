"""`popxl calibrate`: figures of the device that is here, which give its programs times."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.errors import PopxlError
from runtime import calibration
from runtime.command import main
from runtime.targets.chip import Cpu, load_figures, of_device


@pytest.mark.here
def test_figures_are_measured_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibration, "_SIZES", (16, 32))
    monkeypatch.setattr(calibration, "_VECTOR", 1 << 10)
    monkeypatch.setattr(calibration, "MOST_SECONDS", 0.01)
    file = tmp_path / "cpu.json"
    assert main(["calibrate", "--save", str(file)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"POPXL_CHIP={file}" in said and "float32 product of 32" in said
    chip = load_figures(Cpu, file)
    assert chip.flops["float32"] > 1e6 and chip.memory_bandwidth > 1e6 and 0 < chip.efficiency.dispatch < 1
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        x = popxl.variable(np.ones((32, 64)), popxl.float32, "x")
        ops.var_updates.copy_var_update_(x, x @ popxl.variable(np.ones((64, 64)), popxl.float32, "w"))
    assert popxl.Session(ir, "cpu").cost().seconds is None
    monkeypatch.setenv("POPXL_CHIP", str(file))
    assert of_device("cpu") == chip and of_device("TPU v4") is not None
    cost = popxl.Session(ir, "cpu").cost()
    assert cost.seconds is not None and cost.seconds >= 2 * 32 * 64 * 64 / chip.flops["float32"]
    assert cost.step is not None and cost.step.limits["dispatch"] >= chip.efficiency.dispatch


def test_a_file_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("POPXL_CHIP", str(tmp_path / "none.json"))
    with pytest.raises(PopxlError, match="cannot be read from"):
        of_device("cpu")
