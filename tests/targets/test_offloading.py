"""Offloaded activations lie in the memory of the host, as the compiler for a machine with two memories says."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons import optimizers
from popxl_addons.layers import LayerNorm

LAYERS, ROWS, HIDDEN = 3, 8192, 2048


class Layer(addons.Module):
    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        w = self.add_variable_input("w", partial(np.random.normal, 0, 0.1, (x.shape[-1], HIDDEN)), x.dtype)
        return ops.sin(ops.tanh(x @ w)) @ w.T


class Normalised(Layer):
    """A gradient reads the mean of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = LayerNorm()

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        return super().build(self.norm(x))


class Deep(addons.Module):
    def __init__(self, layer: type[addons.Module]) -> None:
        super().__init__()
        self.layer = layer

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        facts, graph = self.layer().create_graph(x)
        for i in range(LAYERS):
            (x,) = graph.bind(self.add_variable_inputs(f"layer{i}", facts)).call(x)
        return ops.mean(x * x)


def program(
    memory: Any,
    way: Any = "rolled",
    layer: type[addons.Module] = Layer,
    rows: int = ROWS,
    dtype: popxl.dtype = popxl.float32,
) -> tuple[popxl.Ir, addons.MemoryPlan]:
    ir = popxl.Ir()
    ir.options.calledGraphs = way
    with ir.main_graph, popxl.in_sequence():
        x = popxl.h2d_stream((rows, 128), dtype, "x")
        step = addons.train_step(Deep(layer), x, optimizer=partial(optimizers.sgd, lr=0.1), memory=memory)
        addons.host_store(step.loss)
    assert step.memory is not None
    return ir, step.memory


@pytest.mark.targets
@pytest.mark.parametrize("target", ["tpu v5e", "gpu h100"])
def test_stacks_of_loops_are_on_the_host(target: str) -> None:
    """The device holds what one layer has offloaded, in its iteration, in place of that of all, also by default."""
    ir, plan = program("everything")
    session = popxl.Session(ir, popxl.Target(target))
    kept = session.memory()
    assert session.report.offloaded is None
    ir, _ = program(plan.with_treatments("offload", "tanh_out", "sin_out"), "auto")
    offloaded = popxl.Session(ir, popxl.Target(target))
    memory = offloaded.memory()
    assert offloaded.report.calls == "rolled" and "Activations are offloaded" in offloaded.report.reason
    stacks = 2 * LAYERS * ROWS * HIDDEN * 4
    assert kept.temporaries_on_host == 0 and memory.temporaries_on_host >= stacks
    assert memory.temporaries <= kept.temporaries - stacks * (LAYERS - 1) / LAYERS
    assert re.search(r"\d+ in a run have other kernels beside them, and \d+ have none", str(offloaded.report.offloaded))


@pytest.mark.targets
def test_loops_on_tpus_copy_vectors_to_the_host() -> None:
    """XLA for TPUs aborts if a loop copies single rows of a matrix in bfloat16."""
    normalised = partial(program, layer=Normalised, rows=1000, dtype=popxl.bfloat16)
    _, plan = normalised("everything")
    ir, _ = normalised(plan.with_treatments("offload", "norm/*mean"))
    assert popxl.Session(ir, popxl.Target("tpu v5e")).memory().temporaries_on_host >= LAYERS * 1000 * 2


@pytest.mark.targets
def test_a_report_warns_where_nothing_is_on_the_host() -> None:
    """Pieces of a plan hand on what they offload in the memory of the device."""
    _, plan = program("everything")
    ir, _ = program(plan.with_treatments("offload", "tanh_out"), "dispatched")
    report = popxl.Session(ir, popxl.Target("gpu h100")).report
    assert str(report.offloaded).startswith("Warning: what the program offloads is in the memory of the device")


@pytest.mark.targets
def test_slots_are_fetched_one_result_ahead() -> None:
    """XLA would fetch all weights at once: for the forward pass, and for the backward pass after it."""
    layers, width = 8, 1024
    ir = popxl.Ir()
    ir.options.calledGraphs = "inlined"
    with ir.main_graph, popxl.in_sequence():
        x = ops.host_load(popxl.h2d_stream((64, width), popxl.float32, "x"))
        buffer = popxl.remote_buffer((width, width), popxl.float32, layers)
        forward = []
        for i in range(layers):
            x = ops.tanh(x @ ops.remote_load(buffer, i))
            forward.append(x)
        for i in reversed(range(layers)):
            w = ops.remote_load(buffer, i)  # before what reads it with the last result
            x = ops.tanh((x * forward[i]) @ w.T)
        addons.host_store(x)
    assert popxl.Session(ir, "gpu h100").memory().temporaries < 4 * width * width * 4


@pytest.mark.targets
@pytest.mark.parametrize("target", ["tpu v5e", "gpu h100"])
def test_slots_are_updated_in_loops(target: str) -> None:
    """State in a remote buffer: no gradients of all layers on the device, and no copy of the buffer anywhere."""
    layers, width = 8, 1024
    ir = popxl.Ir()
    ir.options.calledGraphs = "rolled"
    with ir.main_graph, popxl.in_sequence():
        x = ops.host_load(popxl.h2d_stream((8, width), popxl.float32, "x"))
        ws = [popxl.variable(np.zeros((width, width)), popxl.float32) for _ in range(layers)]
        buffer = popxl.remote_buffer((width, width), popxl.float32, 2 * layers)
        layer = ir.create_graph(lambda x, w: ops.tanh(x @ w), x, ws[0])
        grad = popxl.transforms.autodiff(layer)
        calls = []
        for w in ws:
            calls.append(ops.call_with_info(layer, x, w))
            x = calls[-1].outputs[0]
        found = []
        for call in reversed(calls):
            x, gradient = ops.call(grad.graph, x, inputs_dict=grad.inputs_dict(call))
            found.append(gradient)
        for i, gradient in enumerate(reversed(found)):
            mean, square = (ops.remote_load(buffer, 2 * i + n) for n in range(2))
            ops.scaled_add_(mean, gradient, a=0.9)
            ops.scaled_add_(square, gradient * gradient, a=0.99)
            ops.scaled_add_(ws[i], mean / ops.sqrt(square), b=-0.1)
            for n, t in enumerate((mean, square)):
                ops.remote_store(buffer, 2 * i + n, t)
        addons.host_store(x)
    session = popxl.Session(ir, popxl.Target(target))
    memory, size = session.memory(), width * width * 4
    assert memory.temporaries < layers * size
    assert memory.temporaries_on_host == 0 and memory.buffers_on_host == 2 * layers * size
