"""What an op requires of numbers that only a running program knows: checked on the device, told by `session.run`."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.errors import ApplicationRuntimeError, PopxlError
from popxl.op import OpKind, Requirement

root = OpKind(
    "Root", jnp.sqrt, traits=[Requirement("x", lambda x: x >= 0, "has to be 0 or more")], shape=lambda x: x.spec
)
switched = OpKind(
    "Switched",
    lambda t, limit: t,
    shape=lambda t, limit: t.spec,
    traits=[Requirement("limit", lambda n: n < 3, "has to be below 3", option="throwIfLog2ScaleTensorNotInRange")],
)


def program(build, shape=(), dtype=popxl.float32):
    """An Ir with a stream in and a stream out, and those."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        x = popxl.h2d_stream(shape, dtype, "x")
        y = popxl.d2h_stream(shape, dtype, "y")
        ops.host_store(y, build(ops.host_load(x)))
    return ir, x, y


def rooted(t):
    return root(t)


def called(t):
    graph = popxl.gcg().ir.create_graph(rooted, t)
    return ops.call(graph, t)[0] + ops.call(graph, t)[0]  # twice: XLA keeps the calls


def repeated(t):
    graph = popxl.gcg().ir.create_graph(lambda t: root(t) - 1, t)
    return ops.repeat(graph, 3, t)[0]


@pytest.mark.parametrize(
    ("build", "good", "bad"),
    [(rooted, 4.0, -4.0), (called, 4.0, -1.0), (repeated, 100.0, 2.0)],
    ids=["once", "called", "repeated"],
)
def test_run_raises(build, good, bad) -> None:
    """From `run` itself, with the op, the graph, the line and the requirement; the session works afterwards."""
    ir, x, y = program(build)
    with popxl.Session(ir) as session:
        before = session.run({x: np.float32(good)})[y]
        with pytest.raises(ApplicationRuntimeError, match=r"Root\.\d+\] of .*`x` has to be 0 or more, and it is not"):
            session.run({x: np.float32(bad)})
        assert session.run({x: np.float32(good)})[y] == before


def test_the_first_failure_is_told() -> None:
    def build(t):
        first = root(t - 1)
        return root(first - 10)

    ir, x, _ = program(build)
    with popxl.Session(ir) as session:
        with pytest.raises(ApplicationRuntimeError, match=r"`first = root\(t - 1\)`"):
            session.run({x: np.float32(0)})
        with pytest.raises(ApplicationRuntimeError, match=r"`return root\(first - 10\)`"):
            session.run({x: np.float32(5)})


def test_every_element_counts() -> None:
    ir, x, y = program(rooted, (3,))
    with popxl.Session(ir) as session:
        np.testing.assert_array_equal(session.run({x: np.float32([1, 4, 9])})[y], [1, 2, 3])
        with pytest.raises(ApplicationRuntimeError):
            session.run({x: np.float32([1, 4, -9])})


def test_without_streams() -> None:
    """A program that only prints is checked too, and its constants are."""
    ir = popxl.Ir()
    with ir.main_graph:
        ops.print_tensor(root(popxl.constant(-1.0)))
    with popxl.Session(ir) as session, pytest.raises(ApplicationRuntimeError):
        session.run()


def test_an_option_switches_the_check() -> None:
    """It is read when a session is made."""
    ir, x, y = program(lambda t: switched(t, popxl.constant(5)))
    session = popxl.Session(ir)
    ir.options.throwIfLog2ScaleTensorNotInRange = False
    with session, pytest.raises(ApplicationRuntimeError, match="`limit` has to be below 3"):
        session.run({x: np.float32(1)})
    with popxl.Session(ir) as unchecked:
        assert unchecked.run({x: np.float32(1)})[y] == 1


def test_it_is_no_error_of_the_program() -> None:
    assert not issubclass(ApplicationRuntimeError, PopxlError)
