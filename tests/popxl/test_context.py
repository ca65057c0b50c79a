"""Where ops go and what they pick up: the graph stack, placement, name scopes, order, hooks; also after errors."""

import itertools
import threading

import pytest

import popxl
from popxl import ops
from popxl.context import get_current_context

# The graph stack ------------------------------------------------------------------------------------------------------


def test_short_names():
    assert (popxl.gcg, popxl.gmg, popxl.gir) == (popxl.get_current_graph, popxl.get_main_graph, popxl.get_ir)


def test_nothing_is_current_outside():
    for ask in (popxl.gcg, popxl.gmg, popxl.gir):
        with pytest.raises(RuntimeError, match="no current graph"):
            ask()
    context = get_current_context()
    for name in ("graph", "main_graph", "ir"):
        with pytest.raises(RuntimeError):
            getattr(context, name)


def test_the_first_graph_entered_may_be_any(ir):
    sub = ir.create_empty_graph("s")
    with sub as entered:
        assert entered is sub
        assert (popxl.gcg(), popxl.gmg(), popxl.gir()) == (sub, ir.main_graph, ir)
        with ir.main_graph, sub, sub:
            assert popxl.gcg() is sub
        assert popxl.gcg() is sub
    with pytest.raises(RuntimeError):
        popxl.gcg()


def test_graphs_of_two_irs_do_not_nest(ir):
    with ir.main_graph:
        with pytest.raises(RuntimeError, match="is current"):
            with popxl.Ir().main_graph:
                pass
        assert popxl.gcg() is ir.main_graph
        with pytest.raises(RuntimeError):
            popxl.Ir().create_graph(lambda: None)
        assert popxl.gcg() is ir.main_graph


def test_a_graph_is_left_by_an_exception(ir):
    with pytest.raises(KeyError), ir.main_graph, ir.create_empty_graph():
        raise KeyError
    with pytest.raises(RuntimeError):
        popxl.gcg()


def test_an_ir_without_a_name():
    with popxl.Ir().main_graph as main:
        x = popxl.variable(1.0)
    assert (x.graph, x.ir) == (main, main.ir)


def test_push_and_pop(ir):
    context = get_current_context()
    context.push_graph(ir.main_graph)
    context.push_name_scope("a")
    assert (popxl.gcg(), context.name_scopes) == (ir.main_graph, ["a"])
    context.name_scopes.append("b")  # a copy
    context.pop_name_scope()
    context.pop_graph()
    assert context.name_scopes == []
    with pytest.raises(RuntimeError):
        popxl.gcg()


# Settings -------------------------------------------------------------------------------------------------------------

SETTINGS = {
    "ipu": (lambda: popxl.ipu(3), lambda: get_current_context().ipu_id),
    "io_tiles": (popxl.io_tiles, lambda: get_current_context().io_tile_set),
    "name_scope": (lambda: popxl.name_scope("enc"), lambda: get_current_context().name_scopes),
    "in_sequence": (popxl.in_sequence, lambda: get_current_context().in_sequence),
    "in_sequence(False)": (lambda: popxl.in_sequence(False), lambda: get_current_context().in_sequence),
    "frame_offset": (
        lambda: popxl.context.debug_context_frame_offset(1),
        lambda: get_current_context().frame_offset,
    ),
}
each_setting = pytest.mark.parametrize(("enter", "read"), SETTINGS.values(), ids=SETTINGS)


@each_setting
def test_a_setting_is_put_back(enter, read):
    before = read()
    with enter():
        inside = read()
        assert inside != before
    assert read() == before
    with pytest.raises(KeyError), enter():
        raise KeyError
    assert read() == before
    with pytest.raises(KeyError), enter():
        with enter():
            pass
        assert read() == inside
        raise KeyError
    assert read() == before


@each_setting
def test_a_setting_as_a_decorator(enter, read):
    before = read()

    @enter()
    def function(depth):
        if depth:
            function(depth - 1)
        return read()

    assert function(2) != before
    assert read() == before


