"""`PoplarExecutor`: the user-facing wrapper of a model.

It calls the model on its device, sets its optimiser and random state, tells what happens within it and how long that
takes, and saves and loads it. The functions of
`poptorch.run.wrapping` create it for programs. It extends `poptorch.run.lifecycle`, which compiles and releases the
model and keeps its weights current; and `poptorch.run.model_proxy`, the attributes of the model. Files:
`poptorch.run.saving`.
"""

from __future__ import annotations

import copy
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

import popxl
from poptorch.capture.autocast import autocast_dtype
from poptorch.capture.torch_private import uncompiled
from poptorch.errors import Error, createPoptorchError
from poptorch.options import Options
from poptorch.run import saving
from poptorch.run.compilation import compiling, extend_program
from poptorch.run.compiled import Compiled
from poptorch.run.executor_options import needs_running_mean, own_options, with_running_mean
from poptorch.run.graph_breaks import CompiledModel
from poptorch.run.host_model import HostModel, Model
from poptorch.run.lifecycle import ModelLifecycle
from poptorch.run.signature_cache import SignatureCache, intercept_calls
from poptorch.run.smaller_batches import Run, SmallerBatches
from poptorch.run.spans import channel, traced
from poptorch.run.timings import Latency, Times
from poptorch.run.trainer import Trainer, default_optimizer
from popxl.extend.graphs import estimate_of


def _check_autocast(then: torch.dtype | None, now: torch.dtype | None) -> None:
    """Check that the current `torch.autocast` state matches the one at compilation."""
    if then != now:
        compiled, called = (f"with torch.autocast to {d}" if d else "without torch.autocast" for d in (then, now))
        raise createPoptorchError(
            f"The model was compiled {compiled}, and is called {called}: the casts are a part of the program. Make a "
            "wrapper for each, or call `destroy()` to compile it anew."
        )


