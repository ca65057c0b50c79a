"""The memory that a program will need on a chip: what is foreseen, by hand, and beside what compilers say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import popxl
import popxl_addons as addons
from popxl import ops
from popxl.__main__ import main
from runtime.costs.foreseen import Foreseen, exact, foreseen, tiled
from runtime.costs.heap import Span, packed
from runtime.program.program import Described
from runtime.targets.devices import Device
from runtime.targets.offline import Target

ROWS, WIDTH = 24, 5
ONE = 4 * ROWS * WIDTH
"""The bytes of a matrix of float32."""


def needed(build: Callable[[popxl.Tensor], Any]) -> Foreseen:
    """What is foreseen of a program that loads a matrix, and stores what it makes of it."""
    ir = popxl.Ir()
    with ir.main_graph, popxl.in_sequence():
        y = build(ops.host_load(popxl.h2d_stream((ROWS, WIDTH), popxl.float32, "x")))
        if y is not None:
            ops.host_store(popxl.d2h_stream(y.shape, y.dtype, "y"), y)
    found = foreseen(Described(ir, Device("ipu_model", tuple(jax.devices("cpu")[:1]))).layout)
    assert found is not None
    return found


def square(name: str) -> popxl.Tensor:
    return popxl.variable(popxl.initial.zeros((WIDTH, WIDTH)), popxl.float32, name)


def test_what_is_computed_where_it_is_used_needs_no_room() -> None:
    found = needed(lambda x: ops.exp(ops.sin(x) + 1.0) * x)
    assert (found.arguments, found.needed, found.device) == (ONE, ONE, 2 * ONE)  # what comes out


def test_products_need_their_operands() -> None:
    """Of three products one after the other, two values are there at once, besides what comes out: the third."""
    found = needed(lambda x: ops.exp(ops.exp(ops.exp(x) @ square("a")) @ square("b")) @ square("c"))
    weights = 3 * 4 * WIDTH * WIDTH
    assert found.arguments == ONE + weights
    assert found.needed == 2 * ONE  # one of the two is where the third will be
    assert {name.split()[0] for name, _ in found.largest} == {f"float32[{ROWS},"}


def test_products_compute_what_is_computed_of_one_array() -> None:
    """It needs no room where that array is there, too; of two arrays it does."""

    def after(function: Callable[[popxl.Tensor, popxl.Tensor], popxl.Tensor]) -> int:
        def build(x: popxl.Tensor) -> popxl.Tensor:
            z = x @ square("a")
            return (function(z, x) @ square("b")) * z

        return needed(build).needed

    assert after(lambda z, x: z) == after(lambda z, x: ops.tanh(z * 2.0)) == after(lambda z, x: z * x) - ONE


def test_what_is_kept_for_a_backward_pass_stays() -> None:
    def twice(x: popxl.Tensor) -> popxl.Tensor:
        a = ops.exp(x @ square("a"))
        b = ops.exp(a @ square("b"))
        c = ops.exp(b @ square("c"))
        return (c @ square("d")) @ square("e") + a + b

    def once(x: popxl.Tensor) -> popxl.Tensor:
        a = ops.exp(x @ square("a"))
        b = ops.exp(a @ square("b"))
        c = ops.exp(b @ square("c"))
        return (c @ square("d")) @ square("e")

    assert needed(twice).needed - needed(once).needed == 2 * ONE


def test_variables_that_are_overwritten_stay_where_they_are() -> None:
    small = 4 * WIDTH * WIDTH

    def changed(x: popxl.Tensor) -> None:
        ops.add_(square("w"), ops.sin(square("v")))

    alone = needed(changed)
    assert (alone.arguments, alone.needed) == (2 * small, 0)  # nobody looks at what is loaded

    def read_later(x: popxl.Tensor) -> popxl.Tensor:
        w = square("w")
        before = w @ square("v")
        ops.add_(w, ops.sin(before @ before))
        return before

    found = needed(read_later)
    assert small < found.needed <= 2 * small  # what comes out, and a product


def test_loops_need_a_turn_once_and_their_stacks() -> None:
    def network(x: popxl.Tensor, w: popxl.Tensor, turns: int = 7) -> popxl.Tensor:
        layer = popxl.gcg().ir.create_graph(lambda x, w: (ops.sin(ops.exp(x @ w) @ w @ w), w), x, w)
        return ops.repeat(layer, turns, x, w)[0]

    few, many = (needed(lambda x, turns=turns: network(x, square("w"), turns)).needed for turns in (7, 70))
    turn = 2 * ONE
    assert ONE + turn <= few < ONE + turn + 100
    assert many - few < 63 * 8  # the numbers of the turns

    def trained(x: popxl.Tensor) -> None:
        w = square("w")
        graph = popxl.gcg().ir.create_graph(network, x, w)
        grad = popxl.transforms.autodiff(graph, grads_required=graph.inputs[1:])
        call = ops.call_with_info(graph, x, w)
        (gradient,) = ops.call(grad.graph, call.outputs[0], inputs_dict=grad.inputs_dict(call))
        ops.add_(w, gradient)

    found = needed(trained)
    stacks = [count for name, count in found.largest if name.startswith(f"float32[7, {ROWS}, {WIDTH}]")]
    assert set(stacks) == {7 * ONE} and len(stacks) >= 3  # what goes into each product
    assert sum(stacks) + turn < found.needed < sum(stacks) + 16 * ONE


def test_what_is_computed_twice_is_there_once() -> None:
    once = needed(lambda x: (ops.exp(x @ square("a")) @ square("b")) @ square("c"))

    def again(x: popxl.Tensor) -> popxl.Tensor:
        a, b = square("a"), square("b")
        return (ops.exp(x @ a) @ b + ops.exp(x @ a) @ b) @ square("c")

    assert needed(again).needed == once.needed


def test_what_is_read_in_no_order_with_its_change_is_copied() -> None:
    """Nothing that replaces `w` is computed of `y`, so nothing says that `y` comes first."""

    def apart(x: popxl.Tensor) -> popxl.Tensor:
        w = square("w")
        y = x @ w
        ops.add_(w, square("v"))
        return y

    def in_order(x: popxl.Tensor) -> popxl.Tensor:
        w = square("w")
        y = x @ w
        ops.add_(w, y.T @ y)
        return y

    assert [name for name, _ in needed(apart).largest] == [f"copy of float32[{WIDTH}, {WIDTH}]"]
    assert not any("copy" in name for name, _ in needed(in_order).largest)


def test_zeros_that_loops_begin_with_are_filled_in_at_once() -> None:
    """Each of three loops has its own, before the first begins; their sums are needed one after the other."""

    def program(loops: int) -> int:
        def build(x: popxl.Tensor) -> popxl.Tensor:
            turn = popxl.gcg().ir.create_graph(lambda total, x: (ops.sin(total @ x.T @ x), x), x, x)
            zeros = [ops.init((ROWS, WIDTH), popxl.float32) for _ in range(loops)]
            return sum((ops.sum(ops.repeat(turn, 4, t, x)[0]) for t in zeros), start=ops.sum(x))

        return needed(build).needed

    assert program(3) - program(1) == 2 * ONE


def test_a_collective_is_under_way_while_other_work_is_done() -> None:
    """What the gradient reads is held until the sum has begun, which is before the gradient is computed."""

    def program(replicas: int) -> int:
        ir = popxl.Ir(replication=replicas)
        with ir.main_graph, popxl.in_sequence():
            x = ops.host_load(popxl.h2d_stream((ROWS, WIDTH), popxl.float32, "x"))
            y = ops.exp(x @ square("a"))
            ops.add_(square("b"), y.T @ y)
            y = y @ square("c")
            y = ops.collectives.replicated_all_reduce(y) if replicas > 1 else y * 3.0
            y = ops.exp(y @ square("d")) @ square("e")
            ops.host_store(popxl.d2h_stream(y.shape, y.dtype, "y"), y)
        found = foreseen(Described(ir, Device("ipu_model", tuple(jax.devices("cpu")[:replicas]))).layout)
        assert found is not None
        return found.needed

    assert program(2) - program(1) == ONE


def test_what_a_convolution_gives_is_there_beside_what_is_computed_of_it() -> None:
    def network(x: popxl.Tensor, v: popxl.Tensor, w: popxl.Tensor) -> popxl.Tensor:
        return ops.conv(ops.relu(ops.conv(x, v)), w)

    def trained(x: popxl.Tensor) -> None:
        weights = [popxl.variable(popxl.initial.zeros((3, count, 1, 1)), popxl.float32, "w") for count in (2, 3)]
        images = x.reshape((ROWS * WIDTH // 8, 2, 2, 2))
        graph = popxl.gcg().ir.create_graph(network, images, *weights)
        grad = popxl.transforms.autodiff(graph, grads_required=graph.inputs[1:])
        call = ops.call_with_info(graph, images, *weights)
        gradients = ops.call(grad.graph, call.outputs[0], inputs_dict=grad.inputs_dict(call))
        for w, gradient in zip(weights, gradients, strict=True):
            ops.add_(w, gradient)

    large = [name.split("/")[-1].split()[0] for name, count in needed(trained).largest if count >= ONE]
    assert sorted(large) == ["Conv", "Conv", "Relu"]  # what both give, and what the second one is given


def test_room_in_tiles() -> None:
    """What XLA for a v5e says of these."""
    assert exact((5, 7, 3), 4) == 420
    shapes = [(1,), (100,), (200,), (600,), (1000,), (5000,)] + [(rows, 300) for rows in (1, 2, 3, 4, 5, 8, 9)]
    tiles = [128, 128, 256, 1024, 1024, 5120] + [rows * 384 for rows in (1, 2, 4, 4, 8, 8, 16)]
    assert [tiled(shape, 4) for shape in shapes] == [4 * size for size in tiles]
    halves = [256, 256, 256, 1024, 1024, 5120] + [rows * 384 for rows in (2, 2, 4, 4, 8, 8, 16)]
    assert [tiled(shape, 2) for shape in shapes] == [2 * size for size in halves]
    images = [(48, 16, 120, 120), (48, 64, 124, 124), (128, 32, 96, 96)]
    assert [tiled(shape, 4, (0, 1)) for shape in images] == [117_964_800, 377_880_576, 150_994_944]
    assert tiled((5, 7, 3), 4) == 4 * 5 * 4 * 128 and tiled((300, 1), 4) == 4 * 384 and tiled((0, 3), 4) == 0


def test_rows_are_overwritten_if_what_they_are_reduced_to_is_used_elsewhere() -> None:
    """A softmax is one kernel, which leaves its rows as they are. A loss has the largest logits and the sums, too."""

    def softmax(x: popxl.Tensor) -> popxl.Tensor:
        y = ops.softmax(x @ square("a"), axis=-1)
        return y.T @ y

    def learned(x: popxl.Tensor) -> popxl.Tensor:
        labels = popxl.constant([i % WIDTH for i in range(ROWS)], popxl.int32)
        loss, gradient = addons.cross_entropy_with_grad(x @ square("a"), labels)
        ops.host_store(popxl.d2h_stream(loss.shape, loss.dtype, "loss"), loss)
        return gradient.T @ gradient

    assert 2 * ONE <= needed(softmax).needed
    assert ONE < needed(learned).needed < 2 * ONE


# On a TPU -------------------------------------------------------------------------------------------------------------


def on_tpus(build: Callable[[popxl.Tensor], Any], shape: tuple[int, int], replicas: int = 1, **options: Any) -> int:
    """The bytes that are foreseen for a v5e, beside what is given, of a program that loads a matrix of bfloat16."""
    ir = popxl.Ir(replication=replicas)
    for name, value in options.items():
        setattr(ir.options, name, value)
    with ir.main_graph, popxl.in_sequence():
        y = build(ops.host_load(popxl.h2d_stream(shape, popxl.bfloat16, "x")))
        if y is not None:
            ops.host_store(popxl.d2h_stream(y.shape, y.dtype, "y"), y)
    device = Device("ipu_hw", Target("tpu v5e:2x2").devices[:replicas])
    found = foreseen(Described(ir, device).layout)
    assert found is not None
    return found.needed


def matrix(rows: int, columns: int, dtype: popxl.dtype = popxl.float32, name: str = "w") -> popxl.Tensor:
    return popxl.variable(popxl.initial.zeros((rows, columns)), dtype, name)


@pytest.mark.targets
def test_stacks_that_turns_round_are_kept_as_bfloat16() -> None:
    """What goes into each product of a turn, but not what the gradient of tanh reads."""
    rows, width = 24, 256

    def saved(turns: int) -> int:
        def network(x: popxl.Tensor, w: popxl.Tensor) -> popxl.Tensor:
            layer = popxl.gcg().ir.create_graph(lambda x, w: (ops.tanh(x @ w), w), x, w)
            return ops.repeat(layer, turns, x, w)[0]

        def trained(x: popxl.Tensor) -> None:
            w = matrix(width, width)
            x = ops.cast(x, w.dtype)
            graph = popxl.gcg().ir.create_graph(network, x, w)
            grad = popxl.transforms.autodiff(graph, grads_required=graph.inputs[1:])
            call = ops.call_with_info(graph, x, w)
            (gradient,) = ops.call(grad.graph, call.outputs[0], inputs_dict=grad.inputs_dict(call))
            ops.add_(w, gradient)

        exact_, rounded = (on_tpus(trained, (rows, width), precision=each) for each in ("highest", "default"))
        return exact_ - rounded

    assert saved(turns=14) - saved(turns=7) == 7 * (rows + width) * width * 4 // 2


@pytest.mark.targets
def test_images_are_tiled_along_themselves_and_their_channels() -> None:
    images, channels, size = 16, 24, 32

    def program(x: popxl.Tensor) -> popxl.Tensor:
        def kernel(count: int, name: str) -> popxl.Tensor:
            return popxl.variable(popxl.initial.zeros((channels, count, 3, 3)), popxl.float32, name)

        x = ops.cast(x, popxl.float32).reshape((images, 2, size, size))
        y = ops.relu(ops.conv(x, kernel(2, "v"), padding=(1, 1, 1, 1)))
        return ops.sum(ops.sin(ops.conv(y, kernel(channels, "w"), padding=(1, 1, 1, 1))) * y)

    between = 4 * images * 128 * size * size
    assert 1.9 * between < on_tpus(program, (images * 2, size * size)) < 2.2 * between  # what both give


@pytest.mark.targets
def test_what_collectives_give_is_kept_as_it_is_rounded() -> None:
    """They sum bfloat16 in float32."""
    rows, width = 64, 1024

    def program(count: int) -> int:
        def build(x: popxl.Tensor) -> popxl.Tensor:
            w = matrix(width, 128, popxl.bfloat16)
            parts = [ops.collectives.replicated_all_reduce(ops.exp(x * (i + 0.5))) for i in range(count)]
            all_known = sum((ops.max(part) for part in parts[1:]), start=ops.max(parts[0]))
            results = [(part * all_known) @ w for part in parts]
            return sum(results[1:], start=results[0])

        return on_tpus(build, (rows, width), replicas=4)

    part, result = 2 * rows * width, 2 * rows * 128
    assert 2 * part <= program(4) - program(2) < 2 * part + 4 * result


@pytest.mark.targets
def test_sums_of_replicas_lie_where_their_parts_lay() -> None:
    rows, width = 64, 1024

    def build(x: popxl.Tensor) -> popxl.Tensor:
        part = ops.cast(x, popxl.float32) @ matrix(width, width)
        return ops.sum(ops.collectives.replicated_all_reduce(part))

    assert 4 * rows * width <= on_tpus(build, (rows, width), replicas=4) < 5 * rows * width


@pytest.mark.targets
def test_what_is_computed_of_far_more_is_written_down_for_several() -> None:
    rows, width = 64, 1024
    one = 4 * rows * width

    def program(count: int) -> int:
        def build(x: popxl.Tensor) -> popxl.Tensor:
            x = ops.cast(x, popxl.float32)
            parts = [ops.collectives.replicated_all_reduce(ops.exp(x * (i + 0.5))) for i in range(count)]
            total = sum(parts[1:], start=parts[0])
            a = ops.exp(ops.max(total) + total) @ matrix(width, width)
            b = ops.exp(ops.max(a) + a + total) @ matrix(width, width)
            c = ops.exp(ops.max(b) + a + b + total) @ matrix(width, width)
            return ops.exp(ops.max(c) + a + b + c + total) @ matrix(width, width)

        return on_tpus(build, (rows, width), replicas=4)

    assert program(4) < 7 * one  # or all parts would be there to the end, three results, and what comes out


@pytest.mark.targets
@pytest.mark.parametrize(("products", "values"), [(2, 1.5), (3, 2.0)])
def test_sums_are_part_of_products_and_products_are_written_rounded(products: int, values: float) -> None:
    """XLA's compiler says as much, of matrices that do not fit on the chip: what comes out, in float32, and before that
    one or two in bfloat16, which do not lie in its place."""
    rows, width = 1024, 512

    def build(x: popxl.Tensor) -> popxl.Tensor:
        x, total = ops.cast(x, popxl.float32), popxl.constant(0.0)
        for i in range(products):
            x = x @ matrix(width, width, name=f"w{i}")
            total += ops.sum(x * x)
        ops.host_store(popxl.d2h_stream((), popxl.float32, "total"), total)
        return x

    assert on_tpus(build, (rows, width), precision="default") == pytest.approx(values * 4 * rows * width, rel=0.02)


@pytest.mark.targets
def test_products_choose_by_what_is_kept_for_that() -> None:
    """The gradient of a mean is a number for each channel, and zero elsewhere: a byte for each element says where."""
    images, channels, size = 16, 24, 32

    def network(x: popxl.Tensor, *weights: popxl.Tensor) -> popxl.Tensor:
        for w in weights:
            x = ops.relu(ops.conv(x, w, padding=(1, 1, 1, 1)))
        return ops.mean(x, (2, 3))

    def trained(x: popxl.Tensor) -> None:
        x = ops.cast(x, popxl.float32).reshape((images, 2, size, size))
        shapes = (("v", (channels, 2, 3, 3)), ("w", (channels, channels, 3, 3)))
        weights = [popxl.variable(popxl.initial.zeros(shape), popxl.float32, name) for name, shape in shapes]
        graph = popxl.gcg().ir.create_graph(network, x, *weights)
        grad = popxl.transforms.autodiff(graph, grads_required=graph.inputs[1:])
        call = ops.call_with_info(graph, x, *weights)
        for w, g in zip(
            weights, ops.call(grad.graph, call.outputs[0], inputs_dict=grad.inputs_dict(call)), strict=True
        ):
            ops.scaled_add_(w, g, b=-0.01)

    both = 2 * 4 * images * 128 * size * size  # what the convolutions give
    needed = on_tpus(trained, (images * 2, size * size), precision="default")
    assert both * 1.125 <= needed < both * 1.2  # and a byte for each element of the second


@pytest.mark.targets
def test_numbers_are_filled_in_when_a_loop_begins() -> None:
    def program(loops: int) -> int:
        def build(x: popxl.Tensor) -> popxl.Tensor:
            turn = popxl.gcg().ir.create_graph(lambda total, x: (ops.sin(total @ x.T @ x), x), x, x)
            zeros = [ops.init((64, 256), popxl.bfloat16) for _ in range(loops)]
            return sum((ops.sum(ops.repeat(turn, 4, t, x)[0]) for t in zeros), start=ops.sum(x))

        return on_tpus(build, (64, 256))

    assert program(3) - program(1) < 2 * 64 * 256


def test_what_is_there_leaves_gaps() -> None:
    """The largest for the longest is placed first: 3, then 2 above it, which leave no gap of 4 below."""
    assert packed([]) == 0
    assert packed([Span(0, 9, 2), Span(0, 1, 4), Span(2, 9, 3)]) == 3 + 2 + 4
    assert packed([Span(0, 9, 2), Span(0, 1, 3), Span(2, 9, 3)]) == 3 + 2


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 50)), max_size=12))
def test_gaps_are_at_most_what_is_there(times: list[tuple[int, int, int]]) -> None:
    spans = [Span(min(a, b), max(a, b), bytes) for a, b, bytes in times]
    most = max((sum(s.bytes for s in spans if s.first <= time <= s.last) for time in range(10)), default=0)
    assert most <= packed(spans) <= sum(span.bytes for span in spans)


PROGRAM = """
import popxl
from popxl import ops

