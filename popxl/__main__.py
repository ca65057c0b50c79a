"""The command `popxl`: the contents and needs of a program, without a change to the program.

popxl show train.py --layers 12      builds the program, compiles and runs nothing
popxl check train.py                 builds it, and checks what its replicas have in common
popxl report train.py --layers 12    runs the program, and reports on each of its sessions
popxl --version                      the versions of what programs run with, and the devices that there are

With `--target "tpu v5e:4x4"` programs are compiled for a machine that need not be present, and nothing is run.
"""

import sys

from runtime.command import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
