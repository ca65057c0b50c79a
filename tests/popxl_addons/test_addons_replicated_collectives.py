"""All-reduces with gradients, and the strided collectives, against what they mean in NumPy."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import popart
import popxl
import popxl_addons as addons
from popxl import ops
from popxl.errors import PopxlError
from popxl_addons.ops import replicated_all_reduce_TP as tp
from popxl_addons.ops import replicated_strided_collectives as strided
from popxl_addons.patterns import apply_pre_alias_patterns
from tests.popxl_addons.replicated import (
    Array,
    Devices,
    alike,
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

ALL_REDUCES = [
    (tp, "replicated_all_reduce", "ReplicatedAllReduceTP", ("add",)),
    (strided, "replicated_all_reduce_strided", "ReplicatedAllReduceStrided", ("add", "mean", "mul")),
]
CASES = [
    (getattr(module, prefix + suffix), op, suffix, op_type)
    for module, prefix, op_type, known in ALL_REDUCES
    for op in known
    for suffix in ("", "_identical_inputs", "_identical_grad_inputs")
]
SUMS = {"add": sum, "mean": lambda xs: sum(xs) / len(xs), "mul": lambda xs: sum(xs) / len(xs)}


def reduced(data: Array, groups: list[list[int]], op: str) -> Array:
    """In double precision, rounded once."""
    return of_groups([SUMS[op]([data[r].astype(float) for r in group]) for group in groups], groups).astype(data.dtype)


@pytest.mark.thorough(but_each=9)
@both_ways
@each_grouping
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_all_reduces(device: Devices, count: int, stride: int, size: int, dtype: str) -> None:
    groups, rng = groups_of(count, stride, size), np.random.default_rng(0)
    data, gradients = rng.normal(size=(2, count, 2, 3)).astype(dtype)
    ir = popxl.Ir(replication=count)
    tensors, expected = [], []
    with ir.main_graph:
        group = ir.replica_grouping(stride, size)
        x, g = own(ir, data), own(ir, gradients, name="g")
        for function, op, suffix, _ in CASES:
            tensors += with_gradients(function, [x], g, op=op, group=group)
            expected.append(data if suffix == "_identical_inputs" else reduced(data, groups, op))
            expected.append(gradients if suffix == "_identical_grad_inputs" else reduced(gradients, groups, op))
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if dtype == "float32" else {"rtol": 1e-3, "atol": 1e-4}
    for found, wanted in zip(results(ir, device, tensors), expected, strict=True):
        np.testing.assert_allclose(found, wanted, **tolerance)
        if not (wanted is data or wanted is gradients):
            alike(found, groups)


def test_the_example_of_the_specification() -> None:
    """Four replicas, stride 2: replica `r` holds `[r, 10 r]`."""
    ir = popxl.Ir(replication=4)
    with ir.main_graph:
        x = own(ir, [[r, 10.0 * r] for r in range(4)], popxl.float32)
        group = ir.replica_grouping(stride=2, group_size=2)
        tensors = [
            strided.replicated_all_reduce_strided(x, group=group),
            strided.replicated_all_gather_strided(x, group),
            strided.replicated_reduce_scatter_strided(x, group=group),
        ]
        passed = with_gradients(tp.replicated_all_reduce_identical_inputs, [x], x)
    totals, gathered, scattered, same, total = results(ir, one_device, [*tensors, *passed])
    np.testing.assert_array_equal(totals, [[2, 20], [4, 40], [2, 20], [4, 40]])
    np.testing.assert_array_equal(gathered, [[0, 0, 2, 20], [1, 10, 3, 30]] * 2)
    np.testing.assert_array_equal(scattered, [[2], [4], [20], [40]])
    np.testing.assert_array_equal(same, [[r, 10 * r] for r in range(4)])
    np.testing.assert_array_equal(total, [[6, 60]] * 4)


@pytest.mark.thorough(but_each=8)
@both_ways
@pytest.mark.parametrize(("count", "stride", "size"), [(8, 2, 2), (4, 1, 4), (8, 2, 4)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32])
def test_gather_and_scatter(device: Devices, count: int, stride: int, size: int, dtype: Any) -> None:
    groups = groups_of(count, stride, size)
    data = (np.random.default_rng(0).normal(size=(count, 3, 5)) * 8).astype(dtype)
    ir = popxl.Ir(replication=count)
    with ir.main_graph:
        group, x = ir.replica_grouping(stride, size), own(ir, data)
        gathered = strided.replicated_all_gather_strided(x, group)
        chunk = strided.replicated_reduce_scatter_strided(x, "add", group)
        shard = strided.replicated_reduce_scatter_strided(x, "mean", group, True)
        whole = strided.replicated_all_gather_strided(shard, group)
        assert gathered.shape == (size * 15,) and chunk.shape == shard.shape == (-(-15 // size),)
        assert (chunk.meta_shape, shard.meta_shape, whole.shape) == ((), (3, 5), (3, 5))
    found = results(ir, device, [gathered, chunk, shard, whole])
    np.testing.assert_array_equal(found[0], of_groups([data[group].reshape(-1) for group in groups], groups))
    sums = [data[group].astype(float).sum(axis=0).reshape(-1) for group in groups]
    for parts, total in ((found[1], sums), (found[2], [s / size for s in sums])):
        for group, wanted in zip(groups, total, strict=True):
            padded = np.append(wanted, np.zeros(-15 % size)).astype(dtype)
            np.testing.assert_allclose(parts[group].reshape(-1), padded, rtol=2e-3, atol=1e-2)
    means = of_groups([(s / size).reshape(3, 5).astype(dtype) for s in sums], groups)
    np.testing.assert_allclose(found[3], means, rtol=2e-3, atol=1e-2)


def test_sixteen_replicas_in_groups_of_four() -> None:
    groups, data = groups_of(16, 4, 4), np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
    ir = popxl.Ir(replication=16)
    with ir.main_graph:
        group, x = ir.replica_grouping(stride=4, group_size=4), own(ir, data)
        tensors = [
            strided.replicated_all_reduce_strided(x, group=group),
            strided.replicated_all_gather_strided(x, group),
        ]
    total, joined = results(ir, one_device, tensors)
    np.testing.assert_allclose(total, reduced(data, groups, "add"), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(joined, of_groups([data[g].reshape(-1) for g in groups], groups))


@both_ways
def test_a_graph_that_reduces_a_tree(device: Devices) -> None:
    ir, rng = popxl.Ir(replication=4), np.random.default_rng(0)
    w, b = rng.normal(size=(4, 2, 3)).astype(np.float32), rng.normal(size=(4, 5)).astype(np.float32)
    with ir.main_graph:
        tree = addons.NamedTensors.from_dict({"fc.w": own(ir, w), "b": own(ir, b)})
        group = ir.replica_grouping(stride=2, group_size=2)
        for io_tiles in (False, True):
            graph, names = strided.replicated_all_reduce_strided_graph(tree, "mean", group, io_tiles)
            assert names == graph.args.keys_flat() == ["b", "fc.w"]
            outputs = graph.bind(tree).call()
    for found, data in zip(results(ir, device, outputs), (b, w), strict=True):
        np.testing.assert_allclose(found, reduced(data, groups_of(4, 2, 2), "mean"), rtol=1e-6, atol=1e-6)


# The identity pattern -----------------------------------------------------------------------------------------------


def program(function: Callable[..., Any]) -> tuple[popxl.Ir, popxl.GradGraphInfo, tuple[popxl.Tensor, ...]]:
    """A program of two replicas that calls a graph, and its gradient graph made by popxl's transform."""
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        x = own(ir, [[1.0], [2.0]], popxl.float32)
        graph = ir.create_graph(function, x)
        info = popxl.transforms.autodiff(graph)
        (y,) = ops.call(graph, x)
        (dx,) = ops.call(info.graph, x)
    return ir, info, (y, dx)


