"""What gradients keep of the forward pass: policies and plans change where activations come from, and no number."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons import optimizers
from popxl_addons.transforms.activations import activations_of
from popxl_addons.transforms.memory_plan import GraphPlan, PlannedActivation
from popxl_addons.transforms.planned_gradients import PlannedGradients

POLICIES = ("everything", "products", "products_without_batch", "nothing")


class Layer(addons.Module):
    """Two products, of which the second has a batch, and functions of elements between them."""

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        w = self.add_variable_input("w", partial(np.random.normal, 0, 0.1, (x.shape[-1], 48)), x.dtype)
        h = ops.tanh(ops.sin(x @ w))
        mixed = (h @ ops.transpose(h, (0, 2, 1))) @ h
        return ops.exp(ops.sin(mixed * 0.1)) @ w.T


class Deep(addons.Module):
    def build(self, x: popxl.Tensor, seed: popxl.Tensor) -> popxl.Tensor:
        facts, graph = Layer().create_graph(x)
        for i in range(4):
            (x,) = graph.bind(self.add_variable_inputs(f"layer{i}", facts)).call(x)
        return ops.mean(ops.dropout(x, seed, p=0.25) * x)


class Flat(addons.Module):
    """A model that calls no graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def build(self, x: popxl.Tensor, seed: popxl.Tensor) -> popxl.Tensor:
        return ops.mean(self.layer(ops.dropout(x, seed, p=0.25)))


def trained(memory: Any, model: Any = Deep, way: str = "auto", accumulate: int = 1) -> tuple[Any, ...]:
    """Losses and weights of two steps, the plan, and the temporaries of the program."""
    np.random.seed(7)
    ir = popxl.Ir()
    ir.options.calledGraphs = way
    with ir.main_graph, popxl.in_sequence():
        x = popxl.h2d_stream((3, 32, 16), popxl.float32, "x")
        seed = popxl.h2d_stream((2,), popxl.uint32, "seed")
        how = {"optimizer": partial(optimizers.sgd, lr=1e-3), "accumulate": accumulate, "memory": memory}
        step = addons.train_step(model(), x, seed, **how)
        loss = addons.host_store(step.loss)
    rng = np.random.default_rng(2)
    with popxl.Session(ir, "cpu") as session:
        losses = [
            session.run({x: rng.normal(size=session.host_shape(x)).astype(np.float32),
                         seed: rng.integers(0, 9, session.host_shape(seed)).astype(np.uint32)})[loss]
            for _ in range(2)
        ]  # fmt: skip
        weights = session.get_tensors_data(step.variables.tensors)
        return losses, [weights[t] for t in step.variables.tensors], step.memory, session.program.temporaries()


def assert_close(found: Sequence[Any], expected: Sequence[Any]) -> None:
    """Up to rounding: XLA fuses what is computed again in other ways, which differ between its versions."""
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


def assert_same(found: tuple[Any, ...], expected: tuple[Any, ...]) -> None:
    assert_close(found[0] + found[1], expected[0] + expected[1])


@pytest.fixture(scope="module")
def plain() -> tuple[Any, ...]:
    return trained(None)


@pytest.mark.thorough(but_each=6)
@pytest.mark.parametrize("policy", POLICIES)
def test_policies_give_the_same_numbers(plain: tuple[Any, ...], policy: str) -> None:
    found = trained(policy)
    assert_same(found, plain)
    (graph,) = found[2].graphs
    assert (graph.graph, graph.calls) == ("Layer", 4)
    products = {path for path in graph.paths("keep") if "matmul" in path}
    assert len(products) == {"everything": 2, "products": 3, "products_without_batch": 1, "nothing": 0}[policy]
    assert (set(graph.paths("keep")) == products) == (policy != "everything")


@pytest.mark.thorough(but_each=3)
@pytest.mark.parametrize("way", ["kept", "inlined", "rolled"])
def test_recomputed_activations_are_not_kept(way: str) -> None:
    """Not merged with the forward pass by any way of compiling."""
    everything, nothing = (trained(policy, way=way)[3] for policy in ("everything", "nothing"))
    assert nothing < 0.7 * everything


