"""Rows of ops that sort, search and count; and of the running sum."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.popxl.ops.rows.schema import (
    FLOATS,
    NUMBERS,
    SPECIALS,
    Array,
    PopxlError,
    Row,
    X,
    bad,
    f16,
    f32,
    i32,
    over,
    rule,
    sample,
    scalar,
    torch_function,
    u32,
    values,
)

INTEGERS = "int32 uint32 int8 uint8 int16 uint16"
ENDS = [np.array([info.min, info.max, 0, info.max, info.min], info.dtype) for info in map(np.iinfo, INTEGERS.split())]
NO_AXIS = [
    bad(PopxlError, "axis 2 does not exist in a tensor of rank 2", X, 2),
    bad(PopxlError, "axis -3 does not exist in a tensor of rank 2", X, -3),
    bad(PopxlError, "axis 0 does not exist in a tensor of rank 0", scalar(1), 0),
    bad(TypeError, "`dim` must be an integer; got 0.0", X, 0.0),
    bad(TypeError, "`dim` must be an integer; got None", X, None),
]


def search(name: str, which: str) -> Row:
    """argmax or argmin: NumPy's, which picks the first of several, too."""

    def meaning(t: Array, dim: int = 0, keepdim: bool = False) -> Array:
        return getattr(np, name)(t, axis=dim, keepdims=keepdim).astype(np.int32)

    ties = f32([1, 3, 3, 1], [7, 7, 0, 0])
    samples = [*over(f"{FLOATS} {INTEGERS}", (2, 3, 4)), *over("float32 int8", (2, 3, 4), dim=1, keepdim=True),
               *over("float32", (2, 3, 4), dim=-1), *over("float32", (2, 3, 4), dim=-3, keepdim=True),
               sample(ties, 0), sample(ties, -1, True), sample(f32(4)), sample(f32(0.0, -0.0, 0.0)),
               *map(sample, ENDS), sample(f32(-np.inf, np.inf, np.inf, -np.inf)), sample(SPECIALS)]  # fmt: skip
    # torch has no opinion on which of several is picked, and takes other arguments where none are given.
    samples = [s if s.attributes else sample(*s.operands, torch=False) for s in samples]
    return Row(name, meaning, samples, f"Arg{which}", f"{name}_out", bad=NO_AXIS, torch=torch_argument(name))


def torch_argument(name: str) -> Any:
    function = torch_function(name)
    return lambda t, dim, keepdim=False: function(t, dim, keepdim).int()


def topk(t: Array, k: int, axis: int, largest: bool, sorted: bool, memory: Any = None) -> list[Array]:
    """By Python's sort: of equal elements the first comes first, and NaN is larger than all others."""
    lines = np.moveaxis(t, axis, -1)
    places = np.zeros((*lines.shape[:-1], k), np.int32)
    for at in np.ndindex(lines.shape[:-1]):
        order = [(np.isnan(x), 0 if np.isnan(x) else x.item()) for x in lines[at]]
        keys = [tuple(-float(part) if largest else float(part) for part in key) for key in order]
        places[at] = np.lexsort(np.array(keys).T[::-1])[:k]
    return [np.moveaxis(a, -1, axis) for a in (np.take_along_axis(lines, places, -1), places)]


def counted(t: Array, levels: Any, absolute_of_input: bool) -> Array:
    """By going through the bins. NaN is in the last."""
    numbers = np.abs(t) if absolute_of_input else t
    bounds = [-np.inf, *levels, np.inf]
    counts = [np.sum((low <= numbers) & (numbers < high)) for low, high in zip(bounds, bounds[1:], strict=False)]
    counts[-1] += np.sum(np.isnan(numbers) | (numbers == np.inf))
    return np.array(counts, np.uint32)


SPREAD = f32(-10, -0.1, 0.01, 0.09, 1.1, 4, 6.9, 7, 8.0, 900)
TIES = f32([1, 3, 3, 1, 3], [0.0, -0.0, 0.0, -0.0, 1], [2, 2, 2, 2, 2])


def summed(t: Array, dim: int = 0) -> Array:
    return np.cumsum(t, axis=dim, dtype=t.dtype)


