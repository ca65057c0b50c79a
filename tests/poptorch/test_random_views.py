"""Random programs of views, writes through them, and reads, beside PyTorch: results, arguments and gradients."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

torch = pytest.importorskip("torch")

import poptorch  # noqa: E402  (it needs torch)

pytestmark = pytest.mark.filterwarnings("ignore:Use of .* on expanded tensors", "ignore:Nothing is trained")

Function = Callable[[torch.Tensor], torch.Tensor]
Step = tuple[str, int, Function]


def _views(r: random.Random, t: torch.Tensor) -> list[Function]:
    """Views of a tensor, with what they take drawn at random. Not all of them exist."""
    d, count = r.randrange(max(t.dim(), 1)), t.numel()
    size = t.shape[d] if t.dim() else 1
    start, order = r.randrange(size), r.sample(range(t.dim()), t.dim())
    length, step, rows = r.randint(1, size - start), r.randint(1, 3), r.choice([1, 2, 3])
    sizes, strides = [r.randint(1, 3) for _ in range(2)], [r.randrange(4) for _ in range(2)]
    return [
        lambda t: t.view(rows, count // rows),
        lambda t: t.reshape(count // rows, rows),
        lambda t: t.permute(order),
        lambda t: t.expand(rows, *t.shape),
        lambda t: t.select(d, start),
        lambda t: t[(slice(None),) * d + (slice(start, None, step),)],
        lambda t: t.narrow(d, start, length),
        lambda t: t.unfold(d, length, step),
        # Beyond the view that it is called on, it sees numbers that PyTorch forgets the gradients of.
        lambda t: (t if t._base is None or not t.requires_grad else t._base).as_strided(sizes, strides),
        lambda t: t.diagonal(),
        lambda t: t.unsqueeze(d),
        lambda t: t.chunk(2, d)[-1],
        lambda t: t.flatten(),
        lambda t: t.detach(),
        lambda t: torch.einsum("...->...", t),
        lambda t: t * 2,
    ]


def _writes(r: random.Random) -> list[Function]:
    number = r.randint(1, 9) / 4

    def others(t: torch.Tensor) -> torch.Tensor:
        return (torch.arange(t.numel()) * 7 % 13).reshape(t.shape) / 4

    return [
        lambda t: t.fill_(number),
        lambda t: t.copy_(others(t)),
        lambda t: t.mul_(number),
        lambda t: t.add_(others(t)),
        lambda t: t.masked_fill_(others(t) > 1, number),
    ]


def _run(steps: Sequence[Step], first: torch.Tensor) -> list[torch.Tensor]:
    tensors = [first]
    for kind, number, function in steps:
        made = function(tensors[number])
        if kind == "view":
            tensors.append(made)
    return tensors


def _loss(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.stack([(torch.linspace(0.5, 1.5, t.numel()) * t.flatten()).sum() for t in tensors]).sum()


def _program(seed: int, first: torch.Tensor, is_differentiated: bool, length: int = 9) -> list[Step]:
    """Steps that PyTorch takes, one after the other, beginning with a function of a tensor like `first`."""
    r = random.Random(seed)
    steps: list[Step] = []
    for _ in range(4 * length):
        tensors = _run(steps, first.clone() * 1)
        number = max(r.randrange(len(tensors)), r.randrange(len(tensors)))
        kind = r.choice(["view", "view", "write"])
        step = kind, number, r.choice(_views(r, tensors[number]) if kind == "view" else _writes(r))
        try:
            made = _run([*steps, step], first.clone() * 1)
            if is_differentiated:
                _loss(made).backward()
        except (IndexError, RuntimeError):
            continue
        if made[-1].numel() in range(1, 100):
            steps.append(step)
        if len(steps) == length:
            break
    return steps


def _arguments() -> list[torch.Tensor]:
    x = torch.arange(12.0) / 4
    return [x, x.view(3, 4), x.view(3, 4).t(), x.view(2, 3, 2).permute(2, 0, 1), x[:4].view(2, 2)]


@pytest.mark.thorough(but_each=8)
@pytest.mark.parametrize("seed", range(8))
def test_programs(seed: int) -> None:
    programs = [_program(100 * seed + i, x, False) for i, x in enumerate(_arguments())]

    def function(*given: torch.Tensor) -> list[torch.Tensor]:
        return [t.clone() for x, steps in zip(given, programs, strict=True) for t in _run(steps, x)]

    ours, theirs = ([x.clone(memory_format=torch.preserve_format) for x in _arguments()] for _ in range(2))
    expected = function(*theirs)
    torch.testing.assert_close(poptorch.inferenceModel(function)(*ours), expected)
    torch.testing.assert_close(ours, theirs)


class _Programs(torch.nn.Module):
    def __init__(self, programs: Sequence[Sequence[Step]]) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList([x.clone().contiguous() for x in _arguments()])
        self.programs = programs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = [t for w, steps in zip(self.weights, self.programs, strict=True) for t in _run(steps, w * x)]
        return poptorch.identity_loss(_loss(found), "none")


@pytest.mark.thorough(but_each=8)
@pytest.mark.parametrize("seed", range(8))
def test_gradients(seed: int) -> None:
    first = [x.clone().contiguous().requires_grad_() for x in _arguments()]
    programs = [_program(100 * seed + i, x, True) for i, x in enumerate(first)]
    ours, theirs = _Programs(programs), _Programs(programs)
    model = poptorch.trainingModel(ours, optimizer=torch.optim.SGD(ours.parameters(), lr=0.01))
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.01)
    expected = theirs(torch.tensor(0.5))
    expected.backward()
    optimizer.step()
    torch.testing.assert_close(model(torch.tensor(0.5)), expected.detach())
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value)
