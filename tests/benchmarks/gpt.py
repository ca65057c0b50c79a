"""The small GPT of `tests/popxl_addons/gpt`: a training step with AdamW, beside the same in plain JAX and in PyTorch.

Four layers in one graph; and many, as calls of one graph whose gradient computes it again, beside plain JAX, unrolled,
and unrolled with `jax.checkpoint`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import popxl
from popxl_addons.ops.rotary_pos_embed import trig_tables
from runtime.plan import structure
from tests.benchmarks.blocks import ABOUT, Compiled, compile_time, needed, run_time
from tests.benchmarks.harness import OURS, Measure, Row, Size, Target, check_agreement, megabytes, time_of, times
from tests.popxl_addons.gpt.model import Config, batches, first_weights
from tests.popxl_addons.gpt.training import BETA1
from tests.popxl_addons.gpt.variants import VARIANTS

try:
    from tests.popxl_addons.gpt.torch_model import TorchTraining
except ImportError:
    TorchTraining = None  # type: ignore[assignment, misc]

BETA2, EPSILON = 0.999, 1e-5


SHAPE = "4 texts of 64 tokens, width 256"


def config_of(size: Size, layers: int) -> Config:
    """So many layers, or a tiny one."""
    if size is Size.TINY:
        return Config(layers=1)
    return Config(vocabulary=512, width=256, layers=layers, sequence=64, batch=4)


# Ours ---------------------------------------------------------------------------------------------------------------


def ours(config: Config, variant: str) -> Compiled:
    session = VARIANTS[variant](config)
    session.start(first_weights(config))
    session.__enter__()  # and never left: all rows use it
    (batch,) = batches(config, 1)

    def compile() -> popxl.Session:
        structure.clear_cache()  # or what was compiled before would be found
        return popxl.Session(session.ir, "ipu_hw")

    program = session.program
    return Compiled(compile, program.text, program.temporaries, lambda: np.float32(session.step(*batch)))


# Plain JAX ----------------------------------------------------------------------------------------------------------


def jax_norm(x: Any, weight: Any, bias: Any) -> Any:
    centred = x - x.mean(-1, keepdims=True)
    return centred / jnp.sqrt((centred * centred).mean(-1, keepdims=True) + 1e-5) * weight + bias


def jax_rotary(t: Any) -> Any:
    """Of shape (batch, sequence, heads, channels)."""
    sin, cos = (table[:, None, :] for table in trig_tables(t.shape[1], t.shape[3]))
    first, second = t[..., ::2], t[..., 1::2]
    return jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1).reshape(t.shape)


def jax_attention(x: Any, w: Mapping[str, Any], config: Config) -> Any:
    def linear(name: str, x: Any) -> Any:
        return x @ w[f"attention.{name}.weight"] + w[f"attention.{name}.bias"]

    shape = (-1, config.sequence, config.heads, config.width // config.heads)
    q, k, v = (linear(name, x).reshape(shape) for name in ("query", "key", "value"))
    q, k, v = (t.transpose(0, 2, 1, 3) for t in (jax_rotary(q), jax_rotary(k), v))
    future = np.triu(np.full((config.sequence, config.sequence), -1e9, np.float32), 1)
    shares = jax.nn.softmax(q @ k.transpose(0, 1, 3, 2) * shape[3] ** -0.5 + future, axis=-1)
    return linear("out", (shares @ v).transpose(0, 2, 1, 3).reshape(x.shape))


def jax_block(x: Any, w: Mapping[str, Any], config: Config) -> Any:
    x = x + jax_attention(jax_norm(x, w["norm1.weight"], w["norm1.bias"]), w, config)
    h = jax_norm(x, w["norm2.weight"], w["norm2.bias"]) @ w["feed_forward.up.weight"] + w["feed_forward.up.bias"]
    return x + jax.nn.gelu(h) @ w["feed_forward.down.weight"] + w["feed_forward.down.bias"]


def jax_loss(weights: Mapping[str, Any], tokens: Any, labels: Any, config: Config, block: Any = jax_block) -> Any:
    x = weights["table"][tokens.reshape(-1)]
    for i in range(config.layers):
        x = block(x, of_layer(weights, f"layers.{i}."), config)
    return jax_head(x, weights, labels)


def of_layer(weights: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Those whose names begin so, without that."""
    return {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}


def jax_head(x: Any, weights: Mapping[str, Any], labels: Any) -> Any:
    logits = jax_norm(x, weights["head.norm.weight"], weights["head.norm.bias"]) @ weights["table"].T
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels.reshape(-1, 1), axis=1).mean()


def checkpointed(weights: Mapping[str, Any], tokens: Any, labels: Any, config: Config) -> Any:
    return jax_loss(weights, tokens, labels, config, jax.checkpoint(jax_block, static_argnums=2))


def scanned(weights: Mapping[str, Any], tokens: Any, labels: Any, config: Config, block: Any = jax_block) -> Any:
    """The loss, with weights that are stacked over the layers."""
    x = weights["table"][tokens.reshape(-1)]
    x, _ = jax.lax.scan(lambda x, w: (block(x, w, config), None), x, of_layer(weights, "layers."))
    return jax_head(x, weights, labels)


def scanned_again(weights: Mapping[str, Any], tokens: Any, labels: Any, config: Config) -> Any:
    """The same, with layers that are computed again in the backward pass."""
    return scanned(weights, tokens, labels, config, jax.checkpoint(jax_block, static_argnums=2))


