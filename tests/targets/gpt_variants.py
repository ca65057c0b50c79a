"""The ways to train a GPT as programs to compile: for `python -m tests.targets`, where sessions are for a target.

The tests of the GPT train one variant first, and go no further where nothing can be run.
"""

from __future__ import annotations

import pytest

from tests.popxl_addons.gpt.model import Config
from tests.popxl_addons.gpt.variants import VARIANTS


@pytest.mark.parametrize("name", VARIANTS)
def test_a_session_is_made(name: str) -> None:
    VARIANTS[name](Config())
