"""Where a model finds its tensors while it is captured, and what becomes of those of the host that it uses."""

# ruff: noqa: E402 - poptorch needs torch

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional as F

import poptorch

X = torch.arange(12.0).reshape(3, 4) / 7
MASK = torch.tensor([1.0, 0.0, 1.0, 1.0])
ROWS = torch.tensor([2, 0])
LABELS = torch.tensor([0, 1, 1])
TABLES = [torch.ones(4), torch.full((4,), 2.0)]


class Settings:
    scale = torch.full((4,), 3.0)


SETTINGS = Settings()


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], list[str]]]:
    """The warnings since the last time."""

    def since() -> list[str]:
        messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        caplog.clear()
        return messages

    yield since


def check(model: Callable[..., Any], frozen: list[str], told: Callable[[], list[str]]) -> None:
    """Check that a wrapped model gives twice what it gives on the host, and which tensors it is told of, once."""
    wrapper = poptorch.inferenceModel(model)
    for names in (frozen, []):
        torch.testing.assert_close(wrapper(X.clone()), model(X.clone()), check_dtype=False)
        messages = told()
        assert [message.partition(" is a tensor of the host")[0] for message in messages] == [f"`{n}`" for n in names]
        assert all("its numbers are frozen" in message and ".to(x.device)" in message for message in messages)


def default(x: torch.Tensor, mask: torch.Tensor = MASK) -> torch.Tensor:
    return x * mask


SCALED = functools.partial(torch.mul, TABLES[1].clone())
USED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], list[str]]] = {
    "factor": (lambda x: x * MASK + MASK, ["MASK"]),
    "of a function within": (lambda x: (lambda y: y * MASK)(x), ["MASK"]),
    "list": (lambda x: x * TABLES[1], ["TABLES[1]"]),
    "loop": (lambda x: sum((x * table for table in TABLES), x), ["TABLES[0]", "TABLES[1]"]),
    "object": (lambda x: x * SETTINGS.scale, ["SETTINGS.scale"]),
    "default argument": (lambda x: default(x), ["mask"]),
    "partial": (lambda x: SCALED(x), ["SCALED.args[0]"]),
    "index": (lambda x: x[:, ROWS], ["ROWS"]),
    "index of a function": (lambda x: x.index_select(1, ROWS + 1), ["ROWS"]),
    "rows": (lambda x: F.embedding(ROWS, x), ["ROWS"]),
    "condition": (lambda x: torch.where(MASK.bool(), x, -x), ["MASK"]),
    "made of it": (lambda x: F.one_hot(LABELS, 4) * x, ["LABELS"]),
    "written": (lambda x: x.clone().copy_(MASK), ["MASK"]),
}


@pytest.mark.parametrize("kind", USED)
def test_tensors_of_the_host_are_constants(kind: str, told: Callable[[], list[str]]) -> None:
    """They are told once, by the names that the program has for them."""
    check(*USED[kind], told)


MOVED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "device": lambda x: x * MASK.to(x.device),
    "device and dtype": lambda x: x[:, :2] + ROWS.to(x.device, torch.float16) + ROWS.to(device=x.device, dtype=x.dtype),
    "index": lambda x: x[:, ROWS.to(x.device)],
    "like another": lambda x: x * MASK.to(x) + LABELS[:1].type_as(x),
    "a part": lambda x: x * MASK[None, :4].to(x.device),
    "several": lambda x: x * torch.stack(TABLES).to(x.device)[0],
    "classes": lambda x: x * F.one_hot(LABELS, 4).to(x.device),
    "another's device": lambda x: x + torch.as_tensor(MASK, device=x.device) + torch.ones_like(MASK, device=x.device),
    "read by Python": lambda x: x * MASK[0].item() + x[:, int(ROWS[0])].sum() + x[: ROWS.shape[0]].sum(),
}


@pytest.mark.parametrize("kind", MOVED)
def test_moved_to_the_device_of_an_input_nothing_is_told(kind: str, told: Callable[[], list[str]]) -> None:
    check(MOVED[kind], [], told)


def branch(x: torch.Tensor) -> torch.Tensor:
    return x + torch.zeros(4, device=x.device) if x.device.type == "ipu" else x.clone()


