"""Ops that move elements from and to where indices say: what their rows in the table of ops do not reach."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.errors import PopxlError
from popxl.transforms import autodiff
from tests.popxl.evaluate import evaluate
from tests.popxl.ops.rows.schema import f32, i32, u32, values

Array = np.ndarray
F8 = pytest.mark.parametrize("f8", [popxl.float8_143, popxl.float8_152], ids=lambda dtype: dtype.name)


def wide(array: Array) -> popxl.Tensor:
    """A variable that keeps its 64 bits."""
    return popxl.variable(array, downcast=False)


def with_gradients(function: Callable[..., Any], arrays: list[Array], wanted: list[int], g: Array) -> list[Array]:
    """The result of a function of tensors, and the gradients of some of them."""

    def build() -> list[Any]:
        tensors = [wide(array) for array in arrays]
        graph = popxl.gcg().ir.create_graph(function, *tensors)
        info = autodiff(graph, grads_required=[graph.inputs[i] for i in wanted])
        site = ops.call_with_info(graph, *tensors)
        return [*site.outputs, *ops.call(info.graph, popxl.constant(g), inputs_dict=info.inputs_dict(site))]

    return evaluate(build)


# Bytes --------------------------------------------------------------------------------------------------------------


@pytest.mark.compiled_whole
@F8
def test_float8_is_moved_byte_by_byte(f8) -> None:
    """NaN included. Every bit pattern goes through each op that reads by index."""
    every = np.arange(256, dtype=np.uint8)
    back, odd = np.arange(255, -1, -1), np.arange(1, 256, 2)
    moves: list[tuple[Callable[[Any], Any], Callable[[Array], Array]]] = [
        (lambda t: ops.gather(t, popxl.constant(back)), lambda a: a[back]),
        (lambda t: ops.gather(t, popxl.constant([-1, 128, 256]), zero_OOR=True), lambda a: np.array([0, 128, 0])),
        (
            lambda t: ops.tied_gather(t.reshape((4, 64)), popxl.constant([2, 0]), 1),
            lambda a: a.reshape(4, 64)[:, [2, 0]],
        ),
        (
            lambda t: ops.groupedgather(t.reshape((2, 128)), popxl.constant([odd[:64], odd[:64] - 1]), 1, 2),
            lambda a: np.stack([a[1:128:2], a[128::2]]),
        ),
        (lambda t: ops.dynamic_slice(t, popxl.constant([0]), [0], [256], True), lambda a: a),
        (
            lambda t: ops.dynamic_slice(t.reshape((4, 64)), popxl.constant([1, 5]), [0, 1], [3, 50], False),
            lambda a: a.reshape(4, 64)[1:4, 5:55],
        ),
    ]
    results = evaluate(lambda t: [move(t) for move, _ in moves], every.view(f8.as_numpy()))
    for result, (_, meaning) in zip(results, moves, strict=True):
        assert result.dtype == f8.as_numpy()
        np.testing.assert_array_equal(result.view(np.uint8), meaning(every))


# Indices ------------------------------------------------------------------------------------------------------------

FAR = {
    "int64": np.array([2, 2**32 + 1, -(2**32), 0], np.int64),
    "uint64": np.array([2, 2**32 + 1, 2**63, 0], np.uint64),
    "uint32": np.array([2, 2**31, 2**32 - 2, 0], np.uint32),
    "int8": np.array([2, -127, -1, 0], np.int8),
    "uint8": np.array([2, 255, 3, 0], np.uint8),
}


@pytest.mark.parametrize("far", FAR.values(), ids=FAR)
def test_indices_of_all_dtypes(far) -> None:
    """Out of range is out of range, however many bits say so: the two in the middle."""
    rows, first = values("float32", (4, 2)), values("float32", (3, 2), seed=1)

    def build() -> list[Any]:
        ids, t, start = wide(far), popxl.variable(rows), popxl.variable(first)
        element = ops.concat([ops.reshape(ids, (4, 1))] * 2, axis=1)
        return [
            ops.scatter_reduce(t, ids, "sum", start),
            ops.scatter_reduce(t, element, "max", axis_size=3),
            ops.scatter(start, element, t),
            ops.onehot(ids, popxl.constant(3), popxl.constant([0, 1]), -1),
            ops.gather(start, ids, zero_OOR=True),
            ops.tied_gather(start, ids, zero_OOR=True),
        ]

    added, largest, written = first.copy(), np.zeros((3, 2), np.float32), first.copy()
    added[[2, 0]] += rows[[0, 3]]
    largest[[2, 0]] = written[[2, 0]] = rows[[0, 3]]
    hot = np.array([[0, 0, 1], [0, 0, 0], [0, 0, 0], [1, 0, 0]], np.int32)
    taken = np.stack([first[2], 0 * first[0], 0 * first[0], first[0]])
    for result, wish in zip(evaluate(build), [added, largest, written, hot, taken, taken], strict=True):
        np.testing.assert_array_equal(result, wish)


@pytest.mark.parametrize(
    ("start", "at"),
    [
        (np.array([2**32 + 1], np.int64), 7),
        (np.array([-(2**32)], np.int64), 0),
        (np.array([2**63], np.uint64), 7),
        (np.array([2**31 + 3], np.uint32), 7),
        (np.array([-128], np.int8), 0),
        (np.array([3], np.uint16), 3),
    ],
    ids=str,
)
def test_starts_of_all_dtypes(start, at) -> None:
    """A block that would stick out is moved inside, however many bits say where it begins."""
    t = values("float32", (10,))

    def build() -> list[Any]:
        x, index = popxl.variable(t), wide(start)
        update = ops.dynamic_update(x, index, popxl.constant(f32(7, 8, 9)), [0], [3], True)
        return [ops.dynamic_slice(x, index, [0], [3], True), update]

    cut, updated = evaluate(build)
    np.testing.assert_array_equal(cut, t[at : at + 3])
    np.testing.assert_array_equal(updated, [*t[:at], 7, 8, 9, *t[at + 3 :]])


def test_nan_wins() -> None:
    """As in NumPy, a bucket with one holds one."""
    results = evaluate(
        lambda t, i: [ops.scatter_reduce(t, i, reduction, axis_size=2) for reduction in ("max", "min")],
        f32(1, np.nan, 3, 2),
        i32(0, 0, 1, 1),
    )
    np.testing.assert_array_equal(results, [[np.nan, 3], [np.nan, 2]])


def test_sums_of_float16_are_rounded_once() -> None:
    """Float16 itself does not count beyond 2048; nor must gradients, which add up where indices repeat."""
    ones, same, table = np.ones(4096, np.float16), np.zeros(4096, np.int32), np.zeros(2, np.float16)

    def build(t: Any, i: Any, half: Any) -> list[Any]:
        return [ops.scatter_reduce(t, i, "sum", axis_size=1), ops.scatter_reduce(t, i, "sum", half)]

    results = evaluate(build, ones, same, np.full(1, 0.5, np.float16))
    assert [(r.dtype.name, r.tolist()) for r in results] == [("float16", [4096.0])] * 2
    for function, g, expected in (
        (lambda t, i: ops.gather(t, i), ones, [4096, 0]),
        (lambda t, i: ops.tied_gather(t, i), ones, [4096, 0]),
        (lambda t, i: ops.onehot(i, popxl.constant(1), t, 1), ones[:, None], [0, 4096]),
    ):
        result, gradient = with_gradients(function, [table, same], [0], g)
        assert result.dtype == gradient.dtype == np.float16 and gradient.tolist() == expected


# How it is done -----------------------------------------------------------------------------------------------------

T, V = values("float32", (2, 3, 4)), values("float32", (2, 2, 4), seed=1)
ELEMENTS = i32([[0, 2, 1, -1], [1, 1, 0, 5]], [[2, 2, 1, 0], [0, 1, 2, 1]])


def moved(t: Any, ids: Any, v: Any) -> list[Any]:
    """Ops that address single elements."""
    return [
        ops.scatter(t, ids, v, 1),
        *(ops.scatter_reduce(v, ids, reduction, t, 1) for reduction in ("sum", "max", "min")),
        *(ops.scatter_reduce(v, ids, reduction, None, 1, 3) for reduction in ("sum", "max", "min")),
    ]


def test_arrays_of_very_many_elements(monkeypatch) -> None:
    """Where int32 does not count the elements, there is one number for each axis instead of one for all."""
    before = evaluate(moved, T, ELEMENTS, V)
    monkeypatch.setattr(importlib.import_module("popxl.ops.scatter"), "_COUNTED_BY_INT32", 1)
    for result, wish in zip(evaluate(moved, T, ELEMENTS, V), before, strict=True):
        np.testing.assert_array_equal(result, wish)


@pytest.mark.thorough
def test_lowerings_can_be_mapped() -> None:
    """`jax.vmap` of what an op does is what it does to each."""
    with popxl.Ir().main_graph as main:
        t, v, ids = (popxl.variable(array) for array in (T, V, ELEMENTS))
        index, vector = popxl.variable(i32(1, 1)), popxl.variable(i32(1, 4))
        moved(t, ids, v)
        ops.scatter_reduce(v, vector, "sum", None, 1, 3)
        ops.gather(t, vector, 1, zero_OOR=True)
        ops.groupedgather(t, ids, 1, 2)
        ops.onehot(ids, popxl.constant(3), vector, 0)
        ops.dynamic_slice(t, index, [0, 2], [1, 3], True)
        ops.dynamic_update(t, index, popxl.constant(T[:1, :, :3]), [0, 2], [1, 3], True)
        for op in main.ops:
            arrays = [x.data for x in op.inputs]  # type: ignore[attr-defined]
            others = [a[::-1] if a.ndim else a for a in arrays]
            pairs = [np.stack(pair) for pair in zip(arrays, others, strict=True)]
            both = [op.on_arrays()(*map(jnp.asarray, side)) for side in (arrays, others)]
            np.testing.assert_array_equal(jax.vmap(op.on_arrays())(*pairs), np.stack(both), err_msg=op.op_type)


def test_whole_slices_move_together() -> None:
    """An index for a slice is not made into one for each element, and no one-hot matrix is multiplied with."""
    with popxl.Ir().main_graph as main:
        data, ids = popxl.variable(np.zeros((64, 32), np.float32)), popxl.variable(np.zeros(64, np.int32))
        for reduction, start in itertools.product(("sum", "max", "none"), (None, data)):
            ops.scatter_reduce(data, ids, reduction, start, 0, 8)
        ops.scatter_reduce(data, ops.reshape(ids, (64, 1)), "sum", axis_size=8)
        ops.scatter_reduce(data, ids, "sum", None, 0, 8, False)
        ops.gather(data, ids)
        ops.tied_gather(data, ids, zero_OOR=True)
        for op in main.ops:
            if op.op_type != "Reshape":
                shapes = [jax.ShapeDtypeStruct(t.shape, t.dtype.as_jax()) for t in op.inputs]
                text = str(jax.make_jaxpr(op.on_arrays())(*shapes))
                assert "i32[64]" in text and "i32[64,32" not in text and "dot_general" not in text, text


# Gradients ----------------------------------------------------------------------------------------------------------

KEPT = {
    "gather": (lambda t, v, i: ops.gather(t, i, 1), "i"),
    "groupedgather": (lambda t, v, i: ops.groupedgather(t, i, 1, 2), "i"),
    "tied_gather": (lambda t, v, i: ops.tied_gather(t, i, 1), "i"),
    "onehot": (lambda t, v, i: ops.onehot(i, popxl.constant(3), t[0, 0, :2], 0), "i"),
    "scatter": (lambda t, v, i: ops.scatter(t, i, v, 1), "i"),
    "sum": (lambda t, v, i: ops.scatter_reduce(v, i, "sum", t, 1), "i"),
    "none": (lambda t, v, i: ops.scatter_reduce(v, i, "none", t, 1), "i"),
    "max": (lambda t, v, i: ops.scatter_reduce(v, i, "max", t, 1), "t v i scatterreduce_out"),
    "min of nothing": (lambda t, v, i: ops.scatter_reduce(v, i, "min", None, 1, 3), "v i scatterreduce_out"),
    "dynamic_slice": (lambda t, v, i: ops.dynamic_slice(t, ops.flatten(i), [0], [1], True), "i_reshaped"),
    "dynamic_update": (lambda t, v, i: ops.dynamic_update(t, ops.flatten(i), v, [1], [2], True), "i_reshaped"),
}


@pytest.mark.parametrize(("function", "kept"), KEPT.values(), ids=KEPT)
def test_what_a_gradient_keeps_alive(function, kept) -> None:
    with popxl.Ir().main_graph:
        t, v, i = popxl.variable(T), popxl.variable(V), popxl.variable(ELEMENTS)
        graph = popxl.gcg().ir.create_graph(function, t, v, i)
        used = [x for x in graph.inputs[:2] if any(x in op.inputs for op in graph.ops)]
        info = autodiff(graph, grads_required=used)
    assert sorted(x.name for x in info.graph.inputs[1:]) == sorted(kept.split())


def test_gradients_of_torch() -> None:
    """Where nothing ties and nothing repeats, they are these."""
    torch = pytest.importorskip("torch")
    once = np.array([[[0, 2, 1, 0], [1, 1, 2, 2]], [[2, 0, 1, 1], [0, 1, 2, 0]]], np.int32)
    cases: list[tuple[Callable[..., Any], Callable[..., Any], Array]] = [
        (lambda t, v, i: ops.scatter(t, i, v, 1), lambda t, v, i: t.scatter(1, i, v), once)
    ]
    for ours, theirs in (("sum", "sum"), ("max", "amax"), ("min", "amin")):
        cases += [
            (
                lambda t, v, i, ours=ours: ops.scatter_reduce(v, i, ours, t, 1),
                lambda t, v, i, theirs=theirs: t.scatter_reduce(1, i, v, theirs),
                ids,
            )
            for ids in (once, ELEMENTS.clip(0, 2))
        ]
    g = values("float32", T.shape, seed=2)
    for ours, theirs, ids in cases:
        t, v = (torch.tensor(array, requires_grad=True) for array in (T, V))
        result = theirs(t, v, torch.tensor(ids).long())
        result.backward(torch.tensor(g))
        expected = [x.detach().numpy() for x in (result, t.grad, v.grad)]
        for found, wish in zip(with_gradients(ours, [T, V, ids], [0, 1], g), expected, strict=True):
            np.testing.assert_allclose(found, wish, rtol=1e-6, atol=1e-6)


def test_gradients_for_a_part() -> None:
    """What takes no part gets 0: values and data beyond the indices."""
    t, v, ids, g = values("float32", (4, 3)), values("float32", (3, 3), seed=1), i32([3, 0], [1, 2]), T[0].T
    rest = np.zeros((3, 3), np.float32)
    rest[:2, :2] = [[g[3, 0], g[0, 1]], [g[1, 0], g[2, 1]]]
    _, gradient = with_gradients(lambda t, v, i: ops.scatter(t, i, v), [t, v, ids], [1], g)
    np.testing.assert_array_equal(gradient, rest)
    for reduction in ("sum", "max", "none"):
        function = lambda t, v, i, r=reduction: ops.scatter_reduce(v, i, r, None, 0, 4, False)  # noqa: E731
        _, gradient = with_gradients(function, [t, v, ids], [1], g[:, :2])
        np.testing.assert_array_equal(gradient, rest)


# In loops and called graphs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("inplace", [False, True])
def test_a_start_computed_in_each_turn(inplace) -> None:
    """A loop that copies every row of a table to another place."""
    table = values("float32", (5, 3))

    def turn(i: Any, out: Any, table: Any) -> tuple[Any, Any]:
        with popxl.in_sequence():
            row = ops.dynamic_slice(table, i, [0], [1], True)
            to = ops.fmod(i * 2, popxl.constant(5, popxl.uint32))
            update = ops.dynamic_update_ if inplace else ops.dynamic_update
            return i + 1, update(out, to, row, [0], [1], True)

    def build(i: Any, out: Any, table: Any) -> Any:
        return ops.repeat(popxl.gcg().ir.create_graph(turn, i, out, table), 5, i, out, table)

    i, out = evaluate(build, np.array(0, np.uint32), np.zeros((5, 3), np.float32), table)
    assert i == 5
    np.testing.assert_array_equal(out, table[[0, 3, 1, 4, 2]])


@pytest.mark.parametrize("by_ref", [True, False])
def test_an_update_in_a_called_graph(by_ref) -> None:
    """The caller's tensor changes if it was passed by reference."""
    rows = values("float32", (2, 1, 3))

    def build(t: Any, first: Any, second: Any, turns: Any) -> list[Any]:
        with popxl.gcg().ir.create_empty_graph("write") as graph:
            inside = popxl.graph_input((4, 3), popxl.float32, "t", by_ref=by_ref)
            at = popxl.graph_input((1,), popxl.int32, "at")
            row = popxl.graph_input((1, 3), popxl.float32, "row")
            alias = ops.dynamic_update_(inside, at, row, [0], [1], True)
            popxl.graph_output(alias + 0)
        seen = [ops.call(graph, t, at, row)[0] for at, row in ((turns[:1], first), (turns[1:], second))]
        return [*seen, t]

    before = np.zeros((4, 3), np.float32)
    *seen, after = evaluate(build, before, *rows, i32(2, 0))
    one, other, both = (np.zeros((4, 3), np.float32) for _ in range(3))
    one[2], other[0] = both[2], both[0] = rows[:, 0]
    np.testing.assert_array_equal(seen[0], one)
    np.testing.assert_array_equal(seen[1], both if by_ref else other)
    np.testing.assert_array_equal(after, both if by_ref else before)


