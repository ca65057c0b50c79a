"""`python -m poptorch options` prints a page in Markdown: every option with its effect here, or that it has none."""

from __future__ import annotations

import argparse

from poptorch.options import options_page


def main() -> None:
    """Print the page that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m poptorch", description=__doc__)
    parser.add_argument("page", choices=["options"])
    parser.parse_args()
    print(options_page(), end="")


if __name__ == "__main__":
    main()
