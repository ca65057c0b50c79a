"""PyTorch models by `poptorch`, a hundred steps a call; beside PyTorch itself, eager and compiled, and plain JAX.

Also what a call costs over a run of the session that it wraps, and how long a deep encoder takes to compile, with its
layers as calls of one graph and without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.benchmarks.harness import OURS, Measure, Row, Size, check_agreement, over, progress, seconds, time_of, times

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]
else:
    import poptorch
    from tests.poptorch import models

RATE = 0.05
Weights = Mapping[str, Any]
EPSILON = 1e-5


@dataclass(frozen=True)
class Task:
    """A model to be trained: in PyTorch, and its loss in plain JAX.

    Attributes:
        make: makes the model.
        loss: of its weights by name, inputs and labels.
        shape: of an input, without the batch.
        batch, classes: rows of a step, and how many labels there are.
        steps: of a call.
    """

    make: Callable[[], Any]
    loss: Callable[[Weights, Any, Any], Any]
    shape: tuple[int, ...]
    batch: int
    classes: int
    steps: int

    def model(self) -> Any:
        """The model, with the same weights whenever it is made."""
        torch.manual_seed(0)
        return self.make()

    def data(self) -> tuple[Any, Any]:
        """Inputs and labels of a call; always the same."""
        random = torch.Generator().manual_seed(1)
        rows = self.steps * self.batch
        return torch.randn((rows, *self.shape), generator=random), torch.randint(
            self.classes, (rows,), generator=random
        )


# Plain JAX ------------------------------------------------------------------------------------------------------------


def cross_entropy(scores: Any, labels: Any) -> Any:
    return -jnp.take_along_axis(jax.nn.log_softmax(scores), labels[:, None], axis=1).mean()


def linear(w: Weights, name: str, x: Any) -> Any:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def mlp_loss(w: Weights, x: Any, labels: Any) -> Any:
    for i in (0, 2, 4):
        x = jax.nn.relu(linear(w, f"layers.{i}", x))
    return cross_entropy(linear(w, "layers.6", x), labels)


def lenet_loss(w: Weights, x: Any, labels: Any) -> Any:
    for i in (0, 3):
        x = jax.lax.conv(x, w[f"layers.{i}.weight"], (1, 1), [(2, 2), (2, 2)]) + w[f"layers.{i}.bias"][:, None, None]
        x = jax.lax.reduce_window(jax.nn.relu(x), -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
    x = jax.nn.relu(linear(w, "layers.7", x.reshape(len(x), -1)))
    return cross_entropy(linear(w, "layers.9", x), labels)


def encoder_loss(w: Weights, x: Any, labels: Any, *, layers: int, heads: int) -> Any:
    def norm(name: str, x: Any) -> Any:
        centred = x - x.mean(-1, keepdims=True)
        scale = jax.lax.rsqrt((centred * centred).mean(-1, keepdims=True) + EPSILON)
        return centred * scale * w[f"{name}.weight"] + w[f"{name}.bias"]

    for i in range(layers):
        name = f"encoder.layers.{i}"
        qkv = x @ w[f"{name}.self_attn.in_proj_weight"].T + w[f"{name}.self_attn.in_proj_bias"]
        q, k, v = (t.reshape(*t.shape[:2], heads, -1).transpose(0, 2, 1, 3) for t in jnp.split(qkv, 3, axis=-1))
        shares = jax.nn.softmax(q @ k.transpose(0, 1, 3, 2) * q.shape[-1] ** -0.5, axis=-1)
        y = (shares @ v).transpose(0, 2, 1, 3).reshape(x.shape)
        x = norm(f"{name}.norm1", x + linear(w, f"{name}.self_attn.out_proj", y))
        y = jax.nn.gelu(linear(w, f"{name}.linear1", x), approximate=False)
        x = norm(f"{name}.norm2", x + linear(w, f"{name}.linear2", y))
    return cross_entropy(linear(w, "head", x.mean(1)), labels)


def jax_state(task: Task) -> Weights:
    """The weights."""
    return {name: jnp.array(t.numpy()) for name, t in task.model().state_dict().items()}


def jax_data(task: Task) -> tuple[np.ndarray, ...]:
    """Inputs and labels of the steps of a call."""
    return tuple(t.reshape(task.steps, task.batch, *t.shape[1:]).numpy() for t in task.data())


def jax_steps(task: Task) -> Callable[..., Any]:
    """All steps of a call."""

    def step(w: Weights, batch: tuple[Any, Any]) -> tuple[Weights, Any]:
        loss, gradients = jax.value_and_grad(task.loss)(w, *batch)
        return {name: w[name] - RATE * gradients[name] for name in w}, loss

    return lambda w, data: jax.lax.scan(step, w, data)


def in_jax(task: Task) -> Callable[[], np.ndarray]:
    """A call: the loss of the last step."""
    state, data = jax_state(task), jax_data(task)
    steps = jax.jit(jax_steps(task), donate_argnums=0)

    def call() -> np.ndarray:
        nonlocal state
        state, losses = steps(state, data)
        return np.asarray(losses[-1])

    return call


# PyTorch --------------------------------------------------------------------------------------------------------------


def in_torch(task: Task, compiled: bool = False) -> Callable[[], np.ndarray]:
    """A call: the loss of the last step."""
    device = "cuda" if jax.default_backend() == "gpu" else "cpu"
    model = task.model().to(device)
    optimiser = torch.optim.SGD(model.parameters(), RATE)
    batches = list(zip(*(t.to(device).split(task.batch) for t in task.data()), strict=True))
    forward = torch.compile(model) if compiled else model

    def call() -> np.ndarray:
        for batch in batches:
            optimiser.zero_grad()
            _, loss = forward(*batch)
            loss.backward()
            optimiser.step()
        return np.float32(loss.item())

    return call


# Ours -----------------------------------------------------------------------------------------------------------------


def wrapped(task: Task, outlining: bool = True) -> Any:
    """The model, to be trained so many steps a call."""
    model = task.model()
    options = poptorch.Options().deviceIterations(task.steps)
    options._Popart.set("enableOutlining", outlining)
    return poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), RATE))


def ours(task: Task) -> Callable[[], np.ndarray]:
    """A call: the loss of the last step."""
    model, data = wrapped(task), task.data()
    return lambda: model(*data)[1].numpy()


# Rows -----------------------------------------------------------------------------------------------------------------


Steps = Callable[[int], Callable[[], np.ndarray]]
"""A party, for so many steps a call, which gives the loss of the last one."""


@contextmanager
def in_turns(
    parties: Mapping[str, Steps], compiled: Steps, steps: int, size: Size, compared: int = 3
) -> Iterator[Mapping[str, Measure]]:
    """Each party trains its own weights.

    They agree after a few steps. After hundreds, a rounding may have decided which gradients a ReLU lets through. What
    PyTorch's compiler needs (a C++ compiler, for one) may not be there, and PyTorch 2.13 compiles the LeNet, with a
    batch of 4, such that convolutions have no gradients: then it is left out.

    Args:
        parties: PyTorch is one of them.
        compiled: what PyTorch's compiler makes.
        steps: of a call.
        size: whether it is for a table, or a test.
        compared: the step after which they have to agree.
    """
    expected = parties["torch"](compared)()
    check_agreement(expected, **{name: party(compared)() for name, party in parties.items()})
    if size is Size.FULL:
        try:
            check_agreement(expected, compiled=compiled(compared)())
        except (RuntimeError, AssertionError) as problem:
            progress(f"torch.compile is left out: {problem}\n")
        else:
            parties = {**parties, "torch.compile": compiled}
    calls = {name: party(steps) for name, party in parties.items()}
    for call in calls.values():
        call()  # compiles
    yield {name: time_of(call) for name, call in calls.items()}


def training(task: Task, size: Size) -> AbstractContextManager[Mapping[str, Measure]]:
    """A task, trained by all parties."""

    def steps_of(party: Callable[[Task], Callable[[], np.ndarray]]) -> Steps:
        return lambda steps: party(replace(task, steps=steps))

    parties = {name: steps_of(party) for name, party in {OURS: ours, "JAX": in_jax, "torch": in_torch}.items()}
    return in_turns(parties, steps_of(partial(in_torch, compiled=True)), task.steps, size)


def mlp(size: Size, widths: tuple[int, ...] = (784, 512, 512, 512, 10), batch: int = 8, steps: int = 100) -> Task:
    """Of these widths, or tiny ones."""
    if size is Size.TINY:
        widths, steps = (6, 5, 5, 5, 4), 3
    return Task(partial(models.mlp, widths), mlp_loss, widths[:1], batch, widths[-1], steps)


def lenet(size: Size, batch: int = 32, steps: int = 100) -> Task:
    """For images of 28 x 28, or tiny ones."""
    if size is Size.TINY:
        return Task(models.lenet, lenet_loss, (1, 12, 12), 2, 5, steps=3)
    return Task(partial(models.lenet, 28, (6, 16), 10), lenet_loss, (1, 28, 28), batch, 10, steps)


def encoder(
    size: Size, layers: int = 4, steps: int = 100, batch: int = 8, rows: int = 16, width: int = 64, heads: int = 4
) -> Task:
    """So many layers, or two tiny ones."""
    if size is Size.TINY:
        return Task(models.Encoder, partial(encoder_loss, layers=2, heads=2), (6, 8), 2, 4, steps=min(steps, 3))
    make = partial(models.Encoder, width, heads, layers, 4 * width, 10)
    return Task(make, partial(encoder_loss, layers=layers, heads=heads), (rows, width), batch, 10, steps)


@contextmanager
def calls(size: Size) -> Iterator[Mapping[str, Measure]]:
    """A small model, called; and the session that it runs in, with the arrays that it is fed."""
    model = poptorch.inferenceModel(torch.nn.Linear(4, 4))
    x = torch.ones(2, 4)
    result = model(x)
    session = model._compiled.session
    (stream,) = session.ir.get_all_h2d_streams()
    feeds = {stream: x.numpy()}
    (array,) = session.run(feeds).data.values()
    check_agreement(array, popxl=result.numpy())
    count = 1 if size is Size.TINY else 1000
    yield {OURS: time_of(lambda: model(x).numpy(), count), "session": time_of(lambda: session.run(feeds).data, count)}


@contextmanager
def compiling(size: Size) -> Iterator[Mapping[str, Measure]]:
    """From a module to a program that has run once, with layers as calls of one graph, and with the ops of all."""
    task = encoder(size, layers=12, steps=1)
    data = task.data()

    def compiled(outlining: bool) -> np.ndarray:
        return wrapped(task, outlining)(*data)[1].numpy()

    check_agreement(compiled(False), popxl=compiled(True))
    yield {OURS: time_of(lambda: compiled(True)), "inlined": time_of(lambda: compiled(False))}


def trained(name: str, task: Callable[[Size], Task], about: str, limits: tuple[float | None, float | None]) -> Row:
    """A row that trains a model; how many times faster than PyTorch and than plain JAX it is to be."""
    targets = (times(limits[0], "torch"), times(None, "torch.compile"), times(limits[1]))
    slow = limits == SEEN  # the same as others, with other sizes
    return Row(f"poptorch_{name}", lambda size: training(task(size), size), targets, rounds=9, about=about, slow=slow)


TARGETS, SEEN = (1.5, 0.95), (None, None)
WIDE = (512, 1024, 1024, 1024, 100)
ROWS = () if torch is None else (
    trained("mlp", mlp, "100 steps a call: 784-512-512-512-10, batch 8", TARGETS),
    trained("lenet", lenet, "100 steps a call: LeNet, images of 28 x 28, batch 32", TARGETS),
    trained("encoder", encoder, "100 steps a call: 4 encoder layers of width 64, 8 texts of 16", TARGETS),
    trained(
        "mlp_wide", lambda size: mlp(size, WIDE, 64, 10), f"10 steps a call: {'-'.join(map(str, WIDE))}, batch 64", SEEN
    ),
    trained("lenet_few", lambda size: lenet(size, 4), "100 steps a call: LeNet, images of 28 x 28, batch 4", SEEN),
    trained(
        "encoder_wide",
        lambda size: encoder(size, 2, 10, 4, 100, 256, 8),
        "10 steps a call: 2 encoder layers of width 256, 4 texts of 100",
        SEEN,
    ),
    Row("poptorch_call", calls, (over(40e-6, seconds, "session"),), about="a call of a wrapped linear layer"),
    Row(
        "poptorch_compile",
        compiling,
        (times(2, "inlined"),),
        rounds=3,
        about="from a module of 12 equal encoder layers to its first result",
    ),
)  # fmt: skip
