"""The cache of compiled programs: what is found there, what is not, and what happens to files of no use.

Whether something was compiled is asked of JAX, not of the log: its persistent cache counts hits and misses.
"""

import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.base import log
from popxl.base.container import pack, unpack
from popxl.op import OpKind
from runtime.cpu import flags
from runtime.files.cache import KIND, cache_mode, cached_mode
from runtime.plan import structure
from runtime.targets.devices import find_device

pytestmark = pytest.mark.compiled_whole  # what XLA makes of programs is what is tested

ROOT = Path(__file__).parents[2]
COMPILED, FOUND = "/jax/compilation_cache/cache_misses", "/jax/compilation_cache/cache_hits"

_events: list[str] = []
jax.monitoring.register_event_listener(lambda event, **_: _events.append(event))  # listeners cannot be taken back


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    monkeypatch.setattr(log, "_chosen", {"all": log.LEVELS["DEBUG"]})
    monkeypatch.delenv("POPART_CACHE_DIR", raising=False)
    monkeypatch.setenv("POPXL_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Program:
    """Stores `v` to `out`, and adds to it."""

    def __init__(self, value=1.0, step=0.5, replicas=1, calls="auto", add=None, transfers=1):
        self.ir = popxl.Ir(replicas)
        self.ir.options.calledGraphs = calls
        self.ir.num_host_transfers = transfers

        def layer(v):
            return ops.cos(ops.sin(v)) + step

        with self.ir.main_graph, popxl.in_sequence():
            self.v = popxl.variable(value, popxl.float32, name="v")
            self.out = popxl.d2h_stream((), popxl.float32)
            ops.host_store(self.out, self.v)
            y = self.v * 0
            for _ in range(3):
                (y,) = ops.call(self.ir.create_graph(layer, y), y)
            ops.add_(self.v, y if add is None else add(y))

    def outputs(self, device="ipu_hw"):
        """What three runs give, the variable being written before the second and the third."""
        with popxl.Session(self.ir, device) as session:
            found = [float(np.ravel(session.run()[self.out])[0])]
            for value in (2, 3):
                session.write_variable_data(self.v, value)
                found.append(float(np.ravel(session.run()[self.out])[0]))
        return found


def first_word(line):
    return next((word for word in ("Starting", "Loading") if f"{word} " in line), None)


@pytest.fixture
def session(capfd):
    """`session(program)` gives what its session says, and whether XLA compiled something and found something.

    As if it were a new process: executables that this one knows are forgotten.
    """

    def session(program, device="ipu_hw"):
        structure.clear_cache()
        _events.clear()
        capfd.readouterr()
        assert program.outputs(device)[1:] == [2, 3]
        lines = capfd.readouterr().err.splitlines()
        said = [line for line in lines if "Starting compilation" in line or "Loading serialized" in line]
        assert len(said) == 1
        return lines, COMPILED in _events, FOUND in _events

    return session


def files(folder):
    return sorted(folder.glob("*.popef"))


KINDS = [
    {"calls": calls, "replicas": replicas} for calls in ("kept", "dispatched", "inlined") for replicas in (1, 2, 9)
]  # on one device, on a device for each, and several on one


@pytest.mark.thorough(but_each=4)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind['calls']}-{kind['replicas']}")
def test_the_second_session_compiles_nothing(kind, session, folder):
    lines, compiled, found = session(Program(**kind))
    assert (compiled, found) == (True, False)
    assert any("Starting compilation" in line for line in lines)
    (file,) = files(folder)
    lines, compiled, found = session(Program(value=7, **kind))
    assert (compiled, found) == (False, True)
    listed = [line.split(" ")[-1] for line in lines if "PopEF file inferred to have hash" in line]
    (loaded,) = [line.split(" ")[-1] for line in lines if "Loading serialized PopART executable" in line]
    assert listed == [str(file)] == [loaded]
    assert files(folder) == [file]


def test_a_file_is_enough_for_a_new_process_whichever_program_wrote_it(folder, session):
    """What XLA compiles once a process, to know its options, is in no file."""
    session(Program(step=0.25))
    session(Program())  # the second of its process
    flags.compile_options.cache_clear()  # as in a new one
    lines, _, found = session(Program())
    assert found and any("Loading serialized" in line for line in lines)
    assert not any("Ignoring cache file" in line for line in lines) and len(files(folder)) == 2


