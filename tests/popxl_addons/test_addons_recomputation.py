"""Recomputation: the same gradients from forward inputs alone, inputs in the stated order, names that stay."""

from functools import partial

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl.transforms.autodiff import ExpectedConnectionType
from popxl_addons import NamedTensors
from popxl_addons.ops.layer_norm_distributed import layer_norm_distributed
from popxl_addons.transforms.autodiff import autodiff_with_accumulation
from popxl_addons.transforms.recomputation import add_recompute_inputs, recompute_graph
from popxl_addons.utils import suffix_graph_name

Fwd, FwdGrad = ExpectedConnectionType.Fwd, ExpectedConnectionType.FwdGrad


class Linear(addons.Module):
    def build(self, x):
        w = self.add_variable_input("w", partial(np.random.normal, size=(x.shape[-1], 4)), x.dtype)
        b = self.add_variable_input("b", partial(np.random.normal, size=4), x.dtype)
        return ops.gelu(x @ w + b)


class Shifted(addons.Module):
    """The first op does not need its input for its gradient, and nothing else reads that input."""

    def __init__(self):
        super().__init__()
        self.linear = Linear()

    def build(self, x):
        return self.linear(x + 1.0)


class Wide(addons.Module):
    """Its activations are many times as large as its input and output."""

    def build(self, x):
        w = self.add_variable_input("w", lambda: np.eye(16, 512), x.dtype)
        return ops.gelu(ops.tanh(x @ w)) @ w.T


@pytest.fixture
def x(ir):
    return popxl.variable(np.arange(15).reshape(5, 3) / 10, popxl.float32, name="x")


def ones(shape):
    return popxl.constant(np.ones(shape), popxl.float32)


@pytest.mark.parametrize("module", [Linear, Shifted])
def test_equal_gradients(ir, x, evaluate, module):
    facts, graph = module().create_graph(x)
    grad = graph.autodiff()
    variables = facts.init()
    info = graph.bind(variables).call_with_info(x)
    again = recompute_graph(grad)
    activations = again.grad_graph_info.inputs_dict(info)
    assert set(activations.values()) <= {x, *variables.tensors}
    with_info = again.call_with_info(ones((5, 4)), args=activations)
    results = again.grad_graph_info.fwd_parent_ins_to_grad_parent_outs(info, with_info)
    assert list(results) == [x, *(variables[name] for name in graph.args.keys_flat())]
    plain = grad.call(ones((5, 4)), args=grad.grad_graph_info.inputs_dict(info))
    values = evaluate(*results.values(), *plain)
    for recomputed, expected in zip(values[:3], values[3:], strict=True):
        np.testing.assert_array_equal(recomputed, expected)


def test_what_it_is(ir, x):
    _, graph = Linear().create_graph(x)
    grad = graph.autodiff(grads_required=graph.graph.inputs[1:])
    again = recompute_graph(grad)
    assert again.graph.name.startswith(suffix_graph_name(f"{graph.graph.name}_bwd", "recomp") + "_subgraph(")
    assert [op.op_type for op in again.graph.ops] == ["Call", "Call"]
    assert again.graph.called_graphs == (graph.graph, grad.graph)
    info = again.grad_graph_info
    assert info.graph is again.graph and info.forward_graph is graph.graph
    assert info.outputs == grad.grad_graph_info.outputs == graph.graph.inputs[1:]
    assert [t.spec for t in again.graph.outputs] == [t.spec for t in grad.graph.outputs]
    assert grad.grad_graph_info.graph is grad.graph  # the original stays as it was


def test_graphs_in_the_ir(ir, x):
    _, graph = Linear().create_graph(x)
    _, grad = autodiff_with_accumulation(graph, graph.args.tensors)
    recompute_graph(grad)
    assert len(ir.graphs) == 4


