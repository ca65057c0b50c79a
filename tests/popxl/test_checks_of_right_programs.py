"""Nothing is found in programs of several replicas that are right: those whose messages `tests.targets` compares."""

from contextlib import suppress

import numpy as np
import pytest

import popxl
from popxl import ops
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


def test_constants_are_nobodys_own() -> None:
    with (ir := popxl.Ir(replication=2)).main_graph, popxl.in_sequence():
        ops.host_store(popxl.d2h_stream((), popxl.float32), popxl.constant(1.0, popxl.float32))
        ops.collectives.replica_sharded_slice(popxl.constant(np.ones(4), popxl.float32))
    assert [*check(ir).findings, *check(ir).notes] == []
