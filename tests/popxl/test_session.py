"""`Session`: making one, the `with` block, runs with every kind of array, reading and writing variables.

After every error everything still works.
"""

import math
import os
import re
import subprocess
import sys
import textwrap
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.errors import LostUpdateWarning, PopxlError, PopxlWarning
from runtime.targets.devices import model_device
from tests.popxl.evaluate import evaluate

F32 = popxl.float32


class Program:
    """`y = x * k + v`, after which the variable `v` grows by one; and a second output, `twice`."""

    def __init__(self, transfers=1, shape=(2,)):
        self.ir = popxl.Ir()
        self.ir.num_host_transfers = transfers
        with self.ir.main_graph, popxl.in_sequence():
            self.x, self.k = popxl.h2d_stream(shape, F32, "x"), popxl.h2d_stream((), popxl.int32, "k")
            self.y, self.twice = popxl.d2h_stream(shape, F32, "y"), popxl.d2h_stream((), popxl.int32, "twice")
            self.v = popxl.variable(10.0, name="v")
            self.c = popxl.constant([1, 2], name="c")
            for _ in range(transfers):
                k = ops.host_load(self.k)
                ops.host_store(self.twice, k * 2)
                self.result = ops.host_load(self.x) * ops.cast(k, F32) + self.v
                ops.host_store(self.y, self.result)
            self.v += 1

    def feeds(self, x=(1.0, 2.0), k=3):
        return {self.x: np.array(x, np.float32), self.k: np.array(k, np.int32)}

    def works(self, session):
        """Whether the session still runs: whatever `v` is, `y` is `3 x + v`."""
        with session:
            v = float(session.get_tensor_data(self.v))
            return session.run(self.feeds())[self.y].tolist() == [3 + v, 6 + v]


@pytest.fixture
def program():
    return Program()


@pytest.fixture
def counter():
    """An Ir with a variable `v`, which is 1 and grows by one in each run, and another, `w`, likewise from 5."""
    ir = popxl.Ir()
    with ir.main_graph:
        ir.v, ir.w = popxl.variable(1.0, name="v"), popxl.variable([5.0, 5.0], name="w")
        ir.c = popxl.constant(3.0)
        ops.add_(ir.v, popxl.constant(1.0))
        ops.add_(ir.w, popxl.constant(1.0))
    return ir


def on_device(session, v):
    """The value on the device, whatever the host copy says: read by a copy of the session's own state."""
    session.weights_to_host()
    return v.data.tolist()


@pytest.fixture
def transfers(monkeypatch):
    """Counts the uploads and downloads of all programs."""
    from runtime.program.store import VariableStore

    counts = {"upload": 0, "download": 0}

    def count(name):
        original = getattr(VariableStore, name)

        def counted(self, *given):
            counts[name] += 1
            return original(self, *given)

        monkeypatch.setattr(VariableStore, name, counted)

    for name in counts:
        count(name)

    def since():
        found = (counts["upload"], counts["download"])
        counts.update(upload=0, download=0)
        return found

    return since


# Making one -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", "ipu_model", "ipu_hw"])
def test_devices(program, device):
    assert program.works(popxl.Session(program.ir, device))


@pytest.mark.here
def test_an_unknown_device(program):
    for device in ("tpu9", "", "CPU"):
        with pytest.raises(ValueError, match="unknown"):
            popxl.Session(program.ir, device)
    for device in (None, 8):
        with pytest.raises(TypeError, match=f"the device must be text.*got {device}"):
            popxl.Session(program.ir, device)


@pytest.mark.here
def test_several_devices_on_one_cpu(ir):
    with ir.main_graph, popxl.ipu(1):
        y = popxl.variable(1.0) + 1
        s = popxl.d2h_stream((), F32)
        ops.host_store(s, y)
    with pytest.raises(ValueError, match="2 devices"):
        popxl.Session(ir, "cpu")
    with popxl.Session(ir, "ipu_model") as session:
        assert session.run()[s] == 2


@pytest.mark.here
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="a process cannot choose its cores here")
def test_a_cpu_is_as_many_devices_as_there_are_cores():
    """More would have JAX start more threads than there are cores, which slows down all programs."""
    program = """
        import os
        cores = sorted(os.sched_getaffinity(0))[:2]
        os.sched_setaffinity(0, cores)
        import jax
        import popxl
        assert len(jax.devices()) == len(cores), jax.devices()
    """
    environment = {name: value for name, value in os.environ.items() if name not in ("POPXL_CPU_DEVICES", "XLA_FLAGS")}
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=120, env=environment)


@pytest.mark.thorough(but_each=4)
@pytest.mark.parametrize("wanted", ["four", "0", "-1", ""])
def test_a_number_of_cpu_devices_that_is_none(wanted):
    environment = os.environ | {"POPXL_CPU_DEVICES": wanted, "XLA_FLAGS": ""}
    done = subprocess.run(
        [sys.executable, "-c", "import popxl"], timeout=120, env=environment, capture_output=True, text=True
    )
    said = f"ValueError: The environment variable POPXL_CPU_DEVICES is {wanted!r}; expected a whole number from 1 on.\n"
    assert done.returncode == 1 and done.stderr.endswith(said)


def test_nothing_to_run(ir):
    with ir.main_graph:
        popxl.variable(1.0)
    ir.create_graph(lambda x: x + 1, popxl.TensorSpec((), F32))
    with pytest.raises(RuntimeError, match="no ops"):
        popxl.Session(ir)


def test_inputs_of_the_main_graph(ir):
    with ir.main_graph:
        popxl.graph_input((), F32, "unbound") + 1
    with pytest.raises(PopxlError, match="unbound .* has no value.* `popxl.variable`; or, if a layer reads it"):
        popxl.Session(ir)


