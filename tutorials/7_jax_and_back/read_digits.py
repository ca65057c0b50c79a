"""Reads the digits that were held back for testing, with a network that another process
has trained and saved.

    python tutorials/7_jax_and_back/read_digits.py FILE

FILE is a saved session. jax_and_back.py makes one, and starts this program.
"""

import sys
import time
from pathlib import Path

import numpy as np

import popxl
from ternary import Ternary

# digits.py is shared by the tutorials
sys.path.append(str(Path(__file__).resolve().parents[1]))
from digits import load


def main() -> None:
    print("declared here:", Ternary)
    start = time.perf_counter()
    session = popxl.Session.load(sys.argv[1])
    print(f"ready after {time.perf_counter() - start:.2f} s")

    _, digits = load()
    (image_stream,) = session.expected_inputs()
    with session:
        (scores,) = session.run({image_stream: digits.images}).values()
    print(f"accuracy: {100 * np.mean(scores.argmax(axis=-1) == digits.labels):.2f}%")


if __name__ == "__main__":
    main()
