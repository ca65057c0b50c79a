"""Buffers and inputs that are written through views; shapes and numbers that a compiled program cannot know."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

import poptorch  # noqa: E402  (it needs torch)


class Memory(torch.nn.Module):
    """The last three inputs, and how often each element was positive."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(3, 4))
        self.register_buffer("counts", torch.zeros(2, 4, dtype=torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows[1:] = self.rows[:-1].clone()
        self.rows[0].copy_(x)
        self.counts.t()[:, 1] += x > 0
        self.counts.view(-1)[::3].sub_(1)
        return self.rows.sum(0)


def test_buffers_written_through_views() -> None:
    eager, wrapped = Memory(), Memory()
    model = poptorch.inferenceModel(wrapped)
    for seed in range(4):
        x = torch.randn(4, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(model(x), eager(x))
    model.copyWeightsToHost()
    for name, expected in eager.state_dict().items():
        torch.testing.assert_close(wrapped.state_dict()[name], expected)


def test_inputs_written_through_views() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        x.t()[1, ::2] = 7
        x.diagonal().mul_(2)
        return x * 1

    x, expected = torch.arange(12.0).reshape(3, 4), torch.arange(12.0).reshape(3, 4)
    torch.testing.assert_close(poptorch.inferenceModel(function)(x), function(expected))
    torch.testing.assert_close(x, expected)


_x = torch.ones(2, 3)


@pytest.mark.parametrize(
    "function, message",
    [
        (lambda x: x[x > 0], "shape of a tensor cannot depend on numbers.*`torch.where.mask, x, 0.`.*aten.nonzero"),
        (lambda x: x.nonzero(), "shape of a tensor cannot depend on numbers.*aten.nonzero"),
        (lambda x: x.masked_select(x > 0), "shape of a tensor cannot depend on numbers.*masked_select"),
        (lambda x: x.unique(), "shape of a tensor cannot depend on numbers.*unique"),
        (lambda x: x.repeat_interleave(x[0].long(), 1), "shape of a tensor cannot depend on numbers.*`output_size`"),
        (
            lambda x: torch.bincount(x[0].long()),
            "Bincount `minlength` must be specified .* the shape of the result depends",
        ),
        (lambda x: x[: x[0, 0].long()], "numbers in a tensor cannot be read.*`index_select`.*test_views_and_shapes.py"),
        (lambda x: torch.nn.functional.one_hot(x.long()), "OneHot num classes must be specified .*num_classes="),
        (lambda x: x * float(x.sum()), "numbers in a tensor cannot be read"),
        (
            lambda x: x.index_put((x[:, 0] > 0, x[:, 0].long()), x[0, 0]),
            "aten.index_put.*a mask stands beside other indices.*`torch.where`",
        ),
        (lambda x: x.resize_(3, 3) + 1, "A tensor of shape .3, 3. with the strides .3, 1., .* ends before"),
        (lambda x: x.long().view(torch.int16) + 1, "view: the numbers of .* have another size than in PyTorch"),
    ],
)
def test_what_a_program_cannot_know(function: Callable[[torch.Tensor], torch.Tensor], message: str) -> None:
    with pytest.raises(poptorch.Error, match=message):
        poptorch.inferenceModel(function, poptorch.Options().keptPrograms(1))(_x)


# What PyTorch does not differentiate ----------------------------------------------------------------------------------


def _clamped(model: Model, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        model.w.clamp_(-1, 1)
    return model.w * x


def _normalised(model: Model, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        model.w.div_(model.w.norm()).add_(0.1)
    return model.w * x


def _through_a_view(model: Model, x: torch.Tensor) -> torch.Tensor:
    part = model.w[1:]
    with torch.no_grad():
        model.w[0] = 3
        part.mul_(2)
    return model.w * x * part.sum()


def _of_a_result(model: Model, x: torch.Tensor) -> torch.Tensor:
    y = model.w * x
    with torch.no_grad():
        y.mul_(3)
    return y


def _other_data(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.w.data = model.w.data.clamp(-1, 1)
    model.seen.data = model.seen * 0.5 + x
    return model.w * x * model.seen


def _data_for_a_while(model: Model, x: torch.Tensor) -> torch.Tensor:
    backup, seen = model.w.data, model.w.view(-1)
    model.w.data = model.seen * 2
    result = model.w * x
    model.w.data = backup
    return result + model.w * seen.detach()


def _data_exchanged(model: Model, x: torch.Tensor) -> torch.Tensor:
    model.w.data, model.seen.data = model.seen.data, model.w.data
    return model.w * x * model.seen


def _overwritten_in_a_function(model: Model, x: torch.Tensor) -> torch.Tensor:
    return _Overwriting.apply(model.w * x)


def _by_a_gradient(model: Model, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_(True)
    (slope,) = torch.autograd.grad(torch.tanh(model.w * x).sum(), x, create_graph=True)
    return slope


class _Overwriting(torch.autograd.Function):
    """Says itself what its derivative is, as PyTorch would."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        x.add_(1)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, g: torch.Tensor) -> torch.Tensor:
        return 2 * g


class Model(torch.nn.Module):
    """A parameter and a buffer, with which something is done."""

    def __init__(self, function: Callable[[Model, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.tensor([2.0, -3.0, 0.5]))
        self.register_buffer("seen", torch.ones(3))
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return poptorch.identity_loss(self.function(self, x).square(), "sum")


@pytest.mark.thorough(but_each=4)
@pytest.mark.parametrize(
    "function",
    [
        _clamped,
        _normalised,
        _through_a_view,
        _of_a_result,
        _other_data,
        _data_for_a_while,
        _data_exchanged,
        _overwritten_in_a_function,
        _by_a_gradient,
    ],
)
def test_training_beside_pytorch(function: Callable[[Model, torch.Tensor], torch.Tensor]) -> None:
    """What is written under `no_grad` does not change what is differentiated; what is made by `grad` is."""
    ours, theirs = Model(function), Model(function)
    model = poptorch.trainingModel(ours, optimizer=torch.optim.SGD(ours.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for n in range(1, 4):
        x = torch.tensor([0.1, 0.2, 0.3]) * n
        optimizer.zero_grad()
        expected = theirs(x)
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(model(x), expected.detach())
    for name, expected in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], expected)


def test_data_of_another_shape() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        x.data = x.data.view(3, 2)
        return x * 1

    with pytest.raises(poptorch.Error, match="`.data` of a tensor of .2, 3. and torch.float32 is set to one of .3, 2."):
        poptorch.inferenceModel(function)(_x)
