"""AdamOptimizerStep against AdamW in torch, and against the formula."""

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons.ops.grad_reduce_square_add import grad_reduce_square_add
from popxl_addons.optimizers.adam import AdamOptimizerStep
from popxl_addons.rts import gather_replica_sharded_tensor

F32 = dict(first_order_dtype=popxl.float32)


class Training:
    """A variable, a stream of gradients, and one optimiser step a run."""

    def __init__(self, initial, optimizer=None, replication=1, **arguments):
        self.ir = ir = popxl.Ir(replication=replication)
        with ir.main_graph, popxl.in_sequence():
            self.variable = popxl.variable(initial, name="w")
            self.stream = popxl.h2d_stream(self.variable.shape, self.variable.dtype)
            grad = ops.host_load(self.stream)
            tensors = {k: popxl.constant(v) for k, v in arguments.items() if isinstance(v, np.ndarray)}
            optimizer = AdamOptimizerStep() if optimizer is None else optimizer
            self.facts, self.graph = optimizer.create_graph(self.variable, grad, **arguments | tensors)
            self.state = self.facts.init("state")
            self.outputs = self.graph.bind(self.state).call(self.variable, grad, *tensors.values())

    def run(self, gradients):
        """The variable after each step, and the state after the last."""
        values = []
        with popxl.Session(self.ir, "cpu") as session:
            for gradient in gradients:
                session.run({self.stream: gradient})
                values.append(session.get_tensor_data(self.variable).copy())
        state = session.get_tensors_data(self.state.tensors)
        return np.array(values), {name: state[t] for name, t in self.state.to_dict().items()}


def adamw(w, gradients, lr, beta1=0.9, beta2=0.999, eps=1e-5, weight_decay=1e-2, bias_correction=True):
    """In float64."""
    w, m, v = np.float64(w), 0.0, 0.0
    values = []
    for t, g in enumerate(np.float64(gradients), 1):
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        mh, vh = (m / (1 - beta1**t), v / (1 - beta2**t)) if bias_correction else (m, v)
        w = w - lr * (mh / (np.sqrt(vh) + eps) + weight_decay * w)
        values.append(w)
    return np.array(values)


def normal(*shape):
    return np.random.normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("weight_decay", [0.0, 0.01, 0.3])
def test_against_torch(weight_decay):
    torch = pytest.importorskip("torch")
    initial, gradients = normal(3, 4), normal(10, 3, 4)
    parameter = torch.nn.Parameter(torch.tensor(initial))
    hyper = dict(lr=0.05, eps=1e-6, weight_decay=weight_decay)
    optimizer = torch.optim.AdamW([parameter], betas=(0.8, 0.99), **hyper)
    expected = []
    for gradient in gradients:
        parameter.grad = torch.tensor(gradient)
        optimizer.step()
        expected.append(parameter.detach().numpy().copy())
    values, _ = Training(initial, beta1=0.8, beta2=0.99, **hyper, **F32).run(gradients)
    np.testing.assert_allclose(values, expected, atol=2e-5)
    float16, _ = Training(initial, beta1=0.8, beta2=0.99, **hyper).run(gradients)
    np.testing.assert_allclose(float16, expected, atol=5e-3)


def test_worked_numbers():
    training = Training(np.float32(1), lr=0.1, weight_decay=0.01, **F32)
    values, state = training.run([np.float32(0.5)] * 2)
    np.testing.assert_allclose(values, [0.899002, 0.798105], atol=2e-6)
    np.testing.assert_allclose(state["first_order"], 0.095, rtol=1e-6)
    np.testing.assert_allclose(state["second_order"], 0.00049975, rtol=1e-5)
    assert state["step"] == 2


def test_state_and_inputs():
    training = Training(normal(3, 4), lr=np.float32(0.1), weight_decay=0.0)
    assert training.outputs == ()
    assert training.facts.keys() == ["first_order", "second_order", "step"]
    assert [f.dtype for f in training.facts.values()] == [popxl.float16, popxl.float32, popxl.float32]
    assert [f.shape for f in training.facts.values()] == [(3, 4), (3, 4), ()]
    assert all(f.by_ref for f in training.facts.values())
    assert not any(f.next_data().any() for f in training.facts.values())

    spec, factor = popxl.TensorSpec((3, 4), popxl.float32), popxl.TensorSpec((), popxl.float32)
    with popxl.Ir().main_graph:
        factors = dict(global_norm=factor, lr=factor, beta2=factor, loss_scaling=factor)
        _, graph = AdamOptimizerStep().create_graph(spec, spec, **factors, global_norm_max=1.0)
        names = [t.name for t in graph.graph.inputs]
    state = ["first_order", "second_order", "step"]
    assert names == ["var", "grad", "lr", "beta2", "loss_scaling", "global_norm", *state]


def test_all_factors_as_tensors():
    initial, gradients = normal(3, 4), normal(4, 3, 4)
    hyper = dict(lr=0.05, beta1=0.8, beta2=0.95, eps=1e-3, weight_decay=0.1)
    tensors = {name: np.array(value, np.float32) for name, value in hyper.items()}
    values, _ = Training(initial, **tensors, **F32).run(gradients)
    np.testing.assert_allclose(values, adamw(initial, gradients, **hyper), atol=1e-5)


