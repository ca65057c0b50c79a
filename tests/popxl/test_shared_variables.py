"""Sessions of several programs that have variables in common, without a copy."""

from collections.abc import Callable

import jax
import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.errors import PopxlError
from popxl.tensor import Variable
from runtime.targets.devices import Device
from tests.devices import a_device_each, one_device

SHAPE = (37, 11)


def grow(w: popxl.TensorByRef, count: popxl.TensorByRef) -> None:
    ops.add_(w, ops.slice(count, 0, 1))
    ops.add_(count, 1.0)


class Program:
    """`w += count`, `count += 1` if it changes them; and it gives `w * factor`, or another tensor."""

    def __init__(
        self,
        changes: bool,
        factor: float = 1.0,
        shape: tuple[int, ...] = SHAPE,
        replication: int = 1,
        calls: str = "auto",
    ) -> None:
        self.ir = popxl.Ir(replication=replication)
        self.ir.options.calledGraphs = calls  # type: ignore[assignment]
        with self.ir.main_graph, popxl.in_sequence():
            self.w = popxl.variable(np.full(shape, 5.0), popxl.float32, "w")
            self.count = popxl.variable(np.full(2, 1.0), popxl.float32, "count")
            self.own = popxl.variable(np.full(3, 7.0), popxl.float32, "own")
            if changes:
                grown = self.ir.create_graph(grow, self.w, self.count)
                ops.call(grown, self.w, self.count)
            ops.add_(self.own, 1.0)
            self.out = popxl.d2h_stream(shape, popxl.float32, "out")
            ops.host_store(self.out, self.w * factor)

    def session(self) -> popxl.Session:
        return popxl.Session(self.ir, "cpu")

    def run(self, session: popxl.Session) -> float:
        return float(np.asarray(session.run()[self.out]).flat[0])


def on_device(shape: tuple[int, ...]) -> int:
    return sum(array.shape == shape for array in jax.live_arrays())


def test_one_reads_what_the_other_changes_without_a_copy() -> None:
    before = on_device(SHAPE)
    training, sampling = Program(changes=True), Program(changes=False, factor=10.0)
    sampling.w.data[...] = 0
    with training.session() as trained, sampling.session() as session:
        session.use_variables_of(trained, {sampling.w: training.w, sampling.count: training.count})
        assert on_device(SHAPE) == before + 1
        assert sampling.run(session) == 50
        assert training.run(trained) == 6
        assert sampling.run(session) == 60
        assert training.run(trained) == 8
        assert (sampling.run(session), sampling.run(session)) == (80, 80)
        assert on_device(SHAPE) == before + 1
        assert session.get_tensor_data(sampling.w)[0, 0] == 8
        data = session.get_tensors_data([sampling.own, sampling.w])
        assert data[sampling.own][0] == 7 + 4 and data[sampling.w][0, 0] == 8
        trained.write_variable_data(training.w, np.full(SHAPE, 2, np.float32))
        assert sampling.run(session) == 20
        with session.debugging():
            assert sampling.run(session) == 20
    assert (sampling.w.data == 0).all() and training.w.data[0, 0] == 2


@pytest.mark.parametrize("calls", ["kept", "dispatched"])
def test_both_change_it(calls: str) -> None:
    """And what is said to be the other's is left there at the end."""
    first, second = Program(changes=True, calls=calls), Program(changes=True, factor=10.0)
    with first.session() as one, second.session() as two:
        assert (first.run(one), second.run(two)) == (6, 60)
        two.use_variables_of(one, {second.w: first.w, second.count: first.count})
        assert (second.run(two), first.run(one), second.run(two)) == (80, 11, 150)
        two.weights_to_host()
        two.weights_from_host()
        assert second.run(two) == 200
    assert first.w.data[0, 0] == 20 and first.count.data[0] == 6 and second.own.data[0] == 7 + 4


class Layers:
    """`x = x @ w` for all layers, and `w += 1`, in calls that become turns of a loop; and it gives `x`."""

    def __init__(self, calls: str) -> None:
        self.ir = popxl.Ir()
        self.ir.options.calledGraphs = calls  # type: ignore[assignment]
        with self.ir.main_graph, popxl.in_sequence():
            self.w = [popxl.variable(np.full((2, 2), i + 1.0), popxl.float32, f"w{i}") for i in range(4)]
            x = popxl.constant(np.eye(2, dtype=np.float32))
            graph = self.ir.create_graph(multiply, x, self.w[0])
            for w in self.w:
                (x,) = ops.call(graph, x, w)
            self.out = popxl.d2h_stream((2, 2), popxl.float32, "out")
            ops.host_store(self.out, x)
        self.session = popxl.Session(self.ir, "cpu")

    def run(self) -> float:
        return float(self.session.run()[self.out][0, 0])


