"""Measured times of training steps of GPTs on A100s, beside what `popxl_addons.step_time` says of them.

    python -m tests.targets.gpt_times                      # print the errors
    python -m tests.targets.gpt_times --fit                # fit the four numbers on a third of the rows, first
    python -m tests.targets.gpt_times --into docs/time     # draw the picture, too
    python -m tests.targets.gpt_times --published          # beside those of two papers, in place of these

Nothing is compiled or run. Each third row, from the first, is one that was fitted; errors are of the others.
"""

from __future__ import annotations

import argparse
import csv
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from popxl.base.pages import Picture
from popxl.base.pictures import scatter
from popxl.extend.targets import Efficiency
from popxl_addons.step_time import MEGATRON_ON_A100, gpt_step_time

FOLDER = Path(__file__).parent / "a100_steps"
FITTED = ("products", "memory", "dispatch", "network")
"""The numbers that are fitted."""

EACH = 3
"""Of so many rows, the first was fitted."""

MOST = {"products": 0.9, "memory": 1.0, "dispatch": 1e-3, "network": 0.9, "outside": 1.0}
"""What these are at most: no product of cuBLAS on an A100 is known to attain more than 0.9."""


class Row(NamedTuple):
    """A measured step: where it was, its arguments of `gpt_step_time`, and its seconds."""

    where: str
    sizes: dict[str, int]
    seconds: float

    @property
    def model(self) -> tuple[int, ...]:
        """The model, and the machine."""
        return self.sizes["hidden"], self.sizes["layers"], self.sizes["chips"]

    def foreseen(self, efficiency: Efficiency = MEGATRON_ON_A100) -> float:
        """What the estimate says."""
        return gpt_step_time(**self.sizes, efficiency=efficiency).seconds


COLUMNS = {
    "layers": "# layers",
    "hidden": "hidden size",
    "heads": "attention heads",
    "sequence": "sequence length",
    "tensor": "tensor parallelism",
    "data": "data parallelism",
    "pipeline": "pipeline parallelism",
    "micro_batch": "micro batch",
    "global_batch": "global batch",
    "chips": "# GPUs",
}


def rows(folder: Path = FOLDER) -> dict[str, list[Row]]:
    """The measured steps, within a host and across hosts."""
    found = {}
    for where, file in (("within a host", "a100_steps_single.csv"), ("across hosts", "a100_steps_multi.csv")):
        with (folder / file).open(encoding="utf-8") as text:
            found[where] = [
                Row(where, {name: int(each[column]) for name, column in COLUMNS.items()}, _seconds(each))
                for each in csv.DictReader(text)
            ]
    return found


def _seconds(row: dict[str, str]) -> float:
    return float(row["iteration time (ms)"]) / 1e3


class PublishedRow(NamedTuple):
    """A step of a paper: the year of the paper, arguments of `gpt_step_time`, and seconds."""

    paper: int
    sizes: dict[str, int]
    seconds: float

    @property
    def parameters(self) -> float:
        """Parameters of the model, in billions."""
        layers, hidden = self.sizes["layers"], self.sizes["hidden"]
        return (12 * layers * hidden**2 + 13 * layers * hidden + (VOCABULARY + SEQUENCE) * hidden) / 1e9


VOCABULARY, SEQUENCE = 51200, 2048
"""Of all models of the papers."""


def published(file: Path = FOLDER / "megatron.csv") -> list[PublishedRow]:
    """Steps by their published times or rates: operations as the paper counts them, with recomputation. Where it does
    not state the micro-batch, it is that of 1, 2, 4 and 8 with the shortest estimate."""
    found = []
    with file.open(encoding="utf-8") as text:
        for row in csv.DictReader(text):
            given = {name: int(row[name]) for name in COLUMNS if row.get(name)}
            layers, hidden, chips, batch = (given[name] for name in ("layers", "hidden", "chips", "global_batch"))
            data = chips // given["tensor"] // given["pipeline"]
            ratio = 1 + SEQUENCE / (6 * hidden) + VOCABULARY / (16 * layers * hidden)
            flops = 96 * batch * SEQUENCE * layers * hidden**2 * ratio
            rate = row["teraflops of a GPU"]
            seconds = flops / (chips * 1e12 * float(rate)) if rate else float(row["seconds"])
            micro = [given["micro_batch"]] if "micro_batch" in given else [1, 2, 4, 8]
            ways = [
                PublishedRow(
                    int(row["paper"]), {**given, "data": data, "sequence": SEQUENCE, "micro_batch": m}, seconds
                )
                for m in micro
                if batch % (data * m) == 0
            ]
            found.append(min(ways, key=recomputed))
    return found


def recomputed(row: PublishedRow) -> float:
    """Estimated seconds of a published step, whose layers are computed again."""
    return gpt_step_time(**row.sizes, recompute=True).seconds


