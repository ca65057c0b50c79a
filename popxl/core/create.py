"""Creation of tensors that no op makes: variables, constants, graph inputs; declaration of graph outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from numbers import Complex
from typing import Any, Literal, TypeVar, cast

import numpy as np

from popxl.base.log import Logger
from popxl.base.source import SourceLocation, warn_at
from popxl.context import get_current_context, user_frame
from popxl.core.tensor import Constant, HostScalarTensor, Tensor, Variable, taken_back_on_failure
from popxl.dtypes import check_dtype, kind_of
from popxl.dtypes import dtype as dtype_
from popxl.errors import NarrowedNumberWarning, PopxlError
from popxl.fp8_utils import as_array
from popxl.graph import Graph
from popxl.initial import Initial
from popxl.replica_grouping import Groups, ReplicaGrouping, sharing_of
from popxl.tensorlocation import ON_DEVICE
from popxl.utils import downcast_np_dtypes, narrowed, to_numpy
from popxl.values.shapes import integers, sizes, word
from popxl.values.spec import TensorSpec

_log = Logger("ir")
T = TypeVar("T")


def variable(
    data: HostScalarTensor | Initial,
    dtype: dtype_ | None = None,
    name: str | None = None,
    downcast: bool = True,
    replica_grouping: Groups | None = None,
    retrieval_mode: Literal["one_per_group", "all_replicas"] | None = None,
    log2_scale: int | None = None,
    nan_on_overflow: bool | None = None,
) -> Variable:
    """Create a variable in the main graph: a mutable tensor with the program's lifetime.

    Args:
        data: initial value: a number, a sequence, a NumPy array or memory map, or a torch tensor. It is copied, except
            for a memory map, which itself becomes the host copy. Or a description of the value, such as
            `popxl.initial.normal((4, 3), seed=7)`: the numbers are then made when they are first needed.
        dtype: element type; by default that of the data, narrowed to 32 bits if `downcast`.
        name: name of the tensor.
        downcast: narrow 64-bit numbers to 32 bits where no dtype is given.
        replica_grouping: groups of replicas that share one value: a grouping, or names of axes. With several groups,
            `data` has one row for each of them.
        retrieval_mode: values that are read back: `"one_per_group"` (the default) or those of `"all_replicas"`.
        log2_scale, nan_on_overflow: for float8 dtypes: exponent of the scale that data are multiplied by,
            `2**log2_scale`, before conversion; whether overflow gives NaN.

    Raises:
        RuntimeError: if there is no current graph.
        ValueError: if the current graph is not the main graph, and for an unknown `retrieval_mode` or axis.
        PopxlError: if the data does not have one row for each replica group (`IndexError` if it has too few for a
            grouping that is not constant).

    Example:
        >>> with ir.main_graph:
        ...     w = popxl.variable(np.zeros((4, 3)), popxl.float32, name="w")
    """
    graph = get_current_context().graph
    if graph is not graph.main_graph:
        raise ValueError(
            f"variable: variables live in the main graph, and {graph.title} is current. Make the variable in the main "
            "graph and pass it into the graph as an input."
        )
    if retrieval_mode is not None:
        word(retrieval_mode, "variable: `retrieval_mode`", ("one_per_group", "all_replicas"))
    grouping = sharing_of(graph.ir, replica_grouping, "variable: `replica_grouping`")
    if dtype is not None:
        check_dtype(dtype, "variable: `dtype`")
    if isinstance(data, Initial):
        return _described(graph, data, dtype, name, grouping, retrieval_mode, log2_scale, nan_on_overflow)
    in_place = isinstance(data, np.memmap) and grouping.is_const
    if isinstance(data, np.memmap) and not in_place:
        _log.warn(
            f"variable: you have passed np.memmap data and a non-const replica grouping, {grouping!r}; the data is "
            "copied, and the file will not be written."
        )
    array = _numbers("variable", data, dtype, downcast and not in_place, log2_scale, nan_on_overflow, not in_place)
    if grouping.num_groups > 1:
        array = _one_row_each(array, grouping)
    shape = array.shape if grouping.num_groups == 1 else array.shape[1:]
    t: Variable = graph.new_tensor(name, TensorSpec(shape, dtype or dtype_.as_dtype(array)), Variable)
    t.data = array
    return _configure_variable(t, grouping, retrieval_mode)


def _configure_variable(t: Variable, grouping: ReplicaGrouping, retrieval_mode: str | None) -> Variable:
    """Set all properties of a new variable except its value."""
    t.replica_grouping = grouping
    t.retrieval_mode = retrieval_mode or "one_per_group"
    t.location_info = ON_DEVICE
    t.piece = t._group_axis = None
    return t


def _described(
    graph: Graph,
    initial: Initial,
    dtype: dtype_ | None,
    name: str | None,
    grouping: ReplicaGrouping,
    retrieval_mode: str | None,
    log2_scale: int | None,
    nan_on_overflow: bool | None,
) -> Variable:
    """A variable whose initial value is described."""
    if log2_scale is not None or nan_on_overflow is not None:
        raise ValueError(
            "variable: `log2_scale` and `nan_on_overflow` are for numbers, and `data` is a description of some: "
            f"{initial!r}. Describe them as they are to be, or pass `data.numbers(popxl.float32)`."
        )
    groups, shape = grouping.num_groups, initial.shape
    if groups > 1 and shape[:1] != (groups,):
        raise PopxlError(
            f"variable: `data` describes the shape {shape}, but its first dimension has to have one row for each of "
            f"the {groups} groups of {grouping!r}."
        )
    spec = TensorSpec(shape[1:] if groups > 1 else shape, dtype or initial.dtype)
    initial.check_held_by(spec.dtype, "variable: `data`")
    t: Variable = graph.new_tensor(name, spec, Variable)
    t.set_initial(initial)
    return _configure_variable(t, grouping, retrieval_mode)


def _numbers(
    what: str,
    data: Any,
    dtype: dtype_ | None,
    downcast: bool,
    log2_scale: int | None,
    nan_on_overflow: bool | None,
    copy: bool = True,
) -> np.ndarray:
    """Convert tensor values. Without a requested dtype, warn about numbers beyond 32 bits. With one, cast as NumPy
    does."""
    if dtype is None and downcast and log2_scale is None and nan_on_overflow is None:
        wide = as_array(data)
        if wide.size and wide.dtype in downcast_np_dtypes:
            fitting = _cast_or_warn(wide, downcast_np_dtypes[wide.dtype], what)
            if fitting is not None:
                return fitting
    return to_numpy(data, dtype, downcast, copy=copy, log2_scale=log2_scale, nan_on_overflow=nan_on_overflow)


def _cast_or_warn(array: np.ndarray, target: np.dtype[Any], what: str) -> np.ndarray | None:
    """Cast numbers to a default dtype; warn and return `None` for numbers out of range."""
    try:
        return narrowed(array, target, what)
    except ValueError as problem:
        warn_at(SourceLocation.of(user_frame()), str(problem), NarrowedNumberWarning)
        return None


def warn_of_narrowed(array: np.ndarray, dtype: dtype_, what: str) -> None:
    """Warn about numbers outside a default dtype, which are cast as NumPy casts."""
    target = dtype.as_numpy()
    if array.dtype != target and kind_of(array.dtype) in "iuf" and kind_of(target) in "iuf":
        _cast_or_warn(array, target, what)


def operand_beside(t: Tensor, data: HostScalarTensor) -> Constant:
    """Convert an operator's non-tensor operand to a constant of the tensor's dtype.

    The caller has not asked for that dtype, so a number that does not fit causes a warning before it is cast.
    """
    array = as_array(data)
    warn_of_narrowed(array, t.dtype, f"An operand of {t!r}")
    try:
        return constant(data, t.dtype)
    except (TypeError, ValueError) as problem:
        if data is None or array.dtype.kind not in "OSU":
            raise
        raise TypeError(
            f"An operand of {t!r} is {data!r} ({type(data).__name__}); expected a tensor, a number or an array."
        ) from problem


def with_numbers(op: Callable[..., T], *operands: Any) -> T:
    """Record an op after converting plain numbers and arrays to constants beside the first tensor.

    The graph drops these constants if the op refuses its operands. Operands of other types are left for the op to
    refuse.
    """
    if all(isinstance(operand, Tensor) for operand in operands):
        return op(*operands)
    beside = next((operand for operand in operands if isinstance(operand, Tensor)), None)
    with ExitStack() as stack:

        def tensor(operand: Any) -> Any:
            if (
                isinstance(operand, Tensor)
                or beside is None
                or not isinstance(operand, Complex | np.generic | np.ndarray)
            ):
                return operand
            return stack.enter_context(taken_back_on_failure(operand_beside(beside, cast(Any, operand))))

        return op(*map(tensor, operands))


def _one_row_each(array: np.ndarray, grouping: ReplicaGrouping) -> np.ndarray:
    """Expand data to one row per group. Non-constant groupings ignore surplus rows."""
    rows = array.shape[0] if array.shape else 0
    if grouping.is_const and rows != grouping.num_groups or rows < grouping.num_groups:
        raise (PopxlError if grouping.is_const else IndexError)(
            f"variable: `data` has the shape {array.shape}, but its first dimension has to have one row for each of "
            f"the {grouping.num_groups} groups of {grouping!r}."
        )
    return array if grouping.is_const else array[: grouping.num_groups]


def constant(
    data: HostScalarTensor,
    dtype: dtype_ | None = None,
    name: str | None = None,
    downcast: bool = True,
    log2_scale: int | None = None,
    nan_on_overflow: bool | None = None,
) -> Constant:
    """A tensor whose numbers never change, in the current graph.

    Args:
        data: a number, a sequence, a NumPy array, a torch tensor. It is copied.
        dtype: element type; by default that of the data, narrowed to 32 bits if `downcast`.
        name: name of the tensor.
        downcast: narrow 64-bit numbers to 32 bits where no dtype is given.
        log2_scale, nan_on_overflow: for float8 dtypes: exponent of the scale that data are multiplied by,
            `2**log2_scale`, before conversion; whether overflow gives NaN.

    Raises:
        RuntimeError: if there is no current graph.
        TypeError: for float8 data without `dtype`.

    Example:
        >>> with ir.main_graph:
        ...     two = popxl.constant(2, popxl.float32)
    """
    graph = get_current_context().graph
    if dtype is not None:
        check_dtype(dtype, "constant: `dtype`")
    array = _numbers("constant", data, dtype, downcast, log2_scale, nan_on_overflow)
    if dtype is None and array.dtype.names:
        raise TypeError("constant: float8 data needs its `dtype` said: popxl.float8_143 or popxl.float8_152.")
    t: Constant = graph.new_tensor(name, TensorSpec(array.shape, dtype or dtype_.as_dtype(array)), Constant)
    array.flags.writeable = False
    t.data = array
    return t


def graph_input(
    shape: Iterable[int],
    dtype: dtype_,
    name: str | None = None,
    by_ref: bool = False,
    meta_shape: Iterable[int] | None = None,
) -> Tensor:
    """Append an input to the current graph.

    Args:
        shape, dtype, meta_shape: spec of the tensors that callers bind to the input.
        name: name of the tensor.
        by_ref: whether every caller sees the changes that the graph makes to the input in place.

    Raises:
        RuntimeError: if there is no current graph.
        TypeError, ValueError: if the shape does not hold integers, or one is negative.

    Example:
        >>> def scale(x):
        ...     k = popxl.graph_input((), x.dtype, "k")
        ...     return x * k
    """
    graph = get_current_context().graph
    whole = sizes(shape, f"The shape of {name or 'graph_input'!r}")
    spec = TensorSpec(whole, dtype, () if meta_shape is None else integers(meta_shape, "graph_input: `meta_shape`"))
    return graph.add_input(spec, name, by_ref)


def graph_output(t: Tensor) -> None:
    """Append an output to the current graph.

    Raises:
        RuntimeError: if there is no current graph.
        TypeError: if `t` is not a tensor.
        ValueError: if `t` is not in the current graph.

    Example:
        >>> graph = popxl.Ir().create_empty_graph("doubled")
        >>> with graph:
        ...     popxl.graph_output(popxl.graph_input((), popxl.float32, "x") * 2.0)
        >>> len(graph.outputs)
        1
    """
    graph: Any = get_current_context().graph
    graph.add_output(t, extend_calls=False)