def test_properties(program):
    session = popxl.Session(program.ir)
    assert (session.ir, session.is_attached, session.weights_to_host_on_exit) == (program.ir, False, True)
    for name in ("ir", "is_attached"):
        with pytest.raises(AttributeError):
            setattr(session, name, None)
    session.dataset = "mine"  # attributes of the user's own are welcome
    assert program.works(session)


def test_a_session_made_inside_a_graph(ir):
    with ir.main_graph:
        s = popxl.d2h_stream((), F32)
        ops.host_store(s, popxl.variable(1.0) + 1)
        with popxl.Session(ir) as session:
            assert session.run()[s] == 2
        assert popxl.gcg() is ir.main_graph


def test_several_sessions_of_one_ir(counter):
    first, second = popxl.Session(counter), popxl.Session(counter)
    with first:
        first.run()
        with second:  # it starts from the host copy, which is still the first one
            second.run()
            second.run()
        assert counter.v.data == 3
        assert first.get_tensor_data(counter.v) == 2
    with second:
        assert second.get_tensor_data(counter.v) == 2


def test_a_session_takes_the_program_as_it_is(counter):
    before = popxl.Session(counter)
    with counter.main_graph:
        s = popxl.d2h_stream((), F32)
        ops.host_store(s, popxl.variable(7.0) * 2)
    after = popxl.Session(counter)
    with before:
        assert dict(before.run()) == {}
    with after:
        assert after.run()[s] == 14
    with before:
        assert dict(before.run()) == {}


def test_options_between_sessions(counter):
    with counter.main_graph:
        counter.v * 2  # unordered with the change of `v`
    with pytest.raises(PopxlError, match="^Inplacing"):
        popxl.Session(counter)
    counter.options.enableInplaceAmbiguityChecking = False
    popxl.Session(counter)


def test_unused_variables_are_dropped(ir):
    with ir.main_graph:
        unused = popxl.variable([3.0])
        y = popxl.variable(1.0) + 1
    with popxl.Session(ir) as session:
        session.run()
        assert session.get_tensor_data(unused).tolist() == [3]
    assert y.shape == ()


# The with block -------------------------------------------------------------------------------------------------------


def test_entering_and_leaving(counter, transfers):
    session = popxl.Session(counter)
    assert transfers() == (0, 0)
    with session as entered:
        assert entered is session and session.is_attached
        assert transfers() == (1, 0)
        session.run()
    assert transfers() == (0, 1)
    assert not session.is_attached
    assert counter.v.data == 2
    with session:  # as often as one likes; each time the host copies go up
        session.run()
    assert transfers() == (1, 1)
    assert counter.v.data == 3


def test_trampoline(counter, transfers):
    session = popxl.Session(counter)
    with session:
        with session, session:
            session.run()
            assert transfers() == (1, 0)
        assert session.is_attached
        assert transfers() == (0, 0)
        session.run()
    assert transfers() == (0, 1)
    assert (counter.v.data, session.is_attached) == (3, False)


def test_leaving_by_an_exception(counter, transfers):
    session = popxl.Session(counter)
    with pytest.raises(KeyError), session:
        session.run()
        raise KeyError
    assert transfers() == (1, 0)
    assert (session.is_attached, counter.v.data) == (False, 1)
    assert session.get_tensor_data(counter.v) == 1
    with session:
        session.run()
        assert session.get_tensor_data(counter.v) == 2


def test_an_exception_in_a_nested_block(counter):
    with popxl.Session(counter) as session:
        session.run()
        with pytest.raises(KeyError), session:
            raise KeyError
        assert session.is_attached
        session.run()
    assert counter.v.data == 3


def test_weights_may_stay_on_the_device(counter, transfers):
    with popxl.Session(counter, weights_to_host_on_exit=False) as session:
        session.run()
    assert transfers() == (1, 0)
    assert counter.v.data == 1
    session.weights_to_host_on_exit = True
    with session:
        session.run()
    assert counter.v.data == 2


def test_an_upload_that_fails_releases_the_device(counter, monkeypatch):
    session = popxl.Session(counter)
    with monkeypatch.context() as patch:
        patch.setattr(session.store, "upload", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError), session:
            pass
    assert not session.is_attached
    with session:
        session.run()
    assert counter.v.data == 2


def test_detaching_inside(counter):
    with popxl.Session(counter) as session:
        session.run()
        session.detach()
        assert not session.is_attached
        with pytest.raises(ValueError, match="not attached"):
            session.run()
    assert (session.is_attached, counter.v.data) == (False, 1)
    with session:
        session.run()
    assert counter.v.data == 2


@pytest.mark.parametrize(
    "use",
    [
        lambda s, p: s.run(p.feeds()),
        lambda s, p: s.run({"wrong": 1}),  # before anything else
        lambda s, p: s.run_with_outputs(p.feeds(), s.create_host_outputs()),
        lambda s, p: s.run_with_outputs({}, {}),
        lambda s, p: s.weights_from_host(),
        lambda s, p: s.weights_to_host(),
    ],
)
def test_what_needs_a_device(program, use):
    session = popxl.Session(program.ir)
    for _ in range(2):
        with pytest.raises(ValueError, match="not attached"):
            use(session, program)
        assert program.works(session)


# Running --------------------------------------------------------------------------------------------------------------


