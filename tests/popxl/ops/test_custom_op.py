"""A user's own op: any JAX function, declared with `popxl.OpKind` in one statement."""

from __future__ import annotations

import functools
import gc
import re
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas

import popxl
from popxl import ops
from popxl.errors import PopxlError
from popxl.op import Overwrites, View
from popxl.ops import utils
from popxl.transforms import autodiff
from tests.popxl.evaluate import evaluate

X = np.float32([[0.5, -1.0, 2.0], [1.5, 0.0, -3.0]])


def value_and_gradients(build: Any, *arrays: Any, wanted: tuple[int, ...] | None = None) -> list[np.ndarray]:
    """The sum of what a function of tensors computes, and its gradients."""

    def program(*ts: Any) -> list[Any]:
        graph = popxl.gcg().ir.create_graph(lambda *ts: ops.sum(build(*ts)), *ts)
        required = graph.inputs if wanted is None else [graph.inputs[i] for i in wanted]
        info = autodiff(graph, grads_required=required)
        site = ops.call_with_info(graph, *ts)
        return [site.outputs[0], *ops.call(info.graph, 1.0, inputs_dict=info.inputs_dict(site))]

    return evaluate(program, *arrays)


def test_one_statement() -> None:
    """Name, shape, dtype, numbers and gradient all come from the function."""
    softplus = popxl.OpKind("Softplus", jax.nn.softplus)
    total, gradient = value_and_gradients(softplus, X)
    np.testing.assert_allclose(total, np.log1p(np.exp(X)).sum(), rtol=1e-6)
    np.testing.assert_allclose(gradient, 1 / (1 + np.exp(-X)), rtol=1e-6)
    with popxl.Ir().main_graph as main:
        y = softplus(popxl.variable(X.astype(np.float16)))
        assert (y.shape, y.dtype, y.name) == ((2, 3), popxl.float16, "softplus_out")
        assert [op.op_type for op in main.ops] == ["Softplus"]


def power(t, *, exponent, times=1):
    return times * t**exponent


def test_attributes_are_part_of_the_op() -> None:
    kind = popxl.OpKind("Power", power)
    total, gradient = value_and_gradients(lambda t: kind(t, exponent=3), X)
    np.testing.assert_allclose(total, (X**3).sum(), rtol=1e-6)
    np.testing.assert_allclose(gradient, 3 * X**2, rtol=1e-6)
    first, second = evaluate(lambda t: [kind(t, exponent=2), kind(t, exponent=2, times=5)], X)
    np.testing.assert_allclose(second, 5 * first)


def test_attributes_that_cannot_be_hashed() -> None:
    weighted = popxl.OpKind("Weighted", lambda t, *, by: t * jnp.asarray(by))
    total, gradient = value_and_gradients(lambda t: weighted(t, by=[1.0, 2.0, 3.0]), X)
    np.testing.assert_allclose(total, (X * [1, 2, 3]).sum(), rtol=1e-6)
    np.testing.assert_allclose(gradient, np.broadcast_to([1, 2, 3], X.shape))


def test_several_results() -> None:
    polar = popxl.OpKind(
        "PolarCoordinates", lambda x, y: (jnp.hypot(x, y), jnp.arctan2(y, x)), result=("radius", "angle")
    )
    x, y = np.float32([3, 1]), np.float32([4, 1])
    radius, angle = evaluate(polar, x, y)
    np.testing.assert_allclose(radius, np.hypot(x, y), rtol=1e-6)
    np.testing.assert_allclose(angle, np.arctan2(y, x), rtol=1e-6)
    with popxl.Ir().main_graph:
        assert [t.name for t in polar(popxl.variable(x), popxl.variable(y))] == ["radius", "angle"]
    _, *first = value_and_gradients(lambda x, y: polar(x, y)[0], x, y)  # no gradient comes from the angle
    np.testing.assert_allclose(first, [x / np.hypot(x, y), y / np.hypot(x, y)], rtol=1e-6)
    _, *both = value_and_gradients(lambda x, y: ops.add(*polar(x, y)), x, y)
    r = np.hypot(x, y)
    np.testing.assert_allclose(both, [x / r - y / r**2, y / r + x / r**2], rtol=1e-5)


