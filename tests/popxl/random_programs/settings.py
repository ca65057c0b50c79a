"""How a random program is run: what is drawn beside the program itself."""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

import popart
import popxl
from popxl.errors import PopxlWarning


@dataclass(frozen=True)
class Settings:
    """How to run a program.

    Attributes:
        called_graphs, placement, remote_buffers: options of the Ir.
        replicas: how many run it.
        devices: whether one device stands for all replicas and IPUs.
        ipus: on how many its ops are.
        streams: whether it talks to the host on its way.
        buffers: whether it has remote buffers.
        layers: whether it calls graphs again and again.
        way: whether it is run as it was built, or as it is loaded from a file.
    """

    called_graphs: Literal["auto", "kept", "dispatched", "rolled", "batched", "inlined"]
    placement: Literal["auto", "several", "one"]
    remote_buffers: Literal["host", "device"]
    replicas: int
    devices: Literal["one", "several"]
    ipus: int
    streams: bool
    buffers: bool
    layers: bool
    way: Literal["built", "loaded"]

    @staticmethod
    def drawn(number: int) -> Settings:
        """The settings with this number."""
        random = np.random.default_rng([number, 1])

        def choice(**weights: float) -> Any:
            return list(weights)[random.choice(len(weights), p=np.array(list(weights.values())))]

        return Settings(
            called_graphs=choice(auto=0.1, kept=0.2, dispatched=0.3, rolled=0.15, batched=0.1, inlined=0.15),
            placement=choice(auto=0.2, several=0.6, one=0.2),
            remote_buffers=choice(host=0.75, device=0.25),
            replicas=int(choice(**{"1": 0.5, "2": 0.25, "4": 0.25})),
            devices=choice(one=0.3, several=0.7),
            ipus=int(choice(**{"1": 0.5, "2": 0.3, "3": 0.2})),
            streams=bool(random.random() < 0.75),
            buffers=bool(random.random() < 0.75),
            way=choice(built=0.7, loaded=0.3),
            layers=bool(random.random() < 0.5),
        )

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in asdict(self).items())

    def ir(self) -> popxl.Ir:
        """A program without ops."""
        return popxl.Ir(self.replicas)

    def scatter(self, ir: popxl.Ir, seed: int) -> None:
        """Put the ops of a program on the IPUs: mostly where the op before is, and what they make with them."""
        random = np.random.default_rng([seed, 2])
        here = 0
        for op in (op for graph in ir.graphs for op in graph.ops):
            if random.random() < 0.3:
                here = int(random.integers(self.ipus))
            there = int(random.integers(self.ipus)) if random.random() < 0.2 else here
            op.edit(ipu=here, location=(there, False))

    def session(self, ir: popxl.Ir) -> popxl.Session:
        """A session of a program. What looks like a mistake in it is none: nobody wrote it."""
        ir.options.calledGraphs = self.called_graphs
        ir.options.placement = self.placement
        ir.options.remoteBuffers = self.remote_buffers
        device = popart.DeviceManager().createIpuModelDevice() if self.devices == "one" else "ipu_model"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PopxlWarning)
            return popxl.Session(ir, device)
