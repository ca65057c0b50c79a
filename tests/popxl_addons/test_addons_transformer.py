"""Layers of language models, against torch: blocks and their gradients, rotary positions, caches."""

from typing import Any

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons.layers import MLP, Attention, RMSNorm, TiedEmbedding, TransformerBlock
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.ops.rotary_positions import Stretch

Array = np.ndarray
WIDTH, HEADS, KEY_HEADS, LENGTH = 8, 4, 2, 6


def text(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def turned(t: Any, base: float) -> Any:
    """Rotary positions, as Llama has them."""
    import torch

    half = t.shape[-1] // 2
    angles = torch.outer(torch.arange(t.shape[-2]), base ** (-torch.arange(half) / half))
    sin, cos = angles.sin(), angles.cos()
    a, b = t[..., :half], t[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def in_torch(x: Any, w: dict[str, Any], norm: str, swiglu: bool, rotary: float | None) -> Any:
    """A block, by names of weights."""
    from torch.nn import functional as F

    def linear(name: str, t: Any) -> Any:
        return t @ w[f"{name}.weight"] + w.get(f"{name}.bias", 0)

    def normed(name: str, t: Any) -> Any:
        weight = w[f"{name}.weight"]
        rms = F.rms_norm(t, (WIDTH,), weight, 1e-5)
        return rms if norm == "rms" else F.layer_norm(t, (WIDTH,), weight, w[f"{name}.bias"], 1e-5)

    h = normed("attention_norm", x)
    q, k, v = (
        linear(f"attention.{name}", h).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
        for name in ("query", "key", "value")
    )
    if rotary:
        q, k = turned(q, rotary), turned(k, rotary)
    k, v = (t.repeat_interleave(HEADS // t.shape[1], 1) for t in (k, v))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + linear("attention.output", mixed.transpose(1, 2).flatten(2))
    h = normed("mlp_norm", x)
    up = linear("mlp.up", h)
    inner = F.silu(linear("mlp.gate", h)) * up if swiglu else F.gelu(up, approximate="tanh")
    return x + linear("mlp.down", inner)


def block(norm: str, swiglu: bool, rotary: float | None) -> TransformerBlock:
    attention = Attention(HEADS, KEY_HEADS if rotary else None, rotary=rotary, bias=norm == "layer")
    return TransformerBlock(attention, MLP(12, "swiglu" if swiglu else "gelu", bias=norm == "layer"), norm)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("norm", "swiglu", "rotary"), [("layer", False, None), ("rms", True, 100.0)], ids=["gpt", "llama"]
)
def test_blocks_as_torch(norm: str, swiglu: bool, rotary: float | None) -> None:
    """Results, and the gradients of the text and of each weight."""
    torch = pytest.importorskip("torch")
    x, dy = text(2, LENGTH, WIDTH), text(2, LENGTH, WIDTH, seed=1)
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        facts, graph = block(norm, swiglu, rotary).create_graph(popxl.TensorSpec(x.shape, popxl.float32))
        values = {name: text(*f.shape, seed=i) / 2 for i, (name, f) in enumerate(facts.to_dict().items())}
        variables = {name: popxl.variable(value, name=name) for name, value in values.items()}
        required = [graph.graph.inputs[0], *graph.args.values_flat()]
        grad = graph.autodiff(grads_required=required)
        site = graph.bind(NamedTensors.from_dict(variables)).call_with_info(popxl.variable(x))
        gradients = grad.call(popxl.variable(dy), args=grad.grad_graph_info.inputs_dict(site))
        outs = []
        for t in (site.outputs[0], *gradients):
            outs.append(popxl.d2h_stream(t.shape, t.dtype))
            ops.host_store(outs[-1], t)
    with popxl.Session(ir, "cpu") as session:
        fetched = session.run()
    names = [*graph.args.to_dict()]
    leaf = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    weights = {n: torch.tensor(v, dtype=torch.float64, requires_grad=True) for n, v in values.items()}
    y = in_torch(leaf, weights, norm, swiglu, rotary)
    y.backward(torch.tensor(dy, dtype=torch.float64))
    expected = [y.detach(), leaf.grad, *(weights[name].grad for name in names)]
    for out, wish in zip(outs, expected, strict=True):
        np.testing.assert_allclose(fetched[out], wish.numpy(), rtol=1e-3, atol=1e-4)


def test_what_is_read_piece_by_piece_is_what_is_read_at_once() -> None:
    """With a cache: some places first, then one at a time."""
    x = text(2, LENGTH, WIDTH)
    layer = Attention(HEADS, KEY_HEADS, rotary=100.0)
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        facts, whole = layer.create_graph(popxl.TensorSpec(x.shape, popxl.float32))
        variables = facts.init()
        (at_once,) = whole.bind(variables).call(popxl.variable(x))
        keys, values = (popxl.variable(np.zeros((2, KEY_HEADS, 9, 2)), popxl.float32) for _ in range(2))
        count = popxl.variable(0, popxl.int32)

        parts = []
        for size, start in ((3, 0), (1, 3), (1, 4), (1, 5)):
            new = popxl.constant(x[:, start : start + size])
            _, graph = Reader().create_graph(new, keys, values, count)
            (y,) = graph.bind(NamedTensors(inner=variables)).call(new, keys, values, count)
            parts.append(y)
            ops.add_(count, size)
        joined = ops.concat(parts, 1)
        outs = [popxl.d2h_stream(t.shape, t.dtype) for t in (at_once, joined)]
        for out, t in zip(outs, (at_once, joined), strict=True):
            ops.host_store(out, t)
    with popxl.Session(ir, "cpu") as session:
        found = session.run()
    np.testing.assert_allclose(found[outs[1]], found[outs[0]], rtol=1e-4, atol=1e-5)


class Reader(addons.Module):
    """A layer that changes its cache, which is given by reference."""

    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        self.inner = Attention(HEADS, KEY_HEADS, rotary=100.0, causal=causal)

    # No deferred annotations in this file: `TensorByRef` is read from them.
    def build(
        self,
        x: popxl.Tensor,
        keys: popxl.TensorByRef,
        values: popxl.TensorByRef,
        count: popxl.Tensor,
        mask: popxl.Tensor | None = None,
    ) -> popxl.Tensor:
        return self.inner(x, mask, cache=(keys, values, count))


@pytest.mark.thorough(but_each=3)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", [None, np.bool_, np.float32])
def test_a_cache_shows_what_has_been_read_of_it(causal: bool, kind: Any) -> None:
    """Texts of which 3 and 2 places are in the cache and 2 are read now, beside all of each at once: with a mask, too,
    which says nothing of the places that are still free."""
    known, room, new = np.array([3, 2], np.int32), 9, 2
    x = [text(1, n + new, WIDTH, seed=i) for i, n in enumerate(known)]
    sees = np.random.default_rng(4).random((2, 1, new, room)) < 0.6
    sees[..., 0] = True
    masks = None if kind is None else sees if kind is np.bool_ else np.where(sees, 0.5, -2).astype(np.float32)
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        facts, _ = Attention(HEADS, KEY_HEADS, rotary=100.0).create_graph(
            popxl.TensorSpec((1, 5, WIDTH), popxl.float32)
        )
        inner = NamedTensors(inner=facts.init())
        outs = []

        def read(of: Array, count: Any, mask: Array | None, keys: popxl.Tensor, values: popxl.Tensor) -> popxl.Tensor:
            given = [popxl.constant(of), keys, values, popxl.constant(count, popxl.int32)]
            given += [] if mask is None else [popxl.constant(mask)]
            _, graph = Reader(causal).create_graph(*given)
            (y,) = graph.bind(inner).call(*given)
            return y

        def cache(texts: int, places: int, fill: float) -> list[popxl.Tensor]:
            return [popxl.variable(np.full((texts, KEY_HEADS, places, 2), fill), popxl.float32) for _ in range(2)]

        kept = cache(2, room, 7.0)  # what free places hold may not matter
        for i, n in enumerate(known):
            own = cache(1, n, 0.0)
            read(x[i][:, :n], 0, None, *own)
            for all_texts, one in zip(kept, own, strict=True):
                ops.dynamic_update_(all_texts, popxl.constant([i], popxl.uint32), _placed(one, room), [0], [1], True)
        outs.append(read(np.concatenate([t[:, n:] for t, n in zip(x, known, strict=True)]), known, masks, *kept))
        for i, n in enumerate(known):
            whole = None
            if masks is not None:
                nothing = np.ones((n, n + new), bool) if kind is np.bool_ else np.zeros((n, n + new), np.float32)
                whole = np.concatenate([nothing, masks[i, 0, :, : n + new]])
            given = [popxl.constant(t) for t in (x[i], whole) if t is not None]
            _, graph = Attention(HEADS, KEY_HEADS, rotary=100.0, causal=causal).create_graph(*given)
            (y,) = graph.bind(inner.inner).call(*given)
            outs.append(ops.slice(y, int(n), axis=1))
        streams = [popxl.d2h_stream(t.shape, t.dtype) for t in outs]
        for stream, t in zip(streams, outs, strict=True):
            ops.host_store(stream, t)
    with popxl.Session(ir, "cpu") as session:
        found = session.run()
    for i in range(2):
        np.testing.assert_allclose(found[streams[0]][i], found[streams[1 + i]][0], rtol=1e-4, atol=1e-5)


def _placed(rows: popxl.Tensor, room: int) -> popxl.Tensor:
    """Some rows of a cache, and the free ones after them, with what must not matter."""
    rest = popxl.constant(np.full((*rows.shape[:2], room - rows.shape[2], rows.shape[3]), 7), popxl.float32)
    return ops.concat([rows, rest], 2)


def test_the_gradient_of_a_norm_has_a_gradient() -> None:
    torch = pytest.importorskip("torch")
    x, w, v = text(2, 3, WIDTH), text(WIDTH, seed=1), text(2, 3, WIDTH, seed=2)
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        given = [popxl.variable(array) for array in (x, w)]
        _, graph = RMSNorm().create_graph(given[0])
        back = addons.autodiff(graph, grads_required=graph.graph.inputs[:1])

        def slope(x: popxl.Tensor, w: popxl.Tensor) -> popxl.Tensor:
            site = graph.call_with_info(x, w)
            seed = popxl.constant(np.ones(x.shape), popxl.float32)
            (dx,) = back.call(seed, args=back.grad_graph_info.inputs_dict(site))
            return ops.sum(dx * popxl.constant(v))

        whole = ir.create_graph(slope, *given)
        again = addons.autodiff(whole, grads_provided=whole.outputs[:1])
        site = ops.call_with_info(whole, *given)
        outs = []
        for t in again.call(1.0, args=again.grad_graph_info.inputs_dict(site)):
            outs.append(popxl.d2h_stream(t.shape, t.dtype))
            ops.host_store(outs[-1], t)
    with popxl.Session(ir, "cpu") as session:
        found = session.run()
    leaves = [torch.tensor(array, dtype=torch.float64, requires_grad=True) for array in (x, w)]
    y = torch.nn.functional.rms_norm(leaves[0], (WIDTH,), leaves[1], 1e-6)
    (dx,) = torch.autograd.grad(y.sum(), leaves[0], create_graph=True)
    for out, wish in zip(outs, torch.autograd.grad((dx * torch.tensor(v)).sum(), leaves), strict=True):
        np.testing.assert_allclose(found[out], wish.numpy(), rtol=1e-3, atol=1e-4)


def test_what_is_refused() -> None:
    spec = popxl.TensorSpec((2, LENGTH, WIDTH), popxl.float32)
    with popxl.Ir().main_graph:
        for build, message in [
            (lambda: Attention(4, 3), "`key_heads` is 3; expected a divisor of the 4 heads"),
            (lambda: Attention(3).create_graph(spec), "the width 8 cannot be divided by 3 heads"),
            (
                lambda: Attention(2).create_graph(popxl.TensorSpec((2, 8), popxl.float32)),
                r"expected \(batch, length, width\)",
            ),
            (lambda: MLP(activation="tanh"), "`activation` is 'tanh'"),  # type: ignore[arg-type]
            (lambda: TransformerBlock(Attention(2), MLP(), "batch"), "`norm` is 'batch'"),  # type: ignore[arg-type]
            (lambda: RMSNorm().create_graph(popxl.TensorSpec((), popxl.float32)), "`x` is a scalar"),
        ]:
            with pytest.raises(ValueError, match=message):
                build()  # type: ignore[no-untyped-call]


def test_tied_embeddings_have_one_gradient() -> None:
    tokens = np.array([[1, 0, 2]], np.int32)

    class Bigrams(addons.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = TiedEmbedding(popxl.float32, 5, 3)

        def build(self, tokens: popxl.Tensor) -> popxl.Tensor:
            x, table = self.embedding(tokens)
            return ops.sum(ops.square(x @ table.T))

    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        facts, graph = Bigrams().create_graph(popxl.TensorSpec(tokens.shape, popxl.int32))
        variables = facts.init()
        grad = graph.autodiff(grads_required=graph.args.values_flat())
        site = graph.bind(variables).call_with_info(popxl.constant(tokens))
        (dw,) = grad.call(popxl.constant(1.0), args=grad.grad_graph_info.inputs_dict(site))
        out = popxl.d2h_stream(dw.shape, dw.dtype)
        ops.host_store(out, dw)
    with popxl.Session(ir, "cpu") as session:
        found, w = session.run()[out], session.get_tensor_data(variables.embedding.weight).astype(np.float64)
    x = w[tokens[0]]
    expected = 2 * (x @ w.T).T @ x
    np.add.at(expected, tokens[0], 2 * (x @ w.T) @ w)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_the_gradient_of_rotary_positions_turns_back() -> None:
    """A rotation keeps products: that of a result and its gradient, and that of the operand and its own, are equal."""
    draw = np.random.default_rng(0).standard_normal
    x, g = (draw((2, 3, 5, 8)).astype(np.float32) for _ in range(2))
    ir = popxl.Ir()
    with ir.main_graph:
        t, given, first = popxl.variable(x), popxl.variable(g), popxl.variable(np.array([3, 70]), popxl.int32)
        stretch = Stretch(8.0, length=16)
        graph = ir.create_graph(lambda t, first: addons.ops.rotary_positions(t, first, stretch=stretch), t, first)
        site = ops.call_with_info(graph, t, first)
        info = popxl.transforms.autodiff(graph, grads_required=graph.inputs[:1])
        (dx,) = ops.call(info.graph, given, inputs_dict=info.inputs_dict(site))
        twice = popxl.transforms.autodiff(info.graph, grads_required=info.graph.inputs[:1])
        again = ops.call_with_info(info.graph, given, inputs_dict=info.inputs_dict(site))
        (dg,) = ops.call(twice.graph, t, inputs_dict=twice.inputs_dict(again))
        streams = [addons.host_store(out) for out in (site.outputs[0], dx, dg)]
    with popxl.Session(ir) as session:
        outputs = session.run()
    y, dx_, dg_ = (outputs[stream] for stream in streams)
    np.testing.assert_allclose(np.sum(y * g), np.sum(x * dx_), rtol=1e-4)
    np.testing.assert_allclose(dg_, y, rtol=1e-6)
