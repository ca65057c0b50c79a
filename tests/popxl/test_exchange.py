"""Merging what crosses to the outside: which ops are left, in which order, and numbers that do not move."""

import contextlib

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import popxl
from popxl import ops
from popxl.context import get_current_context
from popxl.errors import ApplicationRuntimeError, PopxlError
from popxl.op import Exchange, OpKind, Overwrites, Requirement
from popxl.ops.exchange import multi_exchange_kind
from popxl.transforms import io_tile_exchange, merge_exchange

F32 = popxl.float32

some_slots_are_left = pytest.mark.filterwarnings("ignore:Session. a run:popxl.errors.PopxlWarning")

# Exchanges with something that is no stream: `buffer` is only a name here.
fetch = OpKind(
    "Fetch",
    lambda t, offset=None, *, buffer: t + (0 if offset is None else offset),
    shape=lambda t, offset=None, *, buffer: t.spec,
    traits=[Requirement("offset", lambda n: n < 3, "has to be below 3"), Exchange("buffer")],
    gradient=None,
)
fetch_ = OpKind(
    "FetchInplace",
    lambda t, *, buffer: jnp.full(t.shape, float(len(buffer)), t.dtype),
    shape=lambda t, *, buffer: t.spec,
    traits=[Overwrites("t"), Exchange("buffer")],
    gradient=None,
)


def types(graph):
    return [op.op_type for op in graph.ops]


def parts(graph):
    """For each exchange, the parts."""
    return [[part.op_type for part in op.parts] for op in graph.ops if op.op_type == "MultiExchange"]


def load(name="in", shape=(2,)):
    return ops.host_load(popxl.h2d_stream(shape, F32, name))


def store(t):
    ops.host_store(popxl.d2h_stream(t.shape, t.dtype, f"{t.name}_out"), t)


@pytest.fixture
def main(ir):
    """The main graph, entered, with the variables `w` and `v`; nothing is in sequence."""
    with ir.main_graph as graph:
        popxl.variable([1.0, 2.0], name="w")
        popxl.variable([3.0, 4.0], name="v")
        yield graph


@pytest.fixture
def w(main):
    return main.get_tensor("w")


@pytest.fixture
def v(main):
    return main.get_tensor("v")


def test_the_same_function_by_both_names():
    from popxl.transforms.merge_exchange import io_tile_exchange as second
    from popxl.transforms.merge_exchange import merge_exchange as first

    assert (first, second) == (popxl.transforms.merge_exchange, popxl.transforms.io_tile_exchange)


# What is left ---------------------------------------------------------------------------------------------------------


def test_a_load_and_a_store(main, w):
    store(w)
    with merge_exchange() as nothing:
        x = load()
        store(w)
    assert nothing is None
    assert types(main) == ["HostStore", "Init", "MultiExchange"]
    exchange = main.ops[-1]
    assert exchange.outputs == (x,) and x.producer is exchange
    assert exchange.inputs == (main.ops[1].outputs[0], w)
    assert parts(main) == [["HostLoad", "HostStore"]]


def test_how_it_prints(main, w):
    with popxl.ipu(1), merge_exchange():
        load()
        store(w)
    assert str(main).splitlines()[-1].partition(" = ")[2] == (
        "MultiExchange(HostLoad(in_init, stream=in), HostStore(w, stream=w_out))  @ ipu 1"
    )
    assert main.print_schedule().splitlines()[-2] == (
        "    MultiExchange.103 (%1 [(2,) float32], %2 [(2,) float32]) -> (%3 [(2,) float32])"
    )


def test_its_parts_are_the_ops_that_were(main, w):
    with merge_exchange():
        load()
        with popxl.name_scope("s"):
            ops.host_store(popxl.d2h_stream((2,), F32), w)  # this line
        before = list(main.ops)
    exchange = main.ops[-1]
    assert exchange.source.function == "test_its_parts_are_the_ops_that_were"
    for part, op in zip(exchange.parts, before[1:], strict=True):
        assert repr(part) == repr(op) and part.kind is op.kind and part.attributes == op.attributes
        assert (part.inputs, part.outputs, part.source) == (op.inputs, op.outputs, op.source)
        assert part.parts == (part,)
    assert exchange.parts[1].source.text.endswith("# this line")
    assert main.ops[0].parts == (main.ops[0],)


