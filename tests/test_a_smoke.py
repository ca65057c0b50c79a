"""Half a minute, before all other tests: build, print, differentiate, run, train, read the weights."""

from __future__ import annotations

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.transforms import autodiff

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
LABELS = (X[:, 0] > 0).astype(np.int32)


def linear(x: popxl.Tensor, w: popxl.Tensor, b: popxl.Tensor):
    return x @ w + b


def test_an_expression() -> None:
    ir = popxl.Ir()
    with ir.main_graph as main:
        x = popxl.variable([1.0, 2.0], name="x")
        out = popxl.d2h_stream((), popxl.float32, "total")
        ops.host_store(out, ops.sum(x * x))
    assert "sum_out: f32[]" in str(main)
    with popxl.Session(ir) as session:
        assert session.run()[out] == 5.0


def test_a_graph_is_called_as_often_as_one_likes() -> None:
    ir = popxl.Ir()
    with ir.main_graph as main:
        x, w, b = popxl.variable(X), popxl.variable(np.eye(3), popxl.float32), popxl.variable(1.0)
        graph = ir.create_graph(linear, x, w, b)
        y = x
        for _ in range(3):
            (y,) = ops.call(graph, y, w, b)
        out = popxl.d2h_stream(y.shape, y.dtype, "y")
        ops.host_store(out, y)
    assert str(main).count("linear_subgraph(0)(") == 4  # its definition, once, and three calls
    with popxl.Session(ir) as session:
        np.testing.assert_allclose(session.run()[out], X + 3, rtol=1e-6)


def test_a_gradient() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        x, w, b = popxl.variable(X), popxl.variable(np.ones((3, 2)), popxl.float32), popxl.variable([0.0, 0.0])
        graph = ir.create_graph(linear, x, w, b)
        info = autodiff(graph)
        site = ops.call_with_info(graph, x, w, b)
        gradients = ops.call(info.graph, popxl.constant(np.ones((8, 2)), w.dtype), inputs_dict=info.inputs_dict(site))
        streams = [popxl.d2h_stream(g.shape, g.dtype) for g in gradients]
        for stream, g in zip(streams, gradients, strict=True):
            ops.host_store(stream, g)
    with popxl.Session(ir) as session:
        outputs = session.run()
        dx, dw, db = (outputs[stream] for stream in streams)
    np.testing.assert_allclose(dx, np.full((8, 3), 2))
    np.testing.assert_allclose(dw, X.T @ np.ones((8, 2)), rtol=1e-5)
    np.testing.assert_allclose(db, [8, 8])


def test_training() -> None:
    """A classifier: batches from the host, an update in place, the loss back, the weights at the end."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        images = popxl.h2d_stream(X.shape, popxl.float32, "images")
        labels = popxl.h2d_stream(LABELS.shape, popxl.int32, "labels")
        losses = popxl.d2h_stream((), popxl.float32, "loss")
        x, y = ops.host_load(images), ops.host_load(labels)
        w = popxl.variable(np.zeros((3, 2)), popxl.float32, "w")
        b = popxl.variable([0.0, 0.0], name="b")
        graph = ir.create_graph(linear, x, w, b)
        info = autodiff(graph, grads_required=graph.inputs[1:])
        site = ops.call_with_info(graph, x, w, b)
        loss, dlogits = ops.nll_loss_with_softmax_grad(ops.softmax(site.outputs[0], axis=-1), y)
        ops.host_store(losses, loss)
        for variable, g in zip((w, b), ops.call(info.graph, dlogits, inputs_dict=info.inputs_dict(site)), strict=True):
            ops.scaled_add_(variable, g, b=-1.0)
    with popxl.Session(ir, "ipu_hw") as session:
        history = [session.run({images: X, labels: LABELS})[losses] for _ in range(20)]
    assert history[0] == pytest.approx(np.log(2), rel=1e-5)
    assert history[-1] < 0.3 and all(np.diff(history) < 0)

    weights = session.get_tensor_data(w)
    logits = X @ weights + session.get_tensor_data(b)
    assert (logits.argmax(1) == LABELS).mean() > 0.8
    np.testing.assert_allclose(weights[:, 0], -weights[:, 1], atol=1e-6)


def test_a_mistake_is_told_with_its_line() -> None:
    with popxl.Ir().main_graph:
        x, w = popxl.variable(X, name="x"), popxl.variable(np.ones((16, 2)), popxl.float32, "w")
        with pytest.raises(popxl.errors.PopxlError, match=r"`lhs` is f32\[8, 3\].*at `x @ w` \(test_a_smoke.py:"):
            x @ w
