"""Graphs as functions of JAX (`popxl.to_jax`), and functions of JAX as graphs (`popxl.from_jax`)."""

from __future__ import annotations

import functools
import gc
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental import checkify

import popxl
from popxl import ops
from popxl.errors import PopxlError
from popxl.transforms import autodiff
from runtime.lowering import lower, platform_hooks
from tests.popxl.evaluate import evaluate
from tests.tolerances import assert_near

X = np.float32([[0.5, -1.0, 2.0, 0.25], [1.5, 0.125, -3.0, 1.0], [0.75, 2.0, -0.5, -1.5]])
W = np.float32(np.cos(np.arange(16)).reshape(4, 4) / 2)


def f32(*shape: int) -> popxl.TensorSpec:
    return popxl.TensorSpec(shape, popxl.float32)


def graph_of(fn: Callable[..., Any], *specs: Any, ir: popxl.Ir | None = None) -> popxl.Graph:
    """A graph of a function; arrays stand for their specs."""
    ir = ir or popxl.Ir()
    found = [s if isinstance(s, popxl.TensorSpec) else spec_of(s) for s in specs]
    return ir.create_graph(fn, *found)


def spec_of(array: Any) -> popxl.TensorSpec:
    array = np.asarray(array)
    return popxl.TensorSpec(array.shape, popxl.dtype.as_dtype(array.dtype))


def assert_close(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    jax.tree.map(
        lambda a, b: assert_near(np.asarray(a), np.asarray(b), tolerance),
        found,
        expected,
    )


def assert_agree(found: Callable[..., Any], expected: Callable[..., Any], *arrays: Any, grad: bool = True) -> None:
    """Two functions of JAX agree, in their gradients, and over a batch. Each is compiled once, with all of that."""
    argnums = tuple(i for i, a in enumerate(arrays) if np.issubdtype(np.asarray(a).dtype, np.floating))

    def total(f: Callable[..., Any]) -> Callable[..., Any]:
        def weighted(*arrays: Any) -> Any:
            leaves = [r for r in jax.tree.leaves(f(*arrays)) if jnp.issubdtype(r.dtype, jnp.floating)]
            return sum(jnp.sum(r * jnp.cos(jnp.arange(r.size, dtype=r.dtype)).reshape(r.shape)) for r in leaves)

        return weighted

    batch = [np.stack([a, a[::-1]]) if np.ndim(a) else np.stack([a, a]) for a in map(np.asarray, arrays)]

    def everything(f: Callable[..., Any]) -> Any:
        functions = [f, *([jax.grad(total(f), argnums)] if grad and argnums else [])]
        return jax.jit(lambda a, b: [(g(*a), jax.vmap(g)(*b)) for g in functions])(arrays, batch)

    (values, *gradients), (values_expected, *gradients_expected) = everything(found), everything(expected)
    assert_close(values, values_expected)
    assert_close(gradients, gradients_expected, 1e-4)


# A graph as a function of JAX ----------------------------------------------------------------------------------------


def layer(x, w):
    return ops.gelu(x @ w)


def jax_layer(x, w):
    return jax.nn.gelu(x @ w)


def test_one_output_is_an_array_and_several_are_a_tuple() -> None:
    one = popxl.to_jax(graph_of(layer, X, W))
    assert one.inputs == ("x", "w") and one.written == ()
    assert_close(one(X, W), jax_layer(X, W))
    assert isinstance(one(X, W), jax.Array)
    assert_close(one(X, w=W), jax_layer(X, W))
    assert_close(one(w=W, x=X), jax_layer(X, W))
    two = popxl.to_jax(graph_of(lambda x: (x + 1, x), X))
    assert_close(two(X), (X + 1, X))
    none = popxl.to_jax(graph_of(lambda x: None, X))
    assert none(X) == ()
    assert repr(one) == "GraphFunction[layer_subgraph_0(x: f32[3, 4], w: f32[4, 4])]"


def test_transformations_of_jax() -> None:
    f = popxl.to_jax(graph_of(layer, X, W))
    assert_agree(f, jax_layer, X, W)
    not_jitted = jax.grad(lambda x: f(x, W).sum())(X)
    assert_close(not_jitted, jax.jit(jax.grad(lambda x: jax_layer(x, W).sum()))(X))


def test_second_derivatives_and_forward_mode() -> None:
    def fn(x):
        chosen = ops.where(ops.greater(x, popxl.constant(0.0)), x, ops.sin(x))
        return ops.sum(ops.softmax(x, -1) * ops.tanh(chosen) / (x * x + 1))

    def reference(x):
        return (jax.nn.softmax(x) * jnp.tanh(jnp.where(x > 0, x, jnp.sin(x))) / (x * x + 1)).sum()

    f = popxl.to_jax(graph_of(fn, X))

    def derivatives(f: Callable[..., Any]) -> Any:
        transforms = (jax.grad, jax.jacfwd, jax.hessian, lambda f: jax.jacrev(jax.jacrev(f)))
        return jax.jit(lambda x: [transform(f)(x) for transform in transforms] + [jax.jvp(f, (x,), (x,))])(X)

    assert_close(derivatives(f), derivatives(reference))


def test_inside_a_program_of_jax() -> None:
    f = popxl.to_jax(graph_of(layer, X, W))

    @jax.jit
    def program(x, w):
        def step(x, scale):
            return f(x, w * scale), x.sum()

        return jax.lax.scan(step, x, jnp.arange(1.0, 4.0))

    expected, sums = X, []
    for scale in (1, 2, 3):
        sums.append(expected.sum())
        expected = np.asarray(jax_layer(expected, W * scale))
    assert_close(program(X, W), (expected, np.float32(sums)))


def network(x, w):
    """Three calls of one graph, one of another."""
    ir = popxl.gcg().ir
    block, once = ir.create_graph(layer, x, w), ir.create_graph(lambda x: ops.sum(x * x), x)
    for _ in range(3):
        (x,) = ops.call(block, x, w)
    return ops.call(once, x)


def jax_network(x, w):
    for _ in range(3):
        x = jax_layer(x, w)
    return jnp.sum(x * x)


def test_calls_are_kept_under_every_transformation() -> None:
    f = popxl.to_jax(graph_of(network, X, W))
    assert_agree(f, jax_network, X, W)
    batch = np.stack([X, X])
    for function, arrays, calls in (
        (f, (X, W), 3),
        (jax.vmap(f, (0, None)), (batch, W), 3),
        (jax.grad(f), (X, W), 6),
    ):
        text = jax.jit(function).lower(*arrays).compile().as_text()
        assert text.count(" call(") == calls


def test_autodiff_agrees_with_the_gradients_of_jax() -> None:
    graph = graph_of(network, X, W)
    f = popxl.to_jax(graph)
    value, (dx, dw) = jax.jit(jax.value_and_grad(f, (0, 1)))(X, W)
    info = autodiff(graph)
    forward, backward = jax.jit(popxl.to_jax(graph)), jax.jit(popxl.to_jax(info.graph))
    known = dict(zip(graph.outputs, forward(X, W), strict=True)) | dict(zip(graph.inputs, (X, W), strict=True))
    inputs = [known[e.fwd_tensor] if e.is_activation else np.float32(1) for e in info.expected_inputs]
    assert_close(backward(*inputs), (dx, dw))
    assert_close(value, jax.jit(jax_network)(X, W))
    assert_close(jax.jit(f)(X, W), value)  # made before, it still has one output


def test_gradients_of_jax_do_not_depend_on_the_kernels_of_a_platform(ir, monkeypatch) -> None:
    """Kernels of attention for GPUs have barriers, which tie operands to what a gradient is linear in."""
    with ir.main_graph:
        x = popxl.TensorSpec((1, 2, 1024, 8), popxl.float32)
        function = popxl.to_jax(ir.create_graph(lambda x: ops.attention(x, x, x, causal=True), x))
    value = np.random.normal(size=(1, 2, 1024, 8)).astype(np.float32)
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(function(x)))))
    expected = gradient(value)
    monkeypatch.setattr(lower, "hooks_for", lambda platform: platform_hooks.hooks_for("gpu"))
    gradient.clear_cache()
    np.testing.assert_allclose(gradient(value), expected, rtol=1e-5, atol=1e-5)


