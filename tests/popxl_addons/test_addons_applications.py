"""Programs written in the manner of published applications: how they keep, pass and find what belongs to a model."""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl.errors import TensorTruthWarning
from popxl_addons.named_replica_grouping import NamedReplicaGrouping, fill_none_group
from popxl_addons.named_tensors import NamedTensorData, NamedTensors
from popxl_addons.variable_factory import NamedVariableFactories, VariableFactory


@dataclass(frozen=True)
class Config:
    """A model that is small enough to work out by hand."""

    vocabulary: int = 7
    hidden: int = 4
    layers: int = 3
    batch: int = 5


class Embedding(addons.Module):
    """Starts from a table of its own, or from one that is given to it."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config

    def build(self, ids: popxl.Tensor, word_embedding: popxl.Tensor | None = None) -> popxl.Tensor:
        if not word_embedding:
            shape = (self.config.vocabulary, self.config.hidden)
            word_embedding = self.add_variable_input("word", partial(np.random.normal, 0, 0.5, shape), popxl.float32)
        return ops.gather(word_embedding, ids)


class Norm(addons.Module):
    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        w = self.add_variable_input("weight", partial(np.ones, x.shape[-1]), x.dtype)
        b = self.add_variable_input("bias", partial(np.zeros, x.shape[-1]), x.dtype)
        return ops.layer_norm(x, w, b, 1e-5)


class FeedForward(addons.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.norm = Norm()

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        n = self.config.hidden
        w = self.add_variable_input("weight", partial(np.random.normal, 0, 0.5, (n, n)), x.dtype)
        return x + ops.gelu(self.norm(x) @ w)


class Reshaper(addons.Module):
    def __init__(self, shape: tuple[int, ...]):
        self.shape = shape  # no variables, no submodules: the base class was forgotten

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        return ops.reshape(x, self.shape)


class Momentum(addons.Module):
    """An optimiser that leaves norms and biases undamped, which it knows by name."""

    @popxl.in_sequence()
    def build(
        self,
        name: str,
        v: popxl.TensorByRef,
        g: popxl.Tensor,
        *,
        lr: float | popxl.Tensor,
        replica_grouping: popxl.ReplicaGrouping | None = None,
        decay: float = 0.5,
    ):
        state = self.add_variable_input(
            "first_order", partial(np.zeros, v.shape), v.dtype, by_ref=True, replica_grouping=replica_grouping
        )
        if not any(part in name for part in ("norm", "bias")):
            g = g + v * decay
        state += g
        ops.scaled_add_(v, state, b=-lr)


class TrainStep:
    """What a program gathers about a part of a model: graphs, factories, and an optimiser for each variable."""

    def __init__(self, module: addons.Module, lr: float | popxl.TensorSpec, *args: Any):
        facts, self.fwd = module.create_graph(*args)
        self.grad = addons.autodiff(self.fwd, grads_required=(*self.fwd.graph.inputs[:1], *self.fwd.args.tensors))
        self.optimiser: dict[str, addons.GraphWithNamedArgs] = {}
        states = {}
        for name, f in facts.to_dict().items():
            spec = popxl.TensorSpec(f.shape, f.dtype)
            states[name], self.optimiser[name] = Momentum().create_graph(
                name, spec, spec, lr=lr, replica_grouping=f.replica_grouping
            )
        self.facts = NamedVariableFactories(fwd=facts, optim=NamedVariableFactories.from_dict(states))

    def update(self, variables: NamedTensors, gradients: dict[popxl.Tensor, popxl.Tensor], lr: popxl.Tensor) -> None:
        for name, v in variables.fwd.to_dict().items():
            state = variables.optim.get(name) if "." not in name else variables.optim[name]
            self.optimiser[name].bind(state).call(v, gradients[v], lr)


def layer_norm(x, w, b):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * w + b


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def test_training_of_a_stack_of_layers():
    """Layers that share their graphs, kept in a tree with numbers for keys that is filled after it was inserted."""
    config = Config()
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        inputs = addons.InputStreams(x=((config.batch, config.hidden), popxl.float32), lr=((), popxl.float32))
        outputs = addons.OutputStreams(y=((config.batch, config.hidden), popxl.float32))
        x, lr = ops.host_load(inputs.x), ops.host_load(inputs.lr)
        step = TrainStep(FeedForward(config), lr.spec, x)
        assert step.facts.optim.keys_flat() == [f"{name}.first_order" for name in step.facts.fwd.keys_flat()]

        variables, transformer = NamedTensors(), NamedTensors()
        variables.insert("transformer", transformer)
        layers = {n: step.facts.init(f"decoder.{n}") for n in range(config.layers)}
        transformer.insert("decoder", NamedTensors.from_dict(layers))
        assert variables.transformer.decoder[1] is layers[1]
        transformer.insert("decoder.shared", NamedTensors(), overwrite=True)
        decoder = variables.transformer.decoder
        assert decoder.keys() == ["0", "1", "2", "shared"] and decoder[-1] is decoder["2"] and 3 not in decoder
        assert decoder[2].fwd.norm.weight.name == "decoder.2.fwd.norm.weight"

        infos = []
        for n in range(config.layers):
            infos.append(step.fwd.bind(decoder[n].fwd).call_with_info(x))
            x = infos[-1].outputs[0]
        ops.host_store(outputs.y, x)
        dx = x
        for n in reversed(range(config.layers)):
            info = step.grad.grad_graph_info
            grad_call = step.grad.call_with_info(dx, args=info.inputs_dict(infos[n]))
            step.update(decoder[n], info.fwd_parent_ins_to_grad_parent_outs(infos[n], grad_call), lr)
            dx = grad_call.outputs[0]
    assert len(ir.graphs) == 3 + len(step.optimiser)  # however many layers there are

    with popxl.Session(ir, "ipu_hw") as session:
        before = {v.name: a.copy() for v, a in session.get_tensors_data(variables.to_dict().values()).items()}
        x0 = np.random.normal(size=(config.batch, config.hidden)).astype(np.float32)
        result = session.run({inputs.x: x0, inputs.lr: np.float32(0.125)})[outputs.y]
        after = {v.name: a for v, a in session.get_tensors_data(variables.to_dict().values()).items()}
    y = x0
    for n in range(config.layers):
        weight, bias, w = (before[f"decoder.{n}.fwd.{name}"] for name in ("norm.weight", "norm.bias", "weight"))
        y = y + gelu(layer_norm(y, weight, bias) @ w)
    np.testing.assert_allclose(result, y, rtol=1e-4, atol=1e-5)
    for name in (f"decoder.{n}.fwd.{leaf}" for n in range(config.layers) for leaf in ("norm.bias", "weight")):
        momentum = after[name.replace("fwd", "optim") + ".first_order"]
        np.testing.assert_allclose(after[name], before[name] - 0.125 * momentum, rtol=1e-5, atol=1e-6)

    data = NamedTensorData.from_dict({name: after[v.name] for name, v in variables.to_dict().items()})
    assert data.transformer.decoder[0].fwd.weight.shape == (4, 4)


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_that_may_be_given_its_table(ir, evaluate, tied):
    config, ids = Config(), popxl.constant([0, 6, 3], popxl.uint32)
    table = popxl.variable(np.random.normal(size=(7, 4)), popxl.float32, "table")
    asked = pytest.warns(TensorTruthWarning, match="`if not word_embedding:`") if tied else nullcontext()
    with asked:
        facts, graph = Embedding(config).create_graph(ids, table.spec if tied else None)
    assert facts.keys() == ([] if tied else ["word"])
    assert [t.name for t in graph.graph.inputs] == (["ids", "word_embedding"] if tied else ["ids", "word"])
    variables = facts.init()
    (y,) = graph.call(ids, table) if tied else graph.bind(variables).call(ids)
    rows, values = evaluate(y, table if tied else variables.word)
    np.testing.assert_array_equal(rows, values[[0, 6, 3]])


def test_a_table_that_is_tied_by_way_of_a_tree(ir, evaluate):
    """Placeholders of an outlined graph in a tree that gets one more, which the caller passes by position."""
    config = Config()

    class Head(addons.Module):
        def build(self, x: popxl.Tensor, table: popxl.Tensor):
            facts, layer = FeedForward(config).create_graph(x)
            tensors = self.add_variable_inputs("fwd", facts)
            tensors.insert("head.word_embedding", table, overwrite=True)
            (x,) = layer.bind(tensors).call(x)
            return x @ ops.transpose(tensors.head.word_embedding)

    x = popxl.variable(np.random.normal(size=(5, 4)), popxl.float32, "x")
    table = popxl.variable(np.random.normal(size=(7, 4)), popxl.float32, "table")
    facts, graph = Head().create_graph(x, table)
    assert facts.keys_flat() == ["fwd.norm.weight", "fwd.norm.bias", "fwd.weight"]
    variables = facts.init()
    (y,) = graph.bind(variables).call(x, table)
    out, xs, w, tables = evaluate(y, x, variables.fwd.weight, table)
    np.testing.assert_allclose(out, (xs + gelu(layer_norm(xs, 1, 0) @ w)) @ tables.T, rtol=1e-4, atol=1e-5)


def test_modules_whose_constructor_forgets_the_base(ir):
    x = popxl.variable(np.arange(6), popxl.float32, "x")

    class Outer(addons.Module):
        def __init__(self):
            super().__init__()
            self.norm = Norm()

        def build(self, x: popxl.Tensor):
            cache = addons.GraphCache()
            graph = cache.create_graph(reshaper, x)
            (x,) = ops.call(graph, x)
            assert cache.create_graph(reshaper, x.reshape((6,))) is graph
            return reshaper(self.norm(x))

    reshaper = Reshaper((2, 3))
    reshaper.set_name_scope("reshape")
    facts, graph = Outer().create_graph(x)
    assert graph.graph.outputs[0].name.startswith("reshape/") and graph.graph.outputs[0].shape == (2, 3)
    assert [g.name.split("_")[0].split(".")[-1] for g in graph.graph.called_graphs] == ["Reshaper"]
    assert ir.create_graph(reshaper, x).outputs[0].shape == (2, 3)


def test_blocks_made_of_methods(ir, evaluate):
    """A method as a graph, with an optional tensor left out, differentiated and handed to the caller's gradient."""

    class Decoder(addons.Module):
        def __init__(self):
            super().__init__()
            self.scale = 3.0

        def attention_block(self, x: popxl.Tensor, mask: popxl.Tensor | None, unused: Any = None) -> popxl.Tensor:
            y = x * x if mask is None else x * x * mask
            return y * self.scale

        def build(self, x: popxl.Tensor, mask: popxl.Tensor) -> popxl.Tensor:
            graph = ir.create_graph(self.attention_block, x, mask)
            plain = ir.create_graph(self.attention_block, x, None)
            (x,) = ops.call(graph, x, mask)
            (x,) = ops.call(plain, x)
            return x

    x = popxl.variable([1.0, 2.0], name="x")
    mask = popxl.constant([0.0, 1.0])
    _, graph = Decoder().create_graph(x, mask)
    blocks = [g for g in graph.graph.called_graphs if "attention_block" in g.name]
    assert len(blocks) == len(graph.graph.called_graphs) == 2
    gradients = {g: addons.autodiff(addons.GraphWithNamedArgs(g), grads_required=g.inputs[:1]) for g in blocks}
    grad = addons.autodiff(graph, grads_required=graph.graph.inputs[:1], called_graphs_grad_info=gradients)
    assert {*grad.graph.called_graphs} == {g.graph for g in gradients.values()}
    info = graph.call_with_info(x, mask)
    (dx,) = grad.call(popxl.constant([1.0, 1.0]), args=grad.grad_graph_info.inputs_dict(info))
    y, dxs = evaluate(info.outputs[0], dx)
    np.testing.assert_allclose(y, [0, 3 * 12.0**2])  # x -> 3 x² twice
    np.testing.assert_allclose(dxs, [0, 108 * 2.0**3])