def test_results_of_another_shape_and_dtype() -> None:
    counts = popxl.OpKind(
        "Counts", lambda t, *, bins: jnp.histogram(t, bins, (-4, 4))[0].astype(jnp.int32), gradient=None
    )
    (result,) = evaluate(lambda t: counts(t, bins=4), X)
    np.testing.assert_array_equal(result, np.histogram(X, 4, (-4, 4))[0])
    assert result.dtype == np.int32


def affine(x, w, b=None):
    return x @ w if b is None else x @ w + b


def test_an_optional_operand() -> None:
    kind = popxl.OpKind("Affine", affine)
    w, b = np.float32([[1, 2], [3, 4], [5, 6]]), np.float32([10, 20])
    with_bias, with_number, without = evaluate(lambda x, w, b: [kind(x, w, b), kind(x, w, 1.0), kind(x, w)], X, w, b)
    np.testing.assert_allclose(with_bias, X @ w + b, rtol=1e-6)
    np.testing.assert_allclose(with_number, X @ w + 1, rtol=1e-6)
    np.testing.assert_allclose(without, X @ w, rtol=1e-6)
    _, dx, dw, db = value_and_gradients(kind, X, w, b)
    np.testing.assert_allclose(db, [2, 2])
    np.testing.assert_allclose(dx, np.ones((2, 2)) @ w.T)
    np.testing.assert_allclose(dw, X.T @ np.ones((2, 2)))


def test_several_operands_of_one_name() -> None:
    longest = popxl.OpKind("Longest", lambda *ts: jnp.stack(ts).max(axis=0))
    (result,) = evaluate(longest, X, -X, X * 2)
    np.testing.assert_array_equal(result, np.max([X, -X, X * 2], axis=0))


def test_a_gradient_by_rules() -> None:
    """Written with ops; what a rule reads is kept alive, and nothing else."""
    straight = popxl.OpKind("Straight", lambda t, step: jnp.round(t / step) * step, gradient={"t": lambda g: g})
    total, gradient = value_and_gradients(straight, X, np.float32(0.4), wanted=(0,))
    np.testing.assert_allclose(total, (np.round(X / np.float32(0.4)) * 0.4).sum(), rtol=1e-5)
    np.testing.assert_allclose(gradient, np.ones_like(X))
    with popxl.Ir().main_graph:
        graph = popxl.gcg().ir.create_graph(lambda t, step: straight(t, step), popxl.variable(X), popxl.variable(0.4))
        assert len(autodiff(graph, grads_required=graph.inputs[:1]).graph.inputs) == 1
        with pytest.raises(PopxlError, match="Unable to provide required gradient output of .*/step"):
            autodiff(graph)


def test_a_rule_reads_operands_results_and_attributes() -> None:
    kind = popxl.OpKind(
        "ScaledExp",
        lambda t, *, scale: jnp.exp(t * scale),
        gradient={"t": lambda g, t, out, scale, t_spec: g * out * scale + ops.init(t_spec.shape, t.dtype)},
    )
    _, gradient = value_and_gradients(lambda t: kind(t, scale=0.5), X)
    np.testing.assert_allclose(gradient, 0.5 * np.exp(0.5 * X), rtol=1e-6)


def test_a_rule_reads_one_of_several_results_by_name() -> None:
    """The gradient graph takes this result, and neither the operand nor the other result."""
    kind = popxl.OpKind(
        "SquareAndSlope",
        lambda t: (t * t, 2 * t),
        result=("square", "slope"),
        gradient={"t": lambda g, slope: g * slope},
    )
    _, gradient = value_and_gradients(lambda t: kind(t)[0], X)
    np.testing.assert_allclose(gradient, 2 * X, rtol=1e-6)
    ir = popxl.Ir()
    graph = ir.create_graph(lambda t: kind(t)[0], popxl.TensorSpec((3,), popxl.float32))
    assert [t.name for t in autodiff(graph).graph.inputs] == ["Gradient___square", "slope"]


def test_a_rule_that_reads_a_result_by_name_ignores_gradients_of_others() -> None:
    kind = popxl.OpKind(
        "WithSigns",
        lambda t: (t, jnp.sign(t).astype(jnp.int32)),
        result=("same", "signs"),
        gradient={"t": lambda g, signs: g},
    )
    graph = popxl.Ir().create_graph(lambda t: kind(t)[1], popxl.TensorSpec((3,), popxl.float32))
    with pytest.raises(PopxlError, match="depends on it in a differentiable way"):
        autodiff(graph)


