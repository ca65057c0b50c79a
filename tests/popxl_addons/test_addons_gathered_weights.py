"""`train_step(sharded=True)`: layers gather their weights themselves, forward and backward, and share out gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl.analysis.checking import check
from popxl_addons import optimizers
from popxl_addons.transforms.gathered_weights import gather_where_read
from tests.tolerances import assert_near

BATCH, WIDTH = 6, 5
X = np.random.default_rng(0).normal(size=(2, BATCH, WIDTH)).astype(np.float32)


def drawn(*shape: int) -> Any:
    return lambda: 0.5 * np.random.normal(size=shape)


class Layer(addons.Module):
    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        w = self.add_variable_input("w", drawn(WIDTH, WIDTH), x.dtype)
        b = self.add_variable_input("b", drawn(2), x.dtype)  # too small for three replicas
        return ops.gelu(x @ w.T) * ops.sum(b)


class Stage(addons.Module):
    """Passes on the weight of a layer and reads those of another one, which it calls, too."""

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        facts, layer = Layer().create_graph(x)
        (x,) = layer.bind(self.add_variable_inputs("first", facts)).call(x)
        last = self.add_variable_inputs("last", facts)
        (x,) = layer.bind(last).call(x)
        return x @ last.w


class Model(addons.Module):
    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        own = self.add_variable_input("own", drawn(WIDTH, WIDTH), x.dtype)
        facts, stage = Stage().create_graph(x)
        for i in range(2):
            (x,) = stage.bind(self.add_variable_inputs(i, facts)).call(x @ own)
        return ops.mean(x * x)


class Texts(addons.Module):
    """Looks up rows of a table, some of them twice, and multiplies by it if it is tied."""

    def __init__(self, rows: int, tied: bool) -> None:
        super().__init__()
        self.rows, self.tied = rows, tied

    def build(self, tokens: popxl.Tensor) -> popxl.Tensor:
        table = self.add_variable_input("table", drawn(self.rows, WIDTH), popxl.float32)
        facts, layer = Layer().create_graph(popxl.TensorSpec((*tokens.shape, WIDTH), table.dtype))
        (x,) = layer.bind(self.add_variable_inputs("layer", facts)).call(ops.gather(table, tokens))
        if self.tied:
            x = x @ table.T
        return ops.mean(x * x)


class OnTwoIpus(addons.Module):
    """Layers on the first IPU, and a weight that the model reads itself on the second."""

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        with popxl.ipu(0):
            facts, layer = Layer().create_graph(x)
            for i in range(2):
                (x,) = layer.bind(self.add_variable_inputs(i, facts)).call(x)
            x = x.copy_to_ipu(1)
        with popxl.ipu(1):
            y = x @ self.add_variable_input("head", drawn(WIDTH, 3), x.dtype)
            return ops.mean(y * y)


def train(
    replicas: int = 1, accumulate: int = 1, module: addons.Module | None = None, data: Any = X, **how: Any
) -> tuple[list[float], dict[str, Any], popxl.Ir]:
    """The losses of two steps, the variables after them, and the program."""
    np.random.seed(1)
    ir = popxl.Ir(replication=replicas)
    size = BATCH // replicas // accumulate
    with ir.main_graph:
        x = popxl.h2d_stream((size, *data.shape[2:]), popxl.dtype.as_dtype(data.dtype), "x")
        update = partial(optimizers.sgd, lr=0.05, clip_norm=0.3)
        training = addons.train_step(module or Model(), x, optimizer=update, accumulate=accumulate, **how)
        out = addons.host_store(training.loss)
    with popxl.Session(ir, "ipu_model") as session:
        losses = [session.run({x: rows.reshape(session.host_shape(x))})[out].ravel()[0] for rows in data]
        found = session.get_tensors_data(training.variables.tensors)
    return losses, {name: np.array(found[v]) for name, v in training.variables.to_dict().items()}, ir


@pytest.mark.parametrize(
    "how",
    [
        {},
        pytest.param({"memory": "nothing"}, marks=pytest.mark.thorough),
        pytest.param({"accumulate": 2, "precision": addons.MixedPrecision(popxl.bfloat16)}, marks=pytest.mark.thorough),
    ],
    ids=["kept", "recomputed", "accumulated"],
)
def test_as_if_they_were_whole(how: dict[str, Any]) -> None:
    """With padding: weights have 25 elements, on three replicas."""
    losses, variables, ir = train(3, sharded=True, **how)
    others, whole, _ = train(**how)
    np.testing.assert_allclose(losses, others, 1e-4 if "precision" not in how else 1e-2)
    for name, data in whole.items():
        assert_near(variables[name], data, 1e-3 if "precision" not in how else 5e-2)
    assert not check(ir).findings
    assert how or gathers_of(ir) == {
        "": [[]],
        "Layer": [[], ["w"], [], []],
        "Layer_bwd_recomp": [["w_after"]],
        "Model": [["own", "own"], []],  # it is released while a stage runs
        "Model_bwd_recomp": [["own_after"]],
        "Stage": [["last.w"], []],
        "Stage_bwd_recomp": [["w__t0_after"]],
    }


def test_layers_and_the_head_are_on_different_ipus() -> None:
    losses, variables, _ = train(2, module=OnTwoIpus(), sharded=True)
    others, whole, _ = train(module=OnTwoIpus())
    np.testing.assert_allclose(losses, others, 1e-4)
    for name, data in whole.items():
        assert_near(variables[name], data, 1e-3)


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_rows_are_looked_up_in_shards(tied: bool) -> None:
    """Where replicas ask for fewer rows than a table has, they exchange these."""
    tokens = np.random.default_rng(2).integers(0, 12, (2, BATCH, 1)).astype(np.int32)
    tokens[:, :2] = tokens[:, -2:]  # of other replicas
    losses, variables, ir = train(3, module=Texts(12, tied), data=tokens, sharded=True)
    others, whole, _ = train(module=Texts(12, tied), data=tokens)
    np.testing.assert_allclose(losses, others, 1e-4)
    for name, data in whole.items():
        assert_near(variables[name], data, 1e-3)
    assert not check(ir).findings
    assert gathers_of(ir)["Texts"][0] == ["table"] * tied


@pytest.mark.parametrize(("rows", "gathered"), [(9, 0), (10, 1), (6, 1)], ids=["rows", "unequal shares", "few rows"])
def test_which_tables_are_looked_up_in(rows: int, gathered: int) -> None:
    """Those of equal shares, of more rows than replicas ask for."""
    ir = popxl.Ir(replication=3)
    with ir.main_graph:
        table, tokens = popxl.TensorSpec((rows, WIDTH), popxl.float32), popxl.TensorSpec((2,), popxl.int32)
        model = ir.create_graph(lambda t, i: ops.gather(t, i), table, tokens)
        shards, _ = popxl.replica_sharded_variable(np.ones(table.shape), popxl.float32, "table")
        named = addons.GraphWithNamedArgs(model, addons.NamedTensors(table=model.inputs[0]))
        copy = gather_where_read(named, addons.NamedTensors(table=shards))
    assert copy.args.table.meta_shape == table.shape
    assert len([op for op in copy.graph.ops if op.op_type == "WeightAllGather"]) == gathered


def gathers_of(ir: popxl.Ir) -> dict[str, list[list[str]]]:
    """What the graphs of a program gather, by their names."""
    found: dict[str, list[list[str]]] = {}
    for graph in ir.graphs:
        gathered = [op.inputs[0].path for op in graph.ops if op.op_type.endswith("AllGather")]
        found.setdefault(graph.name.partition("_subgraph")[0], []).append(gathered)
    return found


def test_a_given_gradient_is_of_whole_weights() -> None:
    """Calls of a graph with such a gradient get whole weights."""
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        spec = popxl.TensorSpec((WIDTH, WIDTH), popxl.float32)
        layer = ir.create_graph(lambda x, w: x @ w, spec, spec)
        model = ir.create_graph(lambda x, w: ops.call(layer, x, w), spec, spec)
        given = {layer: popxl.transforms.autodiff(layer)}
        w, _ = popxl.replica_sharded_variable(np.ones(spec.shape), popxl.float32, "w")
        args = addons.NamedTensors(w=model.inputs[1])
        known = addons.GraphWithNamedArgs(model, args, called_graphs_grad_info=given)
        copies = [
            gather_where_read(each, addons.NamedTensors(w=w))
            for each in (known, addons.GraphWithNamedArgs(model, args))
        ]
    assert [each.args.w.meta_shape for each in copies] == [spec.shape] * 2
    assert [layer in each.graph.called_graphs for each in copies] == [True, False]


def test_weights_that_a_model_returns_stay_whole() -> None:
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        spec = popxl.TensorSpec((WIDTH, WIDTH), popxl.float32)
        model = ir.create_graph(lambda x, w: (x @ w, w), spec, spec)
        w, _ = popxl.replica_sharded_variable(np.ones(spec.shape), popxl.float32, "w")
        named = addons.GraphWithNamedArgs(model, addons.NamedTensors(w=model.inputs[1]))
        assert gather_where_read(named, addons.NamedTensors(w=w)) is named
