"""Device selection for programs."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakSet

import jax

from popxl.base.arguments import check_type
from popxl.base.distributed import launched
from popxl.core.aliasing import reachable
from popxl.errors import PopxlError
from popxl.ir import Ir
from runtime import processes
from runtime.jax_private import warn_if_untested
from runtime.targets import chip, compilers
from runtime.targets.chip import Chip
from runtime.targets.offline import FORMS, Target, is_target

if TYPE_CHECKING:
    from runtime.program.store import VariableStore

CPU_DEVICES = "POPXL_CPU_DEVICES"
"""Environment variable: how many devices the CPU is divided into. By default as many as there are cores, and at most
`MOST_CPU_DEVICES`. Replicas share them out."""

MOST_CPU_DEVICES = 8

OFFLINE_DEVICE = "POPXL_OFFLINE_DEVICE"
"""Environment variable: the description of the device to use in place of the one that a program names."""

PLATFORMS = ("gpu", "cuda", "rocm", "tpu")
"""Kinds of hardware that may be named, as JAX names them."""


_defaults = {-1}
"""Numbers of CPU devices that this module has configured: the environment may change them, until JAX runs."""


def ask_for_cpu_devices(count: int | None = None) -> None:
    """Configure JAX to divide the CPU into several devices, unless JAX already runs or has a configured device count.

    JAX cannot be asked for them later. Up to the number of cores, unused devices cost next to nothing.
    With more, JAX starts a thread for each, and all work is divided among too many threads, even on one device.

    Args:
        count: number of devices, which overrides a number configured before; by default about the number of cores.
    """
    by_flag = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    if count is None:
        if jax.config.values["jax_num_cpu_devices"] not in _defaults:
            return
        count = -1 if by_flag else _wanted_cpu_devices()
        _defaults.add(count)
    with contextlib.suppress(RuntimeError):  # JAX runs already
        jax.config.update("jax_num_cpu_devices", count)


def _wanted_cpu_devices() -> int:
    """Number of CPU devices, from the environment or the core count."""
    wanted = os.environ.get(CPU_DEVICES)
    if wanted is None:
        return min(_cores(), MOST_CPU_DEVICES)
    if not (wanted.strip().isdecimal() and int(wanted) > 0):
        raise ValueError(f"The environment variable {CPU_DEVICES} is {wanted!r}; expected a whole number from 1 on.")
    return int(wanted)


def _cores() -> int:
    """Number of CPU cores available to this process."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class DeviceType(Enum):
    """Device kind of a description."""

    Cpu = "Cpu"
    IpuModel = "IpuModel"
    Ipu = "Ipu"
    OfflineIpu = "OfflineIpu"


@dataclass(frozen=True)
class DeviceCount:
    """Numbers of devices usable by a program. If there are too few, one represents all.

    Attributes:
        count: a device for each replica.
        ipus: number of IPUs that the devices represent; by default as many.
        best: a device for each IPU of each replica, if that is another number.
    """

    count: int = 1
    ipus: int | None = None
    best: int = 0

    @classmethod
    def for_program(cls, ir: Ir) -> DeviceCount:
        """Numbers for the replicas of a program that this process drives. It represents a power of two IPUs."""
        count = ir.instance_replication_factor
        used = {op.ipu or 0 for graph in reachable(ir.main_graph) for op in graph.ops}
        needed = (max(used, default=0) + 1) * count
        return cls(count, 1 << (needed - 1).bit_length(), count * len(used))

    @property
    def represented(self) -> int:
        """Number of IPUs that the devices represent."""
        return self.count if self.ipus is None else self.ipus

    def of_available(self, available: int) -> int:
        """`best` if as many devices are available, else `count`, else one."""
        return next((wanted for wanted in (self.best, self.count) if 0 < wanted <= available), 1)


