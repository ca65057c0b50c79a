"""Stacked outputs of host-executed loops: carried arrays, updated slice by slice.

A loop in XLA stacks its outputs itself. For iterations that are steps of the host, two ops outside of any graph do it:
one allocates the stack before the loop; the other, at the end of each iteration, writes the iteration's output. They
run on the IPU of that output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jax import lax

from popxl.core.declaration import OpKind
from popxl.core.recording import Op
from popxl.core.tensor import Tensor
from popxl.core.traits import Overwrites
from popxl.ops.host import init_kind

write_kind = OpKind(
    "StackTurn",
    lambda stack, value, iteration: lax.dynamic_update_index_in_dim(stack, value, iteration, 0),
    shape=lambda stack, value, iteration: (),
    traits=[Overwrites("stack", aliased=False)],
    gradient=None,
)


class Stack(NamedTuple):
    """Stacked loop output over all iterations, with the ops for allocation and writing."""

    result: Tensor
    allocation: Op
    write: Op


def stacks_of(loop: Op, home: Callable[[Tensor], int]) -> tuple[Stack, ...]:
    """Stacked outputs of a loop.

    Args:
        home: function that returns the IPU of a tensor.
    """
    (run,) = loop.runs
    stacks = []
    for result, value in zip(loop.outputs[run.carried :], run.outputs[run.carried :], strict=True):
        ipu = home(value)
        allocation = _detached_op(loop, ipu, init_kind, (), (result,), spec=result.spec, init_type="zero")
        stacks.append(
            Stack(result, allocation, _detached_op(loop, ipu, write_kind, (result, value, run.op_inputs[0]), ()))
        )
    return tuple(stacks)


def _detached_op(
    loop: Op, ipu: int, kind: OpKind, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], **attributes: Any
) -> Op:
    """Create an op outside of any graph, attributed to a loop."""
    return Op.restore(
        kind,
        loop.graph,
        loop.source,
        id=loop.id,
        name=loop.name,
        inputs=inputs,
        outputs=outputs,
        operands=None,
        attributes=attributes,
        modified=kind.modified(attributes),
        ipu=ipu,
        io_tiles=loop.io_tiles,
        location=(ipu, loop.io_tiles),
        execution_context=loop.execution_context,
        after=(),
    )
