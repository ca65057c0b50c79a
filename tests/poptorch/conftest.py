"""Tests of what models in PyTorch become."""

import pytest


@pytest.fixture(autouse=True)
def _quickly_compiled(quickly_compiled: None) -> None:
    """What a model becomes is a large program that runs for a few steps."""
