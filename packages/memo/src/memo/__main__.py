"""Runs the command line as `python -m memo`."""

import sys

from memo.cli import main

if __name__ == "__main__":
    sys.exit(main())
