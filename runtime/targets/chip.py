"""`Gpu` and `Tpu`: published figures of one chip, used to compile and cost programs.

Files for some chips are in the folder `chips`, each with its sources. A file of the same form for another GPU can be
given to `popxl.Target`.
"""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError

from popxl.errors import PopxlError

FOLDER = Path(__file__).parent / "chips"


class Link(BaseModel):
    """Wires that join chips at one level: within a host, within a slice, or between these.

    Attributes:
        name: name of the links: "NVLink".
        bandwidth: bytes a second that one chip sends over all its wires of this level, in one direction.
        latency: seconds that a step of a collective takes, whatever its bytes.
        chips: number of chips that are joined; `None` for any number.
        ring: for a torus, the length of which multiples are closed to a ring; other dimensions are lines. `None` for a
            switch, which joins each chip to each other one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    name: str
    bandwidth: PositiveFloat
    latency: NonNegativeFloat = 0.0
    chips: PositiveInt | None = None
    ring: PositiveInt | None = None


class Efficiency(BaseModel):
    """Attained share of a chip's published figures; by default all, without launch cost.

    Attributes:
        products: share of the rate of products that large ones attain, from 0 to 1.
        memory: share of the bandwidth of its memory.
        network: share of the bandwidth of the fastest link.
        outside: share of the bandwidth of the slower links, between hosts or slices.
        launch: seconds that a kernel takes at least.
        dispatch: seconds that the host takes for each call that it dispatches.
        tiles: block sizes of a matrix unit, rows and columns: a product computes whole blocks, of the best kind. Empty
            if any product attains the same rate.
        depth: number of products of a sum that attains half the rate, as units fill and drain.
        sources: sources of these figures.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    products: float = Field(default=1.0, gt=0, le=1)
    memory: float = Field(default=1.0, gt=0, le=1)
    network: float = Field(default=1.0, gt=0, le=1)
    outside: float = Field(default=1.0, gt=0, le=1)
    launch: NonNegativeFloat = 0.0
    dispatch: NonNegativeFloat = 0.0
    tiles: tuple[tuple[PositiveInt, PositiveInt], ...] = ()
    depth: NonNegativeFloat = 0.0
    sources: tuple[str, ...] = ()


class Chip(BaseModel):
    """Published figures of a chip. Rates are per second, for dense numbers.

    Attributes:
        name: name given by its maker.
        sources: sources of the figures.
        flops: floating point (or integer) operations per second, by the dtype of the factors. `"tfloat32"` is the type
            that GPUs round float32 to by default.
        memory_bytes: memory that a program can use. XLA for TPUs reserves some of the published memory.
        memory_bandwidth: bytes between the chip and its memory.
        network_bandwidth: bytes that it sends to other chips, all links together, in one direction.
        host_bandwidth: bytes between it and the memory of its host, in one direction.
        links: links to other chips, the fastest level first. Without these, all chips are joined by a switch of
            `network_bandwidth`.
        efficiency: attained share of these figures.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    name: str
    sources: tuple[str, ...] = Field(min_length=1)
    flops: dict[str, PositiveFloat] = Field(min_length=1)
    memory_bytes: PositiveInt
    memory_bandwidth: PositiveFloat
    network_bandwidth: PositiveFloat
    host_bandwidth: PositiveFloat
    links: tuple[Link, ...] = ()
    efficiency: Efficiency = Efficiency()

    @property
    def levels(self) -> tuple[Link, ...]:
        """Network levels, fastest first: `links`, or a single switch."""
        return self.links or (Link(name="network", bandwidth=self.network_bandwidth),)

    @property
    def product_units(self) -> int:
        """Number of concurrently computed blocks of a product."""
        return 1

    def rate(self, dtype: str, precision: str = "default") -> float:
        """Product throughput in operations per second, for a factor dtype named as in `flops`, at a JAX precision.
        Falls back to float32 throughput for unpublished dtypes."""
        return self.flops.get(dtype, self.flops.get("float32", min(self.flops.values())))


class Tpu(Chip):
    """A TPU.

    Attributes:
        device_kind: JAX's name of the device.
        clock: cycles a second.
        host: number of chips of a host along each dimension of a topology.
        config: arrangement of a chip's cores, if XLA has to be told: a chip is to be one device.
        divisible: largest number of chips of a slice for parts of which XLA compiles programs; `None` for any number.
            For larger slices it requires all chips in each program.
        stages_over_hosts: whether XLA compiles pipeline stages that each have some chips of several hosts.
    """

    device_kind: str
    clock: PositiveFloat
    host: tuple[PositiveInt, ...]
    config: str = ""
    divisible: PositiveInt | None = None
    stages_over_hosts: bool = True

    def rate(self, dtype: str, precision: str = "default") -> float:
        if dtype == "float32":  # its factors are split into bfloat16 parts
            return self.flops["bfloat16"] / {"highest": 6, "high": 3}.get(precision, 1)
        return self.flops.get(dtype, self.flops["bfloat16"])


class Cpu(Chip):
    """CPU figures measured by `popxl calibrate`: one JAX device with all cores."""

    @property
    def device_kind(self) -> str:
        """JAX device kind."""
        return self.name


class Gpu(Chip):
    """A GPU. XLA chooses tiles and fusions by these figures; CUDA's `cudaGetDeviceProperties` returns them.

    Attributes:
        compute_capability: such as "9.0".
        cores: multiprocessors.
        units: float32 units of a core.
        threads: maximum number of threads of a core.
        registers: number of registers of a core.
        shared_memory: bytes of a core.
        shared_memory_of_block: bytes that a block gets without asking.
        most_shared_memory_of_block: bytes that it gets if it asks.
        l2_bytes: the cache of the chip.
        clock_ghz: boost clock of its cores.
        per_host: number of GPUs of a host.

    Example:
        >>> gpu = runtime.targets.chip.shipped(Gpu, "h100")
        >>> gpu.model_copy(update={"memory_bytes": 94 << 30, "name": "NVIDIA H100 NVL"}).model_dump_json()
    """

    compute_capability: str = Field(pattern=r"^\d+\.\d+$")
    cores: PositiveInt
    units: PositiveInt
    threads: PositiveInt
    registers: PositiveInt
    shared_memory: PositiveInt
    shared_memory_of_block: PositiveInt
    most_shared_memory_of_block: PositiveInt
    l2_bytes: PositiveInt
    clock_ghz: PositiveFloat
    per_host: PositiveInt = 8

    @property
    def product_units(self) -> int:
        return self.cores

    def rate(self, dtype: str, precision: str = "default") -> float:
        return super().rate("tfloat32" if dtype == "float32" and precision != "highest" else dtype)

    @property
    def device_kind(self) -> str:
        """JAX device kind."""
        return self.name

    def for_xla(self) -> str:
        """Figures in the text format of XLA's `GpuTargetConfigProto`."""
        major, minor = self.compute_capability.split(".")
        device = {
            "threads_per_block_limit": 1024,
            "threads_per_warp": 32,
            "shared_memory_per_block": self.shared_memory_of_block,
            "shared_memory_per_block_optin": self.most_shared_memory_of_block,
            "shared_memory_per_core": self.shared_memory,
            "threads_per_core_limit": self.threads,
            "core_count": self.cores,
            "fpus_per_core": self.units,
            "block_dim_limit_x": 2**31 - 1,
            "block_dim_limit_y": 2**16 - 1,
            "block_dim_limit_z": 2**16 - 1,
            "memory_bandwidth": round(self.memory_bandwidth),
            "l2_cache_size": self.l2_bytes,
            "clock_rate_ghz": self.clock_ghz,
            "device_memory_size": self.memory_bytes,
            "registers_per_core_limit": self.registers,
            "registers_per_block_limit": self.registers,
            "cuda_compute_capability": {"major": int(major), "minor": int(minor)},
        }
        return _as_text(
            {
                "gpu_device_info": device,
                "platform_name": "CUDA",
                "dnn_version_info": {"major": 9, "minor": 10},
                "runtime_version": {"major": 12, "minor": 9},
                "device_description_str": self.name,
            }
        )


