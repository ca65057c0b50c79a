"""A fully connected layer with four bits for each number of the weight."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import popxl
from popxl import initial
from popxl.replica_grouping import Groups
from popxl_addons.layers.linear import Linear
from popxl_addons.named_tensors import NamedTensors
from popxl_addons.ops.group_quantize_decompress import (
    group_quantize_compress_numpy as group_quantize_compress_numpy,
)
from popxl_addons.ops.group_quantize_decompress import group_quantize_decompress
from popxl_addons.ops.group_quantize_decompress import (
    group_quantize_decompress_numpy as group_quantize_decompress_numpy,
)
from popxl_addons.utils import WeightsDict

if TYPE_CHECKING:
    import torch


class LinearGQ(Linear):
    """`Linear` with a group-quantised weight, which cannot be trained: gradients flow to `x` and the bias.

    Variables, all zeros until they are written (see `torch_mapping`): `weight_compressed`, in uint16, and in the dtype
    of `x` `weight_decompression_scale` and `weight_decompression_bias`, as `group_quantize_compress_numpy` makes them
    of a weight (in, out_features); and `bias`.

    Args:
        out_features, bias, replica_grouping: as for `Linear`.
        group_size: number of weight elements that share a scale: a positive multiple of 4 that divides the axis.
        dim: the axis of the weight that is divided into groups: -1 or 1 for out_features, 0 for in.

    Raises:
        ValueError: for an invalid `group_size` or `dim`.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     facts, graph = LinearGQ(8, group_size=4).create_graph(popxl.TensorSpec((5, 3), popxl.float16))
        >>> facts.weight_compressed.shape, facts.weight_decompression_scale.shape
        ((3, 2, 1), (3, 2, 1))
    """

    def __init__(
        self,
        out_features: int,
        bias: bool = True,
        replica_grouping: Groups | None = None,
        group_size: int = 0,
        dim: int = -1,
    ):
        super().__init__(out_features, bias, replica_grouping)
        if group_size < 4 or group_size % 4:
            raise ValueError(f"LinearGQ: `group_size` is {group_size}; expected a positive multiple of 4.")
        if dim not in (-1, 0, 1):
            raise ValueError(
                f"LinearGQ: `dim` is {dim}; expected an axis of the weight (in, out_features): -1, 0 or 1."
            )
        self.group_size = group_size
        self.dim = dim

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        """`x` of shape (..., in) to (..., out_features)."""
        rows, length = x.shape[-1], self.out_features
        if self.dim == 0:
            rows, length = length, rows
        if length % self.group_size:
            raise ValueError(
                f"LinearGQ: `group_size` is {self.group_size}; expected a divisor of {length}, the size of axis "
                f"{self.dim} of the weight ({x.shape[-1]}, {self.out_features})."
            )
        groups = length // self.group_size
        packed = self._zeros("weight_compressed", (rows, groups, self.group_size // 4), popxl.uint16)
        scale = self._zeros("weight_decompression_scale", (rows, groups, 1), x.dtype)
        bias = self._zeros("weight_decompression_bias", (rows, groups, 1), x.dtype)
        return self._with_bias(x @ group_quantize_decompress(packed, scale, bias, self.dim))

    def _zeros(self, name: str, shape: tuple[int, ...], dtype: popxl.dtype) -> popxl.Tensor:
        return self.add_variable_input(
            name, partial(initial.zeros, shape), dtype, replica_grouping=self.replica_grouping
        )

    @classmethod
    def torch_mapping(
        cls,
        variables: NamedTensors,
        nn_layer: torch.nn.Module,
        dtype: popxl.dtype = popxl.float32,
        group_size: int = 64,
        dim: int = -1,
    ) -> WeightsDict:
        """Data for the layer's variables from a ``torch.nn.Linear``, whose weight is compressed.

        `dtype` belongs to the bias, `group_size` and `dim` to the layer. `ValueError` for a mismatch of these or of the
        shapes with the variables, or a weight that cannot be compressed.
        """
        weight = popxl.utils.to_numpy(nn_layer.weight, popxl.float32).T
        packed, scale, bias = group_quantize_compress_numpy(weight, group_size, dim)
        weights = super().torch_mapping(variables, nn_layer, dtype)  # of the bias
        weights[variables.weight_compressed] = packed
        # In the dtype of the layer: float16 always holds them, and float32 does as well.
        for variable, column in {
            variables.weight_decompression_scale: scale,
            variables.weight_decompression_bias: bias,
        }.items():
            weights[variable] = column.astype(variable.dtype.as_numpy())
        return weights
