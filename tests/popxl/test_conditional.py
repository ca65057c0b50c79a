"""Conditionals: one of two graphs runs."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.errors import PopxlError
from popxl.ops.conditional import ConditionalSiteInfo
from popxl.transforms import autodiff
from tests.popxl.evaluate import evaluate


def grow(x: Any) -> Any:
    return x * 4.0


def shrink(y: Any) -> Any:
    return y - 1.5


def either(build: Any, *arrays: Any) -> list[list[np.ndarray]]:
    """What `build(flag, *tensors)` makes, for a true flag and a false one."""
    return [evaluate(build, np.array([flag]), *arrays) for flag in (True, False)]


@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_branch_runs(shape: Any) -> None:
    def build(flag: Any, a: Any, b: Any) -> Any:
        flag = ops.reshape(flag, shape) if not shape else flag
        then_branch, else_branch = (popxl.gcg().ir.create_graph(f, t) for f, t in ((grow, a), (shrink, b)))
        return ops.conditional(flag, then_branch, else_branch, then_inputs=[a], else_inputs=[b])

    assert either(build, np.float32(6), np.float32(8)) == [[24], [6.5]]


def test_names_and_text() -> None:
    ir = popxl.Ir()
    with ir.main_graph as main:
        flag, a = popxl.variable(True, name="flag"), popxl.variable(6.0, name="a")
        site = ops.conditional_with_info(
            flag, ir.create_graph(grow, a), ir.create_graph(shrink, a), then_inputs=[a], else_inputs_dict=None,
            else_inputs=[a],
        )  # fmt: skip
    (result,) = site.outputs
    assert result.name == "mul_out_or_sub_out"
    assert [op.op_type for op in main.ops] == ["If"]
    assert len(main.tensors) == 3
    assert "mul_out_or_sub_out: f32[] = If grow_subgraph(0) shrink_subgraph(1)(flag, a, a)" in str(main)


def test_the_same_graph_twice_and_no_outputs() -> None:
    def build(flag: Any, a: Any, b: Any) -> Any:
        graph = popxl.gcg().ir.create_graph(grow, a)
        empty = popxl.gcg().ir.create_graph(lambda: None)
        assert ops.conditional(flag, empty, empty) == ()
        return ops.conditional(flag, graph, graph, [a], [b])

    assert either(build, np.float32(1), np.float32(2)) == [[4], [8]]


def test_inputs_are_bound_as_for_calls() -> None:
    """Nested lists, dictionaries, numbers; branches with other numbers of inputs."""

    def build(flag: Any, a: Any, b: Any, c: Any) -> Any:
        ir = popxl.gcg().ir
        one = ir.create_graph(lambda x, y, z: x + y * z, a, b, c)
        other = ir.create_graph(lambda x: x - 1, a)
        return ops.conditional(flag, one, other, [a, [b]], None, {one.inputs[2]: 10.0}, {other.inputs[0]: c})

    assert either(build, *map(np.float32, (1, 2, 3))) == [[21], [2]]


def test_what_a_branch_overwrites_stays_inside() -> None:
    def bump(x: Any) -> Any:
        x += 1
        return x * 1

    def build(flag: Any, a: Any) -> Any:
        graphs = [popxl.gcg().ir.create_graph(bump, a) for _ in range(2)]
        return [*ops.conditional(flag, *graphs, [a], [a]), a]

    assert either(build, np.float32(5)) == [[6, 5]] * 2


def test_streams_move_on_only_in_the_branch_that_runs() -> None:
    ir = popxl.Ir()
    ir.num_host_transfers = 3
    with ir.main_graph, popxl.in_sequence():
        flags, numbers = popxl.h2d_stream((1,), popxl.bool, "flags"), popxl.h2d_stream((), popxl.float32, "numbers")
        taken, all_of_them = (popxl.d2h_stream((), popxl.float32, name) for name in ("taken", "all"))

        def load() -> Any:
            x = ops.host_load(numbers)
            ops.host_store(taken, x)
            return x

        load_graph, other = ir.create_graph(load), ir.create_graph(lambda: popxl.constant(-1.0))

        def turn() -> None:
            (x,) = ops.conditional(ops.host_load(flags), load_graph, other)
            ops.host_store(all_of_them, x)

        ops.repeat(ir.create_graph(turn), 3)
    with popxl.Session(ir) as session:
        outputs = session.run({flags: np.array([[True], [False], [True]]), numbers: np.float32([7, 8, 9])})
    np.testing.assert_array_equal(outputs[all_of_them], [7, -1, 8])
    np.testing.assert_array_equal(outputs[taken][:2], [7, 8])


def test_only_the_branch_that_runs_prints(capfd: pytest.CaptureFixture[str]) -> None:
    def shown(title: str) -> Any:
        return lambda x: ops.print_tensor(x, title)

    def build(flag: Any, a: Any) -> Any:
        graphs = [popxl.gcg().ir.create_graph(shown(title), a) for title in ("then", "else")]
        return ops.conditional(flag, *graphs, [a], [a])

    for flag, title in ((True, "then: 5.0"), (False, "else: 5.0")):
        evaluate(build, np.array(flag), np.float32(5))
        assert capfd.readouterr().err.strip() == title


# The record of the site ---------------------------------------------------------------------------------------------


@pytest.fixture
def site() -> ConditionalSiteInfo:
    ir = popxl.Ir()
    with ir.main_graph:
        flag = popxl.variable(True)
        a, b, c = (popxl.variable(float(i), name=name) for i, name in enumerate("abc"))
        graphs = [ir.create_graph(lambda x, y: (x + y, x - y), a, b) for _ in range(2)]
        site = ops.conditional_with_info(flag, *graphs, (a, b), (c, a))
    site.keep = ir  # type: ignore[attr-defined]
    return site


def test_site(site: ConditionalSiteInfo) -> None:
    then_branch, else_branch = site.called_graph
    flag, a, b, c, _ = site.inputs
    assert [site.parent_input(i) for i in range(5)] == [flag, a, b, c, a]
    assert site.parent_output(1) == site.outputs[1]
    assert [site.graph_to_parent_input_index(i) for i in (0, 1)] == [1, 2]
    assert [site.graph_to_parent_input_index(i, False) for i in (0, 1)] == [3, 4]
    assert [site.parent_to_graph_input_index(i) for i in (1, 2, 3, 4)] == [0, 1, 0, 1]
    assert [site.is_parent_index_in_then_branch(i) for i in (1, 2, 3, 4)] == [True, True, False, False]
    for side in (True, False):
        assert site.graph_to_parent_output_index(1, side) == site.parent_to_graph_output_index(1, side) == 1
    assert site.parent_to_graph(a) == then_branch.inputs[0]
    assert site.parent_to_graph(c) == else_branch.inputs[0]
    assert site.graph_to_parent(else_branch.inputs[1]) == a
    assert site.graph_to_parent(else_branch.outputs[1]) == site.outputs[1]


@pytest.mark.parametrize(
    ("ask", "error"),
    [
        (lambda s: s.parent_input(5), IndexError),
        (lambda s: s.parent_output(2), IndexError),
        (lambda s: s.graph_to_parent_input_index(2), IndexError),
        (lambda s: s.graph_to_parent_input_index(-1, False), IndexError),
        (lambda s: s.parent_to_graph_input_index(0), IndexError),
        (lambda s: s.parent_to_graph_input_index(5), IndexError),
        (lambda s: s.is_parent_index_in_then_branch(0), IndexError),
        (lambda s: s.graph_to_parent_output_index(2), IndexError),
        (lambda s: s.parent_to_graph_output_index(2, False), IndexError),
        (lambda s: s.graph_to_parent(s.inputs[1]), ValueError),
        (lambda s: s.parent_to_graph(s.outputs[0]), ValueError),
        (lambda s: s.parent_to_graph(s.inputs[0]), IndexError),
        (lambda s: s.set_parent_input_modified(s.inputs[1]), NotImplementedError),
    ],
    ids=range(13),
)
def test_site_errors(site: ConditionalSiteInfo, ask: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        ask(site)


# What is refused ----------------------------------------------------------------------------------------------------


def refused(build: Any) -> None:
    ir = popxl.Ir()
    with ir.main_graph as main:
        flag, a = popxl.variable(True), popxl.variable([1.0, 2.0])
        graph = ir.create_graph(grow, a)
        before = str(main)
        try:
            build(ir, flag, a, graph)
        finally:
            assert str(main) == before


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda ir, f, a, g: ops.conditional(f, g, g), ValueError, "^Not enough inputs .* the then_branch graph"),
        (lambda ir, f, a, g: ops.conditional(f, g, g, [a]), ValueError, "^Not enough inputs .* the else_branch graph"),
        (lambda ir, f, a, g: ops.conditional(f, g, g, [a, a], [a]), ValueError, "^Too many inputs .* then_branch"),
        (lambda ir, f, a, g: ops.conditional(f, g, g, [a], [a], {g.inputs[0]: a}), ValueError, "specified twice"),
        (lambda ir, f, a, g: ops.conditional(f, g, g, [a], ["a"]), TypeError, "cannot become a constant"),
        (
            lambda ir, f, a, g: ops.conditional(f, g, 3, [a], [a]),
            TypeError,
            "^conditional: `else_branch` must be a Graph",
        ),
        (
            lambda ir, f, a, g: ops.conditional(f, g, g, [a], a),
            TypeError,
            r"`else_inputs` is an iterable of values; write",
        ),
        (lambda ir, f, a, g: ops.conditional(1.0, g, g, [a], [a]), TypeError, "`cond` must be a Tensor"),
        (lambda ir, f, a, g: ops.conditional(a, g, g, [a], [a]), PopxlError, "a bool of one element; .* is f32"),
        (
            lambda ir, f, a, g: ops.conditional(f, g, ir.create_graph(lambda x: (x, x), a), [a], [a]),
            ValueError,
            "has 1 outputs and .* 2; the branches have to return the same number",
        ),
        (
            lambda ir, f, a, g: ops.conditional(f, g, ir.create_graph(lambda x: ops.sum(x), a), [a], [a]),
            PopxlError,
            r"output 0 is f32\[2\] in graph .* and f32\[\] in graph",
        ),
        (lambda ir, f, a, g: ops.conditional(f, g, g, [f], [a]), PopxlError, "the input `x` of graph .* is f32"),
    ],
    ids=range(12),
)
def test_errors(build: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        refused(build)


def test_no_inputs_by_reference() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        flag, a = popxl.variable(True), popxl.variable(1.0)
        graph = ir.create_empty_graph()
        with graph:
            popxl.graph_output(popxl.graph_input((), popxl.float32, "acc", by_ref=True) + 1)
        with pytest.raises(NotImplementedError, match="takes acc by reference"):
            ops.conditional(flag, graph, graph, [a], [a])


# Gradients ----------------------------------------------------------------------------------------------------------


def gradients_agree(then_function: Any, else_function: Any, *arrays: Any, required: int | None = None) -> None:
    """With those of `jax.lax.cond` on the same functions: tensors have JAX's operators."""
    count = len(arrays) if required is None else required

    def whole(flag: Any, *ts: Any) -> Any:
        ir = popxl.gcg().ir
        graphs = [ir.create_graph(function, *ts) for function in (then_function, else_function)]
        (y,) = ops.conditional(flag, *graphs, ts, ts)
        return ops.sum(y * y + ts[0])

    def build(flag: Any, *ts: Any) -> Any:
        graph = popxl.gcg().ir.create_graph(whole, flag, *ts)
        info = autodiff(graph, grads_required=graph.inputs[1 : count + 1])
        site = ops.call_with_info(graph, flag, *ts)
        return ops.call(info.graph, 1.0, inputs_dict=info.inputs_dict(site))

    def plain(flag: bool, *ts: Any) -> Any:
        y = (then_function if flag else else_function)(*ts)
        return jnp.sum(y * y + ts[0])

    for flag in (True, False):
        found = evaluate(build, np.array(flag), *arrays)
        expected = jax.grad(lambda *ts: plain(flag, *ts), range(count))(*map(jnp.asarray, arrays))  # noqa: B023
        for g, wish in zip(found, expected, strict=True):
            np.testing.assert_allclose(g, wish, rtol=1e-5)


