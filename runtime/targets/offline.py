"""`Target`: a machine to compile for, possibly absent; public as `popxl.Target`.

A session on a target compiles, and reports the needs of the program; it cannot run. `runtime.targets.compilers` has the
compilers, `runtime.targets.chip` the figures.
"""

from __future__ import annotations

import math
import os
import re
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from popxl.base.arguments import check_type
from runtime.targets import chip, compilers
from runtime.targets.chip import Chip, Gpu, Tpu

_DESCRIPTION = re.compile(r"(?P<kind>tpu|gpu) +(?P<name>[^:\s](?:[^:]*[^:\s])?)(?::(?P<layout>[0-9x]+))?")

FORMS = "'tpu v5e:4x4', 'gpu h100:8', 'gpu h100:16x4' or 'gpu my.json:8'"
"""Formats of machine descriptions, for errors."""


@dataclass(frozen=True)
class Target:
    """Offline compile target: chip kind and chip count. Hardware may be absent.

    Compiling needs the extra `tpu` or `gpu`, which install a compiler, and no such hardware.

    Args:
        description: `"tpu v5e:4x4"`, TPUs of a generation, and their topology; `"gpu h100:8"`, GPUs, and their number;
            `"gpu h100:16x4"`, hosts and the GPUs of each. Without a colon it is one chip.
        figures: published figures of a GPU that is not in the list, or a JSON file of them. The name in the description
            is then yours. A description may name the file itself: `"gpu my.json:8"`.

    Raises:
        ValueError: for an unknown description or chip.
        PopxlError: for a file that does not hold the figures of a GPU.

    Attributes:
        description: as passed.
        chip: figures of a chip, with their sources.

    Example:
        >>> target = popxl.Target("tpu v5e:2x2")
        >>> target.count, target.chip.name
        (4, 'TPU v5e')
        >>> session = popxl.Session(ir, target)  # popxl.Session(ir, "tpu v5e:2x2") is the same
        >>> print(session.report)
    """

    description: str
    figures: Gpu | str | os.PathLike[str] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        check_type(self.description, str, "Target: `description`", f"a string such as {FORMS}")
        match = _DESCRIPTION.fullmatch(self.description.strip())
        if match is None:
            raise ValueError(
                f"Target: {self.description!r} describes no machine; expected {FORMS}; or no target, for this machine."
            )
        if self.figures is not None and match["kind"] == "tpu":
            raise ValueError(f"Target: {self.description!r} are TPUs, whose figures are known; `figures` are of a GPU.")
        self.chip, self.count  # noqa: B018  # what is wrong with them is said now

    def __str__(self) -> str:
        return self.description

    @property
    def kind(self) -> str:
        """Chip kind: "tpu" or "gpu"."""
        return self._description_field("kind")

    @property
    def count(self) -> int:
        """Number of chips."""
        return math.prod(self.layout)

    @cached_property
    def layout(self) -> tuple[int, ...]:
        """Chip count along each dimension of a TPU slice; GPU count, or hosts and the GPUs of each."""
        text = self._description_field("layout")
        if isinstance(self.chip, Tpu):
            forms = [len(self.chip.host)]
            wanted = "x".join("abc"[: forms[0]]) + ", its chips along each dimension"
        else:
            forms, wanted = [1, 2], "a number, or hosts x GPUs of each,"
        sizes = tuple(int(size or 0) for size in text.split("x")) if text else (1,) * forms[0]
        if len(sizes) in forms and 0 not in sizes:
            return sizes
        raise ValueError(f"Target: in {self.description!r}, expected {wanted} after the colon; got {text!r}.")

    @cached_property
    def chip(self) -> Chip:
        """The figures of a chip."""
        name = self._description_field("name")
        if isinstance(self.figures, Gpu):
            return self.figures
        if self.figures is not None or name.endswith(".json"):
            return chip.load_figures(Gpu, name if self.figures is None else self.figures)
        kind = Tpu if self.kind == "tpu" else Gpu
        try:
            return chip.shipped(kind, name.lower())
        except KeyError:
            known = ", ".join(chip.names(kind))
            more = "" if kind is Tpu else ", or those of a JSON file: 'gpu my.json:8'"
            raise ValueError(
                f"Target: no figures are known of {self.kind} {name!r}; known are {known}{more}."
            ) from None

    @property
    def devices(self) -> tuple[jax.Device, ...]:
        """The target's chips as JAX devices. Loads the compiler.

        Raises:
            PopxlError: if it is not installed, or XLA knows no slice of this form.
        """
        return self.first(self.count)

    def first(self, count: int) -> tuple[jax.Device, ...]:
        """The first `count` chips, on a single host if possible."""
        if isinstance(self.chip, Tpu):
            whole, name = self._slice_shape(count), self._description_field("name").lower()
            return compilers.tpu_devices(name, whole, self.chip.host, self.chip.config)[:count]
        assert isinstance(self.chip, Gpu)
        per_host = self.layout[1] if len(self.layout) > 1 else min(self.count, self.chip.per_host)
        hosts, over = divmod(self.count, per_host)
        if over:
            raise ValueError(
                f"Target: {self.count} GPUs in {self.description!r}, and a host has {per_host}; expected a multiple, "
                "or hosts and the GPUs of each, such as 'gpu h100:3x4'."
            )
        if per_host > self.chip.per_host:
            raise ValueError(
                f"Target: {per_host} GPUs of each host in {self.description!r}, and a host of {self.chip.name} has "
                f"{self.chip.per_host} at most. Figures of your own may say otherwise: their field `per_host`."
            )
        name = re.sub(r"\W+", "_", f"{Path(self._description_field('name')).stem}_{hosts}x{per_host}")
        return compilers.gpu_devices(name, self.chip.for_xla(), hosts, per_host)[:count]

    def mesh(self, **axes: int) -> Mesh:
        """Mesh of the target's chips, for `jax.jit`, `jax.shard_map` and shardings of plain JAX functions.

        Args:
            axes: size of each axis, outermost first. Neighbours along the last one are neighbours in the machine.

        Raises:
            ValueError: if the sizes do not multiply to the number of chips.

        Example:
            >>> popxl.Target("gpu h100:8").mesh(data=4, tensor=2).axis_names
            ('data', 'tensor')
        """
        if math.prod(axes.values()) != self.count or not axes:
            raise ValueError(
                f"Target.mesh: the sizes of the axes must multiply to the {self.count} chips of {self.description!r}; "
                f"got {axes}."
            )
        devices = self.devices
        if self.kind == "tpu":
            return Mesh(mesh_utils.create_device_mesh((*axes.values(),), devices), (*axes,))
        return Mesh(np.asarray(devices).reshape((*axes.values(),)), (*axes,))

    def slice_of(self, count: int) -> int:
        """Size of the slice that contains the first `count` chips."""
        return math.prod(self._slice_shape(count))

    def _slice_shape(self, count: int) -> tuple[int, ...]:
        """Layout of the slice that contains `count` chips: one host's slice, if large enough."""
        if not isinstance(self.chip, Tpu):
            return self.layout
        of_a_host = tuple(map(min, self.layout, self.chip.host))
        return of_a_host if count < self.count and count <= math.prod(of_a_host) else self.layout

    def _description_field(self, name: str) -> str:
        """Field `name` of the description; "" if absent."""
        match = _DESCRIPTION.fullmatch(self.description.strip())
        assert match is not None
        return match[name] or ""


def is_target(description: str) -> bool:
    """Whether a description names a target: `"tpu v5e:4x4"`, unlike `"tpu"`, which means a local TPU."""
    return _DESCRIPTION.fullmatch(description.strip()) is not None
