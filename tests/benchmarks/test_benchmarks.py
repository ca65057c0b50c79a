"""The rows of the performance table run, and their parties compute the same; how fast they are is not tested.

Slow rows are left out: they are others with larger sizes.
"""

import importlib.util
import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest

from popxl_addons.transforms import PipelineSchedule
from tests.benchmarks import curves, empty_run, language_model, on_accelerator, page, run, schedules, variants, ways
from tests.benchmarks.harness import OURS, Result, Row, Size, Target, measure, over, seconds, times
from tests.targets.steps import Sizes


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, marks=[pytest.mark.thorough] * (file is not empty_run), id=file.__name__)
        for file in run.FILES
        if file.ROWS
    ],
)
def test_rows(file):
    """Those of a file at once, as they share what is compiled. Rows that differ by a size are the same when tiny."""
    for row in {re.sub(r"\d", "", row.name): row for row in file.ROWS if not row.slow}.values():
        result = measure(row, Size.TINY)  # checks on the way that the numbers agree
        assert OURS in result.measures, row.name
        values = [value for values in result.measures.values() for value in values]
        assert all(math.isfinite(value) and value > 0 for value in values), row.name
        assert all(len(line) == len(run.HEADER) for line in result.lines()), row.name
        json.dumps(result.raw())


@pytest.mark.thorough
def test_variants():
    """A line for each, all with the same loss. (Of all variants: tests/popxl_addons/test_addons_gpt.py.)"""
    names = ("plain", "accumulated", "phased")
    lines = variants.table(replace(variants.TINY, layers=1), names).splitlines()[2:]
    found, losses = zip(*(line.split(" | ")[:2] for line in lines), strict=True)
    assert tuple(name.strip() for name in found) == names
    np.testing.assert_allclose([float(loss) for loss in losses], float(losses[0]), rtol=1e-5)


def test_the_language_model_is_about_as_short_as_in_flax():
    lines = {name: language_model.lines_of(path) for name, path in language_model.FILES.items()}
    assert 70 < lines[OURS] <= 1.25 * lines["Flax"] < 110
    told = (language_model.TUTORIAL / "README.md").read_text("utf-8")
    assert f"`gpt.py` has {lines[OURS]} lines of code, `gpt_in_flax.py` has {lines['Flax']}." in told
    (table,) = re.findall(r"\| lines \|\n\|[-|]+\n(.*?)\n\n", told, re.DOTALL)
    parts = [row.split("|") for row in table.splitlines()]
    assert [sum(int(row[column]) for row in parts) for column in (3, 5)] == [*lines.values()]


@pytest.mark.thorough
def test_the_language_model_beside_flax():
    """The same first loss, with the same weights; what is compiled makes steps."""
    config = language_model.config_of(layers=1, width=16, length=8, batch=2, steps=10)
    ours, weights = language_model.ours(config)
    parties = [ours] if importlib.util.find_spec("flax") is None else [ours, language_model.in_flax(config, weights)]
    for party in parties:
        step = party.compile()
        np.testing.assert_allclose([party.loss, step()], ours.loss, atol=1e-3)
        assert np.isfinite(step()) and party.needed[0] > party.needed[1] > 0


@pytest.mark.thorough
def test_schedules(tmp_path):
    """Each runs, with the same sums; what is recorded is all its work, and is drawn."""
    work = schedules.Work(devices=2, steps=2, layers=8, width=6, rows=3)
    text, results = schedules.compare(work, [*schedules.SCHEDULES], 1, tmp_path)
    assert [result.name for result in results] == [*schedules.SCHEDULES]
    for result in results:
        assert len(result.predicted.tasks) == 2 * (4 * schedules.SCHEDULES[result.name] + 2 * ("zero" in result.name))
        assert {kind for _, kind, *_ in result.recorded} >= {"forward", "backward"} and 0 <= result.waited < 1
        assert 0 < result.predicted.seconds < math.inf and result.measured[0] > 0
        assert f"| {result.name} | " in text
    assert len([*tmp_path.glob("*.svg")]) == 4


