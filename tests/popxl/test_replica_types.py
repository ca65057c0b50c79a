"""Types of values along the axes of replicas: as they are told and printed, with groups that form no mesh, too."""

from typing import Any

import numpy as np

import popxl
import popxl_addons as addons
from popxl import ops
from popxl.analysis.checking import check
from popxl_addons.ops.replicated_all_reduce_TP import (
    replicated_all_reduce_identical_grad_inputs,
    replicated_all_reduce_identical_inputs,
)
from tests.popxl.meshes import F32, c, divided, fed, gradient, mesh, two_layers, update


def test_types() -> None:
    with (ir := mesh()).main_graph:
        y = two_layers()
    report = check(ir)
    assert report.text(y) == "{data: varying}"
    shown = {t.name: report.text(t) for op in ir.main_graph.ops for t in op.outputs}
    assert shown["gelu_out"] == "{data: varying, tensor: sharded 1}"
    assert shown["matmul_out__t0"] == "{data: varying, tensor: partial}"
    assert {v.name: report.text(v) for v in ir.main_graph.variables} == {
        "down": "{tensor: sharded 0}",
        "up": "{tensor: sharded 1}",
    }


def test_types_in_a_printed_graph() -> None:
    with (ir := mesh()).main_graph:
        two_layers()
    report = check(ir)
    lines = {line.strip() for line in report.listing(ir.main_graph).splitlines()}
    assert "matmul_out__t0: f32[5, 8]{data: varying, tensor: partial} = MatMul(gelu_out, down)" in lines
    assert "down: f32[6, 8]{tensor: sharded 0} = variable, shared along data" in {" ".join(e.split()) for e in lines}
    assert "{" not in str(ir.main_graph)


def test_gradients_of_divided_layers() -> None:
    """What goes back through both ends of divided layers is the same on all of them."""
    with (ir := mesh()).main_graph:
        x = popxl.graph_input
        facts = [divided(1, 8, 6, name="up"), divided(0, 6, 8, name="down")]

        def forward(x: Any, up: Any, down: Any) -> Any:
            inside = replicated_all_reduce_identical_inputs(x, group="tensor")
            return replicated_all_reduce_identical_grad_inputs(ops.gelu(inside @ up) @ down, group="tensor")

        x = fed(5, 8)
        graph = ir.create_graph(forward, x, *facts)
        info = popxl.transforms.autodiff(graph)
        site = ops.call_with_info(graph, x, *facts)
        found = ops.call(info.graph, site.outputs[0], inputs_dict=info.inputs_dict(site))
    addons.patterns.apply_pre_alias_patterns(ir)
    report = check(ir)
    assert [report.text(t) for t in found] == [
        "{data: varying}",
        "{data: varying, tensor: sharded 1}",
        "{data: varying, tensor: sharded 0}",
    ]


def test_groups_that_form_no_mesh() -> None:
    ir = popxl.Ir(replication=6)
    with ir.main_graph:
        x = fed(4)
        c.replicated_all_reduce(x, group=ir.replica_grouping(group_size=2))
        c.replicated_all_reduce(x, group=ir.replica_grouping(group_size=3))
    report = check(ir)
    assert report.mesh is None
    assert "do not form a mesh" in str(report)


def test_groups_without_names() -> None:
    ir = popxl.Ir(replication=8)
    with ir.main_graph:
        w, g = gradient()
        ops.scaled_add_(w, c.replicated_all_reduce(g, "mean", group=ir.replica_grouping(stride=2, group_size=4)), b=0.1)
    (finding,) = check(ir).findings
    assert finding.axes == ("2 replicas",)


def test_an_op_that_does_not_say_what_it_makes() -> None:
    kind = popxl.OpKind(
        "Total",
        lambda t, *, group: group.combined(t, "add"),
        shape=lambda t, **groups: t.spec,
        gradient=None,
        traits=[popxl.op.BetweenReplicas()],
    )
    with (ir := mesh()).main_graph:
        w, g = gradient()
        update(w, kind(g, stride=1, group_size=8))
    report = check(ir)
    assert not report.findings
    assert "not typed: Total" in str(report)


def test_the_statement_computes_nothing() -> None:
    with (ir := popxl.Ir(replication=2)).main_graph:
        x = fed(3)
        y = c.assert_replicated(x)
        out = popxl.d2h_stream((3,), F32)
        ops.host_store(out, y)
    assert not ir.communication().collectives
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    with popxl.Session(ir, "ipu_model") as session:
        (stream,) = session.expected_inputs()
        np.testing.assert_array_equal(session.run({stream: rows})[out], rows)
