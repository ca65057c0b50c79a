"""A graph network on batches of graphs: nodes and edges filled up to fixed sizes, a batch type of one's own."""

import sys
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

import poptorch

NODES, EDGES, GRAPHS, WIDTH = 48, 128, 4, 16  # of a batch: the last graph of each is what fills it up


@dataclass
class Batch:
    """Graphs side by side: features of nodes, edges between them, the graph of each node, and what is asked for."""

    x: torch.Tensor
    edges: torch.Tensor
    graph: torch.Tensor
    labels: torch.Tensor


class Parser(poptorch.ICustomArgParser):
    def yieldTensors(self, struct):
        yield from (struct.x, struct.edges, struct.graph, struct.labels)

    def reconstruct(self, original_structure, tensor_iterator):
        return Batch(*(next(tensor_iterator) for _ in range(4)))


def graph(i):
    """A random graph, and whether it has more edges than nodes: a node alone cannot tell."""
    numbers = torch.Generator().manual_seed(i)
    nodes = int(torch.randint(6, 14, (), generator=numbers))
    edges = int(nodes * (2 if i % 2 else 0.6))
    return torch.ones(nodes, 1), torch.randint(nodes, (2, edges), generator=numbers), i % 2


def fixed(graphs):
    """Graphs as a batch of fixed sizes. Edges that fill it up connect nodes that do."""
    starts = torch.tensor([0, *(len(x) for x, _, _ in graphs)]).cumsum(0)
    edges = torch.cat([e + start for (_, e, _), start in zip(graphs, starts, strict=False)], 1)
    owner = torch.cat([torch.full((len(x),), i) for i, (x, _, _) in enumerate(graphs)])
    assert starts[-1] < NODES and edges.shape[1] <= EDGES
    x = F.pad(torch.cat([x for x, _, _ in graphs]), (0, 0, 0, NODES - len(owner)))
    edges = F.pad(edges, (0, EDGES - edges.shape[1]), value=NODES - 1)
    owner = F.pad(owner, (0, NODES - len(owner)), value=GRAPHS - 1)
    labels = torch.tensor([*(label for _, _, label in graphs), -100])
    return Batch(x, edges[None], owner, labels)


class Convolution(nn.Module):
    def __init__(self, n, m):
        super().__init__()
        self.own, self.others = nn.Linear(n, m), nn.Linear(n, m)

    def forward(self, x, sources, targets):
        told = torch.zeros_like(x).index_add(0, targets, x[sources])
        return self.own(x) + self.others(told)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolutions = nn.ModuleList([Convolution(1, WIDTH), Convolution(WIDTH, WIDTH)])
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, batch):
        x, (sources, targets) = batch.x, batch.edges[0].unbind(0)
        for convolution in self.convolutions:
            x = F.relu(convolution(x, sources, targets))
        ones = torch.ones_like(batch.graph, dtype=x.dtype)
        size = torch.zeros(GRAPHS).scatter_add(0, batch.graph, ones)
        total = torch.zeros(GRAPHS, WIDTH).scatter_reduce(0, batch.graph[:, None].expand(-1, WIDTH), x, "sum")
        scores = self.head(total / size.clamp(min=1)[:, None])
        return scores, F.cross_entropy(scores, batch.labels, ignore_index=-100)


def main(folder=None):
    torch.manual_seed(0)
    poptorch.registerCustomArgParser(Batch, Parser())
    module = Net()
    batches = [fixed([graph(3 * i + j) for j in range(GRAPHS - 1)]) for i in range(24)]
    loader = poptorch.DataLoader(poptorch.Options(), batches, batch_size=None, mode=poptorch.DataLoaderMode.Async)
    model = poptorch.trainingModel(module, loader.options, torch.optim.Adam(module.parameters(), lr=1e-2))
    losses = [model(batch)[1].item() for _ in range(10) for batch in loader]
    loader.terminate()
    scores, loss = poptorch.inferenceModel(module)(batches[0])
    expected = module(batches[0])
    print(f"graphs: loss {losses[0]:.2f}, {losses[-1]:.3f}")
    torch.testing.assert_close((scores, loss), tuple(t.detach() for t in expected), rtol=1e-4, atol=1e-5)
    assert losses[-1] < 0.3 * losses[0]
    poptorch.registerCustomArgParser(Batch, None)


if __name__ == "__main__":
    main(*sys.argv[1:])
