"""Programs whose in-place ops have no defined order are refused; all others are run."""

import gc
import time

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.analysis.ambiguity import check_in_place_order
from popxl.errors import PopxlError

accumulate_, copy_var_update_ = ops.var_updates.accumulate_, ops.var_updates.copy_var_update_


def store(t):
    ops.host_store(popxl.d2h_stream(t.shape, t.dtype), t)


# Programs over three float32 vectors of four elements. ----------------------------------------------------------------


def two_modifiers(a, b, c):
    ops.relu_(a)
    a += b


def a_modifier_whose_result_is_used(a, b, c):
    p = ops.relu_(a)
    a += b
    return p


def the_same_change_twice(a, b, c):
    ops.relu_(a)
    ops.relu_(a)


def two_changes_of_one_tensor(a, b, c):
    ops.relu_(a)
    ops.gelu_(a)


def an_overwrite_and_a_read(a, b, c):
    p = a * 2
    copy_var_update_(a, b)
    return p


def an_overwrite_whose_result_is_used(a, b, c):
    p = a + 5
    q = copy_var_update_(a, b)
    return p, q * 2


def a_copy_and_a_change(a, b, c):
    p = ops.relu(a)
    q = ops.relu_(a)
    ops.add_(p, q)


def a_store_of_the_changed_tensor(a, b, c):
    a += 1
    store(a)


def overlapping_slices(a, b, c):
    p, q = ops.slice_(a, 0, 2), ops.slice_(a, 1, 3)
    ops.relu_(p)
    ops.gelu_(q)


def a_read_through_a_view(a, b, c):
    p = ops.reshape_(a, (2, 2))
    y = p + 1
    ops.relu_(a)
    return y


def a_change_through_a_view(a, b, c):
    ops.relu_(ops.reshape_(a, (2, 2)))
    return a + 1


def a_change_through_a_concatenation(a, b, c):
    ops.relu_(ops.concat_([a, b]))
    return b + 1


def slices_of_a_transposed_view(a, b, c):
    rows = ops.reshape_(a, (2, 2))
    columns = ops.transpose_(rows)
    ops.relu_(ops.slice_(rows, 0, 1))  # a[0], a[1]
    ops.relu_(ops.slice_(columns, 0, 1))  # a[0], a[2]


def a_call_that_reads(a, b, c):
    graph = popxl.gir().create_graph(lambda x: x + 1, a)
    ops.relu_(a)
    return ops.call(graph, a)


def a_read_of_the_tensor_behind_a_result(a, b, c):
    p = ops.relu_(a)
    ops.gelu_(p)
    return a + 1


def a_scale_from_the_changed_tensor(a, b, c):
    ops.scaled_add_(a, b)
    return ops.scaled_add(c, a)


def a_loop_that_reads(a, b, c):
    ops.repeat(popxl.gir().create_graph(lambda x: x + 1, a), 2, a)
    ops.relu_(a)


def a_conditional_that_reads(a, b, c):
    graph = popxl.gir().create_graph(lambda x: x + 1, a)
    ops.conditional(popxl.constant(True), graph, graph, [b], [a])
    ops.relu_(a)


def a_tensor_that_is_printed(a, b, c):
    ops.print_tensor(a)
    ops.relu_(a)


def a_change_that_reads_another(a, b, c):
    b += a
    ops.relu_(a)


def a_change_through_a_transposed_view(a, b, c):
    ops.relu_(ops.reshape_(a, (2, 2)).T_)
    return a + 1


def a_read_through_detached_views(a, b, c):
    y = ops.detach_(ops.flatten_(a)) * 2
    ops.relu_(a)
    return y


def an_update_by_an_optimiser(a, b, c):
    ops.var_updates.adam_var_update(a, b, popxl.constant(1.0), popxl.constant(1.0))
    return a + 1


def a_cell_that_is_overwritten(a, b, c):
    y = a + b
    zero = popxl.constant([0], popxl.uint32)
    ops.dynamic_update_(a, zero, popxl.constant([1.0]), axes=[0], sizes=[1], no_overlap=True)
    return y


