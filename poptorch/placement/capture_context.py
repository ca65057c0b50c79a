"""Annotation state during capture: current block and scopes.

The tracer opens one `CaptureContext` for each capture (`capturing`) and reads from it the `OpPlacement` of every
operation. The annotations in `poptorch.placement.blocks` change it; outside a capture there is none (`current`), and
they do nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from poptorch.base.logging_ import logger
from poptorch.base.patching import patched, pushed
from poptorch.errors import Error
from poptorch.placement.strategies import BlockId, BlockPlacement, _IExecutionStrategy


@dataclass(frozen=True)
class OpPlacement:
    """Block, unit and annotations of one operation.

    Args:
        block: the id of its block; None before the first.
        unit: unit of the operation.
        stage: number of its stage.
        phase: the number of its phase; None without phases.
        scope: the open name scopes, from the outermost, joined by `/`; empty outside.
        attributes: attributes from the open `Attribute` scopes: pairs of a name and sorted pairs of key and value.
        multi_conv: the number of its `MultiConv` scope within the capture, from 0; None outside.
    """

    block: BlockId | None = None
    unit: int = 0
    stage: int = 0
    phase: int | None = None
    scope: str = ""
    attributes: tuple[tuple[str, tuple[tuple[str, Any], ...]], ...] = ()
    multi_conv: int | None = None


class CaptureContext:
    """Annotation state of one capture: modified by annotations, stamped on operations.

    Args:
        strategy: decides where blocks run.

    Attributes:
        overlaps: whether the model requests transfers that overlap with computation.
    """

    def __init__(self, strategy: _IExecutionStrategy) -> None:
        self.overlaps = False
        self._strategy = strategy
        self._placements: dict[BlockId, BlockPlacement] = {}  # of all blocks so far
        self._block: BlockId | None = None  # the active block; None before the first
        self._active = True  # false after a block has ended
        self._open_blocks: list[BlockId] = []
        self._next_id = 0  # of a block without an id
        self._scopes: list[str] = []
        self._attributes: list[Mapping[str, Mapping[str, Any]]] = []
        self._multi_convs = 0
        self._convolutions: int | None = None  # convolutions in the open MultiConv

    def placement(self) -> OpPlacement:
        """Placement and annotations of the next operation.

        Raises:
            Error: if no block is active, in a model that has closed one.
        """
        if not self._active:
            raise Error(
                "No active Block: an operation is outside any block, after a `with poptorch.Block` has ended. Put all "
                "operations that follow into blocks, or begin blocks that stay open with `poptorch.BeginBlock`."
            )
        default = BlockPlacement(0, 0, self._strategy.first_phase)
        place = default if self._block is None else self._placements[self._block]
        return OpPlacement(
            block=self._block,
            unit=place.unit,
            stage=place.stage,
            phase=place.phase,
            scope="/".join(self._scopes),
            attributes=tuple(
                (name, tuple(sorted(values.items()))) for scope in self._attributes for name, values in scope.items()
            ),
            multi_conv=None if self._convolutions is None else self._multi_convs - 1,
        )

    # Blocks

    def begin_block(self, user_id: BlockId | None, ipu_id: int | None) -> BlockId:
        """Activate a block until the next begins, and return its id.

        Args:
            user_id: id of the block; the next number if None.

        Raises:
            AssertionError: if the strategy does not know the block, or needs a unit.
        """
        block_id = str(self._next_id) if user_id is None else user_id
        known = self._placements.get(block_id)
        if known is None or ipu_id is not None:
            place = self._strategy.place_block(block_id, ipu_id, begun=len(self._placements))
            if known is not None and known.unit != place.unit:
                logger.warning(
                    "Block %r asks for unit %d and stays on unit %d: blocks with one id are one block.",
                    block_id,
                    place.unit,
                    known.unit,
                )
            self._placements.setdefault(block_id, place)
        self._next_id += user_id is None
        self._block, self._active = block_id, True
        return block_id

    @contextmanager
    def block(self, user_id: BlockId | None, ipu_id: int | None) -> Iterator[None]:
        """Open a scoped block; on exit, the enclosing block becomes active, or none."""
        self._open_blocks.append(self.begin_block(user_id, ipu_id))
        try:
            yield
        finally:
            self._open_blocks.pop()
            self._active = bool(self._open_blocks)
            if self._active:
                self._block = self._open_blocks[-1]

    def number_blocks_anew(self) -> None:
        """Restart automatic block ids at `"0"`."""
        self._next_id = 0

    # Scopes

    def named(self, name: str) -> AbstractContextManager[Any]:
        """Open a scope that prefixes operation names with `name`, for modules and `NameScope`."""
        return pushed(self._scopes, name)

    def attributed(self, attributes: Mapping[str, Mapping[str, Any]]) -> AbstractContextManager[Any]:
        """Open a scope that attaches attributes to operations."""
        return pushed(self._attributes, attributes)

    @contextmanager
    def multi_conv(self) -> Iterator[None]:
        """Open a scope that merges convolutions into one multi-convolution.

        Raises:
            Error: if it is within another, or ends without a convolution.
        """
        if self._convolutions is not None:
            raise Error(
                "Nested poptorch.MultiConv is not supported: one is open already. End it before the next begins."
            )
        self._multi_convs += 1
        with patched(self, _convolutions=0):
            yield
            if not self._convolutions:
                raise Error(
                    "Unexpected end_multi_conv: there was no convolution in the scope of a poptorch.MultiConv. Put the "
                    "convolutions into it, or leave it out."
                )

    def count_convolution(self) -> None:
        """Count a captured convolution: a `MultiConv` needs at least one."""
        if self._convolutions is not None:
            self._convolutions += 1


class _Captures(threading.local):
    def __init__(self) -> None:
        self.open: list[CaptureContext] = []


_captures = _Captures()


def current() -> CaptureContext | None:
    """Annotation state of this thread's innermost capture; None outside captures."""
    return _captures.open[-1] if _captures.open else None


def isRunningOnIpu() -> bool:
    """Whether a wrapped model's `forward` is being captured; false during model construction and plain CPU runs.

    Example:
        >>> isRunningOnIpu()
        False
    """
    return current() is not None


def capturing(strategy: _IExecutionStrategy) -> AbstractContextManager[CaptureContext]:
    """Capture with separate annotation state until exit, including exit by exception.

    Nested captures of the same program, such as the body of a loop, share the state: they do not call this.

    Example:
        >>> with capturing(poptorch.PipelinedExecution()) as ambient:
        ...     ambient.begin_block("encoder", 1)
        ...     ambient.placement()
        'encoder'
        OpPlacement(block='encoder', unit=1, stage=1, phase=None, scope='', attributes=(), multi_conv=None)
    """
    return pushed(_captures.open, CaptureContext(strategy))
