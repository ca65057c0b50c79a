"""Warnings of a session: updates that are lost, masks that stay, replicas that part; and programs that only look so."""

import linecache
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.analysis.lints import run_lints
from popxl.errors import (
    DriftingVariableWarning,
    LostUpdateWarning,
    PopxlWarning,
    RepeatedSeedWarning,
    TensorTruthWarning,
)
from popxl.transforms import autodiff

F32 = popxl.float32
Build = Callable[[popxl.Ir], Any]


def program(build: Build, replicas: int = 1) -> popxl.Ir:
    ir = popxl.Ir(replication=replicas)
    with ir.main_graph, popxl.in_sequence():
        build(ir)
    return ir


def right(*programs: Build, replicas: int = 1) -> Any:
    return pytest.mark.parametrize("ir", [program(p, replicas) for p in programs], ids=[p.__name__ for p in programs])


def fed(*shape: int) -> popxl.Tensor:
    return ops.host_load(popxl.h2d_stream(shape, F32, "x"))


def test_all_have_one_base() -> None:
    for category in (DriftingVariableWarning, LostUpdateWarning, RepeatedSeedWarning, TensorTruthWarning):
        assert issubclass(category, PopxlWarning)
    assert issubclass(PopxlWarning, UserWarning)


def test_what_is_told_is_so_and_told_once() -> None:
    """One program that does all three. Sessions of it tell each once, at the line in question, unless told not to."""

    def counted(x: Any, count: Any) -> Any:
        y = x * 2
        count += 1
        return y

    ir = popxl.Ir(replication=2)
    with ir.main_graph, popxl.in_sequence():
        into, mask, out = popxl.h2d_stream((3,), F32), popxl.d2h_stream((50,), F32), popxl.d2h_stream((3,), F32)
        x, count, w = ops.host_load(into), popxl.variable(7.0, name="count"), popxl.variable(np.ones(3), F32, "w")
        ops.call(ir.create_graph(counted, x, count), x, count)
        seed = popxl.variable([1, 2], popxl.uint32)
        ops.host_store(mask, ops.dropout(popxl.constant(np.ones(50), F32), seed, 0.5))
        ops.add_(w, w * x)
        ops.host_store(out, w)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        session = popxl.Session(ir, "ipu_model")
        run_lints(ir.main_graph)
    expected = [
        (LostUpdateWarning, "`count` in graph", "count += 1"),
        (RepeatedSeedWarning, "in every run", "ops.host_store(mask, ops.dropout"),
        (DriftingVariableWarning, "share `w`", "ops.add_(w, w * x)"),
    ]
    for each, (category, part, line) in zip(told, expected, strict=True):
        assert each.category is category and part in str(each.message)
        assert linecache.getline(each.filename, each.lineno).strip().startswith(line)
    with session:
        outputs = [session.run({into: np.float32([[1, 2, 3], [4, 5, 6]])}) for _ in range(2)]
        assert session.get_tensor_data(count) == 7
    np.testing.assert_array_equal(outputs[0][mask], outputs[1][mask])
    np.testing.assert_array_equal(outputs[0][out], [[2, 3, 4], [5, 6, 7]])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=PopxlWarning)
        popxl.Session(ir, "ipu_model")


# Lost updates ---------------------------------------------------------------------------------------------------------


def lost_in_a_loop(ir: popxl.Ir) -> None:
    x, total = popxl.variable(1.0), popxl.variable(0.0, name="total")

    def turn(x: Any, total: Any) -> Any:
        ops.add_(total, x)
        return x + 1

    ops.repeat(ir.create_graph(turn, x, total), 3, x, total)


def lost_on_the_way(ir: popxl.Ir) -> None:
    """What is changed takes it by reference, and who calls that does not."""
    x = popxl.variable(1.0)

    def inner(total: popxl.TensorByRef) -> None:
        total += 1

    def outer(total: Any) -> None:
        ops.call(ir.create_graph(inner, total), total)

    ops.call(ir.create_graph(outer, x), x)


