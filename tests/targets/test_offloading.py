"""Offloaded activations lie in the memory of the host, as the compiler for a machine with two memories says."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons import optimizers

LAYERS, ROWS, HIDDEN = 3, 8192, 2048


class Layer(addons.Module):
    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        w = self.add_variable_input("w", partial(np.random.normal, 0, 0.1, (x.shape[-1], HIDDEN)), x.dtype)
        return ops.sin(ops.tanh(x @ w)) @ w.T


class Deep(addons.Module):
    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        facts, graph = Layer().create_graph(x)
        for i in range(LAYERS):
            (x,) = graph.bind(self.add_variable_inputs(f"layer{i}", facts)).call(x)
        return ops.mean(x * x)


def program(memory: Any) -> tuple[popxl.Ir, addons.MemoryPlan]:
    ir = popxl.Ir()
    ir.options.calledGraphs = "rolled"
    with ir.main_graph, popxl.in_sequence():
        x = popxl.h2d_stream((ROWS, 128), popxl.float32, "x")
        step = addons.train_step(Deep(), x, optimizer=partial(optimizers.sgd, lr=0.1), memory=memory)
        addons.host_store(step.loss)
    assert step.memory is not None
    return ir, step.memory


@pytest.mark.targets
def test_stacks_of_loops_are_on_the_host() -> None:
    ir, plan = program("everything")
    kept = popxl.Session(ir, popxl.Target("tpu v5e")).memory()
    offloaded = popxl.Session(
        program(plan.with_treatments("offload", "tanh_out", "sin_out"))[0], popxl.Target("tpu v5e")
    )
    memory = offloaded.memory()
    stacks = 2 * LAYERS * ROWS * HIDDEN * 4
    assert kept.temporaries_on_host == 0 and memory.temporaries_on_host >= stacks
    assert memory.temporaries <= kept.temporaries - 0.75 * stacks
