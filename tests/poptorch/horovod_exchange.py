"""What two instances exchange with `popdist.horovod`. Run as a script by `poprun`: it fails where a value is wrong."""

from __future__ import annotations

import pytest
import torch

import popdist.horovod as hvd  # type: ignore[import-not-found]  # it is where `popdist.__path__` says


def test_all() -> None:
    """Each exchange, against what follows from the ranks."""
    hvd.init()
    rank = hvd.rank()
    assert (hvd.size(), hvd.local_rank(), hvd.is_initialized()) == (2, rank, True)

    x = torch.arange(6.0).view(2, 3) * (rank + 1)
    once = torch.arange(6.0).view(2, 3)
    for op, wanted in ((None, 1.5 * once), (hvd.Sum, 3 * once), (hvd.Max, 2 * once), (hvd.Min, once)):
        torch.testing.assert_close(hvd.allreduce(x, op=op), wanted)
    torch.testing.assert_close(hvd.allreduce(x, op=hvd.Product), 2 * once**2)
    torch.testing.assert_close(hvd.allreduce(x, average=False), 3 * once)
    for dtype in (torch.int64, torch.float64, torch.bfloat16, torch.uint8):  # JAX would make the first two smaller
        value = torch.tensor(2**40 if dtype is torch.int64 else 3, dtype=dtype)
        torch.testing.assert_close(hvd.allreduce(value, op=hvd.Sum), 2 * value)

    rows = torch.full((rank + 1, 2), rank)
    torch.testing.assert_close(hvd.allgather(rows), torch.tensor([[0, 0], [1, 1], [1, 1]]))
    torch.testing.assert_close(hvd.allgather(torch.ones(rank, 2)), torch.ones(1, 2))
    torch.testing.assert_close(hvd.broadcast(x, 1), 2 * once)
    assert hvd.broadcast_object({"epoch": 7} if rank == 0 else None) == {"epoch": 7}
    assert hvd.allgather_object("ab"[rank] * (rank + 1)) == ["a", "bb"]

    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * (rank + 1), momentum=0.9)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=1)
    torch.manual_seed(0)
    torch.testing.assert_close(model[0].weight, torch.nn.Linear(3, 2).weight)
    assert optimizer.param_groups[0]["lr"] == 0.2

    with pytest.raises(ValueError, match=r"instance 0 has torch.float32 of shape \(1,\); instance 1 has .* \(2,\)"):
        hvd.allreduce(torch.ones(rank + 1))
    hvd.barrier()


if __name__ == "__main__":
    test_all()
