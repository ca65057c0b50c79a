"""Rows of random ops. The generator, Threefry-2x32 with 20 rounds, is written out in NumPy.

Which numbers a program draws is no promise; that they stay the same as JAX goes on is good to know. What the
distributions look like is in `test_random.py`.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

import popxl
from tests.popxl.ops.rows.schema import FLOATS, Array, PopxlError, Row, X, bad, i32, sample, scalar, u32, values

Word = Array


def threefry(seed: Array, high: Word, low: Word) -> tuple[Word, Word]:
    """Encrypt counters of two words."""
    keys = [*seed, seed[0] ^ seed[1] ^ np.uint32(0x1BD11BDA)]
    rotations = itertools.cycle([(13, 15, 26, 6), (17, 29, 16, 24)])
    with np.errstate(over="ignore"):  # words wrap
        x, y = high + keys[0], low + keys[1]
        for i, four in zip(range(1, 6), rotations, strict=False):
            for r in four:
                x = x + y
                y = (y << np.uint32(r) | y >> np.uint32(32 - r)) ^ x
            x, y = x + keys[i % 3], y + keys[(i + 1) % 3] + np.uint32(i)
    return x, y


def split(seed: Array, n: int = 2) -> list[Array]:
    return [np.stack(threefry(seed, np.uint32(0), np.uint32(i))) for i in range(n)]


def kept(seed: Array, shape: tuple[int, ...], ratio: float) -> Array:
    """Where the random number, from 0 to 1, is not below the ratio."""
    counters = np.arange(np.prod(shape, dtype=int), dtype=np.uint32).reshape(shape)
    x, y = threefry(seed, np.zeros_like(counters), counters)
    return (x ^ y) / 2.0**32 >= ratio


def dropout(t: Array, seed_tensor: Array, p: float) -> Array:
    return np.where(kept(seed_tensor, t.shape, p), t / (1 - p), 0)


def shaped_dropout(t: Array, seed_tensor: Array, shape: Any, ratio: float) -> Array:
    return np.where(kept(seed_tensor, tuple(shape), ratio), t / (1 - ratio), 0)


SEED = u32(7, 2**32 - 3)


def seeded(t: Array, *arguments: Any) -> Any:
    return sample(t, SEED, *arguments)


def probabilities(name: str, *operands: Any) -> list[Any]:
    return [*(bad(ValueError, rf"`{name}` is {p}; expected a probability from 0 to below 1", *operands, p)
              for p in (1, 1.5, -0.1, float("nan"))),
            *(bad(TypeError, rf"dropout: `{name}` must be a number; got {p!r} \({type(p).__name__}\)", *operands, p)
              for p in ("0.1", None))]  # fmt: skip


NO_SEEDS = [u32(1, 2, 3), u32([1, 2]), i32(1, 2), scalar(1, "uint32")]


RANDOM = [
    Row("split_random_seed", split,
        [sample(SEED, 1), sample(SEED), sample(u32(0, 0), 5), sample(SEED, n=np.int64(3)), sample(SEED, 0)],
        "ModifyRandomSeed", "modified_seed", adds=2, tolerance=0,
        bad=[*(bad(ValueError, r"expected a seed, a uint32 tensor of shape \(2,\)", seed) for seed in NO_SEEDS),
             bad(ValueError, "`n` is -1; expected 0 or more seeds", SEED, -1),
             bad(TypeError, r"^split_random_seed: `n` must be an integer; got 2\.0 \(float\)", SEED, 2.0)]),
    Row("random_uniform", lambda seed, shape, low, high, *dtype: np.full(shape, low, float),
        [sample(SEED, (2, 3), 0.25, 0.25, dtype="float32"), sample(SEED, [], -3, -3, None, dtype="float32"),
         sample(SEED, (np.int64(4),), 0.5, 0.5, popxl.float16, dtype="float16")],
        "RandomUniform", "random_uniform_out",
        bad=[*(bad(ValueError, "expected a seed, a uint32 tensor", seed, (2,)) for seed in NO_SEEDS),
             bad(ValueError, r"`shape` is \(2, -1\); expected sizes of 0 or more", SEED, (2, -1)),
             bad(TypeError, r"^random_uniform: `shape` must be a sequence of integers; got 2 \(int\)", SEED, 2),
             bad(TypeError, "`dtype` must be a popxl dtype", SEED, (2,), 0, 1, np.float32),
             bad(TypeError, "^random_uniform: `low` must be a number; got None", SEED, (2,), None),
             bad(TypeError, "^random_uniform: `high` must be a number; got '1'", SEED, (2,), 0, "1"),
             bad(ValueError, r"`dtype` is .*int32; expected popxl\.float32, popxl\.float16 or popxl\.bf",
                 SEED, (2,), 0, 1, popxl.int32)]),
    Row("random_normal", lambda seed, shape, mean, std, *dtype: np.full(shape, mean, float),
        [sample(SEED, (2, 3), 1.5, 0.0, dtype="float32"), sample(SEED, (), 2, 0, None, dtype="float32"),
         sample(SEED, (3, 0), -1, 0, popxl.float16, dtype="float16"),
         sample(SEED, (3, 4), -1, 0, popxl.bfloat16, dtype="bfloat16")],
        "RandomNormal", "random_normal_out",
        bad=[*(bad(ValueError, "expected a seed, a uint32 tensor", seed, (2,)) for seed in NO_SEEDS),
             bad(TypeError, r"^random_normal: `shape` must hold integers; got 2\.0 \(float\)", SEED, (2.0,)),
             bad(TypeError, "^random_normal: `mean` must be a number; got '0'", SEED, (2,), "0"),
             bad(TypeError, "^random_normal: `std` must be a number; got None", SEED, (2,), 0, None),
             bad(ValueError, r"`dtype` is .*float8_143; expected popxl\.float32", SEED, (2,), 0, 1,
                 popxl.float8_143)]),
    Row("dropout", dropout,
        [*(seeded(values(d, shape), p) for d in FLOATS.split() for shape in ((3, 5), (2, 3, 4)) for p in (0.5, 0.3)),
         seeded(X, 0), seeded(X, 0.999), seeded(X, np.float32(0.25)), seeded(scalar(1.5), 0.5),
         sample(X, u32(0, 0), p=0.1)],
        "Dropout", "dropout_out", differentiable=(0,), keeps=1, bad=probabilities("p", X, SEED)),
    Row("shaped_dropout", shaped_dropout,
        [*(seeded(values(d, (8, 2)), [8, 1], 0.5) for d in FLOATS.split()), seeded(X, (3,), 0.4), seeded(X, (), 0.5),
         seeded(X, (np.int32(1), 3), 0.3), seeded(X, (2, 3), 0.0), sample(X, u32(1, 0), shape=(2, 3), ratio=0.7)],
        "ShapedDropout", "shapeddropout_out", differentiable=(0,), keeps=1,
        bad=[*probabilities("ratio", X, SEED, (2, 1)),
             bad(PopxlError, r"the shapes \(2, 3\) and \(2,\) do not broadcast", X, SEED, (2,), 0.5),
             bad(PopxlError, r"the `shape` \(4, 2, 3\) does not broadcast to that of `t`", X, SEED, (4, 2, 3), 0.5),
             bad(PopxlError, r"the `shape` \(1, 2, 3\) does not broadcast to", X, SEED, (1, 2, 3), 0.5),
             bad(TypeError, r"^shaped_dropout: `shape` must be a sequence of integers; got 3 \(int\)", X, SEED, 3,
                 0.5)]),
]  # fmt: skip
