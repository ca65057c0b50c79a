"""What the published tutorials rely on, gathered in one small program for each, with numbers worked out in NumPy.

The tutorials themselves are in `tests/tutorials`; ops, transforms and collectives have tests of their own.
"""

import types
from functools import partial

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl.transforms import GradGraphInfo
from popxl_addons.dot_tree import DotTree
from popxl_addons.graph import BoundGraph, GraphWithNamedArgs
from popxl_addons.graph_cache import GraphCache
from popxl_addons.named_replica_grouping import NamedReplicaGrouping
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.variable_factory import NamedVariableFactories, VariableFactory
from tests.tolerances import assert_near


class Linear(addons.Module):
    def __init__(self, out_features: int, bias: bool = True, cache: GraphCache | None = None, replica_grouping=None):
        super().__init__(cache=cache)
        self.out_features = out_features
        self.bias = bias
        self.replica_grouping = replica_grouping

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        shape, group = (x.shape[-1], self.out_features), self.replica_grouping
        w = self.add_variable_input("weight", partial(np.random.normal, 0, 0.5, shape), x.dtype, replica_grouping=group)
        y = x @ w
        if self.bias:
            b = self.add_variable_input("bias", partial(np.zeros, y.shape[-1]), x.dtype, replica_grouping=group)
            y = y + b
        return y


class Net(addons.Module):
    """`fc1` and `fc4` are inlined, `fc2` and `fc3` are two calls of one graph."""

    def __init__(self, cache: GraphCache | None = None):
        super().__init__(cache=cache)
        self.fc1 = Linear(5, cache=cache)
        self.fc4 = Linear(3, cache=cache)

    def build(self, x: popxl.Tensor):
        x = ops.gelu(self.fc1(x))
        facts, subgraph = Linear(5).create_graph(x)
        for name in ("fc2", "fc3"):
            (x,) = subgraph.bind(self.add_variable_inputs(name, facts)).call(x)
            x = ops.gelu(x)
        return self.fc4(x)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def test_basic_concepts():
    torch = pytest.importorskip("torch")

    def forward(x, labels):
        facts, graph = Net().create_graph(popxl.TensorSpec((4, 6), popxl.float32))
        variables = facts.init()
        info = graph.bind(variables).call_with_info(x)
        loss, dx = addons.ops.cross_entropy_with_grad(info.outputs[0], labels)
        return facts, graph, variables, info, loss, dx

    train_ir = popxl.Ir()
    with train_ir.main_graph, popxl.in_sequence():
        x_in, labels_in = popxl.h2d_stream((4, 6), popxl.float32), popxl.h2d_stream((4,), popxl.int32)
        x, labels = ops.host_load(x_in, "x"), ops.host_load(labels_in, "labels")
        facts, graph, train_variables, fwd_info, loss, dx = forward(x, labels)
        assert str(facts.to_dict().keys()) == (
            "dict_keys(['fc1.weight', 'fc1.bias', 'fc4.weight', 'fc4.bias', 'fc2.weight', 'fc2.bias', "
            "'fc3.weight', 'fc3.bias'])"
        )
        assert "VariableFactory object at 0x" in str(facts) and "Variable[fc1.bias" in str(train_variables)
        bwd = addons.autodiff(graph)
        activations = bwd.grad_graph_info.inputs_dict(fwd_info)
        bwd_info = bwd.call_with_info(dx, args=activations)
        gradients = bwd.grad_graph_info.fwd_parent_ins_to_grad_parent_outs(fwd_info, bwd_info)
        for t in train_variables.tensors:
            ops.scaled_add_(t, gradients[t], b=-0.2)
        loss_out = addons.host_store(loss)

    test_ir = popxl.Ir()
    with test_ir.main_graph:
        test_in = popxl.h2d_stream((4, 6), popxl.float32)
        _, test_graph = Net().create_graph(test_x := ops.host_load(test_in))
        test_variables = facts.init()
        (y,) = test_graph.bind(test_variables).call(test_x)
        y_out = addons.host_store(y)

    images = torch.randn((4, 6), generator=torch.Generator().manual_seed(0))
    numbers = torch.tensor([0, 2, 1, 2])
    with popxl.Session(train_ir, "ipu_hw") as session:
        losses = [session.run({x_in: images, labels_in: numbers})[loss_out] for _ in range(100)]
    assert f"{losses[0]:0.4f}" == f"{float(losses[0]):0.4f}"
    assert losses[-1] < 0.7 * losses[0]

    to_test = train_variables.to_mapping(test_variables)
    trained = session.get_tensors_data(train_variables.tensors)
    test_session = popxl.Session(test_ir, "ipu_hw")
    test_session.write_variables_data({to_test[variable]: data for variable, data in trained.items()})
    with test_session:
        outputs = test_session.run({test_in: images})
    expected = softmax(outputs[y_out])[np.arange(4), numbers.numpy()]
    np.testing.assert_array_less(-np.log(expected).mean(), losses[-1])


