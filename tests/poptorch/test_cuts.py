"""Models that look at numbers on the way: they are cut there, and go on with a program for what the host finds."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.utils import _pytree as pytree  # noqa: E402

import poptorch  # noqa: E402
from popxl.session import CompilationProgress, compilation_progress  # noqa: E402

X = torch.tensor([[1.5, -2.0, 0.5], [-1.0, 3.0, 2.5], [0.25, -0.5, -4.0], [2.0, 1.0, 1.0]])
LENGTHS = torch.tensor([2, 3, 1, 3])
LONG = torch.zeros(2000).index_fill(0, torch.tensor(999), 1.0)  # NumPy prints the ends of it


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


def test_what_the_host_makes_is_no_argument_of_the_users(caplog: pytest.LogCaptureFixture) -> None:
    found = poptorch.inferenceModel(lambda x: x[:, 0] * x.nonzero().T.sum(1)[0])(X)
    agree(found, X[:, 0] * X.nonzero().T.sum(1)[0])
    assert "contiguous" not in caplog.text


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


def wholes(x: torch.Tensor) -> torch.Tensor:
    """Functions that a program has as a whole, and that the host computes where it looks at what comes of them."""
    y = F.group_norm(F.layer_norm(x, (3,)), 1)[None]
    y = F.scaled_dot_product_attention(y, y, y, scale=0.5)[0]
    y = y + torch.kl_div(y.log_softmax(1), x.softmax(1), reduction=1)
    return y[y[:, 0] > y[0, 0] - 0.1]


def marked(x: torch.Tensor, i: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Ops of poptorch, and functions of what comes of them that a program cannot know."""
    y = poptorch.set_available_memory(poptorch.ipu_print_tensor(poptorch.nop(x), "x"), 0.5)
    y = poptorch.dynamic_update(y, poptorch.dynamic_slice(y, 0, i, 2, 1), 0, i * 0, 2)
    y = poptorch.serializedMatMul(y, x.T, poptorch.MatMulSerializationMode.OutputChannels, 2)
    return y[y[:, 0] > 0], x if poptorch.identity_loss(x, "mean") > 0.2 else -x


