"""Convolutions and pooling beyond their rows: against torch, ties, what can be built and not run, hints."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast
from unittest.mock import Mock

import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.errors import ApplicationRuntimeError, PopxlError
from popxl.ops.conv import (
    PadType,
    conv,
    conv_pow2scaled,
    conv_transpose,
    conv_transpose_pow2scaled,
    multi_conv_options,
)
from popxl.ops.kernels.convolutions import weights_gradient
from popxl.ops.pooling import average_pool, max_pool
from popxl.ops.windows import PAD_TYPES, windows_over
from popxl.transforms import autodiff
from runtime.cpu.kernel_overrides import OVERRIDES
from runtime.tpu import convolutions as of_tpus
from tests.popxl.evaluate import evaluate
from tests.popxl.ops.rows.schema import values
from tests.tolerances import assert_near, assert_sums_near

Array = np.ndarray
Case = dict[str, Any]


def with_gradients(calls: list[Call]) -> list[list[Array]]:
    """What ops make of arrays, and for gradients of that, gradients of the arrays. In one program."""

    def build() -> Iterator[popxl.Tensor]:
        ir = popxl.gcg().ir
        for call in calls:
            ts = [popxl.variable(a, downcast=False) for a in call.arrays]
            graph = ir.create_graph(lambda *ts: call.op(*ts, **call.arguments), *ts)  # noqa: B023  # called at once
            info = autodiff(graph)
            site = ops.call_with_info(graph, *ts)
            g = popxl.variable(call.g, downcast=False)
            yield from [*site.outputs, *ops.call(info.graph, g, inputs_dict=info.inputs_dict(site))]

    found = iter(evaluate(build))
    return [[next(found) for _ in range(1 + len(call.arrays))] for call in calls]


@dataclass(frozen=True)
class Call:
    """A call of an op, and a gradient of its result."""

    op: Callable[..., Any]
    g: Array
    arrays: list[Array]
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Alike:
    """A call of an op, and what torch calls it."""

    op: Callable[..., Any]
    arguments: dict[str, Any]
    torch: Callable[..., Any]
    arrays: list[Array]


def assert_like_torch(pairs: list[Alike]) -> None:
    """Results and gradients, for random gradients of the results."""
    torch = pytest.importorskip("torch")
    calls, expected = [], []
    for pair in pairs:
        tensors = [torch.from_numpy(a.astype(np.float64)).requires_grad_() for a in pair.arrays]
        sizes = [t.detach().abs().requires_grad_() for t in tensors]
        out, out_of_sizes = pair.torch(*tensors), pair.torch(*sizes)
        g = values("float32", tuple(out.shape), seed=9)
        out.backward(torch.from_numpy(g).double())
        out_of_sizes.backward(torch.from_numpy(abs(g)).double())
        calls.append(Call(pair.op, g, pair.arrays, pair.arguments))
        pairs_of = [(out, out_of_sizes), *((t.grad, s.grad) for t, s in zip(tensors, sizes, strict=True))]
        expected.append([[t.detach().numpy() for t in both] for both in pairs_of])
    for call, found, wish in zip(calls, with_gradients(calls), expected, strict=True):
        for a, (e, magnitudes) in zip(found, wish, strict=True):
            assert_sums_near(a, e, magnitudes, call.arguments)


def functional(name: str, n: int) -> Any:
    """The function of torch for so many spatial axes."""
    return getattr(pytest.importorskip("torch").nn.functional, f"{name}{n}d")


# Convolutions -------------------------------------------------------------------------------------------------------

SHAPES = {1: (2, 4, 11), 2: (2, 4, 9, 8), 3: (2, 4, 5, 6, 7)}
KERNELS = {1: (3,), 2: (3, 2), 3: (2, 3, 1)}
DIMENSIONS = pytest.mark.parametrize("n", [1, 2, 3])
GROUPS = pytest.mark.parametrize("groups", [1, 2, 4])

CONVS: dict[int, list[tuple[Any, ...]]] = {  # stride, padding, dilation
    1: [((), (), ()), ((2,), (1, 1), (1,)), ((3,), (0, 2), (2,)), ((1,), (-1, 4), ())],
    2: [((1, 1), (0, 0, 0, 0), (1, 1)), ((2, 2), (1, 1, 1, 1), (1, 1)), ((1, 3), (2, 0, 1, 3), (2, 3))],
    3: [((1, 1, 1), (0,) * 6, (1, 1, 1)), ((2, 1, 3), (1, 0, 2, 0, 1, 1), (1, 2, 3))],
}


def convolutions(n: int, groups: int) -> list[Alike]:
    """PyTorch pads alike on both sides; so its operand is padded before."""

    def of_torch(t: Any, weight: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> Any:
        sides = [side for axis in reversed(range(n)) for side in padding[axis::n]]
        t = pytest.importorskip("torch").nn.functional.pad(t, sides)
        return functional("conv", n)(t, weight, stride=stride or 1, dilation=dilation or 1, groups=groups)

    pairs = []
    for case in CONVS[n]:
        arguments = {**dict(zip(("stride", "padding", "dilation"), case, strict=True)), "groups": groups}
        arrays = [values("float32", SHAPES[n]), values("float32", (8, 4 // groups, *KERNELS[n]))]
        pairs.append(Alike(conv, arguments, functools.partial(of_torch, **arguments), arrays))
    return pairs


@pytest.mark.thorough(but_each=4)
@DIMENSIONS
@GROUPS
def test_conv_is_that_of_torch(n, groups) -> None:
    assert_like_torch(convolutions(n, groups))


@pytest.mark.here
@pytest.mark.parametrize("n", [2, 3])
def test_conv_in_the_form_of_tpus(n, monkeypatch) -> None:
    form = Mock(wraps=of_tpus.weights_gradient)
    monkeypatch.setitem(cast(dict[Any, Any], OVERRIDES), weights_gradient, form)
    assert_like_torch(convolutions(n, 1))
    assert form.called


@pytest.mark.thorough(but_each=3)
@pytest.mark.parametrize("n", [2, 1, 3])
@pytest.mark.filterwarnings("ignore:Using padding='same' with even")
def test_same_and_valid_are_those_of_torch(n) -> None:
    """For strides of 1; torch has one `same`, where the odd zero is at the end."""
    pairs = []
    for kernel, dilation in itertools.product([(2, 3, 4)[:n], (4, 3, 2)[:n]], (1, 2)):
        arrays = [values("float32", (2, 4, *(7, 8, 9)[:n])), values("float32", (3, 4, *kernel))]
        steps = {"stride": (1,) * n, "padding": (1,) * 2 * n, "dilation": (dilation,) * n}
        for pad_type, padding in (("same_upper", "same"), ("valid", "valid")):
            of_torch = functools.partial(functional("conv", n), padding=padding, dilation=dilation)
            pairs.append(Alike(conv, {**steps, "pad_type": pad_type}, of_torch, arrays))
    assert_like_torch(pairs)


TRANSPOSES: dict[int, list[tuple[Any, ...]]] = {  # stride, padding at either side, output padding
    1: [((1,), 0, ()), ((3,), 1, (2,)), ((2,), 2, (1,))],
    2: [((1, 1), 0, ()), ((2, 3), 1, (1, 2)), ((3, 2), 1, (0, 1))],
    3: [((1, 1, 1), 0, ()), ((2, 1, 3), 1, (1, 0, 2))],
}


@pytest.mark.thorough(but_each=16)
@DIMENSIONS
@GROUPS
def test_conv_transpose_is_that_of_torch(n, groups) -> None:
    """By padding, and by the shape that it leads to."""
    pairs = []
    for stride, padding, more in TRANSPOSES[n]:
        arrays = [values("float32", SHAPES[n]), values("float32", (4, 3, *(k + 2 for k in KERNELS[n])))]
        arguments = {"stride": stride, "output_padding": more, "groups": groups}
        of_torch = functools.partial(
            functional("conv_transpose", n),
            stride=stride,
            padding=padding,
            output_padding=more or 0,
            groups=groups,
        )
        pairs.append(Alike(conv_transpose, {**arguments, "padding": (padding,) * 2 * n}, of_torch, arrays))
        axes = zip(SHAPES[n][2:], KERNELS[n], stride, more or (0,) * n, strict=True)
        shape = tuple(s * (d - 1) + k + 2 + o - 2 * padding for d, k, s, o in axes)
        for given in (shape, (2, 3 * groups, *shape)):
            pairs.append(Alike(conv_transpose, {**arguments, "output_shape": given}, of_torch, arrays))
    assert_like_torch(pairs)


def test_conv_transpose_is_the_gradient_of_conv() -> None:
    """With uneven padding, too."""
    t, weight = values("float32", (2, 4, 7, 8)), values("float32", (6, 2, 3, 2))
    how: Case = {"stride": (2, 3), "padding": (2, 0, 1, 1), "groups": 2}
    (y,) = evaluate(lambda t, w: conv(t, w, **how), t, weight)
    g = values("float32", y.shape)
    ((_, dt, _),) = with_gradients([Call(conv, g, [t, weight], how)])
    (transposed,) = evaluate(lambda g, w: conv_transpose(g, w, **how, output_padding=(0, 0)), g, weight)
    cut = tuple(slice(0, min(a, b)) for a, b in zip(dt.shape, transposed.shape, strict=True))
    assert_near(transposed[cut], dt[cut], 1e-5)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_precision(dtype) -> None:
    """Of halves: rounded once, gradients too. Of doubles: in double precision."""
    t = np.random.default_rng(0).uniform(0, 1, (3, 40, 9, 8)).astype(dtype)
    weight = np.random.default_rng(1).uniform(0, 1, (5, 40, 3, 3)).astype(dtype)
    g = np.random.default_rng(2).uniform(0, 1, (3, 5, 7, 6)).astype(dtype)
    y = np.zeros(g.shape)
    dt, dw = np.zeros(t.shape), np.zeros(weight.shape)
    for i, j in itertools.product(range(3), range(3)):
        cut = (slice(None), slice(None), slice(i, i + 7), slice(j, j + 6))
        x, w = t[cut].astype(np.float64), weight[:, :, i, j].astype(np.float64)
        y += np.einsum("nchw,mc->nmhw", x, w)
        dt[cut] += np.einsum("nmhw,mc->nchw", g.astype(np.float64), w)
        dw[:, :, i, j] = np.einsum("nmhw,nchw->mc", g.astype(np.float64), x)

    (found,) = with_gradients([Call(conv, g, [t, weight], {})])
    for actual, exact in zip(found, (y, dt, dw), strict=True):
        assert actual.dtype == dtype
        # Nearly every half is the nearest one: what float32 loses before matters at midpoints only.
        steps = np.abs(actual - exact.astype(dtype)).astype(np.float64) / np.spacing(np.abs(exact).astype(dtype))
        assert dtype == "float64" or (steps.max() <= 1 and (steps > 0).mean() < 0.01)
        np.testing.assert_allclose(actual, exact, rtol=1e-3 if dtype == "float16" else 1e-12, atol=1e-12)


@pytest.mark.parametrize(("wanted", "kept"), [((0,), {"w"}), ((1,), {"t"}), ((0, 1), {"t", "w"})])
@pytest.mark.parametrize("op", [conv, conv_transpose])
def test_gradients_keep_the_other_operand(op, wanted, kept) -> None:
    with popxl.Ir().main_graph as main:
        t, w = popxl.variable(np.ones((1, 2, 4, 4))), popxl.variable(np.ones((2, 2, 3, 3)))
        graph = main.ir.create_graph(lambda t, w: op(t, w), t, w)
        info = autodiff(graph, grads_required=[graph.inputs[i] for i in wanted])
    read = {graph.inputs.index(c.fwd_tensor) for c in info.expected_inputs[1:]}
    assert {"tw"[i] for i in read} == kept


# Pooling ------------------------------------------------------------------------------------------------------------

POOLS: list[Case] = [
    {"kernel_size": (3,), "stride": (2,), "padding": (1, 1)},
    {"kernel_size": (2,), "stride": (3,), "ceil_mode": True},
    {"kernel_size": (3, 2), "stride": (2, 2), "padding": (1, 1, 1, 1)},
    {"kernel_size": (3, 4), "padding": (1, 2, 1, 2), "ceil_mode": True},
    {"kernel_size": (3, 3), "stride": (4, 2), "ceil_mode": True},
    {"kernel_size": (9, 8)},
    {"kernel_size": (2, 3, 2), "stride": (2, 1, 3), "padding": (1, 0, 1, 1, 0, 1)},
    {"kernel_size": (3, 3, 3), "stride": (2, 2, 2), "padding": (1,) * 6, "ceil_mode": True},
]


@pytest.mark.thorough(but_each=2)
@pytest.mark.parametrize(
    ("op", "name", "more"),
    [(max_pool, "max_pool", {}), (average_pool, "avg_pool", {"count_include_pad": False})],
    ids=["max", "average"],
)
def test_pooling_is_that_of_torch(op, name, more) -> None:
    """Where torch pads alike on both sides, and drops no window."""
    pairs = []
    for case in POOLS:
        n = len(case["kernel_size"])
        how = {"stride": (1,) * n, **case, "padding": case.get("padding", (0,) * n)[:n], **more}
        of_torch = functools.partial(functional(name, n), **how)
        pairs.append(Alike(op, case, of_torch, [values("float32", SHAPES[n])]))
    assert_like_torch(pairs)


TIES: list[tuple[int, tuple[int, int], str, bool]] = [  # stride, padding, auto_pad, ceil_mode
    *itertools.product((1, 2, 5), [(0, 0)], ("valid", "same_upper", "same_lower"), [False]),
    *itertools.product((1, 2, 3), [(0, 0), (1, 2), (4, 5)], ["not_set"], [False, True]),
]


@pytest.mark.thorough(but_each=5)
@pytest.mark.parametrize("kernel", [(2, 3), (1,), (4,), (2,), (3, 1, 2)], ids=str)
def test_ties_of_max_pool_receive_the_whole_gradient(kernel) -> None:
    """Many ties, against one window after the other."""
    n, calls, expected = len(kernel), [], []
    t = np.random.default_rng(0).integers(-1, 2, (2, 1, *SHAPES[n][2:])).astype(np.float32)
    for stride, padding, auto_pad, ceil_mode in TIES:
        how = {"stride": (stride,) * n, "padding": np.repeat(padding, n), "auto_pad": auto_pad, "ceil_mode": ceil_mode}
        windows = windows_over(t.shape[2:], kernel, how["stride"], how["padding"], auto_pad, ceil_mode)
        g = np.random.default_rng(1).integers(1, 9, (2, 1, *(w.count for w in windows))).astype(np.float32)
        out, gradient = np.zeros_like(g), np.zeros_like(t)
        for at in itertools.product(*(range(w.count) for w in windows)):
            starts = [i * w.stride - w.begin for i, w in zip(at, windows, strict=True)]
            cut = tuple(slice(max(s, 0), max(s + k, 0)) for s, k in zip(starts, kernel, strict=True))
            for image in range(2):
                window = t[(image, 0, *cut)]
                if window.size:
                    out[(image, 0, *at)] = window.max()
                    gradient[(image, 0, *cut)] += g[(image, 0, *at)] * (window == window.max())
        calls.append(Call(max_pool, g, [t], {"kernel_size": kernel, **how}))
        expected.append([out, gradient])
    for call, found, wish in zip(calls, with_gradients(calls), expected, strict=True):
        for a, e in zip(found, wish, strict=True):
            np.testing.assert_array_equal(a, e, err_msg=str(call.arguments))


def test_max_pool_twice_differentiated() -> None:
    """The gradient of the gradient op picks what it picked."""
    x, g, h = (values("float32", shape) for shape in ((1, 2, 6), (1, 2, 3), (1, 2, 6)))

    def build(x: popxl.Tensor, g: popxl.Tensor, h: popxl.Tensor) -> popxl.Tensor:
        ir = popxl.gcg().ir
        forward = autodiff(ir.create_graph(lambda x: max_pool(x, (2,), (2,)), x))
        back = autodiff(forward.graph, grads_required=forward.graph.inputs[:1])
        site = ops.call_with_info(forward.graph, g, x)
        return ops.call(back.graph, h, inputs_dict=back.inputs_dict(site))[0]

    (picked,) = evaluate(build, x, g, h)
    at = x.reshape(1, 2, 3, 2).argmax(-1)[..., None]
    np.testing.assert_array_equal(picked, np.take_along_axis(h.reshape(1, 2, 3, 2), at, -1)[..., 0])


def test_in_a_loop() -> None:
    """The same shape again and again, under one compiled body."""
    t, w = values("float32", (1, 2, 5, 4)), values("float32", (2, 2, 3, 3), -0.2, 0.2)

    def step(t: popxl.Tensor, w: popxl.Tensor) -> popxl.Tensor:
        return max_pool(conv(t, w, pad_type="same_upper"), (2, 2), auto_pad="same_lower")

    def build(t: popxl.Tensor, w: popxl.Tensor) -> list[popxl.Tensor]:
        graph = popxl.gcg().ir.create_graph(step, t, w)
        return [*ops.repeat(graph, 3, t, inputs_dict={graph.inputs[1]: w}), step(step(step(t, w), w), w)]

    looped, unrolled = evaluate(build, t, w)
    assert_near(looped, unrolled, 1e-5)


# What can be built, and not run -------------------------------------------------------------------------------------


def test_sizes_that_are_not_positive() -> None:
    """Shapes are arithmetic: a graph can say what makes no sense, and a program that runs it is told so."""
    with popxl.Ir().main_graph:
        dot = popxl.variable(np.ones((2, 3, 1, 1)))
        small = popxl.variable(np.ones((2, 3, 4, 4)))
        assert conv_transpose(dot, popxl.variable(np.ones((3, 4, 1, 1))), padding=(1, 1, 1, 1)).shape == (2, 4, -1, -1)
        assert conv(small, popxl.variable(np.ones((5, 3, 5, 6)))).shape == (2, 5, 0, -1)
        assert conv(small, popxl.variable(np.ones((5, 3, 7, 2))), pad_type="valid").shape == (2, 5, -2, 3)
    with pytest.raises(PopxlError, match=r"conv: the result would have the spatial sizes \(0, -1\); expected positive"):
        evaluate(lambda t, w: ops.sum(conv(t, w)), np.ones((2, 3, 4, 4)), np.ones((5, 3, 5, 6)))
    with pytest.raises(PopxlError, match=r"conv_transpose: .* spatial sizes \(-1, -1\)"):
        evaluate(
            lambda t, w: ops.sum(conv_transpose(t, w, padding=(1, 1, 1, 1))),
            np.ones((2, 3, 1, 1)),
            np.ones((3, 4, 1, 1)),
        )


def test_weights_of_another_rank() -> None:
    with popxl.Ir().main_graph:
        image = popxl.variable(np.ones((2, 3, 4, 4)))
        assert conv(image, popxl.variable(np.ones((5, 3, 2)))).shape == (2, 5, 3, 4)
        assert conv(image, popxl.variable(np.ones((5, 3, 2, 2, 2)))).shape == (2, 5, 3, 3)
    with pytest.raises(PopxlError, match="conv: `t` has rank 4 and `weight` has rank 3; expected the same"):
        evaluate(conv, np.ones((2, 3, 4, 4)), np.ones((5, 3, 2)))


def test_dtypes_are_not_looked_at() -> None:
    with popxl.Ir().main_graph:
        image, weight = popxl.variable(np.ones((1, 2, 4, 4), np.int32)), popxl.variable(np.ones((2, 2, 3, 3)))
        for make in (
            lambda: conv(image, weight),
            lambda: conv_transpose(image, weight),
            lambda: average_pool(image, (2, 2)),
            lambda: max_pool(image, (2, 2)),
        ):
            assert make().dtype is popxl.int32


@pytest.mark.parametrize("k", [-33, 32])
@pytest.mark.parametrize("op", [conv_pow2scaled, conv_transpose_pow2scaled])
def test_scales_out_of_range(op, k) -> None:
    """Found out by a run, unless nobody wants to know."""
    ir = popxl.Ir()
    with ir.main_graph:
        t, weight = (popxl.variable(np.ones((1, 1, 2, 2)), popxl.float8_143) for _ in range(2))
        ops.print_tensor(op(t, weight, popxl.constant(k)))
    with popxl.Session(ir, "ipu_model") as session, pytest.raises(ApplicationRuntimeError, match=r"\[-32, 32\)"):
        session.run()
    ir.options.throwIfLog2ScaleTensorNotInRange = False
    with popxl.Session(ir, "ipu_model") as session:
        session.run()


# Hints and padding --------------------------------------------------------------------------------------------------


def test_hints_are_attributes() -> None:
    """Those that are given."""
    with popxl.Ir().main_graph as main:
        t, w = popxl.variable(np.ones((1, 2, 4, 4))), popxl.variable(np.ones((2, 2, 3, 3)))
        conv(t, w, available_memory_proportions=[0.3], partials_types=["half"], enable_conv_dithering=[])
        plain, given = {"groups": 1, "pad_type": "not_set"}, main.ops[0].attributes
    assert given.items() >= plain.items()
    assert given["available_memory_proportions"] == (0.3,)
    assert given["partials_types"] == ("half",)
    assert "enable_conv_dithering" not in given


def test_multi_conv_options() -> None:
    """What is said for one convolution comes before what is said for all."""
    common = {"partials_types": ("half",), "available_memory_proportions": (0.1,)}
    assert multi_conv_options(common, {}, None, [], None) == common
    own = multi_conv_options(common, {"available_memory_proportions": (0.2,)}, None, ["float"], [1])
    assert own == {
        "partials_types": ("float",),
        "available_memory_proportions": (0.2,),
        "enable_conv_dithering": (1,),
    }
    with pytest.raises(TypeError, match="`available_memory_proportions` must be a list"):
        multi_conv_options({}, {}, 0.2, None, None)  # type: ignore[arg-type]


def test_pad_types() -> None:
    assert PAD_TYPES == PadType.__args__ == ("not_set", "same_upper", "same_lower", "valid")


@pytest.mark.parametrize("pad_type", PAD_TYPES)
def test_windows_lie_within_the_padding(pad_type) -> None:
    """Of all small sizes: the last window ends within the padding, and one more would not."""
    for size, reach, stride, begin, end, ceil in itertools.product(
        range(1, 8), range(1, 5), range(1, 5), range(3), range(3), (False, True)
    ):
        (w,) = windows_over([size], [reach], [stride], [begin, end], pad_type, ceil)
        spare = size + w.begin + w.end - ((w.count - 1) * stride + reach)
        assert spare == 0 if pad_type == "not_set" and ceil else 0 <= spare < stride
        starts = range(-w.begin, w.count * stride - w.begin, stride)
        assert w.valid_counts().tolist() == [sum(0 <= i < size for i in range(s, s + reach)) for s in starts]