def test_repeat_and_conditional() -> None:
    def repeated(x, w):
        return ops.repeat(popxl.gcg().ir.create_graph(lambda x, w: ops.tanh(x @ w), x, w), 4, x, w)

    def jax_repeated(x, w):
        for _ in range(4):
            x = jnp.tanh(x @ w)
        return (x,)

    f = popxl.to_jax(graph_of(repeated, X, W))
    assert_agree(lambda x, w: (f(x, w),), jax_repeated, X, W)

    def chosen(flag, x):
        ir = popxl.gcg().ir
        branches = [ir.create_graph(fn, x) for fn in (lambda x: ops.sin(x), lambda x: x * x)]
        return ops.conditional(flag, *branches, [x], [x])

    g = popxl.to_jax(graph_of(chosen, popxl.TensorSpec((), popxl.bool), X))
    for flag in (np.bool_(True), np.bool_(False)):
        assert_agree(g, lambda flag, x: jnp.where(flag, jnp.sin(x), x * x), flag, X)


def test_inputs_that_the_graph_changes() -> None:
    def update(w: popxl.TensorByRef, x, unchanged: popxl.TensorByRef):
        w += x * unchanged
        return ops.sum(w)

    globals_ = {"popxl": popxl, "ops": ops}  # `TensorByRef` has to be an object here, and annotations are text
    update = with_objects_as_annotations(update, globals_)
    f = popxl.to_jax(graph_of(update, X, X, X))
    assert f.written == ("w",)
    x = jnp.asarray(X)
    total, written = f(x, X, X)
    assert_close((total, written), ((X + X * X).sum(), {"w": X + X * X}))
    assert_close(x, X)
    assert_close(jax.grad(lambda w: f(w, X, X)[1]["w"].sum())(X), np.ones_like(X))
    (_, written), outputs = jax.jit(f)(X, X, X), popxl.to_jax(graph_of(lambda x: x.transpose_() + 1, X))(X)
    assert_close((written["w"], outputs), (X + X * X, X.T + 1))


def with_objects_as_annotations(fn: Any, names: dict[str, Any]) -> Any:
    fn.__annotations__ = {key: eval(text, names) for key, text in fn.__annotations__.items()}
    return fn


def test_a_change_that_is_not_by_reference_stays_inside() -> None:
    def bumped(x):
        ops.add_(x, x)
        return x

    f = popxl.to_jax(graph_of(bumped, X))
    assert f.written == ()
    assert_agree(f, lambda x: x + x, X)


# Gradients are those that the ops declare ----------------------------------------------------------------------------


def test_detach_stops_a_gradient() -> None:
    f = popxl.to_jax(graph_of(lambda x: ops.sum(ops.detach(x) * x), X))
    assert_close(jax.grad(f)(X), X)
    assert_close(jax.jvp(f, (X,), (X,))[1], (X * X).sum())
    view = popxl.to_jax(graph_of(lambda x: ops.sum(ops.detach_(x) * x), X))
    assert_close(jax.grad(view)(X), X)


def test_a_rule_of_ones_own_is_followed() -> None:
    straight = popxl.OpKind("Straight", lambda t, step: jnp.round(t / step) * step, gradient={"t": lambda g: g * 2})
    f = popxl.to_jax(graph_of(lambda x, step: ops.sum(straight(x, step) * x), X, np.float32(0.5)))
    quantised = np.round(X / 0.5) * 0.5
    dx, dstep = jax.jit(jax.grad(f, (0, 1)))(X, np.float32(0.5))
    assert_close((dx, dstep), (quantised + 2 * X, 0))
    assert_close(
        jax.grad(popxl.to_jax(graph_of(lambda x: ops.sum(ops.relu(x)), X)))(np.zeros_like(X)), np.zeros_like(X)
    )