def test_trees_of_the_basic_concepts(ir):
    facts, graph = Linear(3).create_graph(popxl.TensorSpec((4, 6), popxl.float32))
    layer1, layer2 = facts.init(), facts.init()
    collection = NamedTensors()
    collection.insert("layer1", layer1)
    collection.insert("layer2", layer2)
    assert collection.layer1 is layer1
    assert [t.name for t in collection.to_dict().values()] == ["bias", "weight", "bias__t0", "weight__t1"]
    again = NamedTensors.from_dict({"layer1": layer1, "layer2": layer2})
    assert again.to_dict() == collection.to_dict()
    updated = NamedTensors()
    updated.update(collection)
    names, tensors = updated.unpack()
    assert NamedTensors.pack(names, tensors).to_dict() == collection.to_dict()
    packed = NamedTensors.pack(layer1.keys(), layer1.tensors)
    assert packed.named_tensors == layer1.named_tensors == {"bias": layer1.bias, "weight": layer1.weight}
    assert str(layer1.named_tensors).startswith("{'bias': Variable[bias popxl.dtypes.float32 (3,)], 'weight': ")
    assert "BoundGraph object at 0x" in str(graph.bind(layer1))


class Adam(addons.Module):
    """The optimiser of the second tutorial: hyper-parameters are numbers or tensors, state has a dtype of its own."""

    @popxl.in_sequence()
    def build(
        self,
        var: popxl.TensorByRef,
        grad: popxl.Tensor,
        *,
        lr: float | popxl.Tensor,
        beta1: float | popxl.Tensor = 0.9,
        beta2: float | popxl.Tensor = 0.999,
        eps: float | popxl.Tensor = 1e-5,
        weight_decay: float | popxl.Tensor = 0.0,
        first_order_dtype: popxl.dtype = popxl.float16,
        bias_correction: bool = True,
    ):
        zeros = partial(np.zeros, var.shape)
        first_order = self.add_variable_input("first_order", zeros, first_order_dtype, by_ref=True)
        ops.var_updates.accumulate_moving_average_(first_order, grad, f=beta1)
        second_order = self.add_variable_input("second_order", zeros, popxl.float32, by_ref=True)
        ops.var_updates.accumulate_moving_average_square_(second_order, grad, f=beta2)
        step = None
        if bias_correction:
            step = self.add_variable_input("step", partial(np.zeros, ()), popxl.float32, by_ref=True)
        updater = ops.var_updates.adam_updater(
            first_order,
            second_order,
            weight=var if weight_decay != 0.0 else None,
            weight_decay=weight_decay,
            time_step=step,
            beta1=beta1,
            beta2=beta2,
            epsilon=eps,
        )
        ops.scaled_add_(var, updater, b=-lr)


ADAM = """\
Graph : Adam_subgraph(0)
  (%1, %2, first_order=%3, second_order=%4, step=%5) -> () {
    Accumulate.100 (%3 [(2, 2) float16], %2 [(2, 2) float32]) -> (%6 [(2, 2) float16])
    Accumulate.101 (%4 [(2, 2) float32], %2 [(2, 2) float32]) -> (%7 [(2, 2) float32])
    AdamUpdater.102 (%3 [(2, 2) float16], %4 [(2, 2) float32], %5 [() float32]) -> (%8 [(2, 2) float16])
    ScaledAddLhsInplace.103 (%1 [(2, 2) float32], %8 [(2, 2) float16]) -> (%9 [(2, 2) float32])
  }"""