class PoplarExecutor(ModelLifecycle):
    """Model on a device, created by `poptorch.trainingModel` or `poptorch.inferenceModel`.

    It is called like the model. The first call compiles it for its arguments; `destroy` undoes that. Other attributes
    are those of the model. Settings made through the wrapper before compilation count: `wrapper.eval()`, replaced
    methods, `wrapper.scale = 2`, `wrapper.layer.eval()`; later settings on the model itself do not. Several threads may
    call it: their runs take turns.

    Args:
        model: module, function, or another executor, whose model is used. The original of a `torch.compile` result is
            used.
        options: the options; they cannot be changed any more.
        training: whether to train the model.
        poptorch_version: the version that the program was written for; no effect.
        optimizer: for training, an optimiser of `poptorch.optim` or `torch.optim`.
        user_model: module shown to the user; by default the model.

    Raises:
        poptorch.Error: for a `model` that is not callable, `options` of another type, or contradictory options.
        RuntimeError: if the model is being trained by another executor.
        AssertionError: if there is an optimiser without training, or no model can be trained with its class.
        ValueError: for `use_tf_variant` with an optimiser other than RMSprop.
    """

    def __init__(
        self,
        model: Model | PoplarExecutor,
        options: Options | None,
        training: bool,
        poptorch_version: str,
        optimizer: torch.optim.Optimizer | None = None,
        user_model: Model | None = None,
    ) -> None:
        if isinstance(model, PoplarExecutor):
            model = model._user_model
        model = uncompiled(model)
        if not callable(model):
            raise createPoptorchError(
                f"`model`, the first argument, is {model!r} ({type(model).__name__}); expected a torch.nn.Module or "
                "a function."
            )
        if isinstance(model, type):
            raise createPoptorchError(
                f"`model`, the first argument, is a class; expected a model: `{model.__name__}(...)`."
            )
        if options is not None and not isinstance(options, Options):
            raise createPoptorchError(
                f"`options` must be a poptorch.Options; got {options!r} ({type(options).__name__})."
            )
        if optimizer is not None and not training:
            raise AssertionError("`optimizer` is for training; an inference model has none.")
        own, host = own_options(options or Options(), training), HostModel(model)
        trainer = Trainer(optimizer or default_optimizer(host.module)) if training else None
        if trainer is not None and needs_running_mean(trainer.optimizer, own):
            own = with_running_mean(own)
        super().__init__(host, user_model or model, own, trainer)
        self._is_loaded = False  # of a file, without the code of the model

    # Running --------------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on the device, using a complete run's rows.

        Returns:
            The model's result, in its structure, with results of all the micro-batches selected by the output mode.

        Raises:
            poptorch.Error: if the arguments differ from those at compilation, for errors of the running program, and as
                for `compile`.
            AssertionError: if the model was compiled for no device of this machine.
        """
        if torch.compiler.is_compiling():  # `torch.compile` around a program, in which it has nothing to do
            return torch.compiler.disable(type(self).__call__)(self, *args, **kwargs)
        self._take_changes()
        if self._compiled is None:
            with compiling():
                if self._compiled is None:  # another thread may have compiled it
                    self.compile(*args, **kwargs)
        compiled = self._required
        if self._autocast is not None:
            _check_autocast(*self._autocast, autocast_dtype())
        run = self._bind(compiled, args, kwargs)
        with channel.tracepoint("modelExecution"):
            with self._lock:
                self._prepare_run(compiled)
            try:
                return run()
            finally:  # even a run that fails has changed something
                if self._trainer is not None:
                    self._trainer.has_run()
                self._weights.lazy.has_run()

    def _bind(self, compiled: CompiledModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any]:
        """A function that runs the model for given arguments.

        Raises:
            poptorch.Error: if no program accepts them.
        """
        try:
            return partial(compiled.run, *compiled.signature.flatten(args, kwargs))
        except Error:
            if self._extend(compiled, args, kwargs):
                return partial(compiled.run, *compiled.signature.flatten(args, kwargs))
            if self._smaller is not None and (runs := self._smaller.runs(args, kwargs)):
                return self._smaller.padded(args, kwargs) or partial(self._run_fewer_rows, self._smaller, runs)
            raise

    def _prepare_run(self, compiled: CompiledModel) -> None:
        """Attach a device if necessary, and upload changes of the optimiser. Warns of ineffective changes."""
        if not compiled.is_attached:
            self._check_online("run a model")
            self._weights.attach()
        self._change_warnings.warn(compiled, self._attributes)
        if self._trainer is not None:
            self._weights.lazy.gradients.check_hooks()
            self._upload_optimizer(self._trainer)

    def _extend(self, compiled: CompiledModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the program accepts these arguments, possibly after extending it to new non-tensor values."""
        if not isinstance(compiled, Compiled) or self._is_loaded:
            return False
        with compiling(), self._attributes.restored():
            return extend_program(self._host, compiled, args, kwargs, self._options, self._training)

    def _run_fewer_rows(self, smaller: SmallerBatches, runs: Sequence[Run]) -> Any:
        with self._lock:
            return smaller(runs, self._compiled_for, None if self._trainer is None else self._trainer.numbers)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's `generate` method (transformers API), executing each model call on the device.

        There is one program for the prompt and one for the tokens after it: the cache keeps its shape, unless the
        arguments say something else: `cache_implementation="static"` is the default here, and layers with a sliding
        window cache all positions. At most
        `options.keptPrograms` of them are kept.

        Raises:
            poptorch.Error: if the model is for training, or has no `generate`.

        Example:
            >>> class Counting(torch.nn.Module):
            ...     def forward(self, last):
            ...         return last + 1
            ...     def generate(self, last, count):
            ...         for _ in range(count):
            ...             last = self(last)
            ...         return last
            >>> poptorch.inferenceModel(Counting()).generate(torch.zeros(2), count=3)
            tensor([3., 3.])
        """
        module, loop = self._host.module, getattr(self._user_model, "generate", None)
        if module is not self._user_model or not callable(loop):
            raise createPoptorchError(
                f"generate: {type(self._user_model).__name__} has no `generate`. Wrap a module that has one, such as "
                "those of transformers whose names end with `ForCausalLM`."
            )
        if self._training:
            raise createPoptorchError(
                "generate: the model is wrapped for training. Wrap it once more, with `poptorch.inferenceModel`: that "
                "follows the weights that this one trains."
            )
        if self._signatures is None:
            self._signatures = SignatureCache(self._clone, self._options.kept_programs)
        with intercept_calls(module, self._signatures):
            return loop(*args, **self._signatures.with_static_cache(module, args, kwargs))

    def _clone(self) -> PoplarExecutor:
        """Create a wrapper of the same model for different arguments."""
        made = PoplarExecutor(self._host.call, self._options, self._training, popxl.__version__)
        made._host.attributes = self._host.attributes
        made._has_fixed_keys = False
        return made

    def _takes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the compiled model accepts such arguments."""
        return self._compiled is not None and self._compiled.signature.fits(args, kwargs)

    # The optimiser --------------------------------------------------------------------------------------------------

    @traced("setOptimizer")
    def setOptimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Train with this optimiser's current settings from now on. Another optimiser class needs another wrapper.

        Only numbers are transferred; with other parameters, or other groups of them, the next call compiles the model
        again. For another optimiser object, the state of the old one is copied back, and the state of the new one is
        transferred before the next run.

        Args:
            optimizer: the optimiser. Later changes of its numbers, by a schedule for example, and of its state have an
                effect at the next call; it need not be set again.

        Raises:
            poptorch.Error: for an inference model, or an optimiser whose constant hyperparameters differ from those at
                compilation.
            ValueError: if it requires another accumulation of gradients than the compiled model.
        """
        if self._trainer is None:
            raise createPoptorchError("setOptimizer: an inference model has no optimizer.")
        if needs_running_mean(optimizer, self._options):
            if self._compiled is not None:
                raise ValueError(
                    "setOptimizer: `accum_type` is torch.float16, which needs MeanReductionStrategy.Running, but the "
                    "model is already compiled. Choose the strategy before, or call `destroy()`."
                )
            self._options = with_running_mean(self._options)
        if self._compiled is not None:
            self._discard(self._trainer.outgrown(optimizer))
        self._trainer.set(optimizer)

    def _upload_optimizer(self, trainer: Trainer) -> None:
        """Upload changes of the optimiser since the last run."""
        trainer.take_changes()
        if trainer.state.device.pending:
            self.copyWeightsToHostIfNeeded()
            trainer.state.upload()

    # Random numbers -------------------------------------------------------------------------------------------------

    @property
    def rng_state(self) -> list[int]:
        """The random state: the seed, and the generator's state words. Settable, for resuming.

        Raises:
            poptorch.Error: if the model is not compiled; when set, for a state of another program.
        """
        return self._one_program("rng_state").random_state

    @rng_state.setter
    def rng_state(self, state: Sequence[int]) -> None:
        program = self._one_program("rng_state")
        try:
            program.random_state = list(map(operator.index, state))
        except TypeError:
            raise createPoptorchError(
                f"rng_state: {state!r} is no state; expected a list of integers that `rng_state` has given."
            ) from None

    # Inside the program ---------------------------------------------------------------------------------------------

    def getTensorNames(self) -> list[str]:
        """Tensor names valid for `options.anchorTensor`. Requires a compiled model.

        They are parameters and buffers; inputs, `"input..."`; `"loss"`; the tensors of the model's graph, as it prints
        them; and in training `"Gradient___<parameter>"` (of a micro-batch and a replica, as it is computed),
        `"UpdatedVar___<parameter>"`, the numbers of the optimiser and its state.
        """
        assert self._compiled is not None, "getTensorNames: the model has not been compiled."
        return [*self._compiled.io.names, *(self._trainer.names() if self._trainer is not None else ())]

    def getAnchoredTensor(self, short_name: str) -> torch.Tensor:
        """An anchored tensor's values from the last call.

        Args:
            short_name: the name that `options.anchorTensor` gave it.

        Returns:
            Its values, for the micro-batches selected by the output mode of the anchor, joined like results.
            Hyperparameters and optimiser state have their current values.
        """
        anchors = self._options.anchored_tensors
        assert short_name in anchors, (
            f"getAnchoredTensor: {short_name!r} is not anchored; anchored are {', '.join(anchors) or 'none'}."
        )
        compiled = self._required
        name = anchors[short_name].long_name
        if self._trainer is not None and name in self._trainer.names():
            return self._trainer.value(name)
        if short_name not in compiled.anchored:
            raise createPoptorchError("getAnchoredTensor: the model has not been run yet.")
        return compiled.anchored[short_name]

    def cycleCount(self) -> int:
        """Lower bound on IPU cycles per run, estimated by `popxl.analysis.estimate`. Nothing is measured.

        Raises:
            poptorch.Error: if the model is not compiled, or `options.logCycleCount(True)` was not set.
        """
        if not self._options.log_cycle_count:
            raise createPoptorchError(
                "Cycle count logging is disabled. Please set option logCycleCount to True to enable."
            )
        return estimate_of(self._required.session.ir).cycles

    def getPerfCounters(self) -> dict[str, list[list[float]]]:
        """Timestamps of the last call, in seconds since an arbitrary origin.

        Inputs of all steps go to the device at once, and results come back at once, so steps have the same times.

        Returns:
            Under `"input"` (the first input was requested), `"input_complete"`, `"output"` and `"output_complete"` for
            each input or result a list of times, one for each micro-batch.
        """
        return self._times.counters()

    def getHostIpuLatency(self) -> Latency:
        """Host-to-device transfer latency of the last call: minimum, maximum and average step time."""
        return Times.between(self._times.requested, self._times.supplied)

    def getComputeLatency(self) -> Latency:
        """Compute latency of the last call, from inputs arriving on the device to results being ready."""
        return Times.between(self._times.supplied, self._times.ready)

    def getIpuHostLatency(self) -> Latency:
        """Device-to-host transfer latency of the last call's results."""
        return Times.between(self._times.ready, self._times.received)

    def getLatency(self) -> Latency:
        """Total latency of the last call, from requesting inputs to receiving results."""
        return Times.between(self._times.requested, self._times.received)

    @property
    def _times(self) -> Times:
        return Times() if self._compiled is None else self._compiled.times

    # Files ----------------------------------------------------------------------------------------------------------

    def compileAndExport(
        self, filename: str | os.PathLike[str], *args: Any, export_model: bool = True, **kwargs: Any
    ) -> None:
        """Compile the model for given arguments, and save it.

        Args:
            filename: see `save`.
            args: arguments of the model.
            export_model: see `save`.
            kwargs: keyword arguments of the model.
        """
        self.compile(*args, **kwargs)
        self.save(filename, export_model)

    @traced("saveExecutableToFile")
    def save(self, filename: str | os.PathLike[str], export_model: bool = True, save_rng_state: bool = True) -> None:
        """Save the compiled model. The only code stored is XLA's compiled code; see `poptorch.run.saving`.

        Named tuples, dataclasses and subclasses of dictionaries among arguments and results are saved by their fields.
        In a program that has imported their classes they come back as these; in another, as named tuples and
        dataclasses of the same names, and plain dictionaries.

        Args:
            filename: the file; in a folder, `model.poptorch`. Folders that are missing are made.
            export_model: whether to save the weights, the optimiser and its state, for `poptorch.load`; otherwise the
                file is for `loadExecutable` only.
            save_rng_state: whether to save the state of random numbers.

        Raises:
            poptorch.Error: if the model is not compiled, or something cannot be saved as data.
        """
        compiled = self._one_program("save")
        self.copyWeightsToHostIfNeeded()
        if self._trainer is not None:
            self._upload_optimizer(self._trainer)
        saving.save(filename, compiled, self._options, self._host, self._trainer, export_model, save_rng_state)

    @traced("loadExecutable")
    def loadExecutable(self, filename: str | os.PathLike[str]) -> None:
        """Load a compiled program saved by `save` for an equal model.

        This wrapper's weights, optimiser and optimiser state remain.

        Args:
            filename: the file.

        Raises:
            poptorch.Error: if the model is compiled already, or not equal to the one that was saved; if the file holds
                nothing that can be read.
            AssertionError: if another version has written it.
        """
        if self._compiled is not None:
            raise createPoptorchError("loadExecutable: the model is compiled already. Call `destroy()` first.")
        self._take(saving.read_model(filename), anew=True)

    def _take(self, saved: saving.Saved, anew: bool) -> None:
        """Install a saved program; `anew`: keep this wrapper's optimiser state."""
        saved.check(self._host, self._training)
        self._is_loaded = not anew
        self._weights.instrument()
        self._host.check_buffers(self._options.updatable_named_buffers)
        self._host.grouped.update(saved.grouped)
        compiled = saved.compiled(self._host, self._options)
        if anew:
            compiled.write_counters(self._host.counter_values(compiled.counter_values))
        if self._trainer is not None:
            saved.prepare(self._trainer, self._host, self._options)
            if anew:
                assert self._trainer.update is not None
                first = {kept.name: kept.value for kept in self._trainer.update.state}
                compiled.write_state({name: first[name] for name in compiled.io.state})
        self._install(compiled)

    def __reduce__(self) -> Any:
        """Copies wrap a copy of the model with current weights, uncompiled."""
        self.copyWeightsToHostIfNeeded()
        optimizer = None if self._trainer is None else self._trainer.optimizer
        made_of = (self._host.call, self._options, self._training, popxl.__version__, optimizer)
        return PoplarExecutor, made_of, {"grouped": self._host.grouped}

    def __copy__(self) -> PoplarExecutor:
        make, (model, *others), state = self.__reduce__()
        return self._like(make(copy.copy(model), *others), state)

    def __deepcopy__(self, memo: dict[int, Any]) -> PoplarExecutor:
        make, made_of, state = self.__reduce__()
        return self._like(make(*copy.deepcopy(made_of, memo)), state)

    @staticmethod
    def _like(made: PoplarExecutor, state: Mapping[str, Any]) -> PoplarExecutor:
        made.__setstate__(state)
        return made

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self._host.grouped.update(state["grouped"])
