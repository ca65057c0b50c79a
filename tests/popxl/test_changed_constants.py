"""Constants that are changed in place: they begin each run of their graph with their numbers, and keep what ops write
until it ends, however the program is compiled."""

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.tensor import Constant

F32 = popxl.float32
X = np.float32([[1, -2, 3], [0.5, 4, -1]])
C = np.float32([[2, 0, 1], [-1, 3, 5]])
TURNS = 3


def layer_of(x: np.ndarray) -> np.ndarray:
    return np.cos(x) * np.float32(0.5) + x


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    """What each run stores, by NumPy."""
    changed = C + layer_of(X)
    changed = changed + layer_of(changed)  # by reference
    changed[1] += changed[0]  # through a view
    call = layer_of(C + X)
    loop = X
    by_ref = C
    for _ in range(TURNS):
        loop = layer_of(C + loop)
        by_ref = layer_of(by_ref + X)
    loaded = layer_of(changed + 1)
    return {"main": layer_of(changed), "call": call, "loop": loop, "loaded": loaded + loaded, "by_ref": by_ref}


def program(replicas: int) -> tuple[popxl.Ir, popxl.HostToDeviceStream]:
    """Constants changed in the main graph, through a view, by a graph that takes them by reference, in a graph that is
    called, in a loop, by a loop that takes them by reference, and by a load. Layers are on another IPU."""
    ir = popxl.Ir(replicas)
    with ir.main_graph, popxl.ipu(0), popxl.in_sequence():
        stream = popxl.h2d_stream(X.shape, F32, "x")
        x = ops.host_load(stream)

        def own(name: str) -> Constant:
            return popxl.constant(C, F32, name)

        def store(name: str, t: popxl.Tensor) -> None:
            ops.host_store(popxl.d2h_stream(t.shape, F32, name), t)

        of_layer = ir.create_graph(lambda x: ops.cos(x) * 0.5 + x, x)

        def layer(x: popxl.Tensor) -> popxl.Tensor:
            with popxl.ipu(1):
                (y,) = ops.call(of_layer, ops.ipu_copy(x, 1, 0))
            return ops.ipu_copy(y, 0, 1)

        def by_value(t: popxl.Tensor) -> popxl.Tensor:
            constant = own("constant")
            ops.add_(constant, t)
            y = layer(constant)
            ops.add_(constant, y)  # which the next turn does not see
            return y

        def by_reference(t: popxl.TensorByRef, x: popxl.Tensor) -> None:
            ops.add_(t, x)
            ops.var_updates.copy_var_update_(t, layer(t))

        def addition(t: popxl.TensorByRef, x: popxl.Tensor) -> None:
            ops.add_(t, x)

        constant = own("constant")
        changed = ops.add_(constant, layer(x))
        ops.call(ir.create_graph(addition, x, x), constant, layer(changed))
        row = ops.slice_(constant, 1, 2, axis=0)
        ops.add_(row, ops.slice(constant, 0, 1, axis=0))
        store("main", layer(constant))

        of_value = ir.create_graph(by_value, x)
        store("call", ops.call(of_value, x)[0])
        store("loop", ops.repeat(of_value, TURNS, x)[0])

        buffer, into = popxl.remote_buffer(X.shape, F32, 1), own("into")
        ops.remote_store(buffer, 0, constant + 1.0)
        ops.remote_load_(buffer, 0, into)
        store("loaded", layer(into) + layer(into))

        carried = own("carried")
        ops.repeat(ir.create_graph(by_reference, x, x), TURNS, carried, x)
        store("by_ref", carried)
    return ir, stream


@pytest.mark.filterwarnings("ignore::popxl.errors.LostUpdateWarning")  # the last change of a graph's own
@pytest.mark.thorough(but_each=3)
@pytest.mark.parametrize(
    "way, placement, replicas",
    [(way, placement, 1) for way in ("kept", "dispatched", "inlined") for placement in ("several", "one")]
    + [("dispatched", "one", 2), ("kept", "several", 2)],
)
def test_constants_that_are_changed(way, placement, replicas, expected) -> None:
    ir, stream = program(replicas)
    ir.options.calledGraphs, ir.options.placement = way, placement
    fed = X if replicas == 1 else np.stack([X] * replicas)
    with popxl.Session(ir, "ipu_model") as session:
        assert session.program.layout.ipus == ((0, 1) if placement == "several" else (0,))
        for _ in range(2):  # each run begins with the numbers of the constants
            for stored, found in session.run({stream: fed}).items():
                wanted = np.broadcast_to(expected[stored.tensor.name], found.shape)
                np.testing.assert_allclose(found, wanted, rtol=1e-5, err_msg=stored.tensor.name)