def lost_in_a_branch(ir: popxl.Ir) -> None:
    x, total = popxl.variable(True), popxl.variable(0.0, name="total")

    def branch(total: Any) -> Any:
        y = total * 2
        ops.var_updates.copy_var_update_(total.reshape_((1,)), popxl.constant([3.0]))
        return y

    graph = ir.create_graph(branch, total)
    ops.conditional(x, graph, graph, [total], [total])


@right(lost_in_a_loop, lost_on_the_way, lost_in_a_branch)
def test_updates_that_are_lost(ir: popxl.Ir) -> None:
    with pytest.raises(LostUpdateWarning, match="`total` in graph .* is lost .*: the graph takes it by value"):
        popxl.Session(ir)


def loaded(ir: popxl.Ir) -> Any:
    """A slot of a remote buffer, loaded by a graph, as programs do it; and what stores it."""
    buffer = popxl.remote_buffer((3,), F32)
    popxl.remote_variable([1.0, 2.0, 3.0], buffer)
    (w,) = ops.call(ir.create_graph(lambda: ops.remote_load(buffer, 0, "w")))
    store = ir.create_graph(lambda w: ops.remote_store(buffer, 0, w), w)
    return w, store


def grow(w: popxl.TensorByRef) -> None:
    w += 1


def not_stored(ir: popxl.Ir) -> None:
    w, _ = loaded(ir)
    ops.call(ir.create_graph(grow, w), w)


def stored_too_early(ir: popxl.Ir) -> None:
    w, store = loaded(ir)
    ops.call(store, w)
    w += 1


@right(not_stored, stored_too_early)
def test_changes_of_slots_that_are_not_stored(ir: popxl.Ir) -> None:
    with pytest.raises(LostUpdateWarning, match="remote buffer, `w.*`, is changed .*the buffer keeps what it had"):
        popxl.Session(ir)


def stored(ir: popxl.Ir) -> None:
    w, store = loaded(ir)
    ops.call(ir.create_graph(grow, w), w)
    ops.call(store, w)


def changed_and_read(ir: popxl.Ir) -> None:
    w, _ = loaded(ir)
    w += 1
    ops.host_store(popxl.d2h_stream((3,), F32), w)


def returned_by_the_graph_that_changes_it(ir: popxl.Ir) -> None:
    buffer = popxl.remote_buffer((3,), F32)

    def grown() -> Any:
        w = ops.remote_load(buffer, 0)
        w += 1
        return w

    (w,) = ops.call(ir.create_graph(grown))
    ops.remote_store(buffer, 0, w)


def of_a_copy(ir: popxl.Ir) -> None:
    copy = popxl.variable([1.0, 2.0, 3.0]) * 1.0
    copy += 1


def of_a_constant(ir: popxl.Ir) -> None:
    one = popxl.constant([1.0, 2.0, 3.0])
    ops.add_(one.reshape_((3, 1)), popxl.constant(1.0))


def of_what_was_put_together(ir: popxl.Ir) -> None:
    _, piece = popxl.replica_sharded_variable(np.ones(4), F32, "w")
    piece += 1
    ops.add_(ops.collectives.replicated_all_gather(piece), popxl.constant(1.0))


@pytest.mark.parametrize("build", [of_a_copy, of_a_constant, of_what_was_put_together])
def test_changes_of_what_no_variable_keeps(build: Build) -> None:
    with pytest.raises(LostUpdateWarning, match=r"The change of `\w+` is lost \(.*: no variable keeps it"):
        popxl.Session(program(build, 2))


def named_anew(ir: popxl.Ir) -> None:
    w = popxl.variable([1.0, 2.0], name="w")
    w -= w * 0.1


def named_anew_in_a_graph(ir: popxl.Ir) -> None:
    w = popxl.variable([1.0, 2.0], name="w")

    def update(w: popxl.TensorByRef, dw: Any) -> None:
        w *= dw

    ops.call(ir.create_graph(update, w, w), w, w * 2)


def named_anew_in_a_loop(ir: popxl.Ir) -> None:
    for t in [popxl.variable([1.0, 2.0], name="w")]:
        t /= 2