def test_run(program):
    with popxl.Session(program.ir) as session:
        outputs = session.run(program.feeds())
        assert set(outputs) == {program.y, program.twice} and len(outputs) == 2
        y, twice = outputs[program.y], outputs[program.twice]
        assert (type(y), y.dtype, y.tolist()) == (np.ndarray, np.float32, [13, 16])
        assert (twice.dtype, twice.shape, twice) == (np.int32, (), 6)
        assert outputs[program.y] is y
        y[0] = 0  # it belongs to the caller
        assert session.run(program.feeds())[program.y].tolist() == [14, 17]
        assert y.tolist() == [0, 16]


def test_run_with_outputs(program):
    with popxl.Session(program.ir) as session:
        outputs = session.create_host_outputs()
        y = outputs[program.y]
        assert session.run_with_outputs(program.feeds(), outputs) is None
        assert (outputs[program.y] is y, y.tolist(), outputs[program.twice]) == (True, [13, 16], 6)
        session.run_with_outputs(inputs=program.feeds(k=0), outputs=outputs)
        assert y.tolist() == [11, 11]


def test_what_a_run_takes_and_gives(program):
    session = popxl.Session(program.ir)  # nothing here needs a device
    assert session.expected_inputs() == {program.x, program.k}
    assert type(session.expected_inputs()) is set
    outputs = session.create_host_outputs()
    assert {s: (a.shape, a.dtype) for s, a in outputs.items()} == {
        program.y: ((2,), np.float32),
        program.twice: ((), np.int32),
    }
    assert session.create_host_outputs()[program.y] is not outputs[program.y]


def test_programs_without_streams(counter):
    with popxl.Session(counter) as session:
        assert [dict(session.run()), dict(session.run({})), dict(session.run(None))] == [{}] * 3
        session.run_with_outputs()
        assert session.expected_inputs() == set() and session.create_host_outputs() == {}
        assert session.get_tensor_data(counter.v) == 5


ARRAYS = [
    np.array([1, 2], np.float32),
    np.array([1, 2], np.float64),
    [1.0, 2.0],
    (1.0, 2.0),
    np.array([[1, 5], [2, 6]], np.float32)[:, 0],
    np.array([2, 1], np.float32)[::-1],
    jnp.array([1.0, 2.0]),
    [np.float32(1), np.float64(2)],
]


@pytest.mark.parametrize("array", ARRAYS, ids=lambda a: type(a).__name__)
def test_kinds_of_arrays(program, array):
    with popxl.Session(program.ir) as session:
        outputs = session.run({program.x: array, program.k: 3})
        assert outputs[program.y].tolist() == [13, 16]


def test_torch_tensors(program):
    torch = pytest.importorskip("torch")
    with popxl.Session(program.ir) as session:
        for x in (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0], requires_grad=True)):
            v = float(session.get_tensor_data(program.v))
            outputs = session.run({program.x: x, program.k: torch.tensor(3)})
            assert outputs[program.y].tolist() == [3 + v, 6 + v]
            assert outputs[program.twice] == 6


@pytest.mark.parametrize("transfers", [1, 3])
@pytest.mark.parametrize("replicas", [1, 2])
def test_jax_arrays_are_fed_again(replicas: int, transfers: int) -> None:
    """Wherever they are, also where the program reads them: runs leave them as they are."""
    ir = popxl.Ir(replicas)
    ir.num_host_transfers = transfers
    with ir.main_graph, popxl.in_sequence():
        x = popxl.h2d_stream((4,), popxl.float32)
        y = popxl.d2h_stream((4,), popxl.float32)
        for _ in range(transfers):
            ops.host_store(y, ops.host_load(x) * 2.0)
    shape = (*(transfers,) * (transfers > 1), *(replicas,) * (replicas > 1), 4)
    data = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    devices = jax.devices("cpu")[:replicas]
    in_place: jax.sharding.Sharding = jax.sharding.SingleDeviceSharding(devices[0])
    if replicas > 1:
        dimensions = jax.sharding.PartitionSpec(*(None,) * (transfers > 1), "replicas")
        in_place = jax.sharding.NamedSharding(jax.sharding.Mesh(devices, "replicas"), dimensions)
    feeds = jax.device_put(data, in_place), jnp.asarray(data)
    with popxl.Session(ir, "ipu_model") as session:
        for feed in (*feeds, *feeds):
            np.testing.assert_array_equal(session.run({x: feed})[y], 2 * data)
    for feed in feeds:
        np.testing.assert_array_equal(feed, data)


@pytest.mark.parametrize("k", [3, np.int32(3), np.int64(3), np.array(3), [3], np.array([[3]], np.int32), jnp.array(3)])
def test_numbers(program, k):
    with popxl.Session(program.ir) as session:
        assert session.run({program.x: [1.0, 2.0], program.k: k})[program.twice] == 6


@pytest.mark.parametrize("transposed", [False, True])
def test_feeds_are_not_kept(ir, transposed):
    """The caller may change an array right after the run, while the program is still at work on it."""
    size = 1000
    with ir.main_graph:
        s, o = popxl.h2d_stream((size, size), F32), popxl.d2h_stream((), F32)
        x = ops.host_load(s)
        for _ in range(3):
            x = ops.matmul(x, x) * (1 / size)
        ops.host_store(o, ops.max(x))
    data = np.ones((size, size), np.float32)
    with popxl.Session(ir) as session:
        outputs = session.run({s: data.T if transposed else data})
        data[:] = 0
        assert outputs[o] == pytest.approx(1, rel=1e-3)


def test_refused_programs(ir):
    with pytest.raises(TypeError, match="`ir` must be an Ir; got .* \\(Graph\\)"):
        popxl.Session(ir.main_graph)


