"""Warnings about changes of a module on the host that have no effect on the device."""

from __future__ import annotations

from poptorch.base.logging_ import Warned, logger
from poptorch.capture.attributes import Attributes
from poptorch.run.graph_breaks import CompiledModel
from poptorch.run.host_changes import HostChanges
from poptorch.run.host_model import HostModel
from poptorch.run.host_writes import HostWrites


class ChangeWarnings:
    """Warnings about a wrapper's module, once for each kind of change."""

    def __init__(self, host: HostModel, training: bool, writes: HostWrites) -> None:
        self._host, self._training, self._writes = host, training, writes
        self._changes: HostChanges | None = None
        self._warned = Warned()

    def track(self) -> None:
        """Compare later states of the module with its current one."""
        self._changes = HostChanges(self._host.module)

    def warn(self, compiled: CompiledModel, attributes: Attributes) -> None:
        """Warn about changes since the module was compiled, when it had these attributes."""
        module = self._host.module
        if "mode" not in self._warned and module.training is self._training is not attributes.training:
            here, there = ("train", "eval") if self._training else ("eval", "train")
            self._warned.once(
                "mode",
                "The module is in `%s()` mode, and this wrapper runs it in `%s()` mode, in which it was compiled: "
                "dropout and batch norms may do something else. Call `module.%s()` before `poptorch.%s(module)`, "
                "or `%s()` of the wrapper before its first call.",
                here,
                there,
                here,
                "trainingModel" if self._training else "inferenceModel",
                here,
            )
        if "numbers" not in self._warned and (changed := attributes.changed_number(compiled.changed_on_host)):
            self._warned.once(
                "numbers",
                "An attribute of the module has changed since it was wrapped: %s. Numbers of Python are a part of the "
                "program, so this has no effect on the device. What is to change from call to call is a tensor: an "
                "argument of `forward`. Otherwise call `destroy()`, and set it through the wrapper.",
                changed,
            )
        if "writes" not in self._warned and (written := self._writes.changed_tensors()):
            self._warned.once(
                "writes",
                "%s been changed on the host, after the device had taken %s. The device goes on with its own numbers"
                "%s. Call `copyWeightsToDevice()` of the wrapper after it, or load with its `load_state_dict`.",
                f"{written[0]} and {len(written) - 1} other tensors have" if written[1:] else f"{written[0]} has",
                "them" if written[1:] else "it",
                ", which overwrite those of the host" * (self._training or written[0] in compiled.io.written),
            )
        if "others" not in self._warned and (others := self._writes.replaced()):
            self._warned.once(
                "others",
                "The module has another %s than when the device took its numbers. The device goes on with what it had "
                "then. Call `copyWeightsToDevice()` of the wrapper to have it take the new one. For training, have the "
                "optimizer know what is new, too: `optimizer.add_param_group(...)`.",
                " and another ".join(others),
            )
        if self._changes is not None and (changes := self._changes.new_changes()):
            logger.warning(
                "The module has been changed since it was compiled: %s. A program is what `forward` did then, so this "
                "has no effect on the device. Wrap the module anew.",
                ", ".join(changes),
            )
