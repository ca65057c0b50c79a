"""Replicas: one program, run by several, on a device for each or on one device for all, with the same numbers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.errors import ApplicationRuntimeError
from popxl.op import OpKind, Requirement
from popxl.transforms import autodiff
from runtime.targets.devices import Device

ROOT = Path(__file__).parents[2]

WAYS = ("kept", "dispatched", "inlined")


def devices(count: int) -> Device:
    return Device("ipu_model", tuple(jax.devices("cpu")[:count]))


@pytest.fixture(params=["one device", "a device each"])
def device(request: pytest.FixtureRequest) -> Callable[[int], Device]:
    """The device for so many replicas."""
    if request.param == "one device":
        return lambda count: devices(1)
    if len(jax.devices("cpu")) < 6:
        pytest.skip("JAX was started with fewer devices")
    return devices


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Any:
    return request.param


def session_of(ir: popxl.Ir, device: Any, way: str = "kept") -> popxl.Session:
    ir.options.calledGraphs = way  # type: ignore[assignment]
    session = popxl.Session(ir, device(ir.replication_factor))
    assert session.program.layout.replicas.count == ir.replication_factor
    return session


def test_the_worked_example(device: Any) -> None:
    """Three groups of two: what each replica starts with, and what is read back."""
    for mode, rows in (("one_per_group", [0, 1, 2]), ("all_replicas", range(6))):
        ir = popxl.Ir(replication=6)
        with ir.main_graph, popxl.in_sequence():
            grouping = ir.replica_grouping(stride=3, group_size=2)
            v = popxl.variable([[1, 1], [2, 2], [3, 3]], replica_grouping=grouping, retrieval_mode=mode)  # type: ignore[arg-type]
            index = popxl.h2d_stream((), popxl.int32)
            out = popxl.d2h_stream((2,), popxl.int32)
            ops.host_store(out, v)
            ops.add_(v, ops.host_load(index))
        with session_of(ir, device) as session:
            shown = session.run({index: np.arange(6, dtype=np.int32)})[out]
            np.testing.assert_array_equal(shown, [[1, 1], [2, 2], [3, 3]] * 2)
            expected = [[1, 1], [3, 3], [5, 5], [4, 4], [6, 6], [8, 8]]
            np.testing.assert_array_equal(session.get_tensor_data(v), [expected[r] for r in rows])
        np.testing.assert_array_equal(session.get_tensor_data(v), [expected[r] for r in rows])


@pytest.mark.thorough(but_each=3)
@pytest.mark.parametrize("transfers", [1, 3])
@pytest.mark.parametrize("shape", [(), (5,)])
def test_shapes_of_host_arrays(device: Any, way: str, transfers: int, shape: tuple[int, ...]) -> None:
    """Transfers first, then replicas."""
    ir = popxl.Ir(replication=4)
    ir.num_host_transfers = transfers
    with ir.main_graph, popxl.in_sequence():
        into, out = popxl.h2d_stream(shape, popxl.float32), popxl.d2h_stream(shape, popxl.float32)
        graph = ir.create_graph(lambda: ops.host_store(out, ops.host_load(into) * 2))
        ops.repeat(graph, transfers)
    full = ((transfers,) if transfers > 1 else ()) + (4,) + shape
    data = np.random.default_rng(0).normal(size=full).astype(np.float32)
    with session_of(ir, device, way) as session:
        assert session._full_input_shape(shape) == full
        np.testing.assert_array_equal(session.run({into: data})[out], data * 2)
        filled = {out: np.empty(full, np.float32)}
        session.run_with_outputs({into: data}, filled)
        np.testing.assert_array_equal(filled[out], data * 2)
        with pytest.raises(ValueError, match="shape"):
            session.run({into: np.zeros((*full[:-1], 7), np.float32)})
        with pytest.raises(IndexError, match=r"has the shape \(\)"):  # nothing there that could be the replicas'
            session.run({into: np.float32(1)})


@pytest.mark.parametrize("transfers", [1, 2])
def test_jax_arrays_are_fed(device: Any, transfers: int) -> None:
    """From wherever they are to where the replicas are."""
    ir = popxl.Ir(replication=2)
    ir.num_host_transfers = transfers
    with ir.main_graph, popxl.in_sequence():
        into, out = popxl.h2d_stream((3,), popxl.float32), popxl.d2h_stream((3,), popxl.float32)
        for _ in range(transfers):
            ops.host_store(out, ops.host_load(into) * 2)
    with session_of(ir, device) as session:
        data = np.arange(6 * transfers, dtype=np.float32).reshape(session.host_shape((3,)))
        np.testing.assert_array_equal(session.run({into: jax.numpy.asarray(data)})[out], data * 2)


@pytest.mark.thorough(but_each=3)
def test_training_in_parallel(device: Any, way: str) -> None:
    """Each replica trains on data of its own; without anything that joins them they go apart."""

    def layer(x: Any, w: Any) -> Any:
        return ops.gelu(x @ w)

    ir = popxl.Ir(replication=3)
    with ir.main_graph, popxl.in_sequence():
        into, out = popxl.h2d_stream((2, 4), popxl.float32), popxl.d2h_stream((), popxl.float32)
        x = ops.host_load(into)
        w = popxl.variable(np.eye(4), popxl.float32, "w", retrieval_mode="all_replicas")
        frozen = popxl.variable(np.full((4, 4), 0.1), popxl.float32, "frozen")
        graph = ir.create_graph(layer, x, w)
        info = autodiff(graph)
        first = ops.call_with_info(graph, x, w)
        second = ops.call_with_info(graph, first.outputs[0], frozen)
        y = second.outputs[0]
        g, _ = ops.call(info.graph, y, inputs_dict=info.inputs_dict(second))
        _, dw = ops.call(info.graph, g, inputs_dict=info.inputs_dict(first))
        ops.scaled_add_(w, dw, b=-0.1)
        ops.host_store(out, ops.sum(y * y))
    data = np.random.default_rng(0).normal(size=(3, 2, 4)).astype(np.float32)
    with session_of(ir, device, way) as session:
        losses = [session.run({into: data})[out] for _ in range(3)]
        weights = session.get_tensor_data(w)
    for r in range(3):
        alone = popxl.Ir()
        with alone.main_graph, popxl.in_sequence():
            into1, out1 = popxl.h2d_stream((2, 4), popxl.float32), popxl.d2h_stream((), popxl.float32)
            x = ops.host_load(into1)
            w1, frozen = popxl.variable(np.eye(4), popxl.float32), popxl.variable(np.full((4, 4), 0.1), popxl.float32)
            whole = alone.create_graph(lambda x, w, u: layer(layer(x, w), u), x, w1, frozen)
            site = ops.call_with_info(whole, x, w1, frozen)
            (y,) = site.outputs
            info = autodiff(whole, grads_required=[whole.inputs[1]])
            (dw,) = ops.call(info.graph, y, inputs_dict=info.inputs_dict(site))
            ops.scaled_add_(w1, dw, b=-0.1)
            ops.host_store(out1, ops.sum(y * y))
        with popxl.Session(alone) as single:
            expected = [single.run({into1: data[r]})[out1] for _ in range(3)]
        np.testing.assert_allclose([loss[r] for loss in losses], expected, rtol=1e-5)
        np.testing.assert_allclose(weights[r], w1.data, rtol=1e-5, atol=1e-6)


def test_every_replica_draws_from_its_own_seed(device: Any) -> None:
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        into, out = popxl.h2d_stream((2,), popxl.uint32), popxl.d2h_stream((64,), popxl.float32)
        ops.host_store(out, ops.random_uniform(ops.host_load(into), (64,)))
    seeds = popxl.create_seeds(5, replicas=2)
    with session_of(ir, device) as session:
        first, second = session.run({into: seeds})[out]
        same = session.run({into: np.stack([seeds[1], seeds[1]])})[out]
    assert (first != second).any()
    np.testing.assert_array_equal(same, [second, second])


@pytest.mark.thorough(but_each=4)
def test_conditionals_and_loops_go_their_own_ways(device: Any, way: str) -> None:
    ir = popxl.Ir(replication=2)
    ir.num_host_transfers = 2
    with ir.main_graph, popxl.in_sequence():
        flags, numbers = popxl.h2d_stream((1,), popxl.bool), popxl.h2d_stream((), popxl.float32)
        out = popxl.d2h_stream((), popxl.float32)
        x = popxl.variable(1.0)
        load = ir.create_graph(lambda x: x * ops.host_load(numbers), x)
        other = ir.create_graph(lambda x: x - 1, x)

        def turn(x: Any) -> Any:
            (y,) = ops.conditional(ops.host_load(flags), load, other, [x], [x])
            ops.host_store(out, y)
            return y

        ops.repeat(ir.create_graph(turn, x), 2, x)
    taken = np.array([[[True], [False]], [[False], [True]]])
    with session_of(ir, device, way) as session:
        stored = session.run({flags: taken, numbers: np.float32([[3, 5], [7, 11]])})[out]
    np.testing.assert_array_equal(stored, [[3, 0], [2, 0]])  # each replica takes its first number when it loads first


def test_checks_of_one_replica_are_told(device: Any, way: str) -> None:
    below = OpKind("Below", lambda t: t, shape=lambda t: t.spec, traits=[Requirement("t", lambda t: t < 3, "is < 3")])
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        into, out = popxl.h2d_stream((), popxl.float32), popxl.d2h_stream((), popxl.float32)
        ops.host_store(out, below(ops.host_load(into)))
    with session_of(ir, device, way) as session:
        session.run({into: np.float32([1, 2])})
        with pytest.raises(ApplicationRuntimeError, match="`t` is < 3"):
            session.run({into: np.float32([1, 5])})


def test_each_replica_prints(device: Any, capfd: pytest.CaptureFixture[str]) -> None:
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        v = popxl.variable([1.0, 2.0], replica_grouping=ir.replica_grouping(group_size=1))
        ops.print_tensor(v, "v")
    with session_of(ir, device) as session:
        session.run()
    assert sorted(capfd.readouterr().err.split("\n")) == ["", "v: 1.0", "v: 2.0"]


def test_writing_and_reading_grouped_variables(device: Any) -> None:
    ir = popxl.Ir(replication=4)
    with ir.main_graph, popxl.in_sequence():
        pairs = ir.replica_grouping_from_assignments([0, 1, 1, 0])
        v = popxl.variable(np.float32([[1, 2], [3, 4]]), replica_grouping=pairs)
        everyone = popxl.variable(np.float32([5, 6]))
        out = popxl.d2h_stream((2,), popxl.float32)
        ops.host_store(out, v * everyone)
        ops.add_(v, popxl.constant(1.0))
    with session_of(ir, device) as session:
        np.testing.assert_array_equal(session.run()[out], np.float32([[5, 12], [15, 24], [15, 24], [5, 12]]))
        np.testing.assert_array_equal(session.get_tensor_data(v), [[2, 3], [4, 5]])
        session.write_variables_data({v: np.float32([[7, 7], [8, 8]]), everyone: np.float32([1, 2])})
        np.testing.assert_array_equal(session.run()[out], np.float32([[7, 14], [8, 16], [8, 16], [7, 14]]))


@pytest.mark.here
def test_cpu_is_a_single_device() -> None:
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        popxl.variable(1.0) + 1
    with pytest.raises(ValueError, match="'cpu' is a single one"):
        popxl.Session(ir, "cpu")
    assert popxl.Session(ir, "ipu_model").program.layout.replicas.count == 2


def test_what_replicas_share_is_there_once(device: Any) -> None:
    """A variable that nobody changes is not copied for each replica."""

    def needed(count: int) -> int:
        ir = popxl.Ir(replication=count)
        with ir.main_graph:
            w = popxl.variable(np.ones((64, 128), np.float32))  # which TPUs do not fill up
            out = popxl.d2h_stream((), popxl.float32)
            ops.host_store(out, ops.sum(w))
        session = session_of(ir, device)
        return session.program.executable.memory_analysis().argument_size_in_bytes

    assert needed(4) == needed(2) < 2 * 64 * 128 * 4


DTYPES = (popxl.float32, popxl.float16, popxl.int32, popxl.uint32, popxl.int8, popxl.bool, popxl.float8_143)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_dtypes(device: Any, dtype: popxl.dtype) -> None:
    data = (np.arange(6).reshape(2, 3) % 2).astype(np.uint8 if dtype.is_float8 else dtype.as_numpy())
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        into, out = popxl.h2d_stream((3,), dtype), popxl.d2h_stream((3,), dtype)
        ops.host_store(out, ops.reshape(ops.host_load(into), (3,)))
    with session_of(ir, device) as session:
        found = session.run({into: data})[out]
    assert found.tobytes() == data.tobytes()


MEETING = """
import functools, sys
import jax, numpy as np, popxl
from popxl import ops

