"""Two training programs, as people write them: what does not have to be on each device is in pieces, or elsewhere.

In the first, each replica updates its piece of the large variables. In the second, the layers of a network are in
remote memory, and on the devices one after the other.
"""

from functools import partial

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons.module import Module
from popxl_addons.named_replica_grouping import NamedReplicaGrouping
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.remote import NamedRemoteBuffers, load_remote_graph, named_variable_buffers, store_remote_graph
from popxl_addons.rts import all_gather_replica_sharded_graph, reduce_replica_sharded_graph, replica_sharded_spec
from popxl_addons.transforms.autodiff import autodiff_with_accumulation
from popxl_addons.transforms.batch_serialisation import (
    batch_serial_buffer,
    batch_serialise,
    batch_serialise_fwd_and_grad,
)
from popxl_addons.variable_factory import NamedVariableFactories
from tests.tolerances import assert_near

F32 = popxl.float32
CLASSES = 3


class Linear(Module):
    def __init__(self, features, weights):
        super().__init__()
        self.features, self.weights = features, weights

    def build(self, x, activation=True):
        w = self.add_variable_input("weight", partial(next, self.weights), x.dtype)
        b = self.add_variable_input("bias", partial(np.zeros, self.features), x.dtype)
        y = x @ w + b
        return ops.relu(y) if activation else y


class Momentum(Module):
    """m = 0.9 m + g, w -= lr * m: on whole variables, or on pieces of them."""

    @popxl.in_sequence()
    def build(self, w: popxl.TensorByRef, g: popxl.Tensor, *, lr: float, replica_grouping=None):
        zeros = partial(np.zeros, w.meta_shape or w.shape)
        if w.meta_shape:
            pieces = np.prod(w.meta_shape) // np.prod(w.shape)
            m = self.add_replica_sharded_variable_input("m", zeros, w.dtype, True, replica_grouping, shard_over=pieces)
        else:
            m = self.add_variable_input("m", zeros, w.dtype, True, replica_grouping)
        ops.scaled_add_(m, g, a=0.9, b=1.0)
        ops.scaled_add_(w, m, b=-lr)


class Reference:
    """The same training in NumPy, on whole batches: layers with ReLU between them, cross entropy, momentum."""

    def __init__(self, weights, lr, momentum=0.9):
        self.momentum = momentum
        self.w = [w.astype(np.float64) for w in weights]
        self.b = [np.zeros(w.shape[1]) for w in weights]
        self.m = [[np.zeros_like(t) for t in tensors] for tensors in (self.w, self.b)]
        self.lr = lr

    def step(self, x, labels):
        h = [x.astype(np.float64)]
        for i, (w, b) in enumerate(zip(self.w, self.b, strict=True)):
            z = h[-1] @ w + b
            h.append(np.maximum(z, 0) if i < len(self.w) - 1 else z)
        p = np.exp(h[-1] - h[-1].max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        rows = np.arange(len(labels))
        loss = -np.log(p[rows, labels]).mean()
        p[rows, labels] -= 1
        g = p / len(labels)
        for i in reversed(range(len(self.w))):
            dw, db, g = h[i].T @ g, g.sum(0), (g @ self.w[i].T) * (h[i] > 0)
            for tensors, m, gradient in ((self.w, self.m[0], dw), (self.b, self.m[1], db)):
                m[i] = self.momentum * m[i] + gradient
                tensors[i] = tensors[i] - self.lr * m[i]
        return loss


def draw(seed, *shapes):
    rng = np.random.default_rng(seed)
    return [0.7 * rng.normal(size=shape) for shape in shapes]


def batches(seed, steps, size, features):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(steps, size, features)).astype(np.float32)
    return x, rng.integers(0, CLASSES, size=(steps, size)).astype(np.uint32)


# Data parallel, with sharded updates --------------------------------------------------------------------------------


class TwoLayers(Module):
    def __init__(self, weights):
        super().__init__()
        self.first = Linear(weights[0].shape[1], iter([weights[0]] * 9))
        self.last = Linear(CLASSES, iter([weights[1]] * 9))

    def build(self, x, labels):
        logits = self.last(self.first(x), activation=False)
        loss, dlogits = addons.ops.cross_entropy_with_grad(logits, labels)
        return logits, loss, dlogits


