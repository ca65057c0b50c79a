"""`ops.repeat`: what is carried and what is not, references, streams, the call site of a loop, and what is refused."""

import gc

import numpy as np
import pytest

import popxl
from popxl import TensorByRef, ops
from popxl.errors import PopxlError, PopxlInternalError
from popxl.transforms import autodiff
from tests.popxl.evaluate import evaluate

F32 = popxl.float32
accumulate_ = ops.var_updates.accumulate_


def spec(*shape, dtype=F32):
    return popxl.TensorSpec(shape, dtype)


def body(ir, fn):
    """A graph of scalars, one for each parameter of `fn`."""
    return ir.create_graph(fn, *[spec()] * fn.__code__.co_argcount)


# Carried and invariant ------------------------------------------------------------------------------------------------

TABLE = [
    ("an invariant input", lambda x, inc: x + inc, 4, (1, 2), [9]),
    ("two carried inputs", lambda a, b: (b, a + b), 5, (0, 1), [5, 8]),
    ("a swap", lambda a, b: (b, a), 3, (1, 2), [2, 1]),
    ("no turn", lambda x: x + 1, 0, (7,), [7]),
    ("one turn", lambda x: x + 1, 1, (7,), [8]),
    ("many turns", lambda x: x * 2, 20, (1,), [2.0**20]),
    ("nothing", lambda: None, 3, (), []),
    ("nothing carried", lambda x, y: None, 3, (1, 2), []),
    ("an output that is an input", lambda a, b: b, 2, (1, 2), [2]),
    ("one output twice", lambda a, b: (a * 2, a * 2), 3, (1, 0), [8, 8]),
]


def test_the_table_of_results(ir, run):
    with ir.main_graph:
        results = [ops.repeat(body(ir, fn), count, *inputs) for _, fn, count, inputs, _ in TABLE]
    found = iter(run(ir, *(t for result in results for t in result)))
    for (name, *_, expected), result in zip(TABLE, results, strict=True):
        assert type(result) is tuple
        assert [next(found) for _ in result] == expected, name


def test_pairs_are_by_position_however_inputs_are_bound(ir, run):
    with ir.main_graph:
        g = body(ir, lambda x, inc: x + inc)
        x, inc = g.inputs
        one, two = popxl.variable(1.0), popxl.variable(2.0)
        results = [
            ops.repeat(g, 4, inputs_dict={inc: two, x: one}),
            ops.repeat(g, 4, [one], inputs_dict={inc: 2}),
            ops.repeat(g, 4, [one, two]),
            ops.repeat(g, repeat_count=4, inputs_dict={inc: two, x: one}),
        ]
    assert run(ir, *(result[0] for result in results)) == [9] * 4


def test_the_same_tensor_twice(ir, run):
    with ir.main_graph:
        x = popxl.variable(1.0)
        (y,) = ops.repeat(body(ir, lambda x, inc: x + inc), 3, x, x)
    assert run(ir, y) == [4]


def test_loops_in_loops_and_calls(ir, run):
    with ir.main_graph:
        add = body(ir, lambda x, inc: x + inc)
        inner = body(ir, lambda x, inc: ops.repeat(add, 3, x, inc))
        outer = body(ir, lambda x, inc: ops.call(inner, *ops.repeat(inner, 2, x, inc), inc))
        (y,) = ops.repeat(outer, 2, 0.0, 1.0)
        (z,) = ops.call(outer, 0.0, 1.0)
    assert run(ir, y, z) == [18, 9]


def test_a_turn_can_be_counted_and_kept(ir):
    """The example of the specification, without the dynamic update: rows are written by a mask."""

    def turn(i, buf: TensorByRef):
        ops.var_updates.copy_var_update_(buf, ops.where(ops.equal(positions, i), i * 10.0, buf))
        return i + 1

    def outer(i, buf: TensorByRef):
        nonlocal positions
        with popxl.in_sequence():
            positions = popxl.constant([0.0, 1.0, 2.0, 3.0])
            return turn(i, buf)

    positions = None
    with ir.main_graph, popxl.in_sequence():
        buf = popxl.variable([0.0] * 4)
        (last,) = ops.repeat(ir.create_graph(outer, spec(), buf), 4, 0.0, buf)
        kept = popxl.variable(0.0)
        ops.var_updates.copy_var_update_(kept, last)
    with popxl.Session(ir) as session:
        session.run()
    assert (buf.data.tolist(), kept.data) == ([0, 10, 20, 30], 4)


