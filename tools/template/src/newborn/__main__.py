"""Runs the command line as `python -m newborn`."""

import sys

from newborn.cli import main

if __name__ == "__main__":
    sys.exit(main())
