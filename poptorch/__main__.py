"""`python -m poptorch options` prints a page in Markdown: every option with its effect, if it has one."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from poptorch.options import options_page
from popxl.extend.processes import exit_on_broken_pipe


@exit_on_broken_pipe
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the documentation page selected on the command line."""
    parser = argparse.ArgumentParser(prog="python -m poptorch", description=__doc__)
    parser.add_argument("page", choices=["options"], metavar="options", help="the page to print")
    parser.parse_args(arguments)
    print(options_page(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