def _as_text(message: dict[str, Any]) -> str:
    """Format `message` as protocol buffer text."""

    def value(of: Any) -> str:
        if isinstance(of, dict):
            return f"{{ {_as_text(of)} }}"
        return '"' + of.replace("\\", "\\\\").replace('"', '\\"') + '"' if isinstance(of, str) else str(of)

    return " ".join(f"{name}{'' if isinstance(of, dict) else ':'} {value(of)}" for name, of in message.items())


# Files ---------------------------------------------------------------------------------------------------------------

C = TypeVar("C", bound=Chip)


def names(kind: type[Chip]) -> list[str]:
    """Names of chips with shipped figures, as used in descriptions."""
    return sorted(path.stem for path in FOLDER.glob("*.json") if path.stem.startswith("v") == (kind is Tpu))


@cache
def shipped(kind: type[C], name: str) -> C:
    """Shipped figures of a chip; `KeyError` for an unknown name."""
    if name not in names(kind):
        raise KeyError(name)
    return load_figures(kind, FOLDER / f"{name}.json")


def of_device(device_kind: str) -> Chip | None:
    """Figures of a JAX device kind: measured ones of the file in `POPXL_CHIP`, if of this kind, else shipped ones;
    `None` for unknown kinds.
    """
    if measured := os.environ.get("POPXL_CHIP"):
        found = _measured(measured)
        if found.device_kind == device_kind:
            return found
    kinds: tuple[type[Tpu] | type[Gpu], ...] = (Tpu, Gpu)
    known = (shipped(kind, name) for kind in kinds for name in names(kind))
    return next((chip for chip in known if chip.device_kind == device_kind), None)


def _measured(path: str) -> Cpu | Gpu:
    """Figures that `popxl calibrate` wrote."""
    is_gpu = Path(path).is_file() and '"compute_capability"' in Path(path).read_text(encoding="utf-8")
    return load_figures(Gpu, path) if is_gpu else load_figures(Cpu, path)


def load_figures(kind: type[C], path: str | os.PathLike[str]) -> C:
    """Figures from a file.

    Raises:
        PopxlError: if it cannot be read, or is incomplete or invalid.
    """
    try:
        return kind.model_validate_json(Path(path).read_bytes())
    except OSError as problem:
        raise PopxlError(f"Target: the figures of a chip cannot be read from {os.fspath(path)!r}: {problem}") from None
    except ValidationError as problem:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'the file'}: {e['msg']}" for e in problem.errors())
        raise PopxlError(
            f"Target: {os.fspath(path)!r} does not hold the figures of a {kind.__name__}: {wrong}. "
            f"{FOLDER / 'h100.json'} is an example."
        ) from None
