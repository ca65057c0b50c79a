"""What the rows of the norms cannot say: statistics in the graph, gradients in float16, what is found out late."""

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


def with_gradients(g: Array, t: Array, weight: Array, bias: Array, **how: Any) -> list[Array]:
    """The result of `group_norm`, and the gradients of its operands."""

    def build(g: Any, *operands: Any) -> list[Any]:
        graph = popxl.gcg().ir.create_graph(lambda *ts: ops.group_norm(*ts, **how), *operands)
        forward = ops.call_with_info(graph, *operands)
        back = autodiff(graph)
        return [forward.outputs[0], *ops.call(back.graph, g, inputs_dict=back.inputs_dict(forward))]

    return evaluate(build, g, t, weight, bias)


def operands(dtype: str, shape: tuple[int, ...], mean: float, deviation: float) -> list[Array]:
    """A gradient, a tensor of this mean and deviation, a weight and a bias."""
    random = np.random.default_rng(0)
    t = mean + deviation * random.standard_normal(shape)
    vectors = [random.uniform(0.5, 2, shape[1]) for _ in range(2)]
    return [v.astype(dtype) for v in (random.uniform(-1, 1, shape), t, *vectors)]


@pytest.mark.thorough(but_each=9)
@pytest.mark.parametrize(
    ("dtype", "mean", "deviation", "near"),
    [
        ("float32", 0, 1, 1e-5),
        ("float32", 1e3, 1, 2e-4),  # a mean in float32 is off by up to 6e-5 here
        ("float32", 1, 1e-4, 2e-3),  # a mean in float32 is off by up to 6e-8 here, 6e-4 of the deviation, twice
        ("float16", 0, 1, 1e-3),
        ("float16", 100, 1, 1e-3),  # a mean in float16 is off by up to 1/32 here
        ("float16", 0, 1e-5, 1e-3),  # an inverse deviation in float16 is infinite here
        ("float16", 3e4, 100, 1e-3),
    ],
)
@pytest.mark.parametrize(("shape", "groups"), [((3, 6, 5, 2), 2), ((4, 32), 1), ((1024, 768), 8)], ids=str)
def test_gradients_as_in_torch(dtype, mean, deviation, near, shape, groups) -> None:
    """Against torch in double precision, on the same numbers; measured by the largest gradient of each operand."""
    torch = pytest.importorskip("torch")
    g, *arrays = operands(dtype, shape, mean, deviation)
    found = with_gradients(g, *arrays, num_groups=groups, eps=1e-12)
    exact = [torch.from_numpy(a.astype(np.float64)).requires_grad_() for a in arrays]
    out = torch.nn.functional.group_norm(exact[0], groups, *exact[1:], eps=1e-12)
    out.backward(torch.from_numpy(g.astype(np.float64)))
    for actual, expected in zip(found, [out, *(e.grad for e in exact)], strict=True):
        expected = expected.detach().numpy()
        size = np.abs(expected).max()
        if size < np.finfo(dtype).max:
            np.testing.assert_allclose(actual / size, expected / size, rtol=0, atol=near)


def test_gradients_in_double_precision() -> None:
    arrays = [values("float64", shape, seed=i) for i, shape in enumerate([(2, 6, 3), (2, 6, 3), (6,), (6,)])]

    def build() -> list[Any]:
        g, *ts = (popxl.variable(a, downcast=False) for a in arrays)
        graph = popxl.gcg().ir.create_graph(lambda *ts: ops.group_norm(*ts, num_groups=2), *ts)
        forward = ops.call_with_info(graph, *ts)
        back = autodiff(graph)
        return list(ops.call(back.graph, g, inputs_dict=back.inputs_dict(forward)))

    torch = pytest.importorskip("torch")
    exact = [torch.from_numpy(a).requires_grad_() for a in arrays[1:]]
    torch.nn.functional.group_norm(exact[0], 2, *exact[1:]).backward(torch.from_numpy(arrays[0]))
    for actual, expected in zip(evaluate(build), exact, strict=True):
        assert actual.dtype == np.float64
        np.testing.assert_allclose(actual, expected.grad.numpy(), rtol=1e-12, atol=1e-13)


def test_statistics_are_in_the_graph() -> None:
    """Sample by sample, in the dtype of `t`."""
    t = values("float16", (2, 6, 3))

    def build(t: Any) -> list[Any]:
        ops.group_norm(t, popxl.constant(np.ones(6, np.float16)), popxl.constant(np.ones(6, np.float16)), 3)
        return popxl.gcg().ops[-1].outputs[1:]

    mean, inverse = evaluate(build, t)
    groups = t.astype(np.float64).reshape(6, 6)
    np.testing.assert_array_equal(mean, groups.mean(1).astype(np.float16))
    np.testing.assert_allclose(inverse, (groups.var(1) + 1e-5) ** -0.5, rtol=1e-3)
    assert mean.dtype == inverse.dtype == np.float16


