"""Programs on several IPUs: the same numbers whether each is a device of its own, or one device stands for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.errors import ApplicationRuntimeError
from popxl.op import OpKind, Requirement
from popxl.transforms import autodiff
from runtime.plan import structure
from runtime.targets.devices import Device
from tests.popxl_addons import test_addons_pipelining as pipelines

F32 = popxl.float32
X = np.float32([[1, -2, 3], [0.5, 4, -1]])
WAYS = ("several", "one")


def session_of(ir: popxl.Ir, placement: str, device: Any = "ipu_model") -> popxl.Session:
    ir.options.placement = placement  # type: ignore[assignment]
    return popxl.Session(ir, device)


def is_placed(session: popxl.Session) -> bool:
    return len(session.program.layout.ipus) > 1


def places(session: popxl.Session) -> dict[str, list[int]]:
    """The numbers of the CPU devices that variables and remote buffers are on, by name."""
    layout, state = session.program.layout, session.store
    names = [layout.resident[t].name for t in layout.changed] + ["buffer" for _ in layout.buffers]
    names += [layout.resident[t].name for t in layout.unchanged]
    arrays = (*state.present(), *state.constant)
    return {name: sorted(d.id for d in array.devices()) for name, array in zip(names, arrays, strict=True)}


def both_ways(build: Callable[[], Any], times: int = 2, transfers: int = 1, replicas: int = 1) -> list[np.ndarray]:
    """What a program stores and what its variables hold, which is the same both ways.

    `build()` makes a program in the main graph of a new Ir, and returns tensors to store.
    """
    found = []
    for way in WAYS:
        ir = popxl.Ir(replicas)
        ir.num_host_transfers = transfers
        with ir.main_graph, popxl.in_sequence():
            results = build() or ()
            outputs = []
            for t in results:
                with popxl.ipu(t.ipu):
                    outputs.append(popxl.d2h_stream(t.shape, t.dtype, "out"))
                    ops.host_store(outputs[-1], t)
        with session_of(ir, way) as session:
            assert is_placed(session) == (way == "several"), session.program.reason
            rng = np.random.default_rng(3)
            stored = []
            for _ in range(times):
                feeds = {
                    s: rng.integers(-3, 4, session.host_shape(s.shape)).astype(s.dtype.as_numpy())
                    for s in sorted(session.expected_inputs(), key=lambda s: s.tensor_id)
                }
                run = session.run(feeds)
                stored += [np.array(run[s]) for s in sorted(run, key=lambda s: s.tensor_id)]
            found.append(stored + [np.array(session.get_tensor_data(v)) for v in ir.main_graph.variables])
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    return found[0]


# Programs -------------------------------------------------------------------------------------------------------------


def one_after_the_other() -> Any:
    """An IPU after the other, and back, with a variable on each."""
    w = [popxl.variable(X * k, name=f"w{k}") for k in (1, 2)]
    with popxl.ipu(0):
        x = ops.host_load(popxl.h2d_stream(X.shape, F32)) * w[0]
        x1 = x.copy_to_ipu(1)
    with popxl.ipu(1):
        y = ops.tanh(x1 + w[1])
        ops.add_(w[1], y)
        back = y.copy_to_ipu(0)
    with popxl.ipu(0):
        ops.add_(w[0], back * x)
    return [y, back]


def one_variable_on_two() -> Any:
    """A variable that two IPUs read and overwrite in turn, by way of calls, which need no copies."""

    def update(w: popxl.TensorByRef, b: popxl.Tensor) -> popxl.Tensor:
        ops.scaled_add_(w, ops.sin(w), b=0.5)
        return w * b

    update.__annotations__["w"] = popxl.TensorByRef
    w, b = popxl.variable(X, name="w"), popxl.variable(2.0, name="b")
    graph = popxl.gir().create_graph(update, w, b)
    found = []
    for ipu in (1, 0, 1, 1, 0):
        with popxl.ipu(ipu):
            found += ops.call(graph, w, b)
    return found


def one_stream_on_two() -> Any:
    """Two IPUs that take turns at the same streams."""
    stream, out = popxl.h2d_stream((3,), F32), popxl.d2h_stream((3,), F32)
    for ipu in (0, 1, 1, 0):
        with popxl.ipu(ipu):
            ops.host_store(out, ops.host_load(stream) * (ipu + 2))


def one_buffer_on_two() -> Any:
    """Slots of one remote buffer that two IPUs use."""
    buffer = popxl.remote_buffer((2, 3), F32, 3)
    for k in range(2):
        popxl.remote_variable(X * (k + 1), buffer, k)
    found = []
    for ipu in (1, 0, 1):
        with popxl.ipu(ipu):
            t = ops.remote_load(buffer, ipu)
            ops.remote_store(buffer, ipu, ops.sin(t))
            ops.remote_store(buffer, 2, t)
            found.append(t)
    return found


def a_graph_on_two() -> Any:
    """A called graph with ops on two IPUs, which changes what it gets, and gets one tensor twice."""

    def inner(w: popxl.TensorByRef, a: popxl.Tensor, b: popxl.Tensor) -> Any:
        with popxl.ipu(0):
            c = ops.exp(a * 0.25)
            ops.add_(w, c)
            c = c.copy_to_ipu(1)
        with popxl.ipu(1):
            return c * 2.0, c + b, w

    inner.__annotations__["w"] = popxl.TensorByRef
    w, x = popxl.variable(X, name="w"), popxl.variable(X + 1, name="x")
    graph = popxl.gir().create_graph(inner, w, x, x)
    first = ops.call(graph, w, x, x)
    with popxl.ipu(1):
        ops.add_(x, popxl.constant(1.0))
    second = ops.call(graph, w, first[1], popxl.constant(X))
    return [*first, *second]


def nested_loops() -> Any:
    """A loop in a loop, each over two IPUs; carried values change places, one is the same in all turns, and numbers
    are counted."""

    def turn(a: popxl.Tensor, b: popxl.Tensor, w: popxl.TensorByRef, k: popxl.Tensor) -> Any:
        with popxl.ipu(0):
            c = ops.sin(a + k)
            ops.add_(w, c)
        with popxl.ipu(1):
            return b, c.copy_to_ipu(1) * 0.5

    turn.__annotations__["w"] = popxl.TensorByRef
    a, b, w, k = (popxl.variable(X * f, name=n) for f, n in ((1, "a"), (2, "b"), (0, "w"), (0.5, "k")))
    ir = popxl.gir()
    inner = ir.create_graph(turn, a, b, w, k)

    def turns(a: popxl.Tensor, b: popxl.Tensor, w: popxl.TensorByRef, k: popxl.Tensor) -> Any:
        a, b = ops.repeat(inner, 3, a, b, w, k)
        with popxl.ipu(1):
            return ops.negate(a), b

    turns.__annotations__["w"] = popxl.TensorByRef
    outer = ir.create_graph(turns, a, b, w, k)
    found = ops.repeat(outer, 2, a, b, w, k)
    return [*found, *ops.repeat(inner, 1, *found, w, k)]


def a_conditional_on_two() -> Any:
    """Branches with ops on two IPUs, and ones that are each on one; also in loops. Some return what they get."""
    x = popxl.variable(X, name="x")

    def grow(x: popxl.Tensor) -> popxl.Tensor:
        with popxl.ipu(1):
            y = ops.sin(x)
        with popxl.ipu(0):
            return ops.ipu_copy(y, 0) + 1.0

    ir = popxl.gir()
    branches = [ir.create_graph(grow, x), ir.create_graph(ops.negate, x)]
    with popxl.ipu(1):
        flag = ops.host_load(popxl.h2d_stream((), popxl.int32))
    (y,) = ops.conditional(ops.cast(flag, popxl.bool), *branches, [x], [x])

    def on(ipu: int) -> Callable[..., Any]:
        def both(a: popxl.Tensor, b: popxl.Tensor) -> Any:
            with popxl.ipu(ipu):
                return ops.exp(a * 0.1), b

        return both

    with popxl.ipu(1):
        pair = ops.conditional(
            ops.cast(flag, popxl.bool), ir.create_graph(on(0), x, x), ir.create_graph(on(1), x, x), [x, y], [y, x]
        )
    turn = ir.create_graph(lambda y: ops.conditional(ops.cast(ops.sum(y), popxl.bool), *branches, [y], [y]), y)
    (z,) = ops.repeat(turn, 3, y)
    return [y, z, *pair]


def on_one_and_the_other(x: popxl.Tensor) -> popxl.Tensor:
    with popxl.ipu(0):
        y = ops.sin(x).copy_to_ipu(1)
    with popxl.ipu(1):
        return ops.exp(y)


def gradients_of_a_loop() -> Any:
    """What a forward loop stacks for its gradient stays where it is made."""
    x = popxl.variable(X * 0.1, name="x")
    ir = popxl.gir()
    graph = ir.create_graph(on_one_and_the_other, x)
    model = ir.create_graph(lambda x: ops.repeat(graph, 3, x), x)
    info = autodiff(model)
    site = ops.call_with_info(model, x)
    with popxl.ipu(1):
        (g,) = ops.call(info.graph, popxl.constant(X), inputs_dict=info.inputs_dict(site))
    return [*site.outputs, g]


def gradients_of_a_conditional() -> Any:
    """What a branch computed on two IPUs is computed again, there."""
    x = popxl.variable(X * 0.1, name="x")
    ir = popxl.gir()
    grown = ir.create_graph(lambda x: ops.ipu_copy(on_one_and_the_other(x), 0), x)
    same = ir.create_graph(lambda x: x * 2.0, x)
    flag = ops.cast(ops.host_load(popxl.h2d_stream((), popxl.int32)), popxl.bool)
    model = ir.create_graph(lambda x, flag: ops.conditional(flag, grown, same, [x], [x]), x, flag)
    info = autodiff(model, grads_required=model.inputs[:1])
    site = ops.call_with_info(model, x, flag)
    (g,) = ops.call(info.graph, popxl.constant(X), inputs_dict=info.inputs_dict(site))
    with popxl.ipu(1):
        return [*site.outputs, g, ops.sin(g.copy_to_ipu(1))]


def sums_over_ipus() -> Any:
    """A collective over the IPUs of a replica."""
    x = popxl.variable(X, name="x")
    with popxl.ipu(0):
        a = ops.exp(x * 0.1)
        b = a.copy_to_ipu(1)
    with popxl.ipu(1):
        b = b + 1.0
    return [t * 2.0 for t in ops.collectives.all_reduce([a, b], ipus=[0, 1])]


def one_graph_on_two() -> Any:
    """A graph that is called on two IPUs, and the host goes through it, as there are pieces inside."""
    x, w = popxl.variable(X, name="x"), popxl.variable(X * 2, name="w")
    ir = popxl.gir()
    ir.options.calledGraphs = "dispatched"
    layer = ir.create_graph(lambda x, w: ops.tanh(x * w) + x, x, w)

    def twice(x: popxl.Tensor, w: popxl.Tensor) -> Any:
        return ops.call(layer, *ops.call(layer, x, w), w)

    found = []
    with popxl.ipu(0):
        found += ops.call(ir.create_graph(twice, x, w), x, w)
        found += ops.call(layer, x, w)
    with popxl.ipu(1):
        found += ops.call(ir.create_graph(lambda x, w: twice(x, w)[0] * 2.0, x, w), w, w)
    return found


def what_is_handed_on() -> Any:
    """A result that is what was passed, by way of two calls, and what was passed is overwritten afterwards."""
    x = popxl.variable(X, name="x")
    ir = popxl.gir()

    def same(x: popxl.Tensor) -> popxl.Tensor:
        for ipu in (0, 1):
            with popxl.ipu(ipu):
                ops.print_tensor(ops.ipu_copy(ops.exp(x), 1 - ipu), print_self=False)
        return x

    inner = ir.create_graph(same, x)
    outer = ir.create_graph(lambda x: ops.call(inner, x), x)
    y = ops.sin(x)
    (z,) = ops.call(outer, y)
    ops.add_(y, x)
    with popxl.ipu(1):
        far = ops.cos(x)
    return [far, y, z]


def graphs_of_the_other() -> Any:
    """A graph that was built on one IPU and is called on another, and its gradient; their results go with both."""
    x, w = popxl.variable(X, name="x"), popxl.variable(X * 2, name="w")
    with popxl.ipu(1):
        graph = popxl.gir().create_graph(lambda x, w: ops.tanh(x * w), x, w)
    gradient = autodiff(graph, grads_required=[graph.inputs[1]])
    site = ops.call_with_info(graph, x, w)
    with popxl.ipu(1):
        seed = popxl.constant(X + 1.0) * 0.5
        error = seed - site.outputs[0]
    (dw,) = ops.call(gradient.graph, error, inputs_dict=gradient.inputs_dict(site))
    with popxl.ipu(1):
        ops.scaled_add_(w, dw, b=-0.5)
        far = w + seed
    return [far, x + dw]


PROGRAMS = [
    what_is_handed_on,
    one_graph_on_two,
    graphs_of_the_other,
    one_after_the_other,
    one_variable_on_two,
    one_buffer_on_two,
    a_graph_on_two,
    nested_loops,
    a_conditional_on_two,
    gradients_of_a_loop,
    gradients_of_a_conditional,
    sums_over_ipus,
]


@pytest.mark.filterwarnings("ignore::popxl.errors.DriftingVariableWarning")
@pytest.mark.thorough(but_each=8)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("replicas", [1, 2])
def test_numbers(program: Callable[[], Any], replicas: int) -> None:
    both_ways(program, replicas=replicas)


@pytest.mark.thorough(but_each=2, rotated=True)
@pytest.mark.parametrize("replicas", [1, 2])
def test_streams_on_two_ipus(replicas: int) -> None:
    both_ways(one_stream_on_two, transfers=4, replicas=replicas)


@pytest.mark.thorough(but_each=2, rotated=True)
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_buffer_of_the_host_on_two_ipus(replicas: int) -> None:
    def build() -> Any:
        popxl.gir().options.remoteBuffers = "host"
        return one_buffer_on_two()

    both_ways(build, replicas=replicas)


@pytest.mark.thorough(but_each=2)
@pytest.mark.parametrize("calls", ["kept", "inlined", "dispatched"])
def test_ways_of_compiling_calls(calls: str) -> None:
    def build() -> Any:
        popxl.gir().options.calledGraphs = calls  # type: ignore[assignment]
        return [*a_graph_on_two(), *nested_loops()]

    both_ways(build)


# Pipelines ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the stages of pipelines on devices of their own."""

    def run(ir: popxl.Ir, feeds: Any, *results: Any) -> list[np.ndarray]:
        with session_of(ir, "several") as session:
            assert is_placed(session)
            outputs = session.run(feeds)
        return [outputs[r] if isinstance(r, popxl.DeviceToHostStream) else session.get_tensor_data(r) for r in results]

    monkeypatch.setattr(pipelines, "run", run)