def test_a_gradient_that_is_broadcast_is_summed_back() -> None:
    kind = popxl.OpKind("Offset", lambda t, by: t + by, gradient={"t": lambda g: g, "by": lambda g: g * 2})
    _, dt, dby = value_and_gradients(kind, X, np.float32([1, 2, 3]))
    np.testing.assert_allclose(dt, np.ones_like(X))
    np.testing.assert_allclose(dby, [4, 4, 4])


@pytest.mark.parametrize(("gradient", "message"), [(None, "Unable to provide"), (popxl.op.REFUSED, "which has none")])
def test_no_gradient(gradient, message) -> None:
    kind = popxl.OpKind("Rounded", jnp.round, operands=("t",), gradient=gradient)
    with popxl.Ir().main_graph:
        graph = popxl.gcg().ir.create_graph(lambda t: kind(t), popxl.variable(X))
        with pytest.raises(PopxlError, match=message):
            autodiff(graph)


def test_second_derivatives() -> None:
    softplus = popxl.OpKind("Softplus", jax.nn.softplus)

    def build(t: Any) -> Any:
        graph = popxl.gcg().ir.create_graph(lambda t: ops.sum(softplus(t)), t)
        first = autodiff(graph)
        g, x = first.graph.inputs
        second = autodiff(first.graph, grads_required=[x])
        site = ops.call_with_info(first.graph, 1.0, t)
        return ops.call(second.graph, popxl.constant(np.ones_like(X)), inputs_dict=second.inputs_dict(site))

    s = 1 / (1 + np.exp(-X))
    np.testing.assert_allclose(evaluate(build, X)[0], s * (1 - s), rtol=1e-5)


# In place and views -------------------------------------------------------------------------------------------------


def test_in_place() -> None:
    """`Overwrites`: the lowering returns the new content, and the result is an alias of the operand."""
    decay_ = popxl.OpKind("Decay", lambda t, *, rate: t * (1 - rate), traits=[Overwrites("t")], result="decayed__{t}")

    def build(t: Any) -> list[Any]:
        ops.add_(decay_(t, rate=0.5), popxl.constant(1.0))
        return [t]

    np.testing.assert_allclose(evaluate(build, X)[0], X * 0.5 + 1)
    with popxl.Ir().main_graph as main:
        assert decay_(popxl.variable(X, name="w"), rate=0.5).name == "decayed__w"
        assert main.ops[0].modified == {0}
        graph = main.ir.create_graph(lambda t: decay_(t, rate=0.5), popxl.variable(X))
        with pytest.raises(PopxlError, match="contains a modifying op"):
            autodiff(graph)


def test_the_in_place_form_of_an_op() -> None:
    softplus = popxl.OpKind("Softplus", jax.nn.softplus)
    softplus_ = softplus.inplace("SoftplusInplace", "softplus_inplace_out")

    def build(t: Any) -> list[Any]:
        copy = softplus(t)
        softplus_(t)
        return [copy, t]

    copy, t = evaluate(build, X)
    np.testing.assert_array_equal(copy, t)


def test_several_operands_in_place() -> None:
    """Results first, then the new contents, where the results are no aliases."""
    swap_ = popxl.OpKind(
        "Swap", lambda a, b: (jnp.sum(a * b), b, a), shape=lambda a, b: popxl.TensorSpec((), a.dtype),
        traits=[Overwrites("a", "b", aliased=False)], result="dot",
    )  # fmt: skip

    def build(a: Any, b: Any) -> list[Any]:
        return [swap_(a, b), a, b]

    dot, a, b = evaluate(build, X, X * 2)
    np.testing.assert_allclose(dot, (X * X * 2).sum(), rtol=1e-6)
    np.testing.assert_array_equal(a, X * 2)
    np.testing.assert_array_equal(b, X)


def test_a_view() -> None:
    """`put` writes the view back into its base; nothing else needs to know what it is."""
    diagonal_ = popxl.OpKind(
        "Diagonal",
        jnp.diagonal,
        operands=("t",),
        traits=[View(lambda t, view: (jnp.fill_diagonal(t, view, inplace=False),))],
    )

    def build(t: Any) -> list[Any]:
        view = diagonal_(t)
        ops.add_(view, popxl.constant(100.0))
        ops.add_(t, popxl.constant(1.0))
        return [t, view]

    t = np.arange(9, dtype=np.float32).reshape(3, 3)
    base, view = evaluate(build, t)
    np.testing.assert_array_equal(base, t + 1 + 100 * np.eye(3))
    np.testing.assert_array_equal(view, np.diagonal(base))


