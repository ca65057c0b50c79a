"""Files that hold no program that popxl can have made: each is refused by one error, before anything is compiled."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.base.atomic_files import digest
from popxl.base.container import pack, unpack
from popxl.base.source import SourceLocation
from popxl.errors import PopxlError, UnreadableFileError
from popxl.options import OF_THE_RUN
from popxl.program.saved import KIND
from tests.popxl.changed_programs import exchanged, trained

Program = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where the two programs are saved."""
    folder = tmp_path_factory.mktemp("programs")
    trained().save(folder / "trained")
    exchanged().save(folder / "exchanged")
    return folder


def load(path: Path, change: Callable[[Program], object]) -> popxl.Ir:
    """What is loaded of a program, once something is changed."""
    program, blobs = unpack(KIND, path.read_bytes())
    change(program)
    other = path.with_name("changed")
    other.write_bytes(pack(KIND, program, blobs))
    return popxl.Ir.load(other)


def op(program: Program, kind: str) -> Program:
    return next(op for graph in program["graphs"] for op in graph["ops"] if op["kind"] == kind)


def tensor(program: Program, id: str) -> Program:
    """A tensor, or what a stream carries."""
    both = (t for graph in program["graphs"] for t in (*graph["tensors"], *graph["streams"]))
    return next(t for t in both if t["id"] == id)


def of_a_stream(program: Program, transfers: int) -> dict[str, int]:
    """A number of transfers for one of the streams that are used."""
    return {op(program, "HostStore")["attributes"]["stream"]["stream"][1]: transfers}


def part(program: Program) -> Program:
    return op(program, "MultiExchange")["attributes"]["parts"]["tuple"][0]["part"]


def calls_itself(program: Program, by: str = "") -> None:
    """Have the graph that the first call calls call `by`, or else itself."""
    call = copy.deepcopy(op(program, "Call"))
    callee = next(g for g in program["graphs"] if g["id"] == call["attributes"]["graph"]["graph"])
    outputs = [callee["id"] + "/again"] if callee["outputs"] else []
    for id in outputs:
        like = copy.deepcopy(next(t for t in callee["tensors"] if t["id"] == callee["outputs"][0]))
        callee["tensors"].append(like | {"id": id, "name": "again"})
    call |= {"id": 0, "inputs": callee["inputs"], "outputs": outputs, "after": []}
    call["attributes"]["graph"]["graph"] = by or callee["id"]
    callee["ops"].append(call)


def by_way_of_its_gradient(program: Program) -> None:
    """The gradient graph and the graph, which call each other."""
    forward, backward = op(program, "Call")["attributes"]["graph"]["graph"], None
    backward = next(g["id"] for g in program["graphs"] if g["gradient_of"] == forward)
    calls_itself(program, backward)
    graph = next(g for g in program["graphs"] if g["id"] == backward)
    graph["ops"].append(graph["ops"][0] | {"id": 1, "kind": "Call", "attributes": {"graph": {"graph": forward}}})
    graph["ops"][-1]["outputs"] = []


def many_calls(program: Program) -> None:
    """A graph that calls a graph twice that calls a graph twice, and so on."""
    for k in range(40):
        call = {"graph": {"graph": f"g{k - 1}"}}
        common = {**op(program, "Call"), "inputs": [], "outputs": [], "modified": [], "after": [], "attributes": call}
        made = [common | {"id": 10**6 + 2 * k + i} for i in range(2)] if k else []
        empty = {"inputs": [], "outputs": [], "tensors": [], "ops": made}
        program["graphs"].append(program["graphs"][1] | empty | {"id": f"g{k}", "gradient_of": None})
    leaf = op(program, "Init") if any(o["kind"] == "Init" for o in program["graphs"][0]["ops"]) else None
    assert leaf is not None
    t = {**tensor(program, leaf["outputs"][0]), "id": "g0/t", "name": "t", "bound": None}
    program["graphs"][-40]["tensors"] = [t]
    program["graphs"][-40]["ops"] = [leaf | {"id": 10**6 - 1, "outputs": ["g0/t"], "after": []}]
    program["counters"]["op_ids"] = 10**7