A, B = np.float32([1, -2, 3]), np.float32([0.5, 4, -1])


def test_gradient_without_activations() -> None:
    gradients_agree(lambda a, b: a + b, lambda a, b: a - b, A, B)


def test_gradient_that_needs_activations() -> None:
    gradients_agree(lambda a, b: a * b * a, lambda a, b: (a * a) * (b * b) * a, A, B)


def test_gradient_of_what_one_branch_ignores() -> None:
    gradients_agree(lambda a, b: a * 2.0, lambda a, b: b * a * 3.0, A, B)
    gradients_agree(lambda a, b: a * a, lambda a, b: a * 1.0 + 7.0, A, B, required=1)


def test_gradient_where_a_branch_returns_its_input() -> None:
    gradients_agree(lambda a, b: a, lambda a, b: b, A, B)


def test_no_activation_of_a_branch_is_kept() -> None:
    """The forward graphs stay as they are; a conditional made before fits after."""
    ir = popxl.Ir()
    with ir.main_graph:
        flag, a = popxl.variable(True), popxl.variable(A)
        branch = ir.create_graph(lambda x: (x * x) * x, a)

        def whole(flag: Any, a: Any) -> Any:
            return ops.conditional(flag, branch, branch, [a], [a])[0]

        graph = ir.create_graph(whole, flag, a)
        autodiff(graph, grads_required=graph.inputs[1:])
        assert len(branch.outputs) == 1
        assert len(graph.outputs) == 1


