"""Numbers of a training in TensorBoard's files and in Weights & Biases."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons import Metrics, TaskSession


@pytest.fixture
def session(ir: popxl.Ir) -> popxl.Session:
    """Doubles a variable, and stores it, and then its elements."""
    with ir.main_graph, popxl.in_sequence():
        w = popxl.variable([1.0, 2.0, np.inf], popxl.bfloat16, name="layer.w")
        ops.scaled_add_(w, w)
        ops.host_store(popxl.d2h_stream((3,), popxl.bfloat16, "all"), w)
        ops.host_store(popxl.d2h_stream((), popxl.bfloat16, "first"), ops.max(w[:1]))
    return popxl.Session(ir)


def events(folder: Path) -> Iterator[Any]:
    """What is in the event files of a folder: records of a length, its checksum, an event, and its checksum."""
    from tensorboardX.proto.event_pb2 import Event

    for path in folder.iterdir():
        content = path.read_bytes()
        while content:
            (length,) = struct.unpack("<Q", content[:8])
            yield Event.FromString(content[12 : 12 + length])
            content = content[16 + length :]


def test_tensorboard(session: popxl.Session, tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")  # the extra `tensorboard`
    with Metrics(tmp_path / "run") as metrics, session:
        for step in range(2):
            outputs = session.run()
            first = {s: array for s, array in outputs.items() if s.tensor.name == "first"}
            metrics.log(first, step)  # type: ignore[arg-type]
        metrics.log({"loss": [1.0, 4.0]}, 5)
        metrics.variables(session, 6)
        metrics.histograms({"nothing": np.full(2, np.nan)}, 7)
    found = [(e.step, v.tag, v) for e in events(tmp_path / "run") for v in e.summary.value]
    scalars = [(step, tag, v.simple_value) for step, tag, v in found if not tag.endswith("histogram")]
    assert scalars == [
        (0, "first", 2.0),
        (1, "first", 4.0),
        (5, "loss", 2.5),
        (6, "layer.w/not_finite", 1.0),
        (7, "nothing/not_finite", 2.0),
    ]
    ((step, tag, value),) = [each for each in found if each[1].endswith("histogram")]
    assert (step, tag, value.histo.num, value.histo.min, value.histo.max) == (6, "layer.w/histogram", 2, 4, 8)


def test_wandb(session: popxl.Session, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[tuple[int, Any]] = []
    package = SimpleNamespace(log=lambda record, step: logged.append((step, record)), Histogram=np.ndarray.tolist)
    monkeypatch.setitem(sys.modules, "wandb", package)
    with Metrics(wandb=True) as metrics, session:
        metrics.log({"loss": np.float32(0.5)}, 3)
        session.run()
        metrics.variables(session, 4)
    assert logged == [(3, {"loss": 0.5}), (4, {"layer.w:histogram": [2, 4], "layer.w:not_finite": 1})]


def test_variables_of_bytes_and_complex_ones(ir: popxl.Ir, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[Any] = []
    package = SimpleNamespace(log=lambda record, step: logged.append(record), Histogram=np.ndarray.tolist)
    monkeypatch.setitem(sys.modules, "wandb", package)
    with ir.main_graph as main:
        for name, value in {
            "narrow": np.int8([1, 2]),
            "z": np.complex64([3 + 4j, np.inf]),
            "w": np.float32([5]),
        }.items():
            popxl.variable(value, name=name)
        ops.host_store(popxl.d2h_stream((2,), popxl.complex64), main.variables[2] * 1.0)
    state = addons.NamedTensors.pack(["w"], [main.variables[1]])
    with Metrics(wandb=True) as metrics, TaskSession([], main.ir.get_all_d2h_streams(), state, ir=ir) as session:
        metrics.variables(session, 0)
        session.wandb_variable_histograms(0)
    expected = {"narrow:histogram": [1, 2], "narrow:not_finite": 0}
    expected |= {"z:histogram": [5.0], "z:not_finite": 1, "w:histogram": [5.0], "w:not_finite": 0}
    assert logged == [expected] * 2


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere to log to"):
        Metrics()
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace())
    with pytest.raises(ValueError, match="`loss` is an array without elements"):
        Metrics(wandb=True).log({"loss": []}, 0)
    with pytest.raises(TypeError, match=r"Metrics.log: `loss` is None \(NoneType\); expected a number"):
        Metrics(wandb=True).log({"loss": None}, 0)
    with pytest.raises(TypeError, match=r"`loss` is 1j \(complex\); expected a number, or an array: real ones"):
        Metrics(wandb=True).log({"loss": 1j}, 0)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ImportError, match="Install it with `pip install tensorboardX`"):
        Metrics(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match="Install it with `pip install wandb`"):
        Metrics(wandb=True)
    assert not list(tmp_path.iterdir())
