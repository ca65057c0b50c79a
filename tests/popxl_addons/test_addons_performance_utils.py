"""Counts of floating point operations, against counts by hand."""

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons.performance_utils import (
    evaluate_FLOPs,
    evaluate_ir_FLOPs,
    format_flops_scientific,
    print_FLOPs,
    total_FLOPs,
)


def tensor(*shape):
    return popxl.variable(np.ones(shape), popxl.float32)


class Linear(addons.Module):
    """2 * n * m * p and n * p for x: (n, m), w: (m, p)."""

    def build(self, x, features):
        w = self.add_variable_input("w", lambda: np.ones((x.shape[-1], features)), x.dtype)
        b = self.add_variable_input("b", lambda: np.ones(features), x.dtype)
        return x @ w + b


# Single ops ---------------------------------------------------------------------------------------------------------


def test_ops_are_listed_by_id(ir):
    v, w = tensor(4), tensor(4, 8)
    y = ops.matmul(v, w)
    _ = ops.matmul(ops.transpose(y), y)
    assert evaluate_FLOPs(ir.main_graph) == {"MatMul": {100: 64, 102: 16}, "TOT": 80}


@pytest.mark.parametrize(
    ("lhs", "rhs", "expected"),
    [((7,), (7,), 14), ((3, 5), (5, 7), 2 * 3 * 5 * 7), ((2, 4, 3, 5), (2, 4, 5, 7), 2 * 4 * 2 * 3 * 5 * 7)],
)
def test_products(ir, lhs, rhs, expected):
    _ = tensor(*lhs) @ tensor(*rhs)
    assert total_FLOPs(ir) == expected


def test_elementwise(ir):
    x, row = tensor(3, 4), tensor(4)
    for function in (ops.add, ops.sub, ops.mul, ops.div):
        function(row, x)
    ops.exp(x), ops.relu(x), ops.sum(x)
    assert evaluate_FLOPs(ir.main_graph) == {
        "Add": {100: 12},
        "Sub": {101: 12},
        "Mul": {102: 12},
        "Div": {103: 12},
        "TOT": 48,
    }


def test_group_norm(ir):
    x, w = tensor(6, 8), tensor(8)
    ops.group_norm(x, w, w, 4)  # 24 means; 48 / 4 = 12 a group
    assert evaluate_FLOPs(ir.main_graph)["TOT"] == 12 + (24 + 48) + 4 * 48


def test_nothing_to_count(ir):
    ops.relu(tensor(3))
    assert evaluate_FLOPs(ir.main_graph) == {"TOT": 0} and total_FLOPs(ir) == 0


# Graphs -------------------------------------------------------------------------------------------------------------


def test_calls_count_at_every_call(ir):
    x = tensor(3, 4)
    facts, graph = Linear().create_graph(x, 5)
    for _ in range(2):
        graph.bind(facts.init()).call(x)
    first, second = (f"Call_{op.id}(Linear)" for op in ir.main_graph.ops)
    product, total = (op.id for op in graph.graph.ops)
    assert evaluate_FLOPs(ir.main_graph) == {
        "MatMul": {first: {product: 120}, second: {product: 120}},
        "Add": {first: {total: 15}, second: {total: 15}},
        "TOT": 2 * (120 + 15),
    }


def test_loops_in_calls_in_loops(ir):
    def inner(x, w):
        return x @ w

    def middle(x, w):
        return ops.repeat(ir.create_graph(inner, x, w), 3, x, w)[0] + 1.0

    x, w = tensor(2, 4), tensor(4, 4)
    outer = ir.create_graph(middle, x, w)
    ops.repeat(outer, 5, x, w)
    ops.call(outer, x, w)
    breakdown = evaluate_FLOPs(ir.main_graph)
    once = 3 * 2 * 2 * 4 * 4 + 2 * 4  # three products, one sum
    assert breakdown["TOT"] == (5 + 1) * once == total_FLOPs(ir)
    loop, call = ir.main_graph.ops
    wrapper = next(key for key in breakdown["Add"] if key.startswith(f"Loop_{loop.id}("))
    assert "_subgraph(" not in str(breakdown)
    (in_wrapper,) = breakdown["Add"][wrapper].values()
    assert list(in_wrapper.values()) == [5 * 8]
    assert sum(breakdown["Add"][f"Call_{call.id}({outer.name.partition('_subgraph')[0]})"].values()) == 8


def test_a_loop_without_turns(ir):
    x, w = tensor(2, 4), tensor(4, 4)
    ops.repeat(ir.create_graph(lambda x, w: x @ w, x, w), 0, x, w)
    assert total_FLOPs(ir) == 0


