"""A masked autoencoder: patches that are drawn on the device, an encoder for few of them, a decoder for all."""

import sys

import torch
from torch import nn

import poptorch

SIZE, PATCH, WIDTH, KEPT = 16, 4, 32, 6
PATCHES, NUMBERS = (SIZE // PATCH) ** 2, PATCH**2


def encoder(layers):
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


class MaskedAutoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(NUMBERS, WIDTH), nn.Linear(WIDTH, NUMBERS)
        self.encoder, self.decoder = encoder(2), encoder(1)
        self.masked = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.register_buffer("places", torch.randn(1, PATCHES, WIDTH))

    def forward(self, pictures, noise=None):
        rows = len(pictures)
        patches = pictures.unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH).reshape(rows, PATCHES, NUMBERS)
        order = torch.argsort(torch.rand(rows, PATCHES) if noise is None else noise, 1)
        back = torch.argsort(order, 1)

        def take(x, places):
            return torch.gather(x, 1, places[..., None].expand(-1, -1, x.shape[-1]))

        seen = take(self.into(patches) + self.places, order[:, :KEPT])
        seen = torch.cat([self.encoder(seen), self.masked.expand(rows, PATCHES - KEPT, -1)], 1)
        found = self.out(self.decoder(take(seen, back) + self.places))
        hidden = (back >= KEPT).float()
        errors = ((found - patches) ** 2).mean(-1)
        return found, poptorch.identity_loss((errors * hidden).sum() / hidden.sum(), "none")


def pictures(count, seed):
    """Waves: what is hidden follows from what is seen."""
    numbers = torch.Generator().manual_seed(seed)
    phase, speed = torch.rand(2, count, 1, 1, generator=numbers)
    places = torch.linspace(0, 3, SIZE)
    return torch.sin(6 * phase + (1 + speed) * (places[:, None] + places))


def main(folder=None):
    torch.manual_seed(0)
    module = MaskedAutoencoder()
    options = poptorch.Options().deviceIterations(8).randomSeed(5)
    loader = poptorch.DataLoader(options, torch.utils.data.TensorDataset(pictures(256, 0)), batch_size=16, shuffle=True)
    optimizer = poptorch.optim.AdamW(module.parameters(), lr=3e-3, betas=(0.9, 0.95))
    model = poptorch.trainingModel(module, options, optimizer)
    losses = [model(batch)[1].item() for _ in range(15) for (batch,) in loader]
    rows, noise = pictures(8, 1), torch.rand(8, PATCHES)
    found, loss = poptorch.inferenceModel(module)(rows, noise)
    expected, expected_loss = module(rows, noise)
    print(f"mae: loss {losses[0]:.2f}, {losses[-1]:.3f}; of others {loss:.3f}")
    torch.testing.assert_close((found, loss), (expected.detach(), expected_loss.detach()), rtol=1e-4, atol=1e-5)
    assert losses[-1] < 0.3 * losses[0] and loss < 0.3


if __name__ == "__main__":
    main(*sys.argv[1:])
