"""A Llama in plain JAX within memory budgets, by `popxl_addons.value_and_grad`, beside policies of `jax.checkpoint`.

    python -m tests.targets.jax_budgets [--targets "gpu h100" "tpu v5e"] [--shares 75 50 35] [--layers 8] [--texts 16]
                                        [--loop] [--into PAGE]

The step is that of `tests.targets.llama_in_jax`, with AdamW, in bfloat16 over float32 parameters, with its layers one
after the other, or in a loop (`lax.scan`). Budgets are shares of the memory that it needs with `jax.value_and_grad`.
Nothing runs. A page given with `--into` keeps the rows.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import jax

import popxl
import popxl_addons as addons
from popxl.errors import PopxlError
from tests.targets.steps import Sizes, jitted_step
from tests.targets.tables import Table

POLICIES = ("", ", checkpoint, products", ", checkpoint")
HEAD = """\
| target | layers | gradient | budget, MB | a device needs, MB | GB moved | Gflop | M cycles |
|---|---|---|---|---|---|---|---|"""


def cells(budget: int | None, memory: Any, cost: Any) -> list[str]:
    """Cells of a compiled step."""
    stated = "–" if budget is None else f"{budget / 1e6:.0f}"
    cycles = f"{cost.cycles / 1e6:.1f}" if cost.cycles else "–"
    return [stated, f"{memory.device / 1e6:.0f}", f"{cost.bytes_accessed / 1e9:.1f}", f"{cost.flops / 1e9:.0f}", cycles]


def of_jax(sizes: Sizes, way: str, target: str) -> list[str]:
    """Cells of the step in plain JAX."""
    step, arguments = jitted_step(sizes, way, target)
    found = popxl.analyze(step, *arguments, target=target)
    return cells(None, found.memory, found.cost)


def planned(sizes: Sizes, form: str, share: int, target: str) -> list[str]:
    """Cells of the step within a share of the memory that it needs in plain JAX."""
    step, arguments = jitted_step(sizes, form, target)
    budget = popxl.analyze(step, *arguments, target=target).memory.device * share // 100

    def build(memory: Any) -> Any:
        gradient = partial(addons.value_and_grad, memory=memory)
        planned_form = "unrolled, jitted" if form == "unrolled" else form
        step, arguments = jitted_step(sizes, planned_form, target, value_and_grad=gradient)
        return partial(step, *arguments)

    try:
        found = addons.plan_memory(build, budget, target, told=print)
    except PopxlError as problem:
        print(problem)
        return [f"{budget / 1e6:.0f}", "none found", "–", "–", "–"]
    return cells(budget, found.memory, found.cost)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=["gpu h100", "tpu v5e"])
    parser.add_argument("--shares", nargs="+", type=int, default=[75, 50, 35])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--loop", action="store_true")
    parser.add_argument("--into", type=Path)
    given = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    sizes, table = Sizes(given.layers, texts=given.texts), Table(HEAD, given.into)
    form, where = ("scan", ", `lax.scan`") if given.loop else ("unrolled", "")
    for target in given.targets:
        for policy in POLICIES:
            name = f"`jax.value_and_grad`{policy.replace('checkpoint', '`jax.checkpoint`')}{where}"
            table.add([target, str(given.layers), name], partial(of_jax, sizes, form + policy, target))
        for share in given.shares:
            name = f"`addons.value_and_grad` within {share} %{where}"
            table.add([target, str(given.layers), name], partial(planned, sizes, form, share, target))


if __name__ == "__main__":
    main()
