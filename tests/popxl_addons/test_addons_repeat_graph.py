"""A finished graph in a loop: what moves, what stays, and what state does from turn to turn."""

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl.errors import PopxlError
from popxl_addons.patterns import apply_pre_alias_patterns
from popxl_addons.transforms.repeat_graph import repeat_graph


def types(graph):
    return [op.op_type for op in graph.ops]


@pytest.mark.parametrize("count, expected", [(1, 1), (5, [1, 1, 1, 1, 1])])
@pytest.mark.parametrize("make", [popxl.variable, popxl.constant])
def test_counts(ir, make, count, expected):
    out = addons.host_store(make(0) + 1)
    new = repeat_graph(ir.main_graph, count)
    assert (new is ir.main_graph) == (count == 1)
    ir.num_host_transfers = count
    with popxl.Session(ir, "ipu_hw") as session:
        np.testing.assert_array_equal(session.run()[out], expected)


@pytest.mark.parametrize("count", [1, 0, -3])
def test_nothing_happens(ir, count):
    y = popxl.variable(1.0) + 1.0
    text = str(ir)
    assert repeat_graph(ir.main_graph, count) is ir.main_graph
    assert str(ir) == text and y in ir.main_graph


def test_state_and_streams_go_on():
    """Inside no context, as applications do: loads, an update in place, stores."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        total = popxl.variable(np.zeros(2, np.float32), name="total")
        stream = popxl.h2d_stream((2,), popxl.float32)
        ops.add_(total, ops.host_load(stream))
        out = addons.host_store(total * 10.0)
    new = repeat_graph(ir.main_graph, 3)
    assert types(ir.main_graph) == ["Loop"]
    assert types(new) == ["Init", "HostLoad", "AddLhsInplace", "Mul", "HostStore"]
    ir.num_host_transfers = 3
    with popxl.Session(ir, "cpu") as session:
        for start in (0, 12):
            results = session.run({stream: np.array([[1, 2], [3, 4], [5, 6]], np.float32)})
            sums = np.array([[1, 2], [4, 6], [9, 12]]) * 10 + np.array([10, 10]) * (np.array([9, 12]) if start else 0)
            np.testing.assert_array_equal(results[out], sums)
    np.testing.assert_array_equal(session.get_tensor_data(total), [18, 24])


def test_in_sequence_order_survives(ir):
    """Without it these changes of one variable have no order, and a session refuses them."""
    v = popxl.variable(1.0, name="v")
    with popxl.in_sequence():
        ops.add_(v, popxl.constant(3.0))
        ops.var_updates.accumulator_scale_(v, 2.0)
        ops.add_(v, popxl.constant(1.0))
    new = repeat_graph(ir.main_graph, 2)
    first, second, third = new.ops
    assert first.id in second.after and second.id in third.after
    with popxl.Session(ir, "cpu") as session:
        session.run()
    assert session.get_tensor_data(v) == ((1 + 3) * 2 + 1 + 3) * 2 + 1


def test_ops_after_the_loop(ir, evaluate):
    v = popxl.variable(0, name="v")
    with popxl.in_sequence():
        v += 2
        repeat_graph(ir.main_graph, 4)
        w = v + 1
    assert types(ir.main_graph) == ["Loop", "Add"]
    assert evaluate(w)[0] == 9


def test_what_was_computed_is_no_longer_there(ir):
    y = popxl.variable(1.0) + 1.0
    new = repeat_graph(ir.main_graph, 2)
    assert y.graph is new
    with pytest.raises(ValueError, match="not in the main graph"):
        y + 1.0


def test_inputs_are_by_reference_and_named(ir):
    x, k = popxl.variable(1.0, name="x"), popxl.constant(2.0, name="k")
    with popxl.in_sequence():
        first = ops.add_(x, k)
        ops.add_(first, k)
    new = repeat_graph(ir.main_graph, 2)
    assert [(t.name, t.by_ref) for t in new.inputs] == [("x", True), ("k", True)]
    assert new.name.startswith("repeat_graph")


def test_a_subgraph_with_outputs(ir, evaluate):
    """Outputs are those of the last turn; an input or constant that is an output stays one. Calls go on as they are."""

    def build(x: popxl.TensorByRef, y: popxl.Tensor):
        ops.var_updates.accumulate_(x, y)
        total = x + y
        return total, y, total

    x, y = popxl.variable(np.zeros(2), popxl.float32, name="x"), popxl.constant([1.0, 2.0])
    with popxl.in_sequence():
        graph = ir.create_graph(build, x, y)
        results = ops.call(graph, x, y)
        new = repeat_graph(graph, 3)
        assert len(new.outputs) == 1 and len(graph.outputs) == 3 and graph.inputs[1] is graph.outputs[1]
        total, same, twice, changed = evaluate(*results, x + 0.0)
    np.testing.assert_array_equal(total, [4, 8])
    np.testing.assert_array_equal(twice, total)
    np.testing.assert_array_equal(same, [1, 2])
    np.testing.assert_array_equal(changed, [3, 6])


def test_calls_move_with_their_graphs(ir, evaluate):
    v = popxl.variable(1.0, name="v")

    def double(x: popxl.TensorByRef):
        ops.var_updates.accumulator_scale_(x, 2.0)

    graph = ir.create_graph(double, v)
    ops.call(graph, v)
    new = repeat_graph(ir.main_graph, 3)
    assert [op.graph for op in graph.call_sites] == [new]
    with popxl.Session(ir, "cpu") as session:
        session.run()
    assert session.get_tensor_data(v) == 8


def test_a_loop_in_a_loop(ir):
    v = popxl.variable(0, name="v")
    v += 1
    repeat_graph(ir.main_graph, 3)
    repeat_graph(ir.main_graph, 2)
    with popxl.Session(ir, "cpu") as session:
        session.run()
    assert session.get_tensor_data(v) == 6


def test_pieces_of_variables_go_on_from_turn_to_turn():
    """A sharded variable is divided when weights are loaded and put together when they are read: these ops stay."""
    ir = popxl.Ir(replication=2)
    with ir.main_graph, popxl.in_sequence():
        variable, shard = popxl.replica_sharded_variable(np.arange(4, dtype=np.float32), popxl.float32, name="v")
        ops.var_updates.accumulate_(shard, popxl.constant(np.ones(2, np.float32)))
    apply_pre_alias_patterns(ir)
    before = [op for op in ir.main_graph.ops if op.execution_context is not popxl.ExecutionContext.Normal]
    new = repeat_graph(ir.main_graph, 3)
    assert types(new) == ["Accumulate"] and set(before) < {*ir.main_graph.ops}
    with popxl.Session(ir, "ipu_model") as session:
        session.run()
        session.run()
    np.testing.assert_array_equal(session.get_tensor_data(variable), np.arange(4) + 6)


def test_an_op_that_stays_and_needs_one_that_moves(ir):
    y = popxl.variable(1.0) + 1.0
    with popxl.context._execution_context(popxl.ExecutionContext.WeightsToHostFragment):
        ops.negate(y)
    ir.main_graph.add_output(y)
    text = str(ir)
    with pytest.raises(PopxlError, match="stays in the main graph"):
        repeat_graph(ir.main_graph, 2)
    assert str(ir) == text and ir.main_graph.outputs == (y,) and len(ir.graphs) == 1


@pytest.mark.parametrize("count", ["5", 2.0, None])
def test_a_count_is_an_integer(ir, count):
    with pytest.raises(TypeError, match="integer"):
        repeat_graph(ir.main_graph, count)


def test_numpy_integers(ir):
    v = popxl.variable(0)
    v += 1
    assert repeat_graph(ir.main_graph, np.int64(2)) is not ir.main_graph


def test_views_that_stay_go_on_sharing_storage(ir):
    v = popxl.variable(np.arange(6), popxl.float32, "v")
    with popxl.context._execution_context(popxl.ExecutionContext.WeightsFromHostFragment):
        low, high = ops.slice_(v, start=0, stop=4), ops.slice_(v, start=2, stop=6)
    with popxl.in_sequence():
        ops.add_(low, popxl.constant(1.0))
        ops.add_(high, popxl.constant(10.0))
    repeat_graph(ir.main_graph, 3)
    with popxl.Session(ir, "ipu_hw") as session:
        session.run()
    np.testing.assert_array_equal(session.get_tensor_data(v), [3, 4, 35, 36, 34, 35])