def jax_step(config: Config, loss: Callable[..., Any] = jax_loss) -> Callable[..., Any]:
    """A step of AdamW, which counts the steps of each weight. It is a new function each time, or JAX would remember
    what it traced."""

    def step(state: Any, tokens: Any, labels: Any) -> Any:
        weights, first, second, counts, seed = state
        value, gradients = jax.value_and_grad(loss)(weights, tokens, labels, config)
        counts = jax.tree.map(lambda count: count + 1, counts)
        first = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * g, first, gradients)
        second = jax.tree.map(lambda v, g: BETA2 * v + (1 - BETA2) * g * g, second, gradients)

        def updated(w: Any, m: Any, v: Any, count: Any) -> Any:
            size = jnp.sqrt(v / (1 - BETA2**count)) + EPSILON
            return w - config.learning_rate * (m / (1 - BETA1**count) / size + config.weight_decay * w)

        return [jax.tree.map(updated, weights, first, second, counts), first, second, counts, seed + 1], value

    return step


def jax_state(config: Config, stacked: bool = False) -> list[Any]:
    """The weights, both moments of their gradients, how many steps there were, and the seed of the next one.

    Stacked weights are one array for all layers; such an array counts its steps once.
    """
    arrays = first_weights(config)
    if stacked:
        layers = [of_layer(arrays, f"layers.{i}.") for i in range(config.layers)]
        ends = {name: array for name, array in arrays.items() if not name.startswith("layers.")}
        arrays = ends | {f"layers.{name}": np.stack([layer[name] for layer in layers]) for name in layers[0]}
    weights = {name: jnp.asarray(array) for name, array in arrays.items()}
    moments = ({name: jnp.zeros_like(w) for name, w in weights.items()} for _ in range(2))
    return [weights, *moments, {name: jnp.float32(0) for name in weights}, jnp.asarray(popxl.create_seeds(config.seed))]


def plain_jax(config: Config, loss: Callable[..., Any] = jax_loss) -> Compiled:
    state = jax_state(config)
    (batch,) = batches(config, 1)

    def lower() -> Any:
        return jax.jit(jax_step(config, loss), donate_argnums=0).lower(state, *batch)

    lowered = lower()
    executable = lowered.compile()

    def run() -> np.ndarray:
        nonlocal state
        state, value = executable(state, *batch)
        return np.asarray(value)

    return Compiled(
        lambda: lower().compile(), lowered.as_text, lambda: executable.memory_analysis().temp_size_in_bytes, run
    )


# PyTorch, eager -----------------------------------------------------------------------------------------------------


def in_torch(config: Config) -> Callable[[], np.ndarray]:
    """A step."""
    device = "cuda" if jax.default_backend() == "gpu" else "cpu"
    training = TorchTraining(config, first_weights(config), device)
    (batch,) = batches(config, 1)
    return lambda: np.float32(training.step(*batch))


# Rows ---------------------------------------------------------------------------------------------------------------


@contextmanager
def one_graph(size: Size) -> Iterator[Mapping[str, Measure]]:
    """Each party trains its own weights, and reads the loss of every step."""
    config = config_of(size, layers=4)
    parties: dict[str, Callable[[], Any]] = {OURS: ours(config, "plain").run, "JAX": plain_jax(config).run}
    if TorchTraining is not None:
        parties["torch"] = in_torch(config)
    losses = {name: [run() for _ in range(3)] for name, run in parties.items()}
    check_agreement(losses.pop("JAX"), **losses)
    yield {name: time_of(run, 1 if size is Size.TINY else 5) for name, run in parties.items()}


PARTIES: Mapping[str, Callable[[Config], Compiled]] = {
    OURS: lambda config: ours(config, "recomputed"),
    "JAX": plain_jax,
    "checkpoint": lambda config: plain_jax(config, checkpointed),
}


@cache
def compiled(config: Config) -> Mapping[str, Compiled]:
    """All parties, compiled once for all rows, after checking that the losses of three steps agree."""
    parties = {name: make(config) for name, make in PARTIES.items()}
    losses = {name: [party.run() for _ in range(3)] for name, party in parties.items()}
    check_agreement(losses.pop("JAX"), **losses)
    return parties


def row(what: str, layers: int, of_party: Callable[[Compiled], Measure], limit: float, **more: Any) -> Row:
    """A row that measures something of each compiled party."""

    @contextmanager
    def parties(size: Size) -> Iterator[Mapping[str, Measure]]:
        yield {name: of_party(party) for name, party in compiled(config_of(size, layers)).items()}

    targets: tuple[Target, ...] = (times(limit), times(None, "checkpoint"))
    about = f"{ABOUT[what]}: a GPT of {layers} layers, {SHAPE}, AdamW, layers recomputed"
    return Row(f"gpt{layers}_{what}", parties, targets, slow=layers > 16, about=about, **more)


def rows_of(layers: int, *, compile: float, temporaries: float) -> tuple[Row, ...]:
    """How many times better than unrolled ours is to be."""
    return (
        row("compile", layers, compile_time, compile, rounds=3),
        row("run", layers, run_time, 0.95),
        row("temporaries", layers, needed, temporaries, rounds=1, show=megabytes),
    )


ROWS = (
    Row(
        "gpt_step",
        one_graph,
        (times(0.95), times(None, "torch")),
        about=f"a training step, its loss read: a GPT of 4 layers in one graph, {SHAPE}, AdamW",
    ),
    *rows_of(16, compile=3, temporaries=3),
    *rows_of(64, compile=10, temporaries=5),
)
