"""`Optimizer`: base class of poptorch's optimisers, with hyperparameters that torch does not have, and device state.

`poptorch.optim` has the optimisers, and shows these classes to programs.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from poptorch.base.logging_ import logger

DeviceValues = Mapping[str, torch.Tensor] | None
StateDict = dict[str, Any]

_KEYS = ("ipu_state", "ipu_param")
_GROUPED = ("velocity_scaling", "max_weight_norm")  # hyperparameters of groups, unknown to torch
TORCH_ONLY = ("capturable", "differentiable", "foreach", "fused")
"""Attributes that only torch's own steps know."""

_NEVER_VARIABLE = {
    *TORCH_ONLY,
    "accum_type",
    "amsgrad",
    "bias_correction",
    "centered",
    "first_order_momentum_accum_type",
    "maximize",
    "second_order_momentum_accum_type",
    "use_combined_accum",
    "use_tf_variant",
    "velocity_accum_type",
}


class VariableAttributes:
    """Variable attributes of an optimiser: program inputs, as opposed to constants.

    Variable ones may be changed after the model was compiled, which has an effect at its next call. Decide before it is
    compiled.

    Args:
        variable_attributes: initial variable attributes.
        allowed_attributes: attributes that may be variable.

    Example:
        >>> optimizer = SGD(params, lr=0.1, momentum=0.9)
        >>> optimizer.variable_attrs.isConstant("momentum"), optimizer.variable_attrs.isConstant("weight_decay")
        (False, True)
        >>> optimizer.variable_attrs.markAsConstant("momentum")
        >>> optimizer.variable_attrs.isConstant("momentum")
        True
    """

    def __init__(self, variable_attributes: Iterable[str], allowed_attributes: Iterable[str]) -> None:
        self._allowed = tuple(allowed_attributes)
        self._variable: set[str] = set()
        for attr in variable_attributes:
            self.markAsVariable(attr)

    def __contains__(self, attr: str) -> bool:
        """Whether the program may take an attribute as an input."""
        return attr in self._allowed

    def isConstant(self, attr: str) -> bool:
        """Whether an attribute is constant. `AssertionError` for attributes that are never variable."""
        self._check(attr)
        return attr not in self._variable

    def markAsConstant(self, attr: str) -> None:
        """Mark an attribute as constant. `AssertionError` for attributes that are never variable."""
        self._check(attr)
        self._variable.discard(attr)

    def markAsVariable(self, attr: str) -> None:
        """Mark an attribute as variable. `AssertionError` for attributes that are never variable."""
        self._check(attr)
        self._variable.add(attr)

    def _check(self, attr: str) -> None:
        if attr not in self._allowed:
            raise AssertionError(
                f"There is no attribute {attr!r} that can be variable; expected one of {self._allowed}."
            )


class DeviceState:
    """Optimiser state on a device: last read, or pending upload.

    The executor that runs the program connects it, says when a run has changed the device's values, and before a run
    writes what is pending.

    Attributes:
        content: state and hyperparameters by name; `None` for both before compilation.
        pending: the content is newer than the device.
    """

    def __init__(self) -> None:
        self.content: dict[str, DeviceValues] = dict.fromkeys(_KEYS)
        self.pending = False
        self._stale = False
        self._fetch: Callable[[], Mapping[str, DeviceValues]] | None = None

    @property
    def has_pending(self) -> bool:
        """Whether an upload is pending."""
        return any(self.content.values())

    def connect(self, fetch: Callable[[], Mapping[str, DeviceValues]]) -> None:
        """Set the function that reads device values: `{"ipu_state": ..., "ipu_param": ...}`.

        The optimiser keeps the function; it should not keep the device alive.
        """
        self._fetch, self._stale = fetch, True

    def disconnect(self) -> None:
        """Read device values a last time, then release the device."""
        self.refresh()
        self._fetch = None

    def mark_stale(self) -> None:
        """Record a change of device values."""
        self._stale = True

    def set(self, content: Mapping[str, DeviceValues], pending: bool) -> None:
        """Replace the content, by device values or by values `pending` for a device."""
        self.content = {key: content[key] for key in _KEYS}
        self.pending, self._stale = pending, False

    def mark_written(self) -> None:
        """Record the upload of the pending content."""
        self.pending, self._stale = False, True

    def refresh(self) -> None:
        """Read device values, if newer."""
        if self._fetch is not None and self._stale and not self.pending:
            self.set(self._fetch(), pending=False)

    def copied(self) -> DeviceState:
        """Copy for a copied optimiser, with the content pending for its future device."""
        copied = DeviceState()
        copied.set(self.content, pending=self.has_pending)
        return copied


