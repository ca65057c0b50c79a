"""The API reference is made of the docstrings without a warning, and they are shown as they are meant."""

import inspect
import re
import runpy
from pathlib import Path

import pytest

import popart
import popdist
import popxl
import runtime
from popxl import ops

pytest.importorskip("pdoc", reason="the pages are made by pdoc: pip install -e '.[docs]'")

DOCS = runpy.run_path(str(Path(__file__).parent.parent / ".ci" / "docs.py"))


def test_the_pages(tmp_path: Path) -> None:
    texts = DOCS["write"](tmp_path)  # warnings are errors, as everywhere
    assert (tmp_path / "index.html").read_text(encoding="utf-8").count('<a href="popxl/ops') >= 3
    assert {"popxl", "popxl.ops", "popxl.transforms", "popxl_addons", "popart", "popdist"} <= set(texts)

    shown = [
        f"{name}#{section}" for name, text in texts.items() for section in re.findall('<section id="(.+?)">', text)
    ]
    assert {"popxl#Session", "popxl.ops#matmul", "popxl_addons#Module", "popdist#init"} <= set(shown)
    assert len(shown) == len(set(shown)) > 300
    for package in (popxl, ops, ops.collectives, ops.var_updates, popxl.transforms, runtime, popart, popdist):
        names = [name for name in package.__all__ if not inspect.ismodule(getattr(package, name))]
        assert {f"{package.__name__}#{name}" for name in names} <= set(shown)

    for name, text in texts.items():
        assert not re.search(r"<blockquote>\s*<blockquote>", text), f"{name}: an example without its heading"
        assert not re.search(r"<p>(Args|Returns|Raises|Example):", text), f"{name}: a section that is none"
