"""Sessions that run for long, are interrupted at any moment, are given anything, and are used by several threads.

Whatever happens: the numbers are right, or an error says what is wrong and the variables are what they were.
"""

import asyncio
import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.errors import PopxlRuntimeError
from popxl.fp8_utils import host_pow2scale_cast_to_fp8
from runtime.compile_pool import CompilePool
from runtime.signals import defer_signals
from tests.benchmarks.soak import FORMS, Footprint, counter, soak

# A signal may be handled where nothing can be raised: while the garbage is collected, or an open file let go.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

F32 = popxl.float32


def ones(session, program):
    return {program.feed: np.ones(session.host_shape((2,)), np.float32)}


def last(outputs, program):
    """The count that a run has stored last."""
    return float(outputs[program.out].reshape(-1)[-1])


# For long -------------------------------------------------------------------------------------------------------------


@pytest.mark.thorough(but_each=6)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("only_new_objects")
def test_memory_stays_flat(form):
    """Of arrays and objects; of bytes see `tests/benchmarks/soak.py`."""
    runs = soak(FORMS[form](), 600, step=200, read=10, write=50, enter=100)
    _, before, after = [Footprint.now() for _ in runs]
    assert after.arrays <= before.arrays
    assert after.objects - before.objects < 100  # one for each run would be 200


# Interrupted ----------------------------------------------------------------------------------------------------------


class Interrupt(BaseException):
    """What the handler raises."""


