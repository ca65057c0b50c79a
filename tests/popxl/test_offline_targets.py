"""Machines that are not here: programs are compiled for them, and told about; nothing runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import popxl
from popxl import ops
from popxl.base.container import unpack
from runtime.targets import compilers
from runtime.targets.chip import Gpu, names, shipped
from runtime.targets.compile_target import CompileTarget

V5E, H100 = "tpu v5e:2x2", "gpu h100:4"


def network(replicas: int = 1) -> tuple[popxl.Ir, popxl.HostToDeviceStream, popxl.Variable]:
    """[3, 5] @ [5, 7], summed over the replicas, which is added to the first weight."""
    ir = popxl.Ir(replication=replicas)
    with ir.main_graph:
        x_in = popxl.h2d_stream((3, 5), popxl.float32, "x")
        w = popxl.variable(np.ones((5, 7)), popxl.float32, "w")
        x = ops.host_load(x_in)
        y = ops.relu(x @ w)
        if replicas > 1:
            y = ops.collectives.replicated_all_reduce(y)
        ops.var_updates.accumulate_(w, x.T @ y)
        ops.host_store(popxl.d2h_stream((), popxl.float32, "total"), ops.sum(y))
    return ir, x_in, w


# Descriptions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("description", "layout", "name"),
    [
        ("tpu v5e:4x4", (4, 4), "TPU v5e"),
        ("tpu v5e", (1, 1), "TPU v5e"),
        ("tpu v5p:2x2x4", (2, 2, 4), "TPU v5p"),
        ("gpu h100:8", (8,), "NVIDIA H100 80GB HBM3"),
        ("gpu h100:16x4", (16, 4), "NVIDIA H100 80GB HBM3"),
        ("gpu A100", (1,), "NVIDIA A100-SXM4-80GB"),
    ],
)
def test_a_target_is_a_description(description: str, layout: tuple[int, ...], name: str) -> None:
    target = popxl.Target(description)
    assert (target.layout, target.count, target.chip.name) == (layout, np.prod(layout), name)
    assert target == popxl.Target(description) and hash(target) == hash(popxl.Target(description))
    assert str(target) == description


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("abacus",), "'abacus' describes no machine; expected 'tpu v5e:4x4', 'gpu h100:8'"),
        (("tpu v1",), "no figures are known of tpu 'v1'; known are v4, v5e, v5p, v6e"),
        (("gpu x9:2",), "no figures are known of gpu 'x9'; known are a100, b200, h100, h200, or those of a JSON file"),
        (("tpu v5e:8",), "in 'tpu v5e:8', expected axb, its chips along each dimension after the colon; got '8'"),
        (("tpu v5p:2x2",), "expected axbxc"),
        (("tpu v5e:0x2",), "got '0x2'"),
        (("gpu h100:2x2x2",), "expected a number, or hosts x GPUs of each, after the colon; got '2x2x2'"),
        (("gpu h100:8x",), "got '8x'"),
        (("tpu v5e", "my.json"), "are TPUs, whose figures are known"),
    ],
)
def test_what_describes_no_machine_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        popxl.Target(*arguments)


def test_a_target_is_described_by_a_string() -> None:
    with pytest.raises(TypeError, match=r"`description` must be a string such as .*; got 4 \(int\)"):
        popxl.Target(4)  # type: ignore[arg-type]


def test_figures_of_another_gpu_are_a_file(tmp_path: Path) -> None:
    mine = shipped(Gpu, "h100").model_copy(update={"name": "H100 NVL", "memory_bytes": 94 << 30})
    file = tmp_path / "mine.json"
    file.write_text(mine.model_dump_json())
    for target in (
        popxl.Target(f"gpu {file}:2"),
        popxl.Target("gpu mine:2", file),
        popxl.Target("gpu mine:2", mine),
    ):
        assert (target.chip, target.count) == (mine, 2)
    assert "device_memory_size: 100931731456" in mine.for_xla() and '"H100 NVL"' in mine.for_xla()
    file.write_text(mine.model_dump_json(exclude={"cores", "sources"}))
    with pytest.raises(popxl.errors.PopxlError, match="the figures of a Gpu: sources: Field required; cores: Field"):
        popxl.Target(f"gpu {file}")
    with pytest.raises(popxl.errors.PopxlError, match=r"cannot be read from 'none\.json': .*No such file"):
        popxl.Target("gpu none.json")


def test_all_figures_have_sources() -> None:
    assert names(Gpu) == ["a100", "b200", "h100", "h200"]
    for name in names(Gpu):
        assert shipped(Gpu, name).sources
        assert popxl.Target(f"gpu {name}").chip.flops["bfloat16"] > 1e14


@pytest.mark.here
@pytest.mark.parametrize(("description", "extra"), [(V5E, "tpu"), (H100, "gpu")])
def test_a_compiler_that_is_not_installed_is_asked_for(
    description: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilers, "find_spec", lambda name: None)
    ir, *_ = network()
    with pytest.raises(
        popxl.errors.PopxlError, match=rf"with the extra `{extra}`: `pip install '\.\[{extra}\]'` in a checkout"
    ):
        popxl.Session(ir, description)


# Sessions ------------------------------------------------------------------------------------------------------------


def two_stages(replicas: int) -> popxl.Ir:
    """Each replica has a stage on each of two IPUs; the second one is summed over the replicas."""
    ir = popxl.Ir(replication=replicas)
    with ir.main_graph:
        x = ops.host_load(popxl.h2d_stream((3, 5), popxl.float32, "x"))
        with popxl.ipu(0):
            y = (x * 2.0).copy_to_ipu(1)
        with popxl.ipu(1):
            total = ops.collectives.replicated_all_reduce(y) if replicas > 1 else y + 1.0
        ops.host_store(popxl.d2h_stream(total.shape, total.dtype, "total"), total)
    return ir


@pytest.mark.targets
@pytest.mark.parametrize(
    ("make", "description", "told"),
    [
        (
            partial(two_stages, 16),
            "tpu v5e:4x8",
            r"a stage uses 16 of 32 chips\..* more than 16 TPU v5e only",
        ),
        (partial(two_stages, 8), "tpu v6e:4x4", r"a stage uses 8 of 16 chips\..* hosts only if it uses all of each"),
        (
            lambda: network(8)[0],
            "tpu v5e:4x8",
            r"the program uses 8 of 32 chips\. .* Have as many replicas",
        ),
    ],
)
def test_parts_of_slices_that_xla_refuses(make: Callable[[], popxl.Ir], description: str, told: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"Session: on {description}, {told}"):
        popxl.Session(make(), description)


@pytest.mark.targets
@pytest.mark.parametrize(
    ("replicas", "description"), [(2, "tpu v5e:2x2"), (1, "tpu v5e:4x8"), (8, "tpu v4:2x2x4"), (2, "tpu v6e:4x4")]
)
def test_stages_on_slices(replicas: int, description: str) -> None:
    """Those of one host, those that leave hosts idle, and those of chips whose slices can be divided."""
    session = popxl.Session(two_stages(replicas), description)
    assert len(session.program.layout.devices) == 2 * replicas


@pytest.mark.targets
@pytest.mark.parametrize("description", [V5E, H100])
def test_a_session_compiles_and_tells_and_does_not_run(description: str) -> None:
    ir, x_in, w = network(4)
    session = popxl.Session(ir, description)
    memory = session.memory()
    assert (memory.variables, memory.arguments, len(memory.devices)) == (5 * 7 * 4, 3 * 5 * 4, 4)
    assert str(session.report).startswith(f"Report of {ir!r}\n\n  4 replicas on 4 devices ({description})")
    with session:
        for name, use in {
            "run": lambda: session.run({x_in: np.ones((4, 3, 5), np.float32)}),
            "run_with_outputs": lambda: session.run_with_outputs(),
            "weights_from_host": session.weights_from_host,
            "weights_to_host": session.weights_to_host,
            "write_variable_data": lambda: session.write_variable_data(w, np.zeros((5, 7), np.float32)),
            "recording": session.recording,
            "debugging": session.debugging,
        }.items():
            with pytest.raises(
                popxl.errors.PopxlError, match=f"Session.{name}: {description} is not here. The program"
            ):
                use()
        np.testing.assert_array_equal(session.get_tensor_data(w), np.ones((5, 7)))
    session.write_variable_data(w, np.zeros((5, 7), np.float32))  # the host copy
    np.testing.assert_array_equal(session.get_tensor_data(w), np.zeros((5, 7)))


@pytest.mark.targets
@pytest.mark.parametrize("description", [V5E, H100])
def test_complex_numbers_and_fourier_transforms_compile(description: str) -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        z = ops.host_load(popxl.h2d_stream((2, 4, 8), popxl.complex64, "z"))
        w = popxl.variable(np.ones((8, 8)), popxl.complex64, "w")
        y = ops.irfft(ops.fft(ops.exp(z) @ w, axes=(0, 1, 2)), axes=-1, sizes=14)
        ops.host_store(popxl.d2h_stream(y.shape, y.dtype, "y"), y)
    assert popxl.Session(ir, popxl.Target(description)).memory().variables == 8 * 8 * 8


@pytest.mark.targets
@pytest.mark.parametrize("description", ["tpu v5e:4x4", "gpu h100:16"])
def test_the_chips_of_several_hosts_are_in_one_mesh(description: str) -> None:
    ir, *_ = network(16)
    session = popxl.Session(ir, popxl.Target(description))
    assert (session.program.layout.replicas.count, session.program.layout.replicas.mesh.size) == (16, 16)
    assert len({device.process_index for device in session.program.layout.devices}) > 1
    assert session.memory().variables == 5 * 7 * 4


def test_what_does_not_fit_is_said() -> None:
    class TooLarge:
        args_info = ()

        def compile(self, **_: Any) -> None:
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory on HBM.")

    device = jax.devices("cpu")[0]
    with pytest.raises(popxl.errors.PopxlError, match="does not fit into the memory of a cpu: RESOURCE_EXHAUSTED: Ran"):
        CompileTarget((device,), is_present=False).compile(TooLarge())
    with pytest.raises(jax.errors.JaxRuntimeError):
        CompileTarget((device,)).compile(TooLarge())


@pytest.mark.targets
def test_gpus_multiply_blocks_whose_rows_no_tile_holds() -> None:
    """[4, 24, 6], transposed in each block: XLA's first tiles have 16 rows, and there is no GPU to try others on."""
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.variable(np.ones((4, 24, 6)), popxl.float32)
        w = popxl.variable(np.ones((24, 8)), popxl.float32)
        ops.host_store(popxl.d2h_stream((24, 8), popxl.float32), x.transpose((0, 2, 1)).reshape((24, 24)) @ w)
    cost = popxl.Session(ir, "gpu h100").cost()
    assert cost.flops == 2 * 24 * 24 * 8


