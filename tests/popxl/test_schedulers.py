"""Processes that a scheduler has started: who they are, how they join, meet and end, and the numbers they compute."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jax._src.clusters import ClusterEnv

from popxl.errors import PopxlError
from runtime.poprun import main
from runtime.schedulers import scheduled

NAMES = ("SLURM_", "OMPI_", "KUBERNETES_", "JOB_COMPLETION_INDEX", "POPDIST_", "JAX_COORDINATOR", "TPU_")


def slurm(index: int = 0, count: int = 2, nodes: str = "localhost", local: int | None = None) -> dict[str, str]:
    """What Slurm sets for a task. The port that JAX uses follows from the number of the job."""
    return {
        "SLURM_JOB_ID": str(1000 + os.getpid()),
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_NTASKS": str(count),
        "SLURM_PROCID": str(index),
        "SLURM_LOCALID": str(index if local is None else local),
    }


def open_mpi(index: int = 0, count: int = 2) -> dict[str, str]:
    """What `mpirun` sets for a process."""
    return {
        "OMPI_MCA_orte_hnp_uri": f"{(1000 + os.getpid()) << 12}.0;tcp://127.0.0.1,10.148.0.1:34911",
        "OMPI_COMM_WORLD_SIZE": str(count),
        "OMPI_COMM_WORLD_RANK": str(index),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(index),
    }


@pytest.fixture(autouse=True)
def no_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(NAMES):
            monkeypatch.delenv(name)


def set_environment(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


def test_nobody_is_found_where_nobody_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert scheduled(8) is None
    set_environment(monkeypatch, slurm(count=1))  # a single task has nobody to join
    assert scheduled(8) is None
    set_environment(monkeypatch, slurm())
    monkeypatch.setenv("POPDIST_SCHEDULER", "none")
    assert scheduled(8) is None


def test_what_slurm_says(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, slurm(5, 8, "node[012-015],other", local=1))
    instance = scheduled(32)
    assert instance is not None
    assert (instance.instance_index, instance.num_instances, instance.local_instance_index) == (5, 8, 1)
    assert (instance.num_total_replicas, instance.num_local_replicas, instance.replica_offset) == (32, 4, 20)
    host, _, port = instance.coordinator.partition(":")
    assert host == "node012" == instance.host and 60000 < int(port) < 65536
    assert not instance.is_single_host and instance.launcher == ""


def test_what_slurm_says_of_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process has some stages of its replicas, as by `poprun`; also where poprun knows no number of replicas."""
    set_environment(monkeypatch, slurm(5, 8))
    instance = scheduled(2, 8)
    assert instance is not None and instance.share == (0, 2, 5, 1)
    instance = scheduled(2, 8, 1)
    assert instance is not None and instance.share == (1, 1, 2, 2)
    with pytest.raises(SystemExit):
        main(["--ipus-per-replica=8", "--adjacent-replicas=3", "python"])
    assert main(["--ipus-per-replica=8", "--adjacent-replicas=8", "no-such-program"]) == 127


def test_what_open_mpi_says(monkeypatch: pytest.MonkeyPatch) -> None:
    set_environment(monkeypatch, open_mpi(1))
    instance = scheduled()
    assert instance is not None and instance.is_single_host
    assert (instance.instance_index, instance.num_instances, instance.num_total_replicas) == (1, 2, 2)


def test_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PopxlError, match="POPDIST_SCHEDULER is 'slurm', and this process was not started by it"):
        scheduled(8, name="slurm")
    monkeypatch.setenv("POPDIST_SCHEDULER", "lsf")
    with pytest.raises(PopxlError, match="POPDIST_SCHEDULER is 'lsf'; expected auto, none, slurm, k8s"):
        scheduled(8)
    monkeypatch.delenv("POPDIST_SCHEDULER")
    set_environment(monkeypatch, slurm(0, 3))
    with pytest.raises(ValueError, match="8 replicas cannot be shared out evenly among the 3 processes of slurm"):
        scheduled(8)
    with pytest.raises(ValueError, match="1 replicas of 4 devices cannot be shared out evenly among the 3 processes"):
        scheduled(1, 4)
    monkeypatch.setenv("SLURM_PROCID", "first")
    with pytest.raises(PopxlError, match="'slurm' has started this process, and does not say who it is"):
        scheduled(6)