@pytest.fixture
def interrupted():
    """`interrupted(seconds, work)` does some work, which a signal ends so much later, if it takes that long."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        pytest.skip("signals are handled in the main thread only")

    def raise_it(*_):
        raise Interrupt

    def interrupted(seconds, work):
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))
                work()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except Interrupt:
            pass

    before = signal.signal(signal.SIGALRM, raise_it)
    yield interrupted
    signal.signal(signal.SIGALRM, before)


@pytest.mark.thorough(but_each=2)
@pytest.mark.parametrize("form", FORMS)
def test_an_interrupted_run_is_all_or_nothing(form, interrupted):
    program = FORMS[form]()
    session = popxl.Session(program.ir, "ipu_hw")
    moments = random.Random(0)
    expected, ended = 1.0, []

    def run(feeds):
        ended.append(session.run(feeds))

    for _ in range(4):  # each time JAX has arrays of another kind to get used to
        with session:
            feeds = ones(session, program)
            for i in range(60):
                before = len(ended)
                interrupted(moments.uniform(0, 2e-3 if i < 5 else 3e-4), partial(run, feeds))
                found = session.get_tensor_data(program.count)
                allowed = [expected + program.growth] + [expected] * (len(ended) == before)
                assert found[0] in allowed and (found == found[0]).all()
                expected = float(found[0])
            session.run(feeds)
            expected += program.growth
        assert (program.count.data == expected).all()
    assert len(ended) < 240  # or nothing has been interrupted


def two_that_are_alike(size=100_000):
    """Two variables that grow by one in each run, and that are large, so that it takes time to copy them."""
    ir = popxl.Ir()
    with ir.main_graph:
        pair = [popxl.variable(np.zeros(size), F32, name) for name in ("a", "b")]
        for v in pair:
            ops.add_(v, popxl.constant(1.0))
    return ir, pair


def value_of(pair):
    """The one number that both variables are made of on the host."""
    (value,) = {float(x) for v in pair for x in (v.data.min(), v.data.max())}
    return value


def test_host_copies_are_of_one_moment(interrupted):
    ir, pair = two_that_are_alike()
    session = popxl.Session(ir)
    moments = random.Random(1)
    runs = 0.0
    with session:
        for _ in range(150):
            session.run()
            runs += 1
            interrupted(moments.uniform(0, 1e-3), lambda: session.get_tensors_data(pair))
            assert value_of(pair) <= runs
        assert session.get_tensor_data(pair[0])[0] == runs
        assert value_of(pair) == runs


def test_writes_are_all_or_nothing(interrupted):
    """On the host, and on the device, which may only be late."""
    ir, pair = two_that_are_alike()
    session = popxl.Session(ir)
    moments = random.Random(2)
    with session:
        for i in range(150):
            before = value_of(pair)
            new = dict.fromkeys(pair, np.full(pair[0].shape, 10.0 * i, np.float32))
            interrupted(moments.uniform(0, 1e-3), partial(session.write_variables_data, new))
            written = value_of(pair)
            assert written in (before, 10.0 * i)
            session.run()
            session.weights_to_host()
            assert value_of(pair) == written + 1


def test_leaving_and_entering(interrupted):
    """The host copies are those of the last whole transfer, and the session can be entered again."""
    ir, pair = two_that_are_alike()
    session = popxl.Session(ir)
    moments = random.Random(3)

    def use():
        with session:
            session.run()

    for _ in range(100):
        before = value_of(pair)
        interrupted(moments.uniform(0, 2e-3), use)
        if session.is_attached:  # the signal came at the first step of leaving, which nothing can put off
            session.detach()
        assert value_of(pair) in (before, before + 1)
        before = value_of(pair)
        use()
        assert value_of(pair) == before + 1


@pytest.mark.parametrize("kind", ["ir", "session"])
def test_a_file_is_the_old_or_the_new_one(kind, interrupted, tmp_path):
    ir, pair = two_that_are_alike()
    session, path = popxl.Session(ir), tmp_path / "program"
    save = ir.save if kind == "ir" else session.save
    load = popxl.Ir.load if kind == "ir" else lambda path: popxl.Session.load(path).ir
    save(path)
    moments = random.Random(4)
    before = 0.0
    for i in range(1, 60):
        session.write_variables_data(dict.fromkeys(pair, np.full(pair[0].shape, float(i), np.float32)))
        interrupted(moments.uniform(0, 15e-3), partial(save, path))
        found = value_of(load(path).main_graph.variables)
        assert found in (before, i)
        before = found
    save(path)
    assert len(list(tmp_path.iterdir())) == 1  # nothing is left of those that were given up


def test_a_replaced_file_can_be_read_by_others(tmp_path):
    """As any file that the process makes."""
    ir, _ = two_that_are_alike()
    ir.save(tmp_path / "program")
    (tmp_path / "usual").write_text("")
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1


def test_a_program_that_is_replaced_while_it_is_read(tmp_path, monkeypatch):
    ir, pair = two_that_are_alike()
    ir.save(tmp_path / "program")
    from popxl.base.container import unpack
    from popxl.program import reading

    before = value_of(pair)

    def replaced(*content):
        monkeypatch.undo()
        pair[0].data[:] = 7.0
        ir.save(tmp_path / "program")
        return unpack(*content)

    monkeypatch.setattr(reading, "unpack", replaced)
    assert value_of(popxl.Ir.load(tmp_path / "program").main_graph.variables[:1]) == before != 7
    assert popxl.Ir.load(tmp_path / "program").main_graph.variables[0].data[0] == 7


def test_a_signal_handler_may_use_the_session(interrupted):
    """As those do that save what there is before the process is ended."""
    program = counter(calls="dispatched")
    seen = []
    with popxl.Session(program.ir, "ipu_hw") as session:
        feeds = ones(session, program)
        signal.signal(signal.SIGALRM, lambda *_: seen.append(float(session.get_tensor_data(program.count)[0])))
        for i in range(200):
            interrupted(i * 1e-6, lambda: session.run(feeds))
        assert session.get_tensor_data(program.count)[0] == 1 + 200 * program.growth
    assert len(seen) > 20  # so many microseconds a run takes at least
    assert {(value - 1) % program.growth for value in seen} == {0.0}


@pytest.mark.usefixtures("only_new_objects")
def test_what_is_called_as_garbage_is_collected_may_use_the_session():
    """Signals are handled there, too: JAX has a function of Python called. Never in the middle of a run."""
    ir = popxl.Ir()
    with ir.main_graph:
        counts = [popxl.variable(0.0, F32) for _ in range(20)]
        for count in counts:
            count += 1.0
    seen, later, thresholds = [], 0, gc.get_threshold()

    def look(phase, _):
        if phase == "start":
            try:
                seen.append({float(value) for value in session.get_tensors_data(counts).values()})
            except RuntimeError as problem:
                seen.append(str(problem))

    def collect(*_):
        """Garbage is collected as a function is called or returns, the `later`-th time from now on; and where Python
        wants to, which is more often in a process that has done little."""
        nonlocal later
        later -= 1
        if later == 0:
            gc.collect()  # then Python has no room left over for small objects, and what a run makes is counted

    with popxl.Session(ir, "cpu") as session:
        session.run()
        gc.callbacks.append(look)
        gc.set_threshold(1)
        try:
            for run in range(1, 61):
                later = run % 30 + 1
                sys.setprofile(collect)
                session.run()
                sys.setprofile(None)
        finally:
            sys.setprofile(None)
            gc.callbacks.remove(look)
            gc.set_threshold(*thresholds)
        assert session.get_tensor_data(counts[0]) == 61
    assert len(seen) > 40 and all(each in [{k} for k in range(62)] for each in seen), seen


def test_garbage_is_collected_after_a_run_that_was_interrupted():
    """Where functions begin, and behind those of C: there signals are handled. A run keeps it off for a moment."""
    ir = popxl.Ir()
    with ir.main_graph:
        out = popxl.d2h_stream((), F32)
        ops.host_store(out, popxl.variable(3.0, F32) + 1)
    later = 0

    def interrupt(_, event, __):
        nonlocal later
        later -= event in ("call", "c_return")
        if later == 0:
            raise Interrupt

    def interrupted(moment):
        nonlocal later
        later = moment
        sys.setprofile(interrupt)
        try:
            session.run()
            sys.setprofile(None)
        except Interrupt:
            return True
        finally:
            sys.setprofile(None)
        return False

    with popxl.Session(ir, "cpu") as session:
        for _ in range(3):  # then C calls the executable
            session.run()
        moment = 1
        while interrupted(moment):
            assert gc.isenabled(), f"interrupted at moment {moment}"
            moment += 1
        assert moment > 10 and session.run()[out] == 4


COMPILING = """
    import signal, sys
    import numpy as np
    import popxl
    from popxl import ops
    from popxl.session import compilation_progress

    def program(length, calls="kept"):
        ir = popxl.Ir()
        ir.options.calledGraphs = calls
        with ir.main_graph:
            x = popxl.variable(np.float32([0.5, 2, 1]), name="x")
            graph = ir.create_graph(lambda x: ops.sin(x) + ops.tanh(x * 0.5), x)
            for _ in range(length):
                (x,) = ops.call(graph, x)
                x = ops.cos(x)
            out = popxl.d2h_stream(x.shape, x.dtype)
            ops.host_store(out, x)
        return ir, out

    def check(ir, out, length):
        x = np.array([0.5, 2, 1])
        for _ in range(length):
            x = np.cos(np.sin(x) + np.tanh(x * 0.5))
        with popxl.Session(ir, "cpu") as session:
            np.testing.assert_allclose(session.run()[out], x, rtol=1e-5)

    def is_interrupted(ir, where):
        # in the call of a function, from when the compilation begins
        file, name, times = where

        def profile(frame, event, _):
            nonlocal times
            code = frame.f_code
            if event == "call" and code.co_filename.endswith(file) and name in ("", code.co_name):
                times -= 1
                if times == 0:
                    signal.raise_signal(signal.SIGINT)

        try:
            with compilation_progress(lambda progress: sys.setprofile(profile)):
                popxl.Session(ir, "cpu")
        except KeyboardInterrupt:
            return True
        finally:
            sys.setprofile(None)

    ir, out = program(12)
    for where in PLACES:
        assert is_interrupted(ir, where), where
    check(*program(1), 1)
    check(ir, out, 12)
    planned, out = program(3, "dispatched")
    assert is_interrupted(planned, PLACES[-1])
    check(planned, out, 3)
    print("all is well")