class Made(torch.nn.Module):
    """It makes what it needs where its parameters are, and has some of the host."""

    table = torch.ones(4)

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.places = torch.nn.Linear(4, 4), None
        self.plain, self.plains = MASK, {"first": torch.ones(4)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.places is None or self.places.device != x.device:
            self.places = torch.arange(4, device=next(self.parameters()).device)
        return self.fc(x) * self.plain + self.plains["first"] * self.table + self.places + MASK


MAKING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "branch": branch,
    "attributes": Made(),
    "device": lambda x: x + torch.arange(4, device=x.device) + torch.tensor([1.0, 2, 3, 4], device=str(x.device)),
    "none": lambda x: x + torch.arange(4) + x.new_zeros(4) + torch.ones(4, device=torch.get_default_device()),
    "like": lambda x: x + torch.zeros_like(x, device=x.device) + torch.full_like(x, 2.0),
    "to the host": lambda x: (x.to("cpu") + x.cpu()).to(x.device) * 2,
    "layer": lambda x: F.linear(x, torch.nn.Linear(4, 2, device=x.device).weight.detach().fill_(0.5)),
    "layer that is moved": lambda x: x + torch.nn.Linear(4, 2).to(x.device).weight.detach().fill_(2).sum(),
    "classes": lambda x: F.one_hot(torch.arange(3, device=x.device), 4) * x,
    "histogram": lambda x: x + torch.histc(x.long() if x.is_ipu else x.floor(), bins=4, min=0, max=3),
    "index": lambda x: x[:, torch.tensor([1, 0])] + x[:, [2, 0]] + x.index_select(1, torch.arange(2)),
    "generator": lambda x: x + torch.rand(4, generator=torch.Generator(x.device).manual_seed(1)),
    "types": lambda x: x + torch.FloatTensor([1, 2, 3, 4]),
    "types, moved": lambda x: x.index_select(1, torch.LongTensor([1, 0]).to(x.device)),
    "mapped": lambda x: torch.vmap(lambda row: row + MASK.to(row.device) + torch.ones(4, device=row.device))(x),
}


@pytest.mark.parametrize("kind", MAKING)
def test_what_forward_makes_is_on_the_device(kind: str, told: Callable[[], list[str]]) -> None:
    check(MAKING[kind], [], told)


