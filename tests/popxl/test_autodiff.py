"""`transforms.autodiff`: numbers, names, what a gradient graph expects and returns, what is exported and refused.

At the end are the worked programs of the specification.
"""

import numpy as np
import pytest

import popxl
from popxl import TensorByRef, ops
from popxl.errors import PopxlError
from popxl.transforms import ExpectedConnection, ExpectedConnectionType, GradGraphInfo, autodiff

F32 = popxl.float32
SCALAR = popxl.TensorSpec((), F32)
FWD, GRAD = ExpectedConnectionType.Fwd, ExpectedConnectionType.FwdGrad


def graph_of(ir, fn, *specs):
    """A graph of scalars, or of what `specs` say."""
    return ir.create_graph(fn, *(specs or [SCALAR] * fn.__code__.co_argcount))


def gradients(ir, run, graph, values, seeds, info=None, **options):
    """The gradients of a graph at some values: those that `info` returns, by default all."""
    info = info or autodiff(graph, **options)
    with ir.main_graph, popxl.in_sequence():
        site = ops.call_with_info(graph, *map(as_constant, values, graph.inputs))
        given = [as_constant(s, t) for s, t in zip(seeds, info.inputs, strict=False)]
        found = ops.call(info.graph, *given, inputs_dict=info.inputs_dict(site))
    return run(ir, *found)


def as_constant(value, t):
    return popxl.constant(value, t.dtype)


def state(ir):
    """Everything that could have changed in an Ir."""
    return [(g.id, g.inputs, g.outputs, g.tensors, [(op.id, op.inputs, op.outputs) for op in g.ops]) for g in ir.graphs]


# Numbers --------------------------------------------------------------------------------------------------------------

NUMBERS = [
    ("used twice", lambda x: x * x + x, [3.0], [1.0], {}, [7]),
    ("the input itself", lambda x: x, [3.0], [5.0], {}, [5]),
    ("a provided tensor that is used again", lambda x: _chain(x), [2.0], [1.0, 1.0], {}, [7]),
    ("one of two outputs", lambda x: (x * 2, x * 3), [5.0], [1.0], {"provided": [1]}, [3]),
    ("outputs in another order", lambda x: (x * 2, x * 3), [5.0], [1.0, 10.0], {"provided": [1, 0]}, [23]),
    ("both outputs", lambda x: (x * 2, x * 3), [5.0], [1.0, 10.0], {}, [32]),
    ("inputs in another order", lambda x, w, b: x * w + b, [3.0, 2.0, 1.0], [10.0], {"required": [2, 1]}, [10, 30]),
    ("a seed that is not 1", lambda x: ops.sin(x), [0.5], [2.0], {}, [2 * np.cos(0.5)]),
    ("a long chain", lambda x: ops.exp(ops.tanh(x)), [0.5], [1.0], {}, [np.exp(np.tanh(0.5)) / np.cosh(0.5) ** 2]),
    ("a detached part", lambda x: x * ops.detach(x), [3.0], [1.0], {}, [3]),
    ("an output that is a provided input too", lambda x, y: (x * y, x), [3.0, 4.0], [1.0, 10.0], {}, [14, 3]),
    ("one output twice", lambda x: _twice(x), [3.0], [1.0, 10.0], {}, [22]),
    ("a view", lambda x: ops.sum(ops.slice_(ops.reshape_(x, (1,)), 0, 1)) * x, [3.0], [1.0], {}, [6]),
]


def _chain(x):
    y = x + 1
    return y, y * y


def _twice(x):
    y = x * 2
    return y, y


@pytest.mark.parametrize(
    ("fn", "values", "seeds", "options", "expected"), [row[1:] for row in NUMBERS], ids=[row[0] for row in NUMBERS]
)
def test_numbers(ir, run, fn, values, seeds, options, expected):
    graph = graph_of(ir, fn)
    named = {}
    if "provided" in options:
        named["grads_provided"] = [graph.outputs[i] for i in options["provided"]]
    if "required" in options:
        named["grads_required"] = [graph.inputs[i] for i in options["required"]]
    assert gradients(ir, run, graph, values, seeds, **named) == pytest.approx(expected, rel=1e-5)


def test_broadcasting_is_undone(ir, run):
    shapes = [(2, 3), (3,), (2, 1), (), (1, 1)]

    def fn(*ts):
        total = ts[0]
        for t in ts[1:]:
            total = total * t
        return ops.sum(total)

    values = [np.asarray(np.random.rand(*shape), np.float32) + 0.5 for shape in shapes]
    graph = graph_of(ir, fn, *[popxl.TensorSpec(shape, F32) for shape in shapes])
    found = gradients(ir, run, graph, values, [1.0])
    for k, (gradient, shape) in enumerate(zip(found, shapes, strict=True)):
        others = np.prod(np.broadcast_arrays(*[v for i, v in enumerate(values) if i != k], np.ones((2, 3))), axis=0)
        added = tuple(range(2 - len(shape)))
        kept = tuple(d for d in range(len(added), 2) if shape[d - len(added)] == 1)
        expected = others.sum(added + kept, keepdims=True).reshape(shape)
        np.testing.assert_allclose(gradient, expected, rtol=1e-5)


def test_a_matrix_product(ir, run):
    x, w, g = (np.random.randn(*shape).astype(np.float32) for shape in ((2, 3), (3, 4), (2, 4)))
    specs = [popxl.TensorSpec(a.shape, F32) for a in (x, w)]
    dx, dw = gradients(ir, run, graph_of(ir, lambda x, w: x @ w, *specs), [x, w], [g])
    np.testing.assert_allclose(dx, g @ w.T, rtol=1e-5)
    np.testing.assert_allclose(dw, x.T @ g, rtol=1e-5)


