"""Editing graphs: another order of ops, other ops for the same results, ops in another graph; all of it or nothing."""

import functools

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.context import get_current_context
from popxl.errors import PopxlError
from popxl.op import OpKind

F32 = popxl.float32

square_twice = OpKind("SquareTwice", lambda t: (t * t, t * t), shape=lambda t: [t.spec, t.spec], result=("a", "b"))


@pytest.fixture
def program(ir):
    """x → a = x + x → b = a * a → c = exp(b), and d = sin(x) beside; the ops by their letters."""
    with ir.main_graph:
        x = popxl.variable([1.0, 2.0], name="x")
        a = ops.add(x, x)
        b = ops.mul(a, a)
        c = ops.exp(b)
        d = ops.sin(x)
    return {name: t.producer for name, t in zip("abcd", (a, b, c, d), strict=True)}


def state(ir):
    """All that an edit that fails must leave alone."""
    return str(ir), [
        (g.ops, [(op.inputs, op.outputs, op.after) for op in g.ops], g.tensors, g.outputs, g.call_sites)
        for g in ir.graphs
    ]


# reorder --------------------------------------------------------------------------------------------------------------


def test_reorder(ir, run, program):
    a, b, c, d = program.values()
    before = ir.main_graph.ops
    ir.main_graph.reorder([d, a, b, c])
    assert ir.main_graph.ops == [d, a, b, c]
    assert before == [a, b, c, d]  # who is iterating goes on in the order that was
    assert run(ir, b.outputs[0]) == [[4.0, 16.0]]


@pytest.mark.parametrize("order", ["bacd", "abdd", "abc", "abcda", "dcba"])
def test_an_order_that_is_none(ir, program, order):
    before = state(ir)
    with pytest.raises(PopxlError, match="reorder"):
        ir.main_graph.reorder([program[name] for name in order])
    assert state(ir) == before


def test_an_op_is_not_put_before_one_that_it_follows_in_sequence(ir):
    with ir.main_graph as main:
        x = popxl.variable(1.0)
        with popxl.in_sequence():
            ops.exp(x), ops.sin(x)
    with pytest.raises(PopxlError, match=r"Exp.100\] .* has to come after .*Sin|Sin.101\] .* has to come after .*Exp"):
        main.reorder(main.ops[::-1])


def in_place(x, add_one):
    ops.exp(x)
    ops.add_(x, x)


def in_place_after(x, add_one):
    ops.add_(x, x)
    ops.exp(x)


def through_a_view(x, add_one):
    view = ops.reshape_(x, (2, 1))
    ops.exp(view)
    ops.add_(x, x)


def by_reference(x, add_one):
    ops.exp(x)
    ops.call(add_one, x)


def stores_to_one_stream(x, add_one):
    out = popxl.d2h_stream((2,), F32)
    ops.host_store(out, x)
    ops.host_store(out, x)


def a_store_and_a_call_that_stores(x, add_one):
    out = popxl.d2h_stream((2,), F32)
    graph = x.ir.create_graph(lambda t: ops.host_store(out, t), x)
    ops.host_store(out, x)
    ops.call(graph, x)


def prints(x, add_one):
    ops.print_tensor(x)
    ops.print_tensor(x)


@pytest.mark.parametrize(
    "build",
    [
        in_place,
        in_place_after,
        through_a_view,
        by_reference,
        stores_to_one_stream,
        a_store_and_a_call_that_stores,
        prints,
    ],
)
def test_ops_that_share_something_keep_their_order(ir, build):
    def add_one(t: popxl.TensorByRef):
        t += 1

    with ir.main_graph as main:
        x = popxl.variable([1.0, 2.0], name="x")
        build(x, ir.create_graph(add_one, x))
    *others, first, last = main.ops
    with pytest.raises(PopxlError, match="has to come after"):
        main.reorder([*others, last, first])
    assert main.ops == [*others, first, last]


