"""`from_jax` of functions that hold functions: graphs, with JAX's numbers, gradients and second derivatives."""

from __future__ import annotations

import textwrap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import popxl
from popxl import ops
from popxl.errors import PopxlError
from popxl.extend.graphs import reachable
from popxl.transforms import autodiff
from tests.popxl.evaluate import evaluate
from tests.popxl.jax_functions import FUNCTIONS, B, W, X, offloading, steep

CODE = (" function=", " jaxpr=", " branches=")
"""Attributes that hold code. An op that has one says why."""


def assert_close(found: Any, expected: Any) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)


def graph_of(fn: Any, *arrays: Any, ir: popxl.Ir | None = None) -> popxl.Graph:
    specs = [popxl.TensorSpec(a.shape, popxl.dtypes.dtype.as_dtype(a.dtype)) for a in arrays]
    return (popxl.Ir() if ir is None else ir).create_graph(popxl.from_jax(fn), *specs)


SLOW = ("llama", "step of a llama")
"""Functions that take long to compile."""

ALIKE = {"remat that offloads": "remat", "remat that offloads in scan": "remat in scan"}
"""Functions that JAX (0.10.2) does not differentiate twice, and others with the same numbers."""


@pytest.mark.thorough(but_each=12)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.thorough] * (n in SLOW)) for n in FUNCTIONS if n != SLOW[1]]
)
def test_numbers_and_both_derivatives_are_those_of_jax(name: str) -> None:
    fn, arrays = FUNCTIONS[name]

    def squares(*gradients: Any) -> Any:
        return sum(jnp.sum(g * g) for g in gradients)

    alike, _ = FUNCTIONS[ALIKE.get(name, name)]

    def program(*ts: popxl.Tensor) -> list[popxl.Tensor]:
        ir = popxl.gcg().ir
        graph = ir.create_graph(popxl.from_jax(fn), *ts)
        info = autodiff(graph)

        def of_gradient(*own: popxl.Tensor) -> popxl.Tensor:
            site = ops.call_with_info(graph, *own)
            gradients = ops.call(info.graph, 1.0, inputs_dict=info.inputs_dict(site))[: len(own)]
            return ops.sum(ops.concat([ops.flatten(g * g) for g in gradients]))

        twice = ir.create_graph(of_gradient, *ts)
        second = autodiff(twice)
        site, other = ops.call_with_info(graph, *ts), ops.call_with_info(twice, *ts)
        assert all("because=" in line for line in str(ir).splitlines() if any(code in line for code in CODE))
        first = ops.call(info.graph, 1.0, inputs_dict=info.inputs_dict(site))[: len(ts)]  # it has further outputs
        return [site.outputs[0], *first, *ops.call(second.graph, 1.0, inputs_dict=second.inputs_dict(other))]

    every = tuple(range(len(arrays)))

    def expected(*arrays: Any) -> Any:
        value, gradients = jax.value_and_grad(fn, every)(*arrays)
        return value, gradients, jax.grad(lambda *own: squares(*jax.grad(alike, every)(*own)), every)(*arrays)

    assert_close(evaluate(program, *arrays), jax.jit(expected)(*arrays))


@pytest.mark.thorough(but_each=12)
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.thorough] * (n in SLOW)) for n in FUNCTIONS if n != SLOW[0]]
)
def test_the_function_comes_back(name: str) -> None:
    """By `to_jax`, with its gradient; and as graphs again."""
    fn, arrays = FUNCTIONS[name]
    graph = graph_of(fn, *arrays)
    again = popxl.to_jax(graph)
    every = tuple(range(len(arrays)))
    assert_close(jax.jit(jax.value_and_grad(again, every))(*arrays), jax.jit(jax.value_and_grad(fn, every))(*arrays))
    assert loops_and_branches(graph_of(again, *arrays)) == loops_and_branches(graph)


def loops_and_branches(graph: popxl.Graph) -> list[str]:
    return sorted(op.op_type for g in reachable(graph) for op in g.ops if op.op_type in ("Loop", "If", "Scan"))


# How it reads ---------------------------------------------------------------------------------------------------------


