"""Plans within memory budgets for TPUs and GPUs, beside the best policy of JAX for the same layers.

    python -m tests.targets.memory_budgets [--programs gpt llama] [--targets "gpu h100"] [--shares 75 50 35]
                                           [--into docs/memory.md]

It prints a table: each program is planned within shares of the memory that it needs with everything kept, and
compiled. Nothing runs. A file given with `--into` keeps the rows: a table may be made in several runs. In JAX the
layers are the same, by `popxl.to_jax`, under `jax.checkpoint`; the best policy is the one that takes least time, by
published figures, of those within the budget. Programs of several devices, loops over micro-batches, experts and
models of PyTorch have none in JAX beside them. Large models, "llama of 6.7 billion" and "llama of 70 billion", are
planned where named. Programs have twelve layers with the widths of users' models: a GPT of 0.1 billion parameters, a
Llama of 0.6 billion, base models of vision and language. Called graphs are as "auto" compiles them; in JAX layers are
in a Python loop and in `lax.scan`, of which the faster counts. The target "cpu" is this host, in float32.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import cache, partial, reduce
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import popxl
import popxl_addons as addons
from popxl import ops
from popxl.errors import PopxlError
from popxl.extend.memory import Compiled, MemoryRequest, compiled_program, plan_within, requesting_memory
from popxl_addons import optimizers
from popxl_addons.layers import MLP, Attention, Conv2D, Experts, GroupNorm, LayerNorm, TransformerBlock
from runtime.costs.hlo import parse_hlo
from runtime.costs.work import account_of
from runtime.memory_plans.search import COMPILATIONS
from tests.targets.budgeted_programs import OF_PYTORCH, pipeline, torch_session
from tests.targets.programs import compile_faster
from tests.targets.steps import Sizes, session_of
from tests.targets.tables import Table

TARGETS = ("gpu h100", "tpu v5e", "tpu v5p")
SHARES = (75, 50, 35)
LAYERS = 12
PAIRS = {"tpu v5e": "1x2", "tpu v5p": "2x1x1"}
"""Two chips of TPUs whose chips lie in a grid of two and of three dimensions."""
POLICIES = ("everything_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable", "nothing_saveable")
HEAD = """\
| | program | % | budget, MB | compiled, MB | used, % | compilations | GB | Gflop | Mcycles | best policy of JAX | GB | Gflop | Mcycles |
|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"""  # noqa: E501


class MixtureBlock(addons.Module):
    """Attention, and experts in place of a multilayer perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = addons.Module.from_list([LayerNorm(), LayerNorm()])
        self.attention, self.experts = Attention(12), Experts(8, 3072, chosen=2)

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        x = x + self.attention(self.norms[0](x))
        y, _ = self.experts(self.norms[1](x))
        return x + y


class Residual(addons.Module):
    """Two convolutions, each after a normalisation."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolutions = addons.Module.from_list([Conv2D(channels, 3, paddings=(1, 1, 1, 1)) for _ in range(2)])
        self.norms = addons.Module.from_list([GroupNorm(8), GroupNorm(8)])

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        h = x
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            h = convolution(ops.gelu(norm(h)))
        return x + h


class Program(NamedTuple):
    """Layers that are called one after the other.

    Attributes:
        layer: makes the module of a layer.
        shape: of what it takes and gives.
        devices: how many the program runs on.
        accumulate: how many micro-batches a step has.
    """

    layer: Callable[[], addons.Module]
    shape: tuple[int, ...]
    devices: int = 1
    accumulate: int = 1


def transformer(norm: Any, activation: Any, heads: int = 12, hidden: int = 3072, **attention: Any) -> addons.Module:
    """A transformer block, of width 768 by default."""
    return TransformerBlock(Attention(heads, **attention), MLP(hidden, activation=activation), norm=norm)


PROGRAMS = {
    "gpt": Program(partial(transformer, "layer", "gelu"), (8, 1024, 768)),
    "llama": Program(partial(transformer, "rms", "swiglu", 16, 5504, rotary=10000.0), (4, 2048, 2048)),
    "experts": Program(MixtureBlock, (8, 1024, 768)),
    "vision transformer": Program(partial(transformer, "layer", "gelu", causal=False), (64, 196, 768)),
    "convolutions": Program(partial(Residual, 256), (64, 256, 32, 32)),
    "ring attention": Program(partial(transformer, "layer", "gelu", group="parts"), (4, 2048, 768), 2),
    "accumulation": Program(partial(transformer, "layer", "gelu"), (4, 1024, 768), accumulate=4),
}


OF_LLAMAS = {
    "llama of 6.7 billion": (Sizes(32, 4096, 32, 11008, 32000), 8),
    "llama of 70 billion": (Sizes(80, 8192, 64, 24576, 32000), 64),
}
"""Language models of the kit, which as many GPUs share out, and their Adam with them; their layers are in loops."""


class Stack(addons.Module):
    """The layers of a program, and a loss."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.layer = program.layer()

    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        facts, graph = self.layer.create_graph(x)
        for i in range(LAYERS):
            (x,) = graph.bind(self.add_variable_inputs(f"layer{i}", facts)).call(x)
        wide = x.astype(popxl.float32)
        return ops.mean(wide * wide)