def test_what_is_said_of_schedules(monkeypatch):
    """Beside the theory, by hand; and that too few cores, or busy ones, tell nothing."""
    work = schedules.Work(devices=2, steps=2)
    took = schedules.Durations(forward=1.0, backward=1.5, gradients=0.5, cores=1.0)
    assert took.of_stages(2, is_apart=False) == [1, 1, 2, 2]
    assert took.of_stages(2, is_apart=True) == [1, 1, 1.5, 1.5, 0.5, 0.5]
    predicted = PipelineSchedule.gpipe([0, 1, 1, 0], 2).simulate(took.of_stages(2, is_apart=False))
    recorded = [("cpu:0", "forward", 1.0, 5.0), ("cpu:1", "backward", 3.0, 11.0)]
    result = schedules.Result("gpipe", predicted, [10.0, 12.0, 9.5], recorded)
    assert result.cells() == ["gpipe", "9 s", "10 s", "1.11", "33%", "40%"]
    picture = str(result.picture(["forward", "forward", "backward", "backward"]))
    assert all(lane in picture for lane in ("predicted 0", "predicted 1", "measured cpu:0", "measured cpu:1"))
    warnings = ("each device has a core", "leave it less", "programs have the cores")
    for cores, busy, warned in [(2, 1.0, None), (1, 1.0, 0), (2, 1.9, 1), (2, 0.3, 2)]:
        monkeypatch.setattr(schedules, "cores_here", lambda cores=cores: cores)
        text = "\n".join(schedules.report(work, {1: replace(took, cores=busy)}, [result]))
        assert [each in text for each in warnings] == [k == warned for k in range(3)]
    assert schedules.kind_of("pipeline_stage_3_subgraph(6)", 2) == "backward"
    assert schedules.kind_of("forward_subgraph(0), 3 ops", 2) == "forward" and schedules.kind_of("feeds", 2) is None


@pytest.mark.thorough
def test_curves(tmp_path):
    """Of two sizes, and a party that was not measured everywhere."""
    measures = {OURS: [1.0, 3.0, 2.0], "JAX": [4.0]}
    rows = [{"row": f"blocks{n}_{what}", "measures": measures} for n in (4, 16) for what in curves.PANELS]
    rows += [{"row": "blocks64_run", "measures": {OURS: [5.0]}}, {"row": "import", "measures": measures}]
    assert curves.curves(rows)["run"] == {OURS: {4: 2.0, 16: 2.0, 64: 5.0}, "JAX": {4: 4.0, 16: 4.0}}
    curves.draw(rows, tmp_path / "curves.svg")
    text = (tmp_path / "curves.svg").read_text(encoding="utf-8")
    assert "</svg>" in text


