"""Choices of programs: what a program gets, and what `popxl tune` finds."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.__main__ import main
from popxl.base.choices import as_text, override_choices
from popxl.errors import PopxlError
from runtime.costs.memory import least_memory_of, memory_of_program
from runtime.program.build_layout import layout_for
from runtime.program.compiled import compile_program
from runtime.progress import reporting
from runtime.targets.chip import Cpu
from runtime.targets.devices import model_device
from runtime.tuning import CompiledTrial, Trial, TuneResult, tune_choices

PROGRAM = """
    import numpy as np
    import popxl
    from popxl import ops

    rows = popxl.choice("rows", [8, 2**33, 16], is_work=True)
    twice = popxl.choice("twice", [True, False])
    ir = popxl.Ir()
    with ir.main_graph:
        x = ops.host_load(popxl.h2d_stream((rows, 3), popxl.float32, "x"))
        y = ops.exp(x) + ops.exp(x + 1) if twice else ops.exp(x)
        ops.host_store(popxl.d2h_stream(y.shape, y.dtype, "y"), y)
    print("is not shown")
    popxl.Session(ir, "ipu_hw").run({})
    raise AssertionError("nothing is run")
"""


def test_a_program_gets_the_first_option(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        popxl.choice("rows", [4, 8]) == 4 and popxl.choice("rows", [True]) is True
    )  # nobody compares outside of `tune_choices`
    monkeypatch.setenv("POPXL_CHOICES", "rows=8 layers=None")
    assert popxl.choice("rows", (4, 8)) == 8 and popxl.choice("layers", [2, None]) is None
    with override_choices({"rows": 4}) as choices:
        assert (popxl.choice("rows", [8, 4], is_work=True), popxl.choice("layers", [None, 3])) == (4, None)
    assert choices.selections() == {"rows": 4, "layers": None} and choices.work == {"rows"}


@pytest.mark.parametrize(
    ("name", "options", "environment", "message"),
    [
        ("micro batch", [1], "", "`name` is 'micro batch', expected a name such as 'micro_batch'"),
        ("rows", [], "", r"`options` of 'rows' are \(\), expected different values, at least one"),
        ("rows", [1, "1"], "", "expected different values"),
        ("rows", [1, 2], "rows=3", "POPXL_CHOICES says rows=3, expected one of 1, 2"),
        ("rows", [1, 2], "rows", "POPXL_CHOICES has 'rows', expected name=value"),
        ("rows", [1, 2], "rows=1 2)", r"POPXL_CHOICES has '2\)', expected name=value"),
    ],
)
def test_mistakes(
    name: str, options: list[Any], environment: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POPXL_CHOICES", environment)
    with pytest.raises(ValueError, match=message):
        popxl.choice(name, options)


def test_a_name_that_the_program_has_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Told at the first run, when all choices are known, and before anything has changed."""
    monkeypatch.setattr("popxl.base.choices._asked", {})
    ir = popxl.Ir()
    with ir.main_graph:
        w = popxl.variable(1.0, popxl.float32)
        w += 1.0
    monkeypatch.setenv("POPXL_CHOICES", "rows=8 'colums=(2, 4)'")
    with popxl.Session(ir, "cpu") as session:
        session.run()  # a program without choices: the variable is meant for another one
        session.weights_to_host()
        assert popxl.choice("rows", [4, 8]) == 8 and popxl.choice("columns", [None, (2, 4)]) is None
        message = r"POPXL_CHOICES says 'colums=\(2, 4\)', .* Its choices are rows: 4, 8; columns: None, \(2, 4\)\."
        with pytest.raises(ValueError, match=message):
            session.run()
        assert session.get_tensor_data(w) == 2
        monkeypatch.setenv("POPXL_CHOICES", "rows=8")
        session.run()
        assert session.get_tensor_data(w) == 3


def test_one_name_has_the_same_options_everywhere() -> None:
    with override_choices({}), pytest.raises(ValueError, match=r"the options \(2, 1\) here, and had \(1, 2\) before"):
        popxl.choice("rows", [1, 2])
        popxl.choice("rows", [2, 1])


