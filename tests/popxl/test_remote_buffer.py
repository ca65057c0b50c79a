"""Remote buffers: what they are, the ops that use them, and slots that keep what is stored."""

from __future__ import annotations

import gc
import re
import weakref
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.errors import PopxlError, PopxlRuntimeError
from popxl.transforms import io_tile_exchange, merge_exchange
from runtime.targets.devices import Device
from tests.popxl.evaluate import store

F32, I32 = popxl.float32, popxl.int32
WAYS = ("kept", "dispatched", "inlined")


@pytest.fixture
def main(ir):
    with ir.main_graph as graph:
        yield graph


# What they are ------------------------------------------------------------------------------------------------------


def test_members(main):
    b = popxl.remote_buffer([2, np.int64(3)], F32, entries=4)
    assert (b.tensor_shape, b.tensor_dtype, b.entries, b.meta_shape) == ((2, 3), F32, 4, ())
    assert (repr(b), b.spec) == ("RemoteBuffer[1: 4 x f32[2, 3]]", popxl.TensorSpec((2, 3), F32))
    b.entries, b.meta_shape = 5, (3, 2)
    assert (b.entries, b.meta_shape) == (5, (3, 2))
    b.set_remote_buffer_info(I32, (7,), 1)
    assert (b.tensor_shape, b.tensor_dtype, b.entries) == ((7,), I32, 1)
    assert popxl.remote_buffer((), I32).entries == 1
    for name in ("tensor_shape", "tensor_dtype"):
        with pytest.raises(AttributeError) as caught:
            setattr(b, name, None)
        assert str(caught.value) == f"can't set attribute '{name}'"


def test_both_names():
    """The function and the module are called the same."""
    from popxl.remote_buffer import RemoteBuffer, remote_buffer

    assert (RemoteBuffer, remote_buffer) == (popxl.RemoteBuffer, popxl.remote_buffer)


def test_numbers_of_buffers(ir):
    """From 1 in each Ir, in any graph of it; only the same buffer is equal."""
    with ir.main_graph, ir.create_empty_graph():
        a, b = popxl.RemoteBuffer((3,), F32, 1), popxl.remote_buffer((3,), F32)
    with popxl.Ir().main_graph:
        c = popxl.remote_buffer((3,), F32)
    assert [x.remote_buffer_id for x in (a, b, c)] == [1, 2, 1]
    assert len({a, b, c, a}) == 3 and a != b and a != c
    assert ir.remote_buffers == [a, b]
    with pytest.raises(RuntimeError, match="no current graph"):
        popxl.remote_buffer((3,), F32)


@pytest.mark.parametrize("entries", [0, -1])
def test_entries_that_are_none(main, entries):
    with pytest.raises(ValueError, match=r"^Entries must be a non-zero, positive integer"):
        popxl.remote_buffer((3,), F32, entries)
    b = popxl.remote_buffer((3,), F32)
    with pytest.raises(ValueError, match=r"^Entries must be a non-zero, positive integer"):
        b.entries = entries
    assert (b.entries, b.remote_buffer_id) == (1, 1)


def test_dtypes_are_ours(main):
    with pytest.raises(TypeError, match=r"popxl dtype such as popxl\.float32"):
        popxl.remote_buffer((3,), np.float32)


@pytest.mark.usefixtures("only_new_objects")
def test_a_buffer_outlives_its_ir():
    """And does not keep it alive."""
    ir = popxl.Ir()
    with ir.main_graph:
        b = popxl.remote_buffer((3,), F32)
    gone = weakref.ref(ir)
    del ir
    gc.collect()
    assert gone() is None
    b.entries, b.meta_shape = 3, (5,)
    with popxl.Ir().main_graph:
        b.validate_tensor_matches_buffer(popxl.variable(np.zeros(3), F32))
    assert hash(b) == hash(b) and b == b and "3 x f32[3]" in repr(b)