def nothing(w, v):
    pass


def a_lone_load(w, v):
    load()


def a_lone_store(w, v):
    store(w)


def compute_alone(w, v):
    w + v


def a_load_and_its_store(w, v):
    store(load())


def a_load_and_a_store_of_what_is_made_of_it(w, v):
    store(ops.exp(load()))


def two_stores_around_a_change(w, v):
    store(w)
    ops.add_(w, v)
    store(w)


def a_chain(w, v):
    with popxl.in_sequence():
        load("a")
        load("b")


def a_subgraph(w, v):
    def stores(w):
        store(w)
        store(w)

    popxl.gcg().ir.create_graph(stores, w)


def on_two_ipus(w, v):
    with popxl.ipu(0):
        store(w)
    with popxl.ipu(1):
        store(v)


def on_two_tile_sets(w, v):
    store(w)
    with popxl.io_tiles():
        store(v)


def in_two_contexts(w, v):
    store(w)
    with popxl.context._execution_context(popxl.ExecutionContext.WeightsToHostFragment):
        store(v)


@pytest.mark.parametrize(
    "block",
    [
        nothing,
        a_lone_load,
        a_lone_store,
        compute_alone,
        a_load_and_its_store,
        a_load_and_a_store_of_what_is_made_of_it,
        two_stores_around_a_change,
        a_chain,
        a_subgraph,
        on_two_ipus,
        on_two_tile_sets,
        in_two_contexts,
    ],
)
def test_nothing_to_merge(main, w, v, block):
    store(w)  # not of the block
    ids = []
    handle = main.register_op_created_hook(lambda op: ids.append(op.id))
    with merge_exchange():
        block(w, v)
    main.remove_op_created_hook(handle)
    assert [op.id for op in main.ops[1:]] == ids
    assert "MultiExchange" not in types(main) + [t for g in main.ir.graphs for t in types(g)]


def stores_and_loads(w, v):
    store(w)
    load("a")
    load("b")
    store(v)


def a_chain_without_others_between(w, v):
    with popxl.in_sequence():
        store(w)
        store(v)


def compute_that_needs_no_exchange(w, v):
    store(w)
    ops.exp(w)
    store(v)


def compute_that_needs_a_load(w, v):
    ops.exp(load())
    store(w)


def a_load_and_a_call_without_inputs(w, v):
    load()
    ops.call(popxl.gcg().ir.create_graph(lambda: ops.init((2,), F32) + 1))


def two_rounds(w, v):
    """What is loaded is stored in the second round, in which also goes what is made of it."""
    for name in ("a", "b"):
        t = load(name)
        store(t)
        store(ops.exp(t))


def as_soon_as_possible(w, v):
    """The last load needs nothing, so it goes in the first round, though its predecessor in order is in the second."""
    store(ops.exp(load("a")))
    load("b")


def one_stream_twice(w, v):
    out = popxl.d2h_stream((2,), F32, "out")
    ops.host_store(out, w)
    ops.host_store(out, v)


def printing_between(w, v):
    store(w)
    ops.print_tensor(w)
    store(v)


def code_and_data(w, v):
    graph = popxl.gcg().ir.create_graph(lambda x: x, w)
    ops.remote_code_load(graph, "executable")
    store(w)


def nested(w, v):
    with merge_exchange():
        store(w)
        load("a")
    load("b")


def overwriting(w, v):
    fetch_(w, buffer="abc")
    fetch_(v, buffer="ab")


MERGED = [
    (stores_and_loads, ["Init", "Init"], [["HostStore", "HostLoad", "HostLoad", "HostStore"]], []),
    (a_chain_without_others_between, [], [["HostStore"] * 2], []),
    (compute_that_needs_no_exchange, ["Exp"], [["HostStore"] * 2], []),
    (compute_that_needs_a_load, ["Init"], [["HostLoad", "HostStore"]], ["Exp"]),
    (one_stream_twice, [], [["HostStore"] * 2], []),
    (printing_between, ["PrintTensor"], [["HostStore"] * 2], []),
    (code_and_data, [], [["RemoteCodeLoad", "HostStore"]], []),
    (nested, ["Init", "Init"], [["HostStore", "HostLoad", "HostLoad"]], []),
    (overwriting, [], [["FetchInplace"] * 2], []),
]


