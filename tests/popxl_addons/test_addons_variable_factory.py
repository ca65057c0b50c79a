"""Factories: what they learn from their data, how they consume it, and what they make of it."""

import itertools
from functools import partial

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl.errors import PopxlError, RowsAsValuesWarning
from popxl_addons.dot_tree import DotTree
from popxl_addons.named_replica_grouping import NamedReplicaGrouping
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.variable_factory import (
    NamedVariableFactories,
    VariableFactory,
    add_replica_sharded_variable_input,
    add_variable_input,
)


def counting(shape=(2,)):
    """A callable whose n-th result is full of n, from 0."""
    counter = itertools.count()
    return lambda: np.full(shape, next(counter), np.float32)


def test_attributes(ir):
    f = VariableFactory(lambda: np.zeros((2, 3)), popxl.float16, "w", by_ref=True)
    assert (f.shape, f.meta_shape, f.dtype, f.name, f.by_ref) == ((2, 3), None, popxl.float16, "w", True)
    assert f.replica_sharded is False
    assert f.replica_grouping == ir.replica_grouping()
    assert VariableFactory(lambda: np.zeros(2, np.int32)).dtype is popxl.int32
    assert repr(f).startswith("<popxl_addons.variable_factory.VariableFactory object at 0x")


def test_data_is_converted_to_the_dtype(ir, evaluate):
    f = VariableFactory(partial(np.full, (2, 3), 2), popxl.float32, "w")
    v = f.create_tensor()
    assert v.dtype is popxl.float32
    np.testing.assert_array_equal(evaluate(v)[0], np.full((2, 3), 2.0))


def test_a_callable_is_called_once_to_check_and_once_to_peek(ir):
    f = VariableFactory(counting(), name="w")
    assert [f.next_data()[0] for _ in range(3)] == [1, 2, 3]


def test_an_iterable_is_consumed_from_its_start_and_ends(ir):
    f = VariableFactory(iter([np.zeros(2), np.ones(2)]), popxl.float32, "w")
    f.create_tensor()
    np.testing.assert_array_equal(f.next_data(), [1, 1])
    with pytest.raises(StopIteration, match="VariableFactory `w`: `data_iter` has no element left"):
        f.create_tensor()


