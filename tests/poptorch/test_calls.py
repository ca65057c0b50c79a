"""Calls of wrapped models: what they are given and give back, several at once, and what they say of mistakes."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest

torch = pytest.importorskip("torch")

# ruff: noqa: E402 - poptorch needs torch
from torch.utils import _pytree as pytree

import poptorch

X = torch.arange(6.0).reshape(2, 3)

# Dataclasses, and objects that hold tensors ---------------------------------------------------------------------------


@dataclass
class Out:
    logits: torch.Tensor
    loss: torch.Tensor | None = None
    steps: list[Any] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Frozen:
    x: torch.Tensor
    scale: float = 2.0
    times_made: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "times_made", self.times_made + 1)


@dataclass
class Result(OrderedDict):
    """A dataclass and a dictionary at once, as those of transformers are, with the same peculiarities."""

    logits: Any = None
    hidden: Any = None
    loss: Any = None

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            if getattr(self, each.name) is not None:
                self[each.name] = getattr(self, each.name)

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("You cannot use `update`.")

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self and value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __reduce__(self) -> Any:
        make, _, *rest = super().__reduce__()
        return make, tuple(getattr(self, each.name) for each in dataclasses.fields(self)), *rest


class Box:
    """An object with a tensor, of a plain class."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Closed(set):
    """One of a class that is not only Python's: its attributes are not all there is to it."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Pair:
    """A type that PyTorch has been told of."""

    def __init__(self, left: torch.Tensor, right: torch.Tensor, sign: int) -> None:
        self.parts, self.sign = [left, right], sign

    def __copy__(self) -> Pair:
        raise AssertionError("it is put together as PyTorch has been told")


pytree.register_pytree_node(
    Pair, lambda pair: (pair.parts, pair.sign), lambda parts, sign: Pair(*parts, sign=sign), serialized_type_name="Pair"
)


class Counter:
    """As the caches of decoders: of no shape until it is used, and changed by whoever uses it."""

    def __init__(self) -> None:
        self.seen: torch.Tensor | None = None
        self.parts: list[Box] = []
        self.count = 0

    def update(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x if self.seen is None else torch.cat([self.seen, x])
        self.parts.append(Box(x * 2))
        self.count += 1
        return self.seen.sum(0)


def test_objects_come_back() -> None:
    model = poptorch.inferenceModel(lambda x, pair: (Box([x + 1, Box(None)]), Pair(x * pair.sign, pair.parts[0], 5)))
    for x in (X, -X):
        box, pair = model(x, Pair(x + 2, x, 3))
        assert type(box) is Box and box.x[0].tolist() == (x + 1).tolist() and box.x[1].x is None
        assert type(pair) is Pair and pair.sign == 5
        assert [each.tolist() for each in pair.parts] == [(x * 3).tolist(), (x + 2).tolist()]
    with pytest.raises(poptorch.Error, match=r"Value mismatch for pair \(its context\): expected 3 but got 4"):
        model(X, Pair(X, X, 4))


def test_objects_that_a_model_changes() -> None:
    def forward(x: torch.Tensor, counter: Counter, other: Box) -> Any:
        other.x.add_(1)
        return counter.update(x), counter

    wrapped, counter, other = poptorch.inferenceModel(forward), Counter(), Box(X.clone())
    total, back = wrapped(X, counter, other)
    assert back is counter and counter.count == 1 and counter.seen.tolist() == X.tolist()
    assert [type(each) for each in counter.parts] == [Box] and counter.parts[0].x.tolist() == (2 * X).tolist()
    assert total.tolist() == X.sum(0).tolist() and other.x.tolist() == (X + 1).tolist()
    again = Counter()  # another one like the first
    assert wrapped(-X, again, other)[1] is again and again.seen.tolist() == (-X).tolist()
    with pytest.raises(poptorch.Error, match=r"Type mismatch for counter.seen"):
        wrapped(X, counter, other)


def test_an_object_that_holds_itself() -> None:
    def forward(given: Box) -> Any:
        assert given.me is given and given.others[0] is given
        return given.me.x + 1

    model = poptorch.inferenceModel(forward)
    for i in range(2):
        box = Box(X + i)
        box.me, box.others = box, [box]
        torch.testing.assert_close(model(box), X + i + 1)


def test_a_function_around_forward_says_what_was_not_given() -> None:
    def forward(x: torch.Tensor, scale: float = 2.0, shift: torch.Tensor = X) -> torch.Tensor:
        return x * scale + shift

    @functools.wraps(forward)
    def around(*args: Any, **kwargs: Any) -> torch.Tensor:
        return forward(*args, **{"scale": 3.0, **kwargs})

    assert poptorch.inferenceModel(around)(X).tolist() == (4 * X).tolist()
    assert poptorch.inferenceModel(around)(X, scale=5.0).tolist() == (6 * X).tolist()


def test_dataclasses_come_back() -> None:
    layer = torch.nn.Linear(3, 4)

    def forward(x: torch.Tensor) -> tuple[Out, Frozen]:
        y = layer(x)
        return Out(y, steps=[x + 1, "one"]), Frozen(y * 2, 3.0)

    model = poptorch.inferenceModel(forward)
    for x in (X, -X):
        (out, frozen), (expected, other) = model(x), forward(x)
        assert (type(out), type(frozen)) == (Out, Frozen)
        torch.testing.assert_close(out.logits, expected.logits.detach())
        assert out.loss is None and out.steps[1] == "one" and out.steps[0].tolist() == (x + 1).tolist()
        torch.testing.assert_close(frozen.x, other.x.detach())
        assert (frozen.scale, frozen.times_made) == (3.0, 1)


NAMES = Out("a")


def test_dataclasses_as_arguments() -> None:
    model = poptorch.inferenceModel(lambda pair, names=NAMES: pair.x * pair.scale + (names.logits == "a"))
    assert model(Frozen(X)).tolist() == (X * 2 + 1).tolist()
    assert model(Frozen(X + 1)).tolist() == (X * 2 + 3).tolist()
    with pytest.raises(poptorch.Error, match=r"Value mismatch for pair.scale: expected 2.0 but got 3.0"):
        model(Frozen(X, 3.0))
    with pytest.raises(poptorch.Error, match=r"Shape mismatch for pair.x"):
        model(Frozen(X[:, :1]))
    with pytest.raises(poptorch.Error, match=r"Type mismatch for pair"):
        model(Out(X))
    with pytest.raises(poptorch.Error, match=r"Value mismatch for names"):
        model(Frozen(X), Out("b"))


def test_a_dataclass_that_is_a_dictionary() -> None:
    layer = torch.nn.Linear(3, 4)
    model = poptorch.inferenceModel(lambda x: Result(layer(x), hidden=(x + 1, x + 2)))
    for x in (X, -X):
        out = model(x)
        assert type(out) is Result and list(out) == ["logits", "hidden"] and out.loss is None
        torch.testing.assert_close(out.logits, layer(x).detach())
        assert out["logits"] is out.logits and out.hidden[1].tolist() == (x + 2).tolist()
    of_it = poptorch.inferenceModel(lambda result: result.logits + result["hidden"][0])
    assert of_it(Result(X, (X,))).tolist() == (2 * X).tolist()
    assert of_it(Result(X, (X + 1,))).tolist() == (2 * X + 1).tolist()


@dataclass
class Mirrored(OrderedDict):
    """A dataclass whose fields are put into the dictionary, and that is all."""

    logits: Any = None
    loss: Any = None

    def __post_init__(self) -> None:
        self.update({each.name: getattr(self, each.name) for each in dataclasses.fields(self)})


def test_fields_that_are_items_too_are_filled_in_with_them() -> None:
    model = poptorch.inferenceModel(lambda x: Mirrored(x + 1, {"of": x * 2}))
    for x in (X, -X):
        out = model(x)
        assert type(out) is Mirrored and list(out) == ["logits", "loss"]
        assert out["logits"] is out.logits and out["loss"] is out.loss
        assert out.logits.tolist() == (x + 1).tolist() and out.loss["of"].tolist() == (x * 2).tolist()
    of_it = poptorch.inferenceModel(lambda result: result.logits + 3 * result["logits"])
    for x in (X, X + 1):
        given = Mirrored(x)
        given["logits"] = x * 2  # the item alone
        assert of_it(given).tolist() == (7 * x).tolist()


class Items(dict):
    """A dictionary whose attributes are its items."""

    def __init__(self, **items: Any) -> None:
        super().__init__(items)
        self.__dict__ = self


def test_a_dictionary_that_is_its_own_attributes_stays_so() -> None:
    def forward(given: Items) -> Items:
        given.x = given.x + 1
        given["y"] = given["x"] * 2
        return Items(of=given, y=given.y)

    out = poptorch.inferenceModel(forward)(Items(x=X))
    out.y = out.y - out.of.y
    assert out["of"]["x"].tolist() == (X + 1).tolist()
    assert not out["y"].any() and out.__dict__ is out


class Attributed(dict):
    """A dictionary that keeps a tensor beside its items."""


def attributed(x: torch.Tensor) -> Attributed:
    result = Attributed(x=x + 1)
    result.other = x + 2
    return result


@pytest.mark.parametrize(
    ("forward", "kind"),
    [
        (lambda x: {x + 1}, "set"),
        (lambda x: (x + 1, [Closed(x + 1)]), "Closed"),
        (lambda x: {"x": x + 1}.values(), "dict_values"),
        (lambda x: (lambda y: lambda: y)(x + 1), "function"),
        (attributed, "Attributed"),
    ],
)
def test_results_with_hidden_tensors(forward: Any, kind: str) -> None:
    with pytest.raises(poptorch.Error, match=f"is a {kind} that holds tensors.*registerCustomArgParser"):
        poptorch.inferenceModel(forward)(X)


def test_arguments_with_hidden_tensors() -> None:
    for given in (Closed(X), {X}, [Box({X})]):
        with pytest.raises(poptorch.Error, match="holds tensors.*registerCustomArgParser"):
            poptorch.inferenceModel(lambda x, given: x + 1)(X, given)
    layer = torch.nn.Linear(3, 3)  # functions and modules have their own
    model = poptorch.inferenceModel(lambda x, function: function(x))
    torch.testing.assert_close(model(X, layer), layer(X).detach())


class Ambiguous:
    def __eq__(self, other: object) -> bool:
        raise ValueError("ambiguous")

    __hash__ = object.__hash__


def test_constants_that_cannot_be_compared() -> None:
    model = poptorch.inferenceModel(lambda x, constant: x + 1)
    model(X, Ambiguous())
    with pytest.raises(poptorch.Error, match="mismatch for constant: .* cannot be told .ambiguous"):
        model(X, Ambiguous())


# Models that do nothing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: x,
        torch.nn.Identity(),
        lambda x: torch.nn.functional.dropout(x, training=False),
        lambda x: x.to("cpu"),
        torch.nn.Sequential(),
    ],
)
def test_a_model_may_return_its_input(forward: Any) -> None:
    x = torch.arange(3.0)
    model = poptorch.inferenceModel(forward, poptorch.Options().deviceIterations(3))
    result = model(x)
    assert result.tolist() == [0, 1, 2] and result is not x
    result += 1
    assert x.tolist() == [0, 1, 2] and model(-x).tolist() == [0, -1, -2]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ((poptorch.OutputMode.All,), list(range(8))),
        ((poptorch.OutputMode.Final,), [4, 5, 6, 7]),
        ((poptorch.OutputMode.Sum,), [4, 6, 8, 10]),
        ((poptorch.OutputMode.EveryN, 2), [4, 5, 6, 7]),
    ],
)
def test_modes_of_an_input_that_is_returned(mode: tuple[Any, ...], expected: list[int]) -> None:
    options = poptorch.Options().deviceIterations(2).replicationFactor(4).outputMode(*mode)
    assert poptorch.inferenceModel(lambda x: x, options)(torch.arange(8.0)).tolist() == expected


def test_a_model_may_return_a_parameter() -> None:
    module = torch.nn.Linear(2, 2)
    module.forward = lambda x: (module.weight, [x, x])
    weight, (first, second) = poptorch.inferenceModel(module)(torch.ones(3, dtype=torch.int64))
    assert torch.equal(weight, module.weight) and first.tolist() == second.tolist() == [1, 1, 1]
    assert first.dtype is torch.int32


@pytest.mark.parametrize("forward", [lambda x: None, lambda x: (3, "a")])
def test_a_model_without_tensors_is_refused(forward: Any) -> None:
    with pytest.raises(poptorch.Error, match="does nothing with tensors"):
        poptorch.inferenceModel(forward)(torch.ones(2))


# Threads --------------------------------------------------------------------------------------------------------------


def in_threads(function: Callable[[int], Any], count: int = 4) -> list[Any]:
    """What a function returns for 0, 1, ..., each in a thread, all of which begin at once."""
    barrier = threading.Barrier(count)

    def begun(i: int) -> Any:
        barrier.wait()
        return function(i)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(begun, range(count)))


@pytest.mark.parametrize("is_checked", [False, True])
def test_threads_get_their_own_results(is_checked: bool) -> None:
    layer = torch.nn.Linear(64, 64)
    options = poptorch.Options()
    options.Precision.enableFloatingPointExceptions(is_checked)
    model = poptorch.inferenceModel(layer, options)  # compiled by whoever comes first

    def calls(thread: int) -> None:
        for i in range(5 if is_checked else 50):
            x = torch.full((2, 64), thread + i / 100)
            torch.testing.assert_close(model(x), layer(x).detach())

    in_threads(calls)
    assert model.getLatency()[0] > 0


def test_threads_train_together() -> None:
    module = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(module.weight)
    module.forward = lambda x: poptorch.identity_loss(-(module.weight * x).sum(), "none")
    training = poptorch.trainingModel(module, optimizer=torch.optim.SGD(module.parameters(), lr=1.0))
    in_threads(lambda i: [training(torch.ones(1)) for _ in range(20)])
    assert module.weight.item() == 80
    inference = poptorch.inferenceModel(module)
    assert in_threads(lambda i: inference(torch.full((1,), i + 1.0)).item()) == [-80, -160, -240, -320]
    training(torch.ones(1))
    assert in_threads(lambda i: inference(torch.full((1,), i + 1.0)).item()) == [-81, -162, -243, -324]


def test_threads_compile_models_of_one_module() -> None:
    layer = torch.nn.Linear(8, 8)
    models = [poptorch.inferenceModel(layer) for _ in range(4)]
    x = torch.rand(2, 8)
    for result in in_threads(lambda i: models[i](x)):
        torch.testing.assert_close(result, layer(x).detach())


# What would be lost in silence ----------------------------------------------------------------------------------------


def sgd(*parameters: torch.Tensor) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def test_a_model_without_parameters_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    kept = [torch.nn.Parameter(torch.ones(3))]
    for optimizer in (sgd(*kept), None):
        model = poptorch.trainingModel(lambda x: poptorch.identity_loss(x * 2, "sum"), optimizer=optimizer)
        assert not caplog.records
        model(X)
        assert "The model has no parameters, so nothing is trained." in caplog.text
        caplog.clear()
        model(X)
        assert not caplog.records


def test_parameters_of_others_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    class Model(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return poptorch.identity_loss(super().forward(x), "sum")

    layer, again, other = Model(3, 1), Model(3, 1), torch.nn.Linear(5, 2)
    poptorch.trainingModel(layer, optimizer=sgd(*layer.parameters()))(X)
    assert not caplog.records
    model = poptorch.trainingModel(again, optimizer=sgd(*other.parameters()))
    model(X)
    assert "The optimizer has 2 parameters that the model does not have, of the shapes [2, 5], [2]" in caplog.text
    caplog.clear()
    model.setOptimizer(sgd(*again.parameters(), *other.parameters()))
    model(X)
    assert "The optimizer has 2 parameters that the model does not have" in caplog.text


def test_arguments_that_share_what_is_overwritten() -> None:
    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x += 1
        return y * 2

    for dtype in (torch.float32, torch.int64, torch.bfloat16):
        model = poptorch.inferenceModel(forward)
        whole = torch.arange(12).reshape(3, 4).to(dtype)
        for x, y in ((whole[0], whole[1]), (whole[1, :], whole[2, :]), (whole[0], whole[2])):
            before = x.clone()
            assert torch.equal(model(x, y).float(), y.float() * 2) and torch.equal(x, before + 1)
        for x, y in ((whole[0], whole[0]), (whole[0], whole.view(-1)[2:6])):
            before = whole.clone()
            with pytest.raises(poptorch.Error, match="The arguments x and y share memory, and the model overwrites x"):
                model(x, y)
            assert torch.equal(whole, before)
    columns = torch.arange(6.0).reshape(3, 2)
    assert poptorch.inferenceModel(forward)(columns[:, 0], columns[:, 1]).tolist() == [2, 6, 10]
    same = poptorch.inferenceModel(lambda x, y: x + y)  # which may share what is only read
    assert same(columns, columns).tolist() == (columns * 2).tolist()


# What options ask for -------------------------------------------------------------------------------------------------


@pytest.mark.thorough(but_each=4)
@pytest.mark.parametrize(
    "forward",
    [
        lambda x: x > 0,
        lambda x: 1.0 <= x,
        lambda x: x == x.flip(0),
        lambda x: poptorch.for_loop(2, lambda x: torch.where(x > 0, x, -x), [x])[0],
        lambda x: torch.where(x.half() < 0, x, -x),
    ],
)
@pytest.mark.parametrize("replicas", [1, 2])
def test_comparisons_of_nan_are_exceptions_if_wanted(forward: Any, replicas: int) -> None:
    options = poptorch.Options().replicationFactor(replicas)
    plain = poptorch.inferenceModel(forward, options)
    options = options.clone()
    options.Precision.enableFloatingPointExceptions(True)
    model = poptorch.inferenceModel(forward, options)
    good, bad = torch.tensor([1.0, -2.0, 3.0, 4.0]), torch.tensor([1.0, 2.0, torch.nan, 4.0])
    assert torch.equal(model(good), plain(good))
    with pytest.raises(poptorch.Error, match="popxl_runtime_error.*compares numbers of which 1 of .* are NaN"):
        model(bad)
    assert torch.equal(model(good), plain(good))
    torch.testing.assert_close(plain(bad), plain(bad), equal_nan=True)


def test_asking_for_nan_is_none() -> None:
    options = poptorch.Options()
    options.Precision.enableFloatingPointExceptions(True)
    model = poptorch.inferenceModel(lambda x: (x != x, x.isnan(), x == x), options)
    assert [t.tolist() for t in model(torch.tensor([1.0, torch.nan]))] == [[False, True], [False, True], [True, False]]


def test_comparisons_are_watched_in_training() -> None:
    layer = torch.nn.Linear(2, 2)
    layer.forward = lambda x: poptorch.identity_loss((x @ layer.weight) * (layer.weight > 0), "sum")
    options = poptorch.Options()
    options.Precision.enableFloatingPointExceptions(True)
    model = poptorch.trainingModel(layer, options, torch.optim.SGD(layer.parameters(), lr=0.1))
    before = layer.weight.detach().clone()
    model(torch.ones(1, 2))
    theirs = before.clone().requires_grad_()
    ((torch.ones(1, 2) @ theirs) * (theirs > 0)).sum().backward()
    torch.testing.assert_close(layer.weight.detach(), before - 0.1 * theirs.grad)


@pytest.mark.parametrize(
    ("strategy", "is_advised"),
    [
        (poptorch.PipelinedExecution(), True),
        (poptorch.ShardedExecution(), False),
        (poptorch.SerialPhasedExecution([poptorch.Stage("a")]), False),
    ],
)
def test_device_iterations_are_advised_for_pipelines(strategy: Any, is_advised: bool) -> None:
    options = poptorch.Options().setExecutionStrategy(strategy)
    options.Training.gradientAccumulation(2)
    with pytest.raises(
        poptorch.Error, match=r"gradientAccumulation to 1 or leave it as its default value \(1\).* It is 2"
    ) as caught:
        poptorch.inferenceModel(torch.nn.Linear(2, 2), options)
    assert ("Use poptorch.Options().deviceIterations() to" in str(caught.value)) is is_advised
