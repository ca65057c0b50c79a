"""Mixed precision: what is computed narrow, what stays wide, and that the training is the same."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl_addons import optimizers
from popxl_addons.layers import MLP, Attention, LayerNorm, Linear, TiedEmbedding, TransformerBlock
from popxl_addons.optimizers import DynamicLossScaling

STEPS = 4
X = np.random.default_rng(0).normal(size=(STEPS, 6, 5)).astype(np.float32)
Y = np.random.default_rng(1).integers(0, 3, (STEPS, 6)).astype(np.int32)


class Classifier(addons.Module):
    """Written as for float32."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = Linear(8), LayerNorm(), Linear(3, bias=False)

    def build(self, x: popxl.Tensor, labels: popxl.Tensor) -> popxl.Tensor:
        logits = self.down(self.norm(self.up(x)))
        return addons.cross_entropy(logits.astype(popxl.float32), labels)


START = {
    name: 0.5 * np.random.default_rng(i).normal(size=shape).astype(np.float32) + name.endswith("norm.weight")
    for i, (name, shape) in enumerate(
        {
            "down.weight": (8, 3),
            "norm.bias": (8,),
            "norm.weight": (8,),
            "up.bias": (8,),
            "up.weight": (5, 8),
        }.items()
    )
}


def trained(
    precision: addons.MixedPrecision | None, rows: np.ndarray = X, optimizer: Any = None, **how: Any
) -> tuple[list[float], dict[str, np.ndarray]]:
    """The losses of some steps, and all variables after them, the optimiser's as well."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        x, y = popxl.h2d_stream((6, 5), popxl.float32, "x"), popxl.h2d_stream((6,), popxl.int32, "y")
        optimizer = optimizer or partial(optimizers.adamw, lr=0.05, weight_decay=0.1, clip_norm=1.0)
        training = addons.train_step(Classifier(), x, y, optimizer=optimizer, precision=precision, **how)
        out = addons.host_store(training.loss)
    named = training.variables.to_dict() | training.state.to_dict()
    losses = []
    with popxl.Session(ir, "cpu") as session:
        session.write_variables_data({training.variables[name]: value for name, value in START.items()})
        for batch, labels in zip(rows, Y, strict=False):
            losses.append(float(session.run({x: batch, y: labels})[out]))
        found = session.get_tensors_data(named.values())
    return losses, {name: np.array(found[v]) for name, v in named.items()}


def by_torch() -> tuple[list[float], dict[str, np.ndarray]]:
    torch = pytest.importorskip("torch")
    w = {name: torch.nn.Parameter(torch.tensor(value.astype(np.float64))) for name, value in START.items()}
    optimizer = torch.optim.AdamW(w.values(), lr=0.05, weight_decay=0.1)
    losses = []
    for rows, labels in zip(X, Y, strict=True):
        inner = torch.tensor(rows.astype(np.float64)) @ w["up.weight"] + w["up.bias"]
        normed = torch.nn.functional.layer_norm(inner, (8,), w["norm.weight"], w["norm.bias"])
        loss = torch.nn.functional.cross_entropy(normed @ w["down.weight"], torch.tensor(labels.astype(np.int64)))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(w.values()), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, {name: p.detach().numpy() for name, p in w.items()}


@pytest.mark.parametrize(
    ("precision", "near"),
    [
        (None, 1e-4),
        (addons.MixedPrecision(popxl.bfloat16), 0.04),
        (addons.MixedPrecision(popxl.float16, keep=("norm",)), 0.005),
    ],
    ids=["float32", "bfloat16", "float16"],
)
def test_the_same_training_in_three_precisions(precision: Any, near: float) -> None:
    expected, weights = by_torch()
    losses, found = trained(precision)
    assert expected[0] - expected[-1] > 0.1, "it learns"
    np.testing.assert_allclose(losses, expected, atol=near)
    for name, weight in weights.items():
        assert found[name].dtype == np.float32
        # A step of Adam goes about as far whatever the size of a gradient is, so only most of them agree.
        assert np.mean(abs(found[name] - weight) < near) > 0.8, name
    assert ("loss_scaling.value" in found) == (precision is not None and precision.dtype is popxl.float16)


def test_masters_keep_what_narrow_weights_would_lose() -> None:
    """In bfloat16 there is nothing between 1 and 1.0078."""
    _, found = trained(addons.MixedPrecision(popxl.bfloat16), X[:1], partial(optimizers.lion, lr=1e-4, weight_decay=0))
    moved = abs(found["norm.weight"] - START["norm.weight"])
    np.testing.assert_allclose(moved, 1e-4, rtol=1e-2)


@pytest.mark.thorough(but_each=2)
@pytest.mark.parametrize("kind", ["adamw", "optax"])
def test_a_step_with_infinities_is_skipped(kind: str) -> None:
    """And the scale halved; it doubles after two good steps."""
    optimizer = partial(optimizers.adamw, lr=0.05, clip_norm=1.0)
    if kind == "optax":
        optimizer = partial(optimizers.from_optax(pytest.importorskip("optax").adam(0.05)), clip_norm=1.0)
    bad = X.copy()
    bad[1] *= 6e4  # infinite in float16
    how = {"precision": addons.MixedPrecision(popxl.float16), "optimizer": optimizer}
    scaling = DynamicLossScaling(start=256.0, grow_after=2)
    _, once = trained(rows=bad[:1], loss_scaling=scaling, **how)
    losses, skipped = trained(rows=bad[:2], loss_scaling=scaling, **how)
    assert not np.isfinite(losses[1])
    changed = {name for name in once if not np.array_equal(once[name], skipped[name])}
    assert changed == {"loss_scaling.value", "loss_scaling.good_steps"}
    assert (once["loss_scaling.value"], once["loss_scaling.good_steps"], once["step"]) == (256, 1, 1)
    assert (skipped["loss_scaling.value"], skipped["loss_scaling.good_steps"]) == (128, 0)
    _, after = trained(rows=bad, loss_scaling=scaling, **how)
    assert (after["loss_scaling.value"], after["loss_scaling.good_steps"], after["step"]) == (256, 0, 3)
    assert all(np.isfinite(value).all() for value in after.values())


def test_a_skipped_step_of_several_batches_leaves_no_trace() -> None:
    """Gradients are added up in variables, and one that is no number is not to stay there."""
    bad = np.concatenate([X[:1], X[:1] * 6e4, X[2:4]])
    ir = popxl.Ir()
    with ir.main_graph:
        x, y = popxl.h2d_stream((6, 5), popxl.float32, "x"), popxl.h2d_stream((6,), popxl.int32, "y")
        training = addons.train_step(
            Classifier(), x, y, optimizer=partial(optimizers.sgd, lr=0.1), accumulate=2,
            precision=addons.MixedPrecision(popxl.float16), loss_scaling=DynamicLossScaling(64.0),
        )  # fmt: skip
    with popxl.Session(ir, "cpu") as session:
        for batches, labels in ((bad[:2], Y[:2]), (bad[2:], Y[2:])):
            session.run({x: batches, y: labels})
        assert session.get_tensor_data(training.state.step) == 1
        assert session.get_tensor_data(training.state.loss_scaling.value) == 32
        assert np.isfinite(session.get_tensor_data(training.variables.up.weight)).all()


class Model(addons.Module):
    def __init__(self) -> None:
        super().__init__(cache=True)
        self.embedding = TiedEmbedding(popxl.float32, 7, 8)
        self.block = TransformerBlock(Attention(2, rotary=10000), MLP(activation="swiglu"), norm="rms")
        self.final_norm = LayerNorm()

    def build(self, tokens: popxl.Tensor) -> tuple[popxl.Tensor, popxl.Tensor]:
        x, table = self.embedding(tokens)
        x = self.final_norm(self.block(x))
        return x, (x @ table.T).astype(popxl.float32)


def test_what_is_narrow_and_what_is_wide() -> None:
    """Layers that say a dtype themselves are narrow as well; kept ones are told by a word in their names."""
    narrow, half = addons.MixedPrecision(popxl.bfloat16, keep=("norm",)), addons.MixedPrecision(popxl.float16)
    tokens = popxl.TensorSpec((2, 3), popxl.int32)
    with popxl.Ir().main_graph:
        model = Model()
        wide = model.create_graph(tokens)
        facts, graph = narrow.create_graph(model, tokens)
        halves = half.create_graph(model, tokens)[1]  # a cached graph is of one precision
        again = narrow.create_graph(model, tokens)[1]
    assert again.graph == graph.graph
    for name, t in graph.args.to_dict().items():
        assert t.dtype is (popxl.float32 if "norm" in name else popxl.bfloat16), name
        assert facts[name].dtype is wide[0][name].dtype is wide[1].args[name].dtype is popxl.float32
        assert halves.args[name].dtype is popxl.float16
    assert [t.dtype for t in graph.graph.outputs] == [popxl.bfloat16, popxl.float32]


class Listed(addons.Module):
    """Layers in a list, one that is called by a name, and an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = addons.Module.from_list([Linear(4), Linear(3)])
        self.head = Linear(2)

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        for each in self.encoder:
            x = each(x)
        (x,) = self.call_module(Linear(2), name="outlined")(self.head(x))
        return x


