"""`popxl.extend`: the names that ops, transforms, kernels and targets of others are made with."""

import importlib
import pkgutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import popxl
import popxl.extend
from popxl.extend.graphs import leading_to
from popxl.extend.kernels import Kernel, round_once
from popxl.extend.ops import OpKind, like_first

MODULES = [module.name for module in pkgutil.iter_modules(popxl.extend.__path__, "popxl.extend.")]


def run(function: OpKind, x: np.ndarray) -> np.ndarray:
    ir = popxl.Ir()
    with ir.main_graph:
        y = function(popxl.variable(x, name="x"))
        out = popxl.d2h_stream(y.shape, y.dtype, "out")
        popxl.ops.host_store(out, y)
    with popxl.Session(ir) as session:
        return session.run()[out]


@pytest.mark.parametrize("name", MODULES)
def test_each_module_lists_its_names_and_is_listed(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__all__ and all(hasattr(module, each) for each in module.__all__)
    assert len(set(module.__all__)) == len(module.__all__)
    assert f"`{name}`" in (popxl.extend.__doc__ or "")


@pytest.mark.here
def test_a_kernel_has_another_implementation_on_one_platform() -> None:
    @Kernel
    def twice(t: jax.Array) -> jax.Array:
        return t + t

    @twice.override("cpu")
    def twice_on_cpus(t: jax.Array) -> jax.Array:
        return 2 * t + 100  # other numbers, which shows that it is this

    @twice.override("tpu")
    def twice_on_tpus(t: jax.Array) -> jax.Array:
        raise AssertionError("not on this platform")

    x = np.arange(3, dtype=np.float32)
    np.testing.assert_array_equal(twice(x), 2 * x)  # outside of programs it is the function as it is written
    np.testing.assert_array_equal(run(OpKind("Twice", lambda t: twice(t), shape=like_first), x), 2 * x + 100)


@pytest.mark.here
def test_a_built_in_kernel_takes_an_override_before_that_of_the_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    from popxl.extend.kernels import sums

    monkeypatch.setattr(sums.summed, "_overrides", {})
    sums.summed.override("cpu")(lambda t, axes, keepdims=False: jnp.zeros(()) + 7)
    ir = popxl.Ir()
    graph = ir.create_graph(lambda x: popxl.ops.sum(x), popxl.TensorSpec((2, 3), popxl.float32))
    assert popxl.to_jax(graph)(np.ones((2, 3), np.float32)) == 7


def test_a_kernel_has_one_override_for_each_platform() -> None:
    negated = Kernel(lambda t: -t)
    first = negated.override("gpu")(lambda t: 0 - t)
    assert negated.override("gpu")(first) is first  # again is no other
    with pytest.raises(ValueError, match=r"Kernel.override: <lambda> has the implementation .* for 'gpu'; got"):
        negated.override("gpu")(lambda t: t * -1)


def test_halves_are_rounded_once() -> None:
    @round_once
    def third_power(t: jax.Array) -> jax.Array:
        return t * t * t

    x = np.array([1.001, 3.37], np.float16)
    exact = x.astype(np.float32) ** 3
    np.testing.assert_array_equal(run(OpKind("ThirdPower", third_power, shape=like_first), x), exact.astype(np.float16))


def test_tensors_that_lead_to_others_through_calls_of_calls() -> None:
    """Calls twice on each of 18 levels, 2¹⁸ in all, take no longer than 18 graphs."""
    ir = popxl.Ir()
    spec = popxl.TensorSpec((2,), popxl.float32)
    graph = ir.create_graph(lambda x, y: (popxl.ops.sin(x), y * 2.0), spec, spec)
    for _ in range(18):
        called = graph
        graph = ir.create_graph(lambda x, y, g=called: popxl.ops.call(g, *popxl.ops.call(g, x, y)), spec, spec)
    for x, result in zip(graph.inputs, graph.outputs, strict=True):
        assert leading_to(graph, [result]) & set(graph.inputs) == {x}