def test_refused_dtypes(program):
    x, k = program.feeds().values()
    bad = [
        ({program.x: x.astype(np.float16)}, {}),
        ({program.x: x.astype(np.float64)}, {"downcast_inputs": False}),
        ({program.x: x.astype(np.int32)}, {}),
        ({program.x: [1, 2]}, {}),
        ({program.k: 3.0}, {}),
        ({program.k: np.array(3, np.uint32)}, {}),
        ({program.k: True}, {}),
    ]
    with popxl.Session(program.ir) as session:
        for changed, options in bad:
            with pytest.raises(PopxlError, match="has the dtype"):
                session.run(program.feeds() | changed, **options)
        with pytest.raises(PopxlError, match="has the dtype float64; expected int32"):
            session.run(program.feeds() | {program.k: np.array(3.0)})
        wide = {program.x: x, program.k: np.array(3, np.int64)}
        assert session.run(wide, downcast_inputs=False)[program.twice] == 6
        assert session.get_tensor_data(program.v) == 11  # nothing ran but the last


def test_numbers_that_do_not_fit_are_refused(program):
    feeds, big, tiny = program.feeds(), [1.0, -1e300], [1.0, 1e-300]
    told = r"the array for HostToDeviceStream Tensor\[%s .*: %s does not fit %s, where it is %s\."
    bad = [
        (program.x, big, ("x", r"-1e\+300, at \[1\],", "float32", "-inf"), True),
        (program.x, np.array(big), ("x", r"-1e\+300, at \[1\],", "float32", "-inf"), True),
        (program.k, 2**40 + 7, ("k", "1099511627783", "int32", "7"), True),
        (program.k, np.array(-(2**31) - 1), ("k", "-2147483649", "int32", "2147483647"), False),
    ]
    with popxl.Session(program.ir) as session:
        for stream, data, parts, downcast in bad:
            with pytest.raises(ValueError, match=told % parts):
                session.run(feeds | {stream: data}, downcast_inputs=downcast)
        with pytest.raises(ValueError, match=r"write_variable_data: the data for Variable\[.*: 1e\+300 does not fit"):
            session.write_variable_data(program.v, 1e300)
        for data in ([np.inf, 1.0], [np.nan, 1.0], tiny):  # what is infinite, or rounded, may be meant
            session.run(feeds | {program.x: np.array(data)})


def test_refused_streams(program):
    foreign = Program()
    feeds, outputs = program.feeds(), popxl.Session(program.ir).create_host_outputs()
    bad = [
        None,
        {},
        {program.x: feeds[program.x]},
        feeds | {foreign.x: feeds[program.x]},
        feeds | {"x": 1},
        feeds | {program.y: feeds[program.x]},
        {program.x: 1, "k": 1},
    ]
    with popxl.Session(program.ir) as session:
        for inputs in bad:
            with pytest.raises(ValueError, match="the input streams do not match"):
                session.run(inputs)
            with pytest.raises(ValueError, match="the input streams do not match"):
                session.run_with_outputs(inputs, outputs)
        for wrong in (None, {}, {program.y: outputs[program.y]}, outputs | {program.x: outputs[program.y]}):
            with pytest.raises(ValueError, match="the output streams do not match"):
                session.run_with_outputs(feeds, wrong)
        assert session.get_tensor_data(program.v) == 10
    assert program.works(session)


def test_what_is_missing_is_named(program):
    with popxl.Session(program.ir) as session, pytest.raises(ValueError) as error:
        session.run({program.x: 1, "other": 2})
    text = str(error.value)
    assert "missing: HostToDeviceStream Tensor[k " in text and "unexpected: 'other'" in text


# Shapes ---------------------------------------------------------------------------------------------------------------

GOOD_SHAPES = [
    (1, (5,), (5,)),
    (1, (), ()),
    (1, (), (1,)),
    (1, (), (1, 1)),
    (1, (1,), ()),
    (1, (1, 1), (1,)),
    (2, (5,), (2, 5)),
    (2, (5,), (3, 5)),  # longer: the rest is ignored
    (2, (), (2,)),
    (2, (), (4,)),
    (2, (1,), (2, 1, 1)),
    (2, (1,), (2,)),
    (2, (), (2, 1)),
]
BAD_SHAPES = [
    (1, (5,), (4,)),
    (1, (5,), (1, 5)),
    (1, (5,), (5, 1)),
    (1, (), (2,)),
    (1, (2, 3), (3, 2)),
    (1, (2, 3), (6,)),
    (2, (5,), (5,)),
    (2, (5,), (1, 5)),
    (2, (5,), (2, 4)),
    (2, (), ()),
    (2, (5,), (2,)),
]
_sessions = {}


def identity(transfers, shape):
    """A session that passes its stream on, times ten. Kept, because many tests use the same."""
    if (transfers, shape) not in _sessions:
        ir = popxl.Ir()
        ir.num_host_transfers = transfers
        with ir.main_graph, popxl.in_sequence():
            source, sink = popxl.h2d_stream(shape, F32), popxl.d2h_stream(shape, F32)
            for _ in range(transfers):
                ops.host_store(sink, ops.host_load(source) * 10)
        _sessions[transfers, shape] = popxl.Session(ir), source, sink
    return _sessions[transfers, shape]


@pytest.mark.parametrize(("transfers", "shape", "given"), GOOD_SHAPES)
def test_shapes_that_fit(transfers, shape, given):
    session, source, sink = identity(transfers, shape)
    full = (transfers, *shape) if transfers > 1 else shape
    assert session.host_shape(shape) == full == session.create_host_outputs()[sink].shape
    data = np.arange(1, 1 + np.prod(given, dtype=int), dtype=np.float32).reshape(given)
    expected = data.ravel()[: np.prod(full, dtype=int)] * 10
    with session:
        found = session.run({source: data})[sink]
        assert (found.shape, found.ravel().tolist()) == (full, expected.tolist())
        filled = np.full(given, -1, np.float32)
        session.run_with_outputs({source: data}, {sink: filled})
    assert filled.ravel()[: len(expected)].tolist() == expected.tolist()
    assert (filled.ravel()[len(expected) :] == -1).all()