def test_a_view_of_several_tensors() -> None:
    stack_ = popxl.OpKind(
        "Stacked", lambda a, b: jnp.stack([a, b]), traits=[View(lambda a, b, view: (view[0], view[1]))]
    )

    def build(a: Any, b: Any) -> list[Any]:
        ops.exp_(ops.slice_(stack_(a, b), 1, 2))
        return [a, b]

    a, b = evaluate(build, X, X + 1)
    np.testing.assert_array_equal(a, X)
    np.testing.assert_allclose(b, np.exp(X + 1), rtol=1e-6)


# What the user sees -------------------------------------------------------------------------------------------------


def test_it_is_printed_like_any_op() -> None:
    kind = popxl.OpKind("Power", power)
    with popxl.Ir().main_graph as main:
        kind(popxl.variable(X, name="x"), exponent=3)  # the line
        assert "    power_out: f32[2, 3] = Power(x, exponent=3)" in str(main)
        (op,) = main.ops
        assert op.source.text == 'kind(popxl.variable(X, name="x"), exponent=3)  # the line'
        assert str(op.source).startswith("test_custom_op.py:")
        assert "Power" in main.print_schedule()


def test_what_jax_refuses_is_told_with_the_operands_and_the_line() -> None:
    dot = popxl.OpKind("Dot", jnp.dot, operands=("a", "b"))
    with popxl.Ir().main_graph as main:
        a = popxl.variable(X)
        with pytest.raises(PopxlError) as error:
            dot(a, a)
        text = str(error.value)
        assert text.startswith("Dot: JAX refuses these operands: ")
        assert "Here `a` is f32[2, 3], `b` is f32[2, 3]." in text
        assert "In the main graph, at `dot(a, a)` (test_custom_op.py:" in text
        assert main.ops == []


def test_arguments_that_do_not_fit() -> None:
    kind = popxl.OpKind("Power", power)
    by_rule = popxl.OpKind("PowerByRule", power, shape=lambda t, **_: t.spec)
    ir = popxl.Ir()
    with ir.create_empty_graph():
        other = popxl.graph_input((2,), popxl.float32)
    with ir.main_graph as main:
        t = popxl.variable(X)
        for call, error, message in [
            (
                lambda: kind(2.0, exponent=1),
                TypeError,
                r"Power: `t` must be a Tensor; got 2.0 \(float\).*`popxl.constant",
            ),
            (lambda: kind((t, t), exponent=1), TypeError, r"Power: `t` must be .*take one of them"),
            (lambda: kind(main, exponent=1), TypeError, "Power: `t` must be .*call it first"),
            (lambda: kind(other, exponent=1), ValueError, "Power: `t` is .* which is not in the main graph"),
            (lambda: kind(t, t, exponent=1), TypeError, "Power: takes the operands"),
            (lambda: kind(t), TypeError, r"^Power: the attributes \['exponent'\] are missing"),
            (lambda: by_rule(t), TypeError, r"^PowerByRule: the attributes \['exponent'\] are missing"),
            (lambda: kind(t, exponent=1, base=2), (TypeError, PopxlError), "base"),
        ]:
            with pytest.raises(error, match=message) as told:
                call()
            assert re.search(
                r"In the main graph, at `.*(kind|by_rule)\(.* \(test_custom_op\.py:\d+\)\.$", str(told.value)
            )
        assert main.ops == []
    with pytest.raises(RuntimeError, match="There is no current graph"):
        kind(t, exponent=1)


def test_a_shape_rule_that_is_wrong_is_found_out_when_the_program_is_compiled() -> None:
    wrong = popxl.OpKind("Wrong", lambda t: t, shape=lambda t: popxl.TensorSpec((7,), t.dtype))
    with pytest.raises(PopxlError, match="its `shape` rule and its `lowering` disagree"):
        evaluate(wrong, X)


