"""Cross entropy of divided classes against torch, which has the classes in one piece."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl.errors import PopxlError
from popxl_addons.ops.cross_entropy_sharded_loss import cross_entropy_sharded_loss
from popxl_addons.ops.cross_entropy_sharded_wr_loss import cross_entropy_sharded_wr_loss
from tests.popxl_addons.replicated import (
    Devices,
    alike,
    both_ways,
    each_grouping,
    groups_of,
    of_groups,
    one_device,
    own,
    results,
    with_gradients,
)

IGNORED = 3


def reference(logits: Any, labels: Any, g: Any, ignored: int = -100, reduction: str = "none") -> tuple[Any, Any]:
    """Loss and gradient in double precision."""
    torch = pytest.importorskip("torch")
    x = torch.tensor(np.asarray(logits, np.float64), requires_grad=True)
    loss = torch.nn.functional.cross_entropy(x, torch.tensor(labels), ignore_index=ignored, reduction=reduction)
    loss.backward(torch.tensor(np.asarray(g, np.float64)))
    return loss.detach().numpy(), x.grad.numpy()


def close(dtype: Any) -> dict[str, float]:
    """Rounded once, improbable classes included: but for sums of float16, which cancel, to be compared as such."""
    return {"rtol": 1e-5, "atol": 1e-6} if dtype == np.float32 else {"rtol": 1e-3, "atol": 1e-5}


@pytest.mark.thorough(but_each=11)
@both_ways
@each_grouping
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_loss_and_gradient(device: Devices, count: int, stride: int, size: int, dtype: Any) -> None:
    """All reductions in one program, with and without a label that does not count."""
    groups, rng, samples, classes = groups_of(count, stride, size), np.random.default_rng(0), 5, 16
    logits = (3 * rng.normal(size=(len(groups), samples, classes))).astype(dtype)
    labels = rng.integers(0, classes, (len(groups), samples))
    labels[:, 1] = IGNORED
    gradients = {r: rng.normal(size=samples if r == "none" else ()).astype(dtype) for r in ("mean", "sum", "none")}
    block = classes // size
    rank = {replica: rank for group in groups for rank, replica in enumerate(group)}
    offset = np.int32([rank[r] * block for r in range(count)])
    local = np.stack([x[:, offset[r] : offset[r] + block] for r, x in enumerate(of_groups(list(logits), groups))])
    ir, tensors = popxl.Ir(replication=count), []
    with ir.main_graph:
        x, ignore = own(ir, local), own(ir, IGNORED - offset)
        indices = own(ir, of_groups(list(labels.astype(np.int32)), groups) - offset[:, None])
        for reduction, g in gradients.items():
            how = {"reduction": reduction, "replica_grouping": ir.replica_grouping(stride, size)}
            upstream = popxl.constant(g)
            for inputs in ([x, indices], [x, indices, ignore]):
                tensors += with_gradients(cross_entropy_sharded_loss, inputs, upstream, required=[0], **how)
    found = iter(results(ir, device, tensors))
    for reduction, g in gradients.items():
        for ignored in (-100, IGNORED):
            loss, dx = next(found), next(found)
            assert loss.dtype == dx.dtype == dtype
            alike(loss, groups)
            for number, group in enumerate(groups):
                expected, gradient = reference(logits[number], labels[number], g, ignored, reduction)
                np.testing.assert_allclose(loss[group[0]], expected, **close(dtype))
                np.testing.assert_allclose(np.concatenate(dx[group], axis=1), gradient, **close(dtype))


def test_the_example_of_the_specification() -> None:
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        logits, indices = own(ir, np.zeros((2, 1, 2)), popxl.float32), own(ir, [[2], [0]], popxl.int32)
        tensors = with_gradients(cross_entropy_sharded_loss, [logits, indices], popxl.constant(1.0), required=[0])
    loss, dx = results(ir, one_device, tensors)
    np.testing.assert_allclose(loss, [np.log(4)] * 2, rtol=1e-6)
    np.testing.assert_allclose(dx, [[[0.25, 0.25]], [[-0.75, 0.25]]], rtol=1e-6)


@both_ways
def test_extremes(device: Devices) -> None:
    """Large logits, a block without any, none of the labels that counts, and many samples in float16."""
    ir = popxl.Ir(replication=2)
    masked = np.float32([[[1e4, 1e4]], [[-np.inf, -np.inf]]])
    with ir.main_graph:
        x, indices, ignored = own(ir, masked), own(ir, [[1], [-1]], popxl.int32), own(ir, [1, -1], popxl.int32)
        nothing = cross_entropy_sharded_loss(x, indices, ignored)
        tensors = with_gradients(cross_entropy_sharded_loss, [x, indices], popxl.constant(1.0), required=[0])
        many = own(ir, np.stack([np.full((8192, 1), 10), np.zeros((8192, 1))]), popxl.float16)
        labels, none = own(ir, [[1] * 8192, [0] * 8192], popxl.int32), own(ir, [-1, -2], popxl.int32)
        mean = cross_entropy_sharded_loss(many, labels, none)
    nothing, loss, dx, mean = results(ir, device, [nothing, *tensors, mean])
    np.testing.assert_array_equal(nothing, 0)
    np.testing.assert_allclose(loss, np.log(2), rtol=1e-6)
    np.testing.assert_allclose(dx, [[[0.5, -0.5]], [[0, 0]]], rtol=1e-6)
    np.testing.assert_allclose(mean, 10, rtol=1e-3)


def test_what_is_printed_and_refused() -> None:
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        x, i = popxl.variable(np.ones((3, 4)), popxl.float32), popxl.constant([1, 2, 3], popxl.int32)
        loss = cross_entropy_sharded_loss(x, i, reduction="none")
        assert loss.producer.op_type == "CrossEntropySharded"
        assert [t.shape for t in loss.producer.outputs] == [(3,), (2, 3)]
        with_gradients(cross_entropy_sharded_loss, [x, i], popxl.constant(1.0), required=[0])
        assert "CrossEntropyShardedGrad" in [op.op_type for graph in ir.graphs for op in graph.ops]
        for logits, indices, message in (
            (x.reshape((3, 2, 2)), i, "expected `logits` of rank 2"),
            (x, i.reshape((3, 1)), "expected `indices` of rank 1"),
            (x, i[:2], "`logits` has 3 samples, and `indices` 2"),
            (x, ops.cast(i, popxl.float32), "`indices` of an integer dtype; got float32"),
        ):
            with pytest.raises(PopxlError, match=f"CrossEntropySharded: .*{message}"):
                cross_entropy_sharded_loss(logits, indices)
        with pytest.raises(ValueError, match="`reduction` is 'median'; expected one of 'mean', 'sum', 'none'"):
            cross_entropy_sharded_loss(x, i, reduction="median")


def test_indices_have_no_gradient() -> None:
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        x, i = popxl.variable(np.ones((3, 4)), popxl.float32), popxl.constant([1, 2, 3], popxl.int32)
        with pytest.raises(PopxlError, match="indices.*grads_required"):
            addons.autodiff(ir.create_graph(cross_entropy_sharded_loss, x, i))


# Within a replica ---------------------------------------------------------------------------------------------------


@pytest.mark.thorough(but_each=5)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("widths", [(4, 4), (3, 5, 1), (6,)], ids=str)
@pytest.mark.parametrize("labels_dtype", [np.int32, np.uint32])
def test_within_a_replica(ir: popxl.Ir, evaluate: Any, widths: tuple[int, ...], dtype: Any, labels_dtype: Any) -> None:
    rng, samples = np.random.default_rng(0), 5
    logits = (3 * rng.normal(size=(samples, sum(widths)))).astype(dtype)
    labels, g = rng.integers(0, sum(widths), samples), rng.normal(size=samples).astype(dtype)
    ends = np.cumsum(widths)[:-1]
    blocks = [popxl.variable(block, name="logits") for block in np.split(logits, ends, axis=1)]
    copies = [popxl.variable(labels.astype(labels_dtype), name="labels") for _ in widths]
    count = len(widths)

    def build(*tensors: popxl.Tensor) -> popxl.Tensor:
        return cross_entropy_sharded_wr_loss(list(tensors[:count]), list(tensors[count:]), range(count))

    tensors = with_gradients(build, [*blocks, *copies], popxl.constant(g), required=range(count))
    loss, *dx = evaluate(*tensors)
    expected, gradient = reference(logits, labels, g)
    np.testing.assert_allclose(loss, expected, **close(dtype))
    np.testing.assert_allclose(np.concatenate(dx, axis=1), gradient, **close(dtype))


def test_where_the_blocks_are(ir: popxl.Ir) -> None:
    x, i = popxl.variable(np.ones((3, 2)), popxl.float32), popxl.variable([0, 1, 2], popxl.int32)
    logits, indices = ([ops.ipu_copy(t, ipu, source=0) for ipu in (1, 2)] for t in (x, i))
    loss = cross_entropy_sharded_wr_loss(logits, indices)
    op = loss.producer
    assert op.op_type == "CrossEntropyShardedWR"
    assert [(t.ipu, t.shape) for t in op.outputs] == [(1, (3,)), (1, (2, 3)), (2, (2, 3))]
    with pytest.raises(ValueError, match=r"`logits` are on the IPUs \(1, 2\), and `indices` on \(2, 1\)"):
        cross_entropy_sharded_wr_loss(logits, indices[::-1])
    unplaced = [popxl.variable(np.ones((3, 2)), popxl.float32), popxl.variable([0, 1, 2], popxl.int32)]
    for some in ((logits, [unplaced[1]] * 2), ([logits[0], unplaced[0]], indices)):
        assert [t.ipu for t in cross_entropy_sharded_wr_loss(*some).producer.outputs] == [1, 1, 2]
    graph = addons.GraphWithNamedArgs(
        ir.create_graph(lambda *t: cross_entropy_sharded_wr_loss(t[:2], t[2:], (1, 2)), *logits, *indices)
    )
    gradient = addons.autodiff(graph, grads_required=graph.graph.inputs[:2])
    (op,) = (op for op in gradient.graph.ops if op.op_type == "CrossEntropyShardedGradWR")
    assert [t.ipu for t in op.outputs] == [1, 2]


def test_what_is_refused_within_a_replica(ir: popxl.Ir) -> None:
    x, i = popxl.variable(np.ones((3, 2)), popxl.float32), popxl.variable([0, 1, 2], popxl.int32)
    wr = cross_entropy_sharded_wr_loss
    for logits, indices, ipus, error, message in (
        ([x, x], [i], None, ValueError, "2 `logits` and 1 `indices`"),
        ([], [], None, ValueError, "0 `logits`"),
        ([x, x], [i, i], [0], ValueError, r"`ipus` is \(0,\), for 2 blocks"),
        ([popxl.variable(np.ones((3, 2)))], [popxl.constant([0, 1, 2])], None, ValueError, "Say in `ipus`"),
        (x, [i], None, TypeError, "`logits` must be a list of tensors"),
        ([x], [3], None, TypeError, "`indices` must be a list of tensors"),
        ([x, x[:2]], [i, i], [0, 1], PopxlError, r"expected `logits\[1\]` of shape \(3, classes\)"),
        ([x, ops.cast(x, popxl.float16)], [i, i], [0, 1], PopxlError, r"`logits\[1\]` has not the dtype"),
        ([x, x], [i, i[:2]], [0, 1], PopxlError, r"expected `indices\[1\]` to be integers like"),
        ([x], [x], [0], PopxlError, "expected `indices` of rank 1"),
    ):
        with pytest.raises(error, match=message):
            wr(logits, indices, ipus)


def test_gradients_are_not_differentiated_again() -> None:
    """Their ops read what the losses keep of the logits, which has no gradient of its own."""
    x, labels = popxl.TensorSpec((3, 2), popxl.float32), popxl.TensorSpec((3,), popxl.int32)
    for loss in (cross_entropy_sharded_loss, lambda x, labels: cross_entropy_sharded_wr_loss([x], [labels], [0])):
        ir = popxl.Ir(replication=2)
        graph = ir.create_graph(loss, x, labels)
        back = popxl.transforms.autodiff(graph, grads_required=graph.inputs[:1])

        def slope(x: popxl.Tensor, labels: popxl.Tensor, graph: Any, back: Any) -> popxl.Tensor:
            site = ops.call_with_info(graph, x, labels)
            seed = popxl.constant(np.ones(graph.outputs[0].shape), popxl.float32)
            (dx,) = ops.call(back.graph, seed, inputs_dict=back.inputs_dict(site))
            return ops.sum(dx)

        whole = ir.create_graph(slope, x, labels, graph, back)
        with pytest.raises(PopxlError, match="a gradient reaches the op CrossEntropyShardedGrad"):
            popxl.transforms.autodiff(whole, grads_provided=whole.outputs[:1], grads_required=whole.inputs[:1])
