"""The optimisers of poptorch: torch's SGD, Adam, AdamW and RMSprop with further hyperparameters, and LAMB.

On the CPU they are torch's. In a wrapped model their Python code is not run: `poptorch.program.updates` reads their
settings, and the program on the device updates the parameters. There an optimiser has its own state, which `state_dict`
reads and `load_state_dict` writes. `optimizer.state` shows it in PyTorch's format, also for torch's optimisers; see
`poptorch.run.optimizer_state`.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from poptorch.base.device_state import STATE_KEYS, DeviceState, DeviceValues
from poptorch.base.host_steps import lamb, rmsprop_of_tensorflow, step_of_each
from poptorch.base.optimizer_arguments import NEVER_VARIABLE, check_as_torch, check_hyperparameters

__all__ = ["LAMB", "SGD", "Adam", "AdamW", "Optimizer", "RMSprop", "VariableAttributes"]

_GROUPED = ("velocity_scaling", "max_weight_norm")  # hyperparameters of groups, unknown to torch
_ADAPTIVE: dict[str, Any] = {
    "loss_scaling": 1.0,
    "accum_type": torch.float32,
    "first_order_momentum_accum_type": torch.float32,
    "second_order_momentum_accum_type": torch.float32,
}

Params = Iterable[Any]
StateDict = dict[str, Any]


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


class Optimizer:
    """Base class of these optimisers: further hyperparameters, and device state.

    Attributes:
        variable_attrs: variable attributes; initially those that were given to the constructor.
        device: state of the optimiser on a device.
    """

    variable_attrs: VariableAttributes
    device: DeviceState
    _extras: Mapping[str, Any] = {}  # attributes that torch does not know, and their defaults
    _defaults: Mapping[str, Any] = {}  # arguments of torch's class, if there is one

    def __init__(self) -> None:
        self.device = DeviceState()

    def has_state(self) -> bool:
        """Whether device state was read, or is pending."""
        return self.device.has_content

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
        if not state.keys() >= set(STATE_KEYS):
            raise RuntimeError(
                f"Only IPU optimizer states can be loaded onto the IPU. The keys of this dictionary are {list(state)}; "
                f"expected those that `state_dict()` of a poptorch optimiser gives, {list(STATE_KEYS)} among them."
            )
        if "param_groups" in state:
            super().load_state_dict({"state": state.get("state", {}), "param_groups": state["param_groups"]})  # type: ignore[misc]
        self.device.set(state, pending=any(state[key] for key in STATE_KEYS))

    def __getstate__(self) -> StateDict:
        """State for copies and pickles: torch's, and current device values."""
        self.device.refresh()
        own = {name: getattr(self, name) for name in (*self._extras, "variable_attrs") if name not in _GROUPED}
        theirs: StateDict = super().__getstate__()  # type: ignore[assignment]
        return {**theirs, **own, "state": copy.copy(self.state), "device": self.device.copied()}  # type: ignore[attr-defined]

    def _construct(self, arguments: Mapping[str, Any]) -> None:
        """Pass known constructor arguments to torch, and store the rest. `None` selects the default."""
        Optimizer.__init__(self)
        given = {name: value for name, value in arguments.items() if name != "self" and value is not None}
        own = {**self._extras, **{name: value for name, value in given.items() if name in self._extras}}
        check_hyperparameters(type(self).__name__, given, own)
        grouped = {name: own.pop(name) for name in _GROUPED if name in own}
        torch_init = super().__init__
        known = inspect.signature(torch_init).parameters
        numbers = {name: given.get(name, default) for name, default in self._defaults.items()}
        if numbers:
            check_as_torch(type(self).__name__, numbers)
        torch_init(
            **{name: value for name, value in given.items() if name in known and name not in self._extras},
            **({"defaults": numbers} if numbers else {}),
        )
        for name, value in own.items():
            setattr(self, name, value)
        for group in (self.defaults, *self.param_groups):  # type: ignore[attr-defined]
            for name, value in grouped.items():
                group.setdefault(name, value)
        possible = [name for name in arguments if name not in {"self", "params"} | NEVER_VARIABLE]
        self.variable_attrs = VariableAttributes([name for name in possible if name in given], possible)


