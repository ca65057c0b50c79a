"""User-facing functions for wrapping and loading models, and accessing a wrapper's session."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

import popxl
from poptorch.options import Options
from poptorch.run import saving
from poptorch.run.executor import PoplarExecutor
from poptorch.run.host_model import Model
from poptorch.run.spans import channel


def trainingModel(
    model: Model | PoplarExecutor, options: Options | None = None, optimizer: torch.optim.Optimizer | None = None
) -> PoplarExecutor:
    """Wrap a model for training on a device.

    Args:
        model: a module, a function, or another wrapper, whose model is meant. Its parameters are trained; attributes
            such as `training` have their current values.
        options: the options; they are frozen.
        optimizer: an optimiser of `poptorch.optim` or `torch.optim`, by default `poptorch.optim.SGD` with a learning
            rate of 0.01.

    Raises:
        RuntimeError: if another wrapper trains the model.
        AssertionError: if no model can be trained with the class of the optimiser.
        ValueError: for `use_tf_variant` with an optimiser other than RMSprop.

    Example:
        >>> class Fit(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = torch.nn.Linear(3, 2)
        ...     def forward(self, x, target):
        ...         return torch.nn.functional.mse_loss(self.layer(x), target)
        >>> fit = Fit()
        >>> model = poptorch.trainingModel(fit, optimizer=torch.optim.SGD(fit.parameters(), lr=0.1))
        >>> first, second = model(x, target), model(x, target)  # a step each
        >>> bool(second < first)
        True
    """
    return PoplarExecutor(model, options, True, popxl.__version__, optimizer)


def inferenceModel(model: Model | PoplarExecutor, options: Options | None = None) -> PoplarExecutor:
    """Wrap a model for inference on a device.

    Args:
        model: a module, a function, or another wrapper, whose model is meant. If it is being trained, too, the weights
            follow.
        options: the options; they are frozen.

    Example:
        >>> model = poptorch.inferenceModel(module)
        >>> model(x).shape
        torch.Size([4, 2])
    """
    return PoplarExecutor(model, options, False, popxl.__version__)


def sessionOf(model: PoplarExecutor) -> popxl.Session:
    """The popxl session running a model: `ir` contains the program, `report` its resource requirements.

    Args:
        model: a compiled one.

    Raises:
        poptorch.Error: if it is not.

    Example:
        >>> model = poptorch.inferenceModel(module)
        >>> model.compile(torch.zeros(4, 3))
        >>> session = poptorch.sessionOf(model)
        >>> print(session.ir)
        main graph:
        ...
        >>> print(session.report)
        Report...
    """
    return model._required.session


def load(filename: str | os.PathLike[str], edit_opts_fn: Callable[[Options], object] | None = None) -> PoplarExecutor:
    """Load a wrapper saved by `save` or `compileAndExport`, ready to run, without the model's code.

    Its model is a plain `torch.nn.Module` with all parameters and buffers under their names; the `forward` of that is
    on the device only. To have both, wrap a model of your own and use `loadExecutable`.

    Args:
        filename: the file.
        edit_opts_fn: function that may change runtime options before they are used.

    Raises:
        poptorch.Error: if the file holds nothing that can be read.
        AssertionError: for a file of another version, or without a model.

    Example:
        >>> model = poptorch.inferenceModel(module)
        >>> model.compileAndExport("model.poptorch", torch.zeros(4, 3))
        >>> y = poptorch.load("model.poptorch")(torch.ones(4, 3))
    """
    saved = saving.read_model(filename)
    assert saved.has_model, (
        f"{os.fspath(filename)} holds an executable without its model. Wrap the model, and use `loadExecutable`; or "
        "save with `export_model=True`."
    )
    options = saved.options()
    if edit_opts_fn is not None:
        edit_opts_fn(options)
    module = saved.module()
    executor = PoplarExecutor(module, options, saved.training, popxl.__version__, saved.optimizer(module))
    with channel.tracepoint("loadExecutable"):
        executor._take(saved, anew=False)
    return executor
