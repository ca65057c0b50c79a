"""Activations that are recomputed: the numbers of PyTorch, and less memory."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import poptorch
import popxl
from popxl.extend.memory import requesting_memory

ROWS, WIDTH = 192, 24


class Block(torch.nn.Module):
    def __init__(self, marks: bool = False) -> None:
        super().__init__()
        self.norm, self.marks = torch.nn.LayerNorm(WIDTH), marks
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = torch.nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.sigmoid(torch.nn.functional.gelu(self.up(self.norm(x))))
        x = x + self.dropout(self.down(torch.sin(torch.tanh(h))))
        return poptorch.recomputationCheckpoint(x) if self.marks else x


Run = Callable[[Any, torch.Tensor], torch.Tensor]


class Model(torch.nn.Module):
    """Four blocks, which something runs: by default one after the other."""

    def __init__(self, run: Run | None = None, marks: bool = False, p: float = 0.0, units: int = 1) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.blocks = torch.nn.Sequential(*(Block(marks) for _ in range(4)))
        self.run, self.units = run, units
        for block in self.blocks:
            block.dropout.p = p

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.first(x)
        if self.run is not None:
            x = self.run(self.blocks, x)
        else:
            for i, block in enumerate(self.blocks):
                if self.units > 1:
                    poptorch.Block.start(f"B{i}", ipu_id=i * self.units // len(self.blocks))
                x = block(x)
        return x, torch.nn.functional.mse_loss(x, y)


def each(blocks: Any, x: torch.Tensor, how: Callable[..., torch.Tensor]) -> torch.Tensor:
    for block in blocks:
        x = how(block, x)
    return x


each_alone = partial(each, how=lambda block, x: block(x))


def selective(policy: Any) -> Callable[..., torch.Tensor]:
    contexts = partial(create_selective_checkpoint_contexts, policy)
    return partial(checkpoint, use_reentrant=False, context_fn=contexts)


def nested(block: Any, x: torch.Tensor) -> torch.Tensor:
    inner = partial(checkpoint, block, use_reentrant=False)
    return checkpoint(lambda x: torch.cos(inner(torch.sin(x))), x, use_reentrant=False)


def trained(
    model: Model, accumulate: int = 1, strategy: Any = None, memory: Any = None, **session: Any
) -> tuple[Any, ...]:
    """Losses and weights of two steps, and the temporaries of the program."""
    options = poptorch.Options().randomSeed(7)
    options.Training.gradientAccumulation(accumulate)
    if strategy is not None:
        options.setExecutionStrategy(strategy)
    if memory is not None:
        options.Training.setMemoryPlan(memory)
    for key, value in session.items():
        options._Popart.set(key, value)
    wrapped = poptorch.trainingModel(model, options, poptorch.optim.SGD(model.parameters(), lr=0.5))
    x, y = torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(5))
    losses = [wrapped(x, y)[1].sum() for _ in range(2)]
    temporaries = wrapped._required.session.program.temporaries()
    wrapped.copyWeightsToHost()
    return losses, list(model.state_dict().values()), temporaries


def of_pytorch(model: Model) -> tuple[Any, ...]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x, y = torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(5))
    losses = []
    for _ in range(2):
        optimizer.zero_grad()
        _, loss = model(x, y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses, list(model.state_dict().values())


def assert_same(found: tuple[Any, ...], expected: tuple[Any, ...], within: float = 1e-6) -> None:
    for a, b in zip(found[0] + found[1], expected[0] + expected[1], strict=True):
        torch.testing.assert_close(a, b, rtol=within, atol=within)


@pytest.fixture(scope="module")
def plain() -> tuple[Any, ...]:
    return trained(Model())


REENTRANT = partial(each, how=partial(checkpoint, use_reentrant=True))
CHECKPOINT = partial(each, how=partial(checkpoint, use_reentrant=False))

CHECKPOINTS: dict[str, tuple[Run, float]] = {
    "reentrant": (REENTRANT, 0.6),
    "not reentrant": (CHECKPOINT, 0.6),
    "nested": (partial(each, how=nested), 0.6),
    "sequential": (lambda blocks, x: checkpoint_sequential(blocks, 3, x, use_reentrant=False), 0.8),
    "a context that saves products": (partial(each, how=selective([torch.ops.aten.addmm.default])), 0.8),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.thorough] * (name in ("not reentrant", "sequential")))
        for name in CHECKPOINTS
    ],
)
def test_checkpoints_of_pytorch(name: str, plain: tuple[Any, ...]) -> None:
    run, share = CHECKPOINTS[name]
    found = trained(Model(run))
    assert_same(found, of_pytorch(Model(run)), within=1e-5)
    assert found[2] < share * plain[2]


@pytest.mark.thorough
def test_a_context_decides_by_op(plain: tuple[Any, ...]) -> None:
    """The policy is asked of the ops that PyTorch has; what it saves is not computed again."""
    asked = set()

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        asked.add(op)
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    needed = []
    products, functions = ["addmm"], ["gelu", "sigmoid", "tanh", "sin"]
    for names in ([], products, [*products, *functions]):
        saved = [getattr(torch.ops.aten, name).default for name in names]
        found = trained(Model(partial(each, how=selective(policy))))
        assert_same(found, plain)
        needed.append(found[2])
    assert {torch.ops.aten.addmm.default, torch.ops.aten.sin.default} < asked
    assert needed[0] < needed[1] < needed[2]


@pytest.fixture(scope="module")
def with_dropout() -> tuple[Any, ...]:
    return trained(Model(p=0.5))


@pytest.mark.thorough(but_each=2)
@pytest.mark.parametrize("preserves", [True, False])
def test_dropout_in_checkpoints(preserves: bool, with_dropout: tuple[Any, ...]) -> None:
    """Masks are those of the model without checkpoints, in the forward pass and when they are computed again."""
    how = partial(checkpoint, use_reentrant=False, preserve_rng_state=preserves)
    found = trained(Model(partial(each, how=how), p=0.5))
    assert_same(found, with_dropout)
    assert found[2] < 0.6 * with_dropout[2]


@pytest.mark.thorough
def test_two_layers_in_a_checkpoint() -> None:
    """Layers that are outlined, called within a region, have their masks, too."""

    def run(blocks: Any, x: torch.Tensor) -> torch.Tensor:
        for i in range(0, 4, 2):
            x = checkpoint(lambda x, i=i: torch.sin(blocks[i + 1](blocks[i](x))), x, use_reentrant=False)
        return x

    def unchecked(blocks: Any, x: torch.Tensor) -> torch.Tensor:
        for i in range(0, 4, 2):
            x = torch.sin(blocks[i + 1](blocks[i](x)))
        return x

    expected = trained(Model(unchecked, p=0.3))
    found = trained(Model(run, p=0.3))
    assert_same(found, expected)
    assert found[2] < 0.6 * expected[2]


def test_tensors_of_recomputation_checkpoint_are_kept(plain: tuple[Any, ...]) -> None:
    found = trained(Model(marks=True))
    assert_same(found, plain)
    assert found[2] < 0.6 * plain[2]
    off = trained(Model(marks=True), autoRecomputation=0)
    assert off[2] > 0.9 * plain[2]


@pytest.mark.parametrize(
    ("kind", "share"),
    [
        ("Standard", 0.6),
        (2, 0.98),
        *(pytest.param(kind, 1.0, marks=pytest.mark.thorough) for kind in ("NoRecompute", 3, 4)),
    ],
)
def test_kinds_of_recomputation(kind: int | str, share: float, plain: tuple[Any, ...]) -> None:
    found = trained(Model(), autoRecomputation=kind)
    assert_same(found, plain)
    assert found[2] <= share * plain[2]


@pytest.mark.thorough
def test_layers_that_are_not_outlined() -> None:
    standard, none = (trained(Model(), autoRecomputation=kind, enableOutlining=False) for kind in (1, 0))
    assert_same(standard, none)
    assert standard[2] < 0.7 * none[2]


def test_stages_of_a_pipeline_are_recomputed() -> None:
    """By default."""
    strategies = {"pipelined": poptorch.PipelinedExecution, "sharded": poptorch.ShardedExecution}
    found = {
        name: trained(Model(p=0.2, units=2), accumulate=4, strategy=strategy(poptorch.AutoStage.SameAsIpu))
        for name, strategy in strategies.items()
    }
    assert_same(found["pipelined"], found["sharded"])
    assert found["pipelined"][2] < 0.7 * found["sharded"][2]


@pytest.mark.thorough
def test_stages_of_a_pipeline_need_not_be_recomputed() -> None:
    sharded = trained(
        Model(p=0.2, units=2), accumulate=4, strategy=poptorch.ShardedExecution(poptorch.AutoStage.SameAsIpu)
    )
    how = {"accumulate": 4, "strategy": poptorch.PipelinedExecution(poptorch.AutoStage.SameAsIpu)}
    assert trained(Model(p=0.2, units=2), **how, autoRecomputation=0)[2] == sharded[2]


def test_accumulation_and_rolled_layers(plain: tuple[Any, ...]) -> None:
    found = trained(Model(CHECKPOINT), accumulate=4, calledGraphs="rolled")
    expected = trained(Model(), accumulate=4, calledGraphs="rolled")
    assert_same(found, expected)
    assert found[2] < 0.7 * expected[2]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_reentrant_checkpoint_without_gradients() -> None:
    """Of inputs that need no gradient it has none, as in PyTorch: what it uses is not trained, and all else is.
    Its warning is given, too."""

    class Frozen(Model):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return super().forward(checkpoint(self.blocks[0], x, use_reentrant=True), y)

    def run(blocks: Any, x: torch.Tensor) -> torch.Tensor:
        return each_alone(blocks[1:], x)

    with pytest.warns(UserWarning, match="None of the inputs have requires_grad=True. Gradients will be None"):
        found = trained(Frozen(run))
    assert_same(found, of_pytorch(Frozen(run)), within=1e-5)


@pytest.mark.thorough
def test_replicas_and_iterations() -> None:
    """Each replica and iteration recomputes what it has computed itself."""

    def results(run: Run | None) -> tuple[Any, ...]:
        options = poptorch.Options().randomSeed(7).replicationFactor(2).deviceIterations(3)
        model = Model(run, p=0.4)
        wrapped = poptorch.trainingModel(model, options, poptorch.optim.SGD(model.parameters(), lr=0.1))
        x, y = torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(5))
        losses = [wrapped(x, y)[1] for _ in range(2)]
        wrapped.copyWeightsToHost()
        return losses, list(model.state_dict().values())

    assert_same(results(CHECKPOINT), results(each_alone))


def test_tensors_within_that_are_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    """They are there, as nothing is recomputed then."""
    options, model = (
        poptorch.Options().anchorTensor("sum", "sin_out"),
        Model(lambda _, x: checkpoint(torch.sin, x, use_reentrant=False)),
    )
    wrapped = poptorch.trainingModel(model, options, poptorch.optim.SGD(model.parameters(), lr=0.1))
    found, _ = wrapped(torch.ones(5, WIDTH), torch.ones(5, WIDTH))
    torch.testing.assert_close(wrapped.getAnchoredTensor("sum"), found)
    assert "anchorTensor asks for sin_out, within the model, so that no activations are recomputed" in caplog.text


@pytest.mark.parametrize("kind", ["RecomputeAll", "Pipeline"])
def test_a_kind_without_effect(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """A warning says so; marks give `RecomputeAll` an effect."""
    for marks in (False, True):
        model, options = Model(marks=marks), poptorch.Options()
        options._Popart.set("autoRecomputation", kind)
        training = poptorch.trainingModel(model, options, poptorch.optim.SGD(model.parameters(), lr=0.1))
        training.compile(torch.ones(5, WIDTH), torch.ones(5, WIDTH))
        warnings = caplog.text.count(f"autoRecomputation: '{kind}' has no effect here")
        caplog.clear()
        assert warnings == (kind == "Pipeline" or not marks)


def test_an_unknown_kind() -> None:
    with pytest.raises(poptorch.Error, match=r"'autoRecomputation' is 'Standrad'; expected one of 0 \(NoRecompute\)"):
        trained(Model(), autoRecomputation="Standrad")


def test_a_memory_plan(plain: tuple[Any, ...]) -> None:
    found = trained(Model(), memory="nothing")
    assert_same(found, plain)
    assert found[2] < 0.6 * plain[2]
    with pytest.raises(poptorch.Error, match=r"setMemoryPlan: the model has checkpoints.*Leave out one of both"):
        trained(Model(CHECKPOINT), memory="nothing")
    with pytest.raises(AssertionError, match=r"`memory_plan` is 'some'; expected a popxl_addons.MemoryPlan, or one of"):
        trained(Model(), memory="some")


def test_a_memory_plan_says_how_the_program_is_compiled() -> None:
    """What the options of a model leave open."""

    def compiled(memory: Any) -> popxl.Ir:
        model, options = Model(), poptorch.Options()
        options.Training.setMemoryPlan(memory)
        training = poptorch.trainingModel(model, options, poptorch.optim.SGD(model.parameters(), lr=0.1))
        training.compile(torch.ones(5, WIDTH), torch.ones(5, WIDTH))
        return poptorch.sessionOf(training).ir

    with requesting_memory("everything") as asked:
        compiled("everything")
    plan = asked.applied[0].plan.model_copy(update={"budget": 10**9, "called_graphs": "inlined"})
    options = compiled(plan).options
    assert (options.memoryBudget, options.plannedCalls) == (10**9, "inlined")


class InHalf(Model):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x.half(), y.half())


@pytest.mark.parametrize(("model", "within"), [(Model, 1e-6), (lambda: InHalf().half(), 2e-3)], ids=["float", "half"])
def test_norms_are_recomputed_from_kept_statistics(model: Callable[[], Model], within: float) -> None:
    with requesting_memory("everything") as asked:
        plain = trained(model())
    plan = asked.applied[0].plan.with_treatments("recompute", "*").with_treatments("keep", "*/mean", "*/variance")
    with requesting_memory(plan) as asked:
        assert_same(trained(model()), plain, within)
    kinds = [op.op_type for graph in asked.applied[0].model.ir.graphs for op in graph.ops]
    assert kinds.count("Normalise") == kinds.count("NormaliseByStatistics") == 1


class Wide(torch.nn.Module):
    """Eight blocks with a norm and two linear layers, four times as wide inside."""

    def __init__(self, checkpoints: bool, width: int = 64) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        inside = [torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)]
        block = torch.nn.Sequential(torch.nn.LayerNorm(width), *inside)
        self.blocks = torch.nn.ModuleList(copy.deepcopy(block) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x))
        return poptorch.identity_loss((x**2).mean(), "mean")


@pytest.mark.thorough
def test_checkpoints_of_blocks_need_about_a_quarter_of_the_temporaries() -> None:
    """A fifth by the XLA of JAX 0.10; that of 0.12 needs less without them."""
    temporaries = []
    for checkpoints in (True, False):
        model = Wide(checkpoints)
        run = poptorch.trainingModel(model, poptorch.Options(), torch.optim.SGD(model.parameters(), lr=0.1))
        run.compile(torch.randn(512, 64))
        temporaries.append(poptorch.sessionOf(run).memory().temporaries)
    assert temporaries[0] <= 0.27 * temporaries[1]
