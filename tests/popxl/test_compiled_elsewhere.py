"""What the compilers of TPUs and GPUs make of a program: exchanges, memories, units."""

from __future__ import annotations

import re

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from runtime.costs.hlo import parse_hlo
from tests.popxl.random_programs.elsewhere import check, program

pytestmark = pytest.mark.targets

F32 = popxl.float32
V5E, H100 = "tpu v5e:2x2", "gpu h100:4"


def hlo(ir: popxl.Ir, target: str) -> str:
    return str(popxl.Session(ir, target).program.executable.as_text())


def kept(*tensors: popxl.Tensor) -> None:
    for t in tensors:
        ops.host_store(popxl.d2h_stream(t.shape, t.dtype), t)


@pytest.mark.parametrize("target", [V5E, H100])
def test_a_reduce_scatter_is_one(target):
    """Of all replicas, and of groups; of 5000 numbers each, which are no whole rows of a TPU."""
    ir = popxl.Ir(replication=4)
    with ir.main_graph:
        x = popxl.variable(np.ones(20000), F32)
        for group in (None, ir.replica_grouping(group_size=2), ir.replica_grouping(stride=2)):
            kept(ops.collectives.replicated_reduce_scatter(x, "mean", group))
    text = hlo(ir, target)
    whole = [line for line in text.splitlines() if re.search(r" all-reduce(-start)?\(", line)]
    assert whole == [] and len(re.findall(r" reduce-scatter(?:-start)?\(", text)) >= 1


@pytest.mark.parametrize(
    ("first", "target"),
    [*((first, target) for first in (0, 5, 40) for target in (V5E, H100)), (5, "tpu v5e"), (5, "gpu h100")],
)
@pytest.mark.filterwarnings("ignore::popxl.errors.LostUpdateWarning")
def test_remote_buffers_are_on_the_host(first, target):
    """Of random programs: on one replica, on four, and on four that share a chip.

    `python -m tests.popxl.random_programs.elsewhere` checks as many as there is time for.
    """
    buffers, copied = check(program(range(first, first + 3)), target)
    assert buffers > 0 and copied == 0


@pytest.mark.parametrize("target", [V5E, H100])
def test_slots_of_all_sizes_are_moved_one_by_one(target):
    """From less than a row to more than a block; whole buffers stay where they are."""
    ir = popxl.Ir(replication=4)
    dtypes = (popxl.float32, popxl.float16, popxl.int8, popxl.bool, popxl.float8_143)
    with ir.main_graph, popxl.in_sequence():
        i = popxl.variable(np.uint32(0))
        for dtype in dtypes:
            for shape, entries in (((), 1), ((5,), 3), ((64, 16), 1), ((3, 50, 130), 2)):
                b, other = (popxl.remote_buffer(shape, dtype, entries) for _ in range(2))
                ops.remote_store(other, i, ops.remote_load(b, 0))
                ops.remote_store(b, 0, ops.remote_load(other, i))
    assert check(ir, target) == (2 * 4 * len(dtypes), 0)


@pytest.mark.parametrize("target", [V5E, H100])
@pytest.mark.parametrize("replicas", [1, 4])
def test_prints(replicas, target):
    """Beside a remote variable, too."""
    ir = popxl.Ir(replication=replicas)
    with ir.main_graph, popxl.in_sequence():
        _, t = popxl.variable(1.0), popxl.variable(np.ones((3, 5)), F32)
        buffer = popxl.remote_buffer((3, 5), F32)
        ops.remote_store(buffer, 0, ops.print_tensor(t + ops.remote_load(buffer, 0), "t"))
    assert re.search(r"is_host_transfer=true|xla_ffi_python_gpu_callback", hlo(ir, target))