@pytest.mark.parametrize(("transfers", "shape", "given"), BAD_SHAPES)
def test_shapes_that_do_not_fit(transfers, shape, given):
    session, source, sink = identity(transfers, shape)
    good = np.zeros(session.host_shape(shape), np.float32)
    error = IndexError if transfers > 1 and not given else ValueError
    message = re.escape(f"has the shape {given}")  # the one that came, not what is left of it
    with session:
        with pytest.raises(error, match=message):
            session.run({source: np.zeros(given, np.float32)})
        with pytest.raises(error, match=message):
            session.run_with_outputs({source: good}, {sink: np.zeros(given, np.float32)})
        assert session.run({source: good})[sink].shape == good.shape


def test_the_dtype_of_an_output():
    session, source, sink = identity(1, (5,))
    with session, pytest.raises(PopxlError, match="has the dtype float64"):
        session.run_with_outputs({source: np.zeros(5, np.float32)}, {sink: np.zeros(5)})


def test_unused_room_is_left_alone(ir):
    """Fewer transfers than there is room for: the rest of the feed is not read, the rest of the output not written."""
    ir.num_host_transfers = 4
    with ir.main_graph, popxl.in_sequence():
        source, sink = popxl.h2d_stream((), F32), popxl.d2h_stream((), F32)
        for _ in range(2):
            ops.host_store(sink, ops.host_load(source) + 1)
    output = np.full(4, 7, np.float32)
    with pytest.warns(PopxlWarning, match="2 .* are never .* Set `ir.num_host_transfers` to 2") as told:
        session = popxl.Session(ir)
    assert sorted(str(each.message).partition(": 2 ")[2][:30] for each in told) == [
        "slots of its host array are ne",
        "values of its host array are n",
    ]
    with session:
        session.run_with_outputs({source: np.arange(4, dtype=np.float32)}, {sink: output})
        found = session.run({source: np.arange(4, dtype=np.float32)})[sink]
    assert output.tolist() == [1, 2, 7, 7]
    assert (found.shape, found[:2].tolist()) == ((4,), [1, 2])


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("called_graphs", ["kept", "dispatched", "inlined"])
def test_slots_that_no_store_of_a_branch_reaches_keep_their_numbers(called_graphs, replicas, tmp_path):
    ir = popxl.Ir(replication=replicas)
    ir.options.calledGraphs, ir.num_host_transfers = called_graphs, 3
    with ir.main_graph, popxl.in_sequence():
        x, flag = popxl.variable([5.0, 6.0]), popxl.h2d_stream((), popxl.bool, "flag")
        total, sink = popxl.d2h_stream((), F32, "a total"), popxl.d2h_stream((2,), F32, "sink")
        then = ir.create_graph(lambda t: ops.host_store(sink, t), x)
        other = ir.create_graph(lambda t: None, x)
        for _ in range(3):
            ops.conditional(ops.host_load(flag), then, other, [x], [x])
            ops.host_store(total, ops.sum(x))

    def check(session, flag, total, sink):
        shape = (3, replicas) if replicas > 1 else (3,)
        for taken in ([[1, 0], [0, 0], [1, 1]], [[0, 1]] * 3, [[0, 0]] * 3):
            flags = np.array(taken, bool)[:, :replicas]
            arrays = {sink: np.full((*shape, 2), -1, np.float32), total: np.zeros(shape, np.float32)}
            session.run_with_outputs({flag: flags.reshape(shape)}, arrays)
            for replica, rows in enumerate(np.moveaxis(arrays[sink].reshape(3, replicas, 2), 1, 0)):
                count = flags[:, replica].sum()
                assert rows.tolist() == [[5, 6]] * count + [[-1, -1]] * (3 - count)
            assert (arrays[total] == 11).all()
            assert session.run({flag: flags.reshape(shape)})[sink].shape == (*shape, 2)

    with popxl.Session(ir, "ipu_model") as session:
        check(session, flag, total, sink)
        session.save(tmp_path / "saved")
    with popxl.Session.load(tmp_path / "saved") as session:
        streams = {s.tensor_id: s for s in (*session.expected_inputs(), *session.create_host_outputs())}
        check(session, streams["flag"], streams["a total"], streams["sink"])


def test_slots_that_are_never_written_are_told_once(ir):
    """Of a stream that is loaded from less often than another, which needs the room, nothing is said."""
    ir.num_host_transfers = 4
    with ir.main_graph, popxl.in_sequence():
        number, factor, total = popxl.h2d_stream((), F32), popxl.h2d_stream((), F32), popxl.d2h_stream((), F32, "total")
        k, t = ops.host_load(factor), popxl.constant(0.0)
        for _ in range(4):
            t = t + ops.host_load(number) * k
        ops.host_store(total, t)
        (line,) = [op.source.line for op in ir.main_graph.ops if op.op_type == "HostStore"]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default", PopxlWarning)
        sessions = [popxl.Session(ir) for _ in range(2)]
        warnings.simplefilter("ignore", PopxlWarning)
        popxl.Session(ir)
    assert [(each.filename, each.lineno) for each in told] == [(__file__, line)]
    assert str(told[0].message).endswith(
        "Tensor[total popxl.dtypes.float32 ()] once, and `ir.num_host_transfers` is 4: 3 slots of its host array are "
        "never written. Those from number 1 on are no results. Give the stream a number of its own: "
        "`popxl.d2h_stream(..., num_host_transfers=1)`."
    )
    with sessions[0] as session:
        assert session.run({number: np.float32([1, 2, 3, 4]), factor: np.float32([0.5] * 4)})[total].tolist()[0] == 5