def test_poprun_says_what_does_not_fit(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    set_environment(monkeypatch, slurm(0, 3))
    with pytest.raises(SystemExit):
        main(["--num-replicas=8", sys.executable, "-c", "pass"])
    assert "8 replicas cannot be shared out evenly among the 3 processes" in capsys.readouterr().err


def test_poprun_starts_its_own_where_it_is_told_to(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """On one node of several, say; or where the scheduler is not to be asked."""
    set_environment(monkeypatch, slurm(1, 8))
    program = "import os; print(os.environ['POPDIST_INSTANCE_INDEX'], os.environ['POPDIST_NUM_INSTANCES'])"
    for option, expected in (("--num-instances=1", "0 1"), ("--scheduler=none", "0 1")):
        assert main([option, sys.executable, "-c", program]) == 0
        assert capfd.readouterr().out.strip() == expected


PROGRAM = """
import atexit, sys, time
import numpy as np
import popdist, popxl
from popxl import ops

# Between the end of the program and JAX's own, by which the process leaves the others: the first one waits for it.
atexit.register(lambda: time.sleep(popdist.getInstanceIndex()))
popdist.init(*map(int, sys.argv[1:]))
ir = popxl.Ir("popdist", axes={"data": 2, "tensor": 2})
with ir.main_graph, popxl.in_sequence():
    into, out = popxl.h2d_stream((3,), popxl.float32), popxl.d2h_stream((3,), popxl.float32)
    x = ops.host_load(into)
    t = ops.collectives.replicated_all_reduce(x, group="tensor")
    d = ops.collectives.replicated_all_reduce(x, group="data")
    ops.host_store(out, t + 100 * d)
    drawn, described = popxl.d2h_stream((3,), popxl.float32), popxl.initial.normal((4, 3), seed=5)
    ops.host_store(drawn, popxl.variable(described, replica_grouping=ir.replica_grouping(group_size=1)))
first = popdist.getReplicaIndexOffset()
with popxl.Session(ir, "ipu_model") as session:
    outputs = session.run({into: np.arange(12, dtype=np.float32).reshape(4, 3)[first : first + 2]})
    rows = outputs[out]
np.testing.assert_array_equal(outputs[drawn], described.numbers()[first : first + 2])
assert popdist.execute_on_instances({1}, int, "7", base=8) == (None, 7)[popdist.getInstanceIndex()]
print(popdist.getInstanceIndex(), rows.tolist())
"""


def run_all(environments: list[dict[str, str]], command: list[str]) -> list[tuple[int, str, str]]:
    """Processes with these environments, all at once: exit code, output and errors of each."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(NAMES)}
    clean |= {"PYTHONPATH": str(Path(__file__).parents[2]), "POPXL_CPU_DEVICES": "2", "JAX_PLATFORMS": "cpu"}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command, env=clean | own, **pipes) for own in environments]
    try:
        said = [process.communicate(timeout=120) for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, out, err) for process, (out, err) in zip(started, said, strict=True)]


def test_kubernetes_is_asked_for_an_indexed_job_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any pod knows where Kubernetes is; one of an indexed job is one of several processes."""

    class Job:
        is_env_present = staticmethod(lambda: True)
        get_process_count = staticmethod(lambda: 4)
        get_process_id = staticmethod(lambda: 3)
        get_local_process_id = staticmethod(lambda: None)
        get_coordinator_address = staticmethod(lambda timeout, port: "train-0.jaxpods:55527")

    Job.__name__ = "K8sCluster"
    monkeypatch.setattr(ClusterEnv, "_cluster_types", [*ClusterEnv._cluster_types, Job])
    assert scheduled(8) is None
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "3")
    instance = scheduled(8)
    assert instance is not None
    assert (instance.instance_index, instance.num_instances, instance.num_local_replicas) == (3, 4, 2)
    assert instance.coordinator == "train-0.jaxpods:55527"


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["poprun in Open MPI", "popdist in Slurm"])
def test_they_join_and_compute(how: str) -> None:
    is_slurm = how == "popdist in Slurm"
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), "4"]
    if not is_slurm:
        command = [sys.executable, "-m", "runtime.poprun", "--num-replicas=4", *command[:-1]]
    found = run_all([(slurm if is_slurm else open_mpi)(index) for index in range(2)], command)
    x = [[3 * r + i for i in range(3)] for r in range(4)]

    def expected(r: int) -> list[float]:
        return [float(x[r][i] + x[r ^ 1][i] + 100 * (x[r][i] + x[r ^ 2][i])) for i in range(3)]

    for index, (code, out, err) in enumerate(found):
        assert code == 0, err
        assert out.splitlines()[-1] == f"{index} {[expected(r) for r in (2 * index, 2 * index + 1)]}"


