"""Pipelines: the numbers are those of the steps one after the other, and each stage is one graph."""

import contextlib
from functools import partial

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons.transforms.autodiff import autodiff_with_accumulation
from popxl_addons.transforms.pipelining import (
    PipelineBoundGraph,
    Restore,
    Stash,
    get_op_pipeline_stage,
    pipelined_execution,
)
from popxl_addons.transforms.recomputation import recompute_graph
from popxl_addons.transforms.repeat_graph import repeat_graph

pytestmark = pytest.mark.filterwarnings("ignore:Session. a run stores to:popxl.errors.PopxlWarning")

F32, U32 = popxl.float32, popxl.uint32


class OneAfterTheOther:
    """The interface of a pipeline, for a body that is executed step by step."""

    def stage(self, i):
        return contextlib.nullcontext()

    def stash_and_restore_tensor(self, t, from_stage=None):
        return t.reshape(t.shape or (1,))

    def stash_and_restore_activations(self, call_info, grad_info):
        return grad_info.inputs_dict(call_info)


def run(ir, feeds, *results):
    """The arrays of streams and variables after one run."""
    with popxl.Session(ir, "ipu_model") as session:
        outputs = session.run(feeds)
    return [
        np.array(outputs[r]) if isinstance(r, popxl.DeviceToHostStream) else session.get_tensor_data(r) for r in results
    ]


def both_ways(program, steps, replicas=1, seed=0):
    """What `program` computes in a pipeline, and one step after the other, from the same random feeds.

    In the main graph of a new Ir, `program()` makes streams and variables. It returns the ones to feed, a function of a
    `StageContext` that does one step, and the streams and variables to compare.
    """
    results = []
    for pipelined in (True, False):
        ir = popxl.Ir(replication=replicas)
        ir.num_host_transfers = steps
        with ir.main_graph, popxl.in_sequence(True):
            ins, body, outs = program()
            if pipelined:
                with pipelined_execution(steps) as p:
                    body(p)
            else:
                for _ in range(steps):
                    body(OneAfterTheOther())
        lead = (steps,) if replicas == 1 else (steps, replicas)
        rng = np.random.default_rng(seed)
        feeds = {s: rng.integers(0, 5, (*lead, *s.shape)).astype(s.dtype.as_numpy()) for s in ins}
        results.append(run(ir, feeds, *outs))
    return results


def assert_same(program, steps, **settings):
    """Both ways give the same; returns what they give."""
    pipelined, straight = both_ways(program, steps, **settings)
    for got, expected in zip(pipelined, straight, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6)
    return pipelined


def stage_graphs(ir):
    return [graph for graph in ir.graphs if "pipeline_stage" in graph.name]


# What is made ---------------------------------------------------------------------------------------------------------


def adding(ir, stages, steps):
    """One is added in each stage, on an IPU each."""
    with ir.main_graph:
        numbers, results = popxl.h2d_stream((), U32), popxl.d2h_stream((), U32)
        with pipelined_execution(steps) as p:
            with p.stage(0), popxl.ipu(0):
                x = ops.host_load(numbers)
            for s in range(stages):
                with p.stage(s), popxl.ipu(s):
                    x = x + 1
                    if s + 1 < stages:
                        x = x.copy_to_ipu(s + 1)
            with p.stage(stages - 1), popxl.ipu(stages - 1):
                ops.host_store(results, x)
    ir.num_host_transfers = steps
    return numbers, results


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_one_is_added_in_each_stage(stages):
    ir = popxl.Ir()
    numbers, results = adding(ir, stages, 10)
    feed = np.arange(10, dtype=np.uint32)
    (out,) = run(ir, {numbers: feed.reshape(10, 1)}, results)  # a scalar stream takes such an array too
    np.testing.assert_array_equal(out, feed + stages)