# Reading --------------------------------------------------------------------------------------------------------------


def test_which_steps_transfer(counter, transfers):
    """The table of the specification, step by step."""
    v, c = counter.v, counter.c
    with popxl.Session(counter) as session:
        transfers()
        session.get_tensor_data(v)
        assert transfers() == (0, 0)
        session.write_variable_data(v, 4.0)
        assert transfers() == (1, 0)
        assert session.get_tensor_data(v) == 4
        assert transfers() == (0, 0)
        session.run()
        session.get_tensor_data(c)
        assert (transfers(), v.in_sync_with_ipu) == ((0, 0), False)
        assert session.get_tensor_data(v) == 5
        assert (transfers(), v.in_sync_with_ipu) == ((0, 1), True)
        session.get_tensor_data(v)
        assert transfers() == (0, 0)
        session.run()
        session.get_tensors_data([v, c, counter.w])
        assert transfers() == (0, 1)
        session.run()
        session.run()
        session.weights_to_host()
        assert (transfers(), v.data) == ((0, 1), 8)
        session.get_tensor_data(v)
        assert transfers() == (0, 0)
        session.run()
        session.weights_from_host()  # changes nothing about what is out of date
        assert (transfers(), v.in_sync_with_ipu) == ((1, 0), False)
        assert session.get_tensor_data(v) == 8
        assert transfers() == (0, 1)
    assert transfers() == (0, 1)


def test_reading(counter):
    with popxl.Session(counter) as session:
        session.run()
        found = session.get_tensors_data([counter.v, counter.c, counter.w])
    assert {t: a.tolist() for t, a in found.items()} == {counter.v: 2, counter.c: 3, counter.w: [6, 6]}
    assert all(a.dtype == np.float32 for a in found.values())
    assert session.get_tensor_data(counter.w).tolist() == [6, 6]  # detached: the host copies


def test_what_is_read_follows_the_host_copy(counter):
    with popxl.Session(counter) as session:
        w = session.get_tensor_data(counter.w)
        session.run()
        assert w.tolist() == [5, 5]
        session.weights_to_host()
        assert w.tolist() == [6, 6]
        session.write_variable_data(counter.w, np.array([1, 2], np.float32))
        assert w.tolist() == [1, 2]


def test_what_cannot_be_read(program, transfers):
    with popxl.Session(program.ir) as session:
        session.run(program.feeds())
        transfers()
        for t in (program.result, program.x, 3, None, "v"):
            with pytest.raises(TypeError, match="is not of type Constant or Variable"):
                session.get_tensor_data(t)
            with pytest.raises(TypeError, match="is not of type Constant or Variable"):
                session.get_tensors_data([program.v, t])
        assert transfers() == (0, 0)
    assert program.works(session)


@pytest.mark.parametrize("dtype", [popxl.int8, popxl.uint8])
def test_dtypes_that_cannot_be_read(ir, dtype):
    with ir.main_graph:
        v, s = popxl.variable([1, 2], dtype), popxl.d2h_stream((2,), dtype)
        ops.host_store(s, ops.add_(v, popxl.constant(1, dtype)))
    with popxl.Session(ir) as session:
        assert session.run()[s].tolist() == [2, 3]
        with pytest.raises(ValueError, match="cannot be read back"):
            session.get_tensor_data(v)
        session.weights_to_host()
        assert session.run()[s].tolist() == [3, 4]
        assert session.values_of([v])[v].tolist() == [3, 4]


# Writing --------------------------------------------------------------------------------------------------------------


def test_writing(counter):
    v, w = counter.v, counter.w
    session = popxl.Session(counter)
    session.write_variable_data(v, 7)  # detached: it goes up with the next block
    assert v.data == 7
    with session:
        session.run()
        assert session.get_tensor_data(v) == 8
        session.write_variables_data({v: np.float32(1), w: np.array([[1, 9], [2, 9]], np.float32)[:, 0]})
        session.run()
        assert session.get_tensor_data(v) == 2
        assert session.get_tensor_data(w).tolist() == [2, 3]
        data = np.array([3, 4], np.float32)
        session.write_variable_data(w, data)
        data[:] = 0  # it was copied
        session.run()
    assert w.data.tolist() == [4, 5]


def test_the_hazard_of_writing(counter):
    """A write uploads the host copies of all variables, also those that the device changed meanwhile."""
    v, w = counter.v, counter.w
    with popxl.Session(counter) as session:
        session.run()
        with pytest.warns(LostUpdateWarning, match=r"those of w are .*`session.weights_to_host..`") as told:
            session.write_variable_data(v, 50)
        assert told[0].filename == __file__
        assert (on_device(session, v), on_device(session, w)) == (50, [5, 5])
        session.run()
        session.weights_to_host()
        session.write_variable_data(v, 60)
        assert (on_device(session, v), on_device(session, w)) == (60, [6, 6])


