"""`popxl check`: what it finds in a program, and in the same program beside one replica (`--run`)."""

import json
from pathlib import Path

import pytest

from runtime.command import main

PROGRAM = """
import numpy as np
import popxl
from popxl import ops

ir = popxl.Ir(axes={"data": 2, "tensor": 4})
with ir.main_graph:
    x = ops.host_load(popxl.h2d_stream((4, 8), popxl.float32, "x"))
    w = popxl.variable(np.ones((8, 3)), popxl.float32, "w")
    dw = x.T @ (x @ w)
    dw = ops.collectives.replicated_all_reduce(dw, "mean", group="GROUP")
    ops.scaled_add_(w, dw, b=-0.1)
popxl.Session(ir, "ipu_model").run({})
"""


@pytest.mark.parametrize(("group", "code"), [("tensor", 1), ("data", 1)])
def test_check(group: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "train.py"
    file.write_text(PROGRAM.replace("GROUP", group))
    assert main(["check", str(file)]) == code
    out = capsys.readouterr().out
    other = {"tensor": "data", "data": "tensor"}[group]
    assert f"Replicas share `w`, and each changes it by a value of its own along '{other}'" in out
    assert "train.py:12" in out


COMPARED = """
import sys
import numpy as np
import popxl
from popxl import ops

data = SIZE
ir = popxl.Ir(axes={"data": data})
with ir.main_graph:
    x = ops.host_load(popxl.h2d_stream((8 // data, 3), popxl.float32, "x"))
    w = popxl.variable(np.ones(3), popxl.float32, "w")
    g = ops.collectives.replicated_all_reduce(ops.mean(x, 0), "REDUCTION")
    ops.scaled_add_(w, g, b=-0.1)
popxl.Session(ir, "ipu_model").run({})
"""


@pytest.mark.parametrize(
    ("size", "arguments"),
    [
        ('popxl.choice("data", [4, 1])', ["{file}", "--run"]),
        ('popxl.choice("data", [4, 1])', ["--run", "{file}"]),
        ("int(sys.argv[1])", ["{file}", "--run=1", "4"]),
    ],
)
@pytest.mark.parametrize(("reduction", "code"), [("mean", 0), ("add", 1)])
def test_check_beside_one_replica(
    size: str, arguments: list[str], reduction: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Mean or sum of gradients from different data, both right by themselves: the experiment tells."""
    file = tmp_path / "train.py"
    file.write_text(COMPARED.replace("SIZE", size).replace("REDUCTION", reduction))
    assert main(["check", *(each.format(file=file) for each in arguments)]) == code
    out = capsys.readouterr().out
    assert "Nothing was found." in out and "data 4 beside one replica" in out
    assert ("w[0] is" in out) == bool(code) and ("no difference" in out) != bool(code)


@pytest.mark.parametrize(
    ("size", "arguments", "message"),
    [
        ('popxl.choice("data", [4, 2])', [], "'data' has the options (4, 2) here"),
        ("4", [], "does not build Ir"),
        ("int(sys.argv[1])", ["4"], "does not build Ir"),
    ],
)
def test_check_of_what_cannot_be_compared(
    size: str, arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "train.py"
    file.write_text(COMPARED.replace("SIZE", size).replace("REDUCTION", "mean"))
    assert main(["check", str(file), "--run", *arguments]) == 2
    error = capsys.readouterr().err
    assert "popxl: --run: " in error and message in error and "popxl.choice" in error


@pytest.mark.parametrize("arguments", [["{file}", "--json"], ["--json", "{file}"]])
def test_check_as_json(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the program prints, and options behind its own arguments, are not the command's."""
    file = tmp_path / "train.py"
    file.write_text("import sys; print(sys.argv[1:])" + PROGRAM.replace("GROUP", "tensor"))
    assert main(["check", *(each.format(file=file) for each in arguments), "--json"]) == 1
    out, err = capsys.readouterr()
    (found,) = json.loads(out)
    assert found["axes"] == {"data": 2, "tensor": 4} and found["notes"] == found["not typed"] == []
    (finding,) = found["findings"]
    assert finding.pop("message").startswith("Replicas share `w`, and each changes it by a value of its own along 'dat")
    assert finding == {
        "category": "drifting variable",
        "certain": True,
        "tensor": "w",
        "axes": ["data"],
        "file": str(file),
        "line": 12,
        "code": "ops.scaled_add_(w, dw, b=-0.1)",
    }
    assert err == "['--json']\n"


def test_check_beside_one_replica_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "train.py"
    file.write_text(COMPARED.replace("SIZE", 'popxl.choice("data", [4, 1])').replace("REDUCTION", "add"))
    assert main(["check", "--run", str(file), "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out)
    (difference,) = found["comparison"]["differences"]
    assert found["findings"] == [] and (difference["what"], difference["step"]) == ("w", 1)


def test_check_of_a_right_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "train.py"
    file.write_text(PROGRAM.replace(', group="GROUP"', ""))
    assert main(["check", str(file)]) == 0
    assert "Nothing was found." in capsys.readouterr().out