@pytest.mark.thorough(but_each=9)
@pytest.mark.parametrize("way", ["kept", "inlined", "rolled", "auto"])
def test_forward_graphs_that_run_again_are_not_merged(way: str) -> None:
    def temporaries(again: bool) -> int:
        ir = popxl.Ir()
        ir.options.calledGraphs = way
        with ir.main_graph, popxl.in_sequence():
            h = ops.host_load(popxl.h2d_stream((3, 32, 16), popxl.float32, "x"))
            facts, graph = Layer().create_graph(h)
            grad = addons.recompute_graph(graph.autodiff()) if again else graph.autodiff()
            sites = []
            for _ in range(4):
                sites.append(graph.bind(facts.init()).call_with_info(h))
                h = sites[-1].outputs[0]
            for site in reversed(sites):
                h, dw = grad.call(h, args=grad.grad_graph_info.inputs_dict(site))
                addons.host_store(ops.sum(dw))
        with popxl.Session(ir, "cpu") as session:
            return session.program.temporaries()

    assert temporaries(again=True) < 0.6 * temporaries(again=False)


@pytest.mark.thorough(but_each=2)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_model_that_calls_no_graphs(accumulate: int) -> None:
    """All of it would be computed again at once, and be in memory until it is read."""
    with pytest.warns(UserWarning, match="calls no graph, so it is planned as a whole, and 'nothing' computes all"):
        found = trained("nothing", Flat, accumulate=accumulate)
    assert_same(found, trained(None, Flat, accumulate=accumulate))
    (graph,) = found[2].graphs
    assert graph.graph == "Flat" and not graph.paths("keep") and graph.paths("recompute")


class Chain(addons.Module):
    """Twelve products with functions between them, and no called graphs."""

    def build(self, x: popxl.Tensor, seed: popxl.Tensor) -> popxl.Tensor:
        for i in range(12):
            x = ops.tanh(x @ self.add_variable_input(f"w{i}", partial(np.random.normal, 0, 0.3, (16, 16)), x.dtype))
        return ops.mean(x * x)


@pytest.mark.here
def test_a_model_without_layers_recomputes_in_sections() -> None:
    """Each right before it is read: a section is in memory at a time, beside the activations that are kept."""
    everything = trained("everything", Chain)
    between = everything[2].with_treatments("recompute", "*").with_treatments("keep", "tanh_out#5", "tanh_out#9")
    found = trained(between, Chain)
    assert_same(found, everything)
    assert found[2] == between and found[3] < 0.6 * everything[3]


def test_paths_do_not_depend_on_the_rest_of_a_program() -> None:
    paths = []
    for others in (0, 3):
        ir = popxl.Ir()
        spec = popxl.TensorSpec((2, 3), popxl.float32)
        ir.create_graph(lambda x, n=others: [ops.exp(x) for _ in range(n)] or x, spec)  # counts names
        graph = addons.GraphWithNamedArgs(ir.create_graph(lambda x: ops.tanh(ops.tanh(ops.tanh(x))), spec))
        grad = addons.autodiff(graph)
        paths.append([each.path for each in addons.transforms.activations_of(grad.grad_graph_info)])
        name = graph.graph.ops[1].outputs[0].name  # as the graph is printed
        again = addons.recompute_graph(grad, keep=[name]).graph
        assert [op.op_type for op in again.ops].count("Tanh") == 1  # the first one
    assert paths[0] == paths[1] == ["tanh_out", "tanh_out#2"]


