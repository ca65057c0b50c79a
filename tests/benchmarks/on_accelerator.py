"""Steps of training on the GPU or TPU of this machine: time and memory, beside plain JAX and PyTorch.

    python -m tests.benchmarks.on_accelerator [--groups llama plans torch attention] [--steps 20] [--into steps.md]

Programs are those whose costs compilers tell without the machine: `tests.targets.steps`, with `tests.targets.
llama_in_jax` beside them; `tests.targets.memory_budgets`, with the policies of JAX; models of PyTorch by `poptorch`,
with PyTorch itself. Each row has a process of its own. All compile at the same time, and are measured one after the
other when the last one has compiled. A step begins with numbers of the host, and ends with the loss there. The table
has the median of the steps after three others, the most memory that was in use, the memory as compiled, and the
estimate by published figures.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import popxl
import popxl_addons as addons
from popxl.base.version import VERSION
from popxl.ops.attention import attention_backward, attention_forward
from tests.targets import llama_in_jax, memory_budgets, steps
from tests.targets.steps import Sizes
from tests.targets.tables import Table

WARM = 3
HEAD = """\
| program | way | ms | most memory, MB | compiled, MB | estimate, ms | loss |
|---|---|---|---|---|---|---|"""

LLAMAS = {
    "Llama, 16 layers of width 1024": Sizes(16),
    "Llama of 1.2 billion parameters": Sizes(22, 2048, 16, 5632, 32000),
}


class Step(NamedTuple):
    """A compiled step.

    Attributes:
        start: moves the variables to the device, and gives what makes a step and returns its loss.
        memory: bytes that it needs there, as compiled.
        estimate: seconds, by the published figures of the chip, or `None`.
    """

    start: Callable[[], Callable[[], float]]
    memory: int = 0
    estimate: float | None = None


class Measured(NamedTuple):
    """What steps took: seconds of each, the most bytes in use, and the losses."""

    seconds: list[float]
    most: int
    losses: list[float]


Make = Callable[[], Step]


def numbers(shape: Sequence[int], dtype: Any, below: int) -> np.ndarray:
    """What a step is fed: numbers of tokens, or normal ones."""
    drawn = np.random.default_rng(0)
    if np.issubdtype(dtype, np.integer):
        return drawn.integers(0, below, shape).astype(dtype)
    return drawn.standard_normal(shape, np.float32).astype(dtype)


def of_session(session: popxl.Session, below: int) -> Step:
    """A step of a program of popxl: fed and read by streams."""
    feeds = {stream: numbers(stream.shape, stream.dtype.as_numpy(), below) for stream in session.expected_inputs()}

    def start() -> Callable[[], float]:
        session.__enter__()
        return lambda: float(np.asarray(next(iter(session.run(feeds).values()))).ravel()[-1])

    return Step(start, session.memory().device, session.cost().seconds)


def of_jax(step: Callable[..., Any], state: Any, fed: Any, below: int, fill: Callable[[Any], Any]) -> Step:
    """A step in plain JAX: `step(state, fed)`, of types; the state is filled as it starts."""
    executable = jax.jit(step, donate_argnums=0).lower(state, fed).compile()
    first, given = fill(state), numbers(fed.shape, fed.dtype, below)

    def start() -> Callable[[], float]:
        held = jax.device_put(first)

        def one() -> float:
            nonlocal held
            held, loss = executable(held, given)
            return float(loss)

        return one

    return Step(start, memory_budgets.memory_of(executable))


def filled(types: Any, scale: float = 0.02) -> Any:
    """Variables of a model in JAX: normal numbers, of vectors ones."""

    def array(of: Any) -> Any:
        drawn = np.random.default_rng(0).standard_normal(min(of.size, 1 << 20), np.float32) * scale
        return (np.resize(drawn, of.shape) if of.ndim > 1 else np.ones(of.shape)).astype(of.dtype)

    return jax.tree.map(array, types)


# Programs -------------------------------------------------------------------------------------------------------------


def llama(sizes: Sizes, calls: Any, memory: Any = None) -> Step:
    """The kit's."""
    ir = steps.program(sizes, memory=memory)
    ir.options.calledGraphs = calls
    return of_session(popxl.Session(ir, "ipu_hw"), sizes.vocabulary)


