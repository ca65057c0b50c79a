"""Ops without a lowering: what they are made of is differentiated, and no more than they are."""

# ruff: noqa: E402 - poptorch needs torch

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional as F

from poptorch.capture.model import capture
from poptorch.capture.trace import Node
from poptorch.lowering import has_lowering
from poptorch.placement.ambient import capturing
from poptorch.placement.strategies import PipelinedExecution


def _nodes(frozen: bool) -> list[Node]:
    """What celu is made of, as if there were no lowering for it."""
    layer = torch.nn.PReLU(3)

    def forward(given: list[torch.Tensor]) -> torch.Tensor:
        with torch.set_grad_enabled(not frozen):
            return F.celu(layer.weight)

    with capturing(PipelinedExecution()) as ambient:
        captured = capture(
            forward,
            [],
            layer,
            ambient=ambient,
            lowered=lambda op, overload: op != "aten.celu" and has_lowering(op, overload),
        )
    return captured.trace.nodes


def test_gradients_flow_through_the_parts() -> None:
    nodes = _nodes(frozen=False)
    assert {"aten.expm1", "aten.where"} <= {node.op for node in nodes}
    assert not any(node.stops for node in nodes)


def test_they_stop_where_pytorch_tracks_none() -> None:
    *_, last = _nodes(frozen=True)
    assert last.stops == {0}
