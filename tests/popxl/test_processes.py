"""Programs over several processes: the numbers are those of one process with as many replicas."""

from __future__ import annotations

import doctest
import socket
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import popdist
import popxl
from popxl import ops
from popxl.base.distributed import LOOPBACK, Instance, Share, launched
from popxl.errors import PopxlError
from runtime.command import main
from runtime.processes import held_port
from tests.popxl.conftest import Run
from tests.popxl.shared_programs import PROGRAMS, REPLICAS

ALWAYS = ("sharded variables", "pipeline", "checkpoint in pieces", "checkpoint of borrowed variables", "communication")
"""Programs that are run always."""

IN_MANY = ("training", "grouped variables", "seeds", *ALWAYS)
"""Those that are run in more than two processes; the others differ from these in what each process does by itself."""


@pytest.mark.thorough(but_each=3)
@pytest.mark.parametrize(
    ("processes", "names"), [(2, ALWAYS), (2, tuple(PROGRAMS)), (4, IN_MANY)], ids=["2", "2, all programs", "4"]
)
def test_the_numbers_of_one_process(processes: int, names: tuple[str, ...], poprun: Run, tmp_path: Path) -> None:
    """What is known to all, every process has; what replicas stored, the process that drives them."""
    options = (f"--num-instances={processes}", f"--num-replicas={REPLICAS}", "--timeout=60")
    done = poprun(*options, sys.executable, "-m", "tests.popxl.shared_programs", str(tmp_path), *names, limit=150)
    assert done.returncode == 0, done.stderr
    results = [np.load(tmp_path / f"{index}.npz") for index in range(processes)]
    for name in names:
        known, own = PROGRAMS[name](REPLICAS, lambda data: data)
        assert known
        for key, value in known.items():
            for found in results:
                check_equal(found[f"{name}/known/{key}"], value, f"{name}: {key}")
        for key, value in own.items():
            joined = np.concatenate([found[f"{name}/own/{key}"] for found in results])
            check_equal(joined, value, f"{name}: {key}")
    if sys.platform != "linux":
        pytest.skip("the numbers are right; where processes listen is known on Linux only")
    addresses = [str(address) for found in results for address in found["listening"]]
    assert len(addresses) > processes, "the coordinator, and what each process exchanges data by"
    assert {*addresses} == {"127.0.0.1"}, "all are on this machine"


def check_equal(found: np.ndarray, expected: np.ndarray, what: str) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6, err_msg=what)
    assert found.dtype == expected.dtype, what


def test_examples() -> None:
    for module in (popdist, popxl.base.distributed):
        found = doctest.testmod(module)
        assert found.attempted and not found.failed


# Without a launcher --------------------------------------------------------------------------------------------------


def test_a_single_process_is_the_only_instance() -> None:
    popdist.init()
    popdist.synchronize()
    assert popdist.execute_on_instances({0}, int, "12", base=8) == 10
    assert popdist.execute_on_instances([], int, "12") is None
    with pytest.raises(ValueError, match="there is no instance 1; their numbers are 0 to 0"):
        popdist.execute_on_instances({0, 1}, print)
    assert not popdist.isPopdistEnvSet()
    assert (popdist.getNumInstances(), popdist.getInstanceIndex(), popdist.getLocalInstanceIndex()) == (1, 0, 0)
    assert (popdist.getNumTotalReplicas(), popdist.getNumLocalReplicas(), popdist.getReplicaIndexOffset()) == (1, 1, 0)
    assert popdist.checkNumIpusPerReplica(1) and not popdist.checkNumIpusPerReplica(2)


def test_a_launcher_is_needed() -> None:
    with pytest.raises(PopxlError, match="takes the number of replicas from `poprun`, which has not started this"):
        popxl.Ir(replication="popdist")


def test_a_port_is_held_for_what_listens_later() -> None:
    """JAX's service comes to it, when all instances are there; until then no other process is given it."""
    with held_port(LOOPBACK) as port:
        with pytest.raises(OSError), socket.create_server((LOOPBACK, port)):
            pass
        with socket.create_server((LOOPBACK, port), reuse_port=True):
            pass


def set_environment(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> None:
    for name, value in Instance(**fields).environment().items():
        monkeypatch.setenv(name, value)


def test_what_the_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, instance_index=1, num_instances=3, num_total_replicas=12, num_ipus_per_replica=2)
    assert launched() == Instance(
        instance_index=1, num_instances=3, num_total_replicas=12, num_ipus_per_replica=2, host="localhost"
    )
    assert popdist.isPopdistEnvSet()
    assert (popdist.getNumTotalReplicas(), popdist.getNumLocalReplicas(), popdist.getReplicaIndexOffset()) == (12, 4, 4)
    ir = popxl.Ir(replication="popdist")
    assert (ir.replication_factor, ir.instance_replication_factor) == (12, 4)
    assert ir.options.globalReplicaOffset == 4
    assert ir.replica_grouping(stride=4).assignment == [0, 1, 2, 3] * 3


