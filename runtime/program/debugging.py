"""Op-by-op execution of a program, to find the first op producing NaN or infinity.

Ops are lowered as in a compiled program, but executed immediately and not traced: only ops that run graphs, calls,
loops and conditionals, are executed in Python. Each replica proceeds independently until its next collective. Nothing
is donated, so a run that ends with an error has changed nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from popxl.base.arrays import Array
from popxl.base.log import Logger
from popxl.base.pages import Table
from popxl.core.printing import line
from popxl.core.recording import Op
from popxl.core.tensor import Tensor
from popxl.core.traits import chooses, is_loop
from popxl.errors import NonFiniteError, PopxlError
from popxl.graph import Graph
from popxl.options import SessionOptions
from popxl.values.spec import brief
from runtime.lowering.channels import Channel, Channels
from runtime.lowering.context import Context
from runtime.lowering.control_flow import Loop, call_inputs, check_bound, finish_call
from runtime.lowering.environment import Environment, Results
from runtime.lowering.lower import Lowering, store_results, written_tensors_of
from runtime.lowering.sharing import Sharing, bind_inputs
from runtime.program.blocks import VariableBlock
from runtime.signals import deliver_pending_signals
from runtime.targets.replicas import Replicas

_log = Logger("session")

T = TypeVar("T")


class _NonFinite(NamedTuple):
    """Counts of non-finite numbers."""

    nans: int
    infinities: int

    def __str__(self) -> str:
        words = ((self.nans, "NaN", "NaNs"), (self.infinities, "infinity", "infinities"))
        return " and ".join(f"{count} {one if count == 1 else several}" for count, one, several in words if count)


@dataclass
class _Site:
    """Call stack entry: an op executing a graph; for loops, with the number of started iterations."""

    op: Op
    iteration: int = 0


@dataclass(frozen=True)
class _CollectiveCall:
    """Contribution of one replica to a collective op: operands, and their non-finite counts."""

    op: Op
    operands: Sequence[Array]
    non_finite: _NonFinite


_Task = Generator[_CollectiveCall, Any, T]
"""A replica's task, stopping at each collective: yields its contribution, and is sent the results of all replicas."""