def test_an_op_with_several_results(ir, run):
    """Only one part of a split leads to the output: the gradient of the other is zero."""

    def fn(x):
        a, b = ops.split(x, 2)
        return ops.sum(a * 3)

    graph = graph_of(ir, fn, popxl.TensorSpec((4,), F32))
    assert gradients(ir, run, graph, [[1, 2, 3, 4]], [1.0]) == [[3, 3, 0, 0]]


def test_second_derivatives(ir, run):
    """All derivatives of x⁴, each by differentiating a graph that calls the one before and its gradient."""
    graph = graph_of(ir, lambda x: x * x * (x * x))
    for expected in (4 * 8, 12 * 4, 24 * 2, 24):
        info = autodiff(graph, grads_provided=graph.outputs[:1])
        assert gradients(ir, run, graph, [2.0], [1.0], info) == [expected]
        graph = ir.create_graph(lambda x, info, graph: _gradient(info, graph, x), SCALAR, info, graph)


@pytest.mark.parametrize(
    ("fn", "x", "expected"),
    [
        (lambda x: x**3.0 + x**2.0, 0.0, 2),
        (lambda x: x**1.0 + x**0.0, 0.0, 0),
        (lambda x: x**2.5, 4.0, 7.5),
        (lambda x: ops.pow(popxl.constant(0.0), x), 2.0, 0),
        (lambda x: ops.pow(popxl.constant(3.0), x), 2.0, 9 * np.log(3) ** 2),
        (lambda x: ops.abs(ops.complex(x, x * x)), 1.5, 1.920116),  # of √(x² + x⁴)
    ],
)
def test_second_derivatives_of_powers_and_lengths(ir, run, fn, x, expected):
    """Also where JAX's formulas for them have none."""
    graph = graph_of(ir, fn)
    slope = ir.create_graph(_gradient, autodiff(graph), graph, SCALAR)
    np.testing.assert_allclose(
        gradients(ir, run, slope, [x], [1.0], autodiff(slope, slope.outputs[:1])), [expected], 1e-5
    )


def _gradient(info, graph, x):
    """The gradient of a graph of one scalar, as a function of it."""
    site = ops.call_with_info(graph, x)
    (dx,) = ops.call(info.graph, 1.0, inputs_dict=info.inputs_dict(site))
    return dx


def test_required_tensors_inside_the_graph(ir, run):
    def fn(x):
        y = x * 2
        return y * y

    graph = graph_of(ir, fn)
    y = graph.ops[0].outputs[0]
    info = autodiff(graph, grads_required=[y])
    assert gradients(ir, run, graph, [3.0], [1.0], info) == [12]
    assert info.outputs == (y,)


def test_provided_tensors_inside_the_graph(ir, run):
    def fn(x):
        y = x * 2
        return y + 1

    graph = graph_of(ir, fn)
    info = autodiff(graph, grads_provided=[graph.ops[0].outputs[0]])
    assert gradients(ir, run, graph, [3.0], [5.0], info) == [10]


def test_integers_are_not_refused(ir):
    integer = popxl.TensorSpec((2,), popxl.int32)
    for fn in (lambda a, b: a + b, lambda a, b: ops.concat_([a, b]), lambda a, b: ops.concat([a, b])):
        info = autodiff(ir.create_graph(fn, integer, integer))
        assert [t.dtype for t in info.graph.outputs] == [popxl.int32] * 2


def test_indices_get_no_gradient(ir, run):
    graph = graph_of(
        ir, lambda t, i: ops.gather(t, i), popxl.TensorSpec((3,), F32), popxl.TensorSpec((2,), popxl.int32)
    )
    with pytest.raises(PopxlError, match="^Unable to provide required gradient"):
        autodiff(graph)
    found = gradients(ir, run, graph, [[1, 2, 3], [2, 2]], [[1.0, 10.0]], grads_required=graph.inputs[:1])
    assert found == [[0, 0, 11]]


# Names, and what a gradient graph expects -----------------------------------------------------------------------------


def test_names(ir):
    graph = graph_of(ir, lambda x, w: ops.sin(x * w))
    infos = [autodiff(graph), autodiff(graph, grads_provided=graph.outputs[:1])]
    assert [info.graph.name for info in infos] == [f"{graph.name}_bwd", f"{graph.name}_bwd_1"]
    gradient = infos[0].graph
    assert [t.name for t in gradient.outputs] == ["Gradient___x", "Gradient___w"]
    assert gradient.inputs[0].id == f"{graph.name}_bwd/Gradient___sin_out"
    with ir.main_graph, popxl.name_scope("outer"):
        sites = [ops.call_with_info(graph, 1.0, 2.0) for _ in range(2)]
        calls = [ops.call_with_info(gradient, 1.0, inputs_dict=infos[0].inputs_dict(site)) for site in sites]
    assert calls[0].outputs[0].name == "outer/Gradient___x"
    assert calls[1].outputs[0].name.startswith("outer/Gradient___x__t")
    for call in calls:
        for t, gradient in infos[0].fwd_graph_ins_to_grad_parent_outs(call).items():
            assert t.name in gradient.name
    assert infos[0].graph.gradient_of is graph


