"""What errors say, the log, the enumerations' values, and spans for profiles."""

# ruff: noqa: E402 - poptorch needs torch

from __future__ import annotations

import copy
import json
import logging
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import poptorch
from poptorch import enums, poptorch_core
from poptorch._impl import createPoptorchError
from poptorch.base import logging_
from poptorch.base.logging_ import logger, setLogLevel, trace
from poptorch.errors import Error, RecoverableError, UnrecoverableError
from poptorch.profiling import Channel

# Errors


def test_errors() -> None:
    error = createPoptorchError("No loss.")
    assert (error.type, error.message, error.location) == ("poptorch_py_error", "No loss.", "")
    assert str(error) == "'poptorch_py_error': No loss." and isinstance(error, Error)
    assert poptorch_core.Error is Error
    placed = Error("Overflow.", "device_error", "step 3")
    assert str(placed) == "'device_error': Overflow." and placed.location == "step 3"


def test_shapes_that_do_not_fit_are_an_error_and_not_logged_too(caplog: pytest.LogCaptureFixture) -> None:
    model = poptorch.inferenceModel(torch.nn.Linear(4, 3))
    with caplog.at_level(logging.DEBUG), pytest.raises(RuntimeError, match=r"\[2, 5\] X \[4, 3\]"):
        model(torch.zeros(2, 5))
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert not logging.getLogger("torch._subclasses.fake_tensor").disabled


