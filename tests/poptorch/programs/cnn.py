"""A CNN in float16: half partials, recomputation, automatic loss scaling, pictures as bytes, a cosine schedule."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

import poptorch

CLASSES, SIZE = 3, 12


class Residual(nn.Module):
    def __init__(self, n, m, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(n, m, 3, stride, 1, bias=False), nn.BatchNorm2d(m)
        self.conv2, self.bn2 = nn.Conv2d(m, m, 3, 1, 1, bias=False), nn.BatchNorm2d(m)
        self.way = nn.Conv2d(n, m, 1, stride, bias=False)

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.way(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList([Residual(8, 8, 1), Residual(8, 16, 2)])
        self.head = nn.Linear(16, CLASSES)

    def forward(self, pictures, labels=None):
        x = (pictures.half() - 128) / 64  # bytes travel to the device, and become numbers there
        x = self.first(x)
        for block in self.blocks:
            x = poptorch.recomputationCheckpoint(block(x))
        scores = self.head(x.mean((2, 3))).float()
        return scores if labels is None else (scores, F.cross_entropy(scores, labels, label_smoothing=0.1))


def picture(i):
    """A stripe in one of three directions, in noise."""
    numbers = torch.Generator().manual_seed(i)
    noise = torch.randint(96, (3, SIZE, SIZE), generator=numbers, dtype=torch.uint8)
    at, kind = int(torch.randint(2, SIZE - 2, (), generator=numbers)), i % CLASSES
    if kind < 2:
        noise.select(kind + 1, at).fill_(250)
    else:
        noise.diagonal(dim1=1, dim2=2).fill_(250)
    return noise, kind


def main(folder=None):
    torch.manual_seed(0)
    options = poptorch.Options().deviceIterations(2)
    options.Precision.setPartialsType(torch.half)
    options.Training.gradientAccumulation(2).setAutomaticLossScaling(True)
    module = Net().half()
    data = [picture(i) for i in range(96)]
    loader = poptorch.DataLoader(options, data, batch_size=8, shuffle=True)
    optimizer = poptorch.optim.SGD(
        module.parameters(), lr=0.05, momentum=0.9, loss_scaling=64.0, use_combined_accum=True
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
    model = poptorch.trainingModel(module, options, optimizer)
    inference = poptorch.Options().deviceIterations(3)
    tested = poptorch.DataLoader(inference, [picture(i) for i in range(96, 144)], batch_size=8)
    judge = poptorch.inferenceModel(module.eval(), inference)
    for _ in range(10):
        for batch in loader:
            model(*batch)
            schedule.step()
    hits = torch.cat([judge(pictures).argmax(1) == labels for pictures, labels in tested])
    factor = optimizer.state_dict()["ipu_state"]["lossScaleUpdateFactor"]
    print(f"cnn: {hits.float().mean():.0%} right; losses scaled by {float(factor) * 64:g}")
    assert hits.shape == (48,) and hits.float().mean() > 0.9
    assert module.first.weight.dtype == torch.half


if __name__ == "__main__":
    main(*sys.argv[1:])
