"""A recommender: large embedding tables off the chip, bags of items, products of features, dense and sparse parts."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

import poptorch

ROWS, WIDTH, BAG, DENSE = (20_000, 5_000, 300), 8, 4, 3


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(n, WIDTH, mode="mean") for n in ROWS)
        self.dense = nn.Sequential(nn.Linear(DENSE, WIDTH), nn.ReLU())
        products = len(ROWS) * (len(ROWS) + 1) // 2
        self.top = nn.Sequential(nn.Linear(WIDTH + products, 16), nn.ReLU(), nn.Linear(16, 1))
        self.register_buffer("pairs", torch.triu_indices(len(ROWS) + 1, len(ROWS) + 1, 1), persistent=False)

    def forward(self, dense, items, clicked=None):
        x = self.dense(dense)
        features = torch.stack([x, *(table(items[:, i]) for i, table in enumerate(self.tables))], 1)
        products = (features @ features.mT)[:, self.pairs[0], self.pairs[1]]
        score = self.top(torch.cat([x, products], 1))[:, 0]
        return score if clicked is None else (score, F.binary_cross_entropy_with_logits(score, clicked))


def visits(count, seed):
    """Whether somebody clicks follows from the kind of the items, which is hidden in their numbers."""
    numbers = torch.Generator().manual_seed(seed)
    dense = torch.randn(count, DENSE, generator=numbers)
    items = torch.stack([torch.randint(min(n, 40), (count, BAG), generator=numbers) for n in ROWS], 1)
    kinds = (items % 2).float().mean((1, 2))
    return dense, items, (dense[:, 0] + 8 * (kinds - 0.5) > 0).float()


def main(folder=None):
    torch.manual_seed(0)
    module = Recommender()
    options = poptorch.Options().deviceIterations(8)
    far = poptorch.TensorLocationSettings().useOnChipStorage(False)
    options.TensorLocations.setOptimizerLocation(far)
    loader = poptorch.DataLoader(options, torch.utils.data.TensorDataset(*visits(2048, 0)), batch_size=64)
    rest = [*module.dense.parameters(), *module.top.parameters()]
    groups = [{"params": module.tables.parameters(), "lr": 1e-2}, {"params": rest}]
    optimizer = poptorch.optim.Adam(groups, lr=3e-3)
    model = poptorch.trainingModel(module, options, optimizer)
    losses = [model(*batch)[1].item() for _ in range(8) for batch in loader]
    dense, items, clicked = visits(256, 1)
    score = poptorch.inferenceModel(module)(dense, items)
    right = ((score > 0) == (clicked > 0.5)).float().mean()
    print(f"recommender: loss {losses[0]:.2f}, {losses[-1]:.2f}; {right:.0%} of new visits right")
    torch.testing.assert_close(score, module(dense, items).detach(), rtol=1e-4, atol=1e-5)
    assert right > 0.8


if __name__ == "__main__":
    main(*sys.argv[1:])
