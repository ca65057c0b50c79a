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
    "gpt, gpu h100": lambda: small_gpt(Size.FULL, 1),
    "encoder, gpu h100": lambda: by_poptorch(models.encoder(Size.FULL, layers=1, steps=2)),
    "encoder, tpu v5e": lambda: by_poptorch(models.encoder(Size.FULL, layers=2, steps=10)),
    "lenet, gpu h100": lambda: by_poptorch(models.lenet(Size.FULL, steps=2)),
}


@pytest.mark.targets
@pytest.mark.parametrize("name", CASES)
def test_no_column_is_worse_than_by_hand(name: str) -> None:
    program, target = name.split(", ")
    if program != "gpt":
        pytest.importorskip("torch")
    case = CASES[name]()
    ours = of_ours(case, target)
    with jax.default_matmul_precision("highest"):
        by_hand = of_jax(case, target)
    columns = ["arguments", "temporaries", "code", "flops", "bytes accessed", "kernels", "cycles"]
    if target.startswith("tpu"):  # in the core's own memory; it is full of what is fetched early
        columns.remove("temporaries")
    for column in columns:
        assert ours[column] <= 1.02 * by_hand[column] + 16, f"{column}: {ours[column]} for {by_hand[column]}"