def test_a_rule_of_several_results_operands_and_dtypes() -> None:
    rule = popxl.OpKind(
        "Divided",
        lambda t, by, n: (t / by, (t // by).astype(jnp.int32), t * n),
        gradient={
            "t": lambda gs, by, n: gs[0] / by + gs[2] * ops.cast(n, popxl.float32),
            "by": lambda gs, t, by: -gs[0] * t / (by * by),
        },
    )
    f = popxl.to_jax(graph_of(lambda t, by, n: rule(t, by, n), X, np.float32([2, 3, 4, 5]), np.int32(3)))
    arrays = (X, np.float32([2, 3, 4, 5]), np.int32(3))
    assert_agree(lambda *a: f(*a)[::2], lambda t, by, n: (t / by, t * n), *arrays)
    assert f(*arrays)[1].dtype == np.int32


def test_a_gradient_that_is_refused() -> None:
    refused = popxl.OpKind("Refused", jnp.sin, gradient=popxl.op.REFUSED)
    f = popxl.to_jax(graph_of(lambda x: ops.sum(refused(x)) + ops.sum(x), X))
    with pytest.raises(PopxlError, match="a gradient reaches the op Refused .*detach"):
        jax.grad(f)(X)
    detached = popxl.to_jax(graph_of(lambda x: ops.sum(ops.detach(refused(x))) + ops.sum(x), X))
    assert_close(jax.grad(detached)(X), np.ones_like(X))


# Dtypes and arguments ------------------------------------------------------------------------------------------------


def test_numbers_bools_and_integers() -> None:
    f = popxl.to_jax(graph_of(lambda x, k: x * k, X, np.float32(0)))
    assert_close((f(X, 2), f(X, 2.5), f(X.astype(np.float64), np.float64(2))), (X * 2, X * 2.5, X * 2))
    g = popxl.to_jax(graph_of(lambda a, b: ops.logical_and(a, ops.logical_not(b)), np.bool_(0), np.bool_(0)))
    assert (bool(g(True, False)), bool(g(True, True))) == (True, False)
    i = popxl.to_jax(graph_of(lambda a: a + 1, np.int32([1, 2])))
    assert i(np.int32([1, 2])).dtype == np.int32
    half = popxl.to_jax(graph_of(lambda a, b: a * b, np.float16([1, 2]), np.float16(0)))
    assert half(np.float16([1, 2]), 3).dtype == np.float16


def test_float8() -> None:
    spec = popxl.TensorSpec((3,), popxl.float8_143)
    f = popxl.to_jax(
        graph_of(lambda t: (ops.pow2scale_cast_from_fp8(t, popxl.constant(1, popxl.int32), popxl.float32), t), spec)
    )
    host = popxl.utils.host_pow2scale_cast_to_fp8(np.float32([1, -2.5, 240]), popxl.float8_143)
    device = np.array([1, -2.5, 240], ml_dtypes.float8_e4m3fnuz)
    for array in (host, device, jnp.asarray(device)):
        wide, narrow = f(array)
        assert_close(wide, [2, -5, 480])
        assert narrow.dtype == ml_dtypes.float8_e4m3fnuz


def test_numbers_of_64_bits() -> None:
    f = popxl.to_jax(graph_of(lambda x, n: (x * 2.0, n + 1), np.float64([1, 2]), np.int64(0)))
    with pytest.raises(PopxlError, match=r"has numbers of the dtype (int64|float64), and JAX .*jax_enable_x64"):
        f(np.float64([1, 2]), 1)
    with jax.enable_x64(True):
        x, n = jax.jit(f)(np.float64([1, 2 + 2**-40]), 2**40)
        assert (x.dtype, n.dtype, int(n)) == (np.float64, np.int64, 2**40 + 1)
        assert float(x[1]) == 4 + 2**-39
        narrow = popxl.to_jax(graph_of(network, X, W))  # 32 bits stay 32 bits
        assert narrow(X, W).dtype == np.float32
        with pytest.raises(TypeError, match=r"`x` is f32\[3, 4\]; got an array of the dtype float64"):
            narrow(X.astype(np.float64), W)


@pytest.mark.parametrize(
    ("arguments", "named", "error", "message"),
    [
        ((X,), {}, TypeError, r"layer_subgraph_0: the arguments .* \['x', 'w'\]: missing are w\."),
        ((), {"x": X, "v": W}, TypeError, r"missing are w; unknown are v\."),
        ((X, W), {"w": W}, TypeError, r"given twice are w\."),
        ((X, W, W), {}, TypeError, r"takes 2 arrays, \['x', 'w'\]; 3 were given"),
        ((X.T, W), {}, ValueError, r"the input `x` is f32\[3, 4\]; got an array of the shape \(4, 3\)\. .*jax\.vmap"),
        ((X, W.astype(np.int32)), {}, TypeError, r"the input `w` is f32\[4, 4\]; got an array of the dtype int32"),
        ((X, "w"), {}, TypeError, r"the input `w` is f32\[4, 4\]; got 'w' \(str\)"),
        ((X, None), {}, TypeError, r"the input `w` is f32\[4, 4\]; got None"),
    ],
)
def test_arguments_that_do_not_fit(arguments, named, error, message) -> None:
    f = popxl.to_jax(graph_of(layer, X, W))
    with pytest.raises(error, match=message):
        f(*arguments, **named)
    with pytest.raises(error, match=message):
        jax.jit(lambda: f(*arguments, **named))()


def test_a_float_for_an_integer() -> None:
    f = popxl.to_jax(graph_of(lambda n: n + 1, np.int32(0)))
    with pytest.raises(TypeError, match=r"the input `n` is i32\[\]; got an array of the dtype float32"):
        f(1.5)


def test_graphs_that_cannot_be_functions() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        stream = popxl.h2d_stream((), popxl.float32, "s")
    with pytest.raises(PopxlError, match=r"to_jax: graph `loads.*uses .*s.*to_jax\(ir.main_graph\)"):
        popxl.to_jax(graph_of(named(lambda: ops.host_load(stream), "loads"), ir=ir))
    with pytest.raises(TypeError, match="`graph` must be a Graph"):
        popxl.to_jax(ir)  # type: ignore[arg-type]
    replicated = popxl.Ir(replication=2)
    with pytest.raises(PopxlError, match="2 replicas"):
        popxl.to_jax(replicated.main_graph)


def named(fn: Any, name: str) -> Any:
    fn.__qualname__ = name
    return fn


def test_a_graph_that_has_changed() -> None:
    graph = graph_of(layer, X, W)
    f = popxl.to_jax(graph)
    with graph:
        graph.outputs[0] + 1
    with pytest.raises(
        PopxlError, match=r"gained Op\[Add.*\] \(test_interop.py:\d+\) since `popxl.to_jax` was called\. Call it"
    ):
        f(X, W)


def test_a_call_that_has_changed() -> None:
    ir = popxl.Ir()
    inner = ir.create_graph(lambda t: ops.add_(t, popxl.constant(1.0)), popxl.TensorSpec((), popxl.float32))
    graph = ir.create_empty_graph()
    with graph:
        t = popxl.graph_input((), popxl.float32, "t", by_ref=True)
        site = ops.call_with_info(inner, t)
        popxl.graph_output(t + 0.0)
    f = popxl.to_jax(graph)
    assert f(1.0) == 1
    site.set_parent_input_modified(t)
    with pytest.raises(PopxlError, match="has other inputs that it changes since `popxl.to_jax` was called"):
        f(1.0)
    result, written = popxl.to_jax(graph)(1.0)
    assert (result, written["t"]) == (2, 2)


def test_a_lowering_that_fails_names_the_op() -> None:
    broken = popxl.OpKind("Broken", lambda t: t.nothing, shape=lambda t: t.spec)
    with pytest.raises(PopxlError, match=r"Op\[Broken.*\] in graph .*broken\(x\).*test_interop"):
        popxl.to_jax(graph_of(lambda x: broken(x), X))(X)


# Effects -------------------------------------------------------------------------------------------------------------


def test_what_ops_require_is_checked_by_checkify() -> None:
    positive = popxl.OpKind(
        "Root",
        jnp.sqrt,
        operands=("t",),
        traits=[popxl.op.Requirement("t", lambda t: t >= 0, "has to be positive {or zero}")],
    )

    def roots(x):
        graph = popxl.gcg().ir.create_graph(lambda x: positive(x) + 1, x)
        return ops.call(graph, ops.call(graph, x)[0] - 2)

    f = popxl.to_jax(graph_of(roots, X))
    x = np.abs(X) + 1
    assert_agree(f, lambda x: jnp.sqrt(jnp.sqrt(x) - 1) + 1, x + 1)
    jax.jit(f)(X)  # no check without checkify
    checked = jax.jit(checkify.checkify(f))
    assert checked(x)[0].get() is None
    message = checked(X)[0].get()
    assert "`t` has to be positive {or zero}, and it is not" in message and "Root" in message
    assert jax.jit(checkify.checkify(jax.vmap(f)))(np.stack([x, X]))[0].get() is not None


def test_printing(capfd) -> None:
    f = popxl.to_jax(graph_of(lambda x: ops.sum(ops.print_tensor(x, "seen")), np.float32([1, 2])))
    value, gradient = jax.jit(jax.value_and_grad(f))(np.float32([1, 2]))
    jax.effects_barrier()
    assert_close((value, gradient), (3, [1, 1]))
    assert capfd.readouterr().err == "seen: [1. 2.]\n"


# The main graph ------------------------------------------------------------------------------------------------------


def training(transfers: int = 1) -> tuple[popxl.Ir, Any, Any]:
    ir = popxl.Ir()
    ir.num_host_transfers = transfers
    with ir.main_graph, popxl.in_sequence():
        x_in = popxl.h2d_stream((3, 4), popxl.float32, "x")
        out = popxl.d2h_stream((), popxl.float32, "loss")
        w = popxl.variable(W, name="w")
        scale = popxl.variable(0.1, popxl.float32, name="scale")
        popxl.variable(1.0, name="unused")
        graph = ir.create_graph(lambda x, w: ops.sum(ops.tanh(x @ w)), x_in.spec, w)
        info = autodiff(graph, grads_required=graph.inputs[1:])

        def step():
            x = ops.host_load(x_in)
            site = ops.call_with_info(graph, x, w)
            (dw,) = ops.call(info.graph, 1.0, inputs_dict=info.inputs_dict(site))
            ops.scaled_add_(w, dw * scale, b=-1.0)
            ops.host_store(out, site.outputs[0])

        for _ in range(transfers):
            step()
    return ir, x_in, out


@pytest.mark.parametrize("transfers", [1, 2])
def test_the_main_graph_is_a_function_of_variables_and_streams(transfers) -> None:
    ir, x_in, out = training(transfers)
    step = popxl.to_jax(ir.main_graph)
    assert popxl.to_jax(ir.graphs[1]).variables() == {}
    assert step.inputs == ("scale", "w", "x") and step.written == ("w",)
    variables = step.variables()
    x = X if transfers == 1 else np.stack([X, X * 2])
    losses = []
    for _ in range(3):
        fetched, changed = jax.jit(step)(**variables, x=x)
        losses.append(fetched["loss"])
        variables |= changed
    with popxl.Session(ir) as session:
        expected = [np.array(session.run({x_in: x})[out]) for _ in range(3)]
        w = session.get_tensor_data(ir.main_graph.variables[2])
    assert_close(losses, expected)
    assert_close(variables["w"], w)


def test_the_main_graph_in_a_loop_of_jax_and_with_defaults() -> None:
    ir, _, _ = training()
    step = popxl.to_jax(ir.main_graph)

    def turn(w, x):
        fetched, changed = step(w=w, x=x)
        return changed["w"], fetched["loss"]

    w, losses = jax.lax.scan(turn, step.variables()["w"], np.stack([X, X]))
    one = jax.jit(lambda **named: step(x=X, **named))
    (first, changed) = one()
    (second, changed) = one(w=changed["w"])
    assert_close((w, losses), (changed["w"], [first["loss"], second["loss"]]))
    gradient = jax.jit(jax.grad(lambda w: step(w=w, x=X)[0]["loss"]))(W)
    assert_close(gradient, jax.jit(jax.grad(lambda w: jnp.tanh(X @ w).sum()))(W))


def test_a_stream_with_the_name_of_a_variable() -> None:
    """Its argument gets another name."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        w = popxl.variable([1.0, 2.0], name="w")
        ops.host_store(popxl.d2h_stream((2,), w.dtype, "out"), w * ops.host_load(popxl.h2d_stream((), w.dtype, "w")))
    step = popxl.to_jax(ir.main_graph)
    assert step.inputs == ("w", "w_stream")
    fetched, _ = step(w_stream=np.float32(3))
    assert_close(fetched["out"], [3, 6])


def test_errors_of_the_main_graph() -> None:
    ir, x_in, _ = training()
    step = popxl.to_jax(ir.main_graph)
    with pytest.raises(TypeError, match="by name only: scale, w, x"):
        step(X)
    with pytest.raises(TypeError, match="missing are x"):
        step()
    with ir.main_graph:
        ops.host_load(x_in)
    with pytest.raises(PopxlError, match=r"2 transfers of .*`ir.num_host_transfers` is 1"):
        popxl.to_jax(ir.main_graph)


# A function of JAX as a graph ----------------------------------------------------------------------------------------


def through_a_graph(fn: Callable[..., Any], *arrays: Any) -> Callable[..., Any]:
    """A function of JAX, by way of a graph."""
    return popxl.to_jax(graph_of(popxl.from_jax(fn), *arrays))


def gradients_by_autodiff(fn: Callable[..., Any], *arrays: Any) -> list[np.ndarray]:
    """The value of a scalar function of JAX and its gradients, by `autodiff`, in a session."""

    def program(*ts: Any) -> list[Any]:
        graph = popxl.gcg().ir.create_graph(popxl.from_jax(fn), *ts)
        required = [t for t in graph.inputs if t.dtype.is_floating_point]
        info = autodiff(graph, grads_required=required)
        site = ops.call_with_info(graph, *ts)
        return [site.outputs[0], *ops.call(info.graph, 1.0, inputs_dict=info.inputs_dict(site))]

    return evaluate(program, *arrays)


TABLE = np.float32(np.sin(np.arange(12)).reshape(3, 4))


def mlp(x, w, b):
    h = jax.nn.relu(x @ w + b)
    return jnp.mean((jax.nn.silu(h @ w.T) - x) ** 2)


@jax.jit
def attention(x, w):
    q, k, v = x @ w, x @ w.T, x @ (w * 2)
    scores = jnp.einsum("ic,jc->ij", q, k) / jnp.sqrt(x.shape[-1])
    scores = jnp.where(jnp.tril(jnp.ones_like(scores, bool)), scores, -jnp.inf)
    return jax.nn.softmax(scores) @ v


def transformer(x, w):
    for _ in range(3):
        y = x + attention(x, w)
        x = (y - y.mean(-1, keepdims=True)) * jax.lax.rsqrt(y.var(-1, keepdims=True) + 1e-3)
    return jnp.sum(x * TABLE)


def scanned(x, w):
    _, sums = jax.lax.scan(lambda c, row: (jnp.tanh(c @ w) + row, c.sum()), jnp.zeros(4), x)
    return sums.sum()


def branching(x, w):
    return jax.lax.cond(x.sum() > 0, lambda: jnp.sin(x).sum(), lambda: (x @ w).sum())


@jax.custom_jvp
def doubled_slope(x):
    return x * 3


doubled_slope.defjvp(lambda x, t: (doubled_slope(*x), t[0] * 6))


@jax.custom_vjp
def clipped_gradient(x, limit):
    return x * limit, limit


clipped_gradient.defvjp(
    lambda x, limit: ((x * limit, limit), limit),
    lambda limit, gs: (jnp.clip(gs[0], -limit, limit), jnp.zeros_like(limit)),
)


def own_derivatives(x, w):
    return jnp.sum(doubled_slope(x) * x + clipped_gradient(w.sum(), 0.25)[0])


def various(x, w):
    rows = x[jnp.array([2, 0])] + TABLE[1]
    spread = jnp.zeros((5, 4)).at[jnp.array([4, 1])].add(rows)
    image = jax.lax.conv_general_dilated(spread[None, None], w[None, None], (1, 1), "SAME")
    pooled = jax.lax.reduce_window(image, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 1, 1), "VALID")
    halves = jnp.sort(jnp.cumsum(pooled, -1).astype(jnp.float16), -1).astype(jnp.float32)
    top, _ = jax.lax.top_k(halves, 2)
    return jnp.linalg.norm(top) + jax.nn.logsumexp(x) + jax.checkpoint(lambda w: jnp.exp(w).sum())(w)


FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[np.ndarray, ...]]] = {
    "mlp": (mlp, (X, W, np.float32([0.1, 0.2, 0.3, 0.4]))),
    "transformer": (transformer, (X, W)),
    "scan": (scanned, (X, W)),
    "cond": (branching, (X, W)),
    "own derivatives": (own_derivatives, (X, W)),
    "various": (various, (X, W)),
    "gradient": (lambda x, w: jnp.sum(jax.grad(transformer)(x, w) ** 2), (X, W)),
    "vmap": (lambda x, w: jax.vmap(lambda row: jnp.tanh(row @ w).sum())(x).sum(), (X, W)),
}


SLOW = ("gradient", "transformer", "various")
"""Functions that take long to compile."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.thorough] * (n in SLOW[:2])) for n in FUNCTIONS])
def test_numbers_and_gradients_are_those_of_jax(name) -> None:
    fn, arrays = FUNCTIONS[name]
    value, *gradients = gradients_by_autodiff(fn, *arrays)
    expected = jax.jit(jax.value_and_grad(fn, tuple(range(len(arrays)))))(*arrays)
    assert_close((value, tuple(gradients)), expected, 2e-4)


@pytest.mark.thorough(but_each=5)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.thorough] * (n in SLOW)) for n in FUNCTIONS if n != "gradient"],
)
def test_there_and_back_again(name) -> None:
    """JAX → graph → JAX, with every transformation; and once more."""
    fn, arrays = FUNCTIONS[name]
    again = through_a_graph(fn, *arrays)
    if name == "various":  # batches of convolutions and sorts are JAX's business
        assert_close(jax.jit(jax.value_and_grad(again))(*arrays), jax.jit(jax.value_and_grad(fn))(*arrays), 2e-4)
    else:
        assert_agree(again, fn, *arrays)
    assert_close(jax.jit(through_a_graph(again, *arrays))(*arrays), jax.jit(fn)(*arrays))