@pytest.mark.thorough(but_each=2)
@pytest.mark.parametrize("stages", [2, 4])
def test_stages(apart: None, stages: int) -> None:
    pipelines.test_one_is_added_in_each_stage(stages)


def test_a_loop_around_a_pipeline(apart: None, ir: popxl.Ir) -> None:
    with ir.main_graph:
        pipelines.test_a_loop_around_a_pipeline(ir)


def test_variables_made_in_stages(apart: None, ir: popxl.Ir) -> None:
    with ir.main_graph:
        pipelines.test_variables_made_in_stages(ir)


@pytest.mark.thorough
@pytest.mark.parametrize("recompute", [False, True])
def test_training(apart: None, recompute: bool) -> None:
    """Each stage is compiled once, whatever the number of steps."""
    pipelines.test_training(9, recompute)


def added_in_stages(stages: int, steps: int, replicas: int = 1) -> tuple[popxl.Ir, Any, Any]:
    """A pipeline with a variable in each stage."""
    ir = popxl.Ir(replicas)
    ir.num_host_transfers = steps
    ir.options.calledGraphs = "dispatched"  # the stages, small as they are
    with ir.main_graph:
        numbers, results = popxl.h2d_stream((3,), F32), popxl.d2h_stream((3,), F32)
        with pipelines.pipelined_execution(steps) as p:
            for s in range(stages):
                with p.stage(s), popxl.ipu(s):
                    x = ops.host_load(numbers) if s == 0 else x.copy_to_ipu(s)  # noqa: F821
                    v = popxl.variable(np.zeros(3), F32, name=f"v{s}")
                    ops.add_(v, x)
                    x = x + popxl.variable(np.ones(3), F32, name=f"k{s}")
            with p.stage(stages - 1), popxl.ipu(stages - 1):
                ops.host_store(results, x)
    return ir, numbers, results


