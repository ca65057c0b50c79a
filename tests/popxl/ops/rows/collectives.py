"""Rows of the collectives, as they are for one replica; with several they are in test_collectives.py."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from popxl import ops
from tests.popxl.ops.rows.schema import (
    ANY,
    FLOATS,
    INTS,
    Array,
    Bad,
    Inplace,
    PopxlError,
    Row,
    Sample,
    X,
    Y,
    bad,
    f32,
    i32,
    over,
    sample,
    scalar,
    values,
)

MEANING: dict[str, Callable[[list[Array]], Array]] = {
    "add": sum,
    "mean": lambda xs: np.trunc(sum(xs) / len(xs)) if xs[0].dtype.kind in "iu" else sum(xs) / len(xs),
    "mul": lambda xs: functools.reduce(np.multiply, xs),
    "min": lambda xs: functools.reduce(np.minimum, xs),
    "max": lambda xs: functools.reduce(np.maximum, xs),
    "and": lambda xs: np.all([x != 0 for x in xs], axis=0),
    "or": lambda xs: np.any([x != 0 for x in xs], axis=0),
    "square_add": lambda xs: sum(x * x for x in xs),
}
"""What is computed, of the values of all members."""

UNKNOWN: list[Bad] = [
    bad(ValueError, f"`op` is {name!r}; expected one of 'add', 'mean', 'mul', 'min', 'max', 'and', 'or', 'square_add'",
        X, op=name)
    for name in ("local", "sum", "", 3)
]  # fmt: skip


def reduced(xs: list[Array], op: str = "add") -> Array:
    """In the dtype of the operands: sums wrap, fractions are dropped."""
    return np.asarray(MEANING[op](xs)).astype(xs[0].dtype)


def dtypes_for(op: str) -> str:
    return "float32 float16 int32" + ("" if op == "mean" else " bool")


def trio(name: str, meaning: Callable[..., Any], **settings: Any) -> Row:
    def several(dtypes: str, n: int, op: str = "add") -> Iterator[Sample]:
        for dtype in dtypes.split():
            ts = [values(dtype, (2, 3), seed=i) for i in range(n)]
            # No differences where a gradient is refused: those of results that are stated are not asked for.
            yield sample(ts, ipus=list(range(n)), op=op, expect=None if op == "add" else meaning(ts, op=op))

    samples = [*several(ANY, 3), *(s for op in MEANING for s in several(dtypes_for(op), 2, op))]
    samples += [*several("float32", 1), sample((X, X), ipus=(0, 0)), sample([scalar(1), scalar(2)], [1, 0])]
    samples += [sample([f32(60000.0), f32(3)], ipus=[0, 1]), sample([i32(2**30), i32(2**30)], ipus=[1, 0])]
    return Row(name, meaning, samples, "AllReduce", "all_reduce_out_0 all_reduce_out_1 all_reduce_out_2", keeps=0,
        colocated=False, differentiable=(0, 1, 2), bad=[
            bad(ValueError, "`op` is 'local'", [X, X], [0, 1], "local"),
            bad(ValueError, rf"{name}: `ipus` is \(0,\), for 2 tensors", [X, X], [0]),
            bad(ValueError, rf"{name}: The IPU of .* is not known.*Say in `ipus`", [X, X]),
            bad(TypeError, "`ipus` must hold integers", [X, X], [0, 1.5]),
            bad(PopxlError, "there are no tensors", [], []),
            bad(PopxlError, r"one shape and dtype; there are f32\[2, 3\] and f32\[3\]", [X, Y], [0, 1]),
            bad(PopxlError, r"one shape and dtype; there are f32\[2, 3\] and i32\[2, 3\]", [X, INTS], [0, 1]),
            bad(TypeError, r"`ts` must be a list of tensors", X, [0]),
            bad(TypeError, r"`ts\[1\]` must be a Tensor; got 3", [X, 3], [0, 1])], **settings)  # fmt: skip


def summed(ts: list[Array], ipus: Any = None, op: str = "add") -> list[Array]:
    return [reduced(ts, op)] * len(ts)


FLAT = values("float32", (5,))
EVERY_OP = [s for op in MEANING for s in over(dtypes_for(op), (2, 3), op=op)]

COLLECTIVES = [
    trio("all_reduce", summed),
    trio("all_reduce_identical_inputs", lambda ts, ipus=None, op="add": list(ts), steps=True),
    trio("all_reduce_identical_grad_inputs", summed, steps=True),
    Row("replicated_all_reduce", lambda t, op="add": reduced([t], op),
        [*over(ANY, (2, 3)), *EVERY_OP, sample(X, "mean"), *over("float32", ())],
        "ReplicatedAllReduce", "{0}_all_reduce", refused=True,
        inplace=Inplace("replicated_all_reduce_", "ReplicatedAllReduceInplace", "{0}_all_reduce"),
        bad=[*UNKNOWN, bad(TypeError, "`group` must be a ReplicaGrouping, the name of an axis", X, "add", 3)]),
    Row("assert_replicated", lambda t: t, [*over(ANY, (2, 3)), *over("float32", ())],
        "AssertReplicated", "{0}_replicated", differentiable=(0,), keeps=0,
        bad=[bad(TypeError, "`group` must be a ReplicaGrouping, the name of an axis", X, 3)]),
    Row("replicated_reduce_scatter", lambda t, op="add", **sharding: reduced([t], op).ravel(),
        [*over(ANY, (2, 3)), *EVERY_OP, *over("float32", ())],
        "ReplicatedReduceScatter", "{0}_reduce_scattered", refused=True, bad=UNKNOWN),
    Row("replicated_all_gather",
        lambda t, axis=0, group=None, output_shape="auto": t[None] if output_shape == "new_axis" or not t.ndim else
        t.ravel() if output_shape == "meta_shape" else t,
        [*over(ANY, (2, 3)), *over(FLOATS, ()), *over("float32", (2, 3, 4), axis=1), *over("float32", (2, 3), axis=-1),
         *(s for shape in ("concat", "new_axis", "meta_shape") for s in over(FLOATS, (2, 3), output_shape=shape)),
         sample(X, np.int64(1)), *over("float32", (), output_shape="new_axis"), *over("float32", (2,), axis=7,
         output_shape="new_axis"), *over("float32", (), axis=-1)],
        "Reshape ReplicatedAllGather Reshape", "{0}_reshaped_all_gathered_reshaped", adds=3, differentiable=(0,),
        keeps=0,
        bad=[bad(ValueError, "`axis` must be an integer; got 1.5", X, 1.5),
             bad(ValueError, "`axis` must be an integer; got None", X, None),
             bad(ValueError, "`output_shape` is 'stack'; expected one of 'new_axis', 'concat', 'meta_shape', 'auto'", X,
                 output_shape="stack"),
             bad(PopxlError, "replicated_all_gather: axis 2 does not exist in a tensor of rank 2", X, 2)]),
    Row("replica_sharded_slice", np.ravel,
        [*over(ANY, (2, 3)), *over(FLOATS, ()), *over("float32", (5,))],
        "ReplicatedReduceScatter Reshape", "{0}_sharded_slice_reshaped", adds=2, differentiable=(0,), keeps=0,
        build=lambda t, group=None: ops.flatten(ops.collectives.replica_sharded_slice(t, group)),
        bad=[bad(TypeError, "`group` must be a ReplicaGrouping", X, [0, 1])]),
    Row("replicated_slice", lambda t, axis=0: np.squeeze(t, axis) if t.shape[axis] == 1 else t,
        [*over(ANY, (2, 3)), *over("float32", (2, 3, 4), axis=1), *over("float32", (2, 3), axis=-1),
         *over("float32", (1,)), *over("float32", (2, 1, 3), axis=1), *over("float32", (2, 3, 1), axis=-1),
         sample(FLAT, np.int32(0))],
        "Reshape ReplicatedReduceScatter Reshape", "{0}_reshaped_replicated_slice_reshaped", adds=3,
        differentiable=(0,), keeps=0,
        bad=[bad(TypeError, "`axis` must be an integer", X, 1.5), bad(PopxlError, "axis 2 does not exist", X, 2),
             bad(PopxlError, "axis 1 does not exist in a tensor of rank 1", FLAT, 1)]),
    Row("replicated_all_to_all", lambda t, split_axis=0, concat_axis=0: t,
        [*over(ANY, (2, 3)), *over("float32", (2, 3, 4), split_axis=1), *over("float32", (2, 3), concat_axis=-1),
         *over("float32", (3, 2, 4), split_axis=2, concat_axis=1), sample(FLAT, np.int32(0))],
        "Reshape ReplicatedAllToAll Reshape", "{0}_reshaped_all_to_all_reshaped", adds=3, differentiable=(0,), keeps=0,
        bad=[bad(TypeError, "`split_axis` must be an integer", X, 1.5), bad(PopxlError, "axis 2 does not exist", X, 2),
             bad(TypeError, "`concat_axis` must be an integer", X, 0, "0"), bad(TypeError, "`t` must be a Tensor", 3),
             bad(PopxlError, "axis 1 does not exist in a tensor of rank 1", FLAT, 0, 1),
             bad(ValueError, r"axis 0 of `t`, f32\[\], cannot be cut into 1 equal parts", scalar(1)),
             bad(TypeError, "`group` must be a ReplicaGrouping", X, 0, 0, [0, 1])]),
    Row("replicated_shift", lambda t, distance=1: t,
        [*over(ANY, (2, 3)), *over("float32", (2, 3), distance=-2), *over("float32", ()), sample(FLAT, np.int32(0))],
        "ReplicatedShift", "{0}_shifted", differentiable=(0,), keeps=0,
        bad=[bad(TypeError, "`distance` must be an integer", X, 1.5), bad(TypeError, "`t` must be a Tensor", 3),
             bad(TypeError, "`group` must be a ReplicaGrouping", X, 1, [0, 1])]),
]  # fmt: skip