def test_the_graphs():
    ir = popxl.Ir()
    adding(ir, 2, 10)
    assert str(ir.main_graph) == "\n".join(
        line.removeprefix("        ")
        for line in """\
        main graph:
            add_out_c1: u32[]         = Call pipeline_stage_0_subgraph(0)()
            add_out_c1__t2__t4: u32[] = Loop pipeline_cycle_subgraph(2)__loop_wrapper_subgraph(3)(add_out_c1, \
repeat_count=9, carried=1)
            Call pipeline_stage_1_subgraph(1)(add_out_c1__t2__t4)  @ ipu 1
          where
            pipeline_stage_0_subgraph(0)():
                h2d_stream_init: u32[]     = Init(spec=u32[], init_type=undef)
                h2d_stream_hostload: u32[] = HostLoad(h2d_stream_init, stream=h2d_stream)
                add_out: u32[]             = Add(h2d_stream_hostload, 1)
                add_out_c1: u32[]          = IpuCopy(add_out, destination=1, source=0)
                return add_out_c1

            pipeline_cycle_subgraph(2)__loop_wrapper_subgraph(3)(iteration: i32[], keep_going: bool[], \
add_out_c1: u32[]):
                add_out_c1__t2__t3: u32[] = Call pipeline_cycle_subgraph(2)(add_out_c1)
                return keep_going, add_out_c1__t2__t3

            pipeline_cycle_subgraph(2)(add_out_c1: u32[]):
                add_out_c1__t2: u32[] = Call pipeline_stage_0_subgraph(0)()
                Call pipeline_stage_1_subgraph(1)(add_out_c1)  @ ipu 1
                return add_out_c1__t2

            pipeline_stage_1_subgraph(1)(add_out_c1: u32[]):
                add_out__t1: u32[] = Add(add_out_c1, 1)  @ ipu 1
                HostStore(add_out__t1, stream=d2h_stream)  @ ipu 1""".splitlines()
    )


def test_each_stage_is_one_graph_on_its_ipu(ir):
    adding(ir, 4, 10)
    assert len(stage_graphs(ir)) == 4
    for s, graph in enumerate(stage_graphs(ir)):
        assert len(graph.call_sites) == 4 and {op.ipu for op in (*graph.ops, *graph.call_sites)} == {s}


def test_names_and_scopes(ir):
    with popxl.name_scope("model"):
        v = popxl.variable(np.zeros(3), F32, "v")
        with pipelined_execution(2) as p, p.stage(0):
            ops.add_(v, ops.exp(v))
    (stage,) = stage_graphs(ir)
    assert [t.name for t in stage.inputs] == ["model/v"] and stage.inputs[0].by_ref
    assert stage.ops[0].outputs[0].name == "model/exp_out" and stage.ops[0].name == "model/Exp"


def test_only_what_changes_is_by_reference(ir):
    v, total, late = (popxl.variable(np.zeros(3), F32, name) for name in ("v", "total", "late"))
    with pipelined_execution(4) as p:
        with p.stage(0):
            y = ops.exp(v)
        with p.stage(1):
            ops.add_(total, y + late)
    first, second = stage_graphs(ir)
    assert [t.by_ref for t in first.inputs] == [False]
    assert {t.name: t.by_ref for t in second.inputs} == {"exp_out": False, "late": False, "total": True}


# Numbers --------------------------------------------------------------------------------------------------------------


def test_values_from_all_earlier_stages():
    """Labels that a late stage loads, stores in several stages, values that skip stages, tensors from before."""

    def program():
        x_s, label_s = popxl.h2d_stream((3,), F32), popxl.h2d_stream((3,), F32)
        early, late, last = (popxl.d2h_stream((3,), F32) for _ in range(3))
        v = popxl.variable([1.0, 2.0, 3.0], F32)
        scale = ops.exp(v)

        def body(p):
            with p.stage(0):
                x = ops.host_load(x_s)
                y = x * scale
                ops.host_store(early, y)
            with p.stage(1):
                z = ops.sin(y) + v
            with p.stage(3):
                label = ops.host_load(label_s)
                ops.host_store(late, z * label + x)
            with p.stage(2):
                w = z + y * popxl.constant(np.arange(3), F32)
            with p.stage(4):
                ops.host_store(last, w + label + x * 100)

        return [x_s, label_s], body, [early, late, last]

    assert_same(program, 10)
    assert_same(program, 13)


@pytest.mark.thorough(but_each=4)
@pytest.mark.parametrize("distance", [1, 2, 3])
@pytest.mark.parametrize("shape", [(), (2, 3)])
def test_stashes(distance, shape):
    def program():
        stream, out = popxl.h2d_stream(shape, popxl.int32), popxl.d2h_stream(shape or (1,), popxl.int32)

        def body(p):
            with p.stage(0):
                x = ops.host_load(stream)
            for s in range(1, distance):
                with p.stage(s):
                    x = x * 2
            with p.stage(distance):
                kept = p.stash_and_restore_tensor(x)
                ops.host_store(out, kept + 1)

        return [stream], body, [out]

    assert_same(program, 11)


