"""Layers that replicas divide between them: the numbers of one replica, forward, backward and trained."""

from functools import cache, partial
from typing import Any

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons import optimizers
from popxl_addons.layers import MLP, Attention, LanguageConfig, LanguageModel, TransformerBlock
from popxl_addons.ops import rotary_positions
from tests.devices import a_device_each, one_device

Array = np.ndarray

GPT = LanguageConfig(vocabulary=11, width=8, layers=2, heads=4, context=6, bias=True)
LLAMA = LanguageConfig(
    vocabulary=11,
    width=8,
    layers=2,
    heads=4,
    key_heads=2,
    channels=6,
    hidden=12,
    rotary=100.0,
    norm="rms",
    activation="swiglu",
    bias="qkv",
    mlp_bias=False,
    head_norm=True,
    tied=False,
)


class Loss(addons.Module):
    """The cross entropy of a language model."""

    def __init__(self, config: LanguageConfig, tensor: str | None) -> None:
        super().__init__()
        self.model = LanguageModel(config, tensor=tensor)

    def build(self, tokens: popxl.Tensor) -> popxl.Tensor:
        logits = self.model(tokens[:, :-1])
        return addons.ops.cross_entropy(logits.reshape((-1, logits.shape[-1])), tokens[:, 1:].flatten())


def whole(v: Any, data: Array) -> Array:
    """The value of a variable that groups of replicas divide, of its parts."""
    return data if v.group_axis is None or v.replica_grouping.num_groups == 1 else np.concatenate([*data], v.group_axis)


def parts(v: Any, value: Array) -> Array:
    """The parts of a value, one for each group of replicas."""
    groups = v.replica_grouping.num_groups
    return value if v.group_axis is None or groups == 1 else np.stack(np.split(value, groups, v.group_axis))


def trained(config: LanguageConfig, axes: dict[str, int], begin: dict[str, Array], device: Any) -> tuple[Any, Any, Any]:
    """Losses of three steps, the variables after them, and what is sent in a step."""
    ir = popxl.Ir(axes=axes)
    rows = 4 // axes["data"]
    with ir.main_graph:
        tokens = popxl.h2d_stream((rows, 6), popxl.int32, "tokens")
        tensor = "tensor" if "tensor" in axes else None
        training = addons.train_step(
            Loss(config, tensor), tokens, optimizer=partial(optimizers.adamw, lr=0.05, eps=1e-4)
        )
        loss = popxl.d2h_stream((), popxl.float32, "loss")
        ops.host_store(loss, training.loss)
    variables = training.variables.to_dict()
    rng, losses = np.random.default_rng(1), []
    with popxl.Session(ir, device(ir.replication_factor)) as session:
        for name, v in variables.items():
            value = np.random.default_rng(len(name)).normal(size=whole(v, session.get_tensor_data(v)).shape) / 2
            session.write_variable_data(v, parts(v, begin.setdefault(name, value.astype(np.float32))))
        for _ in range(3):
            batch = rng.integers(0, config.vocabulary, (axes["data"], rows, 6))
            fed = np.repeat(batch, axes.get("tensor", 1), 0).reshape(session.host_shape(tokens.shape))
            losses.append(np.mean(session.run({tokens: fed.astype(np.int32)})[loss]))
        return losses, {name: whole(v, session.get_tensor_data(v)) for name, v in variables.items()}, ir.communication()


@cache
def on_one_replica(config: LanguageConfig) -> tuple[dict[str, Array], list[Any], dict[str, Array]]:
    """The first values of variables, the losses, and the last values."""
    begin: dict[str, Array] = {}
    losses, variables, _ = trained(config, {"data": 1}, begin, one_device)
    return begin, losses, variables


@pytest.mark.thorough(but_each=4)
@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])
@pytest.mark.parametrize(
    ("axes", "device"),
    [({"data": 2, "tensor": 2}, a_device_each), ({"data": 1, "tensor": 1}, one_device)],
    ids=["2x2", "one replica"],
)
def test_divided_models_are_trained_as_one(config: LanguageConfig, axes: dict[str, int], device: Any) -> None:
    begin, expected, variables = on_one_replica(config)
    losses, found, sent = trained(config, axes, begin, device)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for name, value in variables.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-3, atol=1e-3, err_msg=name)
    along = sum(each.turns for each in sent.collectives if each.groups.endswith("along tensor"))
    a_block = 6 if config.head_norm else 4  # two each way; the gradients of norms of heads are summed, too
    assert along == (a_block * config.layers if axes["tensor"] == 2 else 0)


def test_state_on_the_host_has_a_buffer_for_whole_and_for_divided_weights() -> None:
    """The table of embeddings is as large as a part of `mlp.down`: no warning says that it drifts apart."""
    config = GPT.model_copy(update={"vocabulary": 16})
    ir = popxl.Ir(axes={"data": 1, "tensor": 2})
    with ir.main_graph:
        tokens = popxl.h2d_stream((2, 5), popxl.int32, "tokens")
        optimizer = partial(optimizers.sgd, lr=0.1, momentum=0.9)
        step = addons.train_step(Loss(config, "tensor"), tokens, optimizer=optimizer, optimizer_state="host")
    table, down = (step.state.model[name].velocity for name in ("embedding.weight", "layers.0.mlp.down.weight"))
    assert table.shape == down.shape
    assert table.location_info.buffer is not down.location_info.buffer
    popxl.Session(ir, "ipu_model")  # warns of what drifts apart, and warnings are errors


