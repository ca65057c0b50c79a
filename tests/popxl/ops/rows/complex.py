"""Rows of the parts of complex numbers, and of Fourier transforms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.popxl.ops.rows.schema import (
    Array,
    PopxlError,
    Row,
    X,
    bad,
    f16,
    f32,
    over,
    rule,
    sample,
    torch_function,
    values,
)

Z = values("complex64", (2, 3))
PAIRS = values("float32", (3, 2))
REAL_GIVEN = bad(PopxlError, r"`t` is real. Expected complex numbers, as `ops.complex`", X)


def c64(*numbers: Any) -> Array:
    return np.array(numbers, np.complex64)


def part(name: str, meaning: Callable[..., Any], kind: str, **settings: Any) -> Row:
    settings = {"differentiable": (0,), "bad": [REAL_GIVEN], "torch": torch_function(name)} | settings
    return Row(name, meaning, [sample(Z), sample(values("complex64", ()))], kind, f"{name}_out", **settings)


def fourier(name: str, *samples: Any, **settings: Any) -> Row:
    def meaning(t: Array, axes: Any = -1, sizes: Any = None, norm: str = "backward") -> Array:
        several = [(n,) if isinstance(n, int) else n for n in (sizes, axes)]
        return getattr(np.fft, f"{name}n")(t, *several, norm=norm)

    def in_torch(t: Any, axes: Any = -1, sizes: Any = None, norm: str = "backward") -> Any:
        import torch

        return getattr(torch.fft, f"{name}n")(t, s=sizes, dim=axes, norm=norm)

    refused = [
        bad(ValueError, "`norm` is 'both'; expected", *samples[0].operands, norm="both"),
        bad(
            ValueError,
            r"`axes` is \(0, -2\); expected one or more dimensions, each once",
            samples[0].operands[0],
            (0, -2),
        ),
        bad(ValueError, r"`sizes` is \(2,\) and `axes` is \(0, 1\)", samples[0].operands[0], (0, 1), (2,)),
        bad(PopxlError, "the parts of complex numbers are float32, and these are float16", f16(1, 2, 3)),
    ]
    return Row(
        name,
        meaning,
        list(samples),
        name.upper(),
        f"{name}_out",
        differentiable=(0,),
        torch=in_torch,
        bad=[*refused, *settings.pop("bad", [])],
        **settings,
    )


COMPLEX = [
    part("real", np.real, "Real"),
    part("imag", np.imag, "Imag"),
    part("angle", np.angle, "Angle", rules=[rule(c64(0, 2j), g=f32(3, 4), gives=(c64(0, -2),))]),
    part("conj", np.conj, "Conj", keeps=0),
    Row(
        "complex",
        lambda re, im: re + 1j * im,
        over("float32", (2, 3), (3,)),
        "Complex",
        "complex_out",
        differentiable=(0, 1),
        keeps=0,
        bad=[
            bad(PopxlError, "different dtypes", X, f16(1, 2, 3)),
            bad(PopxlError, r"do not broadcast", X, PAIRS),
            bad(PopxlError, "the parts of complex numbers are float32, and these are complex64", Z, Z),
        ],
    ),
    Row(
        "polar",
        lambda length, angle: length * np.exp(1j * angle),
        over("float32", (2, 3), (2, 3)),
        "Polar",
        "polar_out",
        differentiable=(0, 1),
        torch=torch_function("polar"),
        bad=[bad(PopxlError, "and these are float16; use `ops.cast`", f16(1), f16(2))],
    ),
    Row(
        "view_as_real",
        lambda t: np.stack([t.real, t.imag], -1),
        [sample(Z)],
        "ViewAsReal",
        "view_as_real_out",
        differentiable=(0,),
        keeps=0,
        bad=[REAL_GIVEN],
        torch=torch_function("view_as_real"),
    ),
    Row(
        "view_as_complex",
        lambda t: t[..., 0] + 1j * t[..., 1],
        [sample(PAIRS)],
        "ViewAsComplex",
        "view_as_complex_out",
        differentiable=(0,),
        keeps=0,
        torch=torch_function("view_as_complex"),
        bad=[bad(PopxlError, "expected a size of 2", X)],
    ),
    fourier("fft", sample(Z, (0, 1), norm="ortho"), sample(Z, 1, 5, "forward"), sample(X)),
    fourier("ifft", sample(Z, (1, 0)), sample(values("complex64", (2, 1, 3, 2)), (3, 0, 2, 1), norm="ortho")),
    fourier(
        "rfft",
        sample(X),
        sample(values("float32", (2, 3, 2, 5)), (0, 1, 2, 3)),
        sample(X, (1, 0), (4, 3)),
        bad=[bad(PopxlError, "`t` is complex; use `ops.fft`", Z)],
    ),
    fourier(
        "irfft",
        sample(Z),
        sample(Z, (1, 0), (4, 5), "forward"),
        sample(X, 0, 3),
        bad=[bad(PopxlError, "nothing is left of the axis -1; say how many", c64(1))],
    ),
]
