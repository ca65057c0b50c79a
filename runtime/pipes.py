"""Commands whose output nobody reads on: `popxl show train.py | head` ends quietly, as other programs do.

The system ends a program that writes to such a pipe, with the signal SIGPIPE. Python ignores the signal and raises
`BrokenPipeError` instead: where something is printed, and once more at the end, where the rest is written.
"""

from __future__ import annotations

import functools
import os
import select
import sys
from collections.abc import Callable
from typing import ParamSpec

P = ParamSpec("P")

NOBODY_READS = 128 + 13
"""The exit code then: what a shell says of a program that SIGPIPE has ended."""

_OUTPUTS = (1, 2)  # the file descriptors of the standard output, and of that for errors


def nobody_reads() -> bool:
    """Whether the standard output, or that for errors, is a pipe whose reader has gone."""
    return bool(_without_reader())


def quiet_in_a_pipe(main: Callable[P, int]) -> Callable[P, int]:
    """A command that ends quietly once nobody reads what it prints. Its exit code is `NOBODY_READS` then.

    Example:
        >>> @quiet_in_a_pipe
        ... def main(arguments=None):
        ...     print(*range(1_000_000), sep="\\n")
        ...     return 0
    """

    @functools.wraps(main)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            try:
                return main(*args, **kwargs)
            finally:
                sys.stdout.flush()  # what is printed last; also by argparse, which exits
        except BrokenPipeError:
            gone = _without_reader()
            if not gone:  # it is another pipe
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for output in gone:
                os.dup2(nowhere, output)  # for what Python writes at its end
            os.close(nowhere)
            return NOBODY_READS

    return run


def _without_reader() -> list[int]:
    pipes = select.poll()
    for output in _OUTPUTS:
        pipes.register(output, 0)  # errors are always told
    return [output for output, what in pipes.poll(0) if what & (select.POLLERR | select.POLLHUP)]
