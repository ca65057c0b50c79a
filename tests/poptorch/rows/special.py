"""Special functions."""

from __future__ import annotations

import torch

from tests.poptorch.operators import Row, normal, positive, whole
from tests.poptorch.rows.elementwise import call

_OF_ALL = ("erf", "erfc", "i0", "lgamma", "digamma")
_ZEROS = (torch.tensor([0.0, 0, 0, 1, 2]), torch.tensor([-0.5, 2, torch.inf, 3, 0.5]))

ROWS = [
    *(Row(name, call(name), (normal(2, 3),), tolerance=3e-5, half_tolerance=1e-2) for name in _OF_ALL),
    Row("i0 at 0", torch.i0, (torch.zeros(2),)),
    Row("lgamma of integers", lambda x: torch.lgamma(x + 1), (whole(5),)),
    Row("digamma at 0", torch.digamma, (torch.tensor([0.0, -0.0, -1.0]),), gradient=False),
    Row("erfinv", torch.erfinv, (normal(2, 3).tanh(),)),
    Row("ndtri", torch.special.ndtri, (normal(2, 3).sigmoid(),), half=False),
    Row("log_ndtr", torch.special.log_ndtr, (normal(2, 3),), half=False),
    Row("ndtr", torch.special.ndtr, (normal(2, 3),)),
    Row("i0e", torch.special.i0e, (normal(2, 3),), half=False),
    Row("i1, i1e", lambda x: (torch.special.i1(x), torch.special.i1e(x)), (normal(2, 3),), half=False),
    # The series ends where the numbers have seven digits; torch computes it in float64.
    *(
        Row(f"polygamma {n}", lambda x, n=n: torch.polygamma(n, x), (positive(2, 3),), tolerance=1e-4)
        for n in (0, 1, 2)
    ),
    Row(
        "polygamma below 0",
        lambda x: (torch.polygamma(1, x), torch.polygamma(2, x)),
        (torch.tensor([-0.4, -1.6, -12.3, -0.75]),),
        tolerance=1e-4,
        half=False,
    ),
    Row("polygamma at 0", lambda x: torch.polygamma(1, x), (torch.zeros(1),), gradient=False),
    Row("zeta", lambda x: torch.special.zeta(2.5, x), (positive(2, 3),), half=False),
    Row(
        "igamma, igammac",
        lambda x, y: (torch.igamma(x.detach(), y), torch.igammac(x.detach(), y)),
        (positive(2, 3), positive(3)),
        half=False,
    ),
    Row("logit", lambda x: (torch.logit(x), torch.logit(x, 0.25)), (normal(2, 3).sigmoid(),)),
    Row("entr", torch.special.entr, (torch.tensor([0.5, 1.5, 2]),)),
    Row("entr outside", torch.special.entr, (torch.tensor([0.0, -1, torch.nan]),), gradient=False),
    Row(
        "xlogy",
        lambda x, y: (torch.xlogy(x, y), torch.xlogy(x, 2), torch.special.xlog1py(x, y)),
        (normal(2, 3), positive(3)),
    ),
    Row("xlogy at 0", torch.xlogy, _ZEROS),
    Row("xlog1py at 0", lambda x, y: torch.special.xlog1py(x, y - 1), _ZEROS),
    Row("xlogy of NaN", torch.xlogy, (torch.tensor([0.0, torch.nan]), torch.tensor([torch.nan, 0.0])), gradient=False),
    Row(
        "erfcx",
        torch.special.erfcx,
        (torch.tensor([-2.0, -0.3, 0, 0.7, 4.9, 5.1, 30, 1e20]),),
        gradient=False,
        half=False,
    ),
    Row("erfcx, slope", torch.special.erfcx, (torch.tensor([-2.0, -0.3, 0, 0.7, 2]),), half=False, tolerance=1e-4),
    Row(
        "Bessel functions",
        lambda x: (
            torch.special.modified_bessel_i0(x),
            torch.special.modified_bessel_i1(x),
            torch.special.spherical_bessel_j0(x),
        ),
        (torch.tensor([-2.0, 0, 0.3, 1, 7]),),
        gradient=False,
        half=False,
    ),
]