# What is refused, and when ------------------------------------------------------------------------------------------

CUBE = values("float32", (3, 5, 7))
NO_INTEGERS = "the indices are float32; expected integers: convert them with `ops.cast`"
LATE: dict[str, tuple[Callable[..., Any], str]] = {
    "update": (
        lambda t: ops.dynamic_update(t, popxl.constant([1, 2]), popxl.constant(CUBE[0, :1, :3]), [0, 2], [1, 3], True),
        r"`t_update` has the shape \(1, 3\); expected that of the block, \(1, 5, 3\)",
    ),
    "dtype of an update": (
        lambda t: ops.dynamic_update(t, popxl.constant([1]), popxl.constant(CUBE[0].astype(int)), [0], [1], True),
        "`t_update` is int32 and `t` is float32; expected one dtype",
    ),
    "count": (
        lambda t: ops.dynamic_slice(t, popxl.constant([1, 2]), [0], [1], False),
        "`index` has 2 elements for 1 axes",
    ),
    "size": (
        lambda t: ops.dynamic_slice(t, popxl.constant([1]), [1], [6], False),
        "`sizes` asks for 6 elements of dimension 1, which has 5",
    ),
    "dtype of values": (
        lambda t: ops.scatter(t, popxl.constant(np.zeros((1, 1, 1), np.int32)), popxl.constant([[[1]]])),
        "`values` is int32 and `t` is float32; expected one dtype",
    ),
    "gather at floats": (lambda t: ops.gather(t, popxl.constant([1.5])), NO_INTEGERS),
    "slice at floats": (lambda t: ops.dynamic_slice(t, popxl.constant([1.5]), [0], [1], False), NO_INTEGERS),
    "scatter at floats": (lambda t: ops.scatter(t, popxl.constant([[[1.5]]]), t), NO_INTEGERS),
    "reduce at floats": (
        lambda t: ops.scatter_reduce(t, popxl.constant([0.0, 1.0, 1.5]), "sum", axis_size=2),
        NO_INTEGERS,
    ),
    "gather at truth values": (
        lambda t: ops.gather(t, popxl.constant([True])),
        "the indices are bool; expected integers",
    ),
}


