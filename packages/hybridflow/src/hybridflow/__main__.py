"""Runs the command line as `python -m hybridflow`."""

import sys

from hybridflow.cli import main

if __name__ == "__main__":
    sys.exit(main())
