"""What replicas have in common, as it is inferred: small programs, right and wrong, with what is found in them."""

import inspect
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl.analysis.checking import check
from popxl.errors import ContradictedStatementWarning, DriftingVariableWarning, ReplicationWarning
from popxl_addons import optimizers
from popxl_addons.layers import MLP, Attention, TransformerBlock
from popxl_addons.ops.replicated_all_reduce_TP import (
    replicated_all_reduce_identical_grad_inputs,
    replicated_all_reduce_identical_inputs,
)
from runtime.command import main

c = ops.collectives
F32 = popxl.float32


def mesh() -> popxl.Ir:
    return popxl.Ir(axes={"data": 2, "tensor": 4})


def fed(*shape: int) -> popxl.Tensor:
    return ops.host_load(popxl.h2d_stream(shape, F32, "x"))


def weight(*shape: int, name: str = "w") -> popxl.Tensor:
    return popxl.variable(np.ones(shape, np.float32), F32, name)


def divided(axis: int, *shape: int, name: str = "w") -> popxl.Tensor:
    """A weight of which each replica along `tensor` has a part."""
    w = popxl.variable(np.ones((4, *shape), np.float32), F32, name, replica_grouping="data")
    w.group_axis = axis
    return w


def gradient() -> tuple[popxl.Tensor, popxl.Tensor]:
    """A weight that all share, and its gradient for own data."""
    w = weight(8, 3)
    x = fed(5, 8)
    return w, ops.matmul(x.T, x @ w)


def update(w: popxl.Tensor, g: popxl.Tensor) -> None:
    ops.scaled_add_(w, g, b=-0.1)


def two_layers(reduction: str = "add", first: int = 1, second: int = 0) -> popxl.Tensor:
    """The same on all along `tensor`: two layers that are divided along it."""
    x = replicated_all_reduce_identical_inputs(fed(5, 8), group="tensor")
    h = ops.gelu(x @ divided(first, 8, 6, name="up"))
    return c.replicated_all_reduce(h @ divided(second, 6, 8, name="down"), reduction, group="tensor")


# Right ----------------------------------------------------------------------------------------------------------------


def reduced() -> None:
    w, g = gradient()
    update(w, c.replicated_all_reduce(g, "mean"))


def reduced_along_one_axis_after_the_other() -> None:
    w, g = gradient()
    update(w, c.replicated_all_reduce(c.replicated_all_reduce(g, "mean", group="data"), "add", group="tensor"))


def reduced_after_a_cast() -> None:
    w, g = gradient()
    update(w, ops.cast(c.replicated_all_reduce(ops.cast(g, popxl.bfloat16), "mean"), F32))


def own_along_the_axis() -> None:
    """Replicas along `tensor` have weights of their own, which only others along `data` share."""
    x, w = fed(5, 8), divided(1, 8, 3)
    update(w, c.replicated_all_reduce(x.T @ (x @ w), "mean", group="data"))


def fed_the_same() -> None:
    """The program says that what the host feeds is the same along `tensor`."""
    w, x = weight(8, 3), c.assert_replicated(fed(5, 8), "tensor")
    update(w, c.replicated_all_reduce(x.T @ (x @ w), "mean", group="data"))


def pieces_that_are_summed() -> None:
    two_layers()


def counted() -> None:
    w, g = gradient()
    count = c.replicated_all_reduce(popxl.constant(1.0))
    update(w, c.replicated_all_reduce(g) / count)


def with_numbers_that_all_are_fed() -> None:
    """A table of learning rates is fed to each replica; the gradient has been reduced."""
    w, g = gradient()
    rates = ops.host_load(popxl.h2d_stream((2,), F32, "rates"))
    update(w, c.replicated_all_reduce(g, "mean") * rates[0])


def in_pieces() -> None:
    g = gradient()[1]
    _, piece = popxl.replica_sharded_variable(np.ones((8, 3)), F32, "pieces")
    update(piece, c.replicated_reduce_scatter(g, "mean", None, True))


def skipped_if_not_finite() -> None:
    """Each replica looks at its shard, and all skip an update if one of them does."""
    x, w = c.assert_replicated(fed(5, 8), "tensor"), divided(1, 8, 6)
    dw = c.replicated_all_reduce(x.T @ ops.tanh(x @ w), "mean", group="data")
    is_bad = ops.cast(ops.logical_not(ops.isfinite(ops.sum(dw))), F32)
    is_any = c.replicated_all_reduce(is_bad, "max", group="tensor") > 0.0
    update(w, ops.where(is_any, popxl.constant(0.0), dw))