def test_ops_that_share_nothing_need_no_order(ir):
    with ir.main_graph as main:
        x, y = popxl.variable(1.0), popxl.variable(1.0)
        ops.add_(x, x)
        ops.add_(y, y)
        for t in (x, y):
            ops.host_store(popxl.d2h_stream((), F32), t)
        ops.print_tensor(x)
    first, *others = main.ops
    main.reorder([others[0], first, others[3], others[2], others[1]])


# replace --------------------------------------------------------------------------------------------------------------


def test_replace(ir, run, program):
    main, (a, b, c, d) = ir.main_graph, program.values()
    y, main_ops = b.outputs[0], main.ops
    tensors = main.tensors
    main.replace([b], lambda lhs, rhs: ops.negate(ops.negate(ops.mul(lhs, rhs))))
    assert [op.op_type for op in main.ops] == ["Add", "Mul", "Neg", "Neg", "Exp", "Sin"]
    assert y.producer is main.ops[3] and main.ops[3].outputs == (y,) and c.inputs == (y,)
    assert main.get_tensor(y.id) is y and len(main.tensors) == len(tensors) + 2
    assert main_ops == [a, b, c, d]
    assert str(main).splitlines()[1:] == [
        "    x: f32[2]           = variable",
        "    add_out: f32[2]     = Add(x, x)",
        "    mul_out__t0: f32[2] = Mul(add_out, add_out)",
        "    negate_out: f32[2]  = Neg(mul_out__t0)",
        "    mul_out: f32[2]     = Neg(negate_out)",
        "    exp_out: f32[2]     = Exp(mul_out)",
        "    sin_out: f32[2]     = Sin(x)",
    ]
    assert run(ir, y) == [[4.0, 16.0]]


def test_a_result_may_be_used_by_the_new_ops_themselves(ir, run, program):
    b = program["b"]
    y = b.outputs[0]

    def by(lhs, rhs):
        product = ops.mul(lhs, rhs)
        ops.exp(product)
        return product

    ir.main_graph.replace([b], by)
    assert [op.op_type for op in ir.main_graph.ops] == ["Add", "Mul", "Exp", "Exp", "Sin"]
    assert ir.main_graph.ops[2].inputs == (y,)
    assert run(ir, y) == [[4.0, 16.0]]


def test_several_ops_are_replaced_by_one(ir, run):
    with ir.main_graph as main:
        x = popxl.variable([1.0, 3.0], name="x")
        y, z = ops.mul(x, x), ops.mul(x, x)
        total = y + z
    main.replace(main.ops[:2], lambda a, b, c, d: square_twice(a))
    assert [op.op_type for op in main.ops] == ["SquareTwice", "Add"]
    assert main.ops[0].outputs == (y, z)
    assert run(ir, y, z, total) == [[1.0, 9.0], [1.0, 9.0], [2.0, 18.0]]


def test_new_ops_are_where_the_old_one_was(ir):
    with ir.main_graph as main, popxl.ipu(2), popxl.io_tiles(), popxl.name_scope("enc"):
        x = popxl.variable(1.0)
        y = ops.mul(x, x)
    with popxl.ipu(1), popxl.name_scope("elsewhere"), popxl.in_sequence():
        main.replace([y.producer], lambda lhs, rhs: ops.exp(ops.exp(lhs)))
    assert [(op.name, op.ipu, op.io_tiles) for op in main.ops] == [("enc/Exp", 2, True)] * 2
    assert (y.ipu, y.tile_set, y.producer.inputs[0].name) == (2, "io", "enc/exp_out")


def test_sequences_hold_after_an_edit(ir):
    """Ops that came before and after, also those that are created later in the same block."""
    with ir.main_graph as main:
        x = popxl.variable(1.0)
        with popxl.in_sequence():
            first = ops.exp(x).producer
            middle = ops.mul(x, x).producer
            after = ops.sin(x).producer
            main.replace([after], lambda t: ops.cos(t))
            main.replace([middle], lambda lhs, rhs: ops.negate(ops.abs(lhs)))
            ops.tanh(x)
    _, absolute, negate, cos, tanh = main.ops
    assert (absolute.after, negate.after) == ((first.id,), (first.id,))
    assert (cos.after, tanh.after) == ((absolute.id, negate.id), (cos.id,))


