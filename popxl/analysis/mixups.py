"""One thing that is taken for another: the seeds of dropouts, and what was gathered before its pieces were changed."""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import TYPE_CHECKING

from popxl.analysis.mesh import Mesh
from popxl.analysis.replication import REPLICATED, VARYING, Finding, Report, finding
from popxl.core.tensor import Tensor

if TYPE_CHECKING:
    from popxl.core.recording import Op
    from popxl.graph import Graph


def seeds(mesh: Mesh, report: Report, of_data: Set[int], alike: Set[int]) -> Iterator[Finding]:
    """Dropouts with one seed where each replica has its own data, or with several where all have the same.

    Args:
        of_data: positions of the axes along which gradients are reduced.
        alike: those along which replicas are fed the same, as the program says.
    """
    for op in (op for graph in report.graphs if graph.gradient_of is None for op in graph.ops):
        if op.kind.drops is None or not op.attributes[op.kind.drops.ratio]:
            continue
        t, seed = op.inputs[0], op.inputs[op.operand_names().index(op.kind.drops.seed)]
        held = [*enumerate(zip(report.types.get(t, ()), report.types.get(seed, ()), strict=False))]
        tied = [i for i, (x, s) in held if i in of_data and x[0] is VARYING and s[0] is REPLICATED]
        apart = [i for i, (x, s) in held if i in alike and x[0] is REPLICATED and s[0] is VARYING]
        if tied:
            yield finding(
                mesh, "same seed", op, seed, tied,
                f"each replica along {mesh.text(tied)} has its own `{t.path}`, and all drop the same elements, as "
                f"`{seed.path}` is the same. Make seeds with `popxl.create_seeds(..., replicas=...)`, one for each.",
            )  # fmt: skip
        if apart:
            yield finding(
                mesh, "different seeds", op, seed, apart,
                f"`{t.path}` is the same on all replicas along {mesh.text(apart)}, and each drops other elements, as "
                f"it has its own `{seed.path}`. Let them share the seed.",
            )  # fmt: skip


def stale_pieces(mesh: Mesh, report: Report) -> Iterator[Finding]:
    """What was gathered of a variable in pieces, and is read after these were changed."""
    for graph in report.graphs:
        yield from _stale(mesh, graph)


def _stale(mesh: Mesh, graph: Graph) -> Iterator[Finding]:
    gathered: dict[Tensor, tuple[Op, Tensor]] = {}  # by what was gathered: the op, and the pieces
    old: set[Tensor] = set()
    for op in graph.ops:
        makes = op.kind.exchanged(op.attributes) if op.kind.between_replicas and "op" not in op.attributes else None
        made = next((gathered[t] for t in op.inputs if t in gathered), None)
        is_same = op.kind.view is not None or op.op_type in ("Cast", "Identity", "Reshape")
        if makes == "same" and op.inputs[0].origin.producer is None:
            gathered[op.outputs[0]] = op, op.inputs[0].origin
        elif made is not None and is_same:
            gathered |= dict.fromkeys(op.outputs, made)
            old.update(op.outputs if any(t in old for t in op.inputs) else ())
        elif stale := [t for t in op.inputs if t in old]:
            (t, *_), (gather, pieces) = stale, gathered[stale[0]]
            axes = mesh.along(gather.attributes["stride"], gather.attributes["group_size"])
            yield finding(
                mesh, "stale pieces", op, t, axes,
                f"`{t.path}` was gathered of `{pieces.path}` before that was changed, and is read afterwards. Gather "
                "it again.",
            )  # fmt: skip
            old.clear()
        changed = {op.inputs[i].origin for i in op.modified}
        old.update(t for t, (_, pieces) in gathered.items() if pieces in changed)
