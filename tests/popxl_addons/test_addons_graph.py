"""Graphs with names: binding, calling, differentiating, and what the wrappers remember."""

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl.errors import PopxlError
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.transforms.autodiff import autodiff, remap_grad_info


@pytest.fixture
def x(ir):
    return popxl.variable(np.arange(6).reshape(2, 3), popxl.float32, "x")


@pytest.fixture
def affine(x):
    """The graph of x * w + b with w and b named."""
    graph = x.ir.create_graph(lambda x, w, b: x * w + b, x, x, x)
    return addons.GraphWithNamedArgs(graph, NamedTensors(w=graph.inputs[1], b=graph.inputs[2]))


@pytest.fixture
def v(x):
    w = popxl.variable(np.full((2, 3), 2.0), popxl.float32, "w")
    b = popxl.variable(np.full((2, 3), 10.0), popxl.float32, "b")
    return NamedTensors(w=w, b=b)


EXPECTED = 2.0 * np.arange(6).reshape(2, 3) + 10.0


def test_ways_to_call(affine, x, v, evaluate):
    bound = affine.bind(v)
    tensors = [
        bound.call(x),
        bound.call_with_info(x).outputs,
        affine.call(x, v.w, v.b),
        affine.call(x, args={affine.args.w: v.w, affine.args.b: v.b}),
        affine.call_with_info(x, [v.w, v.b]).outputs,
        affine.bind(NamedTensors(w=v.w, unknown=x)).call(x, args={affine.args.b: v.b}),
        affine.bind().bind({affine.args.w: v.w}).bind({affine.args.b: v.b}).call(x),
    ]
    assert all(type(outputs) is tuple for outputs in tensors)
    for value in evaluate(*(y for (y,) in tensors)):
        np.testing.assert_array_equal(value, EXPECTED)
    assert len(x.ir.graphs) == 2


def test_args_override_what_is_bound(affine, x, v, evaluate):
    (y,) = affine.bind(v).call(x, args={affine.args.b: x})
    (z,) = affine.bind(v).bind({affine.args.b: x}).call(x)
    values = evaluate(y, z)
    np.testing.assert_array_equal(values, [3.0 * np.arange(6).reshape(2, 3)] * 2)


def test_numbers_become_constants(ir, evaluate):
    graph = ir.create_graph(lambda x, y: x * y, *[popxl.TensorSpec((), popxl.float32)] * 2)
    (y,) = addons.BoundGraph(graph).call(3, 2.0)
    assert evaluate(y)[0] == 6


def test_by_reference_inputs_are_written_back(ir, evaluate):
    def bump(a: popxl.TensorByRef):
        a += 1.0

    a, b = popxl.variable(1.0, name="a"), popxl.variable(10.0, name="b")
    graph = addons.GraphWithNamedArgs(ir.create_graph(bump, a))
    with popxl.in_sequence():
        for tensor in (a, b, b):
            graph.call(tensor)
    np.testing.assert_array_equal(evaluate(a, b), [2, 12])


def test_call_errors(affine, x, v):
    bound = affine.bind(v)
    with pytest.raises(ValueError, match="specified twice"):
        bound.call(x, v.w)
    with pytest.raises(ValueError, match="Not enough inputs"):
        affine.call(x)
    with pytest.raises(ValueError, match="Too many inputs"):
        affine.call(x, x, x, x)
    with pytest.raises(ValueError):
        bound.call(affine.graph.inputs[0])
    with pytest.raises(TypeError):
        affine.call(x, args={affine.args.w: "a", affine.args.b: v.b})


def test_what_is_missing_or_does_not_fit_is_listed_by_name_all_at_once(affine, x, v):
    with pytest.raises(ValueError, match=r"nothing is bound to w, b\.\n") as error:
        affine.bind(NamedTensors(wieght=v.w)).call(x)
    assert str(x) in str(error.value)  # what is bound is listed, too
    short = NamedTensors(w=popxl.variable(np.ones(3), popxl.float32, "short"), b=popxl.ops.cast(v.b, popxl.float16))
    ops_before = list(x.ir.main_graph.ops)
    with pytest.raises(PopxlError, match=r"`w` .* f32\[2, 3\], and 'short', .*; the input `b` .* is f16\[2, 3\]"):
        affine.bind(short).call(x)
    assert x.ir.main_graph.ops == ops_before
    (y,) = affine.bind(short).call(x, args={affine.args.w: v.w, affine.args.b: v.b})  # what is replaced may be anything
    assert y.shape == (2, 3)


