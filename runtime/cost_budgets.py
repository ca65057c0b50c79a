"""Reviewed budgets of a program's cost: `popxl.testing.assert_costs`, and files that `popxl diff` compares."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import ValidationError

from popxl.errors import PopxlError
from runtime.costs.changes import changes_of
from runtime.costs.cost import Cost
from runtime.jax_analysis import Analysis
from runtime.session import Session

REWRITE = "POPXL_REWRITE_COSTS"
"""Environment variable: write files of budgets anew instead of comparing with them."""


def assert_costs(program: Session | Analysis | Cost, path: str | os.PathLike[str]) -> None:
    """Assert that the costs of a program match a reviewed file of budgets, compiled for the same machine.

    Sizes, bytes, operations, kernels and collectives must be equal; these are read off the compiled code, and the same
    on any machine with the same versions of JAX and its compilers. The file is written where the environment variable
    `POPXL_REWRITE_COSTS` is set to 1; review what changed in it.

    Args:
        program: a session, a result of `popxl.analyze`, or the cost itself.
        path: the file of budgets.

    Raises:
        AssertionError: if anything differs; the message lists each difference.
        FileNotFoundError: if there is no such file, and it is not to be written.
        PopxlError: if the file holds no cost.

    Example:
        >>> session = popxl.Session(ir)
        >>> session.cost().save_budget("costs.json")  # and review it
        >>> popxl.testing.assert_costs(session, "costs.json")
    """
    cost = _cost_of(program)
    path = Path(path)
    if os.environ.get(REWRITE) == "1":
        cost.save_budget(path)
        return
    if not path.is_file():
        raise FileNotFoundError(
            f"assert_costs: there is no file {os.fspath(path)!r}; set the environment variable {REWRITE}=1 once to "
            "write it."
        )
    if changes := changes_of(read_budget(path), cost):
        raise AssertionError(
            f"{cost.name} does not cost what {os.fspath(path)} says:\n"
            + "\n".join(f"  {change}" for change in changes.changes)
            + f"\nSet {REWRITE}=1 to write the file anew, and review it."
        )


def _cost_of(program: Session | Analysis | Cost) -> Cost:
    if isinstance(program, Session):
        return program.cost()
    if isinstance(program, Analysis):
        return program.cost
    if isinstance(program, Cost):
        return program
    raise TypeError(
        "assert_costs: `program` must be a session, an analysis of `popxl.analyze` or a cost; got "
        f"{program!r} ({type(program).__name__})."
    )


def read_budget(path: Path) -> Cost:
    """Read a cost from a file that `Cost.save_budget` wrote.

    Raises:
        PopxlError: if the file holds no cost.
    """
    try:
        return Cost.model_validate_json(path.read_bytes())
    except ValidationError as problem:
        raise PopxlError(
            f"{os.fspath(path)!r} holds no cost of a program, as `session.cost().save_budget(...)` writes it: "
            f"{problem.errors()[0]['msg']}."
        ) from problem