def nested(depth: int) -> Any:
    return json.loads('{"list": [' * depth + "]}" * depth)


OF_ALL = {
    "no graph": (lambda p: p["graphs"].clear(), "is not the main graph"),
    "a graph that is missing": (lambda p: p["graphs"].pop(), r"subgraph\(\d\)' is missing"),
    "a graph twice": (lambda p: p["graphs"].append(p["graphs"][1]), "graph '.*' is there twice"),
    "a graph that calls itself": (calls_itself, "would call itself"),
    "too many calls": (many_calls, "come to .* ops"),
    "ops out of order": (lambda p: p["graphs"][0]["ops"].reverse(), "which nothing has made before it"),
    "an op twice": (lambda p: p["graphs"][0]["ops"].append(p["graphs"][0]["ops"][0]), r"op \d+ is there twice"),
    "an op that makes what is there": (
        lambda p: p["graphs"][0]["ops"].append(p["graphs"][0]["ops"][0] | {"id": 99}),
        "which is there already",
    ),
    "a tensor twice": (lambda p: p["graphs"][1]["tensors"].append(p["graphs"][1]["tensors"][0]), "is there twice"),
    "a tensor of another graph": (
        lambda p: op(p, "Call")["inputs"].__setitem__(0, p["graphs"][1]["inputs"][0]),
        "of another graph",
    ),
    "a name that is not the id's": (lambda p: p["graphs"][0]["tensors"][0].update(name="other"), "has the id"),
    "no transfers": (lambda p: p.update(num_host_transfers=0), "num_host_transfers is 0"),
    "terabytes of transfers": (lambda p: p.update(num_host_transfers=10**14), r"Stream .* would have \d+ bytes"),
    "no transfers of a stream": (lambda p: p.update(stream_transfers=of_a_stream(p, 0)), "has 0 transfers"),
    "transfers of nothing": (
        lambda p: p.update(stream_transfers={"n/a": 1}),
        "'n/a' has 1 transfers, and is no stream",
    ),
    "terabytes of a stream": (
        lambda p: p.update(stream_transfers=of_a_stream(p, 10**14)),
        r"Stream .* would have \d+ bytes",
    ),
    "no replicas": (lambda p: p["options"].update(replicatedGraphCount=0), "replicatedGraphCount"),
    "a thousand million replicas": (lambda p: p["options"].update(replicatedGraphCount=10**9), "replicatedGraphCount"),
    "counters that go backwards": (lambda p: p["counters"].update(op_ids=1), "the next of op_ids is 1, which is taken"),
    "a negative IPU": (lambda p: p["graphs"][0]["ops"][0].update(ipu=-1), "no IPU -1"),
    "an op before itself": (lambda p: p["graphs"][0]["ops"][0].update(after=[10**4]), "that do not come before it"),
    "an unknown context": (lambda p: p["graphs"][0]["ops"][0].update(execution_context="Os"), "'Os' is missing"),
    "a container of an earlier format": (lambda p: p.update(format=2), "it has format 2"),
    "a value of no kind": (lambda p: op(p, "Call")["attributes"].update(graph={"eval": "1"}), "is no graph"),
    "a stream both ways": (lambda p: op(p, "HostStore")["attributes"].update(stream={"stream": ["X", ""]}), "'X' is"),
    "an attribute too many": (lambda p: op(p, "HostStore")["attributes"].update(x=1), "argument 'x'"),
    "an attribute too few": (lambda p: op(p, "HostStore")["attributes"].clear(), "'stream'"),
    "nested values": (lambda p: op(p, "HostStore")["attributes"].update(x=nested(400)), r"'x'|deep|recursion"),
    "options of who runs it": (
        lambda p: p["options"].update(cachePath="/tmp/x", dotChecks=["ALL"]),
        "sets cachePath, d",
    ),
    "an op by a module's path": (lambda p: op(p, "HostStore").update(kind="os.system"), "no op has been declared"),
    "an op that is no name": (lambda p: op(p, "HostStore").update(kind=["os.system"]), "is no key"),
}
"""What may be wrong in any program, and what is said of it."""

