"""Random programs mean the same however they are run, and their gradients are those of JAX.

A seed makes a program, and how it is run. Compiling takes the time, so there are few here; the command
`python -m tests.popxl.random_programs` runs as many as there is time for, these among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest

import popxl
from tests.popxl.random_programs.agreement import TOGETHER, check, fewest, settings_of
from tests.popxl.random_programs.maker import Maker

pytestmark = pytest.mark.compiled_whole  # what XLA makes of programs is what is tested

NUMBERS = [*range(19), 25]
SEEDS = [range(n * TOGETHER, (n + 1) * TOGETHER) for n in NUMBERS] + [range(240, 243)]
"""The last ones are differentiated twice."""


@pytest.mark.thorough(but_each=32)
@pytest.mark.parametrize("seeds", SEEDS, ids=lambda seeds: f"{seeds.start}:{seeds.stop}")
def test_agreement(seeds: range) -> None:
    check(seeds)


def test_what_a_call_hands_back_is_not_overwritten() -> None:
    """XLA did so, where a kept call gave an array as it had been given it, and both were read at once."""
    check([15256])


def test_everything_is_drawn() -> None:
    """Each value of each setting that the first hundred draws give is among those that are run here."""

    def drawn(seeds: Sequence[int]) -> set[Any]:
        return {setting for seed in seeds for setting in asdict(settings_of(seed)).items()}

    assert drawn([seeds[0] for seeds in SEEDS]) == drawn(range(0, 1000, TOGETHER))


def test_a_seed_makes_one_program() -> None:
    def text() -> str:
        ir = popxl.Ir(replication=2)
        with ir.main_graph, popxl.in_sequence():
            Maker(3, buffers=True, replicas=2).main()
        return str(ir.main_graph)

    assert text() == text()


def test_a_failure_shows_the_program_and_how_to_run_it_again() -> None:
    def agree(seeds: Sequence[int], show: Any = lambda graph: None) -> None:
        show(popxl.Ir().main_graph)
        assert 3 not in seeds, "no threes"

    with pytest.raises(AssertionError, match=r"-m tests.popxl.random_programs --together 3\n(.*\n)*.*no threes"):
        check(range(5), agree)


def test_programs_that_fail_only_together_are_few() -> None:
    assert fewest(range(10), lambda seeds: {2, 7} <= {*seeds}) == [2, 7]
