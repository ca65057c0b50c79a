"""Settings of other hardware: written down where an op has them, and checked."""

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons.transforms.available_memory_proportion import (
    set_available_memory_proportion_by_ipu,
    set_graph_available_memory_proportion_by_ipu,
)
from popxl_addons.transforms.use_fc_pass import disable_fc_pass, enable_fc_pass


def tuned(x, w):
    y = ops.matmul(x, w, available_memory_proportion=0.9)
    with popxl.ipu(1):
        y = ops.matmul(y.copy_to_ipu(1), w.copy_to_ipu(1), available_memory_proportion=0.8)
    with popxl.ipu(2):
        return ops.matmul(y.copy_to_ipu(2), w.copy_to_ipu(2), available_memory_proportion=0.7)


def proportions(graph):
    return [op.attributes["available_memory_proportion"] for op in graph.ops if op.op_type == "MatMul"]


@pytest.fixture
def x(ir):
    return popxl.variable(np.eye(3, dtype=np.float32), name="x")


def test_by_ipu(ir, x):
    inner = ir.create_graph(tuned, x, x)
    set_available_memory_proportion_by_ipu(ir, (share for share in (0.1, 0.2)))
    assert proportions(inner) == [0.1, 0.2, 0.1]


def test_gathers(ir):
    with ir.main_graph:
        tables, ids = popxl.variable(np.ones((2, 3, 4), np.float32)), popxl.variable(np.zeros((2, 2), np.int32))
        y = [
            ops.gather(tables, ids, available_memory_proportion=0.9),
            ops.tied_gather(tables, ids, available_memory_proportion=0.9),
            ops.groupedgather(tables, ids, 1, 2, available_memory_proportion=0.9),
        ]
        untold = ops.gather(tables, ids)
    set_available_memory_proportion_by_ipu(ir, [0.3])
    assert [t.producer.attributes["available_memory_proportion"] for t in y] == [0.3] * 3
    assert "available_memory_proportion" not in untold.producer.attributes


def test_of_one_graph_and_those_it_calls(ir, x):
    inner, other = (ir.create_graph(tuned, x, x) for _ in range(2))
    outer = ir.create_graph(lambda x, w: ops.call(inner, x, w), x, x)
    set_graph_available_memory_proportion_by_ipu(outer, [0.3])
    assert proportions(inner) == [0.3] * 3
    assert proportions(other) == [0.9, 0.8, 0.7]


def test_convolutions_have_one_for_each(ir):
    t, weight = popxl.variable(np.ones((1, 2, 5)), popxl.float32), popxl.variable(np.ones((3, 2, 2)), popxl.float32)
    y = ops.conv(t, weight, stride=(1,), padding=(0, 0), dilation=(1,), available_memory_proportions=[0.9])
    set_available_memory_proportion_by_ipu(ir, [0.4])
    assert y.producer.attributes["available_memory_proportions"] == (0.4,)


def test_ops_without_the_setting_are_left_alone(ir, x):
    y = x @ x
    before = dict(y.producer.attributes)
    set_available_memory_proportion_by_ipu(ir, [0.4])
    assert y.producer.attributes == before


@pytest.mark.parametrize("of", [lambda ir: ir, lambda ir: ir.main_graph])
def test_no_proportions(ir, of):
    function = {True: set_available_memory_proportion_by_ipu, False: set_graph_available_memory_proportion_by_ipu}
    with pytest.raises(KeyError, match="`proportions` is empty"):
        function[of(ir) is ir](of(ir), ())


def test_fully_connected_pass(ir, x, evaluate):
    graph = addons.GraphWithNamedArgs(ir.create_graph(lambda x: x @ x, x))
    (y,) = graph.call(x)
    text = str(ir)
    disable_fc_pass(ir)
    enable_fc_pass(ir)
    assert str(ir) == text
    np.testing.assert_array_equal(evaluate(y)[0], np.eye(3))
