"""What replicas send each other: as a program says it, and as it was compiled."""

# No deferred annotations in this file: `TensorByRef` is read from them.
from typing import Any

import jax
import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.op import BetweenReplicas, OpKind
from runtime.costs.hlo import parse_hlo
from runtime.costs.work import account_of
from runtime.targets.devices import Device

C = ops.collectives
V5E, H100 = "tpu v5e:2x4", "gpu h100:8"


def device(replicas: int = 8) -> Device:
    """A CPU device for each replica."""
    if len(jax.devices("cpu")) < replicas:
        pytest.skip("JAX was started with fewer devices")
    return Device("ipu_model", tuple(jax.devices("cpu")[:replicas]))


def training(data: int, tensor: int, width: int = 16, layers: int = 2) -> popxl.Ir:
    """Two linear layers, divided along the axis "tensor", called `layers` times, and their gradients; the gradient of
    the first is reduced in pieces along "data", and gathered."""
    ir = popxl.Ir(axes={"data": data, "tensor": tensor})

    def block(x: popxl.Tensor, a: popxl.TensorByRef, b: popxl.TensorByRef) -> popxl.Tensor:
        return x + C.replicated_all_reduce(ops.tanh(x @ a) @ b, group="tensor")

    def backward(dy: popxl.Tensor, x: popxl.Tensor, a: popxl.TensorByRef, b: popxl.TensorByRef) -> popxl.Tensor:
        h = ops.tanh(x @ a)
        dh = (dy @ b.T) * (1 - h * h)
        piece = C.replicated_reduce_scatter(x.T @ dh, "mean", "data", True)
        ops.var_updates.accumulate_(a, C.replicated_all_gather(piece, 0, "data"))
        ops.var_updates.accumulate_(b, C.replicated_all_reduce(h.T @ dy, "mean", "data"))
        return dy + C.replicated_all_reduce(dh @ a.T, group="tensor")

    with ir.main_graph, popxl.in_sequence():
        x_in = popxl.h2d_stream((4, width), popxl.float32, "x")
        xs = [ops.host_load(x_in)]
        weights = []
        for i in range(layers):
            parts = (tensor,) * (tensor > 1)
            shapes = {"a": (*parts, width, 8), "b": (*parts, 8, width)}
            made = (np.full(shape, 0.1, np.float32) for shape in shapes.values())
            a, b = (
                popxl.variable(data, name=f"{name}{i}", replica_grouping="data")
                for name, data in zip(shapes, made, strict=True)
            )
            weights.append((a, b))
        forward = ir.create_graph(block, xs[0], *weights[0])
        for a, b in weights:
            xs += ops.call(forward, xs[-1], a, b)
        grad = ir.create_graph(backward, xs[0], xs[0], *weights[0])
        dy = xs[-1]
        for x, (a, b) in reversed(list(zip(xs, weights, strict=False))):
            call = ops.call_with_info(grad, dy, x, a, b)
            for t in call.inputs[2:4]:
                call.set_parent_input_modified(t)
            (dy,) = call.outputs
        ops.host_store(popxl.d2h_stream(dy.shape, dy.dtype, "dx"), dy)
    return ir


def test_a_program_says_what_it_sends() -> None:
    communication = training(2, 4).communication()
    found = [(e.kind, e.bytes, e.groups, e.turns, e.graph) for e in communication.collectives]
    rows, weights = 4 * 16 * 4, 16 * 8 * 4
    forward, backward = "training.block_subgraph(0)", "training.backward_subgraph(1)"
    assert sorted(found) == sorted(
        [
            ("all-reduce", rows, "of 4 along tensor", 2, forward),
            ("reduce-scatter", weights, "of 2 along data", 2, backward),
            ("all-gather", weights, "of 2 along data", 2, backward),
            ("all-reduce", weights, "of 2 along data", 2, backward),
            ("all-reduce", rows, "of 4 along tensor", 2, backward),
        ]
    )
    assert communication.bytes == 2 * (2 * rows + 3 * weights)
    assert communication.totals["all-reduce"] == (6, 4 * rows + 2 * weights)
    lines = {e.line.partition(":")[0] for e in communication.collectives}
    assert lines == {"test_communication.py"}
    text = str(communication)
    assert "8 replicas. Bytes are those of one" in text and "all-gather" in text


