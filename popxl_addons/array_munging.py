"""Splitting, joining and repeating arrays on the host, mostly to give each replica its part. Uses only NumPy.

``x`` is an array, or anything that NumPy converts to one (lists, numbers, torch tensors). A negative axis counts from
the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

import popxl
from popxl.extend.arguments import integer, word

__all__ = [
    "handle_negative_axis",
    "pad_axis",
    "repeat",
    "repeat_axis",
    "repeat_shard",
    "shard",
    "shard2D",
    "split2D",
    "squeeze_safe",
    "tensor_parallel_input",
    "tensor_parallel_output",
    "unshard",
    "unshard2D",
    "unshard_arrays",
]


# Cutting and joining ------------------------------------------------------------------------------------------------


def shard(x: Any, n: int, axis: int) -> np.ndarray:
    """Cut `axis` into `n` equal parts, and stack them on a new first axis: `unshard` undoes it.

    Args:
        x: array of shape ``(..., size, ...)``.
        n: number of parts, a divisor of `size`.
        axis: axis to split.

    Returns:
        An array of shape ``(n, ..., size / n, ...)``.

    Raises:
        ValueError: if `n` is not a divisor of `size`.
        IndexError: if there is no such axis.

    Example:
        >>> shard(np.arange(12).reshape(2, 6), 3, 1)[0]
        array([[0, 1],
               [6, 7]])
    """
    return np.stack(_split(_array(x), n, axis))


def unshard_arrays(xs: Sequence[Any], axis: int) -> np.ndarray:
    """Join shards with leading axes of size 1, removing these axes.

    Args:
        xs: arrays of shape ``(1, ..., size, ...)``.
        axis: along which to join; the leading axis does not count.

    Returns:
        An array of shape ``(..., sum of the sizes, ...)``.

    Raises:
        ValueError: if a leading axis is not of size 1, or the parts do not fit together.
        IndexError: if there is no such axis.

    Example:
        >>> unshard_arrays([np.array([[1, 2]]), np.array([[3]])], 0)
        array([1, 2, 3])
    """
    arrays = list(map(_array, xs))
    shapes = [array.shape for array in arrays]
    if len({len(shape) for shape in shapes}) > 1 or any(shape[:1] != (1,) for shape in shapes):
        raise ValueError(
            f"unshard_arrays: `xs` have the shapes {shapes}; expected arrays of one rank, with a first axis of size 1."
        )
    return _join([array[0] for array in arrays], axis)


def unshard(x: Any, axis: int) -> np.ndarray:
    """Join along `axis` the parts stacked on the first axis: the inverse of `shard`.

    Args:
        x: array of shape ``(n, ..., size, ...)``.
        axis: along which to join; the first axis does not count.

    Returns:
        An array of shape ``(..., n * size, ...)``.

    Raises:
        ValueError: if the first axis is of size 0.
        IndexError: if there is no such axis.

    Example:
        >>> unshard([[[0, 1]], [[2, 3]]], 1)
        array([[0, 1, 2, 3]])
    """
    return _join(list(_array(x)), axis)


def split2D(x: Any, n_1: int, n_2: int, axis_1: int, axis_2: int) -> list[list[np.ndarray]]:
    """Cut `axis_1` into `n_1` parts, and `axis_2` of each into `n_2`: a list of `n_1` lists of `n_2` arrays.

    Raises:
        ValueError: if a number of parts is not a divisor of the size.
        IndexError: if there is no such axis.

    Example:
        >>> split2D([[0, 1], [2, 3]], 2, 2, 0, 1)[1]
        [array([[2]]), array([[3]])]
    """
    return [_split(part, n_2, axis_2) for part in _split(_array(x), n_1, axis_1)]


def shard2D(x: Any, n_1: int, n_2: int, axis_1: int, axis_2: int) -> np.ndarray:
    """The parts of `split2D`, stacked on a new first axis of size ``n_1 * n_2``; `axis_1` is the outer one.

    Raises:
        ValueError, IndexError: as for `split2D`.

    Example:
        >>> shard2D(np.arange(16).reshape(4, 4), 2, 2, 0, 1)[1]
        array([[2, 3],
               [6, 7]])
    """
    return np.stack([part for row in split2D(x, n_1, n_2, axis_1, axis_2) for part in row])


def unshard2D(x: Any, n_1: int, n_2: int, axis_1: int, axis_2: int) -> np.ndarray:
    """Undo `shard2D`, given the same arguments.

    Raises:
        AssertionError: if the first axis is not of size ``n_1 * n_2``.
        IndexError: if there is no such axis.

    Example:
        >>> x = np.arange(16).reshape(4, 4)
        >>> bool((unshard2D(shard2D(x, 2, 4, 1, 0), 2, 4, 1, 0) == x).all())
        True
    """
    x = _array(x)
    if x.shape[:1] != (n_1 * n_2,):
        raise AssertionError(
            f"unshard2D: `x` has the shape {x.shape}; expected a first axis of `n_1` x `n_2` = {n_1 * n_2} parts."
        )
    return unshard(np.stack([unshard(row, axis_2) for row in x.reshape(n_1, n_2, *x.shape[1:])]), axis_1)


# Repeating ----------------------------------------------------------------------------------------------------------


def repeat(x: Any, n: int, axis: int = 0) -> np.ndarray:
    """Insert a new axis at `axis`, along which `x` is repeated `n` times. Works for numbers too.

    Raises:
        ValueError: if `n` is negative.
        IndexError: if `axis` is not in ``[-rank - 1, rank]``.

    Example:
        >>> repeat([7, 8], 3)
        array([[7, 8],
               [7, 8],
               [7, 8]])
    """
    return np.repeat(np.expand_dims(_array(x), axis), n, axis)


def repeat_axis(x: Any, n: int, axis: int = 0) -> np.ndarray:
    """Repeat `x` `n` times along an axis that it has.

    Raises:
        ValueError: if `n` is negative.
        IndexError: if there is no such axis.

    Example:
        >>> repeat_axis([5, 6], 3)
        array([5, 6, 5, 6, 5, 6])
    """
    x = _array(x)
    times = [1] * x.ndim
    times[handle_negative_axis(x, axis)] = n
    return np.tile(x, times)


def repeat_shard(
    x: Any,
    n_repeats: int,
    n_shards: int,
    shard_axis: int,
    sharded_tensor: Literal["contiguous", "strided"] = "contiguous",
) -> np.ndarray:
    """Repeat each shard of `shard` `n_repeats` times.

    Args:
        x: array of shape ``(..., size, ...)``.
        n_repeats: number of repetitions of each part.
        n_shards: number of parts.
        shard_axis: the axis that is cut.
        sharded_tensor: ``"contiguous"`` repeats all parts together (0, 1, 2, 0, 1, 2), ``"strided"`` each separately
            (0, 0, 1, 1, 2, 2).

    Returns:
        An array of shape ``(n_repeats * n_shards, ..., size / n_shards, ...)``.

    Raises:
        ValueError: for an unknown `sharded_tensor`, and as for `shard`.
        IndexError: if there is no such axis.

    Example:
        >>> repeat_shard([5, 6, 7, 8], 2, 2, 0, "strided").tolist()
        [[5, 6], [5, 6], [7, 8], [7, 8]]
    """
    parts = shard(x, n_shards, shard_axis)
    if word(sharded_tensor, "repeat_shard: `sharded_tensor`", ("contiguous", "strided")) == "contiguous":
        return repeat_axis(parts, n_repeats)
    return np.repeat(parts, n_repeats, axis=0)


# Tensor parallelism -------------------------------------------------------------------------------------------------


def tensor_parallel_input(
    input_data: Any, tp: int, rf: int, repeat_fn: Callable[[np.ndarray, int], np.ndarray] | None = None
) -> np.ndarray:
    """Arrange samples for replicas of which `tp` consecutive ones see the same sample.

    Args:
        input_data: array of shape ``(n, *data_shape)``.
        tp: number of replicas that see a sample.
        rf: number of replicas, a multiple of `tp`.
        repeat_fn: function of the copy (of shape ``(n, 1, *data_shape)``) for member `i` of each group, and `i`:
            ``repeat_fn(copy, i)`` replaces the copy.

    Returns:
        An array of shape ``(n * tp / rf, rf, *data_shape)``, without the first two axes where they are of size 1.

    Raises:
        ValueError: if `rf` is not a multiple of `tp`, or the samples do not fill a whole number of transfers.

    Example:
        >>> tensor_parallel_input(np.arange(4), 2, 4, lambda copy, i: copy + 10 * i)
        array([[ 0, 10,  1, 11],
               [ 2, 12,  3, 13]])
    """
    _check_parallel("tensor_parallel_input", tp, rf)
    samples = np.expand_dims(_array(input_data), 1)
    copies = [samples if repeat_fn is None else _array(repeat_fn(samples.copy(), i)) for i in range(tp)]
    arranged = np.concatenate(copies, axis=1).reshape(-1, rf, *samples.shape[2:])
    return squeeze_safe(arranged, (0, 1))


def tensor_parallel_output(
    output_data: Any,
    num_host_transfers: int,
    tp: int,
    rf: int,
    data_shape: Sequence[int],
    tp_identical: bool = True,
    true_num_host_transfers: int | None = None,
) -> np.ndarray:
    """Undo `tensor_parallel_input` for session results: consecutive samples.

    Args:
        output_data: array of shape ``(num_host_transfers, rf, *data_shape)``; axes of size 1 may be left out.
        num_host_transfers: number of transfers of the stream.
        tp: number of replicas that saw the same sample.
        rf: number of replicas, a multiple of `tp`.
        data_shape: shape of one transfer of one replica.
        tp_identical: whether to take only the first of the `tp` results for a sample.
        true_num_host_transfers: number of transfers to keep, if the last ones were only padding.

    Returns:
        An array of shape ``(samples, *data_shape)``; without `tp_identical`, ``(samples, tp, *data_shape)``.

    Raises:
        ValueError: if `rf` is not a multiple of `tp`, or `output_data` does not have this many elements.

    Example:
        >>> tensor_parallel_output(np.arange(8).reshape(2, 4, 1), 2, 2, 4, (1,)).tolist()
        [[0], [2], [4], [6]]
    """
    _check_parallel("tensor_parallel_output", tp, rf)
    grouped = _array(output_data).reshape(num_host_transfers, rf // tp, tp, *data_shape)[:true_num_host_transfers]
    samples = grouped.reshape(-1, *grouped.shape[2:])
    return samples[:, 0] if tp_identical else samples


def _check_parallel(function: str, tp: int, rf: int) -> None:
    tp, rf = integer(tp, f"{function}: `tp`"), integer(rf, f"{function}: `rf`")
    if not 0 < tp <= rf or rf % tp:
        raise ValueError(
            f"{function}: `tp` is {tp} and `rf` is {rf}; expected a number of replicas `rf` divisible by `tp`."
        )


# Axes ---------------------------------------------------------------------------------------------------------------


def pad_axis(x: Any, n: int, axis: int, value: Any = 0) -> np.ndarray:
    """Pad the end of `axis` with `value` to length `n`.

    Raises:
        AssertionError: if the axis is longer than `n`.
        IndexError: if there is no such axis.

    Example:
        >>> pad_axis([[0, 1], [2, 3]], 3, 0, -1).tolist()
        [[0, 1], [2, 3], [-1, -1]]
    """
    x = _array(x)
    axis = handle_negative_axis(x, axis)
    missing = n - x.shape[axis]
    if missing < 0:
        raise AssertionError(f"pad_axis: axis {axis} of `x` has the length {x.shape[axis]}; expected at most `n`, {n}.")
    return np.pad(x, [(0, missing if i == axis else 0) for i in range(x.ndim)], constant_values=value)


def squeeze_safe(x: Any, axis: int | Sequence[int] | None = None) -> np.ndarray:
    """Squeeze like ``np.squeeze``, but keep axes that are not of size 1.

    Args:
        x: array.
        axis: an axis or several, repeated or not; by default all.

    Raises:
        IndexError: if there is no such axis.

    Example:
        >>> squeeze_safe(np.ones((4, 1, 3, 1)), [1, 0]).shape
        (4, 3, 1)
    """
    x = _array(x)
    axes = range(x.ndim) if axis is None else np.ravel(axis).tolist()
    found = {handle_negative_axis(x, each) for each in axes}
    return np.squeeze(x, tuple(each for each in found if x.shape[each] == 1))


def handle_negative_axis(x: Any, axis: int) -> int:
    """Convert a negative axis. Raises `IndexError` for axes beyond `x`.

    Example:
        >>> handle_negative_axis(np.ones((2, 3)), -1)
        1
    """
    rank, axis = np.ndim(x), integer(axis, "`axis`")
    if not -rank <= axis < rank:
        raise IndexError(f"`axis` is {axis}, and the array has the rank {rank}; expected one of [{-rank}, {rank}).")
    return axis % rank


def _array(x: Any) -> np.ndarray:
    return x if isinstance(x, np.ndarray) else popxl.utils.to_numpy(x, downcast=False, copy=False)


def _split(x: np.ndarray, n: int, axis: int) -> list[np.ndarray]:
    axis, n = handle_negative_axis(x, axis), integer(n, "The number of parts")
    if n < 1 or x.shape[axis] % n:
        raise ValueError(f"Axis {axis} of an array of the shape {x.shape} cannot be cut into {n} equal parts.")
    return np.split(x, n, axis)


def _join(parts: list[np.ndarray], axis: int) -> np.ndarray:
    if not parts:
        raise ValueError("There are no parts to be joined.")
    return np.concatenate(parts, handle_negative_axis(parts[0], axis))
