"""`session.cost()` and `session.hlo()`: what is read off a compiled program, beside what XLA says of it."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import popxl
from popxl import ops
from runtime.costs.graph_costs import graphs_of
from runtime.costs.hlo import Shape, parse_hlo, shapes
from runtime.costs.network import Wires
from runtime.costs.precision import capped, precisions_of
from runtime.costs.program_cost import host_copies
from runtime.costs.work import Account, Product, account_of
from runtime.targets.chip import Gpu, Tpu, of_device, shipped

pytestmark = pytest.mark.compiled_whole  # what XLA makes of programs is what is tested


def analysed(function: Any, *arguments: Any, **options: Any) -> tuple[Any, dict[str, float]]:
    """What is read off the text of a compiled function, and what XLA says of it."""
    compiled = jax.jit(function, **options).lower(*arguments).compile()
    return account_of(parse_hlo(compiled.as_text())), compiled.cost_analysis()


@pytest.mark.here
def test_operations_and_bytes_are_those_that_xla_counts() -> None:
    def function(x: Any, w: Any, kernel: Any, image: Any, i: Any) -> Any:
        y = jnp.tanh(x @ w)
        convolved = jax.lax.conv_general_dilated(
            image, kernel, (2, 1), ((1, 1), (0, 2)), lhs_dilation=(1, 2), rhs_dilation=(2, 1)
        )
        updated = jax.lax.dynamic_update_slice(x, y[:3, :5] * 2, (i, 0))
        cut = jax.lax.dynamic_slice(w, (i, i), (2, 3))
        return y.sum(0) + 1, convolved.max() * 2, updated, jnp.exp(cut)

    shaped = [jnp.ones(shape) for shape in ((64, 32), (32, 48), (8, 4, 3, 3), (2, 4, 12, 10))]
    account, said = analysed(function, *shaped, 3, donate_argnums=0)
    total = account.total
    products = 2 * 64 * 32 * 48
    assert total.products[Product("float32", "default")] > products
    assert total.flops == pytest.approx(said["flops"] + said["transcendentals"], rel=0.01)
    assert total.bytes == pytest.approx(said["bytes accessed"], rel=0.01)


def test_what_is_reduced_counts_by_what_is_done_to_each_element() -> None:
    """The index of the largest takes more than a sum; sums that are scattered take as many as there are updates."""

    def function(x: Any, places: Any) -> Any:
        windows = jax.lax.reduce_window(x, 0.0, lambda a, b: a * 2 + b, (1, 4), (1, 4), "VALID")
        return windows, x.at[places].add(x[:3])

    x = jnp.arange(5 * 12, dtype=jnp.float32).reshape(5, 12)
    account, said = analysed(function, x, jnp.asarray([4, 0, 1]))
    windows, scattered = 5 * 3 * 4 * 2, 3 * 12
    assert windows + scattered <= account.total.elementwise <= 1.3 * (windows + scattered)
    assert account.total.elementwise == pytest.approx(said["flops"], rel=0.3)


def test_calls_of_libraries_are_read() -> None:
    """Their precision stands in their settings, and what they work in is not read and written as a whole."""
    settings = (
        'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]},'
        '"precision_config":{"operand_precision":["HIGHEST","HIGHEST"],"algorithm":"ALG_UNSET"}}}'
    )
    text = f"""HloModule step

ENTRY %main (a: f32[4,32,192], b: f32[4,32,64]) -> f32[4,192,64] {{
  %a = f32[4,32,192]{{2,1,0}} parameter(0)
  %b = f32[4,32,64]{{2,1,0}} parameter(1)
  %c = (f32[4,192,64]{{2,1,0}}, s8[4096]{{0}}) custom-call(%a, %b), custom_call_target="__cublas$lt$matmul", {settings}
  ROOT %out = f32[4,192,64]{{2,1,0}} get-tuple-element(%c), index=0
}}
"""
    total = account_of(parse_hlo(text)).total
    assert total.products == {Product("float32", "highest"): 2 * 4 * 192 * 64 * 32}
    assert total.bytes == 4 * 4 * (32 * 192 + 32 * 64 + 192 * 64)


def test_attention_of_a_library_is_read() -> None:
    """Its two and five products, of the pairs that a mask leaves, and what it works in."""
    scores = '"intermediate_tensor_shape":{"element_type":"BF16","dimensions":["2","4","6","6"]}'
    settings = f'backend_config={{"cudnn_fmha_backend_config":{{{scores},"mask_type": "CAUSAL"}}}}'
    q, k, logs = "bf16[2,6,4,32]{3,2,1,0}", "bf16[2,6,2,32]{3,2,1,0}", "f32[2,4,6]{2,1,0}"
    text = f"""HloModule step