def test_from_a_graph_and_back_again() -> None:
    """graph → JAX → graph: calls stay calls, ops keep their names and their own gradients."""
    straight = popxl.OpKind("Straight", jnp.round, gradient={"operands": lambda g: g * 2}, operands=("operands",))

    def model(x, w):
        (total,) = network(straight(x), w)
        return total

    graph = graph_of(model, X, W)
    again = graph_of(popxl.from_jax(popxl.to_jax(graph)), X, W)
    assert [t.name for t in again.inputs] == ["x", "w"]
    assert "Straight(x" in str(again)
    assert [g.name.rpartition("_")[0] for g in again.called_graphs] == ["layer_subgraph_1"]
    assert len([op for op in again.ops if op.op_type == "Call"]) == 3
    value, expected = jax.jit(jax.value_and_grad(popxl.to_jax(graph), (0, 1)))(X, W)
    assert_close(jax.jit(popxl.to_jax(again))(X, W), (value,))
    found = gradients_by_autodiff(popxl.to_jax(graph), X, W)[1:]
    assert_close(tuple(found), expected, 1e-4)


def test_a_graph_of_a_function_reads_like_a_page() -> None:
    def page(x, w):
        return jnp.tanh(x @ w) * 2.0, jax.nn.relu(x)

    assert str(graph_of(popxl.from_jax(named(page, "page")), X, W)) == textwrap.dedent(
        """\
        page_subgraph(0)(x: f32[3, 4], w: f32[4, 4]):
            dot_general_out: f32[3, 4] = DotGeneral(x, w, dimension_numbers=(((1,), (0,)), ((), ())), \
preferred_element_type=popxl.dtypes.float32)
            tanh_out: f32[3, 4]        = Tanh(dot_general_out)
            mul_out: f32[3, 4]         = Mul(tanh_out, 2.0)
            max_out: f32[3, 4]         = Call relu_subgraph(1)(x)
            return mul_out, max_out
          where
            relu_subgraph(1)(x: f32[3, 4]):  # has its own derivative
                max_out: f32[3, 4] = Max(x, 0.0)
                return max_out"""
    )


