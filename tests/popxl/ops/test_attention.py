"""Attention over several blocks, dropout, and memory. Of one block, what it means is in the table of ops."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl.transforms import autodiff
from tests.popxl.evaluate import evaluate
from tests.tolerances import assert_near

Array = np.ndarray


def attended(q: Array, k: Array, v: Array, mask: Array | None = None, causal: bool = False) -> Array:
    """In NumPy, by the matrix of scores."""
    times = q.shape[-3] // k.shape[-3]
    k, v = (np.repeat(t, times, axis=-3) for t in (k, v))
    scores = q @ np.swapaxes(k, -1, -2) / np.sqrt(q.shape[-1])
    if mask is not None:
        scores = np.where(mask, scores, -np.inf) if mask.dtype == bool else scores + mask
    if causal:
        scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    powers = np.exp(scores - np.where(np.isinf(top), 0, top))
    total = powers.sum(-1, keepdims=True)
    return np.where(total == 0, 0, powers / np.where(total == 0, 1, total)) @ v


def with_gradients(build: Any, g: Array, *arrays: Array) -> list[Array]:
    """The result of a function of tensors, and the gradients of those that are floats."""

    def both(*ts: popxl.Tensor) -> list[popxl.Tensor]:
        *ts, given = ts
        graph = popxl.gcg().ir.create_graph(build, *ts)
        wanted = [t for t in graph.inputs if t.dtype.is_floating_point]
        info = autodiff(graph, grads_required=wanted)
        site = ops.call_with_info(graph, *ts)
        return [site.outputs[0], *ops.call(info.graph, given, inputs_dict=info.inputs_dict(site))]

    return evaluate(both, *arrays, g)


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", [None, bool, ml_dtypes.bfloat16], ids=["no mask", "bools", "numbers"])
@pytest.mark.parametrize(
    ("queries", "keys"), [((2, 4, 128, 16), (2, 2, 256, 16)), ((3, 70, 64), (3, 70, 64))], ids=["shared", "one text"]
)
def test_halves_as_torch(queries: tuple[int, ...], keys: tuple[int, ...], mask: Any, causal: bool) -> None:
    """Of sizes that libraries have kernels for, on accelerators: results and gradients, rounded to bfloat16."""
    torch = pytest.importorskip("torch")
    q, k, v, g = (
        normal(*shape, seed=i).astype(ml_dtypes.bfloat16) for i, shape in enumerate((queries, keys, keys, queries))
    )

    seen = np.random.default_rng(4).random((*keys[:-3], 1, 1, keys[-2])[-q.ndim :]) < 0.8
    seen[..., 0] = True  # which all queries see
    masks = [] if mask is None else [seen if mask is bool else np.where(seen, 0, -np.inf).astype(mask)]

    def build(q: popxl.Tensor, k: popxl.Tensor, v: popxl.Tensor, *masks: popxl.Tensor) -> popxl.Tensor:
        return ops.attention(q, k, v, *masks, causal=causal)

    found = with_gradients(build, g, q, k, v, *masks)[:4]
    of_torch = [torch.tensor(t.astype(np.float32), requires_grad=True) for t in (q, k, v)]
    visible = torch.tensor(seen | (mask is None)) & torch.ones(queries[-2], keys[-2], dtype=torch.bool).tril(
        0 if causal else keys[-2]
    )
    out = torch.nn.functional.scaled_dot_product_attention(*of_torch, attn_mask=visible, enable_gqa=q.ndim > 3)
    out.backward(torch.tensor(g.astype(np.float32)))
    for actual, expected in zip(found, (out, *(t.grad for t in of_torch)), strict=True):
        assert_near(actual.astype(np.float32), expected.detach().numpy(), 0.02)


@pytest.mark.thorough(but_each=2)
@pytest.mark.parametrize(
    ("causal", "mask"),
    [
        (False, np.random.default_rng(5).random((2, 1, 1030, 700)) < 0.5),
        (True, normal(4, 1, 700, seed=6)),
    ],
    ids=["bools", "numbers and causal"],
)
def test_several_blocks_as_torch(causal: bool, mask: Array | None) -> None:
    """Lengths that blocks do not divide, queries in groups, a query that sees nothing: results and gradients."""
    torch = pytest.importorskip("torch")
    q, k, v = normal(2, 4, 1030, 3), normal(2, 2, 700, 3, seed=1), normal(2, 2, 700, 5, seed=2)
    g = normal(2, 4, 1030, 5, seed=3)
    if mask is not None and mask.dtype == bool:
        mask[0, 0, 3] = False
    masks = [] if mask is None else [mask]
    found = with_gradients(lambda q, k, v, *m: ops.attention(q, k, v, *m, causal=causal), g, q, k, v, *masks)

    tensors = [torch.tensor(t.astype(np.float64) if t.dtype != bool else t) for t in (q, k, v, *masks)]
    for t in tensors:
        t.requires_grad_(t.is_floating_point())
    whole = torch.ones(1030, 700, dtype=torch.bool).tril() if causal else torch.ones(1030, 700, dtype=torch.bool)
    bias = torch.zeros(1030, 700, dtype=torch.float64).masked_fill(~whole, -torch.inf)
    for t in tensors[3:]:
        bias = bias + (t if t.is_floating_point() else torch.zeros(t.shape).masked_fill(~t, -torch.inf))
    heads = [tensors[0], *(t.repeat_interleave(2, 1) for t in tensors[1:3])]
    out = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=bias.broadcast_to(2, 4, 1030, 700))
    out.backward(torch.tensor(g, dtype=torch.float64))
    expected = [out.detach(), *(t.grad for t in tensors if t.is_floating_point())]
    for array, wish in zip(found, expected, strict=True):
        np.testing.assert_allclose(array, wish.numpy(), rtol=2e-4, atol=2e-5)


def test_a_short_text_before_many_keys() -> None:
    """Of the blocks of keys, the queries see the first: results, and gradients, which are zero for the other keys."""
    q, k, v, g = normal(2, 5, 3), normal(2, 700, 3, seed=1), normal(2, 700, 4, seed=2), normal(2, 5, 4, seed=3)
    found = with_gradients(lambda q, k, v: ops.attention(q, k, v, causal=True), g, q, k, v)
    seen = with_gradients(lambda q, k, v: ops.attention(q, k, v, causal=True), g, q, k[:, :5], v[:, :5])
    np.testing.assert_allclose(found[0], attended(q, k, v, causal=True), rtol=1e-5, atol=1e-6)
    for array, some in zip(found, seen, strict=True):
        length = some.shape[1]
        np.testing.assert_allclose(array[:, :length], some, rtol=1e-5, atol=1e-6)
        assert not array[:, length:].any()


def test_a_result_whose_heads_are_merged_is_kept_once() -> None:
    """The gradient of attention reads what the next product reads."""
    torch = pytest.importorskip("torch")
    x, w, g = normal(2, 3, 5, 4), normal(12, 6, seed=1), normal(2, 5, 6, seed=2)

    def merged(x: popxl.Tensor, w: popxl.Tensor) -> popxl.Tensor:
        return ops.attention(x, x, x).transpose((0, 2, 1, 3)).reshape((2, 5, 12)) @ w

    with popxl.Ir().main_graph:
        graph = popxl.gcg().ir.create_graph(merged, *map(popxl.constant, (x, w)))
        kept = [e.fwd_tensor for e in autodiff(graph).expected_inputs if e.is_activation]
    attention, transposed, reshaped = graph.ops[:3]
    assert reshaped.outputs[0] in kept
    assert not {attention.outputs[0], *transposed.outputs}.intersection(kept)
    found = with_gradients(merged, g, x, w)
    of_torch = [torch.tensor(t, requires_grad=True) for t in (x, w)]
    y = torch.nn.functional.scaled_dot_product_attention(*[of_torch[0]] * 3).transpose(1, 2).reshape(2, 5, 12)
    (y @ of_torch[1]).backward(torch.tensor(g))
    _, pull = jax.vjp(lambda *given: jax.tree.leaves(popxl.to_jax(graph)(*given))[0], x, w)
    in_jax = pull(g)
    for a, b, c in zip(found[1:], in_jax, of_torch, strict=True):
        np.testing.assert_allclose(a, c.grad, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(b, c.grad, rtol=1e-4, atol=1e-5)


def test_dropout_overlooks_the_same_keys_in_the_gradient() -> None:
    """With the values as a unit matrix the result is the weights: those that are left are twice as large."""
    length = 600
    q, k, v = normal(length, 4), normal(length, 4, seed=1), np.eye(length, dtype=np.float32)
    seed, g = np.array([7, 1], np.uint32), normal(length, length, seed=2)

    def build(v: popxl.Tensor, q: popxl.Tensor, k: popxl.Tensor, seed: popxl.Tensor) -> popxl.Tensor:
        return ops.attention(q, k, v, dropout=0.5, seed_tensor=seed)

    weights, to_v, to_q, to_k = with_gradients(build, g, v, q, k, seed)
    whole = attended(q[None], k[None], v[None])[0]
    kept = weights != 0
    assert abs(kept.mean() - 0.5) < 0.01
    np.testing.assert_allclose(weights, np.where(kept, 2 * whole, 0), rtol=1e-4)
    np.testing.assert_allclose(to_v, weights.T @ g, rtol=1e-3, atol=1e-5)
    slope = np.where(kept, 2 * g, 0)
    to_scores = whole * (slope - (slope * whole).sum(-1, keepdims=True)) / 2
    np.testing.assert_allclose(to_q, to_scores @ k, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(to_k, to_scores.T @ q, rtol=1e-3, atol=1e-5)


def test_dropout_draws_anew_for_each_score() -> None:
    """Numbers of heads, queries and keys are those of Threefry, each for itself, and rates are what was said."""
    from jax.extend.random import threefry_2x32

    from popxl.ops.kernels.score_dropout import kept_weights
    from popxl.ops.kernels.words import threefry

    key, counts = jax.numpy.uint32([3, 7]), jax.numpy.arange(8, dtype=np.uint32)
    np.testing.assert_array_equal(
        np.concatenate(threefry((key[0], key[1]), (counts[:4], counts[4:]), rounds=20)), threefry_2x32(key, counts)
    )
    rows, keys = np.arange(3000)[:, None], np.arange(1000)
    for seed, rate in ((key, 0.1), (key + 1, 0.5)):
        kept = np.asarray(kept_weights(seed, rows, keys, rate))
        deviation = np.sqrt(rate * (1 - rate))
        for axis, count in ((None, 3e6), (0, 3000), (1, 1000)):
            assert abs(kept.mean(axis) - 1 + rate).max() < 5 * deviation / np.sqrt(count)
        drops = (1 - rate - kept) / deviation
        others = np.asarray(kept_weights(key + 2, rows, keys, rate))
        for a, b in (
            (drops[1:], kept[:-1]),
            (drops[:, 32:], kept[:, :-32]),
            (drops[:, 1:], kept[:, :-1]),
            (drops, others),
        ):
            assert abs((a * (1 - rate - b) / deviation).mean()) < 5 / np.sqrt(3e6)


@pytest.mark.here
def test_memory_grows_with_the_length_not_with_its_square() -> None:
    """Of a program with the gradient, which is compiled, and not run: 32 768 tokens, whose scores would be 4 GiB."""

    def temporaries(length: int) -> int:
        ir = popxl.Ir()
        with ir.main_graph:
            q, k, v, g = (popxl.variable(np.zeros((1, length, 8), np.float32)) for _ in range(4))
            graph = ir.create_graph(lambda q, k, v: ops.attention(q, k, v, causal=True), q, k, v)
            site = ops.call_with_info(graph, q, k, v)
            info = autodiff(graph)
            for t, dt in zip((q, k, v), ops.call(info.graph, g, inputs_dict=info.inputs_dict(site)), strict=True):
                ops.var_updates.accumulate_(t, dt)
        with popxl.Session(ir, "cpu") as session:
            return session.program.temporaries()

    short, long = temporaries(4096), temporaries(32_768)
    assert long < 8.5 * short and long < 64 * 2**20


@pytest.mark.thorough
def test_the_attention_of_jax_as_an_op_is_the_same() -> None:
    """With its gradient: what the docstring names for cuDNN, in the form that every machine has."""
    fused = popxl.OpKind("Fused", partial(jax.nn.dot_product_attention, implementation="xla"))
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        x = popxl.variable(normal(2, 5, 3, 8))

        def ours(x: popxl.Tensor) -> popxl.Tensor:
            t = ops.transpose(x, (0, 2, 1, 3))
            return ops.transpose(ops.attention(t, t, t, causal=True), (0, 2, 1, 3))

        outs = []
        for attention in (ours, lambda x: fused(x, x, x, is_causal=True)):
            graph = ir.create_graph(attention, x)
            site, info = ops.call_with_info(graph, x), autodiff(graph)
            (dx,) = ops.call(info.graph, site.outputs[0], inputs_dict=info.inputs_dict(site))
            for t in (site.outputs[0], dx):
                outs.append(popxl.d2h_stream(t.shape, t.dtype))
                ops.host_store(outs[-1], t)
    with popxl.Session(ir, "cpu") as session:
        found = session.run()
    y, dx, other_y, other_dx = (found[out] for out in outs)
    np.testing.assert_allclose(y, other_y, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dx, other_dx, rtol=1e-4, atol=1e-5)


@pytest.mark.here
@pytest.mark.thorough(but_each=3)
@pytest.mark.parametrize("length", [64, 700])
@pytest.mark.parametrize(("masked", "dropout"), [(False, 0.0), (True, 0.3)], ids=["plain", "masked and dropped"])
def test_a_gradient_that_has_nothing_of_the_forward_pass(length: int, masked: bool, dropout: float) -> None:
    """What accelerators compute, so that no scores are kept: of few channels, of one block and of several."""
    from popxl.ops.attention import attended_backward_anew, attention_backward
    from popxl.ops.attention import attention_forward as forward

    q, k, v, g = (normal(2, 2, length, 4, seed=seed) for seed in range(4))
    mask = np.random.default_rng(5).random((length, length)) < 0.5 if masked else None
    seed = np.uint32([1, 2]) if dropout else None
    how: dict[str, Any] = {"causal": not masked, "scale": 0.5, "dropout": dropout}
    kept = jax.jit(partial(forward, **how))(q, k, v, mask, seed)
    backward, anew = (jax.jit(partial(fn, **how)) for fn in (attention_backward, attended_backward_anew))
    wanted = backward(g, q, k, v, *kept, mask, seed)
    for found, wish in zip(anew(g, q, k, v, *kept, mask, seed), wanted, strict=True):
        np.testing.assert_allclose(found, wish, rtol=1e-4, atol=1e-5)


@pytest.mark.targets
@pytest.mark.parametrize("target", ["tpu v5e", "gpu h100"])
@pytest.mark.parametrize("dtype", [popxl.float32, popxl.bfloat16])
def test_what_is_kept_of_a_layer_is_what_the_program_says(dtype: popxl.dtype, target: str) -> None:
    """Not its scores, which are eight or sixteen times as much; nor what is rounded, as it was before."""

    def temporaries(layers: int) -> tuple[int, int]:
        ir, shape = popxl.Ir(), (32, 512, 64)
        ir.options.calledGraphs, ir.options.precision = "inlined", "default"
        with ir.main_graph, popxl.in_sequence():
            weights = [popxl.variable(popxl.initial.zeros((64, 64)), dtype) for _ in range(3)]
            mask = popxl.variable(popxl.initial.zeros((512, 512)), popxl.float32)

            def network(x: popxl.Tensor, mask: popxl.Tensor, *weights: popxl.Tensor) -> popxl.Tensor:
                for _ in range(layers):
                    x = ops.attention(*(x @ w for w in weights), mask)
                return x

            x = ops.host_load(popxl.h2d_stream(shape, dtype, "x"))
            graph = ir.create_graph(network, x, mask, *weights)
            info = autodiff(graph, grads_required=[graph.inputs[0]])
            site = ops.call_with_info(graph, x, mask, *weights)
            (dx,) = ops.call(info.graph, site.outputs[0], inputs_dict=info.inputs_dict(site))
            ops.host_store(popxl.d2h_stream(shape, dtype, "dx"), dx)
        return popxl.Session(ir, target).memory().temporaries, ir.memory().temporaries

    few, many = temporaries(6), temporaries(12)
    said = many[1] - few[1]
    assert many[0] - few[0] < 1.1 * said * (2 if "tpu" in target else 1)  # 64 channels are half a tile


# The kernel of TPUs --------------------------------------------------------------------------------------------------


@pytest.mark.here
@pytest.mark.thorough(but_each=8)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [(768, 256), (256, 768)])
@pytest.mark.parametrize("keys_at_once", [1, 2, 8])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_the_kernel_of_tpus_computes_the_same(
    causal: bool, lengths: tuple[int, int], keys_at_once: int, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interpreted here: several blocks of queries and keys, which two heads share; gradients in one kernel or two."""
    from jax.experimental.pallas import tpu as pallas

    from popxl.ops.attention import attention_backward
    from popxl.ops.attention import attention_forward as plain
    from runtime.tpu import attention as of_tpus

    bytes_of_sums = 16 * (8 + 4 * np.dtype(dtype).itemsize)
    for name, value in (("QUERIES", 256), ("KEYS", 128), ("SUMS", keys_at_once * 128 * bytes_of_sums)):
        monkeypatch.setattr(of_tpus, f"MOST_{name}", value)
    queries, keys = lengths
    shapes = ((2, 4, queries, 16), (2, 2, keys, 16), (2, 2, keys, 16), (2, 4, queries, 16))
    q, k, v, g = (jax.numpy.asarray(normal(*shape, seed=seed), dtype) for seed, shape in enumerate(shapes))
    how = {"causal": causal, "scale": 0.25, "dropout": 0.0}
    with pallas.force_tpu_interpret_mode():
        out, logs = of_tpus.attention_forward(q, k, v, None, None, **how)
        gradients = of_tpus.attention_backward(g, q, k, v, out, logs, None, None, **how)
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype == np.float32 else {"rtol": 0.02, "atol": 0.03}
    wide = [np.asarray(t, np.float32) for t in (q, k, v)]
    np.testing.assert_allclose(np.asarray(out, np.float32), attended(*wide, causal=causal), **close)
    kept = plain(q, k, v, None, None, **how)
    np.testing.assert_allclose(logs, kept[1], rtol=1e-5, atol=1e-5)
    for found, wish in zip(gradients, attention_backward(g, q, k, v, *kept, None, None, **how), strict=True):
        assert found.dtype == dtype
        np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(wish, np.float32), **close)


