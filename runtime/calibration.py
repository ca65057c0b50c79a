"""Figures of the local chip, measured in less than a minute: `popxl calibrate`.

Each figure is the best of several runs, because other programs on the machine only slow runs down.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from popxl.base.atomic_files import replace_file
from popxl.base.pages import Page, Table, bytes_text, flops_text, seconds_text
from runtime.targets.chip import Chip, Cpu, Efficiency, Gpu, Link, of_device

_SIZES = (64, 256, 1024)
_VECTOR = 1 << 25
"""Elements, of 128 MiB: more than the caches of a machine hold."""
MOST_SECONDS = 1.5
"""Maximum seconds of measuring each figure."""


def calibrate(path: Path) -> Page:
    """Measure the first local device; returns its figures, and writes them to a file, which `POPXL_CHIP` names."""
    device = jax.local_devices()[0]
    known = of_device(device.device_kind)
    products = {size: _product_rate(size) for size in _SIZES}
    best = max(products.values())
    bandwidth = _bandwidth()
    launch, dispatch = _launch(), _dispatch()
    said = f"measured by `popxl calibrate` on {platform.processor() or platform.machine()}, {time.strftime('%Y-%m-%d')}"
    # Half the rate where a sum has `depth` products: from the rate of the smallest.
    small = products[_SIZES[0]]
    depth = max(0.0, _SIZES[0] * (best / small - 1))
    if isinstance(known, Gpu):
        efficiency = known.efficiency.model_copy(
            update={
                "products": min(1.0, best / known.rate("float32")),
                "memory": min(1.0, bandwidth / known.memory_bandwidth),
                "launch": launch,
                "dispatch": dispatch,
                "sources": (said,),
            }
        )
        chip: Chip = known.model_copy(update={"efficiency": efficiency})
    else:
        chip = Cpu(
            name=device.device_kind,
            sources=(said,),
            flops={"float32": best},
            memory_bytes=_memory_bytes(),
            memory_bandwidth=bandwidth,
            network_bandwidth=bandwidth / 2,
            host_bandwidth=bandwidth,
            links=(Link(name="memory", bandwidth=bandwidth / 2, latency=dispatch),),
            efficiency=Efficiency(launch=launch, dispatch=dispatch, depth=depth, sources=(said,)),
        )
    replace_file(path, (chip.model_dump_json(indent=2) + "\n").encode())
    rows = [[f"float32 product of {size}", f"{flops_text(round(rate))}/s"] for size, rate in products.items()]
    rows += [["memory, read and written", f"{bytes_text(round(bandwidth))}/s"]]
    rows += [["a kernel at least", seconds_text(launch)], ["a call", seconds_text(dispatch)]]
    hint = f"The figures are in {path}. POPXL_CHIP={path} popxl report FILE.py prints times by them."
    return Page(f"Figures of {chip.name}", [Table(["", "measured"], rows), hint])


def _best(run: Callable[[], Any]) -> float:
    """Seconds of the fastest of several runs."""
    jax.block_until_ready(run())
    times, end = list[float](), time.perf_counter() + MOST_SECONDS
    while len(times) < 3 or (time.perf_counter() < end and len(times) < 1000):
        begin = time.perf_counter()
        jax.block_until_ready(run())
        times.append(time.perf_counter() - begin)
    return min(times)


def _product_rate(size: int) -> float:
    """Operations per second of a square product, from a chain of several in one call."""
    iterations = max(1, 2**24 // size**2 // 4)
    x = jnp.ones((size, size), jnp.float32) / size
    chain = jax.jit(lambda x: jax.lax.fori_loop(0, iterations, lambda _, y: y @ x, x))
    return 2.0 * size**3 * iterations / _best(lambda: chain(x))


def _bandwidth() -> float:
    """Bytes a second that element-wise kernels read and write. Memory that a program gets anew takes longer."""
    x = jnp.ones(_VECTOR, jnp.float32)
    iterations = 8
    scaled = jax.jit(lambda x: jax.lax.fori_loop(0, iterations, lambda _, y: y * 0.5 + 1, x))
    return iterations * 2 * x.nbytes / _best(lambda: scaled(x))


def _launch() -> float:
    """Seconds of a kernel that does next to nothing, inside of a program."""

    def loop_seconds(count: int) -> float:
        body = jax.jit(lambda x: jax.lax.fori_loop(0, count, lambda i, y: jnp.sort(y), x))
        x = jnp.ones(4, jnp.float32)
        return _best(lambda: body(x))

    return max(1e-9, (loop_seconds(2000) - loop_seconds(1000)) / 1000)


def _dispatch() -> float:
    """Seconds per call of a nearly empty program."""
    x = jnp.ones(4, jnp.float32)
    plus = jax.jit(lambda x: x + 1)
    return _best(lambda: plus(x))


def _memory_bytes() -> int:
    meminfo = Path("/proc/meminfo")
    line = meminfo.read_text(encoding="utf-8").splitlines()[0] if meminfo.is_file() else ""
    return int(line.split()[1]) * 1024 if line else 1 << 33
