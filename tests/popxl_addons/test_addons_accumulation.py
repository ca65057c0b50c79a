"""Gradient graphs that keep running means: names, order, what they compute, and how programs use them."""

from functools import partial

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl.errors import PopxlError
from popxl_addons import NamedTensors
from popxl_addons.rts import gather_replica_sharded_tensor
from popxl_addons.transforms.autodiff import autodiff_with_accumulation


class Linear(addons.Module):
    def __init__(self, n=4):
        super().__init__()
        self.n = n

    def build(self, x):
        w = self.add_variable_input("w", partial(np.random.normal, size=(x.shape[-1], self.n)), x.dtype)
        return x @ w


class Two(addons.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Linear(4), Linear(2)

    def build(self, x):
        return self.second(self.first(x))


@pytest.fixture
def x(ir):
    return popxl.variable(np.arange(15).reshape(5, 3), popxl.float32, name="x")


def ones(shape):
    return popxl.constant(np.ones(shape), popxl.float32)


def test_names_specs_and_order(ir, x):
    facts, graph = Two().create_graph(x)
    grad_facts, grad = autodiff_with_accumulation(graph, graph.args.tensors, grads_required=graph.graph.inputs[:1])
    names = ["mean_accum_counter", "accum.first.w", "accum.second.w"]
    assert grad_facts.keys_flat() == grad.args.keys_flat() == names
    assert grad_facts.keys() == ["mean_accum_counter", "accum"]
    assert list(grad.args.to_dict().values()) == list(grad.graph.inputs[-3:])
    assert all(t.by_ref for t in grad.graph.inputs[-3:])
    counter, first, second = grad.graph.inputs[-3:]
    assert counter.spec == popxl.TensorSpec((), popxl.float32)
    assert (first.shape, second.shape) == ((3, 4), (4, 2))
    assert len(grad.graph.outputs) == 1 and grad.graph.outputs[0].shape == (5, 3)
    assert [op.op_type for op in grad.graph.ops].count("Accumulate") == 3
    variables, accumulators = facts.init(), grad_facts.init()
    assert [t.shape for t in accumulators.tensors[:-1]] == [t.shape for t in variables.tensors]
    assert accumulators.tensors[-1] is accumulators.mean_accum_counter


def test_the_info_speaks_of_what_is_returned(ir, x):
    _, graph = Linear().create_graph(x)
    _, grad = autodiff_with_accumulation(graph, graph.args.tensors, grads_required=graph.graph.inputs[:1])
    info = grad.grad_graph_info
    assert info.outputs == graph.graph.inputs[:1] and info.graph is grad.graph and info.forward_graph is graph.graph
    site = graph.call_with_info(x, ones((3, 4)))
    accumulators = NamedTensors.from_dict({name: ops.init(**t.spec) for name, t in grad.args.to_dict().items()})
    grad_site = grad.bind(accumulators).call_with_info(ones((5, 4)), args=info.inputs_dict(site))
    assert list(info.fwd_parent_ins_to_grad_parent_outs(site, grad_site)) == [x]


def test_graphs_in_the_ir(ir, x):
    _, graph = Linear().create_graph(x)
    assert len(ir.graphs) == 2
    _, grad = autodiff_with_accumulation(graph, graph.args.tensors)
    assert len(ir.graphs) == 3 and grad.graph.outputs == ()


def test_running_means(evaluate):
    """Gradients 2, 4, 9, then a restart by the counter alone, and 6."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        stream = popxl.h2d_stream((), popxl.float32)
        x = ops.host_load(stream)
        product = ir.create_graph(lambda x, w: x * w, x, x)
        graph = addons.GraphWithNamedArgs(product, NamedTensors(w=product.inputs[1]))
        facts, grad = autodiff_with_accumulation(graph, graph.args.tensors)
        state = facts.init()
        info = graph.call_with_info(x, popxl.constant(1.0))
        assert grad.bind(state).call(popxl.constant(1.0), args=grad.grad_graph_info.inputs_dict(info)) == ()
    with popxl.Session(ir, "cpu") as session:
        for gradient, mean, count in [(2, 2, 1), (4, 3, 2), (9, 5, 3)]:
            session.run({stream: np.float32(gradient)})
            values = session.get_tensors_data([state.accum.w, state.mean_accum_counter])
            assert (values[state.accum.w], values[state.mean_accum_counter]) == (mean, count)
        session.write_variables_data({state.mean_accum_counter: np.float32(0)})
        session.run({stream: np.float32(6)})
        assert session.get_tensor_data(state.accum.w) == 6


def test_two_layers_against_numpy(ir, x, evaluate):
    facts, graph = Two().create_graph(x)
    grad_facts, grad = autodiff_with_accumulation(graph, graph.args.tensors, grads_required=graph.graph.inputs[:1])
    plain = addons.autodiff(graph, grads_provided=graph.graph.outputs[:1])
    variables, state = facts.init(), grad_facts.init()
    info = graph.bind(variables).call_with_info(x)
    dy = ones((5, 2))
    with popxl.in_sequence():
        (dx,) = grad.bind(state).call(dy, args=grad.grad_graph_info.inputs_dict(info))
        plain_dx, *_ = plain.call(dy, args=plain.grad_graph_info.inputs_dict(info))
        tensors = dx, plain_dx, *state.tensors, *variables.tensors, x
        dx, plain_dx, first, second, counter, w1, w2, x = evaluate(*(t + 0.0 for t in tensors))
    g = np.ones((5, 2))
    np.testing.assert_allclose(first, x.T @ (g @ w2.T), rtol=1e-5)
    np.testing.assert_allclose(second, (x @ w1).T @ g, rtol=1e-5)
    np.testing.assert_allclose(dx, g @ w2.T @ w1.T, rtol=1e-5)
    np.testing.assert_array_equal(dx, plain_dx)
    assert counter == 1


@pytest.mark.parametrize("required", [(), None, []])
def test_no_outputs_unless_required(ir, x, required):
    _, graph = Linear().create_graph(x)
    _, grad = autodiff_with_accumulation(graph, graph.args.tensors, grads_required=required)
    assert grad.graph.outputs == grad.grad_graph_info.outputs == ()


def test_required_gradients_keep_their_order(ir, x):
    graph = addons.GraphWithNamedArgs(ir.create_graph(lambda a, b, c: a * b * c, *[x.spec] * 3))
    a, b, c = graph.graph.inputs
    _, grad = autodiff_with_accumulation(graph, [b], grads_required=[c, a], grads_provided=graph.graph.outputs)
    assert grad.grad_graph_info.outputs == (c, a)
    assert [t.name for t in grad.graph.outputs] == ["Gradient___c", "Gradient___a"]


def test_a_tensor_in_both_lists_is_accumulated_and_returned(ir, x):
    _, graph = Linear().create_graph(x)
    facts, grad = autodiff_with_accumulation(graph, graph.args.tensors, grads_required=graph.args.tensors)
    assert facts.accum.keys() == ["w"] and grad.grad_graph_info.outputs == graph.args.tensors


class Embed(addons.Module):
    def build(self, x, word_embedding):
        scale = self.add_variable_input("scale", lambda: np.ones(4, np.float32))
        return (x @ word_embedding) * scale


def test_inputs_that_have_no_flat_name_and_a_tied_accumulator(ir, x, evaluate):
    """An accumulator is taken out of the factories, and another tensor given at the call."""
    table = popxl.variable(np.ones((3, 4)), popxl.float32)
    facts, graph = Embed().create_graph(x, table)
    grad_facts, grad = autodiff_with_accumulation(graph, [*graph.args.tensors, graph.graph.inputs[1]])
    assert grad_facts.keys_flat() == ["mean_accum_counter", "accum.scale", "accum.word_embedding"]
    grad_facts.accum.pop("word_embedding")
    tied = popxl.variable(np.zeros((3, 4)), popxl.float32, name="tied")
    info = graph.bind(facts.init()).call_with_info(x, table)
    activations = grad.grad_graph_info.inputs_dict(info)
    with popxl.in_sequence():
        bound = grad.bind(state := grad_facts.init())
        bound.call(ones((5, 4)), args={**activations, grad.args.accum.word_embedding: tied})
        value, count = evaluate(tied + 0.0, state.mean_accum_counter + 0.0)
    np.testing.assert_allclose(value, np.repeat(np.arange(15).reshape(5, 3).sum(0)[:, None], 4, 1))
    assert count == 1


def test_names_are_sanitised(ir, x):
    with popxl.name_scope("a.b"):
        graph = addons.GraphWithNamedArgs(ir.create_graph(lambda: popxl.graph_input((), popxl.float32, "x.1") * 2.0))
    facts, _ = autodiff_with_accumulation(graph, graph.graph.inputs)
    assert facts.accum.keys() == ["a_b_x_1"]


def test_replica_groupings():
    ir = popxl.Ir(replication=4)
    with ir.main_graph:
        pairs = ir.replica_grouping(group_size=2)
        x = popxl.variable(np.ones((5, 3)), popxl.float32)
        facts, graph = Embed().create_graph(x, popxl.TensorSpec((3, 4), popxl.float32))
        groups = facts.replica_groupings
        groups.insert("word_embedding", pairs)
        groups.insert("unknown", pairs)
        tensors = [*graph.args.tensors, graph.graph.inputs[1]]
        grouped, _ = autodiff_with_accumulation(graph, tensors, replica_groupings=groups)
        assert grouped.accum.word_embedding.replica_grouping == pairs
        assert grouped.accum.scale.replica_grouping == ir.replica_grouping()
        assert grouped.mean_accum_counter.replica_grouping == ir.replica_grouping()
        default, _ = autodiff_with_accumulation(graph, tensors, replica_groupings=None)
        assert default.accum.word_embedding.replica_grouping == ir.replica_grouping()
        assert grouped.init().accum.word_embedding.shape == (3, 4)


def test_float16_accumulators(ir):
    x = popxl.variable(np.ones((2, 3)), popxl.float16)
    _, graph = Linear().create_graph(x)
    facts, _ = autodiff_with_accumulation(graph, graph.args.tensors)
    assert facts.accum.w.dtype == popxl.float16 and facts.mean_accum_counter.dtype == popxl.float32


def test_gradients_of_called_graphs_win(ir, x, evaluate):
    """A gradient given for a called graph is used: at the call, or by the wrapper."""
    inner = ir.create_graph(lambda x: x * 2.0, x)
    hand = ir.create_graph(lambda g: g * 7.0, x)
    by_hand = addons.create_grad_graph_info(
        ir, inner, hand, {hand.inputs[0]: inner.outputs[0]}, {hand.outputs[0]: inner.inputs[0]}, []
    )
    graph = addons.GraphWithNamedArgs(ir.create_graph(lambda x: ops.call(inner, x), x))
    _, given = autodiff_with_accumulation(
        graph, [], grads_required=graph.graph.inputs, called_graphs_grad_info={inner: by_hand}
    )
    graph.called_graphs_grad_info = {addons.GraphWithNamedArgs(inner): by_hand}
    _, known = autodiff_with_accumulation(graph, graph.graph.inputs)
    assert hand in given.graph.called_graphs and hand in known.graph.called_graphs


def test_the_counter_restarts_in_the_program(ir, x, evaluate):
    facts, graph = Linear().create_graph(x)
    grad_facts, grad = autodiff_with_accumulation(graph, graph.args.tensors)
    variables, state = facts.init(), grad_facts.init()
    with popxl.in_sequence():
        for factor in (3.0, 5.0):
            info = graph.bind(variables).call_with_info(x)
            grad.bind(state).call(ones((5, 4)) * factor, args=grad.grad_graph_info.inputs_dict(info))
        mean = state.accum.w + 0.0
        ops.var_updates.accumulator_scale_(state.mean_accum_counter, 0.0)
        grad.bind(state).call(ones((5, 4)), args=grad.grad_graph_info.inputs_dict(info))
        mean, restarted = evaluate(mean, state.accum.w + 0.0)
    np.testing.assert_allclose(mean, 4 * restarted)


def test_in_a_loop(ir, evaluate):
    """Gradient accumulation as applications write it: a loop over micro-batches, state by reference."""
    x = popxl.variable(np.arange(15).reshape(5, 3), popxl.float32, name="x")
    facts, graph = Linear().create_graph(x)
    grad_facts, grad = autodiff_with_accumulation(graph, graph.args.tensors)
    variables, state = facts.init(), grad_facts.init()

    def micro_batch(scale: popxl.Tensor, x: popxl.Tensor, w: popxl.Tensor, a: popxl.TensorByRef, c: popxl.TensorByRef):
        info = graph.call_with_info(x * scale, w)
        acts = grad.grad_graph_info.inputs_dict(info)
        grad.bind(NamedTensors.from_dict({"accum.w": a, "mean_accum_counter": c})).call(ones((5, 4)), args=acts)
        return scale + 1.0

    turn = ir.create_graph(micro_batch, popxl.TensorSpec((), popxl.float32), x, variables.w, *state.tensors)
    with popxl.in_sequence():
        ops.repeat(turn, 3, popxl.constant(1.0), x, variables.w, *state.tensors)
        mean, count = evaluate(state.accum.w + 0.0, state.mean_accum_counter + 0.0)
    expected = 2.0 * np.arange(15).reshape(5, 3).T @ np.ones((5, 4))  # the mean of the factors 1, 2, 3 is 2
    np.testing.assert_allclose(mean, expected, rtol=1e-5)
    assert count == 3


def test_errors_leave_the_graph_as_it_was(ir, x):
    _, graph = Linear().create_graph(x)
    outputs, graphs = graph.graph.outputs, len(ir.graphs)
    w = graph.args.w
    with pytest.raises(ValueError, match="has some tensors twice"):
        autodiff_with_accumulation(graph, [w, w])
    with pytest.raises(PopxlError, match="no gradients are required"):
        autodiff_with_accumulation(graph, [])
    with pytest.raises(PopxlError, match="is not a tensor of"):
        autodiff_with_accumulation(graph, [x])
    clash = ir.create_graph(lambda **inputs: inputs["a.b"] * inputs["a_b"], **{"a.b": x, "a_b": x})
    with pytest.raises(ValueError, match=r"accumulators of the same name: \['a_b'\]"):
        autodiff_with_accumulation(addons.GraphWithNamedArgs(clash), clash.inputs)
    assert graph.graph.outputs == outputs and len(ir.graphs) == graphs + 1


def test_pieces_of_a_tensor():
    """Each replica has the mean of the gradients of its piece."""
    ir = popxl.Ir(replication=2)

    def weighted(x: popxl.Tensor, w: popxl.Tensor) -> popxl.Tensor:
        return ops.sum(gather_replica_sharded_tensor(w) * x)

    with ir.main_graph, popxl.in_sequence():
        x = popxl.variable(np.arange(6).reshape(2, 3), popxl.float32, "x")
        _, piece = popxl.replica_sharded_variable(np.ones((2, 3)), popxl.float32, "w")
        graph = addons.GraphWithNamedArgs(ir.create_graph(weighted, x, piece))
        facts, grad = addons.autodiff_with_accumulation(graph, graph.graph.inputs[1:])
        assert (facts.accum.w.shape, facts.accum.w.meta_shape) == ((3,), None)
        accumulators = facts.init()
        for dy in (1.0, 3.0):
            info = graph.call_with_info(x, piece)
            grad.bind(accumulators).call(popxl.constant(dy), args=grad.grad_graph_info.inputs_dict(info))
        out = addons.host_store(accumulators.accum.w)
    with popxl.Session(ir, "ipu_model") as session:
        np.testing.assert_allclose(session.run()[out], 2 * np.arange(6).reshape(2, 3))
    np.testing.assert_allclose(session.get_tensor_data(accumulators.accum.w), 2 * np.arange(6).reshape(2, 3))