def test_a_shape_rule_may_name_a_tensor_that_the_result_is_like() -> None:
    double = popxl.OpKind("Double", lambda t: t * 2, shape=lambda t: t)
    both = popxl.OpKind("Both", lambda a, b: (b, a), shape=lambda a, b: [b, a])
    for (found,), expected in [(evaluate(double, X), 2 * X), (evaluate(lambda t: both(t, t[0])[1], X), X)]:
        np.testing.assert_array_equal(found, expected)
    for shape, told in [((2, 3), r"`shape` made 2 \(int\); expected the TensorSpec"), (None, "`shape` made None")]:
        wrong = popxl.OpKind("Wrong", lambda t: t, shape=lambda t, shape=shape: shape)
        with popxl.Ir().main_graph, pytest.raises(TypeError, match=told):
            wrong(popxl.variable(X))


def test_a_function_is_traced_once_for_each_signature() -> None:
    traced = []

    def function(t):
        traced.append(t.shape)
        return t * 2

    kind = popxl.OpKind("Traced", function)
    with popxl.Ir().main_graph:
        t = popxl.variable(X)
        for _ in range(5):
            t = kind(t)
        kind(t.T)
    assert traced == [(2, 3), (3, 2)]


def test_wide_numbers() -> None:
    """A program with 64-bit numbers keeps them, in ops of the user and in their gradients."""
    cube = popxl.OpKind("Cube", lambda t: t**3)
    x = np.array([1e-3, 1.0000000001], np.float64)

    def build() -> list[Any]:
        t = popxl.variable(x, popxl.float64)
        graph = popxl.gcg().ir.create_graph(lambda t: cube(t), t)
        info = autodiff(graph)
        site = ops.call_with_info(graph, t)
        g = popxl.constant(np.ones(2), popxl.float64)
        return [site.outputs[0], *ops.call(info.graph, g, inputs_dict=info.inputs_dict(site))]

    y, dx = evaluate(build)
    assert y.dtype == dx.dtype == np.float64
    np.testing.assert_allclose(y, x**3, rtol=1e-14)
    np.testing.assert_allclose(dx, 3 * x**2, rtol=1e-14)


@pytest.mark.usefixtures("only_new_objects")
def test_a_declaration_keeps_no_program_alive() -> None:
    """What is remembered of an op is gone with its declaration, and never holds a graph."""
    looks_at = popxl.OpKind("LooksAt", lambda t, *, graphs: t * 2.0)

    def program() -> weakref.ref[popxl.Ir]:
        ir = popxl.Ir()
        graph = ir.create_graph(lambda x: looks_at(x, graphs=(ir.main_graph,)), popxl.TensorSpec((3,), popxl.float32))
        popxl.transforms.autodiff(graph)
        return weakref.ref(ir)

    gone = program()
    gc.collect()
    assert gone() is None


# What JAX offers ----------------------------------------------------------------------------------------------------


def soft_cap(x: Any, *, cap: float) -> Any:
    """A Pallas kernel: compiled for TPUs, interpreted elsewhere. GPUs take arrays of 128 bytes and more only."""

    def kernel(x: Any, y: Any) -> None:
        y[...] = cap * jnp.tanh(x[...] / cap)

    run = functools.partial(pallas.pallas_call, kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))
    return jax.lax.platform_dependent(x, tpu=run(), default=run(interpret=True))


def test_a_pallas_kernel() -> None:
    """Called once, from several places, and in a loop; with a gradient of its own."""
    kind = popxl.OpKind("SoftCap", soft_cap, gradient={"x": lambda g, out, cap: g * (1 - (out / cap) ** 2)})
    expected = 2 * np.tanh(X / 2)
    total, gradient = value_and_gradients(lambda t: kind(t, cap=2.0), X)
    np.testing.assert_allclose(total, expected.sum(), rtol=1e-5)
    np.testing.assert_allclose(gradient, 1 - (expected / 2) ** 2, rtol=1e-5, atol=1e-6)

    def build(t: Any) -> list[Any]:
        graph = popxl.gcg().ir.create_graph(lambda t: kind(t, cap=2.0), t)
        (once,), (twice,) = ops.call(graph, t), ops.repeat(graph, 2, t)
        return [*ops.call(graph, once), twice]

    for result in evaluate(build, X):
        np.testing.assert_allclose(result, 2 * np.tanh(expected / 2), rtol=1e-5)


