"""The same random program, twice: in NumPy, and through Ir and Session. And its gradient, through JAX.

A seed makes a program: a list of steps, with programs of their own for the graphs that it calls and repeats. It is
carried out in three ways. NumPy's is a memory of numbered cells: a tensor is an array of cell numbers, a view is the
same cells in another arrangement, and an in-place op writes to them. This is all that views and aliases mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.transforms import autodiff
from tests.popxl.evaluate import evaluate

Shape = tuple[int, ...]

# Programs -----------------------------------------------------------------------------------------------------------


@dataclass
class Step:
    """One op: its name in a table below, which values it takes, and its attributes."""

    name: str
    operands: tuple[int, ...]
    attributes: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        settings = [f"{name}={value}" for name, value in self.attributes.items() if name != "body"]
        return f"{self.name}({', '.join([f'v{i}' for i in self.operands] + settings)})"


@dataclass
class Program:
    """Steps over values: first the inputs, then the results of each step, in order."""

    inputs: list[Shape]
    by_ref: list[bool]
    steps: list[Step] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"inputs {self.inputs}, by reference {self.by_ref}", *map(str, self.steps), f"outputs {self.outputs}"]
        return "\n".join(lines)


NEW: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "tanh": (ops.tanh, lambda np, t: np.tanh(t)),
    "sin": (ops.sin, lambda np, t: np.sin(t)),
    "cos": (ops.cos, lambda np, t: np.cos(t)),
    "negate": (ops.negate, lambda np, t: -t),
    "relu": (ops.relu, lambda np, t: np.maximum(t, 0)),
    "swish": (ops.swish, lambda np, t: t / (1 + np.exp(-t))),
    "shrink": (lambda t: t * 0.5 - 0.25, lambda np, t: t * 0.5 - 0.25),
    "softmax": (lambda t: ops.softmax(t, -1), lambda np, t: np.exp(t) / np.exp(t).sum(-1, keepdims=True)),
    "add": (ops.add, lambda np, a, b: a + b),
    "sub": (ops.sub, lambda np, a, b: a - b),
    "mul": (lambda a, b: ops.tanh(a * b), lambda np, a, b: np.tanh(a * b)),
    "div": (lambda a, b: a / (b * b + 1), lambda np, a, b: a / (b * b + 1)),
    "where": (  # not at 0, where rounding would decide
        lambda a, b: ops.where(ops.greater(a, popxl.constant(0.3123)), a, b),
        lambda np, a, b: np.where(a > 0.3123, a, b),
    ),
    "matmul": (lambda a, b: ops.tanh(a @ b.T), lambda np, a, b: np.tanh(a @ b.T)),
    "mean": (ops.mean, lambda np, t, **how: np.mean(t, **how)),
    "sum": (lambda t, **how: ops.tanh(ops.sum(t, **how)), lambda np, t, **how: np.tanh(np.sum(t, **how))),
    "logsumexp": (ops.logsumexp, lambda np, t, **how: np.log(np.sum(np.exp(t), **how))),
    "reshape": (ops.reshape, lambda np, t, shape: t.reshape(shape)),
    "transpose": (ops.transpose, lambda np, t, permutation: np.transpose(t, permutation)),
    "getitem": (lambda t, key: t[key], lambda np, t, key: t[key]),
    "gather": (lambda t, rows: t[list(rows)], lambda np, t, rows: t[np.array(rows)]),
    "concat": (lambda *ts, axis: ops.concat(ts, axis), lambda np, *ts, axis: np.concatenate(ts, axis)),
    "split": (lambda t, at: tuple(ops.split(t, [at, t.shape[0] - at])), lambda np, t, at: (t[:at], t[at:])),
}
VIEWS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "reshape_": (ops.reshape_, NEW["reshape"][1]),
    "transpose_": (ops.transpose_, NEW["transpose"][1]),
    "slice_": (lambda t, key: ops.slice_(t, key.start, key.stop, key.step), NEW["getitem"][1]),
    "concat_": (lambda *ts, axis: ops.concat_(ts, axis), NEW["concat"][1]),
}
WRITES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "add_": (ops.add_, lambda np, t, u: t + u),
    "relu_": (ops.relu_, lambda np, t: np.maximum(t, 0)),
    "swish_": (ops.swish_, NEW["swish"][1]),
    "mix_": (lambda t, u: ops.scaled_add_(t, u, 0.5, -0.5), lambda np, t, u: 0.5 * t - 0.5 * u),
    "accumulate_": (lambda t, u: ops.var_updates.accumulate_(t, u, 0.25), lambda np, t, u: t + 0.25 * u),
    "copy_": (ops.var_updates.copy_var_update_, lambda np, t, u: u),
}
TABLE = NEW | VIEWS | WRITES
PAIRS = {"add", "sub", "mul", "div", "where", "matmul", "concat", "concat_", "add_", "mix_", "accumulate_", "copy_"}


class Maker:
    """Makes a random program."""

    def __init__(self, seed: int, writes: bool) -> None:
        self.random = np.random.default_rng(seed)
        self.writes = writes

    def program(self, inputs: list[Shape], by_ref: list[bool], steps: int, depth: int = 2) -> Program:
        program = Program(inputs, by_ref)
        shapes = list(inputs)
        while len(program.steps) < steps:
            step = self.call(shapes, depth) if depth and self.random.random() < 0.15 else self.step(shapes)
            made = step and shapes_of(step, shapes)
            if step and made and all(0 < math.prod(shape) <= 48 and len(shape) <= 4 for shape in made):
                program.steps.append(step)
                shapes += made
        program.outputs = [self.pick(len(shapes)) for _ in range(3)]
        return program

    def pick(self, count: int) -> int:
        """A number below `count`; large ones are more likely, so that programs become deep."""
        return int(count * self.random.random() ** 0.5)

    def step(self, shapes: list[Shape]) -> Step | None:
        """One op, or `None` if this one has no operands that fit."""
        names = [*NEW, *VIEWS] + [*WRITES] * 3 * self.writes
        name = names[self.random.integers(len(names))]
        i = self.pick(len(shapes))
        operands = (i,)
        if name in PAIRS:
            fitting = [j for j, shape in enumerate(shapes) if self.fits(name, shapes[i], shape)]
            if not fitting:
                return None
            operands = (i, fitting[self.pick(len(fitting))])
        attributes = self.attributes(name.rstrip("_"), shapes[i])
        return None if attributes is None else Step(name, operands, attributes)

    def fits(self, name: str, shape: Shape, other: Shape) -> bool:
        """Whether an op takes operands of these shapes."""
        if name == "matmul":
            return len(shape) == len(other) == 2 and shape[1] == other[1]
        if name in ("concat", "concat_"):
            return len(shape) > 0 and shape[1:] == other[1:]
        if name in ("mix_", "accumulate_", "copy_"):
            return shape == other
        try:
            return name != "add_" or np.broadcast_shapes(shape, other) == shape
        except ValueError:
            return False

    def attributes(self, name: str, shape: Shape) -> dict[str, Any] | None:
        """Attributes for an operand of this shape; `None` if it cannot be."""
        rank = len(shape)
        if name in ("mean", "sum", "logsumexp"):
            axes = tuple(int(d) for d in range(rank) if self.random.random() < 0.6)
            return {"axis": axes, "keepdims": bool(self.random.random() < 0.3)}
        if name == "reshape":
            divisors = [d for d in range(1, 7) if math.prod(shape) % d == 0]
            return {"shape": (int(self.random.choice(divisors)), -1)}
        if name == "transpose":
            return {"permutation": tuple(map(int, self.random.permutation(rank)))} if rank else None
        if name in ("softmax", "getitem", "slice", "gather", "split", "concat") and not rank:
            return None
        if name == "getitem" or name == "slice":
            start, stop = sorted(map(int, self.random.integers(0, shape[0] + 1, 2)))
            steps = (None, 1, -1) if name == "slice" else (None, 2, -2)
            step = steps[self.random.integers(3)]
            return {"key": slice(start, stop, step) if step is None or step > 0 else slice(stop, start or None, step)}
        if name == "gather":
            return {"rows": tuple(map(int, self.random.integers(0, shape[0], 3)))}
        if name == "split":
            return {"at": int(self.random.integers(1, shape[0]))} if shape[0] > 1 else None
        return {"axis": 0} if name == "concat" else {}

    def call(self, shapes: list[Shape], depth: int) -> Step:
        """A call or a repeat of a graph."""
        operands = tuple(self.pick(len(shapes)) for _ in range(2))
        inputs = [shapes[i] for i in operands]
        repeated = self.random.random() < 0.5
        by_ref = [self.writes and not (repeated and k == 0) and self.random.random() < 0.5 for k in range(2)]
        if operands[0] == operands[1]:
            by_ref = [False, False]
        body = self.program(inputs, by_ref, int(self.random.integers(2, 6)), depth - 1)
        if not repeated:
            return Step("call", operands, {"body": body})
        count = len(inputs) + sum(len(shapes_of(s, None)) for s in body.steps)
        body.steps += [
            Step("mean", (body.outputs[0],), {"axis": None}),
            Step("add", (0, count)),
            Step("tanh", (count + 1,)),
        ]
        body.outputs = [count + 2]
        return Step("repeat", operands, {"body": body, "turns": int(self.random.integers(0, 4))})


def shapes_of(step: Step, shapes: list[Shape] | None) -> list[Shape]:
    """Shapes of the results of a step: what NumPy says. Without the shapes of the values, only their number counts."""
    if "body" in step.attributes:
        body = step.attributes["body"]
        known = list(body.inputs)
        for inner in body.steps:
            known += shapes_of(inner, known)
        return [known[i] for i in body.outputs]
    if shapes is None:
        return [()] * (2 if step.name == "split" else 1)
    try:
        result = TABLE[step.name][1](np, *(np.zeros(shapes[i]) for i in step.operands), **step.attributes)
    except ValueError:
        return []
    return [r.shape for r in (result if isinstance(result, tuple) else [result])]


# In NumPy -----------------------------------------------------------------------------------------------------------


class Memory:
    """Numbered cells, and programs that run on them. A tensor is an array of numbers of cells."""

    def __init__(self) -> None:
        self.cells = np.zeros(0)

    def new(self, values: Any) -> np.ndarray:
        """A tensor in fresh cells."""
        values = np.asarray(values, np.float64)
        start = len(self.cells)
        self.cells = np.concatenate([self.cells, values.ravel()])
        return np.arange(start, start + values.size).reshape(values.shape)

    def copy(self, t: np.ndarray) -> np.ndarray:
        return self.new(self.cells[t])

    def run(self, program: Program, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
        """All values of a program."""
        values = list(inputs)
        for step in program.steps:
            operands = [values[i] for i in step.operands]
            values += self.carry_out(step, operands)
        return values

    def carry_out(self, step: Step, operands: list[np.ndarray]) -> list[np.ndarray]:
        if step.name == "call":
            return self.call(step.attributes["body"], operands)
        if step.name == "repeat":
            return self.repeat(step.attributes["body"], operands, step.attributes["turns"])
        meaning = TABLE[step.name][1]
        if step.name in VIEWS:
            return [meaning(np, *operands, **step.attributes)]
        result = meaning(np, *(self.cells[t] for t in operands), **step.attributes)
        if step.name in WRITES:
            self.cells[operands[0]] = result
            return operands[:1]
        return [self.new(r) for r in (result if isinstance(result, tuple) else [result])]

    def call(self, body: Program, operands: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Copy in, run, copy out; what is by reference is copied back, if it was written."""
        inside = [self.copy(t) for t in operands]
        before = [self.cells[t] for t in inside]
        values = self.run(body, inside)
        results = [self.copy(values[i]) for i in body.outputs]
        for t, u, was, by_ref in zip(operands, inside, before, body.by_ref, strict=True):
            if by_ref and not np.array_equal(self.cells[u], was):
                self.cells[t] = self.cells[u]
        return results

    def repeat(self, body: Program, operands: Sequence[np.ndarray], turns: int) -> list[np.ndarray]:
        """The first input is carried; a second by reference keeps its changes."""
        carried, other = map(self.copy, operands)
        was = self.cells[other]
        for _ in range(turns):
            (carried,) = self.call(body, [carried, other])
        if not np.array_equal(self.cells[other], was):
            self.cells[operands[1]] = self.cells[other]
        return [carried]


