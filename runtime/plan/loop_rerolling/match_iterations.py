"""Inputs and outputs of loop iterations, derived by aligning the ops of all iterations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Sequence

from popxl.core.aliasing import overwritten
from popxl.core.recording import Op
from popxl.core.tensor import Tensor
from runtime.lowering.rerolled_loops import LoopInput, LoopOutput, RerolledLoop

Roots = Callable[[Tensor], tuple[Tensor, ...]]


class NotRerollable(Exception):
    """The reason why iterations of equal signatures form no loop, as a clause."""


def reroll(iterations: Sequence[tuple[Op, ...]], roots: Roots, read_later: Container[Tensor]) -> RerolledLoop:
    """Build a loop from iterations.

    Args:
        iterations: ops of each iteration; all iterations have the same signatures.
        roots: function that returns the storages of a tensor.
        read_later: storages that are read, or overwritten, after these ops.

    Raises:
        NotRerollable: if they cannot be the iterations of a loop.
    """
    return _Alignment(iterations, roots).loop(read_later)


class _Alignment:
    """Storages of iterations, aligned.

    The template is the iteration with the most distinct storages: the first one may read the same tensor twice where
    others read two. Storages are named by the template.
    """

    def __init__(self, iterations: Sequence[tuple[Op, ...]], roots: Roots) -> None:
        self._iterations = tuple(iterations)
        storages_of_iterations = [tuple(_storages(ops, roots)) for ops in iterations]
        self._template = max(range(len(iterations)), key=lambda i: len(set(storages_of_iterations[i])))
        self._by_iteration = _columns(storages_of_iterations, self._template)
        template = iterations[self._template]
        self._overwritten = {root for op in template for i in overwritten(op) for root in roots(op.inputs[i])}
        self._results = {t for op in template for t in op.outputs if t in self._by_iteration}
        self._iteration_results = {t for name in self._results for t in self._by_iteration[name]}
        self._check_written()

    def _check_written(self) -> None:
        """Check that iterations modify no storage under two names."""
        names = [*self._by_iteration]
        for storages in zip(*self._by_iteration.values(), strict=True):
            count = Counter(storages)
            for name, storage in zip(names, storages, strict=True):
                if name in self._overwritten and count[storage] > 1:
                    raise NotRerollable(f"a turn overwrites {storage!r}, and is given it in another place, too")

    def loop(self, read_later: Container[Tensor]) -> RerolledLoop:
        """Build the loop."""
        inputs = tuple(self._find_inputs())
        outputs = tuple(self._find_outputs(inputs, read_later))
        return RerolledLoop(self._iterations, self._template, inputs, outputs)

    def _find_inputs(self) -> Iterator[LoopInput]:
        for name, by_iteration in self._by_iteration.items():
            if name in self._results:
                continue
            is_written = name in self._overwritten
            if self._iteration_results.isdisjoint(by_iteration):
                yield LoopInput(name, by_iteration, is_written)
            elif is_written:
                raise NotRerollable(f"a turn overwrites {name!r}, which an earlier one has made")
            else:
                yield LoopInput(name, by_iteration, carried_from=self._carried_from(name, by_iteration))

    def _carried_from(self, name: Tensor, by_iteration: Sequence[Tensor]) -> Tensor:
        """Find the storage whose value the next iteration takes under a name."""
        if by_iteration[0] not in self._iteration_results:
            for source, handed in self._by_iteration.items():
                if handed[:-1] == by_iteration[1:]:
                    return source
        raise NotRerollable(f"{name!r} is from an earlier turn, and not always from the same place in the one before")

    def _find_outputs(self, inputs: Sequence[LoopInput], read_later: Container[Tensor]) -> Iterator[LoopOutput]:
        """Find outputs with later users. The initial value of a carried input is packed before them: a layer's gradient
        reads the layer's input, say."""
        firsts = {t.carried_from: t.by_iteration[0] for t in inputs if t.carried_from is not None}
        for name in self._by_iteration:
            if name in self._results:
                by_iteration = self._by_iteration[name]
                read = [t in read_later for t in by_iteration]
                if any(read[:-1]):
                    first = firsts.get(name)
                    is_apart = first is None or first.producer is None or first not in read_later
                    yield LoopOutput(name, by_iteration, first=None if is_apart else first)
                elif read[-1]:
                    yield LoopOutput(name, by_iteration, is_last_only=True)


def _storages(iteration: Sequence[Op], roots: Roots) -> Iterator[Tensor]:
    """Storages read or created by an iteration, in order, with duplicates."""
    for op in iteration:
        for t in op.inputs:
            yield from roots(t)
        yield from (t for t in op.outputs if t.origin is t)


def _columns(storages: Sequence[Sequence[Tensor]], template: int) -> dict[Tensor, tuple[Tensor, ...]]:
    """Align the storages of all iterations: per template storage, its counterpart in each iteration."""
    columns: dict[Tensor, tuple[Tensor, ...]] = {}
    for name, *by_iteration in zip(storages[template], *storages, strict=True):
        if columns.setdefault(name, tuple(by_iteration)) != tuple(by_iteration):
            raise NotRerollable(f"where one turn is given {name!r} twice, another is given two tensors")
    return columns