def a_scale_for_all_shards() -> None:
    """Each replica scales its shard by the same numbers: their gradient is the sum over replicas."""
    x, scale = c.assert_replicated(fed(5, 8), "tensor"), weight(6, name="scale")
    h = x @ divided(1, 8, 6)
    total = c.replicated_all_reduce(ops.sum(h * ops.tanh(h * scale), 0), group="tensor")
    update(scale, c.replicated_all_reduce(total, "mean", group="data"))


def convolved_by_channels() -> None:
    """Channels of a convolution by groups are independent, and so are shards along them."""
    x = c.assert_replicated(fed(2, 3, 5, 5), "tensor")
    h = ops.conv(ops.tanh(ops.conv(x, divided(0, 4, 3, 1, 1, name="up"))), divided(0, 4, 1, 3, 3), groups=4)
    y = ops.conv(ops.tanh(h), divided(1, 6, 4, 1, 1, name="down"))
    ops.host_store(popxl.d2h_stream(y.shape, F32, "y"), c.replicated_all_reduce(y, group="tensor"))


def skipped_if_any_counts() -> None:
    """Replicas add their counts along an axis along which all have counted the same: a multiple tells as much."""
    w, g = gradient()
    mean = c.replicated_all_reduce(g, "mean")
    count = c.replicated_all_reduce(ops.cast(ops.logical_not(ops.isfinite(ops.sum(mean))), F32), group="tensor")
    ir = w.ir
    changed = ir.create_graph(lambda w, g: w - g, w, mean)
    (new,) = ops.conditional(count > 0.0, ir.create_graph(lambda w, g: w, w, mean), changed, [w, mean], [w, mean])
    ops.var_updates.copy_var_update_(w, new)


def in_a_loop() -> None:
    w, x = weight(8, 3), fed(5, 8)

    def turn(x: Any, w: popxl.TensorByRef) -> None:
        update(w, c.replicated_all_reduce(x.T @ (x @ w), "mean"))

    ops.repeat(w.ir.create_graph(turn, x, w), 3, x, w)


def with_code_that_is_loaded() -> None:
    """The code of a graph is no value that replicas hold."""
    w, x = weight(8, 3), fed(5, 8)
    graph = w.ir.create_graph(lambda x, w: x.T @ (x @ w), x, w)
    ops.remote_code_load(graph, "executable")
    update(w, c.replicated_all_reduce(*ops.call(graph, x, w), "mean"))


def trained(sharded: bool) -> None:
    class Model(addons.Module):
        def build(self, x: popxl.Tensor) -> popxl.Tensor:
            self.block = TransformerBlock(Attention(4, tensor="tensor"), MLP(16, tensor="tensor"))
            y = self.block(x)
            return ops.mean(y * y)

    x = popxl.h2d_stream((2, 4, 8), F32, "x")
    addons.train_step(Model(), x, optimizer=partial(optimizers.adamw, lr=0.1, clip_norm=1.0), sharded=sharded)


@pytest.mark.parametrize(
    "program",
    [
        reduced,
        reduced_along_one_axis_after_the_other,
        reduced_after_a_cast,
        own_along_the_axis,
        fed_the_same,
        pieces_that_are_summed,
        counted,
        in_pieces,
        skipped_if_not_finite,
        a_scale_for_all_shards,
        convolved_by_channels,
        skipped_if_any_counts,
        in_a_loop,
        with_code_that_is_loaded,
        pytest.param(partial(trained, sharded=False), marks=pytest.mark.thorough),
        partial(trained, sharded=True),
    ],
)
def test_right_programs(program: Callable[[], None]) -> None:
    with (ir := mesh()).main_graph:
        program()
    report = check(ir)
    assert not report.findings, report
    popxl.Session(ir, "ipu_model")


def test_what_is_not_certain_is_no_warning() -> None:
    with (ir := mesh()).main_graph:
        with_numbers_that_all_are_fed()
    assert [each.certain for each in check(ir).findings] == [False]
    popxl.Session(ir, "ipu_model")


# Wrong ----------------------------------------------------------------------------------------------------------------
# The line with the comment is the one that is named.


def not_reduced() -> None:
    w, g = gradient()
    ops.scaled_add_(w, g, b=-0.1)  # found


