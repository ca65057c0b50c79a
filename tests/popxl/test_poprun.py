"""poprun: starting instances, their output, and how one that fails ends the others. Nothing here may hang.

Most tests call what the command calls, see `poprun` in `conftest.py`.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

import popdist
from popxl.base.distributed import Instance
from popxl.errors import PopxlRuntimeError
from runtime.poprun import GRACE
from runtime.poprun_options import parser
from runtime.processes import LauncherConnection
from tests.popxl.conftest import Run

ROOT = Path(__file__).parents[2]
POPRUN = [sys.executable, "-m", "runtime.poprun"]
LIMIT = 60  # seconds, after which a test gives up: far more than anything here takes


@pytest.fixture(autouse=True)
def _devices_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as each instance takes."""
    monkeypatch.delenv("POPXL_CPU_DEVICES", raising=False)


# Starting again ------------------------------------------------------------------------------------------------------

DIES = """
    import os, sys
    restarts = int(os.environ["POPRUN_RESTARTS"])
    print(os.environ["POPDIST_NUM_INSTANCES"], os.environ["POPDIST_NUM_TOTAL_REPLICAS"], restarts, flush=True)
    if restarts < 2 and os.environ["POPDIST_INSTANCE_INDEX"] == "1":
        os.kill(os.getpid(), 9) if restarts else sys.exit(3)
"""
"""Without popdist, whose import would take most of the time."""


def test_popdist_says_how_often_it_was_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert popdist.getNumRestarts() == 0
    monkeypatch.setenv("POPRUN_RESTARTS", "2")
    assert popdist.getNumRestarts() == 2


def test_what_fails_is_started_again(poprun: Run) -> None:
    options = ("--num-instances=4", "--num-replicas=4", "--min-instances=2", "--only-output-from-instance=0")
    done = poprun(*options, "--max-restarts=2", program=DIES)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "[0] 2 4 2"  # 3 do not share out 4 replicas
    said = [line for line in done.stderr.splitlines() if "Starting again" in line]
    assert said == [
        "poprun: instance 1 failed with exit code 3; the others are stopped. Starting again, 1 of 2, with 2 instances.",
        "poprun: instance 1 was killed by SIGKILL; the others are stopped. Starting again, 2 of 2, with 2 instances.",
    ]


def test_what_fails_too_often_has_failed(poprun: Run) -> None:
    done = poprun("--num-instances=2", "--max-restarts=1", program=DIES)
    assert done.returncode == 128 + signal.SIGKILL
    assert done.stderr.splitlines()[-1] == "poprun: instance 1 was killed by SIGKILL; the others are stopped."


# Starting ------------------------------------------------------------------------------------------------------------

SAY_WHO = """
    import os, sys
    names = ("INSTANCE_INDEX", "NUM_INSTANCES", "LOCAL_INSTANCE_INDEX", "NUM_TOTAL_REPLICAS", "NUM_IPUS_PER_REPLICA")
    print(*(os.environ["POPDIST_" + name] for name in names), os.environ.get("SAID"), flush=True)
    print("problem", file=sys.stderr)
"""


def test_each_instance_is_told_who_it_is(poprun: Run) -> None:
    done = poprun("--num-instances", "2", "--num-replicas", "6", "--ipus-per-replica=2", program=SAY_WHO)
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["[0] 0 2 0 6 2 None", "[1] 1 2 1 6 2 None"]
    lines = done.stderr.splitlines()
    assert sorted(lines[:2]) == ["[0] problem", "[1] problem"]
    assert re.match("poprun: each of the 2 instances ran the program by itself", lines[2])


def test_options_of_the_program_are_its_own() -> None:
    """Also those that begin as some of poprun's do."""
    command = ["python", "train.py", "--m", "8", "--num", "3", "--help", "--host=x", "-x"]
    options = parser().parse_args(["--num-instances", "2", *command])
    assert (options.command, options.num_instances, options.host) == (command, 2, None)


