"""Programs as plans: called graphs that are compiled by themselves, and run one after the other by the host."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.errors import ApplicationRuntimeError, PopxlError
from popxl.op import OpKind, Requirement
from popxl.transforms import autodiff
from runtime.plan.plan import Plan

WAYS = ("kept", "dispatched", "inlined")
X = np.float32([[1, -2, 3], [0.5, 4, -1]])


def session_of(ir: popxl.Ir, way: str) -> popxl.Session:
    ir.options.calledGraphs = way  # type: ignore[assignment]
    return popxl.Session(ir)


def all_ways(build: Any, times: int = 2, transfers: int = 1, **feeds: Any) -> list[Any]:
    """What a program stores and what its variables hold, for each way of compiling it.

    `build(**loaded)` gets the feeds as tensors and returns tensors to store.
    """
    found = []
    for way in WAYS:
        ir = popxl.Ir()
        ir.num_host_transfers = transfers
        with ir.main_graph, popxl.in_sequence():
            streams = {}
            for name, data in feeds.items():
                shape = data.shape[1:] if transfers > 1 else data.shape
                streams[popxl.h2d_stream(shape, popxl.dtype.as_dtype(data), name)] = data
            results = build(*map(ops.host_load, streams))
            outputs = [popxl.d2h_stream(t.shape, t.dtype, "out") for t in results]
            for stream, t in zip(outputs, results, strict=True):
                ops.host_store(stream, t)
        with session_of(ir, way) as session:
            assert isinstance(session.program.executable, Plan) == (way == "dispatched")
            runs = [session.run(streams) for _ in range(times)]
            found.append([np.array(run[stream]) for run in runs for stream in outputs])
        found[-1] += [v.data.copy() for v in ir.main_graph.variables]
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6)
    return found[0]


def layer(x: Any, w: Any) -> Any:
    return ops.gelu(x @ w)


def test_training() -> None:
    """Layers that are called and differentiated; weights that are overwritten between and in the calls."""

    def build(x: Any) -> Any:
        ir = popxl.gcg().ir
        weights = [popxl.variable(np.eye(3) * (k + 1) / 3, popxl.float32, f"w{k}") for k in range(4)]
        graph = ir.create_graph(layer, x, weights[0])
        info = autodiff(graph)
        sites = []
        for w in weights:
            sites.append(ops.call_with_info(graph, x, w))
            x = sites[-1].outputs[0]
        gradient = x
        for w, site in zip(reversed(weights), reversed(sites), strict=True):
            gradient, dw = ops.call(info.graph, gradient, inputs_dict=info.inputs_dict(site))
            ops.scaled_add_(w, dw, b=-0.01)
        return [x, gradient]

    all_ways(build, 3, x=X)


def test_pieces_of_equal_structure_are_compiled_once() -> None:
    """Four calls, and what follows each, are two executables; so is a second program that does the same."""

    def program(count: int) -> popxl.Ir:
        ir = popxl.Ir()
        with ir.main_graph, popxl.in_sequence():
            x = popxl.variable(X, name="x")
            graph = ir.create_graph(lambda t: ops.tanh(t * 2), x)
            for k in range(count):
                (y,) = ops.call(graph, x)
                ops.scaled_add_(x, y, b=0.5)
                ops.add_(popxl.variable(float(k)), popxl.constant(1.0))
        return ir

    first, second = session_of(program(4), "dispatched"), session_of(program(7), "dispatched")
    plans = [session.program.executable for session in (first, second)]
    assert [len(plan.segments) for plan in plans] == [4, 7]
    assert len({id(s) for plan in plans for s in plan.structures}) == 1


def updated(w: Any, x: Any) -> None:
    ops.scaled_add_(w, x, b=0.1)


updated.__annotations__["w"] = popxl.TensorByRef


def in_turns(count: int, calls: int = 1) -> Callable[[Any], Any]:
    """A program that calls one graph some times and then updates two variables by calls of another; again and again."""

    def build(x: Any) -> Any:
        ir = popxl.gcg().ir
        weights = [popxl.variable(X * k, name=f"w{k}") for k in range(3)]
        grow = ir.create_graph(lambda t: ops.tanh(t) * 1.5, x)
        update = ir.create_graph(updated, weights[0], x)
        for _ in range(count):
            for _ in range(calls):
                (x,) = ops.call(grow, x)
            for w in weights[:2]:
                ops.call(update, w, x)
        return [x, weights[0], weights[1]]

    return build


def test_pieces_that_come_in_the_same_order_are_one() -> None:
    """A gradient and the updates of several weights, say: one dispatch for all of them."""
    x, w = X, [X * 0, X * 1]
    for _ in range(5):
        x = np.tanh(x) * np.float32(1.5)
        w = [each + np.float32(0.1) * x for each in w]
    for found, expected in zip(all_ways(in_turns(5), 1, x=X), (x, *w), strict=False):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("count", "calls", "pieces"),
    [(3, 1, 9), (5, 1, 5), pytest.param(5, 400, 5 * (100 + 2), marks=pytest.mark.thorough)],
)
def test_how_many_pieces_are_one(count: int, calls: int, pieces: int) -> None:
    """As many as come again and again; fewer, if compiling so many ops would take long."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        in_turns(count, calls)(popxl.variable(X))
    plan = session_of(ir, "dispatched").program.executable
    assert sum(plan.runs.values()) == pieces


