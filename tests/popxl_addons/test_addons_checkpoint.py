"""Checkpoints as files: both formats, nothing that runs code, and whole whatever interrupts the writing."""

import contextlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

import popxl
from popxl.base.atomic_files import ReplacedError
from popxl.errors import UnreadableFileError
from popxl_addons import array_files, checkpoint, sharded_arrays
from popxl_addons.array_munging import shard
from popxl_addons.task_session import initialise_memmap_dir_from_checkpoint
from tests.popxl_addons import killed_training

ARRAYS = {
    "fc.w": np.arange(6, dtype=np.float32).reshape(2, 3),
    "scalar": np.array(3, np.uint32),
    "empty": np.zeros((0, 2), np.float16),
    "flags": np.array([True, False]),
    "columns": np.asfortranarray(np.arange(6.0, dtype=np.float32).reshape(2, 3)),
    "fp8": popxl.utils.host_pow2scale_cast_to_fp8(np.array([1.0, 2.5], np.float32), popxl.float8_143),
    "bf16": np.array([[1.0, 2.5, -3e38]], popxl.bfloat16.as_numpy()),
    "file": np.ones(2, np.float32),  # the name of a parameter of np.savez
}


def write(place, arrays, format="npz", info=None, loader=None):
    with checkpoint.new_checkpoint(str(place)) as directory:
        checkpoint.write_info(directory, info or {"steps": 1})
        array_files.write_arrays(directory, arrays, format)
        if loader is not None:
            (directory / checkpoint.LOADER).write_bytes(loader)


def read(place):
    with checkpoint.open_checkpoint(str(place)) as directory:
        return checkpoint.read_arrays(directory), checkpoint.read_info(directory)


# Formats ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["npz", "safetensors"])
def test_written_and_read(tmp_path, format):
    write(tmp_path / "c", ARRAYS, format, {"steps": 3, "lr": 0.5})
    arrays, info = read(tmp_path / "c")
    assert arrays.keys() == ARRAYS.keys() and info == {"steps": 3, "lr": 0.5}
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(arrays[name], array)
        assert arrays[name].dtype == array.dtype and arrays[name].shape == array.shape


@pytest.mark.parametrize("format", ["npz", "safetensors"])
def test_nothing_to_write(tmp_path, format):
    write(tmp_path / "c", {}, format)
    assert read(tmp_path / "c") == ({}, {"steps": 1})


def test_layout(tmp_path):
    write(tmp_path / "c", ARRAYS)
    assert sorted(os.listdir(tmp_path / "c")) == ["checksums.json", "model", "session_info.json"]
    assert sorted(os.listdir(tmp_path / "c/model")) == sorted(f"{name}.npz" for name in ARRAYS)
    with np.load(tmp_path / "c/model/fc.w.npz", allow_pickle=False) as file:
        assert file.files == ["fc.w"]
    assert json.loads((tmp_path / "c/session_info.json").read_text()) == {"steps": 1}
    write(tmp_path / "s", ARRAYS, "safetensors")
    assert sorted(os.listdir(tmp_path / "s")) == ["checksums.json", "model.safetensors", "session_info.json"]


def test_archives_of_others_are_read(tmp_path):
    (tmp_path / "model").mkdir()
    np.savez(tmp_path / "model/a.npz", a=np.arange(3))
    np.savez_compressed(tmp_path / "model/b.c.npz", **{"b.c": np.arange(4)})
    arrays, info = read(tmp_path)
    assert {name: array.tolist() for name, array in arrays.items()} == {"a": [0, 1, 2], "b.c": [0, 1, 2, 3]}
    assert info == {"steps": 0}


def test_memory_maps_are_copied_as_they_are(tmp_path):
    maps = {name: np.memmap(tmp_path / f"{name}.npy", np.float32, "w+", shape=(3,)) for name in ("u", "v")}
    maps["v"][:] = [1, 2, 3]
    write(tmp_path / "c", {"x.v": maps["v"], "again": maps["v"], "x.u": maps["u"]}, "safetensors")
    assert sorted(os.listdir(tmp_path / "c/model")) == ["u.npy", "v.npy"]
    assert np.fromfile(tmp_path / "c/model/v.npy", np.float32).tolist() == [1, 2, 3]
    assert read(tmp_path / "c")[0] == {}

    (tmp_path / "other").mkdir()
    twin = np.memmap(tmp_path / "other/v.npy", np.float32, "w+", shape=(3,))
    with pytest.raises(ValueError, match=r"memory map of `twin`, .*other/v\.npy, and that of another array"):
        write(tmp_path / "d", {"v": maps["v"], "twin": twin})
    assert sorted(os.listdir(tmp_path)) == ["c", "other", "u.npy", "v.npy"]


