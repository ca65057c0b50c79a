"""Recurrent layers: what is in their loops, and derivatives of derivatives. Their numbers are rows of the op table."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

import poptorch  # noqa: E402
import popxl  # noqa: E402
from popxl import ops  # noqa: E402
from popxl.ops.kernels import products  # noqa: E402
from popxl.transforms import autodiff  # noqa: E402
from runtime.costs.hlo import parse_hlo  # noqa: E402
from runtime.costs.work import account_of  # noqa: E402
from runtime.cpu.kernel_overrides import OVERRIDES  # noqa: E402
from tests.popxl.evaluate import evaluate, store  # noqa: E402


def compiled_products(model: Any) -> tuple[list[str], list[str]]:
    """The products of a compiled model within loops over time, and the others."""
    (program,) = poptorch.sessionOf(model).hlo().values()
    found = [line for line in program.splitlines() if " dot(" in line]
    within = [line for line in found if "/while/body/" in line]
    return within, [line for line in found if line not in within]


def test_a_turn_has_one_product() -> None:
    """The input's products are those of all times at once, before the loop, and so is the turning of weights."""
    model = poptorch.inferenceModel(nn.LSTM(6, 4))
    model(torch.ones(5, 3, 6))
    (within,), (before,) = compiled_products(model)
    assert "f32[3,16]" in within and "f32[15,16]" in before
    assert "lhs_contracting_dims={1}, rhs_contracting_dims={0}" in within
    (program,) = poptorch.sessionOf(model).hlo().values()
    assert not [line for line in program.splitlines() if " transpose(" in line and "/while/body/" in line]


class _Trained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return poptorch.identity_loss(self.layer(x)[0], "sum")


def test_gradients_of_weights_are_made_after_the_loop() -> None:
    """The time forwards is gone through once, and a turn backwards has one product."""
    model = poptorch.trainingModel(_Trained())
    model(torch.ones(5, 3, 6))
    within, others = compiled_products(model)
    assert sorted(line.split(" dot(")[0].split("= ")[1].split("{")[0] for line in within) == ["f32[3,16]", "f32[3,4]"]
    assert len(others) == 3, "the input's, and the gradients of both weights"


@pytest.mark.thorough(but_each=8)
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("LSTM", lambda: nn.LSTM(4, 3)),
        ("LSTM", lambda: nn.LSTM(4, 3, proj_size=2, bias=False)),
        ("GRU", lambda: nn.GRU(4, 3)),
        ("RNNTanh", lambda: nn.RNN(4, 3)),
    ],
    ids=["LSTM", "LSTM, projected", "GRU", "RNN"],
)
def test_second_derivatives(name: str, make: Any, backwards: bool) -> None:
    """Of a loss that has squares of gradients in it, by numbers that PyTorch has of its own loops in float64."""
    torch.manual_seed(0)
    kind, layer, states = popxl.OpKind.named(f"poptorch.{name}"), make().double(), 1 + (name == "LSTM")
    assert kind is not None
    sizes = (layer.proj_size or 3, 3)
    given = [torch.randn(5, 2, 4), *(torch.randn(2, size) for size in sizes[:states])]
    operands = [*(t.double() for t in given), *(p.detach() for p in layer.parameters())]
    for t in operands:
        t.requires_grad_()

    x, *state = operands[: 1 + states]
    names = [name for name, _ in layer.named_parameters()]
    weights = dict(zip(names, operands[1 + states :], strict=True))
    first = tuple(t[None] for t in state) if states == 2 else state[0][None]
    out, _ = torch.func.functional_call(layer, weights, (x.flip(0) if backwards else x, first))
    slopes = torch.autograd.grad(out.sin().sum(), operands, create_graph=True)
    expected = torch.autograd.grad(sum(slope.square().sum() for slope in slopes), operands)

    def build(*given: popxl.Tensor) -> Any:
        settings = {"has_biases": layer.bias, "backwards": backwards}

        def loss(*given: popxl.Tensor) -> popxl.Tensor:
            return ops.sum(ops.sin(kind(*given, **settings)[0]))

        ir = popxl.gcg().ir
        forward = ir.create_graph(loss, *given)
        derived = autodiff(forward)

        def penalty(*given: popxl.Tensor) -> popxl.Tensor:
            site = ops.call_with_info(forward, *given)
            slopes = ops.call(derived.graph, 1.0, inputs_dict=derived.inputs_dict(site))
            return sum((ops.sum(slope * slope) for slope in slopes), popxl.constant(0.0))

        second = ir.create_graph(penalty, *given)
        again = autodiff(second)
        site = ops.call_with_info(second, *given)
        return ops.call(again.graph, 1.0, inputs_dict=again.inputs_dict(site))

    found = evaluate(build, *(t.detach().float().numpy() for t in operands))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-4, atol=2e-4)


LAYERS: dict[str, tuple[list[tuple[int, ...]], dict[str, Any]]] = {
    "LSTM": (
        [(5, 8, 64), (8, 32), (8, 64), (256, 64), (256, 32), (32, 64)],
        {"has_biases": False, "backwards": False},
    ),
    "GRU": ([(5, 8, 64), (8, 32), (96, 64), (96, 32)], {"has_biases": False, "backwards": True}),
    "GroupedMatMul": ([(3, 16, 64), (3, 64, 32)], {}),
}


def _gradients(name: str, *given: popxl.Tensor) -> Any:
    """Of a loss of a layer, with respect to all that it is given."""

    def loss(*given: popxl.Tensor) -> popxl.Tensor:
        kind = popxl.OpKind.named(f"poptorch.{name}")
        assert kind is not None
        found = kind(*given, **LAYERS[name][1])
        return ops.sum(ops.sin(found[0] if isinstance(found, tuple) else found))

    forward = popxl.gcg().ir.create_graph(loss, *given)
    derived = autodiff(forward)
    site = ops.call_with_info(forward, *given)
    return ops.call(derived.graph, 1.0, inputs_dict=derived.inputs_dict(site))


def _halves(name: str) -> list[Any]:
    random = np.random.default_rng(5)
    return [(random.normal(size=shape) / 8).astype(popxl.bfloat16.as_numpy()) for shape in LAYERS[name][0]]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] * (name == "GRU")) for name in LAYERS]
)
def test_gradients_of_products_of_halves(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPUs round what they multiply, and compute the same but for that."""
    expected = evaluate(partial(_gradients, name), *_halves(name))
    monkeypatch.setitem(OVERRIDES, products.factor, products.OF_HALVES[products.factor])
    for found, whole in zip(evaluate(partial(_gradients, name), *_halves(name)), expected, strict=True):
        found, whole = (g.astype(np.float32) for g in (found, whole))
        np.testing.assert_allclose(found, whole, atol=0.02 * np.abs(whole).max())


@pytest.mark.here
@pytest.mark.targets
@pytest.mark.parametrize("name", LAYERS)
def test_gpus_multiply_halves(name: str) -> None:
    ir = popxl.Ir()
    with ir.main_graph:
        store(_gradients(name, *map(popxl.variable, _halves(name))))
    (text,) = popxl.Session(ir, "gpu h100").hlo().values()
    assert {product.dtype for product in account_of(parse_hlo(text)).total.products} == {"bfloat16"}
