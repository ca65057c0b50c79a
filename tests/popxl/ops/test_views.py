"""Views: other windows on the same storage. What is written to one is seen through all. And indexing, `t[key]`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.errors import PopxlError
from tests.popxl.evaluate import evaluate

X = np.arange(24, dtype=np.float32).reshape(2, 3, 4)

# Chains of views ----------------------------------------------------------------------------------------------------

CHAINS: dict[str, tuple[Callable[[Any], Any], Callable[[np.ndarray], np.ndarray]]] = {
    "slice of transpose of reshape": (
        lambda t: ops.slice_(ops.transpose_(ops.reshape_(t, (6, 4))), [1, 0], [3, 5], [1, 1]),
        lambda a: a.reshape(6, 4).T[1:3, 0:5],
    ),
    "reshape of a slice": (lambda t: ops.flatten_(ops.slice_(t, 1, 3, axis=1)), lambda a: a[:, 1:3]),
    "reversed, then cut": (lambda t: ops.slice_(ops.slice_(t, step=-1, axis=2), 1, 2, axis=-1), lambda a: a[:, :, 2:3]),
    "slice of slice of slice": (
        lambda t: ops.slice_(ops.slice_(ops.slice_(t, 1, axis=0), 1, axis=1), -2, axis=2),
        lambda a: a[1:, 1:, -2:],
    ),
    "transposed twice": (lambda t: t.transpose_((1, 2, 0)).T_, lambda a: a.transpose(0, 2, 1)),
    "detached": (lambda t: ops.slice_(t.detach_(), 0, 1), lambda a: a[:1]),
    "the whole": (lambda t: ops.slice_(t, [], [], []), lambda a: a),
    "an alias of an alias": (lambda t: ops.slice_(ops.add_(t, ops.init((), t.dtype)), 1), lambda a: a[1:]),
}
chains = pytest.mark.parametrize(("ours", "theirs"), CHAINS.values(), ids=CHAINS)


@chains
def test_writing_through_a_chain(ours, theirs) -> None:
    """The base and the view hold the same numbers after the view was changed, and after the base was."""

    def build(t: Any) -> list[Any]:
        view = ours(t)
        ops.add_(view, popxl.constant(100.0))
        seen = [ops.identity(t), ops.identity(view)]
        ops.relu_(ops.add_(t, popxl.constant(-50.0)))
        return [*seen, t, view]

    base = X.copy()
    mask = np.zeros(X.shape, bool)
    theirs(mask)[...] = True  # NumPy's views write to the same place, as long as nothing copies
    if not mask.any():
        mask[:, 1:3] = True  # the reshape of a slice is a copy in NumPy
    base[mask] += 100
    after = np.maximum(base - 50, 0)
    results = evaluate(build, X)
    for result, wish in zip(results, [base, theirs(base), after, theirs(after)], strict=True):
        np.testing.assert_array_equal(result.reshape(wish.shape), wish)


@pytest.mark.parametrize("name", [name for name in CHAINS if name not in ("detached", "an alias of an alias")])
def test_gradients_pass_through_views(name) -> None:
    ours, theirs = CHAINS[name]

    def build(t: Any) -> Any:
        graph = popxl.gcg().ir.create_graph(lambda t: ops.sumsquare(ours(t)), t)
        info = popxl.transforms.autodiff(graph)
        site = ops.call_with_info(graph, t)
        return ops.call(info.graph, 1.0, inputs_dict=info.inputs_dict(site))

    wish = np.zeros_like(X)
    theirs(wish)[...] = 1
    if not wish.any():
        wish[:, 1:3] = 1
    np.testing.assert_array_equal(evaluate(build, X)[0], wish * 2 * X)


def test_exp_of_the_concatenation_of_two_variables() -> None:
    def build(a: Any, b: Any) -> list[Any]:
        joined = ops.concat_([a, b], axis=1)
        ops.exp_(joined)
        return [a, b, joined]

    a, b = np.float32([[1, 2]]), np.float32([[3, 0, -1]])
    for result, wish in zip(evaluate(build, a, b), [a, b, np.concatenate([a, b], 1)], strict=True):
        np.testing.assert_allclose(result, np.exp(wish), rtol=1e-6)


def test_a_view_of_a_concatenation_reaches_across_its_parts() -> None:
    def build(a: Any, b: Any) -> list[Any]:
        middle = ops.slice_(ops.concat_([ops.flatten_(a), b]), 1, -1)
        ops.add_(middle, popxl.constant(10.0))
        ops.add_(b, popxl.constant(1.0))
        return [a, b, middle]

    a, b = np.float32([[0, 1], [2, 3]]), np.float32([4, 5])
    a, b, middle = evaluate(build, a, b)
    assert (a.tolist(), b.tolist()) == ([[0, 11], [12, 13]], [15, 6])
    assert middle.tolist() == [11, 12, 13, 15]


@pytest.mark.parametrize(
    ("joined", "begin", "a_after", "b_after", "seen"),
    [
        (lambda a, b: ops.concat_([a, a]), 0, [10, 11, 2], [3, 4], [10, 11, 2, 10, 11, 2]),
        (lambda a, b: ops.concat_([a, a]), 2, [10, 1, 12], [3, 4], [10, 1, 12, 10, 1, 12]),
        (lambda a, b: ops.concat_([a, ops.slice_(a, 1)]), 1, [0, 11, 12], [3, 4], [0, 11, 12, 11, 12]),
        (lambda a, b: ops.concat_([ops.concat_([b, a]), b]), 1, [10, 1, 2], [3, 14], [3, 14, 10, 1, 2, 3, 14]),
    ],
)
def test_a_write_to_a_part_of_what_holds_a_tensor_twice(joined, begin, a_after, b_after, seen) -> None:
    """The other region that shares storage does not bring its old numbers back."""

    def build(a: Any, b: Any) -> list[Any]:
        twice = joined(a, b)
        ops.add_(ops.slice_(twice, begin, begin + 2), popxl.constant(10.0))
        return [a, b, twice]

    results = evaluate(build, np.float32([0, 1, 2]), np.float32([3, 4]))
    assert [result.tolist() for result in results] == [a_after, b_after, seen]


def test_a_view_of_the_whole_is_overwritten_before_a_reversal() -> None:
    """As a scatter without indices, the update would end the process in XLA."""

    def build(t: Any) -> Any:
        ops.var_updates.accumulator_zero_(ops.slice_(t, 0, 2))
        ops.var_updates.copy_var_update_(t, ops.slice_(t, step=-1))
        return t

    np.testing.assert_array_equal(evaluate(build, X)[0], np.zeros_like(X))


def test_the_gradient_of_all_samples_between_two_reversals() -> None:
    """As above."""

    def build(t: Any) -> Any:
        graph = popxl.gcg().ir.create_graph(lambda t: ops.subsample(t[::-1], [1, 1])[::-1], t)
        return ops.call(popxl.transforms.autodiff(graph).graph, t)

    np.testing.assert_array_equal(evaluate(build, X)[0], X)


def test_copies_are_not_views() -> None:
    """The forms without underscore keep what they have read."""

    def build(t: Any) -> list[Any]:
        copies = [t.T, t.reshape((6, 4)), t.flatten(), ops.slice(t, 1), t[1:], t.detach(), ops.identity(t)]
        copies += [ops.concat([t, t]), *ops.split(t, 2), ops.squeeze(t), ops.subsample(t, 2), ops.print_tensor(t)]
        ops.add_(t, popxl.constant(100.0))
        for copy in copies:
            ops.add_(copy, popxl.constant(1000.0))
        return [t, *copies]

    t, *copies = evaluate(build, X)
    np.testing.assert_array_equal(t, X + 100)
    for copy in copies:
        assert 1000 <= copy.min() and copy.max() <= 1023


def test_a_view_inside_a_called_graph_writes_to_the_caller() -> None:
    def bump(t: popxl.TensorByRef, row: popxl.Tensor):
        ops.add_(ops.slice_(t, 1, 2), row)

    bump.__annotations__ = {"t": popxl.TensorByRef}  # this module defers its annotations

    def build(t: Any, row: Any) -> list[Any]:
        graph = popxl.gcg().ir.create_graph(bump, ops.slice_(t, 1, axis=0), row)
        ops.call(graph, ops.slice_(t, 1, axis=0), row)
        return [t]

    t = np.zeros((3, 2), np.float32)
    assert evaluate(build, t, np.float32([[5, 6]]))[0].tolist() == [[0, 0], [0, 0], [5, 6]]


def test_slice_without_bounds_is_the_tensor_itself() -> None:
    with popxl.Ir().main_graph as main:
        t = popxl.variable(X)
        assert ops.slice(t) is t and ops.slice_(t, axis=[0]) is t
        assert main.ops == []


# Indexing -----------------------------------------------------------------------------------------------------------

Y = np.arange(120, dtype=np.float32).reshape(6, 5, 4)

BASIC = [
    2, -2, -1, slice(2, 5), (slice(1, 5, 2), 3), slice(None, None, 4), slice(5, 1, -2), slice(None, None, -1),
    (slice(None, None, 5), slice(None, None, 2)), (), slice(None), (0, 1, 2), (-6, -5, -4), (slice(-2, None), -1),
    (2, slice(None, None, -3), slice(1, 100)), slice(-100, 100), (True, False), slice(4, 2),
    (slice(None), slice(3, -1)),
]  # fmt: skip


def test_slices_and_integers() -> None:
    results = evaluate(lambda t: [t[key] for key in BASIC], Y)
    for key, result in zip(BASIC, results, strict=True):
        plain = tuple(map(int, key)) if key == (True, False) else key
        np.testing.assert_array_equal(result, Y[plain], err_msg=str(key))
        assert result.shape == Y[plain].shape


@pytest.mark.parametrize(
    ("key", "added"),
    [
        (slice(1, 3), ["Slice"]),
        (2, ["Slice", "Reshape"]),
        (slice(None, None, 2), ["Slice", "Subsample"]),
        ((slice(None, None, -2), 1), ["Slice", "Subsample", "Reshape"]),
        ((), ["Slice"]),
        ([0, 2], ["Gather"]),
        (np.ones((6, 1, 1), bool), ["Where"]),
    ],
)
def test_what_indexing_adds(key, added) -> None:
    with popxl.Ir().main_graph as main:
        popxl.variable(Y)[key]
        assert [op.op_type for op in main.ops] == added


INTEGERS = [
    [0, 2, 5], [[0, 1], [3, 3]], np.array([1, 1], np.uint8), np.array([4], np.int64), np.array(3), [[5]],
    ([1, 2], [3, 4]),
]  # fmt: skip


def test_integers_gather() -> None:
    def build(t: Any, i: Any) -> list[Any]:
        return [t[i], t[popxl.constant(3, popxl.uint32)], *(t[key] for key in INTEGERS)]

    keys = [np.array([5, 0]), np.array(3), *map(np.array, INTEGERS)]
    for key, result in zip(keys, evaluate(build, Y, np.array([5, 0])), strict=True):
        np.testing.assert_array_equal(result, Y[key], err_msg=str(key))


def test_an_index_is_read_when_the_program_runs() -> None:
    def build(t: Any, i: Any) -> list[Any]:
        first = t[i]
        ops.add_(i, popxl.constant(2))
        return [first, t[i]]

    first, second = evaluate(build, Y, np.array(1))
    np.testing.assert_array_equal(first, Y[1])
    np.testing.assert_array_equal(second, Y[3])


@pytest.mark.parametrize("shape", [(4, 2), (4, 1), (2,), (1,), ()])
def test_masks_set_the_others_to_zero(shape) -> None:
    t = np.arange(1, 9, dtype=np.int32).reshape(4, 2)
    mask = np.random.default_rng(1).integers(0, 2, shape).astype(bool)
    results = evaluate(lambda t, m: [t[m], t[mask], t[mask.tolist() if shape else mask]], t, mask)
    for result in results:
        np.testing.assert_array_equal(result, np.where(mask, t, 0))
        assert result.dtype == np.int32


def test_a_mask_may_be_larger() -> None:
    assert evaluate(lambda t: t[[[True], [False]]], np.float32([1, 2]))[0].tolist() == [[1, 2], [0, 0]]


@pytest.mark.parametrize(
    ("key", "error", "message"),
    [
        ("x", TypeError, "cannot be indexed with 'x'"),
        (True, TypeError, "cannot be indexed with True"),
        (1.0, TypeError, "cannot be indexed with 1.0"),
        (None, TypeError, "cannot be indexed with None"),
        (..., TypeError, "cannot be indexed with Ellipsis"),
        (np.int64(1), TypeError, r"\(int64\)"),
        (np.float32([1]), TypeError, "use integers and slices"),
        ([0.5], TypeError, "use integers and slices"),
        ((1, None), TypeError, "use integers and slices"),
        ([], TypeError, "use integers and slices"),
        (["a"], TypeError, "use integers and slices"),
        (6, ValueError, "index 6 is out of range for dimension 0 of size 6"),
        (-7, ValueError, "index -7 is out of range"),
        ((0, 5), ValueError, "index 5 is out of range for dimension 1 of size 5"),
        ((0, 0, 0, 0), PopxlError, "of rank 3 cannot be indexed with 4 slices"),
        (slice(None, None, 0), PopxlError, "the step of the slice .* is 0"),
        (np.ones(6, bool), PopxlError, r"do not broadcast"),
    ],
    ids=str,
)
def test_keys_that_are_refused(key, error, message) -> None:
    with popxl.Ir().main_graph as main:
        t = popxl.variable(Y, name="t")
        with pytest.raises(error, match=message):
            t[key]
        assert main.ops == []


def test_a_key_of_another_graph_or_of_floats() -> None:
    ir = popxl.Ir()
    with ir.create_empty_graph():
        other, mask = popxl.constant([0]), popxl.constant([True])
    with ir.main_graph as main:
        t = popxl.variable(Y)
        for key in (other, mask):
            with pytest.raises(ValueError, match="not in the main graph"):
                t[key]
        with pytest.raises(TypeError, match="cannot be indexed"):
            t[popxl.constant([0.5])]
        assert main.ops == []


def test_there_is_no_item_assignment() -> None:
    with popxl.Ir().main_graph, pytest.raises(TypeError):
        popxl.variable(Y)[0] = 1


def test_long_chains_of_views():
    """Neither deep recursion nor work that grows with the square of the length."""
    ir = popxl.Ir()
    with ir.main_graph:
        v = view = popxl.variable(np.arange(6.0).reshape(2, 3), popxl.float32)
        for _ in range(1500):
            view = ops.transpose_(view)
        ops.add_(view, popxl.constant(1.0))
    with popxl.Session(ir) as session:
        session.run()
        np.testing.assert_array_equal(session.get_tensor_data(v), np.arange(6.0).reshape(2, 3) + 1)
