"""Which device a program runs on."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from popxl.aliasing import reachable
from popxl.ir import Ir


@dataclass(frozen=True)
class Device:
    """A device that a session runs on.

    Attributes:
        name: what the user asked for.
        jax_device: the JAX device.
    """

    name: str
    jax_device: jax.Device

    def __str__(self) -> str:
        return f"{self.name} ({self.jax_device})"


def find_device(description: str | Device, ir: Ir) -> Device:
    """The device for a description, checked against what the Ir needs.

    Args:
        description: `"cpu"`; `"ipu_model"`, which is the CPU too; `"ipu_hw"`, the best accelerator that JAX sees, else
            the CPU; or a device found before.
        ir: the program.

    Raises:
        ValueError: for another description, or if `"cpu"` would have to be several devices.
        NotImplementedError: if the program has several replicas.
    """
    if ir.replication_factor > 1:
        raise NotImplementedError(
            f"Session: {ir!r} has {ir.replication_factor} replicas; replicated programs cannot be run yet. "
            "Build the Ir with replication=1."
        )
    if isinstance(description, Device):
        return description
    if description == "cpu" and devices_needed(ir) > 1:
        raise ValueError(
            f"Session: the program is placed on {devices_needed(ir)} devices, and 'cpu' is a single one. Use "
            "'ipu_model' or 'ipu_hw'."
        )
    if description in ("cpu", "ipu_model"):
        return Device(description, jax.devices("cpu")[0])
    if description == "ipu_hw":
        return Device(description, jax.devices()[0])
    raise ValueError(
        f"Session: the device {description!r} is unknown; expected 'cpu', 'ipu_model', 'ipu_hw' or a device object."
    )


def devices_needed(ir: Ir) -> int:
    """Number of devices that the program is placed on: a power of two."""
    highest = max((op.ipu or 0 for graph in reachable(ir.main_graph) for op in graph.ops), default=0)
    return 1 << ((highest + 1) * ir.instance_replication_factor - 1).bit_length()