@pytest.mark.parametrize(("block", "first", "exchanges", "last"), MERGED, ids=[block.__name__ for block, *_ in MERGED])
def test_what_is_merged(main, w, v, block, first, exchanges, last):
    with merge_exchange():
        block(w, v)
    assert types(main) == [*first, *["MultiExchange"] * len(exchanges), *last]
    assert parts(main) == exchanges


def test_rounds(main, w, v):
    with merge_exchange():
        two_rounds(w, v)
    assert types(main) == ["Init", "Init", "MultiExchange", "Exp", "Exp", "MultiExchange"]
    assert parts(main) == [["HostLoad"] * 2, ["HostStore"] * 4]


def test_an_exchange_goes_in_the_first_round_that_it_can(main, w, v):
    with merge_exchange():
        as_soon_as_possible(w, v)
    assert types(main) == ["Init", "Init", "MultiExchange", "Exp", "HostStore"]


def test_nothing_is_merged_if_the_block_raises(main, w, v):
    with pytest.raises(KeyError), merge_exchange():
        store(w)
        store(v)
        raise KeyError
    assert types(main) == ["HostStore"] * 2


def test_ops_of_other_graphs_in_the_block_stay(ir, main, w, v):
    """In a graph that is built in the block, and in the main graph while another one is current at its start."""

    def stores(w, v):
        store(w)
        with ir.main_graph:
            store(ir.main_graph.get_tensor("w"))
        store(v)

    with merge_exchange():
        graph = ir.create_graph(stores, w, v)
        store(v)
    assert (types(graph), types(main)) == (["HostStore"] * 2, ["MultiExchange"])


def test_as_a_decorator(main, w, v):
    @merge_exchange()
    def block():
        store(w)
        store(v)

    block()
    block()
    assert types(main) == ["MultiExchange"] * 2


def test_hooks_see_the_exchange_as_it_is(main, w):
    seen = []
    handle = main.register_op_created_hook(lambda op: seen.append((op.op_type, op.outputs, types(main))))
    with merge_exchange():
        x = load()
        store(w)
    main.remove_op_created_hook(handle)
    assert [name for name, *_ in seen] == ["Init", "HostLoad", "HostStore", "MultiExchange"]
    assert seen[-1][1:] == ((x,), ["Init", "MultiExchange"])


# Order ----------------------------------------------------------------------------------------------------------------


def test_an_exchange_is_where_its_parts_were_in_a_sequence(main, w, v):
    with popxl.in_sequence():
        first = ops.exp(w).producer
        with popxl.in_sequence(False), merge_exchange():
            store(w)
            x = load()
            y = ops.exp(x)
            store(v)
        last = ops.exp(v).producer
    assert types(main) == ["Exp", "Init", "MultiExchange", "Exp", "Exp"]
    _, init, exchange, _, _ = main.ops
    assert exchange.after == init.after == (first.id,)
    assert set(last.after) == {first.id, init.id, exchange.id, y.producer.id}
    ids = {op.id for op in main.ops}
    assert all(ids.issuperset(op.after) for op in main.ops)


def test_the_names_of_what_comes_later_do_not_change(ir):
    names = []
    for block in (contextlib.nullcontext, merge_exchange):
        ir = popxl.Ir()
        with ir.main_graph as main, block():
            x, y = load("a"), load("b")
            ops.exp(x) + ops.exp(y)
        with main:
            z = ops.exp(x)
        names.append(([t.id for t in main.tensors], z.id, [t.location for t in main.tensors]))
    assert names[0] == names[1]


def test_an_in_place_change_is_ordered_by_an_exchange(ir, main, w, v, run):
    """As it was by the parts: the session finds no ambiguity where there was none, and finds one where there was."""
    with popxl.in_sequence():
        with popxl.in_sequence(False), merge_exchange():
            store(w)
            store(v)
        changed = ops.add_(w, v)
    assert run(ir, changed) == [[4.0, 6.0]]
    with merge_exchange():
        fetch_(w, buffer="abc")
        store(v)
    with pytest.raises(PopxlError, match="Inplacing ambiguity detected"):
        popxl.Session(ir)


# Numbers --------------------------------------------------------------------------------------------------------------


