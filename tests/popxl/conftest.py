"""A fresh program, and a short way to run one."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import popxl
from popxl import ops


@pytest.fixture
def ir() -> popxl.Ir:
    return popxl.Ir()


@pytest.fixture
def run() -> Callable[..., list[Any]]:
    """`run(ir, x, y)` runs a program once and returns what `x` and `y` of its main graph are at its end, as lists."""

    def run(ir: popxl.Ir, *tensors: popxl.Tensor, feeds: Any = None) -> list[Any]:
        with ir.main_graph:
            streams = [popxl.d2h_stream(t.shape, t.dtype) for t in tensors]
            for stream, t in zip(streams, tensors, strict=True):
                ops.host_store(stream, t)
        with popxl.Session(ir) as session:
            outputs = session.run(feeds)
        return [np.asarray(outputs[stream]).tolist() for stream in streams]

    return run