@pytest.mark.thorough(but_each=2, rotated=True)
@pytest.mark.parametrize("replicas", [1, 2])
def test_everything_is_where_its_ops_are(replicas: int) -> None:
    """IPU `n` of replica `r` is device ``r * N + n``; also after a run."""
    ir, numbers, results = added_in_stages(3, 6, replicas)
    with session_of(ir, "several") as session:
        data = np.arange(18 * replicas, dtype=np.float32).reshape(session.host_shape((3,)))
        expected = {f"{kind}{s}": [r * 3 + s for r in range(replicas)] for s in range(3) for kind in "vk"}
        for _ in range(2):
            assert places(session) == expected
            outputs = session.run({numbers: data})
            assert {d.id for d in outputs.data[results].devices()} == {*expected["v2"]}
            np.testing.assert_array_equal(outputs[results], data + 3)


def test_the_stages_are_compiled_once() -> None:
    """However many steps there are: the pieces are the calls of the stages."""
    plans = []
    for steps in (6, 60):
        ir, *_ = added_in_stages(3, steps)
        plans.append(session_of(ir, "several").program.executable)
    assert [len(plan.structures) for plan in plans] == [3, 3]
    assert [sum(plan.runs.values()) for plan in plans] == [3 * 6, 3 * 60]


# Running --------------------------------------------------------------------------------------------------------------


