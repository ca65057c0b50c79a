"""Comparison of a program on many replicas with its single-replica version: both run on the CPU.

Both get the same global batch and start with the same variables. Shards are assembled before the comparison.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import jax.numpy as jnp
import numpy as np

from popxl.base.arguments import check_type
from popxl.core.aliasing import reachable, storages
from popxl.core.recording import Op
from popxl.core.tensor import Tensor, Variable
from popxl.graph import Graph
from popxl.ir import Ir
from popxl.streams import Stream
from runtime.session import Session

Array = np.ndarray
Axes = Mapping[str, int]
Feeds = Mapping[str, Any]

DRAWS = 17
"""Seed of randomly drawn feeds."""

FACTOR_OF_ROUNDING = 30
"""Largest ratio of a difference that counts as a rounding error, to that which rounding errors of initial values make
on one replica."""


@dataclass(frozen=True)
class Difference:
    """Difference between the programs of many replicas and of one, at the first element that differs.

    Attributes:
        what: the variable or the output stream, by name.
        step: number of the first step, from 1, after which it differs; 0 if it differs before the first.
        found, expected: the first elements that differ, of many replicas and of one.
        index: position of these elements, in the assembled value.
        line: the line that last writes the variable or stores the output; empty if nothing writes it.
        collective: line of the last collective that the written value depends on; empty if there is none.
    """

    what: str
    step: int
    found: float
    expected: float
    index: tuple[int, ...]
    line: str = ""
    collective: str = ""

    def __str__(self) -> str:
        when = f"after step {self.step}" if self.step else "before the first step"
        places = "".join(f"[{i}]" for i in self.index)
        text = f"{self.what}{places} is {self.found:.6g} {when}, and on one replica {self.expected:.6g}."
        text += f" It is written at {self.line}." if self.line else " Nothing writes it."
        return text + (f" The last collective on the way is at {self.collective}." if self.collective else "")


@dataclass(frozen=True)
class Comparison:
    """Result of comparing a program on many replicas with the same program on one replica.

    Attributes:
        axes: axes of the replicas.
        steps: number of steps that were run.
        differences: first difference of each variable and output that differs; the earliest come first.
        compared: names of the variables and outputs that were compared.
        left_out: variables and outputs that were not compared, with the reason.
    """

    axes: Axes
    steps: int
    differences: Sequence[Difference] = ()
    compared: Sequence[str] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    def __str__(self) -> str:
        axes = " × ".join(f"{name} {size}" for name, size in self.axes.items())
        lines = [f"{axes} beside one replica, {self.steps} steps: {len(self.compared)} variables and outputs compared"]
        lines += [f"  {each}" for each in self.differences] or ["  no difference"]
        lines += [f"  not compared: {name}: {why}" for name, why in self.left_out.items()]
        return "\n".join(lines)

    def check(self) -> None:
        """Raise `AssertionError`, with the report, if anything differs."""
        if self.differences:
            raise AssertionError(str(self))


def compare(
    program: Callable[[dict[str, int]], Ir],
    *,
    axes: Axes,
    feeds: Feeds | None = None,
    steps: int = 3,
    divided: Mapping[str, Sequence[str]] | None = None,
    tolerance: float | None = None,
) -> Comparison:
    """Run a program with its replica axes, and with all axes of size one, and compare results.

    Both start with the variables of the latter and get the same global batch in each step. A stream or variable whose
    shape is smaller on many replicas is sharded: its batch or value is cut among the replicas along the axes whose
    sizes account for the difference, the outermost such axes unless `divided` names them. All others get the whole
    value. A variable with a `group_axis` is assembled along it; without one, a variable that is sharded along several
    axes is left out, as the order of its shards is unknown. Each replica's copy of an unsharded variable is
    compared; but copies that begin at zero and differ, and whose mean is that of one replica, such as sums of gradients
    before their reduction, are left out if nothing else differs in several steps. So are values that rounding errors
    decide, such as the bias of attention's keys under Adam: if anything differs, the program of one replica runs again,
    with and without rounding errors in its initial values. Outputs of one element are compared by their mean over
    replicas; those whose names differ are matched by their order.

    Args:
        program: function that builds the program for given axes, as `popxl.Ir(axes=axes)` does, and returns its `Ir`.
        axes: sizes by name.
        feeds: global batches of the streams by name, with the steps as first dimension, followed by the shape that a
            session of one replica takes. By default they are random: floats from a normal distribution, and integers
            from 0 and 1.
        steps: number of runs of each.
        divided: axes along which streams are cut, by the names of the streams, where sizes do not tell. Those that
            `axes` lacks have size one.
        tolerance: largest difference, relative to the largest element. By default 1e-4, and 2e-2 if the program
            computes anything in half precision, also for values of float32.

    Raises:
        TypeError: for a program that is no function or returns no `Ir`, axes or feeds that are no mapping, or `steps`
            that is not an integer.
        ValueError: for axes that are empty or all of size one, for `steps` below 1, for feeds with unexpected names or
            shapes, and for streams that the axes cannot divide.

    Example:
        >>> def program(axes: dict[str, int]) -> popxl.Ir:
        ...     ir = popxl.Ir(axes=axes)
        ...     with ir.main_graph:
        ...         x = ops.host_load(popxl.h2d_stream((8 // axes["data"],), popxl.float32, "x"))
        ...         w = popxl.variable(1.0, name="w")
        ...         ops.scaled_add_(w, ops.collectives.replicated_all_reduce(ops.mean(x)), b=0.1)
        ...     return ir
        >>> report = compare(program, axes={"data": 4}, steps=1)
        >>> bool(report), [each.what for each in report.differences]  # a sum where a mean was meant
        (False, ['w'])
    """
    if not callable(program):
        raise TypeError(f"compare: `program` must be a function that builds the program; got {program!r:.200}.")
    check_type(axes, Mapping, "compare: `axes`", "sizes by name, such as {'data': 4}")
    if not axes or math.prod(axes.values()) < 2:
        raise ValueError(f"compare: `axes` is {axes!r}; expected sizes by name, of several replicas together.")
    if feeds is not None:
        check_type(feeds, Mapping, "compare: `feeds`", "global batches by the names of the streams")
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise TypeError(f"compare: `steps` must be an integer; got {steps!r} ({type(steps).__name__}).")
    if steps < 1:
        raise ValueError(f"compare: `steps` is {steps}; expected 1 or more.")
    single, replicated = _built(program, dict.fromkeys(axes, 1)), _built(program, dict(axes))
    if replicated.replication_factor != math.prod(axes.values()) or single.replication_factor != 1:
        raise ValueError(
            f"compare: `program` builds an Ir of {replicated.replication_factor} replicas for the `axes` {axes}, and "
            f"of {single.replication_factor} where all are of size one. Make it with `popxl.Ir(axes=axes)`."
        )
    return _Experiment(single, replicated, axes, divided or {}, tolerance).run(feeds, steps)


def _built(program: Callable[[dict[str, int]], Ir], axes: dict[str, int]) -> Ir:
    ir = program(axes)
    if not isinstance(ir, Ir):
        raise TypeError(f"compare: `program` must return the Ir that it builds; got {ir!r} ({type(ir).__name__}).")
    return ir


class _Experiment:
    """Both programs, with their common tensors by name."""

    def __init__(
        self, single: Ir, replicated: Ir, axes: Axes, divided: Mapping[str, Sequence[str]], tolerance: float | None
    ) -> None:
        self.single, self.replicated, self.axes, self.tolerance = single, replicated, axes, tolerance
        self.divided = {name: (names,) if isinstance(names, str) else tuple(names) for name, names in divided.items()}
        results = {t.dtype for graph in reachable(single.main_graph) for op in graph.ops for t in op.outputs}
        self.computes_in_half = any(dtype.is_floating_point and dtype.itemsize < 4 for dtype in results)
        self.left_out: dict[str, str] = {}
        self.inputs = self._pairs(_by_name(single.get_all_h2d_streams()), _by_name(replicated.get_all_h2d_streams()))
        if unknown := self.divided.keys() - self.inputs.keys():
            raise ValueError(f"compare: `divided` names {sorted(unknown)}; the input streams are {[*self.inputs]}.")
        outputs = _by_name(single.get_all_d2h_streams())
        self.outputs = self._pairs(outputs, _named_alike(outputs, _by_name(replicated.get_all_d2h_streams())))
        self.variables = self._pairs(_by_name(single.main_graph.variables), _by_name(replicated.main_graph.variables))
        for _, v in self.variables.values():
            if v.piece is None and not v.location_info.isRemote() and v.replica_grouping.group_size > 1:
                v.retrieval_mode = "all_replicas"  # to see copies that drift apart

    def _pairs(self, singles: Mapping[str, Any], replicated: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        for name in singles.keys() ^ replicated.keys():
            self.left_out[name] = f"only the program of {'one replica' if name in singles else 'many replicas'} has it"
        return {name: (t, replicated[name]) for name, t in singles.items() if name in replicated}

    def run(self, feeds: Feeds | None, steps: int) -> Comparison:
        batches = self._batches(feeds, steps)
        differences: dict[str, Difference] = {}
        compared: dict[str, None] = {}
        off: set[str] = set()  # variables whose mean over copies is not the value of one replica
        errors: dict[str, float] = {}
        initial = {v: v.numbers() for v in self.single.main_graph.variables}
        self._begin_alike()
        sums = {name for name, (v, _) in self.variables.items() if not initial[v].any()}  # or other copies that differ
        with Session(self.single, "ipu_model") as single, Session(self.replicated, "ipu_model") as replicated:
            for step in range(steps):
                batch = {name: array[step] for name, array in batches.items()}
                single_outputs = single.run({self.inputs[name][0]: array for name, array in batch.items()})
                shards = {self.inputs[name][1]: self._sharded(name, array, replicated) for name, array in batch.items()}
                outputs = replicated.run(shards)
                for name, expected, copies in self._compared(single, replicated, single_outputs, outputs):
                    compared.setdefault(name)
                    if self._first_difference(np.mean([np.asarray(each) for each in copies], 0), expected) is not None:
                        off.add(name)
                    for copy in copies:
                        if name not in differences and (index := self._first_difference(copy, expected)) is not None:
                            differences[name] = self._difference(name, step + 1, index, copy, expected)
                            errors[name] = _distance(copy, expected)
        for name, rounding in self._rounding_errors(initial, batches, differences).items():
            if errors[name] <= FACTOR_OF_ROUNDING * rounding:
                self.left_out[name] = "rounding errors decide its value, on one replica, too"
                del differences[name], compared[name]
        if off.isdisjoint(differences) and differences.keys() <= sums and steps > 1:
            reason = "each replica has its own, whose mean is the value of one replica"
            self.left_out |= dict.fromkeys(differences, reason)
            compared = {name: None for name in compared if name not in differences}
            differences = {}
        return Comparison(dict(self.axes), steps, tuple(differences.values()), tuple(compared), self.left_out)

    def _rounding_errors(
        self, initial: Mapping[Variable, Array], batches: Mapping[str, Array], differences: Mapping[str, Difference]
    ) -> dict[str, float]:
        """Distance between one replica with and without rounding errors in its initial values, for each value that
        differs, after the step in which it does. Optimisers divide gradients by their size: if a gradient is zero but
        for rounding errors, as that of the bias of attention's keys, these decide the update.
        """
        if not differences:
            return {}
        steps = max(difference.step for difference in differences.values())
        rng = np.random.default_rng(DRAWS)
        rounded = {v: _with_rounding_errors(value, rng) for v, value in initial.items()}
        exact, other = (self._values(values, batches, steps) for values in (initial, rounded))
        return {name: _distance(*(run[d.step - 1][name] for run in (exact, other))) for name, d in differences.items()}

    def _values(
        self, initial: Mapping[Variable, Array], batches: Mapping[str, Array], steps: int
    ) -> list[dict[str, Array]]:
        """Values of one replica after each step, by name."""
        for v, value in initial.items():
            v.data = np.array(value)  # a session writes into it
        values = []
        with Session(self.single, "ipu_model") as single:
            for step in range(steps):
                outputs = single.run({self.inputs[name][0]: array[step] for name, array in batches.items()})
                variables = single.values_of(v for v, _ in self.variables.values())
                numbers = {name: np.asarray(outputs[s]) for name, (s, _) in self.outputs.items()}
                values.append({name: np.array(variables[v]) for name, (v, _) in self.variables.items()} | numbers)
        return values

    # Feeds

    def _batches(self, feeds: Feeds | None, steps: int) -> dict[str, Array]:
        """Global batches by the name of the stream, with the steps first."""
        if feeds is not None and feeds.keys() != self.inputs.keys():
            raise ValueError(f"compare: `feeds` are of {sorted(feeds)}; the input streams are {sorted(self.inputs)}.")
        rng, batches = np.random.default_rng(DRAWS), {}
        for name, (stream, _) in self.inputs.items():
            shape = (steps, *((stream.num_host_transfers,) * (stream.num_host_transfers > 1)), *stream.shape)
            if feeds is None:
                is_float = stream.dtype.is_floating_point
                array = rng.normal(size=shape) if is_float else rng.integers(0, 2, shape)
            else:
                array = np.asarray(feeds[name])
            if array.shape != shape:
                raise ValueError(f"compare: `feeds[{name!r}]` has the shape {array.shape}; expected {shape}.")
            batches[name] = array.astype(stream.dtype.as_numpy())
        return batches

    def _sharded(self, name: str, array: Array, session: Session) -> Array:
        """Shards of a global batch, as the replicated session takes them."""
        single, replicated = self.inputs[name]
        along = self._along(name, single.shape, replicated.shape)
        rows = array.reshape(-1, *single.shape)
        shards = [rows[(slice(None), *self._slices(replica, replicated.shape, along))] for replica in self._replicas()]
        return np.stack(shards, 1).reshape(session.host_shape(replicated))

    def _along(self, name: str, single: Sequence[int], replicated: Sequence[int]) -> list[tuple[str, ...]]:
        """Sharding axes of each dimension."""
        used: set[str] = set()
        dimensions: list[tuple[str, ...]] = []
        for dim, (size, shard_size) in enumerate(zip(single, replicated, strict=True)):
            ratio = size // shard_size if shard_size else 1
            along = self.divided.get(name, tuple(self.axes))
            names = [axis for axis in along if axis in self.axes and axis not in used]
            if size == shard_size:
                dimensions.append(())
                continue
            subsets = (c for n in range(1, len(names) + 1) for c in combinations(names, n))
            fitting = next((c for c in subsets if math.prod(self.axes[axis] for axis in c) == ratio), None)
            if fitting is None or shard_size * ratio != size:
                raise ValueError(
                    f"compare: dimension {dim} of {name!r} has {size} elements on one replica, and {shard_size} on "
                    f"each of many; {[*along]} of the axes {dict(self.axes)} do not divide it like this. Let `program` "
                    "divide by them."
                )
            used.update(fitting)
            dimensions.append(fitting)
        return dimensions

    def _replicas(self) -> Iterator[dict[str, int]]:
        """Positions of each replica along the axes."""
        for position in np.ndindex(*self.axes.values()):
            yield dict(zip(self.axes, position, strict=True))

    def _slices(
        self, replica: Mapping[str, int], shape: Sequence[int], along: Sequence[Sequence[str]]
    ) -> tuple[slice, ...]:
        slices = []
        for size, names in zip(shape, along, strict=True):
            index = 0
            for name in names:
                index = index * self.axes[name] + replica[name]
            slices.append(slice(index * size, (index + 1) * size) if names else slice(None))
        return tuple(slices)

    # Variables

    def _begin_alike(self) -> None:
        """Initialize variables of the replicated program from the single-replica program, before a session has them."""
        for name, (v, w) in [*self.variables.items()]:
            value, groups, axis = v.numbers(), w.replica_grouping.num_groups, _axis(v, w)
            is_order_known = w.group_axis is not None or groups in self.axes.values()
            is_assembled = axis is not None and is_order_known and w.shape[axis] * groups == v.shape[axis]
            if v.shape != w.shape and not is_assembled:
                self.left_out[name] = f"shapes {v.shape} and {w.shape} do not tell how {groups} groups divide it"
                del self.variables[name]
            elif groups > 1:
                w.data = np.stack([value] * groups if axis is None else np.split(value, groups, axis))
            else:
                w.data = value

    def _compared(
        self, first: Session, second: Session, single_outputs: Mapping[Any, Array], outputs: Mapping[Any, Array]
    ) -> Iterator[tuple[str, Array, Sequence[Array]]]:
        """Values by name: of one replica, and of many put together, each copy of them."""
        values = first.values_of(v for v, _ in self.variables.values())
        gathered = second.values_of(w for _, w in self.variables.values())
        for name, (v, w) in self.variables.items():
            yield name, values[v], [*_assembled(v, w, gathered[w])]
        for name, (s, t) in self.outputs.items():
            if s.shape == t.shape and math.prod(s.shape) == 1:
                rows = np.asarray(outputs[t], np.float64).reshape(t.num_host_transfers, -1)
                yield name, np.asarray(single_outputs[s], np.float64).reshape(-1), [rows.mean(1)]
            else:
                self.left_out[name] = "outputs of several elements are not put together; store a number"

    def _first_difference(self, actual: Array, expected: Array) -> tuple[int, ...] | None:
        """The first place where numbers differ."""
        if not np.issubdtype(expected.dtype, np.number) or np.issubdtype(expected.dtype, np.integer):
            wrong = actual != expected
        else:
            is_half = self.computes_in_half or expected.dtype.itemsize < 4
            tolerance = (2e-2 if is_half else 1e-4) if self.tolerance is None else self.tolerance
            x, y = (each.astype(np.complex128) for each in (actual, expected))
            largest = max(float(np.abs(y[np.isfinite(y)]).max(initial=0)), 1e-3)
            wrong = ~np.isclose(x, y, tolerance, tolerance * largest, equal_nan=True)
        indices = np.argwhere(wrong)
        return tuple(int(i) for i in indices[0]) if len(indices) else None

    def _difference(self, name: str, step: int, index: tuple[int, ...], actual: Array, expected: Array) -> Difference:
        main = self.replicated.main_graph
        if name in self.variables:
            v = self.variables[name][1]
            writer = _last_writer(main, {v, *((v.piece,) if v.piece is not None else ())})
        else:
            writer = _last_storing(main, self.outputs[name][1])
        lines = ("", "") if writer is None else (str(writer.source), _last_collective(main, writer))
        return Difference(name, step, _number(actual[index]), _number(expected[index]), index, *lines)


# Lines --------------------------------------------------------------------------------------------------------------


def _last_writer(graph: Graph, wanted: Set[Tensor]) -> Op | None:
    """Last op that overwrites any of the tensors, within called graphs if these do."""
    aliases = storages(graph.ops)
    for op in reversed(graph.ops):
        for i in sorted(op.modified):
            if wanted.isdisjoint(aliases.get(op.inputs[i], (op.inputs[i],))):
                continue
            for run in op.runs:
                inner = {t for t, operand in run.bindings if operand is op.inputs[i]}
                if inner and (writer := _last_writer(run.graph, inner)) is not None:
                    return writer
            return op
    return None


def _last_storing(main: Graph, stream: Stream) -> Op | None:
    """The last op to store to a stream."""
    storing = [op for g in reachable(main) for op in g.ops if op.attributes.get("stream") is stream]
    return storing[-1] if storing else None


def _last_collective(main: Graph, writer: Op) -> str:
    """Source line of an op's last upstream collective, first in its own graph, then in the main graph."""
    for graph in dict.fromkeys((writer.graph, main)):
        is_own = graph is writer.graph
        needed = {*writer.inputs} if is_own else {t for op in graph.ops for t in op.outputs}
        before = graph.ops[: graph.ops.index(writer)] if is_own else graph.ops
        for op in reversed(before):
            if needed.isdisjoint(op.outputs) and needed.isdisjoint(op.inputs[i] for i in op.modified):
                continue
            if op.kind.between_replicas:
                return str(op.source)
            needed.update(op.inputs)
    return ""


def _with_rounding_errors(value: Array, rng: np.random.Generator) -> Array:
    """A value whose floats are larger or smaller by a rounding error."""
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        return value
    errors = jnp.finfo(value.dtype).eps * rng.choice([-1, 1], value.shape)
    return value + value * errors.astype(value.dtype)


def _distance(actual: Array, expected: Array) -> float:
    """Largest difference of two values."""
    return float(np.abs(actual.astype(np.complex128) - expected.astype(np.complex128)).max(initial=0))


def _number(value: Any) -> float:
    return float(np.real(value))


def _by_name(tensors: Any) -> dict[str, Any]:
    return {each.tensor.name if isinstance(each, Stream) else each.name: each for each in tensors}


def _named_alike(singles: Mapping[str, Stream], replicated: Mapping[str, Stream]) -> dict[str, Stream]:
    """Streams of the replicated program under the names of one replica. Names that only one of both programs has are of
    the same streams, in order, if they are as many and of equal specs: so a loss has another name once it is reduced.
    """
    own, others = ([name for name in a if name not in b] for a, b in ((singles, replicated), (replicated, singles)))
    if [singles[name].tensor.spec for name in own] != [replicated[name].tensor.spec for name in others]:
        return dict(replicated)
    renamed = dict(zip(others, own, strict=True))
    return {renamed.get(name, name): stream for name, stream in replicated.items()}


def _axis(single: Variable, replicated: Variable) -> int | None:
    """Axis of a value divided by replica groups; `None` for undivided values."""
    if single.shape == replicated.shape:
        return None
    if replicated.group_axis is not None:
        return replicated.group_axis
    differing = [i for i, (a, b) in enumerate(zip(single.shape, replicated.shape, strict=False)) if a != b]
    return differing[0] if len(differing) == 1 and len(single.shape) == len(replicated.shape) else None


def _assembled(single: Variable, replicated: Variable, data: Array) -> Iterator[Array]:
    """Assembled values of a replicated variable: one for each copy that is read."""
    grouping, axis = replicated.replica_grouping, _axis(single, replicated)
    is_of_all = replicated.retrieval_mode == "all_replicas" and grouping.group_size > 1
    if not is_of_all:
        rows = [*data] if grouping.num_groups > 1 else [data]
        yield from rows if axis is None else [np.concatenate(rows, axis)]
        return
    if axis is None:
        yield from data
        return
    by_group = data[np.argsort(grouping.assignment, kind="stable")].reshape(grouping.num_groups, -1, *data.shape[1:])
    yield from (np.concatenate(rows, axis) for rows in by_group.swapaxes(0, 1))
