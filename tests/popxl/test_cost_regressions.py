"""A comparison of costs names each seeded regression by kind, and by line or argument. Two clean builds are alike."""

from __future__ import annotations

import jax
import pytest

import popxl
from runtime.costs.changes import changes_of
from runtime.costs.cost import Cost
from tests.popxl.cost_regressions import REGRESSIONS, Side

pytestmark = pytest.mark.compiled_whole  # what XLA makes of functions is what is tested

FILE = "cost_regressions.py"


def cost(side: Side) -> Cost:
    options = dict(side.options)
    compiler = options.pop("compiler_options", None)
    return popxl.analyze(jax.jit(side.function, compiler_options=compiler, **options), *side.arguments).cost


@pytest.mark.here
@pytest.mark.thorough(but_each=2)
@pytest.mark.parametrize("name", REGRESSIONS)
def test_regressions_are_named_by_kind_and_place(name: str) -> None:
    regression = REGRESSIONS[name]
    found = changes_of(cost(regression.before), cost(regression.after))
    named = [change for change in found.changes if regression.what in change.what]
    assert named, str(found)
    places = {change.where for change in found.changes}
    if regression.argument:
        assert regression.argument in {change.where for change in named}
    else:
        assert any(place.startswith(FILE) for place in places), str(found)


@pytest.mark.thorough(but_each=22)  # other tests of the process trace anew what they share, each time
@pytest.mark.parametrize("name", REGRESSIONS)
def test_two_clean_builds_do_not_differ(name: str) -> None:
    before = cost(REGRESSIONS[name].after)
    jax.clear_caches()
    assert not changes_of(before, cost(REGRESSIONS[name].after))


def test_there_are_forty() -> None:
    assert len(REGRESSIONS) >= 40