slow = OpKind(
    "Slow", lambda x: jax.lax.fori_loop(0, 3000, lambda i, y: jax.numpy.sin(y) * 1.01, x), shape=lambda x: x.spec
)


def test_the_host_does_not_wait_and_stages_overlap() -> None:
    ir = popxl.Ir()
    ir.num_host_transfers = 6
    with ir.main_graph:
        numbers, results = popxl.h2d_stream((1000,), F32), popxl.d2h_stream((1000,), F32)
        with pipelines.pipelined_execution(6) as p:
            with p.stage(0), popxl.ipu(0):
                x = slow(ops.host_load(numbers)).copy_to_ipu(1)
            with p.stage(1), popxl.ipu(1):
                ops.host_store(results, slow(x))
    data = {numbers: np.ones((6, 1000), np.float32)}
    with session_of(ir, "several") as session:
        outputs = session.run(data)
        assert not outputs.data[results].is_ready()  # and `run` has returned
        outputs[results]
        with session.recording() as timeline:
            session.run(data)
    first, second = ([s for s in timeline.spans if s.device == lane] for lane in timeline.devices())
    assert any(a.start < b.end and b.start < a.end for a in first for b in second)


def test_timeline() -> None:
    """A lane for each device; what is copied from another one is in it."""
    ir, numbers, _ = added_in_stages(3, 6)
    with session_of(ir, "several") as session, session.recording() as timeline:
        session.run({numbers: np.zeros((6, 3), np.float32)})
    lanes = {lane: [s.name for s in timeline.spans if s.device == lane] for lane in timeline.devices()}
    assert len(lanes) == 3
    assert sorted(sum("pipeline_stage" in name for name in names) for names in lanes.values()) == [6, 6, 6]
    assert sorted(names.count("copied here") for names in lanes.values()) == [0, 6, 6]
    assert str(timeline).count("copied here") == 2