def test_calls_are_counted(ir):
    graph = ir.create_graph(lambda x: ops.exp(x), popxl.TensorSpec((), F32))
    with ir.main_graph as main:
        x = popxl.variable(1.0)
        y = ops.exp(x)
    main.replace([y.producer], lambda t: ops.call(graph, t))
    assert graph.call_sites == main.ops and main.called_graphs == (graph,)
    main.replace(main.ops, lambda t: ops.exp(t))
    assert graph.call_sites == [] and main.called_graphs == ()


def test_hooks_see_new_ops_when_all_is_done(ir, program):
    seen = []
    y = program["b"].outputs[0]
    handle = get_current_context().register_op_created_hook(
        lambda op: seen.append((op.op_type, op.outputs == (y,), y.producer.op_type, op in ir.main_graph.ops))
    )
    ir.main_graph.replace([program["b"]], lambda lhs, rhs: ops.exp(ops.sin(lhs)))
    with pytest.raises(PopxlError):
        ir.main_graph.replace([program["c"]], lambda t: ops.reshape(t, (1, 2)))
    get_current_context().remove_op_created_hook(handle)
    assert seen == [("Sin", False, "Exp", True), ("Exp", True, "Exp", True)]


BAD = {
    "nothing": lambda x: None,
    "too many": lambda x: (ops.exp(x), ops.exp(x)),
    "an old tensor": lambda x: x,
    "no tensor": lambda x: 1.0 and [1.0],
    "another shape": lambda x: ops.reshape(x, (1, 2)),
    "another dtype": lambda x: ops.cast(x, popxl.float16),
    "a view": lambda x: ops.reshape_(x, (2,)),
    "a changed operand": lambda x: ops.exp_(x),
    "an error": lambda x: ops.exp(x) + 1.0 / 0,
    "an op that fails": lambda x: ops.exp(x) @ ops.exp(x) @ popxl.constant(1.0),
}


@pytest.mark.parametrize("by", BAD.values(), ids=BAD)
def test_a_replacement_that_does_not_fit(ir, program, by):
    before = state(ir)
    with pytest.raises((PopxlError, ZeroDivisionError)):
        ir.main_graph.replace([program["c"]], by)
    assert state(ir) == before


def test_ops_that_cannot_be_replaced(ir, program):
    a, b, c, d = program.values()
    with ir.main_graph:
        view = ops.reshape_(a.outputs[0], (1, 2)).producer
    other = ir.create_graph(lambda x: ops.exp(x), popxl.TensorSpec((2,), F32))
    before = state(ir)
    for chosen in ([], [a, c], [b, a], [a, b], [other.ops[0]], [view]):
        with pytest.raises(PopxlError, match="replace"):
            ir.main_graph.replace(chosen, lambda *ts: [ops.exp(t) for t in ts])
    assert state(ir) == before


def test_new_ops_need_nothing_that_is_made_later(ir, program):
    before = state(ir)
    with pytest.raises(PopxlError, match="made later"):
        ir.main_graph.replace([program["a"]], lambda *ts: ops.exp(program["d"].outputs[0]))
    assert state(ir) == before


def test_an_op_that_shares_storage_is_replaced_by_one_that_shares_the_same(ir, run):
    with ir.main_graph as main, popxl.in_sequence():
        x = popxl.variable(1.0, name="x")
        y = ops.add_(x, x)
        z = y + 1
    with pytest.raises(PopxlError, match="storage"):
        main.replace([y.producer], lambda lhs, rhs: ops.add(lhs, rhs))
    main.replace([y.producer], lambda lhs, rhs: ops.scaled_add_(lhs, rhs, b=2.0))
    assert run(ir, y, z) == [3.0, 4.0]


