"""Private names that published programs use, each beside what it stands for."""

import importlib
import re
from pathlib import Path

import numpy as np
import pytest

import popart._internal.ir as popart_ir
import popxl
from popxl import ops
from popxl.transforms import autodiff

ROOT = Path(__file__).parents[2]


def test_options(ir):
    options = ir._pb_ir.getSessionOptions()
    assert options is ir.options
    options.engineOptions["target.syncReplicasIndependently"] = "true"
    options.partialsTypeMatMuls = "half"
    options.numIOTiles = 32
    options.enableStochasticRounding = True
    assert (ir.options.numIOTiles, ir.options.partialsTypeMatMuls) == (32, "half")
    with pytest.raises(AttributeError, match="did you mean numIOTiles"):
        options.numIoTiles = 1


def test_options_are_of_one_ir(ir):
    ir._pb_ir.getSessionOptions().numIOTiles = 32
    assert popxl.Ir()._pb_ir.getSessionOptions().numIOTiles == 0


def test_graphs_of_an_ir(ir):
    low = ir._pb_ir
    assert (low.getId(), low.getMainGraph()) == (ir.id, ir.main_graph)
    assert len(low.getAllGraphs()) == 1
    graph = ir.create_empty_graph()
    assert list(low.getAllGraphs()) == [ir.main_graph, graph]


def test_ops_of_a_graph(ir):
    graph = ir.create_graph(lambda x: ops.gelu(x @ x - x), popxl.TensorSpec((2, 2), popxl.float32))
    low = graph._pb_graph.getOps()
    assert low == list(graph.ops)
    found = popart_ir.op
    assert [isinstance(op, found.MatMulOp) for op in low] == [True, False, False]
    assert [isinstance(op, found.SubtractOp) for op in low] == [False, True, False]
    assert isinstance(low[2], found.GeluOp) and not isinstance("Gelu", found.GeluOp)
    assert found.GeluOp is found.GeluOp
    with pytest.raises(AttributeError, match="has no attribute 'Gelu'"):
        _ = found.Gelu


def test_what_does_nothing(ir, run):
    with ir.main_graph:
        y = popxl.variable(1.0) + 1
    before = str(ir)
    ir._pb_ir.logIr()
    ir._pb_ir.setPatterns(object(), "Default")
    ir._pb_ir.applyPreAliasPatterns(ir.main_graph)
    ir._pb_ir.updateVertices()
    assert str(ir) == before
    assert run(ir, y) == [2]


def test_the_ir_of_a_graph(ir):
    graph = ir.main_graph._ir.create_graph(lambda x: x + 1, popxl.TensorSpec((), popxl.float32))
    assert graph._ir is ir


def test_ids_of_tensors(ir):
    main, graph = ir.main_graph, ir.create_empty_graph("g")
    assert (main._create_tensor_id("x"), main._create_tensor_id(), graph._create_tensor_id("x")) == (
        "x",
        "t",
        "g_subgraph(0)/x",
    )
    with main, popxl.name_scope("layer"):
        assert popxl.variable(1.0, name="x").id == "layer/x"
        assert main._create_tensor_id("x") == "layer/x__t0"
    assert [t.id for t in main.tensors] == ["layer/x"]


def test_what_gradient_graphs_expect(ir):
    info = autodiff(ir.create_graph(lambda x: ops.sin(x), popxl.TensorSpec((), popxl.float32)))
    for name in ("_expected_inputs", "_expected_outputs"):
        assert isinstance(getattr(info, name), list)
        assert tuple(getattr(info, name)) == getattr(info, name[1:])


def test_memory_maps(ir, tmp_path):
    data = np.memmap(tmp_path / "data", np.float32, "w+", shape=(2,))
    with ir.main_graph:
        assert popxl.variable(data)._memmap_arr is data
        assert popxl.variable(np.ones(2, np.float32))._memmap_arr is None


def test_shapes_and_streams_of_a_session():
    ir = popxl.Ir(2)
    ir.num_host_transfers = 3
    with ir.main_graph, popxl.in_sequence():
        x, y = popxl.h2d_stream((4,), popxl.float32), popxl.d2h_stream((4,), popxl.float32)
        for _ in range(3):
            ops.host_store(y, ops.host_load(x))
    session = popxl.Session(ir, "ipu_model")
    assert session._full_input_shape((4,)) == session.host_shape((4,)) == (3, 2, 4)
    assert session._extra_input_dims == (3, 2)
    assert session._expected_outputs() == {y}
    session._validate_run_inputs({x: np.zeros((3, 2, 4), np.float32)})
    with pytest.raises(ValueError, match="shape"):
        session._validate_run_inputs({x: np.zeros((3, 4), np.float32)})


def test_a_program_that_is_marked_as_not_loaded(ir):
    with ir.main_graph:
        v = popxl.variable(1.0)
        v += 1
    with popxl.Session(ir) as session:
        session.run()
        session._pb_session.setEngineIsLoaded(True)
        assert session.store.is_loaded
        session._pb_session.setEngineIsLoaded(False)
        assert not session.store.is_loaded
        session.run()  # on what the host has
        assert session.get_tensor_data(v) == 2


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("abs", "abs"),
        ("add", "add add_"),
        ("cast", "cast pow2scale_cast_from_fp8 pow2scale_cast_to_fp8"),
        ("conv", "PadType conv conv_transpose"),
        ("gather", "gather groupedgather tied_gather"),
        ("group_norm", "group_norm layer_norm"),
        ("host_load", "host_load"),
        ("interpolate", "InterpolateNearestType InterpolateType interpolate"),
        ("log", "log log2"),
        ("max", "max maximum"),
        ("negative_log_likelihood", "REDUCTION_TYPE nll_loss"),
        ("print_tensor", "FloatFormat print_tensor"),
        ("scatter_reduce", "grouped_scatter_reduce scatter_reduce"),
        ("slice", "process_args slice slice_"),
        ("where", "where"),
        ("collectives.replicated_all_reduce", "replicated_all_reduce replicated_all_reduce_"),
        ("var_updates.accumulate", "accumulate_ sparse_accumulate_"),
        ("var_updates.adam_updater", "adam_updater lamb_updater"),
    ],
)
def test_modules_of_ops(path, names):
    *package, last = path.split(".")
    public = getattr(ops, package[0]) if package else ops
    before = getattr(public, last, None)
    module = importlib.import_module(f"popxl.ops.{path}")
    for name in names.split():
        assert getattr(module, name) is getattr(public, name, getattr(module, name))
    assert before is None or getattr(public, last) is before  # `popxl.ops.abs` stays the op


def test_nothing_of_ours_uses_it():
    for package in ("popxl", "popxl_addons", "runtime", "popart"):
        for file in (ROOT / package).rglob("*.py"):
            text = file.read_text(encoding="utf-8") if file.name != "compat.py" else ""
            for path in set(re.findall(r"^\s*from (popxl\.ops\.[\w.]+) import", text, re.MULTILINE)):
                assert list(ROOT.glob(f"{path.replace('.', '/')}*")), f"{file}: {path}"
            assert not re.search(r"\._pb_ir\b|\._pb_session\b|\._create_tensor_id\b", text), file
