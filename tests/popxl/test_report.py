"""What a program consists of and needs: `ir.memory()`, `session.report`, `session.recording()`, and their pictures."""

from __future__ import annotations

import doctest
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from typing import Any

import jax
import numpy as np
import pytest

import popxl
import popxl.base.pages
from popxl import ops
from popxl.analysis.memory import Memory
from popxl.base.pages import Facts, Listing, Page, Table, bytes_text, seconds_text
from popxl.base.pictures import bars
from runtime.plan import structure
from runtime.report import Report
from runtime.timeline import Span, Timeline

pytestmark = pytest.mark.compiled_whole  # what XLA makes of programs is what is tested

F32 = 4  # bytes


def network(layers: int, calls: Any = "auto", replicas: int = 1, transfers: int = 1) -> tuple[popxl.Ir, Any]:
    """So many called layers of [2, 3] @ [3, 3], in a main graph that loads, stores and changes the first weight."""
    ir = popxl.Ir(replication=replicas)
    ir.options.calledGraphs = calls
    ir.num_host_transfers = transfers
    with ir.main_graph, popxl.in_sequence():
        x_in = popxl.h2d_stream((2, 3), popxl.float32, "x")
        x = ops.host_load(x_in)
        weights = [popxl.variable(np.eye(3), popxl.float32, f"w{i}") for i in range(layers)]
        layer = ir.create_graph(lambda x, w: ops.tanh(ops.gelu(x @ w)), x, weights[0])
        for w in weights:
            (x,) = ops.call(layer, x, w)
        ops.add_(weights[0], popxl.constant(1.0))
        y_out = popxl.d2h_stream((2, 3), popxl.float32, "y")
        ops.host_store(y_out, x)
    return ir, x_in


def parsed(picture: str) -> ElementTree.Element:
    """The picture, if it is well-formed."""
    return ElementTree.fromstring(picture)


def texts(picture: str) -> list[str]:
    return ["".join(element.itertext()) for element in parsed(picture).iter() if element.text and element.text.strip()]


# The memory of an Ir -------------------------------------------------------------------------------------------------


def test_memory_of_an_ir_is_counted_op_by_op(ir: popxl.Ir) -> None:
    with ir.main_graph:
        w = popxl.variable(np.ones((5, 7)), popxl.float32, "w")  # 140 bytes
        popxl.variable(np.ones(100), popxl.float32, "unused")
        a = w * 2  # 140
        b = a + w  # 140, a and b at once
        c = ops.sum(b)  # 4
        d = c + 1
        ops.host_store(popxl.d2h_stream((), popxl.float32, "d"), d)
    memory = ir.memory()
    assert memory.variables == 140
    assert memory.constants == 2 * F32
    assert (memory.arguments, memory.outputs, memory.code) == (0, F32, None)
    assert memory.host == memory.variables_on_host == 140 + 400
    assert [(m.name, m.held, m.inside) for m in memory.moments] == [
        ("Mul", 0, 140),
        ("Add", 140, 140),
        ("ReduceSum", 140, 4),
        ("Add", 4, 4),
        ("HostStore", 4, 0),
    ]
    assert memory.temporaries == 280
    assert memory.highest is memory.moments[1]
    assert memory.device == 140 + 2 * F32 + F32 + 280


def test_views_and_ops_in_place_need_nothing(ir: popxl.Ir) -> None:
    with ir.main_graph, popxl.in_sequence():
        w = popxl.variable(np.ones((4, 6)), popxl.float32)
        ops.add_(w, popxl.constant(1.0))
        ops.add_(ops.transpose_(w), popxl.constant(1.0))
    assert ir.memory().temporaries == 0
    assert [m.name for m in ir.memory().moments] == ["AddLhsInplace", "AddLhsInplace"]


def test_what_is_loaded_has_no_room_twice(ir: popxl.Ir) -> None:
    with ir.main_graph:
        ops.host_load(popxl.h2d_stream((10,), popxl.float32))
    assert [(m.name, m.inside) for m in ir.memory().moments] == [("Init", 0), ("HostLoad", 40)]


