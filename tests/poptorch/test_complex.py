"""Models that compute with complex numbers, beside PyTorch: inference, and three steps of training."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402  (they need torch)

import poptorch  # noqa: E402


class Rotary(nn.Module):
    """Attention with rotary embeddings, as Llama was first published."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 12)
        angles = torch.outer(torch.arange(3.0), torch.tensor([1.0, 0.1]))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        q, k = (self._turned(t) for t in (q, k))
        return nn.functional.scaled_dot_product_attention(q, k, v)

    def _turned(self, t: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(t.float().reshape(*t.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.turns).flatten(-2).type_as(t)


class FNet(nn.Module):
    """A layer of FNet: tokens are mixed by a Fourier transform."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.feed = nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x + torch.fft.fft(torch.fft.fft(x, dim=-1), dim=-2).real)
        return x + self.feed(x)


class Fourier(nn.Module):
    """A block of a Fourier neural operator: the lowest frequencies, each times a complex matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, 2, 2, dtype=torch.cfloat) / 4)
        self.beside = nn.Conv2d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft2(x)
        kept = torch.zeros_like(spectrum)
        kept[:, :, :2, :2] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :2, :2], self.weight)
        return nn.functional.gelu(torch.fft.irfft2(kept, s=x.shape[-2:]) + self.beside(x))


class Spectral(nn.Module):
    """A filter of complex numbers for each frequency, and a complex layer; what it returns is complex."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.view_as_real(torch.randn(3, 3, dtype=torch.cfloat)).clone())
        self.mix = nn.Linear(3, 2, dtype=torch.cfloat)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft(x, norm="ortho") * torch.view_as_complex(self.filter)
        return self.mix(spectrum.conj()) / (1 + spectrum.abs().sum())


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Rotary": (Rotary, (2, 3, 4)),
    "FNet": (FNet, (2, 3, 4)),
    "Fourier": (Fourier, (2, 4, 5, 4)),
    "Spectral": (Spectral, (2, 3, 4)),
}
OPTIMISERS = {
    "Rotary": lambda p: torch.optim.NAdam(p, 0.01),
    "FNet": lambda p: torch.optim.Adagrad(p, 0.01, initial_accumulator_value=0.1),
    "Fourier": lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1),
    "Spectral": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.9, centered=True),
}


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.model(x)
        return out, poptorch.identity_loss(out.abs().square().mean(), "none")


@pytest.mark.thorough(but_each=2)
@pytest.mark.parametrize("name", MODELS)
def test_models_infer_and_train_as_in_pytorch(name: str) -> None:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    theirs = WithLoss(make())
    ours = copy.deepcopy(theirs)
    x = torch.randn(shape)
    torch.testing.assert_close(poptorch.inferenceModel(ours.model)(x), theirs.model(x), rtol=1e-4, atol=1e-5)

    optimiser = OPTIMISERS[name](theirs.parameters())
    training = poptorch.trainingModel(ours, optimizer=OPTIMISERS[name](ours.parameters()))
    for _ in range(3):
        optimiser.zero_grad()
        out, loss = theirs(x)
        loss.backward()
        optimiser.step()
        mine = training(x)
        torch.testing.assert_close(mine, (out.detach(), loss.detach()), rtol=1e-4, atol=1e-5)
    for (key, wanted), found in zip(theirs.state_dict().items(), ours.state_dict().values(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5, msg=key)


def test_gradients_of_complex_weights_are_summed_over_micro_batches_and_clipped() -> None:
    torch.manual_seed(0)
    theirs = WithLoss(nn.Linear(3, 2, dtype=torch.cfloat))
    ours = copy.deepcopy(theirs)
    x = torch.randn(4, 3, dtype=torch.cfloat)
    options = poptorch.Options()
    options.Training.gradientAccumulation(2)
    options.outputMode(poptorch.OutputMode.All)
    optimiser = poptorch.optim.SGD(ours.parameters(), lr=0.5, max_grad_norm=0.1)
    poptorch.trainingModel(ours, options, optimiser)(x)

    theirs(x)[1].backward()
    torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
    torch.optim.SGD(theirs.parameters(), 0.5).step()
    for found, wanted in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(found, wanted)


def test_complex_numbers_go_in_and_out() -> None:
    def both(z: torch.Tensor, wide: torch.Tensor) -> Any:
        return {"conj": z.conj(), "wide": wide * 2j, "number": z.real + 1, "noise": torch.randn(3000, dtype=z.dtype)}

    z, wide = torch.randn(2, 3, dtype=torch.cfloat), torch.randn(2, dtype=torch.cdouble)
    found, wanted = poptorch.inferenceModel(both)(z.conj(), wide), both(z.conj(), wide)
    assert found["wide"].dtype is torch.complex64
    noise = torch.view_as_real(found.pop("noise"))
    assert noise.std(0).tolist() == pytest.approx([0.5**0.5] * 2, rel=0.1) and noise.mean().abs() < 0.05
    for name, t in found.items():
        torch.testing.assert_close(t, wanted[name].resolve_conj(), check_dtype=False)


REFUSED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "least squares": (lambda z: torch.linalg.lstsq(z, z).solution, "LeastSquares: `input` is c64.*real numbers alone"),
    "uniform numbers": (lambda z: torch.rand_like(z), "aten.rand_like at .*expected popxl.float32"),
    "half": (lambda z: z.to(torch.complex32), "Unsupported dtype torch.complex32: .*complex64"),
}


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_with_complex_numbers(name: str) -> None:
    function, message = REFUSED[name]
    with pytest.raises(poptorch.Error, match=message):
        poptorch.inferenceModel(function)(torch.randn(2, 3, dtype=torch.cfloat))


def test_a_loss_is_real() -> None:
    class Model(nn.Linear):
        def forward(self, z: torch.Tensor) -> torch.Tensor:
            return poptorch.identity_loss(super().forward(z), "sum")

    model = Model(3, 2, dtype=torch.cfloat)
    training = poptorch.trainingModel(model, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    with pytest.raises(poptorch.Error, match="loss is complex.*abs"):
        training(torch.randn(4, 3, dtype=torch.cfloat))