def test_data_parallel_training_with_sharded_updates():
    """Momenta are in remote memory, and those of large variables in pieces; variables are updated piece by piece."""
    replicas, batch, lr = 4, 2, 0.5
    weights = draw(1, (5, 8), (8, CLASSES))
    ir = popxl.Ir(replication=replicas)
    everyone, alone = ir.replica_grouping(), ir.replica_grouping(group_size=1)
    with ir.main_graph, popxl.in_sequence():
        xs, labels = popxl.h2d_stream((batch, 5), F32, "x"), popxl.h2d_stream((batch,), popxl.uint32, "labels")
        facts, graph = TwoLayers(weights).create_graph(xs.spec, labels.spec)
        grad = addons.autodiff(graph, graph.graph.outputs[:1], graph.args.tensors)
        variables = facts.init()

        # Which variables are shared out: those that are large. The smallest bias could not be, anyway.
        groups = {name: everyone if v.nelms >= 8 else alone for name, v in variables.to_dict().items()}
        groups = NamedReplicaGrouping.from_dict(groups)
        specs = {name: replica_sharded_spec(v, shard_over=groups[name]) for name, v in variables.to_dict().items()}
        assert {name: spec.shape for name, spec in specs.items()} == {
            "first.bias": (2,),
            "first.weight": (10,),
            "last.bias": (3,),
            "last.weight": (6,),
        }

        optimiser, optim_facts, updates = Momentum(), {}, {}
        for name, spec in specs.items():
            optim_facts[name], updates[name] = optimiser.create_graph(spec, spec, lr=lr, replica_grouping=everyone)
        optim_facts = NamedVariableFactories.from_dict(optim_facts)
        shard_over = {
            name: f.replica_grouping.group_size if np.prod(f.shape) >= 4 else 1
            for name, f in optim_facts.to_dict().items()
        }
        shard_over["last.bias.m"] = 1
        buffers = named_variable_buffers(optim_facts, entries=1, shard_over_dict=shard_over)
        load, state_names = load_remote_graph(buffers)
        store = store_remote_graph(buffers)
        states = optim_facts.init_remote(buffers, 0, "optim")

        info = graph.bind(variables).call_with_info(ops.host_load(xs), ops.host_load(labels))
        _, loss, dlogits, *_ = info.outputs
        losses = addons.host_store(loss)
        gradients = grad.call(dlogits, args=grad.grad_graph_info.inputs_dict(info))
        by_variable = dict(zip(graph.args.tensors, gradients, strict=True))
        grads = graph.args.remap(by_variable)
        reduce, names = reduce_replica_sharded_graph(grads, "mean", shard_groups=groups, replica_group=everyone)
        grads = NamedTensors.pack(names, reduce.bind(grads).call())
        state = NamedTensors.from_dict(dict(zip(state_names, load.call(0), strict=True)))
        for name, v in variables.to_dict().items():
            update = updates[name].bind(state[name])
            if not specs[name].meta_shape:
                update.call(v, grads[name])
                continue
            piece = ops.collectives.replica_sharded_slice(v, group=groups[name])
            assert piece.name.startswith(v.name)
            update.call(piece, grads[name])
            whole = ops.collectives.replicated_all_gather(piece, group=groups[name])
            ops.var_updates.copy_var_update_(v, whole)
        store.bind(state).call(0)

    reference = Reference(weights, lr)
    with popxl.Session(ir, "ipu_model") as session:
        for x, y in zip(*batches(2, 3, replicas * batch, 5), strict=True):
            outputs = session.run({xs: x.reshape(replicas, batch, 5), labels: y.reshape(replicas, batch)})
            np.testing.assert_allclose(outputs[losses].mean(), reference.step(x, y), rtol=1e-5)
    for i, layer in enumerate(("first", "last")):
        for k, name in enumerate(("weight", "bias")):
            v, m = variables[layer][name], states[layer][name].m
            np.testing.assert_allclose(
                session.get_tensor_data(v), (reference.w, reference.b)[k][i], rtol=1e-4, atol=1e-6
            )
            assert_near(session.get_tensor_data(m), reference.m[k][i], 1e-4)


# Phased execution ---------------------------------------------------------------------------------------------------


