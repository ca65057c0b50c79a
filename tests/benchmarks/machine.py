"""What numbers are measured on, and under which circumstances."""

from __future__ import annotations

import datetime
import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import jax


def now() -> dict[str, Any]:
    """The day, and the load of each core: that of others, as long as nothing has been measured yet."""
    return {"day": datetime.date.today().isoformat(), "load": round(os.getloadavg()[0] / cores(), 1)}


def machine() -> dict[str, Any]:
    """What the numbers are measured on."""
    versions = {}
    for package in ("jax", "jaxlib", "numpy", "torch"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    devices = sorted({device.device_kind for device in jax.devices()})
    about = {"processor": processor(), "cores": cores(), "devices": ", ".join(devices)}
    return {**about, "python": platform.python_version(), **versions}


def cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def processor() -> str:
    """Its name, as the system says it."""
    about = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*: (.+)$", about.read_text(encoding="utf-8"), re.M) if about.is_file() else []
    return names[0] if names else platform.processor() or platform.machine()
