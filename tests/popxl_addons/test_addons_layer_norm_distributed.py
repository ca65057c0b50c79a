"""Layer norm of divided channels against torch, which has them in one piece."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl.errors import PopxlError
from popxl_addons.layers.layer_norm_distributed import LayerNormDistributed
from popxl_addons.ops.layer_norm_distributed import layer_norm_distributed
from tests.popxl_addons.replicated import (
    Devices,
    both_ways,
    each_grouping,
    groups_of,
    of_groups,
    of_ranks,
    one_device,
    own,
    results,
    with_gradients,
)

ROWS, CHANNELS = 3, 16


def cut(data: Any, size: int) -> list[Any]:
    return np.split(data, size, axis=-1)


def divided(data: Any, groups: list[list[int]]) -> Any:
    """For each replica, its channels of the data of its group."""
    whole, rank = of_groups(list(data), groups), {r: k for group in groups for k, r in enumerate(group)}
    return np.stack([cut(x, len(groups[0]))[rank[r]] for r, x in enumerate(whole)])


@pytest.mark.thorough(but_each=5)
@both_ways
@each_grouping
@pytest.mark.parametrize("dtype", [popxl.float32, popxl.float16], ids=lambda dtype: dtype.name)
def test_result_and_gradients(device: Devices, count: int, stride: int, size: int, dtype: popxl.dtype) -> None:
    """With weights that are not one, and rows far from zero."""
    torch = pytest.importorskip("torch")
    groups, rng = groups_of(count, stride, size), np.random.default_rng(0)
    t, g = rng.normal(size=(2, len(groups), ROWS, CHANNELS))
    t = (2 * t + rng.normal(size=(len(groups), ROWS, 1)) * 5).astype(dtype.as_numpy())
    w, b = rng.normal(size=(2, CHANNELS))
    ir = popxl.Ir(replication=count)
    with ir.main_graph:
        inputs = [own(ir, divided(t, groups), dtype), *(own(ir, of_ranks(cut(v, size), groups), dtype) for v in (w, b))]
        gradients = own(ir, divided(g, groups), dtype)
        how = {"epsilon": 1e-3, "group": ir.replica_grouping(stride, size)}
        tensors = with_gradients(layer_norm_distributed, inputs, gradients, **how)
    found = results(ir, device, tensors)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype is popxl.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for number, group in enumerate(groups):
        whole = [torch.tensor(x.astype(float), requires_grad=True) for x in (t[number], w, b)]
        y = torch.nn.functional.layer_norm(whole[0], (CHANNELS,), whole[1], whole[2], 1e-3)
        y.backward(torch.tensor(g[number]))
        for mine, theirs in zip(found, (y.detach(), *(x.grad for x in whole)), strict=True):
            np.testing.assert_allclose(np.concatenate(mine[group], axis=-1), theirs, **tolerance)


def test_finite_differences() -> None:
    """The gradient of a sum over both replicas, in one direction."""
    rng = np.random.default_rng(0)
    t, step, g = rng.normal(size=(3, 2, ROWS, 4)).astype(np.float32)
    w, b = rng.normal(size=(2, 2, 4)).astype(np.float32)
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        tw, tb = own(ir, w), own(ir, b)
        near = [layer_norm_distributed(own(ir, t + sign * 1e-2 * step), tw, tb) for sign in (1, -1)]
        tensors = with_gradients(layer_norm_distributed, [own(ir, t), tw, tb], own(ir, g))
    above, below, _, dt, _, _ = results(ir, one_device, [*near, *tensors])
    np.testing.assert_allclose(((above - below) * g).sum() / 2e-2, (dt * step).sum(), rtol=2e-3)


def test_what_is_printed_and_refused() -> None:
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        t, w = popxl.variable(np.ones((3, 4)), popxl.float32), popxl.variable(np.ones(4), popxl.float32)
        y = layer_norm_distributed(t, w, w)
        assert y.producer.op_type == "LayerNormDistributed"
        assert [x.shape for x in y.producer.outputs] == [(3, 4), (3,), (3,)]
        with_gradients(layer_norm_distributed, [t, w, w], t)
        assert "LayerNormDistributedGrad" in [op.op_type for graph in ir.graphs for op in graph.ops]
        with pytest.raises(PopxlError, match="expected `t` of rank 2"):
            layer_norm_distributed(w, w, w)
        with pytest.raises(PopxlError, match=r"expected `w` of shape \(4,\)"):
            layer_norm_distributed(t, t, w)
        with pytest.raises(PopxlError, match=r"expected `b` of shape \(4,\)"):
            layer_norm_distributed(t, w, w[:3])
        for operands in ((w, w, w), (t, t, w), (t, w, t)):
            with pytest.raises(AssertionError, match="expected `.` of"):
                layer_norm_distributed(*operands)


@pytest.mark.thorough(but_each=4)
@both_ways
@pytest.mark.parametrize(("stride", "size"), [(1, 4), (1, 2), (2, 2)])
def test_the_layer(device: Devices, stride: int, size: int) -> None:
    torch = pytest.importorskip("torch")
    groups, ir = groups_of(4, stride, size), popxl.Ir(replication=4)
    x = np.random.default_rng(0).normal(size=(len(groups), ROWS, CHANNELS)).astype(np.float32)
    with ir.main_graph:
        t = own(ir, divided(x, groups))
        facts, graph = LayerNormDistributed(ir.replica_grouping(stride, size)).create_graph(t, eps=1e-2)
        variables = facts.init()
        assert facts.keys() == ["weight", "bias"] and variables.weight.shape == (CHANNELS // size,)
        assert variables.weight.replica_grouping == ir.replica_grouping(stride, size).transpose()
        (y,) = graph.bind(variables).call(t)
        stream = addons.host_store(y)
    w, b = np.random.default_rng(1).normal(size=(2, CHANNELS)).astype(np.float32)
    with popxl.Session(ir, device(4)) as session:
        np.testing.assert_array_equal(session.get_tensor_data(variables.weight), 1)
        np.testing.assert_array_equal(session.get_tensor_data(variables.bias), 0)
        session.write_variables_data({variables.weight: np.stack(cut(w, size)), variables.bias: np.stack(cut(b, size))})
        found = session.run()[stream]
    for number, group in enumerate(groups):
        expected = torch.nn.functional.layer_norm(
            *map(torch.tensor, (x[number],)), (CHANNELS,), *map(torch.tensor, (w, b)), 1e-2
        )
        np.testing.assert_allclose(np.concatenate(found[group], axis=-1), expected, rtol=1e-4, atol=1e-5)


def test_the_layer_needs_a_grouping() -> None:
    ir = popxl.Ir(replication=2)
    with ir.main_graph, pytest.raises(ValueError, match="LayerNormDistributed: `replica_grouping` is None"):
        LayerNormDistributed().create_graph(popxl.TensorSpec((3, 4), popxl.float32))
