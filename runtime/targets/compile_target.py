"""`CompileTarget`: compile target of a program; `BuildStamp`: its textual description, stored in files."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from pydantic import BaseModel, ConfigDict

from popxl.base.version import VERSION
from popxl.errors import PopxlError
from runtime.targets.mesh import placed_devices
from runtime.targets.replicas import AXIS, DescribedReplicas, Dimension, DividedReplicas, Replicas

HOST = "pinned_host"
"""JAX's name of the host memory that a device can access."""

VERSIONS = {"popxl": VERSION, "jax": jax.__version__, "jaxlib": jaxlib.__version__}
"""Versions of the packages that compile programs."""


class BuildStamp(BaseModel):
    """Build environment and target of an executable. Executables with any mismatch must not run.

    Attributes:
        popxl, jax, jaxlib: the versions.
        platform: kind of devices.
        platform_version: version of the drivers; "" for offline compilation, which is compatible with any.
        processor: features of a CPU that XLA may use.
        kinds: kind of each device.
    """

    model_config = ConfigDict(extra="forbid", defer_build=True)

    popxl: str
    jax: str
    jaxlib: str
    platform: str
    platform_version: str
    processor: str
    kinds: list[str]


def build_stamp(devices: Sequence[jax.Device], is_present: bool = True) -> BuildStamp:
    """Build stamp of executables compiled in this process for `devices`."""
    client = devices[0].client
    return BuildStamp(
        **VERSIONS,
        platform=client.platform,
        platform_version=client.platform_version if is_present else "",
        processor=_processor() if client.platform == "cpu" else "",
        kinds=[device.device_kind for device in devices],
    )


class DoesNotFit(PopxlError):
    """Program exceeding a device's memory, according to XLA's compiler."""


_OTHER_DEVICES_MESSAGE = "incompatible devices for jitted computation"
"""Error messages of JAX 0.10 to 0.12 for functions whose arguments are on other devices."""


