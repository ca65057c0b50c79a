"""Wires in levels, and the time of collectives over them, beside what one computes by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import popxl
from popxl import ops
from runtime.costs.hlo import parse_hlo
from runtime.costs.kernels import attained, product_seconds
from runtime.costs.network import Wires, collective_time, spans_of
from runtime.costs.step import timeline_of
from runtime.costs.step_timeline import StepTimeline
from runtime.costs.work import Product, SizedProduct, account_of
from runtime.targets.chip import Efficiency, Gpu, Tpu, names, shipped

GPU = shipped(Gpu, "h100").model_copy(update={"efficiency": Efficiency()})  # all that is published
WITHIN, BETWEEN = GPU.links


def time_of(kind: str, nbytes: float, members: list[int], chips: int = 64, chip: Any = GPU) -> Any:
    return collective_time(chip, kind, nbytes, spans_of(chip, [(i,) for i in members], [(i,) for i in range(chips)]))


@pytest.mark.parametrize("kind", [Gpu, Tpu])
def test_chips_are_wired_in_levels(kind: Any) -> None:
    for name in names(kind):
        chip = shipped(kind, name)
        inner, outer = chip.levels
        assert (
            inner.bandwidth > 4 * outer.bandwidth and inner.latency < outer.latency and inner.chips and not outer.chips
        )
        assert inner.bandwidth == chip.network_bandwidth and (inner.ring is not None) == (kind is Tpu)
        assert 0.5 < chip.efficiency.products < 1 and chip.efficiency.sources


def test_figures_without_links_are_one_switch(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(GPU.model_dump_json(exclude={"links", "efficiency"}))
    chip = popxl.Target(f"gpu {file}:16").chip
    assert [(link.bandwidth, link.latency, link.chips) for link in chip.levels] == [(450e9, 0.0, None)]
    assert time_of("all-reduce", 1e9, [*range(16)], chip=chip).seconds == pytest.approx(2 * 15 / 16 * 1e9 / 450e9)


def test_an_all_reduce_within_a_host_is_a_ring_and_a_small_one_a_tree() -> None:
    large = time_of("all-reduce", 1e9, [*range(8)])
    assert large.seconds == pytest.approx(2 * 7 / 8 * 1e9 / 450e9 + 2 * 7 * 2e-6)
    assert (large.algorithm, large.over) == ("ring", ("NVLink",))
    small = time_of("all-reduce", 1e3, [*range(8)])
    assert small.algorithm == "tree" and small.seconds == pytest.approx(2 * (3 * 2e-6 + 1e3 / 450e9))


def test_between_hosts_the_network_cards_count() -> None:
    found = time_of("all-reduce", 1e9, [0, 8, 16, 24])
    assert found.seconds == pytest.approx(2 * 3 / 4 * 1e9 / 50e9 + 2 * 3 * 5e-6) and found.over == ("InfiniBand NDR",)


def test_over_both_levels_a_collective_is_hierarchical() -> None:
    """Scattered within the host, summed between hosts, of which each chip has an eighth, and gathered."""
    found = time_of("all-reduce", 8e9, [*range(32)])
    within = 2 * (7 / 8 * 8e9 / 450e9 + 7 * 2e-6)
    between = 2 * (3 / 4 * 1e9 / 50e9 + 3 * 5e-6)
    assert found.seconds == pytest.approx(within + between) and found.algorithm == "ring, ring"
    gathered = time_of("all-gather", 8e9, [*range(32)])
    assert gathered.seconds == pytest.approx((within + between) / 2)
    assert gathered == time_of("reduce-scatter", 8e9, [*range(32)])


def test_each_chip_to_each_other_one_and_to_the_next() -> None:
    sent = time_of("all-to-all", 16e6, [*range(16)])
    assert sent.seconds == pytest.approx(max(7 / 16 * 16e6 / 450e9 + 7 * 2e-6, 8 / 16 * 16e6 / 50e9 + 5e-6))
    assert time_of("collective-permute", 1e6, [7, 8]).seconds == pytest.approx(5e-6 + 1e6 / 50e9)
    assert time_of("collective-permute", 1e6, [6, 7]).seconds == pytest.approx(2e-6 + 1e6 / 450e9)
    assert time_of("all-reduce", 1e9, [3]).seconds == 0


def on_torus(kind: str, nbytes: float, members: list[tuple[int, ...]], shape: tuple[int, ...], name: str) -> float:
    chip = shipped(Tpu, name).model_copy(update={"efficiency": Efficiency()})
    chips = [(*place, 0) for place in np.ndindex(*shape)]
    return collective_time(chip, kind, nbytes, spans_of(chip, [(*m, 0) for m in members], chips)).seconds


def test_on_a_torus_all_dimensions_work_at_a_time() -> None:
    """A wire of a v5e carries 50 GB/s, and only 16 chips are a ring; a v5p wants multiples of 4 along all axes."""
    line = on_torus("all-gather", 1e9, [(0, i) for i in range(4)], (4, 4), "v5e")
    assert line == pytest.approx(3 / 4 * 1e9 / 50e9 + 3e-6)
    plane = on_torus("all-reduce", 1e9, [*np.ndindex(4, 4)], (4, 4), "v5e")
    assert plane == pytest.approx(2 * (15 / 16 * 1e9 / 100e9 + 6e-6))
    ring = on_torus("all-gather", 1e9, [(0, i) for i in range(16)], (4, 16), "v5e")
    assert ring == pytest.approx(15 / 16 * 1e9 / 100e9 + 8e-6)
    cube = on_torus("all-gather", 1e9, [*np.ndindex(4, 4, 4)], (4, 4, 4), "v5p")
    assert cube == pytest.approx(63 / 64 * 1e9 / 600e9 + 6e-6)
    crossing = on_torus("all-to-all", 1e9, [*np.ndindex(4, 4)], (4, 4), "v5e")
    assert crossing == pytest.approx(15 / 16 * 1e9 * 4 / (4 * 50e9) + 6e-6)


# Groups as XLA writes them --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{}", ()),
        ("[2,2]<=[4]", ((0, 1), (2, 3))),
        ("[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("mesh['a'=2,'b'=4] {'a'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['a'=2,'b'=4] {'b':(1)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
    ],
)
def test_groups_are_read(written: str, groups: Any) -> None:
    text = f"""HloModule step

