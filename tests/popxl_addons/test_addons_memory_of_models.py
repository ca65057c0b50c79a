"""One memory budget for several models of a program: training steps, nested models, and stages of a pipeline."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl.__main__ import main
from popxl.extend.memory import GraphNeeds, OpNeeds, compiled_program, requesting_memory
from popxl_addons import optimizers
from runtime.memory_plans.division import most_gradients
from runtime.memory_plans.solver import keep_all, solve

SHAPE = (4, 32, 16)


class Layer(addons.Module):
    def build(self, x: popxl.Tensor, width: int) -> popxl.Tensor:
        w = self.add_variable_input("w", partial(np.random.normal, 0, 0.1, (x.shape[-1], width)), x.dtype)
        return ops.sin(ops.gelu(ops.tanh(x @ w))) @ w.T


class Layers(addons.Module):
    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.count, self.width = count, width

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        facts, graph = Layer().create_graph(x, self.width)
        for i in range(self.count):
            (x,) = graph.bind(self.add_variable_inputs(f"layer{i}", facts)).call(x)
        return x


class Loss(Layers):
    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        x = super().build(x)
        return ops.mean(x * x)


class Program(NamedTuple):
    """A program, its input streams, and its losses."""

    ir: popxl.Ir
    inputs: list[popxl.HostToDeviceStream]
    losses: list[popxl.DeviceToHostStream]

    def run(self) -> list[Any]:
        """Losses of two runs, on CPUs."""
        rng = np.random.default_rng(1)
        with popxl.Session(self.ir, "ipu_model") as session:
            results = []
            for _ in range(2):
                shapes = [
                    (s, (*([self.ir.num_host_transfers] * (self.ir.num_host_transfers > 1)), *SHAPE))
                    for s in self.inputs
                ]
                values = session.run({s: rng.normal(size=shape).astype(np.float32) for s, shape in shapes})
                results += [values[loss] for loss in self.losses]
        return results


def two_steps(*memories: Any, **how: Any) -> Program:
    """Two training steps, one after the other, of two models with the same name; with the same plan by default."""
    np.random.seed(3)
    ir = popxl.Ir()
    ir.options.calledGraphs = "kept"
    with ir.main_graph:
        streams = [popxl.h2d_stream(SHAPE, popxl.float32, name) for name in "xy"]
        sgd, losses = partial(optimizers.sgd, lr=0.1), []
        for stream, count, width, memory in zip(streams, (4, 3), (128, 192), (memories * 2)[:2], strict=True):
            step = addons.train_step(Loss(count, width), stream, optimizer=sgd, memory=memory, **how)
            losses.append(addons.host_store(step.loss))
    return Program(ir, streams, losses)


def nested(memory: Any) -> Program:
    """A model that another one follows: its activations wait for the gradient of the other."""
    np.random.seed(3)
    ir = popxl.Ir()
    ir.options.calledGraphs = "kept"
    with ir.main_graph, popxl.in_sequence():
        x = popxl.h2d_stream(SHAPE, popxl.float32, "x")
        graphs, variables, gradients = [], [], []
        for module in (Layers(3, 128), Loss(3, 128)):
            facts, graph = module.create_graph(x.spec)
            graphs.append(graph)
            variables.append(facts.init(type(module).__name__))
            wanted = [graph.graph.inputs[0], *graph.args.tensors]
            gradients.append(addons.autodiff(graph, graph.graph.outputs[:1], wanted, memory=memory))
        first = graphs[0].bind(variables[0]).call_with_info(ops.host_load(x))
        last = graphs[1].bind(variables[1]).call_with_info(first.outputs[0])
        g, *others = gradients[1].call(popxl.constant(1.0), args=gradients[1].grad_graph_info.inputs_dict(last))
        _, *more = gradients[0].call(g, args=gradients[0].grad_graph_info.inputs_dict(first))
        for each, values in ((variables[1], others), (variables[0], more)):
            for w, dw in zip(each.tensors, values, strict=True):
                ops.var_updates.accumulate_(w, dw * -0.1)
        loss = addons.host_store(last.outputs[0])
    return Program(ir, [x], [loss])


def pipeline(*memories: Any) -> Program:
    """Two stages with models of their own, on two devices; the first one calls more layers."""
    np.random.seed(3)
    ir = popxl.Ir()
    ir.num_host_transfers = 4
    with ir.main_graph, popxl.in_sequence():
        x = popxl.h2d_stream(SHAPE, popxl.float32, "x")
        stages = []
        for i, (module, memory) in enumerate(zip((Layers(4, 128), Loss(3, 192)), (memories * 2)[:2], strict=True)):
            facts, graph = module.create_graph(x.spec)
            sums, gradient = addons.autodiff_with_accumulation(
                graph, graph.args.tensors, graph.graph.outputs[:1], graph.graph.inputs[:1], memory=memory
            )
            with popxl.ipu(i):
                weights, means = facts.init(f"stage{i}"), sums.init(f"means{i}")
            stages.append((graph.bind(weights), gradient.bind(means), gradient.grad_graph_info, weights, means))
        (forward, backward, info, *_), (forward_1, backward_1, info_1, *_) = stages
        with addons.pipelined_execution(4, "1f1b") as p:
            with p.stage(0), popxl.ipu(0):
                first = forward.call_with_info(ops.host_load(x))
                h = first.outputs[0].copy_to_ipu(1)
            with p.stage(1), popxl.ipu(1):
                last = forward_1.call_with_info(h)
                loss = addons.host_store(last.outputs[0])
                (g,) = backward_1.call(popxl.constant(1.0), args=info_1.inputs_dict(last))
                g = g.copy_to_ipu(0)
            with p.stage(2), popxl.ipu(0):
                backward.call(g, args=p.stash_and_restore_activations(first, info))
        for i, (*_, weights, means) in enumerate(stages):
            with popxl.ipu(i):
                optimizers.sgd(weights, means.accum, lr=0.1)
                ops.var_updates.accumulator_zero_(means.mean_accum_counter)
    return Program(ir, [x], [loss])


def twice(memory: Any) -> Program:
    """A model with two gradients, as a discriminator has in the steps of both players."""
    np.random.seed(3)
    ir = popxl.Ir()
    ir.options.calledGraphs = "kept"
    with ir.main_graph, popxl.in_sequence():
        x = popxl.h2d_stream(SHAPE, popxl.float32, "x")
        facts, graph = Loss(3, 128).create_graph(x.spec)
        variables, loaded, losses = facts.init(), ops.host_load(x), []
        for wanted in (graph.args.tensors, graph.graph.inputs[:1]):
            gradient = addons.autodiff(graph, graph.graph.outputs[:1], wanted, memory=memory)
            site = graph.bind(variables).call_with_info(loaded)
            results = gradient.call(popxl.constant(1.0), args=gradient.grad_graph_info.inputs_dict(site))
            losses += [addons.host_store(ops.sum(t)) for t in results[:1]]
    return Program(ir, [x], losses)


PROGRAMS = {
    "two steps": (two_steps, ("Loss", "Loss#2")),
    "nested": (nested, ("Layers", "Loss")),
    "pipeline": (pipeline, ("Layers", "Loss")),
    "twice": (twice, ("Loss", "Loss#2")),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_budget_plans_all_models(name: str, tmp_path: Path) -> None:
    """The plan is applied again from its file, without a solver, and the numbers are those of keeping everything."""
    program, models = PROGRAMS[name]
    most = popxl.Session(program("everything").ir, "ipu_model").memory().device
    found = addons.plan_memory(lambda memory: program(memory).ir, round(0.7 * most), "ipu_model")
    assert 0.75 * found.budget <= found.peak <= found.budget and found.compilations <= 4
    assert found.plan.models == models and found.plan.bytes("recompute") > 0
    assert all(f"Model {model}: " in str(found) for model in models)
    found.plan.write_json(tmp_path / "plan.json")
    plan = addons.MemoryPlan.read_json(tmp_path / "plan.json")
    assert plan == found.plan
    again = popxl.Session(program(plan).ir, "ipu_model").memory()
    assert again.device == found.peak and all(each.device <= found.budget for each in again.devices)
    for ours, theirs in zip(program(plan).run(), program("everything").run(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def needs(program: Callable[[Any], Program]) -> dict[str, GraphNeeds]:
    with requesting_memory("everything") as requested:
        ir = program(requested.request.memory).ir
        session = popxl.Session(ir, "ipu_model")
    return {g.name: g for g in compiled_program(ir, session.program, requested).needs}


def test_models_count_while_they_wait_for_their_gradients() -> None:
    steps = needs(two_steps)
    assert all(not g.live_models and not g.ended_models for g in steps.values())
    both = needs(nested)
    assert both["Loss/Layer"].live_models == {"Layers": 1} and not both["Layers/Layer"].live_models
    assert both["Layers/Layer"].ended_models == {"Loss"} and not both["Loss/Layer"].ended_models
    stages = needs(pipeline)
    assert all(not g.live_models and not g.ended_models for g in stages.values())  # each device has one of them
    assert [(g.live_steps, *g.ipus) for g in stages.values()] == [(2, 0), (1, 1)]
    assert stages["Layers/Layer"].device_bytes == 0.0
    for models, combine in ((steps, max), (both, sum)):
        assert most_gradients([*models.values()]) == combine(g.gradients * g.calls for g in models.values())


def graph(name: str, size: int, **how: Any) -> GraphNeeds:
    """A graph of one activation in a model of its own."""
    op = OpNeeds((), ("a",), 10**9, 10**6, "float32")
    return GraphNeeds(name, 1, {"a": size}, {"a": (0, 0)}, (op,), model=name, **how)


def test_the_solver_adds_up_models_that_are_in_memory_at_a_time() -> None:
    apart = [graph("a", 10**7), graph("b", 2 * 10**7)]
    assert keep_all(apart, "read").bytes == 2 * 10**7
    together = [graph("a", 10**7), graph("b", 2 * 10**7, live_models={"a": 1})]
    assert keep_all(together, "read").bytes == 3 * 10**7
    found = solve(together, 25e6, None, ())
    assert found is not None and found.bytes <= 25e6
    assert [found.treatments[name][0].treatments["a"] for name in "ab"].count("keep") == 1
    devices = [graph("a", 10**7), graph("b", 2 * 10**7, device_bytes=-15e6)]
    assert keep_all(devices, "read").bytes == 10**7
    later = [graph("a", 10**7, gradients=10**6, ended_models=frozenset("b")), graph("b", 10**6, gradients=10**7)]
    assert keep_all(later, "read").bytes == 2 * 10**7


def test_a_plan_of_models_is_data() -> None:
    most = addons.plan_memory(lambda memory: two_steps(memory).ir, "1 GB").plan
    everything = most.for_model("Loss")
    assert addons.MemoryPlan.of_models({name: most.for_model(name) for name in most.models}) == most
    with pytest.raises(
        ValueError, match=r"of_models: the plan of 'Loss' is of the models \['Loss', 'Loss#2'\]; expected"
    ):
        addons.MemoryPlan.of_models({"Loss": most})
    with pytest.raises(TypeError, match=r"of_models: the plan of 'Loss' must be a MemoryPlan; got 'nothing'"):
        addons.MemoryPlan.of_models({"Loss": "nothing"})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"no model 'Loss#3'; the plan is of the models \['Loss', 'Loss#2'\]"):
        most.for_model("Loss#3")
    with pytest.raises(ValueError, match=r"no model 'Loss'; the plan is of one model, without a name"):
        everything.for_model("Loss")
    assert '"model": "Loss#2"' in most.model_dump_json(indent=2) and '"model"' not in everything.model_dump_json()
    assert most.models == ("Loss", "Loss#2") and [each.calls for each in most.graphs] == [4, 3]
    plan = most.with_treatments("recompute", "gelu*", calls=slice(2))
    assert [(each.model, each.calls) for each in plan.graphs] == [
        ("Loss", 2),
        ("Loss", 2),
        ("Loss#2", 2),
        ("Loss#2", 1),
    ]
    applied = two_steps(plan)
    assert sum("gelu" in str(g).lower() for g in applied.ir.graphs) > 4  # forward graphs, and backward ones
    with pytest.raises(ValueError, match=r"the plan is of the models \['Layers', 'Loss'\], and 'Loss#2' is none of"):
        two_steps(addons.MemoryPlan.of_models({"Layers": everything, "Loss": everything}))


def test_models_may_have_policies_and_plans_of_their_own() -> None:
    """Of the others, the budget plans what they leave; a policy may be "everything", too."""
    for stated in ("nothing", "everything"):
        found = addons.plan_memory(lambda memory, stated=stated: two_steps(memory, stated).ir, "1.4 MB")
        assert found.plan.models == () and sum(each.calls for each in found.plan.graphs) == 4
        popxl.Session(two_steps(found.plan, stated).ir, "ipu_model")
    second = addons.plan_memory(lambda memory: two_steps(found.plan, memory).ir, "1.4 MB").plan
    assert second.models == () and sum(each.calls for each in second.graphs) == 3


def test_micro_batches_are_chosen_for_all_steps() -> None:
    how: dict[str, Any] = {"micro_batches": "auto"}
    whole = popxl.Session(two_steps("everything").ir, "ipu_model").memory().device
    found = addons.plan_memory(lambda memory: two_steps(memory, **how).ir, round(0.5 * whole))
    assert found.peak <= found.budget and found.plan.micro_batches > 1
    assert popxl.Session(two_steps(found.plan, **how).ir, "ipu_model").memory().device == found.peak


def test_what_a_budget_for_models_wants() -> None:
    with pytest.raises(
        ValueError, match=r"gives the argument of `build` to 1 of 2 models; .* memory='everything' there"
    ):
        addons.plan_memory(lambda memory: two_steps(memory, None).ir, "1 GB")

    def forgetful(memory: Any) -> popxl.Ir:
        return two_steps(memory, memory if isinstance(memory, str) else "nothing").ir

    with pytest.raises(
        ValueError, match=r"gives the plan to the models \['Loss'\], and it was made for \['Loss#2'\], too"
    ):
        addons.plan_memory(forgetful, "500 kB")
    with pytest.raises(
        popxl.errors.PopxlError,
        match=r"within 20 kB .*; the least .* temporaries .*Of its activations, Loss keeps [0-9.]+ k?B and Loss#2 ",
    ):
        addons.plan_memory(lambda memory: two_steps(memory).ir, "20 kB")


PROGRAM = """
    import popxl
    from tests.popxl_addons.test_addons_memory_of_models import {name}

    popxl.Session({name}({memory}).ir, "ipu_hw").run({{}})
