"""The ops of poptorch: in a wrapped model as on the host, and what they refuse."""

from __future__ import annotations

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


def test_loops_are_for_inference() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.ones(3))

        def forward(self, x: Any) -> Any:
            (x,) = poptorch.for_loop(2, lambda a: a * 2, [x * self.w])
            return poptorch.identity_loss(x, "sum")

    with pytest.raises(poptorch.Error, match="poptorch.for_loop .* is only supported in inference"):
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
    with pytest.raises(poptorch.Error, match="`start` is torch.float32; expected a tensor with an integer"):
        poptorch.dynamic_slice(X, 0, torch.tensor(1.0), 1, 1)
    with pytest.raises(poptorch.Error, match="`start` is 1; expected a tensor with an integer"):
        poptorch.dynamic_update(X, X, 0, 1, 1)
    with pytest.raises(poptorch.Error, match="expected 2 dimensions and the dtype of `input`"):
        poptorch.dynamic_update(X, X.half(), 0, torch.tensor(0), 1)
    with pytest.raises(poptorch.Error, match="5 elements with step 1, of 3 in dimension 1"):
        poptorch.dynamic_slice(X, 1, torch.tensor(0), 5, 1)


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


def test_cpu_of_a_module() -> None:
    linear = torch.nn.Linear(3, 2)
    cpu = poptorch.CPU(linear, "Linear")
    both(lambda x: cpu(x), X)
    assert not any(p.requires_grad for p in linear.parameters())


# Custom ops -----------------------------------------------------------------------------------------------------------


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


def test_what_changes_nothing() -> None:
    both(lambda x: poptorch.nop(x) + poptorch.set_available_memory(x, 0.3), X)
    both(lambda x: poptorch.recomputationCheckpoint(x, x + 1), X)
    assert isinstance(poptorch.recomputationCheckpoint([X, X]), list)
    both(lambda x: poptorch.serializedMatMul(x, x.t(), poptorch.MatMulSerializationMode.ReducingDim, 3), X)
    with pytest.raises(poptorch.Error, match="set_overlap_for_input: expected tensors; got 3"):
        poptorch.set_overlap_for_input([X, 3], poptorch.OverlapMode.NoOverlap)


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
