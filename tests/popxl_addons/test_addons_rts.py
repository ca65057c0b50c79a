"""Replicated tensor sharding: pieces, and how they are put together and reduced."""

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl_addons.named_replica_grouping import NamedReplicaGrouping
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.rts import (
    all_gather_replica_sharded_graph,
    gather_replica_sharded_tensor,
    reduce_replica_sharded_graph,
    reduce_replica_sharded_tensor,
    replica_sharded_spec,
)

F32 = popxl.float32
REPLICAS = 4


@pytest.fixture
def ir():
    ir = popxl.Ir(replication=REPLICAS)
    with ir.main_graph:
        yield ir


def different(ir, values, name="t"):
    """A variable with a value of its own on each replica."""
    return popxl.variable(values, F32, name, replica_grouping=ir.replica_grouping(group_size=1))


def seen(t):
    """The piece as an ordinary tensor, which may be stored to the host."""
    flat = popxl.OpKind(
        "Seen", lambda t: t, shape=lambda t: popxl.TensorSpec(t.shape, t.dtype), result="seen", gradient=None
    )
    return flat(t)


def grouping(ir, text):
    stride, size = map(int, text.split("x"))
    return ir.replica_grouping(stride=stride, group_size=size)


# Specs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "group", "expected"),
    [
        (popxl.TensorSpec((8, 2), F32), "1x4", popxl.TensorSpec((4,), F32, (8, 2))),
        (popxl.TensorSpec((8, 2), popxl.float16), "2x2", popxl.TensorSpec((8,), popxl.float16, (8, 2))),
        (popxl.TensorSpec((8, 2), F32), "1x1", popxl.TensorSpec((8, 2), F32)),
        (popxl.TensorSpec((3, 2), F32), "1x4", popxl.TensorSpec((3, 2), F32)),
        (popxl.TensorSpec((), F32), "1x2", popxl.TensorSpec((), F32)),
        (popxl.TensorSpec((4,), F32, (2, 8)), "1x4", popxl.TensorSpec((4,), F32, (2, 8))),
    ],
)
def test_spec_of_a_piece(ir, spec, group, expected):
    tensor = popxl.graph_input(**spec) if spec.meta_shape else popxl.variable(np.zeros(spec.shape), spec.dtype)
    for t in (spec, tensor):
        assert replica_sharded_spec(t, grouping(ir, group)).to_tuple() == expected.to_tuple()
    assert replica_sharded_spec(tensor, shard_over=grouping(ir, group)).shape == expected.shape