"""


@pytest.mark.parametrize(
    ("name", "memory"), [("two_steps", None), ("two_steps", "nothing"), ("pipeline", "everything")]
)
def test_the_command_plans_all_models(name: str, memory: str | None, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(PROGRAM).format(name=name, memory=repr(memory)))
    command = ["plan", str(tmp_path / "train.py"), "--save", str(tmp_path / "plan.json"), "--budget", "700 kB"]
    assert main(command) == 0
    out = capsys.readouterr().out
    models = PROGRAMS[name.replace("_", " ")][1]
    assert all(f"Model {model}: " in out for model in models)
    assert f"for each of {', '.join(models)}" in out
    program = {"two_steps": two_steps, "pipeline": pipeline}[name]
    ir = program(addons.MemoryPlan.read_json(tmp_path / "plan.json")).ir
    assert popxl.Session(ir, "ipu_hw").memory().device <= 700e3


def test_the_command_plans_one_program(tmp_path: Path, capsys: Any) -> None:
    one = textwrap.dedent(PROGRAM).format(name="two_steps", memory="None").replace(".run({})", "")
    (tmp_path / "train.py").write_text(one + one)
    assert main(["plan", str(tmp_path / "train.py"), "--budget", "700 kB"]) == 1
    assert "2 programs of the file apply a memory plan; expected one" in capsys.readouterr().err


@pytest.mark.targets
def test_one_budget_on_a_gpu() -> None:
    def program(memory: Any) -> popxl.Ir:
        ir = two_steps(memory).ir
        ir.options.calledGraphs = "auto"
        return ir

    most = popxl.Session(program("everything"), "gpu h100").memory().device
    found = addons.plan_memory(program, round(0.8 * most), "gpu h100")
    assert found.peak <= found.budget and found.plan.models == ("Loss", "Loss#2")
    assert found.plan.bytes("recompute") > 0
