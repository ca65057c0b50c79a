"""Serialised graphs: loops over micro-batches, with values in streams and remote buffers."""

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.ops import replicated_all_reduce_TP as tensor_parallel
from popxl_addons.transforms.autodiff import autodiff, autodiff_with_accumulation
from popxl_addons.transforms.batch_serialisation import (
    BatchSerialResult,
    RemoteHandle,
    batch_serial_buffer,
    batch_serialise,
    batch_serialise_fwd_and_grad,
    batch_serialise_non_overlapped,
    batch_serialise_overlapped,
)
from popxl_addons.transforms.recomputation import recompute_graph
from tests.tolerances import assert_near

pytestmark = pytest.mark.filterwarnings("ignore:Session. a run stores to:popxl.errors.PopxlWarning")

F32 = popxl.float32
MODES = ("compute", "io", "io_overlapped")
STEPS = 4
SPEC = popxl.TensorSpec((2, 3), F32)


@pytest.fixture
def ir():
    ir = popxl.Ir()
    ir.options.numIOTiles = 32
    ir.num_host_transfers = STEPS
    with ir.main_graph, popxl.in_sequence():
        yield ir


def graph_of(function, *specs, **args):
    """A graph with names for some of its inputs, by position."""
    graph = popxl.gir().create_graph(function, *specs)
    return addons.GraphWithNamedArgs(graph, NamedTensors.from_dict({k: graph.inputs[i] for k, i in args.items()}))


def double(spec=SPEC):
    """A graph of x * 2, its input and its output."""
    graph = graph_of(lambda x: x * 2.0, spec)
    return graph, graph.graph.inputs[0], graph.graph.outputs[0]


def contents(buffer):
    """A stream of all slots of a buffer, as they are at this point of the program."""
    slots = [ops.reshape(ops.remote_load(buffer, i), (1, *buffer.tensor_shape)) for i in range(buffer.entries)]
    return addons.host_store(ops.concat(slots))


def run(ir, inputs=None):
    """What the program stores, by stream, of one run."""
    with popxl.Session(ir, "ipu_model") as session:
        outputs = session.run(inputs or {})
    return {stream: np.array(value) for stream, value in outputs.items()}


def fill(buffer, values):
    """Store arrays in the slots of a buffer."""
    for i, value in enumerate(values):
        ops.remote_store(buffer, i, popxl.constant(value, buffer.tensor_dtype))


# What is loaded and stored ------------------------------------------------------------------------------------------


@pytest.mark.thorough(but_each=3, rotated=True)
@pytest.mark.parametrize("mode", MODES)
def test_from_a_stream_to_a_buffer(ir, mode):
    graph, x, y = double()
    stream, buffer = popxl.h2d_stream(x.shape, F32, "x"), batch_serial_buffer(y, STEPS)
    result = batch_serialise(graph, STEPS, {x: stream}, {}, {y: (buffer, 0)}, io_mode=mode)
    assert isinstance(result, BatchSerialResult) and result.graph.graph.outputs == ()
    assert result.graph.graph.name.startswith(
        graph.graph.name.removesuffix("_subgraph(0)") + "__repeat_graph_subgraph("
    )
    assert result.graph.call(0) == ()
    kept = contents(result.stored_buffers[y].buffer)
    values = np.random.default_rng(1).normal(size=(STEPS, 2, 3)).astype(np.float32)
    np.testing.assert_array_equal(run(ir, {stream: values})[kept][0], 2 * values)


@pytest.mark.thorough(but_each=3, rotated=True)
@pytest.mark.parametrize("mode", MODES)
def test_from_a_buffer_to_a_stream(ir, mode):
    graph, x, y = double()
    buffer, stream = batch_serial_buffer(x, STEPS), popxl.d2h_stream(y.shape, F32, "y")
    values = np.random.default_rng(2).normal(size=(STEPS, 2, 3)).astype(np.float32)
    fill(buffer, values)
    batch_serialise(graph, STEPS, {x: (buffer, 0)}, {y: stream}, {}, io_mode=mode).graph.call(0)
    np.testing.assert_array_equal(run(ir)[stream], 2 * values)


@pytest.mark.thorough(but_each=4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("offset", "rows", "row", "entries", "first"),
    [
        (0, 1, 0, 4, 0),
        (0, 2, 1, 8, 4),
        (np.int64(1), 2, 1, 12, 8),
        (2, 1, 0, 12, 8),
        (None, 3, 2, 4, 0),
        (lambda n: popxl.constant(1), 1, 0, 8, 4),
        (lambda n: n / 2, 4, 3, 16, 4),
        (lambda n: ops.cast(ops.greater(n, popxl.constant(1)), popxl.int32) * 3 - n, 3, 2, 12, 4),
    ],
)
def test_rows(ir, mode, offset, rows, row, entries, first):
    """Which slots belong to a row, and how far a buffer grows."""
    graph, x, y = double()
    stream = popxl.h2d_stream(x.shape, F32, "x")
    buffer = batch_serial_buffer(y, 1, 8 if callable(offset) and rows == 1 else 1)
    handle = RemoteHandle(buffer, offset)
    result = batch_serialise(graph, STEPS, {x: stream}, {}, {y: handle}, rows=rows, io_mode=mode)
    assert buffer.entries == entries and result.stored_buffers == {y: handle}
    result.graph.call(row)
    out = contents(buffer)
    values = np.random.default_rng(3).normal(size=(STEPS, 2, 3)).astype(np.float32)
    expected = np.zeros((entries, 2, 3))
    expected[first : first + STEPS] = 2 * values
    np.testing.assert_array_equal(run(ir, {stream: values})[out][0], expected)


def test_buffers_do_not_shrink(ir):
    graph, x, y = double()
    buffer = batch_serial_buffer(y, STEPS, rows=5)
    batch_serialise(graph, STEPS, {x: (buffer, 0)}, {}, {y: (buffer, 1)}, rows=2, io_mode="compute")
    assert buffer.entries == 5 * STEPS


