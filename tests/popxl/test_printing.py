"""Graphs as text: the schedule listing, letter by letter, and the algebra, against golden texts."""

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.core.printing import schedule

F32 = popxl.float32


def linear(x, weight, bias):
    return x @ weight + bias


def specs(*shapes):
    return [popxl.TensorSpec(shape, F32) for shape in shapes]


# The schedule ---------------------------------------------------------------------------------------------------------


def test_a_schedule(ir):
    graph = ir.create_graph(linear, *specs((2, 4), (4, 32), (32,)))
    assert (
        graph.print_schedule()
        == """\
Graph : linear_subgraph(0)
  (%1, %2, %3) -> (%5) {
    MatMul.100 (%1 [(2, 4) float32], %2 [(4, 32) float32]) -> (%4 [(2, 32) float32])
    Add.101 (%4 [(2, 32) float32], %3 [(32,) float32]) -> (%5 [(2, 32) float32])
  }"""
    )


def test_a_schedule_with_names(ir):
    graph = ir.create_graph(linear, *specs((2, 4), (4, 3), (3,)))
    _, weight, bias = graph.inputs
    assert "(%1, weight=%2, fc.bias=%3) -> (%5) {" in schedule(graph, {weight: "weight", bias: "fc.bias"})


def test_a_schedule_with_calls_and_a_constant(ir):
    def shift(x, s):
        return x + s

    def two(x, a, b):
        graph = ir.create_graph(shift, x, a)
        (y,) = ops.call(graph, x, a)
        (z,) = ops.call(graph, y, b)
        return z * 2.0

    graph = ir.create_graph(two, *specs((2,), (2,), (2,)))
    here = "test_a_schedule_with_calls_and_a_constant"
    assert (
        graph.print_schedule()
        == f"""\
Graph : {here}.two_subgraph(0)
  (%1, %2, %3) -> (%7) {{
    Call.101({here}.shift_subgraph(1)) (%1 [(2,) float32], %2 [(2,) float32]) -> (%4 [(2,) float32])
    Call.102({here}.shift_subgraph(1)) (%4 [(2,) float32], %3 [(2,) float32]) -> (%5 [(2,) float32])
    Mul.103 (%5 [(2,) float32], %6 [() float32]) -> (%7 [(2,) float32])
  }}"""
    )


def test_a_schedule_of_the_main_graph(ir):
    with ir.main_graph, popxl.in_sequence():
        v = popxl.variable(np.zeros((2, 3)), popxl.float16, "v")
        x = ops.host_load(popxl.h2d_stream((2, 3), popxl.float16))
        ops.add_(v, x)
        ops.host_store(popxl.d2h_stream((2, 3), popxl.float16), v)
        popxl.graph_output(v)
        popxl.graph_output(popxl.constant(1))
    assert (
        ir.main_graph.print_schedule()
        == """\
Graph : \n\
  () -> (%3, %5) {
    Init.100 () -> (%1 [(2, 3) float16])
    HostLoad.101 (%1 [(2, 3) float16]) -> (%2 [(2, 3) float16])
    AddLhsInplace.102 (%3 [(2, 3) float16], %2 [(2, 3) float16]) -> (%4 [(2, 3) float16])
    HostStore.103 (%3 [(2, 3) float16]) -> ()
  }"""
    )


def test_a_schedule_of_a_loop(ir):
    def body(x):
        return x + 1

    with ir.main_graph:
        ops.repeat(ir.create_graph(body, popxl.TensorSpec((), F32)), 3, popxl.constant(1.0))
    name = "test_a_schedule_of_a_loop.body_subgraph(0)"
    assert f"    Loop.102({name}__loop_wrapper_subgraph(1)) (%1 [() float32]) -> (%2 [() float32])" in (
        ir.main_graph.print_schedule()
    )
    assert f"    Call.101({name}) (%3 [() float32]) -> (%4 [() float32])" in ir.graphs[2].print_schedule()


def test_empty_schedules(ir):
    assert ir.main_graph.print_schedule() == "Graph : \n  () -> () {\n    \n  }"
    graph = ir.create_graph(lambda x: (x, x), popxl.TensorSpec((), F32))
    assert graph.print_schedule().splitlines()[1] == "  (%1) -> (%1, %1) {"


# The algebra ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def program(ir):
    """A training step: streams, variables, calls, a gradient, a loop, in-place ops, placement, large constants."""

    def model(x, w, b):
        return ops.relu(x @ w + b)

    def accumulate(x, total: popxl.TensorByRef):
        ops.add_(total, x)

    with ir.main_graph, popxl.in_sequence():
        x = ops.host_load(popxl.h2d_stream((2, 3), F32, "x"))
        w = popxl.variable(np.ones((3, 4)), F32, "w")
        with popxl.name_scope("head"):
            b = popxl.variable(np.zeros(4), F32, "b")
        graph = ir.create_graph(model, x, w, b)
        info = popxl.transforms.autodiff(graph, grads_required=graph.inputs[1:])
        site = ops.call_with_info(graph, x, w, b)
        y = site.outputs[0]
        seed = popxl.constant(np.ones((2, 4)), F32, "seed")
        dw, db = ops.call(info.graph, seed, inputs_dict=info.inputs_dict(site))
        ops.scaled_add_(w, dw, b=-0.5)
        with popxl.ipu(1):
            ops.repeat(ir.create_graph(accumulate, db, b), 3, db, b)
        ops.host_store(popxl.d2h_stream((2,), F32, "loss"), ops.sum(ops.slice(y, 1, None, -1, axis=1) * 2, 1))
        ops.gather(y, popxl.constant([0, 1]))
    return ir


def test_main_graph(program, golden):
    golden(str(program.main_graph))


def test_gradient_graph(program, golden):
    (gradient,) = [graph for graph in program.graphs if graph.name.endswith("_bwd")]
    golden(str(gradient))


def test_whole_ir(program, golden):
    golden(str(program))


def test_the_same_graph_always_prints_the_same(program):
    assert str(program.main_graph) == str(program.main_graph)


def test_small_graphs(ir):
    assert str(ir.main_graph) == "main graph:\n    pass"
    graph = ir.create_graph(lambda x: (x, x), popxl.TensorSpec((2,), F32))
    assert str(graph) == "test_small_graphs.<lambda>_subgraph(0)(x: f32[2]):\n    return x, x"


def test_constants_have_the_digits_of_their_dtype(ir):
    with ir.main_graph as main:
        for dtype, text in {
            F32: "[0.1, 1e-30]",
            popxl.float16: "[0.1, 0.0]",
            popxl.float64: "[0.1, 1e-30]",
            popxl.bfloat16: "[0.100098, 9.98402e-31]",
            popxl.float8_143: "[0.101562, 0]",
            popxl.bool: "[True, True]",
            popxl.complex64: "[(0.1+0j), (1e-30+0j)]",
        }.items():
            ops.identity(popxl.constant([0.1, 1e-30], dtype))
            assert str(main).splitlines()[-1].endswith(f"Identity({text})")
        _ = popxl.variable([1.0, 2.0], F32, "x") * 0.1
        assert str(main).endswith("Mul(x, 0.1)")
