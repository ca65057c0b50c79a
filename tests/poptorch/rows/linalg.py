"""Linear algebra."""

from __future__ import annotations

import warnings
from dataclasses import replace
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
    ("ij,jk->ik", (0, 1)),
    ("ij,kj", (0, 2)),
    ("bhq, bhk -> bqk", (3, 3)),
    ("...ij,...j->...i", (3, 4)),
    ("ii->i", (5,)),
    ("ij->", (0,)),
    ("ij,jk,kl->il", (0, 1, 2)),
]


def _well_conditioned(*shape: int) -> torch.Tensor:
    """Matrices that are symmetric, and far from singular."""
    matrix = normal(*shape)
    return matrix @ matrix.mT + 2 * torch.eye(shape[-1])


def _of_square(name: str, function: Any, size: int = 3, **settings: Any) -> Row:
    return Row(name, function, (_well_conditioned(2, size, size),), half=False, tolerance=1e-4, **settings)


def _cholesky_of_old(x: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        return torch.cholesky(x)


def _of_triangles(x: torch.Tensor) -> list[Any]:
    factors = [torch.linalg.cholesky(x, upper=upper) for upper in (False, True)]
    return [*factors, *(torch.linalg.eigvalsh(x, UPLO=triangle) for triangle in "LU")]


def _lu_solved(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
    factors = torch.linalg.lu_factor(a)
    ways: list[dict[str, bool]] = [{}, {"adjoint": True}, {"left": False}, {"left": False, "adjoint": True}]
    return [torch.linalg.lu_solve(*factors, b, **way) for way in ways]


def _triangular(b: torch.Tensor, a: torch.Tensor) -> list[Any]:
    ways: list[dict[str, bool]] = [{}, {"upper": False}, {"transpose": True}, {"unitriangular": True, "upper": False}]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        return [torch.triangular_solve(b, a, **way) for way in ways]


def _of_groups(*ends: int) -> Any:
    return lambda a, b: F.grouped_mm(a, b, offs=torch.tensor(ends, dtype=torch.int32))


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
    Row(
        "mm and mv", lambda x, y, v: (torch.mm(x, y), torch.mv(x, v), x.mv(v)), (normal(2, 3), normal(3, 4), normal(3))
    ),
    Row("bmm", torch.bmm, (normal(5, 2, 3), normal(5, 3, 4))),
    Row(
        "products of vectors",
        lambda x, y, z: (torch.dot(x, y), torch.vdot(x, y), torch.inner(x, y), torch.outer(x, z)),
        (normal(3), normal(3, seed=1), normal(2)),
    ),
    Row("addmm", lambda x, a, b: torch.addmm(x, a, b, beta=0.5, alpha=2), (normal(4), normal(2, 3), normal(3, 4))),
    Row(
        "addmm without input", lambda x, a, b: torch.addmm(x, a, b, beta=0), (normal(2, 4), normal(2, 3), normal(3, 4))
    ),
    Row("addmv", torch.addmv, (normal(2), normal(2, 3), normal(3))),
    Row("addmv, in place", lambda x, a, b: (x * 1).addmv_(a, b, alpha=3), (normal(2), normal(2, 3), normal(3))),
    Row("baddbmm", lambda x, a, b: torch.baddbmm(x, a, b, alpha=2), (normal(2, 4), normal(5, 2, 3), normal(5, 3, 4))),
    Row("addbmm", lambda x, a, b: torch.addbmm(x, a, b, beta=3), (normal(2, 4), normal(5, 2, 3), normal(5, 3, 4))),
    Row("addr", lambda x, a, b: torch.addr(x, a, b, alpha=2), (normal(2, 3), normal(2), normal(3))),
    Row(
        "einsum",
        lambda *ts: [torch.einsum(e, *(ts[i] for i in places)) for e, places in _EQUATIONS],
        (normal(2, 3), normal(3, 4), normal(4, 3), normal(5, 2, 3), normal(5, 3), normal(3, 3)),
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
    # Products of groups
    Row("grouped_mm of rows", _of_groups(2, 5, 7), (normal(7, 8), normal(3, 8, 16))),
    Row("grouped_mm of columns", _of_groups(4, 8, 16), (normal(3, 5, 8), normal(8, 16))),
    Row("grouped_mm of what is summed", _of_groups(2, 5, 8), (normal(3, 8), normal(8, 16))),
    Row("grouped_mm of batches", F.grouped_mm, (normal(3, 5, 8), normal(3, 8, 16))),
    # Linear layers
    Row("linear", F.linear, (normal(2, 3), normal(4, 3), normal(4))),
    Row("linear without bias", F.linear, (normal(2, 5, 3), normal(4, 3))),
    Row("linear of a vector", F.linear, (normal(3), normal(4, 3), normal(4))),
    Row("bilinear", F.bilinear, (normal(2, 3), normal(2, 4), normal(5, 3, 4), normal(5))),
    Row("bilinear without bias", F.bilinear, (normal(6, 2, 3), normal(6, 2, 4), normal(5, 3, 4))),
    # Solved and decomposed
    _of_square("determinants", lambda x: (torch.linalg.det(x), torch.linalg.slogdet(x)[1], torch.logdet(x))),
    _of_square("inverses", lambda x: (torch.linalg.inv(x), torch.linalg.pinv(x))),
    _of_square("cholesky", lambda x: [torch.linalg.cholesky(x, upper=upper) for upper in (False, True)]),
    _of_square("cholesky of old", _cholesky_of_old),
    Row("triangles", _of_triangles, (_well_conditioned(3, 3) + normal(3, 3) / 3,), half=False, tolerance=1e-4),
    Row(
        "pinv of a triangle",
        lambda x: torch.linalg.pinv(x, hermitian=True),
        (_well_conditioned(3, 3) + normal(3, 3) / 3,),
        half=False,
        gradient=False,
        tolerance=1e-4,
    ),
    _of_square("cholesky_inverse", lambda x: torch.cholesky_inverse(torch.linalg.cholesky(x))),
    _of_square("lu", lambda x: (*torch.linalg.lu(x), *torch.linalg.lu_factor(x))),
    Row("lu of a wide one", lambda x: torch.linalg.lu(x), (normal(3, 4),), half=False, tolerance=1e-4),
    Row("lu_solve", _lu_solved, (normal(2, 3, 3), normal(3, 3)), half=False, tolerance=1e-3),
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
    *(
        Row(
            f"lstsq, {driver}",
            lambda a, b, driver=driver: list(torch.linalg.lstsq(a, b, driver=driver))[: 4 if driver else 3],
            (normal(2, 5, 3), normal(2, 5, 2)),
            half=False,
            tolerance=1e-3,
            gradient=False,
        )
        for driver in (None, "gels", "gelsd")
    ),
    Row(
        "lstsq",
        lambda a, b, c, d: (torch.linalg.lstsq(a, b).solution, torch.linalg.lstsq(c, d).solution),
        (normal(2, 5, 3), normal(2, 5, 2), normal(3, 4), normal(3, 2)),
        half=False,
        tolerance=1e-3,
    ),
    Row(
        "lu_unpack",
        lambda x: (
            torch.lu_unpack(*torch.linalg.lu_factor(x)),
            torch.lu_unpack(*torch.linalg.lu_factor(x), unpack_pivots=False)[1:],
        ),
        (normal(2, 4, 4),),
        half=False,
        tolerance=1e-4,
    ),
    Row("triangular_solve", _triangular, (normal(3, 2), _well_conditioned(3, 3)), half=False, tolerance=1e-4),
    Row(
        "what went wrong",
        lambda x: (
            torch.linalg.cholesky_ex(x).info,
            torch.linalg.inv_ex(x).info,
            torch.linalg.solve_ex(x, x).info,
            torch.linalg.lu_factor_ex(x).info,
        ),
        (torch.stack([torch.eye(3), torch.diag(torch.tensor([1.0, 0.0, -1.0])), torch.ones(3, 3)]),),
        half=False,
        gradient=False,
    ),
    Row(
        "with what went wrong",
        lambda x: (
            torch.linalg.cholesky_ex(x),
            torch.linalg.inv_ex(x),
            torch.linalg.solve_ex(x, x),
            torch.linalg.lu_factor_ex(x),
        ),
        (_well_conditioned(2, 3, 3),),
        half=False,
        tolerance=1e-4,
    ),
]

_SUMS = (
    "matmul of all",
    "mm and",
    "bmm",
    "products of v",
    "addmm",
    "baddbmm",
    "einsum",
    "tensordot",
    "linear",
    "bilinear",
)
ROWS = [replace(row, sums=True) if row.name.startswith(_SUMS) else row for row in ROWS]
