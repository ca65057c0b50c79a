"""Models that look at numbers on the way: they are cut there, and go on with a program for what the host finds."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

import poptorch  # noqa: E402

X = torch.tensor([[1.5, -2.0, 0.5], [-1.0, 3.0, 2.5], [0.25, -0.5, -4.0], [2.0, 1.0, 1.0]])
LENGTHS = torch.tensor([2, 3, 1, 3])


def agree(ours: Any, expected: Any) -> None:
    """Whether results are equal, whatever holds them."""
    pairs = zip(pytree.tree_leaves(ours), pytree.tree_leaves(expected), strict=True)
    for mine, theirs in pairs:
        if isinstance(theirs, torch.Tensor):
            torch.testing.assert_close(mine, theirs.detach(), check_dtype=False, rtol=1e-5, atol=1e-5)
        else:
            assert mine == theirs


class Chosen(nn.Module):
    """The rows that count, between two layers; what is before is needed after it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(3, 5), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.before(x).relu()
        chosen = hidden[x.sum(1) > 1.2]
        return self.after(chosen) * torch.arange(2) + hidden.sum(), x.new_ones(2)


def test_rows_that_are_chosen() -> None:
    torch.manual_seed(0)
    model = Chosen()
    wrapped = poptorch.inferenceModel(model)
    for x in (X, -X, X.flip(0), torch.zeros_like(X)):  # two, one, two, none
        agree(wrapped(x), model(x))
    with torch.no_grad():
        model.after.weight.mul_(3)
    wrapped.copyWeightsToDevice()
    agree(wrapped(X), model(X))
    with pytest.raises(poptorch.Error, match="save: the model is not one program"):
        wrapped.save("somewhere")
    wrapped.destroy()


def halved(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """What is needed of the beginning depends on how it goes on."""
    first, second, times = x * 3, x.sum(0), 0
    while x.norm() > 3:
        x, times = x / 2, times + 1
    return (x + first if times > 1 else x + second), times


def attended(x: torch.Tensor) -> torch.Tensor:
    x = F.layer_norm(F.scaled_dot_product_attention(x[None], x[None], x[None]), (3,))
    x = F.group_norm(x.reshape(2, 6), 2)
    return x[x > 0.7]


CASES: dict[str, tuple[Callable[..., Any], list[tuple[Any, ...]]]] = {
    "a loop": (halved, [(X,), (X / 4,), (X * 2,), (X,)]),
    "nonzero and numbers": (lambda x: (x.nonzero(), x.max().item(), int(x.argmax())), [(X,), (X.clamp_min(0),)]),
    "attention and norms": (attended, [(X,)]),
    "unique": (lambda x: torch.unique(x, return_counts=True), [(LENGTHS,), (LENGTHS.clamp_max(2),)]),
    "repeat_interleave": (lambda x, n: x.repeat_interleave(n, 0) + 1, [(X, LENGTHS), (X, LENGTHS.flip(0))]),
    "one_hot": (lambda n: F.one_hot(n) * 2, [(LENGTHS,), (LENGTHS - 1,)]),
    "tolist": (lambda x, n: [part * 2 for part in x.flatten().split(n.tolist())], [(X[:3], LENGTHS)]),
}


@pytest.mark.parametrize("case", CASES)
def test_shapes_and_numbers(case: str) -> None:
    function, calls = CASES[case]
    wrapped = poptorch.inferenceModel(function)
    for call in calls:
        agree(wrapped(*call), function(*call))
    wrapped.destroy()


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        (nn.LSTM, 1),
        pytest.param(nn.LSTM, 2, marks=pytest.mark.thorough),
        pytest.param(nn.GRU, 2, marks=pytest.mark.thorough),
    ],
)
def test_packed_sequences(kind: type[nn.Module], layers: int) -> None:
    class Packing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = kind(2, 3, num_layers=layers, bidirectional=True, batch_first=True)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> Any:
            given = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            out, state = self.layers(given)
            return nn.utils.rnn.pad_packed_sequence(out, batch_first=True, padding_value=7.0), state

    torch.manual_seed(0)
    model, x = Packing(), torch.randn(4, 3, 2)
    lengths = torch.tensor([1, 3, 1, 3])
    agree(poptorch.inferenceModel(model)(x, lengths), model(x, lengths))


def test_arguments_that_are_overwritten() -> None:
    def function(x: torch.Tensor, seen: list[Any]) -> torch.Tensor:
        x[x > 1] *= 2
        return x.sum() if x.max().item() > 3 else x

    x, expected = X.clone(), X.clone()
    agree(poptorch.inferenceModel(function)(x, []), function(expected, []))
    agree(x, expected)


def test_no_more_programs_are_kept_than_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    wrapped = poptorch.inferenceModel(lambda x: x * x.sum().item(), poptorch.Options().keptPrograms(2))
    with caplog.at_level(logging.WARNING):
        for i in (1, 2, 1):
            agree(wrapped(torch.tensor([float(i)])), torch.tensor([float(i * i)]))
        assert not caplog.records
        for i in (3, 1, 2):
            agree(wrapped(torch.tensor([float(i)])), torch.tensor([float(i * i)]))
    (record,) = caplog.records
    assert "test_cuts.py" in record.getMessage() and "more than 2" in record.getMessage()


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x[x > 1]


def test_what_is_not_cut_says_so() -> None:
    with pytest.raises(poptorch.Error, match=r"test_cuts.py.*Each micro-batch would need.*deviceIterations\(1\)"):
        poptorch.inferenceModel(lambda x: x[x > 1], poptorch.Options().deviceIterations(2))(X)
    with pytest.raises(poptorch.Error, match="They cannot overwrite buffers, as it does with count"):
        poptorch.inferenceModel(Counting())(X)
    training = poptorch.trainingModel(lambda x: poptorch.identity_loss(x[x > 1], "sum"))
    with pytest.raises(poptorch.Error, match=r"shape of a tensor cannot depend.*`torch.where\(mask, x, 0\)`"):
        training(X)
