"""The largest number of each window of images, where the first of several equal ones counts; and its gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from popxl.ops.kernels.kernel import Kernel
from popxl.ops.windows import Windows


@Kernel
def first_largest(function: Callable[[Any], Any], windows: Sequence[Windows], t: Any) -> tuple[Any, Any]:
    """The largest number of each window of the last axes, and where it is.

    Args:
        function: of images; gives both.
        windows: along each of these axes.
        t: the images.
    """
    return function(t)


@Kernel
def first_largest_gradient(function: Callable[[Any, Any], Any], windows: Sequence[Windows], g: Any, t: Any) -> Any:
    """The gradient with respect to the images, for the gradient `g` of the largest numbers.

    Args:
        function: of `g` and the images; gives it.
        windows: along each of the last axes.
        t: the images.
    """
    return function(g, t)