def test_conditionals_count_nothing(ir):
    x = tensor(2, 3)
    branches = [ir.create_graph(lambda x: x * 2.0, x), ir.create_graph(lambda x: x + 1.0, x)]
    ops.conditional(popxl.constant(True, popxl.bool), *branches, [x], [x])
    assert evaluate_FLOPs(ir.main_graph) == {"TOT": 0}


def test_gradient_graphs(ir):
    x = tensor(3, 4)
    facts, graph = Linear().create_graph(x, 5)
    grad = addons.autodiff(graph)
    info = graph.bind(facts.init()).call_with_info(x)
    grad.call(tensor(3, 5), args=grad.grad_graph_info.inputs_dict(info))
    forward = 2 * 3 * 4 * 5 + 3 * 5
    backward = 2 * (2 * 3 * 4 * 5)  # dy @ w.T and x.T @ dy
    assert evaluate_FLOPs(graph.graph)["TOT"] == forward
    assert evaluate_FLOPs(grad.graph)["TOT"] == backward
    assert total_FLOPs(ir) == forward + backward


def test_gradient_of_a_loop(ir):
    def step(x, w):
        return x @ w

    def looped(x, w):
        return ops.repeat(ir.create_graph(step, x, w), 6, x, w)[0]

    x, w = tensor(3, 4), tensor(4, 4)
    graph = addons.GraphWithNamedArgs(ir.create_graph(looped, x, w))
    grad = addons.autodiff(graph)
    once = 2 * 3 * 4 * 4
    assert evaluate_FLOPs(graph.graph)["TOT"] == 6 * once
    breakdown = evaluate_FLOPs(grad.graph)

    def leaves(counts):
        return sum(map(leaves, counts.values())) if isinstance(counts, dict) else counts

    assert leaves(breakdown["MatMul"]) == 6 * 2 * once


def test_replicas():
    ir = popxl.Ir(replication=4)
    with ir.main_graph:
        x = tensor(3, 4)
        facts, graph = Linear().create_graph(x, 5)
        graph.bind(facts.init()).call(x)
    alone, together = evaluate_FLOPs(ir.main_graph), evaluate_ir_FLOPs(ir)
    assert together["TOT"] == 4 * alone["TOT"] == total_FLOPs(ir)
    ((key, counts),) = together["Add"].items()
    assert counts == {id: 4 * count for id, count in alone["Add"][key].items()}


# Text ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (5, "5.000E+00"),
        (48, "48.000E+00"),
        (640, "0.640E+03"),
        (7300, "7.300E+03"),
        (21000, "21.000E+03"),
        (450000, "0.450E+06"),
        (0, "0.000E+00"),
        (10**15, "1.000E+15"),
        (0.25, "0.250E+00"),
        (0.004, "4.000E-03"),
    ],
)
def test_format_nearest_3(value, text):
    assert format_flops_scientific(value) == text


def test_format_fixed_exponent():
    assert format_flops_scientific(3.75e8, "M") == "375.000E+06"
    assert [format_flops_scientific(10**12, f) for f in "KGT"] == ["1000000000.000E+03", "1000.000E+09", "1.000E+12"]
    with pytest.raises(ValueError, match=r"`format` is 'X'; expected 'nearest3' or one of \['K', 'M', 'G', 'T'\]"):
        format_flops_scientific(1, "X")


def test_table_by_type(capsys):
    print_FLOPs({"MatMul": {100: 2000, "Call_101(f)": {102: 304}}, "Add": {103: 32}, "TOT": 2336})
    assert capsys.readouterr().out == (
        "Op Type | FLOPs      | %    \n"
        "-----------------------------\n"
        "TOT     | 2.336E+03  | 100.0\n"
        "MatMul  | 2.304E+03  | 98.6 \n"
        "Add     | 32.000E+00 | 1.4  \n"
        "\n"
    )


def test_table_of_ops(capsys):
    print_FLOPs({"Add": {103: 32}, "MatMul": {100: 2000, "Call_101(f)": {102: 304}}, "TOT": 2336}, "flat", "K")
    assert capsys.readouterr().out == (
        "Op Type | FLOPs     | Op Name               \n"
        "---------------------------------------------\n"
        "TOT     | 2.336E+03 |                       \n"
        "MatMul  | 2.000E+03 | MatMul.100            \n"
        "MatMul  | 0.304E+03 | MatMul.Call_101(f).102\n"
        "Add     | 0.032E+03 | Add.103               \n"
        "\n"
    )


def test_table_of_nothing(capsys):
    print_FLOPs({"TOT": 0})
    assert "TOT     | 0.000E+00 | 0.0" in capsys.readouterr().out


def test_an_unknown_table():
    with pytest.raises(ValueError, match="`mode` is 'tree'; expected 'type' or 'flat'"):
        print_FLOPs({"TOT": 0}, "tree")