# Pieces -------------------------------------------------------------------------------------------------------------


class KeyValueStore(dict):
    """Of processes that follow each other: whatever is looked for has been left."""

    set, get = dict.__setitem__, dict.__getitem__

    def delete(self, folder):
        for name in [name for name in self if name.startswith(f"{folder}/")]:
            del self[name]


def write_in_pieces(place, arrays, format="npz", shapes=None):
    """Two processes write: the second one the middle third of each array, the first one what is around it."""
    notes = KeyValueStore()
    with checkpoint.new_checkpoint(str(place)) as directory:
        checkpoint.write_info(directory, {"steps": 1})
        array_files.write_arrays(directory, {"known to all": np.arange(3)}, format)
        shares = [sharded_arrays.ShardWriter(directory, number, 2, notes) for number in range(2)]
        for number, share in enumerate(shares):
            own = {}
            for name, array in arrays.items():
                flat, third = array.reshape(-1), array.size // 3
                cuts = [third, 2 * third] if number else [0, third, 2 * third, array.size]
                own[name] = [(start, flat[start:stop]) for start, stop in zip(cuts[::2], cuts[1::2], strict=True)]
            share.write(own, format)
        assert shares[0].problems() == [] and not notes
        shapes = shapes or {name: sharded_arrays.ShardSpec(shape=array.shape) for name, array in arrays.items()}
        sharded_arrays.write_index(directory, sharded_arrays.Index(writers=2, arrays=shapes))


@pytest.mark.parametrize("format", ["npz", "safetensors"])
def test_pieces_are_put_together(tmp_path, format):
    write_in_pieces(tmp_path / "c", ARRAYS, format)
    arrays, _ = read(tmp_path / "c")
    assert arrays.pop("known to all").tolist() == [0, 1, 2] and arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(arrays[name], array)
        assert arrays[name].dtype == array.dtype and arrays[name].shape == array.shape
    write(tmp_path / "c", {"a": np.zeros(2)})  # a whole one in its place
    assert sorted(os.listdir(tmp_path / "c")) == ["checksums.json", "model", "session_info.json"]


def test_parts_of_groups_are_joined_along_their_axis(tmp_path):
    table = np.arange(24).reshape(2, 12)
    stacked = np.stack(np.split(table, 3, 1))
    write_in_pieces(tmp_path, {"a": stacked}, shapes={"a": sharded_arrays.ShardSpec(shape=stacked.shape, axis=1)})
    np.testing.assert_array_equal(read(tmp_path)[0]["a"], table)
    with pytest.raises(ValueError, match=r"parts of the shape \(2, 4\) have no axis 2"):
        sharded_arrays.ShardSpec(shape=stacked.shape, axis=2)


@pytest.mark.parametrize("format", ["npz", "safetensors"])
def test_only_the_pieces_that_are_asked_for_are_read(tmp_path, format):
    write_in_pieces(tmp_path, ARRAYS, format)
    with checkpoint.open_checkpoint(str(tmp_path)) as directory:
        arrays = sharded_arrays.arrays_of(directory)
    shutil.rmtree(tmp_path / "pieces/0")
    for name, expected in ARRAYS.items():
        assert arrays[name].shape == expected.shape and arrays[name].dtype == expected.dtype
        third = expected.size // 3
        found = arrays[name].elements(third, 2 * third)
        np.testing.assert_array_equal(found, expected.reshape(-1)[third : 2 * third])
    with pytest.raises(FileNotFoundError):
        arrays["columns"].elements(1, 3)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_elements_of_parts_that_are_cut_anew(axis):
    whole = np.arange(4 * 12 * 6).reshape(4, 12, 6)[:, :: 3 if axis != 1 else 1]
    for stored, parts in [(2, 4), (4, 2), (1, 2), (2, 2)]:
        if whole.shape[axis] % stored or whole.shape[axis] % parts:
            continue
        there = array_files.InMemory(shard(whole, stored, axis))
        joined = sharded_arrays.join(there, axis)
        np.testing.assert_array_equal(sharded_arrays.read_all(joined), whole)
        expected, found = shard(whole, parts, axis), sharded_arrays.split(joined, parts, axis)
        assert found.shape == expected.shape
        for start, stop in [(0, expected.size), (5, 6), (7, 61), (expected.size, expected.size)]:
            np.testing.assert_array_equal(found.elements(start, stop), expected.reshape(-1)[start:stop])


