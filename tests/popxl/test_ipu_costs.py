"""What IPUs that are devices copy from each other, and how long a run takes that goes through a schedule."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl.analysis.communication import COPY
from runtime.costs.ipu_timing import timing_of

ROWS, WIDTH = 3, 5
SIZE = ROWS * WIDTH * 4


def pipeline(
    steps: int, schedule: str | None = None, stages: int = 3, size: tuple[int, int] = (ROWS, WIDTH), products: int = 1
) -> popxl.Ir:
    """As many products on each IPU."""
    rows, width = size
    ir = popxl.Ir()
    ir.num_host_transfers = steps
    ir.options.placement = "several"
    with ir.main_graph:
        fed = popxl.h2d_stream((rows, width), popxl.float32, "x")
        with addons.pipelined_execution(steps, schedule) as p:
            with p.stage(0), popxl.ipu(0):
                x = ops.host_load(fed)
            for stage in range(stages):
                with p.stage(stage), popxl.ipu(stage):
                    w = popxl.variable(np.full((width, width), 0.1), popxl.float32, f"w{stage}")
                    for _ in range(products):
                        x = ops.tanh(x @ w)
                    if stage < stages - 1:
                        x = x.copy_to_ipu(stage + 1)
                    else:
                        addons.host_store(ops.sum(x))
    return ir


def several(count: int) -> None:
    if len(jax.devices("cpu")) < count:
        pytest.skip("JAX was started with fewer devices")


@pytest.mark.parametrize(
    ("schedule", "steps"), [(None, 8), pytest.param(None, 200, marks=pytest.mark.thorough), ("gpipe", 8), ("1f1b", 8)]
)
def test_a_run_takes_as_long_as_its_schedule(schedule: str | None, steps: int) -> None:
    """A stage takes a second for each micro-batch, and a copy half of one: the pipeline fills and drains."""
    several(3)
    plan = popxl.Session(pipeline(steps, schedule), "ipu_model").program.executable
    names = {piece.structure: piece.name for piece in plan.segments}

    def seconds(structure: object) -> float:
        return float(names[structure].partition(" ×")[2] or 1)

    timing = timing_of(plan, seconds, lambda nbytes: 0.25 + nbytes / (4 * SIZE), {}, 1)
    assert dict(timing.busy) == pytest.approx(dict.fromkeys(range(3), steps))
    assert (timing.copies, timing.copied_bytes) == (2 * steps, 2 * steps * SIZE)
    assert steps + 2 + 2 * 0.5 <= timing.seconds <= steps + 4 + 2 * 0.5  # first and last calls may be one piece


def test_copies_count_in_communication_and_costs() -> None:
    several(3)
    ir = pipeline(8)
    said = ir.communication()
    assert [(c.bytes, c.source, c.destination, c.turns) for c in said.copies] == [(SIZE, 0, 1, 8), (SIZE, 1, 2, 8)]
    assert said.totals == {COPY: (16, 16 * SIZE)} and said.bytes == 16 * SIZE
    assert "IPU 1 to 2" in str(said) and all(c.line.startswith("test_ipu_costs.py:") for c in said.copies)
    session = popxl.Session(ir, "ipu_model")
    sent, cost = session.communication(), session.cost()
    assert sent.copied is not None and not sent.differences
    assert [*sent.copied.model_dump().values()] == [16, 16 * SIZE] * 2
    assert (cost.collectives[COPY].count, cost.collectives[COPY].bytes) == (16, 16 * SIZE)
    assert [each.ipu for each in cost.ipus] == [0, 1, 2]
    ir.options.placement = "one"
    on_one = popxl.Session(ir, "ipu_model")
    assert on_one.communication().copied is None and on_one.cost().ipus == () and not on_one.cost().collectives


def test_an_update_on_another_ipu_is_copied_there_and_back() -> None:
    several(2)
    ir = popxl.Ir()
    ir.options.placement = "several"
    with ir.main_graph, popxl.in_sequence():
        x = popxl.variable(np.ones((7, 2)), popxl.float32, "x")
        with popxl.ipu(0):
            y = ops.tanh(x)
        with popxl.ipu(1):
            x += 1.0
            addons.host_store(y.copy_to_ipu(1) + 1.0)
    with pytest.warns(popxl.errors.CrossingUpdateWarning):
        session = popxl.Session(ir, "ipu_model")
    copied = session.communication().copied
    assert copied is not None and (copied.expected, copied.expected_bytes) == (1, 56)
    assert (copied.compiled, copied.compiled_bytes) == (3, 3 * 56)


@pytest.mark.targets
@pytest.mark.parametrize("target", ["gpu h100:2", "tpu v5e:1x2"])
def test_a_pipeline_is_estimated_by_its_schedule(target: str) -> None:
    cost = popxl.Session(pipeline(8, stages=2, size=(64, 512), products=16), target).cost()
    assert cost.seconds is not None
    busy = [each.seconds or 0 for each in cost.ipus]
    assert max(busy) < cost.seconds < 0.75 * sum(busy)  # both work at the same time
    assert cost.precisions["highest"].seconds == cost.seconds
    assert "waits" in str(cost)


@pytest.mark.targets
@pytest.mark.parametrize(("axes", "over"), [(("stage", "tensor"), "NVLink"), (("tensor", "stage"), "InfiniBand NDR")])
def test_stages_over_hosts(axes: tuple[str, ...], over: str) -> None:
    """Of two hosts with two GPUs each: the axis that is named last stays in a host, the other one crosses."""
    ir = popxl.Ir(axes={name: "ipus" if name == "stage" else 2 for name in axes})
    with ir.main_graph, popxl.in_sequence():
        x = popxl.variable(np.ones((256, 256)), popxl.float32, "x")
        y = ops.collectives.replicated_all_reduce(x @ x, group="tensor")
        y = ops.ipu_copy(y, 1, source=0)
        with popxl.ipu(1):
            ops.host_store(popxl.d2h_stream(y.shape, y.dtype), ops.gelu(y))
    session = popxl.Session(ir, "gpu h100:2x2")
    cost = session.cost()
    assert [axis.over for axis in cost.axes] == [over]
    assert cost.collectives[COPY].bytes == 4 * 256 * 256 and not session.communication().differences
    hosts = [
        [device.process_index for device in terms.replicas.devices]
        for terms in session.program.layout.compile_options.values()
    ]
    assert hosts == ([[0, 0], [1, 1]] if axes[0] == "stage" else [[0, 1], [0, 1]])
