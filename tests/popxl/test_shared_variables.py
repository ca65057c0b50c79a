"""Sessions of several programs that have variables in common, without a copy."""

import jax
import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.errors import PopxlError
from popxl.tensor import Variable

SHAPE = (37, 11)


class Program:
    """`w += count`, `count += 1` if it changes them; and it gives `w * factor`, or another tensor."""

    def __init__(
        self, changes: bool, factor: float = 1.0, shape: tuple[int, ...] = SHAPE, replication: int = 1
    ) -> None:
        self.ir = popxl.Ir(replication=replication)
        with self.ir.main_graph, popxl.in_sequence():
            self.w = popxl.variable(np.full(shape, 5.0), popxl.float32, "w")
            self.count = popxl.variable(np.full(2, 1.0), popxl.float32, "count")
            self.own = popxl.variable(np.full(3, 7.0), popxl.float32, "own")
            if changes:
                ops.add_(self.w, ops.slice(self.count, 0, 1))
                ops.add_(self.count, 1.0)
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


def test_both_change_it() -> None:
    """And what is said to be the other's is left there at the end."""
    first, second = Program(changes=True), Program(changes=True, factor=10.0)
    with first.session() as one, second.session() as two:
        assert (first.run(one), second.run(two)) == (6, 60)
        two.use_variables_of(one, {second.w: first.w, second.count: first.count})
        assert (second.run(two), first.run(one), second.run(two)) == (80, 11, 150)
        two.weights_to_host()
        two.weights_from_host()
        assert second.run(two) == 200
    assert first.w.data[0, 0] == 20 and first.count.data[0] == 6 and second.own.data[0] == 7 + 4


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
    with pytest.raises(ValueError, match="one variable where this one changes one of several"):
        changing.use_variables_of(program.session(), dict.fromkeys(apart, program.own))


def test_rows_of_one_array() -> None:
    """Where calls are turns of a loop, layers lie in one array: each session finds its own in the same place."""

    def chain(*order: int) -> tuple[popxl.Ir, dict[int, Variable]]:
        ir = popxl.Ir()
        ir.options.calledGraphs = "rolled"
        with ir.main_graph:
            h = popxl.constant(np.zeros(3), popxl.float32)
            graph = ir.create_graph(lambda h, w: ops.tanh(h + w), h, h.spec)
            weights = {i: popxl.variable(np.full(3, 0.1 * i), popxl.float32, f"w{i}") for i in order}
            for i in order:
                (h,) = ops.call(graph, h, weights[i])
            ops.host_store(popxl.d2h_stream((3,), popxl.float32, "h"), h)
        return ir, weights

    (ir, mine), (same, theirs), (turned, others) = chain(1, 2, 3), chain(1, 2, 3), chain(3, 1, 2)
    session, there = popxl.Session(ir, "cpu"), popxl.Session(same, "cpu")
    with pytest.raises(ValueError, match="has one array for w3, w1, w2, and this one for w1, w2, w3. Pass all"):
        session.use_variables_of(popxl.Session(turned, "cpu"), {mine[i]: others[i] for i in mine})
    with pytest.raises(ValueError, match="and this one for w1, w2, w3. Pass all of them"):
        session.use_variables_of(there, {mine[1]: theirs[1]})
    session.use_variables_of(there, {mine[i]: theirs[i] for i in mine})