STAGES = """
import sys
import numpy as np
import popdist, popxl
from popxl import ops

if len(sys.argv) > 1:
    popdist.init(num_replicas=2, num_ipus_per_replica=4)
ir = popxl.Ir("popdist", axes={"ipu": "ipus", "data": 2})
with ir.main_graph, popxl.in_sequence():
    into, out = popxl.h2d_stream((3,), popxl.float32), popxl.d2h_stream((3,), popxl.float32)
    with popxl.ipu(0):
        x = ops.host_load(into)
    for number in range(4):
        with popxl.ipu(number):
            w = popxl.variable(np.arange(3.0) + number, popxl.float32, f"w{number}")
            x = ops.collectives.replicated_all_reduce(x + w, "mean", group="data") + x
            x = x.copy_to_ipu(number + 1) if number < 3 else x
    with popxl.ipu(3):
        ops.host_store(out, x)
with popxl.Session(ir, "ipu_model") as session:
    rows = session.run({into: np.arange(6, dtype=np.float32).reshape(2, 3)})[out]
print(popdist.getInstanceIndex(), session.program.layout.own_ipus, rows.tolist())
"""


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["poprun in Open MPI", "popdist in Slurm"])
def test_each_has_stages(how: str) -> None:
    is_slurm = how == "popdist in Slurm"
    command = [sys.executable, "-c", textwrap.dedent(STAGES), "init"]
    if not is_slurm:
        options = ["--num-replicas=2", "--ipus-per-replica=4", "--adjacent-replicas=2"]
        command = [sys.executable, "-m", "runtime.poprun", *options, *command[:-1]]
    found = run_all([(slurm if is_slurm else open_mpi)(index, 4) for index in range(4)], command)
    rows = np.arange(6.0).reshape(2, 3)
    for number in range(4):
        rows = np.mean(rows + np.arange(3.0) + number, axis=0) + rows
    for index, (code, out, err) in enumerate(found):
        assert code == 0, err
        assert out.splitlines()[-1] == f"{index} ({index},) {rows.tolist()}"


@pytest.mark.thorough
def test_processes_that_do_different_things() -> None:
    """Each says why, also one that takes its time: the end of the first one, which has the service, would end it."""
    program = """
        import sys, time
        import popdist
        popdist.init()
        from runtime import processes

        def late(*problem):
            time.sleep(popdist.getInstanceIndex())
            sys.__excepthook__(*problem)

        sys.excepthook = late
        processes.barrier(f"place {popdist.getInstanceIndex()}")
    """
    found = run_all([slurm(index) for index in range(2)], [sys.executable, "-c", textwrap.dedent(program)])
    for code, _, err in found:
        assert code == 1 and "others wait elsewhere" in err and "Instance 1 is at place 1." in err, err
