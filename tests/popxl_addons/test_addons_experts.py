"""`Experts` against the same mixture in JAX, where every token goes through every expert: results, every gradient, the
tokens that find no place, and what replicas send each other."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons import optimizers
from popxl_addons.layers import Experts
from tests.devices import a_device_each, one_device

COUNT, TOKENS, WIDTH, HIDDEN = 8, 12, 5, 7
RNG = np.random.default_rng(4)
WEIGHTS = {
    "router": RNG.normal(size=(WIDTH, COUNT)),
    "gate": RNG.normal(size=(COUNT, WIDTH, HIDDEN)),
    "up": RNG.normal(size=(COUNT, WIDTH, HIDDEN)),
    "down": RNG.normal(size=(COUNT, HIDDEN, WIDTH)),
}
WEIGHTS = {name: w.astype(np.float32) for name, w in WEIGHTS.items()}


def mixture(weights, x, chosen, room):
    """One replica's tokens of shape (tokens, width), and the balance."""
    probabilities = jax.nn.softmax(x @ weights["router"])
    gates, best = jax.lax.top_k(probabilities, chosen)
    gates = gates if chosen == 1 else gates / gates.sum(1, keepdims=True)
    up = jnp.einsum("td,edh->teh", x, weights["up"])
    inner = jax.nn.silu(jnp.einsum("td,edh->teh", x, weights["gate"])) * up if "gate" in weights else jax.nn.relu(up)
    each = jnp.einsum("teh,ehd->ted", inner, weights["down"])
    taken = np.zeros(COUNT, int)
    y = [jnp.zeros(x.shape[1])] * len(x)
    for k in range(chosen):
        for t, expert in enumerate(np.asarray(best[:, k])):
            if taken[expert] < room:
                y[t] = y[t] + gates[t, k] * each[t, expert]
            taken[expert] += 1
    return jnp.stack(y), COUNT * (taken / taken.sum() * probabilities.mean(0)).sum()


def ran(axes, group, x, device, **how):
    """y, balance and the gradients of x and the variables, of all replicas, for the sum of all of y and the balance."""
    ir = popxl.Ir(axes=axes)
    replicas = ir.replication_factor
    layer = Experts(COUNT, HIDDEN, group=group, **how)
    with ir.main_graph, popxl.in_sequence():
        stream = popxl.h2d_stream(x.shape[1:], popxl.float32)
        facts, graph = layer.create_graph(stream.spec)
        grad = addons.autodiff(graph, grads_required=[graph.graph.inputs[0], *graph.args.values_flat()])
        variables = facts.init()
        info = graph.bind(variables).call_with_info(ops.host_load(stream))
        y, balance, *_ = info.outputs  # others are kept for the gradient graph
        ones = [popxl.constant(np.ones(t.shape, np.float32)) for t in (y, balance)]
        dx, *dws = grad.call(*ones, args=grad.grad_graph_info.inputs_dict(info))
        names = graph.args.keys_flat()
        results = {"y": y, "balance": balance, "x": dx, **dict(zip(names, dws, strict=True))}
        streams = {}
        for name, t in results.items():
            streams[name] = popxl.d2h_stream(t.shape, t.dtype)
            ops.host_store(streams[name], t)
    with popxl.Session(ir, device(replicas)) as session:
        # A variable whose groups divide it has a row of pieces.
        session.write_variables_data(
            {v: WEIGHTS[name].reshape(v.shape_on_host) for name, v in variables.to_dict().items()}
        )
        outputs = session.run({stream: x.reshape(session.host_shape(stream.shape))})
        found = {name: outputs[s].reshape(replicas, *s.shape) for name, s in streams.items()}
        assert not session.communication().differences
    return found, ir.communication()


LAYOUTS = [
    pytest.param({"all": 1}, None, one_device, id="one replica"),
    pytest.param({"data": 2}, None, a_device_each, id="all experts on each"),
    pytest.param({"data": 2, "expert": 4}, "expert", a_device_each, id="next to each other"),
    pytest.param({"expert": 4, "data": 2}, "expert", one_device, id="apart, on one device"),
    pytest.param({"data": 2, "a": 2, "b": 2}, ("a", "b"), a_device_each, id="two axes"),
]


