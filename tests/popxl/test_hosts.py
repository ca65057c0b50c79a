"""Two network namespaces are two hosts: what is started on both computes the numbers of one process.

A pair of virtual network cards joins them. Each has its own name and its own loopback address, and reaches the other
one by its name only. The files are the same. Linux lets any user make such namespaces, unless the machine forbids it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.popxl.shared_programs import PROGRAMS, REPLICAS
from tests.popxl.test_processes import check_equal
from tests.popxl.test_schedulers import NAMES, slurm

ROOT = Path(__file__).parents[2]

SETUP = """
set -e
mount --bind "$FOLDER/hosts" /etc/hosts
hostname node0
ip link set lo up
mkfifo "$FOLDER/ready"
unshare -nu sh -c 'hostname node1 && ip link set lo up && echo ready > "$FOLDER/ready" && exec sleep 1000' &
FAR=$!
export FAR
trap 'kill $FAR' EXIT
read -r _ < "$FOLDER/ready"
ip link add near type veth peer name far netns $FAR
ip addr add 10.77.0.1/24 dev near
ip link set near up
nsenter -t $FAR -n -u sh -ec 'ip addr add 10.77.0.2/24 dev far; ip link set far up'
"$@"
"""
"""Runs a command on the host `node0`. The processes of `node1` have what the process `$FAR` has."""

SSH = '#!/bin/sh\n[ "$3" = node1 ] || exit 255\nexec nsenter -t $FAR -n -u sh -c "$4"\n'

EACH_ON_ITS_HOST = """
env $OF_FIRST "$@" &
nsenter -t $FAR -n -u env $OF_SECOND "$@" && wait $!
"""

PROGRAM = f"""
import sys
from pathlib import Path
import popdist
popdist.init({REPLICAS})
from tests.popxl.shared_programs import main
main(Path(sys.argv[1]), *sys.argv[2:])
"""

MANY = ("training", "sharded variables", "pipeline", "checkpoint in pieces")


def on_two_hosts(folder: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command on the first of two hosts that are made for it."""
    (folder / "hosts").write_text("127.0.0.1 localhost\n10.77.0.1 node0\n10.77.0.2 node1\n")
    (folder / "ssh").write_text(SSH)
    (folder / "ssh").chmod(0o755)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(NAMES)}
    clean |= {"PYTHONPATH": str(ROOT), "PATH": f"{folder}:{os.environ['PATH']}", "FOLDER": str(folder)}
    arguments = ["unshare", "-rnum", "sh", "-c", SETUP, "two_hosts", *command]
    return subprocess.run(arguments, env=clean | environment, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    """A folder for two hosts, where there can be any."""
    try:
        done = on_two_hosts(tmp_path, "true")
    except FileNotFoundError as missing:
        pytest.skip(f"no network namespaces: {missing}")
    if done.returncode:
        pytest.skip(f"no network namespaces: {done.stderr}")
    (tmp_path / "ready").unlink()
    return tmp_path


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["poprun --host", "popdist in Slurm"])
def test_two_hosts_compute_the_numbers_of_one_process(how: str, hosts: Path) -> None:
    command = [sys.executable, "-m", "tests.popxl.shared_programs", str(hosts), *MANY]
    environment = {"JAX_PLATFORMS": "cpu", "POPXL_CPU_DEVICES": "4"}
    if how == "poprun --host":
        options = ["--num-instances=2", f"--num-replicas={REPLICAS}", "--host=node0,node1", "-xJAX_PLATFORMS"]
        command = [sys.executable, "-m", "runtime.poprun", *options, *command]
    else:
        for number, name in enumerate(("OF_FIRST", "OF_SECOND")):
            told = slurm(number, nodes="node[0-1]", local=0)
            environment[name] = " ".join(f"{key}={value}" for key, value in told.items())
        command = ["sh", "-ec", EACH_ON_ITS_HOST, "each", sys.executable, "-c", PROGRAM, *command[3:]]
    done = on_two_hosts(hosts, *command, **environment)
    assert done.returncode == 0, done.stderr
    results = [np.load(hosts / f"{index}.npz") for index in range(2)]
    for name in MANY:
        known, own = PROGRAMS[name](REPLICAS, lambda data: data)
        for key, value in known.items():
            for found in results:
                check_equal(found[f"{name}/known/{key}"], value, f"{name}: {key}")
        for key, value in own.items():
            joined = np.concatenate([found[f"{name}/own/{key}"] for found in results])
            check_equal(joined, value, f"{name}: {key}")
    for found, address in zip(results, ("10.77.0.1", "10.77.0.2"), strict=True):
        assert address in found["listening"], "each exchanges data at the address of its own host"