class Head(Module):
    """Logits, loss and all gradients of a micro-batch: forward and backward pass in one graph."""

    def __init__(self, weights):
        super().__init__()
        self.linear = Linear(CLASSES, weights)

    def build(self, x, labels):
        facts, graph = self.linear.create_graph(x.spec, activation=False)
        bwd_facts, grad = autodiff_with_accumulation(graph, graph.args.tensors, grads_required=graph.graph.inputs[:1])
        info = graph.bind(self.add_variable_inputs("fwd", facts)).call_with_info(x)
        loss, dlogits = addons.ops.cross_entropy_with_grad(info.parent_output(0), labels)
        accumulators = grad.bind(self.add_variable_inputs("bwd", bwd_facts))
        (dx,) = accumulators.call(dlogits, args=grad.grad_graph_info.inputs_dict(info))
        return dx, loss


class Phase:
    """One kind of layer: its state in remote memory, and the graphs that load, gather, update and store it."""

    def __init__(self, fwd_facts, names_of_pieces, entries, lr):
        everyone = popxl.gir().replica_grouping()
        self.groups = NamedReplicaGrouping.build_groups(fwd_facts.keys_flat(), everyone)
        specs, updates, optim = {}, {}, {}
        for name, f in fwd_facts.to_dict().items():
            t = popxl.TensorSpec(f.shape, f.dtype)
            sharded = name in names_of_pieces
            specs[name] = replica_sharded_spec(t, everyone) if sharded else t
            optim[name], updates[name] = Momentum().create_graph(
                specs[name], specs[name], lr=lr, replica_grouping=everyone
            )
        self.facts = NamedVariableFactories(fwd=fwd_facts, optim=NamedVariableFactories.from_dict(optim))
        shards = {name: everyone.group_size if name in names_of_pieces else 1 for name in fwd_facts.keys_flat()}
        optim_shards = {f"{name}.m": n for name, n in shards.items()}
        self.buffers = NamedRemoteBuffers(
            fwd=named_variable_buffers(self.facts.fwd, entries, shards),
            optim=named_variable_buffers(self.facts.optim, entries, optim_shards),
        )
        self.updates = updates
        self.load_fwd, self.fwd_names = load_remote_graph(self.buffers.fwd, entries)
        self.load_optim, self.optim_names = load_remote_graph(self.buffers.optim, entries)
        self.store = store_remote_graph(self.buffers, entries)
        loaded = NamedTensors.pack(self.fwd_names, self.load_fwd.graph.outputs)
        self.gather, _ = all_gather_replica_sharded_graph(loaded, replica_groups=self.groups)

    def variables(self, entry):
        """The pieces in a slot, and the whole variables made of them."""
        pieces = NamedTensors.pack(self.fwd_names, self.load_fwd.call(entry))
        return pieces, NamedTensors.pack(self.fwd_names, self.gather.bind(pieces).call())

    def update(self, entry, pieces, accumulators):
        """Share out the mean of the gradients, update each piece, and store everything."""
        alone = popxl.gir().replica_grouping(group_size=1)
        groups = {name: self.groups[name] if t.meta_shape else alone for name, t in pieces.to_dict().items()}
        reduce, names = reduce_replica_sharded_graph(
            accumulators,
            "mean",
            shard_groups=NamedReplicaGrouping.from_dict(groups),
            replica_group=popxl.gir().replica_grouping(),
        )
        grads = NamedTensors.pack(names, reduce.bind(accumulators).call())
        states = NamedTensors.pack(self.optim_names, self.load_optim.call(entry))
        for name, piece in pieces.to_dict().items():
            self.updates[name].bind(states[name]).call(piece, grads[name])
        self.store.bind(NamedTensors(fwd=pieces, optim=states)).call(entry)


