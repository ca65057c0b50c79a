"""A rough count of the floating point operations of a program: matrix products and similar ops.

The op types in `FLOPS_FNS` are counted. All others, in-place forms and fused gradients among them, count nothing here;
`session.report.work` counts every op, with the same counts except for group norms, which it does not estimate.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal

import popxl
from popxl.extend.arguments import check_type, word
from popxl.extend.graphs import own_flops
from popxl.op import Op
from popxl.utils import table_to_string

__all__ = ["evaluate_FLOPs", "evaluate_ir_FLOPs", "format_flops_scientific", "print_FLOPs", "total_FLOPs"]

TOTAL = "TOT"

_EXPONENTS = {"K": 3, "M": 6, "G": 9, "T": 12}
_NUMBER = re.compile(r"_subgraph\(\d+\)")  # in the names of graphs


def group_norm_flops(op: Op) -> int:
    """Means, variances, and four operations for each element of the result; the statistics are a rough guess."""
    x, means = op.inputs[0], op.outputs[1].nelms
    members = x.shape[-1] * x.shape[-2] * x.shape[0] / means
    return int(members + (2 * members + 2 * means) + 4 * op.outputs[0].nelms)


FLOPS_FNS: dict[str, Callable[[Op], int]] = {
    **dict.fromkeys(("MatMul", "Add", "Sub", "Mul", "Div"), lambda op: own_flops(op).total),
    "GroupNormalization": group_norm_flops,
}
"""Op type → the count for one such op."""


def evaluate_FLOPs(graph: popxl.Graph) -> dict[str, Any]:
    """The floating point operations of one run of `graph`, by op type and op.

    A called graph counts at every call, and in a loop once for every iteration. Conditionals count nothing, because the
    branch is not known before.

    Returns:
        ``{op type: {op id: count}, "TOT": total}``. Counts of a called graph for an op type are below it in the same
        form, ``{"Call_<op id>(<graph>)": {op id: count}}``, with ``Loop`` for a loop.

    Example:
        >>> with popxl.Ir().main_graph as main:
        ...     y = popxl.variable(np.ones((3, 4))) @ popxl.variable(np.ones((4, 8)))  # 2 * 3 * 4 * 8
        >>> evaluate_FLOPs(main)
        {'MatMul': {100: 192}, 'TOT': 192}
    """
    check_type(graph, popxl.Graph, "evaluate_FLOPs: `graph`", "a popxl.Graph")
    breakdown: dict[str, Any] = _by_type(graph)
    return breakdown | {TOTAL: sum(count for _, count in _leaves(breakdown))}


def evaluate_ir_FLOPs(ir: popxl.Ir) -> dict[str, Any]:
    """`evaluate_FLOPs` of the main graph, times the number of replicas.

    Example:
        >>> ir = popxl.Ir(replication=2)
        >>> with ir.main_graph:
        ...     y = popxl.constant([1.0, 2.0, 3.0]) + 1.0
        >>> evaluate_ir_FLOPs(ir)
        {'Add': {100: 6}, 'TOT': 6}
    """
    check_type(ir, popxl.Ir, "evaluate_ir_FLOPs: `ir`", "an Ir")
    return _times(evaluate_FLOPs(ir.main_graph), ir.replication_factor)


def total_FLOPs(ir: popxl.Ir) -> int:
    """The floating point operations of one run of the program, on all replicas together.

    Example:
        >>> ir = popxl.Ir()
        >>> with ir.main_graph:
        ...     y = popxl.constant([1.0, 2.0, 3.0]) * 2.0 + 1.0
        >>> total_FLOPs(ir)
        6
    """
    return int(evaluate_ir_FLOPs(ir)[TOTAL])


def _by_type(graph: popxl.Graph) -> dict[str, dict[Any, Any]]:
    breakdown: dict[str, dict[Any, Any]] = {}
    for op in graph.ops:
        if op.op_type in FLOPS_FNS:
            breakdown.setdefault(op.op_type, {})[op.id] = FLOPS_FNS[op.op_type](op)
        elif op.op_type in ("Call", "Loop"):
            (called,) = op.called_graphs
            key = f"{op.op_type}_{op.id}({_NUMBER.sub('', called.name)})"
            iterations = op.attributes.get("repeat_count", 1)
            for op_type, counts in _by_type(called).items():
                breakdown.setdefault(op_type, {})[key] = _times(counts, iterations)
    return breakdown


def _times(counts: Any, factor: int) -> Any:
    if isinstance(counts, dict):
        return {key: _times(value, factor) for key, value in counts.items()}
    return counts * factor


def _leaves(counts: dict[Any, Any], path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], int]]:
    for key, value in counts.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), value


def print_FLOPs(
    flops_breakdown: dict[str, Any], mode: Literal["type", "flat"] = "type", numerical_format: str = "nearest3"
) -> None:
    """Print a table of the results of `evaluate_FLOPs`, the largest first.

    Args:
        flops_breakdown: result of `evaluate_FLOPs` or `evaluate_ir_FLOPs`.
        mode: ``"type"`` for a row for each op type, with its share in percent; ``"flat"`` for one for each op.
        numerical_format: as for `format_flops_scientific`.

    Raises:
        ValueError: for an unknown `mode` or `numerical_format`.

    Example:
        >>> with popxl.Ir().main_graph as main:
        ...     y = popxl.variable(np.ones((3, 4))) @ popxl.variable(np.ones((4, 8))) + 1.0
        >>> print_FLOPs(evaluate_FLOPs(main), "flat")  # doctest: +NORMALIZE_WHITESPACE
        Op Type | FLOPs      | Op Name
        ----------------------------------
        TOT     | 0.216E+03  |
        MatMul  | 0.192E+03  | MatMul.100
        Add     | 24.000E+00 | Add.101
        <BLANKLINE>
    """
    word(mode, "print_FLOPs: `mode`", ("type", "flat"))
    total = flops_breakdown[TOTAL]
    types = {op_type: counts for op_type, counts in flops_breakdown.items() if op_type != TOTAL}
    rows: list[tuple[str, int, str]]
    if mode == "type":
        by_type = {op_type: sum(count for _, count in _leaves(counts)) for op_type, counts in types.items()}
        share = 100 / total if total else 0.0
        rows = [(op_type, count, f"{count * share:.1f}") for op_type, count in ({TOTAL: total} | by_type).items()]
    else:
        rows = [(TOTAL, total, ""), *((path[0], count, ".".join(map(str, path))) for path, count in _leaves(types))]
    rows.sort(key=lambda row: row[1], reverse=True)
    header = ("Op Type", "FLOPs", "%" if mode == "type" else "Op Name")
    cells = [(op_type, format_flops_scientific(count, numerical_format), last) for op_type, count, last in rows]
    print(table_to_string([header, *cells]))


def format_flops_scientific(val: float, format: str = "nearest3") -> str:
    """A count with three decimals and an exponent.

    Args:
        val: the count, 0 or more.
        format: ``"nearest3"`` for the multiple of 3 that is nearest to the exponent of `val`; ``"K"``, ``"M"``,
            ``"G"``, ``"T"`` for 3, 6, 9, 12.

    Raises:
        ValueError: for an unknown `format`.

    Example:
        >>> format_flops_scientific(21000), format_flops_scientific(640), format_flops_scientific(3.75e8, "M")
        ('21.000E+03', '0.640E+03', '375.000E+06')
    """
    if format == "nearest3":
        exponent = 3 * ((math.floor(math.log10(val)) + 1) // 3) if val else 0
    elif format in _EXPONENTS:
        exponent = _EXPONENTS[format]
    else:
        raise ValueError(
            f"format_flops_scientific: `format` is {format!r}; expected 'nearest3' or one of {list(_EXPONENTS)}."
        )
    return f"{val / 10**exponent:.3f}E{exponent:+03d}"
