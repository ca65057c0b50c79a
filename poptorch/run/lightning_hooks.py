"""Warnings about hooks of Lightning that lie between a loss and the step of the optimizer, which are one program."""

from __future__ import annotations

from functools import cache

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from poptorch.base.logging_ import logger

_NEVER_CALLED = ("on_before_backward", "backward", "on_after_backward", "configure_gradient_clipping")


def warn_about_hooks(trainer: Trainer, module: LightningModule) -> None:
    """Name each hook that the module or a callback defines and that is never called, once for each class."""
    for owner, base in ((module, LightningModule), *((each, Callback) for each in trainer.callbacks)):
        for name in _NEVER_CALLED:
            if hasattr(base, name) and is_overridden(name, owner, base):
                _warn_about_hook(f"{type(owner).__qualname__}.{name}")


@cache
def _warn_about_hook(name: str) -> None:
    logger.warning(
        "%s is never called: the loss, its gradient and the step of the optimizer are one program. Clip gradients "
        "by an optimizer of poptorch.optim, with max_grad_norm; look at losses and weights in `on_train_batch_end`.",
        name,
    )


@cache
def warn_about_closure(name: str) -> None:
    """Warn once about an `optimizer_step` that runs the closure alone, as one does to accumulate gradients by hand."""
    logger.warning(
        "%s.optimizer_step calls its closure without a step of the optimizer. Both are one program here, which has "
        "updated the weights. To accumulate gradients, set `accumulate_grad_batches`.",
        name,
    )
