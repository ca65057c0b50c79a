"""The example in README.md does what README.md says."""

import contextlib
import io
import re
from pathlib import Path

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def test_the_example_prints_what_is_shown() -> None:
    program, shown = re.findall(r"```(?:python|text)\n(.*?)```", README, re.DOTALL)[:2]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(program, "README.md", "exec"), {})
    graph, numbers = printed.getvalue().split("\n[", 1)
    shown_graph, shown_numbers = shown.split("\n[", 1)
    assert graph == shown_graph
    assert [round(float(x), 5) for x in re.findall(r"[0-9.]+", numbers)] == [
        round(float(x), 5) for x in re.findall(r"[0-9.]+", shown_numbers)
    ]
