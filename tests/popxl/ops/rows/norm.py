"""Rows of the norms."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.popxl.ops.rows.schema import (
    FLOATS,
    Array,
    PopxlError,
    Row,
    Sample,
    X,
    Y,
    bad,
    sample,
    torch_function,
    values,
)


def batch_norm(
    t: Array, scale: Array, bias: Array, mean: Array, var: Array, epsilon: float = 1e-5, momentum: float = 0.9
) -> Array:
    channels = [(t[:, c] - mean[c]) / np.sqrt(var[c] + epsilon) * scale[c] + bias[c] for c in range(t.shape[1])]
    return np.stack(channels, 1)


def group_norm(t: Array, weight: Array, bias: Array, num_groups: int, eps: float = 1e-5) -> Array:
    out = t.copy()
    for image in out:
        for group in np.split(image, num_groups):  # a view
            group[...] = (group - group.mean()) / np.sqrt(group.var() + eps)
        for c in range(len(image)):
            image[c] = image[c] * weight[c] + bias[c]
    return out


def layer_norm(t: Array, weight: Array, bias: Array, eps: float = 1e-5) -> Array:
    return group_norm(t, weight, bias, 1, eps)


def vectors(dtype: str, channels: int, count: int = 2) -> list[Array]:
    return [values(dtype, (channels,), 0.1, 2, seed=i) for i in range(count)]


def torch_batch_norm(t: Any, scale: Any, bias: Any, mean: Any, var: Any, epsilon: float = 1e-5, **hints: Any) -> Any:
    return torch_function("nn.functional.batch_norm")(t, mean, var, scale, bias, eps=epsilon)


def torch_group_norm(t: Any, weight: Any, bias: Any, num_groups: int = 1, eps: float = 1e-5) -> Any:
    return torch_function("nn.functional.group_norm")(t, num_groups, weight, bias, eps)


def normed(dtypes: str, *shape: int, **attributes: Any) -> list[Sample]:
    return [sample(values(d, shape), *vectors(d, shape[1]), **attributes) for d in dtypes.split()]


IMAGE = values("float32", (2, 3, 4))
THREE = vectors("float32", 3, 4)


NORM = [
    Row("batch_norm_inference", batch_norm,
        [*(sample(values(d, (2, 3, 4)), *vectors(d, 3, 4)) for d in FLOATS.split()),
         *(sample(values(d, (1, 2, 3, 5)), *vectors(d, 2, 4), epsilon=0.1, momentum=0.5) for d in FLOATS.split()),
         sample(values("float16", (2, 3, 1)), *vectors("float16", 3), *vectors("float32", 3)),
         sample(np.full((1, 2, 3), 4, np.float32), *np.float32([[1, 2], [0, 1], [3, 4], [4, 9]]), epsilon=0.0,
                expect=np.float32([[[0.5] * 3, [1] * 3]]))],
        "BatchNormalization", "batch_norm_out", refused=True, torch=torch_batch_norm,
        bad=[bad(PopxlError, "expected `t` of rank 3 or more: batch, channels, and what they hold; it has rank 2",
                 X, *THREE),
             bad(TypeError, "^batch_norm_inference: `epsilon` must be a number; got None", IMAGE, *THREE, None),
             *(bad(PopxlError, rf"expected `{name}` of shape \(3,\), one number for each channel of `t`",
                   IMAGE, *THREE[:i], wrong, *THREE[i + 1 :])
               for i, name in enumerate(["scale", "bias", "mean", "var"])
               for wrong in (values("float32", (4,)), values("float32", (1, 3)), values("float32", (1,))))]),
    Row("group_norm", group_norm,
        [*normed(FLOATS, 2, 6, 3, num_groups=3), *normed(FLOATS, 3, 4, num_groups=2),
         *normed("float32", 2, 6, 1, 3, num_groups=1, eps=0.1), *normed("float32", 1, 3, 2, num_groups=3),
         *normed("float32", 2, 3, 4, num_groups=np.int64(1)),
         sample(np.float32([[1, 2, 3, 5]]), np.ones(4, np.float32), np.zeros(4, np.float32), num_groups=2, eps=0.0,
                expect=np.float32([[-1, 1, -1, 1]]))],
        "GroupNormalization", "group_norm_out", adds=3, differentiable=(0, 1, 2), keeps=3, torch=torch_group_norm,
        bad=[bad(PopxlError, "expected `t` of rank 2 or more: batch and channels; it has rank 1", Y, *THREE[:2], 1),
             bad(TypeError, r"^group_norm: `num_groups` must be an integer; got 3\.0", IMAGE, *THREE[:2], 3.0),
             bad(TypeError, "^group_norm: `eps` must be a number; got '1e-5'", IMAGE, *THREE[:2], 3, "1e-5")]),
    Row("layer_norm", layer_norm,
        [*normed(FLOATS, 2, 4), *normed(FLOATS, 2, 3, 5), *normed("float32", 3, 2, 1, 2, eps=0.5),
         sample(np.float32([[1, 2, 3, 4]]), np.ones(4, np.float32), np.zeros(4, np.float32),
                expect=np.float32([[-1.341635, -0.447212, 0.447212, 1.341635]]))],
        "GroupNormalization", "group_norm_out", adds=3, differentiable=(0, 1, 2), keeps=3, torch=torch_group_norm,
        bad=[bad(PopxlError, "expected `t` of rank 2 or more", Y, *THREE[:2])]),
]  # fmt: skip
