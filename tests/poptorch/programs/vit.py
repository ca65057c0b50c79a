"""A vision transformer: two replicas, bfloat16 by autocast, dropout, and an average of the weights on the host."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

import poptorch

SIZE, PATCH, WIDTH, CLASSES = 12, 4, 32, 4


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, PATCH, PATCH)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, (SIZE // PATCH) ** 2 + 1, WIDTH) * 0.02)
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, 0.1, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, pictures, labels=None):
        x = self.patches(pictures).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.positions
        scores = self.head(self.encoder(x)[:, 0])
        return scores if labels is None else (scores, F.cross_entropy(scores.float(), labels))


class Corners(torch.utils.data.Dataset):
    """Which corner is bright?"""

    def __init__(self, first, count):
        self.first, self.count = first, count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        numbers = torch.Generator().manual_seed(self.first + i)
        picture, corner = torch.randn(1, SIZE, SIZE, generator=numbers), i % CLASSES
        y, x = divmod(corner, 2)
        picture[:, y * 6 : y * 6 + 6, x * 6 : x * 6 + 6] += 2
        return picture, corner


def main(folder=None):
    torch.manual_seed(0)
    module = ViT()
    options = poptorch.Options().replicationFactor(2).deviceIterations(2).randomSeed(3)
    loader = poptorch.DataLoader(options, Corners(0, 128), batch_size=8, shuffle=True, num_workers=1)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    model = poptorch.trainingModel(module, options, optimizer)
    judge = poptorch.inferenceModel(module.eval(), poptorch.Options())
    average = torch.optim.swa_utils.AveragedModel(module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.8))
    for _ in range(10):
        with torch.autocast("cpu", torch.bfloat16):
            for pictures, labels in loader:
                model(pictures, labels)
        average.update_parameters(module)  # brings the weights home
    pictures, labels = torch.utils.data.default_collate([Corners(1000, 48)[i] for i in range(48)])
    hits = (judge(pictures).argmax(1) == labels).float().mean()
    averaged = (average(pictures).argmax(1) == labels).float().mean()
    print(f"vit: {hits:.0%} right, {averaged:.0%} with averaged weights")
    torch.testing.assert_close(judge(pictures), module(pictures).detach(), rtol=1e-4, atol=1e-5)
    assert hits > 0.9 and averaged > 0.9


if __name__ == "__main__":
    main(*sys.argv[1:])