def test_order_of_inputs(ir, x):
    """Gradients and forward inputs as they were expected; other forward inputs by name; accumulators by name."""

    def build(z, y, x):
        return ops.exp(z * y) + x, ops.sin(z)

    graph = addons.GraphWithNamedArgs(ir.create_graph(build, *[x.spec] * 3))
    z, y, _ = graph.graph.inputs
    _, grad = autodiff_with_accumulation(graph, [z, y], grads_provided=reversed(graph.graph.outputs))
    kept = [t for t in grad.grad_graph_info.inputs if t in graph.graph.inputs]
    assert set(kept) == {z, y}
    again = recompute_graph(grad)
    names = [t.name for t in again.graph.inputs]
    assert names == [
        "Gradient___sin_out",
        "Gradient___add_out",
        *(t.name for t in kept),
        "x",
        "accum.y",
        "accum.z",
        "mean_accum_counter",
    ]
    expected = [(e.fwd_tensor, e.connection_type) for e in again.grad_graph_info.expected_inputs]
    x = graph.graph.inputs[2]
    provided = graph.graph.outputs[1::-1]
    assert expected == [*((t, FwdGrad) for t in provided), *((t, Fwd) for t in kept), (x, Fwd)]
    assert [t.by_ref for t in again.graph.inputs] == [False] * 5 + [True] * 3


def test_accumulators(ir, x, evaluate):
    """Bound by the same names, and written through both calls. The forward call keeps nothing but its inputs."""
    facts, graph = Linear().create_graph(x)
    grad_facts, grad = autodiff_with_accumulation(graph, graph.args.tensors, grads_required=graph.graph.inputs[:1])
    again = recompute_graph(grad)
    assert again.args.keys_flat() == grad.args.keys_flat() == grad_facts.keys_flat()
    assert set(again.args.to_dict().values()) == set(again.graph.inputs[-3:])
    variables, plain, recomputed = facts.init(), grad_facts.init("plain"), grad_facts.init("recomputed")
    with popxl.in_sequence():
        info = graph.bind(variables).call_with_info(x)
        outputs = []
        for each, state in ((grad, plain), (again, recomputed)):
            for factor in (1.0, 2.0):
                outputs += each.bind(state).call(ones((5, 4)) * factor, args=each.grad_graph_info.inputs_dict(info))
        values = evaluate(*(t + 0.0 for t in (*plain.tensors, *recomputed.tensors, *outputs)))
    for expected, value in zip(values[:3], values[3:6], strict=True):
        np.testing.assert_array_equal(value, expected)
    assert values[2] == 2
    np.testing.assert_array_equal(values[6:8], values[8:10])


def test_an_outlined_graph_recomputed_inside_of_its_caller(ir, x, evaluate):
    """A caller is differentiated with the recomputing gradient of what it calls: only inputs cross."""
    facts, inner = Linear().create_graph(x)

    def caller(x, w, b):
        return inner.bind(NamedTensors(w=w, b=b)).call(x * x)[0] * 3.0

    inputs = x, *facts.init().filter_keys(["w", "b"]).values_flat()
    outers = [addons.GraphWithNamedArgs(ir.create_graph(caller, *inputs)) for _ in range(2)]
    again = recompute_graph(inner.autodiff())
    values = []
    for outer, known in zip(outers, ({inner.graph: again.grad_graph_info}, {}), strict=True):
        grad = outer.autodiff(called_graphs_grad_info=known, grads_provided=outer.graph.outputs[:1])
        assert (again.graph in grad.graph.called_graphs) == bool(known)
        info = outer.call_with_info(*inputs)
        values.append(evaluate(*grad.call(ones((5, 4)), args=grad.grad_graph_info.inputs_dict(info))))
    for recomputed, expected in zip(*values, strict=True):
        np.testing.assert_array_equal(recomputed, expected)


def test_dropout_is_recomputed_with_the_same_seed(ir, x, evaluate):
    seed = popxl.variable(popxl.create_seeds(3), name="seed")
    graph = addons.GraphWithNamedArgs(ir.create_graph(lambda x, seed: ops.exp(ops.dropout(x, seed, p=0.5)), x, seed))
    grad = graph.autodiff(grads_required=graph.graph.inputs[:1])
    again = recompute_graph(grad)
    info = graph.call_with_info(x, seed)
    (plain,) = grad.call(ones((5, 3)), args=grad.grad_graph_info.inputs_dict(info))
    (recomputed,) = again.call(ones((5, 3)), args=again.grad_graph_info.inputs_dict(info))
    plain, recomputed = evaluate(plain, recomputed)
    np.testing.assert_array_equal(plain, recomputed)
    assert 0 < np.count_nonzero(plain == 0) < plain.size


