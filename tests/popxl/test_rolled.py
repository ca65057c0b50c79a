"""Calls that differ only in what they are given, as turns of a loop: which are, and that nothing else can tell."""

# No deferred annotations in this file: `TensorByRef` is read from them.
import re
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import popart
import popxl
from popxl import ops
from popxl.transforms import autodiff
from runtime.cpu.update_order import LARGE_IN_LOOP
from runtime.plan.decision import ROLLED, Decision, decide
from runtime.targets.replicas import Replicas

pytestmark = pytest.mark.compiled_whole  # what XLA makes of programs is what is tested

TURNS = 4
X = np.random.default_rng(1).normal(size=(2, 3)).astype(np.float32)
SPEC = popxl.TensorSpec((2, 3), popxl.float32)
SPEC_OF_WEIGHTS = popxl.TensorSpec((3, 3), popxl.float32)

Build = Callable[[popxl.Tensor], Sequence[popxl.Tensor]]


@pytest.fixture(autouse=True)
def no_room_is_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """What turns fill holds anything before, as on accelerators. On CPUs, `jax.lax.empty` is zeros."""

    def filled(shape: Sequence[int], dtype: Any) -> jax.Array:
        return jnp.full(shape, jnp.nan if jnp.issubdtype(dtype, jnp.inexact) else -1).astype(dtype)

    monkeypatch.setattr(jax.lax, "empty", filled)


class Run:
    """A program that is built, compiled and run twice.

    Args:
        build: gets what is fed, and returns what is to be stored.
        way: how called graphs are compiled.
        transfers: how often it loads and stores in a run.
        replicas: how many run it.
        several: whether each has a device of its own.
    """

    def __init__(self, build: Build, way: Any, transfers: int = 1, replicas: int = 1, several: bool = True) -> None:
        ir = popxl.Ir(replicas)
        ir.num_host_transfers = transfers
        ir.options.calledGraphs = way
        with ir.main_graph, popxl.in_sequence():
            self.stream = popxl.h2d_stream(SPEC.shape, SPEC.dtype, "x")
            results = build(ops.host_load(self.stream)) if transfers == 1 else build(self.stream)  # type: ignore[arg-type]
            stored = [popxl.d2h_stream(t.shape, t.dtype, f"out{i}") for i, t in enumerate(results)]
            for stream, t in zip(stored, results, strict=True):
                ops.host_store(stream, t)
        self.session = popxl.Session(ir, "ipu_model" if several else popart.DeviceManager().createIpuModelDevice())
        leading = tuple(n for n in (transfers, replicas) if n > 1)
        with self.session as session:
            feed = {self.stream: np.broadcast_to(X, (*leading, *X.shape))}
            runs = [session.run(feed) for _ in range(2)]
            self.stored = [np.asarray(run[stream]) for run in runs for stream in run]
            variables = session.get_tensors_data(ir.main_graph.variables)
        self.variables = {v.name: np.array(data) for v, data in variables.items()}


def rolled(build: Build, turns: Sequence[int], way: str = "rolled", **how: Any) -> Run:
    """A program, checked: it has loops of so many turns, and gives what it gives with all calls written out."""
    run, plain = Run(build, way, **how), Run(build, "inlined", **how)
    assert sorted(loop.iterations for loop in run.session.report.loops) == sorted(turns)
    for ours, theirs in zip(run.stored, plain.stored, strict=True):
        np.testing.assert_allclose(ours, theirs, 1e-5, 1e-6)
    assert run.variables.keys() == plain.variables.keys()
    for name, ours in run.variables.items():
        np.testing.assert_allclose(ours, plain.variables[name], 1e-5, 1e-6, err_msg=name)
    return run


def weights(name: str = "w", count: int = TURNS, shape: tuple[int, ...] = (3, 3), **more: Any) -> list[popxl.Tensor]:
    random = np.random.default_rng(len(name))
    return [
        popxl.variable(random.normal(0, 0.5, shape).astype(np.float32), name=f"{name}{i}", **more) for i in range(count)
    ]


def layer(x: popxl.Tensor, w: popxl.Tensor) -> popxl.Tensor:
    return x + ops.gelu(x @ w)


def graph_of(function: Callable[..., Any], *inputs: Any) -> popxl.Graph:
    return popxl.gcg().ir.create_graph(function, *inputs)