@pytest.mark.parametrize("reader", [0, 1])
def test_who_reads_together_compares_a_share(tmp_path, reader):
    """Of the two files of arrays, the larger one is the first reader's; whatever else there is, is for both."""
    write(tmp_path, {"large": np.zeros(1000), "small": np.zeros(10)})
    for name, is_mine in [
        ("model/large.npz", reader == 0),
        ("model/small.npz", reader == 1),
        ("session_info.json", True),
    ]:
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(bytes([content[0] ^ 1]) + content[1:])
        with pytest.raises(UnreadableFileError) if is_mine else contextlib.nullcontext():
            with checkpoint.open_checkpoint(str(tmp_path), reader, 2):
                pass
        (tmp_path / name).write_bytes(content)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("pieces.json", r"pieces\.json` is damaged"),
        ("pieces/1", r"is damaged: `pieces/1` is missing, of 2"),
        ("pieces/0/runs.json", r"pieces/0/runs\.json` is damaged"),
        ("pieces/0/model/a.npz", "the pieces of `a` are not all there, each once"),
    ],
)
def test_pieces_that_are_missing(tmp_path, what, message):
    write_in_pieces(tmp_path, {"a": np.arange(7.0)})
    path = tmp_path / what
    path.rename(tmp_path / "elsewhere")
    with pytest.raises(UnreadableFileError, match=message):
        read(tmp_path)


def test_pieces_that_are_there_twice(tmp_path):
    write_in_pieces(tmp_path, {"a": np.arange(7.0)})
    (tmp_path / "pieces/1/runs.json").write_text('{"a": [[1, 3]]}')
    (tmp_path / "pieces/1/checksums.json").unlink()
    (tmp_path / "checksums.json").unlink()
    with pytest.raises(UnreadableFileError, match="the pieces of `a` are not all there, each once"):
        read(tmp_path)


