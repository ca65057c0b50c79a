"""Convolutions beyond their rows: second derivatives, and derivatives forwards."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import popxl
from popxl import ops

torch = pytest.importorskip("torch")


def conv(t: Any, weight: Any, groups: int) -> Any:
    return ops.conv(t, weight, (2, 1), (1, 0, 2, 1), (1, 2), groups)


def conv_in_torch(t: Any, weight: Any, groups: int) -> Any:
    padded = torch.nn.functional.pad(t, (0, 1, 1, 2))
    return torch.nn.functional.conv2d(padded, weight, stride=(2, 1), dilation=(1, 2), groups=groups)


def transpose(t: Any, weight: Any, groups: int) -> Any:
    return ops.conv_transpose(t, weight, (2, 1), (1, 0, 1, 1), groups=groups, output_padding=(1, 0))


def transpose_in_torch(t: Any, weight: Any, groups: int) -> Any:
    options = {"stride": (2, 1), "groups": groups, "output_padding": (1, 0)}
    return torch.nn.functional.conv_transpose2d(t, weight, **options)[:, :, 1:-1, :-1]


@pytest.mark.thorough(but_each=2)
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(
    ("ours", "theirs", "shape"),
    [(conv, conv_in_torch, (6, 4, 3, 2)), (transpose, transpose_in_torch, (4, 6, 3, 2))],
    ids=["conv", "transpose"],
)
def test_derivatives(ours: Any, theirs: Any, shape: tuple[int, ...], groups: int) -> None:
    random = np.random.default_rng(0)
    shape = (shape[0], shape[1] // groups, *shape[2:])
    t, weight = (random.normal(size=size).astype(np.float32) for size in ((2, 4, 7, 8), shape))
    ir = popxl.Ir()
    with ir.main_graph:
        graph = ir.create_graph(lambda *operands: ours(*operands, groups), *map(popxl.variable, (t, weight)))
    function = popxl.to_jax(graph)

    def loss(t: Any, weight: Any) -> Any:
        (y,) = jax.tree.leaves(function(t, weight))
        return (y**3).sum()

    def size_of_gradient(t: Any, weight: Any) -> Any:
        return sum((g**2).sum() for g in jax.grad(loss, (0, 1))(t, weight))

    operands = [torch.tensor(array, dtype=torch.float64, requires_grad=True) for array in (t, weight)]
    first = torch.autograd.grad((theirs(*operands, groups) ** 3).sum(), operands, create_graph=True)
    second = torch.autograd.grad(sum((g**2).sum() for g in first), operands)
    found = *jax.jit(jax.grad(loss, (0, 1)))(t, weight), *jax.jit(jax.grad(size_of_gradient, (0, 1)))(t, weight)
    for g, expected in zip(found, (*first, *second), strict=True):
        expected = expected.detach().numpy()
        np.testing.assert_allclose(g, expected, atol=1e-5 * np.abs(expected).max())
    along = sum((g * x).sum() for g, x in zip(first, operands, strict=True)).item()
    np.testing.assert_allclose(jax.jit(jax.jvp, static_argnums=0)(loss, (t, weight), (t, weight))[1], along, rtol=1e-5)
