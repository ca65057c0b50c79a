"""`Ir`: its counters, its identity, how long it lives, the graphs and streams it knows, and its picture."""

import copy
import gc
import itertools
import pickle
import re
import weakref
from pathlib import Path

import numpy as np
import pytest

import popxl
from popxl import ops

SCALAR = popxl.TensorSpec((), popxl.float32)


def test_ids_count_up():
    first, second = popxl.Ir(), popxl.Ir()
    assert second.id == first.id + 1
    assert repr(first) == f"Ir[id={first.id}]"
    assert hash(first) == hash(first.id)


def test_equality(ir):
    assert ir == ir
    assert ir != popxl.Ir()
    for other in (None, 0, "ir", ir.main_graph):
        with pytest.raises(TypeError):
            ir == other  # noqa: B015
        with pytest.raises(TypeError):
            ir != other  # noqa: B015


def test_attributes(ir):
    assert ir.main_graph is ir.main_graph
    assert (ir.num_host_transfers, ir.replication_factor, ir.instance_replication_factor) == (1, 1, 1)
    ir.num_host_transfers = 7
    assert ir.num_host_transfers == 7
    with pytest.raises(AttributeError):
        ir.main_graph = ir.create_empty_graph()


def test_irs_are_independent():
    for _ in range(2):
        ir = popxl.Ir()
        with ir.main_graph:
            x = popxl.variable(1.0, name="x")
            graph = ir.create_graph(lambda x: x + 1, x)
        assert (x.id, graph.id, graph.ops[0].id) == ("x", "test_irs_are_independent.<lambda>_subgraph(0)", 100)


# Replicas -------------------------------------------------------------------------------------------------------------


def test_replication():
    ir = popxl.Ir(replication=4)
    assert (ir.replication_factor, ir.instance_replication_factor) == (4, 4)
    ir.replication_factor = 2
    assert (ir.replication_factor, ir.options.replicatedGraphCount, ir.options.enableReplicatedGraphs) == (2, 2, True)
    ir.replication_factor = 1
    assert ir.replication_factor == 1


def test_the_number_of_replicas_is_an_integer():
    assert popxl.Ir(np.int64(2)).replication_factor == 2
    with pytest.raises(TypeError, match="the number of replicas must be an integer; got 'four'"):
        popxl.Ir("four")


def test_replication_by_options(ir):
    ir.options.replicatedGraphCount = 4
    assert ir.replication_factor == 1
    ir.options.enableReplicatedGraphs = True
    assert (ir.replication_factor, ir.instance_replication_factor) == (4, 4)


def test_replication_over_several_processes(ir):
    ir.options.enableDistributedReplicatedGraphs = True
    ir.options.globalReplicationFactor = 8
    assert (ir.replication_factor, ir.instance_replication_factor) == (8, 1)
    assert ir.replica_grouping().group_size == 8


def test_replication_is_fixed_by_a_session(ir):
    with ir.main_graph:
        popxl.variable(1.0) + 1
    popxl.Session(ir)
    with pytest.raises(RuntimeError, match="a session has been made"):
        ir.replication_factor = 2
    assert ir.replication_factor == 1


def test_unknown_options_are_refused(ir):
    with pytest.raises(AttributeError, match="did you mean numIOTiles"):
        ir.options.numIoTiles = 3


# Life -----------------------------------------------------------------------------------------------------------------