def test_gradient_through_calls_and_loops() -> None:
    """A conditional in a called graph in a loop; a call and a loop in a branch."""

    def inner(x: Any, w: Any) -> Any:
        return x * w * x

    def build(flag: Any, x: Any, w: Any) -> Any:
        ir = popxl.gcg().ir
        graph = ir.create_graph(inner, x, w)

        def then_branch(x: Any, w: Any) -> Any:
            (h,) = ops.call(graph, x, w)
            return ops.call(graph, h, w)[0]

        def else_branch(x: Any, w: Any) -> Any:
            return ops.repeat(ir.create_graph(lambda x, w: x * w, x, w), 3, x, w)[0]

        graphs = [ir.create_graph(branch, x, w) for branch in (then_branch, else_branch)]

        def turn(x: Any, flag: Any, w: Any) -> Any:
            return ops.conditional(flag, *graphs, [x, w], [x, w])[0]

        body = ir.create_graph(turn, x, flag, w)
        whole = ir.create_graph(lambda x, flag, w: ops.sum(ops.repeat(body, 2, x, flag, w)[0]), x, flag, w)
        info = autodiff(whole, grads_required=[whole.inputs[0], whole.inputs[2]])
        site = ops.call_with_info(whole, x, flag, w)
        return ops.call(info.graph, 1.0, inputs_dict=info.inputs_dict(site))

    def plain(flag: bool, x: Any, w: Any) -> Any:
        for _ in range(2):
            x = (x * w * x) * w * (x * w * x) if flag else x * w**3
        return x.sum()

    x, w = np.float32([0.5, -0.8]), np.float32([1.1, 0.7])
    for flag in (True, False):
        found = evaluate(build, np.array(flag), x, w)
        for g, wish in zip(found, jax.grad(lambda x, w: plain(flag, x, w), (0, 1))(x, w), strict=True):  # noqa: B023
            np.testing.assert_allclose(g, wish, rtol=1e-4)


