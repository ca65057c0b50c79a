"""The examples in README.md do what README.md says."""

import contextlib
import io
import re
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


EXAMPLES = re.findall(r"```python\n(.*?)```.*?```text\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize(("program", "shown"), EXAMPLES, ids=range(len(EXAMPLES)))
def test_an_example_prints_what_is_shown(program: str, shown: str) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(program, "README.md", "exec"), {})
    graph, numbers = printed.getvalue().split("\n[", 1)
    shown_graph, shown_numbers = shown.split("\n[", 1)
    assert graph == shown_graph
    assert [round(float(x), 5) for x in re.findall(r"[0-9.]+", numbers)] == [
        round(float(x), 5) for x in re.findall(r"[0-9.]+", shown_numbers)
    ]


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == 3


def test_a_pytorch_model() -> None:
    pytest.importorskip("torch")
    (program,) = re.findall(r"```python\n(import torch\n.*?)```", README, re.DOTALL)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(program, "README.md", "exec"), {})
    assert printed.getvalue() == "torch.Size([4, 10])\n"
