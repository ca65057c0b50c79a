"""Plans within a memory budget: as cheap as the best of all plans, and within the budget as compiled."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl.__main__ import main
from popxl.extend.memory import (
    BudgetedPlan,
    Compiled,
    Division,
    GraphNeeds,
    Group,
    MemoryRequest,
    OpNeeds,
    ReplicaExchange,
    bytes_of,
    plan_within,
    requesting_memory,
)
from popxl_addons import layers, optimizers
from popxl_addons.transforms.activations import Treatment
from runtime import progress
from runtime.memory_plans.solver import Release, keep_all, solve
from runtime.targets.chip import Gpu, shipped

SHAPE = (4, 64, 32)


class Layer(addons.Module):
    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        w = self.add_variable_input("w", partial(np.random.normal, 0, 0.1, (x.shape[-1], 256)), x.dtype)
        return ops.sin(ops.gelu(ops.tanh(x @ w))) @ w.T


class Deep(addons.Module):
    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        facts, graph = Layer().create_graph(x)
        for i in range(4):
            (x,) = graph.bind(self.add_variable_inputs(f"layer{i}", facts)).call(x)
        return ops.mean(x * x)


class Counted:
    """Builds the program, and counts how often."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, memory: Any, **how: Any) -> popxl.Ir:
        return self.built(memory, **how)[0]

    def built(self, memory: Any, **how: Any) -> tuple[popxl.Ir, Any, Any, Any]:
        self.count += 1
        np.random.seed(3)
        ir = popxl.Ir()
        ir.options.calledGraphs = "kept"
        with ir.main_graph:
            x = popxl.h2d_stream(SHAPE, popxl.float32, "x")
            step = addons.train_step(Deep(), x, optimizer=partial(optimizers.sgd, lr=0.1), memory=memory, **how)
            loss = addons.host_store(step.loss)
        return ir, x, step, loss


def losses(memory: Any) -> list[Any]:
    ir, x, _, loss = Counted().built(memory)
    rng = np.random.default_rng(1)
    with popxl.Session(ir, "cpu") as session:
        return [session.run({x: rng.normal(size=SHAPE).astype(np.float32)})[loss] for _ in range(2)]


@pytest.fixture(scope="module")
def most() -> int:
    return popxl.Session(Counted()("everything"), "cpu").memory().device


@pytest.mark.thorough(but_each=2)
@pytest.mark.parametrize("share", [0.8, 0.6])
def test_the_compiled_program_is_within_the_budget(most: int, share: float) -> None:
    program, lines = Counted(), list[str]()
    found = addons.plan_memory(program, round(share * most), told=lines.append)
    assert 0.85 * found.budget <= found.peak <= found.budget and found.everything.device == most
    assert program.count == found.compilations == len(lines) <= 3
    assert found.plan.bytes("recompute") > 0 and found.plan.bytes("offload") == 0
    again = popxl.Session(program(found.plan), "cpu").memory().device
    assert again == found.peak
    assert "everything kept" in str(found) and "Layer, call" in str(found)


@pytest.mark.thorough
def test_as_compiled_plans_move_about_as_little_as_the_best_of_all(most: int) -> None:
    """Of all plans with one treatment of an activation for all calls. What XLA fuses, no plan knows."""
    everything = Counted().built("everything")[2].memory
    compiled = []
    for some in itertools.product((False, True), repeat=4):
        plan = everything
        for path in itertools.compress(["tanh_out", "gelu_out", "sin_out", "w_T"], some):
            plan = plan.with_treatments("recompute", path)
        session = popxl.Session(Counted()(plan), "cpu")
        compiled.append((session.memory().device, session.cost().bytes_accessed))
    for share in (0.85, 0.7, 0.5):
        found = addons.plan_memory(Counted(), round(share * most))
        best = min(moved for size, moved in compiled if size <= share * most)
        assert found.cost.bytes_accessed <= 1.1 * best


