"""The ops of poptorch: in a wrapped model as on the host, and what they refuse."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

import jax.numpy as jnp  # noqa: E402  (torch may not be there)

import poptorch  # noqa: E402


def both(model: Callable[..., Any], *inputs: Any) -> Any:
    """What a model returns on the device, once that is what it returns on the host."""
    expected = model(*(t.clone() for t in inputs))
    wrapped = poptorch.inferenceModel(model)
    result = wrapped(*inputs)
    for mine, theirs in zip(_leaves(result), _leaves(expected), strict=True):
        torch.testing.assert_close(mine, theirs.to(mine.dtype), rtol=1e-5, atol=1e-6)
    return result


def _leaves(result: Any) -> list[Any]:
    return list(result) if isinstance(result, list | tuple) else [result]


X = torch.tensor([[0.5, -1.0, 2.0], [3.0, 0.25, -4.0]])


# Loops and conditionals -----------------------------------------------------------------------------------------------


def test_for_loop() -> None:
    both(lambda x: poptorch.for_loop(4, lambda a, b: (a + b, b * 2), [x, x + 1]), X)
    both(lambda x: poptorch.for_loop(0, lambda a: a + 1, [x]), X)
    both(lambda x, y: poptorch.for_loop(3, lambda a: torch.tanh(a) + y * 2, [x]), X, X - 1)  # `y` from outside


def test_loop_in_a_loop_and_a_condition() -> None:
    def body(x: Any) -> Any:
        (x,) = poptorch.for_loop(2, lambda a: a * 1.5, [x])
        return poptorch.cond(x.sum() > 3, lambda a: -a, [x], lambda a: a + 1, [x])

    both(lambda x: poptorch.for_loop(5, body, [x]), X)


def test_a_body_gets_copies() -> None:
    def body(a: Any) -> Any:
        a += 1
        return a

    x = X.clone()
    torch.testing.assert_close(poptorch.inferenceModel(lambda x: poptorch.for_loop(3, body, [x])[0])(x), X + 3)
    torch.testing.assert_close(x, X)


@pytest.mark.parametrize("count", [-1, 1.5, None])
def test_a_loop_that_is_none(count: Any) -> None:
    with pytest.raises(
        poptorch.Error, match=re.escape(f"for_loop: `count` is {count}; expected an integer, 0 or more")
    ):
        poptorch.for_loop(count, lambda a: a, [X])
    with pytest.raises(poptorch.Error, match="for_loop: `body` is .*; expected a function of tensors"):
        poptorch.for_loop(2, 3, [X])


def test_a_body_does_not_overwrite_what_is_outside() -> None:
    def model(x: Any) -> Any:
        y = x * 1

        def body(a: Any) -> Any:
            y.add_(1)
            return a + y

        return poptorch.for_loop(2, body, [x])

    with pytest.raises(
        poptorch.Error, match="overwrites a tensor from outside of it, .* Pass it to the body as an input"
    ):
        poptorch.inferenceModel(model)(X)


def test_random_numbers_differ_between_turns() -> None:
    def body(total: Any, last: Any) -> Any:
        drawn = torch.rand(50)
        return total + (drawn == last).sum(), drawn

    same, drawn = poptorch.inferenceModel(
        lambda x: poptorch.for_loop(4, body, [torch.zeros((), dtype=torch.int64), x])
    )(torch.zeros(50))
    assert int(same) == 0 and 0.2 < float(drawn.mean()) < 0.8


@pytest.mark.parametrize("value", [0.0, 5.0])
def test_cond(value: float) -> None:
    both(
        lambda x, y: poptorch.cond(x.sum() > 1, lambda a: (a + 1, y), [x], lambda a, b: (a - b, a), [x, y]),
        X + value,
        X,
    )


@pytest.mark.parametrize("bad", [X, (X,), [X, 3]])
def test_lists_are_wanted(bad: Any) -> None:
    with pytest.raises(ValueError, match="Object is not list|Object contained in list at index 1 is not torch.tensor"):
        poptorch.for_loop(1, lambda *a: a, bad)
    with pytest.raises(ValueError, match="Object is not list|Object contained in list at index 1 is not torch.tensor"):
        poptorch.cond(torch.tensor(True), lambda *a: a, bad, lambda *a: a, [X])


def test_bodies_that_do_not_fit() -> None:
    with pytest.raises(poptorch.Error, match=r"takes \[2, 3\] of torch.float32 and returns \[3, 2\]"):
        poptorch.inferenceModel(lambda x: poptorch.for_loop(2, lambda a: a.t(), [x]))(X)
    with pytest.raises(poptorch.Error, match=r"cond: the bodies return"):
        poptorch.inferenceModel(lambda x: poptorch.cond(x.sum() > 0, lambda a: a, [x], lambda a: a.t(), [x]))(X)
    for body, returned in ((lambda a: None, "None"), (lambda a: [a, 3], "3")):
        for model in (
            lambda x, body=body: poptorch.for_loop(2, body, [x]),
            lambda x, body=body: poptorch.cond(x.sum() > 0, lambda a: a, [x], body, [x]),
        ):
            with pytest.raises(poptorch.Error, match=f"The body .*lambda.* returns {returned}; expected a tensor"):
                poptorch.inferenceModel(model)(X)


def test_loops_are_for_inference() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(3))

        def forward(self, x: Any) -> Any:
            (x,) = poptorch.for_loop(2, lambda a: a * 2, [x * self.w])
            return poptorch.identity_loss(x, "sum")

    with pytest.raises(poptorch.Error, match=r"poptorch.for_loop\(\) is only supported in inference"):
        poptorch.trainingModel(Model())(X)


# Slices ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dim", "size", "step", "start"), [(0, 2, 1, 1), (1, 3, 2, 1), (-1, 2, 1, 3)])
def test_dynamic_slice(dim: int, size: int, step: int, start: int) -> None:
    both(
        lambda t, s: poptorch.dynamic_slice(t, dim, s, size, step),
        torch.arange(20.0).reshape(4, 5),
        torch.tensor([start]),
    )


def test_dynamic_update() -> None:
    both(
        lambda t, s: poptorch.dynamic_update(t, t[:, :2] * 0, 1, s, 2),
        torch.arange(20.0).reshape(4, 5),
        torch.tensor(2),
    )


def test_slices_that_are_refused() -> None:
    with pytest.raises(poptorch.Error, match=r"`start` is \[\] of torch.float32; expected a tensor with an integer"):
        poptorch.dynamic_slice(X, 0, torch.tensor(1.0), 1, 1)
    with pytest.raises(poptorch.Error, match="`start` is 1; expected a tensor with an integer"):
        poptorch.dynamic_update(X, X, 0, 1, 1)
    with pytest.raises(poptorch.Error, match=r"must have same dtype. \(torch.float32 vs torch.float16\)"):
        poptorch.dynamic_update(X, X.half(), 0, torch.tensor(0), 1)
    with pytest.raises(poptorch.Error, match="5 elements with step 1, of 3 in dimension 1"):
        poptorch.dynamic_slice(X, 1, torch.tensor(0), 5, 1)


ONE, PLACE = torch.ones(2, 1), torch.tensor(1)


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (lambda x: poptorch.dynamic_slice([x], 0, PLACE, 1, 1), "`tensor` is of type list; expected a tensor"),
        (lambda x: poptorch.dynamic_slice(x, 0, PLACE, 1.0, 1), "`size` is 1.0, a float; expected an int"),
        (lambda x: poptorch.dynamic_slice(x, 0, PLACE, 1, PLACE), "`step` is .*, a Tensor; expected an int"),
        (lambda x: poptorch.dynamic_slice(x, "0", PLACE, 1, 1), "`dim` is '0', a str; expected an int"),
        (lambda x: poptorch.dynamic_slice(x, True, PLACE, 1, 1), "`dim` is True, a bool; expected an int"),
        (lambda x: poptorch.dynamic_slice(x, 2, PLACE, 1, 1), "`dim` is 2, of a tensor with 2 dimensions"),
        (lambda x: poptorch.dynamic_slice(x, -3, PLACE, 1, 1), "`dim` is -3, of a tensor with 2 dimensions"),
        (lambda x: poptorch.dynamic_slice(x[0, 0], 0, PLACE, 1, 1), "`dim` is 0, of a tensor with 0 dimensions"),
        (lambda x: poptorch.dynamic_slice(x, 0, torch.tensor([1, 1]), 1, 1), r"`start` is \[2\] of torch.int64"),
        (lambda x: poptorch.dynamic_slice(x, 0, torch.tensor(True), 1, 1), r"`start` is \[\] of torch.bool"),
        (lambda x: poptorch.dynamic_slice(x, 0, torch.tensor(1j), 1, 1), r"`start` is \[\] of torch.complex64"),
        (lambda x: poptorch.dynamic_slice(x, 0, None, 1, 1), "`start` is None"),
        (lambda x: poptorch.dynamic_slice(x, 0, PLACE, 1, 0), "step 0"),
        (lambda x: poptorch.dynamic_update(x, 1.0, 1, PLACE, 1), "`src` is of type float; expected a tensor"),
        (lambda x: poptorch.dynamic_update(None, x, 1, PLACE, 1), "`input` is of type NoneType; expected a tensor"),
        (lambda x: poptorch.dynamic_update(x, ONE, 1, PLACE, "1"), "`size` is '1', a str; expected an int"),
        (lambda x: poptorch.dynamic_update(x, ONE, 1.0, PLACE, 1), "`dim` is 1.0, a float; expected an int"),
        (lambda x: poptorch.dynamic_update(x, ONE, 5, PLACE, 1), "`dim` is 5, of a tensor with 2 dimensions"),
        (lambda x: poptorch.dynamic_update(x, ONE, 1, PLACE, 0), "0 elements, of 3 in dimension 1"),
        (lambda x: poptorch.dynamic_update(x, ONE, 1, PLACE, 2), r"`src` has the shape \[2, 1\]; .*, \[2, 2\]"),
        (
            lambda x: poptorch.dynamic_update(x, torch.ones(1, 1), 1, PLACE, 1),
            r"`src` has the shape \[1, 1\]; .*, \[2, 1\]",
        ),
        (lambda x: poptorch.dynamic_update(x, x, 0, torch.tensor([0, 1]), 2), r"`start` is \[2\] of torch.int64"),
    ],
)
def test_slices_of_wrong_types_are_refused_everywhere(forward: Any, message: str) -> None:
    x = torch.arange(6.0).reshape(2, 3)
    for model in (forward, poptorch.inferenceModel(forward)):
        with pytest.raises(poptorch.Error, match=message):
            model(x)


# On the host ----------------------------------------------------------------------------------------------------------


def test_cpu() -> None:
    seen = []

    def function(x: Any, factor: float = 1.0) -> Any:
        seen.append(type(x))
        return x * factor, x.long()

    cpu = poptorch.CPU(function, "Function")
    wrapped = poptorch.inferenceModel(lambda x: cpu(cpu(x + 1, factor=3.0)[0]))
    for _ in range(2):
        product, whole = wrapped(X)
        torch.testing.assert_close(product, (X + 1) * 3)
        torch.testing.assert_close(whole, product.int())
    assert len(seen) == 2 + 2 * 2 and set(seen) == {torch.Tensor}  # to see its results; then at each run


def test_cpu_of_a_module(caplog: pytest.LogCaptureFixture) -> None:
    linear = torch.nn.Linear(3, 2)
    cpu = poptorch.CPU(linear, "Linear")
    both(lambda x: cpu(x), X)
    assert not any(p.requires_grad for p in linear.parameters())
    wrapped = poptorch.inferenceModel(lambda x: cpu(x))
    for _ in range(2):  # its weights are read whenever the program comes there
        torch.testing.assert_close(wrapped(X), linear(X))
        linear.weight.mul_(3)
    assert not caplog.text


def test_numbers_that_functions_on_the_host_change(caplog: pytest.LogCaptureFixture) -> None:
    """They are the host's own: no warning says that they have no effect, and each call changes them once."""
    seen = []

    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.steps = 0, 0
            self.layer = poptorch.CPU(self.on_host, "Counting")

        def on_host(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            seen.append(type(self.calls))
            return x * self.calls

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            return self.layer(x) + self.steps

    module = Counting()
    model = poptorch.inferenceModel(module)
    assert [model(torch.tensor([2.0])).item() for _ in range(3)] == [3.0, 6.0, 9.0]
    assert module.calls == 3 and set(seen) == {int} and not caplog.text


# Custom ops -----------------------------------------------------------------------------------------------------------


def test_cpu_takes_and_returns_tensors_wherever_they_are() -> None:
    class Sums(NamedTuple):
        both: torch.Tensor
        others: dict[str, Any]

    def function(pair: list[torch.Tensor], factor: int, *, bias: torch.Tensor) -> Sums:
        return Sums(sum(pair) * factor, {"bias": bias + 1, "factor": factor})

    layer = poptorch.CPU(function, "Sums")

    def forward(x: torch.Tensor) -> Any:
        result = layer([x, x + 1], 3, bias=x * 2)
        return result.both + result.others["bias"] * result.others["factor"]

    both(forward, X)


class Refusal(Exception):
    """One of a user's own."""


@pytest.mark.parametrize("where", ["plain", "loop", "condition", "iterations", "replicas", "checked"])
def test_what_a_function_on_the_host_raises(where: str, capfd: pytest.CaptureFixture[str]) -> None:
    refusal = Refusal("I do not like this.")
    called = []

    def function(x: torch.Tensor) -> torch.Tensor:
        called.append(x)
        if (x > 5).any():
            raise refusal
        return x * 2

    layer = poptorch.CPU(function, "Picky")

    def forward(x: torch.Tensor) -> torch.Tensor:
        if where == "loop":
            return poptorch.for_loop(2, layer, [x])[0]
        if where == "condition":
            return poptorch.cond(x.sum() > -1, layer, [x], lambda x: x, [x])[0]
        return layer(layer(x))

    options = poptorch.Options()
    options.deviceIterations(2 if where == "iterations" else 1).replicationFactor(2 if where == "replicas" else 1)
    options.Precision.enableFloatingPointExceptions(where == "checked")
    model = poptorch.inferenceModel(forward, options)
    expected = 2.0 if where == "condition" else 4.0
    assert model(torch.ones(2)).tolist() == [expected] * 2
    for _ in range(2):
        called.clear()
        with pytest.raises(Refusal) as caught:
            model(torch.tensor([6.0, 1.0]))
        assert caught.value is refusal
        assert len(called) == 1 or where == "replicas"  # of one replica, none after it
        assert model(torch.ones(2)).tolist() == [expected] * 2
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda x: x[:1], r"has returned \[1\] of float32. .* returned \[2\] of float32 for zeros"),
        (lambda x: x.int(), r"has returned \[2\] of int32"),
        (lambda x: (x, x), r"has returned \[2\] of float32, \[2\] of float32"),
        (lambda x: None, "has returned no tensors"),
        (lambda x: x + 1j, r"has returned \[2\] of complex64"),
    ],
)
def test_a_function_on_the_host_that_returns_something_else(other: Any, message: str) -> None:
    layer = poptorch.CPU(lambda x: other(x) if x.any() else x, "Fickle")
    model = poptorch.inferenceModel(lambda x: layer(x) + 1)
    with pytest.raises(poptorch.Error, match=message):
        model(torch.ones(2))
    assert model(torch.zeros(2)).tolist() == [1, 1]
    wider = poptorch.CPU(lambda x: x.double() if x.any() else x, "Wider")  # which is the same on the device
    assert poptorch.inferenceModel(lambda x: wider(x) + 1)(torch.ones(2)).tolist() == [2, 2]


