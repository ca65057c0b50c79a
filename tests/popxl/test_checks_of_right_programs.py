"""Nothing is found in programs of several replicas that are right: those whose messages `tests.targets` compares."""

from contextlib import suppress

import pytest

from popxl.analysis.checking import check
from runtime.machine import LayoutMachine, NothingRuns
from runtime.watched_runs import WatchingMachine, watched
from tests.targets.communication import PROGRAMS


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_is_found(name: str) -> None:
    machine = WatchingMachine(LayoutMachine())
    with watched(machine), suppress(NothingRuns):
        PROGRAMS[name](8)
    ((ir, _),) = machine.programs
    assert [str(each) for each in check(ir).findings] == []