# Through popxl, and through JAX -------------------------------------------------------------------------------------


def build(program: Program, inputs: Sequence[Any]) -> list[Any]:
    """All values of a program, as tensors of the current graph."""
    values = list(inputs)
    for step in program.steps:
        operands = [values[i] for i in step.operands]
        if "body" in step.attributes:
            graph = graph_of(step.attributes["body"])
            run = ops.call if step.name == "call" else ops.repeat
            more = [step.attributes["turns"]] if step.name == "repeat" else []
            values += run(graph, *more, *operands)
        else:
            result = TABLE[step.name][0](*operands, **step.attributes)
            values += result if isinstance(result, tuple) else [result]
    return values


def graph_of(program: Program) -> popxl.Graph:
    """A graph that runs a program: the same one, however often this is asked within an Ir."""
    ir = popxl.gcg().ir
    known = next((graph for graph in ir.graphs if graph.id.startswith(f"program{id(program)}_")), None)
    if known is not None:
        return known
    graph = ir.create_empty_graph(f"program{id(program)}")
    with graph:
        kinds = zip(program.inputs, program.by_ref, strict=True)
        values = build(program, [popxl.graph_input(shape, popxl.float32, by_ref=by_ref) for shape, by_ref in kinds])
        for i in program.outputs:
            popxl.graph_output(values[i])
    return graph