def test_an_offset_for_each_group():
    """One scalar for each group of replicas, from an iterator that is used up by the one variable that it is for."""
    ir = popxl.Ir(replication=4)
    with ir.main_graph:
        group = ir.replica_grouping(stride=2, group_size=2)

        class Sharded(addons.Module):
            def __init__(self, replica_grouping: popxl.ReplicaGrouping | None = None):
                super().__init__()
                self.replica_grouping = fill_none_group(replica_grouping, ir.replica_grouping(group_size=1))

            def build(self, ids: popxl.Tensor) -> popxl.Tensor:
                if self.replica_grouping:
                    offsets = np.arange(self.replica_grouping.num_groups) * 10
                offset = self.add_variable_input("fwd.offset", iter(offsets), popxl.int32, False, self.replica_grouping)
                assert "offset" in offset.name
                return ids - offset

        facts, graph = Sharded(group).create_graph(popxl.TensorSpec((2,), popxl.int32))
        assert facts.replica_groupings.fwd.offset == group
        variables = facts.init()
        (y,) = graph.bind(variables).call(popxl.constant([12, 3], popxl.int32))
        out = addons.host_store(y)
        with pytest.raises(StopIteration):
            facts.init()
    with popxl.Session(ir, "ipu_hw") as session:
        np.testing.assert_array_equal(session.run()[out], [[12, 3], [2, -7]] * 2)


