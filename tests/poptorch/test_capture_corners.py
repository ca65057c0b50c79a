"""Corners of capturing: tensors that are kept, numbers that are known, gradients within `forward`, transforms."""

# ruff: noqa: E402 - poptorch needs torch

from __future__ import annotations

import copy
import io
import math
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from torch.autograd import forward_ad

import poptorch
import popxl

F = torch.nn.functional
Function = Callable[..., Any]


def _input(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _agrees(function: Function, *inputs: torch.Tensor) -> None:
    """Check that a wrapped function does what it does by itself, to its inputs too."""
    given, expected = [t.clone() for t in inputs], [t.clone() for t in inputs]
    options = poptorch.Options().showCompilationProgressBar(False)
    result = poptorch.inferenceModel(function, options)(*given)
    torch.testing.assert_close((result, given), (function(*expected), expected), check_dtype=False)


# Tensors that are kept ------------------------------------------------------------------------------------------------


def _mask(n: int) -> torch.Tensor:
    return torch.triu(torch.ones(n, n), 1)


@lru_cache
def _table(n: int) -> torch.Tensor:
    table = torch.zeros(n)
    table[1:].fill_(2)
    return table.mul_(3)


_kept: dict[str, torch.Tensor] = {}


class Keeping(torch.nn.Module):
    """It keeps what it has made, in all the places there are."""

    of_the_class: dict[int, torch.Tensor] = {}

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 3)
        self.masks: dict[int, torch.Tensor] = {}
        self.seen: list[torch.Tensor] = []
        self.nested: dict[str, Any] = {"sizes": [set()]}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[-1]
        hidden = self.linear(x) @ self.masks.setdefault(n, _mask(n)) + _table(n)
        hidden = hidden * self.of_the_class.setdefault(n, torch.arange(n) + 1)
        row = _kept.setdefault("row", torch.ones_like(x).cumsum(0)[1])
        self.seen.append(hidden)
        self.last = hidden
        self.nested["sizes"][0].add(n)
        return poptorch.identity_loss(hidden * row, "none")


@pytest.fixture
def _nothing_kept() -> Iterator[None]:
    yield
    _table.cache_clear()
    _kept.clear()
    Keeping.of_the_class.clear()


@pytest.mark.usefixtures("_nothing_kept")
def test_tensors_that_a_model_keeps_have_numbers() -> None:
    model, x = Keeping(), _input(2, 3)
    training = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    first = training(x)
    assert (model.masks, model.seen, model.nested) == ({}, [], {"sizes": [set()]})
    inference = poptorch.inferenceModel(model)
    for result in (inference(x), model(x), training(x)):
        torch.testing.assert_close(result, first)
    for kept in (*model.masks.values(), _table(3), *Keeping.of_the_class.values(), *_kept.values()):
        assert type(kept) is torch.Tensor
    torch.testing.assert_close(_table(3), torch.tensor([0.0, 6.0, 6.0]))
    training.destroy()
    torch.testing.assert_close(training(x), first)


def test_tensors_kept_by_a_model_that_failed_have_numbers() -> None:
    kept: dict[str, torch.Tensor] = {}

    def function(x: torch.Tensor) -> torch.Tensor:
        mask = kept.setdefault("mask", _mask(3))
        return x @ mask if len(x) == 2 else x * x.sum().item()

    with pytest.raises(poptorch.Error):
        poptorch.inferenceModel(function, poptorch.Options().keptPrograms(1))(_input(3, 3))
    _agrees(function, _input(2, 3))
    torch.testing.assert_close(kept["mask"], _mask(3))


def test_a_tensor_of_an_input_that_is_kept_is_refused_the_next_time() -> None:
    kept: dict[str, torch.Tensor] = {}

    def function(x: torch.Tensor) -> torch.Tensor:
        return x + kept.setdefault("x", x * 2)

    poptorch.inferenceModel(function)(_input(2))
    with pytest.raises(poptorch.Error, match="when the model was compiled before, and kept since"):
        poptorch.inferenceModel(function)(_input(2))


class Carrying(torch.nn.Module):
    """It means to carry numbers from run to run, by attributes that are no buffers."""

    def __init__(self, change: Function) -> None:
        super().__init__()
        self.layer, self.change = torch.nn.GRU(3, 3), change
        self.mean, self.means, self.table = torch.ones(3), [torch.zeros(3)], torch.zeros(1)
        self.state, self.last = (torch.zeros(1, 2, 3), 0), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.change(self, x)


def _averaged(module: Carrying, x: torch.Tensor) -> torch.Tensor:
    module.mean = module.mean * 0.9 + x.mean((0, 1))
    return x - module.mean


def _averaged_in_place(module: Carrying, x: torch.Tensor) -> torch.Tensor:
    return x - module.mean.mul_(0.9).add_(x.mean((0, 1)))


def _averaged_in_a_list(module: Carrying, x: torch.Tensor) -> torch.Tensor:
    module.means[0] = module.means[0] + x.mean((0, 1))
    return x - module.means[0]


def _recurrent(module: Carrying, x: torch.Tensor) -> torch.Tensor:
    y, state = module.layer(x, module.state[0])
    module.state = state, module.state[1] + 1
    return y


def _longer(module: Carrying, x: torch.Tensor) -> torch.Tensor:
    module.last = x if module.last is None else torch.cat([module.last, x])
    return module.last.sum(0)


