"""What checking a program between replicas costs, in parts of what building it does.

    python -m tests.benchmarks.checking

Times are of the thread, medians of several. Each program is built anew and checked at once, in a process that has
checked such programs before: the first check in a process also traces functions of ops.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median
from typing import TypeVar

import popxl
from popxl.analysis.checking import check
from popxl.analysis.replicas.inference import infer
from popxl.extend.graphs import reachable
from popxl_addons.layers import LanguageConfig
from tests.mutants.programs import DATA, GPT, LLAMA, MESH, Language, Net, adamw, kit

ROUNDS = 15
T = TypeVar("T")

DEEP = LanguageConfig(vocabulary=64, width=32, layers=12, heads=4, context=6, bias=True)
language = partial(kit, shape=(2, 5), dtype=popxl.int32, optimizer=adamw)

PROGRAMS: Mapping[str, Callable[[], popxl.Ir]] = {
    "two layers, data parallel": partial(kit, Net, DATA, optimizer=adamw),
    "GPT of 1 layer, divided": partial(language, partial(Language, GPT, "tensor"), MESH),
    "Llama of 1 layer, divided": partial(language, partial(Language, LLAMA, "tensor"), MESH),
    "GPT of 12 layers, divided": partial(language, partial(Language, DEEP, "tensor"), MESH),
    "GPT of 12 layers, weights in pieces": partial(language, partial(Language, DEEP), DATA, sharded=True),
}


def timed(function: Callable[[], T]) -> tuple[float, T]:
    start = time.thread_time()
    made = function()
    return time.thread_time() - start, made


def main() -> None:
    print("| | ops | build, ms | types, % of it | check, % of it |")
    print("|---|---|---|---|---|")
    for name, program in PROGRAMS.items():
        check(program())
        times = []
        for _ in range(ROUNDS):
            gc.collect()  # of earlier programs
            build, ir = timed(program)
            times.append((build, timed(partial(check, ir))[0], timed(partial(infer, program()))[0]))
        build, all, types = (median(each) for each in zip(*times, strict=True))
        count = sum(len(graph.ops) for graph in reachable(ir.main_graph))
        print(f"| {name} | {count} | {build * 1e3:.0f} | {types / build:.0%} | {all / build:.0%} |")


if __name__ == "__main__":
    main()
