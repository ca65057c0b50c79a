"""What many layers cost on a machine that is not here: those of docs/costs.md, fewer of them."""

from __future__ import annotations

import pytest

from tests.targets.layers import measured

H100 = "gpu h100"
V5E = "tpu v5e"


@pytest.mark.targets
def test_more_layers_cost_what_they_keep() -> None:
    """Neither more code, nor other memory; and a turn is as many kernels as one of a scan, updates and all."""
    few, many = (measured("blocks", layers, "rolled", H100) for layers in (4, 12))
    by_hand = measured("blocks", 4, "JAX, scan, checkpoint", H100)
    assert many["kernels compiled"] == few["kernels compiled"]
    assert many["temporaries"] - few["temporaries"] <= 1.1 * (many["kept"] - few["kept"])
    assert sum(many["kernels of a turn"]) <= sum(by_hand["kernels of a turn"])
    assert few["temporaries"] < by_hand["temporaries"]


@pytest.mark.targets
def test_weights_are_rounded_in_the_turns_that_read_them() -> None:
    """At default precision XLA for TPUs would round all of them before the first turn: 8 MB a layer. Forward turns of
    which nothing is kept need no memory at all."""
    few, many = (measured("layers, rounded", layers, "rolled", V5E) for layers in (4, 16))
    assert many["kernels compiled"] == few["kernels compiled"]
    assert many["temporaries"] - few["temporaries"] <= 1.1 * (many["kept"] - few["kept"])
    assert many["temporaries"] < 2**20


@pytest.mark.targets
@pytest.mark.thorough
def test_updates_in_turns_are_few_kernels() -> None:
    """A scan has none in its turns. Ours have AdamW for sixteen variables, and with them narrow rows that are put back
    at once."""
    ours, by_hand = (measured("gpt", 12, way, H100) for way in ("rolled", "JAX, scan, checkpoint"))
    assert sum(ours["kernels of a turn"]) <= 1.1 * sum(by_hand["kernels of a turn"])
    assert ours["temporaries"] < 0.4 * by_hand["temporaries"]
