"""Recomputation on CPUs, where XLA drops optimization barriers before it merges equal computations."""

from __future__ import annotations

from typing import Any

from runtime.fake_dependency import with_fake_dependency


def available_after(value: Any, other: Any) -> Any:
    """`value`, unchanged, with a fake dependency on the first element of `other`, if it has one."""
    return value if not other.size else with_fake_dependency(value, other[(0,) * other.ndim] != 0)