class Scoped(addons.Module):
    """A model whose layer is in a scope, where the result of a product is reshaped and transposed."""

    def build(self, x: popxl.Tensor, seed: popxl.Tensor) -> popxl.Tensor:
        w = self.add_variable_input("w", partial(np.random.normal, 0, 0.1, (x.shape[-1], 48)), x.dtype)
        v = self.add_variable_input("v", partial(np.random.normal, 0, 0.1, (96, 5)), x.dtype)
        with popxl.name_scope("mlp"), popxl.name_scope("up"):
            h = ops.transpose(ops.reshape(x @ w, (96, 48)))
            h = ops.exp(h @ v)
        return ops.mean(ops.dropout(h, seed, p=0.25))


def test_paths_have_each_scope_once(tmp_path: Path) -> None:
    """Paths of older plans, with repeated scopes, stay known."""
    plan, long = trained("everything", Scoped)[2], "mlp/up/mlp/up/mlp/up/matmul_out_reshaped_T"
    (graph,) = plan.graphs
    assert graph.paths("keep")[:2] == ("mlp/up/matmul_out_reshaped_T", "mlp/up/exp_out")
    assert graph.activations[0].operations == 2 * 3 * 32 * 16 * 48, "those of the product"
    changed = plan.with_treatments("recompute", long)
    assert changed.graphs[0].paths("recompute") == ("mlp/up/matmul_out_reshaped_T",)
    changed.write_json(tmp_path / "plan.json")
    text = (tmp_path / "plan.json").read_text()
    (tmp_path / "plan.json").write_text(text.replace("mlp/up/matmul_out_reshaped_T", long))
    old = addons.MemoryPlan.read_json(tmp_path / "plan.json")
    assert old.graphs[0].paths("recompute") == (long,)
    assert trained(old, Scoped)[2] == changed == trained(changed, Scoped)[2]
    assert re.search(r"matmul_out_reshaped_T .* 18.4 us", str(plan.page(2e9)))


def test_equal_paths_without_repeated_scopes_stay_apart(ir: popxl.Ir) -> None:
    def build(x: popxl.Tensor, v: popxl.Tensor) -> popxl.Tensor:
        with popxl.name_scope("up"):
            h = ops.exp(x)
            first = ops.reshape(h, (2, 6)) @ v + ops.reshape(ops.tanh(x), (2, 6)) @ v
        return ops.sum(first + ops.reshape(h, (2, 6)) @ ops.exp(v))

    specs = [popxl.TensorSpec(shape, popxl.float32) for shape in ((4, 3), (6, 5))]
    grad = addons.GraphWithNamedArgs(ir.create_graph(build, *specs)).autodiff()
    paths = [each.path for each in activations_of(grad.grad_graph_info)]
    views = ["up/up/exp_out_reshaped", "up/tanh_out_reshaped", "up/exp_out_reshaped"]
    assert [path for path in paths if path.endswith("reshaped")] == views
    for path in ("up/up/exp_out_reshaped", "up/up/tanh_out_reshaped", "up/exp_out_reshaped"):
        for how in ({"keep": [path]}, {"offload": [path]}):
            again = addons.recompute_graph(grad, **how)  # type: ignore[arg-type]
            assert [t.name.partition("_offload")[0] for t in again.graph.inputs if "reshaped" in t.name] == [path]


def test_wildcards_are_no_repeated_scopes() -> None:
    """`*/*/x` is not `*/x`."""
    line = PlannedActivation(path="b/x", treatment="keep", line="", bytes=4, operations=0)
    deep = line.model_copy(update={"path": "a/b/x"})
    graphs = (GraphPlan(graph="A", calls=1, activations=(deep,)), GraphPlan(graph="B", calls=1, activations=(line,)))
    changed = addons.MemoryPlan(graphs=graphs).with_treatments("recompute", "*/*/x")
    assert [graph.paths("recompute") for graph in changed.graphs] == [("a/b/x",), ()]


class Inner(addons.Module):
    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        w = self.add_variable_input("w", partial(np.random.normal, 0, 0.1, (16, 16)), x.dtype)
        with popxl.name_scope("up"):
            return ops.reshape(ops.reshape(ops.exp(x), (96, 16)) @ w, x.shape)


