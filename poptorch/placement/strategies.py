"""Execution strategies: assignment of blocks to stages, phases and units, with four schedules.

No strategy changes a number. This file has plain data and its rules; the assignment of operations during capture is in
`poptorch.placement.capture_context`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from poptorch.enums import AutoStage, Liveness

__all__ = [
    "BlockId",
    "ParallelPhasedExecution",
    "Phase",
    "PipelinedExecution",
    "SerialPhasedExecution",
    "ShardedExecution",
    "Stage",
]

_Item = TypeVar("_Item")

BlockId = str
"""Identifier of a block: the `user_id` of `Block`, `BeginBlock` and `BlockFunction`."""


@dataclass(frozen=True)
class BlockPlacement:
    """Block placement: unit, stage, and phase (in phased execution)."""

    unit: int
    stage: int
    phase: int | None = None


class Stage:
    """Blocks that share a unit.

    Args:
        block_ids: the `user_id`s of the blocks.

    Raises:
        AssertionError: if one is not a string.

    Example:
        >>> Stage("embedding", "encoder").ipu(1).blocks
        ['embedding', 'encoder']
    """

    def __init__(self, *block_ids: BlockId) -> None:
        for block_id in block_ids:
            if not isinstance(block_id, str):
                raise AssertionError(f"Stage: a block id is {block_id!r}; expected a string, the `user_id` of a block.")
        self._blocks = list(block_ids)
        self.unit: int | None = None

    @property
    def blocks(self) -> list[BlockId]:
        """Ids of this stage's blocks."""
        return list(self._blocks)

    def ipu(self, ipu: int) -> Stage:
        """Run on unit `ipu`, overriding units of blocks; returns the stage itself."""
        if not isinstance(ipu, int) or ipu < 0:
            raise AssertionError(f"Stage.ipu: `ipu` is {ipu!r}; expected the number of a unit, from 0.")
        self.unit = ipu
        return self

    def __repr__(self) -> str:
        unit = "" if self.unit is None else f".ipu({self.unit})"
        return f"Stage({', '.join(map(repr, self._blocks))}){unit}"


class Phase:
    """Concurrent stages of phased execution.

    Args:
        arg: stages, or lists of ids of blocks, each of which is one; or ids of blocks, which then are one stage.

    Example:
        >>> Phase("A", "B")
        Phase(Stage('A', 'B'))
        >>> Phase(Stage("A"), Stage("B")).ipus(0, 2)
        Phase(Stage('A').ipu(0), Stage('B').ipu(2))
    """

    def __init__(self, *arg: BlockId | Stage) -> None:
        self.stages: list[Stage] = _stages_of_phase(arg)

    def stage(self, idx: int) -> Stage:
        """Stage at index `idx`.

        Raises:
            AssertionError: if there is none.
        """
        return _item_at(self.stages, idx, "Phase.stage")

    def ipus(self, *ipus: int) -> Phase:
        """Assign stages to units, in order; returns the phase itself.

        Raises:
            AssertionError: if there are not as many units as stages.
        """
        if len(ipus) != len(self.stages):
            raise AssertionError(f"Phase.ipus: {len(ipus)} units for {len(self.stages)} stages; expected one for each.")
        for stage, ipu in zip(self.stages, ipus, strict=True):
            stage.ipu(ipu)
        return self

    def __repr__(self) -> str:
        return f"Phase({', '.join(map(repr, self.stages))})"


def _item_at(items: Sequence[_Item], index: int, what: str) -> _Item:
    """Stage or phase by checked index; `what` names the caller in errors."""
    if not isinstance(index, int) or not -len(items) <= index < len(items):
        raise AssertionError(f"{what}: the index is {index!r}; expected a number from 0 to {len(items) - 1}.")
    return items[index]


def _stages_of_phase(stages: Sequence[Any]) -> list[Stage]:
    if stages and all(isinstance(each, str) for each in stages):
        return [Stage(*stages)]
    if stages and all(isinstance(each, (Stage, list, tuple)) for each in stages):
        return [each if isinstance(each, Stage) else Stage(*each) for each in stages]
    raise AssertionError(
        f"Phase: it is made of {list(stages)!r}; expected stages, or ids of blocks that are one stage."
    )