@some_slots_are_left
def test_values_are_the_same(ir, main, w, v):
    """Streams of several elements, one of them stored to twice, inside and outside of the exchange."""
    ir.num_host_transfers = 3
    a, b = (popxl.h2d_stream((2,), F32, name) for name in "ab")
    out, sums = (popxl.d2h_stream((2,), F32, name) for name in ("out", "sums"))
    ops.host_store(out, w)
    with merge_exchange():
        first = ops.host_load(a)
        ops.host_store(out, v)
        second = ops.host_load(b)
        third = ops.host_load(a)
    ops.host_store(out, third)
    ops.host_store(sums, first + second)
    assert len(parts(main)) == 1 and len(main.ops[4].parts) == 4
    assert (ir.get_all_h2d_streams(), ir.get_all_d2h_streams()) == ({a, b}, {out, sums})
    feeds = {s: np.arange(6.0, dtype=np.float32).reshape(3, 2) * k for s, k in ((a, 1), (b, 10))}
    with popxl.Session(ir) as session:
        results = session.run(feeds)
    np.testing.assert_array_equal(results[out], [[1.0, 2.0], [3.0, 4.0], [2.0, 3.0]])
    np.testing.assert_array_equal(results[sums][0], [0.0, 11.0])


def test_in_a_graph_that_is_called_and_repeated(ir):
    """The streams of an exchange are found in graphs that are called."""
    ir.num_host_transfers = 4
    with ir.main_graph:
        data, out = popxl.h2d_stream((), F32, "data"), popxl.d2h_stream((), F32, "out")

        def turn(total):
            with merge_exchange():
                x = ops.host_load(data)
                ops.host_store(out, total)
            return total + x

        graph = ir.create_graph(turn, popxl.TensorSpec((), F32))
        (total,) = ops.repeat(graph, 3, popxl.variable(0.0))
        (total,) = ops.call(graph, total)
        assert types(graph) == ["Init", "MultiExchange", "Add"]
    with popxl.Session(ir) as session:
        outputs = session.run({data: np.array([1.0, 2.0, 3.0, 4.0], np.float32)})
    np.testing.assert_array_equal(outputs[out], [0.0, 1.0, 3.0, 6.0])


def test_what_overwrites_its_operand(ir, main, w, v, run):
    """The results are aliases of the operands, each of its own."""
    with popxl.in_sequence():
        with popxl.in_sequence(False), merge_exchange():
            x = fetch_(w, buffer="abc")
            y = fetch_(v, buffer="ab")
        z = ops.add_(x, y)
    (exchange, _) = main.ops
    assert exchange.modified == {0, 1}
    assert (x.origin, y.origin, z.origin) == (w, v, w)
    assert run(ir, z, y) == [[5.0, 5.0], [2.0, 2.0]]


def test_operands_given_as_plain_values(ir, main, w, v, run):
    with merge_exchange():
        x = fetch(w, 1.0, buffer="a")
        y = fetch(v, popxl.constant(2.0), buffer="b")
        z = fetch(v, buffer="c")
    assert parts(main) == [["Fetch"] * 3]
    assert run(ir, x, y, z) == [[2.0, 3.0], [5.0, 6.0], [3.0, 4.0]]


def test_a_check_that_fails_names_the_part(ir, main, w, v):
    with merge_exchange():
        store(v)
        fetch(w, popxl.constant(7.0), buffer="a")  # this line
        store(fetch(v, popxl.constant(2.0), buffer="b"))
    with popxl.Session(ir) as session, pytest.raises(ApplicationRuntimeError, match="# this line.* has to be below 3"):
        session.run()


def test_saved_and_loaded(ir, main, w, v, tmp_path):
    with merge_exchange():
        x = load()
        code_and_data(w, v)
        ops.exp(x)
        fetch(w, 1.0, buffer="a")
        fetch_(v, buffer="abc")
    store(x)
    ir.save(tmp_path / "program")
    loaded = popxl.Ir.load(tmp_path / "program")
    assert str(loaded) == str(ir)
    again = loaded.main_graph
    assert again.print_schedule() == main.print_schedule()
    assert [op.id for op in again.ops] == [op.id for op in main.ops]
    (exchange, was), *_ = [(a, b) for a, b in zip(again.ops, main.ops, strict=True) if a.kind is multi_exchange_kind]
    assert [(repr(p), p.source, p.operands) for p in exchange.parts] == [
        (repr(p), p.source, p.operands) for p in was.parts
    ]
    results = []
    for program in (ir, loaded):
        (given,), outs = program.get_all_h2d_streams(), program.get_all_d2h_streams()
        with popxl.Session(program) as session:
            outputs = session.run({given: np.array([1.0, 2.0], np.float32)})
            results.append({s.tensor_id: outputs[s].tolist() for s in outs})
    assert results[0] == results[1]