# By value and by reference --------------------------------------------------------------------------------------------


def counting(ir, by_ref, count):
    """`x + c` for a `c` that grows in each turn: the results, and `c` afterwards."""
    hint = TensorByRef if by_ref else popxl.Tensor

    def turn(x, c: hint):
        return x + accumulate_(c, popxl.constant(1.0))

    with ir.main_graph, popxl.in_sequence():
        c = popxl.variable(0.0)
        (x,) = ops.repeat(ir.create_graph(turn, spec(), c), count, 100.0, c)
        result = popxl.variable(0.0)
        ops.var_updates.copy_var_update_(result, x)
    with popxl.Session(ir) as session:
        session.run()
    return result.data, c.data


@pytest.mark.parametrize(
    ("by_ref", "count", "expected"),
    [
        (False, 1, (101, 0)),
        (False, 3, (103, 0)),
        (True, 1, (101, 1)),
        (True, 2, (103, 2)),
        (True, 3, (106, 3)),
        (True, 0, (100, 0)),
    ],
)
def test_an_invariant_input_that_is_changed(ir, by_ref, count, expected):
    assert counting(ir, by_ref, count) == expected


@pytest.mark.parametrize(
    ("returned", "count", "carried", "left"),
    [
        ("the changed tensor", 3, 13, 13),  # 10 + 1 + 1 + 1
        ("another", 3, 80, 41),  # 10 -> 20 -> 40 -> 80; the last turn adds 1 to the 40 that it was given
        ("another", 0, 10, 10),
    ],
)
def test_a_carried_input_by_reference(ir, returned, count, carried, left):
    def turn(x: TensorByRef):
        with popxl.in_sequence():
            doubled = x * 2
            x += 1
            return x if returned == "the changed tensor" else doubled

    with ir.main_graph, popxl.in_sequence():
        v, result = popxl.variable(10.0), popxl.variable(0.0)
        (y,) = ops.repeat(ir.create_graph(turn, v), count, v)
        ops.var_updates.copy_var_update_(result, y)
    with popxl.Session(ir) as session:
        session.run()
    assert (result.data, v.data) == (carried, left)


def test_which_inputs_are_written_back(ir):
    """A carried input always, an invariant one if the body changes it."""

    def turn(carried: TensorByRef, value, changed: TensorByRef, kept: TensorByRef):
        with popxl.in_sequence():
            value += 1
            changed += 1
            return carried + kept

    with ir.main_graph:
        v = [popxl.variable(1.0) for _ in range(4)]
        site = ops.repeat_with_info(ir.create_graph(turn, *v), 2, *v)
    assert {site.inputs[i] for i in site.op.modified} == {v[0], v[2]}


def test_a_mark_on_the_loop_alone_changes_nothing(ir):
    with ir.main_graph:
        v = popxl.variable(1.0)

        def turn(x, c):
            with popxl.in_sequence():
                c += 1
                return x + c

        site = ops.repeat_with_info(ir.create_graph(turn, v, v), 2, 0.0, v)
        site.set_parent_input_modified(v)
    assert len(site.op.modified) == 1
    with popxl.Session(ir) as session:
        session.run()
    assert v.data == 1


# Streams --------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Session. a run:popxl.errors.PopxlWarning")  # it stores once
def test_streams_go_on_with_each_turn(ir):
    ir.num_host_transfers = 6
    with ir.main_graph, popxl.in_sequence():
        source, sink = popxl.h2d_stream((2,), F32), popxl.d2h_stream((2,), F32)

        def turn(total):
            x = ops.host_load(source)
            total = total + x * ops.host_load(source)
            ops.host_store(sink, total)
            return total

        (y,) = ops.repeat(ir.create_graph(turn, spec(2)), 3, [np.zeros(2)])
        last = popxl.variable(np.zeros(2), F32)
        ops.var_updates.copy_var_update_(last, y)
    data = np.arange(12, dtype=np.float32).reshape(6, 2)
    with popxl.Session(ir) as session:
        found = session.run({source: data})[sink]
    expected = np.cumsum(data[0::2] * data[1::2], axis=0)
    np.testing.assert_array_equal(found[:3], expected)
    np.testing.assert_array_equal(last.data, expected[-1])


