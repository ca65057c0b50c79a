"""Dotted paths: what prints, reports and JAX call the variables of a module, whatever their tensors are called."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons.dot_tree import DotTree

SUFFIXED = re.compile(r"\b(?:weight|bias)__t\d")


class Block(addons.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = addons.layers.Linear(3), addons.layers.Linear(2)

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        return self.down(ops.relu(self.up(x)))


class Net(addons.Module):
    """One layer inline, two outlined."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = addons.Module.from_list([Block()])

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        x = self.layers[0](x)
        for name in ("first", "second"):
            (x,) = self.call_module(Block(), name)(x)
        return ops.sum(x)


PATHS = [
    f"{layer}.{linear}.{name}"
    for layer in ("layers.0", "first", "second")
    for linear in ("up", "down")
    for name in ("weight", "bias")
]


@pytest.fixture
def net(ir: popxl.Ir) -> Any:
    with ir.main_graph:
        return Net().create_graph(popxl.TensorSpec((4, 2), popxl.float32))


def test_arguments_of_jax_functions(net: Any) -> None:
    facts, graph = net
    assert sorted(facts.keys_flat()) == sorted(PATHS)
    assert {t.name for t in graph.graph.inputs} >= {"x", "0/up/weight", "weight", "weight__t0"}  # as PopXL has them
    f = popxl.to_jax(graph.graph)
    assert sorted(f.inputs) == sorted(["x", *PATHS])
    rng = np.random.default_rng(3)
    values = {p: rng.normal(size=graph.args.get(p).shape).astype(np.float32) for p in PATHS}
    x = expected = rng.normal(size=(4, 2)).astype(np.float32)
    for layer in ("layers.0", "first", "second"):
        hidden = np.maximum(expected @ values[f"{layer}.up.weight"] + values[f"{layer}.up.bias"], 0)
        expected = hidden @ values[f"{layer}.down.weight"] + values[f"{layer}.down.bias"]
    np.testing.assert_allclose(f(x=x, **values), expected.sum(), rtol=1e-5)


def test_what_is_shown(ir: popxl.Ir, net: Any, tmp_path: Any) -> None:
    facts, graph = net
    gradient = graph.autodiff()
    text = str(graph.graph) + str(gradient.graph)
    for path in PATHS:
        assert path in text
        assert f"Gradient___{path}" in text
    assert not SUFFIXED.search(text)
    with ir.main_graph:
        variables = facts.init()
        x = popxl.variable(np.ones((4, 2)), popxl.float32, "x")
        site = graph.bind(variables).call_with_info(x)
        gradient.call(popxl.constant(1.0), args=gradient.grad_graph_info.inputs_dict(site))
    assert not SUFFIXED.search(str(ir))
    assert not SUFFIXED.search(popxl.Session(ir).report.model_dump_json())
    ir.save(tmp_path / "program.json")
    assert str(popxl.Ir.load(tmp_path / "program.json")) == str(ir)


def test_a_path_that_is_taken(ir: popxl.Ir) -> None:
    """Where another tensor has the name, a variable keeps its own: names stay unique."""

    class Shift(addons.Module):
        def build(self, shift: popxl.Tensor) -> popxl.Tensor:
            return shift + self.add_variable_input("shift", lambda: np.ones(2), popxl.float32)

    with ir.main_graph:
        _, graph = Shift().create_graph(popxl.TensorSpec((2,), popxl.float32))
        other = popxl.constant(1.0)
    assert popxl.to_jax(graph.graph).inputs == ("shift", "shift__t0")
    first, second = graph.graph.inputs
    for t, path in ((first, "a.b"), (second, "a.b"), (other, "c")):
        graph.graph.show_as({t: path})
    assert (other.path, popxl.to_jax(graph.graph).inputs) == (other.name, ("shift", "shift__t0"))


def test_dicts_are_trees_of_jax() -> None:
    tree = DotTree.from_dict({"b.w": np.ones(2), "a": np.zeros(3)})
    flat = tree.to_dict()
    doubled = jax.tree.map(lambda array: array * 2 + 1, flat)
    assert type(doubled) is type(flat) and {name: a.tolist() for name, a in doubled.items()} == {
        "b.w": [3, 3],
        "a": [1, 1, 1],
    }
    assert [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(flat)] == ["['b.w']", "['a']"]
    total = jax.jit(lambda arrays: arrays["a"].sum() + arrays["b.w"].sum())(flat)
    assert float(total) == 2