def compute(program: Program, inputs: Sequence[Any]) -> list[Any]:
    """The outputs of a program without writes, in JAX."""
    values = list(inputs)
    for step in program.steps:
        operands = [values[i] for i in step.operands]
        if step.name == "call":
            values += compute(step.attributes["body"], operands)
        elif step.name == "repeat":
            for _ in range(step.attributes["turns"]):
                operands[:1] = compute(step.attributes["body"], operands)
            values.append(operands[0])
        else:
            result = TABLE[step.name][1](jnp, *operands, **step.attributes)
            values += result if isinstance(result, tuple) else [result]
    return [values[i] for i in program.outputs]


# The tests ----------------------------------------------------------------------------------------------------------

SHAPES: list[Shape] = [(2, 3), (3,), (4, 3), ()]


def data(seed: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed + 1000)
    return [random.uniform(-1, 1, shape).astype(np.float32) for shape in SHAPES]


@pytest.mark.parametrize("seed", range(40))
def test_numbers(seed) -> None:
    """Every value of the program, as it is at the end."""
    program = Maker(seed, writes=True).program(SHAPES, [False] * len(SHAPES), steps=25)
    memory = Memory()
    values = memory.run(program, [memory.new(array) for array in data(seed)])
    results = evaluate(lambda *ts: build(program, ts), *data(seed))
    for i, (result, t) in enumerate(zip(results, values, strict=True)):
        np.testing.assert_allclose(result, memory.cells[t], rtol=1e-3, atol=1e-4, err_msg=f"v{i} of\n{program}")