def test_names_of_gradients_that_pass_through(ir):
    info = autodiff(graph_of(ir, lambda x, y: x + y))
    assert [t.name for t in info.graph.outputs] == ["Gradient___x", "Gradient___y"]
    graph = graph_of(ir, lambda a, out: a + out)  # the sum is called `add_out`, in which both names are
    assert [t.name for t in autodiff(graph).graph.outputs] == ["Gradient___a", "Gradient___out"]


def test_names_of_gradients_that_calls_return(ir):
    """They are renamed, not copied; one that passes through has to be copied, to have both names."""
    inner = graph_of(ir, lambda a, b: a * b)
    graph = graph_of(ir, lambda x, v, w: ops.call(inner, ops.call(inner, x, v)[0], w)[0])
    info = autodiff(graph)
    assert [t.name for t in info.graph.outputs] == ["Gradient___x", "Gradient___v", "Gradient___w"]
    assert [op.op_type for op in info.graph.ops] == ["Call", "Call"]
    graph = graph_of(ir, lambda x, y: ops.call(inner, x + y, x + y)[0])
    info = autodiff(graph)
    assert [t.name for t in info.graph.outputs] == ["Gradient___x", "Gradient___y"]


def test_tensors_that_are_named_twice(ir, run):
    """As often as they are required, or provided, there is a gradient."""
    graph = graph_of(ir, lambda x, y: x * x + y)
    (x, y), (out,) = graph.inputs, graph.outputs
    info = autodiff(graph, grads_provided=[out, out], grads_required=[x, y, x])
    assert (info.outputs, len(info.graph.outputs)) == ((x, y, x), 3)
    assert gradients(ir, run, graph, [3.0, 1.0], [1.0, 10.0], info) == [66, 11, 66]


def test_what_is_expected(ir):
    def fn(x, w, b):
        y = x * w
        return y + b, ops.exp(y)

    graph = graph_of(ir, fn)
    x, w, b = graph.inputs
    outputs = graph.outputs
    info = autodiff(graph, grads_provided=outputs[::-1], grads_required=[b, w])
    assert (info.forward_graph, info.graph.main_graph) == (graph, ir.main_graph)
    assert len(info.expected_inputs) == len(info.graph.inputs) and len(info.expected_outputs) == len(info.graph.outputs)
    assert [(e.fwd_tensor, e.connection_type) for e in info.expected_inputs[:2]] == [(t, GRAD) for t in outputs[::-1]]
    assert {e.connection_type for e in info.expected_inputs[2:]} == {FWD}
    known = {*graph.inputs, *graph.outputs}
    assert all(e.fwd_tensor in known for e in info.expected_inputs[2:])
    assert [(e.fwd_tensor, e.connection_type) for e in info.expected_outputs] == [(b, GRAD), (w, GRAD)]
    assert info.inputs == tuple(e.fwd_tensor for e in info.expected_inputs)
    assert info.outputs == (b, w)
    for expected, t in zip(info.expected_inputs, info.graph.inputs, strict=True):
        assert expected.fwd_tensor.spec == t.spec
    for expected, t in zip(info.expected_outputs, info.graph.outputs, strict=True):
        assert expected.fwd_tensor.spec == t.spec
    assert not any(t.by_ref for t in info.graph.inputs)


def test_activations_are_in_the_order_of_their_ids(ir):
    graph = graph_of(ir, lambda c, a, b: c * a * b * ops.sin(c))
    info = autodiff(graph)
    ids = [e.fwd_tensor.id for e in info.expected_inputs[1:]]
    assert ids == sorted(ids)


def test_records(ir):
    info = autodiff(graph_of(ir, lambda x: ops.sin(x)))
    for kind in (GradGraphInfo, ExpectedConnection):
        with pytest.raises(TypeError):
            kind()
    first, again = info.expected_outputs, info.expected_outputs
    assert first[0] is again[0] and info.expected_outputs.index(first[0]) == 0
    assert type(info.expected_inputs) is tuple
    x = info.outputs[0]
    assert repr(info.expected_outputs[0]) == f"({GRAD}, {x!r})"
    assert repr(info).splitlines() == [
        "GradGraphInfo[",
        f"  graph={info.graph.id}",
        "  expected_inputs=[",
        *(f"    {e!r}" for e in info.expected_inputs),
        "  ]",
        "  expected_outputs=[",
        f"    {info.expected_outputs[0]!r}",
        "  ]",
        "]",
    ]
    assert (FWD.value, GRAD.value) == ("Fwd", "FwdGrad")


def test_irrelevant_provided_tensors_are_still_expected(ir, run):
    graph = graph_of(ir, lambda x, y: (x * 2, y * 3))
    info = autodiff(graph, grads_required=graph.inputs[:1])
    assert [e.connection_type for e in info.expected_inputs] == [GRAD, GRAD]
    assert gradients(ir, run, graph, [1.0, 1.0], [5.0, 7.0], info) == [10]


# The three mappings ---------------------------------------------------------------------------------------------------


def test_the_mappings(ir, run):
    """The example of the specification."""

    def f(x, w, b):
        return x * w + b

    with ir.main_graph, popxl.in_sequence():
        x, w, b = (popxl.variable(v, name=name) for v, name in ((3.0, "x"), (2.0, "w"), (1.0, "b")))
        fg = ir.create_graph(f, x, w, b)
        fwd = ops.call_with_info(fg, x, w, b)
        gi = autodiff(fg, grads_required=[fg.inputs[2], fg.inputs[1]])
        acts = gi.inputs_dict(fwd)
        bwd = ops.call_with_info(gi.graph, 10.0, inputs_dict=acts)
    db, dw = bwd.outputs
    assert set(acts) == set(gi.graph.inputs[1:])
    for t, parent in acts.items():
        forward = gi.inputs[gi.graph.inputs.index(t)]
        assert parent == fwd.graph_to_parent(forward)
    assert gi.fwd_parent_ins_to_grad_parent_outs(fwd, bwd) == {b: db, w: dw}
    assert gi.fwd_graph_ins_to_grad_parent_outs(bwd) == {fg.inputs[2]: db, fg.inputs[1]: dw}
    with pytest.raises(KeyError, match=r"no gradient of Variable\[x .*; there are those of b, w\..*`grads_required`"):
        gi.fwd_parent_ins_to_grad_parent_outs(fwd, bwd)[x]
    assert run(ir, fwd.outputs[0], db, dw) == [7, 10, 30]