def test_groupings_by_name():
    """A tree of factories that holds trees of groupings, and groupings that get further names."""
    ir = popxl.Ir(replication=4)
    with ir.main_graph:
        everyone, pairs = ir.replica_grouping(), ir.replica_grouping(group_size=2)
        facts = NamedVariableFactories.from_dict(
            {
                "layer.w": VariableFactory(lambda: np.zeros(2), replica_grouping=pairs),
                "layer.b": VariableFactory(lambda: np.zeros(2)),
            }
        )
        groups = facts.replica_groupings
        groups.insert("x", everyone)
        assert groups.keys_flat() == ["layer.w", "layer.b", "x"] and "x" not in facts.replica_groupings
        tensor_parallel = groups.map(lambda group: group.transpose())
        assert tensor_parallel.layer.w.assignment == [0, 1, 0, 1]

        named = NamedVariableFactories(
            fwd=groups, grad=NamedReplicaGrouping.build_groups(groups.keys_flat(), everyone), reduce=tensor_parallel
        )
        assert named.to_dict()["grad.layer.w"] is everyone and named.grad.layer.b is everyone
        assert isinstance(named.copy().fwd, NamedReplicaGrouping)
        assert named.keys_flat()[:3] == ["fwd.layer.w", "fwd.layer.b", "fwd.x"]


