"""Arguments of kinds that nothing can be made of: the error says which argument, what it must be and what came."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.transforms import autodiff

X = np.ones((2, 3), np.float32)


class Thing:
    """Nothing that anybody expects."""

    def __repr__(self) -> str:
        return "Thing()"


THING = Thing()


@pytest.fixture
def program() -> Any:
    """A program of one call, and its gradient."""
    ir = popxl.Ir(replication=2)
    with ir.main_graph:
        x, is_so = popxl.variable(X, name="x"), popxl.constant(True, popxl.bool)
        graph = ir.create_graph(lambda t: ops.tanh(t), x)
        info, site = autodiff(graph), ops.call_with_info(graph, x)
        yield SimpleNamespace(ir=ir, x=x, is_so=is_so, graph=graph, info=info, site=site)


BUILDING: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "inputs of a branch": (
        lambda p: ops.conditional(p.is_so, p.graph, p.graph, THING, [p.x]),
        TypeError,
        r"The inputs of the then_branch graph .* must be an iterable of values; got Thing\(\)",
    ),
    "inputs_dict": (
        lambda p: ops.call(p.graph, inputs_dict=[p.x]),
        TypeError,
        r"`inputs_dict` of the called graph .* must be a mapping from its inputs to values; got \[.*\(list\)",
    ),
    "turns": (lambda p: ops.repeat(p.graph, X, p.x), TypeError, "repeat: `repeat_count` must be an int; got array"),
    "required": (
        lambda p: autodiff(p.graph, grads_required=3),
        TypeError,
        r"autodiff: `grads_required` must be a list of tensors; got 3 \(int\)",
    ),
    "provided": (
        lambda p: autodiff(p.graph, grads_provided=p.graph.outputs[0]),
        TypeError,
        "autodiff: `grads_provided` must be a list of tensors; got Tensor",
    ),
    "known gradients": (
        lambda p: autodiff(p.graph, called_graphs_grad_info=[p.info]),
        TypeError,
        "autodiff: `called_graphs_grad_info` must be a mapping from graphs to their GradGraphInfo; got",
    ),
    "no call": (
        lambda p: p.info.fwd_parent_ins_to_grad_parent_outs(p.site, THING),
        TypeError,
        r"`grad_call_info` must be what `ops.call_with_info` returns; got Thing\(\)",
    ),
    "no forward call": (
        lambda p: p.info.fwd_parent_ins_to_grad_parent_outs(None, p.site),
        TypeError,
        "`fwd_call_info` must be what `ops.call_with_info` returns; got None",
    ),
    "the forward call": (
        lambda p: p.info.fwd_graph_ins_to_grad_parent_outs(p.site),
        TypeError,
        "`grad_call_info` is a call of .*, which was differentiated; expected one of its gradient graph",
    ),
    "stride": (
        lambda p: p.ir.replica_grouping(stride="2"),
        TypeError,
        r"replica_grouping: `stride` must be an integer; got '2' \(str\)",
    ),
    "group_size": (
        lambda p: p.ir.replica_grouping(group_size=2.0),
        TypeError,
        r"replica_grouping: `group_size` must be an integer; got 2.0 \(float\)",
    ),
    "seeds": (
        lambda p: popxl.create_seeds(7, replicas=None),
        TypeError,
        "create_seeds: `replicas` must be an integer; got None",
    ),
    "data": (
        lambda p: popxl.variable(THING, popxl.float32),
        TypeError,
        r"to_numpy: the data holds Thing\(\) \(Thing\); expected numbers",
    ),
    "text": (
        lambda p: popxl.constant("hello", popxl.float32),
        TypeError,
        r"to_numpy: the data holds .*'hello'.* \(str_\); expected numbers",
    ),
    "rows of several lengths": (
        lambda p: popxl.variable([[1], [2, 3]], popxl.float32),
        ValueError,
        r"to_numpy: the data is no array of numbers: \[\[1\], \[2, 3\]\]. NumPy says: .*inhomogeneous",
    ),
    "name of a variable": (
        lambda p: popxl.variable(X, name=popxl.float32),
        TypeError,
        "The name of a tensor must be a string; got .*dtype",
    ),
    "name of a stream": (
        lambda p: popxl.h2d_stream((2,), popxl.float32, 3),
        TypeError,
        r"The name of a stream must be a string; got 3 \(int\)",
    ),
    "name of a graph": (
        lambda p: p.ir.create_empty_graph(THING),
        TypeError,
        r"The name of a graph must be a string; got Thing\(\)",
    ),
    "name of a scope": (
        lambda p: popxl.name_scope(None).__enter__(),
        TypeError,
        "The name of a scope must be a string; got None",
    ),
    "tensors": (
        lambda p: ops.concat(None),
        TypeError,
        r"concat: `ts` must be a list of tensors; got None \(NoneType\)",
    ),
    "range": (lambda p: ops.arange(float("inf")), ValueError, "arange: .* are 0, inf and 1; expected finite"),
}


@pytest.mark.parametrize("name", BUILDING)
def test_building(program: Any, name: str) -> None:
    """Nothing is left behind: the program that was begun can be finished."""
    build, error, message = BUILDING[name]
    before = str(program.ir)
    with pytest.raises(error, match=message):
        build(program)
    assert str(program.ir) == before


WORDS: dict[str, Callable[[Any, Any], Any]] = {
    "mode": lambda p, a: ops.interpolate(p.x, (1.0, 2.0), a),
    "auto_pad": lambda p, a: ops.max_pool(p.image, (2, 2), auto_pad=a),
    "storage_order": lambda p, a: ops.max_pool(p.image, (2, 2), storage_order=a),
    "pad_type": lambda p, a: ops.conv(p.image, p.image, pad_type=a),
    "ord": lambda p, a: ops.norm(p.x, a),
    "reduction": lambda p, a: ops.nll_loss(p.x, p.labels, reduction=a),
    "init_type": lambda p, a: ops.init((2,), popxl.float32, "t", a),
    "float_format": lambda p, a: ops.print_tensor(p.x, float_format=a),
    "partials_type": lambda p, a: ops.matmul(p.x, p.x.T, partials_type=a),
    "retrieval_mode": lambda p, a: popxl.variable(X, retrieval_mode=a),
    "return_all_grad_graphs": lambda p, a: autodiff(p.other, return_all_grad_graphs=a),
    "the number of replicas": lambda p, a: popxl.Ir(a),
}


REFUSED = (TypeError, ValueError, KeyError, popxl.errors.PopxlError)


@pytest.mark.parametrize("name", WORDS)
def test_an_array_in_the_place_of_a_word(program: Any, name: str) -> None:
    """NumPy's error about the truth value of an array says nothing of the argument. Nothing stays of it."""
    p = program
    p.image, p.labels = popxl.constant(np.ones((1, 1, 4, 4), np.float32)), popxl.constant(np.zeros(2, np.int32))
    p.other = p.ir.create_graph(lambda t: ops.tanh(t), p.x)

    def made() -> tuple[int, ...]:
        main = p.ir.main_graph
        return len(p.ir.graphs), len(main.ops), len(main.variables), len(main.constants)

    before = made()
    with pytest.raises(REFUSED, match=rf"`?{name}`? (is|must be) .*array\(\[1., 1., 1.\]\)"):
        WORDS[name](p, np.ones(3))
    # `p.x.T` is an op of the program.
    assert made() == (before if name != "partials_type" else (before[0], before[1] + 1, *before[2:]))


def test_numbers_beyond_all_bounds() -> None:
    for build in (lambda: popxl.Ir(2**40), lambda: popxl.Ir(axes={"data": 2**40})):
        with pytest.raises(ValueError, match="^Ir: the number of replicas is 1099511627776; expected 1 to 65536"):
            build()
    with popxl.Ir().main_graph as main:
        image, regions = popxl.constant(np.ones((1, 1, 4, 4), np.float32)), popxl.constant(np.ones((1, 4), np.float32))
        with pytest.raises(popxl.errors.PopxlError, match=r"`sampling_ratio` is 1099511627776 .* fewer than 2\*\*31"):
            ops.roi_align(image, regions, popxl.constant([0]), (2, 2), 1.0, 2**40)
        assert main.ops == []