@pytest.mark.thorough(but_each=3)
@pytest.mark.parametrize("io_mode", ["compute", "io", "io_overlapped"])
def test_phased_execution(io_mode):
    """Two hidden layers share their graphs; micro-batches, weights and momenta come from remote memory."""
    replicas, steps, batch, width, lr, layers = 2, 3, 2, 4, 0.2, 2
    weights = draw(3, *[(width, width)] * layers, (width, CLASSES))
    ir = popxl.Ir()
    ir.replication_factor = replicas
    ir.num_host_transfers = steps
    ir._pb_ir.getSessionOptions().numIOTiles = 32
    with ir.main_graph, popxl.in_sequence():
        xs = popxl.h2d_stream((batch, width), F32, "x")
        labels = popxl.h2d_stream((batch,), popxl.uint32, "labels")
        losses = popxl.d2h_stream((), F32, "loss")
        serial = partial(batch_serialise, steps=steps, io_mode=io_mode)

        # Row n of these holds what goes into layer n, and its gradient.
        values = batch_serial_buffer(xs.spec, steps, layers + 1)
        gradients = batch_serial_buffer(xs.spec, steps, layers + 1)

        # Phase 1: the inputs, from the host.
        inputs = addons.GraphWithNamedArgs(ir.create_graph(lambda x: x + 0.0, xs.spec))
        (x,), (y,) = inputs.graph.inputs, inputs.graph.outputs
        load_inputs = serial(inputs, load_handles={x: xs}, store_streams={}, store_buffers={y: (values, 0)})

        # Phase 2 and 4: the hidden layers, forwards and backwards.
        facts, graph = Linear(width, iter([weights[0], *weights[:layers]])).create_graph(xs.spec)
        grad_facts, grad = autodiff_with_accumulation(graph, graph.args.tensors, grads_required=graph.graph.inputs[:1])
        x, y = graph.graph.inputs[0], graph.graph.outputs[0]
        dy, dx = grad.graph.inputs[0], grad.graph.outputs[0]
        forward, backward = batch_serialise_fwd_and_grad(
            graph,
            grad,
            graph.args,
            steps,
            load_handles={x: (values, 0), dy: (gradients, 1)},
            store_streams={},
            store_buffers={y: (values, 1), dx: (gradients, 0)},
            rows=layers,
            io_mode=io_mode,
        )
        assert {name.split(".")[0] for name in backward.graph.args.keys_flat()} >= {"mean_accum_counter", "accum"}
        hidden = Phase(facts, ["weight", "bias"], layers, lr)

        # Phase 3: the head, forwards and backwards at once.
        head_facts, head = Head(iter([weights[-1]] * 9)).create_graph(xs.spec, labels.spec)
        bwd_facts = head_facts.pop("bwd")
        (x, y), (dx, loss, *_) = head.graph.inputs[:2], head.graph.outputs
        head = serial(
            head,
            load_handles={x: (values, layers), y: labels},
            store_streams={loss: losses},
            store_buffers={dx: (gradients, layers)},
        )
        last = Phase(head_facts.fwd, ["weight"], 1, lr)

        variables = [hidden.facts.init_remote(hidden.buffers, i, f"layer{i}") for i in range(layers)]
        variables.append(last.facts.init_remote(last.buffers, 0, "head"))

        # One step of training.
        load_inputs.graph.call(0)
        for i in range(layers):
            _, whole = hidden.variables(i)
            forward.graph.bind(whole).call(i)

        pieces, whole = last.variables(0)
        state = NamedTensors(fwd=whole, bwd=bwd_facts.init_zero())
        head.graph.bind(state).call(0)
        accumulators = state.bwd.copy()
        accumulators.pop("mean_accum_counter")
        last.update(0, pieces, accumulators.accum)

        for i in reversed(range(layers)):
            pieces, whole = hidden.variables(i)
            accumulators = grad_facts.init_zero()
            state = whole.copy()
            state.update(accumulators.copy())
            backward.graph.bind(state).call(i)
            hidden.update(i, pieces, accumulators.accum)

    reference = Reference(weights, lr)
    with popxl.Session(ir, "ipu_model") as session:
        for seed in range(2):
            x, y = batches(seed, steps, replicas * batch, width)
            outputs = session.run(
                {xs: x.reshape(steps, replicas, batch, width), labels: y.reshape(steps, replicas, batch)}
            )
            expected = reference.step(x.reshape(-1, width), y.reshape(-1))
            np.testing.assert_allclose(outputs[losses].mean(), expected, rtol=1e-5)
    for i, v in enumerate(variables):
        for k, name in enumerate(("weight", "bias")):
            expected = (reference.w, reference.b)[k][i]
            assert_near(session.get_tensor_data(v.fwd[name]), expected, 1e-4)
            np.testing.assert_allclose(
                session.get_tensor_data(v.optim[name].m), reference.m[k][i], rtol=1e-4, atol=1e-6
            )