def decayed(start: Any, rows: Any) -> Any:
    def step(c: Any, row: Any) -> Any:
        c = c * 0.5 + row
        return c, c.sum()

    return jax.lax.scan(step, start, rows)


def kept(x: Any, w: Any) -> Any:
    def block(x: Any, w: Any) -> Any:
        return jnp.cos(jnp.sin(checkpoint_name(x @ w, "product")))

    return jax.checkpoint(block, policy=jax.checkpoint_policies.save_only_these_names("product"))(x, w)


def test_a_scan_reads_like_a_loop_over_rows() -> None:
    assert str(graph_of(decayed, B, X)) == textwrap.dedent(
        """\
        decayed_subgraph(0)(start: f32[4], rows: f32[3, 4]):
            add_out__t2: f32[4],
            reduce_sum_out__t3: f32[3] = Loop step_subgraph(1)__loop_wrapper_subgraph(2)(start, rows, repeat_count=3, \
carried=1)
            return add_out__t2, reduce_sum_out__t3
          where
            step_subgraph(1)__loop_wrapper_subgraph(2)(iteration: i32[], keep_going: bool[], c: f32[4], \
row_of_turns: f32[3, 4]):
                row: f32[4]               = Gather(row_of_turns, iteration, axis=0, zero_OOR=False)
                add_out__t0: f32[4],
                reduce_sum_out__t1: f32[] = Call step_subgraph(1)(c, row)
                return keep_going, add_out__t0, reduce_sum_out__t1

            step_subgraph(1)(c: f32[4], row: f32[4]):
                mul_out: f32[4]       = Mul(c, 0.5)
                add_out: f32[4]       = Add(mul_out, row)
                reduce_sum_out: f32[] = ReduceSum(add_out, axes=(0,))
                return add_out, reduce_sum_out"""
    )


def test_a_switch_reads_like_conditionals() -> None:
    def chosen(n: Any, x: Any) -> Any:
        return jax.lax.switch(n, [jnp.sin, jnp.cos, jnp.tanh], x)

    text = str(graph_of(chosen, np.int32(1), B))
    assert "= If sin_subgraph(1) switch_subgraph(2)(less_out, x, clamp_out, x)" in text
    assert "= If cos_subgraph(3) tanh_subgraph(4)(less_out, x, x)" in text


def test_what_is_computed_again_waits_for_the_gradient_and_reads_what_is_kept() -> None:
    graph = graph_of(kept, X, W)
    assert "  # computed again for its gradient, which keeps name_out\n" in str(graph)
    text = str(autodiff(graph).graph)
    assert "name_out_after: f32[3, 4]             = AvailableAfter(name_out, Gradient___cos_out)" in text
    assert "= Sin(name_out_after)" in text and "DotGeneral(" not in text


def test_what_a_policy_offloads_goes_to_the_host_and_back(tmp_path) -> None:
    """In the gradient graph, in a file, in the function that comes back, and where JAX has differentiated already."""
    ir = popxl.Ir()
    graph = graph_of(offloading, X, W, ir=ir)
    text = "  # computed again for its gradient, which offloads name_out"
    assert text in str(graph) and text in str(graph_of(popxl.to_jax(graph), X, W))
    gradient = autodiff(graph).graph
    after = "AvailableAfter(name_out_offloaded, Gradient___mul_out)"
    assert after in str(gradient) and "= Reload(name_out_offloaded_after)" in str(gradient)
    assert "name_out_offloaded: f32[3, 4] = Offload(name_out)" in " ".join(str(graph).split())
    ir.save(tmp_path / "program.popxl")
    assert str(popxl.Ir.load(tmp_path / "program.popxl")) == str(ir)
    differentiated = str(graph_of(jax.grad(lambda x, w: offloading(x, w).sum()), X, W))
    assert "= Offload(" in differentiated and "= Reload(" in differentiated