def test_a_graph_that_is_called_once_is_gone_through_and_others_are_one_step(ir: popxl.Ir) -> None:
    with ir.main_graph:
        x = popxl.variable(np.ones(6), popxl.float32)
        inner = ir.create_graph(lambda t: ops.exp(t * 2) + 1, x)  # needs two values at once

        def outer(t: popxl.Tensor) -> popxl.Tensor:
            (t,) = ops.call(inner, t)
            (t,) = ops.call(inner, t)
            return t - 1

        ops.call(ir.create_graph(outer, x), x)
    assert [(m.name.split(">")[-1], m.held, m.inside) for m in ir.memory().moments] == [
        ("_subgraph(0)", 0, 48),
        ("_subgraph(0)", 24, 48),
        ("Sub", 24, 24),
    ]


def test_of_branches_the_larger_one_counts(ir: popxl.Ir) -> None:
    with ir.main_graph:
        x = popxl.variable(np.ones(6), popxl.float32)
        small = ir.create_graph(lambda t: t + 1, x)
        large = ir.create_graph(lambda t: ops.sum(ops.concat([t, t, t])) + t, x)
        ops.conditional(popxl.variable(True, popxl.bool), small, large, then_inputs=[x], else_inputs=[x])
    assert ir.memory().temporaries == max(24, 72 + 4)


def test_buffers_are_where_the_option_says(ir: popxl.Ir) -> None:
    with ir.main_graph:
        buffer = popxl.remote_buffer((3,), popxl.float32, 5)
        ops.remote_load(buffer, 2)
    assert (ir.memory().buffers, ir.memory().buffers_on_host) == (60, 0)
    ir.options.remoteBuffers = "host"
    assert (ir.memory().buffers, ir.memory().buffers_on_host) == (0, 60)
    assert ir.memory().device == ir.memory().constants + 12


@pytest.mark.thorough
def test_memory_of_deep_graphs(ir: popxl.Ir) -> None:
    """Nothing recurses as deep as graphs call each other."""
    with ir.main_graph:
        x = popxl.variable(np.ones(6), popxl.float32)
        graph = ir.create_graph(lambda t: t * 2, x)
        for _ in range(sys.getrecursionlimit() + 100):
            graph = ir.create_graph(lambda t: ops.call(graph, t)[0], x)  # noqa: B023
        ops.call(graph, x)
    assert ir.memory().temporaries == 24


def test_memory_on_a_page(golden: Any) -> None:
    ir, _ = network(3)
    text = str(ir.memory()).replace(repr(ir), "Ir[id=0]")
    golden(text)
    assert repr(ir.memory()).startswith("Memory[")
    assert "<table>" in ir.memory()._repr_html_() and "<svg" in ir.memory()._repr_html_()


def test_memory_as_a_picture(tmp_path: Any) -> None:
    ir, _ = network(3)
    picture = ir.memory().picture()
    tooltips = [element.text for element in parsed(picture).iter() if element.tag.endswith("title")]
    assert len(tooltips) == len(ir.memory().moments) + len(ir.memory().tensors)
    assert any(text.startswith("AddLhsInplace: ") for text in tooltips if text)
    assert "x_hostload: f32[2, 3]: 24 B, steps 3 to 3" in tooltips
    picture.save(tmp_path / "memory.svg")
    assert (tmp_path / "memory.svg").read_text(encoding="utf-8") == picture == picture._repr_svg_()


def test_an_empty_ir_needs_nothing(ir: popxl.Ir) -> None:
    assert ir.memory().device == 0
    assert str(ir.memory()).split() == [*f"Memory of {ir!r} bytes in all, at most 0 B".split()]
    parsed(ir.memory().picture())


def test_a_budget_stands_beside_what_a_program_needs() -> None:
    ir, _ = network(2)
    ir.options.memoryBudget = 100_000
    for memory in (ir.memory(), popxl.Session(ir).memory()):
        assert memory.budget == 100_000
        assert "budget 100 kB" in " ".join(str(memory).split()) and "more than its budget" not in str(memory)
    ir.options.memoryBudget = 70  # variables alone are 72
    assert "more than its budget" not in str(ir.memory())  # XLA may need less than what is counted op by op
    with pytest.warns(UserWarning, match=r"Session: the program needs .* more than its budget.*`plan_memory`"):
        memory = popxl.Session(ir).memory()
    assert f"The program needs {memory.device - 70} B more than its budget." in str(memory)


# Reports -------------------------------------------------------------------------------------------------------------


