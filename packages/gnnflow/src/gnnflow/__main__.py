"""Runs the command line as `python -m gnnflow`."""

import sys

from gnnflow.cli import main

if __name__ == "__main__":
    sys.exit(main())
