"""Nested work: results and errors go where functions would take them, at any depth."""

import pytest

from popxl.base.trampoline import run_trampoline


def depth(levels):
    return 1 + (yield depth(levels - 1)) if levels else 0


def test_results_are_sent_back():
    assert run_trampoline(depth(3)) == 3
    assert run_trampoline(depth(100_000)) == 100_000


def test_errors_come_out_where_the_work_was_asked_for():
    left = []

    def fails():
        raise ValueError("no")
        yield

    def lets_pass(level):
        try:
            yield fails() if level == 0 else lets_pass(level - 1)
        finally:
            left.append(level)

    def answers():
        try:
            yield lets_pass(2)
        except ValueError as problem:
            return str(problem)

    assert run_trampoline(answers()) == "no"
    assert left == [0, 1, 2]
    with pytest.raises(ValueError, match="^no$"):
        run_trampoline(lets_pass(0))