def test_what_fails_takes_its_buffers_along(main):
    """And leaves those that it has made longer as they were."""
    ir, kept = main.ir, popxl.remote_buffer((3,), F32, entries=2)
    with pytest.raises(KeyError), ir.undone_on_failure():
        popxl.remote_buffer((5,), F32)
        kept.entries = 7
        raise KeyError
    assert ir.remote_buffers == [kept] and kept.entries == 2
    with ir.undone_on_failure():
        kept.entries = 7
    assert kept.entries == 7 and popxl.remote_buffer((5,), F32).remote_buffer_id == 2


def test_matching():
    with popxl.Ir().main_graph:
        b = popxl.remote_buffer((3,), F32)
    b.meta_shape = (5,)
    with popxl.Ir().main_graph:  # the Ir does not matter
        t, whole, other = (popxl.variable(np.zeros(n), d, "t") for n, d in ((3, F32), (5, F32), (3, I32)))
    b.validate_tensor_matches_buffer(t)
    b.validate_tensor_matches_buffer(whole, num_shards=2)
    for wrong, count in ((whole, 1), (other, 1), (t, 2)):
        with pytest.raises(ValueError, match=rf"^Tensor {wrong.id} does not match buffer\."):
            b.validate_tensor_matches_buffer(wrong, count)


# The ops ------------------------------------------------------------------------------------------------------------


def test_names(main):
    """Two tensors for a load, one for a load in place, and the constant for a number."""
    b = popxl.remote_buffer((3,), F32, 2)
    first, named = ops.remote_load(b, 1), ops.remote_load(b, np.int32(0), "w")
    alias = ops.remote_load_(b, popxl.constant(0, I32, "n"), first)
    ops.remote_store(b, 0, named)
    assert [t.id for t in main.tensors] == [
        "id_1_offset_offset_remote_load",
        "id_1_offset_offset_remote_loaded",
        "n",
        "offset",
        "offset__t0",
        "offset__t1",
        "remote_load_inplace_out",
        "w_remote_load",
        "w_remote_loaded",
    ]
    assert [t.dtype for t in main.constants] == [I32, popxl.uint32, popxl.uint32, popxl.uint32]
    assert (first.name, alias.origin, type(first)) == ("id_1_offset_offset_remote_loaded", first, popxl.Tensor)
    assert "w_remote_loaded: f32[3]                  = RemoteLoad(w_remote_load, 0, buffer=1)" in str(main)
    assert "RemoteStore(w_remote_loaded, 0, buffer=1)" in str(main)


def test_meta_shapes(main):
    """Of the buffer, as it is when the op is created; loading in place gives it to the operand."""
    b = popxl.remote_buffer((3,), F32)
    before = ops.remote_load(b, 0)
    b.meta_shape = (5,)
    after = ops.remote_load(b, 0)
    room = ops.init((3,), F32)
    alias = ops.remote_load_(b, 0, room)
    assert [t.meta_shape for t in (before, after, room, alias)] == [(), (5,), (5,), (5,)]


