"""Which devices a program runs on."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

import jax

from popxl.aliasing import reachable
from popxl.ir import Ir

CPU_DEVICES = "POPXL_CPU_DEVICES"
"""Environment variable: how many devices the CPU is divided into, 8 by default. Replicas share them out."""


def ask_for_cpu_devices() -> None:
    """Have JAX divide the CPU into several devices, unless it runs already, or has been told how many to make.

    They cost next to nothing where they are not used, and JAX cannot be asked for them later.
    """
    by_flag = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if by_flag or jax.config.values["jax_num_cpu_devices"] != -1:
        return
    with contextlib.suppress(RuntimeError):  # JAX runs already
        jax.config.update("jax_num_cpu_devices", int(os.environ.get(CPU_DEVICES, "8")))


@dataclass(frozen=True)
class Device:
    """The device that a session runs on, which may be several of JAX's: one for each replica, if there are enough.

    Attributes:
        name: what the user asked for.
        jax_devices: the JAX devices.
    """

    name: str
    jax_devices: tuple[jax.Device, ...]

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(map(str, self.jax_devices))})"


def find_device(description: str | Device, ir: Ir) -> Device:
    """The device for a description, checked against what the Ir needs.

    Args:
        description: `"cpu"`; `"ipu_model"`, which is the CPU too; `"ipu_hw"`, the best accelerator that JAX sees, else
            the CPU; or a device found before.
        ir: the program.

    Raises:
        ValueError: for another description, or if `"cpu"` would have to be several devices.
    """
    if isinstance(description, Device):
        return description
    if description == "cpu" and devices_needed(ir) > 1:
        raise ValueError(
            f"Session: the program is placed on {devices_needed(ir)} devices, and 'cpu' is a single one. Use "
            "'ipu_model' or 'ipu_hw'."
        )
    if description in ("cpu", "ipu_model", "ipu_hw"):
        found = jax.devices() if description == "ipu_hw" else jax.devices("cpu")
        count = ir.instance_replication_factor
        return Device(description, tuple(found[: count if len(found) >= count else 1]))
    raise ValueError(
        f"Session: the device {description!r} is unknown; expected 'cpu', 'ipu_model', 'ipu_hw' or a device object."
    )


def devices_needed(ir: Ir) -> int:
    """Number of devices that the program is placed on: a power of two."""
    highest = max((op.ipu or 0 for graph in reachable(ir.main_graph) for op in graph.ops), default=0)
    return 1 << ((highest + 1) * ir.instance_replication_factor - 1).bit_length()


ask_for_cpu_devices()
