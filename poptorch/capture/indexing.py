"""`getitem`, `setitem`, `narrow`, `select`: dynamic indexing by integer tensors of shape [], known only at run time.

PyTorch would read such an index, to get a Python number. Here `RowViews` reads the rows, and `index_copy_` writes them;
PyTorch handles all other indices. The number of rows has to be known: `x[i : i + 2]`. Where no graph break is possible,
slices between tensors of one element are handled likewise: an input of one number per sample has that shape in a
micro-batch of one sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from poptorch.capture.torch_private import without_modes
from poptorch.errors import createPoptorchError

if TYPE_CHECKING:
    from poptorch.capture.contents import TensorContents
    from poptorch.capture.row_views import RowViews
    from poptorch.capture.tracer import Tracer


def getitem(contents: TensorContents, views: RowViews, t: torch.Tensor, index: Any) -> torch.Tensor:
    """`t[index]`. Index tensors with known contents are left to PyTorch."""
    unknown = _first_unknown(t, index, contents)
    if unknown is None:
        return t[index]
    dim, rows, rest = unknown
    return views.remember(t, index, getitem(contents, views, views.take(t, dim, rows), rest))


def setitem(contents: TensorContents, views: RowViews, t: torch.Tensor, index: Any, value: Any) -> None:
    """`t[index] = value`."""
    if views.ends_update(t, index, value):
        return
    unknown = _first_unknown(t, index, contents)
    if unknown is None:
        t[index] = value
        return
    dim, rows, rest = unknown
    part = t.index_select(dim, rows)
    setitem(contents, views, part, rest, value)
    t.index_copy_(dim, rows, part)


def narrow(
    contents: TensorContents, views: RowViews, input: torch.Tensor, dim: int, start: int | torch.Tensor, length: int
) -> torch.Tensor:
    """`input.narrow(dim, start, length)`."""
    if not _is_scalar(start) or contents.is_constant(start):
        return input.narrow(dim, start, length)
    return views.take(input, dim, _from_start(start, input.shape[dim]) + torch.arange(length))


def select(contents: TensorContents, views: RowViews, input: torch.Tensor, dim: int, index: Any) -> torch.Tensor:
    """`input.select(dim, index)`."""
    if not _is_scalar(index) or contents.is_constant(index):
        return input.select(dim, index)
    return narrow(contents, views, input, dim, index, 1).squeeze(dim)


def _first_unknown(
    t: torch.Tensor, index: Any, contents: TensorContents
) -> tuple[int, torch.Tensor, tuple[Any, ...]] | None:
    """First dimension with a run-time index, its row numbers, and the remaining index; `None` if absent."""
    indices = index if isinstance(index, tuple) else (index,)
    taken = [_dims(each) for each in indices]
    dim = 0
    for i, each in enumerate(indices):
        if each is Ellipsis:
            dim = t.dim() - sum(taken[i + 1 :])
        elif dim < t.dim():
            if _is_scalar(each) and not contents.is_constant(each):
                row = _from_start(each, t.shape[dim]).reshape(1)
                return dim, row, (*indices[:i], 0, *indices[i + 1 :])
            if isinstance(each, slice) and (rows := _rows(each, t.shape[dim], contents)) is not None:
                return dim, rows, (*indices[:i], slice(None), *indices[i + 1 :])
        dim += taken[i]
    return None


def _rows(part: slice, size: int, contents: TensorContents) -> torch.Tensor | None:
    """Row numbers of a slice between two integer tensors; `None` if PyTorch should handle the slice, or raise an error.

    Raises:
        poptorch.Error: for a number of rows that is 0, or no divisor of all rows.
    """
    if not all(_is_end(each, contents) and not contents.is_constant(each) for each in (part.start, part.stop)):
        return None
    length = contents.distance(part.start, part.stop)
    if length is None:
        return None
    if length == 0:
        raise createPoptorchError("The start and end of a slice must be different.")
    if length < 0:
        raise createPoptorchError(
            f"Taking a slice of a tensor with the end less than the start is not supported. Here it is {-length} less."
        )
    if size % length:
        raise createPoptorchError(
            f"A slice between two tensors has {length} rows, of {size}; expected a number that divides these. "
            "`poptorch.dynamic_slice(x, dim, start, size, 1)` takes any."
        )
    rows = torch.arange(0, length, 1 if part.step is None else part.step)
    return _from_start(part.start.reshape(()), size) + rows


def _from_start(row: torch.Tensor, size: int) -> torch.Tensor:
    """Row number counted from the first row, for one that may be negative."""
    return torch.where(row < 0, row + size, row).long()


def _dims(index: Any) -> int:
    """Number of dimensions that an index consumes."""
    if index is None or index is Ellipsis or isinstance(index, bool):
        return 0
    return index.dim() if isinstance(index, torch.Tensor) and _is_mask(index) else 1


def _is_scalar(index: Any) -> TypeGuard[torch.Tensor]:
    """Whether an index is an integer tensor of shape []."""
    return _is_integer(index) and not index.dim()


def _is_end(index: Any, contents: TensorContents) -> bool:
    """Whether a slice bound depends on the device."""
    return _is_scalar(index) or _is_integer(index) and index.numel() == 1 and contents.is_one_program


def _is_integer(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.int8, torch.int16, torch.int32, torch.int64)


def index_by_masks(tracer: Tracer, t: torch.Tensor, indices: Any) -> Any:
    """Index by masks with known contents; `None` if a mask is unknown and no graph break is allowed."""
    if isinstance(indices, torch.Tensor):
        with tracer.recorder.recording_decomposition(), tracer.op_interceptor:
            t, indices = torch.broadcast_tensors(*torch.atleast_1d(t, indices))
        indices = [indices]
    positions = masks_to_indices(tracer.contents, indices)
    return None if positions is None else tracer.record_op(torch.ops.aten.index.Tensor, (t, positions), {})


def masks_to_indices(
    contents: TensorContents, indices: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None] | None:
    """Convert masks among indices to integer indices; `None` if a mask is unknown and no graph break is allowed."""
    positions: list[torch.Tensor | None] = []
    for index in indices:
        if index is None or not _is_mask(index):
            positions.append(index)
        elif (mask := contents.constant_contents(index)) is not None:
            with without_modes():
                coordinates = _mask_coordinates(mask)
            positions += map(contents.constant, coordinates)
        elif contents.may_break_graph:
            positions += contents.break_graph(_mask_coordinates, (index,), {})
        else:
            return None
    return positions


def is_mixed(indices: Sequence[torch.Tensor | None]) -> bool:
    """Whether indices combine a mask with other indices."""
    given = [index for index in indices if index is not None]
    return len(given) > 1 and any(map(_is_mask, given))


def _is_mask(index: torch.Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


def _mask_coordinates(mask: torch.Tensor) -> list[torch.Tensor]:
    """Coordinates of true elements, as one index tensor per dimension of a mask."""
    return [numbers.contiguous() for numbers in mask.nonzero().unbind(1)]
