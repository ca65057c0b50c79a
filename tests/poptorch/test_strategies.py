"""Stages, phases and strategies as plain data, and where each puts a block."""

# ruff: noqa: E402 - poptorch needs torch

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from poptorch.enums import AutoStage, Liveness
from poptorch.placement.strategies import (
    BlockPlacement,
    ParallelPhasedExecution,
    Phase,
    PipelinedExecution,
    SerialPhasedExecution,
    ShardedExecution,
    Stage,
)

PIPELINES = [PipelinedExecution, ShardedExecution]
PHASED = [ParallelPhasedExecution, SerialPhasedExecution]


def test_stage() -> None:
    stage = Stage("A", "B")
    assert stage.blocks == ["A", "B"] and stage.ipu(3) is stage and stage.unit == 3
    stage.blocks.append("C")
    assert stage.blocks == ["A", "B"], "what is read is a copy"


def test_phase() -> None:
    assert [stage.blocks for stage in Phase("A", "B").stages] == [["A", "B"]]
    phase = Phase(Stage("A"), Stage("B"))
    assert phase.stage(1).blocks == ["B"]
    assert phase.ipus(2, 0) is phase and [stage.unit for stage in phase.stages] == [2, 0]


@pytest.mark.parametrize("strategy", PIPELINES)
def test_pipelines(strategy: type[PipelinedExecution]) -> None:
    given = strategy(Stage("A", "B").ipu(5), "C", ["D", "E"])
    assert [given.stage(block).blocks for block in "AC"] == [["A", "B"], ["C"]]
    places = {
        block: given.place_block(block, asked, 0) for block, asked in [("A", 1), ("B", None), ("C", 7), ("D", None)]
    }
    assert places == {
        "A": BlockPlacement(5, 0),
        "B": BlockPlacement(5, 0),
        "C": BlockPlacement(7, 1),
        "D": BlockPlacement(2, 2),
    }
    assert repr(strategy([Stage("A"), Stage("B")])) == f"{strategy.__name__}(Stage('A'), Stage('B'))"
    assert [stage.blocks for stage in strategy(["A", "B"]).stages] == [["A", "B"]], "one list of ids is one stage"


@pytest.mark.parametrize("strategy", PIPELINES)
def test_automatic_stages(strategy: type[PipelinedExecution]) -> None:
    assert strategy().auto_stage is AutoStage.SameAsIpu and strategy().stages == []
    assert strategy().place_block("A", 2, begun=7) == BlockPlacement(2, 2)
    counted = strategy(AutoStage.AutoIncrement)
    assert counted.place_block("A", 0, begun=0) == BlockPlacement(0, 1)
    assert counted.place_block("B", None, begun=1) == BlockPlacement(2, 2)


@pytest.mark.parametrize("strategy", PHASED)
@pytest.mark.parametrize(
    "phases",
    [
        (Phase("A", "B"), Phase(Stage("C"), Stage("D"))),
        (["A", "B"], [Stage("C"), Stage("D")]),
        ([Phase("A", "B"), Phase(Stage("C"), Stage("D"))],),
        ([["A", "B"], [Stage("C"), Stage("D")]],),
        (["A", "B"], [["C"], ["D"]]),
        ([[["A", "B"]], [["C"], Stage("D")]],),
    ],
)
def test_phased(strategy: Callable[..., Any], phases: tuple[Any, ...]) -> None:
    given = strategy(*phases)
    assert [[stage.blocks for stage in phase.stages] for phase in given.phases] == [[["A", "B"]], [["C"], ["D"]]]
    assert given.phase(1).stage(0).blocks == ["C"] and given.stage("B").blocks == ["A", "B"]
    assert given.useSeparateBackwardPhase() is given and given.backendOptions()["separate_backward_phase"] is True


@pytest.mark.parametrize("strategy", PHASED)
def test_stages_and_ids_are_phases(strategy: Callable[..., Any]) -> None:
    given = strategy("A", Stage("B", "C").ipu(2), ["D"])
    assert [[stage.blocks for stage in phase.stages] for phase in given.phases] == [[["A"]], [["B", "C"]], [["D"]]]
    assert given.place_block("C", None, 0) == BlockPlacement(2, 0, 1)