ENTRY %main (q: bf16[2,6,4,32], k: bf16[2,6,2,32]) -> bf16[2,6,4,32] {{
  %q = {q} parameter(0)
  %k = {k} parameter(1)
  %f = ({q}, {logs}, u8[64]{{0}}) custom-call(%q, %k, %k), custom_call_target="__cudnn$fmhaSoftmax", {settings}
  %out = {q} get-tuple-element(%f), index=0
  %logs = {logs} get-tuple-element(%f), index=1
  %b = ({q}, {k}, {k}, u8[64]{{0}}) custom-call(%q, %k, %k, %logs, %out, %q), \
custom_call_target="__cudnn$fmhaSoftmaxBackward", {settings}
  ROOT %dq = {q} get-tuple-element(%b), index=0
}}
"""
    total = account_of(parse_hlo(text)).total
    pairs, of_q, of_k, of_logs = 6 * 7 // 2, 2 * 2 * 4 * 6 * 32, 2 * 2 * 2 * 6 * 32, 4 * 2 * 4 * 6
    assert total.products == {Product("bfloat16", "default"): (2 + 5) * 2 * 2 * 4 * pairs * 32}
    assert total.bytes == (2 * of_q + 2 * of_k + of_logs) + (4 * of_q + 4 * of_k + of_logs)
    without = account_of(parse_hlo(text.replace(scores, '"fmha_scale":1'))).total
    assert without.products == {} and without.bytes == total.bytes


def test_loops_count_as_often_as_they_turn() -> None:
    def function(x: Any, w: Any) -> Any:
        return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=7)[0]

    account, _ = analysed(function, jnp.ones((4, 6)), jnp.ones((6, 6)))
    assert account.total.products == {Product("float32", "default"): 7 * 2 * 4 * 6 * 6}


def test_a_number_by_itself_is_no_kernel() -> None:
    """A TPU computes it on its scalar unit, on the way."""
    text = """HloModule step

ENTRY %main (count: f32[], x: f32[8]) -> f32[8] {
  %count = f32[] parameter(0)
  %x = f32[8]{0} parameter(1)
  %next = f32[]{:S(6)} add(%count, %count)
  ROOT %result = f32[8]{0} dynamic-update-slice(%x, %x, %next)
}
"""
    assert account_of(parse_hlo(text)).total.kernels == 1


def test_copies_to_the_host_run_beside_kernels_or_alone() -> None:
    """Three turns copy out while a sine is computed, and back with a number between. Two kernels copy, too."""
    text = """HloModule step, is_scheduled=true

%body (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %out = (f32[8]{0:S(5)}, f32[8]{0}, u32[]) copy-start(%x)
  %sine.1 = f32[8]{0} sine(%x)
  %there = f32[8]{0:S(5)} copy-done(%out)
  %count = s32[]{:S(6)} constant(1)
  %in = (f32[8]{0}, f32[8]{0:S(5)}, u32[]) copy-start(%there)
  %next = s32[]{:S(6)} add(%count, %count)
  %here = f32[8]{0} copy-done(%in)
  ROOT %add.1 = f32[8]{0} add(%here, %sine.1)
}

%condition (x: f32[8]) -> pred[] {
  %x = f32[8]{0} parameter(0)
  ROOT %less = pred[] constant(true)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %while.1 = f32[8]{0} while(%x), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %copy.1 = f32[8]{0:S(5)} copy(%while.1)
  ROOT %copy.2 = f32[8]{0} copy(%copy.1)
}
"""
    assert host_copies(parse_hlo(text)) == (3, 3 + 2)


def test_rows_of_a_stack_in_host_memory() -> None:
    """Only the row crosses, in a fusion that GPUs begin early."""
    text = """HloModule step, is_scheduled=true

%write (stack: f32[5,8], row: f32[1,8], i: s32[]) -> f32[5,8] {
  %stack = f32[5,8]{1,0:S(5)} parameter(0)
  %row = f32[1,8]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %written = f32[5,8]{1,0:S(5)} dynamic-update-slice(%stack, %row, %i, %zero)
}

%read (stack: f32[5,8], i: s32[]) -> f32[1,8] {
  %stack = f32[5,8]{1,0:S(5)} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %row = f32[1,8]{1,0} dynamic-slice(%stack, %i, %zero), dynamic_slice_sizes={1,8}
}

