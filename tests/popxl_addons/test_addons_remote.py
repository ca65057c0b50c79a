"""Trees of remote buffers: how they are made for variables, and what loads and stores them."""

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.remote import (
    NamedRemoteBuffers,
    create_remote_buffer,
    load_remote,
    load_remote_graph,
    named_buffers,
    named_variable_buffers,
    store_remote,
    store_remote_graph,
)
from popxl_addons.rts import gather_replica_sharded_tensor, reduce_replica_sharded_tensor
from popxl_addons.variable_factory import NamedVariableFactories, VariableFactory

F32 = popxl.float32
SPEC = popxl.TensorSpec((4, 6), F32)


def factory(shape, dtype=F32, data=None, **settings):
    values = np.arange(np.prod(shape)).reshape(shape) if data is None else data
    return VariableFactory(lambda: values, dtype, **settings)


# Making buffers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "group_size", "shard_over", "slot", "meta_shape"),
    [
        (SPEC, None, None, (6,), (4, 6)),
        (SPEC, None, 2, (12,), (4, 6)),
        (SPEC, None, np.int64(2), (12,), (4, 6)),
        (SPEC, None, 1, (4, 6), ()),
        (SPEC, 2, None, (12,), (4, 6)),
        (SPEC, 1, None, (4, 6), ()),
        (popxl.TensorSpec((), F32), None, 1, (), ()),
        (popxl.TensorSpec((5,), F32, (2, 9)), None, None, (5,), (2, 9)),
        (popxl.TensorSpec((2, 3, 5), popxl.float16, (2, 3, 5)), None, 3, (2, 3, 5), (2, 3, 5)),
    ],
)
def test_slots(replicated_ir, spec, group_size, shard_over, slot, meta_shape):
    group = None if group_size is None else replicated_ir.replica_grouping(group_size=group_size)
    buffer = create_remote_buffer(spec, 3, group, shard_over)
    assert (buffer.tensor_shape, buffer.meta_shape, buffer.entries) == (slot, meta_shape, 3)
    assert buffer.tensor_dtype == spec.dtype


def test_a_tensor_serves_as_spec(replicated_ir):
    buffer = create_remote_buffer(popxl.variable(np.zeros((2, 6)), popxl.float16))
    assert (buffer.tensor_shape, buffer.meta_shape, buffer.entries) == ((3,), (2, 6), 1)
    assert buffer.tensor_dtype == popxl.float16


def test_groups_that_are_not_constant_stand_for_their_constant_parts():
    ir = popxl.Ir(replication=8)
    group = ir.replica_grouping_from_assignments([0, 0, 1, 1, 1, 1, 0, 0])
    assert (group.group_size, group.const_rg.group_size) == (4, 2)
    with ir.main_graph:
        facts = NamedVariableFactories(w=factory((4, 6), replica_grouping=group))
        for buffer in (create_remote_buffer(SPEC, replica_group=group), named_variable_buffers(facts).w):
            assert buffer.tensor_shape == (12,)


def test_sizes_that_cannot_be_divided(replicated_ir):
    with pytest.raises(ValueError, match=r"^Can't shard tensor with 5 elements over 4 replicas"):
        create_remote_buffer(popxl.TensorSpec((5,), F32))
    with pytest.raises(ValueError, match="divisor of 4"):
        create_remote_buffer(SPEC, shard_over=3)
    with pytest.raises(ValueError, match="divisor of 4"):
        create_remote_buffer(SPEC, shard_over=0)
    assert not replicated_ir.remote_buffers


@pytest.fixture
def facts(replicated_ir):
    pairs = replicated_ir.replica_grouping(group_size=2)
    return NamedVariableFactories.from_dict(
        {"fc.w": factory((4, 6)), "fc.b": factory((8,), replica_grouping=pairs), "a": factory((4,), popxl.float16)}
    )


