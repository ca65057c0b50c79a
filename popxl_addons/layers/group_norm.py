"""Normalisation of groups of channels."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

import popxl
from popxl import initial, ops
from popxl.extend.arguments import check_type
from popxl.replica_grouping import Groups
from popxl_addons.layers._torch_layer import TorchLayer


class GroupNorm(TorchLayer):
    """``(x - mean) / sqrt(var + eps) * weight + bias`` with mean and variance of each sample's groups of channels.

    See also ``torch.nn.GroupNorm``. Variables, of the dtype of `x`: `weight` and `bias`, one number for each channel;
    ones and zeros.

    Args:
        num_groups: number of groups of adjacent channels.
        replica_grouping: grouping of the variables, or names of axes.
        eps: constant added to the variance.
        cache: see `Module`.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     facts, graph = GroupNorm(2).create_graph(popxl.TensorSpec((5, 4, 3), popxl.float32))
        >>> facts.weight.shape, facts.bias.shape
        ((4,), (4,))
    """

    _of_torch = {"weight": np.asarray, "bias": np.asarray}

    def __init__(
        self,
        num_groups: int,
        replica_grouping: Groups | None = None,
        eps: float = 1e-5,
        cache: Any = False,
    ):
        super().__init__(cache)
        self.num_groups = num_groups
        self.replica_grouping = replica_grouping
        self.eps = eps

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        """`x` of shape (N, C, ...), normalised."""
        check_type(x, popxl.Tensor, "GroupNorm: `x`", "a Tensor, such as of `popxl.constant`")
        if x.rank < 2:
            raise ValueError(f"GroupNorm: `x` has the shape {x.shape}; expected (N, C, ...).")
        weight = self.add_variable_input(
            "weight", partial(initial.ones, x.shape[1]), x.dtype, replica_grouping=self.replica_grouping
        )
        bias = self.add_variable_input(
            "bias", partial(initial.zeros, x.shape[1]), x.dtype, replica_grouping=self.replica_grouping
        )
        return ops.group_norm(x, weight, bias, self.num_groups, self.eps)