def test_a_single_instance_by_default(poprun: Run) -> None:
    done = poprun(program=SAY_WHO)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 1 0 1 1 None\n", "problem\n")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["-x", "SAID=hello"], "hello"),
        (["--env", "SAID"], "before"),
        (["--mpi-local-args", "--bind-to none -x SAID=by mpi"], "by"),
        ([], "before"),
    ],
)
def test_environment(poprun: Run, options: list[str], said: str) -> None:
    done = poprun("--num-instances=2", *options, program=SAY_WHO, environment={"SAID": "before"})
    assert {line.split()[-1] for line in done.stdout.splitlines()} == {said}


def test_output_of_one_instance_without_tags(poprun: Run) -> None:
    options = ("--num-instances=3", "--only-output-from-instance=2", "--no-tag-output")
    assert poprun(*options, program=SAY_WHO).stdout == "2 3 2 3 1 None\n"


def test_output_is_shown_line_by_line(poprun: Run) -> None:
    """Also where lines are overwritten, as progress bars are, and where the last one has no end."""
    done = poprun("--num-instances=2", program="import sys; sys.stdout.write('1%\\r2%\\r\\nlast')")
    for number in "01":
        tag = f"[{number}] "
        assert f"{tag}1%\n{tag}2%\n{tag}last\n" in _of_instance(done.stdout, tag)


def test_what_collectives_say_at_their_start_is_not_shown(poprun: Run) -> None:
    """Threads say it at once; of the numbers in the output only theirs are left out."""
    begin = "[Gloo] Rank 0 is connected to 3 peer ranks. Expected number of connected peer ranks is : "
    lines = ["3", f"{begin}3", f"{begin}{begin}3", "3", "3", f"[Gloo] Rank {begin}31", begin[13:], "3", "[Gloo] Rank x"]
    done = poprun("--num-instances=2", "--only-output-from-instance=1", program=f"print(*{lines}, sep='\\n')")
    assert done.stdout == "[1] 3\n[1] 3\n[1] 3\n[1] [Gloo] Rank x\n"


@pytest.mark.thorough
def test_a_line_may_be_long(poprun: Run) -> None:
    done = poprun("--num-instances=2", program="print('x' * 30_000_000)")
    assert sorted(line[:5] for line in done.stdout.splitlines()) == ["[0] x", "[1] x"]
    assert len(done.stdout) == 2 * len("[0] \n") + 60_000_000


@pytest.mark.thorough
def test_all_end_quietly_when_nobody_reads_their_output() -> None:
    command = [*POPRUN, "--num-instances=2", sys.executable, "-c", "while True: print('y' * 1000)"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(LIMIT) == 128 + signal.SIGPIPE


def _of_instance(output: str, tag: str) -> str:
    return "".join(line + "\n" for line in output.splitlines() if line.startswith(tag))


def test_options_without_meaning_here_are_accepted(poprun: Run) -> None:
    options = ("--vv", "--vipu-partition=mine", "--num-ilds", "1", "--mpi-global-args=--tag-output", "--numa-aware=1")
    assert poprun(*options, program=SAY_WHO).returncode == 0


def test_values_may_begin_with_a_dash() -> None:
    """Of each option that takes one; so may those of the program."""
    command = ["train.py", "--mpi-global-args", "--host", "-x"]
    given = (
        "--vv --mpi-global-args --tag-output --mpi-local-args -x --vipu-partition --p -x -A=1 --num-instances 2".split()
    )
    options = parser().parse_args([*given, *command])
    assert (options.mpi_global_args, options.mpi_local_args, options.vipu_partition) == ("--tag-output", "-x", "--p")
    assert (options.env, options.num_instances, options.verbose, options.command) == (["-A=1"], 2, True, command)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            "--num-instances 2 --num-replicas 3 true",
            "--num-replicas 3 cannot be shared out evenly among --num-instances",
        ),
        (
            "--num-instances 2 --num-replicas 4 --adjacent-replicas 3 true",
            "among --num-instances 2 with --adjacent-replicas 3; choose",
        ),
        ("--num-instances 3 --host a,b true", "cannot be shared out evenly among the 2 machines"),
        ("--num-instances 0 true", "0 is below 1"),
        ("--num-instances two true", "'two' is no whole number"),
        ("--timeout soon true", "'soon' is no number"),
        ("--num-instances 2 --min-instances 3 true", "--min-instances 3 is more than --num-instances 2"),
        ("--max-restarts -1 true", "-1 is below 0"),
        ("--num-instances 2", "there is no program to run"),
        ("--timeout -1 true", "-1 is no time to wait"),
        ("-x SURELY_NOT_SET true", "there is no such environment variable"),
        ("--num-instnces 2 true", "unrecognized arguments"),
        ("--num-instances 2 --only-output-from-instance 2 true", "there is no such instance; their numbers are 0 to 1"),
    ],
)
def test_what_does_not_fit_together(poprun: Run, arguments: str, message: str) -> None:
    done = poprun(*arguments.split())
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_program_that_is_not_there(poprun: Run) -> None:
    done = poprun("--num-instances=2", "surely-no-such-program")
    assert done.returncode == 127
    assert "poprun: 'surely-no-such-program' cannot be started: No such file or directory." in done.stderr


