"""`SmallerBatches`: programs for batches with fewer rows than a model was compiled for.

A typical case is the last batch of a data set. Each program has its own variables: it gets the values of the model's
program before a run, and returns them afterwards.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from poptorch.base.leaves import Leaf
from poptorch.enums import OutputMode, PartialBatch
from poptorch.errors import Error, createPoptorchError
from poptorch.options import Options
from poptorch.program.batching import Batching
from poptorch.program.program_io import Result
from poptorch.run.arguments import Signature
from poptorch.run.compiled import Compiled
from poptorch.run.graph_breaks import CompiledModel
from poptorch.run.program_cache import ProgramCache


@dataclass(frozen=True)
class Run:
    """A program run on a subset of a smaller batch's rows.

    Attributes:
        batching: distribution of the rows.
        args, kwargs: arguments with these rows.
    """

    batching: Batching
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class SmallerBatches:
    """LRU cache of programs for a model's smaller batches."""

    def __init__(self, whole: CompiledModel, forward: Callable[..., Any], options: Options, training: bool) -> None:
        self._model, self._forward, self._options, self._training = whole, forward, options, training
        self._batching = Batching.from_options(options, training)
        self._programs: ProgramCache[CompiledModel] = ProgramCache(
            options.kept_programs,
            lambda program: program.close(),
            "Batches had more than %d smaller numbers of rows, or other values beside tensors, and the model "
            "is compiled for each. Pad them to a few sizes; or keep more programs: `options.keptPrograms(%d)`.",
        )
        self._versions: weakref.WeakKeyDictionary[CompiledModel, int] = weakref.WeakKeyDictionary()  # of their values

    def runs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Run]:
        """Split a smaller batch into runs; empty if tensors differ from full batches in more than row counts.

        Arguments that are not tensors may change: the programs are compiled for the current ones.
        """
        try:
            signature = Signature(self._forward, args, kwargs)
        except Error:
            return []
        given, expected = signature.leaves, self._model.signature.leaves
        if not _are_fewer(given, expected):
            return []
        factor = self._batching.factor
        if factor == 1:
            return [Run(self._batching, args, kwargs)]
        samples = math.gcd(*(leaf.shape[0] for leaf in expected)) // factor  # in a micro-batch
        rows = [leaf.shape[0] // (samples * factor) for leaf in expected]  # of each sample
        counts = {divmod(leaf.shape[0], each) for leaf, each in zip(given, rows, strict=True)}
        count, left = counts.pop()
        if counts or left:
            return []
        tensors, begin, runs = signature.check(args, kwargs), 0, []
        for taken, batching in self._batching.of_fewer(count, samples, self._training):
            part = [t[begin * each : (begin + taken) * each] for t, each in zip(tensors, rows, strict=True)]
            runs.append(Run(batching, *signature.arguments(part)))
            begin += taken
        return runs

    def padded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
        """A function running the full-batch program on padded arguments, which returns only real rows' results; `None`
        if options disable padding, or padded rows would affect results.
        """
        whole, options = self._model, self._options
        may_pad = options.partial_batch is PartialBatch.Pad and options.output_mode is OutputMode.All
        if not may_pad or self._training or not isinstance(whole, Compiled) or self._batching.groups.size > 1:
            return None
        if whole.io.written or whole.counter_values or whole.rewritten or options.anchored_tensors:
            return None
        signature = Signature(self._forward, args, kwargs)
        pairs = list(zip(signature.check(args, kwargs), whole.signature.leaves, strict=True))
        shares = {(t.shape[0], leaf.shape[0]) for t, leaf in pairs if t.shape != leaf.shape}
        rows, of_all = min(shares)
        if any(rows * other != each * of_all for each, other in shares):
            return None
        filled = [
            t if t.shape == leaf.shape else torch.cat([t, t[-1:].expand(leaf.shape[0] - t.shape[0], *t.shape[1:])])
            for t, leaf in pairs
        ]
        if not whole.signature.fits(*signature.arguments(filled)):
            return None
        counts = [_rows(result, self._batching) * rows for result in whole.io.outputs]
        if any(count == 0 or count % of_all for count in counts):
            return None

        def run() -> Any:
            results = whole.fetched(filled)
            own = [t[: count // of_all] for t, count in zip(results, counts, strict=True)]
            return whole.rebuilt(filled, own, whole.signature.objects(args, kwargs))

        return run

    def __call__(self, runs: Sequence[Run], make: Callable[[Run], CompiledModel], numbers: np.ndarray | None) -> Any:
        """Execute runs in sequence. Return the call's combined result.

        Args:
            runs: the runs.
            make: function that compiles the model for one.
            numbers: hyperparameters of the optimiser.

        Raises:
            poptorch.Error: as for a call of the model; if results of several runs cannot be combined.
        """
        if len(runs) > 1:  # all are compiled and compared first, so that an error leaves the model as it was
            self._check_combinable([self._program(run, make) for run in reversed(runs)][::-1])
        results: list[list[torch.Tensor]] = []
        for run in runs:
            program = self._program(run, make)
            tensors, objects = program.signature.flatten(run.args, run.kwargs)
            if numbers is not None:
                program.write_numbers(numbers)
            with self._transferring_state(program):
                if not isinstance(program, Compiled):  # a single run
                    return program.run(tensors, objects)
                results.append(program.fetched(tensors))
            if run is not runs[-1]:
                program.write_back(tensors, results[-1])
                continue
            combined = results[0] if len(runs) == 1 else self._combine_results(results)
            result = program.rebuilt(tensors, combined, objects)
            self._model.anchored = program.anchored
        return result

    def _program(self, run: Run, make: Callable[[Run], CompiledModel]) -> CompiledModel:
        """The program of a run, compiled if necessary."""
        return self._programs.get(partial(_fits, run), partial(make, run))

    @contextmanager
    def _transferring_state(self, program: CompiledModel) -> Iterator[None]:
        """Context manager moving persistent state to a smaller program before its run, and back afterwards."""
        io = program.io
        changes = self._training or bool(io.written) or bool(program.counter_values) or io.random is not None
        if changes or self._versions.get(program) != self._model.version:
            program.write_persistent_state(self._model.persistent_state())
        try:
            yield
        finally:
            if changes:
                self._model.write_persistent_state(program.persistent_state())
            self._versions[program] = self._model.version

    @property
    def _results(self) -> list[tuple[Result, OutputMode]]:
        """Results of the model and anchored tensors, each with its output mode; without overwritten arguments."""
        assert isinstance(self._model, Compiled)
        outputs = self._model.io.outputs[: len(self._model.io.outputs) - len(self._model.rewritten)]
        own = (self._options.anchored_tensors[each.anchor].output_mode if each.anchor else None for each in outputs)
        return [
            (each, self._options.output_mode if mode is None else mode) for each, mode in zip(outputs, own, strict=True)
        ]

    def _check_combinable(self, programs: Sequence[CompiledModel]) -> None:
        """Check that results of consecutive runs can be combined: a sum needs equal shapes."""
        compiled = [program for program in programs if isinstance(program, Compiled)]
        for (result, mode), *shapes in zip(self._results, *(each.result_shapes for each in compiled), strict=False):
            is_sum = mode is OutputMode.Sum and len(set(shapes)) == 1
            if result.count == 1 and mode is not OutputMode.Final and not is_sum:
                raise createPoptorchError(
                    f"A batch with fewer rows than the model was compiled for is run in {len(programs)} parts, whose "
                    f"results have the shapes {', '.join(str(list(shape)) for shape in shapes)}: with "
                    f"OutputMode.{mode.name} there is no result of them. Choose OutputMode.All or OutputMode.Final."
                )

    def _combine_results(self, runs: Sequence[list[torch.Tensor]]) -> list[torch.Tensor]:
        """Combine results of several runs into a single run's results; overwritten arguments come from the last run."""
        combined: list[torch.Tensor] = []
        for (result, mode), *values in zip(self._results, *runs, strict=False):
            if result.count > 1:  # each micro-batch has one
                combined.append(torch.cat([torch.atleast_1d(value) for value in values]))
            elif mode is OutputMode.Sum:
                combined.append(torch.stack(values).sum(0, dtype=values[0].dtype))
            else:
                combined.append(values[-1])
        return combined + runs[-1][len(combined) :]

    def close(self) -> None:
        """Release all devices. Subsequent calls recompile."""
        self._programs.clear()


def _fits(run: Run, program: CompiledModel) -> bool:
    """Whether a program accepts a run's arguments."""
    return program.signature.fits(run.args, run.kwargs)


def _rows(result: Result, batching: Batching) -> int:
    """Number of rows in a full batch's result; 0 for one scalar per micro-batch."""
    return result.shape[0] * result.count * batching.groups.replicas if result.shape else 0


def _are_fewer(given: Sequence[Leaf], expected: Sequence[Leaf]) -> bool:
    """Whether tensors match expected ones except for smaller row counts."""
    if [(t.name, t.dtype, t.shape[1:]) for t in given] != [(t.name, t.dtype, t.shape[1:]) for t in expected]:
        return False
    rows = [(t.shape[:1], other.shape[:1]) for t, other in zip(given, expected, strict=True)]
    return any(a != b for a, b in rows) and all(a == b or len(a) == len(b) and (0,) < a < b for a, b in rows)
