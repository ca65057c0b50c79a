"""The proof of the kit: a small GPT agrees with the same in PyTorch, and so does each of seven ways to train it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest

import popxl
from runtime.machine import LayoutMachine
from runtime.plan.loop_rerolling.rerolling import Rerolling
from tests.popxl_addons.gpt.model import Config, batches, first_weights
from tests.popxl_addons.gpt.training import Training
from tests.popxl_addons.gpt.variants import VARIANTS

CONFIG = Config()
WITH_DROPOUT = Config(layers=2, dropout=0.25)
STEPS = 10

LOSS = 1e-6
"""Relative. Numbers are float32, which have 7 digits; the order of sums differs from one variant to the other."""
GRADIENT = 2e-6
"""Of the largest gradient, which is about 0.1: that is 2e-5 of it."""
WEIGHT = 5e-5
"""After ten steps of 0.01. AdamW divides by the size of a gradient: where that is small, its rounding counts more."""

REFERENCE = {"pipelined": "accumulated"}
"""What a variant is compared with, if not with the plain one."""


@dataclass(frozen=True)
class Result:
    """Losses of some steps, the gradients of the first, and the weights after the last."""

    losses: np.ndarray
    gradients: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]


def result(training: Training, steps: int) -> Result:
    """Of a session, or of PyTorch."""
    losses, gradients = [], {}
    for k, batch in enumerate(batches(CONFIG, steps)):
        losses.append(training.step(*batch))
        gradients = gradients if k else training.gradients()
    return Result(np.array(losses), gradients, training.weights())


@cache
def session_of(name: str, config: Config) -> Training:
    return VARIANTS[name](config)


@cache
def trained(name: str, config: Config = CONFIG, steps: int = STEPS) -> Result:
    with session_of(name, config) as session:
        session.start(first_weights(config), config.seed)
        return result(session, steps)


def check(found: Result, expected: Result) -> None:
    np.testing.assert_allclose(found.losses, expected.losses, rtol=LOSS)
    check_each(found.gradients, expected.gradients, GRADIENT)
    check_each(found.weights, expected.weights, WEIGHT)


def check_each(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], atol: float) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=0, atol=atol, err_msg=name)


# What the programs are ------------------------------------------------------------------------------------------------


def calls_of(session: Training, part: str) -> list[int]:
    """For each graph of a program with this in its name, how often it is called."""
    return [len(graph.call_sites) for graph in session.ir.graphs if part in graph.name]


def blocks_are_written_out(session: Training) -> None:
    assert calls_of(session, "Block") == []


def blocks_are_one_graph(session: Training) -> None:
    assert calls_of(session, "Block") == [4, 4]  # forwards and backwards


def little_is_kept(session: Training) -> None:
    """What goes into each layer, instead of what is inside of it."""
    assert session_of("outlined", CONFIG).report.memory.temporaries > 2 * session.report.memory.temporaries


def weights_are_divided(session: Training) -> None:
    variables = session.state.fwd
    assert variables.table.shape_on_host == (4, 16, 16)
    assert variables.layers[0].attention.out.weight.shape_on_host == (4, 4, 16)
    assert variables.layers[0].feed_forward.up.bias.shape_on_host == (4, 16)
    assert variables.layers[0].norm1.weight.shape_on_host == (16,)
    assert not (sent := session.communication()).differences, sent
    assert sum(each.turns for each in sent.program.collectives) > 4 * CONFIG.layers


def weights_are_in_remote_memory(session: Training) -> None:
    stored = (*session.state.fwd.values_flat(), *session.state.optim.values_flat())
    assert all(v.location_info.isRemote() for v in stored)
    memory = session.report.memory
    assert memory.variables == 8  # only the seed stays
    assert memory.buffers + memory.buffers_on_host > sum(4 * v.nelms for v in stored)


def there_are_four_stages(session: Training) -> None:
    assert len(calls_of(session, "pipeline_stage")) == 4


PROGRAMS: dict[str, Callable[[Training], None]] = {
    "plain": blocks_are_written_out,
    "outlined": blocks_are_one_graph,
    "recomputed": little_is_kept,
    "tensor parallel": weights_are_divided,
    "phased": weights_are_in_remote_memory,
    "pipelined": there_are_four_stages,
}
"""What is true of the programs."""


# Numbers --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def in_torch() -> Result:
    torch = pytest.importorskip("torch")
    from tests.popxl_addons.gpt.torch_model import TorchTraining

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several that wait for each other take minutes on a machine that is busy
    try:
        return result(TorchTraining(CONFIG, first_weights(CONFIG)), STEPS)
    finally:
        torch.set_num_threads(threads)


def test_the_same_as_in_torch(in_torch):
    """The loss and every gradient, and what ten steps of AdamW make of the weights."""
    check(trained("plain"), in_torch)
    PROGRAMS["plain"](session_of("plain", CONFIG))


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in VARIANTS if name != "plain"])
def test_the_same_numbers(name):
    """And the program, which takes long to compile, is what it is to be."""
    check(trained(name), trained(REFERENCE.get(name, "plain")))
    if name in PROGRAMS:
        PROGRAMS[name](session_of(name, CONFIG))


def test_it_learns():
    losses = trained("plain").losses
    assert losses[-1] < losses[0] - 0.1


def test_every_weight_has_a_gradient():
    """The comparisons above say little of numbers that are hardly there."""
    for name, gradient in trained("plain").gradients.items():
        assert np.abs(gradient).max() > 100 * GRADIENT, name


# Dropout --------------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["outlined", "recomputed", "tensor parallel"])
def test_the_same_elements_are_dropped(name):
    check(trained(name, WITH_DROPOUT, 3), trained("plain", WITH_DROPOUT, 3))


@pytest.mark.thorough
def test_elements_are_dropped():
    with_dropout, without = (trained("plain", c, 3) for c in (WITH_DROPOUT, replace(WITH_DROPOUT, dropout=0.0)))
    assert np.abs(with_dropout.losses - without.losses).min() > 100 * LOSS


@pytest.mark.thorough
def test_micro_batches_have_a_seed_each():
    """A step on micro-batches is the mean of steps that the plain program makes on each, one seed after the other."""
    config = WITH_DROPOUT
    ((tokens, labels),) = batches(config, 1)
    results = []
    with VARIANTS["plain"](replace(config, batch=config.batch // config.micro_batches)) as session:
        for batch in zip(*(np.split(array, config.micro_batches) for array in (tokens, labels)), strict=True):
            session.start(first_weights(config))
            results.append((session.step(*batch), session.gradients()))
    losses, gradients = zip(*results, strict=True)
    found = trained("accumulated", config, 1)
    np.testing.assert_allclose(found.losses, [np.mean(losses)], rtol=LOSS)
    check_each(found.gradients, {name: np.mean([g[name] for g in gradients], 0) for name in found.gradients}, GRADIENT)
    check(trained("pipelined", config, 1), found)


@pytest.mark.thorough
def test_phases_drop_the_same_elements_forwards_and_backwards():
    """Each phase has seeds of its own, so its gradient is compared with the slope of its loss in that direction."""
    config, step = WITH_DROPOUT, 1e-2
    (batch,) = batches(config, 1)
    weights = first_weights(config)
    with session_of("phased", config) as session:

        def loss_at(place: dict[str, np.ndarray]) -> float:
            session.start(place, config.seed)
            return session.step(*batch)

        loss_at(weights)
        gradients = session.gradients()
        slope = np.sqrt(sum((g * g).sum() for g in gradients.values()))
        there, back = (
            loss_at({name: w + k * step / slope * gradients[name] for name, w in weights.items()}) for k in (1, -1)
        )
    np.testing.assert_allclose((there - back) / (2 * step), slope, rtol=1e-2)  # terms of the third order are left


@pytest.mark.parametrize(
    ("name", "loops"),
    [
        ("outlined", [(4, 1), (4, 1 + 16)]),
        ("recomputed", [(4, 1), (4, 1 + 16)]),
        ("phased", [(4, 2), (4, 37)]),
    ],
)
def test_layers_are_turns_of_loops(name: str, loops: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward turn; and a backward one, with an update for each weight. Where weights are in remote buffers, they and
    what AdamW has for them are loaded, and stored, too."""
    monkeypatch.setattr(popxl.Session, "machine", LayoutMachine())
    main = VARIANTS[name](Config(layers=4)).ir.main_graph
    rolling = Rerolling(main, main.variables)
    assert [(len(loop.iterations), len(loop.ops)) for loop in rolling.loops] == loops