rows = popxl.choice("rows", [2**33, 16])
ir = popxl.Ir()
with ir.main_graph:
    x = popxl.variable(popxl.initial.zeros((rows, 3)), popxl.float32, "x")
    ops.host_store(popxl.d2h_stream((rows, 3), popxl.float32, "y"), ops.exp(x))
with popxl.Session(ir, "ipu_hw") as session:
    session.run({})
    raise AssertionError("nothing is run")
"""


def test_the_command_needs_a_target(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "program.py").write_text("")
    assert main(["foresee", str(tmp_path / "program.py")]) == 2
    assert "popxl: foresee: `--target` is missing" in capsys.readouterr().err


@pytest.mark.targets
def test_the_command(tmp_path: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """And `popxl fit` compiles nothing that needs far more than there is."""
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    assert main(["foresee", str(file), "--target", "gpu h100"]) == 0
    told = capsys.readouterr().out
    assert "in all                       206 GB" in told and "By this estimate it does not fit" in told
    monkeypatch.setenv("POPXL_CHOICES", "rows=16")
    assert main(["foresee", str(file), "--target", "gpu h100"]) == 0
    assert "By this estimate it fits" in capsys.readouterr().out
    monkeypatch.delenv("POPXL_CHOICES")
    assert main(["fit", str(file), "--target", "gpu h100"]) == 0
    told = capsys.readouterr().out
    assert "rows=8589934592: The program does not fit: a chip has 84.9 GB, and 206 GB are foreseen" in told
