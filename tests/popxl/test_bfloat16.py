"""bfloat16 on all its ways: through streams, variables, remote buffers, replicas, files, JAX and models.

What ops make of it is in the table of ops, where it is one dtype among others.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.errors import NarrowedNumberWarning
from popxl.transforms import autodiff
from popxl_addons.layers import LayerNorm, Linear
from popxl_addons.optimizers.adam import AdamOptimizerStep
from tests.popxl.evaluate import evaluate, store

BF16 = popxl.bfloat16
ARRAY = ml_dtypes.bfloat16
X = np.random.default_rng(0).uniform(-2, 2, (2, 4, 5)).astype(ARRAY)
W = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)


def layer(x: popxl.Tensor, w: popxl.Tensor) -> popxl.Tensor:
    return ops.relu(x.T @ w) * 0.5


def test_through_a_program_and_its_files(tmp_path: Path) -> None:
    """What two replicas are fed, keep and store is bfloat16; so it is in the files of the program and its session."""
    ir = popxl.Ir(replication=2)
    with ir.main_graph, popxl.in_sequence():
        stream, out = popxl.h2d_stream((4, 5), BF16, "x"), popxl.d2h_stream((5, 3), BF16, "y")
        w = popxl.variable(W, BF16, name="w")
        buffer = popxl.remote_buffer((3,), BF16)
        far = popxl.remote_variable(np.arange(3), buffer, 0, BF16, name="far")
        graph = ir.create_graph(layer, popxl.TensorSpec((4, 5), BF16), w)
        y = ops.collectives.replicated_all_reduce(ops.call(graph, ops.host_load(stream), w)[0])
        near = ops.remote_load(buffer, 0)
        ops.host_store(out, ops.print_tensor(y + near))
        near += popxl.constant(1, BF16)
        ops.remote_store(buffer, 0, near)
    assert "bf16[5, 3]" in str(graph)

    exact = sum(np.maximum(x.astype(np.float64).T @ W.astype(ARRAY).astype(np.float64), 0) for x in X) / 2
    ir.save(tmp_path / "program.json")
    with popxl.Session(ir, "ipu_hw") as session:
        (first,) = session.run({stream: X}).values()
        assert "bf16[5, 3]" in str(session.report) and first.dtype == ARRAY
        np.testing.assert_allclose(first[0].astype(np.float64), exact + np.arange(3), rtol=1e-2, atol=1e-2)
        (second,) = session.run({stream: jnp.asarray(X)}).values()
        np.testing.assert_allclose(second.astype(np.float64), first.astype(np.float64) + 1, atol=2e-2)
        assert session.get_tensor_data(far).tolist() == [2, 3, 4] and far.data.dtype == ARRAY
        session.save(tmp_path / "session")
        with pytest.raises(popxl.errors.PopxlRuntimeError, match="has the dtype float32; expected bfloat16"):
            session.run({stream: X.astype(np.float32)})
    loaded = popxl.Ir.load(tmp_path / "program.json")
    starts = {v.name: v.data for v in loaded.main_graph.variables}
    assert starts["w"].tobytes() == W.astype(ARRAY).tobytes() and starts["far"].tolist() == [0, 1, 2]
    with popxl.Session.load(tmp_path / "session") as again:
        (third,) = again.run({next(iter(again.ir.get_all_h2d_streams())): X}).values()
    np.testing.assert_allclose(third.astype(np.float64), first.astype(np.float64) + 2, atol=4e-2)


def test_host_data() -> None:
    """Of NumPy, of JAX and of PyTorch; numbers beside a tensor; and what is too large."""
    torch = pytest.importorskip("torch")
    numbers = [[1.5, -2.25, 3e38]]
    given = [np.array(numbers, ARRAY), jnp.asarray(numbers, jnp.bfloat16), torch.tensor(numbers, dtype=torch.bfloat16)]
    with popxl.Ir().main_graph:
        variables = [popxl.variable(data) for data in given]
        assert all(v.dtype is BF16 and v.data.tobytes() == given[0].tobytes() for v in variables)
        assert BF16.as_torch() is torch.bfloat16
        beside = variables[0] + 1.1
        assert beside.dtype is BF16
        with pytest.warns(NarrowedNumberWarning, match="1e[+]39 does not fit bfloat16"):
            variables[0] * 1e39
        with pytest.raises(popxl.errors.PopxlError, match="different dtypes, bfloat16 and float16"):
            ops.matmul(variables[0], popxl.variable(np.ones((3, 2), np.float16)))


def test_sums_and_products_are_made_in_float32() -> None:
    """Of many terms, of which a running sum in bfloat16 would lose most; gradients, too."""
    count = 4096
    x = np.random.default_rng(1).uniform(0.5, 1, (2, count)).astype(ARRAY)

    def build(x: popxl.Tensor) -> list[popxl.Tensor]:
        graph = popxl.gcg().ir.create_graph(lambda x: ops.sum(x @ x.T, axis=0), x)
        info = autodiff(graph)
        site = ops.call_with_info(graph, x)
        g = popxl.constant(np.ones(2), BF16)
        return [ops.sum(x), ops.mean(x, 1), x @ x.T, *ops.call(info.graph, g, inputs_dict=info.inputs_dict(site))]

    wide = x.astype(np.float64)
    expected = [wide.sum(), wide.mean(1), wide @ wide.T, 2 * wide.sum(0, keepdims=True).repeat(2, 0)]
    for found, wish in zip(evaluate(build, x), expected, strict=True):
        assert found.dtype == ARRAY
        np.testing.assert_allclose(found.astype(np.float64), wish, rtol=2**-8)


def test_functions_of_jax() -> None:
    def gated(x: jax.Array, w: jax.Array) -> jax.Array:
        y = jnp.dot(x, w, preferred_element_type=jnp.float32)
        return (jax.nn.silu(y) * 2).astype(jnp.bfloat16)

    x, w = jnp.asarray(X[0]), jnp.asarray(X[1].T)
    ir = popxl.Ir()
    graph = ir.create_graph(popxl.from_jax(gated), *(popxl.TensorSpec(a.shape, BF16) for a in (x, w)))
    assert graph.outputs[0].dtype is BF16
    function = popxl.to_jax(graph)
    found, expected = jax.jit(function)(x, w), gated(x, w)
    assert jax.tree.leaves(found)[0].dtype == jnp.bfloat16
    np.testing.assert_allclose(*(np.float32(jax.tree.leaves(a)[0]) for a in (found, expected)), rtol=1e-2)


def test_a_model_is_trained() -> None:
    """Layers have weights in the dtype of what they are given; an optimiser's state is as wide as it says."""
    ir = popxl.Ir()
    x = np.random.default_rng(2).normal(size=(8, 4)).astype(ARRAY)
    with ir.main_graph, popxl.in_sequence():
        data = popxl.variable(x, name="x")
        norm_facts, norm = LayerNorm().create_graph(data)
        facts, linear = Linear(3).create_graph(data)
        weights = facts.init()
        (rows,) = norm.bind(norm_facts.init()).call(data)
        info = linear.autodiff(grads_required=[linear.args.weight])
        site = linear.bind(weights).call_with_info(rows)
        y = site.outputs[0]
        (dw,) = info.call(y, args=info.grad_graph_info.inputs_dict(site))
        step_facts, step = AdamOptimizerStep(cache=True).create_graph(weights.weight, dw, lr=0.5)
        state = step_facts.init("state")
        step.bind(state).call(weights.weight, dw)
        streams = store([y, dw, weights.weight])
    assert {weights.weight.dtype, weights.bias.dtype, dw.dtype} == {BF16}
    assert (state.first_order.dtype, state.second_order.dtype) == (popxl.float16, popxl.float32)
    with popxl.Session(ir, "cpu") as session:
        before = session.get_tensor_data(weights.weight).astype(np.float64)
        outputs = session.run()
    found = [outputs[s].astype(np.float64) for s in streams]
    wide = x.astype(np.float64)
    normed = (wide - wide.mean(1, keepdims=True)) / np.sqrt(wide.var(1, keepdims=True) + 1e-5)
    y = normed @ before
    expected = [y, normed.T @ y, before - 0.5 * np.sign(normed.T @ y)]
    for array, wish, near in zip(found, expected, (1e-3, 1e-2, 1e-2), strict=True):
        np.testing.assert_allclose(array, wish, rtol=2e-2, atol=near)
