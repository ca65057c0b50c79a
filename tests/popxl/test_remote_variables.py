"""Variables in remote buffers and in pieces: where their values go, and how they come back."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import popxl
from popxl import ops
from popxl.errors import PopxlError, RemoteSlotWarning
from popxl.values.sharding import ShardLayout, shard_layout, shard_length
from runtime.targets.devices import Device
from tests.popxl.evaluate import store

F32, I32 = popxl.float32, popxl.int32


@pytest.fixture(params=["one device", "a device each"])
def device(request: pytest.FixtureRequest) -> Callable[[popxl.Ir], Device]:
    """The device for an Ir."""
    if request.param == "one device":
        return lambda ir: Device("ipu_model", tuple(jax.devices("cpu")[:1]))
    if len(jax.devices("cpu")) < 8:
        pytest.skip("JAX was started with fewer devices")
    return lambda ir: Device("ipu_model", tuple(jax.devices("cpu")[: ir.replication_factor]))


# Arithmetic ---------------------------------------------------------------------------------------------------------

# replicas, grouping, host shape, pieces asked for; pieces, their length, and the piece that each replica holds
TABLE: list[Any] = [
    (8, None, (3, 5), None, 8, 2, [0, 1, 2, 3, 4, 5, 6, 7]),
    (8, None, (3, 5), 4, 4, 4, [0, 1, 2, 3, 0, 1, 2, 3]),
    (8, (2, 4), (2, 3, 5), None, 4, 4, [0, 0, 1, 1, 2, 2, 3, 3]),
    (8, (2, 4), (2, 3, 5), 2, 2, 8, [0, 0, 1, 1, 0, 0, 1, 1]),
    (3, None, (7,), None, 3, 3, [0, 1, 2]),
    (4, (1, 2), (2, 12), None, 2, 6, [0, 1, 0, 1]),
    (2, (1, 1), (2, 4, 5), None, 1, 20, [0, 0]),
    (8, [0, 0, 1, 1, 1, 1, 0, 0], (2, 6), None, 2, 3, [0, 1, 0, 1, 0, 1, 0, 1]),
]


def grouping_of(ir: popxl.Ir, how: Any) -> Any:
    if how is None:
        return ir.replica_grouping()
    return ir.replica_grouping_from_assignments(how) if isinstance(how, list) else ir.replica_grouping(*how)


@pytest.mark.parametrize(("replicas", "how", "shape", "asked", "count", "length", "held"), TABLE)
def test_pieces(replicas, how, shape, asked, count, length, held):
    """Length, padding, and who holds what: contiguous pieces of the value of the replica's group."""
    ir = popxl.Ir(replication=replicas)
    grouping = grouping_of(ir, how)
    data = np.arange(1, 1 + np.prod(shape)).reshape(shape)
    with ir.main_graph:
        buffer = popxl.replica_sharded_buffer(shape, I32, grouping, asked)
        v, piece = popxl.replica_sharded_variable(data, I32, "v", replica_grouping=grouping, shard_over=asked)
    value = shape[1:] if grouping.num_groups > 1 else shape
    assert (buffer.tensor_shape, buffer.meta_shape, buffer.tensor_dtype) == ((length,), value, I32)
    assert (v.shape, piece.shape, piece.meta_shape) == (value, (length,), value)
    parts = shard_layout(v)
    assert (parts.count, parts.length) == (count, length)
    rows = parts.shards_of(v.data)
    values = data.reshape(grouping.num_groups, -1)
    for replica, k in enumerate(held):
        expected = np.zeros(count * length, int)
        expected[: values.shape[1]] = values[grouping.assignment[replica]]
        np.testing.assert_array_equal(rows[replica], expected[k * length : (k + 1) * length])
    np.testing.assert_array_equal(parts.values(rows), values)
    np.testing.assert_array_equal(parts.values(rows, all_replicas=True), values[grouping.assignment])


