"""The optimisers of poptorch: torch's SGD, Adam, AdamW and RMSprop with further hyperparameters, and LAMB.

On the CPU they are torch's. In a wrapped model their Python code is not run: `poptorch.program.updates` reads their
settings, and the program on the device updates the parameters. There an optimiser has its own state, which `state_dict`
reads and `load_state_dict` writes: `poptorch.base.optimizer`, the base class. `optimizer.state` shows it in PyTorch's
format, also for torch's optimisers; see `poptorch.run.mirrored`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from poptorch.base.optimizer import DeviceState, Optimizer, VariableAttributes

__all__ = ["LAMB", "SGD", "Adam", "AdamW", "Optimizer", "RMSprop", "VariableAttributes"]

_ADAPTIVE: dict[str, Any] = {
    "loss_scaling": 1.0,
    "accum_type": torch.float32,
    "first_order_momentum_accum_type": torch.float32,
    "second_order_momentum_accum_type": torch.float32,
}


Params = Iterable[Any]
Step = Callable[[torch.Tensor, torch.Tensor, Mapping[str, Any]], None]

for _class in (DeviceState, Optimizer, VariableAttributes):
    _class.__module__ = __name__  # the path that programs import, also in pickles


@torch.no_grad()
def _step_of_each(optimizer: torch.optim.Optimizer, closure: Callable[[], float] | None, step: Step) -> float | None:
    """Step every parameter with a gradient, after the closure; returns the closure's result."""
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                step(parameter, parameter.grad, group)
    return loss


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

    _own = {
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

    _own = {**_ADAPTIVE, "max_grad_norm": math.inf}

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

    _own = {**_ADAPTIVE, "max_grad_norm": math.inf, "bias_correction": True}

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

    _own = {**_ADAPTIVE, "use_tf_variant": False}

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
            return _step_of_each(self, closure, self._step)
        return _step_of_torch(self, closure)

    def _step(self, w: torch.Tensor, g: torch.Tensor, group: Mapping[str, Any]) -> None:
        kept = self.state[w]
        starts = {"step": 0, "square_avg": torch.ones_like(w), "grad_avg": torch.zeros_like(w)}
        for name, start in {**starts, "momentum_buffer": torch.zeros_like(w)}.items():
            kept.setdefault(name, start)  # a device omits state that no hyperparameter needs
        kept["step"] += 1
        d = (-g if group["maximize"] else g) + group["weight_decay"] * w
        variance = kept["square_avg"].lerp_(d * d, 1 - group["alpha"])
        if group["centered"]:
            mean = kept["grad_avg"].lerp_(d, 1 - group["alpha"])
            variance = (variance - mean * mean).clamp(min=0)
        q = group["lr"] * d / (variance + group["eps"]).sqrt()
        w -= kept["momentum_buffer"].mul_(group["momentum"]).add_(q)


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

    _own = {**_ADAPTIVE, "bias_correction": True, "max_weight_norm": 65500.0}
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
        return _step_of_each(self, closure, self._step)

    def _step(self, w: torch.Tensor, g: torch.Tensor, group: Mapping[str, Any]) -> None:
        g = -g if group.get("maximize") else g
        kept = self.state[w]
        if not kept:
            kept.update(step=0, exp_avg=torch.zeros_like(w), exp_avg_sq=torch.zeros_like(w))
        kept["step"] += 1
        corrections = (1.0, 1.0)
        for beta, name, value in zip(group["betas"], ("exp_avg", "exp_avg_sq"), (g, g * g), strict=True):
            kept[name].lerp_(value, 1 - beta)
        if self.bias_correction:  # type: ignore[attr-defined]
            corrections = tuple(1 - beta ** kept["step"] for beta in group["betas"])
        first, second = kept["exp_avg"] / corrections[0], kept["exp_avg_sq"] / corrections[1]
        x = first / (second.sqrt() + group["eps"]) + group["weight_decay"] * w
        norm, length = w.norm().clamp(max=group["max_weight_norm"]), x.norm()
        ratio = norm / length if norm > 0 and length > 0 else 1.0
        w -= group["lr"] * ratio * x
