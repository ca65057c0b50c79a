"""Batches of graphs of a fixed size: `poptorch_geometric`, against what PyTorch Geometric and PyTorch give."""

# ruff: noqa: E402 - what follows needs what may not be installed

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torch_geometric")

from torch_geometric.data import Batch, Data, HeteroData

import poptorch
from poptorch_geometric import (
    DataLoader,
    FixedSizeDataLoader,
    FixedSizeOptions,
    FixedSizeStrategy,
    OverSizeStrategy,
)

SIZES = [(3, 4), (2, 1), (5, 7), (1, 2), (4, 4), (2, 3), (3, 6)]  # nodes, edges


def graphs(sizes: list[tuple[int, int]] = SIZES) -> list[Data]:
    generator = torch.Generator().manual_seed(3)
    return [
        Data(
            x=torch.rand(nodes, 3, generator=generator),
            edge_index=torch.randint(nodes, (2, edges), generator=generator),
            edge_attr=torch.rand(edges, 2, generator=generator),
            y=torch.rand(1, 4, generator=generator),
            scale=index + 0.5,
        )
        for index, (nodes, edges) in enumerate(sizes)
    ]


def hetero(sizes: list[tuple[int, int]]) -> list[HeteroData]:
    found = []
    for nodes, edges in sizes:
        data = HeteroData()
        data["a"].x, data["b"].x = torch.rand(nodes, 3), torch.rand(nodes + 1, 2)
        data["a", "to", "b"].edge_index = torch.randint(nodes, (2, edges))
        data.y = torch.rand(1)
        found.append(data)
    return found


