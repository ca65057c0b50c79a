"""Whether random programs mean what they should, run in the way that is drawn with them.

Programs are small, and compiling takes the time, so several make up one Ir: they have the same settings.
"""

from __future__ import annotations

import tempfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import popxl
from popxl import ops
from popxl.errors import PopxlError
from popxl.transforms import autodiff
from tests.popxl.random_programs.maker import Maker
from tests.popxl.random_programs.meanings import Machine, as_jax, transfers
from tests.popxl.random_programs.settings import Settings
from tests.tolerances import tolerances

Array = Any
Arrays = dict[str, np.ndarray]
Show = Callable[[popxl.Graph], object]

TOGETHER = 10
"""So many programs have the same settings: those whose seeds differ in the last digit."""

RUNS = 2


def settings_of(seed: int) -> Settings:
    """How the program of a seed is run."""
    return Settings.drawn(seed // TOGETHER)


def order_of(seed: int) -> int:
    """How often the program of a seed is differentiated."""
    number = seed // TOGETHER
    return 2 if number % 25 == 24 else 1 if number % 5 == 4 else 0


def agree(seeds: Sequence[int], most: int | None = None, show: Show = lambda graph: None) -> None:
    """Check that programs agree with their meaning.

    Args:
        seeds: of the programs, which have the same settings.
        most: how many steps each program has at most; see `Maker.main`.
        show: is given graphs to show if something goes wrong.

    Raises:
        AssertionError: if they do not.
    """
    settings, order = settings_of(seeds[0]), order_of(seeds[0])
    if order:
        same_gradients(seeds, settings, order, most, show)
    else:
        same_meaning(seeds, settings, most, show)


def check(seeds: Sequence[int], agree: Callable[..., None] = agree) -> None:
    """Check that programs agree with their meaning. If they do not, show as few of them as possible."""

    def problem(seeds: Sequence[int], show: Show = lambda graph: None) -> Exception | None:
        try:
            agree(seeds, show=show)
        except Exception as raised:
            return raised
        return None

    if (together := problem(seeds)) is not None:
        seeds = fewest(seeds, lambda seeds: problem(seeds) is not None)
        shown: list[popxl.Graph] = []
        found = problem(seeds, shown.append) or together
        raise AssertionError(failure(seeds, "\n".join(map(str, shown)), described(found))) from found


def fewest(seeds: Sequence[int], fail: Callable[[Sequence[int]], bool]) -> Sequence[int]:
    """Of programs that fail together, one that fails by itself; or as few as fail without one of them."""
    alone = next(([seed] for seed in seeds if fail([seed])), None)
    if alone is not None:
        return alone
    left = list(seeds)
    for seed in seeds:
        others = [other for other in left if other != seed]
        if others and fail(others):
            left = others
    return left


def failure(seeds: Sequence[int], text: str, problem: str) -> str:
    """What to say of programs that fail: how to run them again, how they are run, what they are, what went wrong."""
    again = f"python -m tests.popxl.random_programs --together {' '.join(map(str, seeds))}"
    return f"{again}\n{settings_of(seeds[0])}\n\n{text}\n\n{problem}"


def described(problem: Exception) -> str:
    """An error in words."""
    return f"{type(problem).__name__}: {problem}"


def run(ir: popxl.Ir, settings: Settings, seed: int, feeds: Sequence[Arrays]) -> tuple[list[Arrays], Arrays]:
    """What each run stores, by the ids of streams: all transfers, each of all replicas; then the variables."""
    if settings.ipus > 1:
        settings.scatter(ir, seed)
    if settings.way == "loaded":
        with tempfile.TemporaryDirectory() as folder:
            ir.save(Path(folder, "program"))
            loaded = popxl.Ir.load(Path(folder, "program"))
        assert str(loaded.main_graph) == str(ir.main_graph)
        ir = loaded
    leading = (ir.num_host_transfers, settings.replicas)
    with settings.session(ir) as session:
        stored = []
        for feed in feeds:
            given = {s: feed[s.tensor_id].reshape(session.host_shape(s.shape)) for s in session.expected_inputs()}
            found = session.run(given)
            stored.append({s.tensor_id: np.array(array).reshape(leading + s.shape) for s, array in found.items()})
        variables = session.get_tensors_data(ir.main_graph.variables)
    return stored, {v.id: np.array(data) for v, data in variables.items()}


def assert_same(name: str, found: Any, expected: Any, tolerance: float) -> None:
    """Integers exactly, floats nearly."""
    found, expected = np.asarray(found), np.asarray(expected)
    if found.dtype.kind == "f":
        # an element near 0 may be a sum of numbers as large as others are
        near = tolerances(expected, tolerance / 10) | {"rtol": tolerance}
        np.testing.assert_allclose(found, expected, **near, err_msg=name)
    else:
        np.testing.assert_array_equal(found, expected, err_msg=name)


# Meaning ------------------------------------------------------------------------------------------------------------


def same_meaning(seeds: Sequence[int], settings: Settings, most: int | None, show: Show) -> None:
    """What programs store, and their variables, run by run: those of the machine in NumPy."""
    ir, marks = settings.ir(), set()
    with ir.main_graph, popxl.in_sequence():
        for seed in seeds:
            maker = Maker(
                seed,
                streams=settings.streams,
                buffers=settings.buffers,
                replicas=settings.replicas,
                layers=settings.layers,
            )
            maker.main(most)
            marks |= maker.marks
    show(ir.main_graph)
    ir.num_host_transfers = max(transfers(ir.main_graph).values())
    loads = {op.attributes["stream"] for graph in ir.graphs for op in graph.ops if op.op_type == "HostLoad"}
    count = (ir.num_host_transfers, settings.replicas)
    feeds = [{stream.tensor_id: feed(stream, count, i) for stream in loads} for i in range(RUNS)]
    machine = Machine(ir, marks)
    expected = [machine.run(each) for each in feeds]
    stored, variables = run(ir, settings, seeds[0], feeds)
    for i, (ours, theirs) in enumerate(zip(stored, expected, strict=True)):
        for id, of_replicas in theirs.items():
            for replica, arrays in enumerate(of_replicas):
                if arrays:
                    assert_same(f"{id} of replica {replica} in run {i}", ours[id][: len(arrays), replica], arrays, 1e-4)
    for v in ir.main_graph.variables:
        assert_same(f"{v.id} after the last run", variables[v.id], read_back(v, machine.values(v)), 1e-4)


def feed(stream: popxl.HostToDeviceStream, count: tuple[int, ...], run: int) -> np.ndarray:
    """Data for a stream that follow from its name."""
    random = np.random.default_rng(zlib.crc32(f"{stream.tensor_id} {run}".encode()))
    low, high = (0, 2) if stream.dtype == popxl.bool else (-3, 4)
    if stream.dtype.is_floating_point:
        return random.uniform(-1, 1, (*count, *stream.shape)).astype(np.float32)
    return random.integers(low, high, (*count, *stream.shape)).astype(stream.dtype.as_numpy())


def read_back(v: Any, of_replicas: Sequence[Array]) -> Array:
    """What is read of a variable, given what replicas hold."""
    grouping = v.replica_grouping
    if v.retrieval_mode == "all_replicas" and grouping.group_size > 1:
        return np.stack(of_replicas)
    rows = [of_replicas[grouping.assignment.index(group)] for group in range(grouping.num_groups)]
    return rows[0] if len(rows) == 1 else np.stack(rows)


# Gradients ----------------------------------------------------------------------------------------------------------

Function = Callable[..., Sequence[Any]]


class Derived:
    """A graph and the same function in JAX: of a program, or of its gradient; and what is to be differentiated next.

    Args:
        seed: of the program.
        graph, function: of some floats, an integer and a flag.
    """

    def __init__(self, seed: int, graph: popxl.Graph, function: Function) -> None:
        self.random = np.random.default_rng(seed)
        self.seed, self.graph, self.function = seed, graph, function
        self.outputs = graph.outputs
        first = [i for i, t in enumerate(self.outputs) if t not in self.outputs[:i]]
        self.provided = self.some(first)
        self.gs = [self.random.uniform(-1, 1, self.outputs[i].shape).astype(np.float32) for i in self.provided]

    def some(self, options: list[int]) -> list[int]:
        """Some of the options, at least one, in any order."""
        return self.random.permutation(options)[: self.random.integers(1, len(options) + 1)].tolist()

    def pulled(self, *inputs: Any) -> Sequence[Any]:
        """The gradients of all floats, by JAX."""

        def loss(*floats: Any) -> Any:
            outputs = self.function(*floats, *inputs[len(FLOATS) :])
            return sum(jnp.vdot(g, outputs[i]) for i, g in zip(self.provided, self.gs, strict=True))

        return jax.grad(loss, tuple(range(len(FLOATS))))(*inputs[: len(FLOATS)])

    def values(self) -> tuple[Sequence[Any], Sequence[Any]]:
        """What the function returns, and the gradients of all floats."""
        return self.function(*data(self.seed)), self.pulled(*data(self.seed))

    def derive(self, values: Sequence[Any]) -> Derived | None:
        """The gradient of some inputs that have one, given the values of all gradients."""
        reached = [i for i, g in enumerate(values) if np.any(g)]
        provided, inputs = [self.outputs[i] for i in self.provided], self.graph.inputs
        for i in range(len(FLOATS)):
            if i not in reached:  # it has no gradient, or zeros
                try:
                    autodiff(self.graph, provided, [inputs[i]])
                except PopxlError:
                    pass
        if not reached:
            return None
        required = self.some(reached)
        info = autodiff(self.graph, provided, [inputs[i] for i in required])

        def gradient(*inputs: popxl.Tensor) -> Sequence[popxl.Tensor]:
            site = ops.call_with_info(self.graph, *inputs)
            return ops.call(info.graph, *map(popxl.constant, self.gs), inputs_dict=info.inputs_dict(site))

        graph = self.graph.ir.create_graph(gradient, *inputs)
        return Derived(self.seed, graph, lambda *inputs: [self.pulled(*inputs)[i] for i in required])


FLOATS = [(2, 3), (2, 2, 3), (3,), ()]


def same_gradients(seeds: Sequence[int], settings: Settings, order: int, most: int | None, show: Show) -> None:
    """What programs return, their gradients, and the gradients of these: those of JAX."""
    ir, expected = settings.ir(), {}
    with ir.main_graph:
        inputs = {seed: list(map(popxl.variable, data(seed))) for seed in seeds}
        makers = {seed: Maker(seed, pure=True, smooth=order > 1) for seed in seeds}
        graphs = {seed: maker.graph(inputs[seed], most) for seed, maker in makers.items()}
        level = [Derived(seed, graph, as_jax(graph)) for seed, graph in graphs.items()]
        for number in range(order + 1):
            for each in level:
                show(each.graph)
            values = jax.jit(lambda level=level: [each.values() for each in level])()
            nexts = []
            for each, (results, gradients) in zip(level, values, strict=True):
                found = ops.call(each.graph, *inputs[each.seed])[: len(results)]
                for i, (t, result) in enumerate(zip(found, results, strict=True)):
                    stream = popxl.d2h_stream(t.shape, t.dtype, f"program{each.seed}_gradient{number}_{i}")
                    ops.host_store(stream, t)
                    expected[stream.tensor_id] = result
                nexts.append(each.derive(gradients) if number < order else None)
            level = [each for each in nexts if each is not None]
    ((found,), _) = run(ir, settings, seeds[0], [{}])
    for id, result in expected.items():
        for replica in range(settings.replicas):
            assert_same(f"{id} of replica {replica}", found[id][0, replica], result, 1e-3)


def data(seed: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    floats = [random.uniform(-1, 1, shape).astype(np.float32) for shape in FLOATS]
    return [*floats, np.int32(random.integers(-5, 5)), np.bool_(random.integers(2))]