def training(x: popxl.Tensor, ws: Sequence[popxl.Tensor], update: Callable[..., Any]) -> list[popxl.Tensor]:
    """All layers, then all their gradients, then all updates."""
    graph = graph_of(layer, x, ws[0])
    info, sites, found = autodiff(graph), [], []
    for w in ws:
        sites.append(ops.call_with_info(graph, x, w))
        x = sites[-1].outputs[0]
    dx = x
    for w, site in zip(reversed(ws), reversed(sites), strict=True):
        dx, dw = ops.call(info.graph, dx, inputs_dict=info.inputs_dict(site))
        found.append((w, dw))
    for w, dw in found:
        update(w, dw)
    return [x, dx]


def descend(w: popxl.Tensor, dw: popxl.Tensor) -> None:
    ops.scaled_add_(w, dw, b=-0.1)


# What is rolled -----------------------------------------------------------------------------------------------------


def test_gradients_and_their_updates_share_a_turn() -> None:
    run = rolled(lambda x: training(x, weights(), descend), [TURNS, TURNS])
    forward, backward = run.session.report.loops
    assert (forward.ops, backward.ops) == (1, 2)
    text = run.session.program.executable.as_text()
    assert text.count(" while(") == 2
    assert "Loops of calls" in str(run.session.report)


@pytest.mark.parametrize("of_moments", [list, reversed], ids=["forward", "backward"])
def test_updates_of_all_turns_at_once(of_moments: Callable[..., Any]) -> None:
    """They are no loop for XLA, in whichever order variables are made. Gradients lie in the order of their turns."""

    def build(x: popxl.Tensor) -> list[popxl.Tensor]:
        ws = weights()
        moments = dict(zip(of_moments(ws), weights("moment"), strict=True))

        def update(w: popxl.Tensor, dw: popxl.Tensor) -> None:
            ops.var_updates.accumulate_moving_average_(moments[w], dw, 0.9)
            ops.scaled_add_(w, moments[w], b=-0.1)

        return training(x, ws, update)

    run = rolled(build, [TURNS] * 3, "batched")
    assert [loop.ops for loop in run.session.report.loops] == [1, 1, 2]
    text = run.session.program.executable.as_text()
    assert text.count(" while(") == 2


def test_calls_without_products_at_once() -> None:
    """Of a row each, of the same in all turns, and of what calls Python."""

    def build(x: popxl.Tensor) -> list[popxl.Tensor]:
        graph = graph_of(lambda a, b: ops.tanh(a) * ops.exp(b), SPEC, SPEC)
        rows = weights(shape=SPEC.shape)
        of_rows = [ops.call(graph, x, row)[0] for row in rows]
        alike = graph_of(lambda a: ops.sin(a) + a, SPEC)
        same = [ops.call(alike, x)[0] for _ in rows]
        called = popxl.from_jax(lambda a: jax.pure_callback(np.sin, a, a))  # which has no form for several rows
        by_host = graph_of(lambda a: called(a) + ops.cos(a), SPEC)
        of_host = [ops.call(by_host, row)[0] for row in rows]
        return [ops.add_n(*of_rows), of_rows[2], *same, *of_host]

    rolled(build, [TURNS] * 3)


def test_updates_of_some_rows_at_once() -> None:
    """A variable of each layer is in no loop, and narrow ones that lie in one array have other updates."""

    def build(x: popxl.Tensor) -> list[popxl.Tensor]:
        first, *ws = weights(count=TURNS + 1)
        biases, scales = weights("bias", shape=(3,)), weights("scale", shape=(3,))
        spec = popxl.TensorSpec((3,), popxl.float32)
        graph = graph_of(lambda x, w, b, scale: layer(x, w) * scale + b, SPEC, ws[0], spec, spec)
        info, sites, found = autodiff(graph), [], []
        x, *_ = ops.call(graph, x, first, biases[2], scales[1])
        for w, b, scale in zip(ws, biases, scales, strict=True):
            sites.append(ops.call_with_info(graph, x, w, b, scale))
            x = sites[-1].outputs[0]
        dx = x
        for each in zip(reversed(ws), reversed(biases), reversed(scales), reversed(sites), strict=True):
            dx, *gradients = ops.call(info.graph, dx, inputs_dict=info.inputs_dict(each[-1]))
            found.append((each[:3], gradients))
        for (w, b, scale), (dw, db, dscale) in found:
            descend(w, dw)
            ops.scaled_add_(b, db, b=0.1)
            descend(scale, dscale)
        descend(first, found[0][1][0])
        return [x, dx]

    run = rolled(build, [TURNS + 1, TURNS, TURNS], "batched")
    assert run.session.report.loops[-1].ops == 3


