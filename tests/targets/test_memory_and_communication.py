"""What is foreseen of memory, and what programs send, beside what compilers say: a part of the tables."""

import pytest

from popxl.base.pages import bytes_text
from tests.targets.communication import PROGRAMS, sent
from tests.targets.memory import compared

pytestmark = [pytest.mark.targets, pytest.mark.thorough]

KINDS = ("gpu h100", "tpu v5e")
RECOMPUTED = "blocks of a GPT, tensor-parallel"
"""XLA for GPUs computes once what this asks for twice, with its exchanges: it sends less than the program says."""


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, kind) for name in ("network, only used", "network, Adam", "attention, bfloat16") for kind in KINDS),
        *((name, "gpu h100") for name in ("network, Adam, 4 chips", "convolutions", "GPT, recomputed")),
        *((name, "tpu v5e") for name in ("vocabulary", "a layer, eight times", "blocks, bfloat16, 4 chips")),
        *((name, "gpu h100") for name in ("network, Adam, bfloat16", "blocks, bfloat16, 4 chips", "GPT, phased")),
    ],
)
def test_memory_is_foreseen_within_5_percent(name: str, kind: str) -> None:
    found = compared(name, kind)
    assert abs(found.error) < 0.05, f"{bytes_text(found.foreseen)} foreseen, {bytes_text(found.compiled)} compiled"


@pytest.mark.parametrize("chips", [8, 64, 256])
@pytest.mark.parametrize("name", [name for name in PROGRAMS if "random" not in name and name != RECOMPUTED])
def test_programs_send_what_they_say(name: str, chips: int) -> None:
    """The same programs as `python -m tests.targets.communication`, which has random ones, too."""
    found = sent(name, "gpu", chips)
    assert found.is_sent and found.exchanges and not found.differences, found


def test_recomputed_exchanges_are_not_sent_twice() -> None:
    found = sent(RECOMPUTED, "gpu", 64)
    assert all(e.compiled_bytes <= e.said_bytes for e in found.exchanges)