@settings(max_examples=25)
@given(st.integers(0, 12), st.sampled_from([1, 2, 3, 4, 6, 12]), st.booleans())
def test_pieces_come_back(size, members, everywhere):
    """For every divisor of the replicas as group size, and every divisor of that as number of pieces."""
    ir = popxl.Ir(replication=12)
    for stride in (s for s in range(1, 13) if 12 % (s * members) == 0):
        grouping = ir.replica_grouping(stride, members)
        values = np.random.default_rng(0).normal(size=(grouping.num_groups, size))
        for count in (n for n in range(1, members + 1) if members % n == 0):
            parts = ShardLayout(grouping, size, shard_length((size,), count), count)
            expected = values[grouping.assignment] if everywhere else values
            np.testing.assert_array_equal(parts.values(parts.shards_of(values), everywhere), expected)


@settings(max_examples=25)
@given(st.integers(0, 12), st.sampled_from([1, 2, 3, 4, 6, 12]), st.sampled_from([None, 0, 2, 5]))
def test_each_element_has_one_first_holder(size, members, room):
    """The lowest replica that holds it; also where replicas have room for some elements only, and none for the rest."""
    ir = popxl.Ir(replication=12)
    for stride in (s for s in range(1, 13) if 12 % (s * members) == 0):
        grouping = ir.replica_grouping(stride, members)
        values = 1 + np.arange(grouping.num_groups * size)
        for count in (None, *(n for n in range(1, members + 1) if members % n == 0)):
            length = (shard_length((size,), count or 1)) if room is None else room
            parts = ShardLayout(grouping, size, length, count)
            rows = parts.shards_of(values)
            found = np.zeros_like(values)
            for replica, (start, stop) in parts.first_holders.items():
                assert not found[start:stop].any()
                found[start:stop] = rows[replica][: stop - start]
                for element in values[start:stop]:
                    assert replica == min(r for r, row in enumerate(rows) if element in row)
            for start, stop in parts.unstored_ranges:
                assert not found[start:stop].any() and not np.isin(values[start:stop], rows).any()
                found[start:stop] = values[start:stop]
            np.testing.assert_array_equal(found, values)


def test_a_stride_of_four():
    """16 replicas in groups of four, two pieces: each group is cut twice."""
    ir = popxl.Ir(replication=16)
    with ir.main_graph:
        v, _ = popxl.replica_sharded_variable(
            np.arange(16).reshape(4, 4), replica_grouping=ir.replica_grouping(4, 4), shard_over=2
        )
    rows = shard_layout(v).shards_of(v.data).tolist()
    assert [rows[r] for r in (0, 4, 8, 12)] == [[0, 1], [2, 3], [0, 1], [2, 3]]
    assert [rows[r] for r in (1, 5, 9, 13)] == [[4, 5], [6, 7], [4, 5], [6, 7]]


def test_pieces_of_a_plain_buffer():
    """As many as the slots ask for, and then a divisor of the group: gathering four of eight finds the whole twice."""
    ir = popxl.Ir(replication=8)
    with ir.main_graph:
        for length, count in ((1, 8), (2, 4), (3, 2), (5, 1), (9, 1)):
            v = popxl.remote_replica_sharded_variable(np.arange(5), popxl.remote_buffer((length,), I32))
            assert shard_layout(v).count == count


# What is made -------------------------------------------------------------------------------------------------------


def test_handles(ir):
    with ir.main_graph as main:
        b = popxl.remote_buffer((3,), I32, 2)
        h, plain = popxl.remote_variable([1, 2, 3], b, np.int64(1), name="h"), popxl.variable(1)
        t = ops.remote_load(b, 1)
    assert isinstance(h, popxl.tensor.Variable) and h.shape == h.shape_on_host == (3,)
    place = h.location_info
    assert (place.isRemote(), place.isSharded(), place.getRemoteBufferInfo()) == (True, False, (1, 1))
    for other in (plain, t):
        assert (other.location_info.isRemote(), other.location_info.isSharded()) == (False, False)
        with pytest.raises(PopxlError, match="in no remote buffer"):
            other.location_info.getRemoteBufferInfo()
    assert "h: i32[3]                                = variable in buffer 1, slot 1" in str(main)


