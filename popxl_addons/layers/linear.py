"""A fully connected layer."""

from __future__ import annotations

from functools import partial

import numpy as np

import popxl
from popxl import initial
from popxl.replica_grouping import Groups
from popxl_addons.layers._torch_layer import TorchLayer
from popxl_addons.layers._values import drawn_weights


class Linear(TorchLayer):
    """``x @ weight + bias``, over the last axis of `x`. See also ``torch.nn.Linear``, whose weight is the transpose.

    Variables, of the dtype of `x`: `weight` of shape (in, out_features), a truncated normal distribution with the
    standard deviation 0.02; `bias` of shape (out_features,), zeros.

    Args:
        out_features: size of the last axis of the result.
        bias: whether to add a bias.
        replica_grouping: grouping of the variables, or names of axes.
        group_axis: axis of the weight that groups of replicas divide between them, if they do: 0 or 1; see
            `Variable.group_axis`. With 1 they divide the bias too.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     facts, graph = Linear(3).create_graph(popxl.TensorSpec((5, 4), popxl.float16))
        >>> facts.weight.shape, facts.bias.shape, facts.weight.dtype
        ((4, 3), (3,), popxl.dtypes.float16)
    """

    _of_torch = {"weight": np.transpose, "bias": np.asarray}

    def __init__(
        self,
        out_features: int,
        bias: bool = True,
        replica_grouping: Groups | None = None,
        group_axis: int | None = None,
    ):
        super().__init__()
        if group_axis not in (None, 0, 1):
            raise ValueError(
                f"{type(self).__name__}: `group_axis` is {group_axis!r}; expected 0 or 1, an axis of the weight (in, "
                "out_features), or None."
            )
        self.out_features = out_features
        self.bias = bias
        self.replica_grouping = replica_grouping
        self.group_axis = group_axis

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        """`x` of shape (..., in) to (..., out_features)."""
        return self._with_bias(x @ self._weight(x))

    def _weight(self, x: popxl.Tensor) -> popxl.Tensor:
        if not x.shape:
            raise ValueError(f"{type(self).__name__}: `x` is a scalar; expected a tensor of shape (..., in).")
        return self.add_variable_input(
            "weight",
            drawn_weights(type(self).__name__, x.dtype, x.shape[-1], self.out_features),
            x.dtype,
            replica_grouping=self.replica_grouping,
            group_axis=self.group_axis,
        )

    def _with_bias(self, y: popxl.Tensor) -> popxl.Tensor:
        if not self.bias:
            return y
        return y + self.add_variable_input(
            "bias",
            partial(initial.zeros, self.out_features),
            y.dtype,
            replica_grouping=self.replica_grouping,
            group_axis=0 if self.group_axis == 1 else None,
        )
