"""Version information for problem reports: installed packages, and devices visible to JAX."""

from __future__ import annotations

import argparse
import logging
import os
import platform
import re
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata
from typing import Any

import jax
from jax.extend.backend import backends

from popxl.base.version import VERSION
from runtime.jax_private import BACKEND_LOG
from runtime.targets.devices import ask_for_cpu_devices

_PACKAGES = re.compile(r"jax|jaxlib|jax[-_].*|libtpu|numpy|torch")
"""Packages that affect results or speed, with drivers of hardware such as `jax-cuda12-plugin`."""


class ShowVersions(argparse.Action):
    """Command line option that prints `versions()` and exits."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        what = "print the versions of what programs run with, and the devices that JAX sees"
        super().__init__(option_strings, dest, nargs=0, help=what)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # leaves GPU memory to programs that use it
        print(versions())
        parser.exit()


def versions() -> str:
    """Versions of installed packages, and devices visible to JAX, such as `1 gpu (NVIDIA H200), 8 cpu`.

    JAX is started, if it does not run yet.

    Example:
        >>> print(versions())
        popxl...
        python...
        jax...
        devices...
    """
    installed = reversed([*metadata.distributions()])  # the first of a name is the one that is imported
    packages = {each.name: each.version for each in installed if _PACKAGES.fullmatch(each.name or "")}
    found, problems = _devices(packages)
    lines = [("popxl", VERSION), ("python", platform.python_version()), *sorted(packages.items())]
    lines += [("devices", found), *(("", problem) for problem in problems)]
    width = max(len(name) for name, _ in lines)
    return "\n".join(f"{name:<{width}}  {text}" for name, text in lines)


def _devices(packages: Container[str]) -> tuple[str, list[str]]:
    """Devices visible to JAX, best first, and one sentence per unusable platform."""
    ask_for_cpu_devices()
    # JAX says at the level INFO why there is no TPU, also where no driver for TPUs is installed.
    with _captured_log(logging.INFO if "libtpu" in packages else logging.WARNING) as messages:
        try:
            best = jax.local_devices()
        except (RuntimeError, AssertionError) as problem:  # the latter, if JAX_PLATFORMS names only missing platforms
            platforms = jax.config.values["jax_platforms"]
            asked = f" with JAX_PLATFORMS={platforms}" if platforms else ""
            return f"none. JAX does not start{asked}: {_sentence(str(problem)) or 'there is no such device.'}", messages
    others = [backend.local_devices() for backend in backends().values() if backend.platform != best[0].platform]
    return ", ".join(map(_device_count, [best, *filter(None, others)])), messages


def _device_count(found: Sequence[jax.Device]) -> str:
    kinds = ", ".join(sorted({each.device_kind for each in found} - {found[0].platform}))
    return f"{len(found)} {found[0].platform}{kinds and f' ({kinds})'}"


@contextmanager
def _captured_log(level: int) -> Iterator[list[str]]:
    """Collect JAX log messages about unusable devices as sentences, replacing tracebacks."""
    sentences: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            why = f": {record.exc_info[1]}" if record.exc_info else ""
            sentences.append(_sentence(record.getMessage() + why))

    log, listener = logging.getLogger(BACKEND_LOG), Listener(level)
    before, log.propagate = (log.level, log.propagate), False
    log.setLevel(level)
    log.addHandler(listener)
    try:
        yield sentences
    finally:
        log.removeHandler(listener)
        log.level, log.propagate = before


def _sentence(text: str) -> str:
    """First line of a message."""
    return text.strip().partition("\n")[0]