AMBIGUOUS = [
    two_modifiers,
    a_modifier_whose_result_is_used,
    the_same_change_twice,
    two_changes_of_one_tensor,
    an_overwrite_and_a_read,
    an_overwrite_whose_result_is_used,
    a_copy_and_a_change,
    a_store_of_the_changed_tensor,
    overlapping_slices,
    a_read_through_a_view,
    a_change_through_a_view,
    a_change_through_a_concatenation,
    slices_of_a_transposed_view,
    a_call_that_reads,
    a_read_of_the_tensor_behind_a_result,
    a_scale_from_the_changed_tensor,
    a_loop_that_reads,
    a_conditional_that_reads,
    a_tensor_that_is_printed,
    a_change_that_reads_another,
    a_change_through_a_transposed_view,
    a_read_through_detached_views,
    an_update_by_an_optimiser,
    a_cell_that_is_overwritten,
]


def a_chain_of_changes(a, b, c):
    ops.gelu_(ops.relu_(a))


def a_change_of_a_new_tensor(a, b, c):
    p = ops.relu(a)
    q = ops.relu(a)
    ops.add_(p, q)


def a_store_of_the_result(a, b, c):
    store(ops.add_(a, b))


def disjoint_slices(a, b, c):
    p, q = ops.slice_(a, 0, 2), ops.slice_(a, 2, 4)
    ops.relu_(p)
    ops.gelu_(q)


def disjoint_slices_of_a_transposed_view(a, b, c):
    columns = ops.transpose_(ops.reshape_(a, (2, 2)))
    ops.relu_(ops.slice_(columns, 0, 1))  # a[0], a[2]
    ops.relu_(ops.slice_(columns, 1, 2))  # a[1], a[3]
    ops.relu_(ops.slice_(b, 0, 2))
    return ops.slice_(b, 2, 4) + 1


def a_slice_of_a_concatenation(a, b, c):
    ops.relu_(ops.slice_(ops.concat_([a, b]), 4, 8))
    return a + 1


def an_update_that_depends_on_the_read(a, b, c):
    accumulate_(a, a * 2)


def a_read_by_way_of_other_ops(a, b, c):
    y = ops.slice_(a, 0, 2) + 1
    z = ops.concat([y * 2, y])
    accumulate_(a, ops.exp(z))


def a_view_alone(a, b, c):
    p = ops.reshape_(a, (2, 2))
    ops.relu_(a)
    return p


def a_call_that_writes_back(a, b, c):
    def bump(x: popxl.TensorByRef):
        ops.add_(x, popxl.constant(1.0))

    ops.call(popxl.gir().create_graph(bump, a), a)
    return a + 1  # no error is raised, although the order is not said


def a_loop_that_writes_back(a, b, c):
    def bump(x: popxl.TensorByRef):
        ops.add_(x, popxl.constant(1.0))

    ops.repeat(popxl.gir().create_graph(bump, a), 2, a)
    return a + 1


def a_step_that_an_optimiser_counts(a, b, c):
    step = popxl.variable(0.0)
    ops.var_updates.adam_updater(a, b, time_step=step, beta1=0.9, beta2=0.99, epsilon=1e-5)
    return step + 1


def a_read_of_the_other_half(a, b, c):
    y = ops.slice_(ops.concat_([a, b]), 0, 4) * 2
    ops.relu_(b)
    return y


def one_tensor_twice_in_one_op(a, b, c):
    ops.add_(a, a)


FINE = [
    a_chain_of_changes,
    a_change_of_a_new_tensor,
    a_store_of_the_result,
    disjoint_slices,
    disjoint_slices_of_a_transposed_view,
    a_slice_of_a_concatenation,
    an_update_that_depends_on_the_read,
    a_read_by_way_of_other_ops,
    a_view_alone,
    a_call_that_writes_back,
    a_loop_that_writes_back,
    a_step_that_an_optimiser_counts,
    a_read_of_the_other_half,
    one_tensor_twice_in_one_op,
]