@pytest.mark.parametrize("target", [V5E, "gpu h100"])
def test_prints_beside_offloading(target):
    """JAX cannot order prints in a program that copies to the host."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        x = popxl.variable(np.ones((3, 5)), F32)
        y = ops.offload(x + 1)
        kept(ops.print_tensor(x, "x") + ops.reload(y))
    assert re.search(r"is_host_transfer=true|xla_ffi_python_gpu_callback", hlo(ir, target))


def test_float8_is_decoded_before_it_is_convolved():
    """cuDNN has no kernels for these formats, and XLA gives it such operands all the same."""
    ir = popxl.Ir()
    with ir.main_graph:
        images, kernels = (
            ops.host_load(popxl.h2d_stream(shape, popxl.float8_143)) for shape in ((1, 2, 3, 4), (3, 2, 2, 2))
        )
        kept(ops.conv_pow2scaled(images, kernels, popxl.constant(0)))
    module = parse_hlo(hlo(ir, "gpu h100"))
    calls = [each for computation in module.computations.values() for each in computation.instructions.values()]
    convolved = [each for each in calls if "__cudnn$conv" in each.text]
    assert convolved and {shape.dtype for each in convolved for shapes in each.operand_shapes for shape in shapes} == {
        "f16"
    }


@pytest.mark.parametrize("target", [V5E, H100])
def test_a_program_that_takes_nothing(target):
    """Nothing, and what is on the host alone: nobody says on which devices that is."""
    ir = popxl.Ir(replication=4)
    with ir.main_graph:
        popxl.replica_sharded_variable(np.ones(5), F32)
    assert popxl.Session(ir, target).memory().arguments == 0
    with ir.main_graph, popxl.in_sequence():
        buffer = popxl.remote_buffer((3,), F32)
        ops.remote_store(buffer, 0, ops.remote_load(buffer, 0) + 1)
    assert popxl.Session(ir, target).report.buffers[0].memory == "host"


def test_floats_of_16_bits_are_multiplied_as_such():
    """By units of GPUs that take them: no operand is converted to float32 first."""
    ir = popxl.Ir()
    with ir.main_graph:
        x, w = popxl.variable(np.ones((64, 96)), popxl.float16), popxl.variable(np.ones((96, 128)), popxl.float16)
        images, kernels = (popxl.variable(np.ones(shape), popxl.float16) for shape in ((8, 16, 14, 14), (32, 16, 3, 3)))
        kept(x @ w, ops.conv(images, kernels))
    text = hlo(ir, "gpu h100")
    assert re.search(r"f16\[\S* .*custom-call\(.*custom_call_target=\"__cudnn", text)
    assert not re.search(r"= f32\[[\d,]+\]\{[\d,]+\} convert\(f?1?6?.*%(parameter|x|w|images|kernels)", text)
    assert "f32[64,96]" not in text and "f32[96,128]" not in text


def test_a_report_says_how_float32_is_multiplied():
    ir = popxl.Ir()
    with ir.main_graph:
        kept(popxl.variable(np.ones((3, 5)), F32) @ popxl.variable(np.ones((5, 7)), F32))
    told = (
        "at the precision 'highest': in six passes of bfloat16. `ir.options.precision = 'default'` would take one pass"
    )
    assert told in " ".join(str(popxl.Session(ir, "tpu v5e").report).split())
    ir.options.precision = "default"
    assert popxl.Session(ir, "tpu v5e").report.precision == (
        "Products of float32 are computed at the precision 'default': in one pass of bfloat16."
    )
    assert popxl.Session(ir).report.precision is None


def temporaries(ir: popxl.Ir) -> int:
    """The bytes that a v5e needs beside what it is given, with products as it likes them."""
    ir.options.precision = "default"
    return popxl.Session(ir, "tpu v5e").memory().temporaries


def drawn(*shape: int, dtype: popxl.dtype = F32, name: str | None = None) -> popxl.tensor.Variable:
    return popxl.variable(popxl.initial.normal(shape, std=0.02, seed=len(shape)), dtype, name)


def test_the_gradient_of_a_softmax_writes_no_row_down_for_each_of_its_elements():
    """Of attention in bfloat16: not even the scores are there in float32, once."""
    ir, rows, heads, channels = popxl.Ir(), 2048, 8, 128
    with ir.main_graph, popxl.in_sequence():
        qkv = drawn(rows, 3 * heads * channels, dtype=popxl.bfloat16)

        def attention(qkv: popxl.Tensor) -> popxl.Tensor:
            parts = (t.reshape((rows, heads, channels)) for t in ops.split(qkv, 3, axis=1))
            q, k, v = (t.transpose((1, 0, 2)) for t in parts)
            scores = ops.cast(q @ k.transpose((0, 2, 1)) * channels**-0.5, F32)
            mixed = ops.cast(ops.softmax(scores, axis=-1), qkv.dtype) @ v
            return mixed.transpose((1, 0, 2)).reshape((rows, heads * channels))

        graph = ir.create_graph(attention, qkv)
        grad = popxl.transforms.autodiff(graph)
        call = ops.call_with_info(graph, qkv)
        (g,) = ops.call(grad.graph, call.outputs[0], inputs_dict=grad.inputs_dict(call))
        ops.add_(qkv, g)
    assert temporaries(ir) < 4 * heads * rows * rows


def test_cross_entropy_writes_logits_down_once():
    ir, rows, classes = popxl.Ir(), 2048, 32768
    with ir.main_graph, popxl.in_sequence():
        x, w = drawn(rows, 64), drawn(64, classes)
        labels = ops.host_load(popxl.h2d_stream((rows,), popxl.int32, "labels"))
        loss, g = addons.ops.cross_entropy_with_grad(x @ w, labels)
        kept(loss)
        dw, dx = x.T @ g, g @ w.T
        ops.add_(w, dw)
        ops.add_(x, dx)
    assert temporaries(ir) < 1.5 * 4 * rows * classes


def test_a_buffer_lies_as_it_is_where_products_want_its_slots_transposed():
    """The whole buffer would be fetched, transposed and sent back, between one loop and the next."""
    ir, entries, rows, width = popxl.Ir(), 24, 1024, 1024
    with ir.main_graph, popxl.in_sequence():
        buffer, w = popxl.remote_buffer((rows, width), F32, entries), drawn(width, width, name="w")
        total = drawn(width, width, name="total")

        def changed(i: popxl.Tensor, w: popxl.Tensor) -> tuple[popxl.Tensor, popxl.Tensor]:
            ops.remote_store(buffer, i, ops.relu(ops.remote_load(buffer, i) @ w) @ w)
            return i + 1, w

        def summed(i: popxl.Tensor, w: popxl.Tensor, total: popxl.Tensor) -> tuple[popxl.Tensor, ...]:
            x = ops.remote_load(buffer, i)
            return i + 1, w, total + x.T @ ops.relu(x @ w)

        first = popxl.constant(0, popxl.uint32)
        ops.repeat(ir.create_graph(changed, first, w), entries, first, w)
        *_, after = ops.repeat(ir.create_graph(summed, first, w, total), entries, first, w, total)
        ops.var_updates.copy_var_update_(total, after)
    assert temporaries(ir) < 4 * entries * rows * width


@pytest.mark.parametrize(("shape", "most"), [((1024, 2816), 150_000), ((5025, 768), 400_000)], ids=["rows", "parts"])
def test_shards_are_gathered_as_rows_of_the_whole(shape, most):
    """A TPU would rearrange what it receives of others: 581 thousand cycles, and 779 thousand with parts of rows."""
    ir = popxl.Ir(replication=4)
    with ir.main_graph:
        _, shard = popxl.replica_sharded_variable(np.zeros(shape, np.float32), popxl.bfloat16)
        x = ops.host_load(popxl.h2d_stream((8, shape[0]), popxl.bfloat16))
        kept(x @ ops.collectives.replicated_all_gather(shard))
    assert popxl.Session(ir, V5E).cost().cycles < most