def test_a_jitted_function_is_one_graph_however_often_it_is_called() -> None:
    ir = popxl.Ir()
    graph = graph_of(popxl.from_jax(transformer), X, W, ir=ir)
    (block,) = graph.called_graphs
    assert block.name.startswith("attention_subgraph")
    assert [t.name for t in block.inputs] == ["x", "w"]
    assert len(block.call_sites) == 3
    autodiff(graph)  # gives it outputs
    other = graph_of(popxl.from_jax(lambda x, w: attention(x, w) + 1), X, W, ir=ir)
    assert other.called_graphs == (block,) and len(other.outputs) == 1
    assert_close(jax.jit(popxl.to_jax(other))(X, W), attention(X, W) + 1)
    wider = graph_of(popxl.from_jax(lambda x, w: attention(x, w) + 1), np.tile(X, (2, 1)), W, ir=ir)
    assert wider.called_graphs[0] is not block


def test_a_function_that_is_jitted_as_a_whole_is_written_out() -> None:
    graph = graph_of(popxl.from_jax(attention), X, W)
    assert graph.called_graphs == () and graph.name == "attention_subgraph(0)"
    assert [op.op_type for op in graph_of(popxl.from_jax(jnp.sin), X).ops] == ["Sin"]
    assert [op.op_type for op in graph_of(popxl.from_jax(jnp.add), X, X).ops] == ["Add"]


