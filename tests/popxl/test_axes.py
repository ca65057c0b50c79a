"""Axes with names: groupings by name, what is printed and saved, the mesh that programs get, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.errors import PopxlError, UnreadableFileError
from runtime.targets.devices import Device
from runtime.targets.mesh import dimensions_of, placed_devices
from runtime.targets.replicas import Dimension

AXES = {"data": 2, "one": 1, "tensor": 3, "expert": 2}


def test_groupings_by_name_are_the_strided_ones() -> None:
    ir = popxl.Ir(axes=AXES)
    assert (ir.replication_factor, ir.axes) == (12, AXES)
    for names, arguments in {
        ("expert",): (1, 2),
        ("tensor",): (2, 3),
        ("data",): (6, 2),
        ("one",): (1, 1),
        ("tensor", "expert"): (1, 6),
        ("expert", "tensor"): (1, 6),
        ("data", "tensor"): (2, 6),
        ("data", "one", "tensor", "expert"): (1, 12),
    }.items():
        assert ir.grouping(*names) == ir.replica_grouping(*arguments), names
        assert ir.grouping(*names).is_const


def test_ipus_have_a_place_among_axes(tmp_path: Path) -> None:
    """Which is no axis of replicas."""
    ir = popxl.Ir(axes={"data": 2, "stage": "ipus", "tensor": 3})
    assert (ir.axes, ir.replication_factor, ir.adjacent_replicas) == ({"data": 2, "tensor": 3}, 6, 3)
    assert popxl.Ir(axes={"stage": "ipus", "data": 2, "tensor": 3}).adjacent_replicas == 6
    assert popxl.Ir(axes={"data": 2, "stage": "ipus"}).adjacent_replicas == popxl.Ir(axes=AXES).adjacent_replicas == 1
    ir.save(tmp_path / "program")
    assert popxl.Ir.load(tmp_path / "program").adjacent_replicas == 3
    with pytest.raises(ValueError, match="there is no axis 'stage'"):
        ir.grouping("stage")
    with pytest.raises(ValueError, match="the axes 'a' and 'b' are both of the IPUs"):
        popxl.Ir(axes={"a": "ipus", "b": "ipus"})


def test_axes_that_are_not_neighbours_are_for_variables_only() -> None:
    ir = popxl.Ir(axes=AXES)
    numbers = np.arange(12).reshape(2, 1, 3, 2)
    expected = [0] * 12
    for group, members in enumerate(numbers.transpose(2, 0, 1, 3).reshape(3, 4)):
        for replica in members:
            expected[replica] = group
    assert ir.grouping("data", "expert").assignment == expected
    with ir.main_graph:
        w = popxl.variable(np.ones((3, 5)), popxl.float32, "w", replica_grouping=("data", "expert"))
        assert w.replica_grouping.assignment == expected
        with pytest.raises(NotImplementedError, match="axes with others in between: .* Put them next to each other"):
            ops.collectives.replicated_all_reduce(w, group=("data", "expert"))


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="the number of replicas is 4, and the axes data 2 × tensor 3 have 6"):
        popxl.Ir(4, axes={"data": 2, "tensor": 3})
    with pytest.raises(ValueError, match="'data' has the size 0; expected 1 or more"):
        popxl.Ir(axes={"data": 0})
    with pytest.raises(ValueError, match="an axis is called 'a b'; expected a word"):
        popxl.Ir(axes={"a b": 2})
    with pytest.raises(TypeError, match=r"the size of the axis 'data' must be an integer; got 2.0 \(float\)"):
        popxl.Ir(axes={"data": 2.0})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match=r"`axes` must be a dictionary such as .*; got \['data'\] \(list\)"):
        popxl.Ir(axes=["data"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"the axes \('data',\) are named, and Ir.* has none. Make it with"):
        popxl.Ir(4).grouping("data")
    ir = popxl.Ir(6, axes={"data": 2, "tensor": 3})
    for names, message in {
        ("tenser",): "there is no axis 'tenser'; the Ir has 'data', 'tensor'",
        ("data", "data"): "an axis is named twice in",
        (): "no axis is named. Name one or more of 'data', 'tensor'",
    }.items():
        with pytest.raises(ValueError, match=message):
            ir.grouping(*names)
    with ir.main_graph:
        with pytest.raises(TypeError, match="`replica_grouping` must be a ReplicaGrouping, the name of an axis or"):
            popxl.variable(1.0, replica_grouping=3)  # type: ignore[arg-type]
        ops.exp(popxl.variable(1.0))
    with pytest.raises(ValueError, match="the number of replicas is 3, and the axes"):
        ir.replication_factor = 3
    ir.options.replicatedGraphCount = 3
    with pytest.raises(ValueError, match="grouping: the Ir has 3 replicas, and its axes data 2 × tensor 3 have 6"):
        ir.grouping("data")
    with pytest.raises(ValueError, match="Session: the Ir has 3 replicas"):
        popxl.Session(ir, "ipu_model")


def program(ir: popxl.Ir, *groups: Any) -> list[tuple[Any, Any]]:
    """All kinds of exchanges over some groups; each stream, with what it gives by NumPy, replica by replica."""
    count = ir.replication_factor
    data = np.random.default_rng(0).integers(-9, 9, (count, 4, count)).astype(np.float32)
    found = []
    with ir.main_graph, popxl.in_sequence():
        x = popxl.variable(data, popxl.float32, "x", replica_grouping=ir.replica_grouping(group_size=1))
        for group in groups:
            grouping = ir.grouping(group) if isinstance(group, str) else group
            members = [[r for r, g in enumerate(grouping.assignment) if g == own] for own in grouping.assignment]
            own = [data[m] for m in members]
            sums = np.array([m.sum(0) for m in own])
            rank = [m.index(r) for r, m in enumerate(members)]
            pieces = np.array([np.split(s.ravel(), len(m))[k] for s, m, k in zip(sums, own, rank, strict=True)])
            results = {
                ops.collectives.replicated_all_reduce(x, "add", group): sums,
                ops.collectives.replicated_all_reduce(x, "max", group): np.array([m.max(0) for m in own]),
                ops.collectives.replicated_reduce_scatter(x, "add", group): pieces,
                ops.collectives.replicated_all_gather(x, 0, group, "new_axis"): np.array(own),
            }
            for t, expected in results.items():
                stream = popxl.d2h_stream(t.shape, t.dtype)
                ops.host_store(stream, t)
                found.append((stream, expected))
    return found


@pytest.mark.parametrize(
    ("axes", "groups", "shape"),
    [
        ({"data": 2, "tensor": 2, "expert": 2}, ["tensor", "data"], {"data": 2, "tensor": 2, "expert": 2}),
        (8, [(2, 4), (1, 2)], {"replicas 2": 4, "replicas 1": 2}),
        (6, [(1, 2), (1, 3)], {"replicas": 6}),
    ],
)
def test_numbers_on_a_mesh_of_as_many_dimensions(axes: Any, groups: Any, shape: dict[str, int]) -> None:
    ir = popxl.Ir(axes=axes) if isinstance(axes, dict) else popxl.Ir(axes)
    expected = program(ir, *(g if isinstance(g, str) else ir.replica_grouping(*g) for g in groups))
    devices = jax.devices("cpu")
    if len(devices) < ir.replication_factor:
        pytest.skip("JAX was started with fewer devices")
    device = Device("ipu_model", tuple(devices[: ir.replication_factor]))
    with popxl.Session(ir, device) as session:
        assert dict(session.program.layout.replicas.mesh.shape) == shape
        found = session.run()
        for stream, rows in expected:
            np.testing.assert_array_equal(found[stream], rows)
        sent = session.communication()
    assert sent.is_sent and not sent.differences
    assert {exchange.verdict for exchange in sent.exchanges} == {"the same"}


def test_printed_and_saved(tmp_path: Path) -> None:
    ir = popxl.Ir(axes={"data": 2, "tensor": 3})
    with ir.main_graph:
        w = popxl.variable(np.ones((3, 5)), popxl.float32, "w", replica_grouping="data")
        popxl.variable(np.ones((6, 5)), popxl.float32, "e", replica_grouping=ir.replica_grouping(group_size=1))
        ops.collectives.replicated_all_reduce(w, group="tensor")
        ops.collectives.replicated_all_reduce(w, group=("data", "tensor"))
    assert str(ir).splitlines() == [
        "replicas: data 2 × tensor 3",
        "",
        "main graph:",
        "    e: f32[5]                = variable, one for each replica",
        "    w: f32[5]                = variable, shared along data",
        "    w_all_reduce: f32[5]     = ReplicatedAllReduce(w, op=add, along=tensor)",
        "    w_all_reduce__t0: f32[5] = ReplicatedAllReduce(w, op=add, along=(data, tensor))",
    ]
    path = tmp_path / "program.popxl"
    ir.save(path)
    loaded = popxl.Ir.load(path)
    assert (str(loaded), loaded.axes, loaded.grouping("data").stride) == (str(ir), ir.axes, 3)


def test_a_file_with_axes_of_other_replicas_is_refused(tmp_path: Path) -> None:
    ir = popxl.Ir(axes={"data": 2, "tensor": 3})
    ir.options.replicatedGraphCount = 4
    ir.save(tmp_path / "program.popxl")
    with pytest.raises(UnreadableFileError, match="the Ir has 4 replicas, and its axes"):
        popxl.Ir.load(tmp_path / "program.popxl")


def test_popdist_has_as_many_replicas_as_the_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NUM_INSTANCES": 2, "INSTANCE_INDEX": 1, "NUM_TOTAL_REPLICAS": 4}.items():
        monkeypatch.setenv(f"POPDIST_{name}", str(value))
    ir = popxl.Ir("popdist", axes={"data": 2, "tensor": 2})
    assert (ir.replication_factor, ir.instance_replication_factor) == (4, 2)
    with pytest.raises((ValueError, PopxlError), match="the Ir has 4 replicas, and its axes data 3 have 3"):
        popxl.Ir("popdist", axes={"data": 3})


class Chip:
    """A chip of a TPU, as much of it as matters to where it is put."""

    platform, device_kind, core_on_chip = "tpu", "TPU v9", 0

    def __init__(self, process_index: int, *coords: int) -> None:
        self.process_index, self.coords, self.id = process_index, [*coords, 0], 0


def distance(mesh: np.ndarray, axis: int) -> int:
    """How far apart neighbours along an axis of a mesh are, at most."""
    places = np.vectorize(lambda chip: complex(*chip.coords[:2]))(mesh)
    steps = np.diff(places, axis=axis)
    return int((abs(steps.real) + abs(steps.imag)).max())


def test_the_dimension_that_sends_most_has_neighbours() -> None:
    chips = [Chip(0, x, y) for y in range(2) for x in range(8)]
    for busy in range(2):
        dimensions = [Dimension("a", 2, 9 * (busy == 0)), Dimension("b", 8, 9 * (busy == 1))]
        order = placed_devices(chips, dimensions)
        assert {*map(id, order)} == {*map(id, chips)}
        assert distance(np.array(order).reshape(2, 8), busy) == 1


def test_replicas_of_a_process_stay_together_and_hosts_look_alike() -> None:
    hosts = [(0, 0), (2, 0), (0, 2), (2, 2)]
    chips = [Chip(h, hx + x, hy + y) for h, (hx, hy) in enumerate(hosts) for y in range(2) for x in range(2)]
    order = placed_devices(chips, [Dimension("data", 2), Dimension("tensor", 8, 1)])
    assert [chip.process_index for chip in order] == [h for h in range(4) for _ in range(4)]
    places = [(c.coords[0] - hosts[c.process_index][0], c.coords[1] - hosts[c.process_index][1]) for c in order]
    assert places == places[:4] * 4


def test_along_which_dimension_most_is_sent() -> None:
    ir = popxl.Ir(axes={"data": 2, "tensor": 3})
    with ir.main_graph:
        x = popxl.variable(np.ones((4, 5)), popxl.float32, "x")
        ops.collectives.replicated_all_reduce(x, group="tensor")
        ops.collectives.replicated_all_reduce(ops.sum(x), group="data")
    assert dimensions_of(ir, are_weighed=True) == (Dimension("data", 2, 4), Dimension("tensor", 3, 80))
    assert dimensions_of(ir) == (Dimension("data", 2), Dimension("tensor", 3))
