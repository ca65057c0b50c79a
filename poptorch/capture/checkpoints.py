"""Checkpoints of `torch.utils.checkpoint`, recorded as regions with recomputed activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from poptorch.capture.torch_private import TorchDispatchMode, checkpoints_run_by, saving_policy
from poptorch.capture.tracer import Tracer


def checkpoints_in_regions(tracer: Tracer) -> AbstractContextManager[None]:
    """Record each checkpoint of a block as a recomputation region of the tracer."""

    @contextmanager
    def region(context: Any) -> Iterator[None]:
        saves = saving_policy(context)
        with tracer.recorder.region(), context if saves is None else _Saving(tracer, saves):
            yield

    return checkpoints_run_by(region)


class _Saving(TorchDispatchMode):
    """Dispatch mode for a checkpoint: marks op results that its policy saves for the backward pass."""

    def __init__(self, tracer: Tracer, saves: Callable[..., bool]) -> None:
        super().__init__()
        self._tracer, self._saves = tracer, saves

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        nodes = self._tracer.recorder.trace.nodes
        before = len(nodes)
        results = func(*args, **(kwargs or {}))
        if self._saves(results, func, args, kwargs or {}):
            for node in nodes[before:]:
                node.is_saved = True
            # Within a preserved function nothing is recorded; the next node is the function itself.
            self._tracer.recorder.keeps |= len(nodes) == before
        return results