CASES: dict[str, tuple[Callable[..., Any], list[tuple[Any, ...]]]] = {
    "a loop": (halved, [(X,), (X / 4,), (X * 2,), (X,)]),
    "nonzero and numbers": (lambda x: (x.nonzero(), x.max().item(), int(x.argmax())), [(X,), (X.clamp_min(0),)]),
    "unique": (lambda x: torch.unique(x, return_counts=True), [(LENGTHS,), (LENGTHS.clamp_max(2),)]),
    "repeat_interleave": (lambda x, n: x.repeat_interleave(n, 0) + 1, [(X, LENGTHS), (X, LENGTHS.flip(0))]),
    "activations": (lambda x: (y := F.hardtanh(x, -2, 2))[F.relu(y)[:, 0] > 0], [(X,)]),
    "norms, attention, a loss": (wholes, [(X,)]),
    "one_hot": (lambda n: F.one_hot(n) * 2, [(LENGTHS,), (LENGTHS - 1,)]),
    "arrays": (lambda x: x + torch.from_numpy(x.numpy()), [(LONG,), (LONG.roll(1),)]),
    "a mask beside places": (lambda x, n: x.index_put((k := n > 1, n[k] - 1), x[0, 0] * 2), [(X, LENGTHS)]),
    "ops of poptorch": (marked, [(X, torch.tensor(1)), (-X, torch.tensor(2))]),
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


def test_draws_until_they_are_liked() -> None:
    def liked(x: torch.Tensor) -> torch.Tensor:
        drawn, is_liked = torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
        for _ in range(1000):
            if is_liked.all():
                return drawn
            now = torch.rand_like(x)
            drawn = torch.where(is_liked, drawn, now)
            is_liked = is_liked | (now > 0.5)
        raise AssertionError("the same numbers are drawn again and again")

    model = poptorch.inferenceModel(liked, poptorch.Options().randomSeed(0))
    before = torch.default_generator.get_state()
    drawn = model(torch.zeros(6))
    assert bool((drawn > 0.5).all()) and len(drawn.unique()) == 6
    assert torch.equal(before, torch.default_generator.get_state())


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
    """It overwrites buffers before and after the host looks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(3))
        self.layer, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = self.norm(self.layer(x)) + self.mean
        self.mean.mul_(0.5).add_(x.mean(0))
        rows = y[x[:, 0] > 0]
        self.mean[0] += len(rows)
        return rows.sum(0) + self.mean + self.calls


def test_buffers_are_overwritten_around_a_cut() -> None:
    model, x = Counting(), torch.randn(8, 6, 3, generator=torch.Generator().manual_seed(1))
    eager = copy.deepcopy(model)
    wrapped = poptorch.inferenceModel(model)
    for i in range(4):
        agree(wrapped(x[i]), eager(x[i]))
    agree(dict(model.state_dict()), dict(eager.state_dict()))
    for each in (model, eager):
        each.mean.zero_()
    wrapped.copyWeightsToDevice()
    agree(wrapped(x[4]), eager(x[4]))
    wrapped.destroy()
    agree(wrapped(x[5]), eager(x[5]))
    agree(dict(model.state_dict()), dict(eager.state_dict()))


def test_buffers_that_only_some_branches_overwrite_are_refused() -> None:
    class Sometimes(Counting):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.sum() > 0:
                self.calls += 1
            return x * 2

    wrapped = poptorch.inferenceModel(Sometimes())
    agree(wrapped(-torch.ones(2, 3)), -2 * torch.ones(2, 3))
    with pytest.raises(poptorch.Error, match=r"test_cuts.py.*overwrites calls after what the host has found"):
        wrapped(torch.ones(2, 3))


def test_what_is_not_cut_says_so() -> None:
    with pytest.raises(poptorch.Error, match=r"test_cuts.py.*Each micro-batch would need.*deviceIterations\(1\)"):
        poptorch.inferenceModel(lambda x: x[x > 1], poptorch.Options().deviceIterations(2))(X)
    with pytest.raises(poptorch.Error, match=r"test_cuts.py.*Each micro-batch would need"):  # rows one by one
        poptorch.inferenceModel(lambda x, n: x[:, : n.tolist()[0]], poptorch.Options().deviceIterations(2))(
            X, torch.ones(len(X), dtype=torch.int32)
        )


# Training -------------------------------------------------------------------------------------------------------------


def steps_agree(model: nn.Module, calls: list[tuple[Any, ...]], options: poptorch.Options | None = None) -> Any:
    """Train a model beside eager, whose numbers are to be the same. Returns the wrapper, and the eager model."""
    eager = copy.deepcopy(model)
    theirs = torch.optim.SGD(eager.parameters(), lr=0.1, momentum=0.5)
    ours = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    wrapped = poptorch.trainingModel(model, options, ours)
    for call in calls:
        theirs.zero_grad()
        result, loss = eager(*call)
        loss.backward()
        theirs.step()
        agree(wrapped(*call), (result, loss))
    agree(dict(model.state_dict()), dict(eager.state_dict()))
    return wrapped, eager


class Labelled(nn.Module):
    """What has no label is left out of the loss. Norms in front of it overwrite buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.norm, self.after = nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.after(self.norm(self.before(x)).relu())
        counts = labels != -100
        return counts.sum(), F.cross_entropy(logits[counts], labels[counts])


@pytest.mark.thorough
@pytest.mark.usefixtures("only_new_objects")
def test_labels_that_are_left_out_of_a_loss() -> None:
    torch.manual_seed(0)
    two, three, four = torch.tensor([1, -100, 0, -100]), torch.tensor([0, 1, -100, 1]), torch.tensor([0, 1, 1, 1])
    calls = [(X, two), (X + 1, three), (-X, two.flip(0)), (X, four)]
    wrapped, eager = steps_agree(Labelled(), calls, poptorch.Options().keptPrograms(2))
    wrapped.detachFromDevice()
    wrapped.attachToDevice()
    agree(wrapped(X, two), eager(X, two))
    with torch.no_grad():
        wrapped.model.after.weight.mul_(3)
    eager.load_state_dict(wrapped.model.state_dict())
    wrapped.copyWeightsToDevice()
    agree(wrapped(X, four), eager(X, four))
    with pytest.raises(poptorch.Error, match="save: the model is not one program"):
        wrapped.save("somewhere")
    kept = weakref.ref(wrapped)
    del wrapped
    gc.collect()
    assert kept() is None


class Selecting(nn.Module):
    """Elements of a linear layer that a mask selects, known in advance or only in a run."""

    def __init__(self, select: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.select = nn.Linear(3, 2), select

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        selected = self.select(self.layer(x))
        return selected, poptorch.identity_loss(selected.square(), "sum")


@pytest.mark.parametrize(
    "select",
    [
        lambda y: y.masked_select(y > 0),
        lambda y: y.masked_select(torch.tensor([True, False])),
        lambda y: y[0].masked_select(torch.tensor([[True, False], [True, True]])),
        lambda y: y.sum().masked_select(torch.tensor(True)),
    ],
    ids=["of a run", "known", "broadcast", "of a number"],
)
def test_masked_select_is_trained(select: Callable[[torch.Tensor], torch.Tensor]) -> None:
    torch.manual_seed(0)
    steps_agree(Selecting(select), [(X,), (X * 2,)])


class Routed(nn.Module):
    """Rows go where their numbers are largest; a layer to which none goes has no gradient, and stays as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(3, 2), nn.ModuleList([nn.Linear(3, 4), nn.Linear(3, 4)])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.router(x)
        chosen = scores.argmax(1)
        results = x.new_zeros(len(x), 4)
        for i in torch.unique(chosen).tolist():
            places = (chosen == i).nonzero()[:, 0]
            results = results.index_add(0, places, self.experts[i](x[places]) * scores[places, i, None])
        return chosen, poptorch.identity_loss(results.square(), "mean")


def test_layers_that_numbers_choose() -> None:
    torch.manual_seed(0)
    model = Routed()
    with torch.no_grad():
        model.router.weight.copy_(torch.tensor([[1.0, 0, 0], [-1.0, 0, 0]]))
        model.router.bias.zero_()
    to_one = X.abs()
    steps_agree(model, [(X,), (to_one,), (-to_one,), (X,)])


def test_a_thousand_cuts_in_a_row() -> None:
    found = poptorch.inferenceModel(lambda x: x * sum(int(x) for _ in range(1100)))(torch.tensor(3.5))
    assert found == 3.5 * 3300


class Coarse(nn.Module):
    """How far it looks, and what else it adds, are numbers that come of weights: whole ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        answers = self.layer(x)[:, 0]
        size = answers.abs().max()
        total = answers[: 2 + int(size / 100)].square().sum()
        return answers, poptorch.identity_loss(total * 2 if size else total, "sum")


def test_numbers_that_are_rounded() -> None:
    """A program is for the whole number, and for whether a number is zero; and not for each float that comes there."""
    torch.manual_seed(0)
    compiled: list[CompilationProgress] = []
    options = poptorch.Options().showCompilationProgressBar(False)
    with compilation_progress(compiled.append):
        steps_agree(Coarse(), [(X,), (X,), (X + 1,)], options)
    assert sum(each.done == each.total for each in compiled) <= 3


class Drawn(nn.Module):
    """Rows are drawn, then rows of these: how many there are is something else in each run."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        some = x[torch.rand(len(x)) < 0.8]
        fewer = some[torch.rand(len(some)) < 0.8]
        return fewer, poptorch.identity_loss(self.layer(fewer).square(), "sum")


def test_only_programs_that_run_are_compiled() -> None:
    """What the host will find on the rest of a way is a guess, and nothing is compiled for it."""
    compiled: list[CompilationProgress] = []
    torch.manual_seed(0)
    model, rows = Drawn(), torch.arange(60.0).reshape(20, 3) / 60
    options = poptorch.Options().showCompilationProgressBar(False).randomSeed(1).keptPrograms(2)
    wrapped = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.01))
    wrapped.compile(rows)
    for _ in range(4):
        compiled.clear()
        layer = copy.deepcopy(model.layer)
        with compilation_progress(compiled.append):
            fewer, loss = wrapped(rows)
        assert sum(each.done == each.total for each in compiled) <= 2  # that of some rows, and that of fewer
        assert 0 < len(fewer) < 20
        agree(loss, layer(fewer).square().sum())
        wrapped.copyWeightsToHost()


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(2, 3, batch_first=True)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        given = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, _ = nn.utils.rnn.pad_packed_sequence(self.layers(given)[0], batch_first=True)
        return out, poptorch.identity_loss(out.square(), "sum")


def test_a_new_branch_has_the_weights_of_the_device() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * self.weight
            return x * self.weight if x.sum() > 0 else x * x + self.weight

    model = Branches()
    wrapped = poptorch.inferenceModel(model)
    agree(wrapped(torch.ones(3)), torch.ones(3))
    with torch.no_grad():
        model.weight.fill_(2.0)
    agree(wrapped(-torch.ones(3)), torch.full((3,), 2.0))  # compiled now, and the device still has ones
    wrapped.copyWeightsToDevice()
    agree(wrapped(-torch.ones(3)), torch.full((3,), 6.0))
    agree(wrapped(torch.ones(3)), torch.full((3,), 4.0))


class Sampled(nn.Module):
    """Random numbers without a gradient are drawn once, and are the same for the host and for the step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden, drawn = self.layer(x), torch.rand(len(x))
        chosen = (drawn > 0.5) & (hidden[:, 0] < 1e9)
        others = torch.rand(len(x))
        return drawn, others, drawn[chosen], poptorch.identity_loss(hidden[chosen], "sum")


def test_random_numbers_around_a_cut() -> None:
    for wrap in (poptorch.inferenceModel, poptorch.trainingModel):
        drawn, others, chosen, _ = wrap(Sampled(), poptorch.Options().randomSeed(3))(X)
        assert torch.equal(chosen, drawn[drawn > 0.5]) and 0 < len(chosen) < 4
        assert not torch.equal(drawn, others)  # what another program draws is something else


@pytest.mark.thorough
def test_packed_sequences_are_trained() -> None:
    torch.manual_seed(0)
    steps_agree(Packed(), [(torch.randn(3, 3, 2), torch.tensor([1, 3, 1]))] * 2)


@pytest.mark.parametrize(
    ("options", "function", "message"),
    [
        (
            poptorch.Options().keptPrograms(1),
            lambda layer, x: layer(x)[x[:, 0] > 1],
            r"shape of a tensor cannot depend.*`torch.where\(mask, x, 0\)`",
        ),
        (
            poptorch.Options(),
            lambda layer, x: torch.unique(layer(x)),
            r"test_cuts.py.*no gradient passes the host. Pad.*`torch.where\(mask, x, 0\)`",
        ),
        (
            poptorch.Options(),
            lambda layer, x: layer(x) * layer(x).detach().sum().item(),
            "test_cuts.py.*others in each step.*look at it after the step, or compute it in an `inferenceModel`",
        ),
        (
            poptorch.Options(),
            lambda layer, x: (hidden := F.dropout(layer(x)))[hidden[:, 0] > 0],
            "test_cuts.py.*torch.dropout.*draws random numbers there, which cannot be done twice",
        ),
    ],
)
def test_where_gradients_would_have_to_pass_a_cut(
    options: poptorch.Options, function: Callable[..., torch.Tensor], message: str
) -> None:
    class Model(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return poptorch.identity_loss(function(super().forward, x), "sum")

    with pytest.raises(poptorch.Error, match=message):
        poptorch.trainingModel(Model(3, 2), options)(X)


def test_several_micro_batches_are_not_cut_in_training() -> None:
    options = poptorch.Options()
    options.Training.gradientAccumulation(2)
    with pytest.raises(poptorch.Error, match=r"test_cuts.py.*gradientAccumulation\(1\)"):
        poptorch.trainingModel(Labelled(), options)(X, LENGTHS - 1)