def test_without_bias_correction():
    initial, gradients = normal(3, 4), normal(4, 3, 4)
    training = Training(initial, lr=0.05, bias_correction=False, **F32)
    assert training.facts.keys() == ["first_order", "second_order"]
    values, _ = training.run(gradients)
    np.testing.assert_allclose(values, adamw(initial, gradients, 0.05, bias_correction=False), atol=1e-5)


def test_without_weight_decay_the_variable_is_not_read():
    with popxl.Ir().main_graph:
        spec = popxl.TensorSpec((3, 4), popxl.float32)
        for weight_decay, dtype in ((0, popxl.float16), (0.1, popxl.float32)):
            _, graph = AdamOptimizerStep().create_graph(spec, spec, lr=0.1, weight_decay=weight_decay)
            (updater,) = [op for op in graph.graph.ops if op.op_type == "AdamUpdater"]
            assert (graph.graph.inputs[0] in updater.inputs) == bool(weight_decay)
            assert updater.outputs[0].dtype is dtype


@pytest.mark.parametrize("scaling", [64, 64.0, np.array(64, np.float32), np.array(64, np.float16)], ids=repr)
def test_loss_scaling(scaling):
    initial, gradients = normal(3, 4), normal(4, 3, 4)
    values, state = Training(initial, lr=0.05, loss_scaling=scaling, **F32).run(64 * gradients)
    np.testing.assert_allclose(values, adamw(initial, gradients, 0.05), atol=1e-5)
    assert state["first_order"].dtype == np.float32


@pytest.mark.thorough(but_each=3)
@pytest.mark.parametrize("limit", [1.0, np.array(1.0, np.float32)], ids=repr)
@pytest.mark.parametrize("norm, scale", [(4.0, 0.25), (0.5, 1.0)])
@pytest.mark.parametrize("scaling", [1, 8])
def test_clipping_by_the_global_norm(norm, scale, limit, scaling):
    initial, gradients = normal(3, 4), normal(4, 3, 4)
    hyper = dict(lr=0.05, eps=0.1)
    clipping = dict(global_norm=np.array(norm, np.float32), global_norm_max=limit, loss_scaling=scaling)
    values, _ = Training(initial, **hyper, **clipping, **F32).run(scaling * gradients)
    np.testing.assert_allclose(values, adamw(initial, scale * gradients, **hyper), atol=1e-5)


def test_float16_gradients_and_variables():
    initial, gradients = normal(3, 4).astype(np.float16), normal(4, 3, 4).astype(np.float16)
    values, _ = Training(initial, lr=0.05).run(gradients)
    assert values.dtype == np.float16
    np.testing.assert_allclose(values, adamw(initial, gradients, 0.05), atol=1e-2)


def test_one_cached_graph_for_several_variables():
    optimizer = AdamOptimizerStep(cache=True)
    initial = {"a": normal(3, 4), "b": normal(3, 4), "c": normal(2)}
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        variables = addons.NamedTensors.from_dict({n: popxl.variable(v, name=n) for n, v in initial.items()})
        lr, graphs = popxl.constant(0.1), set()
        for name, var in variables.named_tensors.items():
            factor = popxl.TensorSpec((), popxl.float32)
            facts, step = optimizer.create_graph(var, var.spec, lr=factor, weight_decay=0.0, **F32)
            step.bind(facts.init(name)).call(var, popxl.constant(np.ones(var.shape, np.float32)), lr)
            graphs.add(step.graph)
    assert len(graphs) == 2
    with popxl.Session(ir, "cpu") as session:
        session.run()
    for name, var in variables.to_dict().items():
        np.testing.assert_allclose(session.get_tensor_data(var), initial[name] - 0.1, atol=1e-5)


def test_one_module_without_cache_many_times():
    optimizer, spec = AdamOptimizerStep(), popxl.TensorSpec((3,), popxl.float32)
    with popxl.Ir().main_graph:
        for _ in range(3):
            facts, _ = optimizer.create_graph(spec, spec, lr=0.1)
            assert facts.keys() == ["first_order", "second_order", "step"]


