"""`popxl plan` on a file that trains a model of PyTorch, as a user gives it.

Programs are compiled for CPUs, in the place of the target, which is quicker; the command wants the compiler of the
target all the same.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

import poptorch
import popxl_addons as addons
from popxl.__main__ import main
from runtime.machine import TargetMachine
from runtime.targets.devices import find_device
from tests.poptorch.test_recomputation import Model

PROGRAM = """
    import torch
    import poptorch
    from tests.poptorch.test_recomputation import Model

    model, x = Model({options}), torch.randn(192, 24)
    options = poptorch.Options()
    {setting}
    optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
    training = poptorch.trainingModel(model, options, optimizer)
    {first}
    training(x, x)
    raise AssertionError("nothing is run")
"""


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Plan a file with the program, within a budget; returns the exit code."""
    monkeypatch.setattr(TargetMachine, "device", lambda self, description, ir: find_device("cpu", ir))

    def planned(budget: str, options: str = "", first: str = "", setting: str = "") -> int:
        file = tmp_path / "train.py"
        file.write_text(textwrap.dedent(PROGRAM).format(options=options, first=first, setting=setting))
        command = ["plan", str(file), "--target", "gpu h100", "--budget", budget, "--save", str(tmp_path / "plan.json")]
        return main(command)

    return planned


@pytest.mark.targets
def test_a_plan_is_found_saved_and_used(plan: Any, tmp_path: Path, capsys: Any) -> None:
    """Also where the file compiles the model for inference before; the plan is that of the training."""
    first = "poptorch.inferenceModel(Model()).compile(x, x)"
    assert plan("1 GB", first=first) == 0
    out = capsys.readouterr().out
    assert "options.Training.setMemoryPlan(addons.MemoryPlan.read_json(" in out
    found = addons.MemoryPlan.read_json(tmp_path / "plan.json")
    assert [each.calls for each in found.graphs] == [4] and found.bytes("recompute") == 0
    assert plan("1 kB", first=first) == 1
    assert "no plan was found within 1 kB of a device; the least" in capsys.readouterr().err

    assert plan("1 GB", setting="options.Training.setMemoryPlan('nothing')") == 0
    assert "has a plan or policy of its own, which is ignored here" in capsys.readouterr().err
    assert addons.MemoryPlan.read_json(tmp_path / "plan.json") == found

    def losses(options: poptorch.Options) -> list[float]:
        import torch

        model, x = Model(), torch.randn(192, 24, generator=torch.Generator().manual_seed(1))
        optimizer = poptorch.optim.SGD(model.parameters(), lr=0.1)
        training = poptorch.trainingModel(model, options, optimizer)
        return [float(training(x, x)[1]) for _ in range(2)]

    planned = poptorch.Options()
    planned.Training.setMemoryPlan(found.with_treatments("recompute", "*sigmoid*"))
    assert losses(planned) == pytest.approx(losses(poptorch.Options()), rel=1e-5)


@pytest.mark.targets
def test_what_has_no_plan_says_what_to_leave_out(plan: Any, capsys: Any) -> None:
    assert plan("1 GB", options="marks=True") == 1
    said = capsys.readouterr().err
    assert "applies 0 memory plans" in said and "unless its model has checkpoints" in said
    assert plan("1 GB", first="poptorch.inferenceModel(model)(x, x)") == 1
    assert "has to train before it runs anything else" in capsys.readouterr().err