def test_names_are_for_bind(affine, x, v):
    for use in (
        lambda: affine.call(x, args=v),
        lambda: affine.bind().bind(v),
        lambda: addons.BoundGraph(affine.graph, v),
    ):
        with pytest.raises(TypeError, match="`args` is a NamedTensors, expected a mapping of graph inputs to tensors"):
            use()


def test_a_call_is_no_mapping(affine, x, v):
    info = affine.bind(v).call_with_info(x)
    with pytest.raises(TypeError, match=r"`args` is the call of a graph.*inputs_dict\(info\)"):
        addons.autodiff(affine).call(x, args=info)


def test_activations_of_another_graph_are_refused(affine, x, v):
    grad = addons.autodiff(affine)
    other = x.ir.create_graph(lambda x, w, b: x * w + b, x, x, x)
    with pytest.raises(TypeError):
        grad.grad_graph_info.inputs_dict(ops.call_with_info(other, x, v.w, v.b))


def test_a_graph_is_no_operand(affine, x, v):
    for graph in (affine, affine.bind(v)):
        with pytest.raises(TypeError, match="call it first"):
            ops.add(x, graph)


def test_bind_wants_named_tensors(affine, v):
    with pytest.raises(TypeError, match="`args` is a dict, expected NamedTensors"):
        affine.bind(dict(v.to_dict()))
    factories = addons.NamedVariableFactories(w=addons.VariableFactory(lambda: np.ones(2), popxl.float32))
    with pytest.raises(TypeError, match=r"NamedVariableFactories, .* Make the variables with `args.init\(\)`"):
        affine.bind(factories)
    assert affine.bind().args == affine.bind(None).args == {}
    mapping = {affine.args.w: v.w}
    bound = addons.BoundGraph(affine.graph, mapping)
    assert bound.args == mapping and bound.args is not mapping
    assert repr(bound).startswith("<popxl_addons.graph.BoundGraph object at 0x")


def test_subgraph_io_map(affine, x, v):
    bound = affine.bind(NamedTensors(w=v.w))
    outs = bound.call(x, args={affine.args.b: v.b})
    io = bound.subgraph_io_map(x, args={affine.args.b: v.b}, outs=outs)
    inputs = affine.graph.inputs
    assert io == {inputs[0]: x, inputs[1]: v.w, inputs[2]: v.b, affine.graph.outputs[0]: outs[0]}
    assert affine.bind().subgraph_io_map([x, v.w], outs=[]) == {inputs[0]: x, inputs[1]: v.w}
    with pytest.raises(TypeError, match="`outs` is missing"):
        bound.subgraph_io_map(x)


def test_what_the_wrapper_holds(affine):
    assert addons.GraphWithNamedArgs(affine.graph).args.len() == 0
    assert affine.called_graphs_grad_info == {} and not affine.autodiff_applied
    with pytest.raises(AttributeError, match="`grad_graph_info` attribute does not exist. Not a gradient graph."):
        _ = affine.grad_graph_info
    grad = affine.autodiff()
    affine.grad_graph_info = grad.grad_graph_info
    assert affine.grad_graph_info is grad.grad_graph_info

    copy = affine.copy()
    assert copy.graph is affine.graph and copy.args.to_dict() == affine.args.to_dict()
    assert copy.args is not affine.args
    assert copy.grad_graph_info is grad.grad_graph_info
    assert not copy.autodiff_applied


def test_autodiff(affine, x, v, evaluate):
    grad = addons.autodiff(affine)
    assert grad.args.len() == 0
    assert grad.graph.name == affine.graph.name + "_bwd"
    info = affine.bind(v).call_with_info(x)
    ginfo = grad.call_with_info(v.b, args=grad.grad_graph_info.inputs_dict(info))
    by_parent = grad.grad_graph_info.fwd_parent_ins_to_grad_parent_outs(info, ginfo)
    dx, dw, db = evaluate(by_parent[x], by_parent[v.w], by_parent[v.b])
    np.testing.assert_array_equal(dx, np.full((2, 3), 20.0))
    np.testing.assert_array_equal(dw, 10.0 * np.arange(6).reshape(2, 3))
    np.testing.assert_array_equal(db, np.full((2, 3), 10.0))