def test_one_parent_for_two_inputs(ir, run):
    graph = graph_of(ir, lambda x, y: x * y * y)
    info = autodiff(graph)
    with ir.main_graph:
        v = popxl.variable(3.0)
        fwd = ops.call_with_info(graph, v, v)
        bwd = ops.call_with_info(info.graph, 1.0, inputs_dict=info.inputs_dict(fwd))
        assert len(info.fwd_parent_ins_to_grad_parent_outs(fwd, bwd)) == 1
        dx, dy = info.fwd_graph_ins_to_grad_parent_outs(bwd).values()
        total = dx + dy
    assert run(ir, total) == [27]


def test_call_sites_of_other_graphs(ir):
    graph, other = graph_of(ir, lambda x: ops.sin(x)), graph_of(ir, lambda x: ops.sin(x))
    info = autodiff(graph)
    with ir.main_graph:
        with pytest.raises(TypeError, match="expected a call of graph"):
            info.inputs_dict(ops.call_with_info(other, 1.0))
        with pytest.raises(TypeError, match="as `ops.call_with_info` returns it"):
            info.inputs_dict(ops.call(graph, 1.0))
        with pytest.raises(TypeError, match="A repeat calls a wrapper graph"):
            info.inputs_dict(ops.repeat_with_info(graph, 2, 1.0))
        either = ops.conditional_with_info(popxl.constant(True), graph, other, [1.0], [1.0])
        with pytest.raises(TypeError, match="expected a call of graph"):
            info.inputs_dict(either)
        assert f"{graph.title} and {other.title}" in repr(either)


def test_a_call_without_an_activation(ir):
    graph = graph_of(ir, lambda x: ops.sin(ops.exp(x)))
    info = autodiff(graph)
    graph.trim_outputs(1)
    with ir.main_graph, pytest.raises(ValueError, match=r"neither takes nor returns Tensor\[.*exp_out"):
        info.inputs_dict(ops.call_with_info(graph, 1.0))


def test_what_is_given_and_not_used_is_told(ir, capfd):
    graph = graph_of(ir, lambda x, y: (ops.exp(x) + 1, ops.sin(y)))
    autodiff(graph, grads_provided=[graph.ops[0].outputs[0]], grads_required=[graph.inputs[0]])
    assert "exp_out of `grads_provided` are no outputs" in capfd.readouterr().err
    autodiff(graph, grads_required=[graph.inputs[0]])
    assert "Gradient___sin_out are not used" in capfd.readouterr().err
    autodiff(graph_of(ir, lambda x: x))  # whose gradient is the one that is given
    assert "not used" not in capfd.readouterr().err


def test_gradients_of_tensors_that_callers_do_not_see(ir):
    graph = graph_of(ir, lambda x: (x + 1) + 1)
    info = autodiff(graph, grads_required=[graph.ops[0].outputs[0]])
    with ir.main_graph:
        fwd = ops.call_with_info(graph, 1.0)
        bwd = ops.call_with_info(info.graph, 1.0, inputs_dict=info.inputs_dict(fwd))
        with pytest.raises(ValueError):
            info.fwd_parent_ins_to_grad_parent_outs(fwd, bwd)


# What is added to the forward graph -----------------------------------------------------------------------------------

EXPORTS = [
    ("sums", lambda x, w: x + w - x, [], 1),
    ("an affine map", lambda x, w: x * w + w, ["w", "x"], 1),
    ("a product and a sum", lambda x, w: x * 2 + w, [], 1),
    ("what is needed is an output", lambda x, w: ops.exp(x), ["exp_out"], 1),
    ("what is needed is inside", lambda x, w: ops.exp(x) + w, ["exp_out"], 2),
    ("movement", lambda x, w: ops.concat([ops.reshape(x, (1,)), ops.flatten(w)])[0], [], 1),
    ("comparisons", lambda x, w: ops.where(ops.greater(x, w), x, w), ["greater_out"], 2),
]


@pytest.mark.parametrize(("fn", "activations", "outputs"), [r[1:] for r in EXPORTS], ids=[r[0] for r in EXPORTS])
def test_only_what_is_needed_is_exported(ir, fn, activations, outputs):
    graph = graph_of(ir, fn)
    own = graph.outputs
    required = [t for t in graph.inputs if any(t in op.inputs for op in graph.ops)]
    info = autodiff(graph, grads_required=required)
    assert [t.name for t in info.inputs[1:]] == activations
    assert len(graph.outputs) == outputs and graph.outputs[: len(own)] == own


def test_a_matrix_product_keeps_its_single_output(ir):
    graph = graph_of(ir, lambda x, w, b: x @ w + b, *[popxl.TensorSpec(s, F32) for s in ((2, 3), (3, 4), (4,))])
    info = autodiff(graph)
    assert len(graph.outputs) == 1
    assert set(info.inputs[1:]) == set(graph.inputs[:2])


