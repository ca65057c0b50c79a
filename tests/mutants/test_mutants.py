"""The machinery of mutation testing: edits make programs that run, change numbers, and are told from the originals."""

from __future__ import annotations

import pytest

from tests.mutants.__main__ import Ran, differ, found_in, made, numbers, table
from tests.mutants.mutations import mutations
from tests.mutants.programs import PROGRAMS


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_is_found_in_the_originals(name: str) -> None:
    assert found_in(PROGRAMS[name]()) == []


def test_programs_have_hundreds_of_mutants_of_all_kinds() -> None:
    kinds = [each.kind for name in PROGRAMS for each in mutations(PROGRAMS[name]())]
    assert len(kinds) >= 300
    assert {*kinds} == {
        "another group",
        "drop a collective",
        "exchange axes",
        "feed the same batch to all",
        "initialise replicas differently",
        "move a collective",
        "read a stale piece",
        "reduce twice",
        "scale by a wrong n",
        "sum for mean, mean for sum",
        "take a local for a global loss",
        "tie a seed",
        "transpose a shard",
        "untie a seed",
    }


@pytest.mark.thorough
def test_a_mutant_of_each_kind_is_run_beside_its_original() -> None:
    name = "by hand, divided network"
    expected = numbers(name, PROGRAMS[name]())
    assert not differ(numbers(name, PROGRAMS[name]()), expected)
    first = {each.kind: each for each in reversed([*mutations(PROGRAMS[name]())])}
    mutants = [made(name, each, lambda: expected, Ran(None)) for each in first.values()]
    of_kind = {each.kind: each for each in mutants if each is not None}
    assert of_kind.keys() == first.keys() and len(of_kind) >= 10
    assert sum(each.changed for each in of_kind.values()) >= 8
    dropped = of_kind["drop a collective"]
    assert dropped.changed and dropped.where[0] == 0
    assert [*table([*of_kind.values()])][-1].startswith(f"| all | {len(of_kind)} |")