class Twice(addons.Module):
    """A layer that calls a graph twice: its activations have the same names, by different paths."""

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        facts, graph = Inner().create_graph(x)
        for name in ("first", "second"):
            (x,) = graph.bind(self.add_variable_inputs(name, facts)).call(x)
        return x


class Nested(addons.Module):
    def build(self, x: popxl.Tensor, seed: popxl.Tensor) -> popxl.Tensor:
        facts, graph = Twice().create_graph(x)
        (x,) = graph.bind(self.add_variable_inputs("twice", facts)).call(x)
        return ops.mean(ops.dropout(x, seed, p=0.25))


def test_older_paths_of_a_graph_that_is_called_twice() -> None:
    plan = trained("everything", Nested)[2]
    (graph,) = plan.graphs
    views = [a for a in graph.activations if a.path.endswith("_reshaped") or "_reshaped#" in a.path]
    assert len(views) == 2, graph.activations
    long = [a.model_copy(update={"path": a.path.replace("up/", "up/up/", 1)}) for a in views]
    treated = (long[0], long[1].model_copy(update={"treatment": "recompute"}))
    others = tuple(a for a in graph.activations if a not in views)
    old = addons.MemoryPlan(graphs=(graph.model_copy(update={"activations": (*treated, *others)}),))
    (applied,) = trained(old, Nested)[2].graphs
    assert {a.path: a.treatment for a in applied.activations if a.path in {v.path for v in views}} == {
        views[0].path: "keep", views[1].path: "recompute"
    }  # fmt: skip


def test_accumulation(plain: tuple[Any, ...]) -> None:
    assert_same(trained("nothing", accumulate=3), trained(None, accumulate=3))


@pytest.mark.thorough(but_each=3)
@pytest.mark.parametrize("way", ["inlined", "kept", "rolled"])
def test_micro_batches_are_in_memory_one_after_the_other(way: str) -> None:
    one, four = (trained("everything", way=way, accumulate=count)[3] for count in (1, 4))
    assert four < 1.3 * one


def test_a_plan_is_data(plain: tuple[Any, ...], tmp_path: Path) -> None:
    plan = (
        trained("everything")[2]
        .with_treatments("recompute", "mul_*", "w_T")
        .with_treatments("offload", "tanh_out", "exp_out")
    )
    plan.write_json(tmp_path / "plan.json")
    read = addons.MemoryPlan.read_json(tmp_path / "plan.json")
    assert read == plan
    found = trained(read)
    assert found[2] == plan and plan.graphs[0].paths("offload") == ("tanh_out", "exp_out")
    assert_same(found, plain)
    assert "Layer, called 4 times" in str(plan) and "offload" in str(plan)


def test_treatments_of_some_calls(plain: tuple[Any, ...], tmp_path: Path) -> None:
    everything = trained("everything")[2]
    plan = everything.with_treatments("recompute", "*", calls=slice(1, -1)).with_treatments(
        "offload", "tanh_out", calls=slice(1)
    )
    assert [(each.calls, bool(each.paths("keep")), each.paths("offload")) for each in plan.graphs] == [
        (1, True, ("tanh_out",)), (2, False, ()), (1, True, ()),
    ]  # fmt: skip
    lines = [each.partition(":")[0].strip() for each in str(plan).splitlines() if "Layer" in each]
    assert lines == ["Layer, call 1 of 4", "Layer, calls 2 to 3 of 4", "Layer, call 4 of 4"]
    assert sum(map(plan.bytes, ("keep", "recompute", "offload"))) == everything.bytes("keep")
    plan.write_json(tmp_path / "plan.json")
    found = trained(addons.MemoryPlan.read_json(tmp_path / "plan.json"))
    assert_same(found, plain)
    assert found[2] == plan and plan.with_treatments("keep", "*") == everything
    kept, some, none = (trained(each, way="inlined")[3] for each in ("everything", plan, "nothing"))
    assert none < some < kept