def test_refusals(main):
    """Nothing is left in the graph."""
    b = popxl.remote_buffer((3,), F32)
    t, n = popxl.variable(np.zeros(3), F32, "t"), popxl.variable([1, 2], name="n")
    wide, number = popxl.variable(np.zeros((1, 3)), F32, "wide"), popxl.variable(0, name="number")
    whole = popxl.variable(np.zeros(3), I32, "whole")
    real = popxl.variable(0.0, name="real")
    before = len(main.tensors)
    cases: list[tuple[type[Exception], str, Any]] = [
        (ValueError, r"remote_buffer: `tensor_shape` is \(-3,\)", lambda: popxl.remote_buffer((-3,), F32)),
        (ValueError, r"^Tensor wide does not match buffer\. .*f32\[1, 3\].*f32\[3\]",
         lambda: ops.remote_store(b, 0, wide)),
        (ValueError, r"^Tensor whole does not match buffer\.", lambda: ops.remote_store(b, 0, whole)),
        (ValueError, r"^Tensor wide does not match buffer\.", lambda: ops.remote_load_(b, 0, wide)),
        (TypeError, r"remote_store: `t` must be a Tensor; got 1\.0", lambda: ops.remote_store(b, 0, 1.0)),
        (TypeError, r"remote_load: expected a RemoteBuffer, got Variable", lambda: ops.remote_load(t, 0)),
        (TypeError, r"remote_load: `offset` must be an integer or an integer tensor; got 1\.0",
         lambda: ops.remote_load(b, 1.0)),
        (ValueError, r"remote_load: `offset` is -1; slots are numbered from 0", lambda: ops.remote_load(b, -1)),
        (ValueError, r"remote_load: `offset` is i32\[2\]; expected the shape", lambda: ops.remote_load(b, n)),
        (TypeError, r"remote_load: `offset` is f32\[\]; expected an integer", lambda: ops.remote_load(b, real)),
    ]  # fmt: skip
    for error, message, refused in cases:
        with pytest.raises(error, match=message):
            refused()
    inner = main.ir.create_empty_graph("inner")
    with inner:
        for refused in (lambda: ops.remote_store(b, 0, t), lambda: ops.remote_load(b, number)):
            with pytest.raises(ValueError, match=r"which is not in graph `inner"):
                refused()
    assert (len(main.tensors), main.ops, inner.tensors) == (before, [], ())


def test_buffers_of_another_ir():
    with popxl.Ir().main_graph:
        b = popxl.remote_buffer((3,), F32)
    with popxl.Ir().main_graph as other:
        for refused in (lambda: ops.remote_load(b, 0), lambda: popxl.remote_variable(1.0, b)):
            with pytest.raises(ValueError, match=r"RemoteBuffer\[1: 1 x f32\[3\]\] is of another Ir"):
                refused()
    assert other.tensors == ()


def test_placement_is_free(main):
    """An offset on another IPU is no contradiction."""
    b = popxl.remote_buffer((3,), F32)
    n = popxl.variable(0) + 0
    with popxl.ipu(1):
        ops.remote_store(b, n, ops.init((3,), F32))


def test_exchanges(main):
    """Loads and stores merge; a store of what is loaded does not."""
    b = popxl.remote_buffer((), F32, 2)
    with io_tile_exchange():
        x = ops.remote_load(b, 0)
        ops.remote_store(b, 1, popxl.constant(1.0))
    assert ([op.op_type for op in main.ops], x.tile_set) == (["Init", "MultiExchange"], "io")
    with pytest.raises(RuntimeError, match=r"^More than one Op remained after"), io_tile_exchange():
        ops.remote_store(b, 0, ops.remote_load(b, 1))


# Running ------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["device", "host"])
def options(request, ir):
    """The options of the Ir, with the memory that buffers are in."""
    ir.options.remoteBuffers = request.param
    return ir.options


@pytest.mark.thorough(but_each=4)
@pytest.mark.parametrize("way", WAYS)
def test_everywhere(ir, options, way):
    """In the main graph, called graphs, loops and branches, by numbers of all kinds; in all ways to compile it."""
    options.calledGraphs = way
    with ir.main_graph, popxl.in_sequence():
        b = popxl.remote_buffer((2,), F32, entries=3)
        flag_in, flag = popxl.h2d_stream((), popxl.bool, "flag"), popxl.variable(2, popxl.uint32)
        h = [popxl.remote_variable([10.0 * i, 1], b, i) for i in range(3)]

        def bump(i, by):
            ops.remote_store(b, i, ops.remote_load(b, i) + by)

        def step(i):
            bump(i, 1)
            return i - 1

        bumped = ir.create_graph(bump, flag, popxl.TensorSpec((), F32))
        stepped = ir.create_graph(step, popxl.TensorSpec((1,), I32))
        ops.call(bumped, flag, popxl.constant(100.0))
        ops.call(bumped, popxl.constant(0, popxl.uint32), popxl.constant(1000.0))
        ops.repeat(stepped, 3, popxl.constant([2], I32))
        nothing = ir.create_graph(lambda i, by: None, flag, popxl.TensorSpec((), F32))
        some = [flag, popxl.constant(5.0)]
        ops.conditional(ops.host_load(flag_in), bumped, nothing, some, some)
        room = ops.init((2,), F32)
        ops.remote_load_(b, flag - flag, room)
        (seen,) = store(room)
    with popxl.Session(ir) as session:
        outputs = [session.run({flag_in: yes})[seen].tolist() for yes in (True, False)]
        kinds = {a.sharding.memory_kind for a in session.store.changing}
        found = [session.get_tensor_data(v).tolist() for v in h]
    assert outputs == [[1001, 1002], [2002, 2003]]
    assert found == [[2002, 2003], [12, 3], [227, 208]]
    assert kinds == {"pinned_host" if options.remoteBuffers == "host" else "device"}


