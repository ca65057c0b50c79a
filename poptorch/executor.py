"""`PoplarExecutor`: a wrapped model, as a user has it.

It decides when a model is compiled, who holds the truth about weights and the state of the optimiser, and when either is
transferred. What is compiled is in `poptorch.compiled`; how host modules notice that they are read, in
`poptorch.weights`.
"""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from poptorch import optim, profiling, weights
from poptorch.blocks import module_repr
from poptorch.compiled import Compiled
from poptorch.enums import ConnectionType, MeanReductionStrategy, OutputMode
from poptorch.errors import createPoptorchError
from poptorch.logging_ import logger
from poptorch.options import Options
from poptorch.replica_groups import GroupedParameter, ParameterProxy
from poptorch.updates import Update

__all__ = ["PoplarExecutor", "inferenceModel", "trainingModel"]

Model = torch.nn.Module | Callable[..., Any]


class PoplarExecutor:
    """A model that runs on a device. Make one with `poptorch.trainingModel` or `poptorch.inferenceModel`.

    It is called as the model is. The first call compiles it for arguments like those given; `destroy` undoes that.
    Attributes that it does not have are those of the model.

    Args:
        model: the module, a function, or another executor, whose model is meant.
        options: the options; they cannot be changed any more.
        training: whether it trains the model.
        poptorch_version: the version that the program was written for; without effect.
        optimizer: for training, an optimiser of `poptorch.optim` or `torch.optim`.
        user_model: the module that is told to the user; by default the model.

    Raises:
        poptorch.Error: if the options are none, or do not fit.
        RuntimeError: if the model is being trained by another executor.
    """

    def __init__(
        self,
        model: Model | PoplarExecutor,
        options: Options | None,
        training: bool,
        poptorch_version: str = "",
        optimizer: torch.optim.Optimizer | None = None,
        user_model: Model | None = None,
    ) -> None:
        if isinstance(model, PoplarExecutor):
            model = model._user_model
        if options is not None and not isinstance(options, Options):
            raise createPoptorchError(
                f"`options` must be a poptorch.Options; got {options!r} ({type(options).__name__})."
            )
        self._user_model = user_model or model
        self._training = training
        self._options = _own_options(options or Options(), training)
        self._module = model if isinstance(model, torch.nn.Module) else None
        self._call = model
        self._optimizer = optimizer
        if training and optimizer is None:
            parameters = list(self._module.parameters()) if self._module is not None else []
            self._optimizer = optim.SGD(parameters, lr=0.01) if parameters else None
        self._attributes = weights.Attributes(self._module)
        self._grouped: dict[str, GroupedParameter] = {}
        self._compiled: Compiled | None = None
        self._update: Update | None = None
        self._instrumented: weights.Instrumented | None = None
        self._numbers: np.ndarray | None = None
        self._trainings = weights.Trainings(self._module)
        if training:
            self._instrumented = weights.Instrumented(self._module, self._fetch_weights, self._grouped)

    # Compiling ------------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on the device, on the rows of a whole run.

        Returns:
            What the model returns, in its structure, with results of all the micro-batches that the output mode says.

        Raises:
            poptorch.Error: if the arguments are not as they were when it was compiled, and as `compile` does.
        """
        compiled = self._compiled
        if compiled is None:
            self.compile(*args, **kwargs)
            compiled = self._executable
        tensors = compiled.signature.check(args, kwargs)
        self._bring_up_to_date()
        result = compiled.run(tensors)
        if self._instrumented is not None:
            self._instrumented.is_stale = True
        return result

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the model for arguments like these.

        Raises:
            poptorch.Error: for an op that is not supported, a loss that is missing, and whatever else is wrong.
        """
        if self._compiled is not None:
            logger.warning("The model is compiled already; call `destroy()` first to compile it again.")
            return
        if self._training and self._optimizer is not None:
            self._update = Update(
                self._optimizer,
                weights.tensors_of(self._module),
                automatic_loss_scaling=self._options.Training.automatic_loss_scaling,
                relaxed_checks=self._options.relax_optimizer_attributes_checks,
            )
            self._numbers = self._update.values(self._optimizer)
        with self._attributes.restored():
            self._compiled = Compiled(
                self._call,
                self._module,
                args,
                kwargs,
                self._options,
                update=self._update,
                numbers=self._numbers,
                grouped=self._grouped,
                host=self._host_weights(),
                seed=self._options.random_seed if self._options.random_seed is not None else secrets.randbits(31),
            )
        self._trainings.have_news()

    @property
    def _executable(self) -> Compiled:
        if self._compiled is None:
            raise createPoptorchError("Model has not been compiled or has been destroyed.")
        return self._compiled

    def isCompiled(self) -> bool:
        """Whether the model is compiled."""
        return self._compiled is not None

    def destroy(self) -> None:
        """Bring weights home, and give the device and the host module free. No effect if nothing is compiled."""
        if self._compiled is None:
            return
        self.copyWeightsToHostIfNeeded()
        self._compiled.session.__exit__(None, None, None)
        self._compiled = None
        if self._instrumented is not None:
            self._instrumented.destroy()
            self._instrumented = None

    # Weights --------------------------------------------------------------------------------------------------------

    def _host_weights(self) -> dict[str, np.ndarray]:
        if self._instrumented is not None:
            return self._instrumented.read()
        return weights.read(self._module, self._grouped)

    def _fetch_weights(self) -> Mapping[str, np.ndarray]:
        return self._executable.weights()

    def _bring_up_to_date(self) -> None:
        """What has to happen before a run: training elsewhere is heard of."""
        if not self._training and self._trainings.have_news():
            self.copyWeightsToDevice()

    def copyWeightsToHost(self) -> None:
        """Bring parameters and buffers from the device to the module."""
        compiled = self._executable
        if self._instrumented is not None:
            self._instrumented.to_host()
        else:
            weights.write(self._module, compiled.weights(), self._grouped)

    def copyWeightsToHostIfNeeded(self) -> bool:
        """The same, if they have changed on the device since. Returns whether they had."""
        return self._instrumented is not None and self._instrumented.to_host_if_stale()

    def copyWeightsToDevice(self) -> None:
        """Bring parameters and buffers from the module to the device. What has been trained and not read is lost."""
        self._executable.write_weights(self._host_weights())
        if self._instrumented is not None:
            self._instrumented.is_stale = False

    # Looks ----------------------------------------------------------------------------------------------------------

    @property
    def model(self) -> Model:
        """The model that the user wrapped."""
        return self._user_model

    @property
    def options(self) -> Options:
        """The options, which cannot be changed any more."""
        return self._options

    def __repr__(self) -> str:
        return module_repr(self._user_model) if isinstance(self._user_model, torch.nn.Module) else repr(self._user_model)

    def __getattr__(self, attr: str) -> Any:
        value = getattr(self.__dict__["_user_model"], attr)
        if isinstance(value, torch.nn.Parameter):

            def group(grouped: GroupedParameter | None) -> None:
                self._grouped.pop(attr, None)
                if grouped is not None:
                    self._grouped[attr] = grouped

            return ParameterProxy(value, attr, self._options.replication_factor, group)
        return value


def _own_options(options: Options, training: bool) -> Options:
    """A copy of a user's options, with what is left to the kind of executor filled in. The user's are frozen."""
    options.freeze()
    own = options.clone()
    if own.defaultOutputMode():
        own.outputMode(OutputMode.Final if training else OutputMode.All)
    if not training and own.Training.gradient_accumulation != 1:
        raise createPoptorchError(
            f"Inference does not accumulate gradients: Training.gradientAccumulation is "
            f"{own.Training.gradient_accumulation}; expected 1. For a pipelined model use `deviceIterations`."
        )
    own.freeze()
    return own


def trainingModel(
    model: Model | PoplarExecutor,
    options: Options | None = None,
    optimizer: torch.optim.Optimizer | None = None,
) -> PoplarExecutor:
    """Wrap a model, to train it on a device."""
    return PoplarExecutor(model, options, True, "", optimizer)


def inferenceModel(model: Model | PoplarExecutor, options: Options | None = None) -> PoplarExecutor:
    """Wrap a model, to run it on a device."""
    return PoplarExecutor(model, options, False)
