"""Sessions with named streams and state: counting runs, checkpoints, and what does not fit."""

import contextlib
import json
import logging
import os
import subprocess
import sys
import textwrap
import threading
import time
import types
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl.base.atomic_files import ReplacedError
from popxl.extend.sessions import SessionParts
from popxl_addons import checkpoint, task_session
from popxl_addons.task_session import TaskSession, initialise_memmap_dir_from_checkpoint, write_variables_pb


class Model(addons.Module):
    """Adds its input to its state, and returns the sum of the weights with it."""

    def __init__(self, features=3):
        super().__init__()
        self.features = features

    def build(self, x):
        w = self.add_variable_input("fc.w", lambda: np.zeros((2, self.features)), popxl.float32, by_ref=True)
        b = self.add_variable_input("fc.b", lambda: np.ones(2), popxl.float16, overwrite=True)
        w += x
        return ops.sum(w) + ops.cast(ops.sum(b), popxl.float32)


def make(features=3, cls=TaskSession, pick=lambda state: state, **kwargs):
    """A session of a program with a state, a variable outside of it, an input and an output."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        inputs = addons.InputStreams(x=((), popxl.float32))
        outputs = addons.OutputStreams(y=((), popxl.float32))
        x = ops.host_load(inputs.x)
        facts, graph = Model(features).create_graph(x)
        variables = facts.init()
        other = popxl.variable(0.0, popxl.float32, "other")
        (y,) = graph.bind(variables).call(x)
        ops.host_store(outputs.y, y)
        other += 1.0
    session = cls(inputs, outputs, pick(addons.NamedTensors(fwd=variables)), ir=ir, **kwargs)
    session.other = other
    return session


def run(session, *values):
    for value in values:
        session.run({session.inputs.x: np.float32(value)})


def weights(session):
    return np.array(session.get_named_tensors_data().fwd.fc.w)


# Running ------------------------------------------------------------------------------------------------------------


def test_streams_and_state(caplog):
    with caplog.at_level(logging.INFO):
        session = make()
    assert "PopXL compilation" in caplog.text
    assert isinstance(session, popxl.Session) and session.inputs.x is session.inputs[0]
    assert "fwd" in session.state and session.state.keys_flat() == ["fwd.fc.b", "fwd.fc.w"]
    assert session.session_state == {"steps": 0}
    with session:
        outputs = session.run({session.inputs[0]: np.float32(2)})
        assert outputs[session.outputs.y] == 6 * 2 + 2
    assert session.session_state == {"steps": 1}
    session.state = session.state.fwd
    assert session.get_named_tensors_data().keys() == ["fc"]


def test_the_state_has_names():
    with pytest.raises(TypeError, match="`state` is a dict, expected NamedTensors"):
        make(pick=lambda state: dict(state.to_dict()))
    session = make()
    with pytest.raises(TypeError, match="`state` is a list, expected NamedTensors"):
        session.state = [session.state.fwd]
    session.state = session.state.fwd
    assert session.state.keys() == ["fc"]


def test_the_state_can_be_saved():
    """Else nobody would know before the first checkpoint, maybe hours later."""
    with popxl.Ir().main_graph:
        facts, graph = Model().create_graph(popxl.TensorSpec((), popxl.float32))
        elsewhere = popxl.variable(1.0, name="elsewhere")
    for leaf in (facts.fc.w, graph.args.fc.w, 3, np.ones(2)):
        with pytest.raises(TypeError, match=r"`state` must be .*`facts\.init\(\)` is; `w` is "):
            make(pick=lambda state, leaf=leaf: addons.NamedTensors(b=state.fwd.fc.b, w=leaf))
    with pytest.raises(ValueError, match="elsewhere.* another program"):
        make(pick=lambda state: addons.NamedTensors(w=elsewhere))
    session = make()
    state = session.state
    with pytest.raises(TypeError, match="`fc.w` is .*, `fc.b` is "):
        session.state = graph.args
    assert session.state is state


@pytest.mark.parametrize("kind", [list, dict.fromkeys])
def test_streams_of_other_kinds(ir, kind):
    _, x_stream, x = addons.host_load(0.0, popxl.float32, "x")
    y_stream = addons.host_store(x + 1.0)
    session = TaskSession(kind([x_stream]), kind([y_stream]), addons.NamedTensors(), ir=ir, device_desc="ipu_hw")
    assert isinstance(session.inputs, addons.InputStreams) and session.inputs["x_stream"] is x_stream
    assert isinstance(session.outputs, addons.OutputStreams) and list(session.outputs) == [y_stream]


def test_runs_are_counted_before_they_are_made():
    session = make()
    with pytest.raises(ValueError, match="not attached"):
        run(session, 1)
    assert session.session_state["steps"] == 1
    with session:
        run(session, 1, 2)
        session.run_with_outputs({session.inputs.x: 3.0}, session.create_host_outputs())
    assert session.session_state["steps"] == 4
    session.session_state = {"lr": 1}
    with session:
        run(session, 1)
    assert session.session_state == {"lr": 1, "steps": 1}


def test_values_of_the_state_by_name():
    session = make()
    with session:
        run(session, 1, 2)
        data = session.get_named_tensors_data()
    assert isinstance(data, addons.named_tensors.NamedTensorData)
    np.testing.assert_array_equal(data.fwd.fc.w, np.full((2, 3), 3.0))
    assert data["fwd.fc.b"].dtype == np.float16


def test_grouped_variables_have_a_leading_dimension(tmp_path):
    ir = popxl.Ir(replication=4)
    with ir.main_graph:
        group = ir.replica_grouping(group_size=2)
        v = popxl.variable(np.arange(6).reshape(2, 3), popxl.float32, "v", replica_grouping=group)
        v += 1.0
    state = addons.NamedTensors(v=v)
    with TaskSession([], [], state, ir=ir, device_desc="ipu_hw") as session:
        session.run()
        np.testing.assert_array_equal(session.get_named_tensors_data().v, np.arange(6).reshape(2, 3) + 1)
        session.save_checkpoint(tmp_path / "c")
        session.run()
        session.load_checkpoint(tmp_path / "c", report_missing="error")
        session.run()
        np.testing.assert_array_equal(session.get_named_tensors_data().v, np.arange(6).reshape(2, 3) + 2)


def test_constants_of_the_state_are_saved_and_stay(tmp_path):
    ir = popxl.Ir()
    with ir.main_graph:
        v, offsets = popxl.variable(0.0, name="v"), popxl.constant([3, 4], popxl.int32)
        v += 1.0
    state = addons.NamedTensors(v=v, offsets=offsets)
    with TaskSession([], [], state, ir=ir) as session:
        session.run()
        session.save_checkpoint(tmp_path / "c")
        session.run()
        session.load_checkpoint(tmp_path / "c", report_missing="error")
        session.run()
        data = session.get_named_tensors_data()
        other = TaskSession([], [], state, ir=ir)
        other.load_from_session(session, report_missing="error")
    assert data.v == 2 and data.offsets.tolist() == [3, 4]
    assert np.load(tmp_path / "c" / "model" / "offsets.npz")["offsets"].tolist() == [3, 4]


@pytest.mark.parametrize("dtype", [popxl.int8, popxl.uint8])
@pytest.mark.parametrize("format", ["npz", "safetensors"])
def test_bytes_that_popxl_does_not_read_back(tmp_path, dtype, format):
    def of(values):
        ir = popxl.Ir()
        with ir.main_graph:
            v = popxl.variable(values, dtype, "v")
            ops.add_(v, popxl.constant(1, dtype))
        return v, TaskSession([], [], addons.NamedTensors(v=v), ir=ir)

    _, session = of([1, 2])
    with session:
        session.run()
        session.save_checkpoint(str(tmp_path), format)
    v, session = of([7, 8])
    with session:
        session.load_checkpoint(str(tmp_path), "error")
        session.run()
        assert session.values_of([v])[v].tolist() == [3, 4]


def test_what_a_constructor_refuses():
    with pytest.raises(ValueError, match="`max_checkpoints` is 0; expected at least 1"):
        make(max_checkpoints=0)
    ir = popxl.Ir()
    with ir.main_graph:
        stream = addons.host_store(popxl.variable(1.0) + 1)
    with pytest.raises(TypeError, match=r"`max_checkpoints` is Ir\[.*by name: .*ir=ir"):
        TaskSession([], [stream], addons.NamedTensors(), ir)
    with pytest.raises(TypeError, match="InputStreams: DeviceToHostStream .* is no HostToDeviceStream"):
        TaskSession([stream], [], addons.NamedTensors(), ir=ir)
    with pytest.raises(NotImplementedError, match=r"popxl\.Session\.load"):
        TaskSession.load("file")


# Checkpoints --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [{}, {"format": "safetensors"}])
@pytest.mark.parametrize("attached", [True, False])
def test_save_and_load(tmp_path, arguments, attached):
    place = str(tmp_path / "checkpoints/step_2")
    session = make()
    with session:
        run(session, 1, 2)
        session.add_session_state_info({"lr": 0.1})
        session.save_checkpoint(place, **arguments)
        run(session, 10)
    other = make()
    other.add_session_state_info({"lr": 0.0})
    if not attached:
        other.load_checkpoint(place, report_missing="error")
    with other:
        if attached:
            run(other, 100)
            other.load_checkpoint(place, report_missing="error")
        run(other, 4)
        np.testing.assert_array_equal(weights(other), np.full((2, 3), 7.0))
        assert other.get_tensor_data(other.other) == (2 if attached else 1)  # not in the state: as it was
    assert other.session_state == {"steps": 3, "lr": 0.1}
    np.testing.assert_array_equal(weights(session), np.full((2, 3), 13.0))


def test_layout(tmp_path):
    session = make()
    session.save_checkpoint(str(tmp_path / "c"))
    assert sorted(os.listdir(tmp_path / "c/model")) == ["fwd.fc.b.npz", "fwd.fc.w.npz"]
    assert json.loads((tmp_path / "c/session_info.json").read_text()) == {"steps": 0}
    with np.load(tmp_path / "c/model/fwd.fc.b.npz", allow_pickle=False) as file:
        assert file.files == ["fwd.fc.b"] and file["fwd.fc.b"].dtype == np.float16


def test_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    session = make()
    session.save_checkpoint("~/c")
    session.load_checkpoint("~/c", "error")
    assert os.listdir(tmp_path) == ["c"]


def test_saving_again_to_one_directory(tmp_path):
    session = make()
    with session:
        for value in (1, 2, 3):
            run(session, value)
            session.save_checkpoint(tmp_path / "c")
    assert os.listdir(tmp_path) == ["c"]
    other = make()
    other.load_checkpoint(tmp_path / "c", "error")
    np.testing.assert_array_equal(weights(other), np.full((2, 3), 6.0))


def test_numbers_to_begin_with_are_not_made_to_be_replaced(tmp_path, monkeypatch):
    """Neither when a checkpoint is loaded before the session is entered, nor when others give the values."""

    def program():
        ir = popxl.Ir()
        with ir.main_graph:
            v = popxl.variable(popxl.initial.normal((3, 4), seed=1), popxl.float32, "v")
            v += 1.0
        return TaskSession([], [], addons.NamedTensors(v=v), ir=ir)

    with program() as source:
        source.save_checkpoint(tmp_path / "c")
        expected = source.get_named_tensors_data().v.copy()
    monkeypatch.setattr(popxl.initial.Random, "elements", None)
    for load in (lambda s: s.load_checkpoint(tmp_path / "c"), lambda s: s.load_from_session(source)):
        load(session := program())
        np.testing.assert_array_equal(session.get_named_tensors_data().v, expected)
        with session:
            session.run()
        np.testing.assert_array_equal(session.get_named_tensors_data().v, expected + 1)
    given = np.zeros((3, 4), np.float32)
    (session := program()).write_variable_data(session.state.v, given)
    given[:] = 7
    assert not session.get_named_tensors_data().v.any()
    np.testing.assert_array_equal(source.get_named_tensors_data().v, expected)


def test_what_is_replaced_while_it_is_read(tmp_path, monkeypatch):
    """Nothing of one checkpoint is mixed with another, which a training writes to the same directory."""
    source, read_info = make(), checkpoint.read_info
    with source:
        run(source, 1)
        source.save_checkpoint(tmp_path / "c")

        def late(directory):
            info = read_info(directory)
            if source.session_state["steps"] < until:
                run(source, 1)
                source.save_checkpoint(tmp_path / "c")
            return info

        monkeypatch.setattr(checkpoint, "read_info", late)
        for until in (2, 4, 99):
            session = make()
            if until == 99:
                with pytest.raises(ReplacedError, match="Read it again"):
                    session.load_checkpoint(tmp_path / "c")
                continue
            session.load_checkpoint(tmp_path / "c")
            assert session.session_state["steps"] == until and weights(session)[0].min() == until
    assert session.session_state["steps"] == 0 and weights(session)[0].min() == 0


def test_processes_that_find_different_checkpoints(tmp_path, monkeypatch):
    session = make()
    monkeypatch.setattr(SessionParts, "barrier", lambda self, what, said: [said, {"mark": "other", "problem": None}])
    with pytest.raises(ReplacedError, match="nothing is loaded.*different checkpoints"):
        with session._joint("here", True, "nothing is loaded") as (said, _):
            said["mark"] = "own"


def test_threads_save_one_after_the_other(tmp_path, monkeypatch):
    session, new_checkpoint = make(), checkpoint.new_checkpoint
    now, most = [], []

    @contextlib.contextmanager
    def slowly(place):
        now.append(place)
        most.append(len(now))
        with new_checkpoint(place) as directory:
            time.sleep(0.01)
            yield directory
        now.remove(place)

    monkeypatch.setattr(checkpoint, "new_checkpoint", slowly)
    with session:
        run(session, 1)
        save = partial(session.save_checkpoint, tmp_path / "c")
        threads = [threading.Thread(target=save, kwargs={"wait": bool(i % 2)}) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert most == [1] * 4 and os.listdir(tmp_path) == ["c"]


def test_a_signal_just_before_a_thread_starts(tmp_path, monkeypatch):
    """What handles it may save a checkpoint, too."""
    session = make()

    class Interrupted(threading.Thread):
        def start(self):
            monkeypatch.undo()
            session.save_checkpoint(tmp_path / "handled")
            super().start()

    with session:
        run(session, 1)
        monkeypatch.setattr(threading, "Thread", Interrupted)
        session.save_checkpoint(tmp_path / "c", wait=False)
        session.wait_for_checkpoint()
    assert os.listdir(tmp_path) == ["c"]  # the newest


def test_only_the_newest_checkpoints_are_kept(tmp_path, monkeypatch):
    session = make(max_checkpoints=np.int64(2))
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b", "a", "c"):
        session.save_checkpoint(name)
    monkeypatch.chdir("/")
    assert sorted(os.listdir(tmp_path)) == ["a", "c"]
    session.save_checkpoint(tmp_path / "d")
    assert sorted(os.listdir(tmp_path)) == ["c", "d"]


def test_an_old_checkpoint_that_cannot_be_deleted(tmp_path, caplog):
    session = make()
    session.save_checkpoint(tmp_path / "a")
    session.save_checkpoint(tmp_path / "a/inner")
    assert "the newest" in caplog.text and (tmp_path / "a/model").exists()
    (tmp_path / "a/inner").rename(tmp_path / "elsewhere")
    session.save_checkpoint(tmp_path / "b")
    assert "could not be deleted" in caplog.text
    session.load_checkpoint(tmp_path / "b", "error")


def test_the_old_one_is_kept_until_the_new_one_is_complete(tmp_path):
    session = make()
    session.save_checkpoint(tmp_path / "a")
    session.session_state["what"] = object()
    with pytest.raises(TypeError, match="holds text, numbers.*not JSON serializable, in {.*'what': <object"):
        session.save_checkpoint(tmp_path / "b")
    assert os.listdir(tmp_path) == ["a"]


def test_the_first_of_several_processes_writes(tmp_path, monkeypatch):
    session = make()
    for name, value in {"NUM_INSTANCES": 2, "NUM_TOTAL_REPLICAS": 2, "INSTANCE_INDEX": 1}.items():
        monkeypatch.setenv(f"POPDIST_{name}", str(value))
    session.save_checkpoint(tmp_path / "c")
    assert os.listdir(tmp_path) == []
    monkeypatch.setenv("POPDIST_INSTANCE_INDEX", "0")
    session.save_checkpoint(tmp_path / "c")
    assert os.listdir(tmp_path) == ["c"]


# In a thread --------------------------------------------------------------------------------------------------------


@pytest.fixture
def disk(monkeypatch):
    """A slow disk: nothing is written in a thread before `disk.goes_on`; and it fails with `disk.problem`."""
    disk = types.SimpleNamespace(goes_on=threading.Event(), problem=None)
    to_disk, work, program = os.fsync, threading.Thread.run, threading.current_thread()

    def run(thread):
        assert not thread.name.startswith("write the checkpoint") or disk.goes_on.wait(120)
        work(thread)

    def fsync(file):
        assert threading.current_thread() is not program
        if disk.problem is not None:
            raise disk.problem
        to_disk(file)

    monkeypatch.setattr(threading.Thread, "run", run)
    monkeypatch.setattr(os, "fsync", fsync)
    yield disk
    disk.goes_on.set()


@pytest.mark.parametrize("format", ["npz", "safetensors"])
def test_the_session_runs_on_while_a_checkpoint_is_written(tmp_path, disk, format):
    session = make()
    session.dataloader = loader = Loader()
    with session:
        run(session, 1, 2)
        session.save_checkpoint(tmp_path / "c", format, wait=False)
        run(session, 10)
        loader.position = 7
        np.testing.assert_array_equal(weights(session), np.full((2, 3), 13.0))  # what was to be written is another's
        assert not (tmp_path / "c").exists()
        disk.goes_on.set()
        session.load_checkpoint(tmp_path / "c", "error")  # waits for it
        np.testing.assert_array_equal(weights(session), np.full((2, 3), 3.0))
    assert session.session_state == {"steps": 2} and loader.position == 0


@pytest.mark.parametrize("last", ["leave", "wait_for_checkpoint", "save"])
def test_what_waits_for_a_checkpoint(tmp_path, disk, last):
    session = make(max_checkpoints=2)
    threading.Timer(0.01, disk.goes_on.set).start()
    with session:
        for name in "abc":
            session.save_checkpoint(tmp_path / name, wait=False)
        if last == "wait_for_checkpoint":
            session.wait_for_checkpoint()
            assert sorted(os.listdir(tmp_path)) == ["b", "c"]
        if last == "save":
            session.save_checkpoint(tmp_path / "d", wait=False)
    assert sorted(os.listdir(tmp_path)) == (["c", "d"] if last == "save" else ["b", "c"])


@pytest.mark.parametrize("ask", ["leave", "wait_for_checkpoint", "save", "load"])
def test_what_goes_wrong_in_a_thread_is_raised_by_the_next_who_waits(tmp_path, disk, ask):
    session = make()
    disk.problem = OSError("the disk is full")
    disk.goes_on.set()
    with pytest.raises(OSError, match="the disk is full") as problem, session:
        session.save_checkpoint(tmp_path / "c", wait=False)
        if ask == "wait_for_checkpoint":
            session.wait_for_checkpoint()
        elif ask == "save":
            session.save_checkpoint(tmp_path / "d", wait=False)
        elif ask == "load":
            session.load_checkpoint(tmp_path / "c")
    assert f"the checkpoint `{tmp_path}/c` was written" in problem.value.__notes__[0]
    assert os.listdir(tmp_path) == []
    disk.problem = None
    session.save_checkpoint(tmp_path / "c", wait=False)  # it was told once
    session.wait_for_checkpoint()
    assert os.listdir(tmp_path) == ["c"]


def test_what_goes_wrong_in_a_thread_does_not_hide_what_went_wrong_before(tmp_path, disk):
    session = make()
    disk.problem = OSError("the disk is full")
    with pytest.raises(ZeroDivisionError), session:
        session.save_checkpoint(tmp_path / "c", wait=False)
        disk.goes_on.set()
        _ = 1 / 0
    with pytest.raises(OSError, match="the disk is full"):
        session.wait_for_checkpoint()


def test_what_is_wrong_at_once_is_raised_at_once(tmp_path, disk):
    session = make()
    with pytest.raises(ValueError, match="format of a checkpoint is 'pt'"):
        session.save_checkpoint(tmp_path / "c", "pt", wait=False)
    session.session_state["what"] = object()
    with pytest.raises(TypeError, match="not JSON serializable"):
        session.save_checkpoint(tmp_path / "c", wait=False)
    assert os.listdir(tmp_path) == []


def test_memory_maps_are_copied_before_the_session_runs_on(tmp_path, disk):
    session, stream = make_mapped(tmp_path / "maps")
    with session:
        session.run({stream: 3.0})
        session.save_checkpoint(tmp_path / "c", wait=False)
        session.run({stream: 1.0})
        session.weights_to_host()
        disk.goes_on.set()
    assert np.fromfile(tmp_path / "c/model/net.fc.w.npy", np.float32).tolist() == [3.0] * 6


@pytest.mark.thorough
def test_the_end_of_a_process_waits_and_tells(tmp_path):
    program = """
        import os, sys, threading
        from popxl_addons import checkpoint
        class Owner: pass
        owners = [Owner(), Owner()]
        writers = [checkpoint.Writer(owner) for owner in owners]
        ended = threading.main_thread().join  # which is when the program has come to its last line
        writers[0].submit(lambda: (ended(), open(sys.argv[1], "x").close()), "one", wait=False)
        writers[1].submit(lambda: (ended(), 1 / 0), "another", wait=False)
    """
    command = [sys.executable, "-c", textwrap.dedent(program), str(tmp_path / "done")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (tmp_path / "done").exists()
    assert "Nobody has asked" in done.stderr and "ZeroDivisionError" in done.stderr
    assert "when another was written" in done.stderr


# What does not fit --------------------------------------------------------------------------------------------------


@pytest.fixture
def mixed(tmp_path):
    """A checkpoint that lacks a name, has one too many, and one of another shape; and a session that has run."""
    make(features=4).save_checkpoint(tmp_path)
    (tmp_path / "model/fwd.fc.b.npz").unlink()
    np.savez(tmp_path / "model/head.w.npz", **{"head.w": np.zeros(2)})
    (tmp_path / "checksums.json").unlink()  # somebody has changed it by hand
    (tmp_path / "session_info.json").write_text('{"steps": 7, "epoch": 1}')
    session = make()
    session.add_session_state_info({"lr": 0.1})
    with session:
        run(session, 5)
        yield tmp_path, session
        np.testing.assert_array_equal(weights(session), np.full((2, 3), 5.0))
        assert session.session_state == {"steps": 1, "lr": 0.1}


def test_everything_that_does_not_fit_is_told_at_once(mixed):
    place, session = mixed
    with pytest.raises(ValueError) as problem:
        session.load_checkpoint(str(place), report_missing="error")
    assert str(problem.value) == (
        f"TaskSession.load_checkpoint, from `{place}`: nothing has been loaded. "
        "Checkpoint keys not in state: head.w. state keys not in checkpoint: fwd.fc.b. "
        "Checkpoint keys not in state: epoch (of `session_state`). "
        "state keys not in checkpoint: lr (of `session_state`). "
        "`fwd.fc.w` is float32[2, 4] there and float32[2, 3] in the state."
    )


@pytest.mark.parametrize("report_missing", ["none", "warn"])
def test_another_shape_is_always_an_error(mixed, report_missing):
    place, session = mixed
    with pytest.raises(ValueError, match=r"`fwd\.fc\.w` is float32\[2, 4\] there and float32\[2, 3\] in the state"):
        session.load_checkpoint(place, report_missing)


def test_another_dtype(tmp_path):
    session = make()
    session.save_checkpoint(tmp_path)
    (tmp_path / "checksums.json").unlink()
    np.savez(tmp_path / "model/fwd.fc.b.npz", **{"fwd.fc.b": np.zeros(2, ">f4")})
    np.savez(tmp_path / "model/fwd.fc.w.npz", **{"fwd.fc.w": np.array(["a"])})
    with pytest.raises(ValueError, match=r"`fwd\.fc\.b` is float32\[2\] there and float16\[2\].*`fwd\.fc\.w` is str32"):
        session.load_checkpoint(tmp_path)


@pytest.mark.parametrize("report_missing", ["none", "warn"])
def test_missing_and_extra_names_may_be_left_alone(tmp_path, caplog, report_missing):
    source = make()
    with source:
        run(source, 2)
        source.save_checkpoint(tmp_path)
    (tmp_path / "model/fwd.fc.b.npz").unlink()
    np.savez(tmp_path / "model/head.w.npz", **{"head.w": np.zeros(2)})
    session = make()
    session.load_checkpoint(tmp_path, *([report_missing] if report_missing == "none" else []))
    np.testing.assert_array_equal(weights(session), np.full((2, 3), 2.0))
    assert session.session_state == {"steps": 1}
    text = "Checkpoint keys not in state: head.w. state keys not in checkpoint: fwd.fc.b."
    assert (text in caplog.text) == (report_missing == "warn")


def test_a_missing_file_is_an_error_if_asked_for(tmp_path):
    session = make()
    session.save_checkpoint(tmp_path)
    session.load_checkpoint(tmp_path, report_missing="error")
    (tmp_path / "model/fwd.fc.w.npz").unlink()
    with pytest.raises(ValueError, match=r"state keys not in checkpoint: fwd\.fc\.w"):
        session.load_checkpoint(tmp_path, report_missing="error")


def test_without_a_record(tmp_path):
    session = make()
    with session:
        run(session, 1)
        session.save_checkpoint(tmp_path)
    (tmp_path / "session_info.json").unlink()
    session.load_checkpoint(tmp_path, report_missing="error")
    assert session.session_state == {"steps": 0}


def test_a_damaged_file_changes_nothing(tmp_path):
    session = make()
    session.save_checkpoint(tmp_path)
    with session:
        run(session, 3)
        (tmp_path / "model/fwd.fc.w.npz").write_bytes(b"PK")
        with pytest.raises(ValueError, match="is damaged"):
            session.load_checkpoint(tmp_path)
        np.testing.assert_array_equal(weights(session), np.full((2, 3), 3.0))
    assert session.session_state == {"steps": 1}


def test_nothing_in_a_checkpoint_is_run(tmp_path):
    session = make()
    session.save_checkpoint(tmp_path / "c")
    mark = tmp_path / "the code has run"

    class Hostile:
        def __reduce__(self):
            return os.mkdir, (str(mark),)

    (tmp_path / "c/checksums.json").unlink()
    np.savez(tmp_path / "c/model/fwd.fc.w.npz", **{"fwd.fc.w": np.array([Hostile()], dtype=object)})
    with pytest.raises(ValueError, match="allow_pickle=False"):
        session.load_checkpoint(tmp_path / "c", "none")
    assert not mark.exists()


def test_an_unknown_way_to_report(tmp_path):
    session = make()
    session.save_checkpoint(tmp_path)
    with pytest.raises(ValueError, match="`report_missing` is 'loud'; expected 'none', 'warn' or 'error'"):
        session.load_checkpoint(tmp_path, "loud")
    with pytest.raises(ValueError, match="`format` is 'pt'|format of a checkpoint is 'pt'"):
        session.save_checkpoint(tmp_path, "pt")


# Data loaders -------------------------------------------------------------------------------------------------------


class Loader:
    def __init__(self):
        self.position = 0

    def save(self, path):
        with open(path, "w") as file:
            file.write(str(self.position))

    def resume(self, filename):
        with open(filename) as file:
            self.position = int(file.read())


def test_a_data_loader_is_saved_and_resumed(tmp_path, caplog):
    session = make()
    assert session.dataloader is None and "no data loader" in caplog.text
    session.dataloader = loader = Loader()
    assert session.dataloader is loader
    loader.position = 5
    session.save_checkpoint(tmp_path)
    assert (tmp_path / "dataloader.bin").read_text() == "5"
    loader.position = 0
    session.load_checkpoint(tmp_path, "error")
    assert loader.position == 5
    loader.get_state = lambda: {"at": loader.position}
    with caplog.at_level(logging.INFO):
        session.load_checkpoint(tmp_path, "error")
    assert "{'at': 5}" in caplog.text


def test_a_missing_position_is_a_matter_of_the_loader(tmp_path):
    session = make()
    session.save_checkpoint(tmp_path)
    session.dataloader = Loader()
    with session:
        run(session, 4)
        with pytest.raises(FileNotFoundError, match=r"dataloader\.bin"):
            session.load_checkpoint(tmp_path)
        np.testing.assert_array_equal(weights(session), np.full((2, 3), 4.0))


def test_a_loader_that_fails_leaves_the_state_alone(tmp_path):
    session = make()
    session.dataloader = Loader()
    session.save_checkpoint(tmp_path)
    (tmp_path / "checksums.json").unlink()
    (tmp_path / "dataloader.bin").write_text("no number")
    with session:
        run(session, 4)
        with pytest.raises(ValueError, match="invalid literal"):
            session.load_checkpoint(tmp_path)
        np.testing.assert_array_equal(weights(session), np.full((2, 3), 4.0))


def test_objects_that_are_no_loaders():
    session = make()
    with pytest.raises(ValueError, match=r"the int has no method \['save', 'resume'\]"):
        session.dataloader = 3
    with pytest.raises(ValueError, match=r"no method \['resume'\]"):
        session.dataloader = types.SimpleNamespace(save=print)


# From session to session --------------------------------------------------------------------------------------------


def test_load_from_session():
    source, target = make(), make(pick=lambda state: addons.NamedTensors(fwd=state.fwd, extra=state.fwd.fc.b))
    with source:
        run(source, 1, 2)
        with pytest.warns(popxl.errors.PopxlWarning, match="state keys not in source: extra") as said:
            target.load_from_session(source)
        assert said[0].filename == __file__
        with target:
            target.load_from_session(source, report_missing="none")
            run(target, 4)
            np.testing.assert_array_equal(weights(target), np.full((2, 3), 7.0))
    with pytest.raises(ValueError, match="Source keys not in state: extra"):
        source.load_from_session(target, "error")
    with pytest.raises(ValueError, match=r"float32\[2, 3\] there and float32\[2, 4\]"):
        make(features=4).load_from_session(source)


@pytest.mark.parametrize("report_missing", ["none", "warn"])
def test_other_names_are_no_state_to_load(tmp_path, report_missing):
    """From a session or a checkpoint: there would be nothing to copy."""
    source, target = make(), make(pick=lambda state: state.fwd)
    source.save_checkpoint(tmp_path)
    text = r"nothing has been loaded. .*: fc\.b, fc\.w. No name is on both sides"
    with pytest.raises(ValueError, match=text):
        target.load_from_session(source, report_missing)
    with pytest.raises(ValueError, match=text):
        target.load_checkpoint(tmp_path, report_missing)


def test_sessions_of_one_program():
    source = make()
    target = TaskSession(source.inputs, source.outputs, source.state, ir=source.ir)
    with source, target:
        run(source, 1, 2)
        run(target, 10)
        target.load_from_session(source)
        run(target, 4)
        np.testing.assert_array_equal(weights(target), np.full((2, 3), 7.0))


def test_write_variables_pb():
    session, twin = make(), make()
    new = np.full((2, 3), 9.0, np.float32)
    write_variables_pb(session, {session.state.fwd.fc.w: new})
    with session:
        run(session, 1)
        np.testing.assert_array_equal(weights(session), new + 1)
        write_variables_pb(session, {twin.state.fwd.fc.w: new})
        run(session, 2)
        np.testing.assert_array_equal(weights(session), new + 2)
    with pytest.raises(popxl.errors.PopxlError, match="no tensor with the id"):
        with popxl.Ir().main_graph:
            stranger = popxl.variable(0.0, name="stranger")
        write_variables_pb(session, {stranger: np.float32(1)})


# Memory maps --------------------------------------------------------------------------------------------------------


def make_mapped(folder):
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        _, stream, x = addons.host_load(0.0, popxl.float32, "x")
        facts, graph = Model().create_graph(x)
        mapped = addons.NamedVariableFactories(fc=addons.NamedVariableFactories(w=facts.fc.w))
        rest = addons.NamedVariableFactories(fc=addons.NamedVariableFactories(b=facts.fc.b))
        state = mapped.init("net", memmap_dir=folder)
        state.fc.insert("b", rest.init("net").fc.b)
        graph.bind(state).call(x)
    return TaskSession(addons.InputStreams(), [], addons.NamedTensors(fwd=state), ir=ir), stream


def test_memory_mapped_state(tmp_path):
    session, stream = make_mapped(tmp_path / "maps")
    with session:
        session.run({stream: 3.0})
        session.save_checkpoint(tmp_path / "c")
    assert sorted(os.listdir(tmp_path / "c/model")) == ["fwd.fc.b.npz", "net.fc.w.npy"]

    initialise_memmap_dir_from_checkpoint(str(tmp_path / "c"), str(tmp_path / "new/maps"))
    assert os.listdir(tmp_path / "new/maps") == ["net.fc.w.npy"]
    other, stream = make_mapped(tmp_path / "new/maps")
    other.load_checkpoint(str(tmp_path / "c"), report_missing="error", skip_memmap=True)
    with other:
        other.run({stream: 1.0})
        np.testing.assert_array_equal(other.get_named_tensors_data().fwd.fc.w, np.full((2, 3), 4.0))

    (tmp_path / "c/model/net.fc.w.npy").unlink()
    with pytest.raises(ValueError, match=r"state keys not in checkpoint: fwd\.fc\.w"):
        other.load_checkpoint(tmp_path / "c", report_missing="error")
    with pytest.raises(FileNotFoundError, match="no directory"):
        initialise_memmap_dir_from_checkpoint(tmp_path / "nowhere", tmp_path / "maps")


def test_an_archive_for_a_memory_mapped_variable(tmp_path):
    plain = make()
    with plain:
        run(plain, 6)
        plain.save_checkpoint(tmp_path / "c")
    session, _ = make_mapped(tmp_path / "maps")
    session.load_checkpoint(tmp_path / "c", "error")
    np.testing.assert_array_equal(np.fromfile(tmp_path / "maps/net.fc.w.npy", np.float32), np.full(6, 6.0))


def test_files_that_are_mapped_are_replaced_not_written_over(tmp_path):
    session, _ = make_mapped(tmp_path / "maps")
    session.save_checkpoint(tmp_path / "c")
    before = session.state.fwd.fc.w.data
    before[...] = 8
    initialise_memmap_dir_from_checkpoint(tmp_path / "c", tmp_path / "maps")
    assert before[0, 0] == 8 and np.fromfile(tmp_path / "maps/net.fc.w.npy", np.float32)[0] == 0
    assert os.listdir(tmp_path / "maps") == ["net.fc.w.npy"]


def test_maps_in_the_checkpoint_itself(tmp_path):
    session, _ = make_mapped(tmp_path / "c/model")
    with pytest.raises(ValueError, match=r"the state `fwd\.fc\.w` is mapped to .* Save to another directory"):
        session.save_checkpoint(tmp_path / "c")


# Weights & Biases ---------------------------------------------------------------------------------------------------


class FakeWandb(types.ModuleType):
    """What this package uses of the real one."""

    def __init__(self, store):
        super().__init__("wandb")
        self.store, self.logged, self.run = store, [], None
        self.Histogram = np.array

    def init(self):
        self.run = types.SimpleNamespace(log_artifact=self.keep, use_artifact=self.find, summary={})

    def log(self, record, step):
        self.logged.append((step, record))

    def keep(self, artifact):
        self.store[f"{artifact.name}:latest"] = artifact

    def find(self, version):
        return self.store[version]

    def Api(self):
        return types.SimpleNamespace(artifact=self.find)

    class Artifact:
        def __init__(self, name, type):
            self.name, self.type, self.files = name, type, {}

        def add_dir(self, path):
            for folder, _, names in os.walk(path):
                for name in names:
                    file = Path(folder, name)
                    self.files[str(file.relative_to(path))] = file.read_bytes()

        def download(self, root):
            for name, contents in self.files.items():
                file = Path(root, name)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(contents)


@pytest.fixture
def fake_wandb(monkeypatch):
    package = FakeWandb({})
    monkeypatch.setitem(sys.modules, "wandb", package)
    return package


def test_without_wandb(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    session = make()
    for call in (
        lambda: session.save_checkpoint("wandb://name"),
        lambda: session.load_checkpoint("wandb://name"),
        lambda: session.wandb_histogram("w", 0, np.zeros(2)),
        lambda: session.wandb_variable_histograms(),
    ):
        with pytest.raises(ImportError, match="not installed. Install it with `pip install wandb`"):
            call()
    session.save_checkpoint(tmp_path)  # does not need it


def test_artifacts(fake_wandb):
    session = make()
    with pytest.raises(RuntimeError, match=r"no active run to store `wandb://model` in.*wandb\.init"):
        session.save_checkpoint("wandb://model")
    fake_wandb.init()
    with session:
        run(session, 2)
        session.save_checkpoint("wandb://model")
    artifact = fake_wandb.store["model:latest"]
    assert artifact.type == "checkpoints" and os.path.join("model", "fwd.fc.w.npz") in artifact.files
    for place in ("wandb://model", "wandb://model:latest"):
        other = make()
        other.load_checkpoint(place, "error")
        np.testing.assert_array_equal(weights(other), np.full((2, 3), 2.0))
    fake_wandb.run = None
    make().load_checkpoint("wandb://model", "error")


def test_histograms(fake_wandb):
    session = make()
    session.wandb_histogram("w", 4, np.array([1.0, np.nan, 2.0, np.inf]))
    ((step, record),) = fake_wandb.logged
    assert step == 4 and record.keys() == {"w:histogram", "w:not_finite"} and record["w:not_finite"] == 2
    assert record["w:histogram"].tolist() == [1, 2] and record["w:histogram"].dtype == np.float32
    session.wandb_histogram("n", 5, popxl.utils.host_pow2scale_cast_to_fp8(np.array([1.5]), popxl.float8_143))
    assert fake_wandb.logged[-1][1]["n:histogram"].tolist() == [1.5]
    session.wandb_variable_histograms(step=6)
    step, record = fake_wandb.logged[-1]
    assert step == 6 and {name for name in record if name.endswith(":histogram")} == {
        "fc.w:histogram",
        "fc.b:histogram",
        "other:histogram",
    }


def test_names_that_programs_import():
    assert task_session.__all__ == ["TaskSession", "write_variables_pb"]
    assert task_session.ReportMissingMethods.__args__ == ("none", "warn", "error")