def test_a_block_sends_two_all_reduces_each_way_and_divides_its_weights() -> None:
    ir = popxl.Ir(axes={"data": 2, "tensor": 4})
    with ir.main_graph:
        block = TransformerBlock(Attention(8, 4, rotary=100.0, tensor="tensor"), MLP(24, tensor="tensor"))
        facts, graph = block.create_graph(popxl.TensorSpec((2, 5, 16), popxl.float32))
        x = ops.host_load(popxl.h2d_stream((2, 5, 16), popxl.float32))
        graph.bind(facts.init()).call(x)
    shapes = {name: f.shape for name, f in facts.to_dict().items()}
    assert shapes["attention.query.weight"] == (16, 4) and shapes["attention.key.bias"] == (2,)
    assert shapes["attention.output.weight"] == (4, 16) and shapes["attention.output.bias"] == (16,)
    assert shapes["mlp.up.weight"] == (16, 6) and shapes["mlp.down.weight"] == (6, 16)
    (sent,) = {(each.kind, each.groups) for each in ir.communication().collectives}
    assert sent == ("all-reduce", "of 4 along tensor") and len(ir.communication().collectives) == 2


def test_heads_drop_different_places_on_each_replica() -> None:
    """Two heads with the same weights, one on each replica: the sum of equal draws would have fewer values."""
    ir = popxl.Ir(axes={"tensor": 2})
    with ir.main_graph:
        x = popxl.variable(np.ones((1, 8, 4)), popxl.float32, "x")
        seed = popxl.variable(np.array([3, 4]), popxl.uint32, "seed")
        layer = Attention(2, channels=4, causal=False, dropout=0.5, bias=False, tensor="tensor")
        facts, graph = layer.create_graph(x, seed=seed)
        variables = facts.init()
        (y,) = graph.bind(variables).call(x, seed)
        out = popxl.d2h_stream(y.shape, y.dtype)
        ops.host_store(out, y)
    with popxl.Session(ir, one_device(2)) as session:
        session.write_variables_data({v: np.ones(v.shape_on_host, np.float32) for v in variables.to_dict().values()})
        rows = session.run()[out]
    kept = rows[:, 0, :, 0] / 16 * 8 / 2  # how many of the eight places both heads have kept of each row
    np.testing.assert_allclose(kept, np.round(kept), atol=1e-4)
    np.testing.assert_array_equal(kept[0], kept[1])
    assert (np.round(kept[0]) % 2 == 1).any()  # twice the same draw is an even number


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Attention(6, tensor="tensor"), "`heads` is 6; expected a multiple of 4"),
        (lambda: Attention(8, 2, tensor="tensor"), "`key_heads` is 2; expected a multiple of 4"),
        (lambda: Attention(4, tensor="tensor", group="tensor"), "`group` is 'tensor', which have replicas in common"),
        (lambda: MLP(10, tensor="tensor"), "`hidden` is 10; expected a multiple of 4"),
        (lambda: MLP(8, tensor="tensors"), "`tensor`"),
    ],
)
def test_mistakes(make: Any, message: str) -> None:
    with popxl.Ir(axes={"data": 2, "tensor": 4}).main_graph, pytest.raises(ValueError, match=message):
        make().create_graph(popxl.TensorSpec((2, 5, 48), popxl.float32))


def test_a_mask_for_each_head_is_refused() -> None:
    with popxl.Ir(axes={"tensor": 2}).main_graph, pytest.raises(ValueError, match="all heads have the same"):
        layer = Attention(4, tensor="tensor")
        layer.create_graph(popxl.TensorSpec((2, 5, 8), popxl.float32), popxl.TensorSpec((2, 4, 5, 5), popxl.bool))


def test_rotary_positions_turn_pairs() -> None:
    rng = np.random.default_rng(0)
    t, first = rng.normal(size=(2, 3, 5, 6)).astype(np.float32), np.array([4, 7], np.int32)
    ir = popxl.Ir()
    with ir.main_graph:
        y = rotary_positions(popxl.variable(t), popxl.constant(first), base=50.0)
        out = popxl.d2h_stream(y.shape, y.dtype)
        ops.host_store(out, y)
    with popxl.Session(ir, "cpu") as session:
        found = session.run()[out]
    angles = (first[:, None] + np.arange(5))[:, None, :, None] * 50.0 ** (-np.arange(3) / 3)
    z = (t[..., :3] + 1j * t[..., 3:]) * np.exp(1j * angles)
    np.testing.assert_allclose(found, np.concatenate([z.real, z.imag], -1), rtol=1e-5, atol=1e-5)
