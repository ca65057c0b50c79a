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

pytest.importorskip("pdoc", reason="the pages are made with pdoc: pip install -e '.[docs]'")

DOCS = runpy.run_path(str(Path(__file__).parent.parent / "docs" / "reference.py"))


@pytest.mark.thorough  # `docs/build` does the same
def test_the_pages(tmp_path: Path) -> None:
    texts = DOCS["write"](tmp_path)  # warnings are errors, as everywhere
    index = (tmp_path / "index.md").read_text(encoding="utf-8")
    assert all(f"\n{name}\n" in index and f"[`{name}`]({name}.md)" in index for name in texts)
    assert {"popxl", "popxl.ops", "popxl.transforms", "popxl_addons", "popart", "popdist"} <= set(texts)

    directive = re.compile(r'^`+{py:(?:function|class|data)} (\w+).*\n:module: "([\w.]+)"', re.MULTILINE)
    shown = [f"{module}.{name}" for text in texts.values() for name, module in directive.findall(text)]
    assert {"popxl.Session", "popxl.ops.matmul", "popxl_addons.Module", "popdist.init"} <= set(shown)
    assert len(shown) == len(set(shown)) > 300
    for package in (popxl, ops, ops.collectives, ops.var_updates, popxl.transforms, runtime, popart, popdist):
        names = [name for name in package.__all__ if not inspect.ismodule(getattr(package, name))]
        assert {f"{package.__name__}.{name}" for name in names} <= set(shown)

    for name, text in texts.items():
        assert not re.search(r"^ *(Args|Returns|Raises|Attributes|Example):$", text, re.MULTILINE), name
        assert not re.search(r"^ *>>> .*(?<!\n)\n *```pycon", text, re.MULTILINE), f"{name}: a block within a block"


def test_a_docstring_becomes_markdown() -> None:
    shown = DOCS["markdown"](
        """Add.

        Args:
            x, y: tensors, also
                of other shapes.
            z: a third.

        Returns:
            The sum.

        Raises:
            TypeError: if not.

        Example:
            >>> add(1,
            ...     2)
            3
            >>> add(3, 4)
            7

        See also: `sub`.
        """
    )
    assert shown == (
        "Add.\n\n"
        ":param x,y: tensors, also\n    of other shapes.\n:param z: a third.\n\n"
        ":returns: The sum.\n\n"
        ":raises TypeError: if not.\n\n"
        "**Example**\n\n```pycon\n>>> add(1,\n...     2)\n3\n>>> add(3, 4)\n7\n```\n\n"
        "See also: `sub`."
    )
