"""Parts of small programs on a mesh of replicas: weights that replicas share or divide, data, gradients, updates."""

import numpy as np

import popxl
from popxl import ops
from popxl_addons.ops.replicated_all_reduce_TP import replicated_all_reduce_identical_inputs

c = ops.collectives
F32 = popxl.float32


def mesh() -> popxl.Ir:
    return popxl.Ir(axes={"data": 2, "tensor": 4})


def fed(*shape: int) -> popxl.Tensor:
    return ops.host_load(popxl.h2d_stream(shape, F32, "x"))


def weight(*shape: int, name: str = "w") -> popxl.Tensor:
    return popxl.variable(np.ones(shape, np.float32), F32, name)


def divided(axis: int, *shape: int, name: str = "w") -> popxl.Tensor:
    """A weight of which each replica along `tensor` has a part."""
    w = popxl.variable(np.ones((4, *shape), np.float32), F32, name, replica_grouping="data")
    w.group_axis = axis
    return w


def gradient() -> tuple[popxl.Tensor, popxl.Tensor]:
    """A weight that all share, and its gradient for own data."""
    w = weight(8, 3)
    x = fed(5, 8)
    return w, ops.matmul(x.T, x @ w)


def update(w: popxl.Tensor, g: popxl.Tensor) -> None:
    ops.scaled_add_(w, g, b=-0.1)


def two_layers() -> popxl.Tensor:
    """The same on all along `tensor`: two layers that are divided along it."""
    x = replicated_all_reduce_identical_inputs(fed(5, 8), group="tensor")
    h = ops.gelu(x @ divided(1, 8, 6, name="up"))
    return c.replicated_all_reduce(h @ divided(0, 6, 8, name="down"), group="tensor")
