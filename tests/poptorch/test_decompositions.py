"""Ops without a lowering: what they are made of is differentiated, and no more than they are."""

# ruff: noqa: E402 - poptorch needs torch

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional as F

import poptorch
from poptorch.capture.model import capture
from poptorch.capture.request import CaptureRequest
from poptorch.capture.trace import Node
from poptorch.lowering import has_lowering
from poptorch.placement.capture_context import capturing
from poptorch.placement.strategies import PipelinedExecution


def _nodes(frozen: bool) -> list[Node]:
    """What celu is made of, as if there were no lowering for it."""
    layer = torch.nn.PReLU(3)

    def forward(given: list[torch.Tensor]) -> torch.Tensor:
        with torch.set_grad_enabled(not frozen):
            return F.celu(layer.weight)

    with capturing(PipelinedExecution()) as ambient:
        asked = CaptureRequest(
            forward, [], layer, ambient, lambda op, overload: op != "aten.celu" and has_lowering(op, overload)
        )
        captured = capture(asked)
    return captured.trace.nodes


def test_gradients_flow_through_the_parts() -> None:
    nodes = _nodes(frozen=False)
    assert {"aten.expm1", "aten.where"} <= {node.op for node in nodes}
    assert not any(node.stops for node in nodes)


def test_they_stop_where_pytorch_tracks_none() -> None:
    *_, last = _nodes(frozen=True)
    assert last.stops == {0}


# Lists of tensors -----------------------------------------------------------------------------------------------------

_LISTS = sorted({name.rstrip("_") for name in dir(torch) if name.startswith("_foreach_")} - {"_foreach_mm"})
_BESIDE: dict[str, list[Callable[[list[torch.Tensor], list[torch.Tensor]], tuple[Any, ...]]]] = {
    **dict.fromkeys(
        ["add", "sub", "mul", "div", "maximum", "minimum", "clamp_min", "clamp_max", "pow"],
        [lambda a, b: (a,), lambda a, b: (0.5,), lambda a, b: ([0.5, 2.0],)],
    ),
    **dict.fromkeys(
        ["addcmul", "addcdiv"],
        [lambda a, b: (a, b), lambda a, b: (a, b, 0.5), lambda a, b: (a, b, [0.5, 2.0])],
    ),
    "lerp": [lambda a, b: (a, b), lambda a, b: (a, 0.25), lambda a, b: (a, [0.25, 0.75])],
    "copy": [lambda a, b: (a,)],
}


def _of_lists(name: str, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """What a function makes of lists, with all kinds of arguments, in place too."""
    found = []
    for function in (getattr(torch, each, None) for each in (name, f"{name}_")):
        for beside in _BESIDE.get(name.removeprefix("_foreach_"), [lambda a, b: ()]):
            lists = [[(t * 1).clone() for t in tensors[i::3]] for i in range(3)]
            if function is not None:
                found += function(lists[0], *beside(*lists[1:])) or ()
                found += lists[0]
    return found


def _three_lists() -> list[torch.Tensor]:
    shapes = ((3,), (3,), (3,), (2, 1), (2, 1), (2, 1))
    start = torch.linspace(0.21, 0.83, 15).split([torch.Size(shape).numel() for shape in shapes])
    return [t.reshape(shape) for t, shape in zip(start, shapes, strict=True)]


@pytest.mark.thorough(but_each=4)
@pytest.mark.parametrize("names", [_LISTS[i::12] for i in range(12)], ids=lambda names: names[0])
def test_functions_of_lists(names: list[str]) -> None:
    def forward(*tensors: torch.Tensor) -> list[torch.Tensor]:
        return [t for name in names for t in _of_lists(name, *tensors)]

    tensors = _three_lists()
    torch.testing.assert_close(poptorch.inferenceModel(forward)(*tensors), forward(*tensors), rtol=1e-4, atol=1e-5)


def test_functions_of_lists_are_differentiated() -> None:
    class Lists(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tensors = torch.nn.ParameterList(_three_lists())

        def forward(self, scale: torch.Tensor) -> torch.Tensor:
            made = [t for name in ("add", "exp", "norm") for t in _of_lists(f"_foreach_{name}", *self.tensors)]
            return poptorch.identity_loss(sum((t * scale).sum() for t in made), "none")

    ours, scale = Lists(), torch.tensor(0.9)
    theirs = copy.deepcopy(ours)
    poptorch.trainingModel(ours, optimizer=torch.optim.SGD(ours.parameters(), lr=0.01))(scale)
    theirs(scale).backward()
    torch.optim.SGD(theirs.parameters(), lr=0.01).step()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