ADAM_WITH_LR = """\
Graph : Adam_subgraph(1)
  (%1, %2, %3, first_order=%4, second_order=%5, step=%6) -> () {
    Accumulate.104 (%4 [(2, 2) float16], %2 [(2, 2) float32]) -> (%7 [(2, 2) float16])
    Accumulate.105 (%5 [(2, 2) float32], %2 [(2, 2) float32]) -> (%8 [(2, 2) float32])
    AdamUpdater.106 (%4 [(2, 2) float16], %5 [(2, 2) float32], %6 [() float32]) -> (%9 [(2, 2) float16])
    Neg.107 (%3 [() float32]) -> (%10 [() float32])
    ScaledAddLhsInplace.108 (%1 [(2, 2) float32], %9 [(2, 2) float16], %10 [() float32]) -> (%11 [(2, 2) float32])
  }"""


def test_custom_optimiser(ir):
    var = popxl.variable(np.ones((2, 2)), popxl.float32, "var")
    other = popxl.variable(np.full((2, 2), 2.0), popxl.float32, "other")
    grad = popxl.variable(np.full((2, 2), 0.1), popxl.float32, "grad")
    lr = popxl.variable(1e-3, popxl.float32, "lr")
    adam = Adam(cache=True)
    with popxl.in_sequence():
        facts, graph = adam.create_graph(var, var.spec, lr=1e-3)
        given_facts, given = adam.create_graph(var, var.spec, lr=popxl.TensorSpec((), popxl.float32))
        assert (graph.print_schedule(), given.print_schedule()) == (ADAM, ADAM_WITH_LR)
        state, given_state = facts.init(), given_facts.init()
        graph.bind(state).call(var, grad)
        given.bind(given_state).call(other, grad, lr)

        _, reused = adam.create_graph(other, other.spec, lr=1e-3)
    assert reused.graph is graph.graph and len(ir.graphs) == 3

    with popxl.Session(ir, "ipu_hw") as session:
        before = session.get_tensors_data(state.tensors)
        assert all(np.all(data == 0) for data in before.values())
        session.run()
    after = session.get_tensors_data([*state.tensors, *given_state.tensors, var, other])
    for s in (state, given_state):
        np.testing.assert_array_equal(after[s.first_order], np.full((2, 2), 0.009995, np.float16))
        np.testing.assert_allclose(after[s.second_order], 9.9998715e-06, rtol=2e-5)  # published: 1 - 0.999 in float32
        assert after[s.step] == 1.0
    # Corrected for bias, the first step is lr * g / (|g| + eps), whatever the betas.
    step = 1e-3 * 0.1 / (0.1 + 1e-5)
    np.testing.assert_allclose(after[var], 1 - step, atol=2e-6)
    np.testing.assert_allclose(after[other], 2 - step, atol=2e-6)


def test_data_parallelism():
    n, x = 4, np.random.normal(size=(4, 2, 6)).astype(np.float32)
    ir = popxl.Ir(replication=n)
    with ir.main_graph, popxl.in_sequence():
        stream = popxl.h2d_stream((2, 6), popxl.float32)
        facts, graph = Linear(3).create_graph(popxl.TensorSpec((2, 6), popxl.float32))
        variables = facts.init()
        info = graph.bind(variables).call_with_info(ops.host_load(stream))
        bwd = addons.autodiff(graph, grads_required=graph.args.tensors)
        dy = popxl.constant(np.ones((2, 3)), popxl.float32)
        gradients = bwd.call(dy, args=bwd.grad_graph_info.inputs_dict(info))
        grad_facts = NamedVariableFactories(accum=facts)
        grad_facts.insert("mean_accum_counter", VariableFactory(lambda: np.zeros(()), popxl.float32))
        accumulators = grad_facts.init()
        *accums, counter = accumulators.tensors
        assert [t.name for t in accums] == [f"accum.{t.name}" for t in variables.tensors]
        assert counter is accumulators.mean_accum_counter
        for v, accum, g in zip(variables.tensors, accums, gradients, strict=True):
            ops.var_updates.accumulator_zero_(accum)
            ops.var_updates.accumulate_(accum, g)
            ops.collectives.replicated_all_reduce_(accum, op="mean")
            ops.scaled_add_(v, accum, b=-1.0)
        ops.var_updates.accumulator_scale_(counter, 0.0)
    with popxl.Session(ir, "ipu_hw") as session:
        weight = session.get_tensor_data(variables.weight).copy()
        assert session._full_input_shape(stream.shape) == (n, 2, 6)
        (expected_stream,) = session.expected_inputs()
        session.run({expected_stream: x})
    np.testing.assert_allclose(session.get_tensor_data(variables.bias), np.full(3, -2.0), rtol=1e-6)
    dw = np.mean([xi.T @ np.ones((2, 3)) for xi in x], axis=0)
    assert_near(session.get_tensor_data(variables.weight), weight - dw, 1e-5)


