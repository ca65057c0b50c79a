"""The ops of torchvision's library, declared if missing, beside what they are said to do, written with loops."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.util import find_spec
from itertools import product
from math import ceil, floor
from types import ModuleType
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if find_spec("torchvision") is not None:
    import torchvision  # noqa: F401  (it declares them, if its library can be loaded)

import poptorch  # noqa: E402  (it needs torch)
from popxl.session import CompilationProgress, compilation_progress  # noqa: E402

Array = np.ndarray

SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "roi_align": "(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
    "int sampling_ratio, bool aligned) -> Tensor",
    "deform_conv2d": "(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt stride_h, "
    "SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, SymInt groups, "
    "SymInt offset_groups, bool use_mask) -> Tensor",
}


def shape_of_rois(x: torch.Tensor, rois: torch.Tensor, scale: float, high: int, wide: int, *_: Any) -> torch.Tensor:
    return x.new_empty(len(rois), x.shape[1], high, wide)


def shape_of_convolved(x: torch.Tensor, weight: torch.Tensor, offset: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty(len(x), len(weight), *offset.shape[2:])


def shape_of_kept(boxes: torch.Tensor, *_: Any) -> torch.Tensor:
    return boxes.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.long)


def kept(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> torch.Tensor:
    """The best boxes, and no other that has more than a part in common with one of them."""
    found: list[int] = []
    for i in scores.argsort(descending=True).tolist():
        if all(overlap(boxes[i].tolist(), boxes[j].tolist()) <= threshold for j in found):
            found.append(i)
    return torch.tensor(found, dtype=torch.long)


def overlap(one: list[float], other: list[float]) -> float:
    both = [max(0.0, min(one[2 + d], other[2 + d]) - max(one[d], other[d])) for d in (0, 1)]
    area, other_area = ((box[2] - box[0]) * (box[3] - box[1]) for box in (one, other))
    return both[0] * both[1] / (area + other_area - both[0] * both[1])


@pytest.fixture(scope="module", autouse=True)
def declared() -> None:
    for name, fake in (("nms", shape_of_kept), ("roi_align", shape_of_rois), ("deform_conv2d", shape_of_convolved)):
        if hasattr(torch.ops.torchvision, name):
            continue
        full = f"torchvision::{name}"
        torch.library.define(full, SCHEMAS[name])
        torch.library.register_fake(full, fake)
        if name == "nms":
            torch.library.impl(full, "cpu", kept)
        else:
            torch.library.register_autograd(full, lambda ctx, grad: (), setup_context=lambda ctx, inputs, output: None)


def between(image: Array, y: float, x: float, edge: bool) -> Array:
    """What is between the pixels of an image: beyond its edge, that of the edge up to one pixel further, or less."""
    height, width = image.shape[-2:]
    if not (-1 <= y <= height and -1 <= x <= width):
        return np.zeros(image.shape[0])
    if edge:
        y, x = min(max(y, 0), height - 1), min(max(x, 0), width - 1)
    total = np.zeros(image.shape[0])
    for i, j in product((floor(y), floor(y) + 1), (floor(x), floor(x) + 1)):
        if 0 <= i < height and 0 <= j < width:
            total += image[:, i, j] * (1 - abs(y - i)) * (1 - abs(x - j))
    return total


def roi_aligned(x: Array, rois: Array, scale: float, high: int, wide: int, ratio: int, aligned: bool) -> Array:
    result = np.zeros((len(rois), x.shape[1], high, wide))
    for k, (row, *corners) in enumerate(rois.tolist()):
        x1, y1, x2, y2 = (c * scale - 0.5 * aligned for c in corners)
        h, w = (n if aligned else max(n, 1) for n in (y2 - y1, x2 - x1))
        rows, columns = (ratio, ratio) if ratio > 0 else (ceil(h / high), ceil(w / wide))
        for p, q in product(range(high), range(wide)):
            for i, j in product(range(rows), range(columns)):
                at = y1 + (p + (i + 0.5) / rows) * h / high, x1 + (q + (j + 0.5) / columns) * w / wide
                result[k, :, p, q] += between(x[int(row)], *at, edge=True) / (rows * columns)
    return result


X = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
ROIS = torch.tensor([[0, 1.0, 1, 6, 5], [1, -3, 2, 12, 9.5], [1, 2.5, 0.5, 8.75, 6.9], [1, 30, 30, 40, 40]])


@pytest.mark.thorough(but_each=3)
@pytest.mark.parametrize(("ratio", "aligned", "boxes"), [(2, False, 4), (-1, True, 4), (2, False, 0)])
def test_roi_align(ratio: int, aligned: bool, boxes: int) -> None:
    settings, rois = (0.5, 2, 3, ratio, aligned), ROIS[:boxes]
    expected = roi_aligned(X.double().numpy(), rois.double().numpy(), *settings)

    class Aligning(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = torch.nn.Parameter(X.clone())

        def forward(self, rois: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            found = torch.ops.torchvision.roi_align(self.x, rois, *settings)
            return found, poptorch.identity_loss(found[..., 0].square(), "sum")

    model = Aligning()
    found, _ = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5))(rois)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    units = np.eye(X.numel()).reshape(-1, *X.shape)  # it is linear, so this is its derivative
    derivative = np.stack([roi_aligned(unit, rois.double().numpy(), *settings) for unit in units])
    gradient = np.einsum("ukcp,kcp->u", derivative[..., 0], expected[..., 0]).reshape(X.shape)
    np.testing.assert_allclose(X - model.x.detach(), gradient, atol=1e-5)


def test_deformed_convolution() -> None:
    generator = torch.Generator().manual_seed(0)
    make: Callable[..., torch.Tensor] = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    x, weight, offset, mask, bias = make(1, 4, 5, 4), make(6, 2, 3, 2), make(1, 24, 2, 3), make(1, 12, 2, 3), make(6)
    stride, pad, dilation = (2, 1), (1, 0), (1, 1)
    settings = (*stride, *pad, *dilation, 2, 2, True)
    found = poptorch.inferenceModel(lambda *given: torch.ops.torchvision.deform_conv2d(*given, *settings))(
        x, weight, offset, mask, bias
    )
    expected = np.broadcast_to(bias.double().numpy()[:, None, None], (6, 2, 3)).copy()
    for o, c, (i, j), (p, q) in product(range(6), range(2), np.ndindex(3, 2), np.ndindex(2, 3)):
        channel = o // 3 * 2 + c
        tap = channel // 2 * 6 + i * 2 + j
        at = [
            n * s - e + k + float(offset[0, 2 * tap + d, p, q])
            for d, (n, s, e, k) in enumerate(zip((p, q), stride, pad, (i, j), strict=True))
        ]
        seen = between(x[0, channel : channel + 1].double().numpy(), *at, edge=False)[0]
        expected[o, p, q] += seen * float(weight[o, c, i, j]) * float(mask[0, tap, p, q])
    np.testing.assert_allclose(found[0], expected, atol=1e-4)


@pytest.mark.filterwarnings("ignore:`create_unbacked_symint` is deprecated")  # torchvision itself uses it
def test_boxes_that_are_thrown_out() -> None:
    """A detector's last steps: what is likely enough, without what lies on something more likely."""

    def model(boxes: torch.Tensor, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        likely = scores > 0.25
        boxes, scores = boxes[likely] * 2, scores[likely]
        places = torch.ops.torchvision.nms(boxes, scores, 0.5)
        return boxes[places], scores[places]

    boxes = torch.tensor([[0.0, 0, 4, 4], [0, 1, 4, 5], [5, 5, 9, 8], [0, 0, 9, 9]])
    scores = torch.tensor([0.5, 0.75, 0.375, 0.125])
    wrapped = poptorch.inferenceModel(model)
    found, likely = wrapped(boxes, scores)
    assert found.tolist() == [[0, 2, 8, 10], [10, 10, 18, 16]] and likely.tolist() == [0.75, 0.375]
    assert [len(t) for t in wrapped(boxes, scores + 0.25)] == [3, 3]


def test_sizes_that_detectors_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    """A detector draws a size for each image. There is a program for each size that it may be, and no more."""

    class GeneralizedRCNNTransform(torch.nn.Module):
        def torch_choice(self, sizes: list[int]) -> int:
            return sizes[int(torch.empty(1).uniform_(0.0, float(len(sizes))).item())]

        def forward(self, image: torch.Tensor, sizes: list[int]) -> torch.Tensor:
            size = self.torch_choice(sizes)
            return torch.nn.functional.interpolate(image, (size, size + 1))

    library = ModuleType("torchvision.models.detection.transform")
    monkeypatch.setitem(sys.modules, library.__name__, library)
    monkeypatch.setattr(library, "GeneralizedRCNNTransform", GeneralizedRCNNTransform, raising=False)
    image = torch.arange(12.0).reshape(1, 2, 2, 3)
    options = poptorch.Options().showCompilationProgressBar(False).randomSeed(2)
    compiled: list[CompilationProgress] = []
    with compilation_progress(compiled.append):
        wrapped = poptorch.inferenceModel(GeneralizedRCNNTransform(), options)
        found = [wrapped(image, [4, 6]) for _ in range(8)]
        assert {tuple(t.shape) for t in found} == {(1, 2, 4, 5), (1, 2, 6, 7)}
        assert sum(each.done == each.total for each in compiled) <= 3  # that which draws, and one for each size
        only = poptorch.inferenceModel(GeneralizedRCNNTransform(), options)(image, [4])
    assert torch.equal(only, torch.nn.functional.interpolate(image, (4, 5)))
