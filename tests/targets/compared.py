"""What our programs cost on TPUs and GPUs, beside the same written by hand in JAX and compiled for the same chip.

    python -m tests.targets.compared [--programs mnist lenet] [--targets "tpu v5e" "gpu h100"]

All of it is read off the compiled programs, so that it is exact, and the same on any machine; but for the seconds.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

import popxl
from popxl.base.version import VERSION
from runtime.costs.hlo import parse_hlo
from runtime.costs.work import account_of
from runtime.targets.devices import OFFLINE_DEVICE
from tests.benchmarks import gpt, models, network
from tests.benchmarks.harness import Size
from tests.popxl_addons.gpt.model import batches
from tests.popxl_addons.gpt.variants import VARIANTS

TARGETS = ("tpu v5e", "gpu h100")

LIBTPU = version("libtpu") if find_spec("libtpu") is not None else "(none)"

HEAD = f"""\
# Costs of programs, compared with handwritten JAX

Written by `python -m tests.targets.compared`, with popxl {VERSION}, jax {jax.__version__} and libtpu {LIBTPU}: on one
chip, read off what was compiled; nothing was run. Sizes are bytes, cycles are XLA's own estimate. Float32 products are
computed in float32 here: that is JAX's "highest" precision. A call of the models by poptorch (encoder, lenet) is a
hundred steps. Compile seconds are of one process with other work on the machine, so do not compare them.

The handwritten programs compute the same: AdamW counts the steps of each weight, and the seed advances. But rotary
positions round each product before it is added here, as PopXL does, which accounts for the additional flops of the GPT.
The copies in poptorch's programs are made once for a hundred steps: of their counters, and of the loss.

No program moves more than 1.02 × the bytes of the handwritten one, has more than 1.02 × its kernels, or more than 1.03
× its code, except for *LeNet of 4 images on v5e*: 1.09 × the bytes and 1.07 × the kernels, for 0.74 × the code and 0.82
× the cycles. The gradients of its filters materialise the elements under each column of a filter, as `docs/targets.md`
says; these are in the core's own memory. XLA states no cycles for the gradient of a max pool, which is the same kernel
on either side. The *encoder* slices the heads of all queries, keys and values at once: on a v5e that takes fewer
kernels and cycles, and as many bytes. The *GPT of 12 layers on H100* moves 1.02 ×: rotary positions swap the channels
of a pair, for which a GPU reads them once more. Strided halves, as in the handwritten program, would save a GPU 17 % of
the bytes of an attention's scores and their gradient, and cost a TPU 26 %. On a v5e, temporaries and prefetched values
of our programs are in the core's own memory; the handwritten GPT of 12 layers needs 79 MB of temporaries in the memory
of the chip.

The handwritten LeNet with 32 images a step is missing at the "highest" precision for v5e: XLA does not finish the
gradient of its first filters.
"""

Costs = dict[str, float]

COLUMNS = (
    "arguments",
    "alias",
    "temporaries",
    "code",
    "flops",
    "bytes accessed",
    "kernels",
    "copies",
    "cycles",
    "compile seconds",
)


OF_MEMORY = "bytes of the chip's memory"
"""Another figure: those of the bytes accessed that are not in a core's own memory."""


class Case:
    """A program, ours and JAX's.

    Args:
        ours: makes the session, on the device that the environment says.
        function: the same in JAX.
        arguments: makes what that is given.
        donated: which of these are donated.
    """

    def __init__(
        self,
        ours: Callable[[], Any],
        function: Callable[..., Any],
        arguments: Callable[[], Any],
        donated: tuple[int, ...] = (0,),
    ) -> None:
        self.ours, self.function, self.arguments, self.donated = ours, function, arguments, donated


def mnist(size: Size) -> Case:
    net = network.network(size, batch=8)
    return Case(lambda: network.Training(net).session, network.jax_step, lambda: ([*net.parameters()], net.data()))


def small_gpt(size: Size, layers: int) -> Case:
    config = gpt.config_of(size, layers)
    return Case(
        lambda: VARIANTS["plain"](config),
        gpt.jax_step(config),
        lambda: (gpt.jax_state(config), *batches(config, 1)[0]),
    )