def test_pruning(ir):
    """Nothing is computed or kept for gradients that nobody asked for."""
    graph = graph_of(ir, lambda x, y: ops.sin(ops.exp(x)) + ops.tanh(y))
    info = autodiff(graph, grads_required=graph.inputs[1:])
    assert [t.name for t in info.inputs[1:]] == ["tanh_out"]
    assert {op.op_type for op in info.graph.ops}.isdisjoint({"ExpGrad", "SinGrad", "Cos"})


def test_existing_calls_gain_the_activations(ir, run):
    graph = graph_of(ir, lambda x: ops.sin(ops.exp(x)))
    with ir.main_graph:
        tuple_before = ops.call(graph, 0.5)
        before = ops.call_with_info(graph, 0.5)
    wrapped = ir.create_graph(lambda x: ops.call(graph, x), SCALAR)
    info = autodiff(graph)
    with ir.main_graph:
        after = ops.call_with_info(graph, 0.5)
        assert (len(tuple_before), len(before.outputs), len(after.outputs)) == (1, 2, 2)
        found = [ops.call(info.graph, 1.0, inputs_dict=info.inputs_dict(site))[0] for site in (before, after)]
        (y,) = ops.call(wrapped, 0.5)
    assert len(wrapped.outputs) == 1
    expected = np.cos(np.exp(0.5)) * np.exp(0.5)
    assert run(ir, *found, y) == pytest.approx([expected, expected, np.sin(np.exp(0.5))], rel=1e-5)


def test_outputs_added_by_hand_after_a_call(ir, run):
    """Autodiff adds its own after them, here and at the calls."""
    graph = graph_of(ir, lambda x: ops.sin(ops.exp(x)))
    outer = graph_of(ir, lambda x: ops.call(graph, x))
    with ir.main_graph:
        site = ops.call_with_info(graph, 0.5)
        with graph:
            popxl.graph_output(graph.inputs[0] * 100)
        info = autodiff(graph, grads_provided=graph.outputs[:1])
        (dx,) = ops.call(info.graph, 1.0, inputs_dict=info.inputs_dict(site))
    expected = pytest.approx(np.cos(np.exp(0.5)) * np.exp(0.5), rel=1e-5)
    assert len(site.outputs) == 3
    assert run(ir, dx) == [expected]
    assert gradients(ir, run, outer, [0.5], [1.0]) == [expected]


def test_differentiating_twice_includes_the_activations(ir):
    graph = graph_of(ir, lambda x: ops.sin(ops.exp(x)))
    first, second = autodiff(graph), autodiff(graph)
    assert first.graph is not second.graph
    assert [e.connection_type for e in first.expected_inputs].count(GRAD) == 1
    assert [e.connection_type for e in second.expected_inputs].count(GRAD) == 2


def test_gradient_graphs_can_be_extended(ir):
    """A running sum kept inside the gradient graph, as in the specification."""
    fg = graph_of(ir, lambda x, w, b: x * w + b)
    gi = autodiff(fg, grads_required=[fg.inputs[2], fg.inputs[1]])
    with gi.graph:
        acc_in = popxl.graph_input((), F32, "acc", by_ref=True)
        ops.var_updates.accumulate_(acc_in, gi.graph.outputs[1])
    with ir.main_graph, popxl.in_sequence():
        acc = popxl.variable(100.0)
        for x in (3.0, 4.0):
            fwd = ops.call_with_info(fg, x, 2.0, 1.0)
            ops.call(gi.graph, 10.0, inputs_dict={**gi.inputs_dict(fwd), acc_in: acc})
    with popxl.Session(ir) as session:
        session.run()
    assert acc.data == 170


def test_stores_are_not_repeated_and_loads_are_kept(ir):
    with ir.main_graph, popxl.in_sequence():
        source, sink, out = popxl.h2d_stream((), F32), popxl.d2h_stream((), F32), popxl.d2h_stream((), F32)

        def fn(w):
            x = ops.host_load(source)
            y = x * w
            ops.host_store(sink, y)
            return y

        graph = ir.create_graph(fn, SCALAR)
        info = autodiff(graph)
        site = ops.call_with_info(graph, 2.0)
        ops.host_store(out, *ops.call(info.graph, 1.0, inputs_dict=info.inputs_dict(site)))
    assert {op.op_type for op in info.graph.ops}.isdisjoint({"HostLoad", "HostStore"})
    with popxl.Session(ir) as session:
        outputs = session.run({source: 5.0})
        assert (outputs[sink], outputs[out]) == (10, 5)


def test_surroundings_do_not_matter(ir):
    """No current graph is needed, and an active name scope does not reach the gradient graph."""
    graph = graph_of(ir, lambda x: ops.sin(x))
    with ir.create_empty_graph(), popxl.name_scope("s"):
        info = autodiff(graph)
    assert [t.name for t in info.graph.outputs] == ["Gradient___x"]
    assert autodiff(graph).graph.inputs


def test_placement_follows_the_forward_graph(ir):
    def fn(x):
        with popxl.ipu(1):
            y = ops.sin(x)
        return ops.exp(ops.ipu_copy(y, 0, 1))

    info = autodiff(graph_of(ir, fn))
    assert {op.ipu for op in info.graph.ops if op.op_type == "SinGrad"} == {1}


# Modifying ops --------------------------------------------------------------------------------------------------------


def in_place_add(p, q):
    p += q
    return p