@pytest.mark.targets
@pytest.mark.parametrize("description", ["tpu v5e", "gpu h100"])
@pytest.mark.parametrize("entries", [1, 2])
def test_slots_are_fetched_when_the_program_says_so(entries: int, description: str) -> None:
    """The slot of a buffer is fetched after that of the one before was stored: there is one, and what is computed."""
    ir, shape = popxl.Ir(), (1024, 512)
    with ir.main_graph, popxl.in_sequence():
        x = ops.host_load(popxl.h2d_stream(shape, popxl.float32, "x"))
        for buffer in [popxl.remote_buffer(shape, popxl.float32, entries) for _ in range(8)]:
            w = ops.remote_load(buffer, entries - 1)
            ops.remote_store(buffer, entries - 1, w + x @ (x.T @ w))
    assert popxl.Session(ir, description).memory().temporaries < 5 * 4 * 1024 * 512


@pytest.mark.targets
@pytest.mark.parametrize(("entries", "stores"), [(1, False), (8, False), (1, True), (4, True), (8, True)])
def test_a_slot_comes_while_the_one_before_is_used(entries: int, stores: bool) -> None:
    """Of eight weights, or of what eight layers were given, two are there at once, and what is computed.

    That is 3.8 arrays at most with libtpu 0.0.42, which JAX 0.10.2 asks for, 4.5 with 0.0.50 of JAX 0.12, and 3.3 with
    0.0.52.
    """
    ir, shape = popxl.Ir(), (512, 512)
    ir.options.precision = "default"
    with ir.main_graph, popxl.in_sequence():
        x = ops.host_load(popxl.h2d_stream(shape, popxl.float32, "x"))
        w = popxl.variable(popxl.initial.zeros(shape), popxl.float32, "w")
        buffers = [popxl.remote_buffer(shape, popxl.float32, entries) for _ in range(8 // entries)]
        slots = [(buffer, slot) for buffer in buffers for slot in range(entries)]
        for slot in slots if stores else ():
            ops.remote_store(*slot, x)
            x = ops.tanh(x @ w)
        for slot in slots:
            x = ops.tanh(x @ ops.remote_load(*slot))
        ops.host_store(popxl.d2h_stream(x.shape, popxl.float32, "y"), x)
    assert popxl.Session(ir, "tpu v5e").memory().temporaries < 5 * 4 * 512 * 512


@pytest.mark.targets
@pytest.mark.parametrize("description", ["tpu v5e", "gpu h100"])
@pytest.mark.parametrize("entries", [(1, 1), (1, 2), (2, 3)])
def test_buffers_that_are_loaded_and_stored_in_turn_stay_on_the_host(
    entries: tuple[int, int], description: str
) -> None:
    ir, shape = popxl.Ir(), (16, 128)
    with ir.main_graph, popxl.in_sequence():
        x = popxl.variable(popxl.initial.zeros(shape), popxl.float32, "x")
        one, other = (popxl.remote_buffer(shape, popxl.float32, count) for count in entries)
        for first, second in ((one, other), (other, one)):
            w = ops.remote_load(first, 0)
            ops.remote_store(second, 0, w + x)
            ops.add_(x, ops.remote_load(first, 0))
    memory = popxl.Session(ir, description).memory()
    assert (memory.buffers, memory.buffers_on_host) == (0, sum(entries) * 4 * 16 * 128)


@pytest.mark.targets
@pytest.mark.parametrize("layers", [2, 8])
def test_gpus_write_zeros_when_a_loop_begins_that_fills_them(layers: int) -> None:
    """Attention goes through long texts block by block: scores of a block are eight arrays, and eight are besides."""
    ir, shape = popxl.Ir(), (4, 1024, 64)
    ir.options.calledGraphs = "inlined"
    with ir.main_graph, popxl.in_sequence():
        x = ops.host_load(popxl.h2d_stream(shape, popxl.bfloat16, "x"))
        for _ in range(layers):
            x = ops.attention(x, x * 2, x * 3)
        ops.host_store(popxl.d2h_stream(shape, popxl.bfloat16, "y"), x)
    assert popxl.Session(ir, "gpu h100").memory().temporaries < 17 * 2 * 4 * 1024 * 64


@pytest.mark.targets
def test_gpus_write_zeros_when_a_gradient_comes_that_is_put_there() -> None:
    """Of eight layers their inputs are kept, and the gradient of one is there."""
    ir, shape = popxl.Ir(), (512, 256)
    ir.options.calledGraphs = "inlined"

    def layers(x: popxl.Tensor) -> popxl.Tensor:
        for _ in range(8):
            x = ops.concat([ops.subsample(ops.tanh(x), (2, 1)), ops.subsample(ops.exp(x), (2, 1))])
        return x

    with ir.main_graph, popxl.in_sequence():
        x = popxl.variable(popxl.initial.zeros(shape), popxl.float32, "x")
        graph = ir.create_graph(layers, x)
        gradient = popxl.transforms.autodiff(graph)
        call = ops.call_with_info(graph, x)
        ops.add_(x, *ops.call(gradient.graph, call.outputs[0], inputs_dict=gradient.inputs_dict(call)))
    assert popxl.Session(ir, "gpu h100").memory().temporaries < 11 * 4 * 512 * 256


@pytest.mark.targets
@pytest.mark.parametrize("gelu", [ops.gelu, ops.geluerf], ids=["gelu", "geluerf"])
def test_gpus_compute_gelu_again_for_its_gradient(gelu: Callable[[popxl.Tensor], popxl.Tensor]) -> None:
    """Of each of four layers, what goes into gelu and what comes out is kept, and nothing in float32."""
    ir, dtype = popxl.Ir(), popxl.bfloat16
    ir.options.precision = "default"
    with ir.main_graph, popxl.in_sequence():
        x = ops.host_load(popxl.h2d_stream((2048, 512), dtype, "x"))
        weights = [popxl.variable(popxl.initial.zeros((512, 512)), dtype) for _ in range(4)]

        def network(x: popxl.Tensor, *weights: popxl.Tensor) -> popxl.Tensor:
            for w in weights:
                x = gelu(x @ w)
            return x

        graph = ir.create_graph(network, x, *weights)
        grad = popxl.transforms.autodiff(graph, grads_required=graph.inputs[1:])
        call = ops.call_with_info(graph, x, *weights)
        gradients = ops.call(grad.graph, call.outputs[0], inputs_dict=grad.inputs_dict(call))
        for w, gradient in zip(weights, gradients, strict=True):
            ops.scaled_add_(w, gradient, b=-0.01)
    assert popxl.Session(ir, "gpu h100").memory().temporaries < 3 * 4 * 2 * 2048 * 512


@pytest.mark.targets
def test_a_part_of_the_chips_is_of_one_host() -> None:
    ir, *_ = network(4)
    session = popxl.Session(ir, "tpu v5e:4x4")
    assert {device.process_index for device in session.program.layout.devices} == {0}


@pytest.mark.targets
@pytest.mark.parametrize("description", [V5E, H100])
def test_ipus_are_chips(description: str) -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.variable(np.ones((3, 5)), popxl.float32)
        passed = popxl.constant(np.full((3, 5), 2), popxl.float32)
        layer = ir.create_graph(lambda x, y: ops.tanh(x + y), x, passed)
        for ipu in range(2):
            with popxl.ipu(ipu):
                for _ in range(2):
                    (x,) = ops.call(layer, x, passed)
        ops.host_store(popxl.d2h_stream((3, 5), popxl.float32, "x"), x)
    report = popxl.Session(ir, description).report
    assert (report.calls, len(report.devices)) == ("dispatched", 2)


@pytest.mark.targets
def test_the_environment_describes_a_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POPXL_OFFLINE_DEVICE", "tpu v5e")
    ir, *_ = network()
    assert popxl.Session(ir, "ipu_hw").report.device == "tpu v5e"


@pytest.mark.targets
@pytest.mark.parametrize(("description", "kind"), [("tpu v5e", "tpu"), ("gpu h100", "gpu")])
def test_a_program_is_saved_for_a_machine_that_has_the_chips(description: str, kind: str, tmp_path: Path) -> None:
    """And not read back here, where XLA cannot."""
    ir, *_ = network()
    file = tmp_path / "program.session"
    popxl.Session(ir, description).save(file)
    header, parts = unpack("popxl session", file.read_bytes())
    assert (header["device"], header["target"]["platform"]) == (kind, kind)
    assert len(header["executables"]) == 1 and len(parts["executable/0"]) > 1000
    with pytest.raises(RuntimeError, match=f"JAX finds no device of the kind '{kind}'.*take \"ipu_hw\""):
        popxl.Session.load(file)
    with pytest.raises(
        popxl.errors.PopxlError, match=f"for something else than cpu .*: platform: '{kind}' in the file"
    ):
        popxl.Session.load(file, "cpu")
    with pytest.raises(
        popxl.errors.PopxlError, match=f"{description} is not here, and XLA reads compiled programs back"
    ):
        popxl.Session.load(file, description)


@pytest.mark.targets
def test_a_program_with_attention_is_compiled_again_to_be_loaded(tmp_path: Path) -> None:
    """cuDNN generates the kernel where there is a GPU. Here it is a name, and a workspace for gradients."""
    ir = popxl.Ir()
    with ir.main_graph:
        q = popxl.variable(np.ones((2, 4, 128, 32)), popxl.bfloat16)
        graph = ir.create_graph(lambda q: ops.sum(ops.attention(q, q, q, causal=True)), q)
        info = ops.call_with_info(graph, q)
        backward = popxl.transforms.autodiff(graph)
        (g,) = ops.call(backward.graph, popxl.constant(1, popxl.bfloat16), inputs_dict=backward.inputs_dict(info))
        ops.var_updates.accumulate_(q, g)
    session = popxl.Session(ir, "gpu h100")
    (text,) = session.hlo().values()
    (results,) = re.findall(r"= (\(.*\)) custom-call\(.*fmhaSoftmaxBackward", text)
    assert f"u8[{4 * 2 * 4 * 128 * (32 + 1)}]" in results
    session.save(tmp_path / "program.session")
    header, parts = unpack("popxl session", (tmp_path / "program.session").read_bytes())
    assert header["executables"] == [] and [*parts] == ["ir"]


QUIET = """
import os
if {runs}:
    import jax
    jax.numpy.ones(3).sum().block_until_ready()
os.write(2, b"JAX has said what it says")
import popxl, jax
ir = popxl.Ir()
with ir.main_graph:
    x = popxl.variable(1.0)
    popxl.ops.var_updates.copy_var_update_(x, x + 1)
with popxl.Session(ir, "ipu_hw") as session:
    session.run()
for name in ("tpu v5e:2x2", "gpu h100:4"):
    assert len(popxl.Target(name).devices) == 4
    popxl.Session(ir, name)
assert jax.default_backend() == "cpu" and session.get_tensor_data(x) == 2
"""


@pytest.mark.targets
@pytest.mark.parametrize(("runs", "platforms"), [(False, ""), (True, ""), (False, "cpu")])
def test_compilers_are_loaded_beside_jax_and_in_silence(runs: bool, platforms: str) -> None:
    """Whether JAX runs already, and whichever platforms it was told to look for. Nor does it look for hardware."""
    environment = {name: value for name, value in os.environ.items() if name[:4] not in ("JAX_", "TPU_")}
    told = environment | {"JAX_PLATFORMS": platforms, "PYTHONPATH": os.pathsep.join(sys.path)}
    program = [sys.executable, "-c", QUIET.format(runs=runs)]
    done = subprocess.run(program, env=told, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.partition("JAX has said what it says")[2] == ""
