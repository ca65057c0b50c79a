"""Losses of large logits in chunks: which losses, with which numbers, and as plans of a budget choose it."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl.errors import PopxlError
from popxl.extend.memory import requesting_memory
from popxl_addons import optimizers
from popxl_addons.layers import LanguageConfig, LanguageModel, NextTokenLoss
from popxl_addons.ops import cross_entropy
from popxl_addons.transforms.logit_chunks import chunk_logits
from tests.tolerances import assert_near

WIDTH, CLASSES, SHAPE = 5, 7, (3, 4)
SAMPLES = 12


class Layer(addons.Module):
    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        return ops.tanh(x) * 2


class Head(addons.Module):
    """A loss as users write it: a product, another dtype and shape of the logits, and their cross entropy."""

    def __init__(self, dtype: popxl.dtype = popxl.float32, **how: Any) -> None:
        super().__init__()
        self.dtype, self.how = dtype, how

    def build(self, x: popxl.Tensor, labels: popxl.Tensor) -> popxl.Tensor:
        weight = self.add_variable_input("weight", lambda: weights(), self.dtype)
        (x,) = Layer().create_graph(x)[1].call(x)
        logits = (x @ weight).astype(popxl.float32).reshape((-1, CLASSES))
        return cross_entropy(logits, labels.flatten(), **self.how)


class Other(Head):
    """The mean of a loss of each sample, or of the loss."""

    def build(self, x: popxl.Tensor, labels: popxl.Tensor) -> popxl.Tensor:
        return ops.mean(super().build(x, labels))


def weights() -> np.ndarray:
    return np.random.default_rng(5).normal(size=(WIDTH, CLASSES)).astype(np.float32)


def kinds(graph: popxl.Graph) -> list[str]:
    return [op.op_type for op in graph.ops]


def graph_of(module: addons.Module, dtype: popxl.dtype = popxl.float32) -> popxl.Graph:
    x, labels = popxl.TensorSpec((*SHAPE, WIDTH), dtype), popxl.TensorSpec(SHAPE, popxl.int32)
    return module.create_graph(x, labels)[1].graph


def trained(memory: Any, **how: Any) -> tuple[list[float], np.ndarray, Any]:
    """Losses of three steps, the weight after them, and the plan."""
    ir, rng = popxl.Ir(), np.random.default_rng(8)
    with ir.main_graph:
        x, labels = popxl.h2d_stream((*SHAPE, WIDTH), popxl.float32), popxl.h2d_stream(SHAPE, popxl.int32)
        step = addons.train_step(Head(**how), x, labels, optimizer=partial(optimizers.sgd, lr=0.5), memory=memory)
        loss = addons.host_store(step.loss)
    fed = {x: rng.normal(size=(*SHAPE, WIDTH)).astype(np.float32), labels: rng.integers(0, CLASSES, SHAPE)}
    with popxl.Session(ir, "cpu") as session:
        losses = [float(session.run(fed)[loss]) for _ in range(3)]
        return losses, session.get_tensor_data(step.variables.weight), (step.memory, ir)


def in_numpy(ignore_index: int | None = None, reduction: str = "mean") -> tuple[list[float], np.ndarray]:
    rng, weight, losses = np.random.default_rng(8), weights().astype(np.float64), []
    x = rng.normal(size=(*SHAPE, WIDTH)).astype(np.float32).reshape(-1, WIDTH).astype(np.float64)
    x, labels = 2 * np.tanh(x), rng.integers(0, CLASSES, SHAPE).reshape(-1)
    counts = labels != (-1 if ignore_index is None else ignore_index)
    number = counts.sum() if reduction == "mean" else 1
    for _ in range(3):
        probs = np.exp(x @ weight)
        probs /= probs.sum(-1, keepdims=True)
        losses.append(-(np.log(probs[np.arange(SAMPLES), labels]) * counts).sum() / number)
        weight = weight - 0.5 * x.T @ ((probs - np.eye(CLASSES)[labels]) * counts[:, None]) / number
    return losses, weight


@pytest.mark.thorough(but_each=3)
@pytest.mark.parametrize("how", [{}, {"ignore_index": 2}, {"reduction": "sum"}], ids=str)
@pytest.mark.parametrize("chunks", [1, 5, 99])
def test_a_plan_states_the_number_of_chunks(chunks: int, how: dict[str, Any]) -> None:
    plan = trained("everything", **how)[2][0].model_copy(update={"logit_chunks": chunks})
    losses, weight, (applied, ir) = trained(addons.MemoryPlan.model_validate_json(plan.model_dump_json()), **how)
    assert applied == plan and applied.besides == (f"logits in {chunks} chunks" if chunks > 1 else "")
    found = [op.attributes["chunks"] for g in ir.graphs for op in g.ops if op.op_type == "LinearCrossEntropy"]
    assert found == ([] if chunks == 1 else [min(chunks, SAMPLES)])
    for ours, theirs in zip((losses, weight), in_numpy(**how), strict=True):
        assert_near(ours, theirs, 1e-4)


def test_nothing_of_the_logits_is_left() -> None:
    with popxl.Ir().main_graph:
        graph = graph_of(Head(popxl.bfloat16), popxl.bfloat16)
        chunk_logits(graph, 3)
        assert "MatMul" not in kinds(graph) and "Cast" not in kinds(graph) and "CrossEntropy" not in kinds(graph)
        assert graph.outputs[0].dtype is popxl.float32
        before = kinds(graph)
        chunk_logits(graph, 4)  # stated now
        assert kinds(graph) == before


@pytest.mark.parametrize(
    "loss",
    [
        lambda logits, labels: cross_entropy(logits, labels, reduction="none"),
        lambda logits, labels: cross_entropy(logits, labels) + ops.mean(logits),
        lambda logits, labels: (cross_entropy(logits, labels), logits),
        lambda logits, labels: cross_entropy(ops.tanh(logits), labels),
        lambda logits, labels: cross_entropy(logits.astype(popxl.float16), labels),
        lambda logits, labels: cross_entropy(logits.reshape((4, 8)), labels[:4]),
    ],
    ids=["each", "read", "returned", "computed", "rounded", "folded"],
)
def test_other_losses_stay(loss: Any) -> None:
    ir = popxl.Ir()
    specs = [popxl.TensorSpec(shape, popxl.float32) for shape in ((8, 3), (3, 4))]
    graph = ir.create_graph(lambda x, w, labels: loss(x @ w, labels), *specs, popxl.TensorSpec((8,), popxl.int32))
    before = str(ir)
    chunk_logits(graph, 2)
    assert str(ir) == before


def language_step(memory: Any, chunks: int | None = None, vocabulary: int = 2048) -> popxl.Ir:
    ir = popxl.Ir()
    with ir.main_graph:
        tokens = popxl.h2d_stream((8, 33), popxl.int32, "tokens")
        config = LanguageConfig(vocabulary=vocabulary, width=8, layers=2, heads=2, context=32)
        loss = NextTokenLoss(LanguageModel(config), chunks)
        step = addons.train_step(loss, tokens, optimizer=partial(optimizers.sgd, lr=0.1), memory=memory)
        addons.host_store(step.loss)
    return ir


def test_a_budget_chooses_the_number_of_chunks() -> None:
    most = popxl.Session(language_step("everything"), "cpu").memory().device
    found = addons.plan_memory(language_step, most // 2)
    assert found.plan.logit_chunks > 1 and found.peak <= found.budget
    assert "In addition: logits in" in str(found)
    assert popxl.Session(language_step(found.plan), "cpu").memory().device == found.peak


def test_a_stated_number_of_chunks_stays() -> None:
    build = partial(language_step, chunks=1)
    most = popxl.Session(build("everything"), "cpu").memory().device
    with pytest.raises(PopxlError, match="no plan was found") as refused:
        addons.plan_memory(build, most // 4)
    assert "chunks" in str(refused.value)


def test_a_plan_has_no_fewer_chunks_than_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ops.linear_cross_entropy.__globals__, "LOGITS_OF_CHUNK", 20)
    specs = [popxl.TensorSpec(shape, popxl.float32) for shape in ((8, 3), (3, 10))]
    graph = popxl.Ir().create_graph(ops.linear_cross_entropy, *specs, popxl.TensorSpec((8,), popxl.int32))
    chunk_logits(graph, 2)
    assert [op.attributes["chunks"] for op in graph.ops if op.op_type == "LinearCrossEntropy"] == [4]


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_a_plan_whose_chunks_have_no_effect_warns(reduction: Any) -> None:
    def build(memory: Any) -> Any:
        with popxl.Ir().main_graph:
            x, labels = popxl.h2d_stream((*SHAPE, WIDTH), popxl.float32), popxl.h2d_stream(SHAPE, popxl.int32)
            module = Other(reduction=reduction)
            return addons.train_step(module, x, labels, optimizer=partial(optimizers.sgd, lr=0.5), memory=memory).memory

    plan = build("everything").model_copy(update={"logit_chunks": 2})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        build(plan)
    found = [str(each.message) for each in caught]
    assert len(found) == (reduction == "none")
    assert all("has logits in 2 chunks" in text and "has no loss for it" in text for text in found)


def test_a_search_does_not_warn_of_models_without_logits() -> None:
    """A budget for several models tries numbers of chunks, which some of them leave open."""
    with warnings.catch_warnings(), requesting_memory("everything", logit_chunks=2) as requested:
        warnings.simplefilter("error")
        with popxl.Ir().main_graph:
            x, labels = popxl.h2d_stream((*SHAPE, WIDTH), popxl.float32), popxl.h2d_stream(SHAPE, popxl.int32)
            for reduction in ("none", "mean"):
                module = Other(reduction=reduction)
                addons.train_step(module, x, labels, optimizer=partial(optimizers.sgd, lr=0.5))
    assert [(each.samples, each.width, each.classes) for each in requested.open_logits] == [(SAMPLES, WIDTH, CLASSES)]


def test_numbers_of_chunks_above_zero() -> None:
    with pytest.raises(ValueError, match="logit_chunks"):
        addons.MemoryPlan(graphs=(), logit_chunks=0)