def twenty_activations(
    memory: Callable[[str | None, int], tuple[float, float]], chosen_mode: str | None = None
) -> Callable[[MemoryRequest], Any]:
    """Function that compiles programs with 20 activations of 1 MB, which are read one after the other.

    Args:
        memory: megabytes of variables and of temporaries, for a mode of called graphs and a number of activations kept.
        chosen_mode: mode of the program that keeps all of them.
    """
    paths = [f"a{i}" for i in range(20)]
    every = tuple(OpNeeds((), (path,), 10**9, 10**6, "float32") for path in paths)
    read = {path: (19 - i, 19 - i) for i, path in enumerate(paths)}
    needs = (GraphNeeds("g", 1, dict.fromkeys(paths, 10**6), read, every, (0,) * 20),)

    def compiled(request: MemoryRequest) -> Any:
        kept, mode = 20, chosen_mode
        if request.memory != "everything":
            treatments, _, mode = request.memory
            kept = [*treatments["g"][0].treatments.values()].count("keep")
        fixed, temporaries = (round(10**6 * each) for each in memory(mode, kept))
        needed: Any = SimpleNamespace(device=fixed + temporaries, temporaries=temporaries)
        applied = SimpleNamespace(needs=needs, plan=request.memory, plan_with=lambda *plan: plan)
        cost, no_ir = SimpleNamespace(cycles=None), SimpleNamespace()
        found: list[Any] = [no_ir, needed, cost, None, frozenset(), "read", (Division(),), applied]
        return Compiled(*found, chosen_mode=chosen_mode if kept == 20 else None)

    return compiled


@pytest.mark.parametrize(("weight", "share"), [(1.0, 0.75), (2.0, 0.75), (2.0, 0.55), (1.4, 0.6)])
def test_the_budget_is_used_whatever_a_planned_byte_weighs(weight: float, share: float) -> None:
    budget = round(share * (10 + 20 * weight) * 10**6)
    found = plan_within(twenty_activations(lambda _, kept: (10, weight * kept)), budget, lambda line: None)
    assert 0.85 * found.budget <= found.peak <= found.budget and found.compilations <= 3
    assert found.plan[1:] == (budget, None)


def test_more_compilations_use_more_of_an_uneven_budget() -> None:
    """Memory that jumps by half in the middle: the line between few and all activations misses it at first."""

    def compiled(compilations: int) -> BudgetedPlan:
        uneven = twenty_activations(lambda _, kept: (10, kept + (14 if kept > 11 else 0)))
        return plan_within(uneven, 22_500_000, lambda line: None, compilations)

    few, more = compiled(3), compiled(6)
    assert few.compilations <= 3 < more.compilations <= 6
    assert few.peak < 0.85 * more.budget < more.peak <= more.budget


def test_plans_have_the_mode_of_called_graphs_that_was_chosen() -> None:
    compiled = twenty_activations(lambda _, kept: (10, 1.5 * kept), "inlined")
    found = plan_within(compiled, 25_000_000, lambda line: None)
    assert found.plan[1:] == (25_000_000, "inlined") and found.compilations <= 3


@pytest.mark.parametrize(("chosen", "other"), [("inlined", "rolled"), ("batched", "inlined")])
def test_where_no_plan_fits_the_smallest_one_is_compiled_in_the_other_mode(chosen: str, other: str) -> None:
    compiled = twenty_activations(lambda mode, kept: (20 if mode == chosen else 10, kept), chosen)
    found = plan_within(compiled, 12_000_000, lambda line: None)
    assert found.plan[1:] == (12_000_000, other) and found.peak <= found.budget


def test_calls_in_rerolled_loops_have_one_plan() -> None:
    def rolled(memory: Any) -> popxl.Ir:
        ir = Counted()(memory)
        ir.options.calledGraphs = "rolled"
        return ir

    whole = addons.plan_memory(rolled, "1 GB").peak
    found = addons.plan_memory(rolled, round(0.6 * whole))
    assert found.peak <= found.budget and [graph.calls for graph in found.plan.graphs] == [4]


def test_enough_memory_keeps_everything(most: int) -> None:
    found = addons.plan_memory(Counted(), f"{2 * most} B")
    assert found.compilations == 1 and not found.plan.bytes("recompute")
    assert found.cost.flops == found.everything_cost.flops


def test_a_budget_of_a_training_step(most: int) -> None:
    budget = f"{0.7 * most / 1e6} MB"
    ir, _, step, _ = Counted().built(budget)
    assert step.memory.bytes("recompute") > 0
    assert popxl.Session(ir, "cpu").memory().device <= bytes_of(budget, "budget")
    np.testing.assert_array_equal(losses(budget), losses("everything"))


def test_too_small_a_budget_says_the_least(most: int) -> None:
    with pytest.raises(
        popxl.errors.PopxlError,
        match=r"within 20 kB of a device; the least .* temporaries .*variables.*has most in memory; the largest of it: "
        r"\w+: f32\[4, 64, 256\] \(262 kB\).*Smaller micro-batches do not help: .* remain",
    ):
        addons.plan_memory(Counted(), "20 kB")