class Optimizer:
    """Base class of these optimisers: further hyperparameters, and device state.

    Attributes:
        variable_attrs: variable attributes; initially those that were given to the constructor.
        device: state of the optimiser on a device.
    """

    variable_attrs: VariableAttributes
    device: DeviceState
    _own: Mapping[str, Any] = {}  # attributes that torch does not know, and their defaults
    _defaults: Mapping[str, Any] = {}  # arguments of torch's class, if there is one

    def __init__(self) -> None:
        self.device = DeviceState()

    def has_state(self) -> bool:
        """Whether device state was read, or is pending."""
        return self.device.has_pending

    def get_state_dict(self) -> dict[str, DeviceValues]:
        """State and hyperparameters last read from, or pending for, a device, without a transfer."""
        return dict(self.device.content)

    def set_state_dict(self, state: Mapping[str, DeviceValues]) -> None:
        """Set state and hyperparameters, as if read from the device.

        Args:
            state: `{"ipu_state": tensors by name, "ipu_param": tensors by name}`.
        """
        self.device.set(state, pending=False)

    def state_dict(self) -> StateDict:
        """Device state and hyperparameters, with torch's dictionary.

        Returns:
            `"ipu_state"` and `"ipu_param"`, each tensors by name, or `None` before the model is compiled; torch's
            `"state"` and `"param_groups"`. Read again without a run in between, it is the same tensors.
        """
        self.device.refresh()
        return {**self.device.content, **super().state_dict()}  # type: ignore[misc]

    def load_state_dict(self, state: StateDict) -> None:
        """Load a dictionary from `state_dict`, for upload before the next run.

        The hyperparameters are those of its `"param_groups"`; names missing in its `"ipu_state"` keep the device's
        values.

        Raises:
            RuntimeError: for any other dictionary.
        """
        if not state.keys() >= set(_KEYS):
            raise RuntimeError(
                f"Only IPU optimizer states can be loaded onto the IPU. The keys of this dictionary are {list(state)}; "
                f"expected those that `state_dict()` of a poptorch optimiser gives, {list(_KEYS)} among them."
            )
        if "param_groups" in state:
            super().load_state_dict({"state": state.get("state", {}), "param_groups": state["param_groups"]})  # type: ignore[misc]
        self.device.set(state, pending=any(state[key] for key in _KEYS))

    def __getstate__(self) -> StateDict:
        """State for copies and pickles: torch's, and current device values."""
        self.device.refresh()
        own = {name: getattr(self, name) for name in (*self._own, "variable_attrs") if name not in _GROUPED}
        theirs: StateDict = super().__getstate__()  # type: ignore[assignment]
        return {**theirs, **own, "state": copy.copy(self.state), "device": self.device.copied()}  # type: ignore[attr-defined]

    def _construct(self, arguments: Mapping[str, Any]) -> None:
        """Pass known constructor arguments to torch, and store the rest. `None` selects the default."""
        Optimizer.__init__(self)
        given = {name: value for name, value in arguments.items() if name != "self" and value is not None}
        own = {**self._own, **{name: value for name, value in given.items() if name in self._own}}
        _check(type(self).__name__, given, own)
        grouped = {name: own.pop(name) for name in _GROUPED if name in own}
        torch_init = super().__init__
        known = inspect.signature(torch_init).parameters
        numbers = {name: given.get(name, default) for name, default in self._defaults.items()}
        if numbers:
            _check_as_torch(type(self).__name__, numbers)
        torch_init(
            **{name: value for name, value in given.items() if name in known and name not in self._own},
            **({"defaults": numbers} if numbers else {}),
        )
        for name, value in own.items():
            setattr(self, name, value)
        for group in (self.defaults, *self.param_groups):  # type: ignore[attr-defined]
            for name, value in grouped.items():
                group.setdefault(name, value)
        possible = [name for name in arguments if name not in {"self", "params"} | _NEVER_VARIABLE]
        self.variable_attrs = VariableAttributes([name for name in possible if name in given], possible)


def _check(name: str, given: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Check hyperparameters at construction."""
    for attribute, value in own.items():
        if attribute.endswith("accum_type") and value not in (torch.float32, torch.float16):
            raise AssertionError(f"{name}: `{attribute}` is {value!r}; expected torch.float32 or torch.float16.")
    for attribute in ("loss_scaling", "velocity_scaling"):
        if not 0 < _number(own.get(attribute, 1.0)) < math.inf:  # they are divided by
            raise ValueError(f"{name}: `{attribute}` is {own[attribute]!r}; expected a positive number.")
    for attribute in ("max_grad_norm", "max_weight_norm"):
        if not _number(own.get(attribute, 0.0)) >= 0:  # nor NaN
            raise ValueError(
                f"{name}: `{attribute}` is {own[attribute]!r}; expected 0 or more, or infinity for no limit."
            )
    if given.get("velocity_scaling", 1.0) != 1.0 and not own["use_combined_accum"]:
        logger.warning("%s: velocity_scaling has no effect without use_combined_accum=True.", name)
    if given.get("bias_correction") is False and name == "AdamW":
        logger.warning("AdamW: bias_correction=False has no effect; the moments are always corrected.")


def _check_as_torch(name: str, numbers: Mapping[str, Any]) -> None:
    """Check hyperparameters as torch's classes do, for a class without counterpart in torch."""
    for attribute in ("lr", "eps", "weight_decay"):
        if not 0 <= _number(numbers[attribute]) < math.inf:
            raise ValueError(f"{name}: `{attribute}` is {numbers[attribute]!r}; expected a number, 0 or more.")
    betas = numbers["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2 or not all(0 <= _number(beta) < 1 for beta in betas):
        raise ValueError(f"{name}: `betas` is {betas!r}; expected two numbers from 0 to below 1.")


def _number(value: Any) -> float:
    """Number from a tensor or scalar; NaN for other objects."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan
