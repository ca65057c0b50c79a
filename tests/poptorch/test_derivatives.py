"""Functions that bring their own derivative: what their `backward` says counts, as in PyTorch."""

# ruff: noqa: E402 - poptorch needs torch

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.utils.checkpoint import checkpoint

import poptorch

F = torch.nn.functional
Function = torch.autograd.Function


class Reversed(Function):
    """The input, whose gradient is turned around; `backward` gives nothing for the factor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float = 0.5) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:
        return -ctx.factor * g, None


class Threefold(Function):
    """The input itself."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * 3


class Rounded(Function):
    """Without a context; the gradient passes straight through."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return g * (x.abs() < 1)


class Exponential(Function):
    """It keeps its result."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (y,) = ctx.saved_tensors
        return 2 * g * y


class Largest(Function):
    """Of two tensors; three results, of which one has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values, places = (x * w).max(1)
        ctx.mark_non_differentiable(places)
        ctx.save_for_backward(x, w, places)
        ctx.shape = x.shape
        return values, places, x.sum(1)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor, _: torch.Tensor, of_sum: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, w, places = ctx.saved_tensors
        there = torch.zeros(ctx.shape).scatter(1, places[:, None], g[:, None] * 5)
        return there * w + of_sum[:, None], (there * x).sum(0)


class Recomputed(Function):
    """What it runs it runs once more in `backward`, and has PyTorch differentiate that."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., Any], x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.function = function
        ctx.save_for_backward(x, w)
        return function(x, w)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with torch.enable_grad():
            x, w = (t.detach().requires_grad_() for t in ctx.saved_tensors)
            y = ctx.function(x, w)
        return None, *torch.autograd.grad(y, (x, w), g)


class Described(Function):
    """A result that is no tensor stands before one that is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> tuple[str, torch.Tensor, None]:
        return f"times {factor}", x * factor, None

    @staticmethod
    def backward(ctx: Any, name: None, g: torch.Tensor, nothing: None) -> tuple[torch.Tensor, None]:
        assert name is nothing is None
        return g * 0.3, None


class Clamped(Function):
    """It overwrites its argument."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.clamp_(-0.5, 0.5)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * 7


