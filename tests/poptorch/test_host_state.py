"""What `forward` changes on the host, and a program does not carry: it is told by name and line, and undone."""

# ruff: noqa: E402 - poptorch needs torch

from __future__ import annotations

import copy
import gc
import itertools
import linecache
import pickle
import re
import threading
import time
from collections import Counter, UserDict, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from torch._subclasses import FakeTensor
from torch.nn import utils
from torch.nn.utils import prune

import poptorch


class Meter:
    """A mean, as an object that is no module."""

    def __init__(self) -> None:
        self.sum: Any = 0
        self.count, self.seen = 0, list[torch.Tensor]()

    def update(self, value: torch.Tensor) -> None:
        self.sum = self.sum + value
        self.count += 1
        self.seen.append(value)


class Metric(torch.nn.Module):
    """A mean, as packages for metrics have it: its states are tensors that are plain attributes."""

    def __init__(self) -> None:
        super().__init__()
        self._defaults: dict[str, torch.Tensor] = {}
        self._updates = 0
        self.add_state("total", torch.tensor(0.0))

    def add_state(self, name: str, default: torch.Tensor) -> None:
        self._defaults[name] = default
        setattr(self, name, default.clone())

    def reset(self) -> None:
        self._updates = 0
        for name, default in self._defaults.items():
            setattr(self, name, default.detach().clone())

    def forward(self, value: torch.Tensor) -> None:
        before = self.total
        self.reset()
        self.total += value.mean()
        self._updates += 1
        self.total = before + self.total


_made = 0
_seen: list[torch.Tensor] = []
_meter = Meter()