@pytest.mark.parametrize("seed", range(30))
def test_gradients(seed) -> None:
    program = Maker(seed + 500, writes=False).program(SHAPES, [False] * len(SHAPES), steps=20)

    def loss(*inputs: Any) -> Any:
        return sum(jnp.sum(output * (i + 1)) for i, output in enumerate(compute(program, inputs)))

    value, expected = jax.jit(jax.value_and_grad(loss, argnums=tuple(range(len(SHAPES)))))(*data(seed))
    reached = [i for i, g in enumerate(expected) if np.any(np.asarray(g) != 0)]

    def gradients(*ts: Any) -> Iterator[Any]:
        graph = graph_of(program)
        info = autodiff(graph, grads_required=[graph.inputs[i] for i in reached])
        site = ops.call_with_info(graph, *ts)
        yield ops.add_n(*(ops.sum(t * (i + 1)) for i, t in enumerate(site.outputs[:3])))
        given = [popxl.constant(np.full(t.shape, i + 1), t.dtype) for i, t in enumerate(site.outputs[:3])]
        yield from ops.call(info.graph, *given, inputs_dict=info.inputs_dict(site))

    if not reached:
        pytest.skip("this program has no gradient")
    ours, *found = evaluate(gradients, *data(seed))
    np.testing.assert_allclose(ours, value, rtol=1e-4, atol=1e-5)
    for i, g in zip(reached, found, strict=True):
        np.testing.assert_allclose(g, expected[i], rtol=2e-3, atol=1e-4, err_msg=f"input {i} of\n{program}")


def test_a_seed_makes_one_program() -> None:
    one, other = (Maker(3, writes=True).program(SHAPES, [False] * 4, steps=25) for _ in range(2))
    assert str(one) == str(other)
