"""What is told to XLA about calls: those of called graphs are kept, those inside of them are not."""

from __future__ import annotations

import re
from typing import Any

import jax
import numpy as np
import pytest

import popxl
from popxl import ops
from runtime.targets.devices import Device
from tests.popxl.evaluate import store

pytestmark = pytest.mark.compiled_whole  # what XLA makes of programs is what is tested


def test_functions_of_jax_are_inlined(ir: popxl.Ir) -> None:
    """Also within a called graph, and in what that calls; or nothing would be fused with them."""

    def chosen(x: Any) -> Any:
        return ops.where(ops.greater(x, popxl.constant(0.0)), x, x * 2)  # `jnp.where` is a jitted function

    def twice(x: Any) -> Any:
        (y,) = ops.call(inner, x)
        (z,) = ops.call(inner, y)
        return chosen(z) + 1

    ir.options.calledGraphs = "kept"
    with ir.main_graph, popxl.in_sequence():
        x = popxl.variable([-1.0, 2.0])
        inner = ir.create_graph(chosen, x)
        outer = ir.create_graph(twice, x)
        (y,) = ops.call(outer, x)
        (y,) = ops.call(outer, y)
        (out,) = store(y)
    with popxl.Session(ir) as session:
        assert session.run()[out].tolist() == [-55, 4]
        text = session.program.text()
    kept = re.findall(r"call @(\w+)\(.*inlineable", text)
    assert set(kept) == {re.sub(r"\W+", "_", graph.id).strip("_") for graph in (inner, outer)}


@pytest.mark.parametrize("way", ["kept", "dispatched", "inlined"])
def test_replicas_overwrite_what_they_change(way: Any) -> None:
    """Where each has a device, its variables are not copied."""
    if len(jax.devices("cpu")) < 2:
        pytest.skip("JAX was started with fewer devices")
    ir = popxl.Ir(replication=2)
    ir.options.calledGraphs = way
    with ir.main_graph, popxl.in_sequence():
        w = popxl.variable(np.eye(64), popxl.float32)
        x = ops.host_load(popxl.h2d_stream((8, 64), popxl.float32))
        gradient = ops.transpose(x) @ (x @ w)
        ops.scaled_add_(w, ops.collectives.replicated_all_reduce(gradient), b=-0.1)
    session = popxl.Session(ir, Device("ipu_model", tuple(jax.devices("cpu")[:2])))
    executable = session.program.executables()[-1]
    assert "f32[1,64,64]" in executable.as_text()
    assert not re.search(r"f32\[1,64,64\]\S* copy\(", executable.as_text())
