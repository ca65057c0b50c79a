"""Commands with a broken output pipe: `popxl show train.py | head` ends without an error, as other programs do.

The system ends a program that writes to such a pipe, with the signal SIGPIPE. Python ignores the signal and raises
`BrokenPipeError` instead: on printing, and again at the end, when the rest is flushed.
"""

from __future__ import annotations

import functools
import os
import select
import sys
from collections.abc import Callable
from typing import ParamSpec

P = ParamSpec("P")

BROKEN_PIPE_EXIT_CODE = 128 + 13
"""The exit code that shells report for a program ended by SIGPIPE."""

_OUTPUTS = (1, 2)  # file descriptors of standard output and standard error


def is_broken_pipe() -> bool:
    """Whether standard output or error is a pipe without reader."""
    return bool(_broken_outputs())


def exit_on_broken_pipe(main: Callable[P, int]) -> Callable[P, int]:
    """Decorate a command: broken output pipes end it quietly, with `BROKEN_PIPE_EXIT_CODE`.

    Example:
        >>> @exit_on_broken_pipe
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
                sys.stdout.flush()  # the last output; also that of argparse, which exits
        except BrokenPipeError:
            gone = _broken_outputs()
            if not gone:  # the error is from another pipe
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for output in gone:
                os.dup2(nowhere, output)  # for Python's final flush
            os.close(nowhere)
            return BROKEN_PIPE_EXIT_CODE

    return run


def _broken_outputs() -> list[int]:
    pipes = select.poll()
    for output in _OUTPUTS:
        pipes.register(output, 0)  # errors are always reported
    return [output for output, what in pipes.poll(0) if what & (select.POLLERR | select.POLLHUP)]