def test_slots_keep_what_is_stored(ir, options):
    """From run to run, and when other variables are written; a new attachment starts with zeros."""
    with ir.main_graph, popxl.in_sequence():
        b = popxl.remote_buffer((), I32, 2)
        v = popxl.variable(1, name="v")
        t = ops.remote_load(b, 1)
        ops.remote_store(b, 1, t + v)
        (out,) = store(t)
    session = popxl.Session(ir)
    with session:
        assert [int(session.run()[out]) for _ in range(3)] == [0, 1, 2]
        session.write_variable_data(v, 10)
        assert [int(session.run()[out]) for _ in range(2)] == [3, 13]
    with session:
        assert int(session.run()[out]) == 0


@pytest.mark.parametrize("way", ["kept", "dispatched"])
def test_what_has_the_shape_of_a_buffer(ir, way):
    """Neither a result nor a variable that is overwritten unread takes the memory of the buffer: it is the host's."""
    ir.options.remoteBuffers, ir.options.calledGraphs = "host", way
    with ir.main_graph, popxl.in_sequence():
        b = popxl.remote_buffer((3,), F32, 2)
        v, w = popxl.variable(np.zeros((2, 3)), F32), popxl.variable(np.arange(6.0).reshape(2, 3), F32)

        def doubled(t):
            ops.remote_store(b, 1, ops.remote_load(b, 1) + 1)
            return t * 2

        graph = ir.create_graph(doubled, w)
        (four_times,) = ops.call(graph, *ops.call(graph, w))
        ops.var_updates.copy_var_update_(v, four_times)
        outs = store([v, ops.remote_load(b, 1)])
    with popxl.Session(ir) as session:
        outputs = [[session.run()[out].tolist() for out in outs] for _ in range(2)]
    assert [v for v, _ in outputs] == [[[0, 4, 8], [12, 16, 20]]] * 2
    assert [slot for _, slot in outputs] == [[4] * 3, [8] * 3]


def test_prints_beside_what_is_on_the_host(ir, capfd):
    """JAX (0.10.2) cannot lower an order of prints along with results in the host's memory."""
    ir.options.remoteBuffers = "host"
    with ir.main_graph, popxl.in_sequence():
        b = popxl.remote_buffer((), I32)
        ops.remote_store(b, 0, ops.print_tensor(ops.remote_load(b, 0) + 3, "stored"))
    with popxl.Session(ir) as session:
        session.run()
        session.weights_to_host()
    assert capfd.readouterr().err == "stored: 3\n"


def test_what_is_loaded_is_a_copy(ir):
    with ir.main_graph, popxl.in_sequence():
        b = popxl.remote_buffer((2,), I32)
        popxl.remote_variable([1, 2], b)
        first = ops.remote_load(b, 0)
        first += 10
        second = ops.remote_load(b, 0)
        ops.remote_store(b, 0, first)
        first += 10
        third = ops.remote_load(b, 0)
        outs = store([first, second, third])
    with popxl.Session(ir) as session:
        outputs = session.run()
    assert [outputs[out].tolist() for out in outs] == [[21, 22], [1, 2], [11, 12]]


