"""`ModelLifecycle`: a wrapped model from its compilation to its release.

It is compiled for the arguments of a call, attached to a device and detached from it, given up when the module or the
optimiser has outgrown its program, and destroyed. Base class of `PoplarExecutor`. Its parts: compilation,
`poptorch.run.compilation`, and its result, `poptorch.run.compiled`; the weights, `poptorch.run.weight_sync`; the
optimiser and its state, `poptorch.run.trainer`.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from poptorch.base.logging_ import logger
from poptorch.capture.autocast import autocast_dtype
from poptorch.capture.tracer import current
from poptorch.enums import ConnectionType, PartialBatch
from poptorch.errors import createPoptorchError
from poptorch.options import Options
from poptorch.run import hooks
from poptorch.run.change_warnings import ChangeWarnings
from poptorch.run.compilation import compiled_model, compiling, progress_bar
from poptorch.run.compiled import Compiled
from poptorch.run.executor_options import for_fewer_rows
from poptorch.run.graph_breaks import BrokenGraph, CompiledModel
from poptorch.run.host_model import HostModel, Model
from poptorch.run.model_proxy import ModelProxy
from poptorch.run.signature_cache import SignatureCache
from poptorch.run.smaller_batches import Run, SmallerBatches
from poptorch.run.spans import traced
from poptorch.run.tracebacks import ShortTracebacks
from poptorch.run.trained_graph_breaks import TrainedBrokenGraph
from poptorch.run.trainer import Trainer
from poptorch.run.weight_sync import WeightSync

_STRUCTURE_CHANGED = "the module has other parameters, buffers or modules than when it was compiled"


class ModelLifecycle(ModelProxy):
    """A model and its program, from compilation to release.

    Raises:
        RuntimeError: if the model is to be trained, and another wrapper trains it.
    """

    def __init__(self, host: HostModel, user_model: Model, options: Options, trainer: Trainer | None) -> None:
        super().__init__(host, user_model, options)
        self._trainer, self._training = trainer, trainer is not None
        self._attributes = host.attributes  # attributes at compilation
        self._compiled: CompiledModel | None = None
        self._signatures: SignatureCache | None = None
        self._has_fixed_keys = True  # of dictionaries among the arguments; those of a signature cache are not fixed
        self._smaller: SmallerBatches | None = None
        self._lock = threading.RLock()  # for work of a call before its run
        self._finalizer: weakref.finalize | None = None
        self._random_state: list[int] | None = None  # of a discarded program
        self._compilation_time: timedelta | None = None
        self._autocast: tuple[torch.dtype | None] | None = None  # unknown for loaded programs
        self._weights = WeightSync(host, self._training)
        self._change_warnings = ChangeWarnings(host, self._training, self._weights.host_writes)
        self._weights.instrument()

    # Compiling ------------------------------------------------------------------------------------------------------

    @traced("modelCompilation")
    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the model for given arguments.

        The traceback of an error in the model leaves out the frames of libraries before the model's own code. With
        `poptorch.setLogLevel("DEBUG")`, it has all frames.

        Raises:
            poptorch.Error: for an unsupported op, a missing loss, and any other error of the model.
        """
        with compiling(), ShortTracebacks():
            self._compile(args, kwargs)

    def _compile(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._compiled is not None:
            logger.warning("The model is compiled already; call `destroy()` first to compile it again.")
            return
        if (tracer := current()) is not None and tracer.is_recording((args, kwargs)):
            raise createPoptorchError(
                f"A wrapped model is called by another, before its own first run ({tracer.recorder.source()}): it "
                "cannot be compiled meanwhile. Let `forward` call the module, which becomes a part of the program, or "
                "run the wrapper once before."
            )
        start = perf_counter()
        hooks.call(hooks.pre_compile)
        self._autocast = (autocast_dtype(),)
        self._weights.instrument()
        self._host.check_buffers(self._options.updatable_named_buffers)
        self._host.take_reached()
        with self._host.attributes.restored(), progress_bar(self._options.show_compilation_progress_bar):
            read = self._weights.lazy.read_values
            compiled = compiled_model(self._host, args, kwargs, self._options, self._trainer, read)
        if self._has_fixed_keys:
            compiled.signature.tell_of_dicts()
        self._install(compiled)
        if self._may_be_compiled_for_fewer_rows:
            self._smaller = SmallerBatches(compiled, self._host.forward, self._options, self._training)
        self._compilation_time = timedelta(seconds=perf_counter() - start)
        self._write_report()
        hooks.call(hooks.post_compile)

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

    @property
    def _may_be_compiled_for_fewer_rows(self) -> bool:
        """Whether smaller batches may run: not with several processes, whose batch sizes may differ, nor with
        per-replica parameters, which require all replicas.
        """
        options = self._options
        is_here = options.Distributed.numProcesses == 1 and options.connection_type is not ConnectionType.Never
        return options.partial_batch is not PartialBatch.Refuse and is_here and not self._host.grouped

    def _compiled_for(self, run: Run) -> CompiledModel:
        """Compile the model for a smaller run, using the current optimiser."""
        self.copyWeightsToHostIfNeeded()
        hooks.call(hooks.pre_compile)
        options, read = for_fewer_rows(self._options, run.batching), self._weights.lazy.read_values
        with compiling(), self._attributes.restored(), progress_bar(options.show_compilation_progress_bar):
            compiled = compiled_model(
                self._host, run.args, run.kwargs, options, self._trainer, read, whole=self._required
            )
        compiled.attach(read())
        hooks.call(hooks.post_compile)
        return compiled

    def _install(self, compiled: CompiledModel) -> None:
        """Install a compiled program for subsequent calls."""
        self._attributes = self._host.attributes
        with self._attributes.restored():
            self._change_warnings.track()
        self._weights.connect(compiled)
        self._compiled = compiled  # now that other threads may find it
        offline = self._options.connection_type is ConnectionType.Never
        disconnect = None if self._trainer is None else self._trainer.disconnect
        self._finalizer = weakref.finalize(self, self._weights.release, disconnect)
        self._finalizer.atexit = False
        if self._trainer is not None:
            assert isinstance(compiled, Compiled | TrainedBrokenGraph)
            self._trainer.connect(compiled, offline)
        if not offline:
            self._weights.attach()
        state, self._random_state = self._random_state, None
        if state is not None and isinstance(compiled, Compiled) and len(state) == len(compiled.random_state):
            compiled.random_state = state

    @property
    def _executable(self) -> CompiledModel | None:
        return self._compiled  # the name that packages on top ask for

    @property
    def _required(self) -> CompiledModel:
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

    def _write_report(self) -> None:
        """Write popxl's report to the profile folder, if configured."""
        if self._options.profile_dir is not None and self._compiled is not None:
            name = self._options.model_name or ("training" if self._training else "inference")
            folder = Path(self._options.profile_dir, name)
            folder.mkdir(parents=True, exist_ok=True)
            self._compiled.session.report(folder / "report.html")

    # Releasing --------------------------------------------------------------------------------------------------------

    @traced("destroy")
    def destroy(self) -> None:
        """Copy weights and optimiser state back to the host, then release the device and the host module.

        A later call compiles the model again, for the arguments that it is given.
        """
        compiled = self._compiled
        if self._signatures is not None:
            self._signatures.destroy()
        if self._smaller is not None:
            self._smaller.close()
            self._smaller = None
        if self._finalizer is not None:
            self._finalizer.detach()
            self._finalizer = None
        if compiled is not None:
            self._write_report()
            self.copyWeightsToHostIfNeeded()
            if isinstance(compiled, Compiled):
                self._host.take_counters(compiled.counter_values, self._attributes)
            if self._trainer is not None:
                self._trainer.disconnect()
            compiled.close()
            self._compiled = None
        self._weights.disconnect()

    def _take_changes(self) -> None:
        """Synchronize weights trained by other wrappers; discard the program after structural changes."""
        with self._lock:
            if self._compiled is None:
                return
            requires_grad_set = self._weights.lazy.take_requires_grad_set()
            if self._trainer is not None and (requires_grad_set or self._trainer.has_changed):
                self._discard(self._trainer.outgrown(self._trainer.optimizer))
            if self._compiled is not None and self._compiled.is_attached:
                self._follow_wrappers()
            elif self._compiled is not None and self._weights.structure_changed:
                self._discard(_STRUCTURE_CHANGED)

    def _discard(self, reason: str) -> None:
        """Discard the program unless `reason` is empty. Weights, optimiser state and random state are preserved."""
        if reason:
            logger.info("The model is compiled again at its next call: %s.", reason)
            if isinstance(self._compiled, Compiled):
                self._random_state = self._compiled.random_state
            self.destroy()

    # Devices --------------------------------------------------------------------------------------------------------

    def isAttachedToDevice(self) -> bool:
        """Whether a device is attached: true after compilation, until `detachFromDevice` or `destroy`."""
        return self._compiled is not None and self._compiled.is_attached

    @traced("attachToDevice")
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
        self._weights.attach()

    @traced("detachFromDevice")
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
            self._trainer.state.device.refresh()
        if self._smaller is not None:
            self._smaller.close()
        compiled.detach()

    def _check_online(self, what: str) -> None:
        if self._options.connection_type is ConnectionType.Never:
            raise AssertionError(
                f"Trying to {what} on an offline device: the options say ConnectionType.Never (as "
                "`useOfflineIpuTarget` does). Save it, and `poptorch.load` it where it is to run."
            )

    # Weights --------------------------------------------------------------------------------------------------------

    @traced("copyWeightsToHost")
    def copyWeightsToHost(self) -> None:
        """Copy parameters and buffers from the device to the module."""
        program = self._required
        self._follow_wrappers()
        if self._compiled is program:  # otherwise it was discarded, and its values were copied back
            self._weights.to_host()

    def copyWeightsToHostIfNeeded(self) -> bool:
        """Copy parameters and buffers to the module after changes on the device. Return whether any changed."""
        return self._weights.lazy.to_host_if_stale()

    @traced("copyWeightsToDevice")
    def copyWeightsToDevice(self) -> None:
        """Copy parameters and buffers from the module to the device. Trained values not yet read are lost.

        For a training model: wrappers that follow it also receive them, at their next call.
        """
        self._upload()
        self._weights.lazy.mark_news()

    def _follow_wrappers(self) -> None:
        """Synchronize weights changed by other wrappers of this module."""
        if self._weights.has_news():
            self._upload()

    def _upload(self) -> None:
        if self._signatures is not None:
            self._signatures.copy_weights()
        program = self._required if self._signatures is None else self._compiled
        if program is not None and self._weights.structure_changed:
            self._discard(_STRUCTURE_CHANGED)
        else:
            self._weights.upload()

    def _follow_host(self) -> None:
        """Upload module tensors modified on the host since the last upload."""
        if self._weights.host_has_changed():
            self.copyWeightsToDevice()

    @traced("copyNamedBuffersToDevice")
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
        self._required.write_weights(self._weights.lazy.read_values(names))
        self._weights.host_writes.mark_transferred(names)

    @traced("loadStateDict")
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load weights into the module, and onto any attached device. Wrappers that follow this one receive them, too.

        Args:
            state_dict: as for `torch.nn.Module.load_state_dict`.
            strict: whether to require exactly the module's names.

        Returns:
            A named tuple of the `missing_keys` and the `unexpected_keys`.
        """
        result = self.__getattr__("load_state_dict")(state_dict, strict)
        if self.isAttachedToDevice() or self._signatures is not None:
            self.copyWeightsToDevice()
        else:
            self._weights.lazy.mark_news()
        return result
