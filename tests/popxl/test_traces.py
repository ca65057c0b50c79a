"""Traces: JAX's profiler writes what ran, and the file for Perfetto has the user's names."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import jax
import numpy as np
import pytest

import popxl
from popxl import ops
from runtime.traces import user_name

pytestmark = pytest.mark.compiled_whole  # what XLA makes of programs is what is tested


def layer(x: popxl.Tensor, w: popxl.Tensor) -> popxl.Tensor:
    return ops.softmax(x @ w, 1)


@pytest.mark.here
def test_a_trace(ir: popxl.Ir, tmp_path: Path) -> None:
    with ir.main_graph, popxl.in_sequence():
        x, w = popxl.variable(np.ones((4, 5)), popxl.float32), popxl.variable(np.eye(5), popxl.float32)
        graph = ir.create_graph(layer, x, w)
        (y,) = ops.call(graph, x, w)
        (y,) = ops.call(graph, y, w)
        out = popxl.d2h_stream((), popxl.float32)
        ops.host_store(out, ops.sum(y * y))
    line = graph.ops[0].source.line
    with popxl.Session(ir) as session:
        session.run()
        with session.recording(tmp_path) as timeline:
            for _ in range(2):
                found = session.run()[out]
    assert found == pytest.approx(4 * 5 * 0.2**2)
    assert [span.name for span in timeline.spans] == ["the program"] * 2
    events = json.loads(gzip.decompress((tmp_path / "perfetto.json.gz").read_bytes()))["traceEvents"]
    names = {event["name"] for event in events if "hlo_op" in event.get("args", {})}
    assert f"MatMul [test_traces.py:{line}] in {graph.name}" in names
    assert any(name.startswith(f"Softmax [test_traces.py:{line}]") for name in names)
    assert not any(event.get("name", "").startswith("end: ") for event in events)
    (written,) = tmp_path.glob("plugins/profile/*/*.xplane.pb")  # what XProf opens
    profile = jax.profiler.ProfileData.from_file(str(written))
    ran = {event.name for plane in profile.planes for lane in plane.lines for event in lane.events}
    assert {event["args"]["hlo_op"] for event in events if "hlo_op" in event.get("args", {})} <= ran
    assert f"MatMul [test_traces.py:{line}]" in "".join(session.hlo().values())


def test_names_of_instructions() -> None:
    assert user_name("jit(step)/{a(0)}/{b(1)}/Mul [m.py:3]/while/body/Add [m.py:4]/add") == "Add [m.py:4] in b(1)"
    assert [user_name(scope) for scope in ("jit(step)/Add [m.py:4]", "jit(step)/{b(1)}/add", "jit(step)/add")] == [
        "Add [m.py:4]",
        "b(1)",
        "",
    ]


def test_a_trace_after_one_that_failed(ir: popxl.Ir, tmp_path: Path) -> None:
    with ir.main_graph:
        _ = popxl.variable(1.0) + 1
    with popxl.Session(ir) as session:
        session.run()
        with pytest.raises(ZeroDivisionError), session.recording(tmp_path / "failed"):
            _ = 1 / 0
        with session.recording(tmp_path / "next"):  # the first one is over
            session.run()
    assert (tmp_path / "next" / "perfetto.json.gz").exists() and not (tmp_path / "failed" / "perfetto.json.gz").exists()
