"""`poptorch_geometric`: data loaders with fixed-size graph batches, so one compiled program runs all batches.

Compiled programs have fixed shapes, and graphs have different numbers of nodes and edges. These loaders fill each batch
with a padding graph, up to sizes that are chosen once, and mask the padding.

It needs PyTorch Geometric: `pip install '.[geometric]'` in a checkout of popxl.
"""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("torch_geometric") is None:
    raise ImportError(
        "poptorch_geometric needs PyTorch Geometric, which is not installed: `pip install '.[geometric]'` in a "
        "checkout of popxl.",
        name="torch_geometric",
    )

from poptorch_geometric.collate import CombinedBatchingCollater, FixedSizeCollater
from poptorch_geometric.dataloader import DataLoader, FixedSizeDataLoader
from poptorch_geometric.fixed_size_options import FixedSizeOptions
from poptorch_geometric.stream_packing_sampler import StreamPackingSampler
from poptorch_geometric.types import FixedSizeStrategy, OverSizeStrategy

__all__ = [
    "CombinedBatchingCollater",
    "DataLoader",
    "FixedSizeCollater",
    "FixedSizeDataLoader",
    "FixedSizeOptions",
    "FixedSizeStrategy",
    "OverSizeStrategy",
    "StreamPackingSampler",
]
