"""The command `popxl`: programs are shown without being run, and run with a report; what goes wrong is said."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import popxl
from popxl.__main__ import main
from runtime.machine import Machine
from runtime.targets.compile_target import CompileTarget

ROOT = Path(__file__).parents[2]

PROGRAM = """
    import sys
    import numpy as np
    import popxl
    from popxl import Session, ops

    ir = popxl.Ir()
    with ir.main_graph:
        x_in = popxl.h2d_stream((2, 3), popxl.float32, "x")
        w = popxl.variable(np.eye(3), popxl.float32, "weight")
        y = ops.host_load(x_in) @ w
        y_out = popxl.d2h_stream(y.shape, y.dtype, "y")
        ops.host_store(y_out, y)

    session = Session(ir, "ipu_hw")
    print("arguments:", *sys.argv[1:])
    print("expects", *(stream.tensor_id for stream in session.expected_inputs()))
    with session:
        print("weight", session.get_tensor_data(w)[0])
        try:
            print("the result", session.run({x_in: np.ones((2, 3))})[y_out][0])
        except Exception:
            print("was handled")
    print("the end")
"""


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """`command(program, *arguments)` runs the command in this process, with `FILE` in the place of the program."""

    def run(program: str, *arguments: str) -> tuple[int, str, str]:
        file = tmp_path / "program.py"
        file.write_text(textwrap.dedent(program), encoding="utf-8")
        code = main([str(file) if each == "FILE" else each for each in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_show_prints_the_graphs_and_runs_nothing(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile(*_: Any) -> None:
        raise AssertionError("something is compiled")

    monkeypatch.setattr(CompileTarget, "compile", compile)
    code, out, err = command(PROGRAM, "show", "FILE", "--layers", "3")
    assert (code, err) == (0, "")
    assert "arguments: --layers 3\nexpects x\nweight [1. 0. 0.]\n" in out
    assert "weight: f32[3, 3]     = variable" in out
    assert "matmul_out: f32[2, 3] = MatMul(x_hostload, weight)" in out
    assert ["variables", "36", "B"] in [line.split() for line in out.splitlines()]
    assert "It would be compiled as one program." in out
    assert 'Stopped at `print("the result", session.run({x_in: np.ones((2, 3))})[y_out][0])` (' in out
    assert out.rstrip().endswith("program.py:21): nothing is compiled or run.")
    assert not {"the result", "was handled", "the end"} & {line[:10].strip() for line in out.splitlines()}


def test_report_runs_the_program(command: Any) -> None:
    code, out, err = command(PROGRAM, "report", "FILE", "a", "--p=b")  # no `--pages`, and no `--pictures`
    assert (code, err) == (0, "")
    assert "arguments: a --p=b\n" in out
    assert "the result [1. 1. 1.]\nthe end\n\n=== session 0 ===\n\nReport of Ir[id=" in out
    assert "  the program      1     4" in out


@pytest.mark.targets
@pytest.mark.parametrize(
    "arguments", [("FILE", "--target", "tpu v5e", "-b"), ("--target=tpu v5e", "FILE", "-b")], ids=["after", "before"]
)
def test_show_and_report_compile_for_a_target(arguments: tuple[str, ...], command: Any) -> None:
    code, out, err = command(PROGRAM, "show", *arguments)
    assert (code, err) == (0, "")
    assert "arguments: -b\n" in out and "matmul_out: f32[2, 3] = MatMul(x_hostload, weight)" in out
    assert "Compiled for tpu v5e\n\nMemory of Ir[id=" in out and ", on one TPU v5e\n" in out
    assert "Stopped at `print(" in out and out.rstrip().endswith("program.py:21): nothing is run.")
    code, out, err = command(PROGRAM, "report", *arguments)
    assert (code, err) == (0, "")
    assert "=== session 0 ===\n\nReport of Ir[id=" in out and "  1 of 1 chips are used (TPU v5e)." in out
    assert "\nthe result" not in out and "was handled" not in out


def test_a_target_that_is_none_is_said(command: Any) -> None:
    code, _, err = command(PROGRAM, "show", "FILE", "--target", "abacus")
    assert code == 2 and err.startswith(
        "popxl: --target: Target: 'abacus' describes no machine; expected 'tpu v5e:4x4'"
    )


def test_sessions_are_as_before_afterwards(command: Any) -> None:
    argv, path = sys.argv, sys.path
    command(PROGRAM, "show", "FILE")
    assert type(popxl.Session.machine) is Machine
    assert (sys.argv, sys.path) == (argv, path)


def test_every_ir_is_shown_once_with_or_without_a_session(command: Any) -> None:
    program = """
        import popxl
        from popxl import ops
        for start in (1.0, 2.0, 3.0):
            ir = popxl.Ir()
            with ir.main_graph:
                x = popxl.variable(start, name=f"x{start:.0f}")
                ops.add_(x, popxl.constant(1.0))
            if start > 1:
                popxl.Session(ir), popxl.Session(ir)
    """
    code, out, _ = command(program, "show", "FILE")
    assert code == 0
    assert out.count("=== Ir[id=") == 3
    assert [name for name in ("x1: f32[]", "x2: f32[]", "x3: f32[]") if name not in out] == []
    assert out.count("It would be compiled") == 2
    assert "Stopped" not in out
    code, out, _ = command(program, "report", "FILE")
    assert (code, out.count("=== session")) == (0, 4)


def test_show_says_when_a_plan_would_be_made(command: Any) -> None:
    program = """
        import popxl
        from popxl import ops
        ir = popxl.Ir()
        ir.options.calledGraphs = "dispatched"
        with ir.main_graph, popxl.in_sequence():
            x = popxl.variable(1.0)
            graph = ir.create_graph(lambda x: ops.exp(x), x)
            (y,) = ops.call(graph, *ops.call(graph, x))
        session = popxl.Session(ir)
        session.report
    """
    code, out, _ = command(program, "show", "FILE")
    assert code == 0
    assert "It would be compiled as a plan of executables. `ir.options.calledGraphs` is 'dispatched'." in out
    assert "Stopped at `session.report` (" in out


@pytest.mark.parametrize("what", ["session.save('nowhere')", "session.recording()", "session.run_with_outputs()"])
def test_show_stops_where_something_has_to_be_compiled(command: Any, what: str) -> None:
    program = f"""
        import popxl
        ir = popxl.Ir()
        with ir.main_graph:
            popxl.variable(1.0) + 1
        with popxl.Session(ir) as session:
            {what}
        print("not reached")
    """
    code, out, _ = command(program, "show", "FILE")
    assert code == 0
    assert f"Stopped at `{what}` (" in out
    assert "not reached" not in out


def test_modules_beside_the_program_are_found_and_pictures_drawn(command: Any, tmp_path: Path) -> None:
    (tmp_path / "beside_the_program.py").write_text("START = 5.0\n", encoding="utf-8")
    program = """
        import popxl
        from beside_the_program import START
        ir = popxl.Ir()
        with ir.main_graph:
            popxl.variable(START) + 1
        popxl.Session(ir)
    """
    pictures, pages = tmp_path / "deep" / "pictures", tmp_path / "pages"
    for name in ("show", "report"):
        assert command(program, name, "--pictures", str(pictures), "--pages", str(pages), "FILE")[0] == 0
    memory, session = sorted(pictures.iterdir())
    assert memory.name.startswith("memory_") and session.name == "session_0.svg"
    assert session.read_text(encoding="utf-8").startswith("<svg")
    assert [page.name for page in sorted(pages.iterdir())] == [f"{memory.stem}.html", "session_0.html"]
    assert all(page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>") for page in pages.iterdir())


# What goes wrong ------------------------------------------------------------------------------------------------------


def test_a_file_that_is_not_there(command: Any, tmp_path: Path) -> None:
    assert command("", "show", "nowhere.py") == (
        2,
        "",
        "popxl: 'nowhere.py' does not exist; expected a Python file.\n",
    )
    assert command("", "report", str(tmp_path))[2] == f"popxl: {str(tmp_path)!r} is a folder; expected a Python file.\n"


def test_pictures_that_cannot_be_written(command: Any, tmp_path: Path) -> None:
    code, _, err = command("", "show", "--pictures", str(tmp_path / "program.py"), "FILE")
    assert code == 2
    assert err.startswith(f"popxl: --pictures {tmp_path / 'program.py'}: ")


def test_costs_are_files_for_diff(command: Any, tmp_path: Path) -> None:
    assert command(PROGRAM, "report", "--costs", str(tmp_path / "costs"), "FILE")[0] == 0
    code, out, err = command(PROGRAM, "diff", str(tmp_path / "costs" / "session_0.json"), "FILE")
    assert (code, err) == (0, "") and out.endswith("Nothing changed.\n")


def test_a_file_that_cannot_be_saved_is_said_first(command: Any, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none" / "plan.json"):
        for arguments in (["calibrate"], ["plan", "--budget", "1GB", "FILE"]):
            code, out, err = command("", arguments[0], "--save", str(path), *arguments[1:])
            assert (code, out) == (2, "") and err.startswith(f"popxl: --save {path}: expected a file in a folder")


@pytest.mark.parametrize("name", ["show", "check", "tune"])
def test_a_function_is_for_report_alone(command: Any, name: str, tmp_path: Path) -> None:
    code, _, err = command("", name, f"{tmp_path / 'program.py'}:step")
    assert code == 2 and err.endswith(":step' names a function, which only `report`, `plan` and `diff` take.\n")


@pytest.mark.parametrize("name", ["show", "check", "report"])
def test_an_interrupted_program(command: Any, name: str) -> None:
    assert command("raise KeyboardInterrupt", name, "FILE") == (130, "", "popxl: interrupted.\n")


def test_folders_that_stay_empty_are_removed(command: Any, tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    for folder in ("old", "old/costs", "new/costs"):
        assert command("raise KeyboardInterrupt", "report", "--costs", str(tmp_path / folder), "FILE")[0] == 130
    assert {each.name for each in tmp_path.iterdir()} == {"old", "program.py"} and not [*(tmp_path / "old").iterdir()]


def test_files_that_are_no_programs(command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        popxl.variable(1.0) + 1.0
    ir.save(tmp_path / "saved")
    for name in ("show", "check", "report", "tune"):
        code, out, err = command("", name, str(tmp_path / "saved"))
        assert (code, out) == (2, "") and "is a saved program, costs or a notebook" in err
    with pytest.raises(SystemExit):
        command("", "plan", "FILE", "--budget")
    assert "required: --budget" in capsys.readouterr().err


def test_names_that_are_no_functions(command: Any, tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    for arguments in (("diff", f"{file}:ir", "FILE"), ("report", f"{file}:ir"), ("plan", "--budget=1GB", f"{file}:ir")):
        code, _, err = command("import popxl\nir = popxl.Ir()", *arguments)
        assert code and f"{file}:ir is an Ir, and not a JAX function ({file} alone gives its sessions)" in err
    for arguments in (
        ("diff", f"{file}:M.f", "FILE"),
        ("report", f"{file}:M.f"),
        ("plan", f"{file}:M.f", "--budget=1GB"),
    ):
        code, _, err = command("class M: f = id", *arguments)
        assert code and "'M.f' is a method, and only functions at the top level of a file are found" in err


def test_a_program_without_an_ir(command: Any) -> None:
    code, _, err = command("print('hello')", "show", "FILE")
    assert code == 1
    assert err.endswith("program.py builds no Ir: there is nothing to show.\n")
    code, out, err = command("print('hello')", "report", "FILE")
    assert (code, out) == (1, "hello\n")
    assert "makes no session: there is nothing to report. `popxl show` prints what it builds, and `popxl report " in err


FAILING = """
    import popxl
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.variable(1.0, name="x")
        x + 1
    popxl.Session(ir)
    def fail():
        raise KeyError("what I looked for")
    fail()
