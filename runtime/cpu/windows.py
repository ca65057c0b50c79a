"""Windows of images, one axis after the other: on CPUs, XLA processes windows element by element."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from popxl.ops.pooling import Combining, over_windows
from popxl.ops.windows import Windows
from runtime.cpu.elements import spatial
from runtime.cpu.platform_dependent import if_platform_cpu


def over_windows_by_axes(combining: Combining, t: Any, windows: Sequence[Windows]) -> Any:
    """Reduce windows along one axis after another."""

    def by_axes(first: int, t: Any) -> Any:
        for axis, along in enumerate(windows, first):
            t = combining.along(t, axis, along)
        return t

    plain = partial(over_windows.plain, combining, windows=windows)
    return if_platform_cpu(partial(spatial, by_axes, len(windows)), plain)(t)
