"""Modules that do the same are calls of one graph."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

import poptorch  # noqa: E402  (it needs torch)
import popxl  # noqa: E402
from poptorch.capture import outlining  # noqa: E402
from runtime.plan.loop_rerolling.rerolling import Rerolling  # noqa: E402
from tests.poptorch.models import Encoder, WithLoss  # noqa: E402

torch.set_num_threads(1)  # models are tiny: threads of PyTorch would only wait for each other


def graphs_called(ir: popxl.Ir, count: int) -> list[popxl.Graph]:
    """The graphs that some other graph calls so many times."""
    every = [ir.main_graph]
    for graph in every:
        every += [called for called in graph.called_graphs if called not in every]
    return [each for each in every for graph in every if graph.called_graphs and _calls(graph, each) == count]


def _calls(graph: popxl.Graph, called: popxl.Graph) -> int:
    return sum(called in op.called_graphs for op in graph.ops if op.op_type == "Call")


def stepped(model: torch.nn.Module, outlining: bool = True) -> tuple[torch.nn.Module, poptorch.PoplarExecutor]:
    """A copy of a model after three steps, and what has trained it."""
    model = copy.deepcopy(model)
    options = poptorch.Options()
    options._Popart.set("enableOutlining", outlining)
    executor = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.05))
    random = torch.Generator().manual_seed(0)
    for _ in range(3):
        executor(torch.randn((2, 6, 8), generator=random), torch.randint(4, (2,), generator=random))
    return model, executor


@pytest.mark.thorough
def test_layers_of_an_encoder() -> None:
    """Also where one module does nothing but run another one, with all layers in it."""
    torch.manual_seed(0)
    plain = Encoder(layers=3)
    wrapped = copy.deepcopy(plain)
    wrapped.encoder = torch.nn.Sequential(torch.nn.Sequential(wrapped.encoder))
    inlined, executor = stepped(plain, outlining=False)
    assert graphs_called(poptorch.sessionOf(executor).ir, 3) == []
    for model in (plain, wrapped):
        outlined, executor = stepped(model)
        ir = poptorch.sessionOf(executor).ir
        assert len(graphs_called(ir, 3)) == 2  # a layer, and its gradient
        loops = Rerolling(ir.main_graph, ir.main_graph.variables).loops
        assert [(len(loop.iterations), len(loop.ops)) for loop in loops] == [(3, 1), (3, 1 + 12)]  # a weight, an update
        for ours, expected in zip(outlined.parameters(), inlined.parameters(), strict=True):
            torch.testing.assert_close(ours, expected)


@pytest.mark.thorough
def test_small_modules_are_not_called() -> None:
    model = WithLoss(torch.nn.Flatten(), *(torch.nn.Linear(48, 48) for _ in range(4)), torch.nn.Linear(48, 4))
    assert outlining.SMALLEST > 1
    _, executor = stepped(model)
    assert graphs_called(poptorch.sessionOf(executor).ir, 4) == []


@pytest.mark.thorough
def test_layers_that_differ_in_a_number() -> None:
    """In their attributes, or in constants that they hold."""
    model = Encoder(layers=4)
    for layer in model.encoder.layers[2:]:
        layer.norm1.eps = 1e-3
    _, executor = stepped(model)
    assert len(graphs_called(poptorch.sessionOf(executor).ir, 2)) >= 4  # two of each kind