"""


@pytest.mark.parametrize("name", ["show", "report"])
def test_a_program_that_fails(command: Any, name: str) -> None:
    """Its traceback begins in the program; what it had made is printed."""
    code, out, err = command(FAILING, name, "FILE")
    assert code == 1
    lines = err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].endswith('program.py", line 10, in <module>')
    assert lines[-1] == "KeyError: 'what I looked for'"
    assert "Memory of Ir[" in out


def test_a_program_that_python_cannot_read(command: Any) -> None:
    code, _, err = command("import popxl\nx = = 3\n", "show", "FILE")
    assert code == 1
    assert 'program.py", line 2' in err.splitlines()[0]
    assert err.splitlines()[-1].startswith("SyntaxError")


@pytest.mark.parametrize(("end", "code", "said"), [("'no data'", 1, "no data\n"), ("3", 3, ""), ("", 0, "")])
def test_a_program_that_exits(command: Any, end: str, code: int, said: str) -> None:
    program = f"""
        import sys, popxl
        with popxl.Ir().main_graph:
            popxl.variable(1.0) + 1
        sys.exit({end})
    """
    found, out, err = command(program, "show", "FILE")
    assert (found, err) == (code, said)


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["show", "--help"]):
        with pytest.raises(SystemExit, match="0"):
            main(arguments)
        assert "popxl show" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "{show,check,report,tune,plan,diff,calibrate}" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["show"])
    assert capsys.readouterr().err.endswith("popxl show: error: the following arguments are required: FILE.py\n")


@pytest.mark.parametrize("budget", ["--budget=little", "--budget", "--save=plan.json"])
def test_plan_takes_its_options_before_and_after_the_file(budget: str, capsys: pytest.CaptureFixture[str]) -> None:
    value = ["little"] if budget == "--budget" else []
    late = [] if "--budget" in budget else ["--budget=little"]
    assert main(["plan", __file__, "--target", "abacus", budget, *value, *late]) == 2
    assert capsys.readouterr().err.startswith("popxl: --target: Target: 'abacus' describes no machine")
    assert main(["plan", "--budget=1GB", "none.py", "--save", "of the program"]) == 2
    assert "'none.py' does not exist" in capsys.readouterr().err


def test_tune_has_no_schedule_and_draws_no_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["tune", "--pictures", str(tmp_path / "pictures"), "program.py", "--target", "gpu h100"])
    assert "unrecognized arguments: --pictures" in capsys.readouterr().err
    assert not (tmp_path / "pictures").exists()
    with pytest.raises(SystemExit, match="0"):
        main(["tune", "--help"])
    out = capsys.readouterr().out
    assert "--pages" in out and "--pictures" not in out and "run nothing" not in out


def test_a_removed_command_says_what_to_use_instead(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["foresee", "train.py", "--target", "gpu h100"]) == 2
    err = capsys.readouterr().err
    assert "`foresee` was removed" in err and "`popxl report FILE.py --target MACHINE` compiles" in err


def test_as_a_command(tmp_path: Path) -> None:
    """As a process of its own, where warnings are errors."""
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(PROGRAM), encoding="utf-8")
    command = [sys.executable, "-W", "error", "-m", "popxl", "show", file.name]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.rstrip().endswith("(program.py:21): nothing is compiled or run.")


# Threads, output and classes of programs -----------------------------------------------------------------------------

_SERVER = """
    import queue, threading

    import numpy as np
    import popxl
    from popxl import ops

    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.h2d_stream((2,), popxl.float32, "x")
        y = popxl.d2h_stream((2,), popxl.float32, "y")
        ops.host_store(y, ops.host_load(x) + 1)
    requests, answers = queue.Queue(maxsize=1), queue.Queue()

    def serve():
        with popxl.Session(ir, "cpu") as session:
            while (request := requests.get()) is not None:
                answers.put(session.run({x: request})[y])

    def ask():
        for i in range(3):
            requests.put(np.full(2, i, np.float32))
        requests.put(None)

    for each in (serve, ask):
        threading.Thread(target=each).start()
    for _ in range(3):
        print("answer", answers.get()[0])
