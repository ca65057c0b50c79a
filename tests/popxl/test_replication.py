"""What replicas have in common, as it is inferred: small programs, certainly right and certainly wrong."""

import inspect
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl.analysis.checking import check
from popxl.errors import ContradictedStatementWarning, DriftingVariableWarning, ReplicationWarning
from popxl_addons import optimizers
from popxl_addons.layers import MLP, Attention, TransformerBlock
from popxl_addons.ops.replicated_all_reduce_TP import replicated_all_reduce_identical_inputs
from tests.popxl.meshes import F32, c, divided, fed, gradient, mesh, two_layers, update, weight

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


def scaled_by_the_largest_norm() -> None:
    """Each replica takes the norm of its shard, and all divide by the largest of these."""
    x, w = c.assert_replicated(fed(5, 8), "tensor"), divided(1, 8, 6)
    dw = c.replicated_all_reduce(x.T @ ops.tanh(x @ w), "mean", group="data")
    update(w, dw / c.replicated_all_reduce(ops.sqrt(ops.sum(dw * dw)), "max", group="tensor"))


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
        scaled_by_the_largest_norm,
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
