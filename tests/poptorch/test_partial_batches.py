"""Batches with fewer rows than those that a model was compiled for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

# ruff: noqa: E402 - poptorch needs torch
import poptorch

ROWS = 19
X = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(ROWS) % 2


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        out = self.b(torch.tanh(self.a(x)))
        return out if y is None else (out, torch.nn.functional.cross_entropy(out, y))


def options(iterations: int = 1, accumulation: int = 1, replicas: int = 1) -> poptorch.Options:
    made = poptorch.Options().deviceIterations(iterations).replicationFactor(replicas)
    made.outputMode(poptorch.OutputMode.All).Training.gradientAccumulation(accumulation)
    return made


@pytest.mark.thorough(but_each=3)
@pytest.mark.parametrize("iterations, replicas, size", [(1, 1, 4), (3, 1, 2), (2, 2, 2), (1, 2, 4)])
def test_inference(iterations: int, replicas: int, size: int) -> None:
    module = Net()
    loader = poptorch.DataLoader(
        chosen := options(iterations, replicas=replicas), torch.utils.data.TensorDataset(X), size, drop_last=False
    )
    model = poptorch.inferenceModel(module, chosen)
    torch.testing.assert_close(torch.cat([model(*batch) for batch in loader]), module(X).detach())


@pytest.mark.thorough(but_each=9)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize(
    "iterations, accumulation, replicas, size",
    [(1, 1, 1, 4), (3, 1, 1, 2), (1, 4, 1, 2), (2, 2, 1, 2), (1, 1, 2, 4), (2, 2, 2, 2), (1, 3, 2, 2)],
)
def test_training(iterations: int, accumulation: int, replicas: int, size: int, optimizer: Any) -> None:
    ours, theirs = Net(), Net()
    reference = optimizer(theirs.parameters(), lr=0.05)
    model = poptorch.trainingModel(
        ours, options(iterations, accumulation, replicas), optimizer(ours.parameters(), lr=0.05)
    )
    step = accumulation * replicas * size
    for _ in range(2):
        for call in range(0, ROWS, step * iterations):
            rows = slice(call, call + step * iterations)
            outs = []
            for x, y in zip(X[rows].split(step), Y[rows].split(step), strict=True):
                out, loss = theirs(x, y)
                reference.zero_grad()
                loss.backward()
                reference.step()
                outs.append(out.detach())
            torch.testing.assert_close(model(X[rows], Y[rows])[0], torch.cat(outs), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-4, atol=1e-5)


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        out = self.norm(super().forward(x))
        return out if y is None else torch.nn.functional.cross_entropy(out, y)


def test_state_weights_and_rates_go_on() -> None:
    ours, theirs = Normed(), Normed()
    optimizer, reference = (torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in (ours, theirs))
    schedules = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in (optimizer, reference)]
    model = poptorch.trainingModel(ours, optimizer=optimizer)
    for _ in range(2):
        for x, y in zip(X.split(8), Y.split(8), strict=True):
            reference.zero_grad()
            loss = theirs(x, y)
            loss.backward()
            reference.step()
            torch.testing.assert_close(model(x, y), loss.detach(), rtol=1e-4, atol=1e-5)
        for schedule in schedules:
            schedule.step()
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(optimizer.state_dict()["state"], reference.state_dict()["state"], rtol=1e-4, atol=1e-5)


def test_buffers_are_carried_from_size_to_size() -> None:
    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x[:, 0] * 0 + self.calls

    module = Counting()
    model = poptorch.inferenceModel(module, poptorch.Options().deviceIterations(2))
    found = [model(X[:rows]).tolist() for rows in (4, 2, 4, 3)]
    assert found == [[1, 1, 2, 2], [3, 3], [4, 4, 5, 5], [6, 6, 7]]
    assert module.calls.item() == 7


@pytest.mark.parametrize("training", [True, False])
def test_a_model_that_is_cut(training: bool) -> None:
    class Chosen(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
            chosen = x[:, 0] > 0
            return super().forward(x[chosen], None if y is None else y[chosen])

    ours, theirs = Chosen(), Chosen()
    optimizer, reference = (torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in (ours, theirs))
    model = poptorch.trainingModel(ours, optimizer=optimizer) if training else poptorch.inferenceModel(ours)
    for x, y in 2 * list(zip(X.split(8), Y.split(8), strict=True)):
        if not training:
            torch.testing.assert_close(model(x), theirs(x).detach())
            continue
        reference.zero_grad()
        theirs(x, y)[1].backward()
        reference.step()
        model(x, y)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_fewer_rows_than_a_pipeline_has_stages(training: bool) -> None:
    class Staged(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
            with poptorch.Block(ipu_id=0):
                x = self.a(x)
            with poptorch.Block(ipu_id=1):
                out = self.b(x)
                return out if y is None else torch.nn.functional.cross_entropy(out, y)

    ours, theirs = Staged(), Staged()
    if not training:
        model = poptorch.inferenceModel(ours, options(2))
        found = [model(x) for x in X.split(4)]
        torch.testing.assert_close(torch.cat(found), theirs(X).detach())
        return
    optimizer, reference = (torch.optim.SGD(net.parameters(), lr=0.1) for net in (ours, theirs))
    model = poptorch.trainingModel(ours, options(1, 4), optimizer)
    for x, y in zip(X.split(8), Y.split(8), strict=True):
        reference.zero_grad()
        theirs(x, y).backward()
        reference.step()
        model(x, y)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-4, atol=1e-5)


def test_what_else_a_call_does() -> None:
    """Arguments are overwritten, anchors are kept, and what is no tensor may have as many values as there are rows."""

    def forward(batch: dict[str, Any]) -> dict[str, Any]:
        batch["x"] += 1
        return {"sum": batch["x"].sum(), "names": batch["names"]}

    chosen = poptorch.Options().deviceIterations(2).anchorTensor("x", "input/batch['x']")
    model = poptorch.inferenceModel(forward, chosen)
    given = X.clone()
    results = [model({"x": given[rows], "names": ["a"] * 3}) for rows in (slice(0, 4), slice(4, 7))]
    torch.testing.assert_close(given[:7], X[:7] + 1)
    torch.testing.assert_close(results[1]["sum"], torch.stack([given[4:6].sum(), given[6:7].sum()]))
    torch.testing.assert_close(model.getAnchoredTensor("x"), X[4:7])


@pytest.mark.parametrize(
    "mode, expected",
    [(poptorch.OutputMode.All, [1.0, 5.0, 4.0]), (poptorch.OutputMode.Final, 4.0), (poptorch.OutputMode.Sum, 10.0)],
)
def test_output_modes(mode: poptorch.OutputMode, expected: Any) -> None:
    model = poptorch.inferenceModel(lambda x: x.sum(), poptorch.Options().deviceIterations(4).outputMode(mode))
    model(torch.ones(8))
    found = model(torch.arange(5.0))
    assert (found.sum() if mode is poptorch.OutputMode.Sum else found).tolist() == expected


def every_second(x: torch.Tensor) -> torch.Tensor:
    model = poptorch.inferenceModel(
        lambda x: x + 1, poptorch.Options().deviceIterations(4).outputMode(poptorch.OutputMode.EveryN, 2)
    )
    model(X[:8])
    return model(x)


def refused(x: torch.Tensor) -> torch.Tensor:
    model = poptorch.inferenceModel(lambda x: x + 1, poptorch.Options().partialBatch(poptorch.PartialBatch.Refuse))
    model(X[:8])
    return model(x)


def summed(x: torch.Tensor) -> torch.Tensor:
    model = poptorch.inferenceModel(
        lambda x: x + 1, poptorch.Options().deviceIterations(4).outputMode(poptorch.OutputMode.Sum)
    )
    model(X[:8])
    return model(x)


@pytest.mark.parametrize(
    "run, words",
    [
        (every_second, "no step of them that OutputMode.EveryN with a period of 2"),
        (refused, r"expected torch.Size\(\[8, 3\]\) but got torch.Size\(\[5, 3\]\).*drop_last"),
        (summed, r"in 2 parts, whose results have the shapes \[2, 3\], \[1, 3\]"),
    ],
)
def test_what_cannot_be_one_result(run: Callable[[Any], Any], words: str) -> None:
    with pytest.raises(poptorch.Error, match=words):
        run(X[:5])


def test_error_of_results_leaves_weights() -> None:
    """Results that cannot be combined are found before the first part of a batch trains the model."""
    module = Net()
    chosen = options(2).outputMode(poptorch.OutputMode.Sum)
    model = poptorch.trainingModel(module, chosen, torch.optim.SGD(module.parameters(), lr=0.1))
    model(X[:8], Y[:8])
    before = module.a.weight.detach().clone()
    with pytest.raises(poptorch.Error, match="there is no result of them"):
        model(X[:7], Y[:7])
    model.copyWeightsToHost()
    torch.testing.assert_close(module.a.weight.detach(), before, rtol=0, atol=0)


def test_what_is_no_smaller_batch() -> None:
    model = poptorch.inferenceModel(lambda x, y: x + y)
    model(X[:4], X[:4])
    for other in (X[:6], X[:4, :2], X[:0], X[:2].to(torch.float16), X[0]):
        with pytest.raises(poptorch.Error, match="mismatch for"):
            model(other, other)


@pytest.mark.parametrize("iterations, replicas, size", [(1, 1, 4), (3, 1, 2), (2, 2, 2)])
def test_rows_that_do_not_count(iterations: int, replicas: int, size: int) -> None:
    compilations: list[None] = []
    handle = poptorch.registerPostCompileHook(lambda: compilations.append(None))
    module = Net()
    padding = options(iterations, replicas=replicas).partialBatch(poptorch.PartialBatch.Pad)
    model = poptorch.inferenceModel(
        lambda x, names: {"out": module(x), "tokens": x.reshape(-1), "names": names}, padding
    )
    whole = iterations * replicas * size
    for x in (X[:whole], *X.split(whole)):
        result = model(x, ["a"] * len(x))
        torch.testing.assert_close(result["out"], module(x).detach())
        torch.testing.assert_close(result["tokens"], x.reshape(-1))
        assert result["names"] == ["a"] * len(x)
    handle.remove()
    assert len(compilations) == 1


class Counting(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows += len(x)
        return x + 1


def test_where_all_rows_would_count_none_are_added() -> None:
    padding = poptorch.Options().partialBatch(poptorch.PartialBatch.Pad)
    model = poptorch.inferenceModel(lambda x: (x, x.mean()), padding)
    counting = poptorch.inferenceModel(module := Counting(), padding)
    for rows in (8, 5):
        torch.testing.assert_close(model(X[:rows])[1], X[:rows].mean())
        counting(X[:rows])
    assert module.rows.item() == 13
    ours, theirs = Net(), Net()
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1)
    trained = poptorch.trainingModel(ours, padding, torch.optim.SGD(ours.parameters(), lr=0.1))
    for x, y in zip(X.split(8), Y.split(8), strict=True):
        reference.zero_grad()
        theirs(x, y)[1].backward()
        reference.step()
        trained(x, y)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


def test_programs_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    compilations: list[None] = []
    model = poptorch.inferenceModel(lambda x: x + 1, poptorch.Options().keptPrograms(2))
    handle = poptorch.registerPostCompileHook(lambda: compilations.append(None))
    for rows in (8, 5, 8, 5, 4, 5):
        torch.testing.assert_close(model(X[:rows]), X[:rows] + 1)
    assert len(compilations) == 3 and not caplog.records
    model(X[:3]), model(X[:2])
    handle.remove()
    assert "more than 2 smaller numbers of rows" in caplog.text
