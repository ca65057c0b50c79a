"""Helpers for host arrays: the values that the documentation promises, and what undoes what."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from popxl_addons import array_munging as am

A = np.arange(12).reshape(2, 6)
B = np.arange(16).reshape(4, 4)

sizes = st.integers(1, 3)


@st.composite
def arrays_and_axes(draw, number=1):
    """An array without repeated elements, and distinct axes of it, counted from either end."""
    shape = draw(st.lists(st.sampled_from([2, 4, 6]), min_size=number, max_size=4))
    axes = draw(st.permutations(range(len(shape))))[:number]
    signed = [axis - len(shape) * draw(st.booleans()) for axis in axes]
    return np.arange(np.prod(shape)).reshape(shape), *signed


# Cutting and joining ------------------------------------------------------------------------------------------------


def test_shard():
    expected = [[[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], [10, 11]]]
    np.testing.assert_array_equal(am.shard(A, 3, 1), expected)
    np.testing.assert_array_equal(am.shard(A, 3, -1), expected)
    np.testing.assert_array_equal(am.unshard(am.shard(A, 3, 1), 1), A)


@given(arrays_and_axes(), st.sampled_from([1, 2]))
def test_unshard_undoes_shard(case, n):
    x, axis = case
    parts = am.shard(x, n, axis)
    assert parts.shape[0] == n and parts[0].shape[axis] == x.shape[axis] // n
    np.testing.assert_array_equal(parts, np.array(np.split(x, n, axis)))
    np.testing.assert_array_equal(am.unshard(parts, axis), x)
    np.testing.assert_array_equal(am.unshard_arrays(np.split(parts, n), axis), x)


@given(arrays_and_axes(number=2), st.sampled_from([1, 2]), st.sampled_from([1, 2]))
def test_unshard2d_undoes_shard2d(case, n_1, n_2):
    x, axis_1, axis_2 = case
    parts = am.shard2D(x, n_1, n_2, axis_1, axis_2)
    np.testing.assert_array_equal(parts[0], np.split(np.split(x, n_1, axis_1)[0], n_2, axis_2)[0])
    np.testing.assert_array_equal(parts[-1], np.split(np.split(x, n_1, axis_1)[-1], n_2, axis_2)[-1])
    np.testing.assert_array_equal(am.unshard2D(parts, n_1, n_2, axis_1, axis_2), x)


def test_unshard2d_of_one_axis_cut_twice():
    x = np.arange(12)
    np.testing.assert_array_equal(am.unshard2D(am.shard2D(x, 3, 2, 0, 0), 3, 2, 0, 0), x)


def test_shard2d():
    along_rows = [[[0, 1], [4, 5]], [[2, 3], [6, 7]], [[8, 9], [12, 13]], [[10, 11], [14, 15]]]
    along_columns = [[[0, 1], [4, 5]], [[8, 9], [12, 13]], [[2, 3], [6, 7]], [[10, 11], [14, 15]]]
    np.testing.assert_array_equal(am.shard2D(B, 2, 2, 0, 1), along_rows)
    np.testing.assert_array_equal(am.shard2D(B, 2, 2, 1, 0), along_columns)


def test_split2d():
    parts = am.split2D([[0, 1], [2, 3]], 2, 2, 0, 1)
    assert [[part.tolist() for part in row] for row in parts] == [[[[0]], [[1]]], [[[2]], [[3]]]]


def test_unshard_arrays():
    xs = [np.arange(6).reshape(1, 2, 3), 10 + np.arange(4).reshape(1, 2, 2)]
    for axis in (1, -1):
        np.testing.assert_array_equal(am.unshard_arrays(xs, axis), np.concatenate([xs[0][0], xs[1][0]], axis=1))


# Repeating ----------------------------------------------------------------------------------------------------------


def test_repeat():
    np.testing.assert_array_equal(am.repeat([7, 8], 3), [[7, 8]] * 3)
    np.testing.assert_array_equal(am.repeat([[1, 2], [3, 4]], 2, 1), [[[1, 2], [1, 2]], [[3, 4], [3, 4]]])
    np.testing.assert_array_equal(am.repeat(B, 2, -3), am.repeat(B, 2, 0))
    scalars = am.repeat(np.float32(2), 4)
    assert scalars.shape == (4,) and scalars.dtype == np.float32
    assert am.repeat(np.array(1, np.int16), 2).tolist() == [1, 1]


@given(arrays_and_axes(), st.integers(1, 3))
def test_repeated_arrays_are_copies_of_the_original(case, n):
    x, axis = case
    repeated = am.repeat(x, n, axis)
    assert repeated.shape[axis] == n
    for copy in np.moveaxis(repeated, axis, 0):
        np.testing.assert_array_equal(copy, x)
    np.testing.assert_array_equal(am.repeat_axis(x, n, axis), np.concatenate([x] * n, axis))


def test_torch_tensors():
    torch = pytest.importorskip("torch")
    x = torch.arange(6.0, requires_grad=True)
    assert am.repeat(x, 2).tolist() == [x.tolist()] * 2
    assert am.shard(x, 3, 0).tolist() == [[0, 1], [2, 3], [4, 5]]


def test_wide_dtypes_stay():
    for dtype in (np.float64, np.int64, np.float16):
        x = np.arange(4, dtype=dtype)
        assert am.shard(x, 2, 0).dtype == am.repeat(x, 2).dtype == am.pad_axis(x, 5, 0).dtype == dtype


def test_repeat_shard():
    x = np.arange(6)
    np.testing.assert_array_equal(am.repeat_shard(x, 2, 3, 0), [[0, 1], [2, 3], [4, 5]] * 2)
    np.testing.assert_array_equal(am.repeat_shard([5, 6, 7, 8], 2, 2, 0, "strided"), [[5, 6], [5, 6], [7, 8], [7, 8]])
    expected = [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5]]
    np.testing.assert_array_equal(am.repeat_shard(x, 2, 3, 0, "strided"), expected)


# Tensor parallelism -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "tp", "rf", "expected"),
    [
        (6, 1, 3, [[0, 1, 2], [3, 4, 5]]),
        (3, 2, 2, [[0, 0], [1, 1], [2, 2]]),
        (6, 2, 4, [[0, 0, 1, 1], [2, 2, 3, 3], [4, 4, 5, 5]]),
        (4, 3, 6, [[0, 0, 0, 1, 1, 1], [2, 2, 2, 3, 3, 3]]),
        (2, 2, 4, [0, 0, 1, 1]),
        (3, 1, 1, [0, 1, 2]),
    ],
)
def test_tensor_parallel_input(n, tp, rf, expected):
    np.testing.assert_array_equal(am.tensor_parallel_input(np.arange(n), tp, rf), expected)


def test_what_each_member_of_a_group_gets():
    shapes = []

    def shifted(copy, i):
        shapes.append(copy.shape)
        copy += 10 * i  # in place: each call has a copy of its own
        return copy

    x = np.arange(4)
    np.testing.assert_array_equal(am.tensor_parallel_input(x, 2, 4, shifted), [[0, 10, 1, 11], [2, 12, 3, 13]])
    assert shapes == [(4, 1)] * 2 and x.tolist() == [0, 1, 2, 3]


def test_tensor_parallel_output():
    out = np.arange(8).reshape(2, 4, 1)
    arguments = dict(num_host_transfers=2, tp=2, rf=4, data_shape=(1,))
    assert am.tensor_parallel_output(out, **arguments).tolist() == [[0], [2], [4], [6]]
    assert am.tensor_parallel_output(out, **arguments, tp_identical=False).tolist() == [
        [[0], [1]],
        [[2], [3]],
        [[4], [5]],
        [[6], [7]],
    ]
    assert am.tensor_parallel_output(out, **arguments, true_num_host_transfers=1).tolist() == [[0], [2]]


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.lists(sizes, max_size=2))
def test_parallel_output_undoes_parallel_input(transfers, tp, groups, data_shape):
    rf, n = tp * groups, transfers * groups
    x = np.arange(n * int(np.prod(data_shape))).reshape(n, *data_shape)
    arranged = am.tensor_parallel_input(x, tp, rf)
    assert arranged.size == transfers * rf * np.prod(data_shape)
    np.testing.assert_array_equal(am.tensor_parallel_output(arranged, transfers, tp, rf, data_shape), x)
    everything = am.tensor_parallel_output(arranged, transfers, tp, rf, data_shape, tp_identical=False)
    np.testing.assert_array_equal(everything, am.repeat(x, tp, 1))


# Axes ---------------------------------------------------------------------------------------------------------------


def test_pad_axis():
    np.testing.assert_array_equal(am.pad_axis([[0, 1], [2, 3]], 3, 0, -1), [[0, 1], [2, 3], [-1, -1]])
    np.testing.assert_array_equal(am.pad_axis([[0, 1], [2, 3]], 3, -1), [[0, 1, 0], [2, 3, 0]])
    np.testing.assert_array_equal(am.pad_axis(B, 4, 1), B)


def test_squeeze_safe():
    x = np.ones((4, 1, 3, 1))
    assert am.squeeze_safe(x).shape == (4, 3)
    assert am.squeeze_safe(x, [1, 0]).shape == (4, 3, 1)
    assert am.squeeze_safe(x, (-1, 3, 3)).shape == (4, 1, 3)
    assert am.squeeze_safe(x, 1).shape == am.squeeze_safe(x, np.int64(1)).shape == (4, 3, 1)
    assert am.squeeze_safe(x, 0).shape == am.squeeze_safe(x, []).shape == x.shape


def test_handle_negative_axis():
    assert [am.handle_negative_axis(A, axis) for axis in (0, 1, -1, -2)] == [0, 1, 1, 0]


@pytest.mark.parametrize("axis", [2, -3])
@pytest.mark.parametrize(
    "function",
    [
        am.handle_negative_axis,
        am.squeeze_safe,
        lambda x, axis: am.shard(x, 2, axis),
        lambda x, axis: am.unshard(x[None], axis),
        lambda x, axis: am.repeat_axis(x, 2, axis),
        lambda x, axis: am.pad_axis(x, 9, axis),
    ],
)
def test_no_such_axis(function, axis):
    with pytest.raises(IndexError, match=rf"`axis` is {axis}, and the array has the rank 2"):
        function(B, axis)


def test_a_number_has_no_axis():
    with pytest.raises(IndexError, match="rank 0"):
        am.handle_negative_axis(np.float32(1), 0)
    with pytest.raises(IndexError):
        am.repeat(B, 2, 4)


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, r"shape \(2, 6\) cannot be cut into 4 equal", lambda: am.shard(A, 4, 1)),
        (ValueError, "cannot be cut into 0 equal", lambda: am.shard(A, 0, 1)),
        (ValueError, "first axis of size 1", lambda: am.unshard_arrays([A, A], 0)),
        (ValueError, "of one rank", lambda: am.unshard_arrays([A[None, :1], A[:1]], 0)),
        (ValueError, "no parts", lambda: am.unshard_arrays([], 0)),
        (AssertionError, "expected a first axis of `n_1` x `n_2` = 6", lambda: am.unshard2D(B, 2, 3, 0, 1)),
        (ValueError, "'contiguous' or 'strided'", lambda: am.repeat_shard(A, 2, 2, 0, "mixed")),
        (ValueError, "`tp` is 4 and `rf` is 2", lambda: am.tensor_parallel_input(A, 4, 2)),
        (ValueError, "divisible by `tp`", lambda: am.tensor_parallel_output(A, 1, 2, 3, ())),
        (ValueError, "reshape", lambda: am.tensor_parallel_input(np.arange(3), 1, 2)),
        (AssertionError, "axis 1 of `x` has the length 6; expected at most `n`, 4", lambda: am.pad_axis(A, 4, -1)),
    ],
)
def test_errors(error, message, call):
    with pytest.raises(error, match=message):
        call()
