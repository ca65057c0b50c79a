"""The GPT with its weights divided among replicas: tensor parallelism.

Every replica has the same rows between the parts of a block. It has some of the heads of each attention, some of the
columns of the first linear layer of a feed-forward and those rows of the second, and a block of the vocabulary.
See also: Megatron-LM, https://arxiv.org/abs/1909.08053.
"""

from __future__ import annotations

from functools import partial

import numpy as np

import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons import GraphWithNamedArgs, Module, NamedTensors, seed_variable
from popxl_addons.layers import Linear
from popxl_addons.ops.cross_entropy_sharded_loss import cross_entropy_sharded_loss
from popxl_addons.ops.replicated_all_reduce_TP import (
    replicated_all_reduce_identical_grad_inputs,
    replicated_all_reduce_identical_inputs,
)
from tests.popxl_addons.gpt.model import GPT, Block, Config, Embedding, Head, Layout
from tests.popxl_addons.gpt.training import AdamW, Training, streams


class ColumnLinear(Linear):
    """Some columns of a linear layer: `x` is the same on all replicas, and each has its part of the result."""

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        return super().build(replicated_all_reduce_identical_inputs(x))


class RowLinear(Linear):
    """Some rows of a linear layer: each replica has its part of `x`, and the result is the same on all."""

    def __init__(self, out_features: int, replica_grouping: popxl.ReplicaGrouping):
        super().__init__(out_features, bias=False, replica_grouping=replica_grouping)

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        y = replicated_all_reduce_identical_grad_inputs(super().build(x))
        return y + self.add_variable_input("bias", partial(np.zeros, self.out_features), y.dtype)


class ParallelEmbedding(Embedding):
    """Tokens are counted from the first one of the own block; those outside of it are found on other replicas."""

    def rows(self, tokens: popxl.Tensor, table: popxl.Tensor) -> popxl.Tensor:
        return replicated_all_reduce_identical_grad_inputs(ops.gather(table, tokens, zero_OOR=True))


class ParallelHead(Head):
    """The logits of the own block of the vocabulary."""

    def build(self, x: popxl.Tensor, table: popxl.Tensor) -> popxl.Tensor:
        return replicated_all_reduce_identical_inputs(self.norm(x)) @ table.T


class ParallelGPT(GPT):
    def table(self) -> popxl.Tensor:
        rows = self.config.vocabulary // self.config.shards
        data = partial(np.random.normal, 0, 0.02, (rows, self.config.width))
        return self.add_variable_input("table", data, popxl.float32, replica_grouping=each_replica())

    def ends(self) -> tuple[Embedding, Head]:
        return ParallelEmbedding(self.config), ParallelHead()

    def blocks(self) -> Module:
        each = {"replica_grouping": each_replica()}
        layout = Layout(self.config.shards, partial(ColumnLinear, **each), partial(RowLinear, **each))
        return Module.from_list([Block(self.config, layout) for _ in range(self.config.layers)])


def each_replica() -> popxl.ReplicaGrouping:
    """Variables of this grouping have a value for each replica."""
    return popxl.gir().replica_grouping(group_size=1)


def tensor_parallel(config: Config) -> Training:
    """Each replica has a part of the weights, and all work on the same batch."""
    ir = popxl.Ir(replication=config.shards)
    with ir.main_graph, popxl.in_sequence():
        inputs, outputs = streams(config, config.batch)
        _, seed = seed_variable(config.seed, ir.replica_grouping())
        facts, graph = ParallelGPT(config).create_graph(inputs.tokens.spec, seed)
        grad = addons.autodiff(graph, grads_required=graph.args.values_flat())
        logits = graph.graph.outputs[0]
        loss_graph = GraphWithNamedArgs(
            ir.create_graph(cross_entropy_sharded_loss, logits, popxl.TensorSpec(logits.shape[:1], popxl.int32))
        )
        loss_grad = addons.autodiff(loss_graph, grads_required=loss_graph.graph.inputs[:1])
        variables = facts.init()

        tokens, labels = ops.host_load(inputs.tokens), ops.host_load(inputs.labels)
        info = graph.bind(variables).call_with_info(tokens, seed)
        loss_info = loss_graph.call_with_info(info.outputs[0], labels.flatten())
        (dlogits,) = loss_grad.call(1.0, args=loss_grad.grad_graph_info.inputs_dict(loss_info))
        gradients = grad.call(dlogits, args=grad.grad_graph_info.inputs_dict(info))
        ops.host_store(outputs.loss, loss_info.outputs[0])
        optim = AdamW(config).update(variables, NamedTensors.pack(graph.args.keys_flat(), gradients))
        seed += 1
    return ParallelTraining(config, ir, inputs, outputs, variables, optim, seed)


AXES = {
    "table": 0,
    **{
        f"{name}.{part}": axis
        for name in ("query", "key", "value", "up")
        for part, axis in (("weight", 1), ("bias", 0))
    },
    **{f"{name}.weight": 0 for name in ("out", "down")},
}
"""The axis along which a weight is divided, by the last parts of its name. The others are on each replica."""


class ParallelTraining(Training):
    def arranged(self, batch: np.ndarray) -> np.ndarray:
        """Tokens, counted from the first one of each replica's block."""
        first = addons.layers.Embedding.get_offsets(self.config.vocabulary, self.config.shards)
        shards = self.config.shards
        return addons.tensor_parallel_input(batch[np.newaxis], shards, shards, lambda copy, i: copy - first[i])

    def divided(self, name: str, array: np.ndarray) -> np.ndarray:
        axis = axis_of(name)
        return array if axis is None else addons.shard(array, self.config.shards, axis)

    def whole(self, name: str, array: np.ndarray) -> np.ndarray:
        axis = axis_of(name)
        return array.copy() if axis is None else addons.unshard(array, axis)


def axis_of(name: str) -> int | None:
    return AXES.get(".".join(name.split(".")[-2:]))