@pytest.mark.thorough(but_each=8)
@pytest.mark.parametrize("chosen, capacity, activation", [(1, 8.0, "relu"), (2, 8.0, "swiglu"), (2, 0.6, "relu")])
@pytest.mark.parametrize("axes, group, device", LAYOUTS)
def test_experts(axes, group, device, chosen, capacity, activation):
    replicas = int(np.prod([*axes.values()]))
    x = RNG.normal(size=(replicas, TOKENS, WIDTH)).astype(np.float32)
    weights = {name: w for name, w in WEIGHTS.items() if name != "gate" or activation == "swiglu"}
    room = int(np.ceil(TOKENS * chosen / COUNT * capacity))

    def losses(weights, x):
        ys, balances = zip(*(mixture(weights, each, chosen, room) for each in x), strict=True)
        return jnp.stack(ys).sum() + sum(balances), (jnp.stack(ys), jnp.stack(balances))

    (_, (ys, balances)), (dws, dx) = jax.value_and_grad(losses, (0, 1), has_aux=True)(weights, x)
    found, sent = ran(axes, group, x, device, chosen=chosen, capacity_factor=capacity, activation=activation)

    near = {"rtol": 1e-4, "atol": 1e-5}
    np.testing.assert_allclose(found["y"], ys, **near)
    np.testing.assert_allclose(found["balance"], balances, **near)
    np.testing.assert_allclose(found["x"], dx, **near)
    if capacity < 1:
        assert (np.asarray(ys) == 0).all(-1).any(), "no token was left without a place"
    size = 1 if group is None else 4
    for name, dw in dws.items():
        of_all = found[name]
        if name != "router" and size > 1:  # experts in a dimension of their own, by the axis that they are divided on
            by_axes = (4, 2) if [*axes][0] == "expert" else (2, 4)
            of_all = np.moveaxis(of_all.reshape(*by_axes, *of_all.shape[1:]), by_axes.index(4), 1)
            of_all = of_all.reshape(2, *dw.shape) * 4  # each is that of the mean of four losses
        np.testing.assert_allclose(of_all.sum(0), dw, **near, err_msg=name)

    kinds = {kind: count for kind, (count, _) in sent.totals.items()}
    assert kinds == ({} if size == 1 else {"all-to-all": 4})


class Regression(addons.Module):
    def build(self, x, target, group):
        self.experts = Experts(COUNT, HIDDEN, capacity_factor=8.0, group=group)
        y, _ = self.experts(x)  # without the balance, which is of each replica's tokens
        difference = x + y - target
        return ops.mean(difference * difference)


def test_training_moves_to_other_replicas(tmp_path):
    """A step of eight replicas, and one of two that read what the first left: those of one replica that has all."""
    x, target = RNG.normal(size=(2, 2, 8 * TOKENS, WIDTH)).astype(np.float32)

    def trained(axes, group, steps, read=None, left=None):
        ir = popxl.Ir(axes=axes)
        with ir.main_graph:
            streams = [popxl.h2d_stream((8 * TOKENS // ir.replication_factor, WIDTH), popxl.float32) for _ in "xt"]
            training = addons.train_step(Regression(), *streams, optimizer=partial(optimizers.sgd, lr=0.5), group=group)
            loss = addons.host_store(training.loss)
        state = training.variables
        with addons.TaskSession(streams, [loss], state, ir=ir, device_desc="ipu_hw") as session:
            if read:
                session.load_checkpoint(str(read))
            else:
                weights = {v: WEIGHTS[name.rpartition(".")[2]] for name, v in state.to_dict().items()}
                session.write_variables_data({v: w.reshape(v.shape_on_host) for v, w in weights.items()})
            losses = []
            for i in steps:
                fed = [a[i].reshape(session.host_shape(s.shape)) for s, a in zip(streams, (x, target), strict=True)]
                losses.append(session.run(dict(zip(streams, fed, strict=True)))[loss].flat[0])
            if left:
                session.save_checkpoint(str(left))
        return losses

    alone = trained({"all": 1}, None, [0, 1])
    found = trained({"data": 2, "expert": 4}, "expert", [0], left=tmp_path / "left")
    found += trained({"expert": 2}, "expert", [1], read=tmp_path / "left")
    np.testing.assert_allclose(found, alone, rtol=1e-5)
    assert alone[1] < alone[0]


def test_bad_experts():
    for wrong, error, message in [
        (dict(count=4.5), TypeError, "`count`"),
        (dict(count=4, chosen=5), ValueError, "`chosen` is 5; expected 1 to 4"),
        (dict(count=4, capacity_factor=0), ValueError, "`capacity_factor` is 0; expected a number above 0"),
        (dict(count=4, activation="tanh"), ValueError, "Experts: `activation` is 'tanh'"),
    ]:
        with pytest.raises(error, match=message):
            Experts(**wrong)
    with popxl.Ir(axes={"expert": 4}).main_graph, pytest.raises(ValueError, match="a multiple of 4, the size of"):
        Experts(6, group="expert").create_graph(popxl.TensorSpec((8, 3), popxl.float32))
    with popxl.Ir().main_graph, pytest.raises(ValueError, match="Experts: the weights would be of int32"):
        Experts(4).create_graph(popxl.TensorSpec((8, 3), popxl.int32))