def test_second_derivative() -> None:
    def build(flag: Any, x: Any) -> Any:
        ir = popxl.gcg().ir
        graphs = [ir.create_graph(f, x) for f in (lambda x: x * x * x, lambda x: ops.sin(x))]
        whole = ir.create_graph(lambda flag, x: ops.conditional(flag, *graphs, [x], [x])[0], flag, x)
        first = autodiff(whole, grads_required=whole.inputs[1:])
        again = autodiff(first.graph, grads_required=[first.graph.inputs_by_name["x"]])
        site = ops.call_with_info(whole, flag, x)
        g = ops.call_with_info(first.graph, popxl.constant(np.ones_like(A)), inputs_dict=first.inputs_dict(site))
        return ops.call(again.graph, popxl.constant(np.ones_like(A)), inputs_dict=again.inputs_dict(g))

    for flag, wish in ((True, 6 * A), (False, -np.sin(A))):
        np.testing.assert_allclose(evaluate(build, np.array(flag), A)[0], wish, rtol=1e-5)


def test_random_numbers_of_a_branch_are_not_loaded_twice() -> None:
    """What talks to the host cannot be computed again: it is said, with the way out."""
    ir = popxl.Ir()
    with ir.main_graph:
        flag, x = popxl.variable(True), popxl.variable(1.0)
        stream = popxl.h2d_stream((), popxl.float32, "s")
        loads = ir.create_graph(lambda x: ops.host_load(stream) * x, x)
        other = ir.create_graph(lambda x: x * 1, x)
        whole = ir.create_graph(lambda flag, x: ops.conditional(flag, loads, other, [x], [x])[0], flag, x)
        graphs = list(ir.graphs)
        with pytest.raises(PopxlError, match="depends on HostLoad .*cannot be carried out twice: move it out"):
            autodiff(whole, grads_required=whole.inputs[1:])
        assert ir.graphs == graphs


