"""Pipelines whose stages are in different processes: losses, variables and checkpoints are those of one process."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from popxl.base.distributed import Share
from tests.popxl_addons.staged_training import SCHEDULES

ROOT = Path(__file__).parents[2]


@pytest.mark.thorough(but_each=100)
@pytest.mark.parametrize(
    ("instances", "ipus", "replicas", "options", "names"),
    [
        (2, 2, 1, (), ("gpipe", "various")),
        (2, 4, 1, (), ("1f1b:remote", "zero_bubble_v")),
        (4, 2, 2, (), (*SCHEDULES, "gpipe:pieces", "1f1b:remote pieces", "various")),
        (4, 2, 4, ("--adjacent-replicas=4",), ("1f1b:pieces", "dualpipe_v:remote")),
        (4, 2, 4, ("--adjacent-replicas=2",), ("search",)),
        (8, 4, 2, (), (*SCHEDULES, "zero_bubble:remote pieces")),
    ],
)
def test_the_numbers_of_one_process(instances, ipus, replicas, options, names, tmp_path):
    program = [sys.executable, "-m", "tests.popxl_addons.staged_training"]
    folders = [tmp_path / str(count) for count in (instances, 1)]
    for count, folder, others in ((instances, *folders), (1, *reversed(folders))):
        folder.mkdir()
        command = [sys.executable, "-m", "runtime.poprun", f"--num-instances={count}", f"--num-replicas={replicas}"]
        command += [f"--ipus-per-replica={ipus}", *options, *program, str(folder), str(others), *names]
        environment = {name: value for name, value in os.environ.items() if name != "POPXL_CPU_DEVICES"}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500)
        assert done.returncode == 0, done.stderr
    alone = np.load(folders[1] / "0.npz")
    adjacent = next((int(option.rpartition("=")[2]) for option in options), replicas)
    for index in range(instances):
        found = np.load(folders[0] / f"{index}.npz")
        share = Share.of(index, instances, replicas, ipus, adjacent)
        own = slice(share.first_replica, share.first_replica + share.replicas)
        assert {*found} == {*alone} and len(alone) > 2
        for key, value in alone.items():
            expected = value[:, own] if "losses" in key else value
            assert found[key].tobytes() == expected.tobytes(), (index, key)