@pytest.mark.parametrize(
    ("shard_over", "slots"),
    [
        (True, [(6,), (4,), (1,)]),
        (False, [(4, 6), (8,), (4,)]),
        (1, [(4, 6), (8,), (4,)]),
        (2, [(12,), (4,), (2,)]),
        ({}, [(6,), (4,), (1,)]),
        ({"fc.w": np.int64(2), "a": 1, "unknown": 7}, [(12,), (4,), (4,)]),
    ],
)
def test_buffers_for_factories(facts, shard_over, slots):
    buffers = named_variable_buffers(facts, 5, shard_over)
    assert type(buffers) is NamedRemoteBuffers
    assert buffers.keys_flat() == facts.keys_flat() == ["fc.w", "fc.b", "a"]
    assert [buffer.tensor_shape for buffer in buffers.values_flat()] == slots
    assert {buffer.entries for buffer in buffers.values_flat()} == {5}
    assert buffers.a.tensor_dtype == popxl.float16


@pytest.mark.parametrize("wrong", [0, 5, 3, {"fc.b": 3}, {"a": -1}, 2.0, "all", None])
def test_numbers_of_pieces_that_there_cannot_be(facts, wrong):
    with pytest.raises(ValueError, match=r"expected an integer from 1 to \d"):
        named_variable_buffers(facts, shard_over_dict=wrong)
    assert not facts.fc.w.replica_grouping._ir.remote_buffers


def test_factories_that_are_sharded_already(replicated_ir):
    facts = NamedVariableFactories(m=factory((4, 6), shard_over=2))
    for shard_over in (True, False, 1, 4):
        buffer = named_variable_buffers(facts, shard_over_dict=shard_over).m
        assert (buffer.tensor_shape, buffer.meta_shape) == ((12,), (4, 6))


def test_buffers_for_tensors(replicated_ir):
    _, piece = popxl.replica_sharded_variable(np.zeros((4, 6)), F32, "piece")
    buffers = named_buffers(NamedTensors(w=popxl.variable(np.zeros((2, 3)), F32), p=piece), entries=2)
    assert type(buffers) is NamedRemoteBuffers
    assert [(b.tensor_shape, b.meta_shape, b.entries) for b in buffers.values_flat()] == [
        ((2, 3), (), 2),
        ((6,), (4, 6), 2),
    ]


# Loading and storing ------------------------------------------------------------------------------------------------


def add(x: popxl.TensorByRef, y: popxl.TensorByRef, data):
    x += data
    y += data


@pytest.mark.parametrize("use_io_tiles", [False, True])
def test_two_layers_in_one_set_of_buffers(ir, use_io_tiles):
    rng = np.random.default_rng(1)
    data, values = rng.normal(size=3).astype(np.float32), rng.normal(size=(2, 2, 3)).astype(np.float32)
    facts = NamedVariableFactories(
        y=VariableFactory(iter(values[:, 0]), F32), x=VariableFactory(iter(values[:, 1]), F32)
    )
    buffers = named_variable_buffers(facts, shard_over_dict=False)
    load, names = load_remote_graph(buffers, 2, use_io_tiles)
    store = store_remote_graph(buffers, 2, use_io_tiles)
    assert names == ["x", "y"] and store.args.keys_flat() == ["x", "y"]
    assert [b.entries for b in buffers.values_flat()] == [2, 2]
    assert [(t.name, t.dtype) for t in (load.graph.inputs[0], store.graph.inputs[0])] == [("entry", popxl.int32)] * 2
    assert load.graph.name.startswith("load_remote_subgraph(") and store.graph.name.startswith("store_remote_subgraph(")
    assert load.args.len() == 0 and len(load.graph.outputs) == 2 and not store.graph.outputs

    graph = ir.create_graph(add, *[popxl.TensorSpec((3,), F32)] * 3)
    named = addons.GraphWithNamedArgs(graph, NamedTensors.pack(["x", "y"], graph.inputs))
    with popxl.in_sequence():
        layers = [facts.init_remote(buffers, i, f"layer{i}") for i in range(2)]
        for i in range(2):
            tensors = NamedTensors.pack(names, load.call(i))
            named.bind(tensors).call(args={graph.inputs[2]: popxl.constant(data * (i + 1))})
            store.bind(tensors).call(i)
    assert [v.name for v in layers[1].values_flat()] == ["layer1.x", "layer1.y"]
    with popxl.Session(ir, "ipu_model") as session:
        session.run()
    for i, layer in enumerate(layers):
        np.testing.assert_array_equal(session.get_tensor_data(layer.y), values[i, 0] + (i + 1) * data)
        np.testing.assert_array_equal(session.get_tensor_data(layer.x), values[i, 1] + (i + 1) * data)