"""


@pytest.mark.parametrize("start", ["threading.Thread(target=each).start()", "pool.submit(each)"])
def test_a_session_that_runs_in_a_thread_stops_the_program(start: str, tmp_path: Path) -> None:
    # the main thread waits for an answer, and another thread, for which Python waits at its end, to be asked
    file = tmp_path / "server.py"
    pool = "from concurrent.futures import ThreadPoolExecutor\npool = ThreadPoolExecutor(2)\n"
    file.write_text(pool + textwrap.dedent(_SERVER).replace("threading.Thread(target=each).start()", start))
    stopped = "Stopped at `answers.put(session.run({x: request})[y])`"
    for name, expected in (("show", stopped), ("report", "answer 3.0")):
        command = [sys.executable, "-m", "popxl", name, str(file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        assert expected in done.stdout


@pytest.mark.parametrize(
    "assignment",
    ["POPXL_CPU_DEVICES='5'", "XLA_FLAGS='--xla_force_host_platform_device_count=5'"],
    ids=["popxl", "xla"],
)
def test_a_program_that_sets_its_number_of_cpu_devices(assignment: str, tmp_path: Path) -> None:
    name, value = assignment.split("=", 1)
    program = f"""
        import os

        os.environ[{name!r}] = {value}
        import popxl

        ir = popxl.Ir(replication=5)
        with ir.main_graph:
            popxl.variable(1.0) + 1.0
        print(popxl.Session(ir, "ipu_hw").program.device)
    """
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(program))
    command = [sys.executable, "-m", "popxl", "report", str(file)]
    environment = {each: text for each, text in os.environ.items() if each not in ("POPXL_CPU_DEVICES", "XLA_FLAGS")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment | {"PYTHONPATH": str(ROOT)})
    assert done.stdout.startswith("ipu_hw (cpu:0, cpu:1, cpu:2, cpu:3, cpu:4)"), done.stderr


def test_a_program_whose_output_is_dropped_may_change_its_output(command: Any, tmp_path: Path) -> None:
    changed = """
        import os, sys

        sys.stdout.reconfigure(line_buffering=True)
        sys.stdout.buffer.write(b"bytes")
        os.isatty(sys.stdout.fileno())
    """
    program = textwrap.dedent(changed) + textwrap.dedent(_SERVER)
    code, out, err = command(program, "diff", "FILE", "FILE")
    assert (code, err) == (0, "") and "Nothing changed" in out and "bytes" not in out


def test_a_function_of_a_program_whose_classes_are_looked_up(tmp_path: Path) -> None:
    program = """
        from __future__ import annotations

        import multiprocessing, pickle
        from typing import get_type_hints

        import jax
        from pydantic import BaseModel

        class Part(BaseModel):
            size: int = 3

        class Config(BaseModel):
            part: Part = Part()

        def read(i):
            return float(i)

        @jax.jit
        def step(x):
            return x * x

        if __name__ == "__main__":
            assert pickle.loads(pickle.dumps(Config())) == Config()
            assert get_type_hints(Config)["part"] is Part
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(step(*pool.map(read, [2])))
    """
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(program))
    command = [sys.executable, "-m", "popxl", "report", f"{file}:step"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert "Stopped at `print(step(*pool.map(read, [2])))`" in done.stdout


# In a pipe ------------------------------------------------------------------------------------------------------------

SPEAKING = """
    import popxl
    with popxl.Ir().main_graph:
        popxl.variable(1.0) + 1
    print("before the graphs")