def test_calls_in_loops_have_one_plan(ir: popxl.Ir) -> None:
    spec = popxl.TensorSpec((3,), popxl.float32)

    def planned(memory: Any) -> addons.MemoryPlan:
        layer = ir.create_graph(lambda x: ops.exp(ops.tanh(x)) * 0.5, spec)

        def build(x: popxl.Tensor) -> popxl.Tensor:
            (x,) = ops.repeat(layer, 3, *ops.call(layer, x))
            return ops.sum(*ops.call(layer, x))

        model = ir.create_graph(build, spec)
        applied = PlannedGradients(model, memory)
        addons.autodiff(addons.GraphWithNamedArgs(model), memory=applied)
        return applied.plan

    plan = planned("everything")
    with pytest.raises(ValueError, match=r"groups of \[2, 3\], and a loop makes 3 of them \(.*:\d+\).*where loops end"):
        planned(plan.with_treatments("recompute", "*", calls=slice(np.int64(2))))
    with pytest.raises(
        ValueError, match=r"groups of \[1, 3\] calls of .*, 4 together, and .* makes 5\. .*plan this program anew, or"
    ):
        planned(addons.MemoryPlan(graphs=tuple(plan.graphs[0].model_copy(update={"calls": n}) for n in (1, 3))))
    some = plan.with_treatments("recompute", "*", calls=slice(1, None))
    assert planned(some) == some


def test_what_a_plan_refuses(tmp_path: Path) -> None:
    plan = trained("everything")[2]
    with pytest.raises(ValueError, match=r"'softmax\*' matches no activation\. There are .*tanh_out"):
        plan.with_treatments("keep", "softmax*")
    with pytest.raises(ValueError, match=r"`treatment` is 'drop'; expected one of 'keep', 'recompute', 'offload'"):
        plan.with_treatments("drop", "tanh_out")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'softmax\*', 'q' match no activation"):
        plan.with_treatments("keep", "softmax*", "q")
    assert plan.with_treatments("keep", calls=slice(2)) == plan
    with pytest.raises(
        TypeError, match=r"each of `patterns` must be a path as the plan prints it, such as '\*'; got 3"
    ):
        plan.with_treatments("keep", 3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"`calls` is slice\('a', None, None\); expected integers"):
        plan.with_treatments("keep", "*", calls=slice("a", None))
    with pytest.raises(TypeError, match=r"`calls` must be a slice, such as `slice\(8\)`.*got 8"):
        plan.with_treatments("keep", "*", calls=8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"expected calls that follow each other"):
        plan.with_treatments("keep", "*", calls=slice(None, None, 2))
    with pytest.raises(ValueError, match=r"the plan is of the graphs \['Layer'\].*calls \['Flat'\]"):
        trained(plan, Flat)
    other = plan.model_copy(update={"graphs": (plan.graphs[0].model_copy(update={
        "activations": (plan.graphs[0].activations[0].model_copy(update={"path": "scores"}),)}),)})  # fmt: skip
    with pytest.raises(ValueError, match=r"the plan of Layer: 'scores' matches no activation"):
        trained(other)
    with pytest.raises(ValueError, match=r"expected a MemoryPlan, or one of 'everything', 'products'.*got 'most'"):
        trained("most")
    (tmp_path / "broken.json").write_text('{"graphs": 3}')
    with pytest.raises(ValueError, match=r"broken\.json' holds no memory plan"):
        addons.MemoryPlan.read_json(tmp_path / "broken.json")


@pytest.mark.parametrize("calls", [slice(10, 12), slice(4, 6), slice(5, None), slice(-9, -6), slice(-5)])
def test_calls_that_do_not_exist_are_warned_of(calls: slice) -> None:
    plan = trained("everything")[2]
    with pytest.warns(UserWarning, match=r"`calls` is slice\(.*\), which selects no call; there are 4 of Layer"):
        assert plan.with_treatments("recompute", "*", calls=calls) == plan