@pytest.mark.thorough
def test_too_small_a_budget_says_which_micro_batches_fit() -> None:
    def program(memory: Any, rows: int = 16, parts: int = 1, rule: Any = optimizers.sgd) -> popxl.Ir:
        ir = popxl.Ir()
        ir.options.calledGraphs = "inlined"
        with ir.main_graph:
            x = popxl.h2d_stream((rows // parts, 64, 32), popxl.float32, "x")
            step = addons.train_step(Deep(), x, optimizer=partial(rule, lr=0.1), accumulate=parts, memory=memory)
            addons.host_store(step.loss)
        return ir

    with pytest.raises(popxl.errors.PopxlError, match="1/2 of the samples in a micro-batch need") as found:
        addons.plan_memory(program, "4.5 MB")
    (size,) = re.findall(r"1/2 of the samples in a micro-batch need ([0-9.]+ MB)", str(found.value))
    needed = popxl.Session(program("nothing", parts=2), "cpu").memory().device
    assert needed <= 4.5e6 and bytes_of(size, "size") == pytest.approx(needed, rel=0.2)
    with pytest.raises(popxl.errors.PopxlError, match=r"Without optimiser state and accumulators \(262 kB\)"):
        addons.plan_memory(partial(program, rows=2, rule=optimizers.adamw), "600 kB")


@pytest.mark.parametrize(
    ("budget", "error", "message"),
    [
        ("14 XB", ValueError, r"`budget` is '14 XB', whose unit is 'XB'; expected a number with one of B, kB, MB, GB"),
        ("14", ValueError, r"`budget` is '14'; expected a number with one of"),
        ("much", ValueError, r"`budget` is 'much'; expected a number"),
        ("-3 GB", ValueError, r"`budget` is '-3 GB'; expected more than zero bytes"),
        (0, ValueError, r"`budget` is 0; expected more than zero bytes"),
        ("1e400 GB", ValueError, r"`budget` is '1e400 GB'; expected a finite number of bytes"),
        (1.5, TypeError, r"`budget` is 1.5 \(float\); expected text such as '14 GB'"),
    ],
)
def test_what_a_budget_may_not_be(budget: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        addons.plan_memory(Counted(), budget)
    if budget not in ("much", 1.5):
        with pytest.raises(error, match=message.replace("budget", "memory")):
            Counted()(budget)


def test_what_cannot_be_planned() -> None:
    with pytest.raises(ValueError, match=r"the program applies 0 memory plans; expected one\. Give `memory`"):
        addons.plan_memory(lambda memory: explicit(), "1 GB")
    with pytest.raises(ValueError, match=r"applies the policy 'nothing' where the policy 'everything' is asked for"):
        addons.plan_memory(lambda memory: Counted()("nothing"), "1 GB")
    with pytest.raises(ValueError, match=r"applies the policy 'everything' where a plan is asked for.*of `build` to"):
        addons.plan_memory(lambda memory: Counted()("everything"), "1 kB")
    with pytest.raises(TypeError, match=r"`told` is 3; expected a function of a line of text"):
        addons.plan_memory(explicit, "1 GB", told=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"`compilations` must be a whole number; got 'three'"):
        addons.plan_memory(explicit, "1 GB", compilations="three")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"`compilations` is 1; expected 2 or more: one with everything kept"):
        addons.plan_memory(explicit, "1 GB", compilations=1)
    with pytest.raises(TypeError, match=r"what `build` returns must be the Ir of the program"):
        addons.plan_memory(lambda memory: None, "1 GB")  # type: ignore[arg-type,return-value]
    with pytest.raises(ValueError, match=r"a budget as `memory` builds the step apart.*Take the plan of `plan_memory`"):
        with popxl.Ir().main_graph:
            x = popxl.variable(np.ones(SHAPE), popxl.float32)
            addons.train_step(Deep(), x, optimizer=partial(optimizers.sgd, lr=0.1), memory="1 GB")


def test_models_may_be_planned_one_after_the_other() -> None:
    def one(x: popxl.Tensor) -> popxl.Tensor:
        return ops.sum(ops.exp(ops.sin(ops.tanh(x))))

    def other(x: popxl.Tensor) -> popxl.Tensor:
        return ops.sum(ops.sin(ops.exp(ops.tanh(x))))

    def program(*memories: Any) -> popxl.Ir:
        ir = popxl.Ir()
        with ir.main_graph:
            x = popxl.variable(np.ones((64, 64)), popxl.float32, "x")
            for model, memory in zip((one, other), memories, strict=True):
                graph = addons.GraphWithNamedArgs(ir.create_graph(model, x))
                grad = addons.autodiff(graph, memory=memory)
                args = grad.grad_graph_info.inputs_dict(graph.call_with_info(x))
                addons.host_store(*grad.call(popxl.constant(1.0), args=args))
        return ir

    first = addons.plan_memory(lambda memory: program(memory, "nothing"), "1 MB").plan
    assert [each.graph.rpartition(".")[2] for each in first.graphs] == ["one"]
    second = addons.plan_memory(lambda memory: program(first, memory), "1 MB").plan
    assert [each.graph.rpartition(".")[2] for each in second.graphs] == ["other"]


def explicit() -> popxl.Ir:
    ir = popxl.Ir()
    with ir.main_graph:
        addons.host_store(popxl.variable(1.0) * 2.0)
    return ir


# The solver ---------------------------------------------------------------------------------------------------------


def drawn(seed: int, most: int = 8, least: int = 4) -> GraphNeeds:
    """A graph of random ops, of which each reads some values before it, and a gradient that reads some of them."""
    rng = np.random.default_rng(seed)
    count, calls, steps = (int(rng.integers(*each)) for each in ((least, most), (1, 5), (2, 5)))
    names = [f"t{i}" for i in range(count)]
    operands = [{names[int(rng.integers(0, i))] for _ in range(2) if rng.random() < 0.8 and i} for i in range(count)]
    ops_of = tuple(
        OpNeeds(
            operands=tuple(sorted(operands[i])),
            results=(name,),
            products=int(rng.integers(0, 10**9)),
            bytes=int(rng.integers(10**5, 10**7)),
            dtype="float32",
        )
        for i, name in enumerate(names)
    )
    sizes = {name: int(rng.integers(10**5, 10**7)) for name in names}
    read = {}
    for name in names:
        if name == names[-1] or rng.random() < 0.6:
            first, last = sorted(rng.integers(0, steps, 2))
            read[name] = (int(first), int(last))
    own = tuple(int(size) for size in rng.integers(0, 10**7, steps))
    return GraphNeeds("g", calls, sizes, read, ops_of, own, int(rng.integers(0, 10**6)), tuple(range(1, calls)))


Plan = tuple[Group, ...]


def again(g: GraphNeeds, group: Group) -> set[str]:
    """What is computed again in a backward call."""
    makers = {path: op for op in g.ops for path in op.results}
    found, stack = set[str](), [*g.read]
    while stack:
        path = stack.pop()
        if group.treatments[path] == "recompute" and path not in found:
            found.add(path)
            stack += makers[path].operands
    return found


def seconds(g: GraphNeeds, plan: Plan, chip: Gpu) -> float:
    """What a plan adds to a step."""
    total = 0.0
    for group in plan:
        computed = again(g, group)
        operands = {path for op in g.ops if op.results[0] in computed for path in op.operands}
        away = {path for path in operands | {*g.read} if group.treatments[path] == "offload"}
        total += group.calls * sum(op.seconds(chip) for op in g.ops if op.results[0] in computed)
        total += group.calls * sum(2 * g.bytes[path] / chip.host_bandwidth for path in away)
    return total


def bytes_at_most(g: GraphNeeds, plan: Plan) -> float:
    """Bytes at the highest, by a walk backward through the calls of a step."""
    first, last = ({path: when[i] for path, when in g.read.items()} for i in (0, 1))
    for op in reversed(g.ops):  # what would be computed again is there for the first of its readers
        when = first.get(op.results[0])
        for path in op.operands if when is not None else ():
            first[path], last[path] = min(first.get(path, when), when), max(last.get(path, when), when)
    calls = [group for group in plan for _ in range(group.calls)]
    kept = [sum(g.bytes[path] for path, how in group.treatments.items() if how == "keep") for group in calls]
    highest = float(sum(kept))
    for i, group in reversed([*enumerate(calls)]):
        computed = again(g, group)
        operands = {path for op in g.ops if op.results[0] in computed for path in op.operands}
        there = computed | {p for p, how in group.treatments.items() if how == "keep"}
        there |= {path for path in operands | {*g.read} if group.treatments[path] == "offload"}
        for step, own in enumerate(g.steps):
            held = sum(g.bytes[path] for path in there if path in first and first[path] <= step <= last[path])
            highest = max(highest, sum(kept[:i]) + held + own + g.gradients * (len(calls) - 1 - i))
    return highest


def plans(g: GraphNeeds, treatments: tuple[Treatment, ...], divided: bool) -> list[Plan]:
    """All plans of a graph; with two groups of calls, too, if it is divided."""
    single = [dict(zip(g.bytes, each, strict=True)) for each in itertools.product(treatments, repeat=len(g.bytes))]
    found: list[Plan] = [(Group(g.calls, each),) for each in single]
    if divided:
        both = itertools.product(g.ends, single, single)
        found += [(Group(end, one), Group(g.calls - end, other)) for end, one, other in both]
    return found


CASES = [
    *((seed, 8, get_args(Treatment), False) for seed in range(4)),
    *((s, 6, ("keep", "recompute"), True) for s in range(4, 10)),
]


@pytest.mark.thorough(but_each=2)
@pytest.mark.parametrize(("seed", "size", "treatments", "divided"), CASES)
def test_plans_cost_as_little_as_the_best_of_all(
    seed: int, size: int, treatments: tuple[Treatment, ...], divided: bool
) -> None:
    g = drawn(seed, size)
    compare_with_all(g if divided else replace(g, ends=()), treatments)


def compare_with_all(g: GraphNeeds, treatments: tuple[Treatment, ...]) -> None:
    """Compare with all plans of a graph; with two groups of calls, too, where it may be divided."""
    chip, offload = shipped(Gpu, "h100"), ["g"] if "offload" in treatments else []
    costs = [(seconds(g, plan, chip), bytes_at_most(g, plan)) for plan in plans(g, treatments, bool(g.ends))]
    least, whole = min(size for _, size in costs), costs[0][1]
    assert solve([g], least - 1000, chip, offload) is None
    for share in (0.1, 0.4, 0.8):
        limit = least + share * (whole - least) + 1000
        best = min(time for time, size in costs if size <= limit)
        found = solve([g], limit, chip, offload)
        assert found is not None and found.bytes <= limit + 1000
        plan = tuple(found.treatments["g"])
        assert bytes_at_most(g, plan) <= found.bytes + 1
        assert seconds(g, plan, chip) <= found.seconds + 1e-12
        assert found.seconds <= 1.03 * best + 1e-12


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(10, 14))
def test_plans_of_fourteen_activations_cost_as_little_as_the_best_of_all(seed: int) -> None:
    compare_with_all(replace(drawn(seed, 15, least=14), ends=()), ("keep", "recompute"))


def test_the_least_is_without_regard_to_time() -> None:
    g, chip = drawn(1), shipped(Gpu, "h100")
    least = solve([g], None, chip, offloadable=())
    assert least is not None
    assert least.bytes <= 1.1 * min(bytes_at_most(g, plan) for plan in plans(g, ("keep", "recompute"), False))


def chain_peak(count: int, kept: Sequence[int]) -> int:
    """Most activations of a chain that are in memory at a time, while a gradient reads them from the last to the first.

    The others are recomputed from the last one before them, right before they are read.
    """
    there, most = {*kept}, len(kept)
    for number in reversed(range(count)):
        start = max((i + 1 for i in there if i <= number), default=0)
        there |= {*range(start, number + 1)}
        most = max(most, len(there))
        there.discard(number)
    return most


@pytest.mark.parametrize("limit", [8, 5])
def test_a_model_without_layers_recomputes_in_sections(limit: int) -> None:
    """As few activations of a chain as any of all plans recomputes."""
    count, size = 10, 10**6
    paths = [f"a{i}" for i in range(count)]
    of = [OpNeeds((before,) if before else (), (path,), 10**9, 0, "float32") for before, path in pairwise(["", *paths])]
    read = {path: (count - 1 - i, count - 1 - i) for i, path in enumerate(paths)}
    g = GraphNeeds("g", 1, dict.fromkeys(paths, size), read, tuple(of), (0,) * count, as_read=True)
    found = solve([g], limit * size, None, offloadable=())
    assert found is not None
    kept = [i for i, path in enumerate(paths) if found.treatments["g"][0].treatments[path] == "keep"]
    assert chain_peak(count, kept) * size == found.bytes <= limit * size
    every = (some for n in range(count + 1) for some in itertools.combinations(range(count), n))
    assert len(kept) == max(len(some) for some in every if chain_peak(count, some) <= limit)


@pytest.mark.parametrize("release", ["read", "call"])
def test_groups_of_calls_use_the_limit(release: Release) -> None:
    """Of one large activation, as many calls keep it as there is room for: the last ones."""
    op = OpNeeds((), ("a",), 10**9, 10**6, "float32")
    g = GraphNeeds("g", 10, {"a": 10**7}, {"a": (0, 0)}, (op,), ends=tuple(range(1, 10)))
    found = solve([g], 65e6, None, (), release)
    assert found is not None and found.bytes <= 65e6
    first, last = found.treatments["g"]
    assert (first.treatments["a"], last.treatments["a"]) == ("recompute", "keep") and last.calls in (5, 6)


def test_graphs_that_are_called_later_are_differentiated_before() -> None:
    """Of four graphs that are called once each, in order, one recomputes what a quarter of the memory needs."""
    op = OpNeeds((), ("a",), 10**9, 10**6, "float32")
    graphs = [GraphNeeds(f"g{i}", 1, {"a": 10**7}, {"a": (0, 0)}, (op,), span=(i, i)) for i in range(4)]
    found = solve(graphs, 31e6, None, ())
    assert found is not None and found.bytes == 3 * 10**7
    chosen = [found.treatments[g.name][0].treatments["a"] for g in graphs]
    assert chosen.count("keep") == 3 and chosen[-1] == "keep"


@pytest.mark.parametrize(("schedule", "held"), [("1f1b", 3), ("gpipe", 12), (None, 6)])
def test_a_stage_holds_the_micro_batches_that_its_schedule_says(schedule: Any, held: int) -> None:
    """Three stages that call one graph; the first one waits longest for its gradients."""
    ir = popxl.Ir()
    ir.num_host_transfers = 12
    with requesting_memory("everything") as requested, ir.main_graph, popxl.in_sequence():
        stream = popxl.h2d_stream((4, 8), popxl.float32, "x")
        graph = addons.GraphWithNamedArgs(ir.create_graph(lambda x: ops.tanh(ops.exp(x)), stream.spec))
        grad = addons.autodiff(graph, memory="everything")
        with addons.pipelined_execution(12, schedule) as p:
            sites, x = [], None
            for i in range(3):
                with p.stage(i), popxl.ipu(i):
                    sites.append(graph.call_with_info(ops.host_load(stream) if x is None else x))
                    x = sites[i].outputs[0].copy_to_ipu(i + 1) if i < 2 else sites[i].outputs[0]
            for stage, i in ((3, 2), (4, 1), (5, 0)):
                with p.stage(stage), popxl.ipu(i):
                    kept = p.stash_and_restore_activations(sites[i], grad.grad_graph_info)
                    (x,) = grad.call(x if i < 2 else p.stash_and_restore_tensor(x), args=kept)
                    x = x.copy_to_ipu(i - 1) if i else x
            with p.stage(5), popxl.ipu(0):
                addons.host_store(x)
    (applied,) = requested.applied
    assert [each.live_steps for each in applied.needs] == [held]


def test_micro_batches_that_are_held_count() -> None:
    """Of three, two wait with all that is kept."""
    op = OpNeeds((), ("a",), 10**9, 10**6, "float32")
    g = GraphNeeds("g", 2, {"a": 10**7}, {"a": (0, 0)}, (op,), live_steps=3)
    assert keep_all([g], "read").bytes == 6 * 10**7
    found = solve([g], 25e6, None, ())
    assert found is not None and found.bytes <= 25e6
    assert found.treatments["g"][0].treatments == {"a": "recompute"}


def test_recomputing_a_collective_takes_the_time_of_its_links() -> None:
    """The parts of the others arrive over the fastest links that join a group."""
    ir, size = popxl.Ir(replication=4), 8 << 20
    with requesting_memory("everything") as requested, ir.main_graph:
        x = popxl.h2d_stream((size // 4,), popxl.float32, "x")

        def gathered(x: popxl.Tensor) -> popxl.Tensor:
            return ops.exp(ops.collectives.replicated_all_gather(x))

        graph = addons.GraphWithNamedArgs(ir.create_graph(gathered, x.spec))
        addons.autodiff(graph, memory="everything")
    (needs,) = requested.applied[0].needs
    (gather,) = (op for op in needs.ops if op.exchanges)
    chip = shipped(Gpu, "h100")
    assert gather.exchanges == (ReplicaExchange("all-gather", 4 * size, 4, 4),)
    assert gather.seconds(chip) >= gather.bytes / chip.memory_bandwidth + 3 * size / chip.levels[0].bandwidth
    assert gather.exchanges[0]._replace(reach=16).seconds(chip) > 5 * gather.exchanges[0].seconds(chip)


# The command --------------------------------------------------------------------------------------------------------

PROGRAM = """
    from functools import partial
    import numpy as np
    import popxl
    import popxl_addons as addons
    from popxl import ops
    from popxl_addons import optimizers
    from tests.popxl_addons.test_addons_memory_budget import Deep

    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.h2d_stream((64, 64, 32), popxl.float32, "x")
        step = addons.train_step(Deep(), x, optimizer=partial(optimizers.sgd, lr=0.1))
        addons.host_store(step.loss)
    print("is not shown")
    popxl.Session(ir, "ipu_hw").run({})
    raise AssertionError("nothing is run")
"""


@pytest.mark.targets
def test_the_command_plans_the_step_that_leaves_memory_open(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "train.py").write_text(textwrap.dedent(PROGRAM))
    command = ["plan", "--target", "gpu h100", "--save", str(tmp_path / "plan.json"), "--budget"]
    assert main([*command, "20 MB", str(tmp_path / "train.py")]) == 0
    out = capsys.readouterr().out
    assert "Memory within a budget" in out and "Layer, call" in out and "is not shown" not in out
    assert re.search(r"operations to recompute it +to the host and back\n.* [0-9.]+ us\n", out)
    assert addons.MemoryPlan.read_json(tmp_path / "plan.json").graphs[0].graph == "Layer"
    assert main([*command, "1 kB", str(tmp_path / "train.py")]) == 1
    assert "no plan was found within 1 kB of a device; the least" in capsys.readouterr().err


def test_the_command_plans_for_the_device_of_the_program(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a target. What takes a while is shown on request."""
    (tmp_path / "train.py").write_text(textwrap.dedent(PROGRAM).replace("(64, 64, 32)", "(4, 64, 32)"))
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setenv("POPXL_PROGRESS", "on")
    assert main(["plan", str(tmp_path / "train.py"), "--budget", "4 GB"]) == 0
    out, err = capsys.readouterr()
    assert "The budget is 4 GB of a device. The program was compiled once." in out and "is not shown" not in out
    assert "Memory plan within 4 GB: program 1 of at most 4, 0 s\n" in err
    assert re.search(r"^1: [0-9.]+ MB as compiled, of 4 GB, with", err, re.MULTILINE)


def test_the_command_ignores_the_plan_of_a_step(tmp_path: Path, capsys: Any) -> None:
    """The plan and both columns of the costs are those of the same step without `memory`."""
    source = textwrap.dedent(PROGRAM).replace("(64, 64, 32)", "(4, 64, 32)")
    outputs, said = [], []
    for memory in ("", ', memory="everything"', ', memory="nothing"'):
        file = tmp_path / "train.py"
        file.write_text(source.replace("lr=0.1)", f"lr=0.1){memory}"))
        assert main(["plan", str(file), "--budget", "2.6 MB"]) == 0
        out, err = capsys.readouterr()
        outputs.append(out)
        said.append(err.count("plan or policy of its own, which is ignored here"))
    assert outputs == outputs[:1] * 3 and said == [0, 1, 1] and "compiled once" not in outputs[0]


def test_a_program_without_a_session_is_not_planned(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "train.py").write_text("")
    assert main(["plan", "--budget", "4 GB", str(tmp_path / "train.py")]) == 1
    assert "train.py makes no session, so there is nothing to compile" in capsys.readouterr().err


class Wide(addons.Module):
    """An elementwise function between two products with one weight."""

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        w = self.add_variable_input("w", partial(np.random.normal, 0, 0.1, (16, 24)), x.dtype)
        return ops.gelu(x @ w) @ w.T


class WideLayers(addons.Module):
    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        facts, graph = Wide().create_graph(x)
        for i in range(3):
            (x,) = graph.bind(self.add_variable_inputs(f"layer{i}", facts)).call(x)
        return ops.mean(x)


def needs_of_wide_layers(optimizer: Any) -> GraphNeeds:
    with requesting_memory("everything") as requested, popxl.Ir().main_graph:
        x = popxl.h2d_stream((6, 16), popxl.float32, "x")
        addons.train_step(WideLayers(), x, optimizer=optimizer, memory="everything")
    ((needs,),) = (applied.needs for applied in requested.applied)
    return needs


@pytest.mark.parametrize(("clip_norm", "waiting"), [(None, 0), (1.0, 4 * 16 * 24)])
def test_gradients_wait_where_a_norm_of_all_is_needed(clip_norm: float | None, waiting: int) -> None:
    """Else the gradients of a call are free when its variables are updated."""
    g = needs_of_wide_layers(partial(optimizers.adamw, lr=0.1, clip_norm=clip_norm))
    assert g.waiting_gradients == g.with_early_updates().gradients == waiting


def test_products_on_tpus_compute_their_factors_from_kept_operands() -> None:
    """XLA fuses the function into the products there: with its operand kept, the result takes no memory, and no op has
    to run again by itself. On GPUs products read it from memory."""
    g = needs_of_wide_layers(partial(optimizers.sgd, lr=0.1)).with_early_updates()
    everything, size = keep_all([g], "read").bytes, 4 * 6 * 24
    assert g.bytes == {"matmul_out": size, "gelu_out": size, "w_T": 0}
    assert keep_all([g.with_fused_factors()], "read").bytes == everything - 2 * size  # in the last call it is read
    for graph, treatment, is_free in ((g, "recompute", False), (g.with_fused_factors(), "keep", True)):
        found = solve([graph], everything - 2 * size, None, ())
        assert found is not None and (found.seconds == 0) is is_free
        treatments = found.treatments[g.name][0].treatments
        assert (treatments["matmul_out"], treatments["gelu_out"]) == ("keep", treatment)


def test_a_normalisation_is_elementwise_with_its_statistics() -> None:
    """The mean has to be kept for the result to take no memory."""
    op = OpNeeds(("x",), ("y", "mean"), 0, 10**6, "float32", fused_bytes=10**5, statistics=("mean",))
    sizes = {"x": 10**6, "y": 10**6, "mean": 10**3}
    first = OpNeeds((), ("x",), 10**9, 10**6, "float32")
    g = GraphNeeds("g", 1, sizes, dict.fromkeys(sizes, (0, 0)), (first, op)).with_fused_factors()
    assert keep_all([g], "read").bytes == 10**6 + 10**3
    found = solve([g], 10**6 + 10**3, None, ())
    assert found is not None and set(found.treatments["g"][0].treatments.values()) == {"keep"}
    smaller = solve([g], 10**6, None, ())
    assert smaller is not None and smaller.seconds > 0
    assert smaller.treatments["g"][0].treatments == {"x": "keep", "y": "recompute", "mean": "recompute"}


def test_advice_for_a_program_without_variables() -> None:
    """It is that for programs, and not that for functions of JAX."""

    def build(memory: Any) -> popxl.Ir:
        ir = popxl.Ir()
        with ir.main_graph:
            x = ops.host_load(popxl.h2d_stream((64, 64), popxl.float32, "x"))
            graph = addons.GraphWithNamedArgs(ir.create_graph(lambda x: ops.sum(ops.exp(ops.tanh(x))), x))
            grad = addons.autodiff(graph, memory=memory)
            site = graph.call_with_info(x)
            args = grad.grad_graph_info.inputs_dict(site)
            addons.host_store(*grad.call(popxl.constant(1.0), args=args))
        return ir

    with pytest.raises(popxl.errors.PopxlError, match="no plan was found within 1 kB") as refusal:
        addons.plan_memory(build, "1 kB")
    assert "micro-batches" in str(refusal.value) and "lax.scan" not in str(refusal.value)


@pytest.mark.parametrize("chunks", [None, 1, 4])
def test_advice_for_logits(chunks: int | None) -> None:
    """That they can be computed in chunks is said where the program states that they are not."""
    config = layers.LanguageConfig(vocabulary=512, width=8, layers=1, heads=2, context=64)

    def build(memory: Any) -> popxl.Ir:
        ir = popxl.Ir()
        with ir.main_graph:
            tokens = popxl.h2d_stream((4, 65), popxl.int32, "tokens")
            loss = layers.NextTokenLoss(layers.LanguageModel(config), chunks)
            addons.train_step(loss, tokens, optimizer=partial(optimizers.sgd, lr=0.1), memory=memory)
        return ir

    with pytest.raises(popxl.errors.PopxlError, match="no plan was found within 1 kB") as refusal:
        addons.plan_memory(build, "1 kB")
    assert ("A loss reads 524 kB of logits: `NextTokenLoss(model, chunks=…)`" in str(refusal.value)) == (chunks == 1)