def test_the_page(tmp_path):
    """Kept measures go into tables and pictures; the rest of the page stays, and a part can be measured anew."""
    file = tmp_path / "page.md"
    file.write_text(f"before\n\n{page.BEGIN}\nold\n{page.END}\n\nafter\n")
    rows = [
        Row("blocks4_run", lambda size: {}, (times(1),), about="a step of 4 blocks"),
        Row("train_step", lambda size: {}, (times(1), times(1, "torch")), about="a step of a network"),
        Row("import", lambda size: {}, (over(1, seconds),), about="the import"),
    ]
    machine = {"processor": "A processor", "cores": 2, "python": "3.11", "jax": "0.10"}
    circumstances = {"day": "2026-01-02", "load": 0.0, "quick": False}
    measures = {OURS: [1.0, 2.0, 4.0], "JAX": [2.0, 6.0, 4.0], "torch": [5.0, 5.0, 5.0]}
    for row in rows:
        page.keep(file, machine, circumstances, Result(row, measures))
    page.write(file, rows)
    text = file.read_text(encoding="utf-8")
    assert text.startswith("before\n") and text.endswith("\n\nafter\n") and "old" not in text
    assert "A processor, 2 cores. Python 3.11, jax 0.10. Measured on 2026-01-02." in text
    assert "| a step of a network | 2 s | 4 s (JAX) | 2.00 x | 1.50 x … 2.50 x |" in text
    assert "| a step of a network | 2 s | 5 s (torch) | 2.50 x | 1.88 x … 3.75 x |" in text
    assert "| the import | 2 s | 4 s (JAX) | -1 s over | -2.5 s over … -500 ms over |" in text
    for picture in re.findall(r"\]\((.+?)\)", text):
        assert "</svg>" in (tmp_path / picture).read_text(encoding="utf-8")
    assert re.findall(r"\]\((.+?)\)", text) == ["page/blocks-a-processor-2.svg", "page/train-a-processor-2.svg"]
    pictures = {picture: picture.read_bytes() for picture in (tmp_path / "page").glob("*.svg")}
    page.write(file, rows)  # what was not measured anew stays as it is
    assert all(picture.read_bytes() == before for picture, before in pictures.items()) and len(pictures) == 2

    page.keep(file, machine, {**circumstances, "load": 2.0}, Result(rows[2], {OURS: [3.0], "JAX": [5.0]}))
    page.write(file, rows)
    text = file.read_text(encoding="utf-8")
    assert "| the import \\* | 3 s |" in text and "| a step of a network | 2 s |" in text
    assert text.count(page.BEGIN) == text.count(page.END) == 1

    other = {**machine, "processor": "Another(R) processor"}
    page.keep(file, other, circumstances, Result(rows[0], measures))  # stands beside the first
    page.keep(file, {**machine, "jax": "0.11"}, circumstances, Result(rows[2], measures))  # others are not compared
    page.write(file, rows)
    text = file.read_text(encoding="utf-8")
    assert "a step of a network" not in text
    assert re.findall("^## (.+)", text, re.M) == ["On A processor, 2 cores", "On Another(R) processor, 2 cores"]
    assert "(page/blocks-another-processor-2.svg)" in text


def test_ways_on_the_page(tmp_path):
    """A row for each number of layers; others of the same machine stay, and are no longer shown beside another one."""
    file = tmp_path / "page.md"
    file.write_text(f"before\n\n{ways.BEGIN}\nold\n{ways.END}\n\nafter\n")
    machine = {"processor": "A processor", "cores": 2, "jax": "0.10"}
    quiet, busy = {"day": "2026-01-02", "load": 0.1}, {"day": "2026-01-03", "load": 2.0}

    def found(layers, more=1.0):
        told = {way: way for way in (*ways.WAYS, *ways.JAX)} | {"auto": "auto: rolled"}
        return [ways.Measured(layers, way, told[way], more, 0.02 * layers, 3_000_000, 7) for way in told]

    blocks, plain = (ways.Sizes(model, 2, width=16, rows=8) for model in ("blocks", "plain"))
    ways.keep(file, machine, quiet, replace(blocks, layers=16), found(16)[:3])
    ways.keep(file, machine, quiet, blocks, found(2))
    ways.write(file)
    text = file.read_text(encoding="utf-8")
    assert text.startswith("before\n") and text.endswith("\n\nafter\n") and "old" not in text
    assert "A processor, 2 cores." in text and "Measured on 2026-01-02." in text and "rough" not in text
    header, _, two, sixteen = re.findall(r"^\|.*", text, re.M)
    assert (
        header == "| layers | `auto` | `rolled` | `kept` | `dispatched` | `inlined` | JAX, unrolled | JAX, lax.scan |"
    )
    assert two == f"| 2 | rolled: 1 s, 40 ms, 3 MB |{' 1 s, 40 ms, 3 MB |' * 6}"
    assert sixteen == f"| 16 | rolled: 1 s, 320 ms, 3 MB |{' 1 s, 320 ms, 3 MB |' * 2}{' – |' * 4}"
    (picture,) = re.findall(r"\]\((.+?)\)", text)
    assert picture == "page/ways-blocks-with-four-heads-8-rows-of-width-16.svg"
    assert "</svg>" in (tmp_path / picture).read_text(encoding="utf-8")

    ways.keep(file, machine, busy, blocks, found(2, more=5.0))
    ways.write(file)
    text = file.read_text(encoding="utf-8")
    assert "| 2 | rolled: 5 s" in text and "| 16 | rolled: 1 s" in text
    assert "Measured from 2026-01-02 to 2026-01-03. These figures are rough" in text
    ways.keep(file, {**machine, "jax": "0.11"}, quiet, plain, found(2))
    ways.write(file)
    assert re.findall("^(.+?), 8 rows", file.read_text(encoding="utf-8"), re.M) == ["Plain blocks"]