@pytest.mark.thorough
@some_slots_are_left
@settings(max_examples=4)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=12))
def test_random_blocks_compute_what_they_did(steps):
    """Merged or not, whatever is loaded, computed, changed in place and stored, in whichever order."""
    results = []
    for block in (contextlib.nullcontext, merge_exchange):
        ir = popxl.Ir()
        ir.num_host_transfers = len(steps) + 1
        ir.options.enableInplaceAmbiguityChecking = False
        with ir.main_graph:
            sources = [popxl.h2d_stream((), F32, f"in{k}") for k in range(2)]
            sinks = [popxl.d2h_stream((), F32, f"out{k}") for k in range(2)]
            tensors = [popxl.variable(float(k), name=f"v{k}") for k in range(3)]
            with block():
                for what, i, j in steps:
                    t, u = tensors[i % len(tensors)], tensors[j % len(tensors)]
                    # Streams are shared by two IPUs; what would compute on both is left out, merged or not.
                    with contextlib.suppress(ValueError), popxl.ipu(j % 2):
                        if what in (0, 1):
                            tensors.append(ops.host_load(sources[what]))
                        elif what in (2, 3):
                            ops.host_store(sinks[what - 2], t)
                        elif what == 4:
                            tensors.append(t + u)
                        else:
                            ops.add_(t, u)
            for t in tensors:
                ops.host_store(popxl.d2h_stream((), F32, "last"), t)
        feeds = {s: np.arange(len(steps) + 1, dtype=np.float32) + k for k, s in enumerate(sources, 1)}
        used = ir.get_all_h2d_streams()
        with popxl.Session(ir, "ipu_model") as session:
            outputs = session.run({s: a for s, a in feeds.items() if s in used})
        results.append({s.tensor_id: np.asarray(a).tolist() for s, a in outputs.items()})
    assert results[0] == results[1]


# io_tile_exchange -----------------------------------------------------------------------------------------------------


def test_io_tile_exchange(main, w):
    with io_tile_exchange() as nothing:
        x = load()
        store(w)
    assert nothing is None
    assert types(main) == ["Init", "MultiExchange"]
    assert x.tile_set == "io" and main.ops[-1].io_tiles
    context = get_current_context()
    assert (context.io_tile_set, context.in_sequence) == (False, None)


@pytest.mark.parametrize("block", [nothing, a_lone_load, a_lone_store, stores_and_loads, one_stream_twice, a_subgraph])
def test_one_exchange_is_left(main, w, v, block):
    w + v
    store(w)
    with io_tile_exchange():
        block(w, v)


@pytest.mark.parametrize(
    "block",
    [
        a_load_and_its_store,
        compute_that_needs_a_load,
        compute_that_needs_no_exchange,
        on_two_ipus,
        a_load_and_a_call_without_inputs,
    ],
)
def test_more_than_one_op_is_left(main, w, v, block):
    with pytest.raises(RuntimeError, match=r"^More than one Op remained after.*test_exchange\.py:\d+"):
        with io_tile_exchange():
            block(w, v)
    created = types(main)
    assert len(created) > 1
    with io_tile_exchange(verify_overlap=False):
        block(w, v)
    assert types(main) == created * 2


def test_an_error_in_the_block_goes_first(main, w, v):
    with pytest.raises(KeyError), io_tile_exchange():
        w + v
        store(w)
        store(v)
        raise KeyError
    assert types(main) == ["Add", "HostStore", "HostStore"]


def test_in_a_sequence_the_block_is_one_element(main, w, v):
    with popxl.in_sequence():
        before = ops.exp(w).producer
        with io_tile_exchange():
            load()
            store(w)
        after = ops.exp(w).producer
        with io_tile_exchange():
            store(v)
    _, init, exchange, _, store_op = main.ops
    assert (init.after, exchange.after) == ((before.id,), (before.id,))
    assert set(after.after) == {before.id, init.id, exchange.id}
    assert store_op.after == (after.id,)
