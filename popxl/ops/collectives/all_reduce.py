"""Reductions over the IPUs of one replica: lists of tensors, one for each IPU.

Placement on an IPU changes no value. So these ops are plain arithmetic here, and their gradients define the
communication: `all_reduce_identical_inputs` and `all_reduce_identical_grad_inputs` are the two ends of a layer whose
weights are divided among IPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from popxl.base.arguments import check_type
from popxl.base.arrays import Array
from popxl.base.names import camel
from popxl.core.declaration import OpKind
from popxl.core.tensor import Tensor
from popxl.core.traits import OnIpus
from popxl.errors import PopxlError, UndefinedValue
from popxl.ops.collectives.collectives import OP_MAP, CollectiveOps, to_collective_op
from popxl.ops.families import public
from popxl.ops.host import init
from popxl.values.shapes import integers, meta_shape_of
from popxl.values.spec import TensorSpec, brief

if TYPE_CHECKING:
    from popxl.transforms.op_gradient import Forward, Gradients

Gs = tuple[Tensor | None, ...]


class AllReduce(Protocol):
    """An op with one tensor per IPU."""

    kind: OpKind

    def __call__(
        self, ts: Sequence[Tensor], ipus: Sequence[int] | None = None, op: CollectiveOps = "add"
    ) -> list[Tensor]: ...


def _reduced(*ts: Array, ipus: Any, op: str) -> tuple[Array, ...]:
    return (OP_MAP[op](ts),) * len(ts)


def _alike(*ts: Any, ipus: Any, op: str) -> list[TensorSpec]:
    if not ts:
        raise PopxlError("there are no tensors; give one for each IPU.")
    for t in ts:
        if (t.shape, t.dtype) != (ts[0].shape, ts[0].dtype):
            raise PopxlError(f"the tensors have one shape and dtype; there are {brief(ts[0])} and {brief(t)}.")
    meta_shape = meta_shape_of(*ts)
    return [TensorSpec(t.shape, t.dtype, meta_shape) for t in ts]


def _gradients_summed(forward: Forward, gs: Gs) -> Gradients:
    _only_sums(forward)
    filled = [init(t.shape, t.dtype) if g is None else g for t, g in zip(forward.op.outputs, gs, strict=True)]
    return dict(enumerate(all_reduce.kind(*filled, ipus=forward.op.attributes["ipus"], op="add")))


def _gradients_passed(forward: Forward, gs: Gs) -> Gradients:
    _only_sums(forward)
    return {i: g for i, g in enumerate(gs) if g is not None}


def _only_sums(forward: Forward) -> None:
    if (name := forward.op.attributes["op"]) != "add":
        raise PopxlError(
            f"autodiff: a gradient reaches the op {forward.op.name} ({forward.op.source}) with `op` {name!r}; only "
            "'add' has one. Pass the tensors through `ops.detach`, or leave them out of `grads_provided`."
        )


_DOCUMENTATION = """{meaning}

Args:
    ts: tensors of one shape and dtype, one for each IPU of a replica.
    ipus: the IPU of each result; by default, where the tensors are.
    op: what is computed: one of `CollectiveOps`. Float16 is computed in float32 and rounded once; the mean of integers
        is rounded towards zero. Only `"add"` has a gradient.

Returns:
    A list of new tensors, as many as there are in `ts`.

Raises:
    ValueError: for another `op`; if `ipus` are not as many as `ts`, or not given where those of the tensors are not
        known.
    PopxlError: if there are no tensors, or they differ in shape or dtype.

Example:
    >>> totals = ops.collectives.{name}([x, y], ipus=[0, 1])
"""


def _over_ipus(
    name: str, lowering: Callable[..., Any], gradient: Callable[[Forward, Gs], Gradients], meaning: str
) -> AllReduce:
    """Declare one all-reduce variant: computation and gradient rule."""
    kind = OpKind(
        "AllReduce",
        lowering,
        shape=_alike,
        gradient=gradient,
        result="all_reduce_out_{i}",
        traits=[OnIpus("ipus")],
        key=camel(name),
    )

    def over_ipus(ts: Sequence[Tensor], ipus: Sequence[int] | None = None, op: CollectiveOps = "add") -> list[Tensor]:
        to_collective_op(op)
        check_type(ts, list | tuple, f"{name}: `ts`", "a list of tensors")
        kind.check(*ts, ipus=None, op=op)
        places = _ipus_of(name, ts) if ipus is None else integers(ipus, f"{name}: `ipus`")
        if len(places) != len(ts):
            raise ValueError(f"{name}: `ipus` is {places}, for {len(ts)} tensors; give one IPU for each.")
        return list(kind(*ts, ipus=places, op=op))

    return public(over_ipus, kind, name, _DOCUMENTATION.format(name=name, meaning=meaning))


def _ipus_of(name: str, ts: Sequence[Tensor]) -> tuple[int, ...]:
    try:
        return tuple(t.ipu for t in ts)
    except UndefinedValue as problem:
        raise ValueError(f"{name}: {problem} Say in `ipus` where the results are to be.") from None


all_reduce = _over_ipus(
    "all_reduce",
    _reduced,
    _gradients_summed,
    "Combine the tensors elementwise; every IPU gets the result. Each gradient is the sum of all gradients.",
)
all_reduce_identical_inputs = _over_ipus(
    "all_reduce_identical_inputs",
    lambda *ts, ipus, op: ts,
    _gradients_summed,
    "Pass on tensors that are copies of one value, as the caller promises. Each gradient is the sum of all gradients.",
)
all_reduce_identical_grad_inputs = _over_ipus(
    "all_reduce_identical_grad_inputs",
    _reduced,
    _gradients_passed,
    "Combine the tensors elementwise; every IPU gets the result. The gradients are copies of one value, as the caller\n"
    "promises, and pass unchanged.",
)