assert len(jax.devices()) == 2
sessions = []
for _ in range(2):
    ir = popxl.Ir(replication=2)
    ir.options.calledGraphs = sys.argv[1]
    with ir.main_graph:
        into, out = popxl.h2d_stream((64, 64), popxl.float32), popxl.d2h_stream((), popxl.float32)
        x = ops.host_load(into)
        graph = ir.create_graph(lambda x: ops.collectives.replicated_all_reduce(ops.tanh(x @ x)), x)
        results = [ops.call(graph, x * (i / 64))[0] for i in range(8)]
        ops.host_store(out, ops.max(functools.reduce(ops.add, results)))
    sessions.append((popxl.Session(ir, "ipu_hw"), into, out))
feed = np.ones((2, 64, 64), np.float32)
feed[1] /= 4
expected = sum(np.tanh(i * i / 64) + np.tanh(i * i / 64 / 16) for i in range(8))
(one, *streams), (other, *others) = sessions
with one, other:
    shown = [(one.run({streams[0]: feed}), other.run({others[0]: feed})) for _ in range(int(sys.argv[2]))]
    for first, second in shown:
        np.testing.assert_allclose(first[streams[1]], [expected, expected], rtol=1e-5)
        np.testing.assert_allclose(second[others[1]], [expected, expected], rtol=1e-5)
