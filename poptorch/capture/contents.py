"""`TensorContents`: contents of tensors, where code reads them during a capture.

Contents of constants are known. All others are known in a run only: a graph break ends the program there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from poptorch.capture.graph_breaks import GraphBreaks
from poptorch.capture.torch_private import in_transform, without_modes
from poptorch.errors import createPoptorchError

if TYPE_CHECKING:
    from poptorch.capture.tracer import Tracer

CANNOT_READ = (
    "The numbers in a tensor cannot be read while a model is compiled: it becomes one program for whatever numbers "
    "come. Choose by them with `torch.where` or `poptorch.cond`, index with `index_select`, `gather` or "
    "`poptorch.dynamic_slice`, and state sizes such as `num_classes`."
)
"""Error text for unknown contents."""

_NEVER_BREAKING = (torch.Tensor.data_ptr, torch.Tensor.__format__)
"""Functions whose result says nothing to the program, or something else in each run."""


class TensorContents:
    """Tensor contents known during a capture.

    Args:
        breaks: graph breaks of the capture; `None` if none are allowed.
    """

    def __init__(self, tracer: Tracer, breaks: GraphBreaks | None) -> None:
        self._tracer, self._breaks = tracer, breaks

    # Constants ------------------------------------------------------------------------------------------------------

    def constant(self, numbers: torch.Tensor) -> torch.Tensor:
        """New tensor with known contents."""
        t = self._tracer.fake(numbers)
        self._tracer.recorder.new_constant(t, numbers)
        return t

    def is_constant(self, t: torch.Tensor) -> bool:
        """Whether the contents of a tensor are constant across runs."""
        return not in_transform() and self._tracer.recorder.is_constant(t)

    def constant_contents(self, t: torch.Tensor) -> torch.Tensor | None:
        """Contents of a tensor that are constant across runs; otherwise `None`."""
        return self._tracer.recorder.constant_contents(t)

    def distance(self, start: torch.Tensor, stop: torch.Tensor) -> int | None:
        """Difference `stop - start` of two scalars, if constant across runs; otherwise `None`."""
        return self._tracer.recorder.distance(start, stop, sees_selects=self.is_one_program)

    def result_of(self, op: torch._ops.OpOverload, args: Any, kwargs: Any) -> Any:
        """Result of an op on known contents; `None` if they are unknown."""
        leaves, structure = pytree.tree_flatten((args, kwargs))
        known = [self.constant_contents(t) if isinstance(t, torch.Tensor) else t for t in leaves]
        if any(numbers is None and leaf is not None for numbers, leaf in zip(known, leaves, strict=True)):
            return None
        with without_modes():
            args, kwargs = pytree.tree_unflatten(known, structure)
            results = op(*args, **kwargs)
        return pytree.tree_map_only(torch.Tensor, self.constant, results)

    # Reads ----------------------------------------------------------------------------------------------------------

    def read_contents(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Result of a function that reads the contents of its first argument.

        Raises:
            poptorch.Error: if they are unknown, and no graph break is allowed.
        """
        numbers = None if in_transform() else self.constant_contents(args[0])
        if numbers is not None:
            with self._tracer.suspended(), without_modes():
                return function(numbers.clone(), *args[1:], **kwargs)
        if function not in _NEVER_BREAKING and self.may_break_graph:
            return self.break_graph(function, args, kwargs)
        raise createPoptorchError(
            f"{CANNOT_READ} It is needed here ({self._tracer.recorder.source()}): {function.__name__}."
        )

    def reduced(self, t: torch.Tensor, protocol: int) -> tuple[Any, ...]:
        """How `copy.copy` makes a tensor that shares memory with this one, without its gradient; `pickle` refuses."""
        return _Alias(t, f"{CANNOT_READ} It is needed here ({self._tracer.recorder.source()}): pickle."), ()

    def check_classes(self, input: torch.Tensor, num_classes: int = -1) -> None:
        """Check that `one_hot` receives a number of classes, or can read its input.

        Raises:
            poptorch.Error: if it is not: the shape of the result is made from it.
        """
        if num_classes == -1 and not self.is_constant(input) and not self.may_break_graph:
            raise createPoptorchError(
                "OneHot num classes must be specified and must be constant. Without it the shape of the result depends "
                f"on the numbers in the tensor: `one_hot(x, num_classes=...)` ({self._tracer.recorder.source()})."
            )

    # Graph breaks ---------------------------------------------------------------------------------------------------

    @property
    def may_break_graph(self) -> bool:
        """Whether a graph break is allowed at this point."""
        return self._breaks is not None and not (self._tracer.recorder.frames.is_nested or in_transform())

    @property
    def is_one_program(self) -> bool:
        """Whether no graph break can serve this place: none is allowed, or there are several micro-batches."""
        return not self.may_break_graph or self._breaks is not None and self._breaks.micro_batches > 1

    def break_graph(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Insert a graph break for a function with run-dependent results; returns these results."""
        assert self._breaks is not None
        tracer, recorder = self._tracer, self._tracer.recorder
        leaves, structure = pytree.tree_flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        operands = [recorder.value_of(leaves[i]) for i in places]
        others = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]

        def run(tensors: Sequence[torch.Tensor]) -> Any:
            given = list(others)
            for i, t in zip(places, tensors, strict=True):
                given[i] = t
            args, kwargs = pytree.tree_unflatten(given, structure)
            return function(*args, **kwargs)

        source = recorder.source()
        with tracer.suspended(), without_modes():
            tracked = any(leaves[i].requires_grad for i in places)
            graph_break, on_host = self._breaks.insert(len(recorder.trace.nodes), operands, run, source, tracked)

        def begin(t: torch.Tensor) -> torch.Tensor:
            fake = tracer.fake(t.detach())
            graph_break.results.append(recorder.new_host_result(fake))
            return fake

        result = pytree.tree_map_only(torch.Tensor, begin, on_host)
        self._breaks.set_contents(graph_break, on_host)
        return result


class _Alias:
    """Callable that returns an alias of a tensor, and that cannot be pickled."""

    def __init__(self, t: torch.Tensor, refusal: str) -> None:
        self._t, self._refusal = t, refusal

    def __call__(self) -> torch.Tensor:
        return self._t.detach().requires_grad_(self._t.requires_grad)

    def __reduce__(self) -> Any:
        raise createPoptorchError(self._refusal)