def multiply(x: popxl.Tensor, w: popxl.TensorByRef) -> popxl.Tensor:
    y = x @ w
    ops.add_(w, 1.0)
    return y


def test_what_lies_in_one_array_is_shared_with_one_array() -> None:
    """In the same order, or not at all."""
    one, two, kept = Layers("rolled"), Layers("rolled"), Layers("kept")
    assert [loop.iterations for loop in two.session.report.loops] == [4]
    message = "it lies in one array with others, .* Set `ir.options.calledGraphs = 'kept'`"
    for mine, theirs, other in [(two.w[:3], one.w[:3], one), (two.w, one.w[::-1], one), (two.w, kept.w, kept)]:
        with pytest.raises(ValueError, match=message):
            two.session.use_variables_of(other.session, dict(zip(mine, theirs, strict=True)))
    two.session.use_variables_of(one.session, dict(zip(two.w, one.w, strict=True)))
    with one.session, two.session:
        first = [8.0 * 1 * 2 * 3 * 4, 8.0 * 2 * 3 * 4 * 5, 8.0 * 3 * 4 * 5 * 6]
        assert [one.run(), two.run(), one.run()] == first


@pytest.mark.parametrize("devices", [a_device_each, one_device])
def test_replicas_that_read_share_a_copy_of_what_others_train(devices: Callable[[int], Device]) -> None:
    """It is made anew when it has changed, and not before."""
    device = devices(4)
    shape = (29, 7)
    training, reading = (Program(changes, shape=shape, replication=4) for changes in (True, False))
    with popxl.Session(training.ir, device) as trained, popxl.Session(reading.ir, device) as session:
        session.use_variables_of(trained, {reading.w: training.w, reading.count: training.count})
        found = []
        for train in (True, False, True, True, False, False):
            if train:
                trained.run()
            found.append(np.unique(session.run()[reading.out]).tolist())
        assert found == [[6.0], [6.0], [8.0], [11.0], [11.0], [11.0]]
        trained.weights_to_host()
        trained.write_variable_data(training.w, np.full(shape, 2.0, np.float32))
        assert np.unique(session.run()[reading.out]) == 2
        np.testing.assert_array_equal(session.get_tensor_data(reading.w), np.full(shape, 2.0))
        assert on_device(shape) == 1
    assert on_device(shape) == on_device((4, *shape)) == 0


def test_variables_that_differ_between_replicas_are_refused() -> None:
    def program(group_size: int) -> tuple[popxl.Session, Variable]:
        ir = popxl.Ir(replication=2)
        with ir.main_graph, popxl.in_sequence():
            each_group = np.ones((2, 3) if group_size == 1 else 3)
            groups = ir.replica_grouping(group_size=group_size)
            w = popxl.variable(each_group, popxl.float32, replica_grouping=groups)
            if group_size == 1:
                ops.add_(w, 1.0)
            ops.host_store(popxl.d2h_stream(w.shape, w.dtype), w)
        return popxl.Session(ir, one_device(2)), w

    (session, mine), (other, theirs) = program(2), program(1)
    with pytest.raises(ValueError, match="as .*, and this one as .*Copy what it has"):
        session.use_variables_of(other, {mine: theirs})


def test_another_device_is_refused() -> None:
    first, second = (Device("ipu_model", (each,)) for each in a_device_each(2).jax_devices)
    training, reading = Program(changes=True), Program(changes=False)
    one, other = popxl.Session(reading.ir, first), popxl.Session(training.ir, second)
    with pytest.raises(ValueError, match="as .*, and this one as .*Copy what it has"):
        one.use_variables_of(other, {reading.w: training.w})


