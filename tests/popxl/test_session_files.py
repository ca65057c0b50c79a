"""Compiled sessions in files: another process runs them, without tracing and without compiling."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.base import log
from popxl.base.container import FORMAT, pack, unpack
from popxl.errors import PopxlError
from popxl.op import OpKind
from runtime.files.session_files import KIND
from runtime.plan import structure

ROOT = Path(__file__).parents[2]
WORK = "/jax/core/compile/"  # what JAX calls tracing, lowering and compiling

_events: list[str] = []
jax.monitoring.register_event_duration_secs_listener(lambda event, *_, **__: _events.append(event))


def worked():
    """Whether JAX has traced, lowered or compiled anything since the last call."""
    found = [event for event in _events if event.startswith(WORK)]
    _events.clear()
    return bool(found)


def program(calls="kept", replicas=1, transfers=1, wide=False):
    """`y = layer(layer(x)) * v + k`, in which `v` grows, `k` does not, and `w` differs from replica to replica."""
    ir = popxl.Ir(replicas)
    ir.options.calledGraphs = calls
    ir.num_host_transfers = transfers
    dtype = popxl.float64 if wide else popxl.float32

    def layer(x):
        return ops.sin(x) + ops.cos(x)

    with ir.main_graph, popxl.in_sequence():
        x_in, y_out = popxl.h2d_stream((2, 3), dtype, "x"), popxl.d2h_stream((2, 3), dtype, "y")
        v = popxl.variable(np.ones(3), dtype, name="v", downcast=False)
        k = popxl.variable(np.arange(6).reshape(2, 3), dtype, name="k", downcast=False)
        own = ir.replica_grouping(group_size=1)
        w = popxl.variable(
            np.arange(replicas) if replicas > 1 else np.float64(0),
            dtype,
            name="w",
            downcast=False,
            replica_grouping=own,
        )

        def turn():
            x = ops.host_load(x_in)
            for _ in range(2):
                (x,) = ops.call(ir.create_graph(layer, x), x)
            ops.host_store(y_out, x * v + k + w)

        for _ in range(transfers):
            turn()
        ops.add_(v, popxl.constant(0.5, dtype))
    return ir


def feed(session):
    (x_in,) = session.expected_inputs()
    shape = session.host_shape(x_in.shape)
    return {x_in: np.linspace(0, 1, int(np.prod(shape))).reshape(shape).astype(x_in.dtype.as_numpy())}


def runs(session, times=2):
    with session:
        inputs = feed(session)
        found = [np.array(*session.run(inputs, downcast_inputs=False).values()) for _ in range(times)]
    return [*found, *(session.get_tensor_data(v).copy() for v in session.ir.main_graph.variables)]


KINDS = [
    {"calls": calls, "replicas": replicas, "transfers": transfers}
    for calls in ("kept", "dispatched")
    for replicas, transfers in ((1, 1), (1, 3), (2, 1), (2, 3), (9, 1))
]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "program.session"


@pytest.mark.thorough(but_each=3)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_what_is_loaded_runs_as_what_was_saved(kind, path):
    session = popxl.Session(program(**kind), "ipu_hw")
    runs(session, 1)
    session.save(path)
    expected = runs(session)
    assert worked()
    structure.clear_cache()
    loaded = popxl.Session.load(path)
    assert str(loaded.ir) == str(session.ir)
    assert loaded.program.layout.mode == session.program.layout.mode
    found = runs(loaded)
    assert not worked()
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert loaded.program.temporaries() == session.program.temporaries()
    assert loaded.program.text()


def remote_program(calls, replicas):
    """Each of two slots of a remote buffer is loaded, changed by a graph, and stored."""
    ir = popxl.Ir(replicas)
    ir.options.calledGraphs = calls

    def update(t):
        return ops.sin(t) + ops.cos(t)

    with ir.main_graph, popxl.in_sequence():
        buffer = popxl.remote_buffer((4,), popxl.float32, 2)
        for k in range(2):
            popxl.remote_variable(np.full(4, k + 1, np.float32), buffer, k, name=f"remote{k}")
            t = ops.remote_load(buffer, k)
            (t,) = ops.call(ir.create_graph(update, t), t)
            ops.remote_store(buffer, k, t)
    return ir


@pytest.mark.thorough(but_each=4)
@pytest.mark.parametrize("replicas", [1, 2, 9])
@pytest.mark.parametrize("calls", ["kept", "dispatched"])
def test_remote_buffers(calls, replicas, path):
    """Where the arrays are, on the device or with the host, is kept too."""

    def after_two_runs(session):
        with session:
            session.run()
            kinds = [array.sharding.memory_kind for array in session.store.present()]
            session.run()
        return kinds, [session.get_tensor_data(v).tolist() for v in session.ir.main_graph.variables]

    session = popxl.Session(remote_program(calls, replicas), "ipu_hw")
    session.save(path)
    expected = after_two_runs(session)
    structure.clear_cache()
    loaded = popxl.Session.load(path)
    worked()
    assert after_two_runs(loaded) == expected


def test_64_bits(path):
    session = popxl.Session(program(wide=True))
    session.save(path)
    expected, found = runs(session), runs(popxl.Session.load(path))
    assert found[0].dtype == np.float64
    np.testing.assert_array_equal(found[0], expected[0])


@pytest.mark.thorough(but_each=2)
@pytest.mark.parametrize("calls, replicas", [("kept", 1), ("dispatched", 2)])
def test_in_another_process(calls, replicas, path):
    session = popxl.Session(program(calls, replicas), "ipu_hw")
    session.save(path)
    expected = [array.tolist() for array in runs(session)]
    code = (
        "import json, popxl\n"
        "from tests.popxl.test_session_files import runs, worked\n"
        f"found = runs(popxl.Session.load({str(path)!r}))\n"
        "assert not worked()\n"
        "print(json.dumps([array.tolist() for array in found]))\n"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    found = subprocess.run(command, check=True, timeout=120, cwd=ROOT, capture_output=True, text=True).stdout
    assert json.loads(found) == expected


def test_it_can_be_saved_again(path, tmp_path):
    popxl.Session(program()).save(path)
    first = popxl.Session.load(path)
    runs(first)
    first.save(tmp_path / "again")
    second = popxl.Session.load(tmp_path / "again")
    for one, other in zip(runs(second), runs(first), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.thorough(but_each=2, rotated=True)
@pytest.mark.parametrize("calls", ["kept", "dispatched"])
def test_what_came_from_a_cache_can_be_saved(calls, path, tmp_path):
    """XLA cannot write what it has loaded."""

    def session():
        structure.clear_cache()
        ir = program(calls)
        ir.options.enableEngineCaching, ir.options.cachePath = True, str(tmp_path / "cache")
        return popxl.Session(ir, "ipu_hw")

    assert session().program.is_serializable
    cached = session()
    assert not cached.program.is_serializable
    ir = program(calls)
    sharing = popxl.Session(ir, "ipu_hw")  # has the pieces of the one before
    assert sharing.program.is_serializable == (calls == "kept")
    expected = runs(popxl.Session(program(calls), "ipu_hw"))
    for found in (cached, sharing):
        found.save(path)
        structure.clear_cache()
        for one, other in zip(runs(popxl.Session.load(path)), expected, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.thorough
def test_what_came_from_the_cache_of_jax_can_be_saved(path, tmp_path):
    code = (
        "import jax, popxl\n"
        f"jax.config.update('jax_compilation_cache_dir', {str(tmp_path / 'cache')!r})\n"
        "jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)\n"
        "from tests.popxl.test_session_files import program, runs\n"
        f"popxl.Session(program()).save({str(path)!r})\n"
        f"runs(popxl.Session.load({str(path)!r}))\n"
    )
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code], check=True, timeout=120, cwd=ROOT)
    assert [*(tmp_path / "cache").iterdir()]


def test_the_values_on_the_device_are_saved(path):
    with popxl.Session(program()) as session:
        session.run(feed(session))
        session.save(path)
    loaded = popxl.Session.load(path)
    v = loaded.ir.main_graph.get_tensor("v")
    assert loaded.get_tensor_data(v).tolist() == [1.5] * 3
    loaded.write_variable_data(v, np.zeros(3, np.float32))
    with loaded:
        loaded.run(feed(loaded))
    assert loaded.get_tensor_data(v).tolist() == [0.5] * 3


@pytest.mark.here
def test_arguments_of_load(path):
    popxl.Session(program(), "ipu_model").save(path)
    loaded = popxl.Session.load(path, weights_to_host_on_exit=False)
    assert (loaded._device.name, loaded.weights_to_host_on_exit) == ("ipu_model", False)
    loaded = popxl.Session.load(path, "cpu")
    assert (loaded._device.name, loaded.weights_to_host_on_exit) == ("cpu", True)


def test_a_device_of_more_devices_than_replicas(path):
    from runtime.targets.devices import DeviceCount, model_device

    popxl.Session(program(replicas=2), model_device(DeviceCount(4))).save(path)
    assert runs(popxl.Session.load(path, model_device(DeviceCount(4))))
    with pytest.raises(PopxlError, match="kinds"):
        popxl.Session.load(path, "ipu_model")


def test_a_subclass(path):
    class Mine(popxl.Session):
        pass

    popxl.Session(program()).save(path)
    assert type(Mine.load(path)) is Mine


def test_it_says_so(path, capfd, monkeypatch):
    popxl.Session(program()).save(path)
    monkeypatch.setattr(log, "_chosen", {"all": log.LEVELS["DEBUG"]})
    popxl.Session.load(path)
    (line,) = (each for each in capfd.readouterr().err.splitlines() if "cpu_aot_loader" not in each)  # of JAX 0.10.1
    assert "Loading serialized PopART executable" in line and line.endswith(f" {path}")


# What cannot be ------------------------------------------------------------------------------------------------------


def test_an_ir_that_has_changed(path):
    ir = program()
    session = popxl.Session(ir)
    with ir.main_graph:
        popxl.constant(1) + 1
    with pytest.raises(PopxlError, match="has changed"):
        session.save(path)
    assert not path.exists()


def test_a_program_that_prints(path, ir):
    with ir.main_graph:
        ops.print_tensor(popxl.variable(1.0) + 1)
    with pytest.raises(PopxlError, match="calls back into Python"):
        popxl.Session(ir).save(path)
    assert not path.exists()


def test_an_op_that_cannot_be_saved(path, ir):
    with ir.main_graph:
        OpKind("Unsaved", lambda t, *, what: t)(popxl.variable(1.0), what=object)
    with pytest.raises(PopxlError, match="cannot be saved"):
        popxl.Session(ir).save(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}\n",
        b"\x80\x04\x95\n",
        b'{"kind": "popxl executables", "format": 1, "about": {}, "sizes": {}, "digest": ""}\n',
        f'{{"kind": "popxl session", "format": {FORMAT + 1}, "about": {{}}, "sizes": {{}}, "digest": ""}}\n'.encode(),
    ],
)
def test_files_of_another_kind(content, path):
    path.write_bytes(content)
    with pytest.raises(ValueError, match="holds no session that can be read"):
        popxl.Session.load(path)


@pytest.mark.parametrize("at", [0, 10, 100, 300, 1000, 3000, -1000, -1])
def test_damaged_files(at, path):
    popxl.Session(program()).save(path)
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="holds no session that can be read"):
        popxl.Session.load(path)


def test_a_file_that_is_not_there(path):
    with pytest.raises(ValueError, match="No such file"):
        popxl.Session.load(path)


@pytest.mark.here
@pytest.mark.parametrize(
    "what, value, told",
    [
        ("jax", "0.0.1", "jax: '0.0.1' in the file"),
        ("jaxlib", "0.0.1", "jaxlib"),
        ("popxl", "0.0.0", "popxl"),
        ("platform", "tpu", "platform: 'tpu' in the file, 'cpu' here"),
        ("kinds", ["TPU v9"], "TPU v9"),
        ("processor", "abacus", "abacus"),
    ],
)
def test_compiled_for_something_else(what, value, told, path):
    popxl.Session(program()).save(path)
    about, parts = unpack(KIND, path.read_bytes())
    about["target"][what] = value
    path.write_bytes(pack(KIND, about, parts))
    with pytest.raises(PopxlError, match=f"{told}.*Compile it again"):
        popxl.Session.load(path)


def test_versions_come_first(path):
    """Those who wrote the file may have written it in another way."""
    popxl.Session(program()).save(path)
    about, parts = unpack(KIND, path.read_bytes())
    about["target"] = {"popxl": "9.9", "jax": jax.__version__, "jaxlib": "1.0", "weather": "fine"}
    path.write_bytes(pack(KIND, about, {"ir": b"something else", **parts}))
    with pytest.raises(PopxlError, match="compiled by other versions: popxl: '9.9' in the file, .*; jaxlib: '1.0'"):
        popxl.Session.load(path)


@pytest.mark.thorough
def test_another_number_of_devices(path):
    popxl.Session(program(replicas=2), "ipu_hw").save(path)
    code = f"import popxl\npopxl.Session.load({str(path)!r})"
    command = [sys.executable, "-c", f"import os; os.environ['POPXL_CPU_DEVICES'] = '1'\n{code}"]
    done = subprocess.run(command, timeout=120, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode and "kinds: ['cpu', 'cpu'] in the file, ['cpu'] here" in done.stderr