@pytest.mark.here
def test_report_of_one_program() -> None:
    ir, _ = network(2)
    report = popxl.Session(ir).report
    assert (report.calls, report.replicas, report.devices) == ("kept", 1, ("cpu:0",))
    assert report.reason.startswith("No graph of 16 ops or more is called twice")
    assert [(v.name, v.bytes, v.place, v.changes) for v in report.variables] == [
        ("w0", 36, "device", True),
        ("w1", 36, "device", False),
    ]
    assert [(s.name, s.direction, s.spec, s.transfers, s.bytes) for s in report.streams] == [
        ("x", "in", "f32[2, 3]", 1, 24),
        ("y", "out", "f32[2, 3]", 1, 24),
    ]
    assert [(g.ops, g.runs) for g in report.graphs] == [(6, 1), (3, 2)]
    (piece,) = report.pieces
    assert (piece.name, piece.runs, piece.ops) == ("the program", 1, 6 + 2 * 3)
    assert piece.text > 100 and 0 < piece.seconds <= report.seconds
    assert report.dispatches == 1
    assert report.memory.source == "program"
    assert report.memory.variables == 72
    assert [m.name for m in report.memory.moments] == [m.name for m in ir.memory().moments]


def test_report_of_a_plan() -> None:
    structure.clear_cache()
    ir, _ = network(9, "dispatched")
    session = popxl.Session(ir)
    report = session.report
    assert report.reason == "`ir.options.calledGraphs` is 'dispatched'."
    assert sum(p.runs * p.ops for p in report.pieces) == 4 + 9 * (1 + 3)
    assert report.dispatches == len(session.program.executable.segments) > len(report.pieces)
    assert all(p.seconds > 0 for p in report.pieces)
    assert report.memory.source == "pieces"
    assert len(report.memory.moments) == report.dispatches
    assert report.memory.temporaries == session.program.temporaries()
    again, _ = network(9, "dispatched")
    later = popxl.Session(again).report
    known = [p.name for p in later.pieces if p.seconds == 0]
    assert known == [p.name for p in report.pieces if "_subgraph" in p.name]  # others use streams of the program
    assert "known before" in str(later)


@pytest.mark.here
def test_report_is_a_page(golden: Any) -> None:
    structure.clear_cache()
    ir, _ = network(9, "dispatched")
    report = popxl.Session(ir).report
    pieces = tuple(p.model_copy(update={"seconds": 0.012, "text": 1234, "temporaries": 96}) for p in report.pieces)
    memory = report.memory.model_copy(update={"name": "Ir[id=0]", "temporaries": 96})
    size = report.size.model_copy(update={"text": 6290, "text_written_out": 20300})
    changes = {"program": "Ir[id=0]", "pieces": pieces, "seconds": 0.5, "memory": memory, "size": size}
    known = report.model_copy(update=changes)
    golden(str(known))
    assert repr(known) == "Report[Ir[id=0] on cpu]"
    html = known._repr_html_()
    assert "&lt;lambda&gt;" in html and "<lambda>" not in html
    assert html.count("<table>") == 7 and "<svg" in html


def test_variables_of_equal_layers_share_a_line(ir: popxl.Ir) -> None:
    with ir.main_graph:
        for name, size in (("layers.0.w", 3), ("layers.1.w", 3), ("layers.2.w", 2), ("head2.w", 5)):
            ops.relu_(popxl.variable(np.zeros(size), popxl.float32, name))
    lines = [line.split() for line in str(popxl.Session(ir).report).splitlines() if ".w " in line]
    assert lines == [
        ["layers.*.w", "2", "×", "f32[3]", "24", "B", "device,", "changes"],
        ["head2.w", "f32[5]", "20", "B", "device,", "changes"],
        ["layers.2.w", "f32[2]", "8", "B", "device,", "changes"],
    ]


def test_long_tables_are_cut_and_json_has_all() -> None:
    ir, _ = network(40)
    report = popxl.Session(ir).report
    assert "  and 29 more" in str(report).splitlines()  # after the sum and eleven of them
    data = json.loads(report.model_dump_json())
    assert len(data["variables"]) == 40
    assert data["dispatches"] == 1
    assert data["memory"]["device"] == report.memory.device
    assert data["flops"] == report.flops
    assert Report.model_validate(data) == report


