"""What many layers cost on TPUs and GPUs, over their number: ours as loops, and as people write them in JAX.

    python -m tests.targets.layers [--models blocks gpt] [--targets "tpu v5e" "gpu h100"] [--layers 2 64] [--ways ...]

It prints the table, and draws the picture. All but the seconds is read off the compiled programs, so that it is the
same on any machine. Each program is compiled in a process of its own: its seconds are those of the CPU, and nothing was
compiled before. With `--add FILE`, what was found before is in that file, and in the table, too; `--untimed` compiles
nothing. Programs that XLA would take long for are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

import popxl
from popxl.base.version import VERSION
from runtime.costs.hlo import Module, parse_hlo
from runtime.costs.work import account_of, is_kernel, work_of
from runtime.machine import Machine
from runtime.program.compiled import Precompiled
from runtime.targets.devices import OFFLINE_DEVICE, Device
from tests.benchmarks import blocks, gpt
from tests.benchmarks.curves import save
from tests.benchmarks.harness import Size, progress
from tests.popxl_addons.gpt.model import batches
from tests.popxl_addons.gpt.variants import VARIANTS

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "performance" / "layers.svg"

TARGETS = ("tpu v5e", "gpu h100")

HEAD = f"""\
## Many layers

Written by `python -m tests.targets.layers`, with popxl {VERSION} and jax {jax.__version__}, likewise. Sizes are bytes.
*Kept* is the memory of all layers that the program keeps for the gradients. *Kernels compiled* are in the program, once
each; *of a turn* are those that one iteration of each loop runs. Seconds are CPU seconds of tracing, planning, lowering
and compiling; each program was compiled in a separate process.

*Blocks* have 128 rows of width 256 and four heads, *wide* ones 512 rows of width 1024 and eight heads: forward,
backward and update. *Layers* are the feed-forward part of wide blocks, without norms. The *GPT* has width 256 and 4
texts of 64 tokens; it is a training step with AdamW. *Rolled* recomputes the activations for its gradients, except for
the projections of attention, in the blocks; *stored* keeps them. Products are computed at precision "highest", and
*rounded* at "default", for which a TPU rounds factors to bfloat16.
"""

Found = dict[str, Any]


class Program(NamedTuple):
    """What is compiled, and what the program itself says that it keeps, if it does.

    Attributes:
        text: the compiled text.
        code: bytes of machine code; 0 where XLA does not say.
        temporaries: bytes that a run needs besides arguments and results.
        kept: bytes of what loops make for other loops.
    """

    text: str
    code: int
    temporaries: int
    kept: int = 0


def of_session(session: popxl.Session) -> Program:
    """A program of ours."""
    cost, program = session.cost(), session.program
    rolling = program.layout.rerolling
    loops = () if rolling is None else rolling.loops
    made = (each for loop in loops for each in loop.outputs if not each.is_last_only)
    kept = sum(len(each.rows) * each.storage.nelms * each.storage.dtype.itemsize for each in made)
    return Program(program.executable.as_text(), cost.code_bytes or 0, cost.temporary_bytes, kept)


def of_executable(compiled: Any) -> Program:
    """A program of JAX's."""
    found = compiled.memory_analysis()
    return Program(compiled.as_text(), found.generated_code_size_in_bytes, found.temp_size_in_bytes)


# Programs: each way is given layers and the target, and gives what compiles -------------------------------------------

Compiles = Callable[[], Callable[[], Program]]


def ours_of_blocks(model: blocks.Model, target: str, recompute: bool, calls: str) -> Compiles:
    def compile() -> Callable[[], Program]:
        session = blocks.Ours(model, recompute, calls).compile()
        return lambda: of_session(session)

    return compile


def jax_of_blocks(model: blocks.Model, target: str, loss: Callable[..., Any], stacked: bool) -> Compiles:
    plain = blocks.PlainJax(model, loss, stacked)
    return in_jax(plain.step(), (plain.weights, model.data()), target)


def ours_of_gpt(layers: int, target: str, calls: str) -> Compiles:
    def compile() -> Callable[[], Program]:
        with patch.object(popxl.Session, "machine", InOneWay(calls)):
            session = VARIANTS["recomputed"](gpt.config_of(Size.FULL, layers))
        return lambda: of_session(session)

    return compile


