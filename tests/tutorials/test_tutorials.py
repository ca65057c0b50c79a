"""Every tutorial runs as a user would run it, from the command line, and prints what its text promises."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
TUTORIALS = ROOT / "tutorials"

PROGRAMS = {
    "1_basic_concepts/concepts.py": (
        [],
        ["the same as NumPy: True", "the same scores: True", "from one to two: one.weight -> two.weight"],
    ),
    "1_basic_concepts/mnist.py": (
        ["--quick"],
        ["160 digits to train with, 80 held back to test with", "Accuracy on test set: "],
    ),
    "2_custom_optimiser/custom_optimiser.py": (
        [],
        ["8 variables, 5 graphs of a step", "accuracy on test set: ", "m in float16 takes note of gradients above"],
    ),
    "3_data_parallelism/data_parallelism.py": (
        [],
        ["replicas: 4, micro-batches on each: 4, the same weights as one with all: True", "Accuracy on test set: "],
    ),
    "4_pipelining/pipelining.py": (
        [],
        ["a pipeline: the same weights as without: True", "Accuracy on test set: "],
    ),
    "5_remote_variables/remote_variables.py": (
        [],
        ["the same as NumPy: True", "the same losses: True", "Accuracy on test set: "],
    ),
    "6_phased_execution/phased_execution.py": (
        [],
        ["each layer adds to the device: ", "the same losses: True", "Accuracy on test set: "],
    ),
    "7_jax_and_back/jax_and_back.py": (
        [],
        [
            "Accuracy on test set: ",
            "the same as before: True",
            "the same program: True",
            "declared here: OpKind[Ternary]",
        ],
    ),
    "8_reading_the_report/reading_the_report.py": (
        [],
        ["A plan: the host runs 22 pieces", "Timeline of ", "Accuracy on test set: "],
    ),
}
"""What to run: its options and what its output holds."""

MODULES = {
    "1_basic_concepts/model.py",
    "7_jax_and_back/read_digits.py",
    "7_jax_and_back/ternary.py",
}
"""What the programs import, or start."""


@functools.cache
def run(program: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", str(TUTORIALS / program), *options],
        env={**os.environ, "PYTHONPATH": str(ROOT)},  # so that the tests need no installation
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_every_tutorial_is_listed() -> None:
    found = {path.relative_to(TUTORIALS).as_posix() for path in TUTORIALS.glob("[0-9]*/*.py")}
    assert found == PROGRAMS.keys() | MODULES, "new tutorials need a row here"


@pytest.mark.parametrize("program", PROGRAMS)
def test_program(program: str) -> None:
    options, expected = PROGRAMS[program]
    done = run(program, *options)
    assert done.returncode == 0, done.stderr
    assert [text for text in expected if text not in done.stdout] == [], done.stdout


@pytest.mark.parametrize("readme", sorted(TUTORIALS.glob("[0-9]*/README.md")), ids=lambda path: path.parent.name)
def test_what_the_text_shows_is_what_is_printed(readme: Path) -> None:
    tutorial = readme.parent.name
    printed = "".join(
        run(program, *options).stdout for program, (options, _) in PROGRAMS.items() if program.startswith(tutorial)
    )
    shown = re.findall(r"```text\n(.*?)```", readme.read_text(encoding="utf-8"), re.DOTALL)
    assert shown
    assert [block for block in shown if block not in printed] == []


def test_missing_data_are_a_short_letter() -> None:
    done = run("1_basic_concepts/mnist.py", "--data", str(TUTORIALS))
    assert done.returncode != 0
    assert done.stderr.startswith("mnist.py: MNIST is not complete in ")
    assert "missing train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images" in done.stderr