def build(ir, program):
    with ir.main_graph:
        program(*(popxl.variable(np.arange(4.0), name=name) for name in "abc"))


@pytest.mark.parametrize("program", AMBIGUOUS)
def test_ambiguous(ir, program):
    build(ir, program)
    with pytest.raises(PopxlError, match="^Inplacing ambiguity detected"):
        check_in_place_order(ir.main_graph)


@pytest.mark.parametrize("program", AMBIGUOUS)
def test_in_sequence_settles_it(ir, program):
    with popxl.in_sequence():
        build(ir, program)
    check_in_place_order(ir.main_graph)


@pytest.mark.parametrize("program", FINE)
def test_fine(ir, program):
    build(ir, program)
    check_in_place_order(ir.main_graph)


@pytest.mark.parametrize("program", [two_modifiers, overlapping_slices, an_overwrite_and_a_read])
@pytest.mark.parametrize("levels", [1, 2])
def test_called_graphs_are_checked_too(ir, program, levels):
    def function(a, b, c):
        program(a, b, c)

    with ir.main_graph:
        vectors = [popxl.variable(np.arange(4.0), name=name) for name in "abc"]
        graph = ir.create_graph(function, *vectors)
        for _ in range(levels - 1):
            graph = ir.create_graph(lambda *ts, graph=graph: ops.call(graph, *ts), *vectors)
        check_in_place_order(ir.main_graph)  # nothing calls the graph yet
        ops.call(graph, *vectors)
    with pytest.raises(PopxlError, match=r"In graph `test_called_graphs_are_checked_too.function_subgraph\(0\)`"):
        check_in_place_order(ir.main_graph)


def test_repeated_graphs_are_checked_too(ir):
    def body(x, y):
        ops.relu_(y)
        return x + y

    with ir.main_graph:
        x = popxl.constant(1.0)
        ops.repeat(ir.create_graph(body, x, x), 2, x, x)
    with pytest.raises(PopxlError, match="^Inplacing ambiguity"):
        check_in_place_order(ir.main_graph)


def test_ops_of_one_block_are_not_ordered_after_those_of_an_earlier_one(ir):
    with ir.main_graph:
        v = popxl.variable(1.0)
        with popxl.in_sequence():
            v += 1
        with popxl.in_sequence():
            v + 1
    with pytest.raises(PopxlError, match="^Inplacing ambiguity"):
        check_in_place_order(ir.main_graph)


def test_order_from_a_chain_reaches_through_data(ir):
    """The read comes before `marker` by data, and `marker` before the change by sequence."""
    with ir.main_graph:
        v = popxl.variable(1.0)
        read = v + 1
        with popxl.in_sequence():
            read * 2
            v += 1
    check_in_place_order(ir.main_graph)


def test_a_gradient_comes_after_its_forward_call(ir):
    """The gradient of a linear function needs no result of it, and yet the update is not ambiguous."""
    with ir.main_graph:
        x, w = popxl.variable(3.0), popxl.variable(2.0)
        graph = ir.create_graph(lambda x, w: x * w, x, w)
        info = popxl.transforms.autodiff(graph)
        site = ops.call_with_info(graph, x, w)
        _, dw = ops.call(info.graph, 1.0, inputs_dict=info.inputs_dict(site))
        ops.scaled_add_(w, dw, b=-0.1)
        check_in_place_order(ir.main_graph)
        w * 2
    with pytest.raises(PopxlError, match="^Inplacing ambiguity"):
        check_in_place_order(ir.main_graph)


def test_fragments_of_the_program_are_ordered(ir):
    context = popxl.context.get_current_context()
    with ir.main_graph:
        v = popxl.variable(1.0)
        v + 1
        with context.set(execution_context=popxl.ExecutionContext.WeightsToHostFragment):
            ops.relu_(v)
    check_in_place_order(ir.main_graph)


def test_a_long_chain_of_changes(ir):
    with ir.main_graph:
        x, one = popxl.variable(0.0), popxl.constant(1.0)
        y = x
        for _ in range(1500):
            y = ops.add_(y, one)
    check_in_place_order(ir.main_graph)