class InOneWay(Machine):
    """Compiles all programs with their called graphs in one way."""

    def __init__(self, calls: str) -> None:
        self._calls = calls

    def program(self, ir: popxl.Ir, device: Device, precompiled: Precompiled | None) -> Any:
        return super().program(ir, device, Precompiled(self._calls))


def jax_of_gpt(layers: int, target: str, loss: Callable[..., Any], stacked: bool) -> Compiles:
    config = gpt.config_of(Size.FULL, layers)
    state = jax.eval_shape(lambda: gpt.jax_state(config, stacked))
    step = jax.default_matmul_precision("highest")(gpt.jax_step(config, loss))  # as ours
    return in_jax(step, (state, *batches(config, 1)[0]), target)


def in_jax(step: Callable[..., Any], arguments: Sequence[Any], target: str) -> Compiles:
    """A step in JAX; the first argument is donated."""
    (device,) = popxl.Target(target).devices
    where = SingleDeviceSharding(device)
    given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), arguments)

    def compile() -> Callable[[], Program]:
        executable = compiled(step, given)
        return lambda: of_executable(executable)

    return compile


def compiled(step: Callable[..., Any], given: Sequence[Any]) -> Any:
    return jax.jit(step, donate_argnums=0).lower(*given).compile()


class Way(NamedTuple):
    """A way of writing a model: how it is drawn, for which numbers of layers it is compiled, and what compiles it."""

    style: tuple[str, str]
    layers: tuple[int, ...]
    make: Callable[[int, str], Compiles]


WAYS_OF_BLOCKS: Mapping[str, tuple[tuple[str, str], Callable[[blocks.Model, str], Compiles]]] = {
    "rolled": (("C0", "o-"), partial(ours_of_blocks, recompute=True, calls="rolled")),
    "rolled, stored": (("C0", "o:"), partial(ours_of_blocks, recompute=False, calls="rolled")),
    "inlined": (("C3", "v-"), partial(ours_of_blocks, recompute=True, calls="inlined")),
    "JAX, unrolled": (("C1", "s-"), partial(jax_of_blocks, loss=blocks.unrolled, stacked=False)),
    "JAX, scan": (("C2", "^-"), partial(jax_of_blocks, loss=blocks.scanned, stacked=True)),
    "JAX, scan, checkpoint": (("C2", "^:"), partial(jax_of_blocks, loss=blocks.scanned_again, stacked=True)),
}
"""How each is drawn, and what makes it."""


def of_blocks(layers: Mapping[str, tuple[int, ...]], **sizes: Any) -> Mapping[str, Way]:
    """Ways of writing blocks of some sizes, and for which numbers of them."""

    def way(style: tuple[str, str], counts: tuple[int, ...], make: Callable[[blocks.Model, str], Compiles]) -> Way:
        return Way(style, counts, lambda n, target: make(blocks.Model(n, **sizes), target))

    return {name: way(style, layers[name], make) for name, (style, make) in WAYS_OF_BLOCKS.items() if name in layers}


WIDE = dict.fromkeys(("rolled", "rolled, stored", "JAX, unrolled", "JAX, scan", "JAX, scan, checkpoint"), (16,))

MODELS: Mapping[str, Mapping[str, Way]] = {
    "blocks": of_blocks(
        {
            "rolled": (2, 8, 16, 64),
            "rolled, stored": (16, 64),
            "inlined": (2, 8),
            "JAX, unrolled": (2, 16),
            "JAX, scan": (2, 8, 16, 64),
            "JAX, scan, checkpoint": (2, 8, 16, 64),
        }
    ),
    "wide blocks": of_blocks(WIDE, rows=512, width=1024, heads=8),
    "wide blocks, rounded": of_blocks(WIDE, rows=512, width=1024, heads=8, precision="default"),
    "layers, rounded": of_blocks(
        {
            "rolled": (4, 16, 64),
            "rolled, stored": (4, 16, 64),
            "JAX, unrolled": (4, 16),
            "JAX, scan": (4, 16, 64),
            "JAX, scan, checkpoint": (4, 16, 64),
        },
        rows=512,
        width=1024,
        heads=0,
        block="feed-forward",
        precision="default",
    ),
    "gpt": {
        "rolled": Way(("C0", "o-"), (12, 48, 96), partial(ours_of_gpt, calls="rolled")),
        "JAX, unrolled": Way(("C1", "s-"), (12,), partial(jax_of_gpt, loss=gpt.jax_loss, stacked=False)),
        "JAX, scan": Way(("C2", "^-"), (12, 48, 96), partial(jax_of_gpt, loss=gpt.scanned, stacked=True)),
        "JAX, scan, checkpoint": Way(
            ("C2", "^:"), (12, 48, 96), partial(jax_of_gpt, loss=gpt.scanned_again, stacked=True)
        ),
    },
}