def built():
    """An Ir with everything that refers to it, and something that lives on."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        x = popxl.variable(2.0, name="x")
        graph = ir.create_graph(lambda x: ops.sin(x) * x, x)
        site = ops.call_with_info(graph, x)
        info = popxl.transforms.autodiff(graph)
        ops.call(info.graph, 1.0, inputs_dict=info.inputs_dict(site))
        ops.repeat(ir.create_graph(lambda x: x + 1, x), 2, x)
    str(ir)
    return ir, x


@pytest.mark.usefixtures("only_new_objects")
def test_an_ir_is_collected():
    ir, x = built()
    gone = weakref.ref(ir)
    del ir
    gc.collect()
    assert gone() is None
    with pytest.raises(ReferenceError, match="keep a reference to the Ir"):
        x.ir  # noqa: B018


@pytest.mark.usefixtures("only_new_objects")
def test_a_graph_keeps_its_ir_alive():
    ir, x = built()
    gone = weakref.ref(ir)
    graph = ir.graphs[1]
    del ir
    gc.collect()
    assert gone() is graph.ir
    assert x.ir is graph.ir


@pytest.mark.usefixtures("only_new_objects")
def test_an_ir_that_ran_is_collected():
    ir, _ = built()
    gone = weakref.ref(ir)
    with popxl.Session(ir) as session:
        session.run()
    del ir, session
    gc.collect()
    assert gone() is None


@pytest.mark.usefixtures("only_new_objects")
def test_an_error_does_not_keep_an_ir_alive():
    ir, _ = built()
    gone = weakref.ref(ir)
    with pytest.raises(ZeroDivisionError):
        with ir.main_graph, popxl.in_sequence():
            ir.create_graph(lambda: 1 / 0)
    del ir
    gc.collect()
    assert gone() is None


# Graphs ---------------------------------------------------------------------------------------------------------------


def outer(ir):
    def scale(x):
        return x * 3

    return ir.create_graph(scale, SCALAR)


class Block(popxl.Module):
    def build(self, x):
        return x

    def method(self, x):
        return x


def test_graph_names(ir):
    class Inner(popxl.Module):
        def build(self, x):
            return x

    here = "test_graph_names"
    names = [
        outer(ir).name,
        ir.create_empty_graph().name,
        ir.create_empty_graph("loop").name,
        ir.create_empty_graph("").name,
        ir.create_graph(lambda x: x, SCALAR).name,
        ir.create_graph(Block(), SCALAR).name,
        ir.create_graph(Block().method, SCALAR).name,
        ir.create_graph(Inner(), SCALAR).name,
    ]
    assert names == [
        "outer.scale_subgraph(0)",
        "graph_subgraph(1)",
        "loop_subgraph(2)",
        "graph_subgraph(3)",
        f"{here}.<lambda>_subgraph(4)",
        "Block_subgraph(5)",
        "Block.method_subgraph(6)",
        f"{here}.Inner_subgraph(7)",
    ]
    assert [graph.name for graph in ir.graphs] == ["", *names]


def test_the_counter_goes_on_after_a_failure(ir):
    with pytest.raises(ZeroDivisionError):
        ir.create_graph(lambda: 1 / 0)
    assert len(ir.graphs) == 1
    assert ir.create_empty_graph().name == "graph_subgraph(1)"


def test_which_graphs_take_a_number(ir):
    with ir.main_graph:
        x = popxl.variable(1.0, name="x")
        graph = outer(ir)
        info = popxl.transforms.autodiff(graph)
        again = popxl.transforms.autodiff(graph, grads_provided=graph.outputs[:1])
        loop = ops.repeat_with_info(graph, 2, x)
    assert (info.graph.name, again.graph.name) == ("outer.scale_subgraph(0)_bwd", "outer.scale_subgraph(0)_bwd_1")
    assert loop.called_graph.name == "outer.scale_subgraph(0)__loop_wrapper_subgraph(1)"
    assert ir.create_empty_graph().name == "graph_subgraph(2)"


@pytest.mark.usefixtures("only_new_objects")
def test_a_failed_graph_leaves_its_callees_as_they_were(ir):
    """The calls that the failed function made are gone, also for autodiff, which extends all calls of a graph."""
    graph = ir.create_graph(lambda x: ops.sin(x * x), SCALAR)

    def failing(x):
        ops.call(graph, x)
        raise KeyError

    with pytest.raises(KeyError):
        ir.create_graph(failing, SCALAR)
    gc.collect()
    assert graph.call_sites == []
    assert len(popxl.transforms.autodiff(graph).graph.outputs) == 1


# Streams --------------------------------------------------------------------------------------------------------------


def test_streams_that_are_used(ir):
    with ir.main_graph:
        loaded, stored, inside = (f((), popxl.float32) for f in (popxl.h2d_stream, popxl.d2h_stream, popxl.d2h_stream))
        popxl.h2d_stream((), popxl.float32)
        assert (ir.get_all_h2d_streams(), ir.get_all_d2h_streams()) == (set(), set())
        x = ops.host_load(loaded)
        ops.host_load(loaded)
        ops.host_store(stored, x)
    ir.create_graph(lambda x: ops.host_store(inside, x), SCALAR)  # any graph of the Ir counts
    assert ir.get_all_h2d_streams() == {loaded}
    assert ir.get_all_d2h_streams() == {stored, inside}


# Pictures -------------------------------------------------------------------------------------------------------------


def small_ir():
    ir = popxl.Ir()
    with ir.main_graph:
        ops.exp(popxl.variable(1.0))
    return ir


@pytest.mark.parametrize(
    ("environment", "option", "files"),
    [
        ("", set(), []),
        (None, {"FINAL"}, ["Final_r.dot"]),
        ("final", set(), ["Final_r.dot"]),
        ("A:B", set(), ["A_r.dot", "B_r.dot"]),
        ("a", {"b"}, ["A_r.dot", "B_r.dot"]),
        ("ALL", set(), ["A_r.dot", "B_r.dot", "Final_r.dot"]),
        (None, {"all"}, ["A_r.dot", "B_r.dot", "Final_r.dot"]),
        (None, set(), ["A_r.dot", "B_r.dot", "Final_r.dot"]),
        ("C", set(), []),
        (None, {""}, []),
    ],
)
def test_dot_checkpoints(tmp_path, monkeypatch, environment, option, files):
    if environment is None:
        monkeypatch.delenv("POPART_DOT_CHECKS", raising=False)
    else:
        monkeypatch.setenv("POPART_DOT_CHECKS", environment)
    ir = small_ir()
    ir.options.dotChecks = option
    ir.dot_checkpoint("A", tmp_path / "deep" / "folder")  # the folder is made, active or not, and kept for later
    assert (tmp_path / "deep" / "folder").is_dir()
    ir.dot_checkpoint("B")
    popxl.Session(ir)
    assert sorted(path.name for path in tmp_path.rglob("*.dot")) == files


def test_nothing_is_written_by_a_session_alone(tmp_path, monkeypatch):
    monkeypatch.delenv("POPART_DOT_CHECKS", raising=False)
    ir = small_ir()
    ir.options.logDir = str(tmp_path)
    popxl.Session(ir)
    assert list(tmp_path.iterdir()) == []


def test_dot_files(tmp_path, ir):
    with ir.main_graph:
        x = popxl.variable(1.0, name="x")
        for graph in (outer(ir), outer(ir)):
            ops.call(graph, x)
    ir.dot_checkpoint("check", str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["check_1.dot", "check_2.dot", "check_r.dot"]
    main = Path(tmp_path, "check_r.dot").read_text()
    assert main.startswith("digraph") and main.count("{") == main.count("}")
    assert len(re.findall(r"label=\"Call", main)) == 2
    assert "outer.scale_subgraph(0)" in main


def test_programs_are_not_copied_and_tensors_are_their_own_copies():
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.variable([1.0, 2.0], popxl.float32, "x")
        y = copy.deepcopy({"values": [x, x * 2]})["values"]
        assert y[0] is x
        assert copy.copy(y[1]) is y[1]
    whole = ir, ir.main_graph, popxl.Session(ir)
    for thing, attempt in itertools.product(whole, (copy.copy, copy.deepcopy, pickle.dumps)):
        with pytest.raises(TypeError, match=r"can neither be copied nor pickled. `ir.save\(path\)` writes"):
            attempt(thing)
    with pytest.raises(TypeError, match="x.* can neither be copied nor pickled"):
        pickle.dumps(x)
