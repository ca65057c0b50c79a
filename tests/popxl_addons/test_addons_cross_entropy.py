"""Cross entropy against its formula in NumPy."""

from functools import partial
from typing import Any

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl_addons.layers import LanguageConfig, LanguageModel, Linear, NextTokenLoss
from popxl_addons.ops.cross_entropy import cross_entropy, cross_entropy_with_grad
from tests.tolerances import assert_near


def reference(logits, labels, ignore_index=None, reduction="mean"):
    """Loss and gradient in float64."""
    x = logits.reshape(*labels.shape, -1).astype(np.float64)
    x -= x.max(-1, keepdims=True)
    total = np.exp(x).sum(-1, keepdims=True)
    counts = labels != ignore_index if ignore_index is not None else np.full(labels.shape, True)
    onehot = labels[..., None] == np.arange(x.shape[-1])
    loss = (np.log(total[..., 0]) - np.where(onehot, x, 0).sum(-1)) * counts
    n = max(1, counts.sum()) if reduction == "mean" else 1
    dx = (np.exp(x) / total - onehot) * counts[..., None] / n
    return (loss if reduction == "none" else loss.sum() / n), dx.reshape(logits.shape)


CASES = [
    dict(),
    dict(reduction="sum"),
    dict(reduction="none"),
    dict(ignore_index=1),
    dict(ignore_index=1, reduction="sum"),
    dict(ignore_index=1, reduction="none"),
    dict(ignore_index=4),
]


@pytest.mark.thorough(but_each=5)
@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize(("dims", "rows"), [((5,), (5,)), ((2, 3), (2, 3)), ((2, 3), (6,))])
def test_loss_and_gradient(ir, evaluate, case, dims, rows, dtype):
    """Labels may have another shape than the rows of logits."""
    logits = np.random.normal(size=(*rows, 4)).astype(np.float32)
    classes = np.random.randint(0, 4, dims).astype(dtype)
    classes.flat[:2] = 1, case.get("ignore_index", 0)
    x, labels = popxl.variable(logits, name="x"), popxl.constant(classes)
    loss = cross_entropy(x, labels, **case)
    loss2, dx = cross_entropy_with_grad(x, labels, loss_scaling=64, **case)
    assert loss.dtype is loss2.dtype is popxl.float32
    expected, expected_dx = reference(logits, classes, **case)
    values = evaluate(loss, loss2, dx)
    assert_near(values[0], expected, 1e-5)
    assert_near(values[1], expected, 1e-5)
    assert_near(values[2], 64 * expected_dx, 1e-4)


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