def test_an_unordered_block_orders_nothing(ir):
    with ir.main_graph, popxl.in_sequence(False):
        v = popxl.variable(1.0)
        v += 1
        v + 1
    with pytest.raises(PopxlError, match="^Inplacing ambiguity"):
        check_in_place_order(ir.main_graph)


def test_the_message_names_both_ops_and_the_way_out(ir):
    with ir.main_graph:
        weight = popxl.variable(1.0, name="weight")
        y = weight * 2.0
        ops.relu_(weight)
    with pytest.raises(PopxlError) as error:
        check_in_place_order(ir.main_graph)
    text = str(error.value)
    assert "changes `weight` in place" in text
    assert "ReluInplace.101 (`ops.relu_(weight)`, test_ambiguity.py:" in text
    assert "Mul.100 (`y = weight * 2.0`, test_ambiguity.py:" in text
    assert "in_sequence" in text
    assert y.name in [t.name for t in ir.main_graph.tensors]


def test_a_session_checks_unless_told_not_to(ir):
    with ir.main_graph:
        v = popxl.variable(-1.0)
        y = v + 1
        ops.relu_(v)
        store(y)
    with pytest.raises(PopxlError, match="^Inplacing ambiguity detected"):
        popxl.Session(ir)
    ir.options.enableInplaceAmbiguityChecking = False
    with popxl.Session(ir) as session:  # the order is that of creation
        (y_now,) = session.run().values()
    assert (y_now, v.data) == (0, 0)


def test_checking_is_on_in_every_new_ir():
    assert popxl.Ir().options.enableInplaceAmbiguityChecking is True


def test_large_graphs_are_checked_quickly(ir):
    """Ten thousand ops without a change, and as many with a change each: the time is linear, or nearly."""
    with ir.main_graph, popxl.in_sequence():
        x, v = popxl.constant(1.0), popxl.variable(0.0)
        for _ in range(5000):
            ops.negate(x)
        without = seconds_to_check(ir.main_graph)
        for _ in range(5000):
            v += x
        with_changes = seconds_to_check(ir.main_graph)
    assert without < 0.1
    assert with_changes < 2


def seconds_to_check(graph: popxl.Graph) -> float:
    """Of this thread, without the garbage collector, which may be due to look at all objects there are."""
    gc.disable()
    try:
        start = time.thread_time()
        check_in_place_order(graph)
        return time.thread_time() - start
    finally:
        gc.enable()


@pytest.mark.thorough(but_each=2)
@pytest.mark.parametrize("change", [True, False])
def test_a_long_chain_of_views(ir, change):
    """Longer than Python recurses. Two elements at its end are different ones, and one of them is that of `a`."""
    with ir.main_graph:
        a = popxl.variable(np.arange(4.0), name="a")
        t = a
        for _ in range(1000):
            t = ops.reshape_(ops.reshape_(t, (2, 2)), (4,))
        ops.relu_(ops.slice_(t, 0, 1))
        y = ops.slice_(t, 0, 1) + 1 if change else ops.slice_(a, 1, 2) + 1
        store(y)
    if change:
        with pytest.raises(PopxlError, match="^Inplacing ambiguity"):
            check_in_place_order(ir.main_graph)
    else:
        for ir.options.calledGraphs in ("kept", "dispatched"):
            with popxl.Session(ir) as session:
                assert [array.tolist() for array in session.run().values()] == [[2]]


def test_a_long_chain_of_concatenations(ir):
    with ir.main_graph, popxl.in_sequence():
        parts = [popxl.variable([float(k)], name=f"x{k}") for k in range(40)]
        t = parts[0]
        for part in parts[1:]:
            t = ops.concat_([t, part])
        t += 1
        store(t)
    with popxl.Session(ir) as session:
        (found,) = session.run().values()
    assert found.tolist() == [k + 1 for k in range(40)]
    assert [part.data.tolist() for part in parts] == [[k + 1] for k in range(40)]
