"""The package `popart`: the names that programs take from it; and device objects, which sessions accept."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import popart
import popxl
from popxl import errors, ops

ROOT = Path(__file__).parents[2]
F32 = popxl.float32


@pytest.fixture
def counter(ir):
    """An Ir with a variable `v`, which is 1 and grows by one in each run."""
    with ir.main_graph:
        ir.v = popxl.variable(1.0, name="v")
        ops.add_(ir.v, popxl.constant(1.0))
    return ir


@pytest.fixture
def uploads(monkeypatch):
    """Counts the uploads of all programs."""
    from runtime.program.store import VariableStore

    original, counted = VariableStore.upload, []
    monkeypatch.setattr(VariableStore, "upload", lambda self, *given: (counted.append(self), original(self, *given))[1])
    return counted


def unplaced(replicas=1, ipu=0):
    ir = popxl.Ir(replicas)
    with ir.main_graph, popxl.ipu(ipu):
        ops.add_(popxl.variable(1.0), popxl.constant(1.0))
    return ir


# Names ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, base",
    [
        ("popart_exception", Exception),
        ("popart_internal_exception", popart.popart_exception),
        ("popart_runtime_error", popart.popart_exception),
        ("poplibs_exception", Exception),
        ("poplar_exception", Exception),
        ("poplar_runtime_error", popart.poplar_exception),
        ("poplar_application_runtime_error", popart.poplar_runtime_error),
    ],
)
def test_errors(name, base):
    assert issubclass(getattr(popart, name), base)
    assert not issubclass(getattr(popart, name), TypeError | ValueError)


def test_errors_on_the_device_are_no_errors_of_the_program():
    assert not issubclass(popart.poplar_exception, popart.popart_exception)


def test_what_building_raises_is_caught(ir):
    with ir.main_graph, pytest.raises(popart.popart_exception):
        popxl.variable(np.ones(3, np.float32)) + popxl.variable(np.ones(2, np.float32))


def test_what_running_raises_is_caught(ir):
    with ir.main_graph:
        stream = popxl.h2d_stream((2,), popxl.float16)
        ops.host_load(stream)
    with popxl.Session(ir) as session, pytest.raises(popart.popart_runtime_error, match="dtype"):
        session.run({stream: [1.0, 2.0]})


def test_what_the_device_raises_is_caught(ir):
    with ir.main_graph:
        scale = popxl.variable(40, popxl.int32)
        ops.pow2scale_cast_to_fp8(popxl.variable([1.0], popxl.float16), scale, popxl.float8_143)
    with popxl.Session(ir) as session, pytest.raises(popart.poplar_application_runtime_error):
        session.run()


def test_every_error_of_ours_has_a_name():
    classes = {e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, Exception)}
    ours = {e for e in classes if not issubclass(e, Warning)}
    assert ours - {getattr(popart, name) for name in popart.__all__} == {
        errors.NonFiniteError,
        errors.UndefinedValue,
        errors.UnreadableFileError,
    }


def test_the_version():
    assert popxl.__version__ in popart.versionString()


# Nobody of ours needs it ----------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_importing_it_starts_no_device():
    program = "import popart\nfrom jax._src import xla_bridge\nassert not xla_bridge.backends_are_initialized()"
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=120, cwd=ROOT)


# Finding devices ------------------------------------------------------------------------------------------------------


def test_a_device_manager():
    manager = popart.DeviceManager()
    cpu, model = manager.createCpuDevice(), manager.createIpuModelDevice({"numIPUs": 4, "tilesPerIPU": 8})
    acquired = manager.acquireAvailableDevice(numIpus=2)
    assert [d.type for d in (cpu, model, acquired)] == [
        popart.DeviceType.Cpu,
        popart.DeviceType.IpuModel,
        popart.DeviceType.Ipu,
    ]
    assert [d.numIpus for d in (cpu, model, acquired)] == [1, 4, 2]
    assert [d.isAttached for d in (cpu, model, acquired)] == [False, False, True]
    assert all(isinstance(d, popart.DeviceInfo) for d in (cpu, model, acquired))
    assert "cpu" in repr(cpu)


def test_all_devices():
    devices = popart.DeviceManager().enumerateDevices()
    assert [d.id for d in devices] == list(range(len(devices)))
    assert len({d.jax_devices for d in devices}) == len(devices) > 0
    assert not any(d.isAttached for d in devices)


def test_attaching_and_detaching():
    device = popart.DeviceManager().createIpuModelDevice({})
    assert device.attach() and device.isAttached
    device.detach()
    assert device.tryAttachUntilTimeout() and device.isAttached
    with device as same:
        assert same is device and device.isAttached
    assert not device.isAttached


def test_a_block_of_a_device_that_fails_detaches():
    device = popart.DeviceManager().acquireAvailableDevice()
    with pytest.raises(ZeroDivisionError), device:
        _ = 1 / 0
    assert not device.isAttached


# Sessions on them -----------------------------------------------------------------------------------------------------


def test_a_session_attaches_a_device_and_leaves_it_detached(counter, uploads):
    device = popart.DeviceManager().createCpuDevice()
    session = popxl.Session(counter, device)
    assert session._device is device and not session.is_attached and not uploads
    with session:
        session.run()
        assert device.isAttached and session.is_attached
    assert not device.isAttached
    assert (counter.v.data, len(uploads)) == (2, 1)


def test_on_an_attached_device_a_session_can_run_at_once(counter, uploads):
    with popart.DeviceManager().acquireAvailableDevice() as device:
        session = popxl.Session(counter, device)
        assert session.is_attached and len(uploads) == 1
        session.run()
        with session:  # transfers nothing, and does not detach
            session.run()
        assert session.is_attached and len(uploads) == 1
        assert session.get_tensor_data(counter.v) == 3
    assert not session.is_attached
    with pytest.raises(ValueError, match="not attached"):
        session.run()


def test_a_device_detached_inside_of_the_block(counter):
    with popxl.Session(counter) as session:
        session.run()
        session._device.detach()
        assert not session.is_attached
    assert counter.v.data == 1  # what the device had is lost
    with session:
        session.run()
    assert counter.v.data == 2


def test_a_device_attached_by_hand_gets_the_program(counter, uploads):
    session = popxl.Session(counter)
    session._device.attach()
    session.run()
    assert (session.get_tensor_data(counter.v), len(uploads)) == (2, 1)


def test_sessions_that_share_a_device(counter):
    device = popart.DeviceManager().createIpuModelDevice()
    first, second = (popxl.Session(counter, device) for _ in range(2))
    with first:
        first.run()
        assert second.is_attached
        with second:
            second.run()
        assert first.is_attached
    assert not second.is_attached


def test_leaving_a_session_from_outside_of_its_block(counter):
    session = popxl.Session(counter, popart.DeviceManager().createIpuModelDevice())
    session.__enter__()
    session.run()
    # what four published pipelines do
    if not session._was_attached_stack.pop():
        session.weights_to_host()
        assert isinstance(session._device, popart.DeviceInfo)
        session._device.detach()
        session._pb_session.setEngineIsLoaded(False)
        session._set_device(session._device)
    assert not session.is_attached and not session.store.is_loaded
    with session:
        session.run()
    assert counter.v.data == 3


def test_the_same_inside_of_the_block(counter):
    with popxl.Session(counter) as session:
        session._was_attached_stack.pop()
        session._device.detach()
    assert not session.is_attached


@pytest.mark.here
def test_another_device_is_refused(counter):
    session = popxl.Session(counter, "ipu_hw")
    with pytest.raises(ValueError, match="another session"):
        session._set_device(popart.DeviceManager().enumerateDevices()[1])


@pytest.mark.here
def test_a_chosen_device(counter):
    device = popart.DeviceManager().enumerateDevices()[3]
    with popxl.Session(counter, device) as session:
        session.run()
        assert session.store.present()[0].devices() == {*device.jax_devices}
    assert counter.v.data == 2


@pytest.mark.parametrize("ipus", [1, 2, 4])
def test_replicas_on_a_device_object(ipus):
    ir = unplaced(replicas=2)
    with popxl.Session(ir, popart.DeviceManager().createIpuModelDevice({"numIPUs": ipus})) as session:
        session.run()
        assert (session.program.layout.replicas.mesh is not None) == (ipus >= 2)
    assert ir.main_graph.variables[0].data == 2


def test_several_devices_on_the_cpu_device():
    with pytest.raises(ValueError, match="2 devices"):
        popxl.Session(unplaced(ipu=1), popart.DeviceManager().createCpuDevice())


@pytest.mark.here
def test_hardware_that_is_not_there(counter):
    with pytest.raises(RuntimeError, match="finds no device"):
        popxl.Session(counter, "tpu")


@pytest.mark.targets
def test_an_offline_device_is_a_target(counter, monkeypatch):
    manager = popart.DeviceManager()
    device = manager.createOfflineIPUDevice({"target": "tpu v5e:2x2", "numIPUs": 1, "ipuVersion": "ipu2"})
    assert (device.type, device.numIpus) == (popart.DeviceType.OfflineIpu, 1)
    assert popxl.Session(counter, device).report.target.chips == 4
    monkeypatch.setenv("POPXL_OFFLINE_DEVICE", "gpu h100:2")
    assert manager.createOfflineIPUDevice().numIpus == 2


@pytest.mark.here
def test_an_offline_device_has_to_be_described():
    with pytest.raises(ValueError, match="nothing says which machine to compile for"):
        popart.DeviceManager().createOfflineIPUDevice({"numIPUs": 2})
    with pytest.raises(ValueError, match="`numIPUs` is 8; tpu v5e:2x2 has 4 chips"):
        popart.DeviceManager().createOfflineIPUDevice({"target": "tpu v5e:2x2", "numIPUs": 8})


def test_the_offline_device_goes_before_a_string(counter, monkeypatch):
    monkeypatch.setenv("POPXL_OFFLINE_DEVICE", "ipu_model")
    assert popxl.Session(counter, "cpu")._device.type is popart.DeviceType.IpuModel
    device = popart.DeviceManager().createCpuDevice()
    assert popxl.Session(counter, device)._device is device
    monkeypatch.setenv("POPXL_OFFLINE_DEVICE", "abacus")
    with pytest.raises(ValueError, match="abacus"):
        popxl.Session(counter, "cpu")


# Debug information ----------------------------------------------------------------------------------------------------


def test_debug_information_in_a_file(tmp_path):
    path = tmp_path / "debug.json"
    popxl.Ir()  # made before: not in the file
    popart.initializePoplarDebugInfo(str(path), "json")

    def build():
        with popxl.Ir().main_graph:
            a, b = popxl.variable(1, name="a"), popxl.variable(2, name="b")
            return a + b  # this line

    build()
    popart.closePoplarDebugInfo()
    content = json.loads(path.read_text())
    (op,) = (record for record in content["contexts"] if record["category"] == "op")
    assert len(content["contexts"]) == 5
    assert (op["layer"], op["api"], op["inputs"], op["outputs"]) == ("popxl", "add", ["a", "b"], ["add_out"])
    file, function = (content["stringTable"][op["location"][name]] for name in ("fileName", "functionName"))
    assert (file, function) == (str(Path(__file__).resolve()), "build")
    assert Path(__file__).read_text().splitlines()[op["location"]["lineNumber"] - 1].endswith("# this line")


def test_debug_information_of_a_call_that_makes_several_ops(tmp_path):
    @popxl.context.op_debug_context
    def squares(x):
        return [x * x, x * x]

    popart.initializePoplarDebugInfo(tmp_path / "first.json")
    popart.initializePoplarDebugInfo(tmp_path / "second.json")  # closes the first
    assert json.loads((tmp_path / "first.json").read_text()) == {"contexts": [], "stringTable": []}
    with popxl.Ir().main_graph:
        squares(popxl.variable(1, name="x"))
    popart.closePoplarDebugInfo()
    popart.closePoplarDebugInfo()
    contexts = json.loads((tmp_path / "second.json").read_text())["contexts"]
    records = [record for record in contexts if record["category"] == "op"]
    assert [(r["api"], r["inputs"], r["outputs"]) for r in records] == [("squares", ["x"], ["mul_out", "mul_out__t0"])]


def test_debug_information_in_another_format(tmp_path):
    with pytest.raises(ValueError, match="'cbor' is not known"):
        popart.initializePoplarDebugInfo(tmp_path / "debug", "cbor")
    with pytest.raises(FileNotFoundError, match="`file_name` is .* there is no folder"):
        popart.initializePoplarDebugInfo(tmp_path / "missing" / "debug.json")
