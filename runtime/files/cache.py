"""Persistent compilation cache: reuse of compiled programs across processes.

Each distinct program has one file, named after a digest of the program, its compile options and its target. It holds
the executables of the program, one or several, under JAX's keys. A cached program is still traced: JAX's key is a
digest of the code that XLA would compile, so an executable is reused for exactly the same code only, also if a function
behind an op has changed since. The values of variables have no influence.

The executables go through JAX's persistent compilation cache, which is pointed to a separate folder meanwhile: its
entries are XLA's serialization, and no Python object is read from them. Yet they are machine code. As JAX says of its
cache: give write access to the folder only to users whom you would let run programs.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

import jax
from jax.experimental.compilation_cache import compilation_cache

from popxl.base.atomic_files import replace_file
from popxl.base.container import pack, unpack
from popxl.base.log import Logger
from popxl.errors import PopxlError
from popxl.ir import Ir
from popxl.program.writing import fingerprint
from runtime.signals import scratch_folder
from runtime.targets.compile_target import CompileTarget
from runtime.targets.devices import Device, DeviceType

SUFFIX = ".popef"
MODE_SUFFIX = ".way"
KIND = "popxl executables"

_log = Logger("session")


@contextmanager
def compiling(ir: Ir, device: Device, mode: str, prints: bool = False, is_serializable: bool = True) -> Iterator[bool]:
    """Use the compilation cache while the block compiles a program: load cached executables, store new executables.

    It is on where the option `enableEngineCaching` is set and the device is hardware. Yields whether some executables
    may come from a cache, this one or that of JAX, rather than from XLA.

    Args:
        mode: mode of called graphs: each mode has its own entry.
        prints: whether it calls back into Python, which prevents caching.
        is_serializable: whether other processes could run the executables. If not, the cache is neither read nor
            written.

    Example:
        >>> with compiling(ir, runtime.find_device("cpu", ir), "kept"):
        ...     executable = jax.jit(jnp.sin).lower(1.0).compile()
    """
    if not is_serializable:
        _log.debug("Starting compilation")
        with compiling_afresh() as is_cached:
            yield is_cached
        return
    path = None if prints else _path(ir, device, mode)
    cached = {} if path is None else _load_executables(path)
    if path is None or not cached:
        _log.debug("Starting compilation")
    if path is None:
        yield bool(jax.config.values["jax_compilation_cache_dir"])
        return
    _ = CompileTarget(device.jax_devices).compile_options  # the first time, XLA compiles a probe: not of this program
    with _jax_cache(cached) as entries:
        yield bool(cached)
    if entries.keys() != cached.keys():
        if cached:
            _log.debug(f"Ignoring cache file because it does not contain all that the program now needs: {path}")
            _log.debug("Starting compilation")
        _write(path, entries)
    elif cached:
        _log.debug(f"Loading serialized PopART executable from {path}")


@contextmanager
def compiling_afresh() -> Iterator[bool]:
    """Disable compilation caches while the block compiles. Yields `False`, like `compiling`."""
    with _configured({"jax_enable_compilation_cache": False}):
        yield False


# Decisions ----------------------------------------------------------------------------------------------------------


def cached_mode(ir: Ir, device: Device) -> str | None:
    """Cached mode of a program's called graphs; `None` without a valid cache entry."""
    path = _decision(ir, device)
    if path is None or not path.is_file():
        return None
    try:
        about, _ = unpack(KIND, path.read_bytes())
    except (OSError, ValueError) as problem:
        _log.warn(f"Ignoring a file of the cache, which does not say how to compile: {path}: {problem}")
        return None
    mode = about.get("calls")
    return mode if mode in ("inlined", "rolled", "batched", "dispatched") else None


def cache_mode(ir: Ir, device: Device, mode: str) -> None:
    """Store the fastest mode of called graphs in the cache, if enabled."""
    path = _decision(ir, device)
    if path is not None:
        _write(path, {}, {"calls": mode})


