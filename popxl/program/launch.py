"""Programs of several processes: the replicas that the launcher has given to this one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from popxl.base.distributed import launched
from popxl.errors import PopxlError

if TYPE_CHECKING:
    from popxl.ir import Ir


def share_replicas(ir: Ir) -> None:
    """Take replica counts from the launcher; this process drives its share.

    Raises:
        PopxlError: without a launcher, or where it has laid the replicas in another way than the axes of `ir` say.
    """
    instance = launched()
    if instance is None:
        raise PopxlError(
            "Ir: replication='popdist' takes the number of replicas from `poprun`, which has not started this "
            "process. Run `poprun --num-instances 2 --num-replicas 4 python program.py`, or pass a number where "
            "`popdist.isPopdistEnvSet()` is false."
        )
    ir.options.enableReplicatedGraphs = instance.num_local_replicas > 1
    ir.options.replicatedGraphCount = instance.num_local_replicas
    ir.options.globalReplicationFactor = instance.num_total_replicas
    ir.options.globalReplicaOffset = instance.replica_offset
    ir.options.enableDistributedReplicatedGraphs = True
    axes = ir.checked_axes("Ir")
    wanted = None if axes is None else axes.adjacent
    if wanted not in (None, instance.adjacent) and instance.num_ipus_per_replica > 1:
        raise PopxlError(
            f"Ir: by `axes`, {wanted} replicas have their devices for an IPU side by side, and `poprun` has laid "
            f"{instance.adjacent}. Give `poprun --adjacent-replicas {wanted}`, or without poprun "
            f"`popdist.init(adjacent_replicas={wanted})`."
        )