"""

PLACES = [("lower.py", "lower_op", 20), ("mlir.py", "", 300), ("_base.py", "result", 1)]
"""While JAX traces, while it lowers, and while XLA compiles: the file, the function, and the call of it."""


def test_going_on_after_a_compilation_was_interrupted():
    """What JAX and XLA had begun must not bring down the process when it compiles the next program."""
    program = textwrap.dedent(COMPILING).replace("PLACES", repr(PLACES))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (0, "all is well\n"), done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="a process cannot be ended by a signal there")
def test_an_interrupt_that_nobody_catches_ends_the_program_at_once():
    """The thread that compiles must not abort the process, or hold it."""
    program = """
        import os, signal, threading, time
        from runtime.compile_pool import CompilePool
        with CompilePool(1) as pool:
            working = pool.submit(lambda: time.sleep(1000))
            threading.Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()
            working.result()
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, timeout=100)
    assert done.returncode == -signal.SIGINT
    assert done.stderr.endswith(b"KeyboardInterrupt\n")


def test_threads_that_compile_have_the_settings_of_those_that_wait():
    with jax.enable_x64(True), jax.default_matmul_precision("float32"), CompilePool(1) as pool:
        dtype, precision = pool.submit(lambda: (jnp.float64(1).dtype, jax.config.jax_default_matmul_precision)).result()
    assert (dtype, precision) == (np.float64, "float32")
    with CompilePool(2) as pool:
        assert pool.submit(lambda: jnp.asarray(1.0).dtype).result() == np.float32
        with pytest.raises(ZeroDivisionError):
            pool.submit(lambda: 1 / 0).result()


