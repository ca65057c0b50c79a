"""Linear algebra."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from tests.poptorch.operators import Row, normal, whole

_RANKS = [
    ((3,), (3,)),
    ((2, 3), (3,)),
    ((3,), (3, 4)),
    ((2, 3), (3, 4)),
    ((5, 2, 3), (3,)),
    ((3,), (5, 3, 4)),
    ((5, 2, 3), (3, 4)),
    ((2, 3), (5, 3, 4)),
    ((5, 2, 3), (5, 3, 4)),
    ((2, 1, 2, 3), (5, 3, 4)),
]
_EQUATIONS = [
    ("ij,jk->ik", (2, 3), (3, 4)),
    ("ij,kj", (2, 3), (4, 3)),
    ("bhqd, bhkd -> bhqk", (2, 3, 4, 5), (2, 3, 2, 5)),
    ("...ij,...j->...i", (5, 2, 3), (5, 3)),
    ("ii->i", (3, 3)),
    ("ij->", (2, 3)),
    ("i,j,k->ijk", (2,), (3,), (4,)),
]


def _well_conditioned(*shape: int) -> torch.Tensor:
    """Matrices that are symmetric, and far from singular."""
    matrix = normal(*shape)
    return matrix @ matrix.mT + 2 * torch.eye(shape[-1])


def _of_square(name: str, function: Any, size: int = 3, **settings: Any) -> Row:
    return Row(name, function, (_well_conditioned(2, size, size),), half=False, tolerance=1e-4, **settings)


ROWS = [
    Row(
        "matmul of all ranks",
        lambda *ts: [torch.matmul(a, b) for a, b in zip(ts[::2], ts[1::2], strict=True)],
        tuple(normal(*shape) for shapes in _RANKS for shape in shapes),
    ),
    Row(
        "@ and matmul, method", lambda x, y: (x @ y, x.matmul(y), torch.linalg.matmul(x, y)), (normal(2, 3), normal(3))
    ),
    Row("matmul of integers", torch.matmul, (whole(2, 3), whole(3, 4))),
    Row("mm", torch.mm, (normal(2, 3), normal(3, 4))),
    Row("bmm", torch.bmm, (normal(5, 2, 3), normal(5, 3, 4))),
    Row("mv", torch.mv, (normal(2, 3), normal(3))),
    Row("dot", torch.dot, (normal(3), normal(3, seed=1))),
    Row("vdot", torch.vdot, (normal(3), normal(3, seed=1))),
    Row("inner", torch.inner, (normal(2, 3), normal(4, 3))),
    Row("outer", torch.outer, (normal(2), normal(3))),
    Row("addmm", lambda x, a, b: torch.addmm(x, a, b, beta=0.5, alpha=2), (normal(4), normal(2, 3), normal(3, 4))),
    Row(
        "addmm without input", lambda x, a, b: torch.addmm(x, a, b, beta=0), (normal(2, 4), normal(2, 3), normal(3, 4))
    ),
    Row("addmv", torch.addmv, (normal(2), normal(2, 3), normal(3))),
    Row("addmv, in place", lambda x, a, b: (x * 1).addmv_(a, b, alpha=3), (normal(2), normal(2, 3), normal(3))),
    Row("baddbmm", lambda x, a, b: torch.baddbmm(x, a, b, alpha=2), (normal(2, 4), normal(5, 2, 3), normal(5, 3, 4))),
    Row("addbmm", lambda x, a, b: torch.addbmm(x, a, b, beta=3), (normal(2, 4), normal(5, 2, 3), normal(5, 3, 4))),
    Row("addr", lambda x, a, b: torch.addr(x, a, b, alpha=2), (normal(2, 3), normal(2), normal(3))),
    *(
        Row(
            f"einsum {equation}",
            lambda *ts, e=equation: torch.einsum(e, *ts),
            tuple(normal(*s, seed=i) for i, s in enumerate(shapes)),
        )
        for equation, *shapes in _EQUATIONS
    ),
    Row("einsum of a list", lambda x, y: torch.einsum("ab,cb->ac", [x, y]), (normal(2, 3), normal(4, 3))),
    Row("einsum of subscripts", lambda x, y: torch.einsum(x, [0, 1], y, [1, 2], [0, 2]), (normal(2, 3), normal(3, 4))),
    Row("tensordot", lambda x, y: torch.tensordot(x, y, dims=([1, 2], [0, 1])), (normal(2, 3, 4), normal(3, 4, 5))),
    Row("tensordot, dims", lambda x, y: torch.tensordot(x, y, dims=1), (normal(2, 3), normal(3, 4))),
    Row("kron", torch.kron, (normal(2, 3), normal(1, 4))),
    Row(
        "cross",
        lambda x, y: (torch.cross(x, y, dim=1), torch.linalg.cross(x, y, dim=1)),
        (normal(2, 3), normal(2, 3, seed=1)),
    ),
    Row(
        "chain of matrices",
        lambda x, y, z: torch.linalg.multi_dot([x, y, z]),
        (normal(2, 3), normal(3, 4), normal(4, 2)),
    ),
    Row("matrix_power", lambda x: torch.linalg.matrix_power(x, 3), (normal(3, 3),), half_tolerance=2e-2),
    Row("vecdot", torch.linalg.vecdot, (normal(2, 3), normal(2, 3, seed=1))),
    Row("trace", torch.trace, (normal(3, 3),), half=False),
    # Linear layers
    Row("linear", F.linear, (normal(2, 3), normal(4, 3), normal(4))),
    Row("linear without bias", F.linear, (normal(2, 5, 3), normal(4, 3))),
    Row("linear of a vector", F.linear, (normal(3), normal(4, 3), normal(4))),
    Row("bilinear", F.bilinear, (normal(2, 3), normal(2, 4), normal(5, 3, 4), normal(5))),
    Row("bilinear without bias", F.bilinear, (normal(6, 2, 3), normal(6, 2, 4), normal(5, 3, 4))),
    # Solved and decomposed
    _of_square("det", torch.linalg.det),
    _of_square("slogdet", lambda x: torch.linalg.slogdet(x)[1]),
    _of_square("logdet", torch.logdet),
    _of_square("inv", torch.linalg.inv),
    _of_square("pinv", torch.linalg.pinv),
    _of_square("cholesky", torch.linalg.cholesky),
    _of_square("cholesky, upper", lambda x: torch.linalg.cholesky(x, upper=True)),
    _of_square("cholesky_inverse", lambda x: torch.cholesky_inverse(torch.linalg.cholesky(x))),
    _of_square("lu", torch.linalg.lu),
    Row("lu of a wide one", lambda x: torch.linalg.lu(x), (normal(3, 4),), half=False, tolerance=1e-4),
    _of_square("lu_factor", lambda x: torch.linalg.lu_factor(x)),
    *(
        Row(
            f"lu_solve, {how}",
            lambda a, b, how=how: torch.linalg.lu_solve(*torch.linalg.lu_factor(a), b, **how),
            (normal(2, 3, 3), normal(3, 3)),
            half=False,
            tolerance=1e-3,
        )
        for how in ({}, {"adjoint": True}, {"left": False})
    ),
    Row("householder_product", torch.linalg.householder_product, (normal(4, 3), normal(3)), half=False, tolerance=1e-4),
    _of_square("matrix_exp", lambda x: torch.matrix_exp(x / 5)),
    _of_square("eigvalsh", torch.linalg.eigvalsh),
    _of_square("eigh", lambda x: [t.abs() for t in torch.linalg.eigh(x + x.mT)]),
    _of_square("matrix_norm, nuclear", lambda x: torch.linalg.matrix_norm(x, "nuc")),
    _of_square("cond", torch.linalg.cond),
    Row("solve", torch.linalg.solve, (_well_conditioned(2, 3, 3), normal(2, 3, 4)), half=False, tolerance=1e-4),
    Row("solve, vector", torch.linalg.solve, (_well_conditioned(3, 3), normal(3)), half=False, tolerance=1e-4),
    Row(
        "solve, right",
        lambda a, b: torch.linalg.solve(a, b, left=False),
        (_well_conditioned(3, 3), normal(2, 3)),
        half=False,
        tolerance=1e-4,
    ),
    Row(
        "solve_triangular",
        lambda a, b: torch.linalg.solve_triangular(a.tril(), b, upper=False),
        (_well_conditioned(3, 3), normal(3, 2)),
        half=False,
        tolerance=1e-4,
    ),
    Row(
        "cholesky_solve",
        lambda b, a: torch.cholesky_solve(b, torch.linalg.cholesky(a)),
        (normal(3, 2), _well_conditioned(3, 3)),
        half=False,
        tolerance=1e-4,
    ),
    Row(
        "svd",
        lambda x: [t.abs() for t in torch.linalg.svd(x, full_matrices=False)],
        (normal(4, 3),),
        half=False,
        tolerance=1e-4,
    ),
    Row("svdvals", torch.linalg.svdvals, (normal(4, 3),), half=False, tolerance=1e-4),
    Row("qr", lambda x: [t.abs() for t in torch.linalg.qr(x)], (normal(4, 3),), half=False, tolerance=1e-4),
    Row(
        "pinv, tolerances",
        lambda x: [torch.linalg.pinv(x, atol=1.0), torch.linalg.pinv(x, rtol=0.5)],
        (normal(4, 3),),
        half=False,
        tolerance=1e-4,
    ),
]