def test_in_the_middle_of_a_graph() -> None:
    """Tensors in containers, plain values, keywords; the structure of the result is the function's."""

    def dense(parameters, x, *, activation=jnp.tanh, scale=1):
        y = activation(x @ parameters["w"] + parameters["b"]) * scale
        return {"y": y, "parts": [y[0], y.sum()]}

    b = np.float32([1, 2, 3, 4])

    def program(x, w, b):
        result = popxl.from_jax(dense)({"w": w, "b": b}, x, activation=jnp.sin, scale=3)
        return [result["y"] + 1, *result["parts"]]

    expected = dense({"w": W, "b": b}, X, activation=jnp.sin, scale=3)
    found = evaluate(program, X, W, b)
    assert_close(found, [expected["y"] + 1, *expected["parts"]])


@pytest.mark.parametrize(
    "close", [lambda w: lambda x: x @ w, lambda w: lambda x: w * x, lambda w: lambda x: jnp.dot(x, w)]
)
def test_a_tensor_that_a_function_closes_over_is_refused(ir, close) -> None:
    message = r"Variable\[w .*takes each tensor as an argument, and closes over none\."
    with ir.main_graph, pytest.raises(PopxlError, match=message):
        popxl.from_jax(close(popxl.variable(W, name="w")))(popxl.variable(X, name="x"))


def test_results_that_are_arguments_constants_and_numbers() -> None:
    table = jnp.asarray(TABLE)
    f = through_a_graph(lambda x: (x, x, table, 2.0, jnp.arange(3), x.shape[0]), X)
    x, again, constant, number, integers, size = f(X)
    assert_close((x, again, constant, number, integers, size), (X, X, TABLE, 2.0, np.arange(3), 3))
    assert integers.dtype == np.int32
    nothing = graph_of(popxl.from_jax(lambda: jnp.ones((2, 3))))
    assert_close(popxl.to_jax(nothing)(), np.ones((2, 3)))


def test_dtypes_of_functions() -> None:
    def mixed(x, n, flags):
        return x.astype(jnp.float16), n.astype(jnp.uint8) << 1, jnp.where(flags, n, -n), x.argmax(-1), flags & (n > 1)

    arrays = (X, np.int32([1, 2, 3]), np.array([True, False, True]))
    found, expected = through_a_graph(mixed, *arrays)(*arrays), mixed(*map(jnp.asarray, arrays))
    assert [r.dtype for r in found] == [r.dtype for r in expected]
    assert_close(found, expected)


def test_functions_of_64_bits() -> None:
    def fn(x):
        return x * 2, jnp.arange(3, dtype=jnp.int64) + x.astype(jnp.int64), x.astype(jnp.float32)

    x = np.float64([1 + 2**-40, 2, 3])

    wide, integers, narrow = evaluate(lambda: popxl.from_jax(fn)(popxl.constant(x, popxl.float64)))
    assert (wide.dtype, integers.dtype, narrow.dtype) == (np.float64, np.int64, np.float32)
    assert wide[0] == 2 + 2**-39
    graph = graph_of(popxl.from_jax(lambda x: jnp.sum(x * x)), x)
    with jax.enable_x64(True):
        assert_close(popxl.to_jax(autodiff(graph).graph)(1.0, x), 2 * x)