def test_report() -> None:
    ir, *_ = added_in_stages(3, 6)
    report = session_of(ir, "several").report
    assert report.dispatches == 3 * 6
    assert "Ops are on the IPUs 0, 1, 2, and each of these is a device of its own." in str(report).replace("\n ", "")


# Which placement ------------------------------------------------------------------------------------------------------


def test_a_graph_runs_where_it_is_called() -> None:
    """Whichever IPU it was made on, and also if the host goes through it."""
    ir = popxl.Ir()
    with ir.main_graph:
        one_graph_on_two()
    plan = session_of(ir, "several").program.executable
    assert [piece.ipu for piece in plan.segments] == [0, 0, 0, 1, 1, 1]


def work(elements: int) -> popxl.Ir:
    ir = popxl.Ir()
    with ir.main_graph:
        with popxl.ipu(0):
            x = ops.sin(popxl.variable(np.ones(elements), F32, name="x")).copy_to_ipu(1)
        with popxl.ipu(1):
            ops.host_store(popxl.d2h_stream(x.shape, F32), ops.cos(x))
    return ir


@pytest.mark.thorough(but_each=2, rotated=True)
@pytest.mark.parametrize("replicas", [1, 2])
def test_the_host_takes_a_branch(replicas: int) -> None:
    """Its ops are then on their IPUs. Replicas, which may differ, choose by themselves: on one IPU."""
    ir = popxl.Ir(replicas)
    with ir.main_graph:
        a_conditional_on_two()
    names = [piece.name for piece in session_of(ir, "several").program.executable.segments if piece.ipu == 1]
    assert any("Sin" in name for name in names) == (replicas == 1)