def test_a_stash_keeps_the_value_that_a_variable_had():
    """Seeds: each step has its own, and a late stage has the one that the first stage had for the same micro-batch."""

    def program():
        stream, out, again = popxl.h2d_stream((40,), F32), popxl.d2h_stream((40,), F32), popxl.d2h_stream((40,), F32)
        seed = popxl.variable(np.array([7, 9]), U32, "seed")

        def body(p):
            with p.stage(0):
                x = ops.host_load(stream)
                y = ops.dropout(x + 1, seed, p=0.5)
                kept_from = ops.identity(seed)
                ops.host_store(out, y)
                ops.increment_mod_(seed, 1, 2**31)
            with p.stage(2):
                ops.host_store(again, ops.dropout(x + 1, p.stash_and_restore_tensor(kept_from), p=0.5))
            with p.stage(1):
                _ = x + 1

        return [stream], body, [out, again, seed]

    out, again, seed = assert_same(program, 8)
    np.testing.assert_array_equal(out, again)
    assert len({row.tobytes() for row in out != 0}) == 8
    np.testing.assert_array_equal(seed, [15, 17])


def test_a_variable_is_stashed_from_a_stage():
    def program():
        out, counter = popxl.d2h_stream((1,), U32), popxl.variable(0, U32)

        def body(p):
            with p.stage(0):
                ops.increment_mod_(counter, 1, 5)
            with p.stage(1):
                ops.host_store(out, p.stash_and_restore_tensor(counter, from_stage=0))

        return [], body, [out, counter]

    out, counter = assert_same(program, 9)
    np.testing.assert_array_equal(out[:, 0], [1, 2, 3, 4, 0, 1, 2, 3, 4])
    assert counter == 4


def test_runs_follow_each_other(ir):
    stream, out = popxl.h2d_stream((2,), F32), popxl.d2h_stream((2,), F32)
    total = popxl.variable(np.zeros(2), F32)
    with pipelined_execution(7) as p:
        with p.stage(0):
            x = ops.host_load(stream)
        with p.stage(1):
            y = ops.exp(x)
        with p.stage(2):
            ops.host_store(out, y * p.stash_and_restore_tensor(x))
            ops.add_(total, y)
    ir.num_host_transfers = 7
    feeds = np.random.default_rng(1).normal(size=(3, 7, 2)).astype(np.float32)
    with popxl.Session(ir, "ipu_model") as session:
        for feed in feeds:
            np.testing.assert_allclose(session.run({stream: feed})[out], np.exp(feed) * feed, rtol=1e-5)
    np.testing.assert_allclose(session.get_tensor_data(total), np.exp(feeds).sum((0, 1)), rtol=1e-5)


def test_a_loop_around_a_pipeline(ir):
    stream, out = popxl.h2d_stream((2,), F32), popxl.d2h_stream((2,), F32)
    total = popxl.variable(np.zeros(2), F32)

    def epoch(total: popxl.TensorByRef):
        with pipelined_execution(5) as p:
            with p.stage(0), popxl.ipu(0):
                x = ops.host_load(stream)
                y = ops.exp(x).copy_to_ipu(1)
            with p.stage(1), popxl.ipu(1):
                ops.host_store(out, y * p.stash_and_restore_tensor(x))
                ops.add_(total, y)

    ops.repeat(ir.create_graph(epoch, total), 3, total)
    ir.num_host_transfers = 15
    feed = np.random.default_rng(1).normal(size=(15, 2)).astype(np.float32)
    stored, summed = run(ir, {stream: feed}, out, total)
    np.testing.assert_allclose(stored, np.exp(feed) * feed, rtol=1e-5)
    np.testing.assert_allclose(summed, np.exp(feed).sum(0), rtol=1e-5)


def test_a_repeated_main_graph(ir):
    stream, out = popxl.h2d_stream((2,), F32), popxl.d2h_stream((2,), F32)
    total = popxl.variable(np.zeros(2), F32)
    with popxl.in_sequence():
        with pipelined_execution(4) as p:
            with p.stage(0):
                x = ops.host_load(stream)
            with p.stage(1):
                ops.host_store(out, ops.exp(x) * p.stash_and_restore_tensor(x))
                ops.add_(total, x)
        ops.scaled_add_(total, total, b=1.0)
    repeat_graph(ir.main_graph, 2)
    ir.num_host_transfers = 8
    feed = np.random.default_rng(1).normal(size=(8, 2)).astype(np.float32)
    stored, summed = run(ir, {stream: feed}, out, total)
    np.testing.assert_allclose(stored, np.exp(feed) * feed, rtol=1e-5)
    np.testing.assert_allclose(summed, 4 * feed[:4].sum(0) + 2 * feed[4:].sum(0), rtol=1e-5)


