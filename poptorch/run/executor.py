"""`PoplarExecutor`: the user-facing wrapper of a model.

It decides when a model is compiled, whether the host or the device has the current weights and optimiser state, and
when either is transferred. The functions of `poptorch.run.wrapping` create it for programs. Its parts: the model on the
host, `poptorch.run.host_model`, and detection of reads, `poptorch.run.weights`; compilation,
`poptorch.run.compilation`, and its result, `poptorch.run.compiled`; the optimiser and its state,
`poptorch.run.trainer`; files, `poptorch.run.saving`.
"""

from __future__ import annotations

import copy
import inspect
import operator
import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial, wraps
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

import popxl
from poptorch import profiling
from poptorch.base.logging_ import logger
from poptorch.base.replica_groups import GroupedParameter, ParameterProxy
from poptorch.capture.autocast import autocast_dtype
from poptorch.capture.torch_private import uncompiled, without_modes
from poptorch.enums import ConnectionType, PartialBatch
from poptorch.errors import Error, createPoptorchError
from poptorch.options import Options
from poptorch.placement.blocks import module_repr
from poptorch.run import hooks, saving
from poptorch.run.change_warnings import ChangeWarnings
from poptorch.run.compilation import carries, compiled_model, compiling, progress_bar
from poptorch.run.compiled import Compiled
from poptorch.run.executor_options import for_fewer_rows, needs_running_mean, own_options, with_running_mean
from poptorch.run.graph_breaks import BrokenGraph
from poptorch.run.host_model import HostModel
from poptorch.run.host_writes import HostWrites
from poptorch.run.signature_cache import SignatureCache, intercept_calls, with_static_cache
from poptorch.run.smaller_batches import Run, SmallerBatches
from poptorch.run.timings import Latency, Times
from poptorch.run.trained_graph_breaks import TrainedBrokenGraph
from poptorch.run.trainer import Trainer, default_optimizer
from poptorch.run.weights import LazyWeights, TrainingRegistry
from popxl.extend.graphs import estimate_of

Model = torch.nn.Module | Callable[..., Any]

_ANOTHER_FORM = "the module has other parameters, buffers or modules than when it was compiled"

_channel = profiling.Channel("poptorch")


def _traced(name: str) -> Callable[[profiling.Call], profiling.Call]:
    """Decorator that records a method as a named span in profiles."""
    return partial(profiling.spanned, _channel, name)


def _check_autocast(then: torch.dtype | None, now: torch.dtype | None) -> None:
    """Check that the current `torch.autocast` state matches the one at compilation."""
    if then != now:
        compiled, called = (f"with torch.autocast to {d}" if d else "without torch.autocast" for d in (then, now))
        raise createPoptorchError(
            f"The model was compiled {compiled}, and is called {called}: the casts are a part of the program. Make a "
            "wrapper for each, or call `destroy()` to compile it anew."
        )