def run(ir: popxl.Ir, tensors: tuple[popxl.Tensor, ...]) -> list[Array]:
    """Without any pattern."""
    with ir.main_graph:
        streams = [addons.host_store(t) for t in tensors]
    with popxl.Session(ir, "ipu_hw") as session:
        outputs = session.run()
    return [outputs[stream] for stream in streams]


IDENTICAL_GRADIENTS = [
    tp.replicated_all_reduce_identical_grad_inputs,
    strided.replicated_all_reduce_strided_identical_grad_inputs,
]
IDENTICAL_INPUTS = [tp.replicated_all_reduce_identical_inputs, strided.replicated_all_reduce_strided_identical_inputs]


@pytest.mark.parametrize("function", IDENTICAL_GRADIENTS)
@pytest.mark.parametrize("level", [None, "no_patterns", "minimal"])
def test_an_identity_in_a_gradient_has_to_be_replaced(function: Callable[..., Any], level: str | None) -> None:
    ir, _, tensors = program(function)
    if level is not None:
        apply_pre_alias_patterns(ir, level)
    with pytest.raises(popart.popart_exception, match=r"Session: .*apply_pre_alias_patterns\(ir\)"):
        run(ir, tensors)


@pytest.mark.parametrize("function", IDENTICAL_GRADIENTS)
@pytest.mark.parametrize("level", ["default", "all"])
def test_the_pattern_replaces_it(function: Callable[..., Any], level: str) -> None:
    ir, info, tensors = program(function)
    before = {op.op_type for op in info.graph.ops}
    for _ in range(2):
        apply_pre_alias_patterns(ir, level)
        assert {op.op_type for op in info.graph.ops} == {"Identity"} != before
    y, dx = run(ir, tensors)
    np.testing.assert_array_equal(y, [[3], [3]])
    np.testing.assert_array_equal(dx, [[1], [2]])


