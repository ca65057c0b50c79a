"""Tests as programs to compile: with `--target`, all sessions are for a machine that is not here.

    python -m pytest -p tests.targets.plugin --target "tpu v5e:2x4" tests/popxl/test_conditional.py

A test goes as far as its first run, and is skipped there: what it would have run has been compiled. Numbers are not
compared. Tests that are marked `here` are left out: they are about CPUs, or read back what was saved.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import popxl
from popxl.ir import Ir
from runtime.machine import NothingRuns, TargetMachine
from runtime.program.compiled import CompiledProgram, Precompiled
from runtime.targets.devices import Device
from runtime.targets.offline import Target

PROGRAMS = "programs compiled"
REACHED = "reached a run"


class Counting(TargetMachine):
    """Notes what it compiles.

    Attributes:
        compiled: how many programs it has compiled for the present test.
    """

    def __init__(self, target: Target) -> None:
        super().__init__(target)
        self.compiled = 0

    def program(self, ir: Ir, device: Device, precompiled: Precompiled | None) -> CompiledProgram:
        program = super().program(ir, device, precompiled)
        self.compiled += 1
        return program


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--target", metavar="MACHINE", help="compile all sessions for it, and run nothing")
    parser.addoption(
        "--target-results", metavar="FILE", type=Path, help="write what became of the tests there, as JSON"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("target") is not None:
        items[:] = [item for item in items if item.get_closest_marker("here") is None]
        for item in items:
            item.add_marker("compiled_whole")  # as users have it


def pytest_configure(config: pytest.Config) -> None:
    if (description := config.getoption("target")) is not None:
        target = popxl.Target(description)
        target.devices  # noqa: B018  # its compiler is loaded, or asked for, once
        popxl.Session.machine = config.stash[MACHINE] = Counting(target)
        config.pluginmanager.register(Results(), "results of targets")


MACHINE = pytest.StashKey[Counting]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test that is ended because something would have to be run has done its part."""
    return (yield from counted(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """So has one whose fixtures are."""
    return (yield from counted(item))


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any, request: Any) -> Iterator[Any]:
    """A fixture that ends so does for all of its tests: pytest remembers only what an `Exception` is."""
    try:
        return (yield)
    except NothingRuns as stopped:
        fixturedef.cached_result = (None, fixturedef.cache_key(request), (stopped, stopped.__traceback__))
        raise


def counted(item: pytest.Item) -> Iterator[None]:
    """What a wrapper of a part of a test does."""
    machine = item.config.stash.get(MACHINE, None)
    if machine is None:
        return (yield)
    machine.compiled = 0
    reached = False
    try:
        yield
    except NothingRuns:
        reached = True
    item.user_properties += [(PROGRAMS, machine.compiled), (REACHED, reached)]
    if reached:
        pytest.skip("It would have to be run.")


class Results:
    """What became of the tests.

    Attributes:
        found: how many programs were compiled; how many tests there were, and how many of them reached a run; and what
            those say that failed.
    """

    def __init__(self) -> None:
        self.found: dict[str, Any] = {"programs": 0, "reached": 0, "tests": 0, "failed": {}}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":  # the last; it has what all parts told
            self.found["tests"] += 1
            told = report.user_properties
            self.found["programs"] += sum(int(str(value)) for name, value in told if name == PROGRAMS)
            self.found["reached"] += any(bool(value) for name, value in told if name == REACHED)
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.found["failed"][report.nodeid] = str(report.longrepr) if crash is None else crash.message


def pytest_sessionfinish(session: pytest.Session) -> None:
    results = session.config.pluginmanager.get_plugin("results of targets")
    file = session.config.getoption("target_results")
    if isinstance(results, Results) and file is not None:
        file.write_text(json.dumps(results.found), encoding="utf-8")