def test_what_is_printed_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POPXL_CHOICES", as_text({"mesh": (2, 4), "rows": 8}))
    assert popxl.choice("mesh", [None, (2, 4)]) == (2, 4) and popxl.choice("rows", [4, 8]) == 8


def test_choices_that_depend_on_others() -> None:
    """Each combination that a program can ask for is tried once, and no other."""
    seen, told = [], []

    def compiled() -> Any:
        recompute = popxl.choice("recompute", [True, False])
        every = popxl.choice("every", [1, 2]) if recompute else None
        seen.append((recompute, every, popxl.choice("rows", [4, 8] if recompute else [16])))
        return CompiledTrial([], "there is no compiler")

    message = "no combination of its choices can be compiled. there is no compiler"
    with reporting(told.append), pytest.raises(PopxlError, match=message):
        tune_choices(compiled)
    assert seen == [(True, 1, 4), (True, 1, 8), (True, 2, 4), (True, 2, 8), (False, None, 16)]
    assert told[1] == "2: recompute=True every=1 rows=8: not compiled, does not fit"
    one = Trial(choices={"recompute": False}, memory_bytes=1, fits=True, seconds=1.0, units=1)
    other = Trial(choices={"recompute": True, "every": 2}, memory_bytes=1, fits=True, seconds=2.0, units=1)
    assert 'POPXL_CHOICES="recompute=False"' in str(TuneResult(target="tpu v5e", capacity=3, tried=(one, other)))


