"""A table of vectors, optionally sharded over replicas."""

from __future__ import annotations

from functools import cached_property

import numpy as np

import popxl
from popxl import ops
from popxl.replica_grouping import Groups
from popxl_addons.layers._values import drawn_weights
from popxl_addons.module import Module
from popxl_addons.named_replica_grouping import resolved

MULTISLICE_MAGIC_NUMBER = 16
"""Granularity of table rows."""


class Embedding(Module):
    """Table lookup: rows of a table, selected by indices. See also ``torch.nn.Embedding``.

    Each group of `replica_grouping` holds one of `n_shards` blocks of rows (one block without a grouping). With
    several, subtract the block's entry of `offsets` from the indices: those outside of the block give zeros, so that
    the sum over the blocks is the embedding.

    Variable: `weight` of shape (vocab_shard_size, hidden_size), a truncated normal distribution with the standard
        deviation 0.02. Blocks have a multiple of 16 rows, so there may be more than `vocab_size`, which the names of
        weights in files have to state: `weights.Stored(name, rows=vocab_size)`. A checkpoint can be read with another
        number of blocks if the total number of rows is the same: so let `vocab_size` be a multiple of 16 times the
        largest number of blocks.

    Args:
        dtype: dtype of the table.
        vocab_size: number of rows of the whole table.
        hidden_size: length of the vectors.
        axis: axis of the table that the indices refer to.
        replica_grouping: groups of replicas that share a block: a grouping, or names of axes.

    Example:
        >>> with popxl.Ir().main_graph:
        ...     indices = popxl.TensorSpec((2, 3), popxl.int32)
        ...     facts, graph = Embedding(popxl.float32, vocab_size=100, hidden_size=4).create_graph(indices)
        >>> facts.weight.shape, graph.graph.outputs[0].shape
        ((112, 4), (2, 3, 4))
    """

    def __init__(
        self,
        dtype: popxl.dtype,
        vocab_size: int,
        hidden_size: int,
        axis: int = 0,
        replica_grouping: Groups | None = None,
    ):
        super().__init__()
        self.dtype = dtype
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.axis = axis
        self.replica_grouping = replica_grouping

    @cached_property
    def n_shards(self) -> int:
        """Number of blocks. With axis names, the first access needs a current graph of the Ir."""
        if self.replica_grouping is None:
            return 1
        return resolved(self.replica_grouping, "Embedding: `replica_grouping`").num_groups

    @property
    def vocab_shard_size(self) -> int:
        """Number of rows per block."""
        return self.get_vocab_shard_size(self.vocab_size, self.n_shards)

    @property
    def offsets(self) -> np.ndarray:
        """First table row of each block."""
        return self.get_offsets(self.vocab_size, self.n_shards)

    def build(self, indices: popxl.Tensor) -> popxl.Tensor:
        """Integer `indices` of any shape to (\\*indices.shape, hidden_size)."""
        weight = self.add_variable_input(
            "weight",
            drawn_weights("Embedding", self.dtype, self.vocab_shard_size, self.hidden_size),
            self.dtype,
            replica_grouping=self.replica_grouping,
            group_axis=0,
        )
        return ops.gather(weight, indices, axis=self.axis, zero_OOR=self.n_shards > 1)

    @staticmethod
    def get_vocab_shard_size(vocab_size: int, n_shards: int) -> int:
        """Rows per block, rounded up to a multiple of 16.

        Example:
            >>> Embedding.get_vocab_shard_size(100, 1), Embedding.get_vocab_shard_size(100, 4)
            (112, 32)
        """
        return -(-vocab_size // (n_shards * MULTISLICE_MAGIC_NUMBER)) * MULTISLICE_MAGIC_NUMBER

    @staticmethod
    def get_offsets(vocab_size: int, n_shards: int) -> np.ndarray:
        """First table row of each block.

        Example:
            >>> Embedding.get_offsets(100, 4)
            array([ 0, 32, 64, 96], dtype=int32)
        """
        return np.arange(n_shards, dtype=np.int32) * np.int32(Embedding.get_vocab_shard_size(vocab_size, n_shards))


class TiedEmbedding(Module):
    """Table lookup that also returns the table, for final logits: ``x @ table.T``.

    Variable: `weight` of shape (vocab_size, hidden_size), a truncated normal distribution with the standard deviation
    0.02. Its gradient is the sum of both uses.

    Args:
        dtype: dtype of the table.
        vocab_size: number of rows.
        hidden_size: length of the vectors.

    Example:
        >>> class Bigrams(Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.embedding = TiedEmbedding(popxl.float32, vocab_size=100, hidden_size=4)
        ...     def build(self, tokens):
        ...         x, table = self.embedding(tokens)
        ...         return x @ table.T
        >>> with popxl.Ir().main_graph:
        ...     facts, graph = Bigrams().create_graph(popxl.TensorSpec((2, 3), popxl.int32))
        >>> facts.keys_flat(), graph.graph.outputs[0].shape
        (['embedding.weight'], (2, 3, 100))
    """

    def __init__(self, dtype: popxl.dtype, vocab_size: int, hidden_size: int):
        super().__init__()
        self.dtype = dtype
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size

    def build(self, indices: popxl.Tensor) -> tuple[popxl.Tensor, popxl.Tensor]:
        """Integer `indices` of any shape to (\\*indices.shape, hidden_size); and the table."""
        values = drawn_weights("TiedEmbedding", self.dtype, self.vocab_size, self.hidden_size)
        table = self.add_variable_input("weight", values, self.dtype)
        return ops.gather(table, indices), table
