"""Recomputation that compilers for targets leave where it belongs: beside the gradients that read it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl.analysis.memory import Memory
from popxl.extend.memory import MemoryRequest
from popxl_addons import optimizers
from popxl_addons.layers import Linear
from tests.targets.memory_budgets import Residual, compiled


def of_policy(name: str, policy: str) -> Memory:
    """What a program needs on an H100 with a policy for its activations."""
    return compiled(name, "gpu h100", "inlined", False, MemoryRequest(policy)).memory


@pytest.mark.targets
def test_recomputed_layers_wait_for_their_gradients() -> None:
    """XLA moves recomputation whose barrier has lost its gradient beside the forward pass, where it needs more."""
    kept, recomputed = (of_policy("convolutions", policy).temporaries for policy in ("everything", "nothing"))
    assert recomputed < 0.6 * kept


@pytest.mark.targets
def test_a_layer_recomputes_after_all_gradients_of_the_next() -> None:
    """XLA postpones gradients of weights, and keeps their operands beside what the layer before recomputes."""
    kept, recomputed = (of_policy("ring attention", policy).device for policy in ("everything", "nothing"))
    assert recomputed <= 0.35 * kept


@pytest.mark.targets
def test_graphs_that_are_called_again_wait_for_gradients() -> None:
    """As `recompute_graph` without policies calls them: also for the gradient of the layer after."""

    def temporaries(recomputes: bool) -> int:
        ir = popxl.Ir()
        ir.options.calledGraphs = "inlined"
        with ir.main_graph:
            x = ops.host_load(popxl.h2d_stream((16, 64, 32, 32), popxl.bfloat16, "x"))
            facts, graph = Residual(64).create_graph(x)
            gradient = addons.autodiff(graph)
            if recomputes:
                gradient = addons.recompute_graph(gradient)
            layers = [facts.init(f"layer{i}") for i in range(4)]
            sites = []
            for variables in layers:
                sites.append(graph.bind(variables).call_with_info(x))
                (x,) = sites[-1].outputs[:1]
            g = x
            for site in reversed(sites):
                g, *_ = gradient.call(g, args=gradient.grad_graph_info.inputs_dict(site))
            addons.host_store(g)
        return popxl.Session(ir, "gpu h100").memory().temporaries

    assert temporaries(True) < 0.6 * temporaries(False)


@pytest.mark.targets
def test_a_program_with_a_plan_is_compiled_as_the_plan_was_made() -> None:
    """With its mode of called graphs, and for its budget, of which the compiler of a TPU knows."""

    def program(memory: Any) -> tuple[popxl.Ir, addons.MemoryPlan]:
        ir = popxl.Ir()
        with ir.main_graph:
            x = popxl.h2d_stream((8, 16), popxl.float32, "x")
            step = addons.train_step(Twice(), x, optimizer=partial(optimizers.sgd, lr=0.1), memory=memory)
            addons.host_store(step.loss)
        return ir, step.memory

    _, plan = program("nothing")
    plan = plan.model_copy(update={"budget": 3 << 30, "called_graphs": "inlined"})
    assert "It was made for 3.22 GB of a device, with called graphs inlined." in str(plan)
    ir, applied = program(addons.MemoryPlan.model_validate_json(plan.model_dump_json()))
    assert applied == plan and (ir.options.memoryBudget, ir.options.plannedCalls) == (3 << 30, "inlined")
    session = popxl.Session(ir, "tpu v5e")
    assert session.program.layout.compile_target.compile_options == {
        "xla_tpu_scheduler_percent_shared_memory_limit": "20"  # of 15.75 GiB
    }
    assert session.memory().device > 0
    assert session.report.reason == "The memory plan was made for 'inlined'."
    assert popxl.Session(ir, "cpu").report.calls == "kept"
    options = popxl.Session(ir, "gpu h100").program.layout.compile_target.compile_options
    assert options["xla_gpu_memory_limit_slop_factor"] == "4"  # of four fifths of 85 GB
    assert options["xla_disable_hlo_passes"] == "rematerialization"


class Twice(addons.Module):
    """Two calls of a graph."""

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        facts, graph = Linear(16).create_graph(x)
        for name in ("first", "second"):
            (x,) = graph.bind(self.add_variable_inputs(name, facts)).call(x)
        return ops.mean(x * x)