@pytest.mark.parametrize("function", IDENTICAL_GRADIENTS)
def test_addons_replace_it_in_their_gradient_graphs(function: Callable[..., Any]) -> None:
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        x = own(ir, [[1.0], [2.0]], popxl.float32)
        y, dx = run(ir, with_gradients(function, [x], x))
    np.testing.assert_array_equal(y, [[3], [3]])
    np.testing.assert_array_equal(dx, [[1], [2]])


@pytest.mark.parametrize("function", IDENTICAL_INPUTS)
def test_an_identity_that_is_no_gradient(function: Callable[..., Any]) -> None:
    """It is carried out as one, and replaced like the other."""
    ir, info, tensors = program(function)
    y, dx = run(ir, tensors)
    np.testing.assert_array_equal(y, [[1], [2]])
    np.testing.assert_array_equal(dx, [[3], [3]])
    before = [op.op_type for op in info.graph.ops]
    apply_pre_alias_patterns(ir)
    assert [op.op_type for op in info.forward_graph.ops] == ["Identity"]
    assert [op.op_type for op in info.graph.ops] == before


# Construction -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("function", "op", "suffix", "op_type"), CASES)
def test_what_is_printed(function: Callable[..., Any], op: str, suffix: str, op_type: str) -> None:
    ir = popxl.Ir(replication=4)
    with ir.main_graph:
        x = popxl.variable(np.ones((2, 3)), popxl.float32, "x")
        y = function(x, op)
    assert (y.producer.op_type, y.shape, y.dtype, y.name) == (op_type, (2, 3), popxl.float32, "x_all_reduce")


def test_what_the_others_print() -> None:
    with popxl.Ir(replication=2).main_graph:
        x = popxl.variable([1.0, 2.0])
        assert strided.replicated_all_gather_strided(x).producer.op_type == "ReplicatedAllGatherStrided"
        assert strided.replicated_reduce_scatter_strided(x).producer.op_type == "ReplicatedReduceScatterStrided"


