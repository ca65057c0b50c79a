"""`GraphBreaks`: graph breaks, where a function needs run-dependent numbers, with host operations on these numbers.

    positions = mask.nonzero()    # the shape of the result depends on numbers
    count = lengths.max().item()  # a Python number

A program has fixed shapes, and Python branches are taken during capture. So the program ends there, the host runs the
operation on the numbers, as PyTorch would, and continues with a program for the resulting shapes and numbers. A graph
break is the same concept for both: a host operation between two programs.

Capturing the code after a break needs the results of the host operation. So the host computes its operands from the ops
recorded so far: each op once, and only those that are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from poptorch.capture.constants import computed
from poptorch.capture.torch_private import without_modes
from poptorch.capture.trace import Value, origins, tensors_in
from poptorch.errors import createPoptorchError
from popxl.extend.source import SourceLocation


@dataclass(eq=False)
class GraphBreak:
    """Graph break: a host operation between two programs.

    Attributes:
        position: number of ops recorded before it.
        operands: values of its operands.
        run: host function of the operands' contents.
        source: the user's line.
        key: key of the program after it: shapes of result tensors, and result numbers.
        results: values of the result tensors, in the program after it.
    """

    position: int
    operands: list[Value]
    run: Callable[[Sequence[torch.Tensor]], Any]
    source: SourceLocation
    key: tuple[Any, ...] = ()
    results: list[Value] = field(default_factory=list)

    def compute(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Result of the host operation for contents of its operands, cast from dtypes of the device to PyTorch's."""
        with torch.no_grad():
            return self.run([t.to(value.dtype) for t, value in zip(tensors, self.operands, strict=True)])

    @staticmethod
    def key_of(result: Any) -> tuple[Any, ...]:
        """Cache key for the program after a graph break: tensor shapes and dtypes, and numbers."""
        return tuple(map(_key_of_leaf, pytree.tree_leaves(result)))


class GraphBreaks:
    """Graph breaks of a function under capture, in order.

    Args:
        results: results of the first breaks in a run. The host computes those of later ones.
        micro_batches: number of micro-batches in the rows of the arguments.
    """

    def __init__(
        self,
        inputs: Sequence[torch.Tensor],
        results: Sequence[Any] = (),
        training: bool = False,
        micro_batches: int = 1,
    ) -> None:
        self.breaks: list[GraphBreak] = []
        self._training, self.micro_batches = training, micro_batches
        self._trained: frozenset[Value] = frozenset()
        self._inputs, self._results = list(inputs), list(results)
        self._contents: dict[Value, torch.Tensor] = {}
        self._random = torch.default_generator.get_state()

    def begin(
        self, inputs: Sequence[Value], state: Mapping[Value, torch.Tensor], trained: Collection[Value] = ()
    ) -> None:
        """Reset all state for a new or repeated capture."""
        self.breaks.clear()
        self._trained = frozenset(trained) if self._training else frozenset()
        self._contents = dict(zip(inputs, self._inputs, strict=True)) | dict(state)

    def insert(
        self,
        at: int,
        operands: list[Value],
        run: Callable[[Sequence[torch.Tensor]], Any],
        source: SourceLocation,
        tracked: bool,
    ) -> tuple[GraphBreak, Any]:
        """Insert a graph break. Returns it, with empty `results` for the caller to fill, and the host's result.

        Args:
            at: number of ops recorded before it.
            operands: values that the host receives.
            run: host function of their contents.
            source: the user's line.
            tracked: whether gradients flow through the operands.

        Raises:
            poptorch.Error: if they would have to flow through results of the host, or there are several micro-batches.
        """
        if self.micro_batches > 1:
            raise createPoptorchError(
                f"{source}: the host has to look at numbers here, to know a shape or what Python does next. Each "
                "micro-batch would need a program of its own. Keep shapes, with `torch.where`; or have one micro-batch "
                "in a call: `deviceIterations(1)`, `replicationFactor(1)`, `Training.gradientAccumulation(1)`."
            )
        graph_break = GraphBreak(at, operands, run, source)
        number = len(self.breaks)
        if number < len(self._results):
            result = self._results[number]
        else:
            with self._drawing():
                result = graph_break.compute([computed(value, self._contents) for value in operands])
        if self._training:
            self._check_trained(result, operands, source, tracked)
        graph_break.key = GraphBreak.key_of(result)
        self.breaks.append(graph_break)
        return graph_break, result

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Continue random draws after the previous graph break; otherwise, loops waiting for a number never end."""
        generator = torch.default_generator
        with without_modes():
            before = generator.get_state()
            generator.set_state(self._random)
        try:
            yield
        finally:
            with without_modes():
                self._random = generator.get_state()
                generator.set_state(before)

    def _check_trained(self, result: Any, operands: Sequence[Value], source: SourceLocation, tracked: bool) -> None:
        """Check that a host result needs no gradient, and contains no number that changes with each training step."""
        leaves = pytree.tree_leaves(result)
        if tracked and any(isinstance(leaf, torch.Tensor) and leaf.is_floating_point() for leaf in leaves):
            raise createPoptorchError(
                f"{source}: the host would have to make the tensor here, as its shape depends on numbers, and no "
                "gradient passes the host. Pad to a shape that is the same in every step, and mask what is too much, "
                "with `torch.where(mask, x, 0)`; or index with places, as in `x[mask]`, which hands gradients on. If "
                "none is to flow, say so: `x.detach()`."
            )
        if any(map(_has_floats, leaves)) and _depends_on(operands, self._trained):
            raise createPoptorchError(
                f"{source}: numbers are read here that are others in each step, as they come of what is trained. Each "
                "step would need a program of its own. Compute with the tensor itself, choose by it with "
                "`torch.where(mask, x, y)`, return it and look at it after the step, or compute it in an "
                "`inferenceModel` before the step, and pass what it decides as an argument."
            )

    def set_contents(self, graph_break: GraphBreak, result: Any) -> None:
        """Store the contents of a graph break's results."""
        self._contents.update(zip(graph_break.results, tensors_in(result), strict=True))


def _key_of_leaf(leaf: Any) -> tuple[Any, ...]:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape), leaf.dtype
    if isinstance(leaf, np.ndarray):
        return leaf.shape, str(leaf.dtype), leaf.tobytes()
    return type(leaf), repr(leaf)


def _has_floats(leaf: Any) -> bool:
    """Whether a cache key component contains floating-point numbers, which rarely recur."""
    return isinstance(leaf, float | complex) or isinstance(leaf, np.ndarray) and leaf.dtype.kind in "fc"


def _depends_on(values: Sequence[Value], others: Collection[Value]) -> bool:
    """Whether values depend, directly or indirectly, on any of `others`."""
    read = (value for node in origins(values) for value in node.inputs)
    return any(value in others for value in chain(values, read))