class Layers:
    """As in the fourth tutorial: graphs of two layers on two IPUs, and what belongs to them."""

    def __init__(self, modules: list[addons.module], optimiser: addons.Module, x: popxl.TensorSpec):
        self.fwd: list[GraphWithNamedArgs] = []
        self.infos: list[GradGraphInfo] = []
        self.bound: list[BoundGraph] = []
        self.facts = NamedVariableFactories()
        self.vars = NamedTensors()
        for ipu, module in enumerate(modules):
            with popxl.ipu(ipu):
                facts, graph = module.create_graph(x)
                grad = addons.autodiff(graph, grads_required=graph.args.tensors)
                layer_facts = NamedVariableFactories()
                layer_facts.insert("fwd", facts)
                fwd = layer_facts.fwd.init(f"fc{ipu + 1}")
                layer_vars = NamedTensors()
                layer_vars.insert("fwd", fwd)
                layer_vars.insert("bwd.accum", fwd.copy())
                optims = {name: optimiser.create_graph(v, v.spec, lr=0.5)[1] for name, v in fwd.to_dict().items()}
            self.optimisers = getattr(self, "optimisers", []) + [optims]
            self.fwd.append(graph)
            self.infos.append(grad.grad_graph_info)
            self.bound.append(graph.bind(fwd))
            self.facts.insert(f"fc{ipu + 1}", layer_facts)
            self.vars.insert(f"fc{ipu + 1}", layer_vars)
            (x,) = (t.spec for t in graph.graph.outputs[:1])

    def clear(self) -> None:
        self.facts._clear()
        self.vars._clear()


class Descent(addons.Module):
    def build(self, v: popxl.TensorByRef, g: popxl.Tensor, lr: float):
        ops.scaled_add_(v, g, b=-lr)


def test_pipelining_collections(ir):
    layers = Layers([Linear(6), Linear(6)], Descent(cache=True), popxl.TensorSpec((2, 6), popxl.float32))
    assert isinstance(addons.module, types.ModuleType)
    assert layers.vars.keys_flat()[:4] == [
        "fc1.fwd.bias",
        "fc1.fwd.weight",
        "fc1.bwd.accum.bias",
        "fc1.bwd.accum.weight",
    ]
    for layer in layers.vars.values():
        assert list(layer.bwd.accum.to_dict()) == list(layer.fwd.named_tensors) == ["bias", "weight"]
    assert [v.name for v in layers.vars.fc2.fwd.tensors] == ["fc2.bias", "fc2.weight"]
    first, second = ({name: g.graph for name, g in optims.items()} for optims in layers.optimisers)
    assert first.keys() == second.keys() and not {*first.values()} & {*second.values()}  # one graph for each IPU

    x = popxl.variable(np.random.normal(size=(2, 6)), popxl.float32)
    y = x
    with popxl.in_sequence(True):
        for ipu, bound in enumerate(layers.bound):
            with popxl.ipu(ipu):
                (y, *_) = bound.call(y.copy_to_ipu(ipu) if ipu else y)
    out = addons.host_store(y)
    with popxl.Session(ir, "ipu_model") as session:
        result = session.run()[out]
        xs, w1, w2 = session.get_tensors_data([x, *(layers.vars[name].fwd.weight for name in ("fc1", "fc2"))]).values()
    assert_near(result, xs @ w1 @ w2, 1e-4)

    layers.clear()
    assert layers.facts.keys() == ["fc1", "fc2"] and layers.facts.keys_flat() == []


