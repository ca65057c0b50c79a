"""Whole programs with known numbers: calls, loops, conditionals, in-place changes, gradients, and all of them at once.

Programs run with their called graphs compiled in each of the three ways. Those of several replicas are in
`replicated_programs.py`; they run with more devices than replicas and with fewer, in one process and in two.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import popxl
from popxl import TensorByRef, TensorSpec, ops
from popxl.errors import PopxlError
from popxl.transforms import autodiff, decompose_sum, merge_exchange
from tests.popxl import replicated_programs

F32 = popxl.float32
SCALAR = TensorSpec((), F32)
accumulate_ = ops.var_updates.accumulate_

pytestmark = pytest.mark.thorough(but_each=3, rotated=True)
"""A program is compiled in one of the ways, another for each test, and in the two others as a thorough test."""


@pytest.fixture(params=["kept", "dispatched", "inlined"])
def ir(request: pytest.FixtureRequest) -> popxl.Ir:
    """A fresh program, and the way in which its called graphs will be compiled."""
    ir = popxl.Ir()
    ir.options.calledGraphs = request.param
    return ir


@pytest.fixture
def program(ir: popxl.Ir) -> Iterator[popxl.Graph]:
    """The main graph of `ir`, current during the test; its ops run in the order in which they are created."""
    with ir.main_graph as main, popxl.in_sequence():
        yield main


def results(ir: popxl.Ir, *tensors: popxl.Tensor, feeds: Any = None) -> list[Any]:
    """What tensors of the current graph are now, after one run. They are stored here, in the order of the program."""
    streams = [popxl.d2h_stream(t.shape, t.dtype, "result") for t in tensors]
    for stream, t in zip(streams, tensors, strict=True):
        ops.host_store(stream, t)
    with popxl.Session(ir, "ipu_model") as session:
        outputs = session.run(feeds)
        return [np.asarray(outputs[stream]).tolist() for stream in streams]


def vectors(count: int = 3) -> list[popxl.Tensor]:
    """Variables of four elements."""
    return [popxl.variable(np.arange(4.0) - k, F32, name) for k, name in zip(range(count), "abc", strict=False)]


# Names and sizes ------------------------------------------------------------------------------------------------------


def product(x, y):
    return ops.identity(x * y, "y_")


def test_results_of_calls_are_named_after_outputs(ir, program):
    a = popxl.variable(2.0)
    graph = ir.create_graph(lambda x: ops.identity(x * x, "y"), a)
    (first,), (second,) = ops.call(graph, a), ops.call(graph, a)
    with popxl.name_scope("layer"):
        (third,) = ops.call(graph, a)
    assert first.name == "y" and third.name == "layer/y"
    stem, _, number = second.name.partition("__t")
    assert stem == "y" and number.isdigit()
    assert graph.inputs[0].id == f"{graph.id}/x" and graph.inputs[0].name == "x"
    assert results(ir, first, second, third) == [4, 4, 4]


def test_a_graph_is_named_after_its_function(ir, program):
    def local(x):
        return x

    graphs = [ir.create_graph(product, SCALAR, SCALAR), ir.create_graph(local, SCALAR)]
    name = "test_a_graph_is_named_after_its_function.local"
    assert [graph.name for graph in graphs] == ["product_subgraph(0)", f"{name}_subgraph(1)"]
    gradients = [autodiff(graphs[0], grads_provided=graphs[0].outputs[:1]).graph for _ in range(2)]
    assert gradients[0].id == "product_subgraph(0)_bwd"
    assert gradients[1].id.startswith("product_subgraph(0)_bwd_")
    assert ir.create_graph(local, SCALAR).name == f"{name}_subgraph(2)"  # gradient graphs take no number


def test_a_loop_always_numbers_its_results_and_takes_two_numbers_each(ir, program):
    a = popxl.variable(2.0)
    graph = ir.create_graph(lambda x, k: ops.identity(x * k, "y"), a, a)
    with popxl.name_scope("layer"):
        (first,) = ops.repeat(graph, 2, a, a)
        (second,) = ops.repeat(graph, 2, a, a)
    numbers = [int(t.name.removeprefix("y__t")) for t in (first, second)]
    assert numbers[1] - numbers[0] == 2
    assert results(ir, first, second) == [8, 8]


def test_results_of_a_conditional_are_named_after_both_branches(ir, program):
    a, flag = popxl.variable(2.0), popxl.variable(True)
    then_branch = ir.create_graph(lambda x: ops.identity(x, "up"), a)
    else_branch = ir.create_graph(lambda x: ops.identity(x, "down"), a)
    (y,) = ops.conditional(flag, then_branch, else_branch, [a], [a])
    assert y.name == "up_or_down"
    assert results(ir, y) == [2]


@pytest.mark.thorough(but_each=4)
@pytest.mark.parametrize("site", ["Call", "Loop", "If"])
def test_a_site_adds_one_op_its_results_and_a_constant_for_each_number(ir, program, site):
    a, flag = popxl.variable(2.0), popxl.variable(True)
    graph = ir.create_graph(lambda x, k: x * k, a, a)
    before = (len(program.tensors), tuple(graph.ops), graph.tensors)
    if site == "Call":
        found, constants = ops.call(graph, a, 3), 1
    elif site == "Loop":
        found, constants = ops.repeat(graph, 1, a, 3), 1
    else:
        found, constants = ops.conditional(flag, graph, graph, [a, 3], [a, 4]), 2
    assert [op.op_type for op in program.ops] == [site]
    assert (len(program.tensors) - constants - len(found), tuple(graph.ops), graph.tensors) == before
    assert results(ir, *found) == [6]


def test_a_graph_that_returns_its_input(ir, program):
    v = popxl.variable(2.0)
    graph = ir.create_graph(lambda x: x, v)
    (y,) = ops.call(graph, v)
    assert (len(program.tensors), len(graph.tensors)) == (2, 1)
    assert results(ir, y) == [2]


# Binding --------------------------------------------------------------------------------------------------------------


def axpy(x, y, a: float):
    return x * a + y


def test_a_call_by_position_and_by_name(ir, program):
    x, y = popxl.variable(3.0), popxl.variable(4.0)
    graph = ir.create_graph(axpy, x, y, 2.0)
    (z,) = ops.call(graph, x, y)
    (z2,) = ops.call(graph, 1, inputs_dict={graph.inputs[1]: z})
    assert results(ir, z, z2) == [10, 12]


def test_inputs_are_in_the_order_of_the_signature_then_of_their_creation(ir, program):
    def build(a, many, *rest, last, **named):
        weight = popxl.graph_input((), popxl.int32, "weight")
        digits = [a, *many, *rest, last, *named.values(), weight]
        total = digits[0]
        for digit in digits[1:]:
            total = total * 10 + digit
        return total

    s = TensorSpec((), popxl.int32)
    graph = ir.create_graph(build, s, [s, s], s, s, last=s, u=s, v=s)
    names = ["a", "many_0", "many_1", "rest_0", "rest_1", "last", "u", "v", "weight"]
    assert [t.name for t in graph.inputs] == names
    assert results(ir, *ops.call(graph, range(1, 10))) == [123456789]


def test_one_level_is_flattened(ir, program):
    a, b, c, d = (popxl.variable(v) for v in (1.0, 2.0, 3.0, 4.0))
    graph = ir.create_graph(lambda w, x, y, z: ((w * 10 + x) * 10 + y) * 10 + z, a, b, c, d)
    nested = ir.create_graph(lambda x: ops.sum(x), TensorSpec((2,), F32))
    with pytest.raises(TypeError):
        ops.call(nested, [[a, b]])
    assert results(ir, *ops.call(graph, a, [b, c], d), *ops.call(nested, [[1, 2]])) == [1234, 3]


def test_nothing_is_broadcast_or_promoted_at_a_call(ir, program):
    graph = ir.create_graph(lambda x: x, TensorSpec((2,), F32))
    for value in (1, popxl.variable(np.ones(2), popxl.float16)):
        with pytest.raises(PopxlError):
            ops.call(graph, value)


def test_numbers_are_converted_as_numpy_does(ir, program):
    graph = ir.create_graph(lambda x: x, TensorSpec((), popxl.int32))
    with pytest.warns(popxl.errors.NarrowedNumberWarning):
        outputs = ops.call(graph, 1.7)
    assert results(ir, *outputs) == [1]


# Call sites, by value and by reference --------------------------------------------------------------------------------


def test_what_a_call_site_knows(ir, program):
    a, b = popxl.variable(5, name="a"), popxl.variable(2, name="b")
    graph = ir.create_graph(lambda p, q: (p * q, q - p), a, b)
    site = ops.call_with_info(graph, a, b)
    assert site.called_graph == graph
    assert site.inputs == (a, b) and len(site.outputs) == 2
    assert site.graph_to_parent(graph.inputs[1]) == b
    assert site.graph_to_parent(graph.outputs[0]) == site.outputs[0] == site.parent_output(0)
    assert site.parent_to_graph(a) == graph.inputs[0]
    with pytest.raises(IndexError):
        site.parent_input(2)
    with pytest.raises(ValueError):
        site.parent_to_graph(site.outputs[0])
    assert results(ir, *site.outputs) == [10, -3]


def bump(x: popxl.Tensor):
    return ops.add_(x, popxl.constant(10.0)) * 2.0


def bump_ref(x: TensorByRef):
    return ops.add_(x, popxl.constant(10.0)) * 2.0


def test_by_value_by_reference_and_marked(ir, program):
    v = popxl.variable(1.0)
    plain, ref = ir.create_graph(bump, v), ir.create_graph(bump_ref, v)
    (a,) = ops.call(plain, v)
    v1 = v + 0
    (b,) = ops.call(ref, v)
    v2 = v + 0
    site = ops.call_with_info(plain, v)
    site.set_parent_input_modified(v)
    v3 = v + 0
    (c,) = ops.call(plain, v)
    v4 = v + 0
    assert results(ir, a, v1, b, v2, *site.outputs, v3, c, v4) == [22, 1, 22, 11, 42, 21, 62, 21]
    assert v.data == 21


def test_a_change_by_reference_is_kept_for_the_next_run(ir, program):
    v = popxl.variable(1.0)
    ops.call(ir.create_graph(bump_ref, v), v)
    with popxl.Session(ir, "ipu_model") as session:
        for expected in (11, 21, 31):
            session.run()
            assert session.get_tensor_data(v) == expected


def test_a_change_through_a_view_reaches_the_caller(ir, program):
    def body(x: TensorByRef):
        ops.relu_(ops.slice_(x, 0, 2))

    v = popxl.variable([[-1.0, -1.0]] * 3)
    ops.call(ir.create_graph(body, v), v)
    assert results(ir, v + 0) == [[[0, 0], [0, 0], [-1, -1]]]


def test_outputs_are_new_and_read_at_the_end(ir, program):
    def body(x):
        doubled = x * 2
        x += 1
        return x, doubled

    v = popxl.variable(5.0)
    y, doubled = ops.call(ir.create_graph(body, v), v)
    y += 100
    assert results(ir, y + 0, doubled, v + 0) == [106, 10, 5]


@pytest.mark.filterwarnings("ignore::popxl.errors.LostUpdateWarning")
def test_aliasing_does_not_cross_a_call(ir, program):
    def body(x, y):
        x += 1
        return y * 1.0

    v = popxl.variable([1.0, 2.0])
    assert results(ir, *ops.call(ir.create_graph(body, v, v), v, ops.reshape_(v, (2,)))) == [[1, 2]]


def add_one(t: TensorByRef):
    accumulate_(t, popxl.constant(1.0))


@pytest.mark.parametrize(("hint", "left"), [(popxl.Tensor, 5), (TensorByRef, 6)])
def test_every_level_of_calls_decides_for_itself(ir, program, hint, left):
    def outer(t: hint):
        ops.call(inner, t)
        return t * 1.0

    v = popxl.variable(5.0)
    inner = ir.create_graph(add_one, v)
    (p,) = ops.call(ir.create_graph(outer, v), v)
    assert results(ir, p, v + 0) == [6, left]


# Loops ----------------------------------------------------------------------------------------------------------------

LOOPS = [
    (lambda x, inc: x + inc, 4, (1, 2), [9]),
    (lambda a, b: (b, a + b), 5, (0, 1), [5, 8]),
    (lambda a, b: (b, a), 3, (1, 2), [2, 1]),
    (lambda x: x + 1, 0, (7,), [7]),
    (lambda x: x + 1, 1, (7,), [8]),
    (lambda: None, 4, (), []),
]


def test_outputs_become_inputs_by_position(ir, program):
    found = []
    for body, count, values, _ in LOOPS:
        graph = ir.create_graph(body, *[SCALAR] * len(values))
        found.append(ops.repeat(graph, count, *values))
        if values:  # by name or by position, it makes no difference
            by_name = dict(zip(graph.inputs[::-1], values[::-1], strict=True))
            found.append(ops.repeat(graph, repeat_count=count, inputs_dict=by_name))
    expected = [value for *_, values, wish in LOOPS for value in wish * (2 if values else 1)]
    assert results(ir, *(t for each in found for t in each)) == expected


def test_a_loop_writes_each_turn_into_a_buffer(ir, program):
    def body(i, buf: TensorByRef):
        val = ops.cast(i, F32) * 10.0
        ops.dynamic_update_(buf, i, val, axes=[0], sizes=[1], no_overlap=True)
        return i + 1

    buf = popxl.variable([0.0] * 4, F32)
    i0 = popxl.constant([0], popxl.uint32)
    (i,) = ops.repeat(ir.create_graph(body, i0, buf), 4, i0, buf)
    assert results(ir, i, buf + 0) == [[4], [0, 10, 20, 30]]


@pytest.mark.thorough(but_each=4)
@pytest.mark.parametrize(
    ("hint", "count", "expected"),
    [
        (popxl.Tensor, 1, [101, 0]),
        (popxl.Tensor, 2, [102, 0]),
        (popxl.Tensor, 3, [103, 0]),
        (TensorByRef, 1, [101, 1]),
        (TensorByRef, 2, [103, 2]),
        (TensorByRef, 3, [106, 3]),
    ],
)
def test_an_accumulator_is_kept_from_turn_to_turn_by_reference_only(ir, program, hint, count, expected):
    def body(x, c: hint):
        return x + accumulate_(c, popxl.constant(1.0))

    c = popxl.variable(0.0)
    (x,) = ops.repeat(ir.create_graph(body, SCALAR, c), count, 100.0, c)
    assert results(ir, x, c + 0) == expected


@pytest.mark.parametrize(("returned", "expected"), [("changed", [13, 13]), ("doubled", [80, 41])])
def test_a_carried_input_by_reference_ends_as_the_last_turn_left_it(ir, program, returned, expected):
    def body(x: TensorByRef):
        doubled = x * 2
        x += 1
        return doubled if returned == "doubled" else x

    v = popxl.variable(10.0)
    (y,) = ops.repeat(ir.create_graph(body, v), 3, v)
    assert results(ir, y, v + 0) == expected
    assert len(ir.main_graph.ops[0].modified) == 1


def test_a_loop_that_loads_and_stores_eight_times(ir, program):
    def body():
        ops.host_store(sink, ops.host_load(source) * 2)

    ir.num_host_transfers = 8
    source, sink = popxl.h2d_stream((3,), F32, "source"), popxl.d2h_stream((3,), F32, "sink")
    assert ops.repeat(ir.create_graph(body), 8) == ()
    data = np.arange(24, dtype=np.float32).reshape(8, 3)
    with popxl.Session(ir, "ipu_model") as session:
        for _ in range(2):
            np.testing.assert_array_equal(session.run({source: data})[sink], data * 2)


@pytest.mark.filterwarnings("ignore:Session. a run stores to:popxl.errors.PopxlWarning")
def test_two_loads_in_a_turn_take_entries_2k_and_2k_plus_1(ir, program):
    def body(x):
        first = ops.host_load(source)
        return x * 100 + first * 10 + ops.host_load(source)

    ir.num_host_transfers = 6
    source, sink = popxl.h2d_stream((), F32, "source"), popxl.d2h_stream((), F32, "sink")
    (x,) = ops.repeat(ir.create_graph(body, SCALAR), 3, 0.0)
    ops.host_store(sink, x)
    with popxl.Session(ir, "ipu_model") as session:
        assert session.run({source: np.arange(1, 7, dtype=np.float32)})[sink][0] == 123456


def test_what_the_site_of_a_loop_knows(ir, program):
    a, b = popxl.variable(0.0), popxl.variable(1.0)
    graph = ir.create_graph(lambda x, y: x + y, a, b)
    info = ops.repeat_with_info(graph, 3, a, b)
    wrapper = info.called_graph
    assert wrapper.called_graphs == (graph,) and wrapper.id.startswith(f"{graph.id}__loop_wrapper_subgraph(")
    assert (len(wrapper.inputs), len(wrapper.outputs)) == (4, 2)
    assert [(t.dtype, t.shape) for t in wrapper.inputs[:2]] == [(popxl.int32, ()), (popxl.bool, ())]
    assert (info.parent_input(2), info.parent_input(3)) == info.inputs == (a, b)
    for idx in (0, 1):
        with pytest.raises(IndexError):
            info.parent_input(idx)
    assert (info.graph_to_parent_output_index(1), info.parent_to_graph_output_index(0)) == (0, 1)
    with pytest.raises(ValueError):
        info.graph_to_parent(graph.inputs[0])
    assert info.parent_to_graph(a) == wrapper.inputs[2]
    assert results(ir, *info.outputs) == [3]


# Conditionals ---------------------------------------------------------------------------------------------------------


def grow(x):
    return x * 4.0


def shrink(y):
    return y - 1.5


@pytest.mark.parametrize(("value", "expected"), [(True, 24), (False, 6.5)])
def test_one_of_two_graphs_runs(ir, program, value, expected):
    flag_s = popxl.h2d_stream((1,), popxl.bool, "flag")
    flag = ops.host_load(flag_s)
    a, b = popxl.variable(6.0), popxl.variable(8.0)
    then_branch, else_branch = ir.create_graph(grow, a), ir.create_graph(shrink, b)
    (r,) = ops.conditional(flag, then_branch, else_branch, then_inputs=[a], else_inputs=[b])
    assert results(ir, r, feeds={flag_s: np.array([value])}) == [expected]


def test_a_stream_moves_on_only_in_the_branch_that_runs(ir, program):
    def body(n):
        (x,) = ops.conditional(ops.equal(n % 2, popxl.constant(0)), loads, waits, [], [])
        ops.host_store(sink, x)
        return n + 1

    ir.num_host_transfers = 4
    source, sink = popxl.h2d_stream((), F32, "source"), popxl.d2h_stream((), F32, "sink")
    loads = ir.create_graph(lambda: ops.host_load(source))
    waits = ir.create_graph(lambda: popxl.constant(-1.0))
    ops.repeat(ir.create_graph(body, TensorSpec((), popxl.int32)), 4, 0)
    with popxl.Session(ir, "ipu_model") as session:
        data = np.array([5.0, 6.0, 7.0, 8.0], np.float32)
        assert session.run({source: data})[sink].tolist() == [5, -1, 6, -1]


def test_what_the_site_of_a_conditional_knows(ir, program):
    flag, a, b, c = popxl.variable(True), *(popxl.variable(v) for v in (1.0, 2.0, 3.0))
    then_branch = ir.create_graph(lambda x, y: x + y, a, b)
    else_branch = ir.create_graph(lambda x, y: x - y, a, b)
    site = ops.conditional_with_info(flag, then_branch, else_branch, (a, b), (c, a))
    assert site.called_graph == (then_branch, else_branch)
    assert site.inputs == (flag, a, b, c, a)
    assert site.parent_to_graph(a) == then_branch.inputs[0]
    assert site.parent_to_graph(c) == else_branch.inputs[0]
    assert site.graph_to_parent(else_branch.inputs[1]) == a
    assert [site.graph_to_parent_input_index(i) for i in (0, 1)] == [1, 2]
    assert [site.graph_to_parent_input_index(i, then_branch=False) for i in (0, 1)] == [3, 4]
    assert [site.is_parent_index_in_then_branch(i) for i in range(1, 5)] == [True, True, False, False]
    for ask in (site.parent_to_graph_input_index, site.is_parent_index_in_then_branch):
        for idx in (0, 5):
            with pytest.raises(IndexError):
                ask(idx)
    with pytest.raises(NotImplementedError):
        site.set_parent_input_modified(a)
    assert results(ir, *site.outputs) == [3]


# In place -------------------------------------------------------------------------------------------------------------


def test_adding_in_place_rebinds_the_name_to_the_same_tensor(ir, program):
    x = v = popxl.variable(1.0)
    x += popxl.constant(2.0)
    assert x is v
    x -= popxl.constant(5.0)  # there is no such op in place: a new tensor
    assert x is not v
    assert results(ir, x, v + 0) == [-2, 3]


def test_an_integer_update_of_a_float(ir, program):
    w = popxl.variable(1.5)
    assert results(ir, accumulate_(w, popxl.constant(2)), w + 0) == [3.5, 3.5]


def test_a_change_is_seen_by_every_alias_that_reads_later(ir, program):
    a = popxl.variable([[1.0, -2.0], [-3.0, 4.0]])
    before = a * 1.0
    row, column = ops.slice_(a, 1, 2), ops.slice_(ops.transpose_(a), 0, 1)
    ops.relu_(row)
    found = results(ir, before, a + 0, column + 0)
    assert found == [[[1, -2], [-3, 4]], [[1, -2], [0, 4]], [[1, 0]]]


def two_changes(a, b, c):
    ops.relu_(a)
    a += b
    return [a]


def two_changes_of_other_kinds(a, b, c):
    return ops.relu_(a), ops.gelu_(a)


def an_overwrite_and_a_read_before(a, b, c):
    p = a * 2
    q = ops.var_updates.copy_var_update_(a, b)
    return p, q * 2


def a_copy_and_a_change(a, b, c):
    return [ops.add_(ops.relu(a), ops.relu_(a))]


def a_store_of_what_was_added_to(a, b, c):
    a += 1
    return [a]


def overlapping_slices(a, b, c):
    p, q = ops.slice_(a, 0, 2), ops.slice_(a, 1, 3)
    ops.relu_(p)
    ops.gelu_(q)
    return []


def a_read_through_a_view(a, b, c):
    p = ops.reshape_(a, (2, 2))
    y = p + 1
    ops.relu_(a)
    return [y]


AMBIGUOUS = [
    two_changes,
    two_changes_of_other_kinds,
    an_overwrite_and_a_read_before,
    a_copy_and_a_change,
    a_store_of_what_was_added_to,
    overlapping_slices,
    a_read_through_a_view,
]


@pytest.mark.parametrize("build", AMBIGUOUS)
@pytest.mark.parametrize("ordered", [False, True])
def test_a_change_without_an_order_is_refused(ir, build, ordered):
    with ir.main_graph, popxl.in_sequence(ordered):
        for t in build(*vectors()):
            ops.host_store(popxl.d2h_stream(t.shape, t.dtype), t)
    if ordered:
        with popxl.Session(ir, "ipu_model") as session:
            session.run()
    else:
        with pytest.raises(PopxlError, match="^Inplacing ambiguity detected"):
            popxl.Session(ir, "ipu_model")


def relu(x):
    return np.maximum(x, 0)


A, B = np.arange(4.0), np.arange(4.0) - 1

FINE = [
    ("a chain", lambda a, b: ops.add_(ops.relu_(b), a), relu(B) + A),
    ("two new tensors", lambda a, b: ops.add_(ops.relu(b), ops.relu(b)), 2 * relu(B)),
    ("a result that is stored", lambda a, b: ops.add_(a, popxl.constant(1.0)), A + 1),
    ("an update by what was read", lambda a, b: accumulate_(a, a * 2), 3 * A),
]


@pytest.mark.parametrize(("build", "expected"), [row[1:] for row in FINE], ids=[row[0] for row in FINE])
def test_a_change_that_data_orders_is_fine(ir, build, expected):
    with ir.main_graph:
        found = results(ir, build(*vectors(2)))
    np.testing.assert_array_equal(found[0], expected)


def test_disjoint_slices_may_change_in_any_order(ir):
    with ir.main_graph:
        (a,) = vectors(1)
        a -= 10.0  # a new tensor
        p, q = ops.slice_(a, 0, 2), ops.slice_(a, 2, 4)
        found = results(ir, ops.relu_(p), ops.add_(q, popxl.constant(1.0)))
    assert found == [[0, 0], [-7, -6]]


def test_a_conflict_in_a_callee_is_found_there(ir):
    def body(a, b):
        ops.relu_(a)
        return a + b

    with ir.main_graph:
        a, b = vectors(2)
        ops.call(ir.create_graph(body, a, b), a, b)
    with pytest.raises(PopxlError, match=r"^Inplacing ambiguity detected.*body_subgraph\(0\)"):
        popxl.Session(ir, "ipu_model")


# Gradients ------------------------------------------------------------------------------------------------------------


def gradient_of(ir: popxl.Ir, graph: popxl.Graph, values: Any, seeds: Any, **options: Any) -> list[Any]:
    """The gradients of a graph at some values."""
    info = autodiff(graph, **options)
    site = ops.call_with_info(graph, *values)
    return results(ir, *ops.call(info.graph, *seeds, inputs_dict=info.inputs_dict(site)))


def scalars(ir: popxl.Ir, fn: Callable[..., Any]) -> popxl.Graph:
    return ir.create_graph(fn, *[SCALAR] * fn.__code__.co_argcount)


def affine(x, w, b):
    return x * w + b


def test_gradients_by_parent_and_by_graph_tensor(ir, program):
    x, w, b = (popxl.variable(v, F32, name) for v, name in ((3.0, "x"), (2.0, "w"), (1.0, "b")))
    graph = ir.create_graph(affine, x, w, b)
    fwd = ops.call_with_info(graph, x, w, b)
    info = autodiff(graph, grads_required=[graph.inputs[2], graph.inputs[1]])
    bwd = ops.call_with_info(info.graph, 10.0, inputs_dict=info.inputs_dict(fwd))
    db, dw = bwd.outputs
    by_parent = info.fwd_parent_ins_to_grad_parent_outs(fwd, bwd)
    assert by_parent[w] == dw and by_parent[b] == db and x not in by_parent
    by_graph = info.fwd_graph_ins_to_grad_parent_outs(bwd)
    assert by_graph[graph.inputs[1]] == dw
    assert all(key.name in value.name for key, value in by_graph.items())
    assert [t.name for t in info.graph.outputs] == ["Gradient___b", "Gradient___w"]
    assert results(ir, fwd.outputs[0], db, dw) == [7, 10, 30]


def _tensor_and_its_square(x):
    y = x + 1
    return y, y * y


GRADIENTS = [
    ("a tensor used in several places", lambda x: x * x + x, (3.0,), (1,), [7]),
    ("an output that is used again", lambda x: _tensor_and_its_square(x), (2.0,), (1, 1), [7]),
    ("the input itself", lambda x: x, (3.0,), (5,), [5]),
    ("all outputs", lambda x: (x * 2, x * 3), (1.0,), (1, 10), [32]),
    ("one part of a split", lambda x: _half(x), (1.0,), (1,), [2]),
]


def _half(x):
    left, _ = ops.split(ops.concat([ops.reshape(x * 2, (1,)), ops.reshape(x * 3, (1,))]), 2)
    return ops.sum(left)


@pytest.mark.parametrize(
    ("fn", "values", "seeds", "expected"), [row[1:] for row in GRADIENTS], ids=[row[0] for row in GRADIENTS]
)
def test_gradients_are_sums_over_all_uses(ir, program, fn, values, seeds, expected):
    assert gradient_of(ir, scalars(ir, fn), values, seeds) == expected


@pytest.mark.parametrize(("provided", "seeds", "expected"), [([1], (1,), 3), ([1, 0], (1, 10), 23)])
def test_only_provided_outputs_contribute(ir, program, provided, seeds, expected):
    graph = scalars(ir, lambda x: (x * 2, x * 3))
    named = [graph.outputs[i] for i in provided]
    assert gradient_of(ir, graph, [1.0], seeds, grads_provided=named) == [expected]


def test_results_of_calls_that_grow(ir, program):
    """The call made before gains the activations; what `ops.call` returned does not; later calls have them."""
    x = popxl.variable(0.5)
    graph = scalars(ir, lambda x: ops.tanh(ops.exp(x)) * 2)
    early, snapshot = ops.call_with_info(graph, x), ops.call(graph, x)
    info = autodiff(graph)
    y, *more = ops.call(graph, x)
    assert len(snapshot) == 1 and more and len(early.outputs) == len(graph.outputs) == 1 + len(more)
    (dx,) = ops.call(info.graph, 1.0, inputs_dict=info.inputs_dict(early))
    again = autodiff(graph)
    assert len(again.expected_inputs) > len(info.expected_inputs)  # the activations are outputs now
    e = np.exp(0.5)
    expected = [2 * np.tanh(e), 2 * e / np.cosh(e) ** 2]
    np.testing.assert_allclose(results(ir, y, dx), expected, rtol=1e-5)


def test_a_running_sum_inside_a_gradient_graph(ir, program):
    x, w, acc = popxl.variable(3.0), popxl.variable(2.0), popxl.variable(0.0)
    graph = ir.create_graph(lambda x, w: x * w, x, w)
    info = autodiff(graph)
    fwd = ops.call_with_info(graph, x, w)
    with info.graph:
        acc_in = popxl.graph_input(w.shape, w.dtype, "acc", by_ref=True)
        accumulate_(acc_in, info.graph.outputs[1])
    given = {**info.inputs_dict(fwd), acc_in: acc}
    for seed in (10.0, 1.0):
        ops.call(info.graph, seed, inputs_dict=given)
    assert results(ir, acc + 0) == [33]


def test_modifying_ops_are_not_differentiated_and_views_are(ir, program):
    def added(p, q):
        p += q
        return p

    def with_gelu(p, q):
        return ops.gelu_(p) + q

    refused = [
        added,
        lambda p, q: ops.relu_(p) * q,
        lambda p, q: accumulate_(p, q),
        with_gelu,
    ]
    for dtype in (F32, popxl.int32):
        spec = TensorSpec((2,), dtype)
        for fn in refused:
            graph = ir.create_graph(fn, spec, spec)
            with pytest.raises(PopxlError, match="^The graph .* contains a modifying op.*inplace modifying ops"):
                autodiff(graph)
        joined = ir.create_graph(lambda p, q: ops.concat_([p, q]), spec, spec)
        info = autodiff(joined)
        assert [t.dtype for t in info.graph.outputs] == [dtype, dtype]
        parts = ops.call(info.graph, [np.arange(4)])
    assert results(ir, *parts) == [[0, 1], [2, 3]]


def test_a_graph_that_calls_another_twice(ir, program):
    def whole(x, w):
        h, *_ = ops.call(inner, x, w)
        y, *_ = ops.call(inner, h, w)
        return y

    inner = scalars(ir, lambda x, w: x * w)
    assert gradient_of(ir, scalars(ir, whole), (3.0, 2.0), (1,)) == [4, 12]


def test_two_callers_share_one_gradient_graph(ir, program):
    inner = scalars(ir, lambda x: x * x)
    a = scalars(ir, lambda x: ops.call(inner, x)[0] * 2)
    b = scalars(ir, lambda x: ops.call(inner, x)[0] * 3)
    infos = autodiff(a, return_all_grad_graphs=True)
    info = autodiff(b, called_graphs_grad_info={inner: infos[inner]})
    assert set(infos) == {a, inner} and info.graph.called_graphs == (infos[inner].graph,)
    found = []
    for graph, its in ((a, infos[a]), (b, info)):
        site = ops.call_with_info(graph, 5.0)
        found += ops.call(its.graph, 1.0, inputs_dict=its.inputs_dict(site))
    assert results(ir, *found) == [20, 30]


@pytest.mark.thorough(but_each=4)
@pytest.mark.parametrize("count", [0, 1, 4])
def test_the_gradient_of_a_loop(ir, program, count):
    """x wⁿ: nothing of a turn is lost, however many there are."""
    body = scalars(ir, lambda x, w: x * w)
    graph = scalars(ir, lambda x, w: ops.repeat(body, count, x, w)[0] + w)
    expected = [2.0**count, 3 * count * 2.0 ** (count - 1) + 1]
    assert gradient_of(ir, graph, (3.0, 2.0), (1,)) == expected


@pytest.mark.parametrize(("value", "expected"), [(True, [12, 0]), (False, [0, 1])])
def test_the_gradient_flows_to_the_branch_that_ran(ir, program, value, expected):
    cube, same = scalars(ir, lambda x: x * x * x), scalars(ir, lambda y: y - 1.5)

    def whole(flag, x, y):
        return ops.conditional(flag, cube, same, [x], [y])[0]

    graph = ir.create_graph(whole, TensorSpec((), popxl.bool), SCALAR, SCALAR)
    assert gradient_of(ir, graph, (value, 2.0, 3.0), (1,), grads_required=graph.inputs[1:]) == expected


def test_host_data_is_loaded_once_and_stored_once(ir, program):
    source, sink = popxl.h2d_stream((), F32, "source"), popxl.d2h_stream((), F32, "sink")

    def body(x):
        y = x * ops.host_load(source)
        ops.host_store(sink, y)
        return y * y

    graph = scalars(ir, body)
    info = autodiff(graph)
    site = ops.call_with_info(graph, 3.0)
    (dx,) = ops.call(info.graph, 1.0, inputs_dict=info.inputs_dict(site))
    assert {op.op_type for op in info.graph.ops}.isdisjoint({"HostLoad", "HostStore"})
    assert results(ir, dx, feeds={source: 5.0}) == [2 * 3 * 5 * 5]


def test_a_gradient_is_printed_when_it_is_computed(ir, program, capfd):
    def body(x):
        y = ops.print_tensor(x * 1.0, title="y", print_self=False, print_gradient=True)
        z = ops.print_tensor(ops.identity(y * y, "z"), print_self=False, print_gradient=True)
        return z * 1.0

    assert gradient_of(ir, scalars(ir, body), [3.0], [1.0]) == [6]
    assert capfd.readouterr().err.splitlines() == ["print_z_gradient: 1.0", "y_gradient: 6.0"]


def test_dropout_has_the_same_mask_in_the_gradient(ir, program):
    def body(x, seed):
        return ops.dropout(x, seed, p=0.5)

    spec = TensorSpec((64,), F32)
    graph = ir.create_graph(body, spec, TensorSpec((2,), popxl.uint32))
    info = autodiff(graph, grads_required=graph.inputs[:1])
    ones = popxl.constant(np.ones(64), F32)
    site = ops.call_with_info(graph, ones, [[7, 11]])
    (dx,) = ops.call(info.graph, ones, inputs_dict=info.inputs_dict(site))
    y, gradient = results(ir, site.outputs[0], dx)
    assert y == gradient and set(y) == {0, 2}


# Patterns of use ------------------------------------------------------------------------------------------------------


def test_a_training_step_of_a_model_and_a_loss(ir, program):
    def squared_error(pred, target):
        diff = pred - target
        return ops.sum(diff * diff)

    rate = 0.1
    x_s, t_s = popxl.h2d_stream((1, 2), F32, "x"), popxl.h2d_stream((1, 1), F32, "t")
    x, t = ops.host_load(x_s), ops.host_load(t_s)
    w, b = popxl.variable(np.ones((2, 1)), F32, "w"), popxl.variable(np.zeros(1), F32, "b")

    model_graph = ir.create_graph(lambda x, w, b: x @ w + b, x, w, b)
    model = ops.call_with_info(model_graph, x, w, b)
    pred = model.outputs[0]
    loss_graph = ir.create_graph(squared_error, pred, t)
    loss_site = ops.call_with_info(loss_graph, pred, t)
    loss = loss_site.outputs[0]

    loss_info = autodiff(loss_graph, grads_required=[loss_graph.inputs[0]])
    (d_pred,) = ops.call(loss_info.graph, 1.0, inputs_dict=loss_info.inputs_dict(loss_site))
    model_info = autodiff(model_graph, grads_required=model_graph.inputs[1:])
    grad_site = ops.call_with_info(model_info.graph, d_pred, inputs_dict=model_info.inputs_dict(model))
    grads = model_info.fwd_parent_ins_to_grad_parent_outs(model, grad_site)
    l_s, d_s = popxl.d2h_stream((), F32, "loss"), popxl.d2h_stream((1, 1), F32, "d_pred")
    ops.host_store(d_s, d_pred)
    for var in (w, b):
        ops.scaled_add_(var, grads[var], b=-rate)
    ops.host_store(l_s, loss)

    data = {x_s: np.array([[1.0, 2.0]], np.float32), t_s: np.array([[1.0]], np.float32)}
    with popxl.Session(ir, "ipu_model") as session:
        for step in ([4, 4, [0.6, 0.2], -0.4], [0.16, -0.8, [0.68, 0.36], -0.32]):
            outputs = session.run(data)
            found = [outputs[l_s], outputs[d_s], session.get_tensor_data(w), session.get_tensor_data(b)]
            for value, expected in zip(found, step, strict=True):
                np.testing.assert_allclose(np.ravel(value), np.ravel(expected), rtol=1e-5)


def test_a_model_with_its_loss_in_one_graph(ir, program):
    def model(x, w, t):
        diff = x * w - t
        return diff * diff

    x, w, t = (popxl.variable(v) for v in (3.0, 2.0, 1.0))
    graph = ir.create_graph(model, x, w, t)
    info = autodiff(graph, grads_required=[graph.inputs[1]])
    site = ops.call_with_info(graph, x, w, t)
    (dw,) = ops.call(info.graph, 1.0, inputs_dict=info.inputs_dict(site))
    assert results(ir, site.outputs[0], dw) == [25, 30]


@pytest.mark.filterwarnings("ignore::popxl.errors.LostUpdateWarning")
@pytest.mark.parametrize(("hint", "weights"), [(TensorByRef, [1.4, 0.8]), (popxl.Tensor, [2.0, 2.0])])
def test_gradients_are_accumulated_in_a_loop(ir, program, hint, weights):
    steps, rate = 3, 0.1
    x_s = popxl.h2d_stream((), F32, "x")
    w, acc = popxl.variable(2.0, F32, "w"), popxl.variable(0.0, F32, "acc")
    graph = ir.create_graph(lambda x, w: x * w, SCALAR, w.spec)
    info = autodiff(graph, grads_required=[graph.inputs[1]])

    def micro(w: popxl.Tensor, acc: hint):
        x = ops.host_load(x_s)
        site = ops.call_with_info(graph, x, w)
        (dw,) = ops.call(info.graph, 1.0, inputs_dict=info.inputs_dict(site))
        accumulate_(acc, dw)

    ops.repeat(ir.create_graph(micro, w, acc), steps, w, acc)
    ops.scaled_add_(w, acc, b=-rate)
    ops.var_updates.accumulator_zero_(acc)
    ir.num_host_transfers = steps
    with popxl.Session(ir, "ipu_model") as session:
        for expected in weights:
            session.run({x_s: np.array([1.0, 2.0, 3.0], np.float32)})
            assert session.get_tensor_data(w) == pytest.approx(expected, rel=1e-6)
            assert session.get_tensor_data(acc) == 0


def test_the_mean_of_gradients_with_a_counter(ir, program):
    x_s = popxl.h2d_stream((), F32, "x")
    acc = popxl.variable(100.0, F32, "acc")

    def micro(step, acc: TensorByRef):
        ops.var_updates.accumulate_mean_(acc, ops.host_load(x_s), step)
        return step + 1.0

    ops.repeat(ir.create_graph(micro, SCALAR, acc), 4, 0.0, acc)
    ir.num_host_transfers = 4
    with popxl.Session(ir, "ipu_model") as session:
        session.run({x_s: np.array([1.0, 2.0, 3.0, 6.0], np.float32)})
        assert session.get_tensor_data(acc) == pytest.approx(3, rel=1e-6)


class Scale(popxl.Module):
    def __init__(self):
        self.k = None

    def build(self, x):
        self.k = popxl.graph_input((), x.dtype, "k")
        return x * self.k


def test_one_graph_with_two_sets_of_weights(ir, program):
    x = popxl.variable(5.0)
    k1, k2 = popxl.variable(2.0, F32, "k1"), popxl.variable(3.0, F32, "k2")
    layer = Scale()
    graph = ir.create_graph(layer, x)
    assert graph.inputs[1] == layer.k
    (h,) = ops.call(graph, x, inputs_dict={layer.k: k1})
    (y,) = ops.call(graph, h, k2)
    first = layer.k
    ir.create_graph(layer, x)
    assert layer.k != first
    assert results(ir, h, y) == [10, 30]


def test_one_gradient_graph_for_two_forward_calls(ir, program):
    x, w = popxl.variable(3.0, F32, "x"), popxl.variable(2.0, F32, "w")
    graph = ir.create_graph(lambda x, w: x * w, x, w)
    info = autodiff(graph)
    s1 = ops.call_with_info(graph, x, w)
    h = s1.outputs[0]
    s2 = ops.call_with_info(graph, h, w)
    y = s2.outputs[0]
    b2 = ops.call_with_info(info.graph, 1.0, inputs_dict=info.inputs_dict(s2))
    m2 = info.fwd_parent_ins_to_grad_parent_outs(s2, b2)
    b1 = ops.call_with_info(info.graph, m2[h], inputs_dict=info.inputs_dict(s1))
    m1 = info.fwd_parent_ins_to_grad_parent_outs(s1, b1)
    dx, dw = m1[x], m1[w] + m2[w]
    assert results(ir, h, y, dx, dw, m1[w], m2[w]) == [6, 12, 4, 12, 6, 6]


STAGES = [lambda t: t + 1.0, lambda t: t * 2.0, lambda t: t + 3.0, lambda t: t * 10.0]


def test_a_pipeline_over_four_placements(ir, program):
    micro_batches = 5
    x_s, y_s = popxl.h2d_stream((), F32, "in"), popxl.d2h_stream((), F32, "out")
    waiting: dict[int, popxl.Tensor] = {}
    table = []
    for cycle in range(micro_batches + len(STAGES) - 1):
        finished = []
        for s, stage in enumerate(STAGES):
            batch = cycle - s
            if 0 <= batch < micro_batches:
                with popxl.ipu(s):
                    t = ops.host_load(x_s) if s == 0 else waiting.pop(batch)
                    finished.append((batch, s, stage(t)))
        table.append([batch for batch, *_ in finished])
        for batch, s, t in finished:
            with popxl.ipu(s):
                if s + 1 < len(STAGES):
                    waiting[batch] = ops.ipu_copy(t, s + 1)
                else:
                    ops.host_store(y_s, t)
    ir.num_host_transfers = micro_batches
    assert table == [[0], [1, 0], [2, 1, 0], [3, 2, 1, 0], [4, 3, 2, 1], [4, 3, 2], [4, 3], [4]]
    with popxl.Session(ir, "ipu_model") as session:
        assert session.run({x_s: np.arange(5, dtype=np.float32)})[y_s].tolist() == [50, 70, 90, 110, 130]


def test_a_pipeline_whose_main_phase_is_a_loop(ir, program):
    """The tensors that wait in front of the stages are carried from turn to turn."""
    micro_batches = 5
    x_s, y_s = popxl.h2d_stream((), F32, "in"), popxl.d2h_stream((), F32, "out")

    def cycle(*waiting):
        done = [stage(t) for stage, t in zip(STAGES, (ops.host_load(x_s), *waiting), strict=False)]
        if len(done) == len(STAGES):
            ops.host_store(y_s, done.pop())
        return done

    waiting = []
    for _ in STAGES[1:]:
        waiting = cycle(*waiting)
    turn = ir.create_graph(cycle, *waiting)
    waiting = ops.repeat(turn, micro_batches - len(waiting), *waiting)
    for first in range(1, len(STAGES)):
        *waiting, last = [stage(t) for stage, t in zip(STAGES[first:], waiting, strict=True)]
        ops.host_store(y_s, last)
    ir.num_host_transfers = micro_batches
    with popxl.Session(ir, "ipu_model") as session:
        assert session.run({x_s: np.arange(5, dtype=np.float32)})[y_s].tolist() == [50, 70, 90, 110, 130]


def test_tensors_of_two_placements_are_not_mixed(ir, program):
    with popxl.ipu(0):
        a = popxl.variable(1.0) + 1.0
    with popxl.ipu(1):
        b = popxl.variable(2.0) + 1.0
        with pytest.raises(ValueError, match="located on different IPUs"):
            a + b
        c = a.copy_to_ipu(1) + b
    assert results(ir, c) == [5]


# Other transforms -----------------------------------------------------------------------------------------------------


def test_sums_of_four_and_five_become_eleven_ops(ir, program):
    a, b, c, d, e = (popxl.variable(float(v)) for v in (1, 2, 3, 4, 5))
    four = ops.add_n(a, b, c, d)
    total = ops.add_n(four, a, b, c, e)
    assert len(program.ops) == 2
    assert decompose_sum(program) is program
    assert len(program.ops) == 11
    assert results(ir, four, total) == [10, 21]


def test_a_load_and_a_store_become_one_exchange(ir):
    with ir.main_graph as main, popxl.in_sequence(False):
        one, two = popxl.constant(1.0), popxl.constant(2.0)
        x_s = popxl.h2d_stream((), F32, "x")
        sinks = [popxl.d2h_stream((), F32, "y") for _ in range(3)]
        ops.host_store(sinks[0], one)
        with merge_exchange():
            x = ops.host_load(x_s)
            ops.host_store(sinks[1], two)
        assert [op.op_type for op in main.ops] == ["HostStore", "Init", "MultiExchange"]
        ops.host_store(sinks[2], x)
    with popxl.Session(ir, "ipu_model") as session:
        outputs = session.run({x_s: 3.0})
        assert [float(outputs[s]) for s in sinks] == [1, 2, 3]


# Several replicas -----------------------------------------------------------------------------------------------------


COMMAND = (sys.executable, "-m", replicated_programs.__name__)
"""Runs those programs, which check their numbers, in another process, and prints their names."""


@pytest.mark.thorough
@pytest.mark.parametrize("devices", [1, 2, 8])
def test_replicated_programs_in_one_process(devices):
    root, variables = Path(__file__).parents[2], os.environ | {"POPXL_CPU_DEVICES": str(devices)}
    done = subprocess.run(COMMAND, cwd=root, env=variables, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        replicated_programs.name_of(program) for _, program in replicated_programs.PROGRAMS
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("replicas", [2, 4, 6, 8, 16])
def test_replicated_programs_in_two_processes(poprun, replicas):
    """Each with half of the replicas, on as many devices."""
    done = poprun("--num-instances=2", f"--num-replicas={replicas}", "--timeout=60", *COMMAND, limit=150)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    programs = [program for count, program in replicated_programs.PROGRAMS if count == replicas]
    names = [replicated_programs.name_of(program) for program in programs]
    assert names
    for tag in ("[0] ", "[1] "):
        assert [line.removeprefix(tag) for line in lines if line.startswith(tag)] == names
