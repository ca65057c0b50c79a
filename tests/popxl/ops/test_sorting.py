"""Sorting, searching, counting: gradients beside torch's, loops, 64 bits, and what else no row says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.errors import PopxlError
from popxl.transforms import autodiff
from tests.popxl.evaluate import evaluate
from tests.popxl.ops.rows.schema import values

Array = np.ndarray


def gradient(op: Any, t: Array, g: Array) -> Array:
    """The gradient of the first result of an op."""

    def build(t: popxl.Tensor, g: popxl.Tensor) -> Any:
        graph = popxl.gcg().ir.create_graph(op, t)
        info = autodiff(graph, grads_provided=graph.outputs[:1])
        site = ops.call_with_info(graph, t)
        return ops.call(info.graph, g, inputs_dict=info.inputs_dict(site))

    (found,) = evaluate(build, t, g)
    return found


# topk ---------------------------------------------------------------------------------------------------------------


@pytest.mark.thorough(but_each=5)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_gradient_of_topk(axis, largest, dtype) -> None:
    """To where the values came from. float16 is only moved."""
    torch = pytest.importorskip("torch")
    t = np.random.default_rng(0).permutation(60).reshape(5, 4, 3).astype(dtype)
    x = torch.from_numpy(t).requires_grad_()
    picked = torch.topk(x, 2, axis, largest).values
    g = values(dtype, tuple(picked.shape))
    (expected,) = torch.autograd.grad(picked, x, torch.from_numpy(g))
    found = gradient(lambda t: ops.topk(t, 2, axis, largest, True), t, g)
    np.testing.assert_array_equal(found, expected.numpy())
    assert found.dtype == dtype


def test_gradient_of_topk_among_ties() -> None:
    """The whole gradient goes to those that were picked, the first ones."""
    found = gradient(lambda t: ops.topk(t, 2, 0, True, True), np.float32([1, 3, 3, 3]), np.float32([5, 7]))
    assert found.tolist() == [0, 5, 7, 0]


def test_places_of_topk_have_no_gradient() -> None:
    with popxl.Ir().main_graph:
        t = popxl.variable(values("float32", (5,)))
        graph = popxl.gcg().ir.create_graph(lambda t: ops.topk(t, 2, 0, True, True)[1], t)
        with pytest.raises(PopxlError, match="Unable to provide"):
            autodiff(graph)


@pytest.mark.parametrize("largest", [True, False])
def test_topk_beside_torch(largest) -> None:
    torch = pytest.importorskip("torch")
    t = np.random.default_rng(0).permutation(4 * 37).reshape(4, 37).astype(np.float32)
    expected = torch.topk(torch.from_numpy(t), 11, 1, largest)
    numbers, places = evaluate(lambda t: ops.topk(t, 11, 1, largest, True), t)
    np.testing.assert_array_equal(numbers, expected.values)
    np.testing.assert_array_equal(places, expected.indices)


def test_topk_in_a_loop() -> None:
    """The three largest numbers of all that came by, kept up to date."""
    t = np.random.default_rng(0).normal(size=(3,)).astype(np.float32)

    def build(best: popxl.Tensor, t: popxl.Tensor) -> Any:
        def turn(best: popxl.Tensor, t: popxl.Tensor) -> Any:
            return ops.topk(ops.concat([best, t]), 3, 0, True, True)[0], t * -1.5

        return ops.repeat(popxl.gcg().ir.create_graph(turn, best, t), 4, best, t)[0]

    (found,) = evaluate(build, np.full(3, -np.inf, np.float32), t)
    seen = np.concatenate([t * np.float32(factor) for factor in (1, -1.5, 2.25, -3.375)])
    np.testing.assert_allclose(found, np.sort(seen)[::-1][:3], rtol=1e-6)


# cumsum -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gradient_of_cumsum(dim) -> None:
    torch = pytest.importorskip("torch")
    t, g = values("float32", (3, 4), seed=1), values("float32", (3, 4), seed=2)
    x = torch.from_numpy(t).requires_grad_()
    (expected,) = torch.autograd.grad(torch.cumsum(x, dim), x, torch.from_numpy(g))
    found = gradient(lambda t: ops.cumsum(t, dim), t, g)
    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found, np.flip(np.cumsum(np.flip(g, dim), dim), dim), rtol=1e-5, atol=1e-6)


def test_second_gradient_of_cumsum() -> None:
    """The gradient of the gradient is the running sum again."""

    def backward(g: popxl.Tensor) -> popxl.Tensor:
        graph = popxl.gcg().ir.create_graph(ops.cumsum, g)
        (result,) = ops.call(autodiff(graph).graph, g)
        return result

    found = gradient(backward, np.zeros(3, np.float32), np.float32([1, 2, 3]))
    assert found.tolist() == [1, 3, 6]


def test_the_constant_that_cumsum_adds() -> None:
    """It holds the dimension, and nothing reads it: the program does not become one of 64 bits."""
    ir = popxl.Ir()
    with ir.main_graph as main:
        t = popxl.variable(values("float32", (3, 4)))
        ops.cumsum(t, np.int32(-1)), ops.cumsum(t)
        with pytest.raises(TypeError, match="`dim` must be an integer; got None"):
            ops.cumsum(t, None)
        with pytest.raises(PopxlError, match="axis 2 does not exist"):
            ops.cumsum(t, 2)
    first, second = main.constants
    assert (first.name, first.dtype, first.shape, first.data.tolist()) == ("dim", popxl.int64, (), -1)
    assert second.name.startswith("dim__t") and second.data.tolist() == 0
    assert [len(op.inputs) for op in main.ops] == [1, 1]
    assert main.ops[0].attributes == {"dim": -1, "reverse": False}


# All of them --------------------------------------------------------------------------------------------------------


def test_64_bits() -> None:
    """Numbers that are equal in 32 bits are told apart."""
    integers, floats = 2**40 + np.array([3, 1, 2]), 1 + np.array([3, 1, 2]) * 2.0**-40
    assert np.unique(floats.astype(np.float32)).size == 1

    def build() -> Any:
        for array in (integers, integers.astype(np.uint64), floats):
            t = popxl.variable(array, downcast=False)
            yield from (ops.argmax(t), ops.argmin(t), ops.cumsum(t))
            yield from (*ops.topk(t, 2, 0, True, True), *ops.topk(t, 2, 0, False, True))

    results = iter(evaluate(build))
    for array in (integers, integers.astype(np.uint64), floats):
        most, least, total, high, highest, low, lowest = (next(results) for _ in range(7))
        assert (most, least, highest.tolist(), lowest.tolist()) == (0, 1, [0, 2], [1, 2])
        assert {r.dtype for r in (most, least, highest, lowest)} == {np.dtype(np.int32)}
        for found, expected in ((total, np.cumsum(array)), (high, array[[0, 2]]), (low, array[[1, 2]])):
            assert found.dtype == array.dtype
            np.testing.assert_array_equal(found, expected)


def test_integers_of_numpy() -> None:
    """They are as good as Python's; attributes hold Python's."""
    one, two = np.int64(1), np.array(2)
    with popxl.Ir().main_graph as main:
        t = popxl.variable(values("float32", (3, 4)))
        ops.argmax(t, one), ops.argmin(t, -one, np.True_), ops.topk(t, two, one, np.True_, True)
        ops.histogram(t, np.float32([1, 2]), np.False_)
    kept = [value for op in main.ops for value in op.attributes.values()]
    assert kept == [1, False, -1, True, 2, 1, True, (1.0, 2.0), False]
    assert {type(v) for v in kept} == {int, bool, tuple}


def test_a_histogram_of_many() -> None:
    """Each element counts once, whatever their number."""
    t = np.random.default_rng(0).normal(size=(100, 1000)).astype(np.float32)
    levels = [-3, -1, -0.5, 0, 0.25, 2]
    (counts,) = evaluate(lambda t: ops.histogram(t, levels, False), t)
    np.testing.assert_array_equal(counts, np.histogram(t, [-np.inf, *levels, np.inf])[0])
    assert counts.dtype == np.uint32 and counts.sum() == t.size


def test_what_is_built_of_integers() -> None:
    with popxl.Ir().main_graph:
        t = popxl.variable([[1, 2, 3], [4, 5, 6]])
        assert ops.argmax(t).spec == popxl.TensorSpec((3,), popxl.int32)
        assert ops.argmin(t, 1, True).shape == (2, 1)
        assert ops.cumsum(t).spec == t.spec
        found, places = ops.topk(t, 2, 1, False, False)
        assert (found.dtype, places.dtype, found.shape) == (popxl.int32, popxl.int32, places.shape)