def test_an_edited_program_is_saved_and_loaded_in_its_order(ir, tmp_path, program):
    ir.main_graph.replace([program["b"]], lambda lhs, rhs: functools.reduce(ops.add, [lhs, rhs, lhs]))
    ir.save(tmp_path / "program")
    loaded = popxl.Ir.load(tmp_path / "program")
    assert loaded.main_graph.print_schedule() == ir.main_graph.print_schedule()


# move -----------------------------------------------------------------------------------------------------------------


def test_move(ir, run, program):
    """Two ops go; a call of their graph makes what they made."""
    main, (a, b, c, d) = ir.main_graph, program.values()
    part = ir.create_empty_graph("part")
    x, y = a.inputs[0], c.outputs[0]
    main.move([c, b], part, {a.outputs[0]: part.add_input(x.spec, "a")})
    part.add_output(y)
    assert (main.ops, part.ops, b.graph, y.graph, y.producer) == ([a, d], [b, c], part, part, c)
    assert y not in main.tensors and y.id == "part_subgraph(0)/exp_out" and part.get_tensor(y.id) is y
    assert str(part).splitlines()[1:] == [
        "    mul_out: f32[2] = Mul(a, a)",
        "    exp_out: f32[2] = Exp(mul_out)",
        "    return exp_out",
    ]
    with main:
        (result,) = ops.call(part, a.outputs[0])
        with pytest.raises(ValueError, match="part"):
            ops.sin(y)
    np.testing.assert_allclose(run(ir, result)[0], np.exp([4.0, 16.0]), rtol=1e-6)


def test_a_moved_tensor_gets_a_free_name(ir, program):
    part = ir.create_empty_graph("part")
    twin = part.add_input(popxl.TensorSpec((2,), F32), "sin_out")
    d = program["d"]
    ir.main_graph.move([d], part, {d.inputs[0]: twin})
    assert d.outputs[0].name.startswith("sin_out__t") and {*part.tensors} == {twin, d.outputs[0]}


def test_moved_ops_keep_calls_and_aliases(ir, run):
    graph = ir.create_graph(lambda x: ops.exp(x), popxl.TensorSpec((), F32))
    with ir.main_graph as main:
        x = popxl.variable(1.0)
        call = ops.call_with_info(graph, x)
        changed = ops.add_(call.outputs[0], x)
        again = ops.scaled_add_(changed, x, b=-2.0)
    part = ir.create_empty_graph("part")
    inner = part.add_input(x.spec, "x")
    main.move(main.ops, part, {x: inner})
    assert main.ops == [] and graph.call_sites == [call.op] and call.inputs == (inner,)
    assert again.origin is call.outputs[0] and main.called_graphs == () and part.called_graphs == (graph,)
    part.add_output(call.outputs[0])
    with main:
        (result,) = ops.call(part, x)
    np.testing.assert_allclose(run(ir, result)[0], np.e - 1, rtol=1e-6)


def test_sequences_hold_after_a_move(ir):
    """Each graph keeps the order that it had by way of ops of the other, also for ops created later."""
    part = ir.create_empty_graph("part")
    with ir.main_graph as main:
        x = popxl.variable(1.0)
        with popxl.in_sequence():
            first, goes, second, goes_too = (f(x).producer for f in (ops.exp, ops.sin, ops.cos, ops.tanh))
            main.move([goes, goes_too], part, {x: part.add_input(x.spec, "x")})
            last = ops.abs(x).producer
    assert (first.after, second.after, last.after) == ((), (first.id,), (second.id,))
    assert (goes.after, goes_too.after) == ((), (goes.id,))


