"""What notebooks show: graphs, memory and reports as HTML, with all names escaped, and long graphs shortened."""

from __future__ import annotations

from html.parser import HTMLParser

import numpy as np

import popxl
from popxl import ops

HOSTILE = "<script>alert(1)</script>&\"'"


class Tags(HTMLParser):
    """The tags of a piece of HTML, and its text. Each tag is closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        assert not any(name.startswith("on") for name, _ in attributes)
        self.open.append(tag)
        self.found.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_names_are_escaped(ir: popxl.Ir) -> None:
    def double(x: popxl.Tensor) -> popxl.Tensor:
        return x + x

    double.__name__ = HOSTILE
    with ir.main_graph, popxl.name_scope(HOSTILE):
        x = popxl.variable(np.ones(3), popxl.float32, HOSTILE)
        stream = popxl.d2h_stream((3,), popxl.float32, HOSTILE)
        (y,) = ops.call(ir.create_graph(double, x), x)
        ops.host_store(stream, y)
    session = popxl.Session(ir)
    with session, session.recording() as timeline:
        session.run()
    for shown in (
        ir,
        ir.main_graph,
        *ir.main_graph.called_graphs,
        ir.memory(),
        session.memory(),
        session.report,
        timeline,
    ):
        tags = Tags(shown._repr_html_())
        assert "script" not in tags.found and tags.found[0].startswith("h")
    page = Tags(ir._repr_html_())
    assert HOSTILE in page.text and str(ir.main_graph).splitlines()[1] in page.text
    assert page.found.count("details") == 2


def test_long_graphs_are_shortened(ir: popxl.Ir) -> None:
    with ir.main_graph:
        x = popxl.constant(1.0)
        for _ in range(1000):
            x = x + 1
        for k in range(20):
            (x,) = ops.call(ir.create_graph(lambda x, k: x * k, x, k), x)
    html = ir.main_graph._repr_html_()
    assert html.count("\n") < 500 and "... 621 more lines ..." in html
    assert "and 8 more graphs" in html and html.count("<summary>") == 1 + 12
    assert Tags(html).text.count("Call ") == 20