# Measuring -----------------------------------------------------------------------------------------------------------


def measured(model: str, layers: int, way: str, target: str, text: Path | None = None) -> Found:
    """What a program costs. It is compiled in this process."""
    compile = MODELS[model][way].make(layers, target)
    warm_up(target)
    with patch.dict(os.environ, {OFFLINE_DEVICE: target}), timed() as seconds:
        told = compile()
    program = told()
    if text is not None:
        text.write_text(program.text, encoding="utf-8")
    module = parse_hlo(program.text)
    total = account_of(module).total
    return {
        "code": program.code,
        "temporaries": program.temporaries,
        "kept": program.kept,
        "kernels": total.kernels,
        "kernels compiled": kernels_compiled(module),
        "kernels of a turn": kernels_of_turns(module, layers),
        "bytes accessed": total.bytes,
        "cycles": total.cycles,
        "seconds": sum(seconds),
    }


def warm_up(target: str) -> None:
    """Have the compiler loaded."""
    in_jax(lambda x: x @ x, [jnp.zeros((8, 8))], target)()


@contextmanager
def timed() -> Iterator[list[float]]:
    """Gives, in the end, seconds of the CPU: of what is compiled in JAX, and of the sessions that are made. Building
    the program of a session, and drawing its first weights, takes no part."""
    seconds: list[float] = []

    def measured(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **more: Any) -> Any:
            start = time.process_time()
            try:
                return function(*arguments, **more)
            finally:
                seconds.append(time.process_time() - start)

        return run

    with (
        patch.object(popxl.Session, "__init__", measured(popxl.Session.__init__)),
        patch(f"{__name__}.compiled", measured(compiled)),
    ):
        yield seconds


def kernels_compiled(module: Module) -> int:
    """The kernels of a program, those of loops once."""
    return sum(work_of(each).kernels for each, _ in module.entry.runs() if is_kernel(each))


def kernels_of_turns(module: Module, layers: int) -> list[int]:
    """For each loop over the layers how many kernels a turn of it runs. The first or last turn may be outside of it."""
    loops = [i for c in module.computations.values() for i in c.instructions.values() if i.opcode == "while"]
    bodies = [loop.called[0] for loop in loops if 0 <= layers - loop.trip_count <= 2]
    return [account_of(Module(module.computations, body)).total.kernels for body in bodies]


def in_its_own_process(model: str, layers: int, way: str, target: str, texts: Path | None) -> Found:
    """The same, compiled in another process."""
    command = [sys.executable, "-m", "tests.targets.layers", "--one", model, str(layers), way, target]
    command += ["--texts", str(texts)] if texts is not None else []
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{model}, {layers} layers, {way}, for {target}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


# Showing -------------------------------------------------------------------------------------------------------------

COLUMNS = (
    "code",
    "temporaries",
    "kept",
    "kernels",
    "kernels compiled",
    "kernels of a turn",
    "bytes accessed",
    "cycles",
    "seconds",
)


def lines(found: Mapping[tuple[str, int, str, str], Found]) -> Iterator[str]:
    """The table in Markdown."""
    yield f"| | layers | | {' | '.join(COLUMNS)} |"
    yield "|---" * (len(COLUMNS) + 3) + "|"
    for target in TARGETS:
        for model, ways in MODELS.items():
            counts = sorted({n for way in ways.values() for n in way.layers})
            for layers in counts:
                for way in ways:
                    costs = found.get((model, layers, way, target))
                    if costs is not None:
                        cells = (shown(column, costs[column]) for column in COLUMNS)
                        yield f"| {model}, {target} | {layers} | {way} | {' | '.join(cells)} |"