REFUSED = [
    ("+=", in_place_add),
    ("relu_", lambda p, q: ops.relu_(p) * q),
    ("accumulate_", lambda p, q: ops.var_updates.accumulate_(p, q)),
    ("off the path", lambda p, q: (ops.gelu_(p), p * q)[1]),
]


@pytest.mark.parametrize("dtype", [F32, popxl.int32], ids=str)
@pytest.mark.parametrize("fn", [row[1] for row in REFUSED], ids=[row[0] for row in REFUSED])
@pytest.mark.parametrize("nested", [False, True])
def test_modifying_ops_are_refused(ir, fn, dtype, nested):
    spec = popxl.TensorSpec((2,), dtype)
    graph = inner = ir.create_graph(fn, spec, spec)
    if nested:
        graph = ir.create_graph(lambda p, q: ops.call(inner, p, q), spec, spec)
    before = state(ir)
    with pytest.raises(PopxlError) as error:
        autodiff(graph)
    text = str(error.value)
    assert text.startswith(f"The graph {inner.id} contains a modifying op")
    assert "Autodiff cannot be used on graphs with inplace modifying ops." in text
    assert state(ir) == before


def test_modifying_calls_are_refused(ir):
    def by_ref(x: TensorByRef):
        return x * 1.0  # changes nothing, and is refused all the same

    def marked(x):
        site = ops.call_with_info(plain, x)
        site.set_parent_input_modified(x)
        return site.outputs[0]

    plain, referring = graph_of(ir, lambda x: x * 2), ir.create_graph(by_ref, SCALAR)
    for fn in (lambda x: ops.call(referring, x), marked):
        with pytest.raises(PopxlError, match="contains a modifying op"):
            autodiff(graph_of(ir, fn))


def test_what_is_no_modification(ir, run):
    def fn(x: TensorByRef):  # the declaration alone
        return ops.sum(ops.concat_([ops.reshape_(x, (4,)), ops.flatten_(ops.transpose_(x))]) * 2)

    graph = ir.create_graph(fn, popxl.TensorSpec((2, 2), F32))
    info = autodiff(graph)
    assert gradients(ir, run, graph, [np.ones((2, 2))], [1.0], info) == [[[4, 4], [4, 4]]]


# Calls inside ---------------------------------------------------------------------------------------------------------


def test_a_graph_that_calls_another_twice(ir, run):
    def f(x, w):
        h, *_ = ops.call(inner, x, w)
        y, *_ = ops.call(inner, h, w)
        return y

    inner = graph_of(ir, lambda x, w: x * w)
    outer = graph_of(ir, f)
    infos = autodiff(outer, return_all_grad_graphs=True)
    assert set(infos) == {outer, inner}
    assert infos[outer].graph.called_graphs == (infos[inner].graph,)
    assert gradients(ir, run, outer, [3.0, 2.0], [1.0], infos[outer]) == [4, 12]


def test_gradient_graphs_can_be_given(ir, run):
    inner = graph_of(ir, lambda x: ops.sin(x))
    a = graph_of(ir, lambda x: ops.call(inner, x)[0] * 2)
    b = graph_of(ir, lambda x: ops.call(inner, x)[0] * 3)
    infos = autodiff(a, return_all_grad_graphs=True)
    count = len(ir.graphs)
    info = autodiff(b, called_graphs_grad_info={inner: infos[inner]})
    assert len(ir.graphs) == count + 1
    assert info.graph.called_graphs == (infos[inner].graph,)
    assert autodiff(b, called_graphs_grad_info={b: info}) is info
    assert autodiff(a, called_graphs_grad_info=infos) is infos[a]
    given = autodiff(b, called_graphs_grad_info=infos, return_all_grad_graphs=True)
    assert set(given) == {a, b, inner} and set(infos) == {a, inner}  # what was passed is left alone
    assert gradients(ir, run, b, [0.5], [1.0], info) == pytest.approx([3 * np.cos(0.5)], rel=1e-6)


def test_a_given_gradient_may_leave_inputs_out(ir, run):
    inner = graph_of(ir, lambda x, w: x * w)
    info = autodiff(inner, grads_required=inner.inputs[1:])
    outer = graph_of(ir, lambda x, w: ops.call(inner, x, w)[0] + x)
    found = gradients(ir, run, outer, [3.0, 2.0], [1.0], called_graphs_grad_info={inner: info})
    assert found == [1, 3]


def test_an_output_of_a_called_graph_that_is_not_used(ir, run):
    inner = graph_of(ir, lambda x: (x * x, x * x * x))
    outer = graph_of(ir, lambda x: ops.call(inner, x)[1])
    assert gradients(ir, run, outer, [2.0], [1.0]) == [12]


def test_two_calls_that_use_different_outputs(ir, run):
    inner = graph_of(ir, lambda x: (x * 2, x * 3))

    def fn(x):
        a, _ = ops.call(inner, x)
        _, b = ops.call(inner, a)
        return b

    assert gradients(ir, run, graph_of(ir, fn), [1.0], [1.0]) == [6]


def test_calls_on_several_levels(ir, run):
    graph = graph_of(ir, lambda x: ops.sin(x) * x)
    for _ in range(3):
        graph = ir.create_graph(lambda x, graph: ops.call(graph, x)[0] * 2, SCALAR, graph)
    expected = 8 * (np.sin(0.5) + 0.5 * np.cos(0.5))
    assert gradients(ir, run, graph, [0.5], [1.0]) == pytest.approx([expected], rel=1e-5)