# Gathering ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_io_tiles", [False, True])
@pytest.mark.parametrize("group", [None, "1x2", "2x2"])
def test_gathering(ir, evaluate, group, use_io_tiles):
    rg = None if group is None else grouping(ir, group)
    groups = 1 if rg is None else rg.num_groups
    values = np.arange(groups * 12.0).reshape(groups, 4, 3)
    w, piece = popxl.replica_sharded_variable(values[0] if groups == 1 else values, F32, "w", replica_grouping=rg)
    assert piece.shape == (12 // (REPLICAS // groups),)
    whole = gather_replica_sharded_tensor(piece, use_io_tiles, rg)
    assert (whole.shape, whole.meta_shape, whole.tile_set) == ((4, 3), (), "compute")
    assignment = [0] * REPLICAS if rg is None else rg.assignment
    np.testing.assert_array_equal(evaluate(whole)[0], values[assignment])


def test_whole_tensors_are_returned_as_they_are(ir):
    w = popxl.variable(np.zeros((2, 3)), F32, "w")
    assert gather_replica_sharded_tensor(w) is w
    assert gather_replica_sharded_tensor(w, True, ir.replica_grouping()) is w


def test_groups_of_a_factory_may_not_be_constant(evaluate):
    """What is cut for the constant part of a grouping is put together in it."""
    ir = popxl.Ir(replication=8)
    group = ir.replica_grouping_from_assignments([0, 0, 1, 1, 1, 1, 0, 0])
    values = np.arange(8.0).reshape(2, 4)
    with ir.main_graph, popxl.in_sequence():
        _, piece = popxl.replica_sharded_variable(values, F32, "w", replica_grouping=group)
        whole = gather_replica_sharded_tensor(piece, replica_group=group)
        alone = ir.replica_grouping(group_size=1)
        shared = reduce_replica_sharded_tensor(whole, "add", alone, group)
        assert replica_sharded_spec(whole, group).to_tuple() == shared.spec.to_tuple() == piece.spec.to_tuple()
        again = gather_replica_sharded_tensor(shared, replica_group=group)
    np.testing.assert_array_equal(evaluate(whole, again), [values[group.assignment]] * 2)


def test_gather_graph(ir, evaluate):
    pairs, everyone = ir.replica_grouping(group_size=2), ir.replica_grouping()
    values = np.arange(16.0).reshape(2, 8)
    _, b = popxl.replica_sharded_variable(values, F32, "b", replica_grouping=pairs)
    _, a = popxl.replica_sharded_variable(values, F32, "a")
    tensors = NamedTensors.from_dict({"x.b": b, "a": a, "whole": popxl.variable(np.ones(3), F32, "c")})
    groups = NamedReplicaGrouping.from_dict({"x.b": pairs, "a": everyone, "whole": everyone, "unused": pairs})
    gather, names = all_gather_replica_sharded_graph(tensors, replica_groups=groups)
    assert names == ["a", "whole", "x.b"] == gather.args.keys_flat() == [t.name for t in gather.graph.inputs]
    assert [t.spec.to_tuple() for t in gather.args.values_flat()] == [tensors[n].spec.to_tuple() for n in names]
    assert gather.graph.name.startswith("all_gather_subgraph(")
    result = NamedTensors.pack(names, gather.bind(tensors).call())
    whole, x = evaluate(result.a, result.x.b)
    np.testing.assert_array_equal(whole, [values] * 4)
    np.testing.assert_array_equal(x, values[[0, 0, 1, 1]])


def test_gather_graph_with_groups_missing(ir):
    tensors = NamedTensors.from_dict({"x.b": popxl.constant(1.0), "a": popxl.constant(1.0)})
    with pytest.raises(KeyError, match=r"no grouping for \['x.b'\]"):
        all_gather_replica_sharded_graph(tensors, replica_groups=NamedReplicaGrouping(a=ir.replica_grouping()))
    assert len(ir.graphs) == 1


# Reducing -----------------------------------------------------------------------------------------------------------


def reduced(values, group, op):
    """For each replica, the sum or mean of the values of its group."""
    assignment = np.array(group.assignment)
    total = np.array([values[assignment == own].sum(0) for own in assignment])
    return total / group.group_size if op == "mean" else total


@pytest.mark.thorough(but_each=3)
@pytest.mark.parametrize("op", ["add", "mean"])
@pytest.mark.parametrize(
    ("replica_group", "shard_group"),
    [(None, None), ("1x2", None), ("2x2", None), (None, "1x2"), (None, "2x2"), ("1x1", "1x2"), ("1x2", "1x4")],
)
def test_reducing(ir, evaluate, op, replica_group, shard_group):
    values = np.random.default_rng(3).normal(size=(REPLICAS, 4, 2)).astype(np.float32)
    over = None if replica_group is None else grouping(ir, replica_group)
    by = None if shard_group is None else grouping(ir, shard_group)
    piece = reduce_replica_sharded_tensor(different(ir, values), op, over, by)
    over = ir.replica_grouping() if over is None else over
    by = over if by is None else by
    assert (piece.shape, piece.meta_shape) == ((8 // by.group_size,), (4, 2))
    ranks = [by.assignment[:r].count(group) for r, group in enumerate(by.assignment)]
    whole = reduced(values, over, op).reshape(REPLICAS, by.group_size, -1)
    np.testing.assert_allclose(evaluate(seen(piece))[0], whole[range(REPLICAS), ranks], rtol=1e-6)


def test_a_reduction_to_pieces_is_one_op(ir):
    t = different(ir, np.zeros((REPLICAS, 8)))
    reduce_replica_sharded_tensor(t)
    pairs = ir.replica_grouping(group_size=2)
    reduce_replica_sharded_tensor(t, "mean", pairs, ir.replica_grouping(group_size=2))
    assert [op.op_type for op in ir.main_graph.ops] == ["ReplicatedReduceScatter"] * 2


@pytest.mark.parametrize(
    ("shape", "over", "by"), [((3, 2), "1x4", "1x4"), ((), "1x4", "1x4"), ((4, 2), "1x4", "1x1"), ((3,), "2x2", "1x2")]
)
def test_what_stays_whole(ir, evaluate, shape, over, by):
    values = np.random.default_rng(4).normal(size=(REPLICAS, *shape)).astype(np.float32)
    over, by = grouping(ir, over), grouping(ir, by)
    t = reduce_replica_sharded_tensor(different(ir, values), "add", over, by)
    assert (t.shape, t.meta_shape) == (shape, ())
    np.testing.assert_allclose(evaluate(t)[0], reduced(values, over, "add"), rtol=1e-6)


def test_factories_in_place_of_tensors(ir):
    """The graphs are made before the variables, also of a part of the factories."""
    pairs = ir.replica_grouping(group_size=2)
    facts = addons.NamedVariableFactories(
        a=addons.VariableFactory(lambda: np.zeros((4, 2)), popxl.float16),
        b=addons.VariableFactory(lambda: np.zeros((4, 3)), F32, shard_over=REPLICAS),
        c=addons.VariableFactory(lambda: np.zeros(3), F32),
    )
    assert replica_sharded_spec(facts.a, pairs).to_tuple() == ((4,), popxl.float16, (4, 2))
    assert replica_sharded_spec(facts.b, pairs).to_tuple() == ((3,), F32, (4, 3))
    assert replica_sharded_spec(facts.c, pairs).to_tuple() == ((3,), F32, ())
    without = facts.copy()
    without.pop("b")
    reduce, names = reduce_replica_sharded_graph(without, "mean", shard_groups=NamedReplicaGrouping(a=pairs))
    assert (names, reduce.args.keys_flat()) == (["a", "c"], ["a", "c"])
    assert [t.spec.to_tuple() for t in reduce.graph.inputs] == [((4, 2), popxl.float16, ()), ((3,), F32, ())]
    assert [t.shape for t in reduce.graph.outputs] == [(4,), (3,)]
    gather, names = all_gather_replica_sharded_graph(facts, replica_groups=facts.replica_groupings)
    assert [t.shape for t in gather.graph.inputs] == [(4, 2), (3,), (3,)]
    assert [t.shape for t in gather.graph.outputs] == [(4, 2), (4, 3), (3,)]
    variables = facts.init()
    assert [t.shape for t in gather.bind(variables).call()] == [(4, 2), (4, 3), (3,)]
    assert all_gather_replica_sharded_graph(variables)[0].args.b.spec.to_tuple() == ((3,), F32, (4, 3))
    buffers = addons.named_buffers(facts)
    assert [(buffers[name].tensor_shape, buffers[name].meta_shape) for name in facts.keys()] == [
        ((4, 2), ()),
        ((3,), (4, 3)),
        ((3,), ()),
    ]


def test_alone_nothing_happens(ir):
    t, alone = different(ir, np.zeros((REPLICAS, 8))), ir.replica_grouping(group_size=1)
    assert reduce_replica_sharded_tensor(t, "mean", alone) is t
    graph, names = reduce_replica_sharded_graph(NamedTensors(t=t), "mean", replica_group=alone)
    assert (names, graph.graph.outputs) == (["t"], graph.graph.inputs)


def test_numbers_of_the_documentation():
    """Two replicas, g = [1+r, 2+r, 3+r, 4+r]."""
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        g = different(ir, np.arange(1.0, 5.0) + [[0.0], [1.0]])
        grads = NamedTensors(g=g)
        reduce, names = reduce_replica_sharded_graph(grads, "mean", replica_group=ir.replica_grouping())
        pieces = NamedTensors.pack(names, reduce.bind(grads).call())
        gather, names = all_gather_replica_sharded_graph(pieces)
        whole = NamedTensors.pack(names, gather.bind(pieces).call())
        streams = [addons.host_store(t) for t in (seen(pieces.g), whole.g)]
    with popxl.Session(ir, "ipu_model") as session:
        outputs = session.run()
    np.testing.assert_array_equal(outputs[streams[0]], [[1.5, 2.5], [3.5, 4.5]])
    np.testing.assert_array_equal(outputs[streams[1]], [[1.5, 2.5, 3.5, 4.5]] * 2)


@pytest.mark.parametrize("use_io_tiles", [False, True])
def test_reduce_graph(ir, evaluate, use_io_tiles):
    values = np.random.default_rng(5).normal(size=(REPLICAS, 8)).astype(np.float32)
    pairs = ir.replica_grouping(group_size=2)
    names = ["b", "a", "x.c"]
    tensors = NamedTensors.pack(names, [different(ir, values * (i + 1)) for i in range(3)])
    groups = NamedReplicaGrouping.from_dict({"a": ir.replica_grouping(group_size=1), "x.c": pairs, "unused": pairs})
    reduce, outputs = reduce_replica_sharded_graph(tensors, "mean", use_io_tiles, groups)
    assert outputs == ["a", "b", "x.c"] == reduce.args.keys_flat()
    assert [t.shape for t in reduce.graph.outputs] == [(8,), (2,), (4,)]
    assert reduce.graph.name.startswith("replica_reduce_subgraph(")
    result = NamedTensors.pack(outputs, reduce.bind(tensors).call())
    a, b, c = evaluate(result.a, seen(result.b), seen(result.x.c))
    mean = values.mean(0)
    np.testing.assert_allclose(a, [2 * mean] * 4, rtol=1e-5)
    np.testing.assert_allclose(b, mean.reshape(4, 2), rtol=1e-5)
    np.testing.assert_allclose(c, 3 * mean.reshape(2, 4)[[0, 1, 0, 1]], rtol=1e-5)


def test_only_sums_and_means(ir):
    t = different(ir, np.zeros((REPLICAS, 8)))
    for refused in (
        lambda: reduce_replica_sharded_tensor(t, "max"),
        lambda: reduce_replica_sharded_graph(NamedTensors(t=t), "max"),
    ):
        with pytest.raises(ValueError, match="`op` is 'max'; expected 'add' or 'mean'"):
            refused()
    assert len(ir.graphs) == 1
