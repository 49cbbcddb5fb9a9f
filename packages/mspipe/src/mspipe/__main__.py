"""Runs the command line as `python -m mspipe`."""

import sys

from mspipe.cli import main

if __name__ == "__main__":
    sys.exit(main())