def test_a_graph_whose_gradient_has_to_be_given(ir, run):
    inner = graph_of(ir, lambda x: ops.sin(x))
    inner.differentiable = False
    outer = graph_of(ir, lambda x: ops.call(inner, x)[0] * 2)
    before = state(ir)
    with pytest.raises(PopxlError, match="has been marked as unsafe to autodiff"):
        autodiff(outer)
    assert state(ir) == before
    info = autodiff(inner)
    found = gradients(ir, run, outer, [0.5], [1.0], called_graphs_grad_info={inner: info})
    assert found == pytest.approx([2 * np.cos(0.5)], rel=1e-6)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_loops(ir, run, count):
    """x → sin(x) w, repeated: against the chain rule by hand."""
    inner = graph_of(ir, lambda x, w: ops.sin(x) * w)
    outer = graph_of(ir, lambda x, w: ops.repeat(inner, count, x, w)[0] * w)
    x, w, dx, dw = 0.5, 2.0, 1.0, 0.0
    for _ in range(count):
        x, dx, dw = np.sin(x) * w, np.cos(x) * w * dx, np.sin(x) + np.cos(x) * w * dw
    assert gradients(ir, run, outer, [0.5, 2.0], [1.0]) == pytest.approx([dx * w, dw * w + x], rel=1e-5)


# What is refused ------------------------------------------------------------------------------------------------------

IMPOSSIBLE = [
    ("an unused input", lambda x, y: x * 2, {}),
    ("only through detach", lambda x, y: x * ops.detach(y), {}),
    ("only through a comparison", lambda x, y: x * ops.cast(ops.isnan(y), F32), {}),
    ("nothing provided", lambda x, y: x * y, {"grads_provided": []}),
]


@pytest.mark.parametrize(("fn", "options"), [r[1:] for r in IMPOSSIBLE], ids=[r[0] for r in IMPOSSIBLE])
def test_gradients_that_do_not_exist(ir, fn, options):
    inner = graph_of(ir, lambda x: ops.sin(ops.exp(x)))
    graph = graph_of(ir, lambda x, y: fn(ops.call(inner, x)[0], y))
    with ir.main_graph:
        ops.call(graph, 1.0, 2.0)
    before = state(ir)
    with pytest.raises(PopxlError, match="^Unable to provide required gradient output"):
        autodiff(graph, **options)
    assert state(ir) == before  # also the outputs that the called graph had gained


def test_refused_arguments(ir):
    graph, other = graph_of(ir, lambda x: x * 2), graph_of(ir, lambda x: x * 2)
    empty = ir.create_graph(lambda: popxl.constant(1.0))
    before = state(ir)
    for g, options in (
        (graph, {"grads_required": []}),
        (empty, {}),
        (graph, {"grads_required": other.inputs}),
        (graph, {"grads_provided": other.outputs}),
        (graph, {"grads_required": [1.0]}),
        (graph, {"grads_provided": ["x"]}),
    ):
        with pytest.raises(PopxlError, match="autodiff"):
            autodiff(g, **options)
    assert state(ir) == before


def test_a_failure_leaves_calls_of_given_graphs_alone(ir):
    inner = graph_of(ir, lambda x: ops.sin(x))
    info = autodiff(inner)
    outer = graph_of(ir, lambda x, y: ops.call(inner, x)[0])
    with pytest.raises(PopxlError):
        autodiff(outer, called_graphs_grad_info={inner: info})
    assert info.graph.call_sites == []


# One callee, several callers ------------------------------------------------------------------------------------------


def test_callers_that_use_different_outputs_share_one_gradient_graph(ir, run):
    both = graph_of(ir, lambda x: (x * 2.0, x * 3.0))
    first = graph_of(ir, lambda x: ops.call(both, x)[0] * 1.0)
    second = graph_of(ir, lambda x: ops.call(both, x)[1] * 1.0)
    graph = graph_of(ir, lambda x: ops.call(first, x)[0] + ops.call(second, x)[0])
    assert gradients(ir, run, graph, [1.0], [1.0]) == [5]


def test_a_loop_and_a_call_share_one_gradient_graph(ir, run):
    swap = graph_of(ir, lambda x, y: (x * 2.0, y * 3.0))
    graph = graph_of(ir, lambda x, y: ops.repeat(swap, 2, x, y)[0] + ops.call(swap, x, y)[1])
    assert gradients(ir, run, graph, [1.0, 1.0], [1.0]) == [4, 3]


def test_a_gradient_graph_that_lacks_a_seed_is_refused(ir):
    both = graph_of(ir, lambda x: (x * 2.0, x * 3.0))
    first = graph_of(ir, lambda x: ops.call(both, x)[0] * 1.0)
    second = graph_of(ir, lambda x: ops.call(both, x)[1] + x)
    infos = autodiff(first, return_all_grad_graphs=True)
    before = state(ir)
    with pytest.raises(PopxlError, match="a gradient reaches the outputs mul_out__t1 of graph"):
        autodiff(second, called_graphs_grad_info={both: infos[both]})
    assert state(ir) == before


def by_a_call(graph, x):
    return ops.call(graph, x)[0]


def by_a_branch(graph, x):
    return ops.conditional(popxl.constant(True), graph, graph, [x], [x])[0]


@pytest.mark.parametrize("run_by", [by_a_call, by_a_branch])
def test_a_gradient_graph_of_something_inside_is_refused(ir, run_by):
    inner = graph_of(ir, lambda x: ops.sin(x * 2.0))
    info = autodiff(inner, grads_required=[inner.ops[0].outputs[0]])
    outer = graph_of(ir, lambda x: run_by(inner, x))
    with pytest.raises(PopxlError, match="cannot be used where graph .* is called"):
        autodiff(outer, called_graphs_grad_info={inner: info})