@pytest.mark.here
@pytest.mark.filterwarnings("ignore:Session. a run:popxl.errors.PopxlWarning")  # it transfers less than it could
def test_the_memory_of_a_report_is_what_xla_says() -> None:
    """Variables and streams are the arguments and results; on a mesh of devices, of each of them."""
    for replicas in (1, 4):
        ir, _ = network(2, replicas=replicas, transfers=3)
        session = popxl.Session(ir, "ipu_model")
        report, found = session.report, session.program.executable.memory_analysis()
        in_and_out = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
        pointers = 8 * len(
            session.program.layout.outputs + session.program.layout.variables
        )  # XLA counts those of results
        memory = report.memory
        assert in_and_out - pointers <= memory.variables + memory.arguments + memory.outputs <= in_and_out
        assert found.argument_size_in_bytes == memory.variables + memory.arguments == report.pieces[0].arguments
        assert memory.temporaries == report.pieces[0].temporaries == found.temp_size_in_bytes
        assert [device.name for device in memory.devices] == list(report.devices)
        assert {device.device for device in memory.devices} == {memory.device}
        assert len(report.devices) == replicas
        assert report.streams[0].bytes == 3 * 24


@pytest.mark.here
def test_replicas_on_one_device_have_copies_there() -> None:
    for calls in ("kept", "dispatched"):
        ir, _ = network(8, calls, replicas=9)
        report = popxl.Session(ir, "ipu_model").report
        assert (report.replicas, report.devices) == (9, ("cpu:0",))  # there are eight devices
        by_name = {v.name: v.bytes for v in report.variables}
        assert by_name["w0"] == 9 * 36
        assert by_name["w1"] == (36 if calls == "kept" else 9 * 36)  # only read, and the same for all
        one, _ = network(8, calls)
        alone = popxl.Session(one, "cpu").report.memory
        assert [m.held for m in report.memory.moments] == [9 * m.held for m in alone.moments]


@pytest.mark.here
def test_remote_variables_in_a_report(ir: popxl.Ir) -> None:
    with ir.main_graph, popxl.in_sequence():
        buffer = popxl.remote_buffer((3,), popxl.float32, 5)
        popxl.remote_variable(np.ones(3), buffer, 1, popxl.float32, "far")
        popxl.variable(np.ones(2), popxl.float32, "nobody")
        ops.remote_store(buffer, 1, ops.remote_load(buffer, 1) + 1)
    report = popxl.Session(ir).report
    assert [(v.name, v.bytes, v.place, v.changes) for v in report.variables] == [
        ("far", 12, "buffer 1, slot 1", True),
        ("nobody", 0, "unused", False),
    ]
    (buffer,) = report.buffers
    assert (buffer.number, buffer.entries, buffer.spec, buffer.bytes, buffer.memory) == (1, 5, "f32[3]", 60, "device")
    assert (buffer.loaded, buffer.stored) == (12, 12)
    assert (report.memory.variables, report.memory.buffers, report.memory.buffers_on_host) == (0, 60, 0)
    ir.options.remoteBuffers = "host"
    assert popxl.Session(ir).report.memory.buffers_on_host == 60


def test_runs_of_graphs_in_loops(ir: popxl.Ir) -> None:
    with ir.main_graph:
        x = popxl.variable(np.ones(6), popxl.float32)
        inner = ir.create_graph(lambda t: t + 1, x)
        twice = ir.create_graph(lambda t: ops.call(inner, *ops.call(inner, t)), x)
        ops.repeat(twice, 5, x)
    assert [(g.ops, g.runs) for g in popxl.Session(ir).report.graphs] == [(1, 1), (1, 5), (2, 5), (1, 10)]


@pytest.mark.here
def test_report_of_a_session_from_a_file(tmp_path: Any) -> None:
    ir, _ = network(2)
    with popxl.Session(ir) as session:
        session.save(tmp_path / "saved")
    report = popxl.Session.load(tmp_path / "saved").report
    assert report.reason == "It was so in the file."
    assert report.memory.temporaries == session.report.memory.temporaries


# Timelines -----------------------------------------------------------------------------------------------------------


def is_in_order(timeline: Timeline) -> bool:
    """On each device, one thing after the other."""
    lanes = [[s for s in timeline.spans if s.device == device] for device in timeline.devices()]
    return all(a.start <= a.end <= b.start for lane in lanes for a, b in zip(lane, lane[1:], strict=False))


