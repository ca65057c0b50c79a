"""Whole PyTorch models, called and trained: by `poptorch`, and by PyTorch itself, eager and compiled.

The models are those of `first_call.py`. They are trained a hundred steps a call, large ones ten. Each call is given the
same inputs, and its result, or the last loss, is read.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import numpy as np

from tests.benchmarks.harness import OURS, Measure, Row, Size, check_agreement, progress, time_of, times

try:
    import torch
except ImportError:
    MODELS: tuple[Any, ...] = ()
else:
    import poptorch
    from tests.benchmarks.first_call import MODELS, WithLoss, in_torch
    from tests.benchmarks.models import in_turns

SMALL = ("encoder of 2 layers", "LSTM of 2 layers")
"""Models that are measured for a quick look, too."""


def scores(result: Any) -> np.ndarray:
    """What a model gives, without its loss."""
    result = result[0] if isinstance(result, tuple) else getattr(result, "logits", result)
    return result.detach().numpy()


@contextmanager
def called(model: Any, size: Size) -> Iterator[Mapping[str, Measure]]:
    """The parties for a model. What PyTorch's compiler needs (a C++ compiler, for one) may not be there."""
    torch.manual_seed(0)
    module, inputs = model.make()
    module.eval()

    def eager(*inputs: Any) -> Any:
        with torch.no_grad():
            return module(*inputs)

    functions: dict[str, Callable[..., Any]] = {OURS: poptorch.inferenceModel(module), "torch": eager}
    if size is Size.FULL:
        try:
            functions["torch.compile"] = in_torch(module, "inference")
            functions["torch.compile"](*inputs)
        except RuntimeError as problem:
            progress(f"torch.compile is left out: {problem}\n")
            del functions["torch.compile"]
    calls = {name: lambda function=function: scores(function(*inputs)) for name, function in functions.items()}
    found = {name: call() for name, call in calls.items()}
    check_agreement(found["torch"], popxl=found[OURS])
    yield {name: time_of(call) for name, call in calls.items()}


STEPS = {"mobilenet_v3_small": 10, "resnet50": 10, "swin_v2_t": 10, "BERT-base": 10}
"""Steps of a call, of models of which a hundred would take minutes."""

RATE = 0.01


def with_loss(model: Any) -> tuple[Any, tuple[Any, ...]]:
    """A model that gives a loss, with the same weights whenever it is made, and what it is called with."""
    torch.manual_seed(0)
    module, inputs = model.make()
    for each in module.modules():
        if type(each).__name__ in ("Dropout", "StochasticDepth"):
            each.p = 0.0  # numbers by chance are others on the device
    return WithLoss(module).train(), inputs


def steps_in_torch(model: Any, steps: int, compiled: bool = False) -> Callable[[], np.ndarray]:
    """A call: the loss of the last step."""
    module, inputs = with_loss(model)
    optimiser = torch.optim.SGD(module.parameters(), RATE)
    forward = torch.compile(module) if compiled else module

    def call() -> np.ndarray:
        for _ in range(steps):
            optimiser.zero_grad()
            loss = forward(*inputs)
            loss.backward()
            optimiser.step()
        return np.float32(loss.item())

    return call


def steps_in_ours(model: Any, steps: int) -> Callable[[], np.ndarray]:
    """A call: the loss of the last step."""
    module, inputs = with_loss(model)
    options = poptorch.Options().deviceIterations(steps)
    wrapped = poptorch.trainingModel(module, options, torch.optim.SGD(module.parameters(), RATE))
    rows = [t.repeat(steps, *[1] * (t.dim() - 1)) for t in inputs]
    return lambda: wrapped(*rows).numpy()


def trained(model: Any, size: Size) -> AbstractContextManager[Mapping[str, Measure]]:
    """A model, trained by all parties."""
    parties = {OURS: partial(steps_in_ours, model), "torch": partial(steps_in_torch, model)}
    compiled = partial(steps_in_torch, model, compiled=True)
    compared = (
        1 if model.name == "resnet50" else 3
    )  # its last norms see eight values, and rounding decides what follows
    return in_turns(parties, compiled, 3 if size is Size.TINY else steps_of(model), size, compared)


def steps_of(model: Any) -> int:
    """How many steps of training a call has."""
    return STEPS.get(model.name, 100)


def row(kind: str, work: Callable[..., Any], about: str, model: Any, rounds: int = 25) -> Row:
    """A row that does some work with a model."""
    return Row(
        f"{kind}_{'_'.join(model.name.replace(',', '').split())}",
        lambda size: work(model, size),
        (times(1.0, "torch"), times(1.0, "torch.compile")),
        rounds=rounds,
        about=f"{about} {model.name}",
        slow=model.name not in SMALL,
    )


THERE = [model for model in MODELS if importlib.util.find_spec(model.package) is not None]
ROWS = (
    *(row("model", called, "a call of", model) for model in THERE),
    *(
        row(
            "model_trained", trained, f"{steps_of(model)} steps of training of", model, 9 if model.name in STEPS else 25
        )
        for model in THERE
    ),
)
