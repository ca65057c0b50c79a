"""PyTorch programs over several processes: `popdist.poptorch`."""

# ruff: noqa: E402 - poptorch needs torch

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import popdist.horovod as hvd  # type: ignore[import-not-found]  # it is where `popdist.__path__` says
import popdist.poptorch  # type: ignore[import-not-found]  # it is where `popdist.__path__` says
import poptorch
from popxl.base.distributed import Instance
from popxl.extend import processes
from tests.poptorch.popdist_training import REPLICAS, train

ROOT = Path(__file__).parents[2]


def trained_by_two(timeout: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Two processes train. One of them reads the weights, alone, after each call."""
    command = [sys.executable, "-m", "runtime.poprun", "--num-instances=2", f"--num-replicas={REPLICAS}"]
    command += [f"--timeout={timeout}", sys.executable, "-m", "tests.poptorch.popdist_training", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150)


@pytest.mark.thorough
def test_one_process_cannot_read_parts_of_others(tmp_path: Path) -> None:
    done = trained_by_two(20, str(tmp_path), "sharded")
    assert done.returncode != 0
    assert "No process has all parts of these values, such as those of weights with `useReplicated" in done.stderr
    assert "Call `model.copyWeightsToHost()` in each process, and read the weights" in done.stderr


@pytest.mark.thorough
def test_the_numbers_of_one_process(tmp_path: Path) -> None:
    done = trained_by_two(60, str(tmp_path))
    assert done.returncode == 0, done.stderr
    first, second = (np.load(tmp_path / f"{index}.npz") for index in range(2))
    expected = train(poptorch.Options().replicationFactor(REPLICAS))
    for name in ("losses", "masks"):
        np.testing.assert_allclose(np.concatenate([first[name], second[name]]), expected[name], rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(first["weights"], expected["weights"], rtol=1e-5)
    masks = expected["masks"]
    assert (masks[0] != masks[-1]).any() and (masks[:, 0] != masks[:, 1]).any()


def test_the_launcher_says_which_process_this_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(processes, "join", lambda: None)
    instance = Instance(instance_index=1, num_instances=2, num_total_replicas=6, num_ipus_per_replica=2)
    for name, value in instance.environment().items():
        monkeypatch.setenv(name, value)
    options = popdist.poptorch.Options(ipus_per_replica=2)
    assert (options.replication_factor, options.replication) == (3, "popdist")
    assert (options.Distributed.processId, options.Distributed.numProcesses) == (1, 2)
    assert options.clone() == options
    rows = poptorch.DataLoader(options, list(range(12)), batch_size=1)
    assert [each.tolist() for each in rows] == [[6, 7, 8], [9, 10, 11]]
    model = poptorch.inferenceModel(torch.nn.Linear(2, 1), options)
    model.weight.replicaGrouping(poptorch.CommGroupType.Consecutive, 3, poptorch.VariableRetrievalMode.OnePerGroup)
    with pytest.raises(NotImplementedError, match="replicaGrouping: 'weight' has groups of replicas, of which other"):
        model(torch.ones(3, 2))
    caplog.clear()
    options = popdist.poptorch.Options(ipus_per_replica=1)
    (warning,) = caplog.messages
    assert "`ipus_per_replica` is 1, and poprun was told of 2" in warning and options.replication_factor == 3


def test_a_single_process() -> None:
    options = popdist.poptorch.Options()
    assert (options.replication_factor, options.replication, options.Distributed.numProcesses) == (1, 1, 1)
    setters: list[Any] = [
        lambda: options.replicationFactor(2),
        lambda: setattr(options, "replication_factor", 2),
        lambda: options.useIpuId(0),
        lambda: options.Distributed.configureProcessId(0, 1),
        lambda: options.Distributed.disable(),
        lambda: options.Distributed.setEnvVarNames("A", "B"),
    ]
    for setter in setters:
        with pytest.raises(RuntimeError, match="cannot be set, as `poprun` says how many processes"):
            setter()


@pytest.mark.thorough
def test_horovod_over_two_instances() -> None:
    command = [sys.executable, "-m", "runtime.poprun", "--num-instances=2", "--num-replicas=2", "--timeout=60"]
    done = subprocess.run(
        [*command, sys.executable, "-m", "tests.poptorch.horovod_exchange"],
        cwd=ROOT, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def test_horovod_alone() -> None:
    assert (hvd.size(), hvd.rank(), hvd.local_rank(), hvd.is_initialized()) == (1, 0, 0, True)
    x = torch.arange(6.0).view(2, 3)
    for result in (hvd.allreduce(x), hvd.allreduce(x, op=hvd.Sum), hvd.allgather(x), hvd.broadcast(x, 0)):
        torch.testing.assert_close(result, x)
        assert result.data_ptr() != x.data_ptr()
    with pytest.raises(ValueError, match="there is no instance 1; `root_rank` is from 0 to 0"):
        hvd.broadcast(x, 1)
    with pytest.raises(ValueError, match="give `average` or `op`, not both"):
        hvd.allreduce(x, average=True, op=hvd.Sum)
