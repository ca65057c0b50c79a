"""`CaptureRequest`: a function to capture, and its settings."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from poptorch.capture.counters import Tape
from poptorch.capture.graph_breaks import GraphBreaks
from poptorch.capture.tensor_layout import TensorLayout
from poptorch.capture.trace import tensors_in
from poptorch.placement.capture_context import CaptureContext


@dataclass(frozen=True)
class CaptureRequest:
    """A function to capture.

    Attributes:
        forward: the function, of a list of tensors.
        layouts: shapes, dtypes and memory layouts of the tensors that it takes.
        module: module whose parameters and buffers it uses. Afterwards it is unchanged.
        context: placement of ops: the current block and so on.
        lowered: predicate for the name and overload of an op: whether there is a lowering.
        flatten: function that returns the tensors in its result.
        grouped: names of parameters of which `forward` sees the first row.
        excludes: files that are left out of source locations.
        with_scopes: whether ops record the path of the module that runs them.
        breaks: graph breaks, with the contents of the inputs; `None` if none are allowed.
        derives: whether the trace is to be differentiated.
        function: the user's module or function that runs.
        tape: tape of the arithmetic on numbers that the module changes; see `poptorch.capture.counters`.
    """

    forward: Callable[[list[torch.Tensor]], Any]
    layouts: Sequence[TensorLayout]
    module: torch.nn.Module
    context: CaptureContext
    lowered: Callable[[str, str], bool]
    flatten: Callable[[Any], list[torch.Tensor]] = tensors_in
    grouped: Collection[str] = ()
    excludes: Sequence[str] = ()
    with_scopes: bool = True
    breaks: GraphBreaks | None = None
    derives: bool = False
    function: Callable[..., Any] | None = None
    tape: Tape | None = None
