"""Streams: what they are, where they live, and which element goes where."""

import copy

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.errors import PopxlError, UnusedTransferWarning
from popxl.streams import DeviceToHostStream, HostToDeviceStream, Stream

F32 = popxl.float32
makers = pytest.mark.parametrize("make", [popxl.h2d_stream, popxl.d2h_stream], ids=["h2d", "d2h"])


@makers
def test_a_stream(ir, make):
    with ir.main_graph:
        s = make(iter([2, 3]), popxl.int32, "ids")
    assert (s.shape, s.dtype, s.tensor_id) == ((2, 3), popxl.int32, "ids")
    assert s.spec == popxl.TensorSpec((2, 3), popxl.int32)
    kind = HostToDeviceStream if make is popxl.h2d_stream else DeviceToHostStream
    assert isinstance(s, kind) and isinstance(s, Stream)
    assert str(s) == f"{kind.__name__} Tensor[ids popxl.dtypes.int32 (2, 3)]"
    for name in ("shape", "dtype", "spec", "tensor_id"):
        with pytest.raises(AttributeError):
            setattr(s, name, None)


@makers
def test_names(ir, make):
    with ir.main_graph, popxl.name_scope("s"):
        names = [make((), F32, name).tensor_id for name in ("x", "x", None, "")]
    default = "h2d_stream" if make is popxl.h2d_stream else "d2h_stream"
    assert names == ["s/x", "s/x__t0", f"s/{default}", f"s/{default}__t1"]


@makers
def test_the_shape_is_a_sequence_of_integers(ir, make):
    with ir.main_graph:
        for shape in (2, (2.5,)):
            with pytest.raises(TypeError, match="The shape of 'x' must"):
                make(shape, F32, "x")
        with pytest.raises(ValueError, match=r"The shape of 'x' is \(2, -1\); sizes are not negative"):
            make((2, -1), F32, "x")
    assert ir.main_graph.tensors == ()


@makers
def test_streams_live_in_the_main_graph(ir, make):
    with ir.create_empty_graph():
        s = make((), F32, "x")
    assert ir.main_graph.tensors == (s.tensor,)
    with pytest.raises(RuntimeError, match="no current graph"):
        make((), F32)


def test_equality(ir):
    with ir.main_graph:
        a, b, c = popxl.h2d_stream((), F32), popxl.h2d_stream((), F32), popxl.d2h_stream((), F32)
    assert a == a and a != b and a != c and len({a, b, c, a}) == 3
    assert a != "h2d_stream" and a is not None and a != a.tensor


def test_streams_are_not_constructed():
    for kind in (Stream, HostToDeviceStream, DeviceToHostStream):
        with pytest.raises(NotImplementedError):
            kind()


def test_load_and_store_check_their_stream(ir):
    with popxl.Ir().main_graph:
        foreign = popxl.h2d_stream((), F32), popxl.d2h_stream((), F32)
    with ir.main_graph:
        loaded, stored = popxl.h2d_stream((2,), F32), popxl.d2h_stream((2,), F32)
        x = ops.host_load(loaded)
        for bad in (stored, "h2d_stream", None):
            with pytest.raises(TypeError, match="the first argument must be a .*which `popxl.h2d_stream` makes"):
                ops.host_load(bad)
        for bad in (loaded, "d2h_stream", None):
            with pytest.raises(TypeError, match="the first argument must be a .*which `popxl.d2h_stream` makes"):
                ops.host_store(bad, x)
        with pytest.raises(ValueError, match="shape"):
            ops.host_store(stored, popxl.constant([1.0]))
        with pytest.raises(ValueError, match="dtype"):
            ops.host_store(stored, popxl.constant([1, 2]))
        with pytest.raises(TypeError):
            ops.host_store(stored, [1.0, 2.0])
        with pytest.raises(ValueError, match="another Ir"):
            ops.host_load(foreign[0])
        with pytest.raises(ValueError, match="another Ir"):
            ops.host_store(foreign[1], popxl.constant(1.0))


