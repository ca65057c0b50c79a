"""Patterns: small rewrites, op by op, of finished graphs.

A pattern inspects an op and returns its replacement, if any. The author of an op that some pattern has to replace
registers the pattern next to it, so this module knows no op by name:

    @pattern("default")
    def drop_noise(op: popxl.Op) -> Replacement | None:
        return ops.identity if op.kind is noise and not op.attributes["scale"] else None

Rewriting may lose what a gradient needs: differentiate first, apply patterns afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import popxl
from popxl import Op
from popxl.extend.arguments import check_type

Replacement = Callable[..., Any]
"""Replacement function: from the inputs of the old op to tensors for its outputs. See `popxl.Graph.replace`."""

Pattern = Callable[[Op], Replacement | None]
"""Function that returns the replacement of an op; `None` keeps the op."""

patterns_level: dict[str, list[Pattern]] = {"no_patterns": [], "minimal": [], "default": [], "all": []}
"""Patterns by level; each level includes those of lower levels."""


def pattern(level: str) -> Callable[[Pattern], Pattern]:
    """Decorator: register a pattern for `level` and higher levels.

    The replacement of an op should match no pattern, so that applying patterns again changes nothing.

    Raises:
        KeyError: for an unknown level.
    """
    _check(level)

    def register(rewrite: Pattern) -> Pattern:
        names = list(patterns_level)
        for name in names[names.index(level) :]:
            patterns_level[name].append(rewrite)
        return rewrite

    return register


def apply_pre_alias_patterns(ir: popxl.Ir, level: str = "default") -> None:
    """Apply the patterns of a level to every graph of `ir`, in place. Doing so again changes nothing.

    Call it when all is built and differentiated, right before creating the session.

    Args:
        ir: the program.
        level: ``"no_patterns"``, ``"minimal"``, ``"default"`` or ``"all"``.

    Raises:
        KeyError: for an unknown level.

    Example:
        >>> ir = popxl.Ir()
        >>> with ir.main_graph:
        ...     y = popxl.variable(1.0) + 1.0
        >>> apply_pre_alias_patterns(ir)
        >>> [op.op_type for op in ir.main_graph.ops]
        ['Add']
    """
    check_type(ir, popxl.Ir, "apply_pre_alias_patterns: `ir`", "an Ir")
    apply_patterns(ir.graphs, level)


def apply_patterns(graphs: Iterable[popxl.Graph], level: str = "default") -> None:
    """Apply the patterns of a level to some graphs; see `apply_pre_alias_patterns`. Graphs they call are left alone."""
    _check(level)
    for graph in graphs:
        for op in graph.ops:
            replacement = next(filter(None, (rewrite(op) for rewrite in patterns_level[level])), None)
            if replacement is not None:
                graph.replace([op], replacement)


def _check(level: str) -> None:
    if level not in patterns_level:
        raise KeyError(f"There is no pattern level {level!r}; the levels are {list(patterns_level)}.")
