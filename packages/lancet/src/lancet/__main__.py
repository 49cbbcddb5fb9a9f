"""Runs the command line, also as `python -m lancet`."""

import sys

from shared.cli.entry_point import run_program


def main() -> int:
    """Runs the command line and returns its exit status."""
    return run_program("lancet")


if __name__ == "__main__":
    sys.exit(main())
