"""Every tutorial runs as a user would run it, from the command line, and prints what its text promises."""

import collections
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.popxl_addons import hugging_face

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
        ["--quick"],
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
        ["--quick"],
        ["A plan: the host runs 19 segments", "Timeline of ", "Accuracy on test set: "],
    ),
    "9_several_processes/several_processes.py": (
        [],
        ["[1] the same weights as one process with whole batches: True", "[0] Accuracy on test set: "],
    ),
    "9_several_processes/one_fails.py": (
        [],
        ["poprun: instance 1 failed with exit code 1; the others are stopped."],
    ),
    "10_pytorch/pytorch.py": (
        [],
        ["the same weights as PyTorch: True", "Accuracy on test set: "],
    ),
    "11_language_model/language_model.py": (
        ["--quick"],
        ["loss in the first step: 4.", "The ", "6. Chips that are not here"],
    ),
    "12_llama/llama.py": (
        [],
        ["the same seed, the same texts: True", "after 120 steps: 3 of 3 lines known"],
    ),
    "13_plan_512_chips/plan.py": (
        [],
        ["drifting variable: mean_token along data", "within the budget: True", "all-reduce"],
    ),
}
"""What to run: its options and what its output holds."""

NEEDED = {"10_pytorch": "torch"}
"""What tutorials need that is not installed with them."""

POPRUN = (sys.executable, "-m", "runtime.poprun", "--num-instances=2", "--num-replicas=4")

LAUNCHERS = {
    "9_several_processes/several_processes.py": POPRUN,
    "9_several_processes/one_fails.py": POPRUN,
}
"""What starts a program, if it is not run by itself."""

FAILING = {"9_several_processes/one_fails.py"}
"""Programs that are to fail."""

MODULES = {
    "12_llama/in_flax.py",
    "1_basic_concepts/model.py",
    "7_jax_and_back/read_digits.py",
    "7_jax_and_back/ternary.py",
    "11_language_model/gpt.py",
    "11_language_model/gpt_in_flax.py",
    "11_language_model/pipeline.py",
}
"""What the programs import, or start."""


@functools.cache
def run(program: str, *options: str, launcher: tuple[str, ...] | None = None) -> subprocess.CompletedProcess[str]:
    launcher = LAUNCHERS.get(program, ()) if launcher is None else launcher
    return subprocess.run(
        [*launcher, sys.executable, "-W", "error", str(TUTORIALS / program), *options],
        env={**os.environ, "PYTHONPATH": str(ROOT)},  # so that the tests need no installation
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_every_tutorial_is_listed() -> None:
    found = {path.relative_to(TUTORIALS).as_posix() for path in TUTORIALS.glob("[0-9]*/*.py")}
    assert found == PROGRAMS.keys() | MODULES, "new tutorials need a row here"


@pytest.mark.parametrize(
    "tutorial",
    [
        pytest.param(tutorial, marks=[pytest.mark.thorough] * (tutorial != "1_basic_concepts"))
        for tutorial in sorted({program.split("/")[0] for program in PROGRAMS})
    ],
)
def test_tutorial(tutorial: str) -> None:
    """Its programs run, and print what they are to, and all that its text shows. (One test, as they take long.)"""
    if tutorial in NEEDED:
        pytest.importorskip(NEEDED[tutorial])
    printed = ""
    for program, (options, expected) in PROGRAMS.items():
        if program.startswith(f"{tutorial}/"):
            done = run(program, *options)
            output = done.stdout + done.stderr
            assert (done.returncode != 0) == (program in FAILING), done.stderr
            assert [text for text in expected if text not in output] == [], output
            printed += output
    shown = re.findall(r"```text\n(.*?)```", (TUTORIALS / tutorial / "README.md").read_text("utf-8"), re.DOTALL)
    assert shown
    said = by_process(printed)
    assert [block for block in shown for who, lines in by_process(block).items() if lines not in said[who]] == []


@pytest.mark.thorough
def test_a_folder_of_ones_own(tmp_path: Path) -> None:
    """GPT-2's, whose queries are a part of a weight, and whose logits have no table of their own; with several ends."""
    config = {**hugging_face.GPT2, "vocab_size": 256, "eos_token_id": [3, 5]}
    hugging_face.write(tmp_path, config, hugging_face.weights_of(config))
    how = ["--weights", str(tmp_path), "--prompt", "ab", "--prompt", "c", "--tokens", "9", "--bfloat16"]
    done = run("12_llama/llama.py", *how)
    assert done.returncode == 0, done.stderr
    for line in (
        "layers.1.attention.query.weight  transformer.h.1.attn.c_attn.weight, part 1 of 3",
        "the same seed, the same texts: True",
    ):
        assert line in done.stdout.splitlines()


@pytest.mark.thorough
def test_prompts_of_ones_own_are_recited_as_well() -> None:
    """More than three, and more tokens than there is room for."""
    prompts = ["Beautiful", "Explicit is", "Simple is", "Complex is"]
    how = [part for prompt in prompts for part in ("--prompt", prompt)]
    done = run("12_llama/llama.py", *how, "--tokens", "1000")
    assert done.returncode == 0, done.stderr
    assert "after 120 steps: 4 of 4 lines known" in done.stdout


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("how", "says"),
    [
        (("--weights", "/nowhere"), "--weights: /nowhere is no folder with a config.json"),
        (("--prompt", ""), "--prompt: expected a text of one character or more"),
    ],
)
def test_wrong_options_of_llama(how: tuple[str, str], says: str) -> None:
    done = run("12_llama/llama.py", *how)
    assert done.returncode == 2 and done.stderr.endswith(f"error: {says}\n")


def by_process(output: str) -> dict[str, str]:
    """The lines of each process, whose number they begin with; those of different processes come in any order."""
    found = collections.defaultdict(str)
    for line in output.splitlines(keepends=True):
        found[re.match(r"(\[\d\] )?", line)[0]] += line
    return found


@pytest.mark.thorough
def test_a_program_for_several_processes_runs_alone() -> None:
    """And learns as much as several together, which print what its text shows."""
    alone = run("9_several_processes/several_processes.py", launcher=())
    assert alone.returncode == 0, alone.stderr
    assert "1 process(es), 2 replicas" in alone.stdout
    shown = (TUTORIALS / "9_several_processes" / "README.md").read_text("utf-8")
    accuracies = [re.search(r"Accuracy on test set: (.*)%", text)[1] for text in (shown, alone.stdout)]
    assert float(accuracies[0]) == pytest.approx(float(accuracies[1]), abs=1)


def test_missing_data_are_a_short_letter() -> None:
    done = run("1_basic_concepts/mnist.py", "--data", str(TUTORIALS))
    assert done.returncode != 0
    assert done.stderr.startswith("mnist.py: MNIST is not complete in ")
    assert "missing train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images" in done.stderr