def test_data_flow_is_order_enough(ir):
    """A load, an op on what it loads, and a store of that; in creation order otherwise."""
    with ir.main_graph:
        b = popxl.remote_buffer((), F32)
        h = popxl.remote_variable(1.5, b)
        ops.remote_store(b, 0, ops.remote_load(b, 0) * 2)
    with popxl.Session(ir) as session:
        session.run()
        session.run()
    assert session.get_tensor_data(h) == 6


def test_entries_may_be_raised_later(ir, run):
    """After the ops that use them, before the session. Sessions may differ."""
    with ir.main_graph, popxl.in_sequence():
        b = popxl.remote_buffer((), I32)
        ops.remote_store(b, 3, popxl.constant(7))
        t = ops.remote_load(b, 3)
    with pytest.raises(
        PopxlError, match=r"RemoteStore.* uses slot 3 of RemoteBuffer\[1: 1 x i32\[\]\], whose last slot"
    ):
        popxl.Session(ir)
    for entries in (4, 5):
        b.entries = entries
        for way in WAYS:
            ir.options.calledGraphs = way
            assert run(ir, t) == [7]


def test_slots_that_calls_say(ir):
    """A number that is handed from call to call is known. One that is fed is known when the program runs op by op."""
    with ir.main_graph as main, popxl.in_sequence():
        b, stream = popxl.remote_buffer((), popxl.float32, 2), popxl.h2d_stream((), popxl.int32)
        load = ir.create_graph(lambda slot: ops.remote_load(b, slot), popxl.TensorSpec((), popxl.int32))
        twice = ir.create_graph(lambda slot: ops.call(load, slot), popxl.TensorSpec((), popxl.int32))
        ops.call(twice, 1)
        (t,) = ops.call(load, ops.host_load(stream))
        ops.host_store(out := popxl.d2h_stream((), popxl.float32), t)
    with popxl.Session(ir, "ipu_model") as session:
        assert session.run({stream: 5})[out] == 0
        with session.debugging():
            assert session.run({stream: 1})[out] == 0
            with pytest.raises(PopxlRuntimeError, match=r"RemoteLoad.* uses slot 5 of .*, whose last slot is 1\."):
                session.run({stream: 5})
    with main:
        ops.call(twice, 2)
    with pytest.raises(
        PopxlError, match=r"RemoteLoad.* uses slot 2 of .*, whose last slot is 1\. Make `entries` larger"
    ):
        with popxl.Session(ir, "ipu_model") as session:
            session.run({stream: 0})


def test_buffers_that_are_defined_anew(ir):
    with ir.main_graph:
        b = popxl.remote_buffer((2,), I32)
        ops.remote_load(b, 0)
        b.set_remote_buffer_info(I32, (3,), 1)
    with pytest.raises(PopxlError, match="has been defined anew since"):
        popxl.Session(ir)


def test_merging_changes_no_number(ir, run):
    with ir.main_graph, popxl.in_sequence(False):
        b, c = (popxl.remote_buffer((), I32) for _ in range(2))
        popxl.remote_variable(3, b)
        with merge_exchange():
            x = ops.remote_load(b, 0)
            ops.remote_store(c, 0, popxl.constant(4))
        y = ops.remote_load(c, 0)
    assert [op.op_type for op in ir.main_graph.ops].count("MultiExchange") == 1
    assert run(ir, x, y) == [3, 4]


def test_no_gradient(ir):
    """Loading is not differentiated: nothing reaches the offset, or what was stored."""
    with ir.main_graph, popxl.in_sequence():
        b = popxl.remote_buffer((), F32)
        popxl.remote_variable(5.0, b)
        x = popxl.variable(3.0)
        graph = ir.create_graph(lambda x: x * ops.remote_load(b, 0), x)
        info = popxl.transforms.autodiff(graph)
        site = ops.call_with_info(graph, x)
        (out,) = store(ops.call(info.graph, popxl.constant(1.0), inputs_dict=info.inputs_dict(site)))
    with popxl.Session(ir) as session:
        assert session.run()[out] == 5


