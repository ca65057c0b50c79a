"""A training whose processes are killed at random moments: `poprun --max-restarts` brings it to the same end.

python -m tests.popxl_addons.killed_training --kills 50
python -m tests.popxl_addons.killed_training --kills 10 --stages 2 --steps 200

Four processes train, each a replica, or a stage of a replica, and write a checkpoint every third step, every other one
while they train on. Whenever they have trained for a random moment, one of them is killed. In the end the loss of each
step, each time that it was made, is that of a training that nobody killed, bit for bit.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]

REPLICAS = """
    import numpy as np
    import popxl
    import popxl_addons as addons
    from popxl import ops

    ir = popxl.Ir("popdist")
    with ir.main_graph, popxl.in_sequence():
        stream = popxl.h2d_stream((5, 3), popxl.float32, "x")
        x = ops.host_load(stream)
        facts = addons.NamedVariableFactories(w=addons.VariableFactory(lambda: np.ones((3, 2)), popxl.float32))
        state = facts.init()
        y = ops.tanh(x @ state.w)
        share = x.T @ (y * (1 - y * y))
        gradient = ops.collectives.replicated_all_reduce(share, "mean")
        ops.scaled_add_(state.w, gradient, b=-0.1)
        loss = addons.host_store(ops.collectives.replicated_all_reduce(ops.sum(y), "mean"))
    session = addons.TaskSession([stream], [loss], state, ir=ir, device_desc="ipu_hw")
    first = popdist.getReplicaIndexOffset()

    def losses_of(step):
        data = np.random.default_rng(step).normal(size=(4, 5, 3)).astype(np.float32)
        own = data[first : first + ir.instance_replication_factor]
        return session.run({stream: own.reshape(session.host_shape((5, 3)))})[loss]
"""
"""A training with a replica in each process."""

STAGES = """
    from tests.popxl_addons.staged_training import Training

    training = Training("1f1b", popdist.getNumIpusPerReplica(), memory="remote pieces")
    session = training.session()

    def losses_of(step):
        return training.step(session, step)
"""
"""A training with a stage of a replica in each process."""

PROGRAM = """
    import os, sys
    from pathlib import Path
    import popdist
    {training}
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    index = popdist.getInstanceIndex()
    session.max_checkpoints = 2
    session.add_session_state_info({{"step": 0}})
    if (folder / "state").exists():
        session.load_checkpoint(folder / "state")
    (folder / f"pid{{index}}").write_text(str(os.getpid()))
    with session:
        while session.session_state["step"] < steps:
            step = session.session_state["step"]
            found = losses_of(step)
            if index == 0:
                with open(folder / "losses", "a") as file:
                    file.write(f"{{step}} {{float(found.flat[0]).hex()}}\\n")
            session.session_state["step"] = step + 1
            if step % 3 == 2:
                session.save_checkpoint(folder / "state", wait=step % 2 == 0)
"""


def train(folder: Path, steps: int, kills: int, seed: int = 0, limit: float = 3600, stages: int = 1) -> int:
    """Train, and kill one of the processes so many times. Returns how many were killed before the training ended."""
    command = [sys.executable, "-m", "runtime.poprun", "--num-instances=4", f"--num-replicas={4 // stages}"]
    command.append(f"--ipus-per-replica={stages}")
    command += [f"--max-restarts={2 * kills}", sys.executable, str(folder / "program.py"), str(folder), str(steps)]
    draw = random.Random(seed)
    killed, end = 0, time.monotonic() + limit
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, cwd=ROOT) as process:
        while process.poll() is None:
            lives = [folder / f"pid{i}" for i in range(4)]
            if killed < kills and all(path.exists() for path in lives):
                time.sleep(draw.uniform(0, 2))
                numbers = [int(path.read_text()) for path in lives]
                for path in lives:
                    path.unlink()
                try:
                    os.kill(draw.choice(numbers), signal.SIGKILL)
                    killed += 1
                except ProcessLookupError:
                    break  # the training has ended
            time.sleep(0.05)
            if time.monotonic() > end:
                process.kill()
                raise TimeoutError(f"The training did not end in {limit} seconds.")
        if process.wait():
            raise RuntimeError(f"poprun ended with the exit code {process.returncode}.")
    return killed


def losses(folder: Path) -> dict[int, set[str]]:
    """The losses of each step, as often as it was made."""
    found = collections.defaultdict(set)
    for line in (folder / "losses").read_text("utf-8").splitlines():
        step, _, loss = line.partition(" ")
        found[int(step)].add(loss)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, help="how many steps to train (default: 300 for each kill)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--stages", type=int, choices=(1, 2), default=1, help="of each replica (default: 1)")
    options = parser.parse_args()
    steps = options.steps or 300 * options.kills
    with tempfile.TemporaryDirectory() as undisturbed, tempfile.TemporaryDirectory() as disturbed:
        for place in (undisturbed, disturbed):
            write(Path(place), options.stages)
        train(Path(undisturbed), steps, kills=0, stages=options.stages)
        killed = train(Path(disturbed), steps, options.kills, options.seed, stages=options.stages)
        expected, found = losses(Path(undisturbed)), losses(Path(disturbed))
    assert found == expected and len(expected) == steps, "the losses differ"
    print(f"{killed} kills, {steps} steps: the losses are the same")


def write(folder: Path, stages: int = 1) -> None:
    """Put the program into a folder."""
    text = PROGRAM.format(training=REPLICAS if stages == 1 else STAGES)
    (folder / "program.py").write_text(textwrap.dedent(text), "utf-8")


if __name__ == "__main__":
    main()
