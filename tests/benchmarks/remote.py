"""Loads from and stores to remote buffers in the host's memory, beside `jax.device_put` between the same memories.

And beside buffers in the device's memory. Where host and device share one memory, as they do on CPUs, all three copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

import popxl
from popxl import ops
from tests.benchmarks.harness import OURS, Measure, Row, Size, check_agreement, gigabytes_per_second, time_of, times

Way = Literal["load", "store"]

SLOTS = 8


def data_of(size: Size) -> np.ndarray:
    """The numbers of each slot; always the same."""
    elements = 5 if size is Size.TINY else 1 << 20
    return np.random.default_rng(0).normal(size=(SLOTS, elements)).astype(np.float32)


class Moving:
    """A session that moves all slots of a buffer to as many variables, or the other way, and waits."""

    def __init__(self, data: np.ndarray, way: Way, memory: Literal["host", "device"]) -> None:
        ir = popxl.Ir()
        ir.options.remoteBuffers = memory
        with ir.main_graph, popxl.in_sequence():
            buffer = popxl.remote_buffer(data[0].shape, popxl.float32, entries=SLOTS)
            slots = [popxl.remote_variable(row * (way == "load"), buffer, i) for i, row in enumerate(data)]
            variables = [popxl.variable(row * (way == "store"), name=f"x{i}") for i, row in enumerate(data)]
            for i, variable in enumerate(variables):
                if way == "load":
                    ops.remote_load_(buffer, i, variable)
                else:
                    ops.remote_store(buffer, i, variable)
            self.out = popxl.d2h_stream((1,), popxl.float32)
            ops.host_store(self.out, variables[-1][:1])
        self.session = popxl.Session(ir, "ipu_hw")
        self._moved = variables if way == "load" else slots

    def run(self) -> np.ndarray:
        """A number that is there when everything else is."""
        return self.session.run()[self.out]

    def moved(self) -> list[np.ndarray]:
        """What has arrived."""
        return list(self.session.get_tensors_data(self._moved).values())


def put(data: np.ndarray, way: Way, device: jax.Device) -> Callable[[], Any]:
    """The same by hand."""
    host = SingleDeviceSharding(device, memory_kind="pinned_host")
    here = SingleDeviceSharding(device)
    start, end = (host, here) if way == "load" else (here, host)
    arrays = jax.device_put([*data], start)
    return lambda: jax.block_until_ready(jax.device_put(arrays, end))


@contextmanager
def moving(size: Size, way: Way) -> Iterator[Mapping[str, Measure]]:
    """Seconds for a gigabyte."""
    data = data_of(size)
    on_host, on_device = Moving(data, way, "host"), Moving(data, way, "device")
    by_hand = put(data, way, on_host.session.program.layout.devices[0])
    with ExitStack() as stack:
        for party in (on_host, on_device):
            stack.enter_context(party.session)
            party.run()
            check_agreement([*data], moved=party.moved(), by_hand=by_hand())
        works = {OURS: on_host.run, "device_put": by_hand, "on the device": on_device.run}
        measured = {name: time_of(work, 1 if size is Size.TINY else 20) for name, work in works.items()}
        yield {name: lambda of=of: of() / data.nbytes * 1e9 for name, of in measured.items()}


def row(way: Way) -> Row:
    """A row of the table."""
    targets = (times(0.95, "device_put"), times(None, "on the device"))
    about = f"{way}s of remote buffers, 8 slots of 4 MiB"
    return Row(f"remote_{way}", lambda size: moving(size, way), targets, show=gigabytes_per_second, about=about)


ROWS = (row("load"), row("store"))