def test_what_each_reduction_takes() -> None:
    """Extremes of floats send a second array, of where NaN is; reductions that devices do not have gather."""
    ir = popxl.Ir(replication=4)
    pairs = ir.replica_grouping(stride=2, group_size=2)
    big = 3 * 4096 * 4
    with ir.main_graph:
        x = popxl.variable(np.ones((3, 5)), popxl.float16, "x")
        n = popxl.variable(np.ones(7), popxl.int32, "n")
        z = popxl.variable(np.ones(3 * 4096), popxl.float32, "z")
        for t, op in ((x, "add"), (x, "max"), (n, "max"), (n, "mul")):
            C.replicated_all_reduce(t, op, pairs)  # type: ignore[arg-type]
        C.replicated_reduce_scatter(z, "add")
        C.replicated_reduce_scatter(z, "max", pairs)
        C.replicated_all_reduce(x, "add", ir.replica_grouping(group_size=1))  # of one replica: nothing is sent
    found = [(e.kind, e.tensor, e.bytes, e.groups) for e in ir.communication().collectives]
    assert found == [
        ("all-reduce", "x", 15 * 4, "of 2, 2 apart"),  # halves are summed as float32
        *[("all-reduce", "x", 15 * 4, "of 2, 2 apart")] * 2,
        ("all-reduce", "n", 7 * 4, "of 2, 2 apart"),
        ("all-gather", "n", 2 * 7 * 4, "of 2, 2 apart"),
        ("reduce-scatter", "z", 4 * 4096 * 4, "of 4"),  # pieces of 3072 are filled up to whole blocks
        *[("all-reduce", "z", big, "of 2, 2 apart")] * 2,
    ]


def test_loops_count_as_often_as_they_turn() -> None:
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        x = popxl.variable(np.ones(3), popxl.float32, "x")
        graph = ir.create_graph(lambda x: C.replicated_all_reduce(x, "mean"), x)
        ops.repeat(graph, 5, x)
    (each,) = ir.communication().collectives
    assert (each.turns, each.bytes, each.groups) == (5, 12, "of 2")


def test_a_program_of_one_replica_sends_nothing() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        C.replicated_all_reduce(popxl.variable(1.0))
    assert ir.communication().collectives == ()
    assert "Nothing is sent." in str(ir.communication())


def test_ops_of_users_are_asked() -> None:
    """The gradient of an op that talks to others, too: whatever is built on groups."""
    spread = OpKind(
        "Spread",
        lambda t, *, group: group.combined(t, "max") - group.combined(t, "min"),
        shape=lambda t, **groups: t.spec,
        gradient={"t": lambda g, t: g},
        traits=[BetweenReplicas()],
    )
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        x = popxl.variable(np.ones(3, np.int32))
        spread(x, stride=1, group_size=2)
    assert [(e.kind, e.op, e.bytes) for e in ir.communication().collectives] == [("all-reduce", "Spread", 12)] * 2


@pytest.mark.parametrize("calls", ["kept", "dispatched"])
def test_compiled_as_the_program_says(calls: str) -> None:
    ir = training(2, 4)
    ir.options.calledGraphs = calls  # type: ignore[assignment]
    sent = popxl.Session(ir, device()).communication()
    assert sent.is_sent and not sent.differences, sent
    assert {(e.kind, e.group_size, e.compiled_bytes) for e in sent.exchanges} == {
        (kind, size, sum(e.bytes * e.turns for e in sent.program.collectives if (e.kind, e.group_size) == (kind, size)))
        for kind, size in {(e.kind, e.group_size) for e in sent.program.collectives}
    }
    assert "Nothing is sent that the program does not say." in str(sent)