def test_pieces_are_tensors():
    ir = popxl.Ir(replication=2)
    with ir.main_graph as main, popxl.name_scope("a"):
        popxl.remote_buffer((1,), F32)
        w, piece = popxl.replica_sharded_variable([1.0, 2, 3], name="w")
        h = popxl.remote_replica_sharded_variable(np.ones(5), popxl.replica_sharded_buffer((5,), F32), name="h")
    assert (w.id, w.shape, piece.id, piece.shape, piece.meta_shape) == (
        "a/w",
        (3,),
        "a/w_rts_remote_loaded",
        (2,),
        (3,),
    )
    assert type(piece) is popxl.Tensor and w.piece is piece and h.piece is None
    assert [v.location_info.getRemoteBufferInfo() for v in (w, h)] == [(2, 0), (3, 0)]
    assert all(v.location_info.isRemote() and v.location_info.isSharded() for v in (w, h))
    assert str(main).splitlines()[1:] == [
        "    a/h: f32[5]                   = variable in pieces in buffer 3, slot 0",
        "    a/w: f32[3]                   = variable in pieces",
        "    a/w_rts_remote_loaded: f32[2] = piece of a/w",
    ]


def test_refusals():
    """Nothing is left in the graph."""
    ir = popxl.Ir(replication=8)
    with ir.main_graph as main:
        b = popxl.replica_sharded_buffer((5,), F32)
        fours = ir.replica_grouping(group_size=4)
        for grouping, count in ((None, 16), (None, 3), (None, 0), (fours, 8), (fours, 3)):
            with pytest.raises(ValueError, match=rf"`shard_over` is {count}; expected a divisor of"):
                popxl.replica_sharded_buffer((2, 5), F32, grouping, count)
            with pytest.raises(ValueError, match=rf"`shard_over` is {count}; expected a divisor of"):
                popxl.replica_sharded_variable(np.ones((2, 5)), replica_grouping=grouping, shard_over=count)
        for shape, grouping in (((), None), ((2,), fours)):
            with pytest.raises(ValueError, match="a scalar cannot be cut"):
                popxl.replica_sharded_buffer(shape, F32, grouping)
        with pytest.raises(ValueError, match="a scalar cannot be cut"):
            popxl.replica_sharded_variable(1.0)
        before = popxl.gcg().tensors
        with pytest.raises(TypeError, match="`shard_over` must be an integer; got '2'"):
            popxl.replica_sharded_variable(np.ones(4), shard_over="2")
        assert popxl.gcg().tensors == before
        with pytest.raises(
            ValueError, match=r"the value has the shape \(6,\), and RemoteBuffer\[1: 1 x f32\[1\]\] holds"
        ):
            popxl.remote_replica_sharded_variable(np.ones(6), b)
        with pytest.raises(ValueError, match="`offset` is -1"):
            popxl.remote_variable(np.ones(1), b, -1)
        with pytest.raises(TypeError, match="`remote_buffer` must be a RemoteBuffer; got 'b'"):
            popxl.remote_variable(np.ones(1), "b")
        with pytest.raises(ValueError, match="`retrieval_mode` is 'some'"):
            popxl.remote_variable(np.ones(1), b, retrieval_mode="some")
        with pytest.raises(PopxlError, match="one row for each of the 2 groups"):
            popxl.remote_variable(np.ones(3), b, replica_grouping=fours)
    assert main.tensors == ()
    with popxl.Ir().main_graph as single:
        c = popxl.remote_buffer((5,), F32)
        for make in (
            lambda: popxl.remote_replica_sharded_variable(np.ones(5), c),
            lambda: popxl.replica_sharded_variable(np.ones(5)),
        ):
            with pytest.raises(ValueError, match="has one replica"):
                make()
    assert single.tensors == ()
    with pytest.raises(RuntimeError, match="no current graph"):
        popxl.remote_variable(1.0, b)
    with ir.create_empty_graph(), pytest.raises(ValueError, match="variables live in the main graph"):
        popxl.remote_variable(1.0, b)


