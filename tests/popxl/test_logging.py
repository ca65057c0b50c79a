"""What is logged, at which level, and where it goes: asked of the environment at each message."""

import json
import logging

import jax
import pytest

import popart
import popxl
from popxl import ops
from popxl.base import log
from runtime import jax_private


@pytest.fixture(autouse=True)
def _as_at_the_start(monkeypatch):
    """What a test sets holds for the rest of the process; here for the rest of the test."""
    monkeypatch.setattr(log, "_chosen", {})
    for name in ("POPART_LOG_LEVEL", "POPART_LOG_DEST", "POPART_LOG_CONFIG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def errors(capfd):
    """The lines on standard error since the last call."""
    return lambda: capfd.readouterr().err.splitlines()


def counter():
    ir = popxl.Ir()
    with ir.main_graph:
        ops.add_(popxl.variable(1.0, name="v"), popxl.constant(1.0))
        popxl.variable(1.0, name="w", retrieval_mode="all_replicas") + 1
    return ir


def used():
    with popxl.Session(counter()) as session:
        session.run()


# Levels ---------------------------------------------------------------------------------------------------------------


def test_nothing_is_said_at_first(errors):
    used()
    popart.getLogger().info("hidden")
    assert errors() == []
    popart.getLogger().warn("shown")
    assert len(errors()) == 1


@pytest.mark.parametrize(("version", "said"), [("0.10.2", 0), ("0.12.9", 0), ("0.13.0", 1), ("1.0.0rc1", 1)])
def test_a_jax_that_is_newer_than_what_was_tested_is_told_once(version, said, errors, monkeypatch):
    jax_private.warn_if_untested.cache_clear()
    monkeypatch.setattr(jax, "__version__", version)
    for _ in range(2):
        popxl.Session(counter())
    shown = [line for line in errors() if f"This is JAX {version}; popxl has been tested with versions up to" in line]
    assert len(shown) == said


@pytest.mark.parametrize("level", ["TRACE", "DEBUG", "INFO", "WARN", "ERR", "OFF"])
def test_the_level_of_the_environment_holds_at_once(level, errors, monkeypatch):
    monkeypatch.setenv("POPART_LOG_LEVEL", level.lower())
    logger = popart.getLogger("session")
    for say in (logger.trace, logger.debug, logger.info, logger.warn, logger.error):
        say("a message")
    names = ["trace", "debug", "info", "warn", "err", "off"]
    assert len(errors()) == 5 - names.index(level.lower())


def test_a_level_that_is_set_goes_before_the_environment(errors, monkeypatch):
    popart.getLogger().setLevel("INFO")
    monkeypatch.setenv("POPART_LOG_LEVEL", "ERR")
    popart.getLogger("session").info("shown")
    popart.getLogger("session").setLevel("OFF")
    popart.getLogger("session").critical("hidden")
    popart.getLogger("devicex").info("shown")
    popart.getLogger("all").setLevel("INFO")  # all of them
    popart.getLogger("session").info("shown")
    assert [line.split()[-1] for line in errors()] == ["shown"] * 3


def test_levels_of_modules_in_a_file(errors, monkeypatch, tmp_path):
    (tmp_path / "levels.json").write_text(json.dumps({"devicex": "DEBUG"}))
    monkeypatch.setenv("POPART_LOG_CONFIG", str(tmp_path / "levels.json"))
    used()
    lines = errors()
    assert lines and all("popart:devicex" in line for line in lines)


def test_unknown_levels(monkeypatch):
    with pytest.raises(ValueError, match="LOUD.*TRACE, DEBUG"):
        popart.getLogger().setLevel("LOUD")
    monkeypatch.setenv("POPART_LOG_LEVEL", "LOUD")
    with pytest.raises(ValueError, match="POPART_LOG_LEVEL is 'LOUD'"):
        popart.getLogger().warn("a message")


# Where to -------------------------------------------------------------------------------------------------------------


def test_a_file(errors, monkeypatch, tmp_path):
    monkeypatch.setenv("POPART_LOG_DEST", str(tmp_path / "log"))
    for message in ("first", "second"):
        popart.getLogger().warn(message)
    assert [line.split()[-1] for line in (tmp_path / "log").read_text().splitlines()] == ["first", "second"]
    assert errors() == []


def test_standard_output(capfd, monkeypatch):
    monkeypatch.setenv("POPART_LOG_DEST", "stdout")
    print("before")
    popart.getLogger().warn("the message")
    print("after")
    out, err = capfd.readouterr()
    assert [line.split()[-1] for line in out.splitlines()] == ["before", "message", "after"] and err == ""


class Listener(logging.Handler):
    """Remembers what a logger says while the block runs."""

    def __init__(self, logger):
        super().__init__()
        self.logger, self.heard = logger, []

    def emit(self, record):
        self.heard.append((record.name, record.getMessage()))

    def __enter__(self):
        self.logger.addHandler(self)
        return self.heard

    def __exit__(self, *_):
        self.logger.removeHandler(self)


def test_the_root_logger_hears_nothing():
    with Listener(logging.getLogger()) as heard:
        popart.getLogger().warn("a message")
    assert heard == []


def test_handlers_of_others():
    with Listener(logging.getLogger("popart")) as heard:
        popart.getLogger("session").warn("100 % of it")
    assert heard == [("popart.session", "100 % of it")]


# Messages -------------------------------------------------------------------------------------------------------------


def having(lines, fragment):
    return [line for line in lines if fragment in line]


def test_messages_of_a_session(errors, monkeypatch):
    monkeypatch.setenv("POPART_LOG_LEVEL", "DEBUG")  # after the import, and before the session
    session = popxl.Session(counter())
    assert len(having(errors(), "Starting compilation")) == 1
    with session:
        assert len(having(errors(), "Writing weights from host, ")) == 1
        session.run()
        assert errors() == []
        session.weights_to_host()
        assert len(having(errors(), "Writing weights to host complete.")) == 1
        session.weights_from_host()
        assert len(having(errors(), "Writing weights from host, ")) == 1
    assert len(having(errors(), "Writing weights to host complete.")) == 1


def test_variables_are_named_on_the_first_upload(errors, monkeypatch):
    monkeypatch.setenv("POPART_LOG_LEVEL", "TRACE")
    fragment = "Reusing TensorData for d2hWeightBuffer of tensor "
    with popxl.Session(counter()) as session:
        assert [line.split(fragment)[1] for line in having(errors(), fragment)] == ["v"]
        session.weights_from_host()
    assert not having(errors(), fragment)


def test_two_cache_folders(errors, monkeypatch):
    monkeypatch.setenv("POPXL_CACHE_DIR", "/one")
    assert (popxl.Ir().options.cachePath, errors()) == ("/one", [])
    monkeypatch.setenv("POPART_CACHE_DIR", "/two")
    options = popxl.Ir().options
    assert (options.cachePath, options.enableEngineCaching) == ("/one", True)
    (warning,) = errors()
    assert "[warn]" in warning and "/two" in warning
    monkeypatch.delenv("POPXL_CACHE_DIR")
    assert (popxl.Ir().options.cachePath, errors()) == ("/two", [])
    monkeypatch.delenv("POPART_CACHE_DIR")
    assert not popxl.Ir().options.enableEngineCaching
