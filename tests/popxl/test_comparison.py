"""`popxl.testing.compare`: a program of many replicas beside the same program of one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl.analysis.checking import check
from popxl.errors import PopxlWarning
from popxl.testing import compare
from popxl_addons import optimizers
from popxl_addons.layers import MLP, Attention, LayerNorm, Linear, RMSNorm
from tests.mutants.programs import LLAMA, Language, Ring, kit

C = ops.collectives
F32 = popxl.float32
Reduced = Callable[[popxl.Tensor], popxl.Tensor]


class Net(addons.Module):
    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        w = self.add_variable_input("w", partial(np.random.normal, size=(6, 5)), x.dtype)
        y = ops.gelu(x @ w)
        return ops.mean(y * y)


def trained(axes: dict[str, int], **settings: object) -> popxl.Ir:
    ir = popxl.Ir(axes=axes)
    with ir.main_graph:
        x = popxl.h2d_stream((8 // axes["data"], 6), F32, "x")
        training = addons.train_step(Net(), x, optimizer=partial(optimizers.sgd, lr=0.1), **settings)  # type: ignore[arg-type]
        ops.host_store(popxl.d2h_stream((), F32, "loss"), training.loss)
    return ir


@pytest.mark.parametrize("settings", [{}, {"sharded": True}, {"accumulate": 2}], ids=str)
def test_the_kit_trains_as_one_replica(settings: dict[str, object]) -> None:
    report = compare(partial(trained, **settings), axes={"data": 2}, steps=2)
    report.check()
    assert report and "loss" in report.compared and "no difference" in str(report)


@pytest.mark.parametrize("is_wrong", [False, True])
def test_rounding_of_mixed_precision_is_no_difference(is_wrong: bool) -> None:
    """Gradients in bfloat16 also round variables of float32; a wrong mean is still seen."""

    class Squares(addons.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = MLP(32)

        def build(self, x: popxl.Tensor) -> popxl.Tensor:
            y = self.mlp(x)
            y = ops.mean(ops.cast(y * y, F32))
            return y * float(popxl.gcg().ir.replication_factor) if is_wrong else y

    def program(axes: dict[str, int]) -> popxl.Ir:
        ir = popxl.Ir(axes=axes)
        with ir.main_graph:
            x = popxl.h2d_stream((16 // axes["data"], 16), F32, "x")
            rule = partial(optimizers.sgd, lr=0.3)
            addons.train_step(Squares(), x, optimizer=rule, precision=addons.MixedPrecision(popxl.bfloat16))
        return ir

    assert bool(compare(program, axes={"data": 4}, steps=2)) is not is_wrong


def test_a_loss_is_compared_whose_stream_is_named_after_it() -> None:
    """The name of a loss that is reduced over replicas is another one."""

    def program(axes: dict[str, int]) -> popxl.Ir:
        ir = popxl.Ir(axes=axes)
        with ir.main_graph:
            x = popxl.h2d_stream((8 // axes["data"], 6), F32, "x")
            training = addons.train_step(Net(), x, optimizer=partial(optimizers.sgd, lr=0.1))
            addons.host_store(training.loss if axes["data"] == 1 or not is_wrong else training.loss + 1.0)
        return ir

    for is_wrong in (False, True):
        report = compare(program, axes={"data": 2}, steps=1)
        assert "mean_out_stream" in report.compared and not report.left_out
        assert [each.what for each in report.differences] == ["mean_out_stream"] * is_wrong


class Shifted(addons.Module):
    """Logits to which one number is added: its gradient is zero but for rounding errors, and for a slope."""

    def build(self, x: popxl.Tensor, slope: float) -> popxl.Tensor:
        w = self.add_variable_input("w", partial(np.random.normal, size=(6, 5)), x.dtype)
        shift = self.add_variable_input("shift", partial(np.zeros, ()), x.dtype)
        labels = popxl.constant(np.arange(x.shape[0]) % 5, popxl.int32)
        return addons.cross_entropy(x @ w + shift, labels) + slope * shift


@pytest.mark.parametrize(("slope", "is_wrong"), [(0.0, False), (0.1, True), (0.1, False)])
def test_what_rounding_errors_decide_is_left_out(slope: float, is_wrong: bool) -> None:
    """Adam divides a gradient by its size. The number is compared if it has a slope."""

    def program(axes: dict[str, int]) -> popxl.Ir:
        np.random.seed(0)
        ir = popxl.Ir(axes=axes)
        with ir.main_graph, popxl.in_sequence():
            x = popxl.h2d_stream((40 // axes["data"], 6), F32, "x")
            adamw = partial(optimizers.adamw, lr=0.1)
            step = addons.train_step(Shifted(), x, optimizer=adamw, slope=slope)
            ops.host_store(popxl.d2h_stream((), F32, "loss"), step.loss)
            if axes["data"] > 1 and is_wrong:
                ops.scaled_add_(step.variables.shift, step.variables.shift, b=1e-3)
        return ir

    report = compare(program, axes={"data": 2}, steps=2)
    assert [each.what for each in report.differences] == ["shift"] * is_wrong
    reasons = {"rounding errors decide its value, on one replica, too"}
    assert {*report.left_out.values()} == (set() if slope else reasons)


def ring_attention(axes: dict[str, int]) -> popxl.Ir:
    """Texts in pieces, which go round the replicas along `text`."""
    return kit(partial(Ring, "text"), axes, (4 // axes["data"], 8 // axes["text"], 8))


def llama(axes: dict[str, int]) -> popxl.Ir:
    """Grouped heads, a gated network and norms of heads, divided along `tensor`."""
    return kit(partial(Language, LLAMA, "tensor"), axes, (4 // axes["data"], 5), popxl.int32)


@pytest.mark.thorough
@pytest.mark.parametrize("program, along", [(ring_attention, "text"), (llama, "tensor")])
def test_attention_over_replicas_trains_as_one_replica(program: Callable[..., popxl.Ir], along: str) -> None:
    report = compare(program, axes={"data": 2, along: 2}, steps=2)
    report.check()
    assert "loss" in report.compared and not report.left_out
    assert len([name for name in report.compared if name.endswith("weight")]) >= 4


def own(axes: dict[str, int], reduced: Reduced) -> popxl.Ir:
    """A variable that is divided along an axis, and one that is changed by what is reduced."""
    ir = popxl.Ir(axes=axes)
    with ir.main_graph, popxl.in_sequence():
        x = ops.host_load(popxl.h2d_stream((8 // axes["data"], 6), F32, "x"))
        parts = axes["tensor"]
        v = popxl.variable(np.ones((*(parts,) * (parts > 1), 6 // parts)), F32, "v", replica_grouping="data")
        w = popxl.variable(np.ones(6), F32, "w")
        ops.scaled_add_(v, v, b=-0.5)
        gradient = reduced(ops.mean(x * (x @ w).reshape((-1, 1)), 0))
        ops.scaled_add_(w, gradient, b=-0.1)
    return ir


AXES = {"data": 2, "tensor": 3}


def test_pieces_are_put_together() -> None:
    report = compare(partial(own, reduced=lambda g: C.replicated_all_reduce(g, "mean")), axes=AXES)
    assert report and sorted(report.compared) == ["v", "w"]


def test_a_difference_names_variable_step_and_lines() -> None:
    report = compare(partial(own, reduced=lambda g: C.replicated_all_reduce(g, "add", "data")), axes=AXES)
    (found,) = report.differences
    assert (found.what, found.step) == ("w", 1) and found.found != pytest.approx(found.expected)
    assert found.line.startswith("test_comparison.py") and found.collective.startswith("test_comparison.py")
    with pytest.raises(AssertionError, match=r"w\[0\] is .* after step 1, and on one replica"):
        report.check()


def test_copies_that_drift_apart_are_seen() -> None:
    report = compare(partial(own, reduced=lambda g: g), axes=AXES)
    assert [each.what for each in report.differences] == ["w"] and not report.differences[0].collective


def test_copies_of_a_weight_differ_also_if_their_mean_is_right() -> None:
    def program(axes: dict[str, int]) -> popxl.Ir:
        ir = popxl.Ir(axes=axes)
        with ir.main_graph:
            x = ops.host_load(popxl.h2d_stream((8 // axes["data"], 3), F32, "x"))
            ops.scaled_add_(popxl.variable(np.ones(3), F32, "w"), ops.mean(x, 0), b=-0.1)
            ops.add_(popxl.variable(np.zeros(3), F32, "total"), ops.mean(x, 0))
        return ir

    report = compare(program, axes={"data": 2}, steps=2)
    assert [each.what for each in report.differences] == ["total", "w"]


def test_what_is_wrong_with_arguments_is_said() -> None:
    right = partial(own, reduced=lambda g: C.replicated_all_reduce(g, "mean"))
    with pytest.raises(ValueError, match="`axes` is {'data': 1}"):
        compare(right, axes={"data": 1})
    with pytest.raises(TypeError, match="`axes` must be sizes by name, such as {'data': 4}; got 4"):
        compare(right, axes=4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="`program` must be a function that builds the program; got Ir"):
        compare(popxl.Ir(), axes=AXES)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="`feeds` must be global batches by the names of the streams; got"):
        compare(right, axes=AXES, feeds=[1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="`steps` must be an integer; got '2'"):
        compare(right, axes=AXES, steps="2")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="`steps` is 0"):
        compare(right, axes=AXES, steps=0)
    with pytest.raises(TypeError, match="`program` must return the Ir"):
        compare(lambda axes: None, axes=AXES)  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="Ir of 1 replicas for the `axes`"):
        compare(lambda axes: popxl.Ir(), axes=AXES)
    with pytest.raises(ValueError, match=r"`feeds` are of \['y'\]; the input streams are \['x'\]"):
        compare(right, axes=AXES, feeds={"y": 1})
    with pytest.raises(ValueError, match=r"`feeds\['x'\]` has the shape \(8, 6\); expected \(3, 8, 6\)"):
        compare(right, axes=AXES, feeds={"x": np.ones((8, 6))})
    with pytest.raises(ValueError, match=r"`divided` names \['z'\]"):
        compare(right, axes=AXES, divided={"z": "data"})
    with pytest.raises(ValueError, match=r"\['z'\] of the axes .* do not divide it"):
        compare(right, axes=AXES, divided={"x": "z"})


class Drawn(addons.Module):
    """Layers of drawn kinds: whole ones, norms, and such as replicas along an axis divide."""

    def __init__(self, rng: np.random.Generator, tensor: str | None) -> None:
        super().__init__()
        kinds: list[Callable[[], addons.Module]] = [
            lambda: Linear(8),
            lambda: Linear(8, bias=False),
            LayerNorm,
            RMSNorm,
            lambda: MLP(8, tensor=tensor),
            lambda: MLP(16, activation="swiglu", bias=False, tensor=tensor),
            lambda: Attention(4, tensor=tensor, causal=False),
            lambda: Attention(4, tensor=tensor, bias=False),
        ]
        self.layers = addons.Module.from_list([kinds[rng.integers(len(kinds))]() for _ in range(rng.integers(1, 5))])
        self.gate = bool(rng.integers(2))

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        for layer in self.layers:
            y = layer(x)
            x = x + ops.tanh(y) if self.gate else y
        w = self.add_variable_input("w", partial(np.linspace, 0.5, 1.5, 8), x.dtype)
        y = x * w
        return ops.mean(y * y)


RULES = (
    partial(optimizers.sgd, lr=0.05),
    partial(optimizers.sgd, lr=0.05, momentum=0.9),
    partial(optimizers.sgd, lr=0.05, clip_norm=0.1),
    partial(optimizers.adamw, lr=0.01, clip_norm=1.0, eps=1e-2),
)


def random_program(seed: int, axes: dict[str, int]) -> popxl.Ir:
    rng = np.random.default_rng(seed)
    np.random.seed(seed)
    ir = popxl.Ir(axes=axes)
    with ir.main_graph:
        x = popxl.h2d_stream((4 // axes["data"], 3, 8), F32, "x")
        training = addons.train_step(
            Drawn(rng, "tensor"),
            x,
            optimizer=RULES[rng.integers(len(RULES))],
            accumulate=int(rng.integers(1, 3)),
            sharded=bool(rng.integers(2)),
            memory=(None, "nothing", "products")[rng.integers(3)],
        )
        ops.host_store(popxl.d2h_stream((), F32, "loss"), training.loss)
    return ir


@pytest.mark.thorough(but_each=40)
@pytest.mark.parametrize("seed", range(40))
def test_random_right_programs(seed: int, recwarn: pytest.WarningsRecorder) -> None:
    """They are right by experiment, and no session warns."""
    axes = {"data": (1, 2, 4)[seed % 3], "tensor": (2, 1, 2, 4)[seed % 4]}
    if axes == {"data": 1, "tensor": 1}:
        axes["data"] = 2
    compare(partial(random_program, seed), axes=axes, tolerance=1e-3).check()
    assert not [each for each in recwarn.list if issubclass(each.category, PopxlWarning)]


@pytest.mark.filterwarnings("ignore:memory. graph .* calls no graph")
@pytest.mark.parametrize("seed", range(6))
def test_right_programs_have_no_findings(seed: int) -> None:
    """Accumulated gradients of divided layers are the replica's own, and begin anew in each run."""
    assert not check(random_program(seed, {"data": 1, "tensor": 2})).findings