@right(named_anew, named_anew_in_a_graph, named_anew_in_a_loop)
def test_only_one_operator_works_in_place(ir: popxl.Ir) -> None:
    with pytest.raises(LostUpdateWarning, match="`w` stays as it is, .*only `\\+=` works in place"):
        popxl.Session(ir)


def named_anew_and_read(ir: popxl.Ir) -> None:
    x = fed(3)
    x -= 1
    x *= x
    ops.host_store(popxl.d2h_stream((3,), F32), x)


def not_read(ir: popxl.Ir) -> None:
    fed(3) - 1


def returned(ir: popxl.Ir) -> None:
    x = popxl.variable(1.0)
    ops.call(ir.create_graph(lambda t: ops.add_(t, t), x), x)


def read_afterwards(ir: popxl.Ir) -> None:
    x = popxl.variable([1.0])

    def halved(t: Any) -> Any:
        view = t.reshape_((1, 1))
        t += 1
        return view / 2

    ops.call(ir.create_graph(halved, x), x)


def written_back(ir: popxl.Ir) -> None:
    x = popxl.variable(1.0)

    def grown(t: Any) -> None:
        t += 1

    ops.call_with_info(ir.create_graph(grown, x), x).set_parent_input_modified(x)


def by_reference_through_a_loop(ir: popxl.Ir) -> None:
    x, y = popxl.variable(1.0), popxl.variable(2.0)

    def grown(x: Any, t: popxl.TensorByRef) -> Any:
        t += x
        return x

    ops.repeat(ir.create_graph(grown, x, y), 2, x, y)


# Seeds ----------------------------------------------------------------------------------------------------------------


def trained(ir: popxl.Ir, seed: Any, ratio: float = 0.5) -> None:
    """One step that drops by a seed, in a graph that is called and differentiated."""
    x, w = fed(2, 3), popxl.variable(np.ones((3, 4)), F32, "w")
    graph = ir.create_graph(lambda x, w, seed: ops.dropout(x @ w, seed, ratio), x, w, seed)
    info = autodiff(graph, grads_required=[graph.inputs[1]])
    site = ops.call_with_info(graph, x, w, seed)
    (dw,) = ops.call(info.graph, site.outputs[0], inputs_dict=info.inputs_dict(site))
    ops.scaled_add_(w, dw, b=-0.1)


def seed_of_a_constant(ir: popxl.Ir) -> None:
    _, seed = ops.split_random_seed(popxl.constant([1, 2], popxl.uint32))
    trained(ir, seed)


def seed_of_a_variable(ir: popxl.Ir) -> None:
    trained(ir, popxl.variable([1, 2], popxl.uint32))


@right(seed_of_a_constant, seed_of_a_variable)
def test_seeds_that_stay(ir: popxl.Ir) -> None:
    with pytest.raises(RepeatedSeedWarning, match=r"the same elements in every run .*ops.dropout.*`seed \+= 1`"):
        popxl.Session(ir)


def seed_from_the_host(ir: popxl.Ir) -> None:
    trained(ir, ops.host_load(popxl.h2d_stream((2,), popxl.uint32)))


def seed_that_is_advanced(ir: popxl.Ir) -> None:
    seed = popxl.variable([1, 2], popxl.uint32)
    _, first = ops.split_random_seed(seed)
    trained(ir, first)
    seed += 1


def seed_that_a_graph_advances(ir: popxl.Ir) -> None:
    seed = popxl.variable([1, 2], popxl.uint32)
    trained(ir, seed)

    def advance(seed: popxl.TensorByRef) -> None:
        seed += 1

    ops.call(ir.create_graph(advance, seed), seed)


def seed_of_each_turn(ir: popxl.Ir) -> None:
    """All of training is one run."""
    w, seed = popxl.variable([1.0, 2.0], name="w"), popxl.constant([1, 2], popxl.uint32)

    def step(seed: Any, w: popxl.TensorByRef) -> Any:
        seed, own = ops.split_random_seed(seed)
        ops.add_(w, ops.dropout(w, own, 0.5))
        return seed

    ops.repeat(ir.create_graph(step, seed, w), 10, seed, w)