@each_setting
def test_a_setting_is_of_one_thread(enter, read):
    seen = []
    with enter():
        thread = threading.Thread(target=lambda: seen.append(read()))
        thread.start()
        thread.join()
    assert seen == [read()]


def test_threads_build_side_by_side(ir):
    """Two threads, each in a graph of its own at the same time: a barrier makes them overlap."""
    barrier = threading.Barrier(2, timeout=60)
    graphs = [ir.create_empty_graph(), popxl.Ir().main_graph]
    names = [[], []]

    def build(k):
        with graphs[k], popxl.name_scope(f"thread{k}"), popxl.ipu(k), popxl.in_sequence():
            barrier.wait()
            for _ in range(3):
                x = popxl.constant(1.0, name="x")
                barrier.wait()
                y = ops.exp(x)
                names[k].append((y.graph, y.name.split("/")[0], y.ipu, len(y.producer.after)))

    threads = [threading.Thread(target=build, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert names == [[(graphs[k], f"thread{k}", k, after) for after in (0, 1, 1)] for k in range(2)]


def test_what_the_contexts_yield(ir):
    with popxl.ipu(2) as ipu, popxl.io_tiles() as tiles, popxl.in_sequence(False) as mode:
        assert (ipu, tiles, mode) == (2, None, False)
    with popxl.in_sequence("pass") as mode:
        assert mode is None
    with popxl.name_scope("a"), popxl.name_scope("b") as scopes:
        assert scopes == ["a", "b"]
    with popxl.context.debug_context_frame_offset(1), popxl.context.debug_context_frame_offset(2) as offset:
        assert offset >= 3


def test_placement(ir):
    with ir.main_graph:
        x = popxl.variable(1.0)
        plain = x + 1
        with popxl.ipu(2):
            there = ops.exp(plain)
            with popxl.ipu(1), popxl.io_tiles():
                elsewhere = ops.exp(plain)
    assert [(t.ipu, t.tile_set) for t in (plain, there, elsewhere)] == [(0, "compute"), (2, "compute"), (1, "io")]


def test_name_scopes_prefix_ops_and_tensors(ir):
    with ir.main_graph, popxl.name_scope("enc"):
        v = popxl.variable(0.0, name="w")
        with popxl.name_scope("block"):
            tensors = [popxl.constant(1.0, name="k"), popxl.graph_input((), popxl.float32, "i"), v + v]
            stream = popxl.h2d_stream((), popxl.float32, "s")
    assert (v.name, v.id) == ("enc/w", "enc/w")
    assert [t.name for t in tensors] == ["enc/block/k", "enc/block/i", "enc/block/add_out"]
    assert stream.tensor_id == "enc/block/s"
    assert ir.main_graph.ops[-1].name == "enc/block/Add"


def test_settings_hold_while_a_graph_is_built(ir):
    with ir.main_graph, popxl.name_scope("s"), popxl.ipu(1), popxl.in_sequence():
        graph = ir.create_graph(lambda x: ops.exp(ops.exp(x)), popxl.TensorSpec((), popxl.float32))
    first, second = graph.ops
    assert (first.name, first.ipu, second.after) == ("s/Exp", 1, (first.id,))
    assert graph.inputs[0].name == "s/x"


# Order ----------------------------------------------------------------------------------------------------------------


def op(label):
    """An op, called `label`."""
    return ops.init((), popxl.float32, label)


def order(graph):
    """For each op, by its label, the labels of all that come before it, also by way of others."""
    label = {o.id: o.outputs[0].name for o in graph.ops}
    before = {}
    for o in graph.ops:
        direct = [label[i] for i in o.after]
        before[label[o.id]] = set(direct).union(*(before[d] for d in direct))
    return {name: "".join(sorted(names)) for name, names in before.items()}


def chain():
    with popxl.in_sequence():
        for label in "abc":
            op(label)


def unordered():
    with popxl.in_sequence(False):
        for label in "abc":
            op(label)


def no_order():
    for label in "abc":
        op(label)


def an_unordered_block_in_a_chain():
    with popxl.in_sequence():
        op("a")
        with popxl.in_sequence(False):
            op("b")
            op("c")
        op("d")


def two_unordered_blocks_in_a_chain():
    with popxl.in_sequence():
        with popxl.in_sequence(False):
            op("a")
            op("b")
        with popxl.in_sequence(False):
            op("c")
            op("d")
        op("e")


def a_chain_in_an_unordered_block():
    with popxl.in_sequence(False):
        op("a")
        with popxl.in_sequence():
            op("b")
            op("c")
        op("d")
        op("e")


def three_levels():
    with popxl.in_sequence():
        op("a")
        with popxl.in_sequence(False):
            op("b")
            with popxl.in_sequence():
                op("c")
                op("d")
            op("e")
            op("f")
        op("g")


def a_chain_that_ends_with_an_unordered_block():
    with popxl.in_sequence(False):
        op("a")
        with popxl.in_sequence():
            op("b")
            with popxl.in_sequence(False):
                op("c")
                op("d")
        op("e")
        with popxl.in_sequence(), popxl.in_sequence(False):
            op("f")
        op("g")
        with popxl.in_sequence():
            pass
        op("h")


def a_chain_in_a_chain():
    with popxl.in_sequence():
        op("a")
        with popxl.in_sequence():
            op("b")
        op("c")


def an_unordered_block_in_an_unordered_block():
    with popxl.in_sequence(False):
        op("a")
        with popxl.in_sequence(False):
            op("b")
        op("c")


def a_pass_block():
    with popxl.in_sequence():
        op("a")
        op("b")
        with popxl.in_sequence("pass"):
            op("c")
            op("d")
        op("e")
        op("f")


def blocks_side_by_side():
    with popxl.in_sequence():
        op("a")
    with popxl.in_sequence():
        op("b")
        op("c")


def a_block_left_by_an_exception():
    with popxl.in_sequence():
        op("a")
        try:
            with popxl.in_sequence(False):
                op("b")
                raise KeyError
        except KeyError:
            pass
        op("c")


ORDERS = [
    (chain, {"b": "a", "c": "ab"}),
    (unordered, {}),
    (no_order, {}),
    (an_unordered_block_in_a_chain, {"b": "a", "c": "a", "d": "abc"}),
    (two_unordered_blocks_in_a_chain, {"c": "ab", "d": "ab", "e": "abcd"}),
    (a_chain_in_an_unordered_block, {"b": "a", "c": "ab", "d": "abc", "e": "abc"}),
    (three_levels, {"b": "a", "c": "ab", "d": "abc", "e": "abcd", "f": "abcd", "g": "abcdef"}),
    (
        a_chain_that_ends_with_an_unordered_block,
        {"b": "a", "c": "ab", "d": "ab", "e": "abcd", "f": "abcde", "g": "abcdef", "h": "abcdef"},
    ),
    (a_chain_in_a_chain, {"b": "a", "c": "ab"}),
    (an_unordered_block_in_an_unordered_block, {}),
    (a_pass_block, {"b": "a", "f": "e"}),
    (blocks_side_by_side, {"c": "b"}),
    (a_block_left_by_an_exception, {"b": "a", "c": "ab"}),
]


@pytest.mark.parametrize(("program", "expected"), ORDERS, ids=[program.__name__ for program, _ in ORDERS])
def test_order(ir, program, expected):
    with ir.main_graph:
        program()
    found = order(ir.main_graph)
    assert {name: before for name, before in found.items() if before} == expected


def test_each_graph_has_a_chain_of_its_own(ir):
    with ir.main_graph, popxl.in_sequence():
        op("a")
        sub = ir.create_graph(lambda: (op("x"), op("y")))
        op("b")
    assert order(ir.main_graph) == {"a": "", "b": "a"}
    assert order(sub) == {"x": "", "y": "x"}


def test_ops_of_two_execution_contexts_are_never_linked(ir):
    with ir.main_graph, popxl.in_sequence():
        op("a")
        with get_current_context().set(execution_context=popxl.ExecutionContext.WeightsFromHostFragment):
            op("x")
            op("y")
        op("b")
    assert order(ir.main_graph) == {"a": "", "x": "", "y": "x", "b": "a"}


def test_modes(ir):
    context = get_current_context()
    assert context.in_sequence is None
    for mode, seen in ((True, True), (False, False), ("pass", None)):
        with popxl.in_sequence(mode):
            assert context.in_sequence is seen
    with pytest.raises(AttributeError):
        del context.in_sequence
    context.in_sequence = False
    assert context.in_sequence is False
    context.in_sequence = None


def test_none_is_no_mode():
    with pytest.raises(TypeError, match="`None` cannot be passed to "):
        with popxl.in_sequence(None):
            pass


@pytest.mark.parametrize("mode", ["chain", 2, "True"])
def test_an_unknown_mode_is_found_by_the_first_op(ir, mode):
    with ir.main_graph:
        with popxl.in_sequence(mode):
            popxl.constant(1.0)
            with pytest.raises(ValueError, match="unknown"):
                op("a")
        op("b")
    assert [o.outputs[0].name for o in ir.main_graph.ops] == ["b"]


# Hooks ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def hooks():
    """Registers hooks, and removes those that are left at the end of a test."""
    handles = []
    yield handles
    for handle in handles:
        get_current_context().remove_op_created_hook(handle)


def test_hooks_see_the_ops_of_their_graph(ir, hooks):
    seen, sub_seen, all_seen = [], [], []
    sub = ir.create_empty_graph()
    hooks += [
        ir.main_graph.register_op_created_hook(lambda op: seen.append(op.op_type)),
        sub.register_op_created_hook(lambda op: sub_seen.append(op.op_type)),
        get_current_context().register_op_created_hook(lambda op: all_seen.append(op.op_type)),
    ]
    with ir.main_graph:
        x = popxl.variable(1.0)
        popxl.constant(1.0)
        popxl.h2d_stream((), popxl.float32)
        popxl.graph_input((), popxl.float32)
        assert all_seen == []
        ops.exp(x)
        with sub:
            ops.init((), popxl.float32)
        ops.call(sub)
    assert (seen, sub_seen, all_seen) == (["Exp", "Call"], ["Init"], ["Exp", "Init", "Call"])


def test_hooks_run_in_the_order_of_registration_and_see_the_whole_op(ir, hooks):
    seen = []
    for k in range(3):
        hooks.append(ir.main_graph.register_op_created_hook(lambda op, k=k: seen.append((k, op.id, op.after))))
    with ir.main_graph, popxl.in_sequence():
        op("a")
        op("b")
    assert seen == [*((k, 100, ()) for k in range(3)), *((k, 101, (100,)) for k in range(3))]


def test_handles(ir, hooks):
    first = ir.main_graph.register_op_created_hook(print)
    second = popxl.Ir().main_graph.register_op_created_hook(print)
    assert 1 <= first < second
    ir.create_empty_graph().remove_op_created_hook(second)  # any graph removes any handle
    get_current_context().remove_op_created_hook(first)
    with pytest.raises(ValueError, match="no op-created hook"):
        ir.main_graph.remove_op_created_hook(first)
    with pytest.raises(ValueError):
        get_current_context().remove_op_created_hook(second)


def test_hooks_can_be_held_back(ir, hooks):
    seen = []
    context = get_current_context()
    hooks.append(context.register_op_created_hook(lambda op: seen.append(op.outputs[0].name)))
    with ir.main_graph:
        with context.defer_hooks():
            op("a")
            with pytest.raises(KeyError), context.defer_hooks():
                op("b")
                raise KeyError
            with context.defer_hooks():
                op("c")
            op("d")
            assert seen == []
        op("e")
    assert seen == ["a", "c", "d", "e"]


# Source lines ---------------------------------------------------------------------------------------------------------


def test_an_op_knows_the_line_that_made_it(ir):
    with ir.main_graph:
        a, b = popxl.variable(1.0), popxl.variable(1.0)
        made = [
            a + b,
            ops.add(a, b),
            a.reshape((1,)),
            -a,
        ]
    sources = [t.producer.source for t in made]
    assert [s.text for s in sources] == ["a + b,", "ops.add(a, b),", "a.reshape((1,)),", "-a,"]
    assert {s.function for s in sources} == {"test_an_op_knows_the_line_that_made_it"}
    assert {later.line - line.line for line, later in itertools.pairwise(sources)} == {1}
    assert all(s.file == __file__ for s in sources)


@pytest.mark.parametrize("offset", [0, 1])
def test_gradients_of_nested_graphs_know_the_line_of_autodiff(offset):
    """With an offset, that of a caller further out."""

    def differentiated(graph):
        with popxl.context.debug_context_frame_offset(offset):
            return popxl.transforms.autodiff(graph, return_all_grad_graphs=True)  # inner line

    ir = popxl.Ir()
    inner = ir.create_graph(lambda x: ops.sin(x) * x, popxl.TensorSpec((2,), popxl.float32))
    outer = ir.create_graph(lambda x: ops.call(inner, x)[0] * 2.0, popxl.TensorSpec((2,), popxl.float32))
    infos = differentiated(outer)  # outer line
    assert infos.keys() == {inner, outer}
    sources = {op.source.text.partition("# ")[2] for info in infos.values() for op in info.graph.ops}
    assert sources == {("inner line", "outer line")[offset]}


def test_a_helper_can_step_aside(ir):
    def helper(x):
        with popxl.context.debug_context_frame_offset(1):
            return x * 2

    with ir.main_graph:
        y = helper(popxl.variable(1.0))  # this line
    assert y.producer.source.text.endswith("# this line")


def test_a_helper_can_step_aside_as_a_decorator(ir):
    @popxl.context.debug_context_frame_offset(1)
    def helper(x):
        return x * 2

    @popxl.context.debug_context_frame_offset(1)
    def outer(x):
        return helper(x)

    with ir.main_graph:
        x = popxl.variable(1.0)
        y = helper(x)  # this line
        z = outer(x)  # that line
    assert y.producer.source.text.endswith("# this line")
    assert z.producer.source.text.endswith("# that line")


def test_where_a_function_is(tmp_path):
    here = popxl.context.get_source_location(0)  # this line
    assert (here.text.endswith("# this line"), here.file, here.function) == (True, __file__, "test_where_a_function_is")

    def caller():
        return popxl.context.get_source_location(1)

    there = caller()  # that line
    assert there.text.endswith("# that line")
    link = tmp_path / "link.py"
    script = tmp_path / "script.py"
    script.write_text("import popxl\nhere = popxl.context.get_source_location(0)\n")
    link.symlink_to(script)
    found: dict = {}
    exec(compile(link.read_text(), str(link), "exec"), found)
    assert (found["here"].file, found["here"].line, found["here"].function) == (str(script), 2, "<module>")
    with pytest.raises(IndexError, match="100000"):
        popxl.context.get_source_location(100000)


# Debug records --------------------------------------------------------------------------------------------------------


@popxl.context.op_debug_context
def squared(x, plus=None, several=()):
    y = x * x
    return y if plus is None else y + plus


@popxl.context.op_debug_context("twice_as_much")
def doubled(x):
    return [x + x, squared(x)]


@popxl.context.op_debug_context
def fails(x):
    ops.exp(x)
    raise KeyError


@popxl.context.op_debug_context
def returns(value):
    ops.init((), popxl.float32)
    return value


def test_a_record_of_the_call(ir):
    """Positional tensors come before those given by name; those in lists are not listed."""
    with ir.main_graph as main, popxl.name_scope("enc"):
        x, p = popxl.variable(1.0, name="x"), popxl.variable(1.0, name="p")
        y = squared(x, several=[p], plus=p)  # this line
    multiply, add = main.ops
    record = add.debug_record
    assert multiply.debug_record is record
    assert (record.layer, record.category, record.api, record.name) == ("popxl", "op", "squared", "enc/squared")
    assert (record.inputs, record.outputs) == (("enc/x", "enc/p"), (y.id,))
    assert record.location.text.endswith("# this line") and record.location.function == "test_a_record_of_the_call"
    assert add.source == multiply.source == record.location
    assert squared.__name__ == "squared"


def test_a_call_in_a_call_has_a_record_of_its_own(ir):
    with ir.main_graph as main:
        x = popxl.variable(1.0, name="x")
        doubled(x)  # this line
        x + x  # and this
    outer, inner, plain = (op.debug_record for op in main.ops)
    assert (outer.api, outer.outputs) == ("twice_as_much", ("add_out", "mul_out"))
    assert outer.location.text.endswith("# this line")
    assert (inner.api, inner.location.text) == ("squared", "return [x + x, squared(x)]")
    assert plain.location.text.endswith("# and this")


def test_an_op_without_a_record_makes_one(ir):
    with ir.main_graph as main, popxl.name_scope("s"):
        a, b = popxl.variable(1.0, name="a"), popxl.variable(2.0, name="b")
        c = a + b  # this line
    record = main.ops[0].debug_record
    assert (record.api, record.name, record.inputs, record.outputs) == ("add", "s/add", (a.id, b.id), (c.id,))
    assert (record.layer, record.category) == ("popxl", "op")
    assert record.location.text.endswith("# this line")


def test_a_record_ends_with_its_call(ir):
    context = get_current_context()
    with ir.main_graph as main:
        x = popxl.variable(1.0)
        with pytest.raises(KeyError):
            fails(x)
        assert context.debug_record is None
        ops.exp(x)  # this line
    assert [op.debug_record.api for op in main.ops] == ["fails", "exp"]
    assert main.ops[0].debug_record.outputs is None
    assert main.ops[1].source.text.endswith("# this line")


def test_what_a_function_may_return(ir):
    with ir.main_graph as main:
        x, y = popxl.variable(1.0, name="x"), popxl.variable(1.0, name="y")
        values = [x, (x, y), [y], {x: 1}, "xy", None, 1.0, (t for t in (x, y))]
        assert [returns(value) for value in values] == values
    assert list(values[-1]) == [x, y]  # nobody else has taken them
    outputs = [op.debug_record.outputs for op in main.ops]
    assert outputs == [("x",), ("x", "y"), ("y",), ("x",), (), None, None, None]


def test_a_decorated_function_can_be_passed_over(ir):
    @popxl.context.debug_context_frame_offset(1)
    def layer(x):
        return squared(x)

    with ir.main_graph as main:
        layer(popxl.variable(1.0))  # this line
    assert main.ops[0].debug_record.location.text.endswith("# this line")


# Private names --------------------------------------------------------------------------------------------------------


def test_the_execution_context(ir):
    fragment = popxl.ExecutionContext.WeightsToHostFragment
    with ir.main_graph as main:
        with pytest.raises(KeyError), popxl.context._execution_context(fragment) as entered:
            op("a")
            raise KeyError
        op("b")
    assert entered is fragment
    assert [o.execution_context for o in main.ops] == [fragment, popxl.ExecutionContext.Normal]


def test_the_names_for_annotations():
    assert popxl.context.Fn is not None
    assert popxl.context.InSequenceKey is not None
