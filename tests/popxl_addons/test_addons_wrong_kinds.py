"""Arguments of kinds that nothing can be made of: the error says which argument, what it must be and what came."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import popxl
import popxl_addons as addons

ONES = np.ones((2, 3), np.float32)


class Linear(addons.Module):
    """A product with weights."""

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        w = self.add_variable_input("w", lambda: np.ones((3, 4)), popxl.float32)
        return x @ w


@pytest.fixture
def model() -> Any:
    """A module's graph, with everything around it."""
    with popxl.Ir().main_graph:
        x = popxl.variable(ONES, name="x")
        facts, graph = Linear().create_graph(x.spec)
        yield SimpleNamespace(x=x, facts=facts, graph=graph, args=graph.args, buffers=addons.named_buffers(facts))


CASES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "factories for a graph": (lambda m: addons.autodiff(m.facts), "Expected a graph, such as `Module.create_graph`"),
    "known gradients": (
        lambda m: addons.autodiff(m.graph, called_graphs_grad_info=[m.graph]),
        "`called_graphs_grad_info` must be a mapping from graphs to gradient graphs; got",
    ),
    "a graph with names for one without": (
        lambda m: addons.GraphWithNamedArgs(m.graph),
        "GraphWithNamedArgs: `graph` must be a popxl.Graph; got",
    ),
    "args of a call": (
        lambda m: m.graph.bind(m.facts.init()).call(m.x, args=[m.x]),
        "BoundGraph: `args` must be a mapping from graph inputs to tensors; got",
    ),
    "accumulated": (
        lambda m: addons.autodiff_with_accumulation(m.graph, ["w"]),
        "each of `tensors_to_accumulate_grads` must be a tensor of the graph; got 'w'",
    ),
    "a list of tensors": (
        lambda m: addons.autodiff_with_accumulation(m.graph, 3),
        "`tensors_to_accumulate_grads` must be a list of tensors; got 3",
    ),
    "from_dict": (
        lambda m: addons.NamedTensors.from_dict([m.x]),
        "from_dict: `d` must be a mapping from names to values",
    ),
    "pack": (lambda m: addons.NamedTensors.pack(["w"], 3), r"pack: `values` must be a list of values; got 3 \(int\)"),
    "remap": (lambda m: m.args.remap(m.x), "remap: `mapping` must be a mapping from tensors to tensors; got"),
    "spec": (lambda m: addons.create_remote_buffer((2, 3)), r"`spec` must be a TensorSpec or a tensor; got \(2, 3\)"),
    "buffers": (lambda m: m.facts.init_remote({"w": 1}), "`buffers` must be NamedRemoteBuffers; got {'w': 1}"),
    "a graph that loads": (lambda m: addons.load_remote_graph(m.facts.w), "`buffers` must be NamedRemoteBuffers; got"),
    "entries": (lambda m: addons.store_remote_graph(m.buffers, 2.0), "`entries` must be an integer; got 2.0"),
    "prefix": (lambda m: m.facts.init(3), r"`prefix` must be a string; got 3 \(int\)"),
    "dtype": (lambda m: addons.VariableFactory(lambda: ONES, "w"), "VariableFactory `None`: `dtype`"),
    "name": (lambda m: addons.VariableFactory(lambda: ONES, None, 3), "The name of a VariableFactory must be a string"),
    "recomputed": (lambda m: addons.recompute_graph(m.graph.graph), "`grad_graph` must be a GraphWithNamedArgs of a"),
    "routed": (
        lambda m: addons.route_tensor_into_graph("x"),
        "route_tensor_into_graph: `tensor` must be a tensor; got 'x'",
    ),
    "steps": (
        lambda m: addons.batch_serial_buffer(m.x, "4"),
        "batch_serial_buffer: `steps` must be an integer; got '4'",
    ),
    "pieces": (lambda m: addons.shard(ONES, None, 0), "The number of parts must be an integer; got None"),
    "axis": (lambda m: addons.shard(ONES, 2, "0"), "`axis` must be an integer; got '0'"),
    "counted": (lambda m: addons.evaluate_FLOPs(m.graph), "evaluate_FLOPs: `graph` must be a popxl.Graph; got"),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_told_by_name(model: Any, name: str) -> None:
    call, message = CASES[name]
    with pytest.raises(TypeError, match=message):
        call(model)
