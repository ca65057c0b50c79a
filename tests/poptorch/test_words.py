"""Words that programs and their tests match in errors: each is part of a message that says more."""

# ruff: noqa: E402 - poptorch needs torch

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import poptorch
from poptorch import Options

X = torch.arange(12.0).reshape(3, 4)
PLACE = torch.tensor(1)


class Buffered(torch.nn.Module):
    """A module with a buffer `y`, with which a function of the module and its input does something."""

    def __init__(self, change: Callable[[Any, torch.Tensor], Any], within: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.change = change
        self.register_buffer("y", torch.ones(3, 4))
        self.within = within

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.within is not None:
            return self.within(x)
        self.change(self, x)
        return x + 1


def reassign(module: Any, x: torch.Tensor) -> None:
    module.y = x


def delete(module: Any, x: torch.Tensor) -> None:
    del module.y


def write(module: Any, x: torch.Tensor) -> None:
    module.y += x


class Staged(torch.nn.Module):
    """A layer on each of some units."""

    def __init__(self, *units: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            poptorch.BeginBlock(torch.nn.Linear(4, 4), f"b{i}", ipu_id=unit) for i, unit in enumerate(units)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return poptorch.identity_loss(x, "mean")


class Lossy(torch.nn.Module):
    """A weight, and a function of it and the input for a loss."""

    def __init__(self, forward: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(4))
        self.function = forward

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self.w, x)


def two_losses(w: torch.Tensor, x: torch.Tensor) -> Any:
    return poptorch.identity_loss(w * x, "mean"), poptorch.identity_loss(w + x, "sum")


def in_a_loop(w: torch.Tensor, x: torch.Tensor) -> Any:
    (y,) = poptorch.for_loop(2, lambda y: y * 2, [x])
    return poptorch.identity_loss(w * y, "mean")


def in_a_branch(w: torch.Tensor, x: torch.Tensor) -> Any:
    (y,) = poptorch.cond(x.sum() > 0, lambda y: y * 2, [x], lambda y: y + 2, [x])
    return poptorch.identity_loss(w * y, "mean")


def on_the_host(w: torch.Tensor, x: torch.Tensor) -> Any:
    return poptorch.identity_loss(w * poptorch.CPU(lambda y: y * 2, "Double")(x), "mean")


def run(forward: Callable[..., Any], *args: Any, options: Options | None = None) -> Any:
    return poptorch.inferenceModel(forward, options)(*args)


def train(module: torch.nn.Module, options: Options | None = None) -> Any:
    return poptorch.trainingModel(module, options).compile(X)


def again(forward: Callable[..., Any], first: Callable[[Any], Any], second: Callable[[Any], Any]) -> None:
    """Call a model once, and then in another way, without running it."""
    model = poptorch.inferenceModel(forward, Options().connectionType(poptorch.ConnectionType.Never))
    first(model.compile)
    second(model)


def accumulating(n: int) -> Options:
    options = Options()
    options.Training.gradientAccumulation(n)
    return options


NO_OVERLAP, OVERLAP = poptorch.OverlapMode.NoOverlap, poptorch.OverlapMode.OverlapAccumulationLoop
set_input, set_output = poptorch.set_overlap_for_input, poptorch.set_overlap_for_output


def ones(*args: Any, **kwargs: Any) -> Any:
    return torch.ones(2)


CASES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "inference that accumulates": (
        lambda: poptorch.inferenceModel(Staged(0), accumulating(2)),
        poptorch.Error,
        "You must set poptorch.Options().Training.gradientAccumulation to 1 or leave it as its default value (1) when "
        "running a poptorch.inferenceModel(). Use poptorch.Options().deviceIterations() to process a sufficient number "
        "of batches each run for pipelined execution instead.",
    ),
    "a pipeline that accumulates too little": (
        lambda: train(Staged(0, 1, 2, 3)),
        poptorch.Error,
        "poptorch.Options().Training.gradientAccumulation must be greater than or equal to the number of pipeline "
        "stages (7) when using poptorch.PipelinedExecution. Please note that a model with 4 pipeline stages in "
        "PopTorch will have an additional 3 stages when training.",
    ),
    "a buffer that is assigned": (
        lambda: run(Buffered(reassign), X),
        poptorch.Error,
        "Buffer y is reassigned within the model when calling the forward method. This is not supported. Consider "
        "using self.y.copy_(src) to copy data from a source tensor, where src is the name of the source tensor.",
    ),
    "a buffer within that is assigned": (
        lambda: run(Buffered(write, Buffered(reassign)), X),
        poptorch.Error,
        "Buffer within.y is reassigned within the model when calling the forward method.",
    ),
    "a buffer that is deleted": (
        lambda: run(Buffered(delete), X),
        poptorch.Error,
        "Buffer y is removed from the model when calling the forward method.",
    ),
    "replicas and a buffer that is written": (
        lambda: run(Buffered(write), X[:2], options=Options().replicationFactor(2)),
        poptorch.Error,
        "PopTorch does not support broadcasting buffers. If your model is able to tolerate buffers becoming out of "
        "sync between replicas, you can disable buffer broadcasting using poptorch.Options.broadcastBuffers(False).",
    ),
    "two losses": (
        lambda: train(Lossy(two_losses)),
        poptorch.Error,
        "Multiple independent losses found in graph. Graph must have one final loss. Wrap final graph loss in "
        "poptorch.identity_loss.",
    ),
    "one_hot without classes": (
        lambda: run(lambda x: torch.nn.functional.one_hot(x), torch.tensor([0, 2]), options=Options().keptPrograms(1)),
        poptorch.Error,
        "OneHot num classes must be specified and must be constant.",
    ),
    "cond in training": (
        lambda: train(Lossy(in_a_branch)),
        poptorch.Error,
        "poptorch.cond() is only supported in inference",
    ),
    "for_loop in training": (
        lambda: train(Lossy(in_a_loop)),
        poptorch.Error,
        "poptorch.for_loop() is only supported in inference",
    ),
    "CPU in training": (
        lambda: train(Lossy(on_the_host)),
        poptorch.Error,
        "poptorch.CPU() is only supported in inference",
    ),
    "None for a tensor": (
        lambda: again(lambda x, z=None: x + z, lambda f: f(X, X), lambda f: f(X, None)),
        poptorch.Error,
        "Type mismatch for z: expected <class 'torch.Tensor'> but got <class 'NoneType'>",
    ),
    "another constant": (
        lambda: again(lambda x, u: x + u, lambda f: f(X, 5), lambda f: f(X, 3)),
        poptorch.Error,
        "mismatch for u: expected 5 but got 3",
    ),
    "a keyword less": (
        lambda: again(lambda x, m=None: x + 1, lambda f: f(X, m=X), lambda f: f(X)),
        poptorch.Error,
        "Missing arguments: m.",
    ),
    "a keyword of many less": (
        lambda: again(lambda x, **more: x + more["k"], lambda f: f(X, k=X, m=X), lambda f: f(X, k=X)),
        poptorch.Error,
        "Missing arguments: m.",
    ),
    "an argument less": (
        lambda: again(lambda a, b, c, d, e=None: a + 1, lambda f: f(X, X, X, X, X), lambda f: f(X, X, X, X)),
        poptorch.Error,
        "Number of positional arguments mismatch: expected 5 arguments but got 4",
    ),
    "an argument of many less": (
        lambda: again(lambda a, *more: a + 1, lambda f: f(X, X, X, X, X), lambda f: f(X, X, X, X)),
        poptorch.Error,
        "Number of positional arguments mismatch: expected 5 arguments but got 4",
    ),
    "an empty slice": (
        lambda: run(lambda x, i: x[i:i], X, PLACE),
        poptorch.Error,
        "The start and end of a slice must be different.",
    ),
    "a slice that ends before it begins": (
        lambda: run(lambda x, i: x[i + 1 : i], X, PLACE),
        poptorch.Error,
        "Taking a slice of a tensor with the end less than the start is not supported.",
    ),
    "a slice that does not divide": (
        lambda: run(lambda x, i: x[i : i + 2], X, PLACE),
        poptorch.Error,
        "A slice between two tensors has 2 rows, of 3; expected a number that divides these.",
    ),
    "an update of fewer dimensions": (
        lambda: run(lambda x, i: poptorch.dynamic_update(x, x[0], 0, i, 1), X, PLACE),
        poptorch.Error,
        "input and src tensors must have same dimensionality. (2) vs (1)",
    ),
    "an update of another dtype": (
        lambda: run(lambda x, i: poptorch.dynamic_update(x, x[:1].int(), 0, i, 1), X, PLACE),
        poptorch.Error,
        "input and src tensor must have same dtype. (torch.float32 vs torch.int32)",
    ),
    "backward of a result": (
        lambda: run(lambda x: x + 1, X).backward(),
        poptorch.Error,
        "backward() cannot be called explicitly on outputs of a PopTorch model. If you're using a trainingModel, the "
        "backwards pass is performed automatically when invoking the model. If you're using an inferenceModel, you "
        "should use a trainingModel instead.",
    ),
    "an unknown level": (
        lambda: poptorch.setLogLevel("wibble"),
        ValueError,
        "Unknown log level: wibble. Valid values are DEBUG, ERR, INFO, OFF, TRACE and WARN",
    ),
    "partials of another type": (
        lambda: poptorch.MultiConv().partialsTypes(torch.int32),
        AssertionError,
        "Invalid partials types",
    ),
    "an impossible number of tiles": (
        lambda: Options().TensorLocations.numIOTiles(10),
        AssertionError,
        "numIOTiles must be an even number between 32 and 192.",
    ),
    "an overlapped input that is used elsewhere": (
        lambda: run(lambda x: set_input(x, OVERLAP) + x, X),
        poptorch.Error,
        "poptorch.set_overlap_for_input must be the only op applied to an input. This is not the case for input 0 to "
        "the model.",
    ),
    "an overlapped input that is returned": (
        lambda: run(lambda x, y: (set_input(y, OVERLAP) + x, y), X, X.clone()),
        poptorch.Error,
        "poptorch.set_overlap_for_input must be the only op applied to an input. This is not the case for input 1 to "
        "the model.",
    ),
    "something overlapped that is no input": (
        lambda: run(lambda x: set_input(x + 1, OVERLAP), X),
        poptorch.Error,
        "poptorch.set_overlap_for_input",
    ),
    "an overlapped result that is returned twice": (
        lambda: run(lambda x: (y := set_output(x + 1, OVERLAP), [y]), X),
        poptorch.Error,
        "poptorch.set_overlap_for_output cannot be used with a tensor that is returned twice. Please check all "
        "returned tensors including those nested in tuples/lists.",
    ),
    "something overlapped that is no result": (
        lambda: run(lambda x: set_output(x + 1, OVERLAP) * 2, X),
        poptorch.Error,
        "poptorch.set_overlap_for_output",
    ),
    "three units": (
        lambda: run(Staged(0, 1, 2), torch.zeros(9, 4), options=Options().deviceIterations(3)),
        poptorch.Error,
        "The model specifies the use of 3 IPUs, however PopTorch must reserve a minimum of 4 in order to allow the "
        "model to run, because PopTorch must reserve a power of 2 or maximum of 64 IPUs per process. Please "
        "reconfigure your model to use a different number of IPUs or set poptorch.Options().autoRoundNumIPUs(True).",
    ),
    "too many units": (
        lambda: run(lambda x: x + 1, torch.zeros(128, 4), options=Options().replicationFactor(128)),
        poptorch.Error,
        "Too many IPUs requested (128). Experiments that need ",
    ),
    "a time before it is known": (
        lambda: poptorch.inferenceModel(ones).compilationTime(),
        poptorch.Error,
        "Please compile the model before obtaining compilation time.",
    ),
    "cycles that are not counted": (
        lambda: poptorch.inferenceModel(ones).cycleCount(),
        poptorch.Error,
        "Cycle count logging is disabled. Please set option logCycleCount to True to enable.",
    ),
    "bincount without a length": (
        lambda: run(lambda x: torch.bincount(x), torch.tensor([0, 2])),
        poptorch.Error,
        "Bincount `minlength` must be specified and must be a constant.",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_words(case: str) -> None:
    go_wrong, kind, words = CASES[case]
    with pytest.raises(kind, match=re.escape(words)):
        go_wrong()