class ShardedAdam(addons.Module):
    """As in the fifth tutorial: state is sharded where the variable is."""

    @popxl.in_sequence()
    def build(
        self,
        var: popxl.TensorByRef,
        grad: popxl.Tensor,
        *,
        lr: float | popxl.Tensor,
        replica_grouping: popxl.ReplicaGrouping | None = None,
    ):
        first_order = self.add_state("first_order", var, by_ref=True, replica_grouping=replica_grouping)
        first_order += grad
        ops.scaled_add_(var, first_order, b=-lr)

    def add_state(self, name, var, **kwargs):
        if var.meta_shape:
            shard_over = np.prod(var.meta_shape) // np.prod(var.shape)
            data = partial(np.zeros, var.meta_shape)
            return self.add_replica_sharded_variable_input(name, data, popxl.float32, shard_over=shard_over, **kwargs)
        return self.add_variable_input(name, partial(np.zeros, var.shape), popxl.float32, **kwargs)


def test_remote_variables_and_sharding():
    ir = popxl.Ir(replication=4)
    with ir.main_graph, popxl.in_sequence():
        pairs = ir.replica_grouping(stride=1, group_size=2)
        facts, graph = Linear(4, replica_grouping=pairs).create_graph(popxl.TensorSpec((2, 6), popxl.float32))
        threshold = 8
        groups = NamedReplicaGrouping.from_dict({name: f.replica_grouping for name, f in facts.to_dict().items()})
        assert groups.keys() == ["weight", "bias"] and groups.weight == facts.replica_groupings.weight == pairs
        shard_over = {
            name: f.replica_grouping.group_size if np.prod(f.shape) >= threshold else 1
            for name, f in facts.to_dict().items()
        }
        assert shard_over == {"weight": 2, "bias": 1}
        buffers = DotTree.from_dict(
            {
                "weight": popxl.replica_sharded_buffer((2, 6, 4), popxl.float32, pairs, 2),
                "bias": popxl.remote_buffer((4,), popxl.float32),
            }
        )
        variables = facts.init_remote(buffers, 0, "fc")
        assert [v.name for v in variables.tensors] == ["fc.bias", "fc.weight"]

        names = sorted(buffers.to_dict())
        loaded = NamedTensors.from_dict({name: ops.remote_load(buffers[name], 0, name) for name in names})
        whole = loaded.copy()
        whole.insert("weight", ops.collectives.replicated_all_gather(loaded.weight, group=pairs), overwrite=True)
        x = popxl.constant(np.ones((2, 6)), popxl.float32)
        info = graph.bind(whole).call_with_info(x)
        grad = addons.autodiff(graph, grads_required=graph.args.tensors)
        dy = popxl.constant(np.ones((2, 4)), popxl.float32)
        gradients = grad.call(dy, args=grad.grad_graph_info.inputs_dict(info))
        gradients = NamedTensors.from_dict(dict(zip(names, gradients, strict=True)))
        piece = ops.collectives.replica_sharded_slice(gradients.weight, group=pairs)
        assert piece.name.startswith(gradients.weight.name)
        gradients.insert("weight", piece, overwrite=True)

        optimiser, states = ShardedAdam(cache=True), NamedTensors()
        for name in names:
            spec = loaded[name].spec
            state_facts, step = optimiser.create_graph(
                spec, spec, lr=0.5, replica_grouping=facts[name].replica_grouping
            )
            assert state_facts.first_order.replica_sharded is (name == "weight")
            state = state_facts.init_zero()
            assert state.first_order.shape == loaded[name].shape
            piece = NamedTensors.pack(["first_order"], [like(state.first_order, loaded[name])])
            states.insert(name, piece)
            step.bind(piece).call(loaded[name], gradients[name])
            ops.remote_store(buffers[name], 0, loaded[name])
    with popxl.Session(ir, "ipu_hw") as session:
        before = {v: data.copy() for v, data in session.get_tensors_data(variables.tensors).items()}
        session.run()
    after = session.get_tensors_data(variables.tensors)
    weight, bias = variables.weight, variables.bias
    assert before[weight].shape == (2, 6, 4)  # one value for each of the two groups
    np.testing.assert_allclose(after[weight], before[weight] - 0.5 * 2.0, rtol=1e-6)
    np.testing.assert_allclose(after[bias], np.full((2, 4), -0.5 * 2.0))


