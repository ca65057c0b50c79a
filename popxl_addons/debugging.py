"""Printing from inside a model, controlled by the environment variable ``MODEL_LOG_LEVEL``.

The variable is read once, when this module is imported: ``TRACE``, ``DEBUG``, ``INFO`` (the default) or ``WARN``.
Prints below that level are not added to the program.
"""

from __future__ import annotations

import os
from typing import Any, Literal

import popxl
from popxl import ops

__all__ = ["print_tensor", "print_text"]

LEVELS_TYPE = Literal["TRACE", "DEBUG", "INFO", "WARN"]
LEVELS: dict[str, int] = {"TRACE": 0, "DEBUG": 1, "INFO": 2, "WARN": 3}

MODEL_LOG_LEVEL = os.environ.get("MODEL_LOG_LEVEL", "INFO")
if MODEL_LOG_LEVEL not in LEVELS:
    raise KeyError(f"The environment variable MODEL_LOG_LEVEL is {MODEL_LOG_LEVEL!r}; expected one of {list(LEVELS)}.")
MODEL_LOG_LEVEL_VAL = LEVELS[MODEL_LOG_LEVEL]


def print_tensor(t: popxl.Tensor, *args: Any, level: LEVELS_TYPE = "DEBUG", **kwargs: Any) -> popxl.Tensor:
    """Call `popxl.ops.print_tensor` if the environment enables `level`; otherwise return `t`.

    Args:
        t: tensor of any shape.
        *args, **kwargs: further arguments of `popxl.ops.print_tensor`, the title first.
        level: printed if ``MODEL_LOG_LEVEL`` is this or lower.

    Raises:
        KeyError: for an unknown `level`.

    Example:
        >>> with popxl.Ir().main_graph as main:
        ...     x = print_tensor(popxl.variable([1.0, 2.0], name="x"), "activations", level="WARN")
        >>> [op.op_type for op in main.ops]
        ['PrintTensor']
    """
    return ops.print_tensor(t, *args, **kwargs) if _is_level_enabled(level) else t


def print_text(text: str, num: popxl.Tensor | None = None, level: LEVELS_TYPE = "DEBUG") -> None:
    """Print `text` and tensor `num` at run time, if the environment enables `level`.

    Without a tensor an empty one, ``[]``, follows. Raises as `print_tensor` does.

    Example:
        >>> with popxl.Ir().main_graph as main:
        ...     print_text("backward starts", level="WARN")
        >>> [op.op_type for op in main.ops]
        ['PrintTensor']
    """
    if _is_level_enabled(level):
        ops.print_tensor(popxl.constant((), popxl.float32) if num is None else num, title=text)


def _is_level_enabled(level: str) -> bool:
    if level not in LEVELS:
        raise KeyError(f"`level` is {level!r}; expected one of {list(LEVELS)}.")
    return MODEL_LOG_LEVEL_VAL <= LEVELS[level]