def test_stacks_are_where_they_are_made() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        gradients_of_a_loop()
    plan = session_of(ir, "several").program.executable
    found = [(piece.ipu, piece.name) for piece in plan.segments if piece.name in ("Init", "StackTurn")]
    assert found == [(1, "Init"), (0, "Init"), (1, "StackTurn"), (0, "StackTurn")]
    assert [(p.ipu, p.name) for p in plan.segments if "Gather" in p.name] == [(1, "Gather"), (0, "Gather")]
    for step, _ in plan.steps.all_steps():
        assert not any(result.shape == (3, *X.shape) for way in getattr(step, "ways", ()) for result, _ in way.returns)


def test_a_gradient_is_where_its_loop_is() -> None:
    ir = popxl.Ir()
    with ir.main_graph, popxl.ipu(1):
        x = popxl.variable(X, name="x")
        turn = ir.create_graph(ops.sin, x)
        model = ir.create_graph(lambda x: ops.repeat(turn, 3, x), x)
        info = autodiff(model)
        ops.call(info.graph, popxl.constant(X), inputs_dict=info.inputs_dict(ops.call_with_info(model, x)))
    assert {op.ipu for graph in ir.graphs for op in graph.ops} == {1}
    assert not is_placed(session_of(ir, "several"))


@pytest.mark.here
@pytest.mark.parametrize(("elements", "placed"), [(100, False), (1000000, True)])
def test_the_session_chooses(elements: int, placed: bool) -> None:
    session = popxl.Session(work(elements), "ipu_model")
    assert is_placed(session) == placed
    assert ("there is so little work" in session.program.reason) != placed


@pytest.mark.here
def test_one_device_stands_for_all() -> None:
    """If the options say so; if there are too few; if the device is one."""
    assert "`ir.options.placement` says so" in session_of(work(9), "one").program.reason
    one = Device("mine", jax.devices()[:1], numIpus=2)
    assert "would need 2, and 1 can be used" in session_of(work(9), "several", one).program.reason
    many = popxl.Ir(replication=7)
    with many.main_graph, popxl.ipu(1):
        x = popxl.variable(1.0) + 1.0
        with popxl.ipu(0):
            ops.host_store(popxl.d2h_stream((), F32), ops.ipu_copy(x, 0) + 1.0)
    assert not is_placed(session_of(many, "several"))


def test_ipus_that_are_not_used() -> None:
    """A program on the IPUs 2 and 5 needs two devices; one that is on IPU 3 alone is as any other."""

    def on(*ipus: int) -> popxl.Session:
        ir = popxl.Ir()
        with ir.main_graph:
            for ipu in ipus:
                with popxl.ipu(ipu):
                    ops.add_(popxl.variable(1.0, name=f"v{ipu}"), popxl.constant(1.0))
        return session_of(ir, "several")

    with on(2, 5) as session:
        session.run()
        assert places(session) == {"v2": [0], "v5": [1]}
    assert not is_placed(on(3))


# Effects --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", ["device", "host"])
def test_remote_buffers(memory: str) -> None:
    """A buffer is where its ops are, in either memory."""
    ir = popxl.Ir()
    ir.options.remoteBuffers = memory  # type: ignore[assignment]
    with ir.main_graph, popxl.in_sequence():
        ops.add_(popxl.variable(1.0, name="v"), popxl.constant(1.0))
        buffer = popxl.remote_buffer((3,), F32, 2)
        w = popxl.remote_variable(np.float32([1, 2, 3]), buffer, 1)
        with popxl.ipu(1):
            for _ in range(2):
                t = ops.remote_load(buffer, 1)
                ops.remote_store(buffer, 1, t * 2.0)
    with session_of(ir, "several") as session:
        for _ in range(2):
            session.run()
        assert places(session) == {"v": [0], "buffer": [1]}
        np.testing.assert_array_equal(session.get_tensor_data(w), np.float32([1, 2, 3]) * 16)