@pytest.mark.parametrize("groups", [1, 2])
def test_elements_are_alike(replicated_ir, groups):
    grouping = replicated_ir.replica_grouping(group_size=replicated_ir.replication_factor // groups)
    elements = [np.zeros(2)] * groups + [np.zeros(3)] * groups
    f = VariableFactory(iter(elements), popxl.float32, "w", replica_grouping=grouping)
    f.create_tensor()
    with pytest.raises(ValueError, match=r"`w`: `data_iter` gives the shape \(3,\); expected \(2,\)"):
        f.create_tensor()


def test_an_array_is_an_iterable_of_its_rows(replicated_ir):
    rows, pairs = np.ones((3, 2)), replicated_ir.replica_grouping(group_size=2)
    with pytest.warns(RowsAsValuesWarning, match=r"`w`: .* array of the shape \(3, 2\), .* 3 values, .* `lambda`"):
        assert VariableFactory(rows, popxl.float32, "w").shape == (2,)
    with pytest.warns(RowsAsValuesWarning, match="3 values, one for each group of replicas"):
        VariableFactory(rows, popxl.float32, "w", replica_grouping=pairs)
    VariableFactory(rows[: pairs.num_groups], popxl.float32, "w", replica_grouping=pairs)
    VariableFactory(iter(rows), popxl.float32, "w")


def test_one_element_for_each_group(replicated_ir):
    group = replicated_ir.replica_grouping(group_size=2)
    f = VariableFactory(counting((2, 3)), popxl.float16, "w", replica_grouping=group)
    v = f.create_tensor()
    assert (f.shape, f.dtype, v.shape, v.shape_on_host) == ((2, 3), popxl.float16, (2, 3), (2, 2, 3))
    np.testing.assert_array_equal(f.next_data()[:, 0, 0], [3, 4])
    assert f.next_data(empty=True).shape == (2, 2, 3)
    np.testing.assert_array_equal(f.next_data()[:, 0, 0], [5, 6])


def test_numpy_scalars_for_each_group(replicated_ir):
    group = replicated_ir.replica_grouping(group_size=1)
    f = VariableFactory(iter(np.arange(4)), popxl.int32, "offset", replica_grouping=group)
    assert f.shape == ()
    assert f.create_tensor().shape_on_host == (4,)
    with pytest.raises(StopIteration):
        f.create_tensor()


def test_sharded(replicated_ir):
    f = VariableFactory(lambda: np.zeros((4, 6)), popxl.float32, "s", shard_over=np.prod((4, 6)) // 6)
    assert (f.shape, f.meta_shape, f.replica_sharded) == ((6,), (4, 6), True)
    assert f.create_tensor().shape == (4, 6)
    with replicated_ir.create_empty_graph("g"):
        t = f.create_input("p")
    assert (t.shape, t.meta_shape, t.name) == ((6,), (4, 6), "p.s")
    with pytest.raises(AssertionError, match="`shard_over` is 8"):
        VariableFactory(lambda: np.zeros(8), shard_over=8)


def test_slice_of_a_sharded_variable(replicated_ir, evaluate):
    """The slice of the whole variable, which a program passes for the placeholder, is a copy of its shard."""
    group = replicated_ir.replica_grouping(stride=2, group_size=2)
    data = np.arange(16.0).reshape(2, 4, 2)
    v = VariableFactory(iter(data), popxl.float32, "w", replica_grouping=group, shard_over=2).create_tensor()
    with popxl.in_sequence():
        shard = ops.collectives.replica_sharded_slice(v, group)
        assert (shard.name, shard.spec) == ("w_sharded_slice", v.piece.spec)
        shard *= 2.0
        whole = ops.collectives.replicated_all_gather(shard, group=group)
        kept = ops.collectives.replicated_all_gather(v.piece, group=group)
    np.testing.assert_array_equal(evaluate(whole, kept), [2 * data[[0, 1, 0, 1]], data[[0, 1, 0, 1]]])


def test_slice_of_a_sharded_variable_over_other_replicas(replicated_ir, evaluate):
    """A shard of as many elements is no slice over the group, if there are more members than shards."""
    v = VariableFactory(lambda: np.ones(2), popxl.float32, "w", shard_over=2).create_tensor()
    t = ops.collectives.replica_sharded_slice(v)
    assert t.shape == v.piece.shape
    whole = ops.sum(t).reshape((1,))
    with pytest.raises(PopxlError, match=r"Use the shard, `v\.piece`"):
        evaluate(whole)


def test_create_input(ir):
    f = VariableFactory(lambda: np.zeros((2, 3)), popxl.float32, "fwd.w", by_ref=True)
    graph = ir.create_empty_graph("g")
    with graph:
        first, second, third = f.create_input(), f.create_input(), f.create_input("p")
    assert graph.inputs == (first, second, third)
    assert [t.name for t in graph.inputs] == ["fwd.w", "fwd.w__t0", "p.fwd.w"]
    assert all(t.by_ref and t.shape == (2, 3) for t in graph.inputs)


def test_bad_data_outside_of_any_graph():
    def broken():
        raise KeyError("no such file")

    with pytest.raises(
        ValueError, match="calling `data_iter` without arguments failed: KeyError: 'no such file'"
    ) as error:
        VariableFactory(broken, popxl.float32, "w")
    assert isinstance(error.value.__cause__, KeyError)
    with pytest.raises(ValueError, match="`data_iter` is a int"):
        VariableFactory(3)
    with pytest.raises(RuntimeError):
        VariableFactory(lambda: np.zeros(2))


def test_bad_elements(ir):
    with pytest.raises(ValueError, match="gives a NoneType"):
        VariableFactory(lambda: None)
    with pytest.raises(AttributeError, match="plain float"):
        VariableFactory(lambda: 1.5)
    with pytest.raises(ValueError, match="empty"):
        VariableFactory([])
    assert VariableFactory(lambda: np.zeros(())).shape == ()


def test_memory_map(ir, tmp_path):
    f = VariableFactory(counting((2, 3)), popxl.float32, "w")
    folder = tmp_path / "new" / "folder"
    data = f.next_memmap(folder, "deep.w")
    assert isinstance(data, np.memmap) and data.mode == "r+" and data.shape == (2, 3) and data.dtype == np.float32
    assert (folder / "deep.w.npy").stat().st_size == 2 * 3 * 4
    assert [path.name for path in folder.iterdir()] == ["deep.w.npy"]
    np.testing.assert_array_equal(data, np.ones((2, 3)))
    data[...] = 7
    data.flush()

    again = f.next_memmap(folder, "deep.w", read_only_if_exists=True)
    assert again.mode == "r" and again[0, 0] == 7
    assert f.next_data()[0, 0] == 2  # the second map took nothing
    with pytest.raises(ValueError, match="written for another variable"):
        VariableFactory(lambda: np.zeros(5), popxl.float32).next_memmap(folder, "deep.w")


def test_memory_map_of_groups_and_empty_ones(replicated_ir, tmp_path):
    f = VariableFactory(counting(), name="w", replica_grouping=replicated_ir.replica_grouping(group_size=2))
    assert f.next_memmap(tmp_path, "empty", empty=True).shape == (2, 2)
    np.testing.assert_array_equal(f.next_memmap(tmp_path, "w"), [[1, 1], [2, 2]])
    with pytest.raises(ValueError, match="needs a `name`"):
        VariableFactory(counting()).create_tensor(memmap_dir=tmp_path)


def test_a_memory_mapped_variable_is_kept_on_disk(ir, tmp_path):
    facts = NamedVariableFactories(w=VariableFactory(counting((3,)), popxl.float32))
    v = facts.init("p", memmap_dir=tmp_path)
    popxl.ops.scaled_add_(v.w, popxl.constant(np.ones(3), popxl.float32), b=2.0)
    with popxl.Session(ir, "cpu") as session:
        session.run()
    assert isinstance(session.get_tensor_data(v.w), np.memmap)
    np.testing.assert_array_equal(np.fromfile(tmp_path / "p.w.npy", np.float32), [3, 3, 3])


@pytest.fixture
def facts(ir):
    w = VariableFactory(lambda: np.zeros((4, 3)), popxl.float32, "weight")
    b = VariableFactory(lambda: np.ones(3), popxl.float32, "bias")
    return NamedVariableFactories.from_dict({"fc.weight": w, "fc.bias": b, "a": b})


def test_init(facts):
    v = facts.init()
    assert type(v) is NamedTensors
    assert v.keys_flat() == ["a", "fc.bias", "fc.weight"]
    assert [t.name for t in v.values_flat()] == ["a", "fc.bias", "fc.weight"]
    assert [t.name for t in facts.init().values_flat()] == ["a__t0", "fc.bias__t1", "fc.weight__t2"]
    assert [t.name for t in facts.fc.init("layer").values_flat()] == ["layer.bias", "layer.weight"]
    assert NamedVariableFactories().init().len() == 0


def test_init_takes_the_next_data(ir, evaluate):
    facts = NamedVariableFactories(w=VariableFactory(counting(), popxl.float32))
    first, second = facts.init().w, facts.init().w
    np.testing.assert_array_equal(evaluate(first, second), [[1, 1], [2, 2]])


def test_init_zero_and_undef_work_in_any_graph(facts, ir):
    graph = ir.create_empty_graph("g")
    with graph:
        zero, undef = facts.init_zero(), facts.init_undef()
    assert zero.keys_flat() == undef.keys_flat() == facts.keys_flat() == ["fc.weight", "fc.bias", "a"]
    assert zero.fc.weight.shape == (4, 3) and zero.fc.weight in graph
    assert not ir.main_graph.variables


def test_init_zero_is_zero(facts, evaluate):
    np.testing.assert_array_equal(evaluate(facts.init_zero().fc.bias)[0], np.zeros(3))


def test_init_remote_lists_all_missing_buffers(facts):
    with pytest.raises(KeyError, match=r"\['a', 'fc.bias', 'fc.weight'\]"):
        facts.init_remote(NamedTensors())


def test_init_remote(ir, tmp_path):
    facts = NamedVariableFactories.from_dict(
        {"fc.w": VariableFactory(counting((2, 3)), popxl.float32), "b": VariableFactory(counting(), popxl.float16)}
    )
    buffers = facts.map(lambda f: popxl.remote_buffer(f.shape, f.dtype, entries=2))
    buffers.insert("unused", popxl.remote_buffer((1,), popxl.float32))
    rows = [facts.init_remote(buffers, i, prefix=f"row{i}", memmap_dir=tmp_path) for i in range(2)]
    assert type(rows[0]) is NamedTensors and rows[0].keys_flat() == ["b", "fc.w"]
    assert [v.name for v in rows[1].values_flat()] == ["row1.b", "row1.fc.w"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"row{i}.{n}.npy" for i in (0, 1) for n in ("b", "fc.w")
    ]
    loaded = [popxl.ops.remote_load(buffers["fc.w"], i) for i in range(2)]
    out = addons.host_store(popxl.ops.concat(loaded))
    with popxl.Session(ir, "cpu") as session:
        np.testing.assert_array_equal(session.run()[out], np.repeat([[1, 1, 1], [2, 2, 2]], 2, axis=0))


def test_init_remote_in_pieces(replicated_ir):
    facts = NamedVariableFactories(w=VariableFactory(counting((4, 6)), popxl.float32, shard_over=4))
    buffers = DotTree(w=popxl.replica_sharded_buffer((4, 6), popxl.float32))
    assert facts.init_remote(buffers).w.shape == (4, 6)
    assert popxl.ops.remote_load(buffers.w, 0).shape == (6,)


def test_init_remote_lists_all_buffers_that_do_not_fit(facts, ir):
    buffers = NamedTensors.from_dict(
        {
            "a": popxl.remote_buffer((3,), popxl.float32),
            "fc.weight": popxl.remote_buffer((5, 3), popxl.float32),
            "fc.bias": popxl.remote_buffer((3,), popxl.float16),
        }
    )
    with pytest.raises(ValueError, match=r"'fc.bias' is float32\[3\], and its .*; 'fc.weight' is float32\[4, 3\], and"):
        facts.init_remote(buffers)
    assert not ir.main_graph.variables


def test_torch_data(replicated_ir):
    torch = pytest.importorskip("torch")
    f = VariableFactory(lambda: torch.ones((2, 3), requires_grad=True), popxl.float16, "w")
    g = VariableFactory(
        iter([torch.zeros(2), torch.nn.Parameter(torch.ones(2))]),
        replica_grouping=replicated_ir.replica_grouping(group_size=2),
    )
    assert (f.shape, g.dtype) == ((2, 3), popxl.float32)
    v, w = f.create_tensor(), g.create_tensor()
    addons.host_store(v * 1.0)
    data = popxl.Session(replicated_ir, "ipu_model").get_tensors_data([v, w])
    np.testing.assert_array_equal(data[v], np.ones((2, 3)))
    np.testing.assert_array_equal(data[w], [[0, 0], [1, 1]])


def test_replica_groupings(replicated_ir):
    pairs = replicated_ir.replica_grouping(group_size=2)
    facts = NamedVariableFactories.from_dict(
        {"x.w": VariableFactory(counting(), replica_grouping=pairs), "b": VariableFactory(counting())}
    )
    groups = facts.replica_groupings
    assert type(groups) is NamedReplicaGrouping
    assert groups.x.w == pairs and groups.b == replicated_ir.replica_grouping()
    groups.insert("more", pairs)
    assert "more" not in facts.replica_groupings


def test_free_functions(replicated_ir):
    assert addons.add_variable_input is add_variable_input
    with replicated_ir.create_empty_graph("g"):
        t, f = add_variable_input("w", lambda: np.zeros((2, 3)), popxl.float32, by_ref=True)
        s, sf = add_replica_sharded_variable_input("s", lambda: np.zeros((4, 6)), popxl.float32)
        h, _ = add_replica_sharded_variable_input("h", lambda: np.zeros((4, 6)), popxl.float32, True, shard_over=2)
        whole, wf = add_replica_sharded_variable_input(
            "u", lambda: np.zeros((4, 6)), replica_grouping=replicated_ir.replica_grouping(group_size=1)
        )
    assert (t.name, t.shape, t.by_ref, f.name) == ("w", (2, 3), True, "w")
    assert (s.shape, s.meta_shape, sf.replica_sharded) == ((6,), (4, 6), True)
    assert (s.by_ref, h.by_ref, h.shape) == (False, True, (12,))
    assert (whole.shape, whole.meta_shape, wf.replica_sharded) == ((4, 6), (), False)


def test_a_grouping_of_other_replicas(ir):
    others = popxl.Ir(replication=4).replica_grouping(group_size=2)
    with pytest.raises(ValueError, match="^VariableFactory `w`: `replica_grouping` groups 4 replicas"):
        VariableFactory(lambda: np.zeros(3), popxl.float32, "w", replica_grouping=others)
    with pytest.raises(ValueError, match="^create_remote_buffer: `replica_group` groups 4 replicas"):
        addons.create_remote_buffer(popxl.TensorSpec((4,), popxl.float32), replica_group=others)