@pytest.mark.parametrize(
    "name", ["pieces.json", "pieces/1/runs.json", "pieces/1/checksums.json", "pieces/1/model/a.npz"]
)
def test_a_changed_byte_of_pieces(tmp_path, name):
    write_in_pieces(tmp_path, {"a": np.zeros(100)})
    contents = bytearray((tmp_path / name).read_bytes())
    contents[len(contents) // 2] ^= 1
    (tmp_path / name).write_bytes(contents)
    with pytest.raises(UnreadableFileError, match=rf"{name}` is damaged"):
        read(tmp_path)


def test_who_cannot_write_says_so(tmp_path):
    notes = KeyValueStore()
    first, second = (sharded_arrays.ShardWriter(tmp_path / "c", number, 2, notes) for number in range(2))
    with pytest.raises(FileNotFoundError, match="Choose a place for checkpoints that all processes have in common"):
        second.write({}, "npz")
    with pytest.raises(KeyboardInterrupt), first.reporting_failures():
        raise KeyboardInterrupt
    problems = first.problems()
    assert problems[0] == "Process 0: KeyboardInterrupt: " and problems[1].startswith("Process 1: FileNotFoundError: ")


# Files that are no checkpoints --------------------------------------------------------------------------------------


class Hostile:
    """Runs code when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def hostile_files(folder, mark):
    """Files called `a.npz` that would make the directory `mark` if they were unpickled."""
    objects = np.array([Hostile(mark)], dtype=object)
    np.savez(folder / "as an array.npz", a=objects)
    (folder / "as a pickle.npz").write_bytes(pickle.dumps(Hostile(mark)))
    np.save(folder / "as one array", objects, allow_pickle=True)
    (folder / "as one array.npy").rename(folder / "as one array.npz")


def test_nothing_is_unpickled(tmp_path):
    mark = tmp_path / "the code has run"
    hostile_files(tmp_path, mark)
    for file in sorted(tmp_path.glob("*.npz")):
        with contextlib.suppress(TypeError, IndexError):
            np.load(file, allow_pickle=True)["a"]
        mark.rmdir()  # so it would be

        (tmp_path / "c/model").mkdir(parents=True, exist_ok=True)
        (tmp_path / "c/model/a.npz").write_bytes(file.read_bytes())
        with pytest.raises(ValueError, match=r"model/a\.npz` is damaged: expected a NumPy archive with the array `a`"):
            read(tmp_path / "c")
        assert not mark.exists()


def test_objects_are_not_written(tmp_path):
    with pytest.raises(ValueError, match="Object arrays cannot be saved"):
        write(tmp_path / "c", {"a": np.array([{}], dtype=object)})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("contents", [b"", b"PK\x03\x04", b"no archive"])
def test_damaged_archives(tmp_path, contents):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/a.npz").write_bytes(contents)
    with pytest.raises(ValueError, match=r"a\.npz` is damaged"):
        read(tmp_path)


@pytest.mark.parametrize("format", ["npz", "safetensors"])
def test_a_truncated_file(tmp_path, format):
    write(tmp_path, {"a": np.arange(100)}, format)
    path = tmp_path / ("model/a.npz" if format == "npz" else "model.safetensors")
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ValueError, match="is damaged"):
        read(tmp_path)


@pytest.mark.parametrize("format", ["npz", "safetensors"])
@pytest.mark.parametrize("name", ["the arrays", "session_info.json", "dataloader.bin", "checksums.json"])
def test_a_changed_byte_is_noticed(tmp_path, name, format):
    write(tmp_path, {"a": np.zeros(1000)}, format, loader=b"position")
    path = tmp_path / {"npz": "model/a.npz", "safetensors": "model.safetensors"}[format]
    path = path if name == "the arrays" else tmp_path / name
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2] ^= 1
    path.write_bytes(contents)
    with pytest.raises(UnreadableFileError, match=rf"{path.name}` is damaged"):
        read(tmp_path)


def test_without_checksums_archives_have_their_own(tmp_path):
    write(tmp_path, {"a": np.zeros(1000)})
    (tmp_path / "checksums.json").unlink()
    assert read(tmp_path)[0]["a"].shape == (1000,)
    path = tmp_path / "model/a.npz"
    contents = bytearray(path.read_bytes())
    contents[len(contents) // 2] ^= 1
    path.write_bytes(contents)
    with pytest.raises(UnreadableFileError, match="is damaged.*CRC"):
        read(tmp_path)


def test_a_changed_byte_of_a_memory_map(tmp_path):
    write(tmp_path / "c", {"v": np.memmap(tmp_path / "v.npy", np.float32, "w+", shape=(3,))})
    (tmp_path / "c/model/v.npy").write_bytes(b"\1" + bytes(11))
    with pytest.raises(UnreadableFileError, match=r"v\.npy` is damaged"):
        initialise_memmap_dir_from_checkpoint(tmp_path / "c", tmp_path / "maps")
    assert not (tmp_path / "maps").exists()


def test_an_array_that_is_said_to_be_huge(tmp_path):
    """Nobody makes room for it."""
    (tmp_path / "model").mkdir()
    header = {"descr": "<f8", "fortran_order": False, "shape": (2**45,)}
    with zipfile.ZipFile(tmp_path / "model/a.npz", "w") as archive, archive.open("a.npy", "w") as file:
        np.lib.format.write_array_header_1_0(file, header)
        file.write(bytes(64))
    with pytest.raises(UnreadableFileError, match=r"said to have 281474976710656 bytes, and there are 64"):
        read(tmp_path)


def test_an_archive_with_another_array(tmp_path):
    (tmp_path / "model").mkdir()
    np.savez(tmp_path / "model/a.npz", b=np.zeros(2))
    with pytest.raises(ValueError, match="with the array `a`"):
        read(tmp_path)


@pytest.mark.parametrize("text", ["{", "[1]", "3"])
def test_a_damaged_record(tmp_path, text):
    write(tmp_path, {})
    (tmp_path / "session_info.json").write_text(text)
    with pytest.raises(ValueError, match=r"session_info\.json` is damaged"):
        read(tmp_path)


def test_no_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match="There is no directory"):
        read(tmp_path / "c")
    with pytest.raises(FileNotFoundError, match=r"is no checkpoint: there is neither `model` nor `model\.safetensors`"):
        read(tmp_path)


def test_an_unknown_format(tmp_path):
    with pytest.raises(ValueError, match="is 'pickle'; expected 'npz' or 'safetensors'"):
        write(tmp_path / "c", {}, "pickle")
    assert os.listdir(tmp_path) == []


# Replacing ----------------------------------------------------------------------------------------------------------


def test_a_second_checkpoint_replaces_the_first(tmp_path):
    write(tmp_path / "c", {"a": np.zeros(2), "old": np.zeros(2)}, loader=b"position")
    (tmp_path / "c/notes.txt").write_text("kept")
    (tmp_path / "c/inner").mkdir()
    (tmp_path / "c/inner/file").write_text("kept too")
    write(tmp_path / "c", {"a": np.ones(2)}, "safetensors", {"steps": 2})
    arrays, info = read(tmp_path / "c")
    assert arrays.keys() == {"a"} and arrays["a"].tolist() == [1, 1] and info == {"steps": 2}
    assert os.listdir(tmp_path) == ["c"]
    names = ["checksums.json", "inner", "model.safetensors", "notes.txt", "session_info.json"]
    assert sorted(os.listdir(tmp_path / "c")) == names
    assert (tmp_path / "c/inner/file").read_text() == "kept too"


def test_a_reader_is_told_of_another_checkpoint(tmp_path):
    """What it has read may be of both; and what looks damaged to it, is not."""
    write(tmp_path / "c", {"a": np.zeros(2)})
    with (
        pytest.raises(ReplacedError, match="was replaced"),
        checkpoint.open_checkpoint(str(tmp_path / "c")) as directory,
    ):
        arrays = sharded_arrays.arrays_of(directory)
        write(tmp_path / "c", {"a": np.ones(2)})
        assert arrays["a"].elements(0, 2).tolist() == [1, 1]
    with pytest.raises(ReplacedError), checkpoint.open_checkpoint(str(tmp_path / "c")) as directory:
        write(tmp_path / "c", {"b": np.ones(2)})
        (directory / "model/a.npz").read_bytes()
    with pytest.raises(FileNotFoundError), checkpoint.open_checkpoint(str(tmp_path / "c")) as directory:
        (directory / "model/a.npz").read_bytes()  # of itself
    with pytest.raises(ReplacedError), checkpoint.open_checkpoint(str(tmp_path / "c")):
        checkpoint.delete(tmp_path / "c")


@pytest.mark.parametrize("what", ["the new one", "the old one"])
def test_two_that_replace_one_place_at_once(tmp_path, monkeypatch, what):
    """One of them is there, whole, and the other says so."""
    write(tmp_path / "c", {"a": np.zeros(2)})
    swap = Path.rename

    def late(path, target):
        is_now = Path(target).name == ("c" if what == "the new one" else ".c.previous")
        if is_now:
            monkeypatch.undo()
            write(tmp_path / "c", {"a": np.ones(2)}, "safetensors")
            if what == "the old one":  # as far as its last step
                shutil.copytree(tmp_path / "c", tmp_path / ".c.previous")
        return swap(path, target)

    monkeypatch.setattr(Path, "rename", late)
    with pytest.raises(FileExistsError, match="Another program replaces this directory"):
        write(tmp_path / "c", {"a": np.full(2, 2.0)})
    assert read(tmp_path / "c")[0]["a"].tolist() == [1, 1]
    assert os.listdir(tmp_path) == ["c"]


def test_a_failure_in_the_block_changes_nothing(tmp_path):
    write(tmp_path / "c", ARRAYS, info={"steps": 1})
    with pytest.raises(KeyboardInterrupt), checkpoint.new_checkpoint(str(tmp_path / "c")) as directory:
        checkpoint.write_info(directory, {"steps": 2})
        raise KeyboardInterrupt
    assert read(tmp_path / "c")[1] == {"steps": 1} and os.listdir(tmp_path) == ["c"]


def test_links_are_followed(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    write(tmp_path / "link", {"a": np.zeros(1)})
    assert (tmp_path / "link").is_symlink() and read(tmp_path / "real")[0].keys() == {"a"}


def test_places_that_cannot_be_replaced(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="is a file"):
        write(tmp_path / "file", {})
    (tmp_path / "c/inner").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "c/inner")
    with pytest.raises(ValueError, match="holds the working directory"):
        write(tmp_path / "c", {})
    assert sorted(os.listdir(tmp_path)) == ["c", "file"]
    write("relative", {})
    assert os.listdir(tmp_path / "c/inner") == ["relative"]


# Interruptions ------------------------------------------------------------------------------------------------------

# Every step by which a process changes files is announced to audit hooks. So: save again and again in new processes,
# and in each of them stop just before the next step, by ending the process or by an exception. What is left behind has
# to be read as the old contents or the new ones, whole; and the next save has to work.
INTERRUPTED = """
import os, shutil, sys
from pathlib import Path
import numpy as np
from popxl_addons import array_files, checkpoint, sharded_arrays

how, format, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
STEPS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "shutil.copyfile"}
countdown = None