def test_no_calls_may_be_selected_on_purpose() -> None:
    plan = trained("everything")[2]
    for calls in (slice(0), slice(3, 3), slice(4, None), slice(-4)):
        assert plan.with_treatments("recompute", "*", calls=calls) == plan
    assert [each.calls for each in plan.with_treatments("recompute", "*", calls=slice(3, 9)).graphs] == [3, 1]


# One gradient graph -------------------------------------------------------------------------------------------------


@pytest.fixture
def layer(ir: popxl.Ir) -> tuple[Any, ...]:
    x = popxl.variable(np.random.default_rng(0).normal(size=(3, 32, 16)), popxl.float32, "x")
    facts, graph = Layer().create_graph(x)
    return x, facts.init(), graph


def gradients(x: Any, variables: Any, graph: Any, grad: Any) -> Any:
    site = graph.bind(variables).call_with_info(x)
    return grad.call(ops.cos(site.outputs[0]), args=grad.grad_graph_info.inputs_dict(site))


def test_only_what_is_needed_runs_again(layer: tuple[Any, ...], evaluate: Any) -> None:
    x, variables, graph = layer
    grad = graph.autodiff()
    tanh = next(op.outputs[0] for op in graph.graph.ops if op.op_type == "Tanh")
    again = addons.recompute_graph(grad, keep=[tanh], offload=["exp_*"])
    kinds = [op.op_type for op in again.graph.ops]
    assert "Tanh" not in kinds and kinds.count("MatMul") == 3  # x @ w for cos, and both products of the batch
    assert kinds.count("Reload") == 1 and kinds[-2:] == ["Call", "ScheduledAfter"]
    assert {"tanh_out", "exp_out_offloaded"} <= {t.name for t in again.graph.inputs}
    values = evaluate(*gradients(*layer, grad), *gradients(*layer, again))
    assert_close(values[2:], values[:2])


def test_a_called_graph_runs_again_in_part(ir: popxl.Ir, evaluate: Any) -> None:
    rng = np.random.default_rng(0)
    x, w = (popxl.variable(rng.normal(size=shape), popxl.float32) for shape in [(3, 4), (4, 4)])
    inner = ir.create_graph(lambda x, w: ops.tanh(ops.gelu(x @ w)), x, w)
    product = next(op.outputs[0] for op in inner.ops if op.op_type == "MatMul")
    middle = ir.create_graph(lambda x, w: ops.sin(*ops.call(inner, x * 0.5, w)), x, w)
    layer = ir.create_graph(lambda x, w: ops.call(inner, *ops.call(middle, x, w), ops.exp(w)), x, w)
    grad = addons.GraphWithNamedArgs(layer).autodiff()
    paths = [each.path for each in addons.activations_of(grad.grad_graph_info)]
    kept = [path for path in paths if path.rpartition(".")[2].partition("#")[0] == product.name]
    assert len(kept) == 2  # one of each call
    again = addons.recompute_graph(grad, keep=kept)
    kinds = [op.op_type for op in again.graph.ops]
    assert [kinds.count(kind) for kind in ("MatMul", "Gelu", "Tanh", "Call")] == [
        0,
        1,
        1,
        1,
    ]  # the caller has the last tanh
    forward = addons.GraphWithNamedArgs(layer)
    site = forward.call_with_info(x, w)
    values = [
        value
        for each in (grad, again)
        for value in each.call(ops.cos(site.outputs[0]), args=each.grad_graph_info.inputs_dict(site))
    ]
    values = evaluate(*values)
    assert_close(values[2:], values[:2])


@pytest.mark.parametrize("policy", POLICIES)
def test_policies_of_one_graph(layer: tuple[Any, ...], evaluate: Any, policy: Any) -> None:
    grad = layer[2].autodiff()
    again = addons.recompute_graph(grad, keep=policy)
    values = evaluate(*gradients(*layer, grad), *gradients(*layer, again))
    assert_close(values[2:], values[:2])