def test_what_is_refused() -> None:
    program, narrow, reading = Program(changes=True), Program(changes=True, shape=(2, 2)), Program(changes=False)
    spread = Program(changes=True, replication=2)
    with program.session() as session, narrow.session() as of_narrow, reading.session() as of_reading:
        with pytest.raises(ValueError, match=r"the other session has it as \(\(2, 2\), 'float32', .* and this one as"):
            session.use_variables_of(of_narrow, {program.count: narrow.count, program.w: narrow.w})
        with pytest.raises(ValueError, match="only reads it, and this one changes it"):
            session.use_variables_of(of_reading, {program.w: reading.w})
        with pytest.raises(ValueError, match="does not use it"):
            session.use_variables_of(of_reading, {program.count: reading.count})
        with pytest.raises(ValueError, match="has 2 replicas, and this one 1. Copy what it has"):
            session.use_variables_of(popxl.Session(spread.ir, "ipu_model"), {program.w: spread.w})
        with pytest.raises(ValueError, match="is this session"):
            session.use_variables_of(session, {})
        with pytest.raises(TypeError, match="not a session"):
            session.use_variables_of(program.ir, {})  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="another program"):
            session.use_variables_of(of_narrow, {narrow.w: narrow.w})
        assert program.run(session) == 6  # nothing has changed
        of_reading.use_variables_of(session, {reading.w: program.w})
        with pytest.raises(ValueError, match="has variables of this one"):
            session.use_variables_of(of_reading, {program.w: reading.w})
        with pytest.raises(ValueError, match="write to it there"):
            of_reading.write_variable_data(reading.w, np.zeros(SHAPE, np.float32))
        with pytest.raises(PopxlError, match="some variables are another session's"):
            of_reading.save("nowhere")
        session.detach()
        with pytest.raises(PopxlError, match="which is not attached"):
            reading.run(of_reading)
        session.__enter__()
        assert reading.run(of_reading) == 5


def test_what_the_other_session_has_from_a_third_one() -> None:
    first, second, third = (Program(changes=True) for _ in range(3))
    with first.session() as one, second.session() as two, third.session() as three:
        two.use_variables_of(one, {second.w: first.w})
        one.use_variables_of(three, {first.w: third.w})
        with pytest.raises(PopxlError, match="which has them from a third one by now"):
            second.run(two)
        two.use_variables_of(three, {second.w: third.w})
        assert (third.run(three), second.run(two), first.run(one)) == (6, 7, 8)


def test_one_variable_for_two() -> None:
    """Tied weights may be read from one array, and may not be changed in it."""

    def session(changes: bool) -> tuple[popxl.Session, Variable, Variable]:
        ir = popxl.Ir()
        with ir.main_graph, popxl.in_sequence():
            one, other = (popxl.variable(np.ones(3), popxl.float32, name) for name in ("one", "other"))
            if changes:
                ops.add_(one, 1.0)
            ops.host_store(popxl.d2h_stream((3,), popxl.float32, "sum"), one + other)
        return popxl.Session(ir, "cpu"), one, other

    program = Program(changes=True)
    (reading, *tied), (changing, *apart) = session(changes=False), session(changes=True)
    reading.use_variables_of(program.session(), dict.fromkeys(tied, program.own))
    with pytest.raises(ValueError, match="another variable is that one already"):
        changing.use_variables_of(program.session(), dict.fromkeys(apart, program.own))


def test_programs_with_other_groups_have_variables_in_common() -> None:
    """The mesh of one has two dimensions, that of the other has one."""
    device = Device("ipu_model", tuple(jax.devices("cpu")[:4]))
    if len(device.jax_devices) < 4:
        pytest.skip("JAX was started with fewer devices")
    programs = []
    for groups in (("data", "tensor"), ()):
        ir = popxl.Ir(axes={"data": 2, "tensor": 2} if groups else None, replication=4)
        with ir.main_graph, popxl.in_sequence():
            w = popxl.variable(
                np.arange(4, dtype=np.float32), name="w", replica_grouping=ir.replica_grouping(group_size=1)
            )
            for group in groups:
                ops.add_(w, ops.collectives.replicated_all_reduce(w, group=group))
            out = popxl.d2h_stream((), popxl.float32)
            ops.host_store(out, w * 1.0)
        programs.append((popxl.Session(ir, device), w, out))
    (trained, w, out), (session, other, seen) = programs
    with trained, session:
        session.use_variables_of(trained, {other: w})
        assert (
            len(trained.program.layout.replicas.mesh.shape) == 2
            and len(session.program.layout.replicas.mesh.shape) == 1
        )
        expected = trained.run()[out]
        np.testing.assert_array_equal(session.run()[seen], expected)
        a = np.arange(4.0).reshape(2, 2)
        a = a + a.sum(0)
        np.testing.assert_array_equal(expected, (a + a.sum(1, keepdims=True)).ravel())
