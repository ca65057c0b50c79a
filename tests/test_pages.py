"""README.md and the pages in `docs/`: their programs do what the pages say, and their links lead somewhere."""

import contextlib
import importlib.util
import io
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NUMBER = re.compile(r"-?\d+\.\d*(?:e-?\d+)?")


def programs(text: str) -> list[tuple[str, str]]:
    """The blocks of Python on a page, each with the text that is shown as printed by it."""
    return re.findall(r"```python\n(.*?)```(?:(?:(?!```).)*```text\n(.*?)```)?", text, re.DOTALL)


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning", "ignore:.*num_workers:UserWarning")  # of Lightning
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_programs_print_what_is_shown(page: Path) -> None:
    """In turn, as a reader would run them. Those that need what is not installed, such as Flax, are left out."""
    names: dict[str, object] = {}
    for program, shown in programs(page.read_text(encoding="utf-8")):
        if any(
            importlib.util.find_spec(module) is None for module in re.findall(r"^(?:import|from) (\w+)", program, re.M)
        ):
            continue
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(program, page.name, "exec"), names)
        if shown:
            assert NUMBER.sub("#", printed.getvalue()) == NUMBER.sub("#", shown)
            found, expected = ([float(n) for n in NUMBER.findall(text)] for text in (printed.getvalue(), shown))
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_there_are_programs() -> None:
    shown = {page.stem: sum(bool(text) for _, text in programs(page.read_text(encoding="utf-8"))) for page in PAGES}
    assert {page: count for page, count in shown.items() if count} == {
        "README": 1,
        "checking": 1,
        "extending": 4,
        "jax": 6,
        "memory": 5,
        "popxl-programs": 1,
        "pytorch": 3,
        "scaling": 7,
    }


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