def test_where_tensors_are() -> None:
    found: dict[str, Any] = {}

    class Where(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.plain = torch.nn.Linear(4, 2), torch.ones(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            named = {"input": x, "parameter": self.fc.weight, "made": torch.zeros(1), "host": MASK, "plain": self.plain}
            named |= {"of the host": MASK * 2, "of both": x * MASK, "type": torch.LongTensor([1])}
            named |= {"moved": MASK.to(x.device), "like the host": torch.zeros_like(MASK)}
            found.update({name: str(t.device) for name, t in named.items()})
            found["properties"] = (x.is_ipu, x.is_cpu, x.is_cuda, MASK.is_ipu, MASK.is_cpu)
            with torch.autocast(x.device.type, torch.bfloat16):
                found["autocast"] = torch.is_autocast_enabled(x.device.type), torch.get_autocast_dtype("ipu")
                y = self.fc(x)
            with torch.device(x.device):
                return y + torch.ones(2)

    module = Where()
    model = poptorch.inferenceModel(module)
    torch.testing.assert_close(model(X), module(X), rtol=0.02, atol=0.02, check_dtype=False)
    assert found["input"] == "cpu"
    found.clear()
    poptorch.inferenceModel(module)(X)
    on_host = {"host", "plain", "of the host", "type", "like the host"}
    assert found.pop("properties") == (True, False, False, False, True)
    assert found.pop("autocast") == (True, torch.bfloat16)
    assert {name for name, device in found.items() if device == "cpu"} == on_host
    assert {device for name, device in found.items() if name not in on_host} == {"ipu"}
    assert X.device.type == "cpu" and not torch.is_autocast_enabled("ipu")


@pytest.mark.parametrize(
    ("use", "shape", "dtype"),
    [
        (lambda x: x.index_select(0, torch.LongTensor([1, 0])), [2], "Long"),
        (lambda x: x[torch.LongTensor([1, 0, 1])], [3], "Long"),
        (lambda x: x.gather(1, torch.LongTensor([[1, 0]]) * 2), [1, 2], "Long"),
        (lambda x: F.embedding(torch.IntTensor([2]), x), [1], "Int"),
        (lambda x: torch.zeros(4, 2).index_add(0, torch.LongTensor([3, 1, 0]), x[:, :2]), [3], "Long"),
    ],
)
def test_an_index_that_forward_makes_on_the_host(use: Callable[..., Any], shape: list[int], dtype: str) -> None:
    words = rf"Expected an IPU tensor but got tensor\(device=cpu, shape=\[{str(shape)[1:-1]}\], dtype={dtype}\)"
    with pytest.raises(poptorch.Error, match=rf"{words}.*test_devices\.py:\d+.*to\(x\.device\)"):
        poptorch.inferenceModel(use)(X)


def test_a_layer_around_a_function_is_told_once(told: Callable[[], list[str]]) -> None:
    net = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    model = poptorch.inferenceModel(lambda x: net(x) * MASK)
    torch.testing.assert_close(model(X), (net(X) * MASK).detach())
    of_net, of_mask = told()
    assert of_net.startswith("`net.0.weight` and 5 other tensors of `net` are tensors of the host")
    assert of_mask.startswith("`MASK` is a tensor of the host")


def test_results_of_the_host_come_back_as_they_are(told: Callable[[], list[str]]) -> None:
    wrapper = poptorch.inferenceModel(lambda x: (x + 1, ROWS, ROWS * 2, ROWS.to(x.device) * 3))
    (message,) = (wrapper(X), told())[1]
    assert message.startswith("Output expected to be on the IPU but is on cpu")
    _, same, twice, moved = wrapper(X)
    assert same.tolist() == [2, 0] and twice.tolist() == [4, 0] and moved.tolist() == [6, 0]
    assert same.dtype == twice.dtype == torch.int64 and not told()


class Fit(torch.nn.Module):
    def __init__(self, loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.fc, self.loss = torch.nn.Linear(4, 3), loss

    def forward(self, x: torch.Tensor) -> Any:
        y = self.fc(x)
        return y, self.loss(y)


TARGET, WEIGHTS = torch.linspace(-1, 1, 9).reshape(3, 3), torch.tensor([1.0, 2.0, 3.0])
WEIGHTED = torch.nn.CrossEntropyLoss(weight=WEIGHTS)
LOSSES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], list[str]]] = {
    "target": (lambda y: F.mse_loss(y, TARGET), ["TARGET"]),
    "target, moved": (lambda y: F.mse_loss(y, TARGET.to(y.device)), []),
    "labels": (lambda y: F.cross_entropy(y, LABELS), ["LABELS"]),
    "weights": (lambda y: F.cross_entropy(y, LABELS.to(y.device), weight=WEIGHTS), ["WEIGHTS"]),
    "a loss of its own": (lambda y: WEIGHTED(y, LABELS.to(y.device)), ["WEIGHTED.weight"]),
    "partial": (functools.partial(F.l1_loss, target=TARGET), ["model.loss.keywords['target']"]),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_losses_with_tensors_of_the_host(kind: str, told: Callable[[], list[str]]) -> None:
    loss, frozen = LOSSES[kind]
    module = Fit(loss)
    theirs = copy.deepcopy(module)
    wrapper = poptorch.trainingModel(module, optimizer=torch.optim.SGD(module.parameters(), lr=0.5))
    _, mine = wrapper(X)
    messages = told()
    assert [message.partition(" is a tensor of the host")[0] for message in messages] == [f"`{n}`" for n in frozen]
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.5)
    expected = theirs(X)[1]
    expected.backward()
    optimizer.step()
    torch.testing.assert_close(mine, expected.detach())
    torch.testing.assert_close(module.fc.weight.detach(), theirs.fc.weight.detach())


def test_host_tensors_that_change_afterwards_are_told(told: Callable[[], list[str]]) -> None:
    """Whether they were moved or not: the program has their numbers."""
    used, moved = torch.ones(4), torch.ones(4)
    wrapper = poptorch.inferenceModel(lambda x: x * used + moved.to(x.device))
    wrapper(X)
    assert len(told()) == 1
    for t in (used, moved):
        t.fill_(2)
    torch.testing.assert_close(wrapper(X), X + 1)
    assert [message.partition(" than")[0] for message in told()] == [
        "`used` holds other numbers",
        "`moved` holds other numbers",
    ]


def test_tensors_made_in_forward_are_not_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """No object of the user holds the numbers of `torch.tensor`, and a search for them takes long in large models."""
    searched: list[int] = []
    monkeypatch.setattr("poptorch.capture.recorder.locate_constant", lambda t, *_: searched.append(t.numel()))
    wrapper = poptorch.inferenceModel(
        lambda x: torch.cat([torch.tensor([], device=x.device), x[0] * torch.tensor(2.0)])
    )
    torch.testing.assert_close(wrapper(X), X[0] * 2)
    poptorch.inferenceModel(lambda x: x * MASK)(X)
    assert searched == [4]