def test_layers_of_a_scan_have_a_stack_of_gradients() -> None:
    """In each turn there is the gradient of one row, not one as large as all, by autodiff and by JAX."""
    fn, arrays = FUNCTIONS["scan of layers"]
    graph = graph_of(fn, *arrays)
    (loop,) = (op for op in autodiff(graph).graph.ops if op.op_type == "Loop")
    assert loop.attributes["carried"] == 1 and loop.attributes["backwards"]
    assert (3, 4, 4) not in {t.shape for t in loop.called_graphs[0].outputs}
    traced = jax.make_jaxpr(jax.grad(popxl.to_jax(graph_of(fn, *arrays)), 1))(*arrays)
    for equation in traced.jaxpr.eqns:
        if equation.primitive.name == "scan":
            assert (3, 4, 4) not in {v.aval.shape for v in equation.params["jaxpr"].jaxpr.outvars}


def test_masks_do_not_outlive_the_turns_of_a_loop() -> None:
    """The gradient computes again what depends on no input, and nothing stacks it."""

    def attended(x: Any, rows: Any) -> Any:
        def turn(x: Any, row: Any) -> Any:
            mask = jnp.tril(jnp.ones((4, 4), bool))
            scale = jnp.cos(jnp.arange(4) * 0.1)
            return jnp.where(mask, x * scale, 0.0) * row, None

        return jnp.sum(jax.lax.scan(turn, x, rows)[0] ** 2)

    x, rows = np.float32(np.sin(np.arange(16))).reshape(4, 4), np.float32(np.cos(np.arange(12))).reshape(3, 4)
    graph = graph_of(attended, x, rows)
    found = autodiff(graph)
    (loop,) = (op for op in graph.ops if op.op_type == "Loop")
    assert [t.shape for t in loop.outputs] == [(4, 4), (3, 1, 4), (3, 4, 4)]  # what is carried; factors of the product

    def gradients(*ts: popxl.Tensor) -> Any:
        site = ops.call_with_info(graph, *ts)
        return ops.call(found.graph, 1.0, inputs_dict=found.inputs_dict(site))

    step = popxl.to_jax(graph.ir.create_graph(gradients, *(t.spec for t in graph.inputs)))
    assert_close(step(x, rows), jax.grad(attended, (0, 1))(x, rows))


# What stays one op ----------------------------------------------------------------------------------------------------


def halved(x: Any) -> Any:
    return jax.lax.while_loop(lambda c: c.sum() > 1, lambda c: c / 2, x)


def until_it_is_large(x: Any) -> Any:
    def larger(c: Any) -> Any:
        x, key = c
        key, own = jax.random.split(key)
        return x + jax.random.uniform(own, x.shape), key

    return jax.lax.while_loop(lambda c: c[0].sum() < 9, larger, (x, jax.random.key(1)))[0]


def narrow(x: Any) -> Any:
    return jax.lax.scan(lambda c, r: (c + r.astype(jnp.int4).astype(c.dtype), None), x[0], x)[0]


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (halved, "because=how many turns it takes is known when it runs"),
        (until_it_is_large, "because=how many turns it takes is known when it runs"),
        (narrow, "because=no tensor holds a value of the type int4[4]"),
        (lambda x: jax.pure_callback(lambda x: x, x, x), "because=it is code of Python"),
        (jax.lax.composite(lambda x: x * 2, "tests.double"), "because=no graph says what `composite` does"),
    ],
)
def test_one_op_says_why(fn: Any, why: str) -> None:
    graph = graph_of(fn, X)
    assert graph.called_graphs == () and why in str(graph)
    assert_close(jax.jit(popxl.to_jax(graph))(X), jax.jit(fn)(X))


# In a file ------------------------------------------------------------------------------------------------------------