OF_TRAINED = {
    "calls in a circle": (by_way_of_its_gradient, "would call itself"),
    "one and a half turns": (lambda p: op(p, "Loop")["attributes"].update(repeat_count=1.5), r"`repeat_count` is 1\.5"),
    "fewer than no turns": (lambda p: op(p, "Loop")["attributes"].update(repeat_count=-1), "`repeat_count` is -1"),
    "too many turns": (
        lambda p: op(p, "Loop")["attributes"].update(repeat_count=2**31),
        "`repeat_count` is 2147483648",
    ),
    "turns that carry too much": (lambda p: op(p, "Loop")["attributes"].update(carried=7), "carries 7 values"),
    "an update of nothing": (lambda p: op(p, "ScaledAddLhsInplace").update(modified=[]), "overwrites its inputs"),
    "an update of what it is not": (lambda p: op(p, "Loop").update(modified=[9]), "to overwrite"),
    "a vast tensor": (
        lambda p: tensor(p, "x").update(spec={"spec": [[10**13], "float32", []]}),
        "f32.* would have 40000000000000 bytes",
    ),
    "a negative size": (lambda p: tensor(p, "x").update(spec={"spec": [[-2, 3], "float32", []]}), "is no shape"),
    "numbers of another dtype": (
        lambda p: tensor(p, "w").update(spec={"spec": [[3, 3], "int32", []]}),
        "numbers of float32",
    ),
    "a tensor bound to itself": (
        lambda p: tensor(p, p["graphs"][1]["inputs"][0]).update(bound=p["graphs"][1]["inputs"][0]),
        "is bound to itself",
    ),
    "a main graph with inputs": (lambda p: p["graphs"][0]["inputs"].append("w"), "main graph has inputs"),
}

OF_EXCHANGED = {
    "no slots": (lambda p: p["buffers"][0].update(entries=0), "non-zero, positive"),
    "terabytes of slots": (lambda p: p["buffers"][0].update(entries=10**12), r"buffers would have \d+ bytes"),
    "a slot that is not there": (lambda p: tensor(p, "far").update(remote=[1, 2, False]), "slot 2"),
    "a buffer that is not there": (lambda p: tensor(p, "far").update(remote=[9, 0, False]), "no remote buffer"),
    "terabytes of replicas": (
        lambda p: tensor(p, "add_out").update(spec={"spec": [[3, 2**39], "float32", []]}),
        r"would have \d+ bytes",
    ),
    "groups of no replicas": (lambda p: tensor(p, "v").update(grouping={"strided": [1, 0]}), "group_size"),
    "a piece of something else": (lambda p: tensor(p, "v").update(piece="far"), "the piece of"),
    "a call in an exchange": (lambda p: part(p).update(kind="Call"), "cannot be a part"),
    "a part of fewer than none": (lambda p: part(p).update(inputs=-1), "has -1 inputs"),
}


CASES = {"trained": OF_ALL | OF_TRAINED, "exchanged": OF_ALL | OF_EXCHANGED}


@pytest.mark.parametrize("name, what", [(name, what) for name, cases in CASES.items() for what in cases])
def test_hostile_programs(folder: Path, name: str, what: str) -> None:
    change, told = CASES[name][what]
    with pytest.raises(PopxlError, match=f"(?s)Ir.load: ('.*changed' does not hold|the program uses an op).*{told}"):
        load(folder / name, change)


@pytest.mark.parametrize("name", CASES)
def test_without_a_change_they_are_loaded(folder: Path, name: str) -> None:
    assert str(load(folder / name, lambda program: None)) == str({"trained": trained, "exchanged": exchanged}[name]())


