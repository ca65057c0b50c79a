"""What compilers of other machines than CPUs are given: the plain form of every op, and nothing that was made for CPUs.

It is read in StableHLO, so that none of these compilers is needed.
"""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.errors import PopxlError
from popxl.transforms import autodiff
from runtime.lowering.remote_buffers import check_places
from tests.popxl.elsewhere import layout_for, lowered_text

F32 = popxl.float32

MADE_FOR_CPUS = {
    "a call that is kept": r'inlineable = "false"',
    "a choice by platform": r"stablehlo.case|platform_index",
    "an order of updates": r"optimization_barrier",
}


def variable(*shape: int, dtype: popxl.dtype = F32) -> popxl.Variable:
    return popxl.variable(np.ones(shape), dtype)


def kinds(text: str) -> Counter[str]:
    """How often each kind of operation stands in a program."""
    return Counter(re.findall(r"\bstablehlo\.(\w+)", text))


def trained(ir: popxl.Ir, function, *tensors: popxl.Tensor) -> None:
    """Call a function in a graph of its own, and its gradient; every result is kept."""
    graph = ir.create_graph(function, *tensors)
    info, grad = ops.call_with_info(graph, *tensors), autodiff(graph)
    for t in (*info.outputs, *ops.call(grad.graph, *info.outputs, inputs_dict=grad.inputs_dict(info))):
        ops.host_store(popxl.d2h_stream(t.shape, t.dtype), t)


def convolutions(ir: popxl.Ir) -> None:
    """Of shapes for which CPUs have forms of their own: few channels, a channel in each group; and a transposed one."""
    trained(ir, lambda x, w: ops.conv(x, w), variable(16, 1, 28, 28), variable(6, 1, 5, 5))
    trained(ir, lambda x, w: ops.conv(x, w, groups=8), variable(16, 8, 28, 28), variable(8, 1, 3, 3))
    trained(ir, lambda x, w: ops.conv_transpose(x, w, stride=(2, 2)), variable(16, 6, 14, 14), variable(6, 3, 3, 3))


def pooling(ir: popxl.Ir) -> None:
    trained(ir, lambda x: ops.max_pool(x, (2, 2), (2, 2)), variable(16, 6, 24, 24))
    trained(ir, lambda x: ops.average_pool(x, (2, 2), (2, 2)), variable(16, 6, 24, 24))


def sums(ir: popxl.Ir) -> None:
    """Of rows, of images, and of the last axis."""
    rows, images = variable(64, 48), variable(16, 6, 24, 24)
    for t in (ops.sum(rows, 0), ops.sum(images, (0, 2, 3)), ops.sum(rows, 1), ops.max(rows, 1)):
        ops.host_store(popxl.d2h_stream(t.shape, F32), t)


def updates(ir: popxl.Ir) -> None:
    """Of a weight that an op reads before it is overwritten, twice; and an elementwise function that takes long."""
    w, b = variable(64, 48), variable(48)

    def step(w, b):
        y = ops.gelu(w + b)
        ops.scaled_add_(w, y, b=-0.1)
        return y / (1 + ops.exp(w))

    graph = ir.create_graph(step, w, b)
    graph.inputs[0].by_ref = True
    for _ in range(2):
        (y,) = ops.call(graph, w, b)
        ops.host_store(popxl.d2h_stream(y.shape, F32), y)


PLAIN = {
    convolutions: {"convolution": 9},
    pooling: {"reduce_window": 4, "dot_general": 0},
    sums: {"reduce": 4, "dot_general": 0},
    updates: {"reduce": 0},
}
"""Programs, and how often some operations stand in them."""


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@pytest.mark.parametrize("program", PLAIN, ids=lambda program: program.__name__)
def test_nothing_is_made_for_cpus(program, platform):
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        program(ir)
    text = lowered_text(ir, platform)
    assert {name for name, pattern in MADE_FOR_CPUS.items() if re.search(pattern, text)} == set()
    found = kinds(text)
    assert {kind: found[kind] for kind in PLAIN[program]} == PLAIN[program]


