"""Whole PyTorch models, called for their results: by `poptorch`, and by PyTorch itself, eager and compiled.

The models are those of `first_call.py`. Weights stay as they are; each call is given the same inputs, and read.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from tests.benchmarks.harness import OURS, Measure, Row, Size, check_agreement, progress, time_of, times

try:
    import torch
except ImportError:
    MODELS: tuple[Any, ...] = ()
else:
    import poptorch
    from tests.benchmarks.first_call import MODELS, in_torch

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


ROWS = tuple(
    Row(
        f"model_{'_'.join(model.name.replace(',', '').split())}",
        lambda size, model=model: called(model, size),
        (times(1.0, "torch"), times(1.0, "torch.compile")),
        about=f"a call of {model.name}",
        slow=model.name not in SMALL,
    )
    for model in MODELS
    if importlib.util.find_spec(model.package) is not None
)
