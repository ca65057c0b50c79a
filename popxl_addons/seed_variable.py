"""A random seed stored in a program, one for each group of replicas."""

from __future__ import annotations

import popxl
from popxl.replica_grouping import Groups, sharing_of
from popxl.tensor import Variable


def seed_variable(seed: int, replica_grouping: Groups | None = None) -> tuple[Variable, popxl.Tensor]:
    """A variable ``random_seed`` and the tensor that programs use: a seed for each group of replicas.

    The tensor is loaded when variables go to the device and read back when they are fetched, so in-place changes by a
    program (``seed += 1``) last from run to run, and are saved and loaded with the rest of a model.

    Args:
        seed: seed of the seeds, for `popxl.create_seeds`.
        replica_grouping: groups of replicas that share a seed: a grouping, or names of axes. By default each replica
            has its own.

    Returns:
        The variable, for the session: on the host a uint32 array of shape ``(groups, 2)``, or ``(2,)`` for one group.
        The tensor, for the main graph: uint32 of shape ``(2,)``. They are one object here, because a variable with a
        value for each group is on the device already; the pair keeps the two uses apart.

    Raises:
        RuntimeError: if there is no current graph.
        ValueError: if the current graph is not the main graph, or `seed` is negative.

    Example:
        >>> ir = popxl.Ir(replication=4)
        >>> with ir.main_graph, popxl.in_sequence():
        ...     variable, seed = seed_variable(42, ir.replica_grouping(group_size=2))
        ...     key, _ = popxl.ops.split_random_seed(seed)
        ...     y = popxl.ops.dropout(popxl.constant([1.0, 2.0]), key, p=0.5)
        ...     seed += 1
        >>> variable.shape_on_host, seed.shape
        ((2, 2), (2,))
    """
    ir = popxl.gcg().ir
    own = ir.replica_grouping(group_size=1)
    group = own if replica_grouping is None else sharing_of(ir, replica_grouping, "seed_variable: `replica_grouping`")
    seeds = popxl.create_seeds(seed, replicas=group.num_groups)
    variable = popxl.variable(seeds, popxl.uint32, "random_seed", replica_grouping=group)
    return variable, variable