def dtype_on(target: str) -> popxl.dtype:
    """What layers compute in: CPUs have no bfloat16 of their own."""
    return popxl.float32 if target == "cpu" else popxl.bfloat16


def calls_on(target: str, asked: str) -> Any:
    """How called graphs are compiled: by default, as the program's options say by default, except on CPUs."""
    return asked or ("kept" if target == "cpu" else "auto")


def built(name: str, target: str, calls: Any, memory: Any, is_open: bool) -> popxl.Ir:
    """A step of training by plain gradients, which may leave its number of micro-batches open."""
    if name == "pipeline":
        return pipeline(dtype_on(target), memory)
    program = PROGRAMS[name]
    ir = popxl.Ir(axes={"parts": program.devices})
    ir.options.calledGraphs = calls
    with ir.main_graph:
        x = popxl.h2d_stream(program.shape, dtype_on(target), "x")
        how = {"optimizer": partial(optimizers.sgd, lr=0.1), "accumulate": program.accumulate, "memory": memory}
        how |= {"micro_batches": "auto"} if is_open else {}
        addons.host_store(addons.train_step(Stack(program), x, **how).loss)
    return ir


def machine(name: str, target: str) -> str | popxl.Target:
    """A target with as many devices as a program has."""
    if target == "cpu":
        return "ipu_model" if name == "pipeline" else target
    count = 2 if name == "pipeline" else PROGRAMS[name].devices
    return popxl.Target(target if count == 1 else f"{target}:{PAIRS.get(target, count)}")


@cache
def compiled(name: str, target: str, calls: Any, is_open: bool, request: MemoryRequest) -> Compiled:
    """The program with a plan, or a policy: the budgets of a program share them."""
    np.random.seed(0)
    memory = request.memory
    with requesting_memory(*request) as asked:
        if name in OF_LLAMAS:
            sizes, devices = OF_LLAMAS[name]
            session = session_of(sizes, "rolled", f"{target}:{devices}", memory=memory)
        elif name in OF_PYTORCH:
            session = torch_session(OF_PYTORCH[name], target, calls, memory)
        else:
            session = popxl.Session(built(name, target, calls, memory, is_open), machine(name, target))
    return compiled_program(session.ir, session.program, asked)


class InJax(NamedTuple):
    """A policy of JAX, with the form of the layers, and what the compiled step needs with it."""

    policy: str
    memory: int
    bytes: int
    flops: int
    cycles: int


def step_in_jax(name: str, target: str, in_loop: bool) -> tuple[Callable[..., Any], Any] | None:
    """The same step in JAX, with its layers in a loop or one after the other; `None` for programs that have none.

    Returns:
        A function of a policy's name, the variables and `x`, and the types of the last two.
    """
    program = PROGRAMS.get(name)
    if program is None or program.devices > 1 or program.accumulate > 1:
        return None
    ir = popxl.Ir()
    with ir.main_graph:
        _, graph = program.layer().create_graph(popxl.TensorSpec(program.shape, dtype_on(target)))
    layer = popxl.to_jax(graph.graph)
    shapes = [(t.shape, jnp.dtype(t.dtype.name)) for t in graph.graph.inputs[1:]]

    def step(policy: str, variables: Any, x: Any) -> Any:
        block = jax.checkpoint(layer, policy=getattr(jax.checkpoint_policies, policy))

        def after(h: Any, of_layer: Any) -> Any:
            return jax.tree.leaves(block(h, *of_layer))[0]

        def loss(variables: Any) -> Any:
            if in_loop:
                h, _ = jax.lax.scan(lambda h, of_layer: (after(h, of_layer), None), x, variables)
            else:
                h = reduce(after, variables, x)
            return jnp.mean(jnp.square(h.astype(jnp.float32)))

        value, gradients = jax.value_and_grad(loss)(variables)
        return jax.tree.map(lambda w, g: (w - 0.1 * g.astype(jnp.float32)).astype(w.dtype), variables, gradients), value

    spec = jax.ShapeDtypeStruct
    variables = [spec((LAYERS, *shape) if in_loop else shape, dtype) for shape, dtype in shapes]
    return step, (
        variables if in_loop else [variables] * LAYERS,
        spec(program.shape, jnp.dtype(dtype_on(target).name)),
    )


