"""What a step of training costs on machines that are not here, as users write it; and that the default is the best."""

from __future__ import annotations

from typing import Any

import pytest

import popxl
from runtime.costs.hlo import parse_hlo
from runtime.costs.work import collectives_of, is_kernel
from tests.benchmarks import blocks
from tests.targets.steps import Sizes, in_jax, session_of

SMALL = Sizes(layers=10, width=64, heads=2, hidden=128, vocabulary=64, texts=2, length=32)


def cost_of(calls: Any, target: str) -> tuple[popxl.Session, Any]:
    session = session_of(SMALL, calls, target)
    return session, session.cost()


@pytest.mark.targets
@pytest.mark.parametrize("target", ["gpu h100", pytest.param("tpu v5e", marks=pytest.mark.thorough)])
def test_the_default_is_the_fastest(target: str) -> None:
    default, cost = cost_of("auto", target)
    costs = {way: cost_of(way, target) for way in ("inlined", "rolled", "dispatched")}
    assert [loop.iterations for loop in costs["rolled"][0].report.loops] == [10, 10]
    for _, other in costs.values():
        if target.startswith("tpu"):
            assert cost.cycles <= 1.05 * other.cycles
        else:
            assert cost.bytes_accessed <= 1.05 * other.bytes_accessed and cost.kernels <= 1.05 * other.kernels
    assert default.report.calls == "inlined"
    assert default.report.reason.startswith("It is the fastest by an estimate: inlined, ")
    by_hand = in_jax(SMALL, "unrolled", target)
    if target.startswith("gpu"):
        assert cost.bytes_accessed <= 1.02 * by_hand.bytes  # products are rounded where they are made
    pieces = costs["dispatched"][1]
    assert pieces.kernels <= 1.5 * cost.kernels  # they are fused in the pieces of a plan


@pytest.mark.targets
@pytest.mark.parametrize(
    ("room", "calls"), [(2_500_000, "rolled"), pytest.param(2_200_000, "dispatched", marks=pytest.mark.thorough)]
)
def test_what_does_not_fit_is_compiled_in_other_ways(room: int, calls: str) -> None:
    """Blocks that compute again what their gradients need: loops keep less at a time, and pieces of a plan the least.
    XLA computes again, too, before it gives up: inlined they need 3.1 MB, and 2.8 MB where there is less."""
    figures = popxl.Target("gpu h100").chip.model_copy(update={"memory_bytes": room})
    target = popxl.Target("gpu small", figures)  # type: ignore[arg-type]
    session = popxl.Session(blocks.Ours(blocks.Model(8, rows=32, width=64, heads=2), recompute=True).ir, target)
    assert session.report.calls == calls
    assert session.report.target is not None and session.report.target.fits
    assert "inlined, too large for the memory" in session.report.reason


@pytest.mark.targets
def test_gradients_of_weights_copy_no_rows() -> None:
    """A TPU has rows as attention wants them, and copies them where they become one dimension."""
    sizes = Sizes(layers=1, width=256, heads=2, hidden=512, vocabulary=128, texts=2, length=128)
    cost = session_of(sizes, "inlined", "tpu v5e").cost()
    assert cost.cycles is not None and cost.cycles <= in_jax(sizes, "unrolled", "tpu v5e").cycles


@pytest.mark.targets
def test_weights_are_gathered_a_layer_ahead() -> None:
    """XLA for GPUs would gather those of all layers that the memory has room for: here, of ten, 31 MB."""
    sizes = Sizes(layers=10, width=512, heads=4, hidden=1408, vocabulary=512, texts=1, length=128)
    (text,) = session_of(sizes, "inlined", "gpu h100:8", memory="nothing").hlo().values()
    of_layer = 2 * (4 * 512 * 512 + 3 * 512 * 1408)  # bytes
    kernels = [each for each, _ in parse_hlo(text).entry.runs() if is_kernel(each)]
    attention = next(i for i, each in enumerate(kernels) if "fmha" in each.target)
    gathers = (each for kernel in kernels[:attention] for each in collectives_of(kernel, ""))
    assert 0 < sum(each.bytes for each in gathers if each.kind == "all-gather") < 1.5 * of_layer