def test_refused_writes(program, counter):
    v, w = counter.v, counter.w
    bad = [
        (counter.c, 1.0, TypeError, "^Tensor .* is not of type"),
        (program.result, 1.0, TypeError, f"^Tensor {program.result.id} is not of type"),
        (w, np.array([1.0, 2.0]), TypeError, "dtype float64"),
        (w, np.array([1, 2], np.int32), TypeError, "dtype int32"),
        (w, np.float16([1, 2]), TypeError, "dtype float16"),
        (w, 1.0, ValueError, "shape"),
        (w, np.zeros(3, np.float32), ValueError, "shape"),
        (w, np.zeros((1, 2), np.float32), ValueError, "shape"),
        (v, np.zeros(1, np.float32), ValueError, "shape"),
        (w, [1.0, 2.0], AttributeError, "dtype"),
    ]
    with popxl.Session(counter) as session:
        for t, data, error, match in bad:
            with pytest.raises(error, match=match):
                session.write_variable_data(t, data)
        session.run()
        assert session.get_tensor_data(v) == 2
        assert session.get_tensor_data(w).tolist() == [6, 6]


def test_a_read_only_memory_map_is_not_written(ir, tmp_path):
    """Nor is what was to be written with it."""
    np.zeros(2, np.float32).tofile(tmp_path / "map")
    with ir.main_graph, popxl.in_sequence():
        v = popxl.variable([1.0, 2.0])
        fixed = popxl.variable(np.memmap(tmp_path / "map", np.float32, "r"))
        ops.host_store(popxl.d2h_stream((2,), F32), v + fixed)
    new = np.ones(2, np.float32)
    with popxl.Session(ir) as session:
        with pytest.raises(ValueError, match="write_variable_data: .* is a read-only memory map"):
            session.write_variables_data({v: new, fixed: new})
        assert session.get_tensor_data(v).tolist() == [1, 2]


def test_another_device_object_that_is_not_attached(counter):
    device = model_device()
    session = popxl.Session(counter, device)
    with session:
        session._set_device(model_device())
        with pytest.raises(ValueError, match="not attached"):
            session.run()
    session._set_device(device)
    assert session.is_attached and session.run() == {}


def test_float8_variables(ir):
    with ir.main_graph:
        v = popxl.variable([1.0, 2.0], popxl.float8_143)
        ops.reshape(v, (1, 2))
    session = popxl.Session(ir)
    with pytest.raises(TypeError, match="float8"):
        session.write_variable_data(v, 1.0)
    session.write_variable_data(v, popxl.utils.to_numpy([4.0, 8.0], popxl.float8_143))
    with session:
        session.run()


def test_writing_what_is_read_from_all_replicas():
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        v = popxl.variable(1.0, retrieval_mode="all_replicas")
        ops.negate(v)
    with pytest.raises(NotImplementedError, match="all replicas"):
        popxl.Session(ir, "ipu_model").write_variable_data(v, 2.0)


# After errors ---------------------------------------------------------------------------------------------------------


def test_a_session_is_usable_after_errors(program):
    session = popxl.Session(program.ir)
    with session:
        for bad in (None, {program.x: 1.0}, program.feeds(x=[1, 2, 3]), program.feeds() | {program.k: "x"}):
            with pytest.raises((ValueError, PopxlError)):
                session.run(bad)
        session.run(program.feeds())
        assert session.get_tensor_data(program.v) == 11
    assert program.works(session)


@pytest.mark.here
def test_errors_on_the_way_to_a_session_leave_the_ir_as_it_was(counter):
    with pytest.raises(ValueError):
        popxl.Session(counter, "nowhere")
    counter.replication_factor = 1  # not frozen
    with popxl.Session(counter) as session:
        session.run()
    assert counter.v.data == 2


# Together -------------------------------------------------------------------------------------------------------------


def test_a_loop_over_a_stream(ir):
    ir.num_host_transfers = 3
    with ir.main_graph:
        source, sink = popxl.h2d_stream((4,), F32, "src"), popxl.d2h_stream((4,), F32, "dst")

        def body():
            ops.host_store(sink, ops.host_load(source) * 2)

        with popxl.in_sequence():
            ops.repeat(ir.create_graph(body), 3)
    data = np.arange(12, dtype=np.float32).reshape(3, 4)
    with popxl.Session(ir, "ipu_model") as session:
        np.testing.assert_array_equal(session.run({source: data})[sink], 2 * data)


def test_many_runs_do_not_grow(counter):
    """Outputs and feeds of past runs are not kept alive."""
    with popxl.Session(counter) as session:
        before = None
        for i in range(300):
            session.run()
            if i == 100:
                before = sys.getallocatedblocks()
        assert sys.getallocatedblocks() - before < 1000  # one object for each run would show


# Several programs -----------------------------------------------------------------------------------------------------


def test_sessions_of_one_ir_read_their_own_numbers():
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.variable(0.0)
        x += 1
    a, b = popxl.Session(ir), popxl.Session(ir)
    with a, b:
        a.run()
        a.run()
        assert a.get_tensor_data(x) == 2
        b.run()
        assert b.get_tensor_data(x) == 1
        assert a.get_tensor_data(x) == 2


def test_variables_of_another_program_are_refused(program):
    other = Program()
    session = popxl.Session(program.ir)
    for use in (lambda: session.get_tensor_data(other.v), lambda: session.write_variable_data(other.v, 5.0)):
        with pytest.raises(ValueError, match=r"is of Ir\[id=\d+\], another program than this session's"):
            use()
    assert other.v.data == 10 and program.works(session)


def test_too_many_transfers_are_told_before_shapes():
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.h2d_stream((2,), F32, "x")
        graph = ir.create_empty_graph()
        with graph:
            ops.host_load(x)
        ops.repeat(graph, 4)
    with popxl.Session(ir) as session, pytest.raises(PopxlError, match="makes 4 transfers of .* Set it to at least 4"):
        session.run({x: np.zeros((4, 2), np.float32)})


