"""Prints that the environment switches on."""

import importlib
import os
import subprocess
import sys

import pytest

import popxl
from popxl_addons import debugging

PROGRAM = """
import popxl
from popxl_addons.debugging import print_tensor, print_text

ir = popxl.Ir()
with ir.main_graph, popxl.in_sequence():
    x = popxl.variable([1.0, 2.0], name="x")
    same = print_tensor(x, "by default") is x
    for level in ("TRACE", "DEBUG", "INFO", "WARN"):
        print_tensor(x, title=f"tensor {level}", level=level)
        print_text(f"text {level}", level=level)
        print_text(f"number {level}", popxl.constant(3), level)
    y = x + 1.0
with popxl.Session(ir, "cpu") as session:
    session.run()
print(same)
"""
LEVELS = ["TRACE", "DEBUG", "INFO", "WARN"]


def run(level):
    environment = {**os.environ, "MODEL_LOG_LEVEL": level} if level else dict(os.environ)
    if not level:
        environment.pop("MODEL_LOG_LEVEL", None)
    return subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)


@pytest.mark.thorough(but_each=6)
@pytest.mark.parametrize("level", [None, *LEVELS])
def test_what_is_printed(level):
    done = run(level)
    assert done.returncode == 0, done.stderr
    shown = LEVELS[LEVELS.index(level or "INFO") :]
    expected = ["by default: [1. 2.]"] if "DEBUG" in shown else []
    for each in shown:
        expected += [f"tensor {each}: [1. 2.]", f"text {each}: []", f"number {each}: 3"]
    assert [line for line in done.stderr.splitlines() if ": " in line] == expected
    assert done.stdout.strip() == str("DEBUG" not in shown)


@pytest.mark.thorough
def test_an_unknown_level_in_the_environment():
    done = run("LOUD")
    assert done.returncode != 0
    assert "KeyError" in done.stderr and "MODEL_LOG_LEVEL is 'LOUD'; expected one of ['TRACE'," in done.stderr


def test_the_environment_is_read_once(monkeypatch):
    monkeypatch.setenv("MODEL_LOG_LEVEL", "TRACE")
    before = debugging.MODEL_LOG_LEVEL
    importlib.import_module("popxl_addons.debugging")
    assert debugging.MODEL_LOG_LEVEL == before
    assert debugging.LEVELS[before] == debugging.MODEL_LOG_LEVEL_VAL


def test_an_unknown_level(ir):
    x = popxl.variable([1.0, 2.0], name="x")
    with pytest.raises(KeyError, match="`level` is 'LOUD'"):
        debugging.print_tensor(x, level="LOUD")
    with pytest.raises(KeyError, match="`level` is 'LOUD'"):
        debugging.print_text("text", level="LOUD")
    assert not ir.main_graph.ops
