"""The loop of a serialised graph: loads, calls and stores of an iteration, and the order of iterations.

The user's interface is in `batch_serialisation`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import popxl
from popxl import ops
from popxl.context import get_current_context
from popxl.tensor import Tensor
from popxl_addons import _io_tiles
from popxl_addons.transforms.remote_handle import RemoteHandle
from popxl_addons.utils import suffix_graph_name

Values = dict[Tensor, Tensor]
"""Tensors of a graph under construction, by the tensors of the original graph that they stand for."""

Iteration = Callable[[Tensor, Tensor, Values, Values], Values]


@dataclass(frozen=True, eq=False)
class SerialLoop:
    """Loop body for `graph` over `steps` iterations."""

    graph: popxl.Graph
    steps: int
    loads: Mapping[Tensor, popxl.HostToDeviceStream | RemoteHandle]
    streams: Mapping[Tensor, popxl.DeviceToHostStream]
    buffers: Mapping[Tensor, RemoteHandle]
    seed_input: Tensor | None
    use_io_tiles: bool

    def build(self, overlapped: bool) -> tuple[popxl.Graph, Values]:
        """Build the loop graph; also return its inputs by original tensor."""
        graph = self.graph.ir.create_empty_graph(suffix_graph_name(self.graph.name, "_repeat_graph"))
        with graph, popxl.in_sequence():  # a call may change stored tensors in place: its order matters
            row = popxl.graph_input((), popxl.int32, "row")
            seed = {} if self.seed_input is None else _inputs_like([self.seed_input])
            others = [t for t in self.graph.inputs if t not in self.loads and t not in seed]
            resident = _inputs_like(others, by_ref=True)
            (self._overlapped if overlapped else self._run_rows)(row, seed, resident)
        return graph, {**seed, **resident}

    def _run_rows(self, row: Tensor, seed: Values, resident: Values) -> None:
        def iteration(row: Tensor, i: Tensor, seed: Values, resident: Values) -> Values:
            return self._run(row, i, {**seed, **self._load(row, i)}, resident)

        self._repeat(self.steps, row, seed, resident, iteration)

    def _overlapped(self, row: Tensor, seed: Values, resident: Values) -> None:
        """An iteration needs nothing that is loaded during it, so both may happen at once."""

        def iteration(row: Tensor, i: Tensor, ready: Values, resident: Values) -> Values:
            ahead = self._load(row, i + 1)
            return {**self._run(row, i, ready, resident), **ahead}

        ready = {**seed, **self._load(row, 0)}
        last = self._repeat(self.steps - 1, row, ready, resident, iteration)
        self._run(row, self.steps - 1, last, resident)

    def _repeat(self, count: int, row: Tensor, carried: Values, resident: Values, iteration: Iteration) -> Values:
        """Repeat an iteration, which turns the carried values into those of the next one. Returns the last ones."""
        body = self.graph.ir.create_empty_graph(suffix_graph_name(self.graph.name, "_repeat_body"))
        with body, popxl.in_sequence():
            i = popxl.graph_input((), popxl.int32, "i")
            i.set_location(get_current_context().ipu_id, False)  # although its first use may be as a slot on I/O tiles
            own_carried = _inputs_like(carried)
            own_row = popxl.graph_input((), popxl.int32, "row")
            carried_out = iteration(own_row, i, own_carried, _inputs_like(resident, by_ref=True))
            for t in (i + 1, *carried_out.values()):
                popxl.graph_output(t)
        _, *last = ops.repeat(body, count, 0, *carried.values(), row, *resident.values())
        return dict(zip(carried, last, strict=True))

    def _load(self, row: Tensor, i: Tensor | int) -> Values:
        """The values that iteration `i` loads."""
        return {
            t: (
                source.load(source.entry(row, self.steps, i), t, self.use_io_tiles)
                if isinstance(source, RemoteHandle)
                else _io_tiles.loaded(self.use_io_tiles, ops.host_load, source, t.name)
            )
            for t, source in self.loads.items()
        }

    def _run(self, row: Tensor, i: Tensor | int, carried: Values, resident: Values) -> Values:
        """Run iteration `i` and store its results. Returns the next seed, if any."""
        inputs, carry = {**carried, **resident}, {}
        if self.seed_input is not None:
            inputs[self.seed_input], carry[self.seed_input] = ops.split_random_seed(carried[self.seed_input])
        outputs = ops.call(self.graph, inputs_dict=inputs)
        values = {**dict(zip(self.graph.outputs, outputs, strict=True)), **inputs}
        for t, stream in self.streams.items():
            _io_tiles.stored(self.use_io_tiles, ops.host_store, stream, values[t])
        for t, handle in self.buffers.items():
            handle.store(handle.entry(row, self.steps, i), values[t], self.use_io_tiles)
        return carry


def _inputs_like(tensors: Any, by_ref: bool = False) -> Values:
    """New current-graph inputs resembling tensors, optionally by reference."""
    return {t: popxl.gcg().add_input_like(t, by_ref and t.by_ref) for t in tensors}
