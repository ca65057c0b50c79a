"""Host functions called from a program: calling convention and error handling."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from poptorch.base.dtypes import from_numpy, to_device_dtype, to_numpy
from poptorch.base.leaves import Structure
from poptorch.base.structures import structure_of
from poptorch.capture.trace import Trace
from poptorch.errors import createPoptorchError


class HostFunction:
    """Host function called from within a program.

    Args:
        given: structure of its arguments `args, kwargs`.

    Attributes:
        problems: errors of this run, of this function or of another one with the same list.
        changes: the user's names of what it changes on the host, such as a counter of its module.
    """

    changes: Collection[str] = ()  # of saved models of earlier versions, too

    def __init__(self, name: str, function: Callable[..., Any], given: Structure) -> None:
        self._name, self._function, self._arguments = name, function, given
        self.problems: list[Exception] = []

    def result(self, tensors: Iterable[torch.Tensor]) -> Any:
        """Return value of the function, given tensors for its arguments."""
        args, kwargs = self._arguments.rebuild(tensors)
        return self._function(*args, **kwargs)

    def arrays(self, given: Iterable[np.ndarray], wanted: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Result arrays, with shapes and dtypes of `wanted`; after an error, `wanted` itself."""
        if not self.problems:
            try:
                with torch.no_grad():
                    return self._checked(self.result(map(from_numpy, given)), wanted)
            except Exception as problem:  # any error, and no caller can catch it here: `Compiled.run` raises it
                self.problems.append(problem)
        return list(wanted)

    def _checked(self, result: Any, wanted: Sequence[np.ndarray]) -> list[np.ndarray]:
        tensors = structure_of(result, self._name).tensors(result)
        fitting = [to_device_dtype(t, f"CPU: the result of {self._name}") for t in tensors]
        found = [to_numpy(t).copy() for t in fitting]  # the function may keep them, and overwrite them
        if [(a.shape, a.dtype) for a in found] != [(a.shape, a.dtype) for a in wanted]:
            have, expected = (
                ", ".join(f"{list(a.shape)} of {a.dtype}" for a in arrays) or "no tensors" for arrays in (found, wanted)
            )
            raise createPoptorchError(
                f"CPU: {self._name} has returned {have}. When the model was compiled, it returned {expected} for "
                "zeros, and has to always."
            )
        return found


def host_functions_of(trace: Trace) -> Iterator[HostFunction]:
    """Host functions called by a captured function."""
    for node in trace.all_nodes():
        if node.op == "poptorch.cpu":
            yield node.arguments["function"]
