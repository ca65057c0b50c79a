"""Running op by op: what is found and told, that the numbers are the same, and what stays as it was."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import jax
import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.errors import NonFiniteError, PopxlError
from popxl.session import CompilationProgress, compilation_progress
from popxl.transforms import autodiff
from runtime import progress
from runtime.plan.structure import clear_cache
from runtime.targets.devices import Device
from tests.popxl.random_programs.maker import Maker
from tests.popxl.shared_programs import PROGRAMS

F16, F32 = popxl.float16, popxl.float32
INF = float("inf")

Build = Callable[..., Any]


def found(build: Build, *arrays: Any, infinities: bool = True) -> NonFiniteError | None:
    """The error of a program on variables, if it ends with one."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        build(*(popxl.variable(array, name=f"x{i}") for i, array in enumerate(arrays)))
    with popxl.Session(ir) as session, session.debugging(infinities):
        try:
            session.run()
        except NonFiniteError as error:
            return error
    return None


# What is found --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "build, arrays, name, told",
    [
        (ops.log, ([1.0, 0.0],), "Log", "1 infinity of finite numbers"),
        (ops.log, ([1.0, -1.0, -2.0],), "Log", "2 NaNs of finite numbers"),
        (ops.sqrt, ([-1.0],), "Sqrt", "1 NaN of finite"),
        (ops.div, ([1.0, 0.0], [0.0, 0.0]), "Div", "1 NaN and 1 infinity of finite"),
        (ops.exp, (np.float16([12, 1]),), "Exp", "1 infinity of finite"),
        (ops.mul, (np.float16([300, 1]), np.float16([300, 1])), "Mul", "1 infinity of finite"),
        (ops.matmul, (np.full((1, 2), 200, np.float16), np.full((2, 1), 200, np.float16)), "MatMul", "1 infinity"),
        (lambda x: ops.cast(x, F16), ([1e5],), "Cast", "1 infinity of finite"),
        (lambda x, y: x - y, ([INF], [INF]), "Sub", "1 NaN of infinities, and no NaN"),
        (lambda x: ops.softmax(x, 0), ([-INF, -INF],), "Softmax", "2 NaNs of infinities, and no NaN"),
        (lambda x: ops.add_(x, x), (np.float16([60000, 1]),), "AddLhsInplace", "1 infinity of finite"),
        (lambda x: ops.sqrt(x[1:]), ([1.0, -1.0],), "Sqrt", "1 NaN"),
        (lambda z: z / z, (np.complex64([0, 1]),), "Div", "2 NaNs of finite numbers"),  # one in each part
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_found(build: Build, arrays: Any, name: str, told: str) -> None:
    error = found(build, *arrays)
    assert error is not None
    assert error.op.op_type == name and error.replica == 0
    assert f"an op has made {told}" in str(error)


@pytest.mark.parametrize(
    "build, arrays",
    [
        (lambda x, mask: ops.softmax(x + mask, 0), ([1.0, 2.0], [0.0, -INF])),
        (lambda x: ops.softmax(x + popxl.constant([0.0, -INF]), 0), ([1.0, 2.0],)),
        (lambda x: ops.exp(x) * 2.0, ([-INF],)),
        (lambda x: ops.log(x) + 1.0, ([float("nan")],)),
        (lambda x: x + 1, (np.int32([1, 2]),)),
    ],
)
def test_what_the_user_put_in_is_not_at_fault(build: Build, arrays: Any) -> None:
    assert found(build, *arrays) is None


def test_only_nan() -> None:
    assert found(ops.log, [0.0], infinities=False) is None
    assert found(ops.log, [-1.0], infinities=False) is not None


def test_gradients() -> None:
    """The forward is finite, and the gradient is not."""

    def build(x: popxl.Tensor) -> None:
        graph = x.ir.create_graph(lambda t: ops.sqrt(t), x)
        info = autodiff(graph)
        site = ops.call_with_info(graph, x)
        ops.call(info.graph, popxl.constant([1.0, 1.0]), inputs_dict=info.inputs_dict(site))

    error = found(build, [0.0, 4.0])
    assert error is not None
    graph = error.op.graph
    assert graph.gradient_of is not None
    assert f"in {graph.title}, the gradient of {graph.gradient_of.title}" in str(error)


def test_overflow_in_a_gradient_of_float16() -> None:
    def build(x: popxl.Tensor) -> None:
        graph = x.ir.create_graph(lambda t: ops.sum(t * t * t), x)
        info = autodiff(graph)
        site = ops.call_with_info(graph, x)
        ops.call(info.graph, popxl.constant(30000.0, F16), inputs_dict=info.inputs_dict(site))

    error = found(build, np.float16([2.0, 1.0]))
    assert error is not None and error.op.graph.gradient_of is not None
    assert "float16 ends at 65504" in str(error) and "loss scale" in str(error)


# What is told ---------------------------------------------------------------------------------------------------------


def logarithm(x: popxl.Tensor) -> popxl.Tensor:
    return ops.log(x)


def test_the_letter() -> None:
    """The way to the op: through a conditional, calls and a loop."""

    def step(x: popxl.Tensor) -> popxl.Tensor:
        flag = ops.greater(x, popxl.constant(-9.0))
        ops.conditional(flag, inner, inner, [x], [x])
        return x - 1.0

    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        x = popxl.variable(2.0, name="x")
        inner = ir.create_graph(logarithm, x)
        body = ir.create_graph(step, x)
        ops.add_(x, ops.repeat(body, 5, x)[0])
    with popxl.Session(ir) as session, session.debugging(), pytest.raises(NonFiniteError) as caught:
        session.run()
    lines = [line.split(" (test_debugging.py")[0].strip() for line in str(caught.value).splitlines()]
    assert lines[:9] == [
        "Session.run: an op has made 1 infinity of finite numbers.",
        "",
        "log_out: f32[] = Log(x)",
        "in graph `logarithm_subgraph(0)`, at `return ops.log(x)`",
        f"{popxl.core.printing.line(body.ops[1])}",
        f"in {body.title}, at `ops.conditional(flag, inner, inner, [x], [x])`",
        f"{popxl.core.printing.line(ir.main_graph.ops[0])}, in turn 3 of 5",
        "in the main graph, at `ops.add_(x, ops.repeat(body, 5, x)[0])`",
        "",
    ]
    assert [line.split() for line in lines[9:12]] == [
        "of what is finite: min max mean NaN infinite".split(),
        "x: f32[] 0 0 0 0 0".split(),
        "log_out: f32[], made of them 1".split()[:-1] + ["0", "1"],
    ]
    assert lines[-1].endswith("The variables are as they were before this run.")


@pytest.mark.parametrize("devices", [1, 2])
def test_the_first_replica_is_told(devices: int) -> None:
    ir = popxl.Ir(replication=2)
    with ir.main_graph, popxl.in_sequence():
        x = popxl.variable(np.float32([1, 0]), replica_grouping=ir.replica_grouping(group_size=1), name="x")
        ops.collectives.replicated_all_reduce(ops.log(x + 0.0), "add")
    device = Device("test", jax.devices()[:devices])
    with popxl.Session(ir, device) as session, session.debugging(), pytest.raises(NonFiniteError) as caught:
        session.run()
    assert caught.value.replica == 1 and "of finite numbers, on replica 1." in str(caught.value)


def test_what_replicas_do_together() -> None:
    """An infinity of one replica is not the fault of the sum; a sum that is too large is."""

    def run(values: Any) -> None:
        ir = popxl.Ir(replication=2)
        with ir.main_graph:
            x = popxl.variable(np.float16(values), replica_grouping=ir.replica_grouping(group_size=1))
            ops.collectives.replicated_all_reduce(x, "add")
        with popxl.Session(ir, "ipu_model") as session, session.debugging():
            session.run()

    run([1, INF])
    with pytest.raises(NonFiniteError, match="ReplicatedAllReduce"):
        run([60000, 60000])


def test_replicas_that_do_not_meet() -> None:
    ir = popxl.Ir(replication=2)
    with ir.main_graph, popxl.in_sequence():
        x = popxl.variable(np.float32([0, 1]), replica_grouping=ir.replica_grouping(group_size=1))
        talks = ir.create_graph(lambda t: ops.collectives.replicated_all_reduce(t, "add"), x)
        silent = ir.create_graph(lambda t: t + 1.0, x)
        ops.conditional(ops.greater(x, popxl.constant(0.5)), talks, silent, [x], [x])
    with popxl.Session(ir, "ipu_model") as session, session.debugging():
        with pytest.raises(PopxlError, match="different ops that talk to other replicas: .*, or the end"):
            session.run()


# What stays as it was -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["kept", "dispatched"])
def test_the_session_is_as_before_the_run(way: Any) -> None:
    ir = popxl.Ir()
    ir.options.calledGraphs = way
    with ir.main_graph, popxl.in_sequence():
        feed, out = popxl.h2d_stream((), F32), popxl.d2h_stream((), F32)
        x = popxl.variable(1.0, name="x")
        buffer = popxl.remote_buffer((), F32, 1)
        stored = popxl.remote_variable(2.0, buffer, 0)
        ops.add_(x, popxl.constant(1.0))
        ops.remote_store(buffer, 0, ops.remote_load(buffer, 0) * 2.0)
        ops.host_store(out, ops.log(ops.host_load(feed)) + x)
    with popxl.Session(ir) as session:
        assert session.run({feed: 1.0})[out] == 2
        with session.debugging():
            with pytest.raises(NonFiniteError):
                session.run({feed: 0.0})
            assert (session.get_tensor_data(x), session.get_tensor_data(stored)) == (2, 4)
            assert session.run({feed: 1.0})[out] == 3
        assert session.run({feed: 1.0})[out] == 4
        assert np.isinf(session.run({feed: 0.0})[out])  # nobody looks
        assert (session.get_tensor_data(x), session.get_tensor_data(stored)) == (5, 32)


def test_arrays_of_the_user_are_not_given_up() -> None:
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        feed = popxl.h2d_stream((2,), F32)
        x, y = popxl.variable(np.zeros(2, np.float32)), popxl.variable(np.zeros(2, np.float32))
        ops.var_updates.copy_var_update_(x, ops.host_load(feed))
        ops.var_updates.copy_var_update_(y, x)
    given = jax.numpy.ones(2)
    with popxl.Session(ir) as session:
        with session.debugging():
            session.run({feed: given})
        session.run({feed: given})
        assert session.get_tensor_data(y).tolist() == [1, 1]
    assert given.tolist() == [1, 1]


# The same numbers -----------------------------------------------------------------------------------------------------


OFTEN = ("grouped variables", "alone")
"""Programs of replicas, and of one."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] * (name not in OFTEN)) for name in PROGRAMS]
)
def test_shared_programs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def share(array: np.ndarray) -> np.ndarray:
        return array

    compiled = PROGRAMS[name](4, share)
    run = popxl.Session.run

    def debugged(session: popxl.Session, *arguments: Any) -> Any:
        with session.debugging():
            return run(session, *arguments)

    monkeypatch.setattr(popxl.Session, "run", debugged)
    for ours, theirs in zip(PROGRAMS[name](4, share), compiled, strict=True):
        assert ours.keys() == theirs.keys()
        for key in ours:
            if ours[key].dtype.names:
                assert ours[key].tobytes() == theirs[key].tobytes()
            else:
                np.testing.assert_allclose(ours[key], theirs[key], 1e-5, 1e-6, err_msg=key)


def results(seed: int, is_debugged: bool) -> dict[str, np.ndarray]:
    """What a random program stores, and its variables."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        Maker(seed, streams=False).main()
    with popxl.Session(ir) as session, session.debugging(False) if is_debugged else nullcontext():
        stored = {stream.tensor_id: np.asarray(array) for stream, array in session.run().items()}
        return stored | {v.id: data for v, data in session.get_tensors_data(ir.main_graph.variables).items()}


@pytest.mark.filterwarnings("ignore::popxl.errors.PopxlWarning")  # they change what they take by value
@pytest.mark.thorough(but_each=8)
@pytest.mark.parametrize("seed", range(8))
def test_random_programs(seed: int) -> None:
    debugged, compiled = results(seed, True), results(seed, False)
    assert debugged.keys() == compiled.keys()
    for key, array in compiled.items():
        np.testing.assert_allclose(debugged[key], array, 1e-4, 1e-5, err_msg=key)


@pytest.mark.thorough(but_each=3)
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("way", ["kept", "dispatched", "inlined", "op by op"])
def test_prints(way: Any, devices: int, capfd: pytest.CaptureFixture[str]) -> None:
    """In loops, calls, branches that are taken, and gradients: by each replica, though what it prints is the same."""
    ir = popxl.Ir(replication=2)
    ir.options.calledGraphs = "auto" if way == "op by op" else way
    with ir.main_graph, popxl.in_sequence():
        x = popxl.variable(np.float32([0, 1]), replica_grouping=ir.replica_grouping(group_size=1))
        double = ir.create_graph(lambda t: ops.print_tensor(t * 2, "double"), x)
        then = ir.create_graph(lambda t: ops.print_tensor(ops.call(double, t)[0], "then"), x)
        other = ir.create_graph(lambda t: ops.repeat(double, 1, t)[0], x)
        (y,) = ops.repeat(double, 2, x)
        ops.call(double, y)
        ops.conditional(ops.greater(x, popxl.constant(0.5)), then, other, [x], [x])
        loss = ir.create_graph(
            lambda t: ops.sum(ops.print_tensor(t * t, "t", print_self=False, print_gradient=True)), x
        )
        info = autodiff(loss)
        ops.call(info.graph, 1.0, inputs_dict=info.inputs_dict(ops.call_with_info(loss, x)))
    device = Device("test", jax.devices()[:devices])
    with popxl.Session(ir, device) as session:
        if way == "op by op":
            with session.debugging():
                session.run()
        else:
            session.run()
    lines = capfd.readouterr().err.splitlines()
    first = [f"double: {n}" for n in ("0.0", "0.0", "0.0", "0.0")] + ["t_gradient: 1.0"]
    second = [f"double: {n}" for n in ("2.0", "4.0", "8.0", "2.0")] + ["then: 2.0", "t_gradient: 1.0"]
    assert lines == first + second if way == "op by op" else sorted(lines) == sorted(first + second)


# An Ir that has changed -----------------------------------------------------------------------------------------------


def counter() -> tuple[popxl.Ir, popxl.Tensor]:
    ir = popxl.Ir()
    ir.options.enableInplaceAmbiguityChecking = False
    with ir.main_graph:
        x = popxl.variable(0.0, name="x")
        ops.add_(x, popxl.constant(1.0))
    return ir, x


def test_an_ir_that_has_changed_is_told() -> None:
    ir, x = counter()
    with popxl.Session(ir) as session:
        session.run()
        with ir.main_graph:
            for _ in range(3):
                ops.add_(x, popxl.constant(10.0))
        told = (
            r"Session.run: Ir\[id=\d+\] has changed since this session was made, and the compiled program has not: the "
            r"main graph has gained .*AddLhsInplace.* \(test_debugging.py:\d+\), .* and 1 more. Make another session"
        )
        for _ in range(2):
            with pytest.raises(PopxlError, match=told):
                session.run()
        with pytest.raises(PopxlError, match="Session.debugging: .* has changed"):
            session.debugging()
        assert session.get_tensor_data(x) == 1
        with popxl.Session(ir) as other:
            other.run()
            assert other.get_tensor_data(x) == 32
        session.run()  # what it was made of, as it is known that the Ir has changed
        with ir.main_graph:
            ops.add_(x, popxl.constant(10.0))
        with pytest.raises(PopxlError, match="has changed"):
            session.run()


def test_what_changes_an_ir() -> None:
    ir = popxl.Ir()
    with ir.main_graph as main:
        x = popxl.variable(1.0)
        y, z = x + 1, x * 2
    session = popxl.Session(ir)
    with session:
        main.reorder([z.producer, y.producer])
        with pytest.raises(PopxlError, match="the main graph has its ops in another order"):
            session.run()
        main.reorder([y.producer, z.producer])
        session.run()
        ir.num_host_transfers = 3
        with pytest.raises(PopxlError, match="`ir.num_host_transfers` is 3, and was 1"):
            session.run()
        ir.num_host_transfers = 1
        session.run()
        main.replace([y.producer], lambda lhs, rhs: lhs - rhs)
        with pytest.raises(PopxlError, match="gained .*Sub.*; the main graph has lost .*Add"):
            session.run()


def test_a_call_that_writes_back_from_now_on() -> None:
    ir = popxl.Ir()
    ir.options.enableInplaceAmbiguityChecking = False
    with ir.main_graph:
        v = popxl.variable(1.0, name="v")
        site = ops.call_with_info(ir.create_graph(lambda t: ops.add_(t, popxl.constant(1.0)), v), v)
    with popxl.Session(ir) as session:
        session.run()
        site.set_parent_input_modified(v)
        with pytest.raises(
            PopxlError, match=r"Op\[Call.\d+\] \(test_debugging.py:\d+\) has other inputs that it change"
        ):
            session.run()
        assert session.get_tensor_data(v) == 1
    with popxl.Session(ir) as session:
        session.run()
        assert session.get_tensor_data(v) == 2


def test_all_edits_are_counted_and_told() -> None:
    ir = popxl.Ir()
    with ir.main_graph as main, popxl.in_sequence():
        x = popxl.variable([1.0, 2.0], name="x")
        buffer = popxl.remote_buffer((2,), F32, 1)
        graph = ir.create_graph(lambda t, u: t @ u, x, x)
        (y,) = ops.call(graph, x, x)
        ops.remote_store(buffer, 0, x)
    (call,), (product,) = graph.call_sites, graph.ops

    def an_input() -> None:
        call.gain_input(x)

    def slots() -> None:
        buffer.entries = 2

    def other_slots() -> None:
        buffer.set_remote_buffer_info(F32, (2,), 3)

    def a_variable_in_a_slot() -> None:
        with main:
            popxl.remote_variable([1.0, 2.0], buffer, 0, name="filling")

    def by_reference() -> None:
        graph.inputs[0].by_ref = True

    def replicas() -> None:
        ir.options.enableReplicatedGraphs, ir.options.replicatedGraphCount = True, 2

    edits: list[tuple[Callable[[], Any], str]] = [
        (lambda: graph.add_input(x.spec, "late"), r"graph `.*` has gained input Tensor\[.*late"),
        (an_input, r"Op\[Call.\d+\] .* has other inputs(;|\.)"),
        (
            lambda: graph.add_output(graph.inputs[0]),
            r"Op\[Call.\d+\] .* has other results; graph .* has gained output Tensor",
        ),
        (lambda: call.edit(modified=frozenset({0})), "has other inputs that it changes"),
        (lambda: product.edit(attributes={**product.attributes}), r"Op\[MatMul.\d+\] .* has other attributes"),
        (lambda: product.edit(ipu=1), r"Op\[MatMul.\d+\] .* has another IPU"),
        (by_reference, "has gained input by reference Tensor"),
        (slots, r"remote buffer 1 is .*\[1: 2 x f32\[2\]\], and was .*\[1: 1 x"),
        (other_slots, r"remote buffer 1 is .*\[1: 3 x f32\[2\]\], and was"),
        (a_variable_in_a_slot, r"what fills remote buffers is \[Variable\[filling .*\]\], and was \[\]"),
        (replicas, "`ir.replication_factor` is 2, and was 1"),
    ]
    with popxl.Session(ir) as session:
        for edit, told in edits:
            count = ir.edits.count
            edit()
            assert ir.edits.count > count, told
            with pytest.raises(PopxlError, match=told):
                session.run()
    with pytest.raises(TypeError, match="does not support item assignment"):
        product.attributes["trans_a"] = True


def test_what_does_not_change_what_is_run() -> None:
    ir, x = counter()
    with popxl.Session(ir) as session:
        ir.main_graph.add_output(x)
        with pytest.raises(PopxlError, match="has gained output"):
            session.run()
        ir.main_graph.trim_outputs(0)
        autodiff(ir.create_graph(lambda t: ops.exp(t), x))
        with ir.main_graph:
            popxl.variable(1.0)
        ir.options.calledGraphs = "inlined"
        session.run()
        assert session.get_tensor_data(x) == 1


# Progress -------------------------------------------------------------------------------------------------------------


def blocks(way: Any) -> popxl.Ir:
    ir = popxl.Ir()
    ir.options.calledGraphs = way
    with ir.main_graph:
        x = popxl.variable(np.ones((2, 3), np.float32))
        graphs = [ir.create_graph(lambda t, op=op: op(t) * 2.0, x) for op in (ops.gelu, ops.tanh)]
        for graph in graphs * 2:
            (x,) = ops.call(graph, x)
    return ir


@pytest.mark.parametrize("way", ["kept", "dispatched"])
def test_progress_is_told(way: Any) -> None:
    clear_cache()  # what other tests have compiled
    told: list[CompilationProgress] = []
    with compilation_progress(told.append):
        popxl.Session(blocks(way))
    popxl.Session(blocks(way))
    total = told[-1].total
    assert [each.done for each in told] == list(range(total + 1))
    assert all(each.total == total and bool(each.what) == (each.done < total) for each in told)
    assert (total == 1) == (way == "kept")
    times = [each.seconds for each in told]
    assert times == sorted(times)


def test_lines_go_to_the_innermost_reader() -> None:
    """Also after an error; without a reader they are lost."""
    outer: list[str] = []
    inner: list[str] = []
    progress.report("before")
    with progress.reporting(outer.append):
        progress.report("1")
        with pytest.raises(ZeroDivisionError), progress.reporting(inner.append):
            progress.report("2")
            raise ZeroDivisionError
        progress.report("3")
    progress.report("after")
    assert (outer, inner) == (["1", "3"], ["2"])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    "chosen, stream, shown",
    [
        (None, Terminal, "\r\x1b[KCompiling: the program, 0 s"),
        (None, io.StringIO, None),
        ("off", Terminal, None),
        ("on", io.StringIO, "Compiling: the program, 0 s\n"),
    ],
)
def test_progress_is_shown(chosen: Any, stream: Any, shown: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a terminal, after some time; elsewhere on request."""
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.delenv("POPXL_PROGRESS", raising=False)
    if chosen is not None:
        monkeypatch.setenv("POPXL_PROGRESS", chosen)
    written = stream()
    monkeypatch.setattr("sys.stderr", written)
    popxl.Session(blocks("kept"))
    text = written.getvalue()
    assert text.startswith(shown) if shown else text == ""
    if stream is Terminal and shown:
        assert text.endswith("\r\x1b[K")


def test_progress_that_is_quick_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 1000.0)
    written = Terminal()
    monkeypatch.setattr("sys.stderr", written)
    popxl.Session(blocks("kept"))
    assert written.getvalue() == ""


def test_progress_that_is_chosen_wrongly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POPXL_PROGRESS", "loud")
    with pytest.raises(ValueError, match="POPXL_PROGRESS is 'loud'; expected 'auto', 'on' or 'off'"):
        popxl.Session(blocks("kept"))


def test_nan_from_before_is_named(capfd):
    ir = popxl.Ir()
    with ir.main_graph:
        v = popxl.variable(np.array([1.0, np.nan], np.float32), name="poisoned")
        x = popxl.h2d_stream((2,), popxl.float32, "x")
        y = popxl.d2h_stream((2,), popxl.float32)
        ops.host_store(y, ops.host_load(x) * v)
    with popxl.Session(ir) as session, session.debugging():
        session.run({x: np.ones(2, np.float32)})
        assert "NaN in `poisoned` (1 NaN)" in capfd.readouterr().err
        session.run({x: np.full(2, np.nan, np.float32)})
        assert "(2 NaN)" in capfd.readouterr().err