def test_prints(capfd: pytest.CaptureFixture[str]) -> None:
    """In the order of the program, whichever device prints."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        x = popxl.variable(1.0)
        for ipu in (0, 1, 0):
            with popxl.ipu(ipu):
                x = ops.print_tensor(x + 1.0, f"on {ipu}").copy_to_ipu(1 - ipu, ipu)
    with session_of(ir, "several") as session:
        session.run()
    assert capfd.readouterr().err.splitlines() == ["on 0: 2.0", "on 1: 3.0", "on 0: 4.0"]


def test_checks() -> None:
    """What fails on any device is raised, and told by its op. Checks on several do not wait for each other."""
    not_negative = Requirement("x", lambda x: x >= 0, "has to be 0 or more")
    root = OpKind("RootInPlaces", lambda x: x**0.5, shape=lambda x: x.spec, traits=[not_negative])
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        feed = popxl.h2d_stream((), F32)
        with popxl.ipu(1):
            x = root(ops.host_load(feed))
            x0 = x.copy_to_ipu(0)
        with popxl.ipu(0):
            ops.add_(popxl.variable(0.0, name="w"), root(x0 - 1.0))
    first, second = (op.id for op in ir.main_graph.ops if op.kind is root)
    with session_of(ir, "several") as session:
        session.run({feed: np.float32(4)})
        for value, id in ((-1, first), (0.25, second)):
            with pytest.raises(ApplicationRuntimeError, match=rf"RootInPlaces\.{id}\].*`x` has to be 0 or more"):
                session.run({feed: np.float32(value)})
        session.run({feed: np.float32(4)})


@pytest.mark.thorough(but_each=2, rotated=True)
@pytest.mark.here
@pytest.mark.parametrize("replicas", [1, 2])
def test_saved_sessions(replicas: int, tmp_path: Any) -> None:
    """Executables come back on their devices."""
    ir, numbers, results = added_in_stages(3, 6, replicas)
    session = session_of(ir, "several")
    session.save(tmp_path / "session")
    structure.clear_cache()
    loaded = popxl.Session.load(tmp_path / "session")
    assert is_placed(loaded)
    for each in (session, loaded):
        with each:
            (stream,) = each.expected_inputs()
            data = np.arange(18 * replicas, dtype=np.float32).reshape(each.host_shape((3,)))
            (found,) = each.run({stream: data}).values()
            np.testing.assert_array_equal(found, data + 3)
            assert places(each)["v2"] == [2 + 3 * r for r in range(replicas)]


def test_cache(tmp_path: Any) -> None:
    for _ in range(2):
        ir, numbers, results = added_in_stages(2, 4)
        ir.options.enableEngineCaching, ir.options.cachePath = True, str(tmp_path)
        structure.clear_cache()
        with session_of(ir, "several", "ipu_hw") as session:
            data = np.arange(12, dtype=np.float32).reshape(4, 3)
            np.testing.assert_array_equal(session.run({numbers: data})[results], data + 2)
    assert not session.program.is_serializable


def test_jax_arrays_are_taken() -> None:
    ir, numbers, results = added_in_stages(2, 4)
    with session_of(ir, "several") as session:
        data = jax.numpy.arange(12, dtype=jax.numpy.float32).reshape(4, 3)
        np.testing.assert_array_equal(session.run({numbers: data})[results], data + 2)


def test_as_a_function_of_jax() -> None:
    """Placement plays no part there."""
    ir, numbers, results = added_in_stages(2, 4)
    function = popxl.to_jax(ir.main_graph)
    data = np.arange(12, dtype=np.float32).reshape(4, 3)
    fetched, _ = jax.jit(function)(**function.variables(), **{numbers.tensor.name: data})
    np.testing.assert_array_equal(fetched[results.tensor.name], data + 2)