def _made_once(module: Carrying, x: torch.Tensor) -> torch.Tensor:
    module.table = torch.arange(3.0) + 1
    if module.last is None:
        module.last = torch.ones(3, 3).triu()
    return x * module.table @ module.last * module.mean


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (_averaged, "mean"),
        (_averaged_in_place, "mean"),
        (_averaged_in_a_list, "means[0]"),
        (_recurrent, "state"),
        (_longer, "last"),
        (_made_once, ""),
    ],
)
def test_attributes_that_carry_nothing_are_told_once(
    change: Function, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    module, x = Carrying(change), _input(4, 2, 3)
    expected = Carrying(change)
    expected.load_state_dict(module.state_dict())
    for _ in range(2):
        model = poptorch.inferenceModel(module)
        first = model(x)
        torch.testing.assert_close(model(x), first)
    torch.testing.assert_close(first, expected(x).detach())
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == bool(name) and all(f"`forward` changes model.{name} (test_" in text for text in told)


# Numbers that are known -----------------------------------------------------------------------------------------------


def _at_a_mask_written_before(x: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(3, 4)
    mask.view(-1)[::5].fill_(0)
    mask[0] *= 0
    return x[mask > 0]


def _written_at_a_mask(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:, torch.tensor([True, False, True, False])] = torch.ones(3, 2)
    y[torch.eye(3, 4) > 0] = 5
    return y


@pytest.mark.thorough(but_each=6)
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[:, torch.tensor([True, False, True, True])],
        lambda x: x[torch.ones(3, 4).triu(1).bool()],
        lambda x: x[:, torch.arange(4) % 2 == 0],
        lambda x: x[torch.tensor([0, 2]), torch.tensor([True, False, False, True])],
        lambda x: x[torch.where(torch.eye(3, 4) > 0)],
        lambda x: x[torch.ones_like(x).triu().bool()],
        _at_a_mask_written_before,
        _written_at_a_mask,
        lambda x: x.masked_select(torch.arange(4) > 1),
        lambda x: x.repeat_interleave(torch.tensor([1, 2, 0, 3]), dim=1),
        lambda x: x[:, torch.unique(torch.tensor([0, 2, 2]))],
        lambda x: x * F.softmax(F.pad(torch.arange(3.0), (0, 1)), dim=0).max().item(),
        lambda x: x * sum(torch.arange(3).mul(2).tolist()),
        lambda x: F.pad(x, (torch.tensor(1), torch.arange(3).sum()), "reflect"),
        lambda x: x[: int(torch.ones(4).sum() * 0.5)],
        lambda x: x if torch.equal(torch.ones(2), torch.ones(2)) else x * 2,
        lambda x: x if torch.ones(2).all() else x * 2,
        lambda x: sum(x * p.item() for p in torch.linspace(0, 1, 4)),
    ],
)
def test_numbers_that_depend_on_no_input(function: Function) -> None:
    _agrees(function, _input(3, 4))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * torch.rand(3, 4).sum().item(),
        lambda x: x * torch.empty(4).normal_().sum().item(),
        lambda x: x * torch.zeros(4).copy_(x[0]).sum().item(),
        lambda x: x * F.dropout(torch.ones(4)).sum().item(),
    ],
)
def test_numbers_that_only_a_run_knows(function: Function) -> None:
    with pytest.raises(poptorch.Error, match="numbers in a tensor cannot be read"):
        poptorch.inferenceModel(function, poptorch.Options().keptPrograms(1))(_input(3, 4))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.from_numpy(x.numpy()),
        lambda x: np.exp(x) + x,
        lambda x: x if f"{x[0, 0]:.2f}" else x,
        lambda x: x * x.tolist()[0][0],
        lambda x: x * x.data_ptr(),
        lambda x: torch.FloatTensor([x.sum(), 2.0]),
        lambda x: torch.save({"x": x * 2}, io.BytesIO()),
        lambda x: poptorch.fps(x, x.long()[0]),
    ],
)
def test_numbers_that_leave_pytorch(function: Function) -> None:
    with pytest.raises(poptorch.Error, match="numbers in a tensor cannot be read.*test_capture_corners.py"):
        poptorch.inferenceModel(function, poptorch.Options().keptPrograms(1))(_input(3, 4))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.tensor([x.mean(), x.std()], device=x.device) * x[:, :2],
        lambda x: torch.tensor([[x[0, 0], 2], (3, x[1, :1])]),
        lambda x: torch.tensor(list(x.long().sum(0)), dtype=torch.float32),
        lambda x: torch.tensor([torch.tensor(1, dtype=torch.float16), 2]) + torch.as_tensor([x.long()[0, 0], 0.5]),
        lambda x: torch.asarray((x.sum(), True)) + x.new_tensor([1, x.long().sum()]),
    ],
)
def test_tensors_of_lists_that_hold_tensors(function: Function) -> None:
    _agrees(function, _input(3, 4))


def test_no_gradients_flow_through_lists_of_numbers() -> None:
    module, x = torch.nn.Linear(4, 1), _input(3, 4)
    weight = module.weight.detach().clone().requires_grad_()
    (F.linear(x, weight).sum() * torch.tensor([weight.detach().sum(), 1.0]).sum()).backward()

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            factor = torch.tensor([self.layer.weight.sum(), 1.0]).sum()
            return poptorch.identity_loss(F.linear(x, self.layer.weight).sum() * factor, "none")

    before = module.weight.detach().clone()
    poptorch.trainingModel(Model(), optimizer=torch.optim.SGD([module.weight], lr=0.5))(x)
    assert weight.grad is not None
    torch.testing.assert_close(module.weight.detach(), before - 0.5 * weight.grad)


def test_splits_are_tuples() -> None:
    split = poptorch.inferenceModel(lambda x: (torch.tensor_split(x, 2), x.tensor_split((1,), 1)))(_input(3, 4))
    assert [type(each) for each in split] == [tuple, tuple]


def test_constants_that_leave_pytorch() -> None:
    _agrees(lambda x: x * float(torch.arange(3).numpy().sum()) + len(f"{torch.ones(()):.2f}"), _input(2))
    _agrees(lambda x: copy.deepcopy([x, x])[1].add_(1) * x, _input(2))