def nothing_is_dropped(ir: popxl.Ir) -> None:
    trained(ir, popxl.constant([1, 2], popxl.uint32), ratio=0.0)


def nothing_is_learned(ir: popxl.Ir) -> None:
    ops.dropout(fed(3), popxl.constant([1, 2], popxl.uint32), 0.5)


# Replicas -------------------------------------------------------------------------------------------------------------


def gradients(ir: popxl.Ir, *ws: Any) -> Any:
    """Gradients of weights of shape (3,), for data of each replica."""
    x = fed(2, 3)

    def loss(x: Any, *ws: Any) -> Any:
        for w in ws:
            x = x * w
        return ops.sum(x * x)

    graph = ir.create_graph(loss, x, *ws)
    info = autodiff(graph, grads_required=graph.inputs[1:])
    site = ops.call_with_info(graph, x, *ws)
    return ops.call(info.graph, 1.0, inputs_dict=info.inputs_dict(site))


def weight(name: str = "w", **settings: Any) -> Any:
    return popxl.variable(np.ones(3), F32, name, **settings)


def mean(g: Any, **group: Any) -> Any:
    return ops.collectives.replicated_all_reduce(g, "mean", **group)


def one_of_two_is_not_reduced(ir: popxl.Ir) -> None:
    w, bias = weight(), weight("bias")
    dw, db = gradients(ir, w, bias)
    ops.scaled_add_(w, dw, b=-0.1)
    ops.scaled_add_(bias, mean(db), b=-0.1)


def updated_in_a_graph(ir: popxl.Ir) -> None:
    w = weight()

    def update(w: popxl.TensorByRef, dw: Any) -> None:
        ops.var_updates.accumulate_(w, dw, -0.1)

    (dw,) = gradients(ir, w)
    ops.call(ir.create_graph(update, w, dw), w, dw)


def accumulated_and_not_reduced(ir: popxl.Ir) -> None:
    w, total = weight(), weight("total")

    def turn(w: Any, total: popxl.TensorByRef) -> None:
        total += gradients(ir, w)[0]

    ops.repeat(ir.create_graph(turn, w, total), 2, w, total)
    ops.scaled_add_(w, total, b=-0.1)
    ops.var_updates.accumulator_zero_(total)


def noise_of_each_replica(ir: popxl.Ir) -> None:
    w, seed = weight(), popxl.variable([[1, 2]] * 4, popxl.uint32, replica_grouping=ir.replica_grouping(group_size=1))
    ops.add_(w, w * ops.random_uniform(seed, (3,)))
    seed += 1


def of_groups_that_cross(ir: popxl.Ir) -> None:
    """Both have a value for each pair of replicas, and these are other pairs."""
    rows = np.ones((2, 3), np.float32)
    neighbours = popxl.variable(rows, replica_grouping=ir.replica_grouping(group_size=2), name="other")
    w = popxl.variable(rows, replica_grouping=ir.replica_grouping(stride=2, group_size=2), name="w")
    ops.add_(w, w * neighbours)


@right(
    one_of_two_is_not_reduced,
    updated_in_a_graph,
    accumulated_and_not_reduced,
    noise_of_each_replica,
    of_groups_that_cross,
    replicas=4,
)
def test_replicas_that_drift_apart(ir: popxl.Ir) -> None:
    with pytest.raises(DriftingVariableWarning, match=r"Replicas share `w`, and each .*replicated_all_reduce"):
        popxl.Session(ir, "ipu_model")


def reduced(ir: popxl.Ir) -> None:
    """With a learning rate that each replica is fed: it is one number."""
    w, rate = weight(), ops.host_load(popxl.h2d_stream((), F32))
    (dw,) = gradients(ir, w)
    ops.scaled_add_(w, mean(dw), b=rate)


def reduced_within_a_graph(ir: popxl.Ir) -> None:
    w = weight()

    def update(w: popxl.TensorByRef, dw: Any) -> None:
        ops.scaled_add_(w, mean(dw), b=-0.1)

    (dw,) = gradients(ir, w)
    ops.call(ir.create_graph(update, w, dw), w, dw)


