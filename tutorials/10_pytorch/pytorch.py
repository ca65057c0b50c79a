# %% [markdown]
# # PyTorch
#
# A PyTorch model, as it is, as one compiled program: its loop, its graph, its report,
# four replicas of it, and several processes.
# README.md beside this file tells the story.
#
#     python tutorials/10_pytorch/pytorch.py
#     poprun --num-instances 2 --num-replicas 4 python tutorials/10_pytorch/pytorch.py

# %%
import copy
import sys
from pathlib import Path

import torch
from torch import nn

import popdist
import popdist.poptorch
import poptorch

# digits.py is shared by the tutorials. A notebook has no file, and runs in the folder
# it lies in.
sys.path.append(
    str(Path(globals().get("__file__", "notebook")).resolve().parent.parent)
)
from digits import load

BATCH_SIZE = 16
STEPS = 10  # of a call
EPOCHS = 8
REPLICAS = 4

popdist.init()  # with `poprun`, for section 6: before anything is computed

torch.set_num_threads(1)  # the layers are small: threads would only wait for each other


def title(text: str) -> None:
    print(f"\n=== {text} ===\n")


# %% [markdown]
# ## 1. In PyTorch

# %%
title("1. In PyTorch")
train, test = (
    torch.utils.data.TensorDataset(
        torch.from_numpy(part.images), torch.from_numpy(part.labels).long()
    )
    for part in load()
)


class Net(nn.Module):
    """Images (n, 28, 28) to ten scores for each; with labels, their loss, too."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(28 * 28, 128)
        self.norm = nn.LayerNorm(128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images: torch.Tensor, labels: torch.Tensor | None = None):
        x = nn.functional.gelu(self.norm(self.fc1(images.flatten(1))))
        scores = self.fc2(x)
        if labels is None:
            return scores
        return scores, nn.functional.cross_entropy(scores, labels)


torch.manual_seed(0)
net = Net()
native = copy.deepcopy(net)  # with the same first weights
optimizer = torch.optim.SGD(native.parameters(), lr=0.05, momentum=0.9)

in_order = list(torch.utils.data.DataLoader(train, BATCH_SIZE, drop_last=True))
for images, labels in in_order[:STEPS]:
    optimizer.zero_grad()
    _, native_loss = native(images, labels)
    native_loss.backward()
    optimizer.step()
print(f"loss of step {STEPS}: {native_loss.item():.4f}")

# %% [markdown]
# ## 2. The same on poptorch

# %%
title("2. The same on poptorch")
options = poptorch.Options().deviceIterations(STEPS).randomSeed(7)
model = poptorch.trainingModel(
    net, options, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
)

call = [torch.cat(tensors) for tensors in zip(*in_order[:STEPS], strict=True)]
_, loss = model(*call)
print(f"rows of a call: {len(call[0])}, loss of step {STEPS}: {loss.item():.4f}")
same = all(
    torch.allclose(p, q, atol=1e-5)
    for p, q in zip(net.parameters(), native.parameters(), strict=True)
)
print("the same weights as PyTorch:", same)
assert same

# %% [markdown]
# ## 3. Training and testing

# %%
title("3. Training and testing")


def trained(
    model: poptorch.PoplarExecutor, options: poptorch.Options, replicas: int = 1
) -> None:
    """Shows all digits to the model, several times over."""
    loader = poptorch.DataLoader(
        options, train, batch_size=BATCH_SIZE // replicas, shuffle=True
    )
    print(f"calls of an epoch: {len(loader)}, rows of each: {loader.combinedBatchSize}")
    for _ in range(EPOCHS):
        for images, labels in loader:
            _, loss = model(images, labels)
    print(f"loss: {loss.mean().item():.2f}")


def accuracy(net: nn.Module) -> float:
    """Of the scores that poptorch finds for the digits held back, in per cent."""
    images, labels = test.tensors
    scores = poptorch.inferenceModel(net)(images)
    return 100 * (scores.argmax(-1) == labels).float().mean().item()


trained(model, options)
first_accuracy = accuracy(net)
print(f"Accuracy on test set: {first_accuracy:.2f}%")
assert first_accuracy > 90

# %% [markdown]
# ## 4. What has become of the model

# %%
title("4. What has become of the model")
session = poptorch.sessionOf(model)
(loop,) = session.ir.main_graph.called_graphs
(step,) = loop.called_graphs
forward, backward = step.called_graphs[:2]
print(forward)
print(f"\nops of the model: {len(forward.ops)}, of its gradient: {len(backward.ops)}")

memory = session.report.memory
print(f"bytes of variables: {memory.variables}")

# %% [markdown]
# ## 5. Four replicas

# %%
title("5. Four replicas")
model.destroy()
torch.manual_seed(0)
several = Net()
options = (
    poptorch.Options().deviceIterations(STEPS).replicationFactor(REPLICAS).randomSeed(7)
)
optimizer = torch.optim.SGD(several.parameters(), lr=0.05, momentum=0.9)
model = poptorch.trainingModel(several, options, optimizer)
trained(model, options, REPLICAS)
several_accuracy = accuracy(several)
print(f"Accuracy on test set: {several_accuracy:.2f}%")
assert several_accuracy > 90

# %% [markdown]
# ## 6. Several processes

# %%
title("6. Several processes")
model.destroy()
torch.manual_seed(0)  # all processes begin with the same weights
together = Net()
options = popdist.poptorch.Options().deviceIterations(STEPS).randomSeed(7)
processes = options.Distributed
print(
    f"I am process {processes.processId} of {processes.numProcesses}, and have "
    f"{options.replication_factor} replica(s)"
)
optimizer = torch.optim.SGD(together.parameters(), lr=0.05, momentum=0.9)
model = poptorch.trainingModel(together, options, optimizer)
trained(model, options, options.replication_factor * processes.numProcesses)
together_accuracy = accuracy(together)
print(f"Accuracy on test set: {together_accuracy:.2f}%")
assert together_accuracy > 90