def test_it_saves_memory():
    """Of eight layers the activations are kept, or those of one at a time."""
    peaks = []
    for transform in (lambda grad: grad, recompute_graph):
        ir = popxl.Ir()
        with ir.main_graph, popxl.in_sequence():
            x = popxl.variable(np.ones((128, 16)), popxl.float32)
            facts, graph = Wide().create_graph(x)
            grad = transform(graph.autodiff())
            infos, y = [], x
            for i in range(8):
                infos.append(graph.bind(facts.init(f"layer.{i}")).call_with_info(y))
                y = infos[-1].outputs[0]
            for info in reversed(infos):
                y, *_ = grad.call(y, args=grad.grad_graph_info.inputs_dict(info))
            addons.host_store(y)
        with popxl.Session(ir, "cpu") as session:
            session.run()
            peaks.append(session.program.temporaries())
    assert peaks[1] < 0.5 * peaks[0]


def test_inputs_alone(ir, x):
    _, graph = Linear().create_graph(x)
    info = graph.autodiff().grad_graph_info
    with ir.create_empty_graph() as own:
        inputs = add_recompute_inputs(info)
    assert tuple(inputs) == own.inputs
    assert list(inputs.values())[0] == (graph.graph.outputs[0], FwdGrad)
    assert {t for t, kind in inputs.values() if kind is Fwd} == set(graph.graph.inputs)
    assert [t.spec for t in inputs] == [t.spec for t, _ in inputs.values()]


def test_errors(ir, x):
    _, graph = Linear().create_graph(x)
    with pytest.raises(AttributeError, match="Not a gradient graph"):
        recompute_graph(graph)
    stream = popxl.h2d_stream((5, 3), popxl.float32, name="data")
    loading = addons.GraphWithNamedArgs(ir.create_graph(lambda x: ops.exp(x * ops.host_load(stream)), x))
    grad = loading.autodiff()
    graphs = len(ir.graphs)
    with pytest.raises(ValueError, match="uses the stream `data`; run again, it would move on"):
        recompute_graph(grad)
    assert len(ir.graphs) == graphs


NORMS = {
    "layer_norm": (ops.layer_norm, "GroupNormalization", ["*mean"]),
    "group_norm": (partial(ops.group_norm, num_groups=3), "GroupNormalization", ["*mean"]),
    "layer_norm_distributed": (layer_norm_distributed, "LayerNormDistributed", ["*mean", "*inv_std_dev"]),
}


@pytest.mark.parametrize("dtype", [popxl.float32, popxl.float16], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("name", NORMS)
def test_norms_are_recomputed_from_kept_statistics(ir, evaluate, name, dtype):
    """Without another normalisation, and with the same gradients."""
    norm, kind, statistics = NORMS[name]

    class Normalised(addons.Module):
        def build(self, x):
            w, b = (self.add_variable_input(n, partial(np.random.normal, 1, 0.1, size=6), x.dtype) for n in "wb")
            return ops.gelu(ops.tanh(norm(x, w, b)))

    np.random.seed(0)
    x = popxl.variable(np.random.normal(3, 2, size=(5, 6)), dtype, name="x")
    g = popxl.constant(np.random.normal(size=(5, 6)), dtype)
    facts, graph = Normalised().create_graph(x)
    grad = graph.autodiff()
    info = graph.bind(facts.init()).call_with_info(x)
    plain = grad.call(g, args=grad.grad_graph_info.inputs_dict(info))
    again = recompute_graph(grad, keep=statistics)
    assert kind not in [op.op_type for op in again.graph.ops]
    recomputed = again.call(g, args=again.grad_graph_info.inputs_dict(info))
    values = evaluate(*recomputed, *plain)
    for found, expected in zip(values[:3], values[3:], strict=True):
        if dtype is popxl.float32:
            np.testing.assert_array_equal(found, expected)
        else:
            np.testing.assert_allclose(found, expected, rtol=2e-3, atol=2e-3)
