"""Cross entropy against its formula in NumPy."""

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl_addons.ops.cross_entropy import cross_entropy, cross_entropy_with_grad


def reference(x, labels, ignore_index=None, reduction="mean", eps=1e-7):
    """Loss and gradient in float64."""
    x = x.astype(np.float64)
    p = np.exp(x - x.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    counts = labels != ignore_index if ignore_index is not None else np.full(labels.shape, True)
    onehot = (labels[..., None] == np.arange(x.shape[-1])).astype(np.float64)
    loss = -np.log(np.maximum((p * onehot).sum(-1), eps)) * counts
    n = max(1, counts.sum()) if reduction == "mean" else 1
    dx = (p - onehot) * counts[..., None] / n
    return (loss if reduction == "none" else loss.sum() / n), dx


CASES = [
    dict(),
    dict(reduction="sum"),
    dict(reduction="none"),
    dict(ignore_index=1),
    dict(ignore_index=1, reduction="sum"),
    dict(ignore_index=1, reduction="none"),
    dict(ignore_index=4),
]


@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dims", [(5,), (2, 3)])
def test_loss_and_gradient(ir, evaluate, case, dims, dtype):
    logits = np.random.normal(size=(*dims, 4)).astype(np.float32)
    classes = np.random.randint(0, 4, dims).astype(dtype)
    classes.flat[:2] = 1, case.get("ignore_index", 0)
    x, labels = popxl.variable(logits, name="x"), popxl.constant(classes)
    loss = cross_entropy(x, labels, **case)
    loss2, dx = cross_entropy_with_grad(x, labels, loss_scaling=64, **case)
    assert loss.dtype is loss2.dtype is popxl.float32
    expected, expected_dx = reference(logits, classes, **case)
    values = evaluate(loss, loss2, dx)
    np.testing.assert_allclose(values[0], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(values[1], expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(values[2], 64 * expected_dx, rtol=1e-4, atol=1e-5)


def test_the_example_of_the_specification(ir, evaluate):
    x = popxl.constant([[1.0, 2.0, 3.0], [1.0, 1.0, 1.0]])
    labels = popxl.constant([2, 0], popxl.int32)
    loss, dx = evaluate(*addons.cross_entropy_with_grad(x, labels))
    np.testing.assert_allclose(loss, 0.75311, atol=1e-5)
    np.testing.assert_allclose(dx, [[0.0450, 0.1224, -0.1674], [-0.3333, 0.1667, 0.1667]], atol=1e-4)


def test_loss_scaling_as_a_tensor(ir, evaluate):
    x, labels = popxl.constant([[1.0, 2.0, 3.0]]), popxl.constant([2], popxl.int32)
    scale = popxl.constant(8.0)
    _, dx = cross_entropy_with_grad(x, labels, loss_scaling=scale)
    _, plain = cross_entropy_with_grad(x, labels)
    scaled, unscaled = evaluate(dx, plain)
    np.testing.assert_allclose(scaled, 8 * unscaled, rtol=1e-6)


def test_vanishing_probabilities_are_guarded(ir, evaluate):
    x = popxl.constant([[0.0, 100.0]])
    labels = popxl.constant([0], popxl.int32)
    loss, (with_grad, _) = cross_entropy(x, labels), cross_entropy_with_grad(x, labels)
    np.testing.assert_allclose(evaluate(loss, with_grad), [-np.log(1e-7)] * 2, rtol=1e-5)


def test_float16(ir, evaluate):
    logits = np.random.normal(size=(3, 4)).astype(np.float16)
    x, labels = popxl.constant(logits), popxl.constant([3, 0, 2], popxl.int32)
    loss, dx = cross_entropy_with_grad(x, labels)
    assert loss.dtype is dx.dtype is popxl.float16
    expected, expected_dx = reference(logits, np.array([3, 0, 2]))
    values = evaluate(loss, dx)
    np.testing.assert_allclose(values[0], expected, rtol=1e-2)
    np.testing.assert_allclose(values[1], expected_dx, atol=2e-3)


def test_the_gradient_of_the_plain_loss(ir, evaluate):
    logits = np.random.normal(size=(3, 4)).astype(np.float32)
    x, labels = popxl.variable(logits), popxl.constant([3, 0, 2], popxl.int32)
    graph = addons.GraphWithNamedArgs(ir.create_graph(cross_entropy, x, labels))
    grad = addons.autodiff(graph, grads_required=graph.graph.inputs[:1])
    info = graph.call_with_info(x, labels)
    (dx,) = grad.call(popxl.constant(1.0), args=grad.grad_graph_info.inputs_dict(info))
    np.testing.assert_allclose(evaluate(dx)[0], reference(logits, np.array([3, 0, 2]))[1], rtol=1e-4, atol=1e-6)


def test_two_ops(ir):
    spec, labels = popxl.TensorSpec((3, 4), popxl.float32), popxl.TensorSpec((3,), popxl.int32)
    for fn, kinds in (
        (cross_entropy, ["Softmax", "Nll"]),
        (cross_entropy_with_grad, ["Softmax", "NlllWithSoftmaxGradDirect"]),
    ):
        text = addons.GraphWithNamedArgs(ir.create_graph(fn, spec, labels)).print_schedule()
        assert [line.split(".")[0].strip() for line in text.split("\n")[2:-1]] == kinds


def test_errors(ir):
    x, labels = popxl.constant([[1.0, 2.0]]), popxl.constant([1], popxl.int32)
    for fn in (cross_entropy, cross_entropy_with_grad):
        with pytest.raises(ValueError):
            fn(x, labels, reduction="median")


def test_the_functions_and_their_module():
    assert addons.cross_entropy is addons.ops.cross_entropy is cross_entropy
    assert addons.cross_entropy_with_grad is addons.ops.cross_entropy_with_grad is cross_entropy_with_grad