def test_loops_and_calls_in_stages():
    def program():
        stream, out = popxl.h2d_stream((2,), F32), popxl.d2h_stream((2,), F32)
        step = popxl.variable([1.0, 3.0], F32)
        ir = popxl.gcg().ir
        grow = ir.create_graph(lambda x, step: x * 1.5 + step, step, step)

        def update(total: popxl.TensorByRef, x: popxl.Tensor):
            ops.add_(total, x)

        total = popxl.variable(np.zeros(2), F32)
        adding_up = ir.create_graph(update, total, total)

        def body(p):
            with p.stage(0):
                (x,) = ops.repeat(grow, 3, ops.host_load(stream), step)
            with p.stage(1):
                ops.call(adding_up, total, x)
                ops.host_store(out, x + total)

        return [stream], body, [out, total]

    assert_same(program, 6)


def test_replicas():
    def program():
        x_s, out = popxl.h2d_stream((2,), F32), popxl.d2h_stream((2,), F32)
        total = popxl.variable(np.zeros(2), F32, retrieval_mode="all_replicas")

        def body(p):
            with p.stage(0):
                x = ops.host_load(x_s)
                summed = ops.collectives.replicated_all_reduce(x)
            with p.stage(1):
                y = ops.sin(summed) + x
            with p.stage(2):
                z = y + p.stash_and_restore_tensor(x)
                ops.host_store(out, z)
                ops.add_(total, z)

        return [x_s], body, [out, total]

    out, total = assert_same(program, 8, replicas=2)
    assert out.shape == (8, 2, 2)
    np.testing.assert_allclose(total, out.sum(0), rtol=1e-5)


def test_changes_in_place():
    """A result of an in-place op goes on; a stage changes what it got; an alias from before stands for the variable."""

    def program():
        stream, out = popxl.h2d_stream((2,), F32), popxl.d2h_stream((2,), F32)
        v = popxl.variable(np.zeros(2), F32)
        alias = ops.add_(v, popxl.constant([1.0, 2.0], F32))

        def body(p):
            with p.stage(0):
                x = ops.host_load(stream)
                y = ops.relu_(x - 2)
                ops.add_(alias, y)
            with p.stage(1):
                ops.scaled_add_(y, y, b=2.0)
                z = y.reshape_((1, 2))
            with p.stage(2):
                ops.host_store(out, ops.exp(z).reshape_((2,)))

        return [stream], body, [out, v]

    assert_same(program, 8)


def test_views_from_before():
    """A variable and views of it stay one storage, in each stage."""

    def program():
        stream, out = popxl.h2d_stream((2, 2), F32), popxl.d2h_stream((4,), F32)
        v = popxl.variable(np.arange(4), F32)
        view = ops.add_(v.reshape_((2, 2)), popxl.constant(1.0, F32))
        part = v[1:3]
        row = ops.slice_(v, [0], [2], axis=[0])

        def body(p):
            with p.stage(0):
                x = ops.host_load(stream)
            with p.stage(1):
                ops.add_(view, x)
                ops.exp_(row)
                ops.host_store(out, v * 2.0)
                ops.scaled_add_(v, ops.concat([part, part]), b=-1.0)

        return [stream], body, [out, v]

    assert_same(program, 4, seed=3)


def test_variables_made_in_stages(ir):
    class Scale(addons.Module):
        def build(self, x):
            return x * self.add_variable_input("w", lambda: np.array([2.0, 3.0]), x.dtype)

    stream, out = popxl.h2d_stream((2,), F32, "x"), popxl.d2h_stream((2,), F32)
    with popxl.in_sequence():
        with pipelined_execution(4) as p:
            with p.stage(0), popxl.ipu(0):
                x = ops.host_load(stream)
                facts, graph = Scale().create_graph(x)
                first = facts.init("first")
                (y,) = graph.bind(first).call(x)
                y = y.copy_to_ipu(1)
            with p.stage(1), popxl.ipu(1):
                pieces = popxl.variable(np.zeros(2), F32, "total")
                (z,) = graph.bind(facts.init("second")).call(y)
                ops.add_(pieces, z)
                ops.host_store(out, z)
        ops.add_(first.w, pieces)  # variables go on after the pipeline
    ir.num_host_transfers = 4
    feed = np.arange(8, dtype=np.float32).reshape(4, 2)
    stored, w, total = run(ir, {stream: feed}, out, first.w, pieces)
    np.testing.assert_allclose(stored, feed * [4, 9])
    np.testing.assert_allclose(total, (feed * [4, 9]).sum(0))
    np.testing.assert_allclose(w, [2, 3] + total)


