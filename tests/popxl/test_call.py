"""`ops.call`: binding, results, call sites, what a callee can do to its caller's tensors, and what is refused."""

import re

import numpy as np
import pytest

import popxl
from popxl import TensorByRef, ops
from popxl.errors import NarrowedNumberWarning, PopxlError, PopxlInternalError

F32 = popxl.float32
SCALAR = popxl.TensorSpec((), F32)
accumulate_ = ops.var_updates.accumulate_


def one():
    return popxl.constant(1.0)


def after(ir, *variables):
    """The variables after one run."""
    with popxl.Session(ir) as session:
        session.run()
    return [v.data.tolist() for v in variables]


def three(x, y, z):
    """A graph of three scalars that tells them apart."""
    return x * 100 + y * 10 + z


@pytest.fixture
def graph(ir):
    return ir.create_graph(three, SCALAR, SCALAR, SCALAR)


# Binding --------------------------------------------------------------------------------------------------------------


def test_the_example(ir, run):
    def axpy(x, y, a: float):
        return x * a + y

    with ir.main_graph:
        x, y = popxl.variable(3.0), popxl.variable(4.0)
        g = ir.create_graph(axpy, x, y, 2.0)
        (z,) = ops.call(g, x, y)
        (z2,) = ops.call(g, 1, inputs_dict={g.inputs[1]: z})
    assert run(ir, z, z2) == [10, 12]


def test_ways_to_bind(ir, graph, run):
    x, y, z = graph.inputs
    with ir.main_graph:
        a, b, c = (popxl.variable(v) for v in (1.0, 2.0, 3.0))
        results = [
            ops.call(graph, a, b, c),
            ops.call(graph, [a, b], c),
            ops.call(graph, (a,), [b, c]),
            ops.call(graph, iter([a, b, c])),
            ops.call(graph, [], a, [b], c),
            ops.call(graph, a, inputs_dict={z: c, y: b}),
            ops.call(graph, inputs_dict={z: c, x: a, y: b}),
            ops.call(graph, {a: "a", b: "b"}, c),  # a dict is flattened to its keys
            ops.call(graph, 1, 2.0, np.float32(3)),
            ops.call(graph, [1, 2], np.array([3.0])),  # arrays are flattened too
            ops.call(graph, np.array([1.0, 2.0, 3.0])),
            ops.call(graph, True, [2, c]),
            ops.call(graph, 1, inputs_dict={y: 2, z: np.array(3)}),
        ]
    assert all(type(result) is tuple and len(result) == 1 for result in results)
    assert run(ir, *(result[0] for result in results)) == [123] * len(results)


def test_arrays_are_wrapped_or_named(ir, run):
    g = ir.create_graph(lambda x: x * 2, popxl.TensorSpec((2,), F32))
    with ir.main_graph:
        (a,) = ops.call(g, [np.array([1.0, 2.0])])
        (b,) = ops.call(g, [[1, 2]])
        (c,) = ops.call(g, inputs_dict={g.inputs[0]: np.array([1.0, 2.0])})
        with pytest.raises(ValueError, match="Too many inputs"):
            ops.call(g, np.array([1.0, 2.0]))
    assert run(ir, a, b, c) == [[2, 4]] * 3


def test_values_become_constants_of_the_input_dtype(ir, run):
    g = ir.create_graph(lambda x: x, popxl.TensorSpec((), popxl.int32))
    with ir.main_graph:
        with pytest.warns(NarrowedNumberWarning, match="bound to the input `x`: 1.7 does not fit int32, where it is 1"):
            (y,) = ops.call(g, 1.7)
        (constant,) = ir.main_graph.constants
    assert (constant.dtype, constant.data) == (popxl.int32, 1)
    assert run(ir, y) == [1]


def test_one_tensor_for_several_inputs(ir, graph, run):
    with ir.main_graph:
        a = popxl.variable(2.0)
        (y,) = ops.call(graph, a, a, a)
    assert run(ir, y) == [222]


