"""Numbers that tell the tensors of a program apart while it is captured."""

from __future__ import annotations

import torch

from poptorch.capture.tracer import current
from poptorch.errors import createPoptorchError


def getIpuTensorId(tensor: torch.Tensor) -> int:
    """A number for what a tensor holds at this moment of a model's `forward`: the same as long as nothing writes to it.

    Args:
        tensor: a tensor of a model that is being captured.

    Raises:
        poptorch.Error: if none is.
    """
    tracer = current()
    if tracer is None:
        raise createPoptorchError("getIpuTensorId: tensors have a number only while a wrapped model is captured.")
    return id(tracer.recorder.value_of(tensor))