@pytest.mark.thorough
@pytest.mark.parametrize("model", ["blocks", "plain", "gpt"])
def test_ways(model, tmp_path, monkeypatch, capsys):
    """Each is compiled and makes steps; the table has a row for each, and the page a picture."""
    file = tmp_path / "page.md"
    file.write_text(f"{ways.BEGIN}\n{ways.END}\n")
    sizes = ["--layers", "2", "--width", "16", "--rows", "64"]
    monkeypatch.setattr("sys.argv", ["ways.py", "--model", model, *sizes, "--page", str(file)])
    assert ways.main() == 0
    told = [line.split(" | ")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("2 ")]
    assert told == ["auto: kept", *ways.WAYS[1:], *(ways.JAX if model != "gpt" else ())]
    text = file.read_text(encoding="utf-8")
    assert text.count("ms, ") + text.count("µs, ") >= len(told) and len([*tmp_path.glob("page/ways-*.svg")]) == 1


def test_rows_of_the_page():
    """Each has its place and its words."""
    for row in run.ROWS:
        assert row.about, row.name
        assert sum(bool(re.match(names, row.name)) for names in page.TABLES.values()) == 1, row.name


def test_names_are_unique():
    names = [row.name for row in run.ROWS]
    assert len(names) == len(set(names))


def result_of(target: Target, ours: list[float], theirs: list[float]) -> Result:
    return Result(Row("row", lambda size: {}, (target,)), {OURS: ours, "JAX": theirs})


def test_only_numbers_of_one_round_are_compared():
    result = result_of(times(1), ours=[1.0, 10.0, 2.0], theirs=[2.0, 20.0, 4.0])
    assert result.quartiles(times(1)) == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(("limit", "verdict"), [(1.5, "met"), (2.5, "not met"), (None, "")])
def test_verdict(limit, verdict):
    (line,) = result_of(times(limit), ours=[1.0], theirs=[2.0]).lines()
    assert line[-1] == verdict


def test_rivals_that_are_not_there_are_left_out():
    assert result_of(times(1, "torch"), ours=[1.0], theirs=[1.0]).lines() == []


@pytest.mark.parametrize(("value", "text"), [(2.5, "2.5 s"), (0.0025, "2.5 ms"), (2.5e-6, "2.5 µs"), (-0.5, "-500 ms")])
def test_seconds(value, text):
    assert seconds(value) == text


def test_steps_on_the_accelerator():
    """Here on CPUs: ours and those of JAX make steps, and lose."""
    sizes = Sizes(2, 64, 2, 128, 128, 2, 32)
    for made in (
        on_accelerator.llama(sizes, "auto", "nothing"),
        on_accelerator.llama_of_jax(sizes, "scan, checkpoint"),
    ):
        found = on_accelerator.timed(made.start(), 3)
        assert made.memory > 0 and len(found.seconds) == 3
        assert 1 < found.losses[-1] < found.losses[0]
    known = on_accelerator.rows()
    assert all(len({row[:2] for row in rows}) == len(rows) for rows in known.values())