def test_variables_are_updated_where_their_stage_is():
    """What the loop of full cycles changes on IPU 1 goes together with what an op makes there."""
    ir = popxl.Ir(replication=2)
    ir.num_host_transfers = 4
    with ir.main_graph, popxl.in_sequence():
        stream = popxl.h2d_stream((2,), F32)
        w, total = (popxl.variable(np.full(2, k), F32) for k in (3.0, 0.0))
        with pipelined_execution(4) as p:
            with p.stage(0), popxl.ipu(0):
                x = (ops.host_load(stream) * 2.0).copy_to_ipu(1)
            with p.stage(1), popxl.ipu(1):
                ops.add_(total, x * w)
        with popxl.ipu(1):
            mean = ops.collectives.replicated_all_reduce(total, "mean")
            ops.scaled_add_(w, mean, b=-0.5)
            ops.add_(total, mean)
    feed = np.arange(16, dtype=np.float32).reshape(4, 2, 2)
    (value,) = run(ir, {stream: feed}, w)
    np.testing.assert_allclose(value, 3 - 0.5 * 6 * feed.mean(1).sum(0))


def test_sharded_variables_made_in_stages():
    """The ops that load and store their pieces are no part of the pipeline."""
    ir = popxl.Ir(replication=2)
    ir.num_host_transfers = 4
    with ir.main_graph:
        stream = popxl.h2d_stream((4,), F32)
        with pipelined_execution(4) as p:
            with p.stage(0):
                x = ops.host_load(stream)
                w, piece = popxl.replica_sharded_variable(np.zeros(4), F32, "w")
                ops.add_(piece, ops.collectives.replica_sharded_slice(x))
    feed = np.repeat(np.arange(16, dtype=np.float32).reshape(4, 1, 4), 2, 1)
    (total,) = run(ir, {stream: feed}, w)
    np.testing.assert_allclose(total, feed[:, 0].sum(0))


def test_pipelines_one_after_another(ir):
    stream, out = popxl.h2d_stream((), F32), popxl.d2h_stream((), F32)
    v = popxl.variable(1.0, F32)
    with popxl.in_sequence():
        for _ in range(2):
            with pipelined_execution(4) as p:
                with p.stage(0):
                    x = ops.host_load(stream)
                with p.stage(1):
                    ops.add_(v, x)
                    ops.host_store(out, x * 2)
            ops.scaled_add_(v, v, b=1.0)
    ir.num_host_transfers = 8
    stored, total = run(ir, {stream: np.arange(8, dtype=np.float32)}, out, v)
    np.testing.assert_array_equal(stored, 2 * np.arange(8))
    assert total == ((1 + 6) * 2 + 22) * 2


@pytest.mark.thorough(but_each=8)
@pytest.mark.parametrize("seed", range(6))
def test_random_programs(seed):
    """Ops of random stages on random values of earlier stages, some of them stashed; sums and stores on the way."""

    def program():
        rng = np.random.default_rng(seed)
        stages = int(rng.integers(2, 5))
        ins = [popxl.h2d_stream((3,), F32) for _ in range(2)]
        outs = [popxl.d2h_stream((3,), F32) for _ in range(stages)]
        totals = [popxl.variable(np.zeros(3), F32) for _ in range(stages)]
        plan = [(s, rng.integers(0, 1 << 30, 4), rng.random(2)) for s in np.repeat(np.arange(stages), 3)]

        def body(p):
            values = []
            for s, stream in zip((0, stages - 1), ins, strict=True):
                with p.stage(s):
                    values.append((s, ops.host_load(stream)))
            for s, picks, chances in plan:
                with p.stage(int(s)):
                    ready = [(made, t) for made, t in values if made <= s]
                    (m1, t1), (_, t2) = ready[picks[0] % len(ready)], ready[picks[1] % len(ready)]
                    if m1 < s and chances[0] < 0.7:
                        t1 = p.stash_and_restore_tensor(t1)
                    result = ops.sin(t1) + t2 * float(picks[2] % 3)
                    values.append((s, result))
                    if chances[1] < 0.5:
                        ops.add_(totals[s], result)
            for s in range(stages):
                with p.stage(s):
                    ops.host_store(outs[s], ops.sum(ops.concat([t.reshape((1, 3)) for m, t in values if m <= s]), 0))

        return ins, body, outs + totals

    assert_same(program, int(np.random.default_rng(seed).integers(8, 12)), seed=seed)