def test_sharded_state():
    """Each replica updates its piece of a variable; together that is a step on the whole."""
    ir = popxl.Ir(replication=4)
    initial, gradient = normal(4, 6), normal(4, 6)
    group = ir.replica_grouping()
    with ir.main_graph, popxl.in_sequence():
        var, shard = popxl.replica_sharded_variable(initial, popxl.float32, "w")
        grad = ops.collectives.replica_sharded_slice(popxl.constant(gradient))
        facts, step = AdamOptimizerStep().create_graph(shard, shard.spec, group, lr=0.1, **F32)
        assert [f.replica_sharded for f in facts.values()] == [True, True, False]
        assert [f.shape for f in facts.values()] == [(6,), (6,), ()]
        assert [f.meta_shape for f in facts.values()] == [(4, 6), (4, 6), None]
        buffers = {
            name: popxl.replica_sharded_buffer((4, 6), popxl.float32, entries=1)
            for name in ("first_order", "second_order")
        }
        step_var = facts.step.create_tensor()
        state = {name: facts[name].create_remote_tensor(buffer, 0) for name, buffer in buffers.items()}
        loaded = {name: ops.remote_load(buffers[name], 0) for name in buffers}
        args = addons.NamedTensors.from_dict(loaded | {"step": step_var})
        step.bind(args).call(shard, grad)
        for name, t in loaded.items():
            ops.remote_store(buffers[name], 0, t)
    with popxl.Session(ir, "ipu_model") as session:
        session.run()
    np.testing.assert_allclose(session.get_tensor_data(var), adamw(initial, [gradient], 0.1)[0], atol=1e-5)
    np.testing.assert_allclose(session.get_tensor_data(state["first_order"]), 0.1 * gradient, rtol=1e-5)


def test_the_state_of_a_variable_in_pieces_is_in_pieces():
    """Also where the pieces do not come out even; and the session sees whole values."""
    ir = popxl.Ir(replication=2)
    initial, gradient = normal(5), normal(5)
    with ir.main_graph, popxl.in_sequence():
        var, piece = popxl.replica_sharded_variable(initial, popxl.float32, "w")
        _, grad = popxl.replica_sharded_variable(gradient, popxl.float32, "dw")
        facts, step = AdamOptimizerStep().create_graph(piece, grad, lr=0.1, **F32)
        state = facts.init("state")
        assert [(v.shape, None if v.piece is None else v.piece.shape) for v in state.tensors] == [
            ((5,), (3,)),
            ((5,), (3,)),
            ((), None),
        ]
        step.bind(state).call(var, grad)
        whole = addons.host_store(gather_replica_sharded_tensor(state.first_order))
    with popxl.Session(ir, "ipu_model") as session:
        np.testing.assert_allclose(session.run()[whole], [0.1 * gradient] * 2, rtol=1e-5)
    np.testing.assert_allclose(session.get_tensor_data(var), adamw(initial, [gradient], 0.1)[0], atol=1e-5)
    np.testing.assert_allclose(session.get_tensor_data(state.first_order), 0.1 * gradient, rtol=1e-5)
    np.testing.assert_allclose(session.get_tensor_data(state.second_order), 1e-3 * gradient**2, rtol=1e-5)


def test_the_grouping_of_the_state():
    ir = popxl.Ir(replication=4)
    group = ir.replica_grouping(group_size=2)
    spec = popxl.TensorSpec((3,), popxl.float32)
    with ir.main_graph:
        facts, _ = AdamOptimizerStep().create_graph(spec, spec, lr=0.1, replica_grouping=group)
    assert [f.replica_grouping.num_groups for f in facts.values()] == [2, 2, 1]


def test_the_norm_of_all_gradients_in_one_program():
    """The way applications clip: sums of squares of all gradients, a root, and a step for each variable."""
    scaling, limit = 16.0, 1.0
    initial = {"a": normal(3, 4), "b": normal(5)}
    gradients = {name: normal(*value.shape) for name, value in initial.items()}
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        variables = {name: popxl.variable(value, name=name) for name, value in initial.items()}
        grads = {name: popxl.constant(scaling * value) for name, value in gradients.items()}
        a, b = (grad_reduce_square_add(g, scaling) for g in grads.values())
        norm = ops.sqrt(a + b)
        for name, var in variables.items():
            facts, step = AdamOptimizerStep().create_graph(
                var, var.spec, lr=0.1, eps=0.1, loss_scaling=scaling, global_norm=norm, global_norm_max=limit, **F32
            )
            step.bind(facts.init(name)).call(var, grads[name], norm)
    with popxl.Session(ir, "cpu") as session:
        session.run()
    true_norm = np.sqrt(sum((g**2).sum() for g in gradients.values()))
    assert true_norm > limit
    for name, var in variables.items():
        expected = adamw(initial[name], [gradients[name] * limit / true_norm], 0.1, eps=0.1)[0]
        np.testing.assert_allclose(session.get_tensor_data(var), expected, atol=1e-5)


def test_all_ops_are_in_sequence():
    spec = popxl.TensorSpec((3,), popxl.float32)
    with popxl.Ir().main_graph:
        _, graph = AdamOptimizerStep().create_graph(spec, spec, lr=0.1, loss_scaling=4)
    first, *others = graph.graph.ops
    assert others and all(op.after for op in others)


def test_errors():
    spec = popxl.TensorSpec((3,), popxl.float32)
    with popxl.Ir().main_graph:
        with pytest.raises(AssertionError, match="`global_norm` is given without `global_norm_max`"):
            AdamOptimizerStep().create_graph(spec, spec, lr=0.1, global_norm=popxl.TensorSpec((), popxl.float32))
        for name in ("lr", "loss_scaling"):
            with pytest.raises(TypeError, match=f"AdamOptimizerStep: `{name}` must be a number or a Tensor"):
                AdamOptimizerStep().create_graph(spec, spec, **{"lr": 0.1, name: "0.1"})