def by_poptorch(task: models.Task) -> Case:
    def session() -> popxl.Session:
        model = models.wrapped(task)
        model.compile(*task.data())
        return model._executable.session

    return Case(session, models.jax_steps(task), lambda: (models.jax_state(task), models.jax_data(task)))


CASES: Mapping[str, Callable[[Size], Case]] = {
    "mnist": mnist,
    "gpt 2": lambda size: small_gpt(size, 2),
    "gpt 12": lambda size: small_gpt(size, 12),
    "encoder": lambda size: by_poptorch(models.encoder(size)),
    "lenet": lambda size: by_poptorch(models.lenet(size)),
    "lenet of 4 images": lambda size: by_poptorch(models.lenet(size, 4)),
}


def of_ours(case: Case, target: str) -> Costs:
    """What our program costs."""
    os.environ[OFFLINE_DEVICE] = target
    try:
        cost = case.ours().cost()
    finally:
        del os.environ[OFFLINE_DEVICE]
    sizes = (cost.argument_bytes, cost.alias_bytes, cost.temporary_bytes, cost.code_bytes or 0)
    counts = (cost.flops, cost.bytes_accessed, cost.kernels, cost.copies, cost.cycles or 0)
    of_memory = {OF_MEMORY: sum(graph.bytes_accessed for graph in cost.graphs)}
    return dict(zip(COLUMNS, (*sizes, *counts, cost.compile_seconds), strict=True)) | of_memory


def of_jax(case: Case, target: str) -> Costs:
    """What the one by hand costs."""
    (device,) = popxl.Target(target).devices
    where = SingleDeviceSharding(device)
    given = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype), sharding=where),
        case.arguments(),
    )
    start = time.perf_counter()
    compiled = jax.jit(case.function, donate_argnums=case.donated).lower(*given).compile()
    seconds = time.perf_counter() - start
    found, total = compiled.memory_analysis(), account_of(parse_hlo(compiled.as_text())).total
    sizes = (
        found.argument_size_in_bytes,
        found.alias_size_in_bytes,
        found.temp_size_in_bytes,
        found.generated_code_size_in_bytes,
    )
    counts = (total.flops, total.bytes, total.kernels, total.copies, total.cycles)
    return dict(zip(COLUMNS, (*sizes, *counts, seconds), strict=True)) | {OF_MEMORY: total.memory_bytes}


def rows(name: str, target: str) -> Iterator[tuple[str, Costs]]:
    """Ours, JAX's at the precision that float32 has here, and JAX's as it comes."""
    case = CASES[name](Size.FULL)
    yield "ours", of_ours(case, target)
    with jax.default_matmul_precision("highest"):
        yield "JAX, highest", of_jax(case, target)
    case = CASES[name](Size.FULL)  # or JAX would remember what it traced
    yield "JAX, default", of_jax(case, target)


def lines(names: list[str], targets: list[str]) -> Iterator[str]:
    """The table in Markdown."""
    yield from header()
    for target in targets:
        for name in names:
            for party, costs in rows(name, target):
                yield line(name, target, party, costs)


def header() -> Iterator[str]:
    """The first two lines of a table."""
    yield f"| | | {' | '.join(COLUMNS)} |"
    yield "|---" * (len(COLUMNS) + 2) + "|"


def line(name: str, target: str, party: str, costs: Costs) -> str:
    """A line of a table: what a program costs, ours or another's."""
    cells = (shown(column, costs[column]) for column in COLUMNS)
    return f"| {name}, {target} | {party} | {' | '.join(cells)} |"


def shown(column: str, value: float) -> str:
    """One cell. What XLA does not say is a dash."""
    if column == "compile seconds":
        return f"{value:.1f}"
    return f"{value:,.0f}".replace(",", " ") if value or column not in ("code", "cycles") else "–"


def main() -> int:
    parser = argparse.ArgumentParser("python -m tests.targets.compared", description=__doc__.split("\n")[0])
    parser.add_argument("--programs", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--targets", nargs="+", default=[*TARGETS])
    options = parser.parse_args()
    print(HEAD)
    for line in lines(options.programs, options.targets):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
