"""`popdist.poptorch`: options of a distributed PyTorch program started by `poprun`.

Each process runs the program on its share of the rows, with its share of the replicas. The model is one: gradients are
reduced over the replicas of all processes. Results are those of the process's own replicas. Every process has to start
with the same weights (`torch.manual_seed`), make the same calls, and write the same weights; this is not checked.

A single process may read the weights, to save them. If the model writes buffers (batch norm, with
`broadcastBuffers(False)`), call `model.copyWeightsToHost()` in all processes before. The executable cache is not used;
`compileAndExport` and `save` are for programs of one process.

Example:
    >>> import popdist.poptorch
    >>> options = popdist.poptorch.Options()
    >>> options.replication_factor, options.Distributed.numProcesses      # without `poprun`
    (1, 1)
"""

from __future__ import annotations

from typing import Any, Literal, NoReturn

import poptorch
from poptorch.base.logging_ import logger
from poptorch.options import _DistributedOptions
from poptorch.settings.setting import group
from popxl.extend import processes
from popxl.extend.processes import Instance, launched

__all__ = ["Options"]


class _Processes(_DistributedOptions):
    """`options.Distributed` with process ids determined by `poprun`."""

    def configureProcessId(self, process_id: int, num_processes: int) -> NoReturn:
        """Raises `RuntimeError`: `poprun` determines process ids. `setEnvVarNames` and `disable` do likewise."""
        raise _set_by_poprun("Distributed")


class Options(poptorch.Options):
    """`poptorch.Options` with replica count and data shard determined by `poprun`.

    The number of rows of a call is that of this process's replicas. It joins the other processes, and waits for them.

    Args:
        ipus_per_replica: number of devices of each replica; by default the setting of `poprun`. Another number is used,
            with a warning.

    Raises:
        RuntimeError: by `replicationFactor`, `useIpuId` and the methods of `Distributed`.
    """

    Distributed: _Processes = group(_Processes, "Which of several processes this is, as `poprun` says.")

    def __init__(self, ipus_per_replica: int | None = None) -> None:
        super().__init__()
        instance = launched() or Instance()
        if ipus_per_replica not in (None, instance.num_ipus_per_replica):
            logger.warning(
                "popdist.poptorch.Options: `ipus_per_replica` is %d, and %s. The program is followed.",
                ipus_per_replica,
                f"poprun was told of {instance.num_ipus_per_replica}: `poprun --ipus-per-replica`"
                if launched()
                else "poprun, which could say it, has not started this process",
            )
        processes.join()
        self._set(replication_factor=instance.num_local_replicas)
        self.Distributed._set(process_id=instance.instance_index, num_processes=instance.num_instances)

    def _check(self, **values: Any) -> None:
        count = (launched() or Instance()).num_local_replicas
        if values.get("replication_factor", count) != count:
            raise _set_by_poprun("replication_factor")
        super()._check(**values)

    @property
    def replication(self) -> int | Literal["popdist"]:
        """Replication argument of the program: `"popdist"` with several processes."""
        return "popdist" if self.Distributed.numProcesses > 1 else self.replication_factor

    def replicationFactor(self, replication_factor: int) -> NoReturn:
        """Raises `RuntimeError`: `poprun --num-replicas` determines the replication factor."""
        raise _set_by_poprun("replicationFactor")

    def useIpuId(self, ipu_id: int) -> NoReturn:
        """Raises `RuntimeError`: each process owns separate devices."""
        raise _set_by_poprun("useIpuId")


def _set_by_poprun(what: str) -> RuntimeError:
    return RuntimeError(
        f"popdist.poptorch.Options: `{what}` cannot be set, as `poprun` says how many processes, replicas and devices "
        "there are. Use `poptorch.Options` for a program of a single process."
    )