@pytest.mark.parametrize("program", PLAIN, ids=lambda program: program.__name__)
def test_on_cpus_it_is_another_program(program):
    """Or the test above would look for what is nowhere."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        program(ir)
    assert kinds(lowered_text(ir, "cpu")) != kinds(lowered_text(ir, "tpu"))


def test_calls_are_kept_on_cpus_only(ir):
    """Unless somebody asks for it; and XLA for TPUs could not."""
    with ir.main_graph:
        updates(ir)
    assert [layout_for(ir, platform).mode for platform in ("cpu", "tpu", "cuda")] == ["kept", "inlined", "inlined"]
    ir.options.calledGraphs = "kept"
    assert [layout_for(ir, platform).mode for platform in ("tpu", "cuda")] == ["inlined", "kept"]


def test_chunks_of_sums_lie_in_whole_rows_and_blocks():
    """Of TPUs; or they sum all of all replicas. Few numbers they sum whole in any case."""
    ir = popxl.Ir(replication=4)
    with ir.main_graph:
        for size in (5000, 20000, 32768):
            for group in (None, ir.replica_grouping(stride=2, group_size=2)):
                t = ops.collectives.replicated_reduce_scatter(variable(size), "add", group)
                ops.host_store(popxl.d2h_stream(t.shape, F32), t)
        t = ops.collectives.replicated_reduce_scatter(variable(9), "add")
        ops.host_store(popxl.d2h_stream(t.shape, F32), t)
    text = lowered_text(ir, "tpu", 4)
    found = re.findall(r"\}\) : \(tensor<(\w+)xf32>\) -> tensor<(\w+)xf32>", text)
    assert found == [
        *(("128x128", "32x128"), ("64x128", "32x128")),  # 1250 and 2500 numbers each
        *(("256x128", "64x128"), ("192x128", "96x128")),  # 5000 and 10000
        *(("256x128", "64x128"), ("256x128", "128x128")),  # 8192 and 16384
        ("4x3", "1x3"),
    ]
    assert text.count("stablehlo.reduce_scatter") == 7


# Remote buffers ------------------------------------------------------------------------------------------------------


def remote_program(replicas: int = 1) -> tuple[popxl.Ir, popxl.RemoteBuffer]:
    """A variable on the device, [3, 5]; and one that is remote, in a slot of two."""
    ir = popxl.Ir(replication=replicas)
    with ir.main_graph, popxl.in_sequence():
        buffer = popxl.remote_buffer((3, 5), F32, entries=2)
        popxl.remote_variable(np.ones((3, 5)), buffer, 1, F32, name="far")
        w = variable(3, 5)
        ops.scaled_add_(w, ops.remote_load(buffer, 1))
        ops.remote_store(buffer, 1, w)
    return ir, buffer


@pytest.mark.parametrize(("replicas", "devices"), [(1, 1), (2, 2), (2, 1)])
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_what_is_remote_is_on_the_host(platform, replicas, devices):
    """On accelerators: and nothing else is. Slots are whole blocks, and follow each other: a TPU would fetch all of
    them for another dimension, and cuts nothing out of a block."""
    ir, buffer = remote_program(replicas)
    text = lowered_text(ir, platform, devices)
    main = re.search(r"func.func public @main\((.*?)\) -> \((.*?)\) \{\n", text).group(1, 2)
    shape = {1: "2x1x8x128", 2: "4x1x8x128"}[replicas]
    for side in main:
        types = re.findall(r"tensor<(\w+)xf32>[^%]*?memory_kind = \"(\w+)\"", side.replace("tensor", "%tensor"))
        assert types == [("3x5" if replicas == 1 else "2x3x5", "device"), (shape, "pinned_host")]
    assert layout_for(ir, platform, devices).bytes_of_buffers() == {buffer: (120 * replicas // devices, True)}


def test_by_default_it_is_beside_other_arrays_on_cpus():
    ir, buffer = remote_program()
    assert layout_for(ir, "cpu").bytes_of_buffers() == {buffer: (120, False)}
    ir.options.remoteBuffers = "device"
    assert layout_for(ir, "tpu").bytes_of_buffers() == {buffer: (120, False)}


def test_tpus_move_no_numbers_of_64_bits(ir):
    """Their compiler would end the process."""
    with ir.main_graph:
        buffer = popxl.remote_buffer((3,), popxl.int64)
        popxl.remote_variable(np.ones(3), buffer, 0, popxl.int64, name="wide")
        ops.remote_store(buffer, 0, popxl.constant([1, 2, 3], popxl.int64))
    with pytest.raises(PopxlError, match=r"variables 'wide' in .*, test_elsewhere\.py:\d+\) has numbers of 64 bits"):
        layout_for(ir, "tpu")
    assert layout_for(ir, "cuda").bytes_of_buffers() == {buffer: (24, True)}
    ir.options.remoteBuffers = "device"
    assert layout_for(ir, "tpu").bytes_of_buffers() == {buffer: (24, False)}


@pytest.mark.parametrize(
    ("layout", "read", "written"),
    [
        ("(f32[3,5]{1,0:T(4,128)}, f32[2,3,5]{2,1,0:T(8,128)})->(f32[3,5]{1,0}, f32[2,3,5]{2,1,0})", 0, 0),
        ("(f32[3,5]{1,0}, f32[2,3,5]{2,1,0:S(5)})->(f32[3,5]{1,0}, f32[2,3,5]{2,1,0})", 1, 0),
        ("(f32[3,5]{1,0:S(5)}, f32[2,3,5]{2,1,0:S(5)})->(f32[3,5]{1,0}, f32[2,3,5]{2,1,0:S(5)})", 2, 1),
    ],
)
def test_what_xla_puts_elsewhere_is_named(layout, read, written):
    """It is read in what XLA has compiled; here, in what it might have."""
    ir, buffer = remote_program()
    wanted = (
        rf"variables 'far' in .*, test_elsewhere\.py:\d+\). Of 1 buffers, {read} are read from there and {written} "
    )
    with pytest.raises(PopxlError, match=wanted):
        check_places(f"HloModule x, entry_computation_layout={{{layout}}}, y=z\n", [None, buffer], ir.main_graph)


def test_what_xla_puts_where_it_belongs_is_fine():
    ir, buffer = remote_program()
    layout = (
        "(token[], f32[3,5]{1,0:T(4,128)}, f32[2,3,5]{2,1,0:S(5)})->(token[], f32[3,5]{1,0}, f32[2,3,5]{2,1,0:S(5)})"
    )
    check_places(f"HloModule x, entry_computation_layout={{{layout}}}\n", [None, buffer], ir.main_graph)