def test_one_shape_for_a_buffer():
    """The first variable says of which shape the pieces are; others of that shape may follow."""
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        b = popxl.remote_buffer((3,), F32, 2)
        for i in range(2):
            popxl.remote_replica_sharded_variable(np.ones((5, 1)), b, i)
            assert b.meta_shape == (5, 1)
        with pytest.raises(ValueError, match=r"holds pieces of the shape \(5, 1\)"):
            popxl.remote_replica_sharded_variable(np.ones(5), b)


# Running ------------------------------------------------------------------------------------------------------------


def test_the_example(device):
    ir = popxl.Ir(replication=2)
    with ir.main_graph, popxl.in_sequence():
        buf = popxl.remote_buffer((3,), I32, entries=2)
        h = popxl.remote_variable(
            [[1, 2, 3], [7, 8, 9]], buf, offset=1, replica_grouping=ir.replica_grouping(group_size=1)
        )
        t = ops.remote_load(buf, 1)
        t += 10
        ops.remote_store(buf, 1, t)
    with popxl.Session(ir, device(ir)) as session:
        np.testing.assert_array_equal(session.get_tensor_data(h), [[1, 2, 3], [7, 8, 9]])
        session.run()
        np.testing.assert_array_equal(session.get_tensor_data(h), [[11, 12, 13], [17, 18, 19]])
        session.write_variable_data(h, np.array([[0, 0, 0], [5, 5, 5]], np.int32))
        session.run()
        np.testing.assert_array_equal(session.get_tensor_data(h), [[10, 10, 10], [15, 15, 15]])


@pytest.mark.thorough(but_each=9)
@pytest.mark.parametrize(("replicas", "how", "shape", "asked", "count", "length", "held"), TABLE)
@pytest.mark.parametrize("on_chip", [True, False])
@pytest.mark.parametrize("way", ["kept", "dispatched"])
def test_pieces_on_the_device(device, on_chip, way, replicas, how, shape, asked, count, length, held):
    """Each replica has its piece, changes it, and the host sees the whole; also what it writes."""
    ir = popxl.Ir(replication=replicas)
    ir.options.calledGraphs = way
    grouping = grouping_of(ir, how)
    data = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    with ir.main_graph, popxl.in_sequence():
        if on_chip:
            v, piece = popxl.replica_sharded_variable(data, replica_grouping=grouping, shard_over=asked)
        else:
            buffer = popxl.replica_sharded_buffer(shape, F32, grouping, asked)
            v = popxl.remote_replica_sharded_variable(data, buffer, replica_grouping=grouping)
            piece = ops.remote_load(buffer, 0)
        (seen,) = store(ops.reshape(piece, (length, 1)))  # which is no piece any more
        ops.add_(piece, popxl.constant(1.0))
        if not on_chip:
            ops.remote_store(buffer, 0, piece)
    with popxl.Session(ir, device(ir)) as session:
        for turn in range(2):
            expected = shard_layout(v).shards_of(data) + turn  # zeros beyond the value are added to as well
            np.testing.assert_array_equal(session.run()[seen][..., 0], expected)
        np.testing.assert_array_equal(session.get_tensor_data(v), data + 2)
        session.write_variable_data(v, -data)
        session.run()
    np.testing.assert_array_equal(session.get_tensor_data(v), -data + 1)


