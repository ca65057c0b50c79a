"""Rows of ops that talk to the host, and of those that run graphs."""

from __future__ import annotations

from typing import Any

import numpy as np

import popxl
from popxl import ops
from tests.popxl.ops.rows.schema import ANY, FLOATS, Fed, Row, X, bad, over, sample, scalar, values


def doubled(x: Any, y: Any) -> Any:
    return x * 2 + y


def stepped(x: Any, y: Any) -> Any:
    return x * 0.5 + y


def stored(t: Any) -> Any:
    ops.host_store(popxl.d2h_stream(t.shape, t.dtype, "passed"), t)
    return t


def called(*operands: Any) -> Any:
    graph = popxl.gcg().ir.create_graph(doubled, *operands)
    return ops.call(graph, *operands)[0]


def called_with_info(*operands: Any) -> Any:
    graph = popxl.gcg().ir.create_graph(doubled, *operands)
    return ops.call_with_info(graph, *operands).outputs[0]


def repeated(x: Any, y: Any) -> Any:
    graph = popxl.gcg().ir.create_graph(stepped, x, y)
    return ops.repeat(graph, 3, x, y)[0]


def repeated_with_info(x: Any, y: Any) -> Any:
    graph = popxl.gcg().ir.create_graph(stepped, x, y)
    return ops.repeat_with_info(graph, 3, x, y).outputs[0]


def chosen(x: Any, y: Any, form: Any = ops.conditional) -> Any:
    ir = popxl.gcg().ir
    graphs = [ir.create_graph(branch, x, y) for branch in (doubled, stepped)]
    return form(popxl.constant(True), *graphs, [x, y], [x, y])


def chosen_with_info(x: Any, y: Any) -> Any:
    return chosen(x, y, ops.conditional_with_info).outputs[0]


GRAPHS = [
    Row("host_load", lambda stream, name=None: stream, [sample(Fed(values(d, (2, 3)))) for d in ANY.split()]
        + [sample(Fed(X), "x"), sample(Fed(scalar(2, "float32")))],
        "Init HostLoad", "{0}_hostload", adds=2, tolerance=0),
    Row("host_store", lambda t: t, over(ANY, (2, 3)), "HostStore", "", adds=0, tolerance=0, build=stored),
    Row("init", lambda shape, dtype, *how: np.zeros(shape, dtype.as_numpy()),
        [sample((2, 3), popxl.float32, dtype="float32"), sample([], popxl.int32),
         sample((4,), popxl.bool, "acc", "zero")],
        "Init", "t", bad=[bad(ValueError, "expected 'zero' or 'undef'", (2,), popxl.float32, "acc", "one")]),
    Row("arange", lambda *numbers: np.arange(*numbers, dtype=np.int32 if type(numbers[-1]) is not float else None),
        [sample(5), sample(2, 9, 3), sample(1, -2, -0.5, dtype="float32"), sample(3, 3), sample(np.int64(4)),
         sample(1000, 1006, 1, popxl.float16, expect=np.arange(1000, 1006.0), dtype="float16")],
        "Arange", "arange_out",
        bad=[bad(ValueError, "^arange: `step` is 0", 0, 3, 0),
             bad(ValueError, "are 0, inf and 1; expected finite numbers", 0, float("inf")),
             bad(TypeError, "^arange: `stop` must be a number", "3"),
             bad(TypeError, "`dtype` must be a popxl dtype", 3, dtype=np.int32),
             bad(TypeError, "`dtype` is bool; expected an integer type", 3, dtype=popxl.bool)]),
    Row("print_tensor", lambda t, title=None, **style: t, over(ANY, (2, 3), title="shown"), "PrintTensor", "print_out",
        differentiable=(0,), keeps=0, tolerance=0,
        bad=[bad(ValueError, "`separator` must be a single character; got ', '", X, separator=", "),
             bad(ValueError, "`open_bracket`", X, open_bracket=""),
             bad(ValueError, "`close_bracket`", X, close_bracket="))"),
             bad(KeyError, "`float_format` is 'short'", X, float_format="short")]),
    Row("call", doubled, over("float32 float16 int32", (2, 3), (3,)), "Call", "add_out", build=called,
        differentiable=(0, 1), keeps=0, colocated=False),
    Row("call_with_info", doubled, over("float32", (2, 3), (3,)), "Call", "add_out", build=called_with_info,
        colocated=False),
    Row("conditional", doubled, over("float32 float16", (2, 3), (3,)), "If", "add_out_or_add_out", adds=2, build=chosen,
        differentiable=(0, 1), colocated=False),
    Row("conditional_with_info", doubled, over("float32", (2, 3), (3,)), "If", "add_out_or_add_out", adds=2,
        build=chosen_with_info, colocated=False),
    Row("repeat", lambda x, y: stepped(stepped(stepped(x, y), y), y), over(FLOATS, (2, 3), (3,)), "Loop", "add_out",
        build=repeated, colocated=False),
    Row("repeat_with_info", lambda x, y: stepped(stepped(stepped(x, y), y), y), over("float32", (2, 3), (3,)), "Loop",
        "add_out", build=repeated_with_info, colocated=False),
]  # fmt: skip
