"""`Ir.picture`: memory of a training step by its uses, beside the mesh and its collectives."""

from __future__ import annotations

import re
from functools import partial

import numpy as np
import pytest

import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons import optimizers

WIDTH, ROWS, LAYERS = 48, 160, 5
ACTIVATION = 4 * ROWS * WIDTH  # bytes


class Layer(addons.Module):
    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        w = self.add_variable_input("w", partial(np.zeros, (WIDTH, WIDTH)), x.dtype)
        return ops.gelu(ops.tanh(x @ w))


class Model(addons.Module):
    def build(self, x: popxl.Tensor) -> popxl.Tensor:
        facts, layer = Layer().create_graph(x)
        for i in range(LAYERS):
            (x,) = layer.bind(self.add_variable_inputs(f"layer{i}", facts)).call(x)
        return ops.mean(x * x)


def program(memory: str, sharded: bool = False) -> tuple[popxl.Ir, addons.Training]:
    ir = popxl.Ir(axes={"data": 4, "tensor": 3})
    with ir.main_graph:
        x = popxl.h2d_stream((ROWS, WIDTH), popxl.float32, "x")
        adam = partial(optimizers.adamw, lr=0.1)
        step = addons.train_step(Model(), x, optimizer=adam, memory=memory, sharded=sharded)
        addons.host_store(step.loss)
    return ir, step


def most(picture: str, use: str) -> float:
    """What the picture says of a use of memory, in bytes."""
    found = re.search(rf"<title>{use}: ([\d.]+) ([kM]?)B at most", picture)
    return float(found[1]) * {"": 1, "k": 1e3, "M": 1e6}[found[2]] if found else 0.0


@pytest.mark.parametrize("memory", ["everything", "products", "nothing"])
def test_memory_by_use(memory: str) -> None:
    """Kept activations as the plan says; the inputs of layers are kept besides."""
    ir, step = program(memory)
    picture = ir.picture()
    assert step.memory is not None
    kept = step.memory.bytes("keep")
    assert kept <= most(picture, "kept for the gradient") * 1.01 <= kept + (LAYERS + 2) * ACTIVATION
    recomputed = step.memory.bytes("recompute") / LAYERS
    assert most(picture, "recomputed") <= recomputed + 2 * ACTIVATION
    assert (most(picture, "recomputed") > 0) == (recomputed > 0)
    weights = LAYERS * WIDTH * WIDTH * 4
    assert most(picture, "gradients") >= weights * 0.99
    assert most(picture, "variables and feeds") >= 3 * weights * 0.99


def test_gathered_variables_are_moved() -> None:
    """Those of one layer at a time."""
    weight = WIDTH * WIDTH * 4
    assert most(program("everything")[0].picture(), "moved here from chips or host") == 0
    moved = most(program("everything", sharded=True)[0].picture(), "moved here from chips or host")
    assert weight * 0.99 <= moved < 2 * weight


def test_mesh_and_collectives_by_line() -> None:
    with popxl.Ir(axes={"data": 4, "tensor": 3}).main_graph as main:
        x = popxl.variable(np.zeros((7, 1000)), popxl.float32, "x")
        ops.collectives.replicated_all_reduce(x, group="tensor")
        ops.collectives.replicated_all_gather(x, group="data")
    picture = main.ir.picture()
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", picture)
    assert "12 chips: data 4 × tensor 3" in texts
    where = {text: texts[i + 1 : i + 4] for i, text in enumerate(texts) if text.startswith("along")}
    assert {name: row[1:] for name, row in where.items()} == {
        "along tensor, 3 chips": ["all-reduce ×1", "28 kB"],
        "along data, 4 chips": ["all-gather ×1", "112 kB"],
    }
    assert all(re.fullmatch(r"…\w+_overview.py:\d+ ", line) for line, *_ in where.values())


def test_programs_of_one_chip() -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        ops.exp(popxl.variable(np.zeros(5), popxl.float32, "x"))
    assert "1 chip" in ir.picture() and "backward" not in ir.picture()
    assert "0 B at most" in popxl.Ir().picture()
