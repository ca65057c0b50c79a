"""TPU and GPU compilers, usable without such hardware: loaded on first use, without log output.

Each is a plugin of JAX, and coexists with other backends of the process. Its devices have no memory and run nothing;
arrays for them are described by shape and dtype only.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import jax
from jax.experimental import topologies

from popxl.base.quiet import is_warning, silence_stderr
from popxl.errors import PopxlError

_lock = threading.RLock()


def skip_plugin_discovery() -> None:
    """Skip JAX's search for TPUs and GPUs if their compilers are installed without hardware, avoiding long warnings.
    Does nothing if hardware or other plugins are present, or `jax_platforms` is set."""
    others = [name for name in _plugins() if name not in _GPU_PLUGINS]
    if jax.config.values["jax_platforms"] or others or not (_plugins() or _has_libtpu()):
        return
    if not any(found for pattern in _HARDWARE for found in Path("/dev").glob(pattern)):
        jax.config.update("jax_platforms", "cpu")


_HARDWARE = ("nvidia[0-9]*", "dxg", "accel[0-9]*", "accel/*", "vfio/[0-9]*")
"""Files in /dev of GPUs, and of TPUs."""


@cache
def start_jax() -> None:
    """Initialize JAX and its plugins, suppressing warnings about missing hardware.

    Raises:
        RuntimeError: if `jax_platforms` selects only platforms without a device.
    """
    try:
        if _plugins() or _has_libtpu():
            with silence_stderr(is_warning):
                jax.default_backend()
        else:
            jax.default_backend()
    except AssertionError as problem:  # JAX's only error in that case
        platforms = jax.config.values["jax_platforms"]
        if not platforms:
            raise
        raise RuntimeError(
            f"Session: JAX is told to use {platforms!r}, and finds no such device here. Set JAX_PLATFORMS to 'cpu', or "
            f"to nothing, which is whatever there is; or install what JAX needs for {platforms!r}."
        ) from problem


def _plugins() -> list[str]:
    """Module names of installed JAX plugins."""
    spec = find_spec("jax_plugins")
    return (
        [] if spec is None else [f"jax_plugins.{each.name}" for each in iter_modules(spec.submodule_search_locations)]
    )


def _has_libtpu() -> bool:
    return find_spec("libtpu") is not None


def tpu_devices(
    generation: str, layout: Sequence[int], host: Sequence[int], config: str = ""
) -> tuple[jax.Device, ...]:
    """Chips of a TPU slice, ordered by host as in a multi-process run.

    Args:
        generation: the generation, such as "v5e".
        layout: number of chips along each dimension.
        host: number of chips of one host along each dimension.
        config: XLA's name of the core configuration, if any.
    """
    if not _has_libtpu():
        raise _missing("a TPU", "tpu")
    # Read by the library on loading: no network queries, and several processes may load it.
    _set(TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="true")
    bounds = [min(a, b) for a, b in zip(layout, host, strict=True)]
    topology = {"chips_per_host_bounds": (bounds + [1, 1])[:3]} | ({"chip_config_name": config} if config else {})
    name = f"{generation}:{'x'.join(map(str, layout))}"
    return _topology_devices("tpu", name, topology)


def gpu_devices(name: str, figures: str, hosts: int, per_host: int) -> tuple[jax.Device, ...]:
    """GPUs of one kind, ordered by host.

    Args:
        figures: figures of one GPU for XLA; see `runtime.targets.chip.Gpu.for_xla`.
    """
    plugin = next((name for name in _GPU_PLUGINS if name in _plugins()), None)
    if plugin is None:
        raise _missing("a GPU", "gpu")
    _set(JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1")  # there are no libraries to check
    topology = {"target_config": figures, "topology": f"1x{hosts}x{per_host}"}
    try:
        return _topology_devices("cuda", name, topology)
    except NotImplementedError:  # JAX has loaded it before, and dropped it, as there is no GPU
        with _lock, silence_stderr():
            import_module(plugin).initialize()
        return _topology_devices("cuda", name, topology)


_GPU_PLUGINS = ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12")


def _missing(what: str, extra: str) -> PopxlError:
    return PopxlError(
        f"Session: to compile for {what}, install its compiler with the extra `{extra}`: "
        f"`pip install '.[{extra}]'` in a checkout of popxl. It needs no such hardware."
    )


def _set(**variables: str) -> None:
    """Set environment variables of a compiler, keeping values set by the user."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


@cache
def _described_devices(platform: str, name: str, topology: tuple[tuple[str, Any], ...]) -> tuple[jax.Device, ...]:
    start_jax()  # otherwise JAX would do so before its first compilation, and its plugins write to standard error too
    with _lock, silence_stderr():
        topology_description = topologies.get_topology_desc(name, platform, **dict(topology))
        return tuple(sorted(topology_description.devices, key=lambda device: (device.process_index, device.id)))


def _topology_devices(platform: str, name: str, topology: dict[str, Any]) -> tuple[jax.Device, ...]:
    """Devices of a topology: identical objects on each call, for sharing compiled executables."""
    hashable = ((key, tuple(value) if isinstance(value, list) else value) for key, value in topology.items())
    try:
        return _described_devices(platform, name, tuple(hashable))
    except jax.errors.JaxRuntimeError as problem:
        raise PopxlError(f"Session: XLA does not know the target {name!r}: {problem}") from problem