def test_what_runs_again_is_where_it_ran_before(ir: popxl.Ir) -> None:
    def build(x: popxl.Tensor) -> popxl.Tensor:
        with popxl.ipu(0):
            h = ops.ipu_copy(ops.tanh(ops.sin(x)), 1)
        with popxl.ipu(1):
            return ops.exp(ops.sin(h)) * 2.0

    graph = addons.GraphWithNamedArgs(ir.create_graph(build, popxl.TensorSpec((3,), popxl.float32)))
    again = addons.recompute_graph(graph.autodiff(), keep="nothing").graph.ops[:-1]
    assert [(op.op_type, op.ipu) for op in again if "Copy" not in op.op_type] == [
        ("AvailableAfter", 0), ("Sin", 0), ("Tanh", 0), ("Sin", 1), ("Exp", 1)
    ]  # fmt: skip


def test_what_is_loaded_and_what_the_caller_has_is_not_computed_again(ir: popxl.Ir) -> None:
    stream = popxl.h2d_stream((3,), popxl.float32, "s")
    spec = popxl.TensorSpec((3,), popxl.float32)
    graph = addons.GraphWithNamedArgs(ir.create_graph(lambda x: ops.exp(ops.sin(x * ops.host_load(stream))), spec))
    again = addons.recompute_graph(graph.autodiff(), keep="nothing").graph
    assert [op.op_type for op in again.ops] == ["AvailableAfter", "Mul", "Call"]
    assert {"s_hostload", "exp_out"} <= {t.name for t in again.inputs}


def test_gradients_without_elements(ir: popxl.Ir, evaluate: Any) -> None:
    x = popxl.variable(np.ones((0, 3)), popxl.float32)
    graph = addons.GraphWithNamedArgs(ir.create_graph(lambda x: ops.exp(ops.sin(x)) * 2.0, x))
    again = addons.recompute_graph(graph.autodiff(), keep="nothing")
    site = graph.call_with_info(x)
    (dx,) = evaluate(*again.call(site.outputs[0], args=again.grad_graph_info.inputs_dict(site)))
    assert dx.shape == (0, 3)


def test_calls_in_loops_are_counted(ir: popxl.Ir) -> None:
    spec = popxl.TensorSpec((3,), popxl.float32)
    layer = ir.create_graph(lambda x: ops.exp(ops.tanh(x)) * 0.5, spec)
    model = ir.create_graph(lambda x: ops.sum(*ops.repeat(layer, 10**9, x)), spec)
    planned = PlannedGradients(model, "nothing")
    addons.autodiff(addons.GraphWithNamedArgs(model), memory=planned)
    assert [graph.calls for graph in planned.plan.graphs] == [10**9]


