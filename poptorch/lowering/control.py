"""Ops that run functions."""

from __future__ import annotations

from collections.abc import Sequence

import popxl
from poptorch.capture.outline import CALL
from poptorch.capture.trace import Trace
from poptorch.lowering.emission import emission
from poptorch.lowering.registry import lowers


@lowers(CALL)
def call(trace: Trace, inputs: Sequence[popxl.Tensor], name: str) -> tuple[popxl.Tensor, ...]:
    return emission().call(trace, inputs, name)
