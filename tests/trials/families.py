"""Families of random programs, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from random import Random

import popxl
from tests.mutants.mutations import mutations
from tests.trials.by_hand import by_hand
from tests.trials.dropping import DroppingStep
from tests.trials.kit_dropping import kit_dropping
from tests.trials.looping import LoopingStep
from tests.trials.of_the_kit import of_the_kit
from tests.trials.program import Program

UNSEEN = ("initialise replicas differently", "tie a seed", "untie a seed")
"""Edits that an experiment undoes, which has all replicas begin alike; or does not know, as it draws other numbers."""


def edited(seed: int) -> Program:
    """A step of training by the kit, and one or two random edits of it."""
    program = of_the_kit(seed)

    def build(axes: Mapping[str, int], factor: float = 1.0) -> popxl.Ir:
        ir, draw = program.build(axes, factor), Random(seed)
        for _ in range(draw.choice((1, 1, 1, 2)) if ir.replication_factor > 1 else 0):
            edits = [each for each in mutations(ir) if each.kind not in UNSEEN]
            draw.choice(edits).on(ir)
        return ir

    return Program(seed, program.axes, build)


RIGHT: Mapping[str, Callable[[int], Program]] = {
    "by hand": by_hand,
    "kit": of_the_kit,
    "dropout": partial(by_hand, step=DroppingStep),
    "loops": partial(by_hand, step=LoopingStep),
    "kit, dropout and loops": kit_dropping,
}
"""Those that are right by construction."""

FAMILIES: Mapping[str, Callable[[int], Program]] = {
    **RIGHT,
    "by hand, mistakes": partial(by_hand, mistakes=0.15),
    "dropout, mistakes": partial(by_hand, mistakes=0.1, step=DroppingStep),
    "loops, mistakes": partial(by_hand, mistakes=0.1, step=LoopingStep),
    "kit, edited": edited,
}
