"""Sums of many tensors as additions of two: the ops that should come out, and numbers that do not move."""

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.transforms import autodiff, decompose_sum

F32 = popxl.float32


def types(graph):
    return [op.op_type for op in graph.ops]


def test_the_same_function_by_both_names():
    from popxl.transforms.decompose_sum import decompose_sum as imported

    assert imported is popxl.transforms.decompose_sum


def test_a_sum_of_four_and_one_of_five(ir, run):
    """2 ops before, and 5 + 6 = 11 after."""
    with ir.main_graph as main:
        *first, e, f, g, h = (popxl.variable(float(2**i), name=f"v{i}") for i in range(8))
        four = ops.add_n(*first)
        five = ops.add_n(four, e, f, g, h)
    assert types(main) == ["Sum", "Sum"]
    assert decompose_sum(main) is main
    assert types(main) == ["Init"] + ["Add"] * 4 + ["Init"] + ["Add"] * 5
    assert (four.producer, five.producer) == (main.ops[4], main.ops[-1])
    assert run(ir, four, five) == [15.0, 255.0]


def test_the_graph_that_comes_out(ir):
    graph = ir.create_graph(lambda a, b, c: ops.exp(ops.add_n(a, b, c)), *[popxl.TensorSpec((2, 3), F32)] * 3)
    decompose_sum(graph)
    assert str(graph).splitlines()[1:] == [
        "    sum_init: f32[2, 3]    = Init(spec=f32[2, 3], init_type=zero)",
        "    add_out: f32[2, 3]     = Add(sum_init, a)",
        "    add_out__t0: f32[2, 3] = Add(add_out, b)",
        "    sum_out: f32[2, 3]     = Add(add_out__t0, c)",
        "    exp_out: f32[2, 3]     = Exp(sum_out)",
        "    return exp_out",
    ]


def test_what_is_left_alone(ir):
    def inner(x, y, z):
        return ops.add_n(x, y, z)

    with ir.main_graph as main:
        x, y, z = (popxl.variable([1.0, 2.0]) for _ in range(3))
        ops.add_n(x, y)
        ops.add_n(x, y, x)  # two different tensors
        x + y + z
        ops.sum(x)
        graph = ir.create_graph(inner, x, y, z)
        ops.call(graph, x, y, z)
    before = list(main.ops)
    decompose_sum(main)
    assert main.ops == before
    assert types(graph) == ["Sum"]


def test_a_tensor_that_is_added_twice(ir, run):
    with ir.main_graph as main:
        x, y, z = (popxl.variable(v) for v in (1.0, 10.0, 100.0))
        total = ops.add_n(x, y, x, z)
    decompose_sum(main)
    assert types(main) == ["Init"] + ["Add"] * 4
    assert run(ir, total) == [112.0]


@pytest.mark.parametrize("dtype", [popxl.float16, F32, popxl.int32, popxl.uint32], ids=lambda d: d.name)
def test_dtypes_and_broadcasting(ir, run, dtype):
    with ir.main_graph as main:
        x, y, z = (popxl.variable(np.arange(n).reshape(shape), dtype) for n, shape in ((3, 3), (2, (2, 1)), (1, ())))
        total = ops.add_n(x, y, z)
    decompose_sum(main)
    assert (total.shape, total.dtype) == ((2, 3), dtype)
    assert run(ir, total) == [[[0, 1, 2], [1, 2, 3]]]


def test_a_gradient_graph(ir, run):
    """x is read four times; its gradient is an output of the graph, is called, and is differentiated again."""

    def function(x):
        return ops.sin(x) + ops.exp(x) * ops.cos(x) + x * x * x

    values = []
    for transform in (lambda graph: graph, decompose_sum):
        ir = popxl.Ir()
        graph = ir.create_graph(function, popxl.TensorSpec((3,), F32))
        info = autodiff(graph)
        wide = [op for op in info.graph.ops if op.op_type == "Sum" and len(op.inputs) > 2]
        outputs = info.graph.outputs
        assert len(wide) == 1
        assert transform(info.graph) is info.graph
        assert info.graph.outputs == outputs
        assert ("Sum" in types(info.graph)) == (transform is not decompose_sum)
        second = autodiff(info.graph, grads_required=info.graph.inputs[1:2])
        with ir.main_graph:
            x, seed = popxl.variable([0.5, 1.0, -2.0]), popxl.constant(np.ones(3, np.float32))
            site = ops.call_with_info(graph, x)
            back = ops.call_with_info(info.graph, seed, inputs_dict=info.inputs_dict(site))
            results = ops.call(second.graph, seed, inputs_dict=second.inputs_dict(back))
        values.append(run(ir, *back.outputs, *results))
    for plain, decomposed in zip(*values, strict=True):
        np.testing.assert_allclose(decomposed, plain, rtol=1e-5)


def test_sequences_hold(ir):
    with ir.main_graph as main, popxl.in_sequence():
        x, y, z = (popxl.variable(1.0) for _ in range(3))
        before, total, after = ops.exp(x), ops.add_n(x, y, z), ops.exp(z)
    decompose_sum(main)
    new = main.ops[1:-1]
    assert total.producer is new[-1]
    assert {op.after for op in new} == {(before.producer.id,)}
    assert after.producer.after == tuple(op.id for op in new)


def test_of_what_is_no_graph():
    with pytest.raises(TypeError, match="^decompose_sum: `graph` must be a Graph; got None"):
        decompose_sum(None)
