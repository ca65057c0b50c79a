"""Floating point operations of ops, against counts by hand, and against what XLA counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.analysis.flops import Flops, moved, own_flops


def tensor(*shape: int, dtype: Any = popxl.float32) -> popxl.Tensor:
    return popxl.variable(np.ones(shape), dtype)


def last(build: Callable[[], Any]) -> popxl.op.Op:
    """The op that a function adds last."""
    main = popxl.Ir(replication=4).main_graph
    with main, popxl.in_sequence():
        build()
    return main.ops[-1]


@pytest.mark.parametrize(
    ("build", "products", "others"),
    [
        (lambda: tensor(3, 5) @ tensor(5, 7), 2 * 3 * 5 * 7, 0),
        (lambda: tensor(2, 4, 3, 5) @ tensor(2, 4, 5, 7), 2 * 2 * 4 * 3 * 5 * 7, 0),
        (lambda: ops.conv(tensor(2, 6, 8, 8), tensor(4, 3, 3, 3), groups=2), 2 * 2 * 4 * 6 * 6 * 3 * 3 * 3, 0),
        (lambda: tensor(3, 4) + tensor(4), 0, 12),
        (lambda: ops.add_(tensor(3, 4), tensor(3, 4)), 0, 12),
        (lambda: ops.exp(tensor(3, 4)), 0, 12),
        (lambda: ops.sum(tensor(3, 4), axis=0), 0, 12),
        (lambda: ops.sum(tensor(30, 4), axis=0), 0, 120),
        (lambda: ops.average_pool(tensor(1, 1, 4, 4), (2, 2), (2, 2)), 0, 4 * 4 + 4 + 1),
        (lambda: tensor(3, 5, dtype=popxl.complex64) @ tensor(5, 7, dtype=popxl.complex64), 8 * 3 * 5 * 7, 0),
        (lambda: tensor(3, 4, dtype=popxl.complex64) * tensor(4, dtype=popxl.complex64), 0, 6 * 12),
        (lambda: tensor(3, 4, dtype=popxl.complex64) + tensor(4, dtype=popxl.complex64), 0, 2 * 12),
        (lambda: ops.fft(tensor(3, 4, 8, dtype=popxl.complex64), (1, 2)), 0, 3 * 5 * 32 * 5),
        (lambda: ops.rfft(tensor(3, 8)), 0, 3 * 5 * 8 * 3 // 2),
        (lambda: ops.transpose(tensor(3, 4)), 0, 0),
        (lambda: ops.reshape_(tensor(3, 4), (12,)), 0, 0),
        (lambda: ops.cast(tensor(3, 4), popxl.float16), 0, 0),
        (lambda: ops.cast(tensor(3, 4, dtype=popxl.int32), popxl.int64), 0, 0),
        (lambda: ops.host_load(popxl.h2d_stream((3, 4), popxl.float32)), 0, 0),
        (lambda: ops.collectives.replicated_all_reduce(tensor(3, 4)), 0, 0),
        (lambda: ops.remote_load(popxl.remote_buffer((3, 4), popxl.float32, 2), 0), 0, 0),
        (lambda: ops.print_tensor(tensor(3, 4)), 0, 0),
    ],
)
def test_ops(build: Callable[[], Any], products: int, others: int) -> None:
    assert own_flops(last(build)) == Flops(products, others)


def test_called_graphs_are_not_the_ops_own(ir: popxl.Ir) -> None:
    with ir.main_graph:
        x = tensor(3)
        ops.repeat(ir.create_graph(lambda x: x * 2, x), 5, x)
    assert own_flops(ir.main_graph.ops[-1]) == Flops()


def test_an_op_of_a_user_and_its_gradient() -> None:
    def attend(q: Any, k: Any, *, turns: int) -> Any:
        def turn(q: Any, _: None) -> Any:
            return jax.lax.cond(q[0, 0] > 0, lambda q: jnp.sin(q @ k), lambda q: q, q), None

        return jax.lax.scan(turn, q, length=turns)[0]

    kind = popxl.OpKind("Attend", attend)
    op = last(lambda: kind(tensor(3, 5), tensor(5, 5), turns=7))
    assert own_flops(op) == Flops(products=7 * 2 * 3 * 5 * 5, others=7 * 3 * 5)
    gradients = popxl.Ir()
    with gradients.main_graph:
        graph = gradients.create_graph(lambda a, b: kind(a, b, turns=7), tensor(3, 5), tensor(5, 5))
    (backward, *_) = (op for op in popxl.transforms.autodiff(graph).graph.ops if op.op_type == "AttendGrad")
    assert own_flops(backward).products == 3 * own_flops(op).products  # forwards again, and for each of two operands


@pytest.mark.parametrize("shape", [(3, 5), (6, 2)])
def test_as_many_as_xla_counts(shape: tuple[int, int]) -> None:
    for build in (
        lambda: tensor(*shape) @ tensor(shape[1], 4),
        lambda: tensor(*shape) * tensor(*shape),
        lambda: ops.tanh(tensor(*shape)),
    ):
        op = last(build)
        arrays = [jax.ShapeDtypeStruct(t.shape, t.dtype.as_jax()) for t in op.inputs]
        analysis = jax.jit(op.on_arrays()).lower(*arrays).compile().cost_analysis()
        assert own_flops(op).total == analysis.get("flops", 0) + analysis.get("transcendentals", 0)


def test_bytes_that_are_moved() -> None:
    buffer = [(3, 4), popxl.float16, 2]
    for build, expected in (
        (lambda: ops.remote_load(popxl.remote_buffer(*buffer), 1), 24),
        (lambda: ops.remote_store(popxl.remote_buffer(*buffer), 1, tensor(3, 4, dtype=popxl.float16)), 24),
        (lambda: ops.collectives.replicated_all_gather(tensor(3)), 4 * 12),
        (lambda: ops.collectives.replicated_reduce_scatter(tensor(8)), 32),
    ):
        assert moved(last(build)) == expected