@pytest.mark.parametrize("wanted", [[0], [1], [2], [0, 2], [0, 1, 2]], ids=str)
def test_one_op_makes_the_gradients_asked_for(wanted) -> None:
    with popxl.Ir().main_graph:
        ts = [popxl.variable(values("float32", shape)) for shape in ((2, 4, 3), (4,), (4,))]
        graph = popxl.gcg().ir.create_graph(lambda *ts: ops.layer_norm(*ts), *ts)
        info = autodiff(graph, grads_required=[graph.inputs[i] for i in wanted])
        assert [op.op_type for op in info.graph.ops] == ["GroupNormalizationGrad"]
        assert [t.shape for t in info.graph.outputs] == [graph.inputs[i].shape for i in wanted]


def test_batch_norm_forms_the_deviation_in_float32() -> None:
    """A variance that float16 cannot hold."""
    one, t = np.float16([1]), np.float16([[[1e-2, 2e-2]]])
    (y,) = evaluate(
        lambda t, *vectors: ops.batch_norm_inference(t, *vectors, epsilon=0.0), t, one, one * 0, np.float32([0]),
        np.float32([1e-9]),
    )  # fmt: skip
    np.testing.assert_allclose(y, t.astype(np.float32) / 1e-9**0.5, rtol=1e-3)


@pytest.mark.parametrize(
    ("channels", "vector", "groups", "message"),
    [
        (6, 6, 4, "the 6 channels of `t` cannot be divided into 4 groups"),
        (6, 6, 0, "into 0 groups"),
        (6, 6, -2, "into -2 groups"),
        (6, 3, 2, r"`weight` has the shape \(3,\); expected \(6,\)"),
        (6, 1, 2, r"`weight` has the shape \(1,\); expected \(6,\)"),
    ],
)
def test_found_out_when_it_is_run(channels, vector, groups, message) -> None:
    with pytest.raises(PopxlError, match=f"GroupNormalization.* cannot be run: .*{message}"):
        evaluate(
            lambda *ts: ops.group_norm(*ts, num_groups=groups),
            values("float32", (2, channels, 3)),
            *[values("float32", (vector,))] * 2,
        )


def test_builds_what_is_not_run() -> None:
    with popxl.Ir().main_graph:
        t, v = popxl.variable(values("int32", (2, 3, 4))), popxl.variable([1, 2, 3])
        assert ops.batch_norm_inference(t, v, v, v, v).spec == ops.group_norm(t, v, v, 2).spec == t.spec
        assert ops.layer_norm(t[0], t, t).spec == t[0].spec


def test_gradients_of_gradients_as_in_torch() -> None:
    """Of the gradient of `t`, which reads the mean."""
    torch = pytest.importorskip("torch")
    g, t, weight, bias = operands("float32", (2, 4, 3), 1, 2)
    v = np.random.default_rng(1).normal(size=t.shape).astype(np.float32)

    def build(g: Any, t: Any, weight: Any, bias: Any, v: Any) -> list[Any]:
        ir = popxl.gcg().ir
        graph = ir.create_graph(lambda *ts: ops.group_norm(*ts, num_groups=2), t, weight, bias)
        back = autodiff(graph, grads_provided=graph.outputs[:1], grads_required=graph.inputs[:1])

        def slope(g: Any, t: Any, weight: Any, bias: Any, v: Any) -> Any:
            forward = ops.call_with_info(graph, t, weight, bias)
            (dt,) = ops.call(back.graph, g, inputs_dict=back.inputs_dict(forward))
            return ops.sum(dt * v)

        whole = ir.create_graph(slope, g, t, weight, bias, v)
        again = autodiff(whole, grads_provided=whole.outputs[:1], grads_required=whole.inputs[:3])
        site = ops.call_with_info(whole, g, t, weight, bias, v)
        return list(ops.call(again.graph, 1.0, inputs_dict=again.inputs_dict(site)))

    found = evaluate(build, g, t, weight, bias, v)
    exact = [torch.from_numpy(a.astype(np.float64)).requires_grad_() for a in (g, t, weight)]
    out = torch.nn.functional.group_norm(exact[1], 2, exact[2], torch.from_numpy(bias.astype(np.float64)))
    (dt,) = torch.autograd.grad(out, exact[1], exact[0], create_graph=True)
    expected = torch.autograd.grad((dt * torch.from_numpy(v)).sum(), exact)
    for array, wish in zip(found, expected, strict=True):
        np.testing.assert_allclose(array, wish.numpy(), rtol=1e-4, atol=1e-5)