def interrupt(event, args):
    global countdown
    if event not in STEPS or countdown is None:
        return
    if countdown == 0:
        countdown = None
        if how == "killed":
            os._exit(1)
        raise RuntimeError("interrupted")  # not what is caught when directories exist
    countdown -= 1

sys.addaudithook(interrupt)

def save(place, value, format):
    with checkpoint.new_checkpoint(str(place)) as directory:
        checkpoint.write_info(directory, {"value": value})
        arrays = {f"only_{value}": np.full(3, value), "both": np.full(2, value)}
        if format == "pieces":
            array_files.write_arrays(directory, {})
            sharded_arrays.write_shards(directory, 0, {name: [(0, array[:1])] for name, array in arrays.items()})
            sharded_arrays.write_shards(directory, 1, {name: [(1, array[1:])] for name, array in arrays.items()})
            shapes = {name: sharded_arrays.ShardSpec(shape=array.shape) for name, array in arrays.items()}
            sharded_arrays.write_index(directory, sharded_arrays.Index(writers=2, arrays=shapes))
        else:
            array_files.write_arrays(directory, arrays, format)
        if value == 1:
            (directory / "dataloader.bin").write_bytes(b"1")

def load(place):
    with checkpoint.open_checkpoint(str(place)) as directory:
        value = checkpoint.read_info(directory)["value"]
        arrays = checkpoint.read_arrays(directory)
        assert {name: array.tolist() for name, array in arrays.items()} == {
            f"only_{value}": [value] * 3, "both": [value] * 2}, (value, arrays)
        assert (directory / "dataloader.bin").exists() == (value == 1)
        assert (directory / "model").is_dir() != (directory / "model.safetensors").exists()
        return value

