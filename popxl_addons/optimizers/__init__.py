"""Optimisers: functions that update all variables of a model; and a graph that updates one variable in place.

`schedules` has learning rates that change from step to step.
"""

from popxl_addons.optimizers import schedules
from popxl_addons.optimizers.adam import AdamOptimizerStep
from popxl_addons.optimizers.functional import adafactor, adamw, lion, sgd
from popxl_addons.optimizers.loss_scaling import DynamicLossScaling, LossScale
from popxl_addons.optimizers.of_optax import from_optax
from popxl_addons.optimizers.state_location import state_on
from popxl_addons.optimizers.steps import global_norm

__all__ = [
    "AdamOptimizerStep",
    "DynamicLossScaling",
    "LossScale",
    "adafactor",
    "adamw",
    "from_optax",
    "global_norm",
    "lion",
    "schedules",
    "sgd",
    "state_on",
]
