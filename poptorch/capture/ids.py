"""Identifiers of tensor contents during capture."""

from __future__ import annotations

import torch

from poptorch.capture.tracer import current
from poptorch.errors import createPoptorchError


def getIpuTensorId(tensor: torch.Tensor) -> int:
    """Identifier of a tensor's current contents within a model's `forward`, constant until the tensor is overwritten.

    Args:
        tensor: a tensor of a model that is being captured.

    Raises:
        poptorch.Error: if none is.
    """
    tracer = current()
    if tracer is None:
        raise createPoptorchError("getIpuTensorId: tensors have a number only while a wrapped model is captured.")
    return id(tracer.recorder.value_of(tensor))
