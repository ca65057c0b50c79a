"""Attention by cuDNN's kernels: what goes in and out of them, and what they leave to the plain implementation.

Here are no GPUs: plain attention stands in for the kernels. How they are called is seen in what is lowered for GPUs;
their numbers are compared where there is one, by tests of `ops.attention` (docs/contributing.md).
"""

from __future__ import annotations

import json
import re
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from popxl.ops.attention import attended_backward_anew, attention_backward, attention_forward
from runtime import jax_private
from runtime.gpu import attention

HOW = {"causal": True, "scale": 0.3, "dropout": 0.0}


def operands(queries: tuple[int, ...], keys: tuple[int, ...], dtype: Any = jnp.bfloat16) -> list[jax.Array]:
    draw = np.random.default_rng(0).standard_normal
    return [jnp.asarray(draw(shape), dtype) for shape in (queries, keys, keys)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the queries that the kernels are given."""
    shapes: list[tuple[int, ...]] = []

    def forward(q: Any, k: Any, v: Any, bias: Any = None, *, causal: bool, scale: float) -> Any:
        shapes.append(q.shape)
        out, logs = attention_forward.plain(q, k, v, bias, None, causal=causal, scale=scale, dropout=0.0)
        return out.astype(q.dtype), logs

    def backward(g: Any, q: Any, k: Any, v: Any, out: Any, logs: Any, bias: Any = None, **how: Any) -> Any:
        shapes.append(q.shape)
        del how["allocates_workspace"]
        grads = attention_backward.plain(g, q, k, v, out, logs, bias, None, is_part=True, dropout=0.0, **how)
        return tuple(t.astype(q.dtype) for t in grads)

    monkeypatch.setattr(attention, "SHORTEST", 2)
    monkeypatch.setattr(attention, "attend", forward)
    monkeypatch.setattr(attention, "gradients", backward)
    return shapes


@pytest.mark.parametrize(
    ("queries", "keys", "given"),
    [
        ((2, 3, 5, 16), (2, 3, 7, 16), (2, 3, 5, 16)),
        ((2, 6, 5, 16), (2, 3, 5, 16), (2, 6, 5, 16)),
        ((3, 2, 4, 5, 8), (3, 2, 2, 5, 8), (6, 4, 5, 8)),
        ((4, 5, 8), (4, 5, 8), (1, 4, 5, 8)),
        ((5, 8), (7, 8), (1, 1, 5, 8)),
    ],
    ids=["heads", "shared keys", "several dimensions", "no batch", "no heads"],
)
def test_shapes(queries, keys, given, calls) -> None:
    q, k, v = operands(queries, keys)
    out, logs = attention.attention_forward(q, k, v, None, None, **HOW)
    expected = attention_forward.plain(q, k, v, None, None, **HOW)
    np.testing.assert_allclose(np.float32(out), np.float32(expected[0].astype(out.dtype)), rtol=1e-2, atol=1e-2)
    np.testing.assert_allclose(logs, expected[1], rtol=1e-5)
    g = jnp.ones_like(out)
    found = attention.attention_backward(g, q, k, v, out, logs, None, None, **HOW)
    for dt, plain in zip(found, attention_backward.plain(g, q, k, v, out, logs, None, None, **HOW), strict=True):
        np.testing.assert_allclose(np.float32(dt), np.float32(plain.astype(dt.dtype)), rtol=0.05, atol=0.05)
    assert calls == [given, given]


@pytest.mark.thorough(but_each=5)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [bool, jnp.bfloat16])
@pytest.mark.parametrize(
    "shape",
    [(), (8,), (6, 8), (1, 8), (6, 1), (2, 1, 1, 8), (4, 6, 8), (2, 1, 6, 8), (3, 2, 4, 6, 8)],
    ids=["one", "row", "queries and keys", "keys", "queries", "texts", "heads", "both", "all"],
)
def test_masks(shape, dtype, causal, calls) -> None:
    """Flags and biases; some queries see no key, and others are far from all that they see."""
    q, k, v = operands((3, 2, 4, 6, 16), (3, 2, 2, 8, 16))
    rng = np.random.default_rng(1)
    flags = np.asarray(rng.random(shape) < 0.6)
    if len(shape) > 1:
        flags[..., :1, :] = False
    mask = jnp.asarray(flags if dtype is bool else np.where(flags, -20 * rng.random(shape), -np.inf), dtype)
    how = HOW | {"causal": causal}
    out, logs = attention.attention_forward(q, k, v, mask, None, **how)
    expected = attention_forward.plain(q, k, v, mask, None, **how)
    np.testing.assert_allclose(np.float32(out), np.float32(expected[0].astype(out.dtype)), rtol=1e-2, atol=1e-2)
    np.testing.assert_allclose(logs, expected[1], rtol=1e-5)
    assert np.isinf(logs).any() or shape[-2:-1] in ((), (1,))
    g = jnp.ones_like(out)
    found = attention.attention_backward(g, q, k, v, out, logs, mask, None, **how)
    for dt, plain in zip(found, attention_backward.plain(g, q, k, v, out, logs, mask, None, **how), strict=True):
        np.testing.assert_allclose(np.float32(dt), np.float32(plain.astype(dt.dtype)), rtol=0.05, atol=0.05)
    assert calls == [(6, 4, 6, 16)] * 2


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_masks_of_numbers_far_below_zero(dtype, calls) -> None:
    """As models hide padding: queries that see such keys alone see them equally, and none that is hidden altogether."""
    q, k, v = operands((2, 4, 6, 16), (2, 2, 8, 16), dtype)
    far = float(jnp.finfo(dtype).min)
    mask = np.zeros((6, 8))
    mask[:, 5:], mask[1], mask[2], mask[2, 3:5], mask[3, :4] = -np.inf, far, -np.inf, far, far
    mask = jnp.asarray(mask, dtype)
    how = HOW | {"causal": False}
    out, logs = attention.attention_forward(q, k, v, mask, None, **how)
    expected = attention_forward.plain(q, k, v, mask, None, **how)[0]
    np.testing.assert_allclose(np.float32(out), np.float32(expected.astype(dtype)), rtol=1e-2, atol=1e-2)
    g = jnp.asarray(np.random.default_rng(3).standard_normal(out.shape), dtype)
    found = attention.attention_backward(g, q, k, v, out, logs, mask, None, **how)
    for dt, plain in zip(found, attention_backward.plain(g, q, k, v, out, logs, mask, None, **how), strict=True):
        np.testing.assert_allclose(np.float32(dt), np.float32(plain.astype(dtype)), rtol=0.05, atol=0.05)
    assert len(calls) == 2


@pytest.mark.parametrize("mask", [None, (3, 1, 1, 1, 6), (6, 6)], ids=["no mask", "of each", "the same"])
def test_replicas_on_one_device_are_a_larger_batch(mask, calls) -> None:
    """Also where some operands are the same for all."""
    several, alone = operands((3, 2, 4, 6, 8), (3, 2, 4, 6, 8)), operands((2, 4, 6, 8), (2, 4, 6, 8))
    masks = None if mask is None else jnp.asarray(np.random.default_rng(2).random(mask) < 0.5)
    is_of_each = mask is not None and len(mask) == 5
    forward = partial(attention.attention_forward, seed=None, **HOW)
    out, _ = jax.vmap(forward, (0, None, 0, 0 if is_of_each else None))(several[0], alone[1], several[2], masks)
    for i in range(3):
        one, _ = forward(several[0][i], alone[1], several[2][i], masks[i] if is_of_each else masks)
        np.testing.assert_array_equal(np.float32(out[i]), np.float32(one))
    assert calls[-4] == (6, 4, 6, 8)


def test_a_gpu_without_the_kernel_computes_without(calls, monkeypatch, capfd) -> None:
    """It is asked once for each shape, and the log says so. A CPU stands in for it: it has none."""
    monkeypatch.undo()
    q, k, v = operands((2, 3, 64, 16), (2, 3, 64, 16))
    how = HOW | {"device": jax.local_devices(backend="cpu")[0]}
    out, logs = attention.attention_forward(q, k, v, None, None, **how)
    np.testing.assert_array_equal(out, attention_forward.plain(q, k, v, None, None, **HOW)[0])
    dq, _, _ = attention.attention_backward(out, q, k, v, out, logs, None, None, **how)
    np.testing.assert_array_equal(dq, attended_backward_anew(out, q, k, v, out, logs, None, None, **HOW)[0])
    asked = attention._compiles_alone.cache_info().misses
    attention.attention_forward(q, k, v, None, None, **how)
    assert attention._compiles_alone.cache_info().misses == asked and calls == []
    assert capfd.readouterr().err.count("(2, 3, 64, 16) is computed without cuDNN, which has no kernel for it: ") == 1


@pytest.mark.parametrize(
    ("shape", "dtype", "mask", "dropout"),
    [
        ((2, 5, 16), jnp.float32, None, 0.0),
        ((2, 5, 16), jnp.bfloat16, np.ones((5, 5), bool), 0.0),
        ((2, 6, 16), jnp.bfloat16, np.zeros((6, 6), np.float32), 0.0),
        ((1, 64, 8), jnp.bfloat16, np.ones((64, 64), bool), 0.0),
        ((2, 4, 1, 64, 8), jnp.bfloat16, np.ones((2, 1, 1, 64, 1), bool), 0.0),
        ((2, 5, 16), jnp.bfloat16, None, 0.5),
        ((2, 5, 12), jnp.bfloat16, None, 0.0),
        ((2, 5, 136), jnp.float16, None, 0.0),
        ((2, 0, 16), jnp.bfloat16, None, 0.0),
        ((2, 1, 16), jnp.bfloat16, None, 0.0),
    ],
    ids=[
        "float32",
        "odd",
        "rounded",
        "large",
        "large in a batch",
        "dropout",
        "channels",
        "many channels",
        "nothing",
        "short",
    ],
)
def test_what_has_no_kernel(shape, dtype, mask, dropout, calls) -> None:
    q, k, v = operands(shape, shape, dtype)
    how = HOW | {"dropout": dropout}
    given = (None if mask is None else jnp.asarray(mask), jnp.asarray([1, 2], jnp.uint32))
    out, logs = attention.attention_forward(q, k, v, *given, **how)
    np.testing.assert_array_equal(out, attention_forward.plain(q, k, v, *given, **how)[0])
    dq, _, _ = attention.attention_backward(out, q, k, v, out, logs, *given, **how)
    assert dq.shape == q.shape and calls == []


@pytest.mark.parametrize(
    ("capability", "version", "found"),
    [("9.0", 91002, True), ("8.0", 90000, True), ("7.5", 91002, False), ("9.0", 0, False), ("gfx942", 91002, False)],
)
def test_which_gpus(capability, version, found, monkeypatch) -> None:
    """One that is absent has cuDNN."""
    monkeypatch.setattr(jax_private, "cudnn_version", lambda: version)
    device: Any = SimpleNamespace(compute_capability=capability)
    assert bool(attention.overrides(device, is_here=True)) is found
    assert bool(attention.overrides(device, is_here=False)) is (capability in ("9.0", "8.0"))
    assert attention.overrides(SimpleNamespace(), is_here=True) == {}  # type: ignore[arg-type]


@pytest.mark.parametrize(("capability", "called"), [("8.6", 0), ("9.0", 2)])
def test_many_channels(capability, called, calls) -> None:
    """A GPU of the Hopper generation has kernels for up to 256."""
    overrides = attention.overrides(SimpleNamespace(compute_capability=capability), is_here=False)  # type: ignore[arg-type]
    q, k, v = operands((2, 4, 6, 256), (2, 4, 6, 256))
    out, logs = overrides[attention_forward](q, k, v, None, None, **HOW)
    overrides[attention_backward](out, q, k, v, out, logs, None, None, **HOW)
    assert len(calls) == called


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("replicas", [1, 3])
def test_calls(replicas, masked) -> None:
    """Of both kernels, with scores that a mask hides, on any number of replicas, as JAX writes them."""

    def step(q: Any, k: Any, v: Any, mask: Any) -> Any:
        out, logs = attention.attention_forward(q, k, v, mask, None, **HOW)
        return attention.attention_backward(out, q, k, v, out, logs, mask, None, **HOW)

    given = operands((replicas, 2, 4, 64, 32), (replicas, 2, 2, 96, 32))
    mask = jnp.ones((replicas, 2, 1, 1, 96), bool) if masked else None
    text = jax.jit(jax.vmap(step)).trace(*given, mask).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "__cudnn$fmha" in line]
    named = "ScaleBiasSoftmax" if masked else "Softmax"
    assert [re.search(r"fmha(\w*)", call)[1] for call in calls] == [named, f"{named}Backward"]
    texts = 2 * replicas
    bias = f"tensor<{texts}x1x64x96xbf16>, " * masked
    q, k = f"tensor<{texts}x64x4x32xbf16>", f"tensor<{texts}x96x2x32xbf16>"
    dq, dk, logs = f"tensor<{texts}x4x64x32xbf16>", f"tensor<{texts}x2x96x32xbf16>", f"tensor<{texts}x4x64xf32>"
    workspace = 4 * texts * 4 * 64 * (32 + 1)
    for call, types in zip(
        calls,
        (
            f"({q}, {k}, {k}{', ' + bias.removesuffix(', ') if masked else ''}) -> ({dq}, {logs}, tensor<0xui8>)",
            f"({q}, {k}, {k}, {logs}, {q}, {bias}{q}) -> ({dq}, {dk}, {dk}, tensor<{workspace}xui8>)",
        ),
        strict=True,
    ):
        assert call.endswith(types), call
        assert "api_version = 2" in call and "dense<[3, 1, 2, 0]>" in call
        settings = re.search(r'backend_config = "(.*?)", ', call)[1].replace("\\22", '"')
        found = json.loads(settings)["cudnn_fmha_backend_config"]
        assert (found["mask_type"], found["fmha_scale"], found["is_flash_attention"]) == ("CAUSAL", 0.3, True)
        assert found["intermediate_tensor_shape"]["dimensions"] == [f"{texts}", "4", "64", "96"]
        assert sum(name.endswith("_dot_dimension_numbers") for name in found) == (4 if "Backward" in call else 2)