def shown(column: str, value: Any) -> str:
    """Text of a cell: a dash for an unknown value."""
    if column == "kernels of a turn":
        return " + ".join(map(str, value)) or "–"
    if column == "seconds":
        return f"{value:.1f}"
    return f"{value:,.0f}".replace(",", " ") if value or column not in ("code", "cycles", "kept") else "–"


PANELS: Mapping[str, tuple[str, float]] = {
    "seconds": ("compiling [s of CPU]", 1),
    "temporaries": ("temporaries [MB]", 1e-6),
    "kernels compiled": ("kernels compiled", 1),
}


def draw(found: Mapping[tuple[str, int, str, str], Found], picture: Path) -> None:
    """A row of panels for each model and target, over the layers."""
    from matplotlib.figure import Figure  # takes a second

    several = [model for model, ways in MODELS.items() if len({n for way in ways.values() for n in way.layers}) > 1]
    rows = [(model, target) for model in several for target in TARGETS]
    figure = Figure(figsize=(11, 3.2 * len(rows)), layout="constrained")
    styles: dict[str, Any] = {}
    for of_row, (model, target) in zip(figure.subplots(len(rows), len(PANELS)), rows, strict=True):
        for axis, (column, (title, scale)) in zip(of_row, PANELS.items(), strict=True):
            for way, (style, layers, _) in MODELS[model].items():
                costs = {n: found[model, n, way, target] for n in layers if (model, n, way, target) in found}
                points = [scale * each[column] for each in costs.values()]
                (styles[way],) = axis.plot([*costs], points, style[1], color=style[0], label=way)
            axis.set(title=f"{model}, {target}: {title}", xlabel="layers", xscale="log")
            axis.set_ylim(bottom=0)
            counts = sorted({n for way in MODELS[model].values() for n in way.layers})
            axis.set_xticks(counts, [str(n) for n in counts])
            axis.minorticks_off()
            axis.grid(alpha=0.3)
    figure.legend(styles.values(), styles.keys(), loc="outside lower center", ncols=len(styles), frameon=False)
    save(figure, picture)


def main() -> int:
    every = dict.fromkeys(way for ways in MODELS.values() for way in ways)
    parser = argparse.ArgumentParser("python -m tests.targets.layers", description=__doc__.split("\n")[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--targets", nargs="+", default=[*TARGETS])
    parser.add_argument("--layers", nargs="+", type=int, help="how many; by default all of the table")
    parser.add_argument("--ways", nargs="+", choices=every, default=[*every])
    parser.add_argument("--add", metavar="FILE", type=Path, help="keep what is found there, with what is there already")
    parser.add_argument("--untimed", action="store_true", help="compile nothing: show what is in the file of --add")
    parser.add_argument("--picture", metavar="FILE", type=Path, help=f"draw it there, such as {PICTURE.name}")
    parser.add_argument("--texts", metavar="FOLDER", type=Path, help="write there what XLA made of the programs")
    parser.add_argument("--one", nargs=4, metavar=("MODEL", "LAYERS", "WAY", "TARGET"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        model, layers, way, target = options.one
        text = options.texts and options.texts / f"{model}-{layers}-{way}-{target}.txt".replace(" ", "_")
        print(json.dumps(measured(model, int(layers), way, target, text)))
        return 0
    found: dict[tuple[str, int, str, str], Found] = {}
    if options.add is not None and options.add.is_file():
        found = {tuple(key): costs for key, costs in json.loads(options.add.read_text(encoding="utf-8"))}  # type: ignore[misc]
    for model in options.models:
        for target in options.targets:
            for way in (way for way in options.ways if way in MODELS[model]):
                for layers in MODELS[model][way].layers:
                    if not options.untimed and layers in (options.layers or [layers]):
                        progress(f"{model}, {layers} layers, {way}, for {target}")
                        found[model, layers, way, target] = in_its_own_process(
                            model, layers, way, target, options.texts
                        )
                        if options.add is not None:  # each time: it takes hours
                            options.add.write_text(json.dumps([*found.items()], indent=0), encoding="utf-8")
    print(HEAD)
    for line in lines(found):
        print(line)
    if options.picture is not None:
        draw(found, options.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
