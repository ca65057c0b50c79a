"""Ops that rearrange, cut and join elements: reshape, transpose, slice, split, concat, and their view forms.

A function with a trailing underscore gives a *view*: the result shares storage with its operand, so that what is
written to either is seen through the other. Each view op says how to read the view from its base (its lowering) and
how to write the view back into the base (`put`); nothing else in popxl needs to know what a view is.
"""

from __future__ import annotations

import builtins
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from popxl.core.tensor import Tensor
from popxl.core.traits import View
from popxl.errors import PopxlError
from popxl.op import OpKind, not_a_tensor
from popxl.values.shapes import integer, integer_or_integers, integers, one_axis
from popxl.values.spec import TensorSpec

Bounds = int | Sequence[int | None] | None

# Reshape ------------------------------------------------------------------------------------------------------------


def _reshaped(t: Any, *, shape: tuple[int, ...]) -> TensorSpec:
    count = math.prod(t.shape)
    known = math.prod(size for size in shape if size != -1)
    sizes = tuple(count // known if size == -1 else size for size in shape)
    if math.prod(sizes) != count:
        raise PopxlError(f"a tensor of {count} elements cannot have the shape {shape}.")
    return TensorSpec(sizes, t.dtype)


def _wanted(t: Tensor, shape: Iterable[int]) -> tuple[int, ...]:
    """The shape as a tuple, after the checks that are made before all others."""
    sizes = integers(shape, "reshape: `shape`")
    if any(size == 0 or size < -1 for size in sizes):
        raise ValueError(
            f"Invalid shape value in reshape: {shape}, for {t!r}; sizes are positive, or -1 for the one to infer."
        )
    if sizes.count(-1) > 1:
        raise ValueError(
            f"Reshape shape can contain at most one '-1' value; got {shape}, for {t!r}. Say the other sizes."
        )
    return sizes


_reshape: OpKind = OpKind(
    "Reshape",
    lambda t, *, shape: t.reshape(shape),
    shape=_reshaped,
    result="{t}_reshaped",
    gradient={"t": lambda g, t_spec: _reshape(g, shape=t_spec.shape)},
)
_reshape_ = OpKind(
    "ReshapeInplace",
    _reshape.lowering,
    shape=_reshaped,
    result="{t}_reshaped",
    gradient=_reshape.gradient,
    traits=[View(lambda t, view, *, shape: (view.reshape(t.shape),))],
)


def reshape(t: Tensor, shape: Iterable[int]) -> Tensor:
    """The elements of `t`, in row-major order, in another shape.

    Args:
        t: tensor of any shape.
        shape: the new sizes; one of them may be -1 and is inferred.

    Returns:
        A new tensor (a copy). A meta-shape is dropped.

    Raises:
        ValueError: for a size of 0 or below -1, or several -1.
        PopxlError: if the number of elements would change.

    See also: `numpy.reshape`.

    Example:
        >>> rows = ops.reshape(images, (-1, 8))
    """
    return _reshape(t, shape=_wanted(t, shape))


def reshape_(t: Tensor, shape: Iterable[int]) -> Tensor:
    """As `reshape`, but a view of `t`: nothing is copied, and writing to one changes the other.

    Example:
        >>> rows = ops.reshape_(images, (-1, 8))
    """
    return _reshape_(t, shape=_wanted(t, shape))


def flatten(t: Tensor) -> Tensor:
    """The elements of `t` in one dimension: `reshape(t, (-1,))`.

    See also: `numpy.ravel`.

    Example:
        >>> v = ops.flatten(x)
    """
    return reshape(t, (-1,))


def flatten_(t: Tensor) -> Tensor:
    """As `flatten`, but a view of `t`.

    Example:
        >>> v = ops.flatten_(x)
    """
    return reshape_(t, (-1,))


def squeeze(t: Tensor, axes: Iterable[int] | None = None) -> Tensor:
    """Drop dimensions of size 1.

    Args:
        t: tensor of any shape.
        axes: the dimensions to drop; negative ones count from the back. `None` means all of size 1.

    Returns:
        A new tensor.

    Raises:
        ValueError: if an axis is named twice, does not exist, or is not of size 1.

    See also: `numpy.squeeze`.

    Example:
        >>> y = ops.squeeze(row, [0])
    """
    if not isinstance(t, Tensor):
        raise not_a_tensor("squeeze", "t", t)
    if axes is None:
        drop = [d for d, size in enumerate(t.shape) if size == 1]
    else:
        axes = integers(axes, "squeeze: `axes`")
        drop = [axis + t.rank if axis < 0 else axis for axis in axes]
        if len(set(drop)) < len(drop):
            raise ValueError(f"squeeze: `axes` names a dimension twice: {axes} of {t!r}.")
        for axis in drop:
            if not 0 <= axis < t.rank or t.shape[axis] != 1:
                raise ValueError(f"squeeze: {t!r} has no dimension {axis} of size 1; `axes` is {axes}.")
    return _reshape(t, shape=tuple(size for d, size in enumerate(t.shape) if d not in drop))


# Transpose ----------------------------------------------------------------------------------------------------------


def _transposed(t: Any, *, permutation: tuple[int, ...]) -> TensorSpec:
    return TensorSpec(tuple(t.shape[d] for d in permutation), t.dtype, t.meta_shape)


def _inverse(permutation: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(range(len(permutation)), key=permutation.__getitem__))


_transpose: OpKind = OpKind(
    "Transpose",
    lambda t, *, permutation: jnp.transpose(t, permutation),
    shape=_transposed,
    result="{t}_T",
    gradient={"t": lambda g, permutation: _transpose(g, permutation=_inverse(permutation))},
)
_transpose_ = OpKind(
    "TransposeInplace",
    _transpose.lowering,
    shape=_transposed,
    result="{t}_T",
    gradient=_transpose.gradient,
    traits=[View(lambda t, view, *, permutation: (jnp.transpose(view, _inverse(permutation)),))],
)


def transpose(t: Tensor, permutation: Iterable[int] | None = None) -> Tensor:
    """Permute the dimensions: dimension `k` of the result is dimension `permutation[k]` of `t`.

    Args:
        t: tensor of any shape.
        permutation: the dimensions of `t` in their new order; reversed by default.

    Returns:
        A new tensor (a copy).

    Raises:
        ValueError: if `permutation` names a dimension that does not exist, or one twice.
        PopxlError: if it does not name all of them.

    See also: `numpy.transpose`.

    Example:
        >>> y = ops.transpose(tables, (0, 2, 1))
    """
    return _transpose(t, permutation=_permutation(t, permutation))


def transpose_(t: Tensor, permutation: Iterable[int] | None = None) -> Tensor:
    """As `transpose`, but a view of `t`: nothing is copied, and writing to one changes the other.

    Example:
        >>> columns = ops.transpose_(x)
    """
    return _transpose_(t, permutation=_permutation(t, permutation))


def _permutation(t: Tensor, permutation: Iterable[int] | None) -> tuple[int, ...]:
    if not isinstance(t, Tensor):
        raise not_a_tensor("transpose", "t", t)
    given = () if permutation is None else integers(permutation, "transpose: `permutation`")
    order = given or tuple(reversed(range(t.rank)))
    beyond = tuple(d for d in order if d >= t.rank)
    if beyond:
        raise ValueError(
            f"transpose: Values in permutation must be less than the number of dimensions of {t!r}, rank {t.rank}; "
            f"{beyond} are not."
        )
    if len(order) != t.rank:
        raise PopxlError(f"transpose: `permutation` {order} does not name all {t.rank} dimensions of {t!r}.")
    if min(order, default=0) < 0 or len(set(order)) < len(order):
        raise ValueError(f"transpose: `permutation` {order} has to name each dimension of {t!r} once, from 0 on.")
    return order


# Slice --------------------------------------------------------------------------------------------------------------


def _cuts(rank: int, start: Any, stop: Any, step: Any, axis: Any) -> tuple[builtins.slice, ...]:
    """One Python slice for each dimension."""
    axes = [one_axis(at, rank) for at in axis]
    if len(set(axes)) < len(axes):
        raise ValueError(f"`axis` names a dimension twice: {axis}.")
    cuts = [builtins.slice(None)] * rank
    for at, *cut in zip(axes, start, stop, step, strict=True):
        cuts[at] = builtins.slice(*cut)
    return tuple(cuts)


def _sliced(t: Any, **where: Any) -> TensorSpec:
    ranges = (range(size)[cut] for size, cut in zip(t.shape, _cuts(len(t.shape), **where), strict=True))
    sizes = tuple(map(len, ranges))
    return TensorSpec(sizes, t.dtype)


_slice = OpKind(
    "Slice",
    lambda t, **where: t[_cuts(t.ndim, **where)],
    shape=_sliced,
    result="slice_out",
    gradient={
        "t": lambda g, t_spec, start, stop, step, axis: _slice_grad(
            g, shape=t_spec.shape, start=start, stop=stop, step=step, axis=axis
        )
    },
)
_slice_ = OpKind(
    "SliceInplace",
    _slice.lowering,
    shape=_sliced,
    result="slice_out",
    gradient=_slice.gradient,
    traits=[View(lambda t, view, **where: (t.at[_cuts(t.ndim, **where)].set(view),))],
)


def _uncut(g: Any, *, shape: tuple[int, ...], **where: Any) -> Any:
    """Zeros, with `g` in the place that it was cut out of."""
    places = [range(size)[cut] for size, cut in zip(shape, _cuts(len(shape), **where), strict=True)]
    forwards = lax.rev(g, [d for d, place in enumerate(places) if place.step < 0])
    begins = [min(place, default=size) for size, place in zip(shape, places, strict=True)]
    padding = [(b, size - b - n, 0) for b, size, n in zip(begins, shape, g.shape, strict=True)]
    return lax.pad(forwards, jnp.zeros((), g.dtype), padding)


_slice_grad: OpKind = OpKind(
    "SliceGrad",
    _uncut,
    shape=lambda g, *, shape, **where: TensorSpec(shape, g.dtype),
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
    """As `slice`, but a view of that block of `t`: writing to one changes the other.

    Example:
        >>> ops.relu_(ops.slice_(table, 0, 2))               # changes the first two rows of the table
    """
    return t if start is None and stop is None and step is None else _slice_(t, **process_args(start, stop, step, axis))


def process_args(start: Bounds, stop: Bounds, step: Bounds, axis: Bounds) -> dict[str, Any]:
    """The arguments of `slice` as tuples of one length."""
    given = {"start": start, "stop": stop, "step": step, "axis": axis}
    listed: dict[str, tuple[Any, ...]] = {}
    for name, bounds in given.items():
        if bounds is not None:
            entries = integer_or_integers(bounds, f"slice: `{name}`", gaps=name != "axis")
            listed[name] = (entries,) if isinstance(entries, int) else entries
    lengths = {name: len(v) for name, v in listed.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"slice: the arguments have different lengths: {lengths}.")
    count = next(iter(lengths.values()))
    full: dict[str, Any] = {name: listed.get(name, (None,) * count) for name in given}
    full["axis"] = listed.get("axis", tuple(range(count)))
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
_subsample_grad: OpKind = OpKind(
    "SubsampleGrad",
    lambda g, *, shape, strides: (
        jnp.zeros(shape, g.dtype).at[tuple(builtins.slice(None, None, stride) for stride in strides)].set(g)
    ),
    shape=lambda g, *, shape, strides: TensorSpec(shape, g.dtype),
)


def subsample(t: Tensor, strides: int | Iterable[int]) -> Tensor:
    """Every `strides[d]`-th element along each dimension `d`, beginning with the first.

    Args:
        t: tensor of any shape.
        strides: one for each dimension; missing ones are 1. A number is for the first dimension.

    Returns:
        A new tensor.

    Raises:
        ValueError: for more strides than dimensions, or a negative one.
        PopxlError: for a stride of 0.

    Example:
        >>> y = ops.subsample(x, [2, 3])                     # x[::2, ::3]
    """
    each = integer_or_integers(strides, "subsample: `strides`")
    return _subsample(t, strides=(each,) if isinstance(each, int) else each)


# Split and concat ---------------------------------------------------------------------------------------------------


def _joined(*ts: Any, axis: int) -> TensorSpec:
    first = ts[0]
    at = one_axis(axis, len(first.shape))
    for t in ts:
        if len(t.shape) != len(first.shape) or any(
            a != b for d, (a, b) in enumerate(zip(t.shape, first.shape, strict=True)) if d != at
        ):
            raise PopxlError(f"the shapes {first.shape} and {t.shape} differ in more than dimension {at}.")
    joined = (*first.shape[:at], sum(t.shape[at] for t in ts), *first.shape[at + 1 :])
    return TensorSpec(joined, first.dtype)


def _part(g: Tensor, i: int, specs: Sequence[TensorSpec], axis: int) -> Tensor:
    """The slice of a gradient that belongs to operand `i`."""
    begin = sum(spec.shape[axis] for spec in specs[:i])
    return slice(g, begin, begin + specs[i].shape[axis], 1, axis % g.rank)


def _put_parts(*ts_and_view: Any, axis: int) -> tuple[Any, ...]:
    *ts, view = ts_and_view
    ends = list(itertools.accumulate(t.shape[axis] for t in ts))
    return tuple(jnp.split(view, ends[:-1], axis=axis))


_concat = OpKind(
    "Concat",
    lambda *ts, axis: jnp.concatenate(ts, axis=axis),
    shape=_joined,
    result="concat_out",
    gradient={"ts": _part},
)
_concat_ = OpKind(
    "ConcatInplace",
    _concat.lowering,
    shape=_joined,
    result="concat_out",
    gradient={"ts": _part},
    traits=[View(_put_parts)],
)


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


def _alike(name: str, ts: Iterable[Tensor]) -> list[Tensor]:
    if isinstance(ts, Tensor):
        raise TypeError(f"{name}: `ts` must be a list of tensors; got {ts!r}.")
    tensors = list(ts)
    if not tensors:
        raise ValueError(f"{name}: at least one tensor is needed; none was given.")
    if len({t.dtype for t in tensors if isinstance(t, Tensor)}) > 1:
        raise TypeError(
            f"All inputs to a concat operation must have the same type: these are {', '.join(map(repr, tensors))}. "
            "Convert some of them with `ops.cast`."
        )
    return tensors


def _parts(t: Any, *, lengths: tuple[int, ...], axis: int) -> tuple[TensorSpec, ...]:
    at = one_axis(axis, len(t.shape))
    if sum(lengths) != t.shape[at] or min(lengths, default=0) < 0:
        raise PopxlError(f"the parts {lengths} do not add up to the size of dimension {at}, {t.shape[at]}.")
    return tuple(TensorSpec((*t.shape[:at], n, *t.shape[at + 1 :]), t.dtype) for n in lengths)


_split = OpKind(
    "Split",
    lambda t, *, lengths, axis: tuple(
        lax.slice_in_dim(t, end - n, end, axis=axis % t.ndim)
        for n, end in zip(lengths, itertools.accumulate(lengths), strict=True)
    ),
    shape=_parts,
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