# Training -------------------------------------------------------------------------------------------------------------


class Dense(addons.Module):
    def __init__(self, features, seed):
        super().__init__()
        self.features, self.rng = features, np.random.default_rng(seed)

    def build(self, x):
        shape = (x.shape[-1], self.features)
        w = self.add_variable_input("w", partial(self.rng.normal, 0, 0.5, shape), x.dtype)
        b = self.add_variable_input("b", partial(self.rng.normal, 0, 0.5, self.features), x.dtype)
        return ops.tanh(x @ w + b)


def training(steps, pipelined, recompute, activations_twice=False):
    """Two layers on two IPUs: forward, forward and backward, backward. Returns gradient sums and losses."""
    ir = popxl.Ir()
    ir.num_host_transfers = steps
    with ir.main_graph, popxl.in_sequence(True):
        x_s, target_s, loss_s = (
            popxl.h2d_stream((4, 3), F32),
            popxl.h2d_stream((4, 2), F32),
            popxl.d2h_stream((), F32),
        )
        facts, layers, backward, state, gradients = {}, {}, {}, {}, {}
        for i, (features, spec) in enumerate([(5, (4, 3)), (2, (4, 5))]):
            with popxl.ipu(i):
                facts[i], layers[i] = Dense(features, i).create_graph(popxl.TensorSpec(spec, F32))
                named = layers[i].args.tensors
                sums, backward[i] = autodiff_with_accumulation(
                    layers[i], named, grads_required=layers[i].graph.inputs[:1] if i else ()
                )
                if recompute:
                    backward[i] = recompute_graph(backward[i])
                state[i], gradients[i] = facts[i].init(f"layer{i}"), sums.init(f"sums{i}")

        def body(p):
            with p.stage(0), popxl.ipu(0):
                x = ops.host_load(x_s)
                info0 = layers[0].bind(state[0]).call_with_info(x)
                h = info0.outputs[0].copy_to_ipu(1)
            with p.stage(1), popxl.ipu(1):
                info1 = layers[1].bind(state[1]).call_with_info(h)
                error = info1.outputs[0] - ops.host_load(target_s)
                ops.host_store(loss_s, ops.sum(error * error))
                needed = p.stash_and_restore_activations(info1, backward[1].grad_graph_info)
                (dh,) = backward[1].bind(gradients[1]).call(error * 2.0, args=needed)
                dh = dh.copy_to_ipu(0)
            with p.stage(2), popxl.ipu(0):
                if activations_twice:
                    p.stash_and_restore_activations(info0, backward[0].grad_graph_info)
                needed = p.stash_and_restore_activations(info0, backward[0].grad_graph_info)
                backward[0].bind(gradients[0]).call(dh, args=needed)

        if pipelined:
            with pipelined_execution(steps) as p:
                body(p)
        else:
            for _ in range(steps):
                body(OneAfterTheOther())
    rng = np.random.default_rng(3)
    feeds = {s: rng.normal(size=(steps, *s.shape)).astype(np.float32) for s in (x_s, target_s)}
    found = [gradients[i].accum[name] for i in (0, 1) for name in "wb"]
    weights = [state[i][name] for i in (0, 1) for name in "wb"]
    values = [v.data.copy() for v in weights]
    return run(ir, feeds, loss_s, *found), values, [*feeds.values()]


def mean_gradients(weights, x, target):
    """Losses, and gradients of their mean, with NumPy."""
    w0, b0, w1, b1 = weights
    h = np.tanh(x @ w0 + b0)
    y = np.tanh(h @ w1 + b1)
    dz1 = 2 * (y - target) * (1 - y * y)
    dz0 = (dz1 @ w1.T) * (1 - h * h)
    grads = [np.swapaxes(x, 1, 2) @ dz0, dz0.sum(1), np.swapaxes(h, 1, 2) @ dz1, dz1.sum(1)]
    return [((y - target) ** 2).sum((1, 2)), *(g.mean(0) for g in grads)]


@pytest.mark.thorough(but_each=4)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("steps", [6, 9])
def test_training(steps, recompute):
    results, weights, feeds = training(steps, True, recompute, activations_twice=recompute)
    for got, expected in zip(results, mean_gradients(weights, *feeds), strict=True):
        np.testing.assert_allclose(got, expected, rtol=2e-4, atol=1e-5)
    straight, *_ = training(steps, False, recompute)
    for got, expected in zip(results, straight, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6)