def test_graphs_of_functions_are_saved_and_rules_are_not(tmp_path) -> None:
    def fn(x: Any, w: Any) -> Any:
        y = jax.lax.scan(lambda c, row: (jax.nn.relu(c @ w) + row, None), x[0], x)[0]
        return (kept(y[None], w) * steep(y)).sum()

    ir = popxl.Ir()
    with ir.main_graph:
        x, w = popxl.variable(X, name="x"), popxl.variable(W, name="w")
        graph = ir.create_graph(popxl.from_jax(fn), x, w)
        info = autodiff(graph)
        site = ops.call_with_info(graph, x, w)
        dx, dw = ops.call(info.graph, 1.0, inputs_dict=info.inputs_dict(site))
        streams = [popxl.d2h_stream(t.shape, t.dtype, name) for name, t in (("dx", dx), ("dw", dw))]
        for stream, t in zip(streams, (dx, dw), strict=True):
            ops.host_store(stream, t)
    ir.save(tmp_path / "program.popxl")
    loaded = popxl.Ir.load(tmp_path / "program.popxl")
    assert str(loaded) == str(ir)
    with popxl.Session(loaded) as session:
        found = {stream.tensor.name: array for stream, array in session.run().items()}
    assert_close((found["dx"], found["dw"]), jax.grad(fn, (0, 1))(X, W))
    (again,) = (g for g in loaded.graphs if g.id == graph.id)
    with pytest.raises(PopxlError, match=r"The derivative of `steep` is a rule.*Differentiate before `Ir.save`"):
        autodiff(again)
    with pytest.raises(PopxlError, match=r"Differentiate before `Ir.save`"):
        jax.grad(popxl.to_jax(again))(X, W)


def test_a_key_is_the_tensor_of_its_data(tmp_path) -> None:
    """As an input and a result of a graph, and in a file."""

    def step(x: Any, key: Any) -> Any:
        key, own = jax.random.split(key)
        return x + jax.random.normal(own, x.shape), key

    x, key = X, jax.random.key(3)
    data = np.asarray(jax.random.key_data(key))
    ir = popxl.Ir()
    graph = graph_of(step, x, data, ir=ir)
    assert [str(t.spec) for t in graph.inputs + graph.outputs] == ["f32[3, 4]", "u32[2]", "f32[3, 4]", "u32[2]"]
    ir.save(tmp_path / "program.popxl")
    (loaded,) = (g for g in popxl.Ir.load(tmp_path / "program.popxl").graphs if g.id == graph.id)
    expected, after = jax.jit(step)(x, key)
    expected = (expected, jax.random.key_data(after))
    assert_close(jax.jit(popxl.to_jax(loaded))(x, data), expected)
    assert_close(popxl.to_jax(loaded)(x, key), expected)
    assert_close(jax.jit(popxl.to_jax(loaded))(x, key), expected)


def test_a_key_is_fed_as_its_data(ir, run) -> None:
    key = jax.random.key(3)
    with ir.main_graph:
        stream = popxl.h2d_stream((2,), popxl.uint32, "key")
        uniform = popxl.from_jax(lambda key: jax.random.uniform(key, (3,)))(ops.host_load(stream))
    (found,) = run(ir, uniform, feeds={stream: key})
    assert_close(np.float32(found), jax.random.uniform(key, (3,)))


def test_a_graph_with_a_rule_may_be_rewritten() -> None:
    """The rule is for what it returns, however ops compute that."""
    ir = popxl.Ir()
    graph = graph_of(lambda x: (steep(x) * x).sum(), X, ir=ir)
    (inner,) = graph.called_graphs
    inner.replace(inner.ops, lambda x, three: x + x + x)
    assert [op.op_type for op in inner.ops] == ["Add", "Add"]
    gradient = popxl.to_jax(autodiff(graph).graph)
    assert_close(gradient(1.0, X * 3, X), jax.grad(lambda x: (steep(x) * x).sum())(X))


def test_a_value_that_waits_has_its_gradient_in_jax() -> None:
    spec = popxl.TensorSpec((2, 3), popxl.float32)
    graph = popxl.Ir().create_graph(
        lambda t, other: ops.sin(ops.available_after(t, other)) * ops.cos(other), spec, spec
    )
    t = jnp.arange(6.0).reshape(2, 3)
    of_t, of_other = jax.grad(lambda *given: jnp.sum(jax.tree.leaves(popxl.to_jax(graph)(*given))[0]), (0, 1))(t, 2 * t)
    np.testing.assert_allclose(of_t, np.cos(t) * np.cos(2 * t), atol=1e-6)
    np.testing.assert_allclose(of_other, -np.sin(t) * np.sin(2 * t), atol=1e-6)
