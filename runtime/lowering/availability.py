"""Ops that order one value after another, for compilers."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from popxl.core.recording import Op
from popxl.ops.kernels import memory
from popxl.ops.kernels.kernel import Kernel, overriding_kernels
from popxl.ops.memory import available_after_kind, recomputed_after_kind, scheduled_after_kind
from runtime.lowering.context import Context
from runtime.lowering.environment import Environment
from runtime.lowering.registry import register_lowering
from runtime.lowering.scopes import of_op

if TYPE_CHECKING:
    from runtime.lowering.lower import Lowering


@register_lowering(recomputed_after_kind)
def _recomputed_after(lowering: Lowering, op: Op, environment: Environment, context: Context) -> None:
    """Order a value only where XLA could merge recomputation with forward calls.

    A barrier keeps XLA from reading rows of a loop's arrays within the kernels that use them.
    """
    if op.graph is context.only_graph:
        environment.write(op.outputs[0], environment.value_of(op.inputs[0]))
    else:
        _order(memory.available_together, lowering, op, environment, context)


def _order(together: Kernel, lowering: Lowering, op: Op, environment: Environment, context: Context) -> None:
    """Order a value after another, which later ops read as it comes out of the same barrier.

    XLA drops results of a barrier that nothing reads, and the order with them: recomputation would move beside the
    forward pass, where its results stay in memory.
    """
    value, other = map(environment.value_of, op.inputs)
    with of_op(op), overriding_kernels(lowering.replicas.platform, lowering.hooks.overrides):
        (after,), (same,) = together([value], [other])
    environment.write(op.outputs[0], after)
    context.channels.record_computed(after)
    if same is not other:
        environment.replace_equal(op.inputs[1], same)


register_lowering(available_after_kind)(partial(_order, memory.available_together))
register_lowering(scheduled_after_kind)(partial(_order, memory.scheduled_together))