@pytest.mark.parametrize(
    ("function", "shown"), [(lambda x: x[x > 0], r"\[0\] of torch.float32"), (lambda x: None, "None")]
)
def test_a_function_on_the_host_whose_results_are_not_known(function: Any, shown: str) -> None:
    layer = poptorch.CPU(function, "Empty")
    with pytest.raises(poptorch.Error, match=f"for zeros, Empty returns {shown}.*expected tensors that are not empty"):
        poptorch.inferenceModel(lambda x: layer(x))(torch.ones(2))


def test_custom_op_in_training() -> None:
    poptorch.registerCustomOp("Leaky", "tests", lambda x, *, alpha: jnp.where(x > 0, x, alpha * x))

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(3))

        def forward(self, x: Any) -> Any:
            (y,) = poptorch.custom_op([x * self.w], "Leaky", "tests", 1, [x], {"alpha": 0.1})
            return y, poptorch.identity_loss(y, "sum")

    model = Model()
    y, _ = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), 1.0))(X)
    torch.testing.assert_close(y, torch.nn.functional.leaky_relu(X, 0.1))
    torch.testing.assert_close(model.w.detach(), 1 - torch.nn.functional.leaky_relu(X, 0.1).sum(0))


@pytest.mark.parametrize(
    ("attributes", "error", "message"),
    [
        ({1: 2}, ValueError, "named by a int; expected a str"),
        ({"a": [1, 2.0]}, ValueError, "mixes types"),
        ({"a": None}, ValueError, "expected a float, an int, a str"),
        ({"a": "ä"}, ValueError, "not ASCII"),
        ({"a": 1e300}, poptorch.Error, "float32 cannot hold"),
    ],
)
def test_attributes_of_custom_ops(attributes: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        poptorch.custom_op([X], "Leaky", "tests", 1, [X], attributes)


def test_a_custom_op_that_is_not_registered() -> None:
    with pytest.raises(poptorch.Error, match="no custom op 'tests.Unknown'; registered are .*registerCustomOp"):
        poptorch.inferenceModel(lambda x: poptorch.custom_op([x], "Unknown", "tests", 1, [x]))(X)


# Looks ----------------------------------------------------------------------------------------------------------------


def test_print_tensor(capfd: pytest.CaptureFixture[str]) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.tensor([1.0, 2.0]))

        def forward(self) -> Any:
            return poptorch.identity_loss(poptorch.ipu_print_tensor(self.w * 3, "three w"), "sum")

    model = Model()
    poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), 0.1))()
    printed = capfd.readouterr().err
    assert "three w: (3" in printed and "three w_gradient: (1" in printed


