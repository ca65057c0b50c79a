"""Constant factors, and means over local data, whose mean over replicas is the mean over all data."""

from __future__ import annotations

import math

import numpy as np

from popxl.core.tensor import Constant, Tensor
from popxl.core.traits import is_call


def constant_number(t: Tensor) -> float | None:
    """Value of a constant of one element; `None` for other tensors."""
    if not isinstance(t, Constant) or t.nelms != 1:
        return None
    return float(np.asarray(t.data, np.float64).reshape(()))


def is_replica_count(ratio: float, *counts: int) -> bool:
    """Whether a ratio equals a replica count or its inverse."""
    return any(n > 1 and math.isclose(number, n, rel_tol=1e-4) for n in counts for number in (ratio, 1 / ratio))


def mean_factor(t: Tensor) -> float | None:
    """Factor of the means over local data in a value, through calls and linear ops; `None` without a mean.

    A scalar may be a mean plus other terms, such as a loss with a penalty.
    """
    op = t.producer
    if op is None:
        return None
    if is_call(op):
        return mean_factor(op.called_graphs[0].outputs[op.outputs.index(t)])
    if op.op_type == "ReduceMean" or op.attributes.get("reduction") == "mean":
        return 1.0
    if op.op_type in ("AvailableAfter", "AvailableAfterAll", "Cast", "Identity") or op.kind.view is not None:
        return mean_factor(op.inputs[0])
    if op.op_type in ("Add", "Sum"):
        factors = [factor for term in op.inputs if (factor := mean_factor(term)) is not None]
        return sum(factors) if factors and (t.nelms == 1 or len(factors) == len(op.inputs)) else None
    if op.op_type in ("Mul", "Div") and (number := constant_number(op.inputs[-1])) is not None:
        factor = mean_factor(op.inputs[0])
        return factor and number and (factor * number if op.op_type == "Mul" else factor / number)
    return None
