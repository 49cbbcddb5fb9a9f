"""Runs the command line as `python -m swift`."""

import sys

from swift.cli import main

if __name__ == "__main__":
    sys.exit(main())
