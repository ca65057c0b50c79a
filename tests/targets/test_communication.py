"""What programs send, beside what compilers say: a part of the table."""

import pytest

from tests.targets.communication import PROGRAMS, sent

pytestmark = [pytest.mark.targets, pytest.mark.thorough]

RECOMPUTED = "blocks of a GPT, tensor-parallel"
"""XLA for GPUs computes once what this asks for twice, with its exchanges: it sends less than the program says."""


@pytest.mark.parametrize("chips", [8, 64, 256])
@pytest.mark.parametrize("name", [name for name in PROGRAMS if "random" not in name and name != RECOMPUTED])
def test_programs_send_what_they_say(name: str, chips: int) -> None:
    """The same programs as `python -m tests.targets.communication`, which has random ones, too."""
    found = sent(name, "gpu", chips)
    assert found.is_sent and found.exchanges and not found.differences, found


def test_recomputed_exchanges_are_not_sent_twice() -> None:
    found = sent(RECOMPUTED, "gpu", 64)
    assert all(e.compiled_bytes <= e.expected_bytes for e in found.exchanges)
