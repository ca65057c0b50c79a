"""The kit by names of axes: what takes a replica grouping takes the names of axes, and makes the same program."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons import layers, optimizers, rts
from popxl_addons.layers.layer_norm_distributed import LayerNormDistributed
from popxl_addons.named_replica_grouping import NamedReplicaGrouping, resolved
from popxl_addons.ops.cross_entropy_sharded_loss import cross_entropy_sharded_loss
from popxl_addons.ops.replicated_all_reduce_TP import replicated_all_reduce_identical_inputs
from popxl_addons.optimizers import AdamOptimizerStep
from popxl_addons.remote import create_remote_buffer
from popxl_addons.transforms.batch_serialisation import RemoteHandle, batch_serial_buffer

AXES = {"data": 2, "tensor": 4}
Use = Callable[[Any], Any]


def variables_of(module: addons.Module, *inputs: Any, **settings: Any) -> list[tuple[Any, ...]]:
    facts, _ = module.create_graph(*inputs, **settings)
    return [(v.shape, v.replica_grouping.assignment) for v in facts.init().values_flat()]


def x(*shape: int, dtype: popxl.dtype = popxl.float32) -> popxl.Tensor:
    return ops.init(shape, dtype, init_type="zero")


def embedding(group: Any) -> Any:
    module = layers.Embedding(popxl.float32, 100, 8, replica_grouping=group)
    found = variables_of(module, x(2, 3, dtype=popxl.int32))
    return found, module.n_shards, module.vocab_shard_size, module.offsets.tolist()


def adam(group: Any) -> Any:
    return variables_of(AdamOptimizerStep(), x(6).spec, x(6).spec, group, lr=0.1)


def accumulated(group: Any) -> Any:
    _, graph = layers.Linear(5).create_graph(x(3, 8))
    tensors = graph.args.values_flat()
    groups = NamedReplicaGrouping.build_groups(graph.args.keys_flat(), group)
    facts, _ = addons.autodiff_with_accumulation(graph, tensors, replica_groupings=groups)
    return [(v.shape, v.replica_grouping.assignment) for v in facts.init().values_flat()]


def handle(group: Any) -> Any:
    t = x(8, 2)
    buffer = batch_serial_buffer(t, steps=3, shard_group=group)
    RemoteHandle(buffer, 0, group).check_fits(t)
    return buffer.spec


USES: dict[str, Use] = {
    "Linear": lambda group: variables_of(layers.Linear(5, replica_grouping=group), x(3, 8)),
    "Conv2D": lambda group: variables_of(layers.Conv2D(4, 3, replica_grouping=group), x(1, 2, 5, 5)),
    "GroupNorm": lambda group: variables_of(layers.GroupNorm(2, replica_grouping=group), x(3, 8)),
    "LayerNormDistributed": lambda group: variables_of(LayerNormDistributed(group), x(3, 8)),
    "Embedding": embedding,
    "AdamOptimizerStep": adam,
    "autodiff_with_accumulation": accumulated,
    "RemoteHandle": handle,
    "create_remote_buffer": lambda group: create_remote_buffer(x(8, 2).spec, replica_group=group).spec,
    "replica_sharded_spec": lambda group: rts.replica_sharded_spec(x(8, 2), group),
    "gather": lambda group: rts.gather_replica_sharded_tensor(
        rts.reduce_replica_sharded_tensor(x(8, 2), "mean", group, group), replica_group=group
    ),
    "reduce": lambda group: rts.reduce_replica_sharded_tensor(x(8, 2), "mean", None, group),
    "seed_variable": lambda group: addons.seed_variable(3, group)[0].shape_on_host,
    "replica_sharded_factory": lambda group: (
        addons.add_replica_sharded_variable_input("w", partial(np.zeros, (8, 2)), replica_grouping=group)[1].spec
    ),
    "cross_entropy_sharded_loss": lambda group: cross_entropy_sharded_loss(
        x(6, 2), x(6, dtype=popxl.int32), replica_grouping=group
    ),
    "replicated_all_reduce_identical_inputs": lambda group: replicated_all_reduce_identical_inputs(x(3), group=group),
}


@pytest.mark.parametrize("use", USES)
def test_names_in_place_of_groupings(use: str) -> None:
    def made(names: bool, axes: tuple[str, ...]) -> tuple[str, Any]:
        ir = popxl.Ir(axes=AXES)
        with ir.main_graph:
            result = USES[use]((axes if len(axes) > 1 else axes[0]) if names else ir.grouping(*axes))
        return str(ir), str(result)

    ways = [("data",), ("tensor",), ("data", "tensor")]
    by_name = [made(True, axes) for axes in ways]
    assert by_name == [made(False, axes) for axes in ways]
    assert by_name[0] != by_name[1] != by_name[2]


def test_a_wrong_name_is_told() -> None:
    with popxl.Ir(axes=AXES).main_graph:
        with pytest.raises(ValueError, match="VariableFactory `w`: `replica_grouping`: there is no axis 'tenser'"):
            addons.VariableFactory(partial(np.zeros, 3), popxl.float32, "w", replica_grouping="tenser")
        assert resolved(None, "here").group_size == 8


def test_axes_apart_that_share_weights() -> None:
    """Replicas along the first and the last axis share the weights that the middle axis divides."""

    class Loss(addons.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = layers.MLP(8, tensor="tensor")

        def build(self, x: popxl.Tensor) -> popxl.Tensor:
            return ops.mean(self.mlp(x))

    with popxl.Ir(axes={"data": 2, "tensor": 2, "text": 2}).main_graph:
        stream = popxl.h2d_stream((3, 4), popxl.float32)
        with pytest.raises(NotImplementedError, match="next to each other in .*'data': 2, 'tensor': 2, 'text': 2"):
            addons.train_step(Loss(), stream, optimizer=partial(optimizers.sgd, lr=0.1))
