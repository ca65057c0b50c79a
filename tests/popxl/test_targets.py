"""Targets, and what is compiled for them: values, without a session and without a state."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import popxl
from popxl import ops
from runtime.program.compiled import compile_program, compile_uncached
from runtime.targets import compilers
from runtime.targets.compile_target import CompileTarget
from runtime.targets.devices import cpu_device


@pytest.fixture
def devices() -> tuple[jax.Device, ...]:
    """Some of the devices that the CPU is divided into."""
    return tuple(jax.local_devices(backend="cpu")[:6])


def test_destinations_are_values(devices: tuple[jax.Device, ...]) -> None:
    assert CompileTarget(devices, 2) == CompileTarget(devices, 2)
    assert (
        len(
            {
                CompileTarget(devices, 2),
                CompileTarget(devices, 2),
                CompileTarget(devices, 3),
                CompileTarget(devices[:1], 2),
            }
        )
        == 3
    )
    with pytest.raises(AttributeError):
        CompileTarget(devices).count = 2  # type: ignore[misc]


def test_each_ipu_of_a_replica_has_its_device(devices: tuple[jax.Device, ...]) -> None:
    """Replica `r` has the devices that begin with number ``r * ipus``."""
    compile_target = CompileTarget(devices, 2)
    assert [compile_target.of_ipu(i, 3).devices for i in range(3)] == [devices[::3], devices[1::3], devices[2::3]]
    assert [compile_target.of_ipu(i, 3).replicas.device for i in range(3)] == [*devices[:3]]
    assert compile_target.of_ipu(1, 3).replicas.count == 2


def test_replicas_may_be_side_by_side(devices: tuple[jax.Device, ...]) -> None:
    """Two have their devices for an IPU next to each other."""
    ipus = [CompileTarget(devices * 2, 4, adjacent=2).of_ipu(i, 3).devices for i in range(3)]
    assert ipus == [(*devices[i : i + 2], *devices[i : i + 2]) for i in (0, 2, 4)]


def test_what_is_compiled_for_a_device_is_made_for_all_of_its_kind(devices: tuple[jax.Device, ...]) -> None:
    made_for = CompileTarget(devices[:1]).build_stamp
    assert made_for == CompileTarget(devices[1:2], 2).build_stamp != CompileTarget(devices[:2]).build_stamp
    assert (made_for.jax, made_for.platform, made_for.kinds) == (jax.__version__, "cpu", ["cpu"])


@pytest.mark.parametrize("calls", ["kept", "dispatched"])
def test_a_program_is_compiled_without_a_session(calls: str, devices: tuple[jax.Device, ...]) -> None:
    """A function of arrays. It keeps none, the variables stay as they are, and the layout can be compiled again."""
    ir = popxl.Ir()
    ir.options.calledGraphs = calls
    with ir.main_graph:
        x_in = popxl.h2d_stream((3,), popxl.float32, "x")
        w, b = (popxl.variable(np.full(3, value, np.float32)) for value in (2, 5))
        y = ops.host_load(x_in) * w + b
        ops.var_updates.copy_var_update_(w, y)
        ops.host_store(popxl.d2h_stream((3,), popxl.float32, "y"), y)
    made = compile_program(ir, cpu_device())
    again, layout = compile_uncached(made), made.layout
    assert (layout.changed, layout.unchanged, layout.mode) == ((w,), (b,), calls)
    assert {*map(id, made.executables())}.isdisjoint(map(id, again.executables()))
    x, held = np.arange(3, dtype=np.float32), (jax.device_put(w.data, devices[0]),)
    for each in (made, again):
        held, (fetched,) = each.executable(held, (jax.device_put(b.data, devices[0]),), (x,))
    np.testing.assert_array_equal(fetched, x * (x * 2 + 5) + 5)
    np.testing.assert_array_equal(held[0], fetched)
    np.testing.assert_array_equal([w.data, b.data], [[2] * 3, [5] * 3])
    assert made.is_serializable and made.executables()


def test_what_jax_was_told_to_use_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX says nothing but that an assertion failed."""

    def none() -> str:
        raise AssertionError

    ir = popxl.Ir()
    with ir.main_graph:
        x = popxl.variable([1.0, 2.0])
        ops.var_updates.copy_var_update_(x, x + 1)
    compilers.start_jax.cache_clear()
    monkeypatch.setattr(jax, "default_backend", none)
    monkeypatch.setattr(type(jax.config), "values", jax.config.values | {"jax_platforms": "cpu"})
    with pytest.raises(
        RuntimeError, match="JAX is told to use 'cpu', and finds no such device here. Set JAX_PLATFORMS"
    ):
        popxl.Session(ir, "ipu_hw")
