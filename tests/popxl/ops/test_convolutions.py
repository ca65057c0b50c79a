"""The forms in which convolutions are computed: each gives what the definition says, and so do its gradients."""

from __future__ import annotations

import itertools
import re
from typing import Any

import jax
import numpy as np
import pytest
from numpy.typing import NDArray

import popxl
from popxl import ops
from popxl.transforms import autodiff
from runtime.cpu import convolutions
from tests.tolerances import assert_sums_near

Array = NDArray[np.float64]

# What XLA computes itself, and what is taken apart on CPUs: few products for each element; few channels, whose rows are
# gathered, unless windows leave out many; a gradient of few channels, which is put together place by place.
FORMS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "xla": ((2, 9, 5, 6), (7, 9, 3, 2), {}),
    "xla, with all": ((2, 20, 9, 8), (4, 10, 3, 3),
                      {"stride": (2, 1), "padding": (1, 0, 2, 1), "dilation": (1, 2), "groups": 2}),
    "xla, as rows are left out": ((2, 6, 9, 11), (9, 6, 3, 3), {"stride": (3, 1)}),
    "xla, whose gradient looks grouped": ((2, 9, 4, 3), (7, 9, 2, 5), {"stride": (2, 1), "padding": (1, 1, 1, 1)}),
    "elements": ((3, 2, 5, 6), (4, 2, 3, 2), {}),
    "elements of groups": ((3, 6, 5, 7), (12, 2, 3, 3), {"groups": 3, "padding": (1, 1, 1, 1)}),
    "elements of each channel": ((2, 5, 8, 7), (5, 1, 3, 3), {"groups": 5, "stride": (2, 3), "padding": (0, 1, 2, 0)}),
    "elements, cropped": ((2, 3, 9, 8), (4, 3, 2, 2),
                          {"padding": (-1, 2, -2, -1), "dilation": (2, 3), "stride": (2, 1)}),
    "rows": ((3, 5, 6, 7), (4, 5, 3, 4), {}),
    "rows, with all": ((2, 6, 9, 11), (9, 6, 3, 3), {"stride": (1, 3), "padding": (2, -1, 1, 2), "dilation": (2, 1)}),
    "rows of signals": ((3, 6, 20), (5, 6, 9), {"stride": (3,), "padding": (4, 2), "dilation": (1,)}),
    "rows of volumes": ((2, 4, 4, 5, 3), (3, 4, 2, 3, 2),
                        {"stride": (1, 1, 2), "padding": (1, 0, 1, 0, 1, 0), "dilation": ()}),
}  # fmt: skip


def convolved(t: Array, w: Array, stride: Any = (), padding: Any = (), dilation: Any = (), groups: int = 1) -> Array:
    """The definition: for each place of the kernel, its weights times what lies under it."""
    n = t.ndim - 2
    stride, dilation = stride or (1,) * n, dilation or (1,) * n
    begins, ends = (padding[:n], padding[n:]) if padding else ((0,) * n, (0,) * n)
    t = np.pad(t, [(0, 0), (0, 0), *((max(b, 0), max(e, 0)) for b, e in zip(begins, ends, strict=True))])
    cut = (slice(max(-b, 0), t.shape[i + 2] - max(-e, 0)) for i, (b, e) in enumerate(zip(begins, ends, strict=True)))
    t = t[(slice(None), slice(None), *cut)]
    kernel = w.shape[2:]
    counts = [(t.shape[i + 2] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1 for i in range(n)]
    result = np.zeros((len(t), len(w), *counts))
    t = t.reshape(len(t), groups, -1, *t.shape[2:])
    w = w.reshape(groups, -1, *w.shape[1:])
    for place in itertools.product(*map(range, kernel)):
        starts = [p * d for p, d in zip(place, dilation, strict=True)]
        under = tuple(slice(b, b + s * (c - 1) + 1, s) for b, s, c in zip(starts, stride, counts, strict=True))
        product = np.einsum("ngc...,gmc->ngm...", t[(slice(None),) * 3 + under], w[(slice(None),) * 3 + place])
        result += product.reshape(result.shape)
    return result


@pytest.fixture(autouse=True)
def _whatever_the_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolutions, "LITTLE_WORK", 0)


@pytest.mark.here
@pytest.mark.parametrize("name", FORMS)
def test_which_form(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA's is there besides, for other devices than CPUs."""
    shape, kernel, how = FORMS[name]
    used: set[str] = set()

    def note(form: str) -> None:
        name = "by_xla" if form == "xla" else f"_by_{form}"
        plain = getattr(convolutions, name)
        monkeypatch.setattr(convolutions, name, lambda *a, **k: (used.add(form), plain(*a, **k))[1])

    for form in ("xla", "elements", "rows"):
        note(form)
    specs = [popxl.TensorSpec(s, popxl.float32) for s in (shape, kernel)]
    graph = popxl.Ir().create_graph(lambda t, w: ops.conv(t, w, **how), *specs)
    jax.make_jaxpr(popxl.to_jax(graph))(np.zeros(shape, np.float32), np.zeros(kernel, np.float32))
    assert used == {"xla", re.match(r"\w+", name)[0]}


@pytest.mark.thorough(but_each=3)
@pytest.mark.parametrize(("shape", "kernel", "how"), FORMS.values(), ids=FORMS)
def test_forms(shape: tuple[int, ...], kernel: tuple[int, ...], how: dict[str, Any], run: Any) -> None:
    """As it is bilinear, each gradient is known by what it says of a step in some direction."""
    random = np.random.default_rng(0)
    t, w, dt, dw = (random.normal(size=s) for s in (shape, kernel, shape, kernel))
    expected = convolved(t, w, **how)
    g = random.normal(size=expected.shape)
    ir = popxl.Ir()
    with ir.main_graph:
        operands = [popxl.variable(x.astype(np.float32)) for x in (t, w)]
        graph = ir.create_graph(lambda t, w: ops.conv(t, w, **how), *operands)
        info = autodiff(graph)
        site = ops.call_with_info(graph, *operands)
        seed = popxl.constant(g.astype(np.float32))
        gradients = ops.call(info.graph, seed, inputs_dict=info.inputs_dict(site))
        back = ops.conv_transpose(
            seed,
            operands[1],
            stride=how.get("stride", (1,) * (len(shape) - 2)),
            padding=(),
            dilation=(),
            groups=how.get("groups", 1),
        )
    y, gt, gw, whole = run(ir, *site.outputs, *gradients, back)
    assert_sums_near(np.float32(y), expected, convolved(abs(t), abs(w), **how))
    around = {key: value for key, value in how.items() if key in ("stride", "groups")}
    dx = random.normal(size=np.shape(whole))
    for found, step, operands, settings in (
        (gt, dt, (dt, w), how),
        (gw, dw, (t, dw), how),
        (whole, dx, (dx, w), around),
    ):
        size = (abs(g) * convolved(*map(abs, operands), **settings)).sum()
        total = np.float32(np.multiply(found, step, dtype=np.float64).sum())
        assert_sums_near(total, (g * convolved(*operands, **settings)).sum(), size)