def test_pieces_are_named_by_what_they_call() -> None:
    """By three graphs at most."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        x = popxl.variable(X)
        graphs = [ir.create_graph(f, x) for f in (ops.tanh, ops.sin, ops.gelu, ops.relu)]
        for _ in range(5):
            for graph in graphs:
                (x,) = ops.call(graph, x)
    names = {piece.name for piece in session_of(ir, "dispatched").report.pieces}
    assert names == {"tanh_subgraph(0), sin_subgraph(1), gelu_subgraph(2), 1 more"}


def test_pieces_of_several_places_are_not_one() -> None:
    """Those of each place are taken together."""
    ir = popxl.Ir()
    ir.options.placement, ir.options.calledGraphs = "several", "dispatched"
    with ir.main_graph, popxl.in_sequence():
        for ipu in range(2):
            with popxl.ipu(ipu):
                weight = popxl.variable(X)
                update = ir.create_graph(updated, weight, weight)
                for _ in range(12):
                    ops.call(update, weight, popxl.constant(X))
    plan = popxl.Session(ir, "ipu_model").program.executable
    assert sum(plan.runs.values()) == 6


def test_constants_tell_structures_apart() -> None:
    """1, 1.0 and True; 0.0 and -0.0."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        x = popxl.variable(X)
        outputs = []
        for factor in (0.0, -0.0, 1.0, 2.0, 1.0):
            graph = ir.create_graph(lambda t: t * factor + popxl.constant(factor), x)  # noqa: B023
            outputs.append(ops.call(graph, x)[0] + ops.call(graph, x)[0])
        streams = [popxl.d2h_stream(X.shape, popxl.float32) for _ in outputs]
        for stream, t in zip(streams, outputs, strict=True):
            ops.host_store(stream, t)
    with session_of(ir, "dispatched") as session:
        found = session.run()
        for stream, factor in zip(streams, (0.0, -0.0, 1.0, 2.0, 1.0), strict=True):
            np.testing.assert_array_equal(found[stream], 2 * (X * np.float32(factor) + np.float32(factor)))


