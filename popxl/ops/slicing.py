"""Ops that cut and join tensors: slice, subsample, split, concat, and their view forms (see `popxl.ops.shape`)."""

from __future__ import annotations

import builtins
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from popxl.core.declaration import OpKind
from popxl.core.tensor import Tensor
from popxl.errors import PopxlError
from popxl.ops.kernels.elements import full_after
from popxl.ops.shape import reshape
from popxl.values.shapes import integer, integer_or_integers, of_shape, one_axis
from popxl.values.spec import TensorSpec

Bounds = int | Sequence[int | None] | None

# Slice --------------------------------------------------------------------------------------------------------------


def _slices(rank: int, start: Any, stop: Any, step: Any, axis: Any) -> tuple[builtins.slice, ...]:
    """One Python slice for each dimension."""
    axes = [one_axis(dimension, rank) for dimension in axis]
    if len(set(axes)) < len(axes):
        raise ValueError(f"`axis` names a dimension twice: {axis}.")
    slices = [builtins.slice(None)] * rank
    for dimension, *bounds in zip(axes, start, stop, step, strict=True):
        slices[dimension] = builtins.slice(*bounds)
    return tuple(slices)


def _sliced(t: Any, **where: Any) -> TensorSpec:
    ranges = (range(size)[cut] for size, cut in zip(t.shape, _slices(len(t.shape), **where), strict=True))
    sizes = tuple(map(len, ranges))
    return TensorSpec(sizes, t.dtype)


_slice = OpKind(
    "Slice",
    lambda t, **where: t[_slices(t.ndim, **where)],
    shape=_sliced,
    result="slice_out",
    gradient={"t": lambda g, t_spec, attributes: _slice_grad(g, shape=t_spec.shape, **attributes)},
)
_slice_ = _slice.as_view("SliceInplace", lambda t, view, **where: (_put(t, view, where),))


def _as_block(view: Any, shape: tuple[int, ...], where: dict[str, Any]) -> tuple[Any, list[int]]:
    """A slice in ascending order of positions, with its first position."""
    ranges = [range(size)[cut] for size, cut in zip(shape, _slices(len(shape), **where), strict=True)]
    forwards = lax.rev(view, [d for d, positions in enumerate(ranges) if positions.step < 0])
    return forwards, [min(positions, default=size) for size, positions in zip(shape, ranges, strict=True)]


def _put(t: Any, view: Any, where: dict[str, Any]) -> Any:
    """`t` with `view` at the sliced position. Not by `t.at`, a scatter: of a whole tensor that is reversed afterwards,
    it ends the process (jax 0.10)."""
    return lax.dynamic_update_slice(t, *_as_block(view, t.shape, where))


def _uncut(g: Any, *, shape: tuple[int, ...], **where: Any) -> Any:
    """Zeros with `g` at the sliced position."""
    forwards, begins = _as_block(g, shape, where)
    padding = [(b, size - b - n, 0) for b, size, n in zip(begins, shape, g.shape, strict=True)]
    return lax.pad(forwards, jnp.zeros((), g.dtype), padding)


_slice_grad: OpKind = OpKind(
    "SliceGrad",
    _uncut,
    shape=of_shape,
)


def slice(t: Tensor, start: Bounds = None, stop: Bounds = None, step: Bounds = None, axis: Bounds = None) -> Tensor:
    """Cut a block out of `t`: `t[start:stop:step]` on one axis or several. The rank stays.

    Args:
        t: tensor of any shape.
        start, stop: bounds, counted from the back if negative, and clipped to the tensor; `None` for all.
        step: 1 or -1.
        axis: the dimensions that the bounds are for; the first ones by default.

    Returns:
        A new tensor (a copy); `t` itself if no bound and no step is given.

    Raises:
        ValueError: if the lists differ in length or name a dimension twice, or for another step.
        PopxlError: if there is no such axis.

    See also: `numpy` basic slicing.

    Example:
        >>> y = ops.slice(x, start=[0, 1], stop=[2, 3])      # x[0:2, 1:3]
    """
    return t if start is None and stop is None and step is None else _slice(t, **process_args(start, stop, step, axis))


def slice_(t: Tensor, start: Bounds = None, stop: Bounds = None, step: Bounds = None, axis: Bounds = None) -> Tensor:
    """Slice `t` as a view; writes are visible through both.

    Example:
        >>> ops.relu_(ops.slice_(table, 0, 2))               # changes the first two rows of the table
    """
    return t if start is None and stop is None and step is None else _slice_(t, **process_args(start, stop, step, axis))