def test_two_layers_in_pieces(replicated_ir):
    """Every replica adds to the whole and shares in the sum."""
    ir, values = replicated_ir, np.random.default_rng(2).normal(size=(2, 4, 6)).astype(np.float32)
    facts = NamedVariableFactories(w=VariableFactory(iter(values), F32))
    buffers = named_variable_buffers(facts)
    load, names = load_remote_graph(buffers, 2)
    store = store_remote_graph(buffers, 2)
    with popxl.in_sequence():
        layers = [facts.init_remote(buffers, i, f"layer{i}") for i in range(2)]
        for i in range(2):
            piece = NamedTensors.pack(names, load.call(i)).w
            assert (piece.shape, piece.meta_shape) == ((6,), (4, 6))
            whole = gather_replica_sharded_tensor(piece) + float(i + 1)
            store.bind(NamedTensors(w=reduce_replica_sharded_tensor(whole, "add"))).call(i)
    with popxl.Session(ir, "ipu_model") as session:
        session.run()
    for i, layer in enumerate(layers):
        np.testing.assert_allclose(session.get_tensor_data(layer.w), 4 * (values[i] + i + 1), rtol=1e-6)


def test_groups_have_values_of_their_own(replicated_ir):
    pairs, values = replicated_ir.replica_grouping(group_size=2), np.arange(12.0).reshape(2, 6).astype(np.float32)
    facts = NamedVariableFactories(w=VariableFactory(iter(values), F32, replica_grouping=pairs))
    buffers = named_variable_buffers(facts)
    with popxl.in_sequence():
        v = facts.init_remote(buffers)
        w = load_remote(buffers).w
        store_remote(buffers, NamedTensors(w=w * 2.0))
        out = addons.host_store(gather_replica_sharded_tensor(w, replica_group=pairs))
    assert v.w.shape_on_host == (2, 6) and w.shape == (3,)
    with popxl.Session(replicated_ir, "ipu_model") as session:
        result = session.run()[out]
    np.testing.assert_array_equal(result, values[[0, 0, 1, 1]])
    np.testing.assert_array_equal(session.get_tensor_data(v.w), 2 * values)


def test_the_entry_may_be_a_tensor(ir, evaluate):
    buffers = NamedRemoteBuffers(w=popxl.remote_buffer((3,), F32, entries=3))
    entry = popxl.variable(1, popxl.int32, "entry")
    with popxl.in_sequence():
        store_remote(buffers, NamedTensors(w=popxl.constant([1.0, 2.0, 3.0])), entry + 1)
        loaded = [load_remote(buffers, k).w for k in (0, entry + 1)]
        np.testing.assert_array_equal(evaluate(*loaded), [[0, 0, 0], [1, 2, 3]])


def test_names_on_one_side_only(ir, evaluate):
    a, b = (popxl.remote_buffer((2,), F32) for _ in range(2))
    with popxl.in_sequence():
        store_remote(
            NamedRemoteBuffers.from_dict({"x.a": a, "b": b}),
            NamedTensors.from_dict({"x.a": popxl.constant([1.0, 2.0]), "c": popxl.constant([3.0, 4.0])}),
        )
        np.testing.assert_array_equal(evaluate(ops.remote_load(a, 0), ops.remote_load(b, 0)), [[1, 2], [0, 0]])


def test_one_buffer_under_two_names(ir):
    shared = popxl.remote_buffer((2,), F32)
    buffers = NamedRemoteBuffers.from_dict({"first.w": shared, "last.w": shared})
    load, names = load_remote_graph(buffers)
    store = store_remote_graph(buffers.filter_keys(["last"]))
    assert names == ["first.w", "last.w"] and store.args.keys_flat() == ["last.w"]
    assert load_remote(buffers).keys_flat() == names
    assert buffers.copy().last.w is shared and buffers.pop("first.w") is shared


def test_names_of_loaded_tensors_sort_like_the_variables(ir):
    buffers = NamedRemoteBuffers.from_dict({k: popxl.remote_buffer((2,), F32) for k in ("b", "a.w", "a.b")})
    assert [t.name for t in load_remote(buffers).tensors] == [f"{k}_remote_loaded" for k in ("a.b", "a.w", "b")]