def test_what_nobody_needs_may_be_left_out() -> None:
    """The second result of a graph, in one of two calls; it counts as said, and as not needed."""
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        x = ops.host_load(popxl.h2d_stream((3,), popxl.float32))
        graph = ir.create_graph(lambda x: (C.replicated_all_reduce(x), C.replicated_all_reduce(x * 2, "max")), x)
        a, _ = ops.call(graph, x)
        _, b = ops.call(graph, a)
        C.replicated_all_gather(b)
        ops.host_store(popxl.d2h_stream(b.shape, b.dtype), b)
    found = [(e.kind, e.bytes, e.turns, e.needed) for e in ir.communication().collectives]
    assert found == [
        ("all-gather", 24, 1, 0),
        ("all-reduce", 12, 2, 1),
        *[("all-reduce", 12, 2, 1)] * 2,
    ]
    for calls in ("inlined", "kept"):
        ir.options.calledGraphs = calls  # type: ignore[assignment]
        sent = popxl.Session(ir, device(2)).communication()
        assert not sent.differences, sent
        verdicts = {e.kind: e.verdict for e in sent.exchanges}
        assert verdicts["all-gather"] == "not all needed"
        if calls == "inlined":
            assert verdicts["all-reduce"] == "not all needed"


def test_what_is_exchanged_twice_may_be_once() -> None:
    """A sum, and the mean of the same; not after an update in between."""
    ir = popxl.Ir(replication=2)
    with ir.main_graph, popxl.in_sequence():
        v = popxl.variable(np.ones((3, 64)), popxl.float32, "v")
        found = [C.replicated_all_reduce(v), C.replicated_all_reduce(v, "mean"), C.replicated_all_gather(v)]
        ops.add_(v, v)
        found += [C.replicated_all_reduce(v)]
        for t in found:
            ops.host_store(popxl.d2h_stream(t.shape, t.dtype), t)
    assert [e.needed for e in ir.communication().collectives] == [1, 0, 1, 1]
    sent = popxl.Session(ir, device(2)).communication()
    assert not sent.differences and {e.kind: e.expected for e in sent.exchanges} == {"all-reduce": 3, "all-gather": 1}


def sums(added: bool) -> popxl.Ir:
    """Two sums over replicas; they are added to each other, or not."""
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        x = ops.host_load(popxl.h2d_stream((3, 64), popxl.float32))
        a, b = C.replicated_all_reduce(ops.sin(x)), C.replicated_all_reduce(ops.exp(x))
        y = a + b if added else ops.concat((a, b), 0)
        ops.host_store(popxl.d2h_stream(y.shape, y.dtype), y)
    return ir


def test_sums_that_are_added_may_be_one() -> None:
    for added in (True, False):
        ir = sums(added)
        assert [e.is_added for e in ir.communication().collectives] == [False, added]
        (exchange,) = (sent := popxl.Session(ir, device(2)).communication()).exchanges
        assert not sent.differences and exchange.needed_bytes == (1 if added else 2) * 3 * 64 * 4


def test_on_one_device_nothing_is_sent() -> None:
    sent = popxl.Session(training(2, 1), device(1)).communication()
    assert (sent.is_sent, sent.exchanges, sent.differences) == (False, (), ())
    assert "All replicas are on one device" in str(sent)


def test_a_difference_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum that the program has not asked for, of a machine that is not as it should be."""
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        x = popxl.variable(np.ones(3), popxl.float32, "x")
        y = C.replicated_all_gather(x)
        ops.host_store(popxl.d2h_stream(y.shape, y.dtype), y)
    from runtime.lowering import collectives as machine

    gathered = machine._MeshGroup.members
    monkeypatch.setattr(machine._MeshGroup, "members", lambda self, t: gathered(self, t + self.summed(t)))
    sent = popxl.Session(ir, device(2)).communication()
    assert sent.differences == (
        "all-reduce in groups of 2: the program says 0 of 0 B in all, and 1 of 12 B were compiled.",
    )
    assert "Something differs." in str(sent)


def test_a_collective_in_several_fusions_counts_once() -> None:
    """TPUs carry out some beside products, bit by bit; each bit names the whole."""
    gather = (
        "f32[8]{0} all-gather(%p), channel_id=1, replica_groups={{0,1},{2,3}}, dimensions={0}, "
        'frontend_attributes={chain_id="0"}'
    )
    module = parse_hlo(
        f"""