def test_signals_wait():
    done = []

    def work():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        defer_signals(lambda: signal.raise_signal(signal.SIGINT))
        done.append(True)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        defer_signals(work)
    assert done == [True] and signal.getsignal(signal.SIGINT) is before
    with pytest.raises(ZeroDivisionError):
        defer_signals(lambda: 1 / 0)
    assert signal.getsignal(signal.SIGINT) is before
    with ThreadPoolExecutor(1) as threads:
        threads.submit(defer_signals, lambda: done.append(False)).result()
    assert done == [True, False]


def test_signals_are_handled_as_before_whenever_one_comes(interrupted):
    """In each moment of deferring, in which Python calls something: its handler raises, and no other one stays lost."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGALRM)]
    later = 0

    def come(*_):
        nonlocal later
        later -= 1
        if later == 0:
            signal.raise_signal(signal.SIGALRM)

    def work():
        sys.setprofile(come)
        try:
            defer_signals(lambda: None)
        finally:
            sys.setprofile(None)

    moment = 0
    while later <= 0:
        moment += 1
        later = moment
        interrupted(1000, work)
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGALRM)] == before, moment
        with pytest.raises(KeyboardInterrupt):
            defer_signals(lambda: signal.raise_signal(signal.SIGINT))
    assert moment > 10


# Given anything -------------------------------------------------------------------------------------------------------


class Echo:
    """Stores what it loads, from streams of all kinds; and counts its runs in `v`."""

    SPECS = (((2, 3), F32), ((), popxl.int32), ((4,), popxl.float16), ((2,), popxl.float8_143), ((3, 1), popxl.bool))

    def __init__(self, transfers, replicas, calls):
        self.ir = popxl.Ir(replicas)
        self.ir.num_host_transfers = transfers
        self.ir.options.calledGraphs = calls
        self.transfers = transfers
        with self.ir.main_graph, popxl.in_sequence():
            self.v = popxl.variable(0.0, name="v")
            self.out = {popxl.h2d_stream(*spec): popxl.d2h_stream(*spec) for spec in self.SPECS}
            for _ in range(transfers):
                for source, sink in self.out.items():
                    ops.host_store(sink, ops.host_load(source))
            ops.add_(self.v, popxl.constant(1.0))

    def good(self, session, stream, numbers):
        """An array for a stream."""
        data = numbers.integers(-5, 5, session.host_shape(stream.shape)).astype(np.float32)
        if stream.dtype.is_float8:
            return host_pow2scale_cast_to_fp8(data, stream.dtype)
        return data.astype(stream.dtype.as_numpy())


def as_memmap(array, folder):
    path = folder / f"{len(list(folder.iterdir()))}.npy"
    path.write_bytes(array.tobytes())
    return np.memmap(path, array.dtype, "r", shape=array.shape)


def as_torch(array, transposed=False):
    torch = pytest.importorskip("torch")
    if array.dtype.names:
        array = array.view(np.uint8)
    tensor = torch.tensor(array)
    return tensor.T.contiguous().T if transposed and tensor.ndim == 2 else tensor


def deleted(array):
    gone = jnp.asarray(np.zeros(array.shape, np.float32)) + 0
    gone.delete()
    return gone


def bytes_of(array):
    return array.view(np.uint8) if array.dtype.names else array


def unaligned(array):
    return np.frombuffer(b"x" + array.tobytes(), array.dtype, offset=1).reshape(array.shape)


GOOD = {
    "as it is": lambda a, _: a,
    "of another order": lambda a, _: np.asfortranarray(a),
    "negative strides": lambda a, _: np.flip(np.flip(a).copy()),
    "every other element": lambda a, _: np.repeat(a, 2, axis=-1)[..., ::2] if a.ndim else a,
    "read-only": lambda a, _: np.broadcast_to(a, a.shape),
    "mapped to a file": as_memmap,
    "unaligned": lambda a, _: unaligned(a),
    "of a subclass": lambda a, _: np.ma.masked_array(a),
    "of torch": lambda a, _: as_torch(a),
    "of torch, transposed": lambda a, _: as_torch(a, True),
    "of JAX": lambda a, _: jnp.asarray(bytes_of(a)),
    "on another device": lambda a, _: jax.device_put(bytes_of(a), jax.devices("cpu")[-1]),
    "on several devices": lambda a, _: jax.device_put(
        bytes_of(a), jax.sharding.NamedSharding(jax.make_mesh((2,), ("x",)), jax.sharding.PartitionSpec())
    ),
    "wider": lambda a, _: a.astype({"float32": np.float64, "int32": np.int64}.get(a.dtype.name, a.dtype)),
    "a list": lambda a, _: a.tolist() if a.dtype in (np.float32, np.int32, np.bool_) else a,
}
"""What is as good as an array, made of one."""

BAD = {
    "of another dtype": lambda a, _: (
        a.astype(np.uint16 if a.dtype.names is None else np.float32, copy=True)
        if a.dtype.names is None
        else np.zeros(a.shape, np.float32)
    ),
    "of the other float8": lambda a, _: np.zeros(a.shape, popxl.float8_152.as_numpy()),
    "big-endian": lambda a, _: np.zeros(a.shape, ">f4"),
    "complex": lambda a, _: np.zeros(a.shape, np.complex64),
    "objects": lambda a, _: np.full(a.shape, None, object),
    "texts": lambda a, _: np.full(a.shape, "1"),
    "dates": lambda a, _: np.zeros(a.shape, "M8[D]"),
    "records": lambda a, _: np.zeros(a.shape, [("x", "f4"), ("y", "f4")]),
    "not whole": lambda a, _: np.full(a.shape, np.nan) if a.dtype != np.float32 else np.full(a.shape, 2**62),
    "too few": lambda a, _: np.zeros((0, *a.shape[1:]), a.dtype),
    "empty": lambda a, _: [],
    "another dimension": lambda a, _: np.stack([a, a]),
    "flat": lambda a, _: np.zeros(a.size + 1, a.dtype),
    "one too many in the last": lambda a, _: np.zeros((*a.shape[:-1], 7), a.dtype),
    "None": lambda a, _: None,
    "a text": lambda a, _: "text",
    "a dictionary": lambda a, _: {"a": 1},
    "a generator": lambda a, _: (x for x in [1.0]),
    "a function": lambda a, _: len,
    "ragged": lambda a, _: [[1.0, 2.0], [3.0]],
    "a stream": lambda a, _: Echo,
    "deleted": lambda a, _: deleted(a),
    "keys of JAX": lambda a, _: jax.random.key(0),
    "sparse": lambda a, _: pytest.importorskip("torch").ones(3, 3).to_sparse(),
    "of the wrong bits": lambda a, _: pytest.importorskip("torch").zeros(a.shape).bfloat16(),
    "huge": lambda a, _: [2**80],
}
"""What is no array for a stream, of the shape of one that is."""


def other_keys(feeds, echo):
    """Feeds with other keys than the streams that are expected, and what is no mapping."""
    first, *others = feeds
    return [
        {s: feeds[s] for s in others},
        {**feeds, echo.out[first]: feeds[first]},
        {**feeds, "x": 1.0},
        {**feeds, first.tensor: 1.0},
        {**{s: feeds[s] for s in others}, first.tensor_id: feeds[first]},
        {},
        None,
    ]


@pytest.mark.thorough(but_each=3)
@pytest.mark.parametrize(
    "transfers, replicas, calls", [(1, 1, "kept"), (3, 1, "dispatched"), (1, 2, "kept"), (2, 2, "dispatched")]
)
def test_feeds_of_all_kinds(transfers, replicas, calls, tmp_path):
    """120 for each program, a third of them good."""
    echo = Echo(transfers, replicas, calls)
    numbers, choice = np.random.default_rng(transfers), random.Random(replicas)
    runs = 0
    with popxl.Session(echo.ir, "ipu_hw") as session:
        for _ in range(120):
            arrays = {s: echo.good(session, s, numbers) for s in echo.out}
            feeds = {s: GOOD[choice.choice([*GOOD])](a, tmp_path) for s, a in arrays.items()}
            what = choice.choice(["good", "bad", "keys"])
            if what == "good":
                if transfers > 1:  # what is too long is cut
                    feeds = {s: np.concatenate([arrays[s], arrays[s][:1]]) for s in feeds}
                outputs = session.run(feeds)
                runs += 1
                for source, sink in echo.out.items():
                    np.testing.assert_array_equal(bytes_of(outputs[sink]), bytes_of(arrays[source]))
            elif what == "bad":
                stream, kind = choice.choice([*echo.out]), choice.choice([*BAD])
                feeds[stream] = BAD[kind](arrays[stream], tmp_path)
                with pytest.raises((ValueError, IndexError, PopxlRuntimeError)) as problem:
                    session.run(feeds)
                assert "Session.run: " in str(problem.value) and str(stream) in str(problem.value), kind
            else:
                with pytest.raises(ValueError, match="missing: |unexpected: "):
                    session.run(choice.choice(other_keys(feeds, echo)))
            assert session.get_tensor_data(echo.v) == runs


def test_outputs_that_cannot_be_filled():
    echo = Echo(2, 1, "kept")
    sink = echo.out[next(iter(echo.out))]
    with popxl.Session(echo.ir, "ipu_hw") as session:
        feeds = {s: echo.good(session, s, np.random.default_rng(0)) for s in echo.out}
        outputs = session.create_host_outputs()
        fixed = outputs[sink].copy()
        fixed.flags.writeable = False
        for bad, error, told in [
            (outputs[sink].tolist(), TypeError, "expected a NumPy array .* got .* \\(list\\)"),
            (jnp.asarray(outputs[sink]), TypeError, "expected a NumPy array"),
            (None, TypeError, "got None"),
            (fixed, ValueError, "cannot be filled: expected one that is C-contiguous and can be written"),
            (np.asfortranarray(outputs[sink]), ValueError, "C-contiguous"),
            (np.flip(outputs[sink]), ValueError, "C-contiguous"),
            (outputs[sink].astype(">f4"), PopxlRuntimeError, "has the dtype >f4"),
            (outputs[sink][:1], ValueError, "2 transfers of one run"),
        ]:
            with pytest.raises(error, match=told) as problem:
                session.run_with_outputs(feeds, {**outputs, sink: bad})
            assert str(sink) in str(problem.value)
            assert session.get_tensor_data(echo.v) == 0
        session.run_with_outputs(feeds, outputs)
        for source, filled in echo.out.items():
            np.testing.assert_array_equal(bytes_of(outputs[filled]), bytes_of(feeds[source]))


# Several threads ------------------------------------------------------------------------------------------------------


@pytest.fixture
def at_once():
    """`at_once(f, g)` does all of it at the same time, in threads that take turns as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def at_once(*works):
        start = threading.Barrier(len(works))

        def started(work):
            start.wait(timeout=60)
            return work()

        with ThreadPoolExecutor(len(works)) as threads:
            return [result.result(timeout=120) for result in [threads.submit(started, work) for work in works]]

    yield at_once
    sys.setswitchinterval(interval)


