"""Running a small program and reading values of it."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest

import popxl
import popxl_addons as addons

Evaluate = Callable[..., list[np.ndarray]]


@pytest.fixture(autouse=True)
def _quickly_compiled(quickly_compiled: None) -> None:
    """The kit has its own meaning in what popxl offers, and leaves running to it."""


@pytest.fixture
def ir() -> Iterator[popxl.Ir]:
    """A new Ir whose main graph is current."""
    ir = popxl.Ir()
    with ir.main_graph:
        yield ir


@pytest.fixture
def replicated_ir() -> Iterator[popxl.Ir]:
    """A new Ir of four replicas, whose main graph is current."""
    ir = popxl.Ir(replication=4)
    with ir.main_graph:
        yield ir


@pytest.fixture
def evaluate() -> Evaluate:
    """`evaluate(*tensors)` runs the program once and returns what tensors of its main graph are, on each replica."""

    def run(*tensors: popxl.Tensor) -> list[np.ndarray]:
        ir = tensors[0].ir
        with ir.main_graph:
            streams = [addons.host_store(tensor) for tensor in tensors]
        with popxl.Session(ir, "ipu_model") as session:
            results = session.run()
        return [np.array(results[stream]) for stream in streams]

    return run