def test_an_input_that_the_body_replaces_is_still_an_input(ir):
    ir.num_host_transfers = 2
    with ir.main_graph:
        source, sink = popxl.h2d_stream((), F32), popxl.d2h_stream((), F32)

        def turn(x):
            x = ops.host_load(source)
            ops.host_store(sink, x * 2)

        g = ir.create_graph(turn, spec())
        with pytest.raises(ValueError, match="^Not enough inputs"):
            ops.repeat(g, 2)
        ops.repeat(g, 2, 0.0)
    with popxl.Session(ir) as session:
        assert session.run({source: [1.0, 2.0]})[sink].tolist() == [2, 4]


def test_no_turn_leaves_streams_alone(ir):
    with ir.main_graph:
        source, sink = popxl.h2d_stream((), F32), popxl.d2h_stream((), F32)
        ops.repeat(ir.create_graph(lambda: ops.host_store(sink, ops.host_load(source))), 0)
        ops.host_store(sink, ops.host_load(source))
    with popxl.Session(ir) as session:
        assert session.run({source: 3.0})[sink] == 3


# The call site --------------------------------------------------------------------------------------------------------


def test_a_call_site(ir):
    with ir.main_graph:
        g = body(ir, lambda a, b, c: (b, a + c))
        v = tuple(popxl.variable(float(k)) for k in range(3))
        info = ops.repeat_with_info(g, 4, *v)
        results = ops.repeat(g, 4, *v)
    wrapper = info.called_graph
    assert wrapper.called_graphs == (g,)
    assert wrapper.name == f"{g.name}__loop_wrapper_subgraph(1)"
    assert (len(wrapper.inputs), len(wrapper.outputs)) == (5, 3)
    assert [(t.dtype, t.shape) for t in wrapper.inputs[:2]] == [(popxl.int32, ()), (popxl.bool, ())]
    assert (info.inputs, len(info.outputs), len(results)) == (v, 2, 2)
    for index in (0, 1, 5):
        with pytest.raises(IndexError, match=f"no input {index}; it has 3, numbered from 2"):
            info.parent_input(index)
    assert tuple(info.parent_input(k + 2) for k in range(3)) == v
    assert tuple(info.parent_output(k) for k in range(2)) == info.outputs
    with pytest.raises(IndexError):
        info.parent_output(2)
    assert [info.graph_to_parent_input_index(k) for k in range(5)] == list(range(5))
    assert [info.parent_to_graph_input_index(k) for k in range(5)] == list(range(5))
    assert [info.graph_to_parent_output_index(j) for j in (1, 2)] == [0, 1]
    assert [info.parent_to_graph_output_index(k) for k in (0, 1)] == [1, 2]
    assert [info.graph_to_parent(t) for t in wrapper.inputs[2:]] == list(v)
    assert [info.graph_to_parent(t) for t in wrapper.outputs[1:]] == list(info.outputs)
    assert [info.parent_to_graph(t) for t in v] == list(wrapper.inputs[2:])
    with pytest.raises(ValueError):
        info.graph_to_parent(g.inputs[0])
    with pytest.raises(ValueError):
        info.parent_to_graph(info.outputs[0])


def test_what_a_loop_adds_to_its_graph(ir):
    with ir.main_graph as main:
        g = body(ir, lambda x, inc: x + inc)
        x = popxl.variable(1.0)
        results = ops.repeat(g, 3, x, 2.0)
    assert [op.op_type for op in main.ops] == ["Loop"]
    assert set(main.tensors) == {x, *main.constants, *results} and len(main.constants) == 1


def test_names_of_results(ir):
    def f(x):
        return ops.identity(x, "y")

    with ir.main_graph, popxl.name_scope("outer"):
        g = ir.create_graph(f, spec())
        x = popxl.variable(1.0)
        first, second = ops.repeat(g, 2, x)[0], ops.repeat(g, 2, x)[0]
    assert [t.name for t in (first, second)] == ["outer/y__t1", "outer/y__t3"]  # two numbers for each


