"""Gradients of the matrix product: against torch, and what they are made of."""

from __future__ import annotations

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.ops.kernels import products
from popxl.transforms import autodiff
from runtime.cpu import kernel_overrides as of_cpus
from tests.popxl.evaluate import evaluate
from tests.tolerances import assert_sums_near

SHAPES = [
    ((2, 3), (3, 4)),
    ((5, 2, 3), (3, 4)),
    ((6, 5, 2, 3), (3,)),
    ((3,), (3, 4)),
    ((3,), (5, 3, 4)),
    ((2, 3), (5, 3, 4)),
    ((3,), (3,)),
    ((6, 1, 2, 3), (5, 3, 4)),
]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_gradients_as_in_torch(dtype) -> None:
    """For float16 as exact as for products in float32 that are rounded once, however many are summed."""
    torch = pytest.importorskip("torch")
    random = np.random.default_rng(0)
    cases = [[random.uniform(-2, 2, shape).astype(dtype) for shape in shapes] for shapes in SHAPES]
    gs = [random.uniform(-2, 2, np.matmul(a, b).shape).astype(dtype) for a, b in cases]

    def build():
        for (a, b), g in zip(cases, gs, strict=True):
            lhs, rhs = popxl.variable(a), popxl.variable(b)
            graph = popxl.gcg().ir.create_graph(ops.matmul, lhs, rhs)
            info = autodiff(graph)
            site = ops.call_with_info(graph, lhs, rhs)
            yield from ops.call(info.graph, popxl.variable(g), inputs_dict=info.inputs_dict(site))

    results = iter(evaluate(build))
    for arrays, g in zip(cases, gs, strict=True):
        tensors = [torch.from_numpy(a.astype(np.float64)).requires_grad_() for a in arrays]
        torch.matmul(*tensors).backward(torch.from_numpy(g.astype(np.float64)))
        sizes = [t.detach().abs().requires_grad_() for t in tensors]
        torch.matmul(*sizes).backward(torch.from_numpy(np.asarray(abs(g), np.float64)))
        for t, size in zip(tensors, sizes, strict=True):
            found, expected = next(results), t.grad.numpy()
            if dtype == "float16":  # one rounding is half of eps
                np.testing.assert_allclose(found, expected, rtol=np.finfo(dtype).eps, atol=1e-5)
            else:
                assert_sums_near(found, expected, size.grad, [a.shape for a in arrays])


def test_weights_get_their_gradient_from_one_product() -> None:
    """Not one for each batch, which are then summed."""
    with popxl.Ir().main_graph:
        x, w = (popxl.variable(np.ones(shape, np.float32)) for shape in ((5, 2, 3), (3, 4)))
        graph = popxl.gcg().ir.create_graph(ops.matmul, x, w)
        info = autodiff(graph, grads_required=graph.inputs[1:])
    made = [op.op_type for op in info.graph.ops]
    assert made.count("MatMul") == 1 and "ReduceSum" not in made


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_form_of_cpus_computes_the_same_gradient_of_weights(dtype: str) -> None:
    random = np.random.default_rng(1)
    g, t = (random.integers(-4, 5, (2, 5, columns)).astype(dtype) for columns in (3, 7))
    expected = np.einsum("abi,abj->ij", g, t, dtype=np.float32)
    for form in (products.weights_gradient.plain, of_cpus.weights_gradient):
        found = form(g, t)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, expected)
