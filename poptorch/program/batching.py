"""Distribution of batch rows over steps, micro-batches and replicas, and reassembly of results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from poptorch.base.dtypes import to_numpy
from poptorch.base.leaves import MAY_BE_THE_LAST
from poptorch.base.logging_ import Warned
from poptorch.base.replica_groups import ReplicaGroups
from poptorch.enums import OutputMode
from poptorch.errors import createPoptorchError
from poptorch.options import Options


@dataclass(frozen=True)
class Batching:
    """Distribution of batch rows over micro-batches, and reassembly of results.

    Rows are ordered by device iteration, then accumulation step, then group of replicas, then within the micro-batch.

    Attributes:
        device_iterations: number of passes through the model in a run, each with an update in training.
        gradient_accumulation: micro-batches for each update; 1 for inference.
        groups: groups of replicas with the same rows.

    Example:
        >>> batching = Batching(2, 3, ReplicaGroups(4))
        >>> batching.micro_batch_shape((96, 10), "x")
        (4, 10)
        >>> batching.deal(np.zeros((96, 10))).shape
        (6, 4, 4, 10)
    """

    device_iterations: int
    gradient_accumulation: int
    groups: ReplicaGroups

    @classmethod
    def from_options(cls, options: Options, training: bool) -> Batching:
        """Batching specified by options."""
        accumulation = options.Training.gradient_accumulation if training else 1
        return cls(options.device_iterations, accumulation, options.input_groups)

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches per replica and run."""
        return self.device_iterations * self.gradient_accumulation

    @property
    def factor(self) -> int:
        """Number of micro-batches in the rows of a call."""
        return self.micro_batches * self.groups.count

    def of_fewer(self, rows: int, micro_batch: int, training: bool) -> list[tuple[int, Batching]]:
        """Split the rows of an incomplete run into consecutive smaller runs: row count and batching of each.

        They form as many whole device iterations as possible. The rest is one more, whose micro-batches are of equal
        size, and in training at most twice as large as others. If it does not suffice for all groups of replicas, one
        replica takes it.

        Args:
            training: whether gradients may be accumulated.

        Example:
            >>> batching = Batching(3, 2, ReplicaGroups(1))
            >>> [(rows, b.device_iterations, b.gradient_accumulation) for rows, b in batching.of_fewer(14, 4, True)]
            [(8, 1, 2), (6, 1, 1)]
        """
        step = self.gradient_accumulation * self.groups.count * micro_batch
        whole, rest = divmod(rows, step)
        runs = [(whole * step, replace(self, device_iterations=whole))] if whole else []
        if rest:
            groups = self.groups if rest % self.groups.count == 0 else ReplicaGroups(1)
            each = rest // groups.count
            count = (
                next(n for n in range(1, each + 1) if each % n == 0 and each <= 2 * micro_batch * n) if training else 1
            )
            runs.append((rest, Batching(1, count, groups)))
        return runs

    def micro_batch_shape(self, shape: Sequence[int], name: str) -> tuple[int, ...]:
        """Shape of a tensor within one micro-batch, as seen by `forward`.

        Args:
            shape: shape of the tensor given to a call. Without dimensions it counts as one row.
            name: name of the argument, for the message.

        Raises:
            AssertionError: if its rows cannot be divided evenly.
        """
        factor = self.factor
        if factor == 1:
            return tuple(shape)
        rows = shape[0] if len(shape) else 1
        if not len(shape) or rows % factor:
            raise AssertionError(
                f"Invalid batch dimension: the argument {name} has {rows} rows in the shape {list(shape)}, which do "
                f"not make up {factor} micro-batches of equal size: deviceIterations ({self.device_iterations}) * "
                f"replicationFactor ({self.groups.replicas}) / size of inputReplicaGrouping ({self.groups.size}) * "
                f"Training.gradientAccumulation ({self.gradient_accumulation}). Stack the rows of a whole run in the "
                f"first dimension: a multiple of {factor}.{MAY_BE_THE_LAST}"
            )
        return (rows // factor, *shape[1:])

    def deal(self, array: np.ndarray) -> np.ndarray:
        """Distribute batch rows over micro-batches and replicas.

        Args:
            array: rows for all micro-batches, of a shape that `micro_batch_shape` accepts.

        Returns:
            The micro-batches, in the shape `[micro-batches of a replica, replicas, *micro-batch]`, where each of the
            first two is left out if it is 1. A view, unless several replicas share their rows.
        """
        micro_batch = self.micro_batch_shape(array.shape, "array")
        dealt = array.reshape(self.micro_batches, self.groups.count, *micro_batch)
        if self.groups.size > 1:
            dealt = dealt[:, list(self.groups.assignment)]
        return dealt.reshape((*(n for n in dealt.shape[:2] if n > 1), *micro_batch))

    @staticmethod
    def join(array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """Reassemble result rows in the row order of `deal`.

        Args:
            array: the results of micro-batches and replicas, with leading dimensions as `deal` makes them.
            shape: shape of the result of one micro-batch.

        Returns:
            All rows in one dimension: `[n * rows, ...]`. Results without dimensions become `[n]`; a single one stays as
            it is.
        """
        n = math.prod(array.shape[: array.ndim - len(shape)])
        if n == 1:
            return array.reshape(shape)
        return array.reshape(n * (shape[0] if len(shape) else 1), *shape[1:])

    def returned(self, mode: OutputMode, period: int = 1) -> int:
        """Number of results per replica and run.

        Args:
            mode: the output mode, other than `Default`.
            period: for `EveryN`: return the results of every `period`-th device iteration.

        Raises:
            AssertionError: if the period is not positive, or does not divide the number of device iterations.
        """
        match mode:
            case OutputMode.All:
                return self.micro_batches
            case OutputMode.EveryN:
                if period < 1 or self.device_iterations % period:
                    raise AssertionError(
                        f"The output return period is {period}; with OutputMode.EveryN it should be a divisor of "
                        f"deviceIterations ({self.device_iterations})."
                    )
                return self.micro_batches // period
        return 1


class Feeder:
    """Convert call arguments to program input arrays. Each executor owns one, to warn once.

    Example:
        >>> feeder = Feeder(Batching(2, 1, ReplicaGroups(1)))
        >>> labels = feeder.array(torch.tensor([1, 2]), "labels")
        >>> labels.shape, labels.dtype
        ((2, 1), dtype('int32'))
    """

    def __init__(self, batching: Batching) -> None:
        self.batching = batching
        self._warned = Warned()

    def array(self, tensor: torch.Tensor, name: str) -> np.ndarray:
        """Device-dtype array for one run, arranged by `Batching.deal`; may share memory with the tensor.

        Warns, once, of tensors that are not contiguous, and of ones that require a gradient.

        Args:
            tensor: tensor returned by `Signature.check`.

        Raises:
            Error: for a dtype that the device does not have, integers that do not fit in 32 bits, and tensors without
                an array of numbers.
        """
        _check_readable(tensor, name)
        if not tensor.is_contiguous():
            self._warned.once(
                "contiguous",
                f"The argument {name} is not contiguous: it is copied at every call. Call `.contiguous()` on it "
                "where it is made to avoid that.",
            )
            tensor = tensor.contiguous()
        if tensor.requires_grad:
            self._warned.once(
                "requires_grad",
                f"The argument {name} requires a gradient, which a wrapped model does not compute for its inputs: "
                "it is detached.",
            )
        return self.batching.deal(to_numpy(tensor))


def _check_readable(tensor: torch.Tensor, name: str) -> None:
    """Check that an argument has strided data, with integers in the device's range."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        what = "has no numbers: it is on the device meta" if tensor.is_meta else f"has the layout {tensor.layout}"
        advice = "Make it on the CPU" if tensor.is_meta else "Give `tensor.to_dense()`"
        raise createPoptorchError(f"The argument {name} {what}; expected a tensor with an array of numbers. {advice}.")
    if tensor.dtype is torch.int64 and tensor.numel():
        for number in map(int, tensor.aminmax()):
            if not -(2**31) <= number < 2**31:
                raise createPoptorchError(
                    f"The argument {name} has the number {number}, which does not fit in int32, which int64 is on the "
                    "device. Map such numbers to smaller ones, for example by a dictionary, before they are given."
                )