def report_published() -> list[str]:
    """Lines of a table."""
    lines = [
        "| paper | parameters | GPUs | tensor × stages × data | batch | micro-batch | measured | estimated | off |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    off = []
    for row in published():
        sizes, estimate = row.sizes, recomputed(row)
        off.append(estimate / row.seconds - 1)
        parts = " × ".join(str(sizes[name]) for name in ("tensor", "pipeline", "data"))
        lines.append(
            f"| {row.paper} | {row.parameters:.1f} billion | {sizes['chips']} | {parts} | {sizes['global_batch']} | "
            f"{sizes['micro_batch']} | {row.seconds:.3g} s | {estimate:.3g} s | {off[-1]:+.0%} |"
        )
    return [*lines, "", f"Mean error {np.abs(off).mean():.1%}, worst {np.abs(off).max():.0%}."]


def errors(measured: Sequence[Row], efficiency: Efficiency = MEGATRON_ON_A100) -> np.ndarray:
    """Relative errors."""
    return np.asarray([row.foreseen(efficiency) / row.seconds - 1 for row in measured])


def fitted(measured: dict[str, list[Row]]) -> Efficiency:
    """Fit the numbers: least mean error within a host and across, both counting as much."""
    from scipy.optimize import minimize

    some = [each[::EACH] for each in measured.values()]

    def efficiency(numbers: Iterable[float]) -> Efficiency:
        changes = {n: min(MOST[n], max(1e-2 * MOST[n], v * MOST[n])) for n, v in zip(FITTED, numbers, strict=True)}
        return MEGATRON_ON_A100.model_copy(update=changes)

    def error(numbers: np.ndarray) -> float:
        beyond = float(np.maximum(0, numbers - 1).sum())
        return beyond + sum(float(np.abs(np.log1p(errors(each, efficiency(numbers)))).mean()) for each in some)

    start = [getattr(MEGATRON_ON_A100, name) / MOST[name] for name in FITTED]
    found = minimize(error, start, method="Nelder-Mead", options={"maxfev": 120, "xatol": 2e-3, "fatol": 2e-4})
    return efficiency(found.x)


def rank_correlation(measured: Sequence[float], foreseen: Sequence[float]) -> float:
    """Spearman's."""
    ranks = (np.argsort(np.argsort(each)) for each in (measured, foreseen))
    return float(np.corrcoef(*ranks)[0, 1])


def by_model(found: Sequence[tuple[Row, float]]) -> dict[tuple[int, ...], list[tuple[float, float]]]:
    """Measured and foreseen seconds of each model on one machine."""
    alike: defaultdict[tuple[int, ...], list[tuple[float, float]]] = defaultdict(list)
    for row, foreseen in found:
        key = row.model if row.where == "across hosts" else (*row.model, row.sizes["global_batch"])
        alike[key].append((row.seconds, foreseen))
    return dict(alike)


def report(measured: dict[str, list[Row]], efficiency: Efficiency) -> tuple[list[str], Picture]:
    """Lines of a table, and the picture."""
    lines = [
        "| | rows | fitted on | mean error of the others | worst | rank correlation of a model | chosen within 5 % |",
        "|---|---|---|---|---|---|---|",
    ]
    points = []
    for where, each in measured.items():
        off = errors(each, efficiency)
        held = np.delete(off, slice(0, None, EACH))
        found = [(row, row.seconds * (1 + e)) for row, e in zip(each, off, strict=True)]
        models: defaultdict[tuple[int, ...], list[tuple[float, float]]] = defaultdict(list)
        for row, foreseen in found:
            models[row.model[: 2 if where == "within a host" else 3]].append((row.seconds, foreseen))
        ranks = [rank_correlation(*zip(*pairs, strict=True)) for pairs in models.values() if len(pairs) > 3]
        same = [pairs for pairs in by_model(found).values() if len(pairs) > 1]
        chosen = [min(pairs, key=lambda pair: pair[1])[0] <= 1.05 * min(pairs)[0] for pairs in same]
        lines.append(
            f"| {where} | {len(each)} | {len(each[::EACH])} | {np.abs(held).mean():.1%} | {np.abs(held).max():.0%} | "
            f"{min(ranks):.2f} to {max(ranks):.2f} | {sum(chosen)} of {len(chosen)} |"
        )
        kinds = ["fitted" if i % EACH == 0 else "not fitted" for i in range(len(each))]
        points += [
            (f"{where}, {kind}", f"{row.model} {row.sizes}", row.seconds, foreseen)
            for kind, (row, foreseen) in zip(kinds, found, strict=True)
        ]
    return lines, scatter("A step of a GPT on A100s", "measured", "estimated", points)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--data", type=Path, default=FOLDER, help="a folder with files of the same form")
    parser.add_argument("--into", type=Path, help="a folder for the picture")
    parser.add_argument("--published", action="store_true")
    options = parser.parse_args()
    if options.published:
        print(*report_published(), sep="\n")
        return
    measured = rows(options.data)
    efficiency = fitted(measured) if options.fit else MEGATRON_ON_A100
    print(*(f"{name}={getattr(efficiency, name):.4g}" for name in FITTED))
    lines, picture = report(measured, efficiency)
    print(*lines, sep="\n")
    for row in measured["across hosts"]:
        print(f"{row.sizes}: {row.seconds:.2f} s, {row.foreseen(efficiency):.2f} s")
    if options.into is not None:
        picture.save(options.into / "a100-steps.svg")


if __name__ == "__main__":
    main()