REFUSED = [
    ("a 0-d array", lambda g, a, x: ops.call(g, np.array(1.0)), TypeError, "0-d array.*Pass the number in it"),
    ("a number in place of the graph", lambda g, a, x: ops.call(3, a), TypeError, "must be a Graph"),
    ("too many", lambda g, a, x: ops.call(g, a, [a, a], a), ValueError, "^Too many inputs have been provided to the c"),
    ("too few", lambda g, a, x: ops.call(g, a, a), ValueError, "^Not enough inputs have been provided for the called"),
    ("none", lambda g, a, x: ops.call(g), ValueError, "^Not enough inputs have been provided for the called graph"),
    ("another graph's tensor", lambda g, a, x: ops.call(g, a, x[0], a), ValueError, "not in the main graph"),
    ("a key of another graph", lambda g, a, x: ops.call(g, a, inputs_dict={a: a}), ValueError, "not in the called gra"),
    ("a key that is no tensor", lambda g, a, x: ops.call(g, a, inputs_dict={"y": a}), TypeError, "keys"),
    ("a foreign value", lambda g, a, x: ops.call(g, a, a, inputs_dict={x[2]: x[0]}), ValueError, "not in the main gr"),
    ("a key that is no input", lambda g, a, x: ops.call(g, a, inputs_dict={g.outputs[0]: a}), PopxlError, "not an inp"),
    (
        "bound twice",
        lambda g, a, x: ops.call(g, a, a, a, inputs_dict={x[1]: a}),
        ValueError,
        "^Graph input tensor is specified twice for the called graph",
    ),
    (
        "an array by position",
        lambda g, a, x: ops.call(g, np.ones((2, 2)), inputs_dict={x[1]: a}),
        ValueError,
        "specified twice .*taken apart into its rows",
    ),
    ("text", lambda g, a, x: ops.call(g, a, "b", a), TypeError, "cannot become a constant"),
    ("nothing", lambda g, a, x: ops.call(g, a, None, a), TypeError, "cannot become a constant"),
    ("an empty list", lambda g, a, x: ops.call(g, a, a, inputs_dict={x[2]: []}), TypeError, "cannot become a constant"),
    ("an object", lambda g, a, x: ops.call(g, a, a, object()), TypeError, "cannot become a constant"),
    ("another shape", lambda g, a, x: ops.call(g, a, a, [[1.0, 2.0]]), PopxlError, "Nothing is broadcast"),
    ("too many, before all else", lambda g, a, x: ops.call(g, "a", x[0], a, a), ValueError, "^Too many inputs"),
    (
        "a foreign tensor, before keys",
        lambda g, a, x: ops.call(g, x[0], inputs_dict={1: a}),
        ValueError,
        "not in the m",
    ),
    (
        "all keys, before what they name",
        lambda g, a, x: ops.call(g, inputs_dict={g.outputs[0]: a, a: a}),
        ValueError,
        "not in the called graph",
    ),
    (
        "all values, before bindings",
        lambda g, a, x: ops.call(g, a, inputs_dict={x[0]: a, x[1]: x[0]}),
        ValueError,
        "not in the main graph",
    ),
    (
        "what is no input, before what is bound twice",
        lambda g, a, x: ops.call(g, a, inputs_dict={x[0]: a, g.outputs[0]: a}),
        PopxlError,
        "not an input of it",
    ),
    ("values, before what is missing", lambda g, a, x: ops.call(g, "a"), TypeError, "cannot become a constant"),
]