def counts(session, program, runs):
    """Run a session that nobody else runs."""
    feeds = ones(session, program)
    found = [last(session.run(feeds), program) for _ in range(runs)]
    assert np.diff(found).tolist() == [program.growth] * (runs - 1)


@pytest.mark.thorough(but_each=4)
@pytest.mark.parametrize("form", FORMS)
def test_sessions_in_threads(form, at_once):
    """Of two programs, and two of one."""
    programs = [FORMS[form](), FORMS[form]()]
    first, second = (popxl.Session(program.ir, "ipu_hw") for program in programs)
    again = popxl.Session(programs[0].ir, "ipu_hw")
    with first, second, again:
        pairs = [(first, programs[0]), (second, programs[1]), (again, programs[0])]
        at_once(*(partial(counts, session, program, 100) for session, program in pairs))
        for session, program in pairs:
            assert session.get_tensor_data(program.count)[0] == 1 + 100 * program.growth


@pytest.mark.thorough(but_each=2, rotated=True)
@pytest.mark.parametrize("form", FORMS)
def test_a_session_in_several_threads(form, at_once):
    """Their calls take turns."""
    program = FORMS[form]()
    session = popxl.Session(program.ir, "ipu_hw")
    found = []

    def run():
        with session:  # the last one to leave detaches
            for _ in range(60):
                found.append(last(session.run(ones(session, program)), program))

    def read():
        for _ in range(10):
            assert (session.get_tensor_data(program.count)[0] - 1) % program.growth == 0

    with session:
        at_once(run, run, run, read)
    assert sorted(found) == [1 + program.growth * (i + 1) for i in range(180)]
    assert program.count.data[0] == 1 + 180 * program.growth
    assert not session.is_attached


