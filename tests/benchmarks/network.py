"""The network of the first tutorial: one training step a run, a hundred steps a run, and inference.

The same four-layer network three times over, as graphs, in plain JAX and in PyTorch, with the same first weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import popxl
from popxl import ops
from runtime.cpu.flags import compile_options
from tests.benchmarks.harness import OURS, Measure, Row, Size, check_agreement, time_of, times

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

RATE = 0.05
CAREFUL = "JAX, compiled as we do"


@dataclass(frozen=True)
class Network:
    """Sizes of the network, and of what it is given in one run: a batch, or `steps` batches."""

    widths: tuple[int, ...]
    batch: int
    steps: int = 1

    def parameters(self) -> list[np.ndarray]:
        """First weights and biases, in turn; always the same."""
        random = np.random.default_rng(0)
        shapes = [shape for n, m in pairwise(self.widths) for shape in ((n, m), (m,))]
        return [random.normal(0, shape[0] ** -0.5, shape).astype(np.float32) for shape in shapes]

    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """Images and labels for one run; always the same."""
        random = np.random.default_rng(1)
        leading = (self.steps, self.batch) if self.steps > 1 else (self.batch,)
        images = random.normal(size=(*leading, self.widths[0])).astype(np.float32)
        return images, random.integers(0, self.widths[-1], leading).astype(np.int32)


WIDTHS = (784, 512, 512, 512, 10)
"""Those of the tutorial."""


def network(size: Size, batch: int, steps: int = 1, widths: tuple[int, ...] = WIDTHS) -> Network:
    """The network of these widths, or a tiny one."""
    return Network((12, 7, 6, 5, 4), 3, min(steps, 4)) if size is Size.TINY else Network(widths, batch, steps)


# Ours ---------------------------------------------------------------------------------------------------------------


def scores(x: popxl.Tensor, *parameters: popxl.Tensor) -> popxl.Tensor:
    """Linear layers with gelu between them."""
    for i in range(0, len(parameters), 2):
        x = (ops.gelu(x) if i else x) @ parameters[i] + parameters[i + 1]
    return x


class Training:
    """A session that trains: one step a run, or several in a loop."""

    def __init__(self, net: Network) -> None:
        ir = popxl.Ir()
        ir.num_host_transfers = net.steps
        with ir.main_graph:
            self.images = popxl.h2d_stream((net.batch, net.widths[0]), popxl.float32, "images")
            self.labels = popxl.h2d_stream((net.batch,), popxl.int32, "labels")
            self.loss = popxl.d2h_stream((), popxl.float32, "loss")
            self.variables = [popxl.variable(p, name=f"p{i}") for i, p in enumerate(net.parameters())]
            forward = ir.create_graph(scores, self.images.spec, *self.variables)
            backward = popxl.transforms.autodiff(forward, grads_required=forward.inputs[1:])

            def step(*parameters: popxl.TensorByRef) -> None:
                call = ops.call_with_info(forward, ops.host_load(self.images), *parameters)
                loss, gradient = ops.nll_loss_with_softmax_grad(
                    ops.softmax(call.outputs[0], -1), ops.host_load(self.labels)
                )
                gradients = ops.call(backward.graph, gradient, inputs_dict=backward.inputs_dict(call))
                for p, g in zip(parameters, gradients, strict=True):
                    ops.scaled_add_(p, g, b=-RATE)
                ops.host_store(self.loss, loss)

            step.__annotations__["parameters"] = popxl.TensorByRef  # the object: annotations are text in this file
            if net.steps == 1:
                step(*self.variables)
            else:
                ops.repeat(ir.create_graph(step, *self.variables), net.steps, *self.variables)
        self.session = popxl.Session(ir, "ipu_hw")

    def run(self, images: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """The loss of one run, or its losses."""
        return self.session.run({self.images: images, self.labels: labels})[self.loss]

    def parameters(self) -> list[np.ndarray]:
        """The weights and biases now."""
        return list(self.session.get_tensors_data(self.variables).values())


@contextmanager
def inference_session(net: Network) -> Iterator[Callable[[np.ndarray], np.ndarray]]:
    """Images to scores."""
    ir = popxl.Ir()
    with ir.main_graph:
        images = popxl.h2d_stream((net.batch, net.widths[0]), popxl.float32, "images")
        x = ops.host_load(images)
        variables = [popxl.variable(p, name=f"p{i}") for i, p in enumerate(net.parameters())]
        (y,) = ops.call(ir.create_graph(scores, x, *variables), x, *variables)
        out = popxl.d2h_stream(y.shape, y.dtype, "scores")
        ops.host_store(out, y)
    with popxl.Session(ir, "ipu_hw") as session:
        yield lambda array: session.run({images: array})[out]


# Plain JAX ----------------------------------------------------------------------------------------------------------


def jax_scores(parameters: list[Any], x: Any) -> Any:
    for i in range(0, len(parameters), 2):
        x = (jax.nn.gelu(x) if i else x) @ parameters[i] + parameters[i + 1]
    return x


def jax_loss(parameters: list[Any], images: Any, labels: Any) -> Any:
    logs = jax.nn.log_softmax(jax_scores(parameters, images))
    return -jnp.take_along_axis(logs, labels[:, None], axis=1).mean()


def jax_step(parameters: list[Any], batch: tuple[Any, Any]) -> tuple[list[Any], Any]:
    loss, gradients = jax.value_and_grad(jax_loss)(parameters, *batch)
    return [p - RATE * g for p, g in zip(parameters, gradients, strict=True)], loss


def jax_steps(parameters: list[Any], batches: tuple[Any, Any]) -> tuple[list[Any], Any]:
    return jax.lax.scan(jax_step, parameters, batches)


def jits() -> Mapping[str, Callable[..., Any]]:
    """What compiles in plain JAX: as one would, and on CPUs, also without fusions that may compute wrong numbers."""
    found: dict[str, Callable[..., Any]] = {"JAX": jax.jit}
    if jax.default_backend() == "cpu" and (options := compile_options()) is not None:
        found[CAREFUL] = partial(jax.jit, compiler_options=options)
    return found


class JaxTraining:
    """Training in plain JAX, as one would write it: jitted, with the weights donated."""

    def __init__(self, net: Network, jit: Callable[..., Any]) -> None:
        self.step = jit(jax_step if net.steps == 1 else jax_steps, donate_argnums=0)
        self.state = [jnp.array(p) for p in net.parameters()]

    def run(self, images: np.ndarray, labels: np.ndarray) -> np.ndarray:
        self.state, loss = self.step(self.state, (images, labels))
        return np.asarray(loss)

    def parameters(self) -> list[np.ndarray]:
        return [np.array(p) for p in self.state]


# PyTorch, eager -----------------------------------------------------------------------------------------------------


class TorchTraining:
    """Training in PyTorch, as one would write it."""

    def __init__(self, net: Network) -> None:
        self.device = "cuda" if jax.default_backend() == "gpu" else "cpu"
        self.state = [torch.tensor(p, device=self.device, requires_grad=True) for p in net.parameters()]
        self.optimiser = torch.optim.SGD(self.state, RATE)
        self.several = net.steps > 1

    def run(self, images: np.ndarray, labels: np.ndarray) -> np.ndarray:
        if self.several:
            return np.array([self.step(*batch) for batch in zip(images, labels, strict=True)], np.float32)
        return np.float32(self.step(images, labels))

    def step(self, images: np.ndarray, labels: np.ndarray) -> float:
        x = torch.from_numpy(images).to(self.device)
        for i in range(0, len(self.state), 2):
            x = (torch.nn.functional.gelu(x, approximate="tanh") if i else x) @ self.state[i] + self.state[i + 1]
        loss = torch.nn.functional.cross_entropy(x, torch.from_numpy(labels).long().to(self.device))
        self.optimiser.zero_grad()
        loss.backward()
        self.optimiser.step()
        return loss.item()

    def parameters(self) -> list[np.ndarray]:
        return [p.detach().cpu().numpy() for p in self.state]


# Rows ---------------------------------------------------------------------------------------------------------------


@contextmanager
def training(net: Network, count: int) -> Iterator[Mapping[str, Measure]]:
    """Each party trains its own weights, and reads the loss of every step."""
    data = net.data()
    ours = Training(net)
    with ours.session:
        rivals = {name: JaxTraining(net, jit) for name, jit in jits().items()}
        parties = {OURS: ours, **rivals, **({"torch": TorchTraining(net)} if torch else {})}
        seen = {name: ([party.run(*data) for _ in range(3)], party.parameters()) for name, party in parties.items()}
        check_agreement(seen.pop("JAX"), **seen)
        yield {name: time_of(lambda party=party: party.run(*data).sum(), count) for name, party in parties.items()}


@contextmanager
def inference(net: Network, count: int) -> Iterator[Mapping[str, Measure]]:
    images, _ = net.data()
    parameters = [jnp.array(p) for p in net.parameters()]
    forwards = {name: jit(jax_scores) for name, jit in jits().items()}

    def in_jax(forward: Callable[..., Any], array: np.ndarray) -> np.ndarray:
        return np.asarray(forward(parameters, array))

    with inference_session(net) as run:
        parties = {OURS: run} | {name: partial(in_jax, forward) for name, forward in forwards.items()}
        check_agreement(parties["JAX"](images), popxl=run(images))
        yield {name: time_of(lambda party=party: party(images), count) for name, party in parties.items()}


def row(
    name: str,
    work: Callable[..., Any],
    about: str,
    count: int,
    batch: int,
    steps: int,
    widths: tuple[int, ...],
    *targets: Any,
) -> Row:
    """A row that does some work with a network, so many times in a row."""

    def parties(size: Size) -> Any:
        return work(network(size, batch, steps, widths), 1 if size is Size.TINY else count)

    text = f"{about}: {'-'.join(map(str, widths))}, batch {batch}"
    return Row(name, parties, targets, about=text, slow=widths != WIDTHS)  # slow: the same as others, with other sizes


STEP, STEPS, INFERENCE = "a training step, its loss read", "100 training steps in one run", "inference"
OTHER = (100, 300, 200, 7)
ROWS = (
    row("train_step", training, STEP, 200, 8, 1, WIDTHS, times(0.95), times(0.95, CAREFUL), times(1.0, "torch")),
    row("train_100", training, STEPS, 3, 8, 100, WIDTHS, times(0.95), times(1.3, "torch")),
    row("inference", inference, INFERENCE, 200, 80, 1, WIDTHS, times(0.95), times(0.95, CAREFUL)),
    row("train_step_wide", training, STEP, 20, 64, 1, (512, 2048, 2048, 100), times(None), times(None, CAREFUL)),
    row("train_step_small", training, STEP, 200, 5, 1, OTHER, times(None), times(None, CAREFUL)),
    row("train_100_small", training, STEPS, 3, 5, 100, OTHER, times(None), times(None, "torch")),
)
