"""`Axes`: names for the dimensions along which replicas are arranged, and the groups of replicas along them.

Replicas are numbered in row-major order: neighbours along the last axis are 1 apart, along the one before it as many as
the last axis has. So a group along adjacent axes is strided.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Final, Literal

from popxl.values.shapes import integer

IPUS: Final = "ipus"
"""Size of the axis along which the IPUs of a replica lie."""


@dataclass(frozen=True)
class Axes:
    """The axes of replicas, the first one the outermost.

    Attributes:
        sizes: name of each axis, and number of replicas along it.
        ipus: name of the axis of the IPUs of a replica, if it has a place among these, and number of axes before it.

    Example:
        >>> axes = Axes.from_mapping({"data": 2, "tensor": 3})
        >>> axes.count, axes.assignment(("tensor",)), axes.strided(("tensor",))
        (6, [0, 0, 0, 1, 1, 1], (1, 3))
    """

    sizes: tuple[tuple[str, int], ...]
    ipus: tuple[str, int] | None = None

    @classmethod
    def from_mapping(cls, sizes: Any) -> Axes:
        """The axes of a mapping.

        Raises:
            TypeError: if it is not a mapping of names to integers.
            ValueError: if a name is empty or no word, a size is below 1, or two axes are of the IPUs.
        """
        if not isinstance(sizes, Mapping):
            raise TypeError(
                f"Ir: `axes` must be a dictionary such as {{'data': 16, 'tensor': 8}}; got {sizes!r} "
                f"({type(sizes).__name__})."
            )
        named_sizes: list[tuple[str, int]] = []
        ipus = None
        for name, size in sizes.items():
            if not isinstance(name, str):
                raise TypeError(f"Ir: `axes` must have names for keys; got {name!r} ({type(name).__name__}).")
            if not name.isidentifier():
                raise ValueError(f"Ir: an axis is called {name!r}; expected a word of letters, digits and underscores.")
            if isinstance(size, str) and size == IPUS:
                if ipus is not None:
                    raise ValueError(
                        f"Ir: the axes {ipus[0]!r} and {name!r} are both of the IPUs; expected one at most."
                    )
                ipus = name, len(named_sizes)
                continue
            count = integer(size, f"Ir: the size of the axis {name!r}")
            if count < 1:
                raise ValueError(f"Ir: the axis {name!r} has the size {count}; expected 1 or more.")
            named_sizes.append((name, count))
        return cls(tuple(named_sizes), ipus)

    def __str__(self) -> str:
        return " × ".join(f"{name} {size}" for name, size in self.sizes)

    @property
    def mapping(self) -> dict[str, int | Literal["ipus"]]:
        """Sizes by name, as for `from_mapping`."""
        sizes: list[tuple[str, int | Literal["ipus"]]] = [*self.sizes]
        if self.ipus is not None:
            name, position = self.ipus
            sizes.insert(position, (name, IPUS))
        return dict(sizes)

    @property
    def adjacent(self) -> int | None:
        """Number of replicas from an IPU of a replica to its next one; `None` if IPUs have no place among the axes."""
        return None if self.ipus is None else math.prod(size for _, size in self.sizes[self.ipus[1] :])

    @property
    def count(self) -> int:
        """Number of replicas."""
        return math.prod(size for _, size in self.sizes)

    def check(self, names: Sequence[str], what: str) -> None:
        """Raise `ValueError` for unknown or repeated axes."""
        axis_names = [name for name, _ in self.sizes]
        for name in names:
            if name not in axis_names:
                raise ValueError(f"{what}: there is no axis {name!r}; the Ir has {', '.join(map(repr, axis_names))}.")
        if len({*names}) < len(names):
            raise ValueError(f"{what}: an axis is named twice in {tuple(names)!r}; name each once.")
        if not names:
            raise ValueError(
                f"{what}: no axis is named. Name one or more of {', '.join(map(repr, axis_names))}; "
                "`ir.replica_grouping()` is all replicas together."
            )

    def assignment(self, names: Sequence[str]) -> list[int]:
        """Group number per replica; groups extend along the given axes."""
        ranges = [range(1 if name in names else size) for name, size in self.sizes]
        number = {coordinates: group for group, coordinates in enumerate(product(*ranges))}
        spans = [name not in names for name, _ in self.sizes]
        return [
            number[tuple(i * is_span for i, is_span in zip(position, spans, strict=True))]
            for position in self._positions()
        ]

    def strided(self, names: Sequence[str]) -> tuple[int, int] | None:
        """Stride and size of groups; `None` for irregular groups.

        Axes of size 1 are ignored, so they do not separate others.
        """
        sizes = [(name, size) for name, size in self.sizes if size > 1]
        chosen = [i for i, (name, _) in enumerate(sizes) if name in names]
        if not chosen:
            return 1, 1
        if chosen[-1] - chosen[0] >= len(chosen):
            return None
        return math.prod(size for _, size in sizes[chosen[-1] + 1 :]), math.prod(sizes[i][1] for i in chosen)

    @property
    def by_stride(self) -> dict[tuple[int, int], str]:
        """The axes with several replicas, by how far apart neighbours are along them, and how many there are."""
        strided = ((self.strided((name,)), name) for name, size in self.sizes if size > 1)
        return {stride_and_size: name for stride_and_size, name in strided if stride_and_size is not None}

    def strided_names(self, stride: int, group_size: int) -> tuple[str, ...]:
        """The axes along which replicas are together in strided groups; none, if there are no such axes. Axes of size 1
        are not among them."""
        named = [name for name, size in self.sizes if size > 1]
        runs = (tuple(named[i:j]) for i in range(len(named)) for j in range(i + 1, len(named) + 1))
        return next((run for run in runs if self.strided(run) == (stride, group_size)), ())

    def names(self, assignment: Sequence[int]) -> tuple[str, ...] | None:
        """Axes that span the groups of an assignment; `None` without match."""
        first = [
            position for position, group in zip(self._positions(), assignment, strict=True) if group == assignment[0]
        ]
        chosen = [name for i, (name, _) in enumerate(self.sizes) if any(position[i] for position in first)]
        return tuple(chosen) if self.assignment(chosen) == list(assignment) else None

    def _positions(self) -> Iterator[tuple[int, ...]]:
        """Replica coordinates, in replica order."""
        return product(*(range(size) for _, size in self.sizes))
