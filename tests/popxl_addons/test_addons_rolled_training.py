"""The layers of a model that is trained by `train_step` are turns of loops: forward, and backward with the updates."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl.analysis.memory import held_variables
from popxl_addons import optimizers
from popxl_addons.layers import LanguageConfig, LanguageModel
from runtime.plan.loop_rerolling.rerolling import Rerolling

LAYERS, LENGTH, TEXTS, VOCABULARY = 3, 6, 2, 11
SIZES: dict[str, Any] = {"vocabulary": VOCABULARY, "width": 8, "layers": LAYERS, "heads": 2, "hidden": 12}
LLAMA = LanguageConfig(
    **SIZES, context=LENGTH, rotary=1e4, norm="rms", activation="swiglu", bias=False, mlp_bias=False, tied=False
)
GPT2 = LanguageConfig(**SIZES, context=LENGTH)
BF16, F16 = addons.MixedPrecision(popxl.bfloat16), addons.MixedPrecision(popxl.float16)


class Loss(addons.Module):
    def __init__(self, config: LanguageConfig) -> None:
        super().__init__()
        self.model = LanguageModel(config)

    def build(self, tokens: popxl.Tensor) -> popxl.Tensor:
        logits = self.model(tokens[:, :-1]).astype(popxl.float32)
        return addons.cross_entropy(logits.reshape((-1, VOCABULARY)), tokens[:, 1:].flatten())


def trained(
    config: LanguageConfig, update: Any = optimizers.adamw, clip: float | None = None, replicas: int = 1, **how: Any
) -> popxl.Ir:
    """A step of training of a language model, as users write it."""
    np.random.seed(0)
    ir = popxl.Ir(replication=replicas)
    with ir.main_graph:
        tokens = popxl.h2d_stream((TEXTS, LENGTH + 1), popxl.int32, "tokens")
        optimizer = partial(update, lr=0.1, clip_norm=clip)
        step = addons.train_step(Loss(config), tokens, optimizer=optimizer, **how)
        ops.host_store(popxl.d2h_stream((), popxl.float32, "loss"), step.loss)
    return ir


def run(ir: popxl.Ir, way: Any) -> tuple[list[Any], dict[str, np.ndarray], list[tuple[int, int]]]:
    """What three steps give: the losses, and the variables after them; and the loops, as turns and ops of a turn."""
    ir.options.calledGraphs = way
    with popxl.Session(ir, "ipu_model") as session:
        (tokens,) = session.expected_inputs()
        several = [count for count in (tokens.num_host_transfers,) if count > 1]
        shape = (*several, *session.host_shape(tokens.shape))
        fed = np.random.default_rng(1).integers(0, VOCABULARY, shape).astype(np.int32)
        losses = [np.array(next(iter(session.run({tokens: fed}).values()))) for _ in range(3)]
        variables = session.get_tensors_data(ir.main_graph.variables)
        loops = [(loop.iterations, loop.ops) for loop in session.report.loops]
    return losses, {v.name: np.array(data) for v, data in variables.items()}, loops


WEIGHTS = 9  # of a layer of a Llama


@pytest.mark.parametrize(
    ("config", "how", "loops"),
    [
        (LLAMA, {}, [1, 1 + WEIGHTS]),
        (LLAMA, {"precision": BF16}, [WEIGHTS + 1, 1 + 3 * WEIGHTS]),
        (LLAMA, {"precision": F16}, [WEIGHTS + 1, 1 + 2 * WEIGHTS, WEIGHTS]),
        (LLAMA, {"precision": BF16, "clip": 1.0}, [WEIGHTS + 1, 1 + 3 * WEIGHTS, WEIGHTS]),
        (LLAMA, {"precision": BF16, "replicas": 2}, [WEIGHTS + 1, 1 + 4 * WEIGHTS]),
        (LLAMA, {"precision": BF16, "replicas": 2, "sharded": True}, [1, 1 + WEIGHTS]),
        (GPT2, {}, [1, 1 + 16]),
    ],
    ids=["float32", "bfloat16", "float16", "clipped", "replicas", "sharded", "gpt2"],
)
def test_layers_are_turns(config: LanguageConfig, how: dict[str, Any], loops: list[int]) -> None:
    """Casts are in both turns; of shards, they are in the layers, which gather them. Updates are in the backward turn,
    or at once after all turns, where it has to be known first how large all gradients are, or whether they are finite.
    """
    main = trained(config, **how).main_graph
    rolling = Rerolling(main, held_variables(main))
    assert [(len(loop.iterations), len(loop.ops)) for loop in rolling.loops] == [(LAYERS, count) for count in loops]
    assert not rolling.unrolled_graphs


@pytest.mark.thorough(but_each=4)
@pytest.mark.parametrize("how", [{"precision": BF16, "clip": 1.0}, {"precision": BF16, "replicas": 2, "sharded": True}])
@pytest.mark.parametrize("way", ["rolled", "batched"])
def test_turns_give_what_layers_give(how: dict[str, Any], way: str) -> None:
    """By steps that follow gradients: AdamW goes by their signs at first, and bfloat16 rounds small ones to either."""
    losses, variables, loops = run(trained(LLAMA, optimizers.sgd, **how), way)
    plain_losses, plain_variables, none = run(trained(LLAMA, optimizers.sgd, **how), "inlined")
    assert [turns for turns, _ in loops] == [LAYERS] * (3 if way == "batched" or "clip" in how else 2) and not none
    np.testing.assert_allclose(losses, plain_losses, 2e-3)
    assert losses[0].mean() > losses[-1].mean()
    for name, data in plain_variables.items():
        np.testing.assert_allclose(variables[name], data, 1e-2, 1e-3, err_msg=name)


WIDE = LLAMA.model_copy(update={"width": 64, "hidden": 96})
"""Its weights are too large to be copied to where turns find them."""


@pytest.mark.parametrize(("how", "cast"), [({}, 7 * LAYERS), ({"replicas": 2, "sharded": True}, 0)])
def test_weights_in_the_turns_of_micro_batches(how: dict[str, Any], cast: int) -> None:
    """Whole weights are cast once, and layers find them in a stack; shards lie in stacks, and layers gather a row."""
    main = trained(WIDE, accumulate=4, precision=BF16, **how).main_graph
    rolling = Rerolling(main, held_variables(main))
    assert sorted(len(loop.iterations) for loop in rolling.loops) == [LAYERS, LAYERS, LAYERS, 4]
    assert not rolling.unrolled_graphs
    assert sum(len(group) for groups in rolling.gathered.values() for group in groups) == cast


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("config", "more"),
    [(LLAMA, {}), (WIDE, {"replicas": 2, "sharded": True, "precision": None})],
    ids=["whole", "sharded"],
)
def test_loops_in_the_turns_of_a_loop(config: LanguageConfig, more: dict[str, Any]) -> None:
    """Micro-batches are turns, and so are the layers in each of them: these find weights, which are cast or gathered
    once, and accumulators in stacks that all micro-batches share."""
    how: dict[str, Any] = {"update": optimizers.sgd, "accumulate": 4, "precision": BF16, **more}
    losses, variables, loops = run(trained(config, **how), "rolled")
    plain_losses, plain_variables, _ = run(trained(config, **how), "inlined")
    waits = LAYERS * WEIGHTS + 3 + 1  # for each accumulator, of layers and beside them; and of the batch
    assert sorted(loops) == [(LAYERS, 1), (LAYERS, WEIGHTS), (LAYERS, 1 + WEIGHTS), (4, 5 + waits)]
    np.testing.assert_allclose(losses, plain_losses, 2e-3)
    for name, data in plain_variables.items():
        np.testing.assert_allclose(variables[name], data, 1e-2, 1e-3, err_msg=name)