"""


@pytest.mark.thorough(but_each=2)
@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["the-command-prints-last", "the-program-prints-first"])
def test_nobody_reads(tmp_path: Path, unbuffered: str) -> None:
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(SPEAKING), encoding="utf-8")
    environment = {"PYTHONUNBUFFERED": unbuffered}
    assert _with_output_to_nobody("popxl", "show", str(file), **environment) == (128 + signal.SIGPIPE, "")


NEEDS_TORCH = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="poptorch needs torch")


@pytest.mark.parametrize(
    "arguments",
    [("popxl", "--help"), ("runtime.poprun", "--help"), pytest.param(("poptorch", "options"), marks=NEEDS_TORCH)],
    ids=" ".join,
)
@pytest.mark.thorough
def test_nobody_reads_other_pages(arguments: tuple[str, ...]) -> None:
    assert _with_output_to_nobody(*arguments) == (128 + signal.SIGPIPE, "")


def test_other_pipes_are_the_program_s_own(command: Any) -> None:
    program = """
        import os
        ours, theirs = os.pipe()
        os.close(ours)
        os.write(theirs, b"hello")
    """
    code, _, err = command(program, "show", "FILE")
    assert code == 1
    assert err.splitlines()[-1].startswith("BrokenPipeError")


def _with_output_to_nobody(*arguments: str, **environment: str) -> tuple[int, str]:
    """The exit code of a module that is run with its output to a pipe that nobody reads, and what it says of that."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", *arguments]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "", **environment}
    with open(writer, "wb") as output:
        done = subprocess.run(command, env=variables, stdout=output, stderr=subprocess.PIPE, text=True)
    return done.returncode, done.stderr


