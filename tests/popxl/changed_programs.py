"""Saved programs with values that are deleted, doubled, swapped and replaced: what is loaded then is refused by a
`PopxlError`, or is a program that prints, is saved again, and can be compiled.

    python -m tests.popxl.changed_programs --count 2000

changes programs so many times, and counts what came of it. `test_changed_programs.py` does a few, and compiles none.
The files have the digests that belong to them, as those of an attacker would.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import popxl
from popxl import ops
from popxl.base.container import pack, unpack
from popxl.errors import PopxlError
from popxl.program.saved import KIND
from popxl.transforms import autodiff
from popxl.transforms.merge_exchange import merge_exchange


def trained() -> popxl.Ir:
    """A graph, its gradient, a loop, an update in place, a conditional; three transfers of each stream."""
    ir = popxl.Ir()
    ir.num_host_transfers = 3
    ir.options.cachePath, ir.options.enableEngineCaching = "elsewhere", True
    with ir.main_graph, popxl.in_sequence():
        x = ops.host_load(popxl.h2d_stream((2, 3), popxl.float32, "x"))
        w = popxl.variable(np.eye(3, dtype=np.float32), name="w")
        graph = ir.create_graph(lambda x, w: ops.gelu(x @ w), x, w)
        site = ops.call_with_info(graph, x, w)
        info = autodiff(graph)
        _, dw = ops.call(info.graph, site.outputs[0], inputs_dict=info.inputs_dict(site))
        (dw,) = ops.repeat(ir.create_graph(lambda t: t * 2 + 1, dw), 3, dw)
        grow, shrink = ir.create_graph(lambda t: t * 4, dw), ir.create_graph(lambda t: ops.abs(t), dw)
        (dw,) = ops.conditional(ops.greater(ops.sum(x), popxl.constant(0.0)), grow, shrink, [dw], [dw])
        ops.scaled_add_(w, dw, b=-0.01)
        ops.host_store(popxl.d2h_stream((2, 3), popxl.float32, "y"), ops.softmax(site.outputs[0], axis=-1))
    return ir


def exchanged() -> popxl.Ir:
    """Two replicas, remote variables, whole and in pieces, a by-reference input, collectives, views, two IPUs."""
    ir = popxl.Ir(replication=2)

    def bump(t: popxl.TensorByRef) -> None:
        ops.add_(t[0:2], ops.init((2, 4), popxl.float32))

    bump.__annotations__["t"] = popxl.TensorByRef
    with ir.main_graph, popxl.in_sequence():
        buffer = popxl.remote_buffer((3, 4), popxl.float32, 2)
        popxl.remote_variable(np.ones((3, 4), np.float32), buffer, 1, name="far")
        own = popxl.variable(np.zeros((2, 5)), popxl.float32, "own", replica_grouping=ir.replica_grouping(group_size=1))
        v, piece = popxl.replica_sharded_variable(np.arange(7, dtype=np.float32), name="v")
        with popxl.in_sequence(False), merge_exchange():
            a, b = ops.remote_load(buffer, 0), ops.remote_load(buffer, 1)
        ops.call(ir.create_graph(bump, a), a)
        with popxl.ipu(1):
            total = ops.collectives.replicated_all_reduce(a.copy_to_ipu(1, 0))
        ops.remote_store(buffer, 0, total.copy_to_ipu(0, 1) + b)
        whole = ops.collectives.replicated_all_gather(piece)
        ops.host_store(popxl.d2h_stream(whole.shape, popxl.float32, "whole"), whole)
        ops.add_(own, ops.concat([own[0:2], own[2:5] * np.inf], axis=0))
        del v
    return ir


PROGRAMS: list[Callable[[], popxl.Ir]] = [trained, exchanged]

ODD: list[Any] = [
    *(-1, 0, 1, 2, 3, 7, 2**16, 2**31, 2**40, 2**63, 10**30, 0.5, -1e300, True, False, None, "", "x", "float16"),
    *([], {}, [0], [[]], [2**31, 2**31], {"x": 1}, {"list": []}, {"tuple": [1]}, {"float": "nan"}, {"graph": ""}),
    *({"spec": [[2, 3], "float32", []]}, {"dtype": "int8"}, {"array": "w"}, {"array": "#0"}, {"dict": []}),
    *({"spec": [[2**40], "float32", []]}, {"strided": [1, 1]}, {"assigned": [0, 1]}, "MatMul", "Call", "jax.while"),
]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """The containers in a value, each with all its keys."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in [*items]:
        yield value, key
        yield from places(each)


