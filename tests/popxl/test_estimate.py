"""The estimate for IPUs, against counts by hand from the published figures."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.analysis.estimate import BOW, GC200, Estimate, estimate_of
from popxl.values.spec import size_in_bytes

pytestmark = pytest.mark.compiled_whole  # what XLA makes of programs is what is tested


def cycles(amount: float, each_second: float) -> int:
    return math.ceil(amount * GC200.clock / each_second)


def test_the_figures_are_those_published() -> None:
    assert GC200.tiles * GC200.clock * GC200.products_16 == pytest.approx(250e12, rel=0.01)
    assert GC200.tiles * GC200.clock * GC200.products_32 == pytest.approx(62.5e12, rel=0.01)
    assert GC200.tiles * GC200.clock * GC200.memory == pytest.approx(47.5e12, rel=0.02)
    assert GC200.memory_size == pytest.approx(900e6, rel=0.05)
    assert BOW.tiles * BOW.clock * BOW.products_16 == pytest.approx(350e12, rel=0.01)


@pytest.mark.parametrize(("dtype", "width"), [(popxl.float16, 2), (popxl.float32, 4)])
def test_a_product(ir: popxl.Ir, dtype: popxl.dtype, width: int) -> None:
    with ir.main_graph:
        _ = popxl.variable(np.ones((512, 1024)), dtype) @ popxl.variable(np.ones((1024, 2048)), dtype)
    estimate = estimate_of(ir)
    flops = 2 * 512 * 1024 * 2048
    operands = width * (512 * 1024 + 1024 * 2048)
    computing = math.ceil(flops / 1472 / (128 if width == 2 else 32))
    assert [(op.op, op.count, op.flops, op.bound) for op in estimate.ops] == [("MatMul", 1, flops, "compute")]
    assert estimate.cycles == computing + cycles(operands, 8e12)
    (only,) = estimate.ipus
    assert (only.variables, only.temporaries) == (operands, width * 512 * 2048)
    assert only.share == only.memory / GC200.memory_size < 1 and estimate.fits
    assert only.seconds == estimate.cycles / 1.33e9
    assert estimate_of(ir, BOW).ipus[0].seconds == pytest.approx(only.seconds * 1.33 / 1.85, rel=0.01)


def test_elementwise_ops_stay_where_they_are_and_others_move(ir: popxl.Ir) -> None:
    with ir.main_graph:
        x = popxl.variable(np.ones((1000, 1000)), popxl.float32)
        ops.exp(x)
        ops.transpose(x)
        ops.reshape_(x, (-1,))
    exp, transpose, view = (next(o for o in estimate_of(ir).ops if o.op.startswith(n)) for n in ("Exp", "Tr", "Resh"))
    touched = math.ceil(2 * 4e6 / 24 / 1472)
    assert exp.cycles == max(touched, math.ceil(4e6 / 8 / 1472))
    assert (transpose.cycles, transpose.bound) == (touched + cycles(4e6, 8e12), "exchange")
    assert (view.cycles, view.bound) == (0, "nothing")


def test_what_comes_from_outside() -> None:
    ir = popxl.Ir(replication=2)
    with ir.main_graph, popxl.in_sequence():
        x = ops.host_load(popxl.h2d_stream((1000, 100), popxl.float32))
        buffer = popxl.remote_buffer((1000, 100), popxl.float32, 3)
        loaded = ops.remote_load(buffer, 0)
        ops.remote_store(buffer, 1, ops.collectives.replicated_all_reduce(x))
        ops.host_store(popxl.d2h_stream((1000, 100), popxl.float32), loaded)
        with popxl.ipu(1):
            ops.exp(loaded.copy_to_ipu(1))
    by_op = {op.op: (op.cycles, op.bound) for op in estimate_of(ir).ops}
    for name, speed, bound in (
        ("HostLoad", 64e9, "host"),
        ("HostStore", 64e9, "host"),
        ("RemoteLoad", 20e9, "streaming memory"),
        ("RemoteStore", 20e9, "streaming memory"),
        ("ReplicatedAllReduce", 320e9, "links"),
        ("IpuCopy", 320e9, "links"),
    ):
        assert by_op[name] == (cycles(4e5, speed), bound)


def test_ipus_have_their_own_ops_and_memory(ir: popxl.Ir) -> None:
    with ir.main_graph:
        with popxl.ipu(0):
            w = popxl.variable(np.ones((30, 10)), popxl.float32)
            x = ops.exp(w).copy_to_ipu(1)
        with popxl.ipu(1):
            v = popxl.variable(np.ones((30, 10)), popxl.float16)
            ops.sum(ops.cast(v, popxl.float32) + x)
    first, second = estimate_of(ir).ipus
    assert (first.ipu, first.variables, second.ipu, second.variables) == (0, 1200, 1, 600)
    assert first.temporaries == 1200  # what exp makes
    assert second.temporaries == 3 * 1200  # the copy, the cast value, their sum
    assert estimate_of(ir).cycles == max(first.cycles, second.cycles)


def test_calls_and_loops_count_with_their_runs(ir: popxl.Ir) -> None:
    with ir.main_graph:
        x = popxl.variable(np.ones((64, 64)), popxl.float32)
        graph = ir.create_graph(lambda x: x @ x, x)
        ops.call(graph, *ops.repeat(graph, 5, x))
    (product,) = (op for op in estimate_of(ir).ops if op.op == "MatMul")
    assert (product.graph, product.count, product.flops) == (graph.name, 6, 6 * 2 * 64**3)


def test_a_program_that_does_not_fit(ir: popxl.Ir) -> None:
    with ir.main_graph:
        x = popxl.variable(np.ones(100), popxl.float32)
        _ = x + x
    small = replace(GC200, name="small", tiles=1, tile_memory=700)
    estimate = estimate_of(ir, small)
    assert not estimate.fits and estimate.ipus[0].share == (400 + 400) / 700
    assert "does not fit" in str(estimate).replace("\n ", "")
    assert "An estimate for one replica on the small" in str(estimate)
    assert Estimate.model_validate(estimate.model_dump()) == estimate


@pytest.mark.here
def test_the_estimate_is_in_the_report_of_the_model(ir: popxl.Ir) -> None:
    with ir.main_graph:
        ops.exp(popxl.variable(np.ones(100), popxl.float32))
    assert popxl.Session(ir).report.estimate is None
    report = popxl.Session(ir, "ipu_model").report
    assert report.estimate == estimate_of(ir)
    assert "Estimate for IPUs" in str(report) and "nothing was measured" in str(report).replace("\n ", "")


def test_sizes_add_up(ir: popxl.Ir) -> None:
    """On one IPU the count is that of `ir.memory()`."""
    with ir.main_graph:
        x = popxl.variable(np.ones((3, 4)), popxl.float32)
        ops.sum(ops.exp(x) * 2)
    (only,) = estimate_of(ir).ipus
    memory = ir.memory()
    assert (only.variables, only.constants, only.temporaries) == (
        size_in_bytes(x),
        memory.constants,
        memory.temporaries,
    )
