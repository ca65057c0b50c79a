"""Recomputation that compilers for targets leave where it belongs: beside the gradients that read it."""

from __future__ import annotations

import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl.analysis.memory import Memory
from popxl.extend.memory import MemoryRequest
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
