"""Files and directories that are written whole or not at all: what is left behind, and by whom it is removed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

import popxl
from popxl.base.atomic_files import (
    clean_stale_temporaries,
    parsed,
    replace_file,
    temporary_sibling,
    verify_digest,
    with_digest,
)
from popxl.base.pages import Picture
from popxl_addons import array_files, checkpoint

KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
import popxl
from popxl_addons import array_files, checkpoint

folder, what, step = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])

def kill(event, args):
    global step
    if event == "os.rename":
        step -= 1
        if step < 0:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(kill)
if what == "ir":
    ir = popxl.Ir()
    with ir.main_graph:
        popxl.variable(2.0, name="v") + 1
    ir.save(folder / "program")
else:
    with checkpoint.new_checkpoint(str(folder / "c")) as directory:
        array_files.write_arrays(directory, {"v": np.full(2, 2.0)}, "safetensors")
"""


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def program(value: float) -> popxl.Ir:
    ir = popxl.Ir()
    with ir.main_graph:
        popxl.variable(value, popxl.float32, name="v") + 1
    return ir


def loaded(path: Path) -> float:
    return float(popxl.Ir.load(path).main_graph.variables[0].data)


def killed(folder: Path, what: str, step: int) -> None:
    """A process that writes something, and is killed at its rename of this number."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", KILLED, str(folder), what, str(step)], check=False)
    assert done.returncode == -9


@pytest.mark.thorough
def test_a_save_of_a_program_that_is_killed(tmp_path: Path) -> None:
    """The old one is there. The next save removes what was left."""
    program(1.0).save(tmp_path / "program")
    killed(tmp_path, "ir", 0)
    assert len(names(tmp_path)) == 2 and loaded(tmp_path / "program") == 1
    program(3.0).save(tmp_path / "program")
    assert len(names(tmp_path)) == 1 and loaded(tmp_path / "program") == 3


@pytest.mark.thorough
def test_a_checkpoint_that_is_killed(tmp_path: Path) -> None:
    def write(value: float) -> None:
        with checkpoint.new_checkpoint(str(tmp_path / "c")) as directory:
            array_files.write_arrays(directory, {"v": np.full(2, value)}, "safetensors")

    write(1.0)
    killed(tmp_path, "checkpoint", 0)
    assert len(names(tmp_path)) == 2
    write(3.0)
    assert names(tmp_path) == ["c"] and names(tmp_path / "c") == ["checksums.json", "model.safetensors"]


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir])
def test_what_somebody_still_writes_is_left_alone(tmp_path: Path, make) -> None:
    with temporary_sibling(tmp_path / "program", make) as draft:
        program(1.0).save(tmp_path / "program")
        assert draft.exists()
    assert not draft.exists()
    make(draft)  # as if its process was gone
    program(2.0).save(tmp_path / "program")
    assert not draft.exists() and names(tmp_path) == ["program"]


def test_names_that_are_patterns(tmp_path: Path) -> None:
    """Only what is one's own is removed."""
    others = [f".program-{'a' * 32}", f".{'x'}-{'a' * 31}", f"[px]-{'a' * 32}", f"p-{'a' * 16}.safetensors"]
    for name in others:
        (tmp_path / name).touch()
    program(1.0).save(tmp_path / "[px]")
    assert len(names(tmp_path)) == len(others) + 1
    program(2.0).save(tmp_path / "[px]")
    assert {*others} < {*names(tmp_path)} and len(names(tmp_path)) == len(others) + 1


def test_a_folder_that_is_missing(tmp_path: Path) -> None:
    with popxl.Ir().main_graph as main:
        popxl.variable(1.0)
    with pytest.raises(FileNotFoundError, match="There is no such folder to write to; make it before: '.*/missing'"):
        main.ir.save(tmp_path / "missing" / "program.popxl")


def test_a_failure_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    replace_file(path, b"old")
    with pytest.raises(ZeroDivisionError):
        replace_file(path, lambda draft: 1 // 0)
    assert path.read_bytes() == b"old" and names(tmp_path) == ["file"]


class Interrupted(BaseException):
    """What a signal's handler raises."""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # Python closes its files then
def test_an_interruption_anywhere_leaves_nothing_for_long(tmp_path: Path) -> None:
    """Wherever Python looks for signals, which is when calls begin and when they have ended."""

    def interrupt(frame: FrameType, event: str, _: object) -> None:
        nonlocal steps
        if event in ("return", "c_call") or frame.f_code.co_name == "__del__":
            return
        steps += 1
        if steps == last:
            sys.setprofile(None)
            raise Interrupted

    path, last, steps = tmp_path / "file", 0, 0
    before = sys.getprofile()
    replace_file(path, b"whole")
    while steps == last:
        last, steps = last + 1, 0
        content = b"%d" % last
        try:
            sys.setprofile(interrupt)
            replace_file(path, content)
        except Interrupted:
            pass
        finally:
            sys.setprofile(before)
        assert path.read_bytes() in (b"whole", content)
        clean_stale_temporaries([path])
        assert not path.exists(), last  # nobody has it locked
        replace_file(path, b"whole")
        assert names(tmp_path) == ["file"], last
    assert last > 100  # or nothing has been interrupted


def test_links_and_pipes(tmp_path: Path) -> None:
    """What a link leads to is replaced; a pipe gets what is written."""
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there/picture.svg")
    Picture("<svg/>").save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "there/picture.svg").read_text() == "<svg/>"
    reading, writing = os.pipe()
    Picture("<svg/>").save(f"/dev/fd/{writing}")
    os.close(writing)
    with open(reading, encoding="utf-8") as file:
        assert file.read() == "<svg/>"


def test_sealed_texts() -> None:
    text = with_digest(b'{"digest": "", "a": [1, "\\"digest\\": \\"\\""]}')
    assert verify_digest(text, parsed(text)["digest"]) and not verify_digest(text + b" ", parsed(text)["digest"])
    assert parsed(text)["a"] == [1, '"digest": ""']


@pytest.mark.parametrize("text", [b'{"a": 1, "a": 2}', b"[NaN]", b"[" * 10**5, b"\xff", b"{", b""])
def test_texts_that_are_no_json(text: bytes) -> None:
    with pytest.raises(ValueError, match="twice among a, a|NaN is no number|too deeply|utf-8|is no JSON"):
        parsed(text)