class SGD(Optimizer, torch.optim.SGD):
    """Stochastic gradient descent with momentum: `torch.optim.SGD` with further hyperparameters.

    Arguments given here are variable, the others constant (see `variable_attrs`). `None` means the default. With g the
    gradient, d = g + weight_decay w:

        v ← momentum v + (1 - dampening) d,    w ← w - lr v    (with `nesterov`, lr (d + momentum v))

    v starts at 0, and the first step is dampened like all others, unlike in torch.

    Args:
        params: parameters to train, or parameter groups: dictionaries with `"params"` and their own hyperparameters.
        lr: learning rate.
        momentum: decay rate of v. If it is constant and 0, there is no v.
        dampening: dampening of d, as above.
        weight_decay: L2 penalty.
        nesterov: see above.
        maximize: step up the gradient, not down.
        foreach, differentiable: arguments for torch; no effect in a wrapped model.
        loss_scaling: initial gradient of the loss; gradients are divided by it before they are used. For float16, where
            they would vanish.
        velocity_scaling: factor that v is stored with, for `use_combined_accum`. It may differ between groups.
        use_combined_accum: keep v times `velocity_scaling`, in the type of the parameter. Without effect where no v is
            kept. (The sum of gradients over micro-batches has memory of its own nevertheless.)
        accum_type: the type in which gradients are summed over micro-batches, if not `use_combined_accum`.
        velocity_accum_type: type of v, if not `use_combined_accum`.
        max_grad_norm: the gradients of all parameters together are scaled down to this norm where theirs is greater.

    Raises:
        AssertionError: if a type is neither `torch.float32` nor `torch.float16`.
        ValueError: for arguments that torch refuses, and for a `max_grad_norm` below 0 or NaN.

    Example:
        >>> optimizer = SGD(params, lr=0.1, momentum=0.9, use_combined_accum=True, velocity_scaling=1024.0)
    """

    _extras = {
        "loss_scaling": 1.0,
        "velocity_scaling": 1.0,
        "use_combined_accum": False,
        "accum_type": torch.float32,
        "velocity_accum_type": torch.float32,
        "max_grad_norm": math.inf,
    }

    def __init__(
        self,
        params: Params,
        lr: float,
        momentum: float | None = None,
        dampening: float | None = None,
        weight_decay: float | None = None,
        nesterov: bool | None = None,
        maximize: bool | None = None,
        foreach: bool | None = None,
        differentiable: bool | None = None,
        loss_scaling: float | None = None,
        velocity_scaling: float | None = None,
        use_combined_accum: bool | None = None,
        accum_type: torch.dtype | None = None,
        velocity_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        self._construct(locals())


class Adam(Optimizer, torch.optim.Adam):
    """Adam with an L2 penalty: `torch.optim.Adam` with further hyperparameters.

    Arguments given here are variable, the others constant (see `variable_attrs`). `None` means the default. See "Adam:
    A Method for Stochastic Optimization" (Kingma and Ba, 2015).

    Args:
        params: parameters to train, or parameter groups: dictionaries with `"params"` and their own hyperparameters.
        lr, betas, eps, weight_decay: as in torch.
        amsgrad: divide by the root of the largest second moment so far.
        maximize: step up the gradient, not down.
        foreach, capturable, differentiable, fused: arguments for torch; no effect in a wrapped model.
        loss_scaling: initial gradient of the loss; gradients are divided by it before they are used.
        accum_type: the type in which gradients are summed over micro-batches.
        first_order_momentum_accum_type, second_order_momentum_accum_type: the types of the moments.
        max_grad_norm: the gradients of all parameters together are scaled down to this norm where theirs is greater.

    Raises:
        AssertionError: if a type is neither `torch.float32` nor `torch.float16`.
        ValueError: for arguments that torch refuses, and for a `max_grad_norm` below 0 or NaN.

    Example:
        >>> optimizer = Adam(params, lr=0.001, max_grad_norm=1.0)
    """

    _extras = {**_ADAPTIVE, "max_grad_norm": math.inf}

    def __init__(
        self,
        params: Params,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        amsgrad: bool | None = None,
        foreach: bool | None = None,
        maximize: bool | None = None,
        capturable: bool | None = None,
        differentiable: bool | None = None,
        fused: bool | None = None,
        loss_scaling: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        self._construct(locals())


class AdamW(Optimizer, torch.optim.AdamW):
    """Adam with decoupled weight decay: `torch.optim.AdamW` with further hyperparameters.

    Arguments are those of `Adam`, and one more. See "Decoupled Weight Decay Regularization" (Loshchilov and Hutter,
    2019).

    Args:
        bias_correction: without effect: the moments are always corrected. Programs were written with this in mind.

    Raises:
        AssertionError: if a type is neither `torch.float32` nor `torch.float16`.
        ValueError: for arguments that torch refuses, and for a `max_grad_norm` below 0 or NaN.

    Example:
        >>> optimizer = AdamW(params, lr=0.001, weight_decay=0.1)
    """

    _extras = {**_ADAPTIVE, "max_grad_norm": math.inf, "bias_correction": True}

    def __init__(
        self,
        params: Params,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        amsgrad: bool | None = None,
        maximize: bool | None = None,
        foreach: bool | None = None,
        capturable: bool | None = None,
        differentiable: bool | None = None,
        fused: bool | None = None,
        loss_scaling: float | None = None,
        bias_correction: bool | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        self._construct(locals())


class RMSprop(Optimizer, torch.optim.RMSprop):
    """RMSprop: `torch.optim.RMSprop` with further hyperparameters.

    Arguments given here are variable, the others constant (see `variable_attrs`). `None` means the default.

    Args:
        params: parameters to train, or parameter groups: dictionaries with `"params"` and their own hyperparameters.
        lr, alpha, eps, weight_decay, momentum: as in torch.
        centered: as in torch; the same for all groups.
        maximize: step up the gradient, not down.
        foreach, differentiable: arguments for torch; no effect in a wrapped model.
        loss_scaling: initial gradient of the loss; gradients are divided by it before they are used.
        accum_type: the type in which gradients are summed over micro-batches.
        first_order_momentum_accum_type: the type of the mean of the gradient, and of the momentum.
        second_order_momentum_accum_type: the type of the mean of its square.
        use_tf_variant: the formula of TensorFlow: the mean square starts at 1, `eps` is added to it before the root is
            taken, and the momentum includes the learning rate.

    Raises:
        AssertionError: if a type is neither `torch.float32` nor `torch.float16`.
        ValueError: for arguments that torch refuses.

    Example:
        >>> optimizer = RMSprop(params, lr=0.01, momentum=0.9, use_tf_variant=True)
    """

    _extras = {**_ADAPTIVE, "use_tf_variant": False}

    def __init__(
        self,
        params: Params,
        lr: float | None = None,
        alpha: float | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        momentum: float | None = None,
        centered: bool | None = None,
        foreach: bool | None = None,
        maximize: bool | None = None,
        differentiable: bool | None = None,
        loss_scaling: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
        use_tf_variant: bool | None = None,
    ) -> None:
        self._construct(locals())

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """CPU step: torch's, or the TensorFlow variant's.

        Args:
            closure: computes the loss, and the gradients with it, first.

        Returns:
            The result of `closure`; `None` without one.
        """
        if self.use_tf_variant:  # type: ignore[attr-defined]
            return step_of_each(self, closure, rmsprop_of_tensorflow)
        return _step_of_torch(self, closure)


_step_of_torch = inspect.unwrap(torch.optim.RMSprop.step, stop=lambda step: not getattr(step, "hooked", False))
"""torch's step without hooks: the step of the optimiser's own class runs the hooks."""


class LAMB(Optimizer, torch.optim.Optimizer):
    """Adam for large batches, with steps proportional to each parameter's norm and the learning rate.

    With m̂ and v̂ the moments of `AdamW`:

        x = m̂ / (√v̂ + eps) + weight_decay w,    w ← w - lr min(‖w‖, max_weight_norm) / ‖x‖ x

    where the ratio is 1 if a norm is 0. Arguments given here are variable, the others constant (see `variable_attrs`).
    `None` means the default. See "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes" (You et al.,
    2020).

    Args:
        params: parameters to train, or parameter groups: dictionaries with `"params"` and their own hyperparameters.
        lr: learning rate, by default 1e-3.
        betas: decay rates of the moments, by default (0.9, 0.999).
        eps: constant added to the root, by default 1e-8.
        weight_decay: weight decay, by default 0.01.
        bias_correction: whether to divide the moments by 1 - βᵗ; by default true.
        loss_scaling: initial gradient of the loss; gradients are divided by it before they are used.
        max_weight_norm: upper limit of a parameter's norm in the ratio; by default 65500, in effect no limit.
        accum_type: the type in which gradients are summed over micro-batches.
        first_order_momentum_accum_type, second_order_momentum_accum_type: the types of the moments.

    Raises:
        AssertionError: if a type is neither `torch.float32` nor `torch.float16`.
        ValueError: for a value that is not a number, or out of range.

    Example:
        >>> optimizer = LAMB(params, lr=0.01, max_weight_norm=10.0)
    """

    _extras = {**_ADAPTIVE, "bias_correction": True, "max_weight_norm": 65500.0}
    _defaults = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}

    def __init__(
        self,
        params: Params,
        lr: float | None = None,
        betas: tuple[float, float] | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        bias_correction: bool | None = None,
        loss_scaling: float | None = None,
        max_weight_norm: float | None = None,
        accum_type: torch.dtype | None = None,
        first_order_momentum_accum_type: torch.dtype | None = None,
        second_order_momentum_accum_type: torch.dtype | None = None,
    ) -> None:
        self._construct(locals())

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """CPU step of all parameters with gradients.

        Args:
            closure: computes the loss, and the gradients with it, first.

        Returns:
            The result of `closure`; `None` without one.
        """
        return step_of_each(self, closure, partial(lamb, bias_correction=self.bias_correction))  # type: ignore[attr-defined]