class _IExecutionStrategy(ABC):
    """Interface of all execution strategies."""

    overlaps_stages = False
    """Whether stages run concurrently, each on another micro-batch."""

    @abstractmethod
    def block_stages(self) -> Iterator[tuple[BlockId, Stage, int, int | None]]:
        """Listed blocks: block id, stage, stage number, phase number."""

    @property
    def first_phase(self) -> int | None:
        """Phase of operations before any block; None without phases."""
        return None

    def stage(self, block_id: BlockId) -> Stage:
        """Stage containing a block.

        Raises:
            AssertionError: if the strategy does not list the block.
        """
        stage, _, _ = self._stage_of_block(block_id)
        return stage

    def place_block(self, block_id: BlockId, ipu_id: int | None, begun: int) -> BlockPlacement:
        """Placement of a block.

        Args:
            ipu_id: unit that the block requests. The unit of its stage has priority over it, and it over the number of
                the stage.
            begun: number of other blocks begun before it.

        Raises:
            AssertionError: if the strategy does not list the block, or needs a unit.
        """
        stage, number, phase = self._stage_of_block(block_id)
        asked = ipu_id if stage.unit is None else stage.unit
        return BlockPlacement(self._default_unit(number, phase) if asked is None else asked, number, phase)

    def _default_unit(self, stage: int, phase: int | None) -> int:
        return stage

    def _stage_of_block(self, block_id: BlockId) -> tuple[Stage, int, int | None]:
        listed = {each: (stage, number, phase) for each, stage, number, phase in self.block_stages()}
        if block_id not in listed:
            names = ", ".join(map(repr, listed)) or "none"
            raise AssertionError(
                f"Unknown Block {block_id!r}: {type(self).__name__} does not list it; it lists {names}. Add the block "
                "to one of its stages."
            )
        return listed[block_id]

    def _check_listed_once(self) -> None:
        owner: dict[BlockId, Stage] = {}
        for block_id, stage, _, _ in self.block_stages():
            if block_id in owner:
                raise AssertionError(
                    f"{type(self).__name__}: block {block_id!r} is in {owner[block_id]} and in {stage}; expected it in "
                    "one stage."
                )
            owner[block_id] = stage

    @abstractmethod
    def backendOptions(self) -> dict[str, Any]:
        """Strategy description for `Options.toDict`."""


class PipelinedExecution(_IExecutionStrategy):
    """Concurrent stages, each processing a different micro-batch; the default strategy.

    Args:
        args: nothing, or one `AutoStage`, which says how blocks become stages (`SameAsIpu` if nothing); or the stages
            in their order, `Stage`s, ids of blocks, or lists of ids; or one list of `Stage`s.

    Raises:
        AssertionError: for other arguments, and if a block is in two stages.

    Example:
        >>> strategy = PipelinedExecution(Stage("A", "B"), "C")
        >>> strategy.stage("B")
        Stage('A', 'B')
    """

    overlaps_stages = True

    def __init__(self, *args: AutoStage | BlockId | Stage | Sequence[BlockId] | Sequence[Stage]) -> None:
        self.auto_stage: AutoStage | None = None
        self.stages: list[Stage] = []
        if not args:
            self.auto_stage = AutoStage.SameAsIpu
        elif len(args) == 1 and isinstance(args[0], AutoStage):
            self.auto_stage = args[0]
        else:
            stages = args[0] if len(args) == 1 and _is_list_of_stages(args[0]) else args
            self.stages = [self._as_stage(each) for each in stages]  # type: ignore[union-attr]
        self._check_listed_once()

    def _as_stage(self, value: object) -> Stage:
        if isinstance(value, Stage):
            return value
        if isinstance(value, str):
            return Stage(value)
        if isinstance(value, (list, tuple)):
            return Stage(*value)
        raise AssertionError(
            f"{type(self).__name__}: {value!r} is no stage; expected one `AutoStage`, or stages: `Stage`s, ids of "
            "blocks, or lists of ids."
        )

    def block_stages(self) -> Iterator[tuple[BlockId, Stage, int, int | None]]:
        for number, stage in enumerate(self.stages):
            for block_id in stage.blocks:
                yield block_id, stage, number, None

    def place_block(self, block_id: BlockId, ipu_id: int | None, begun: int) -> BlockPlacement:
        if self.auto_stage is None:
            return super().place_block(block_id, ipu_id, begun)
        if self.auto_stage is AutoStage.AutoIncrement:
            stage = begun + 1  # ops before any block are in stage 0
            return BlockPlacement(stage if ipu_id is None else ipu_id, stage)
        if ipu_id is None:
            raise AssertionError(
                f"Block {block_id!r} has no `ipu_id`, and poptorch.AutoStage.SameAsIpu needs one for every block. Give "
                "it one, or list the blocks: `options.setExecutionStrategy(poptorch.PipelinedExecution(...))`."
            )
        return BlockPlacement(ipu_id, ipu_id)

    def backendOptions(self) -> dict[str, Any]:
        return {"execution_mode": "pipelined"}

    def __repr__(self) -> str:
        shown = self.stages if self.auto_stage is None else [f"AutoStage.{self.auto_stage.name}"]
        return f"{type(self).__name__}({', '.join(map(str, shown))})"


def _is_list_of_stages(value: object) -> bool:
    return isinstance(value, (list, tuple)) and not all(isinstance(each, str) for each in value)


class ShardedExecution(PipelinedExecution):
    """Sequential stages on separate IPUs; arguments as for `PipelinedExecution`.

    Example:
        >>> ShardedExecution(AutoStage.AutoIncrement)
        ShardedExecution(AutoStage.AutoIncrement)
    """

    overlaps_stages = False

    def backendOptions(self) -> dict[str, Any]:
        return {"execution_mode": "sharded"}


