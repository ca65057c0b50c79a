"""Several processes that train together: each loads its share, one of them saves. `poprun` starts them."""

import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import popdist
import popdist.poptorch
import poptorch


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, x, labels):
        return F.cross_entropy(self.layers(x), labels)


def data():
    x = torch.randn(96, 6, generator=torch.Generator().manual_seed(1))
    return torch.utils.data.TensorDataset(x, x[:, :3].argmax(1))


def train(folder):
    popdist.init()
    torch.manual_seed(0)
    options = popdist.poptorch.Options().deviceIterations(2).randomSeed(4)
    module = Model()
    loader = poptorch.DataLoader(options, data(), batch_size=4, shuffle=True, num_workers=1)
    model = poptorch.trainingModel(module, options, torch.optim.SGD(module.parameters(), lr=0.3, momentum=0.9))
    losses = [model(*batch).mean().item() for _ in range(20) for batch in loader]
    weights = module.state_dict()
    if popdist.getInstanceIndex() == 0:
        torch.save(weights, Path(folder, "weights.pt"))
    torch.save([len(loader), losses], Path(folder, f"{popdist.getInstanceIndex()}.pt"))


def main(folder):
    """Start two processes with two replicas each, as `poprun --num-instances=2 --num-replicas=4` does."""
    command = [
        sys.executable,
        "-m",
        "runtime.poprun",
        "--num-instances=2",
        "--num-replicas=4",
        sys.executable,
        __file__,
        folder,
    ]
    subprocess.run(command, check=True, env={**os.environ, "POPXL_CPU_DEVICES": "2"})
    (count, losses), (_, others) = (torch.load(Path(folder, f"{i}.pt")) for i in range(2))
    module = Model()
    module.load_state_dict(torch.load(Path(folder, "weights.pt")))
    loss = module(*data().tensors).item()
    print(f"processes: {count} calls an epoch; loss {losses[0]:.2f}, {loss:.3f}")
    assert count == 3 and losses != others and loss < 0.3


if __name__ == "__main__":
    (train if popdist.isPopdistEnvSet() else main)(*sys.argv[1:])