def accumulated_and_reduced(ir: popxl.Ir) -> None:
    """The sums differ at the end of a run; a counter starts them anew."""
    w, total, count = weight(), weight("total"), popxl.variable(0.0, name="count")

    def turn(w: Any, total: popxl.TensorByRef, count: popxl.TensorByRef) -> None:
        ops.var_updates.accumulate_mean_(total, gradients(ir, w)[0], count)
        count += 1

    def update(w: popxl.TensorByRef, total: Any) -> None:
        ops.scaled_add_(w, ops.cast(mean(ops.cast(total, popxl.float16) / 2), F32), b=-0.1)

    ops.var_updates.accumulator_zero_(count)
    ops.repeat(ir.create_graph(turn, w, total, count), 2, w, total, count)
    ops.call(ir.create_graph(update, w, total), w, total)


def accumulated_in_two_places(ir: popxl.Ir) -> None:
    """The gradient of a table that two parts of a model share: one sum is added to the other, which is reduced."""
    w, total, other, count = weight(), weight("total"), weight("other"), popxl.variable(0.0, name="count")

    def both(total: popxl.TensorByRef, other: popxl.TensorByRef, count: popxl.TensorByRef, dw: Any) -> None:
        ops.var_updates.accumulate_mean_(total, dw, count)
        ops.var_updates.accumulate_mean_(other, dw, count)
        count += 1

    def join(total: popxl.TensorByRef, other: Any) -> None:
        ops.add_(total, other)

    ops.var_updates.accumulator_zero_(count)
    (dw,) = gradients(ir, w)
    ops.call(ir.create_graph(both, total, other, count, dw), total, other, count, dw)
    ops.call(ir.create_graph(join, total, other), total, other)
    ops.scaled_add_(w, ops.collectives.replicated_all_reduce_(total, "mean"), b=-0.1)


def begun_anew(ir: popxl.Ir) -> None:
    scratch = weight("scratch")
    ops.var_updates.copy_var_update_(scratch, popxl.constant(np.zeros(3), F32))
    ops.add_(scratch, fed(3))
    ops.host_store(popxl.d2h_stream((3,), F32), scratch * 2)


def one_for_each_replica(ir: popxl.Ir) -> None:
    w = popxl.variable(np.ones((4, 3)), F32, replica_grouping=ir.replica_grouping(group_size=1))
    ops.add_(w, w * fed(3))


def read_from_all(ir: popxl.Ir) -> None:
    w = weight(retrieval_mode="all_replicas")
    ops.add_(w, w * fed(3))


def same_for_all(ir: popxl.Ir) -> None:
    w, other = weight(), weight("other")
    ops.add_(w, other * w + ops.random_uniform(popxl.constant([1, 2], popxl.uint32), (3,)))


def within_its_group(ir: popxl.Ir) -> None:
    pairs = ir.replica_grouping(group_size=2)
    rows = np.ones((2, 3), np.float32)
    w, other = (popxl.variable(rows, replica_grouping=pairs) for _ in range(2))
    ops.add_(w, w * other)


@right(
    stored,
    changed_and_read,
    returned_by_the_graph_that_changes_it,
    named_anew_and_read,
    not_read,
    returned,
    read_afterwards,
    written_back,
    by_reference_through_a_loop,
    seed_from_the_host,
    seed_that_is_advanced,
    seed_that_a_graph_advances,
    seed_of_each_turn,
    nothing_is_dropped,
    nothing_is_learned,
)
def test_programs_that_are_right(ir: popxl.Ir) -> None:
    run_lints(ir.main_graph)  # what a session asks; warnings are errors here


@right(
    reduced,
    reduced_within_a_graph,
    accumulated_and_reduced,
    accumulated_in_two_places,
    begun_anew,
    one_for_each_replica,
    read_from_all,
    same_for_all,
    within_its_group,
    replicas=4,
)
def test_replicas_that_stay_together(ir: popxl.Ir) -> None:
    run_lints(ir.main_graph)