class Convolution(torch.nn.Module):
    """One layer that passes messages, and a sum over each graph; the loss is that of the real graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 4)

    def forward(self, batch: Any) -> Any:
        source, target = batch.edge_index
        hidden = self.linear(batch.x)
        sent = hidden[source] * batch.edge_attr.sum(-1, keepdim=True)
        hidden = torch.relu(hidden + torch.zeros_like(hidden).index_add(0, target, sent))
        graphs = torch.zeros(batch.num_graphs, 4).index_add(0, batch.batch, hidden)
        errors = ((graphs - batch.y) ** 2).sum(-1)
        if hasattr(batch, "graphs_mask"):
            loss = (errors * batch.graphs_mask).sum() / batch.graphs_mask.sum()
        else:
            loss = errors.mean()
        return graphs, poptorch.identity_loss(loss, "none")


def test_sizes_values_and_masks() -> None:
    data = graphs()
    options = FixedSizeOptions(12, 15, node_pad_value=2.0, edge_pad_value=3.0, graph_pad_value=4.0)
    batches = list(FixedSizeDataLoader(data, batch_size=3, fixed_size_options=options))
    assert len(batches) == 3
    for number, batch in enumerate(batches):
        real = Batch.from_data_list(data[2 * number : 2 * number + 2])
        nodes, edges = real.num_nodes, real.num_edges
        assert (batch.x.shape, batch.edge_index.shape, batch.y.shape) == ((12, 3), (2, 15), (3, 4))
        assert batch.num_graphs == 3 and type(batch.num_graphs) is int
        for name, rows in (("x", nodes), ("edge_attr", edges), ("y", 2), ("batch", nodes), ("scale", 2)):
            torch.testing.assert_close(batch[name][:rows], real[name])
        torch.testing.assert_close(batch.edge_index[:, :edges], real.edge_index)
        assert (batch.x[nodes:] == 2).all() and (batch.edge_attr[edges:] == 3).all() and (batch.y[2:] == 4).all()
        assert batch.scale[2] == 4 and (batch.batch[nodes:] == 2).all() and (batch.edge_index[:, edges:] >= nodes).all()
        for mask, count in (("nodes_mask", nodes), ("edges_mask", edges), ("graphs_mask", 2)):
            assert batch[mask].sum() == count and batch[mask][:count].all()


def test_sizes_by_default() -> None:
    options = FixedSizeOptions.from_dataset(graphs(), 3)
    assert (options.num_nodes, options.num_edges, options.num_graphs) == (11, 14, 3)
    assert FixedSizeOptions(4).num_edges == 12
    options = FixedSizeOptions.from_loader(DataLoader(graphs(), batch_size=2))
    assert (options.num_nodes, options.num_edges, options.num_graphs) == (7, 9, 3)
    (batch, *_) = FixedSizeDataLoader(graphs(), batch_size=3, add_pad_masks=False)
    assert (batch.num_nodes, batch.num_edges) == (11, 14) and not hasattr(batch, "nodes_mask")


def test_as_many_as_fit() -> None:
    """Edges end the first batch, the second has no node for padding edges left, and the last has what remains."""
    sizes = FixedSizeOptions(11, 12)
    loader = FixedSizeDataLoader(
        graphs(), 5, fixed_size_options=sizes, fixed_size_strategy=FixedSizeStrategy.StreamPack
    )
    batches = list(loader)
    assert [batch.graphs_mask.sum().item() for batch in batches] == [3, 3, 1]
    assert all((b.num_nodes, b.num_edges, b.num_graphs) == (11, 12, 5) for b in batches)
    real = [batch.x[batch.nodes_mask] for batch in batches]
    torch.testing.assert_close(torch.cat(real), torch.cat([data.x for data in graphs()]))


@pytest.mark.parametrize(
    ("strategy", "nodes", "edges"),
    [("Skip", 5, 5), ("TrimNodes", 6, None), ("TrimEdges", None, None), ("TrimNodesAndEdges", 6, None)],
)
def test_what_does_not_fit(strategy: str, nodes: int | None, edges: int | None) -> None:
    """Graphs of 3, 2 and 5 nodes, with 12 edges, of which not all nodes or not all edges fit."""
    room = (20, 6) if strategy == "TrimEdges" else (7, 20) if strategy == "TrimNodes" else (7, 6)
    sizes, data = FixedSizeOptions(*room), graphs(SIZES[:3])
    (batch,) = FixedSizeDataLoader(data, 4, fixed_size_options=sizes, over_size_strategy=OverSizeStrategy[strategy])
    assert (batch.num_nodes, batch.num_edges, batch.num_graphs) == (*room, 4)
    if nodes is not None:
        assert batch.nodes_mask.sum() == nodes
    if edges is not None:
        assert batch.edges_mask.sum() == edges and batch.graphs_mask.tolist() == [True, True, False, False]
    ends = batch.edge_index[:, batch.edges_mask]
    assert (batch.batch[ends[0]] == batch.batch[ends[1]]).all() and batch.nodes_mask[ends].all()
    with pytest.raises(ValueError, match="3 graphs with .* do not fit into a batch"):
        list(FixedSizeDataLoader(data, 4, fixed_size_options=sizes))


def test_graphs_with_types() -> None:
    data = hetero([(3, 4), (2, 1), (5, 7)])
    sizes = FixedSizeOptions({"a": 9, "b": 12}, {("a", "to", "b"): 12})
    (batch,) = FixedSizeDataLoader(data, 4, fixed_size_options=FixedSizeOptions({"a": 12, "b": 15}, sizes.num_edges))
    assert (batch["a"].x.shape, batch["b"].x.shape) == ((12, 3), (15, 2)) and batch.num_graphs == 4
    assert (batch["a"].nodes_mask.sum(), batch["b"].nodes_mask.sum()) == (10, 13)
    assert batch["a", "b"].edges_mask.sum() == 12 and batch.graphs_mask.tolist() == [True, True, True, False]
    with pytest.raises(ValueError, match="do not fit"):
        list(FixedSizeDataLoader(data, 4, fixed_size_options=sizes))
    (trimmed,) = FixedSizeDataLoader(
        data, 4, fixed_size_options=sizes, over_size_strategy=OverSizeStrategy.TrimNodesAndEdges
    )
    assert (trimmed["a"].num_nodes, trimmed["b"].num_nodes, trimmed["a", "b"].num_edges) == (9, 12, 12)


def test_one_program_for_all_batches() -> None:
    model, data = Convolution(), graphs()
    captures: list[int] = []

    class Counted(Convolution):
        def forward(self, batch: Any) -> Any:
            captures.append(1)
            return super().forward(batch)

    counted = Counted()
    counted.load_state_dict(model.state_dict())
    wrapped = poptorch.inferenceModel(counted)
    wrapped(next(iter(FixedSizeDataLoader(data, batch_size=3))))
    at_first = len(captures)
    for number, batch in enumerate(FixedSizeDataLoader(data, batch_size=3)):
        found, loss = wrapped(batch)
        wanted, wanted_loss = model(Batch.from_data_list(data[2 * number : 2 * number + 2]))
        torch.testing.assert_close(found[:2], wanted)
        torch.testing.assert_close(loss, wanted_loss)
    assert len(captures) == at_first


def test_training_over_several_batches() -> None:
    """Two device iterations of two accumulated batches are the steps that PyTorch makes of the real graphs."""
    data = graphs(SIZES[:4] * 2)
    model, reference = Convolution(), Convolution()
    reference.load_state_dict(model.state_dict())
    options = poptorch.Options().deviceIterations(2)
    options.Training.gradientAccumulation(2)
    loader = FixedSizeDataLoader(data, batch_size=3, options=options)
    (batch,) = loader
    assert batch.x.shape == (4 * 11, 3) and batch.edge_index.shape == (4 * 2, 14)
    wrapped = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))
    wrapped(batch)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        for part in range(2):
            first = 4 * step + 2 * part
            (reference(Batch.from_data_list(data[first : first + 2]))[1] / 2).backward()
        optimizer.step()
    wrapped.copyWeightsToHost()
    for name, weight in reference.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], weight)


def test_errors() -> None:
    with pytest.raises(ValueError, match="`batch_size` counts the padding graph, and should be at least 2; got 1"):
        FixedSizeDataLoader(graphs(), 1)
    with pytest.raises(ValueError, match="`batch_size` is 4, and num_graphs of `fixed_size_options` is 3"):
        FixedSizeDataLoader(graphs(), 4, fixed_size_options=FixedSizeOptions(9, num_graphs=3))
    with pytest.raises(ValueError, match="`num_graphs` should be at least 2"):
        FixedSizeOptions(9, num_graphs=1)
    data = [Data(x=torch.ones(2, 1), edge_index=torch.zeros(2, 1, dtype=torch.int64), extra={1})]
    with pytest.raises(ValueError, match=r"'extra' is a set, .*pad_graph_defaults=\{'extra': …\}"):
        list(FixedSizeDataLoader(data))
    (batch,) = FixedSizeDataLoader(data, fixed_size_options=FixedSizeOptions(3, 2, pad_graph_defaults={"extra": {0}}))
    assert batch.extra == [{1}, {0}]