def test_a_program_without_python(poprun: Run, tmp_path: Path) -> None:
    (program := tmp_path / "train.py").write_text("print('not run')")
    done = poprun("--num-instances=2", str(program), "--epochs", "3")
    assert done.returncode == 127
    said = f"poprun: '{program}' cannot be started: Permission denied. Write `python` before it: "
    assert f"{said}poprun … python {program} --epochs 3" in done.stderr


def test_help_shows_how_to_begin(poprun: Run) -> None:
    done = poprun("--help")
    assert "poprun --num-instances 2 --num-replicas 8 python train.py" in done.stdout


def test_other_machines(poprun: Run, tmp_path: Path) -> None:
    """By ssh; here one stands in for it that runs what it is told on this machine, out of reach of what kills ssh."""
    ssh = tmp_path / "ssh"
    there = f"""\
        #!{sys.executable}
        import subprocess, sys
        print(*sys.argv[1:4], end=" ", file=sys.stderr, flush=True)
        sys.exit(subprocess.run(["sh", "-c", sys.argv[4]], start_new_session=True).returncode)
    """
    ssh.write_text(textwrap.dedent(there))
    ssh.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    options = ("--num-instances=4", "--host", "near,far", "-x", "SAID=to all")
    done = poprun(*options, program=SAY_WHO, environment=environment)
    assert done.returncode == 0, done.stderr
    expected = [f"[{index}] {index} 4 {index % 2} 4 1 to all" for index in range(4)]
    assert sorted(done.stdout.splitlines()) == expected
    assert "[3] -o BatchMode=yes far problem" in done.stderr
    # Where one fails, the other is told by the end of its input, as killing ssh would not reach it.
    (tmp_path / "ended").unlink(missing_ok=True)
    program = f"""
        import os, signal, sys, time
        if os.environ["POPDIST_INSTANCE_INDEX"] == "0":
            while not os.path.exists({str(tmp_path / "ready")!r}):
                time.sleep(0.05)
            sys.exit(7)
        def end(*_):
            open({str(tmp_path / "ended")!r}, "w").close()
            os._exit(0)
        signal.signal(signal.SIGTERM, end)
        open({str(tmp_path / "ready")!r}, "w").close()
        time.sleep(100)
    """
    done = poprun("--num-instances=2", "--host", "localhost,far", program=program, environment=environment)
    assert done.returncode == 7
    deadline = time.monotonic() + LIMIT / 2
    while not (tmp_path / "ended").exists():
        assert time.monotonic() < deadline, "the other has not heard of it"
        time.sleep(0.05)


# The line to the launcher --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["localhost", "far"])
def test_only_instances_are_heard(poprun: Run, host: str, tmp_path: Path) -> None:
    """They know a secret, which is not in the command that starts them."""
    program = """
        import json, os, socket

        def answer(token):
            host, _, port = os.environ["POPDIST_LAUNCHER"].rpartition(":")
            said = json.dumps({"index": 0, "place": "here", "payload": "hello"})
            with socket.create_connection((host, int(port)), timeout=30) as line:
                try:
                    line.sendall(f"{token}\\n{said}\\n".encode())
                    return line.makefile().readline().strip()
                except ConnectionError:
                    return ""

        token = os.environ["POPDIST_TOKEN"]
        print([answer(said) for said in ("", "{}", token[:-1], token + "0", token)], token, sep=";")
    """
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\neval "$4"\n')
    ssh.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = poprun("--verbose", "--host", host, program=program, environment=environment)
    assert done.returncode == 0, done.stderr
    answers, token = done.stdout.strip().split(";")
    assert answers == """['', '', '', '', '{"payload": ["hello"]}']"""
    assert len(token) == 32 and f"instance 0 on {host}" in done.stderr and token not in done.stderr


