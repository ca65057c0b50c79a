"""Errors and warnings about access to gradients, which stay in the program of a wrapped model."""

from __future__ import annotations

import torch

from poptorch.base.logging_ import Warned
from poptorch.errors import Error, createPoptorchError

_CLIPPING = "poptorch.optim.AdamW(parameters, lr=0.001, max_grad_norm=1.0)"


class GradientAccess:
    """Checks of gradient hooks and reads in a module.

    Attributes:
        has_run: whether the device has run, so that there have been gradients.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        modules = list(torch.nn.Module.modules(module))
        self._hooks = [hooks for each in modules for hooks in (each._backward_hooks, each._backward_pre_hooks)]
        self._warned = Warned()
        self.has_run = False

    def check_hooks(self) -> None:
        """Raise an `Error` if a module has gradient hooks."""
        if any(self._hooks):
            raise hook_problem("A module of the model")

    def warn(self, reader: str) -> None:
        """Warn code that reads `p.grad`, which is `None`, about accessing gradients.

        Args:
            reader: name of the Python module that reads it.

        Raises:
            Error: if it is a function of PyTorch that changes gradients.
        """
        if self.has_run and reader == torch.nn.utils.clip_grad.__name__:
            raise createPoptorchError(
                "The gradients of a wrapped model cannot be clipped after its call: they stay in its program, which "
                f"has made the step of the optimizer, too. Have the optimizer clip, with `max_grad_norm`: {_CLIPPING}."
            )
        if self.has_run and reader.partition(".")[0] not in ("torch", "poptorch"):
            self._warned.once(
                "gradients",
                "`grad` of a parameter is None: gradients of a wrapped model stay in its program, which makes the step "
                "of the optimizer, too. To look at one, name it before the model is wrapped, "
                '`options.anchorTensor("g", "Gradient___<parameter>")`, and read `model.getAnchoredTensor("g")`. To '
                "clip them, `%s`.",
                _CLIPPING,
            )


def hook_problem(what: str) -> Error:
    """Create the error for gradient hooks on trained models."""
    return createPoptorchError(
        f"{what} has hooks on gradients (`register_hook`, `register_full_backward_hook`, ...). They would have no "
        "effect in a wrapped model, which is one program, backward pass included. Write what they do into `forward`: "
        "`x.register_hook(lambda g: 0.5 * g)` returns another gradient, made of `g` and of what there was before `x` "
        "is read; `x.detach()` stops it. To look at one, "
        'use `options.anchorTensor("g", "Gradient___<parameter>")`; to clip them, '
        f"`{_CLIPPING}`. For runs of the module without its wrapper, register hooks after `destroy()`."
    )
