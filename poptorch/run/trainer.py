"""`Trainer`: a wrapper's optimiser, its hyperparameters in the program, and its device state."""

from __future__ import annotations

import copy
import weakref
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import popxl
from poptorch import optim
from poptorch.base.dtypes import from_numpy, to_numpy
from poptorch.base.logging_ import logger
from poptorch.errors import createPoptorchError
from poptorch.options import Options
from poptorch.program.rules import rule_of
from poptorch.program.state_layout import LOSS_SCALE_FACTOR, STEP
from poptorch.program.updates import Update
from poptorch.run.compiled import Compiled
from poptorch.run.mirrored import MirroredState, loads_exactly
from poptorch.run.serialization import OptimizerData
from poptorch.run.trained_graph_breaks import TrainedBrokenGraph

State = Mapping[str, torch.Tensor]
Settings = tuple[list[Any], list[dict[str, Any]], list[int]]


class Trainer:
    """A wrapper's optimiser.

    Args:
        optimizer: the optimiser, of poptorch or of torch.

    Raises:
        AssertionError, ValueError: if no model can be trained with that; see `poptorch.program.rules.rule_of`.

    Attributes:
        optimizer: the optimiser that was set last.
        update: the program's view of it; `None` before there is one.
        made_with: state of the optimiser when the program was made.
        numbers: hyperparameters in the program.
        device: state on the device. It is the optimiser's own, for optimisers of poptorch.

    While there is a program, `optimizer.state` shows the state, too, in PyTorch's form: see `poptorch.run.mirrored`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        rule_of(optimizer)
        self.optimizer = optimizer
        self.device = _device_state(optimizer)
        loads_exactly(optimizer)
        self.update: Update | None = None
        self.made_with: OptimizerData | None = None
        self.numbers = np.zeros(0, np.float32)
        self._compiled: Compiled | TrainedBrokenGraph | None = None
        self._is_offline = False
        self._parameters: dict[str, torch.Tensor] = {}
        self._with_state: dict[str, torch.Tensor] = {}  # state tensors of the program, by parameter
        self._sent: Settings = [], [], []
        self._is_apart = False  # another wrapper has other state of the same parameters, after a warning
        self._mirror: MirroredState | None = None
        self._shown: Any = None

    def prepare(
        self,
        parameters: Mapping[str, torch.Tensor],
        options: Options,
        groupings: Mapping[str, popxl.ReplicaGrouping] | None = None,
        made_with: OptimizerData | None = None,
        counted_apart: Collection[str] | None = None,
    ) -> Update:
        """Read the optimiser, for a new or existing program.

        Args:
            counted_apart: parameters whose steps the program counts separately; by default, those with fewer steps than
                others.

        Raises:
            poptorch.Error: if the optimiser does not fit that.
        """
        self._parameters = dict(parameters)
        self._warn_of_losses(self.optimizer)
        self.made_with = made_with or OptimizerData.of(self.optimizer, parameters)
        self.update = Update(
            self.optimizer if made_with is None else made_with.make(parameters),
            parameters,
            replica_groupings=groupings,
            automatic_loss_scaling=options.Training.automatic_loss_scaling,
            relaxed_checks=options.relax_optimizer_attributes_checks,
            counted_apart=self._with_fewer_steps() if counted_apart is None else counted_apart,
        )
        self._read_numbers()
        return self.update

    def _warn_of_losses(self, optimizer: torch.optim.Optimizer) -> None:
        """Warn about ineffective optimiser settings: parameters foreign to the model, step hooks."""
        if any(_hooks_of_step(optimizer)):
            logger.warning(
                "Hooks of %s's step (`register_step_post_hook`, ...) have no effect in a wrapped model, whose program "
                "makes the step. Do after the call of the model what they do.",
                type(optimizer).__name__,
            )
        known = frozenset(map(id, self._parameters.values()))
        others = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
        if not self._parameters:
            logger.warning(
                "The model has no parameters, so nothing is trained. Only what a `torch.nn.Module` has as its own can "
                "be: wrap that module, rather than a function that uses it."
            )
        elif others and not self._is_copy(optimizer):
            logger.warning(
                "The optimizer has %d parameters that the model does not have, of the shapes %s. They are not trained: "
                "have the wrapped module own them, as attributes of it or of its submodules.",
                len(others),
                ", ".join(str(list(p.shape)) for p in others[:3]) + (", ..." if len(others) > 3 else ""),
            )

    def _with_fewer_steps(self) -> list[str]:
        """Parameters with fewer completed steps than other trained parameters."""
        steps = self._steps()
        most = max(steps.values(), default=0.0)
        return [name for name, made in steps.items() if made < most]

    def _steps(self) -> dict[str, float]:
        """Completed step counts of trained parameters."""
        loaded, state = (self.device.content["ipu_state"] or {}) if self.device.pending else {}, self.optimizer.state
        steps = dict.fromkeys(self._groups(self.optimizer), 0.0)
        for name in steps:
            if f"Accl1___{name}" in loaded:
                steps[name] = float(loaded.get(f"{STEP}___{name}", loaded.get(STEP, 0)))
            elif (p := self._parameters[name]) in state:
                steps[name] = float(state[p].get("step", 0))
        return steps

    def outgrown(self, optimizer: torch.optim.Optimizer) -> str:
        """Why the program does not fit an optimiser: different trained parameters, groups or shared step counts; empty
        if it fits.

        Raises:
            poptorch.Error: if the optimiser trains nothing of the model.
        """
        if self.update is None or not self.update.matches(optimizer) or self._is_copy(optimizer):
            return ""
        expected, found = self.update.group_of, self._groups(optimizer)
        if found == expected and len(optimizer.param_groups) == self.update.hyperparameters.groups:
            if optimizer is not self.optimizer or not self._is_loaded:
                return ""
            kept = set(map(id, self._with_state.values()))
            steps = {name: made for name, made in self._steps().items() if id(self._parameters[name]) in kept}
            return "" if self.update.layout.counts_alike(steps) else "some parameters have made fewer steps than others"
        if not found and expected:
            raise createPoptorchError(
                "The optimizer has none of the model's parameters that require a gradient, so nothing would be trained."
            )
        changed = [name for name in self._parameters if found.get(name) != expected.get(name)]
        return f"the optimizer trains other parameters, or in other groups, than before: {', '.join(changed) or 'none'}"

    def _groups(self, optimizer: torch.optim.Optimizer) -> dict[str, int]:
        """Parameter group index of each trained parameter."""
        groups = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        own = self._parameters.items()
        return {name: groups[id(p)] for name, p in own if p.requires_grad and id(p) in groups}

    def _is_copy(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimiser contains copies of model parameters instead of these parameters themselves."""
        own, groups = set(map(id, self._parameters.values())), enumerate(optimizer.param_groups)
        shapes = [(i, p.shape) for i, group in groups for p in group["params"] if id(p) not in own]
        if self.update is None or not self.update.names or len(shapes) < sum(map(_size, optimizer.param_groups)):
            return False
        wanted = Counter((i, self._parameters[name].shape) for name, i in self.update.group_of.items())
        return wanted <= Counter(shapes)

    def connect(self, compiled: Compiled | TrainedBrokenGraph, offline: bool = False) -> None:
        """Connect a new program, which owns the state from now on. Preloaded state is uploaded before its next run.

        Args:
            offline: whether it will not run.
        """
        self._compiled, self._is_offline = compiled, offline
        assert self.update is not None
        kept = ((s.name, s.parameter) for s in self.update.state if s.name in compiled.io.state)
        self._with_state = {name: self._parameters[of] for name, of in kept if of is not None}
        compiled.write_numbers(self.numbers)
        self._connect()

    def _connect(self) -> None:
        if self._compiled is None or self._is_offline:
            return
        fetch, device = weakref.WeakMethod(self._fetch), self.device
        device.refresh()  # it may be connected to another program
        has_news = not device.pending and self._has_news(device.has_pending)
        if device.has_pending and not device.pending:  # left by another program
            left, variables = device.content["ipu_state"] or {}, self._compiled.io.state
            shapes = {name: variables[name].shape_on_host if name in variables else None for name in left}
            own = {name: t for name, t in left.items() if name.startswith(STEP) or t.shape == shapes[name]}
            device.set({**device.content, "ipu_state": own}, pending=True)
        device.connect(lambda: device.content if (own := fetch()) is None else own())
        if has_news:
            self._take()
        self._begin_mirroring()

    def disconnect(self) -> None:
        """Copy state back from the program, which is about to be destroyed."""
        if self._compiled is not None:
            self._end_mirroring()
            self.device.disconnect()
            self._compiled = None

    def set(self, optimizer: torch.optim.Optimizer) -> None:
        """Switch to an optimiser, using its current settings.

        Raises:
            poptorch.Error: if it does not fit the program. Then nothing has changed.
            AssertionError, ValueError: if no model can be trained with that. Nor has it then.
        """
        rule_of(optimizer)
        if self.update is not None and self._compiled is not None:
            self._read_numbers(optimizer)
        if optimizer is not self.optimizer:
            if self.update is not None:
                self._warn_of_losses(optimizer)
            self._end_mirroring()
            if self._compiled is None and not optimizer.state and not _device_state(optimizer).has_pending:
                self._hand_on(optimizer)
            self._mirror = None
            self.device.disconnect()
            self.optimizer, self.device = optimizer, _device_state(optimizer)
            loads_exactly(optimizer)
            self._connect()

    def _hand_on(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy the previous optimiser's state to a new stateless optimiser."""
        for group in optimizer.param_groups:
            optimizer.state.update({p: copy.copy(own) for p in group["params"] if (own := self.optimizer.state.get(p))})

    # Changes by users -----------------------------------------------------------------------------------------------

    def has_changed(self) -> bool:
        """Whether optimiser hyperparameters, groups or state differ from the program's."""
        return self.update is not None and (_settings(self.optimizer) != self._sent or self._is_loaded)

    @property
    def _is_loaded(self) -> bool:
        """Whether optimiser state was modified by the user."""
        state = self.optimizer.state
        if self.device.pending or state is not self._mirror:
            return True
        return self._shown is not None and state.has_changed(self._with_state.values())

    def notice(self) -> None:
        """Synchronize optimiser changes since the last run: hyperparameters and state.

        Raises:
            poptorch.Error: for an optimiser that has outgrown the program.
        """
        if _settings(self.optimizer) != self._sent:
            self._read_numbers()
        state = self.optimizer.state
        if self._is_offline:
            if not self.device.pending and self._has_news(is_known=True):
                self._take()
        elif state is not self._mirror:
            if not self.device.pending:
                self._take()
            self._begin_mirroring()
        elif not state.has_newest(self._with_state.values(), self):
            if not isinstance(self.optimizer, optim.Optimizer):
                self._take()
            elif not self._is_apart:  # as in PopTorch, where each wrapper has its own state
                self._is_apart = True
                logger.warning(
                    "The %s of `poptorch.optim` has trained some parameters in another wrapper meanwhile. This wrapper "
                    "goes on with its own state, which knows nothing of that. An optimizer of `torch.optim` has one "
                    "state for all wrappers; or call `destroy()` on this wrapper, which begins with the newest state "
                    "when it is compiled anew.",
                    type(self.optimizer).__name__,
                )
            state.hold(self._with_state.values(), self)
        elif self._shown is not None and state.has_changed(self._with_state.values()):
            self._take()

    def has_run(self) -> None:
        """Mark device state as newer, after a program run."""
        self.device.mark_stale()
        self._shown = None
        vars(self.optimizer)["_opt_called"] = True  # for schedulers, which want to have seen a step

    def _read_numbers(self, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Pass an optimiser's hyperparameters to the program, effective next run."""
        assert self.update is not None
        optimizer = optimizer or self.optimizer
        sent, numbers = _snapshot(_settings(optimizer)), self.update.hyperparameters.values(optimizer)
        if self._compiled is not None and not np.array_equal(numbers, self.numbers):
            self._compiled.write_numbers(numbers)
        self._sent, self.numbers = sent, numbers

    def _has_news(self, is_known: bool) -> bool:
        """Whether `optimizer.state` contains anything unknown to a program not yet connected to it."""
        state, own = self.optimizer.state, self._with_state
        if is_known and isinstance(state, MirroredState):
            known = self.device.content["ipu_state"] or {}  # of a program that may not have had some parameters
            return state.has_changed(own.values()) or any(p in state for name, p in own.items() if name not in known)
        begun = any(p in state and _has_stepped(state[p]) for p in own.values())
        return begun or self._mirror is not None and state is not self._mirror

    def _take(self) -> None:
        """Schedule `optimizer.state` for upload to the device."""
        assert self._compiled is not None and self.update is not None
        variables = self._compiled.io.state
        state = self.update.layout.from_torch(self.optimizer.state, self._parameters, self.numbers, variables)
        if (factor := (self.device.content["ipu_state"] or {}).get(LOSS_SCALE_FACTOR)) is not None:
            state[LOSS_SCALE_FACTOR] = factor  # of which PyTorch knows nothing
        if rounded := sorted(n for n, t in state.items() if t.dtype.itemsize < variables[n].dtype.as_numpy().itemsize):
            logger.warning(
                "The optimizer's state is rounded to the type of its parameters (%s): `load_state_dict` of PyTorch "
                "does so. To keep all digits, wrap the model first, and load the state then.",
                ", ".join(rounded[:3]) + (", ..." if len(rounded) > 3 else ""),
            )
        self.device.set({**self.device.content, "ipu_state": state}, pending=True)

    # Views for users ------------------------------------------------------------------------------------------------

    def _begin_mirroring(self) -> None:
        state = self.optimizer.state
        if not isinstance(state, MirroredState):
            own = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
            state = MirroredState({p: t for p, t in state.items() if id(p) in own})  # a copy may train others now
        self._mirror = state
        self._mirror.remove(self)
        self._mirror.add(self)
        self._mirror.hold(self._with_state.values(), self)
        self._shown = None
        self.optimizer.state = self._mirror

    def _end_mirroring(self) -> None:
        if self._mirror is not None:
            self.show()
            self._mirror.remove(self)

    def show(self) -> None:
        """Refresh `optimizer.state` from the device, if outdated."""
        if self.update is None or self._mirror is None:
            return
        self.device.refresh()
        content = self.device.content["ipu_state"]
        if content is self._shown or content is None:
            return
        with torch.inference_mode(False):  # otherwise their version counters would change
            found = self.update.layout.as_torch(content, self._parameters, self.numbers)
        for name, own in found.items():
            self._mirror.show(self._parameters[name], own)
        self._shown = content

    def write_pending(self) -> None:
        """Upload loaded optimiser state to the device.

        Raises:
            poptorch.Error: for state whose shape differs from the program's.
        """
        assert self._compiled is not None and self.update is not None
        state = self.update.layout.convert_counters(self.device.content["ipu_state"] or {})
        variables = self._compiled.io.state
        if unknown := sorted(state.keys() - variables.keys()):
            logger.warning("Ignoring optimizer state that the program does not have: %s", ", ".join(unknown))
        arrays = {name: to_numpy(state[name]) for name in variables if name in state}
        wrong = [
            f"{name} has the shape {list(array.shape)}, expected {list(variables[name].shape_on_host)}"
            for name, array in arrays.items()
            if array.shape != variables[name].shape_on_host
        ]
        if wrong:
            raise createPoptorchError(f"The optimizer's state is not for this model: {'; '.join(wrong)}.")
        if arrays:
            dtypes = {name: variables[name].dtype.as_numpy() for name in arrays}
            self._compiled.write_state({name: array.astype(dtypes[name]) for name, array in arrays.items()})
        self.device.mark_written()
        self._shown = None

    def _fetch(self) -> dict[str, State]:
        assert self._compiled is not None
        with torch.inference_mode(False):
            state = {name: from_numpy(array) for name, array in self._compiled.state().items()}
        return {"ipu_state": state, "ipu_param": {k: torch.tensor(v) for k, v in self._named_numbers().items()}}

    def _named_numbers(self) -> dict[str, float]:
        assert self.update is not None
        return self.update.named_values(self.numbers)

    # Anchors --------------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Names accepted by `value`: optimiser hyperparameters and state."""
        if self.update is None:
            return []
        kept = list(self._compiled.io.state) if self._compiled is not None else [s.name for s in self.update.state]
        return [*self._named_numbers(), *kept, *(["finalLossScale"] if LOSS_SCALE_FACTOR in kept else [])]

    def value(self, name: str) -> torch.Tensor:
        """Current program value of an optimiser hyperparameter or state tensor."""
        assert self._compiled is not None
        numbers = self._named_numbers()
        if name in numbers:
            return torch.tensor(numbers[name])
        state = self._compiled.state()
        if name in state:
            return from_numpy(state[name])
        return torch.tensor(numbers["lossScaling_FLOAT"] * state[LOSS_SCALE_FACTOR].item())


def default_optimizer(module: torch.nn.Module) -> torch.optim.Optimizer:
    """Default optimiser for training a model."""
    parameters = list(module.parameters())
    return optim.SGD(parameters or [torch.nn.Parameter(torch.zeros(()))], lr=0.01)  # torch wants one at least


def _device_state(optimizer: torch.optim.Optimizer) -> optim.DeviceState:
    """An optimiser's device state. Torch optimisers do not store any."""
    return optimizer.device if isinstance(optimizer, optim.Optimizer) else optim.DeviceState()


def _hooks_of_step(optimizer: torch.optim.Optimizer) -> list[Mapping[int, Any]]:
    own: list[Any] = [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
    return [*own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks]


def _size(group: Mapping[str, Any]) -> int:
    return len(group["params"])


def _has_stepped(state: Mapping[str, Any]) -> bool:
    """Whether parameter state reflects completed steps: Adagrad has state before its first step."""
    return float(state.get("step", 1)) > 0


def _settings(optimizer: torch.optim.Optimizer) -> Settings:
    """Hyperparameters and sizes of groups. A comparison takes a microsecond: parameter lists are identical objects."""
    own = [vars(optimizer).get(name) for name in getattr(optimizer, "_own", ())]
    return own, optimizer.param_groups, list(map(_size, optimizer.param_groups))


def _snapshot(settings: Settings) -> Settings:
    """Settings that stay as they are: tensors, which may change, as numbers."""
    own, groups, sizes = settings
    numbers = [{n: v.item() if isinstance(v, torch.Tensor) else v for n, v in group.items()} for group in groups]
    return own, numbers, sizes
