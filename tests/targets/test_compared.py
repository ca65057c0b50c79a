"""What our programs cost on a machine that is not here, beside the same by hand in JAX: those of docs/costs.md, less
deep."""

from __future__ import annotations

from collections.abc import Callable

import jax
import pytest

from tests.benchmarks import models
from tests.benchmarks.harness import Size
from tests.targets.compared import Case, by_poptorch, of_jax, of_ours, small_gpt

CASES: dict[str, Callable[[], Case]] = {
    "gpt": lambda: small_gpt(Size.FULL, 1),
    "encoder": lambda: by_poptorch(models.encoder(Size.FULL, layers=1, steps=2)),
    "lenet": lambda: by_poptorch(models.lenet(Size.FULL, steps=2)),
}


@pytest.mark.targets
@pytest.mark.parametrize("name", CASES)
def test_no_column_is_worse_than_by_hand(name: str) -> None:
    if name != "gpt":
        pytest.importorskip("torch")
    case = CASES[name]()
    ours = of_ours(case, "gpu h100")
    with jax.default_matmul_precision("highest"):
        by_hand = of_jax(case, "gpu h100")
    for column in ("arguments", "temporaries", "flops", "bytes accessed", "kernels"):
        assert ours[column] <= 1.02 * by_hand[column] + 16, f"{column}: {ours[column]} for {by_hand[column]}"
