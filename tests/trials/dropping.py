"""Random steps of training by hand, with dropout: masks that one replica with the global batch draws, too.

So numbers decide which are right. A mask is drawn for all rows, and each replica takes its slice; or it is the same for
all rows, or of a weight; or each replica has its own seed, and one replica draws the mask of each part of its batch
from the seed of the replica that has this part.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import popxl
from popxl import ops
from tests.trials.by_hand import F32, INNER, Back, C, Step, Weight
from tests.trials.of_the_kit import ROWS, WIDTH

WHOLE = ("sliced", "sliced noise", "features", "positions", "weights", "own", "own", "own", "fed", "none")
RATIO = 0.4


class DroppingStep(Step):
    """A step of training with dropout behind some layers, and within divided ones."""

    def _build(self) -> None:
        self.seeds: list[popxl.Tensor] = []
        super()._build()
        for seed in self.seeds:
            ops.add_(seed, popxl.constant(1, popxl.uint32))

    # Seeds and masks --------------------------------------------------------------------------------------------------

    def seed(self, *own: str, are_tied: bool = False) -> popxl.Tensor:
        """A seed for each place along some axes, and the same along others. One replica has all of them, in rows.

        By mistake `are_tied`, to the first, on many replicas.
        """
        own = tuple(axis for axis in self.axes if axis in own)
        count = int(np.prod([self.axes[axis] for axis in own]))
        seeds = popxl.create_seeds(self.draw.getrandbits(16), replicas=count)
        is_one = self.ir.replication_factor == 1
        if are_tied and not is_one and own:
            seeds = np.broadcast_to(seeds[:1], seeds.shape)
        shared = tuple(axis for axis in self.axes if axis not in own) or self.ir.replica_grouping(group_size=1)
        grouping = {} if is_one or not own else {"replica_grouping": shared}
        made = popxl.variable(seeds, popxl.uint32, self.name("seed"), **grouping)
        self.seeds.append(made)
        if not own and self.draw.random() < 0.3:
            return ops.split_random_seed(made)[1]
        return made

    def rows(self) -> tuple[int, int]:
        """Rows of all replicas along `data`, and of each."""
        count = ROWS * self.axes.get("data", 1) * (self.axes["tensor"] if self.are_gathered else 1)
        return count, count // self.sizes.get("data", 1)

    def sliced(self, t: popxl.Tensor, dim: int, axis: str) -> popxl.Tensor:
        """This replica's slice along an axis; or all, or that along another, by mistake."""
        if self.sizes.get(axis, 1) == 1:
            return t
        return C.replicated_slice(t, dim, axis)

    def mask(self, width: int, is_noise: bool = False) -> popxl.Tensor:
        """What all rows are multiplied with, as far as this replica has them."""
        count, part = self.rows()
        is_local = "data" in self.axes and self.errs()  # the same mask on each replica
        shape = (part if is_local else count, 4, width)
        seed = self.seed()
        how = self.draw.choice(("dropout", "uniform"))
        if is_noise:
            whole = ops.random_normal(seed, shape, std=0.2) + 1.0
        elif how == "dropout":
            whole = ops.dropout(popxl.constant(np.ones(shape, np.float32)), seed, RATIO)
        else:
            whole = ops.cast(ops.random_uniform(seed, shape) > popxl.constant(RATIO), F32)
        return whole if is_local else self.sliced(whole, 0, "data")

    def fed_mask(self) -> popxl.Tensor:
        _, part = self.rows()
        fed = ops.host_load(popxl.h2d_stream((part, 4, WIDTH), F32, self.name("mask"), num_host_transfers=1))
        if "tensor" in self.axes:
            fed = C.assert_replicated(fed, "tensor")
        return ops.cast(fed > popxl.constant(-0.3), F32)

    def by_part(self, t: popxl.Tensor, seeds: popxl.Tensor, rows: int, columns: int) -> popxl.Tensor:
        """Dropout of each part of a value by its own seed; on many replicas, of the part that each has."""
        if self.ir.replication_factor > 1 or rows * columns == 1:
            return ops.dropout(t, seeds, RATIO)
        each = iter(ops.split(seeds, rows * columns, 0))
        made = [
            ops.concat([ops.dropout(part, next(each).reshape((2,)), RATIO) for part in ops.split(some, columns, 2)], 2)
            for some in ops.split(t, rows, 0)
        ]
        return ops.concat(made, 0)

    # Layers -----------------------------------------------------------------------------------------------------------

    def layer(self, x: popxl.Tensor) -> tuple[popxl.Tensor, Back]:
        y, back = super().layer(x)
        if self.draw.random() < 0.3:
            return y, back
        y, after = self.dropped(y)
        return y, lambda dy: back(after(dy))

    def dropped(self, x: popxl.Tensor) -> tuple[popxl.Tensor, Back]:
        """What replicas along `tensor` have alike, and those along `data` rows of, with some of it dropped."""
        kinds = WHOLE if "data" in self.axes else (*WHOLE, "plain", "plain")
        match self.draw.choice(kinds):
            case "sliced":
                return self.graph(lambda x, m: x * m, x, given=[self.mask(WIDTH)])
            case "sliced noise":
                return self.graph(lambda x, m: x * m, x, given=[self.mask(WIDTH, is_noise=True)])
            case "fed":
                return self.graph(lambda x, m: x * m, x, given=[self.fed_mask()])
            case "features":  # of all rows alike
                return self.graph(lambda x, s: ops.shaped_dropout(x, s, (1, 1, WIDTH), RATIO), x, given=[self.seed()])
            case "positions":
                return self.graph(lambda x, s: ops.shaped_dropout(x, s, (1, 4, 1), RATIO), x, given=[self.seed()])
            case "weights":
                return self.graph(
                    lambda x, w, s: x + x @ ops.dropout(w, s, RATIO),
                    x,
                    self.weight(WIDTH, WIDTH),
                    given=[self.seed()],
                )
            case "plain":  # all replicas have the same rows
                seed = self.seed("tensor") if self.errs() else self.seed()
                if seed.shape != (2,):
                    seed = ops.slice(seed, 0, 1, axis=0).reshape((2,))
                return self.graph(lambda x, s: ops.dropout(x, s, RATIO), x, given=[seed])
            case "none":
                return self.graph(lambda x, s: ops.dropout(x, s, 0.0), x, given=[self.seed()])
        parts = self.axes.get("data", 1)
        seeds = self.seed("data", are_tied=self.errs())
        return self.graph(lambda x, s: self.by_part(x, s, parts, 1), x, given=[seeds])

    def between(self, x: popxl.Tensor, a: Weight, b: Weight, f: Any) -> tuple[popxl.Tensor, Back]:
        """Both products of a divided layer, with dropout between them: of the columns that each replica has."""
        rows, columns = self.axes.get("data", 1), self.axes["tensor"]
        match self.draw.choice(("sliced", "own", "features", "no")):
            case "sliced":
                mask = self.sliced(self.mask(INNER), 2, "tensor")
                return self.graph(lambda x, a, b, m: f(x @ a) * m @ b, x, a, b, given=[mask])
            case "own":
                seeds = self.seed("data", "tensor")
                return self.graph(
                    lambda x, a, b, s: self.by_part(f(x @ a), s, rows, columns) @ b, x, a, b, given=[seeds]
                )
            case "features":
                whole = ops.dropout(popxl.constant(np.ones((1, INNER), np.float32)), self.seed(), RATIO)
                mask = self.sliced(whole, 1, "tensor")
                return self.graph(lambda x, a, b, m: f(x @ a) * m @ b, x, a, b, given=[mask])
        return super().between(x, a, b, f)