@pytest.mark.here
@pytest.mark.thorough(but_each=9)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [bool, np.float32])
@pytest.mark.parametrize(
    "shape",
    [(), (256,), (2, 1, 1, 256), (2, 4, 1, 256), (1, 256, 256), (2, 1, 256, 256), (4, 256, 1)],
    ids=["one", "keys", "texts", "texts and heads", "scores", "scores of texts", "queries of heads"],
)
def test_masks_of_the_kernel_of_tpus(
    shape: tuple[int, ...], dtype: Any, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Interpreted here. Some queries see no key."""
    from jax.experimental.pallas import tpu as pallas

    from popxl.ops.attention import attended_backward_anew
    from popxl.ops.attention import attention_forward as plain
    from runtime.tpu import attention as of_tpus

    monkeypatch.setattr(of_tpus, "MOST_QUERIES", 128)
    monkeypatch.setattr(of_tpus, "MOST_KEYS", 128)
    flags = np.asarray(np.random.default_rng(7).random(shape) < 0.7)
    if shape[-1:] == (256,):
        flags[..., :3] = False  # with a causal mask, the first queries see no others
    mask = flags if dtype is bool else np.where(flags, -5 * np.random.default_rng(8).random(shape), -np.inf)
    mask = jax.numpy.asarray(mask, dtype)
    shapes = ((2, 4, 256, 16), (2, 2, 256, 16), (2, 2, 256, 16), (2, 4, 256, 16))
    q, k, v, g = (jax.numpy.asarray(normal(*shape, seed=seed)) for seed, shape in enumerate(shapes))
    how = {"causal": causal, "scale": 0.25, "dropout": 0.0}
    with pallas.force_tpu_interpret_mode():
        out, logs = of_tpus.attention_forward(q, k, v, mask, None, **how)
        gradients = of_tpus.attention_backward(g, q, k, v, out, logs, mask, None, **how)
    kept = plain(q, k, v, mask, None, **how)
    assert np.isinf(kept[1]).any() == (shape != () and (causal or shape[-1] == 1))
    expected = (*kept, *attended_backward_anew(g, q, k, v, *kept, mask, None, **how))
    for found, wish in zip((out, logs, *gradients), expected, strict=True):
        np.testing.assert_allclose(found, wish, rtol=1e-4, atol=1e-4)


@pytest.mark.here
@pytest.mark.thorough(but_each=8)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_dropout_in_the_kernel_of_tpus(masked: bool, causal: bool, dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same keys are dropped in blocks of any size, forward and backward, as without kernels."""
    from jax.experimental.pallas import tpu as pallas

    from popxl.ops.attention import attention_backward
    from popxl.ops.attention import attention_forward as plain
    from runtime.tpu import attention as of_tpus

    monkeypatch.setattr(of_tpus, "MOST_QUERIES", 128)
    monkeypatch.setattr(of_tpus, "MOST_SUMS", 512 * 16 * 24 if causal else 1)
    shapes = ((1, 2, 256, 16), (1, 1, 512, 16), (1, 1, 512, 16), (1, 2, 256, 16))
    q, k, v, g = (jax.numpy.asarray(normal(*shape, seed=seed), dtype) for seed, shape in enumerate(shapes))
    mask = jax.numpy.asarray(np.arange(512) % 7 != 2) if masked else None
    seed, how = jax.numpy.uint32([5, 6]), {"causal": causal, "scale": 0.25, "dropout": 0.3}
    with pallas.force_tpu_interpret_mode():
        out, logs = of_tpus.attention_forward(q, k, v, mask, seed, **how)
        gradients = of_tpus.attention_backward(g, q, k, v, out, logs, mask, seed, **how)
    kept = plain(q, k, v, mask, seed, **how)
    expected = (*kept, *attention_backward.plain(g, q, k, v, *kept, mask, seed, **how))
    assert not np.allclose(kept[0], plain(q, k, v, mask, seed + 1, **how)[0], atol=0.1)
    for found, wish in zip((out, logs, *gradients), expected, strict=True):
        assert_near(found, wish, 1e-4 if dtype is np.float32 else 3e-2)


@pytest.mark.here
@pytest.mark.thorough(but_each=18)
@pytest.mark.parametrize("queries", [97, 200, 384])
@pytest.mark.parametrize("keys", [130, 600])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("mask", [(), (1, 1), (0, 1)], ids=["no mask", "mask of keys", "mask of scores"])
def test_any_length_in_the_kernel_of_tpus(
    queries: int, keys: int, causal: bool, mask: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks beyond the end of a sequence, of which a kernel reads what is there: NaN in this interpreter."""
    from jax.experimental.pallas import tpu as pallas

    from popxl.ops.attention import attention_backward
    from popxl.ops.attention import attention_forward as plain
    from runtime.tpu import attention as of_tpus

    monkeypatch.setattr(of_tpus, "MOST_QUERIES", 256)
    monkeypatch.setattr(of_tpus, "MOST_KEYS", 256)
    monkeypatch.setattr(of_tpus, "MOST_SUMS", 1)
    shapes = ((1, 2, queries, 16), (1, 1, keys, 16), (1, 1, keys, 16), (1, 2, queries, 16))
    q, k, v, g = (jax.numpy.asarray(normal(*shape, seed=seed)) for seed, shape in enumerate(shapes))
    flags = np.random.default_rng(4).random((queries, keys)) < 0.8
    given = jax.numpy.asarray(flags[tuple(slice(1 if one else None) for one in mask)]) if mask else None
    seed, how = jax.numpy.uint32([5, 6]), {"causal": causal, "scale": 0.25, "dropout": 0.3 if mask else 0.0}
    with pallas.force_tpu_interpret_mode():
        out, logs = of_tpus.attention_forward(q, k, v, given, seed, **how)
        gradients = of_tpus.attention_backward(g, q, k, v, out, logs, given, seed, **how)
    kept = plain(q, k, v, given, seed, **how)
    expected = (*kept, *attention_backward.plain(g, q, k, v, *kept, given, seed, **how))
    for found, wish in zip((out, logs, *gradients), expected, strict=True):
        assert_near(found, wish, 1e-4)


@pytest.mark.targets
@pytest.mark.here
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [popxl.bfloat16, popxl.float32])
def test_dropout_is_taken_by_the_kernels_of_tpus(dtype: popxl.dtype, masked: bool) -> None:
    """Numbers of dropout have room beside the longest blocks, and the most channels. The last block lacks a query.

    The program has numbers of 64 bits, which kernels do not have.
    """
    ir = popxl.Ir()
    with ir.main_graph:
        addons.host_store(ops.host_load(popxl.h2d_stream((4,), popxl.int64, "count")) + 1)
        channels = (128 if masked else 256) * (2 if dtype is popxl.bfloat16 else 1)
        x = ops.host_load(popxl.h2d_stream((2, 4, 1023, min(channels, 256)), dtype, "x"))
        given = [ops.host_load(popxl.h2d_stream((2,), popxl.uint32, "seed"))]
        given += [ops.host_load(popxl.h2d_stream((1023, 1023), popxl.bool, "mask"))] if masked else []

        def attend(t: popxl.Tensor, seed: popxl.Tensor, mask: popxl.Tensor | None = None) -> popxl.Tensor:
            return ops.attention(t, t, t, mask, dropout=0.1, seed_tensor=seed)

        graph = ir.create_graph(attend, x, *given)
        info = autodiff(graph, grads_required=graph.inputs[:1])
        site = ops.call_with_info(graph, x, *given)
        (dx,) = ops.call(info.graph, site.outputs[0], inputs_dict=info.inputs_dict(site))
        ops.host_store(popxl.d2h_stream(dx.shape, dtype), dx)
    (text,) = popxl.Session(ir, "tpu v5e").hlo().values()
    assert "attention_gradients_" in text


@pytest.mark.targets
@pytest.mark.here
@pytest.mark.parametrize(
    ("dtype", "mask", "numbers"),
    [
        (popxl.bfloat16, (2, 1, 1, 1024), popxl.bool),
        (popxl.bfloat16, (1024, 1024), popxl.float32),
        (popxl.float32, (2, 1, 1024, 1024), popxl.bool),
        (popxl.float32, (4, 1024, 1024), popxl.float32),
    ],
)
def test_masks_are_taken_by_the_kernels_of_tpus(dtype: popxl.dtype, mask: tuple[int, ...], numbers: Any) -> None:
    """Blocks of masks have room beside those of operands: of the longest blocks, and the most channels."""
    ir = popxl.Ir()
    with ir.main_graph:
        channels = 128 if dtype is popxl.float32 else 256
        x = ops.host_load(popxl.h2d_stream((2, 4, 1024, channels), dtype, "x"))
        m = ops.host_load(popxl.h2d_stream(mask, numbers, "mask"))
        graph = ir.create_graph(lambda t, m: ops.attention(t, t, t, m, causal=True), x, m)
        info = autodiff(graph, grads_required=graph.inputs[:1])
        site = ops.call_with_info(graph, x, m)
        (dx,) = ops.call(info.graph, site.outputs[0], inputs_dict=info.inputs_dict(site))
        ops.host_store(popxl.d2h_stream(dx.shape, dtype), dx)
    (text,) = popxl.Session(ir, "tpu v5e").hlo().values()
    assert "attention_gradients_" in text


@pytest.mark.here
@pytest.mark.thorough(but_each=2)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_masks_of_numbers_far_below_zero_in_the_kernel_of_tpus(dtype: Any) -> None:
    """As models hide padding. Queries that see such keys alone see them equally."""
    from jax.experimental.pallas import tpu as pallas

    from popxl.ops.attention import attention_backward
    from popxl.ops.attention import attention_forward as plain
    from runtime.tpu import attention as of_tpus

    mask, far = np.zeros((128, 128)), float(ml_dtypes.finfo(ml_dtypes.bfloat16).min)
    mask[:, 100:], mask[1], mask[2], mask[2, 30:50], mask[3, :40], mask[4] = -np.inf, far, -np.inf, far, far, -np.inf
    q, k, v, g = (jax.numpy.asarray(normal(1, 2, 128, 16, seed=seed)) for seed in range(4))
    how = {"causal": False, "scale": 0.25, "dropout": 0.0}
    given = jax.numpy.asarray(mask, dtype)
    with pallas.force_tpu_interpret_mode():
        out, logs = of_tpus.attention_forward(q, k, v, given, None, **how)
        gradients = of_tpus.attention_backward(g, q, k, v, out, logs, given, None, **how)
    kept = plain(q, k, v, given, None, **how)
    expected = (kept[0], *attention_backward.plain(g, q, k, v, *kept, given, None, **how))  # one block, by softmax
    for found, wish in zip((out, *gradients), expected, strict=True):
        np.testing.assert_allclose(found, wish, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "channels", "mask"),
    [
        (np.float32, 256, np.ones((256, 256), bool)),
        (np.float32, 16, np.zeros(256, np.float16)),
        (np.float32, 16, np.ones((2, 4, 256, 1), bool)),
    ],
    ids=["channels", "float16", "broadcast"],
)
def test_masks_that_the_kernel_of_tpus_does_not_take(dtype: Any, channels: int, mask: Array) -> None:
    """Their blocks have no room, no dtype of TPUs, or are larger than the operands as a bias."""
    from runtime.tpu import attention as of_tpus

    q = jax.numpy.asarray(normal(2, 4, 256, channels), dtype)
    how = {"causal": False, "scale": 0.25, "dropout": 0.0}
    assert of_tpus._takes(q, q, q, None, how)  # type: ignore[arg-type]
    assert not of_tpus._takes(q, q, q, jax.numpy.asarray(mask), how)


@pytest.mark.targets
@pytest.mark.here
@pytest.mark.parametrize("target", ["tpu v5e", "gpu h100"])
def test_memory_is_linear_in_the_length_of_a_text(target: str) -> None:
    """With its gradient, up to 32 768 tokens, of which the scores alone would take 8 GiB."""

    def temporaries(length: int) -> int:
        ir = popxl.Ir()
        with ir.main_graph, popxl.in_sequence():
            x = popxl.variable(np.zeros((2, length, 64), ml_dtypes.bfloat16), name="x")
            graph = ir.create_graph(lambda t: ops.attention(t, t, t, causal=True), x)
            info = autodiff(graph)
            site = ops.call_with_info(graph, x)
            (dx,) = ops.call(info.graph, site.outputs[0], inputs_dict=info.inputs_dict(site))
            ops.var_updates.accumulate_(x, dx)
        session = popxl.Session(ir, target)
        if "tpu" in target:
            assert "tpu_custom_call" in str(session.hlo())
        return session.memory().temporaries

    sizes = {length: temporaries(length) for length in (8192, 32768)}
    assert all(size <= 8192 * length for length, size in sizes.items()), sizes