class Changing(torch.nn.Module):
    """It changes something."""

    calls = 0
    of_the_class: list[torch.Tensor] = []

    def __init__(self, change: Callable[[Changing, torch.Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.change, self.metric = torch.nn.Linear(3, 2), change, Metric()
        self.step, self.weight, self.phase, self.rows, self.last = 0, 1.0, "warm", 4, None
        self.list: list[Any] = []
        self.dict: dict[Any, Any] = {"n": 1}
        self.set, self.queue, self.counter = set[int](), deque[torch.Tensor](maxlen=1), Counter[str]()
        self.lists, self.nested = defaultdict[str, list[int]](list), ({"lists": [[]]},)
        self.space, self.meters = SimpleNamespace(n=0, last=None), [Meter()]
        self.numbers, self.count = np.zeros(3), itertools.count(1)
        self.slots, self.generator, self.user = Slots(), _numbers(), UserDict[str, torch.Tensor]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        factor = self.change(self, y)
        return y if factor is None else y * factor


def _anneal(module: Changing, y: torch.Tensor) -> int:
    module.step += 1
    return len(range(module.step))  # looked at, it is not carried


def _fade(module: Changing, y: torch.Tensor) -> float:
    module.weight = module.weight * 0.5
    return {1.0: 1.0}.get(module.weight, 0.5)


def _alternate(module: Changing, y: torch.Tensor) -> None:
    module.phase = "cold" if module.phase == "warm" else "warm"


def _of_variable(module: Changing, y: torch.Tensor) -> None:
    global _made
    _made += 1


def _of_class(module: Changing, y: torch.Tensor) -> None:
    type(module).calls += 1


def _count(module: Changing, y: torch.Tensor) -> int:
    return next(module.count)


def _write(module: Changing, y: torch.Tensor) -> None:
    module.numbers[1] = len(y)


def _of_function(module: Changing, y: torch.Tensor) -> None:
    _of_function.last = y  # type: ignore[attr-defined]


def _keep(module: Changing, y: torch.Tensor) -> None:
    module.last = y


def _keep_in_new(module: Changing, y: torch.Tensor) -> None:
    module.fresh = {"y": [y]}


def _cache(module: Changing, y: torch.Tensor) -> torch.Tensor:
    module.rows = len(y)
    return module.dict.setdefault(("mask", len(y)), torch.arange(2.0) + 1)


@dataclass(slots=True)
class Slots:
    count: int = 0


def _numbers() -> Iterator[int]:
    yield from range(10)


_CHANGES: dict[str, Callable[[Changing, torch.Tensor], Any]] = {
    "model.step": _anneal,
    "model.weight": _fade,
    "model.phase": _alternate,
    "model.count": _count,
    "model.numbers": _write,
    "model.last": _keep,
    "model.fresh": _keep_in_new,
    "model.list": lambda module, y: module.list.append(y),
    "model.set": lambda module, y: module.set.add(len(module.set)),
    "model.queue": lambda module, y: module.queue.append(y),
    "model.counter['calls']": lambda module, y: module.counter.update(["calls"]),
    "model.dict['y']": lambda module, y: module.dict.update(y=y),
    "model.dict['n']": lambda module, y: module.dict.update(n=2),
    "model.lists['sizes']": lambda module, y: module.lists["sizes"].append(y),
    "model.nested[0]['lists'][0]": lambda module, y: module.nested[0]["lists"][0].append(len(y)),
    "model.space.n": lambda module, y: setattr(module.space, "n", module.space.n + 1),
    "model.meters[0].sum": lambda module, y: module.meters[0].update(y.sum()),
    "model.slots.count": lambda module, y: setattr(module.slots, "count", 1 + module.slots.count),
    "model.generator": lambda module, y: next(module.generator),
    "model.user.data['y']": lambda module, y: module.user.__setitem__("y", y),
    "model.metric.total": lambda module, y: module.metric(y),
    "_made": _of_variable,
    "_seen": lambda module, y: _seen.append(y),
    "_meter.count": lambda module, y: _meter.update(y.sum()),
    "Changing.calls": _of_class,
    "Changing.of_the_class": lambda module, y: module.of_the_class.append(y),
    "_of_function.last": _of_function,
}


@pytest.fixture(autouse=True)
def _nothing_kept() -> Iterator[None]:
    yield
    _seen.clear()
    _meter.__init__()  # type: ignore[misc]
    Changing.of_the_class.clear()
    vars(_of_function).clear()


def _told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def _all_changes(module: Changing, y: torch.Tensor) -> None:
    for change in _CHANGES.values():
        change(module, y)


def test_what_changes_is_told_by_name_and_line(caplog: pytest.LogCaptureFixture) -> None:
    module, x = Changing(_all_changes), torch.ones(4, 3)
    before = _fake_tensors()  # of other tests in this process
    for _ in range(2):
        model = poptorch.inferenceModel(module)
        torch.testing.assert_close(model(x), model(x))
    (text,) = (each for each in _told(caplog) if "`forward` changes " in each)
    for name in _CHANGES:
        (line,) = re.findall(rf"[ .]{re.escape(name)} \(test_host_state.py:(\d+)\)", text)
        last = re.findall(r"\w+", re.sub(r"(\[.*|\.data\[.*)\]$", "", name))[-1]
        assert re.search(rf"\b{last}\b(?! = 0|, self| = Meter|: list)", linecache.getline(__file__, int(line))), name
    assert _fake_tensors() <= before


def _fake_tensors() -> set[int]:
    gc.collect()
    return {id(each) for each in gc.get_objects() if type(each) is FakeTensor}


def test_what_belongs_to_the_model_is_as_it_was() -> None:
    module, expected = Changing(_all_changes), Changing(_all_changes)
    poptorch.inferenceModel(module)(torch.ones(4, 3))
    for name in ("step", "weight", "phase", "last", "list", "dict", "set", "queue", "counter", "lists", "nested"):
        assert getattr(module, name) == getattr(expected, name), name
    assert vars(module.meters[0]) == vars(Meter()) and vars(module.space) == {"n": 0, "last": None}
    assert module.metric._updates == 0 and module.metric.total == 0 and not hasattr(module, "fresh")


def test_what_is_the_same_in_each_run_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    module, x = Changing(_cache), torch.ones(4, 3)
    torch.testing.assert_close(poptorch.inferenceModel(module)(x), module(x))
    assert not _told(caplog)


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.parametrize(
    "derive", [utils.weight_norm, utils.spectral_norm, lambda m: prune.random_unstructured(m, "weight", 2)]
)
def test_weights_that_hooks_of_torch_compute_are_not_told(
    derive: Callable[[torch.nn.Module], torch.nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    module, x = derive(torch.nn.Linear(3, 2)).eval(), torch.ones(4, 3)
    torch.testing.assert_close(poptorch.inferenceModel(module)(x), module(x))
    assert not _told(caplog)


class Noting(torch.nn.Module):
    """Changes containers among its arguments."""

    def forward(self, x: torch.Tensor, seen: list[Any], options: dict[str, Any], **more: Any) -> torch.Tensor:
        seen[0].append(x * 2)
        more["y"] = options["x"].add_(1)
        return x


def test_changes_of_lists_among_the_arguments_are_told(caplog: pytest.LogCaptureFixture) -> None:
    model, x, seen, y = poptorch.inferenceModel(Noting()), torch.ones(4, 3), ([], 1), torch.zeros(4)
    for _ in range(2):
        model(x, seen, {"x": y})
    assert seen == ([], 1) and y[0] == 2
    (text,) = (each for each in _told(caplog) if "`forward` changes " in each)
    assert re.match(r"`forward` changes its argument `seen` \(test_host_state.py:\d+\)", text)


def test_the_other_names_of_a_module_are_told_later(caplog: pytest.LogCaptureFixture) -> None:
    module, x = Changing(_anneal), torch.ones(4, 3)
    poptorch.inferenceModel(module)(x)
    module.change = _fade
    poptorch.inferenceModel(module)(x)
    assert ["model.step (" in text for text in _told(caplog)] == [True, False]
    assert "model.weight (" in caplog.text


def test_of_a_function_what_it_names_is_told(caplog: pytest.LogCaptureFixture) -> None:
    outputs, calls = [], 0

    def forward(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        y = x * 2
        outputs.append(y)
        return y

    poptorch.inferenceModel(forward)(torch.ones(3))
    (text,) = _told(caplog)
    assert "calls (test_host_state.py:" in text and "outputs (test_host_state.py:" in text
    (kept,) = outputs
    assert kept.shape == (3,) and kept.dtype is torch.float32 and calls == 1


@pytest.mark.parametrize("use", [lambda t: t + 1, lambda t: t.tolist(), bool, lambda t: torch.stack([t]), pickle.dumps])
def test_what_is_kept_elsewhere_has_no_numbers(use: Callable[[torch.Tensor], Any]) -> None:
    poptorch.inferenceModel(Changing(_CHANGES["_seen"]))(torch.ones(4, 3))
    (kept,) = copy.deepcopy(_seen)
    assert repr(kept).startswith("A tensor of (4, 2) and torch.float32 (test_host_state.py:")
    with pytest.raises(poptorch.Error, match=r"has no numbers: `forward` has made it .* so return it"):
        use(kept)


def test_tensors_that_a_trained_model_keeps_have_no_numbers(tmp_path: Path) -> None:
    class Loss(Changing):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x).exp()
            _seen.extend([x, y, y[1], y.T, self.layer.weight, y.sum()])
            return poptorch.identity_loss(y.sum(), "none")

    module = Loss(_keep)
    poptorch.trainingModel(module, optimizer=torch.optim.SGD(module.parameters(), lr=0.1))(torch.ones(4, 3))
    shapes = [(4, 3), (4, 2), (2,), (2, 4), (2, 3), ()]
    assert [(type(t) is FakeTensor, tuple(t.shape)) for t in _seen] == [(False, shape) for shape in shapes]


def test_of_hooks_what_they_keep_is_told(caplog: pytest.LogCaptureFixture) -> None:
    layer, features = torch.nn.Linear(3, 2), dict[str, torch.Tensor]()
    layer.register_forward_hook(lambda module, inputs, result: features.update(y=result))
    poptorch.inferenceModel(layer)(torch.ones(4, 3))
    assert "`forward` changes features['y'] (test_host_state.py:" in caplog.text


def test_a_default_is_the_same_in_the_next_call(caplog: pytest.LogCaptureFixture) -> None:
    def forward(x: torch.Tensor, seen: list[torch.Tensor] = []) -> torch.Tensor:  # noqa: B006 - as users write it
        seen.append(x * 2)
        return x + len(seen)

    model = poptorch.inferenceModel(forward)
    assert model(torch.ones(3)).tolist() == model(torch.ones(3)).tolist() == [2, 2, 2]
    assert "`forward` changes seen (test_host_state.py:" in caplog.text


def test_what_others_hold_is_no_tensor_of_a_capture_afterwards() -> None:
    meter = Meter()

    def forward(x: torch.Tensor) -> torch.Tensor:
        nonlocal last
        meter.update(x.sum())
        last = x * 2
        return last

    last = torch.zeros(())
    before = last
    for _ in range(2):
        poptorch.inferenceModel(forward)(torch.ones(3))
        assert last is before and meter.sum == 0


# Changes after compilation --------------------------------------------------------------------------------------------


class Inner(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode(super().forward(x))

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class Outer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.act, self.acts = Inner(3, 3), torch.nn.LayerNorm(3), torch.relu, [torch.sigmoid]
        self.config, self.sizes, self.kind = SimpleNamespace(scale=2.0), {"rows": 4}, "wide"
        self.last, self.shape, self.seen, self._private = None, (0,), [torch.ones(3)], torch.tanh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last, self.shape = x, tuple(x.shape)
        self.seen.append(x)
        return self.acts[0](self.act(self.norm(self.inner(x)))) * self.config.scale


_LATER: dict[str, Callable[[Outer], Any]] = {
    "the hooks of model.norm": lambda module: module.norm.register_forward_hook(lambda *_: None),
    "the hooks of model": lambda module: module.register_forward_pre_hook(lambda *_: None),
    "model.norm.forward": lambda module: setattr(module.norm, "forward", torch.relu),
    "model.inner.encode": lambda module: setattr(module.inner, "encode", torch.relu),
    "Inner.encode": lambda module: setattr(Inner, "encode", lambda self, x: x + 2),
    "model.act": lambda module: setattr(module, "act", torch.tanh),
    "model.acts[0]": lambda module: module.acts.__setitem__(0, torch.tanh),
    "model.acts": lambda module: module.acts.append(torch.tanh),
    "model.kind": lambda module: setattr(module, "kind", "deep"),
    "model.sizes['rows']": lambda module: module.sizes.update(rows=5),
    "model.config.scale": lambda module: setattr(module.config, "scale", 3.0),
    "model.config": lambda module: setattr(module, "config", SimpleNamespace(scale=4.0)),
    "the class of model.norm": lambda module: setattr(
        module.norm, "__class__", type("Other", (torch.nn.LayerNorm,), {})
    ),
}


@pytest.mark.parametrize("trained", [False, True])
def test_what_users_change_later_is_told_once(
    trained: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Inner, "encode", Inner.encode)
    module, x = Outer(), torch.ones(4, 3)
    if trained:
        loss = Loss(module)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
        model: Any = poptorch.trainingModel(loss, optimizer=optimizer)
    else:
        model = poptorch.inferenceModel(module)
    first = model(x)
    caplog.clear()
    module(x)  # sets attributes, too
    module.last = module.inner(x)
    torch.testing.assert_close(model(x), first)
    assert not caplog.text
    for name, change in _LATER.items():
        change(module)
        for _ in range(2):
            torch.testing.assert_close(model(x), first)
        (text,) = _told(caplog)
        found = name.replace("model", "model.module", 1) if trained else name
        assert f"has been changed since it was compiled: {found}. A program" in text
        caplog.clear()


class Loss(torch.nn.Module):
    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return poptorch.identity_loss(self.module(x).sum(), "none")


def test_what_is_set_between_wrapping_and_the_first_call_is_told(caplog: pytest.LogCaptureFixture) -> None:
    module, x = Outer(), torch.ones(4, 3)
    model = poptorch.inferenceModel(module)
    module.act = torch.tanh
    model(x)
    assert "has been changed since it was compiled: model.act. " in caplog.text


# Modules and parameters that `forward` makes --------------------------------------------------------------------------


class Growing(torch.nn.Module):
    def __init__(self, grow: Callable[[torch.nn.Module], Any]) -> None:
        super().__init__()
        self.layer, self.grow = torch.nn.Linear(3, 3), grow

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "late"):
            self.grow(self)
        return self.layer(x) * self.late(x) if callable(self.late) else x * self.late


@pytest.mark.parametrize(
    ("grow", "name"),
    [
        (lambda module: setattr(module, "late", torch.nn.Linear(3, 3)), "late.weight"),
        (lambda module: setattr(module, "late", torch.nn.Parameter(torch.rand(3))), "late"),
    ],
)
def test_parameters_that_forward_makes_are_refused(grow: Callable[[torch.nn.Module], Any], name: str) -> None:
    module = Growing(grow)
    for _ in range(2):
        with pytest.raises(poptorch.Error, match=f"Parameter {name} is not there, and is made within .* `__init__`"):
            poptorch.inferenceModel(module)(torch.ones(2, 3))
    assert [name for name, _ in module.named_parameters()] == ["layer.weight", "layer.bias"]


def test_what_forward_makes_alike_in_each_run_may_be_made() -> None:
    for grow in (
        lambda module: setattr(module, "late", torch.nn.Parameter(torch.ones(3))),
        lambda module: setattr(module, "late", torch.nn.ReLU()),
    ):
        module, x = Growing(grow), torch.ones(2, 3)
        result = poptorch.inferenceModel(module)(x)
        assert not hasattr(module, "late")
        torch.testing.assert_close(result, module(x))


def test_lists_that_hooks_append_to_are_not_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """Numbers that a program of the host notes down after each call; but a layer that is appended is."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.losses: list[float] = []
            self.layers = [torch.nn.ReLU()]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[0](x)

    model = Model()
    wrapped = poptorch.inferenceModel(model)
    for _ in range(3):
        model.losses.append(float(wrapped(torch.ones(2)).sum()))
    assert "has been changed" not in caplog.text
    model.layers.append(torch.nn.Tanh())
    wrapped(torch.ones(2))
    assert "has been changed since it was compiled: model.layers. " in caplog.text


class Monitor(threading.Thread):
    """A thread that counts what it does, as that of a progress bar."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.woken, self.stops = 0, False

    def run(self) -> None:
        while not self.stops:
            self.woken += 1
            time.sleep(1e-3)


monitor = Monitor()


class Monitored(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert monitor.is_alive()
        time.sleep(0.05)
        return x * 2


def test_changes_by_other_threads_are_not_told_of(caplog: pytest.LogCaptureFixture) -> None:
    monitor.start()
    try:
        poptorch.inferenceModel(Monitored())(torch.ones(2))
    finally:
        monitor.stops = True
        monitor.join()
    assert "changes monitor" not in caplog.text
