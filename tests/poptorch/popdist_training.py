"""A PyTorch model that several processes train together, or one alone. Run as a script by `poprun`, it writes what it
found: `popdist_training.py FOLDER`. With `sharded` after it, each replica has a part of the weights."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import popdist
import popdist.poptorch  # type: ignore[import-not-found]  # it is where `popdist.__path__` says
import poptorch

REPLICAS, ITERATIONS, ACCUMULATION, BATCH = 4, 2, 3, 2


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = torch.nn.Linear(5, 4), torch.nn.Dropout(0.25)

    def forward(self, x: Any, labels: Any) -> Any:
        return torch.nn.functional.cross_entropy(self.layer(x), labels), self.dropout(torch.ones_like(x))


def train(options: poptorch.Options, first: int = 0) -> dict[str, np.ndarray]:
    """Two calls, on the rows of the replicas of this process. The losses and what is dropped, by replicas; and, where
    the first replica is, the weights after each call."""
    options.deviceIterations(ITERATIONS).outputMode(poptorch.OutputMode.All).randomSeed(3)
    options.Training.gradientAccumulation(ACCUMULATION)
    torch.manual_seed(0)
    model = Model()
    training = poptorch.trainingModel(model, options, poptorch.optim.AdamW(model.parameters(), lr=0.1))
    count, random, losses, masks, weights = options.replication_factor, np.random.default_rng(1), [], [], []
    for _ in range(2):
        x = random.normal(size=(ITERATIONS * ACCUMULATION, REPLICAS, BATCH, 5)).astype(np.float32)
        labels = random.integers(0, 3, x.shape[:3])
        own = (torch.tensor(array[:, first : first + count].reshape(-1, *array.shape[3:])) for array in (x, labels))
        loss, mask = training(*own)
        losses.append(loss.reshape(-1, count).numpy().T)
        masks.append(mask.reshape(-1, count, BATCH, 5).numpy().swapaxes(0, 1))
        if first == 0:
            weights.append(model.layer.weight.detach().numpy().copy())
    return {"losses": np.stack(losses, 1), "masks": np.stack(masks, 1), "weights": np.array(weights)}


if __name__ == "__main__":
    options, location = popdist.poptorch.Options(), poptorch.TensorLocationSettings()
    if sys.argv[2:] == ["sharded"]:
        location.useReplicatedTensorSharding().minElementsForReplicatedTensorSharding(2)
    else:
        location.useOnChipStorage(False)
    options.TensorLocations.setWeightLocation(location).setOptimizerLocation(location)  # the test compares without
    found = train(options, popdist.getReplicaIndexOffset())
    np.savez(Path(sys.argv[1], f"{popdist.getInstanceIndex()}.npz"), **found)
