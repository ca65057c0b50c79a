"""`OptimizerState`: host and program copies of an optimiser's state, with tracking of the newest.

There are three: the program's; its copy in the program's format, `DeviceState`, which optimisers of poptorch show as
`"ipu_state"`; and `optimizer.state` in PyTorch's format, `MirroredState`. The program's is the newest after a run, and
the others are copied from it when they are read. A host copy is the newest after a change by the user, or after a run
of another wrapper with the same optimiser, and is uploaded before the next run.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch

from poptorch import optim
from poptorch.base.device_state import DeviceState
from poptorch.base.logging_ import logger
from poptorch.program.state_layout import LOSS_SCALE_FACTOR, STEP
from poptorch.run.mirrored import MirroredState, loads_exactly
from poptorch.run.program_state import ProgramState


class OptimizerState:
    """State of an optimiser: synchronisation of its host copies and a program.

    Attributes:
        device: copy in the program's format; for optimisers of poptorch, the optimiser's own.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        loads_exactly(optimizer)
        self._optimizer = optimizer
        self.device = device_state_of(optimizer)
        self._program: ProgramState | None = None
        self._is_offline = False
        self._mirror: MirroredState | None = None
        self._mirrored: Any = None  # content of `device` that the mirror shows; `None` if the mirror is outdated
        self._diverged = False  # another wrapper has other state of the same parameters, after a warning

    # The program ----------------------------------------------------------------------------------------------------

    def connect(self, program: ProgramState, offline: bool) -> None:
        """Connect a program, which owns the state from now on. State of the host is uploaded before its next run.

        Args:
            offline: whether it will not run.
        """
        self._program, self._is_offline = program, offline
        if offline:
            return
        device, read = self.device, weakref.WeakMethod(program.current_state)
        device.refresh()  # it may be connected to another program
        has_news = not device.pending and self._has_news(program, device.has_content)
        if device.has_content and not device.pending:  # left by another program
            device.load(program.matching(device.state))
        device.connect(lambda: device.content if (own := read()) is None else own())
        if has_news:
            self._take(program)
        self._begin_mirroring(program)

    def disconnect(self) -> None:
        """Copy state back from the program, if there is one."""
        if self._mirror is not None:
            self.show()
            self._mirror.remove(self)
        self.device.disconnect()
        self._program = None

    def has_run(self) -> None:
        """Record a run of the program, whose state is the newest now."""
        self.device.mark_stale()
        self._mirrored = None

    def upload(self) -> None:
        """Upload pending state to the program.

        Raises:
            poptorch.Error: for state whose shape differs from the program's.
        """
        assert self._program is not None
        self._program.write(self.device.state)
        self.device.mark_written()
        self._mirrored = None

    # Changes by users -----------------------------------------------------------------------------------------------

    @property
    def has_changed(self) -> bool:
        """Whether the user has changed the state since the last run."""
        return self.device.pending or self._optimizer.state is not self._mirror or self._is_mirror_changed

    @property
    def _is_mirror_changed(self) -> bool:
        if self._mirrored is None or self._mirror is None or self._program is None:
            return False
        return self._mirror.has_changed(self._program.owners.values())

    def take_changes(self) -> None:
        """Schedule uploads for changes of `optimizer.state` by the user or by other wrappers."""
        program, state = self._program, self._optimizer.state
        assert program is not None
        if self._is_offline:
            if not self.device.pending and self._has_news(program, is_known=True):
                self._take(program)
        elif self._mirror is None or state is not self._mirror:
            if not self.device.pending:
                self._take(program)
            self._begin_mirroring(program)
        elif not self._mirror.has_newest(program.owners.values(), self):
            if not isinstance(self._optimizer, optim.Optimizer):
                self._take(program)
            elif not self._diverged:  # as in PopTorch, where each wrapper has its own state
                self._diverged = True
                logger.warning(
                    "The %s of `poptorch.optim` has trained some parameters in another wrapper meanwhile. This wrapper "
                    "goes on with its own state, which knows nothing of that. An optimizer of `torch.optim` has one "
                    "state for all wrappers; or call `destroy()` on this wrapper, which begins with the newest state "
                    "when it is compiled anew.",
                    type(self._optimizer).__name__,
                )
            self._mirror.hold(program.owners.values(), self)
        elif self._is_mirror_changed:
            self._take(program)

    def _has_news(self, program: ProgramState, is_known: bool) -> bool:
        """Whether `optimizer.state` contains anything unknown to a program not yet connected to it.

        Args:
            is_known: whether `device` has the state that the mirror showed last.
        """
        state, own = self._optimizer.state, program.owners
        if is_known and isinstance(state, MirroredState):
            known = self.device.state  # of a program that may not have had some parameters
            return state.has_changed(own.values()) or any(p in state for name, p in own.items() if name not in known)
        begun = any(p in state and _has_stepped(state[p]) for p in own.values())
        return begun or self._mirror is not None and state is not self._mirror

    def _take(self, program: ProgramState) -> None:
        """Schedule `optimizer.state` for upload."""
        state, before = program.from_torch(self._optimizer.state), self.device.state
        if LOSS_SCALE_FACTOR in before:  # of which PyTorch knows nothing
            state[LOSS_SCALE_FACTOR] = before[LOSS_SCALE_FACTOR]
        self.device.load(state)

    # Copies for users -----------------------------------------------------------------------------------------------

    def _begin_mirroring(self, program: ProgramState) -> None:
        state = self._optimizer.state
        if not isinstance(state, MirroredState):
            own = {id(p) for group in self._optimizer.param_groups for p in group["params"]}
            state = MirroredState({p: t for p, t in state.items() if id(p) in own})  # a copy may train others now
        self._mirror = state
        self._mirror.remove(self)
        self._mirror.add(self)
        self._mirror.hold(program.owners.values(), self)
        self._mirrored = None
        self._optimizer.state = self._mirror

    def show(self) -> None:
        """Refresh `optimizer.state` from the program, if outdated."""
        if self._mirror is None or self._program is None:
            return
        self._complete()
        self.device.refresh()
        content = self.device.content["ipu_state"]
        if content is self._mirrored or content is None:
            return
        for parameter, own in self._program.as_torch(content).items():
            self._mirror.show(parameter, own)
        self._mirrored = content

    def _complete(self) -> None:
        """Add the program's values to a pending copy without some tensors."""
        if self.device.pending and self._program is not None and not self._is_offline:
            state = self._program.completed(self.device.state)
            if state.keys() != self.device.state.keys():
                self.device.load(state)

    def steps(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Number of completed steps of each parameter."""
        self._complete()
        loaded, state = self.device.state if self.device.pending else {}, self._optimizer.state
        steps = dict.fromkeys(parameters, 0.0)
        for name, parameter in parameters.items():
            if f"Accl1___{name}" in loaded:
                steps[name] = float(loaded.get(f"{STEP}___{name}", loaded.get(STEP, 0)))
            elif parameter in state:
                steps[name] = float(state[parameter].get("step", 0))
        return steps


def device_state_of(optimizer: torch.optim.Optimizer) -> DeviceState:
    """An optimiser's `DeviceState`. Torch optimisers do not store any."""
    return optimizer.device if isinstance(optimizer, optim.Optimizer) else DeviceState()


def _has_stepped(state: Mapping[str, Any]) -> bool:
    """Whether parameter state reflects completed steps: Adagrad has state before its first step."""
    return float(state.get("step", 1)) > 0