@pytest.mark.thorough(but_each=3, rotated=True)
@pytest.mark.parametrize("mode", MODES)
def test_a_chain_of_layers(ir, mode):
    """In, two layers that are one graph, out: each doubles."""
    spec = SPEC
    buffer = batch_serial_buffer(spec, STEPS, rows=3)
    into, out = popxl.h2d_stream(spec.shape, F32, "in"), popxl.d2h_stream(spec.shape, F32, "out")

    def serial(load, stream, store, rows=1):
        graph, x, y = double(spec)
        streams, stores = ({y: out}, {}) if stream else ({}, {y: store})
        return batch_serialise(graph, STEPS, {x: load}, streams, stores, rows=rows, io_mode=mode).graph

    serial(into, False, (buffer, 0)).call(0)
    layer = serial((buffer, 0), False, (buffer, 1), rows=2)
    for row in range(2):
        layer.call(row)
    serial((buffer, 2), True, None).call(0)
    values = np.random.default_rng(4).normal(size=(STEPS, 2, 3)).astype(np.float32)
    np.testing.assert_array_equal(run(ir, {into: values})[out], values * 2**4)
    assert buffer.entries == 3 * STEPS


@pytest.mark.parametrize("ipu", [0, 1])
@pytest.mark.parametrize("mode", MODES)
def test_a_row_of_its_own_beside_rows_that_are_counted(ir, mode, ipu):
    """The slots of a buffer of one row are the iterations' numbers; those of the other one are computed from them."""
    with popxl.ipu(ipu):
        graph, x, y = double()
        first, others = batch_serial_buffer(x, STEPS), batch_serial_buffer(y, STEPS, rows=2)
        values = np.random.default_rng(5).normal(size=(STEPS, 2, 3)).astype(np.float32)
        fill(first, values)
        serial = batch_serialise(graph, STEPS, {x: (first, None)}, {}, {y: (others, 0)}, rows=2, io_mode=mode)
        serial.graph.call(1)
        out = contents(others)
    np.testing.assert_array_equal(run(ir)[out][0][STEPS:], 2 * values)


@pytest.mark.thorough(but_each=3, rotated=True)
@pytest.mark.parametrize("mode", MODES)
def test_inputs_that_are_passed_through(ir, mode):
    """They are the same in every iteration, and by reference if they were; several outputs go to several places."""

    def count(x, w, total: popxl.TensorByRef, unused):
        y = x * w
        total += y
        return y, x - w, y + unused

    spec = popxl.TensorSpec((3,), F32)
    graph = graph_of(count, spec, spec, spec, spec, total=2, w=1)
    x, w, total, unused = graph.graph.inputs
    y, difference, dropped = graph.graph.outputs
    stream, to_host = popxl.h2d_stream((3,), F32, "x"), popxl.d2h_stream((3,), F32, "y")
    result = batch_serialise(
        graph, STEPS, {x: stream}, {y: to_host}, {difference: (batch_serial_buffer(difference), 0)}, io_mode=mode
    )
    inputs = result.graph.graph.inputs
    assert [(t.name, t.by_ref) for t in inputs] == [("row", False), ("w", False), ("total", True), ("unused", False)]
    assert (inputs[0].shape, inputs[0].dtype) == ((), popxl.int32)
    assert result.graph.args.to_dict() == {"total": inputs[2], "w": inputs[1]}
    assert result.remap_tensors(NamedTensors(a=unused, b=w)).to_dict() == {"a": inputs[3], "b": inputs[1]}
    with pytest.raises(KeyError, match="'x'"):
        result.remap_tensors(NamedTensors(x=x))
    assert dropped not in result.stored_buffers

    v = NamedTensors(w=popxl.variable([1.0, 2.0, 3.0], name="w"), total=popxl.variable([0.0, 10.0, 0.0], name="total"))
    result.graph.bind(v).call(0, args={inputs[3]: popxl.constant(np.zeros(3), F32)})
    kept, sums = contents(result.stored_buffers[difference].buffer), addons.host_store(v.total)
    values = np.random.default_rng(5).integers(-9, 9, size=(STEPS, 3)).astype(np.float32)
    outputs = run(ir, {stream: values})
    np.testing.assert_array_equal(outputs[to_host], values * [1, 2, 3])
    np.testing.assert_array_equal(outputs[kept][0], values - [1, 2, 3])
    np.testing.assert_array_equal(outputs[sums][0], (values * [1, 2, 3]).sum(0) + [0, 10, 0])


@pytest.mark.thorough(but_each=3, rotated=True)
@pytest.mark.parametrize("mode", MODES)
def test_inputs_may_be_stored(ir, mode):
    """Streamed and passed-through ones; one that is loaded from a buffer stays there."""
    spec = popxl.TensorSpec((3,), F32)
    graph = graph_of(lambda a, b, c: a + b + c, spec, spec, spec)
    a, b, c = graph.graph.inputs
    stream, out = popxl.h2d_stream((3,), F32, "a"), popxl.d2h_stream((3,), F32, "c")
    buffers = [batch_serial_buffer(spec, STEPS) for _ in range(3)]
    elsewhere = batch_serial_buffer(spec)
    values = np.arange(2 * STEPS * 3.0).reshape(2, STEPS, 3)
    fill(buffers[1], values[1])
    stores = {a: (buffers[0], 0), b: (elsewhere, 0), c: (buffers[2], 0)}
    result = batch_serialise(graph, STEPS, {a: stream, b: (buffers[1], 0)}, {c: out, b: out}, stores, io_mode=mode)
    assert [result.stored_buffers[t].buffer for t in (a, b, c)] == buffers
    assert elsewhere.entries == 1
    result.graph.call(0, popxl.constant([7.0, 8.0, 9.0]))
    kept = [contents(buffer) for buffer in (buffers[0], elsewhere, buffers[2])]
    ir.num_host_transfers = 2 * STEPS
    outputs = run(ir, {stream: np.concatenate([values[0], values[0]]).astype(np.float32)})
    np.testing.assert_array_equal(outputs[kept[0]][0], values[0])
    np.testing.assert_array_equal(outputs[kept[1]][0], np.zeros((1, 3)))
    np.testing.assert_array_equal(outputs[kept[2]][0], [[7, 8, 9]] * STEPS)
    expected = np.stack([np.broadcast_to([7.0, 8.0, 9.0], (STEPS, 3)), values[1]], 1).reshape(-1, 3)
    np.testing.assert_array_equal(outputs[out], expected)