def reduced_along_one_axis() -> None:
    w, g = gradient()
    g = c.replicated_all_reduce(g, "mean", group="tensor")
    ops.scaled_add_(w, g, b=-0.1)  # found


def reduced_along_the_axis_it_is_divided_over() -> None:
    x, w = fed(5, 8), divided(1, 8, 3)
    g = c.replicated_all_reduce(x.T @ (x @ w), "mean", group="tensor")
    ops.scaled_add_(w, g, b=-0.1)  # found


def shards_not_reduced_along_the_other_axis() -> None:
    """The shards of a weight along one axis, which replicas along the other share."""
    x, shard = (
        c.assert_replicated(fed(5, 8), "tensor"),
        popxl.replica_sharded_variable(np.ones((8, 3)), F32, "w", shard_over=4)[1],
    )
    g = x.T @ (x @ c.replicated_all_gather(shard, group="tensor"))
    ops.scaled_add_(shard, c.replica_sharded_slice(g, group="tensor"), b=-0.1)  # found


def not_reduced_where_divided_layers_begin() -> None:
    """What is declared the same along one axis is not reduced by that."""
    w, x = weight(3), fed(5, 3)
    y = x * replicated_all_reduce_identical_inputs(w, group="tensor")
    ops.scaled_add_(w, ops.sum(y, axis=0), b=-0.1)  # found


def summed_twice() -> None:
    w, g = gradient()
    g = c.replicated_all_reduce(g)
    g = c.replicated_all_reduce(g, group="tensor")  # found
    update(w, g)


def mean_of_terms() -> None:
    x = replicated_all_reduce_identical_inputs(fed(5, 8), group="tensor")
    h = ops.gelu(x @ divided(1, 8, 6, name="up"))
    c.replicated_all_reduce(h @ divided(0, 6, 8, name="down"), "mean", group="tensor")  # found


def summed_pieces() -> None:
    c.replicated_all_reduce(divided(1, 8, 6), group="tensor")  # found


def said_to_be_the_same() -> None:
    x = replicated_all_reduce_identical_inputs(fed(5, 8), group="tensor")
    h = x @ divided(1, 8, 6)
    c.assert_replicated(h, "tensor")  # found


def not_summed_between_layers() -> None:
    """A weight after divided layers, without the sum that ends them."""
    bias = weight(8, name="bias")
    x = replicated_all_reduce_identical_inputs(fed(5, 8), group="tensor")
    y = ops.gelu(x @ divided(1, 8, 6, name="up")) @ divided(0, 6, 8, name="down") * bias
    ops.scaled_add_(bias, c.replicated_all_reduce(ops.sum(y, axis=0), "mean", group="data"), b=0.1)  # found


@pytest.mark.parametrize(
    ("program", "category", "tensor", "axes"),
    [
        (not_reduced, "drifting variable", "w", ("data", "tensor")),
        (reduced_along_one_axis, "drifting variable", "w", ("data",)),
        (reduced_along_the_axis_it_is_divided_over, "drifting variable", "w", ("data",)),
        (shards_not_reduced_along_the_other_axis, "drifting variable", "w", ("data",)),
        (not_reduced_where_divided_layers_begin, "drifting variable", "w", ("data",)),
        (summed_twice, "repeated reduction", "matmul_out__t0_all_reduce", ("tensor",)),
        (mean_of_terms, "mean of a sum", "matmul_out__t0", ("tensor",)),
        (summed_pieces, "reduced shards", "w", ("tensor",)),
        (said_to_be_the_same, "contradicted statement", "matmul_out", ("tensor",)),
        (not_summed_between_layers, "drifting variable", "bias", ("tensor",)),
    ],
)
def test_wrong_programs(program: Callable[[], None], category: str, tensor: str, axes: tuple[str, ...]) -> None:
    with (ir := mesh()).main_graph:
        program()
    (finding,) = check(ir).findings
    assert (finding.category, finding.tensor, finding.axes) == (category, tensor, axes)
    lines, first = inspect.getsourcelines(program)
    (at,) = (first + i for i, line in enumerate(lines) if line.endswith("# found\n"))
    assert finding.line == f"test_replication.py:{at}"
    if category == "contradicted statement":
        with pytest.warns(ContradictedStatementWarning, match="`matmul_out` is said to be the same"):
            popxl.Session(ir, "ipu_model")
    if category == "drifting variable":
        with pytest.warns(DriftingVariableWarning, match=f"Replicas share `{tensor}`"):
            popxl.Session(ir, "ipu_model")


