"""The default beside the best way, for small points of the grid."""

from __future__ import annotations

import pytest

from tests.targets.grid import POINTS, Point, cells, found


def test_the_points_cover_all_settings() -> None:
    models, layers, widths, dtypes, replicas, chips = map(set, zip(*POINTS, strict=True))
    assert models == {"blocks", "GPT", "Llama", "experts", "BERT", "ViT", "ResNet-50"}
    assert {2, 96} <= layers and {256, 8192} <= widths
    assert (dtypes, replicas, chips) == ({"float32", "bfloat16"}, {1, 8}, {"tpu v5e", "tpu v5p", "gpu h100"})
    assert {(p.chip, p.dtype) for p in POINTS} == {(c, d) for c in chips for d in dtypes}


@pytest.mark.targets
@pytest.mark.parametrize("model", ["blocks", "ViT"])
def test_the_default_is_the_best_way(model: str) -> None:
    if model == "ViT":
        pytest.importorskip("transformers")
    point = Point(model, 6, 128, "bfloat16", 1, "gpu h100")
    result = found(point)
    assert set(result.costs) == {"inlined", "batched"} and result.ratio <= 1.05
    assert cells(result)[0] == "inlined"