def with_gradient(ir, x, labels, **how):
    """The loss, its gradient by autodiff where the gradient of the loss is 1, and both from the op that has both."""
    graph = addons.GraphWithNamedArgs(ir.create_graph(cross_entropy, x, labels, **how))
    grad = addons.autodiff(graph, grads_required=graph.graph.inputs[:1])
    info = graph.call_with_info(x, labels)
    loss, *_ = info.outputs
    one = popxl.constant(np.ones(loss.shape), loss.dtype)
    return (
        loss,
        *grad.call(one, args=grad.grad_graph_info.inputs_dict(info)),
        *cross_entropy_with_grad(x, labels, **how),
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_improbable_labels_are_learned(ir, evaluate, dtype):
    """The loss grows with the logits, without an end; gradients are right where probabilities are next to nothing."""
    logits = np.array([[20, 0, -1], [100, 0, 3], [-200, 5, 6000], [0, 9, -np.inf], [2, 1, -12]], dtype)
    classes = np.int32([1, 1, 0, 0, 0])
    x, labels = popxl.variable(logits), popxl.constant(classes)
    loss, dx, loss2, dx2 = evaluate(*with_gradient(ir, x, labels, reduction="none"))
    expected, gradient = reference(logits, classes, reduction="none")
    close = {"rtol": 2 * np.finfo(dtype).eps, "atol": np.finfo(dtype).eps / 100}
    for found, wanted in ((loss, expected), (loss2, expected), (dx, gradient), (dx2, gradient)):
        assert found.dtype == dtype
        np.testing.assert_allclose(found, wanted, **close)


def test_a_label_that_is_no_class_is_not_overlooked(ir, evaluate):
    x, labels = popxl.constant([[1.0, 2.0], [0.0, 3.0]]), popxl.constant([2, -1], popxl.int32)
    loss, ignored = cross_entropy(x, labels), cross_entropy(x, labels, ignore_index=2, reduction="none")
    loss, ignored = evaluate(loss, ignored)
    assert loss == np.inf
    np.testing.assert_array_equal(ignored, [0, np.inf])


def test_float16(ir, evaluate):
    logits = np.random.normal(size=(3, 4)).astype(np.float16)
    x, labels = popxl.constant(logits), popxl.constant([3, 0, 2], popxl.int32)
    loss, dx = cross_entropy_with_grad(x, labels, loss_scaling=1024)
    assert loss.dtype is dx.dtype is popxl.float16
    expected, expected_dx = reference(logits, np.array([3, 0, 2]))
    values = evaluate(loss, dx)
    np.testing.assert_allclose(values[0], expected, rtol=1e-3)
    np.testing.assert_allclose(values[1], 1024 * expected_dx, rtol=1e-3)


@pytest.mark.parametrize("how", [{}, {"ignore_index": 7, "reduction": "sum"}], ids=str)
def test_the_gradient_of_the_plain_loss(ir, evaluate, how):
    logits, classes = np.random.normal(size=(2, 2, 4)).astype(np.float32), np.int32([3, 7, 0, 2]) % (9 if how else 4)
    loss, dx, _, _ = evaluate(*with_gradient(ir, popxl.variable(logits), popxl.constant(classes), **how))
    expected, gradient = reference(logits.reshape(4, 4), classes, **how)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert_near(dx, gradient.reshape(2, 2, 4), 1e-5)


def test_one_op(ir):
    spec, labels = popxl.TensorSpec((3, 4), popxl.float32), popxl.TensorSpec((3,), popxl.int32)
    for fn, kind, names in (
        (cross_entropy, "CrossEntropy", ["loss"]),
        (cross_entropy_with_grad, "CrossEntropyWithGrad", ["loss", "dx"]),
    ):
        graph = ir.create_graph(fn, spec, labels)
        assert [(op.op_type, [t.name for t in op.outputs]) for op in graph.ops] == [(kind, names)]


def test_errors(ir):
    x, labels = popxl.constant([[1.0, 2.0]]), popxl.constant([1], popxl.int32)
    for fn in (cross_entropy, cross_entropy_with_grad):
        with pytest.raises(ValueError):
            fn(x, labels, reduction="median")
        with pytest.raises(popxl.errors.PopxlError, match=r"1 in the shape \(1, 2\); got `labels` of shape \(3,\)"):
            fn(x, popxl.constant([1, 0, 1], popxl.int32))
    before = len(ir.main_graph.ops)
    with pytest.raises(popxl.errors.PopxlError, match="labels are integers; these are float32"):
        cross_entropy(x, popxl.constant([1.0]))
    assert len(ir.main_graph.ops) == before


def test_the_functions_and_their_module():
    assert addons.cross_entropy is addons.ops.cross_entropy is cross_entropy
    assert addons.cross_entropy_with_grad is addons.ops.cross_entropy_with_grad is cross_entropy_with_grad


# The loss of language models ----------------------------------------------------------------------------------------


def trained(tied: bool, chunks: int | None, replicas: int = 1, **how: Any) -> tuple[list[np.ndarray], set[str]]:
    """Losses of three steps, and the ops of the model's graph."""
    config = LanguageConfig(vocabulary=19, width=8, layers=1, heads=2, context=8, tied=tied)
    np.random.seed(0)
    ir = popxl.Ir(replicas)
    with ir.main_graph:
        tokens = popxl.h2d_stream((4, 6), popxl.int32, "tokens")
        loss = NextTokenLoss(LanguageModel(config), chunks)
        step = addons.train_step(loss, tokens, optimizer=partial(addons.optimizers.sgd, lr=0.5), **how)
        out = addons.host_store(step.loss)
    batches = np.random.default_rng(1).integers(0, 19, (3, *(replicas,) * (replicas > 1), 4, 6)).astype(np.int32)
    with popxl.Session(ir, "ipu_model") as session:
        losses = [np.array(session.run({tokens: batch})[out]) for batch in batches]
    return losses, {op.op_type for graph in ir.graphs for op in graph.ops}


@pytest.mark.thorough(but_each=3)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    "how", [{}, {"micro_batches": 2}, {"replicas": 2, "sharded": True}, {"memory": "nothing"}], ids=str
)
def test_logits_in_chunks(tied: bool, how: dict[str, Any]) -> None:
    whole, ops_of_whole = trained(tied, None, **how)
    chunked, ops_of_chunks = trained(tied, 3, **how)
    np.testing.assert_allclose(chunked, whole, rtol=1e-5)
    assert "LinearCrossEntropy" in ops_of_chunks - ops_of_whole


def test_a_loss_of_many_logits_is_computed_with_its_gradients_by_default() -> None:
    config = LanguageConfig(vocabulary=2**15, width=8, layers=1, heads=2, context=2**10)
    with popxl.Ir().main_graph:
        for texts, is_fused in ((1, False), (2, True)):
            spec = popxl.TensorSpec((texts, 2**10 + 1), popxl.int32)
            _, graph = NextTokenLoss(LanguageModel(config)).create_graph(spec)
            fused = [op for op in graph.graph.ops if op.op_type == "LinearCrossEntropy"]
            assert [op.attributes["chunks"] for op in fused] == [None] * is_fused


@pytest.mark.parametrize(
    ("model", "chunks", "error", "message"),
    [
        (LanguageModel, 0, ValueError, "NextTokenLoss: `chunks` is 0; expected 1 or more"),
        (LanguageModel, 2.5, TypeError, "NextTokenLoss: `chunks` must be an integer; got 2.5"),
        (Linear, 2, ValueError, "`model` is a Linear, whose logits are made as a whole"),
    ],
)
def test_chunks_that_are_none(model: Any, chunks: Any, error: type[Exception], message: str) -> None:
    config = LanguageConfig(vocabulary=19, width=8, layers=1, heads=2, context=8)
    with pytest.raises(error, match=message):
        NextTokenLoss(model(config) if model is LanguageModel else model(19), chunks)
