"""Times of graphs before they are compiled, and of steps of a GPT composed of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.base.pictures import scatter
from popxl.extend.targets import Efficiency, Gpu, graph_time, kernels_of, shipped
from popxl_addons.step_time import gpt_step_time
from tests.targets.gpt_times import EACH, errors, published, rank_correlation, recomputed, report, rows

A100 = shipped(Gpu, "a100").model_copy(update={"efficiency": Efficiency()})
SIZES = {"layers": 4, "hidden": 1024, "heads": 16, "sequence": 1024}


def time_of(build: Any, *specs: popxl.TensorSpec, chip: Gpu = A100) -> Any:
    ir = popxl.Ir(axes={"data": 2, "tensor": 3})
    with ir.main_graph:
        graph = ir.create_graph(build, *specs)
    return graph_time(graph, chip, lambda kind, nbytes, stride, size: 1e-3 * (kind == "all-reduce") + nbytes * 1e-9)


def test_each_product_is_a_kernel_and_elementwise_ops_are_one() -> None:
    """Views are free; the bias and the activation are one kernel, which reads the product and writes the result."""
    x, w = popxl.TensorSpec((2, 48, 64), popxl.float16), popxl.TensorSpec((96, 64), popxl.float16)

    found = time_of(lambda x, w: ops.gelu(x @ w.T + 1.0), x, w)
    flops = 2 * 2 * 48 * 64 * 96
    product = max(flops / 312e12, 2 * (2 * 48 * 64 + 64 * 96 + 2 * 48 * 96) / A100.memory_bandwidth)
    after = 2 * 2 * (2 * 48 * 96) / A100.memory_bandwidth
    assert (found.flops, found.dispatched) == (flops, 2)
    assert found.seconds == pytest.approx(product + after, rel=1e-3)  # the 1.0 is read, too


def test_a_convolution_is_a_product_of_windows_and_a_transform_is_not_elementwise() -> None:
    x, w = popxl.TensorSpec((2, 6, 18, 18), popxl.float32), popxl.TensorSpec((8, 3, 3, 3), popxl.float32)
    ir = popxl.Ir()
    graph = ir.create_graph(lambda x, w: ops.conv(x, w, groups=2), x, w)
    (kernel,) = kernels_of(graph)
    assert kernel.work is not None and kernel.work.sized == [
        (("float32", "default"), 2 * (2 * 8 * 16 * 16) * (3 * 3 * 3), 2, 2 * 16 * 16, 8 // 2, 3 * 3 * 3)
    ]
    found = graph_time(graph, A100, lambda *_: 0.0)
    assert found.flops == kernel.work.sized[0].flops and found.seconds > 0

    c = popxl.TensorSpec((4, 64), popxl.complex64)
    assert time_of(lambda c: ops.fft(c * 2.0, (1,)), c).dispatched == 2


def test_an_operand_that_is_read_twice_moves_once() -> None:
    a, b = (popxl.TensorSpec((64,), popxl.float32) for _ in range(2))
    graph = popxl.Ir().create_graph(lambda a, b: (a * b, a * a), a, b)
    assert [kernel.work.bytes for kernel in kernels_of(graph) if kernel.work] == [3 * 256, 2 * 256]


def test_what_another_op_reads_is_written() -> None:
    spec = popxl.TensorSpec((1024, 256), popxl.float32)
    read = 4 * 1024 * 256 / A100.memory_bandwidth
    together = time_of(lambda x: ops.tanh(ops.tanh(x)), spec)
    apart = time_of(lambda x: (y := ops.tanh(x), ops.tanh(y)), spec)
    assert (together.dispatched, together.seconds) == (1, pytest.approx(2 * read))
    assert (apart.dispatched, apart.seconds) == (1, pytest.approx(3 * read))


def test_a_called_graph_counts_as_often_as_it_runs_and_the_host_may_be_slower() -> None:
    spec = popxl.TensorSpec((1024, 256), popxl.float32)

    def build(x: popxl.Tensor) -> popxl.Tensor:
        body = popxl.gcg().ir.create_graph(lambda x: ops.collectives.replicated_all_reduce(x, group="tensor"), x)
        return ops.repeat(body, 5, x)[0]

    found = time_of(build, spec)
    assert found.seconds == found.network == pytest.approx(5 * (1e-3 + 4 * 1024 * 256 * 1e-9)) and found.dispatched == 5
    slow = A100.model_copy(update={"efficiency": Efficiency(dispatch=1.0)})
    assert time_of(build, spec, chip=slow).seconds == 5.0
    assert kernels_of(popxl.Ir().main_graph) == ()


def test_a_step_is_composed_of_its_parts() -> None:
    one = gpt_step_time(**SIZES, micro_batch=4, global_batch=16)
    assert one.bubble == one.reduction == one.network == 0 and not one.recomputes
    assert one.seconds == pytest.approx(one.pipeline + one.optimizer)
    assert one.chip_hours == pytest.approx(one.seconds / 3600) and 0.05 < one.utilisation < 0.6
    twice = gpt_step_time(**SIZES, micro_batch=4, global_batch=32)
    assert twice.pipeline == pytest.approx(2 * one.pipeline)
    again = gpt_step_time(**SIZES, micro_batch=4, global_batch=16, recompute=True)
    assert 1.1 * one.pipeline < again.pipeline < 1.4 * one.pipeline
    assert gpt_step_time(**SIZES, data=2, micro_batch=4, global_batch=32).pipeline == one.pipeline
    stages = gpt_step_time(**SIZES, pipeline=4, micro_batch=4, global_batch=16)
    assert 3 / 7 < stages.bubble < 0.8 and one.pipeline / 4 < stages.pipeline < one.pipeline


def test_tensor_parallelism_across_hosts_costs_more() -> None:
    within, across = (gpt_step_time(**SIZES, tensor=t, data=16 // t, micro_batch=4, global_batch=32) for t in (8, 16))
    assert across.network > 1.2 * within.network > 0


def test_what_does_not_wait_for_a_collective_hides_it() -> None:
    """The sum of the first product goes on beside the second one; that of the second beside nothing."""

    def build(x: popxl.Tensor, w: popxl.Tensor) -> popxl.Tensor:
        first, second = x @ w, w @ x
        total = ops.collectives.replicated_all_reduce(first, group="tensor")
        return total, ops.collectives.replicated_all_reduce(second, group="tensor")

    spec = popxl.TensorSpec((4096, 4096), popxl.float16)
    product, sent = 2 * 4096**3 / 312e12, 1e-3 + 2 * 4096**2 * 1e-9
    found = time_of(build, spec, spec)
    assert found.network == pytest.approx(2 * sent)
    assert found.seconds == pytest.approx(2 * product + 2 * sent - product)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chips": 7}, r"of 1 chips in all; `chips` is 7"),
        ({"pipeline": 3}, "`layers` is 4; expected a multiple of `pipeline`, which is 3"),
        ({"tensor": 5}, "`heads` is 16; expected a multiple of `tensor`"),
        ({"data": 3}, "`global_batch` is 16; expected a multiple of `data` times `micro_batch`, which is 12"),
    ],
)
def test_layouts_that_cannot_be_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gpt_step_time(**SIZES | {"micro_batch": 4, "global_batch": 16} | changes)


def test_times_are_those_that_were_measured() -> None:
    """On a few of the rows that were not fitted; `python -m tests.targets.gpt_times` takes all."""
    measured = rows()
    some = [row for i, row in enumerate(measured["within a host"]) if i % EACH == 1][::12]
    many = [row for i, row in enumerate(measured["across hosts"]) if i % EACH == 1][::2]
    assert len(some) >= 6 and len(many) >= 3
    assert np.abs(errors(some)).mean() < 0.15 and np.abs(errors(many)).mean() < 0.15
    assert rank_correlation([row.seconds for row in some], [row.foreseen() for row in some]) > 0.9
    alike = [row for row in measured["within a host"] if row.model[:2] == (1024, 12)][:9]
    lines, picture = report({"within a host": alike}, Efficiency())
    assert "| within a host | 9 | 3 |" in lines[-1] and picture.count("<circle") == 9 + 2


@pytest.mark.thorough
def test_published_steps_take_about_the_time_that_is_foreseen() -> None:
    off = [recomputed(row) / row.seconds - 1 for row in published()]
    assert len(off) == 20 and np.abs(off).mean() < 0.1


def test_points_lie_where_their_times_are() -> None:
    drawn = scatter("title", "measured", "estimated", [("a", "p", 1.0, 1.0), ("b", "q", 0.1, 1.0)])
    assert drawn.count("<circle") == 4 and "p: 1 s, 1 s" in drawn and "up: estimated" in drawn
