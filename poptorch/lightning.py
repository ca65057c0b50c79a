"""Lightning `Trainer` support for models running as poptorch programs: `Trainer(accelerator="ipu")`.

    import lightning
    import poptorch.lightning

    trainer = lightning.Trainer(accelerator="ipu", max_epochs=3)
    trainer.fit(module, data)

Importing this file registers the accelerator and the strategy with Lightning; nothing else in poptorch does. It needs
the extra `lightning`. Each step of a `LightningModule` becomes a program: `training_step` with the backward pass and
the optimizer, `validation_step`, `test_step` and `predict_step` without. Logged values are results of the program, and
are logged after the run, those of each micro-batch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import Accelerator, AcceleratorRegistry
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins import CheckpointIO, MixedPrecision, Precision
from lightning.pytorch.plugins.environments import ClusterEnvironment
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry
from lightning.pytorch.trainer.call import _call_callback_hooks, _call_lightning_module_hook
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector
from lightning.pytorch.trainer.states import RunningStage
from torch.utils import _pytree as pytree
from torch.utils.data import BatchSampler, IterableDataset

from poptorch.base.logging_ import logger
from poptorch.base.replica_groups import ReplicaGroups
from poptorch.capture.trace import tensors_in
from poptorch.data.loader import DataLoader
from poptorch.enums import PartialBatch
from poptorch.errors import createPoptorchError
from poptorch.options import Options
from poptorch.program.batching import Batching
from poptorch.run.devices import ipuHardwareIsAvailable
from poptorch.run.executor import PoplarExecutor
from poptorch.run.executor_options import for_fewer_rows
from poptorch.run.lightning_hooks import warn_about_closure, warn_about_hooks
from poptorch.run.lightning_steps import Step
from poptorch.run.wrapping import inferenceModel, trainingModel

__all__ = ["IPUAccelerator", "IPUStrategy"]

_HOST = torch.device("cpu")
"""Device of modules and batches for Lightning; the program runs elsewhere."""

_ONE_FACTOR = "Set one factor for all epochs, `Trainer(accumulate_grad_batches=4)`."


class IPUAccelerator(Accelerator):
    """Devices running poptorch's programs. `Trainer(accelerator="ipu", devices=4)` makes four replicas."""

    def setup_device(self, device: torch.device) -> None:
        """No-op: a device is attached when the first step is compiled."""

    def teardown(self) -> None:
        """No-op: the strategy releases devices."""

    @staticmethod
    def parse_devices(devices: int | str | Sequence[int]) -> int:
        """Number of devices requested by the trainer's argument."""
        if isinstance(devices, str):
            devices = [int(each) for each in devices.split(",")] if "," in devices else int(devices)
        return devices if isinstance(devices, int) else len(devices)

    @staticmethod
    def get_parallel_devices(devices: int) -> list[torch.device]:
        """The host device, repeated once per requested device."""
        return [_HOST] * devices

    @staticmethod
    def auto_device_count() -> int:
        """Device count 1: additional devices would increase batch sizes."""
        return 1

    @staticmethod
    def is_available() -> bool:
        """Always true: programs fall back on the CPU."""
        return True

    @staticmethod
    def name() -> str:
        """Accelerator name, for `Trainer(accelerator=...)`."""
        return "ipu"

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        """Device availability. Program resource requirements: `poptorch.sessionOf(strategy.training).cost()`."""
        return {"accelerator": float(ipuHardwareIsAvailable())}