def test_in_a_file(tmp_path: Path):
    """Buffers, the ops that use them, and the variables in them; also pieces."""
    ir = popxl.Ir(replication=2)
    with ir.main_graph, popxl.in_sequence():
        popxl.remote_buffer((9,), F32)  # nobody uses it
        b = popxl.remote_buffer((2,), F32, 2)
        h = popxl.remote_variable([[1, 2], [3, 4]], b, 1, F32, "h", replica_grouping=ir.replica_grouping(group_size=1))
        pieces = popxl.replica_sharded_buffer((5,), F32)
        s = popxl.remote_replica_sharded_variable(np.arange(5), pieces, 0, F32, "s")
        w, piece = popxl.replica_sharded_variable(np.arange(7), F32, "w")
        piece += 1
        ops.remote_store(b, 1, ops.remote_load(b, 1) * 2)
        ops.remote_store(pieces, 0, ops.remote_load(pieces, 0) * 3)
    ir.save(tmp_path / "program")
    loaded = popxl.Ir.load(tmp_path / "program")
    assert str(loaded) == str(ir)
    assert [repr(b) for b in loaded.remote_buffers] == [repr(b) for b in ir.remote_buffers]
    assert [b.meta_shape for b in loaded.remote_buffers] == [(), (), (5,), (7,)]
    for program in (ir, loaded):
        variables = [program.main_graph.get_tensor(name) for name in ("h", "s", "w")]
        with popxl.Session(program, "ipu_model") as session:
            session.run()
            found = [a.tolist() for a in session.get_tensors_data(variables).values()]
        assert found == [[[2, 4], [6, 8]], [0, 3, 6, 9, 12], [1, 2, 3, 4, 5, 6, 7]]
    for v in (h, s, w):
        place, other = v.location_info, loaded.main_graph.get_tensor(v.id).location_info
        assert (other.getRemoteBufferInfo(), other.sharded) == (place.getRemoteBufferInfo(), place.sharded)
    with loaded.main_graph:
        assert popxl.remote_buffer((1,), F32).remote_buffer_id == 5


def test_functions_have_no_buffers(ir):
    with ir.main_graph as main:
        b = popxl.remote_buffer((), F32)
        graph = ir.create_graph(lambda: ops.remote_load(b, 0))
        ops.call(graph)
    for which in (graph, main):
        with pytest.raises(PopxlError, match=re.escape("uses RemoteBuffer[1: 1 x f32[]]")):
            popxl.to_jax(which)


@pytest.mark.parametrize("count", [1, 3], ids=["one device", "a device each"])
def test_each_replica_has_its_own(count):
    """Slots by a number that differs from replica to replica."""
    ir = popxl.Ir(replication=3)
    with ir.main_graph, popxl.in_sequence():
        b = popxl.remote_buffer((2,), I32, 3)
        number, value = popxl.h2d_stream((), I32), popxl.h2d_stream((2,), I32)
        ops.remote_store(b, ops.host_load(number), ops.host_load(value))
        outs = store([ops.remote_load(b, i) for i in range(3)])
    device = Device("ipu_model", tuple(jax.devices("cpu")[:count]))
    with popxl.Session(ir, device) as session:
        values = np.arange(1, 7, dtype=np.int32).reshape(3, 2)
        outputs = session.run({number: np.array([2, 0, 1], np.int32), value: values})
    found = np.stack([outputs[out] for out in outs], 1)
    expected = np.zeros((3, 3, 2), np.int32)
    for replica, slot in enumerate([2, 0, 1]):
        expected[replica, slot] = values[replica]
    np.testing.assert_array_equal(found, expected)
