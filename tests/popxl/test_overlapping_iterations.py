"""Loops over several IPUs whose iterations overlap: the order of their steps, and the same numbers as without."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.errors import PopxlError
from popxl.transforms import autodiff
from runtime.costs.ipu_timing import timing_of
from runtime.plan.lags import Use, lags_of

SHAPE = (2, 3)
IPUS = 3


@pytest.fixture(autouse=True)
def _devices() -> None:
    if len(jax.devices("cpu")) < IPUS:
        pytest.skip("JAX was started with fewer devices")


def training(micro_batches: int, overlap: bool, ipus: int = IPUS) -> tuple[popxl.Ir, list[Any]]:
    """A loop that accumulates the gradients of a model whose layers are on `ipus` IPUs, and an update after it."""
    ir = popxl.Ir()
    ir.num_host_transfers = micro_batches
    with ir.main_graph, popxl.in_sequence():
        stream, losses = popxl.h2d_stream(SHAPE, popxl.float32, "x"), popxl.d2h_stream((), popxl.float32, "loss")
        weights = [popxl.variable(np.full(SHAPE, 0.5 + k), popxl.float32, f"w{k}") for k in range(ipus)]
        sums = []
        for k in range(ipus):
            with popxl.ipu(k):
                sums.append(ops.init(SHAPE, popxl.float32, f"sum{k}", "zero"))
        count = popxl.variable(0.0, popxl.float32, "count")

        def model(x: popxl.Tensor, *weights: popxl.Tensor) -> popxl.Tensor:
            for k, w in enumerate(weights):
                with popxl.ipu(k):
                    x = ops.tanh((x.copy_to_ipu(k) if k else x) * w)
            with popxl.ipu(ipus - 1):
                return ops.sum(x)

        forward = ir.create_graph(model, weights[0], *weights)
        gradient = autodiff(forward, grads_required=forward.inputs[1:])
        body = ir.create_empty_graph("body")
        with body, popxl.in_sequence():
            own_weights = [body.add_input_like(w) for w in weights]
            own_sums = [body.add_input_like(t, by_ref=True) for t in sums]
            own_count = body.add_input_like(count, by_ref=True)
            site = ops.call_with_info(forward, ops.host_load(stream), *own_weights)
            with popxl.ipu(ipus - 1):
                start = popxl.constant(1.0)
                ops.host_store(losses, site.outputs[0])
            gradients = ops.call(gradient.graph, start, inputs_dict=gradient.inputs_dict(site))
            by_input = dict(zip(gradient.outputs, gradients, strict=True))
            for k, total in enumerate(own_sums):
                with popxl.ipu(k):
                    ops.var_updates.accumulate_(total, by_input[forward.inputs[1 + k]])
            ops.add_(own_count, popxl.constant(1.0))
        ops.repeat(body, micro_batches, *weights, *sums, count, overlap=overlap)
        for k, (w, total) in enumerate(zip(weights, sums, strict=True)):
            with popxl.ipu(k):
                ops.scaled_add_(w, total, b=-0.1)
    return ir, [stream, losses, *weights, count]


def run(ir: popxl.Ir, placement: str, stream: Any, *results: Any) -> list[np.ndarray]:
    """Outputs and variables after two runs."""
    ir.options.placement = placement  # type: ignore[assignment]
    outputs = [s for s in results if isinstance(s, popxl.DeviceToHostStream)]
    x = np.random.default_rng(0).normal(size=(ir.num_host_transfers, *SHAPE)).astype(np.float32)
    with popxl.Session(ir, "ipu_model") as session:
        feeds = {} if stream is None else {stream: x}
        found = [np.array(session.run(feeds)[s]) for _ in range(2) for s in outputs]
        return found + [np.array(session.get_tensor_data(v)) for v in results if v not in outputs]


def test_numbers_of_training() -> None:
    expected = run(*(lambda ir, rest: (ir, "one", *rest))(*training(5, False)))
    for overlap in (False, True):
        ir, (stream, *rest) = training(5, overlap)
        for a, b in zip(run(ir, "several", stream, *rest), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_steps_are_in_the_order_1f1b() -> None:
    """The first of three IPUs begins three iterations before it gets the first gradient."""
    ir, (stream, *_) = training(5, True)
    ir.options.placement = "several"
    x = np.zeros((5, *SHAPE), np.float32)
    with popxl.Session(ir, "ipu_model") as session:
        session.run({stream: x})
        with session.recording() as timeline:
            session.run({stream: x})
    first = next(s.device for s in timeline.spans if "HostLoad" in s.name)
    names = [s.name for s in timeline.spans if s.device == first]
    order = "".join("F" if "HostLoad" in name else "B" if "Grad" in name else "" for name in names)
    assert order == "FFF" + "BF" * 2 + "BBB"


@pytest.mark.parametrize("micro_batches", [1, 4, 1000])
def test_estimated_time(micro_batches: int) -> None:
    """Each of three stages takes a second forward, and one backward: devices wait for the first and the last ones."""
    ir, _ = training(micro_batches, True)
    ir.options.placement = "several"
    plan = popxl.Session(ir, "ipu_model").program.executable
    kinds = {segment.structure: {op.kind.name for op in segment.ops} for segment in plan.segments}

    def seconds(structure: Any) -> float:
        return float("Tanh" in kinds[structure]) + float("TanhGrad" in kinds[structure])

    timing = timing_of(plan, seconds, lambda nbytes: 0.0, {}, 1)
    assert timing.seconds == 2 * (micro_batches + IPUS - 1)
    assert dict(timing.busy) == dict.fromkeys(range(IPUS), 2 * micro_batches)
    assert timing.copies == 2 * (IPUS - 1) * micro_batches


def random_loop(seed: int, overlap: bool) -> tuple[popxl.Ir, list[Any]]:
    """A loop whose body computes on random IPUs: with streams, tensors that it overwrites, carried ones, and calls."""
    rng = np.random.default_rng(seed)
    ir, turns = popxl.Ir(), int(rng.integers(2, 6))
    loads = bool(rng.integers(2))
    ir.num_host_transfers = turns
    with ir.main_graph, popxl.in_sequence():
        stream, out = popxl.h2d_stream(SHAPE, popxl.float32, "x"), popxl.d2h_stream(SHAPE, popxl.float32, "out")
        changing = [popxl.variable(rng.normal(size=SHAPE), popxl.float32, f"v{k}") for k in range(3)]
        carried = [popxl.variable(rng.normal(size=SHAPE), popxl.float32, f"c{k}") for k in range(2)]

        def compute(known: list[popxl.Tensor], by_ref: list[popxl.Tensor], depth: int, count: int) -> None:
            for _ in range(count):
                ipu = int(rng.integers(IPUS))
                a, b = (known[int(i)] for i in rng.integers(len(known), size=2))
                with popxl.ipu(ipu):
                    kind = int(rng.integers(5))
                    a, b = (ops.ipu_copy(t, ipu) if t.location[0] not in (ipu, None) else t for t in (a, b))
                    if kind == 0 and by_ref:
                        t = by_ref[int(rng.integers(len(by_ref)))]
                        there = ipu if t.location[0] is None else t.location[0]
                        with popxl.ipu(there):
                            ops.add_(t, ops.tanh(ops.ipu_copy(ops.negate(a), there, ipu)))
                    elif kind == 1 and depth:
                        graph = ir.create_empty_graph("inner")
                        with graph, popxl.in_sequence():
                            given = [graph.add_input_like(t) for t in (a, b)]
                            own = [graph.add_input_like(t, by_ref=True) for t in by_ref[:2]]
                            inner = [*given]
                            compute(inner, own, depth - 1, 4)
                            popxl.graph_output(inner[-1])
                            popxl.graph_output(given[0])
                        known += ops.call(graph, a, b, *by_ref[:2])
                    else:
                        known.append(ops.tanh(a) + b * 0.5)

        body = ir.create_empty_graph("body")
        with body, popxl.in_sequence():
            own_carried = [body.add_input_like(t) for t in carried]
            by_ref = [body.add_input_like(t, by_ref=True) for t in changing]
            known = [*own_carried]
            compute(known, by_ref, 2, 4)
            if loads:
                with popxl.ipu(int(rng.integers(IPUS))):
                    known.append(ops.host_load(stream))
            compute(known, by_ref, 2, 8)
            t = known[-1]
            with popxl.ipu(t.location[0] or 0):
                ops.host_store(out, ops.tanh(t))
            for k in rng.permutation(len(own_carried)):
                t = known[-1 - int(k)] if rng.integers(2) else own_carried[int(k)]
                popxl.graph_output(t)
        results = ops.repeat(body, turns, *carried, *changing, overlap=overlap)
        for v, t in zip(carried, results, strict=True):
            with popxl.ipu(0):
                ops.var_updates.copy_var_update_(v, t)
    return ir, [stream if loads else None, out, *changing, *carried]


@pytest.mark.filterwarnings("ignore::popxl.errors.CrossingUpdateWarning")
@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(s, marks=pytest.mark.thorough) for s in range(6, 60))])
def test_random_loops(seed: int) -> None:
    ir, (stream, *rest) = random_loop(seed, False)
    expected = run(ir, "one", stream, *rest)
    ir, (stream, *rest) = random_loop(seed, True)
    for a, b in zip(run(ir, "several", stream, *rest), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def an_input_that_is_returned_and_overwritten(x: popxl.Tensor, total: popxl.Tensor) -> popxl.Tensor:
    """The caller overwrites what a call returns before the call has read it, with a lag."""
    inner = popxl.gir().create_empty_graph("inner")
    with inner, popxl.in_sequence():
        y, t = inner.add_input_like(x), inner.add_input_like(total, by_ref=True)
        with popxl.ipu(1):
            far = ops.tanh(ops.ipu_copy(y, 1, 0))
        with popxl.ipu(0):
            ops.add_(t, ops.tanh(ops.ipu_copy(far, 0, 1)) + y)
        popxl.graph_output(y)
    with popxl.ipu(0):
        doubled = x * 2.0
        (result,) = ops.call(inner, doubled, total)
        ops.add_(result, popxl.constant(1.0))
    return result


def a_conditional_in_a_call(x: popxl.Tensor, total: popxl.Tensor) -> popxl.Tensor:
    """A branch that is not taken does not read its operand."""

    def branch(factor: float) -> Any:
        def compute(t: popxl.Tensor) -> popxl.Tensor:
            with popxl.ipu(1):
                far = ops.tanh(ops.ipu_copy(t, 1, 0))
            with popxl.ipu(0):
                return ops.ipu_copy(far, 0, 1) * factor

        return compute

    ir = popxl.gir()
    branches = [ir.create_graph(branch(factor), x) for factor in (1.0, 2.0)]
    inner = ir.create_empty_graph("inner")
    with inner, popxl.in_sequence(), popxl.ipu(0):
        a, b = inner.add_input_like(x), inner.add_input_like(x)
        condition = ops.cast(popxl.constant(1, popxl.int32) + 0, popxl.bool)
        popxl.graph_output(*ops.conditional(condition, *branches, [a], [b]))
    with popxl.ipu(0):
        result, following = ops.call(inner, x, x * 2.0)[0], ops.tanh(x)
    with popxl.ipu(1):
        far = ops.tanh(ops.ipu_copy(result, 1, 0))
    with popxl.ipu(0):
        ops.add_(total, ops.ipu_copy(far, 0, 1))
    return following


def an_input_that_is_returned_and_read_late(x: popxl.Tensor, total: popxl.Tensor) -> popxl.Tensor:
    """The caller overwrites what a call has changed on another IPU before the call has read it, with a lag."""
    inner = popxl.gir().create_empty_graph("inner")
    with inner, popxl.in_sequence():
        y, t = inner.add_input_like(x), inner.add_input_like(total, by_ref=True)
        with popxl.ipu(1):
            ops.add_(t, ops.tanh(ops.ipu_copy(y, 1, 0)))
            near = ops.tanh(t)
        with popxl.ipu(0):
            far = ops.tanh(ops.ipu_copy(near, 0, 1))
        with popxl.ipu(1):
            late = ops.ipu_copy(far, 1, 0) + t
        with popxl.ipu(0):
            popxl.graph_output(ops.tanh(ops.ipu_copy(late, 0, 1)))
    with popxl.ipu(0):
        ops.add_(total, ops.tanh(x))
        following = x * 0.5
    (late,) = ops.call(inner, x, total)
    with popxl.ipu(1):
        ops.add_(total, popxl.constant(1.0))
    with popxl.ipu(0):
        ops.host_store(popxl.d2h_stream(SHAPE, popxl.float32, "late"), late)
    return following


@pytest.mark.filterwarnings("ignore::popxl.errors.CrossingUpdateWarning")
@pytest.mark.parametrize(
    "body_of",
    [an_input_that_is_returned_and_overwritten, an_input_that_is_returned_and_read_late, a_conditional_in_a_call],
)
def test_calls_in_loops(body_of: Any) -> None:
    found = []
    for placement, overlap in (("one", False), ("several", True)):
        ir = popxl.Ir()
        ir.num_host_transfers = 5
        with ir.main_graph, popxl.in_sequence():
            x = popxl.variable(np.full(SHAPE, 0.3), popxl.float32, "x")
            total = popxl.variable(np.zeros(SHAPE), popxl.float32, "total")
            body = ir.create_empty_graph("body")
            with body, popxl.in_sequence():
                own = body.add_input_like(x), body.add_input_like(total, by_ref=True)
                popxl.graph_output(body_of(*own))
            (result,) = ops.repeat(body, 5, x, total, overlap=overlap)
            ops.var_updates.copy_var_update_(x, result)
        found.append(run(ir, placement, None, *ir.get_all_d2h_streams(), x, total))
        if overlap:
            steps = popxl.Session(ir, "ipu_model").program.plan.steps  # type: ignore[union-attr]
            assert any(getattr(step, "overlapped", None) for step in steps.steps)
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_lags() -> None:
    """An action on the same IPU, or the first one on another, follows at once; a return comes one round later."""
    chain = [Use(["x"], ["a"], ipu=0), Use(["a"], ["b"], ipu=0), Use(["b"], ["c"], ipu=1), Use(["c"], ["d"], ipu=0)]
    assert lags_of(chain, {}) == [0, 0, 0, 1]
    assert lags_of(chain, {"x": "d"}) == [0, 0, 0, 0]  # the next iteration begins with the end of this one
    counted = [*chain, Use(["n"], ["n"], ipu=0), Use(["d"], ["sum"], ipu=0)]
    assert lags_of(counted, {"n": "n", "sum": "sum"}) == [0, 0, 0, 1, 0, 1]
    used_twice = [Use(["x"], ["a", "n"], ipu=0), Use(["a"], ["b"], ipu=1), Use(["b"], ["n"], ipu=0)]
    assert lags_of(used_twice, {"n": "n"}) == [0, 0, 0]
    in_order = [Use([], ["a"], ipu=0, in_order=["s"]), *chain[2:3], Use(["c"], [], ipu=0, in_order=["s"])]
    in_order[1] = Use(["a"], ["c"], ipu=1)
    assert lags_of(in_order, {}) == [0, 0, 0]
    assert lags_of([], {}) == []


def test_bad_input() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.variable(0.0, popxl.float32)
        graph = ir.create_graph(lambda x: x + 1.0, x)
        with pytest.raises(TypeError, match="repeat: `overlap` is 'yes'"):
            ops.repeat(graph, 2, x, overlap="yes")  # type: ignore[arg-type]
        (site,) = [ops.repeat_with_info(graph, 2, x, overlap=True)]
        with pytest.raises(PopxlError, match="`overlap` is 1; expected a bool"):
            site.op.kind.record(*site.op.inputs, results=["y"], **{**site.op.attributes, "overlap": 1})