class Device:
    """A session's device, which may comprise several JAX devices: one per IPU of each replica, if enough exist; else
    one per replica; else one for everything.

    A device is attached while a session is entered, or until it is detached if you attach it yourself: a session on an
    attached device can run at once.

    Args:
        name: description given by the user.
        jax_devices: JAX devices, of all processes of the program, in the order of the replicas.
        type: kind of device.
        numIpus: number of IPUs that it represents.
        id: number among its kind.
        target: offline target that it represents, if any. Then nothing can be run.

    Attributes:
        name, jax_devices, type, numIpus, id, target: as passed.

    Example:
        >>> with popart.DeviceManager().acquireAvailableDevice(numIpus=2) as device:
        ...     session = popxl.Session(ir, device)
        ...     outputs = session.run(inputs)
        >>> device.isAttached
        False
    """

    def __init__(
        self,
        name: str,
        jax_devices: Sequence[jax.Device],
        type: DeviceType = DeviceType.Ipu,
        numIpus: int = 1,
        id: int = 0,
        target: Target | None = None,
    ) -> None:
        self.name = name
        self.jax_devices = tuple(jax_devices)
        self.type = type
        self.numIpus = numIpus
        self.id = id
        self.target = target
        self._attached = False
        self._loaded: WeakSet[Any] = WeakSet()

    def __repr__(self) -> str:
        return f"Device[{self}]"

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(map(str, self.jax_devices))})"

    @property
    def chip(self) -> Chip | None:
        """Published figures of its chips; `None` for unknown ones."""
        return chip.of_device(self.jax_devices[0].device_kind) if self.target is None else self.target.chip

    @property
    def isAttached(self) -> bool:
        """Whether the device is attached, allowing programs to run."""
        return self._attached

    def attach(self) -> bool:
        """Attach the device. Returns true always, as JAX devices are shared."""
        self._attached = True
        return True

    def tryAttachUntilTimeout(self) -> bool:
        """Attach immediately, like `attach`; never waits."""
        return self.attach()

    def detach(self) -> None:
        """Detach the device. Program state on it is lost, unless copied to the host."""
        self._attached = False
        for program in tuple(self._loaded):
            program.release()
        self._loaded.clear()

    def check_parts(self, used: Collection[Collection[jax.Device]]) -> None:
        """Refuse subslices of multi-host TPU slices that XLA cannot compile for.

        Args:
            used: the chips of each stage of the program; of one without stages, its chips.

        Raises:
            NotImplementedError: if it does not compile programs for such parts of this slice.
        """
        first = self.jax_devices[0]
        figures = chip.of_device(first.device_kind) if first.platform == "tpu" else None
        if not isinstance(figures, chip.Tpu):
            return
        there = first.client.device_count() if self.target is None else self.target.slice_of(len(self.jax_devices))
        fewest, what = min(map(len, used)), "a stage" if len(used) > 1 else "the program"
        of_hosts = Counter(each.process_index for each in self.jax_devices)
        shared = [Counter(each.process_index for each in chips) for chips in used if len(used) > 1]
        over_hosts = any(len(own) > 1 and any(own[host] < of_hosts[host] for host in own) for own in shared)
        if figures.divisible is not None and there > figures.divisible and fewest < there:
            why = f"for a slice of more than {figures.divisible} {figures.name} only if it uses all of them"
        elif over_hosts and not figures.stages_over_hosts:
            why = f"for {figures.name} of several hosts only if it uses all of each; stages share the chips of a host"
        else:
            return
        raise NotImplementedError(
            f"Session: on {self.name}, {what} uses {fewest} of {there} chips. XLA compiles a program {why}. Have as "
            "many replicas as there are chips, and no ops on other IPUs (`popxl.ipu`); or take a slice of one host, or "
            "TPUs whose slices can be divided, such as v5p. Stages have hosts of their own if the axis of the IPUs is "
            "before one of as many replicas as a host has chips: `popxl.Ir(axes={'stage': 'ipus', 'tensor': 8})`."
        )

    def loads(self, store: VariableStore) -> None:
        """Register a store with arrays on this device, released by `detach`."""
        self._loaded.add(store)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.detach()


def cpu_device() -> Device:
    """The CPU as a single device."""
    return Device("cpu", _local_devices("cpu")[:1], DeviceType.Cpu)


def model_device(wanted: DeviceCount = DeviceCount()) -> Device:
    """CPU devices standing in for IPUs."""
    devices = _local_devices("cpu")
    return Device("ipu_model", devices[: wanted.of_available(len(devices))], DeviceType.IpuModel, wanted.represented)


def hardware_device(wanted: DeviceCount, kind: str | None = None) -> Device:
    """Best accelerator visible to JAX, else the CPU; or accelerators of a kind.

    Raises:
        RuntimeError: if there is no hardware of this kind.
    """
    _start_jax()
    try:
        devices = _local_devices(kind)
    except RuntimeError as problem:
        raise RuntimeError(
            f"Session: JAX finds no device of the kind {kind!r}: {str(problem).rstrip('.')}. Install JAX for it, as its"
            ' own pages say; or take "ipu_hw", which is the best device that there is; or name a machine elsewhere, '
            'such as "gpu h100" or "tpu v5e", to compile for it.'
        ) from problem
    return Device(kind or "ipu_hw", devices[: wanted.of_available(len(devices))], DeviceType.Ipu, wanted.represented)


def offline_device(target: Target, wanted: DeviceCount) -> Device:
    """Device of an offline target.

    Raises:
        PopxlError: if its compiler is not installed.
    """
    chips = target.first(wanted.of_available(target.count))
    return Device(str(target), chips, DeviceType.OfflineIpu, wanted.represented, target=target)


