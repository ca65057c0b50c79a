"""Float8 on the device is float8 on the host, bit for bit; and what a scale has to be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.errors import ApplicationRuntimeError, PopxlError
from popxl.fp8_utils import host_pow2scale_cast_from_fp8, host_pow2scale_cast_to_fp8
from tests.popxl.evaluate import evaluate

pytestmark = pytest.mark.compiled_whole

F8 = pytest.mark.parametrize("f8", [popxl.float8_143, popxl.float8_152], ids=lambda dtype: dtype.name)
HALVES = np.arange(2**16, dtype=np.uint16).view(np.float16)


def around_ties(f8: popxl.dtype, k: int) -> Any:
    """Every float8 and the middle between two, with its neighbours in float32, divided by 2**k."""
    every = host_pow2scale_cast_from_fp8(np.arange(256, dtype=np.uint8).view(f8.as_numpy()), popxl.float32)
    every = np.unique(np.append(every[np.isfinite(every)], [256, -256, 65536, -65536])).astype(np.float32)
    places = np.concatenate([every, (every[1:] + every[:-1]) / 2]).astype(np.float32)
    up, down = (np.nextafter(places, np.float32(end)) for end in (np.inf, -np.inf))
    return np.ldexp(np.concatenate([places, up, down]), -k)


@pytest.mark.thorough(but_each=7)
@F8
@pytest.mark.parametrize("k", [-32, -13, -9, -1, 0, 1, 7, 15, 31])
def test_to_float8_as_on_the_host(f8, k) -> None:
    """All numbers of float16, and those of float32 where rounding is a close decision."""
    scale = np.array(k, np.int32)
    for source in (HALVES, around_ties(f8, k)):
        (found,) = evaluate(lambda t, s: ops.pow2scale_cast_to_fp8(t, s, f8), source, scale)
        expected = host_pow2scale_cast_to_fp8(source, f8, k, nan_on_overflow=True)
        assert found.dtype == f8.as_numpy()
        np.testing.assert_array_equal(found.view(np.uint8), expected.view(np.uint8))


@pytest.mark.thorough(but_each=4)
@F8
@pytest.mark.parametrize("to", [popxl.float16, popxl.float32], ids=lambda dtype: dtype.name)
def test_from_float8_as_on_the_host(f8, to) -> None:
    """All numbers, all scales."""
    every, scales = np.arange(256, dtype=np.uint8).view(f8.as_numpy()), range(-32, 32)
    found = evaluate(lambda t: [ops.pow2scale_cast_from_fp8(t, popxl.constant(k), to) for k in scales], every)
    for k, result in zip(scales, found, strict=True):
        np.testing.assert_array_equal(result, host_pow2scale_cast_from_fp8(every, to, k), err_msg=str(k))


@F8
def test_there_and_back(f8) -> None:
    """What float8 holds survives, with opposite scales that are computed in the program."""

    def build(t: Any, k: Any) -> Any:
        return ops.pow2scale_cast_to_fp8(ops.pow2scale_cast_from_fp8(t, k, popxl.float32), -k, f8)

    every = np.arange(256, dtype=np.uint8).view(f8.as_numpy())
    for k in (-31, 0, 5):
        (found,) = evaluate(build, every, np.array(k, np.int32))
        np.testing.assert_array_equal(found.view(np.uint8), every.view(np.uint8))


@F8
def test_masks_choose_elements(f8) -> None:
    data = host_pow2scale_cast_to_fp8(np.array([1, -2, 3, np.nan], np.float16), f8, 0)
    mask = np.array([True, True, False, True])
    (found,) = evaluate(lambda t: t[mask], data)
    np.testing.assert_array_equal(found.view(np.uint8), np.where(mask, data.view(np.uint8), 0))


def test_products_are_exact_where_float16_is() -> None:
    """All pairs of numbers of both formats, as products of columns and rows."""
    every = [np.arange(256, dtype=np.uint8).view(f8.as_numpy()) for f8 in (popxl.float8_143, popxl.float8_152)]
    a, b = (host_pow2scale_cast_from_fp8(e, popxl.float64).astype(np.float64) for e in every)
    (found,) = evaluate(
        lambda x, y: ops.matmul_pow2scaled(ops.reshape(x, (256, 1)), ops.reshape(y, (1, 256)), popxl.constant(-8)),
        *every,
    )
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(found, (np.outer(a, b) / 256).astype(np.float16))


def scaled_ops(t: Any, k: Any) -> Any:
    small = ops.pow2scale_cast_to_fp8(t, popxl.constant(0), popxl.float8_143)
    return [
        lambda: ops.pow2scale_cast_to_fp8(t, k, popxl.float8_152),
        lambda: ops.pow2scale_cast_from_fp8(small, k, popxl.float32),
        lambda: ops.matmul_pow2scaled(small, small, k),
    ]


@pytest.mark.thorough(but_each=7)
@pytest.mark.parametrize("which", range(3), ids=["to", "from", "matmul"])
@pytest.mark.parametrize("k", [-33, 32, -32, 31, 2**31 - 1, -(2**31)])
def test_scales_are_checked_by_run(which, k) -> None:
    """Also where the scale is a constant and the result is only printed; a second session reads the option again."""
    ir = popxl.Ir()
    with ir.main_graph:
        ops.print_tensor(scaled_ops(popxl.constant([1.0, 2.0]), popxl.constant(k))[which]())
    with popxl.Session(ir) as session:
        if -32 <= k < 32:
            session.run()
        else:
            with pytest.raises(ApplicationRuntimeError, match=r"`log2_scale` has to be in \[-32, 32\)"):
                session.run()
    ir.options.throwIfLog2ScaleTensorNotInRange = False
    with popxl.Session(ir) as session:
        session.run()


@pytest.mark.parametrize("which", range(3), ids=["to", "from", "matmul"])
def test_autodiff_refuses(which) -> None:
    with popxl.Ir().main_graph:
        t, k = popxl.variable([1.0, 2.0]), popxl.variable(1)
        graph = popxl.gcg().ir.create_graph(lambda t, k: scaled_ops(t, k)[which](), t, k)
        with pytest.raises(PopxlError, match="which has none"):
            popxl.transforms.autodiff(graph, grads_required=graph.inputs[:1])


def test_checks_in_order() -> None:
    """The dtype to convert to, the scale's shape, the scale's dtype; then whose tensors these are."""
    ir = popxl.Ir()
    with ir.create_empty_graph():
        vector, half = popxl.graph_input((2,), popxl.float16), popxl.graph_input((), popxl.float16)
        whole = popxl.graph_input((), popxl.int32)
        eight = popxl.graph_input((2,), popxl.float8_143)
    with ir.main_graph as main:
        for convert, good, wrong in (
            (ops.pow2scale_cast_to_fp8, popxl.float8_143, popxl.float16),
            (ops.pow2scale_cast_from_fp8, popxl.float16, popxl.float8_143),
        ):
            with pytest.raises(TypeError, match="`data_type`"):
                convert(vector, vector, wrong)
            with pytest.raises(ValueError, match="must be a scalar tensor"):
                convert(vector, vector, good)
            with pytest.raises(TypeError, match=r"must be of type popxl\.int32"):
                convert(vector, half, good)
            with pytest.raises(ValueError, match="is not in the main graph"):
                convert(vector, whole, good)
        with pytest.raises(TypeError, match="`rhs` must be float8"):
            ops.matmul_pow2scaled(eight, vector, vector)
        with pytest.raises(ValueError, match="must be a scalar tensor"):
            ops.matmul_pow2scaled(eight, eight, vector)
        with pytest.raises(ValueError, match="is not in the main graph"):
            ops.matmul_pow2scaled(eight, eight, whole)
        assert main.ops == []


def test_scales_may_be_elsewhere() -> None:
    """Only the operands of the product have to be in one place."""
    with popxl.Ir().main_graph:
        k, t = ops.identity(popxl.constant(0)), popxl.constant([1.0])
        with popxl.ipu(1):
            small = ops.pow2scale_cast_to_fp8(ops.identity(t), k, popxl.float8_143)
            ops.pow2scale_cast_from_fp8(small, k, popxl.float16)
            product = ops.matmul_pow2scaled(small, small, k)
        assert product.ipu == 1


@pytest.mark.parametrize("dtype", [popxl.float8_143, popxl.float8_152])
def test_every_byte_passes_through_loops(dtype: popxl.dtype) -> None:
    """By streams and by a remote buffer, of which XLA slices what the turn needs; and a scalar, which has one."""
    ir = popxl.Ir()
    ir.num_host_transfers = 16
    with ir.main_graph, popxl.in_sequence():
        source, sink = popxl.h2d_stream((16,), dtype), popxl.d2h_stream((16,), dtype)
        decoded = popxl.d2h_stream((16,), popxl.float32)
        slots, turn = popxl.remote_buffer((16,), dtype, 16), popxl.constant(0)

        def body(i: popxl.Tensor) -> popxl.Tensor:
            ops.remote_store(slots, i, ops.host_load(source))
            t = ops.remote_load(slots, i)
            ops.host_store(sink, t)
            ops.host_store(decoded, ops.pow2scale_cast_from_fp8(t, popxl.constant(0), popxl.float32))
            return i + 1

        ops.repeat(ir.create_graph(body, turn), 16, turn)
    every = np.arange(256, dtype=np.uint8).reshape(16, 16)
    with popxl.Session(ir) as session:
        outputs = session.run({source: every})
    np.testing.assert_array_equal(outputs[sink].view(np.uint8), every)
    np.testing.assert_array_equal(outputs[decoded], every.view(dtype.as_jax()).astype(np.float32))


def test_scalars_are_fed() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        source, sink = popxl.h2d_stream((), popxl.float8_143), popxl.d2h_stream((), popxl.float8_143)
        ops.host_store(sink, ops.host_load(source))
    with popxl.Session(ir) as session:
        for one in (popxl.utils.to_numpy(1.0, dtype=popxl.float8_143), np.array(0x40, np.uint8)):
            assert session.run({source: one})[sink].view(np.uint8) == 0x40