class PoplarExecutor:
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
        poptorch.Error: if `model` cannot be called, `options` is no `Options`, or they do not fit.
        RuntimeError: if the model is being trained by another executor.
        AssertionError: if there is an optimiser without training, or no model can be trained with its class.
        ValueError: if it has `use_tf_variant`, and is no RMSprop.
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
        self._user_model: Model = user_model or model
        self._training = training
        self._options = own_options(options or Options(), training)
        self._host = HostModel(model)
        self._attributes = self._host.attributes  # which the model was compiled with
        self._compiled: Compiled | BrokenGraph | None = None
        self._kinds: SignatureCache | None = None
        self._smaller: SmallerBatches | None = None
        self._is_loaded = False  # of a file, without the code of the model
        self._lock = threading.RLock()  # for work of a call before its run
        self._forgotten: weakref.finalize | None = None
        self._form: tuple[tuple[str, Any], ...] = ()  # of the module that the program was made for
        self._random_state: list[int] | None = None  # of a program that was given up
        self._compilation_time: timedelta | None = None
        self._autocast: tuple[torch.dtype | None] | None = None  # known if it was compiled here
        self._trainings = TrainingRegistry(self._host.module)
        self._host_writes = HostWrites(self._host.module)
        self._change_warnings = ChangeWarnings(self._host, self._training, self._host_writes)
        self._instrumented: LazyWeights | None = None
        self._trainer: Trainer | None = None
        if training:
            self._trainer = Trainer(optimizer or default_optimizer(self._host.module))
            if needs_running_mean(self._trainer.optimizer, self._options):
                self._options = with_running_mean(self._options)
            self._instrument()

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
        self._take_changes()
        if self._compiled is None:
            with compiling():
                if self._compiled is None:  # another thread may have compiled it
                    self.compile(*args, **kwargs)
        compiled = self._required
        if self._autocast is not None:
            _check_autocast(*self._autocast, autocast_dtype())
        try:
            tensors = compiled.signature.check(args, kwargs)
            run: Callable[[], Any] = partial(compiled.run, tensors, compiled.signature.objects(args, kwargs))
        except Error:
            if self._carries(compiled, args, kwargs):
                tensors = compiled.signature.check(args, kwargs)
                run = partial(compiled.run, tensors, compiled.signature.objects(args, kwargs))
            elif self._smaller is not None and (runs := self._smaller.runs(args, kwargs)):
                run = self._smaller.padded(args, kwargs) or partial(self._run_fewer_rows, self._smaller, runs)
            else:
                raise
        with _channel.tracepoint("modelExecution"):
            with self._lock:
                if not compiled.is_attached:
                    self._check_online("run a model")
                    self._attach(compiled)
                self._change_warnings.warn(compiled, self._attributes)
                if self._trainer is not None:
                    assert self._instrumented is not None
                    self._instrumented.check_hooks()
                    self._trainer.notice()
                    if self._trainer.device.pending:
                        self.copyWeightsToHostIfNeeded()
                        self._trainer.write_pending()
            try:
                return run()
            finally:  # even a run that fails has changed something
                if self._trainer is not None:
                    self._trainer.has_run()
                if self._instrumented is not None:
                    self._instrumented.has_run()

    def _carries(self, compiled: Compiled | BrokenGraph, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the program accepts these arguments, possibly after extending it to new non-tensor values."""
        if not isinstance(compiled, Compiled) or self._is_loaded:
            return False
        with compiling(), self._attributes.restored():
            return carries(self._host, compiled, args, kwargs, self._options, self._training)

    def _run_fewer_rows(self, smaller: SmallerBatches, runs: Sequence[Run]) -> Any:
        with self._lock:
            return smaller(runs, self._compiled_for, None if self._trainer is None else self._trainer.numbers)

    def _take_changes(self) -> None:
        """Synchronize weights trained by other wrappers; discard the program after structural changes."""
        with self._lock:
            if self._compiled is None:
                return
            if self._trainer is not None and self._instrumented is not None:
                is_thawed, self._instrumented.is_thawed = self._instrumented.is_thawed, False
                if is_thawed or self._trainer.has_changed():
                    self._give_up(self._trainer.outgrown(self._trainer.optimizer))
            if self._compiled is not None and self._compiled.is_attached:
                self._follow()
            elif self._compiled is not None and self._structure_changed:
                self._give_up(_ANOTHER_FORM)

    def _give_up(self, reason: str) -> None:
        """Discard the program unless `reason` is empty. Weights, optimiser state and random state are preserved."""
        if reason:
            logger.info("The model is compiled again at its next call: %s.", reason)
            if isinstance(self._compiled, Compiled):
                self._random_state = self._compiled.random_state
            self.destroy()

    @property
    def _structure_changed(self) -> bool:
        return self._host.structure() != self._form

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's `generate` method (transformers API), executing each model call on the device.

        There is one program for the prompt and one for the tokens after it: the cache keeps its shape, unless the
        arguments say something else (`cache_implementation="static"` is the default here). At most
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
        if module is None or module is not self._user_model or not callable(loop):
            raise createPoptorchError(
                f"generate: {type(self._user_model).__name__} has no `generate`. Wrap a module that has one, such as "
                "those of transformers whose names end with `ForCausalLM`."
            )
        if self._training:
            raise createPoptorchError(
                "generate: the model is wrapped for training. Wrap it once more, with `poptorch.inferenceModel`: that "
                "follows the weights that this one trains."
            )
        if self._kinds is None:
            self._kinds = SignatureCache(self._clone, self._options.kept_programs)
        with intercept_calls(module, self._kinds):
            return loop(*args, **with_static_cache(module, kwargs))

    def _clone(self) -> PoplarExecutor:
        """Create a wrapper of the same model for different arguments."""
        made = PoplarExecutor(self._host.call, self._options, self._training, popxl.__version__)
        made._host.attributes = self._host.attributes
        return made

    def _takes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the compiled model accepts such arguments."""
        return self._compiled is not None and self._compiled.signature.fits(args, kwargs)

    # Compiling ------------------------------------------------------------------------------------------------------

    @_traced("modelCompilation")
    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the model for given arguments.

        Raises:
            poptorch.Error: for an unsupported op, a missing loss, and any other error of the model.
        """
        with compiling():
            self._compile(args, kwargs)

    def _compile(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._compiled is not None:
            logger.warning("The model is compiled already; call `destroy()` first to compile it again.")
            return
        start = perf_counter()
        hooks.pre_compile()
        self._autocast = (autocast_dtype(),)
        self._instrument()
        self._host.check_buffers(self._options.updatable_named_buffers)
        self._host.take_reached()
        with self._host.attributes.restored(), progress_bar(self._options.show_compilation_progress_bar):
            compiled = compiled_model(self._host, args, kwargs, self._options, self._trainer, self._on_host.read_values)
        self._use(compiled)
        if self._may_be_compiled_for_fewer_rows:
            self._smaller = SmallerBatches(compiled, self._host.forward, self._options, self._training)
        self._compilation_time = timedelta(seconds=perf_counter() - start)
        self._write_report()
        hooks.post_compile()

    @property
    def _may_be_compiled_for_fewer_rows(self) -> bool:
        """Whether smaller batches may run: not with several processes, whose batch sizes may differ, nor with
        per-replica parameters, which require all replicas.
        """
        options = self._options
        is_here = options.Distributed.numProcesses == 1 and options.connection_type is not ConnectionType.Never
        return options.partial_batch is not PartialBatch.Refuse and is_here and not self._host.grouped

    def _compiled_for(self, run: Run) -> Compiled | BrokenGraph:
        """Compile the model for a smaller run, using the current optimiser."""
        self.copyWeightsToHostIfNeeded()
        hooks.pre_compile()
        options = for_fewer_rows(self._options, run.batching)
        of_run = self._host, run.args, run.kwargs, options, self._trainer, self._on_host.read_values
        with compiling(), self._attributes.restored(), progress_bar(options.show_compilation_progress_bar):
            compiled = compiled_model(
                *of_run,
                has_fewer_rows=True,
                carries_numbers=self._required.signature.carries_numbers,
                counts=tuple(self._required.host_numbers),
            )
        compiled.attach(self._on_host.read_values())
        hooks.post_compile()
        return compiled

    def _use(self, compiled: Compiled | BrokenGraph) -> None:
        """Install a compiled program for subsequent calls."""
        self._compiled, self._form = compiled, self._host.structure()
        self._attributes = self._host.attributes
        with self._attributes.restored():
            self._change_warnings.track()
        self._trainings.track()
        offline = self._options.connection_type is ConnectionType.Never
        if not self._training and (written := compiled.ends.written):
            self._instrumented = LazyWeights(self._host.module, self._fetch_weights, self._host.grouped, written)
        if self._instrumented is not None:
            self._forgotten = weakref.finalize(self, _bring_home, compiled, self._instrumented, self._trainer)
            self._forgotten.atexit = False
        if self._trainer is not None:
            assert isinstance(compiled, Compiled | TrainedBrokenGraph)
            self._trainer.connect(compiled, offline)
        if not offline:
            self._attach(compiled)
        state, self._random_state = self._random_state, None
        if state is not None and isinstance(compiled, Compiled) and len(state) == len(compiled.random_state):
            compiled.random_state = state

    def _instrument(self) -> None:
        if self._instrumented is not None and not self._instrumented.covers_module():
            self._instrumented.destroy()  # nothing has been trained yet
            self._instrumented = None
        if self._training and self._instrumented is None:
            self._instrumented = LazyWeights(self._host.module, self._fetch_weights, self._host.grouped)

    @property
    def _executable(self) -> Compiled | BrokenGraph | None:
        return self._compiled  # the name that packages on top ask for

    @property
    def _required(self) -> Compiled | BrokenGraph:
        if self._compiled is None:
            raise createPoptorchError("Model has not been compiled or has been destroyed.")
        return self._compiled

    def _one_program(self, what: str) -> Compiled:
        """The compiled program; raises if graph breaks split the model into several."""
        compiled = self._required
        if isinstance(compiled, BrokenGraph):
            raise createPoptorchError(
                f"{what}: the model is not one program: it is cut where the host looks at numbers. Keep shapes, with "
                "`torch.where` for example, so that it need not."
            )
        return compiled

    def isCompiled(self) -> bool:
        """Whether the model is compiled."""
        return self._compiled is not None

    def compilationTime(self) -> timedelta:
        """Time spent capturing and compiling the model.

        Raises:
            poptorch.Error: if it is not compiled, or `options.showCompilationProgressBar(False)` was set.
        """
        if self._compiled is None:
            raise createPoptorchError(
                "Model has not been compiled or has been destroyed. Please compile the model before obtaining "
                "compilation time."
            )
        if not self._options.show_compilation_progress_bar or self._compilation_time is None:
            raise createPoptorchError(
                "The time of compilation is not known: it is taken where the model is compiled rather than loaded, and "
                "`options.showCompilationProgressBar` is on."
            )
        return self._compilation_time

    @_traced("destroy")
    def destroy(self) -> None:
        """Copy weights and optimiser state back to the host, then release the device and the host module.

        A later call compiles the model again, for the arguments that it is given.
        """
        compiled = self._compiled
        if self._kinds is not None:
            self._kinds.destroy()
        if self._smaller is not None:
            self._smaller.close()
            self._smaller = None
        if self._forgotten is not None:
            self._forgotten.detach()
            self._forgotten = None
        if compiled is not None:
            self._write_report()
            self.copyWeightsToHostIfNeeded()
            if isinstance(compiled, Compiled):
                self._host.take_counted(compiled.host_numbers, self._attributes)
            if self._trainer is not None:
                self._trainer.disconnect()
            compiled.close()
            self._compiled = None
        if self._instrumented is not None:
            self._instrumented.destroy()
            self._instrumented = None

    # Devices --------------------------------------------------------------------------------------------------------

    def isAttachedToDevice(self) -> bool:
        """Whether a device is attached: true after compilation, until `detachFromDevice` or `destroy`."""
        return self._compiled is not None and self._compiled.is_attached

    @_traced("attachToDevice")
    def attachToDevice(self) -> None:
        """Reattach a device, loading the host's weights.

        Raises:
            poptorch.Error: if the model is attached already, or is not compiled.
            AssertionError: if it was compiled for no device of this machine.
        """
        compiled = self._required
        if compiled.is_attached:
            raise createPoptorchError("The model is already attached to a device.")
        self._check_online("attach a model")
        self._attach(compiled)

    @_traced("detachFromDevice")
    def detachFromDevice(self) -> None:
        """Copy weights, optimiser state and random state back to the host, then release the device.

        The next call attaches the model again.

        Raises:
            poptorch.Error: if the model is not attached, or not compiled.
        """
        compiled = self._required
        if not compiled.is_attached:
            raise createPoptorchError("Device is not attached: the model has been detached before.")
        self.copyWeightsToHostIfNeeded()
        if self._trainer is not None:
            self._trainer.device.refresh()
        if self._smaller is not None:
            self._smaller.close()
        compiled.detach()

    def _attach(self, compiled: Compiled | BrokenGraph) -> None:
        self._trainings.have_news(self._instrumented)  # copies stale values back
        compiled.attach(self._on_host.read_values())
        self._host_writes.forget()

    def _check_online(self, what: str) -> None:
        if self._options.connection_type is ConnectionType.Never:
            raise AssertionError(
                f"Trying to {what} on an offline device: the options say ConnectionType.Never (as "
                "`useOfflineIpuTarget` does). Save it, and `poptorch.load` it where it is to run."
            )

    # Weights --------------------------------------------------------------------------------------------------------

    @property
    def _on_host(self) -> LazyWeights | HostModel:
        """Reader of host weight values, without a reference to this wrapper."""
        return self._instrumented or self._host

    def _fetch_weights(self) -> Mapping[str, np.ndarray]:
        return _changed_weights(self._required, self._training)

    @_traced("copyWeightsToHost")
    def copyWeightsToHost(self) -> None:
        """Copy parameters and buffers from the device to the module."""
        compiled = self._required
        self._follow()
        if self._compiled is None:
            return  # it was given up, and has left all at home
        if self._instrumented is not None:
            self._instrumented.to_host(compiled.weights)
        else:
            self._host.write(compiled.weights())

    def copyWeightsToHostIfNeeded(self) -> bool:
        """Copy parameters and buffers to the module after changes on the device. Return whether any changed."""
        return self._instrumented is not None and self._instrumented.to_host_if_stale()

    @_traced("copyWeightsToDevice")
    def copyWeightsToDevice(self) -> None:
        """Copy parameters and buffers from the module to the device. Trained values not yet read are lost.

        For a training model: wrappers that follow it also receive them, at their next call.
        """
        self._upload()
        if self._instrumented is not None:
            self._instrumented.mark_news()

    def _follow(self) -> None:
        """Synchronize weights changed by other wrappers of this module."""
        if self._trainings.have_news(self._instrumented):
            self._upload()

    def _upload(self) -> None:
        if self._kinds is not None:
            self._kinds.copy_weights()
        if self._compiled is not None and self._structure_changed:
            self._give_up(_ANOTHER_FORM)
            return
        if self._compiled is not None or self._kinds is None:
            self._required.write_weights(self._on_host.read_values())
        if self._instrumented is not None:
            self._instrumented.mark_uploaded()
        self._host_writes.forget()

    def _follow_host(self) -> None:
        """Upload module tensors modified on the host since the last upload."""
        if self._host_has_changed():
            self.copyWeightsToDevice()

    def _host_has_changed(self) -> bool:
        """Whether host writes to the module differ from device values."""
        own = self._instrumented
        if not self.isAttachedToDevice() or (own is not None and own.is_stale):
            return False
        if not self._host_writes.names() and not (own is not None and own.has_given_data):
            return False
        host = self._on_host.read_values()
        if any(not np.array_equal(host[name], array) for name, array in self._required.weights().items()):
            return True
        if self._host_writes.names():
            self._host_writes.forget()
        return False

    @_traced("copyNamedBuffersToDevice")
    def copyNamedBuffersToDevice(self) -> None:
        """Copy buffers named in `options.updatableNamedBuffers` from the module to the device.

        Raises:
            poptorch.Error: if it names none, or the model is not compiled.
        """
        names = self._options.updatable_named_buffers
        if not names:
            raise createPoptorchError(
                "copyNamedBuffersToDevice: no buffers are named. Name them before the model is wrapped: "
                "`options.updatableNamedBuffers([...])`."
            )
        self._required.write_weights(self._on_host.read_values(names))
        self._host_writes.forget(names)

    @_traced("loadStateDict")
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load weights into the module, and onto any attached device.

        Args:
            state_dict: as for `torch.nn.Module.load_state_dict`.
            strict: whether its names have to be those of the module.

        Returns:
            A named tuple of the `missing_keys` and the `unexpected_keys`.
        """
        result = self.__getattr__("load_state_dict")(state_dict, strict)
        if self.isAttachedToDevice() or self._kinds is not None:
            self.copyWeightsToDevice()
        return result

    # The optimiser --------------------------------------------------------------------------------------------------

    @_traced("setOptimizer")
    def setOptimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Train with this optimiser's current settings from now on. Another optimiser class needs another wrapper.

        Only numbers are transferred; with other parameters, or other groups of them, the next call compiles the model
        again. For another optimiser object, the state of the old one is copied back, and the state of the new one is
        transferred before the next run.

        Args:
            optimizer: the optimiser. Later changes of its numbers, by a schedule for example, and of its state have an
                effect at the next call; it need not be set again.

        Raises:
            poptorch.Error: if the model is not for training, or the optimiser differs from the one at compilation in a
                part that is constant in the program.
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
            self._give_up(self._trainer.outgrown(optimizer))
        self._trainer.set(optimizer)

    # Random numbers -------------------------------------------------------------------------------------------------

    @property
    def rng_state(self) -> list[int]:
        """The random state: the seed, and the generator's state words. Settable, for resuming.

        Raises:
            poptorch.Error: if the model is not compiled; when set, if it is not a state of this program.
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

    @_traced("saveExecutableToFile")
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
        if self._instrumented is not None:
            self._instrumented.to_host_if_stale()
        if self._trainer is not None:
            self._trainer.notice()
            if self._trainer.device.pending:
                self._trainer.write_pending()
        saving.save(
            filename,
            compiled,
            self._options,
            self._host.module,
            self._host.grouped,
            self._trainer,
            export_model,
            save_rng_state,
        )

    @_traced("loadExecutable")
    def loadExecutable(self, filename: str | os.PathLike[str]) -> None:
        """Load a compiled program saved by `save` for an equal model.

        Weights, and the optimiser with its state, are those of this wrapper.

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
        saved.check(self._host.module, self._training)
        self._is_loaded = not anew
        self._instrument()
        self._host.check_buffers(self._options.updatable_named_buffers)
        self._host.grouped.update(saved.grouped)
        compiled = saved.compiled(self._host.forward, self._options)
        if anew:
            compiled.write_counted(self._host.carried_numbers(compiled.host_numbers))
        if self._trainer is not None:
            saved.prepare(self._trainer, self._host.module, self._options)
            if anew:
                assert self._trainer.update is not None
                first = {kept.name: kept.value for kept in self._trainer.update.state}
                compiled.write_state({name: first[name] for name in compiled.ends.state})
        self._use(compiled)

    # Looks ----------------------------------------------------------------------------------------------------------

    def getTensorNames(self) -> list[str]:
        """Tensor names valid for `options.anchorTensor`. Requires a compiled model.

        They are parameters and buffers; inputs, `"input..."`; `"loss"`; the tensors of the model's graph, as it prints
        them; and in training `"Gradient___<parameter>"` (of a micro-batch and a replica, as it is computed),
        `"UpdatedVar___<parameter>"`, the numbers of the optimiser and its state.
        """
        assert self._compiled is not None, "getTensorNames: the model has not been compiled."
        return [*self._compiled.ends.names, *(self._trainer.names() if self._trainer is not None else ())]

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
        return Times.between(self._times.asked, self._times.given)

    def getComputeLatency(self) -> Latency:
        """Compute latency of the last call, from inputs arriving on the device to results being ready."""
        return Times.between(self._times.given, self._times.ready)

    def getIpuHostLatency(self) -> Latency:
        """Device-to-host transfer latency of the last call's results."""
        return Times.between(self._times.ready, self._times.taken)

    def getLatency(self) -> Latency:
        """Total latency of the last call, from requesting inputs to receiving results."""
        return Times.between(self._times.asked, self._times.taken)

    @property
    def _times(self) -> Times:
        return Times() if self._compiled is None else self._compiled.times

    def _write_report(self) -> None:
        """Write popxl's report to the profile folder, if configured."""
        if self._options.profile_dir is not None and self._compiled is not None:
            name = self._options.model_name or ("training" if self._training else "inference")
            folder = Path(self._options.profile_dir, name)
            folder.mkdir(parents=True, exist_ok=True)
            self._compiled.session.report(folder / "report.html")

    @property
    def model(self) -> Model:
        """The wrapped user model."""
        return self._user_model

    @property
    def options(self) -> Options:
        """The frozen options."""
        return self._options

    def __repr__(self) -> str:
        return (
            module_repr(self._user_model) if isinstance(self._user_model, torch.nn.Module) else repr(self._user_model)
        )

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

    def __getattr__(self, attr: str) -> Any:
        if "_user_model" not in self.__dict__:  # during construction
            raise AttributeError(attr)
        value = getattr(self.__dict__["_user_model"], attr)
        if isinstance(value, torch.nn.Parameter):

            def group(grouped: GroupedParameter | None) -> None:
                self._host.grouped.pop(attr, None)
                if grouped is not None:
                    self._host.grouped[attr] = grouped

            return ParameterProxy(value, attr, self._options.replication_factor, group)
        if isinstance(value, torch.nn.Module):
            self._host.reach(value)
        owner: Any = value.__self__ if inspect.ismethod(value) else None
        if isinstance(owner, torch.nn.Module):

            @wraps(value)
            def method(*args: Any, **kwargs: Any) -> Any:
                if attr in _HANDING_OUT:
                    self._host.reach(owner)
                with self._host.setting():
                    return value(*args, **kwargs)

            return method
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        module = self.__dict__.get("_user_model")
        is_own = name.startswith("_") or name in self.__dict__ or hasattr(type(self), name)
        if not is_own and isinstance(module, torch.nn.Module) and hasattr(module, name):
            with self._host.setting():
                setattr(module, name, value)
        else:
            object.__setattr__(self, name, value)


_HANDING_OUT = frozenset({"modules", "named_modules", "children", "named_children", "get_submodule"})
"""Methods of modules by which a wrapper hands out the modules within."""


def _changed_weights(compiled: Compiled | BrokenGraph, training: bool) -> dict[str, np.ndarray]:
    """Tensors possibly changed by a program: all in training, only those it overwrites in inference."""
    return compiled.weights(None if training else compiled.ends.written)


def _bring_home(compiled: Compiled | BrokenGraph, instrumented: LazyWeights, trainer: Trainer | None) -> None:
    """Finalizer: copy unread device values back to the host when a wrapper is garbage-collected."""
    with without_modes():  # a capture may be going on
        if instrumented.is_stale:
            instrumented.to_host(partial(_changed_weights, compiled, trainer is not None))
        instrumented.destroy()
        if trainer is not None:
            trainer.disconnect()