@pytest.mark.parametrize(
    ("instances", "replicas", "stages", "adjacent", "shares"),
    [
        (2, 1, 2, 1, [(0, 1, 0, 1), (0, 1, 1, 1)]),
        (2, 2, 4, 2, [(0, 2, 0, 2), (0, 2, 2, 2)]),
        (4, 4, 2, 4, [(0, 2, 0, 1), (2, 2, 0, 1), (0, 2, 1, 1), (2, 2, 1, 1)]),
        (4, 4, 2, 2, [(0, 2, 0, 1), (0, 2, 1, 1), (2, 2, 0, 1), (2, 2, 1, 1)]),
        (2, 4, 2, 2, [(0, 2, 0, 2), (2, 2, 0, 2)]),
        (2, 4, 3, 1, [(0, 2, 0, 3), (2, 2, 0, 3)]),
        (3, 2, 2, 2, None),
        (8, 2, 2, 2, None),
        (4, 2, 3, 2, None),
        (2, 6, 1, 4, None),
    ],
)
def test_shares(instances: int, replicas: int, stages: int, adjacent: int, shares: Any) -> None:
    """The first replica, how many; the first stage, how many."""
    if shares is None:
        with pytest.raises(ValueError, match=f"{replicas} replicas.* cannot be shared out evenly among {instances}"):
            Share.of(0, instances, replicas, stages, adjacent)
    else:
        assert [Share.of(i, instances, replicas, stages, adjacent) for i in range(instances)] == shares


def test_stages_of_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, instance_index=3, num_instances=4, num_total_replicas=2, num_ipus_per_replica=4)
    assert (popdist.getNumLocalReplicas(), popdist.getReplicaIndexOffset()) == (2, 0)
    ir = popxl.Ir("popdist", axes={"stage": "ipus", "data": 2})
    assert (ir.replication_factor, ir.instance_replication_factor, ir.adjacent_replicas) == (2, 2, 2)
    with pytest.raises(PopxlError, match="by `axes`, 1 replicas .* `poprun` has laid 2. Give `poprun --adjacent-rep"):
        popxl.Ir("popdist", axes={"data": 2, "stage": "ipus"})


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("POPDIST_NUM_TOTAL_REPLICAS", "4", "4 replicas cannot be shared out evenly among 3 instances"),
        ("POPDIST_INSTANCE_INDEX", "3", "there is no instance 3 among 3"),
        ("POPDIST_NUM_INSTANCES", "several", "do not describe an instance"),
    ],
)
def test_an_environment_that_cannot_be(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    set_environment(monkeypatch, num_instances=3, num_total_replicas=3)
    monkeypatch.setenv(variable, value)
    with pytest.raises(PopxlError, match=message):
        popxl.Ir(replication="popdist")


def test_the_launchers_numbers_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, num_instances=2, num_total_replicas=4)
    ir = popxl.Ir(replication="popdist")
    ir.replication_factor = 3
    with ir.main_graph:
        popxl.variable(1.0) + 1
    with pytest.raises(PopxlError, match="has 4 replicas, of which 3 are this process's"):
        popxl.Session(ir, "ipu_model")


def test_commands_show_the_program_of_an_instance(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`poprun … popxl show` lays out the replicas of its own instance, and waits for no other."""
    set_environment(monkeypatch, num_instances=2, num_total_replicas=4)
    file = tmp_path / "train.py"
    file.write_text(
        "import popxl\nfrom popxl import ops\nir = popxl.Ir('popdist')\nwith ir.main_graph:\n"
        "    v = popxl.variable(1.0)\n    v += ops.collectives.replicated_all_reduce(v)\n"
        "popxl.Session(ir, 'ipu_model').run()\n"
    )
    assert main(["show", str(file)]) == 0
    assert "ReplicatedAllReduce(t, op=add, stride=1, group_size=4)" in capsys.readouterr().out
    assert main(["check", str(file)]) == 0
    assert "repeated reduction: `t` is the same on all replicas" in capsys.readouterr().out


def test_a_single_instance_needs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, num_total_replicas=3)
    ir = popxl.Ir(replication="popdist")
    with ir.main_graph:
        v = popxl.variable(1.0)
        ops.add_(v, ops.collectives.replicated_all_reduce(v))
    with popxl.Session(ir, "ipu_model") as session:
        session.run()
    assert session.get_tensor_data(v) == 4
