"""What each way of compiling called graphs costs, over the number of layers: the blocks of `blocks`, or a GPT.

    python tests/benchmarks/ways.py [--model blocks|plain|gpt] [--layers 2 4 8 16 64] [--ways auto rolled ...]
        [--width 256] [--rows 128] [--page docs/performance.md]

Each row is one program: seconds to compile it, milliseconds of a step, and the bytes that it needs besides variables
and streams. The ways take turns, step by step, and a row has the median of its steps. `inlined` takes minutes for many
layers.

`--page` keeps what is measured beside the page, so that a model, or a number of layers, can be measured anew. Then it
writes a table into the page, and draws a picture, of each model. Measures of another machine, or of other versions, are
left out from then on.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

import popxl
from popxl.utils import table_to_string
from runtime.plan import structure
from tests.benchmarks import blocks
from tests.benchmarks.curves import PANELS, draw_panels
from tests.benchmarks.harness import megabytes, progress, seconds
from tests.benchmarks.machine import machine, now
from tests.benchmarks.page import folder_of, markdown, put, title_of
from tests.popxl_addons.gpt.model import Config, batches, first_weights
from tests.popxl_addons.gpt.variants import VARIANTS

WAYS = ("auto", "rolled", "kept", "dispatched", "inlined")
JAX = ("JAX", "scan")
STEPS = 15
HEADER = ["layers", "way", "compile", "a step", "temporaries", "text"]
BEGIN, END = "<!-- ways: written by tests/benchmarks/ways.py -->", "<!-- ways: end -->"
LINES = {
    "rolled": ("rolled", "C0", "o-"),
    "dispatched": ("dispatched", "C4", "D-"),
    "kept": ("kept", "C3", "v-"),
    "inlined": ("inlined", "C5", "x-"),
    "JAX": ("JAX, unrolled", "C1", "s-"),
    "scan": ("JAX, lax.scan", "C2", "^-"),
}
"""How the picture shows each way; `auto` is one of the others."""


@dataclass(frozen=True)
class Sizes:
    """How large a model is: in `rows`, a GPT has sequences of 64 tokens."""

    model: str
    layers: int
    width: int
    rows: int

    def __str__(self) -> str:
        """All but the number of layers."""
        called = {"blocks": "Blocks with four heads", "plain": "Plain blocks", "gpt": "A GPT"}[self.model]
        return f"{called}, {self.rows} rows of width {self.width}"


@dataclass(frozen=True)
class Measured:
    """What was measured of a program.

    Attributes:
        layers, way: which it is.
        told: the way, and which one `auto` took.
        compile: seconds.
        run: seconds of a step.
        temporaries: bytes.
        text: letters that XLA was given.
    """

    layers: int
    way: str
    told: str
    compile: float
    run: float
    temporaries: int
    text: int

    def cells(self) -> list[str]:
        """A row of the table."""
        took = [seconds(self.compile), seconds(self.run)]
        return [str(self.layers), self.told, *took, megabytes(self.temporaries), str(self.text)]


@dataclass(frozen=True)
class Compiled:
    """A program: how to run a step of it, and wait for it; bytes of its temporaries, letters of its text."""

    way: str
    step: Callable[[], object]
    temporaries: int
    text: int


def of_blocks(sizes: Sizes, way: str, open_until: ExitStack) -> Callable[[], Compiled]:
    """Ready to be compiled."""
    heads, block = (0, "plain") if sizes.model == "plain" else (4, "attention")
    model = blocks.Model(sizes.layers, sizes.rows, sizes.width, heads, block)
    x = model.data()
    if way not in JAX:
        ours = blocks.Ours(model, recompute=True, calls=way)
        return lambda: _ours(way, open_until.enter_context(ours.compile()), {ours.feed: x}, ours.loss)
    plain = blocks.PlainJax(model, {"JAX": blocks.unrolled, "scan": blocks.scanned}[way], way == "scan")

    def in_jax() -> Compiled:
        lowered = plain.lower()
        executable = lowered.compile()

        def step() -> np.ndarray:
            plain.weights, loss = executable(plain.weights, x)
            return np.asarray(loss)

        return Compiled(way, step, executable.memory_analysis().temp_size_in_bytes, len(lowered.as_text()))

    return in_jax


def of_gpt(sizes: Sizes, way: str, open_until: ExitStack) -> Callable[[], Compiled]:
    """Ready to be compiled."""
    batch = max(1, sizes.rows // 64)
    config = Config(vocabulary=512, width=sizes.width, layers=sizes.layers, sequence=64, batch=batch)
    session = VARIANTS["recomputed"](config)  # compiled here for the first time, in the way that is the default
    ir = session.ir
    ir.options.calledGraphs = way  # type: ignore[assignment]
    session.start(first_weights(config))
    (data,) = batches(config, 1)

    def compile() -> Compiled:
        again = open_until.enter_context(popxl.Session(ir, "ipu_hw"))
        feed = {stream: _fitting(stream, data) for stream in again.expected_inputs()}
        (loss,) = again.program.layout.outputs
        return _ours(way, again, feed, loss)

    return compile


def _ours(way: str, session: popxl.Session, feed: popxl.HostToDeviceData, loss: popxl.DeviceToHostStream) -> Compiled:
    """A session, and which way `auto` took."""
    program = session.program
    told = f"auto: {program.layout.mode}" if way == "auto" else way
    return Compiled(told, lambda: np.asarray(session.run(feed)[loss]), program.temporaries(), len(program.text()))


def _fitting(stream: popxl.HostToDeviceStream, batch: Sequence[np.ndarray]) -> np.ndarray:
    """Tokens or labels, whichever the stream is for."""
    tokens, labels = batch
    return (labels if "label" in stream.tensor_id else tokens).reshape(stream.shape).astype(stream.dtype.as_numpy())


def measured(sizes: Sizes, ways: Sequence[str]) -> list[Measured]:
    """What each way takes."""
    ready = of_gpt if sizes.model == "gpt" else of_blocks
    all_compiled, compiling = [], []
    with ExitStack() as open_until:
        for way in ways:
            progress(f"{sizes.layers} layers: {way}")
            compile = ready(sizes, way, open_until)
            structure.clear_cache()  # or what was compiled before would be found
            start = time.perf_counter()
            all_compiled.append(compile())
            compiling.append(time.perf_counter() - start)
        times: list[list[float]] = [[] for _ in ways]
        for _ in range(STEPS):
            for own, compiled in zip(times, all_compiled, strict=True):
                start = time.perf_counter()
                compiled.step()
                own.append(time.perf_counter() - start)
    return [
        Measured(sizes.layers, way, each.way, spent, float(np.median(own)), each.temporaries, each.text)
        for way, each, spent, own in zip(ways, all_compiled, compiling, times, strict=True)
    ]


# The page -------------------------------------------------------------------------------------------------------------


def keep(
    page: Path, about: Mapping[str, Any], circumstances: Mapping[str, Any], sizes: Sizes, rows: Sequence[Measured]
) -> None:
    """Keep what was measured of a model with so many layers, in place of what is known of these.

    Args:
        page: beside which it is kept.
        about: the machine, and the versions. What others have measured is forgotten.
        circumstances: the day, and the load of others.
        sizes: those of the model.
        rows: what was measured of each way.
    """
    file = folder_of(page) / "ways.json"
    kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    models = kept["models"] if kept.get("machine") == about else {}
    models.setdefault(str(sizes), {})[str(sizes.layers)] = {**circumstances, "ways": [asdict(row) for row in rows]}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"machine": about, "models": models}, indent=1) + "\n", encoding="utf-8")


def write(page: Path) -> None:
    """Write a table for each model that was measured, and its picture."""
    kept = json.loads((folder_of(page) / "ways.json").read_text(encoding="utf-8"))
    parts = [f"Each cell: seconds to compile, time of a step, and memory for temporaries. {title_of(kept['machine'])}."]
    for name, of_layers in kept["models"].items():
        picture = folder_of(page) / f"ways-{name.lower().replace(',', '').replace(' ', '-')}.svg"
        counts = sorted(map(int, of_layers))
        all_measured = [Measured(**row) for n in counts for row in of_layers[str(n)]["ways"]]
        draw(all_measured, picture)
        parts += [
            f"{name}. {described(of_layers.values())}",
            "![Compile time, time of a step and memory over the number of layers, for each way]"
            f"({folder_of(page).name}/{picture.name})",
            markdown(table(all_measured)),
        ]
    put(page, BEGIN, END, parts)


def described(all_circumstances: Collection[Mapping[str, Any]]) -> str:
    """When numbers were measured, and whether they are rough."""
    days = [each["day"] for each in all_circumstances]
    when = f"Measured on {min(days)}." if min(days) == max(days) else f"Measured from {min(days)} to {max(days)}."
    is_rough = any(each["load"] > 0.5 for each in all_circumstances)
    return f"{when} These figures are rough: the machine was busy with other work." if is_rough else when


def draw(all_measured: Sequence[Measured], picture: Path) -> None:
    """Panels for compiling, a step and temporaries, with a line for each way."""
    found: dict[str, dict[str, dict[int, float]]] = {what: {} for what in PANELS}
    for each in all_measured:
        for what, of_way in found.items():
            of_way.setdefault(each.way, {})[each.layers] = getattr(each, what)
    draw_panels(found, LINES, "layers", picture)


def table(all_measured: Sequence[Measured]) -> Iterator[list[str]]:
    """A row for each number of layers, and a column for each way."""
    found = {(each.layers, each.way): each for each in all_measured}
    ways = [way for way in (*WAYS, *JAX) if any(way == known for _, known in found)]
    yield ["layers", *(f"`{way}`" if way in WAYS else LINES[way][0] for way in ways)]
    for layers in dict.fromkeys(layers for layers, _ in found):
        yield [str(layers), *(cell(found.get((layers, way))) for way in ways)]


def cell(each: Measured | None) -> str:
    """What was measured of a program, in short."""
    if each is None:
        return "–"
    chosen = f"{each.told.partition(': ')[2]}: " if each.way == "auto" else ""
    return f"{chosen}{seconds(each.compile)}, {seconds(each.run)}, {megabytes(each.temporaries)}"


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["blocks", "plain", "gpt"], default="blocks")
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 4, 8, 16, 64])
    parser.add_argument("--ways", nargs="+", choices=[*WAYS, *JAX], default=[*WAYS, *JAX])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--page", metavar="FILE", type=Path, help="keep the measures, write tables and draw pictures")
    arguments = parser.parse_args()
    ways = [way for way in arguments.ways if arguments.model != "gpt" or way not in JAX]
    rows = []
    circumstances = now()
    for layers in arguments.layers:
        sizes = Sizes(arguments.model, layers, arguments.width, arguments.rows)
        rows += (found := measured(sizes, ways))
        if arguments.page is not None:
            keep(arguments.page, machine(), circumstances, sizes, found)
            write(arguments.page)
    progress()
    print(table_to_string([HEADER, *(row.cells() for row in rows)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
