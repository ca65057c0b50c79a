"""Memory plans of programs with experts, ring attention, accumulation in loops and pipelines, and random plans:
treatments change where activations come from, and no number."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons import optimizers
from popxl_addons.layers import Attention, Experts
from tests.devices import a_device_each, one_device

WIDTH = 6


class Sparse(addons.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Experts(4, 10, chosen=2, group="parts")

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        y, _ = self.experts(x)
        return x + ops.tanh(y)


class Ring(addons.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(2, group="parts")

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        return x + ops.sin(self.attention(x) * 2.0)


class Plain(addons.Module):
    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        w = self.add_variable_input("w", partial(np.random.normal, 0, 0.3, (WIDTH, 11)), x.dtype)
        return x + ops.exp(ops.sin(ops.tanh(x @ w))) @ w.T


class Deep(addons.Module):
    def __init__(self, layer: Any, count: int = 3) -> None:
        super().__init__()
        self.layer, self.count = layer, count

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        facts, graph = self.layer().create_graph(x)
        for i in range(self.count):
            (x,) = graph.bind(self.add_variable_inputs(f"layer{i}", facts)).call(x)
        return ops.mean(x * x)


def drawn(plan: addons.MemoryPlan, rng: np.random.Generator) -> addons.MemoryPlan:
    """A random treatment for each activation, in groups of calls."""
    for path in {each.path for graph in plan.graphs for each in graph.activations}:
        first, last = sorted(rng.integers(0, 5, 2))
        plan = plan.with_treatments(str(rng.choice(["recompute", "offload"])), path, calls=slice(int(first), int(last)))
    return plan


def trained(model: Any, memory: Any, way: str = "auto", device: Any = None, accumulate: int = 1) -> tuple[Any, Any]:
    np.random.seed(3)
    ir = popxl.Ir(axes={"parts": 1 if device is None else 2})
    ir.options.calledGraphs = way
    with ir.main_graph, popxl.in_sequence():
        x = popxl.h2d_stream((2, 4, WIDTH), popxl.float32, "x")
        how = {"optimizer": partial(optimizers.sgd, lr=0.1), "memory": memory, "accumulate": accumulate}
        step = addons.train_step(model, x, **how)
        loss = addons.host_store(step.loss)
    rng = np.random.default_rng(5)
    with popxl.Session(ir, "cpu" if device is None else device(2)) as session:
        losses = [session.run({x: rng.normal(size=session.host_shape(x)).astype(np.float32)})[loss] for _ in range(2)]
        weights = session.get_tensors_data(step.variables.tensors)
    return [*losses, *(weights[t] for t in step.variables.tensors)], step.memory


@pytest.mark.thorough(but_each=2)
@pytest.mark.parametrize(("layer", "device"), [(Sparse, a_device_each), (Ring, one_device)])
def test_replicas_that_talk(layer: Any, device: Any) -> None:
    expected, plan = trained(Deep(layer, 2), "everything", device=device)
    assert plan.bytes("keep") > 0
    plan = plan.with_treatments("recompute", "*").with_treatments("offload", "*", calls=slice(1))
    for found, wanted in zip(trained(Deep(layer, 2), plan, device=device)[0], expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_accumulation_in_a_loop() -> None:
    """A loop over micro-batches, whose body calls the forward and the gradient graph."""

    def means(memory: Any) -> Any:
        np.random.seed(3)
        ir = popxl.Ir()
        with ir.main_graph, popxl.in_sequence():
            x = popxl.h2d_stream((4, WIDTH), popxl.float32, "x")
            facts, forward = Deep(Plain).create_graph(x.spec)
            variables = facts.init()
            made, grad = addons.autodiff_with_accumulation(forward, forward.args.tensors, memory=memory)
            accumulators = made.init("gradients")

            with ir.create_empty_graph("batch") as body:
                one = body.add_input(popxl.TensorSpec((), popxl.float32), "one")
                inside = {t: body.add_input_like(t) for t in variables.tensors}
                inside |= {t: body.add_input_like(t, by_ref=True) for t in accumulators.tensors}
                site = forward.bind(_of(variables, inside)).call_with_info(ops.host_load(x))
                grad.bind(_of(accumulators, inside)).call(one, args=grad.grad_graph_info.inputs_dict(site))
                popxl.graph_output(one)
            ops.repeat(body, 3, popxl.constant(1.0), *inside)
        ir.num_host_transfers = 3
        with popxl.Session(ir, "cpu") as session:
            session.run({x: np.random.default_rng(2).normal(size=session.host_shape(x)).astype(np.float32)})
            found = session.get_tensors_data(accumulators.tensors)
        return [found[t] for t in accumulators.tensors]

    expected = means(None)
    assert any(np.abs(each).max() > 1e-3 for each in expected)
    for found, wanted in zip(means("nothing"), expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def _of(named: addons.NamedTensors, by: dict[popxl.Tensor, popxl.Tensor]) -> addons.NamedTensors:
    return addons.NamedTensors.from_dict({name: by[t] for name, t in named.to_dict().items()})


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param(None, marks=pytest.mark.thorough)])
def test_pipelines(schedule: str | None) -> None:
    def gradients(memory: Any) -> Any:
        np.random.seed(3)
        ir = popxl.Ir()
        with ir.main_graph:
            x, out = popxl.h2d_stream((4, WIDTH), popxl.float32, "x"), popxl.d2h_stream((4, WIDTH), popxl.float32)
            facts, first = Plain().create_graph(x.spec)
            grad = addons.autodiff(first, memory=memory)
            weights = [facts.init("a"), facts.init("b")]
            with addons.pipelined_execution(6, schedule) as p:
                with p.stage(0), popxl.ipu(0):
                    a = first.bind(weights[0]).call_with_info(ops.host_load(x))
                    h = a.outputs[0].copy_to_ipu(1)
                with p.stage(1), popxl.ipu(1):
                    b = first.bind(weights[1]).call_with_info(h)
                    g, _ = grad.call(b.outputs[0], args=grad.grad_graph_info.inputs_dict(b))
                    g = g.copy_to_ipu(0)
                with p.stage(2), popxl.ipu(0):
                    g, _ = grad.call(g, args=p.stash_and_restore_activations(a, grad.grad_graph_info))
                    ops.host_store(out, g)
        ir.num_host_transfers = 6
        with popxl.Session(ir, "ipu_model") as session:
            given = np.random.default_rng(2).normal(size=session.host_shape(x)).astype(np.float32)
            return session.run({x: given})[out]

    expected = gradients(None)
    for memory in ("nothing", "products"):
        np.testing.assert_allclose(gradients(memory), expected, rtol=1e-5, atol=1e-6)


class OnTwoIpus(addons.Module):
    """A layer whose second product is on another IPU."""

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        w = self.add_variable_input("w", partial(np.random.normal, 0, 0.3, (WIDTH, 11)), x.dtype)
        v = self.add_variable_input("v", partial(np.random.normal, 0, 0.3, (11, WIDTH)), x.dtype)
        with popxl.ipu(0):
            y = ops.sin(ops.tanh(x @ w)).copy_to_ipu(1)
        with popxl.ipu(1):
            return ops.exp(ops.tanh(y) @ v).copy_to_ipu(0)


class OneLayerOnTwoIpus(OnTwoIpus):
    """A model that is planned as a whole, as it calls no graph."""

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        return ops.mean(super().build(x))


@pytest.mark.parametrize("model", [partial(Deep, OnTwoIpus, 2), OneLayerOnTwoIpus], ids=["layers", "whole"])
def test_layers_on_two_ipus(model: Callable[[], addons.Module]) -> None:
    """An offloaded activation returns to its IPU, and what is recomputed waits for gradients of another."""
    expected, plan = trained(model(), "everything", device=one_device)
    plan = plan.with_treatments("recompute", "*").with_treatments("offload", "tanh_out*")
    for found, wanted in zip(trained(model(), plan, device=one_device)[0], expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


class ByHand(addons.Module):
    """A model that says itself which gradient graph its layer has."""

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        facts, graph = Plain().create_graph(x)
        self.called_graphs_grad_info.add(graph, graph.autodiff())
        for i in range(3):
            x, *_ = graph.bind(self.add_variable_inputs(f"layer{i}", facts)).call(x)
        return ops.mean(x * x)


def test_gradients_that_are_given_are_planned_too() -> None:
    expected, plan = trained(ByHand(), "everything")
    assert [(graph.graph, graph.calls) for graph in plan.graphs] == [("Plain", 3)]
    for memory in ("nothing", plan.with_treatments("recompute", "tanh_out", calls=slice(1, None))):
        found, applied = trained(ByHand(), memory)
        assert memory in ("nothing", applied)
        for each, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(each, wanted, rtol=1e-5, atol=1e-6)


class Drawn(addons.Module):
    """A random layer: two products, and random functions of elements before, between and after them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.rng = np.random.default_rng(seed)

    def functions(self, x: popxl.Tensor) -> popxl.Tensor:
        for _ in range(self.rng.integers(1, 4)):
            f = self.rng.choice([ops.tanh, ops.sin, ops.exp, ops.gelu, ops.sigmoid, lambda x: x * x, lambda x: x * 0.3])
            x = ops.tanh(f(x))
        return x

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        w = self.add_variable_input("w", partial(np.random.normal, 0, 0.3, (WIDTH, 11)), x.dtype)
        v = self.add_variable_input("v", partial(np.random.normal, 0, 0.3, (11, WIDTH)), x.dtype)
        return x + self.functions(self.functions(self.functions(x) @ w) @ v)


WAYS = ("kept", "inlined", "rolled")


def compared(seed: int) -> Iterator[tuple[Any, Any]]:
    """Results of a random program with a random plan, each beside that with everything kept."""
    layer, way = partial(Drawn, seed), WAYS[seed % 3]
    expected, plan = trained(Deep(layer, 4), "everything", way)
    found, applied = trained(Deep(layer, 4), wanted := drawn(plan, np.random.default_rng(seed)), way)
    assert applied == wanted
    return zip(found, expected, strict=True)


def test_a_random_plan_of_a_random_program() -> None:
    """XLA fuses what is recomputed in other ways, and rounds a product and a sum in one kernel once."""
    for found, expected in compared(0):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.thorough
@pytest.mark.parametrize("first", range(0, 60, 10))
def test_random_plans_change_no_bit(first: int) -> None:
    """Where XLA has no instruction that multiplies and adds at once."""
    code = f"""
import numpy as np
from tests.popxl_addons.test_addons_memory_everywhere import compared
for seed in range({first}, {first + 10}):
    for found, expected in compared(seed):
        np.testing.assert_array_equal(found, expected, err_msg=str(seed))
"""
    without = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_max_isa=AVX"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "XLA_FLAGS": without}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