def test_pieces_are_gathered(device):
    """What collectives make of pieces, and pieces of that."""
    collectives = pytest.importorskip("popxl.ops.collectives")
    ir = popxl.Ir(replication=2)
    with ir.main_graph, popxl.in_sequence():
        buf = popxl.replica_sharded_buffer((5,), F32)
        h = popxl.remote_replica_sharded_variable([1.0, 2.0, 3.0, 4.0, 5.0], buf)
        full = collectives.replicated_all_gather(ops.remote_load(buf, 0))
        ops.remote_store(buf, 0, collectives.replica_sharded_slice(full * 2.0))
        w, piece = popxl.replica_sharded_variable([1.0, 2.0, 3.0, 4.0], F32, "w")
        gradient = ops.host_load(popxl.h2d_stream((4,), F32, "gradient"))
        reduced = collectives.replicated_reduce_scatter(gradient, "add", None, True)
        ops.var_updates.accumulate_(piece, reduced, -0.1)
        whole = popxl.remote_buffer((2,), F32)  # slots for the whole value, on each replica
        popxl.remote_replica_sharded_variable([8.0, 9.0], whole)
        (out,) = store(collectives.replicated_all_gather(ops.remote_load(whole, 0)))
    (stream,) = ir.get_all_h2d_streams()
    with popxl.Session(ir, device(ir)) as session:
        outputs = session.run({stream: np.float32([[1] * 4, [2] * 4])})
        np.testing.assert_array_equal(outputs[out], [[8, 9], [8, 9]])
        assert session.get_tensor_data(h).tolist() == [2, 4, 6, 8, 10]
        np.testing.assert_allclose(session.get_tensor_data(w), [0.7, 1.7, 2.7, 3.7], rtol=1e-6)


@pytest.mark.parametrize(
    ("value", "slot", "loaded", "stored"),
    [
        ([[5.0]], (1,), [5.0], [[6.0]]),
        ([1.0, 2.0, 3.0], (2,), [1.0, 2.0], [2.0, 3.0, 3.0]),
        ([1.0, 2.0], (3,), [1.0, 2.0, 0.0], [2.0, 3.0]),
        (4.0, (2, 1), [[4.0], [0.0]], 5.0),
        (np.arange(6.0).reshape(2, 3), (3, 2), [[0, 1], [2, 3], [4, 5]], [[1, 2, 3], [4, 5, 6]]),
    ],
)
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.filterwarnings("ignore::popxl.errors.RemoteSlotWarning")
def test_slots_of_another_shape(replicas, value, slot, loaded, stored):
    """The elements are taken in order, as many as both have; nothing is refused."""
    ir = popxl.Ir(replication=replicas)
    with ir.main_graph, popxl.in_sequence():
        b = popxl.remote_buffer(slot, F32)
        h = popxl.remote_variable(value, b, dtype=F32)
        t = ops.remote_load(b, 0)
        (out,) = store(t)
        ops.remote_store(b, 0, t + 1)
    with popxl.Session(ir, "ipu_model") as session:
        np.testing.assert_array_equal(session.run()[out], [loaded] * replicas if replicas > 1 else loaded)
        session.weights_to_host()
        session.weights_from_host()
        np.testing.assert_array_equal(session.get_tensor_data(h), stored)


def test_slots_of_another_dtype(ir):
    """Converted on the way."""
    with ir.main_graph, popxl.in_sequence():
        b = popxl.remote_buffer((2,), I32)
        h = popxl.remote_variable([1.0, 2.0], b)
        ops.remote_store(b, 0, ops.remote_load(b, 0) * 2)
    with popxl.Session(ir) as session:
        session.run()
    assert h.data.dtype == np.float32 and h.data.tolist() == [2, 4]


def test_slots_beyond_the_last(ir):
    """And buffers that no op uses: the variable stays what it is."""
    with ir.main_graph, popxl.in_sequence():
        b, unused = (popxl.remote_buffer((2,), F32, 2) for _ in range(2))
        beyond, alone = popxl.remote_variable([1.0, 2.0], b, 7), popxl.remote_variable([3.0, 4.0], unused)
        ops.remote_store(b, 0, ops.remote_load(b, 1) + 1)
    with pytest.warns(RemoteSlotWarning, match=r"do not have: `t` \(slot 7 of RemoteBuffer\[1: 2 x f32\[2\]\]\)"):
        session = popxl.Session(ir)
    with session:
        session.run()
        assert session.get_tensor_data(beyond).tolist() == [1, 2]
        session.write_variable_data(alone, np.float32([5, 6]))
    assert alone.data.tolist() == [5, 6]


