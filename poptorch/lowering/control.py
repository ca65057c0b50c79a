"""Ops that run functions: captured graphs, host functions, user-defined ops."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import popxl
from poptorch.capture.derivatives import OWN
from poptorch.capture.host_function import HostFunction
from poptorch.capture.outlining import CALL
from poptorch.capture.trace import Trace
from poptorch.errors import createPoptorchError
from poptorch.lowering.emission import Emission, emission, popxl_dtype
from poptorch.lowering.registry import lowers
from popxl import OpKind, ops
from popxl.errors import DeviceError, PopxlError
from popxl.extend.graphs import host_call_kind
from popxl.extend.ops import Forward
from popxl.op import Op

Tensors = Sequence[popxl.Tensor]


lowers(CALL)(lambda trace, inputs, name: emission().call(trace, inputs, name))
lowers("poptorch.for_loop")(lambda count, body, inputs: emission().loop(body, count, inputs))


@lowers("poptorch.cond")
def cond(
    condition: popxl.Tensor, then_body: Trace, then_inputs: Tensors, else_body: Trace, else_inputs: Tensors
) -> Tensors:
    return emission().either(ops.reshape(condition, ()), (then_body, then_inputs), (else_body, else_inputs))


# Custom derivatives ---------------------------------------------------------------------------------------------------


@lowers(OWN)
def own_derivative(results: Tensors, inputs: Tensors, backward: Trace, numbers: Sequence[int], name: str) -> Tensors:
    made = _own_derivative(*results, *inputs, *map(emission().tensor, backward.outer), count=len(results))
    made = made if isinstance(made, tuple) else (made,)
    assert made[0].producer is not None
    _backward[made[0].producer] = partial(_gradients, backward=backward, numbers=numbers, name=name)
    return made


def _gradients(
    forward: Forward, gs: Sequence[popxl.Tensor | None], *, backward: Trace, numbers: Sequence[int], name: str
) -> dict[int, popxl.Tensor]:
    """Gradients of the inputs: the operands of the forward op that come after its results."""
    first = len(numbers)
    by_number = dict(zip(numbers, gs, strict=True))
    specs = backward.inputs[: len(backward.inputs) - len(backward.outer)]
    given = [by_number.get(i) for i in range(len(specs))]
    zeros = [ops.init(v.shape, popxl_dtype(v.dtype)) if g is None else g for v, g in zip(specs, given, strict=True)]
    outer = [forward.read(t) for t in forward.op.inputs[first + len(backward.outputs) :]]
    made = Emission().call(backward, [*zeros, *outer], f"{name}.backward")
    return {i: g for i, g in enumerate(made, first) if forward.wants(i)}


_backward: weakref.WeakKeyDictionary[Op, Callable[..., Any]] = weakref.WeakKeyDictionary()

_own_derivative = OpKind(
    "OwnDerivative",
    lambda *operands, count: operands[:count],
    shape=lambda *operands, count: [t.spec for t in operands[:count]],
    gradient=lambda forward, gs: _backward[forward.op](forward, gs),
    key="poptorch.OwnDerivative",
)
"""An op that returns its first operands. Its gradient is known only while the program is being written."""


# Host functions -------------------------------------------------------------------------------------------------------


@lowers("poptorch.cpu")
def cpu(inputs: Tensors, function: HostFunction, name: str) -> Any:
    with popxl.name_scope(name):
        return host_call_kind(*inputs, function=function.arrays, specs=emission().wanted)


# Custom ops -----------------------------------------------------------------------------------------------------------

_custom: dict[str, Callable[..., Any]] = {}


def registerCustomOp(name: str, domain: str, function: Callable[..., Any], **settings: Any) -> None:
    """Register a JAX function as an op for `poptorch.custom_op`.

    Args:
        name, domain: name of the op in models.
        function: function of arrays, and of attributes, which are keyword-only parameters; it returns one array or a
            tuple.
        **settings: gradient and further settings: see `popxl.OpKind`. By default the gradient is JAX's.

    Example:
        >>> def leaky(x, *, alpha):
        ...     return jnp.where(x > 0, x, alpha * x)
        >>> poptorch.registerCustomOp("LeakyRelu", "custom.ops", leaky)
    """
    _custom[f"{domain}.{name}"] = OpKind(name, function, key=f"{domain}.{name}", **settings)


@lowers("poptorch.custom_op")
def custom_op(inputs: Tensors, name: str, attributes: tuple[tuple[str, Any], ...]) -> Any:
    if name not in _custom:
        raise createPoptorchError(
            f"There is no custom op {name!r}; registered are {', '.join(_custom) or 'none'}. Declare it with "
            "`poptorch.registerCustomOp(name, domain, function)`."
        )
    return _custom[name](*inputs, **dict(attributes))


def _gathered(data: popxl.Tensor, indices: popxl.Tensor) -> popxl.Tensor:
    """`torch.gather` along the last axis."""
    if data.rank == 0 or data.shape[:-1] != indices.shape[:-1]:
        raise createPoptorchError(
            f"FastGatherLastDim: the data has the shape {list(data.shape)} and the indices {list(indices.shape)}; "
            "expected the same in all axes but the last."
        )
    return _gather_last(data, indices)


_gather_last = OpKind(
    "FastGatherLastDim",
    lambda data, indices: jnp.take_along_axis(data, indices, axis=-1),
    key="poptorch.FastGatherLastDim",
)
_custom["poptorch.custom_ops.FastGatherLastDim"] = _gathered


# For runs op by op ----------------------------------------------------------------------------------------------------

WATCH = "poptorch.Watch"
"""Name of the custom op that looks for NaN in operands of comparisons, which make none."""


class _ComparedNaN(PopxlError, DeviceError):
    """Comparison with a NaN. (Lowerings pass popxl errors through unchanged.)"""


def _without_nan(input: Any, *, where: str) -> Any:
    if not isinstance(input, jax.core.Tracer) and (count := int(jnp.isnan(input).sum())):
        raise _ComparedNaN(
            f"{where} compares numbers of which {count} of {input.size} are NaN, and "
            "`Precision.enableFloatingPointExceptions` is on. They come from arguments or weights: what an op makes of "
            "other numbers is reported there."
        )
    return input


_custom[WATCH] = OpKind("Watch", _without_nan, gradient=None, key=WATCH)