def test_pieces_of_any_shape(replicated_ir):
    """Caches: each replica has its own, with all its dimensions, changed in place by a graph."""

    def update(cache: popxl.TensorByRef):
        cache += 1.0

    spec = popxl.TensorSpec((2, 1, 3), F32, (2, 1, 3))
    buffers = NamedRemoteBuffers(k=create_remote_buffer(spec, entries=2))
    graph = replicated_ir.create_graph(update, spec)
    with popxl.in_sequence():
        for _ in range(3):
            loaded = load_remote(buffers, 1)
            assert loaded.k.spec.to_tuple() == spec.to_tuple()
            ops.call(graph, loaded.k)
            store_remote(buffers, loaded, 1)
        total = ops.sum(ops.remote_load(buffers.k, 1), [0, 1, 2])
        out = addons.host_store(total)
    with popxl.Session(replicated_ir, "ipu_model") as session:
        np.testing.assert_array_equal(session.run()[out], [18.0] * 4)


def test_nothing_is_left_of_what_fails():
    with popxl.Ir().main_graph:
        foreign = popxl.remote_buffer((2,), F32)
    with popxl.Ir().main_graph as main:
        buffers = NamedRemoteBuffers(a=popxl.remote_buffer((2,), F32), z=foreign)
        for make in (load_remote_graph, store_remote_graph):
            with pytest.raises(ValueError, match="another Ir"):
                make(buffers, entries=7)
        assert len(main.ir.graphs) == 1 and buffers.a.entries == 1


def test_no_buffers_at_all(ir):
    load, names = load_remote_graph(NamedRemoteBuffers())
    assert (load.call(0), names) == ((), [])
    assert store_remote_graph(NamedRemoteBuffers()).bind(NamedTensors()).call(0) == ()


def test_a_buffer_has_the_wrong_shape(ir):
    buffers = NamedRemoteBuffers(w=popxl.remote_buffer((2,), F32))
    with pytest.raises(ValueError, match="does not match buffer"):
        store_remote(buffers, NamedTensors(w=popxl.constant([1.0, 2.0, 3.0])))


# Memory maps --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 4])
def test_remote_variables_in_files(tmp_path, replicas):
    """What the device stores is in the file after the run, and a second program goes on from there."""
    for before in (0.0, 1.0):
        ir = popxl.Ir(replication=replicas)
        with ir.main_graph, popxl.in_sequence():
            facts = NamedVariableFactories(w=factory((2, 4), data=np.zeros((2, 4))))
            buffers = named_variable_buffers(facts, entries=2)
            v = facts.init_remote(buffers, 1, "p", memmap_dir=tmp_path)
            assert (tmp_path / "p.w.npy").stat().st_size == 2 * 4 * 4  # before there is any session
            store_remote(buffers, load_remote(buffers, 1).map(lambda t: t + 1.0), 1)
        np.testing.assert_array_equal(v.w._memmap_arr, np.full((2, 4), before))
        with popxl.Session(ir, "ipu_model") as session:
            session.run()
        assert session.get_tensor_data(v.w) is v.w._memmap_arr
        assert isinstance(v.w._memmap_arr, np.memmap)
        np.testing.assert_array_equal(v.w._memmap_arr, np.full((2, 4), before + 1))
        v.w._memmap_arr.base.flush()


def test_buffers_of_nested_factories(ir):
    """A tree of buffers may have more than is filled from it, and trees of factories may be put together."""
    layer = NamedVariableFactories(w=factory((2, 3)), b=factory((3,)))
    facts = NamedVariableFactories(fwd=layer, optim=NamedVariableFactories.from_dict({"w": layer.copy()}))
    buffers = NamedRemoteBuffers(
        fwd=named_variable_buffers(facts.fwd, 2), optim=named_variable_buffers(facts.optim, 2), bwd=NamedRemoteBuffers()
    )
    v = facts.init_remote(buffers, 1, "x")
    assert v.keys_flat() == ["fwd.b", "fwd.w", "optim.w.b", "optim.w.w"]
    assert v.optim.w.b.name == "x.optim.w.b"
    with pytest.raises(KeyError, match=r"\['fwd.b', 'fwd.w'\]"):
        facts.init_remote(buffers.filter_keys(["optim"]))