def test_slots_of_another_size(ir):
    with ir.main_graph, popxl.in_sequence():
        b = popxl.remote_buffer((2, 2), F32, 2)
        popxl.remote_variable(np.ones(3), b, name="v")
        popxl.remote_variable(np.ones(4), b, 1, name="flat")  # as many elements
        ops.remote_store(b, 0, ops.remote_load(b, 0) + 1)
    with pytest.warns(
        RemoteSlotWarning, match=r"slots of their remote buffers: `v` \(f32\[3\], in .*2 x f32\[2, 2\]\]\)\."
    ):
        popxl.Session(ir)


def test_variables_of_one_slot(ir):
    with ir.main_graph:
        b, other = (popxl.remote_buffer((), F32, 2) for _ in range(2))
        for buffer, slot, name in ((b, 1, "v"), (b, 0, "w"), (other, 1, "x"), (b, 1, "y")):
            popxl.remote_variable(1.0, buffer, slot, name=name)
        ops.remote_load(b, 0)
    with pytest.warns(RemoteSlotWarning, match=r"same slot of a remote buffer: `v`, `y` \(slot 1 of RemoteBuffer\[1: "):
        popxl.Session(ir)


@pytest.mark.parametrize("mode", ["one_per_group", "all_replicas"])
@pytest.mark.parametrize("sharded", [True, False])
def test_retrieval(device, mode, sharded):
    """Of a value in pieces, every member of the group has the whole; else each replica its own."""
    ir = popxl.Ir(replication=4)
    with ir.main_graph, popxl.in_sequence():
        pairs = ir.replica_grouping(stride=2, group_size=2)
        make = popxl.remote_replica_sharded_variable if sharded else popxl.remote_variable
        buffer = popxl.replica_sharded_buffer((2, 3), I32, pairs) if sharded else popxl.remote_buffer((3,), I32)
        h = make([[1, 2, 3], [4, 5, 6]], buffer, replica_grouping=pairs, retrieval_mode=mode)
        number = popxl.h2d_stream((), I32)
        ops.remote_store(buffer, 0, ops.remote_load(buffer, 0) + ops.host_load(number))
    with popxl.Session(ir, device(ir)) as session:
        before = session.get_tensor_data(h).tolist()
        session.run({number: np.int32([10, 20, 30, 40])})
        found = session.get_tensor_data(h).tolist()
    groups, pieces = [[1, 2, 3], [4, 5, 6]], [[11, 12, 33], [24, 25, 46]]
    if mode == "one_per_group":
        assert before == groups
        assert found == (pieces if sharded else [[11, 12, 13], [24, 25, 26]])
    else:
        assert before == groups * 2
        assert found == (pieces * 2 if sharded else [[11, 12, 13], [24, 25, 26], [31, 32, 33], [44, 45, 46]])