@pytest.mark.parametrize(("function", "message"), LATE.values(), ids=LATE)
def test_what_a_session_refuses(function, message) -> None:
    """Programs that are only built may say it, and may be differentiated."""
    ir = popxl.Ir()
    with ir.main_graph:
        t = popxl.variable(CUBE)
        graph = ir.create_graph(function, t)
        autodiff(graph)
        ops.call(graph, t)
    with pytest.raises(PopxlError, match=rf"cannot be run: {message}"):
        popxl.Session(ir, "ipu_model").__enter__()


def test_dtypes_are_not_judged_while_building() -> None:
    with popxl.Ir().main_graph:
        t, f = popxl.variable([[1, 2], [3, 4]]), popxl.variable(f32([0, 1]))
        assert ops.gather(t, f).shape == ops.tied_gather(t, f).shape == (1, 2, 2)
        assert ops.groupedgather(t, t, 1, 2).shape == (2, 2)
        assert ops.dynamic_slice(t, f, [0, 1], [1, 1], True).shape == (1, 1)
        assert ops.dynamic_update_(t, f, f, [0, 1], [1, 1], True).dtype is popxl.int32
        assert ops.scatter(t, f, f).dtype is popxl.int32
        assert ops.scatter_reduce(f, f, "max", t).dtype is popxl.int32
        assert ops.onehot(f, popxl.constant(2), popxl.constant([1, 2]), 0).shape == (2, 1, 2)


