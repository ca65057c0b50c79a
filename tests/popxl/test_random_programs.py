"""Random programs mean the same however they are run, and their gradients are those of JAX.

A seed makes a program: `random_programs.maker`. What it means is said a second time in `random_programs.meanings`. The
programs are small, and compiling takes the time, so several make up one Ir. When that fails, each is run by itself, and
the failure shows the one at fault, and the line that runs it again. `RANDOM_PROGRAMS=0:5000` runs these seeds instead
of the usual ones. Those are few, and such that nearly every op of the first 300 comes up, also in a call, in a loop and
in a branch.
"""

from __future__ import annotations

import os
import tempfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.errors import PopxlError
from popxl.transforms import autodiff
from tests.popxl.random_programs.maker import Maker
from tests.popxl.random_programs.meanings import Machine, as_jax, transfers

Arrays = dict[str, np.ndarray]
Show = Callable[[popxl.Graph], None]

pytestmark = pytest.mark.filterwarnings("ignore:Session. a run stores to:popxl.errors.PopxlWarning")

AT_ONCE = 10
RUNS = 3


pytestmark = pytest.mark.filterwarnings("ignore::popxl.errors.PopxlWarning")  # they change what they take by value


def programs(usual: str) -> Any:
    """Run a test on these programs, some at a time."""
    start, stop = map(int, os.environ.get("RANDOM_PROGRAMS", usual).split(":"))
    batches = [range(first, min(first + AT_ONCE, stop)) for first in range(start, stop, AT_ONCE)]
    return pytest.mark.parametrize("seeds", batches, ids=lambda seeds: f"{seeds.start}:{seeds.stop}")


def check(agree: Callable[[Sequence[int], Show], None], seeds: range, test: str) -> None:
    """Check that programs agree with their meaning. If they do not, find the first that does not, and show it."""
    try:
        return agree(seeds, lambda graph: None)
    except Exception as problem:
        together = problem
    for seed in seeds:
        shown: list[popxl.Graph] = []
        try:
            agree([seed], shown.append)
        except Exception as problem:
            again = f"RANDOM_PROGRAMS={seed}:{seed + 1} python -m pytest tests/popxl/test_random_programs.py -k {test}"
            text = "\n".join(map(str, shown))
            raise AssertionError(f"{again}\n\n{type(problem).__name__}: {problem}\n\n{text}") from problem
    raise AssertionError(f"These programs fail together, and none by itself: {seeds}.") from together


# Running ------------------------------------------------------------------------------------------------------------


def run(ir: popxl.Ir, feeds: Sequence[Arrays], called_graphs: str) -> tuple[list[Arrays], Arrays]:
    """What each run stores, by the ids of streams, and the variables after the last one."""
    ir.options.calledGraphs = called_graphs
    with popxl.Session(ir, "ipu_model") as session:
        given = [{stream: feed[stream.tensor_id] for stream in session.expected_inputs()} for feed in feeds]
        outputs = [session.run(each) for each in given]
        stored = [{stream.tensor_id: np.asarray(array) for stream, array in each.items()} for each in outputs]
        variables = session.get_tensors_data(ir.main_graph.variables)
    return stored, {v.id: np.array(data) for v, data in variables.items()}


