"""Running a few ops in a test: one program, one session."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

import popxl
from popxl import ops


def evaluate(build: Callable[..., Any], *arrays: Any) -> list[np.ndarray]:
    """What a program computes.

    Args:
        build: gets a variable for each array, and returns a tensor or several. Its ops run in the order it says.
        *arrays: the values of the variables.

    Returns:
        The values of the tensors, as they are at the end of the program.
    """
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        results = build(*(popxl.variable(array, name=f"x{i}") for i, array in enumerate(arrays)))
        streams = store(results)
    with popxl.Session(ir, "ipu_model") as session:
        outputs = session.run()
        return [outputs[stream] for stream in streams]


def store(tensors: popxl.Tensor | Iterable[popxl.Tensor]) -> list[popxl.DeviceToHostStream]:
    """Streams with what tensors of the current graph hold from here on."""
    streams = []
    for t in [tensors] if isinstance(tensors, popxl.Tensor) else tensors:
        streams.append(popxl.d2h_stream(t.shape, t.dtype, "result"))
        ops.host_store(streams[-1], t)
    return streams
