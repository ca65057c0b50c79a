"""Joint planning of matrix products and those of their gradients: a setting of IPUs, without effect here.

XLA plans them all in any case. The functions exist for programs that call them, and change nothing in the program.
"""

from __future__ import annotations

import popxl

__all__ = ["disable_fc_pass", "enable_fc_pass"]


def disable_fc_pass(ir: popxl.Ir) -> None:
    """Plan matrix products separately. Without effect: numbers, memory and printed graphs stay the same.

    Example:
        >>> disable_fc_pass(popxl.Ir())
    """


def enable_fc_pass(ir: popxl.Ir) -> None:
    """Plan matrix products together with those of their gradients: the default. Without effect, as `disable_fc_pass`.

    Example:
        >>> enable_fc_pass(popxl.Ir())
    """