def test_weights_in_another_dtype_are_made_in_the_turns() -> None:
    """The program casts all of them at first, as mixed precision does, and gradients at the end."""

    def build(x: popxl.Tensor) -> list[popxl.Tensor]:
        masters = weights()
        halves = [ops.cast(w, popxl.float16) for w in masters]
        found = {w: half for w, half in zip(halves, masters, strict=True)}

        def update(half: popxl.Tensor, dw: popxl.Tensor) -> None:
            descend(found[half], ops.cast(dw, popxl.float32))

        half_spec = popxl.TensorSpec(SPEC.shape, popxl.float16)
        graph = graph_of(layer, half_spec, halves[0])
        info, sites, gradients = autodiff(graph), [], []
        y = ops.cast(x, popxl.float16)
        for w in halves:
            sites.append(ops.call_with_info(graph, y, w))
            y = sites[-1].outputs[0]
        dy = y
        for w, site in zip(reversed(halves), reversed(sites), strict=True):
            dy, dw = ops.call(info.graph, dy, inputs_dict=info.inputs_dict(site))
            gradients.append((w, dw))
        for w, dw in gradients:
            update(w, dw)
        return [ops.cast(dy, popxl.float32)]

    forward, backward = rolled(build, [TURNS, TURNS]).session.report.loops
    assert (forward.ops, backward.ops) == (2, 4)  # a cast and a call; a cast, a call, a cast and an update


def test_what_all_turns_share_is_made_once() -> None:
    """A mask is made like others, which come in no turn."""

    def build(x: popxl.Tensor) -> list[popxl.Tensor]:
        scales = [ops.exp(popxl.variable(np.float32(n) * X, name=f"scale{n}")) for n in range(3)]
        graph = graph_of(lambda x, w, scale: layer(x, w) * scale, SPEC, SPEC_OF_WEIGHTS, SPEC)
        for w in weights():
            (x,) = ops.call(graph, x, w, scales[1])
        return [x, scales[0] + scales[2]]

    (loop,) = rolled(build, [TURNS]).session.report.loops
    assert loop.ops == 1