def test_layers_in_lists_are_kept() -> None:
    """And words that are in names of variables only keep nothing: they are refused."""

    def kept(*words: str) -> set[str]:
        with popxl.Ir().main_graph:
            precision = addons.MixedPrecision(popxl.bfloat16, keep=words)
            _, graph = precision.create_graph(Listed(), popxl.TensorSpec((2, 5), popxl.float32))
        return {name for name, t in graph.args.to_dict().items() if t.dtype is popxl.float32}

    ours = {f"encoder.{i}.{name}" for i in range(2) for name in ("weight", "bias")}
    assert kept("encoder") == ours
    assert kept("encoder.1") == {name for name in ours if "1" in name}
    with pytest.raises(ValueError, match=r"`keep` has \['bias'\], which no layer is called after: .*'encoder', 'head'"):
        kept("bias")
    with pytest.raises(ValueError, match=r"\['outlined.weight', 'outlined.bias'\] are computed in bfloat16"):
        kept("outlined")


class Square(addons.Module):
    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        self.aux["x"] = x
        return x * x

    def build_grad(self, dy: popxl.Tensor) -> popxl.Tensor:
        return dy * self.aux["x"] * 2.0


class Squared(addons.Module):
    def __init__(self) -> None:
        super().__init__()
        self.square = Square()

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        return self.call_module(self.square)(x)[0]