def test_what_answers_is_not_the_launcher() -> None:
    """Whoever waits hears of it, and whoever comes later does not wait."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        launcher = f"127.0.0.1:{server.getsockname()[1]}"
        line = LauncherConnection(
            Instance(instance_index=1, num_instances=2, num_total_replicas=2, launcher=launcher, token="me")
        )
        other, _ = server.accept()
        with other:
            other.sendall(b"220 mail.example.com\r\n")
            for place in ("home", "work"):
                message = f"instance 1 is at {place}, and what answers at '{launcher}' is not `poprun`: b'220 mail"
                with pytest.raises(PopxlRuntimeError, match=message):
                    line.barrier(place)


# Failing -------------------------------------------------------------------------------------------------------------

TRAIN = """
    import os, sys, time
    import numpy as np
    import popdist, popxl
    from popxl import ops

    me = popdist.getInstanceIndex()
    def before_joining(): pass
    def in_the_third_run(session, v): pass
    {what}
    before_joining()
    ir = popxl.Ir(replication="popdist")
    with ir.main_graph, popxl.in_sequence():
        v = popxl.variable(np.zeros(3, np.float32))
        ops.add_(v, ops.collectives.replicated_all_reduce(popxl.constant(1.0)))
        out = popxl.d2h_stream(v.shape, v.dtype)
        ops.host_store(out, v)
    with popxl.Session(ir, "ipu_hw") as session:
        for k in range(100_000):
            np.asarray(session.run()[out])
            if k == 2:
                print("third run", flush=True)
                in_the_third_run(session, v)
            time.sleep(0.01)