def test_the_units_of_phases() -> None:
    serial = SerialPhasedExecution(Phase(Stage("A"), Stage("B")), Phase(Stage("C"), Stage("D")))
    assert [serial.place_block(block, None, 0) for block in "ABCD"] == [
        BlockPlacement(0, 0, 0),
        BlockPlacement(1, 1, 0),
        BlockPlacement(0, 0, 1),
        BlockPlacement(1, 1, 1),
    ]
    serial.phase(1).ipus(3, 2)
    assert [serial.place_block(block, 9, 0).unit for block in "ABCD"] == [9, 9, 3, 2]
    parallel = ParallelPhasedExecution(Phase(Stage("A"), Stage("B")), Phase(Stage("C"), Stage("D")))
    assert [parallel.place_block(block, None, 0).unit for block in "ABCD"] == [0, 2, 1, 3]


def test_liveness() -> None:
    serial, parallel = SerialPhasedExecution(["A"]), ParallelPhasedExecution(["A"])
    assert serial.setTensorsLiveness(Liveness.OffChipAfterEachPhase) is serial
    assert serial.backendOptions()["tensors_liveness"] is Liveness.OffChipAfterEachPhase
    assert parallel.sendTensorsOffChipAfterFwd() is parallel and parallel.liveness is Liveness.OffChipAfterFwd
    assert parallel.sendTensorsOffChipAfterFwd(False).liveness is Liveness.AlwaysLive


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Stage("A", 1), "Stage: a block id is 1; expected a string"),
        (lambda: Stage("A").ipu("0"), "Stage.ipu: `ipu` is '0'; expected the number of a unit"),
        (lambda: Stage("A").ipu(-1), "Stage.ipu: `ipu` is -1"),
        (lambda: Phase(), "Phase: it is made of []; expected stages"),
        (lambda: Phase("A", Stage("B")), "expected stages, or ids of blocks"),
        (lambda: Phase("A").ipus(0, 1), "Phase.ipus: 2 units for 1 stages"),
        (lambda: PipelinedExecution(Stage("A"), 3), "PipelinedExecution: 3 is no stage; expected one `AutoStage`"),
        (lambda: PipelinedExecution(AutoStage.SameAsIpu, "A"), "<AutoStage.SameAsIpu: 0> is no stage"),
        (lambda: ShardedExecution(Stage("A", "B"), "A"), "block 'A' is in Stage('A', 'B') and in Stage('A')"),
        (
            lambda: PipelinedExecution("A").stage("B"),
            "Unknown Block 'B': PipelinedExecution does not list it; it lists 'A'",
        ),
        (lambda: PipelinedExecution("A").place_block("B", 0, 0), "Unknown Block 'B'"),
        (
            lambda: PipelinedExecution().stage("B"),
            "Unknown Block 'B': PipelinedExecution does not list it; it lists none",
        ),
        (
            lambda: ShardedExecution().place_block("B", None, 0),
            "Block 'B' has no `ipu_id`, and poptorch.AutoStage.SameAsIpu",
        ),
        (lambda: SerialPhasedExecution(), "SerialPhasedExecution: there are no phases"),
        (lambda: ParallelPhasedExecution([]), "ParallelPhasedExecution: there are no phases"),
        (lambda: SerialPhasedExecution(1), "SerialPhasedExecution: 1 is no phase; expected a `Phase`"),
        (
            lambda: SerialPhasedExecution("A").phase(1),
            "SerialPhasedExecution.phase: the index is 1; expected a number fr",
        ),
        (lambda: Phase("A").stage("A"), "Phase.stage: the index is 'A'; expected a number from 0 to 0"),
        (lambda: SerialPhasedExecution(["A"], ["A"]), "block 'A' is in Stage('A') and in Stage('A')"),
        (lambda: SerialPhasedExecution(["A"]).setTensorsLiveness(1), "`liveness` is 1; expected a `poptorch.Liveness`"),
    ],
)
def test_what_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(AssertionError) as raised:
        make()
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "strategy",
    [
        PipelinedExecution(AutoStage.AutoIncrement),
        ShardedExecution(Stage("A").ipu(2), ["B", "C"]),
        ParallelPhasedExecution(["A"], ["B"]).sendTensorsOffChipAfterFwd(),
        SerialPhasedExecution(["A"], [Stage("B"), Stage("C").ipu(1)]).useSeparateBackwardPhase(),
    ],
)
def test_copies_show_the_same(strategy: Any) -> None:
    assert repr(copy.deepcopy(strategy)) == repr(pickle.loads(pickle.dumps(strategy))) == repr(strategy)