found = []
for step in range(1000):
    place = folder / str(step) / "c"
    save(place, 1, "npz")
    (place / "notes").write_text("kept")
    child = os.fork()
    if child == 0:
        countdown = step
        try:
            save(place, 2, format)
        except RuntimeError as problem:
            assert str(problem) == "interrupted", problem
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    found.append(load(place))
    kept = [path for path in place.parent.glob("**/notes")]
    assert len(kept) == 1, kept
    save(place, 3, format)
    assert load(place) == 3
    assert (place / "notes").read_text() == "kept"
    assert [path.name for path in place.parent.iterdir()] == ["c"]
    shutil.rmtree(place.parent)
    if code == 0:
        break
assert found == sorted(found) and found[0] == 1 and found[-1] == 2, found
print(len(found))
"""


@pytest.mark.thorough(but_each=6)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.parametrize("format", ["npz", "pieces", "safetensors"])
@pytest.mark.parametrize("how", ["killed", "raised"])
def test_an_interruption_leaves_the_old_or_the_new(tmp_path, how, format):
    program = [sys.executable, "-W", "ignore", "-c", INTERRUPTED, how, format, str(tmp_path)]
    done = subprocess.run(program, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout) > 20  # steps that were tried


def test_interrupted_before_the_very_first_is_complete(tmp_path):
    with pytest.raises(KeyboardInterrupt), checkpoint.new_checkpoint(str(tmp_path / "c")):
        raise KeyboardInterrupt
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "c")
    assert os.listdir(tmp_path) == []


def test_forgetting(tmp_path, caplog):
    write(tmp_path / "c", ARRAYS)
    checkpoint.delete(tmp_path / "c")
    assert os.listdir(tmp_path) == []
    checkpoint.delete(tmp_path / "c")
    assert "could not be deleted" in caplog.text


@pytest.mark.thorough
def test_processes_that_die(tmp_path: Path) -> None:
    """One of four processes is killed twice. The losses are those of a training that nobody killed, bit for bit."""
    found = []
    for kills in (0, 2):
        folder = tmp_path / str(kills)
        folder.mkdir()
        killed_training.write(folder)
        assert killed_training.train(folder, steps=600, kills=kills, limit=300) == kills
        found.append(killed_training.losses(folder))
    assert found[0] == found[1] and len(found[0]) == 600