class IPUStrategy(SingleDeviceStrategy):
    """Trainer strategy running each step of a module as a separate poptorch program; all programs share weights.

    A batch of the trainer is what one call takes: loaders give `batch_size` rows for each replica, each device
    iteration and each pass of gradient accumulation. `Trainer(accumulate_grad_batches=8)` is gradient accumulation
    within a call.

    The steps are captured, as all models are: shapes do not depend on numbers, and neither does Python. `batch_idx` is
    a tensor in a step. Optimization is automatic and has one optimizer, from `torch.optim` or `poptorch.optim`.
    Gradients are clipped by optimizers of `poptorch.optim`, with `max_grad_norm`.

    Args:
        device_iterations: steps in each call, where no options are given.
        training_opts: the options of training; by default, these are `device_iterations`, a replica for each of the
            trainer's devices, and its gradient accumulation.
        inference_opts: the same for validation, tests and predictions.
        autoreport: write a report of each program.
        autoreport_dir: the folder for reports; by default, the current one.
        accelerator: an `IPUAccelerator`, where the trainer is not given one.
        parallel_devices: set by the trainer.
        cluster_environment: has no effect.
        checkpoint_io: plugin that writes checkpoints.
        precision_plugin: dtypes of the module. `16-true` and `bf16-true` are dtypes of its weights; `bf16-mixed` is
            `torch.autocast` around it.

    Attributes:
        training: the wrapped model that is trained, once it has begun; `poptorch.sessionOf` takes it.

    Raises:
        poptorch.Error: during training, for unsupported features: manual optimization, `gradient_clip_val`, several
            processes.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> options = poptorch.Options().deviceIterations(4)
        >>> strategy = IPUStrategy(training_opts=options, inference_opts=poptorch.Options())
        >>> trainer = Trainer(accelerator="ipu", strategy=strategy, max_epochs=1)
    """

    strategy_name = "ipu_strategy"

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        device_iterations: int = 1,
        autoreport: bool = False,
        autoreport_dir: str | os.PathLike[str] | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        training_opts: Options | None = None,
        inference_opts: Options | None = None,
    ) -> None:
        for name, options in (("training_opts", training_opts), ("inference_opts", inference_opts)):
            if options is not None and not isinstance(options, Options):
                raise createPoptorchError(
                    f"IPUStrategy: `{name}` should be poptorch.Options; got {type(options).__name__}."
                )
            if options is not None and options.Distributed.numProcesses > 1:
                raise createPoptorchError(
                    f"IPUStrategy: `{name}` are those of one of several processes. A trainer runs in one; use "
                    "options.replicationFactor(...), or a loop of your own in each process."
                )
        super().__init__(_HOST, accelerator, checkpoint_io, precision_plugin)
        self.parallel_devices = parallel_devices
        self.cluster_environment = cluster_environment
        self.training: PoplarExecutor | None = None
        self._device_iterations = device_iterations
        self._passed_options = {True: training_opts, False: inference_opts}
        self._completed_options: dict[bool, Options] = {}
        self._accumulation = 1
        self._schedulers: dict[GradientAccumulationScheduler, dict[int, int]] = {}  # with the user's settings
        self._steps: dict[Any, tuple[PoplarExecutor, Step]] = {}
        self._reports = os.fspath(autoreport_dir or ".") if autoreport else None
        self._lacks_step = False  # after a training step, until that of the optimizer

    # Options ----------------------------------------------------------------------------------------------------------

    @property
    def replication_factor(self) -> int:
        """Number of replicas in the current stage."""
        return self._options(self._is_training).replication_factor

    @property
    def training_opts(self) -> Options:
        """Training options."""
        return self._options(True)

    @property
    def inference_opts(self) -> Options:
        """Options used for validation, testing and prediction."""
        return self._options(False)

    def _options(self, is_training: bool) -> Options:
        if is_training in self._completed_options:
            return self._completed_options[is_training]
        if (given := self._passed_options[is_training]) is not None:
            options = given.clone()
        else:
            options = Options().deviceIterations(self._device_iterations)
            options.replicationFactor(len(self.parallel_devices or [_HOST]))
            if is_training:
                options.Training.gradientAccumulation(self._accumulation)
        if self._reports is not None:
            options.enableProfiling(self._reports)
        self._completed_options[is_training] = options
        return options

    @property
    def _is_training(self) -> bool:
        module = self.lightning_module
        return module is not None and module.trainer.state.stage is RunningStage.TRAINING

    # Before and after -------------------------------------------------------------------------------------------------

    @property
    def handles_gradient_accumulation(self) -> bool:
        """True: gradient accumulation happens inside the program."""
        return True

    @property
    def precision_plugin(self) -> Precision:
        """Precision plugin, determining the module's dtypes."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        if isinstance(precision_plugin, MixedPrecision):
            if precision_plugin.precision != "bf16-mixed":
                raise createPoptorchError(
                    f'Trainer: precision="{precision_plugin.precision}" scales losses on the host, which knows '
                    'no gradients here. Use "bf16-mixed", or "16-true" with '
                    "options.Training.setAutomaticLossScaling(True)."
                )
            precision_plugin = MixedPrecision("bf16-mixed", "cpu")  # the plugin that a capture replaces
        self._precision_plugin = precision_plugin

    def setup_environment(self) -> None:
        """Apply the trainer's gradient settings, before loaders are created."""
        super().setup_environment()
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        self._take_schedulers(trainer)
        if trainer.gradient_clip_val:
            raise createPoptorchError(
                "Trainer: `gradient_clip_val` is set, but gradients are in the program. Use an optimizer of "
                f"poptorch.optim with max_grad_norm={trainer.gradient_clip_val}."
            )
        if trainer.accumulate_grad_batches != 1 and not self._schedulers:
            self._take_accumulation(trainer.accumulate_grad_batches, "`accumulate_grad_batches`")
            trainer.accumulate_grad_batches = 1  # for the trainer, a batch is one call

    def _take_accumulation(self, factor: int, what: str) -> None:
        """Move a gradient accumulation factor into the program."""
        if self._passed_options[True] is not None and factor != 1:
            raise createPoptorchError(
                f"Trainer: {what} is set beside `training_opts`. Leave it out, and set "
                f"training_opts.Training.gradientAccumulation({factor})."
            )
        self._accumulation = factor

    def _take_schedulers(self, trainer: Trainer) -> None:
        """Extract the single factor from a `GradientAccumulationScheduler`, which then sets 1 every epoch."""
        for each in trainer.callbacks:
            if isinstance(each, GradientAccumulationScheduler):
                last = math.inf if trainer.max_epochs in (None, -1) else trainer.max_epochs
                factors = {factor for epoch, factor in each.scheduling.items() if epoch == 0 or epoch < last}
                if len(factors) > 1:
                    raise createPoptorchError(
                        f"GradientAccumulationScheduler: `scheduling` has several factors, {each.scheduling}, but "
                        f"accumulation is a part of the program. {_ONE_FACTOR}"
                    )
                self._take_accumulation(factors.pop(), "a GradientAccumulationScheduler")
                self._schedulers[each] = each.scheduling
                each.scheduling = dict.fromkeys(each.scheduling, 1)

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Create the optimizer. (Lightning refuses a second one.)"""
        module = self.lightning_module
        assert module is not None
        if not module.automatic_optimization:
            raise createPoptorchError(
                f"{type(module).__name__}: `automatic_optimization` is False, but the optimizer is a part of the "
                "program. Leave it True."
            )
        warn_about_hooks(trainer, module)
        super().setup_optimizers(trainer)

    def teardown(self) -> None:
        """Copy weights back to the host, then release all devices."""
        self._forget()
        for each, scheduling in self._schedulers.items():
            each.scheduling = scheduling
        if self._accumulation != 1 and self.lightning_module is not None:
            self.lightning_module.trainer.accumulate_grad_batches = 1 if self._schedulers else self._accumulation
            self._accumulation = 1
        self._schedulers.clear()
        self._completed_options.clear()
        super().teardown()

    def on_exception(self, exception: BaseException) -> None:
        """Copy weights back to the host."""
        self._forget()

    def _forget(self) -> None:
        for model, _ in self._steps.values():
            model.destroy()
        self._steps.clear()
        self.training = None

    # Data -------------------------------------------------------------------------------------------------------------

    def process_dataloader(self, dataloader: object) -> object:
        """Convert a PyTorch loader to a poptorch loader using the stage's options; return other loaders unchanged."""
        if not isinstance(dataloader, torch.utils.data.DataLoader) or isinstance(dataloader, DataLoader):
            return dataloader
        return _loader(dataloader, self._options(self._is_training), self._is_training)

    # Steps ------------------------------------------------------------------------------------------------------------

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run one call's training steps."""
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        with self.precision_plugin.train_step_context():
            if trainer.fit_loop._skip_backward:
                return self._run("training_step", args, kwargs, trains=False)
            if trainer.accumulate_grad_batches != 1:
                raise createPoptorchError(
                    "Trainer: `accumulate_grad_batches` changes while it trains, but it is a part of the program. "
                    f"{_ONE_FACTOR}"
                )
            if self._lacks_step:
                warn_about_closure(type(self.lightning_module).__qualname__)
            self._lacks_step = True
            return self._run("training_step", args, kwargs, trains=True)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a validation batch."""
        with self.precision_plugin.val_step_context():
            return self._run("validation_step", args, kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a test batch."""
        with self.precision_plugin.test_step_context():
            return self._run("test_step", args, kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a prediction batch."""
        with self.precision_plugin.predict_step_context():
            return self._run("predict_step", args, kwargs)

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """No-op: the program includes the backward pass."""
        return closure_loss

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Run the training step, including the optimizer step.

        So hooks between the gradient and the optimizer come before both: they have no gradients, but may set learning
        rates.
        """
        module = self.lightning_module
        assert module is not None
        if self.training is not None:
            self.training._follow_host()
        _call_callback_hooks(module.trainer, "on_before_optimizer_step", optimizer)
        _call_lightning_module_hook(module.trainer, "on_before_optimizer_step", optimizer)
        if self.training is not None and self.training._weights.host_has_changed():
            raise createPoptorchError(
                "on_before_optimizer_step: a parameter or buffer has been changed. The gradient and the step of the "
                "optimizer are one program, so nothing can change in between. Change it in `on_train_batch_end`, or in "
                "`on_train_batch_start`, for the gradient to be that of the new numbers."
            )
        result = closure()
        self._lacks_step = False
        return result

    def _run(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], trains: bool = False) -> Any:
        """Run a step, compiling a program for new tensor shapes.

        Args:
            name: name of the step.
            args, kwargs: arguments of the step.
            trains: whether the program runs the optimizer.
        """
        assert self.lightning_module is not None
        is_training = name == "training_step"
        options = self._options(is_training)
        if is_training and not trains:
            if self.training is not None:
                self._forget()  # all programs, so that they are recompiled
            options = _without_optimizer(options)
        (batch, *indices), calls = args, Batching.from_options(options, trains).factor
        if not trains and any(t.shape[:1].numel() % calls for t in tensors_in(batch)):
            options, calls = for_fewer_rows(options, Batching(1, 1, ReplicaGroups(1))), 1
        indices += kwargs.values()
        inputs = (batch, *(torch.full((calls,), index, dtype=torch.int32) for index in indices))
        key = name if trains else (name, *_shapes(inputs))
        if key not in self._steps:
            step = Step(self.lightning_module, name, tuple(kwargs))
            if self._reports is not None and not options.model_name:
                options = options.clone().modelName(name)  # a report for each step
            if trains:
                model = self.training = trainingModel(step, options, self.optimizers[0])
            else:
                model = inferenceModel(step, options)
            model.compile(*inputs)
            self._steps[key] = model, step
        model, step = self._steps[key]
        (self.training or model)._follow_host()
        result = step.execute_side_effects(model(*inputs), Batching.from_options(options, trains), batch)
        if not is_training:
            return result
        return {**result, "loss": result["loss"].mean()} if isinstance(result, Mapping) else result.mean()


