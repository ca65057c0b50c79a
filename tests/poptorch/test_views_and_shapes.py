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
        (lambda x: torch.bincount(x[0].long()), "bincount: without `minlength` the shape of the result depends"),
        (lambda x: x[x[0, 0].long()], "numbers in a tensor cannot be read.*`index_select`.*test_views_and_shapes.py"),
        (lambda x: torch.nn.functional.one_hot(x.long()), "numbers in a tensor cannot be read.*`num_classes`"),
        (lambda x: x * float(x.sum()), "numbers in a tensor cannot be read"),
        (
            lambda x: x.index_put((x[:, 0] > 0, x[:, 0].long()), x[0, 0]),
            "aten.index_put.*a mask stands beside other indices.*`torch.where`",
        ),
        (lambda x: x.resize_(3, 3) + 1, "A tensor of shape .3, 3. with the strides .3, 1., .* ends before"),
        (lambda x: x.view(torch.int16) + 1, "view: the numbers of .* have another size than"),
    ],
)
def test_what_a_program_cannot_know(function: Callable[[torch.Tensor], torch.Tensor], message: str) -> None:
    with pytest.raises(poptorch.Error, match=message):
        poptorch.inferenceModel(function)(_x)
