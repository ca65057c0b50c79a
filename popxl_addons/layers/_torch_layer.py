"""`TorchLayer`: layers that take the values of their variables from a layer of torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np

import popxl
from popxl_addons.module import Module
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.utils import WeightsDict

if TYPE_CHECKING:
    import torch


class TorchLayer(Module):
    """A layer whose variables are the parameters of a layer of torch, under the same names."""

    _of_torch: ClassVar[Mapping[str, Callable[[np.ndarray], np.ndarray]]] = {}
    """For each parameter, the function that converts torch's layout to that of the variable."""

    @classmethod
    def torch_mapping(
        cls, variables: NamedTensors, nn_layer: torch.nn.Module, dtype: popxl.dtype = popxl.float32
    ) -> WeightsDict:
        """Data for the layer's variables, as `dtype`, from the layer of torch that the class names.

        Parameters that `variables` lacks are left out, such as the bias of a layer without one.

        Raises:
            ValueError: if the layer of torch has no such parameter, or `dtype` or the shapes are not those of the
                variables.
        """
        weights = WeightsDict()
        for name, arranged in cls._of_torch.items():
            if name not in variables:
                continue
            parameter = getattr(nn_layer, name, None)
            if parameter is None:
                raise ValueError(f"torch_mapping: the variables have a `{name}`, but {nn_layer!r} has none.")
            weights[variables[name]] = np.ascontiguousarray(arranged(popxl.utils.to_numpy(parameter, dtype)))
        return weights