def _without_optimizer(options: Options) -> Options:
    """Options for an inference-only program that processes identical rows in identical micro-batches."""
    options = options.clone()
    options.deviceIterations(options.device_iterations * options.Training.gradient_accumulation)
    options.Training.gradientAccumulation(1)
    return options


def _shapes(inputs: Any) -> tuple[Any, ...]:
    """Program cache key: input structure, tensor shapes and dtypes, non-tensor values."""
    leaves, structure = pytree.tree_flatten(inputs)
    return structure, *((tuple(each.shape), each.dtype) if isinstance(each, torch.Tensor) else each for each in leaves)


def _loader(loader: torch.utils.data.DataLoader[Any], options: Options, is_training: bool) -> DataLoader:
    """Rebuild a loader with identical elements and order, batched for complete calls.

    Training drops the incomplete batch at the end if a call takes several micro-batches.
    """
    loading: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "collate_fn": loader.collate_fn,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "generator": loader.generator,
        "persistent_workers": loader.persistent_workers,
    }
    if loader.num_workers:
        loading["prefetch_factor"] = loader.prefetch_factor
    batches = loader.batch_sampler
    drops = is_training and (
        Batching.from_options(options, is_training).factor > 1 or options.partial_batch is PartialBatch.Refuse
    )
    if batches is not None and type(batches) is not BatchSampler:
        return DataLoader(options, loader.dataset, batch_sampler=batches, drop_last=drops, **loading)
    if batches is None:
        return DataLoader(options, loader.dataset, None, sampler=_sampler(loader, loader.sampler), **loading)
    if drops and not batches.drop_last:
        logger.info("Trainer: training leaves out what remains of the data set and is no whole batch.")
    loading["drop_last"] = drops or batches.drop_last
    return DataLoader(options, loader.dataset, batches.batch_size, sampler=_sampler(loader, batches.sampler), **loading)


def _sampler(loader: torch.utils.data.DataLoader[Any], sampler: Any) -> Any:
    """A loader's sampler; `None` for iterable data sets, which define their own order."""
    return None if isinstance(loader.dataset, IterableDataset) else sampler


# Lightning's registries -----------------------------------------------------------------------------------------------

AcceleratorRegistry.register(IPUAccelerator.name(), IPUAccelerator, description=IPUAccelerator.__doc__ or "")
StrategyRegistry.register(IPUStrategy.strategy_name, IPUStrategy, description=IPUStrategy.__doc__ or "")

_choose_strategy = _AcceleratorConnector._choose_strategy


def _choose(connector: _AcceleratorConnector) -> Any:
    """Select a default strategy when users specify none; Lightning's own accelerators keep its choice."""
    if isinstance(connector.accelerator, IPUAccelerator):
        return IPUStrategy.strategy_name
    return _choose_strategy(connector)


_AcceleratorConnector._choose_strategy = _choose