class DebugLowering(Lowering):
    """Lowering of one replica that checks each op's results.

    Args:
        ops, options, replicas: as for `Lowering`.
        infinities: whether to report these too.
    """

    def __init__(
        self, ops: Iterable[Op], options: SessionOptions, replicas: Replicas, replica: int, infinities: bool
    ) -> None:
        super().__init__(ops, options, keep_calls=False, replicas=replicas)
        self.executed_ops = 0
        self._replica = replica
        self._infinities = infinities
        self._sites: list[_Site] = []

    @property
    def is_vmapped(self) -> bool:
        """Always false: replicas execute separately."""
        return False

    def run_ops(
        self,
        ops: Iterable[Op],
        values: Mapping[Tensor, Array],
        context: Context,
        aliases: Mapping[Tensor, Tensor] | None = None,
    ) -> _Task[Environment]:
        """Execute ops and check each result, yielding a `_CollectiveCall` at ops that communicate between replicas.

        Views are checked where they are read.
        """
        environment = self.environment(values, context, aliases)
        for op in (part for each in ops for part in each.parts):
            deliver_pending_signals()
            if op.kind.view is None:
                run = self._run_graphs if op.called_graphs else self._run_checked
                yield from run(op, environment, context)
        return environment

    def _run_graphs(self, op: Op, environment: Environment, context: Context) -> _Task[None]:
        """Execute the graphs of an op, checking their ops."""
        enter = self._loop if is_loop(op) else self._conditional if chooses(op) else self._call
        self._sites.append(_Site(op))
        try:
            yield from enter(op, environment, context)
        finally:
            self._sites.pop()

    def _run_graph(self, graph: Graph, inputs: Sequence[Array], context: Context, sharing: Sharing) -> _Task[Results]:
        values, aliases = bind_inputs(graph, inputs, sharing)
        environment = yield from self.run_ops(graph.ops, values, context.in_graph(inputs), aliases)
        return environment.results(graph, values, sharing)

    def _call(self, op: Op, environment: Environment, context: Context) -> _Task[None]:
        check_bound(op)
        (graph,) = op.called_graphs
        inputs = call_inputs(op, environment)
        results = yield from self._run_graph(graph, inputs, context, environment.sharing(op))
        finish_call(op, environment, inputs, results)

    def _loop(self, op: Op, environment: Environment, context: Context) -> _Task[None]:
        loop, (run,) = Loop(op, environment), op.runs
        state, rows = loop.start, []
        for i in run.numbers:
            self._sites[-1].iteration += 1
            iteration = loop.begin_iteration(state, jnp.asarray(i, jnp.int32))
            results = yield from self._run_graph(loop.graph, iteration.inputs, context, iteration.sharing)
            state, further = loop.end_iteration(iteration, results)
            rows.append(further)
        if run.numbers.step < 0:
            rows.reverse()
        if rows:
            stacked = list(map(jnp.stack, zip(*rows, strict=True)))
        else:
            stacked = [jnp.zeros(t.shape, t.dtype.as_jax()) for t in op.outputs[run.carried :]]
        loop.finish(state, stacked, environment)

    def _conditional(self, op: Op, environment: Environment, context: Context) -> _Task[None]:
        check_bound(op)
        condition = environment.value_of(op.inputs[0]).item()
        (run,) = (run for run in op.runs if run.condition == condition)
        inputs = [environment.value_of(t) for t in run.operands]
        results = yield from self._run_graph(run.graph, inputs, context, Sharing())
        for t, value in zip(op.outputs, results.outputs, strict=False):  # the graph may have gained outputs since
            environment.write(t, value)

    def _run_checked(self, op: Op, environment: Environment, context: Context) -> _Task[None]:
        """Execute and check an op without called graphs."""
        self.executed_ops += 1
        operands = [environment.value_of(t) for t in op.inputs]
        before = _non_finite(operands)
        if op.kind.between_replicas and self.replicas.count > 1:
            self._check(op, operands, context.channels)
            results, before = yield _CollectiveCall(op, operands, before)
            store_results(op, results, environment)
        else:
            self.lower_op(op, environment, context)
        targets = written_tensors_of(op)
        results_written = [environment.value_of(t) for t in targets]
        after = _non_finite(results_written)
        new_nan = after.nans and not before.nans
        new_infinity = self._infinities and after.infinities and not any(before)
        # Values from an exchange come from the user, or from ops that have been checked.
        if (new_nan or new_infinity) and not op.kind.exchange:
            message = self._message(op, operands, targets, results_written, before, after)
            raise NonFiniteError(message, op, self._replica)

    # Messages ---------------------------------------------------------------------------------------------------------

    def _message(
        self,
        op: Op,
        operands: Sequence[Array],
        targets: Sequence[Tensor],
        made: Sequence[Array],
        before: _NonFinite,
        after: _NonFinite,
    ) -> str:
        """Error message: the op, its location, its numbers, and advice."""
        replica = f", on replica {self._replica}" if self.replicas.count > 1 else ""
        rows = [_row(t, "", array) for t, array in zip(op.inputs, operands, strict=True)]
        rows += [_row(t, ", made of them", array) for t, array in zip(targets, made, strict=True)]
        columns = ["of what is finite:", "min", "max", "mean", "NaN", "infinite"]
        source = "infinities, and no NaN" if any(before) else "finite numbers"
        return "\n".join(
            [
                f"Session.run: an op has made {after} of {source}{replica}.",
                "",
                *_op_lines(op),
                *(text for site in self._callers() for text in _op_lines(site.op, site.iteration)),
                "",
                Table(columns, rows).text(),
                "",
                f"{_advice(targets, made)} The variables are as they were before this run.",
            ]
        )

    def _callers(self) -> list[_Site]:
        """Call stack from an op up to the main graph, omitting loop bodies that consist only of a call."""
        shown = []
        is_in_loop = False
        for site in self._sites:
            if not (is_in_loop and site.op.graph.ops == [site.op]):
                shown.append(site)
            is_in_loop = is_loop(site.op)
        return shown[::-1]


def _op_lines(op: Op, iteration: int = 0) -> list[str]:
    """Lines with an op's printed form and source location."""
    graph = op.graph
    gradient_text = f", the gradient of {graph.gradient_of.title}" if graph.gradient_of is not None else ""
    iteration_text = f", in turn {iteration} of {op.runs[0].iterations}" if iteration else ""
    return [f"    {line(op)}{iteration_text}", f"        in {graph.title}{gradient_text}, at {op.source.quoted}"]


def _advice(targets: Sequence[Tensor], arrays: Sequence[Array]) -> str:
    for t, array in zip(targets, arrays, strict=True):
        is_full = any(_non_finite([array])) if t.dtype.is_float8 else _non_finite([array]).infinities
        if is_full and t.dtype.itemsize < 4:
            largest = float(jnp.finfo(t.dtype.as_jax()).max)
            return (
                f"{t.dtype.name} ends at {largest:g}: compute this in float32, or make the numbers that go in smaller "
                "(by a smaller loss scale, for example)."
            )
    return (
        "Keep the numbers that go in where the op is defined (away from 0 by `ops.maximum`, or by adding a little), or "
        "find out from the ops before how they became so large."
    )


# Numbers -------------------------------------------------------------------------------------------------------------