def test_scalar_activations(ir):
    """A gradient graph gets back the shape that it asks for, also of a scalar."""
    stream, out = popxl.h2d_stream((), F32), popxl.d2h_stream((), F32)
    square = addons.GraphWithNamedArgs(ir.create_graph(lambda x: x * x, popxl.TensorSpec((), F32)))
    grad = addons.autodiff(square)
    with pipelined_execution(5) as p:
        with p.stage(0):
            info = square.call_with_info(ops.host_load(stream))
        with p.stage(1):
            (dx,) = grad.call(info.outputs[0], args=p.stash_and_restore_activations(info, grad))
            ops.host_store(out, dx)
    ir.num_host_transfers = 5
    feed = np.arange(5, dtype=np.float32)
    (stored,) = run(ir, {stream: feed}, out)
    np.testing.assert_allclose(stored, 2 * feed**3)


# Parts ----------------------------------------------------------------------------------------------------------------


def test_stash_and_restore(ir):
    t = popxl.TensorSpec((2, 3), popxl.float16)
    facts, write = Stash().create_graph(t, 4)
    assert (facts.stash.shape, facts.stash.dtype, facts.counter.shape) == ((4, 2, 3), popxl.float16, ())
    ring = facts.init()
    facts, read = Restore().create_graph(ring.stash)
    position = facts.init()
    out = popxl.d2h_stream((2, 3), popxl.float16)
    with popxl.in_sequence():
        for k in range(6):
            write.bind(ring).call(popxl.constant(np.full((2, 3), k), popxl.float16))
            (kept,) = read.bind(position).call(ring.stash)
            ops.host_store(out, kept)
    ir.num_host_transfers = 6
    stored, counter, slots = run(ir, {}, out, ring.counter, ring.stash)
    np.testing.assert_array_equal(stored[:, 0, 0], np.arange(6))
    np.testing.assert_array_equal(slots[:, 1, 2], [4, 5, 2, 3])
    assert counter == 2


def test_a_stage_by_itself(ir):
    x, y = popxl.variable(1.0, F32, "x"), popxl.variable(2.0, F32, "y")
    stage = PipelineBoundGraph(ir.create_empty_graph("stage"))
    with stage.graph:
        inner = stage.add_variable_input(x)
        doubled = inner * 2.0
    stage.add_output_tensor(doubled, "double")
    assert stage.add_variable_input(x) is inner and inner in stage and x not in stage
    assert (stage.original_input_ids, stage.original_output_ids) == (("x",), ("double",))
    (a,) = stage.call()
    (b,) = stage.call(inputs_dict={inner: y})
    stage.reconnect_input("x", y)
    (c,) = stage.call()
    outs = [addons.host_store(t) for t in (a, b, c)]
    assert run(ir, {}, *outs) == [2.0, 4.0, 4.0]


def test_the_stage_of_an_op(ir):
    v = popxl.variable(1.0)
    with pipelined_execution(4) as p:
        with p.stage(0):
            a = ops.exp(v)
            with p.stage(1):
                b = ops.exp(a)
            c = ops.exp(v)
        assert [get_op_pipeline_stage(t.producer, p.stages) for t in (a, b, c)] == [0, 1, 0]


# Errors ---------------------------------------------------------------------------------------------------------------


def ops_outside(p, v):
    ops.exp(v)


def too_many_stages(p, v):
    for s in range(5):
        with p.stage(s):
            ops.exp(v)


def a_stage_is_missing(p, v):
    for s in (0, 2):
        with p.stage(s):
            ops.exp(v)


def backwards(p, v):
    with p.stage(1):
        x = ops.exp(v)
    with p.stage(0):
        ops.exp(x)


def one_stream_twice(p, v):
    stream = popxl.d2h_stream((2,), F32, "both")
    for s in range(2):
        with p.stage(s):
            ops.host_store(stream, v)


def through_a_view(p, v):
    with p.stage(0):
        view = v.reshape_((1, 2))
    with p.stage(1):
        ops.exp_(view.reshape_((2, 1)))


def not_in_a_stage(p, v):
    p.stash_and_restore_tensor(v, 0)


def activations_not_in_a_stage(p, v):
    p.stash_and_restore_activations(None, None)


def no_origin(p, v):
    with p.stage(1):
        p.stash_and_restore_tensor(v)


def same_stage(p, v):
    with p.stage(1):
        p.stash_and_restore_tensor(ops.exp(v))


