"""Executables of a compiled program: numbers of runs, and HLO texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from runtime.plan.structure import Structure
from runtime.program.compiled import CompiledProgram


def check_whole(program: CompiledProgram, what: str) -> None:
    """Raise `NotImplementedError` for a program with stages compiled by other processes."""
    if program.layout.stages is not None:
        raise NotImplementedError(
            f"Session.{what}: this process has compiled the IPUs {program.layout.own_ipus} of the program only, and "
            "other processes the others. Ask a session for a target that is not here, or one of a single process."
        )


def texts(program: CompiledProgram) -> dict[str, str]:
    """HLO text of each executable, keyed by its purpose. See `Session.hlo`."""
    plan = program.plan
    if plan is None:
        return {"the program": program.executable.as_text()}
    text_of_purpose: dict[str, str] = {}
    for ipu, pair in plan.streams.ends.items():
        for name, executable in zip(("feeds", "fetches"), pair, strict=True):
            purpose = f"{name} of IPU {ipu}" if len(program.layout.ipus) > 1 else name
            text_of_purpose[_unused(purpose, text_of_purpose)] = executable.as_text()
    first = {segment.structure: segment.name for segment in reversed(plan.segments)}
    for structure in plan.structures:
        text_of_purpose[_unused(first[structure], text_of_purpose)] = structure.executable.as_text()
    return text_of_purpose


def _unused(name: str, names: Mapping[str, object]) -> str:
    """Unused variant of a name: `name` itself, or `name` with a number."""
    number = 1
    while (numbered := f"{name} ({number})" if number > 1 else name) in names:
        number += 1
    return numbered


def executables_of(program: CompiledProgram) -> Iterator[tuple[Structure | None, Any, int]]:
    """Executables, each with its segment structure (`None` outside of segments) and its executions per run."""
    plan = program.plan
    if plan is None:
        yield None, program.executable, 1
        return
    yield from ((None, executable, 1) for pair in plan.streams.ends.values() for executable in pair)
    yield from ((structure, structure.executable, times) for structure, times in plan.runs.items())
