"""The collectives on several replicas: what each of them gets, forward and backward, in every way replicas can run.

Each case is run for each grouping, on a device for each replica and on one device for all. It is compared with what it
means in NumPy, and the two ways with each other, bit by bit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.errors import PopxlError
from popxl.op import BetweenReplicas, OpKind
from popxl.ops.collectives import CommGroup, CommGroupType
from popxl.ops.collectives.collectives import OP_MAP, members, to_collective_op
from popxl.transforms import autodiff
from runtime.targets.devices import Device
from tests.devices import a_device_each, one_device
from tests.popxl.ops.rows.collectives import reduced
from tests.popxl.ops.rows.schema import values

c = ops.collectives
Array = np.ndarray
Groups = list[list[int]]


@pytest.fixture(params=[one_device, a_device_each], ids=["one device", "a device each"])
def device(request: pytest.FixtureRequest) -> Callable[[int], Device]:
    """The device for so many replicas."""
    return request.param


def own(ir: popxl.Ir, data: Array) -> popxl.Variable:
    """A variable with a row of `data` for each replica."""
    return popxl.variable(data, replica_grouping=ir.replica_grouping(group_size=1), name="x")


def store(t: popxl.Tensor) -> popxl.DeviceToHostStream:
    """Send a tensor to the host; a shard as the numbers that it has."""
    t = ops.reshape(t, t.shape) if t.meta_shape else t
    stream = popxl.d2h_stream(t.shape, t.dtype)
    ops.host_store(stream, t)
    return stream


def run(ir: popxl.Ir, device: Callable[[int], Device], *streams: popxl.DeviceToHostStream) -> list[Array]:
    """What is sent, by all replicas."""
    with popxl.Session(ir, device(ir.replication_factor)) as session:
        outputs = session.run()
        return [np.asarray(outputs[stream]) for stream in streams]


# What a case says ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A collective and its operand, one value for each replica.

    `meaning(xs, rank)` is the result for one member of a group, of the values of all members; `gradient(gs, rank)` that
    of its operand, of the gradients of their results, unless autodiff refuses.
    """

    name: str
    op: Callable[[popxl.Tensor, Any], popxl.Tensor]
    shape: tuple[int, ...]
    meaning: Callable[[Sequence[Array], int], Array]
    gradient: Callable[[Sequence[Array], int], Array] | None = None
    dtype: str = "float32"
    same: bool = False  # whether the operand is the same on all replicas, and shared by them

    @property
    def has_gradient(self) -> bool:
        return self.gradient is not None and self.dtype.startswith("float")

    def data(self, count: int) -> Array:
        data = values(self.dtype, (count, *self.shape))
        return np.broadcast_to(data[:1], data.shape) if self.same else data


