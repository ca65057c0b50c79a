"""Recomputation that compilers for targets leave where it belongs: beside the gradients that read it."""

from __future__ import annotations

import pytest

from tests.targets.memory_budgets import compiled


@pytest.mark.targets
def test_recomputed_layers_wait_for_their_gradients() -> None:
    """XLA moves recomputation whose barrier has lost its gradient beside the forward pass, where it needs more."""
    kept, recomputed = (
        compiled("convolutions", "gpu h100", "inlined", policy).memory.temporaries
        for policy in ("everything", "nothing")
    )
    assert recomputed < 0.6 * kept