def test_an_attribute_that_no_shape_depends_on(tmp_path: Path) -> None:
    """Whether the function can do with it is seen by tracing it."""
    ir = popxl.Ir()
    with ir.main_graph:
        ops.random_uniform(popxl.variable(np.ones(2), popxl.uint32), (2, 3), high=4.0)
    ir.save(tmp_path / "program")
    with pytest.raises(UnreadableFileError, match="'high'"):
        load(tmp_path / "program", lambda p: op(p, "RandomUniform")["attributes"].pop("high"))


# Options ------------------------------------------------------------------------------------------------------------


def test_options_of_the_run_are_not_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of who loads the program."""
    ir = popxl.Ir()
    ir.options.placement, ir.options.engineOptions = "one", {"x": "y"}
    ir.options.cachePath, ir.options.enableEngineCaching = str(tmp_path / "cache"), True
    ir.options.dotChecks, ir.options.logDir = {"ALL"}, str(tmp_path / "log")
    ir.save(tmp_path / "program")
    assert not OF_THE_RUN & unpack(KIND, (tmp_path / "program").read_bytes())[0]["options"].keys()
    monkeypatch.setenv("POPXL_CACHE_DIR", "mine")
    options = popxl.Ir.load(tmp_path / "program").options
    assert (options.cachePath, options.enableEngineCaching, options.logDir) == ("mine", True, ".")
    assert (options.dotChecks, options.placement, options.engineOptions) == (set(), "one", {"x": "y"})


def test_files_of_earlier_versions_are_read(tmp_path: Path) -> None:
    """Without a digest; what they say of the machine is left."""
    path = tmp_path / "program"
    trained().save(path)
    program, blobs = unpack(KIND, path.read_bytes())
    program |= {"format": 1, "arrays": f"program-{digest(blobs['arrays'])[:16]}.safetensors"}
    path.with_name(program["arrays"]).write_bytes(blobs["arrays"])
    program["options"] |= {"cachePath": "elsewhere", "enableEngineCaching": True, "logDir": "x", "dotChecks": ["ALL"]}
    path.write_text(json.dumps(program))
    ir = popxl.Ir.load(path)
    assert str(ir) == str(trained())
    assert (ir.options.cachePath, ir.options.logDir, ir.options.dotChecks) == ("", ".", set())


# What programs name -------------------------------------------------------------------------------------------------


def test_only_python_is_opened_for_source_lines(tmp_path: Path) -> None:
    """A pipe would be waited for, and a device be read for ever."""
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "secret").write_text("a secret\n")
    for name in (tmp_path / "pipe.py", tmp_path / "secret", "/dev/zero"):
        assert SourceLocation(str(name), 1, "f").text == ""
    (tmp_path / "program.py").write_text("x = 1\n")
    assert SourceLocation(str(tmp_path / "program.py"), 1, "f").text == "x = 1"


def test_an_error_can_be_caught_as_either(tmp_path: Path) -> None:
    (tmp_path / "program").write_bytes(b"\x80\x04\x95")
    with pytest.raises(UnreadableFileError) as problem:
        popxl.Ir.load(tmp_path / "program")
    assert isinstance(problem.value, PopxlError) and isinstance(problem.value, ValueError)


# Where programs are built -------------------------------------------------------------------------------------------


def test_counts_are_checked_when_they_are_set() -> None:
    ir = popxl.Ir()
    for value in (0, -1):
        with pytest.raises(ValueError, match=f"num_host_transfers is {value}; expected 1 or more"):
            ir.num_host_transfers = value
        with pytest.raises(ValueError, match=f"number of replicas is {value}; expected 1 to 65536"):
            ir.replication_factor = value
        with pytest.raises(ValueError, match="greater than or equal to 1"):
            ir.options.replicatedGraphCount = value
    assert (ir.num_host_transfers, ir.replication_factor) == (1, 1)


def test_too_many_turns() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.variable(np.float32(1))
        graph = ir.create_graph(lambda t: t + 1, x)
        with pytest.raises(PopxlError, match="`repeat_count` is 2147483648; expected 0 to 2147483647"):
            ops.repeat(graph, 2**31, x)