def test_float8_of_functions() -> None:
    spec = popxl.TensorSpec((3,), popxl.float8_152)
    f = popxl.to_jax(graph_of(popxl.from_jax(lambda t: t.astype(jnp.float32) * 2), spec))
    assert_close(f(np.array([1, 2, 3], ml_dtypes.float8_e5m2fnuz)), [2, 4, 6])


def test_a_while_loop_runs_and_says_why_it_has_no_gradient() -> None:
    def halvings(x):
        return jax.lax.while_loop(lambda c: c[0].sum() > 1, lambda c: (c[0] / 2, c[1] + 1), (x, 0))

    f = through_a_graph(halvings, np.float32([8, 8]))
    assert_close(f(np.float32([8, 8])), ([0.5, 0.5], 4))
    graph = graph_of(popxl.from_jax(lambda x: halvings(x)[0]), np.float32([8, 8]))
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work for lax.while_loop"):
        autodiff(graph)


def test_stop_gradient() -> None:
    _, gradient = gradients_by_autodiff(lambda x: jnp.sum(jax.lax.stop_gradient(x) * x), X)
    assert_close(gradient, X)


def test_methods_partials_and_objects() -> None:
    class Scale:
        def __init__(self, by: float) -> None:
            self.by = by

        def __call__(self, x):
            return x * self.by

    assert_close(through_a_graph(Scale(3.0), X)(X), X * 3)
    assert_close(through_a_graph(Scale(3.0).__call__, X)(X), X * 3)
    graph = graph_of(popxl.from_jax(functools.partial(jnp.multiply, 2.0)), X)
    assert_close(popxl.to_jax(graph)(X), X * 2)
    assert graph_of(popxl.from_jax(Scale(3.0)), X).name.endswith("Scale_subgraph(0)")


def test_the_same_graph_is_called_and_repeated_and_chosen() -> None:
    def program(x, w):
        ir = popxl.gcg().ir
        graph = ir.create_graph(popxl.from_jax(jax_layer), x, w)
        (once,) = ops.call(graph, x, w)
        (often,) = ops.repeat(graph, 3, x, w)
        (either,) = ops.conditional(ops.greater(ops.sum(x), popxl.constant(0.0)), graph, graph, [x, w], [once, w])
        return once, often, either

    once = jax_layer(X, W)
    often = jax_layer(jax_layer(once, W), W)
    assert_close(evaluate(program, X, W), [once, often, once if X.sum() > 0 else jax_layer(once, W)])


def test_name_scopes_and_the_users_lines() -> None:
    ir = popxl.Ir()
    with ir.main_graph as main, popxl.name_scope("block"):
        y = popxl.from_jax(jax_layer)(popxl.variable(X), popxl.variable(W))
        assert y.name.startswith("block/")
    assert {op.source.text for op in main.ops} == {"return jax.nn.gelu(x @ w)"}
    assert {op.source.file for op in main.ops} == {__file__}


def test_a_whole_function_as_one_op() -> None:
    kind = popxl.OpKind("Attention", attention, key="tests.Attention")
    graph = graph_of(lambda x, w: ops.sum(kind(x, w)), X, W)
    assert [op.op_type for op in graph.ops] == ["Attention", "ReduceSum"]
    assert_agree(popxl.to_jax(graph), lambda x, w: attention(x, w).sum(), X, W)


# What cannot be a graph ----------------------------------------------------------------------------------------------


def printing(x):
    jax.debug.print("{}", x)
    return x


def random(x):
    return x + jax.random.normal(jax.random.key(0), x.shape)


def nibbles(x):
    return (x.astype(jnp.int4) * 2).astype(jnp.float32)


def branches_on_values(x):
    return x if x.sum() > 0 else -x


def wrong_shapes(x):
    return x @ x


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (printing, "`printing` does more than compute its results .*ops.print_tensor"),
        (
            nibbles,
            r"`nibbles` handles a value of the type int4\[3,4\] in `convert_element_type`, at `return \(x\.astype",
        ),
        (branches_on_values, r"`branches_on_values` cannot be traced on f32\[3, 4\]: .*[Bb]ool"),
        (wrong_shapes, r"`wrong_shapes` cannot be traced on f32\[3, 4\]: dot_general requires .*\(4,\) and \(3,\)"),
    ],
)
def test_functions_that_cannot_be_written_as_ops(fn, message) -> None:
    ir = popxl.Ir()
    with ir.main_graph as main:
        x = popxl.variable(X)
        with pytest.raises(PopxlError, match=message):
            popxl.from_jax(fn)(x)
        with pytest.raises(PopxlError, match=message):
            ir.create_graph(popxl.from_jax(fn), x)
    assert main.ops == [] and len(ir.graphs) == 1


def test_random_numbers() -> None:
    for build in (popxl.from_jax(random), popxl.OpKind("Random", random)):
        (found,) = evaluate(build, X)
        assert_close(found, random(X))


def test_other_errors() -> None:
    with pytest.raises(TypeError, match=r"from_jax: `fn` must be a function; got 3 \(int\)"):
        popxl.from_jax(3)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="no current graph"):
        popxl.from_jax(jnp.sin)(1.0)
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.variable(X)
        graph = ir.create_graph(lambda: None)
        with graph, pytest.raises(ValueError, match=r"from_jax\(sin\): `tensor 0` is .* which is not in graph"):
            popxl.from_jax(jnp.sin)(x)


