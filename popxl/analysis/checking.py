"""`check`: likely mistakes of a program with replicas, and the distribution of each value over replicas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from popxl.analysis.lints import drifting
from popxl.analysis.replicas.inference import infer
from popxl.analysis.replicas.outliers import outliers
from popxl.analysis.replicas.report import Finding, Report

if TYPE_CHECKING:
    from popxl.core.recording import Op
    from popxl.ir import Ir


def check(ir: Ir) -> Report:
    """Infer the distribution of a program's values over replicas, and find likely mistakes.

    Args:
        ir: the program. Nothing is compiled.

    Returns:
        Types and findings; printed, all of them as text.

    Example:
        >>> ir = popxl.Ir(axes={"data": 4})
        >>> with ir.main_graph:
        ...     w = popxl.variable(np.ones(3), popxl.float32, "w")
        ...     ops.add_(w, w * ops.host_load(popxl.h2d_stream((3,), popxl.float32)))
        >>> [(each.category, each.tensor, each.axes) for each in check(ir).findings]
        [('drifting variable', 'w', ('data',))]
    """
    report = infer(ir)
    others = [*outliers(report)]
    report.findings += [
        Finding("drifting variable", certain, op, v.path, axes, message)
        for certain, v, op, axes, message in drifting(ir, report)
    ]
    report.findings += others
    report.findings.sort(key=lambda each: each.op.id)
    return report


def report_data(report: Report) -> dict[str, Any]:
    """A report in plain values, for JSON: the sizes of its axes by name, findings, notes, and ops that were not typed.

    A message names the mistake and its remedy. Without a mesh, when nothing could be checked, the axes are `None`.
    """
    mesh = report.mesh
    return {
        "axes": None if mesh is None else dict(zip(mesh.names, mesh.sizes, strict=True)),
        "findings": [_finding_data(each) for each in report.findings],
        "notes": [_finding_data(each) for each in report.notes],
        "not typed": [{"op": op.op_type, "reason": why, **_line_data(op)} for op, why in report.untyped.items()],
    }


def _finding_data(found: Finding) -> dict[str, Any]:
    return {
        "category": found.category,
        "certain": found.certain,
        "message": found.message,
        "tensor": found.tensor,
        "axes": found.axes,
        **_line_data(found.op),
    }


def _line_data(op: Op) -> dict[str, Any]:
    return {"file": op.source.file, "line": op.source.line, "code": op.source.text}