def llama_of_jax(sizes: Sizes, way: str) -> Step:
    """The same in plain JAX."""
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("data",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    fed = jax.ShapeDtypeStruct((sizes.texts, sizes.length + 1), jnp.int32)
    step, state = llama_in_jax.step(sizes.config, way, rows), llama_in_jax.state(sizes.config, way)

    def fill(state: Any) -> Any:
        return filled(state[0]), jax.tree.map(lambda t: np.zeros(t.shape, t.dtype), state[1])

    return of_jax(step, state, fed, sizes.vocabulary, fill)


def plan(name: str, memory: Any, share: int = 100) -> Step:
    """Layers within a share of the memory that they need with everything kept, or with a policy."""
    np.random.seed(0)
    if share < 100:
        whole = popxl.Session(memory_budgets.built(name, "here", "auto", "everything", False), "ipu_hw")
        memory = f"{whole.memory().device * share // 100} B"
    return of_session(popxl.Session(memory_budgets.built(name, "here", "auto", memory, False), "ipu_hw"), 2)


def offloaded(name: str, calls: str, *paths: str) -> Step:
    """The same with some activations in the host's memory between forward and backward calls."""
    with memory_budgets.requesting_memory("everything") as asked:
        memory_budgets.built(name, "here", calls, "everything", False)
    plan = asked.applied[0].plan.with_treatments("offload", *paths)
    np.random.seed(0)
    return of_session(popxl.Session(memory_budgets.built(name, "here", calls, plan, False), "ipu_hw"), 2)


def policy_of_jax(name: str, policy: str, in_loop: bool) -> Step:
    """The same layers in JAX."""
    made = memory_budgets.step_in_jax(name, "here", in_loop)
    assert made is not None, name
    step, (variables, x) = made
    return of_jax(partial(step, policy), variables, x, 2, filled)


def of_poptorch(name: str, dtype: str) -> Step:
    """A model of PyTorch, trained by poptorch."""
    import poptorch

    model, given, make = _of_torch(name, dtype)
    run = poptorch.trainingModel(model, poptorch.Options(), make(model.parameters()))
    run.compile(*given)
    session = poptorch.sessionOf(run)

    def start() -> Callable[[], float]:
        return lambda: run(*given).float().item()

    return Step(start, session.memory().device, session.cost().seconds)


def of_torch(name: str, dtype: str, compiled: bool) -> Step:
    """The same by PyTorch."""
    import torch

    model, given, make = _of_torch(name, dtype)

    def start() -> Callable[[], float]:
        model.cuda()
        optimizer = make(model.parameters())
        run = torch.compile(model) if compiled else model

        def one() -> float:
            optimizer.zero_grad()
            loss = run(*(t.cuda() for t in given))
            loss.backward()
            optimizer.step()
            return loss.item()

        return one

    return Step(start)


def _of_torch(name: str, dtype: str) -> tuple[Any, tuple[Any, ...], Callable[[Any], Any]]:
    """A model that gives its loss, what it is given, and what makes its optimiser."""
    import torch
    from torch import nn

    import poptorch
    from tests.targets import budgeted_programs, torch_models

    torch.manual_seed(0)
    kind = getattr(torch, dtype)
    if name == "encoder":
        model, shape = budgeted_programs.encoder()
        given: tuple[Any, ...] = (torch.randn(shape).to(kind),)
    else:
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(num_labels=4, max_position_embeddings=512, attn_implementation="sdpa")
        whole = torch_models.Classifier(BertForSequenceClassification(config), "input_ids")

        class Loss(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.whole = whole

            def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
                return poptorch.identity_loss(self.whole(x, labels), "none")

        model, given = Loss(), (torch.randint(0, 30522, (32, 128)), torch.arange(32) % 4)
    return model.to(kind), given, partial(torch.optim.SGD, lr=1e-3, momentum=0.9)


def attended(q: popxl.Tensor) -> popxl.Tensor:
    """Causal attention, and a loss."""
    y = popxl.ops.attention(q, q, q, causal=True)
    return popxl.ops.mean(popxl.ops.cast(y, popxl.float32) ** 2)


def attention(of: str, length: int) -> Step:
    """Attention and its gradients alone, of 16 heads of 64 channels in bfloat16, causal."""
    shape = (8, 16, length, 64)
    if of == "popxl, in blocks":
        for kernel in (attention_forward, attention_backward):
            kernel.override("gpu")(kernel.plain)
    if of.startswith("popxl"):
        ir = popxl.Ir()
        with ir.main_graph:
            x = popxl.ops.host_load(popxl.h2d_stream((1,), popxl.float32, "x"))
            q = popxl.variable(numbers(shape, np.float32, 2), popxl.bfloat16, "q")
            graph = ir.create_graph(attended, q)
            info = popxl.ops.call_with_info(graph, q)
            backward = popxl.transforms.autodiff(graph)
            (g,) = popxl.ops.call(
                backward.graph,
                popxl.constant(1.0),
                inputs_dict=backward.inputs_dict(info),
            )
            popxl.ops.var_updates.accumulate_(q, g)
            addons.host_store(info.outputs[0] + x[0])
        return of_session(popxl.Session(ir, "ipu_hw"), 2)

    def loss(q: Any) -> Any:
        t = q.transpose(0, 2, 1, 3)
        y = jax.nn.dot_product_attention(t, t, t, is_causal=True, implementation=of)
        return jnp.mean(y.astype(jnp.float32) ** 2)

    def step(q: Any, x: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(q)
        return q + gradient, value + x[0]

    spec = jax.ShapeDtypeStruct
    return of_jax(step, spec(shape, jnp.bfloat16), spec((1,), jnp.float32), 2, partial(filled, scale=1.0))


def rows() -> dict[str, list[tuple[str, str, Make]]]:
    """Rows by group: program, way, and what makes its step."""
    small, large = LLAMAS.items()
    found: dict[str, list[tuple[str, str, Make]]] = {"llama": [], "plans": [], "torch": [], "attention": []}
    for name, sizes in (small, large):
        for way in ("auto", "rolled", "inlined") if name == small[0] else ("auto",):
            found["llama"].append((name, way, partial(llama, sizes, way)))
        found["llama"].append((name, "auto, nothing kept", partial(llama, sizes, "auto", "nothing")))
        for way in steps.IN_JAX:
            found["llama"].append((name, f"JAX, {way}", partial(llama_of_jax, sizes, way)))
    for name in ("gpt", "convolutions"):
        for policy in ("everything", "nothing"):
            found["plans"].append((name, policy, partial(plan, name, policy)))
        for share in (75, 50, 35):
            found["plans"].append((name, f"within {share} %", partial(plan, name, None, share)))
        for policy in memory_budgets.POLICIES:
            found["plans"].append((name, f"JAX, {policy}", partial(policy_of_jax, name, policy, False)))
        found["plans"].append(
            (name, "JAX, nothing_saveable, scan", partial(policy_of_jax, name, "nothing_saveable", True))
        )
    for calls in ("inlined", "rolled"):
        found["plans"].append(("gpt", f"offloaded, {calls}", partial(offloaded, "gpt", calls, "*")))
    for name in ("encoder", "BERT"):
        for dtype in ("bfloat16", "float32"):
            found["torch"].append((name, f"poptorch, {dtype}", partial(of_poptorch, name, dtype)))
            for compiled in (False, True):
                way = "PyTorch, compiled" if compiled else "PyTorch"
                found["torch"].append((name, f"{way}, {dtype}", partial(of_torch, name, dtype, compiled)))
    for length in (512, 2048):
        for of in ("popxl", "popxl, in blocks", "xla", "cudnn"):
            found["attention"].append((f"attention of {length}", of, partial(attention, of, length)))
    return found


# Measuring ------------------------------------------------------------------------------------------------------------


def most_memory() -> int:
    """The most bytes that were in use on the device, of JAX and of PyTorch."""
    of_jax = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    torch = sys.modules.get("torch")
    return max(of_jax, torch.cuda.max_memory_allocated() if torch and torch.cuda.is_available() else 0)


class Turns(NamedTuple):
    """When a row may be measured: alone, after all have compiled.

    Attributes:
        folder: has a file for each row that has.
        count: how many rows there are.
        end: time after which no others are waited for.
    """

    folder: str
    count: int
    end: float

    def compiled(self, row: str) -> None:
        """Say that a row has compiled, or will not."""
        Path(self.folder, row).touch()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for the others, and have the machine alone."""
        while len(os.listdir(self.folder)) < self.count and time.time() < self.end:
            time.sleep(0.1)
        with open(f"{self.folder}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def work(group: str, number: int, steps: int, turns: Turns) -> tuple[list[str], str]:
    """A row's other cells, in a process of its own, and what else is to be said."""
    begun = time.perf_counter()
    try:
        made = rows()[group][number][2]()
        compiled = time.perf_counter() - begun
        turns.compiled(f"{group}-{number}")
        with turns.turn():
            found = timed(made.start(), steps)
    except Exception as problem:  # a row that cannot be made says so, and the others go on
        turns.compiled(f"{group}-{number}")
        return [f"{type(problem).__name__}", *"––––"], "".join(traceback.format_exception(problem)[-6:])
    estimate = "–" if made.estimate is None else f"{made.estimate * 1e3:.1f}"
    memory = f"{made.memory / 1e6:.0f}" if made.memory else "–"
    losses = f"{found.losses[0]:.5g}, {found.losses[-1]:.5g}"
    lowest, median = np.min(found.seconds), np.median(found.seconds)
    cells = [f"{median * 1e3:.2f}", f"{found.most / 1e6:.0f}", memory, estimate, losses]
    return cells, f"compiled in {compiled:.0f} s; a step took at least {lowest * 1e3:.2f} ms"


def timed(step: Callable[[], float], steps: int) -> Measured:
    """Make steps, and measure them."""
    losses = [step() for _ in range(WARM)]
    seconds = []
    for _ in range(steps):
        begun = time.perf_counter()
        losses.append(step())
        seconds.append(time.perf_counter() - begun)
    return Measured(seconds, most_memory(), losses)


def all_of(asked: Sequence[tuple[str, int]], steps: int, limit: float) -> dict[tuple[str, int], list[str]]:
    """The cells of rows, each from a process of its own. After so many seconds, no row is waited for."""
    found: dict[tuple[str, int], list[str]] = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(len(asked), get_context("spawn"), max_tasks_per_child=1) as pool,
    ):
        turns = Turns(folder, len(asked), time.time() + limit)
        futures: dict[Future[Any], tuple[str, int]] = {pool.submit(work, *row, steps, turns): row for row in asked}
        for future in as_completed(futures):
            row = futures[future]
            found[row], said = future.result()
            print(*rows()[row[0]][row[1]][:2], found[row], said, file=sys.stderr, flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all that is asked for, and print the table."""
    parser = argparse.ArgumentParser(description="Steps of training on the accelerator of this machine.")
    known = rows()
    parser.add_argument("--groups", nargs="+", choices=known, default=list(known))
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="rows whose names have one of these")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--limit", type=float, default=3600, help="seconds after which no row is waited for")
    parser.add_argument("--into", type=Path, metavar="FILE", help="keeps the rows")
    given = parser.parse_args(arguments)
    named = [(g, i, f"{row[0]}, {row[1]}") for g in given.groups for i, row in enumerate(known[g])]
    asked = [(g, i) for g, i, name in named if any(text in name for text in given.only)]
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    print(f"popxl {VERSION}, jax {jax.__version__}", flush=True)
    found = all_of(asked, given.steps, given.limit)
    table = Table(HEAD, given.into)
    for group, number in asked:
        program, way, _ = known[group][number]
        table.add((program, way), lambda cells=found[group, number]: cells)


if __name__ == "__main__":
    main()