def process_args(start: Bounds, stop: Bounds, step: Bounds, axis: Bounds) -> dict[str, Any]:
    """Normalize `slice` arguments to equally long tuples."""
    arguments = {"start": start, "stop": stop, "step": step, "axis": axis}
    tuples: dict[str, tuple[Any, ...]] = {}
    for name, bounds in arguments.items():
        if bounds is not None:
            entries = integer_or_integers(bounds, f"slice: `{name}`", gaps=name != "axis")
            tuples[name] = (entries,) if isinstance(entries, int) else entries
    lengths = {name: len(v) for name, v in tuples.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"slice: the arguments have different lengths: {lengths}.")
    count = next(iter(lengths.values()))
    full: dict[str, Any] = {name: tuples.get(name, (None,) * count) for name in arguments}
    full["axis"] = tuples.get("axis", tuple(range(count)))
    full["step"] = tuple(1 if step is None else step for step in full["step"])
    if any(step not in (1, -1) for step in full["step"]):
        raise ValueError(f"slice: steps are 1 or -1; got {full['step']}. For larger ones use `ops.subsample`.")
    return full


def _sampled(t: Any, *, strides: tuple[int, ...]) -> TensorSpec:
    if len(strides) > len(t.shape):
        raise ValueError(f"`strides` has {len(strides)} entries for a tensor of rank {len(t.shape)}.")
    if any(stride == 0 for stride in strides):
        raise PopxlError(f"`strides` {strides} contains 0.")
    if any(stride < 0 for stride in strides):
        raise ValueError(f"`strides` {strides} has negative entries; reverse with `ops.slice(t, step=-1)` first.")
    steps = itertools.chain(strides, itertools.repeat(1))
    return TensorSpec(tuple(-(-size // step) for size, step in zip(t.shape, steps, strict=False)), t.dtype)


_subsample = OpKind(
    "Subsample",
    lambda t, *, strides: t[tuple(builtins.slice(None, None, stride) for stride in strides)],
    shape=_sampled,
    result="subsample_out",
    gradient={"t": lambda g, t_spec, strides: _subsample_grad(g, shape=t_spec.shape, strides=strides)},
)


def _spread(g: Any, *, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    """Zeros with `g` at the sampled positions."""
    if g.shape == shape:  # all positions; as a scatter, see `_put`
        return g
    sampled = tuple(builtins.slice(None, None, stride) for stride in strides)
    return full_after(shape, 0, g.dtype, after=g).at[sampled].set(g)


_subsample_grad: OpKind = OpKind(
    "SubsampleGrad",
    _spread,
    shape=of_shape,
)


def subsample(t: Tensor, strides: int | Iterable[int]) -> Tensor:
    """Every `strides[d]`-th element along each dimension `d`, beginning with the first.

    Args:
        t: tensor of any shape.
        strides: stride along each dimension; missing ones are 1. A single number is for the first dimension.

    Returns:
        A new tensor.

    Raises:
        ValueError: for more strides than dimensions, or a negative one.
        PopxlError: for a stride of 0.

    Example:
        >>> y = ops.subsample(x, [2, 3])                     # x[::2, ::3]
    """
    sizes = integer_or_integers(strides, "subsample: `strides`")
    return _subsample(t, strides=(sizes,) if isinstance(sizes, int) else sizes)


# Split and concat ---------------------------------------------------------------------------------------------------


def _concatenate(*ts: Any, axis: int) -> TensorSpec:
    first = ts[0]
    dimension = one_axis(axis, len(first.shape))
    for t in ts:
        if len(t.shape) != len(first.shape) or any(
            a != b for d, (a, b) in enumerate(zip(t.shape, first.shape, strict=True)) if d != dimension
        ):
            raise PopxlError(f"the shapes {first.shape} and {t.shape} differ in more than dimension {dimension}.")
    shape = (*first.shape[:dimension], sum(t.shape[dimension] for t in ts), *first.shape[dimension + 1 :])
    return TensorSpec(shape, first.dtype)


def _operand_gradient(g: Tensor, i: int, specs: Sequence[TensorSpec], axis: int) -> Tensor:
    """The slice of a gradient that belongs to operand `i`."""
    begin = sum(spec.shape[axis] for spec in specs[:i])
    return slice(g, begin, begin + specs[i].shape[axis], 1, axis % g.rank)


def _update_operands(*ts_and_view: Any, axis: int) -> tuple[Any, ...]:
    *ts, view = ts_and_view
    ends = list(itertools.accumulate(t.shape[axis] for t in ts))
    return tuple(jnp.split(view, ends[:-1], axis=axis))


_concat = OpKind(
    "Concat",
    lambda *ts, axis: jnp.concatenate(ts, axis=axis),
    shape=_concatenate,
    result="concat_out",
    gradient={"ts": _operand_gradient},
)
_concat_ = _concat.as_view("ConcatInplace", _update_operands)


def concat(ts: Iterable[Tensor], axis: int = 0) -> Tensor:
    """Join tensors along an axis.

    Args:
        ts: tensors of one dtype, whose shapes agree but for `axis`.
        axis: the dimension to join; negative ones count from the back.

    Returns:
        A new tensor.

    Raises:
        ValueError: if there are no tensors.
        TypeError: if the dtypes differ.
        PopxlError: if the shapes do not fit, or there is no such axis.

    See also: `numpy.concatenate`.

    Example:
        >>> y = ops.concat([a, b], axis=1)
    """
    return _concat(*_alike("concat", ts), axis=integer(axis, "concat: `axis`"))


def concat_(ts: Iterable[Tensor], axis: int = 0) -> Tensor:
    """As `concat`, but the result is a view: it shares storage with every tensor, region by region.

    Example:
        >>> ops.exp_(ops.concat_([a, b]))                    # overwrites a and b
    """
    return _concat_(*_alike("concat_", ts), axis=integer(axis, "concat_: `axis`"))


_stack = OpKind(
    "Stack",
    lambda *ts, axis: jnp.stack(ts, axis),
    shape=lambda *ts, axis: _stacked(*ts, axis=axis),
    gradient={"ts": lambda g, i, axis, operand_spec: reshape(slice(g, i, i + 1, 1, axis % g.rank), operand_spec.shape)},
)


def _stacked(*ts: Any, axis: int) -> TensorSpec:
    first, dimension = ts[0], one_axis(axis, len(ts[0].shape) + 1)
    for t in ts:
        if t.shape != first.shape:
            raise PopxlError(f"the shapes {first.shape} and {t.shape} differ; tensors of one shape are stacked.")
    return TensorSpec((*first.shape[:dimension], len(ts), *first.shape[dimension:]), first.dtype)


def stack(ts: Iterable[Tensor], axis: int = 0) -> Tensor:
    """Join tensors along a new axis.

    Args:
        ts: tensors of one dtype and shape.
        axis: position of the new dimension in the result; negative ones count from the back.

    Returns:
        A new tensor.

    Raises:
        ValueError: if there are no tensors.
        TypeError: if the dtypes differ.
        PopxlError: if the shapes differ, or there is no such axis.

    See also: `numpy.stack`.

    Example:
        >>> pairs = ops.stack([x, y], axis=-1)
    """
    return _stack(*_alike("stack", ts), axis=integer(axis, "stack: `axis`"))


def _alike(name: str, ts: Iterable[Tensor]) -> list[Tensor]:
    if isinstance(ts, Tensor) or not isinstance(ts, Iterable):
        raise TypeError(f"{name}: `ts` must be a list of tensors; got {ts!r} ({type(ts).__name__}).")
    tensors = list(ts)
    if not tensors:
        raise ValueError(f"{name}: at least one tensor is needed; none was given.")
    if len({t.dtype for t in tensors if isinstance(t, Tensor)}) > 1:
        raise TypeError(
            f"All inputs to a concat operation must have the same type: these are {', '.join(map(repr, tensors))}. "
            "Convert some of them with `ops.cast`."
        )
    return tensors


def _split_arrays(t: Any, *, lengths: tuple[int, ...], axis: int) -> tuple[TensorSpec, ...]:
    dimension = one_axis(axis, len(t.shape))
    if sum(lengths) != t.shape[dimension] or min(lengths, default=0) < 0:
        raise PopxlError(
            f"the parts {lengths} do not add up to the size of dimension {dimension}, {t.shape[dimension]}."
        )
    return tuple(TensorSpec((*t.shape[:dimension], n, *t.shape[dimension + 1 :]), t.dtype) for n in lengths)


_split = OpKind(
    "Split",
    lambda t, *, lengths, axis: tuple(
        lax.slice_in_dim(t, end - n, end, axis=axis % t.ndim)
        for n, end in zip(lengths, itertools.accumulate(lengths), strict=True)
    ),
    shape=_split_arrays,
    result="{t}_split_{i}",
    gradient={"t": lambda gs, axis: concat(gs, axis)},
)


def split(t: Tensor, splits: int | Iterable[int], axis: int = 0) -> list[Tensor]:
    """Cut a tensor into parts along an axis.

    Args:
        t: tensor of rank 1 or more.
        splits: the number of equal parts, or the length of each part.
        axis: the dimension to cut; negative ones count from the back.

    Returns:
        A list of new tensors (copies).

    Raises:
        ValueError: if the axis cannot be cut into that many equal parts.
        PopxlError: if the lengths do not add up, or there is no such axis.

    See also: `numpy.split`.

    Example:
        >>> q, k, v = ops.split(qkv, 3, axis=-1)
    """
    axis, lengths = integer(axis, "split: `axis`"), integer_or_integers(splits, "split: `splits`")
    if isinstance(lengths, int):
        if isinstance(t, Tensor) and t.shape:
            size = t.shape[one_axis(axis, t.rank)]
            if lengths < 1 or size % lengths:
                raise ValueError(f"split: dimension {axis} of {t!r} cannot be cut into {lengths} equal parts.")
            lengths = (size // lengths,) * lengths
        else:
            lengths = (lengths,)
    return list(_split(t, lengths=lengths, axis=axis))