# Layers in a loop, and their pieces -----------------------------------------------------------------------------------


WIDTH = 8


class Deep(Module):
    def __init__(self, weights):
        super().__init__()
        self.weights = weights
        self.first, self.last = Linear(WIDTH, iter(weights[:1] * 9)), Linear(CLASSES, iter(weights[-1:] * 9))

    def build(self, x, labels):
        h = self.first(x)
        middle = self.weights[1:-1]
        facts, layer = Linear(WIDTH, iter([*middle[:1] * 2, *middle[1:], *middle])).create_graph(h)
        for i in range(len(middle)):
            (h,) = layer.bind(self.add_variable_inputs(f"middle{i}", facts)).call(h)
        return addons.cross_entropy(self.last(h, activation=False), labels)


class PieceByPiece(Module):
    """w -= lr * g, where each replica has a piece of the gradient; or all of it, if it is small."""

    @popxl.in_sequence()
    def build(self, w: popxl.TensorByRef, g: popxl.Tensor, total: popxl.Tensor, *, lr: float):
        step = g + total * 0.0
        if not g.meta_shape:
            ops.scaled_add_(w, step, b=-lr)
            return
        piece = ops.collectives.replica_sharded_slice(w)
        ops.scaled_add_(piece, step, b=-lr)
        ops.var_updates.copy_var_update_(w, ops.collectives.replicated_all_gather(piece))


def test_pieces_are_exchanged_in_a_loop_and_around_it():
    """The updates of the inner layers are a loop, and those of the others are not."""
    replicas, steps, batch = 8, 4, 2
    weights, lr = draw(5, (5, WIDTH), *[(WIDTH, WIDTH)] * 3, (WIDTH, CLASSES)), 0.1
    ir = popxl.Ir(replication=replicas)
    ir.options.calledGraphs = "rolled"
    with ir.main_graph, popxl.in_sequence():
        xs, labels = popxl.h2d_stream((batch, 5), F32, "x"), popxl.h2d_stream((batch,), popxl.uint32, "labels")
        facts, graph = Deep(weights).create_graph(xs.spec, labels.spec)
        grad = addons.autodiff(graph, grads_required=graph.args.tensors)
        variables = facts.init()
        info = graph.bind(variables).call_with_info(ops.host_load(xs), ops.host_load(labels))
        loss = addons.host_store(info.outputs[0])
        gradients = grad.call(popxl.constant(1.0, F32), args=grad.grad_graph_info.inputs_dict(info))
        flat = {graph.args.get(name): name for name in variables.to_dict()}
        gradients = NamedTensors.from_dict(dict(zip(map(flat.get, graph.args.tensors), gradients, strict=True)))
        everyone = NamedReplicaGrouping.build_groups(list(flat.values()), ir.replica_grouping())
        reduced, names = reduce_replica_sharded_graph(gradients, "mean", shard_groups=everyone)
        pieces = NamedTensors.pack(names, reduced.bind(gradients).call())
        # All updates wait for all gradients, as if these were clipped, and none waits for another.
        total = ops.collectives.replicated_all_reduce(sum(map(ops.sum, pieces.tensors), popxl.constant(0.0, F32)))
        optimiser = PieceByPiece(cache=True)
        for name, variable in variables.to_dict().items():
            _, update = optimiser.create_graph(variable, pieces.get(name), total, lr=lr)
            update.call(variable, pieces.get(name), total)
    xs_of_all, labels_of_all = batches(7, steps, replicas * batch, 5)
    reference = Reference(weights, lr, momentum=0.0)
    with popxl.Session(ir, "ipu_hw") as session:
        for x, labels_now in zip(xs_of_all, labels_of_all, strict=True):
            fed = {xs: x.reshape(replicas, batch, 5), labels: labels_now.reshape(replicas, batch)}
            np.testing.assert_allclose(session.run(fed)[loss].mean(), reference.step(x, labels_now), rtol=1e-4)
        trained = session.get_tensors_data(variables.tensors)
    layers = ["first", *(f"middle{i}" for i in range(len(weights) - 2)), "last"]
    for layer, w, b in zip(layers, reference.w, reference.b, strict=True):
        assert_near(trained[variables.get(layer).weight], w, 1e-3)
        assert_near(trained[variables.get(layer).bias], b, 1e-3)