def test_names_of_loaded_tensors(ir):
    with ir.main_graph:
        s = popxl.h2d_stream((), F32, "x")
        loaded = ops.host_load(s), ops.host_load(s, "y")
    assert [t.name for t in loaded] == ["x_hostload", "y_hostload"]
    assert [op.op_type for op in ir.main_graph.ops] == ["Init", "HostLoad"] * 2


# Which element goes where ---------------------------------------------------------------------------------------------


def test_loads_and_stores_take_the_next_element(ir):
    ir.num_host_transfers = 3
    with ir.main_graph, popxl.in_sequence():
        source, sink = popxl.h2d_stream((2,), F32), popxl.d2h_stream((2,), F32)
        a, b, c = (ops.host_load(source) for _ in range(3))
        for t in (c, a, b):
            ops.host_store(sink, t * 10)
    data = np.arange(6, dtype=np.float32).reshape(3, 2)
    with popxl.Session(ir) as session:
        for offset in (0, 100):  # positions start anew with each run
            np.testing.assert_array_equal(session.run({source: data + offset})[sink], (data[[2, 0, 1]] + offset) * 10)


@pytest.mark.filterwarnings("ignore:Session. a run:popxl.errors.PopxlWarning")  # it stores at one
def test_a_loop_that_loads_at_two_speeds(ir):
    """The example of the specification: four turns, one load of `p`, two of `q` and one store to `o` in each."""
    ir.num_host_transfers = 8
    with ir.main_graph, popxl.in_sequence():
        p, q, o = popxl.h2d_stream((), F32, "p"), popxl.h2d_stream((2,), F32, "q"), popxl.d2h_stream((2,), F32, "o")

        def body():
            ops.host_store(o, ops.host_load(p) + ops.host_load(q) * ops.host_load(q))

        ops.repeat(ir.create_graph(body), 4)
    ps, qs = np.arange(8, dtype=np.float32), np.arange(16, dtype=np.float32).reshape(8, 2)
    with popxl.Session(ir) as session:
        found = session.run({p: ps, q: qs})[o]
    assert found.shape == (8, 2)
    np.testing.assert_array_equal(found[:4], ps[:4, None] + qs[0::2] * qs[1::2])


def test_a_stream_that_is_used_inside_and_outside_of_loops_and_calls(ir):
    ir.num_host_transfers = 9
    with ir.main_graph, popxl.in_sequence():
        source, sink = popxl.h2d_stream((), F32), popxl.d2h_stream((), F32)

        def body():
            ops.host_store(sink, ops.host_load(source) + 0.5)

        def nested():
            ops.call(graph)
            ops.repeat(graph, 2)

        graph = ir.create_graph(body)
        outer = ir.create_graph(nested)
        body()
        ops.call(graph)
        ops.repeat(outer, 2)
        body()
    data = np.arange(9, dtype=np.float32) ** 2
    with popxl.Session(ir) as session:
        np.testing.assert_array_equal(session.run({source: data})[sink], data + 0.5)


@pytest.mark.parametrize("loop", [False, True])
def test_more_transfers_than_there_is_room_for(ir, loop):
    ir.num_host_transfers = 2
    with ir.main_graph, popxl.in_sequence():
        sink = popxl.d2h_stream((), F32)
        if loop:
            ops.repeat(ir.create_graph(lambda: ops.host_store(sink, popxl.constant(1.0))), 3)
        else:
            for _ in range(3):
                ops.host_store(sink, popxl.constant(1.0))
    with popxl.Session(ir) as session, pytest.raises(PopxlError, match="3 transfers of DeviceToHostStream"):
        session.run()


def odd_ones(transfers, replicas, way):
    """A program with four iterations. The flags say in which it loads a number and stores its double."""
    ir = popxl.Ir(replicas)
    ir.options.calledGraphs = way
    ir.num_host_transfers = 4
    with ir.main_graph, popxl.in_sequence():
        flags = popxl.h2d_stream((), popxl.bool, "flags")
        source = popxl.h2d_stream((), F32, "source", num_host_transfers=transfers)
        sink = popxl.d2h_stream((), F32, "sink", num_host_transfers=transfers)
        doubled = ir.create_graph(lambda: ops.host_store(sink, ops.host_load(source) * 2.0))
        nothing = ir.create_graph(lambda: None)
        ops.repeat(ir.create_graph(lambda: ops.conditional(ops.host_load(flags), doubled, nothing)), 4)
    return ir, flags, source, sink


