"""`Program`: a random program that is built for any sizes of its axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import popxl

MESHES: tuple[Mapping[str, int], ...] = (
    {"data": 2},
    {"data": 4},
    {"tensor": 2},
    {"tensor": 4},
    {"data": 2, "tensor": 2},
    {"data": 2, "tensor": 4},
)
WEIGHTS = (6, 4, 3, 2, 6, 1)
"""How often each is drawn."""


@dataclass(frozen=True)
class Program:
    """A random program.

    Attributes:
        seed: that it is made of.
        axes: sizes of its axes.
        build: builds it for sizes of these axes; and with all updates by gradients multiplied by a factor.
    """

    seed: int
    axes: Mapping[str, int]
    build: Callable[..., popxl.Ir]