def test_a_number_of_classes_is_known_while_building() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        t, values = popxl.variable(u32([1, 0])), popxl.variable(f32(0, 1))
        three = popxl.constant(np.array([[3]], np.uint8))
        assert ops.onehot(t, three, values, -1).shape == (1, 2, 3)
        for axis in (-2, 3):
            with pytest.raises(PopxlError, match=f"^OneHot: `axis` is {axis}; expected 0 to 2, .* or -1, last"):
                ops.onehot(t, three, values, axis)
        with pytest.raises(TypeError, match="^onehot: `axis` must be an integer; got None"):
            ops.onehot(t, three, values, None)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"`num_classes` must be a Tensor; got 3 \(int\)"):
            ops.onehot(t, 3, values, 0)  # type: ignore[arg-type]
        with pytest.raises(PopxlError, match="`num_classes` is -1"):
            ops.onehot(t, popxl.constant(-1), values, 0)
        with pytest.raises(PopxlError, match=r"`values` has to have the shape \(2,\)"):
            ops.onehot(t, three, t, 0)
        with pytest.raises(PopxlError, match="known only when the program runs.*`popxl.constant"):
            ops.onehot(t, ops.identity(three), values, 0)
        with pytest.raises(PopxlError, match="known only when the program runs"):
            ir.create_graph(lambda t, n, v: ops.onehot(t, n, v, 0), t, three, values)
        with pytest.raises(ValueError, match="`num_classes` is .* which is not in"):
            ir.create_graph(lambda t, v: ops.onehot(t, three, v, 0), t, values)
