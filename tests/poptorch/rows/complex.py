"""Complex numbers, and Fourier transforms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tests.poptorch.operators import Row, normal, positive


def complex_normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.complex(normal(*shape, seed=seed), normal(*shape, seed=seed + 1))


Z, W = complex_normal(2, 3), complex_normal(2, 3, seed=7)
X = normal(2, 3)


def complex_row(name: str, function: Callable[..., Any], *inputs: Any, **settings: Any) -> Row:
    return Row(name, function, inputs, half=False, **settings)


def _in_place(z: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Writing through views of complex numbers, and of what they look at."""
    y = z * 1
    y.real += x
    y.imag.mul_(2)
    y.conj()[0] = 1j
    y.conj()[1].mul_(2j).add_(y[0])
    y.conj().imag.mul_(3)
    pairs = torch.stack([x, x * x], -1)
    torch.view_as_complex(pairs).mul_(1j)
    return y, pairs


def _lazy(z: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What PyTorch puts off: conjugates and signs."""
    return (
        z.conj(), z.conj().conj(), z.conj().T @ w, z.conj().imag, z.conj().real, z.mH.resolve_conj(), z.conj()[:, 1:],
        z.imag.neg(), torch.vdot(z[0], w[1]), torch.dot(z[0].conj(), w[1].conj()), z.conj_physical(),
        (z * 1).conj_physical_(),
        z.conj().imag.resolve_neg(), z.conj() * w, w.conj() - z, z.conj().exp(), z.conj().sum(0), z.conj().abs(),
    )  # fmt: skip


def _rotary(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotary embeddings, as Llama was first published."""
    turns = torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * turns).flatten(2)


def _stft(x: torch.Tensor) -> torch.Tensor:
    return torch.stft(x, 8, 4, window=torch.hann_window(8), return_complex=True)


def _and_back(x: torch.Tensor) -> torch.Tensor:
    spectrum = torch.stft(x, 8, 2, window=torch.ones(8), return_complex=True)
    return torch.istft(spectrum * 2, 8, 2, window=torch.ones(8), length=x.shape[-1])


