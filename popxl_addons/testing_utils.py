"""Test helpers for models: running one module on arrays, in a line, and counting ops."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

import popxl
from popxl.op import Op, OpKind
from popxl.tensor import Variable
from popxl_addons.module import Module
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.ops.streams import host_store

Weights = Mapping[Variable, np.ndarray]


class TensorInput:
    """An array for `run_module` to convert to a tensor, with the array's dtype by default.

    Example:
        >>> TensorInput(np.ones((2, 3)), popxl.float16)
        TensorInput((2, 3), popxl.dtypes.float16)
    """

    def __init__(self, data: np.ndarray, dtype: popxl.dtype | None = None):
        self.data = data
        self.dtype = dtype

    def __repr__(self) -> str:
        return f"TensorInput({np.shape(self.data)}, {self.dtype})"


def run_module(
    module: Module,
    *args: Any,
    weights: Callable[[NamedTensors], Weights] | Weights | None = None,
    **kwargs: Any,
) -> list[np.ndarray]:
    """Build, call and run `module` once in a fresh program; return output arrays in order.

    Args:
        module: module to run, on the best accelerator available.
        *args, **kwargs: arguments of `build`. A `TensorInput`, alone or in a list or tuple, becomes a variable.
        weights: arrays for variables of the module, or a function from these variables to the arrays. The others keep
            their initial values.

    Raises:
        ValueError, TypeError: as for `Module.create_graph` and `Session.write_variables_data`.

    Example:
        >>> class Affine(addons.Module):
        ...     def build(self, x, factor: float):
        ...         return x * factor + self.add_variable_input("b", lambda: np.zeros(2), x.dtype)
        >>> x = TensorInput(np.ones((3, 2)), popxl.float32)
        >>> (y,) = run_module(Affine(), x, 3.0, weights=lambda v: {v.b: np.array([1, 2], np.float32)})
        >>> y[0]
        array([4., 5.], dtype=float32)
    """
    ir = popxl.Ir()
    with ir.main_graph:
        args = tuple(map(_as_tensor, args))
        kwargs = {name: _as_tensor(value) for name, value in kwargs.items()}
        factories, graph = module.create_graph(*args, **kwargs)
        variables = factories.init()
        bound = inspect.signature(module.build).bind(*args, **kwargs)  # in the order of the graph's inputs
        outputs = graph.bind(variables).call(*_tensors((*bound.args, *bound.kwargs.values())))
        streams = [host_store(output) for output in outputs]
    session = popxl.Session(ir, "ipu_hw")
    if weights is not None:
        session.write_variables_data(weights(variables) if callable(weights) else weights)
    with session:
        results = session.run()
    return [np.array(results[stream]) for stream in streams]


def _as_tensor(value: Any) -> Any:
    match value:
        case TensorInput():
            return popxl.variable(value.data, value.dtype)
        case list() | tuple():
            return [_as_tensor(entry) for entry in value]
    return value


def _tensors(values: Iterable[Any]) -> Iterator[popxl.Tensor]:
    for value in values:
        if isinstance(value, popxl.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def ops_of_type(ops: Iterable[Op], op_type: str | OpKind | type) -> int:
    """Count `ops` of a type, given by printed name (``"MatMul"``), declaration, or class.

    Raises:
        TypeError: if `op_type` is none of these.

    Example:
        >>> with popxl.Ir().main_graph as main:
        ...     y = popxl.constant([[1.0]]) @ popxl.constant([[2.0]]) + 3.0
        >>> ops_of_type(main.ops, "MatMul"), ops_of_type(main.ops, "Sub")
        (1, 0)
    """
    if isinstance(op_type, type):  # of `popart._internal.ir.op`
        return sum(isinstance(op, op_type) for op in ops)
    if not isinstance(op_type, str | OpKind):
        raise TypeError(
            f"ops_of_type: `op_type` is {op_type!r}; expected the name of an op type such as 'MatMul', or an OpKind."
        )
    return sum(op_type in (op.op_type, op.kind) for op in ops)