class _IPhasedExecution(_IExecutionStrategy):
    """Sequential phases; tensors may leave the device between phases.

    Args:
        phases: `Phase`s; or the contents of a phase: a `Stage`; the id of a block; or a list of `Stage`s, of lists of
            ids, or of ids, which then are one stage. They may also be given as one list.

    Raises:
        AssertionError: if there are none, for other arguments, and if a block is in two stages.
    """

    def __init__(self, *phases: Phase | Sequence[Stage] | Sequence[BlockId]) -> None:
        given: Sequence[Any] = phases
        if len(phases) == 1 and isinstance(phases[0], (list, tuple)) and _is_list_of_phases(phases[0]):
            given = phases[0]
        if not given:
            raise AssertionError(f"{type(self).__name__}: there are no phases; expected at least one.")
        self.phases = [self._as_phase(each) for each in given]
        self.liveness = Liveness.AlwaysLive
        self.separate_backward_phase = False
        self._check_listed_once()

    def _as_phase(self, value: object) -> Phase:
        if isinstance(value, Phase):
            return value
        if isinstance(value, (Stage, str)):
            return Phase(value)
        if isinstance(value, (list, tuple)):
            return Phase(*value)
        raise AssertionError(
            f"{type(self).__name__}: {value!r} is no phase; expected a `Phase`, a `Stage`, the id of a block, or a "
            "list of stages or ids."
        )

    def block_stages(self) -> Iterator[tuple[BlockId, Stage, int, int | None]]:
        for phase_number, phase in enumerate(self.phases):
            for number, stage in enumerate(phase.stages):
                for block_id in stage.blocks:
                    yield block_id, stage, number, phase_number

    @property
    def first_phase(self) -> int | None:
        return 0

    def phase(self, phase: int) -> Phase:
        """Phase at index `phase`.

        Raises:
            AssertionError: if there is none.
        """
        return _item_at(self.phases, phase, f"{type(self).__name__}.phase")

    def useSeparateBackwardPhase(self, use: bool = True) -> _IPhasedExecution:
        """Begin the backward pass in a separate phase, rather than in the last forward phase.

        Args:
            use: whether to use one; the initial setting is false.

        Returns:
            The strategy itself.
        """
        self.separate_backward_phase = use
        return self

    def backendOptions(self) -> dict[str, Any]:
        return {
            "execution_mode": "phased",
            "serial_phases_execution": isinstance(self, SerialPhasedExecution),
            "separate_backward_phase": self.separate_backward_phase,
            "tensors_liveness": self.liveness,
        }

    def __repr__(self) -> str:
        separate = ", separate_backward_phase=True" if self.separate_backward_phase else ""
        phases = ", ".join(map(repr, self.phases))
        return f"{type(self).__name__}({phases}, liveness={self.liveness.name}{separate})"


def _is_list_of_phases(values: Sequence[object]) -> bool:
    return not values or not all(isinstance(each, (str, Stage)) for each in values)


class ParallelPhasedExecution(_IPhasedExecution):
    """Phases alternating between two groups of units: even phases on even units, odd phases on odd units.

    A stage that asks for no unit runs on the next one of its group.

    Args:
        phases: `Phase`s, or their contents: `Stage`s, ids of blocks, or lists of them, as for `Phase`.

    Raises:
        AssertionError: if there are no phases, or a block is in two stages.

    Example:
        >>> strategy = ParallelPhasedExecution(Phase(Stage("A"), Stage("B")), Phase(Stage("C"), Stage("D")))
        >>> strategy.phase(1).ipus(1, 3)
        Phase(Stage('C').ipu(1), Stage('D').ipu(3))
    """

    def sendTensorsOffChipAfterFwd(self, off_chip: bool = True) -> ParallelPhasedExecution:
        """Send tensors off the device at the end of the forward pass; returns the strategy itself."""
        self.liveness = Liveness.OffChipAfterFwd if off_chip else Liveness.AlwaysLive
        return self

    def _default_unit(self, stage: int, phase: int | None) -> int:
        return 2 * stage + (phase or 0) % 2


class SerialPhasedExecution(_IPhasedExecution):
    """Sequential phases on one group of units.

    Args:
        phases: `Phase`s, or their contents: `Stage`s, ids of blocks, or lists of them, as for `Phase`.

    Raises:
        AssertionError: if there are no phases, or a block is in two stages.

    Example:
        >>> strategy = SerialPhasedExecution(["A"], ["B", "C"])
        >>> strategy.phase(1)
        Phase(Stage('B', 'C'))
        >>> strategy.setTensorsLiveness(Liveness.OffChipAfterFwd)
        SerialPhasedExecution(Phase(Stage('A')), Phase(Stage('B', 'C')), liveness=OffChipAfterFwd)
    """

    def setTensorsLiveness(self, liveness: Liveness) -> SerialPhasedExecution:
        """Set the liveness of tensors on the device; returns the strategy itself.

        Raises:
            AssertionError: if it is not a `Liveness`.
        """
        if not isinstance(liveness, Liveness):
            raise AssertionError(f"setTensorsLiveness: `liveness` is {liveness!r}; expected a `poptorch.Liveness`.")
        self.liveness = liveness
        return self
