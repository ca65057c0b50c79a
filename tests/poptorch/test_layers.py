"""What rows of operators cannot say: dtypes that PyTorch refuses, modules that keep a state, what is a loss."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import poptorch  # noqa: E402

# Operands of different dtypes: the activation decides ---

MIXED = {
    "linear": (F.linear, (2, 3), (4, 3), (4,)),
    "bilinear": (lambda x, weight, bias: F.bilinear(x, x, weight, bias), (2, 3), (4, 3, 3), (4,)),
    "conv1d": (F.conv1d, (2, 3, 5), (4, 3, 2), (4,)),
    "conv2d": (F.conv2d, (2, 3, 5, 4), (4, 3, 2, 2), (4,)),
    "conv3d": (F.conv3d, (1, 2, 3, 4, 3), (3, 2, 2, 2, 1), (3,)),
    "conv_transpose1d": (F.conv_transpose1d, (2, 3, 5), (3, 4, 2), (4,)),
    "conv_transpose2d": (F.conv_transpose2d, (2, 3, 5, 4), (3, 4, 2, 2), (4,)),
    "conv_transpose3d": (F.conv_transpose3d, (1, 2, 3, 4, 3), (2, 3, 2, 2, 1), (3,)),
}


@pytest.mark.thorough(but_each=3)
@pytest.mark.parametrize("of_input", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", MIXED)
def test_weights_are_cast_to_the_type_of_the_activation(name: str, of_input: torch.dtype) -> None:
    function, *shapes = MIXED[name]
    torch.manual_seed(0)
    x, weight, bias = map(torch.randn, shapes)
    of_weight = torch.float32 if of_input is torch.float16 else torch.float16
    x, weight, bias = x.to(of_input), weight.to(of_weight), bias.to(of_weight)
    model = poptorch.inferenceModel(lambda x, weight, bias: function(x, weight, bias=bias))
    result = model(x, weight, bias)
    assert result.dtype is of_input
    expected = function(x.float(), weight.float(), bias.float())
    torch.testing.assert_close(result.float(), expected, rtol=5e-3, atol=5e-3)


def test_weights_in_float32_learn_from_halves() -> None:
    model = _Trained(
        nn.Sequential(nn.Conv1d(2, 3, 2), nn.Flatten(), nn.Linear(9, 2)), lambda out, y: (out.float() ** 2).mean()
    )
    before = copy.deepcopy(model.layers.state_dict())
    trained = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5))
    trained(torch.randn(2, 2, 4).half(), torch.zeros(2))
    for name, now in model.layers.state_dict().items():
        assert now.dtype is torch.float32
        assert not torch.equal(now, before[name])


# Modules with a state ---


class _Trained(nn.Module):
    """Layers, and a loss of what they make."""

    def __init__(self, layers: nn.Module, loss: Callable[..., Any]) -> None:
        super().__init__()
        self.layers, self.loss = layers, loss

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        out = self.layers(x)
        return out, poptorch.identity_loss(self.loss(out, y), "none")


def _same_training(layers: nn.Module, x: torch.Tensor, steps: int = 3) -> None:
    """Layers that are trained here and by PyTorch end up the same, buffers too."""
    ours, theirs = (_Trained(each, lambda out, y: F.mse_loss(out, y)) for each in (layers, copy.deepcopy(layers)))
    y = torch.zeros(layers(x).shape)
    theirs.load_state_dict(ours.state_dict())
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    model = poptorch.trainingModel(ours, optimizer=torch.optim.SGD(ours.parameters(), lr=0.1))
    for _ in range(steps):
        out, loss = model(x, y)
        expected = F.mse_loss(theirs.layers(x), y)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-4, atol=1e-5)
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value, theirs.state_dict()[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(3),
        nn.BatchNorm1d(3, momentum=None),
        nn.BatchNorm1d(3, affine=False, momentum=0.3),
        nn.BatchNorm1d(3, track_running_stats=False),
        nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
    ],
    ids=repr,
)
def test_norms_learn_and_keep_statistics(norm: nn.Module) -> None:
    torch.manual_seed(0)
    _same_training(nn.Sequential(nn.Conv1d(2, 3, 2), norm), torch.randn(4, 2, 6))


def test_a_plain_average_is_still_one_after_training() -> None:
    norm = nn.BatchNorm1d(3, momentum=None)
    _same_training(nn.Sequential(nn.Conv1d(2, 3, 2), norm), torch.randn(4, 2, 6))
    assert norm.momentum is None
    assert norm.num_batches_tracked == 4  # three here, and one for the shape of the result


class _FakeQuantised(nn.Module):
    """What it is given, as so many steps of a scale that follows it."""

    def __init__(self, channels: int = 1, is_symmetric: bool = False, off: str = "", is_new: bool = False) -> None:
        super().__init__()
        self.settings = (0.5, -8, 7, 0, channels > 1, is_symmetric)
        for name in ("observer_on", "fake_quant_on"):
            self.register_buffer(name, torch.tensor([name != off]).long())
        self.register_buffer("low", torch.full((channels,), torch.inf if is_new else -1.0))
        self.register_buffer("high", torch.full((channels,), -torch.inf if is_new else 1.0))
        self.register_buffer("scale", torch.ones(channels))
        self.register_buffer("zero_point", torch.zeros(channels, dtype=torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        *switches, low, high, scale, zero_point = self.buffers()
        return torch.fused_moving_avg_obs_fake_quant(x, *switches, low, high, scale, zero_point, *self.settings)


@pytest.mark.thorough(but_each=4)
@pytest.mark.parametrize("off", ["", "observer_on", "fake_quant_on"])
@pytest.mark.parametrize("is_symmetric", [False, True])
@pytest.mark.parametrize("channels", [1, 6])
def test_quantisation_is_simulated_and_follows_its_input(channels: int, is_symmetric: bool, off: str) -> None:
    torch.manual_seed(0)
    _same_training(nn.Sequential(nn.Linear(2, 3), _FakeQuantised(channels, is_symmetric, off)), torch.randn(6, 2))


@pytest.mark.thorough(but_each=4)
@pytest.mark.parametrize("is_symmetric", [False, True])
@pytest.mark.parametrize("x", [[-1.5, 2.0], [0.5, 1.5], [-0.9, -0.1], [0.0, 0.0], [-2e-6, 1e-6], [0.0, 3e-6]], ids=str)
def test_the_first_range_of_a_simulated_quantisation(x: list[float], is_symmetric: bool) -> None:
    ours, theirs = (_FakeQuantised(is_symmetric=is_symmetric, is_new=True) for _ in range(2))
    model = poptorch.inferenceModel(ours)
    torch.testing.assert_close(model(torch.tensor([x])), theirs(torch.tensor([x])))
    model.copyWeightsToHost()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


def test_an_observer_of_channels_that_has_seen_nothing() -> None:
    layer = _FakeQuantised(3)
    layer.low, layer.high = torch.empty(0), torch.empty(0)
    with pytest.raises(poptorch.Error, match=r"An observer of 3 channels has buffers for 0.* Run the model once in"):
        poptorch.inferenceModel(layer)(torch.ones(3, 2))


@pytest.mark.thorough(but_each=2)
@pytest.mark.parametrize("dim", [None, 0])
def test_normed_weights_learn(dim: int | None) -> None:
    torch.manual_seed(0)
    parametrizations = nn.utils.parametrizations
    _same_training(
        nn.Sequential(
            parametrizations.weight_norm(nn.Conv1d(2, 3, 2), dim=dim),
            nn.Flatten(),
            parametrizations.spectral_norm(nn.Linear(9, 4)),
            parametrizations.orthogonal(nn.Linear(4, 2), use_trivialization=False),
        ),
        torch.randn(3, 2, 4),
    )


# Losses ---


@pytest.mark.parametrize(
    "loss",
    [
        nn.TripletMarginWithDistanceLoss(),
        nn.TripletMarginWithDistanceLoss(distance_function=lambda x, y: (x - y).abs().sum(-1), swap=True),
        nn.TripletMarginLoss(),
        nn.GaussianNLLLoss(),
    ],
    ids=lambda loss: type(loss).__name__,
)
def test_a_loss_of_three_is_found(loss: nn.Module) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
            return loss(self.linear(x), y, z)

    torch.manual_seed(0)
    model, others = Model(), (torch.randn(4, 3), torch.randn(4, 2), torch.rand(4, 2) + 0.5)
    expected = model(*others)
    expected.backward()
    weight = (model.linear.weight - 0.1 * model.linear.weight.grad).detach()
    trained = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    torch.testing.assert_close(trained(*others), expected.detach())
    torch.testing.assert_close(model.linear.weight.detach(), weight)


# MultiConv, and what there is not ---


def test_convolutions_count_in_a_multi_conv() -> None:
    def forward(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        with poptorch.MultiConv():
            return F.conv1d(x, weight) + F.conv_transpose1d(x, weight, padding=1)

    x, weight = torch.randn(2, 3, 5), torch.randn(3, 3, 2)
    result = poptorch.inferenceModel(lambda x, weight: F.pad(forward(x, weight), (0, 0)))(x, weight)
    torch.testing.assert_close(result, F.conv1d(x, weight) + F.conv_transpose1d(x, weight, padding=1))


def test_no_convolution_in_a_multi_conv() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        with poptorch.MultiConv():
            return x * 2

    with pytest.raises(poptorch.Error, match="no convolution"):
        poptorch.inferenceModel(forward)(torch.ones(2))


def test_what_has_no_lowering_is_refused() -> None:
    model = poptorch.inferenceModel(lambda x: torch.special.airy_ai(x))
    with pytest.raises(poptorch.Error, match="Unsupported op aten.special_airy_ai"):
        model(torch.ones(2))


def test_a_result_that_is_not_made() -> None:
    model = poptorch.inferenceModel(lambda x: torch.ops.aten._linalg_det(x)[1] + 1)
    with pytest.raises(poptorch.Error, match="aten._linalg_det at .*: its result number 1 is not supported"):
        model(torch.eye(2))
