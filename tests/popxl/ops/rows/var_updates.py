"""Rows of ops that update a tensor in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from popxl import ops
from tests.popxl.ops.rows.schema import (
    ANY,
    MIXED,
    Array,
    Bad,
    PopxlError,
    Row,
    X,
    Y,
    bad,
    f16,
    f32,
    i32,
    over,
    sample,
    scalar,
    u32,
    values,
)

HALF = values("float16", (2, 3))
STRANGE = f32(np.inf, np.nan, 3)
CAST = sample(f16(0), f32(70000), 0.9, expect=f16(np.inf))  # what is taken in is cast first, too large or not
UNLIKE = bad(PopxlError, "the same shape; nothing is broadcast", X, Y, 0.5)
SEVERAL = bad(PopxlError, r"a number or a tensor of one element; `x.*` has the shape \(2,\)", X, X, f32(1, 2))

# Accumulators -------------------------------------------------------------------------------------------------------


def accumulator(name: str, formula: Callable[..., Any], stem: str = "", **settings: Any) -> Row:
    """An accumulator, with factors that are numbers and tensors of one element, and operands of two dtypes."""
    factors = [0.5, 1, np.float32(0.25), scalar(0.75), f32(0.5), i32([2]), scalar(0.5, "float16")]
    samples = [sample(X, X * 3, f) for f in factors]
    samples += [sample(HALF, X * 3, 0.25), sample(X, HALF, 0.25), sample(HALF, HALF + 1, scalar(0.3))]
    samples += [sample(scalar(1), scalar(3), 0.5), *settings.pop("samples", [])]
    settings["bad"] = [UNLIKE, SEVERAL, *not_a_factor(name, settings.pop("factor", "f"), (X, X))]
    result = f"{stem or name.rstrip('_')}__{{0}}"
    return Row(name, formula, samples, "Accumulate", result, overwrites=True, numbers=(2,), **settings)


def not_a_factor(name: str, argument: str, operands: tuple[Any, ...]) -> list[Bad]:
    """A factor is a number or a tensor, and nothing else."""
    message = f"{name}: `{argument}` must be a number.* or a Tensor of one element; got 'half'"
    return [bad(TypeError, message, *operands, "half")]


EXACT = over("int32 uint32 int8", (2, 3), (2, 3)) + [sample(i32(2**24 + 1), i32(2**24), None, expect=i32(2**25 + 1))]

# Adam ---------------------------------------------------------------------------------------------------------------

W, M, V = f32(1, -2), f32(0.1, -0.2), f32(0.01, 0.04)


def direction(
    m: Array, v: Array, weight: Any = None, time_step: Any = None, weight_decay: Any = None, beta1: Any = None,
    beta2: Any = None, epsilon: float = 1e-7
) -> Array:  # fmt: skip
    assert time_step is None
    x = m / (np.sqrt(v) + epsilon)
    return x + weight_decay * weight if weight_decay else x


def updater(name: str) -> Row:
    """The updater of Adam or LAMB. What it does with a time step is told by the tests of optimisers."""
    decay, both = "Weight decay requires weight to not be None.", "Bias correction requires both beta1 and beta2"
    return Row(name, direction,
        [sample(f32(3, -1), f32(4, 0.5), f32(5, 6), None, f32(0.25), None, None, scalar(0.1)),
         sample(M, V, expect=f32(0.999999, -0.9999995)),
         sample(M, V, W, weight_decay=0.01, expect=f32(1.009999, -1.0199995)),
         *[sample(M, V, W, None, decay) for decay in (0.0, 0, None)], sample(M, V, weight_decay=0.0),
         sample(M, V, beta1=0.9, epsilon=0.5), sample(M, V, None, None, None, None, None, scalar(0.5)),
         sample(X, X * X, -X, None, scalar(0.5)), sample(f16(1, 2), f32(1e-9, 4e-9)),
         sample(f32(1, 2), f16(3, 4), f16(5, 6), None, 0.5, dtype="float16"),
         sample(f16(1, 2), f32(3, 4), f32(5, 6), None, np.float32(0.5), dtype="float32")],
        "AdamUpdater", "Updater", numbers=(3, 4),
        bad=[bad(ValueError, decay, M, V, weight_decay=0.01), bad(ValueError, decay, M, V, None, f32(0), f32(0)),
             *[bad(ValueError, both, M, V, None, f32(0), **b) for b in ({}, {"beta1": 0.9}, {"beta2": 0.9})],
             bad(TypeError, "`time_step` must be a Tensor; got 0", M, V, time_step=0, beta1=0.9, beta2=0.99),
             bad(TypeError, "`weight` must be a Tensor; got 1.0", M, V, 1.0, weight_decay=0.1),
             bad(TypeError, f"{name}: `epsilon` must be a number or a Tensor", M, V, epsilon=None),
             bad(PopxlError, "the same shape", M, X), bad(PopxlError, "the same shape", M, V, X, None, 0.1),
             bad(PopxlError, r"`x.*` has the shape \(2,\)", M, V, None, f32(0, 0), beta1=0.9, beta2=0.99)])  # fmt: skip


def adamax(
    m: Array, v: Array, weight: Any, time_step: Array, decay: Any = None, beta1: Any = 0.9, epsilon: Any = 1e-7
) -> list[Array]:
    after = time_step + 1
    x = m / (1 - beta1 ** float(after.item())) / (v + epsilon)
    return [x + decay * weight if decay else x, after]


def adamax_built(m: Any, v: Any, weight: Any, time_step: Any, *how: Any) -> list[Any]:
    """The updater, and the time step that it leaves. It counts a copy, so that all operands stay as they are."""
    count = ops.identity(time_step, "count")
    return [ops.var_updates.adamax_updater(m, v, weight, count, *how), count]


# LAMB's step --------------------------------------------------------------------------------------------------------


def stepped(t: Array, x: Array, r1: Any, r2: Any, learning_rate: Any = None, max_weight_norm: Any = None) -> Array:
    r1, r2 = float(np.reshape(r1, ())), float(np.reshape(r2, ()))
    limit = np.inf if max_weight_norm is None else max_weight_norm
    ratio = 1 if r1 == 0 or r2 == 0 or limit == 0 else min(np.sqrt(r1), limit) / np.sqrt(r2)
    return t - ratio * (1 if learning_rate is None else learning_rate) * x


LAMB = (f32(3, 4), f32(0.6, 0.8), scalar(25), scalar(1))


def sparse(t: Array, X: Array, indices: Array, axis: int = 0, f: Any = None, W: Any = None) -> Array:
    result, at = np.array(t), axis % t.ndim
    lines = np.moveaxis(result, at, 0)
    added = np.moveaxis(X, range(at, at + indices.ndim), range(indices.ndim))
    for j in np.ndindex(indices.shape):
        if 0 <= indices[j] < len(lines):
            lines[int(indices[j])] += (1 if f is None else f) * added[j]
    return result


VAR_UPDATES = [
    accumulator("accumulate_", lambda t, X, f=None: t + (1 if f is None else f) * X,
        samples=[*over("float32 float16 bfloat16", (2, 3), (2, 3)), *EXACT, sample(f32(1, 2, 3), STRANGE, scalar(0)),
                 sample(f32(1, 2, 3), STRANGE, 0, expect=f32(1, 2, 3))]),
    accumulator("accumulate_square_", lambda t, X, f=1.0: t + f * X * X,
        samples=[*over("float32 float16 bfloat16", (2, 3), (2, 3)), CAST,
                 sample(f32(1, 2, 3), STRANGE, 0.0, expect=f32(1, 2, 3)), sample(f16(1, 2), f16(300, 400), 0.1),
                 sample(f32(0, 0), f32(1e25, 1e-25), 1e-25)]),
    accumulator("accumulate_mean_", lambda t, X, step: (step * t + X) / (step + 1), factor="step", adds=2,
        samples=[sample(f32(5, 6), f32(1, 2), 0, expect=f32(1, 2)), sample(X, X * 3, u32(7)),
                 sample(X, X * 3, 3), sample(f16(1000, 2), f16(1, 2), scalar(10**6, "int32"))]),
    accumulator("accumulate_moving_average_", lambda t, X, f: f * t + (1 - f) * X, "accumulate_moving_avg",
        samples=[CAST, sample(f32(1, 2), f32(3, 4), 0.9, expect=f32(1.2, 2.2)), sample(f32(0, 0), f32(1e9, -3), 0.999),
                 sample(STRANGE, f32(1, 2, 3), 0, expect=f32(1, 2, 3)),
                 sample(f32(1, 2, 3), STRANGE, 1, expect=f32(1, 2, 3))]),
    accumulator("accumulate_moving_average_square_", lambda t, X, f: f * t + (1 - f) * X * X,
        "accumulate_moving_avg_square",
        samples=[CAST, sample(f32(1, 2), f32(3, 4), 0.9, expect=f32(1.8, 3.4)), sample(f32(0), f16(1e-4), 0.999),
                 sample(f32(1, 2, 3), STRANGE, 1, expect=f32(1, 2, 3))]),
    Row("accumulator_scale_", lambda t, f: t * f,
        [sample(X, scalar(0.5)), *(sample(X, f) for f in (0.25, 3, np.float16(0.5), f32([2]), i32(3), X + 1)),
         sample(HALF, 0.3), sample(HALF, X), sample(X, scalar(2, "float16")), sample(STRANGE, scalar(0)),
         sample(STRANGE, 0, expect=f32(0, 0, 0)), *(sample(a, 0, expect=a * 0) for a in (i32(1, 2), u32(3, 4), HALF))],
        "AccumulatorScale", "accumulator_scale__{0}", overwrites=True, numbers=(1,),
        bad=[bad(PopxlError, r"has the shape \(3,\)", X, Y), *not_a_factor("accumulator_scale_", "f", (X,))]),
    Row("accumulator_zero_", lambda t: np.zeros_like(t),
        [*over("float32 float16 bfloat16 int32 uint32 int8", (2, 3)), sample(STRANGE)],
        "AccumulatorScale", "accumulator_scale__{0}", overwrites=True, tolerance=0),
    Row("sparse_accumulate_", sparse,
        [sample(X, values("float32", (5, 3)), i32(1, 0, 1, 1, 0), 0, scalar(0.5), X + 1),
         sample(f32([0, 0], [0, 0], [0, 0], [0, 0]), f32([1, 2], [3, 4], [5, 6]), i32(1, 3, 1), f=0.5,
                expect=f32([0, 0], [3, 4], [0, 0], [1.5, 2])),
         sample(values("float32", (2, 3, 4)), values("float32", (2, 3, 2, 4)), u32([2, 0], [0, 0], [1, 2]), 1),
         sample(values("float32", (2, 3)), values("float32", (2, 4)), i32(0, 2, 2, 0), -1, f32(0.25), i32(1)),
         sample(X, values("float32", (3,)), scalar(1, "int32")),
         sample(X, values("float32", (0, 3)), np.zeros(0, np.int32)),
         sample(X, values("float32", (4, 3)), i32(-1, 2, 1, -2**31)), sample(X, f32([1, 2, 3]), u32(2**32 - 1)),
         sample(f32(1, 2), f32(np.nan, np.inf), i32(0, 1), f=0, expect=f32(1, 2)),
         sample(HALF, values("float32", (2, 3)), i32(1, 1), f=0.1),
         sample(f16(1), np.full(3000, 0.25, np.float16), np.zeros(3000, np.int32)),  # rounded once
         *(sample(values(d, (3,)), values(d, (4,)), u32(2, 0, 2, 1)) for d in "int32 uint32 int8".split()),
         sample(i32(2**24 + 1), i32(2**24), i32(0), expect=i32(2**25 + 1))],
        "PopartSparseAccumulate", "sparse_accumulate__{0}", overwrites=True, numbers=(3,),
        bad=[bad(TypeError, "`axis` must be an integer; got 0.0", X, X, i32(0, 1), 0.0),
             bad(TypeError, "`W` must be a Tensor; got 1", X, X, i32(0, 1), W=1),
             bad(PopxlError, r"has the shape \(2,\)", X, X, i32(0, 1), 0, f32(1, 2)),
             *not_a_factor("sparse_accumulate_", "f", (X, X, i32(0, 1), 0))]),
    updater("adam_updater"),
    updater("lamb_updater"),
    Row("adamax_updater", adamax,
        [sample(W, f32(0.5, 0.4), None, f32(1)),
         sample(M, f32(0.5, 0.4), None, f32(1), expect=[f32(1.05263137, -2.63157829), f32(2)]),
         sample(M, f16(0.5, 0.25), None, scalar(4, "int32"), None, 0.5),
         sample(M, M + 1, W, u32(0), 0.5, f32(0.5), f32(0.25)), sample(M, M + 1, W, f32(0), f32(0.5), f32(0.5), 0.5),
         sample(M, M + 1, W, f32(3), 0.0)],
        "Identity AdamUpdater", "Updater count", adds=2, build=adamax_built),
    Row("adam_var_update", stepped,
        [sample(*LAMB, 0.1, 10.0, expect=f32(2.7, 3.6)), sample(*LAMB, 0.1, 2, expect=f32(2.88, 3.84)),
         *[sample(*LAMB, 0.1, zero, expect=f32(2.94, 3.92)) for zero in (0, 0.0, scalar(0))],
         sample(*LAMB[:2], scalar(0), scalar(1), 0.1, 10, expect=f32(2.94, 3.92)),
         sample(*LAMB[:3], scalar(0), f32(0.1), f32(10)), sample(*LAMB), sample(*LAMB, 0.1), sample(*LAMB, None, 2.0),
         sample(*LAMB, 0, 2.0), sample(HALF, X, f32(7), f32(5), 0.1),
         sample(X, HALF, f32([7]), scalar(5), scalar(0.5, "float16"), scalar(1.5))],
        "AdamVarUpdate", "adam_var_update_out", overwrites=True, numbers=(4, 5), colocated=False,
        bad=[bad(PopxlError, "the same shape; nothing is broadcast", X, Y, f32(1), f32(1)),
             bad(PopxlError, r"has the shape \(2,\)", X, X, f32(1, 2), f32(1)),
             *not_a_factor("adam_var_update", "learning_rate", (X, X, f32(1), f32(1))),
             *not_a_factor("adam_var_update", "max_weight_norm", (X, X, f32(1), f32(1), None))]),
    Row("copy_var_update_", lambda t, X: X, over(ANY, (2, 3), (2, 3)), "CopyVarUpdate", "updated__{0}", overwrites=True,
        tolerance=0, bad=[bad(PopxlError, "the same shape; nothing is broadcast", X, Y), MIXED]),
]  # fmt: skip