def test_graphs_that_nothing_calls_do_not_count():
    ir = popxl.Ir()
    with ir.main_graph:
        with popxl.ipu(1):
            ir.create_graph(lambda x: x * 2, popxl.TensorSpec((), popxl.float64))
        v = popxl.variable(1.0)
        v += 1
        popxl.variable(1j)
    with popxl.Session(ir, "cpu") as session:
        session.run()
        assert session.get_tensor_data(v) == 2


def test_what_cannot_be_run_names_the_op():
    ir = popxl.Ir()
    with ir.main_graph:
        -popxl.constant(True)
    with pytest.raises(PopxlError, match=r"Op\[Neg\.100\] in the main graph, at `-popxl.constant\(True\)`"):
        popxl.Session(ir)


def test_outputs_are_a_dict_of_numpy_arrays(program):
    """However they are taken out."""
    with popxl.Session(program.ir) as session:
        for take in (dict, lambda outputs: {**outputs}, lambda outputs: outputs | {}, lambda outputs: outputs.copy()):
            outputs = session.run(program.feeds())
            assert isinstance(outputs, dict) and outputs.keys() == {program.y, program.twice}
            assert [*reversed(outputs)] == [*outputs][::-1]
            assert all(type(array) is np.ndarray for array in take(outputs).values())
        np.testing.assert_equal({program.twice: outputs.pop(program.twice)}, {program.twice: 6})


def test_a_stream_that_has_no_output(program):
    with popxl.Session(program.ir) as session:
        outputs = session.run(program.feeds())
    for key in ("y", next(iter(program.feeds()))):
        with pytest.raises(KeyError, match=r"stores to no stream .*; those it stores to: .*\[y .*streams themselves"):
            outputs[key]
        assert key not in outputs and outputs.get(key) is None


@pytest.mark.here
def test_outputs_print_as_numpy_arrays(program):
    with popxl.Session(program.ir) as session:
        assert "array([13., 16.], dtype=float32)" in repr(session.run(program.feeds()))
    assert repr(session).startswith(f"Session[{program.ir!r} on cpu (")


def test_inputs_have_to_be_a_mapping(program):
    with popxl.Session(program.ir) as session, pytest.raises(TypeError, match="maps streams to arrays"):
        session.run([1.0, 2.0])


def test_long_sums_are_exact():
    """As exact as sums of few numbers, that is: not added up one by one."""
    x = np.random.default_rng(0).uniform(size=(2**18, 2)).astype(np.float32)
    (found,) = evaluate(lambda x: [ops.mean(x, 0)], x)
    np.testing.assert_allclose(found, x.astype(np.float64).mean(0), rtol=1e-6)


def test_reductions_are_what_they_say():
    """Products that are summed twice in one expression: XLA's own fusions of these on CPUs have been wrong."""
    random = np.random.default_rng(0)
    x, y = (random.normal(size=(256, 8, 96)).astype(np.float32) for _ in range(2))
    w = random.normal(size=(8, 96)).astype(np.float32)

    def mean(t):
        return ops.mean(t, -1, keepdims=True) if isinstance(t, popxl.Tensor) else t.mean(-1, keepdims=True)

    def formula(x, y, w):
        return y * (w * x - mean(w * x) - (x - y) * y * mean(w * y))

    (found,) = evaluate(lambda x, y, w: [formula(x, y, w)], x, y, w)
    np.testing.assert_allclose(found, formula(*(a.astype(np.float64) for a in (x, y, w))), rtol=1e-3, atol=1e-3)


def test_uploads_are_the_public_ones(program, monkeypatch):
    """Who counts them by replacing the method sees all of them; one that fails gives the device up."""
    counts = []
    upload = popxl.Session.weights_from_host
    monkeypatch.setattr(popxl.Session, "weights_from_host", lambda self: (counts.append(1), upload(self))[1])
    session = popxl.Session(program.ir)
    with session:
        assert len(counts) == 1
        session.write_variable_data(program.v, 3)
        assert len(counts) == 2

    def refuse(self):
        raise RuntimeError("no")

    monkeypatch.setattr(popxl.Session, "weights_from_host", refuse)
    with pytest.raises(RuntimeError, match="no"), session:
        pass
    assert not session.is_attached


def test_values_from_before_the_last_runs_are_told(program, capfd):
    session = popxl.Session(program.ir, weights_to_host_on_exit=False)
    with session:
        session.run(program.feeds())
    session.get_tensor_data(program.v)
    assert "the values from before the last runs" in capfd.readouterr().err


def test_what_is_no_mapping_and_no_list(ir: popxl.Ir) -> None:
    with ir.main_graph:
        v = popxl.variable(1.0)
        out = popxl.d2h_stream((), popxl.float32)
        ops.host_store(out, v + 1)
    with popxl.Session(ir, "ipu_model") as session:
        for wrong in (None, "v", [v], 3):
            with pytest.raises(TypeError, match="^Session.write_variables_data: `tensors` must be a mapping from var"):
                session.write_variables_data(wrong)
        for wrong in ("v", [out], 3):
            with pytest.raises(
                TypeError, match="^Session.run_with_outputs: `outputs` must be a mapping from streams to"
            ):
                session.run_with_outputs({}, wrong)
        for wrong in (None, 3, out):
            with pytest.raises(TypeError, match="^Session.get_tensors_data: expected a list of tensors; got"):
                session.get_tensors_data(wrong)
        with pytest.raises(TypeError, match="is not of type Variable"):
            session.write_variable_data([v], np.float32(3))
        assert session.run() == {out: 2} and session.get_tensor_data(v) == 1