@pytest.mark.parametrize(("function", "op", "suffix", "op_type"), CASES)
def test_other_reductions_are_refused(function: Callable[..., Any], op: str, suffix: str, op_type: str) -> None:
    ir = popxl.Ir(replication=4)
    with ir.main_graph:
        x = popxl.variable([1.0])
        with pytest.raises(PopxlError, match=f"{function.__name__}: `op` is 'max'; expected one of 'add'"):
            function(x, "max")
        with pytest.raises(ValueError, match="'maximum'"):
            function(x, "maximum")
        with pytest.raises(TypeError, match="`group` must be a ReplicaGrouping"):
            function(x, "add", 2)
        with pytest.raises(NotImplementedError, match=f"{function.__name__}: .* same distance apart"):
            function(x, "add", ir.replica_grouping_from_assignments([0, 1, 1, 0]))
        with pytest.raises(PopxlError, match="replicated_reduce_scatter_strided: `op` is 'min'"):
            strided.replicated_reduce_scatter_strided(x, "min")
        with pytest.raises(ValueError, match="'maximum'"):
            strided.replicated_reduce_scatter_strided(x, "maximum")
    assert not ir.main_graph.ops


def test_packages_and_their_modules() -> None:
    package = "popxl_addons.ops.replicated_all_reduce_TP"
    module = importlib.import_module(f"{package}.replicated_all_reduce_TP")
    for name in module.__all__:
        assert getattr(importlib.import_module(package), name) is getattr(module, name)
    everything: dict[str, Any] = {}
    exec("from popxl_addons.ops.replicated_strided_collectives import *", everything)
    for part in ("replicated_all_reduce_strided", "replicated_all_gather_strided", "replicated_reduce_scatter_strided"):
        module = importlib.import_module(f"popxl_addons.ops.replicated_strided_collectives.{part}")
        for name in module.__all__:
            assert everything[name] is getattr(module, name)


# Tensor parallelism -------------------------------------------------------------------------------------------------


def columns(data: Array, size: int) -> list[Array]:
    return np.split(data, size, axis=-1)


def rows(data: Array, size: int) -> list[Array]:
    return np.split(data, size, axis=0)


def sharded(ir: popxl.Ir, parts: list[Array], groups: list[list[int]], dtype: popxl.dtype, name: str) -> Any:
    """A variable with a part for each rank, shared by the replicas of that rank."""
    return own(ir, of_ranks(parts, groups), dtype, name)


def mlp(group: popxl.ReplicaGrouping) -> Callable[..., popxl.Tensor]:
    def build(x: popxl.Tensor, w1: popxl.Tensor, b1: popxl.Tensor, w2: popxl.Tensor) -> popxl.Tensor:
        h = ops.gelu(tp.replicated_all_reduce_identical_inputs(x, group=group) @ w1 + b1)
        return tp.replicated_all_reduce_identical_grad_inputs(h @ w2, group=group)

    return build


@pytest.mark.thorough(but_each=9)
@both_ways
@each_grouping
@pytest.mark.parametrize("dtype", [popxl.float32, popxl.float16], ids=lambda dtype: dtype.name)
def test_an_mlp(device: Devices, count: int, stride: int, size: int, dtype: popxl.dtype) -> None:
    """Columns of the first layer and rows of the second are divided; groups have different inputs."""
    torch = pytest.importorskip("torch")
    groups, rng = groups_of(count, stride, size), np.random.default_rng(0)
    x, g = rng.normal(size=(2, len(groups), 3, 6))
    w1, b1, w2 = rng.normal(size=(6, 16)) / 2, rng.normal(size=16), rng.normal(size=(16, 6)) / 4
    ir = popxl.Ir(replication=count)
    with ir.main_graph:
        weights = [
            sharded(ir, parts, groups, dtype, name)
            for parts, name in ((columns(w1, size), "w1"), (columns(b1, size), "b1"), (rows(w2, size), "w2"))
        ]
        inputs, gradients = (own(ir, of_groups(values, groups), dtype) for values in (x, g))
        tensors = with_gradients(mlp(ir.replica_grouping(stride, size)), [inputs, *weights], gradients)
    y, dx, *dw = results(ir, device, tensors)
    alike(y, groups)
    alike(dx, groups)
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if dtype is popxl.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for number, group in enumerate(groups):
        whole = [torch.tensor(t, requires_grad=True) for t in (x[number], w1, b1, w2)]
        expected = torch.nn.functional.gelu(whole[0] @ whole[1] + whole[2], approximate="tanh") @ whole[3]
        expected.backward(torch.tensor(g[number]))
        np.testing.assert_allclose(y[group[0]], expected.detach(), **tolerance)
        np.testing.assert_allclose(dx[group[0]], whole[0].grad, **tolerance)
        for found, t, cut in zip(dw, whole[1:], (columns, columns, rows), strict=True):
            for replica, part in zip(group, cut(t.grad.numpy(), size), strict=True):
                np.testing.assert_allclose(found[replica], part, **tolerance)