def test_autodiff_of_chosen_tensors_in_their_order(affine, x, v):
    grad = addons.autodiff(affine, grads_required=affine.args.tensors)
    assert grad.grad_graph_info.outputs == affine.args.tensors == (affine.args.b, affine.args.w)
    assert len(grad.graph.outputs) == 2
    assert addons.autodiff(affine.graph, [affine.graph.outputs[0]], [affine.graph.inputs[0]]).graph.outputs
    assert addons.autodiff(addons.BoundGraph(affine.graph), affine.graph.outputs[:1], affine.args.tensors).graph.outputs


def test_autodiff_once(affine):
    first = affine.autodiff()
    assert affine.autodiff_applied
    with pytest.raises(Exception, match="Autodiff has already been applied to the graph"):
        affine.autodiff()
    again = affine.autodiff(grads_provided=affine.graph.outputs[:1], force=True)
    assert again.graph != first.graph
    with pytest.raises(ValueError, match="`method` is 'magic'"):
        affine.autodiff(method="magic")


def test_a_failed_autodiff_is_not_an_applied_one(affine):
    outputs = affine.graph.outputs
    with pytest.raises(Exception):  # noqa: B017
        affine.autodiff(grads_required=[])
    assert not affine.autodiff_applied and affine.graph.outputs == outputs
    affine.autodiff()


@pytest.mark.parametrize("wrap", [lambda graph: graph, addons.GraphWithNamedArgs, addons.BoundGraph])
def test_gradients_of_called_graphs_in_any_form(x, evaluate, wrap):
    """The given gradient graph of the inner graph is used, and not a new one."""
    inner = x.ir.create_graph(lambda x: x * x, x)
    outer = addons.GraphWithNamedArgs(x.ir.create_graph(lambda x: ops.call(inner, x)[0] * 1.0, x))
    ten_times = autodiff(inner)
    with ten_times.graph:
        scaled = ten_times.graph.outputs[0] * 10.0
    by_hand = remake(ten_times, scaled)
    outer.called_graphs_grad_info = {wrap(inner): by_hand if wrap is addons.BoundGraph else by_hand.grad_graph_info}
    grad = autodiff(outer, called_graphs_grad_info={})
    info = outer.call_with_info(x)
    (dx,) = grad.call(popxl.constant(np.ones((2, 3)), popxl.float32), args=grad.grad_graph_info.inputs_dict(info))
    np.testing.assert_allclose(evaluate(dx)[0], 20.0 * np.arange(6).reshape(2, 3))


def remake(grad, output):
    """A gradient graph like `grad`, with `output` in the place of its only output."""
    info = grad.grad_graph_info

    def build(*inputs):
        (dx,) = ops.call(grad.graph, *inputs)
        return dx * 10.0

    graph = info.graph.ir.create_graph(build, *(t.spec for t in grad.graph.inputs))
    return addons.GraphWithNamedArgs.from_grad_graph(remap_grad_info(info, info.forward_graph, graph))


def test_remap_grad_info(x, evaluate):
    f, g = (x.ir.create_graph(lambda x: (x + 1.0, x * x), x) for _ in range(2))
    info = addons.autodiff(f, grads_provided=f.outputs[1:]).grad_graph_info
    while len(g.outputs) < len(f.outputs):
        g.add_output(g.inputs[0])
    remapped = remap_grad_info(info, g, info.graph)
    assert remapped.forward_graph is g and remapped.graph is info.graph
    assert remapped.inputs[0] == g.outputs[1] and remapped.outputs == g.inputs
    assert [e.connection_type for e in remapped.expected_inputs] == [e.connection_type for e in info.expected_inputs]
    short = x.ir.create_graph(lambda x: x, x)
    with pytest.raises(KeyError, match="no input or output in the place of"):
        remap_grad_info(info, short, info.graph)


def test_the_function_and_its_module():
    assert addons.autodiff is addons.transforms.autodiff is autodiff