@cache
def in_jax(name: str, target: str, in_loop: bool) -> tuple[InJax, ...]:
    """What that step needs with each policy."""
    if (made := step_in_jax(name, target, in_loop)) is None:
        return ()
    step, given = made
    where = machine(name, target)
    device = jax.devices()[0] if isinstance(where, str) else where.devices[0]
    place = jax.sharding.SingleDeviceSharding(device)
    given = jax.tree.map(lambda t: jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=place), given)
    platform = {"gpu": "cuda"}.get(device.platform, device.platform)
    found = []
    for policy in POLICIES:
        jitted = jax.jit(partial(step, policy), donate_argnums=0)
        try:
            executable = jitted.trace(*given).lower(lowering_platforms=(platform,)).compile()
        except (jax.errors.JaxRuntimeError, NotImplementedError) as problem:
            # Without a search, XLA finds no tiles for some products. JAX has no gradient of the scatter of experts.
            print(f"{policy}: {str(problem).partition(': %')[0]}", file=sys.stderr, flush=True)
            continue
        work = account_of(parse_hlo(executable.as_text())).total
        form = f"{policy}, lax.scan" if in_loop else policy
        found.append(InJax(form, memory_of(executable), work.bytes, work.flops, work.cycles))
    return tuple(found)


def memory_of(executable: Any) -> int:
    """Bytes that a compiled function of JAX needs on its device."""
    needs = executable.memory_analysis()
    memory = needs.argument_size_in_bytes + needs.temp_size_in_bytes
    return memory + needs.output_size_in_bytes - needs.alias_size_in_bytes + needs.generated_code_size_in_bytes


def row(name: str, target: str, calls: Any, share: int, beside: bool, is_open: bool, compilations: int) -> list[str]:
    """A budget, as cells of the table."""
    with_memory = partial(compiled, name, target, calls, is_open)
    whole = with_memory(MemoryRequest("everything"))
    budget = whole.memory.device * share // 100
    try:
        plan = plan_within(with_memory, budget, partial(print, file=sys.stderr, flush=True), compilations)
        parts = f" in {plan.plan.micro_batches}" if is_open else ""
        used = f"{100 * plan.peak / budget:.0f}{'*' * plan.takes_least_time}"
        ours = [
            *(f"{plan.peak / 1e6:.1f}{parts}", used, str(plan.compilations)),
            *needed(plan.cost.bytes_accessed, plan.cost.flops, plan.cost.cycles),
        ]
    except PopxlError as problem:
        if not str(problem).startswith("memory: no plan"):
            raise
        least = str(problem).partition("needs ")[2].partition(":")[0]
        ours = [f"none found; the least is {least}", *["–"] * 5]
    chip = whole.chip
    forms = {"inlined": [False], "rolled": [True]}.get(calls, [False, True])
    known = [each for in_loop in forms for each in in_jax(name, target, in_loop)] if beside else []
    fitting = [each for each in known if each.memory <= budget]
    if not fitting:
        return [f"{budget / 1e6:.1f}", *ours, "none fits" if known else "–", *["–"] * 3]
    seconds = (1.0, 0.0) if chip is None else (1 / chip.memory_bandwidth, 1 / chip.rate("bfloat16"))
    best = min(fitting, key=lambda each: each.cycles or each.bytes * seconds[0] + each.flops * seconds[1])
    return [f"{budget / 1e6:.1f}", *ours, f"`{best.policy}`", *needed(best.bytes, best.flops, best.cycles)]


def needed(size: int, flops: int, cycles: int | None) -> tuple[str, str, str]:
    """Cells for what a step needs."""
    return f"{size / 1e9:.3f}", f"{flops / 1e9:.1f}", f"{cycles / 1e6:.1f}" if cycles else "–"


def main(arguments: Sequence[str] | None = None) -> None:
    """Plan and compile all that is asked for, and print the table. Rows come as soon as they are known."""
    parser = argparse.ArgumentParser(description="Plans within memory budgets, beside the policies of JAX.")
    known = [*PROGRAMS, "pipeline", *OF_PYTORCH]
    choices = [*known, *OF_LLAMAS]
    parser.add_argument("--programs", nargs="+", choices=choices, default=known, metavar="PROGRAM")
    parser.add_argument("--targets", nargs="+", default=TARGETS)
    parser.add_argument(
        "--shares", type=int, nargs="+", default=SHARES, help="of the memory with everything kept, in %%"
    )
    parser.add_argument(
        "--into",
        type=Path,
        metavar="FILE",
        help="a file or page that keeps the rows; those that it has are not made again",
    )
    parser.add_argument("--calls", default="", help="`calledGraphs` of the programs; by default what is the fastest")
    parser.add_argument(
        "--micro-batches", action="store_true", help='leave their number open; "40.0 in 2" are 40 MB with two'
    )
    parser.add_argument("--compilations", type=int, default=COMPILATIONS, help="the most for a budget")
    parser.add_argument("--without-jax", action="store_true", help="leave out the policies of JAX")
    given = parser.parse_args(arguments)
    compile_faster()
    table = Table(HEAD, given.into)
    for target in given.targets:
        for name in given.programs:
            for share in given.shares:
                calls = calls_on(target, given.calls)
                about = target if calls == calls_on(target, "") else f"{target}, {calls}"
                about += ", micro-batches chosen" if given.micro_batches else ""
                how = {"beside": not given.without_jax, "is_open": given.micro_batches}
                how |= {"compilations": given.compilations}
                table.add((about, name, str(share)), partial(row, name, target, calls, share, **how))


if __name__ == "__main__":
    main()
