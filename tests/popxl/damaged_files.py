"""Files with flipped bits, and cut ones: each is refused by an error that names it, or read as what was written.

    python -m tests.popxl.damaged_files --count 500

damages a file of each kind so many times, and counts what came of it. `test_damaged_files.py` does a few of each.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import popxl
from popxl import ops
from popxl.base import log
from popxl.errors import PopxlError
from popxl.tensor import Constant, Variable
from popxl_addons import array_files, checkpoint
from popxl_addons.task_session import initialise_memmap_dir_from_checkpoint
from runtime.plan import structure


def program() -> popxl.Ir:
    """`y = gelu(x @ w) + k`, and `w` grows."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        x = ops.host_load(popxl.h2d_stream((2, 3), popxl.float32, "x"))
        w = popxl.variable(np.arange(12, dtype=np.float32).reshape(3, 4) / 7, name="w")
        graph = ir.create_graph(lambda x, w: ops.gelu(x @ w), x, w)
        (y,) = ops.call(graph, x, w)
        ops.host_store(popxl.d2h_stream((2, 4), popxl.float32, "y"), y + popxl.constant(0.5))
        ops.add_(w, popxl.constant(0.25))
    return ir


def meaning(ir: popxl.Ir) -> Any:
    """All that makes a program."""
    numbers = [t.data.tobytes() for graph in ir.graphs for t in graph.tensors if isinstance(t, Constant | Variable)]
    sources = [(op.source, op.after, op.ipu) for graph in ir.graphs for op in graph.ops]
    return str(ir), numbers, sources, ir.options, ir.num_host_transfers, ir.counters


