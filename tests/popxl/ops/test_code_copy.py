"""`remote_code_load` is a place in the schedule: what it says, what it refuses, and that no number depends on it."""

import pytest

import popxl
from popxl import ops
from popxl.errors import PopxlError
from popxl.ops.code_copy import CODE_LOCATION, code_copy, remote_code_load
from popxl.transforms import autodiff


@pytest.mark.parametrize("load", [True, False])
def test_no_number_depends_on_it(ir, run, load) -> None:
    with ir.main_graph as main, popxl.in_sequence():
        x = popxl.variable(3.0)
        double = ir.create_graph(lambda t: t * 2, x)
        passed = ir.create_graph(lambda t: t, x)
        before = len(main.tensors)
        if load:
            assert ops.remote_code_load(double, "executable") is None
            remote_code_load(passed, destination="executable")
        assert len(main.tensors) == before
        results = [*ops.call(double, x), *ops.call(passed, x)]
        assert [op.op_type for op in main.ops] == ["RemoteCodeLoad"] * 2 * load + ["Call"] * 2
        assert len(main.ops[-2].after) == load  # in sequence with what follows
    assert run(ir, *results) == [6, 3]


def test_in_a_graph_that_is_differentiated(ir, run) -> None:
    with ir.main_graph as main:
        x = popxl.variable(3.0)
        passed = ir.create_graph(lambda t: t, x)

        def loading(t):
            ops.remote_code_load(passed, "executable")
            ops.remote_code_load(main, "executable")
            return t * t

        graph = ir.create_graph(loading, x)
        info = autodiff(graph)
        site = ops.call_with_info(graph, x)
        (gradient,) = ops.call(info.graph, popxl.constant(1.0), inputs_dict=info.inputs_dict(site))
    assert run(ir, gradient) == [6]


def test_what_is_refused(ir) -> None:
    with pytest.raises(RuntimeError, match="There is no current graph"):
        ops.remote_code_load(ir.main_graph, "executable")
    with popxl.Ir().main_graph as other:
        x = popxl.variable(1)
        elsewhere = other.ir.create_graph(lambda t: t, x)
    with ir.main_graph as main:
        graph = ir.create_graph(lambda t: t, popxl.variable(1))
        name = ops.remote_code_load.__name__
        for destination in ("executable", "compute_buffer", "moon"):
            with pytest.raises(ValueError, match=f"^The {name} op cannot load the code of the main graph"):
                ops.remote_code_load(main, destination)
        for destination in ("compute_buffer", "io_buffer", "moon", None):
            with pytest.raises(NotImplementedError, match="the one `destination` is 'executable'"):
                ops.remote_code_load(graph, destination)
        with pytest.raises(TypeError, match="`graph` must be a Graph; got 'graph'"):
            ops.remote_code_load("graph", "executable")
        with pytest.raises(ValueError, match="of another Ir"):
            ops.remote_code_load(elsewhere, "executable")
        with popxl.io_tiles(), pytest.raises(PopxlError, match="outside of `popxl.io_tiles"):
            ops.remote_code_load(graph, "executable")
        for location in CODE_LOCATION.__args__:
            with pytest.raises(NotImplementedError):
                code_copy(graph, location, "executable")
        assert main.ops == []