def _numbers(array: Array) -> np.ndarray:
    """Floating point values of an array on the host: real and imaginary parts for complex dtypes, empty for non-float
    dtypes."""
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        return np.zeros(0)
    numbers = _real_components(array)
    return numbers if numbers.dtype.itemsize > 1 else numbers.astype(np.float32)


def _real_components(array: Array) -> np.ndarray:
    """Array on the host; complex numbers are split into real and imaginary parts."""
    numbers = np.asarray(array)
    return np.stack([numbers.real, numbers.imag], -1) if np.iscomplexobj(numbers) else numbers


def _non_finite(arrays: Sequence[Array]) -> _NonFinite:
    """Count non-finite numbers in arrays."""
    counts: Counter[str] = Counter()
    for array in arrays:
        numbers = _numbers(array)
        if not np.isfinite(numbers).all():
            counts.update(nans=int(np.isnan(numbers).sum()), infinities=int(np.isinf(numbers).sum()))
    return _NonFinite(counts["nans"], counts["infinities"])


def warn_of_given_nans(arrays: Iterable[tuple[VariableBlock | Channel, Array]]) -> None:
    """Log variables, buffers and streams containing NaN before a run, as no op caused these."""
    with_nans = [f"{_title(block)} ({count} NaN)" for block, array in arrays if (count := _non_finite([array]).nans)]
    if with_nans:
        _log.warn(
            f"Session.debugging: before the run there is NaN in {', '.join(with_nans)}. Ops that pass it on are not "
            "reported; look for what made it in an earlier run, or in the data."
        )


def _title(block: VariableBlock | Channel) -> str:
    return ", ".join(f"`{t.name}`" for t in block.tensors) if isinstance(block, VariableBlock) else str(block)


def _row(t: Tensor, role: str, array: Array) -> list[str]:
    """Table row with a tensor and statistics of its numbers."""
    nans, infinities = _non_finite([array])
    numbers = _real_components(array)
    numbers = numbers.astype(np.float64 if jnp.issubdtype(array.dtype, jnp.inexact) else numbers.dtype).ravel()
    finite = numbers[np.isfinite(numbers)]
    ranges = [f"{value:g}" for value in (finite.min(), finite.max(), finite.mean())] if finite.size else [""] * 3
    return [f"{t.path}: {brief(t)}{role}", *ranges, str(nans), str(infinities)]


# All replicas --------------------------------------------------------------------------------------------------------


def run_replicas(
    tasks: Sequence[_Task[Any]], lowerings: Sequence[DebugLowering], devices: Sequence[jax.Device]
) -> list[Any]:
    """Execute all replicas: each independently until its next collective op, then the collective.

    Raises:
        NonFiniteError: from the replica with the least progress, if several have made a NaN or an infinity.
        PopxlError: if replicas reach different ops at which they would wait for each other.
    """
    exchanged: list[Any] = [None] * len(tasks)
    while True:
        calls: list[_CollectiveCall] = []
        returned: list[Any] = []
        problems: list[tuple[int, NonFiniteError]] = []
        for task, lowering, device, results in zip(tasks, lowerings, devices, exchanged, strict=True):
            try:
                with jax.default_device(device):
                    calls.append(task.send(results))
            except StopIteration as end:
                returned.append(end.value)
            except NonFiniteError as problem:
                problems.append((lowering.executed_ops, problem))
        if problems:
            raise min(problems, key=lambda each: each[0])[1]
        if not calls:
            return returned
        if returned or len({call.op for call in calls}) > 1:
            called = [f"{op!r} ({op.source})" for op in dict.fromkeys(call.op for call in calls)]
            raise PopxlError(
                f"Session.run: replicas have come to different ops that talk to other replicas: {', '.join(called)}"
                f"{', or the end' if returned else ''}. Have all of them take the same branches of conditionals."
            )
        exchanged = _run_collective(calls, lowerings[0], devices)


def _run_collective(
    calls: Sequence[_CollectiveCall], lowering: DebugLowering, devices: Sequence[jax.Device]
) -> list[tuple[list[Array], _NonFinite]]:
    """Execute a collective op: results for each replica, and non-finite counts over all operands."""
    op, replicas = calls[0].op, Replicas(len(calls), devices[:1])
    by_operand = zip(*(call.operands for call in calls), strict=True)
    operands = [jnp.stack(jax.device_put(arrays, devices[0])) for arrays in by_operand]
    collective = Lowering((), lowering._options, replicas=replicas)
    outcome = replicas.vmap_replicas(lambda operands: collective.apply(op, operands, Channels({})))(operands)
    results = outcome if isinstance(outcome, tuple | list) else [outcome]
    non_finite = _NonFinite(*map(sum, zip(*(call.non_finite for call in calls), strict=True)))
    return [([jax.device_put(t[i], device) for t in results], non_finite) for i, device in enumerate(devices)]
