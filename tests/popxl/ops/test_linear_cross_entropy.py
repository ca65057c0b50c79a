"""The loss of a head in chunks: its gradients as NumPy has them, small ones too, and how much memory they need."""

from typing import Any

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl.transforms import autodiff
from tests.tolerances import assert_near

Array = np.ndarray
RANDOM = np.random.default_rng(3)
X, WEIGHT = RANDOM.normal(size=(3, 4, 5)), RANDOM.normal(size=(5, 6))
BIAS = RANDOM.normal(size=6)
LABELS = RANDOM.integers(0, 6, (3, 4))


def expected(x: Array, weight: Array, labels: Array, ignore_index: int | None, reduction: str) -> list[Array]:
    """Loss and gradients in float64."""
    rows, flat = x.reshape(-1, x.shape[-1]).astype(np.float64), labels.reshape(-1)
    powers = np.exp(rows @ weight.astype(np.float64))
    probs = powers / powers.sum(-1, keepdims=True)
    counts = flat != ignore_index
    number = max(counts.sum(), 1) if reduction == "mean" else 1
    slopes = (probs - np.eye(probs.shape[1])[np.where(counts, flat, 0)]) * counts[:, None] / number
    loss = -(np.log(probs[np.arange(len(flat)), np.where(counts, flat, 0)]) * counts).sum() / number
    return [loss, (slopes @ weight.T).reshape(x.shape), rows.T @ slopes]


def head(x: popxl.Tensor, weight: popxl.Tensor, labels: Array, **how: Any) -> popxl.Tensor:
    return ops.linear_cross_entropy(x, weight, popxl.constant(labels, popxl.int32), **how)


def computed(x: Array, weight: Array, labels: Array, dtype: popxl.dtype, scale: float = 1, **how: Any) -> list[Array]:
    """Loss and gradients of a program, with the gradient of the loss that it starts from."""
    ir = popxl.Ir()
    with ir.main_graph:
        operands = popxl.variable(x, dtype, "x"), popxl.variable(weight, dtype, "weight")
        graph = ir.create_graph(head, *operands, labels=labels, **how)
        info = autodiff(graph)
        site = ops.call_with_info(graph, *operands)
        start = popxl.constant(scale, popxl.float32)
        gradients = ops.call(info.graph, start, inputs_dict=info.inputs_dict(site))
        streams = [addons.host_store(t) for t in (site.outputs[0], *gradients)]
    assert site.outputs[0].dtype is popxl.float32 and all(t.dtype is dtype for t in gradients)
    with popxl.Session(ir, "ipu_hw") as session:
        outputs = session.run()
    return [np.asarray(outputs[stream], np.float64) for stream in streams]


@pytest.mark.parametrize("chunks", [None, 1, 3, 5, 12])
@pytest.mark.parametrize(
    ("ignore_index", "reduction"), [(None, "mean"), (2, "mean"), (2, "sum"), (-100, "mean")], ids=str
)
@pytest.mark.thorough(but_each=4)
def test_loss_and_gradients(chunks: int | None, ignore_index: int | None, reduction: Any) -> None:
    """Chunks of equal size, and a last one that is smaller."""
    how: dict[str, Any] = {"ignore_index": ignore_index, "reduction": reduction}
    found = computed(X, WEIGHT, LABELS, popxl.float32, chunks=chunks, **how)
    for ours, theirs in zip(found, expected(X, WEIGHT, LABELS, **how), strict=True):
        assert_near(ours, theirs, 1e-6)


def test_no_label_counts() -> None:
    loss, *gradients = computed(X, WEIGHT, np.full((3, 4), 2), popxl.float32, ignore_index=2, chunks=2)
    assert loss == 0 and not any(gradient.any() for gradient in gradients)


def test_gradients_of_a_mean_over_many_samples_in_float16() -> None:
    """Of each sample it is too small for float16, before the loss scale makes it larger."""
    x, weight = RANDOM.normal(size=(2048, 4)), RANDOM.normal(0, 1e-3, (4, 8))
    x, weight, labels = x.astype(np.float16), weight.astype(np.float16), RANDOM.integers(0, 8, 2048)
    scale = 2.0**14
    _, *found = computed(x, weight, labels, popxl.float16, scale, chunks=4)
    _, *theirs = expected(x, weight, labels, None, "mean")
    assert np.abs(theirs[0]).max() < 2e-6  # float16 has multiples of 6e-8
    for ours, gradient in zip(found, theirs, strict=True):
        np.testing.assert_allclose(ours, scale * gradient, rtol=5e-3, atol=5e-3 * np.abs(scale * gradient).max())