def ways(ir: popxl.Ir, seed: int) -> Iterator[tuple[str, popxl.Ir, str]]:
    """An Ir as it is, and as it is loaded from a file, with its called graphs compiled in one way and another."""
    with tempfile.TemporaryDirectory() as folder:
        ir.save(Path(folder, "program"))
        yield "kept", ir, "kept"
        for called_graphs in ["inlined"] + ["dispatched"] * (seed // AT_ONCE % 4 == 0):  # which takes longest
            loaded = popxl.Ir.load(Path(folder, "program"))
            assert str(loaded.main_graph) == str(ir.main_graph)
            yield f"loaded, {called_graphs}", loaded, called_graphs


def assert_same(name: str, found: Any, expected: Any, tolerance: float) -> None:
    """Integers exactly, floats nearly."""
    found, expected = np.asarray(found), np.asarray(expected)
    if found.dtype.kind == "f":
        np.testing.assert_allclose(found, expected, tolerance, tolerance / 10, err_msg=name)
    else:
        np.testing.assert_array_equal(found, expected, err_msg=name)


# Meaning ------------------------------------------------------------------------------------------------------------


def same_meaning(seeds: Sequence[int], show: Show) -> None:
    """What programs store, and their variables, run by run: those of the machine in NumPy."""
    ir, marks = popxl.Ir(), set()
    with ir.main_graph, popxl.in_sequence():
        for seed in seeds:
            maker = Maker(seed, streams=seed // AT_ONCE % 3 > 0)
            maker.main()
            marks |= maker.marks
    show(ir.main_graph)
    ir.num_host_transfers = max(transfers(ir.main_graph).values())
    loads = {op.attributes["stream"] for graph in ir.graphs for op in graph.ops if op.op_type == "HostLoad"}
    feeds = [{stream.tensor_id: feed(stream, ir.num_host_transfers, i) for stream in loads} for i in range(RUNS)]
    machine = Machine(ir, marks)
    stored = [machine.run(each) for each in feeds]
    variables = {v.id: machine.cells[cells] for v, cells in machine.variables.items()}
    shape = (ir.num_host_transfers,) if ir.num_host_transfers > 1 else ()
    feeds = [{id: array.reshape(shape + array.shape[1:]) for id, array in each.items()} for each in feeds]
    for way, program, called_graphs in ways(ir, seeds[0]):
        found, found_variables = run(program, feeds, called_graphs)
        for i, (ours, theirs) in enumerate(zip(found, stored, strict=True)):
            for id, arrays in theirs.items():
                ours[id] = ours[id].reshape(-1, *arrays[0].shape)[: len(arrays)]
                assert_same(f"{id} in run {i}, {way}", ours[id], arrays, 1e-4)
        for id, array in variables.items():
            assert_same(f"{id} after the last run, {way}", found_variables[id], array, 1e-4)


def feed(stream: popxl.HostToDeviceStream, count: int, run: int) -> np.ndarray:
    """Data for a stream that follow from its name."""
    random = np.random.default_rng(zlib.crc32(f"{stream.tensor_id} {run}".encode()))
    low, high = (0, 2) if stream.dtype == popxl.bool else (-3, 4)
    if stream.dtype.is_floating_point:
        return random.uniform(-1, 1, (count, *stream.shape)).astype(np.float32)
    return random.integers(low, high, (count, *stream.shape)).astype(stream.dtype.as_numpy())


@programs("150:270")
def test_meaning(seeds: range) -> None:
    check(same_meaning, seeds, "test_meaning")


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


def same_gradients(seeds: Sequence[int], show: Show, order: int) -> None:
    """What programs return, their gradients, and the gradients of these: those of JAX."""
    ir, expected = popxl.Ir(), {}
    with ir.main_graph:
        inputs = {seed: list(map(popxl.variable, data(seed))) for seed in seeds}
        makers = {seed: Maker(seed, pure=True, smooth=order > 1) for seed in seeds}
        graphs = {seed: maker.graph(inputs[seed]) for seed, maker in makers.items()}
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
    for way, program, called_graphs in ways(ir, seeds[0]):
        ((found,), _) = run(program, [{}], called_graphs)
        for id, result in expected.items():
            assert_same(f"{id}, {way}", found[id], result, 1e-3)


def data(seed: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    floats = [random.uniform(-1, 1, shape).astype(np.float32) for shape in FLOATS]
    return [*floats, np.int32(random.integers(-5, 5)), np.bool_(random.integers(2))]


@programs("30:90")
def test_gradients(seeds: range) -> None:
    check(lambda *what: same_gradients(*what, order=1), seeds, "test_gradients")


@programs("0:20")
def test_second_gradients(seeds: range) -> None:
    check(lambda *what: same_gradients(*what, order=2), seeds, "test_second_gradients")


# Seeds --------------------------------------------------------------------------------------------------------------


def test_a_seed_makes_one_program() -> None:
    def text() -> str:
        ir = popxl.Ir()
        with ir.main_graph, popxl.in_sequence():
            Maker(3).main()
        return str(ir.main_graph)

    assert text() == text()


def test_a_failure_shows_the_program_and_how_to_run_it_again() -> None:
    def agree(seeds: Sequence[int], show: Show) -> None:
        show(popxl.Ir().main_graph)
        assert 3 not in seeds, "no threes"

    with pytest.raises(AssertionError, match=r"RANDOM_PROGRAMS=3:4 python -m pytest .* -k some_test\n\n.*no threes"):
        check(agree, range(5), "some_test")