@pytest.mark.parametrize("way", ["kept", "inlined", "dispatched"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_branches_that_are_not_taken_make_no_transfers(replicas, way):
    """What counts is what a run does: two of four branches load and store, and there is room for two."""
    ir, flags, source, sink = odd_ones(2, replicas, way)
    taken = np.array([[1, 0], [0, 0], [0, 1], [1, 1]], bool)[:, :replicas]
    data = np.float32([[3, 4], [5, 6]])[:, :replicas]
    with popxl.Session(ir, "ipu_model") as session:
        feeds = {s: array.reshape(session.host_shape(s)) for s, array in ((flags, taken), (source, data))}
        for _ in range(2):
            np.testing.assert_array_equal(session.run(feeds)[sink], (data * 2).reshape(session.host_shape(sink)))
        too_many = {flags: np.ones_like(feeds[flags]), source: feeds[source]}
        with pytest.raises(PopxlError, match=r"up to 4 transfers of .* in one run, and did here, .* 2 .* at least 4"):
            session.run(too_many)
        taken[3] = False  # fewer than there is room for
        np.testing.assert_array_equal(session.run(feeds)[sink].reshape(2, -1)[0], data[0] * 2)


def test_transfers_on_several_ipus_are_counted_together():
    ir = popxl.Ir()
    ir.options.placement = "several"
    ir.num_host_transfers = 3
    with ir.main_graph, popxl.in_sequence():
        flags = popxl.h2d_stream((), popxl.bool, "flags")
        source = popxl.h2d_stream((), F32, "source", num_host_transfers=2)
        sink = popxl.d2h_stream((), F32, "sink", num_host_transfers=2)
        nothing = ir.create_graph(lambda: None)
        for ipu in (0, 1, 0):
            with popxl.ipu(ipu):
                doubled = ir.create_graph(lambda: ops.host_store(sink, ops.host_load(source) * 2.0))
                ops.conditional(ops.host_load(flags), doubled, nothing)
    with popxl.Session(ir, "ipu_model") as session:
        for taken in ([True, True, False], [False, True, True], [True, False, True]):
            np.testing.assert_array_equal(session.run({flags: taken, source: [3.0, 4.0]})[sink], [6, 8])
        with pytest.raises(PopxlError, match=r"up to 3 transfers of .* in one run, and did here, .* 2 .* at least 3"):
            session.run({flags: [True, True, True], source: [3.0, 4.0]})


# Numbers of their own -------------------------------------------------------------------------------------------------


def steps(replicas=1):
    """A program that loads three tokens a run, a rate once and two offsets. It stores each product, and one sum."""
    ir = popxl.Ir(replication=replicas)
    ir.num_host_transfers = 3
    with ir.main_graph, popxl.in_sequence():
        token, product = popxl.h2d_stream((2,), F32, "token"), popxl.d2h_stream((2,), F32, "product")
        rate = popxl.h2d_stream((), F32, "rate", num_host_transfers=1)
        offset = popxl.h2d_stream((2,), F32, "offset", num_host_transfers=2)
        total = popxl.d2h_stream((2,), F32, "total", num_host_transfers=1)
        factor = ops.host_load(rate)

        def turn(x, factor):
            y = ops.host_load(token) * factor
            ops.host_store(product, y)
            return x + y

        start = ops.host_load(offset) - ops.host_load(offset)
        (x,) = ops.repeat(ir.create_graph(turn, start, factor), 3, start, factor)
        ops.host_store(total, x)
    return ir, {s.tensor.name: s for s in (token, rate, offset, product, total)}


def test_numbers_of_transfers(ir):
    with ir.main_graph:
        ours, own = popxl.h2d_stream((), F32, "x"), popxl.d2h_stream((), F32, "y", num_host_transfers=np.int64(2))
    ir.num_host_transfers = 5
    assert (ours.num_host_transfers, own.num_host_transfers) == (5, 2)
    assert (ours.has_own_transfers, own.has_own_transfers) == (False, True)
    own.num_host_transfers, ours.num_host_transfers = None, 1
    assert (ours.num_host_transfers, own.num_host_transfers) == (1, 5)
    for wrong, error in ((0, ValueError), (1.5, TypeError)):
        with ir.main_graph, pytest.raises(error, match="stream 'z': `num_host_transfers`"):
            popxl.d2h_stream((), F32, "z", num_host_transfers=wrong)
        with pytest.raises(error, match="stream 'x': `num_host_transfers`"):
            ours.num_host_transfers = wrong
    assert (len(ir.main_graph.tensors), ours.num_host_transfers) == (2, 1)


@pytest.mark.parametrize(("way", "replicas"), [("kept", 1), ("dispatched", 1), ("kept", 2)])
def test_each_stream_has_its_own_room(tmp_path, way, replicas):
    ir, streams = steps(replicas)
    ir.options.calledGraphs = way
    if replicas == 1 and way == "kept":
        ir.save(tmp_path / "program.json")
        ir = popxl.Ir.load(tmp_path / "program.json")
        streams = {s.tensor.name: s for s in ir.get_all_h2d_streams() | ir.get_all_d2h_streams()}
    session = popxl.Session(ir, "ipu_hw")
    rows = (replicas,) if replicas > 1 else ()
    shapes = {"token": (3, *rows, 2), "rate": rows, "offset": (2, *rows, 2), "product": (3, *rows, 2)}
    assert {name: session.host_shape(s) for name, s in streams.items()} == shapes | {"total": (*rows, 2)}
    made = session.create_host_outputs()
    assert [made[streams[name]].shape for name in ("product", "total")] == [(3, *rows, 2), (*rows, 2)]
    rng = np.random.default_rng(1)
    feeds = {name: rng.integers(-9, 9, shapes[name]).astype(np.float32) for name in ("token", "rate", "offset")}
    products = feeds["token"] * feeds["rate"][..., None]
    expected = {"product": products, "total": feeds["offset"][0] - feeds["offset"][1] + products.sum(0)}
    inputs = {streams[name]: array for name, array in feeds.items()}
    with session:
        outputs = session.run(inputs)
        assert {name: outputs[streams[name]].tolist() for name in expected} == {
            name: array.tolist() for name, array in expected.items()
        }
        session.run_with_outputs(inputs, made)
        assert made[streams["total"]].tolist() == expected["total"].tolist()
        with pytest.raises(ValueError, match=r"rate .* has the shape .*number of transfers of its own: 1 a run"):
            session.run(inputs | {streams["rate"]: np.ones((3, *rows), np.float32)})
        with pytest.raises(ValueError, match=r"2 transfers of one run \(`stream.num_host_transfers`\)"):
            session.run(inputs | {streams["offset"]: np.ones((1, *rows, 2), np.float32)})
    if replicas == 1:
        for memory in (session.memory(), ir.memory()):
            assert (memory.arguments, memory.outputs) == (4 * (6 + 1 + 4), 4 * (6 + 2))
        with session, session.debugging():
            assert session.run(inputs)[streams["total"]].tolist() == expected["total"].tolist()


def test_own_numbers_are_told(ir):
    """In prints, in what does not fit, in what nobody uses, and when they change."""
    ir, streams = steps()
    assert "stream=rate ×1" in str(ir.main_graph) and "stream=token" in str(ir)
    with ir.main_graph, popxl.in_sequence():
        ops.host_store(streams["total"], ops.host_load(streams["rate"]) + ops.host_load(streams["offset"]))
    with pytest.raises(PopxlError, match="2 transfers of .*rate.* and its own `num_host_transfers` is 1"):
        popxl.to_jax(ir.main_graph)
    with popxl.Session(ir) as session, pytest.raises(PopxlError, match="and its own `num_host_transfers` was 2 when"):
        session.run({s: np.zeros(session.host_shape(s), np.float32) for s in session.expected_inputs()})
    for name, count in (("rate", 3), ("offset", 3), ("total", 2)):
        streams[name].num_host_transfers = count
    with session, pytest.raises(PopxlError, match="transfers of their own is .*'rate': 3.*, and was .*'rate': 1"):
        session.run({})
    with pytest.warns(
        UnusedTransferWarning, match="rate.* twice, and its own `num_host_transfers` is 3: 1 value .*=2`"
    ):
        popxl.Session(ir)


def test_own_numbers_in_jax():
    ir, _ = steps()
    f = popxl.to_jax(ir.main_graph)
    outputs, _ = f(token=np.arange(6, dtype=np.float32).reshape(3, 2), rate=2.0, offset=np.zeros((2, 2), np.float32))
    assert outputs["total"].tolist() == [12, 18] and outputs["product"].shape == (3, 2)


@pytest.mark.parametrize(("way", "replicas"), [("kept", 1), ("dispatched", 1), ("kept", 2)])
def test_what_nobody_looks_at_is_not_sent(way, replicas):
    """It has to be given, as PopXL wants it, and has to fit."""
    ir = popxl.Ir(replication=replicas)
    ir.options.calledGraphs = way
    ir.num_host_transfers = 2
    with ir.main_graph, popxl.in_sequence():
        used, unused, out = popxl.h2d_stream((3,), F32), popxl.h2d_stream((5,), F32), popxl.d2h_stream((3,), F32)

        def turn():
            ops.host_load(unused)
            ops.host_store(out, ops.host_load(used) * 2)

        ops.repeat(ir.create_graph(turn), 2)
    session = popxl.Session(ir, "ipu_hw")
    assert session.expected_inputs() == {used, unused}
    data = np.arange(6 * replicas, dtype=np.float32).reshape(session.host_shape(used))
    with session:
        feeds = {used: data, unused: np.ones(session.host_shape(unused), np.float32)}
        assert session.run(feeds)[out].tolist() == (data * 2).tolist()
        with pytest.raises(ValueError, match="missing: .*h2d_stream__t"):
            session.run({used: data})
        with pytest.raises(ValueError, match="has the shape"):
            session.run({used: data, unused: np.ones(5, np.float32)})
        if replicas == 1:
            with session.debugging():
                assert session.run(feeds)[out].tolist() == (data * 2).tolist()
    (sent,) = [s.bytes for s in session.report.streams if s.direction == "in" and s.spec == "f32[3]"]
    assert session.memory().arguments == sent > 0


def test_copies_of_what_holds_streams_and_buffers_hold_the_same_ones():
    """Of outputs, whose keys they are, a deep copy could not be read."""
    ir = popxl.Ir()
    with ir.main_graph:
        stream, buffer = popxl.d2h_stream((2,), popxl.float32), popxl.remote_buffer((3,), popxl.float32)
        popxl.ops.host_store(stream, popxl.variable([1.0, 2.0]) + 1.0)
    with popxl.Session(ir) as session:
        outputs = copy.deepcopy(session.run())
    np.testing.assert_array_equal(outputs[stream], [2.0, 3.0])
    assert copy.deepcopy([stream, buffer]) == [copy.copy(stream), copy.copy(buffer)] == [stream, buffer]
    assert copy.deepcopy(buffer) is buffer


@pytest.mark.parametrize(
    ("shape", "hint"), [((3, 4), "stack an array for each replica"), ((6, 4), r"`array\.reshape\(")]
)
def test_a_feed_without_the_dimension_of_replicas_is_told_how(shape, hint):
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        x = popxl.h2d_stream((3, 4), popxl.float32, "x")
        ops.host_store(popxl.d2h_stream((3, 4), popxl.float32, "y"), ops.host_load(x))
    message = rf"expected \(2, 3, 4\)\. .* 2 replicas .*{hint}"
    with popxl.Session(ir, "ipu_hw") as session, pytest.raises(ValueError, match=message):
        session.run({x: np.zeros(shape, np.float32)})