def test_host_copies_of_sessions_in_threads(at_once):
    """Those that sessions of one Ir share are always of one of them."""
    ir, pair = two_that_are_alike(30_000)
    sessions = [popxl.Session(ir) for _ in range(3)]

    def use(session):
        for _ in range(20):
            session.run()
            session.weights_to_host()
            with ir.host_copies.lock:
                value_of(pair)
            session.weights_from_host()

    with sessions[0], sessions[1], sessions[2]:
        at_once(*(partial(use, session) for session in sessions))


@pytest.mark.thorough(but_each=2)
@pytest.mark.parametrize("calls", ["kept", "dispatched"])
def test_programs_are_built_in_threads(calls, at_once, tmp_path):
    """And differentiated, compiled, saved and loaded."""

    def layer(x, w):
        return ops.gelu(x @ w) + ops.sin(x)

    def build(scale):
        ir = popxl.Ir()
        ir.options.calledGraphs = calls
        with ir.main_graph, popxl.in_sequence(), popxl.name_scope(f"scope_{scale}"):
            source = popxl.h2d_stream((3, 3), F32, "x")
            sink = popxl.d2h_stream((3, 3), F32, "dw")
            w = popxl.variable(np.eye(3) * scale, F32, "w")
            x = ops.host_load(source)
            graph = ir.create_graph(layer, x, w)
            gradient = popxl.transforms.autodiff(graph)
            for _ in range(3):
                info = ops.call_with_info(graph, x, w)
                x = info.outputs[0]  # others are there for the gradient
            _, dw = ops.call(gradient.graph, x, inputs_dict=gradient.inputs_dict(info))
            ops.host_store(sink, dw)
            w += dw
        with popxl.Session(ir, "ipu_hw") as session:
            found = [session.run({source: np.full((3, 3), 0.1, np.float32)})[sink] for _ in range(3)]
        path = tmp_path / f"{threading.get_ident()}-{scale}"
        ir.save(path)
        np.testing.assert_array_equal(popxl.Ir.load(path).main_graph.variables[0].data, w.data)
        return str(ir), found

    scales = [1, 2, 3, 1, 2, 3]
    for scale, (text, found) in zip(scales, at_once(*(partial(build, scale) for scale in scales)), strict=True):
        expected_text, expected = build(scale)
        assert text == expected_text
        np.testing.assert_array_equal(found, expected)
    assert os.listdir(tmp_path)


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="the system has no such signals")
def test_asyncio_is_told_once_of_a_signal():
    handled = []

    async def work():
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, lambda: handled.append("once"))
        defer_signals(lambda: signal.raise_signal(signal.SIGUSR1))
        await asyncio.sleep(0.01)
        loop.remove_signal_handler(signal.SIGUSR1)

    asyncio.run(work())
    assert handled == ["once"]