def bad_moves(ir, program):
    """What is moved, where to, and what is given in place of `x`; by what is wrong."""
    main, part = ir.main_graph, ir.create_empty_graph("part")
    a, _, _, d = program.values()
    x, twin = d.inputs[0], part.add_input(popxl.TensorSpec((2,), F32), "x")
    called = ir.create_graph(lambda t: ops.exp(t), twin)
    with main:
        ops.call(called, x)
    of_another = ir.create_empty_graph().add_input(x.spec)
    elsewhere = popxl.Ir().main_graph
    return {
        "nothing is given": ([d], part, {}, "`given` has to say"),
        "a tensor of another graph is given": ([d], part, {x: of_another}, "`given` has to say"),
        "another shape is given": ([d], part, {x: part.add_input(popxl.TensorSpec((), F32))}, "`given` has to say"),
        "a result is needed": ([a], part, {x: twin}, "stays in the main graph and needs"),
        "not of the graph": ([d, called.ops[0]], part, {x: twin}, "are not ops of the main graph"),
        "a graph that is called": ([d], called, {x: called.inputs[0]}, "one that nothing calls"),
        "the same graph": ([d], main, {x: x}, "another graph of the same Ir"),
        "of another Ir": ([d], elsewhere, {x: twin}, "another graph of the same Ir"),
    }


@pytest.mark.parametrize(
    "mistake",
    [
        "nothing is given",
        "a tensor of another graph is given",
        "another shape is given",
        "a result is needed",
        "not of the graph",
        "a graph that is called",
        "the same graph",
        "of another Ir",
    ],
)
def test_a_move_that_cannot_be(ir, program, mistake):
    moved, into, given, message = bad_moves(ir, program)[mistake]
    before = state(ir)
    with pytest.raises(PopxlError, match=message):
        ir.main_graph.move(moved, into, given)
    assert state(ir) == before


def test_an_output_stays(ir):
    graph = ir.create_graph(lambda x: ops.exp(x), popxl.TensorSpec((), F32))
    part = ir.create_empty_graph()
    given = {graph.inputs[0]: part.add_input(graph.inputs[0].spec)}
    before = state(ir)
    with pytest.raises(PopxlError, match=r"are outputs of graph .*; they have to stay"):
        graph.move(graph.ops, part, given)
    assert state(ir) == before


# remove ---------------------------------------------------------------------------------------------------------------


def test_remove(ir, run, program):
    a, b, c, d = program.values()
    ir.main_graph.remove([c, b])
    assert ir.main_graph.ops == [a, d]
    assert run(ir, a.outputs[0]) == [[2.0, 4.0]]


def test_sequences_hold_after_a_removal(ir):
    with ir.main_graph as main, popxl.in_sequence():
        x = popxl.variable([1.0, 2.0], name="x")
        first, second, third = (ops.add(x, x).producer for _ in range(3))
    main.remove([second])
    assert third.after == (first.id,)
    with pytest.raises(PopxlError, match="reorder"):
        main.reorder([third, first])


def test_calls_of_removed_ops_are_not_counted(ir):
    with ir.main_graph as main:
        x = popxl.variable([1.0, 2.0], name="x")
        graph = ir.create_graph(lambda x: x + 1, x)
        site = ops.call_with_info(graph, x)
    main.remove([site.op])
    assert graph.call_sites == []


@pytest.mark.parametrize("names", ["a", "bd"])
def test_ops_that_are_needed_stay(ir, program, names):
    before = state(ir)
    with pytest.raises(PopxlError, match="remove: .*needs"):
        ir.main_graph.remove([program[name] for name in names])
    assert state(ir) == before


def test_outputs_and_ops_of_other_graphs_stay(ir, program):
    graph = ir.create_graph(lambda x: x + 1, popxl.TensorSpec((2,), F32))
    before = state(ir)
    with pytest.raises(PopxlError, match="are outputs of"):
        graph.remove([graph.ops[-1]])
    with pytest.raises(PopxlError, match="are not ops of"):
        ir.main_graph.remove([graph.ops[-1]])
    assert state(ir) == before