def _decision(ir: Ir, device: Device) -> Path | None:
    path = _path(ir, device, "auto")
    return None if path is None else path.with_suffix(MODE_SUFFIX)


# Files --------------------------------------------------------------------------------------------------------------


def _path(ir: Ir, device: Device, mode: str) -> Path | None:
    """Cache file of a program, with its called graphs in a mode; `None` if caching is disabled or impossible."""
    if not (ir.options.enableEngineCaching and ir.options.cachePath and device.type is DeviceType.Ipu):
        return None
    if len({each.process_index for each in device.jax_devices}) > 1:
        _log.debug("The cache is not used: the program runs over several processes.")
        return None
    try:
        program = fingerprint(ir)
    except PopxlError as problem:
        _log.debug(f"The cache is not used: {problem}")
        return None
    key = {
        "program": program,
        "calls": mode,
        "made for": CompileTarget(device.jax_devices).build_stamp.model_dump(),
        "devices": [each.id for each in device.jax_devices],
        "flags": [os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")],
    }
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()
    return Path(ir.options.cachePath, digest[:32] + SUFFIX)


def _load_executables(path: Path) -> dict[str, bytes]:
    """Executables in a cache file; empty if missing or invalid."""
    for file in sorted(path.parent.glob(f"*{SUFFIX}")):
        _log.debug(f"PopEF file inferred to have hash {file.stem}: {file}")
    if not path.is_file():
        return {}
    preload = os.environ.get("POPART_PRELOAD_POPEF") == "full-preload"
    try:
        if preload:
            _log.debug(f"Performing preload of popef file {path}")
        content = path.read_bytes()
        if preload:
            _log.debug(f"Completed preload of popef file {path}")
        about, parts = unpack(KIND, content)
    except (OSError, ValueError) as problem:
        _log.warn(f"Ignoring cache file because it does not contain executables of popxl: {path}: {problem}")
        return {}
    if about.get("hash") != path.stem:
        _log.warn(f"Cache file hash did not match the IR hash: {about.get('hash')} is in {path}")
        return {}
    return parts


def _write(path: Path, entries: Mapping[str, bytes], about: Mapping[str, str] = MappingProxyType({})) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, pack(KIND, {"hash": path.stem, **about}, entries), like=f"*{path.suffix}")
    except OSError as problem:
        _log.warn(f"The compiled program could not be kept in {path}: {problem}")
    else:
        _log.debug(f"The compiled program is kept in {path}")


# JAX ----------------------------------------------------------------------------------------------------------------

_lock = threading.RLock()  # JAX has one persistent cache for all threads


@contextmanager
def _jax_cache(cached: Mapping[str, bytes]) -> Iterator[dict[str, bytes]]:
    """Redirect JAX's persistent cache to a temporary folder with entries `cached`. Yields a dict, filled with all
    entries when the block ends."""
    entries: dict[str, bytes] = {}
    with scratch_folder() as folder:
        for name, content in cached.items():
            (folder / Path(name).name).write_bytes(content)
        settings = {
            "jax_enable_compilation_cache": True,
            "jax_compilation_cache_dir": str(folder),
            "jax_compilation_cache_max_size": -1,
            "jax_persistent_cache_min_compile_time_secs": 0,
            "jax_persistent_cache_min_entry_size_bytes": -1,
            "jax_persistent_cache_enable_xla_caches": "none",
        }
        with _configured(settings):
            yield entries
        entries.update((file.name, file.read_bytes()) for file in sorted(folder.iterdir()))


@contextmanager
def _configured(settings: Mapping[str, object]) -> Iterator[None]:
    """Set options of JAX's persistent cache while the block runs."""
    with _lock:
        before = {name: jax.config.values[name] for name in settings}
        try:
            _configure(settings)
            yield
        finally:
            _configure(before)


def _configure(settings: Mapping[str, object]) -> None:
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # it reads its settings once
