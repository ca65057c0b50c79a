"""The examples in poptorch's docstrings run, and print what they show.

An example uses what its module has, and a few names that mean the same in all docstrings; they are said here alone.
"""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import jax  # noqa: E402  (torch may not be there)
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402

import poptorch  # noqa: E402
import popxl  # noqa: E402
from popxl import ops  # noqa: E402

LIGHTNING = ("poptorch.lightning", "poptorch.run.lightning_steps")
"""Modules with an import of seconds, which has no place in the collection of tests; and the extra may be missing."""
MODULES = [
    "poptorch",
    *(m.name for m in walk_packages(poptorch.__path__, "poptorch.") if m.name != "poptorch.__main__"),
]


def examples_of(*modules: str) -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    return [found for name in modules for found in finder.find(import_module(name), globs={}) if found.examples]


EXAMPLES = [
    pytest.param(found, id=found.name) for found in examples_of(*(name for name in MODULES if name not in LIGHTNING))
]


def names() -> dict[str, Any]:
    """What examples may use without saying what it is."""
    module = torch.nn.Linear(3, 2)
    return {
        **{"torch": torch, "np": np, "jax": jax, "jnp": jnp, "popxl": popxl, "ops": ops, "poptorch": poptorch},
        "module": module,
        "model": poptorch.inferenceModel(torch.nn.Linear(3, 2)),
        "params": list(module.parameters()),
        "x": torch.ones(4, 3),
        "output": torch.ones(4, 2),
        "target": torch.zeros(4, 2),
    }


@pytest.mark.parametrize("example", EXAMPLES)
def test_example(example: doctest.DocTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some write files
    home = max((name for name in MODULES if f"{example.name}.".startswith(f"{name}.")), key=len)
    example.globs = vars(import_module(home)) | names()
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert not runner.run(example, out=said.append).failed, "".join(said)


def test_examples_of_lightning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lightning")
    for example in examples_of(*LIGHTNING):
        test_example(example, tmp_path, monkeypatch)


def test_there_are_examples() -> None:
    assert len(EXAMPLES) > 70