@pytest.mark.here
@pytest.mark.thorough(but_each=2)
@pytest.mark.parametrize("calls", ["kept", "dispatched"])
def test_replicas_that_talk_on_several_cpus_are_not_kept(calls, folder, tmp_path, session):
    """XLA loses the order in which they do, and the process would hang, or end."""

    def program(replicas):
        return Program(calls=calls, replicas=replicas, add=ops.collectives.replicated_all_reduce)

    for _ in range(2):
        lines, _, found = session(program(2))
        assert not found and any("Starting compilation" in line for line in lines)
    assert not files(folder)
    session(program(9))  # on one device, where nobody waits
    assert len(files(folder)) == 1

    talking = program(2)
    with popxl.Session(talking.ir, "ipu_model") as saved:
        saved.save(tmp_path / "file")
        expected = [saved.run()[talking.out].tolist() for _ in range(3)]
    with popxl.Session.load(tmp_path / "file") as loaded:
        (out,) = loaded.create_host_outputs()
        assert [loaded.run()[out].tolist() for _ in range(3)] == expected


@pytest.mark.thorough(but_each=2, rotated=True)
@pytest.mark.parametrize("calls", ["kept", "dispatched"])
def test_remote_buffers(calls, folder):
    from tests.popxl.test_session_files import remote_program

    found = []
    for _ in range(2):
        structure.clear_cache()
        _events.clear()
        ir = remote_program(calls, 2)
        with popxl.Session(ir, "ipu_hw") as session:
            session.run()
        found.append([v.data.tolist() for v in ir.main_graph.variables])
    assert COMPILED not in _events and found[0] == found[1]
    assert len(files(folder)) == 1


def change(**options):
    def changed(program):
        for name, value in options.items():
            setattr(program.ir.options, name, value)
        return program

    return changed