def test_one_op_more_whatever_the_settings(ir):
    """A loop takes the name scope, the place and the order of its surroundings."""
    with ir.main_graph, popxl.in_sequence(), popxl.ipu(1), popxl.name_scope("s"):
        g = body(ir, lambda x: x + 1)
        first = ops.init((), F32)
        info = ops.repeat_with_info(g, 2, 1.0)
    assert (info.op.ipu, info.op.after, info.op.name) == (1, (first.producer.id,), "s/Loop")


# What is refused ------------------------------------------------------------------------------------------------------

REFUSED = [
    ("a negative count", lambda g, a, ir: ops.repeat(g, -1, a, a), ValueError, "^Repeat count must be >= 0"),
    (
        "text in place of the graph",
        lambda g, a, ir: ops.repeat("g", 2, a),
        TypeError,
        "^repeat: `graph` must be a Graph",
    ),
    ("a tensor in place of the count", lambda g, a, ir: ops.repeat(g, a, a, a), TypeError, "must be an int"),
    ("before all else", lambda g, a, ir: ops.repeat(g, -1, "a"), ValueError, "^Repeat count must be >= 0"),
    (
        "too many outputs",
        lambda g, a, ir: ops.repeat(body(ir, lambda x: (x, x)), 2, "a", a),
        ValueError,
        "^To repeat the subgraph",
    ),
    ("too many", lambda g, a, ir: ops.repeat(g, 2, a, a, a), ValueError, "^Too many inputs have been provided"),
    ("too few", lambda g, a, ir: ops.repeat(g, 2, a), ValueError, "^Not enough inputs have been provided"),
    (
        "bound twice",
        lambda g, a, ir: ops.repeat(g, 2, a, a, inputs_dict={g.inputs[0]: a}),
        ValueError,
        "^Graph input tensor is specified twice",
    ),
    (
        "a foreign key",
        lambda g, a, ir: ops.repeat(g, 2, a, inputs_dict={a: a}),
        ValueError,
        "not in the called graph",
    ),
    ("a foreign tensor", lambda g, a, ir: ops.repeat(g, 2, g.inputs[0], a), ValueError, "not in the main graph"),
    (
        "another shape",
        lambda g, a, ir: ops.repeat(g, 2, a, [[1.0, 2.0]]),
        PopxlError,
        r"of graph `[^`]*subgraph\(0\)` is f32.*Nothing is broadcast",
    ),
    (
        "another dtype",
        lambda g, a, ir: ops.repeat(g, 2, popxl.constant(1), a),
        PopxlError,
        "Nothing is broadcast or converted",
    ),
    (
        "another dtype carried on",
        lambda g, a, ir: ops.repeat(body(ir, lambda x: ops.cast(x, popxl.int32)), 2, a),
        PopxlError,
        "they have to be alike",
    ),
    (
        "another shape carried on",
        lambda g, a, ir: ops.repeat(body(ir, lambda x: ops.reshape(x, (1,))), 2, a),
        PopxlError,
        "they have to be alike",
    ),
    (
        "without the check",
        lambda g, a, ir: ops.repeat_with_info(g, 2, a, check_inputs=False),
        IndexError,
        "Not enough inputs",
    ),
]