def test_activations(layer: tuple[Any, ...]) -> None:
    found = activations_of(layer[2].autodiff().grad_graph_info)
    sizes = {each.path: each.nbytes for each in found}
    assert sizes["tanh_out"] == 3 * 32 * 48 * 4 and "x" not in sizes
    tanh = next(each for each in found if each.path == "tanh_out")
    assert (tanh.is_product, tanh.made_by.op_type) == (False, "Tanh") and "test_addons_memory_plan.py:" in tanh.line


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        (
            {"keep": "most"},
            ValueError,
            r"`keep` is 'most'; expected a policy, one of 'everything'.* or a list of tensors",
        ),
        ({"offload": "tanh_out"}, ValueError, r"`offload` is 'tanh_out'; expected a list of tensors and paths"),
        ({"keep": ["softmax*"]}, ValueError, r"`keep`: 'softmax\*' matches no activation\. There are .*tanh_out"),
        ({"keep": [3]}, TypeError, r"each of `keep` must be a tensor of the forward graph, or a path; got 3"),
        ({"keep": 3}, TypeError, r"`keep` must be a list of tensors and paths; got 3"),
    ],
)
def test_what_recomputation_refuses(layer: tuple[Any, ...], how: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        addons.recompute_graph(layer[2].autodiff(), **how)
    with pytest.raises(ValueError, match=r"in `keep` is not a tensor of .*the forward graph, that the gradient needs"):
        addons.recompute_graph(layer[2].autodiff(force=True), keep=[layer[0]])


# Functions of JAX -----------------------------------------------------------------------------------------------------


def jax_loss(up: Any, down: Any, x: Any) -> Any:
    @jax.jit
    def block(x: Any, up: Any, down: Any) -> Any:
        return x + jax.nn.gelu(x @ up) @ down

    return jnp.mean(jax.lax.scan(lambda x, w: (block(x, *w), None), x, (up, down))[0] ** 2)


@pytest.mark.here
def test_a_function_of_jax_comes_back_with_a_plan() -> None:
    """As a function whose gradient is JAX's, and which recomputes as planned."""
    rng = np.random.default_rng(1)
    arrays = [np.float32(rng.normal(0, 0.1, shape)) for shape in ((4, 16, 64), (4, 64, 16), (256, 16))]
    specs = [popxl.TensorSpec(each.shape, popxl.float32) for each in arrays]

    def planned(memory: Any) -> tuple[Any, addons.MemoryPlan]:
        ir = popxl.Ir()
        graph = ir.create_graph(popxl.from_jax(jax_loss), *specs)
        applied = PlannedGradients(graph, memory)
        info = addons.autodiff(graph, memory=applied).grad_graph_info

        def value_and_gradient(*ts: popxl.Tensor) -> tuple[popxl.Tensor, ...]:
            site = ops.call_with_info(graph, *ts)
            return site.outputs[0], *ops.call(info.graph, 1.0, inputs_dict=info.inputs_dict(site))

        return popxl.to_jax(ir.create_graph(value_and_gradient, *specs)), applied.plan

    _, everything = planned("everything")
    temporaries = []
    for plan in (
        everything,
        everything.with_treatments("recompute", "*mul_out*").with_treatments("offload", "*tanh_out"),
    ):
        step, applied = planned(plan)
        assert applied == plan
        compiled = jax.jit(step).lower(*arrays).compile()
        temporaries.append(compiled.memory_analysis().temp_size_in_bytes)
        value, *gradients = compiled(*arrays)
        expected, of_jax = jax.value_and_grad(jax_loss, (0, 1, 2))(*arrays)
        for a, b in zip([value, *gradients], [expected, *of_jax], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-9)
    kept, recomputed = temporaries
    assert kept - recomputed >= 0.75 * plan.bytes("recompute")


def test_all_that_attention_reads_waits_when_it_runs_again(ir: popxl.Ir, evaluate: Any) -> None:
    """Scores of kept queries and keys would be those of the forward pass to XLA, which would hold them."""

    def build(x: popxl.Tensor, w: popxl.Tensor) -> popxl.Tensor:
        return ops.exp(ops.attention(ops.sin(x @ w), ops.cos(x @ w), ops.tanh(x @ w), causal=True))

    specs = [popxl.TensorSpec(shape, popxl.float32) for shape in ((2, 8, 4), (4, 4))]
    graph = addons.GraphWithNamedArgs(ir.create_graph(build, *specs))
    grad = graph.autodiff()
    again = addons.recompute_graph(grad, keep=["sin_out", "cos_out"])
    (attention,) = (op for op in again.graph.ops if op.op_type == "Attention")
    waits = [t.producer.op_type for t in attention.inputs if t.producer is not None]
    assert waits == ["AvailableAfter", "AvailableAfter", "Tanh"]
    with ir.main_graph:
        rng = np.random.default_rng(3)
        x, w = (popxl.variable(rng.normal(size=spec.shape).astype(np.float32)) for spec in specs)
        site = graph.call_with_info(x, w)
        values = evaluate(
            *(
                t
                for g in (grad, again)
                for t in g.call(ops.cos(site.outputs[0]), args=g.grad_graph_info.inputs_dict(site))
            )
        )
    assert_close(values[2:], values[:2])
