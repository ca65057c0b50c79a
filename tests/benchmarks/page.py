"""Writes what was measured into the page about performance: tables, pictures, and the machine.

Measures are kept beside the page, in a file for each machine. So a part can be measured anew (`--only`), what another
machine has measured stays, and the page can be written anew without measuring (`--again`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks import curves
from tests.benchmarks.harness import Result, Row

BEGIN, END = "<!-- measured: what follows is written by tests/benchmarks/run.py -->", "<!-- measured: end -->"
HEADER = ["what", "this library", "baseline", "ratio", "interquartile range"]
TABLES = {
    "Called blocks": "blocks",
    "Called blocks of other shapes": "shape_",
    "A GPT": "gpt",
    "Text": "generate",
    "A small network": "train_|inference",
    "PyTorch models": "poptorch_",
    "Whole PyTorch models": "model_",
    "Several devices": "parallel_|sharded_|pipeline_",
    "Remote buffers": "remote_",
    "What all programs pay": "empty_run|build_|lower_|import",
}
"""The tables by title, each with the rows whose names begin so."""


def keep(page: Path, machine: dict[str, Any], circumstances: dict[str, Any], result: Result) -> None:
    """Keep what was measured for a row, in place of what is known of it.

    Of one machine only numbers of the same versions are kept, as they are compared.
    """
    file = folder_of(page) / f"measured-{name_of(machine)}.json"
    kept = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    rows = kept["rows"] if kept.get("machine") == machine else {}
    rows[result.row.name] = {**circumstances, "measures": dict(result.measures)}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"machine": machine, "rows": dict(sorted(rows.items()))}) + "\n", encoding="utf-8")


def write(page: Path, rows: Sequence[Row]) -> None:
    """Write the page and its pictures from all that was kept."""
    all_kept = [json.loads(file.read_text(encoding="utf-8")) for file in folder_of(page).glob("measured-*.json")]
    all_kept.sort(key=lambda kept: (kept["machine"]["cores"], kept["machine"]["processor"]))
    put(page, BEGIN, END, [section(kept, rows, page) for kept in all_kept])


def put(page: Path, begin: str, end: str, parts: Sequence[str]) -> None:
    """Put paragraphs between two lines of a page, in place of what is there.

    Raises:
        ValueError: if the page does not have these lines.
    """
    text = page.read_text(encoding="utf-8")
    if begin not in text or end not in text:
        raise ValueError(f"{page}: expected a line {begin!r} and a line {end!r}, with what is to be replaced between.")
    before, _, rest = text.partition(begin)
    page.write_text("\n\n".join([before + begin, *parts, end + rest.partition(end)[2]]), encoding="utf-8")


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown; the first row is its header."""
    header, *others = rows
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *others))


def folder_of(page: Path) -> Path:
    """Where the measures and pictures of a page lie."""
    return page.with_suffix("")


def name_of(machine: dict[str, Any]) -> str:
    """What files call a machine: `amd-epyc-2`."""
    words = re.findall("[a-z0-9]+", re.sub(r"\((r|tm)\)", "", machine["processor"].lower()))
    return "-".join([*words, str(machine["cores"])])


def title_of(machine: dict[str, Any]) -> str:
    """What the page calls it."""
    return f"{machine['processor']}, {machine['cores']} cores"


def section(kept: dict[str, Any], rows: Sequence[Row], page: Path) -> str:
    """What was measured on a machine."""
    machine, found = kept["machine"], kept["rows"]
    results = [Result(row, found[row.name]["measures"]) for row in rows if row.name in found]
    rough = {name for name, about in found.items() if about["quick"] or about["load"] > 0.5}
    parts = [f"## On {title_of(machine)}", described(machine, [about["day"] for about in found.values()])]
    if rough:
        parts.append("Rows with a \\* are rough: few rounds were made, or the machine was busy with other work.")
    for title, names in TABLES.items():
        chosen = [result for result in results if re.match(names, result.row.name)]
        if chosen:
            parts.append(f"### {title}: {title_of(machine)}")
            parts += [*pictures(names, chosen, machine, page), table(chosen, rough)]
    return "\n\n".join(parts)


def described(machine: dict[str, Any], days: Sequence[str]) -> str:
    """The machine, the versions and the days."""
    versions = ", ".join(f"{name} {machine[name]}" for name in ("jax", "numpy", "torch") if name in machine)
    when = f"on {min(days)}" if min(days) == max(days) else f"from {min(days)} to {max(days)}"
    return f"{title_of(machine)}. Python {machine['python']}, {versions}. Measured {when}."


def pictures(names: str, results: Sequence[Result], machine: dict[str, Any], page: Path) -> Iterator[str]:
    """Those that belong to a table, as links."""
    name = f"{re.match('[a-z]+', names)[0]}-{name_of(machine)}.svg"  # type: ignore[index]
    link = f"{folder_of(page).name}/{name}"
    if names == "blocks":
        curves.draw([result.raw() for result in results], folder_of(page) / name)
        yield f"![Compile time, time of a step and memory over the number of blocks]({link})"
    elif draw_ratios(results, folder_of(page) / name):
        yield f"![How many times better each is than what it is compared with]({link})"


def table(results: Sequence[Result], rough: Collection[str]) -> str:
    """As Markdown: a line for each rival."""
    lines = [HEADER]
    for result in results:
        for _, ours, theirs, compared, spread, *_ in result.lines():
            mark = " \\*" if result.row.name in rough else ""
            lines.append([result.row.about + mark, ours, theirs, compared, spread])
    return markdown(lines)


def draw_ratios(results: Sequence[Result], picture: Path) -> bool:
    """A dot for each rival of each row, and a line for the middle half of the rounds. False if there are no ratios."""
    from matplotlib.figure import Figure  # takes a second, in each process of the tests

    rivals = list(dict.fromkeys(t.rival for result in results for t in result.row.targets if t.is_ratio))
    names = [result.row.about for result in results if any(t.is_ratio for t in result.row.targets)]
    if not names:
        return False
    figure = Figure(figsize=(11, 0.8 + 0.32 * len(names)), layout="constrained")
    axis = figure.subplots()
    for k, rival in enumerate(rivals):
        points = [
            (len(names) - 1 - names.index(result.row.about) + 0.12 * (k - len(rivals) / 2), *result.quartiles(target))
            for result in results
            for target in result.row.targets
            if target.rival == rival and target.is_ratio and rival in result.measures
        ]
        if points:
            places, lower, median, upper = zip(*points, strict=True)
            axis.hlines(places, lower, upper, color=f"C{k}", alpha=0.5)
            axis.plot(median, places, "o", color=f"C{k}", markersize=4, label=f"beside {rival}")
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set(xscale="log", xlabel="times better (right of 1: ours is better)")
    lowest, highest = axis.get_xlim()
    ticks = [2.0**k for k in range(-6, 11) if lowest <= 2.0**k <= highest]
    axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.minorticks_off()
    axis.set_yticks(range(len(names)), reversed(names), fontsize=8)
    axis.grid(alpha=0.3, axis="x")
    figure.legend(loc="outside lower center", ncols=len(rivals), frameon=False, fontsize=8)
    curves.save(figure, picture)
    return True