class Refusing(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return self.checked(torch.nn.functional.relu(x))

    def checked(self, x: Any) -> Any:
        if x.shape[0] == 2:
            raise ValueError("two rows")
        return x @ x


def test_tracebacks_begin_in_the_model() -> None:
    """The frames between a call and the model's code are left out, unless the log is for developers; not those after
    it."""

    def frames(rows: int) -> list[str]:
        with pytest.raises((ValueError, RuntimeError)) as error:
            poptorch.inferenceModel(Refusing().eval())(torch.zeros(rows, 5))
        return [frame.name for frame in traceback.extract_tb(error.value.__traceback__)]

    assert frames(2) == ["frames", "__call__", "in_span", "compile", "forward", "checked"]
    of_an_op = frames(3)
    assert of_an_op[3:6] == ["compile", "forward", "checked"] and len(of_an_op) > 6
    level = logger.level
    try:
        setLogLevel("DEBUG")
        assert "compiled_model" in frames(2)
    finally:
        logger.setLevel(level)


def test_errors_of_the_device() -> None:
    error = RecoverableError("Lost.", "IPU_RESET")
    assert isinstance(error, Error) and error.recovery_action == "IPU_RESET"
    assert isinstance(UnrecoverableError("Gone."), Error)
    for made in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(made) is RecoverableError and vars(made) == vars(error) and str(made) == str(error)
    other = pickle.loads(pickle.dumps(Error("Overflow.", "device_error", "step 3")))
    assert (other.message, other.type, other.location) == ("Overflow.", "device_error", "step 3")


# Log


@pytest.fixture(autouse=True)
def _level() -> Iterator[None]:
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.mark.parametrize(
    "level, number",
    [
        ("TRACE_ALL", 5),
        ("TRACE", 5),
        ("DEBUG", logging.DEBUG),
        ("DEBUG_IR", logging.DEBUG),
        ("INFO", logging.INFO),
        ("WARN", logging.WARNING),
        ("ERR", logging.ERROR),
        (0, 5),
        (1, logging.DEBUG),
        (2, logging.INFO),
        (3, logging.WARNING),
        (4, logging.ERROR),
    ],
)
def test_levels(level: str | int, number: int, caplog: pytest.LogCaptureFixture) -> None:
    setLogLevel(level)
    logger.log(number - 1, "too quiet")
    logger.log(number, "loud enough")
    assert caplog.messages == ["loud enough"]


@pytest.mark.parametrize("level", ["OFF", 6])
def test_off(level: str | int, caplog: pytest.LogCaptureFixture) -> None:
    setLogLevel(level)
    logger.critical("anything")
    assert not caplog.messages


def test_trace(caplog: pytest.LogCaptureFixture) -> None:
    trace("not %s", "shown")
    setLogLevel("TRACE")
    trace("%d steps", 3)
    assert caplog.messages == ["3 steps"] and caplog.records[0].levelname == "TRACE"


def test_wrong_levels() -> None:
    with pytest.raises(ValueError, match="Unknown log level: LOUD. .* Level must be one of these, or TRACE_ALL or"):
        setLogLevel("LOUD")
    with pytest.raises(ValueError, match="Invalid log level integer 5; expected one of 0 .TRACE., 1 .DEBUG."):
        setLogLevel(5)


def said(program: str, **environment: str) -> str:
    """What a program writes to stderr; `logger` is that of the module alone, which is quick to run."""
    path = str(Path(logging_.__file__))
    return subprocess.run(
        [sys.executable, "-c", f"import runpy\nlogger = runpy.run_path({path!r})['logger']\n{program}"],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    ).stderr


def test_the_level_in_the_environment() -> None:
    program = "logger.debug('details'); logger.warning('look')"
    shown = said(program, POPTORCH_LOG_LEVEL="")
    assert "[poptorch::python] [WARNING] look" in shown and "details" not in shown
    assert "[poptorch::python] [DEBUG] details" in said(program, POPTORCH_LOG_LEVEL="DEBUG")
    assert "details" in said(program, POPTORCH_LOG_LEVEL="1")
    assert not said(program, POPTORCH_LOG_LEVEL="OFF")
    wrong = said(program, POPTORCH_LOG_LEVEL="LOUD")
    assert "The environment variable POPTORCH_LOG_LEVEL: Unknown log level: LOUD. Valid values are" in wrong


def test_programs_with_handlers_of_their_own_get_messages_once() -> None:
    shown = said("import logging; logging.basicConfig(format='mine: %(message)s'); logger.warning('look')")
    assert shown == "mine: look\n"


# Enumerations


def test_values() -> None:
    values = {name: [member.value for member in getattr(enums, name)] for name in enums.__all__}
    assert values == {
        "AutoStage": [0, 1],
        "CommGroupType": [0, 1, 2, 3],
        "ConnectionType": [0, 1, 2],
        "DataLoaderMode": [0, 1, 2],
        "HalfFloatCastingBehavior": [0, 1, 2],
        "Liveness": [0, 1, 2, 3],
        "MatMulSerializationMode": ["input_channels", "reducing_dim", "output_channels", "none"],
        "MeanReductionStrategy": [0, 1, 2],
        "MultiConvPlanType": [0, 1],
        "OutputMode": [0, 1, 2, 3, 4],
        "OverlapMode": ["no_overlap", "overlap_accumulation_loop", "overlap_device_iteration_loop"],
        "PartialBatch": [0, 1, 2],
        "ReductionType": [0, 1, 2],
        "SharingStrategy": [0, 1, 2, 3],
        "SyncPattern": [0, 1, 2],
        "VariableRetrievalMode": [0, 2],
    }
    assert [mode.name for mode in enums.OutputMode] == ["Final", "EveryN", "All", "Sum", "Default"]
    assert enums.CommGroupType(2).name == "Orthogonal" and enums.ReductionType(1).name == "Mean"
    assert enums.VariableRetrievalMode.AllReplicas == 2 and enums.ConnectionType.OnDemand == 1


# Spans for profiles


class Reader:
    def __init__(self) -> None:
        self.count = 0

    def read(self, by: int = 1) -> int:
        """Count."""
        self.count += by
        return self.count


def test_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[Any] = []
    channel = Channel("App")
    plain = channel.tracepoint

    def noted(name: str) -> Any:
        entered.append(name)
        return plain(name)

    monkeypatch.setattr(channel, "tracepoint", noted)
    reader = Reader()
    assert channel.instrument(reader, "read") is reader
    assert reader.read(by=2) == 2 and reader.read.__doc__ == "Count."
    assert entered == ["read"] and Reader().read() == 1
    with pytest.raises(AttributeError, match="write"):
        channel.instrument(other := Reader(), "read", "write")
    assert vars(other) == {"count": 0}, "nothing is changed with an error"
    with pytest.raises(KeyError), channel.tracepoint("fails"):
        raise KeyError


@pytest.mark.thorough
def test_spans_show_in_a_profile_of_jax() -> None:
    program = """
import glob, gzip, sys, tempfile, jax
from poptorch.profiling import Channel
with tempfile.TemporaryDirectory() as folder:
    with jax.profiler.trace(folder, create_perfetto_trace=True):
        with Channel("App").tracepoint("load"):
            pass
    found = glob.glob(folder + "/**/perfetto_trace.json.gz", recursive=True)
    sys.stdout.write(gzip.open(found[0], "rt").read())
"""
    shown = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert "App: load" in {event.get("name") for event in json.loads(shown.stdout)["traceEvents"]}


# What losses say


F = torch.nn.functional

WRONG_LABELS = [
    (F.cross_entropy, torch.zeros(3)),
    (F.cross_entropy, torch.zeros(3, dtype=torch.int16)),
    (F.cross_entropy, torch.zeros(3, 1, dtype=torch.long)),
    (F.nll_loss, torch.zeros(3, 4, dtype=torch.long)),
    (F.multi_margin_loss, torch.zeros(2, dtype=torch.long)),
    (F.multilabel_margin_loss, torch.zeros(3, 1, dtype=torch.long)),
    (F.binary_cross_entropy_with_logits, torch.zeros(3, 4, dtype=torch.long)),
    (F.poisson_nll_loss, torch.zeros(3)),
    (F.hinge_embedding_loss, torch.zeros(3)),
    (F.soft_margin_loss, torch.zeros(3)),
    (F.cosine_embedding_loss, torch.zeros(2)),
    (F.ctc_loss, torch.zeros(3, 2, dtype=torch.long)),
]


@pytest.mark.parametrize(
    ("loss", "labels"), WRONG_LABELS, ids=[f"{i}-{row[0].__name__}" for i, row in enumerate(WRONG_LABELS)]
)
def test_wrong_labels_give_the_error_of_the_loss(loss: Any, labels: Any) -> None:
    """Not that of what the loss is made of."""

    def function(x: torch.Tensor, labels: torch.Tensor) -> Any:
        if loss is F.ctc_loss:
            return loss(x[:, None], labels, torch.tensor([3]), torch.tensor([2]))
        return loss(x, x * 2, labels) if loss is F.cosine_embedding_loss else loss(x, labels)

    x = torch.ones(3, 4)
    with pytest.raises(RuntimeError) as expected:
        function(x, labels)
    with pytest.raises(RuntimeError) as found:
        poptorch.inferenceModel(function)(x, labels)
    assert str(found.value) == str(expected.value)


def test_labels_may_be_bytes() -> None:
    x, labels = torch.arange(12.0).reshape(3, 4), torch.tensor([1, 0, 3], dtype=torch.uint8)
    torch.testing.assert_close(poptorch.inferenceModel(F.cross_entropy)(x, labels), F.cross_entropy(x, labels))