def test_calls_are_alike_whatever_numbers_they_are_passed() -> None:
    """The number of a layer, say: one executable. Numbers that the ops between have are theirs."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        x = popxl.variable(X, name="x")
        two = popxl.constant(2.0)
        graph = ir.create_graph(lambda t, row: ops.tanh(t * row), x, two)
        y = x
        for number in (0.5, two, two, 3.0):
            (y,) = ops.call(graph, y, number)
        out = popxl.d2h_stream(X.shape, popxl.float32)
        ops.host_store(out, ops.call(graph, y, two)[0] + two)
    with session_of(ir, "dispatched") as session:
        expected = X
        for number in (0.5, 2.0, 2.0, 3.0, 2.0):
            expected = np.tanh(expected * np.float32(number))
        np.testing.assert_allclose(session.run()[out], expected + 2, rtol=1e-6)
    plan = session.program.executable
    assert (len(plan.segments), len(plan.structures)) == (6, 2)


def test_graphs_that_call_graphs() -> None:
    """A graph that is called once is gone through by the host, if there are pieces in it."""

    def build(x: Any) -> Any:
        ir = popxl.gcg().ir
        w = popxl.variable(np.eye(3), popxl.float32, "w")
        graph = ir.create_graph(layer, x, w)

        def model(x: Any, w: Any) -> Any:
            for _ in range(3):
                (x,) = ops.call(graph, x, w)
            return x, x * 2

        return ops.call(ir.create_graph(model, x, w), x, w)

    all_ways(build, 3, x=X)


def model_by_ref(x: popxl.Tensor, w: popxl.TensorByRef, inner: popxl.Graph) -> Any:
    (y,) = ops.call(inner, x, w)
    (y,) = ops.call(inner, y, w)
    ops.scaled_add_(w, ops.transpose(y) @ y, b=0.01)
    (z,) = ops.call(inner, y, w)
    return z, w


model_by_ref.__annotations__["w"] = popxl.TensorByRef


def test_by_reference_through_several_graphs() -> None:
    """What a graph overwrites and returns at once, one tensor bound twice, views, and copies of what is overwritten."""

    def build(x: Any) -> Any:
        ir = popxl.gcg().ir
        w, u = (popxl.variable(np.eye(3) * k, popxl.float32, f"w{k}") for k in (1, 2))
        inner = ir.create_graph(layer, x, w)
        model = ir.create_graph(model_by_ref, x, w, inner)
        before = ops.identity(w)
        z, returned = ops.call(model, x, w)
        ops.add_(w, popxl.constant(1.0))  # does not show in what was returned
        z2, returned2 = ops.call(ir.create_graph(model_by_ref, x, w, inner), z, u)
        ops.add_(returned2, popxl.constant(5.0))
        rows = ops.slice_(w, 0, 1)
        ops.add_(rows, popxl.constant(2.0))
        (y,) = ops.call(inner, z2, ops.transpose_(w))
        return [before, z, returned, z2, returned2, y, rows + 0.0]

    all_ways(build, 3, x=X)


@pytest.mark.filterwarnings("ignore:Session. a run stores to:popxl.errors.PopxlWarning")
def test_streams_in_pieces() -> None:
    """Loads and stores in the main graph, in called graphs and in loops go on where they were."""

    def build(x: Any) -> Any:
        ir = popxl.gcg().ir
        stream = popxl.h2d_stream((), popxl.float32, "numbers")
        graph = ir.create_graph(lambda x: x * ops.host_load(stream), x)
        for _ in range(2):
            (x,) = ops.call(graph, x)
        (x,) = ops.repeat(graph, 2, x)
        build.streams = stream  # type: ignore[attr-defined]
        return [ops.call(graph, x)[0]]

    for way in WAYS:
        ir = popxl.Ir()
        ir.num_host_transfers = 5
        with ir.main_graph, popxl.in_sequence():
            (y,) = build(popxl.variable(X))
            out = popxl.d2h_stream(X.shape, popxl.float32)
            ops.host_store(out, y)
        numbers = np.float32([2, 3, 5, 7, 11])
        with session_of(ir, way) as session:
            found = session.run({build.streams: numbers})[out]  # type: ignore[attr-defined]
        np.testing.assert_allclose(found[0], X * numbers.prod(), rtol=1e-6)


def test_prints_come_in_order(capfd: pytest.CaptureFixture[str]) -> None:
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        x = popxl.variable(1.0)
        graph = ir.create_graph(lambda t: ops.print_tensor(t + 1, "in the graph"), x)
        (y,) = ops.call(graph, x)
        ops.print_tensor(y, "between")
        ops.call(graph, y)
    with session_of(ir, "dispatched") as session:
        session.run()
    assert capfd.readouterr().err.splitlines() == ["in the graph: 2.0", "between: 2.0", "in the graph: 3.0"]


def test_checks() -> None:
    """What a piece requires of its numbers is raised by `run`, and the variables stay usable."""
    not_negative = Requirement("x", lambda x: x >= 0, "has to be 0 or more")
    root = OpKind("RootInPlan", lambda x: x**0.5, shape=lambda x: x.spec, traits=[not_negative])
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        feed = popxl.h2d_stream((), popxl.float32)
        x = ops.host_load(feed)
        w = popxl.variable(1.0, name="w")
        graph = ir.create_graph(lambda t: root(t) - 1, x)
        (y,) = ops.call(graph, *ops.call(graph, x))
        ops.add_(w, y)
    with session_of(ir, "dispatched") as session:
        session.run({feed: np.float32(16)})
        with pytest.raises(ApplicationRuntimeError, match="`x` has to be 0 or more"):
            session.run({feed: np.float32(0.25)})
        session.run({feed: np.float32(16)})


def test_a_run_that_fails_loses_the_state_and_says_so() -> None:
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        w = popxl.variable(X, name="w")
        graph = ir.create_graph(lambda t: t * 2, w)
        for _ in range(3):
            ops.var_updates.copy_var_update_(w, ops.call(graph, w)[0])
    with session_of(ir, "dispatched") as session:
        *_, last = session.program.executable.segments
        executable = last.structure.executable
        calls = iter([False, True])

        def failing(*arguments: Any) -> Any:
            if next(calls):
                raise RuntimeError("the device is gone")
            return executable(*arguments)

        last.structure.executable = failing
        with pytest.raises(RuntimeError, match="the device is gone"):
            session.run()
        last.structure.executable = executable
        with pytest.raises(PopxlError, match="were lost when a run failed"):
            session.run()
        session.weights_from_host()
        session.run()
        np.testing.assert_array_equal(session.get_tensor_data(w), X * 8)


def deep(count: int, like: np.ndarray = X) -> popxl.Ir:
    """A program with many calls of a graph of many ops."""
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.variable(like)

        def many(t: Any) -> Any:
            for _ in range(20):
                t = ops.tanh(t) + 1
            return t

        graph = ir.create_graph(many, x)
        for _ in range(count):
            (x,) = ops.call(graph, x)
        ops.host_store(popxl.d2h_stream(like.shape, popxl.float32), x)
    return ir


@pytest.mark.here
@pytest.mark.parametrize(
    ("count", "size", "way"), [(2, 5, "kept"), (60, 5, "rolled"), (2, 20_000, "kept"), (60, 20_000, "dispatched")]
)
def test_the_session_chooses(count: int, size: int, way: str) -> None:
    """By how much XLA would compile again, and how much a call computes. `deep` in NumPy says the same."""
    x = np.linspace(-1, 1, size, dtype=np.float32)
    session = popxl.Session(deep(count, x))
    assert session.program.layout.mode == way
    for _ in range(20 * count):
        x = np.tanh(x) + 1
    with session:
        np.testing.assert_allclose(*session.run().values(), x, rtol=1e-5)


def test_memory_is_known_and_small() -> None:
    """Values are freed when nobody needs them: many calls in a row need no more than a few."""
    few, many = (session_of(deep(count), "dispatched").program.temporaries() for count in (12, 60))
    assert few == many
    assert many < 10 * X.nbytes


@pytest.mark.usefixtures("only_new_objects")
def test_executables_go_with_the_sessions() -> None:
    """Programs that call the same graph share what it was compiled to, as long as one of them is there."""
    first, second = session_of(deep(3), "dispatched"), session_of(deep(5), "dispatched")
    shared = {*first.program.executable.structures} & {*second.program.executable.structures}
    alive = [weakref.ref(structure) for structure in shared]
    assert alive
    del first, shared
    gc.collect()
    assert all(structure() for structure in alive)
    del second
    gc.collect()
    assert not any(structure() for structure in alive)


def test_feeds_and_fetches_are_not_copied() -> None:
    """A loop over a large feed, and one into a large fetch, take the host arrays as they are."""
    ir = popxl.Ir()
    ir.num_host_transfers = 64
    with ir.main_graph, popxl.in_sequence():
        source, sink = popxl.h2d_stream((1024,), popxl.float32), popxl.d2h_stream((1024,), popxl.float32)
        body = ir.create_graph(lambda: ops.host_store(sink, ops.host_load(source) * 2))
        ops.repeat(body, 64)
    with session_of(ir, "dispatched") as session:
        begin, *_ = session.program.executables()
        assert begin.memory_analysis().output_size_in_bytes < 1.1 * 64 * 1024 * 4  # room for what is stored
        data = np.arange(64 * 1024, dtype=np.float32).reshape(64, 1024)
        for k in (1, 2):
            np.testing.assert_array_equal(session.run({source: data * k})[sink], data * k * 2)
        assert session.program.temporaries() < 64 * 1024


def test_what_nobody_reads_again_is_not_donated() -> None:
    """A piece overwrites what it was given; its new content is needed by nobody."""

    def build() -> Any:
        ir = popxl.gcg().ir
        x = popxl.variable(X)

        def made(t: Any) -> Any:
            return t * 2.0

        def spoiled(t: popxl.TensorByRef) -> Any:
            y = t * 1.0
            t += 1.0
            return y

        spoiled.__annotations__["t"] = popxl.TensorByRef  # not the text that it is in this file
        first, second = ir.create_graph(made, x), ir.create_graph(spoiled, x)
        found = []
        for _ in range(2):
            (h,) = ops.call(first, x)
            found += ops.call(second, h)
        return found

    for found in all_ways(build)[:2]:
        np.testing.assert_allclose(found, X * 2)


def test_wide_numbers() -> None:
    """64 bits in the pieces, and streams beside them."""
    numbers = np.array([0.1, 1.0000000001])

    def build(s: Any) -> Any:
        x = popxl.variable(numbers, popxl.float64, downcast=False)
        graph = popxl.gcg().ir.create_graph(ops.sin, x)
        return [*ops.call(graph, *ops.call(graph, x)), s + 1]

    found, *_ = all_ways(build, 1, s=np.float32(2))
    np.testing.assert_allclose(found, np.sin(np.sin(numbers)), rtol=1e-15)