@pytest.mark.thorough(but_each=3)
@pytest.mark.parametrize("dtype", [popxl.float8_143, popxl.float8_152], ids=str)
def test_float8(device, dtype):
    """Plain, remote, in pieces, in remote pieces: loaded, used, read back, written, run again."""
    ir = popxl.Ir(replication=2)

    def wide(t):
        return ops.pow2scale_cast_from_fp8(t, popxl.constant(0), F32)

    numbers, others = np.float32([1, 2, 4, -8]), np.float32([0.5, 16, -2, 32])
    with ir.main_graph, popxl.in_sequence():
        b, c = popxl.remote_buffer((4,), dtype, 2), popxl.replica_sharded_buffer((4,), dtype, entries=2)
        h, s = (
            popxl.remote_variable(numbers, b, dtype=dtype),
            popxl.remote_replica_sharded_variable(numbers, c, 0, dtype),
        )
        w, piece = popxl.replica_sharded_variable(numbers, dtype)
        again = [
            popxl.remote_variable(numbers, b, 1, dtype),
            popxl.remote_replica_sharded_variable(numbers, c, 1, dtype),
        ]
        outs = []
        for buffer in (b, c):
            t = ops.remote_load(buffer, 0)
            ops.remote_store(buffer, 1, t)
            outs += store(ops.reshape(wide(t), (*buffer.tensor_shape, 1)))
        outs += store(ops.reshape(wide(piece), (2, 1)))
    with popxl.Session(ir, device(ir)) as session:
        for values in (numbers, others):
            new = popxl.utils.host_pow2scale_cast_to_fp8(values, dtype)
            session.write_variables_data({v: new for v in (h, s, w)})
            outputs = session.run()
            assert outputs[outs[0]].reshape(2, 4).tolist() == [values.tolist()] * 2
            for out in outs[1:]:
                assert outputs[out].ravel().tolist() == values.tolist()
            for v in (h, s, w, *again):
                np.testing.assert_array_equal(session.get_tensor_data(v), new)


def test_memory_maps(tmp_path: Path, device):
    """The file is the host copy; read only, nothing comes back."""
    for mode in ("r+", "r"):
        path = tmp_path / mode
        np.arange(5, dtype=np.float32).tofile(path)
        data = np.memmap(path, np.float32, mode, shape=(5,))
        ir = popxl.Ir(replication=2)
        with ir.main_graph, popxl.in_sequence():
            buffer = popxl.replica_sharded_buffer((5,), F32)
            h = popxl.remote_replica_sharded_variable(data, buffer)
            ops.remote_store(buffer, 0, ops.remote_load(buffer, 0) + 1)
        session = popxl.Session(ir, device(ir))
        with session:
            session.run()
        assert session.get_tensor_data(h) is data
        expected = np.arange(5) + (mode == "r+")
        np.testing.assert_array_equal(np.fromfile(path, np.float32), expected)


def test_host_copies_and_the_device(ir):
    """Out of date after a run, until the values come back."""
    with ir.main_graph, popxl.in_sequence():
        b = popxl.remote_buffer((), F32)
        h = popxl.remote_variable(1.0, b)
        ops.remote_store(b, 0, ops.remote_load(b, 0) + 1)
    with popxl.Session(ir) as session:
        assert h.in_sync_with_ipu
        session.run()
        assert not h.in_sync_with_ipu and h.data == 1
        session.weights_to_host()
        assert h.in_sync_with_ipu and h.data == 2


def test_handles_are_for_the_host():
    """Ops work with what is loaded, and with pieces."""
    for make in (lambda: popxl.remote_variable([1.0, 2], popxl.remote_buffer((2,), F32)),
                 lambda: popxl.replica_sharded_variable([1.0, 2])[0]):  # fmt: skip
        ir = popxl.Ir(replication=2)
        with ir.main_graph:
            ops.add(make(), popxl.constant(1.0))
        with pytest.raises(PopxlError, match=r"is used by an op, and its numbers are in RemoteBuffer\["):
            popxl.Session(ir, "ipu_model")


def test_pieces_in_called_graphs(device):
    """By reference, and in a loop."""
    ir = popxl.Ir(replication=2)
    with ir.main_graph, popxl.in_sequence():
        w, piece = popxl.replica_sharded_variable(np.arange(5), F32)

        def bump(p: popxl.TensorByRef) -> None:
            p += 1

        graph = ir.create_graph(bump, piece)
        graph.inputs[0].by_ref = True
        ops.call(graph, piece)
        ops.repeat(graph, 3, piece)
    with popxl.Session(ir, device(ir)) as session:
        session.run()
    assert w.data.tolist() == [4, 5, 6, 7, 8]


