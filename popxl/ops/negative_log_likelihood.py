"""The losses of `popxl.ops.nn`, under the path that programs import them from."""

from popxl.ops.nn import REDUCTION_TYPE, nll_loss, nll_loss_with_softmax_grad

REDUCTION_MAP: dict[str, str] = {"mean": "mean", "sum": "sum", "none": "none"}
"""The reductions of a loss, by name."""

__all__ = ["REDUCTION_MAP", "REDUCTION_TYPE", "nll_loss", "nll_loss_with_softmax_grad"]