class Scaled(Function):
    """It overwrites its first argument, and says so elsewhere."""

    @staticmethod
    def forward(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.mul_(w), w.sum()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_dirty(inputs[0])
        ctx.save_for_backward(output[0], inputs[1])

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor, of_sum: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, w = ctx.saved_tensors
        return g * 7, (g * y).sum(0) + of_sum * w


class Centred(Function):
    """It overwrites an average, which has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, average: torch.Tensor) -> torch.Tensor:
        average.mul_(0.5).add_(x.mean(0), alpha=0.5)
        ctx.save_for_backward(average)
        return x - average

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:
        (average,) = ctx.saved_tensors
        return g * (1 + average.square()), None


rounded = Rounded.apply  # as programs have it, long before a model is compiled


def _largest(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    values, places, total = Largest.apply(h, w)
    return h * values[:, None] + total[:, None] + places[:, None]


def _dirty(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = h * 1
    before = h.t()
    Clamped.apply(h)
    y, total = Scaled.apply(h, w)
    return h * y + before.t() + total


def _overwritten(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = Reversed.apply(h) * 1
    return y.add_(1).mul_(Exponential.apply(w))


class OfClass(Function):
    """Whose functions are those of its class, and of what derives from it."""

    factor = 2

    @classmethod
    def forward(cls, ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * cls.factor

    @classmethod
    def backward(cls, ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * cls.factor**2


class OfDerived(OfClass):
    factor = 3


def _defined(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    class Doubled(Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            return g * x.cos()

    class Halved(Rounded):
        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            return g / 2

    return Doubled.apply(h) * Halved.apply(w * 5)


USES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "a view": lambda h, w: Reversed.apply(h, 0.3),
    "the input": lambda h, w: Threefold.apply(h),
    "without a context": lambda h, w: rounded(h * 3),
    "what it made is kept": lambda h, w: Exponential.apply(h),
    "one of another": lambda h, w: Exponential.apply(Reversed.apply(h * w)),
    "of a parameter": lambda h, w: h * Exponential.apply(w),
    "several results": _largest,
    "some results": lambda h, w: h + Largest.apply(h, w)[0][:, None],
    "results that are no tensors": lambda h, w: Described.apply(h, 2.0)[1] * w,
    "overwritten afterwards": _overwritten,
    "an argument that it overwrites": _dirty,
    "detached": lambda h, w: h * Exponential.apply(h).detach() + w * Exponential.apply(h.detach()),
    "in a checkpoint": lambda h, w: checkpoint(lambda x: Reversed.apply(x) * w, h, use_reentrant=False),
    "in a checkpoint that is reentrant": lambda h, w: checkpoint(
        lambda x: Reversed.apply(x) * w, h, use_reentrant=True
    ),
    "defined while it runs": _defined,
    "of a class": lambda h, w: OfClass.apply(h) * OfDerived.apply(w),
    "differentiates itself": lambda h, w: Recomputed.apply(lambda x, w: torch.tanh(x * w), h, w),
}


class Scores(torch.nn.Module):
    def __init__(self, use: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.out, self.use = torch.nn.Linear(3, 5), torch.nn.Linear(5, 2), use
        self.w = torch.nn.Parameter(torch.linspace(-1, 1, 5))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.out(self.use(torch.tanh(self.into(x)), self.w)), labels)


def batch(rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 3, generator=generator), torch.randint(2, (rows,), generator=generator)


def step_in_pytorch(module: torch.nn.Module, *batches: tuple[torch.Tensor, torch.Tensor]) -> None:
    for x, labels in batches:
        (module(x, labels) / len(batches)).backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    module.zero_grad()


def trained(module: torch.nn.Module, options: poptorch.Options | None = None) -> poptorch.PoplarExecutor:
    return poptorch.trainingModel(module, options, torch.optim.SGD(module.parameters(), lr=0.1))


def same_weights(ours: torch.nn.Module, theirs: torch.nn.Module) -> None:
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-5, atol=1e-6)


@pytest.mark.thorough(but_each=4)
@pytest.mark.parametrize("name", USES)
def test_trains_as_in_pytorch(name: str, caplog: pytest.LogCaptureFixture) -> None:
    ours = Scores(USES[name])
    theirs = copy.deepcopy(ours)
    model = trained(ours)
    for rows in (4, 4):
        model(*batch(rows))
        step_in_pytorch(theirs, batch(rows))
    same_weights(ours, theirs)
    assert not caplog.text


def test_a_function_that_updates_a_buffer(caplog: pytest.LogCaptureFixture) -> None:
    class Normalising(Scores):
        def __init__(self) -> None:
            super().__init__(lambda h, w: Centred.apply(h, self.average) * w)
            self.register_buffer("average", torch.zeros(5))

    ours, theirs = Normalising(), Normalising()
    model = trained(ours)
    for rows in (4, 4):
        model(*batch(rows))
        step_in_pytorch(theirs, batch(rows))
    same_weights(ours, theirs)
    assert not caplog.text


def test_a_gradient_of_a_gradient() -> None:
    class Penalised(Scores):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            x.requires_grad_()
            loss = super().forward(x, labels)
            (g,) = torch.autograd.grad(loss, x, create_graph=True)
            return poptorch.identity_loss(loss + g.square().sum(), "none")

    ours = Penalised(USES["a view"])
    theirs = copy.deepcopy(ours)
    trained(ours)(*batch())
    step_in_pytorch(theirs, batch())
    same_weights(ours, theirs)


@pytest.mark.thorough
def test_in_steps_replicas_and_a_file(tmp_path: Path) -> None:
    ours = Scores(_largest)
    theirs = copy.deepcopy(ours)
    options = poptorch.Options().replicationFactor(2)
    options.Training.gradientAccumulation(2)
    model, (x, labels) = trained(ours, options), batch(8)
    model(x, labels)
    step_in_pytorch(theirs, *((x[i : i + 2], labels[i : i + 2]) for i in range(0, 8, 2)))
    same_weights(ours, theirs)
    model.save(tmp_path / "model")
    again = poptorch.load(tmp_path / "model")
    torch.testing.assert_close(again(x, labels), model(x, labels))


def test_in_a_pipeline() -> None:
    class Staged(Scores):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            with poptorch.Block("first", ipu_id=0):
                h = Reversed.apply(torch.tanh(self.into(x)))
            with poptorch.Block("second", ipu_id=1):
                return F.cross_entropy(self.out(Exponential.apply(h) * self.w), labels)

    ours = Staged(_largest)
    theirs = copy.deepcopy(ours)
    options = poptorch.Options()
    options.Training.gradientAccumulation(3)
    x, labels = batch(6)
    trained(ours, options)(x, labels)
    step_in_pytorch(theirs, *((x[i : i + 2], labels[i : i + 2]) for i in range(0, 6, 2)))
    same_weights(ours, theirs)


def test_equal_layers_are_one_graph() -> None:
    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = Exponential.apply(torch.tanh(self.linear(x)))
            return x + (h.sigmoid() * 0.5 + 1).sin().abs().sqrt()

    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.Sequential(*(Layer() for _ in range(3)))

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.layers(x), labels)

    ours = Layers()
    theirs = copy.deepcopy(ours)
    model = trained(ours)
    model(*batch())
    step_in_pytorch(theirs, batch())
    same_weights(ours, theirs)
    names = [graph.name for graph in poptorch.sessionOf(model).ir.graphs]
    assert sum(name.startswith("layers") and not name.endswith("_bwd") for name in names) == 1


def test_what_runs_only_has_no_use_for_it(caplog: pytest.LogCaptureFixture) -> None:
    module = Scores(lambda h, w: Reversed.apply(h) * w).eval()
    x, labels = batch()
    torch.testing.assert_close(poptorch.inferenceModel(module)(x, labels), module(x, labels).detach())
    assert not caplog.text


def _chosen(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return Threefold.apply(h)[:, : 5 if h.sum() > -100 else 3]


def _a_part(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = h * 1
    Clamped.apply(h[1])
    return h


@pytest.mark.parametrize(("function", "use"), [("Clamped", _a_part), ("Threefold", _chosen)])
def test_where_it_does_not_count_that_is_told(function: str, use: Any, caplog: pytest.LogCaptureFixture) -> None:
    from poptorch.capture.gradient_flow import warn_about_derivative

    warn_about_derivative.cache_clear()
    trained(Scores(use))(*batch())
    assert f"{function}.backward has no effect" in caplog.text


def test_another_thread_is_not_heard() -> None:
    gradients, views = [], []

    def elsewhere() -> None:
        t = torch.ones(2, requires_grad=True)
        y = Reversed.apply(t)
        y.sum().backward()
        gradients.append(t.grad)
        views.append(y.data_ptr() == t.data_ptr())

    def use(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return Reversed.apply(h) * w

    ours = Scores(use)
    theirs = copy.deepcopy(ours)
    trained(ours)(*batch())
    step_in_pytorch(theirs, batch())
    same_weights(ours, theirs)
    torch.testing.assert_close(gradients, [torch.full((2,), -0.5)] * 2)
    assert views == [True, True]


class Wrong(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Narrow(Wrong):
    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g[:, :2]


class Reading(Wrong):
    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g if g.sum().item() > 0 else -g


class Failing(Wrong):
    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        raise LookupError("mine")


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (Narrow, poptorch.Error, "Narrow.backward cannot be captured: size .* is not expandable"),
        (Reading, poptorch.Error, "Reading.backward: The numbers in a tensor cannot be read"),
        (Failing, LookupError, "mine"),
    ],
)
def test_a_backward_that_cannot_be_captured(function: Any, error: type[Exception], message: str) -> None:
    forward = vars(Wrong)["forward"]
    with pytest.raises(error, match=message):
        trained(Scores(lambda h, w: function.apply(h)))(*batch())
    assert vars(Wrong)["forward"] is forward


NONE = torch.tensor([[math.nan, 1.0, -2.0, 0.5], [0.3, math.nan, math.nan, -1.0], [0.1, 0.2, -0.3, 0.4]])
BESIDE = torch.tensor([[0.5, math.nan, -1.0, 0.2], [math.nan, 0.4, math.nan, 2.0], [0.3, 0.1, 0.2, -0.4]])
SIGNS = torch.tensor([[1.0, -1, 1, 1], [-1, 1, 1, -1], [1, 1, -1, 1]])


def _of_many(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """An activation of many elements: PyTorch gives what is left over at the end another gradient at NaN."""
    return lambda x: getattr(F, name)(x.repeat(1, 16))


OF_NONE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "clamp": lambda x: x.clamp(-1, 0.4),
    "clamp at one end": lambda x: x.clamp(min=0) + x.clamp(max=0.1),
    "clamp by tensors": lambda x: torch.clamp(x, BESIDE, BESIDE + 1) + torch.clamp(SIGNS, x, x + 1),
    "relu": F.relu,
    **{name: _of_many(name) for name in ("elu", "selu", "celu", "hardsigmoid", "hardswish", "softshrink")},
    "max": lambda x: x.max(),
    "min": lambda x: x[1:].min(),
    "amax": lambda x: x.amax(1),
    "amin": lambda x: x.amin(0),
    "maximum": lambda x: torch.maximum(x, BESIDE) + torch.minimum(BESIDE, x),
    "where": lambda x: torch.where(x > 0, x * 2, x * 3) + x.masked_fill(x != x, 0).sin(),
    "norm 1": lambda x: torch.linalg.vector_norm(x, 1, dim=1),
    "norm inf": lambda x: torch.linalg.vector_norm(x, math.inf, dim=1),
    "norm -inf": lambda x: x.norm(-math.inf, dim=0),
    "norm 3": lambda x: x.norm(3, dim=0),
    "distances": lambda x: torch.cdist(x, BESIDE, p=1.0),
    "margin ranking": lambda x: F.margin_ranking_loss(x, BESIDE, SIGNS, reduction="none"),
    "triplets": lambda x: F.triplet_margin_loss(x, BESIDE, SIGNS, reduction="none"),
    "cosine embedding": lambda x: F.cosine_embedding_loss(x, BESIDE, torch.tensor([1, -1, 1]), reduction="none"),
    "multi margin": lambda x: F.multi_margin_loss(x, torch.tensor([0, 1, 2]), reduction="none"),
    "hinge embedding": lambda x: F.hinge_embedding_loss(x, SIGNS, reduction="none"),
}


def test_what_is_no_number_has_the_derivative_of_pytorch() -> None:
    """All in one program, each with a parameter of its own."""

    class Functions(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = torch.nn.ParameterList([NONE.clone() for _ in OF_NONE])

        def forward(self) -> tuple[list[torch.Tensor], torch.Tensor]:
            results = [function(x) for function, x in zip(OF_NONE.values(), self.x, strict=True)]
            total = sum((y * torch.linspace(0.5, 1.5, y.numel()).reshape(y.shape)).sum() for y in results)
            return results, poptorch.identity_loss(total, "none")

    module, expected, options = Functions(), Functions(), poptorch.Options()
    for i in range(len(OF_NONE)):
        options.anchorTensor(f"{i}", f"Gradient___x.{i}")
    model = poptorch.trainingModel(module, options, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))
    results, _ = model()
    wanted, total = expected()
    total.backward()
    for i, name in enumerate(OF_NONE):
        for mine, its in ((results[i], wanted[i].detach()), (model.getAnchoredTensor(f"{i}"), expected.x[i].grad)):
            torch.testing.assert_close(
                mine, its, rtol=1e-4, atol=1e-5, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
            )