def test_host_memory(device):
    """Slots of several replicas in the host's memory, also of those that share a device."""
    ir = popxl.Ir(replication=2)
    ir.options.remoteBuffers = "host"
    where = device(ir)
    with ir.main_graph, popxl.in_sequence():
        b = popxl.replica_sharded_buffer((5,), F32, entries=2)
        h = [popxl.remote_replica_sharded_variable(np.arange(5) + i, b, i, F32) for i in range(2)]
        step = ir.create_graph(
            lambda i: ops.remote_store(b, i, ops.remote_load(b, i) * 2), popxl.TensorSpec((), popxl.uint32)
        )
        for i in range(2):
            ops.call(step, popxl.constant(i, popxl.uint32))
    with popxl.Session(ir, where) as session:
        kinds = [a.sharding.memory_kind for a in session.store.changing]
        session.run()
        session.run()
    assert kinds == ["pinned_host"]
    assert [v.data.tolist() for v in h] == [[0, 4, 8, 12, 16], [4, 8, 12, 16, 20]]


@pytest.mark.thorough(but_each=3)
@pytest.mark.parametrize("way", ["inlined", "kept"])
def test_host_memory_in_branches(device, way):
    """Each replica has its own condition and its own slot; one beyond the last is the last, here as elsewhere."""
    ir = popxl.Ir(replication=3)
    ir.options.remoteBuffers, ir.options.calledGraphs = "host", way
    with ir.main_graph, popxl.in_sequence():
        b = popxl.remote_buffer((5,), F32, entries=2)
        h = [popxl.remote_variable(np.arange(5) * 10**i, b, i, F32) for i in range(2)]
        flag_in, slot_in = popxl.h2d_stream((), popxl.bool, "flag"), popxl.h2d_stream((), popxl.uint32, "slot")
        i = ops.host_load(slot_in)

        def times(by):
            return ir.create_graph(lambda i: ops.remote_store(b, i, ops.remote_load(b, i) * by), i)

        twice = times(2)

        def fourfold(i):
            ops.call(twice, i)
            ops.call(twice, i)

        ops.conditional(ops.host_load(flag_in), ir.create_graph(fourfold, i), times(-1), [i], [i])
        (seen,) = store(ops.remote_load(b, i))
    with popxl.Session(ir, device(ir)) as session:
        kinds = [a.sharding.memory_kind for a in session.store.changing]
        outputs = session.run({flag_in: np.array([True, False, True]), slot_in: np.array([1, 0, 9], np.uint32)})
        found = [session.get_tensor_data(v) for v in h]
    assert kinds == ["pinned_host"]
    base = np.arange(5)
    np.testing.assert_array_equal(outputs[seen], [40 * base, -base, 40 * base])
    np.testing.assert_array_equal(found, [base, 40 * base])


def test_pieces_are_where_they_were_made():
    ir = popxl.Ir(2)
    with ir.main_graph:
        with popxl.ipu(1):
            _, piece = popxl.replica_sharded_variable([1.0, 2.0])
        _, other = popxl.replica_sharded_variable([1.0, 2.0])
        assert (piece.ipu, piece.tile_set, other.ipu) == (1, "compute", 0)
        with popxl.ipu(2):
            piece + 1
        assert piece.ipu == 1 and piece.copy_to_ipu(0).ipu == 0
    same = popxl.Ir.load(saved(ir)).main_graph.get_tensor(piece.id)
    assert same.ipu == 1


def saved(ir: popxl.Ir) -> str:
    path = tempfile.mkdtemp()
    ir.save(f"{path}/ir")
    return f"{path}/ir"


def test_a_program_of_pieces_alone(device):
    ir = popxl.Ir(2)
    with ir.main_graph:
        v, _ = popxl.replica_sharded_variable([1.0, 2.0, 3.0])
    with popxl.Session(ir, device(ir)) as session:
        assert session.run() == {}
        session.write_variable_data(v, np.array([4, 5, 6], np.float32))
        session.weights_to_host()
        assert session.get_tensor_data(v).tolist() == [4, 5, 6]
        assert str(session.report).startswith("Report of")