def all_devices() -> list[Device]:
    """Single-device `Device` objects for each device of JAX's best platform."""
    return [Device("ipu_hw", (found,), DeviceType.Ipu, 1, number) for number, found in enumerate(_local_devices())]


def _local_devices(kind: str | None = None) -> list[jax.Device]:
    """This process's devices of a kind; by default, of the best platform."""
    _start_jax()
    return jax.local_devices(backend=kind)


def _start_jax() -> None:
    """Initialize JAX, with the CPU devices of the environment, which a program may have changed."""
    ask_for_cpu_devices()
    compilers.start_jax()


def find_device(description: str | Device | Target, ir: Ir) -> Device:
    """Resolve a description to a device, checked against the Ir's requirements.

    For a program over several processes this joins them, and the device is made of those of all processes.

    Args:
        description: `"cpu"`; `"ipu_model"`, which is the CPU too; `"ipu_hw"`, the best accelerator that JAX sees, else
            the CPU; `"gpu"`, `"cuda"`, `"rocm"` or `"tpu"`, that accelerator; a target, such as `"tpu v5e:4x4"`; or a
            device, which is returned unchanged. The environment variable `POPXL_OFFLINE_DEVICE` has priority over a
            string.

    Raises:
        TypeError: for anything but text, a target or a device.
        ValueError: for an unknown description, or if the program needs several devices and the description is a single
            CPU.
        RuntimeError: if there is no such accelerator.
        PopxlError: if other processes run some of the replicas, and a device object is given, or there are too few
            devices here; if the compiler of a target is not installed.
    """
    kinds = str | Device | Target
    check_type(description, kinds, "Session: the device", "text such as 'ipu_hw', a target or a device")
    warn_if_untested()
    wanted = DeviceCount.for_program(ir)
    if processes.spans_processes(ir):
        device = _over_processes(description, wanted)
    else:
        processes.warn_if_forgotten()
        device = _resolve_device(description, wanted)
    if device.type is DeviceType.Cpu and wanted.represented > 1:
        raise ValueError(
            f"Session: the program is placed on {wanted.ipus} devices, and 'cpu' is a single one. Use 'ipu_model' or "
            "'ipu_hw'."
        )
    return device


def _resolve_device(description: str | Device | Target, wanted: DeviceCount) -> Device:
    if isinstance(description, Device):
        return description
    if isinstance(description, Target):
        return offline_device(description, wanted)
    return _described(os.environ.get(OFFLINE_DEVICE) or description, wanted)


def _over_processes(description: str | Device | Target, wanted: DeviceCount) -> Device:
    """Device of a multi-process program; this process drives some of its replicas or stages."""
    processes.join()
    instance = launched()
    if instance is not None and not instance.has_whole_replicas:
        count = wanted.count * instance.share.stages
        wanted = replace(wanted, count=count, best=count)
    try:
        own = _resolve_device(description, wanted)
    except RuntimeError as problem:
        if instance is None:
            raise
        raise PopxlError(
            f"Session: instance {instance.instance_index} has no device: instances of a host divide its devices among "
            f"them, {wanted.count} for each. Start fewer instances there; or set JAX_PLATFORMS=cpu for all to run on "
            f"CPUs. {problem}"
        ) from problem
    if own.target is not None:
        raise PopxlError(
            f"Session: {own.target} is not here, and a program is compiled for it by one process, which sees all of "
            "its chips. Run this without `poprun`, and make the Ir for all replicas: `popxl.Ir(replication=...)`."
        )
    if isinstance(description, Device):
        raise PopxlError(
            f"Session: {description} stands for devices of this process only, and others run the program, too. "
            "Describe the device in words, such as 'ipu_hw'."
        )
    everywhere = processes.devices_of_all(own.jax_devices, wanted.count, wanted.best)
    return Device(own.name, everywhere, own.type, own.numIpus)


def _described(description: str, wanted: DeviceCount) -> Device:
    if description == "cpu":
        return cpu_device()
    if description == "ipu_model":
        return model_device(wanted)
    if description == "ipu_hw":
        return hardware_device(wanted)
    if description in PLATFORMS:
        return hardware_device(wanted, description)
    if is_target(description):
        return offline_device(Target(description), wanted)
    raise ValueError(
        f"Session: the device {description!r} is unknown; expected 'cpu', 'ipu_model', 'ipu_hw', a kind of hardware "
        f"({', '.join(map(repr, PLATFORMS))}), a machine that is not here ({FORMS}) or a device object."
    )


ask_for_cpu_devices()
compilers.skip_plugin_discovery()