"""


@pytest.fixture
def train(poprun: Run) -> Run:
    """Two instances train until something happens. Returns how that ended, and what poprun says of it."""

    def train(what: str, *options: str) -> tuple[Any, str]:
        program = textwrap.dedent(TRAIN).replace("{what}", textwrap.dedent(what))
        done = poprun(
            "--num-instances=2", "--num-replicas=4", "--timeout=60", *options, program=program, limit=2 * LIMIT
        )
        return done, done.stderr.splitlines()[-1]

    return train


@pytest.mark.thorough
@pytest.mark.parametrize("who", [0, 1])
def test_an_instance_is_killed(train: Run, who: int) -> None:
    done, said = train(f"def in_the_third_run(*_): me == {who} and os.kill(os.getpid(), 9)")
    assert done.returncode == 128 + signal.SIGKILL
    assert said == f"poprun: instance {who} was killed by SIGKILL; the others are stopped."


@pytest.mark.parametrize("who", [0, 1])
def test_who_fails_first_is_told(poprun: Run, who: int) -> None:
    """Of programs that need no collectives, so that they start quickly."""
    program = f"""
        import os, time
        if os.environ["POPDIST_INSTANCE_INDEX"] == "{who}":
            raise OSError("no such data")
        time.sleep(1000)
    """
    done = poprun("--num-instances=2", program=program)
    assert done.returncode == 1
    assert f"[{who}] OSError: no such data" in done.stderr
    assert done.stderr.splitlines()[-1] == f"poprun: instance {who} failed with exit code 1; the others are stopped."


@pytest.mark.thorough
@pytest.mark.parametrize("who", [0, 1])
def test_an_instance_raises(train: Run, who: int) -> None:
    done, said = train(f"def in_the_third_run(*_): 1 / (me - {who})")
    assert done.returncode == 1
    assert said == f"poprun: instance {who} failed with exit code 1; the others are stopped."
    assert f"[{who}] ZeroDivisionError" in done.stderr


@pytest.mark.thorough
def test_all_raise(train: Run) -> None:
    """The first instance does so first. JAX aborts no other one, with a stack trace that hides the error."""
    done, said = train("def in_the_third_run(*_): time.sleep(0.2 * me); 1 / 0")
    assert done.returncode == 1
    assert said == "poprun: instance 0 failed with exit code 1; the others are stopped."
    assert "[0] ZeroDivisionError" in done.stderr and "[1] ZeroDivisionError" in done.stderr
    assert "stack trace" not in done.stderr


def test_an_instance_exits(train: Run) -> None:
    done, said = train("def in_the_third_run(*_): me == 1 and sys.exit(3)")
    assert done.returncode == 3
    assert said == "poprun: instance 1 failed with exit code 3; the others are stopped."


@pytest.mark.thorough
def test_the_first_instance_exits_while_another_waits_for_it(train: Run) -> None:
    done, said = train("def in_the_third_run(*_): me == 0 and sys.exit(3)", "--timeout=10")
    assert done.returncode == 3
    assert "instance 0 failed with exit code 3" in said
    assert "Instances waited at the end of the program: instance 1 did not come within 10 seconds" in said


@pytest.mark.thorough
def test_the_first_instance_ends_last(poprun: Run, tmp_path: Path) -> None:
    """What connects all of them is in its process."""
    program = f"""
        import atexit, pathlib, time
        import popdist
        ended = pathlib.Path({str(tmp_path / "ended")!r})
        if popdist.getInstanceIndex() == 0:
            atexit.register(ended.touch)  # runs after what is registered later
        popdist.init()
        if popdist.getInstanceIndex() == 1:
            time.sleep(0.5)
            assert not ended.exists()
    """
    done = poprun("--num-instances=2", program=program)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "ended").exists()


@pytest.mark.thorough
def test_an_instance_never_comes(train: Run) -> None:
    done, said = train("def before_joining(): me == 1 and time.sleep(1000)", "--timeout=6")
    assert done.returncode == 1
    assert "instance 0 failed with exit code 1; the others are stopped." in said
    assert "instance 1 did not come within 6 seconds" in said
    assert "popxl.errors.PopxlRuntimeError: popdist: instance 0 is at the start of the program" in done.stderr


@pytest.mark.thorough
def test_an_instance_ends_before_it_comes(train: Run) -> None:
    done, said = train("def before_joining(): me == 0 and sys.exit(0)")
    assert done.returncode == 1
    assert "instance 0 has ended with exit code 0, and will not come." in said


@pytest.mark.thorough
def test_instances_that_do_different_things(train: Run) -> None:
    """Only one reads a variable, for which all are needed: neither waits for ever."""
    what = """
    def in_the_third_run(session, v):
        session.get_tensor_data(v) if me == 0 else popdist.synchronize()
    """
    done, said = train(what)
    assert done.returncode == 1
    assert "Instance 0 is at Session.weights_to_host after 3 runs. Instance 1 is at popdist.synchronize." in said


@pytest.mark.thorough
@pytest.mark.parametrize("who", [0, 1])
def test_instances_that_run_unequally_often(poprun: Run, who: int) -> None:
    program = f"""
        import popdist, popxl
        from popxl import ops
        ir = popxl.Ir(replication="popdist")
        with ir.main_graph:
            v = popxl.variable(0.0)
            ops.add_(v, ops.collectives.replicated_all_reduce(popxl.constant(1.0)))
        with popxl.Session(ir, "ipu_hw") as session:
            for _ in range(1 if popdist.getInstanceIndex() == {who} else 3):
                session.run()
    """
    done = poprun("--num-instances=2", "--num-replicas=4", program=program)
    assert done.returncode in (1, 128 + signal.SIGABRT)  # JAX may abort, with runs that will not end
    for index, runs in {who: "1 run.", 1 - who: "3 runs."}.items():
        assert f"Instance {index} is at Session.weights_to_host after {runs}" in done.stderr.splitlines()[-1]


@pytest.mark.thorough
def test_jax_has_been_used_before(train: Run) -> None:
    done, _ = train("def before_joining(): import jax; jax.devices()")
    assert done.returncode == 1
    assert "If JAX has been used before, call `popdist.init()` at the beginning" in done.stderr


@pytest.mark.thorough
def test_too_few_devices(train: Run) -> None:
    done, _ = train("", "-x", "POPXL_CPU_DEVICES=1")
    assert done.returncode == 1
    assert "this process drives 2 replicas and has 1 cpu device(s)" in done.stderr


@pytest.mark.thorough
def test_no_device(train: Run) -> None:
    """As on a machine with fewer GPUs than instances."""
    done, _ = train("", "-x", "JAX_PLATFORMS=cuda")
    assert done.returncode == 1
    assert re.search(r"instance \d has no device: .* 2 for each\. Start fewer .* JAX_PLATFORMS=cpu", done.stderr)


@pytest.mark.thorough
def test_a_device_object_is_of_one_process(train: Run) -> None:
    what = """
    import popart
    def before_joining():
        popdist.init()
        device = popart.DeviceManager().createIpuModelDevice({"numIPUs": 2})
        make = popxl.Session
        popxl.Session = lambda ir, name: make(ir, device)
    """
    done, _ = train(what)
    assert done.returncode == 1
    assert "stands for devices of this process only, and others run the program, too" in done.stderr


@pytest.mark.thorough
def test_a_program_that_knows_nothing_of_instances(poprun: Run) -> None:
    program = """
        import popxl
        ir = popxl.Ir(replication=2)
        with ir.main_graph:
            popxl.variable(1.0) + 1
        with popxl.Session(ir, "ipu_model") as session:
            session.run()
    """
    done = poprun("--num-instances=2", program=program)
    assert done.returncode == 0
    assert done.stderr.count("poprun has started 2 instances, and each runs this program by itself") == 2
    assert "poprun: each of the 2 instances ran the program by itself" in done.stderr


@pytest.mark.thorough
def test_a_session_over_processes_is_not_saved(train: Run) -> None:
    done, _ = train("def in_the_third_run(session, v): session.save('never.session')")
    assert "Session.save: the program runs over several processes" in done.stderr


@pytest.mark.thorough
def test_all_are_stopped_at_once() -> None:
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up'); time.sleep(1000)"
    command = [*POPRUN, "--num-instances=3", sys.executable, "-c", program]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        for _ in range(3):
            process.stdout.readline()
        begin = time.monotonic()
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=LIMIT)
    assert time.monotonic() - begin < 2 * GRACE


@pytest.mark.thorough
def test_an_instance_that_has_ended_may_be_waited_for(poprun: Run, tmp_path: Path) -> None:
    program = f"""
        import os, pathlib, time
        ends = pathlib.Path({str(tmp_path / "ends")!r})
        if os.environ["POPDIST_INSTANCE_INDEX"] == "1":
            ends.touch()
        else:
            while not ends.exists():
                time.sleep(0.01)
            time.sleep(5)
    """
    done = poprun("--num-instances=2", "--timeout=0.3", program=program)
    assert done.returncode == 0
    assert "poprun: instances that have ended: 1; that still run, 0.3 seconds later: 0." in done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_poprun_itself_is_stopped(number: int, tmp_path: Path) -> None:
    """Nothing stays behind, neither if it can still stop the instances nor if it is killed."""
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip("the tests run under nohup, and so does what they start")
    program = textwrap.dedent(TRAIN).replace(
        "{what}",
        f"""import subprocess
started = subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # a worker, say
open({str(tmp_path)!r} + f'/{{me}}', 'w').write(f"{{os.getpid()}} {{started.pid}}")""",
    )
    command = [*POPRUN, "--num-instances=2", sys.executable, "-u", "-c", program]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        assert b"third run" in process.stdout.readline()
        process.send_signal(number)
        process.stdout.read()
        said = process.stderr.read().decode()
        code = process.wait(LIMIT)
    deadline = time.monotonic() + LIMIT / 2
    for number_of_process in (int(text) for index in "01" for text in (tmp_path / index).read_text().split()):
        while _is_alive(number_of_process):
            assert time.monotonic() < deadline, "an instance, or what it has started, has stayed behind"
            time.sleep(0.05)
    if number != signal.SIGKILL:
        assert said.splitlines()[-1] == f"poprun: {signal.Signals(number).name}: all instances are stopped."
        assert code == 128 + number


def _is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
