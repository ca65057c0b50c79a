"""What one variable or number of a program has otherwise than the rest: programs with a mistake, and right siblings."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.analysis.checking import check
from tests.popxl.meshes import F32, c, fed, gradient, mesh, update, weight


def three_layers(
    reduction: str = "mean", factor: float = 1.0, divisor: float = 1.0, stored: str | None = "mean", group: Any = None
) -> None:
    """Three weights by hand, of which the second gets its gradient by a reduction of its own."""
    x = fed(5, 8)
    a, b, bias = weight(8, 6, name="a"), weight(6, 3, name="b"), weight(3, name="bias")
    h = x @ a
    y = h @ b + bias
    loss = ops.mean(y)
    if stored is not None:
        loss = c.replicated_all_reduce(loss, stored, group)  # found in the loss
        ops.host_store(popxl.d2h_stream((), F32, "loss"), loss)
    dy = ops.cast(y * 0.1, F32)
    update(a, c.replicated_all_reduce(x.T @ (dy @ b.T), "mean"))
    db = c.replicated_all_reduce(h.T @ dy, reduction)  # found in the reduction
    if (factor, divisor) != (1.0, 1.0):
        db = db * factor / divisor  # found in the factor
    update(b, db)
    update(bias, c.replicated_all_reduce(ops.sum(dy, 0), "mean"))


def of_the_same_data(all: bool) -> None:
    """Replicas gather what they are fed, and each computes with the same rows, if not with all of them."""
    x = fed(5, 8)
    rows = c.replicated_all_gather(x)
    w = weight(8, 3)
    x = rows[:5] + rows[5:10] if all else x
    update(w, c.replicated_all_reduce(x.T @ (x @ w), "mean"))  # found


def in_pieces_beside_divided_layers() -> None:
    """A weight is in pieces on all replicas, which have the same rows along `tensor`, and another is not."""
    x = c.replicated_all_gather(fed(5, 8), 0, "tensor")
    w, (_, piece) = weight(8, 3), popxl.replica_sharded_variable(np.ones((8, 3)), F32, "v")
    update(w, c.replicated_all_reduce(x.T @ (x @ w), "mean", "data"))
    v = c.replicated_all_gather(piece).reshape((8, 3))
    ops.scaled_add_(piece, c.replicated_reduce_scatter(x.T @ (x @ v), "mean", None, True), b=-0.1)


def of_a_gathered_batch() -> None:
    """Replicas gather the batch along an axis, and take the mean of equal gradients along it, too."""
    w, x = weight(8, 3), c.replicated_all_gather(fed(5, 8), 0, "tensor")
    update(w, c.replicated_all_reduce(x.T @ (x @ w), "mean"))


def gathered(fed_to_it: bool) -> None:
    """All replicas begin with what one is fed; or all take the gradient of one."""
    w, x = weight(8, 3), fed(5, 8)
    of_all = c.replicated_all_gather(fed(8, 3) if fed_to_it else x.T @ (x @ w), output_shape="new_axis")  # found
    if fed_to_it:
        ops.var_updates.copy_var_update_(w, of_all[0])
    else:
        update(w, of_all[0] * 2.0)


def in_shards(reduced: bool) -> None:
    """Each replica changes its shard of a weight by a shard of a gradient."""
    x, (_, shard) = fed(5, 8), popxl.replica_sharded_variable(np.ones((8, 3)), F32, "w")
    dw = x.T @ (x @ c.replicated_all_gather(shard))
    dw = c.replicated_all_reduce(dw, "mean") if reduced else dw
    update(shard, c.replica_sharded_slice(dw))  # found


def dropped(of_jax: bool, shared: bool) -> None:
    """Noise, of a seed that replicas share or of their own."""
    x, w = fed(5, 8), weight(8, 3)
    alone = x.ir.replica_grouping(group_size=1)
    numbers = np.arange(1, 3 if shared else 17, dtype=np.uint32).reshape((2,) if shared else (8, 2))
    seed = popxl.variable(numbers, popxl.uint32, "seed", replica_grouping=None if shared else alone)

    def halved(x: Any, key: Any) -> Any:
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0)  # found in JAX

    noise = None if of_jax else ops.random_normal(seed, (5, 8))
    x = popxl.from_jax(halved)(x, seed) if noise is None else x + noise * 0.1  # found in the sum
    update(w, c.replicated_all_reduce(x.T @ (x @ w), "mean"))


def divided_before(by: float) -> None:
    """One of three gradients is divided by a number before its mean is taken."""
    x = fed(5, 8)
    for name, divisor in (("a", 1.0), ("b", by), ("c", 1.0)):
        w = weight(8, 3, name=name)
        dw = x.T @ (x @ w)
        dw = dw / divisor if divisor != 1 else dw  # found
        update(w, c.replicated_all_reduce(dw, "mean"))


def penalized(reduction: str, weight_of_mean: float) -> None:
    """A stored loss of a mean and a penalty."""
    w, g = gradient()
    loss = ops.mean(g) * weight_of_mean + ops.sum(w * w) * 0.01
    loss = c.replicated_all_reduce(loss, reduction)  # found in the loss with a penalty
    ops.host_store(popxl.d2h_stream((), F32, "loss"), loss)
    update(w, c.replicated_all_reduce(g, "mean"))


def begun(different: bool, reduced: bool) -> None:
    """A weight of each replica."""
    x = fed(5, 8)
    numbers = np.ones((8, 8, 3)) * (1 + different * np.arange(8).reshape(-1, 1, 1))
    w = popxl.variable(numbers, F32, "w", replica_grouping=x.ir.replica_grouping(group_size=1))
    g = x.T @ (x @ w)
    g = c.replicated_all_reduce(g, "mean") if reduced else g
    ops.scaled_add_(w, g, b=-0.1)  # found begun


def dropped_in_parts(rows: int) -> None:
    """Each replica drops parts of its rows: of each other ones, or of all the same."""
    w, x = weight(8, 3), fed(5, 8)
    seed = popxl.variable(popxl.create_seeds(3), popxl.uint32, "seed")
    h = ops.shaped_dropout(x, seed, (rows, 8), 0.5)  # found in the parts
    seed += 1
    update(w, c.replicated_all_reduce(h.T @ (h @ w), "mean"))


def exchanged(along_data: bool) -> None:
    """A layer whose rows are computed by other replicas; one exchange is changed after differentiation."""
    x, w = fed(8, 3), weight(8, 3)

    def layer(x: popxl.Tensor, w: popxl.Tensor) -> popxl.Tensor:
        there = ops.sin(c.replicated_all_to_all(x * w, group="tensor"))
        return c.replicated_all_to_all(there, group="tensor")  # found at the exchange

    graph = popxl.gir().create_graph(layer, x, w)
    gradient = popxl.transforms.autodiff(graph)
    exchange = [op for op in graph.ops if op.op_type == "ReplicatedAllToAll"][-1]
    exchange.edit(attributes={**exchange.attributes, **({"stride": 4, "group_size": 2} if along_data else {})})
    site = ops.call_with_info(graph, x, w)
    _, dw = ops.call(gradient.graph, ops.cos(site.outputs[0]), inputs_dict=gradient.inputs_dict(site))
    update(w, c.replicated_all_reduce(dw, "mean"))


def accumulated(reduction: str) -> None:
    """Gradients in accumulators; those of two weights are reduced before, and that of another after."""
    x = fed(5, 8)
    for name in "abc":
        w, total = weight(8, 3, name=name), weight(8, 3, name=f"{name}_total")
        g = x.T @ (x @ w)
        ops.var_updates.accumulator_zero_(total)
        ops.var_updates.accumulate_(total, g if name == "b" else c.replicated_all_reduce(g, "mean"))
        update(w, c.replicated_all_reduce(total, reduction) if name == "b" else total)  # found after accumulation


def statistics() -> None:
    """Means of rows, beside gradients that are sums."""
    x = fed(5, 8)
    for name in "abc":
        w = weight(8, 3, name=name)
        update(w, c.replicated_all_reduce(x.T @ (x @ w), "add"))
    update(weight(8, name="mean"), c.replicated_all_reduce(ops.mean(x, 0), "mean"))


def an_ensemble() -> None:
    """Models along an axis; for each part of the data, the mean of all is stored."""
    x = c.assert_replicated(fed(5, 8), "tensor")
    w = popxl.variable(np.ones((4, 8, 3)), F32, "w", replica_grouping="data")
    y = x @ w
    update(w, c.replicated_all_reduce(x.T @ y, "mean", "data"))
    ops.host_store(popxl.d2h_stream((), F32, "loss"), c.replicated_all_reduce(ops.mean(y), "mean", "tensor"))


@pytest.mark.parametrize(
    ("program", "category", "tensor", "axes", "mark"),
    [
        (partial(three_layers, "add"), "mixed reductions", "b", ("data", "tensor"), "found in the reduction"),
        (partial(three_layers, factor=0.125), "factor of replicas", "b", ("data", "tensor"), "found in the factor"),
        (partial(three_layers, divisor=8), "factor of replicas", "b", ("data", "tensor"), "found in the factor"),
        (partial(three_layers, stored="add"), "sum of means", "mean_out_all_reduce", ("data", "tensor"), "in the loss"),
        (partial(three_layers, group="data"), "partly reduced number", "mean_out_all_reduce", ("tensor",), "the loss"),
        (partial(of_the_same_data, True), "gradients of the same data", "matmul_out__t1", ("data", "tensor"), "found"),
        (partial(begun, True, True), "different beginnings", "w", ("data", "tensor"), "found begun"),
        (partial(gathered, False), "same batch", "matmul_out__t0_reshaped", ("data", "tensor"), "found"),
        (partial(in_shards, False), "shards of different values", "matmul_out__t0", ("data", "tensor"), "found"),
        (partial(dropped, True, True), "same seed", "seed", ("data", "tensor"), "found in JAX"),
        (partial(dropped, False, True), "same seed", "seed", ("data", "tensor"), "found in the sum"),
        (partial(dropped_in_parts, 5), "same seed", "seed", ("data", "tensor"), "found in the parts"),
        (partial(divided_before, 8), "factor of replicas", "b", ("data", "tensor"), "found"),
        (partial(penalized, "add", 1.0), "sum of means", "add_out_all_reduce", ("data", "tensor"), "with a penalty"),
        (partial(exchanged, True), "gradient along other axes", "sin_out_reshaped_all_to_all", ("data",), "exchange"),
        (partial(accumulated, "add"), "mixed reductions", "b", ("data", "tensor"), "found after accumulation"),
    ],
)  # fmt: skip
def test_outliers(
    program: "partial[None]", category: str, tensor: str, axes: tuple[str, ...], mark: str, recwarn: Any
) -> None:
    with (ir := mesh()).main_graph, popxl.in_sequence():
        program()
    (found,) = check(ir).findings
    assert (found.category, found.certain, found.tensor, found.axes) == (category, False, tensor, axes)
    lines, first = inspect.getsourcelines(program.func)
    (at,) = (first + i for i, line in enumerate(lines) if line.endswith(f"{mark}\n"))
    assert found.line == f"test_outliers.py:{at}"
    popxl.Session(ir, "ipu_model")
    assert not recwarn


@pytest.mark.parametrize(
    "program",
    [
        an_ensemble,
        three_layers,
        partial(three_layers, "add", divisor=8),
        partial(three_layers, factor=0.5),
        partial(three_layers, stored=None),
        partial(of_the_same_data, False),
        in_pieces_beside_divided_layers,
        of_a_gathered_batch,
        partial(begun, False, True),
        partial(begun, True, False),
        partial(gathered, True),
        partial(in_shards, True),
        partial(dropped, True, False),
        partial(dropped, False, False),
        partial(dropped_in_parts, 1),
        partial(divided_before, 3),
        partial(penalized, "add", 1 / 8),
        partial(penalized, "mean", 8.0),
        partial(penalized, "mean", 1 / 8),
        partial(exchanged, False),
        partial(accumulated, "mean"),
        statistics,
    ],
)
def test_right_siblings_of_outliers(program: Callable[[], None]) -> None:
    with (ir := mesh()).main_graph, popxl.in_sequence():
        program()
    report = check(ir)
    assert not report.findings, report


def test_noise_in_graphs_that_are_called_in_many_ways() -> None:
    """Each of 60 graphs calls the next one twice with the same noise: there are 2**60 ways to the last one."""

    def scaled(x: popxl.Tensor, noise: popxl.Tensor) -> popxl.Tensor:
        return x * noise

    def calling_twice(graph: popxl.Graph) -> Callable[..., popxl.Tensor]:
        return lambda x, noise: ops.call(graph, ops.call(graph, x, noise)[0], noise)[0]

    ir = popxl.Ir(axes={"data": 2})
    with ir.main_graph:
        x = ops.host_load(popxl.h2d_stream((3,), popxl.float32, "x"))
        w = popxl.variable(np.ones(3), popxl.float32, "w")
        noise = ops.random_normal(popxl.variable([1, 2], popxl.uint32, "seed"), (3,))
        layer: Callable[..., popxl.Tensor] = scaled
        for _ in range(60):
            layer = calling_twice(ir.create_graph(layer, x, noise))
        ops.add_(w, ops.collectives.replicated_all_reduce(layer(x, noise), "mean", "data"))
    assert [(each.category, each.tensor) for each in check(ir).findings] == [("same seed", "seed")]
