"""Random programs with random memory plans: for `python -m tests.targets`, where sessions are for a target.

What rolled layers offload lies in the memory of the host, as the compiler says.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl_addons import optimizers
from tests.popxl_addons.test_addons_memory_everywhere import WIDTH, Deep, Drawn

LAYERS, ROWS = 4, 64


def program(seed: int, memory: addons.MemoryPlan | str) -> tuple[popxl.Ir, addons.MemoryPlan]:
    """A step of training a random model, in loops."""
    ir = popxl.Ir()
    ir.options.calledGraphs = "rolled"
    with ir.main_graph, popxl.in_sequence():
        x = popxl.h2d_stream((ROWS, 4, WIDTH), popxl.float32, "x")
        model = Deep(partial(Drawn, seed), LAYERS)
        step = addons.train_step(model, x, optimizer=partial(optimizers.sgd, lr=0.1), memory=memory)  # type: ignore[arg-type]
        addons.host_store(step.loss)
    assert step.memory is not None
    return ir, step.memory


@pytest.mark.parametrize("seed", range(50))
def test_what_loops_offload_is_on_the_host(seed: int) -> None:
    rng = np.random.default_rng(seed)
    _, plan = program(seed, "everything")
    for path in sorted({each.path for graph in plan.graphs for each in graph.activations}):
        plan = plan.with_treatments(str(rng.choice(["keep", "recompute", "offload"])), path)
    ir, plan = program(seed, plan)
    session = popxl.Session(ir, "ipu_model")
    assert [loop.iterations for loop in session.report.loops] == [LAYERS, LAYERS]
    assert session.memory().temporaries_on_host >= plan.bytes("offload")