def test_the_environment_fixes_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it says is what is compiled, and what is told; the other choices are tried."""
    monkeypatch.setenv("POPXL_CHOICES", "rows=8 colums=2")
    seen, told = [], []

    def compiled() -> Any:
        seen.append((popxl.choice("kind", ["relu", "gelu"]), popxl.choice("rows", [4, 8])))
        return CompiledTrial([], "there is no compiler")

    with reporting(told.append), pytest.raises(PopxlError):
        tune_choices(compiled)
    assert seen == [("relu", 8), ("gelu", 8)]
    assert told == [
        "1: kind=relu rows=8: not compiled, does not fit",
        "POPXL_CHOICES says colums=2, and the program has not asked for that. Its choices are kind: relu, gelu; "
        "rows: 4, 8.",
        "2: kind=gelu rows=8: not compiled, does not fit",
    ]


def tried(rows: int, seconds: float | None, fits: bool = True) -> Trial:
    problem = "it is too large" if seconds is None else ""
    memory = None if seconds is None else rows * 1000
    return Trial(choices={"rows": rows}, memory_bytes=memory, fits=fits, seconds=seconds, units=rows, problem=problem)


def test_the_fastest_that_fits() -> None:
    found = TuneResult(
        target="tpu v5e",
        capacity=3000,
        tried=(tried(1, 1.0), tried(2, 1.5), tried(4, 2.0, False), tried(8, None, False)),
    )
    assert found.best is found.tried[1]
    text = str(found)
    assert [line.split()[-1] for line in text.splitlines() if line[4:8].strip().isdigit()] == [
        "fits",
        "best",
        "fit",
        "fit",
    ]
    assert "rows=8: it is too large" in text and text.rstrip().endswith('The fastest that fits: POPXL_CHOICES="rows=2"')
    none = TuneResult(target="tpu v5e", capacity=3000, tried=found.tried[2:])
    assert none.best is None and "None fits: a chip of tpu v5e has 3 kB." in str(none)


def test_the_memory_that_a_program_needs_before_it_computes() -> None:
    """Variables, remote buffers on the device and feeds, known without compiling: as the compiled program has them."""
    ir = popxl.Ir(replication=2)
    ir.num_host_transfers = 3
    with ir.main_graph:
        x = ops.host_load(popxl.h2d_stream((4, 5), popxl.float16, "x"))
        w = popxl.variable(np.ones((5, 7)), popxl.float16, "w")
        buffer = popxl.remote_buffer((4, 7), popxl.float16, 2)
        popxl.remote_variable(np.ones((4, 7)), buffer, 1)
        y = x @ w + ops.remote_load(buffer, 1)
        ops.host_store(popxl.d2h_stream(y.shape, y.dtype, "y"), y)
    device = model_device()  # for both replicas, which share the variable
    memory = memory_of_program(ir, compile_program(ir, device))
    bytes_of_both = 2 * (5 * 7 + 2 * (2 * 4 * 7 + 3 * 4 * 5))
    assert least_memory_of(layout_for(ir, device)) == bytes_of_both
    assert memory.variables + memory.buffers + memory.arguments == bytes_of_both


@pytest.mark.here
def test_without_a_target_the_device_of_the_program_needs_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(PROGRAM))
    monkeypatch.delenv("POPXL_CHIP", raising=False)
    for name in ("tune", "fit"):  # the name of earlier versions
        assert main([name, str(file)]) == 1
        err = capsys.readouterr().err
        assert err.startswith("popxl: tune: The memory and speed of ipu_hw (cpu:0) are not known. Name a machine by")
        assert "does not fit" not in err
    rates = dict(memory_bandwidth=1e12, network_bandwidth=1e12, host_bandwidth=1e12)
    cpu = Cpu(name="cpu", sources=("a test",), flops={"float32": 1e9}, memory_bytes=1 << 30, **rates)
    (tmp_path / "cpu.json").write_text(cpu.model_dump_json())
    monkeypatch.setenv("POPXL_CHIP", str(tmp_path / "cpu.json"))
    assert main(["tune", str(file)]) == 0
    out = capsys.readouterr().out
    assert "Fitting into cpu" in out and "The fastest that fits: POPXL_CHOICES=" in out


@pytest.mark.targets
def test_an_interrupted_command_prints_what_it_has(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "program.py"
    text = textwrap.dedent(PROGRAM).replace(
        "ir = popxl.Ir()", "if rows == 16:\n    raise KeyboardInterrupt\nir = popxl.Ir()"
    )
    file.write_text(text)
    assert main(["tune", str(file), "--target", "gpu h100"]) == 130
    out = capsys.readouterr().out
    assert "Interrupted: other combinations were not tried." in out and "8589934592   False" in out
    assert 'The fastest that fits: POPXL_CHOICES="rows=8 twice=True"' in out
    file.write_text("raise KeyboardInterrupt")
    assert main(["tune", str(file), "--target", "gpu h100"]) == 130
    assert capsys.readouterr() == ("", "popxl: interrupted.\n")


@pytest.mark.targets
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(PROGRAM))
    assert main(["tune", str(file), "--target", "tpu v5e"]) == 0
    out, err = capsys.readouterr()
    rows = [line.split() for line in out.splitlines() if line.endswith((" fits", " best", " fit"))]
    assert [row[:2] + row[-1:] for row in rows] == [
        ["8", "True", "fits"],
        ["8", "False", "fits"],
        ["8589934592", "True", "fit"],
        ["8589934592", "False", "fit"],
        ["16", "True", "fits"],
        ["16", "False", "best"],  # a dispatch and a launch are what takes time, for as many rows as there are
    ]
    assert 'POPXL_CHOICES="rows=16 twice=False"' in out and "is not shown" not in out
    assert " ".join(out.split()).count("was not compiled: its variables and feeds alone need 103 GB of a chip") == 2
    assert err.splitlines()[1].startswith("2: rows=8 twice=False: ") and err.splitlines()[1].endswith(
        " estimated, fits"
    )
    for text, message in (
        ("", "makes no session"),
        (
            "import popxl\nir = popxl.Ir()\nwith ir.main_graph:\n    popxl.variable(1.0) + 1\npopxl.Session(ir)",
            "no choices",
        ),
        ("1/0", "exit code 1"),
    ):
        file.write_text(text)
        assert main(["tune", str(file), "--target", "tpu v5e"]) == 1
        assert message in capsys.readouterr().err