ENTRY %main (stack: f32[5,8], row: f32[1,8], i: s32[]) -> f32[1,8] {
  %stack = f32[5,8]{1,0:S(5)} parameter(0)
  %row = f32[1,8]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %out = ((f32[5,8]{1,0:S(5)}, f32[1,8]{1,0}, s32[]), f32[5,8]{1,0:S(5)}, u32[]) \
fusion-start(%stack, %row, %i), kind=kCustom, calls=%write
  %there = f32[5,8]{1,0:S(5)} fusion-done(%out)
  %in = ((f32[5,8]{1,0:S(5)}, s32[]), f32[1,8]{1,0}, u32[]) fusion-start(%there, %i), kind=kCustom, calls=%read
  ROOT %here = f32[1,8]{1,0} fusion-done(%in)
}
"""
    total = account_of(parse_hlo(text)).total
    row, number = 4 * 8, 4
    assert (total.host_bytes, total.memory_bytes) == (2 * row, 2 * row + 2 * number)


def test_types_are_read() -> None:
    text = "(f32[1,256]{1,0:T(8,128)S(5)}, (pred[], /*index=1*/s4[3]{0}), bf16[2,3]{1,0}, u32[]{:S(2)}, token[])"
    found = list(shapes(text))
    assert found[0] == Shape("f32", (1, 256), 5)
    assert [shape.memory for shape in found] == [5, 0, 0, 0, 2, 0]
    assert [shape.bytes for shape in found] == [1024, 1, 2, 12, 4, 0]


# Sessions ------------------------------------------------------------------------------------------------------------


def network(ir: popxl.Ir) -> int:
    """A called layer, seven turns of it, and an all-reduce. Returns the line of that."""
    with ir.main_graph, popxl.in_sequence():
        x = popxl.variable(np.ones((4, 6)), popxl.float32, "x")
        w = popxl.variable(np.ones((6, 6)), popxl.float32, "w")
        layer = ir.create_graph(lambda x, w: ops.tanh(x @ w), x, w)
        (y,) = ops.repeat(layer, 7, x, w)
        line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
        y = ops.collectives.replicated_all_reduce(y) if ir.replication_factor > 1 else y
        ops.var_updates.copy_var_update_(x, y)
        ops.host_store(popxl.d2h_stream((4, 6), popxl.float32, "y"), y)
    return line


@pytest.mark.here
def test_fusions_read_what_their_slices_need() -> None:
    """Elements that a later slice leaves out are neither computed nor read, whatever comes before it."""
    ir = popxl.Ir()
    with ir.main_graph:
        x, y = (popxl.variable(np.ones((64, 32)), popxl.float32, name) for name in "xy")
        row = ops.slice_(ops.exp(x) * y + 1.0, start=[3], stop=[4])
        ops.host_store(popxl.d2h_stream(row.shape, row.dtype), row)
    cost = popxl.Session(ir).cost()
    assert (cost.kernels, cost.bytes_accessed) == (1, 3 * 4 * 32)


@pytest.mark.here
@pytest.mark.parametrize("calls", ["inlined", "dispatched"])
def test_a_session_has_its_cost(calls: Any) -> None:
    ir = popxl.Ir(replication=2)
    ir.options.calledGraphs = calls
    line = network(ir)
    session = popxl.Session(ir, "ipu_model")
    cost = session.cost()
    assert 7 * 2 * 4 * 6 * 6 + 7 * 4 * 6 <= cost.flops < 1.3 * (7 * 2 * 4 * 6 * 6 + 7 * 4 * 6)
    assert cost.argument_bytes == 4 * (4 * 6 + 6 * 6)
    assert cost.alias_bytes == 4 * 4 * 6
    assert (cost.code_bytes, cost.cycles, cost.seconds) == (None, None, None)
    assert cost.kernels >= 7 and cost.bytes_accessed > 7 * 4 * (4 * 6 + 6 * 6)
    assert cost.collectives["all-reduce"].model_dump() == {"count": 1, "bytes": 4 * 4 * 6}
    (use,) = cost.uses
    assert (use.source, use.replicas, use.graph) == (f"test_cost.py:{line}", 2, "")
    layer = max(cost.graphs, key=lambda graph: graph.flops)
    assert layer.name == ir.main_graph.called_graphs[0].called_graphs[0].name
    assert "all-reduce   test_cost.py:" in str(cost)
    assert type(cost).model_validate_json(cost.model_dump_json()) == cost
    texts = session.hlo()
    assert (list(texts) == ["the program"]) == (calls == "inlined")
    assert all(text.startswith("HloModule") for text in texts.values())


def test_rates_are_of_the_precision_that_is_asked_for() -> None:
    tpu, gpu = shipped(Tpu, "v5e"), shipped(Gpu, "h100")
    assert tpu.rate("float32", "highest") == tpu.rate("bfloat16") / 6 == tpu.rate("float32", "high") / 2
    assert gpu.rate("float32", "highest") == 67e12 and gpu.rate("float32") == 494.5e12
    assert of_device("TPU v5 lite") is tpu and of_device("abacus") is None


def of_precision(account: Any, chip: Any) -> Any:
    wires = Wires(chip, [(0, 0, 0)])

    def seconds(level: str) -> float:
        work = {name: capped(level, each) for name, each in account.graphs.items()}
        return sum(graph.seconds or 0 for graph in graphs_of(Account(work), {}, 1, wires))

    return precisions_of(account.total, chip, seconds)


def test_what_precision_costs() -> None:
    """The passes of products. A run that the memory bounds is no quicker for fewer of them."""

    def function(x: Any, w: Any, v: Any) -> Any:
        return jnp.dot(x, w, precision="highest").sum(), jnp.dot(x, v, precision="default").sum()

    size, flops = (512, 512), 2 * 512**3
    account, _ = analysed(function, *(jnp.ones(size),) * 3)
    assert account.total.products == {Product("float32", level): flops for level in ("highest", "default")}
    tpu = shipped(Tpu, "v5e")
    found = of_precision(account, tpu)
    once = flops / tpu.rate("bfloat16")
    assert {level: each.products / once for level, each in found.items()} == pytest.approx(
        {"highest": 7, "high": 4, "default": 2}
    )
    assert found["high"].cycles == round(4 * once * tpu.clock)
    memory = account.total.memory_bytes / tpu.memory_bandwidth
    assert [each.seconds for each in found.values()] == pytest.approx([max(n * once, memory) for n in (7, 4, 2)])
    assert found["default"].seconds == memory > 2 * once
    on_gpu = of_precision(account, shipped(Gpu, "h100"))
    assert on_gpu["highest"].cycles is None and on_gpu["high"] == on_gpu["default"]
    assert of_precision(account_of(parse_hlo("HloModule empty\n\nENTRY %main () -> f32[] {\n}\n")), tpu) == {}


@pytest.mark.targets
@pytest.mark.parametrize(("description", "name"), [("tpu v5e:1x2", "TPU v5e"), ("gpu h100:2", "NVIDIA H100 80GB HBM3")])
def test_a_target_has_a_time_and_what_bounds_it(description: str, name: str) -> None:
    ir = popxl.Ir(replication=2)
    line = network(ir)
    session = popxl.Session(ir, description)
    cost, report = session.cost(), session.report
    assert cost.chip == name and cost.seconds is not None and 1e-9 < cost.seconds < 1e-3
    assert sum(count for count in cost.model_dump()["collectives"]["all-reduce"].values()) == 1 + 4 * 4 * 6
    assert [use.source for use in cost.uses] == [f"test_cost.py:{line}"]
    layer = max(cost.graphs, key=lambda graph: graph.flops)
    assert layer.flops >= 7 * 2 * 4 * 6 * 6 and layer.bound in ("compute", "memory")
    assert layer.name == ir.main_graph.called_graphs[0].called_graphs[0].name
    assert (cost.cycles is not None and cost.cycles > 100) == description.startswith("tpu")
    target = report.target
    assert target is not None and target.cost.model_dump(exclude={"compile_seconds"}) == cost.model_dump(
        exclude={"compile_seconds"}
    )
    assert (target.used, target.chips, target.fits) == (2, 2, True)
    assert target.with_buffers == target.without_buffers == session.memory().device
    assert [*cost.precisions] == ["highest", "high", "default"]
    assert cost.precisions["highest"].seconds == pytest.approx(cost.seconds)
    for told in (
        "Nothing has run: the machine is not here.",
        "It is an estimate; nothing was measured.",
        "Precision of float32, estimated",
        "Figures: ",
    ):
        assert told in str(report)


@pytest.mark.targets
def test_remote_buffers_of_a_tpu_are_bound_by_the_host() -> None:
    ir = popxl.Ir()
    ir.options.remoteBuffers = "host"
    with ir.main_graph, popxl.in_sequence():
        buffer = popxl.remote_buffer((128, 256), popxl.float32, 4)
        popxl.remote_variable(np.ones((128, 256), np.float32), buffer, 0)
        ops.remote_store(buffer, 1, ops.remote_load(buffer, 0) + 1)
    session = popxl.Session(ir, "tpu v5e")
    cost, target = session.cost(), session.report.target
    slot = 4 * 128 * 256
    assert (cost.host_bytes, cost.argument_bytes) == (4 * slot, 0)
    (main,) = cost.graphs
    assert (main.bound, main.host_bytes, main.seconds) == ("host", 2 * slot, 2 * slot / 16e9)
    assert target is not None and target.with_buffers - target.without_buffers == 4 * slot