def like(zeros, t):
    """Zeros with the meta-shape of `t`, which `init_zero` does not give."""
    return t * 0.0 if t.meta_shape else zeros


class Block(addons.Module):
    """As in the sixth tutorial: a registered child makes its own graph, which is differentiated inside `build`."""

    def __init__(self, replica_grouping):
        super().__init__()
        self.linear = Linear(6, replica_grouping)  # in the place of `bias`, where any grouping counts as true

    def build(self, x: popxl.Tensor, seed: popxl.Tensor = popxl.Tensor):
        facts, graph = self.linear.create_graph(x.spec)
        grad = addons.autodiff(graph, grads_required=(graph.graph.inputs[0], *graph.args.tensors))
        info = graph.bind(self.add_variable_inputs("fwd", facts)).call_with_info(x)
        accumulators = self.add_variable_inputs("bwd", facts)
        dx, *gradients = grad.call(info.parent_output(0), args=grad.grad_graph_info.inputs_dict(info))
        for name, gradient in zip(sorted(accumulators.keys()), gradients, strict=True):
            ops.scaled_add_(accumulators[name], gradient)
        return info.parent_output(0), dx


@pytest.mark.filterwarnings("ignore::popxl.errors.LostUpdateWarning")
def test_phased_execution_collections():
    ir = popxl.Ir()
    ir._pb_ir.getSessionOptions().numIOTiles = 32
    ir.replication_factor = 2
    with ir.main_graph, popxl.in_sequence():
        group = ir.replica_grouping()
        assert bool(group)
        stream = popxl.h2d_stream((2, 6), popxl.float32)
        facts, graph = Block(group).create_graph(stream.spec, stream.spec)
        assert facts.keys_flat() == ["fwd.weight", "fwd.bias", "bwd.weight", "bwd.bias"]
        grad_facts = facts.pop("bwd")
        args = graph.args.copy()
        args.pop("bwd.weight")
        assert "bwd.weight" in graph.args and "bwd.weight" not in args

        optim = {}
        for name, f in facts.fwd.to_dict().items():
            spec = popxl.TensorSpec(f.shape, f.dtype)
            optim[name], _ = ShardedAdam().create_graph(spec, spec, lr=0.1)
        layer = NamedVariableFactories(fwd=facts.fwd, optim=NamedVariableFactories.from_dict(optim))
        names = ["fwd.weight", "fwd.bias", "optim.weight.first_order", "optim.bias.first_order"]
        assert layer.keys_flat() == names
        buffers = layer.map(lambda f: popxl.remote_buffer(f.shape, f.dtype, entries=2))
        variables = NamedTensors.from_dict({i: layer.init_remote(buffers, i, f"layer.{i}") for i in range(2)})
        assert variables[1].optim["bias"].first_order.name == "layer.1.optim.bias.first_order"

        loaded = [NamedTensors.pack(names, [ops.remote_load(buffers[name], i) for name in names]) for i in range(2)]
        x = ops.host_load(stream)
        outputs = []
        for state in loaded:
            accumulators = NamedTensors(bwd=grad_facts.init_zero())
            state.update(accumulators.copy())
            (x, dx) = graph.bind(state).call(x, x)
            outputs.append(addons.host_store(dx))
    with popxl.Session(ir, "ipu_hw") as session:
        values = session.get_tensors_data(variables.tensors)
        x = np.random.normal(size=(2, 2, 6)).astype(np.float32)
        results = session.run({stream: x})
    for i, out in enumerate(outputs):
        w = values[variables[i].fwd.weight]
        x = x @ w
        assert_near(results[out], x @ w.T, 1e-4)
