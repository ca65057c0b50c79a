"""`RowLayout`: conversion of call tensors to program arrays, and of returned arrays to tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

import popxl
from poptorch.base.dtypes import device_dtype, from_numpy
from poptorch.base.leaves import Leaf
from poptorch.program.batching import Batching, Feeder
from poptorch.program.program_io import ProgramIO, Result
from popxl.fp8_utils import as_array


class RowLayout:
    """Layout of a call's rows in the arrays of a program, with dimensions of replicas and micro-batches.

    Args:
        leaves: name, shape and dtype of each tensor of a call.
        results: number of the program's outputs that are results of the model.

    Attributes:
        steps: number of steps of each input, and of each result of the model.
    """

    def __init__(self, batching: Batching, leaves: Sequence[Leaf], io: ProgramIO, results: int) -> None:
        self._batching, self._leaves, self._feeder = batching, leaves, Feeder(batching)
        self._inputs = [
            (i, stream, leaves[i].dtype is device_dtype(leaves[i].dtype), self._shape_of_rows(leaves[i].shape))
            for i, stream in io.inputs.items()
        ]
        self._outputs = [
            (result.stream, self._has_leading_dims(result), self._shape_of_result(result)) for result in io.outputs
        ]
        replicas = batching.groups.replicas
        self.steps = (
            [batching.micro_batches * replicas] * len(io.inputs),
            [result.count * replicas for result in io.outputs[:results]],
        )

    def feeds(self, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[popxl.HostToDeviceStream, np.ndarray]]:
        """Array of each input, from the tensors of a call. Arrays may share memory with tensors."""
        for i, stream, is_same_dtype, shape in self._inputs:
            t = tensors[i]
            is_array = t.layout is torch.strided and t.is_contiguous() and not t.is_meta
            if is_same_dtype and shape is not None and is_array and not t.requires_grad:
                yield stream, as_array(t).reshape(shape)
            else:  # each replica's rows are contiguous
                array = self._feeder.array(t, self._leaves[i].name)
                yield stream, array.swapaxes(0, 1) if self._has_both_dims else array

    def results(self, fetched: Mapping[popxl.DeviceToHostStream, Any]) -> Iterator[torch.Tensor]:
        """Output tensors of a run, from its arrays."""
        for stream, has_leading_dims, shape in self._outputs:
            array = fetched[stream]
            if has_leading_dims:
                array = array.swapaxes(0, 1)
            yield from_numpy(array.reshape(shape))

    @property
    def result_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the output tensors of a run."""
        return [shape for _, _, shape in self._outputs]

    @property
    def _has_both_dims(self) -> bool:
        """Whether arrays have both a micro-batch and a replica dimension."""
        return self._batching.micro_batches > 1 and self._batching.groups.replicas > 1

    def _shape_of_rows(self, shape: Sequence[int]) -> tuple[int, ...] | None:
        """The program's input shape for a tensor; `None` if a reshape alone is insufficient."""
        if self._batching.groups.size > 1 or self._has_both_dims:
            return None
        return self._batching.deal(np.empty(shape, np.bool)).shape

    def _has_leading_dims(self, result: Result) -> bool:
        """Whether device outputs have leading replica and micro-batch dimensions, in that order."""
        return self._batching.groups.replicas > 1 and len(result.stream.shape) > len(result.shape)

    def _shape_of_result(self, result: Result) -> tuple[int, ...]:
        """Shape of a call result."""
        leading = [n for n in (result.count, self._batching.groups.replicas) if n > 1]
        return self._batching.join(np.empty((*leading, *result.shape), np.bool), result.shape).shape
