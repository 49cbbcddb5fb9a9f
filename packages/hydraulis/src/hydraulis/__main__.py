"""Runs the command line as `python -m hydraulis`."""

import sys

from hydraulis.cli import main

if __name__ == "__main__":
    sys.exit(main())
