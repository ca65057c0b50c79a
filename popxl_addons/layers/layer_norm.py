"""Normalisation over the last axis."""

from __future__ import annotations

from functools import partial

import numpy as np

import popxl
from popxl import initial, ops
from popxl.extend.arguments import check_type
from popxl_addons.layers._torch_layer import TorchLayer


class LayerNorm(TorchLayer):
    """``(x - mean) / sqrt(var + eps) * weight + bias``, over the last axis.

    See also ``torch.nn.LayerNorm``, from which `torch_mapping` flattens parameters over several axes.

    Variables, of the dtype of `x`: `weight` and `bias`, of the length of the last axis; ones and zeros.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     facts, graph = LayerNorm().create_graph(popxl.TensorSpec((2, 5, 4), popxl.float32))
        >>> facts.weight.shape, facts.bias.shape
        ((4,), (4,))
    """

    _of_torch = {"weight": np.ravel, "bias": np.ravel}

    def build(self, x: popxl.Tensor, eps: float = 1e-5) -> popxl.Tensor:
        """`x` of shape (..., C), normalised. `ValueError` for a scalar."""
        check_type(x, popxl.Tensor, "LayerNorm: `x`", "a Tensor, such as of `popxl.constant`")
        if not x.rank:
            raise ValueError("LayerNorm: `x` is a scalar; expected a tensor with an axis to normalise over.")
        weight = self.add_variable_input("weight", partial(initial.ones, x.shape[-1]), x.dtype)
        bias = self.add_variable_input("bias", partial(initial.zeros, x.shape[-1]), x.dtype)
        if x.rank == 2:
            return ops.layer_norm(x, weight, bias, eps)
        return ops.layer_norm(x.reshape((-1, x.shape[-1])), weight, bias, eps).reshape(x.shape)