ENTRY %main (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  ROOT %sum = f32[8]{{0}} all-reduce(%x), replica_groups={written}, use_global_device_ids=true, to_apply=%add
}}
"""
    (found,) = account_of(parse_hlo(text)).collectives
    assert (found.groups, found.group_size) == (groups, len(groups[0]) if groups else 0)


# Kernels and their order ----------------------------------------------------------------------------------------------


def test_products_fill_blocks_and_rounds_of_units() -> None:
    chip = GPU.model_copy(update={"efficiency": Efficiency(products=0.8, tiles=((128, 128),), depth=64)})

    def product(rows: int, columns: int, depth: int, batch: int = 1) -> SizedProduct:
        flops = 2 * batch * rows * columns * depth
        return SizedProduct(Product("bfloat16", "default"), flops, batch, rows, columns, depth)

    whole = product(128 * 12, 128 * 11, 64 * 63)  # as many blocks as there are units
    assert attained(chip, whole) == pytest.approx(0.8 * 63 / 64)
    assert product_seconds(chip, whole) == pytest.approx(whole.flops / (chip.flops["bfloat16"] * 0.8 * 63 / 64))
    one_more = product(128 * 12 + 1, 128 * 11, 64 * 63)  # a second round, of 11 blocks
    assert attained(chip, one_more) == pytest.approx(0.8 * 63 / 64 * (128 * 12 + 1) / (128 * 24))
    assert attained(chip, product(1, 128, 64, batch=132)) == pytest.approx(0.8 / 2 / 128)
    assert attained(GPU, product(1, 1, 1)) == 1


def test_what_is_started_goes_on_beside_kernels() -> None:
    """An all-reduce takes longer than the copy beside it, so each turn of the loop waits for the rest of it."""
    nbytes = 45_000_000
    body = f"""
  %p = (s32[], f32[{nbytes // 4}]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[{nbytes // 4}]{{0}} get-tuple-element(%p), index=1
  %begun = f32[{nbytes // 4}]{{0}} all-reduce-start(%x), replica_groups={{{{0,1,2,3,4,5,6,7}}}}, to_apply=%add
  %y = f32[{nbytes // 4}]{{0}} copy(%x)
  %sum = f32[{nbytes // 4}]{{0}} all-reduce-done(%begun)
  ROOT %all = (s32[], f32[{nbytes // 4}]) tuple(%i, %sum)"""
    turns = 'backend_config={"known_trip_count":{"n":"5"}}'
    text = f"""HloModule step, is_scheduled=true

%body (p: (s32[], f32[{nbytes // 4}])) -> (s32[], f32[{nbytes // 4}]) {{{body}
}}

ENTRY %main (p: (s32[], f32[{nbytes // 4}])) -> (s32[], f32[{nbytes // 4}]) {{
  %p = (s32[], f32[{nbytes // 4}]) parameter(0)
  ROOT %loop = (s32[], f32[{nbytes // 4}]) while(%p), condition=%c, body=%body, {turns}
}}
"""
    found = timeline_of(parse_hlo(text), Wires(GPU, [(i,) for i in range(8)]))
    sent = 2 * 7 / 8 * nbytes / 450e9 + 2 * 7 * 2e-6
    copied = 2 * nbytes / GPU.memory_bandwidth
    assert found.seconds == pytest.approx(5 * sent) and found.limits["memory"] == pytest.approx(5 * copied)
    assert found.exposed == pytest.approx(5 * (sent - copied))
    (line,) = found.traffic
    assert (line.count, line.over, line.algorithm) == (5, "NVLink", "ring")
    assert (line.seconds, line.exposed) == pytest.approx((5 * sent, found.exposed))
    assert [span.lane for span in found.spans] == ["network", "kernels"]
    assert "not hidden" in str(found) and "<rect" in found.picture()


@pytest.mark.compiled_whole
def test_a_compiled_function_is_a_schedule() -> None:
    """Seven turns of a product, each no shorter than a launch."""

    def function(x: Any, w: Any) -> Any:
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=7)[0]

    text = jax.jit(function).lower(jnp.ones((4, 6)), jnp.ones((6, 6))).compile().as_text()
    chip = GPU.model_copy(update={"efficiency": Efficiency(launch=1e-3)})
    found = timeline_of(parse_hlo(text), Wires(chip, [(0,)]))
    assert 7e-3 < found.seconds < 40e-3 and found.limits == {"launch": pytest.approx(found.seconds)}
    assert "100 %" in str(found) and "all of them together" not in str(found)


def test_shares_of_several_devices_are_of_their_time_together() -> None:
    """Two devices, each of which works for most of a run."""
    limits = {"memory": 0.9, "dispatch": 0.6}
    run = StepTimeline(seconds=1.0, limits=limits, graphs={}, inclusive={}, traffic=(), spans=())
    assert "60 %" in str(run) and "40 %" in str(run) and "all of them together" in str(run)


@pytest.mark.targets
def test_a_report_says_which_axis_goes_over_which_wires() -> None:
    ir = popxl.Ir(axes={"tensor": 2, "data": 8})
    with ir.main_graph, popxl.in_sequence():
        x = popxl.variable(np.ones((64, 512)), popxl.float32, "x")
        y = ops.collectives.replicated_all_reduce(x, group="tensor")
        y = y + ops.collectives.replicated_all_reduce(x[:2], group="data")[0]
        ops.var_updates.copy_var_update_(x, y)
    cost = popxl.Session(ir, "gpu h100:16").cost()
    tensor, data = cost.axes
    assert (tensor.name, tensor.size, tensor.over, tensor.bytes) == ("tensor", 2, "InfiniBand NDR", 4 * 64 * 512)
    assert (data.name, data.size, data.over) == ("data", 8, "NVLink") and data.bytes < tensor.bytes
    assert "`tensor` sends more than `data`, and goes over InfiniBand NDR" in " ".join(str(cost).split())
    assert (
        cost.step is not None
        and cost.seconds == cost.step.seconds
        and sum(cost.step.limits.values()) == (pytest.approx(cost.seconds))
    )
    assert cost.chip_hours == pytest.approx(16 * cost.seconds / 3600)
