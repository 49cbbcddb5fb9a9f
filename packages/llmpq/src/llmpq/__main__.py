"""Runs the command line as `python -m llmpq`."""

import sys

from llmpq.cli import main

if __name__ == "__main__":
    sys.exit(main())