def to_an_earlier_stage(p, v):
    with p.stage(1):
        p.stash_and_restore_tensor(v, from_stage=2)


def of_another_graph(p, v):
    graph = v.ir.create_graph(lambda x: ops.exp(x), v)
    with p.stage(1):
        p.stash_and_restore_tensor(graph.inputs[0], 0)


def negative_stage(p, v):
    with p.stage(-1):
        pass


MISTAKES = [
    (ops_outside, RuntimeError, r"Operation must be created in a stage context\. .*Exp"),
    (too_many_stages, ValueError, "`steps` is 8, expected at least 10, twice the number of stages"),
    (a_stage_is_missing, ValueError, r"no ops in the stages \[1\].*some in \[0, 2\]"),
    (backwards, ValueError, "in stage 0 needs .*exp_out.*, which the later stage 1 makes"),
    (one_stream_twice, ValueError, "the stages 0 and 1 both use .*both"),
    (through_a_view, ValueError, "stage 1 changes a tensor from outside in place by way of .*reshape"),
    (not_in_a_stage, RuntimeError, "stash_and_restore_tensor: must be called in a stage context"),
    (activations_not_in_a_stage, RuntimeError, "stash_and_restore_activations: must be called in a stage context"),
    (no_origin, RuntimeError, "no op of the pipeline makes .*`from_stage` has to say"),
    (same_stage, TypeError, "from stage 1 to stage 1"),
    (to_an_earlier_stage, TypeError, "from stage 2 to stage 1"),
    (of_another_graph, ValueError, "is not in the current graph, the main graph"),
    (negative_stage, ValueError, "the stage -1 is negative"),
]


@pytest.mark.parametrize(("mistake", "error", "message"), MISTAKES, ids=[mistake.__name__ for mistake, *_ in MISTAKES])
def test_mistakes(ir, mistake, error, message):
    """The ops stay where they were created, and building goes on as if there had been no pipeline."""
    v = popxl.variable([1.0, 2.0], F32)
    with popxl.in_sequence():
        with pytest.raises(error, match=message), pipelined_execution(8) as p:
            with p.stage(0):
                doubled = v * 2.0
            mistake(p, v)
        assert ir.main_graph.ops[0] is doubled.producer and not stage_graphs(ir)
        out = addons.host_store(doubled + 1.0)
    ir.num_host_transfers = 2
    np.testing.assert_array_equal(run(ir, {}, out)[0][0], [3.0, 5.0])


def test_an_error_of_the_program(ir):
    v = popxl.variable([1.0, 2.0], F32)
    with pytest.raises(ZeroDivisionError), pipelined_execution(8) as p, p.stage(0):
        y = ops.exp(v)
        raise ZeroDivisionError
    assert [op.op_type for op in ir.main_graph.ops] == ["Exp"] and y.graph is ir.main_graph
    ops.exp(v)  # in no stage, and nobody minds


def test_a_pipeline_of_nothing(ir):
    with pytest.raises(ValueError, match=r"no ops in the stages \[0\]"), pipelined_execution(8):
        popxl.variable(1.0)


def test_a_mistake_that_was_passed_over_is_remembered(ir):
    v = popxl.variable([1.0, 2.0], F32)
    with pytest.raises(RuntimeError, match="must be created in a stage context"), pipelined_execution(8) as p:
        with p.stage(0):
            x = ops.exp(v)
        with contextlib.suppress(RuntimeError):
            ops.sin(x)
    assert [op.op_type for op in ir.main_graph.ops] == ["Exp", "Sin"] and not stage_graphs(ir)


def test_a_pipeline_returns_nothing(ir):
    def build(x):
        with pipelined_execution(4) as p, p.stage(0):
            popxl.graph_output(ops.exp(x))

    with pytest.raises(ValueError, match=r"returns \[.*exp_out.*which the pipeline computes anew"):
        ir.create_graph(build, popxl.TensorSpec((), F32))


def test_results_cannot_be_used_afterwards(ir):
    v = popxl.variable([1.0, 2.0], F32)
    with pipelined_execution(4) as p, p.stage(0):
        y = ops.exp(v)
    with pytest.raises(ValueError, match="pipeline_stage_0"):
        ops.exp(y)


@pytest.mark.parametrize("steps", [4.0, "4", None])
def test_steps_are_a_number(ir, steps):
    with pytest.raises(TypeError, match="`steps` is .*, expected the number of micro-batches"):
        with pipelined_execution(steps):
            pass