@pytest.mark.parametrize(("call", "error", "match"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_refused_bindings(ir, graph, call, error, match):
    with ir.main_graph as main:
        a = popxl.variable(1.0)
        with pytest.raises(error, match=match):
            call(graph, a, graph.inputs)
    assert (main.ops, graph.call_sites) == ([], [])
    assert [t for t in main.tensors if not isinstance(t, popxl.tensor.Constant)] == [a]


@pytest.mark.parametrize(
    "spec", [popxl.TensorSpec((1,), F32), popxl.TensorSpec((), popxl.float16), popxl.TensorSpec((), F32, (1,))]
)
def test_shapes_and_dtypes_have_to_fit(ir, graph, spec):
    with ir.create_empty_graph():
        other = popxl.graph_input(**spec)
        fits = popxl.graph_input(**SCALAR)
        with pytest.raises(PopxlError, match="Nothing is broadcast or converted at a call"):
            ops.call(graph, fits, other, fits)


def test_what_is_missing_is_listed(ir, graph):
    with ir.main_graph, pytest.raises(ValueError) as error:
        ops.call(graph, inputs_dict={graph.inputs[1]: popxl.variable(1.0, name="known")})
    text = str(error.value)
    assert "x, z" in text.splitlines()[0] and "known" in text


def test_check_inputs(ir, graph):
    with ir.main_graph:
        a = popxl.variable(1.0)
        assert len(ops.call_with_info(graph, a, a, a, check_inputs=False).outputs) == 1
        with pytest.raises(IndexError):
            ops.call_with_info(graph, a, check_inputs=False)
        with pytest.raises(TypeError):
            ops.call(graph, a, a, a, check_inputs=False)


def test_no_current_graph(graph):
    with pytest.raises(RuntimeError, match="no current graph"):
        ops.call(graph, 1, 2, 3)


def test_graphs_that_call_themselves(ir):
    with ir.main_graph:
        ops.init((), F32)
        with pytest.raises(PopxlError, match="calls itself"):
            ops.call(ir.main_graph)
    outer = ir.create_empty_graph("outer")
    inner = ir.create_graph(lambda: ops.call(outer))
    with outer, pytest.raises(PopxlError, match="calls itself"):
        ops.call(inner)
    with outer, pytest.raises(PopxlError, match="calls itself"):
        ops.repeat(inner, 2)


def test_a_graph_of_another_ir(ir, graph):
    with popxl.Ir().main_graph as main:
        with pytest.raises(ValueError, match="another Ir"):
            ops.call(graph, 1.0, 2.0, 3.0)
    assert main.tensors == ()


# Results --------------------------------------------------------------------------------------------------------------


def test_graphs_without_outputs(ir):
    with ir.main_graph:
        assert ops.call(ir.create_graph(lambda: None)) == ()


def test_names_of_results(ir):
    def f(x):
        with popxl.name_scope("inner"):
            return ops.identity(x, "y")

    g = ir.create_graph(f, SCALAR)
    with ir.main_graph:
        first, second = ops.call(g, 1.0)[0], ops.call(g, one())[0]
        with popxl.name_scope("outer"):
            third = ops.call(g, 1.0)[0]
    assert first.name == first.id == "inner/y"
    assert second.name == "inner/y__t1"  # the number 0 went to a constant
    assert third.name == "outer/inner/y"
    assert ir.main_graph.ops[-1].name == "outer/Call"


def test_results_are_a_snapshot(ir):
    g = ir.create_graph(lambda x: ops.sin(ops.sin(x)), SCALAR)
    with ir.main_graph:
        x = popxl.variable(1.0)
        results, site = ops.call(g, x), ops.call_with_info(g, x)
        popxl.transforms.autodiff(g)
    assert len(results) == 1 and len(site.outputs) == len(g.outputs) == 2


def test_results_are_new_tensors(ir, run):
    with ir.main_graph, popxl.in_sequence():
        x = popxl.variable(1.0)
        (y,) = ops.call(ir.create_graph(lambda x: x, x), x)
        (z,) = ops.call(ir.create_graph(lambda x: ops.add_(x, one()), x), x)
        x += 10
        y += 100
        unchanged = x + 0, y + 0, z + 0
    assert run(ir, *unchanged) == [11, 101, 2]


def test_results_are_read_at_the_end(ir, run):
    def f(x, y):
        with popxl.in_sequence():
            doubled = x * 2
            x += 1
            y += x
        return x, doubled, y

    with ir.main_graph:
        results = ops.call(ir.create_graph(f, SCALAR, SCALAR), 1.0, 10.0)
    assert run(ir, *results) == [2, 2, 12]


# Call sites -----------------------------------------------------------------------------------------------------------


def test_a_call_site(ir):
    with ir.main_graph:
        a, b = popxl.variable(5, name="a"), popxl.variable(2, name="b")
        g = ir.create_graph(lambda p, q: (p * q, q - p, q), a, b)
        site = ops.call_with_info(g, a, b)
    assert site.called_graph == g
    assert (site.inputs, len(site.outputs)) == ((a, b), 3)
    assert [site.parent_input(i) for i in (0, 1)] == [a, b]
    assert tuple(site.parent_output(i) for i in range(3)) == site.outputs
    for index in (2, -1):
        with pytest.raises(IndexError):
            site.parent_input(index)
    for index in (3, -1):
        with pytest.raises(IndexError):
            site.parent_output(index)
    for i in range(3):
        assert site.graph_to_parent_input_index(i) == site.parent_to_graph_input_index(i) == i
        assert site.graph_to_parent_output_index(i) == site.parent_to_graph_output_index(i) == i
    assert [site.graph_to_parent(t) for t in g.inputs] == [a, b]
    assert [site.graph_to_parent(t) for t in g.outputs] == [*site.outputs[:2], b]  # an input first
    assert [site.parent_to_graph(t) for t in (a, b)] == list(g.inputs)
    with pytest.raises(ValueError):
        site.graph_to_parent(a)
    with pytest.raises(ValueError):
        site.parent_to_graph(site.outputs[0])


def test_the_first_of_several_inputs(ir, graph):
    with ir.main_graph:
        a = popxl.variable(1.0)
        site = ops.call_with_info(graph, 0.0, a, a)
    assert site.parent_to_graph(a) == graph.inputs[1]


def test_one_graph_many_sites(ir, run):
    with ir.main_graph:
        x = popxl.variable(1.0)
        g = ir.create_graph(lambda x, k: x * k, x, x)
        y = x
        sites = [ops.call_with_info(g, y, float(k)) for k in (2, 3, 5)]
        for k in (2, 3, 5):
            (y,) = ops.call(g, y, float(k))
    assert g.call_sites == [op for op in ir.main_graph.ops if op.op_type == "Call"]
    assert run(ir, y, *(site.outputs[0] for site in sites)) == [30, 2, 3, 5]


def test_outputs_added_by_hand_do_not_reach_existing_calls(ir, run):
    g = ir.create_graph(lambda x: x + 1, SCALAR)
    with ir.main_graph:
        x = popxl.variable(1.0)
        before = ops.call_with_info(g, x)
        with g:
            popxl.graph_output(g.outputs[0] * 2)
        later = ops.call_with_info(g, x)
    assert (len(before.outputs), len(later.outputs)) == (1, 2)
    assert run(ir, *before.outputs, *later.outputs) == [2, 2, 4]
    with g:
        late = popxl.graph_input((), F32, "late")
        popxl.graph_output(late + 1)
    assert (len(before.inputs), len(later.inputs)) == (1, 1)
    with pytest.raises(PopxlError, match="gained inputs"):
        popxl.Session(ir)


# What a callee can do to its caller's tensors -------------------------------------------------------------------------


def bump(x: popxl.Tensor):
    return ops.add_(x, popxl.constant(10.0)) * 2.0


def bump_ref(x: TensorByRef):
    return ops.add_(x, popxl.constant(10.0)) * 2.0


def test_by_value_and_by_reference(ir, run):
    """The worked example of the specification."""
    with ir.main_graph, popxl.in_sequence():
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
    assert run(ir, a, v1, b, v2, site.outputs[0], v3, c, v4) == [22, 1, 22, 11, 42, 21, 62, 21]


def test_changes_stay_from_run_to_run(ir):
    with ir.main_graph:
        v = popxl.variable(1.0)
        ops.call(ir.create_graph(bump_ref, v), v)
    with popxl.Session(ir) as session:
        for expected in (11, 21, 31):
            session.run()
            assert session.get_tensor_data(v) == expected


def test_changes_through_views_count(ir):
    def f(x: TensorByRef):
        ops.relu_(ops.slice_(x, 0, 2))

    with ir.main_graph:
        v = popxl.variable([[-1.0], [-2.0], [-3.0]])
        ops.call(ir.create_graph(f, v), v)
    assert after(ir, v) == [[[0], [0], [-3]]]


def test_a_view_of_the_caller_by_reference(ir):
    """The callee's change is written through the caller's view."""
    with ir.main_graph:
        v = popxl.variable([[1.0, 2.0], [3.0, 4.0]])
        column = ops.slice_(v, 1, 2, axis=1)

        def f(x: TensorByRef):
            x += 10

        ops.call(ir.create_graph(f, column), column)
    assert after(ir, v) == [[[1, 12], [3, 14]]]


def test_a_reference_that_is_not_changed(ir, run):
    def f(x: TensorByRef):
        return x * 2

    with ir.main_graph:
        v = popxl.variable(3.0)
        (y,) = ops.call(ir.create_graph(f, v), v)
    assert run(ir, y) == [6]
    assert after(ir, v) == [3]


@pytest.mark.filterwarnings("ignore::popxl.errors.LostUpdateWarning")
def test_aliases_do_not_cross_the_boundary(ir, run):
    def f(x, y):
        with popxl.in_sequence():
            x += 1
            return y * 1.0

    with ir.main_graph:
        v = popxl.variable([1.0, 2.0])
        (y,) = ops.call(ir.create_graph(f, v, v), ops.reshape_(v, (2,)), v)
    assert run(ir, y) == [[1, 2]]


def test_which_inputs_are_written_back_can_be_read(ir):
    def f(x, y: TensorByRef):
        x += 1

    with ir.main_graph:
        v, w = popxl.variable(1.0), popxl.variable(1.0)
        site = ops.call_with_info(ir.create_graph(f, v, w), v, w)
        assert site.op.modified == {1}
        site.set_parent_input_modified(v)
        site.set_parent_input_modified(v)
        assert site.op.modified == {0, 1}


@pytest.mark.parametrize(("infer", "modified"), [(True, {0}), (False, {0, 1})])
def test_marking_what_is_really_modified(ir, infer, modified):
    def f(x, y):
        x += 1
        return y + 1

    with ir.main_graph:
        v, w = popxl.variable(1.0), popxl.variable(1.0)
        site = ops.call_with_info(ir.create_graph(f, v, w), v, w)
        for t in (v, w):
            site.set_parent_input_modified(t, infer_modified_regions=infer)
    assert site.op.modified == modified
    assert after(ir, v, w) == [2, 1]


def test_a_mark_is_of_one_site(ir, run):
    with ir.main_graph, popxl.in_sequence():
        v = popxl.variable(0.0)
        g = ir.create_graph(bump, v)
        ops.call(g, v)
        ops.call_with_info(g, v).set_parent_input_modified(v)
        ops.call(g, v)
        y = v + 0
    assert run(ir, y) == [10]


def test_refused_marks(ir, graph):
    with ir.main_graph:
        a, b = popxl.variable(1.0), popxl.variable(1.0)
        site = ops.call_with_info(graph, a, a, 0.0)
        for t in (a, b, site.outputs[0]):
            with pytest.raises(PopxlInternalError):
                site.set_parent_input_modified(t)
    assert site.op.modified == frozenset()


def test_one_tensor_for_two_inputs_by_reference(ir):
    def f(x: TensorByRef, y):
        x += y

    with ir.main_graph as main:
        v, w = popxl.variable(1.0), popxl.variable(2.0)
        g = ir.create_graph(f, v, v)
        with pytest.raises(
            PopxlInternalError, match=r"bound to several inputs .* pass a copy, such as `ops.identity\(t\)`"
        ):
            ops.call(g, v, v)
        assert main.ops == []
        ops.call(g, v, w)
        ops.call(g, w, ops.identity(w))
    assert after(ir, v, w) == [3, 4]


def test_a_constant_by_reference(ir, run):
    """The change lives for the execution only."""
    with ir.main_graph, popxl.in_sequence():
        c = popxl.constant(1.0)
        (y,) = ops.call(ir.create_graph(bump_ref, c), c)
    assert run(ir, y) == [22]
    assert c.data == 1


# Nested calls ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("by_ref", "left"), [(False, 5), (True, 6)])
def test_every_level_decides_for_itself(ir, run, by_ref, left):
    def inner(t: TensorByRef):
        accumulate_(t, one())

    hint = TensorByRef if by_ref else popxl.Tensor

    def outer(t: hint):
        with popxl.in_sequence():
            ops.call(inner_graph, t)
            return t * 1.0

    with ir.main_graph, popxl.in_sequence():
        v = popxl.variable(5.0)
        inner_graph = ir.create_graph(inner, v)
        (p,) = ops.call(ir.create_graph(outer, v), v)
        now = v + 0
    assert run(ir, p, now) == [6, left]


def test_a_mark_inside_a_graph(ir):
    """A call in a graph is marked; the graph's own input by reference carries the change out."""

    def outer(t: TensorByRef):
        ops.call_with_info(inner, t).set_parent_input_modified(t)

    with ir.main_graph:
        v = popxl.variable(1.0)
        inner = ir.create_graph(bump, v)
        ops.call(ir.create_graph(outer, v), v)
    assert after(ir, v) == [11]


def test_a_callee_keeps_its_placement(ir):
    with popxl.ipu(2):
        g = ir.create_graph(lambda x: x + 1, SCALAR)
    with ir.main_graph, popxl.ipu(1):
        ops.call(g, 1.0)
    assert (g.ops[0].ipu, ir.main_graph.ops[-1].ipu) == (2, 1)


def test_unreachable_graphs_are_dropped(ir, run):
    """They may even be impossible to run."""
    with ir.main_graph:
        ir.create_graph(lambda x: ops.host_load(popxl.h2d_stream((), F32)), SCALAR)
        y = popxl.variable(1.0) + 1
    assert run(ir, y) == [2]


@pytest.mark.parametrize("depth", [2, 5])
def test_deep_calls(ir, run, depth):
    with ir.main_graph:
        g = ir.create_graph(lambda x: x * 2, SCALAR)
        for _ in range(depth):
            g = ir.create_graph(lambda x, g=g: ops.call(g, *ops.call(g, x)), SCALAR)
        (y,) = ops.call(g, 1.0)
    assert run(ir, y) == [2.0 ** (2**depth)]


@pytest.mark.thorough(but_each=4)
@pytest.mark.parametrize("called_graphs", ["dispatched", "kept", "inlined", "auto"])
def test_calls_may_be_nested_deeper_than_python_recurses(ir, called_graphs, tmp_path):
    """Building, printing, differentiating, saving, checking, compiling, running and measuring."""
    depth = 300
    ir.options.calledGraphs = called_graphs
    with ir.main_graph:
        x, leaf = popxl.variable(1.0), ir.create_graph(lambda x: x * 1.0, SCALAR)
        g = ir.create_graph(lambda x: x * 3.0, SCALAR)
        for _ in range(depth):
            g = ir.create_graph(lambda x, g: ops.call(leaf, *ops.call(g, *ops.call(leaf, x)))[0] * 1.0, x, g)
        info = popxl.transforms.autodiff(g)
        site = ops.call_with_info(g, x)
        (dx,) = ops.call(info.graph, 1.0, inputs_dict=info.inputs_dict(site))
        sinks = [popxl.d2h_stream((), F32, name) for name in "yd"]
        for sink, t in zip(sinks, (site.outputs[0], dx), strict=True):
            ops.host_store(sink, t)
    assert str(ir.main_graph).count("Call") >= 6 * depth
    assert len(ir.graphs) == 2 * depth + 5
    ir.save(tmp_path / "deep")
    assert str(popxl.Ir.load(tmp_path / "deep").main_graph) == str(ir.main_graph)
    with popxl.Session(ir) as session:
        outputs = session.run()
        assert [outputs[sink] for sink in sinks] == [3, 3]
        assert session.program.temporaries() < 1e6


def test_a_graph_that_gains_inputs_by_reference_is_refused_when_it_runs() -> None:
    """Say, a gradient graph that is given accumulators after it was called."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        x = popxl.variable(np.float32([1, 2]))
        graph = ir.create_graph(lambda x: x * 2.0, x)
        ops.host_store(popxl.d2h_stream(x.shape, x.dtype), *ops.call(graph, x))
        with graph:
            for name in ("accumulator", "counter"):
                ops.var_updates.accumulate_(popxl.graph_input(x.shape, x.dtype, name, by_ref=True), graph.inputs[0])
    with pytest.raises(PopxlError, match=r"gained inputs after Op\[Call.101\].*Call a graph after it has all"):
        popxl.Session(ir)


def computed_again() -> popxl.Ir:
    """tanh of a variable, times tanh of the same: a program that recomputes wants nothing to be kept for later."""
    ir = popxl.Ir()
    ir.options.calledGraphs = "inlined"
    with ir.main_graph:
        x = popxl.variable(np.float32([0.1, 0.2, 0.3]))
        forward = ir.create_graph(lambda x: ops.tanh(x), x)
        again = ir.create_graph(lambda d, x: d * ops.call(forward, x)[0], x, x)
        (y,) = ops.call(forward, x)
        ops.host_store(popxl.d2h_stream(x.shape, x.dtype), *ops.call(again, y, x))
    return ir


def test_what_runs_twice_is_computed_twice_on_cpus() -> None:
    with popxl.Session(computed_again()) as session:
        np.testing.assert_allclose(*session.run().values(), np.tanh(np.float32([0.1, 0.2, 0.3])) ** 2, rtol=1e-6)
        (text,) = session.hlo().values()
        assert len(re.findall(r"= \S+ tanh\(", text)) == 2


@pytest.mark.targets
@pytest.mark.parametrize("target", ["tpu v5e", "gpu h100"])
def test_what_runs_twice_is_computed_twice(target: str) -> None:
    """XLA does not see that it is the same."""
    (text,) = popxl.Session(computed_again(), target).hlo().values()
    assert len(re.findall(r"= \S+ tanh\(", text)) == 2
