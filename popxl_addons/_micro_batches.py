"""Micro-batches of a batch that a step loads as a whole: equal slices of the first dimension."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import popxl
from popxl import ops

MicroBatch = Callable[[popxl.Tensor | None], list[popxl.Tensor]]
"""Slice function: inputs of a micro-batch, optionally ordered after another tensor."""


class MicroBatches:
    """Division of a step's inputs into equal slices of their first dimension.

    Scalars are shared by all micro-batches; a random seed is split.

    Args:
        specs: specs of the inputs, with whole batches.
        count: number of micro-batches.

    Attributes:
        specs: specs of the inputs of a micro-batch.

    Raises:
        ValueError: for inputs of different first dimensions, and for a dimension that `count` does not divide.
    """

    def __init__(self, specs: Sequence[popxl.TensorSpec], count: int) -> None:
        self._count, self.specs = count, [*specs]
        if count == 1:
            return
        samples = samples_of(specs)
        if samples % count:
            raise ValueError(
                f"train_step: `micro_batches` is {count}, which does not divide a batch of {samples} samples; expected "
                f"one of {', '.join(str(n) for n in range(1, samples + 1) if samples % n == 0)}."
            )
        self.specs = [
            spec if _samples(spec) is None else popxl.TensorSpec((samples // count, *spec.shape[1:]), spec.dtype)
            for spec in specs
        ]

    def slices_of(self, batch: Sequence[popxl.Tensor]) -> Iterator[MicroBatch]:
        """The micro-batches of a loaded batch."""
        slicers = [self._part_of(t) for t in batch]
        for number in range(self._count):
            yield partial(_taken, slicers, number)

    def _part_of(self, t: popxl.Tensor) -> Callable[[int, popxl.Tensor | None], popxl.Tensor]:
        """Function of a micro-batch's number that takes its part of an input, after another tensor."""
        if self._count == 1 or not t.shape:
            return lambda number, after: _waiting(t, after)
        if _is_seed(t.spec):
            seeds = ops.split_random_seed(t, self._count)
            return lambda number, after: _waiting(seeds[number], after)
        size = t.shape[0] // self._count

        def rows(number: int, after: popxl.Tensor | None) -> popxl.Tensor:
            # Each slice is the same op with a start that waits, so that all micro-batches can be one loop.
            start = _waiting(popxl.constant(number * size, popxl.uint32), after)
            return ops.dynamic_slice(t, start, [0], [size], no_overlap=True)

        return rows


def _taken(
    slicers: Sequence[Callable[..., popxl.Tensor]], number: int, after: popxl.Tensor | None
) -> list[popxl.Tensor]:
    return [slicer(number, after) for slicer in slicers]


def _waiting(t: popxl.Tensor, after: popxl.Tensor | None) -> popxl.Tensor:
    return t if after is None else ops.available_after(t, after)


def samples_of(specs: Sequence[popxl.TensorSpec]) -> int:
    """Batch size: the first dimension of all inputs that have one. `ValueError` if they differ, or none has."""
    samples_by_name = {
        f"inputs[{i}]": samples for i, spec in enumerate(specs) if (samples := _samples(spec)) is not None
    }
    if len(set(samples_by_name.values())) != 1:
        raise ValueError(
            "train_step: `micro_batches` are slices of the first dimension of the inputs, the samples of a batch; got "
            f"{', '.join(f'{samples} in `{name}`' for name, samples in samples_by_name.items()) or 'scalars'}. Give "
            "all inputs the same first dimension; scalars and random seeds need none."
        )
    return next(iter(samples_by_name.values()))


def _samples(spec: popxl.TensorSpec) -> int | None:
    """First dimension of an input; `None` for scalars and random seeds."""
    return spec.shape[0] if spec.shape and not _is_seed(spec) else None


def _is_seed(spec: popxl.TensorSpec) -> bool:
    return spec.dtype is popxl.uint32 and tuple(spec.shape) == (2,)