@pytest.mark.thorough(but_each=3, rotated=True)
@pytest.mark.parametrize("mode", MODES)
def test_seeds(ir, mode):
    """Iterations get what `split_random_seed` gives one after the other."""
    graph = graph_of(lambda x, seed: seed, popxl.TensorSpec((), F32), popxl.TensorSpec((2,), popxl.uint32))
    x, seed = graph.graph.inputs
    stream, out = popxl.h2d_stream((), F32, "x"), popxl.d2h_stream((2,), popxl.uint32, "seed")
    result = batch_serialise(graph, STEPS, {x: stream}, {seed: out}, {}, seed_input=seed, io_mode=mode)
    assert [(t.name, t.shape) for t in result.graph.graph.inputs] == [("row", ()), ("seed", (2,))]
    carry = popxl.constant([3, 4], popxl.uint32)
    result.graph.call(0, carry)
    expected = []
    for _ in range(STEPS):
        own, carry = ops.split_random_seed(carry)
        expected.append(addons.host_store(own))
    outputs = run(ir, {stream: np.zeros(STEPS, np.float32)})
    np.testing.assert_array_equal(outputs[out], [outputs[stream][0] for stream in expected])
    assert len({tuple(own) for own in outputs[out]}) == STEPS


@pytest.mark.thorough(but_each=4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("group", ["1x4", "2x2", "1x1"])
def test_values_in_pieces(mode, group):
    ir = popxl.Ir(replication=4)
    ir.options.numIOTiles, ir.num_host_transfers = 1, STEPS
    stride, size = map(int, group.split("x"))
    with ir.main_graph, popxl.in_sequence():
        shard_group = ir.replica_grouping(stride=stride, group_size=size)
        into, out = popxl.h2d_stream((2, 4), F32, "in"), popxl.d2h_stream((2, 4), F32, "out")
        first, x, y = double(popxl.TensorSpec((2, 4), F32))
        buffer = batch_serial_buffer(y, STEPS, 1, shard_group)
        assert (buffer.tensor_shape, buffer.meta_shape) == (((2, 4), ()) if size == 1 else ((8 // size,), (2, 4)))
        batch_serialise(first, STEPS, {x: into}, {}, {y: (buffer, 0, shard_group)}, io_mode=mode).graph.call(0)
        last, x, y = double(popxl.TensorSpec((2, 4), F32))
        handle = RemoteHandle(buffer, shard_group=shard_group)
        batch_serialise(last, STEPS, {x: handle}, {y: out}, {}, io_mode=mode).graph.call(0)
    values = np.random.default_rng(6).normal(size=(STEPS, 1, 2, 4)).astype(np.float32)
    values = np.broadcast_to(values, (STEPS, 4, 2, 4))  # the same on all members, as pieces have to be
    np.testing.assert_array_equal(run(ir, {into: values})[out], 4 * values)


def test_tensors_that_are_pieces_are_stored_as_they_are():
    ir = popxl.Ir(replication=2)
    everyone = ir.replica_grouping()
    with ir.main_graph, popxl.in_sequence():
        spec = popxl.TensorSpec((4,), F32, (2, 4))
        graph, x, y = double(spec)
        buffer = batch_serial_buffer(spec, STEPS, rows=2, shard_group=everyone)
        assert buffer.spec.to_tuple() == spec.to_tuple()
        handles = RemoteHandle(buffer, 0, everyone), RemoteHandle(buffer, 1, everyone)
        result = batch_serialise(graph, STEPS, {x: handles[0]}, {}, {y: handles[1]}, io_mode="compute")
        values = np.arange(STEPS * 8.0).reshape(STEPS, 2, 4)
        v = [popxl.remote_replica_sharded_variable(values[i], buffer, i, F32) for i in range(STEPS)]
        v += [popxl.remote_replica_sharded_variable(np.zeros((2, 4)), buffer, STEPS + i, F32) for i in range(STEPS)]
        result.graph.call(0)
    with popxl.Session(ir, "ipu_model") as session:
        session.run()
    np.testing.assert_array_equal([session.get_tensor_data(t) for t in v[STEPS:]], 2 * values)


# The program --------------------------------------------------------------------------------------------------------


def test_the_loop_body_is_there_once(ir):
    """However many steps there are, and only the last one of an overlapped loop stands apart."""
    sizes = {}
    for mode in MODES:
        for steps in (2, 50):
            graph, x, y = double()
            before = len(ir.graphs)
            stream, out = popxl.h2d_stream(x.shape, F32), popxl.d2h_stream(y.shape, F32)
            result = batch_serialise(graph, steps, {x: stream}, {y: out}, {}, io_mode=mode)
            loop = result.graph.graph
            sizes[mode, steps] = len(ir.graphs) - before, len(loop.ops), len(graph.graph.call_sites)
    assert {sizes[mode, 2] == sizes[mode, 50] for mode in MODES} == {True}
    assert [sizes[mode, 50][2] for mode in MODES] == [1, 1, 2]


def test_transfers_are_on_the_io_tiles(ir):
    def transfers(mode):
        graph, x, y = double()
        stream, buffer = popxl.h2d_stream(x.shape, F32), batch_serial_buffer(y)
        count = len(ir.graphs)
        batch_serialise(graph, STEPS, {x: stream}, {}, {y: (buffer, 0)}, io_mode=mode)
        return {op.io_tiles for g in ir.graphs[count:] for op in g.ops if op.op_type in ("HostLoad", "RemoteStore")}

    assert [transfers(mode) for mode in MODES] == [{False}, {True}, {True}]


def test_overlapped_loads_do_not_wait_for_the_call(ir):
    graph, x, y = double()
    buffer = batch_serial_buffer(y)
    result = batch_serialise_overlapped(graph, STEPS, {x: (buffer, 0)}, {}, {y: (buffer, 1)})
    body = next(g for g in ir.graphs if "_repeat_body" in g.name and "wrapper" not in g.name)
    (call,) = (op for op in body.ops if op.called_graphs)
    (load,) = (op for op in body.ops if op.op_type == "RemoteLoad")
    assert not {*load.outputs} & {*call.inputs}
    assert call.inputs[0] in body.inputs
    assert isinstance(result, BatchSerialResult)


def test_one_step_is_not_overlapped(ir, caplog):
    graph, x, y = double()
    stream, out = popxl.h2d_stream(x.shape, F32), popxl.d2h_stream(y.shape, F32)
    with caplog.at_level("WARNING", "popxl_addons"):
        batch_serialise(graph, 1, {x: stream}, {y: out}, {}, io_mode="io_overlapped").graph.call(0)
    assert "nothing to overlap" in caplog.text
    ir.num_host_transfers = 1
    np.testing.assert_array_equal(run(ir, {stream: np.ones((2, 3), np.float32)})[out], np.full((2, 3), 2))


def test_io_tiles_are_needed(ir):
    graph, x, _ = double()
    stream = popxl.h2d_stream(x.shape, F32)
    ir._pb_ir.getSessionOptions().numIOTiles = 0
    for mode in ("io", "io_overlapped"):
        with pytest.raises(ValueError, match="IR must have IO tiles"):
            batch_serialise(graph, STEPS, {x: stream}, {}, {}, io_mode=mode)
    with pytest.raises(ValueError, match="IR must have IO tiles"):
        batch_serialise(graph, STEPS, {x: stream}, {}, {})
    batch_serialise(graph, STEPS, {x: stream}, {}, {}, io_mode="compute")


def test_the_two_ways_by_name(ir):
    for serialise in (batch_serialise_non_overlapped, batch_serialise_overlapped):
        graph, x, y = double()
        stream, out = popxl.h2d_stream(x.shape, F32), popxl.d2h_stream(y.shape, F32)
        serialise(graph, STEPS, {x: stream}, {y: out}, {}, None, 1).graph.call(0)
        values = np.random.default_rng(7).normal(size=(STEPS, 2, 3)).astype(np.float32)
    assert len(ir.main_graph.ops) == 2
    inputs = {s: values for s in ir.get_all_h2d_streams()}
    for value in run(ir, inputs).values():
        np.testing.assert_array_equal(value, 2 * values)


# Handles ------------------------------------------------------------------------------------------------------------


def test_tuples_become_handles(ir):
    graph, x, y = double()
    buffer = batch_serial_buffer(y)
    loads, stores = {x: (buffer, None)}, {y: (buffer, 1, ir.replica_grouping())}
    result = batch_serialise(graph, STEPS, loads, {}, stores, io_mode="compute")
    assert isinstance(loads[x], RemoteHandle) and loads[x].row_offset is None and loads[x].shard_group is None
    assert stores == result.stored_buffers and stores[y].row_offset == 1 and stores[y].buffer is buffer


@pytest.mark.parametrize(
    "handle",
    [3, None, "buffer", ("buffer", 0), lambda b: b, lambda b: (b,), lambda b: (b, 1.5), lambda b: (b, 0, 4)],
)
def test_handles_of_the_wrong_type(ir, handle):
    graph, x, y = double()
    handle = handle(batch_serial_buffer(x)) if callable(handle) else handle
    count = len(ir.graphs)
    for loads, stores in (({x: handle}, {}), ({}, {y: handle})):
        with pytest.raises(TypeError, match="expected a RemoteHandle|expected a remote buffer"):
            batch_serialise(graph, STEPS, loads, {}, stores, io_mode="compute")
    assert len(ir.graphs) == count


def test_handles_check_themselves(ir):
    buffer = batch_serial_buffer(popxl.TensorSpec((2,), F32))
    for wrong in ({"row_offset": "0"}, {"shard_group": 2}):
        with pytest.raises(TypeError, match="expected a remote buffer, a row offset"):
            RemoteHandle(buffer, **wrong)
    handle = RemoteHandle(buffer)
    assert (handle.buffer, handle.row_offset, handle.shard_group) == (buffer, 0, None)


def test_buffers(ir):
    t = popxl.variable(np.zeros((2, 3)), popxl.float16, "t")
    buffer = batch_serial_buffer(t)
    assert (buffer.tensor_shape, buffer.tensor_dtype, buffer.entries) == ((2, 3), popxl.float16, 1)
    assert batch_serial_buffer(t.spec, 4, 3).entries == 12


def test_buffers_of_what_cannot_be_shared_out():
    ir = popxl.Ir(replication=4)
    with ir.main_graph, pytest.raises(ValueError, match="Can't shard tensor with 6 elements over 4 replicas"):
        batch_serial_buffer(SPEC, shard_group=ir.replica_grouping())


def mistakes(graph, x, y, buffer, stream, out):
    """Arguments, and what the error says."""
    other, ox, oy = double()
    wrong = batch_serial_buffer(popxl.TensorSpec((3, 2), F32))
    half = batch_serial_buffer(popxl.TensorSpec((2, 3), popxl.float16))
    return [
        (dict(rows=0), ValueError, "`rows` is 0; expected 1 or more"),
        (dict(steps=0), ValueError, "`steps` is 0; expected 1 or more"),
        (dict(io_mode="fast"), ValueError, "`io_mode` is 'fast'; expected one of"),
        (dict(load_handles={y: stream}), ValueError, "in `load_handles` is not an input of"),
        (dict(load_handles={ox: stream}), ValueError, "in `load_handles` is not an input of"),
        (dict(store_streams={oy: out}), ValueError, "in `store_streams` is not an input or output of"),
        (dict(store_buffers={oy: (buffer, 0)}), ValueError, "in `store_buffers` is not an input or output of"),
        (dict(seed_input=y), ValueError, "in `seed_input` is not an input of"),
        (dict(seed_input=x), ValueError, "in `seed_input` is not an input of .* that is not loaded"),
        (dict(store_streams={y: stream}), TypeError, "`store_streams` holds .* expected streams to the host"),
        (dict(load_handles={x: (wrong, 0)}), ValueError, "does not fit `x`"),
        (dict(store_buffers={y: (half, 0)}), ValueError, "does not fit"),
        (dict(store_buffers={y: RemoteHandle(buffer, lambda n: 1 / 0)}), ZeroDivisionError, "division by zero"),
        (dict(load_handles={x: popxl.h2d_stream((3, 2), F32, "ids")}), ValueError, r"ids.*\(3, 2\).* does not fit `x`"),
        (dict(store_streams={y: popxl.d2h_stream(y.shape, popxl.float16)}), ValueError, "has .* the dtype float32"),
    ]


@pytest.mark.parametrize("case", range(15))
def test_mistakes(ir, case):
    graph, x, y = double()
    buffer, stream, out = batch_serial_buffer(y), popxl.h2d_stream(x.shape, F32), popxl.d2h_stream(y.shape, F32)
    changes, error, message = mistakes(graph, x, y, buffer, stream, out)[case]
    arguments = dict(steps=STEPS, load_handles={x: stream}, store_streams={}, store_buffers={y: (buffer, 3)})
    before = len(ir.graphs), len(ir.remote_buffers), buffer.entries
    with pytest.raises(error, match=message):
        batch_serialise(graph, **{**arguments, "io_mode": "io_overlapped", **changes})
    assert (len(ir.graphs), len(ir.remote_buffers), buffer.entries) == before
    assert isinstance(arguments["store_buffers"][y], tuple) and not graph.graph.call_sites


def test_named_inputs_are_not_loaded(ir):
    graph = graph_of(lambda x, w: x * w, *[popxl.TensorSpec((2,), F32)] * 2, w=1)
    stream = popxl.h2d_stream((2,), F32)
    with pytest.raises(KeyError, match=r"\['w'\] are named inputs"):
        batch_serialise(graph, STEPS, {t: stream for t in graph.graph.inputs}, {}, {}, io_mode="compute")


# Forward and gradient graphs ----------------------------------------------------------------------------------------


class Layer(addons.Module):
    """tanh(x @ w + b), with dropout if there is a seed."""

    def __init__(self, w, b):
        super().__init__()
        self.w, self.b = w, b

    def build(self, x, seed=None):
        w = self.add_variable_input("w", lambda: self.w, x.dtype)
        b = self.add_variable_input("b", lambda: self.b, x.dtype)
        y = ops.tanh(x @ w + b)
        return y if seed is None else ops.dropout(y, seed, 0.5)


def layer_gradients(x, dy, w, b):
    """NumPy: the gradient of x for each micro-batch, and those of w and b."""
    y = np.tanh(x @ w + b)
    dz = dy * (1 - y * y)
    return dz @ w.T, np.swapaxes(x, -1, -2) @ dz, dz.sum(-2)


@pytest.fixture
def numbers():
    rng = np.random.default_rng(8)
    shapes = {"x": (STEPS, 2, 3), "dy": (STEPS, 2, 5), "w": (3, 5), "b": (5,)}
    return {k: rng.normal(size=shape).astype(np.float32) for k, shape in shapes.items()}


@pytest.mark.thorough(but_each=4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("x_from", ["stream", "buffer"])
def test_a_pair(ir, numbers, mode, x_from):
    """Gradients for each micro-batch, as in NumPy."""
    facts, graph = Layer(numbers["w"], numbers["b"]).create_graph(SPEC)
    v, grad = facts.init(), autodiff(graph)
    x, dy = graph.graph.inputs[0], grad.graph.inputs[0]
    y = graph.graph.outputs[0]
    xs, dys = popxl.h2d_stream(x.shape, F32, "x"), popxl.h2d_stream(y.shape, F32, "dy")
    x_buffer, dy_buffer = batch_serial_buffer(x, STEPS), batch_serial_buffer(dy, STEPS)
    if x_from == "buffer":
        fill(x_buffer, numbers["x"])
        fill(dy_buffer, numbers["dy"])
        loads = {x: (x_buffer, 0), dy: (dy_buffer, 0)}
    else:
        loads = {x: xs, dy: dys}
    outs = [popxl.d2h_stream(t.shape, F32, t.name) for t in grad.graph.outputs]
    forward, backward = batch_serialise_fwd_and_grad(
        graph, grad, graph.args, STEPS, loads, dict(zip(grad.graph.outputs, outs, strict=True)), {}, io_mode=mode
    )
    assert all(isinstance(handle, (RemoteHandle, popxl.HostToDeviceStream)) for handle in loads.values())
    assert backward.graph.args.keys_flat() == grad.args.keys_flat() == ["w"]
    assert backward.remap_tensors(grad.args).to_dict() == backward.graph.args.to_dict()
    assert x in forward.stored_buffers and y in forward.stored_buffers
    assert (forward.stored_buffers[x].buffer is x_buffer) == (x_from == "buffer")
    forward.graph.bind(v).call(0)
    backward.graph.bind(v).call(0)
    outputs = run(ir, {xs: numbers["x"], dys: numbers["dy"]} if x_from == "stream" else {})
    for stream, expected in zip(outs, layer_gradients(**numbers), strict=True):
        assert_near(outputs[stream], expected, 1e-5)


@pytest.mark.thorough(but_each=3, rotated=True)
@pytest.mark.parametrize("mode", MODES)
def test_masks_agree(ir, numbers, mode):
    """The seed of each forward iteration is kept, as is its input, so that both passes drop the same elements."""
    seed_spec = popxl.TensorSpec((2,), popxl.uint32)
    _, graph = Layer(np.eye(3), np.zeros(3)).create_graph(popxl.TensorSpec((2, 3), F32), seed_spec)
    x, seed, *_ = graph.graph.inputs
    grad = autodiff(graph, grads_required=[x])
    dy, y, dx = grad.graph.inputs[0], graph.graph.outputs[0], grad.graph.outputs[0]
    xs, dys = popxl.h2d_stream(x.shape, F32, "x"), popxl.h2d_stream(y.shape, F32, "dy")
    ys, dxs = popxl.d2h_stream(y.shape, F32, "y"), popxl.d2h_stream(dx.shape, F32, "dx")
    forward, backward = batch_serialise_fwd_and_grad(
        graph, grad, graph.args, STEPS, {x: xs, dy: dys}, {y: ys, dx: dxs}, {}, seed, io_mode=mode
    )
    assert forward.stored_buffers[seed].buffer.tensor_dtype == popxl.uint32
    w, b = (popxl.constant(value, F32) for value in (np.eye(3), np.zeros(3)))
    v = NamedTensors(w=w, b=b)
    forward.graph.bind(v).call(0, popxl.constant([1, 2], popxl.uint32))
    backward.graph.bind(v).call(0)
    ones = np.ones((STEPS, 2, 3), np.float32)
    outputs = run(ir, {xs: numbers["x"], dys: ones})
    kept = outputs[ys] != 0
    assert 0 < kept.mean() < 1 and any((kept[0] != other).any() for other in kept[1:])
    expected = np.where(kept, 2 * (1 - np.tanh(numbers["x"]) ** 2), 0)
    assert_near(outputs[dxs], expected, 1e-5)


@pytest.mark.thorough(but_each=2)
@pytest.mark.parametrize("pieces", ["grouping", "tensor", ("data", "tensor")])
def test_activations_in_rows_and_pieces(pieces):
    """Two layers that are one pair of graphs. A grouping stands for a buffer of pieces, wherever values are kept."""
    ir = popxl.Ir(axes={"data": 2, "tensor": 2})
    ir.num_host_transfers = STEPS
    rng = np.random.default_rng(9)
    w, b, x, dy = (
        rng.normal(size=shape).astype(np.float32) for shape in ((2, 4, 4), (2, 4), (STEPS, 2, 4), (STEPS, 2, 4))
    )
    spec = popxl.TensorSpec((2, 4), F32)
    with ir.main_graph, popxl.in_sequence():
        pieces = ir.replica_grouping(group_size=2) if pieces == "grouping" else pieces
        layers = [Layer(w[i], b[i]).create_graph(spec) for i in range(2)]
        graph = layers[0][1]
        grad = autodiff(graph)
        t, y = graph.graph.inputs[0], graph.graph.outputs[0]
        given, dx = grad.graph.inputs[0], grad.graph.outputs[0]
        xs, dys, dws = (popxl.h2d_stream((2, 4), F32), popxl.h2d_stream((2, 4), F32), popxl.d2h_stream((4, 4), F32))
        values, gradients = batch_serial_buffer(t, STEPS, 3, pieces), batch_serial_buffer(dx, STEPS, 3, pieces)

        for stream, buffer, row in ((xs, values, 0), (dys, gradients, 2)):  # fill a row from the host
            half, into, out = halve(spec)
            handle = RemoteHandle(buffer, row, pieces)
            batch_serialise(half, STEPS, {into: stream}, {}, {out: handle}, io_mode="compute").graph.call(0)

        activations = {e.fwd_tensor for e in grad.grad_graph_info.expected_inputs if e.is_activation}
        groups = {a: pieces for a in activations - {t, y, *graph.args.values_flat()}}
        stores = {y: (values, 1, pieces), dx: (gradients, 0, pieces), t: pieces, **groups}
        loads = {t: (values, 0, pieces), given: (gradients, 1, pieces)}
        forward, backward = batch_serialise_fwd_and_grad(
            graph, grad, graph.args, STEPS, loads, {grad.graph.outputs[1]: dws}, stores, rows=2, io_mode="compute"
        )
        assert (values.entries, gradients.entries) == (3 * STEPS, 3 * STEPS)
        assert all(isinstance(handle, RemoteHandle) and handle.shard_group == pieces for handle in stores.values())
        assert forward.stored_buffers[t] is loads[t] is stores[t]  # where it is loaded from, not in a buffer of its own
        assert all(a in forward.stored_buffers for a in activations - {*graph.args.values_flat()})
        assert list(backward.stored_buffers) == [dx]
        v = [facts.init(f"layer{i}") for i, (facts, _) in enumerate(layers)]
        for i in (0, 1):
            forward.graph.bind(v[i]).call(i)
        for i in (1, 0):
            backward.graph.bind(v[i]).call(i)

    h = np.tanh(x @ w[0] + b[0])
    dh, dw1, _ = layer_gradients(h, dy, w[1], b[1])
    _, dw0, _ = layer_gradients(x, dh, w[0], b[0])
    ir.num_host_transfers = 2 * STEPS
    doubled = [np.repeat(2 * np.tile(a, (2, 1, 1))[:, None], 4, axis=1) for a in (x, dy)]
    result = run(ir, {xs: doubled[0], dys: doubled[1]})[dws]
    for replica in range(4):
        assert_near(result[:, replica], np.concatenate([dw1, dw0]), 1e-4)


def halve(spec):
    graph = graph_of(lambda x: x * 0.5, spec)
    return graph, graph.graph.inputs[0], graph.graph.outputs[0]


def test_where_activations_are_said_to_be(ir, numbers):
    """The buffer that the user chose is read, and an input of the gradient graph may be loaded from anywhere."""
    facts, graph = Layer(numbers["w"], numbers["b"]).create_graph(SPEC)
    grad, v = autodiff(graph, grads_required=graph.args.values_flat()), facts.init()
    x, y = graph.graph.inputs[0], graph.graph.outputs[0]
    dy, dw = grad.graph.inputs[0], grad.graph.outputs[0]
    x_again = next(
        t
        for t, e in zip(grad.graph.inputs, grad.grad_graph_info.expected_inputs, strict=True)
        if e.is_activation and e.fwd_tensor == x
    )
    xs, dys, again = (popxl.h2d_stream(t.shape, F32, name) for t, name in ((x, "x"), (y, "dy"), (x, "again")))
    dws, chosen = popxl.d2h_stream(dw.shape, F32, "dw"), batch_serial_buffer(y)
    count = len(ir.remote_buffers)
    forward, backward = batch_serialise_fwd_and_grad(
        graph, grad, graph.args, STEPS, {x: xs, dy: dys, x_again: again}, {dw: dws}, {y: (chosen, 1)}, io_mode="compute"
    )
    assert [handle.buffer for handle in forward.stored_buffers.values()] == [chosen]
    assert len(ir.remote_buffers) == count and chosen.entries == 2 * STEPS
    forward.graph.bind(v).call(0)
    backward.graph.bind(v).call(0)
    outputs = run(ir, {xs: numbers["x"], dys: numbers["dy"], again: 2 * numbers["x"]})
    assert_near(outputs[dws], 2 * layer_gradients(**numbers)[1], 1e-5)


@pytest.mark.thorough(but_each=4)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("x_from", ["stream", "buffer"])
def test_accumulated_gradients(ir, numbers, mode, recomputed, x_from):
    """The means over micro-batches, and the gradient of each input; activations are kept, or computed again."""
    facts, graph = Layer(numbers["w"], numbers["b"]).create_graph(SPEC)
    x, y = graph.graph.inputs[0], graph.graph.outputs[0]
    grad_facts, grad = autodiff_with_accumulation(graph, graph.args.tensors, grads_required=[x])
    grad = recompute_graph(grad) if recomputed else grad
    dy, dx = grad.graph.inputs[0], grad.graph.outputs[0]
    xs, dys = popxl.h2d_stream(x.shape, F32, "x"), popxl.h2d_stream(y.shape, F32, "dy")
    dxs, buffer = popxl.d2h_stream(dx.shape, F32, "dx"), batch_serial_buffer(x, STEPS)
    if x_from == "buffer":
        fill(buffer, numbers["x"])
    loads = {x: xs if x_from == "stream" else (buffer, 0), dy: dys}
    own = grad.args.keys_flat()
    forward, backward = batch_serialise_fwd_and_grad(graph, grad, graph.args, STEPS, loads, {dx: dxs}, {}, io_mode=mode)
    assert {*forward.stored_buffers} == ({x} if recomputed else {x, y})
    assert (forward.stored_buffers[x].buffer is buffer) == (x_from == "buffer")
    weights = ["w", "b"] if recomputed else ["w"]
    assert {*backward.graph.args.keys_flat()} == {*weights, *own}
    assert backward.graph.args.keys_flat()[-len(own) :] == own
    assert grad.args.keys_flat() == backward.graph.args.keys_flat()
    weights = facts.init()
    v = grad_facts.init()
    v.update(weights)
    forward.graph.bind(v).call(0)
    backward.graph.bind(v).call(0)
    means = {name: addons.host_store(t) for name, t in v.accum.to_dict().items()}
    count = addons.host_store(v.mean_accum_counter)
    outputs = run(ir, {xs: numbers["x"], dys: numbers["dy"]} if x_from == "stream" else {dys: numbers["dy"]})
    expected_dx, dw, db = layer_gradients(**numbers)
    assert_near(outputs[dxs], expected_dx, 1e-5)
    assert_near(outputs[means["w"]][0], dw.mean(0), 1e-5)
    assert_near(outputs[means["b"]][0], db.mean(0), 1e-5)
    assert outputs[count][0] == STEPS


@pytest.mark.thorough(but_each=3)
@pytest.mark.parametrize("mode", MODES)
def test_tensor_parallel_layers_with_activations_in_pieces(mode):
    """Weights are divided among four of eight replicas; what all of them know, each keeps a quarter of."""
    ir = popxl.Ir(replication=8)
    ir.options.numIOTiles, ir.num_host_transfers = 32, STEPS
    rng = np.random.default_rng(10)
    shapes = {"w1": (4, 8), "w2": (8, 4), "x": (STEPS, 2, 2, 4), "dy": (STEPS, 2, 2, 4)}  # 2 groups
    n = {k: rng.normal(size=shape).astype(np.float32) for k, shape in shapes.items()}

    class Block(addons.Module):
        def build(self, x, group):
            parts = group.transpose()
            w1 = self.add_variable_input("w1", iter(np.split(n["w1"], 4, 1)), F32, replica_grouping=parts)
            w2 = self.add_variable_input("w2", iter(np.split(n["w2"], 4, 0)), F32, replica_grouping=parts)
            x = tensor_parallel.replicated_all_reduce_identical_inputs(x, group=group)
            y = tensor_parallel.replicated_all_reduce_identical_grad_inputs(ops.tanh(x @ w1) @ w2, group=group)
            return ops.tanh(y)

    with ir.main_graph, popxl.in_sequence():
        group = ir.replica_grouping(group_size=4)
        facts, graph = Block().create_graph(popxl.TensorSpec((2, 4), F32), group)
        x, y = graph.graph.inputs[0], graph.graph.outputs[0]
        grad_facts, grad = autodiff_with_accumulation(
            graph, graph.args.tensors, grads_required=[x], replica_groupings=facts.replica_groupings
        )
        dy, dx = grad.graph.inputs[0], grad.graph.outputs[0]
        xs, dys, dxs = popxl.h2d_stream((2, 4), F32), popxl.h2d_stream((2, 4), F32), popxl.d2h_stream((2, 4), F32)
        forward, backward = batch_serialise_fwd_and_grad(
            graph, grad, graph.args, STEPS, {x: xs, dy: dys}, {dx: dxs}, {x: group, y: group}, io_mode=mode
        )
        assert {forward.stored_buffers[t].buffer.tensor_shape for t in (x, y)} == {(2,)}
        v = facts.init()
        v.update(grad_facts.init())
        forward.graph.bind(v).call(0)
        backward.graph.bind(v).call(0)
    of_replicas = {k: np.repeat(n[k], 4, axis=1) for k in ("x", "dy")}
    with popxl.Session(ir, "ipu_model") as session:
        outputs = session.run({xs: of_replicas["x"], dys: of_replicas["dy"]})
    h = np.tanh(n["x"] @ n["w1"])
    dz = n["dy"] * (1 - np.tanh(h @ n["w2"]) ** 2)
    dh = (dz @ n["w2"].T) * (1 - h * h)
    assert_near(outputs[dxs], np.repeat(dh @ n["w1"].T, 4, axis=1), 1e-4)
    dw1 = np.split((np.swapaxes(n["x"], -1, -2) @ dh).mean(0), 4, -1)  # 4 parts, each for 2 groups
    dw2 = np.split((np.swapaxes(h, -1, -2) @ dz).mean(0), 4, -2)
    for name, expected in (("w1", dw1), ("w2", dw2)):
        means = session.get_tensor_data(v.accum[name])
        assert_near(means, np.stack(expected)[:, 0], 1e-4)


@pytest.fixture
def pair(ir):
    """A graph and its gradient graph, an input and the gradient that is given, and streams for them."""
    _, graph = Layer(np.ones((3, 5)), np.ones(5)).create_graph(SPEC)
    grad = autodiff(graph)
    x, dy = graph.graph.inputs[0], grad.graph.inputs[0]
    return graph, grad, {t: popxl.h2d_stream(t.shape, F32) for t in (x, dy)}


def test_gradients_have_to_be_loaded(ir, pair):
    graph, grad, loads = pair
    x, dy = loads
    with pytest.raises(ValueError, match=rf"\['{dy.name}'\] of .* have no entry in `load_handles`"):
        batch_serialise_fwd_and_grad(graph, grad, graph.args, STEPS, {x: loads[x]}, {}, {})


def test_activations_that_are_nowhere(ir):
    graph = graph_of(lambda x: ops.exp(x * 2.0), popxl.TensorSpec((2,), F32))
    hidden = graph.graph.ops[0].outputs[0]
    grad = graph_of(lambda dy, h: dy * h, *[popxl.TensorSpec((2,), F32)] * 2)
    info = addons.create_grad_graph_info(
        ir,
        graph.graph,
        grad.graph,
        dict(zip(grad.graph.inputs, (graph.graph.outputs[0], hidden), strict=True)),
        {grad.graph.outputs[0]: graph.graph.inputs[0]},
        [hidden],
    )
    grad = addons.GraphWithNamedArgs.from_grad_graph(info)
    streams = {t: popxl.h2d_stream((2,), F32) for t in (graph.graph.inputs[0], grad.graph.inputs[0])}
    with pytest.raises(RuntimeError, match=rf"needs \['{hidden.name}'\] of .* can be found nowhere"):
        batch_serialise_fwd_and_grad(graph, grad, graph.args, STEPS, streams, {}, {})


def test_mistakes_with_a_pair(ir, pair):
    graph, grad, loads = pair
    other, x, y = double()
    stream, out = popxl.h2d_stream(x.shape, F32), popxl.d2h_stream(x.shape, F32)
    own = grad.graph.outputs[0]
    named = NamedTensors(w=graph.args.b, b=graph.args.w)
    before = len(ir.graphs), len(ir.remote_buffers), list(loads.values())
    for changes, error, message in (
        (dict(forward_graph=other), ValueError, "and not of `forward_graph`"),
        (dict(load_handles={**loads, x: stream}), ValueError, "is in neither of the graphs"),
        (dict(store_streams={y: out}), ValueError, "is in neither of the graphs"),
        (dict(store_buffers={y: ir.replica_grouping()}), ValueError, "is in neither of the graphs"),
        (dict(store_buffers={own: 7}), TypeError, "`store_buffers` holds 7"),
        (dict(load_handles={t: 7 for t in loads}), TypeError, "`load_handles` holds 7"),
        (dict(rows=0), ValueError, "`rows` is 0"),
        (dict(io_mode=""), ValueError, "`io_mode` is ''"),
        (dict(store_streams={own: popxl.d2h_stream((7,), F32)}), ValueError, r"\(7,\).* does not fit"),
        (dict(seed_input=graph.graph.inputs[0]), ValueError, "that is not loaded"),
    ):
        arguments = dict(
            forward_graph=graph,
            gradient_graph=grad,
            named_inputs_for_grad_graph=graph.args,
            steps=STEPS,
            load_handles=loads,
            store_streams={},
            store_buffers={},
        )
        with pytest.raises(error, match=message):
            batch_serialise_fwd_and_grad(**{**arguments, **changes})
        assert (len(ir.graphs), len(ir.remote_buffers), list(loads.values())) == before
        assert grad.args.len() == 0
    batch_serialise_fwd_and_grad(**{**arguments, "named_inputs_for_grad_graph": named})
    assert grad.args.keys_flat() == ["b"]  # the gradient needs `w` only, which is called `b` here
    with pytest.raises(ValueError, match=r"\['b'\] of `named_inputs_for_grad_graph` are names of other inputs"):
        other_name = NamedTensors.from_dict({"b": graph.args.w})
        grad.args = NamedTensors(b=grad.graph.inputs[0])
        batch_serialise_fwd_and_grad(**{**arguments, "named_inputs_for_grad_graph": other_name})


def test_a_pair_may_be_serialised_twice(ir, pair):
    graph, grad, loads = pair
    for _ in range(2):
        _, backward = batch_serialise_fwd_and_grad(graph, grad, graph.args, STEPS, loads, {}, {})
        assert backward.graph.args.keys_flat() == ["w"]