def test_a_gradient_that_jax_was_told() -> None:
    """`jax.custom_vjp` counts, as it does under `jax.grad`."""

    @jax.custom_vjp
    def straight_through(t: Any) -> Any:
        return jnp.round(t)

    straight_through.defvjp(lambda t: (jnp.round(t), None), lambda _, g: (g * 3,))
    total, gradient = value_and_gradients(popxl.OpKind("Round", straight_through, operands=("t",)), X)
    np.testing.assert_allclose(total, np.round(X).sum())
    np.testing.assert_array_equal(gradient, np.full_like(X, 3))


def test_a_jitted_function() -> None:
    total, gradient = value_and_gradients(popxl.OpKind("Cube", jax.jit(lambda t: t**3)), X)
    np.testing.assert_allclose(total, (X**3).sum(), rtol=1e-6)
    np.testing.assert_allclose(gradient, 3 * X**2, rtol=1e-6)


# Checks that ops written elsewhere import ---------------------------------------------------------------------------


def test_checks_of_operands(ir: popxl.Ir) -> None:
    with ir.main_graph as main:
        x, y = popxl.variable(X, name="x"), popxl.variable(X, name="y")
        with popxl.ipu(1):
            elsewhere = y + 1
    (inner,) = ir.create_graph(lambda t: None, x).inputs
    utils.check_in_graph(main, x=x, y=y)
    utils.check_tensor_ipu_and_tile_set(x=x, z=elsewhere)
    with pytest.raises(ValueError, match="check_in_graph: `b` is .* not in the main graph"):
        utils.check_in_graph(main, a=x, b=inner)
    with pytest.raises(TypeError, match="check_in_graph: `b`"):
        utils.check_in_graph(main, a=x, b=[y])  # type: ignore[arg-type]
    with main, popxl.ipu(0):
        here = x + 1
    with pytest.raises(ValueError, match="`a` and `c` are located on different IPUs: 0 and 1"):
        utils.check_tensor_ipu_and_tile_set(a=here, b=x, c=elsewhere)
    with pytest.raises(ValueError, match="no tensors to check"):
        utils.check_tensor_ipu_and_tile_set()
    for check in (utils.check_tensor_ipu_and_tile_set, lambda t: utils.check_in_graph(main, t)):
        with pytest.raises(Exception, match="pass tensors as keyword arguments"):
            check(x)


@pytest.mark.parametrize(("first", "second"), [(1, 1.0), ((2, 1), (2, 1.0))])
def test_attributes_that_python_takes_for_equal_make_different_results(first, second):
    kind = popxl.OpKind("Lengthened", lambda x, *, by: x * jnp.prod(jnp.asarray(by)))
    with popxl.Ir().main_graph:
        x = popxl.variable(np.array([1, 2, 3]), popxl.int32, "x")
        assert [kind(x, by=by).dtype for by in (first, second, first)] == [popxl.int32, popxl.float32, popxl.int32]


@pytest.mark.thorough(but_each=4)
@pytest.mark.parametrize("calls", ["inlined", "kept", "dispatched"])
@pytest.mark.parametrize("number", [float, np.float32, complex])
def test_attributes_of_either_sign_of_zero(calls, number):
    """Each has its numbers and its gradient, although `0.0 == -0.0`."""
    ir = popxl.Ir()
    ir.options.calledGraphs = calls
    x = np.array([2.0, 3.0], np.float32)

    def meaning(x, *, like):
        return x * x * jnp.copysign(jnp.float32(1), jnp.real(jnp.asarray(like)).astype(jnp.float32))

    def fetched(t):
        stream = popxl.d2h_stream(t.shape, t.dtype)
        ops.host_store(stream, t)
        return stream

    kind, signs, stored = popxl.OpKind("Signed", meaning), (1.0, -1.0, 1.0), []
    with ir.main_graph, popxl.in_sequence():
        v = popxl.variable(x, name="x")
        for sign in signs:
            like = -number(0) if sign < 0 else number(0)
            graph = ir.create_graph(lambda x, like=like: kind(x, like=like), v)
            gradients = popxl.transforms.autodiff(graph)
            site = ops.call_with_info(graph, v)
            (dx,) = ops.call(gradients.graph, popxl.constant(np.ones_like(x)), inputs_dict=gradients.inputs_dict(site))
            stored.append((fetched(site.outputs[0]), fetched(dx)))
    with popxl.Session(ir) as session:
        outputs = session.run()
    for sign, (y, dx) in zip(signs, stored, strict=True):
        np.testing.assert_array_equal(outputs[y], sign * x * x)
        np.testing.assert_array_equal(outputs[dx], sign * 2 * x)
