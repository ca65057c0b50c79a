"""Arguments of kinds that nothing can be made of: the error says which argument, what it must be and what came."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl_addons.named_tensors import print_named_tensors
from popxl_addons.patterns import apply_pre_alias_patterns
from popxl_addons.transforms import PipelineSchedule
from popxl_addons.transforms.repeat_graph import repeat_graph

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
    "a graph for a module": (
        lambda m: Linear().call_module(m.graph),
        "call_module: `module` must be a popxl_addons.Module, .*; got <.*GraphWithNamedArgs",
    ),
    "a tensor by name": (
        lambda m: Linear().call_module(Linear())(x=m.x),
        r"call_module: the tensors \['x'\] are given by name; give them by position",
    ),
    "several factories for one": (
        lambda m: Linear().add_variable_factory(m.facts),
        "Linear.add_variable_factory: `variable_f` must be a VariableFactory; .*`add_variable_inputs`; got Named",
    ),
    "a number for a gradient graph": (
        lambda m: addons.autodiff(m.graph, called_graphs_grad_info={m.graph: 1}),
        r"Expected a gradient graph, .*; got 1 \(int\)",
    ),
    "a graph for gradient information": (
        lambda m: addons.add_recompute_inputs(m.graph),
        "add_recompute_inputs: `grad_info` must be .*; got <.*GraphWithNamedArgs",
    ),
    "a graph with names to be repeated": (
        lambda m: repeat_graph(m.graph, 3),
        "repeat_graph: `graph` must be a popxl.Graph, .*; got <.*GraphWithNamedArgs",
    ),
    "turns": (
        lambda m: repeat_graph(m.graph.graph, "3"),
        "repeat_graph: `repeat_count` must be an integer; got '3'",
    ),
    "nothing bound": (lambda m: addons.BoundGraph(None), "BoundGraph: `graph` must be a popxl.Graph; got None"),
    "placeholders for factories": (
        lambda m: addons.named_variable_buffers(m.args),
        "named_variable_buffers: `factories` must be NamedVariableFactories; `w` is Tensor",
    ),
    "numbers for tensors": (
        lambda m: addons.named_buffers(addons.NamedTensors(w=3)),
        r"named_buffers: `tensors` must be NamedTensors or NamedVariableFactories; `w` is 3 \(int\)",
    ),
    "factories for buffers": (
        lambda m: m.facts.init_remote(m.facts),
        "init_remote: `buffers` must be NamedRemoteBuffers; `w` is <.*VariableFactory",
    ),
    "tensors for buffers": (
        lambda m: addons.load_remote_graph(m.args),
        "load_remote_graph: `buffers` must be NamedRemoteBuffers; `w` is Tensor",
    ),
    "variables for factories": (
        lambda m: addons.NamedVariableFactories(w=m.x).init(),
        "NamedVariableFactories.init: leaves must be VariableFactory; `w` is Variable",
    ),
    "parts": (
        lambda m: addons.VariableFactory(lambda: ONES, popxl.float32, "w", shard_over=None),
        "VariableFactory `w`: `shard_over` must be an integer; got None",
    ),
    "gathered": (
        lambda m: addons.rts.all_gather_replica_sharded_graph({"w": m.x}),
        "all_gather_replica_sharded_graph: `tensors` must be NamedTensors or NamedVariableFactories; got {'w'",
    ),
    "reduced": (
        lambda m: addons.rts.reduce_replica_sharded_graph([m.x]),
        "reduce_replica_sharded_graph: `tensors` must be NamedTensors or NamedVariableFactories; got .Variable",
    ),
    "groups by name": (
        lambda m: addons.rts.reduce_replica_sharded_graph(m.args, shard_groups=[1]),
        r"reduce_replica_sharded_graph: `shard_groups` must be a NamedReplicaGrouping, or None; got \[1\]",
    ),
    "gathered number": (lambda m: addons.rts.gather_replica_sharded_tensor(3), "`t` must be a tensor; got 3"),
    "reduced number": (lambda m: addons.rts.reduce_replica_sharded_tensor(3), "`t` must be a tensor; got 3"),
    "loads": (
        lambda m: addons.batch_serialise(m.graph, 4, None, {}, {}, io_mode="compute"),
        "batch_serialise: `load_handles` must be a dictionary with tensors of the graph as keys; got None",
    ),
    "stores": (
        lambda m: addons.batch_serialise(m.graph, 4, {}, {}, [m.x], io_mode="compute"),
        "batch_serialise: `store_buffers` must be a dictionary",
    ),
    "loads by name": (
        lambda m: addons.batch_serialise(m.graph, 4, {"x": m.x}, {}, {}, io_mode="compute"),
        "batch_serialise: each key of `load_handles` must be a tensor of the graph; got 'x'",
    ),
    "forward": (
        lambda m: addons.batch_serialise_fwd_and_grad(m.graph.graph, m.graph, m.args, 4, {}, {}, {}),
        "batch_serialise_fwd_and_grad: `forward_graph` must be a GraphWithNamedArgs; got",
    ),
    "gradient": (
        lambda m: addons.batch_serialise_fwd_and_grad(m.graph, m.graph.graph, m.args, 4, {}, {}, {}),
        "batch_serialise_fwd_and_grad: `gradient_graph` must be a GraphWithNamedArgs of a gradient; got",
    ),
    "named inputs": (
        lambda m: addons.batch_serialise_fwd_and_grad(m.graph, m.graph, {"w": m.x}, 4, {}, {}, {}),
        "batch_serialise_fwd_and_grad: `named_inputs_for_grad_graph` must be NamedTensors; got {'w'",
    ),
    "factories for named inputs": (
        lambda m: addons.batch_serialise_fwd_and_grad(m.graph, m.graph, m.facts, 4, {}, {}, {}),
        "batch_serialise_fwd_and_grad: `named_inputs_for_grad_graph` must be NamedTensors; `w` is <.*Factory",
    ),
    "loads of both": (
        lambda m: addons.batch_serialise_fwd_and_grad(m.graph, m.graph, m.args, 4, {"x": 3}, {}, {}),
        "batch_serialise_fwd_and_grad: each key of `load_handles` must be a tensor of the graph; got 'x'",
    ),
    "placement": (lambda m: PipelineSchedule.gpipe(3, 4), "`placement` must be a sequence of integers; got 3"),
    "micro-batches": (lambda m: PipelineSchedule.cycles([0, 1], "4"), "`steps` must be an integer; got '4'"),
    "rows": (lambda m: PipelineSchedule([[3]]), r"`rows` must have a row for each device, of pairs.*; got \[\[3\]\]"),
    "needs": (lambda m: PipelineSchedule([[(0, 0)]], 3), "`needs` must be a list with a list of stages.*; got 3"),
    "weights": (lambda m: addons.write_variables_pb(3, {}), "write_variables_pb: `session` must be a Session; got 3"),
    "counted program": (lambda m: addons.total_FLOPs(m.graph), "evaluate_ir_FLOPs: `ir` must be an Ir; got"),
    "patterns": (lambda m: apply_pre_alias_patterns(m.graph), "apply_pre_alias_patterns: `ir` must be an Ir; got"),
    "reached": (lambda m: addons.is_subgraph(m.graph, m.x.graph), "is_subgraph: `parent` must be a popxl.Graph; got"),
    "printed": (lambda m: print_named_tensors({"w": m.x}), "print_named_tensors: `named_tensors` must be NamedTensors"),
    "weights by name": (lambda m: addons.WeightsDict({"x": ONES}), "WeightsDict: each key must be a Variable; got 'x'"),
    "weights in a list": (
        lambda m: addons.WeightsDict({m.x: [1.0]}),
        r"WeightsDict: the value for `x` must be an array; got \[1.0\]",
    ),
    "counted": (lambda m: addons.evaluate_FLOPs(m.graph), "evaluate_FLOPs: `graph` must be a popxl.Graph; got"),
}


@pytest.mark.parametrize("name", CASES)
def test_it_is_told_by_name(model: Any, name: str) -> None:
    call, message = CASES[name]
    with pytest.raises(TypeError, match=message):
        call(model)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda session: session.load_from_session(3), "src"),
        (lambda session: session.load_checkpoint(3), "checkpoint_dir"),
        (lambda session: session.save_checkpoint(None), "checkpoint_dir"),
        (lambda session: addons.write_variables_pb(session, 3), "weights"),
        (lambda session: addons.write_variables_pb(session, {3: ONES}), "each key of `weights"),
    ],
)
def test_it_is_told_of_sessions(call: Callable[[Any], Any], argument: str) -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.variable(ONES, name="x")
        x += 1.0
    session = addons.TaskSession([], [], addons.NamedTensors(x=x), ir=ir)
    with pytest.raises(TypeError, match=f"{argument}` must be .*; got (3|None)"):
        call(session)


def test_no_gradient_graph_and_no_stage(model: Any) -> None:
    """Of the right kind, but no gradient graph; no device at all."""
    with pytest.raises(ValueError, match="`gradient_graph` is `Linear.*`, which is no gradient graph; expected what"):
        addons.batch_serialise_fwd_and_grad(model.graph, model.graph, model.args, 4, {}, {}, {}, io_mode="compute")
    for make in (PipelineSchedule.cycles, PipelineSchedule.gpipe, PipelineSchedule.zero_bubble):
        with pytest.raises(ValueError, match="`placement` has no stage; expected the device of each"):
            make([], 4)


class Scaled(Linear):
    """Its `build` takes a number, too."""

    def build(self, x: popxl.Tensor, factor: float) -> popxl.Tensor:
        return super().build(x) * float(factor)


class Outer(addons.Module):
    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        (y,) = self.call_module(Scaled())(x, 4)
        return y


def test_a_module_is_called_with_numbers_by_position(model: Any) -> None:
    """A number is for `build`, as with `create_graph`; it was taken for the value of an input, too."""
    facts, graph = Outer().create_graph(model.x.spec)
    (y,) = graph.bind(facts.init()).call(model.x)
    out = popxl.d2h_stream(y.shape, y.dtype)
    popxl.ops.host_store(out, y)
    with popxl.Session(model.x.ir, "cpu") as session:
        np.testing.assert_array_equal(session.run()[out], np.full((2, 4), 12.0))