def chunk(x: Array, size: int, rank: int) -> Array:
    """One of `size` chunks of an array; zeros behind its end."""
    length = -(-x.size // size)
    return np.append(x.ravel(), np.zeros(length * size - x.size, x.dtype))[rank * length :][:length]


def part(x: Array, size: int, rank: int, axis: int) -> Array:
    """One of `size` slices along an axis."""
    return np.split(x, size, axis)[rank]


def joined(xs: Sequence[Array], shape: tuple[int, ...]) -> Array:
    """Shards, put together."""
    return np.concatenate(xs)[: np.prod(shape, dtype=int)].reshape(shape)


def dropped(x: Array, axis: int) -> Array:
    """Without an axis of length 1."""
    return x.squeeze(axis) if x.shape[axis] == 1 else x


def combined(xs: Sequence[Array], op: str) -> Array:
    """A reduction, of floats in double precision and of integers in 64 bits."""
    wide = [x.astype({"f": np.float64, "i": np.int64, "u": np.uint64}.get(x.dtype.kind, x.dtype)) for x in xs]
    return reduced(wide, op).astype(xs[0].dtype)


def all_reduce(op: Any, dtype: str = "float32", shape: tuple[int, ...] = (2, 3), same: bool = False) -> Case:
    return Case(
        f"all_reduce {op}",
        lambda t, group: c.replicated_all_reduce(t, op, group),
        shape,
        lambda xs, rank: combined(xs, op),
        dtype=dtype,
        same=same,
    )


def reduce_scatter(op: Any, dtype: str = "float32", shape: tuple[int, ...] = (2, 3), sharded: bool = False) -> Case:
    return Case(
        f"reduce_scatter {op}{', sharded' if sharded else ''}",
        lambda t, group: c.replicated_reduce_scatter(t, op, group, sharded),
        shape,
        lambda xs, rank: chunk(combined(xs, op), len(xs), rank),
        dtype=dtype,
    )


def concatenated(shape: tuple[int, ...], axis: int, dtype: str = "float32", same: bool = False) -> Case:
    positive = axis % len(shape)
    return Case(
        f"all_gather on axis {axis}",
        lambda t, group: c.replicated_all_gather(t, axis, group),
        shape,
        lambda xs, rank: np.concatenate(xs, positive),
        lambda gs, rank: part(gs[rank], len(gs), rank, positive),
        dtype,
        same,
    )


def stacked(shape: tuple[int, ...], axis: int, output_shape: Any) -> Case:
    return Case(
        f"all_gather {output_shape} {axis}",
        lambda t, group: c.replicated_all_gather(t, axis, group, output_shape),
        shape,
        lambda xs, rank: np.stack(xs),
        lambda gs, rank: gs[rank][rank],
    )


def flat(shape: tuple[int, ...]) -> Case:
    return Case(
        "all_gather meta_shape, without one",
        lambda t, group: c.replicated_all_gather(t, 0, group, "meta_shape"),
        shape,
        lambda xs, rank: np.ravel(xs),
        lambda gs, rank: part(gs[rank], len(gs), rank, 0).reshape(shape),
    )


def sharded_slice(shape: tuple[int, ...], dtype: str = "float32") -> Case:
    return Case(
        "sharded_slice",
        lambda t, group: c.replica_sharded_slice(t, group),
        shape,
        lambda xs, rank: chunk(xs[rank], len(xs), rank),
        lambda gs, rank: joined(gs, shape),
        dtype,
    )


def there_and_back(shape: tuple[int, ...], dtype: str = "float32") -> Case:
    def shards(xs: Sequence[Array], rank: int) -> Array:
        return joined([chunk(x, len(xs), i) for i, x in enumerate(xs)], shape)

    return Case(
        "all_gather of a sharded_slice",
        lambda t, group: c.replicated_all_gather(c.replica_sharded_slice(t, group), group=group),
        shape,
        shards,
        shards,
        dtype,
    )


def sliced(shape: tuple[int, ...], axis: int, dtype: str = "float32") -> Case:
    positive = axis % len(shape)

    def back(gs: Sequence[Array], rank: int) -> Array:
        return np.concatenate([g.reshape(part(np.empty(shape), len(gs), 0, positive).shape) for g in gs], positive)

    return Case(
        f"slice on axis {axis}",
        lambda t, group: c.replicated_slice(t, axis, group),
        shape,
        lambda xs, rank: dropped(part(xs[rank], len(xs), rank, positive), positive),
        back,
        dtype,
    )


def exchanged(shape: tuple[int, ...], split: int, concat: int, dtype: str = "float32") -> Case:
    def meaning(split: int, concat: int) -> Callable[[Sequence[Array], int], Array]:
        return lambda xs, rank: np.concatenate([np.split(x, len(xs), split)[rank] for x in xs], concat)

    return Case(
        f"all_to_all of axis {split} to {concat}",
        lambda t, group: c.replicated_all_to_all(t, split, concat, group),
        shape,
        meaning(split, concat),
        meaning(concat, split),
        dtype,
    )


def shifted(shape: tuple[int, ...], distance: int, dtype: str = "float32") -> Case:
    def meaning(distance: int) -> Callable[[Sequence[Array], int], Array]:
        return lambda xs, rank: xs[(rank - distance) % len(xs)]

    return Case(
        f"shift by {distance}",
        lambda t, group: c.replicated_shift(t, distance, group),
        shape,
        meaning(distance),
        meaning(-distance),
        dtype,
    )


CASES = [
    *(all_reduce(op, dtype) for op in OP_MAP for dtype in ("float32", "int32")),
    *(all_reduce(op, "float16", (5,)) for op in ("add", "mean", "mul", "max", "square_add")),
    *(all_reduce(op, dtype) for op in ("add", "mean", "max") for dtype in ("uint32", "int8")),
    *(all_reduce(op, "bool") for op in ("and", "or")),
    *(all_reduce(op, same=True) for op in OP_MAP),
    *(all_reduce(op, shape=(0, 3)) for op in ("mean", "max")),
    all_reduce("add", shape=()),
    *(reduce_scatter(op) for op in OP_MAP),
    *(reduce_scatter(op, dtype, (5,)) for op in ("add", "mean", "min") for dtype in ("float16", "int32")),
    reduce_scatter("add", shape=()),
    reduce_scatter("mean", sharded=True),
    reduce_scatter("mean", shape=(0, 3)),
    *(reduce_scatter("mean", dtype, (5003,)) for dtype in ("float32", "float16")),  # in blocks, and not
    *(concatenated((3, 4, 2), axis) for axis in (0, 1, -1)),
    *(concatenated((5,), 0, dtype) for dtype in ("float16", "int32", "uint32", "bool")),
    concatenated((2, 3), 0, same=True),
    concatenated((0, 3), 1),
    stacked((2, 3), 0, "new_axis"),
    stacked((2, 3), 1, "new_axis"),
    stacked((), 0, "new_axis"),
    stacked((), 0, "concat"),
    stacked((2, 0), 0, "new_axis"),
    flat((2, 3)),
    *(sharded_slice(shape) for shape in ((2, 3), (17,), ())),
    *(sharded_slice((5,), dtype) for dtype in ("float16", "int32", "bool")),
    *(there_and_back(shape) for shape in ((2, 3), (17,), (0, 3))),
    *(sliced(shape, axis) for shape, axis in (((8, 2), 0), ((3, 8, 2), 1), ((3, 2, 16), -1), ((16, 5, 3), 0))),
    *(sliced((8,), 0, dtype) for dtype in ("float16", "int32", "bool")),
    *(exchanged((8, 3, 16), split, concat) for split, concat in ((0, 0), (0, 1), (2, 0), (-1, -1), (0, 2))),
    *(exchanged((16, 3), 0, 1, dtype) for dtype in ("float16", "int32", "bool")),
    *(shifted((3, 2), distance) for distance in (0, 1, -1, 2, 5, -8, 2**31 + 1, -(2**31))),
    *(shifted(shape, 1, dtype) for shape in ((), (5,)) for dtype in ("float16", "int32", "bool")),
]

GROUPINGS = {
    "4 of 4": (4, 1, 4),
    "2 next to each other of 4": (4, 1, 2),
    "2 apart of 4": (4, 2, 2),
    "1 of 4": (4, 1, 1),
    "8 of 8": (8, 1, 8),
    "2 apart of 8": (8, 2, 2),
    "4 apart of 8": (8, 2, 4),
}


def groups_of(count: int, stride: int, size: int) -> Groups:
    """The replicas of each group, as the specification numbers them."""
    block = stride * size
    return [[(g // stride) * block + g % stride + i * stride for i in range(size)] for g in range(count // size)]


def test_groups() -> None:
    assert groups_of(4, 1, 4) == [[0, 1, 2, 3]]
    assert groups_of(4, 1, 2) == [[0, 1], [2, 3]]
    assert groups_of(4, 2, 2) == [[0, 2], [1, 3]]
    assert groups_of(8, 2, 2) == [[0, 2], [1, 3], [4, 6], [5, 7]]


def of_all_replicas(groups: Groups, meaning: Callable[[Sequence[Array], int], Array], xs: Array) -> Array:
    """What every replica gets, where `meaning` says what the members of a group get."""
    results = {}
    for group in groups:
        for rank, replica in enumerate(group):
            results[replica] = meaning([xs[r] for r in group], rank)
    return np.stack([results[r] for r in range(len(xs))])


def results_of(count: int, stride: int, size: int, device: Callable[[int], Device]) -> list[Array]:
    """All cases in one program: for each its results and, if it has one, its gradient."""
    ir = popxl.Ir(replication=count)
    group = None if size == count else ir.replica_grouping(stride, size)
    streams = []
    with ir.main_graph, popxl.in_sequence():
        for case in CASES:
            data = case.data(count)
            t = popxl.variable(data[0], name="x") if case.same else own(ir, data)
            y = case.op(t, group)
            streams.append(store(y))
            if case.has_gradient:
                graph = ir.create_graph(case.op, t, group)
                info = autodiff(graph)
                assert len(info.graph.inputs) == 1, "a gradient reads nothing but the gradient of the result"
                (dt,) = ops.call(info.graph, like(y, own(ir, gradients_for(case, y.shape, count))))
                assert dt.spec == t.spec
                streams.append(store(dt))
    return run(ir, device, *streams)


def like(y: popxl.Tensor, g: popxl.Tensor) -> popxl.Tensor:
    """A tensor that is a shard, if `y` is one."""
    return ops.add(ops.init(y.shape, y.dtype, meta_shape=y.meta_shape), g) if y.meta_shape else g


def gradients_for(case: Case, shape: tuple[int, ...], count: int) -> Array:
    return values(case.dtype, (count, *shape), seed=1)


@pytest.mark.thorough(but_each=6)
@pytest.mark.parametrize("grouping", [g for g in GROUPINGS if g not in ("2 apart of 4", "8 of 8")])
def test_what_every_replica_gets(grouping: str) -> None:
    count, stride, size = GROUPINGS[grouping]
    groups = groups_of(count, stride, size)
    one, each = (results_of(count, stride, size, device) for device in (one_device, a_device_each))
    found = zip(one, each, strict=True)

    def compare(results: tuple[Array, Array], expected: Array, what: str, ulp: int = 0) -> None:
        for actual in results:
            assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape), what
            near = {"float32": 2e-6, "float16": 1e-3}.get(actual.dtype.name, 0)
            np.testing.assert_allclose(actual, expected, rtol=near, atol=near, err_msg=what)
        if expected.dtype.kind == "f":
            np.testing.assert_array_max_ulp(*results, maxulp=ulp)

    for case in CASES:
        what, results = f"{case.name} of {case.dtype}{list(case.shape)}", next(found)
        # One device may fuse a square with the sum, and round once.
        fused = 1 if "square_add" in case.name else 0
        compare(results, of_all_replicas(groups, case.meaning, case.data(count)), what, fused)
        if case.gradient is not None and case.has_gradient:
            gs = gradients_for(case, results[0].shape[1:], count)
            compare(next(found), of_all_replicas(groups, case.gradient, gs), f"gradient of {what}")
    assert next(found, None) is None


# The examples of the specification ----------------------------------------------------------------------------------

X = np.float32([[r + 1, 10 * (r + 1)] for r in range(4)])
Y = np.arange(5, dtype=np.float32) + 10 * np.arange(4, dtype=np.float32)[:, None]


@pytest.mark.parametrize(
    ("stride", "size", "sums", "gathered", "scattered"),
    [
        (1, 4, [[10, 100]] * 4, [[1, 10, 2, 20, 3, 30, 4, 40]] * 4, [[60, 64], [68, 72], [76, 0], [0, 0]]),
        (
            1,
            2,
            [[3, 30]] * 2 + [[7, 70]] * 2,
            [[1, 10, 2, 20]] * 2 + [[3, 30, 4, 40]] * 2,
            [[10, 12, 14], [16, 18, 0], [50, 52, 54], [56, 58, 0]],
        ),
        (
            2,
            2,
            [[4, 40], [6, 60]] * 2,
            [[1, 10, 3, 30], [2, 20, 4, 40]] * 2,
            [[20, 22, 24], [40, 42, 44], [26, 28, 0], [46, 48, 0]],
        ),
    ],
)
def test_worked_examples(device: Any, stride: int, size: int, sums: Any, gathered: Any, scattered: Any) -> None:
    ir = popxl.Ir(replication=4)
    group = ir.replica_grouping(stride, size)
    with ir.main_graph, popxl.in_sequence():
        x, y = own(ir, X), own(ir, Y)
        made = [
            c.replicated_all_reduce(x, "add", group),
            c.replicated_all_gather(x, group=group),
            c.replicated_reduce_scatter(y, "add", group),
            c.replicated_all_reduce_(x, group=group),
            x,
        ]
        found = run(ir, device, *map(store, made))
    for result, expected in zip(found, [sums, gathered, scattered, sums, sums], strict=True):
        np.testing.assert_array_equal(result, expected)


def test_worked_examples_over_all_replicas(device: Any) -> None:
    ir = popxl.Ir(replication=4)
    with ir.main_graph, popxl.in_sequence():
        x, y, w = own(ir, X), own(ir, Y), popxl.variable(Y[0])
        made = [
            (c.replicated_all_reduce(x, "mean"), [[2.5, 25]] * 4),
            (c.replicated_all_reduce(x, "square_add"), [[30, 3000]] * 4),
            (c.replicated_all_reduce(x, "mul"), [[24, 240000]] * 4),
            (c.replicated_all_gather(x, output_shape="new_axis"), [X] * 4),
            (c.replica_sharded_slice(y), [[0, 1], [12, 13], [24, 0], [0, 0]]),
            (c.replicated_all_gather(c.replica_sharded_slice(w)), [Y[0]] * 4),
            (c.replicated_slice(popxl.constant(X)), X),
        ]
        for result, (_, expected) in zip(run(ir, device, *(store(t) for t, _ in made)), made, strict=True):
            np.testing.assert_array_equal(result, expected)


def test_devices_talk_in_their_own_words() -> None:
    """Sums are not gathered to be added up; and a group of all replicas is nothing special."""
    ir = popxl.Ir(replication=4)
    with ir.main_graph, popxl.in_sequence():
        x = own(ir, X)
        for group in (None, ir.replica_grouping(2, 2)):
            for op in ("add", "mean", "square_add", "max"):
                store(c.replicated_all_reduce(x, op, group))
            store(c.replicated_reduce_scatter(x, "mean", group))
            store(c.replicated_all_gather(x, group=group))
            store(c.replica_sharded_slice(x, group))
    with popxl.Session(ir, a_device_each(4)) as session:
        text = session.program.text()
    counts = [text.count(f"stablehlo.{name}") for name in ("all_reduce", "reduce_scatter", "all_gather")]
    assert counts == [10, 2, 2]  # an extreme also asks who has NaN
    with popxl.Session(ir, one_device(4)) as session:
        assert not re.search("all_reduce|reduce_scatter|all_gather|collective", session.program.text())


def test_devices_send_each_other_halves() -> None:
    """The sums are computed in float32 of what was received."""
    ir = popxl.Ir(replication=2)
    with ir.main_graph, popxl.in_sequence():
        x = own(ir, np.ones((2, 5003), np.float16))
        for op in ("add", "mean", "square_add"):
            store(c.replicated_reduce_scatter(x, op))
    with popxl.Session(ir, a_device_each(2)) as session:
        text = session.program.text()
    assert [text.count(f"stablehlo.{name}") for name in ("all_to_all", "reduce_scatter")] == [2, 1]


def test_chunks_are_padded_after_the_reduction(device: Any) -> None:
    """With 0, which neither a product nor an extreme would leave alone."""
    ir = popxl.Ir(replication=4)
    with ir.main_graph, popxl.in_sequence():
        y = own(ir, -1 - Y)
        made = [c.replicated_reduce_scatter(y, op) for op in ("mul", "max", "min", "mean", "square_add", "or")]
        for result in run(ir, device, *map(store, made)):
            assert (result.ravel()[5:] == 0).all() and (result.ravel()[:5] != 0).all()


# Numbers that are easily lost ---------------------------------------------------------------------------------------


@pytest.mark.thorough(but_each=2)
def test_nobody_misses_nan_or_infinity(device: Any) -> None:
    data = np.float32([[np.nan, 1, np.inf], [2, -np.inf, 3], [4, np.nan, 5], [6, 7, -np.inf]])
    for dtype in (np.float32, np.float16):
        ir = popxl.Ir(replication=4)
        with ir.main_graph, popxl.in_sequence():
            x, group = own(ir, data.astype(dtype)), ir.replica_grouping(2, 2)
            made = [f(x, op, g) for op in ("min", "max", "add", "mean") for g in (None, group)
                    for f in (c.replicated_all_reduce, c.replicated_reduce_scatter)]  # fmt: skip
            found = run(ir, device, *map(store, made))
        with np.errstate(invalid="ignore"):
            every, odd = ([data[:]] * 4, [data[r % 2 :: 2] for r in range(4)])
            expected = []
            for f in (np.min, np.max, np.sum, np.mean):
                for xs, size in ((every, 4), (odd, 2)):
                    whole = np.stack([f(x, axis=0) for x in xs])
                    ranks = [r if size == 4 else r // 2 for r in range(4)]
                    expected += [whole, np.stack([chunk(w, size, rank) for w, rank in zip(whole, ranks, strict=True)])]
        for result, wish in zip(found, expected, strict=True):
            np.testing.assert_array_equal(result, wish)


def test_float16_is_summed_in_float32(device: Any) -> None:
    """Partial sums beyond the largest float16, and terms below its precision."""
    data = np.float16([[60000, 2048], [60000, 1], [-60000, 1], [-60000, -2048]])
    ir = popxl.Ir(replication=4)
    with ir.main_graph, popxl.in_sequence():
        x = own(ir, data)
        made = [c.replicated_all_reduce(x), c.replicated_all_reduce(x, "mean"), c.replicated_reduce_scatter(x)]
        total, mean, scattered = run(ir, device, *map(store, made))
    np.testing.assert_array_equal(total, np.float16([[0, 2]] * 4))
    np.testing.assert_array_equal(mean, np.float16([[0, 0.5]] * 4))
    np.testing.assert_array_equal(scattered, np.float16([[0], [2], [0], [0]]))


def test_integers_do_not_pass_through_floats(device: Any) -> None:
    data = np.array([[2**24 + 1, -7], [1, 0], [0, 0], [0, 0]], np.int32)
    ir = popxl.Ir(replication=4)
    with ir.main_graph, popxl.in_sequence():
        x, bytes_ = own(ir, data), own(ir, np.full((4, 1), 100, np.int8))
        made = [c.replicated_all_reduce(x), c.replicated_all_reduce(x, "mean"), c.replicated_all_reduce(bytes_, "mean")]
        total, mean, narrow = run(ir, device, *map(store, made))
    np.testing.assert_array_equal(total, [[2**24 + 2, -7]] * 4)
    np.testing.assert_array_equal(mean, [[2**22, -1]] * 4)
    np.testing.assert_array_equal(narrow, [[100]] * 4)


@pytest.mark.parametrize("float8", [popxl.float8_143, popxl.float8_152], ids=lambda dtype: dtype.name)
def test_float8_is_moved_byte_by_byte(device: Any, float8: Any) -> None:
    """Every bit pattern, NaN included."""
    data = np.stack([np.roll(np.arange(256, dtype=np.uint8), r) for r in range(4)])
    ir = popxl.Ir(replication=4)
    with ir.main_graph, popxl.in_sequence():
        x = own(ir, data.view(float8.as_numpy()))
        w = popxl.variable(data[0, :255].view(float8.as_numpy()))
        shard = c.replica_sharded_slice(w)
        made = [
            (c.replicated_all_gather(x), [data.ravel()] * 4),
            (
                c.replicated_all_gather(x, 0, ir.replica_grouping(2, 2), "new_axis"),
                [data[r % 2 :: 2] for r in range(4)],
            ),
            (c.replicated_slice(x), [data[r, 64 * r : 64 * r + 64] for r in range(4)]),
            (shard, np.append(data[0, :255], np.uint8(0)).reshape(4, 64)),
            (c.replicated_all_gather(shard), [data[0, :255]] * 4),
        ]
        for result, (_, expected) in zip(run(ir, device, *(store(t) for t, _ in made)), made, strict=True):
            np.testing.assert_array_equal(result.view(np.uint8), expected)


# Shards -------------------------------------------------------------------------------------------------------------


def test_a_buffer_may_be_larger_than_a_shard(device: Any) -> None:
    """What there is too much is dropped, and its gradient is 0."""
    data = np.arange(12, dtype=np.float32).reshape(4, 3)
    ir = popxl.Ir(replication=4)
    with ir.main_graph, popxl.in_sequence():
        shard = ops.add(ops.init((3,), popxl.float32, meta_shape=(5,)), own(ir, data))
        graph = ir.create_graph(lambda t: c.replicated_all_gather(t), shard)
        info = autodiff(graph)
        (whole,) = ops.call(graph, shard)
        (back,) = ops.call(info.graph, own(ir, Y))
        assert (whole.shape, whole.meta_shape, back.spec) == ((5,), (), popxl.TensorSpec((3,), popxl.float32))
        found = run(ir, device, store(whole), store(back))
    np.testing.assert_array_equal(found[0], [[0, 1, 2, 3, 4]] * 4)
    np.testing.assert_array_equal(found[1], [Y[0, :3], [*Y[1, 3:], 0], [0] * 3, [0] * 3])


@pytest.mark.thorough(but_each=3)
@pytest.mark.parametrize("way", ["kept", "dispatched", "inlined"])
@pytest.mark.parametrize("size", [2, 4])
def test_a_sharded_optimiser_is_a_whole_one(device: Any, way: Any, size: int) -> None:
    """Two pairs of replicas, or all four, share out the momentum; the weights agree with those of plain NumPy."""
    ir = popxl.Ir(replication=4)
    ir.options.calledGraphs = way
    group = ir.replica_grouping(1, size)
    w0 = values("float32", (3, 5))

    def step(w: popxl.Tensor, m: popxl.Tensor, g: popxl.Tensor) -> popxl.Tensor:
        g_shard = c.replicated_reduce_scatter(g, "mean", group, True)
        assert g_shard.meta_shape == (3, 5)
        ops.var_updates.accumulate_moving_average_(m, g_shard, 0.75)
        w_shard = c.replica_sharded_slice(w, group)
        ops.scaled_add_(w_shard, m, b=-0.5)
        return c.replicated_all_gather(w_shard, group=group)

    length = -(-15 // size)
    data = values("float32", (3, 4, 3, 5))
    ir.num_host_transfers = 3
    with ir.main_graph, popxl.in_sequence():
        gradients = popxl.h2d_stream((3, 5), popxl.float32)
        w, m = popxl.variable(w0, name="w"), popxl.variable(np.zeros(length, np.float32), name="m")
        out = popxl.d2h_stream((3, 5), popxl.float32)
        graph = ir.create_graph(step, w, m, ops.init((3, 5), popxl.float32))
        for _ in range(3):
            site = ops.call_with_info(graph, w, m, ops.host_load(gradients))
            site.set_parent_input_modified(m)
            ops.var_updates.copy_var_update_(w, site.outputs[0])
            ops.host_store(out, w)
    with popxl.Session(ir, device(4)) as session:
        found = session.run({gradients: data})[out]
    expected, moments = np.stack([w0] * 4), np.zeros((4, 3, 5))
    for i in range(3):
        for r in range(4):
            first = r // size * size
            moments[r] = 0.75 * moments[r] + 0.25 * data[i, first : first + size].mean(axis=0)
        expected = expected - 0.5 * moments
        np.testing.assert_allclose(found[i], expected, rtol=1e-5, atol=1e-6)


# Inside of graphs ---------------------------------------------------------------------------------------------------


@pytest.mark.thorough(but_each=4)
@pytest.mark.parametrize("way", ["kept", "dispatched", "inlined"])
def test_in_calls_loops_and_branches(device: Any, way: Any) -> None:
    ir = popxl.Ir(replication=4)
    ir.options.calledGraphs = way
    pairs = ir.replica_grouping(2, 2)

    def exchange(t: popxl.Tensor) -> popxl.Tensor:
        return c.replicated_all_reduce(t * 0.5, "add", pairs) + c.replicated_all_reduce(t, "max") * 0.25

    def branch(f: Callable[[popxl.Tensor], popxl.Tensor]) -> Callable[[], popxl.Tensor]:
        return lambda: f(popxl.graph_input((2,), popxl.float32))

    with ir.main_graph, popxl.in_sequence():
        x = own(ir, X)
        graph = ir.create_graph(exchange, x)
        (once,) = ops.call(graph, x)
        (twice,) = ops.call(graph, once)
        (often,) = ops.repeat(graph, 3, x)
        yes, no = ir.create_graph(branch(exchange)), ir.create_graph(branch(lambda t: t + 1))
        taken, left = (
            ops.conditional(popxl.constant(cond), yes, no, then_inputs=[x], else_inputs=[x])[0]
            for cond in (True, False)
        )
        found = run(ir, device, *map(store, (once, twice, often, taken, left)))

    def meant(x: Array) -> Array:
        return 0.5 * (x + np.roll(x, 2, axis=0)) + 0.25 * x.max(axis=0)

    for result, expected in zip(
        found, [meant(X), meant(meant(X)), meant(meant(meant(X))), meant(X), X + 1], strict=True
    ):
        np.testing.assert_array_equal(result, expected)


def square(s: popxl.Tensor) -> popxl.Tensor:
    return s * s


def called(ir: popxl.Ir, s: popxl.Tensor) -> Callable[[popxl.Tensor], popxl.Tensor]:
    graph = ir.create_graph(square, s)
    return lambda s: c.replicated_all_gather(ops.call(graph, s)[0])


def carried(ir: popxl.Ir, s: popxl.Tensor) -> Callable[[popxl.Tensor], popxl.Tensor]:
    graph = ir.create_graph(square, s)
    return lambda s: c.replicated_all_gather(ops.repeat(graph, 1, s)[0])


def the_same_in_every_turn(ir: popxl.Ir, s: popxl.Tensor) -> Callable[[popxl.Tensor], popxl.Tensor]:
    total = ops.init(s.meta_shape, s.dtype)
    graph = ir.create_graph(lambda total, s: total + c.replicated_all_gather(s * s * 0.5), total, s)
    return lambda s: ops.repeat(graph, 2, ops.init(s.meta_shape, s.dtype), s)[0]


def gathered_in_a_branch(ir: popxl.Ir, s: popxl.Tensor) -> Callable[[popxl.Tensor], popxl.Tensor]:
    graph = ir.create_graph(lambda s: c.replicated_all_gather(s * s), s)
    nothing = ir.create_graph(lambda: ops.init((5,), popxl.float32))
    return lambda s: ops.conditional(popxl.constant(True), graph, nothing, [s])[0]


def made_in_a_branch(ir: popxl.Ir, s: popxl.Tensor) -> Callable[[popxl.Tensor], popxl.Tensor]:
    graph, same = ir.create_graph(square, s), ir.create_graph(lambda: ops.init(**s.spec))
    return lambda s: c.replicated_all_gather(ops.conditional(popxl.constant(True), graph, same, [s])[0])


@pytest.mark.parametrize("build", [called, carried, the_same_in_every_turn, gathered_in_a_branch, made_in_a_branch])
def test_gradients_of_shards_in_calls_loops_and_branches(build: Any) -> None:
    """The gradient of the gathered squares of a shard."""
    data, g = values("float32", (4, 2)), values("float32", (5,))
    ir = popxl.Ir(replication=4)
    with ir.main_graph, popxl.in_sequence():
        shard = ops.add(ops.init((2,), popxl.float32, meta_shape=(5,)), own(ir, data))
        graph = ir.create_graph(build(ir, shard), shard)
        info = autodiff(graph)
        site = ops.call_with_info(graph, shard)
        (d,) = ops.call(info.graph, popxl.constant(g), inputs_dict=info.inputs_dict(site))
        assert (d.shape, d.dtype) == (shard.shape, shard.dtype)
        (found,) = run(ir, one_device, store(d))
    np.testing.assert_allclose(found, 2 * data * np.append(g, [0] * 3).reshape(4, 2), rtol=1e-6)


def test_gradients_of_shards_are_passed_on_by_hand() -> None:
    """The gradient of a gather has no meta-shape, and the graph that made the shard takes it all the same."""
    data, g = values("float32", (4, 2)), values("float32", (5,))
    ir = popxl.Ir(replication=4)
    with ir.main_graph, popxl.in_sequence():
        shard = ops.add(ops.init((2,), popxl.float32, meta_shape=(5,)), own(ir, data))
        first, second = ir.create_graph(square, shard), ir.create_graph(lambda s: c.replicated_all_gather(s), shard)
        of_first, of_second = autodiff(first), autodiff(second)
        site = ops.call_with_info(first, shard)
        (d_square,) = ops.call(of_second.graph, popxl.constant(g))
        assert (d_square.meta_shape, site.outputs[0].meta_shape) == ((), (5,))
        (d,) = ops.call(of_first.graph, d_square, inputs_dict=of_first.inputs_dict(site))
        (found,) = run(ir, one_device, store(d))
    np.testing.assert_allclose(found, 2 * data * np.append(g, [0] * 3).reshape(4, 2), rtol=1e-6)


def test_the_gradient_of_what_is_no_shard_is_none() -> None:
    """A plain chunk that is multiplied by a shard; its gradient may be stored."""
    data = values("float32", (2, 3))
    ir = popxl.Ir(replication=2)
    with ir.main_graph, popxl.in_sequence():
        x = own(ir, data)
        shard = ops.add(ops.init((3,), popxl.float32, meta_shape=(6,)), x)
        graph = ir.create_graph(lambda x, s: c.replicated_all_gather(x * s), x, shard)
        info = autodiff(graph, grads_required=graph.inputs[:1])
        site = ops.call_with_info(graph, x, shard)
        (dx,) = ops.call(info.graph, popxl.constant(np.ones(6, np.float32)), inputs_dict=info.inputs_dict(site))
        out = popxl.d2h_stream(dx.shape, dx.dtype)
        ops.host_store(out, dx)
        (found,) = run(ir, one_device, out)
    np.testing.assert_array_equal(found, data)


def test_data_parallel_training_is_training_on_all_data(device: Any) -> None:
    """The mean of the gradients of the replicas is the gradient for the data of all."""
    data = values("float32", (4, 2, 3))
    w0 = values("float32", (3, 5))

    def loss_of(x: popxl.Tensor, w: popxl.Tensor) -> popxl.Tensor:
        return ops.mean(ops.sumsquare(ops.tanh(x @ w), axis=-1))

    def trained(replicas: int, x0: Array) -> Array:
        ir = popxl.Ir(replication=replicas)
        with ir.main_graph, popxl.in_sequence():
            x, w = own(ir, x0), popxl.variable(w0)
            graph = ir.create_graph(loss_of, x, w)
            info = autodiff(graph, grads_required=graph.inputs[1:])
            site = ops.call_with_info(graph, x, w)
            (dw,) = ops.call(info.graph, popxl.constant(1.0), inputs_dict=info.inputs_dict(site))
            ops.scaled_add_(w, c.replicated_all_reduce_(dw, "mean"), b=-0.1)
            (result,) = run(ir, device if replicas > 1 else one_device, store(w))
        return result

    alone = trained(1, data.reshape(8, 3))
    for result in trained(4, data):
        np.testing.assert_allclose(result, alone, rtol=1e-5, atol=1e-6)


# What they declare --------------------------------------------------------------------------------------------------


def kinds(graph: popxl.Graph) -> list[str]:
    return [op.op_type for op in graph.ops]


@pytest.mark.parametrize(
    ("build", "made", "name", "shape"),
    [
        (lambda t: c.replicated_all_gather(t), "Reshape ReplicatedAllGather Reshape",
         "t_reshaped_all_gathered_reshaped", (16, 8, 2)),
        (lambda t: c.replicated_all_gather(t, 2), "Transpose Reshape ReplicatedAllGather Reshape Transpose",
         "t_T_reshaped_all_gathered_reshaped_T", (4, 8, 8)),
        (lambda t: c.replicated_all_gather(t, 2, None, "new_axis"), "Reshape ReplicatedAllGather Reshape",
         "t_reshaped_all_gathered_reshaped", (4, 4, 8, 2)),
        (lambda t: c.replicated_all_gather(t, output_shape="meta_shape"), "ReplicatedAllGather", "t_all_gathered",
         (256,)),
        (lambda t: c.replicated_slice(t, 1), "Transpose Reshape ReplicatedReduceScatter Reshape Transpose",
         "t_T_reshaped_replicated_slice_reshaped_T", (4, 2, 2)),
        (lambda t: c.replicated_slice(t), "Reshape ReplicatedReduceScatter Reshape",
         "t_reshaped_replicated_slice_reshaped", (8, 2)),
        (lambda t: c.replicated_slice(ops.transpose_(t), -1),
         "TransposeInplace Transpose Reshape ReplicatedReduceScatter Reshape Transpose",
         "t_T_T_reshaped_replicated_slice_reshaped_T", (2, 8)),
        (lambda t: c.replica_sharded_slice(t), "ReplicatedReduceScatter", "t_sharded_slice", (16,)),
        (lambda t: c.replicated_reduce_scatter(t), "ReplicatedReduceScatter", "t_reduce_scattered", (16,)),
        (lambda t: c.replicated_all_gather(c.replica_sharded_slice(t)), "ReplicatedReduceScatter ReplicatedAllGather",
         "t_sharded_slice_all_gathered", (4, 8, 2)),
    ],
)  # fmt: skip
def test_footprint(build: Any, made: str, name: str, shape: tuple[int, ...]) -> None:
    ir = popxl.Ir(replication=4)
    with ir.main_graph as main:
        t = popxl.variable(np.zeros((4, 8, 2), np.float32), name="t")
        result = build(t)
    assert (kinds(main), result.name, result.shape, result.dtype) == (made.split(), name, shape, popxl.float32)
    assert len(main.tensors) == 1 + len(main.ops)


def test_what_is_sharded() -> None:
    """Elementwise ops pass it on, and so do reductions over replicas."""
    ir = popxl.Ir(replication=4)
    with ir.main_graph:
        t = popxl.variable(np.zeros((3, 5), np.float32))
        shard, other = c.replica_sharded_slice(t), c.replica_sharded_slice(ops.reshape(t, (5, 3)))
        assert shard.meta_shape == c.replicated_reduce_scatter(t, "add", None, True).meta_shape == (3, 5)
        assert c.replicated_reduce_scatter(t).meta_shape == c.replicated_all_gather(shard).meta_shape == ()
        assert c.replicated_all_reduce(ops.relu(shard) + shard).meta_shape == (3, 5)
        assert (
            c.replicated_slice(shard).meta_shape == c.replicated_all_gather(shard, 0, None, "concat").meta_shape == ()
        )
        with pytest.raises(PopxlError, match="different meta-shapes"):
            shard + other
        with pytest.raises(PopxlError, match=r"the 2 members of a group have 8 elements together.*takes 15"):
            c.replicated_all_gather(shard, group=ir.replica_grouping(1, 2))


@pytest.mark.parametrize("op", [c.replicated_all_reduce, c.replicated_reduce_scatter])
def test_reductions_refuse_gradients(op: Any) -> None:
    """Wherever one reaches them; not where none does."""
    ir = popxl.Ir(replication=4)
    with ir.main_graph:
        x = popxl.variable(np.zeros(4, np.float32))
        graph = ir.create_graph(lambda t: (op(t * 2), t * 3), x)
        with pytest.raises(PopxlError, match="a gradient reaches the op Replicated"):
            autodiff(graph)
        assert len(autodiff(graph, grads_provided=graph.outputs[1:]).graph.outputs) == 1
        beside = ir.create_graph(lambda t: ops.sum(t) + ops.sum(op(t * 2) * 3), x)  # not the only way to `t`
        with pytest.raises(PopxlError, match=r"a gradient reaches the op Replicated.*all_reduce_TP"):
            autodiff(beside)
        aside = ir.create_graph(lambda t, u: t * op(u)[0], x, x)
        with pytest.raises(PopxlError, match="a gradient reaches the op Replicated"):
            autodiff(aside)
        assert len(autodiff(aside, grads_required=aside.inputs[:1]).graph.outputs) == 1
        overwrites = ir.create_graph(lambda t: c.replicated_all_reduce_(t * 2), x)
        with pytest.raises(PopxlError, match="contains a modifying op"):
            autodiff(overwrites)


# What they refuse ---------------------------------------------------------------------------------------------------

EVERY = [
    c.replicated_all_reduce,
    c.replicated_all_reduce_,
    c.replicated_all_gather,
    c.replicated_reduce_scatter,
    c.replica_sharded_slice,
    c.replicated_slice,
]


@pytest.mark.parametrize("op", EVERY, ids=lambda op: op.__name__)
def test_groups_that_are_refused(op: Any) -> None:
    ir = popxl.Ir(replication=8)
    eight, scattered = ir.replica_grouping(1, 8), ir.replica_grouping_from_assignments([0, 0, 1, 1, 1, 1, 0, 0])
    ir.replication_factor = 4
    with ir.main_graph as main:
        t = popxl.variable(np.zeros(8, np.float32))
        with pytest.raises(ValueError, match=f"^{op.__name__}: `group` is .* and the Ir has 4 replicas"):
            op(t, group=eight)
        with pytest.raises(NotImplementedError, match=f"^{op.__name__}: .*not always the same distance apart"):
            op(t, group=scattered)
        with pytest.raises(TypeError, match=f"^{op.__name__}: `group` must be a ReplicaGrouping.*CommGroup"):
            op(t, group=CommGroup())
        with pytest.raises(TypeError, match="`t` must be a Tensor; got 3"):
            op(3)
        with ir.create_empty_graph(), pytest.raises(ValueError, match="not in graph"):
            op(t)
        assert not main.ops
    with pytest.raises(RuntimeError):
        op(t)


def test_the_op_is_judged_first() -> None:
    ir = popxl.Ir(replication=4)
    with ir.main_graph:
        t = popxl.variable(np.zeros((6, 4), np.float32))
    with ir.create_empty_graph():
        for op in (c.replicated_all_reduce, c.replicated_all_reduce_, c.replicated_reduce_scatter):
            with pytest.raises(ValueError, match="`op` is 'local'"):
                op(t, "local")
        with pytest.raises(ValueError, match="`op` is 'local'"):
            c.all_reduce([t, t], op="local")
        with pytest.raises(ValueError, match=r"axis 0 of `t`, f32\[6, 4\], cannot be cut into 4 equal slices"):
            c.replicated_slice(t)


def test_groups_that_the_program_does_not_have(device: Callable[[int], Device]) -> None:
    ir = popxl.Ir(replication=4)
    with ir.main_graph:
        c.replicated_all_reduce_(popxl.variable(np.zeros(4, np.float32)))
    ir.replication_factor = 2
    with pytest.raises(PopxlError, match=r"groups of 4 replicas that are 1 apart, and the program has 2"):
        popxl.Session(ir, device(2))


# Names and groups ---------------------------------------------------------------------------------------------------


def test_names_of_ops() -> None:
    assert list(OP_MAP) == ["add", "mean", "mul", "min", "max", "and", "or", "square_add"]
    for name, meaning in OP_MAP.items():
        assert to_collective_op(name) is meaning
    with pytest.raises(ValueError, match="`op` is 'local'; expected one of 'add', 'mean'"):
        to_collective_op("local")


@pytest.mark.parametrize(
    ("group", "count", "stride", "size"),
    [
        (CommGroup(), 6, 1, 6),
        (CommGroup(CommGroupType.All, 3), 6, 1, 6),
        (CommGroup(CommGroupType.Consecutive, 2), 6, 1, 2),
        (CommGroup(CommGroupType.Orthogonal, 2), 6, 3, 2),
        (CommGroup(CommGroupType.Orthogonal, 4), 8, 2, 4),
        (CommGroup(CommGroupType.Ungrouped, 0), 6, 1, 1),
    ],
    ids=repr,
)
def test_comm_groups(group: CommGroup, count: int, stride: int, size: int) -> None:
    grouping = group.toReplicaGrouping(count)
    assert (grouping.stride, grouping.group_size, grouping.num_groups) == (stride, size, count // size)
    again = CommGroup(grouping)
    assert (again.type, again.replicaGroupSize) == (group.type, size)
    ir = popxl.Ir(replication=count)
    with ir.main_graph:
        op = c.replicated_all_reduce(popxl.variable(1.0), group=grouping).producer
    assert op is not None and (op.attributes["stride"], op.attributes["group_size"]) == (stride, size)


def test_comm_groups_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match="6 replicas cannot form groups of 4"):
        CommGroup(CommGroupType.Consecutive, 4).toReplicaGrouping(6)
    with pytest.raises(ValueError, match="groups of 0"):
        CommGroup(CommGroupType.Orthogonal).toReplicaGrouping(6)
    ir = popxl.Ir(replication=8)
    for grouping in (ir.replica_grouping(2, 2), ir.replica_grouping_from_assignments([0, 1, 1, 0, 2, 3, 3, 2])):
        with pytest.raises(ValueError, match="neither consecutive nor orthogonal"):
            CommGroup(grouping)


# Inside of one replica ----------------------------------------------------------------------------------------------

G = [1.0, 10.0, 100.0, 1000.0]


@pytest.mark.parametrize(
    ("op", "results", "gradients"),
    [
        (c.all_reduce, [10] * 4, [1111] * 4),
        (c.all_reduce_identical_inputs, [1, 2, 3, 4], [1111] * 4),
        (c.all_reduce_identical_grad_inputs, [10] * 4, G),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_over_ipus(op: Any, results: Any, gradients: Any) -> None:
    """The worked example; and where everything is."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        xs = [popxl.variable(np.float32([i + 1]), name=f"x{i}") for i in range(4)]
        graph = ir.create_graph(lambda *ts: op(list(ts), ipus=[3, 2, 1, 0]), *xs)
        ys = ops.call(graph, *xs)
        assert kinds(graph) == ["AllReduce"] and [t.name for t in graph.outputs] == [
            f"all_reduce_out_{i}" for i in range(4)
        ]
        assert [t.ipu for t in graph.outputs] == [3, 2, 1, 0]
        info = autodiff(graph)
        assert len(info.graph.inputs) == 4
        if op is not c.all_reduce_identical_grad_inputs:
            assert [t.ipu for t in info.graph.outputs] == [3, 2, 1, 0] and kinds(info.graph) == ["AllReduce"]
        ds = ops.call(info.graph, *(popxl.constant(np.float32([g])) for g in G))
        found = run(ir, one_device, *map(store, (*ys, *ds)))
    np.testing.assert_array_equal(np.ravel(found), [*results, *gradients])


def test_over_ipus_where_some_gradients_are_missing() -> None:
    """They count as 0."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        xs = [popxl.variable(np.float32([i + 1])) for i in range(3)]
        ds = []
        for op in (c.all_reduce, c.all_reduce_identical_grad_inputs):
            graph = ir.create_graph(lambda *ts: op(ts, (0, 0, 0)), *xs)  # noqa: B023  # called at once
            info = autodiff(graph, grads_provided=graph.outputs[1:], grads_required=graph.inputs[1:])
            ds += ops.call(info.graph, popxl.constant(np.float32([5])), popxl.constant(np.float32([7])))
        found = run(ir, one_device, *map(store, ds))
    np.testing.assert_array_equal(np.ravel(found), [12, 12, 5, 7])


def test_over_ipus_by_where_the_tensors_are() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.variable(np.float32([1]))
        copies = []
        for ipu in (1, 0):
            with popxl.ipu(ipu):
                copies.append(ops.identity(x))
        assert [t.ipu for t in c.all_reduce(copies)] == [1, 0]
        with popxl.ipu(1):  # the results are where they are said to be; what reads them is checked
            with pytest.raises(ValueError, match="different IPUs"):
                ops.add(*c.all_reduce(copies))


def test_over_ipus_of_graph_inputs() -> None:
    """An operand is where the result at its position is: residual connections add to it there."""
    ir = popxl.Ir()
    spec = popxl.TensorSpec((3,), popxl.float32)

    def residual(*xs: popxl.Tensor) -> list[popxl.Tensor]:
        sums = []
        for ipu, (x, y) in enumerate(zip(xs, c.all_reduce_identical_inputs(xs, ipus=[0, 1]), strict=True)):
            with popxl.ipu(ipu):
                sums.append(x + y)
        return sums

    graph = ir.create_graph(residual, spec, spec)
    assert [t.ipu for t in (*graph.inputs, *graph.outputs)] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    "op", [c.all_reduce, c.all_reduce_identical_inputs, c.all_reduce_identical_grad_inputs], ids=lambda op: op.__name__
)
def test_over_ipus_only_sums_have_a_gradient(op: Any) -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.variable(np.float32([1]))
        graph = ir.create_graph(lambda t: op([t, t], [0, 1], "max"), x)
        with pytest.raises(PopxlError, match="AllReduce .* with `op` 'max'; only 'add' has one"):
            autodiff(graph)


def test_as_functions_of_jax() -> None:
    """Gradients are those that are declared, also where they are not those of what is computed."""
    ir = popxl.Ir()
    x = np.float32([1, 2, 3])
    with ir.main_graph:
        v = popxl.variable(x)
        for f, expected in (
            (lambda t: ops.sum(c.replicated_all_gather(c.replica_sharded_slice(t * t))), 2 * x),
            (lambda t: ops.sum(c.replicated_slice(t * t)), 2 * x),
            (lambda t: ops.sum(ops.add(*c.all_reduce([t, t * 3], [0, 0]))), [8, 8, 8]),
            (lambda t: ops.sum(ops.add(*c.all_reduce_identical_inputs([t, t * 3], [0, 0]))), [8, 8, 8]),
            (lambda t: ops.sum(ops.add(*c.all_reduce_identical_grad_inputs([t, t * 3], [0, 0]))), [4, 4, 4]),
        ):
            function = popxl.to_jax(ir.create_graph(f, v))
            np.testing.assert_array_equal(jax.grad(function)(x), expected)
        largest = popxl.to_jax(ir.create_graph(lambda t: ops.sum(c.all_reduce([t, t], [0, 0], "max")[0]), v))
        with pytest.raises(PopxlError, match="only 'add' has one"):
            jax.grad(largest)(x)


# Saving -------------------------------------------------------------------------------------------------------------


def test_saved_programs(device: Any, tmp_path: Any) -> None:
    """They hold the groups, and are the same when they come back."""
    ir = popxl.Ir(replication=4)
    pairs = ir.replica_grouping(2, 2)
    with ir.main_graph, popxl.in_sequence():
        x = own(ir, X)
        graph = ir.create_graph(lambda t: c.replicated_slice(c.replicated_all_gather(t, group=pairs), group=pairs), x)
        info = autodiff(graph)
        made = [*ops.call(graph, x), *ops.call(info.graph, x), c.replicated_all_gather(c.replica_sharded_slice(x))]
        made += [c.replicated_all_reduce(x, "max", pairs), *c.all_reduce([x, x], [0, 1])]
        streams = [store(t) for t in made]
    ir.save(tmp_path / "program.json")
    again = popxl.Ir.load(tmp_path / "program.json")
    assert str(again) == str(ir)
    with popxl.Session(ir, device(4)) as one, popxl.Session(again, device(4)) as other:
        results, same = one.run(), other.run()
        assert len(results) == len(same) == len(streams)
        for stream, array, copy in zip(streams, results.values(), same.values(), strict=True):
            np.testing.assert_array_equal(array, results[stream])
            np.testing.assert_array_equal(array, copy)


# Ops of one's own ---------------------------------------------------------------------------------------------------


def _centred(t: Any, lowest: Any = 0.0, *, scale: float, group: c.Group) -> Any:
    """Less the mean of the group; and the ranks of the members from which it takes more than `lowest`."""
    mean = group.combined(t, "mean")
    return scale * (t - mean), jnp.where(group.members(t).max(axis=1) > lowest, 1, 0), jnp.int32(group.rank)


Centred = OpKind(
    "Centred",
    _centred,
    shape=lambda t, lowest=0.0, *, scale, stride, group_size: (
        t.spec,
        popxl.TensorSpec((group_size,), popxl.int32),
        popxl.TensorSpec((), popxl.int32),
    ),
    gradient={
        "t": lambda g, scale, stride, group_size: Centred(g, scale=scale, stride=stride, group_size=group_size)[0]
    },
    traits=[BetweenReplicas()],
)


@pytest.mark.thorough(but_each=4)
@pytest.mark.parametrize("count, stride, size", GROUPINGS.values(), ids=GROUPINGS)
@pytest.mark.parametrize("saved", [False, True])
def test_an_op_of_ones_own(device: Any, count: int, stride: int, size: int, saved: bool, tmp_path: Any) -> None:
    groups, data = groups_of(count, stride, size), np.random.default_rng(0).normal(size=(count, 3)).astype(np.float32)
    ir = popxl.Ir(replication=count)
    with ir.main_graph:
        attributes = members("Centred", ir.replica_grouping(stride, size)) | {"scale": 2.0}
        t, lowest = own(ir, data), popxl.constant(0.5)
        graph = ir.create_graph(lambda t: Centred(t, **attributes)[0], t)
        (dt,) = ops.call(autodiff(graph).graph, t)
        for x in (*Centred(t, **attributes), *Centred(t, lowest, **attributes), dt):
            store(x)
    if saved:
        ir.save(tmp_path / "program.popxl")
        ir = popxl.Ir.load(tmp_path / "program.popxl")
    streams = [op.attributes["stream"] for op in ir.main_graph.ops if op.op_type == "HostStore"]
    centred, positive, ranks, again, high, _, dt = run(ir, device, *streams)
    for group in groups:
        for rank, replica in enumerate(group):
            expected = 2 * (data[replica] - data[group].mean(axis=0))
            np.testing.assert_allclose(centred[replica], expected, rtol=1e-5, atol=1e-6)
            np.testing.assert_array_equal(again[replica], centred[replica])
            np.testing.assert_array_equal(dt[replica], centred[replica])
            np.testing.assert_array_equal(positive[replica], data[group].max(axis=1) > 0)
            np.testing.assert_array_equal(high[replica], data[group].max(axis=1) > 0.5)
            assert ranks[replica] == rank


def test_what_an_op_between_replicas_has_to_state() -> None:
    def lowering(t: Any, *, group: c.Group) -> Any:
        return group.combined(t, "add")

    for settings in ({"gradient": None}, {"shape": lambda t, **groups: t.spec}):
        with pytest.raises(TypeError, match="Total talks to other replicas: state its `shape`, and its `gradient`"):
            OpKind("Total", lowering, traits=[BetweenReplicas()], **settings)  # type: ignore[arg-type]
    kind = OpKind("Total", lowering, shape=lambda t, **groups: t.spec, gradient=None, traits=[BetweenReplicas()])
    with popxl.Ir(replication=2).main_graph:
        with pytest.raises(TypeError, match=r"there is no parameter `group`.*\('stride', 'group_size'\)"):
            kind(popxl.variable(1.0), group=None)