def test_a_session_refuses_what_is_certainly_wrong_where_that_is_an_error() -> None:
    with (ir := mesh()).main_graph:
        update(*gradient())
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=ReplicationWarning)
        with pytest.raises(DriftingVariableWarning, match="Replicas share `w`"):
            popxl.Session(ir, "ipu_model")


# Otherwise than the rest ----------------------------------------------------------------------------------------------
# Each is a program with a mistake, unless it is said to be right.


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
    assert found.line == f"test_replication.py:{at}"
    popxl.Session(ir, "ipu_model")
    assert not recwarn


@pytest.mark.parametrize(
    "program",
    [
        three_layers,
        partial(three_layers, "add", divisor=8),
        partial(three_layers, factor=0.5),
        partial(three_layers, stored=None),
        partial(of_the_same_data, False),
        partial(begun, False, True),
        partial(begun, True, False),
        partial(gathered, True),
        partial(in_shards, True),
        partial(dropped, True, False),
        partial(dropped, False, False),
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


# Types ----------------------------------------------------------------------------------------------------------------


def test_types() -> None:
    with (ir := mesh()).main_graph:
        y = two_layers()
    report = check(ir)
    assert report.text(y) == "{data: varying}"
    shown = {t.name: report.text(t) for op in ir.main_graph.ops for t in op.outputs}
    assert shown["gelu_out"] == "{data: varying, tensor: sharded 1}"
    assert shown["matmul_out__t0"] == "{data: varying, tensor: partial}"
    assert {v.name: report.text(v) for v in ir.main_graph.variables} == {
        "down": "{tensor: sharded 0}",
        "up": "{tensor: sharded 1}",
    }


def test_types_in_a_printed_graph() -> None:
    with (ir := mesh()).main_graph:
        two_layers()
    report = check(ir)
    lines = {line.strip() for line in report.listing(ir.main_graph).splitlines()}
    assert "matmul_out__t0: f32[5, 8]{data: varying, tensor: partial} = MatMul(gelu_out, down)" in lines
    assert "down: f32[6, 8]{tensor: sharded 0} = variable, shared along data" in {" ".join(e.split()) for e in lines}
    assert "{" not in str(ir.main_graph)


def test_gradients_of_divided_layers() -> None:
    """What goes back through both ends of divided layers is the same on all of them."""
    with (ir := mesh()).main_graph:
        x = popxl.graph_input
        facts = [divided(1, 8, 6, name="up"), divided(0, 6, 8, name="down")]

        def forward(x: Any, up: Any, down: Any) -> Any:
            inside = replicated_all_reduce_identical_inputs(x, group="tensor")
            return replicated_all_reduce_identical_grad_inputs(ops.gelu(inside @ up) @ down, group="tensor")

        x = fed(5, 8)
        graph = ir.create_graph(forward, x, *facts)
        info = popxl.transforms.autodiff(graph)
        site = ops.call_with_info(graph, x, *facts)
        found = ops.call(info.graph, site.outputs[0], inputs_dict=info.inputs_dict(site))
    addons.patterns.apply_pre_alias_patterns(ir)
    report = check(ir)
    assert [report.text(t) for t in found] == [
        "{data: varying}",
        "{data: varying, tensor: sharded 1}",
        "{data: varying, tensor: sharded 0}",
    ]


def test_groups_that_form_no_mesh() -> None:
    ir = popxl.Ir(replication=6)
    with ir.main_graph:
        x = fed(4)
        c.replicated_all_reduce(x, group=ir.replica_grouping(group_size=2))
        c.replicated_all_reduce(x, group=ir.replica_grouping(group_size=3))
    report = check(ir)
    assert report.mesh is None
    assert "do not form a mesh" in str(report)


def test_groups_without_names() -> None:
    ir = popxl.Ir(replication=8)
    with ir.main_graph:
        w, g = gradient()
        ops.scaled_add_(w, c.replicated_all_reduce(g, "mean", group=ir.replica_grouping(stride=2, group_size=4)), b=0.1)
    (finding,) = check(ir).findings
    assert finding.axes == ("2 replicas",)


def test_an_op_that_does_not_say_what_it_makes() -> None:
    kind = popxl.OpKind(
        "Total",
        lambda t, *, group: group.combined(t, "add"),
        shape=lambda t, **groups: t.spec,
        gradient=None,
        traits=[popxl.op.BetweenReplicas()],
    )
    with (ir := mesh()).main_graph:
        w, g = gradient()
        update(w, kind(g, stride=1, group_size=8))
    report = check(ir)
    assert not report.findings
    assert "not typed: Total" in str(report)


def test_the_statement_computes_nothing() -> None:
    with (ir := popxl.Ir(replication=2)).main_graph:
        x = fed(3)
        y = c.assert_replicated(x)
        out = popxl.d2h_stream((3,), F32)
        ops.host_store(out, y)
    assert not ir.communication().collectives
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    with popxl.Session(ir, "ipu_model") as session:
        (stream,) = session.expected_inputs()
        np.testing.assert_array_equal(session.run({stream: rows})[out], rows)


# The command ----------------------------------------------------------------------------------------------------------

PROGRAM = """
import numpy as np
import popxl
from popxl import ops

ir = popxl.Ir(axes={"data": 2, "tensor": 4})
with ir.main_graph:
    x = ops.host_load(popxl.h2d_stream((4, 8), popxl.float32, "x"))
    w = popxl.variable(np.ones((8, 3)), popxl.float32, "w")
    dw = x.T @ (x @ w)
    dw = ops.collectives.replicated_all_reduce(dw, "mean", group="GROUP")
    ops.scaled_add_(w, dw, b=-0.1)
popxl.Session(ir, "ipu_model").run({})
"""


@pytest.mark.parametrize(("group", "code"), [("tensor", 1), ("data", 1)])
def test_check(group: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "train.py"
    file.write_text(PROGRAM.replace("GROUP", group))
    assert main(["check", str(file)]) == code
    out = capsys.readouterr().out
    other = {"tensor": "data", "data": "tensor"}[group]
    assert f"Replicas share `w`, and each changes it by a value of its own along '{other}'" in out
    assert "train.py:12" in out


COMPARED = """
import sys
import numpy as np
import popxl
from popxl import ops

data = SIZE
ir = popxl.Ir(axes={"data": data})
with ir.main_graph:
    x = ops.host_load(popxl.h2d_stream((8 // data, 3), popxl.float32, "x"))
    w = popxl.variable(np.ones(3), popxl.float32, "w")
    g = ops.collectives.replicated_all_reduce(ops.mean(x, 0), "REDUCTION")
    ops.scaled_add_(w, g, b=-0.1)
popxl.Session(ir, "ipu_model").run({})
"""


@pytest.mark.parametrize(
    ("size", "arguments"),
    [
        ('popxl.choice("data", [4, 1])', ["{file}", "--run"]),
        ('popxl.choice("data", [4, 1])', ["--run", "{file}"]),
        ("int(sys.argv[1])", ["{file}", "--run=1", "4"]),
    ],
)
@pytest.mark.parametrize(("reduction", "code"), [("mean", 0), ("add", 1)])
def test_check_beside_one_replica(
    size: str, arguments: list[str], reduction: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Mean or sum of gradients from different data, both right by themselves: the experiment tells."""
    file = tmp_path / "train.py"
    file.write_text(COMPARED.replace("SIZE", size).replace("REDUCTION", reduction))
    assert main(["check", *(each.format(file=file) for each in arguments)]) == code
    out = capsys.readouterr().out
    assert "Nothing was found." in out and "data 4 beside one replica" in out
    assert ("w[0] is" in out) == bool(code) and ("no difference" in out) != bool(code)


@pytest.mark.parametrize(
    ("size", "arguments", "message"),
    [
        ('popxl.choice("data", [4, 2])', [], "'data' has the options (4, 2) here"),
        ("4", [], "does not build Ir"),
        ("int(sys.argv[1])", ["4"], "does not build Ir"),
    ],
)
def test_check_of_what_cannot_be_compared(
    size: str, arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "train.py"
    file.write_text(COMPARED.replace("SIZE", size).replace("REDUCTION", "mean"))
    assert main(["check", str(file), "--run", *arguments]) == 2
    error = capsys.readouterr().err
    assert "popxl: --run: " in error and message in error and "popxl.choice" in error


def test_check_of_a_right_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "train.py"
    file.write_text(PROGRAM.replace(', group="GROUP"', ""))
    assert main(["check", str(file)]) == 0
    assert "Nothing was found." in capsys.readouterr().out
