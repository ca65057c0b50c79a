"""The largest element of each window of images, the first of several equal ones; and its gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from popxl.ops.kernels.kernel import Kernel
from popxl.ops.windows import Windows


@Kernel
def first_largest(function: Callable[[Any], Any], windows: Sequence[Windows], t: Any) -> tuple[Any, Any]:
    """Maximum of each window over the last axes, with its first position.

    Args:
        function: function of images; returns both.
        windows: windows along each of these axes.
    """
    return function(t)


@Kernel
def first_largest_gradient(function: Callable[[Any, Any], Any], windows: Sequence[Windows], g: Any, t: Any) -> Any:
    """Image gradient, given the gradient `g` of window maxima.

    Args:
        function: function of `g` and the images; returns the gradient.
        windows: along each of the last axes.
    """
    return function(g, t)
