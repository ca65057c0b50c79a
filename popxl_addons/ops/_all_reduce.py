"""All-reduces with operands or gradients that are declared equal on all replicas.

An all-reduce is its own gradient. At the two ends of a layer whose weights are divided among replicas that would be one
reduction too many: the inputs are the same on all replicas, and so are the incoming gradients. With that declaration,
the reduction of the declared values is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import popxl
from popxl import Op, OpKind, ops
from popxl.errors import PopxlError
from popxl.extend.collectives import Group, members, to_collective_op
from popxl.op import BetweenReplicas
from popxl.replica_grouping import Groups
from popxl_addons.patterns import Replacement, pattern

Identical = Literal["nothing", "inputs", "gradients", "incoming gradients"]

_IN_THE_GRADIENT: Mapping[Identical, Identical] = {
    "nothing": "nothing",
    "inputs": "gradients",
    "gradients": "incoming gradients",
    "incoming gradients": "gradients",
}
"""Identical parts of the gradient op, by the identical parts of the op."""


def all_reduces(op_type: str, known: Mapping[str, str]) -> Callable[..., popxl.Tensor]:
    """Declare all-reduce ops and a recording function: `(name, t, op, group, identical="nothing")`.

    Args:
        op_type: name of the op in printed graphs.
        known: supported reductions, with their names in `popxl.ops.collectives`.
    """

    def passes(attributes: Mapping[str, Any]) -> bool:
        """Whether the operand is declared equal on all members, so that it is the result."""
        return attributes["identical"] in ("inputs", "incoming gradients")

    def lowering(t: Any, *, op: str, identical: Identical, group: Group) -> Any:
        if identical == "incoming gradients":
            raise PopxlError(
                "it is the gradient of an all-reduce whose gradients were declared identical, and has to be made an "
                "identity first. Call `popxl_addons.patterns.apply_pre_alias_patterns(ir)` when all is built and "
                "differentiated, or differentiate with `popxl_addons.autodiff`, which does so."
            )
        return t if identical == "inputs" else group.combined(t, op)

    def gradient(g: popxl.Tensor, identical: Identical, op: str, stride: int, group_size: int) -> popxl.Tensor:
        how = {"op": op, "identical": _IN_THE_GRADIENT[identical], "stride": stride, "group_size": group_size}
        return kind(g, results=["all_reduce_grad"], **how)  # autodiff names it after its tensor

    kind = OpKind(
        op_type,
        lowering,
        shape=lambda t, **attributes: t.spec,
        gradient={"t": gradient},
        result="{t}_all_reduce",
        traits=[
            BetweenReplicas(
                lambda how: "own" if passes(how) else "same",
                same_feeds=lambda attributes: attributes["identical"] != "nothing",
            )
        ],
    )

    @pattern("default")
    def identity_of_identical(op: Op) -> Replacement | None:
        return ops.identity if op.kind is kind and passes(op.attributes) else None

    def record(
        name: str, t: popxl.Tensor, op: str, group: Groups | None, identical: Identical = "nothing"
    ) -> popxl.Tensor:
        reduction = known_reduction(name, op, known)
        return kind(t, op=reduction, identical=identical, **members(name, group))

    return record


def known_reduction(name: str, op: str, known: Mapping[str, str]) -> str:
    """Canonical name of reduction `op` for function `name`.

    Raises:
        ValueError: for a name that is unknown to all collectives.
        PopxlError: for one that this function does not support.
    """
    to_collective_op(op)
    if op not in known:
        raise PopxlError(f"{name}: `op` is {op!r}; expected one of {', '.join(map(repr, known))}.")
    return known[op]