%first (p: f32[4]) -> f32[8] {{
  %p = f32[4]{{0}} parameter(0)
  %all-gather.1 = {gather}
  ROOT %start = f32[8]{{0}} custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}}

%second (p: f32[4]) -> f32[8] {{
  %p = f32[4]{{0}} parameter(0)
  ROOT %all-gather.2 = {gather}
}}

ENTRY %main (x: f32[4]) -> f32[8] {{
  %x = f32[4]{{0}} parameter(0)
  %a = f32[8]{{0}} fusion(%x), kind=kOutput, calls=%first
  ROOT %b = f32[8]{{0}} fusion(%x), kind=kOutput, calls=%second
}}
"""
    )
    (found,) = account_of(module).collectives
    assert (found.kind, found.bytes, found.group_size, found.runs) == ("all-gather", 32, 2, 1)


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("{{0,1},{2,3}}", 2),
        ("{}", 0),
        ("[4,2]<=[2,4]T(1,0)", 2),
        ("mesh['x'=2,'y'=4] {'y'}", 4),
        ("mesh['x'=2,'y'=3,'z'=5], device_ids=([2,15]T(1,0)) {'x','z'}", 10),
        ("mesh['z'=8] {'z':(4)2}", 2),
    ],
)
def test_how_xla_writes_which_chips_are_together(groups, size) -> None:
    """By lists; by counts; and, from JAX 0.12 on, by axes of a mesh, or parts of them."""
    (found,) = account_of(
        parse_hlo(
            f"""
ENTRY %main (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  ROOT %y = f32[8]{{0}} all-reduce(%x), channel_id=1, replica_groups={groups}, use_global_device_ids=true, to_apply=%add
}}
"""
        )
    ).collectives
    assert (found.bytes, found.group_size) == (32, size)


@pytest.mark.parametrize(
    ("started", "kind", "bytes"),
    [
        ("f32[8]{0} all-reduce-start(%x), to_apply=%add", "all-reduce", 32),
        ("((f32[8]{0}), f32[8]{0}) all-reduce-start(%x), to_apply=%add", "all-reduce", 32),
        ("(f32[8]{0}, f32[32]{0}) all-gather-start(%x), dimensions={0}", "all-gather", 128),
        ("((f32[8]{0}), f32[32]{0}) all-gather-start(%x), dimensions={0}", "all-gather", 128),
        ("((f32[8]{0}), f32[2]{0}) reduce-scatter-start(%x), dimensions={0}, to_apply=%add", "reduce-scatter", 32),
    ],
)
def test_bytes_of_what_is_only_begun(started, kind, bytes) -> None:
    """The operands may be among the results, as they always are from JAX 0.12 on."""
    text = f"""
ENTRY %main (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  %begun = {started}
  ROOT %done = f32[8]{{0}} {kind}-done(%begun)
}}
"""
    (found,) = account_of(parse_hlo(text)).collectives
    assert (found.kind, found.bytes) == (kind, bytes)


def test_what_is_sent_again_for_lack_of_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA computes something a second time, if there is no room to keep it: collectives, too."""
    sum_of = "f32[8]{0} all-reduce(%x), channel_id=1, replica_groups={{0,1}}, to_apply=%add"
    module = parse_hlo(
        f"""
ENTRY %main (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  %all-reduce.27 = {sum_of}
  ROOT %all-reduce.27.remat2 = {sum_of}
}}
"""
    )
    account = account_of(module)
    assert [each.is_repeated for each in account.collectives] == [False, True]
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        y = C.replicated_all_reduce(ops.host_load(popxl.h2d_stream((8,), popxl.float32)))
        ops.host_store(popxl.d2h_stream((8,), popxl.float32), y)
    monkeypatch.setattr("runtime.costs.communication.account_of_program", lambda program: account)
    assert popxl.Session(ir, device(2)).communication().differences == (
        "all-reduce in groups of 2: the program says 1 of 32 B in all, and 2 of 64 B were compiled; 32 B of these are "
        "sent again, as there is not enough memory to keep what has come.",
    )


def drawn(seed: int, axes: dict[str, int]) -> popxl.Ir:
    """A random program of exchanges: their kinds, groups and sizes, in and out of called graphs and loops."""
    rng = np.random.default_rng(seed)
    ir = popxl.Ir(axes=axes)
    groups: list[Any] = [*axes, tuple(axes), None]

    def step(x: popxl.Tensor) -> popxl.Tensor:
        group, op = groups[rng.integers(len(groups))], ("add", "mean", "max", "mul")[rng.integers(4)]
        which = rng.integers(4)
        if which == 0:
            return C.replicated_all_reduce(x, op, group)  # type: ignore[arg-type]
        if which == 1:
            return C.replicated_all_gather(C.replicated_reduce_scatter(x, op, group, True) * 0.5, 0, group)  # type: ignore[arg-type]
        if which == 2:
            return x * C.replicated_all_gather(ops.sum(x), 0, group).sum()
        return ops.sin(x)

    with ir.main_graph, popxl.in_sequence():
        x = ops.host_load(popxl.h2d_stream((int(rng.integers(1, 4)) * 8, int(rng.integers(1, 200))), popxl.float32))
        for _ in range(rng.integers(2, 6)):
            if rng.integers(2):
                graph = ir.create_graph(step, x)
                (x,) = ops.repeat(graph, int(rng.integers(2, 4)), x) if rng.integers(2) else ops.call(graph, x)
            else:
                x = step(x)
        ops.host_store(popxl.d2h_stream(x.shape, x.dtype), x)
    return ir


@pytest.mark.thorough(but_each=25)
@pytest.mark.parametrize("seed", range(50))
def test_random_programs(seed: int) -> None:
    sent = popxl.Session(drawn(seed, {"data": 2, "tensor": 2, "expert": 2}), device()).communication()
    assert not sent.differences, sent


# For machines that are not here --------------------------------------------------------------------------------------


@pytest.mark.targets
@pytest.mark.parametrize("description", [V5E, H100])
def test_targets_send_what_the_program_says(description: str) -> None:
    session = popxl.Session(training(2, 4, 256), description)
    assert dict(session.program.layout.replicas.mesh.shape) == {"data": 2, "tensor": 4}
    assert not (sent := session.communication()).differences, sent
    assert sum(exchange.compiled for exchange in sent.exchanges) > 2


@pytest.mark.targets
def test_a_gpu_adds_first() -> None:
    sent = popxl.Session(sums(True), "gpu h100:2").communication()
    assert [(e.expected, e.compiled, e.verdict) for e in sent.exchanges] == [(2, 1, "added first")], sent


@pytest.mark.targets
@pytest.mark.thorough
@pytest.mark.parametrize(("description", "data"), [("tpu v5e:8x8", 8), ("tpu v5e:16x16", 32)])
def test_pods_send_what_the_program_says(description: str, data: int) -> None:
    session = popxl.Session(training(data, 8, 256), description)
    assert len(session.program.layout.devices) == 8 * data
    assert not (sent := session.communication()).differences, sent


@pytest.mark.targets
@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("description", [V5E, H100])
def test_random_programs_on_targets(description: str, seed: int) -> None:
    sent = popxl.Session(drawn(seed, {"data": 2, "tensor": 4}), description).communication()
    assert not sent.differences, sent