@pytest.mark.parametrize(
    "style, message",
    [
        ({"float_format": "long"}, "`float_format` is 'long'; expected one of"),
        ({"digits": -1}, "`digits` is -1; expected an integer, 0 or more"),
        ({"summarise_threshold": "x"}, "`summarise_threshold` is 'x'; expected an integer"),
        ({"title": 3}, "`title` is 3; expected a string"),
        ({"separator": None}, "`separator` is None; expected a string"),
    ],
)
def test_wrong_ways_to_print(style: dict[str, Any], message: str) -> None:
    with pytest.raises(poptorch.Error, match=f"ipu_print_tensor: {message}"):
        poptorch.inferenceModel(lambda x: poptorch.ipu_print_tensor(x, **style))(X)


def test_what_changes_nothing() -> None:
    both(lambda x: poptorch.nop(x) + poptorch.set_available_memory(x, 0.3), X)
    both(lambda x: poptorch.recomputationCheckpoint(x, x + 1), X)
    assert isinstance(poptorch.recomputationCheckpoint([X, X]), list)
    both(lambda x: poptorch.serializedMatMul(x, x.t(), poptorch.MatMulSerializationMode.ReducingDim, 3), X)
    with pytest.raises(poptorch.Error, match="set_overlap_for_input: expected tensors; got 3"):
        poptorch.set_overlap_for_input([X, 3], poptorch.OverlapMode.NoOverlap)
    for proportion in (1.5, "half"):
        with pytest.raises(ValueError, match="`available_memory_proportion` is .*; expected a number from 0 to 1"):
            poptorch.set_available_memory(X, proportion)
    with pytest.raises(AssertionError, match="serializedMatMul: `factor` is -3; expected a number of parts"):
        poptorch.serializedMatMul(X, X.t(), poptorch.MatMulSerializationMode.ReducingDim, -3)


