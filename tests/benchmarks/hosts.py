"""What grows with the number of hosts, as far as one machine can tell: nothing runs on a device.

    python -m tests.benchmarks.hosts                        # a thousand instances meet, by lines to one launcher
    python -m tests.benchmarks.hosts --targets "tpu v5e:2x4" "tpu v5e:16x16"    # and what is handed out to hosts

An instance is a socket here, not a process: what is measured is the launcher. The program that is compiled is a layer
divided along an axis of 8, with its gradient reduced along the other.
"""

from __future__ import annotations

import argparse
import json
import resource
import socket
import tempfile
import time
from pathlib import Path

import popxl
from runtime.rendezvous import RendezvousServer
from tests.popxl.test_communication import training

SAID = "127.0.0.1:65535"
"""What instances say where JAX's processes find each other: an address."""


def meeting(count: int) -> dict[str, float]:
    """So many instances come to one place, and are answered: CPU seconds, of both ends, and bytes of an answer."""
    begun = time.process_time()
    rendezvous = RendezvousServer(count, 120.0, "127.0.0.1", "token", lambda index: None)
    lines = []
    for index in range(count):
        line = socket.create_connection(("127.0.0.1", rendezvous.port), timeout=120)
        come = {"index": index, "place": "the beginning", "payload": SAID}
        line.sendall(b"token\n" + json.dumps(come).encode() + b"\n")
        lines.append(line)
    sizes = []
    for line in lines:
        with line, line.makefile("rb") as file:
            answer = file.readline()
        assert len(json.loads(answer)["payload"]) == count
        sizes.append(len(answer))
    rendezvous.close()
    return {
        "CPU, s": time.process_time() - begun,
        "bytes of an answer": max(sizes),
    }


def handed_out(target: str) -> dict[str, float]:
    """A program compiled for a target, and as a file: CPU seconds, and megabytes."""
    chips = popxl.Target(target).count
    ir = training(chips // 8, 8, 256)
    begun = time.process_time()
    session = popxl.Session(ir, target)
    compiled = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "program.session"
        session.save(file)
        size = file.stat().st_size
    return {"compiled, s": compiled - begun, "file, MB": size / 1e6, "per chip, kB": size / 1e3 / chips}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", nargs="+", type=int, default=[10, 100, 1000])
    parser.add_argument("--targets", nargs="*", default=[], help='machines, such as "tpu v5e:16x16"')
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 1 << 16), most))  # two files for each instance
    for count in options.instances:
        print(f"{count} instances:", {name: round(value, 3) for name, value in meeting(count).items()}, flush=True)
    for target in options.targets:
        print(f"{target}:", {name: round(value, 2) for name, value in handed_out(target).items()}, flush=True)


if __name__ == "__main__":
    main()
