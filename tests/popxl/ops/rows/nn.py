"""Rows of the matrix product, softmax and the losses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

import popxl
from tests.popxl.ops.rows.schema import (
    FLOATS,
    INTS,
    NUMBERS,
    Array,
    PopxlError,
    Row,
    X,
    Y,
    bad,
    f16,
    f32,
    i32,
    over,
    rule,
    sample,
    scalar,
    torch_function,
    values,
)


def softmax(t: Array, axis: int) -> Array:
    """Over `axis` and everything after it."""
    over_all = tuple(range(axis % t.ndim, t.ndim))
    e = np.exp(t - t.max(axis=over_all, keepdims=True))
    return e / e.sum(axis=over_all, keepdims=True)


def picked(probs: Array, labels: Array) -> Array:
    probs = probs.reshape(*labels.shape, probs.shape[-1])
    inside = (labels >= 0) & (labels < probs.shape[-1])
    chosen = np.take_along_axis(probs, np.where(inside, labels, 0).astype(int)[..., None], -1)[..., 0]
    return np.where(inside, chosen, 0)


def counted(losses: Array, labels: Array, ignore_index: int | None, reduction: str) -> Array:
    counts = np.ones(labels.shape, bool) if ignore_index is None else labels.astype(int) != ignore_index
    losses = losses * counts
    if reduction == "none":
        return losses
    return losses.sum() / max(counts.sum(), 1) if reduction == "mean" else losses.sum()


def nll(
    probs: Array, labels: Array, ignore_index: int | None = None, reduction: str = "mean", log_prob: bool = False
) -> Array:
    p = picked(probs, labels)
    return counted(-p if log_prob else -np.log(np.maximum(p, 1e-7)), labels, ignore_index, reduction)


def fused(
    probs: Array, labels: Array, loss_grad: Any = 1.0, ignore_index: int | None = None, reduction: str = "mean"
) -> tuple[Array, Array]:
    counts = np.ones(labels.shape) if ignore_index is None else (labels.astype(int) != ignore_index).astype(float)
    hot = labels[..., None] == np.arange(probs.shape[-1])
    scale = counts / (max(counts.sum(), 1) if reduction == "mean" else 1)
    loss = counted(-np.log(picked(probs, labels) + 1e-7), labels, ignore_index, reduction)
    return loss, (probs - hot.reshape(probs.shape)) * (np.asarray(loss_grad) * scale).reshape(*probs.shape[:-1], 1)


def flat_cross_entropy(probs: Any, labels: Any, ignore_index: int | None = None, reduction: str = "mean") -> Any:
    """The loss of torch, which has the classes on axis 1 and takes logarithms."""
    import torch

    flat = torch.nn.functional.nll_loss(
        probs.log().reshape(-1, probs.shape[-1]),
        labels.reshape(-1).long(),
        ignore_index=-100 if ignore_index is None else ignore_index,
        reduction=reduction,
    )
    return flat.reshape(labels.shape) if reduction == "none" else flat


def linear_cross_entropy(
    x: Array, weight: Array, labels: Array, ignore_index: int | None = None, reduction: str = "mean", chunks: int = 1
) -> Array:
    probs = softmax(x.astype(np.float64) @ weight.astype(np.float64), -1)
    ignored = np.zeros(labels.shape, bool) if ignore_index is None else labels.astype(int) == ignore_index
    return counted(-np.log(np.where(ignored, 1, picked(probs, labels))), labels, ignore_index, reduction)


def linear_cross_entropy_of_torch(x: Any, weight: Any, labels: Any, chunks: int | None = None, **how: Any) -> Any:
    return flat_cross_entropy((x @ weight).softmax(-1), labels, **how)


PROBS = softmax(values("float32", (2, 3, 4)), -1)


LABELS = i32([3, 0, 2], [1, 1, 2])
BEYOND = np.array([[3, 2**32 - 1, 2], [1, 2**31, 2]], np.uint32)


def qkv(dtype: str, *shape: int, heads: int | None = None) -> list[Array]:
    """Queries of a shape; one key more than there are, of so many heads, and values with another number of channels."""
    *batch, length, channels = shape
    if heads is not None:
        batch[-1] = heads
    others = [(*batch, length + 1, n) for n in (channels, 4)]
    return [values(dtype, s, seed=i) for i, s in enumerate([shape, *others])]


def attended(
    q: Array, k: Array, v: Array, mask: Any = 0.0, causal: bool = False, scale: float | None = None, dropout: float = 0
) -> Array:
    if q.ndim > 2:
        k, v = (np.repeat(t, q.shape[-3] // k.shape[-3], axis=-3) for t in (k, v))
    scores = q @ np.swapaxes(k, -1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = np.where(mask, scores, -np.inf) if np.asarray(mask).dtype == bool else scores + mask
    if causal:
        scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -np.inf)
    powers = np.exp(scores)
    return powers / powers.sum(-1, keepdims=True) @ v


NN = [
    Row("matmul", lambda lhs, rhs, **hints: np.matmul(lhs, rhs),
        [*over(NUMBERS, (2, 3), (3, 4)), *over("float32", (3,), (3,)), *over(FLOATS, (5, 2, 3), (3, 4)),
         *over("float32", (4, 1, 2, 3), (3,)), *over("float32", (3,), (2, 4, 3, 1)),
         *over("float32", (3,), (2, 3, 4)),
         *over("float32", (2, 3, 4), (4,)), *over("float32", (3,), (3, 4)), *over("float32", (2, 1, 2, 3), (4, 3, 2)),
         sample(values("float16", (2, 3)), values("float16", (3, 4)), output_type=popxl.float32, dtype="float32"),
         sample(values("bfloat16", (2, 3)), values("bfloat16", (3, 4)), output_type=popxl.float32, dtype="float32"),
         sample(values("bfloat16", (2, 3)), values("float32", (3, 4)), torch=False),
         sample(X, values("float32", (3, 4)), output_type=popxl.float16, partials_type=popxl.float16, dtype="float16"),
         sample(X, values("float16", (3, 4)), torch=False), sample(values("float16", (2, 3)), X.T.copy(), torch=False),
         sample(X, values("float32", (3, 4)), available_memory_proportion=0.1, partials_type=popxl.float32)],
        "MatMul", "matmul_out", differentiable=(0, 1), keeps=2, torch=torch_function("matmul"),
        bad=[bad(PopxlError, r"inner dimensions differ; expected `rhs` to have 3 rows, and it has 2.*"
                 r"`lhs` is f32\[2, 3\], `rhs` is f32\[2, 3\]", X, X),
             bad(PopxlError, "scalar", X, scalar(1, "float32")), bad(PopxlError, "scalar", scalar(1, "float32"), X),
             bad(PopxlError, "different dtypes", X, INTS.reshape(3, 2)),
             bad(PopxlError, "do not broadcast", values("float32", (2, 2, 3)), values("float32", (4, 3, 2))),
             bad(TypeError, "`output_type` must be a popxl dtype", X, X.T.copy(), output_type=np.float16),
             bad(ValueError, "expected popxl.float16 or popxl.float32", X, X.T.copy(), partials_type=popxl.int32)]),
    Row("softmax", softmax,
        [*over(FLOATS, (2, 3), axis=-1), *over(FLOATS, (2, 3, 4), axis=1), *over("float32", (2, 3), axis=0),
         *over("float32", (3,), axis=0), sample(f32(1000, 0, 1000), axis=0), sample(f16(60000, 0, 60000), axis=0)],
        "Softmax", "softmax_out", differentiable=(0,),
        bad=[bad(PopxlError, "axis 2 does not exist", X, 2), bad(PopxlError, "axis -3 does not exist", X, -3)]),
    Row("log_softmax", lambda t, axis: t - np.log(np.exp(t).sum(axis, keepdims=True)),
        [*over(FLOATS, (2, 3), axis=-1), *over(FLOATS, (2, 3, 4), axis=1), *over("float32", (3,), axis=0),
         sample(f32(1000, 0), axis=0, expect=f32(0, -1000))],
        "LogSoftmax", "log_softmax_out", differentiable=(0,), keeps=1, torch=torch_function("log_softmax"),
        bad=[bad(PopxlError, "axis 2 does not exist", X, 2),
             bad(TypeError, r"^log_softmax: `axis` must be an integer; got 1\.0", X, 1.0)]),
    Row("attention", attended,
        [*(sample(*qkv(d, 2, 4, 5, 3)) for d in FLOATS.split()),
         sample(*qkv("float32", 2, 4, 5, 3, heads=2), values("float32", (4, 1, 6)), causal=True),
         sample(*qkv("bfloat16", 2, 4, 5, 3, heads=2), values("bfloat16", (2, 1, 1, 6)), scale=0.3),
         sample(*qkv("float32", 5, 3), values("bool", (5, 6))),
         sample(*qkv("float32", 2, 5, 3), values("float32", (5, 1))),
         sample(*qkv("float32", 5, 3), np.zeros((1, 6), bool), expect=np.zeros((5, 4), np.float32)),
         sample(*qkv("float32", 5, 3), values("float32", (6,)), scale=0, causal=True, dropout=0.0)],
        "Attention", "attention_out", adds=2, differentiable=(0, 1, 2, 3), keeps=5, tolerance=5e-6,
        bad=[bad(PopxlError, "expected queries, keys and values of one rank, 2 or more", X, X, Y),
             bad(PopxlError, "floats of 16 bits or more; these are int32", INTS, INTS, INTS),
             bad(PopxlError, "different dtypes", X, X, INTS),
             bad(PopxlError, "expected a value for each key", X, X, values("float32", (3, 3))),
             bad(PopxlError, "with as many channels", X, values("float32", (2, 2)), X),
             bad(PopxlError, "a number of heads that divides theirs", *qkv("float32", 3, 5, 2, heads=2)),
             bad(PopxlError, r"a mask whose shape broadcasts to that of the scores, \(2, 2\)",
                 X, X, X, values("bool", (3, 1, 1))),
             bad(PopxlError, "do not broadcast", X, X, X, values("bool", (3,))),
             bad(TypeError, r"`mask` must be a Tensor; got 2 \(int\)", X, X, X, 2),
             bad(PopxlError, "this is of int32", X, X, X, INTS),
             bad(ValueError, "say its `seed_tensor`", X, X, X, dropout=0.5),
             bad(ValueError, "expected a seed, a uint32 tensor", X, X, X, None, False, None, 0.5, Y),
             bad(ValueError, "`dropout` is 1; expected a probability", X, X, X, dropout=1),
             bad(TypeError, "^attention: `scale` must be a number; got '1'", X, X, X, scale="1")]),
    Row("einsum", lambda subscripts, *ts: np.einsum(subscripts, *ts),
        [*(sample("bij,kj->bik", values(d, (2, 3, 4)), values(d, (5, 4))) for d in NUMBERS.split()),
         sample("ij,j,ki->k", X, Y, values("float32", (4, 2))), sample("...ij->...j", X), sample("ii", X[:, :2].copy()),
         sample("i,i->", np.full(4096, 0.5, np.float16), np.full(4096, 0.25, np.float16), expect=np.float16(512))],
        "Einsum", "einsum_out", differentiable=(0, 1, 2),
        bad=[bad(PopxlError, "JAX refuses these operands", "ij,ij", X, Y),
             bad(PopxlError, "different dtypes", "ij,ij", X, INTS),
             bad(TypeError, "^einsum: `subscripts` must be a string; got Tensor|Variable", X, X),
             bad(ValueError, "at least one tensor", "ij")]),
    Row("outer", np.outer, [*over(NUMBERS, (2,), (3,)), *over("float32", (2, 3), (1, 4))], "Outer", "outer_out",
        differentiable=(0, 1), keeps=2, torch=lambda a, b: torch_function("outer")(a.ravel(), b.ravel()),
        bad=[bad(PopxlError, "different dtypes", X, INTS)]),
    Row("nll_loss", nll,
        [*(sample(PROBS, LABELS, reduction=r, ignore_index=ignored)
           for r in ("mean", "sum", "none") for ignored in (None, 1, -100)),
         sample(PROBS.astype(np.float16), LABELS.astype(np.uint32)),
         sample(PROBS, LABELS.astype(np.uint32), ignore_index=-100), sample(PROBS, BEYOND, ignore_index=2**32 - 1),
         sample(PROBS.astype(np.float16), LABELS.astype(np.int8), reduction="none"),
         sample(np.log(PROBS), LABELS, log_prob=True), sample(PROBS, i32([9, -1, 2], [1, 1, 2]), torch=False),
         sample(PROBS, LABELS * 0 + 1, ignore_index=1, torch=False), sample(PROBS[0, 0], scalar(2, "int32")),
         sample(values("float32", (2, 300), low=0.1), np.array([200, 44], np.uint8), reduction="none"),
         sample(PROBS.reshape(6, 4), LABELS, reduction="none"), sample(PROBS, LABELS.reshape(3, 1, 2), ignore_index=1),
         sample(f16([0, 1]), i32(0), expect=np.float16(-math.log(6.104e-5))),
         sample(f32([-np.inf, 0], [-1, -2]), i32(0, 1), ignore_index=0, log_prob=True, expect=np.float32(2)),
         sample(PROBS, LABELS, ignore_index=np.int64(1), torch=False),
         sample(PROBS, LABELS, ignore_index=2**40, torch=False),
         sample(f32([0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]), i32(0, 1, 2), expect=np.float32(0.475705)),
         sample(f32([0, 1]), i32(0), expect=np.float32(16.1181))],
        "Nll", "loss", differentiable=(0,), tolerance=4e-6,
        torch=lambda probs, labels, log_prob=False,
        **how: flat_cross_entropy(probs.exp() if log_prob else probs, labels, **how),
        rules=[rule(f32([1e-9, 1], [0, 1]), i32(0, 0), g=np.float32(1), reduction="sum",
                    gives=(f32([-1e9, 0], [-1e10, 0]), None)),
               rule(f16([1e-5, 1]), i32(0), g=np.float16(1), gives=(f16([-1 / 6.104e-5, 0]), None)),
               rule(f32([0.5, 0.5]), i32(7), g=np.float32(1), gives=(f32([0, 0]), None))],
        bad=[bad(ValueError, "`reduction` is 'max'; expected 'mean', 'sum' or 'none'", PROBS, LABELS, reduction="max"),
             bad(PopxlError, r"of which there are 6 in the shape \(2, 3, 4\); got `labels` of shape \(2,\)", PROBS,
                 i32(1, 2)),
             bad(PopxlError, "a label for each row", scalar(1, "float32"), scalar(1, "int32")),
             bad(PopxlError, "labels are integers; these are float32", PROBS, LABELS.astype(np.float32)),
             bad(TypeError, "`ignore_index` must be an integer", PROBS, LABELS, ignore_index=1.5)]),
    Row("nll_loss_with_softmax_grad", fused,
        [*(sample(PROBS, LABELS, loss_grad=3, reduction=r, ignore_index=ignored)
           for r in ("mean", "sum", "none") for ignored in (None, 1, -100)),
         sample(PROBS, LABELS, values("float32", (2, 3)), reduction="none"), sample(PROBS, LABELS.astype(np.uint32)),
         sample(PROBS, BEYOND, ignore_index=2**32 - 1),
         sample(PROBS.reshape(6, 4), LABELS, values("float32", (2, 3)), reduction="none"),
         sample(PROBS.astype(np.float16), LABELS, scalar(64, "float32")), sample(PROBS, i32([9, -1, 2], [1, 1, 2])),
         sample(PROBS, LABELS * 0 + 1, ignore_index=1)],
        "NlllWithSoftmaxGradDirect", "loss dx", adds=3, numbers=(2,), tolerance=4e-6,
        bad=[bad(ValueError, "`reduction` is 'max'", PROBS, LABELS, reduction="max"),
             bad(PopxlError, "a label for each row", PROBS, i32(1, 2)),
             bad(PopxlError, "`loss_grad` is one number", PROBS, LABELS, f32(1, 2))]),
    Row("linear_cross_entropy", linear_cross_entropy,
        [*(sample(*(np.round(values(d, s)) for s in ((2, 3, 5), (5, 4))), LABELS, reduction="sum", chunks=2,
                  dtype="float32") for d in FLOATS.split()),  # logits that halves have
         *(sample(values("float32", (6, 5)), values("float32", (5, 4)), LABELS, reduction="sum", chunks=n,
                  ignore_index=ignored) for n, ignored in ((6, 1), (4, -100), (1, None), (None, 2))),
         sample(values("float32", (6, 5)), values("float32", (5, 4)), np.array([3, 2**32 - 1, 2, 1, 0, 2], np.uint32),
                reduction="sum", chunks=2, ignore_index=2**32 - 1, torch=False),
         sample(np.zeros((0, 5), np.float32), values("float32", (5, 4)), np.zeros(0, np.int32), reduction="sum")],
        "LinearCrossEntropy", "loss", adds=5, differentiable=(0, 1), tolerance=4e-6,
        torch=linear_cross_entropy_of_torch,
        bad=[bad(ValueError, "^linear_cross_entropy: `reduction` is 'none'; expected 'mean' or 'sum'", X, Y.T, INTS[0],
                 reduction="none"),
             bad(ValueError, r"`chunks` is 7; expected 1 to 6, the number of samples",
                 values("float32", (6, 5)), values("float32", (5, 4)), LABELS, chunks=7),
             bad(TypeError, "^linear_cross_entropy: `chunks` must be an integer; got 2.5", values("float32", (6, 5)),
                 values("float32", (5, 4)), LABELS, chunks=2.5),
             bad(PopxlError, r"expected `x` of shape \(..., features\) and `weight` of shape \(features, classes\)",
                 values("float32", (6, 5)), values("float32", (4, 5)), LABELS, chunks=2),
             bad(PopxlError, r"expected `labels` to be 6 integers, one for each row of `x`; got int32 of shape \(3,\)",
                 values("float32", (6, 5)), values("float32", (5, 4)), i32(1, 2, 3), chunks=2),
             bad(PopxlError, "the operands have different dtypes", values("float32", (6, 5)), values("float16", (5, 4)),
                 LABELS, chunks=2)]),
]  # fmt: skip
