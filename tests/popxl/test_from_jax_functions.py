"""`from_jax` of whatever holds functions: each is one op, with JAX's numbers and gradients. What an op cannot do is
refused, with what to write."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import Mesh, PartitionSpec

import popxl
from popxl import ops
from popxl.errors import PopxlError
from tests.popxl.evaluate import evaluate

X = np.float32(np.sin(np.arange(12))).reshape(3, 4)
MATRIX = np.float32(np.cos(np.arange(9))).reshape(3, 3) + 4 * np.eye(3, dtype=np.float32)
ALONG, WHOLE = PartitionSpec("a"), PartitionSpec()


def over_devices(fn: Callable[..., Any], into: Any = ALONG, out_of: Any = ALONG) -> Callable[..., Any]:
    """A function of the part of each device, of which there is one."""
    mesh = Mesh(np.array(jax.devices("cpu")[:1]), ("a",))
    return jax.shard_map(fn, mesh=mesh, in_specs=into, out_specs=out_of)


def summed(x):
    return over_devices(lambda x: jax.lax.psum(jnp.sin(x) * x, "a"), out_of=WHOLE)(x)


@jax.custom_jvp
def steep(x):
    return x * 3


steep.defjvp(lambda x, t: (steep(*x), t[0] * 6))


def two_of_each(x, m):
    def of_parts(x, m):
        return m @ steep(jax.nn.relu(x)), jax.lax.psum(jax.lax.scan(lambda c, r: (c * r, c), x[0], x)[1], "a")

    return over_devices(of_parts, (ALONG, WHOLE), (ALONG, WHOLE))(x, m)


def root(x):
    def solve(fn, y):
        return jax.lax.fori_loop(0, 12, lambda _, y: y - fn(y) / (2 * y), y)

    return jax.lax.custom_root(lambda y: y * y - x, x, solve, lambda g, y: y / g(1.0))


def linear_solve(x, m):
    """By the diagonal alone."""
    d = jnp.diagonal(m)[:, None]
    return jax.lax.custom_linear_solve(lambda y: d * y, x, lambda _, b: b / d, symmetric=True)


@custom_partitioning
def partitioned(x):
    return jnp.sin(x)


partitioned.def_partition(
    partition=lambda mesh, given, made: (mesh, jnp.sin, made[0].sharding, (given[0].sharding,)),
    sharding_rule="i j -> i j",
)


def tagged(x):
    with set_xla_metadata(kind="tagged"):
        return set_xla_metadata(jnp.sin(x) * x, kind="result")


def kernel(x):
    def double(x, y):
        y[...] = x[...] * 2

    return pl.pallas_call(double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


def in_a_state(x):
    def double(ref):
        ref[...] = ref[...] * 2

    return pl.run_state(double)(x)


def kept_by_name(x, m):
    policy = jax.checkpoint_policies.save_only_these_names("product")
    return jax.checkpoint(lambda x: jnp.sin(checkpoint_name(m @ jnp.cos(x), "product")), policy=policy)(x)


def linear(x):
    return jax.custom_derivatives.linear_call(lambda m, x: m @ x, lambda m, g: m.T @ g, MATRIX, x)


FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[np.ndarray, ...]]] = {
    "shard_map": (summed, (X,)),
    "shard_map of several": (two_of_each, (X, MATRIX)),
    "shard_map under vmap": (jax.vmap(summed), (np.stack([X, 2 * X]),)),
    "shard_map under grad": (jax.grad(lambda x: summed(x).sum()), (X,)),
    "custom_root": (lambda x: jax.vmap(jax.vmap(root))(x**2 + 1), (X,)),
    "custom_linear_solve": (linear_solve, (X, MATRIX)),
    "linear_call": (linear, (X,)),
    "checkpoint": (kept_by_name, (X, MATRIX)),
    "xla_metadata": (tagged, (X,)),
}

WITHOUT_GRADIENTS: dict[str, Callable[..., Any]] = {
    "composite": jax.lax.composite(lambda x: jnp.sin(x) * 2, "tests.sine"),
    "custom_partitioning": partitioned,
    "pallas_call": kernel,
    "run_state": in_a_state,
    "pure_callback": lambda x: jax.pure_callback(lambda x: np.sin(x), x, x),
    "reduce": lambda x: jax.lax.reduce(x, np.float32(1), lambda a, b: a * b + 0 * a, (0,)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers_and_gradients_are_those_of_jax(name) -> None:
    fn, arrays = FUNCTIONS[name]

    def program(*ts: Any) -> list[Any]:
        graph = popxl.gcg().ir.create_graph(lambda *ts: jax.tree.leaves(popxl.from_jax(fn)(*ts)), *ts)
        assert " at 0x" not in str(graph) and "lambda ;" not in str(graph)
        info = popxl.transforms.autodiff(graph)
        site = ops.call_with_info(graph, *ts)
        ones = [popxl.constant(np.ones(t.shape, np.float32)) for t in graph.outputs[: len(info.expected_inputs)]]
        seeds = ones[: sum(c.connection_type.name == "FwdGrad" for c in info.expected_inputs)]
        return [*site.outputs[: len(seeds)], *ops.call(info.graph, *seeds, inputs_dict=info.inputs_dict(site))]

    def total(*arrays: Any) -> Any:
        made = fn(*arrays)
        return sum(map(jnp.sum, jax.tree.leaves(made))), made

    gradients, made = jax.jit(jax.grad(total, tuple(range(len(arrays))), has_aux=True))(*arrays)
    for found, expected in zip(evaluate(program, *arrays), [*jax.tree.leaves(made), *gradients], strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


READ = {  # and what the gradient reads: results, if it then reads fewer operands
    "exp": (jnp.exp, X, "exp_out"),
    "tanh": (jnp.tanh, X, "tanh_out"),
    "tan": (jnp.tan, X, "tan_out"),
    "sin": (jnp.sin, X, "x"),
    "log": (jnp.log, X + 2, "x"),
    "cholesky": (
        lambda a: jax.lax.linalg.cholesky(a, symmetrize_input=False),
        MATRIX,
        "x",
    ),  # JAX's rule makes a result of its own
    "qr": (lambda a: jnp.linalg.qr(a)[0], MATRIX, "qr_out qr_out__t0"),
    "largest": (lambda x: jax.lax.top_k(x, 2)[0], X, "top_k_out__t0"),
    "solution": (lambda a: jax.lax.linalg.triangular_solve(a, a + 1, left_side=True), MATRIX, "x triangular_solve_out"),
}


@pytest.mark.parametrize("name", READ)
def test_gradients_read_results_in_place_of_operands(name, tmp_path) -> None:
    fn, x, read = READ[name]
    ir = popxl.Ir()

    def gradient(x: popxl.Tensor) -> popxl.Tensor:
        graph = ir.create_graph(popxl.from_jax(lambda x: jnp.sum(fn(x) ** 2)), x)
        info = popxl.transforms.autodiff(graph)
        assert {t.name for t in info.graph.inputs[1:]} >= {*read.split()}
        assert "x" in read or "x" not in [t.name for t in info.graph.inputs[1:]]
        site = ops.call_with_info(graph, x)
        return ops.call(info.graph, 1.0, inputs_dict=info.inputs_dict(site))[0]

    with ir.main_graph:
        operand = popxl.variable(x)
        graph = ir.create_graph(gradient, operand)
        info = popxl.transforms.autodiff(graph)
        site = ops.call_with_info(graph, operand)
        second = ops.call(info.graph, popxl.constant(np.ones_like(x)), inputs_dict=info.inputs_dict(site))
        for t in (site.outputs[0], *second):
            ops.host_store(popxl.d2h_stream(t.shape, t.dtype), t)
    ir.save(tmp_path / "program.popxl")
    expected = jax.grad(lambda x: jnp.sum(fn(x) ** 2))
    for program in (ir, popxl.Ir.load(tmp_path / "program.popxl")):
        with popxl.Session(program, "ipu_model") as session:
            found = [*session.run().values()]
        np.testing.assert_allclose(found[0], expected(x), rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(found[1], jax.grad(lambda x: jnp.sum(expected(x)))(x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", WITHOUT_GRADIENTS)
def test_numbers_are_those_of_jax(name) -> None:
    fn = WITHOUT_GRADIENTS[name]
    (found,) = evaluate(popxl.from_jax(fn), X)
    np.testing.assert_allclose(found, jax.jit(fn)(X), rtol=1e-6)


# What is refused ------------------------------------------------------------------------------------------------------


def with_a_ref(x):
    ref = jax.new_ref(x)
    ref[...] = ref[...] * 2
    return ref[...]


@jax.jit
def with_a_ref_in_a_loop(x):
    total = jax.new_ref(jnp.zeros_like(x))

    def add(i, _):
        total[...] += x * i

    jax.lax.fori_loop(0, 3, add, None)
    return total[...]


def calling_back(x):
    return jax.experimental.io_callback(lambda x: np.sin(x), x, x)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (
            with_a_ref,
            r"changes a `jax.Ref` in `new_ref`, at `ref = jax.new_ref\(x\)` .*OpKind\('WithARef', with_a_ref\)",
        ),
        (with_a_ref_in_a_loop, r"changes a `jax.Ref` in `new_ref`, at `total = .*OpKind\('WithARefInALoop', with_a"),
        (
            calling_back,
            r"does more than compute its results in `io_callback`, at `return .*OpKind\('CallingBack', calling",
        ),
        (lambda x: calling_back(x), r"`io_callback`, at .*popxl.OpKind\('Fn', fn\)"),
    ],
)
def test_effects_are_refused_and_the_remedy_works(fn, message) -> None:
    with popxl.Ir().main_graph as main:
        x = popxl.variable(X)
        with pytest.raises(PopxlError, match=message):
            popxl.from_jax(fn)(x)
        assert main.ops == []
    (found,) = evaluate(popxl.OpKind("Single", fn), X)
    np.testing.assert_allclose(found, jax.jit(fn)(X), rtol=1e-6)


def test_a_shard_map_over_several_devices_is_for_to_jax() -> None:
    devices = jax.devices("cpu")
    if len(devices) < 2:
        pytest.skip("JAX was started with one device")
    mesh = Mesh(np.array(devices[:2]), ("a",))
    total = jax.shard_map(lambda x: jax.lax.psum(x, "a"), mesh=mesh, in_specs=ALONG, out_specs=WHOLE)
    x = np.arange(4, dtype=np.float32)

    def build(t: popxl.Tensor) -> popxl.Tensor:
        return popxl.from_jax(total)(t)

    with pytest.raises(PopxlError, match=r"several devices of its own.*Make the graph a function of JAX"):
        evaluate(build, x)
    ir = popxl.Ir()
    graph = ir.create_graph(build, popxl.TensorSpec((4,), popxl.float32))
    np.testing.assert_array_equal(popxl.to_jax(graph)(x), [2, 4])


def test_trees_are_inputs_and_outputs_of_graphs() -> None:
    def layer(parameters, *xs, scale, **others):
        product = xs[0] @ parameters["w"] + parameters["b"][0]
        return {"y": product * scale, "rest": (xs[1], [others["q"]])}

    values = {"w": MATRIX, "b": [X[0, :3], None]}, X[:, :3], X[:, 0]

    def build(*variables):
        parameters, *xs = jax.tree.unflatten(jax.tree.structure(values), variables)
        ir, q = popxl.gcg().ir, popxl.TensorSpec((), popxl.float32)
        graph = ir.create_graph(popxl.from_jax(layer), parameters, *xs, scale=2, q=q)
        assert [*graph.inputs_by_name] == ["parameters_b_0", "parameters_w", "xs_0", "xs_1", "q"]
        return ops.call(graph, *variables, 3.0)

    expected = jax.tree.leaves(layer(*values, scale=2, q=np.float32(3)))
    for value, other in zip(evaluate(build, *jax.tree.leaves(values)), expected, strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-6)
