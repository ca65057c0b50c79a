"""Random steps of training, made with the kit, with dropout and loops: right by construction.

As in `tests.trials.dropping`, one replica with the global batch draws the same masks.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

import numpy as np

import popxl
from popxl import ops
from popxl_addons.layers import Attention
from tests.trials.of_the_kit import F32, WIDTH, Network, of_the_kit
from tests.trials.program import Program

RATIO = 0.4
MASKS = ("features", "positions", "weights", "own", "own", "own attention", "none", "repeated", "no")


class DroppingNetwork(Network):
    """Some layers, behind which something is dropped, or which are repeated."""

    def __init__(self, draw: Random, inputs: str, tensor: str | None, own: Mapping[str, int]) -> None:
        super().__init__(draw, inputs, tensor, own)
        self.own = own
        self.masks = draw.choices(MASKS, k=len(self.kinds))
        self.numbers = [draw.getrandbits(16) for _ in self.kinds]
        self.attention = Attention(2, causal=draw.random() < 0.5, dropout=RATIO)

    def _one(self, i: int, kind: str, layer: Any, f: Any, g: Any, h: popxl.Tensor) -> popxl.Tensor:
        h = super()._one(i, kind, layer, f, g, h)
        match self.masks[i]:
            case "features":  # of all rows alike
                return ops.shaped_dropout(h, self.seed(i), (1, 1, h.shape[-1]), RATIO)
            case "positions":
                return ops.shaped_dropout(h, self.seed(i), (1, h.shape[1], 1), RATIO)
            case "weights":
                w = self.add_variable_input(f"dropped{i}", lambda: np.eye(WIDTH), F32)
                return h @ ops.dropout(w, self.seed(i), RATIO)
            case "none":
                return ops.dropout(h, self.seed(i), 0.0)
            case "own":
                pairs = zip(*self.parts(i, h), strict=True)
                return ops.concat([ops.dropout(part, seed, RATIO) for part, seed in pairs], 0)
            case "own attention":
                pairs = [*zip(*self.parts(i, h), strict=True)]
                part, seed = pairs[0]
                facts, graph = self.attention.create_graph(part, seed=seed)
                bound = graph.bind(self.add_variable_inputs(f"attention{i}", facts))
                return h + ops.concat([bound.call(part, seed)[0] for part, seed in pairs], 0)
            case "repeated":
                scale = self.add_variable_input(f"again{i}", lambda: np.full(WIDTH, 0.9), F32)
                body = popxl.gir().create_graph(lambda h, x, s: f(h) * s + x * 0.5, h, h, scale)
                return ops.repeat(body, 2, h, h, scale)[0]
        return h

    def seed(self, i: int) -> popxl.Tensor:
        return self.add_variable_input(f"seed{i}", lambda: popxl.create_seeds(self.numbers[i]), popxl.uint32)

    def parts(self, i: int, h: popxl.Tensor) -> tuple[list[popxl.Tensor], list[popxl.Tensor]]:
        """The rows of each replica with other data, and their seeds; on many replicas, what each has of its own."""
        ir, count = popxl.gir(), int(np.prod([*self.own.values()]))
        seeds = popxl.create_seeds(self.numbers[i], replicas=count)
        if count == 1:
            return [h], [self.seed(i)]
        if ir.replication_factor > 1:
            shared = tuple(axis for axis in ir.axes if axis not in self.own) or ir.replica_grouping(group_size=1)
            own = self.add_variable_input(f"seeds{i}", iter(seeds), popxl.uint32, replica_grouping=shared)
            return [h], [own]
        rows = self.add_variable_input(f"seeds{i}", lambda: seeds, popxl.uint32)
        return [*ops.split(h, count, 0)], [each.reshape((2,)) for each in ops.split(rows, count, 0)]


def kit_dropping(seed: int) -> Program:
    """A random step of training by the kit, with dropout and loops."""
    return of_the_kit(seed, DroppingNetwork)