def _solutions(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    factors, pivots = torch.linalg.lu_factor(a)
    return (
        torch.linalg.solve(a, b), torch.linalg.solve(a, b.mT, left=False), torch.linalg.lu_solve(factors, pivots, b),
        torch.linalg.lu_solve(factors, pivots, b, adjoint=True),
        torch.linalg.lu_solve(factors, pivots, b.mT, left=False, adjoint=True),
        torch.linalg.solve_triangular(a, b, upper=True),
        torch.linalg.solve_triangular(a, b.mT, upper=False, left=False),
    )  # fmt: skip


def _of_hermitian(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    hermitian = a @ a.mH + torch.eye(3)
    lower, upper = torch.linalg.cholesky(hermitian), torch.linalg.cholesky(hermitian, upper=True)
    vectors = torch.linalg.eigh(hermitian).eigenvectors
    return (
        lower, upper, torch.cholesky_solve(b, lower), torch.cholesky_solve(b, upper, upper=True),
        torch.cholesky_inverse(lower), torch.linalg.eigvalsh(hermitian), vectors.abs(),
        torch.linalg.pinv(hermitian, hermitian=True),
    )  # fmt: skip


_SQUARE, _COLUMNS = complex_normal(3, 3) + 2 * torch.eye(3), complex_normal(3, 2, seed=9)
_MATRICES = [
    complex_row(
        "inverse, determinant and exponential of complex matrices",
        lambda a: (torch.linalg.inv(a), torch.linalg.det(a), torch.linalg.slogdet(a), torch.linalg.matrix_exp(a / 2)),
        _SQUARE,
    ),
    complex_row("solve of complex matrices", _solutions, _SQUARE, _COLUMNS),
    complex_row("Hermitian matrices", _of_hermitian, _SQUARE, _COLUMNS),
    complex_row(
        "qr, svdvals, pinv, lu, householder_product of complex matrices",
        lambda a, tau: (
            *torch.linalg.qr(a),
            torch.linalg.svdvals(a),
            torch.linalg.pinv(a),
            *torch.linalg.lu(a),
            torch.linalg.householder_product(a, tau),
        ),  # fmt: skip
        _COLUMNS,
        complex_normal(2, seed=5),
    ),
]

_UNARY = "abs angle cos cosh exp log neg reciprocal rsqrt sgn sigmoid sin sinh sqrt square tanh".split()

ROWS = [
    complex_row("complex", lambda x, y: torch.complex(x, y), X, normal(2, 3, seed=1)),
    complex_row("polar", torch.polar, positive(2, 3), X),
    complex_row(
        "view_as_real, view_as_complex", lambda z, x: (torch.view_as_real(z), torch.view_as_complex(x)), Z, normal(3, 2)
    ),
    complex_row("real and imag", lambda z: (z.real, z.imag, torch.real(z) * z.imag), Z),
    complex_row("_conj, resolve_conj, _neg_view", _lazy, Z, complex_normal(2, 3, seed=3)),
    complex_row("views that are written to", _in_place, Z, X),
    *_MATRICES,
    *(complex_row(f"{name} of complex numbers", getattr(torch, name), Z) for name in _UNARY),
    complex_row("abs, angle, sgn at zero", lambda z: (z.abs(), z.angle(), z.sgn()), torch.zeros(2, dtype=torch.cfloat)),
    *(complex_row(f"{name} of complex numbers", getattr(torch, name), Z, W) for name in "add sub mul div".split()),
    complex_row("pow of complex numbers", lambda z, w: (z**w, z**2, z**0.5, z**3), Z, W),
    complex_row(
        "complex with real ones", lambda z, x: (z * x, x + z, x * 1j, 2j - z, z / x, z == z.real), Z, positive(2, 3)
    ),
    complex_row(
        "products of complex numbers",
        lambda z, w: (
            z @ w.T,
            torch.einsum("ij,kj->ik", z, w),
            torch.addmm(w, z, w.mT @ w),
            torch.nn.functional.linear(z, w),
        ),
        Z,
        complex_normal(2, 3, seed=3),
    ),
    complex_row(
        "moving complex numbers",
        lambda z, w: (
            torch.cat([z, w], 1),
            torch.stack([z, w]),
            z[:, [2, 0]],
            torch.where(z.real > 0, z, w),
            z.roll(1, 0),
            z.flip(1),
            torch.zeros_like(z),
            torch.nn.functional.pad(z, (1, 0)),
        ),
        Z,
        W,
    ),
    complex_row("sums of complex numbers", lambda z: (z.sum(), z.mean(0), z.cumsum(1), z.prod(1), z.norm()), Z),
    complex_row("var and std of complex numbers", lambda z: (z.var(), z.std(1), z.detach().nan_to_num()), Z),
    complex_row(
        "convolutions of complex numbers", torch.nn.functional.conv1d, complex_normal(2, 3, 5), complex_normal(4, 3, 2)
    ),
    complex_row(
        "casts of complex numbers", lambda x, z: (x.to(torch.cfloat), x.cdouble(), z.to(torch.complex128)), X, Z
    ),
    *(
        complex_row(
            f"_fft_c2c, norm {norm}",
            partial(
                lambda z, norm: (
                    torch.fft.fft(z, norm=norm),
                    torch.fft.ifft2(z, norm=norm),
                    torch.fft.fft(z, 5, 0, norm),
                ),
                norm=norm,
            ),
            Z,
        )
        for norm in ("backward", "ortho", "forward")
    ),
    *(
        complex_row(
            f"_fft_r2c, norm {norm}",
            partial(
                lambda x, norm: (
                    torch.fft.rfft(x, norm=norm),
                    torch.fft.rfft2(x, norm=norm),
                    torch.fft.fft(x, norm=norm),
                    torch.fft.ihfft(x, norm=norm),
                ),
                norm=norm,
            ),
            X,
        )
        for norm in ("backward", "ortho", "forward")
    ),
    *(
        complex_row(
            f"_fft_c2r, norm {norm}",
            partial(
                lambda z, norm: (
                    torch.fft.irfft(z, norm=norm),
                    torch.fft.irfft2(z, (3, 5), norm=norm),
                    torch.fft.hfft(z, 5, norm=norm),
                ),
                norm=norm,
            ),
            Z,
        )
        for norm in ("backward", "ortho", "forward")
    ),
    complex_row("fftn over four dimensions", lambda x: (torch.fft.fftn(x), torch.fft.rfftn(x)), normal(2, 3, 2, 3)),
    complex_row(
        "fftshift",
        lambda x: (torch.fft.fftshift(x), torch.fft.ifftshift(x, 1), torch.fft.fftfreq(5, 0.5), torch.fft.rfftfreq(4)),
        X,
    ),
    complex_row("stft", _stft, normal(2, 24)),
    complex_row("istft", _and_back, normal(2, 24)),
    complex_row("rotary embeddings", _rotary, normal(2, 3, 4), normal(3, 2)),
]
