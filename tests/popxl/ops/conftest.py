"""Tests of what ops compute."""

import pytest


@pytest.fixture(autouse=True)
def _quickly_compiled(quickly_compiled: None) -> None:
    """Each op is many small programs."""