def cost(chunks: int, learns: bool, samples: int = 1024, sizes: tuple[int, int] = (8, 512)) -> tuple[int, float]:
    """Bytes of temporaries, and products' operations."""
    ir = popxl.Ir()
    with ir.main_graph:
        x, weight = (popxl.variable(np.zeros(s), popxl.float32, "x") for s in ((samples, sizes[0]), sizes))
        graph = ir.create_graph(head, x, weight, labels=np.zeros(samples), chunks=chunks)
        site = ops.call_with_info(graph, x, weight)
        addons.host_store(site.outputs[0])
        if learns:
            info = autodiff(graph)
            start = popxl.constant(1, popxl.float32)
            for t, gradient in zip(
                (x, weight), ops.call(info.graph, start, inputs_dict=info.inputs_dict(site)), strict=True
            ):
                ops.scaled_add_(t, gradient, b=-0.1)
    session = popxl.Session(ir, "cpu")
    return session.memory().temporaries, session.cost().flops


@pytest.mark.parametrize("chunks", [1, 5])
def test_a_bias(chunks: int) -> None:
    """It is a row of the weight, for an input of 1."""
    ones = np.concatenate([X, np.ones((3, 4, 1))], -1)
    theirs = expected(ones, np.concatenate([WEIGHT, BIAS[None]]), LABELS, 2, "mean")

    def biased(x: popxl.Tensor, weight: popxl.Tensor, bias: popxl.Tensor) -> popxl.Tensor:
        return head(x, weight, LABELS, ignore_index=2, chunks=chunks, bias=bias)

    ir = popxl.Ir()
    with ir.main_graph:
        operands = [popxl.variable(value, popxl.float32) for value in (X, WEIGHT, BIAS)]
        graph = ir.create_graph(biased, *operands)
        info = autodiff(graph)
        site = ops.call_with_info(graph, *operands)
        gradients = ops.call(info.graph, popxl.constant(1, popxl.float32), inputs_dict=info.inputs_dict(site))
        streams = [addons.host_store(t) for t in (site.outputs[0], *gradients)]
    with popxl.Session(ir, "ipu_hw") as session:
        outputs = session.run()
    slopes = [theirs[0], theirs[1][..., :-1], theirs[2][:-1], theirs[2][-1]]
    for stream, gradient in zip(streams, slopes, strict=True):
        assert_near(outputs[stream], gradient, 1e-5)


@pytest.mark.compiled_whole
def test_logits_of_one_chunk_exist_at_a_time() -> None:
    """All of them are 2 MB."""
    (whole, _), (chunked, _) = cost(1, learns=True), cost(8, learns=True)
    assert whole > 2e6 and chunked < 0.4 * whole


@pytest.mark.compiled_whole
def test_a_loop_over_chunks_holds_no_transposed_weight() -> None:
    """The weight has 2 MB, and so do its gradient and the update."""
    temporaries, _ = cost(4, learns=True, samples=64, sizes=(128, 4096))
    assert temporaries < 2.5 * 4 * 128 * 4096


@pytest.mark.compiled_whole
def test_a_program_without_gradients_computes_the_loss_alone() -> None:
    (_, loss), (_, step) = cost(1, learns=False), cost(1, learns=True)
    assert loss < 0.5 * step


@pytest.mark.parametrize(("shape", "dtype"), [((5,), popxl.float32), ((6,), popxl.float16)])
def test_a_bias_that_does_not_fit(shape: tuple[int, ...], dtype: popxl.dtype) -> None:
    with popxl.Ir().main_graph as main:
        x, weight = popxl.variable(X, popxl.float32), popxl.variable(WEIGHT, popxl.float32)
        bias, count = popxl.variable(np.zeros(shape), dtype), len(main.ops)
        with pytest.raises(
            popxl.errors.PopxlError, match=r"expected `bias` of the dtype of `x`, float32, and of shape \(6,\)"
        ):
            ops.linear_cross_entropy(x, weight, popxl.constant(LABELS, popxl.int32), bias=bias)
        assert all(op.op_type == "Constant" for op in main.ops[count:])