# Versions and devices -------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_versions(tmp_path: Path) -> None:
    """Of a JAX that has a plugin for devices which cannot be used: that is a sentence, not a traceback."""
    plugin = tmp_path / "jax_plugins" / "drawer" / "__init__.py"
    plugin.parent.mkdir(parents=True)
    plugin.write_text("def initialize():\n    raise RuntimeError('no driver\\nat all')\n", encoding="utf-8")
    driver = tmp_path / "jax_drawer_plugin-4.5.dist-info" / "METADATA"
    driver.parent.mkdir()
    driver.write_text("Metadata-Version: 2.1\nName: jax-drawer-plugin\nVersion: 4.5\n", encoding="utf-8")
    path = os.pathsep.join([str(ROOT), str(tmp_path)])
    code, out, err = _versions("popxl", PYTHONPATH=path, POPXL_CPU_DEVICES="3")
    assert (code, err) == (0, "")
    shown = dict(line.split(maxsplit=1) for line in out.splitlines() if not line.startswith(" "))
    expected = {"popxl": popxl.__version__, "python": platform.python_version(), "jax-drawer-plugin": "4.5"}
    for name in ("jax", "jaxlib", "numpy"):
        expected[name] = metadata.version(name)
    assert {name: shown.get(name) for name in expected} == expected
    assert shown["devices"] == "3 cpu"
    assert out.splitlines()[-1].endswith("when calling jax_plugins.drawer.initialize(): no driver")


@pytest.mark.thorough
def test_versions_without_any_device() -> None:
    code, out, err = _versions("runtime.poprun", PYTHONPATH=str(ROOT), JAX_PLATFORMS="nowhere")
    assert (code, err) == (0, "")
    assert out.startswith("popxl ")
    (devices,) = (line for line in out.splitlines() if line.startswith("devices"))
    assert re.match(r"devices +none\. JAX does not start with JAX_PLATFORMS=nowhere: .*'nowhere'", devices)


def _versions(module: str, **environment: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", module, "--version"]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr
