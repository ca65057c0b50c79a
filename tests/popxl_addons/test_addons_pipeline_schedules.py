"""Schedules of pipelines: tables as in the papers, costs as theory says, and numbers that do not depend on them."""

import itertools
from functools import partial

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons.transforms.autodiff import autodiff_with_accumulation
from popxl_addons.transforms.pipelining import pipelined_execution
from popxl_addons.transforms.schedule import SCHEDULES, PipelineSchedule, PipelineValue
from runtime.targets.chip import Cpu

F32 = popxl.float32
IN_TURN = PipelineSchedule.one_forward_one_backward


def trained(devices, parts=1):
    """Where the stages of a training are: forward, and in reverse backward."""
    forward = [*range(devices)] * parts
    return [*forward, *reversed(forward)]


# Tables ---------------------------------------------------------------------------------------------------------------


def test_tables():
    assert str(PipelineSchedule.gpipe([0, 1, 1, 0], 3)) == (
        "0 | 0:0 0:1 0:2  .   .  3:0 3:1 3:2\n1 |  .  1:0 1:1 1:2 2:0 2:1 2:2  ."
    )
    assert str(IN_TURN([0, 1, 1, 0], 3)) == ("0 | 0:0 0:1  .  3:0 0:2 3:1  .  3:2\n1 |  .  1:0 2:0 1:1 2:1 1:2 2:2  .")
    assert str(PipelineSchedule.cycles([0, 1, 0], 3)) == "0 | 0:0 0:1 0:2 2:0 2:1 2:2\n1 |  .  1:0 1:1 1:2  .   ."


def test_interleaved_stages_are_those_of_the_paper():
    """Figure 4 of Narayanan et al. 2021, for two devices: first device 0, forward stages 0 and 2."""
    first, second = IN_TURN(trained(2, 2), 4).rows
    assert "".join(f"{t.stage}{t.micro_batch} " for t in first[:8]) == "00 01 20 21 02 50 03 51 "
    assert "".join(f"{t.stage}{t.micro_batch} " for t in second[:6]) == "10 11 30 40 31 41 "


def test_a_last_stage_that_goes_forward_and_back():
    """The tables are those of two stages, without the second one."""
    two, one = IN_TURN([0, 1, 2, 2, 1, 0], 4), IN_TURN([0, 1, 2, 1, 0], 4)
    assert [[(s - (s > 3), m) for s, m in row if s != 3] for row in two.rows] == [[*row] for row in one.rows]


# Costs ----------------------------------------------------------------------------------------------------------------


def test_stages_that_take_no_time():
    timeline = PipelineSchedule.gpipe([0, 1, 1, 0], 2).simulate([0.0] * 4)
    assert (timeline.seconds, timeline.bubble) == (0.0, 0.0)


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
def test_bubbles_and_stashes_of_theory(devices):
    """What waits are as many activations as the papers say; the time lost is what they say, to the last bit."""
    for times in (1, 2, 4):
        steps = times * devices
        kept = [PipelineValue("x", d, (2 * devices - 1 - d,), 1, d) for d in range(devices)]
        for make in (PipelineSchedule.gpipe, IN_TURN):
            timeline = make(trained(devices), steps).simulate([2.0] * devices + [4.0] * devices, kept)
            assert timeline.seconds == 6.0 * (steps + devices - 1)
            assert timeline.bubble == pytest.approx((devices - 1) / (steps + devices - 1))
            in_flight = [steps] * devices if make is not IN_TURN else [devices - d for d in range(devices)]
            assert [*timeline.stashed_bytes] == in_flight
        for parts in (2, 4):
            seconds = IN_TURN(trained(devices, parts), steps).simulate().seconds
            assert seconds == 2 * (parts * steps + devices - 1)


def activations(placement):
    """What waits in a training whose gradients of weights are stages of their own: a device's share of 100 bytes."""
    count = len(placement) // 3
    nbytes = 100 * (max(placement) + 1) // count
    return [PipelineValue("x", s, (2 * count - 1 - s, 3 * count - 1 - s), nbytes, placement[s]) for s in range(count)]


@pytest.mark.parametrize(
    "devices", [1, 2, 3, 4, 5, 8, *(pytest.param(n, marks=pytest.mark.thorough) for n in (13, 16))]
)
def test_zero_bubbles(devices):
    """The last of the devices that begin never waits, in the memory that 1F1B takes."""
    placement = [*trained(devices), *reversed(range(devices))]
    for steps in (devices, 2 * devices, 2 * devices + 1):
        for make in (PipelineSchedule.zero_bubble, PipelineSchedule.search):
            timeline = make(placement, steps).simulate(values=activations(placement))
            assert timeline.seconds == 3 * steps + devices - 1
            assert max(timeline.stashed_bytes) <= 100 * devices * (1 if make == PipelineSchedule.zero_bubble else 1.1)


@pytest.mark.parametrize("devices", [2, 3, 4, 8])
def test_v_shaped_stages_wait_half_as_long(devices):
    """Each stage is half a device's. The way to the device that begins last is of half stages, too."""
    placement = trained(devices)[: 2 * devices] * 3
    for steps in (2 * devices, 4 * devices):
        least = 6 * steps + devices - 1
        for make in (PipelineSchedule.zero_bubble_v, PipelineSchedule.dualpipe_v, PipelineSchedule.search):
            timeline = make(placement, steps).simulate(values=activations(placement))
            assert timeline.seconds == least
            assert max(timeline.stashed_bytes) <= 100 * devices + 50 * (make == PipelineSchedule.dualpipe_v)


def test_dualpipe_goes_forward_and_back_at_a_time():
    """In its middle, each task is followed by one of the device's other forward stage."""
    middle = [t.stage for t in PipelineSchedule.dualpipe_v([0, 1, 1, 0] * 3, 20).rows[0][20:80]]
    assert middle[4:10] in [middle[i : i + 6] for i in range(10, 16)]  # it repeats
    assert {*middle} == {0, 3, 4, 7, 8, 11}
    pairs = [(a, b) for a, b in itertools.pairwise(middle) if a in (0, 3)]
    assert {*pairs} == {(0, 4), (3, 7)}  # forward with the outer stage, back with the inner one; and the reverse


def test_a_search_keeps_within_its_limit():
    """The more memory, the less time; durations and needs of one's own count."""
    placement, durations = [0, 1, 2, 2, 1, 0, 2, 1, 0], [1, 1.2, 0.8, 1.3, 1.5, 1.4, 0.7, 0.9, 0.6]
    values = activations(placement)
    seconds = []
    for memory in (100, 200, 300, 600):
        timeline = PipelineSchedule.search(placement, 7, durations=durations, memory=memory, values=values).simulate(
            durations, values
        )
        assert max(timeline.stashed_bytes) <= memory
        seconds.append(timeline.seconds)
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > 1.5 * seconds[-1]
    assert seconds[-1] <= PipelineSchedule.zero_bubble(placement, 7).simulate(durations).seconds
    free = PipelineSchedule.search([0, 1, 0, 1], 3, needs=[[], [], [0], [1]])  # two pipelines beside each other
    assert free.simulate().seconds == 6


@pytest.mark.parametrize("name", SCHEDULES)
def test_times_are_longest_paths(name):
    """The end of a task is the longest way through what has to be before it: found again by relaxing all of them."""
    trains = [0, 1, 2, 2, 1, 0]
    placement = {"zero_bubble": [*trains, 2, 1, 0], "zero_bubble_v": trains * 3, "dualpipe_v": trains * 3}
    schedule = PipelineSchedule.named(name, placement.get(name, trains), 7)
    durations = np.random.default_rng(0).integers(1, 9, schedule.stages).tolist()
    before = {
        task: [(n, task.micro_batch) for n in schedule.needs[task.stage]] for row in schedule.rows for task in row
    }
    for row in schedule.rows:
        for earlier, later in itertools.pairwise(row):
            before[later].append(earlier)
    ends = dict.fromkeys(before, 0.0)
    for _ in before:
        ends = {
            task: durations[task.stage] + max((ends[b] for b in needed), default=0) for task, needed in before.items()
        }
    timeline = schedule.simulate(durations)
    assert {t.task: t.end for t in timeline.tasks} == ends
    assert all(t.end - t.start == durations[t.task.stage] for t in timeline.tasks)


def test_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    IN_TURN([0, 1, 1, 0], 3).simulate([1, 1.5, 2, 3]).draw(tmp_path / "timeline.svg")
    assert (tmp_path / "timeline.svg").read_text("utf-8").count("<path") > 12


# Programs -------------------------------------------------------------------------------------------------------------


class Dense(addons.Module):
    def build(self, x):
        w = self.add_variable_input("w", lambda: np.random.default_rng(x.shape[1]).normal(size=(x.shape[1], 3)), F32)
        return ops.tanh(x @ w)


def training(steps, schedule):
    """Three layers on two IPUs, one of which has two. Sums of gradients and outputs; and the pipeline."""
    ir = popxl.Ir()
    ir.num_host_transfers = steps
    with ir.main_graph, popxl.in_sequence(True):
        x_s, y_s = popxl.h2d_stream((4, 5), F32), popxl.d2h_stream((4, 3), F32)
        layers = []
        for i, shape in enumerate([(4, 5), (4, 3), (4, 3)]):
            with popxl.ipu(i % 2):
                facts, layer = Dense().create_graph(popxl.TensorSpec(shape, F32))
                needed = layer.graph.inputs[:1] if i else ()
                sums, backward = autodiff_with_accumulation(layer, layer.args.tensors, grads_required=needed)
                state, found = facts.init(f"layer{i}"), sums.init(f"sums{i}")
                layers.append((layer.bind(state), backward.bind(found), backward.grad_graph_info, found.accum.w))
        with pipelined_execution(steps, schedule) as p:
            infos, x = [], None
            for i, (layer, *_) in enumerate(layers):
                with p.stage(i), popxl.ipu(i % 2):
                    infos.append(layer.call_with_info(ops.host_load(x_s) if i == 0 else x))
                    x = infos[-1].outputs[0].copy_to_ipu((i + 1) % 2) if i < 2 else infos[-1].outputs[0]
            with p.stage(2):
                ops.host_store(y_s, x)
                gradient = x * 2.0
            for i in (2, 1, 0):
                with p.stage(5 - i), popxl.ipu(i % 2):
                    _, backward, info, _ = layers[i]
                    given = backward.call(gradient, args=p.stash_and_restore_activations(infos[i], info))
                    gradient = given[0].copy_to_ipu(1 - i % 2) if i else None
    feed = np.random.default_rng(1).normal(size=(steps, 4, 5)).astype(np.float32)
    with popxl.Session(ir, "ipu_model") as session:
        outputs = session.run({x_s: feed})
        return [outputs[y_s], *(session.get_tensor_data(w) for *_, w in layers)], p


@pytest.mark.here
@pytest.mark.parametrize("schedule", ["gpipe", pytest.param(None, marks=pytest.mark.thorough)])
def test_stages_take_the_times_of_their_compiled_graphs(schedule, tmp_path, monkeypatch):
    """The second stage has two products in a graph of its own, the first has one."""
    rates = dict(memory_bandwidth=1e12, network_bandwidth=1e12, host_bandwidth=1e12)
    cpu = Cpu(name="cpu", sources=("a test",), flops={"float32": 1e9}, memory_bytes=1 << 30, **rates)
    (tmp_path / "cpu.json").write_text(cpu.model_dump_json())
    ir = popxl.Ir()
    ir.num_host_transfers = 4
    with ir.main_graph:
        w = popxl.variable(np.ones((32, 32)), F32)
        x_s, y_s = popxl.h2d_stream((16, 32), F32), popxl.d2h_stream((16, 32), F32)
        twice = ir.create_graph(lambda x, w: x @ w @ w, x_s.spec, w)
        with pipelined_execution(4, schedule) as p:
            with p.stage(0), popxl.ipu(0):
                x = (ops.host_load(x_s) @ w).copy_to_ipu(1)
            with p.stage(1), popxl.ipu(1):
                ops.host_store(y_s, *ops.call(twice, x, w))
    with pytest.raises(popxl.errors.PopxlError, match="durations: no figures are known of the device"):
        p.durations(popxl.Session(ir, "ipu_model"))
    monkeypatch.setenv("POPXL_CHIP", str(tmp_path / "cpu.json"))
    session = popxl.Session(ir, "ipu_model")
    product = 2 * 16 * 32 * 32 / 1e9
    assert p.durations(session) == pytest.approx([product, 2 * product], rel=0.05)
    assert p.simulate(session).seconds == pytest.approx(9 * product, rel=0.05)


OWN = PipelineSchedule(
    [
        [(0, 0), (2, 0), (3, 0), (0, 1), (2, 1), (5, 0), (3, 1), (0, 2), (5, 1), (2, 2), (3, 2), (5, 2)],
        [(1, 0), (1, 1), (4, 0), (1, 2), (4, 1), (4, 2)],
    ]
)


@pytest.mark.here
def test_sums_are_the_same_bit_for_bit():
    cycles, p = training(12, None)
    assert p.schedule.rows == PipelineSchedule.cycles([0, 1, 0, 0, 1, 0], 12).rows
    written_out, q = training(12, "cycles")
    for got, expected in zip(written_out, cycles, strict=True):
        np.testing.assert_array_equal(got, expected)
    assert len(q.schedule.rows[0]) == 48


def test_a_table_of_ones_own():
    """Three micro-batches, fewer than a loop of cycles takes; the numbers beside NumPy."""
    (y, *gradients), p = training(3, OWN)
    x = np.random.default_rng(1).normal(size=(3, 4, 5)).astype(np.float32)
    w = [np.random.default_rng(n).normal(size=(n, 3)).astype(np.float32) for n in (5, 3, 3)]
    values = [x]
    for weight in w:
        values.append(np.tanh(values[-1] @ weight))
    np.testing.assert_allclose(y, values[-1], rtol=1e-4, atol=1e-5)
    gradient, expected = values[-1] * 2, []
    for i in (2, 1, 0):
        inner = gradient * (1 - values[i + 1] ** 2)
        expected.insert(0, (np.swapaxes(values[i], 1, 2) @ inner).mean(0))
        gradient = inner @ w[i].T
    for got, wanted in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
    assert p.schedule.rows == OWN.rows
    assert p.schedule.needs == ((), (0,), (1,), (2,), (1, 3), (0, 4))


def program(schedule, steps=4, ipus=(0, 1, 1, 0)):
    """Stages that pass on a value each; the first one's is kept for the last one. Sums in each."""
    ir = popxl.Ir()
    ir.num_host_transfers = steps
    with ir.main_graph:
        stream = popxl.h2d_stream((3,), F32, "numbers")
        totals = [popxl.variable(np.zeros(3, np.float32), name=f"total{s}") for s in range(len(ipus))]
        with pipelined_execution(steps, schedule) as p:
            for s, ipu in enumerate(ipus):
                with p.stage(s), popxl.ipu(ipu):
                    if s == 0:
                        x = first = ops.host_load(stream)
                    else:
                        x = x * 1.1
                    if s == len(ipus) - 1:
                        x = x + p.stash_and_restore_tensor(first)
                    totals[s] += x
    return ir, stream, totals, p


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "search"])
def test_schedules_by_name(name):
    ir, stream, totals, p = program(name)
    if name != "search":  # which asks what waits in the program
        assert p.schedule.rows == PipelineSchedule.named(name, [0, 1, 1, 0], 4).rows
    assert p.schedule.needs == ((), (0,), (1,), (0, 2))
    feed = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    with popxl.Session(ir, "ipu_model") as session:
        session.run({stream: feed})
        found = [session.get_tensor_data(t) for t in totals]
    factors = [1.0, 1.1, 1.1**2, 1.1**3 + 1]
    np.testing.assert_allclose(found, [feed.sum(0) * f for f in factors], rtol=1e-5)
    calls = [graph.name.split("_subgraph")[0] for op in ir.main_graph.ops for graph in op.called_graphs]
    assert calls == [f"pipeline_stage_{t.task.stage}" for t in p.schedule.simulate().tasks]


def test_gradients_of_weights_as_stages_of_their_own(ir):
    """Two layers that scale, z = x * w[0] * w[1], and the gradients of the sum of z squared."""
    stream = popxl.h2d_stream((3,), F32)
    w = [popxl.variable([1.0, 2.0, 3.0], F32), popxl.variable([2.0, -1.0, 0.5], F32)]
    sums = [popxl.variable(np.zeros(3, np.float32)) for _ in w]
    with pipelined_execution(5, "zero_bubble") as p:
        with p.stage(0), popxl.ipu(0):
            x = ops.host_load(stream)
            y = (x * w[0]).copy_to_ipu(1)
        with p.stage(1), popxl.ipu(1):
            dz = y * w[1] * 2.0
        with p.stage(2), popxl.ipu(1):
            dy = (dz * w[1]).copy_to_ipu(0)
        with p.stage(3), popxl.ipu(0):
            out = addons.host_store(dy * w[0])
        with p.stage(4), popxl.ipu(1):
            sums[1] += p.stash_and_restore_tensor(y) * dz
        with p.stage(5), popxl.ipu(0):
            sums[0] += p.stash_and_restore_tensor(x) * dy
    ir.num_host_transfers = 5
    feed = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    with popxl.Session(ir, "ipu_model") as session:
        found = [session.run({stream: feed})[out], *(session.get_tensor_data(t) for t in sums)]
    a, b = (v.data for v in w)
    expected = [2 * feed * (a * b) ** 2, *((2 * feed**2 * f).sum(0) for f in (a * b**2, a**2 * b))]
    for got, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5)
    assert p.schedule.needs == ((), (0,), (1,), (2,), (0, 1), (0, 2))


def test_what_waits_is_what_the_schedule_implies():
    """On device 0 wait the first values of all micro-batches under way, and what stage 1 has yet to read."""
    peaks = {}
    for name in ("gpipe", "1f1b"):
        *_, p = program(name, steps=6)
        assert sorted((v.made_in, v.read_in, v.nbytes, v.device) for v in p.values) == [
            (0, (1,), 12, 0),
            (0, (3,), 12, 0),
            (1, (2,), 12, 1),
            (2, (3,), 12, 1),
        ]
        peaks[name] = p.schedule.simulate(values=p.values).stashed_bytes
    assert peaks == {"gpipe": (6 * 12 + 2 * 12, 6 * 12 + 12), "1f1b": (2 * 12 + 2 * 12, 2 * 12)}


def test_a_search_for_a_program():
    """Stages on IPUs that no named schedule takes; what waits is the program's, and so is the limit."""
    timelines = []
    for memory in (None, 2 * 12 + 12):
        *_, p = program(partial(PipelineSchedule.search, memory=memory), steps=6, ipus=(0, 2, 2, 0))
        timelines.append(p.schedule.simulate(values=p.values))
    assert max(timelines[1].stashed_bytes) <= 36 < max(timelines[0].stashed_bytes)
    assert timelines[0].seconds < timelines[1].seconds
    with pytest.raises(ValueError, match="`memory` is 12 bytes.* one micro-batch after the other holds 24"):
        program(partial(PipelineSchedule.search, memory=12), steps=6, ipus=(0, 2, 2, 0))


# Errors ---------------------------------------------------------------------------------------------------------------

ROWS = [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PipelineSchedule([]), "there are no tasks"),
        (lambda: PipelineSchedule.gpipe([0, 1, 1, 0], steps=0), "there are no tasks"),
        (lambda: PipelineSchedule(ROWS, [(), (7,)]), r"`needs` has the stages \[7\]; there are those from 0 to 1"),
        (lambda: PipelineSchedule(ROWS).simulate([1, -2]), r"`durations` are \[1.0, -2.0\]; expected none below 0"),
        (lambda: PipelineSchedule(ROWS).simulate([1, np.nan]), "none below 0, and finite numbers"),
        (lambda: PipelineSchedule([[(0, 0), (0, 1)], [(1, 1)]]), "1:0 should be there"),
        (lambda: PipelineSchedule([[(0, -1), (0, 0)]]), "0:-1 should not be there"),
        (lambda: PipelineSchedule([[(0, 0), (0, 0)]]), "these are there twice: 0:0"),
        (lambda: PipelineSchedule([[(0, 0), (1, 1)], [(1, 0), (0, 1)]]), r"stage 0 is in the rows \[0, 1\]"),
        (lambda: PipelineSchedule([[(0, 1), (0, 0)]]), "the task 0:1 comes after"),
        (lambda: PipelineSchedule(ROWS, [()]), "`needs` is of 1 stages, and the rows are of 2"),
        (lambda: PipelineSchedule([[(1, 0), (0, 0)]]), "no device can go on. They wait with 1:0 on device 0"),
        (lambda: PipelineSchedule(ROWS).simulate([1]), "`durations` has 1 values, expected one for each of 2"),
        (lambda: PipelineSchedule.gpipe([0, 1, 0, 1, 0], 4), "expected devices that take turns"),
        (lambda: IN_TURN([0, 1, 0, 1], 3), "`steps` is 3, expected a multiple of 2"),
        (lambda: PipelineSchedule.zero_bubble([0, 1, 1, 0], 3), "expected forward stages on one device each"),
        (
            lambda: PipelineSchedule.zero_bubble_v([0, 1, 1, 0] * 2, 3),
            "expected two forward stages on each device, in a V",
        ),
        (lambda: PipelineSchedule.dualpipe_v([0, 1, 1, 0] * 3, 3), "`steps` is 3, expected at least 4"),
        (lambda: PipelineSchedule.search([0, 1], 3, durations=[1]), "`durations` has 1 values, expected one for each"),
        (lambda: PipelineSchedule.search([0, 1], 3, needs=[[]]), "`needs` is of 1 stages, and `placement` of 2"),
        (
            lambda: PipelineSchedule.search([0, 1], 3, needs=[[1], []]),
            r"`needs` of the stages \[0\] are not stages before",
        ),
        (lambda: PipelineSchedule.search([0, 0], 3, memory=0), "`memory` is 0 bytes.* holds 1"),
    ],
)
def test_mistakes_in_tables(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("zero bubble", "there is no schedule 'zero bubble'; expected one of 'cycles', 'gpipe'"),
        (PipelineSchedule(ROWS), "is for 2 stages and 2 micro-batches; the program has 4 stages and 4 micro-batches"),
        (PipelineSchedule.cycles([0, 0, 0, 1], 4), r"row 0 of `schedule` has stages .* on the IPUs \[0, 1\]"),
    ],
)
def test_schedules_that_do_not_fit(schedule, message):
    with pytest.raises(ValueError, match=message):
        program(schedule)


def test_a_schedule_is_one(ir):
    with pytest.raises(TypeError, match="`schedule` is 3 .*, expected a PipelineSchedule"), pipelined_execution(4, 3):
        pass