def attention(group: popxl.ReplicaGrouping, heads: int) -> Callable[..., popxl.Tensor]:
    """Of the heads of one replica; `wqkv` has their queries, keys and values side by side."""

    def split(t: popxl.Tensor) -> popxl.Tensor:
        return t.reshape((t.shape[0], heads, -1)).transpose((1, 0, 2))

    def build(x: popxl.Tensor, wqkv: popxl.Tensor, wo: popxl.Tensor) -> popxl.Tensor:
        qkv = tp.replicated_all_reduce_identical_inputs(x, group=group) @ wqkv
        q, k, v = map(split, ops.split(qkv, 3, axis=1))
        scores = ops.softmax(q @ k.transpose((0, 2, 1)) * (1 / np.sqrt(q.shape[-1])).item(), axis=-1)
        joined = (scores @ v).transpose((1, 0, 2)).reshape((x.shape[0], -1))
        return tp.replicated_all_reduce_identical_grad_inputs(joined @ wo, group=group)

    return build


@pytest.mark.thorough(but_each=5)
@both_ways
@each_grouping
def test_an_attention_block(device: Devices, count: int, stride: int, size: int) -> None:
    """Eight heads are divided; the residual runs around them."""
    torch = pytest.importorskip("torch")
    groups, rng, heads, width = groups_of(count, stride, size), np.random.default_rng(0), 8, 16
    x, g = rng.normal(size=(2, len(groups), 5, width))
    q, k, v, wo = rng.normal(size=(4, width, width)) / 2
    ir = popxl.Ir(replication=count)
    with ir.main_graph:
        qkv = [np.concatenate(parts, axis=1) for parts in zip(*(columns(w, size) for w in (q, k, v)), strict=True)]
        weights = [
            sharded(ir, qkv, groups, popxl.float32, "qkv"),
            sharded(ir, rows(wo, size), groups, popxl.float32, "o"),
        ]
        inputs, gradients = (own(ir, of_groups(values, groups), popxl.float32) for values in (x, g))
        block = attention(ir.replica_grouping(stride, size), heads // size)
        tensors = with_gradients(lambda x, *w: x + block(x, *w), [inputs, *weights], gradients)
    y, dx, dqkv, dwo = results(ir, device, tensors)
    alike(y, groups)
    alike(dx, groups)
    for number, group in enumerate(groups):
        whole = [torch.tensor(t, requires_grad=True) for t in (x[number], q, k, v, wo)]
        parts = [(whole[0] @ w).reshape(5, heads, -1).transpose(0, 1) for w in whole[1:4]]
        attended = torch.nn.functional.scaled_dot_product_attention(*parts)
        expected = whole[0] + attended.transpose(0, 1).reshape(5, width) @ whole[4]
        expected.backward(torch.tensor(g[number]))
        np.testing.assert_allclose(y[group[0]], expected.detach(), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(dx[group[0]], whole[0].grad, rtol=1e-4, atol=1e-5)
        for rank, replica in enumerate(group):
            found = np.split(dqkv[replica], 3, axis=1)
            for part, t in zip(found, whole[1:4], strict=True):
                np.testing.assert_allclose(part, columns(t.grad.numpy(), size)[rank], rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(dwo[replica], rows(whole[4].grad.numpy(), size)[rank], rtol=1e-4, atol=1e-5)