def test_trees_are_taken_apart_and_put_together(ir):
    config = Config()
    facts, graph = FeedForward(config).create_graph(popxl.TensorSpec((5, 4), popxl.float32))
    layer = NamedVariableFactories(fwd=facts, bwd=NamedVariableFactories(accum=facts.copy()), optim=facts.copy())
    assert "bwd" in layer
    assert layer.filter_keys(["fwd", "optim"]).keys() == ["fwd", "optim"]
    assert layer.bwd.accum.pop("norm.weight") is facts.norm.weight
    layer.pop("bwd.accum.norm")
    assert layer.bwd.accum.keys_flat() == ["weight"]
    other = facts.copy()
    other.insert("norm.bias", facts.norm.weight, overwrite=True)
    assert other.norm.bias is facts.norm.weight is not facts.norm.bias

    names = graph.args.filter_keys(["norm.weight", "weight"]).values_flat()
    assert [t.name for t in names] == ["norm/weight", "weight"]
    x = graph.graph.inputs_by_name["x"]
    assert x is graph.graph.inputs[0]
    grad = addons.autodiff(graph, grads_required=[x, *names])
    assert [t.name for t in grad.grad_graph_info.outputs] == ["x", "norm/weight", "weight"]
    assert graph.args.to_dict().idx(-1) is graph.args.weight


def test_layers_of_layers(ir):
    """Graphs that are shared by blocks, with their variables under dotted names with numbers."""

    class Tower(addons.Module):
        def build(self, x: popxl.Tensor) -> popxl.Tensor:
            facts, block = FeedForward(Config()).create_graph(x)
            for i, blocks in enumerate((2, 3)):
                for j in range(blocks):
                    tensors = self.add_variable_inputs(f"layer.{i}.{j}", facts, overwrite=True)
                    (x,) = block.bind(tensors).call(x)
            return x

    facts, graph = Tower().create_graph(popxl.TensorSpec((5, 4), popxl.float32))
    variables = facts.init()
    assert len(ir.graphs) == 3 and facts.layer[1].len() == 3
    assert variables.layer[1][0].norm.weight.name == "layer.1.0.norm.weight"
    assert graph.bind(variables).args.keys() == {*graph.graph.inputs[1:]}
