"""A fresh program, a short way to run one, and `poprun`."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import popxl
from popxl import ops
from runtime.poprun import main

Run = Callable[..., Any]


@pytest.fixture(autouse=True)
def _quickly_compiled(quickly_compiled: None) -> None:
    """What ops, graphs and sessions mean does not depend on how well it is compiled."""


@pytest.fixture
def ir() -> popxl.Ir:
    return popxl.Ir()


@pytest.fixture
def run() -> Callable[..., list[Any]]:
    """`run(ir, x, y)` runs a program once and returns what `x` and `y` of its main graph are at its end, as lists."""

    def run(ir: popxl.Ir, *tensors: popxl.Tensor, feeds: Any = None) -> list[Any]:
        with ir.main_graph:
            streams = [popxl.d2h_stream(t.shape, t.dtype) for t in tensors]
            for stream, t in zip(streams, tensors, strict=True):
                ops.host_store(stream, t)
        with popxl.Session(ir) as session:
            outputs = session.run(feeds)
        return [np.asarray(outputs[stream]).tolist() for stream in streams]

    return run


@pytest.fixture
def poprun(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`poprun("--num-instances=2", program=text)` runs poprun with a Python program, or with what the arguments say.

    It runs in this process: another one would only take time to start. After `limit` seconds it is stopped.
    """

    def poprun(
        *arguments: str, program: str = "", environment: dict[str, str] | None = None, limit: float = 150.0
    ) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", textwrap.dedent(program)] if program else []
        for name, value in {"PYTHONPATH": str(Path(__file__).parents[2]), **(environment or {})}.items():
            monkeypatch.setenv(name, value)
        stop = threading.Timer(limit, os.kill, (os.getpid(), signal.SIGTERM))
        stop.start()
        try:
            code = main([*arguments, *command])
        except SystemExit as end:
            code = end.code
        finally:
            stop.cancel()
        return subprocess.CompletedProcess(arguments, code, *capfd.readouterr())

    return poprun