def test_no_overlap_needs_no_options() -> None:
    def model(x: torch.Tensor) -> torch.Tensor:
        pair = Pair(x, [x + 1])
        pair = poptorch.set_overlap_for_input(pair, poptorch.OverlapMode.NoOverlap)
        first, second = poptorch.recomputationCheckpoint(Pair(pair.first, pair.second[0]))
        return poptorch.set_overlap_for_output(first + second, poptorch.OverlapMode.NoOverlap)

    both(model, X)


class Pair(NamedTuple):
    """Two things."""

    first: Any
    second: Any


# Searches and points --------------------------------------------------------------------------------------------------


def _best_by_all_paths(probs: Any, blank: int) -> dict[tuple[int, ...], float]:
    """The probability of each sequence of labels, summed over all paths."""
    import itertools
    import math

    found: dict[tuple[int, ...], float] = {}
    for path in itertools.product(range(probs.shape[1]), repeat=len(probs)):
        labels = tuple(c for c, _ in itertools.groupby(path) if c != blank)
        found[labels] = found.get(labels, 0) + math.prod(float(probs[t, c]) for t, c in enumerate(path))
    return found


@pytest.mark.thorough(but_each=2)
@pytest.mark.parametrize("blank", [0, 2])
def test_ctc_beam_search_decoder(blank: int) -> None:
    probs = torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(1)).softmax(-1)
    lengths = torch.tensor([5, 3])
    scores, counts, paths = both(
        lambda p, n: poptorch.ctc_beam_search_decoder(p, n, blank, 50, 3), probs.log(), lengths
    )
    assert scores.shape == (2, 3) and counts.shape == (2, 3) and paths.shape == (2, 3, 5)
    for n in range(2):
        expected = sorted(_best_by_all_paths(probs[: lengths[n], n], blank).items(), key=lambda item: -item[1])[:3]
        for k, (labels, probability) in enumerate(expected):
            assert tuple(paths[n, k, : counts[n, k]].tolist()) == labels
            assert float(scores[n, k].exp()) == pytest.approx(probability, rel=1e-4)


