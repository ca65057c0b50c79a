"""What shares memory: parts of views that overlap themselves, arguments that are not contiguous, and the results of
functions that PyTorch returns as views, as the argument itself, or as new tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional as F  # noqa: E402  (they need torch)

import poptorch  # noqa: E402
from poptorch.capture.preserved_functions import PRESERVED_FUNCTIONS  # noqa: E402

Function = Callable[[torch.Tensor], Any]


def _same_layout(x: torch.Tensor) -> torch.Tensor:
    """A copy with memory of its own, in which it lies as `x` does in its own."""
    extent = x.storage_offset() + 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    memory = torch.as_strided(x, (extent,), (1,), 0).clone()
    return memory.as_strided(x.shape, x.stride(), x.storage_offset())


def _check(function: Callable[..., Any], *given: torch.Tensor) -> None:
    """Compare results, and what arguments hold afterwards, with PyTorch."""
    ours, theirs = list(map(_same_layout, given)), list(map(_same_layout, given))
    expected = function(*theirs)
    torch.testing.assert_close(poptorch.inferenceModel(function)(*ours), expected)
    torch.testing.assert_close(ours, theirs)


# Views that overlap themselves ----------------------------------------------------------------------------------------

_OVERLAPPING: list[Function] = [
    lambda y: y.view(1, 6).expand(3, 6)[1].fill_(9),
    lambda y: y.unfold(0, 3, 1)[1].fill_(9),
    lambda y: y.as_strided((3, 3), (1, 1))[2].copy_(torch.tensor([7.0, 8.0, 9.0])),
    lambda y: y.view(2, 3).t().unsqueeze(0).expand(4, 3, 2)[2, 1:].mul_(3),
    lambda y: y.view(2, 3).unfold(1, 2, 1).transpose(0, 2)[1, :, 0].add_(torch.tensor([10.0, 20.0])),
    lambda y: y.as_strided((2, 2, 2), (1, 2, 1), 1).flatten(1)[1].unfold(0, 2, 2)[0].fill_(9),
    lambda y: y[1:].unfold(0, 4, 1).diagonal().fill_(9),
    lambda y: y.unfold(0, 3, 1).copy_(torch.arange(12.0).view(4, 3)),
    lambda y: y.as_strided((2, 4), (1, 1)).copy_(torch.arange(8.0).view(2, 4)),
    lambda y: y.expand(3, 6).fill_(9),
    lambda y: y.unfold(0, 3, 1).mul_(2),
    lambda y: y.unfold(0, 4, 2).add_(torch.arange(8.0).view(2, 4)),
    lambda y: y.unfold(0, 3, 1).masked_fill_(torch.arange(12).view(4, 3) % 5 == 0, 9),
    lambda y: y.expand(2, 6).detach()[1, ::2].zero_(),
    lambda y: torch.view_as_real(torch.view_as_complex(y.view(3, 2)).expand(2, 3))[1, :, 0].fill_(9),
    lambda y: torch.view_as_complex(y.view(3, 2)).unfold(0, 2, 1)[1].conj().copy_(torch.tensor([1 + 2j, 3 + 4j])),
    lambda y: y.view(torch.int32).unfold(0, 2, 1)[3].copy_(torch.tensor([2.0, 3.0]).view(torch.int32)),
]


def test_writes_to_views_that_overlap() -> None:
    """The storage has each number once, whatever a view on the way repeats; all views of it see what was written."""

    def written(write: Function, x: torch.Tensor) -> list[torch.Tensor]:
        y = x * 1
        before, transposed = y.unfold(0, 2, 1), y.view(2, 3).t()
        write(y)
        return [y, before * 1, transposed * 1]

    _check(lambda x: [written(each, x) for each in _OVERLAPPING], torch.arange(6.0))


class _Weighted(torch.nn.Module):
    """A parameter, of what is made of which a part is overwritten."""

    def __init__(self, write: Function) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.arange(1.0, 7.0))
        self.register_buffer("row", torch.zeros(1, 3).expand(2, 3))
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.w * x
        self.write(y)
        self.row[1].add_(x[:3])  # all rows are one
        return poptorch.identity_loss((y * torch.arange(6.0)).sum() + (self.row * y[3:]).square().sum(), "none")


@pytest.mark.thorough(but_each=2)
@pytest.mark.parametrize("number", [0, 1, 4, 7, 11, 13])
def test_gradients_of_what_was_overwritten(number: int) -> None:
    ours, theirs = _Weighted(_OVERLAPPING[number]), _Weighted(_OVERLAPPING[number])
    model = poptorch.trainingModel(ours, optimizer=torch.optim.SGD(ours.parameters(), lr=0.01))
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.01)
    x = torch.tensor([0.5, -1.0, 2.0, 1.0, 0.25, -0.5])
    for _ in range(2):
        optimizer.zero_grad()
        expected = theirs(x)
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(model(x), expected.detach())
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value)


# Arguments that are not contiguous ------------------------------------------------------------------------------------

_x = torch.arange(24.0)
_ARGUMENTS = [
    _x.view(4, 6).t(),
    _x.view(2, 3, 4).permute(2, 0, 1),
    _x.view(4, 6)[1:, ::2],
    _x[3:].view(7, 3)[1:],
    _x[:3].view(3, 1).expand(3, 4),
    _x[:8].unfold(0, 4, 2),
]
"""Transposed, permuted, with gaps, with an offset, expanded, and windows."""


def _layout(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return torch.tensor([*x.stride(), *y.stride(), x.is_contiguous(), y.is_contiguous(), x.storage_offset()]) + x.sum()


def _strided(x: torch.Tensor) -> torch.Tensor:
    return x.as_strided((2, x.shape[0]), (x.stride(1), x.stride(0))) * 1


def _written_at_will(x: torch.Tensor) -> torch.Tensor:
    x.reshape(-1)[1:3].fill_(-1)
    x.contiguous().view(-1)[4] = -2
    x[:, 0].mul_(3)
    return x * 1


def _moved(x: torch.Tensor) -> torch.Tensor:
    y = x.data
    x.transpose_(0, 1)
    y[-1].fill_(5)
    return x * 1


@pytest.mark.parametrize("function", [_layout, _strided, _written_at_will])
def test_arguments_that_are_not_contiguous(function: Function) -> None:
    _check(lambda *given: list(map(function, given)), *_ARGUMENTS)


def test_arguments_that_are_moved() -> None:
    function = lambda *given: [_moved(x.view(x.shape)) for x in given]  # noqa: E731
    expected = function(*map(_same_layout, _ARGUMENTS))
    torch.testing.assert_close(poptorch.inferenceModel(function)(*map(_same_layout, _ARGUMENTS)), expected)


def test_views_that_no_argument_has() -> None:
    with pytest.raises(RuntimeError, match="view size is not compatible .* Use .reshape"):
        poptorch.inferenceModel(lambda x: x.view(-1) * 1)(_x.view(4, 6).t())
    with pytest.raises(poptorch.Error, match="which ends before, or has gaps there"):
        poptorch.inferenceModel(lambda x: x.as_strided((6,), (1,)) * 1)(_x.view(4, 6)[:, ::2])
    torch.testing.assert_close(
        poptorch.inferenceModel(lambda x: x.view(-1) * 1, poptorch.Options().deviceIterations(2))(_x.view(6, 4)),
        _x,
    )


# What functions return ------------------------------------------------------------------------------------------------


def _ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def _long(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def _recurrent(function: Callable[..., Any], gates: int) -> Function:
    weights = lambda: [_ones(3 * gates, 4), _ones(3 * gates, 3), _ones(3 * gates), _ones(3 * gates)]  # noqa: E731
    state = lambda: (_ones(1, 2, 3), _ones(1, 2, 3)) if gates == 4 else _ones(1, 2, 3)  # noqa: E731
    return lambda y: function(y.view(3, 2, 4), state(), weights(), True, 1, 0.0, False, False, False)


def _cell(function: Callable[..., Any], gates: int) -> Function:
    state = lambda: (_ones(6, 3), _ones(6, 3)) if gates == 4 else _ones(6, 3)  # noqa: E731
    return lambda y: function(y.view(6, 4), state(), _ones(3 * gates, 4), _ones(3 * gates, 3))


def _with_statistics(function: Callable[..., Any], *others: Any) -> Function:
    return lambda y: function(y.view(2, 3, 4), _ones(3), _ones(3), _ones(3), _ones(3), *others)


NEW, VIEW, ITSELF = "new", "a view", "the argument itself"

_RESULTS: dict[str, list[tuple[str, Function]]] = {
    "torch.l1_loss": [(NEW, lambda y: F.l1_loss(y, _ones(24), reduction="none"))],
    "torch.mse_loss": [(NEW, lambda y: F.mse_loss(y, _ones(24), reduction="none"))],
    "torch.smooth_l1_loss": [(NEW, lambda y: F.smooth_l1_loss(y, _ones(24), reduction="none", beta=0.0))],
    "torch.huber_loss": [(NEW, lambda y: F.huber_loss(y, _ones(24), reduction="none"))],
    "torch.soft_margin_loss": [(NEW, lambda y: F.soft_margin_loss(y, _ones(24), reduction="none"))],
    "torch.hinge_embedding_loss": [
        (NEW, lambda y: F.hinge_embedding_loss(y, _ones(24), reduction="none")),
        (NEW, lambda y: torch.hinge_embedding_loss(y, _ones(24))),
    ],
    "torch.margin_ranking_loss": [
        (NEW, lambda y: F.margin_ranking_loss(y, y, _ones(24), reduction="none")),
        (NEW, lambda y: torch.margin_ranking_loss(y, y, _ones(24))),
    ],
    "torch.cross_entropy": [(NEW, lambda y: F.cross_entropy(y.view(6, 4), _long(6), reduction="none"))],
    "torch.nll_loss": [(NEW, lambda y: F.nll_loss(y.view(24, 1), _long(24), reduction="none"))],
    "torch.binary_cross_entropy": [(NEW, lambda y: F.binary_cross_entropy(y / 24, _ones(24), reduction="none"))],
    "torch.binary_cross_entropy_with_logits": [
        (NEW, lambda y: F.binary_cross_entropy_with_logits(y, _ones(24), reduction="none")),
        (NEW, lambda y: torch.binary_cross_entropy_with_logits(y, _ones(24))),
    ],
    "torch.kl_div": [
        (NEW, lambda y: F.kl_div(y, _ones(24), reduction="none")),
        (NEW, lambda y: torch.kl_div(y, _ones(24))),
    ],
    "torch.poisson_nll_loss": [
        (NEW, lambda y: F.poisson_nll_loss(y, _ones(24), reduction="none")),
        (NEW, lambda y: torch.poisson_nll_loss(y, _ones(24), True, False, 1e-8, 0)),
    ],
    "torch.cosine_embedding_loss": [
        (NEW, lambda y: F.cosine_embedding_loss(y.view(6, 4), y.view(6, 4), _ones(6), reduction="none")),
        (NEW, lambda y: torch.cosine_embedding_loss(y.view(6, 4), y.view(6, 4), _ones(6))),
    ],
    "torch.triplet_margin_loss": [
        (NEW, lambda y: F.triplet_margin_loss(y.view(6, 4), _ones(6, 4), _ones(6, 4), reduction="none")),
        (NEW, lambda y: torch.triplet_margin_loss(y.view(6, 4), _ones(6, 4), _ones(6, 4))),
    ],
    "torch.multilabel_soft_margin_loss": [
        (NEW, lambda y: F.multilabel_soft_margin_loss(y.view(6, 4), _ones(6, 4), reduction="none"))
    ],
    "torch.gaussian_nll_loss": [
        (NEW, lambda y: F.gaussian_nll_loss(y.view(6, 4), _ones(6, 4), _ones(6, 4), reduction="none"))
    ],
    "torch.ctc_loss": [
        (NEW, lambda y: F.ctc_loss(y.view(4, 2, 3), _long(2, 2) + 1, _long(2) + 4, _long(2) + 2, reduction="none"))
    ],
    "torch.multilabel_margin_loss": [
        (NEW, lambda y: F.multilabel_margin_loss(y.view(6, 4), _long(6, 4), reduction="none"))
    ],
    "torch.multi_margin_loss": [(NEW, lambda y: F.multi_margin_loss(y.view(6, 4), _long(6), reduction="none"))],
    "torch.linear_cross_entropy": [
        (NEW, lambda y: F.linear_cross_entropy(y.view(6, 4), _ones(3, 4), _long(6), reduction="none"))
    ],
    "torch.batch_norm": [
        (NEW, lambda y: F.batch_norm(y.view(2, 3, 4), None, None, training=True)),
        (NEW, _with_statistics(torch.batch_norm, False, 0.1, 0.0, False)),
    ],
    "torch.native_batch_norm": [(NEW, _with_statistics(torch.native_batch_norm, False, 0.1, 0.0))],
    "torch.instance_norm": [
        (NEW, lambda y: F.instance_norm(y.view(2, 3, 4))),
        (NEW, _with_statistics(torch.instance_norm, True, 0.1, 1e-5, False)),
    ],
    "torch.layer_norm": [(NEW, lambda y: F.layer_norm(y.view(6, 4), (4,)))],
    "torch.group_norm": [(NEW, lambda y: F.group_norm(y.view(2, 3, 4), 3))],
    "torch.rms_norm": [(NEW, lambda y: F.rms_norm(y.view(6, 4), (4,)))],
    "torch.pad": [
        (NEW, lambda y: F.pad(y, (0, 0))),
        (NEW, lambda y: F.pad(y.view(1, 4, 6), (0, 0, 0, 0), "reflect")),
        (NEW, lambda y: F.pad(y.view(4, 6), (0, 0), "replicate")),
        (NEW, lambda y: F.pad(y.view(4, 6), (0, 0), "circular")),
    ],
    "torch.quantile": [(NEW, lambda y: torch.quantile(y.view(24, 1), 0.5, -1))],
    "torch.nanquantile": [(NEW, lambda y: y.view(24, 1).nanquantile(0.5, -1))],
    "torch.bincount": [(NEW, lambda y: torch.bincount(_long(24), y, minlength=24))],
    "torch.cov": [(NEW, lambda y: torch.cov(y.view(4, 6)))],
    "torch.corrcoef": [(NEW, lambda y: y.view(4, 6).corrcoef())],
    "aten.linalg_lstsq": [(NEW, lambda y: torch.linalg.lstsq(torch.eye(4), y.view(4, 6))[0])],
    "torch.grouped_mm": [(NEW, lambda y: F.grouped_mm(y.view(2, 3, 4), torch.eye(4).expand(2, 4, 4) * 1))],
    "torch.combinations": [(NEW, lambda y: torch.combinations(y, 1)), (NEW, lambda y: torch.combinations(y[:2]))],
    "torch.linear": [(NEW, lambda y: F.linear(y.view(6, 4), torch.eye(4)))],
    "torch.bilinear": [(NEW, lambda y: F.bilinear(y.view(24, 1), _ones(24, 1), _ones(1, 1, 1)))],
    "torch.matmul": [
        (NEW, lambda y: torch.matmul(y.view(6, 4), torch.eye(4))),
        (NEW, lambda y: y.view(24, 1) @ _ones(1, 1)),
    ],
    "torch.einsum": [
        (VIEW, lambda y: torch.einsum("ii->i", y[:16].view(4, 4))),
        (VIEW, lambda y: torch.einsum("ij->ji", y.view(4, 6))),
        (VIEW, lambda y: torch.einsum("...", y)),
        (VIEW, lambda y: torch.einsum("iij->ji", y[:18].view(3, 3, 2))),
        (NEW, lambda y: torch.einsum("ij->i", y.view(24, 1))),
        (NEW, lambda y: torch.einsum("ij->i", y.view(12, 2))),
        (NEW, lambda y: torch.einsum("i,->i", y, _ones())),
        (NEW, lambda y: torch.einsum("ij,jk->ik", y.view(6, 4), torch.eye(4))),
    ],
    "torch.softmax": [(NEW, lambda y: F.softmax(y, 0)), (NEW, lambda y: y.softmax(0, torch.float32))],
    "torch.log_softmax": [(NEW, lambda y: F.log_softmax(y, 0)), (NEW, lambda y: torch.log_softmax(y, 0))],
    "torch.scaled_dot_product_attention": [
        (NEW, lambda y: F.scaled_dot_product_attention(_ones(2, 1, 4), _ones(2, 1, 4), y[:8].view(2, 1, 4)))
    ],
    "torch.multi_head_attention_forward": [
        (
            NEW,
            lambda y: F.multi_head_attention_forward(
                *[y.view(6, 4)] * 3, 4, 1, _ones(12, 4), _ones(12), None, None, False, 0.0, torch.eye(4), _ones(4)
            )[0],
        )
    ],
    "torch.lstm": [(NEW, _recurrent(torch.lstm, 4))],
    "torch.gru": [(NEW, _recurrent(torch.gru, 3))],
    "torch.rnn_tanh": [(NEW, _recurrent(torch.rnn_tanh, 1))],
    "torch.rnn_relu": [(NEW, _recurrent(torch.rnn_relu, 1))],
    "torch.lstm_cell": [(NEW, _cell(torch.lstm_cell, 4))],
    "torch.gru_cell": [(NEW, _cell(torch.gru_cell, 3))],
    "torch.rnn_tanh_cell": [(NEW, _cell(torch.rnn_tanh_cell, 1))],
    "torch.rnn_relu_cell": [(NEW, _cell(torch.rnn_relu_cell, 1))],
    "torch.dropout": [
        (ITSELF, lambda y: F.dropout(y, 0.0)),
        (ITSELF, lambda y: F.dropout(y, 0.5, training=False)),
        (ITSELF, lambda y: F.dropout(y, 0.0, inplace=True)),
        (ITSELF, lambda y: F.dropout(y, 1.0, inplace=True)),
        (NEW, lambda y: F.dropout(y, 1.0)),
    ],
    "torch.embedding": [(NEW, lambda y: F.embedding(torch.arange(6), y.view(6, 4)))],
}
"""What functions that are kept whole return, by their names, for an argument of 24 numbers."""

_OTHERS: list[tuple[str, Function]] = [
    (ITSELF, torch.nn.Identity()),
    (ITSELF, lambda y: y.contiguous()),
    (ITSELF, lambda y: y.to(torch.float32)),
    (ITSELF, lambda y: y.float().cpu().type_as(y)),
    (ITSELF, lambda y: F.alpha_dropout(y, 0.5, training=False)),
    (VIEW, lambda y: F.dropout1d(y.view(4, 6), 0.5, training=False)),
    (ITSELF, lambda y: torch.atleast_1d(y)),
    (ITSELF, lambda y: y.flatten()),
    (ITSELF, lambda y: torch.real(y)),
    (ITSELF, lambda y: y.resolve_conj().resolve_neg().requires_grad_(False)),
    (ITSELF, lambda y: torch.as_tensor(y)),
    (VIEW, lambda y: y.reshape(4, 6)),
    (VIEW, lambda y: y.ravel().view_as(y)),
    (VIEW, lambda y: torch.atleast_3d(y)),
    (VIEW, lambda y: torch.broadcast_tensors(y, _ones(2, 24))[0][1]),
    (VIEW, lambda y: torch.movedim(y.view(4, 6), 0, 1)),
    (VIEW, lambda y: y[:16].view(4, 4).diagonal()),
    (VIEW, lambda y: y.view(4, 6).T),
    (VIEW, lambda y: y.chunk(5)[4]),
    (VIEW, lambda y: y.split([4, 20])[1]),
    (VIEW, lambda y: torch.tensor_split(y, 5)[2]),
    (VIEW, lambda y: torch.hsplit(y.view(4, 6), 2)[1]),
    (VIEW, lambda y: y.unflatten(0, (4, -1))),
    (VIEW, lambda y: torch.meshgrid(y, _ones(2), indexing="ij")[0][:, 1]),
    (VIEW, lambda y: torch.view_as_complex(y.view(12, 2)).imag),
    (ITSELF, lambda y: y.sum_to_size(24)),
    (VIEW, lambda y: y[...]),
    (VIEW, lambda y: y.squeeze()),
    (VIEW, lambda y: torch.positive(y).expand(24)),
    (VIEW, lambda y: torch.unsafe_chunk(y, 2)[0]),
    (VIEW, lambda y: torch.nn.Unflatten(0, (4, 6))(y)),
    (NEW, lambda y: F.channel_shuffle(y.view(1, 4, 2, 3), 1)),
    (NEW, lambda y: F.channel_shuffle(y.view(1, 4, 2, 3), 2)),
    (NEW, lambda y: F.pixel_shuffle(y.view(1, 4, 2, 3), 1)),
    (NEW, lambda y: F.pixel_unshuffle(y.view(1, 4, 2, 3), 1)),
    (NEW, lambda y: y.repeat(1)),
    (NEW, lambda y: y.roll(0)),
    (NEW, lambda y: y.flip([])),
    (NEW, lambda y: torch.rot90(y.view(4, 6), 0)),
    (NEW, lambda y: torch.cat([y])),
    (NEW, lambda y: torch.diag(y[:16].view(4, 4))),
    (NEW, lambda y: y.view(4, 6).index_select(0, torch.arange(4))),
    (NEW, lambda y: y[torch.arange(24)]),
    (NEW, lambda y: torch.where(y > -1, y, y)),
    (NEW, lambda y: torch.nan_to_num(y)),
    (NEW, lambda y: F.interpolate(y.view(1, 4, 6), scale_factor=1.0)),
    (NEW, lambda y: F.avg_pool1d(y.view(1, 4, 6), 1)),
    (NEW, lambda y: torch.matrix_power(y[:16].view(4, 4), 1)),
    (NEW, lambda y: y.view(24, 1).sum(1)),
    (NEW, lambda y: y**1),
    (NEW, lambda y: y.to(torch.float32, copy=True)),
    (NEW, lambda y: torch.view_copy(y, (24,))),
    (NEW, lambda y: torch.relu(y)),
]
"""The same of functions that are taken apart, and of modules."""


def test_functions_kept_whole_are_all_listed() -> None:
    assert {each.op for each in PRESERVED_FUNCTIONS} == set(_RESULTS)


_CASES = [case for cases in _RESULTS.values() for case in cases] + _OTHERS


@pytest.mark.parametrize("first", range(0, len(_CASES), 25))
def test_results_share_memory_as_in_pytorch(first: int) -> None:
    """What is written to a result shows in the argument, if that is the result, or looks at the same memory."""
    cases = _CASES[first : first + 25]

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        found = []
        for _, each in cases:
            y = x * 1
            result = each(y)
            made = result[0] if isinstance(result, tuple) else result
            made.fill_(-1)
            found += [y, torch.tensor(made is y)]
        return found

    def kind(y: torch.Tensor, result: torch.Tensor) -> str:
        if result is y:
            return ITSELF
        return VIEW if result.untyped_storage().data_ptr() == y.untyped_storage().data_ptr() else NEW

    x = torch.arange(24.0)
    for said, each in cases:
        y = x * 1
        result = each(y)
        assert kind(y, result[0] if isinstance(result, tuple) else result) == said
    torch.testing.assert_close(poptorch.inferenceModel(function)(x), function(x))
