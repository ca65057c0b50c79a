"""Device selection."""

from __future__ import annotations

import popart
from poptorch.errors import createPoptorchError
from poptorch.options import Options
from poptorch.program.placement_checks import MAX_UNITS


def ipuHardwareIsAvailable(num_ipus: int = 1) -> bool:
    """Whether a device with this many units is available. A device always exists: JAX's best accelerator, else the CPU.

    One device stands for as many units as a program asks for, up to 64.

    Args:
        num_ipus: number of IPUs.
    """
    return 1 <= num_ipus <= MAX_UNITS


def ipuHardwareVersion() -> int:
    """The emulated hardware version: 2."""
    return 2


def chosen_device(options: Options) -> str | popart.DeviceInfo:
    """The device selected by options, for `popxl.Session`: a name, a device, or an offline target. `"ipu_model"` is the
    CPU, `"ipu_hw"` the best available device.

    Raises:
        poptorch.Error: if there is none with the number that they name.
    """
    if options.target is not None:
        return options.target
    if options.ipu_model:
        return "ipu_model"
    if options.ipu_id is None:
        return "ipu_hw"
    devices = popart.DeviceManager().enumerateDevices()
    if not 0 <= options.ipu_id < len(devices):
        raise createPoptorchError(
            f"useIpuId: there is no device {options.ipu_id}; there are {len(devices)}, numbered from 0: "
            f"{', '.join(map(str, devices))}."
        )
    return devices[options.ipu_id]
