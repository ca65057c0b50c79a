"""`ring_attention` against JAX's attention over whole texts: results, gradients, and what replicas send each other."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl.errors import PopxlError
from popxl_addons.layers import Attention
from popxl_addons.ops.ring_attention import ring_attention
from tests.devices import a_device_each, one_device
from tests.tolerances import assert_near

RNG = np.random.default_rng(9)
BATCH, HEADS, CHANNELS, VALUE_CHANNELS = 2, 4, 3, 5


def whole(q, k, v, causal):
    """Attention of (batch, heads, length, channels), of whose heads some share their keys."""
    k, v = (jnp.repeat(t, q.shape[1] // k.shape[1], axis=1) for t in (k, v))
    scores = jnp.einsum("bhqc,bhkc->bhqk", q, k) / math.sqrt(q.shape[-1])
    if causal:
        scores = jnp.where(np.tri(q.shape[2], dtype=bool), scores, -jnp.inf)
    return jnp.einsum("bhqk,bhkv->bhqv", jax.nn.softmax(scores), v)


def divided(t, groups):
    """A row for each replica: of a whole text of each group, the places that are its own."""
    count = sum(map(len, groups))
    rows = [None] * count
    for text, group in zip(t, groups, strict=True):
        for part, replica in zip(np.split(text, len(group), axis=2), group, strict=True):
            rows[replica] = part
    return np.stack(rows)


LAYOUTS = [
    pytest.param({"all": 1}, None, [[0]], one_device, id="one replica"),
    pytest.param({"data": 2, "text": 4}, "text", [[0, 1, 2, 3], [4, 5, 6, 7]], a_device_each, id="next to each other"),
    pytest.param({"text": 2, "data": 2}, "text", [[0, 2], [1, 3]], one_device, id="apart, on one device"),
    pytest.param({"text": 3}, None, [[0, 1, 2]], a_device_each, id="all"),
    pytest.param({"data": 2, "a": 2, "b": 2}, ("a", "b"), [[0, 1, 2, 3], [4, 5, 6, 7]], a_device_each, id="two axes"),
]


@pytest.mark.thorough(but_each=5)
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize(("axes", "group", "groups", "device"), LAYOUTS)
def test_ring(axes, group, groups, device, causal):
    size = len(groups[0])
    shapes = [(HEADS, 2, CHANNELS), (HEADS // 2, 2, CHANNELS), (HEADS // 2, 2, VALUE_CHANNELS)]
    texts = [RNG.normal(size=(len(groups), BATCH, h, size * n, c)).astype(np.float32) for h, n, c in shapes]
    g = RNG.normal(size=(len(groups), BATCH, HEADS, size * 2, VALUE_CHANNELS)).astype(np.float32)
    y, pullback = jax.vjp(lambda *qkv: jax.vmap(lambda *each: whole(*each, causal))(*qkv), *texts)
    expected = [y, *pullback(g)]

    ir = popxl.Ir(axes=axes)
    with ir.main_graph, popxl.in_sequence():
        own = ir.replica_grouping(group_size=1)
        rows = [divided(t, groups) for t in (*texts, g)]
        given = [popxl.variable(t if len(t) > 1 else t[0], replica_grouping=own) for t in rows]
        graph = ir.create_graph(lambda q, k, v: ring_attention(q, k, v, causal, group=group), *given[:3])
        info = popxl.transforms.autodiff(graph)
        call = ops.call_with_info(graph, *given[:3])
        streams = []
        for t in (call.outputs[0], *ops.call(info.graph, given[3], inputs_dict=info.inputs_dict(call))):
            streams.append(popxl.d2h_stream(t.shape, t.dtype))
            ops.host_store(streams[-1], t)
    with popxl.Session(ir, device(ir.replication_factor)) as session:
        outputs = session.run()
        assert not session.communication().differences
    for stream, wanted in zip(streams, expected, strict=True):
        shape = (ir.replication_factor, *stream.shape)
        wanted = divided(np.asarray(wanted), groups).reshape(shape)
        assert_near(outputs[stream].reshape(shape), wanted, 2e-5)
    kinds = {kind: count for kind, (count, _) in ir.communication().totals.items()}
    assert kinds == ({} if size == 1 else {"collective-permute": 2 * (size - 1) + 4 * (size - 1) + 2})


@pytest.mark.parametrize("rotary", [pytest.param(None, marks=pytest.mark.thorough), 100.0], ids=["plain", "rotary"])
def test_a_layer_whose_texts_are_divided_is_that_of_whole_texts(rotary):
    """The means of gradients over replicas, times how many there are, are those of the sum over all places."""
    length, width = 8, 8
    x, g = RNG.normal(size=(2, BATCH, length, width)).astype(np.float32)

    def ran(replicas, weights):
        ir = popxl.Ir(axes={"text": replicas})
        with ir.main_graph, popxl.in_sequence():
            streams = [popxl.h2d_stream((BATCH, length // replicas, width), popxl.float32) for _ in "xg"]
            arrived = [ops.host_load(s) for s in streams]
            layer = Attention(4, key_heads=2, rotary=rotary, group="text" if replicas > 1 else None)
            facts, graph = layer.create_graph(streams[0].spec)
            grad = addons.autodiff(graph, grads_required=[graph.graph.inputs[0], *graph.args.values_flat()])
            variables = facts.init()
            info = graph.bind(variables).call_with_info(arrived[0])
            dx, *dws = grad.call(arrived[1], args=grad.grad_graph_info.inputs_dict(info))
            dws = [ops.collectives.replicated_all_reduce(dw) for dw in dws]
            outs = []
            for t in (info.outputs[0], dx, *dws):
                outs.append(popxl.d2h_stream(t.shape, t.dtype))
                ops.host_store(outs[-1], t)
        parts = [np.stack(np.split(t, replicas, axis=1)) if replicas > 1 else t for t in (x, g)]
        with popxl.Session(ir, a_device_each(replicas)) as session:
            named = variables.to_dict()
            session.write_variables_data({named[name]: w for name, w in weights.items()})
            found = session.run(dict(zip(streams, parts, strict=True)))
        y, dx, *dws = (found[s] for s in outs)
        if replicas > 1:
            y, dx, dws = *(np.concatenate(list(t), axis=1) for t in (y, dx)), [dw[0] for dw in dws]
        return [y, dx, *dws]

    shapes = {"query": 8, "key": 4, "value": 4, "output": 8}
    weights = {f"{n}.weight": RNG.normal(size=(8, c)).astype(np.float32) / 3 for n, c in shapes.items()}
    weights |= {f"{n}.bias": RNG.normal(size=c).astype(np.float32) for n, c in shapes.items()}
    for one, four in zip(ran(1, weights), ran(4, weights), strict=True):
        np.testing.assert_allclose(four, one, rtol=2e-5, atol=2e-5)


class Regression(addons.Module):
    def build(self, x, target, group):
        self.attention = Attention(2, rotary=50.0, group=group)
        difference = self.attention(x) - target
        return ops.mean(difference * difference)


def test_training_with_divided_texts_is_that_with_whole_ones():
    x, target = RNG.normal(size=(2, BATCH, 12, 8)).astype(np.float32)
    names, weights = [f"{n}.{kind}" for n in ("query", "key", "value", "output") for kind in ("weight", "bias")], {}

    def losses(axes, group):
        ir = popxl.Ir(axes=axes)
        parts = axes.get("text", 1)
        with ir.main_graph:
            streams = [popxl.h2d_stream((BATCH, 12 // parts, 8), popxl.float32) for _ in "xt"]
            training = addons.train_step(
                Regression(), *streams, optimizer=partial(addons.optimizers.sgd, lr=0.3), group=group
            )
            loss = addons.host_store(training.loss)
        variables = training.variables.to_dict()
        fed = [np.stack(np.split(a, parts, axis=1)) for a in (x, target)]
        with popxl.Session(ir, a_device_each(ir.replication_factor)) as session:
            for name in names:
                v = next(v for key, v in variables.items() if key.endswith(f"attention.{name}"))
                weights.setdefault(name, RNG.normal(size=v.shape).astype(np.float32) / 3)
                session.write_variable_data(v, weights[name])
            feeds = {s: a.reshape(session.host_shape(s.shape)) for s, a in zip(streams, fed, strict=True)}
            return [np.mean(session.run(feeds)[loss]) for _ in range(4)]

    whole = losses({"all": 1}, None)
    assert whole[-1] < 0.9 * whole[0]
    np.testing.assert_allclose(losses({"text": 3}, "text"), whole, rtol=1e-5)


@pytest.mark.targets
@pytest.mark.parametrize(
    ("description", "replicas"), [("tpu v5e:2x4", 8), ("gpu h100:8", 8), ("tpu v5e:2x2", 2), ("gpu h100:2", 2)]
)
@pytest.mark.parametrize("dtype", [popxl.float32, popxl.bfloat16])
def test_what_is_sent_and_kept_on_targets(description, replicas, dtype):
    """Pieces go to neighbours, and nothing else is sent; and no replica has more than some of them. The gradient sends
    them again: of two replicas, too, where the other way round is the same way."""
    length, channels = 1024, 128
    ir = popxl.Ir(axes={"text": replicas})
    with ir.main_graph, popxl.in_sequence():
        qkv = [popxl.variable(popxl.initial.zeros((2, length, channels)), dtype) for _ in range(3)]
        graph = ir.create_graph(lambda *qkv: ring_attention(*qkv, causal=True), *qkv)
        info = popxl.transforms.autodiff(graph)
        call = ops.call_with_info(graph, *qkv)
        for t, dt in zip(qkv, ops.call(info.graph, call.outputs[0], inputs_dict=info.inputs_dict(call)), strict=True):
            ops.add_(t, dt)
    session = popxl.Session(ir, description)
    assert not session.communication().differences
    assert {e.kind for e in session.communication().exchanges} == {"collective-permute"}
    assert session.memory().temporaries < 40 * 2 * length * channels * 4


def test_what_is_refused():
    def shaped(*shape, dtype=popxl.float32):
        return popxl.variable(np.ones(shape), dtype)

    with popxl.Ir(axes={"text": 2}).main_graph:
        q = shaped(4, 2, 3)
        for given, message in [
            ((q, shaped(4, 2, 5), q), "as many channels as the queries"),
            ((q, q, shaped(4, 3, 3)), "a value for each key"),
            ((q, shaped(3, 2, 3), shaped(3, 2, 3)), "a number of heads that divides theirs"),
            ((q, shaped(4, 2, 3, dtype=popxl.float16), q), "dtype"),
            ((shaped(2, 3), q, q), "of one rank"),
            ((q, shaped(4, 5, 3), shaped(4, 5, 3), True), "a replica has 2 queries and 5 keys"),
        ]:
            with pytest.raises(PopxlError, match=message):
                ring_attention(*given)
        with pytest.raises(TypeError, match="`scale` must be a number"):
            ring_attention(q, q, q, scale="1")
        with pytest.raises(ValueError, match="replicas that have places of texts take no `mask`"):
            x = popxl.TensorSpec((2, 4, 8), popxl.float32)
            Attention(2, group="text").create_graph(x, mask=popxl.TensorSpec((4, 4), popxl.bool))