@pytest.mark.here
@pytest.mark.filterwarnings("ignore:Session. a run:popxl.errors.PopxlWarning")  # it transfers less than it could
@pytest.mark.parametrize("transfers", [1, 2])
def test_a_recorded_plan_has_a_span_for_each_piece(transfers: int) -> None:
    ir, x_in = network(9, "dispatched", transfers=transfers)
    x = np.ones((2, 3) if transfers == 1 else (transfers, 2, 3), np.float32)
    with popxl.Session(ir) as session:
        session.run({x_in: x})
        with session.recording() as timeline:
            outputs = [session.run({x_in: x}) for _ in range(3)]
        pieces = [piece.name for piece in session.program.executable.segments]
        session.run({x_in: x})  # is not recorded
    assert [span.name for span in timeline.spans] == 3 * ["feeds", *pieces, "fetches"]
    assert is_in_order(timeline)
    assert timeline.devices() == ["cpu:0"]
    assert all(np.isfinite(value).all() for run in outputs for value in run.values())


def test_recording_changes_no_numbers() -> None:
    for calls in ("kept", "dispatched"):
        found = []
        for is_recorded in (False, True):
            ir, x_in = network(6, calls)
            with popxl.Session(ir) as session:
                for _ in range(3):
                    if is_recorded:
                        with session.recording():
                            outputs = session.run({x_in: np.ones((2, 3))})
                    else:
                        outputs = session.run({x_in: np.ones((2, 3))})
                found.append(next(iter(outputs.values())))
        np.testing.assert_array_equal(*found)


@pytest.mark.here
def test_one_program_is_one_span_on_each_device() -> None:
    ir, x_in = network(2, replicas=4)
    with popxl.Session(ir, "ipu_model") as session, session.recording() as timeline:
        session.run({x_in: np.ones((4, 2, 3))})
    assert sorted(timeline.devices()) == [str(device) for device in jax.devices("cpu")[:4]]
    assert [span.name for span in timeline.spans] == ["the program"] * 4
    text = str(timeline)
    assert "the program      1" in text
    lanes = [text for text in texts(timeline.picture()) if text.startswith("cpu:")]
    assert lanes == ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]


def test_a_failure_ends_the_recording() -> None:
    ir, _ = network(2)
    with popxl.Session(ir) as session:
        before = session.runner.__dict__["_call"]
        with pytest.raises(ValueError, match="stream"), session.recording() as timeline:
            session.run({})
        assert session.runner.__dict__["_call"] is before
    assert timeline.spans == []
    assert "Nothing has run." in str(timeline)
    parsed(timeline.picture())


def test_a_timeline_over_devices() -> None:
    """Devices overlap; the picture has a lane for each."""
    spans = [
        Span(device="gpu:1", name="second", start=0.15, end=0.3),
        Span(device="gpu:0", name="first", start=0.1, end=0.2),
        Span(device="gpu:0", name="first", start=0.2, end=0.3),
    ]
    timeline = Timeline(spans=spans)
    assert timeline.seconds == pytest.approx(0.2)
    lines = str(timeline).splitlines()
    assert lines[0] == "Timeline of 200 ms"
    assert [line.split() for line in lines[3:]] == [
        ["gpu:1", "second", "1", "150", "ms", "75", "%"],
        ["gpu:0", "first", "2", "200", "ms", "100", "%"],
    ]
    drawn = [element for element in parsed(timeline.picture()).iter() if len(element) and element.tag.endswith("rect")]
    assert [element.get("y") for element in drawn] == ["40", "40", "74"]
    assert Timeline.model_validate_json(timeline.model_dump_json()) == timeline


# Pages and pictures --------------------------------------------------------------------------------------------------


def test_the_examples_on_pages(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # one of them saves a picture
    results = doctest.testmod(popxl.base.pages, extraglobs={"ir": popxl.Ir()})
    assert results.attempted and not results.failed


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (999_999, "1.00 MB"), (12_345, "12.3 kB"), (5e12, "5 TB")],
)
def test_bytes(number: float, text: str) -> None:
    assert bytes_text(number).replace(".00", "") == text.replace(".00", "")


@pytest.mark.parametrize(("number", "text"), [(0, "0 s"), (2.5e-6, "2.50 us"), (0.0345, "34.5 ms"), (120, "120 s")])
def test_seconds(number: float, text: str) -> None:
    assert seconds_text(number) == text