OTHERS = {
    "constant": lambda: Program(step=0.25),
    "replicas": lambda: Program(replicas=2),
    "transfers": lambda: Program(transfers=2),
    "calls": lambda: Program(calls="inlined"),
    "op": lambda: Program(add=ops.abs),
    "engine options": lambda: change(engineOptions={"debug": "true"})(Program()),
    "partials": lambda: change(partialsTypeMatMuls="half")(Program()),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
@pytest.mark.filterwarnings("ignore::popxl.errors.UnusedTransferWarning")  # the program is to differ by that alone
def test_another_program_has_another_file(other, session, folder):
    session(Program())
    program = other()
    structure.clear_cache()
    popxl.Session(program.ir, "ipu_hw")
    assert len(files(folder)) == 2


@pytest.mark.parametrize("same", [change(logDir="elsewhere"), change(dotChecks={"x"})])
def test_what_makes_no_difference(same, session, folder):
    session(Program())
    _, compiled, _ = session(same(Program()))
    assert not compiled and len(files(folder)) == 1


@pytest.mark.here
def test_only_hardware(session, folder):
    for device in ("cpu", "ipu_model"):
        session(Program(), device)
    assert not folder.exists()


def test_off(session, folder):
    session(change(enableEngineCaching=False)(Program()))
    assert not folder.exists()


def test_a_folder_of_the_options(session, folder, monkeypatch, tmp_path):
    monkeypatch.delenv("POPXL_CACHE_DIR")
    elsewhere = tmp_path / "a folder" / "of mine"
    session(change(enableEngineCaching=True, cachePath=str(elsewhere))(Program()))
    assert len(files(elsewhere)) == 1


@pytest.mark.thorough(but_each=4)
@pytest.mark.parametrize("calls", ["kept", "dispatched"])
@pytest.mark.parametrize("damage", ["empty", "text", "short", "changed", "named otherwise", "of another kind"])
def test_damaged_files_are_ignored(damage, calls, session, folder):
    session(Program(calls=calls))
    (file,) = files(folder)
    content = file.read_bytes()
    line = content.index(b'"jit_')  # the name of a part
    flipped = content[:-20] + bytes([content[-20] ^ 1]) + content[-19:]
    bad = {
        "empty": b"",
        "text": b"not a program\n",
        "short": content[:-1],
        "changed": flipped,
        "named otherwise": content[: line + 5] + b"X" + content[line + 6 :],
        "of another kind": pack("something", {}, {"a": b"b"}),
    }[damage]
    file.write_bytes(bad)
    lines, compiled, _ = session(Program(calls=calls))
    assert compiled and any("[warn] Ignoring cache file because it does not contain" in line for line in lines)
    assert not session(Program(calls=calls))[1]  # it has been written again


def test_a_file_of_another_program(session, folder):
    session(Program(step=0.25))
    (other,) = files(folder)
    session(Program())
    (file,) = {*files(folder)} - {other}
    file.write_bytes(other.read_bytes())
    lines, compiled, _ = session(Program())
    assert compiled and any("Cache file hash did not match the IR hash" in line for line in lines)


def test_parts_cannot_leave_their_folder(session, folder, tmp_path):
    session(Program())
    (file,) = files(folder)
    about, parts = unpack(KIND, file.read_bytes())
    file.write_bytes(pack(KIND, about, {f"../../{tmp_path.name}/{name}": part for name, part in parts.items()}))
    session(Program())
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_files_may_be_deleted(session, folder):
    session(Program())
    files(folder)[0].unlink()
    assert session(Program())[1]
    assert len(files(folder)) == 1


def test_a_folder_that_cannot_be_written(session, folder):
    folder.write_text("a file is in the way")
    lines, compiled, _ = session(Program())
    assert compiled and any("[warn]" in line for line in lines)


def test_an_op_whose_function_has_changed(session, folder):
    """The names are the same, and what XLA compiles is not."""

    def program(function):
        kind = OpKind("Cached", function, key="tests.Cached")
        return Program(add=kind)

    session(program(lambda t: t * 2))
    assert not session(program(lambda t: t * 2))[1]
    lines, compiled, _ = session(program(lambda t: t * 3))
    assert compiled and any("does not contain all that the program now needs" in line for line in lines)
    assert len(files(folder)) == 1


def test_programs_that_print_are_not_kept(session, folder):
    for _ in range(2):
        assert session(Program(add=ops.print_tensor))[0]
    assert not files(folder)


def test_an_op_that_cannot_be_saved(session, folder):
    kind = OpKind("Uncached", lambda t, *, what: t)
    lines, _, _ = session(Program(add=lambda t: kind(t, what=object)))
    assert any("The cache is not used" in line for line in lines)
    assert not folder.exists()


def test_preloading(session, folder, monkeypatch):
    monkeypatch.setenv("POPART_PRELOAD_POPEF", "full-preload")
    session(Program())
    lines, _, _ = session(Program())
    for fragment in ("Performing preload of popef file", "Completed preload of popef file"):
        assert sum(fragment in line for line in lines) == 1


def test_the_cache_of_jax_is_as_it_was(session, tmp_path):
    names = [name for name in jax.config.values if "compilation_cache" in name or "persistent_cache" in name]
    before = {name: jax.config.values[name] for name in names}
    session(Program())
    assert {name: jax.config.values[name] for name in names} == before
    with pytest.raises(popxl.errors.PopxlError):
        popxl.Session(Program(add=lambda t: ops.cast(t, popxl.complex64)).ir, "ipu_hw")
    assert {name: jax.config.values[name] for name in names} == before


@pytest.mark.thorough(but_each=2)
@pytest.mark.parametrize("calls, replicas", [("kept", 1), ("dispatched", 2)])
def test_across_processes(calls, replicas, folder):
    program = (
        "import jax\nevents = []\njax.monitoring.register_event_listener(lambda event, **_: events.append(event))\n"
        "from tests.popxl.test_cache import COMPILED, FOUND, Program\n"
        f"program = Program(calls={calls!r}, replicas={replicas})\n"
        "assert program.outputs() == [1, 2, 3]\n"
        "print(COMPILED in events, FOUND in events)\n"
    )

    def process():
        command = [sys.executable, "-c", program]
        return subprocess.run(command, check=True, timeout=120, cwd=ROOT, capture_output=True, text=True).stdout

    assert process() == "True False\n"
    assert process() == "False True\n"
    assert len(files(folder)) == 1


def test_the_way_that_was_the_best_is_kept(folder, capfd):
    """Of a program, and of no other; what is no such file is ignored."""
    ir, other = Program().ir, Program(step=0.25).ir
    device = find_device("ipu_hw", ir)
    assert cached_mode(ir, device) is None
    cache_mode(ir, device, "rolled")
    assert cached_mode(ir, device) == "rolled" and cached_mode(other, device) is None
    (file,) = folder.glob("*.way")
    file.write_bytes(b"inlined")
    assert cached_mode(ir, device) is None
    assert f"does not say how to compile: {file}" in capfd.readouterr().err
    assert cached_mode(ir, find_device("cpu", ir)) is None  # as nothing is kept for it