@pytest.mark.parametrize("run_by", [by_a_call, by_a_branch])
def test_a_gradient_graph_that_was_extended_can_be_given(ir, run, run_by):
    """It may return more. What it takes besides, nobody could bind."""
    inner = graph_of(ir, lambda x: x * 5.0)
    info = autodiff(inner)
    with info.graph:
        popxl.graph_output(info.graph.outputs[0] * 2.0)
    outer = graph_of(ir, lambda x: run_by(inner, x))
    assert gradients(ir, run, outer, [3.0], [1.0], called_graphs_grad_info={inner: info}) == [5]
    with info.graph:
        ops.add_(popxl.graph_input((), popxl.float32, "total", by_ref=True), info.graph.outputs[0])
    before = state(ir)
    with pytest.raises(PopxlError, match="nothing would be bound to total, .* Leave it out"):
        autodiff(outer, called_graphs_grad_info={inner: info})
    assert state(ir) == before


@pytest.mark.parametrize("run_by", [by_a_call, by_a_branch])
def test_a_given_gradient_that_is_returned_twice_counts_once(ir, run, run_by):
    inner = graph_of(ir, lambda x: x * 5.0)
    info = autodiff(inner, grads_required=[inner.inputs[0]] * 2)
    outer = graph_of(ir, lambda x: run_by(inner, x))
    assert gradients(ir, run, outer, [3.0], [1.0], called_graphs_grad_info={inner: info}) == [5]


def test_an_answer_that_only_selects_needs_no_gradient(ir, run):
    """`equal` refuses gradients, and none reaches it: what it says is used as a condition only."""
    ask = graph_of(ir, lambda x: (x * 2.0, ops.equal(x, x)))

    def chosen(x):
        y, same = ops.call(ask, x)
        return ops.where(same, y, x)

    assert gradients(ir, run, graph_of(ir, chosen), [3.0], [1.0]) == [2]


def test_a_failure_takes_back_results_that_calls_gained(ir):
    graph = graph_of(ir, lambda x, y: x * 2.0)
    with ir.main_graph:
        site = ops.call_with_info(graph, popxl.constant(1.0), popxl.constant(1.0))
    with graph:
        popxl.graph_output(graph.inputs[0] + 1.0)
    before = state(ir)
    with pytest.raises(PopxlError, match="Unable to provide required gradient"):
        autodiff(graph)
    assert (len(site.outputs), state(ir)) == (1, before)


def test_a_failure_inside_a_sequence_leaves_no_constraint(ir, run):
    with ir.main_graph, popxl.in_sequence():
        graph = graph_of(ir, lambda x, y: ops.sin(x) + ops.detach(y))
        with pytest.raises(PopxlError, match="Unable to provide"):
            autodiff(graph)
        info = autodiff(graph, grads_required=graph.inputs[:1])
        acc, one = popxl.variable(0.0), popxl.constant(1.0)
        with info.graph:
            inside = popxl.graph_input((), F32, "acc", by_ref=True)
            ops.var_updates.accumulate_(inside, info.graph.outputs[0])
        site = ops.call_with_info(graph, one, one)
        ops.call(info.graph, one, inputs_dict={**info.inputs_dict(site), inside: acc})
        assert run(ir, acc * 1.0) == [pytest.approx(np.cos(1.0))]


def test_only_a_graph_can_be_differentiated(ir):
    with pytest.raises(TypeError, match="must be a Graph; got 3"):
        autodiff(3)


def test_a_graph_without_a_gradient_is_asked_once_and_left_out(ir, run):
    signs = graph_of(ir, lambda x: ops.detach(x))
    graph = graph_of(ir, lambda x: ops.call(signs, x)[0] * x + ops.call(signs, x)[0])
    infos = autodiff(graph, return_all_grad_graphs=True)
    assert set(infos) == {graph} and len(ir.graphs) == 4
    assert gradients(ir, run, graph, [3.0], [1.0], infos[graph]) == [3]


def test_a_loop_of_no_turns_leaves_its_body_alone(ir):
    body = graph_of(ir, lambda x: ops.sin(x))
    infos = autodiff(graph_of(ir, lambda x: ops.repeat(body, 0, x)[0] * 2), return_all_grad_graphs=True)
    assert len(infos) == 1 and len(body.outputs) == 1


def test_a_tensor_that_ops_on_two_ipus_read(ir: popxl.Ir) -> None:
    """Its gradient is a sum, with the terms of other IPUs copied to the first one."""
    with ir.main_graph:
        x, w = popxl.variable(np.float32([[1, 2], [3, 4]]), name="x"), popxl.variable(np.float32([[1], [2]]), name="w")

        def model(x: popxl.Tensor, w: popxl.Tensor) -> popxl.Tensor:
            h = (x @ w).copy_to_ipu(1)
            with popxl.ipu(1):
                return ops.sum(h @ w.T)

        graph = ir.create_graph(model, x, w)
        grad = autodiff(graph, grads_required=graph.inputs[1:])
        site = ops.call_with_info(graph, x, w)
        (dw,) = ops.call(grad.graph, popxl.constant(1.0), inputs_dict=grad.inputs_dict(site))
        out = popxl.d2h_stream(dw.shape, dw.dtype)
        ops.host_store(out, dw)
    assert grad.graph.outputs[0].ipu == 0
    with popxl.Session(ir, "ipu_model") as session:
        np.testing.assert_array_equal(session.run()[out], [[28.0], [34.0]])