@pytest.mark.parametrize(("call", "error", "match"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_refused(ir, call, error, match):
    g = body(ir, lambda x, y: x + y)
    with ir.main_graph as main:
        a = popxl.variable(1.0)
        with pytest.raises(error, match=match):
            call(g, a, ir)
    assert (main.ops, g.call_sites) == ([], [])
    assert not [graph for graph in ir.graphs if "wrapper" in graph.name]


@pytest.mark.usefixtures("only_new_objects")
def test_one_tensor_for_two_inputs_by_reference(ir):
    def turn(x: TensorByRef, y: TensorByRef):
        x += y

    g = ir.create_graph(turn, spec(), spec())
    with ir.main_graph as main:
        v = popxl.variable(1.0)
        with pytest.raises(PopxlInternalError):
            ops.repeat(g, 2, v, v)
    gc.collect()
    assert (main.ops, g.call_sites) == ([], [])


def test_no_current_graph(ir):
    with pytest.raises(RuntimeError, match="no current graph"):
        ops.repeat(body(ir, lambda x: x), 2, 1.0)


def test_outputs_that_autodiff_adds_do_not_change_existing_loops(ir, run):
    with ir.main_graph:
        g = body(ir, lambda x, k: ops.sin(x) * k)
        info = ops.repeat_with_info(g, 2, 1.0, 2.0)
        popxl.transforms.autodiff(g)
    assert len(g.outputs) > 1 and len(info.outputs) == 1
    (found,) = run(ir, *info.outputs)
    assert found == pytest.approx(np.sin(np.sin(1) * 2) * 2, rel=1e-6)


@pytest.mark.parametrize("count", [1, 3])
def test_second_derivatives(count):
    """What a gradient reads of each turn is stacked, and gradients flow through the stacks."""

    def build(x):
        ir = popxl.gcg().ir
        body = ir.create_graph(lambda x: x * x, x)
        forward = ir.create_graph(lambda x: ops.repeat(body, count, x)[0], x)
        first = autodiff(forward)

        def gradient(x):
            site = ops.call_with_info(forward, x)
            return ops.call(first.graph, 1.0, inputs_dict=first.inputs_dict(site))

        derived = ir.create_graph(gradient, x)
        second = autodiff(derived, grads_provided=derived.outputs[:1])
        site = ops.call_with_info(derived, x)
        return [site.outputs[0], *ops.call(second.graph, 1.0, inputs_dict=second.inputs_dict(site))]

    n, x = 2**count, 1.1
    np.testing.assert_allclose(evaluate(build, np.float32(x)), [n * x ** (n - 1), n * (n - 1) * x ** (n - 2)], 1e-5)


# What a loop costs ----------------------------------------------------------------------------------------------------


def adds_to_all(big: TensorByRef):
    big += 1.0


def adds_to_a_part(big: TensorByRef):
    part = ops.slice_(big, 0, 8)
    part += 1.0


def writes_a_row(i, big: TensorByRef):
    rows = ops.reshape_(big, (256, 1024))
    ops.dynamic_update_(rows, i, popxl.constant(np.ones((1, 1024)), F32), axes=[0], sizes=[1], no_overlap=True)
    return i + 1


def returns_what_it_changed(big: TensorByRef):
    big += 1.0
    return big


def only_reads(total, big: TensorByRef):
    return total + ops.sum(ops.slice(big, 0, 8))


@pytest.mark.thorough(but_each=5)
@pytest.mark.parametrize("called_graphs", ["kept", "dispatched", "inlined"])
@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("fn", [adds_to_all, adds_to_a_part, writes_a_row, returns_what_it_changed, only_reads])
def test_a_variable_that_a_loop_changes_is_not_copied(ir, fn, called, called_graphs):
    ir.options.calledGraphs = called_graphs
    with ir.main_graph, popxl.in_sequence():
        big = popxl.variable(np.zeros(256 * 1024), F32)
        firsts = {writes_a_row: [popxl.constant([3], popxl.uint32)], only_reads: [popxl.constant(0.0)]}.get(fn, [])
        turn = ir.create_graph(fn, *firsts, big)

        def loop(big: TensorByRef):
            ops.repeat(turn, 4, *(popxl.constant(t.data, t.dtype) for t in firsts), big)

        for _ in range(2):
            if called:
                ops.call(ir.create_graph(loop, big), big)
            else:
                ops.repeat(turn, 4, *firsts, big)
    with popxl.Session(ir) as session:
        session.run()
        assert session.program.temporaries() < big.nelms
        expected = {adds_to_all: 8, adds_to_a_part: 8, returns_what_it_changed: 8}.get(fn, 0)
        assert session.get_tensor_data(big)[0] == expected


def test_thousands_of_loops_are_built_quickly(ir):
    with ir.main_graph:
        g, x = body(ir, lambda x: x + 1), popxl.variable(1.0)
        for _ in range(2000):
            (x,) = ops.repeat(g, 2, x)
    assert len(ir.graphs) == 2002
