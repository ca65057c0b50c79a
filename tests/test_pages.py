"""README.md and the pages in `docs/`: their programs do what the pages say, and their links lead somewhere."""

import contextlib
import importlib.util
import io
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PICTURES = ROOT / "docs" / "pictures"
REDRAW = "`python docs/pictures.py` draws the pictures anew"
NUMBER = re.compile(r"-?\d+\.\d*(?:e-?\d+)?")


def programs(text: str) -> list[tuple[str, str]]:
    """The blocks of Python on a page, each with the text that is shown as printed by it."""
    return re.findall(r"```python\n(.*?)```(?:(?:(?!```).)*```text\n(.*?)```)?", text, re.DOTALL)


FOR_TARGETS = re.compile(r'Session\([^)]*"(gpu|tpu) ')
"""Programs that are compiled for machines that are not here."""


def run_programs(page: Path, rtol: float, for_targets: bool) -> None:
    """The programs of a page in turn, as a reader would run them. Those that need what is not installed, such as Flax,
    are left out."""
    names: dict[str, object] = {}
    for program, shown in programs(page.read_text(encoding="utf-8")):
        modules = re.findall(r"^(?:import|from) (\w+)", program, re.M)
        if any(importlib.util.find_spec(module) is None for module in modules):
            continue
        if FOR_TARGETS.search(program) and not for_targets:
            continue
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(program, "train.py", "exec"), names)
        if shown:
            assert NUMBER.sub("#", printed.getvalue()) == NUMBER.sub("#", shown)
            found, expected = ([float(n) for n in NUMBER.findall(text)] for text in (printed.getvalue(), shown))
            np.testing.assert_allclose(found, expected, rtol=rtol, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning", "ignore:.*num_workers:UserWarning")  # of Lightning
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_programs_print_what_is_shown(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_programs(page, rtol=1e-4, for_targets=False)
    drawn = {path.name: path.read_text("utf-8") for path in tmp_path.glob("*.svg")}
    assert {name for name, text in drawn.items() if text != (PICTURES / name).read_text("utf-8")} == set(), REDRAW


@pytest.mark.targets
@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(FOR_TARGETS.search(each) for each, _ in programs(page.read_text("utf-8")))]
)
def test_programs_for_targets_print_what_is_shown(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_programs(page, rtol=0.1, for_targets=True)  # releases of compilers differ


def test_pictures_are_those_that_are_drawn() -> None:
    drawn = runpy.run_path(str(ROOT / "docs" / "pictures.py"))["DRAWN"]
    assert {name for name, draw in drawn.items() if draw() != (PICTURES / name).read_text("utf-8")} == set(), REDRAW


def test_there_are_programs() -> None:
    shown = {page.stem: sum(bool(text) for _, text in programs(page.read_text(encoding="utf-8"))) for page in PAGES}
    assert {page: count for page, count in shown.items() if count} == {
        "README": 3,
        "checking": 1,
        "extending": 6,
        "jax": 7,
        "memory": 8,
        "popxl-programs": 1,
        "pytorch": 3,
        "scaling": 8,
    }


# Columns -------------------------------------------------------------------------------------------------------------

COLUMNS = 88
"""How many the site shows of a line of code without scrolling."""


def code(page: Path) -> Iterator[str]:
    """The lines of the blocks of code on a page. What programs print is as wide as it is."""
    text = page.read_text(encoding="utf-8")
    for kind, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        if kind in ("bash", "py", "python"):
            yield from block.splitlines()
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    yield from (line for line in text.splitlines() if line.startswith("    "))


def test_code_fits_its_column() -> None:
    """On pages; and in the tutorials, of which pages show parts."""
    pages = [*PAGES, *sorted(ROOT.glob("tutorials/*/README.md"))]
    wide = {line for page in pages for line in code(page) if len(line) > COLUMNS}
    in_one_line = {line for line in wide if line.startswith("python3 -m venv .venv && ")}  # to be copied as one
    assert wide == in_one_line
    programs = sorted(ROOT.glob("tutorials/**/*.py"))
    assert programs and not [
        line for p in programs for line in p.read_text("utf-8").splitlines() if len(line) > COLUMNS
    ]


# Links ----------------------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The headings of a page as links name them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> Iterator[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    yield from re.findall(r"\]\(<?([^)>\s]+)>?\)", re.sub(r"`[^`\n]*`", "", text))


def broken(page: Path) -> list[str]:
    """The links of a page that lead nowhere. Of those to other places only the form is looked at."""
    wrong = []
    for link in links(page):
        url = urlsplit(link)
        if url.scheme or url.netloc:
            if url.scheme not in ("https", "http") or "." not in url.netloc:
                wrong.append(link)
            continue
        target = (page.parent / url.path).resolve() if url.path else page
        if not target.exists() or (url.fragment and target.suffix == ".md" and url.fragment not in anchors(target)):
            wrong.append(link)
    return wrong


def test_links_lead_somewhere() -> None:
    pages = [path for pattern in ("*.md", "docs/*.md", "*/*.md", "tutorials/*/*.md") for path in ROOT.glob(pattern)]
    assert sum(len(list(links(page))) for page in pages) > 80
    assert {page.name: wrong for page in pages if (wrong := broken(page))} == {}


def test_links_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A heading: here\n[a](#a-heading-here) [b](#there) [c](none.md) [d](https://x) `[e](e.md)`\n")
    assert broken(page) == ["#there", "none.md", "https://x"]
