"""Routing a tensor into graphs: the inputs it makes, the calls that bind them, and what cannot be routed."""

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.errors import PopxlError
from popxl_addons.route_tensor import is_subgraph, route_tensor_into_graph


@pytest.fixture
def v(ir):
    return popxl.variable(np.array([1.0, 2.0, 3.0], np.float32), name="v")


def add_one(t):
    return ops.var_updates.accumulate_(t, popxl.constant(np.ones(3), popxl.float32))


def test_a_tensor_of_the_graph_itself(ir, v):
    assert route_tensor_into_graph(v) is v
    assert route_tensor_into_graph(v, ir.main_graph) is v


def test_one_input_for_several_calls(ir, v, evaluate):
    inner = ir.create_empty_graph("inner")
    first, second = ops.call_with_info(inner), ops.call_with_info(inner)
    with inner:
        routed = route_tensor_into_graph(v)
        assert route_tensor_into_graph(v) is routed
        inner.add_output(routed * 2.0)
    assert routed.name == "v" and routed.spec == v.spec
    assert inner.inputs == (routed,)
    assert first.inputs == second.inputs == (v,)
    for y in evaluate(*first.outputs, *second.outputs):
        np.testing.assert_array_equal(y, [2, 4, 6])


def test_several_ways_to_a_graph(ir, v, evaluate):
    """main → left → inner, main → right → inner, and main → inner, where right has an input of its own."""
    inner, left = ir.create_empty_graph("inner"), ir.create_empty_graph("left")
    right = ir.create_graph(lambda x: ops.call(inner) and x, v)
    with left:
        ops.call(inner)
    sites = [ops.call_with_info(left), ops.call_with_info(right, v), ops.call_with_info(inner)]
    routed = route_tensor_into_graph(v, inner)
    assert [len(graph.inputs) for graph in (inner, left, right)] == [1, 1, 2]
    assert [site.inputs for site in sites] == [(v,), (v, v), (v,)]
    with inner:
        inner.add_output(routed + routed)
    left.add_output(left.ops[0].outputs[0])
    for y in evaluate(sites[0].outputs[0], sites[2].outputs[0]):
        np.testing.assert_array_equal(y, [2, 4, 6])


def test_a_loop_passes_the_tensor_to_each_turn(ir, v, evaluate):
    inner = ir.create_graph(lambda x: x, v)
    info = ops.repeat_with_info(inner, 3, popxl.constant(np.zeros(3), popxl.float32))
    with inner:
        total = inner.inputs[0] + route_tensor_into_graph(v)
    inner.trim_outputs(0)
    inner.add_output(total, extend_calls=False)
    assert [t.name for t in info.called_graph.inputs] == ["iteration", "keep_going", "x", "v"]
    wrapper_call = info.called_graph.ops[0]
    assert wrapper_call.inputs == info.called_graph.inputs[2:]
    np.testing.assert_array_equal(evaluate(info.outputs[0])[0], [3, 6, 9])


@pytest.mark.filterwarnings("ignore::popxl.errors.LostUpdateWarning")
@pytest.mark.parametrize(
    "modified, after", [(False, [1, 2, 3]), (True, [5, 6, 7]), (["all"], [5, 6, 7]), ([], [1, 2, 3])]
)
def test_changes_made_inside(ir, v, modified, after):
    """Four times: by a call, and by a loop of three turns, two graphs deep."""
    inner, middle = ir.create_empty_graph("inner"), ir.create_empty_graph("middle")
    with middle:
        ops.call(inner)
    with popxl.in_sequence():
        ops.call(middle)
        ops.repeat(middle, 3)
    with inner:
        add_one(route_tensor_into_graph(v, modified=modified))
    with popxl.Session(ir, "cpu") as session:
        session.run()
    np.testing.assert_array_equal(session.get_tensor_data(v), after)


def test_changes_are_let_out_later(ir, v):
    inner = ir.create_empty_graph("inner")
    ops.call(inner)
    with inner:
        routed = add_one(route_tensor_into_graph(v)).origin
        assert route_tensor_into_graph(v, modified=True) is routed
    with popxl.Session(ir, "cpu") as session:
        session.run()
    np.testing.assert_array_equal(session.get_tensor_data(v), [2, 3, 4])