def test_a_branch_may_be_called_too() -> None:
    def build(flag: Any, a: Any) -> Any:
        graph = popxl.gcg().ir.create_graph(lambda x: x * x * 2.0, a)
        (y,) = ops.conditional(flag, graph, graph, [a], [a])
        return [y, *ops.call(graph, a)]

    for y, z in either(build, A):
        np.testing.assert_allclose(y, 2 * A * A)
        np.testing.assert_allclose(z, 2 * A * A)


def test_gradient_of_a_tensor_that_is_several_outputs() -> None:
    """Each of the gradients that arrive counts once."""

    def build(flag: Any, a: Any) -> Any:
        ir = popxl.gcg().ir

        def twice(x: Any) -> Any:
            y = ops.sin(x)
            return y, y

        graphs = [ir.create_graph(twice, a) for _ in range(2)]

        def whole(flag: Any, a: Any) -> Any:
            y, z = ops.conditional(flag, *graphs, [a], [a])
            return ops.sum(y * 2.0 + z * 3.0)

        graph = ir.create_graph(whole, flag, a)
        info = autodiff(graph, grads_required=graph.inputs[1:])
        site = ops.call_with_info(graph, flag, a)
        return ops.call(info.graph, 1.0, inputs_dict=info.inputs_dict(site))

    for (g,) in either(build, A):
        np.testing.assert_allclose(g, 5 * np.cos(A), rtol=1e-5)


