"""Names of `popart` for existing programs: errors to catch, the version, devices, and the log.

Only for programs: `popxl`, `runtime` and `popxl_addons` do not import this package. New programs use `popxl.errors`,
and describe devices to `popxl.Session` in words.

Example:
    >>> import popart
    >>> try:
    ...     session = popxl.Session(ir, "ipu_hw")
    ... except popart.popart_exception as error:
    ...     print(error)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import IntEnum

import popxl
from popxl.base.log import Logger
from popxl.errors import (
    ApplicationRuntimeError,
    DeviceError,
    DeviceRuntimeError,
    PopxlError,
    PopxlInternalError,
    PopxlRuntimeError,
)
from popxl.program import debug_info
from runtime.targets.devices import (
    OFFLINE_DEVICE,
    Device,
    DeviceCount,
    DeviceType,
    all_devices,
    cpu_device,
    hardware_device,
    model_device,
    offline_device,
)

__all__ = [
    "AccumulateOuterFragmentSchedule",
    "BatchSerializationBatchSchedule",
    "BatchSerializationTransformContext",
    "DeviceInfo",
    "DeviceManager",
    "DeviceType",
    "RecomputationType",
    "SubgraphCopyingStrategy",
    "SyntheticDataMode",
    "VirtualGraphMode",
    "closePoplarDebugInfo",
    "getLogger",
    "initializePoplarDebugInfo",
    "poplar_application_runtime_error",
    "poplar_exception",
    "poplar_runtime_error",
    "poplibs_exception",
    "popart_exception",
    "popart_internal_exception",
    "popart_runtime_error",
    "versionString",
]

# Errors -------------------------------------------------------------------------------------------------------------

popart_exception = PopxlError
popart_internal_exception = PopxlInternalError
popart_runtime_error = PopxlRuntimeError
poplibs_exception = PopxlError  # errors of the device's libraries are raised when the program is built

poplar_exception = DeviceError
poplar_runtime_error = DeviceRuntimeError
poplar_application_runtime_error = ApplicationRuntimeError


def versionString() -> str:
    """Version string of popxl, in place of popart's.

    Example:
        >>> print(f"Running on popart {popart.versionString()}")
    """
    return f"popxl-jax {popxl.__version__}"


# The log ------------------------------------------------------------------------------------------------------------


def getLogger(name: str = "all") -> Logger:
    """Logger of one module, or of all, with PopART's levels and format.

    Args:
        name: the module: `"session"` and `"devicex"` are ours; `"all"` stands for every one.

    Example:
        >>> popart.getLogger().setLevel("DEBUG")
        >>> popart.getLogger("session").info("Here we go.")
    """
    return Logger(name)


def initializePoplarDebugInfo(fileName: str | os.PathLike[str], format: str = "json") -> None:
    """Record the contents of programs, and the lines that made them, until `closePoplarDebugInfo`.

    Args:
        fileName: the file, a JSON object. Under `"contexts"` it has a record for each Ir, tensor, and call that made
            ops: its `"api"`, the ids of its `"inputs"` and `"outputs"`, and its `"location"`, in which `"fileName"` and
            `"functionName"` are numbers of entries of the `"stringTable"`.
        format: `"json"`.

    Raises:
        ValueError: for another format.

    Example:
        >>> popart.initializePoplarDebugInfo("debug.json", "json")
        >>> with popxl.Ir().main_graph:
        ...     y = popxl.variable(1) + 1
        >>> popart.closePoplarDebugInfo()
    """
    debug_info.open_file(fileName, format)


def closePoplarDebugInfo() -> None:
    """Write the debug file begun by `initializePoplarDebugInfo`, if any.

    Example:
        >>> popart.closePoplarDebugInfo()
    """
    debug_info.close()


# Devices ------------------------------------------------------------------------------------------------------------

DeviceInfo = Device


class DeviceManager:
    """Device lookup for sessions on a specific device.

    Example:
        >>> device = popart.DeviceManager().createIpuModelDevice({"numIPUs": 2})
        >>> with popxl.Session(ir, device) as session:
        ...     outputs = session.run(inputs)
    """

    def createCpuDevice(self) -> DeviceInfo:
        """Single CPU device; unattached."""
        return cpu_device()

    def createIpuModelDevice(self, options: Mapping[str, object] | None = None) -> DeviceInfo:
        """CPU device representing IPUs; unattached.

        Args:
            options: `numIPUs` is the number of IPUs, 1 by default. Other properties of an IPU have no effect here.
        """
        return model_device(DeviceCount(int(str((options or {}).get("numIPUs", 1)))))

    def createOfflineIPUDevice(self, options: Mapping[str, object] | None = None) -> DeviceInfo:
        """Offline target: sessions compile, without running.

        Args:
            options: `target` says which, as `popxl.Target` does: "tpu v5e:2x2"; by default, the environment variable
                `POPXL_OFFLINE_DEVICE` does. `numIPUs` says how many of its chips, by default all.

        Raises:
            ValueError: if nothing says which, or it has fewer chips.
        """
        described = (options or {}).get("target") or os.environ.get(OFFLINE_DEVICE)
        if not described:
            raise ValueError(
                "DeviceManager.createOfflineIPUDevice: nothing says which machine to compile for. Pass it, "
                f"`{{'target': 'tpu v5e:4x4'}}`, or set the environment variable {OFFLINE_DEVICE}."
            )
        target = popxl.Target(str(described))
        count = int(str((options or {}).get("numIPUs", target.count)))
        if not 1 <= count <= target.count:
            raise ValueError(
                f"DeviceManager.createOfflineIPUDevice: `numIPUs` is {count}; {target} has {target.count} chips."
            )
        return offline_device(target, DeviceCount(count))

    def acquireAvailableDevice(self, numIpus: int = 1) -> DeviceInfo:
        """Best accelerators visible to JAX, else the CPU; attached.

        Args:
            numIpus: number of IPUs. If there are fewer, one of them represents all.
        """
        device = hardware_device(DeviceCount(numIpus))
        device.attach()
        return device

    def enumerateDevices(self) -> list[DeviceInfo]:
        """Best accelerators visible to JAX, else CPU devices, one by one; unattached."""
        return all_devices()


# Values of session options ------------------------------------------------------------------------------------------
#
# Values for `options._Popart.set` in PyTorch programs. Their options decide speed and memory on IPUs; here only
# `RecomputationType` has an effect.


class AccumulateOuterFragmentSchedule(IntEnum):
    """Schedule of the ops after gradient accumulation."""

    Scheduler = 0
    Serial = 1
    OverlapCycleOptimized = 2
    OverlapMemoryOptimized = 3


class BatchSerializationBatchSchedule(IntEnum):
    """Schedule of a serialised batch's parts."""

    Scheduler = 0
    Isomorphic = 1
    OverlapOnIo = 2
    OverlapOnCompute = 3


class BatchSerializationTransformContext(IntEnum):
    """Position of batch serialisation in the sequence of transforms."""

    Fwd = 0
    Bwd = 1
    Fwd_Bwd = 2


class RecomputationType(IntEnum):
    """Kind of recomputation: activations that the backward pass recomputes."""

    NoRecompute = 0
    Standard = 1
    NormOnly = 2
    Pipeline = 3
    RecomputeAll = 4


class SubgraphCopyingStrategy(IntEnum):
    """Time of the copies of inputs and outputs of called graphs."""

    OnEnterAndExit = 0
    JustInTime = 1


class SyntheticDataMode(IntEnum):
    """Kind of data generated on the device. Only `poptorch.Options.enableSyntheticData` has an effect."""

    Off = 0
    Zeros = 1
    RandomNormal = 2
    RandomUniform = 3


class VirtualGraphMode(IntEnum):
    """Assignment of ops to IPUs."""

    Off = 0
    Manual = 1
    Auto = 2
    ExecutionPhases = 3
