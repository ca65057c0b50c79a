"""Options of the rows of a call: micro-batches, replicas, and the results that come back."""

from __future__ import annotations

from typing import Self

from poptorch.base.logging_ import logger
from poptorch.base.replica_groups import ReplicaGroups
from poptorch.enums import CommGroupType, OutputMode, PartialBatch
from poptorch.settings.setting import OptionsDict, positive, setting


class _BatchOptions(OptionsDict):
    """Rows and results of a call."""

    device_iterations: int = setting(
        1,
        "optimiser steps (forward passes, in inference) of one call, which takes so many times the rows",
        "deviceIterations",
        valid=positive,
        expects="a positive integer",
    )
    replication_factor: int = setting(
        1,
        "copies of the model that work at the same time, each on its part of the rows",
        "replicationFactor",
        valid=positive,
        expects="a positive integer",
    )
    input_group_size: int = setting(1, "so many replicas receive the same rows", "inputReplicaGrouping")
    input_group_type: CommGroupType = setting(
        CommGroupType.Consecutive, "which replicas receive the same rows", "inputReplicaGrouping"
    )
    output_mode: OutputMode = setting(
        OutputMode.Default,
        "which results of a call come back",
        "outputMode",
        default_text="Default: Final in training, All in inference",
    )
    output_return_period: int = setting(1, "every how many iterations, with `OutputMode.EveryN`", "outputMode")
    partial_batch: PartialBatch = setting(
        PartialBatch.Compile,
        "what becomes of a batch with fewer rows than those that the model was compiled for, such as the last of a "
        "data set: Compile: programs of their own run it, at most `keptPrograms`; Pad: in inference, rows are added "
        "that do not come back; Refuse: it is an Error",
        "partialBatch",
    )
    synthetic_data: bool = setting(
        False,
        "inputs are noise that the device makes; nothing is transferred, and results mean nothing",
        "enableSyntheticData",
    )

    def deviceIterations(self, device_iterations: int) -> Self:
        """Set the number of optimiser steps, or inference passes, per call, which multiplies its rows.

        Raises:
            AssertionError: if it is not a positive integer.
        """
        return self._set(device_iterations=device_iterations)

    def replicationFactor(self, replication_factor: int) -> Self:
        """Set the number of data-parallel replicas, each with its own rows.

        Raises:
            AssertionError: if it is not a positive integer.
        """
        return self._set(replication_factor=replication_factor)

    def inputReplicaGrouping(self, input_group_size: int, input_group_type: CommGroupType) -> Self:
        """Feed equal rows to all replicas of a group. Call it after `replicationFactor`.

        Args:
            input_group_size: the number of replicas in a group; it divides the replication factor.
            input_group_type: `Consecutive`, `Orthogonal`, or `NoGrouping`: separate rows for each replica.

        Raises:
            ValueError: if the replicas cannot be grouped so, or the type is `All`.
        """
        if input_group_type == CommGroupType.All:
            raise ValueError(
                "inputReplicaGrouping: `input_group_type` is CommGroupType.All; expected Consecutive, Orthogonal or "
                "NoGrouping. One group of all replicas is `Consecutive`, with the replication factor as its size."
            )
        if input_group_type == CommGroupType.NoGrouping:
            input_group_size, input_group_type = 1, CommGroupType.Consecutive
        self._check(input_group_size=input_group_size, input_group_type=input_group_type)
        ReplicaGroups.from_type(input_group_type, input_group_size, self.replication_factor)
        return self._set(input_group_size=input_group_size, input_group_type=input_group_type)

    @property
    def input_groups(self) -> ReplicaGroups:
        """Replica groups with equal rows.

        Raises:
            ValueError: if the replication factor has changed so that the size of a group no longer divides it.
        """
        return ReplicaGroups.from_type(self.input_group_type, self.input_group_size, self.replication_factor)

    def outputMode(self, output_mode: OutputMode, output_return_period: int | None = None) -> Self:
        """Select the results that a call returns.

        Args:
            output_mode: `All`, `Sum`, `Final`, `EveryN`, or `Default`: `Final` in training, `All` in inference.
            output_return_period: the N of `EveryN`; ignored with other modes.

        Raises:
            AssertionError: if `EveryN` comes without a positive N.

        Example:
            >>> import poptorch
            >>> _ = poptorch.Options().outputMode(poptorch.OutputMode.EveryN, 10)
        """
        if output_mode == OutputMode.EveryN:
            period = checked_period("outputMode", output_return_period)
        else:
            period = 1
            if output_return_period is not None:
                logger.warning("outputMode: `output_return_period` is ignored, as the mode is not EveryN.")
        return self._set(output_mode=output_mode, output_return_period=period)

    def defaultOutputMode(self) -> bool:
        """Whether the output mode is still `Default`, which wrappers replace."""
        return self.output_mode == OutputMode.Default

    def partialBatch(self, partial_batch: PartialBatch) -> Self:
        """Select the treatment of batches with fewer rows than the compiled ones.

        Rows form as many whole steps as possible; the rest is another step, whose micro-batches are of equal size. Rows
        that do not suffice for all replicas go to one replica.

        Args:
            partial_batch: `Compile`, `Pad` or `Refuse`.

        Example:
            >>> import poptorch
            >>> _ = poptorch.Options().partialBatch(poptorch.PartialBatch.Refuse)
        """
        return self._set(partial_batch=partial_batch)

    def enableSyntheticData(self, enabled: bool) -> Self:
        """Replace inputs by normal noise from the device, for measurements without transfers."""
        return self._set(synthetic_data=enabled)


def checked_period(method: str, period: int | None) -> int:
    """Valid period of `OutputMode.EveryN`. `AssertionError`, naming the method, for any other value."""
    if isinstance(period, int) and period > 0:
        return period
    raise AssertionError(f"{method}: `output_return_period` is {period!r}; expected a positive integer with EveryN.")
