"""Adam with decoupled weight decay, as a graph that updates one variable."""

import math
from functools import partial
from typing import Any

import popxl
from popxl import initial, ops
from popxl.extend.ops import cast_if_needed, factor
from popxl.replica_grouping import Groups
from popxl_addons.module import Module
from popxl_addons.optimizers.steps import check_floating

__all__ = ["AdamOptimizerStep"]


class AdamOptimizerStep(Module):
    """In-place AdamW step on one variable. Accepts `Module` arguments such as ``cache=True``.

    See also ``torch.optim.AdamW``, and "Decoupled Weight Decay Regularization" (Loshchilov and Hutter, 2019).

    Example:
        >>> with popxl.Ir().main_graph, popxl.in_sequence():
        ...     w, dw = popxl.variable([1.0], name="w"), popxl.constant([0.5])
        ...     facts, step = AdamOptimizerStep(cache=True).create_graph(w, dw, lr=0.1)
        ...     step.bind(facts.init("w_state")).call(w, dw)
        ()
        >>> facts.keys()
        ['first_order', 'second_order', 'step']
    """

    # No deferred annotations in this file: `TensorByRef` is read from them.
    @popxl.in_sequence()
    def build(
        self,
        var: popxl.TensorByRef,
        grad: popxl.Tensor,
        replica_grouping: Groups | None = None,
        *,
        lr: float | popxl.Tensor,
        beta1: float | popxl.Tensor = 0.9,
        beta2: float | popxl.Tensor = 0.999,
        eps: float | popxl.Tensor = 1e-5,
        weight_decay: float | popxl.Tensor = 1e-2,
        first_order_dtype: popxl.dtype = popxl.float16,
        bias_correction: bool = True,
        loss_scaling: float | popxl.Tensor = 1,
        global_norm: popxl.Tensor | None = None,
        global_norm_max: float | popxl.Tensor | None = None,
        group_axis: int | None = None,
    ) -> None:
        """With g the gradient in true units, and m and v the state:

            m ← beta1 m + (1 - beta1) g,    v ← beta2 v + (1 - beta2) g²,    t ← t + 1
            u = m / (1 - beta1ᵗ) / (√(v / (1 - beta2ᵗ)) + eps) + weight_decay var
            var ← var - lr u

        Factors are numbers, or tensors of one element; given to `create_graph` as tensors or specs they become inputs,
        in this order after `grad`.

        Args:
            var: variable, or one replica's shard of it: then the state is sharded too.
            grad: gradient of the variable, of the same shape; its dtype may differ.
            replica_grouping: grouping of the variable, for the state; or names of axes.
            lr: the learning rate.
            beta1, beta2: decay rates of m and v.
            eps: constant added to the root of v.
            weight_decay: see above; for the number 0 the variable is not read.
            first_order_dtype: dtype of m. v and t are float32.
            bias_correction: whether m and v are divided as above; otherwise there is no t.
            loss_scaling: factor of the loss: `grad` is divided by it.
            global_norm: the norm of all gradients, in true units. Where it exceeds `global_norm_max` the gradient is
                scaled down, to that norm.
            global_norm_max: see above.
            group_axis: group axis of the variable, for the state.

        Raises:
            ValueError: if the variable or the first moment is not of floating point numbers.
            AssertionError: if `global_norm` is given without `global_norm_max`.
        """
        if global_norm is not None and global_norm_max is None:
            raise AssertionError(
                "AdamOptimizerStep: `global_norm` is given without `global_norm_max`; pass the norm to clip to."
            )
        check_floating(var.dtype, "AdamOptimizerStep: the dtype of `var`")
        check_floating(first_order_dtype, "AdamOptimizerStep: `first_order_dtype`")
        groups: dict[str, Any] = {"replica_grouping": replica_grouping, "group_axis": group_axis}
        first_order = self._state("first_order", var, first_order_dtype, groups)
        second_order = self._state("second_order", var, popxl.float32, groups)
        step = (
            self.add_variable_input("step", partial(initial.zeros, ()), popxl.float32, by_ref=True)
            if bias_correction
            else None
        )
        grad = _unscaled_gradient(grad, loss_scaling, global_norm, global_norm_max)
        ops.var_updates.accumulate_moving_average_(first_order, grad, beta1)
        ops.var_updates.accumulate_moving_average_square_(second_order, grad, beta2)
        update = ops.var_updates.adam_updater(
            first_order, second_order, var, step, weight_decay, beta1=beta1, beta2=beta2, epsilon=eps
        )
        ops.scaled_add_(var, update, b=-factor(lr, "AdamOptimizerStep: `lr`"))

    def _state(self, name: str, var: popxl.Tensor, dtype: popxl.dtype, groups: dict[str, Any]) -> popxl.Tensor:
        """Zeros like `var`."""
        if not var.meta_shape:
            return self.add_variable_input(name, partial(initial.zeros, var.shape), dtype, by_ref=True, **groups)
        return self.add_replica_sharded_variable_input(
            name,
            partial(initial.zeros, var.meta_shape),
            dtype,
            by_ref=True,
            shard_over=math.ceil(math.prod(var.meta_shape) / math.prod(var.shape)),
            **groups,
        )


def _unscaled_gradient(
    grad: popxl.Tensor,
    loss_scaling: float | popxl.Tensor,
    global_norm: popxl.Tensor | None,
    global_norm_max: float | popxl.Tensor | None,
) -> popxl.Tensor:
    """Gradient without loss scaling, clipped by global norm; unchanged if neither applies."""
    scale = 1 / _factor(loss_scaling, "loss_scaling")
    if global_norm is not None:
        limit = _factor(global_norm_max, "global_norm_max")
        limit = limit if isinstance(limit, popxl.Tensor) else popxl.constant(limit, popxl.float32)
        scale = scale * (limit / ops.maximum(_factor(global_norm, "global_norm"), limit))
    return grad if scale == 1 else cast_if_needed(grad, popxl.float32) * scale


def _factor(value: Any, name: str) -> Any:
    """Convert numbers to float, tensors to float32."""
    value = factor(value, f"AdamOptimizerStep: `{name}`")
    return cast_if_needed(value, popxl.float32) if isinstance(value, popxl.Tensor) else value