def test_what_a_turn_is_given() -> None:
    """The same in all turns, from the turn before, a variable of its own, a constant of its own, a view of a variable;
    turns that share a variable; and an op between two calls."""

    def build(x: popxl.Tensor) -> list[popxl.Tensor]:
        (shared,) = weights("shared", 1)
        pairs, own = weights("pair", 2), weights("own", shape=(9,))
        first = x

        def one(x: popxl.Tensor, first: popxl.Tensor, w: popxl.Tensor, v: popxl.Tensor) -> popxl.Tensor:
            return ops.gelu(x @ w) + first @ v

        def other(x: popxl.Tensor, w: popxl.Tensor, scale: popxl.Tensor) -> popxl.Tensor:
            return ops.tanh(x @ w) * scale

        mixing, scaling = graph_of(one, x, x, shared, shared), graph_of(other, x, shared, popxl.constant(1.0))
        for i in range(TURNS):
            (x,) = ops.call(mixing, x, first, shared, pairs[i // 2])
            x = x + 1
            (x,) = ops.call(scaling, x, ops.reshape_(own[i], (3, 3)), popxl.constant(i / 2, popxl.float32))
        return [x]

    run = rolled(build, [TURNS])
    assert run.session.report.loops[0].ops == 3


def test_the_first_and_the_last_layer_are_special() -> None:
    """Each is another graph; and a weight is changed between two turns, which may as well be done after all."""

    def build(x: popxl.Tensor) -> list[popxl.Tensor]:
        ws = weights(count=TURNS + 2)
        graph, last = graph_of(layer, x, ws[0]), graph_of(lambda x, w: x @ w, x, ws[0])
        (x,) = ops.call(graph_of(lambda x, w: ops.tanh(x @ w), x, ws[0]), x, ws[0])
        for w in ws[1:-1]:
            (x,) = ops.call(graph, x, w)
            if w is ws[2]:
                ops.scaled_add_(w, ws[0])
        return [*ops.call(last, x, ws[-1]), x]

    run = rolled(build, [TURNS])
    assert not run.session.report.written_out


def test_what_the_first_turn_makes_for_all() -> None:
    """It uses twice what the others use once, so it is no turn like them."""

    def build(x: popxl.Tensor) -> list[popxl.Tensor]:
        ws = weights(count=TURNS + 1)
        making, adding = (
            graph_of(lambda w: ops.tanh(w), ws[0]),
            graph_of(lambda x, a, b: x @ a + x @ b, x, ws[0], ws[0]),
        )
        (first,) = ops.call(making, ws[0])
        (x,) = ops.call(adding, x, first, first)
        for w in ws[1:]:
            (own,) = ops.call(making, w)
            (x,) = ops.call(adding, x, own, first)
        return [x]

    rolled(build, [TURNS])


def test_narrow_rows_of_a_turn_lie_side_by_side() -> None:
    """Biases and scales of a layer are cut out at once, and so are their means; its wide weights are not. A program
    that only reads them has them in the same order, whatever it does first."""
    names = ("bias", "scale", "up", "down")

    def variables() -> list[list[popxl.Tensor]]:
        return [weights(name, shape=(3, 6000) if name in ("up", "down") else (3,)) for name in names]

    def layer(
        x: popxl.Tensor, bias: popxl.Tensor, scale: popxl.Tensor, up: popxl.Tensor, down: popxl.Tensor
    ) -> popxl.Tensor:
        x = ops.tanh(x + bias) * scale
        return x + ops.tanh(x @ up) @ ops.transpose(down) * 1e-3

    def build(x: popxl.Tensor) -> list[popxl.Tensor]:
        layers = list(zip(*variables(), strict=True))
        graph = graph_of(layer, x, *layers[0])
        info, sites = autodiff(graph), []
        for ts in layers:
            sites.append(ops.call_with_info(graph, x, *ts))
            x = sites[-1].outputs[0]
        dx = x
        for ts, site in zip(reversed(layers), reversed(sites), strict=True):
            dx, *gradients = ops.call(info.graph, dx, inputs_dict=info.inputs_dict(site))
            for t, gradient in zip(ts, gradients, strict=True):
                mean = popxl.variable(np.zeros(t.shape, np.float32), name=f"mean_{t.name}")
                ops.var_updates.accumulate_moving_average_(mean, gradient, 0.9)
                descend(t, mean)
        return [dx]

    def read(x: popxl.Tensor) -> list[popxl.Tensor]:
        bias, scale, *_ = variables()
        graph = graph_of(lambda x, scale, bias: ops.tanh(x * scale + bias), x, scale[0], bias[0])
        for ts in zip(scale, bias, strict=True):
            (x,) = ops.call(graph, x, *ts)
        return [x]

    trained, reading = rolled(build, [TURNS, TURNS]), Run(read, "rolled")
    written = re.findall(
        r"dynamic_update_slice .*: \(tensor<(\w+)xf32>, tensor<(\w+)xf32>", trained.session.program.text()
    )
    assert Counter(written)["8x3", "2x3"] == 2
    assert Counter(written)["4x3x6000", "1x3x6000"] == 4
    theirs = {v.name: v for v in trained.session.ir.main_graph.variables}
    reading.session.use_variables_of(
        trained.session,
        {v: theirs[v.name] for v in reading.session.ir.main_graph.variables if v.name[:4] in ("bias", "scal")},
    )


@pytest.mark.thorough(but_each=2)
@pytest.mark.parametrize("rows", [(2,), (6, 10)])
def test_stacks_of_narrow_weights_are_not_copied(rows: tuple[int, ...]) -> None:
    """Each row is small, and the stack is not; the gradient that a weight gives has another or as many numbers."""
    width = 60
    count = LARGE_IN_LOOP // width**2 + 1

    def build(x: popxl.Tensor) -> Sequence[popxl.Tensor]:
        ws = weights(count=count, shape=(width, width))
        h = popxl.constant(np.resize(X, (*rows, width)), popxl.float32) + ops.mean(x)
        graph = h.ir.create_graph(layer, h, ws[0])
        backward = autodiff(graph)
        sites = []
        for w in ws:
            sites.append(ops.call_with_info(graph, h, w))
            h = sites[-1].outputs[0]
        h = ops.tanh(h)
        for w, site in zip(reversed(ws), reversed(sites), strict=True):
            h, g = ops.call(backward.graph, h, inputs_dict=backward.inputs_dict(site))
            ops.scaled_add_(w, g, b=-1e-6)
        return [h]

    run = rolled(build, [count, count])
    text = run.session.program.executable.as_text()
    assert f"f32[{count},{width},{width}]" in text
    assert not re.search(rf"f32\[{count},{width},{width}\]\S* copy\(", text)


def test_some_layers_are_updated() -> None:
    """Their gradients are loops without updates, and what is updated lies between what is not."""

    def build(x: popxl.Tensor) -> list[popxl.Tensor]:
        ws = weights(count=6)
        return training(x, ws, lambda w, dw: descend(w, dw) if w in ws[3:] else None)

    rolled(build, [6, 3, 3])


def test_calls_in_calls() -> None:
    """The model is a graph, and its gradient: weights, and what is kept for the gradient, go through them."""

    def build(x: popxl.Tensor) -> list[popxl.Tensor]:
        ws = weights()
        graph = graph_of(layer, SPEC, ws[0])

        def model(x: popxl.Tensor, *ws: popxl.Tensor) -> popxl.Tensor:
            x = x * 2
            for w in ws:
                (x,) = ops.call(graph, x, w)
            return x

        whole = graph_of(model, SPEC, *ws)
        info = autodiff(whole)
        site = ops.call_with_info(whole, x, *ws)
        dx, *dws = ops.call(info.graph, site.outputs[0], inputs_dict=info.inputs_dict(site))
        for w, dw in zip(ws, dws, strict=True):
            descend(w, dw)
        return [dx]

    rolled(build, [TURNS, TURNS])


def test_in_a_loop_with_accumulation() -> None:
    """Each turn of the loop around loads a batch. Weights and accumulators go in as they lie."""

    def build(stream: popxl.HostToDeviceStream) -> list[popxl.Tensor]:
        ws, sums = weights(), weights("sum")

        def batch(*ts: popxl.TensorByRef) -> None:
            of_weight = dict(zip(ts[:TURNS], ts[TURNS:], strict=True))
            training(ops.host_load(stream), ts[:TURNS], lambda w, dw: ops.var_updates.accumulate_(of_weight[w], dw))

        ops.repeat(graph_of(batch, *ws, *sums), 3, *ws, *sums)
        for w, total in zip(ws, sums, strict=True):
            descend(w, total)
            ops.var_updates.accumulator_zero_(total)
        return []

    run = rolled(build, [TURNS, TURNS], transfers=3)
    assert "concatenate" not in run.session.program.executable.as_text()


def test_accumulators_that_start_as_zeros() -> None:
    """They are in no variables, and too large to be copied for a loop: all of them are one array from the start."""
    width = 40

    def build(x: popxl.Tensor) -> list[popxl.Tensor]:
        ws = weights(shape=(width, width))
        wide = popxl.variable(np.linspace(-1, 1, 2 * width, dtype=np.float32).reshape(2, width), name="wide")
        sums = [ops.init(w.shape, w.dtype, f"sum{i}", "zero") for i, w in enumerate(ws)]

        def batch(x: popxl.TensorByRef, *ts: popxl.TensorByRef) -> None:
            of_weight = dict(zip(ts[:TURNS], ts[TURNS:], strict=True))
            training(x, ts[:TURNS], lambda w, dw: ops.var_updates.accumulate_(of_weight[w], dw))
            ops.scaled_add_(x, ops.tanh(x), b=0.5)

        ops.repeat(graph_of(batch, wide, *ws, *sums), 3, wide, *ws, *sums)
        for w, total in zip(ws, sums, strict=True):
            descend(w, total)
        return sums[:1]

    rolled(build, [TURNS, TURNS])


def test_remote_buffers() -> None:
    """Phased execution: each turn loads its weights, and stores them after the update."""

    def build(x: popxl.Tensor) -> list[popxl.Tensor]:
        buffer = popxl.remote_buffer((3, 3), popxl.float32, TURNS)
        random = np.random.default_rng(0)
        for i in range(TURNS):
            popxl.remote_variable(random.normal(size=(3, 3)).astype(np.float32), buffer, i, name=f"remote{i}")

        def step(w: popxl.TensorByRef, x: popxl.Tensor) -> popxl.Tensor:
            x = layer(x, w)
            ops.scaled_add_(w, ops.transpose(x) @ x, b=-0.1)
            return x

        graph = graph_of(step, popxl.TensorSpec((3, 3), popxl.float32), x)
        for i in range(TURNS):
            w = ops.remote_load(buffer, i)
            (x,) = ops.call(graph, w, x)
            ops.remote_store(buffer, i, w)
        return [x]

    run = rolled(build, [TURNS])
    assert run.session.report.loops[0].ops == 4  # one makes room


def training_off_chip(x: popxl.Tensor, load: Callable[[popxl.RemoteBuffer, int], popxl.Tensor]) -> list[popxl.Tensor]:
    """All gradients come first, and updates in the order of the layers."""
    buffer = popxl.remote_buffer((3, 3), popxl.float32, 2 * TURNS)
    for i, value in enumerate(np.random.default_rng(0).normal(0, 0.5, (2 * TURNS, 3, 3))):
        popxl.remote_variable(value.astype(np.float32), buffer, i, name=f"remote{i}")
    ws = [load(buffer, i) for i in range(TURNS)]
    gradients: list[popxl.Tensor] = []
    results = training(x, ws, lambda w, dw: gradients.append(dw))
    for i, dw in enumerate(reversed(gradients)):
        w, momentum = (ops.remote_load(buffer, slot) for slot in (i, TURNS + i))
        ops.scaled_add_(momentum, dw, a=0.9)
        ops.scaled_add_(w, momentum, b=-0.1)
        for slot, t in ((i, w), (TURNS + i, momentum)):
            ops.remote_store(buffer, slot, t)
    return results


@pytest.mark.parametrize("waits", [False, True])
def test_slots_are_updated_in_the_turns_of_their_gradients(waits: bool) -> None:
    """Each slot waits for its own gradient only, even if the first loads wait for another tensor."""

    def build(x: popxl.Tensor) -> list[popxl.Tensor]:
        def load(buffer: popxl.RemoteBuffer, i: int) -> popxl.Tensor:
            slot = popxl.constant(i, popxl.uint32, "slot")
            return ops.remote_load(buffer, ops.available_after(slot, x) if waits else slot)

        return training_off_chip(x, load)

    forward, backward = rolled(build, [TURNS, TURNS]).session.report.loops
    assert (forward.ops, backward.ops) == (1, 9)  # loads ahead of the first call stay there; two ops make room


def test_streams_branches_and_loops_in_turns() -> None:
    def build(stream: popxl.HostToDeviceStream) -> list[popxl.Tensor]:
        ws, x = weights(), ops.host_load(stream)
        then, other = graph_of(layer, SPEC, ws[0]), graph_of(lambda x, w: x @ w, SPEC, ws[0])

        def turn(x: popxl.Tensor, w: popxl.Tensor) -> popxl.Tensor:
            (x,) = ops.conditional(ops.greater(ops.sum(x), popxl.constant(0.0)), then, other, [x, w], [x, w])
            (x,) = ops.repeat(other, 2, x, w)
            return ops.tanh(x)

        graph = graph_of(turn, SPEC, ws[0])
        out = popxl.d2h_stream(SPEC.shape, SPEC.dtype, "each")
        ops.host_store(out, x)
        for w in ws:
            (x,) = ops.call(graph, x, w)
            x = x + ops.host_load(stream)
            ops.host_store(out, x)
        return []

    rolled(build, [TURNS], transfers=TURNS + 1)


# Where it runs, and what else there is to a session -----------------------------------------------------------------


@pytest.mark.thorough(but_each=2)
@pytest.mark.parametrize("several", [False, True])
def test_replicas(several: bool) -> None:
    """Variables of groups, variables that no replica changes, and gradients that are reduced in each turn."""

    def build(x: popxl.Tensor) -> list[popxl.Tensor]:
        ir = popxl.gcg().ir
        ws, fixed = weights(), weights("fixed")
        own = weights("own", shape=(2, 3), replica_grouping=ir.replica_grouping(group_size=1))

        def update(w: popxl.Tensor, dw: popxl.Tensor) -> None:
            descend(w, ops.collectives.replicated_all_reduce(dw, "mean"))

        x, dx = training(x, ws, update)
        reading = graph_of(lambda x, w: ops.tanh(x @ w), x, fixed[0])
        for w in fixed:
            (x,) = ops.call(reading, x, w)
        shift = graph_of(lambda x, b: ops.tanh(x + ops.sum(b)), x, popxl.TensorSpec((3,), popxl.float32))
        for b in own:
            (x,) = ops.call(shift, x, b)
        return [x, dx]

    rolled(build, [TURNS] * 4, replicas=2, several=several)


def test_sharded_variables() -> None:
    """Each replica has a piece of each variable; of a size that cannot be shared out evenly."""

    def build(x: popxl.Tensor) -> list[popxl.Tensor]:
        random = np.random.default_rng(0)
        pieces = [
            popxl.replica_sharded_variable(random.normal(size=(3,)).astype(np.float32), name=f"b{i}")[1]
            for i in range(TURNS)
        ]

        def step(x: popxl.Tensor, piece: popxl.TensorByRef) -> popxl.Tensor:
            whole = ops.collectives.replicated_all_gather(piece)
            ops.scaled_add_(piece, piece, b=-0.5)
            return ops.tanh(x + ops.sum(whole))

        graph = graph_of(step, x, pieces[0])
        for piece in pieces:
            (x,) = ops.call(graph, x, piece)
        return [x]

    rolled(build, [TURNS], replicas=2)


def test_a_session(tmp_path: Any) -> None:
    """Variables that lie together are written, read, saved and looked at by themselves."""
    run = rolled(lambda x: training(x, weights(), descend), [TURNS, TURNS])
    ir, feed = run.session.ir, {run.stream: X}
    variables = {v.name: v for v in ir.main_graph.variables}
    with run.session as session:
        session.write_variable_data(variables["w1"], np.eye(3, dtype=np.float32))
        assert [session.get_tensor_data(variables[name])[0, 0] for name in ("w0", "w1")] == [
            run.variables["w0"][0, 0],
            1,
        ]
        session.save(tmp_path / "session")
        session.run(feed)
        after = {name: np.array(session.get_tensor_data(v)) for name, v in variables.items()}
    with popxl.Session.load(tmp_path / "session") as session:
        stream = next(iter(session.expected_inputs()))
        with session.debugging():
            session.run({stream: X})
        for v in session.ir.main_graph.variables:
            np.testing.assert_allclose(session.get_tensor_data(v), after[v.name], 1e-5, 1e-6)


# What is left alone -------------------------------------------------------------------------------------------------


def test_a_turn_that_knows_a_variable_by_two_names() -> None:
    """What the third turn overwrites it reads, too, and other turns read something else."""

    def build(x: popxl.Tensor) -> list[popxl.Tensor]:
        ws = weights()

        def change(w: popxl.TensorByRef) -> None:
            ops.scaled_add_(w, w, b=-0.5)

        changing, reading = graph_of(change, ws[0]), graph_of(lambda w: ops.sum(w), ws[0])
        found = []
        for w, other in zip(ws, (ws[1], ws[0], ws[2], ws[0]), strict=True):
            ops.call(changing, w)
            found += ops.call(reading, other)
        return found

    run = rolled(build, [])
    assert any("overwrites" in reason for reason in run.session.report.written_out.values())
    assert "Calls that are written out" in str(run.session.report)


def test_what_is_not_alike_is_told() -> None:
    """Between the calls comes something else each time."""

    def build(x: popxl.Tensor) -> list[popxl.Tensor]:
        graph = graph_of(layer, SPEC, SPEC_OF_WEIGHTS)
        for w, function in zip(weights(), (ops.tanh, ops.sin, ops.exp, ops.cos), strict=True):
            (x,) = ops.call(graph, x, w)
            x = function(x)
        return [x]

    run = rolled(build, [])
    (reason,) = run.session.report.written_out.values()
    assert reason.startswith("one call is followed by `Tanh` (test_rolled.py:")
    assert "and the next, in its place, by `Sin` (test_rolled.py:" in reason


@pytest.mark.parametrize(
    ("function", "what"),
    [
        (lambda x, i: ops.scaled_add(x, x, b=0.5 * i), "its `ScaledAdd` (test_rolled.py:) has another `b`"),
        (lambda x, i: ops.tanh(x * i), "its `Mul` (test_rolled.py:) has another constant"),
        (lambda x, i: x[:, i:], "its `Slice` (test_rolled.py:) has other shapes or data types"),
    ],
)
def test_siblings_that_differ_are_told(function: Callable[..., popxl.Tensor], what: str) -> None:
    """The first op with another attribute, constant or shape, also in a graph that is called within."""

    def build(x: popxl.Tensor) -> list[popxl.Tensor]:
        for i in range(3):
            inner = graph_of(lambda x, i=i: function(x, i), x)
            outer = graph_of(lambda x, inner=inner: ops.call(inner, x)[0] + 1, x)
            for _ in range(2):
                ops.call(outer, x)
        return [x]

    reasons = rolled(build, []).session.report.written_out
    assert [re.sub(r"py:\d+", "py:", reason).split(" than that of ")[0] for reason in reasons.values()] == [what] * 3


def test_too_few_calls_are_told() -> None:
    def build(x: popxl.Tensor) -> list[popxl.Tensor]:
        return training(x, weights(count=2), descend)

    run = rolled(build, [])
    few = "2 call(s) of it look alike, and a loop has 3 turns or more"
    assert list(run.session.report.written_out.values()) == [few] * 2


def test_values_that_lie_apart() -> None:
    """What turns take is made at once, and too large to be copied for a loop."""

    def build(x: popxl.Tensor) -> list[popxl.Tensor]:
        (w,) = weights("large", 1, (TURNS * 32, 64))
        parts = ops.split(w, TURNS)
        graph = graph_of(lambda t: ops.sum(t), parts[0])
        return [ops.call(graph, part)[0] for part in parts]

    run = rolled(build, [])
    (reason,) = run.session.report.written_out.values()
    assert "lies apart" in reason


def on_a_tpu(build: Callable[[], Sequence[popxl.Tensor]], seconds: float = 600) -> Decision:
    """How a program would be compiled that overwrites some variables, if ways may be compared for so many seconds."""
    ir = popxl.Ir()
    ir.options.compareSeconds = seconds
    with ir.main_graph, popxl.in_sequence():
        changed = build()
    target: Any = SimpleNamespace(platform="tpu", replicas=Replicas(), count=1, devices=(None,))
    return decide(ir.main_graph, ir.options, target, ir.main_graph.variables, changed, None)


@pytest.mark.parametrize(
    ("count", "seconds", "ways"),
    [
        (80, 600, ("inlined", "batched")),
        (80, 0, ("inlined",)),
        (TURNS, 600, ("inlined",)),
        (2, 600, ("inlined",)),
    ],
)
def test_where_no_calls_are_kept(count: int, seconds: float, ways: tuple[str, ...]) -> None:
    """Compilers for TPUs write kept calls out, and those for GPUs fuse nothing in them. Loops are thought of from some
    ops on, with updates of all turns at once, and compared, if there is time; else they are taken if nothing else fits.
    With updates in the turns they need the least memory."""

    def build() -> list[popxl.Tensor]:
        ws = weights(count=count)
        training(popxl.variable(X), ws, descend)
        return ws

    found = on_a_tpu(build, seconds)
    assert (found.mode, *found.compared) == ways
    loops = ["batched"] * (seconds == 0 or count == TURNS) + ["rolled"] * (count > 2)
    assert found.fallbacks == (*loops, "dispatched")
    assert (f"they are thought of from {ROLLED} on" in found.reason) == (count == TURNS)
    assert ("compareSeconds" in found.reason) == (seconds == 0)


def test_what_would_take_hours_to_compile_is_rolled(monkeypatch: pytest.MonkeyPatch) -> None:
    def build() -> list[popxl.Tensor]:
        ws = weights(count=80)
        training(popxl.variable(X), ws, descend)
        return ws

    monkeypatch.setattr("runtime.plan.decision.LONGEST", 10)
    found = on_a_tpu(build, 0)
    assert (found.mode, found.compared, found.fallbacks) == ("batched", (), ("rolled", "inlined", "dispatched"))
    assert "would take hours" in found.reason


def test_updates_alone_are_no_loop_on_accelerators() -> None:
    """Written out, each is one kernel."""

    def build() -> list[popxl.Tensor]:
        def step(w: popxl.TensorByRef) -> None:
            ops.scaled_add_(w, ops.tanh(w) * ops.exp(w), b=-0.1)

        ws = weights(count=200)
        graph = graph_of(step, ws[0])
        for w in ws:
            ops.call(graph, w)
        return ws

    found = on_a_tpu(build)
    assert found.mode == "inlined"


def test_a_number_that_is_read_late_keeps_no_update_from_its_turn() -> None:
    """A learning rate that the program looks up after all gradients."""
    rates: list[popxl.Tensor] = []

    def descend_by(w: popxl.Tensor, dw: popxl.Tensor) -> None:
        if not rates:
            table = popxl.variable([0.3, 0.1], popxl.float32, "rates")
            rates.append(ops.dynamic_slice(table, popxl.variable([1], popxl.uint32, "epoch"), [0], [1], False))
        ops.scaled_add_(w, dw, b=ops.negate(rates[0]))

    def build(x: popxl.Tensor) -> list[popxl.Tensor]:
        rates.clear()
        return training(x, weights(), descend_by)

    forward, backward = rolled(build, [TURNS, TURNS]).session.report.loops
    assert (forward.ops, backward.ops) == (1, 2)