def change(program: dict[str, Any], chance: random.Random) -> str:
    """Change something in a program, and say what."""
    there = [*places(program)]
    holder, key = chance.choice(there)
    before = holder[key]
    match chance.randrange(6):
        case 0:
            del holder[key]
            return f"{key!r} deleted, which was {before!r}"
        case 1 if isinstance(holder, list):
            holder.insert(chance.randrange(len(holder) + 1), before)
            return f"{before!r} doubled"
        case 2 if isinstance(holder, list) and len(holder) > 1:
            other = chance.randrange(len(holder))
            holder[key], holder[other] = holder[other], holder[key]
            return f"{before!r} and {holder[key]!r} swapped"
        case 3 | 4:
            alike = [h[k] for h, k in there if k == key and h[k] != before and type(h[k]) is type(before)]
            holder[key] = json.loads(json.dumps(chance.choice(alike or [before])))
        case _:
            holder[key] = chance.choice(ODD)
    return f"{key!r} set to {holder[key]!r}, which was {before!r}"


def changed(count: int, seed: int = 0, compiled: bool = False, only: int | None = None) -> Counter[str]:
    """Change programs, load them, and count what came of it.

    Raises:
        AssertionError: if something else than a `PopxlError` was raised.
    """
    found = Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "program")
        saved = []
        for make in PROGRAMS:
            make().save(path)
            saved.append(unpack(KIND, path.read_bytes()))
        for number in range(count) if only is None else [only]:
            chance = random.Random(f"{seed} {number}")
            program, blobs = chance.choice(saved)
            program = json.loads(json.dumps(program))
            what = [change(program, chance) for _ in range(chance.choice((1, 1, 1, 2, 3)))]
            path.write_bytes(pack(KIND, program, blobs))
            faulthandler.dump_traceback_later(60, exit=True)
            try:
                found[outcome(path, compiled)] += 1
            except BaseException as problem:
                raise AssertionError(f"seed {seed}, number {number}: {what}: {problem!r}") from problem
            finally:
                faulthandler.cancel_dump_traceback_later()
    return found


def outcome(path: Path, compiled: bool) -> str:
    """What comes of loading a program: in words, if that is as it should be."""
    try:
        ir = popxl.Ir.load(path)
    except PopxlError as problem:
        assert len(str(problem)) < 5000
        return "refused"
    assert not ir.options.cachePath and not ir.options.enableEngineCaching and ir.options.logDir == "."
    text = str(ir)
    ir.memory()
    again = path.with_name("again")
    ir.save(again)
    assert str(popxl.Ir.load(again)) == text
    if not compiled:
        return "loaded"
    try:
        popxl.Session(ir, "ipu_hw")
    except (PopxlError, RuntimeError, ValueError) as problem:  # as for a program that somebody has built like this
        return f"loaded, and a Session says {type(problem).__name__}: {str(problem).partition('.')[0][:60]}"
    return "loaded and compiled"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one change")
    parser.add_argument("--no-compilation", action="store_true")
    arguments = parser.parse_args()
    found = changed(arguments.count, arguments.seed, not arguments.no_compilation, arguments.only)
    for what, count in found.most_common():
        print(f"{count:6} {what}")


if __name__ == "__main__":
    main()