def results(session: popxl.Session) -> Any:
    with session:
        (x,) = session.expected_inputs()
        (y,) = session.run({x: np.ones((2, 3), np.float32)}).values()
        return np.array(y).tolist()


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Attributes:
        write: writes files of it to a folder.
        read: what is in them.
        mended: whether a damaged one is replaced in place of an error.
    """

    write: Callable[[Path], object]
    read: Callable[[Path], Any]
    mended: bool = False


def write_checkpoint(folder: Path, format: array_files.Format) -> None:
    maps = folder / "elsewhere"
    maps.mkdir()
    mapped = np.memmap(maps / "table.npy", np.float32, "w+", shape=(5, 2))
    mapped[:] = np.arange(10).reshape(5, 2)
    arrays = {
        "layer.w": np.arange(12, dtype=np.float32).reshape(3, 4),
        "layer.b": np.array(3, np.uint32),
        "half": np.linspace(0, 1, 7).astype(np.float16),
        "fp8": popxl.utils.host_pow2scale_cast_to_fp8(np.array([1.0, 2.5], np.float32), popxl.float8_143),
        "table": mapped,
    }
    with checkpoint.new_checkpoint(str(folder / "c")) as directory:
        checkpoint.write_info(directory, {"steps": 7, "lr": 0.5})
        array_files.write_arrays(directory, arrays, format)
        (directory / checkpoint.LOADER).write_bytes(b"at row 1234")
    shutil.rmtree(maps)


def read_checkpoint(folder: Path) -> Any:
    with checkpoint.open_checkpoint(str(folder / "c")) as directory:
        arrays = {name: (a.dtype, a.shape, a.tobytes()) for name, a in checkpoint.read_arrays(directory).items()}
        info, loader = checkpoint.read_info(directory), (directory / checkpoint.LOADER).read_bytes()
    with tempfile.TemporaryDirectory() as maps:
        initialise_memmap_dir_from_checkpoint(folder / "c", maps)
        return arrays, info, loader, {path.name: path.read_bytes() for path in Path(maps).iterdir()}


def cached(folder: Path) -> Any:
    structure.clear_cache()
    ir = program()
    ir.options.enableEngineCaching, ir.options.cachePath = True, str(folder / "cache")
    return results(popxl.Session(ir, "ipu_hw"))


KINDS = {
    "ir": Kind(lambda folder: program().save(folder / "program"), lambda f: meaning(popxl.Ir.load(f / "program"))),
    "session": Kind(
        lambda folder: popxl.Session(program()).save(folder / "session"),
        lambda folder: results(popxl.Session.load(folder / "session")),
    ),
    "cache": Kind(cached, cached, mended=True),
    "checkpoint, npz": Kind(lambda folder: write_checkpoint(folder, "npz"), read_checkpoint),
    "checkpoint, safetensors": Kind(lambda folder: write_checkpoint(folder, "safetensors"), read_checkpoint),
}

with contextlib.suppress(ImportError):
    import torch

    import poptorch

    X = torch.linspace(-1, 1, 6).reshape(2, 3)

    def write_model(folder: Path) -> None:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh())
        poptorch.inferenceModel(model.eval()).compileAndExport(folder / "model.poptorch", X)

    def read_model(folder: Path) -> Any:
        model = poptorch.load(folder / "model.poptorch")
        return model(X).tolist(), {name: t.tolist() for name, t in model.state_dict().items()}

    KINDS["poptorch"] = Kind(write_model, read_model)


def damaged(content: bytes, chance: random.Random) -> bytes:
    """Some bits flipped, or bytes cut out, cut off, doubled or put in; at the beginning as often as anywhere."""
    changed = bytearray(content)
    length = len(changed) if chance.random() < 0.5 else min(len(changed), 600)
    at = chance.randrange(length)
    match chance.randrange(8):
        case 0:
            del changed[at:]
        case 1:
            del changed[at : at + chance.randint(1, 9)]
        case 2:
            changed[at:at] = chance.randbytes(chance.randint(1, 9))
        case 3:
            changed[at:at] = changed[at : at + chance.randint(1, 90)]
        case _:
            for _ in range(chance.choice((1, 1, 1, 2, 8))):
                changed[chance.randrange(length)] ^= 1 << chance.randrange(8)
    return bytes(changed)


def damage(name: str, count: int, seed: int = 0) -> Counter[str]:
    """Damage files of a kind, again and again, and count what came of it.

    Raises:
        AssertionError: if something else was read than what was written, or the error does not name the file.
    """
    kind, chance, found = KINDS[name], random.Random(f"{name} {seed}"), Counter[str]()
    with tempfile.TemporaryDirectory() as place:
        whole, folder = Path(place, "whole"), Path(place, "damaged")
        whole.mkdir()
        kind.write(whole)
        shutil.copytree(whole, folder)
        expected = kind.read(folder)
        files = sorted(path for path in whole.rglob("*") if path.is_file())
        for number in range(count):
            shutil.rmtree(folder)
            shutil.copytree(whole, folder)
            file = chance.choice(files)
            content = damaged(file.read_bytes(), chance)
            if content == file.read_bytes():
                found["not changed"] += 1
                continue
            (folder / file.relative_to(whole)).write_bytes(content)
            try:
                read = kind.read(folder)
            except (PopxlError, ValueError, *ERRORS) as problem:
                assert not kind.mended and str(folder) in str(problem), f"{name}, number {number}: {problem!r}"
                found["refused"] += 1
                continue
            assert read == expected, f"{name}, number {number}: {file.name} was read as {read!r}"
            if not kind.mended:
                found["read as it was"] += 1
            else:
                assert (folder / file.relative_to(whole)).read_bytes() != content, f"{name}, number {number}"
                found["made anew"] += 1
    return found


ERRORS = (poptorch.Error,) if "poptorch" in KINDS else ()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, action="append")
    arguments = parser.parse_args()
    log.Logger().setLevel("ERR")
    for name in arguments.kind or KINDS:
        found = damage(name, arguments.count, arguments.seed)
        print(f"{name:24} {', '.join(f'{count} {what}' for what, count in sorted(found.items()))}", flush=True)


if __name__ == "__main__":
    main()