def test_a_scalar(ir):
    x = popxl.variable(2.0)
    inner = ir.create_empty_graph("inner")
    ops.call(inner)
    assert route_tensor_into_graph(x, inner) is route_tensor_into_graph(x, inner)


def test_a_caller_that_nothing_calls_yet_has_the_input_too(ir, v, evaluate):
    inner = ir.create_empty_graph("inner")
    ops.call(inner)
    later = ir.create_graph(lambda: ops.call(inner))
    with inner:
        inner.add_output(route_tensor_into_graph(v) * 3.0)
    with pytest.raises(ValueError, match="nothing is bound to v"):
        ops.call(later)
    later.add_output(later.ops[0].outputs[0])
    np.testing.assert_array_equal(evaluate(*ops.call(later, v))[0], [3, 6, 9])


def test_not_below_the_graph_of_the_tensor(ir, v):
    stranger = ir.create_empty_graph("stranger")
    with pytest.raises(ValueError, match="is not in the graph asked for, graph `.*is not in a known parent graph"):
        route_tensor_into_graph(v, stranger)
    below = ir.create_graph(lambda x: ops.exp(x), v)
    ops.call(below, v)
    with pytest.raises(ValueError, match="is not in the graph.*is not in a known parent graph"):
        route_tensor_into_graph(below.outputs[0])


def test_the_main_graph_has_no_inputs(ir, v):
    inner = ir.create_empty_graph("inner")
    middle = ir.create_graph(lambda x: ops.call(inner) and x, v)
    ops.call(inner)
    with pytest.raises(ValueError, match="the main graph runs graph `inner.*` without it"):
        route_tensor_into_graph(middle.inputs[0], inner)
    assert not inner.inputs


def test_not_through_a_branch(ir, v):
    then_branch, else_branch = (ir.create_empty_graph(name) for name in ("then", "else"))
    ops.conditional(popxl.variable(True), then_branch, else_branch)
    with pytest.raises(RuntimeError, match="Only calls and loops can gain an input"):
        route_tensor_into_graph(v, then_branch)
    assert not then_branch.inputs


def test_not_before_it_is_made(ir, v):
    inner = ir.create_empty_graph("inner")
    ops.call(inner)
    with pytest.raises(ValueError, match="is made after"):
        route_tensor_into_graph(v + 1.0, inner)
    assert not inner.inputs


def test_a_call_that_lacks_an_input(ir, v):
    inner = ir.create_empty_graph("inner")
    ops.call(inner)
    inner.add_input(v.spec, "x")
    with pytest.raises(ValueError, match="an input that the graph has already is not bound"):
        route_tensor_into_graph(v, inner)
    assert len(inner.inputs) == 1


def test_a_tensor_is_written_back_from_one_input(ir, v):
    def change(x: popxl.TensorByRef):
        add_one(x)

    inner = ir.create_graph(change, v)
    ops.call(inner, v)
    with pytest.raises(ValueError, match="is written back by .* from another input"):
        route_tensor_into_graph(v, inner, modified=True)
    assert len(inner.inputs) == 1


def test_is_subgraph(ir):
    inner, middle, stranger = (ir.create_empty_graph() for _ in range(3))
    with middle:
        ops.repeat(inner, 2)
    ops.call(middle)
    assert is_subgraph(ir.main_graph, inner) and is_subgraph(middle, inner) and is_subgraph(inner, inner)
    assert not is_subgraph(inner, middle) and not is_subgraph(ir.main_graph, stranger)


def test_an_op_gains_what_fits(ir, v):
    inner = ir.create_graph(lambda x: x, v)
    info = ops.call_with_info(inner, v)
    inner.add_input(popxl.TensorSpec((), popxl.int32), "k")
    for wrong in (v, inner.inputs[1]):
        with pytest.raises(PopxlError, match="cannot bind"):
            info.op.gain_input(wrong)
    with pytest.raises(PopxlError, match="cannot bind"):
        (v + v).producer.gain_input(v)
    info.op.gain_input(k := popxl.constant(3))
    assert info.inputs == (v, k)