def test_shallow_copies_share_memory() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        copy.copy(x)[0] = 3
        return x

    _agrees(function, _input(2))


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize(
    "use",
    [
        lambda x: torch.sparse.mm(x.to_sparse(), x),
        lambda x: torch.sparse_coo_tensor([[0, 1], [1, 2]], x[0, :2], (3, 3)) @ x,
        lambda x: torch.eye(3).to_sparse_csr() @ x,
    ],
)
def test_sparse_tensors_are_refused(use: Function) -> None:
    with pytest.raises(poptorch.Error, match=r"tensor of \(3, 3\) is sparse .*_corners.py:\d+\).*index_add"):
        poptorch.inferenceModel(use)(_input(3, 3))


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_arguments_and_buffers_are_refused(layout: torch.layout) -> None:
    adjacency = torch.eye(3).to_sparse(layout=layout)
    with pytest.raises(poptorch.Error, match=f"argument a has the layout {layout}"):
        poptorch.inferenceModel(lambda a, x: a.to_dense() @ x)(adjacency, _input(3, 3))
    model = torch.nn.Linear(3, 2)
    model.register_buffer("adjacency", adjacency)
    with pytest.raises(poptorch.Error, match=rf"tensor of \(3, 3\) is sparse \({layout}"):
        poptorch.inferenceModel(model)(_input(4, 3))


def test_operators_in_place_of_a_part_of_what_an_op_gives() -> None:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        x = x + 1
        x -= x.max(1, keepdim=True).values  # nothing reads the indices
        x /= x.min(1, keepdim=True)[0]
        return x

    x = _input(3, 4)
    torch.testing.assert_close(poptorch.inferenceModel(scaled)(x), scaled(x))


@pytest.mark.parametrize("wrap", [poptorch.inferenceModel, poptorch.trainingModel])
def test_lazy_modules_run_once_before(wrap: Callable[..., Any]) -> None:
    model = torch.nn.Sequential(torch.nn.LazyLinear(2), torch.nn.LazyLinear(1))
    wrapped = wrap(model)
    with pytest.raises(
        poptorch.Error, match=r"0\.weight, 0\.bias, 1\.weight, 1\.bias have no shape yet.*`module\(x\)`"
    ):
        wrapped(_input(4, 3))
    expected = model(_input(4, 3)).detach()
    torch.testing.assert_close(poptorch.inferenceModel(model)(_input(4, 3)), expected)


def test_functions_of_functions_are_refused() -> None:
    with pytest.raises(poptorch.Error, match=r"Unsupported function cond .*torch\.where.*poptorch\.cond"):
        poptorch.inferenceModel(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)))(_input(3))


def test_nested_tensors_are_refused() -> None:
    with pytest.raises(poptorch.Error, match="Unsupported op aten._nested_tensor_from_tensor_list"):
        poptorch.inferenceModel(lambda x: torch.nested.nested_tensor([x, x[:1]]).sum())(_input(2, 3))


@pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated")
def test_modules_of_jit_are_refused_when_they_are_wrapped() -> None:
    with pytest.raises(poptorch.Error, match="Linear is a module that `torch.jit` has made"):
        poptorch.inferenceModel(torch.nn.Sequential(torch.jit.script(torch.nn.Linear(2, 3))))


class Late(torch.nn.Module):
    """Makes a table in `forward`, for a shape that it has not seen."""

    def __init__(self, positions: torch.Tensor | None, make: Function) -> None:
        super().__init__()
        self.register_buffer("positions", positions, persistent=False)
        self.make = make

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.positions is None or len(self.positions) != len(x):
            self.positions = self.make(x)
        return x + self.positions


def test_a_buffer_that_forward_makes() -> None:
    make = lambda x: torch.arange(1.0, 1 + len(x))  # noqa: E731
    for before in (None, torch.zeros(1)):
        module, x = Late(before, make), _input(3)
        ours = poptorch.inferenceModel(module)
        for _ in range(2):
            torch.testing.assert_close(ours(x), x + make(x))
        assert module.positions is before