def test_a_condition_that_is_computed_and_kept() -> None:
    """No gradient is asked of it, in the second derivative either, though the forward graph returns it."""

    def build(a: Any) -> Any:
        ir = popxl.gcg().ir
        graphs = [ir.create_graph(f, a) for f in (lambda x: x * x * x, lambda x: ops.sin(x))]

        def inner(a: Any) -> Any:
            return ops.conditional(ops.greater(a, popxl.constant(0.0)), *graphs, [a], [a])[0]

        forward = ir.create_graph(inner, a)
        first = autodiff(forward)

        def gradient(a: Any) -> Any:
            site = ops.call_with_info(forward, a)
            return ops.call(first.graph, 1.0, inputs_dict=first.inputs_dict(site))

        derived = ir.create_graph(gradient, a)
        second = autodiff(derived)
        site = ops.call_with_info(derived, a)
        return ops.call(second.graph, 1.0, inputs_dict=second.inputs_dict(site))

    for x, wish in ((np.float32(2), 12), (np.float32(-2), np.sin(2))):
        np.testing.assert_allclose(evaluate(build, x)[0], wish, rtol=1e-5)


def test_gradient_that_reads_a_constant_of_the_caller() -> None:
    def build(flag: Any, a: Any) -> Any:
        ir = popxl.gcg().ir
        graphs = [ir.create_graph(lambda x, k: x * k, a, a) for _ in range(2)]

        def whole(flag: Any, a: Any) -> Any:
            k = popxl.constant(np.float32([2, 3, 4]))
            return ops.conditional(flag, *graphs, [a, k], [k, a])[0]

        graph = ir.create_graph(whole, flag, a)
        info = autodiff(graph, grads_required=graph.inputs[1:])
        site = ops.call_with_info(graph, flag, a)
        return ops.call(info.graph, popxl.constant(np.ones(3, np.float32)), inputs_dict=info.inputs_dict(site))

    for (g,) in either(build, A):
        np.testing.assert_array_equal(g, [2, 3, 4])


def test_an_array_holds_one_value_for_each_input() -> None:
    def build(flag: Any) -> Any:
        graph = popxl.gcg().ir.create_graph(lambda x, y: x * 10.0 + y, *[popxl.TensorSpec((), popxl.float32)] * 2)
        return ops.conditional(flag, graph, graph, np.array([1.0, 2.0]), np.array([3.0, 4.0]))

    assert [evaluate(build, np.array(flag))[0].tolist() for flag in (True, False)] == [12, 34]


def test_a_branch_that_gains_an_input_is_refused_when_it_runs() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        flag, a = popxl.variable(True), popxl.variable(1.0)
        graphs = [ir.create_graph(lambda x: x * 1.0, a) for _ in range(2)]
        ops.conditional(flag, *graphs, [a], [a])
        with graphs[0]:
            popxl.graph_input((), popxl.float32)
    with pytest.raises(PopxlError, match="gained inputs after"):
        popxl.Session(ir)


@pytest.mark.thorough
def test_branches_may_be_nested_deeper_than_python_recurses() -> None:
    """A ladder of sixty questions."""

    def build(x: Any) -> Any:
        ir = popxl.gcg().ir
        ladder = ir.create_graph(lambda x: x * 0.0 - 1.0, x)
        for k in reversed(range(60)):
            answer = ir.create_graph(lambda x, k: x * 0.0 + k, x, float(k))

            def ask(x: Any, k: float, answer: popxl.Graph, ladder: popxl.Graph) -> Any:
                same = ops.equal(x, popxl.constant(k))
                return ops.conditional(same, answer, ladder, [x], [x])

            ladder = ir.create_graph(ask, x, float(k), answer, ladder)
        return ops.call(ladder, x)

    assert evaluate(build, np.float32(57))[0] == 57


def test_the_gradient_of_a_long_branch_takes_one_look_at_each_op() -> None:
    ir = popxl.Ir()

    def many(x: Any) -> Any:
        for _ in range(3000):
            x = ops.sin(x)
        return x

    with ir.main_graph:
        flag, a = popxl.variable(True), popxl.variable(1.0)
        graph = ir.create_graph(many, a)
        whole = ir.create_graph(lambda flag, x: ops.conditional(flag, graph, graph, [x], [x]), flag, a)
        start = time.thread_time()
        autodiff(whole, grads_required=whole.inputs[1:])
    assert time.thread_time() - start < 5
