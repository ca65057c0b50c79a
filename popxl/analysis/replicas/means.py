"""Constant factors, and means over the data of one replica: their mean over replicas is the mean of all data."""

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


def is_of_replicas(ratio: float, *counts: int) -> bool:
    """Whether a ratio equals a replica count or its inverse."""
    return any(n > 1 and math.isclose(number, n, rel_tol=1e-4) for n in counts for number in (ratio, 1 / ratio))


def share_of_mean(t: Tensor) -> float | None:
    """How many times a mean a value is, maybe of several, or in a graph that is called; `None` if it is none.

    A single number may be the sum of a mean and of others, such as a penalty: a loss.
    """
    op = t.producer
    if op is None:
        return None
    if is_call(op):
        return share_of_mean(op.called_graphs[0].outputs[op.outputs.index(t)])
    if op.op_type == "ReduceMean" or op.attributes.get("reduction") == "mean":
        return 1.0
    if op.op_type in ("AvailableAfter", "AvailableAfterAll", "Cast", "Identity") or op.kind.view is not None:
        return share_of_mean(op.inputs[0])
    if op.op_type in ("Add", "Sum"):
        shares = [share for each in op.inputs if (share := share_of_mean(each)) is not None]
        return sum(shares) if shares and (t.nelms == 1 or len(shares) == len(op.inputs)) else None
    if op.op_type in ("Mul", "Div") and (number := constant_number(op.inputs[-1])) is not None:
        share = share_of_mean(op.inputs[0])
        return share and number and (share * number if op.op_type == "Mul" else share / number)
    return None