def test_pages_are_nested_and_escaped() -> None:
    page = Page("a < b", ["One & two.", Page("inner", [Table(["x", "n"], [["<y>", "3"], ["z", "10"]])])])
    assert str(page) == "a < b\n\n  One & two.\n\ninner\n\n  x      n\n  <y>    3\n  z     10"
    assert page.html().startswith("<h3>a &lt; b</h3><p>One &amp; two.</p><h4>inner</h4><table>")
    assert '<td style="text-align: right">10</td>' in page.html()


def test_pictures_of_nothing_and_of_odd_names() -> None:
    parsed(bars("nothing", []))
    assert "a < b & c: 1 s" in texts(bars("one", [("lane", "a < b & c", 0, 1)]))


def test_memory_is_data() -> None:
    ir, _ = network(2)
    memory = ir.memory()
    assert Memory.model_validate(memory.model_dump()) == memory
    with pytest.raises(ValueError, match="frozen"):
        memory.variables = 3  # type: ignore[misc]


# One HTML page -------------------------------------------------------------------------------------------------------


class Checker(HTMLParser):
    """Notes what an HTML document holds, and whether its elements are closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "line", "rect", "polygon") or (tag in ("rect", "polygon") and not self.closes_itself):
            self.open.append(tag)

    @property
    def closes_itself(self) -> bool:
        return (self.get_starttag_text() or "").endswith("/>")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.here
def test_a_report_is_written_as_one_page(tmp_path: Any) -> None:
    ir, x_in = network(9, "dispatched")
    with popxl.Session(ir, "ipu_model") as session:
        session.run({x_in: np.ones((2, 3))})
        with session.recording():
            session.run({x_in: np.ones((2, 3))})
        session.report(tmp_path / "report.html")
        session.report.save(tmp_path / "saved.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    page = Checker(text)
    assert page.open == []
    tags = [tag for tag, _ in page.found]
    assert tags.count("svg") == 2 and tags.count("details") == 2 and "nav" in tags
    assert not {"script", "link", "img", "iframe"} & {*tags}
    assert not re.search(r"(src|href)=\"(?!#)|url\(|@import", text)  # loads nothing
    links = {found["href"] for tag, found in page.found if tag == "a"}
    assert links == {f"#{found['id']}" for tag, found in page.found if tag == "section"}
    for part in ("Schedule", "Memory of", "Compiled", "Size of the program", "Streams", "Runs", "Estimate for IPUs"):
        assert f"<h2>{part}" in text
    assert "MatMul(x, w)" in text and "2 times" in text
    assert (tmp_path / "saved.html").stat().st_size == pytest.approx(len(text.encode()), rel=0.05)


def test_memory_and_timelines_are_pages_too(tmp_path: Any) -> None:
    ir, _ = network(2)
    for name, record in (("memory", ir.memory()), ("timeline", Timeline())):
        record.save(tmp_path / name)
        assert Checker((tmp_path / name).read_text(encoding="utf-8")).open == []


def test_text_leaves_out_facts_and_listings() -> None:
    page = Page("title", [Facts([("a", "1 < 2")]), Listing("long", "x & y"), "end"])
    assert str(page) == "title\n\n  end"
    assert "<dt>a</dt><dd>1 &lt; 2</dd>" in page.html()
    assert "<summary>long</summary>" in page.html() and "x &amp; y</pre>" in page.html()


# What a program costs ------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Session. a run:popxl.errors.PopxlWarning")  # it transfers less than it could
def test_memory_of_a_session() -> None:
    ir, _ = network(2, transfers=3)
    session = popxl.Session(ir)
    memory = session.memory()
    assert memory == session.report.memory
    assert (memory.variables, memory.arguments, memory.outputs, memory.constants) == (72, 3 * 24, 3 * 24, F32)
    assert memory.code is None  # of CPUs, XLA does not say
    assert memory.host == memory.variables_on_host == 72
    assert memory.device == 72 + 6 * 24 + F32 + memory.temporaries
    assert "In the host's memory: 72 B for variables." in str(memory)


@pytest.mark.here
def test_each_device_has_its_own_memory(ir: popxl.Ir) -> None:
    ir.options.placement = "several"
    with ir.main_graph:
        with popxl.ipu(0):
            x = ops.exp(popxl.variable(np.ones(10), popxl.float32, "x")).copy_to_ipu(1)
        with popxl.ipu(1):
            y = x * popxl.variable(np.ones((30, 10)), popxl.float32, "w")
            ops.host_store(popxl.d2h_stream(y.shape, popxl.float32), y)
    memory = popxl.Session(ir, "ipu_hw").memory()
    first, second = memory.devices
    assert (first.name, first.variables, first.outputs) == ("cpu:0", 40, 0)
    assert (second.name, second.variables, second.outputs) == ("cpu:1", 1200, 1200)
    assert memory.device == second.device > first.device
    assert "device   variables   outputs   temporaries" in str(memory)


def test_live_tensors_are_what_is_held() -> None:
    for calls, layers in (("kept", 3), ("dispatched", 9)):
        ir, _ = network(layers, calls)
        memory = popxl.Session(ir).memory()
        for step, moment in enumerate(memory.moments):
            assert sum(t.bytes for t in memory.tensors if t.first < step <= t.last) == moment.held
        assert any(t.name.startswith("tanh_out") for t in memory.tensors)


def test_many_live_tensors_are_drawn_in_one_layer(ir: popxl.Ir) -> None:
    with ir.main_graph:
        x = popxl.variable(np.ones(3), popxl.float32)
        kept = [x * i for i in range(250)]
        ops.concat(kept)
    picture = ir.memory().picture()
    assert picture.count('class="value') == 200
    parsed(picture)


def test_size_with_and_without_outlining() -> None:
    sizes = {}
    for calls in ("kept", "dispatched"):
        ir, _ = network(9, calls)
        sizes[calls] = popxl.Session(ir).report.size
        assert (sizes[calls].ops, sizes[calls].ops_written_out) == (13 + 3, 4 + 9 * 3)
        assert 2 * sizes[calls].text < (sizes[calls].text_written_out or 0)
    ir, _ = network(9, "inlined")
    inlined = popxl.Session(ir).report.size
    assert sizes["kept"].text_written_out == pytest.approx(inlined.text, rel=0.25)


@pytest.mark.here
def test_the_text_of_a_program_from_a_file_is_not_known(tmp_path: Any) -> None:
    ir, _ = network(2)
    with popxl.Session(ir) as session:
        session.save(tmp_path / "saved")
    report = popxl.Session.load(tmp_path / "saved").report
    assert report.size.text_written_out is None
    assert "text that is compiled" not in str(report)


def test_work_is_counted_by_op() -> None:
    ir, _ = network(9)
    report = popxl.Session(ir).report
    work = {each.op: (each.runs, each.flops) for each in report.work}
    assert work["MatMul"] == (9, 9 * 2 * 2 * 3 * 3)
    assert work["Tanh"] == (9, 9 * 6)
    assert work["HostLoad"] == (1, 0)
    assert report.flops == sum(flops for _, flops in work.values())
    main, layer = report.graphs
    assert report.flops == main.flops + 9 * layer.flops
    assert layer.text.startswith("network.<lambda>_subgraph(0)(x: f32[2, 3], w: f32[3, 3]):")


def test_traffic_of_remote_buffers_and_between_replicas() -> None:
    ir = popxl.Ir(replication=2)
    with ir.main_graph, popxl.in_sequence():
        buffer = popxl.remote_buffer((3,), popxl.float32, 5)

        def turn(i: popxl.Tensor) -> popxl.Tensor:
            x = ops.remote_load(buffer, i)
            ops.remote_store(buffer, i, ops.collectives.replicated_all_reduce(x))
            return i + 1

        start = popxl.variable(0, popxl.uint32)
        ops.repeat(ir.create_graph(turn, start), 4, start)
        ops.remote_load(buffer, 0)
    report = popxl.Session(ir, "ipu_model").report
    assert [(b.loaded, b.stored) for b in report.buffers] == [(5 * 12, 4 * 12)]
    assert [c.model_dump() for c in report.collectives] == [
        {"op": "ReplicatedAllReduce", "group_size": 2, "runs": 4, "bytes": 48}
    ]
    assert "Between replicas" in str(report)


def test_runs_are_in_the_report() -> None:
    ir, x_in = network(2)
    with popxl.Session(ir) as session:
        assert (session.report.runs, session.report.timeline) == (0, None)
        assert "Runs" not in str(session.report)
        session.run({x_in: np.ones((2, 3))})
        assert session.report.runs == 1 and session.report.run_seconds > 0
        assert "Run once." in str(session.report) and "session.recording()" in str(session.report)
        with session.recording() as timeline:
            session.run({x_in: np.ones((2, 3))})
    assert session.report.timeline == timeline
    assert "Timeline of" in str(session.report)
