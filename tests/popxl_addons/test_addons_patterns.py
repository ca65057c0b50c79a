"""Patterns: levels, what is replaced where, and that differentiating with names applies them."""

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons import patterns
from popxl_addons.patterns import apply_patterns, apply_pre_alias_patterns, pattern, patterns_level

mark = popxl.OpKind("Marked", lambda t: t * 100.0, gradient={"t": lambda g: mark(g)})


@pytest.fixture
def unmark(monkeypatch):
    """A pattern of the level "default": marked ops become identities."""
    monkeypatch.setattr(patterns, "patterns_level", {name: list(rules) for name, rules in patterns_level.items()})

    @pattern("default")
    def unmark(op):
        return ops.identity if op.kind is mark else None


def types(graph):
    return [op.op_type for op in graph.ops]


def test_levels():
    assert list(patterns_level) == ["no_patterns", "minimal", "default", "all"]
    assert not patterns_level["no_patterns"]
    for lower, higher in zip(list(patterns_level)[:-1], list(patterns_level)[1:], strict=True):
        assert set(patterns_level[lower]) <= set(patterns_level[higher])


def test_unknown_level(ir):
    with pytest.raises(KeyError, match="no pattern level 'most'; the levels are .*'minimal'"):
        apply_pre_alias_patterns(ir, "most")
    with pytest.raises(KeyError, match="no pattern level"):
        apply_pre_alias_patterns(ir, level="DEFAULT")
    with pytest.raises(KeyError, match="no pattern level"):
        pattern("most")


@pytest.mark.parametrize(
    "level, applied", [("no_patterns", False), ("minimal", False), ("default", True), ("all", True)]
)
def test_every_graph_in_place(ir, unmark, evaluate, level, applied):
    x = popxl.variable(np.array([1.0, 2.0], np.float32))
    inner = ir.create_graph(lambda x: mark(x) + 1.0, x)
    called = ir.create_graph(lambda x: ops.call(inner, mark(x)), x)
    (y,) = ops.call(called, x)
    (marked,) = (op.outputs[0] for op in inner.ops if op.kind is mark)
    for _ in range(2):  # again changes nothing
        apply_pre_alias_patterns(ir, level)
        assert types(inner) == ["Identity" if applied else "Marked", "Add"]
        assert types(called)[0] == types(inner)[0]
    assert inner.ops[0].outputs[0] is marked and inner.ops[0].source.line > 0
    (value,) = evaluate(y)
    np.testing.assert_array_equal(value, [2, 3] if applied else [10001, 20001])


def test_the_default_level(ir, unmark):
    x = mark(popxl.variable(1.0))
    apply_pre_alias_patterns(ir)
    assert types(x.graph) == ["Identity"]


def test_the_first_pattern_that_matches(ir, unmark):
    pattern("all")(lambda op: ops.negate if op.kind is mark else None)
    mark(popxl.variable(1.0))
    apply_pre_alias_patterns(ir, "all")
    assert types(ir.main_graph) == ["Identity"]


def test_some_graphs_only(ir, unmark):
    x = popxl.variable(1.0)
    inner = ir.create_graph(lambda x: mark(x), x)
    ops.call(inner, mark(x))
    apply_patterns([ir.main_graph])
    assert types(ir.main_graph)[0] == "Identity" and types(inner) == ["Marked"]


def test_gradient_graphs_that_autodiff_makes(ir, unmark):
    """Those of called graphs too; but neither forward graphs, nor gradient graphs that are given."""
    x = popxl.variable(1.0)
    inner, given = (ir.create_graph(lambda x: mark(x), x) for _ in range(2))
    outer = ir.create_graph(lambda x: ops.call(inner, x)[0] + ops.call(given, x)[0], x)
    known = {given: popxl.transforms.autodiff(given)}
    grad = addons.autodiff(outer, called_graphs_grad_info=known)
    (of_inner,) = (graph for graph in grad.graph.called_graphs if graph.gradient_of is inner)
    assert "Marked" not in types(of_inner) and "Identity" in types(of_inner)
    for untouched in (inner, given, known[given].graph):
        assert "Marked" in types(untouched)


def test_popxl_itself_applies_none(ir, unmark):
    graph = ir.create_graph(lambda x: mark(x), popxl.variable(1.0))
    assert "Marked" in types(popxl.transforms.autodiff(graph).graph)


def test_a_product_has_two_products_as_gradients(ir):
    x, scale = (popxl.variable(np.ones((2, 3)), popxl.float32) for _ in range(2))
    grad = addons.autodiff(ir.create_graph(lambda x, scale: x * scale, x, scale))
    assert types(grad.graph) == ["Mul", "Mul"]