@dataclass(frozen=True)
class CompileTarget:
    """Compile target of a program or segment: devices, and the replicas distributed over them.

    A plain value: it allocates nothing, and equal ones are interchangeable.

    Attributes:
        devices: devices of one platform, process by process. The first replica of a process has the first of its
            devices; if there are too few for that, all are on the first.
        count: number of replicas, over all processes.
        dimensions: mesh dimensions of the replicas; by default a single one. See `runtime.targets.mesh`.
        adjacent: number of replicas whose devices for an IPU are adjacent: see `popxl.base.distributed.Share`.
        is_one_ipu: whether these devices form one IPU of a program whose other IPUs may belong to other processes.
        memory_limit: percentage of its memory that XLA's scheduler takes at most, on TPUs and GPUs; `None` for all.
        is_present: whether the devices are present, in this process or others. If not, this process only compiles for
            all of them, on whichever hosts they would be.

    Example:
        >>> target = CompileTarget(tuple(jax.devices()), 2)
        >>> replicas = target.replicas
        >>> lowered = jax.jit(replicas.vmap_replicas(jnp.sin)).lower(replicas.spec((3,), "f4"))
        >>> target.compile(lowered)(replicas.broadcast(np.zeros(3, "f4"))).shape
        (2, 3)
    """

    devices: tuple[jax.Device, ...]
    count: int = 1
    is_present: bool = True
    dimensions: tuple[Dimension, ...] = ()
    adjacent: int = 1
    is_one_ipu: bool = False
    memory_limit: int | None = None

    def of_ipu(self, number: int, ipus: int) -> CompileTarget:
        """Compile target of IPU `number`, if each replica has `ipus` IPUs as separate devices."""
        processes = self._by_process()
        devices = [device for own in processes for device in own[: self.count * ipus // len(processes)]]
        rows = (divmod(replica, self.adjacent) for replica in range(self.count))
        chosen = tuple(devices[(row * ipus + number) * self.adjacent + first] for row, first in rows)
        return replace(self, devices=chosen, is_one_ipu=self.is_present and len(processes) > 1)

    @property
    def is_elsewhere(self) -> bool:
        """Whether all devices belong to other processes, which compile and run this part too."""
        return self.is_one_ipu and all(each.process_index != jax.process_index() for each in self.devices)

    def has_parts_elsewhere(self, ipus: int) -> bool:
        """Whether every process lacks some of the `ipus` IPUs of each replica."""
        return self.is_present and any(self.of_ipu(i, ipus).is_elsewhere for i in range(ipus))

    def _by_process(self) -> list[list[jax.Device]]:
        if not self.is_present:
            return [list(self.devices)]
        return [list(processes) for _, processes in groupby(self.devices, lambda device: device.process_index)]

    @property
    def platform(self) -> str:
        """JAX platform name of the devices, such as "cpu"."""
        return self.devices[0].platform

    @property
    def build_stamp(self) -> BuildStamp:
        """Build stamp of executables compiled in this process for this target."""
        return build_stamp(self.devices, self.is_present)

    @cached_property
    def replicas(self) -> Replicas:
        """Replicas across all processes, with their mesh."""
        processes = [list(self.devices)] if self.is_one_ipu else self._by_process()
        devices = [device for own in processes for device in own[: self.count // len(processes)]]
        if 1 < self.count <= len(devices):
            devices = placed_devices(devices, self.dimensions)
        is_absent = not self.is_present or self.is_elsewhere
        is_divided = self.is_one_ipu or len(processes) > 1
        kind = DescribedReplicas if is_absent else DividedReplicas if is_divided else Replicas
        return kind(self.count, devices, self.dimensions)

    @cached_property
    def on_host(self) -> Any:
        """Sharding of all replicas' arrays in device-accessible host memory."""
        mesh, spec = self.replicas.mesh, PartitionSpec(self.replicas.axis)
        if mesh is None:  # without one, JAX forgets the memory while it traces
            mesh, spec = Mesh(np.asarray([self.replicas.device]), (AXIS,)), PartitionSpec()
        sharding = NamedSharding(mesh, spec, memory_kind=HOST)
        # JAX drops the kind where devices do not say which memories they have. Compilers of GPUs give such devices.
        return sharding if sharding.memory_kind == HOST else NamedSharding(mesh.abstract_mesh, spec, memory_kind=HOST)

    @property
    def compile_options(self) -> Mapping[str, str | bool] | None:
        """XLA compile options for these devices."""
        if self.platform == "gpu":
            if self.memory_limit is None:
                return _EXACT_ROUNDING
            limit = {_GPU_MEMORY_LIMIT: str(self.memory_limit), "xla_disable_hlo_passes": "rematerialization"}
            return {**_EXACT_ROUNDING, **limit}
        if self.platform != "cpu":
            return None if self.memory_limit is None else {_MEMORY_LIMIT: str(self.memory_limit)}
        from runtime.cpu.flags import compile_options  # of no use elsewhere

        return compile_options()

    def lower(self, jitted: Any, *arguments: Any) -> Any:
        """Lower a jitted function for these devices.

        Raises:
            PopxlError: if an op needs devices of its own: a `shard_map` over several.
        """
        platforms = None if self.replicas.is_present else ("cuda" if self.platform == "gpu" else self.platform,)
        try:
            # Else JAX would query a real GPU for the vendor of a described one, and use the CPU for everything if all
            # arrays are in host memory.
            with nullcontext() if self.replicas.is_present else jax.default_device(self.replicas.device):
                return jitted.trace(*arguments).lower(lowering_platforms=platforms)
        except ValueError as problem:
            if _OTHER_DEVICES_MESSAGE not in str(problem):
                raise
            raise PopxlError(
                "An op of `popxl.from_jax` runs over several devices of its own, such as `jax.shard_map` with a mesh "
                "of several, and a session runs each op on one. Make the graph a function of JAX, with `popxl.to_jax`, "
                "and call that; or let the program have replicas, `popxl.Ir(replication=...)`, and ops of "
                f"`popxl.ops.collectives`. JAX says: {problem}"
            ) from problem

    def compile(self, lowered: Any) -> Any:
        """Compile a lowered function with XLA.

        Raises:
            DoesNotFit: if XLA reports that it would not fit into the memory of an absent device.
        """
        try:
            return self._compiled(lowered, self.compile_options)
        except jax.errors.JaxRuntimeError as problem:
            if self.memory_limit is not None and "No such compile option" in str(problem):
                return replace(self, memory_limit=None).compile(lowered)
            if not self.is_present and _NO_TILES_MESSAGE in str(problem):
                return self._compiled(lowered, {**_EXACT_ROUNDING, **_PRODUCTS_BY_CUBLAS})
            if self.is_present or "RESOURCE_EXHAUSTED" not in str(problem):
                raise
            raise DoesNotFit(
                f"Session: the program does not fit into the memory of a {self.devices[0].device_kind}: {problem} "
                "`ir.memory()` says what needs how much; a remote buffer, more replicas or smaller batches may help."
            ) from problem

    def _compiled(self, lowered: Any, options: Mapping[str, str | bool] | None) -> Any:
        """Compile a lowered function with explicit XLA options."""
        takes_something = jax.tree.leaves(lowered.args_info)  # without arguments it is compiled for one device
        devices = self.replicas.devices if not self.is_present and takes_something else None
        return lowered.compile(compiler_options=options, device_assignment=devices)


_EXACT_ROUNDING: Mapping[str, str | bool] = {"xla_allow_excess_precision": False}
"""XLA option for GPUs: round wherever the program rounds. Otherwise XLA may keep float32 numbers until gradients need
them, in twice the memory."""

_MEMORY_LIMIT = "xla_tpu_scheduler_percent_shared_memory_limit"
"""Percentage of a TPU's memory that XLA's scheduler takes at most. Other options limit the whole program, and XLA
recomputes what it likes where an order of ops is not enough."""

_GPU_MEMORY_LIMIT = "xla_gpu_memory_limit_slop_factor"
"""Percentage of a GPU's free memory that XLA's scheduler takes at most: it gathers weights of sharded layers less
early. It would recompute what it likes, too, which is left out."""

_NO_TILES_MESSAGE = "Couldn't find output tile sizes"
"""XLA's error message for a product that it cannot compile as a kernel of its own. On a local GPU, XLA tries kernels of
several tile sizes, and drops those that do not fit; elsewhere it takes the first size, 16 rows for example, also if a
factor consists of blocks of 6."""

_PRODUCTS_BY_CUBLAS: Mapping[str, str | bool] = {"xla_gpu_enable_triton_gemm": False}
"""XLA option: compile all products as cuBLAS calls, which accept factors of any shape."""


def _processor() -> str:
    """CPU architecture, and a digest of CPU features where known."""
    features = Path("/proc/cpuinfo")
    lines = features.read_text(encoding="utf-8", errors="replace").splitlines() if features.is_file() else []
    known = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return f"{platform.machine()} {hashlib.sha256(' '.join(sorted(known.split())).encode()).hexdigest()[:8]}"