SORTING = [
    search("argmax", "Max"),
    search("argmin", "Min"),
    Row("topk", topk,
        [*over("float32", (3, 5), k=2, axis=1, largest=True, sorted=True),
         *[sample(values(d, (4, 5, 3)), 3, axis, largest, True) for d in f"{FLOATS} {INTEGERS}".split()
           for axis, largest in ((1, True), (-2, False), (0, True), (-1, False))],
         *[sample(TIES, k, -1, largest, False) for k in (0, 1, 3, 5) for largest in (True, False)],
         *[sample(a, k, 0, largest, True) for a in ENDS for k in (2, 5) for largest in (True, False)],
         *[sample(a, 7, 0, largest, True, 0.5) for a in (SPECIALS, -SPECIALS, f16(*SPECIALS))
           for largest in (True, False)],
         sample(f32(5), 1, 0, True, True)],
        "TopK", "topk_out_value topk_out_indices", differentiable=(0,), steps=True, keeps=1,
        bad=[bad(PopxlError, r"`k` is 4; expected 0 to 3, the size of dimension -1\..*`t` is f32\[2, 3\]",
                 X, 4, -1, True, True),
             bad(PopxlError, "`k` is -1", X, -1, 0, True, True),
             bad(PopxlError, "axis 2 does not exist in a tensor of rank 2", X, 1, 2, True, True),
             bad(PopxlError, "axis 0 does not exist in a tensor of rank 0", scalar(1), 1, 0, True, True),
             bad(TypeError, "`k` must be an integer; got 1.0", X, 1.0, 0, True, True),
             bad(TypeError, "`axis` must be an integer; got None", X, 1, None, True, True)]),
    Row("histogram", counted,
        [sample(SPREAD, [0.1, 3.1, 7.0], False, expect=u32(4, 1, 2, 3)),
         sample(SPREAD, (0.1, 3.1, 7.0), True, expect=u32(2, 2, 2, 4)),
         sample(f32(0, 1, 1.5, 2, 3, 3.5, 4, 4.5), [1, 2, 3, 4], False, expect=u32(1, 2, 1, 2, 2)),
         sample(values("float32", (5, 7)), [-1.5, 0, 0.25], False),
         *over("float16 bfloat16", (2, 3, 5), levels=np.array([0.5, 1]), absolute_of_input=True),
         sample(scalar(1), [1], False), sample(X, [], True), sample(np.zeros((0, 3), np.float32), [1], True),
         sample(f16(0.1, 0.2), [0.1, 0.2], False, expect=u32(0, 1, 1)),  # levels are rounded as the elements are
         sample(SPECIALS, [-2, 0, 1.5], False), sample(SPECIALS, [0, 1.5, np.inf], True),
         sample(f16(*SPECIALS), [1e6], True)],
        "Histogram", "histogram_out",
        bad=[bad(ValueError, r"have to increase from each to the next; got \(1.0, 1.0\)", X, [1, 1], False),
             bad(ValueError, "have to increase", X, [0, 2, 1], True),
             bad(ValueError, "have to increase", X, [0, np.nan], True),
             bad(PopxlError, "only tensors of float16, bfloat16 and float32 are counted.*`t` is i32",
                 i32(1, 2), [1], False),
             bad(TypeError, "`levels` must be a sequence of numbers; got 1.5", X, 1.5, False),
             bad(TypeError, "`levels` must be a sequence of numbers", X, ["low"], False)]),
    Row("cumsum", summed,
        [*over(f"{NUMBERS} int16", (4, 3)), *(over("float32", (2, 3, 4), dim=dim)[0] for dim in (0, 1, 2, -1, -3)),
         sample(f32([1, 2, 3], [4, 5, 6]), -1, expect=f32([1, 3, 6], [4, 9, 15])),
         sample(f32(1, np.inf, 2, -np.inf, 3)), sample(f32([1, np.nan], [2, 3]), 1),
         *over("float16", (3, 100), dim=1), sample(np.full(5000, 0.25, np.float16)),  # the sum is beyond its integers
         sample(f32(7)), *map(sample, ENDS)],
        "CumSum", "cumsum_out", adds=2, differentiable=(0,), keeps=0, bad=NO_AXIS, tolerance=1e-5,
        rules=[rule(f32([1, 2, 3], [4, 5, 6]), -1, g=f32([1, 10, 100], [2, 3, 4]),
                    gives=(f32([111, 110, 100], [9, 7, 4]),))],
        torch=lambda t, dim=0: torch_function("cumsum")(t, dim, dtype=t.dtype)),
]  # fmt: skip