# In a file, and without a device -------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_saved_program_is_loaded_where_nothing_was_declared(tmp_path) -> None:
    def fn(x, w):
        h = attention(attention(x, w), w)[jnp.array([2, 0, 2])]
        image = jax.lax.conv_general_dilated(h[None, None], w[None, None], (1, 1), "SAME", precision="highest")
        h = h + image[0, 0] * jax.nn.one_hot(jnp.array([1, 2, 0]), 4)
        return jnp.sum(jnp.exp(h) / (1 + h**2)) + jnp.argmax(x).astype(jnp.float32)

    ir = popxl.Ir()
    with ir.main_graph:
        x, w = popxl.variable(X, name="x"), popxl.variable(W, name="w")
        graph = ir.create_graph(popxl.from_jax(fn), x, w)
        info = autodiff(graph)
        site = ops.call_with_info(graph, x, w)
        dx, dw = ops.call(info.graph, 1.0, inputs_dict=info.inputs_dict(site))
        out = popxl.d2h_stream(dw.shape, dw.dtype, "out")
        ops.host_store(out, dw)
    ir.save(tmp_path / "program.popxl")
    with popxl.Session(ir) as session:
        expected = np.array(session.run()[out])
    program = f"""
        import numpy as np, popxl
        ir = popxl.Ir.load({str(tmp_path / "program.popxl")!r})
        (out,) = ir.get_all_d2h_streams()
        with popxl.Session(ir) as session:
            np.save({str(tmp_path / "out.npy")!r}, session.run()[out])
        open({str(tmp_path / "text")!r}, "w").write(str(ir))
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=120)
    assert_close(np.load(tmp_path / "out.npy"), expected)
    assert (tmp_path / "text").read_text() == str(ir)


def test_what_vmap_counts_is_saved(tmp_path) -> None:
    """Its axes are NumPy's integers, which came back as arrays, and a file as damaged."""
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.variable(X, name="x")
        (y,) = ops.call(ir.create_graph(popxl.from_jax(jax.vmap(lambda row: row / jnp.linalg.norm(row))), x), x)
        out = popxl.d2h_stream(y.shape, y.dtype, "out")
        ops.host_store(out, y)
    ir.save(tmp_path / "program.popxl")
    loaded = popxl.Ir.load(tmp_path / "program.popxl")
    assert str(loaded) == str(ir)
    (out,) = loaded.get_all_d2h_streams()
    with popxl.Session(loaded) as session:
        assert_close(session.run()[out], X / np.linalg.norm(X, axis=1, keepdims=True))


def test_what_combines_numbers_is_saved(tmp_path) -> None:
    """Scatters and windows hold a function, which is a sum or a product by name."""

    def combined(x: Any) -> Any:
        rows = jnp.array([2, 0, 2])
        product = jax.lax.reduce_window(x, 1.0, jax.lax.mul, (2, 2), (1, 1), "VALID")
        return x.at[rows].add(jnp.ones((3, X.shape[1]))), jax.ops.segment_prod(x[0], jnp.arange(X.shape[1]), 9), product

    ir = popxl.Ir()
    graph = graph_of(popxl.from_jax(combined), np.resize(X, (3, X.shape[1])), ir=ir)
    assert "because=" not in str(graph)
    ir.save(tmp_path / "program.popxl")
    (loaded,) = (g for g in popxl.Ir.load(tmp_path / "program.popxl").graphs if g.id == graph.id)
    assert str(loaded) == str(graph)
    assert_agree(popxl.to_jax(loaded), combined, np.resize(X, (3, X.shape[1])), grad=False)


@pytest.mark.thorough(but_each=2)
@pytest.mark.parametrize("solved", [lambda m, x: jnp.linalg.solve(m, x), lambda m, x: jnp.linalg.inv(m) @ x])
def test_solvers(solved) -> None:
    """Their parameters are tuples of a type that JAX keeps to itself."""
    m = np.eye(3, dtype=np.float32) * 3 + np.arange(9, dtype=np.float32).reshape(3, 3) / 9
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    assert_agree(popxl.to_jax(graph_of(popxl.from_jax(solved), m, x)), solved, m, x)


def test_code_cannot_be_saved(tmp_path) -> None:
    ir = popxl.Ir()
    graph_of(popxl.from_jax(lambda x: jax.lax.while_loop(lambda c: c.sum() > 1, lambda c: c / 2, x)), X, ir=ir)
    with pytest.raises(PopxlError, match=r"Ir.save: `cond_jaxpr` of Op\[While.*cannot be saved.*says why"):
        ir.save(tmp_path / "program.popxl")


def test_no_device_is_started() -> None:
    program = """
        import jax, jax.numpy as jnp, numpy as np, popxl
        from popxl import ops

        table = np.ones((2, 4), np.float32)

        @jax.jit
        def block(x, w):
            return jax.nn.softmax(jnp.where(x > 0, x @ w, jnp.array([1.0, 2.0, 3.0, 4.0]))) + table

        def fn(x, w):
            y = jax.lax.scan(lambda c, _: (block(c, w), None), x, None, 3)[0]
            return jnp.sum(jax.nn.relu(block(y, w))), jnp.arange(3), 2.0

        ir = popxl.Ir()
        spec = lambda *shape: popxl.TensorSpec(shape, popxl.float32)
        graph = ir.create_graph(popxl.from_jax(fn), spec(2, 4), spec(4, 4))
        popxl.transforms.autodiff(graph, grads_provided=graph.outputs[:1])
        str(ir)
        popxl.to_jax(graph)
        from jax._src import xla_bridge
        assert not xla_bridge.backends_are_initialized(), "a device was started"
    """
    subprocess.run([sys.executable, "-W", "error", "-c", textwrap.dedent(program)], check=True, timeout=120)


@pytest.mark.usefixtures("only_new_objects")
def test_declarations_do_not_keep_programs_alive() -> None:
    ir = popxl.Ir()
    graph = ir.create_graph(popxl.from_jax(own_derivatives), spec_of(X), spec_of(W))
    autodiff(graph)
    popxl.to_jax(graph)(X, W)
    gone = weakref.ref(ir)
    del ir, graph
    gc.collect()
    assert gone() is None


def test_a_constant_that_nothing_reads_does_not_count():
    """`ops.cumsum` leaves one of 64 bits in the graph; the function needs no such numbers."""
    ir = popxl.Ir()
    with ir.main_graph:
        graph = ir.create_graph(lambda x: ops.cumsum(x, 0), popxl.TensorSpec((3,), popxl.float32))
    np.testing.assert_array_equal(popxl.to_jax(graph)(np.float32([1, 2, 3])), [1, 3, 6])