def test_what_is_refused() -> None:
    x = popxl.TensorSpec((3,), popxl.float32)
    with popxl.Ir().main_graph:
        addons.MixedPrecision(popxl.bfloat16).create_graph(Squared(), x)
        with pytest.raises(ValueError, match="`keep` holds the layer `square`, which has a `build_grad`"):
            addons.MixedPrecision(popxl.bfloat16, keep=("square",)).create_graph(Squared(), x)
    for dtype in (popxl.float32, np.float16):
        with pytest.raises(ValueError, match="MixedPrecision: `dtype` is .*; expected popxl.float16 or popxl.bfloat16"):
            addons.MixedPrecision(dtype)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"`keep` is the text 'norm'; expected a tuple: \('norm',\)\."):
        addons.MixedPrecision(popxl.bfloat16, keep="norm")  # type: ignore[arg-type]
    with popxl.Ir().main_graph:
        unknown = addons.MixedPrecision(popxl.bfloat16, keep=("norm", "nrom"))
        names = r"\['down', 'norm', 'up'\]"
        with pytest.raises(ValueError, match=rf"`keep` has \['nrom'\], which no layer is called after: .*{names}"):
            unknown.create_graph(
                Classifier(), *(popxl.TensorSpec(*how) for how in (((6, 5), popxl.float32), ((6,), popxl.int32)))
            )
        precision = addons.MixedPrecision(popxl.bfloat16)
        facts, graph = precision.create_graph(Linear(3), popxl.TensorSpec((2, 5), popxl.float32))
        with pytest.raises(KeyError, match=r"there are no `variables` for \['weight', 'bias'\]"):
            precision.cast(addons.NamedTensors(), graph.args)
    with pytest.raises(ValueError, match="expected 0 < `smallest` <= `start` <= `largest`"):
        DynamicLossScaling(start=0.5)
    with pytest.raises(ValueError, match="`grow_after` is 0; expected 1 step or more"):
        DynamicLossScaling(grow_after=0)