"""
"""Runs of two programs, none of which needs what another makes, and nobody looks at the results."""


@pytest.mark.thorough
@pytest.mark.parametrize(("way", "runs"), [("inlined", "200"), ("dispatched", "1500")])
def test_runs_that_nobody_waits_for_do_not_wait_for_each_other(way: str, runs: str) -> None:
    """Each device of a CPU has a thread. XLA would begin what can begin, and devices of different runs would meet: soon
    in whole programs, later in parts of them."""
    as_if_here = {"POPXL_CPU_DEVICES": "2", "NPROC": "2", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, "-c", MEETING, way, runs]
    ran = subprocess.run(command, env={**os.environ, **as_if_here}, cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[:2000]


def instructions(text: str) -> dict[str, dict[str, tuple[str, list[str]]]]:
    """The computations of a compiled program: for each instruction what it does, and the names that it mentions."""
    found: dict[str, dict[str, tuple[str, list[str]]]] = {}
    for line in text.splitlines():
        if heading := re.match(r"(?:ENTRY )?%([\w.-]+) .*{$", line):
            found[heading[1]] = inside = {}
        elif made := re.match(r" +(?:ROOT )?%([\w.-]+) = .*? ([a-z][\w-]*)\((.*)", line):
            inside[made[1]] = made[2], re.findall(r"%([\w.-]+)", made[3])
    return found


@pytest.mark.parametrize("kind", ["loop", "branch", "call"])
def test_what_is_exchanged_in_a_graph_and_around_it_is_in_order(kind: str) -> None:
    """XLA for CPUs may begin at once what does not depend on each other, and devices would meet in different ones."""
    if len(jax.devices("cpu")) < 2:
        pytest.skip("JAX was started with fewer devices")

    def inner(x: popxl.Tensor) -> popxl.Tensor:
        return ops.collectives.replicated_all_reduce(ops.tanh(x) / 2.0)

    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        streams = [popxl.h2d_stream((3, n), popxl.float32) for n in (4, 5, 6)]
        x, before, after = map(ops.host_load, streams)
        before = ops.collectives.replicated_all_gather(before)
        graph = ir.create_graph(inner, x)
        if kind == "loop":
            (y,) = ops.repeat(graph, 3, x)
        elif kind == "branch":
            (y,) = ops.conditional(ops.greater(ops.max(before), 0.0), graph, graph, [x], [x])
        else:
            (y,) = ops.call(graph, *ops.call(graph, x))
        after = ops.collectives.replicated_all_gather(after)
        outs = [popxl.d2h_stream(t.shape, t.dtype) for t in (y, before, after)]
        for out, t in zip(outs, (y, before, after), strict=True):
            ops.host_store(out, t)
    random = np.random.default_rng(1)
    fed = {s: random.uniform(0.1, 1, (2, *s.shape)).astype(np.float32) for s in streams}
    expected = fed[streams[0]]
    for _ in range({"loop": 3, "branch": 1, "call": 2}[kind]):
        expected = np.tanh(expected).sum(0, keepdims=True).repeat(2, 0) / 2
    with session_of(ir, devices) as session:
        shown = session.run(fed)
        np.testing.assert_allclose(shown[outs[0]], expected, rtol=1e-5)
        for out, stream in zip(outs[1:], streams[1:], strict=True):
            np.testing.assert_array_equal(shown[out], [np.concatenate(fed[stream])] * 2)
        computations = instructions(session.program.executable.as_text())

    def meets(does: str, names: list[str]) -> bool:
        inside = (each for name in names for each in computations.get(name, {}).values())
        return does in ("all-reduce", "all-gather") or any(meets(*each) for each in inside)

    compared = 0
    for inside in computations.values():
        found = [name for name, each in inside.items() if meets(*each)]
        if len(found) < 2:
            continue
        needed: dict[str, set[str]] = {}
        for name, (_, names) in inside.items():  # operands come first
            needed[name] = {*names}.union(*(needed.get(each, ()) for each in names))
        for name in found:
            if inside[name][0] in ("while", "conditional", "call"):
                compared += 1
                apart = [t for t in found if t not in needed[name] and name not in needed[t] and t != name]
                assert not apart, f"{apart} and {name} are begun at once"
    assert compared


def test_variables_made_before_the_number_of_replicas_is_set() -> None:
    """One value is every replica's, however many there are in the end."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        buffer = popxl.remote_buffer((2,), popxl.float32)
        stored = popxl.remote_variable([1.0, 2.0], buffer)
        counts = popxl.variable(0.0, retrieval_mode="all_replicas")
        source = popxl.h2d_stream((), popxl.float32)
        ops.remote_store(buffer, 0, ops.remote_load(buffer, 0) + 1.0)
        ops.add_(counts, ops.host_load(source))
    ir.replication_factor = 3
    assert stored.replica_grouping == counts.replica_grouping == ir.replica_grouping()
    with popxl.Session(ir, "ipu_model") as session:
        session.run({source: [1.0, 2.0, 3.0]})
    np.testing.assert_array_equal(session.get_tensor_data(stored), [2, 3])
    np.testing.assert_array_equal(session.get_tensor_data(counts), [1, 2, 3])


def test_groups_of_another_number_of_replicas_are_refused_by_name() -> None:
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        own = popxl.variable([1.0, 2.0], name="own", replica_grouping=ir.replica_grouping(group_size=1))
        ops.add_(own, popxl.constant(1.0))
    ir.replication_factor = 4
    with pytest.raises(ValueError, match=r"`replica_grouping` of Variable\[own .*groups 2 replicas, and the Ir has 4"):
        popxl.Session(ir, "ipu_model")