def test_points() -> None:
    points = torch.randn(11, 3, generator=torch.Generator().manual_seed(0))
    both(lambda p: poptorch.fps(p, [0, 6, 11], ratio=0.4), points)
    both(poptorch.nearest, points, points[:4] + 0.1)
    sets = torch.tensor([0] * 6 + [1] * 5), torch.tensor([0, 0, 1, 1])
    both(poptorch.nearest, points, points[3:7] + 0.1, *sets)
    lists = [t.tolist() for t in sets]
    both(lambda x, y: poptorch.nearest(x, y, *lists), points, points[3:7] + 0.1)


def test_points_of_other_dimensions() -> None:
    line, squares = torch.tensor([0.0, 1.0, 5.0, 2.0]), torch.randn(6, 2, 2)
    assert both(lambda p: poptorch.fps(p, [0, 4]), line).tolist() == [0, 2]
    expected = poptorch.fps(squares.flatten(1), [0, 6]).tolist()
    assert both(lambda p: poptorch.fps(p, [0, 6]), squares).tolist() == expected
    assert both(poptorch.nearest, line, torch.tensor([4.0, 0.0])).tolist() == [1, 1, 0, 0]
    assert both(poptorch.nearest, line, torch.tensor([[4.0], [0.0]])).tolist() == [1, 1, 0, 0]
    assert len(both(lambda p: poptorch.fps(p, [0, 100], 0.07), torch.randn(100, 2))) == 7


def test_a_random_start() -> None:
    points = torch.randn(100, 2)
    wrapped = poptorch.inferenceModel(lambda p: poptorch.fps(p, [0, 100], 0.05, random_start=True))
    assert len({tuple(wrapped(points).tolist()) for _ in range(4)}) > 1


def test_gradients_of_slices() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))

        def forward(self, x: Any, start: Any) -> Any:
            part = poptorch.dynamic_slice(self.w, 1, start, 2, 1)
            whole = poptorch.dynamic_update(x, part * part, 1, start, 2)
            return poptorch.identity_loss(whole * x, "sum")

    model, x, start = Model(), X, torch.tensor(1)
    poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), 0.1))(x, start)
    w = torch.arange(6.0).reshape(2, 3)
    expected = w.clone()
    expected[:, 1:] -= 0.1 * 2 * w[:, 1:] * x[:, 1:]
    torch.testing.assert_close(model.w.detach(), expected)