def test_a_buffer_that_forward_makes_of_what_a_run_brings() -> None:
    with pytest.raises(poptorch.Error, match="Buffer positions is None, and is made within the model.*`__init__`"):
        poptorch.inferenceModel(Late(None, lambda x: x * 2))(_input(3))
    with pytest.raises(poptorch.Error, match="Buffer positions is reassigned within the model"):
        poptorch.inferenceModel(Late(torch.zeros(1), lambda x: x * 2))(_input(3))

    class Alternating(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("last", torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x + self.last
            self.last = torch.zeros(3)
            return y

    with pytest.raises(poptorch.Error, match="Buffer last is reassigned within the model"):
        poptorch.inferenceModel(Alternating())(_input(3))


class Turned(torch.nn.Module):
    """It changes in place which numbers its buffer has where."""

    def __init__(self, shape: tuple[int, ...], change: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.change = change
        self.register_buffer("table", torch.arange(6.0)[: math.prod(shape)].reshape(shape))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change(self.table)
        return x + self.table[0, 0]


@pytest.mark.parametrize(
    ("change", "shape"),
    [
        (lambda t: t.t_(), [3, 2]),
        (lambda t: t.unsqueeze_(0).squeeze_(-1), [1, 2, 3]),
        (lambda t: t.resize_(3, 2), [3, 2]),
        (lambda t: t.as_strided_((2, 2), (3, 1)), [2, 2]),
    ],
)
def test_a_buffer_keeps_its_shape(change: Callable[[torch.Tensor], object], shape: list[int]) -> None:
    words = rf"Buffer table has the shape \[2, 3\], and `forward` leaves it with {re.escape(str(shape))}"
    with pytest.raises(poptorch.Error, match=rf"{words} \(test_capture_corners\.py:\d+\)"):
        poptorch.inferenceModel(Turned((2, 3), change))(_input(3))
    turned_back = Turned((2, 3), lambda t: t.t_().add_(1).t_())
    square = Turned((2, 2), lambda t: t.t_().add_(1))
    for module in (turned_back, square):
        theirs, ours = copy.deepcopy(module), poptorch.inferenceModel(module)
        for _ in range(2):
            torch.testing.assert_close(ours(_input(3)), theirs(_input(3)))
        torch.testing.assert_close(module.table, theirs.table)


def test_a_loss_of_which_nothing_is_returned() -> None:
    class Judged(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            F.mse_loss(self.w, x)
            return poptorch.identity_loss(self.w * x, "sum")

    module, x = Judged(), _input(3)
    wrapped = poptorch.trainingModel(module, optimizer=torch.optim.SGD(module.parameters(), lr=0.5))
    torch.testing.assert_close(wrapped(x), x.sum())
    torch.testing.assert_close(module.w.detach(), 1 - 0.5 * x)


class _Scored(torch.nn.Module):
    """Scores, and what a function makes of them."""

    def __init__(self, judge: Function) -> None:
        super().__init__()
        self.linear, self.judge = torch.nn.Linear(4, 3), judge

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        return self.judge(self.linear(x), labels)


def _told_of_another(judge: Function, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    module = _Scored(judge)
    poptorch.trainingModel(module)(_input(5, 4), torch.tensor([0, 2, 1, 1, 0]))
    return [text for record in caplog.records if "trained by its loss" in (text := record.getMessage())]


@pytest.mark.parametrize(
    ("op", "judge"),
    [
        ("mul", lambda z, y: F.cross_entropy(z, y) * 0.5),
        ("add", lambda z, y: (z, F.cross_entropy(z, y) + z.square().mean())),
        ("mean", lambda z, y: F.cross_entropy(z, y, reduction="none").mean()),
        ("add", lambda z, y: {"part": (part := F.cross_entropy(z, y)), "loss": part + z.mean()}),
        ("add", lambda z, y: ((part := F.cross_entropy(z, y)).detach(), part + z.mean())),
    ],
)
def test_what_is_done_to_a_loss_after_it_is_told(op: str, judge: Function, caplog: pytest.LogCaptureFixture) -> None:
    (told,) = _told_of_another(judge, caplog)
    assert f"aten.{op} (test_capture_corners.py:" in told and "torch.cross_entropy (test_capture_corners.py:" in told


@pytest.mark.parametrize(
    "judge",
    [
        lambda z, y: F.cross_entropy(z, y).mean().float().reshape(1),
        lambda z, y: F.cross_entropy(z, y, reduction="none").sum(),
        lambda z, y: ((loss := F.cross_entropy(z, y)), loss.exp(), loss.detach() * 3, (z.argmax(-1) == y).sum()),
        lambda z, y: (part := F.cross_entropy(z, y), poptorch.identity_loss(part + z.mean(), "none")),
    ],
)
def test_what_may_be_returned_beside_a_loss(judge: Function, caplog: pytest.LogCaptureFixture) -> None:
    assert not _told_of_another(judge, caplog)


# Rows that a tensor says ----------------------------------------------------------------------------------------------


def _written_at_rows(x: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    view = y[:, 1:]
    view[i, :, j] = torch.arange(2.0) + 7
    y[i] += 5
    y[:, j, torch.tensor([0, 2])] *= 2
    x[i, 0] = 0
    x[..., j] = y[..., i]
    return y


@pytest.mark.parametrize(
    "function",
    [
        lambda x, i, j: x[i],
        lambda x, i, j: x[:, i],
        lambda x, i, j: x[0, j, i],
        lambda x, i, j: x[None, i, None, ..., j],
        lambda x, i, j: x[i, torch.tensor([0, 2])],
        lambda x, i, j: x[i, :, torch.tensor([0, 2])],
        lambda x, i, j: x[torch.tensor([[0], [1]]), i, j],
        lambda x, i, j: x[torch.eye(2, 3) > 0, i.int()],
        _written_at_rows,
    ],
)
def test_rows_that_a_tensor_says(function: Function) -> None:
    _agrees(function, _input(2, 3, 4), torch.tensor(1), torch.tensor(-1))


def _written_through_rows(x: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> Any:
    y, k = x.clone(), i.clone()
    row, rows, old = y[k], y[..., j : j + 1], y[0, k]
    k.zero_()  # after it has been read
    row.add_(3)
    row[1:].zero_()
    rows[:, 1].fill_(5)
    y[i][j].mul_(2)
    x[:, j].copy_(y[:, i])
    torch.add(y[i, 0], 1, out=y[0, j])
    y[i, ::2] += old.sum()
    y[1] *= -1
    y.select(-1, j).sub_(1)
    torch.narrow(y, dim=1, start=i, length=2).mul_(3)
    y.narrow(0, i, 1).narrow(2, j - 1, 2).select(1, i - 1).neg_()
    return y, row, rows, old


def test_writes_through_rows_that_a_tensor_says() -> None:
    _agrees(_written_through_rows, _input(2, 3, 4), torch.tensor(1), torch.tensor(2))


def test_rows_that_a_tensor_says_in_functions_of_their_own() -> None:
    def step(x: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x[i].add_(x[1])
        x[i % 2, 1:].mul_(2)
        return x, (i + 1) % 3

    def repeated(x: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x * 1
        x, i = poptorch.for_loop(4, step, [x, i])
        x[i].add_(1)
        return x, i

    def expected(x: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x * 1
        for _ in range(4):
            x, i = step(x, i)
        x[i].add_(1)
        return x, i

    x, i = _input(3, 4), torch.tensor(2)
    results = poptorch.inferenceModel(repeated)(x, i)
    torch.testing.assert_close(results, expected(x, i), check_dtype=False)


class _RowDoubled(torch.autograd.Function):
    """Doubles a row, and its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y[i].mul_(2)
        ctx.save_for_backward(i)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient = gradient.clone()
        gradient[ctx.saved_tensors[0]].mul_(2)
        return gradient, None


class _RowsOfGradients(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = _RowDoubled.apply(self.linear(x), x[0, 0].gt(0).long() + 1)
        y = _RowDoubled.apply(y, x[0, 1].gt(0).long())
        return y, F.mse_loss(y, torch.ones_like(y))


def test_rows_of_gradients_that_a_tensor_says() -> None:
    _trains_as_eager(_RowsOfGradients, _input(3, 4))


class _Bank(torch.nn.Module):
    """A bank of features, one row of which each call replaces, and one of which it lowers."""

    def __init__(self) -> None:
        super().__init__()
        self.features = torch.nn.Linear(3, 4)
        self.register_buffer("bank", torch.zeros(5, 4))
        self.register_buffer("row", torch.tensor(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features, scores = self.features(x), torch.zeros(5, 4)
        scores[self.row].copy_(features[0])
        scores[self.row - 1].sub_(features[1])
        with torch.no_grad():
            self.bank[self.row].copy_(features[1])
            self.bank[-self.row].mul_(0.5)
            self.bank.narrow(0, self.row, 1).sub_(0.1)
            self.bank.select(0, self.row - 1).neg_()
            self.row.add_(1).remainder_(5)
        loss = F.mse_loss(scores * torch.arange(5.0)[:, None], self.bank)
        return scores, loss


def test_training_through_rows_that_a_tensor_says() -> None:
    torch.manual_seed(0)
    wrapped = _Bank()
    eager = copy.deepcopy(wrapped)
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
    training = poptorch.trainingModel(wrapped, optimizer=torch.optim.SGD(wrapped.parameters(), lr=0.1))
    for x in _input(4, 2, 3):
        optimizer.zero_grad()
        scores, loss = eager(x)
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(training(x), (scores.detach(), loss.detach()))
    torch.testing.assert_close(dict(wrapped.state_dict()), dict(eager.state_dict()), check_dtype=False)


# Gradients within `forward`, and functions that are transformed -------------------------------------------------------


class _Layers(torch.nn.Module):
    """Layers by name, and a gradient through one of them."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.name = name
        self.convolution = torch.nn.Conv2d(2, 4, 3, stride=(1, 2), padding=1, groups=2)
        self.transposed = torch.nn.ConvTranspose2d(2, 3, 3, stride=2, dilation=2, output_padding=1)
        self.norm = torch.nn.LayerNorm(6)
        self.lstm = torch.nn.LSTM(6, 3)
        self.attention = torch.nn.MultiheadAttention(6, 2)
        self.weight = torch.nn.Parameter(torch.randn(5, 6))
        self.product = torch.nn.Bilinear(6, 6, 3)

    def of(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        results: dict[str, Callable[[], torch.Tensor]] = {
            "convolution": lambda: self.convolution(x),
            "transposed": lambda: self.transposed(x),
            "layer norm": lambda: self.norm(x),
            "group norm": lambda: F.group_norm(x, 2),
            "batch norm": lambda: F.batch_norm(x, None, None, training=True),
            "lstm": lambda: self.lstm(rows[:4])[0],
            "attention": lambda: self.attention(rows, rows, rows)[0],
            "einsum": lambda: torch.einsum("ij,kj->ik", rows, self.weight),
            "cross entropy": lambda: F.cross_entropy(rows, torch.arange(len(rows)) % 6),
            "max pool": lambda: F.max_pool2d(x, 2, padding=1),
            "average pool": lambda: F.avg_pool2d(x, 3, 2, padding=1, ceil_mode=True, count_include_pad=False),
            "adaptive pool": lambda: F.adaptive_avg_pool2d(x, (3, 4)),
            "adaptive max pool": lambda: F.adaptive_max_pool2d(x, (3, 4)),
            "replicated": lambda: F.pad(x, (1, 2, 3, -1), mode="replicate"),
            "log sigmoid": lambda: F.logsigmoid(x),
            "shrunk": lambda: F.softshrink(x, 0.1) + F.hardshrink(x, 0.2),
            "bilinear layer": lambda: self.product(rows, rows.flip(0)),
            "bilinear": lambda: F.interpolate(x, size=(7, 5), mode="bilinear"),
            "nearest": lambda: F.interpolate(x, scale_factor=2, mode="nearest-exact"),
        }
        return results[self.name]()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad(self.of(x).pow(2).sum(), x, create_graph=True)
        return gradient, poptorch.identity_loss((gradient * x.detach()).tanh().sum(), "none")


@pytest.mark.thorough(but_each=10)
@pytest.mark.parametrize(
    "name",
    ["convolution", "transposed", "layer norm", "group norm", "batch norm", "lstm", "attention", "einsum",
     "cross entropy", "max pool", "average pool", "adaptive pool", "adaptive max pool", "replicated", "log sigmoid",
     "shrunk", "bilinear layer", "bilinear", "nearest"],
)  # fmt: skip
def test_gradients_within_forward(name: str) -> None:
    wrapped, eager, x = _Layers(name), _Layers(name), _input(2, 2, 5, 6)
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.01)
    training = poptorch.trainingModel(wrapped, optimizer=torch.optim.SGD(wrapped.parameters(), lr=0.01))
    gradient, loss = eager(x)
    torch.testing.assert_close(training(x), (gradient, loss), rtol=1e-3, atol=1e-4)
    if loss.requires_grad:
        loss.backward()
        optimizer.step()
    for name, expected in eager.named_parameters():
        torch.testing.assert_close(wrapped.get_parameter(name), expected, rtol=1e-3, atol=1e-4)


def test_backward_within_forward() -> None:
    layer = torch.nn.Linear(3, 2)

    def function(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().clone().requires_grad_()
        F.mse_loss(layer(x), torch.ones(4, 2)).backward()
        return x.grad

    _agrees(function, _input(4, 3))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: torch.vmap(lambda row: F.linear(row, w))(x),
        lambda x, w: torch.vmap(lambda row: F.softmax(row, -1))(x),
        lambda x, w: torch.func.grad(lambda x: (x[0] @ x[0].T).sum())(x),
        lambda x, w: torch.func.grad(lambda x: F.cross_entropy(x[0], torch.tensor([1, 0, 3])))(x),
        lambda x, w: torch.func.jacrev(lambda row: F.linear(row, w).tanh())(x[0, 0]),
        lambda x, w: torch.vmap(torch.func.grad(lambda row: F.layer_norm(row, (4,)).pow(3).sum()))(x),
    ],
)
def test_transformed_functions(function: Function) -> None:
    _agrees(function, _input(2, 3, 4), _input(5, 4))


def _with_dual_numbers(net: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(net(forward_ad.make_dual(x, x.cos()))).tangent


FORWARD_MODE: dict[str, Function] = {
    "jvp": lambda net, x: torch.func.jvp(net, (x,), (x.cos(),))[1],
    "jacfwd": lambda net, x: torch.vmap(torch.func.jacfwd(net))(x),
    "hessian": lambda net, x: torch.vmap(torch.func.hessian(net))(x),
    "of a constant": lambda net, x: torch.func.jvp(lambda y: net[0](x), (x,), (x,))[1].sum() + net(x),
    "dual numbers": _with_dual_numbers,
}


class _Derived(torch.nn.Module):
    """Its loss is made of derivatives in forward mode."""

    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way = way
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.LayerNorm(5), torch.nn.Linear(5, 2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        derivatives = FORWARD_MODE[self.way](self.net, x)
        return derivatives, poptorch.identity_loss(derivatives.square().mean(), "none")


class _Adversarial(torch.nn.Module):
    """A generator and its critic, which is frozen while the generator is judged."""

    def __init__(self, freeze: Function) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.freeze = freeze
        self.generator, self.critic = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)

    def forward(self, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.generator(z)
        self.freeze(self.critic, True)
        generator_loss = F.softplus(-self.critic(x)).mean()
        self.freeze(self.critic, False)
        critic_loss = F.softplus(self.critic(x.detach())).mean()
        return critic_loss, poptorch.identity_loss(generator_loss + critic_loss, "none")


def _freeze_each(module: torch.nn.Module, is_frozen: bool) -> None:
    for p in module.parameters():
        p.requires_grad = not is_frozen


def _trains_as_eager(make: Callable[[], torch.nn.Module], x: torch.Tensor) -> None:
    wrapped, eager = make(), make()
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
    options = poptorch.Options().showCompilationProgressBar(False)
    training = poptorch.trainingModel(wrapped, options, torch.optim.SGD(wrapped.parameters(), lr=0.1))
    for _ in range(2):
        optimizer.zero_grad()
        result = eager(x)
        result[-1].backward()
        optimizer.step()
        torch.testing.assert_close(training(x), result)
    torch.testing.assert_close(wrapped.state_dict(), eager.state_dict())


@pytest.mark.thorough(but_each=3)
@pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated")
@pytest.mark.parametrize("way", FORWARD_MODE)
def test_derivatives_in_forward_mode_are_trained(way: str) -> None:
    _trains_as_eager(lambda: _Derived(way), _input(4, 3))


@pytest.mark.parametrize("freeze", [lambda module, is_frozen: module.requires_grad_(not is_frozen), _freeze_each])
def test_what_is_frozen_for_a_part_of_forward(freeze: Function) -> None:
    _trains_as_eager(lambda: _Adversarial(freeze), _input(5, 3))


_SAVED: dict[str, tuple[Function, Function]] = {
    "in half": (lambda t: t.half(), lambda t: t.float()),
    "zeros": (torch.zeros_like, lambda t: t),
    "copies": (torch.clone, lambda t: t),
    "lists": (lambda t: [t.detach()], lambda kept: kept[0]),
}
"""Functions that pack what PyTorch saves for gradients. The last two change no numbers."""


class _Hooked(torch.nn.Module):
    """A model with a hook on gradients somewhere."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = torch.nn.Linear(2, 3)
        if kind == "parameter":
            self.linear.weight.register_hook(lambda gradient: None)
        if kind == "after a parameter":
            self.linear.bias.register_post_accumulate_grad_hook(lambda p: None)
        if kind == "module":
            self.linear.register_full_backward_hook(lambda module, into, out: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.kind == "tensor":
            y.register_hook(lambda gradient: None)
        if self.kind == "late":
            z = y.exp()
            y.register_hook(lambda gradient: gradient * z)
            y = y + z
        if self.kind == "node":
            y.grad_fn.register_hook(lambda into, out: None)
        if self.kind == "before a node":
            y.grad_fn.register_prehook(lambda out: None)
        if self.kind == "module in forward":
            self.linear.register_full_backward_hook(lambda module, into, out: None)
            self.linear(x)
        if self.kind == "saved":
            y = y.exp()
            y.grad_fn._raw_saved_result.register_hooks(lambda t: t * 0, lambda t: t)
        if self.kind in _SAVED:
            with torch.autograd.graph.saved_tensors_hooks(*_SAVED[self.kind]):
                y = y.exp()
        if self.kind == "on the host":
            with torch.autograd.graph.save_on_cpu():
                y = y.exp()
        loss = F.mse_loss(y, torch.ones_like(y))
        if self.kind == "loss":
            loss.register_hook(lambda gradient: gradient * 100)
        return loss


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("parameter", "The parameter linear.weight has hooks"),
        ("after a parameter", "The parameter linear.bias has hooks"),
        ("module", "The module linear has hooks"),
        ("tensor", r"A tensor of `forward` \(test_capture_corners.py:\d+\) has hooks"),
        ("late", r"A tensor of `forward` \(test_capture_corners.py:\d+\) has hooks"),
        ("loss", r"A tensor of `forward` \(test_capture_corners.py:\d+\) has hooks"),
        ("node", r"A `grad_fn` of `forward` \(test_capture_corners.py:\d+\) has hooks"),
        ("before a node", r"A `grad_fn` of `forward` \(test_capture_corners.py:\d+\) has hooks"),
        ("module in forward", r"A `grad_fn` of `forward` \(test_capture_corners.py:\d+\) has hooks"),
        ("saved", r"A tensor that PyTorch saves for gradients of `forward` \(.*:\d+\) has hooks"),
        ("in half", r"A tensor that PyTorch saves for gradients of `forward` \(.*:\d+\) has hooks"),
        ("zeros", r"A tensor that PyTorch saves for gradients of `forward` \(.*:\d+\) has hooks"),
    ],
)
def test_hooks_on_gradients_are_refused_where_a_model_is_trained(kind: str, where: str) -> None:
    with pytest.raises(poptorch.Error, match=f"{where} on gradients.*Write what they do into `forward`"):
        poptorch.trainingModel(_Hooked(kind))(_input(4, 2))


class _Doubled(torch.autograd.Function):
    """Identity, with twice the gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class _HooksOnTensors(torch.nn.Module):
    """Hooks that change gradients of parameters, of what is overwritten, seen in parts, and made by functions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(3, 4), torch.nn.Linear(4, 5)
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0, 0.5]))
        self.first.weight.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
        self.second.bias.register_hook(lambda gradient: gradient * torch.arange(5))
        self.second.bias.register_hook(lambda gradient: gradient + 0.1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.first(x)
        before = x.sin()
        x.register_hook(lambda gradient: gradient * self.mask)
        x.register_hook(lambda gradient: gradient * 9).remove()
        part = x[:, 1:3]
        part.register_hook(lambda gradient: gradient * part.detach().exp())
        y = _Doubled.apply(torch.cat([part, x[:, ::3]], 1) + before)
        y.register_hook(lambda gradient: gradient / (1 + gradient.norm()))
        y.mul_(3)
        y = self.second(y)
        y.register_hook(lambda gradient: gradient * 7)
        return y, F.mse_loss(y.tanh(), torch.ones_like(y))


def test_hooks_on_tensors_change_gradients() -> None:
    _trains_as_eager(_HooksOnTensors, _input(4, 3))


class _Equilibrium(torch.nn.Module):
    """The gradient of a fixed point is one, too: the hook that computes it differentiates one more step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into, self.step = torch.nn.Linear(3, 4), torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = torch.zeros(4, 4, device=x.device)
        with torch.no_grad():
            for _ in range(5):
                z = torch.tanh(self.step(z) + self.into(x))
        z = torch.tanh(self.step(z) + self.into(x))
        at = z.clone().detach().requires_grad_()
        after = torch.tanh(self.step(at) + self.into(x))

        def solve(gradient: torch.Tensor) -> torch.Tensor:
            found = gradient
            for _ in range(4):
                found = torch.autograd.grad(after, at, found, retain_graph=True)[0] + gradient
            return found

        z.register_hook(solve)
        return z, F.mse_loss(z, torch.ones_like(z))


def test_hooks_that_read_what_comes_of_a_detached_tensor() -> None:
    _trains_as_eager(_Equilibrium, _input(4, 3))


def test_hooks_on_gradients_do_nothing_where_there_are_none() -> None:
    model, x = _Hooked("tensor"), _input(4, 2)
    model.linear.register_full_backward_hook(lambda module, into, out: None)
    torch.testing.assert_close(poptorch.inferenceModel(model)(x), model(x).detach())


@pytest.mark.parametrize("kind", ["copies", "lists", "on the host"])
def test_saved_tensors_that_keep_their_numbers_may_be_packed(kind: str) -> None:
    ours, x = _Hooked(kind), _input(4, 2)
    theirs = copy.deepcopy(ours)
    poptorch.trainingModel(ours, optimizer=torch.optim.SGD(ours.parameters(), lr=0.1))(x)
    theirs(x).backward()
    torch.optim.SGD(theirs.parameters(), lr=0.1).step()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


def test_hooks_on_gradients_that_come_later_are_refused() -> None:
    model = _Hooked("none")
    training = poptorch.trainingModel(model)
    training(_input(4, 2))
    with pytest.raises(poptorch.Error, match="A parameter of the model has hooks.*after `destroy"):
        model.linear.weight.register_hook(lambda gradient: gradient * 100)
    training(_input(4, 2))  # it has been removed
    model.linear.register_full_backward_hook(lambda module, into, out: None)
    with pytest.raises(poptorch.Error, match="A module of the model has hooks"):
        training(_input(4, 2))


# Numbers of buffers ---------------------------------------------------------------------------------------------------


class _Counted(torch.nn.Module):
    """Reads buffers of the host while it is captured."""

    def __init__(self, writes: bool = False) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("mask", torch.tensor([True, False, True]), persistent=False)
        self.register_buffer("row", torch.tensor(1))
        self._writes = writes

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._writes:
            self.count += 1
        y = x
        for _ in range(self.count.item()):
            y = y + 1
        return y[:, self.mask] * float(self.count * 2), x[self.row]


def test_numbers_of_a_buffer_are_known(tmp_path: Path) -> None:
    module, x = _Counted(), _input(2, 3)
    model = poptorch.inferenceModel(module)
    torch.testing.assert_close(model(x), module(x))
    module.row.fill_(0)  # only a run reads it
    model.copyWeightsToDevice()
    torch.testing.assert_close(model(x), module(x))
    model.save(tmp_path / "model.poptorch")
    module.count.fill_(4)
    with pytest.raises(poptorch.Error, match="The buffer count is not what it was when.*destroy"):
        model.copyWeightsToDevice()
    model.destroy()
    torch.testing.assert_close(model(x), module(x))
    loaded = poptorch.load(tmp_path / "model.poptorch")
    with torch.no_grad():
        loaded.model.count.fill_(5)
    with pytest.raises(poptorch.Error, match="The buffer count is not what it was"):
        loaded.copyWeightsToDevice()


def test_numbers_of_a_buffer_that_is_written_are_not_known() -> None:
    with pytest.raises(poptorch.Error, match=r"The buffer count is needed here \(test_capture_corners.py:\d+\)"):
        poptorch.inferenceModel(_Counted(writes=True))(_input(2, 3))


# bfloat16 -------------------------------------------------------------------------------------------------------------


class _Narrow(torch.nn.Module):
    """A model in bfloat16 that keeps a running mean."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(3, 4)
        self.register_buffer("mean", torch.full((4,), 0.1))
        self.bfloat16()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y = self.linear(x).tanh()
        self.mean.lerp_(y.mean(0).detach(), 0.3)
        return y, x.float().mul(1.1).bfloat16().float(), F.mse_loss(y, torch.ones_like(y))


def test_a_model_in_bfloat16_gives_bfloat16(tmp_path: Path) -> None:
    def trained(steps: int, state: dict[str, torch.Tensor] | None = None) -> tuple[Any, ...]:
        module = _Narrow()
        module.load_state_dict(state or module.state_dict())
        model = poptorch.trainingModel(module, optimizer=torch.optim.SGD(module.parameters(), lr=0.3))
        results = [model(x) for _ in range(steps)]
        return model, results[-1], {name: t.clone() for name, t in module.state_dict().items()}

    x = _input(5, 3).bfloat16()
    model, (y, rounded, loss), whole = trained(4)
    assert (y.dtype, rounded.dtype, loss.dtype) == (torch.bfloat16, torch.float32, torch.bfloat16)
    assert torch.equal(rounded, x.float().mul(1.1).bfloat16().float())
    _, _, half = trained(2)
    assert all(torch.equal(t, whole[name]) for name, t in trained(2, half)[2].items())
    assert {t.dtype for t in whole.values()} == {torch.bfloat16}
    eager = _Narrow()
    optimizer = torch.optim.SGD(eager.parameters(), lr=0.3)
    for _ in range(4):
        optimizer.zero_grad()
        theirs = eager(x)
        theirs[-1].backward()
        optimizer.step()
    torch.testing.assert_close((y, loss), (theirs[0].detach(), theirs[-1].detach()), rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(whole, {n: t.detach() for n, t in eager.state_dict().items()}, rtol=2e-2, atol=1e-2)
    model.save(tmp_path / "model.poptorch")
    assert poptorch.load(tmp_path / "model.poptorch")(x)[0].dtype is torch.bfloat16


class _Mixed(torch.nn.Module):
    """Functions that are cast down, that are cast up, and that take what comes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)
        self.convolution = torch.nn.Conv1d(3, 3, 1)

    def forward(self, x: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = self.first(x)
        q = self.last(self.norm(F.gelu(h))).unsqueeze(1)
        y = F.scaled_dot_product_attention(q, q, q, is_causal=True).squeeze(1)
        z = self.convolution(y)
        return h, y, (y @ x.transpose(-1, -2)).softmax(-1), z, F.mse_loss(z, t)


def test_autocast_means_what_it_means_in_pytorch() -> None:
    """Types of results, their numbers, and training; the casts are a part of the program."""
    dtype = torch.bfloat16
    x, t = _input(2, 3, 8), _input(2, 3, 8)
    mine, theirs = _Mixed(), _Mixed()
    model = poptorch.trainingModel(mine, optimizer=torch.optim.SGD(mine.parameters(), lr=0.3))
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.3)
    for _ in range(2):
        with torch.autocast("cpu", dtype=dtype):
            found, expected = model(x, t), theirs(x, t)
        optimizer.zero_grad()
        expected[-1].backward()
        optimizer.step()
        assert [r.dtype for r in found] == [r.dtype for r in expected]
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b.detach(), rtol=3e-2, atol=2e-2)
    products = {
        op.inputs[0].dtype for g in model._executable.session.ir.graphs for op in g.ops if op.op_type == "Linear"
    }
    assert products == {popxl.dtype.as_dtype(dtype)}
    with pytest.raises(poptorch.Error, match=f"compiled with torch.autocast to {dtype}, and is called without"):
        model(x, t)


@pytest.mark.thorough(but_each=4)
@pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated")
@pytest.mark.parametrize("runs", [0, 1, 3])
@pytest.mark.parametrize("how", ["script", "trace"])
def test_functions_of_jit_that_have_run_before(runs: int, how: str) -> None:
    if how == "script":

        @torch.jit.script
        def activation(x: torch.Tensor):  # type: ignore[no-untyped-def]
            return x * torch.sigmoid(1.702 * x.detach())

    else:
        activation = torch.jit.trace(lambda x: x * torch.sigmoid(1.702 * x.detach()), (_input(2, 3),))

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = torch.nn.Linear(3, 3)

        def forward(self, x: torch.Tensor, compiled: bool) -> torch.Tensor:
            y = self.linear(x)
            return poptorch.identity_loss(
                (activation(y) if compiled else y * (1.702 * y.detach()).sigmoid()).sum(), "none"
            )

    eager, wrapped, x = Model(), Model(), _input(2, 3)
    for _ in range(runs):
        wrapped(x, True).backward()
    wrapped.zero_grad()
    poptorch.trainingModel(wrapped, optimizer=torch.optim.SGD(wrapped.parameters(), lr=0.1))(x, True)
    eager(x, False).backward()
    torch.optim.SGD(eager.parameters(), lr=0.1).step()
    torch.testing.assert_close(wrapped.linear.weight, eager.linear.weight)


class _Recurrent(torch.nn.Module):
    """It counts the ops that PyTorch runs on tensors without numbers, to know what comes of the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.LSTM(3, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mode = torch._subclasses.FakeTensorMode
        before = mode.cache_hits + mode.cache_misses
        out, _ = self.layer(x)
        _counts.append(mode.cache_hits + mode.cache_misses - before)
        return out


_counts: list[int] = []


def test_recurrent_layers_are_captured_without_going_through_time() -> None:
    _counts.clear()
    model, x = _Recurrent(), _input(1, 200, 3)
    torch.testing.assert_close(poptorch.inferenceModel(model)(x), model(x))
    captured, eager = _counts
    assert eager == 0 < captured < 200
